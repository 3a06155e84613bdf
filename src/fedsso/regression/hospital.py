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

Before every answer the hospital checks its own limits (`disclosure.py`) and what it has answered
before (`ledger.py`), and refuses by an InputError. Its `public` text may be sent; its message is
for the hospital's own log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import InputError, one_of
from . import disclosure
from . import schema as schemas
from .assess import assess
from .design import Design, Table, design
from .families import Family, named
from .ledger import HERE, Ledger, fingerprints
from .limits import Limits
from .questions import (
    ASSESS,
    DESCRIBE,
    INFORMATION,
    QUESTIONS,
    SCORE,
    Answer,
    Array,
    Arrays,
    Question,
    packed,
)

CODES = re.compile(r"-9+|missing|unknown")
"""Texts of a gap that any question may name. Others may be values, and would pick out rows."""


class Known(NamedTuple):
    """A table that was read by a schema for a family, kept for the next question."""

    schema: str
    family: Family
    design: Design
    limits: Limits | None = None
    """Those that an answer was found to keep."""


class Hospital:
    """Answers questions about one table.

    Args:
        name: How results call this hospital.
        source: Its table, the design that was made of it, or why its table cannot be read.
        limits: What it refuses to answer.
        ledger: What it has answered before. Left out: what this process knows of it.
        agreed: Whether the schema is the hospital's own choice: then it may name any `marks`.
    """

    def __init__(
        self,
        name: str,
        source: Table | Design | InputError,
        limits: Limits | None = None,
        ledger: Ledger | None = None,
        *,
        agreed: bool = False,
    ) -> None:
        self.name = name
        self.source = source
        self.limits = limits or Limits()
        self.ledger = ledger or HERE[name]
        self.agreed = agreed
        self._known: Known | None = None

    def answer(self, question: Question) -> Answer:
        """The answer to a question.

        Raises:
            InputError: The table does not fit the schema, or a limit forbids an answer.
        """
        one_of("question", question.name, QUESTIONS)
        known = self._allowed(self._read(question))
        made = known.design
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
        steep = disclosure.singles_out(family, made, x @ b + made.offset, self.limits)
        if steep and question.name != SCORE:
            raise disclosure.too_steep()
        if question.name == ASSESS:
            return assess(family, made, x, b, self.limits)
        loglik, gradient = family.score(made, x, b)
        if steep:  # too long a step: the server undoes it, and needs no more than the likelihood
            gradient = np.full_like(gradient, np.nan)
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
            schema = schemas.parse(question.schema)
            self._check_marks(schema.marks)
            made = design(self.source, schema, family.name)
        self._known = Known(question.schema, family, made)
        return self._known

    def _check_marks(self, marks: Sequence[str]) -> None:
        """Raise an InputError if a question says itself which cells are gaps."""
        other = [mark for mark in marks if not CODES.fullmatch(mark.lower())]
        if other and self.limits.min_level > 1 and not self.agreed:
            raise schemas.wrong(
                f"marks = {other}: a value that counts as missing would pick out its rows; write "
                "NA into the table, or let the hospital name this schema in its own configuration"
            )

    def _allowed(self, known: Known) -> Known:
        """A design about which the hospital answers. Raises an InputError beyond its limits."""
        if known.limits == self.limits:
            return known
        disclosure.check(known.design, known.family, self.limits)
        if self.limits.min_level > 1 and isinstance(self.source, Table):
            rows = fingerprints(self.source)[list(known.design.kept)]
            self.ledger.admit(rows, disclosure.smallest_group(known.design, self.limits))
        self._known = known._replace(limits=self.limits)
        return self._known


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
