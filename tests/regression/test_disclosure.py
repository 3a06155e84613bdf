"""No answer of a hospital tells one patient's row: attacks by a server that knows the code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from federations import table

from fedsso import glm
from fedsso.errors import InputError
from fedsso.regression import schema as schemas
from fedsso.regression.hospital import Hospital
from fedsso.regression.ledger import Ledger
from fedsso.regression.limits import Limits
from fedsso.regression.questions import Arrays, Question
from fedsso.regression.schema import Column, Schema

STRICT = Limits(min_rows=50, min_events=10, min_level=3, min_cell=5, max_share=0.1)
LIMITS = pytest.mark.parametrize("limits", [Limits(), STRICT], ids=["default", "strict"])
VICTIM = 123
AGE, SEX, LAB = Column("age", "number"), Column("sex", "yesno"), Column("lab", "number")
USUAL = Schema("ill", (AGE, SEX, LAB))
"""Four coefficients, about columns in which nobody stands out."""


def patients(**changes: Any) -> pd.DataFrame:
    """A table of 400 patients. `changes` are columns, or the value of one that the victim has."""
    rng = np.random.default_rng(3)
    rows = 400
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows),
            "sex": rng.choice(["yes", "no"], rows),
            "lab": rng.normal(27, 4, rows).round(1),
            "ill": rng.integers(0, 2, rows),
            "dx": rng.choice(["A", "B", "C"], rows).astype(object),
            "lone": 0,
            "most": 1.0,
        }
    )
    for name, value in changes.items():
        if isinstance(value, int | float | str):
            frame[name] = frame[name].astype(object)
            frame.loc[VICTIM, name] = value
        else:
            frame[name] = value
    return frame


def ask(
    frame: pd.DataFrame,
    schema: Schema,
    name: str = "describe",
    family: str = "binomial",
    limits: Limits | None = None,
    model: Any = None,
    ledger: Ledger | None = None,
    agreed: bool = False,
) -> Arrays:
    """The answer of a hospital that has answered nothing before, or what `ledger` says."""
    b = np.zeros(0) if model is None else np.array(model, float)
    asked = Question(name, schemas.write(schema), family, b, 0 * b, np.ones(len(b)))
    hospital = Hospital("one", table(frame), limits, ledger or Ledger(), agreed=agreed)
    return hospital.answer(asked).arrays


def with_column(column: Column, **roles: Any) -> Schema:
    """The usual schema, one column more."""
    return replace(USUAL, columns=(*USUAL.columns, column), **roles)


TWO = np.where(np.arange(400) < 2, 3.0 + np.arange(400), 0.0)
NESTED = np.array(patients()["sex"] == "yes", int)
NESTED[np.flatnonzero(NESTED == 0)[0]] = 1
NEAR_ILL = np.array(patients()["ill"])
NEAR_ILL[VICTIM] = 1 - NEAR_ILL[VICTIM]
DX = Column("dx", "category", levels=("A", "B", "C", "rare"))
RARE = {"dx": "rare", "lone": 1}
APART = {
    "a lone level": (with_column(DX), RARE),
    "a lone reference": (with_column(replace(DX, reference="rare")), RARE),
    "a lone 1 as number": (with_column(Column("lone", "number")), RARE),
    "a lone yes": (with_column(Column("lone", "yesno")), RARE),
    "a lone no": (with_column(Column("lone", "yesno", levels=("1", "0"))), RARE),
    "one far number": (with_column(Column("far", "number")), {"far": 1e6 + np.arange(400.0) / 9}),
    "two weights": (replace(USUAL, weights="most"), {"most": 1e-6}),
    "one large weight": (replace(USUAL, weights="far"), {"far": np.linspace(1, 2, 400)}),
    "two offsets": (replace(USUAL, offset="lone"), {"lone": 30}),
    "two that are not 0": (with_column(Column("most", "number")), {"most": TWO}),
    "nested columns": (with_column(Column("any", "yesno")), {"any": NESTED}),
    "opposite columns": (with_column(Column("any", "yesno", levels=("1", "0"))), {"any": NESTED}),
    "nearly the outcome": (with_column(Column("any", "number")), {"any": NEAR_ILL}),
    "a lone gap": (
        replace(USUAL, columns=(AGE, SEX, replace(LAB, fill=27.0)), missing="median"),
        {"lab": ""},
    ),
    "a lone gap of a category": (
        with_column(replace(DX, levels=("A", "B", "C")), missing="median"),
        {"dx": ""},
    ),
}


@LIMITS
@pytest.mark.parametrize("name", ["describe", "score", "information", "assess"])
@pytest.mark.parametrize(("schema", "changes"), APART.values(), ids=APART)
def test_no_column_sets_a_row_apart(
    schema: Schema, changes: dict[str, Any], name: str, limits: Limits
) -> None:
    frame = patients(**changes)
    if "far" in changes:
        frame.loc[VICTIM, "far"] = 1e9
    schema = replace(schema, columns=tuple(replace(one, fill=1.0) for one in schema.columns))
    model = None if name == "describe" else np.zeros(len(schema.columns) + 6)
    with pytest.raises(InputError) as caught:
        ask(frame, schema, name, limits=limits, model=model)
    assert "this hospital's limit" in caught.value.public


@LIMITS
@pytest.mark.parametrize("family", ["binomial", "gaussian", "poisson", "cox"])
@pytest.mark.parametrize("value", [0, 1])
def test_no_outcome_sets_a_row_apart(family: str, value: int, limits: Limits) -> None:
    outcome = np.full(400, 1 - value)
    outcome[VICTIM] = value
    frame = patients(ill=outcome, days=np.arange(1.0, 401.0))
    schema = replace(USUAL, time="days" if family == "cox" else "")
    with pytest.raises(InputError, match=r"fewer than (3|10) rows with the event"):
        ask(frame, schema, family=family, limits=limits)


def test_few_counts_or_one_large_number_are_no_outcome() -> None:
    few = np.zeros(400)
    few[[VICTIM, 7]] = 3, 1
    with pytest.raises(InputError, match="fewer than 3 rows with the event"):
        ask(patients(ill=few), USUAL, family="poisson")
    with pytest.raises(InputError, match="fewer than 10 rows with the event"):
        ask(patients(ill=1 + (np.arange(400) < 9)), USUAL, family="poisson", limits=STRICT)
    ask(patients(ill=1 + (np.arange(400) < 10)), USUAL, family="poisson", limits=STRICT)
    with pytest.raises(InputError, match="far from all others"):
        ask(patients(ill=np.where(few > 2, 1e6, np.arange(400))), USUAL, family="gaussian")


# ---- models that look at one row ----


STEEP = {
    "binomial": (0, [-50.0 * 95, 50, 0, 0]),
    "poisson": (90, [0, 50, 0, 0]),
    "cox": (90, [50, 0, 0]),
}
"""What is subtracted from the age, and a model that asks for who is 95: the victim alone."""


@LIMITS
@pytest.mark.parametrize(("family", "case"), STEEP.items())
def test_no_model_looks_at_one_row(family: str, case: tuple[int, Any], limits: Limits) -> None:
    less, b = case
    days = np.arange(1.0, 401.0)
    days[VICTIM] = 999  # at risk whenever somebody has the event
    frame = patients(age=95, days=days)
    frame["age"] -= less
    schema = replace(USUAL, time="days" if family == "cox" else "")
    for name in ("information", "assess"):
        with pytest.raises(InputError, match="sums are those of few rows"):
            ask(frame, schema, name, family, limits, b)
    assert np.isnan(ask(frame, schema, "score", family, limits, b)["gradient"]).all()


def test_two_borders_do_not_tell_the_row_between_them() -> None:
    """Without this, two scores of steep models would differ by the row between the borders."""
    frame = patients()
    frame.loc[frame["age"] == 60, "age"] = 61
    frame.loc[VICTIM, "age"] = 60
    for border in (59, 59.5, 60.5, 61):  # many rows lie on the first and the last
        found = ask(frame, USUAL, "score", model=[-400 * border, 400, 0, 0])
        assert np.isnan(found["gradient"]).all()


def test_honest_models_are_answered() -> None:
    """Also one that sorts nearly all rows, and one whose event is rare."""
    for b in ([0, 0, 0, 0], [-18, 0.3, 0, 0], [-7, 0, 0.5, 0]):
        for name in ("score", "information", "assess"):
            ask(patients(), USUAL, name, limits=STRICT, model=b)


# ---- differences between answers ----


@LIMITS
def test_a_question_cannot_drop_rows_by_their_values(limits: Limits) -> None:
    frame = patients(lab=55.5)
    for mark in ("55.5", "yes", "-9.5"):
        with pytest.raises(InputError, match="would pick out its rows"):
            ask(frame, replace(USUAL, marks=(mark,)), limits=limits)
    agreed = ask(frame, replace(USUAL, marks=("55.5",)), limits=limits, agreed=True)
    assert agreed["dropped"] == 1


def test_the_usual_codes_of_a_gap_need_no_agreement() -> None:
    frame = patients(lab=-9, sex="unknown")
    assert ask(frame, replace(USUAL, marks=("-9", "unknown")))["dropped"] == 1


def gappy(**gaps: range) -> pd.DataFrame:
    """A table with more columns like "lab", each with gaps in some rows."""
    frame = patients()
    for name, rows in gaps.items():
        frame[name] = frame["lab"].astype(object)
        frame.loc[list(rows), name] = ""
    return frame


PAIRS = [([], ["one"]), (["one"], []), (["one"], ["two"]), (["two"], ["nine"])]
"""Columns of two questions. All rows have a lab; the others lack it in so many of the first."""


@LIMITS
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_answers_do_not_differ_by_a_row(
    first: list[str], second: list[str], limits: Limits
) -> None:
    frame = gappy(one=range(1), two=range(2), nine=range(9))
    before, after = (
        replace(USUAL, columns=(*USUAL.columns, *(Column(name, "number") for name in names)))
        for names in (first, second)
    )
    ledger = Ledger()
    for name in ("describe", "score"):  # a fit has many questions about the same rows
        model = None if name == "describe" else np.zeros(4 + len(first))
        ask(frame, before, name, ledger=ledger, limits=limits, model=model)
    with pytest.raises(InputError, match=r"tell about fewer than \d+ rows"):
        ask(frame, after, ledger=ledger, limits=limits)


def test_answers_may_differ_by_as_many_rows_as_an_answer_needs() -> None:
    """Ten rows by default; with five coefficients and a share of 0.33, sixteen."""
    for gaps, limits in ((15, Limits()), (9, Limits(max_share=1.0)), (49, STRICT)):
        frame, ledger = gappy(few=range(gaps), more=range(gaps + 1)), Ledger()
        assert ask(frame, USUAL, ledger=ledger, limits=limits)["rows"] == 400
        few, more = (with_column(Column(name, "number")) for name in ("few", "more"))
        with pytest.raises(InputError, match=f"tell about fewer than {gaps + 1} rows"):
            ask(frame, few, ledger=ledger, limits=limits)
        assert ask(frame, more, ledger=ledger, limits=limits)["rows"] == 399 - gaps


@LIMITS
@pytest.mark.parametrize("role", ["weights", "offset"])
def test_a_weight_or_an_offset_does_not_sort_out_a_row(role: str, limits: Limits) -> None:
    """Of three stages one has a single patient: as an offset it tells the sums of each stage."""
    stages = np.arange(400) % 2 + 1.0
    assert ask(patients(stage=stages), replace(USUAL, **{role: "stage"}), limits=limits)
    stages[VICTIM] = 3.0
    with pytest.raises(InputError, match=r"fewer than 3 rows with a value of the (weight|offset)"):
        ask(patients(stage=stages), replace(USUAL, **{role: "stage"}), limits=limits)


def test_four_answers_do_not_tell_a_row_that_no_two_of_them_tell() -> None:
    """Without a, without b, without both and without neither: a and b overlap in row 19."""
    frame = gappy(a=range(20), b=range(19, 40))
    a, b = Column("a", "number"), Column("b", "number")
    ledger = Ledger()
    ask(frame, USUAL, ledger=ledger)
    ask(frame, with_column(a), ledger=ledger)
    with pytest.raises(InputError, match=r"tell about fewer than \d+ rows"):
        ask(frame, with_column(b), ledger=ledger)


def test_a_patient_who_was_added_is_not_told() -> None:
    frame = patients()
    ledger = Ledger()
    ask(frame[:399], USUAL, ledger=ledger)
    with pytest.raises(InputError, match=r"tell about fewer than \d+ rows"):
        ask(frame, USUAL, ledger=ledger)
    ask(frame[:380], USUAL, ledger=ledger)


def test_other_questions_about_the_same_rows_are_answered() -> None:
    """Other covariates, roles and families; the order of the columns and rows does not matter."""
    frame = patients(days=np.arange(1.0, 401.0))
    ledger = Ledger()
    for schema, family in (
        (USUAL, "binomial"),
        (replace(USUAL, columns=(AGE,)), "poisson"),
        (replace(USUAL, outcome="lab", columns=(AGE, SEX)), "gaussian"),
        (replace(USUAL, time="days"), "cox"),
    ):
        ask(frame, schema, family=family, ledger=ledger)
    ask(frame[sorted(frame.columns)][::-1], USUAL, ledger=ledger)


def test_a_process_remembers_hospitals_by_their_names() -> None:
    question = Question("describe", schemas.write(USUAL), "binomial", *[np.zeros(0)] * 3)
    frame = patients(lab=26.99)
    Hospital("remembered", table(frame)).answer(question)
    fewer = table(frame[1:])
    with pytest.raises(InputError, match=r"tell about fewer than \d+ rows"):
        Hospital("remembered", fewer).answer(question)
    Hospital("another", fewer).answer(question)


# ---- errors ----


@pytest.mark.parametrize(
    "schema",
    [
        replace(USUAL, columns=(Column("name", "category", levels=("P123", "nobody")),)),
        replace(USUAL, columns=(Column("name", "yesno", levels=("nobody", "P123")),)),
        Schema("name", (AGE,), positive="P123"),
        Schema("name", (AGE,), positive="P123", negative="nobody"),
    ],
)
def test_an_error_does_not_confirm_a_guessed_name(schema: Schema) -> None:
    told = set()
    for names in ([f"P{i}" for i in range(400)], [f"Q{i}" for i in range(400)]):
        with pytest.raises(InputError) as caught:
            ask(patients(name=np.array(names)), schema)
        told.add(caught.value.public)
    assert len(told) == 1


def test_processes_that_answer_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """Six threads, each with a ledger of its own over one file, ask about rows of their own."""
    path = tmp_path / "answered.npz"
    sets = [np.arange(20 * i, 20 * i + 20, dtype=np.uint64) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda rows: Ledger(path).admit(rows, 10), sets))
    with pytest.raises(InputError, match="fewer than 10 rows"):
        Ledger(path).admit(sets[5][1:], 10)
    assert len(np.load(path)) == 6


# ---- fits ----


def test_a_step_that_is_too_long_for_a_hospital_does_not_exclude_it() -> None:
    """Heavy tails make steps steep on the way, though the estimate is not: nobody is left out."""
    rng = np.random.default_rng(5)
    tables = {}
    for i, rows in enumerate((2000, 160, 150, 130)):
        dose = rng.standard_t(3, rows)
        rate = np.exp(0.5 * dose.clip(-4, 4) - 1)
        tables[f"h{i}"] = pd.DataFrame({"dose": dose, "visits": rng.poisson(rate)})
    found = glm(tables, "poisson", "visits", limits=Limits())
    pooled = glm(tables, "poisson", "visits")
    assert not found.fit.refusals
    np.testing.assert_allclose(found.fit.coefficients, pooled.fit.coefficients, rtol=1e-6)


def test_hospitals_that_refuse_steep_models_say_that_the_outcomes_are_separated() -> None:
    """A NaN gradient tells that a step is too long, and is no false answer."""
    rng = np.random.default_rng(0)
    tables = {}
    for name in ("east", "north", "south", "west"):
        lab = rng.normal(size=150)
        tables[name] = pd.DataFrame({"lab": lab, "ill": (lab > 0).astype(int)})
    with pytest.raises(InputError, match="all hospitals are excluded") as caught:
        glm(tables, outcome="ill", limits=Limits())
    assert "a column separates the outcomes" in str(caught.value)
    assert "wrongly" not in str(caught.value)
