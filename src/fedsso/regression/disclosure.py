"""What no answer may tell: a hospital checks its own limits before every answer.

Sums tell about a group of rows whenever a column, a weight or a model sets it apart, so no group
may be smaller than the limits say: neither side of a column with two values, no level, reference
level or indicator, no outcome. Nor may few rows make up most of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import ceil

import numpy as np

from ..errors import InputError
from .cox import Cox
from .design import Design
from .families import Binomial, Family, Linear
from .limits import Limits
from .outcome import BINOMIAL, COX, GAUSSIAN
from .questions import Array

MOST = 0.9
"""If few rows make up more than this share of a sum, the sum tells about them."""
GRADES = 10
"""A weight or an offset with so few values sorts the rows into groups."""
STEEP = 30.0
"""Linear predictors may differ by no more if not even one row is left between 0 and 1."""
STEPS = 100.0
"""And by no more in any case: a fit ends before, and rows that differ little would be far apart."""
LIFTED = "--no-limits lifts it for tables that you own; docs/what-travels.md tells why it is there"


def check(design: Design, family: Family, limits: Limits) -> None:
    """Raise an InputError if an answer could tell too much about single rows."""
    _check_size(design, limits)
    _check_events(design, family, limits)
    columns = list(_columns(design))
    for what, values in columns:
        _check_values(what, values, limits)
    for column, values in _references(design):
        _check_values(f"level of column {column!r}", values, limits)
    _check_pairs(columns, limits)
    for what, values in (("weight", design.weights), ("offset", design.offset)):
        _check_grades(what, values, limits)
    if _held(_influence(family, design, design.offset), _few(limits)) > MOST:
        own = "few rows have nearly all of the weight"
        raise _refusal(own, f"{own}: see the weights and the offset, this hospital's limit")


def smallest_group(design: Design, limits: Limits) -> int:
    """How many rows two answers must differ by: as many as any answer must be about."""
    if limits.min_level <= 1:
        return 1
    return max(limits.min_rows, ceil(len(design.terms) / limits.max_share))


def singles_out(family: Family, design: Design, eta: Array, limits: Limits) -> bool:
    """Whether a model's sums are mostly those of few rows, or tell on which side of it a row is.

    The information is a sum over the rows of which the model is unsure. With huge coefficients
    these are one or two, or none: then two scores differ by the rows between two models.
    """
    if limits.min_level <= 1 or family.name == GAUSSIAN:
        return False
    shares = _influence(family, design, eta)
    in_doubt = 4 * family.variance(eta).sum() if isinstance(family, Binomial) else np.inf
    with np.errstate(invalid="ignore"):
        steep = not np.ptp(eta) <= (STEPS if in_doubt >= 1 else STEEP)
    return bool(steep or _held(shares, _few(limits)) > MOST)


def too_steep() -> InputError:
    """The error of such a model."""
    own = "the model's sums are those of few rows"
    remedy = "if it was fitted, a column separates the outcomes: leave it out"
    return _refusal(own, f"{own}, this hospital's limit; {remedy}")


def _few(limits: Limits) -> int:
    """How many rows may not make up most of a sum: two, or fewer where a level may have two."""
    return min(2, limits.min_level - 1)


def _check_size(design: Design, limits: Limits) -> None:
    """Raise an InputError for few rows, or nearly as many coefficients as rows."""
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


def _columns(design: Design) -> Iterator[tuple[str, Array]]:
    """All that rows are multiplied with, and what a value of it is called."""
    for term, values in zip(design.terms, np.ascontiguousarray(design.x.T), strict=True):
        if term.column:
            yield f"{'level' if term.level else 'value'} of column {term.column!r}", values
    yield "value of the outcome", design.y
    yield "value of the weights", design.weights
    yield "value of the offset", design.offset


def _references(design: Design) -> Iterator[tuple[str, Array]]:
    """Of each column with levels: 1 for the rows that have none of those with a coefficient."""
    coded: dict[str, Array] = {}
    for term, values in zip(design.terms, design.x.T, strict=True):
        if term.level:
            coded[term.column] = coded.get(term.column, 0.0) + values
    for column, values in coded.items():
        yield column, 1.0 - values


def _check_values(what: str, values: Array, limits: Limits) -> None:
    """Raise an InputError if few rows differ from the others, or one row is far from all others."""
    usual = np.median(values)
    counts = [int((values != usual).sum())]
    if _is_two(values):
        counts = [int((values == values.max()).sum()), int((values == values.min()).sum())]
    if 0 < min(counts) < limits.min_level:
        raise _refusal(
            f"{_rows(min(counts))} with one {what}",
            f"fewer than {limits.min_level} rows with a {what}, this hospital's limit",
        )
    away = (values - usual) ** 2
    if _held(away, min(1, _few(limits))) > MOST:
        raise _refusal(
            f"the largest or smallest {what} is far from all others",
            f"one {what} is far from all others, so sums would tell its row; use a logarithm or a "
            "cap, this hospital's limit",
        )


def _check_grades(what: str, values: Array, limits: Limits) -> None:
    """Raise an InputError if a weight or offset has few values, and few rows have one of them.

    With one weight for each value, a few questions tell the sums over the rows of that value.
    """
    _, counts = np.unique(values, return_counts=True)
    if len(counts) <= GRADES and counts.min() < limits.min_level:
        raise _refusal(
            f"{_rows(int(counts.min()))} with one {what}",
            f"fewer than {limits.min_level} rows with a value of the {what}, this hospital's limit",
        )


def _check_pairs(columns: list[tuple[str, Array]], limits: Limits) -> None:
    """Raise an InputError if two columns are the same, or opposite, in all but few rows.

    Their difference, which anybody can make of the sums, would be a column of these few rows.
    """
    if limits.min_level <= 1:
        return
    coded = [
        (what, values == values.max() if _is_two(values) else values) for what, values in columns
    ]
    for (one, first), (other, second) in combinations(coded, 2):
        differ = int((first != second).sum())
        same = len(first) - differ if first.dtype == second.dtype == bool else 0
        if 0 < differ < limits.min_level or 0 < same < limits.min_level:
            names = " and ".join(what.partition(" of ")[2] for what in (one, other))
            raise _refusal(
                f"{names} are the same or opposite in all but few rows",
                f"{names} are the same or opposite in all but fewer than {limits.min_level} rows, "
                "this hospital's limit; leave one of them out",
            )


def _is_two(values: Array) -> bool:
    """Whether a column has two different values."""
    low, high = values.min(), values.max()
    return bool(low < high and ((values == low) | (values == high)).all())


def _check_events(design: Design, family: Family, limits: Limits) -> None:
    """Raise an InputError for few rows with the event or without it, whatever the family."""
    rows = len(design.y)
    events = int((design.y > 0).sum())
    _, counts = np.unique(design.y, return_counts=True)
    least = limits.min_events if family.name == GAUSSIAN else events
    if len(counts) == 2 or family.name in (BINOMIAL, COX):
        least = min(int(counts.min()), rows - int(counts.max()))
    if least < limits.min_events:
        raise _refusal(
            f"{events} of {_rows(rows)} with the event",
            f"fewer than {limits.min_events} rows with the event or without it, this hospital's "
            "limit",
        )


def _influence(family: Family, design: Design, eta: Array) -> Array:
    """How much each row counts in the information of a model, [n]."""
    if isinstance(family, Cox):
        return family.expected(design, eta)
    assert isinstance(family, Linear)
    with np.errstate(over="ignore", invalid="ignore"):
        return design.weights * family.variance(eta)


def _held(parts: Array, rows: int) -> float:
    """The share of a sum that its `rows` largest parts make up."""
    with np.errstate(over="ignore", invalid="ignore"):
        whole = float(parts.sum())
        if not 0 < rows < len(parts) or not whole > 0:
            return 0.0
        return float(np.partition(parts, -rows)[-rows:].sum()) / whole


def _refusal(own: str, public: str) -> InputError:
    """The error of a limit, with a text for the hospital's own log and one for everybody."""
    return InputError(f"no answer: {own}; {public} ({LIFTED})", public=public)


def _rows(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count} rows"
