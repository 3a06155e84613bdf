"""Tables as numbers: terms, rows, gaps, outcomes, and errors that quote no cell to others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsso.errors import InputError
from fedsso.regression.design import Table, design, explanatory, offsets, read_table, terms
from fedsso.regression.schema import Column, Schema

AGE = Column("age", "number", unit="years", fill=50.0)
SMOKER = Column("smoker", "yesno")
STAGE = Column("stage", "category", levels=("I", "II", "III"))
COMPLETE = Schema("ill", (AGE, SMOKER, STAGE, Column("patient", "ignore")))
MEDIAN = replace(COMPLETE, missing="median")
NAMES = ("age", "smoker", "stage", "ill")
ROWS = [
    ["40", "yes", "I", "yes"],
    ["60.5", "No", "III", "no"],
    ["", "n", "II", "no"],
    ["70", "?", "NA", "yes"],
    ["80", "yes", "I", "NA"],
]
TABLE = Table(NAMES, ROWS)


def names(schema: Schema, family: str = "binomial") -> list[str]:
    return [term.name for term in terms(schema, family)]


def outcome(cells: list[str], family: str, schema: Schema) -> list[float]:
    """The outcome of a table that has no other column."""
    return list(design(Table((schema.outcome,), [[cell] for cell in cells]), schema, family).y)


# ---- terms ----


def test_terms_have_names_levels_and_units() -> None:
    assert names(COMPLETE) == ["(intercept)", "age", "smoker: yes", "stage: II", "stage: III"]
    _, age, smoker, second, _ = terms(COMPLETE, "binomial")
    assert (age.column, age.unit, age.scaled) == ("age", "years", True)
    assert (smoker.column, smoker.level, smoker.scaled) == ("smoker", "yes", False)
    assert (second.column, second.level) == ("stage", "II")


def test_the_reference_and_the_words_for_yes_may_be_chosen() -> None:
    stage = replace(STAGE, reference="II")
    smoker = replace(SMOKER, levels=("nein", "ja"))
    schema = Schema("ill", (stage, smoker), intercept=False)
    assert names(schema) == ["stage: I", "stage: III", "smoker: ja"]
    table = Table(("smoker", "stage"), [["ja", "I"], ["nein", "II"], ["ja", "III"]])
    assert explanatory(table, schema, "binomial").tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 1]]


def test_survival_has_no_intercept() -> None:
    assert names(replace(COMPLETE, time="days"), "cox breslow")[0] == "age"


def test_gaps_have_terms_of_their_own() -> None:
    assert names(MEDIAN)[1:] == [
        *("age", "age: missing", "smoker: yes", "smoker: missing"),
        *("stage: II", "stage: III", "stage: missing"),
    ]
    few = replace(MEDIAN, columns=(AGE, replace(SMOKER, gaps=False)))
    assert names(few)[1:] == ["age", "age: missing", "smoker: yes"]


def test_two_terms_of_one_name_are_refused() -> None:
    both = Schema("ill", (STAGE, Column("stage: II", "number")))
    with pytest.raises(InputError, match="2 coefficients would be called 'stage: II'"):
        terms(both, "binomial")


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InputError, match="unknown family 'poison'; did you mean 'poisson'"):
        terms(COMPLETE, "poison")


# ---- rows ----


def test_rows_with_gaps_are_dropped() -> None:
    made = design(TABLE, COMPLETE, "binomial")
    assert made.x.tolist() == [[1, 40, 1, 0, 0], [1, 60.5, 0, 0, 1]]
    assert made.y.tolist() == [1, 0]
    assert made.weights.tolist() == [1, 1]
    assert made.offset.tolist() == [0, 0]
    assert made.time.tolist() == []
    assert made.dropped == 3
    assert made.notes == ("the table: 3 of 5 rows are left out because of missing values",)


def test_gaps_are_filled_and_told() -> None:
    """Only the row without an outcome goes."""
    made = design(TABLE, MEDIAN, "binomial")
    assert made.dropped == 1
    assert made.x.tolist() == [
        [1, 40, 0, 1, 0, 0, 0, 0],
        [1, 60.5, 0, 0, 0, 0, 1, 0],
        [1, 50, 1, 0, 0, 1, 0, 0],
        [1, 70, 0, 0, 1, 0, 0, 1],
    ]


def test_a_column_without_gaps_drops_the_rows_that_have_one() -> None:
    schema = replace(MEDIAN, columns=(AGE, replace(SMOKER, gaps=False)))
    assert design(TABLE, schema, "binomial").dropped == 2


def test_the_fill_does_not_matter_beside_its_indicator() -> None:
    """Where a is missing, slope * fill + indicator is the same for every fill.

    So the other coefficients of a least-squares fit are the same, and the indicator's moves by
    slope times the difference of the fills. The bound is the forward error of lstsq: cond times
    eps, with room for the 20 rows and for the factor 7.
    """
    rng = np.random.default_rng(0)
    rows = [
        [f"{rng.normal():.3f}", f"{rng.normal():.3f}", f"{rng.normal():.3f}"] for _ in range(20)
    ]
    for row in rows[::4]:
        row[0] = "NA"
    table = Table(("a", "b", "y"), rows)
    found = []
    for fill in (0.0, 7.0):
        columns = (Column("a", "number", fill=fill), Column("b", "number", gaps=False))
        made = design(table, Schema("y", columns, missing="median"), "gaussian")
        found.append(np.linalg.lstsq(made.x, made.y, rcond=None)[0])
        bound = 1000 * np.finfo(float).eps * np.linalg.cond(made.x)
    _, slope, _, _ = found[0]
    assert np.abs(found[0] - found[1] - [0, 0, 7 * slope, 0]).max() <= bound
    assert abs(7 * slope) > 1e9 * bound


def test_order_and_additional_columns_do_not_matter() -> None:
    rows = [[row[3], "secret", row[2], row[0], row[1]] for row in ROWS]
    other = Table(("ill", "ward", "stage", "age", "smoker"), rows)
    plain = design(TABLE, COMPLETE, "binomial")
    made = design(other, COMPLETE, "binomial")
    assert np.array_equal(made.x, plain.x)
    assert made.notes[0] == "the table: columns that the schema does not have are ignored: ward"


def test_an_empty_table_has_an_empty_design() -> None:
    made = design(Table(NAMES, []), COMPLETE, "binomial")
    assert made.x.shape == (0, 5)
    assert made.y.shape == made.weights.shape == made.offset.shape == (0,)


def test_numbers_as_levels_may_be_written_otherwise() -> None:
    """A column of codes with gaps becomes 1.0, 2.0 in many programs."""
    schema = Schema("y", (Column("cp", "category", levels=("1", "2")),), intercept=False)
    table = Table(("cp",), [["1.0"], ["2"], ["2.0"]])
    assert explanatory(table, schema, "gaussian").tolist() == [[0], [1], [1]]


def test_further_marks_of_a_gap() -> None:
    schema = Schema("y", (Column("a", "number"),), marks=("-9",))
    table = Table(("a", "y"), [["-9", "1"], ["3", "-9"], ["4", "0"]])
    assert design(table, schema, "gaussian").x.tolist() == [[1, 4]]


def test_new_rows_need_no_outcome() -> None:
    table = Table(("stage", "smoker", "age"), [["I", "no", "30"], ["II", "", "31"]])
    x = explanatory(table, COMPLETE, "binomial")
    assert x[0].tolist() == [1, 30, 0, 0, 0]
    assert np.isnan(x[1]).any()
    assert offsets(table, COMPLETE).tolist() == [0, 0]


# ---- outcomes ----

PLAIN = Schema("y")
FAMILIES = {
    "words": ("binomial", PLAIN, ["Yes", "f", "1", "0.0"], [1, 0, 1, 0]),
    "levels": (
        "binomial",
        Schema("y", positive="sick", negative="well"),
        ["well", "sick", "NA"],
        [0, 1],
    ),
    "one level": ("binomial", Schema("y", positive="sick"), ["well", "sick"], [0, 1]),
    "yes is written": ("binomial", Schema("y", positive="yes"), ["Y", "no"], [1, 0]),
    "no is the event": ("binomial", Schema("y", positive="no"), ["yes", "N"], [0, 1]),
    "codes": ("binomial", Schema("y", positive="2", negative="1"), ["1", "2.0"], [0, 1]),
    "numbers": ("gaussian", PLAIN, ["-1.5", "1e3", "?"], [-1.5, 1000]),
    "counts": ("poisson", PLAIN, ["0", "3", "2.0"], [0, 3, 2]),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_an_outcome_is_read_as_its_family_needs_it(case: str) -> None:
    family, schema, cells, expected = FAMILIES[case]
    assert outcome(cells, family, schema) == expected


def test_survival_has_a_time_weights_and_an_offset() -> None:
    schema = Schema("died", (AGE,), time="days", weights="w", offset="o")
    rows = [
        ["50", "yes", "10", "2", "0.5"],
        ["60", "no", "20", "1", "-1"],
        ["60", "no", "NA", "1", "0"],
        ["60", "no", "5", "", "0"],
        ["60", "no", "5", "1", ""],
    ]
    made = design(Table(("age", "died", "days", "w", "o"), rows), schema, "cox")
    assert made.time.tolist() == [10, 20]
    assert made.weights.tolist() == [2, 1]
    assert made.offset.tolist() == [0.5, -1]
    assert made.x.tolist() == [[50], [60]]
    assert made.dropped == 3


def test_survival_without_a_time_is_refused() -> None:
    with pytest.raises(InputError, match=r"--time") as caught:
        design(TABLE, COMPLETE, "cox")
    assert caught.value.public == str(caught.value)


# ---- wrong cells ----

SECRET = "Ms Smith"
BAD = {
    "number": ("gaussian", Schema("y", (AGE,)), ("age", "y"), 0, "numbers such as -1.5"),
    "yes or no": ("gaussian", Schema("y", (SMOKER,)), ("smoker", "y"), 0, "yes or no"),
    "own words": (
        "gaussian",
        Schema("y", (replace(SMOKER, levels=("0", "1")),)),
        ("smoker", "y"),
        0,
        "'0' or '1'",
    ),
    "level": ("gaussian", Schema("y", (STAGE,)), ("stage", "y"), 0, r"schema \(I, II, III\)"),
    "event": ("binomial", PLAIN, ("y", "z"), 0, "positive = "),
    "other level": (
        "binomial",
        Schema("y", positive="1"),
        ("y", "z"),
        0,
        "0 or 1|'1' or one other",
    ),
    "outcome": ("gaussian", PLAIN, ("y", "z"), 0, "the outcome"),
    "count": ("poisson", PLAIN, ("y", "z"), 0, "counts such as 0, 1, 2"),
    "time": ("cox", Schema("y", (AGE,), time="z"), ("z", "y", "age"), 0, "the time at risk"),
    "weights": ("gaussian", Schema("y", weights="z"), ("z", "y"), 0, "weights above 0"),
    "offset": ("gaussian", Schema("y", offset="z"), ("z", "y"), 0, "the offset"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_cell_is_quoted_at_home_and_nowhere_else(case: str) -> None:
    family, schema, columns, place, expected = BAD[case]
    rows = [["1"] * len(columns) for _ in range(4)]
    if "stage" in columns:
        rows = [["I", "1"] for _ in range(4)]
    for row in rows[1:3]:
        row[place] = SECRET
    table = Table(columns, rows, "north.csv", (2, 3, 4, 5))
    with pytest.raises(InputError, match=expected) as caught:
        design(table, schema, family)
    assert f"north.csv: line 3: has {SECRET!r} in column {columns[place]!r}" in str(caught.value)
    public = caught.value.public
    assert f"column {columns[place]!r}" in public
    # A count of cells that are none of the schema's own words would confirm a guessed name.
    guessed = case in ("own words", "level", "other level")
    assert ("some cells" if guessed else "2 of 4 cells") in public
    assert not any(word in public for word in (*SECRET.split(), "north", "line"))


@pytest.mark.parametrize(
    ("family", "cells"),
    [
        ("poisson", ["-1"]),
        ("poisson", ["1.5"]),
        ("gaussian", ["inf"]),
        ("gaussian", ["1_000"]),
        ("gaussian", ["1e39"]),
        ("binomial", ["2"]),
        ("binomial", ["maybe"]),
    ],
)
def test_numbers_beyond_a_family_are_refused(family: str, cells: list[str]) -> None:
    with pytest.raises(InputError, match="column 'y', the outcome"):
        outcome(cells, family, PLAIN)


@pytest.mark.parametrize("cell", ["0", "-3"])
def test_a_time_must_be_above_0(cell: str) -> None:
    schema = Schema("died", (AGE,), time="days")
    table = Table(("age", "died", "days"), [["1", "no", cell]])
    with pytest.raises(InputError, match="times above 0"):
        design(table, schema, "cox")


def test_three_levels_are_no_yes_and_no() -> None:
    """The other level is not named, and the table has two others."""
    with pytest.raises(InputError, match="'sick' or one other level"):
        outcome(["sick", "well", "wel"], "binomial", Schema("y", positive="sick"))


def test_a_date_among_numbers_has_a_remedy() -> None:
    table = Table(("age", "y"), [["2021-03-09", "1"]])
    with pytest.raises(InputError, match=r"row 1: .*days since the first visit"):
        design(table, Schema("y", (AGE,)), "gaussian")


def test_a_column_that_is_not_there_or_there_twice() -> None:
    with pytest.raises(InputError, match="unknown column 'age'; did you mean 'ages'") as caught:
        design(Table(("ages", "ill"), []), COMPLETE, "binomial")
    assert caught.value.public == "the table has no column 'age'"
    with pytest.raises(InputError, match="2 columns are called 'age'") as caught:
        design(Table(("age", "age", "ill"), []), COMPLETE, "binomial")
    assert caught.value.public == "the table has 2 columns 'age', expected one"


# ---- files ----


def test_a_file_is_read_with_commas_or_semicolons(tmp_path: Path) -> None:
    comma = tmp_path / "comma.csv"
    comma.write_text('age, name,ill\n 50,"Smith, Ann",yes\n\n60,,no\n')
    assert read_table(comma) == Table(
        ("age", "name", "ill"),
        [["50", "Smith, Ann", "yes"], ["60", "", "no"]],
        str(comma),
        (2, 4),
    )
    semicolon = tmp_path / "semicolon.csv"
    semicolon.write_text("\ufeffdose, in mg;ill\r\n1,5;yes\r\n", encoding="utf-8")
    assert read_table(semicolon)[:2] == (("dose, in mg", "ill"), [["1.5", "yes"]])


def test_a_wrong_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("")
    with pytest.raises(InputError, match="the file is empty"):
        read_table(path)
    path.write_text(f"a,b\n1,2\n{SECRET}\n")
    with pytest.raises(InputError, match="line 3: has 1 cells, expected 2") as caught:
        read_table(path)
    assert caught.value.public == "at least 1 row has 1 cells, expected 2"
    with pytest.raises(InputError, match="check the name"):
        read_table(tmp_path / "nowhere.csv")


def test_a_hospital_needs_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from fedsso.regression import design, infer, schema;"
        "print([name for name in ('torch', 'pandas', 'flwr') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- numbers that are mistakes ----


def ages(*texts: str) -> Table:
    """Twenty usual ages, then these; the outcome is of no interest."""
    usual = [str(40 + age) for age in range(20)]
    return Table(("age", "ill"), [[age, "1"] for age in (*usual, *texts)], "north.csv")


AGES = Schema("ill", (Column("age", "number"),))


@pytest.mark.parametrize("cell", ["1e30", "-2e15", "1e10", "1e300", "1e999"])
def test_a_number_too_large_is_refused_by_its_column(cell: str) -> None:
    """Ages are 5 from their median: 1e10 is 2e9 times as far, beyond the bound of 1e8."""
    with pytest.raises(InputError, match="too large") as caught:
        design(ages(cell), AGES, "binomial")
    assert cell in str(caught.value)
    assert "row 21" in str(caught.value)
    assert cell not in caught.value.public
    assert "'age'" in caught.value.public
    assert "too large" in caught.value.public


def test_a_large_outcome_of_a_linear_model_is_refused() -> None:
    rows = [[str(40 + i), "1e30" if i == 7 else str(i)] for i in range(20)]
    with pytest.raises(InputError, match="too large"):
        design(Table(("age", "ill"), rows), AGES, "gaussian")


@pytest.mark.parametrize("cell", ["1e8", "-5000", "NA", "0"])
def test_a_number_that_a_fit_can_take_is_kept(cell: str) -> None:
    assert len(design(ages(cell), AGES, "binomial").y) == 21 - (cell == "NA")


def test_the_only_other_value_of_a_column_is_no_mistake() -> None:
    """Of 0, 0, 0, 1 the usual distance that is not 0 is 1."""
    rows = [[cell, "1"] for cell in ("0", "0", "0", "1")]
    assert len(design(Table(("age", "ill"), rows), AGES, "binomial").y) == 4


# ---- files ----


def test_a_file_without_names_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text("63,1,?,0\n67,2,5,1\n")
    with pytest.raises(InputError, match=r"looks like data.*columns' names") as caught:
        read_table(path)
    assert "63" not in caught.value.public
    path.write_text("1,2\n63,0\n")  # whoever names a column "2" means it
    assert read_table(path, "2").names == ("1", "2")
