"""Cox's proportional hazards, with a baseline hazard of its own in every hospital.

A stratum's partial likelihood needs no row of another one, so that over hospitals it adds up exactly.

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
from .questions import Array

TIES = ("efron", "breslow")


class Deaths(NamedTuple):
    """The events of a stratum, one entry for each of them, and the sums over who was at risk."""

    order: Array
    """The rows in use [n], by increasing time."""
    group: Array
    """The time of each such row, as a number from 0 [n]."""
    at: Array
    """The time of each event [k]."""
    f: Array
    """[k]"""
    omega: Array
    """[k]"""
    risk: Array
    """r of each row in use [n], divided by exp(top)."""
    top: float
    """The largest eta, so that no exponential overflows."""
    rest: Array
    """S - f D [k]."""


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
        with np.errstate(divide="ignore"):  # too long a step: the server undoes it
            logs = np.log(deaths.rest) + deaths.top
        seen = design.weights * design.y
        return float(seen @ eta - deaths.omega @ logs)

    def score(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> tuple[float, Array]:
        """The log-likelihood and x^T (w y - e)."""
        eta = x @ b + design.offset
        with np.errstate(divide="ignore", invalid="ignore"):
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
        expected = self.expected(design, eta)
        used = deaths.order
        rx = deaths.risk[:, None] * x[used]
        died = (design.y[used] > 0)[:, None]
        at_risk = _at_risk(rx, deaths.group)[deaths.at]
        dying = _by_group(rx * died, deaths.group)[deaths.at]
        z = (at_risk - deaths.f[:, None] * dying) / deaths.rest[:, None]
        mean_part = (deaths.omega[:, None] * z).T @ z
        return (expected[:, None] * x).T @ x - mean_part

    def expected(self, design: Design, eta: Array) -> Array:
        """The number of events that the model expects of each row, [n], by Breslow's baseline."""
        deaths = _deaths(design, eta, self.ties)
        groups = int(deaths.group[-1]) + 1 if len(deaths.group) else 0
        q = deaths.omega / deaths.rest
        hazard = np.cumsum(np.bincount(deaths.at, q, groups))
        correction = np.bincount(deaths.at, deaths.f * q, groups)
        died = design.y[deaths.order] > 0
        seen = hazard[deaths.group] - died * correction[deaths.group]
        expected = np.zeros_like(eta)
        expected[deaths.order] = deaths.risk * seen
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
    group = np.cumsum(np.diff(time, prepend=time[:1]) > 0)
    top = float(eta[order].max(initial=-math.inf))
    risk = design.weights[order] * np.exp(eta[order] - top)
    died = design.y[order] > 0
    at = group[died]
    groups = len(np.unique(group))
    m = np.bincount(at, minlength=groups)
    first = np.searchsorted(at, at)  # of the events at the same time
    l = np.arange(len(at)) - first
    f = l / m[at] if ties == "efron" else np.zeros(len(at))
    omega = np.bincount(at, design.weights[order][died], groups)[at] / m[at]
    dying = np.bincount(at, risk[died], groups)[at]
    rest = _at_risk(risk, group)[at] - f * dying
    return Deaths(order, group, at, f, omega, risk, top, rest)


def _by_group(values: Array, group: Array) -> Array:
    """The sums of the rows of each group; rows of one group are neighbours."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    return np.add.reduceat(values, first, axis=0)


def _at_risk(values: Array, group: Array) -> Array:
    """The sums of the rows of each group and of all later ones."""
    backwards = _by_group(values, group)[::-1]
    return np.cumsum(backwards, axis=0)[::-1]
