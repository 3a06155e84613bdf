"""Lossy compression of uploads that have the model's size.

A vector v [clients, trials, d] becomes less, which is sent; the server makes v' of it.

    topk:SHARE   the ceil(SHARE d) entries that are largest in size, each with its place; from
                 SHARE = 1/2 on that is no less than v itself
                     |v - v'|^2 <= (1 - k/d) |v|^2
    int8         every entry as a multiple -127..127 of max|v| / 127
                     |v - v'|_j <= max|v| / 254
    rank:R       each weight matrix [O, I] with R (O + I) < O I as the two factors of its best
                 approximation of rank R, all other parameters as they are
                     |v - v'|^2 <= (1 - R/min(O, I)) |v|^2

The engine remembers what gets lost: it adds the rest v - v' to the next upload of the same client
(Seide et al. 2014; Stich, Cordonnier and Jaggi 2018). A vector with NaN or infinite entries is
never finite after decoding, so compression hides no divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InputError, unknown
from ..support.trees import Tree

EXAMPLES = {"topk": "topk:0.1", "int8": "int8", "rank": "rank:2"}
LEVELS = 127


class Compressor(Protocol):
    """How a vector of the model's size is sent."""

    def encode(self, v: Tensor) -> Tree:
        """What is sent of v [M, trials, d]; leaves [M, trials, ...]."""
        ...

    def decode(self, sent: Tree, like: Tensor) -> Tensor:
        """The vector [M, trials, d] that the server understands; like [..., d] gives its length."""
        ...


def compressor(text: str, shapes: Sequence[torch.Size]) -> Compressor:
    """The compressor of a text such as "topk:0.1".

    Args:
        text: One of the three forms above.
        shapes: The shapes of the model's parameters, in the order of v; only rank:R needs them.

    Raises:
        InputError: The text names no compressor, or rank:R would shorten no parameter.
    """
    name, value = _parse(text)
    if name == "topk":
        return TopK(Decimal(value))
    if name == "int8":
        return Int8()
    rank = LowRank(int(value), tuple(shapes))
    if not any(rank.profits(shape) for shape in shapes):
        has = ", ".join(_told(shape) for shape in shapes)
        raise InputError(
            f"{text!r} shortens no parameter of this model ({has}); use a smaller R or 'int8'"
        )
    return rank


def _told(shape: torch.Size) -> str:
    """A shape in words: 32 x 64."""
    return " x ".join(map(str, shape))


def check(text: str) -> None:
    """Raise InputError unless the text names a compressor."""
    _parse(text)


def _parse(text: str) -> tuple[str, str]:
    """Name and value of a compressor's text, as written; InputError if it names none."""
    name, colon, value = str(text).partition(":")
    if name not in EXAMPLES:
        raise unknown("compressor", name, EXAMPLES)
    if name == "topk" and not _is_share(value):
        raise InputError(
            f"topk:SHARE needs a share in (0, 1], such as {EXAMPLES[name]!r}; got {text!r}"
        )
    if name == "rank" and not _is_rank(value):
        raise InputError(
            f"rank:R needs an integer R >= 1, such as {EXAMPLES[name]!r}; got {text!r}"
        )
    if name == "int8" and colon:
        raise InputError(f"int8 takes no value; write 'int8' instead of {text!r}")
    return name, value


def _is_share(value: str) -> bool:
    """Whether a text is a number in (0, 1]."""
    try:
        return 0 < Decimal(value) <= 1
    except InvalidOperation:  # no number, or NaN
        return False


def _is_rank(value: str) -> bool:
    """Whether a text is an integer >= 1, and not absurdly long."""
    digits = value.isascii() and value.isdigit() and len(value) < 10
    return digits and int(value) >= 1


@dataclass(frozen=True)
class TopK:
    """The largest entries and their places."""

    share: Decimal  # exact as written: 0.07 of 100 entries are 7

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Values and places, [M, trials, k] each; NaN counts as largest, so that it is sent."""
        k = ceil(self.share * v.shape[-1])
        place = v.abs().topk(k, sorted=False).indices
        return v.gather(-1, place), place.to(torch.int32)

    def decode(self, sent: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
        """The values in their places, zero wherever nothing was sent."""
        values, place = sent
        zeros = values.new_zeros(*values.shape[:-1], like.shape[-1])
        return zeros.scatter(-1, place.long(), values)


@dataclass(frozen=True)
class Int8:
    """Multiples of one step for each client and trial."""

    def encode(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """The step [M, trials, 1] and the multiples [M, trials, d].

        The largest entry of v is 127 steps, so that no entry overflows.
        """
        step = v.abs().amax(-1, keepdim=True) / LEVELS  # NaN if v has one
        whole = (v / step).round().clamp(-LEVELS, LEVELS).nan_to_num(0.0)  # v = 0 gives 0/0
        return step, whole.to(torch.int8)

    def decode(self, sent: tuple[Tensor, Tensor], like: Tensor) -> Tensor:  # noqa: ARG002
        """Step times multiple, in the type of the step."""
        step, whole = sent
        return step * whole.to(step.dtype)


@dataclass(frozen=True)
class LowRank:
    """Matrices as two thin factors by the singular value decomposition.

    A filter of a convolution [O, C, kh, kw] counts as a matrix [O, C kh kw].
    """

    rank: int
    shapes: tuple[torch.Size, ...]

    def profits(self, shape: torch.Size) -> bool:
        """Whether two factors are shorter than the parameter."""
        if len(shape) < 2:
            return False
        rows = shape[0]
        columns = shape[1:].numel()
        return self.rank * (rows + columns) < rows * columns

    def encode(self, v: Tensor) -> tuple[Tree, ...]:
        """What is sent of each parameter.

        That is U S [M, trials, O, R] and V [M, trials, I, R], or itself [M, trials, size].
        """
        sizes = [shape.numel() for shape in self.shapes]
        parts = v.split_with_sizes(sizes, -1)
        sent: list[Tree] = []
        for part, shape in zip(parts, self.shapes, strict=True):
            sent.append(self._factors(part, shape) if self.profits(shape) else part)
        return tuple(sent)

    def decode(self, sent: tuple[Tree, ...], like: Tensor) -> Tensor:  # noqa: ARG002
        """The products of the factors, in place of their parameters."""
        parts = []
        for one in sent:
            if isinstance(one, Tensor):
                parts.append(one)
            else:
                left, right = one
                parts.append((left @ right.mT).flatten(-2))
        return torch.cat(parts, -1)

    def _factors(self, part: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The two factors of a parameter, whose vector is `part` [M, trials, size].

        A matrix that is not finite gets a left factor of NaN, so that its product is NaN too.
        """
        matrix = part.reshape(*part.shape[:-1], shape[0], -1)
        sane = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        finite = torch.where(sane, matrix, 0.0)  # NaN would end all trials
        U, S, Vh = torch.linalg.svd(finite, full_matrices=False)
        left = U[..., : self.rank] * S[..., None, : self.rank]
        return torch.where(sane, left, torch.nan), Vh[..., : self.rank, :].mT
