"""What an answer must look like, whoever sends it: names, shapes, numbers and their ranges.

This is the one place where an answer is compared with its question. What passes can be added up
with other answers: it has the arrays that were asked for and no other, float64, finite, and so
small that no square overflows. Whether it is true is another matter: see `doubts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..cells import LARGEST
from ..families import Family
from ..outcome import BINOMIAL, COX, GAUSSIAN, POISSON
from ..questions import ASSESS, DESCRIBE, INFORMATION, SCORE, Array, unpacked
from ..records import GROUPS, THRESHOLDS

HUGE = 1e100
"""A log-likelihood beyond this is that of a step that was far too long."""
MOST = 1e150
"""No sum is larger: the square of a larger one would not be a number."""
COUNTED = 2.0**53
"""No count is larger: up to here a float is every whole number."""
SLACK = 1e-6
"""Rounding may take a sum so far, as a share of what was summed up."""
ROUNDING = 1e-12
FLAT = 1e-9
"""Information may be below 0 by these shares of its largest number, and of the rows."""


class Form(NamedTuple):
    """What one array of an answer must be."""

    shape: tuple[int, ...] = (1,)
    """Of a curve the first number is the most points."""
    low: float = -MOST
    high: float = MOST
    whole: bool = False
    gaps: bool = False
    """Whether NaN may stand for a number that does not exist."""


NUMBER = Form()
GAP = Form(gaps=True)
COUNT = Form(low=0.0, high=COUNTED, whole=True)
AMOUNT = Form(low=0.0)
ABOVE = Form(low=1 / MOST)
SHARE = Form(low=-SLACK, high=1 + SLACK)
RANK = SHARE._replace(gaps=True)
MEASURES = {
    BINOMIAL: {"auc": RANK, "brier": SHARE, "roc": SHARE._replace(shape=(THRESHOLDS, 3))},
    COX: {"concordance": RANK},
    GAUSSIAN: {"r_squared": Form(high=1 + SLACK, gaps=True), "rmse": AMOUNT},
}
"""What an assessment has for some families only."""


def fault(
    arrays: Mapping[str, Any],
    question: str,
    family: Family,
    p: int,
    described: Mapping[str, Array],
) -> str:
    """Why an answer cannot be right; "" if it can.

    Args:
        arrays: What was answered.
        question: What was asked.
        family: The family of the regression.
        p: How many coefficients it has.
        described: What the same hospital has answered to "describe", once it has.
    """
    forms = _forms(question, family, p)
    if arrays.keys() != forms.keys():
        odd = min(arrays.keys() ^ forms.keys(), key=str)
        return f"{'no array is called' if odd in arrays else 'there is no array'} {odd!r:.40}"
    for name, form in forms.items():
        if _misshapen(arrays[name], form):
            return f"{name} is no array of float64 of the shape {form.shape}"
    # After too long a step exp may overflow. The server sees it by the log-likelihood.
    if family.name == POISSON and "gradient" in forms and not abs(arrays["loglik"][0]) < HUGE:
        return ""
    if question == SCORE and np.isnan(arrays["gradient"]).all():  # as a hospital says it itself
        forms.pop("gradient")
    for name, form in forms.items():
        wrong = _out_of_range(arrays[name], form)
        if wrong:
            return f"{name} {wrong}"
    if question == DESCRIBE:
        return _untrue_table(arrays, family)
    if question == INFORMATION:
        return _untrue_information(arrays["information"], described)
    return _untrue_assessment(arrays, family, described) if question == ASSESS else ""


def _forms(question: str, family: Family, p: int) -> dict[str, Form]:
    """The arrays of an answer."""
    sum_of_outcomes = AMOUNT if family.events else NUMBER
    events = COUNT._replace(gaps=not family.events)
    if question == DESCRIBE:
        return {
            "rows": COUNT._replace(low=1.0),
            "dropped": COUNT,
            "events": events,
            "outcome": sum_of_outcomes,
            "exposure": ABOVE,
            "saturated": NUMBER,
            "weight": ABOVE,
            "mean": Form((p,), -LARGEST, LARGEST),
            "spread": AMOUNT._replace(shape=(p,)),
        }
    if question == ASSESS:
        return {
            "rows": COUNT,
            "dropped": COUNT,
            "events": events,
            "loglik": NUMBER if family.events else GAP,
            "observed": sum_of_outcomes,
            "expected": sum_of_outcomes,
            "slope": GAP,
            "intercept": GAP,
            "calibration": Form((GROUPS, 3)),
            **MEASURES.get(family.name, {}),
        }
    forms = {"loglik": NUMBER, "gradient": Form((p,))}
    if question == INFORMATION:
        forms["information"] = Form((p * (p + 1) // 2,))
    return forms


def _misshapen(value: Any, form: Form) -> bool:
    """Whether this is another kind of array. A curve, which has rows, may have fewer of them."""
    if not isinstance(value, np.ndarray) or value.dtype != np.float64:
        return True
    rows = len(form.shape) - 1
    return value.shape[rows:] != form.shape[rows:] or not value.shape[:rows] <= form.shape[:rows]


def _out_of_range(value: Array, form: Form) -> str:
    """What is wrong with the numbers of an array; "" if nothing is."""
    known = value[~np.isnan(value)] if form.gaps else value
    if not np.isfinite(known).all():
        return "is not finite"
    if not ((known >= form.low) & (known <= form.high)).all():
        return f"is not between {form.low:.3g} and {form.high:.3g}"
    return "is no whole number" if form.whole and (known % 1).any() else ""


def _untrue_table(arrays: Mapping[str, Array], family: Family) -> str:
    """What no table can have."""
    mean = abs(arrays["outcome"][0]) / arrays["exposure"][0]
    if family.name in (BINOMIAL, COX):
        more = arrays["events"][0] > arrays["rows"][0] or mean > 1 + SLACK
        return "it has more events than rows" if more else ""
    beyond = family.name == GAUSSIAN and mean > 2 * LARGEST
    return "its outcome is beyond all tables" if beyond else ""


def _untrue_information(packed: Array, described: Mapping[str, Array]) -> str:
    """Second derivatives that no log-likelihood has."""
    if not np.isfinite(packed).all():
        return ""
    information = unpacked(packed)
    rounding = ROUNDING * np.abs(packed).max() + FLAT * described["weight"][0]
    falls = np.linalg.eigvalsh(information)[0] < -rounding
    return "its information is that of no concave likelihood" if falls else ""


def _untrue_assessment(
    arrays: Mapping[str, Array],
    family: Family,
    described: Mapping[str, Array],
) -> str:
    """An assessment of other rows than those of the table."""
    for name in ("rows", "dropped", "events"):
        if not np.array_equal(arrays[name], described[name], equal_nan=True):
            return f"{name} is not that of its table"
    rows, *means = arrays["calibration"].T
    if (rows < 1).any() or (rows % 1).any() or rows.sum() > arrays["rows"][0]:
        return "its calibration curve is of other rows"
    beyond = family.name == BINOMIAL and (np.abs(np.array(means) - 0.5) > 0.5 + SLACK).any()
    return "its calibration curve is beyond 0 and 1" if beyond else ""
