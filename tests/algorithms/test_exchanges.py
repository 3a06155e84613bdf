"""What a round is made of beyond one exchange: full passes, second samples, client states,
compressed uploads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsso import (
    SCAFFOLD,
    FedAvg,
    FedDANE,
    Federation,
    FedNL,
    FedPer,
    InputError,
    load_run,
    simulate,
)
from fedsso.algorithm import Algorithm, Cohort, Local, Objective, Phase, Reply, none
from fedsso.algorithm.contract import weighted_mean
from fedsso.algorithm.records import hyper, param, swept
from fedsso.algorithm.schedule import Step
from fedsso.algorithms import ALGORITHMS, make, name_of
from fedsso.data import quadratic
from fedsso.engine import checkpoint, gather
from fedsso.engine.gather import Chunk, Gather
from fedsso.engine.rounds import Rounds
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import run
from fedsso.experiment.costs import costs
from fedsso.experiment.plan import settings_of
from fedsso.experiment.stepper import Simulation
from fedsso.objective import looped
from fedsso.support.trees import Scalar, leaves

BASE: dict[str, Any] = {
    "rounds": 4,
    "local_steps": 3,
    "batch_size": 4,
    "dtype": "float64",
    "device": "cpu",
}


def simulation(
    fed: Federation, record: Algorithm, model: Any = "mclr", **options: Any
) -> Simulation:
    full = {**BASE, **options}
    return Simulation(fed, model, [record], **full)


def chunk(fed: Federation, clients: Sequence[int], k: int = 1, **protocol: Any) -> Chunk:
    rounds = Rounds(fed, Settings(**{"batch_size": 4, **protocol}))
    n = len(clients)
    return Chunk(
        Gather(fed, torch.float64),
        rounds,
        k,
        np.array(clients),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
    )


# ---- full passes and draws ----


@pytest.mark.parametrize("budget", [1, 300, 10**9])
@pytest.mark.parametrize("batch_size", [4, None])
def test_a_full_pass_sees_every_row_once(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, budget: int, batch_size: int | None
) -> None:
    monkeypatch.setitem(gather.BUDGET, "cpu", budget)
    clients = [4, 0, 2]
    pieces = [
        (b.x.clone(), b.weight.clone()) for b in chunk(fed, clients, batch_size=batch_size).full()
    ]
    for m, client in enumerate(clients):
        rows = fed.x[fed.rows_of(client)].double()
        seen = torch.cat([x[m][w[m] > 0] for x, w in pieces])
        assert torch.equal(seen.sort(0).values, rows.sort(0).values)
        assert sum(float(w[m].sum()) for _, w in pieces) == pytest.approx(1, abs=1e-14)


def test_a_full_pass_and_mini_batches_do_not_disturb_each_other(fed: Federation) -> None:
    rounds = Rounds(fed, Settings(batch_size=4))
    both = Chunk(
        Gather(fed, torch.float64),
        rounds,
        1,
        np.array([0, 4]),
        np.zeros(2, np.int64),
        np.array([2, 2]),
    )
    first = both.batch(0).x.clone()
    whole = next(both.full()).x.clone()
    assert torch.equal(both.batch(0).x, first)
    assert torch.equal(next(both.full()).x, whole)


def test_draws_belong_to_client_purpose_and_round(fed: Federation) -> None:
    together, alone = chunk(fed, [0, 3]).uniform("labels", 5), chunk(fed, [3]).uniform("labels", 5)
    assert torch.equal(together[1], alone[0])
    assert ((together > 0) & (together < 1)).all()
    others = (
        together[0],
        chunk(fed, [3]).uniform("rows", 5)[0],
        chunk(fed, [3], k=2).uniform("labels", 5)[0],
    )
    assert all(not torch.equal(alone[0], other) for other in others)


# ---- cohorts ----


def test_a_second_sample_is_another_one(fed: Federation) -> None:
    rounds = Rounds(fed, Settings(participation=0.4))
    first, second = (
        [rounds.plan(k, sample).chosen.tolist() for k in range(1, 20)] for sample in (0, 1)
    )
    assert first != second
    assert all(len(chosen) == 2 for chosen in second)


def test_feddane_sends_the_model_again_only_to_newcomers(fed: Federation) -> None:
    sim = simulation(fed, FedDANE(alpha=0.01), participation=0.4)
    d = 15 * 8
    for k in range(1, 8):
        first, second = (set(sim.rounds.plan(k, sample).chosen.tolist()) for sample in (0, 1))
        sim.round()
        assert sim.rows[-1]["bytes_down"].item() == d * (2 + 2 + len(second - first))
        assert sim.rows[-1]["bytes_up"].item() == d * 4


def test_who_is_slow_is_slow_for_the_whole_round(fed: Federation) -> None:
    rounds = Rounds(fed, Settings(stragglers=0.5))
    assert all(torch.equal(rounds.plan(k).steps, rounds.plan(k, 1).steps) for k in range(1, 9))


@pytest.mark.parametrize("name", [name for name, cls in ALGORITHMS.items() if cls.needs_all])
@pytest.mark.parametrize("absent", [{"participation": 0.5}, {"drop_rate": 0.1}])
def test_an_algorithm_that_needs_everybody_is_refused(
    make_fed: Any, name: str, absent: dict[str, Any]
) -> None:
    fed = make_fed(classes=2)
    if ALGORITHMS[name]().asks() == "rows":  # for models with one output
        absent = {**absent, "loss": "bce", "l2": 0.1}
    variant = ALGORITHMS[name].needs_all
    assert not ALGORITHMS[variant].needs_all
    with pytest.raises(InputError, match=f"needs all clients in every round.*or {variant}"):
        simulate(fed, "mclr", name, rounds=1, **absent)
    assert simulate(fed, "mclr", variant, rounds=1, **absent).diverged is None


def test_stragglers_are_no_absentees(fed: Federation) -> None:
    assert simulate(fed, "mclr", FedNL(), stragglers=0.5, **BASE).diverged is None


# ---- a maximum beside the mean ----


class Pair(NamedTuple):
    mean: torch.Tensor
    most: torch.Tensor


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_maximum_is_over_all_clients_however_they_are_cut(cut: int) -> None:
    """Weights 1/2, 1/4, 1/8, 1/8 of the values 4, -8, 8, 16: the mean is 3, the maximum 16; of a
    trial with a NaN both are NaN."""
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    values = torch.tensor([[4.0, 1.0], [-8.0, torch.nan], [8.0, 1.0], [16.0, 1.0]]).unsqueeze(-1)
    phase = Phase(lambda s: s, lambda *_: Reply(()), lambda *_: (), largest=("most",))
    parts = [
        phase.over_clients(weights[part], Pair(values[part], values[part]))
        for part in (slice(0, cut), slice(cut, 4))
    ]
    found = phase.together(*parts)
    assert (float(found.mean[0]), float(found.most[0])) == (3.0, 16.0)
    assert found.mean[1].isnan()
    assert found.most[1].isnan()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_something_else_than_the_mean_is_added_up_over_the_clients(cut: int) -> None:
    """Here the mean of squares: 8 + 16 + 8 + 32. Without a word it is the mean: 2 - 2 + 1 + 2."""
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    values = torch.tensor([4.0, -8.0, 8.0, 16.0])[:, None, None]

    def squares(shares: Tensor, uploads: Tensor) -> Tensor:
        return weighted_mean(shares, uploads**2)

    plain = Phase(lambda s: s, lambda *_: Reply(()), lambda *_: ())
    for phase, expected in ((plain, 3.0), (plain._replace(average=squares), 64.0)):
        parts = [
            phase.over_clients(weights[part], values[part])
            for part in (slice(0, cut), slice(cut, 4))
        ]
        assert float(phase.together(*parts)) == expected


# ---- client states ----


def test_only_those_who_answer_change_their_state(fed: Federation) -> None:
    sim = simulation(fed, SCAFFOLD(alpha=0.05), participation=0.4)
    start = sim.own[0]
    assert all(own is start for own in sim.own)  # one tensor until a client's first round
    for k in range(1, 6):
        before = list(sim.own)
        answered = set(sim.rounds.plan(k).answered.tolist())
        sim.round()
        changed = {i for i in range(fed.clients) if sim.own[i] is not before[i]}
        assert changed == answered


def test_a_clients_state_has_memory_of_its_own(fed: Federation) -> None:
    """A view of the cohort's states would keep all of them alive."""
    sim = simulation(fed, SCAFFOLD(alpha=0.05), compress="int8")
    run(sim, 2)
    kept = [leaf for own in sim.own for leaf in leaves(own)] + list(sim.errors.values())
    assert len(kept) == 3 * fed.clients
    assert all(
        leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size() for leaf in kept
    )


@hyper
class Relay(Algorithm):
    """Two exchanges: clients count in the first what they were sent, and report in the second."""

    step: int = param(default=1, doc="what is added")

    class State(NamedTuple):
        x: Tensor
        seen: Tensor

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (
            Phase(
                self.broadcast, self.count, lambda server, _mean, _cohort: server, self.local_steps
            ),
            Phase(lambda server: (server.x, server.seen), self.report, self.collect, none),
        )

    def server_init(self, x: Tensor) -> State:
        return self.State(x, x.new_zeros(x.shape[0], 1))

    def client_init(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 1)

    def count(self, f: Objective, x: Tensor, own: Tensor, local: Local) -> Reply:  # noqa: ARG002
        return Reply((), own + self.step)

    def report(
        self,
        f: Objective,  # noqa: ARG002
        message: tuple[Tensor, Tensor],  # noqa: ARG002
        own: Tensor,
        local: Local,  # noqa: ARG002
    ) -> Reply:
        return Reply(own, own)

    def collect(self, server: State, mean: Tensor, cohort: Cohort) -> State:
        assert cohort.steps == 0
        return self.State(server.x + mean, mean)


def test_a_state_written_in_one_exchange_is_read_in_the_next(fed: Federation) -> None:
    sim = simulation(fed, Relay())
    run(sim, 3)
    assert sim.server.seen.item() == pytest.approx(
        3, abs=1e-14
    )  # every client has counted three rounds
    torch.testing.assert_close(sim.models(), torch.full((1, 15), 6.0, dtype=torch.float64))
    assert (
        sim.position.tolist() == [9] * 5
    )  # three steps of the first exchange alone, in each round
    assert sim.rows[-1]["bytes_down"].item() == 5 * (15 + 1) * 8  # x goes once
    assert sim.rows[-1]["bytes_up"].item() == 5 * 8


def test_a_round_ends_with_an_exchange_that_nobody_answers(fed: Federation) -> None:
    sim = simulation(fed, Relay(), drop_rate=0.999999)
    run(sim, 2)
    assert not sim.models().any()
    assert sim.rows[-1]["bytes_up"].item() == 0
    assert sim.rows[-1]["bytes_down"].item() == 5 * 15 * 8


# ---- personal models ----


def test_each_client_is_tested_with_its_own_model(fed: Federation, tmp_path: Path) -> None:
    done = simulate(fed, "mlp", FedPer(alpha=0.1), metrics=["auc"], eval_train=True, **BASE)
    assert done.personal is not None
    table = done.clients()
    share = table["test_rows"] / table["test_rows"].sum()
    assert (table["accuracy"] * share).sum() == pytest.approx(done.final(), abs=1e-12)
    assert (table["loss"] * share).sum() == pytest.approx(done.final("test_loss"), rel=1e-12)
    assert len({tuple(row) for row in done.personal.tolist()}) == fed.clients
    torch.testing.assert_close(done.x, (fed.p[:, None] * done.personal).sum(0))
    done.save(tmp_path / "run")
    again = load_run(tmp_path / "run", federation=fed)
    assert again.personal is not None
    assert torch.equal(again.personal, done.personal)
    assert again.clients().equals(table)


# ---- compressed uploads ----


def test_error_feedback_by_hand() -> None:
    """One client, f = |x - b|^2 / 2 with b = (4, 2, 1), alpha = 1/2, one step, the larger third of
    the update is sent.

    Round 1   update (2, 1, 1/2), sent (2, 0, 0); x = (2, 0, 0), left over (0, 1, 1/2)
    Round 2   update (1, 1, 1/2) and the rest: (1, 2, 1), sent (0, 2, 0); x = (2, 2, 0),
              left over (1, 0, 1)
    Round 3   update (1, 0, 1/2) and the rest: (2, 0, 3/2), sent (2, 0, 0); x = (4, 2, 0),
              left over (0, 0, 3/2)
    """
    fed = quadratic([torch.eye(3).tolist()], [[4, 2, 1]])
    wanted = [[2, 0, 0], [2, 2, 0], [4, 2, 0]]
    for rounds, x in enumerate(wanted, 1):
        options = {**BASE, "rounds": rounds, "local_steps": 1, "batch_size": None}
        done = simulate(fed, "linear", FedAvg(alpha=0.5), compress="topk:0.33", **options)
        assert done.x.tolist() == pytest.approx(x, abs=1e-14)
        assert done.trace["bytes_up"][1] == 8 + 4  # a number and its place


@pytest.mark.parametrize("compress", ["topk:0.1", "int8", "rank:1"])
@pytest.mark.parametrize("name", ["fedsso", "scaffold", "feddane", "fednl", "giant", "fedper"])
def test_compressed_stacked_equals_looped_and_sends_less(
    fed: Federation, name: str, compress: str
) -> None:
    model = "mlp" if name == "fedper" else "mclr"
    options = {**BASE, "batch_size": None, "compress": compress}
    plain = simulate(fed, model, name, **{**options, "compress": None})
    stacked, looped = (
        simulate(fed, model, name, engine=engine, **options) for engine in ("auto", "loop")
    )
    torch.testing.assert_close(stacked.x, looped.x, rtol=1e-8, atol=1e-9)
    np.testing.assert_array_equal(stacked.trace["bytes_up"], looped.trace["bytes_up"])
    assert 0 < stacked.trace["bytes_up"][1] < plain.trace["bytes_up"][1]
    np.testing.assert_array_equal(stacked.trace["bytes_down"], plain.trace["bytes_down"])
    assert not torch.equal(stacked.x, plain.x)


def test_what_is_lost_is_sent_later(fed: Federation) -> None:
    """What was sent and what is still owed make up what an uncompressed client would send."""
    sim = simulation(fed, Owed(), compress="topk:0.2")
    run(sim, 6)
    owed = sum(p * sim.errors[f"0.0.{i}"] for i, p in enumerate(fed.p))
    torch.testing.assert_close(
        sim.models() + owed, torch.arange(15.0, dtype=torch.float64).mul(6).unsqueeze(0)
    )
    assert sim.models().count_nonzero() > 3  # not the same three in every round


@hyper
class Owed(Algorithm):
    """Clients send the vector 0, 1, 2, ... in every round."""

    step: int = param(default=1, doc="unused")

    def server_init(self, x: Tensor) -> Relay.State:
        return Relay.State(x, x[:, :1])

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:  # noqa: ARG002
        return Reply(torch.arange(x.shape[-1]).to(x).expand(len(local.own_steps), *x.shape), own)

    def server(self, server: Relay.State, mean: Tensor, _: Cohort) -> Relay.State:
        return server._replace(x=server.x + mean)


@pytest.mark.parametrize("name", ["fedsso", "scaffold", "fedper"])
def test_a_compressed_run_resumes_to_the_bit(fed: Federation, name: str, tmp_path: Path) -> None:
    options = {"compress": "topk:0.1", "participation": 0.6, "dtype": "float32"}
    whole, first, second = (simulation(fed, make(name), "mlp", **options) for _ in range(3))
    run(whole, 6)
    run(first, 3)
    checkpoint.save(tmp_path / "c", first.state(), "id")
    second.restore(checkpoint.load(tmp_path / "c", "id"))
    run(second, 6)
    assert torch.equal(second.models(), whole.models())
    assert second.errors.keys() == whole.errors.keys()
    assert all(torch.equal(second.errors[name], e) for name, e in whole.errors.items())


@pytest.mark.parametrize("compress", ["topk:0.5", "int8"])
def test_what_an_algorithm_has_compressed_itself_is_left_alone(
    quad: Federation, compress: str
) -> None:
    """Six values of a Hessian are no vector of six parameters: server and clients learn the same
    matrix."""
    sim = simulation(quad, FedNL(compressor="topk:6"), "linear", batch_size=None, compress=compress)
    run(sim, 8)
    mean = sum(p * own[0] for p, own in zip(quad.p, sim.own, strict=True))
    torch.testing.assert_close(sim.server.H[0], mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("own", [7, 20])
def test_personal_layers_may_end_within_a_matrix(fed: Federation, own: int) -> None:
    done = simulate(fed, "mlp", FedPer(alpha=0.01, own=own), compress="rank:1", **BASE)
    assert done.diverged is None


@pytest.mark.parametrize("compress", ["topk:2", "topk", "int4", "rank:0", "zip", 3])
def test_wrong_compressors_are_refused(fed: Federation, compress: Any) -> None:
    with pytest.raises(InputError):
        simulate(fed, "mclr", compress=compress, **BASE)


def test_a_rank_that_saves_nothing_is_refused_before_anything_is_written(
    fed: Federation, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="rank:4"):
        simulate(fed, "mclr", compress="rank:4", out=tmp_path / "run", **BASE)
    assert not (tmp_path / "run").exists()


# ---- the loop ----


def test_divergence_within_the_first_round_is_seen(fed: Federation) -> None:
    done = simulate(fed, "mlp", FedAvg(alpha=1e6), **BASE)
    assert done.diverged == 1


def test_a_start_at_the_optimum_does_not_diverge() -> None:
    fed = quadratic([[[1.0]], [[2.0]]], [[3.0], [3.0]])
    done = simulate(
        fed,
        "linear",
        FedAvg(alpha=0.1),
        init=torch.tensor([3.0 + 1e-9]),
        **{**BASE, "batch_size": None},
    )
    assert done.diverged is None


def test_threads_are_as_before(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        simulate(fed, "mclr", progress=lambda *_: seen.append(torch.get_num_threads()), **BASE)
        assert seen == [1] * 4
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        simulate(fed, "mclr", progress=lambda *_: seen.append(torch.get_num_threads()), **BASE)
        assert seen[4:] == [2] * 4
    finally:
        torch.set_num_threads(before)


def test_batch_norm_with_full_passes(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows, three at a time, are 3 + 2 + 2: BatchNorm cannot take a single one."""
    monkeypatch.setitem(gather.BUDGET, "cpu", 200)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    done = simulate(
        fed, net, make("giant", {"mu": 1.0}), rounds=2, batch_size=5, dtype="float64", device="cpu"
    )
    assert done.diverged is None
    assert done.buffers.isfinite().all()


# ---- what a round asks for, found before it begins ----


def test_dropout_draws_anew_in_every_round(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no mini-batch is drawn; within a round a line search compares like with like."""
    seen: list[int] = []
    draw = looped.seeded

    def watched(key: int, device: torch.device) -> Any:
        seen.append(key)
        return draw(key, device)

    monkeypatch.setattr(looped, "seeded", watched)
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    simulate(fed, net, "giant", **{**BASE, "batch_size": None})
    trained = [key for key in seen if key > 0]
    assert len(set(trained)) >= 4 * fed.clients


def margin(z: Tensor, y: Tensor) -> Tensor:
    """A loss that torch cannot differentiate twice."""
    return nn.functional.multi_margin_loss(z, y, reduction="none")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if make(name).asks()])
def test_a_loss_that_cannot_do_what_is_asked_is_refused_at_once(
    fed: Federation, name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"second derivatives|loss"):
        simulate(fed, "mclr", name, loss=margin, out=tmp_path / "run", **BASE)
    assert not (tmp_path / "run").exists()
    assert simulate(fed, "mclr", "feddane", loss=margin, **BASE).diverged is None


def test_states_beyond_the_machines_memory_are_refused(make_fed: Any) -> None:
    fed = make_fed(sizes=[8] * 3000, dim=784, classes=10)
    with pytest.raises(
        InputError, match=r"FedNL keeps 74\d GB at the server and 3000 clients.*use fedsso"
    ):
        simulate(fed, "mclr", FedNL(), rounds=1, device="cpu")


class Fickle(Relay):
    """Its clients keep nothing at first."""

    def client_init(self, x: Tensor) -> tuple[()]:  # type: ignore[override]  # noqa: ARG002
        return ()

    def count(self, f: Objective, x: Tensor, own: Any, local: Local) -> Reply:  # noqa: ARG002
        return Reply((), x.new_zeros(len(local.own_steps), *x.shape[:1], 1))


def test_a_state_that_changes_its_shape_is_refused(fed: Federation) -> None:
    with pytest.raises(
        InputError, match=r"Fickle: a client keeps \['own'\], but client_init gave it \[\]"
    ):
        simulate(fed, "mclr", Fickle(), **BASE)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: make("giant", {"tol": 1e300}),
        lambda: make("fedadam", {"eps": 1e300}),
        lambda: make("anderson", {"m": 10**15}),
        lambda: make("ldsgd", {"I2": 10**30}),
        lambda: make("fedsophia", {"T": 10**30}),
        lambda: make("fedsso", {"pairs": 10**30}),
        lambda: make("fednl", {"compressor": "rank:" + "9" * 400}),
        lambda: Settings.of({"local_steps": 10**30}),
        lambda: Settings.of({"eval_every": 10**40}),
        lambda: Settings.of({"compress": "rank:" + "9" * 5000}),
        lambda: costs("mclr", ["fedavg"], sample=(10**9, 10**9, 10**9)),
    ],
)
def test_huge_values_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError):
        wrong()


def test_compression_can_be_switched_off() -> None:
    assert Settings.of({"compress": "none"}).compress is None


def test_an_own_class_does_not_take_a_registered_name() -> None:
    @hyper
    class FedAvg(Owed):
        """Another one."""

    assert name_of(FedAvg()) == "own-fedavg"
    assert name_of(Owed()) == "owed"


def test_types_that_are_no_text_are_swept_too() -> None:
    """As in a module without `from __future__ import annotations`."""
    assert swept(_made(Scalar)()) == swept(_made(Step)()) == ["alpha"]
    assert swept(_made(float)()) == []


def _made(hint: Any) -> type:
    return hyper(
        type(
            "Own",
            (Algorithm,),
            {"__annotations__": {"alpha": hint}, "alpha": param(default=1.0, doc="")},
        )
    )


def test_an_option_of_the_algorithm_is_pointed_out() -> None:
    with pytest.raises(InputError, match=r"FedAvg\(alpha=\.\.\.\)"):
        settings_of({"alpha": 0.3})


def test_a_run_of_an_unregistered_class_is_not_saved(fed: Federation, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not registered"):
        simulate(fed, "mclr", Owed(), **BASE).save(tmp_path / "run")
    assert not (tmp_path / "run").exists()
