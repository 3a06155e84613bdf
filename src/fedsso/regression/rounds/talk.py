"""The server's conversation with the hospitals: who takes part, what was said, and how many bytes.

Who does not answer the first question takes no part, and the others go on. Later on the sums must
always be those of the same hospitals: if one of them is lost, the fit begins again without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import InputError
from ..families import Family
from ..questions import (
    ASSESS,
    DESCRIBE,
    INFORMATION,
    SCORE,
    Answer,
    Array,
    Ask,
    Question,
    Refusal,
    Wrong,
    total,
    unpacked,
)
from .doubts import Said, contradiction, foremost, information_per_row, outweighing
from .forms import HUGE, fault
from .scales import Moments

TRIES = 2
"""So often a question is asked if a hospital that takes part does not answer it."""
DOUBT = 1e-4
"""A hospital whose numbers contradict each other by such a share of them is lost at once."""
UNTRUE = "its numbers contradict each other: no log-likelihood has them"


class Lost(Exception):
    """A hospital that took part does not answer any more."""


class Look(NamedTuple):
    """What all hospitals together say of a model."""

    b: Array
    """The coefficients on the common scale, [p]."""
    loglik: float
    gradient: Array
    """[p]"""
    logliks: Array
    """Of each hospital, [hospitals]."""
    parts: Array
    """The gradient of each hospital, [hospitals, p]."""
    information: Array
    """[p, p]; empty where it was not asked for."""
    shares: Array
    """The information of each hospital, packed; empty where it was not asked for."""

    @property
    def diagonals(self) -> Array:
        """What each hospital knows of each column, [hospitals, p]."""
        return np.array([unpacked(share).diagonal() for share in self.shares])

    @property
    def known(self) -> bool:
        """Whether all numbers are finite. After too long a step they may not be."""
        numbers = (self.loglik, self.gradient, self.information)
        return all(bool(np.isfinite(one).all()) for one in numbers)


class Talk:
    """Asks the hospitals that take part, and sums up what they answer.

    Args:
        ask: Sends a question to all hospitals.
        schema: As TOML.
        family: The family.
        p: The number of coefficients.
    """

    def __init__(
        self,
        ask: Ask,
        schema: str,
        family: Family,
        p: int,
    ) -> None:
        self._ask = ask
        self.schema = schema
        self.family = family
        self.p = p
        self.scale = Moments(np.zeros(p), np.ones(p))
        self.answers: list[Answer] = []
        """What each hospital that takes part said of its table, by name."""
        self.refusals: list[Refusal] = []
        self.looks = 0
        """How many models the hospitals have judged."""
        self.bytes_up = 0
        self.bytes_down = 0
        # What was said of every model, and how far each hospital has contradicted itself.
        self._said: list[Said] = []
        self._off = np.zeros(0)

    @property
    def names(self) -> list[str]:
        """The hospitals that take part."""
        return [answer.hospital for answer in self.answers]

    def describe(self) -> None:
        """Ask for the sums of all tables. Who answers takes part."""
        heard = self._send(DESCRIBE, np.zeros(0))
        self.answers = sorted((one for one in heard if isinstance(one, Answer)), key=_name)
        self.refusals += [one for one in heard if isinstance(one, Refusal)]
        self._anybody()

    def begin(self, scale: Moments) -> None:
        """Ask about models on this scale from now on, and forget what was said on another one."""
        self.scale = scale
        self._said = []
        self._off = np.zeros(len(self.answers))

    def sum(self, name: str) -> float:
        """The sum of one number of "describe" over the hospitals that take part."""
        return float(total(self.answers, name)[0])

    def described(self, name: str) -> Array:
        """One number of "describe" of each hospital, [hospitals]."""
        return np.array([answer.arrays[name][0] for answer in self.answers])

    def look(self, b: Array, *, information: bool) -> Look:
        """Ask for score and, if wanted, information of a model b [p] on the common scale.

        Raises:
            Lost: A hospital is lost, or what it has said so far belongs to no log-likelihood.
        """
        self.looks += 1
        answers = self._all(INFORMATION if information else SCORE, b)
        parts = np.stack([answer.arrays["gradient"] for answer in answers])
        logliks = np.array([answer.arrays["loglik"][0] for answer in answers])
        shares = np.zeros((len(answers), 0))
        second = np.zeros((0, 0))
        with np.errstate(over="ignore", invalid="ignore"):  # after too long a step
            gradient = parts.sum(0)
            loglik = float(logliks.sum())
            if information:
                shares = np.stack([answer.arrays["information"] for answer in answers])
                second = unpacked(shares.sum(0))
        self._doubt(Said(b, logliks, parts))
        return Look(b, loglik, gradient, logliks, parts, second, shares)

    def _doubt(self, now: Said) -> None:
        """Lose a hospital that contradicts itself, or whose null model has no finite numbers."""
        blind = ~(np.abs(now.loglik) < HUGE)
        if blind.any() and not self._said:
            self.lose(int(blind.argmax()), "the numbers of its table are too large")
        self._off = np.fmax(self._off, contradiction(now, self._said, self.described("outcome")))
        self._said.append(now)
        if self._off.max() > DOUBT:
            self.lose(int(self._off.argmax()), UNTRUE)

    def lose_untrue(self) -> None:
        """Lose the hospital, if there is one, that contradicts itself by more than rounding."""
        liar = foremost(self._off)
        if liar is not None:
            self.lose(liar, UNTRUE)

    def lose_overinformed(self, look: Look) -> None:
        """Lose a hospital whose information is beyond what its rows and all others can have."""
        known = information_per_row(self.answers, self.scale, look.diagonals)
        self.lose_heavy(outweighing(known), "the information of the columns")

    def lose_heavy(self, place: int | None, what: str) -> None:
        """Lose a hospital, if any, beside which those of all others are lost in rounding.

        Raises:
            Lost: There was one.
            InputError: There are two hospitals, so that either may be wrong.
        """
        if place is None:
            return
        if len(self.names) == 2:
            raise InputError(
                f"{what} of {' and '.join(self.names)} is too far apart to be added up: compare "
                "the units of their tables, and their codes of missing values"
            )
        self.lose(
            place,
            f"{what} outweighs all other hospitals' beyond rounding; compare units, and codes of "
            "missing values",
        )

    def lose(self, place: int, reason: str) -> None:
        """Go on without a hospital. Raises Lost."""
        self._lose(Refusal(self.names[place], reason))
        raise Lost

    def assess(self, b: Array) -> list[Answer | Refusal]:
        """Ask how well a model predicts; who does not answer is no longer needed.

        Raises:
            Lost: An answer cannot be right, so the others of this hospital are not trusted either.
        """
        heard = self._send(ASSESS, b)
        self._lose_wrong(heard)
        by_name = {one.hospital: one for one in heard}
        return [by_name.get(name, Refusal(name, "did not answer")) for name in self.names]

    def _all(self, name: str, b: Array) -> list[Answer]:
        """The answers of all who take part, in the order of their names."""
        missing: list[Refusal] = []
        for _ in range(TRIES):
            sent = self._send(name, b)
            self._lose_wrong(sent)
            heard = {one.hospital: one for one in sent}
            found = [heard.get(who, Refusal(who, "did not answer")) for who in self.names]
            answers = [one for one in found if isinstance(one, Answer)]
            if len(answers) == len(found):
                return answers
            missing = [one for one in found if isinstance(one, Refusal)]
        for refusal in missing:
            self._lose(refusal)
        raise Lost

    def _lose_wrong(self, heard: Sequence[Answer | Refusal]) -> None:
        """Go on without those who take part and have sent what is no answer. May raise Lost."""
        wrong = [one for one in heard if isinstance(one, Wrong) and one.hospital in self.names]
        for one in wrong:
            self._lose(one)
        if wrong:
            raise Lost

    def _lose(self, refusal: Refusal) -> None:
        """Go on without a hospital."""
        self.answers = [one for one in self.answers if one.hospital != refusal.hospital]
        self.refusals.append(refusal)
        self._anybody()

    def _anybody(self) -> None:
        """Raise an InputError if nobody takes part any more."""
        if self.answers:
            return
        reasons = "; ".join(f"{one.hospital}: {one.reason}" for one in self.refusals)
        raise InputError(f"all hospitals are excluded. {reasons or 'None was asked.'}")

    def _send(self, name: str, b: Array) -> list[Answer | Refusal]:
        """Ask everybody, count the bytes, and take what is no answer for a refusal."""
        question = Question(name, self.schema, self.family.text, b, *self.scale)
        heard = self._ask(question)
        texts = f"{name}{self.schema}{self.family.text}".encode()
        size = len(texts) + b.nbytes + sum(array.nbytes for array in self.scale)
        self.bytes_down += size * len(heard)
        checked = [self._checked(one, name) for one in heard]
        self.bytes_up += sum(one.bytes for one in checked if isinstance(one, Answer))
        names = Counter(one.hospital for one in checked)
        double = [who for who, count in names.items() if count > 1]
        if double:
            raise InputError(f"two hospitals have the same name: {', '.join(double)}")
        return checked

    def _checked(self, one: Answer | Refusal, question: str) -> Answer | Refusal:
        """An answer as it is, or a refusal in its place if it cannot be right."""
        if isinstance(one, Refusal):
            return one
        known = {answer.hospital: answer.arrays for answer in self.answers}
        if question != DESCRIBE and one.hospital not in known:
            return Refusal(one.hospital, "takes no part")
        table = known.get(one.hospital, {})
        why = fault(one.arrays, question, self.family, self.p, table)
        return Wrong(one.hospital, f"answered {question!r} wrongly: {why}") if why else one


def _name(answer: Answer) -> str:
    """What hospitals are sorted by, so that sums do not depend on who is faster."""
    return answer.hospital
