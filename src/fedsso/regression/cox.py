"""Cox's proportional hazards, with a baseline hazard of its own in every hospital.

A stratum's partial likelihood needs no row of another one, so that it adds up over hospitals.

=========  =========================================================================================
r          w exp(eta), the risk of a row, [n]
t, m       a time at which somebody has the event, and how many do
S, D       the sum of r over the rows at risk at t, and over those m rows
l          0, ..., m - 1: Efron takes S - (l / m) D in turn, Breslow S each time
f          l / m, with Breslow 0
omega      the mean weight of the m rows
q          omega / (S - f D)
e          what the model expects of a row: its risk times the hazard that it has seen, [n]
=========  =========================================================================================

The log-likelihood is the sum of w eta over the events, minus that of omega log(S - f D). Its
gradient is x^T (w y - e), and the information x^T diag(e) x minus the sum of omega z z^T, with z
the mean of x in the risk set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import InputError
from .design import Design
from .families import Family
from .questions import Array, Places

TIES = ("efron", "breslow")


class Deaths(NamedTuple):
    """The events of a stratum, one entry for each of them, and who was at risk.

    Risks are held as logarithms, so that no model makes them overflow.
    """

    order: Places
    """The rows in use [n], by increasing time."""
    group: Places
    """The time of each such row, as a number from 0 [n]."""
    groups: int
    """How many different times there are."""
    risk: Array
    """log r of each row in use [n]."""
    at: Places
    """The time of each event [k]."""
    f: Array
    """[k]"""
    omega: Array
    """[k]"""
    at_risk: Array
    """log S [k]."""
    dying: Array
    """f D / S [k], below 1."""

    @property
    def rest(self) -> Array:
        """log(S - f D), [k]."""
        return self.at_risk + np.log1p(-self.dying)


@dataclass(frozen=True)
class Cox(Family):
    """Survival regression, stratified by hospital."""

    ties: str = "efron"
    """What happens to equal times: efron or breslow."""
    name: ClassVar[str] = "cox"
    link: ClassVar[str] = "log"
    ratio: ClassVar[str] = "hazard ratio"
    intercept: ClassVar[bool] = False

    @property
    def text(self) -> str:
        """The name with the treatment of ties."""
        return f"{self.name} {self.ties}"

    def loglik(self, design: Design, eta: Array) -> float:
        """The partial log-likelihood of the rows."""
        deaths = _deaths(design, eta, self.ties)
        seen = design.weights * design.y
        return float(seen @ eta - deaths.omega @ deaths.rest)

    def score(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> tuple[float, Array]:
        """The log-likelihood and x^T (w y - e)."""
        eta = x @ b + design.offset
        residual = design.weights * design.y - self.expected(design, eta)
        return self.loglik(design, eta), (x - x.mean(0)).T @ residual

    def information(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> Array:
        """x^T diag(e) x minus the sum of omega z z^T."""
        eta = x @ b + design.offset
        x = x - x.mean(0)  # changes nothing but the rounding
        deaths = _deaths(design, eta, self.ties)
        used = x[deaths.order]
        died = design.y[deaths.order] > 0
        at_risk = _means_at_risk(used, deaths)[deaths.at]
        shares = np.exp(deaths.risk[died] - _log_sums(deaths.risk[died], deaths.at))
        dying = _by_group(shares[:, None] * used[died], deaths.at)
        own = np.searchsorted(np.unique(deaths.at), deaths.at)
        part = deaths.dying[:, None]
        z = (at_risk - part * dying[own]) / (1 - part)
        expected = self.expected(design, eta)
        whole: Array = (expected[:, None] * x).T @ x - (deaths.omega[:, None] * z).T @ z
        return whole

    def expected(self, design: Design, eta: Array) -> Array:
        """The number of events that the model expects of each row, [n], by Breslow's baseline."""
        deaths = _deaths(design, eta, self.ties)
        q = np.log(deaths.omega) - deaths.rest
        now = _scattered(q, deaths)
        spared = _scattered(q + np.log1p(-deaths.f), deaths)  # for who has the event now
        before = np.full(deaths.groups, -math.inf)
        before[1:] = np.logaddexp.accumulate(now)[:-1]
        died = design.y[deaths.order] > 0
        own = np.where(died, spared[deaths.group], now[deaths.group])
        hazard = np.logaddexp(before[deaths.group], own)
        expected = np.zeros_like(eta)
        expected[deaths.order] = np.exp(deaths.risk + hazard)
        return expected

    def mean(self, eta: Array) -> Array:
        """The hazard ratio."""
        with np.errstate(over="ignore"):
            return np.exp(eta)

    def sums(self, design: Design) -> tuple[float, float]:
        """The weights of the events, and of all rows."""
        return float(design.weights @ design.y), float(design.weights.sum())

    def start(self, outcome: float, exposure: float) -> tuple[float, float]:  # noqa: ARG002
        """No intercept; every event is worth about the variance of x at risk."""
        if not outcome > 0:
            raise InputError(
                "no hospital has an event, so there is nothing to explain; see which level of the "
                "outcome the schema counts as an event (positive)"
            )
        return math.nan, outcome


def _deaths(design: Design, eta: Array, ties: str) -> Deaths:
    """The events with their risk sets. Rows of weight 0 are as if they were not there."""
    used = np.flatnonzero(design.weights > 0)
    order = used[np.argsort(design.time[used], kind="stable")]
    time = design.time[order]
    group: Places = np.cumsum(np.diff(time, prepend=time[:1]) > 0, dtype=np.int64)
    groups = int(group[-1]) + 1 if len(group) else 0
    weights = design.weights[order]
    risk = np.log(weights) + eta[order]
    died = design.y[order] > 0
    at = group[died]
    m = np.bincount(at, minlength=groups)
    rank = np.arange(len(at)) - np.searchsorted(at, at)  # among the events at the same time
    f = rank / m[at] if ties == "efron" else np.zeros(len(at))
    omega = np.bincount(at, weights[died], groups)[at] / m[at]
    later = np.logaddexp.accumulate(risk[::-1])[::-1]
    at_risk = later[np.searchsorted(group, at)]
    dying = f * np.exp(np.minimum(_log_sums(risk[died], at) - at_risk, 0.0))
    return Deaths(order, group, groups, risk, at, f, omega, at_risk, dying)


def _means_at_risk(x: Array, deaths: Deaths) -> Array:
    """The mean of x [n, p] over the rows at risk at each time, weighted by risk: [groups, p]."""
    sums = _log_sums(deaths.risk, deaths.group)
    means = _by_group(np.exp(deaths.risk - sums)[:, None] * x, deaths.group)
    first = np.searchsorted(deaths.group, np.arange(deaths.groups))
    later = np.logaddexp.accumulate(deaths.risk[::-1])[::-1][first]
    shares = np.exp(sums[first] - later)  # of who leaves at this time, among all at risk
    for time in range(deaths.groups - 2, -1, -1):
        means[time] = means[time + 1] + shares[time] * (means[time] - means[time + 1])
    return means


def _scattered(logs: Array, deaths: Deaths) -> Array:
    """The logarithm of the sum of exp(logs) [k] over the events of each time, [groups]."""
    sums = np.full(deaths.groups, -math.inf)
    sums[deaths.at] = _log_sums(logs, deaths.at)
    return sums


def _log_sums(logs: Array, group: Places) -> Array:
    """For each row, the logarithm of the sum of exp(logs) over its group."""
    if not len(logs):
        return logs
    first = np.flatnonzero(np.diff(group, prepend=-1))
    sums = np.logaddexp.reduceat(logs, first)
    return sums[np.searchsorted(group[first], group)]


def _by_group(values: Array, group: Places) -> Array:
    """The sums of the rows of each group; rows of one group are neighbours."""
    if not len(values):
        return values
    first = np.flatnonzero(np.diff(group, prepend=-1))
    return np.add.reduceat(values, first, axis=0)
