"""The engine: its draws, its mean, its evaluation, its ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from fedsso import FedAvg, Federation, FedSGD, FedSSO, InputError, Run, compare, simulate
from fedsso.engine.evaluate import PIECE
from fedsso.engine.gather import Chunk, Gather
from fedsso.engine.metrics import accuracy, auc, f1, metric
from fedsso.engine.rounds import Ints, Plan, Rounds
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.objective import unravel_into

MakeFederation = Callable[..., Federation]
BASE: dict[str, Any] = {
    "rounds": 4,
    "local_steps": 2,
    "batch_size": 4,
    "dtype": "float64",
    "device": "cpu",
}


def same(a: Plan, b: Plan) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def batch(rounds: Rounds, client: int, step: int) -> Ints:
    """Rows of one mini-batch."""
    rows: Ints = rounds.batches(client, step, 1)[0]
    return rows


def simulation(fed: Federation, **options: Any) -> Simulation:
    full = {**BASE, **options}
    return Simulation(fed, "mclr", [FedAvg(alpha=0.1)], **full)


# --- draws
# --------------------------------------------------------------------------------------------------
def test_draws_are_pure_functions(fed: Federation) -> None:
    protocol = Settings(batch_size=4, participation=0.6, drop_rate=0.2, stragglers=0.5, seed=3)
    forward, backward = Rounds(fed, protocol), Rounds(fed, protocol)
    order = [(k, i) for k in range(1, 9) for i in range(fed.clients)]
    seen = {(k, i): (forward.plan(k), batch(forward, i, 5 * k).copy()) for k, i in order}
    for k, i in reversed(order):
        plan, rows = backward.plan(k), batch(backward, i, 5 * k)
        assert same(plan, seen[k, i][0])
        assert np.array_equal(rows, seen[k, i][1])
    other = Rounds(
        fed, Settings(batch_size=4, participation=0.6, drop_rate=0.2, stragglers=0.5, seed=4)
    )
    assert not all(same(other.plan(k), forward.plan(k)) for k in range(1, 9))


def test_options_do_not_move_each_others_draws(fed: Federation) -> None:
    """Turning stragglers or drop-outs on leaves the cohorts and the mini-batches as they were."""
    plain = Rounds(fed, Settings(batch_size=4, participation=0.6))
    busy = Rounds(
        fed, Settings(batch_size=4, participation=0.6, drop_rate=0.4, stragglers=0.5, local_steps=9)
    )
    for k in range(1, 10):
        assert torch.equal(plain.plan(k).chosen, busy.plan(k).chosen)
        assert np.array_equal(batch(plain, 1, k), batch(busy, 1, k))


@pytest.mark.parametrize(
    ("participation", "size"), [(1.0, 5), (0.8, 4), (0.5, 2), (0.3, 2), (0.01, 1)]
)
def test_cohort_sizes(fed: Federation, participation: float, size: int) -> None:
    rounds = Rounds(fed, Settings(participation=participation))
    chosen = [rounds.plan(k).chosen for k in range(1, 60)]
    assert all(len(c) == len(set(c.tolist())) == size for c in chosen)
    counts = torch.cat(chosen).bincount(minlength=5)
    assert (counts > 0).all()
    expected = 59 * size / 5
    assert ((counts - expected).abs() <= 5 * expected**0.5).all()


def test_drop_outs_and_stragglers_come_as_often_as_asked(make_fed: MakeFederation) -> None:
    fed = make_fed(sizes=[4] * 50)
    rounds = Rounds(fed, Settings(drop_rate=0.3, stragglers=0.4, local_steps=5))
    plans = [rounds.plan(k) for k in range(1, 201)]
    answered = sum(len(p.answered) for p in plans)
    assert answered / (200 * 50) == pytest.approx(0.7, abs=0.02)
    steps = Counter(torch.cat([p.steps for p in plans]).tolist())
    assert set(steps) == {1, 2, 3, 4, 5}
    for few in (1, 2, 3, 4):
        assert steps[few] / answered == pytest.approx(0.4 / 5, abs=0.012)
    assert steps[5] / answered == pytest.approx(0.6 + 0.4 / 5, abs=0.02)


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_every_row_is_seen_exactly_once_per_epoch(fed: Federation, size: int) -> None:
    rounds = Rounds(fed, Settings(batch_size=size))
    for i in range(fed.clients):
        own = sorted(fed.rows_of(i).tolist())
        per_epoch = -(-len(own) // min(size, len(own)))
        epochs = []
        for epoch in range(3):
            batches = [batch(rounds, i, epoch * per_epoch + b) for b in range(per_epoch)]
            assert all(len(b) == min(size, len(own)) for b in batches[:-1])
            rows = np.concatenate(batches).tolist()
            assert sorted(rows) == own
            epochs.append(rows)
        if per_epoch > 1 and len(own) > 6:
            assert epochs[0] != epochs[1]


def test_many_batches_at_once_are_the_same_as_one_by_one(fed: Federation) -> None:
    rounds, other = (Rounds(fed, Settings(batch_size=5)) for _ in range(2))
    for i in range(fed.clients):
        step = 0
        while step < 12:
            block = rounds.batches(i, step, 12 - step)
            assert 1 <= len(block) <= 12 - step
            for offset, rows in enumerate(block):
                assert np.array_equal(rows, batch(other, i, step + offset))
            step += len(block)


def test_batches_are_weighted_and_padded(fed: Federation) -> None:
    """Weights sum to one per client and step; padding has weight 0; a small client uses all its
    rows."""
    rounds = Rounds(fed, Settings(batch_size=6))
    clients = np.arange(fed.clients)
    local = Chunk(
        Gather(fed, torch.float64), rounds, 1, clients, np.zeros(5, np.int64), np.full(5, 4)
    )
    for j in range(4):
        seen = local.batch(j)
        assert seen.x.shape == (5, 6, 4)
        torch.testing.assert_close(seen.weight.sum(1), torch.ones(5).double(), rtol=1e-14, atol=0)
        for i in range(5):
            rows = batch(rounds, i, j)
            assert (seen.weight[i] > 0).sum() == len(rows)
            assert torch.equal(seen.x[i, : len(rows)], fed.x[rows])
            assert torch.equal(seen.y[i, : len(rows)], fed.y[rows])
            assert torch.equal(
                seen.weight[i, : len(rows)],
                torch.full((len(rows),), 1 / len(rows), dtype=torch.float64),
            )


def test_a_batch_larger_than_the_client_is_all_its_rows(fed: Federation) -> None:
    for size in (None, 1000):
        rounds = Rounds(fed, Settings(batch_size=size))
        for i in range(fed.clients):
            assert sorted(batch(rounds, i, 3).tolist()) == sorted(fed.rows_of(i).tolist())
    a, b = (
        simulate(fed, "mclr", FedAvg(alpha=0.1), **{**BASE, "batch_size": size})
        for size in (None, 1000)
    )
    assert torch.equal(a.x, b.x)


def test_local_epochs_give_every_client_its_own_number_of_steps(fed: Federation) -> None:
    rounds = Rounds(fed, Settings(batch_size=4, local_epochs=3))
    assert rounds.plan(1).steps.tolist() == [3 * -(-n // 4) for n in fed.train_sizes.tolist()]
    sim = simulation(fed, local_epochs=2, local_steps=None)
    run(sim, 3)
    assert sim.position.tolist() == [6 * -(-n // 4) for n in fed.train_sizes.tolist()]


def test_rows_are_widened_and_scaled(fed: Federation) -> None:
    pixels = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2)
    images = Federation.from_clients(
        [(pixels[:3], [0, 1, 0]), (pixels[3:], [1, 1, 0])], test_fraction=0
    )
    object.__setattr__(images, "affine", (2 / 255, -1.0))
    gather = Gather(images, torch.float32)
    x, y = gather(torch.tensor([[4, 0], [1, 1]]))
    assert x.shape == (2, 2, 1, 2, 2)
    torch.testing.assert_close(x[0, 0], pixels[4] / 127.5 - 1, rtol=1e-6, atol=1e-7)
    assert y.tolist() == [[1, 0], [1, 1]]
    wide, _ = Gather(fed, torch.float32)(torch.tensor([3]))
    assert wide.dtype == torch.float32


# --- rounds
# --------------------------------------------------------------------------------------------------
def test_positions_persist_and_move_only_for_those_who_answer(fed: Federation) -> None:
    sim = simulation(fed, participation=0.6, drop_rate=0.3, stragglers=0.5, local_steps=4)
    expected = np.zeros(fed.clients, np.int64)
    for k in range(1, 9):
        plan = sim.rounds.plan(k)
        expected[plan.answered.numpy()] += plan.steps.numpy()
        run(sim, k)
        assert sim.position.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1


def test_two_rounds_see_consecutive_batches(fed: Federation) -> None:
    """FedSGD by hand: a gradient per client and round, batches 0, 1, 2 of each client's stream."""
    rounds = Rounds(fed, Settings(batch_size=4))
    W, b = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for k in range(3):
        dW, db = torch.zeros_like(W), torch.zeros_like(b)
        for i, p in enumerate(fed.p):
            rows = batch(rounds, i, k)
            e = torch.softmax(fed.x[rows] @ W.mT + b, 1) - F.one_hot(fed.y[rows], 3)
            dW += p * e.mT @ fed.x[rows] / len(rows)
            db += p * e.mean(0)
        W, b = W - 0.5 * dW, b - 0.5 * db
    x = simulate(fed, "mclr", FedSGD(alpha=0.5), **{**BASE, "rounds": 3}).x
    torch.testing.assert_close(x, torch.cat([W.flatten(), b]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("algorithm", [FedAvg(alpha=0.1), FedSSO(alpha=0.1), FedSGD(alpha=0.1)])
def test_a_round_that_nobody_answers_keeps_the_model_and_is_recorded(
    fed: Federation, algorithm: FedAvg | FedSSO | FedSGD
) -> None:
    options = {**BASE, "rounds": 12, "participation": 0.2, "drop_rate": 0.6}
    plans = Rounds(fed, Settings(participation=0.2, drop_rate=0.6))
    silent = np.array([False] + [len(plans.plan(k).answered) == 0 for k in range(1, 13)])
    assert 3 <= silent.sum() <= 10
    trace = simulate(fed, "mclr", algorithm, **options).trace
    assert len(trace) == 13
    assert (trace["bytes_up"][silent] == 0).all()
    assert (trace["bytes_down"][1:] == 15 * 8).all()
    assert np.isnan(trace["train_loss"][silent]).all()
    assert np.isnan(trace["grad_norm"][silent]).all()
    assert np.isfinite(trace["train_loss"][1:][~silent[1:]]).all()
    for k in np.flatnonzero(silent):
        assert trace["test_loss"][k] == trace["test_loss"][k - 1]
    moved = ~silent[1:]
    assert (np.diff(trace["test_loss"])[moved] != 0).all()


def test_the_first_rounds_may_be_silent_and_checkpointed(fed: Federation, tmp_path: Any) -> None:
    options = {**BASE, "rounds": 12, "participation": 0.2, "drop_rate": 0.9}
    assert len(Rounds(fed, Settings(participation=0.2, drop_rate=0.9)).plan(1).answered) == 0
    kept = simulate(
        fed, "mclr", FedSSO(alpha=0.1), out=tmp_path / "run", checkpoint_every=1, **options
    )
    assert torch.equal(kept.x, simulate(fed, "mclr", FedSSO(alpha=0.1), **options).x)


def test_weights_are_renormalised_over_those_who_answer(quad: Federation) -> None:
    """One round of FedAvg with one step: x = sum w_i alpha A_i b_i with w = p / sum p over the
    cohort."""
    options = {
        **BASE,
        "batch_size": None,
        "local_steps": 1,
        "rounds": 1,
        "participation": 0.5,
        "seed": 5,
    }
    chosen = Rounds(quad, Settings(participation=0.5, seed=5)).plan(1).answered
    assert len(chosen) == 2
    x = simulate(quad, "linear", FedAvg(alpha=0.1), **options).x
    pull = torch.zeros(6, dtype=torch.float64)
    for i in chosen.tolist():
        rows = quad.rows_of(i)
        pull += quad.p[i] / quad.p[chosen].sum() * 0.1 * 2 / 6 * quad.x[rows].mT @ quad.y[rows]
    torch.testing.assert_close(x, pull, rtol=1e-12, atol=1e-14)


def test_a_cohort_without_weight_moves_nothing(make_fed: MakeFederation) -> None:
    fed = make_fed(sizes=[8, 8, 8], weights=[1.0, 0.0, 0.0])
    plans = Rounds(fed, Settings(participation=0.3))
    light = np.array([0 not in plans.plan(k).answered.tolist() for k in range(1, 9)])
    assert 0 < light.sum() < 8
    result = simulate(fed, "mclr", FedAvg(alpha=0.1), **{**BASE, "rounds": 8, "participation": 0.3})
    assert result.diverged is None
    assert ((np.diff(result.trace["test_loss"]) == 0) == light).all()


def test_an_interrupted_round_never_began(fed: Federation) -> None:
    calls = Counter[str]()

    def flaky(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        calls["metric"] += 1
        if calls["metric"] == 5:  # after the trial on two rows: the evaluation of round 3
            raise KeyboardInterrupt
        return 0.0

    sim, whole = simulation(fed, metrics=(flaky,)), simulation(fed)
    with pytest.raises(KeyboardInterrupt):
        run(sim, 5)
    assert sim.k == 2
    assert len(sim.rows) == 3
    assert sim.position.tolist() == [4] * 5
    run(sim, 5)
    run(whole, 5)
    assert torch.equal(sim.server.x, whole.server.x)
    assert len(sim.rows) == len(whole.rows) == 6


@pytest.mark.parametrize("form", ["bfgs", "dfp", "lbfgs"])
def test_an_undone_round_leaves_the_pairs_of_a_full_ring(
    fed: Federation, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**BASE, "dtype": "float64", "rounds": 20}
    sim = Simulation(fed, "mclr", [FedSSO(form=form, pairs=3, m=3)] * 2, **options)
    run(sim, 9)
    assert sim.server.curvature.held.tolist() == [3, 3]
    with monkeypatch.context() as patch:
        patch.setattr(sim, "_judge", lambda *_: torch.tensor([True, False]))
        sim.round()
    assert sim.server.choice.undone[:, 0].tolist() == [0, 1]
    again = Simulation(fed, "mclr", [FedSSO(form=form, pairs=3, m=3)] * 2, **options)
    again.restore({name: value.clone() for name, value in sim.state().items()})
    for one in (sim, again):
        one.round()
        pairs = one.server.curvature
        slots = [(int(pairs.head[1]) - age) % pairs.store.shape[1] for age in (3, 2, 1)]
        s, y = pairs.store[1, slots, 0], pairs.store[1, slots, 1]
        torch.testing.assert_close((s @ y.T).triu(), pairs.gram[1, 0].triu(), rtol=1e-9, atol=0)
    assert torch.equal(sim.server.x, again.server.x)


@pytest.mark.parametrize("form", ["bfgs", "dfp", "lbfgs"])
def test_an_interrupted_round_leaves_a_full_ring_as_it_was(fed: Federation, form: str) -> None:
    """The store of pairs is written in place; taking the round again must not see it."""
    calls = Counter[str]()

    def flaky(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        calls["metric"] += 1
        if calls["metric"] == 9:  # after the trial on two rows: the evaluation of round 7
            raise KeyboardInterrupt
        return 0.0

    def begin(**options: Any) -> Simulation:
        full = {**BASE, **options}
        record = FedSSO(alpha=0.1, form=form, guard="none", pairs=3, m=3)
        return Simulation(fed, "mclr", [record], **full)

    sim, resumed, whole = begin(metrics=(flaky,)), begin(), begin()
    with pytest.raises(KeyboardInterrupt):
        run(sim, 12)
    assert sim.k == 6
    assert sim.server.curvature.held.tolist() == [3]
    resumed.restore({name: value.clone() for name, value in sim.state().items()})
    for one in (sim, resumed, whole):
        run(one, 12)
    for one in (sim, resumed):
        assert torch.equal(one.server.x, whole.server.x)
        assert all(
            torch.equal(a["grad_norm"], b["grad_norm"])
            for a, b in zip(one.rows[1:], whole.rows[1:], strict=True)
        )


# --- evaluation
# --------------------------------------------------------------------------------------------------
def test_evaluation_equals_a_hand_computation(fed: Federation) -> None:
    result = simulate(fed, "mlp", FedAvg(alpha=0.1), eval_train=True, **BASE)
    z = result.model(fed.x[fed.test_rows]).detach()
    y = fed.y[fed.test_rows]
    trace = result.trace
    assert trace["test_loss"][-1] == pytest.approx(float(F.cross_entropy(z, y)), rel=1e-12)
    assert trace["test_accuracy"][-1] == pytest.approx(
        float((z.argmax(1) == y).double().mean()), rel=1e-12
    )
    train = [
        float(F.cross_entropy(result.model(fed.x[rows]), fed.y[rows]).detach())
        for rows in (fed.rows_of(i) for i in range(fed.clients))
    ]
    assert trace["full_train_loss"][-1] == pytest.approx(
        float(fed.p @ torch.tensor(train, dtype=torch.float64)), rel=1e-12
    )
    assert trace["test_loss"][0] != trace["test_loss"][-1]


def test_evaluation_in_pieces(make_fed: MakeFederation) -> None:
    fed = make_fed(sizes=[4 * PIECE, 5000])
    assert len(fed.test_rows) > PIECE
    result = simulate(
        fed, "mclr", FedAvg(alpha=0.1), metrics=("auc", "f1"), **{**BASE, "rounds": 2}
    )
    z, y = result.model(fed.x[fed.test_rows]).detach(), fed.y[fed.test_rows]
    assert result.final("test_loss") == pytest.approx(float(F.cross_entropy(z, y)), rel=1e-12)
    expected = roc_auc_score(y, z.softmax(1), multi_class="ovr")
    assert result.final("test_auc") == pytest.approx(expected, rel=1e-12)
    assert result.final("test_f1") == pytest.approx(
        f1_score(y, z.argmax(1), average="macro"), rel=1e-12
    )


def test_own_weights_count_in_the_full_training_loss(make_fed: MakeFederation) -> None:
    fed = make_fed(sizes=[8, 20], weights=[0.9, 0.1])
    result = simulate(fed, "mclr", FedAvg(alpha=0.1), eval_train=True, **BASE)
    losses = [
        F.cross_entropy(result.model(fed.x[r]), fed.y[r]).detach() for r in map(fed.rows_of, (0, 1))
    ]
    assert result.final("full_train_loss") == pytest.approx(
        float(0.9 * losses[0] + 0.1 * losses[1]), rel=1e-12
    )


def test_the_running_loss_is_the_weighted_mean_of_the_mini_batch_losses(fed: Federation) -> None:
    """Round 1, tau = 2, by plain torch: the loss at x_1 and at the point after one step."""
    rounds = Rounds(fed, Settings(batch_size=4))
    total = 0.0
    for i, p in enumerate(fed.p):
        module = nn.Linear(4, 3).double()
        unravel_into(module, torch.zeros(15, dtype=torch.float64))
        losses = []
        for j in range(2):
            rows = batch(rounds, i, j)
            loss = F.cross_entropy(module(fed.x[rows]), fed.y[rows])
            losses.append(float(loss.detach()))
            grads = torch.autograd.grad(loss, list(module.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(module.parameters(), grads, strict=True):
                    parameter.sub_(0.5 * grad)
        total += float(p) * sum(losses) / 2
    trace = simulate(fed, "mclr", FedAvg(alpha=0.5), **BASE).trace
    assert trace["train_loss"][1] == pytest.approx(total, rel=1e-12)
    assert np.isnan(trace["train_loss"][0])


def test_eval_every(fed: Federation) -> None:
    often = simulate(fed, "mclr", FedAvg(alpha=0.1), **{**BASE, "rounds": 7})
    seldom = simulate(fed, "mclr", FedAvg(alpha=0.1), **{**BASE, "rounds": 7, "eval_every": 3})
    evaluated = [0, 3, 6, 7]
    assert np.flatnonzero(np.isfinite(seldom.trace["test_loss"])).tolist() == evaluated
    np.testing.assert_array_equal(
        seldom.trace["test_loss"][evaluated], often.trace["test_loss"][evaluated]
    )
    np.testing.assert_array_equal(seldom.trace["train_loss"], often.trace["train_loss"])
    assert torch.equal(often.x, seldom.x)


def test_stop_at_ends_each_trial_at_its_own_round(fed: Federation) -> None:
    records = [FedAvg(alpha=alpha) for alpha in (1e-4, 0.1, 0.5)]
    options = {**BASE, "rounds": 25}
    whole = compare(fed, "mlp", records, **options)
    target = 0.5
    hits = [run_.rounds_to(target) for run_ in whole]
    assert len(set(hits)) == 3
    for full, stopped, hit in zip(
        whole, compare(fed, "mlp", records, stop_at=target, **options), hits, strict=True
    ):
        length = 25 if hit is None else hit
        assert len(stopped.trace) == length + 1
        np.testing.assert_array_equal(
            stopped.trace["test_loss"], full.trace["test_loss"][: length + 1]
        )
        again: Run = simulate(fed, "mlp", full.spec.record, **{**options, "rounds": max(1, length)})
        torch.testing.assert_close(stopped.x, again.x, rtol=1e-12, atol=1e-14)


def test_a_federation_without_test_rows(make_fed: MakeFederation) -> None:
    fed = make_fed(sizes=[6, 6])
    bare = Federation.from_rows(fed.x, fed.y, [range(6), range(6, 12)], test_fraction=0)
    trace = simulate(bare, "mclr", FedAvg(alpha=0.1), **BASE).trace
    assert np.isnan(trace["test_accuracy"]).all()
    assert np.isfinite(trace["train_loss"][1:]).all()


def test_a_loss_that_explodes_counts_as_divergence(quad: Federation) -> None:
    """alpha = 3 > 2/L: the loss grows by a factor (1 - alpha L)^2 = 4 per step and stays finite for
    long."""
    options = {**BASE, "batch_size": None, "local_steps": 1}
    result = simulate(quad, "linear", FedAvg(alpha=3.0), **{**options, "rounds": 60})
    end = result.diverged
    assert end is not None
    losses = result.trace["train_loss"]
    assert losses[end] > 1e3 * losses[1] >= losses[end - 1]
    assert np.isnan(result.trace["test_loss"][end])
    assert np.isnan(result.trace["test_accuracy"]).all()  # there is none to be 0
    # the model of the round before has that loss already: if it is the last one, the evaluation
    # tells
    last = simulate(quad, "linear", FedAvg(alpha=3.0), **{**options, "rounds": end - 1})
    assert last.diverged == end - 1
    assert np.isnan(last.trace["test_loss"][end - 1])
    assert (
        simulate(quad, "linear", FedAvg(alpha=3.0), **{**options, "rounds": end - 2}).diverged
        is None
    )


def with_test_row(x: float, y: float, test: bool = True) -> Federation:
    """Rows of y = x in one column for training, and one other row for testing."""
    a = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    fed = Federation.from_arrays(
        torch.cat([a, a.new_tensor([[x]])]), [*a[:, 0].tolist(), y], [0] * 10, test_fraction=0
    )
    rows, start = torch.arange(10), torch.tensor([0, 9])
    held = {"test_rows": rows[9:], "test_start": start // 9} if test else {}
    return replace(fed, train_rows=rows[:9], train_start=start, **held)


def test_a_large_test_loss_beside_a_good_fit_is_no_divergence() -> None:
    """The fit y = x is 999 away from the row that is tested, the start y = 0 is 1 away."""
    result = simulate(
        with_test_row(1e3, 1.0), "linear", FedAvg(alpha=0.5), init=torch.zeros(1), **BASE
    )
    assert result.diverged is None
    assert result.final("test_loss") > 1e5
    assert result.trace["train_loss"][-1] < 0.01


def test_a_test_loss_that_is_no_number_is_a_divergence() -> None:
    """In float32, where the square of 1e30 is none."""
    options = {**BASE, "dtype": "float32", "rounds": 3}
    result = simulate(
        with_test_row(1e30, 0.0), "linear", FedAvg(alpha=0.5), init=torch.zeros(1), **options
    )
    assert result.diverged == 1


def test_without_test_rows_the_last_model_is_judged_by_the_training_rows() -> None:
    options = {**BASE, "batch_size": None, "local_steps": 1, "init": torch.zeros(1)}
    fed = with_test_row(
        0.0, 0.0, test=False
    )  # f has the second derivative 5/6: a step of 20 makes 245 of a loss of 1
    wild = [
        simulate(fed, "linear", FedAvg(alpha=20.0), **{**options, "rounds": k}).diverged
        for k in (1, 2, 3)
    ]
    assert wild == [None, 2, 3]  # or by the loss of the next round


@pytest.mark.parametrize("test_fraction", [0.25, 0.0])
def test_a_skewed_first_cohort_with_a_tiny_loss_is_no_divergence(test_fraction: float) -> None:
    """The start fits client 0 to nine digits; client 1, who comes later, it does not fit at all."""
    draw = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(2, 16, 3, generator=draw, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64),
    )
    fed = Federation.from_clients(
        [(x[0], x[0] @ w), (x[1], -x[1] @ w)], test_fraction=test_fraction
    )
    options = {**BASE, "participation": 0.5, "rounds": 8}
    seed = next(
        s
        for s in range(9)
        if Rounds(fed, Settings(participation=0.5, seed=s)).plan(1).chosen.tolist() == [0]
    )
    result = simulate(fed, "linear", FedAvg(alpha=0.01), init=w + 1e-9, seed=seed, **options)
    losses = result.trace["train_loss"]
    assert losses[1] < 1e-15
    assert np.nanmax(losses) > 1
    assert result.diverged is None


@pytest.mark.parametrize("eval_every", [1, 2])
def test_a_diverged_trial_has_the_same_trace_alone_and_among_others(
    fed: Federation, eval_every: int
) -> None:
    options = {**BASE, "rounds": 9, "eval_every": eval_every, "metrics": ("f1",)}
    sick = FedSSO(alpha=1e6, guard="none")
    alone = simulate(fed, "mlp", sick, **options)
    among = compare(fed, "mlp", [FedSSO(alpha=0.05, guard="none"), sick], **options)[1]
    end = alone.diverged
    assert end is not None
    assert end == among.diverged < 9
    for trace in (alone.trace, among.trace):
        assert len(trace) == 10
        assert not trace["test_accuracy"][end:].any()
        assert (trace["bytes_up"][1 : end + 1] > 0).all()
        assert not trace["bytes_up"][end + 1 :].any()
        assert not trace["bytes_down"][end + 1 :].any()
    assert list(alone.trace.columns) == list(among.trace.columns)
    for name in alone.trace.columns:
        if name not in ("trial", "seconds"):
            np.testing.assert_allclose(
                alone.trace[name], among.trace[name], rtol=1e-9, err_msg=name
            )


def test_a_start_that_reaches_stop_at_is_the_end(fed: Federation) -> None:
    first = simulate(fed, "mlp", FedAvg(), **BASE).trace["test_accuracy"][0]
    assert first > 0
    result = simulate(fed, "mlp", FedAvg(), stop_at=float(first), **BASE)
    assert len(result.trace) == 1
    assert result.rounds_to(first) == 0
    assert result.diverged is None


def test_fedsgd_scales_its_step_by_eta(fed: Federation) -> None:
    a, b = (
        simulate(fed, "mclr", record, **BASE)
        for record in (FedSGD(eta=0.5, alpha=0.3), FedSGD(alpha=0.15))
    )
    assert torch.equal(a.x, b.x)
    assert not torch.equal(a.x, simulate(fed, "mclr", FedSGD(alpha=0.3), **BASE).x)


# --- metrics
# --------------------------------------------------------------------------------------------------
def outputs(classes: int, seed: int = 0, rows: int = 60) -> tuple[Tensor, Tensor]:
    """Outputs of two trials with ties, and labels."""
    draw = torch.Generator().manual_seed(seed)
    z = (4 * torch.randn(2, classes, rows, generator=draw, dtype=torch.float64)).round() / 4
    return z, torch.randint(0, max(2, classes), (rows,), generator=draw)


@pytest.mark.parametrize("seed", range(3))
def test_auc_and_f1_of_one_output(seed: int) -> None:
    z, y = outputs(1, seed)
    for t in range(2):
        assert float(auc(z, y)[t]) == pytest.approx(roc_auc_score(y, z[t, 0]), rel=1e-12)
        assert float(f1(z, y)[t]) == pytest.approx(f1_score(y, z[t, 0] > 0), rel=1e-12)
        assert float(accuracy(z, y)[t]) == pytest.approx(
            float(((z[t, 0] > 0) == y.bool()).double().mean())
        )


@pytest.mark.parametrize("seed", range(3))
def test_auc_and_f1_of_two_classes(seed: int) -> None:
    z, y = outputs(2, seed)
    for t in range(2):
        assert float(auc(z, y)[t]) == pytest.approx(roc_auc_score(y, z[t, 1] - z[t, 0]), rel=1e-12)
        assert float(f1(z, y)[t]) == pytest.approx(f1_score(y, z[t].argmax(0)), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_auc_and_f1_of_many_classes(seed: int) -> None:
    z, y = outputs(4, seed)
    draw = torch.Generator().manual_seed(seed)
    z = z + 0.1 * torch.randn(
        z.shape, generator=draw, dtype=torch.float64
    )  # no ties: rounding would decide them
    z = z + torch.randn(
        2, 1, 60, generator=draw, dtype=torch.float64
    )  # a softmax does not see a shift of a row
    for t in range(2):
        share = z[t].softmax(0).mT
        assert float(auc(z, y)[t]) == pytest.approx(
            roc_auc_score(y, share, multi_class="ovr"), rel=1e-12
        )
        expected = f1_score(y, z[t].argmax(0), average="macro", labels=range(4), zero_division=0)
        assert float(f1(z, y)[t]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_auc_of_one_label_alone_is_undefined(classes: int) -> None:
    z, _ = outputs(classes)
    assert auc(z, torch.ones(60, dtype=torch.long)).isnan().all()


def test_auc_skips_classes_that_do_not_occur() -> None:
    z, y = outputs(4)
    y = y % 2
    share = z[0].softmax(0)
    expected = np.mean([roc_auc_score(y == c, share[c]) for c in (0, 1)])
    assert float(auc(z, y)[0]) == pytest.approx(expected, rel=1e-12)


def test_a_users_metric_sees_rows_first() -> None:
    z, y = outputs(3)
    name, compute = metric(lambda out, target: float((out[:, 0] * target).sum()))
    assert name == "<lambda>"
    expected = [(z[t, 0] * y).sum() for t in range(2)]
    torch.testing.assert_close(compute(z, y), torch.stack(expected), rtol=1e-14, atol=0)
    with pytest.raises(InputError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        metric("acuracy")


# --- errors
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"participation": 0.0}, r"participation.*in \(0, 1\].*participation=0.0"),
        ({"participation": 1.5}, r"participation.*in \(0, 1\].*participation=1.5"),
        ({"drop_rate": 1.0}, r"drop_rate.*in \[0, 1\).*drop_rate=1.0"),
        ({"stragglers": -0.1}, r"stragglers.*in \[0, 1\].*stragglers=-0.1"),
        ({"local_steps": 0}, r"local_steps.*integer >= 1.*local_steps=0"),
        ({"local_steps": None}, r"local_steps.*integer >= 1.*local_steps=None"),
        ({"local_epochs": 0}, r"local_epochs.*integer >= 1.*local_epochs=0"),
        ({"batch_size": 2.5}, r"batch_size.*integer >= 1.*batch_size=2.5"),
        ({"batch_size": True}, r"batch_size.*integer >= 1.*batch_size=True"),
    ],
)
def test_wrong_protocols_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**values)
