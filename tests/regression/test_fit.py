"""The rounds of a fit: what is told, what cannot be fitted, and hospitals that go away."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from federations import OPEN, Study, asking, fitted, hospitals, small, toml

from fedsso.errors import InputError
from fedsso.regression.fit import fit
from fedsso.regression.limits import Limits
from fedsso.regression.questions import Answer, Ask, Question, Refusal
from fedsso.regression.records import Fit, Round
from fedsso.regression.schema import Column


def errors(found: Fit) -> np.ndarray:
    return np.sqrt(found.covariance.diagonal())


@cache
def usual() -> Fit:
    return fitted(small())


def test_the_first_round_is_the_null_model_and_no_kept_round_is_less_likely() -> None:
    found = usual()
    assert found.trace[0].loglik == pytest.approx(found.null_loglik, rel=1e-12)
    kept = [one.loglik for one in found.trace if one.kept]
    assert all(after >= before - 1e-9 for before, after in pairwise(kept))
    assert [one.round for one in found.trace] == list(range(1, found.rounds + 1))
    assert found.trace[-1].information
    assert found.trace[-1].distance == found.distance <= 1e-8


def test_the_distance_is_in_standard_errors() -> None:
    """With a loose tolerance the estimate is off by no more than the distance, and not by 0."""
    study = small(family="poisson")
    exact = fitted(study)
    loose = fitted(study, tolerance=0.05)
    off = np.abs(loose.coefficients - exact.coefficients) / errors(exact)
    assert loose.rounds < exact.rounds
    assert 0 < off.max() <= 1.1 * loose.distance <= 1.1 * 0.05


def test_the_number_of_hospitals_and_their_order_change_nothing() -> None:
    study = small()
    room = hospitals(study)
    backwards = dict(reversed(room.items()))
    other = fit(asking(backwards), toml(study), study.family)
    one = study._replace(hospital=pd.Series("all", index=study.frame.index))
    assert np.array_equal(other.coefficients, usual().coefficients)
    np.testing.assert_allclose(fitted(one).coefficients, usual().coefficients, rtol=1e-7)


def test_a_column_that_is_not_scaled_gives_the_same() -> None:
    study = small()
    age, *others = study.schema.columns
    plain = replace(study.schema, columns=(replace(age, scale=False), *others))
    found = fitted(study._replace(schema=plain))
    np.testing.assert_allclose(found.coefficients, usual().coefficients, rtol=1e-7)
    np.testing.assert_allclose(errors(found), errors(usual()), rtol=1e-7)


def test_a_fit_can_be_pickled_and_says_its_progress() -> None:
    told: list[Round] = []
    found = fitted(small(), progress=told.append)
    assert len(told) == found.rounds
    copy = pickle.loads(pickle.dumps(found))
    assert copy.names == found.names == usual().names
    assert np.array_equal(copy.covariance, found.covariance)


def test_bytes_are_those_of_the_arrays() -> None:
    """Three hospitals, p = 5: 7 + 2 p of each table, 1 + p a round, p (p + 1) / 2 of each H."""
    found = usual()
    looks = sum(one.information for one in found.trace)
    up = 3 * 8 * (7 + 10 + found.rounds * 6 + looks * 15)
    assessed = found.bytes_up - up
    assert 0 < assessed < 3 * 8 * (10 + 3 * 10 + 3 * 19)


def test_hospitals_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from fedsso.regression import hospital, schema, families, limits, questions\n"
        "print([name for name in ('torch', 'pandas', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- what cannot be fitted ends with a sentence ----


def changed(study: Study, column: Column | None = None, **columns: object) -> Study:
    """A study with other columns in its table, and perhaps one more in its schema."""
    schema = study.schema
    if column is not None:
        schema = replace(schema, columns=(*schema.columns, column))
    return study._replace(frame=study.frame.assign(**columns), schema=schema)


def test_perfect_separation_names_the_column() -> None:
    study = small()
    marker = study.frame["y"] * 3.0 + np.linspace(0, 1, len(study.frame))
    with pytest.raises(InputError, match=r"no finite estimate exists for .*marker.*separat"):
        fitted(changed(study, Column("marker", "number"), marker=marker))


@pytest.mark.parametrize("seed", range(3))
def test_a_column_that_separates_by_itself_is_the_only_one_that_is_named(seed: int) -> None:
    """Beside others that go along with the outcome, but separate nothing."""
    study = small(seed)
    y = study.frame["y"]
    draw = np.random.default_rng(seed + 99)
    for name in ("a", "b", "c"):
        values = draw.normal(size=len(y)) + 0.5 * y
        study = changed(study, Column(name, "number"), **{name: values})
    marker = y + 0.4 * draw.random(len(y))
    with pytest.raises(InputError, match="no finite estimate exists for marker: they"):
        fitted(changed(study, Column("marker", "number"), marker=marker))


def test_columns_that_separate_together_are_named_together() -> None:
    study = small()
    y = study.frame["y"]
    noise = np.random.default_rng(4).normal(size=len(y))
    study = changed(study, Column("one", "number"), one=noise + y)
    with pytest.raises(InputError, match=r"exists for (one, other|other, one): "):
        fitted(changed(study, Column("other", "number"), other=noise - y))


def test_quasi_separation_by_a_rare_level_names_the_level() -> None:
    """Five rows of 240 have the level, all with the event: its estimate is infinite."""
    study = small()
    rare = pd.Series("usual", index=study.frame.index)
    rare[study.frame.index[study.frame["y"] == 1][:5]] = "rare"
    column = Column("kind", "category", levels=("usual", "rare"))
    with pytest.raises(InputError, match="no finite estimate exists for kind: rare:"):
        fitted(changed(study, column, kind=rare))


def test_a_level_without_any_count_is_infinite() -> None:
    study = small(family="poisson")
    rare = pd.Series("usual", index=study.frame.index)
    rare[study.frame.index[study.frame["y"] == 0][:30]] = "rare"
    column = Column("kind", "category", levels=("usual", "rare"))
    with pytest.raises(InputError, match=r"kind: rare: all counts are 0"):
        fitted(changed(study, column, kind=rare))


def test_a_monotone_partial_likelihood_is_infinite() -> None:
    study = small(family="cox efron")
    order = -study.frame["days"] + 0.0
    study = study._replace(frame=study.frame.assign(y=1))
    with pytest.raises(InputError, match=r"no finite estimate exists for .*early"):
        fitted(changed(study, Column("early", "number"), early=order))


def test_collinear_columns_are_named() -> None:
    study = small()
    months = study.frame["age"] * 12 + 7
    with pytest.raises(InputError, match=r"^age, months are collinear"):
        fitted(changed(study, Column("months", "number"), months=months))


def test_a_constant_column_is_named() -> None:
    study = small()
    with pytest.raises(InputError, match=r"^same: the same in all rows"):
        fitted(changed(study, Column("same", "number"), same=3.1))


def test_a_level_that_nobody_has_is_left_out_with_a_note() -> None:
    study = small()
    levels = ("I", "II", "III", "IV")
    stage = replace(study.schema.columns[2], levels=levels)
    schema = replace(study.schema, columns=(*study.schema.columns[:2], stage))
    found = fitted(study._replace(schema=schema))
    assert found.names == usual().names
    np.testing.assert_allclose(found.coefficients, usual().coefficients, rtol=1e-7)
    assert found.notes == ("No hospital has rows with stage: IV: left out.",)


def test_a_level_that_one_hospital_lacks_is_no_problem() -> None:
    from test_pooled import RTOL, pooled

    study = small()
    keep = (study.hospital != "east") | (study.frame["stage"] != "III")
    study = study._replace(
        frame=study.frame[keep].reset_index(drop=True),
        hospital=study.hospital[keep].reset_index(drop=True),
    )
    np.testing.assert_allclose(fitted(study).coefficients, pooled(study).params, rtol=RTOL)


def test_an_empty_hospital_takes_no_part() -> None:
    study = small()
    room = hospitals(study, only=["east", "north", "west", "empty"])
    found = fit(asking(room), toml(study), study.family)
    assert [one.hospital for one in found.refusals] == ["empty"]
    assert "empty is excluded" in found.notes[0]
    np.testing.assert_allclose(found.coefficients, usual().coefficients, rtol=1e-9)


def test_no_hospital_at_all() -> None:
    study = small()
    with pytest.raises(InputError, match=r"all hospitals are excluded.*north: fewer than 999"):
        fit(asking(hospitals(study, Limits(min_rows=999))), toml(study), study.family)
    with pytest.raises(InputError, match="None was asked"):
        fit(asking({}), toml(study), study.family)


def test_one_event() -> None:
    """A hospital with its limits refuses; where limits allow it, there is no finite estimate."""
    study = small()
    events = np.zeros(len(study.frame), dtype=int)
    events[7] = 1
    study = changed(study, y=events)
    with pytest.raises(InputError, match="fewer than 3 rows with the event"):
        fit(asking(hospitals(study, Limits())), toml(study), study.family)
    with pytest.raises(InputError, match="no finite estimate exists"):
        fitted(study)


@pytest.mark.parametrize("family", ["binomial", "poisson", "cox efron"])
def test_no_event_at_all(family: str) -> None:
    study = changed(small(family=family), y=0)
    with pytest.raises(InputError, match="nothing to explain"):
        fitted(study)


def test_an_outcome_without_any_rest() -> None:
    study = small(family="gaussian")
    with pytest.raises(InputError, match="explain the outcome completely"):
        fitted(changed(study, y=study.frame["age"] * 2 + 1))
    with pytest.raises(InputError, match="nothing to explain"):
        fitted(changed(study, y=3.5))


def test_more_coefficients_than_rows() -> None:
    study = small(rows=4)
    with pytest.raises(InputError, match="cannot be estimated from 4 rows"):
        fitted(study)


def test_too_few_rounds_are_an_error() -> None:
    with pytest.raises(InputError, match=r"not converged in 3 rounds.*standard errors"):
        fitted(small(family="poisson"), rounds=3)


@pytest.mark.parametrize("tolerance", [0, -1, 2, float("nan")])
def test_a_tolerance_without_meaning(tolerance: float) -> None:
    with pytest.raises(InputError, match="tolerance"):
        fitted(small(), tolerance=tolerance)


# ---- what a reader should know ----


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda age: age * 88.4, True),  # mg/dl and micromol/l
        (lambda age: age / 88.4, True),
        (lambda age: age.mask(age.index % 20 == 0, 999), True),
        (lambda age: age + 2, False),
        (lambda age: age * 1.5, False),
    ],
)
def test_another_unit_in_one_hospital_is_told(
    change: Callable[[pd.Series], pd.Series], told: bool
) -> None:
    study = small()
    age = study.frame["age"]
    age = age.mask(study.hospital == "north", change(age))
    notes = fitted(changed(study, age=age)).notes
    assert [note.startswith("age in north (mean ") for note in notes] == [True] * told


def test_excluded_hospitals_may_bias_the_rates() -> None:
    """Of counts and of events; the hazard ratios of survival data have no rate. A hospital that is
    left out for another reason says nothing about rates."""
    few = "fewer than 3 rows with the event or without it, this hospital's limit"
    for family, reason, biased in (
        ("binomial", few, True),
        ("binomial", "fewer than 10 complete rows, this hospital's limit", False),
        ("gaussian", few, False),
        ("cox efron", few, False),
    ):
        study = small(family=family)
        ask = asking(hospitals(study, only=["east", "north", "west"]))

        def refused(question: Question, ask: Ask = ask, reason: str = reason) -> Any:
            return [*ask(question), Refusal("south", reason)]

        found = fit(refused, toml(study), family)
        assert any("rates are too high" in note for note in found.notes) == biased


# ---- hospitals that go away ----


def losing(study: Study, name: str, questions: range) -> Callable[[Question], list[object]]:
    """Asks a study's hospitals; one of them does not answer the questions of these numbers."""
    ask = asking(hospitals(study))
    count = 0

    def asked(question: Question) -> list[Answer | Refusal]:
        nonlocal count
        count += 1
        heard = ask(question)
        if count in questions:
            return [one for one in heard if one.hospital != name]
        return list(heard)

    return asked  # type: ignore[return-value]


def test_a_question_that_is_lost_is_asked_again() -> None:
    study = small()
    found = fit(losing(study, "east", range(4, 5)), toml(study), study.family)  # type: ignore[arg-type]
    assert not found.refusals
    assert np.array_equal(found.coefficients, usual().coefficients)


def test_without_a_lost_hospital_the_fit_is_that_of_the_others() -> None:
    study = small()
    found = fit(losing(study, "east", range(4, 999)), toml(study), study.family)  # type: ignore[arg-type]
    rest = hospitals(study, only=["north", "west"])
    right = fit(asking(rest), toml(study), study.family)
    assert [one.hospital for one in found.hospitals] == ["north", "west"]
    assert found.refusals == (Refusal("east", "did not answer"),)
    assert found.rows == right.rows
    np.testing.assert_allclose(found.coefficients, right.coefficients, rtol=1e-9)
    assert found.null_loglik == pytest.approx(right.null_loglik, rel=1e-12)


def test_answers_of_another_form_are_refusals() -> None:
    study = small()
    ask = asking(hospitals(study))

    def spoilt(question: Question) -> list[Answer | Refusal]:
        heard = list(ask(question))
        first = heard[0]
        assert isinstance(first, Answer)
        if question.name == "describe":
            mean = np.full_like(first.arrays["mean"], np.nan)
            heard[0] = first._replace(arrays={**first.arrays, "mean": mean})
        return heard

    found = fit(spoilt, toml(study), study.family)
    assert [one.hospital for one in found.refusals] == ["east"]
    assert "not finite" in found.refusals[0].reason


def test_limits_are_checked_in_every_question() -> None:
    """A hospital whose limits change in between is lost, and the fit goes on without it."""
    study = small()
    room = hospitals(study)
    asked: list[str] = []

    def ask(question: Question) -> list[Answer | Refusal]:
        asked.append(question.name)
        if len(asked) == 3:
            room["west"].limits = replace(OPEN, min_rows=10_000)
        return list(asking(room)(question))

    found = fit(ask, toml(study), study.family)
    assert [one.hospital for one in found.hospitals] == ["east", "north"]
    assert "fewer than 10000 complete rows" in found.refusals[0].reason


# ---- hard data ----


def test_cells_that_stand_for_a_gap_do_not_stop_the_fit() -> None:
    """Three cells of 9999 among values near 0: the null model's information knows little else.

    No estimate is infinite, though for a long way the likelihood rises as if one were.
    """
    from test_pooled import RTOL, pooled

    study = small()
    marker = np.random.default_rng(2).normal(size=240)
    marker[[3, 50, 111]] = 9999.0
    study = changed(study, Column("marker", "number"), marker=marker)
    found = fitted(study)
    right = pooled(study)
    assert found.converged
    np.testing.assert_allclose(found.coefficients, right.params, rtol=RTOL)
    np.testing.assert_allclose(errors(found), right.bse, rtol=RTOL)


def test_counts_that_grow_by_many_orders() -> None:
    """Counts from 0 to 6e4, of which the null model knows nothing."""
    from test_pooled import RTOL, pooled

    rng = np.random.default_rng(3)
    study = small(family="poisson")
    dose = rng.uniform(0, 1, 240)
    counts = rng.poisson(np.exp(11 * dose**2))
    study = changed(study, Column("dose", "number"), dose=dose, y=counts)
    found = fitted(study)
    assert found.converged
    np.testing.assert_allclose(found.coefficients, pooled(study).params, rtol=RTOL)


def test_a_step_that_overflows_is_undone_and_teaches_nothing() -> None:
    """f(u) = cosh(u) - 1 in two dimensions: a whole step from -20 is exp(20) / 2 long."""
    from fedsso.regression.rounds.ascent import Ascent

    def look(u: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            return float((np.cosh(u) - 1).sum()), np.sinh(u)

    def length(step: np.ndarray) -> float:
        return float(np.linalg.norm(step))

    start = np.array([3.0, -20.0])
    ascent = Ascent(start, *look(start), np.inf, length)
    levels = [ascent.f]
    undone = 0
    while ascent.distance > 1e-8 and len(levels) < 100:
        undone += not ascent.hear(*look(ascent.next()))
        levels.append(ascent.f)
    assert undone
    assert levels == sorted(levels, reverse=True)
    assert np.abs(ascent.u).max() < 1e-6
