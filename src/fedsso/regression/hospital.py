"""A hospital's side of a regression: it answers the server's questions from its own table.

It needs numpy alone. Every answer is a few arrays of sums over rows:

describe      rows, dropped, events    [1] each: rows in use, rows with a gap, events
              outcome, exposure        [1] each: the sums that the null model needs
              saturated                [1] what the deviance needs
              weight                   [1] the sum of the weights
              mean, spread             [p] of each column: mean and sum of squares around it
score         loglik [1], gradient [p]
information   the same, and information [p (p + 1) / 2], packed
assess        what `assess.py` says

Before every answer the hospital checks its own limits, and refuses by an InputError. Its `public`
text may be sent; its message is for the hospital's own log.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import InputError, one_of
from . import schema as schemas
from .assess import assess
from .design import Design, Table, design
from .families import Family, named
from .limits import Limits
from .questions import (
    ASSESS,
    DESCRIBE,
    INFORMATION,
    QUESTIONS,
    Answer,
    Array,
    Arrays,
    Question,
    packed,
)

LIFTED = "--no-limits lifts it for tables that you own; docs/what-travels.md tells why it is there"


class Known(NamedTuple):
    """A table that was read by a schema for a family, kept for the next question."""

    schema: str
    family: Family
    design: Design


class Hospital:
    """Answers questions about one table.

    Args:
        name: How results call this hospital.
        source: Its table, the design that was made of it, or why its table cannot be read.
        limits: What it refuses to answer.
    """

    def __init__(
        self,
        name: str,
        source: Table | Design | InputError,
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.source = source
        self.limits = limits or Limits()
        self._known: Known | None = None

    def answer(self, question: Question) -> Answer:
        """The answer to a question.

        Raises:
            InputError: The table does not fit the schema, or a limit forbids an answer.
        """
        one_of("question", question.name, QUESTIONS)
        known = self._read(question)
        made = known.design
        _refuse(made, known.family, self.limits)
        if question.name == DESCRIBE:
            return Answer(self.name, _describe(made, known.family))
        x = _scaled(made, question)
        return Answer(self.name, self._computed(question, known, x))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the hospital's own log, once it has read its table."""
        return self._known.design.notes if self._known else ()

    def _computed(self, question: Question, known: Known, x: Array) -> Arrays:
        """The numbers that need a model; x is the design on the common scale."""
        family = known.family
        made = known.design
        b = question.model
        if question.name == ASSESS:
            return assess(family, made, x, b, self.limits)
        loglik, gradient = family.score(made, x, b)
        arrays = {"loglik": np.array([loglik]), "gradient": gradient}
        if question.name == INFORMATION:
            arrays["information"] = packed(family.information(made, x, b))
        return arrays

    def _read(self, question: Question) -> Known:
        """The design by this question's schema, read again only if the schema has changed."""
        family = named(question.family)
        known = self._known
        if known and known.schema == question.schema and known.family.text == family.text:
            return known
        if isinstance(self.source, InputError):
            raise self.source
        if isinstance(self.source, Design):
            made = self.source
        else:
            made = design(self.source, schemas.parse(question.schema), family.name)
        self._known = Known(question.schema, family, made)
        return self._known


def _refuse(design: Design, family: Family, limits: Limits) -> None:
    """Raise an InputError if an answer could tell too much about single rows."""
    rows = len(design.y)
    p = len(design.terms)
    if rows < max(1, limits.min_rows):
        raise _refusal(
            f"{_rows(rows)} in use, {design.dropped} left out because of missing values",
            f"fewer than {max(1, limits.min_rows)} complete rows, this hospital's limit",
        )
    if p > limits.max_share * rows:
        raise _refusal(
            f"{p} coefficients for {_rows(rows)}",
            f"more than {limits.max_share:g} coefficients for each row, this hospital's limit",
        )
    for term, column in zip(design.terms, design.x.T, strict=True):
        count = int(column.sum()) if term.level else 0
        if 0 < count < limits.min_level:
            raise _refusal(
                f"{_rows(count)} with {term.name}",
                f"fewer than {limits.min_level} rows with a level of column {term.column!r}, this "
                "hospital's limit",
            )
    if family.name not in ("binomial", "cox"):
        return
    events = int((design.y > 0).sum())
    if min(events, rows - events) < limits.min_events:
        raise _refusal(
            f"{events} of {_rows(rows)} with the event",
            f"fewer than {limits.min_events} rows with the event or without it, this hospital's "
            "limit",
        )


def _refusal(own: str, public: str) -> InputError:
    """The error of a limit, with a text for the hospital's own log and one for everybody."""
    return InputError(f"no answer: {own}; {public} ({LIFTED})", public=public)


def _rows(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count} rows"


def _describe(design: Design, family: Family) -> Arrays:
    """The sums of a table that a fit begins with."""
    outcome, exposure = family.sums(design)
    weight = design.weights.sum()
    if not weight > 0:
        raise InputError("all weights are 0; leave weights out or correct the column")
    mean = design.weights @ design.x / weight
    spread = design.weights @ (design.x - mean) ** 2
    numbers = {
        "rows": float((design.weights > 0).sum()),
        "dropped": float(design.dropped),
        "events": family.count(design),
        "outcome": outcome,
        "exposure": exposure,
        "saturated": family.saturated(design),
        "weight": float(weight),
    }
    arrays = {name: np.array([value]) for name, value in numbers.items()}
    return {**arrays, "mean": mean, "spread": spread}


def _scaled(design: Design, question: Question) -> Array:
    """The design [n, p] on the common scale."""
    p = len(design.terms)
    for array in (question.model, question.mean, question.deviation):
        if array.shape != (p,):
            raise InputError(
                f"the question is about {array.shape[0]} coefficients, the schema has {p}; server "
                "and hospital must use the same version of fedsso"
            )
    return (design.x - question.mean) / question.deviation
