"""Compressed uploads: what is lost, what is sent, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size, Tensor

from fedsso.errors import InputError
from fedsso.maths.compress import check, compressor
from fedsso.support.trees import leaves, nbytes, tree_map

SHAPES = (Size([6, 9]), Size([6]), Size([5, 2, 3]), Size([]), Size([2, 2]))
D = sum(shape.numel() for shape in SHAPES)
TEXTS = ("topk:0.1", "topk:1", "int8", "rank:1", "rank:2")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> Tensor:
    """Gaussian numbers whose sizes differ by many orders when the spread is large."""
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(*shape, generator=g, dtype=torch.float64)
    return (v * torch.exp(spread * torch.randn(*shape, generator=g, dtype=torch.float64))).to(dtype)


def there_and_back(text: str, v: Tensor, shapes: Sequence[Size] = SHAPES) -> Tensor:
    method = compressor(text, shapes)
    return method.decode(method.encode(v), v)


def energy(v: Tensor) -> Tensor:
    return v.double().square().sum(-1)


# ---- what is lost ----


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0.01, 1), st.sampled_from([0.0, 4.0]))
def test_topk_keeps_the_largest_and_contracts(
    seed: int, d: int, share: float, spread: float
) -> None:
    v = draw(seed, 2, 3, d, spread=spread)
    back = there_and_back(f"topk:{share}", v, [Size([d])])
    k = ceil(share * d)
    kept = back != 0
    assert (kept.sum(-1) == k).all()
    assert torch.equal(back[kept], v[kept])
    assert (v.abs().where(kept, torch.inf).amin(-1) >= v.abs().where(~kept, 0.0).amax(-1)).all()
    assert (energy(v - back) <= (1 - k / d) * energy(v) * (1 + 1e-12)).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.sampled_from([0.0, 4.0]),
    st.sampled_from(["float32", "float64"]),
)
def test_int8_is_off_by_half_a_step_at_most(seed: int, d: int, spread: float, dtype: str) -> None:
    v = draw(seed, 2, 3, d, dtype=getattr(torch, dtype), spread=spread)
    back = there_and_back("int8", v, [Size([d])])
    bound = v.abs().amax(-1, keepdim=True).double() / 254
    slack = 1 + 300 * torch.finfo(v.dtype).eps
    assert back.dtype == v.dtype
    assert ((v.double() - back.double()).abs() <= bound * slack).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 9),
    st.integers(2, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 3.0]),
)
def test_rank_is_the_best_of_its_rank_and_contracts(
    seed: int, O: int, I: int, R: int, spread: float
) -> None:
    v = draw(seed, 2, 3, O * I + O, spread=spread)
    shapes = [Size([O, I]), Size([O])]
    if R * (O + I) >= O * I:
        with pytest.raises(InputError, match="shortens no parameter"):
            compressor(f"rank:{R}", shapes)
        return
    back = there_and_back(f"rank:{R}", v, shapes)
    assert torch.equal(back[..., O * I :], v[..., O * I :])
    lost = energy(v - back)
    S = torch.linalg.svdvals(v[..., : O * I].reshape(2, 3, O, I))
    torch.testing.assert_close(
        lost, S[..., R:].square().sum(-1), rtol=1e-8, atol=1e-12 * float(energy(v).max())
    )
    assert (lost <= (1 - R / min(O, I)) * energy(v) * (1 + 1e-12)).all()


def test_topk_of_everything_is_exact() -> None:
    v = draw(1, 2, 3, D, spread=5.0)
    assert torch.equal(there_and_back("topk:1", v), v)


def test_rank_is_exact_where_the_matrix_has_it() -> None:
    left, right, bias = draw(2, 2, 3, 7, 2), draw(3, 2, 3, 2, 8), draw(4, 2, 3, 7)
    v = torch.cat([(left @ right).flatten(-2), bias], -1)
    back = there_and_back("rank:2", v, [Size([7, 8]), Size([7])])
    torch.testing.assert_close(back, v, rtol=1e-12, atol=1e-12)


def test_a_convolution_is_a_matrix_of_its_output_channels() -> None:
    kernel = draw(5, 1, 1, 4, 1) @ draw(6, 1, 1, 1, 18)  # [O, I x 3 x 3] of rank 1
    back = there_and_back("rank:1", kernel.flatten(-2), [Size([4, 2, 3, 3])])
    torch.testing.assert_close(back, kernel.flatten(-2), rtol=1e-12, atol=1e-12)


def test_topk_takes_the_share_as_it_is_written() -> None:
    """0.07 * 100 is 7.000000000000001 in binary."""
    values, _ = compressor("topk:0.07", [Size([100])]).encode(draw(7, 1, 1, 100))
    assert values.shape == (1, 1, 7)


def test_int8_by_hand() -> None:
    """v = (254, -127, 1, 0.9, 0): the step is 254 / 127 = 2, so v' = (254, -128 or -126, 0, 0, 0).

    -127 / 2 = -63.5 lies between two multiples; torch rounds to the even one, -64.
    """
    v = torch.tensor([[[254.0, -127.0, 1.0, 0.9, 0.0]]])
    step, whole = compressor("int8", [Size([5])]).encode(v)
    assert step.tolist() == [[[2.0]]]
    assert whole.tolist() == [[[127, -64, 0, 0, 0]]]
    assert there_and_back("int8", v, [Size([5])]).tolist() == [[[254.0, -128.0, 0.0, 0.0, 0.0]]]


# ---- every compressor ----


@pytest.mark.parametrize("text", TEXTS)
def test_zero_stays_zero(text: str) -> None:
    zero = torch.zeros(2, 3, D)
    assert torch.equal(there_and_back(text, zero), zero)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 55, 70, D - 1])  # matrix, bias, convolution, small matrix
def test_a_vector_that_is_not_finite_stays_so_and_harms_no_neighbour(
    text: str, bad: float, place: int
) -> None:
    v = draw(8, 2, 3, D)
    sane = there_and_back(text, v)
    v[1, 2, place] = bad
    back = there_and_back(text, v)
    assert not back[1, 2].isfinite().all()
    assert torch.equal(back[0], sane[0])
    assert torch.equal(back[1, :2], sane[1, :2])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e30, 1e37])
def test_the_ends_of_float32(text: str, size: float) -> None:
    v = draw(9, 1, 2, D).clamp(-1, 1).mul(size).float()
    back = there_and_back(text, v)
    assert back.isfinite().all()
    assert (energy(v - back) <= energy(v)).all()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stacked_equals_one_by_one(text: str, dtype: torch.dtype) -> None:
    v = draw(10, 3, 4, D, dtype=dtype, spread=1.0)
    before = v.clone()
    whole = there_and_back(text, v)
    assert torch.equal(v, before)
    assert (whole.shape, whole.dtype) == (v.shape, dtype)
    for i in range(3):
        for t in range(4):
            alone = there_and_back(text, v[i : i + 1, t : t + 1])
            off = (whole[i : i + 1, t : t + 1] - alone).norm() / alone.norm()
            # an SVD of 9 columns leaves 9 eps in its values, and ten times that in vectors of
            # values that lie near
            assert float(off) <= 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("text", "size"),
    [("topk:0.1", 10 * (4 + 4)), ("int8", 4 + D), ("rank:1", 4 * ((6 + 9) + 6 + (5 + 6) + 1 + 4)),
     ("rank:2", 4 * (2 * (6 + 9) + 6 + 2 * (5 + 6) + 1 + 4))],
)  # fmt: skip
def test_bytes_sent(text: str, size: int) -> None:
    """D = 95 = 6 x 9 + 6 + 5 x 6 + 1 + 2 x 2; factors of the 2 x 2 matrix would save nothing."""
    assert D == 95
    sent = compressor(text, SHAPES).encode(draw(11, 3, 4, D, dtype=torch.float32))
    assert all(leaf.shape[:2] == (3, 4) for leaf in leaves(sent))
    assert nbytes(sent, 3 * 4) == size


@pytest.mark.parametrize("text", TEXTS)
def test_shapes_without_numbers(text: str) -> None:
    """On meta tensors the same leaves come out, and a vector of the right shape comes back."""
    v = draw(12, 2, 3, D, dtype=torch.float32)
    method = compressor(text, SHAPES)
    real, ghost = method.encode(v), method.encode(v.to("meta"))
    tree_map(lambda a, b: torch.testing.assert_close(a.to("meta"), b), real, ghost)
    back = method.decode(ghost, v.to("meta"))
    assert (back.shape, back.dtype, back.is_meta) == (v.shape, v.dtype, True)


# ---- what is refused ----


@pytest.mark.parametrize("text", [*TEXTS, "topk:1e-9", "topk:.5", "rank:12"])
def test_good_texts(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topc:0.1", "did you mean 'topk'"),
        ("", "unknown compressor ''. Known: int8, rank, topk"),
        ("topk", r"share in \(0, 1\], such as 'topk:0.1'; got 'topk'"),
        ("topk:0", r"share in \(0, 1\]"),
        ("topk:1.1", r"share in \(0, 1\]"),
        ("topk:-0.1", r"share in \(0, 1\]"),
        ("topk:nan", r"share in \(0, 1\]"),
        ("topk:many", r"share in \(0, 1\]"),
        ("rank", "integer R >= 1, such as 'rank:2'; got 'rank'"),
        ("rank:0", "integer R >= 1"),
        ("rank:-1", "integer R >= 1"),
        ("rank:1.5", "integer R >= 1"),
        ("int8:3", "write 'int8' instead of 'int8:3'"),
    ],
)
def test_wrong_texts_name_value_bound_and_remedy(text: str, message: str) -> None:
    for parse in (check, lambda text: compressor(text, SHAPES)):
        with pytest.raises(InputError, match=message):
            parse(text)


def test_a_rank_that_shortens_nothing_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"'rank:3' shortens no parameter of this model \(6 x 5, 6\)"
    ):
        compressor("rank:3", [Size([6, 5]), Size([6])])
    compressor("rank:2", [Size([6, 5]), Size([6])])  # 2 (6 + 5) = 22 < 30
