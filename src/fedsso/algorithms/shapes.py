"""The shapes of a model's parameters as a text, such as "10x64 10": a matrix and a vector.

Algorithms that step by layers keep it as a hyper-parameter, which the engine fills in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from ..errors import InputError

WORD = r"([1-9]\d{0,11}x[1-9]\d{0,11}|\d{1,12})"  # a matrix or a vector, which may be empty
FORM = re.compile(f"{WORD}( {WORD})*")
Shape = tuple[int, ...]


def told(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as a text: all axes of a matrix but the first are one, and a scalar is a vector.

    >>> told([(8, 3, 5, 5), (8,)])
    '8x75 8'
    """
    words = []
    for shape in shapes:
        is_matrix = len(shape) > 1 and prod(shape) > 0
        words.append(f"{shape[0]}x{prod(shape[1:])}" if is_matrix else f"{prod(shape)}")
    return " ".join(words)


def read(text: str) -> list[Shape]:
    """The shapes of a text: (rows, cols) of a matrix, (n,) of a vector.

    Raises:
        InputError: The text is not of this form.
    """
    if not FORM.fullmatch(str(text)):
        raise InputError(
            f"shapes must be numbers such as '10x64 10', a matrix and a vector, got shapes={text!r}"
            "; leave it out for the model's own"
        )
    return [tuple(map(int, word.split("x"))) for word in text.split()]


def must_suit(text: str, sizes: Sequence[int]) -> None:
    """Refuse shapes with another number of parameters than the model's layers have together.

    Raises:
        InputError: They have.
    """
    given = sum(map(prod, read(text)))
    if given != sum(sizes):
        raise InputError(
            f"shapes={text!r} have {given} numbers, the model has {sum(sizes)}; leave shapes out "
            "for the model's own"
        )
