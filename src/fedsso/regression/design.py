"""A hospital's table as numbers: the design of a regression, by the schema that all share."""

from __future__ import annotations

from typing import NamedTuple

from .questions import Array


class Term(NamedTuple):
    """What one column of the design stands for."""

    name: str
    """As the table of coefficients has it: "age", "stage: II", "smoker: yes", "(intercept)"."""
    column: str
    """The column of the table. Empty for the intercept."""
    level: str = ""
    """Of a category: the level. Of a gap's indicator: "missing"."""
    unit: str = ""
    scaled: bool = False
    """Whether the fit subtracts the federation's mean and divides by its deviation."""


class Design(NamedTuple):
    """The rows that a regression uses, n of them, with p columns."""

    terms: tuple[Term, ...]
    """What the p columns stand for."""
    x: Array
    """[n, p], in the units of the table; the intercept, if there is one, is the first column."""
    y: Array
    """The outcome [n]: 0 or 1, a count, a number, or whether the event was seen."""
    time: Array
    """The time at risk [n] of survival data, else empty."""
    weights: Array
    """[n], 1 where none are given."""
    offset: Array
    """[n], 0 where none are given."""
    dropped: int = 0
    """Rows left out because of a gap."""
    notes: tuple[str, ...] = ()
    """Sentences for the hospital's own log, such as which columns were ignored."""
