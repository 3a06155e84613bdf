"""A hospital that answers wrongly, whatever it says: the fit is that of the others, or finite."""

from __future__ import annotations

from typing import Any

import liars
import numpy as np
import pytest
from federations import asking, hospitals, small, toml
from liars import LIAR, Lie

from fedsso.errors import InputError
from fedsso.regression.fit import fit
from fedsso.regression.questions import ASSESS, DESCRIBE, INFORMATION, QUESTIONS, SCORE, Answer
from fedsso.regression.rounds.ascent import Ascent


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_some_lies(start: int) -> None:
    assert_harmless(range(start, start + 10))


@pytest.mark.full
def test_five_hundred_lies() -> None:
    assert_harmless(range(1000, 1500))


def assert_harmless(seeds: range) -> None:
    every = [liars.lie(seed) for seed in seeds]
    found = {one.text: liars.judged(one) for one in every}
    assert {text: why for text, why in found.items() if why} == {}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("kind", liars.FORMS)
def test_an_answer_of_another_form_leaves_its_hospital_out(question: str, kind: str) -> None:
    assert liars.judged(Lie(1, "binomial", False, question, 0, False, kind)) == ""


@pytest.mark.parametrize("family", liars.FAMILIES)
@pytest.mark.parametrize("kind", liars.CONCAVE)
def test_what_could_be_a_log_likelihood_is_seen_where_it_ends_the_fit(
    family: str, kind: str
) -> None:
    assert liars.judged(Lie(1, family, False, "every look", 0, True, kind)) == ""


IMPOSSIBLE: dict[str, tuple[str, str, Any, str]] = {
    "more rows than there are": (ASSESS, "rows", 1e300, "is not between"),
    "rows that are no number": (ASSESS, "rows", np.nan, "not finite"),
    "a share of rows": (DESCRIBE, "rows", 80.5, "is no whole number"),
    "fewer gaps than none": (DESCRIBE, "dropped", -1e9, "is not between 0"),
    "an area above 1": (ASSESS, "auc", 99.0, "is not between"),
    "a mean beyond all tables": (DESCRIBE, "mean", 1e300, "is not between"),
    "a mean beyond all others": (DESCRIBE, "mean", 1e38, "column 'age' outweighs"),
    "more events than rows": (DESCRIBE, "events", 1e6, "more events than rows"),
    "no finite score": (SCORE, "gradient", np.nan, "gradient is not finite"),
    "no finite information": (INFORMATION, "information", np.nan, "information is not finite"),
    "information below 0": (INFORMATION, "information", -1e9, "no concave likelihood"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_number_that_cannot_be_is_named_with_its_hospital(case: str) -> None:
    question, name, value, words = IMPOSSIBLE[case]
    study = liars.study("binomial", False)
    ask = asking(hospitals(study))

    def lying(asked: Any) -> Any:
        heard = list(ask(asked))
        for place, one in enumerate(heard):
            if isinstance(one, Answer) and one.hospital == LIAR and asked.name == question:
                false = one.arrays[name].copy()
                false.flat[1 % false.size] = value
                heard[place] = one._replace(arrays={**one.arrays, name: false})
        return heard

    found = fit(lying, toml(study), study.family)
    ((hospital, reason),) = found.refusals
    assert hospital == LIAR
    assert words in reason
    right = liars.without("binomial", False)
    assert np.array_equal(found.coefficients, right.coefficients)
    assert found.rounds < 40


def test_of_two_hospitals_that_are_far_apart_both_are_named() -> None:
    """Nobody knows which of them has the other unit."""
    study = small(seed=5)
    study = study._replace(hospital=study.hospital.replace("west", "east"))
    frame = study.frame
    frame["age"] = frame["age"].where(study.hospital == "east", frame["age"] * 1e6)
    with pytest.raises(InputError, match="column 'age' of east and north"):
        fit(asking(hospitals(study)), toml(study), study.family)


def test_one_name_twice_is_an_error_that_names_it() -> None:
    study = small()
    ask = asking(hospitals(study))
    with pytest.raises(InputError, match="same name: east"):
        fit(lambda question: [*ask(question), ask(question)[0]], toml(study), study.family)


def test_a_fall_without_measure_only_shortens_the_step() -> None:
    """f rises by 1e90 where its slope promised 1e-80: the cubic through both overflows."""
    start = np.array([1.0])
    ascent = Ascent(start, 0.0, np.array([1e-80]), 1.0, lambda step: float(np.abs(step).max()))
    before = ascent.r
    assert not ascent.hear(1e90, np.array([1.0]))
    assert 0 < ascent.r < before
