"""The metric of a model's weights, against explicit d x d matrices made with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso.maths import kronecker
from fedsso.maths.kronecker import Matrix, Metric, Moments
from fedsso.support.linalg import gram

EPS = torch.finfo(torch.float64).eps
SINGLE = torch.finfo(torch.float32).eps
FLOOR = 1e-3
SHARE = 0.2
MODELS = {
    "a matrix": ((3, 4),),
    "a network": ((5, 2), (5, 1), (2, 5), (2, 1)),
    "a row and a column": ((1, 6), (4, 1)),
    "a number": ((1, 1),),
}
NETWORK = MODELS["a network"]


def numbers(matrices: Sequence[Matrix]) -> int:
    """d, the number of parameters."""
    return sum(rows * cols for rows, cols in matrices)


def draws(count: int, matrices: Sequence[Matrix], seed: int = 0) -> np.ndarray:
    """Gradients [count, d] of layers of different size, with large entries in their first rows."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((count, numbers(matrices)))
    return g * np.geomspace(10, 0.1, g.shape[1])


def learned(
    gradients: np.ndarray,
    matrices: Sequence[Matrix],
    floor: float = FLOOR,
    shares: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Metric:
    """K of one trial that has seen these gradients [count, d]."""
    newest = torch.from_numpy(gradients[-1:]).to(dtype)
    return kronecker.metric(seen(gradients, matrices, shares, dtype), matrices, newest, floor)


def seen(
    gradients: np.ndarray,
    matrices: Sequence[Matrix],
    shares: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Moments:
    """The means of one trial after these gradients [count, d]."""
    rows = torch.from_numpy(gradients).to(dtype)
    moments = kronecker.start(rows[:1], matrices)
    for g, share in zip(rows, shares or [SHARE] * len(rows), strict=True):
        moments = kronecker.follow(moments, g[None], matrices, share)
    return moments


def weights_of(shares: Sequence[float]) -> np.ndarray:
    """What each gradient counts: its share of what the later ones leave."""
    left = [np.prod([1 - later for later in shares[i + 1 :]]) for i in range(len(shares))]
    return np.array(shares) * left


def means(
    gradients: np.ndarray,
    matrices: Sequence[Matrix],
    shares: Sequence[float],
) -> list[np.ndarray]:
    """A and C of each matrix, as weighted means."""
    weights = weights_of(shares)
    sides = []
    begin = 0
    for rows, cols in matrices:
        G = gradients[:, begin : begin + rows * cols].reshape(-1, rows, cols)
        sides.append(np.einsum("k,kij,klj->il", weights, G, G) / weights.sum())
        sides.append(np.einsum("k,kij,kil->jl", weights, G, G) / weights.sum())
        begin += rows * cols
    return sides


def power(symmetric: np.ndarray, exponent: float) -> np.ndarray:
    """A symmetric matrix to a power."""
    values, vectors = np.linalg.eigh(symmetric)
    return (vectors * values**exponent) @ vectors.T


def unscaled(sides: Sequence[np.ndarray], floor: float = FLOOR) -> np.ndarray:
    """K [d, d] but for c, with a share of the largest eigenvalue of all on top of each.

    A matrix lies row by row in the flat vector, so that A G C is kron(A, C^T) times it.
    """
    added = floor * max(np.linalg.eigvalsh(side)[-1] for side in sides)
    powers = [power(side + added * np.eye(len(side)), -1 / 3) for side in sides]
    blocks = [np.kron(A, C) for A, C in zip(powers[::2], powers[1::2], strict=True)]
    d = sum(map(len, blocks))
    K = np.zeros((d, d))
    begin = 0
    for block in blocks:
        end = begin + len(block)
        K[begin:end, begin:end] = block
        begin = end
    return K


def scaled(K: np.ndarray, g: np.ndarray) -> np.ndarray:
    """c K, so that g^T (c K) g = g^T g."""
    return float(g @ g) / float(g @ K @ g) * K


def explicit(
    gradients: np.ndarray,
    matrices: Sequence[Matrix],
    shares: Sequence[float],
    floor: float = FLOOR,
) -> np.ndarray:
    """K [d, d]."""
    return scaled(unscaled(means(gradients, matrices, shares), floor), gradients[-1])


def as_matrix(
    product: Callable[[Tensor], Tensor], d: int, dtype: torch.dtype = torch.float64
) -> np.ndarray:
    """The matrix [d, d] of a symmetric product, from its images of the unit vectors."""
    columns = product(torch.eye(d, dtype=dtype))
    return columns.double().numpy()


def rounding(matrices: Sequence[Matrix], floor: float = FLOOR, eps: float = EPS) -> float:
    """How far two computations of K may be apart, as a share of its norm.

    Sums of n terms and eigenvalues are accurate to n eps of the largest eigenvalue, which is at
    most 1 / floor times the smallest one. A power of -1/3 takes a third of this relative error;
    there are two sides, two computations, and c. Products with K add n eps.
    """
    n = sum(max(shape) for shape in matrices)
    return 4 * n * eps / floor


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The distance of two matrices as a share of their norm."""
    return float(np.linalg.norm(found - expected, 2) / np.linalg.norm(expected, 2))


def one(K: Metric, trial: int) -> Metric:
    """The metric of one trial."""
    only = slice(trial, trial + 1)
    sides = []
    for vectors, powers in K.sides:
        own = None if vectors is None else vectors[only]
        sides.append(kronecker.Side(own, powers[only]))
    return Metric(K.matrices, tuple(sides), K.root[only])


# ---- the matrix ----


@pytest.mark.parametrize("matrices", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("shares", [(0.2,), (0.2, 0.2, 0.2, 0.2, 0.2), (0.1, 0.9, 0.05)])
def test_the_metric_is_the_explicit_matrix(
    matrices: Sequence[Matrix], shares: Sequence[float]
) -> None:
    """K, its root and one over its root. Roots of K have a smaller condition than K."""
    d = numbers(matrices)
    gradients = draws(len(shares), matrices)
    K = learned(gradients, matrices, shares=shares)
    expected = explicit(gradients, matrices, shares)
    bound = rounding(matrices)
    assert bound < 1e-10
    assert apart(as_matrix(K.apply, d), expected) <= bound
    assert apart(as_matrix(K.stretch, d), power(expected, 0.5)) <= bound
    assert apart(as_matrix(K.shrink, d), power(expected, -0.5)) <= bound


@pytest.mark.parametrize("floor", [1e-6, 1e-3, 0.1, 1.0])
def test_the_floor_bounds_the_condition(floor: float) -> None:
    """Eigenvalues of a side are between floor and 1 + floor of its largest one, and K has two."""
    gradients = draws(1, [(4, 6)])  # a single gradient, so that C has eigenvalues 0
    K = as_matrix(learned(gradients, [(4, 6)], floor).apply, 24)
    assert apart(K, explicit(gradients, [(4, 6)], (SHARE,), floor)) <= rounding([(4, 6)], floor)
    assert np.linalg.cond(K) <= (1 + 1 / floor) ** (2 / 3) * (1 + rounding([(4, 6)], floor))


def test_a_matrix_of_one_gradient_keeps_its_singular_vectors() -> None:
    """For G = U S V^T it is K G = c U S^(-1/3) V^T with c = |G|^2 / sum of S^(2/3).

    The least singular value is a third of the largest one, so that a floor of 1e-9 adds 9e-9 to its
    square.
    """
    rng = np.random.default_rng(4)
    U, V = (np.linalg.qr(rng.standard_normal((n, 4)))[0] for n in (4, 7))
    S = np.array([3.0, 2.0, 1.5, 1.0])
    G = (U * S) @ V.T
    flat = torch.from_numpy(G).reshape(1, 28)
    found = learned(G.reshape(1, 28), [(4, 7)], 1e-9).apply(flat)[0].reshape(4, 7).numpy()
    expected = (S**2).sum() / (S ** (2 / 3)).sum() * (U * S ** (-1 / 3)) @ V.T
    assert apart(found, expected) <= 1e-7


def test_the_parts_of_a_vector_are_its_matrices_row_by_row() -> None:
    v = torch.arange(20.0).reshape(2, 10)
    first, second, third = kronecker.split(v, [(2, 3), (3, 1), (1, 1)])
    assert first.tolist() == [[[0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]]
    assert second.tolist() == [[[6], [7], [8]], [[16], [17], [18]]]
    assert third.tolist() == [[[9]], [[19]]]
    many = kronecker.split(v[:, None], [(2, 3), (3, 1), (1, 1)])  # of further axes
    assert [part.shape for part in many] == [(2, 1, 2, 3), (2, 1, 3, 1), (2, 1, 1, 1)]
    assert torch.equal(many[0][:, 0], first)


# ---- the means ----


@pytest.mark.parametrize("shares", [(0.2,), (0.2, 0.2, 0.2), (0.02, 0.2, 0.1, 0.2)])
def test_the_means_are_weighted_means(shares: Sequence[float]) -> None:
    """Up to the sum of their weights, which K does not see. Sums of 10 terms at most."""
    gradients = draws(len(shares), NETWORK)
    found = seen(gradients, NETWORK, shares)
    expected = means(gradients, NETWORK, shares)
    for total, mean in zip(found, expected, strict=True):
        assert apart((total / weights_of(shares).sum())[0].numpy(), mean) <= 1e-14


def test_the_means_are_in_float64() -> None:
    found = seen(draws(2, NETWORK), NETWORK, dtype=torch.float32)
    assert {leaf.dtype for leaf in found} == {torch.float64}
    assert [tuple(side.shape) for side in found] == [(1, n, n) for shape in NETWORK for n in shape]


def test_following_changes_no_argument() -> None:
    before = seen(draws(2, NETWORK), NETWORK)
    copies = [side.clone() for side in before]
    g = torch.from_numpy(draws(1, NETWORK, seed=3))
    same = g.clone()
    kronecker.follow(before, g, NETWORK, SHARE)
    assert torch.equal(g, same)
    assert all(map(torch.equal, before, copies))


@pytest.mark.parametrize("largest", [3, 1024])
def test_squares_are_those_of_a_whole_share(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The squares of a gradient are the means of it alone; a blend of them follows it."""
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    gradients = draws(2, NETWORK)
    first, second = (kronecker.squares(torch.from_numpy(g[None]), NETWORK) for g in gradients)
    for one_, whole in zip(first, seen(gradients[:1], NETWORK, [1.0]), strict=True):
        assert torch.equal(one_, whole)
    for found, expected in zip(
        kronecker.blend(first, second, 0.3), seen(gradients, NETWORK, [1.0, 0.3]), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


# ---- the means over clients ----

SHARES = (0.5, 0.25, 0.0, 0.2, 0.05)


def of_clients(rows: int, cols: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Matrices of five clients in two trials, [5, 2, rows, cols]."""
    draw = np.random.default_rng(6)
    sizes = np.geomspace(10, 0.1, 5)[:, None, None, None]
    return torch.from_numpy(sizes * draw.standard_normal((5, 2, rows, cols))).to(dtype)


@pytest.mark.parametrize(("rows", "cols"), [(3, 4), (5, 2), (1, 6), (6, 1)])
@pytest.mark.parametrize("largest", [1, 3, 1024])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_means_over_clients_are_those_of_a_loop(
    rows: int, cols: int, largest: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sum_i w_i G_i G_i^T and sum_i w_i G_i^T G_i, in float64 also of float32, or their diagonals.

    Sums of at most 5 * 6 terms, each of the size of the largest entry at most.
    """
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    G = of_clients(rows, cols, dtype)
    same = G.clone()
    found = kronecker.mean_squares(torch.tensor(SHARES), G)
    assert torch.equal(G, same)
    assert {side.dtype for side in found} == {torch.float64}
    shares = torch.tensor(SHARES).double().tolist()
    for trial in range(2):
        A, C = np.zeros((rows, rows)), np.zeros((cols, cols))
        for w, one_ in zip(shares, G[:, trial].double().numpy(), strict=True):
            A += w * one_ @ one_.T
            C += w * one_.T @ one_
        for side, full in zip(found, (A, C), strict=True):
            expected = np.diag(full) if len(full) > largest else full
            assert side[trial].shape == expected.shape
            bound = 5 * 6 * EPS * np.trace(full)
            np.testing.assert_allclose(side[trial].numpy(), expected, rtol=0, atol=bound)


def test_the_means_of_parts_of_the_clients_add_up() -> None:
    G, w = of_clients(3, 4), torch.tensor(SHARES, dtype=torch.float64)
    whole = kronecker.mean_squares(w, G)
    parts = [kronecker.mean_squares(w[part], G[part]) for part in (slice(0, 2), slice(2, 5))]
    for all_, some, others in zip(whole, *parts, strict=True):
        bound = 5 * 4 * EPS * float(all_.abs().max())
        torch.testing.assert_close(some + others, all_, rtol=0, atol=bound)


# ---- biases, of which no means are kept ----

BIASED = {
    "a bias": ((3, 4), (3, 1)),
    "two biases": ((4, 3), (4, 1), (4, 1)),
    "one output": ((1, 6), (1, 1)),
    "no bias": ((5, 2),),
}


def borrowed(gradients: np.ndarray, matrices: Sequence[Matrix], **options: Any) -> Metric:
    """K of the means of the first matrix alone."""
    rows, cols = matrices[0]
    moments = seen(gradients[:, : rows * cols], matrices[:1])
    newest = torch.from_numpy(gradients[-1:])
    return kronecker.metric(moments, matrices, newest, options.get("floor", FLOOR))


@pytest.mark.parametrize("matrices", BIASED.values(), ids=list(BIASED))
@pytest.mark.parametrize("largest", [1, 3, 1024])
@pytest.mark.parametrize("floor", [1e-3, 0.1])
def test_biases_are_further_columns_of_usual_size(
    matrices: Sequence[Matrix], largest: int, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bias A is that of the weight and C the number tr C / cols; the same is added to it.

    c is that of the whole gradient.
    """
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    gradients = draws(3, matrices)
    rows, cols = matrices[0]
    A, C = means(gradients[:, : rows * cols], matrices[:1], [SHARE] * 3)
    if rows > largest:
        A = np.diag(np.diag(A))
    if cols > largest:
        C = np.diag(np.diag(C))
    usual = np.array([[np.trace(C) / cols]])
    sides = [A, C, *[A, usual] * (len(matrices) - 1)]
    expected = scaled(unscaled(sides, floor), gradients[-1])
    K = borrowed(gradients, matrices, floor=floor)
    d = numbers(matrices)
    assert apart(as_matrix(K.apply, d), expected) <= rounding(matrices, floor)
    assert apart(as_matrix(K.stretch, d), power(expected, 0.5)) <= rounding(matrices, floor)
    assert apart(as_matrix(K.shrink, d), power(expected, -0.5)) <= rounding(matrices, floor)
    if len(matrices) > 1:  # else its own means would do as well
        own = as_matrix(learned(gradients, matrices, floor).apply, d)
        assert apart(own, expected) > 0.01


def test_without_any_gradient_of_the_weight_the_metric_is_the_identity() -> None:
    matrices = BIASED["a bias"]
    gradients = np.zeros((2, 15))
    gradients[:, 12:] = 1.0
    K = as_matrix(borrowed(gradients, matrices).apply, 15)
    np.testing.assert_allclose(K, np.eye(15), rtol=0, atol=1e-13)


def test_each_trial_has_its_own_floor() -> None:
    """In a batch as alone with this number."""
    matrices = BIASED["a bias"]
    floors = [0.01, 0.5]
    each = [draws(2, matrices, seed) for seed in range(2)]
    parts = [seen(gradients[:, :12], matrices[:1]) for gradients in each]
    moments = tuple(torch.cat(sides) for sides in zip(*parts, strict=True))
    newest = torch.from_numpy(np.stack([gradients[-1] for gradients in each]))
    floor = torch.tensor(floors, dtype=torch.float64)[:, None]
    K = kronecker.metric(moments, matrices, newest, floor)
    for trial, (gradients, own) in enumerate(zip(each, floors, strict=True)):
        expected = as_matrix(borrowed(gradients, matrices, floor=own).apply, 15)
        assert apart(as_matrix(one(K, trial).apply, 15), expected) <= rounding(matrices, own)
        other = as_matrix(borrowed(gradients, matrices, floor=floors[1 - trial]).apply, 15)
        assert apart(other, expected) > 0.01


# ---- c ----


@pytest.mark.parametrize("matrices", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("floor", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("largest", [1, 1024])
def test_the_newest_gradient_is_as_long_as_it_was(
    matrices: Sequence[Matrix], floor: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g^T K g = g^T g to d eps: both are sums of squares, whatever K is."""
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    for count in (1, 3):
        gradients = draws(count, matrices, seed=count)
        g = torch.from_numpy(gradients[-1:])
        K = learned(gradients, matrices, floor)
        bound = 4 * numbers(matrices) * EPS
        assert float(K.fall(g)) == pytest.approx(float((g * g).sum()), rel=bound)
        assert float((g * K.apply(g)).sum()) == pytest.approx(
            float((g * g).sum()), rel=rounding(matrices, floor) + bound
        )


@pytest.mark.parametrize("factor", [1e-8, 0.3, 1e6])
def test_the_scale_of_gradients_does_not_count(factor: float) -> None:
    gradients = draws(4, NETWORK)
    K, other = (as_matrix(learned(f * gradients, NETWORK).apply, 27) for f in (1.0, factor))
    assert apart(other, K) <= rounding(NETWORK)


@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_a_layer_with_small_gradients_is_stretched_evenly(size: float) -> None:
    """By the floor alone, which is that of the largest layer: K = c (floor top)^(-2/3) there.

    The square of 1e-12 is far below the rounding of the others.
    """
    gradients = draws(3, NETWORK)
    gradients[:, 10:15] *= size
    sides = means(gradients, NETWORK, [SHARE] * 3)
    top = max(np.linalg.eigvalsh(side)[-1] for side in sides)
    K = as_matrix(learned(gradients, NETWORK).apply, 27)
    assert apart(K, explicit(gradients, NETWORK, [SHARE] * 3)) <= rounding(NETWORK)
    c = K[0, 0] / unscaled(sides)[0, 0]
    expected = c * (FLOOR * top) ** (-2 / 3) * np.eye(5)
    assert apart(K[10:15, 10:15], expected) <= rounding(NETWORK)


# ---- coordinates ----


def test_shrinking_undoes_stretching() -> None:
    """The condition of K^(1/2) is that of K to the half, (1 + 1 / floor)^(1/3) for a layer.

    n eps of it is lost in each direction.
    """
    K = learned(draws(5, NETWORK), NETWORK)
    v = torch.from_numpy(draws(6, NETWORK, seed=1))
    condition = np.linalg.cond(as_matrix(K.stretch, 27))
    bound = 4 * 10 * EPS * condition * v.norm(dim=-1).max()
    assert bound < 1e-10
    assert (K.shrink(K.stretch(v)) - v).norm(dim=-1).max() <= bound
    assert (K.stretch(K.shrink(v)) - v).norm(dim=-1).max() <= bound


def test_inner_products_in_the_metrics_coordinates() -> None:
    """Those of a step with gradients are plain; those of steps take K^-1, of gradients K.

    Each is accurate to n eps times the lengths, and to what the condition of K takes.
    """
    gradients = draws(5, NETWORK)
    K = learned(gradients, NETWORK)
    matrix = explicit(gradients, NETWORK, [SHARE] * 5)
    s, y, g = draws(3, NETWORK, seed=2)
    found = K.gram(*(torch.from_numpy(v[None]) for v in (s, y, g)))[0].numpy()
    inverse = np.linalg.inv(matrix)
    expected = np.array(
        [
            [s @ inverse @ s, s @ y, s @ g],
            [s @ y, y @ matrix @ y, y @ matrix @ g],
            [s @ g, y @ matrix @ g, g @ matrix @ g],
        ]
    )
    lengths = np.sqrt(np.diag(expected))
    bound = rounding(NETWORK) * np.linalg.cond(matrix) * np.outer(lengths, lengths)
    assert (np.abs(found - expected) <= bound).all()
    assert rounding(NETWORK) * np.linalg.cond(matrix) < 1e-6
    plain = gram(*(torch.from_numpy(v[None]) for v in (s, y, g)))[0].numpy()
    np.testing.assert_allclose(found[0, 1:], plain[0, 1:], atol=bound[0, 1:].max())
    assert abs(plain[0, 0] - found[0, 0]) > 0.1 * found[0, 0]
    assert found.dtype == np.float64


def test_the_square_of_a_steps_length() -> None:
    gradients = draws(3, NETWORK)
    matrix = explicit(gradients, NETWORK, [SHARE] * 3)
    s = draws(1, NETWORK, seed=2)
    found = learned(gradients, NETWORK).square(torch.from_numpy(s))
    assert found.shape == (1, 1)
    condition = float(np.linalg.cond(matrix))
    expected = float(s[0] @ np.linalg.solve(matrix, s[0]))
    assert float(found) == pytest.approx(expected, rel=rounding(NETWORK) * condition)


def test_products_change_no_argument() -> None:
    K = learned(draws(2, NETWORK), NETWORK)
    v = torch.from_numpy(draws(1, NETWORK, seed=1))
    same = v.clone()
    for product in (K.stretch, K.shrink, K.apply, K.square):
        first = product(v)
        assert torch.equal(v, same)
        assert torch.equal(product(v), first)


# ---- long sides ----


@pytest.mark.parametrize("matrices", [((3, 6), (6, 1)), ((7, 2), (5, 5)), ((6, 6), (4, 4), (9, 1))])
def test_a_long_side_keeps_its_diagonal(
    matrices: Sequence[Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond LARGEST = 4."""
    monkeypatch.setattr(kronecker, "LARGEST", 4)
    gradients = draws(3, matrices)
    sides = [n for shape in matrices for n in shape]
    expected = [(1, n) if n > 4 else (1, n, n) for n in sides]
    assert [tuple(side.shape) for side in seen(gradients, matrices)] == expected
    full = means(gradients, matrices, [SHARE] * 3)
    kept = [np.diag(np.diag(side)) if len(side) > 4 else side for side in full]
    d = numbers(matrices)
    K = learned(gradients, matrices)
    found = as_matrix(K.apply, d)
    assert apart(found, scaled(unscaled(kept), gradients[-1])) <= rounding(matrices)
    root = as_matrix(K.stretch, d)
    assert apart(root @ root, found) <= rounding(matrices)
    assert apart(root @ as_matrix(K.shrink, d), np.eye(d)) <= rounding(matrices)


@pytest.mark.parametrize("largest", [1, 1024])
def test_the_scale_does_not_count_on_long_sides(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    gradients = draws(4, NETWORK)
    K, other = (as_matrix(learned(f * gradients, NETWORK).apply, 27) for f in (1.0, 1e4))
    assert apart(other, K) <= rounding(NETWORK)


# ---- zeros, and what is not a number ----


@pytest.mark.parametrize("largest", [1, 1024])
def test_without_any_gradient_the_metric_is_the_identity(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    K = learned(np.zeros((2, 27)), NETWORK)
    np.testing.assert_allclose(as_matrix(K.apply, 27), np.eye(27), rtol=0, atol=1e-13)
    np.testing.assert_allclose(as_matrix(K.shrink, 27), np.eye(27), rtol=0, atol=1e-13)


def test_after_a_gradient_of_zeros_the_older_ones_still_tell_the_metric() -> None:
    """Up to its scale: there is no g^T g that could stay."""
    gradients = np.concatenate((draws(2, NETWORK), np.zeros((1, 27))))
    K = as_matrix(learned(gradients, NETWORK).apply, 27)
    expected = unscaled(means(gradients, NETWORK, [SHARE] * 3))
    assert apart(K / np.linalg.norm(K), expected / np.linalg.norm(expected)) <= rounding(NETWORK)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 12, 26])
@pytest.mark.parametrize("largest", [1, 1024])
def test_trials_do_not_touch_each_other(
    bad: float, place: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three trials at once are single ones, also where one of them is no longer a number."""
    monkeypatch.setattr(kronecker, "LARGEST", largest)
    gradients = [draws(4, NETWORK, seed) * 10.0**seed for seed in range(3)]
    together = np.stack(gradients, 1)  # [rounds, trials, d]
    together[2, 1, place] = bad
    moments = kronecker.start(torch.zeros(3, 27, dtype=torch.float64), NETWORK)
    for g in torch.from_numpy(together):
        moments = kronecker.follow(moments, g, NETWORK, SHARE)
    K = kronecker.metric(moments, NETWORK, torch.from_numpy(together[-1]), FLOOR)
    v = torch.from_numpy(draws(3, NETWORK, seed=9))
    for trial in (0, 2):
        alone = learned(gradients[trial], NETWORK)
        expected = as_matrix(alone.apply, 27)
        assert apart(as_matrix(one(K, trial).apply, 27), expected) <= rounding(NETWORK)
        found = K.apply(v)[trial].numpy()
        bound = rounding(NETWORK) * np.linalg.norm(expected, 2) * float(v[trial].norm())
        assert np.linalg.norm(found - expected @ v[trial].numpy()) <= bound
    assert not K.apply(v)[1].isfinite().all()


# ---- precision ----


@pytest.mark.parametrize("floor", [0.1, 1e-2])
def test_float32_follows_float64(floor: float) -> None:
    """Squares in float32 lose n eps of tr A, which is at most 5 times the largest eigenvalue."""
    gradients = draws(4, NETWORK).astype(np.float32).astype(np.float64)
    wide = as_matrix(learned(gradients, NETWORK, floor).apply, 27)
    K = learned(gradients, NETWORK, floor, dtype=torch.float32)
    bound = 5 * rounding(NETWORK, floor, SINGLE)
    assert bound < 0.1
    assert apart(as_matrix(K.apply, 27, torch.float32), wide) <= bound
    v = torch.from_numpy(draws(2, NETWORK, seed=1)).float()
    condition = float(np.linalg.cond(wide)) ** 0.5
    lost = 4 * 10 * SINGLE * condition * v.norm(dim=-1).max()
    assert (K.shrink(K.stretch(v)) - v).norm(dim=-1).max() <= lost
    assert K.stretch(v).dtype == K.shrink(v).dtype == torch.float32
    assert K.gram(v[:1], v[:1], v[:1]).dtype == K.square(v).dtype == torch.float64


def test_float32_that_does_not_converge_is_computed_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some kernels give up on matrices of low rank; powers agree to n eps / (6 FLOOR) = 5e-6."""
    gradients = draws(2, NETWORK)
    exact = torch.linalg.eigh

    def refuse(A: Tensor) -> tuple[Tensor, Tensor]:
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
                "did not converge"
            )
        return exact(A)

    wanted = learned(gradients, NETWORK, 0.1, dtype=torch.float32).sides
    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    for side, same in zip(
        learned(gradients, NETWORK, 0.1, dtype=torch.float32).sides, wanted, strict=True
    ):
        assert side.powers.dtype == torch.float32
        torch.testing.assert_close(side.powers, same.powers, rtol=1e-4, atol=1e-4)
