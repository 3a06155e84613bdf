"""What a fit hands over: plain records of numbers, which can be pickled and need numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import NamedTuple

from .design import Term
from .questions import Array, Refusal

GROUPS = 10
"""Points of a calibration curve at most."""
THRESHOLDS = 19
"""Points of a ROC curve at most."""


class Round(NamedTuple):
    """One round of the fit: the model was sent to all hospitals, and their scores came back."""

    round: int
    """Counted from 1. The first one judges the null model."""
    loglik: float
    """The log-likelihood of the model that was sent."""
    gradient: float
    """The length of its gradient on the common scale."""
    distance: float
    """The distance to the maximum, in standard errors, as far as the server knew it then."""
    kept: bool = True
    """False: the log-likelihood had fallen, so the server went back and took a shorter step."""
    information: bool = False
    """Whether the second derivatives were asked for in this round, too."""


class Group(NamedTuple):
    """One point of a calibration curve: the rows of a hospital with similar predictions."""

    rows: int
    expected: float
    """The mean prediction. Of survival data: the number of events that the model expects."""
    observed: float
    """The mean outcome. Of survival data: the number of events."""


class Threshold(NamedTuple):
    """One point of a ROC curve: who has at least this predicted probability counts as positive."""

    threshold: float
    sensitivity: float
    specificity: float


@dataclass(frozen=True)
class Assessment:
    """How well the model predicts in one hospital. NaN where a number has no meaning."""

    hospital: str
    rows: int
    events: float = nan
    """Rows with the event; of counts, their sum."""
    dropped: int = 0
    """Rows left out because of a gap."""
    loglik: float = nan
    """This hospital's part of the log-likelihood. Of a gaussian model NaN."""
    observed: float = nan
    """The sum of the outcomes (weighted, where there are weights)."""
    expected: float = nan
    """The sum of the predictions. Of survival data it equals `observed`: the baseline is own."""
    slope: float = nan
    """The calibration slope: 1 where predictions are as extreme as they should be."""
    intercept: float = nan
    """Calibration in the large: the calibration intercept where the slope is 1, above 0 where more
    was observed than expected. Survival data have none."""
    auc: float = nan
    """Binomial: the area under the ROC curve."""
    brier: float = nan
    """Binomial: the mean squared error of the probabilities."""
    concordance: float = nan
    """Survival data: Harrell's C."""
    r_squared: float = nan
    """Gaussian: the share of the outcome's variance, within this hospital, that is explained."""
    rmse: float = nan
    """Gaussian: the root of the mean squared error."""
    calibration: tuple[Group, ...] = ()
    """By increasing prediction. Groups below the hospital's limit are left out."""
    roc: tuple[Threshold, ...] = ()
    """Binomial: by increasing threshold."""


@dataclass(frozen=True)
class Fit:
    """All numbers of a regression over hospitals. Coefficients are in the units of the tables."""

    family: str
    """As `families.named` reads it, such as "binomial" or "cox efron"."""
    schema: str
    """The schema as TOML."""
    terms: tuple[Term, ...]
    """What the p coefficients belong to: the schema's terms, in its order.

    Levels that no hospital has are left out, and named in `notes`.
    """
    coefficients: Array
    """[p]"""
    covariance: Array
    """[p, p], from the information of all hospitals at these coefficients."""
    robust: Array | None
    """[p, p], the sandwich clustered by hospital, where it was asked for."""
    mean: Array
    """[p], what the fit subtracted from each column, else 0."""
    deviation: Array
    """[p], what the fit divided each column by, else 1."""
    loglik: float
    null_loglik: float
    """Of the model with an intercept only; without intercept, of the model without any term."""
    deviance: float
    null_deviance: float
    aic: float
    dispersion: float
    """Gaussian: the residual variance, with n - p in the denominator. Else 1."""
    residual_df: int
    """n - p. Tests of a gaussian model use the t distribution with so many degrees of freedom."""
    rows: int
    """The rows n that were used."""
    events: float
    """Rows with the event; of counts, their sum; of a gaussian model NaN."""
    dropped: int
    """Rows left out because of a gap."""
    rounds: int
    """How many models all hospitals judged: the null model, every step, and the last model."""
    bytes_up: int
    """All answers of all hospitals together, in bytes."""
    bytes_down: int
    """All questions to all hospitals together, with their texts, in bytes."""
    trace: tuple[Round, ...]
    hospitals: tuple[Assessment, ...]
    """The hospitals whose rows were used, by name."""
    refusals: tuple[Refusal, ...]
    """The hospitals whose rows were not used, and why."""
    notes: tuple[str, ...]
    """Sentences that a reader of the results should see."""
    converged: bool
    distance: float
    """The distance of the coefficients to the maximum, in standard errors (Newton decrement)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the terms."""
        return tuple(term.name for term in self.terms)
