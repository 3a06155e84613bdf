"""The curvature rule and the five forms, against explicit matrices and loops written out here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsso import Federation, FedSSO, simulate
from fedsso.errors import InputError
from fedsso.maths import quasi_newton as qn
from fedsso.support.linalg import gram

LAM, LAMB = 0.5, 4.0  # narrow, so that many pairs of `sequence` are overridden
# share of negative curvatures at which the explicit matrix still has its digits (B of BFGS loses
# them, H does not)
MILD = {"bfgs": 0.06, "dfp": 0.5}
LOW_RANK = ("bfgs", "dfp")
EPS = torch.finfo(torch.float64).eps
Triple = tuple[Tensor, Tensor, Tensor]


def judge(s: Tensor, y: Tensor, lam: Any, Lam: Any, **options: Any) -> qn.Verdict:
    return qn.judge(gram(s, y), lam, Lam, **options)


class Run(NamedTuple):
    directions: list[Tensor]
    verdicts: list[qn.Verdict]
    state: Any


def sequence(
    d: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float64, negative: float = 0.25
) -> list[Triple]:
    """k triples (s, y, g) of a quadratic with noise; a share of its curvatures is negative."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
    curvature = np.geomspace(0.1, 5.0, d) * np.where(rng.random(d) < negative, -1, 1)
    hessian = basis * curvature @ basis.T
    steps = rng.standard_normal((k, d))
    changes = steps @ hessian + 0.05 * rng.standard_normal((k, d))
    gradients = rng.standard_normal((k, d))
    stacked = torch.from_numpy(np.stack((steps, changes, gradients), 1)).to(dtype)
    return [(s, y, g) for s, y, g in stacked]


def run(
    name: str,
    triples: list[Triple],
    lam: float = LAM,
    Lam: float = LAMB,
    pairs: int = 64,
    m: int = 64,
    gamma: float | Tensor = 1.0,
) -> Run:
    form = qn.form(name, pairs, m, gamma)
    state = form.init(triples[0][0])
    directions, verdicts = [], []
    for k, (s, y, g) in enumerate(triples, 1):
        verdict = judge(s, y, lam, Lam, dual=form.dual)
        state, direction = form.step(state, s, y, g, verdict, k, False)
        directions.append(direction)
        verdicts.append(verdict)
    return Run(directions, verdicts, state)


def rule(s: np.ndarray, y: np.ndarray, lam: float, Lam: float, dual: bool) -> tuple[float, float]:
    """(rho, cur) as the paper writes it."""
    rho, square = float(y @ s), float(s @ s if dual else y @ y)
    good = rho > 0 and lam < square / rho < Lam
    return rho, rho if good else 2 * square / (lam + Lam)


def explicit(
    name: str, triples: list[Triple], gamma: float = 1.0, start: np.ndarray | None = None
) -> tuple[list[np.ndarray], list[float]]:
    """All directions by d x d matrices in float64, and the condition of each matrix (B of BFGS, H
    of DFP), which begins as `start` or else as I / gamma."""
    matrix = np.eye(len(triples[0][0])) / gamma if start is None else start
    directions, conditions = [], []
    for s, y, g in ([v.double().numpy() for v in triple] for triple in triples):
        _, cur = rule(s, y, LAM, LAMB, name == "dfp")
        a, b = (s, y) if name == "dfp" else (y, s)
        image = matrix @ b
        matrix = matrix + np.outer(a, a) / cur - np.outer(image, image) / (b @ image)
        directions.append(matrix @ g if name == "dfp" else np.linalg.solve(matrix, g))
        conditions.append(float(np.linalg.cond(matrix)))
    return directions, conditions


def rounding(k: int, condition: float, d: int = 50) -> float:
    """How far two directions of k updates may be apart: each update leaves d eps ||B|| in B, and a
    solve multiplies what k of them left by the condition. A product with H, whose image is no
    shorter than 1/condition, does as well."""
    return 2 * k * d * EPS * condition


def two_loop(
    pairs: list[Triple],
    g: Tensor,
    gamma: float,
    lam: float = LAM,
    Lam: float = LAMB,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """The textbook recursion with the true rho, and cur only where B^-1 has it; in extended
    precision. It starts from gamma times a matrix, or else gamma I."""
    q = g.double().numpy().astype(np.longdouble)
    held = []
    for s, y, _ in reversed(pairs):
        s_, y_ = s.double().numpy().astype(np.longdouble), y.double().numpy().astype(np.longdouble)
        rho, cur = rule(s_, y_, lam, Lam, dual=False)
        a = (s_ @ q) / rho
        q = q - a * y_
        held.append((s_, y_, rho, cur, a))
    r = gamma * (q if start is None else start.astype(np.longdouble) @ q)
    for s_, y_, rho, cur, a in reversed(held):
        r = r + s_ * (cur / rho * a - (y_ @ r) / rho)
    return r.astype(np.float64)


def error(direction: Tensor, reference: np.ndarray) -> float:
    return float(np.linalg.norm(direction.double().numpy() - reference) / np.linalg.norm(reference))


def overridden(verdicts: list[qn.Verdict]) -> int:
    return sum(int(v.overridden) for v in verdicts)


def inverse(name: str, result: Run, k: int, pairs: int = 64) -> np.ndarray:
    """H as a matrix: pairs that are not accepted change nothing, so g = e_1, e_2, ... reads its
    columns."""
    form, d = qn.form(name, pairs, pairs), len(result.directions[0])
    zero = torch.zeros(d, dtype=torch.float64)
    nothing = judge(zero, zero, LAM, LAMB)
    eye = torch.eye(d, dtype=torch.float64)
    columns = [form.step(result.state, zero, zero, e, nothing, k + 1, False)[1] for e in eye]
    return torch.stack(columns, -1).numpy()


def readable(state: Any) -> tuple[Tensor, ...]:
    """The parts of a state that a later step may read: all but the next slot of a spare ring."""
    if isinstance(state, qn.Pairs) and not state.oldest.numel():
        ring = torch.arange(len(state.store))
        return (state.store[ring != state.head], *state[1:])
    return tuple(state)


# ---- the matrices


@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("suffix", ["", "-dense"])
def test_every_form_is_the_explicit_matrix(name: str, suffix: str) -> None:
    triples = sequence(50, 50, negative=MILD[name])
    result = run(name + suffix, triples)
    assert overridden(result.verdicts) >= 10
    for k, (direction, reference, condition) in enumerate(
        zip(result.directions, *explicit(name, triples), strict=True), 1
    ):
        assert error(direction, reference) <= rounding(k, condition)


@pytest.mark.parametrize("name", LOW_RANK)
def test_dense_is_low_rank(name: str) -> None:
    triples = sequence(50, 50, seed=3, negative=MILD[name])
    low, dense = run(name, triples), run(f"{name}-dense", triples)
    assert overridden(low.verdicts) >= 10
    _, conditions = explicit(name, triples)
    for k, (a, b, condition) in enumerate(
        zip(low.directions, dense.directions, conditions, strict=True), 1
    ):
        assert error(a, b.numpy()) <= rounding(k, condition)


@given(seed=st.integers(0, 2**31), d=st.integers(2, 8), k=st.integers(1, 12), wide=st.booleans())
@settings(max_examples=60, deadline=None)
def test_bfgs_is_the_two_loop(seed: int, d: int, k: int, wide: bool) -> None:
    bounds = (1e-4, 9999.0) if wide else (LAM, LAMB)
    triples = [
        t for t in sequence(d, k, seed) if abs(torch.cosine_similarity(t[0], t[1], 0)) > 1e-2
    ]
    if triples:
        result = run("bfgs", triples, *bounds)
        assert error(result.directions[-1], two_loop(triples, triples[-1][2], 1.0, *bounds)) <= 1e-9


@given(seed=st.integers(0, 2**31), d=st.integers(2, 8), k=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_dfp_is_the_explicit_matrix(seed: int, d: int, k: int) -> None:
    triples = sequence(d, k, seed)
    result = run("dfp", triples)
    assert error(result.directions[-1], explicit("dfp", triples)[0][-1]) <= 1e-8


@pytest.mark.parametrize("gamma", [0.2, 3.0, 100.0])
def test_gamma_is_the_inverse_of_what_b_starts_from(gamma: float) -> None:
    """Against B itself, which starts from I / gamma: by hand, and in the dense form."""
    triples = sequence(50, 30, negative=MILD["bfgs"])
    low, plain = run("bfgs", triples, gamma=gamma), run("bfgs", triples)
    assert overridden(low.verdicts) >= 5
    form, dense = qn.form("bfgs-dense", 1, 1), qn.Matrix(torch.eye(50, dtype=torch.float64) / gamma)
    reference, conditions = explicit("bfgs", triples, gamma=gamma)
    for k, ((s, y, g), verdict) in enumerate(zip(triples, low.verdicts, strict=True), 1):
        dense, direction = form.step(dense, s, y, g, verdict, k, False)
        assert error(low.directions[k - 1], direction.numpy()) <= rounding(k, conditions[k - 1])
        assert error(low.directions[k - 1], reference[k - 1]) <= rounding(k, conditions[k - 1])
        assert error(low.directions[k - 1], plain.directions[k - 1].numpy()) > 0.1


@given(
    seed=st.integers(0, 2**31),
    d=st.integers(2, 8),
    k=st.integers(1, 12),
    gamma=st.floats(1e-2, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_bfgs_with_gamma_is_the_two_loop(seed: int, d: int, k: int, gamma: float) -> None:
    triples = [
        t for t in sequence(d, k, seed) if abs(torch.cosine_similarity(t[0], t[1], 0)) > 1e-2
    ]
    if triples:
        result = run("bfgs", triples, gamma=gamma)
        assert error(result.directions[-1], two_loop(triples, triples[-1][2], gamma)) <= 1e-9


@pytest.mark.parametrize("keep", [4, 64])
def test_gamma_may_change_from_round_to_round(keep: int) -> None:
    """Nothing that is stored depends on it: a direction is that of the pairs held, from the gamma
    of its own round."""
    triples = sequence(10, 12, seed=16)
    state = qn.form("bfgs", keep, 1).init(triples[0][0])
    for k, (s, y, g) in enumerate(triples, 1):
        gamma = (1.0, 7.0, 100.0, 0.5)[k % 4]
        state, direction = qn.form("bfgs", keep, 1, gamma).step(
            state, s, y, g, judge(s, y, LAM, LAMB), k, False
        )
        assert error(direction, two_loop(triples[max(0, k - keep) : k], g, gamma)) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gamma_of_1_is_none_to_the_bit(dtype: torch.dtype) -> None:
    triples = stacked((3,), 8, 9, dtype)
    a, b = (
        run("bfgs", triples, pairs=5),
        run("bfgs", triples, pairs=5, gamma=torch.ones(3, 1, dtype=torch.float64)),
    )
    assert all(map(torch.equal, a.directions, b.directions))
    assert b.directions[0].dtype == dtype


@pytest.mark.parametrize("name", [name for name in qn.FORMS if name != "bfgs"])
def test_the_other_forms_have_no_gamma(name: str) -> None:
    triples = sequence(8, 5, seed=17)
    assert all(
        map(torch.equal, run(name, triples, gamma=9.0).directions, run(name, triples).directions)
    )


# ---- a metric instead of the identity


def metrics(count: int, d: int, seed: int = 21) -> list[np.ndarray]:
    """Symmetric matrices with eigenvalues from 1/5 to 5."""
    rng = np.random.default_rng(seed)
    bases = [np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(count)]
    found = [basis * rng.permutation(np.geomspace(0.2, 5.0, d)) @ basis.T for basis in bases]
    return [(K + K.T) / 2 for K in found]


def product(*matrices: np.ndarray) -> Callable[[Tensor], Tensor]:
    """K v, for one vector and one matrix, or for a vector and a matrix of every trial."""
    K = torch.from_numpy(np.stack(matrices) if len(matrices) > 1 else matrices[0])
    return lambda v: (K.to(v.dtype) @ v[..., None])[..., 0]


def with_metrics(
    triples: list[Triple], products: list[Callable[[Tensor], Tensor] | None], **options: Any
) -> Run:
    """BFGS with a metric of its own in every round, and a reset in rounds `resets`."""
    resets = options.pop("resets", ())
    keep = options.pop("pairs", 64)
    directions, verdicts = [], []
    state = qn.form("bfgs", keep, 1, half=options.get("half", False)).init(triples[0][0])
    for k, ((s, y, g), metric) in enumerate(zip(triples, products, strict=True), 1):
        verdict = judge(s, y, LAM, LAMB)
        form = qn.form("bfgs", keep, 1, metric=metric, **options)
        state, direction = form.step(state, s, y, g, verdict, k, k in resets)
        directions.append(direction)
        verdicts.append(verdict)
    return Run(directions, verdicts, state)


@pytest.mark.parametrize("gamma", [0.2, 1.0, 30.0])
def test_b_starts_from_one_over_the_metric(gamma: float) -> None:
    """Against B itself, which starts from (gamma K)^-1: by hand, and in the dense form."""
    triples = sequence(50, 30, negative=MILD["bfgs"])
    (K,) = metrics(1, 50)
    result = with_metrics(triples, [product(K)] * 30, gamma=gamma)
    assert overridden(result.verdicts) >= 5
    start = np.linalg.inv(gamma * K)
    reference, conditions = explicit("bfgs", triples, start=start)
    form, dense = qn.form("bfgs-dense", 1, 1), qn.Matrix(torch.from_numpy(start))
    plain = run("bfgs", triples, gamma=gamma)
    for k, ((s, y, g), verdict) in enumerate(zip(triples, result.verdicts, strict=True), 1):
        dense, direction = form.step(dense, s, y, g, verdict, k, False)
        bound = rounding(k, conditions[k - 1])
        assert bound < 1e-4
        assert error(result.directions[k - 1], reference[k - 1]) <= bound
        assert error(result.directions[k - 1], direction.numpy()) <= bound
        assert error(result.directions[k - 1], plain.directions[k - 1].numpy()) > 0.01


@given(
    seed=st.integers(0, 2**31),
    d=st.integers(2, 8),
    k=st.integers(1, 12),
    gamma=st.floats(1e-2, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_bfgs_with_a_metric_is_the_two_loop(seed: int, d: int, k: int, gamma: float) -> None:
    triples = [
        t for t in sequence(d, k, seed) if abs(torch.cosine_similarity(t[0], t[1], 0)) > 1e-2
    ]
    if triples:
        (K,) = metrics(1, d, seed)
        result = with_metrics(triples, [product(K)] * len(triples), gamma=gamma)
        expected = two_loop(triples, triples[-1][2], gamma, start=K)
        assert error(result.directions[-1], expected) <= 1e-9


@pytest.mark.parametrize("keep", [1, 4, 64])
@pytest.mark.parametrize("resets", [(), (6,), (1, 5, 9, 12)])
def test_the_metric_may_change_from_round_to_round(keep: int, resets: tuple[int, ...]) -> None:
    """Nothing that is stored depends on it, and a reset leaves gamma K of its own round.

    Every third round has none at all.
    """
    triples = sequence(10, 12, seed=16)
    each = metrics(12, 10)
    products = [None if k % 3 == 2 else product(K) for k, K in enumerate(each)]
    gammas = [(1.0, 7.0, 100.0, 0.5)[k % 4] for k in range(12)]
    state = qn.form("bfgs", keep, 1).init(triples[0][0])
    held: list[Triple] = []
    for k, (triple, K, metric, gamma) in enumerate(
        zip(triples, each, products, gammas, strict=True), 1
    ):
        s, y, g = triple
        form = qn.form("bfgs", keep, 1, gamma, metric=metric)
        state, direction = form.step(state, s, y, g, judge(s, y, LAM, LAMB), k, k in resets)
        held = [] if k in resets else [*held, triple][-keep:]
        start = np.eye(10) if metric is None else K
        assert int(state.held) == len(held)
        assert error(direction, two_loop(held, g, gamma, start=start)) <= 1e-10


def test_the_secant_equation_with_a_metric() -> None:
    """B s = (rho/cur) y whatever B starts from; bounds as in `test_secant_equation`."""
    for k in range(1, 16):
        *before, (s, y, _) = sequence(12, k, seed=k)
        (K,) = metrics(1, 12, seed=k)
        result = with_metrics([*before, (s, y, y)], [product(K)] * k)
        verdict = result.verdicts[-1]
        expected = (verdict.cur / verdict.rho * s).numpy()
        assert error(result.directions[-1], expected) <= 1e3 * len(s) * EPS


@pytest.mark.parametrize("keep", [5, 64])
def test_the_identity_is_no_metric(keep: int) -> None:
    """To 1e-10, as far as two formulas for the same sum agree."""
    triples = stacked((3,), 8, 9, torch.float64)
    gamma = torch.tensor([[1.0], [3.0], [50.0]], dtype=torch.float64)
    found = with_metrics(triples, [torch.clone] * 9, pairs=keep, gamma=gamma, resets=(7,))
    plain = with_metrics(triples, [None] * 9, pairs=keep, gamma=gamma, resets=(7,))
    for a, b in zip(found.directions, plain.directions, strict=True):
        for one, other in zip(a, b, strict=True):
            assert error(one, other.numpy()) <= 1e-10


@pytest.mark.parametrize("half", [False, True])
def test_a_metric_in_single_precision(half: bool) -> None:
    """One pair, exact also in bfloat16 since it has been rounded: H = E K E^T + (cur/rho^2) s s^T
    with E = I - s y^T/rho, whose norm is 1/cos(s, y).

    A dozen sums of 8 terms each lose 8 eps of their largest term.
    """
    form = qn.form("bfgs", 1, 1, half=True)
    (K,) = metrics(1, 8)
    for s, y, g in sequence(8, 9, seed=22, dtype=torch.float32, negative=0):
        s, y = qn.rounded(form, s), qn.rounded(form, y)
        result = with_metrics([(s, y, g)], [product(K)], pairs=1, half=half)
        verdict = result.verdicts[0]
        size = np.linalg.norm(K, 2) * (1 + 1 / abs(float(torch.cosine_similarity(s, y, 0)))) ** 2
        size += float(verdict.cur / verdict.rho**2 * (s @ s))
        found = result.directions[0]
        expected = two_loop([(s, y, g)], g, 1.0, start=K)
        lost = np.linalg.norm(found.double().numpy() - expected)
        assert lost <= 12 * 8 * torch.finfo(torch.float32).eps * size * float(g.norm())
        assert found.dtype == torch.float32
        assert result.state.store.dtype == (torch.bfloat16 if half else torch.float32)


def test_every_trial_has_its_own_metric() -> None:
    triples = stacked((3,), 8, 9, torch.float64)
    each = metrics(3, 8)
    together = with_metrics(triples, [product(*each)] * 9, pairs=5, resets=(8,))
    for i, K in enumerate(each):
        alone = [(s[i], y[i], g[i]) for s, y, g in triples]
        single = with_metrics(alone, [product(K)] * 9, pairs=5, resets=(8,))
        for a, b in zip(together.directions, single.directions, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reset", [False, True])
def test_a_metric_of_nan_costs_only_its_own_trial_the_direction(reset: bool) -> None:
    triples = stacked((3,), 8, 9, torch.float64)
    each = metrics(3, 8)
    ill = [each[0], np.full((8, 8), np.nan), each[2]]
    s, y, g = triples[-1]
    found = []
    for matrices in (each, ill):
        before = with_metrics(triples[:-1], [product(*each)] * 8)
        form = qn.form("bfgs", 64, 1, metric=product(*matrices))
        after, direction = form.step(before.state, s, y, g, judge(s, y, LAM, LAMB), 9, reset)
        found.append(direction)
        assert all(part.isfinite().all() for part in (after.gram, after.cur))
    torch.testing.assert_close(found[1][[0, 2]], found[0][[0, 2]], rtol=1e-12, atol=0)
    assert found[1][1].isnan().any()


@pytest.mark.parametrize("name", [name for name in qn.FORMS if name != "bfgs"])
def test_the_other_forms_have_no_metric(name: str) -> None:
    s, y, g = sequence(8, 1, seed=17)[0]
    (K,) = metrics(1, 8)
    found = []
    for metric in (None, product(K)):
        form = qn.form(name, 4, 4, metric=metric)
        verdict = judge(s, y, LAM, LAMB, dual=form.dual)
        found.append(form.step(form.init(s), s, y, g, verdict, 1, False)[1])
    assert torch.equal(*found)


# ---- precision


# H g is a sum of two or three vectors for each of 60 pairs in float32, each of which may be rounded
SINGLE = 2 * 60 * torch.finfo(torch.float32).eps


def test_float32_store_keeps_bfgs_to_single_precision() -> None:
    triples = sequence(80, 60, seed=5, dtype=torch.float32)
    result = run("bfgs", triples)
    assert overridden(result.verdicts) >= 20
    errors = [
        error(x, two_loop(triples[: i + 1], triples[i][2], 1.0))
        for i, x in enumerate(result.directions)
    ]
    assert max(errors) <= SINGLE
    assert result.directions[-1].dtype == result.state.store.dtype == torch.float32


def test_float32_store_keeps_dfp_to_single_precision() -> None:
    triples = sequence(80, 60, seed=5, dtype=torch.float32, negative=MILD["dfp"])
    result = run("dfp", triples)
    assert overridden(result.verdicts) >= 10
    assert max(map(error, result.directions, explicit("dfp", triples)[0])) <= SINGLE


@pytest.mark.parametrize("name", [name for name in qn.FORMS if name != "bfgs-dense"])
def test_secant_equation(name: str) -> None:
    """B s = (rho/cur) y, dual: H y = (rho/cur) s; with and without an enforced cur.

    These forms multiply by H and solve nothing. Rounding leaves n eps ||H|| ||y|| in H y, which is
    at most a thousand times n eps ||H y|| for these pairs.
    """
    seen = set()
    for k in range(1, 16):
        *before, (s, y, _) = sequence(12, k, seed=k)
        result = run(name, [*before, (s, y, y)], m=6)
        verdict = result.verdicts[-1]
        ratio = verdict.rho / verdict.cur if name.startswith("dfp") else verdict.cur / verdict.rho
        assert error(result.directions[-1], (ratio * s).numpy()) <= 1e3 * len(s) * EPS
        seen.add(bool(verdict.overridden))
    assert seen == {True, False}


class Secant(NamedTuple):
    """The pair (s, y) enters B, and B x = y is solved, whose solution is x = (cur/rho) s."""

    update: float  # residual of (cur/rho) s, over the size of the terms that make B
    solution: float  # residual of x, over ||B|| ||x||
    forward: float  # relative error of x
    condition: float  # of B, with the size of those terms for ||B||


def dense_secant(seed: int, k: int, d: int = 12) -> tuple[Secant, qn.Verdict]:
    *before, (s, y, _) = sequence(d, k, seed)
    form = qn.form("bfgs-dense", 1, 1)
    old = run("bfgs-dense", before).state if before else form.init(s)
    verdict = judge(s, y, LAM, LAMB)
    (B,), x = form.step(old, s, y, y, verdict, k, False)
    exact = verdict.cur / verdict.rho * s
    size = torch.linalg.matrix_norm(old.matrix, 2) + y @ y / verdict.cur
    update = (B @ exact - y).norm() / (size * exact.norm())
    solution = (B @ x - y).norm() / (torch.linalg.matrix_norm(B, 2) * x.norm())
    condition = size / torch.linalg.svdvals(B)[-1]
    return Secant(
        float(update), float(solution), error(x, exact.numpy()), float(condition)
    ), verdict


def test_secant_equation_of_the_matrix_that_is_solved() -> None:
    """Backward errors, which the condition of B does not touch.

    The update adds three terms, none larger than ||B|| or ||y||^2/cur, so rounding leaves n eps of
    their size; an LU solve leaves n eps ||B|| ||x||. The error of x itself is the condition of B
    times that.
    """
    seen = set()
    for k in range(1, 16):
        secant, verdict = dense_secant(seed=k, k=k)
        assert secant.update <= 12 * EPS
        assert secant.solution <= 12 * EPS
        assert secant.forward <= 2 * 12 * EPS * secant.condition
        seen.add(bool(verdict.overridden))
    assert seen == {True, False}


def test_the_dense_form_loses_the_digits_that_the_condition_of_its_matrix_takes() -> None:
    """As docs/fedsso.md says: an error up to eps cond(B), where the form without a matrix has n
    eps/|cos(s, y)|.

    Of pairs with negative curvature B gets eigenvalues far below the rounding of its largest ones.
    """
    dense = []
    for seed in range(100):
        *before, (s, y, _) = sequence(12, 15, seed)
        low = run("bfgs", [*before, (s, y, y)])
        verdict = low.verdicts[-1]
        cosine = abs(float(torch.cosine_similarity(s, y, 0)))
        assert (
            error(low.directions[-1], (verdict.cur / verdict.rho * s).numpy()) <= 12 * EPS / cosine
        )
        secant, _ = dense_secant(seed, k=15)
        assert secant.forward <= 2 * 12 * EPS * secant.condition
        dense.append(secant)
    worst = max(dense, key=lambda secant: secant.condition)
    assert worst.condition > 1e12
    assert worst.forward > 1e-8


@pytest.mark.parametrize("name", qn.FORMS)
def test_inverse_is_symmetric_and_positive_definite(name: str) -> None:
    k = 20
    H = inverse(
        name, run(name, sequence(10, k, seed=1), pairs=k, m=5), k, pairs=k if name != "lbfgs" else 5
    )
    np.testing.assert_allclose(H, H.T, atol=1e-9 * np.abs(H).max())
    assert np.linalg.eigvalsh((H + H.T) / 2).min() > 0


def test_trace_grows_by_at_most_Lam_and_determinant_by_the_true_rho() -> None:
    B = torch.eye(9, dtype=torch.float64)
    form = qn.form("bfgs-dense", 1, 1)
    for k, (s, y, g) in enumerate(sequence(9, 25, seed=2), 1):
        verdict = judge(s, y, LAM, LAMB)
        new = form.step(form.init(s)._replace(matrix=B), s, y, g, verdict, k, False)[0].matrix
        assert new.trace() <= B.trace() + LAMB * (1 + 1e-9)
        growth = verdict.rho**2 / (verdict.cur * (s @ B @ s))
        # a relative change of a matrix by 9 eps changes its determinant by that times its condition
        bound = 9 * EPS * float(torch.linalg.cond(B) + torch.linalg.cond(new))
        torch.testing.assert_close(new.det(), B.det() * growth[0], rtol=bound, atol=0)
        B = new


@pytest.mark.parametrize("name", qn.FORMS)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3))
@settings(max_examples=15, deadline=None)
def test_rotation_and_scale_covariance(name: str, seed: int, scale: float) -> None:
    triples = sequence(6, 5, seed, negative=0)  # mild enough for the matrices in float64
    turn = scale * np.linalg.qr(np.random.default_rng(seed).standard_normal((6, 6)))[0]
    map_ = torch.from_numpy(turn)
    turned = [(map_ @ s, map_ @ y, map_ @ g) for s, y, g in triples]
    for a, b in zip(run(name, triples).directions, run(name, turned).directions, strict=True):
        assert error(b, turn @ a.numpy()) <= 1e-8


def test_bfgs_and_dfp_differ_from_the_first_pair_on() -> None:
    triples = sequence(2, 6, seed=4)
    for a, b in zip(run("bfgs", triples).directions, run("dfp", triples).directions, strict=True):
        assert error(a, b.numpy()) > 1e-3


def test_bfgs_and_dfp_agree_in_dimension_one() -> None:
    s, y, g = (torch.tensor([v], dtype=torch.float64) for v in (2.0, 3.0, 5.0))
    for name in qn.FORMS:
        direction = run(name, [(s, y, g)]).directions[0]
        torch.testing.assert_close(direction, g * s / y)


# ---- the rule


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_good_pair_keeps_its_curvature() -> None:
    verdict = judge(vector(1, 0), vector(2, 1), LAM, LAMB)
    assert verdict.rho == verdict.cur == 2
    assert verdict.accept
    assert not verdict.overridden
    assert verdict.rho.dtype == torch.float64
    assert verdict.rho.shape == verdict.accept.shape == (1,)


@pytest.mark.parametrize("y", [(-1.0, 0.0), (0.25, 2.0), (0.5, 0.0), (4.0, 0.0)])
def test_curvature_outside_the_open_interval_is_enforced(y: tuple[float, float]) -> None:
    """rho < 0; ratio above Lam; ratio exactly lam; ratio exactly Lam (all bounds are strict)."""
    verdict = judge(vector(1, 0), vector(*y), LAM, LAMB)
    assert verdict.rho == y[0]
    assert verdict.cur == 2 * (y[0] ** 2 + y[1] ** 2) / (LAM + LAMB)
    assert verdict.accept
    assert verdict.overridden


def test_the_dual_test_uses_s() -> None:
    s, y = vector(3, 0), vector(0.1, 5)
    verdict = judge(s, y, LAM, LAMB, dual=True)
    assert verdict.cur == 2 * 9 / (LAM + LAMB)
    assert verdict.overridden
    assert judge(vector(1, 0), vector(1, 5), LAM, LAMB, dual=True).cur == 1
    assert not judge(vector(1, 0), vector(1, 5), LAM, LAMB, dual=True).overridden


@pytest.mark.parametrize(
    ("s", "y"),
    [
        ((0.0, 0.0), (1.0, 1.0)),
        ((1.0, 1.0), (0.0, 0.0)),
        ((1.0, 0.0), (0.0, 1.0)),
        ((1.0, 0.0), (1e-9, 1.0)),
        ((1.0, 0.0), (-1e-9, 1.0)),
        ((float("nan"), 0.0), (1.0, 1.0)),
        ((1.0, 0.0), (1.0, float("nan"))),
        ((1.0, 0.0), (float("inf"), 1.0)),
        ((1.0, 0.0), (1.0, float("-inf"))),
    ],
)
@pytest.mark.parametrize("dual", [False, True])
def test_zero_flat_and_non_finite_pairs_are_skipped(s: Any, y: Any, dual: bool) -> None:
    verdict = judge(vector(*s), vector(*y), LAM, LAMB, dual=dual)
    assert not verdict.accept
    assert not verdict.overridden


def test_a_pair_just_above_the_flat_limit_enters() -> None:
    assert judge(vector(1, 0), vector(-2e-8, 1), LAM, LAMB).accept


def test_bounds_may_differ_by_trial() -> None:
    s, y = vector(1, 0).expand(3, 2), vector(2, 0).expand(3, 2)
    verdict = judge(s, y, torch.tensor([[0.1], [3.0], [0.1]]), torch.tensor([[9.0], [9.0], [1.9]]))
    assert verdict.overridden[:, 0].tolist() == [False, True, True]


# ---- the ring


@pytest.mark.parametrize("name", ["bfgs", "lbfgs"])
@pytest.mark.parametrize("keep", [1, 4, 7])
def test_a_full_ring_is_a_fresh_run_on_the_newest_pairs(name: str, keep: int) -> None:
    triples = sequence(10, 23, seed=6)
    result = run(name, triples, pairs=keep, m=keep)
    assert int(result.state.held) == keep
    for end in range(keep, len(triples) + 1):
        fresh = run(name, triples[end - keep : end], pairs=keep, m=keep)
        assert error(result.directions[end - 1], fresh.directions[-1].numpy()) <= 1e-10


@pytest.mark.parametrize("keep", [1, 4])
def test_a_full_dfp_ring_stays_positive_definite_and_secant(keep: int) -> None:
    *before, (s, y, _) = sequence(8, 17, seed=7)
    result = run("dfp", [*before, (s, y, y)], pairs=keep)
    verdict = result.verdicts[-1]
    assert error(result.directions[-1], (verdict.rho / verdict.cur * s).numpy()) <= 1e-10
    assert np.linalg.eigvalsh(inverse("dfp", result, 17, pairs=keep)).min() > 0


@pytest.mark.parametrize("m", [1, 3, 8])
def test_lbfgs_is_the_textbook_two_loop(m: int) -> None:
    triples = sequence(20, 14, seed=8)
    result = run("lbfgs", triples, m=m)
    for i, (s, y, g) in enumerate(triples):
        gamma = rule(s.numpy(), y.numpy(), LAM, LAMB, dual=False)[1] / float(y @ y)
        window = triples[max(0, i + 1 - m) : i + 1]
        assert error(result.directions[i], two_loop(window, g, gamma)) <= 1e-10


def test_lbfgs_starts_from_the_identity() -> None:
    zero, g = torch.zeros(3, dtype=torch.float64), vector(1, 2, 3)
    assert torch.equal(run("lbfgs", [(zero, zero, g)]).directions[0], g)


@pytest.mark.parametrize("name", qn.FORMS)
def test_reset_forgets_every_pair_including_its_own(name: str) -> None:
    triples = sequence(7, 12, seed=9)
    form = qn.form(name, 4, 4)
    state = form.init(triples[0][0])
    for k, (s, y, g) in enumerate(triples, 1):
        verdict = judge(s, y, LAM, LAMB, dual=form.dual)
        state, direction = form.step(state, s, y, g, verdict, k, k == 6)
        if k == 6:
            assert torch.equal(direction, g)
    fresh = run(name, triples[6:], pairs=4, m=4)
    assert error(direction, fresh.directions[-1].numpy()) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reset_keeps_gamma(dtype: torch.dtype) -> None:
    gamma, triples = (
        torch.tensor([[1.0], [3.0], [50.0]], dtype=torch.float64),
        stacked((3,), 8, 6, dtype),
    )
    form, (s, y, g) = qn.form("bfgs", 4, 4, gamma), triples[-1]
    state, direction = form.step(
        run("bfgs", triples, pairs=4, gamma=gamma).state, s, y, g, judge(s, y, LAM, LAMB), 7, True
    )
    assert torch.equal(direction, gamma.to(dtype) * g)
    assert direction.dtype == dtype
    assert state.held.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", qn.FORMS)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_skipped_pairs_change_nothing(name: str, bad: float) -> None:
    triples = sequence(7, 9, seed=10)
    form = qn.form(name, 5, 5)
    result = run(name, triples, pairs=5, m=5)
    before = [part.clone() for part in readable(result.state)]
    useless = torch.full((7,), bad, dtype=torch.float64)
    verdict = judge(triples[0][0], useless, LAM, LAMB, dual=form.dual)
    state, direction = form.step(
        result.state, triples[0][0], useless, triples[-1][2], verdict, 10, False
    )
    assert all(map(torch.equal, before, readable(state)))
    assert error(direction, result.directions[-1].numpy()) <= 1e-12


@pytest.mark.parametrize("name", ["bfgs", "dfp", "lbfgs"])
def test_store_is_donated_and_everything_else_is_functional(name: str) -> None:
    triples = sequence(6, 5, seed=11)
    form = qn.form(name, 8, 8)
    state = run(name, triples, pairs=8, m=8).state
    small = [part.clone() for part in state[1:]]
    s, y, g = (v.clone() for v in triples[0])
    new, _ = form.step(state, s, y, g, judge(s, y, LAM, LAMB, dual=form.dual), 6, False)
    assert new.store is state.store
    assert int(new.held) == 6
    assert all(torch.equal(a, b) for a, b in zip(small, state[1:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip((s, y, g), triples[0], strict=True))


@pytest.mark.parametrize("trials", [1, 3])
@pytest.mark.parametrize("name", ["bfgs", "dfp", "lbfgs"])
def test_a_step_can_be_undone_when_the_ring_is_full(name: str, trials: int) -> None:
    """The pair of the undone step must not stay in the place of the oldest one."""
    triples = stacked((trials,), 6, 7, torch.float64)
    form = qn.form(name, 4, 4)
    state = run(name, triples[:6], pairs=4, m=4).state
    twin = qn.Pairs(*(part.clone() for part in state))
    s, y, g = triples[6]
    form.step(state, s, y, g, judge(s, y, LAM, LAMB, dual=form.dual), 7, False)  # and back again
    zero = torch.zeros_like(s)
    nothing = judge(zero, zero, LAM, LAMB, dual=form.dual)
    for k in (8, 9):
        state, found = form.step(state, zero, zero, g, nothing, k, False)
        twin, expected = form.step(twin, zero, zero, g, nothing, k, False)
        assert torch.equal(found, expected)
    for (s, y, g), k in zip(triples[:3], (10, 11, 12), strict=True):
        verdict = judge(s, y, LAM, LAMB, dual=form.dual)
        state, found = form.step(state, s, y, g, verdict, k, False)
        twin, expected = form.step(twin, s, y, g, verdict, k, False)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", LOW_RANK)
def test_gram_holds_the_products_of_the_stored_vectors(name: str) -> None:
    k = 6
    triples = sequence(9, k, seed=12)
    state = run(name, triples, pairs=k).state
    assert torch.equal(state.gram, state.gram.mT)
    Y = torch.stack([y for _, y, _ in triples])
    torch.testing.assert_close(state.gram[1], Y @ Y.T)
    S = torch.stack([s for s, _, _ in triples])
    torch.testing.assert_close(state.gram[0].triu(), (S @ Y.T).triu())


# ---- leading axes


def stacked(shape: tuple[int, ...], d: int, k: int, dtype: torch.dtype) -> list[Triple]:
    count = int(np.prod(shape))
    trials = [sequence(d, k, seed=20 + i, dtype=dtype, negative=0) for i in range(count)]
    return [
        tuple(torch.stack([t[i][j] for t in trials]).reshape(*shape, d) for j in range(3))  # type: ignore[misc]
        for i in range(k)
    ]


@pytest.mark.parametrize("name", qn.FORMS)
def test_leading_axes_are_independent_runs(name: str) -> None:
    triples = stacked((2, 3), 8, 9, torch.float64)
    together = run(name, triples, pairs=5, m=5)
    for i in range(2):
        for j in range(3):
            alone = run(name, [(s[i, j], y[i, j], g[i, j]) for s, y, g in triples], pairs=5, m=5)
            for a, b in zip(together.directions, alone.directions, strict=True):
                torch.testing.assert_close(a[i, j], b, rtol=1e-9, atol=1e-11)
    assert all(part.shape[:2] == (2, 3) for part in together.state)


def test_every_trial_has_its_own_gamma() -> None:
    triples, gamma = (
        stacked((3,), 8, 9, torch.float64),
        torch.tensor([[1.0], [3.0], [50.0]], dtype=torch.float64),
    )
    together = run("bfgs", triples, pairs=5, gamma=gamma)
    for i in range(3):
        alone = run(
            "bfgs", [(s[i], y[i], g[i]) for s, y, g in triples], pairs=5, gamma=float(gamma[i])
        )
        for a, b in zip(together.directions, alone.directions, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", qn.FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_diverged_trial_leaves_its_neighbours_bit_identical(
    name: str, dtype: torch.dtype
) -> None:
    triples = stacked((3,), 8, 9, dtype)
    broken = [tuple(v.clone() for v in triple) for triple in triples]
    for i, triple in enumerate(broken[4:]):
        for v in triple[i % 3 :]:
            v[1] = float("nan") if i % 2 else float("inf")
    healthy = run(name, triples, pairs=4, m=4)
    ill = run(name, broken, pairs=4, m=4)  # type: ignore[arg-type]
    for a, b in zip(healthy.directions, ill.directions, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert a.isfinite().all()
    assert not ill.directions[-1][1].isfinite().all()


def test_a_trial_recovers_after_non_finite_pairs() -> None:
    triples = sequence(6, 8, seed=13)
    nan = torch.full((6,), float("nan"), dtype=torch.float64)
    with_gap = [*triples[:4], (nan, nan, nan), *triples[4:]]
    for name in ("bfgs", "dfp", "lbfgs"):
        a, b = run(name, triples, pairs=3, m=3), run(name, with_gap, pairs=3, m=3)
        assert error(b.directions[-1], a.directions[-1].numpy()) <= 1e-12


def test_a_singular_matrix_costs_only_its_own_trial_the_direction() -> None:
    form = qn.form("bfgs-dense", 1, 1)
    zero, g = torch.zeros(2, 3), torch.ones(2, 3)
    state = form.init(zero)
    state.matrix[0] = 0
    _, direction = form.step(state, zero, zero, g, judge(zero, zero, LAM, LAMB), 2, False)
    assert direction[0].isnan().all()
    assert torch.equal(direction[1], g[1])


@pytest.mark.parametrize(
    "shape", [(3, 60, 8000), (1, 90, 20_000), (2, 2, 3, 90_000), (100, 2, 6000), (5, 300_000)]
)
def test_blocked_products_are_the_float64_products(shape: tuple[int, ...]) -> None:
    """Shapes that are cut along the trials, the rows and the columns of the store."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator)
    columns = [torch.randn(*shape[:-2], shape[-1], generator=generator) for _ in range(2)]
    assert rows.numel() > qn.CPU_BLOCK[1]
    vectors = torch.stack(columns, -2).double()
    expected, size = vectors @ rows.double().mT, vectors.abs() @ rows.double().mT.abs()
    bound = shape[-1] * EPS * size  # of a sum of so many terms in any order
    assert ((qn.inner(columns, rows) - expected).abs() <= bound).all()


# ---- names and sizes


def test_capacity_is_bounded_by_two_gigabytes() -> None:
    assert qn.capacity("bfgs", 200, 7850, 4) == 200
    assert qn.capacity("bfgs", 200, 10**7, 4) == 24
    assert qn.capacity("dfp", 200, 10**7, 4) == 15
    assert qn.capacity("lbfgs", 200, 10**7, 8) == 11
    assert qn.capacity("bfgs", 200, 10**10, 4) == 1


def test_init_has_room_for_the_pairs_and_for_one_that_lets_a_step_be_undone() -> None:
    x = torch.zeros(2, 3)
    for name, pairs, m, slots in (("bfgs", 7, 5, 7), ("lbfgs", 7, 5, 5), ("lbfgs", 4, 5, 4)):
        state = qn.form(name, pairs, m).init(x)
        assert (state.store.shape, state.oldest.shape) == ((2, slots, 2, 3), (2, 2, 3))
    state = qn.form("dfp", 7, 5).init(x)
    assert (state.store.shape, state.oldest.shape) == ((2, 8, 3, 3), (2, 0, 3))


def test_dual_forms() -> None:
    assert [name for name in qn.FORMS if qn.form(name, 1, 1).dual] == ["dfp", "dfp-dense"]


def test_an_unknown_form_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'lbfgs'"):
        qn.form("l-bfgs", 1, 1)


@pytest.mark.parametrize(("pairs", "m"), [(0, 1), (1, 0)])
def test_at_least_one_pair(pairs: int, m: int) -> None:
    with pytest.raises(InputError, match=f"pairs={pairs}, m={m}"):
        qn.form("bfgs", pairs, m)


@pytest.mark.parametrize("name", ["bfgs-dense", "dfp-dense"])
def test_a_matrix_beyond_the_memory_is_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=r"a 1000000 x 1000000 matrix needs 4000 GB; use form='bfgs'"
    ):
        qn.form(name, 1, 1).init(torch.empty(1, 10**6, device="meta"))


def test_a_run_with_such_a_matrix_is_refused(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qn, "DENSE_BYTES", 899)
    with pytest.raises(InputError, match=r"a 15 x 15 matrix needs 0 GB; use form='bfgs'"):
        simulate(
            fed, "mclr", FedSSO(form="bfgs-dense"), rounds=2, out=tmp_path / "run", device="cpu"
        )
    simulate(fed, "mclr", FedSSO(form="bfgs"), rounds=2, out=tmp_path / "run", device="cpu")
