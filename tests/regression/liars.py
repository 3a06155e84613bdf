"""Hostile answers of one hospital: seeded changes of real answers, at every kind of question.

    ask = lying(asking(hospitals(study)), "east", lie(7))

`lie(seed)` draws what is changed, how, and when. `judged` runs a fit with the liar, and says what
became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from federations import Study, asking, hospitals, small, toml

from fedsso.errors import InputError
from fedsso.regression.fit import fit
from fedsso.regression.questions import QUESTIONS, Answer, Ask, Question, Refusal
from fedsso.regression.records import Fit

FAMILIES = ("binomial", "gaussian", "poisson", "cox efron")
LIAR = "north"
VALUES = (
    *(np.nan, np.inf, -np.inf, 1e300, -1e300, 1e155, -1e120, 1e38, -1e38, 6e9, -1e9),
    *(-1.0, 0.0, 1e-9, 1e-300, -1e-300, 99.0, 0.5),
)
FACTORS = (1e300, 1e100, 1e20, 1e9, 1e3, 1.5, 0.0, -1.0, 1e-6, 1e-100)

Arrays = dict[str, Any]
Told = list[tuple[Question, dict[str, Answer]]]
"""The questions so far, and what each hospital truly answered."""
Change = Callable[[Arrays, Told, np.random.Generator], Arrays]


class Lie(NamedTuple):
    """What one hospital does."""

    seed: int
    family: str
    weighted: bool
    """Whether rows have weights and an offset."""
    question: str
    since: int
    """It lies from this question of the kind on, counted from 0."""
    always: bool
    """Whether it goes on lying."""
    kind: str

    @property
    def text(self) -> str:
        """For messages."""
        when = f"{self.question} {self.since}{' and later' if self.always else ''}"
        family = f"{self.family} with weights" if self.weighted else self.family
        return f"seed {self.seed}: {family}, {when}: {self.kind}"


# ---- ways to change an answer ----


def _one(arrays: Arrays, draw: np.random.Generator) -> str:
    return str(draw.choice(sorted(arrays)))


def _missing(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    gone = _one(arrays, draw)
    return {name: value for name, value in arrays.items() if name != gone}


def _extra(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    return {**arrays, str(draw.choice(["more", "hospital", "", "rows ", "roc"])): np.ones(1)}


def _renamed(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    old = _one(arrays, draw)
    return {("\x1b[2J" if name == old else name): value for name, value in arrays.items()}


def _empty(_arrays: Arrays, _told: Told, _draw: np.random.Generator) -> Arrays:
    return {}


def _shape(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = _one(arrays, draw)
    value = arrays[name]
    other = [np.append(value.ravel(), 1.0), value[:0], np.array(1.0), value[None], np.zeros((0, 9))]
    return {**arrays, name: other[draw.integers(len(other))]}


def _huge_curve(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = "calibration" if "calibration" in arrays else _one(arrays, draw)
    return {**arrays, name: np.ones((50_000, 3))}


def _dtype(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = _one(arrays, draw)
    kind = ("f4", "i8", "?", "O", "U9", "c16", "f2")[draw.integers(7)]
    value = np.zeros_like(arrays[name]) if kind != "c16" else arrays[name]
    return {**arrays, name: value.astype(kind)}


def _no_array(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    wrong = ("7", None, 7.0, [1.0], b"rows", {"a": 1})
    return {**arrays, _one(arrays, draw): wrong[draw.integers(len(wrong))]}


def _value(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = _one(arrays, draw)
    value = arrays[name].copy()
    if value.size:
        value.flat[draw.integers(value.size)] = VALUES[draw.integers(len(VALUES))]
    return {**arrays, name: value}


def _values(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = _one(arrays, draw)
    return {**arrays, name: np.full_like(arrays[name], VALUES[draw.integers(len(VALUES))])}


def _scaled(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = _one(arrays, draw)
    with np.errstate(all="ignore"):
        return {**arrays, name: arrays[name] * FACTORS[draw.integers(len(FACTORS))]}


def _all_scaled(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    factor = FACTORS[draw.integers(len(FACTORS))]
    with np.errstate(all="ignore"):
        return {name: value * factor for name, value in arrays.items()}


def _noise(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    size = 10.0 ** draw.integers(-9, 10)
    return {
        name: value * (1 + size * draw.normal(size=value.shape)) for name, value in arrays.items()
    }


def _mixed(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    name = _one(arrays, draw)
    return {**arrays, name: draw.permutation(arrays[name].ravel()).reshape(arrays[name].shape)}


def _replayed(arrays: Arrays, told: Told, draw: np.random.Generator) -> Arrays:
    before = [heard[LIAR].arrays for _, heard in told if heard[LIAR].arrays.keys() == arrays.keys()]
    return before[draw.integers(len(before))]


def _swapped(_arrays: Arrays, told: Told, draw: np.random.Generator) -> Arrays:
    return told[draw.integers(len(told))][1][LIAR].arrays


def _anothers(_arrays: Arrays, told: Told, draw: np.random.Generator) -> Arrays:
    heard = told[-1][1]
    others = sorted(heard.keys() - {LIAR})
    return heard[others[draw.integers(len(others))]].arrays


def _rank_one(arrays: Arrays, _told: Told, draw: np.random.Generator) -> Arrays:
    if "information" not in arrays:
        return {**arrays, _one(arrays, draw): np.ones(1)}
    size = 10.0 ** draw.integers(-3, 30)
    ones = np.ones_like(arrays["information"])
    return {**arrays, "information": size * ones}


def _tilted(arrays: Arrays, told: Told, draw: np.random.Generator) -> Arrays:
    """The log-likelihood with a linear term: its own gradient, and without bound."""
    if "gradient" not in arrays:
        return _noise(arrays, told, draw)
    tilt = 1e3 * np.ones_like(arrays["gradient"])
    more = {"loglik": arrays["loglik"] + tilt @ told[-1][0].model}
    return {**arrays, **more, "gradient": arrays["gradient"] + tilt}


def _heavy(arrays: Arrays, _told: Told, _draw: np.random.Generator) -> Arrays:
    """As if every row counted a million times."""
    known = ("loglik", "gradient", "information")
    return {name: value * (1e6 if name in known else 1) for name, value in arrays.items()}


def _cone(arrays: Arrays, told: Told, _draw: np.random.Generator) -> Arrays:
    """The log-likelihood with a penalty on every step away from the null model."""
    if "gradient" not in arrays:
        return arrays
    first = next(question.model for question, _ in told if len(question.model))
    away = told[-1][0].model - first
    size = float(np.linalg.norm(away))
    pull = 1e6 * away / size if size else away
    more = {"loglik": arrays["loglik"] - 1e6 * size}
    return {**arrays, **more, "gradient": arrays["gradient"] - pull}


FORMS = {
    "an array is missing": _missing,
    "an array more": _extra,
    "an array of another name": _renamed,
    "no array": _empty,
    "another shape": _shape,
    "a curve of 50 000 points": _huge_curve,
    "another dtype": _dtype,
    "no array but text": _no_array,
}
"""What is seen at once: the hospital must be left out."""
NUMBERS = {
    "another number": _value,
    "other numbers": _values,
    "an array times a factor": _scaled,
    "all times a factor": _all_scaled,
    "noise": _noise,
    "numbers in another order": _mixed,
    "an older answer": _replayed,
    "the answer to another question": _swapped,
    "another hospital's answer": _anothers,
    "information of rank one": _rank_one,
}
"""What may be within the range of honest answers."""
CONCAVE = {
    "a linear term more": _tilted,
    "rows that count a million times": _heavy,
    "a penalty on every step": _cone,
}
"""What some concave function has."""
KINDS: dict[str, Change] = {**FORMS, **NUMBERS, **CONCAVE}
LOOKS = ("score", "information")


def lie(seed: int) -> Lie:
    """One of many lies."""
    draw = np.random.default_rng([seed, 36])
    kinds = sorted(KINDS)
    return Lie(
        seed,
        FAMILIES[draw.integers(len(FAMILIES))],
        bool(draw.random() < 0.3),
        str(draw.choice([*QUESTIONS, "every look"])),
        int(draw.choice([0, 0, 1, 2, 4])),
        bool(draw.random() < 0.6),
        kinds[draw.integers(len(kinds))],
    )


def lying(ask: Ask, one: Lie) -> Ask:
    """Asks hospitals of which LIAR lies."""
    draw = np.random.default_rng([one.seed, 63])
    told: Told = []
    seen = 0

    def asked(question: Question) -> Sequence[Answer | Refusal]:
        nonlocal seen
        heard = list(ask(question))
        told.append((question, {a.hospital: a for a in heard if isinstance(a, Answer)}))
        if question.name not in (LOOKS if one.question == "every look" else (one.question,)):
            return heard
        seen += 1
        if seen <= one.since or (not one.always and seen > one.since + 1):
            return heard
        true = told[-1][1][LIAR].arrays
        false = Answer(LIAR, KINDS[one.kind](dict(true), told, draw))
        return [false if a.hospital == LIAR else a for a in heard]

    return asked


# ---- what becomes of it ----


@cache
def study(family: str, weighted: bool) -> Study:
    """Four hospitals."""
    made = small(seed=5, rows=400, family=family)
    draw = np.random.default_rng(6)
    made = made._replace(hospital=pd.Series(draw.choice(["east", LIAR, "south", "west"], 400)))
    if not weighted:
        return made
    more = {"weight": draw.uniform(0.2, 3, 400).round(2), "part": draw.normal(0, 0.3, 400).round(2)}
    schema = replace(made.schema, weights="weight", offset="part")
    return made._replace(frame=made.frame.assign(**more), schema=schema)


@cache
def without(family: str, weighted: bool) -> Fit:
    """The fit that there would be if the liar had never been."""
    made = study(family, weighted)
    ask = asking(hospitals(made, only=sorted(set(made.hospital) - {LIAR})))
    return fit(ask, toml(made), family, cluster=True)


def judged(one: Lie) -> str:
    """What is wrong with what became of a lie; "" if nothing is."""
    made = study(one.family, one.weighted)
    try:
        found = fit(lying(asking(hospitals(made)), one), toml(made), one.family, cluster=True)
    except InputError as error:
        return "" if LIAR in str(error) and one.kind not in FORMS else f"InputError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if LIAR in [refusal.hospital for refusal in found.refusals]:
        return _apart(found, without(one.family, one.weighted))
    if one.kind in FORMS and one.since == 0:
        return "it takes part"
    numbers = (
        found.coefficients,
        found.covariance,
        found.loglik,
        found.deviance,
        found.null_loglik,
    )
    return "" if all(np.isfinite(value).all() for value in numbers) else "it has NaN or infinity"


def _apart(found: Fit, wanted: Fit) -> str:
    """What differs between two fits."""
    if not any(LIAR in note for note in found.notes):
        return "no note names it"
    for name in ("coefficients", "covariance", "robust", "loglik", "null_loglik", "aic", "rows"):
        if not np.array_equal(getattr(found, name), getattr(wanted, name)):
            return f"{name}: {getattr(found, name)} instead of {getattr(wanted, name)}"
    return "" if repr(found.hospitals) == repr(wanted.hospitals) else "other assessments"
