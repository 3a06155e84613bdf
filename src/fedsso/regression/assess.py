"""How well a model predicts in one hospital, in numbers of which none belongs to a single row.

Of the arrays of an "assess" answer each has one number, but for the curves:

all           rows, events, dropped, loglik, observed, expected, slope, intercept
binomial      auc, brier; roc [thresholds, 3]: threshold, sensitivity, specificity
cox           concordance
gaussian      r_squared, rmse
curve         calibration [groups, 3]: rows, mean prediction, mean outcome

No group of the curves has fewer rows than the hospital's limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import nan

import numpy as np

from ..errors import InputError
from .cox import Cox
from .design import Design
from .families import Family
from .limits import Limits
from .questions import Answer, Array, Arrays
from .records import GROUPS, THRESHOLDS, Assessment, Group, Threshold

STEPS = 50
"""Newton steps of a calibration at most."""
SMALL = 1e-10
"""It ends where a step changes neither slope nor intercept by more."""


def assess(
    family: Family,
    design: Design,
    x: Array,
    b: Array,
    limits: Limits,
) -> Arrays:
    """The arrays of an answer; x [n, p] and the coefficients b [p] are on the common scale."""
    eta = x @ b + design.offset
    cox = isinstance(family, Cox)
    mu = family.expected(design, eta) if isinstance(family, Cox) else family.mean(eta)
    w = design.weights
    slope, intercept = _calibrate(family, design, eta)
    numbers = {
        "rows": float((w > 0).sum()),
        "events": family.count(design),
        "dropped": float(design.dropped),
        "loglik": family.loglik(design, eta) if family.events else nan,
        "observed": float(w @ design.y),
        "expected": float(mu.sum() if cox else w @ mu),
        "slope": slope,
        "intercept": intercept,
        **_measures(family, design, eta, mu),
    }
    arrays = {name: np.array([value]) for name, value in numbers.items()}
    arrays["calibration"] = _curve(design, eta, mu, limits, cox)
    if family.name == "binomial":
        arrays["roc"] = _roc(design, mu, limits)
    return arrays


def assessment(answer: Answer) -> Assessment:
    """The record of an answer."""
    arrays = dict(answer.arrays)
    calibration = arrays.pop("calibration")
    roc = arrays.pop("roc", np.zeros((0, 3)))
    numbers = {name: float(array[0]) for name, array in arrays.items()}
    rows = int(numbers.pop("rows"))
    dropped = int(numbers.pop("dropped"))
    groups = tuple(Group(int(n), mean, seen) for n, mean, seen in calibration.tolist())
    points = tuple(Threshold(*point) for point in roc.tolist())
    return Assessment(
        hospital=answer.hospital,
        rows=rows,
        dropped=dropped,
        calibration=groups,
        roc=points,
        **numbers,
    )


def _measures(
    family: Family,
    design: Design,
    eta: Array,
    mu: Array,
) -> dict[str, float]:
    """What only some families have."""
    w = design.weights
    y = design.y
    if family.name == "binomial":
        return {"auc": area(y, eta, w), "brier": float(w @ (y - mu) ** 2 / w.sum())}
    if family.name == "cox":
        return {"concordance": concordance(design.time, y, eta)}
    if family.name == "gaussian":
        left = float(w @ (y - mu) ** 2)
        around = float(w @ (y - w @ y / w.sum()) ** 2)
        explained = 1 - left / around if around > 0 else nan
        return {"r_squared": explained, "rmse": float(np.sqrt(left / w.sum()))}
    return {}


def area(y: Array, score: Array, w: Array) -> float:
    """The area under the ROC curve: how often an event has the higher score; a tie counts half.

    >>> area(np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 2.0]), np.ones(3))
    0.75
    """
    _, rank = np.unique(score, return_inverse=True)
    events = np.bincount(rank, w * y)
    others = np.bincount(rank, w * (1 - y))
    pairs = float(events.sum() * others.sum())
    if not pairs > 0:
        return nan
    below = np.cumsum(others) - others
    return float(events @ (below + others / 2)) / pairs


def concordance(time: Array, y: Array, eta: Array) -> float:
    """Harrell's C: how often, of two rows, the one with the earlier event has the higher risk.

    A pair counts if it is known whose event came first; a tie of the risks counts half.

    >>> concordance(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 0.0]), np.array([5.0, 1.0, 2.0]))
    0.6666666666666666
    """
    later: list[float] = []  # the risks of all rows whose time is later, sorted
    pairs = 0
    agreed = 0.0
    order = np.argsort(-time, kind="stable")
    borders = np.flatnonzero(np.diff(time[order])) + 1
    for now in np.split(order, borders):
        for risk in eta[now][y[now] == 0].tolist():  # outlived the events of that time
            insort(later, risk)
        dying = eta[now][y[now] > 0].tolist()
        for risk in dying:
            low = bisect_left(later, risk)
            agreed += low + (bisect_right(later, risk) - low) / 2
            pairs += len(later)
        for risk in dying:
            insort(later, risk)
    return agreed / pairs if pairs else nan


def _calibrate(family: Family, design: Design, eta: Array) -> tuple[float, float]:
    """Slope and intercept of the calibration; NaN where there is none.

    The slope is that of eta as the only column. The intercept is fitted alone, with a slope of 1,
    so that it is above 0 where more was observed than expected (calibration in the large).
    """
    part = eta - design.offset
    ones = np.ones_like(part)
    if not family.intercept:
        return float(_newton(family, design, part[:, None], np.ones(1))[0]), nan
    slope = _newton(family, design, np.stack([part, ones], 1), np.array([1.0, 0.0]))[0]
    w = design.weights
    try:
        observed, _ = family.start(float(w @ design.y), float(w.sum()))
        expected, _ = family.start(float(w @ family.mean(eta)), float(w.sum()))
    except InputError:  # no event or nothing else: it is infinite
        return float(slope), nan
    start = np.array([observed - expected])
    alone = design._replace(offset=eta)
    return float(slope), float(_newton(family, alone, ones[:, None], start)[0])


def _newton(family: Family, design: Design, x: Array, b: Array) -> Array:
    """The coefficients of the columns x [n, k], from b [k] on; NaN where there are none."""
    for _ in range(STEPS):
        _, gradient = family.score(design, x, b)
        information = family.information(design, x, b)
        size = np.sqrt(np.outer(information.diagonal(), information.diagonal()))
        known = np.isfinite(information).all() and (size > 0).all()
        if not known or np.linalg.cond(information / size) > 1 / SMALL:
            break
        step = np.linalg.solve(information, gradient)
        b = b + step
        if np.abs(step).max() < SMALL * (1 + np.abs(b).max()):
            return b
    return np.full_like(b, nan)


def _curve(
    design: Design,
    eta: Array,
    mu: Array,
    limits: Limits,
    cox: bool,
) -> Array:
    """The points of the calibration curve: rows, prediction, outcome in groups of equal size.

    Of survival data these are the expected and the observed number of events.
    """
    order = np.argsort(eta, kind="stable")
    points = []
    groups = min(GROUPS, len(order) // max(1, limits.min_cell))
    for group in np.array_split(order, groups) if groups else []:
        w = design.weights[group]
        weight = 1.0 if cox else w.sum()
        if not weight > 0:
            continue
        expected = mu[group].sum() if cox else w @ mu[group]
        observed = w @ design.y[group]
        points.append((len(group), expected / weight, observed / weight))
    return np.array(points, dtype=np.float64).reshape(-1, 3)


def _roc(design: Design, mu: Array, limits: Limits) -> Array:
    """Sensitivity and specificity at fixed thresholds.

    A threshold is left out if fewer rows than the limit lie between it and the last one.
    """
    w = design.weights
    least = max(1, limits.min_cell)
    points = []
    last = 0
    for threshold in np.linspace(0.05, 0.95, THRESHOLDS):
        below = mu < threshold
        count = int(below.sum())
        if count - last < least or len(mu) - count < least:
            continue
        events = w @ design.y
        others = w.sum() - events
        if not min(events, others) > 0:
            break
        missed = (w * design.y) @ below / events
        cleared = (w * (1 - design.y)) @ below / others
        points.append((threshold, 1 - missed, cleared))
        last = count
    return np.array(points, dtype=np.float64).reshape(-1, 3)
