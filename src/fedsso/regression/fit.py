"""A regression over hospitals: from their answers to coefficients and all that belongs to them.

    fit(ask, schema_text, "binomial")

`ask` sends a question to all hospitals, in this process or over a network. The limit of the rounds
is the pooled maximum-likelihood fit exactly, because the log-likelihoods of the hospitals add up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..errors import InputError, integer, number
from . import schema as schemas
from .assess import assessment
from .design import Term
from .design import terms as terms_of
from .families import Family, named
from .inference import COLLINEAR, dependent, invert, involved, sandwich
from .outcome import BINOMIAL, check_time
from .questions import Answer, Array, Ask, Refusal, unpacked
from .records import Assessment, Fit, Round
from .rounds.climb import Climb, End, Free, Goal, Null, Progress
from .rounds.doubts import CLEAR, off_scale, outweighing, without
from .rounds.forms import SLACK
from .rounds.scales import Moments, centring, common_scale, has_intercept, moments, to_table, unlike
from .rounds.talk import Look, Lost, Talk

FEW = 20
"""With fewer hospitals, errors clustered by hospital are known to be rough."""
EXACT = 1e-6
"""Standard errors. A null model's intercept that is farther off needs rounds of its own."""
NULL_ROUNDS = 30


def fit(
    ask: Ask,
    schema_text: str,
    family: str,
    *,
    tolerance: float = 1e-8,
    rounds: int = 200,
    progress: Progress | None = None,
    cluster: bool = False,
) -> Fit:
    """Fit a regression.

    Args:
        ask: Sends a question to all hospitals.
        schema_text: The schema as TOML.
        family: "binomial", "gaussian", "poisson", "cox efron" or "cox breslow".
        tolerance: How far the coefficients may be from the maximum, in standard errors.
        rounds: How many models the hospitals judge at most.
        progress: Is told every round.
        cluster: Compute errors clustered by hospital as well.

    Raises:
        InputError: No hospital takes part, columns are collinear, no finite estimate exists, or the
            fit does not converge.
    """
    chosen = named(family)
    goal = Goal(_tolerance(tolerance), integer("rounds", rounds, least=1))
    schema = schemas.parse(schema_text)
    check_time(schema, chosen.name)
    terms = terms_of(schema, chosen.name)
    if not terms:
        raise InputError("the schema has no column to explain the outcome with")
    talk = Talk(ask, schema_text, chosen, len(terms))
    talk.describe()
    trace: list[Round] = []
    while True:
        try:
            job = _Job(talk, chosen, terms)
            end, null_loglik = job.run(goal, trace, progress)
            return _result(job, end, null_loglik, tuple(trace), cluster)
        except Lost:  # one hospital less: this ends
            continue


def _tolerance(value: object) -> float:
    tolerance = number("tolerance", value)
    if not 0 < tolerance <= 1:
        raise InputError(
            f"tolerance is a share of a standard error, above 0 and at most 1; got {value!r}"
        )
    return tolerance


class _Job:
    """A fit over a fixed set of hospitals."""

    def __init__(
        self,
        talk: Talk,
        family: Family,
        terms: tuple[Term, ...],
    ) -> None:
        self.talk = talk
        self.family = family
        self.terms = terms
        self.rows = round(talk.sum("rows"))
        for name in ("rows", "weight", "exposure", *(["outcome"] if family.events else [])):
            size = talk.described(name) + talk.described("exposure")
            talk.lose_heavy(outweighing(size), f"the {name}")
        far = off_scale(talk.answers)
        if far is not None:
            talk.lose_heavy(far.place, f"column {terms[far.column].name!r}")
        self.held = moments(talk.answers)
        centred = has_intercept(terms) or not family.intercept
        self.common = common_scale(terms, self.held, centred)
        talk.begin(self.common)
        self.free = _free(terms, self.held, self.common)

    def run(
        self,
        goal: Goal,
        trace: list[Round],
        progress: Progress | None,
    ) -> tuple[End, float]:
        """The end of the rounds, and the log-likelihood of the null model."""
        null = self._null()
        climb = Climb(self.talk, self.free, self.family, null, goal, trace, progress)
        climb.tell_null()
        return climb.run(), self._null_loglik(null)

    def _null(self) -> Null:
        """The null model. Raises an InputError if columns are collinear."""
        outcome = self.talk.sum("outcome")
        intercept, curvature = self.family.start(outcome, self.talk.sum("exposure"))
        b = np.zeros(len(self.terms))
        if has_intercept(self.terms):
            b[0] = intercept
        look = self.talk.look(b, information=True)
        self._doubt(look, outcome / self.talk.sum("exposure"))
        self._check_rank(look, curvature)
        dispersion = 1.0
        if self.family.name == "gaussian":
            dispersion = -2 * look.loglik / self.rows
            if not dispersion > 0:
                raise InputError("the outcome is the same in all rows; there is nothing to explain")
        return Null(look, curvature / dispersion, dispersion)

    def _doubt(self, null: Look, mean: float) -> None:
        """Lose a hospital whose numbers of the null model cannot be, or outweigh all others.

        The slope of the intercept is known already: the outcomes, less those that are expected.
        """
        talk = self.talk
        size = np.abs(null.logliks) + talk.described("weight")
        offset = self.family.name == BINOMIAL and schemas.parse(talk.schema).offset
        if has_intercept(self.terms) and not offset:
            outcome = talk.described("outcome")
            expected = mean * talk.described("exposure")
            off = np.abs(null.parts[:, 0] - (outcome - expected))
            off /= np.abs(outcome) + np.abs(expected) + size
            if off.max() > SLACK:
                talk.lose(int(off.argmax()), "its score is not that of the outcomes that it counts")
        talk.lose_heavy(outweighing(size), "the log-likelihood")
        talk.lose_overinformed(null)

    def _check_rank(self, null: Look, curvature: float) -> None:
        """Raise an InputError if there are too few rows, or if columns are collinear."""
        if len(self.free.terms) >= self.rows:
            raise InputError(
                f"{len(self.free.terms)} coefficients cannot be estimated from {self.rows} rows; "
                "leave columns out"
            )
        terms = self.free.terms
        places = self.free.places
        usual = curvature * (self.held.deviation / self.common.deviation)[places] ** 2
        nothing = null.information.diagonal()[places] <= COLLINEAR * usual
        if self.family.intercept:
            nothing = self.held.constant[places] & has_intercept(self.terms)
            nothing[0] = False  # the intercept itself
        if nothing.any():
            raise _constant([term.name for term, one in zip(terms, nothing, strict=True) if one])
        everybody = list(range(len(self.talk.answers)))
        direction = dependent(self._centred(null, everybody))
        if direction is None:
            return
        # Rows of one more hospital never make columns collinear, but false numbers may.
        clear = [dependent(self._centred(null, rest), CLEAR) is None for rest in without(everybody)]
        if sum(clear) == 1 < len(clear):
            self.talk.lose_heavy(clear.index(True), "the information of the columns")
        raise _collinear(involved(terms, direction))

    def _centred(self, null: Look, used: list[int]) -> Array:
        """The information of some hospitals, as if their columns had a mean of 0."""
        held = moments([self.talk.answers[one] for one in used])
        change = centring(self.terms, held, self.common)
        places = self.free.places
        second = change.T @ unpacked(null.shares[used].sum(0)) @ change
        return second[np.ix_(places, places)]

    def _null_loglik(self, null: Null) -> float:
        """The log-likelihood of the best model with an intercept alone.

        Only a binomial model with an offset needs rounds of its own for it.
        """
        look = null.look
        if not has_intercept(self.terms):
            return look.loglik
        slope = float(look.information[0, 0])
        for _ in range(NULL_ROUNDS):
            gradient = float(look.gradient[0])
            if gradient**2 <= EXACT**2 * slope * null.dispersion:
                return look.loglik
            b = look.b.copy()
            b[0] += gradient / slope
            if b[0] == look.b[0]:  # rounding
                return look.loglik
            after = self.talk.look(b, information=False)
            learned = (gradient - float(after.gradient[0])) / float(b[0] - look.b[0])
            slope = learned if learned > 0 else 2 * slope
            look = after
        return math.nan


def _free(
    terms: tuple[Term, ...],
    held: Moments,
    common: Moments,
) -> Free:
    """The coefficients to fit: all but those of levels that no hospital has."""
    kept = [place for place, term in enumerate(terms) if not term.level or held.mean[place] != 0]
    places = np.array(kept)
    spread = held.deviation / common.deviation
    unit = np.array([term.level != "" or not term.column for term in terms])
    sizes = np.where(unit, 1.0, spread)
    return Free(tuple(terms[place] for place in kept), places, sizes[places])


def _constant(names: list[str]) -> InputError:
    """The error of columns that do not vary."""
    return InputError(
        f"{', '.join(names)}: the same in all rows of every hospital, so no coefficient can "
        'be estimated; set the type of the column to "ignore" in the schema'
    )


def _collinear(names: list[str]) -> InputError:
    """The error of columns that cannot be told apart."""
    return InputError(
        f"{', '.join(names)} are collinear: one of them is a combination of the others over all "
        'hospitals; set the type of one column to "ignore" in the schema'
    )


# ---- the result ----


def _result(
    job: _Job,
    end: End,
    null_loglik: float,
    trace: tuple[Round, ...],
    cluster: bool,
) -> Fit:
    """All numbers of a fit, in the units of the tables."""
    talk = job.talk
    family = job.family
    look = end.look
    places = job.free.places
    p = len(places)
    dispersion = _dispersion(job, look, p)
    change = to_table(job.terms, job.common)[np.ix_(places, places)]
    second = look.information[np.ix_(places, places)]
    robust = None
    if cluster:
        robust = change @ _clustered(second, look.parts[:, places]) @ change.T
    likely = _likelihood(job, look.loglik, null_loglik)
    hospitals = _hospitals(talk, look.b)
    return Fit(
        family=family.text,
        schema=talk.schema,
        terms=job.free.terms,
        coefficients=change @ look.b[places],
        covariance=dispersion * change @ invert(second) @ change.T,
        robust=robust,
        mean=job.common.mean[places],
        deviation=job.common.deviation[places],
        **likely._asdict(),
        dispersion=dispersion,
        residual_df=job.rows - p,
        rows=job.rows,
        events=talk.sum("events"),
        dropped=round(talk.sum("dropped")),
        rounds=talk.looks,
        bytes_up=talk.bytes_up,
        bytes_down=talk.bytes_down,
        trace=trace,
        hospitals=hospitals,
        refusals=tuple(talk.refusals),
        notes=_notes(job, end, cluster),
        converged=end.converged,
        distance=end.distance,
    )


class Likelihood(NamedTuple):
    """What a table of results tells of the log-likelihood."""

    loglik: float
    null_loglik: float
    deviance: float
    null_deviance: float
    aic: float


def _likelihood(job: _Job, loglik: float, null_loglik: float) -> Likelihood:
    """From the sums over the hospitals, of this model and of the null model.

    The variance of a gaussian model counts as a parameter in the AIC, as in R.
    """
    saturated = job.talk.sum("saturated")
    gaussian = job.family.name == "gaussian"
    level = 0.0 if gaussian else saturated
    total = job.family.total(loglik, saturated, job.rows)
    return Likelihood(
        loglik=total,
        null_loglik=job.family.total(null_loglik, saturated, job.rows),
        deviance=2 * (level - loglik),
        null_deviance=2 * (level - null_loglik),
        aic=2 * (len(job.free.terms) + gaussian) - 2 * total,
    )


def _dispersion(job: _Job, look: Look, p: int) -> float:
    """Of a gaussian model the residual variance; else 1."""
    if job.family.name != "gaussian":
        return 1.0
    return -2 * look.loglik / (job.rows - p)


def _clustered(second: Array, parts: Array) -> Array:
    """The covariance clustered by hospital, on the common scale."""
    if len(parts) < 2:
        raise InputError(
            "errors clustered by hospital need at least 2 hospitals; leave out cluster"
        )
    return sandwich(second, parts)


def _hospitals(talk: Talk, b: Array) -> tuple[Assessment, ...]:
    """How well the model predicts in each hospital."""
    found = []
    for described, one in zip(talk.answers, talk.assess(b), strict=True):
        if isinstance(one, Answer):
            found.append(assessment(one))
        else:
            found.append(_unassessed(described, one))
    return tuple(found)


def _unassessed(described: Answer, refusal: Refusal) -> Assessment:
    """What is known of a hospital that did not assess the model."""
    numbers = {name: float(described.arrays[name][0]) for name in ("rows", "dropped", "events")}
    return Assessment(
        refusal.hospital,
        rows=round(numbers["rows"]),
        dropped=round(numbers["dropped"]),
        events=numbers["events"],
    )


def _notes(job: _Job, end: End, cluster: bool) -> tuple[str, ...]:
    """Sentences that a reader of the results should see."""
    notes = [f"{one.hospital} is excluded: {one.reason}." for one in job.talk.refusals]
    few = any("with the event" in one.reason for one in job.talk.refusals)
    if few and job.family.events and job.family.intercept:
        notes.append(
            "If hospitals are excluded for having few or no events, the intercept and all "
            "predicted rates are too high; if for having few rows without the event, too low."
        )
    notes += unlike(job.terms, job.talk.answers)
    fitted = {term.name for term in job.free.terms}
    absent = [term.name for term in job.terms if term.name not in fitted]
    if absent:
        notes.append(f"No hospital has rows with {', '.join(absent)}: left out.")
    if not end.converged:
        notes.append(
            f"Rounding ends the fit {end.distance:.1g} standard errors from the maximum, before "
            "the tolerance: columns are nearly collinear, or numbers are very large."
        )
    hospitals = len(job.talk.answers)
    if cluster and hospitals < FEW:
        notes.append(
            "Errors clustered by hospital are rough with few hospitals, and there are "
            f"{hospitals}; tests use Student's t with {hospitals - 1} degrees of freedom."
        )
    return tuple(notes)
