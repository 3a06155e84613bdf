"""FedSSO against its definition: the paper's Algorithm 1, the forms of its matrix, the guard."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import Decay, FedAvg, Federation, FedSSO, InputError, Run, compare, load, simulate
from fedsso.algorithm import Cohort
from fedsso.algorithm.schedule import at
from fedsso.algorithms import client_step, trust_region
from fedsso.data import quadratic
from fedsso.engine.rounds import Rounds
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.maths import quasi_newton as qn
from fedsso.support.linalg import gram
from studies import states_of

EXACT: dict[str, Any] = {"model": "linear", "batch_size": None, "dtype": "float64", "device": "cpu"}
DENSE = ("bfgs", "bfgs-dense")
GROWTH = (trust_region.EARLY_GROWTH, trust_region.LATE_GROWTH)
NOISY: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "dtype": "float64", "device": "cpu"}


def fly(fed: Federation, algorithm: FedSSO | FedAvg, rounds: int, **options: Any) -> Tensor:
    """The model after some rounds."""
    run_: Run = simulate(fed, algorithm=algorithm, rounds=rounds, **{**EXACT, **options})
    return run_.x


def one_dimension(a: list[float], b: list[float], p: list[float]) -> Federation:
    return quadratic([[[a_i]] for a_i in a], [[b_i] for b_i in b], p)


def stepwise(
    fed: Federation, algorithm: FedSSO, rounds: int, model: str = "mclr", **options: Any
) -> list[Any]:
    """The server states before and after every round."""
    full = {**NOISY, **options}
    return states_of(Simulation(fed, model, [algorithm], **full), rounds)


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


# --- the six checks of the specification
# ---------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["bfgs", "dfp", "lbfgs", "bfgs-dense", "dfp-dense"])
@pytest.mark.parametrize("R", [None, 2, 3])
def test_round_one_and_every_reset_round_is_a_plain_gradient_step(
    quad: Federation, form: str, R: int | None
) -> None:
    algorithm = FedSSO(alpha=0.1, eta=0.7, R=R, guard="none", form=form)
    for k in [1] if R is None else [1, R, 2 * R]:
        x = (
            fly(quad, algorithm, k - 1, local_steps=4)
            if k > 1
            else torch.zeros(6, dtype=torch.float64)
        )
        v = fly(quad, FedAvg(alpha=0.1), 1, local_steps=4, init=x)
        expected = x - 0.7 / (0.1 * 4) * (x - v)
        torch.testing.assert_close(
            fly(quad, algorithm, k, local_steps=4), expected, rtol=1e-12, atol=1e-13
        )


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
    assert float(fly(fed, algorithm, 2, local_steps=5, init=start)) == pytest.approx(
        0.9085955704, abs=1e-10
    )
    assert float(fly(fed, algorithm, 2, local_steps=1, init=start)) == pytest.approx(
        1.1333333333, abs=1e-10
    )
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
            fed,
            algorithm=FedSSO(alpha=0.1, eta=0.5, guard="none", form=form, lam=lam, Lam=Lam),
            rounds=50,
            **EXACT,
        )
        for form in (low, dense)
    ]
    overridden = runs[0].trace["overridden"].sum()
    assert overridden >= 10 if lam > 0.1 else overridden == 0
    np.testing.assert_array_equal(runs[0].trace["overridden"], runs[1].trace["overridden"])
    assert float((runs[0].x - runs[1].x).norm() / runs[1].x.norm()) < 1e-10
    np.testing.assert_allclose(
        runs[0].trace["grad_norm"][1:], runs[1].trace["grad_norm"][1:], rtol=1e-7, atol=1e-12
    )


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
    """lbfgs starts from gamma I, so even with every pair it is another method; both reach the fixed
    point."""
    bfgs, lbfgs = (FedSSO(alpha=0.1, guard="none", form=form) for form in ("bfgs", "lbfgs"))
    assert not torch.allclose(fly(quad, bfgs, 3), fly(quad, lbfgs, 3), rtol=1e-3)
    torch.testing.assert_close(fly(quad, bfgs, 40), fly(quad, lbfgs, 40), rtol=1e-9, atol=1e-9)


# --- local steps, cohorts, schedules
# -------------------------------------------------------------------------------
def test_g_is_divided_by_the_weighted_mean_of_the_real_local_steps(quad: Federation) -> None:
    options: dict[str, Any] = {"local_steps": 6, "stragglers": 0.8, "seed": 4}
    plan = Rounds(quad, Settings(batch_size=None, **options)).plan(1)
    assert len(set(plan.steps.tolist())) > 1
    tau = float(quad.p @ plan.steps.double())
    v = fly(quad, FedAvg(alpha=0.1), 1, **options)
    x = fly(quad, FedSSO(alpha=0.1, guard="none"), 1, **options)
    torch.testing.assert_close(x, v / (0.1 * tau), rtol=1e-12, atol=1e-14)  # x_1 = 0


def test_mean_steps_use_the_weights_of_those_who_answered(quad: Federation) -> None:
    options: dict[str, Any] = {"local_steps": 5, "stragglers": 0.9, "participation": 0.5, "seed": 2}
    plan = Rounds(quad, Settings(batch_size=None, **options)).plan(1)
    assert len(set(plan.steps.tolist())) == 2
    p = quad.p[plan.answered] / quad.p[plan.answered].sum()
    v = fly(quad, FedAvg(alpha=0.1), 1, **options)
    x = fly(quad, FedSSO(alpha=0.1, guard="none"), 1, **options)
    torch.testing.assert_close(
        x, v / (0.1 * float(p @ plan.steps.double())), rtol=1e-12, atol=1e-14
    )


def test_schedules_of_both_steps() -> None:
    """With one local step alpha cancels from g: the run is BFGS with eta_k for any alpha_k."""
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
        torch.testing.assert_close(
            fly(quad, FedAvg(alpha=alpha), k, local_steps=4), x, rtol=1e-13, atol=1e-15
        )


def test_stacked_schedules_equal_single_ones(quad: Federation) -> None:
    records = [
        FedSSO(alpha=Decay(a, 2.0), eta=Decay(1.0, s, 0.5), guard="none")
        for a, s in ((0.1, 0.0), (0.4, 3.0))
    ]
    together = compare(quad, algorithms=records, rounds=6, **EXACT)
    for record, run_ in zip(records, together, strict=True):
        torch.testing.assert_close(run_.x, fly(quad, record, 6), rtol=1e-12, atol=1e-14)


# --- the guard
# --------------------------------------------------------------------------------------------------
def test_the_guards_first_step_is_fedavgs(fed: Federation) -> None:
    """Of a network without a metric, too."""
    options = {"model": "mlp", **NOISY}
    record = FedSSO(alpha=0.02, shapes="none")
    a = simulate(fed, algorithm=record, rounds=1, **options)
    b = simulate(fed, algorithm=FedAvg(alpha=0.02), rounds=1, **options)
    torch.testing.assert_close(a.x, b.x, rtol=1e-13, atol=1e-15)
    short = simulate(
        fed, algorithm=replace(record, eta=0.03), rounds=1, **options
    )  # eta < alpha tau = 0.06
    start = simulate(fed, algorithm=FedAvg(alpha=1e-12), rounds=1, **options).x
    torch.testing.assert_close(short.x - start, (b.x - start) / 2, rtol=1e-7, atol=1e-10)


def secant(theta: float, k: int) -> float:
    """m, what radius or gamma are multiplied by in round k: where the slope of a parabola would be
    0."""
    most = GROWTH[0] if k <= trust_region.EARLY else GROWTH[1]
    return most if 1 + theta <= 1 / most else max(1 / (1 + theta), 0.5)


def flattened(gamma: float, m: float, capped: bool, s: Tensor, y: Tensor) -> tuple[float, str]:
    """The next gamma after a step with eta = 1, and what set it."""
    told = "gamma stays"
    if not capped and m != 1:
        gamma, told = m * gamma, "gamma grows" if m > 1 else "gamma falls"
    if capped and m < 1:
        gamma, told = m * gamma, "gamma falls after a cut"
    ss, sy, yy = (float((a * b).sum()) for a, b in ((s, s), (s, y), (y, y)))
    if sy >= 0.5 * (ss * yy) ** 0.5 and ss > gamma * sy:
        gamma, told = ss / sy, "gamma is the flatness"
    elif sy > 0 and ss > gamma * sy:
        told = "gamma is not the flatness"
    if not 1 <= gamma <= trust_region.FLATTEST:
        told = "gamma ends"
    return min(max(gamma, 1), trust_region.FLATTEST), told


def test_radius_and_gamma_follow_their_rules_round_by_round(
    fed: Federation, quad: Federation
) -> None:
    """From x and g alone, in plain floats: theta is the share of the slope that is left along the
    last step. Lengths are plain without a metric."""
    seen: Counter[str] = Counter()
    noisy = [
        (a, stepwise(fed, FedSSO(alpha=a, shapes="none"), 30, seed=i))
        for a, i in itertools.product((0.002, 0.05), range(4))
    ]
    exact = [
        (a, stepwise(quad, FedSSO(alpha=a, shapes="none"), 9, "linear", batch_size=None))
        for a in (0.05, 0.1)
    ]
    for alpha, states in noisy + exact:
        # round 1: FedAvg's step, which is shorter than eta g
        r, gamma, capped = alpha * 3 * float(states[1].g.norm()), 1.0, True
        for k, (old, before, after) in enumerate(
            zip(states, states[1:], states[2:], strict=False), 2
        ):
            s = before.x - old.x
            m = secant(float((after.g * s).sum() / -(before.g * s).sum()), k)
            r *= m if capped else min(m, 1)
            gamma, told = flattened(gamma, m, capped, s, after.g - before.g)
            length = float((after.x - before.x).norm())
            assert float(after.guard.radius) == pytest.approx(r, rel=1e-9)
            assert float(after.guard.gamma) == pytest.approx(gamma, rel=1e-9)
            assert length <= r * (1 + 1e-9)
            seen[
                f"{m:g}"
                if m in (0.5, *GROWTH)
                else "shrunk"
                if m < 1
                else "grown"
                if capped
                else "kept"
            ] += 1
            seen[told] += 1
            capped = length > r * (1 - 1e-9)
            seen["cut" if capped else "whole"] += 1
            assert bool(after.guard.capped) == capped
    events = (
        "0.5",
        *map(str, GROWTH),
        "shrunk",
        "grown",
        "kept",
        "cut",
        "whole",
        "gamma stays",
        "gamma grows",
        "gamma falls",
        "gamma falls after a cut",
        "gamma is the flatness",
        "gamma is not the flatness",
        "gamma ends",
    )
    assert min(seen[event] for event in events) >= 3, seen


@pytest.mark.parametrize("k", [trust_region.EARLY, trust_region.EARLY + 1])
@pytest.mark.parametrize("capped", [True, False])
def test_either_gamma_or_the_radius_grows(k: int, capped: bool) -> None:
    """theta = -1/2, 0, 1/4, 1 and almost all of the slope left: m = 2, 1, 4/5, 1/2 and what round k
    allows. Both fall after a step that was cut and still too long. y = 0 tells of no flatness."""
    thetas, ms = (
        [-0.5, 0, 0.25, 1, 7, -0.999],
        [2, 1, 0.8, 0.5, 0.5, GROWTH[k > trust_region.EARLY]],
    )
    for start in (1.0, 1.5, 0.75 * trust_region.FLATTEST, float(trust_region.FLATTEST)):
        one = torch.ones(len(thetas), 1, dtype=torch.float64)
        guard = trust_region.Guard(
            radius=3 * one, gamma=start * one, slope=2 * one, share=one, capped=(one > 0) & capped
        )
        products, rounds = (
            torch.zeros(len(thetas), 3, 3, dtype=torch.float64),
            torch.full((len(thetas), 1), float(k), dtype=torch.float64),
        )
        products[:, 0, 2] = 2 * torch.tensor(thetas, dtype=torch.float64)  # g^T s
        trust = trust_region.careful(rounds)
        found = trust_region.adapt(guard, products, 0.1, trust)
        parts = [min(m, 1) if capped else m for m in ms]
        gammas = [min(max(m * start, 1), trust_region.FLATTEST) for m in parts]
        assert found.gamma[:, 0].tolist() == pytest.approx(gammas, rel=1e-12)
        assert found.radius[:, 0].tolist() == pytest.approx(
            [3 * (m if capped else min(m, 1)) for m in ms], rel=1e-12
        )
        assert torch.equal(found.slope, guard.slope)
        assert torch.equal(found.share, guard.share)
        halved = trust_region.adapt(guard._replace(share=0.5 * one), products, 0.1, trust)
        parts = [min(m, 1) if capped else 0.5 * m for m in ms]
        gammas = [min(max(m * start, 1), trust_region.FLATTEST) for m in parts]
        assert halved.gamma[:, 0].tolist() == pytest.approx(gammas, rel=1e-12)
        untold = trust_region.adapt(
            guard._replace(slope=0 * one), products, 0.1, trust
        )  # there was no step yet
        assert torch.equal(untold.gamma, guard.gamma)
        assert torch.equal(untold.radius, guard.radius)


def looked_back(
    cosines: list[float], lengths: list[float], gamma: float, slopes: list[float], **guard: Any
) -> list[float]:
    """gamma of trials with |s| = 2 and such y, after a step whose end has no slope: m = 1."""
    n = len(cosines)
    s, across = torch.eye(3, dtype=torch.float64)[:2]
    cosine, length = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (cosines, lengths))
    y = length * (cosine * s + (1 - cosine.square()).sqrt() * across)
    products = gram((2 * s).expand(n, 3), y, torch.eye(3, dtype=torch.float64)[2].expand(n, 3))
    one = torch.ones(n, 1, dtype=torch.float64)
    slope = torch.tensor(slopes, dtype=torch.float64)[:, None]
    before = trust_region.Guard(radius=one, gamma=gamma * one, slope=slope, share=one, **guard)
    trust = trust_region.careful(9 * one)
    return trust_region.adapt(before, products, 0.1, trust).gamma[:, 0].tolist()


@pytest.mark.parametrize("capped", [True, False])
def test_a_clear_pair_bounds_gamma_from_below(capped: bool) -> None:
    """|s|^2 / y^T s = 4 / (2 |y| cos): 20 of 0.1 and 1, 4/0.102 of 0.1 and 0.51, 4/6 of 3 and 1.

    Cosines below 1/2, y against s or 0, and trials without a step do not count; 200 is too much.
    """
    cosines = [1, 0.51, 0.49, -1, -0.6, 1, 1, 1, 1]
    lengths = [0.1, 0.1, 0.1, 0.1, 0.1, 0, 0.01, 3, 0.1]
    slopes = [2.0] * 8 + [0.0]
    cut = torch.full((9, 1), capped)
    for gamma in (1.0, 5.0, 30.0):
        found = looked_back(cosines, lengths, gamma, slopes, capped=cut)
        flat_ = [20, 4 / 0.102, 0, 0, 0, 0, trust_region.FLATTEST, 4 / 6, 0]
        assert found == pytest.approx([max(gamma, bound) for bound in flat_], rel=1e-12)


def test_an_exact_gradient_needs_no_bound() -> None:
    """gamma follows m alone: it stays 1 after a cut step of m = 1, however flat the pair is."""
    one = torch.ones(1, 1, dtype=torch.float64)
    guard = trust_region.Guard(radius=one, gamma=one, slope=one, share=one, capped=one > 0)
    s = torch.tensor([[2.0, 0, 0]], dtype=torch.float64)
    products = gram(s, 0.1 * s, torch.tensor([[0, 0, 1.0]], dtype=torch.float64))
    trust = trust_region.exact(3, 0 * one, 1e-4)
    assert float(trust_region.adapt(guard, products, 0.1, trust).gamma) == 1
    careful = trust_region.careful(3 * one)
    assert float(trust_region.adapt(guard, products, 0.1, careful).gamma) == pytest.approx(10)


def test_the_pair_that_bounds_gamma_is_the_one_before_damping() -> None:
    """B s = s/20 after a step s = -(1, 0, 0) that was cut; y^T s = 0.015, so that m > 1.

    A y along s has the flatness 1/0.015. A y of length 3/4 has the cosine 0.02, which tells of
    none; but what damping leaves of it, y/15 + 14/15 B s = -(0.048, 0.05, 0), would have 0.69.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    s, old = torch.tensor([[[-1.0, 0, 0]], [[0.05, 0, 0]]], dtype=torch.float64)
    guard = trust_region.Guard(
        radius=10 * one, gamma=one, slope=0.05 * one, share=one, capped=one > 0
    )
    record = FedSSO(alpha=1.0)
    state = record.server_init(0 * s)._replace(s=s, g=old, guard=guard)
    found = []
    for across in (0.0, 0.015 * (1 / 0.02**2 - 1) ** 0.5):
        y = torch.tensor([[-0.015, across, 0]], dtype=torch.float64)
        after = record.server(state, -(old + y), Cohort(9, 1, torch.arange(1), 1.0, 1.0))
        found.append(float(after.guard.gamma))
    assert found == pytest.approx([1 / 0.015, 1], rel=1e-12)


def flat(lowest: float, highest: float, dim: int = 20) -> Federation:
    """One client, f(x) = 1/2 x^T H x with evenly spread eigenvalues."""
    H = torch.diag(torch.linspace(lowest, highest, dim, dtype=torch.float64))
    return quadratic(H[None], torch.zeros(1, dim, dtype=torch.float64))


def descent(fed: Federation, rounds: int, **fields: Any) -> list[Any]:
    """From ones with full gradients, and with a radius of more than one Newton step: nothing is cut
    in the end."""
    start = torch.ones(int(fed.x.shape[-1]), dtype=torch.float64)
    record = FedSSO(**{"alpha": 100.0, **fields})
    return stepwise(fed, record, rounds, "linear", batch_size=None, local_steps=1, init=start)


def test_gamma_finds_the_flatness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eigenvalues 1/100 to 1/50: 1/gamma is one of the quotients s^T H s / s^T s, so gamma settles
    at 50 to 100.

    The first pair, in round 2, leads there. Around 75 a step leaves at most half of x in directions
    that no pair has told of, so 2 + 14 rounds bring it to 1e-4. With gamma = 1 such a
    step leaves 98 %: x cannot get there before most of the 20 directions are known, one a round.
    """

    def rounds(states: list[Any]) -> int:
        return next(
            k for k, state in enumerate(states) if state.x.norm() < 1e-4 * states[0].x.norm()
        )

    monkeypatch.setattr(trust_region, "FLATTEST", 100)
    states = descent(flat(0.01, 0.02), 40)
    assert all(50 <= float(state.guard.gamma) <= 100 for state in states[2:])
    assert rounds(states) <= 16
    monkeypatch.setattr(trust_region, "FLATTEST", 1)
    held = descent(flat(0.01, 0.02), 40)
    assert {float(state.guard.gamma) for state in held} == {1.0}
    assert rounds(held) > 20


def test_gamma_has_an_end() -> None:
    """On an almost flat function it would have to be larger than any."""
    gammas = [float(state.guard.gamma) for state in descent(flat(1e-6, 2e-6), 30)]
    assert max(gammas) == gammas[-1] == trust_region.FLATTEST


def test_on_a_steep_function_gamma_stays_1() -> None:
    """Eigenvalues 2 to 4: B = I is too flat, so every m of a step that tells of something new is
    below 1."""
    gammas = [float(state.guard.gamma) for state in descent(flat(2, 4), 10, alpha=0.2)]
    assert gammas == [1.0] * 11


def test_a_server_step_below_1_is_none_of_gammas_affair() -> None:
    """f = |x|^2 / 2: B = I is exact, and a step of eta leaves 1 - eta of the slope: m = 1 / eta."""
    gammas = [float(state.guard.gamma) for state in descent(flat(1, 1, 6), 12, alpha=1.0, eta=0.5)]
    assert gammas == pytest.approx([1.0] * 13, rel=1e-12)


@pytest.mark.parametrize("form", qn.FORMS)
def test_without_the_guard_gamma_stays_1(form: str) -> None:
    states = descent(flat(0.01, 0.02, 6), 12, guard="none", form=form)
    assert {float(state.guard.gamma) for state in states} == {1.0}


def test_gamma_is_where_b_starts_from_in_every_round_anew(quad: Federation) -> None:
    """x_{k+1} - x_k = -t H g_k, with H of all pairs so far and H_0 = gamma_k I; a reset leaves
    gamma_k I alone."""
    record = FedSSO(alpha=0.5, eta=0.7, R=7, shapes="none")
    states = stepwise(quad, record, 10, "linear", batch_size=None)
    pairs: list[tuple[Tensor, Tensor]] = []
    gammas = set()
    for k, (before, after) in enumerate(pairwise(states), 1):
        s, y, g, gamma = before.s[0], (after.g - before.g)[0], after.g[0], float(after.guard.gamma)
        assert k == 1 or float(y @ s / (y.norm() * s.norm())) > trust_region.TRUSTED
        pairs = [] if k % 7 == 0 else pairs + [(s, y)] * (k > 1)
        B = torch.eye(6, dtype=torch.float64) / gamma
        for s, y in pairs:
            B = B + torch.outer(y, y) / (y @ s) - torch.outer(B @ s, B @ s) / (s @ B @ s)
        expected = -after.guard.share[0] * torch.linalg.solve(B, g)
        torch.testing.assert_close((after.x - before.x)[0], expected, rtol=1e-9, atol=1e-13)
        gammas.add(gamma)
    assert float(states[7].guard.gamma) > 1.1
    assert len(gammas) >= 6


def test_only_form_bfgs_has_gamma(quad: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> dict[str, Tensor]:
        return {form: fly(quad, FedSSO(alpha=0.5, form=form), 8) for form in qn.FORMS}

    free = ends()
    monkeypatch.setattr(trust_region, "FLATTEST", 1)
    held = ends()
    assert [form for form in qn.FORMS if not torch.equal(free[form], held[form])] == ["bfgs"]


def test_stacked_trials_have_each_their_own_gamma() -> None:
    fed, full = (
        flat(0.05, 0.5, 6),
        {**NOISY, "batch_size": None, "init": torch.ones(6, dtype=torch.float64)},
    )
    records = [
        FedSSO(alpha=alpha, eta=eta) for alpha, eta in ((0.1, 1.0), (10.0, 0.5), (30.0, 1.0))
    ]
    together = Simulation(fed, "linear", records, **full)
    alone = [Simulation(fed, "linear", [record], **full) for record in records]
    for k in range(1, 9):
        for sim in (together, *alone):
            run(sim, k)
        gammas = torch.cat([sim.server.guard.gamma for sim in alone])
        torch.testing.assert_close(together.server.guard.gamma, gammas, rtol=1e-9, atol=0)
        torch.testing.assert_close(
            together.server.x, torch.cat([sim.server.x for sim in alone]), rtol=1e-9, atol=1e-12
        )
    assert len({round(gamma, 3) for gamma in gammas[:, 0].tolist()}) == 3


def test_the_server_knows_b_times_s(fed: Federation) -> None:
    """B s = -t g, with t the part of -B^-1 g that was taken, in every form that keeps the matrix;
    dual: s = -t H g."""
    for form, guard in itertools.product(("bfgs-dense", "dfp-dense"), ("adaptive", "none")):
        states = stepwise(fed, FedSSO(alpha=0.05, eta=0.7, guard=guard, form=form, R=9), 12, "mlp")[
            1:
        ]
        assert guard == "none" or 2 <= sum(bool(state.guard.capped) for state in states) <= 10
        for state in states:
            M, s, step = state.curvature.matrix[0], state.s[0], -state.guard.share[0] * state.g[0]
            a, b = (M @ s, step) if form == "bfgs-dense" else (s, M @ step)
            assert float((a - b).norm() / b.norm()) < 1e-10


def turned(cosines: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s, y at given cosines to it, g_{k-1} and B with B s = -0.3 g_{k-1}; one trial each."""
    draw = torch.Generator().manual_seed(1)
    M = torch.randn(5, 5, generator=draw, dtype=torch.float64)
    B = M @ M.mT + torch.eye(5, dtype=torch.float64)
    s, across = torch.eye(5, dtype=torch.float64)[:2]
    y = 2 * (cosines[:, None] * s + (1 - cosines.square()).sqrt()[:, None] * across)
    g = (B @ s / -0.3).expand_as(y)
    return s.expand_as(y), y, g, B.expand(len(y), 5, 5)


def damped(s: Tensor, y: Tensor, old: Tensor) -> Tensor:
    one = torch.ones(len(y), 1, dtype=torch.float64)
    slope = -(old * s).sum(-1, keepdim=True)
    guard = trust_region.Guard(radius=one, gamma=one, slope=slope, share=0.3 * one, capped=one > 0)
    return trust_region.damp(y.clone(), old, gram(s, y, old + y), guard)


def test_a_y_that_hardly_points_along_s_is_drawn_towards_b_s() -> None:
    parts = torch.tensor([0, 0.1, 0.5, 0.999, 1, 1.001, 1.5], dtype=torch.float64)
    cosines = torch.cat([torch.tensor([-1, -0.4]), trust_region.TRUSTED * parts, torch.ones(1)])
    s, y, old, B = turned(cosines)
    found = damped(s, y, old)
    for cosine, before, after, Bs in zip(
        cosines.tolist(), y, found, (B @ s[..., None])[..., 0], strict=True
    ):
        phi = min(cosine / trust_region.TRUSTED, 1.0)
        expected = (
            phi * before + (1 - phi) * Bs if cosine > 0 else torch.zeros(5, dtype=torch.float64)
        )
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[-3:], y[-3:])  # from TRUSTED on nothing is touched


def test_a_gradient_that_had_vanished_leaves_a_pair_that_is_told_as_it_is() -> None:
    """The y that is judged must be the y that is stored.

    In float32 with |g_{k-1}| = 1e-12 and |g_k| = 1, y is g_k.
    """
    s, y = torch.tensor([[1e-7, 0, 0]]), torch.tensor([[1e-8, 1, 0]])
    record, old = FedSSO(alpha=1.0), torch.tensor([[-1e-12, 0, 0]])
    state = record.server_init(torch.zeros(1, 3))
    one = torch.ones(1, 1, dtype=torch.float64)
    guard = trust_region.Guard(radius=one, gamma=one, slope=1e-19 * one, share=one, capped=one > 0)
    after = record.server(
        state._replace(s=s, g=old, guard=guard), -(old + y), Cohort(2, 1, torch.arange(1), 1.0, 1.0)
    )
    assert torch.isfinite(after.x).all()
    stored = after.curvature.store[0, 0]
    assert float(after.seen.ys) == pytest.approx(
        float(s[0].double() @ stored[1].double()), rel=1e-6
    )


def test_damping_is_continuous_in_the_angle() -> None:
    """Also where the pair is skipped: halving the distance between angles halves the largest change
    of B."""

    def jump(n: int) -> float:
        s, y, old, B = turned(torch.linspace(-0.2, 0.6, n + 1, dtype=torch.float64))
        g, y = old + y, damped(s, y, old)
        pair = qn.judge(gram(s, y, g), 1e-4, 9999.0)
        new, _ = qn.form("bfgs-dense", 1, 1).step(qn.Matrix(B), s, y, old, pair, 2, False)
        return float((new.matrix[1:] - new.matrix[:-1]).flatten(1).norm(dim=1).max())

    assert jump(4000) == pytest.approx(jump(2000) / 2, rel=0.05)


def test_a_pair_that_points_against_s_is_skipped_and_any_other_enters(fed: Federation) -> None:
    seen: Counter[str] = Counter()
    for batch, seed in itertools.product((1, 4), range(2)):
        record = FedSSO(alpha=0.002, shapes="none")
        states = stepwise(fed, record, 30, seed=seed, batch_size=batch)
        for before, after in pairwise(states[1:]):
            s, y = before.s[0], (after.g - before.g)[0]
            cosine = float(y @ s / (s.norm() * y.norm()))
            assert int(after.curvature.held) - int(before.curvature.held) == (cosine > 0)
            assert bool(after.seen.skipped) == (cosine <= 0)
            phi = min(max(cosine, 0) / trust_region.TRUSTED, 1.0)
            drawn = (
                float(phi * y @ s - (1 - phi) * before.guard.share * before.g[0] @ s)
                if phi
                else 0.0
            )
            assert float(after.seen.ys) == pytest.approx(drawn, rel=1e-9, abs=1e-15)
            seen["against" if cosine <= 0 else "drawn" if phi < 1 else "kept"] += 1
    assert len(seen) == 3
    assert min(seen.values()) >= 5, seen


def test_forms_agree_over_a_damped_run(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as gamma is 1, which a matrix cannot change, and without a metric."""
    monkeypatch.setattr(trust_region, "FLATTEST", 1)
    records = [FedSSO(alpha=0.05, form=form, shapes="none") for form in DENSE]
    low, dense = (stepwise(fed, record, 12, "mlp", batch_size=1)[-1] for record in records)
    assert float((low.x - dense.x).norm() / dense.s.norm()) < 1e-9


def test_without_the_guard_negative_curvature_enters_with_an_enforced_value(
    fed: Federation,
) -> None:
    states = stepwise(fed, FedSSO(alpha=0.05, eta=0.01, guard="none"), 30, "mlp", batch_size=1)
    negative = [after for after in states[1:] if float(after.seen.ys) < 0]
    assert len(negative) >= 3
    assert all(
        float(after.seen.overridden) == 1 and float(after.seen.skipped) == 0 for after in negative
    )


def test_the_radius_waits_for_the_first_answer() -> None:
    """If nobody answers in round 1 the first answer sets the radius, whatever its round."""
    fed = one_dimension([1, 3, 0.5], [0, 2, -1], [0.5, 0.3, 0.2])
    options = {"drop_rate": 0.9, "local_steps": 5, "init": torch.tensor([4.0])}
    plans = Rounds(fed, Settings(batch_size=None, drop_rate=0.9, local_steps=5))
    first = next(k for k in range(1, 20) if len(plans.plan(k).answered))
    assert first > 1
    x, v = (fly(fed, a, first, **options) for a in (FedSSO(alpha=0.1), FedAvg(alpha=0.1)))
    torch.testing.assert_close(x, v, rtol=1e-13, atol=0)
    assert float(x) != 4.0


def begun(
    losses: list[float] | None, g: list[list[float]] | None = None, **fields: Any
) -> tuple[list[float], list[float]]:
    """The radius after round 1 and the length of its step, of trials with five local steps and
    gradients g of length 5, if not given; FedAvg's step is 0.01 * 5 |g| long."""
    loss = None if losses is None else torch.tensor(losses, dtype=torch.float64)[:, None]
    answer = torch.tensor(g or [[3.0, 4.0]] * len(losses or [0]), dtype=torch.float64)
    record = FedSSO(**{"drift": "small", **fields})
    everybody = Cohort(1, 4, torch.arange(4), 1.0, 5.0, loss)
    after = record.server(record.server_init(0 * answer), -0.01 * 5 * answer, everybody)
    return after.guard.radius[:, 0].tolist(), after.x.norm(dim=1).tolist()


@pytest.mark.parametrize("drift", client_step.LINEAR)
def test_with_one_layer_the_radius_starts_as_polyaks_length(drift: str) -> None:
    """f / |g| of each trial for itself: 2/5, 1/5 and 0 against FedAvg's 1/4, 3/2 against 1/10.

    Of the last trial the loss says 30/2, but the server's step is eta |g| = 2 at most.
    """
    g = [[3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 2.0], [2.0, 0.0]]
    radii, lengths = begun([2, 1, 0, 3, 30], g, drift=drift)
    assert radii == pytest.approx([0.4, 0.25, 0.25, 1.5, 15], rel=1e-12)
    assert lengths == pytest.approx([0.4, 0.25, 0.25, 1.5, 2], rel=1e-12)


@pytest.mark.parametrize(
    ("losses", "fields"),
    [
        ([2.0], {"drift": "fading"}),
        ([2.0], {"drift": "none"}),
        ([2.0], {"alpha": 0.01}),
        ([2.0], {"alpha": 0.01, "drift": "steady"}),
        (None, {}),
        (None, {"drift": "steady"}),
    ],
)
def test_elsewhere_the_radius_starts_as_fedavgs_length(
    losses: list[float] | None, fields: dict[str, Any]
) -> None:
    """For a network, an exact gradient and a given alpha, and where no loss is reported; Polyak's
    length would be 2/5."""
    assert begun(losses, **fields)[0] == pytest.approx([0.25], rel=1e-12)


def test_the_loss_that_starts_the_radius_is_that_of_the_first_gradient() -> None:
    """g = 0 of the first two rounds leaves the radius 0; then f / |g| = 2/5, and later losses count
    for nothing: the radius of a cut step along which the slope stays the same grows to the tenfold.
    """
    record = FedSSO(drift="small")
    state = record.server_init(torch.zeros(2, 2, dtype=torch.float64))
    g = torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    found = []
    for k, (part, loss) in enumerate(((0, 7.0), (0, 0.0), (1, 2.0), (1, 9e9)), 1):
        told = torch.tensor([[loss], [2.0]], dtype=torch.float64)
        everybody = Cohort(k, 4, torch.arange(4), 1.0, 5.0, told)
        state = record.server(state, -state.choice.alpha * 5 * part * g, everybody)
        found.append(state.guard.radius[:, 0].tolist())
    assert found[:2] == [[0, 0], [0, 0]]
    assert found[2] == pytest.approx([0.4, 0.4], rel=1e-12)
    assert found[3] == pytest.approx([4, 4], rel=1e-12)


@pytest.mark.parametrize("told", [float("nan"), float("inf"), -3.0])
def test_a_loss_that_tells_nothing_leaves_fedavgs_length(told: float) -> None:
    """alpha tau |g| = 0.1 * 5; f / |g| would be no length."""
    size = torch.tensor([[5.0]], dtype=torch.float64)
    found = trust_region.first_radius(size, 0.1, torch.full_like(size, told))
    assert found.tolist() == [[0.5]]


def test_polyaks_step_is_not_taken_after_an_explosion() -> None:
    """Its length does not depend on alpha, so the same step would explode again. FedAvg's of a
    thousandth of alpha is 0.25e-3 long, also where round 1 itself has exploded: the next loss may
    still be that of diverging clients."""
    record = FedSSO(drift="small")
    g = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    told = torch.tensor([[2.0]], dtype=torch.float64)
    fresh = record.server_init(0 * g)

    def after(state: Any, k: int) -> Any:
        everybody = Cohort(k, 4, torch.arange(4), 1.0, 5.0, told)
        return record.server(state, -state.choice.alpha * 5 * g, everybody)

    for state, k in ((after(fresh, 1), 3), (fresh, 2)):
        back, _ = record.undo(state) or fail()
        assert float(after(back, k).guard.radius) == pytest.approx(0.25e-3, rel=1e-12)
    assert float(after(fresh, 1).guard.radius) == pytest.approx(0.4, rel=1e-12)


def test_a_run_starts_with_polyaks_length() -> None:
    """f = 3/2 x^2 from 4: f / |g| = 24/12 = 2, half of the way; the second step does the rest.

    The radius of FedAvg, 0.01 * 12, would let it come no further than 4 - 0.12 - 1.2.
    """
    fed = one_dimension([3.0], [0.0], [1.0])
    options = {"local_steps": 1, "init": torch.tensor([4.0])}
    one, two = (fly(fed, FedSSO(drift="small"), rounds, **options) for rounds in (1, 2))
    assert float(one) == pytest.approx(2, rel=1e-12)
    assert float(two) == pytest.approx(0, abs=1e-12)


def test_a_run_that_starts_at_the_optimum_stays_there() -> None:
    """No gradient, so no radius: the first step is 0 of 0 long."""
    fed = one_dimension([1.0], [0.0], [1.0])
    for run_ in compare(
        fed,
        algorithms=[FedSSO(alpha=0.1), FedSSO(alpha=0.2), FedSSO(drift="small")],
        rounds=3,
        init=torch.zeros(1),
        **EXACT,
    ):
        assert run_.diverged is None
        assert run_.x.tolist() == [0]


def test_the_guard_rescues_a_step_that_is_too_long(fed: Federation) -> None:
    wild, tame = (
        simulate(fed, "mlp", FedSSO(alpha=0.01, eta=30.0, guard=guard), rounds=30, **NOISY)
        for guard in ("none", "adaptive")
    )
    assert tame.diverged is None
    assert tame.trace["train_loss"][-1] < 0.8 * tame.trace["train_loss"][1]
    assert not wild.trace["train_loss"][-1] < wild.trace["train_loss"][1]


# --- the client step chosen by the server
# ----------------------------------------------------------------------------

FIRST, DRIFT = client_step.FIRST, client_step.SMALL


def isotropic(L: float, tau: int, rounds: int = 8, eta: float = 0.5) -> list[float]:
    """alpha tau L after every round if all clients have the Hessian L I: they come back with (1 -
    alpha L)^tau of x.

    eta < 1 keeps x away from the optimum, where s and y would be rounding errors.
    """
    record, x = FedSSO(eta=eta), torch.tensor([[3.0, -1.0, 2.0]], dtype=torch.float64)
    state, found = record.server_init(x), []
    for k in range(1, rounds + 1):
        v = (1 - state.choice.alpha * L) ** tau * state.x
        state = record.server(state, v - state.x, Cohort(k, 1, torch.arange(1), 1.0, float(tau)))
        found.append(float(state.choice.alpha) * tau * L)
    return found


@pytest.mark.parametrize("L", [1e-3, 0.05, 1.0, 40.0, 1e4])
def test_auto_with_one_local_step(L: float) -> None:
    """y = L s whatever alpha is: the first pair sets alpha L = DRIFT, or alpha to the largest."""
    found = isotropic(L, 1)
    assert found == pytest.approx(
        [FIRST * L, *[min(DRIFT, client_step.LARGEST * L)] * (len(found) - 1)], rel=1e-9
    )


def steps_after(steepness: dict[int, float], drift: str) -> list[float]:
    """alpha after every round up to 8 if those named show |y| = L |s|, the first of them nothing,
    and others nobody."""
    record, s = FedSSO(eta=0.5, drift=drift), torch.zeros(1, 3, dtype=torch.float64)
    state, g, found = (
        record.server_init(s),
        torch.tensor([[3.0, -1.0, 2.0]], dtype=torch.float64),
        [],
    )
    for k in range(1, 9):
        if k in steepness:
            g = g + steepness[k] * state.s
            state = record.server(
                state, -state.choice.alpha * g, Cohort(k, 1, torch.arange(1), 1.0, 1.0)
            )
        found.append(float(state.choice.alpha))
    return found


@pytest.mark.parametrize(
    ("drift", "part"), [("small", client_step.SMALL), ("steady", client_step.STEADY)]
)
def test_auto_goes_by_the_least_steepness_of_the_first_rounds(drift: str, part: float) -> None:
    """Also where round 3 shows a larger one; from round 6 on nothing counts."""
    steepness = dict.fromkeys(range(1, 9), 50.0) | {2: 40.0, 6: 1e-3, 7: 1e3}
    assert steps_after(steepness, drift) == pytest.approx([FIRST, *[part / 40] * 7], rel=1e-12)
    assert steps_after(steepness | {3: 0.1}, drift) == pytest.approx(
        [FIRST, part / 40, *[client_step.LARGEST] * 6], rel=1e-12
    )
    later = dict.fromkeys(range(1, 9), 40.0) | {3: 20.0, 4: 100.0, 5: 10.0}
    assert steps_after(later, drift) == pytest.approx(
        [FIRST, part / 40, part / 20, part / 20, *[part / 10] * 4], rel=1e-12
    )


@pytest.mark.parametrize("drift", client_step.DRIFTS)
def test_the_first_client_step_is_the_same_for_every_model(drift: str) -> None:
    state = FedSSO(drift=drift).server_init(torch.zeros(2, 3, dtype=torch.float64))
    assert state.choice.alpha.tolist() == [[0.01], [0.01]]


@pytest.mark.parametrize(
    ("missed", "waits"),
    [([], 2), ([1], 3), ([2], 3), ([1, 2], 4), ([3], 2), ([2, 3, 4, 5], 6), ([1, 2, 3, 4, 5], 7)],
)
def test_auto_waits_for_the_first_pair(missed: list[int], waits: int) -> None:
    """A pair takes two rounds with answers; if it comes after round 5, it alone counts. The largest
    alpha is 0.1."""
    options: dict[str, Any] = {"local_steps": 1, "drop_rate": 0.5, "batch_size": None}
    pattern = [int(k not in missed) for k in range(1, 9)]
    for aim in (0.06, 0.6, 0.004):
        fed = one_dimension([client_step.STEADY / aim], [0.0], [1.0])
        plans = (Rounds(fed, Settings(**options, seed=seed)) for seed in range(9999))
        seed = next(
            p.settings.seed
            for p in plans
            if [len(p.plan(k).answered) for k in range(1, 9)] == pattern
        )
        found = alphas(fed, 9, FedSSO(eta=0.5), **options, seed=seed, init=torch.tensor([4.0]))
        expected = [FIRST] * waits + [min(aim, client_step.LARGEST)] * (9 - waits)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("L", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("tau", [5, 20])
def test_auto_with_several_local_steps(L: float, tau: int) -> None:
    """The mean gradient of the way is less steep than L, and g_{k-1} belongs to another alpha:
    DRIFT is met roughly."""
    found = isotropic(L, tau)
    last = client_step.CHOOSING - 1
    assert DRIFT / 2 < found[last] < DRIFT * 2.5
    assert found[last + 1 :] == found[last : last + 1] * (7 - last)


def alphas(
    fed: Federation, rounds: int = 7, record: FedSSO | None = None, **options: Any
) -> list[float]:
    """The client step of every round."""
    options = {"batch_size": None, **options}
    record = record or FedSSO(drift="small")  # which also chooses where gradients are exact
    return [
        float(state.choice.alpha)
        for state in stepwise(fed, record, rounds, "linear", **options)[:-1]
    ]


def test_auto_is_the_default_and_follows_its_rule(fed: Federation) -> None:
    """Rounds 2 to 5 set alpha by the least steepness so far, 0.1 at most; then it stays."""
    assert FedSSO() == FedSSO(alpha="auto")
    seen: Counter[str] = Counter()
    for batch, seed in itertools.product((1, 4), range(4)):
        alpha, least = FIRST, np.inf
        for k, (before, after) in enumerate(
            pairwise(stepwise(fed, FedSSO(drift="steady"), 9, batch_size=batch, seed=seed)), 1
        ):
            assert float(before.choice.alpha) == pytest.approx(alpha, rel=1e-12)
            if 2 <= k <= client_step.CHOOSING:
                L = float((after.g - before.g).norm() / before.s.norm())
                seen["flatter" if least > L else "steeper"] += k > 2
                least = min(L, least)
                wanted = client_step.STEADY / (3 * least)
                seen[
                    "largest"
                    if wanted > client_step.LARGEST
                    else "raised"
                    if wanted > alpha
                    else "not raised"
                ] += 1
                alpha = min(wanted, client_step.LARGEST)
            assert float(after.choice.alpha) == pytest.approx(alpha, rel=1e-12)
            assert float(after.choice.L) == pytest.approx(least, rel=1e-12)
    assert (
        min(seen[event] for event in ("steeper", "flatter", "largest", "raised", "not raised")) >= 1
    ), seen


def test_the_trace_tells_the_step(quad: Federation) -> None:
    run_: Run = simulate(quad, algorithm=FedSSO(), rounds=7, local_steps=4, **EXACT)
    assert np.isnan(run_.trace["alpha"][0])
    assert run_.trace["alpha"][1:].tolist() == alphas(quad, local_steps=4)
    assert (
        "alpha" not in simulate(quad, algorithm=FedSSO(alpha=0.1), rounds=1, **EXACT).trace.columns
    )


def test_the_clients_use_the_step_of_the_message(quad: Federation) -> None:
    states = stepwise(quad, FedSSO(), 7, "linear", batch_size=None, local_steps=4)
    for before, after in pairwise(states):
        alpha = float(before.choice.alpha)
        v = fly(quad, FedAvg(alpha=alpha), 1, local_steps=4, init=before.x[0])
        torch.testing.assert_close(
            after.g[0], (before.x[0] - v) / (4 * alpha), rtol=1e-12, atol=1e-13
        )
    assert len({float(state.choice.alpha) for state in states}) >= 3


def test_the_message_is_the_model_and_one_number(quad: Federation) -> None:
    fixed, auto = (
        simulate(quad, algorithm=FedSSO(alpha=a), rounds=2, **EXACT).trace for a in (0.01, "auto")
    )
    np.testing.assert_array_equal(fixed["bytes_down"][1:], 4 * 6 * 8)
    np.testing.assert_array_equal(auto["bytes_down"][1:], 4 * (6 + 1) * 8)
    np.testing.assert_array_equal(auto["bytes_up"], fixed["bytes_up"])


def test_auto_follows_the_scale_of_the_features() -> None:
    """Features c times as large, x and its start 1/c: the Hessian is c^2 times as large.

    With one local step y = H s, so that L lies between the ends of the spectrum of H. Several steps
    of alpha_1 = 0.01 hide a part of it, most of a client's steepest direction, 10 c^2: what they
    show of it is 1 - (1 - z)^tau of tau z, with z = 0.01 * 10 c^2. The first pair is of that kind.
    """
    draw = torch.Generator().manual_seed(11)
    Q = torch.linalg.qr(torch.randn(3, 6, 6, generator=draw, dtype=torch.float64)).Q
    A = Q @ torch.diag(torch.linspace(1, 10, 6, dtype=torch.float64)) @ Q.mT
    b = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    A, start = (A + A.mT) / 2, torch.ones(6, dtype=torch.float64)

    low, *_, high = torch.linalg.eigvalsh(A.mean(0)).tolist()
    for tau, c in itertools.product((1, 5), (1, 0.7, 3)):
        fed = quadratic(c * c * A, b / c)
        found = tau * c * c * alphas(fed, local_steps=tau, init=start / c)[-1]
        z = FIRST * 10 * c * c
        shown = (1 - (1 - z) ** tau) / (tau * z)
        assert DRIFT / high * (1 - 1e-9) <= found <= DRIFT / (shown * low) * (1 + 1e-9)
    lines = (one_dimension([10 * c * c, 30 * c * c], [0, 2 / c], [0.5, 0.5]) for c in (1, 3))
    assert [alphas(line, local_steps=1)[3] for line in lines] == pytest.approx(
        [DRIFT / 20, DRIFT / 180], rel=1e-9
    )


def test_auto_has_nothing_to_choose_at_the_optimum() -> None:
    """g = 0, so s = y = 0: the step stays what it is, and the run where it is."""
    fed = one_dimension([1.0], [0.0], [1.0])
    run_: Run = simulate(fed, algorithm=FedSSO(), rounds=6, init=torch.zeros(1), **EXACT)
    assert run_.diverged is None
    assert run_.trace["alpha"][1:].tolist() == [FIRST] * 6


def test_stacked_trials_choose_each_their_own_step(fed: Federation) -> None:
    records = [FedSSO(eta=eta, lam=lam) for eta, lam in ((0.01, 1e-4), (0.02, 1e-4), (1.0, 0.5))]
    options: dict[str, Any] = {**NOISY, "participation": 0.6}
    together = compare(fed, "mclr", records, rounds=7, **options)
    ends = [stepwise(fed, record, 7, participation=0.6)[-1] for record in records]
    assert len({float(end.choice.alpha) for end in ends}) == 3
    for run_, end in zip(together, ends, strict=True):
        torch.testing.assert_close(run_.x, end.x[0], rtol=1e-10, atol=1e-12)


def test_auto_and_fixed_steps_in_one_sweep(fed: Federation) -> None:
    records = [FedSSO(alpha=0.05), FedSSO(), FedSSO(alpha=Decay(0.1, 2.0)), FedSSO(eta=0.5)]
    for record, run_ in zip(records, compare(fed, "mclr", records, rounds=4, **NOISY), strict=True):
        torch.testing.assert_close(
            run_.x, simulate(fed, "mclr", record, rounds=4, **NOISY).x, rtol=1e-10, atol=1e-12
        )
        assert run_.spec.record == record


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
def test_a_run_resumed_in_its_first_rounds_goes_on_to_the_bit(
    fed: Federation, quad: Federation, k: int
) -> None:
    for data, model, batch in ((fed, "mclr", 4), (quad, "linear", None)):
        full = {**NOISY, "dtype": "float32", "batch_size": batch}
        whole, half, rest = (Simulation(data, model, [FedSSO()], **full) for _ in range(3))
        run(whole, 9)
        run(half, k)
        rest.restore({name: leaf.clone() for name, leaf in half.state().items()})
        run(rest, 9)
        a, b = whole.server, rest.server
        assert all(map(torch.equal, (a.x, *a.guard, *a.choice), (b.x, *b.guard, *b.choice)))
        assert float(a.choice.alpha) != pytest.approx(FIRST)
    assert float(a.guard.gamma) not in (1, float(half.server.guard.gamma))  # of the quadratic


def test_a_checkpoint_of_an_older_version_is_refused(fed: Federation) -> None:
    """Versions before this one kept what the trace tells as one tensor, server.seen [trials, 5]."""
    full = dict(NOISY)
    half, rest = (Simulation(fed, "mclr", [FedSSO()], **full) for _ in range(2))
    run(half, 2)
    state = {name: leaf for name, leaf in half.state().items() if ".seen." not in name}
    state["server.seen"] = torch.zeros(1, 5, dtype=torch.float64)
    with pytest.raises(InputError, match=r"lacks server\.seen\.ys; perhaps another version"):
        rest.restore(state)
    assert rest.k == 0


# --- alpha="auto" where its first step is far too long
# ----------------------------------------------------------------
def unscaled(factor: float, column: int | None = 4, *, real: bool = False) -> Federation:
    """Four clients, five Gaussian columns of which one, or all, have another unit."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 5, generator=draw, dtype=torch.float64)
    y = x @ torch.ones(5, dtype=torch.float64) if real else (x[:, 0] > 0).long()
    unit = (
        torch.where(torch.arange(5) == column, factor, 1.0)
        if column is not None
        else torch.tensor(factor)
    )
    return Federation.from_arrays(x * unit, y, np.arange(400) % 4)


@pytest.mark.parametrize("column", [4, None])
@pytest.mark.parametrize("model", ["mclr", "mlp", "linear"])
def test_a_table_without_scaling_does_not_end_the_default(model: str, column: int | None) -> None:
    """Up to 1e17 in float32: the step that such a column needs is still a number there, below it is
    not."""
    for factor in (1e4, 1e10, 1e17):
        run_: Run = simulate(
            unscaled(factor, column, real=model == "linear"),
            model,
            FedSSO(),
            rounds=20,
            device="cpu",
        )
        trace, undone = run_.trace, np.isnan(run_.trace["train_loss"][1:])
        assert run_.diverged is None
        assert undone[0]
        assert undone.sum() < 15
        assert trace["alpha"][1:3].tolist() == pytest.approx(
            [FIRST, client_step.SHRINK * FIRST], rel=1e-6
        )
        assert np.isfinite(trace["test_loss"]).all()
        sound = int(undone.argmin()) + 1
        assert trace["train_loss"][sound] <= client_step.WARY * trace["test_loss"][0]
    assert trace["test_loss"][1] == trace["test_loss"][0]


def test_the_default_learns_from_a_table_with_one_large_column() -> None:
    for fed, model in (
        (unscaled(1e4), "mclr"),
        (unscaled(1e3, real=True), "linear"),
        (unscaled(1e6, None), "mclr"),
    ):
        loss = simulate(fed, model, FedSSO(), rounds=60, device="cpu").trace["test_loss"]
        assert loss.min() < 0.7 * loss[0]


def test_the_smallest_step_is_an_end() -> None:
    """Columns of 1e30 need a step of 1e-60, which float64 has and float32 has not: its least number
    is 1.2e-38, and after eleven of twelve explosions alpha is 1e-2 * 1e-33."""
    fed = unscaled(1e30)
    runs = [
        simulate(fed, "mclr", FedSSO(), rounds=40, dtype=dtype, device="cpu")
        for dtype in ("float32", "float64")
    ]
    assert runs[0].diverged == 12
    assert runs[1].diverged is None
    assert (
        simulate(fed, "mclr", FedSSO(), rounds=3, device="cpu").diverged == 3
    )  # no round was ever sound


@pytest.mark.parametrize("values", [{"alpha": FIRST}, {"guard": "none"}])
def test_an_explosion_stays_a_divergence_with_a_given_step_or_without_the_guard(
    values: dict[str, Any],
) -> None:
    assert simulate(unscaled(1e4), "mclr", FedSSO(**values), rounds=4, device="cpu").diverged == 1


def fail() -> tuple[Any, Tensor]:
    raise AssertionError("nothing can be undone")


def test_what_an_explosion_leaves(fed: Federation) -> None:
    """The model before the last step, which stands for round 1 again; the trials that can go on are
    told."""
    record = FedSSO()
    before, after = stepwise(fed, record, 6)[-2:]
    back, possible = record.undo(after) or fail()
    assert possible.tolist() == [True]
    torch.testing.assert_close(back.x, before.x, rtol=1e-14, atol=1e-15)
    fresh = record.server_init(before.x)
    assert all(map(torch.equal, (back.s, *back.guard), (fresh.s, *fresh.guard)))
    assert back.curvature is after.curvature
    assert float(back.choice.alpha) == pytest.approx(
        client_step.SHRINK * float(after.choice.alpha), rel=1e-12
    )
    assert (float(back.choice.L), float(back.choice.undone)) == (np.inf, 1)
    # The narrow bound holds only while no round of the run was sound: the model gone back to may
    # lie beyond it, and then every round would be undone until alpha is too small.
    none = back._replace(g=0 * back.g)
    assert [float(record.bears(state)) for state in (after, back, none, fresh)] == [
        1000,
        1000,
        client_step.WARY,
        1000,
    ]
    tiny = after._replace(
        choice=after.choice._replace(alpha=torch.full_like(after.choice.alpha, 1e-306))
    )
    assert [
        (record.undo(state) or fail())[1].item() for state in (tiny, tiny._replace(s=0 * tiny.s))
    ] == [True, False]
    assert FedSSO(alpha=0.1).undo(after) is None


@pytest.mark.parametrize("before", [2, 10])
def test_the_step_is_chosen_anew_after_an_explosion(
    before: int, fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sound round counts as round 1; the four after it choose, with the largest L."""
    sim = Simulation(fed, "mclr", [FedSSO()], rounds=40, dtype="float64", device="cpu")
    run(sim, before)
    with monkeypatch.context() as patch:
        patch.setattr(sim, "_judge", lambda *_: torch.tensor([False]))
        run(sim, before + 1)
    shrunk = float(sim.server.choice.alpha)
    run(sim, before + 2)
    assert float(sim.server.choice.alpha) == shrunk
    assert sim.k - float(sim.server.choice.undone) == 1
    found, steps = [], []
    for _ in range(6):
        old = sim.server
        run(sim, sim.k + 1)
        found.append(float((sim.server.g - old.g).norm() / old.s.norm()))
        steps.append(float(sim.server.choice.alpha))
        assert float(sim.server.choice.L) == pytest.approx(max(found[:4]), rel=1e-12)
    tau = sim.settings.local_steps
    wanted = min(client_step.LARGEST, DRIFT / (tau * max(found[:4])))
    assert steps[3:] == pytest.approx(3 * [wanted], rel=1e-12)


def test_a_late_pair_decides_after_an_explosion_too() -> None:
    """Nobody answers for some rounds after the undone one, so that none of the four has a pair."""
    choice, _ = client_step.shrink(client_step.start(torch.zeros(1, 3, dtype=torch.float64)))
    products = torch.eye(3, dtype=torch.float64)[None] * 4.0
    products[0, 0, 0] = 1.0  # L = 2
    late = client_step.choose(choice, products, Cohort(10, 1, torch.arange(1), 1.0, 5.0))
    assert (float(late.L), float(late.alpha)) == (2.0, pytest.approx(DRIFT / (5 * 2)))


def test_trials_are_undone_each_for_itself() -> None:
    """eta = 1e-6 creeps, so that its second round is another one; both are as they are alone."""
    fed, records = unscaled(1e3), [FedSSO(), FedSSO(eta=1e-6)]
    options: dict[str, Any] = {"rounds": 8, "dtype": "float64", "device": "cpu"}
    for record, run_ in zip(records, compare(fed, "mclr", records, **options), strict=True):
        alone: Run = simulate(fed, "mclr", record, **options)
        torch.testing.assert_close(run_.x, alone.x, rtol=1e-8, atol=1e-12)
        np.testing.assert_array_equal(
            np.isnan(run_.trace["train_loss"]), np.isnan(alone.trace["train_loss"])
        )


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("compress", [None, "topk:0.5"])
def test_a_run_resumed_after_an_undone_round_goes_on_to_the_bit(
    k: int, compress: str | None
) -> None:
    full = {"local_steps": 3, "batch_size": 8, "device": "cpu", "compress": compress}
    whole, half, rest = (Simulation(unscaled(1e6), "mclr", [FedSSO()], **full) for _ in range(3))
    run(whole, 7)
    with torch.no_grad():
        for _ in range(k):  # not the last round of a run
            half.round()
    rest.restore({name: leaf.clone() for name, leaf in half.state().items()})
    run(rest, 7)
    a, b = whole.server, rest.server
    assert all(map(torch.equal, (a.x, *a.guard, *a.choice), (b.x, *b.guard, *b.choice)))
    assert float(a.choice.undone) >= 1
    assert bool(whole.ended == -1)
    assert all(error.isfinite().all() for error in whole.errors.values())


# --- memory, diagnostics, errors
# -------------------------------------------------------------------------------------
def test_leaving_pairs_are_logged_once(quad: Federation, caplog: pytest.LogCaptureFixture) -> None:
    def told(**extra: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "fedsso"):
            fly(quad, FedSSO(alpha=0.1, guard="none", pairs=3, **extra), 9)
        return [r.message for r in caplog.records if "oldest" in r.message]

    assert told() == ["round 5: 3 pairs are held at most, from now on the oldest is dropped"]
    assert told(form="dfp") == [
        ("round 5: 3 pairs are held at most, from now on the oldest is dropped")
    ]
    assert told(R=4) == []
    assert told(form="bfgs-dense") == told(form="lbfgs") == []


def test_only_the_newest_pairs_are_held(quad: Federation) -> None:
    """With pairs = 2 the matrix of round k comes from the pairs of rounds k - 1 and k alone."""
    states = stepwise(
        quad, FedSSO(alpha=0.1, eta=0.3, guard="none", pairs=2), 7, "linear", batch_size=None
    )
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
    assert state.curvature.store.shape[1] == 24
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
        simulate(
            fed,
            algorithm=FedSSO(alpha=0.1, eta=0.3, guard="none", R=R, **narrow),
            rounds=4,
            **EXACT,
        ).trace
        for R in (None, 4)
    )
    assert every["overridden"].tolist() == [0, 0, 1, 1, 1]
    assert reset["overridden"].tolist() == [0, 0, 1, 1, 0]
    assert reset["skipped"].tolist() == [0] * 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"lam": 10.0, "Lam": 1.0},
            r"lam.*< Lam.*lam=10.0, Lam=1.0.*1e-4 and 9999",
        ),
        ({"R": 1}, r"R must be an integer >= 2, got R=1"),
        ({"R": 2.5}, r"R must be an integer >= 2, got R=2.5"),
        ({"pairs": 0}, r"pairs must be an integer >= 1, got pairs=0"),
        ({"m": 0}, r"m must be an integer >= 1, got m=0"),
        ({"alpha": 0}, r"alpha must be > 0 and finite, got alpha=0"),
        ({"eta": float("inf")}, r"eta must be > 0 and finite, got eta=inf"),
        ({"alpha": True}, r"alpha must be a number, got alpha=True"),
        (
            {"eta": "auto"},
            r"eta='auto'.*give a number.*eta=0.1",
        ),
        ({"alpha": "outo"}, r"^alpha (?=.*'outo')(?=.*\bauto\b)"),
        ({"guard": "adaptve"}, r"unknown guard 'adaptve'; did you mean 'adaptive'\?"),
        ({"form": "bfsg"}, r"unknown form 'bfsg'; did you mean 'bfgs'\?"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedSSO(**values)
