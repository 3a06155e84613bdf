"""Compressors of symmetric matrices and solves that do not stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso.errors import InputError
from fedsso.maths import symmetric
from fedsso.support.trees import leaves

TEXTS = ("none", "rank:1", "rank:3", "topk:4", "topk:0.3", "powersgd:2", "randk:5", "randk:0.5")
COUNTS = (  # text, floating-point numbers and places sent of a matrix with eight rows
    ("none", 36, 0),
    ("rank:1", 9, 0),
    ("rank:3", 27, 0),
    ("topk:4", 4, 4),
    ("topk:0.25", 9, 9),
    ("powersgd:2", 32, 0),
    ("randk:5", 5, 5),
    ("randk:0.01", 1, 1),
)
NO_SIZE: tuple[Any, ...] = ("", "rank", "rank:", "none:1", "svd:1", "Rank:1", "rank:1:2", 3, None)
BAD_SIZE = (
    "rank:0",
    "rank:-1",
    "rank:1.5",
    "rank:0.5",
    "powersgd:0.5",
    "topk:0",
    "topk:1.5",
    "topk:-0.1",
    "topk:nan",
)
WRONG = (*NO_SIZE, *BAD_SIZE, "randk:inf")


def matrices(*shape: int, seed: int = 0) -> Tensor:
    """Random symmetric matrices of both signs, [*shape, d]."""
    X = torch.randn(
        *shape, shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (X + X.mT) / 2


def uniform(clients: int, n: int, seed: int = 1) -> Tensor:
    return torch.rand(
        clients, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def sent(text: str, X: Tensor, seed: int = 1) -> Any:
    made = symmetric.parse(text)
    return made.encode(X, uniform(X.shape[0], made.draws(X.shape[-1]), seed))


def decoded(text: str, X: Tensor, seed: int = 1) -> Tensor:
    dense: Tensor = sent(text, X, seed).dense(X.shape[-1])
    return dense


def energy(X: Tensor) -> Tensor:
    return X.square().sum((-2, -1))


def with_spectrum(values: Tensor, seed: int = 5) -> Tensor:
    """One symmetric matrix [1, 1, d, d] with these eigenvalues."""
    d = len(values)
    draw = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64)).Q
    X: Tensor = ((Q * values) @ Q.mT)[None, None]
    return (X + X.mT) / 2


# ---- by hand ----


def test_the_triangle_is_packed_row_by_row() -> None:
    X = torch.tensor([[1.0, 2.0, 4.0], [2.0, 3.0, 5.0], [4.0, 5.0, 6.0]])
    assert symmetric.pack(X).tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(symmetric.unpack(symmetric.pack(X), 3), X)


def test_rank_keeps_the_eigenvalue_of_largest_size() -> None:
    X = torch.diag(torch.tensor([3.0, -4.0, 1.0]))[None, None]
    assert (
        decoded("rank:1", X)[0, 0].tolist() == torch.diag(torch.tensor([0.0, -4.0, 0.0])).tolist()
    )
    assert sent("rank:2", X).values.tolist() == [[[-4.0, 3.0]]]


def test_topk_counts_an_entry_off_the_diagonal_twice() -> None:
    """2.5 sqrt(2) > 3 > 2 sqrt(2): two entries 2.5 hold more of |X|^2 than one of 3, two entries 2
    less."""
    for off, kept in ((2.5, [[0, 2.5], [2.5, 0]]), (2.0, [[3, 0], [0, 0]])):
        X = torch.tensor([[3.0, off], [off, 1.0]])[None, None]
        assert decoded("topk:1", X)[0, 0].tolist() == kept


def test_randk_scales_what_the_largest_draws_pick() -> None:
    """n = 3, K = 2: entries number 0 and 2 of the triangle, times 3/2."""
    X = torch.tensor([[2.0, 7.0], [7.0, 4.0]])[None, None]
    got = symmetric.parse("randk:2").encode(X, torch.tensor([[0.9, 0.1, 0.5]]))
    assert got.places.tolist() == [[[0, 2]]]
    assert got.dense(2)[0, 0].tolist() == [[3, 0], [0, 6]]


def test_powersgd_by_hand() -> None:
    """X = diag(2, 1), G = (z, z): P = (2, 1)/sqrt 5 up to sign, X P = (4, 1)/sqrt 5, P (X P)^T =
    [[8, 2], [4, 1]]/5."""
    X = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))[None, None]
    got = symmetric.parse("powersgd:1").encode(X, torch.full((1, 2), 0.8, dtype=torch.float64))
    expected = torch.tensor([[8, 3], [3, 1]], dtype=torch.float64) / 5
    assert torch.allclose(got.dense(2)[0, 0], expected, atol=1e-15)


# ---- bounds ----


@pytest.mark.parametrize("d", [1, 2, 7, 310])
@pytest.mark.parametrize(
    ("text", "share"), [("rank:1", 1), ("rank:3", 3), ("topk:1", 0), ("topk:9", 0)]
)
def test_contraction(d: int, text: str, share: int) -> None:
    X = matrices(2, 3, d)
    n = d * (d + 1) // 2
    delta = min(share, d) / d if share else min(int(text[5:]), n) / n
    left = energy(decoded(text, X) - X)
    assert (left <= (1 - delta) * energy(X) + 1e-12).all()
    assert symmetric.parse(text).rate(d) == 1


def test_parts_that_count_as_equal_exceed_the_topk_bound_by_little() -> None:
    """Which of them are sent is left to chance, so those sent may be the smaller ones."""
    d, k = 6, 5
    n = symmetric.entries(d)
    ratios = []
    for seed in range(100):
        draw = torch.Generator().manual_seed(seed)
        part = 1 - 1e-4 * torch.rand(n, generator=draw)
        X = symmetric.unpack(part, d) / torch.where(torch.eye(d) > 0, 1.0, 2**0.5)
        left = energy(decoded(f"topk:{k}", X[None, None]) - X)
        ratios.append(float(left / energy(X) / (1 - k / n)))
    assert 1 < max(ratios) <= 1 + 2 * symmetric.TIE * torch.finfo(torch.float32).eps * k / n


def test_the_topk_bound_is_reached_by_equal_parts_only() -> None:
    """Diagonal sqrt(2), else 1: every entry of the triangle has the same part 2 of |X|^2, so K of n
    is all one gets."""
    X = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    X = symmetric.shift(X, 2**0.5 - 1)
    assert float(energy(decoded("topk:3", X) - X)) == pytest.approx(
        0.7 * float(energy(X)), rel=1e-14
    )


def test_what_rank_loses_is_the_rest_of_the_spectrum() -> None:
    X = matrices(2, 2, 310)
    values = sent("rank:3", X).values
    torch.testing.assert_close(
        energy(decoded("rank:3", X) - X), energy(X) - values.square().sum(-1)
    )


def test_powersgd_never_lengthens_and_symmetry_helps() -> None:
    X = matrices(2, 3, 12)
    got = sent("powersgd:2", X)
    plain = energy(got.P @ got.Q.mT - X)
    assert (energy(got.dense(12) - X) <= plain).all()
    assert (plain < energy(X)).all()
    assert torch.equal(got.dense(12), got.dense(12).mT)


def test_powersgd_is_exact_for_matrices_of_its_rank() -> None:
    X = with_spectrum(torch.tensor([3.0, -2.0, 0, 0, 0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(decoded("powersgd:2", X), X, rtol=0, atol=1e-12)


def test_randk_is_unbiased_with_the_stated_variance() -> None:
    """Every single entry of n = 6 once: the mean is X, the mean square error (n - 1) |X|^2."""
    X = matrices(1, 2, 3).expand(6, 2, 3, 3)
    made = symmetric.parse("randk:1")
    got = made.encode(X, torch.eye(6, dtype=torch.float64)).dense(3)
    torch.testing.assert_close(got.mean(0), X[0])
    torch.testing.assert_close(energy(got - X).mean(0), 5 * energy(X[0]))
    assert made.rate(3) == 1 / 6


@pytest.mark.parametrize(
    "text", ["none", "rank:9", "rank:60", "powersgd:9", "topk:45", "randk:45", "topk:0.999"]
)
def test_enough_numbers_are_the_whole_matrix(text: str) -> None:
    X = matrices(2, 2, 9)
    torch.testing.assert_close(decoded(text, X), X, rtol=0, atol=1e-12)


# ---- large matrices ----


def test_the_krylov_space_finds_the_leading_pairs() -> None:
    values = torch.cat((torch.tensor([5.0, -4.0, 3.0]), 2 * 0.97 ** torch.arange(307.0))).double()
    X = with_spectrum(values)
    found, vectors = symmetric.leading(X, 3)
    assert found[0, 0].tolist() == pytest.approx([5, -4, 3], abs=1e-10)
    torch.testing.assert_close(X @ vectors, vectors * found[..., None, :], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        vectors.mT @ vectors, torch.eye(3).double()[None, None], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_krylov_space_that_is_exhausted_goes_on(dtype: torch.dtype) -> None:
    """All eigenvalues alike, two alike, or none: R orthonormal vectors all the same."""
    few = torch.zeros(320, dtype=torch.float64)
    few[:2] = 2
    X = torch.cat((torch.eye(320)[None, None], with_spectrum(few), torch.zeros(1, 1, 320, 320))).to(
        dtype
    )
    values, vectors = symmetric.leading(X, 2)
    atol = (
        4 * 320 * torch.finfo(dtype).eps
    )  # vectors and values of 320 terms, at most 2 in size, turned twice
    torch.testing.assert_close(
        values[:, 0], torch.tensor([[1, 1], [2, 2], [0, 0]], dtype=dtype), rtol=0, atol=atol
    )
    identity = torch.eye(2, dtype=dtype).expand(3, 1, 2, 2)
    torch.testing.assert_close(vectors.mT @ vectors, identity, rtol=0, atol=atol)


def test_a_null_vector_of_the_start_does_no_harm() -> None:
    """The Hessian of softmax regression is blind to vectors that are equal for all classes."""
    X = matrices(1, 1, 80)
    X = torch.kron(torch.eye(4).double() - 0.25, (X @ X.mT)[0, 0])[None, None]
    top = torch.linalg.eigvalsh(X).abs().amax()
    assert float(symmetric.leading(X, 1)[0].abs()) == pytest.approx(float(top), rel=1e-8)


@pytest.mark.parametrize("R", [1, 2, 3])
@pytest.mark.parametrize("rows", [5, 80])
def test_rounding_does_not_choose_among_equal_eigenvalues(rows: int, R: int) -> None:
    """Softmax regression with four equal classes: every eigenvalue comes three times."""
    S = matrices(1, 1, rows)[0, 0]
    X = torch.kron(torch.eye(4).double() - 0.25, S @ S)[None, None]
    noise = 1e-15 * matrices(1, 1, 4 * rows, seed=9) * X.abs().max()
    first, second = decoded(f"rank:{R}", X), decoded(f"rank:{R}", X + noise)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-11 * float(X.abs().max()))
    top = torch.linalg.eigvalsh(X)[0, 0, -1]
    torch.testing.assert_close(energy(X - first), energy(X) - R * top**2)


def test_of_two_signs_the_positive_comes_first() -> None:
    for tilt in (-1e-15, 1e-15):
        X = torch.diag(torch.tensor([1 + tilt, -1, 0.5], dtype=torch.float64))[None, None]
        assert sent("rank:1", X).values.tolist() == [[[pytest.approx(1)]]]


# ---- what travels ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("text", "numbers", "places"),
    COUNTS,
)
def test_numbers_sent(text: str, numbers: int, places: int, dtype: torch.dtype) -> None:
    parts = list(leaves(sent(text, matrices(2, 3, 8).to(dtype))))
    assert all(part.shape[:2] == (2, 3) for part in parts)
    floats = [part for part in parts if part.is_floating_point()]
    whole = [part for part in parts if not part.is_floating_point()]
    assert sum(part[0, 0].numel() for part in floats) == numbers
    assert sum(part[0, 0].numel() for part in whole) == places
    assert all(part.dtype == dtype for part in floats)
    assert all(part.dtype == torch.int32 for part in whole)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("d", [6, 310])
def test_clients_and_trials_do_not_meet(text: str, d: int) -> None:
    X = matrices(2, 3, d)
    made = symmetric.parse(text)
    u = uniform(2, made.draws(d))
    together = made.encode(X, u).dense(d)
    for i in range(2):
        for t in range(3):
            alone = made.encode(X[i : i + 1, t : t + 1], u[i : i + 1]).dense(d)
            torch.testing.assert_close(together[i, t], alone[0, 0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("d", [6, 310])
def test_shapes_alone_are_enough(text: str, d: int) -> None:
    X = torch.empty(2, 3, d, d, device="meta")
    made = symmetric.parse(text)
    got = made.encode(X, torch.empty(2, made.draws(d), device="meta"))
    assert got.dense(d).shape == X.shape
    real = sent(text, matrices(2, 3, d).float())
    assert [part.shape for part in leaves(got)] == [part.shape for part in leaves(real)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("d", [6, 310])
def test_a_matrix_that_is_not_finite_stays_so_and_harms_no_other(text: str, d: int) -> None:
    X = matrices(1, 3, d)
    sick = X.clone()
    sick[0, 1] = torch.nan
    got = decoded(text, sick)
    assert not got[0, 1].isfinite().all()
    torch.testing.assert_close(got[0, ::2], decoded(text, X)[0, ::2], rtol=0, atol=1e-12)


# ---- linear algebra ----


def test_a_singular_system_is_answered_with_nan() -> None:
    X = torch.stack((torch.eye(2), torch.ones(2, 2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])))
    z = symmetric.solve(X, torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 3.0]]))
    assert z[0].tolist() == [1, 2]
    assert z[1].isnan().all()
    assert z[2].tolist() == pytest.approx([1, 1], rel=1e-14)


def test_eigenvalues_of_a_matrix_that_is_not_finite_are_nan() -> None:
    X = torch.stack((torch.diag(torch.tensor([2.0, 1.0])), torch.full((2, 2), torch.inf)))
    values, vectors = symmetric.eigh(X)
    assert values[0].tolist() == pytest.approx([1, 2], rel=1e-14)
    assert values[1].isnan().all()
    assert vectors.isfinite().all()


def test_shift_leaves_its_argument_alone() -> None:
    X = torch.zeros(2, 3, 3)
    assert symmetric.shift(X, torch.tensor([[1.0], [2.0]])).diagonal(dim1=1, dim2=2).tolist() == [
        [1] * 3,
        [2] * 3,
    ]
    assert symmetric.shift(X, 0.5)[1].tolist() == (torch.eye(3) / 2).tolist()
    assert not X.any()


def test_a_matrix_out_of_reach_is_refused() -> None:
    symmetric.check_size(torch.empty(1, 20_000, device="meta"))
    with pytest.raises(InputError, match=r"30000 x 30000 matrices, 3.6 GB .* use fedsso"):
        symmetric.check_size(torch.empty(1, 30_000, device="meta"))


@pytest.mark.parametrize("text", WRONG)
def test_wrong_text_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"unknown compressor .*; use none, rank:R or powersgd:R"):
        symmetric.parse(text)


@pytest.mark.parametrize("threads", [1, 2])
def test_solve_of_several_large_matrices_on_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        X = torch.randn(
            3, 300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        X[1] = 0
        b = torch.ones(3, 300, dtype=torch.float64)
        z = symmetric.solve(X, b)
    finally:
        torch.set_num_threads(before)
    assert z[1].isnan().all()
    torch.testing.assert_close((X[[0, 2]] @ z[[0, 2], :, None])[..., 0], b[[0, 2]])
