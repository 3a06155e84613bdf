"""The server's conversation with the hospitals: who takes part, what was said, and how many bytes.

Who does not answer the first question takes no part, and the others go on. Later on the sums must
always be those of the same hospitals: if one of them is lost, the fit begins again without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import InputError
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
    total,
    unpacked,
)

TRIES = 2
"""So often a question is asked if a hospital that takes part does not answer it."""
SINGLE = ("rows", "dropped", "events", "outcome", "exposure", "saturated", "weight")
"""The arrays of "describe" that hold one number."""


class Lost(Exception):
    """A hospital that took part does not answer any more."""


class Look(NamedTuple):
    """What all hospitals together say of a model."""

    b: Array
    """The coefficients on the common scale, [p]."""
    loglik: float
    gradient: Array
    """[p]"""
    parts: Array
    """The gradient of each hospital, [hospitals, p]."""
    information: Array
    """[p, p]; empty where it was not asked for."""

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
        family: The family as text.
        p: The number of coefficients.
    """

    def __init__(
        self,
        ask: Ask,
        schema: str,
        family: str,
        p: int,
    ) -> None:
        self._ask = ask
        self.schema = schema
        self.family = family
        self.p = p
        self.mean = np.zeros(p)
        self.deviation = np.ones(p)
        self.answers: list[Answer] = []
        """What each hospital that takes part said of its table, by name."""
        self.refusals: list[Refusal] = []
        self.looks = 0
        """How many models the hospitals have judged."""
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def names(self) -> list[str]:
        """The hospitals that take part."""
        return [answer.hospital for answer in self.answers]

    def describe(self) -> None:
        """Ask for the sums of all tables. Who answers takes part."""
        heard = self._send(DESCRIBE, np.zeros(0))
        self.answers = sorted((one for one in heard if isinstance(one, Answer)), key=_name)
        self.refusals += [one for one in heard if isinstance(one, Refusal)]
        if len(set(self.names)) < len(self.names):
            raise InputError(f"two hospitals have the same name: {', '.join(self.names)}")
        self._anybody()

    def sum(self, name: str) -> float:
        """The sum of one number of "describe" over the hospitals that take part."""
        return float(total(self.answers, name)[0])

    def look(self, b: Array, *, information: bool) -> Look:
        """Ask for score and, if wanted, information of a model b [p] on the common scale."""
        self.looks += 1
        answers = self._all(INFORMATION if information else SCORE, b)
        parts = np.stack([answer.arrays["gradient"] for answer in answers])
        loglik = float(total(answers, "loglik")[0])
        second = np.zeros((0, 0))
        if information:
            second = unpacked(total(answers, "information"))
        with np.errstate(over="ignore", invalid="ignore"):  # after too long a step
            gradient = parts.sum(0)
        return Look(b, loglik, gradient, parts, second)

    def drop_unfit(self, b: Array) -> None:
        """Ask for the score of the null model b; who has no finite one takes no part from now on.

        Raises:
            Lost: There was one.
        """
        for answer in self._all(SCORE, b):
            if not all(np.isfinite(array).all() for array in answer.arrays.values()):
                self._lose(Refusal(answer.hospital, "the numbers of its table are too large"))
                raise Lost

    def assess(self, b: Array) -> list[Answer | Refusal]:
        """Ask how well a model predicts; who does not answer is no longer needed."""
        heard = self._send(ASSESS, b)
        by_name = {one.hospital: one for one in heard}
        return [by_name.get(name, Refusal(name, "did not answer")) for name in self.names]

    def _all(self, name: str, b: Array) -> list[Answer]:
        """The answers of all who take part, in the order of their names."""
        missing: list[Refusal] = []
        for _ in range(TRIES):
            heard = {one.hospital: one for one in self._send(name, b)}
            found = [heard.get(who, Refusal(who, "did not answer")) for who in self.names]
            answers = [one for one in found if isinstance(one, Answer)]
            if len(answers) == len(found):
                return answers
            missing = [one for one in found if isinstance(one, Refusal)]
        for refusal in missing:
            self._lose(refusal)
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

    def _send(self, name: str, b: Array) -> Sequence[Answer | Refusal]:
        """Ask everybody, count the bytes, and take answers of another form for refusals."""
        question = Question(name, self.schema, self.family, b, self.mean, self.deviation)
        heard = self._ask(question)
        texts = f"{name}{self.schema}{self.family}".encode()
        size = len(texts) + b.nbytes + self.mean.nbytes + self.deviation.nbytes
        self.bytes_down += size * len(heard)
        answers = [one for one in heard if isinstance(one, Answer)]
        self.bytes_up += sum(answer.bytes for answer in answers)
        return [_checked(one, name, self.p) for one in heard]


def _name(answer: Answer) -> str:
    """What hospitals are sorted by, so that sums do not depend on who is faster."""
    return answer.hospital


def _shapes(question: str, p: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array of an answer."""
    if question == DESCRIBE:
        single: dict[str, tuple[int, ...]] = dict.fromkeys(SINGLE, (1,))
        return {**single, "mean": (p,), "spread": (p,)}
    if question == ASSESS:
        return {"rows": (1,)}
    score = {"loglik": (1,), "gradient": (p,)}
    if question == SCORE:
        return {**score}
    return {**score, "information": (p * (p + 1) // 2,)}


def _checked(one: Answer | Refusal, question: str, p: int) -> Answer | Refusal:
    """An answer as it is, or a refusal in its place if its arrays are not those of the question."""
    if isinstance(one, Refusal):
        return one
    for name, shape in _shapes(question, p).items():
        array = one.arrays.get(name)
        if array is None or array.shape != shape:
            return Refusal(one.hospital, f"answered {question!r} without {name} of shape {shape}")
    if question == DESCRIBE and not _plausible(one):
        return Refusal(one.hospital, "answered 'describe' with numbers that are not finite")
    return one


def _plausible(answer: Answer) -> bool:
    """Whether the sums of a table are finite. Only events may be NaN, where none are counted."""
    arrays = {**answer.arrays}
    arrays.pop("events")
    finite = all(np.isfinite(array).all() for array in arrays.values())
    return bool(finite and answer.arrays["rows"][0] >= 1)
