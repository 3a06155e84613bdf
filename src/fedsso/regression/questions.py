"""All that travels between the server and a hospital of a regression.

The server asks a question by its name, and sends a model with it. A hospital answers with a few
arrays of numbers. There are four questions:

describe      Before anything else: how many rows there are, and the sums for the common scaling.
score         In every round: the log-likelihood of the hospital's rows and its gradient.
information   At the null model, near the end and at the end: the second derivatives as well.
assess        Once, at the end: how well the model predicts in this hospital.

The schema and the family go with every question, as text, since a hospital may keep nothing between
two questions. No answer holds a number of a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Arrays: TypeAlias = dict[str, Array]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

DESCRIBE = "describe"
SCORE = "score"
INFORMATION = "information"
ASSESS = "assess"
QUESTIONS = (DESCRIBE, SCORE, INFORMATION, ASSESS)


class Question(NamedTuple):
    """What the server asks all hospitals."""

    name: str
    """One of QUESTIONS."""
    schema: str
    """The schema as TOML. See `schema.Schema`."""
    family: str
    """The name of the family and its settings, as `families.named` reads it."""
    model: Array
    """The coefficients [p] on the common scale. Empty for "describe"."""
    mean: Array
    """Of each column of the design [p], what is subtracted: the federation's mean, else 0."""
    deviation: Array
    """What it is divided by [p]: the federation's standard deviation, else 1."""


class Answer(NamedTuple):
    """What a hospital answers."""

    hospital: str
    """Its name."""
    arrays: Arrays
    """The numbers, by name. `hospital.py` says which there are for each question."""

    @property
    def bytes(self) -> int:
        """The size of the numbers."""
        return sum(array.nbytes for array in self.arrays.values())


class Refusal(NamedTuple):
    """A hospital that does not answer, and why, in words that hold nothing of a row."""

    hospital: str
    reason: str


class Wrong(Refusal):
    """In the place of an answer that cannot be right: the hospital is left out for good."""

    __slots__ = ()


Ask: TypeAlias = Callable[[Question], Sequence[Answer | Refusal]]
"""Asks all hospitals the same question. The simulator calls them; Flower sends messages."""


def total(answers: Sequence[Answer], name: str) -> Array:
    """The sum of one array over the hospitals.

    >>> north = Answer("north", {"rows": np.array([3.0])})
    >>> south = Answer("south", {"rows": np.array([4.0])})
    >>> total([north, south], "rows")
    array([7.])
    """
    summed: Array = np.sum([answer.arrays[name] for answer in answers], axis=0)
    return summed


def packed(matrix: Array) -> Array:
    """The p (p + 1) / 2 different numbers of a symmetric matrix [p, p], row by row.

    >>> packed(np.array([[1.0, 2.0], [2.0, 3.0]]))
    array([1., 2., 3.])
    """
    return matrix[np.triu_indices(len(matrix))]


def unpacked(numbers: Array) -> Array:
    """The symmetric matrix [p, p] that `packed` made these numbers of."""
    p = round((np.sqrt(8 * len(numbers) + 1) - 1) / 2)
    upper = np.zeros((p, p))
    upper[np.triu_indices(p)] = numbers
    return upper + np.triu(upper, 1).T


def settings(question: Question) -> Mapping[str, str]:
    """The texts of a question, for a message that has them beside its arrays."""
    return {"question": question.name, "schema": question.schema, "family": question.family}
