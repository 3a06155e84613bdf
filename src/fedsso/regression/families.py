"""The families of regressions: the log-likelihood of a hospital's rows, and its derivatives.

=========  =========================================================================================
x          the design on the common scale, [n, p]
b          the coefficients on that scale, [p]
eta        x b + offset, the linear predictor, [n]
mu         the mean of the outcome that eta stands for, [n]
v          d mu / d eta, [n]; with the canonical links it is also the variance of the outcome
w          the weights of the rows, [n]
=========  =========================================================================================

With canonical links the gradient is x^T w (y - mu) and the information x^T diag(w v) x. A gaussian
model is fitted with a residual variance of 1, so that its log-likelihood is minus half the sum of
squares; `total` makes the true one of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from ..errors import InputError, unknown
from .design import Design
from .questions import Array


class Family(ABC):
    """What all families have in common."""

    name: ClassVar[str]
    link: ClassVar[str]
    ratio: ClassVar[str] = ""
    """What the exponential of a coefficient is called. Empty where it means nothing."""
    intercept: ClassVar[bool] = True
    """Whether a model of this family may have an intercept."""
    events: ClassVar[bool] = True
    """Whether the outcome counts events."""

    @property
    def text(self) -> str:
        """The name with its settings: `named` makes the same family of it."""
        return self.name

    @abstractmethod
    def loglik(self, design: Design, eta: Array) -> float:
        """The log-likelihood of the rows."""

    @abstractmethod
    def score(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> tuple[float, Array]:
        """The log-likelihood of the rows and its gradient [p]."""

    @abstractmethod
    def information(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> Array:
        """Minus the second derivatives of the log-likelihood, [p, p]."""

    @abstractmethod
    def mean(self, eta: Array) -> Array:
        """What a linear predictor stands for; of survival data, the hazard ratio."""

    @abstractmethod
    def sums(self, design: Design) -> tuple[float, float]:
        """Two sums over the rows, outcome and exposure: their ratio is the mean of the null model.

        Where a binomial model has an offset it is only near it.
        """

    @abstractmethod
    def start(self, outcome: float, exposure: float) -> tuple[float, float]:
        """The intercept of the null model, and the sum of w v there."""

    def saturated(self, design: Design) -> float:  # noqa: ARG002
        """The log-likelihood of the rows where every prediction is the outcome itself."""
        return 0.0

    def total(
        self,
        loglik: float,
        saturated: float,  # noqa: ARG002
        rows: int,  # noqa: ARG002
    ) -> float:
        """The log-likelihood, from the sums of `loglik` and `saturated` over all rows."""
        return loglik

    def count(self, design: Design) -> float:
        """The number of events; NaN where there are none to count."""
        return float(design.y.sum())


class Linear(Family):
    """A generalised linear model with its canonical link."""

    @abstractmethod
    def variance(self, eta: Array) -> Array:
        """d mu / d eta."""

    def score(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> tuple[float, Array]:
        """The log-likelihood and x^T w (y - mu)."""
        eta = x @ b + design.offset
        with np.errstate(over="ignore", invalid="ignore"):  # too long a step: the server undoes it
            residual = design.weights * (design.y - self.mean(eta))
            return self.loglik(design, eta), x.T @ residual

    def information(
        self,
        design: Design,
        x: Array,
        b: Array,
    ) -> Array:
        """x^T diag(w v) x."""
        eta = x @ b + design.offset
        root = np.sqrt(design.weights * self.variance(eta))
        rows = x * root[:, None]
        return rows.T @ rows

    def sums(self, design: Design) -> tuple[float, float]:
        """The weighted sum of the outcome, and the sum of the weights."""
        return float(design.weights @ design.y), float(design.weights.sum())


class Binomial(Linear):
    """Logistic regression of an outcome that is 0 or 1."""

    name = "binomial"
    link = "logit"
    ratio = "odds ratio"

    def loglik(self, design: Design, eta: Array) -> float:
        """The sum of w (y eta - log(1 + exp(eta)))."""
        return float(design.weights @ (design.y * eta - np.logaddexp(0.0, eta)))

    def mean(self, eta: Array) -> Array:
        """The probability."""
        small = np.exp(-np.abs(eta))
        share: Array = np.where(eta >= 0, 1.0, small) / (1 + small)
        return share

    def variance(self, eta: Array) -> Array:
        """mu (1 - mu), without cancellation."""
        small = np.exp(-np.abs(eta))
        product: Array = small / (1 + small) ** 2
        return product

    def start(self, outcome: float, exposure: float) -> tuple[float, float]:
        """The logit of the share of events."""
        if not 0 < outcome < exposure:
            raise InputError(
                "all rows of all hospitals have the same outcome, so there is nothing to explain; "
                "see which level of the outcome the schema counts as an event (positive)"
            )
        share = outcome / exposure
        return math.log(share / (1 - share)), exposure * share * (1 - share)


class Gaussian(Linear):
    """Linear regression; weights are precisions, as in R."""

    name = "gaussian"
    link = "identity"
    events = False

    def loglik(self, design: Design, eta: Array) -> float:
        """Minus half the sum of squares."""
        residual = design.y - eta
        return float(-0.5 * (design.weights @ residual**2))

    def mean(self, eta: Array) -> Array:
        """The linear predictor itself."""
        return eta

    def variance(self, eta: Array) -> Array:
        """1"""
        return np.ones_like(eta)

    def sums(self, design: Design) -> tuple[float, float]:
        """The weighted sum of what the offset leaves, and the sum of the weights."""
        return float(design.weights @ (design.y - design.offset)), float(design.weights.sum())

    def start(self, outcome: float, exposure: float) -> tuple[float, float]:
        """The mean."""
        return outcome / exposure, exposure

    def saturated(self, design: Design) -> float:
        """Half the sum of the weights' logarithms: 0 without weights."""
        used = design.weights[design.weights > 0]
        return float(0.5 * np.log(used).sum())

    def total(
        self,
        loglik: float,
        saturated: float,
        rows: int,
    ) -> float:
        """With the residual variance that makes the rows most likely."""
        variance = -2 * loglik / rows
        if variance <= 0:
            return math.inf
        return saturated - 0.5 * rows * (math.log(2 * math.pi * variance) + 1)

    def count(self, design: Design) -> float:  # noqa: ARG002
        """A measured outcome has no events."""
        return math.nan


class Poisson(Linear):
    """Regression of counts; the offset is the logarithm of the exposure."""

    name = "poisson"
    link = "log"
    ratio = "rate ratio"

    def loglik(self, design: Design, eta: Array) -> float:
        """The sum of w (y eta - exp(eta) - log y!)."""
        terms = design.y * eta - self.mean(eta)
        return float(design.weights @ (terms - _log_factorial(design.y)))

    def mean(self, eta: Array) -> Array:
        """The rate."""
        with np.errstate(over="ignore"):
            return np.exp(eta)

    def variance(self, eta: Array) -> Array:
        """The rate."""
        return self.mean(eta)

    def sums(self, design: Design) -> tuple[float, float]:
        """The weighted sum of the counts, and that of the exposures."""
        exposure = design.weights @ np.exp(design.offset)
        return float(design.weights @ design.y), float(exposure)

    def start(self, outcome: float, exposure: float) -> tuple[float, float]:
        """The logarithm of the rate."""
        if not outcome > 0:
            raise InputError(
                "all counts of all hospitals are 0, so there is nothing to explain; see which "
                "column the schema names as the outcome"
            )
        return math.log(outcome / exposure), outcome

    def saturated(self, design: Design) -> float:
        """The sum of w (y log y - y - log y!)."""
        y = design.y
        entropy = y * np.log(np.maximum(y, 1.0))  # 0 for a count of 0
        return float(design.weights @ (entropy - y - _log_factorial(y)))


def _log_factorial(counts: Array) -> Array:
    """log y! of every count."""
    different, where = np.unique(counts, return_inverse=True)
    logs = np.array([math.lgamma(count + 1) for count in different])
    return logs[where]


def named(text: str) -> Family:
    """The family of this name: "binomial", "gaussian", "poisson", "cox", "cox breslow".

    >>> named("cox").text
    'cox efron'
    """
    from .cox import TIES, Cox

    plain: dict[str, type[Linear]] = {one.name: one for one in (Binomial, Gaussian, Poisson)}
    name, _, setting = text.strip().lower().partition(" ")
    if name == Cox.name:
        ties = setting.strip() or "efron"
        if ties not in TIES:
            raise unknown("treatment of ties", ties, TIES)
        return Cox(ties)
    if name not in plain or setting:
        also = {
            "logistic": "binomial",
            "logit": "binomial",
            "linear": "gaussian",
            "ols": "gaussian",
        }
        raise unknown("family", text, [*plain, Cox.name], also={**also, "survival": "cox"})
    return plain[name]()
