"""The coefficients as a forest plot shows them: steps that can be compared, on a common axis.

A year of age and a milligram of a salt are too small to see beside a stage of a disease. So a
number is shown for a round step near one standard deviation, such as 10 years; `Step.detail` says
which.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, floor, inf, isclose, isfinite, log, log10
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ...regression.design import INTERCEPT
from ...regression.result.printed import figures
from ...regression.schema import CATEGORY, YESNO

if TYPE_CHECKING:
    from ...regression.design import Term
    from ...regression.result import Regression
    from ...regression.schema import Schema

ROUND = (1, 2, 5, 10)
"""The first figures of a round number."""
NEAR = (0.2, 2.0)
"""Deviations of which one unit is near enough."""
REACH = 4
"""How many typical half-intervals the axis reaches beyond the estimates, at most."""
LONGEST = 600.0
"""The exponential of an interval beyond this is no number."""
TICKS = 7
"""The most numbers below an axis."""


class Step(NamedTuple):
    """One line of a forest plot, on the scale of the linear predictor."""

    label: str
    """Of the term, such as "stage: II"."""
    detail: str
    """What the step is: "per 10 years", "vs I"."""
    value: float
    low: float
    high: float


def shown(value: float, ratios: bool) -> str:
    """A number of a forest plot: a ratio with two decimals, where there are ratios.

    >>> shown(0.0, True), shown(-7.0, True), shown(0.0123, False)
    ('1.00', '0.000912', '0.0123')
    """
    if not ratios:
        return figures(value, 3)
    ratio = exp(min(value, 700.0))
    return f"{ratio:.2f}" if 0.095 <= ratio < 1000 else figures(ratio, 3)


class Axis(NamedTuple):
    """The horizontal axis of a forest plot, on the scale of the linear predictor."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Places and their texts; the texts are ratios, where there are ratios."""

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the left to 1 at the right; beyond, the end counts."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def steps(result: Regression, level: float) -> list[Step]:
    """The lines of a forest plot: all terms but the intercept, and those that have no interval."""
    found = []
    fit = result.fit
    moments = zip(fit.mean.tolist(), fit.deviation.tolist(), strict=True)
    for term, row, (mean, deviation) in zip(fit.terms, result.rows(level), moments, strict=True):
        size = _size(mean, deviation) if term.scaled else 1.0
        longest = LONGEST if result.family.ratio else inf
        if term.name == INTERCEPT or not abs(row.low * size) + abs(row.high * size) < longest:
            continue
        detail = _detail(term, result.schema, size)
        name = term.name if term.level else term.column
        found.append(Step(name, detail, row.estimate * size, row.low * size, row.high * size))
    return found


def _size(mean: float, deviation: float) -> float:
    """How many units a step has: one, unless the deviation is much more or much less.

    A column of nothing but 0 and 1, and no other between 0 and 1, has the variance m (1 - m): half
    of such a step would mean nothing.
    """
    only_codes = isclose(deviation**2, mean * (1 - mean), rel_tol=1e-6)
    is_near = NEAR[0] <= deviation <= NEAR[1]
    return 1.0 if only_codes or is_near else round_step(deviation)


def round_step(deviation: float) -> float:
    """The number 1, 2 or 5 times a power of ten that is nearest to a deviation, in ratios.

    >>> round_step(9.4), round_step(0.27), round_step(51.8)
    (10.0, 0.2, 50.0)
    """
    if not isfinite(deviation) or deviation <= 0:
        return 1.0
    power = floor(log10(deviation))
    nearest = min(ROUND, key=lambda first: abs(log10(first) + power - log10(deviation)))
    return float(f"{nearest}e{power}")


def _detail(term: Term, schema: Schema, size: float) -> str:
    """What a step is compared with, in words."""
    column = next((one for one in schema.columns if one.name == term.column), None)
    if column is None or term.level == "missing":
        return ""
    if column.type in (CATEGORY, YESNO):
        return f"vs {column.baseline}"
    unit = f" {term.unit}" if term.unit else ""
    return f"per {size * column.per:g}{unit}"


# ---- the axis ----


def axis_of(lines: Sequence[Step], ratios: bool) -> Axis:
    """An axis that shows 0, all estimates, and all intervals but the absurdly wide ones."""
    values = [line.value for line in lines]
    typical = median([line.high - line.low for line in lines]) / 2
    low = max(min(line.low for line in lines), min(values) - REACH * typical)
    high = min(max(line.high for line in lines), max(values) + REACH * typical)
    low = min(low, 0.0)
    high = max(high, 0.0)
    margin = 0.04 * (high - low) or 1.0
    low -= margin
    high += margin
    ticks = _ratio_ticks(low, high) if ratios else _plain_ticks(low, high)
    return Axis(low, high, ticks)


def _ratio_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Round ratios within a range of logarithms, 1 among them."""
    for firsts in ((1, 1.2, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = []
        for power in range(floor(low / log(10)), floor(high / log(10)) + 1):
            for first in firsts:
                ratio = float(f"{first}e{power}")
                if low <= log(ratio) <= high:
                    found.append((log(ratio), f"{ratio:g}"))
        if len(found) <= TICKS:
            break
    if len(found) > 3:
        return tuple(found)
    # The range is narrow: ratios at even steps.
    even = _plain_ticks(exp(low), exp(high))
    return tuple((log(ratio), text) for ratio, text in even if ratio > 0)


def _plain_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Round numbers within a range, 0 among them."""
    step = round_step((high - low) / (TICKS - 2))
    first = int(low // step)
    places = [step * k for k in range(first, first + 2 * TICKS)]
    return tuple((place, f"{place:.6g}") for place in places if low <= place <= high)
