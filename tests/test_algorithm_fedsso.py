"""FedSSO against its definition: the paper's Algorithm 1, the forms of its matrix, the guard."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import Decay, FedAvg, Federation, FedSSO, InputError, Run, load, simulate, sweep
from fedsso import quasi_newton as qn
from fedsso.context import context
from fedsso.data import quadratic
from fedsso.engine.rounds import Protocol, Rounds
from fedsso.engine.simulate import Simulation, run
from fedsso.options import complete
from fedsso.schedule import at

EXACT: dict[str, Any] = {"model": "linear", "batch_size": None, "dtype": "float64", "device": "cpu"}
NOISY: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "dtype": "float64", "device": "cpu"}


def fly(fed: Federation, algorithm: FedSSO | FedAvg, rounds: int, **options: Any) -> Tensor:
    """The model after some rounds."""
    run_: Run = simulate(fed, algorithm=algorithm, rounds=rounds, **{**EXACT, **options})
    return run_.x


def one_dimension(a: list[float], b: list[float], p: list[float]) -> Federation:
    return quadratic([[[a_i]] for a_i in a], [[b_i] for b_i in b], p)


def stepwise(fed: Federation, algorithm: FedSSO, rounds: int, model: str = "mclr", **options: Any) -> list[Any]:
    """The server states before and after every round."""
    full = complete({**NOISY, **options})
    sim = Simulation(context(fed, model, full).job(full), [algorithm])
    states = [sim.server]
    for k in range(1, rounds + 1):
        run(sim, k)
        states.append(sim.server)
    return states


def mixed_quadratic(dim: int) -> tuple[Tensor, Tensor, Federation]:
    """H and c of f(x) = 1/2 x^T H x - c^T x, and the federation of it."""
    draw = torch.Generator().manual_seed(11)
    Q = torch.linalg.qr(torch.randn(3, dim, dim, generator=draw, dtype=torch.float64)).Q
    A = Q @ torch.diag(torch.linspace(0.1, 1, dim, dtype=torch.float64)) @ Q.mT
    A = (A + A.mT) / 2
    b = torch.randn(3, dim, generator=draw, dtype=torch.float64)
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    return torch.einsum("n,nij->ij", p, A), torch.einsum("n,nij,nj->i", p, A, b), quadratic(A, b, p)


def textbook_bfgs(H: Tensor, c: Tensor, x: Tensor, etas: list[float]) -> Tensor:
    """Centralised BFGS on the matrix B itself, one solve per iteration."""
    B = torch.eye(len(x), dtype=torch.float64)
    g = H @ x - c
    for eta in etas:
        s = -eta * torch.linalg.solve(B, g)
        x = x + s
        y = H @ x - c - g
        g = g + y
        B = B + torch.outer(y, y) / (y @ s) - torch.outer(B @ s, B @ s) / (s @ B @ s)
    return x


# --- the six checks of the specification ---------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["bfgs", "dfp", "lbfgs", "bfgs-dense", "dfp-dense"])
@pytest.mark.parametrize("R", [None, 2, 3])
def test_round_one_and_every_reset_round_is_a_plain_gradient_step(quad: Federation, form: str, R: int | None) -> None:
    algorithm = FedSSO(alpha=0.1, eta=0.7, R=R, guard="none", form=form)
    for k in [1] if R is None else [1, R, 2 * R]:
        x = fly(quad, algorithm, k - 1, local_steps=4) if k > 1 else torch.zeros(6, dtype=torch.float64)
        v = fly(quad, FedAvg(alpha=0.1), 1, local_steps=4, init=x)
        expected = x - 0.7 / (0.1 * 4) * (x - v)
        torch.testing.assert_close(fly(quad, algorithm, k, local_steps=4), expected, rtol=1e-12, atol=1e-13)


def test_after_a_reset_the_pair_is_dropped_and_x_and_g_are_kept(quad: Federation) -> None:
    """Round R + 1 uses exactly one pair, (x_{R+1} - x_R, g_{R+1} - g_R)."""
    algorithm = FedSSO(alpha=0.1, R=3, guard="none")
    states = stepwise(quad, algorithm, 5, "linear", batch_size=None)
    assert [int(state.curvature.held) for state in states] == [0, 0, 1, 0, 1, 2]
    before, after = states[3], states[4]
    s, y = before.s[0], (after.g - before.g)[0]
    I = torch.eye(6, dtype=torch.float64)
    B = I + torch.outer(y, y) / (y @ s) - torch.outer(s, s) / (s @ s)
    expected = before.x[0] - torch.linalg.solve(B, after.g[0])
    torch.testing.assert_close(after.x[0], expected, rtol=1e-12, atol=1e-13)


def test_the_worked_example_in_one_dimension() -> None:
    fed = one_dimension([1, 3, 0.5], [0, 2, -1], [0.5, 0.3, 0.2])
    algorithm = FedSSO(alpha=0.1, guard="none")
    start = torch.tensor([4.0])
    assert float(fly(fed, algorithm, 2, local_steps=5, init=start)) == pytest.approx(0.9085955704, abs=1e-10)
    assert float(fly(fed, algorithm, 2, local_steps=1, init=start)) == pytest.approx(1.1333333333, abs=1e-10)
    assert fed.optimum is not None
    assert float(fed.optimum) == pytest.approx(1.1333333333, abs=1e-10)


@pytest.mark.parametrize(("alpha", "tau"), [(0.02, 1), (0.05, 7), (0.3, 2), (0.5, 5)])
def test_in_one_dimension_the_second_step_hits_fedavgs_fixed_point(alpha: float, tau: int) -> None:
    a, b, p = [0.4, 1.7, 2.5, 1.1], [3.0, -1.0, 0.5, 2.0], [0.1, 0.2, 0.3, 0.4]
    fed = one_dimension(a, b, p)
    w = [p_i * (1 - (1 - alpha * a_i) ** tau) for a_i, p_i in zip(a, p, strict=True)]
    fixed = sum(w_i * b_i for w_i, b_i in zip(w, b, strict=True)) / sum(w)
    x = fly(fed, FedSSO(alpha=alpha, guard="none"), 2, local_steps=tau, init=torch.tensor([-2.0]))
    assert float(x) == pytest.approx(fixed, rel=1e-11)


@pytest.mark.parametrize(("eta", "tolerance"), [(1.0, 1e-12), (0.4, 1e-10)])
def test_one_local_step_is_centralised_bfgs(eta: float, tolerance: float) -> None:
    H, c, fed = mixed_quadratic(30)
    start = torch.linspace(-1, 1, 30, dtype=torch.float64)
    x = fly(fed, FedSSO(alpha=0.37, eta=eta, guard="none"), 20, local_steps=1, init=start)
    expected = textbook_bfgs(H, c, start, [eta] * 20)
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("low", "dense"), [("bfgs", "bfgs-dense"), ("dfp", "dfp-dense")])
@pytest.mark.parametrize(("lam", "Lam"), [(1e-4, 9999.0), (0.3, 0.7)])
def test_forms_agree_over_a_run(low: str, dense: str, lam: float, Lam: float) -> None:
    fed = load("synthetic", clients=4, dim=50, condition=20.0)
    runs = [
        simulate(
            fed, algorithm=FedSSO(alpha=0.1, eta=0.5, guard="none", form=form, lam=lam, Lam=Lam), rounds=50, **EXACT
        )
        for form in (low, dense)
    ]
    overridden = runs[0].trace["overridden"].sum()
    assert overridden >= 10 if lam > 0.1 else overridden == 0
    np.testing.assert_array_equal(runs[0].trace["overridden"], runs[1].trace["overridden"])
    assert float((runs[0].x - runs[1].x).norm() / runs[1].x.norm()) < 1e-10
    np.testing.assert_allclose(runs[0].trace["grad_norm"][1:], runs[1].trace["grad_norm"][1:], rtol=1e-7, atol=1e-12)


def test_without_curvature_and_with_eta_alpha_tau_it_is_fedavg(quad: Federation) -> None:
    """Rounds 1 and 2 of R = 2 use B = I: one has no pair, the other drops it."""
    for rounds in (1, 2):
        x = fly(quad, FedSSO(alpha=0.05, eta=0.05 * 6, R=2, guard="none"), rounds, local_steps=6)
        expected = fly(quad, FedAvg(alpha=0.05), rounds, local_steps=6)
        torch.testing.assert_close(x, expected, rtol=1e-14, atol=1e-15)


def test_bfgs_and_dfp_part_ways_in_round_two(quad: Federation) -> None:
    bfgs, dfp = (FedSSO(alpha=0.1, guard="none", form=form) for form in ("bfgs", "dfp"))
    assert torch.equal(fly(quad, bfgs, 1), fly(quad, dfp, 1))
    for rounds in (2, 3, 6):
        a, b = fly(quad, bfgs, rounds), fly(quad, dfp, rounds)
        assert float((a - b).norm() / a.norm()) > 1e-4
    line = one_dimension([1.0, 3.0], [0.0, 2.0], [0.5, 0.5])
    torch.testing.assert_close(fly(line, bfgs, 2), fly(line, dfp, 2), rtol=1e-13, atol=1e-14)


def test_a_window_of_all_pairs_without_scaling_differs_from_lbfgs(quad: Federation) -> None:
    """lbfgs starts from gamma I, so even with every pair it is another method; both reach the fixed point."""
    bfgs, lbfgs = (FedSSO(alpha=0.1, guard="none", form=form) for form in ("bfgs", "lbfgs"))
    assert not torch.allclose(fly(quad, bfgs, 3), fly(quad, lbfgs, 3), rtol=1e-3)
    torch.testing.assert_close(fly(quad, bfgs, 40), fly(quad, lbfgs, 40), rtol=1e-9, atol=1e-9)


# --- local steps, cohorts, schedules -------------------------------------------------------------------------------
def test_g_is_divided_by_the_weighted_mean_of_the_real_local_steps(quad: Federation) -> None:
    options: dict[str, Any] = {"local_steps": 6, "stragglers": 0.8, "seed": 4}
    plan = Rounds(quad, Protocol(batch_size=None, **options)).plan(1)
    assert len(set(plan.steps.tolist())) > 1
    tau = float(quad.p @ plan.steps.double())
    v = fly(quad, FedAvg(alpha=0.1), 1, **options)
    x = fly(quad, FedSSO(alpha=0.1, guard="none"), 1, **options)
    torch.testing.assert_close(x, v / (0.1 * tau), rtol=1e-12, atol=1e-14)  # x_1 = 0


def test_mean_steps_use_the_weights_of_those_who_answered(quad: Federation) -> None:
    options: dict[str, Any] = {"local_steps": 5, "stragglers": 0.9, "participation": 0.5, "seed": 2}
    plan = Rounds(quad, Protocol(batch_size=None, **options)).plan(1)
    assert len(set(plan.steps.tolist())) == 2
    p = quad.p[plan.answered] / quad.p[plan.answered].sum()
    v = fly(quad, FedAvg(alpha=0.1), 1, **options)
    x = fly(quad, FedSSO(alpha=0.1, guard="none"), 1, **options)
    torch.testing.assert_close(x, v / (0.1 * float(p @ plan.steps.double())), rtol=1e-12, atol=1e-14)


def test_schedules_of_both_steps() -> None:
    """With one local step alpha cancels from g, so the run is BFGS with eta_k whatever alpha_k is."""
    H, c, fed = mixed_quadratic(8)
    eta = Decay(2.0, 1.0, 0.5)
    start = torch.ones(8, dtype=torch.float64)
    expected = textbook_bfgs(H, c, start, [float(at(eta, k)) for k in range(1, 9)])
    for alpha in (0.1, Decay(0.5, 3.0)):
        x = fly(fed, FedSSO(alpha=alpha, eta=eta, guard="none"), 8, local_steps=1, init=start)
        torch.testing.assert_close(x, expected, rtol=1e-11, atol=1e-12)


def test_a_schedule_of_alpha_reaches_the_clients(quad: Federation) -> None:
    alpha = Decay(0.3, 1.0)
    x = torch.zeros(6, dtype=torch.float64)
    for k in (1, 2, 3):
        x = fly(quad, FedAvg(alpha=float(at(alpha, k))), 1, local_steps=4, init=x)
        torch.testing.assert_close(fly(quad, FedAvg(alpha=alpha), k, local_steps=4), x, rtol=1e-13, atol=1e-15)


def test_stacked_schedules_equal_single_ones(quad: Federation) -> None:
    records = [FedSSO(alpha=Decay(a, 2.0), eta=Decay(1.0, s, 0.5), guard="none") for a, s in ((0.1, 0.0), (0.4, 3.0))]
    together = sweep(quad, algorithms=records, rounds=6, **EXACT)
    for record, run_ in zip(records, together, strict=True):
        torch.testing.assert_close(run_.x, fly(quad, record, 6), rtol=1e-12, atol=1e-14)


# --- the guard -------------------------------------------------------------------------------------------------------
def test_the_guards_first_step_is_fedavgs(fed: Federation) -> None:
    options = {"model": "mlp", **NOISY}
    a = simulate(fed, algorithm=FedSSO(alpha=0.02), rounds=1, **options)
    b = simulate(fed, algorithm=FedAvg(alpha=0.02), rounds=1, **options)
    torch.testing.assert_close(a.x, b.x, rtol=1e-13, atol=1e-15)
    short = simulate(fed, algorithm=FedSSO(alpha=0.02, eta=0.03), rounds=1, **options)  # eta < alpha tau = 0.06
    start = simulate(fed, algorithm=FedAvg(alpha=1e-12), rounds=1, **options).x
    torch.testing.assert_close(short.x - start, (b.x - start) / 2, rtol=1e-7, atol=1e-10)


def test_the_step_stays_within_the_radius_and_the_radius_follows_its_rules(fed: Federation) -> None:
    """theta is the share of the slope that is left along the last step, 0 at a line minimum."""
    grown = shrunk = kept = 0
    for seed in range(3):
        states = stepwise(fed, FedSSO(alpha=0.05), 40, "mlp", seed=seed)
        for before, after in pairwise(states[1:]):
            theta = float((after.g * before.s).sum() / -(before.g * before.s).sum())
            r, new = float(before.guard.radius), float(after.guard.radius)
            length = float(after.s.norm())
            assert length <= new * (1 + 1e-12)
            assert bool(after.guard.capped) == (length > new * (1 - 1e-9))
            if theta > 0.8:
                assert new == pytest.approx(0.7 * r, rel=1e-15)
                shrunk += 1
            elif theta < -0.1 and bool(before.guard.capped):
                assert new == 2 * r
                grown += 1
            else:
                assert new == r
                kept += 1
    assert min(grown, shrunk, kept) >= 3


def test_the_guard_skips_pairs_with_a_small_cosine(fed: Federation) -> None:
    skipped = taken = 0
    for seed in range(4):
        states = stepwise(fed, FedSSO(alpha=0.05), 30, "mlp", seed=seed, batch_size=1)
        for before, after in pairwise(states[1:]):
            s, y = before.s[0], (after.g - before.g)[0]
            small = float(y @ s) < 0.1 * float(s.norm() * y.norm())
            assert int(after.curvature.held) - int(before.curvature.held) == (not small)
            assert bool(after.seen[0, 2]) == small
            skipped, taken = skipped + small, taken + (not small)
    assert min(skipped, taken) >= 5


def test_without_the_guard_negative_curvature_enters_with_an_enforced_value(fed: Federation) -> None:
    states = stepwise(fed, FedSSO(alpha=0.05, eta=0.1, guard="none"), 30, "mlp", batch_size=1)
    negative = [after for after in states[1:] if float(after.seen[0, 0]) < 0]
    assert len(negative) >= 3
    assert all(float(after.seen[0, 1]) == 1 and float(after.seen[0, 2]) == 0 for after in negative)


def test_the_radius_waits_for_the_first_answer() -> None:
    """If nobody answers in round 1 the first answer sets the radius, whatever its round."""
    fed = one_dimension([1, 3, 0.5], [0, 2, -1], [0.5, 0.3, 0.2])
    options = {"drop_rate": 0.9, "local_steps": 5, "init": torch.tensor([4.0])}
    plans = Rounds(fed, Protocol(batch_size=None, drop_rate=0.9, local_steps=5))
    first = next(k for k in range(1, 20) if len(plans.plan(k).answered))
    assert first > 1
    x, v = (fly(fed, a, first, **options) for a in (FedSSO(alpha=0.1), FedAvg(alpha=0.1)))
    torch.testing.assert_close(x, v, rtol=1e-13, atol=0)
    assert float(x) != 4.0


def test_the_guard_rescues_a_step_that_is_too_long(fed: Federation) -> None:
    wild, tame = (
        simulate(fed, "mlp", FedSSO(alpha=0.01, eta=30.0, guard=guard), rounds=30, **NOISY)
        for guard in ("none", "adaptive")
    )
    assert tame.diverged is None
    assert tame.trace["train_loss"][-1] < 0.8 * tame.trace["train_loss"][1]
    assert not wild.trace["train_loss"][-1] < wild.trace["train_loss"][1]


# --- memory, diagnostics, errors -------------------------------------------------------------------------------------
def test_leaving_pairs_are_logged_once(quad: Federation, caplog: pytest.LogCaptureFixture) -> None:
    def told(**extra: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "fedsso"):
            fly(quad, FedSSO(alpha=0.1, guard="none", pairs=3, **extra), 9)
        return [r.message for r in caplog.records if "oldest" in r.message]

    assert told() == ["round 5: 3 pairs are held at most, from now on the oldest leaves"]
    assert told(form="dfp") == ["round 5: 3 pairs are held at most, from now on the oldest leaves"]
    assert told(R=4) == []
    assert told(form="bfgs-dense") == told(form="lbfgs") == []


def test_only_the_newest_pairs_are_held(quad: Federation) -> None:
    """With pairs = 2 the matrix of round k comes from the pairs of rounds k - 1 and k alone."""
    states = stepwise(quad, FedSSO(alpha=0.1, eta=0.3, guard="none", pairs=2), 7, "linear", batch_size=None)
    B = torch.eye(6, dtype=torch.float64)
    for before, after in pairwise(states[5:]):
        s, y = before.s[0], (after.g - before.g)[0]
        B = B + torch.outer(y, y) / (y @ s) - torch.outer(B @ s, B @ s) / (s @ B @ s)
    step = 0.3 * torch.linalg.solve(B, states[7].g[0])
    torch.testing.assert_close(states[7].x[0], states[6].x[0] - step, rtol=1e-11, atol=1e-13)


def test_a_store_that_does_not_fit_is_lowered_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qn, "STORE_BYTES", 2 * 1000 * 4 * 25)
    x = torch.zeros(1, 1000)
    with caplog.at_level(logging.WARNING, "fedsso"):
        state = FedSSO().server_init(x)
    assert caplog.messages == ["200 pairs of 1000 numbers exceed 2 GB: 24 are held"]
    assert state.curvature.store.shape[1] == 25
    caplog.clear()
    FedSSO(form="lbfgs", m=5).server_init(x)
    FedSSO(form="bfgs-dense").server_init(x)
    FedSSO().server_init(x.to("meta"))  # where sweeps measure a state, nobody is told
    assert caplog.messages == []


def test_diagnostics_are_recorded(quad: Federation) -> None:
    run_: Run = simulate(quad, algorithm=FedSSO(alpha=0.1), rounds=6, **EXACT)
    trace = run_.trace
    assert np.isnan(trace["grad_norm"][0])
    assert np.isfinite(trace["grad_norm"][1:]).all()
    assert trace["ys"][1] == 0
    assert (trace["ys"][2:] > 0).all()
    assert (trace["radius"][1:] > 0).all()
    bare = simulate(quad, algorithm=FedSSO(alpha=0.1, guard="none"), rounds=6, **EXACT).trace
    assert np.isnan(bare["radius"]).all()


def test_a_reset_round_counts_neither_as_overridden_nor_as_skipped() -> None:
    fed = load("synthetic", clients=3, dim=10)
    narrow: dict[str, Any] = {"lam": 0.4, "Lam": 0.6}
    every, reset = (
        simulate(fed, algorithm=FedSSO(alpha=0.1, eta=0.3, guard="none", R=R, **narrow), rounds=4, **EXACT).trace
        for R in (None, 4)
    )
    assert every["overridden"].tolist() == [0, 0, 1, 1, 1]
    assert reset["overridden"].tolist() == [0, 0, 1, 1, 0]
    assert reset["skipped"].tolist() == [0] * 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lam": 10.0, "Lam": 1.0}, r"lam must be < Lam, got lam=10.0, Lam=1.0; the paper: 1e-4 and 9999"),
        ({"R": 1}, r"R must be an integer >= 2, got R=1"),
        ({"R": 2.5}, r"R must be an integer >= 2, got R=2.5"),
        ({"pairs": 0}, r"pairs must be an integer >= 1, got pairs=0"),
        ({"m": 0}, r"m must be an integer >= 1, got m=0"),
        ({"alpha": 0}, r"alpha must be > 0 and finite, got alpha=0"),
        ({"eta": float("inf")}, r"eta must be > 0 and finite, got eta=inf"),
        ({"alpha": True}, r"alpha must be a number, got alpha=True"),
        ({"guard": "adaptve"}, r"unknown guard 'adaptve'; did you mean 'adaptive'\?"),
        ({"form": "bfsg"}, r"unknown form 'bfsg'; did you mean 'bfgs'\?"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedSSO(**values)
