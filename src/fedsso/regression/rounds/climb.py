"""The rounds of a fit: from the null model to the most likely one.

    1. The null model's log-likelihood, gradient and information H. The server's B is H.
    2. FedSSO's steps (`ascent.py`), one round each, until the maximum is near.
    3. H once more, from which B starts anew; then steps until the distance is below the tolerance.
       If that takes many rounds, the same again.
    4. H at the last model, which verifies the distance with what it now knows exactly.

The distance is the Newton decrement, the root of g^T H^-1 g: no coefficient, and no combination of
them, is farther from the maximum than so many of its standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from ...errors import InputError
from .. import schema as schemas
from ..design import Term
from ..families import Family
from ..inference import NAMED
from ..questions import Array, Places
from ..records import Round
from .ascent import Ascent
from .scales import has_intercept
from .talk import Look, Talk

Progress: TypeAlias = Callable[[Round], None]

NEAR = 0.1
"""Standard errors. Once the distance is below this, the server asks for H again."""
REACH = 2.0
"""The first steps change the linear predictor by no more than this, by root mean square."""
FAR = 1e4
"""The server looks so far ahead, in the linear predictor, whether the log-likelihood has fallen."""
MOVES = 0.03
"""It does so if a Newton step would change some row's linear predictor by about this."""
LARGE = 30.0
"""A model that differs so much between rows is tried at a multiple of itself."""
MULTIPLE = 1e4
SURE = 1e-4
"""Standard errors. So near the maximum, every direction must have a sensible standard error."""
WIDE = 1e4
"""None has one that changes the linear predictor by more than this."""
ROUNDING = 1e-12
"""Differences of the log-likelihood below this share of it are rounding."""
FLATTEST = 1e-30
"""The least share of the null model's information that a direction may have left."""
REFRESH = 12
"""After so many rounds without H the server asks for it again: B has become a poor guess."""
USELESS = 1e-5
"""Standard errors. A fit that rounding ends farther from the maximum than this is an error."""
LOWEST = 1e-20
"""A gaussian model that leaves a smaller share of the sum of squares explains everything."""
OBJECTIONS = 12
"""So often a step may fail by one hospital alone: an honest one likes a shorter step."""
SLOW = 0.9
PATIENCE = 8
"""If the distance does not fall below SLOW in so many rounds, near the maximum, it is rounding."""


class Goal(NamedTuple):
    """When a fit ends."""

    tolerance: float
    rounds: int


class Free(NamedTuple):
    """The coefficients that are fitted, q of p. The others stay 0."""

    terms: tuple[Term, ...]
    """What they belong to."""
    places: Places
    """Which of the p they are, [q]."""
    sizes: Array
    """What the columns change by from row to row, on the common scale, [q]."""


class Null(NamedTuple):
    """The null model."""

    look: Look
    curvature: float
    """The sum of w v."""
    dispersion: float
    """Of a gaussian model its residual variance, else 1."""


class End(NamedTuple):
    """Where the rounds ended."""

    look: Look
    """With the information."""
    distance: float
    converged: bool


class Infinite(InputError):
    """There is no maximum: the log-likelihood rises for ever."""


class Climb:
    """The rounds of one fit.

    Args:
        talk: The hospitals.
        free: Which coefficients are fitted.
        family: The family.
        null: The null model.
        goal: When to end.
        rounds: The trace so far.
        progress: Is told every round.
    """

    def __init__(
        self,
        talk: Talk,
        free: Free,
        family: Family,
        null: Null,
        goal: Goal,
        rounds: list[Round],
        progress: Progress | None,
    ) -> None:
        self.talk = talk
        self.terms = free.terms
        self.free = free.places
        self.sizes = free.sizes
        self.family = family
        self.null = null
        self.goal = goal
        self.trace = rounds
        self.before = len(rounds)  # of fits that have lost a hospital
        self.progress = progress
        self.rows = round(talk.sum("rows"))
        self.saturated = talk.sum("saturated")
        self.large = LARGE  # a model of this size is looked at next
        self.objections = np.zeros(len(talk.names))
        self.failures = 0  # steps in a row
        self.withheld = np.zeros(len(talk.names), bool)  # who told no score since the last H
        self.risen = -math.inf  # the log-likelihood then
        self._start(null.look, math.inf if family.name == "gaussian" else REACH)

    def _start(self, look: Look, reach: float) -> None:
        """Let B be the information of a look, and begin there with steps of at most `reach`."""
        factor = np.linalg.cholesky(self._second(look) / self.null.dispersion)
        self.base = look.b
        self.here = look
        self.change = np.linalg.inv(factor).T  # from u to the free coefficients
        self.ascent = Ascent(np.zeros(len(self.terms)), *self._of(look), reach, self._length)

    def _length(self, step: Array) -> float:
        """How much a step of u [q] changes the linear predictor, by root mean square."""
        move = self.change @ step
        square = float(move @ self._second(self.null.look) @ move) / self.null.dispersion
        return math.sqrt(max(0.0, square) / self.null.curvature)

    def run(self) -> End:
        """Go up until the tolerance is kept. Raises an InputError if there is no maximum."""
        near = NEAR
        shrinks = 1.0  # what the last round made of the distance
        best = math.inf
        idle = 0
        since = 0  # rounds since the last H
        while len(self.trace) - self.before < self.goal.rounds:
            before = self.distance
            arrived = before <= self.goal.tolerance or idle >= PATIENCE
            expected = before * shrinks
            close = before <= near or expected <= self.goal.tolerance
            wanted = arrived or close or since >= REFRESH
            since += 1
            # H is asked for where the score was told: hospitals refuse it for too long a step.
            look = self._judge(arrived or since > REFRESH, wanted)
            if look is not None:
                since = 0
                end = self._end(look, idle)
                if end is not None:
                    return end
                if SURE < before <= near:
                    near = 0.1 * before if self._may_be_infinite(look) else 0.0
                self._lose_withheld(look)
                self._refresh(look, arrived)
                if self.distance > USELESS:
                    best = math.inf
            self._check_rest()
            self._check_large()
            shrinks = min(1.0, self.distance / before) if before else 1.0
            idle = idle + 1 if self.distance > SLOW * best and best < USELESS else 0
            best = min(best, self.distance)
        self.talk.lose_untrue()
        raise self._endless()

    def _lose_withheld(self, look: Look) -> None:
        """Lose a hospital that tells no score where the fit has to go on."""
        if self.withheld.any() and look.loglik - self.risen <= SURE * abs(look.loglik):
            self.talk.lose(
                int(self.withheld.argmax()),
                "the fit leads to a model too steep for it to tell its score, this hospital's "
                "limit; see whether a column separates the outcomes, and leave it out",
            )
        self.risen = look.loglik
        self.withheld[:] = False

    def _refresh(self, look: Look, arrived: bool) -> None:
        """Start anew from the information of a look; where that is singular, B goes on as it is."""
        try:
            self._start(look, self.ascent.r)
        except np.linalg.LinAlgError:
            if arrived:
                self.talk.lose_overinformed(look)
                raise self._infinite(self._flattest(look)) from None

    def tell_null(self) -> None:
        """Write the round of the null model into the trace."""
        self._tell(self.null.look, kept=True, information=True)

    @property
    def distance(self) -> float:
        """To the maximum, in standard errors, as far as the server knows."""
        return self.ascent.distance * self._unit(-self.ascent.f * self.null.dispersion)

    def _judge(self, arrived: bool, wanted: bool) -> Look | None:
        """One round. Returns what was said of the model, if it stays and H was asked for."""
        u = self.ascent.u if arrived else self.ascent.next()
        b = self.base.copy()
        b[self.free] += self.change @ u
        look = self.talk.look(b, information=wanted)
        kept = arrived or self.ascent.hear(*self._of(look))
        self._tell(look, kept, wanted)
        if kept:
            self.here = look
            self.failures = 0
        else:
            self._failed(look)
        return look if wanted and kept and look.known else None

    def _failed(self, look: Look) -> None:
        """Lose a hospital that makes steps fail again and again, however short they are."""
        self.failures += 1
        blind = np.isnan(look.parts.sum(1))  # the step is too long for them to tell their score
        self.withheld |= blind
        suspects = blind if blind.any() else ~blind
        if blind.sum() < min(2, len(blind) - 1):  # it is too long for one alone, or for none
            self.objections += suspects & (self._others(look) > 0)
        worst = int(self.objections.argmax())
        if self.objections[worst] > OBJECTIONS:
            told = "it did not tell its score" if blind[worst] else "its log-likelihood fell"
            self.talk.lose(worst, f"{told} in {OBJECTIONS} steps that were good for all others")
        if self.failures > OBJECTIONS:
            self.talk.lose_untrue()

    def _others(self, look: Look) -> Array:
        """How much the log-likelihood of all others rises from here, for each hospital."""
        rises = look.logliks - self.here.logliks
        places = range(len(rises))
        with np.errstate(invalid="ignore"):
            return np.array([np.delete(rises, place).sum() for place in places])

    def _end(self, look: Look, idle: int) -> End | None:
        """The end of the rounds, if the exact distance allows it."""
        distance = self._exact(look)
        last = self.trace[-1]._replace(distance=distance)
        self.trace[-1] = last
        converged = distance <= self.goal.tolerance
        ahead = self._flattest(look)
        if distance <= SURE and self._moved(ahead) > WIDE * distance:
            self.talk.lose_overinformed(look)
            raise self._infinite(ahead)
        stuck = idle >= PATIENCE and distance < USELESS
        return End(look, distance, converged) if converged or stuck else None

    def _exact(self, look: Look) -> float:
        """The distance by the information of the same model. Infinite if that is singular."""
        g = look.gradient[self.free]
        try:
            step = np.linalg.solve(self._second(look), g)
        except np.linalg.LinAlgError:
            return math.inf
        return math.sqrt(max(0.0, float(g @ step)) / self.null.dispersion) * self._unit(look.loglik)

    def _may_be_infinite(self, look: Look) -> bool:
        """Whether the log-likelihood might rise for ever; an InputError if it surely does.

        Then a Newton step changes predictions much though the likelihood hardly changes. If even
        many such steps ahead it is not lower, it has no maximum, since it is concave.
        """
        ahead = self._flattest(look)
        moved = self._moved(ahead)
        if moved < MOVES:
            return False
        b = look.b.copy()
        b[self.free] += ahead * FAR / moved
        far = self.talk.look(b, information=False)
        self._tell(far, kept=False, information=False)
        least = look.loglik - ROUNDING * abs(look.loglik)
        if math.isfinite(far.loglik) and far.loglik >= least:
            self._lose_only(far)
            raise self._infinite(ahead)
        return True

    def _lose_only(self, far: Look) -> None:
        """Lose the hospital, if there is one, without which the others know that a step is bad.

        Where no estimate is finite, there is none over any of the hospitals either.
        """
        falls = self._others(far) < -1 - SURE * np.abs(self.here.logliks).sum()
        if falls.sum() == 1:
            self.talk.lose(int(falls.argmax()), "its log-likelihood rises where it cannot")

    def _flattest(self, look: Look) -> Array:
        """The Newton step [q] along the direction in which the information has shrunk most.

        It leads away from the null model: whoever is on the way to infinity came from there.
        """
        scale = self._second(self.null.look)
        values, vectors = _relative(self._second(look), scale)
        least = max(float(values[0]), FLATTEST)
        direction: Array = vectors[:, 0]
        way = (look.b - self.null.look.b)[self.free]
        length = abs(float(direction @ look.gradient[self.free])) / least
        return direction * math.copysign(length, float(direction @ scale @ way))

    def _moved(self, step: Array) -> float:
        """How much a step [q] changes the linear predictor of some row, about."""
        if self.family.name == "gaussian":  # always has a maximum
            return 0.0
        return float(np.abs(step * self.sizes).max())

    def _infinite(self, ahead: Array) -> InputError:
        """The error of estimates that are infinite along a step [q]."""
        parts = np.abs(ahead * self.sizes)
        order = np.argsort(-parts, kind="stable").tolist()
        if has_intercept(self.terms) and len(order) > 1:  # it follows the others
            order.remove(0)
        large = [place for place in order if parts[place] >= NAMED * parts[order[0]]]
        if len(large) > 1:
            try:
                self._only(large[0]).run()
            except Infinite as alone:
                return alone
            except InputError:
                pass
        listed = [self.terms[place].name for place in large]
        names = ", ".join(listed)
        why = {
            "binomial": "they separate the rows with the event from those without it (perfect "
            "separation)",
            "gaussian": "they are nearly collinear",
            "poisson": "all counts are 0 where they say so",
            "cox": "they tell in every hospital who has the next event (a monotone likelihood)",
        }[self.family.name]
        return Infinite(
            f"no finite estimate exists for {names}: {why}.{self._references(listed)} Leave the "
            "column out, join rare levels, or collect more rows"
        )

    def _only(self, place: int) -> Climb:
        """The same fit with one column and the intercept: whether it is to blame by itself."""
        used = [0, place] if has_intercept(self.terms) else [place]
        terms = tuple(self.terms[one] for one in used)
        free = Free(terms, self.free[used], self.sizes[used])
        return Climb(self.talk, free, self.family, self.null, self.goal, self.trace, self.progress)

    def _references(self, names: list[str]) -> str:
        """A sentence with the levels that these terms are compared with, "" if there are none."""
        columns = {term.column for term in self.terms if term.name in names and term.level}
        found = []
        for column in schemas.parse(self.talk.schema).columns:
            if column.name in columns and column.baseline:
                found.append(f"{column.name}: {column.baseline}")
        if not found:
            return ""
        return f" They are compared with {', '.join(found)}: see whether that level is rare."

    def _check_rest(self) -> None:
        """Raise an InputError if a gaussian model leaves nothing: errors would be 0 / 0."""
        if self.family.name == "gaussian" and self.ascent.f <= LOWEST * self.rows / 2:
            raise InputError(
                "the columns explain the outcome completely, so there are no standard errors; "
                "see whether one of them was computed from the outcome"
            )

    def _check_large(self) -> None:
        """Raise an InputError if a large model, multiplied many times, is more likely still."""
        slopes = self.base[self.free] + self.change @ self.ascent.u
        if self._moved(slopes) < self.large:
            return
        self.large *= 4
        b = np.zeros_like(self.base)
        b[self.free] = MULTIPLE * slopes
        far = self.talk.look(b, information=False)
        self._tell(far, kept=False, information=False)
        if math.isfinite(far.loglik) and -far.loglik / self.null.dispersion <= self.ascent.f:
            self._lose_only(far)
            raise self._infinite(slopes)

    def _endless(self) -> InputError:
        """The error of a fit that does not come to an end."""
        return InputError(
            f"the fit has not converged in {self.goal.rounds} rounds: it is still about "
            f"{self.distance:.2g} standard errors from the maximum; give more rounds, or see "
            "whether columns are nearly collinear or levels have very few events"
        )

    def _tell(self, look: Look, kept: bool, information: bool) -> None:
        """Write a round into the trace."""
        loglik = self.family.total(look.loglik, self.saturated, self.rows)
        with np.errstate(over="ignore", invalid="ignore"):
            size = float(np.linalg.norm(look.gradient[self.free]))
        count = len(self.trace) + 1
        row = Round(count, loglik, size, self.distance, kept, information)
        self.trace.append(row)
        if self.progress is not None:
            self.progress(row)

    def _of(self, look: Look) -> tuple[float, Array]:
        """f and g of the ascent."""
        with np.errstate(over="ignore", invalid="ignore"):  # the ascent undoes such steps
            g = -self.change.T @ look.gradient[self.free]
        return -look.loglik / self.null.dispersion, g / self.null.dispersion

    def _second(self, look: Look) -> Array:
        """The information of the free coefficients."""
        free = self.free
        return look.information[np.ix_(free, free)]

    def _unit(self, loglik: float) -> float:
        """Of a gaussian model: the standard errors are smaller than the null model's by this."""
        if self.family.name != "gaussian":
            return 1.0
        left = -2 * loglik / max(1, self.rows - len(self.terms))
        return math.sqrt(self.null.dispersion / left) if left > 0 else math.inf


def _relative(H: Array, scale: Array) -> tuple[Array, Array]:
    """Eigenvalues of H, as seen where `scale` is the identity, and their directions [p, p]."""
    factor = np.linalg.inv(np.linalg.cholesky(scale))
    values, vectors = np.linalg.eigh(factor @ H @ factor.T)
    directions: Array = factor.T @ vectors
    return values, directions
