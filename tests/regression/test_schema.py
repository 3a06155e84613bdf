"""Schemas: read, written, checked, and made from a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from console import fedsso as command
from fedsso.errors import InputError
from fedsso.regression.cells import is_date, is_gap, yes_or_no
from fedsso.regression.design import Table, design, read_table
from fedsso.regression.infer import infer, is_identifier
from fedsso.regression.schema import Column, Schema, parse, read, write

FULL = Schema(
    "died",
    (
        Column("age", "number", unit="years", fill=54.5, per=10.0),
        Column("blood pressure [mmHg]", "number", scale=False, gaps=False),
        Column("smoker", "yesno", levels=("nein", "ja")),
        Column("stage", "category", levels=("I", 'II "b"', "III"), reference="III"),
        Column("patient", "ignore"),
    ),
    positive="2",
    negative="1",
    time="days",
    weights="w",
    offset="o",
    missing="median",
    marks=("-9",),
    intercept=False,
)


# ---- files ----


def test_a_schema_is_read_as_it_was_written(tmp_path: Path) -> None:
    text = write(FULL)
    assert parse(text) == FULL
    path = tmp_path / "a=b.toml"  # a path, though it has an equals sign
    path.write_text(text)
    assert read(path) == read(str(path)) == read(text) == FULL
    assert read('outcome = "y"') == Schema("y")


def test_what_is_written_explains_itself() -> None:
    lines = write(FULL).splitlines()
    assert 'type = "number"  # number, yesno, category or ignore' in lines
    assert sum("number, yesno" in line for line in lines) == 1  # once is enough
    assert 'type = "ignore"  # identifiers, names, free text: never read' in lines


def test_numbers_may_be_levels() -> None:
    text = 'outcome = "y"\n[columns.cp]\ntype = "category"\nlevels = [1, 2, 3]\nreference = 2'
    (column,) = parse(text).columns
    assert column.levels == ("1", "2", "3")
    assert column.compared == ("1", "3")


HEAD = 'outcome = "y"\n'
WRONG = {
    "no outcome": ("[columns.a]\ntype = 'number'", "outcome ="),
    "key": (HEAD + "outcom = 'y'", "unknown key 'outcom'; did you mean 'outcome'"),
    "type": (HEAD + "[columns.a]\ntype = 'numbr'", "unknown type 'numbr'; did you mean 'number'"),
    "date": (HEAD + "[columns.a]\ntype = 'date'", "an age in years"),
    "rule": (HEAD + "missing = 'mean'", "complete, median, got 'mean'"),
    "text": (HEAD + "time = true", "time must be a text"),
    "flag": (HEAD + "intercept = 1", "true or false, got 1"),
    "levels": (HEAD + "[columns.a]\ntype = 'category'\nlevels = ['I']", "at least 2 levels"),
    "a gap": (HEAD + "[columns.a]\ntype = 'category'\nlevels = ['I', 'NA']", "that mean missing"),
    "twice": (HEAD + "[columns.a]\ntype = 'category'\nlevels = ['I', 'I']", "each once"),
    "reference": (
        HEAD + "[columns.a]\ntype = 'category'\nlevels = ['I', 'II']\nreference = 'III'",
        "unknown reference 'III'",
    ),
    "yes and no": (HEAD + "[columns.a]\ntype = 'yesno'\nlevels = ['ja']", "how no and yes"),
    "fill": (HEAD + "[columns.a]\ntype = 'number'\nfill = nan", "fill must be a number"),
    "a fill of 400 digits": (
        HEAD + f"[columns.a]\ntype = 'number'\nfill = 1{'0' * 400}",
        r"\[columns.a\]: fill must be a number below 1e308",
    ),
    "a text as a fill": (
        HEAD + "[columns.a]\ntype = 'number'\nfill = '1'",
        "fill must be a number",
    ),
    "per nothing": (HEAD + "[columns.a]\ntype = 'number'\nper = 0", "above 0, got 0"),
    "per level": (HEAD + "[columns.a]\ntype = 'yesno'\nper = 10", "units of a number"),
    "no fill": (HEAD + "missing = 'median'\n[columns.a]\ntype = 'number'", "fill = 50.0"),
    "roles": (HEAD + "time = 'y'", "'y' has two roles"),
    "explains itself": (HEAD + "[columns.y]\ntype = 'number'", "'y' has two roles"),
    "nothing": (HEAD + "intercept = false", "nothing to estimate"),
    "events": (HEAD + "positive = 'a'\nnegative = 'a'", "need two levels"),
    "no table": (HEAD + "columns = ['a']", r"such as \[columns.age\]"),
    "no column": (HEAD + "[columns]\na = 1", "must be a table"),
    "TOML": (HEAD + "a = ", "as TOML"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schema_is_told_with_its_remedy(name: str) -> None:
    text, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        parse(text)


def test_everybody_may_know_what_is_wrong_with_a_schema() -> None:
    """It holds no row, and it is the server's: a hospital's answer may say it."""
    with pytest.raises(InputError) as caught:
        parse(HEAD + "missing = 'mean'")
    assert caught.value.public == str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"cannot read nowhere\.toml"):
        read("nowhere.toml")


# ---- cells ----


def test_what_a_cell_means() -> None:
    assert all(map(is_gap, ("", "?", "NA", "na", "NaN", ".", "N/A", "null")))
    assert not any(map(is_gap, ("0", "no", "none", "-9", "nano")))
    assert [yes_or_no(cell) for cell in ("TRUE", "y", "1", "No", "0.0", "2")] == [
        1,
        1,
        1,
        0,
        0,
        None,
    ]
    assert all(
        map(is_date, ("2021-03-09", "9.3.2021", "03/09/21", "9 Mar 2021", "2021-03-09 10:00"))
    )
    assert not any(map(is_date, ("1.5", "-3", "2021", "12-14", "I-II")))


# ---- from a table ----


def table(**columns: list[str]) -> Table:
    """A table of these columns."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(tuple(columns), rows)


SICK = ["sick", "well"] * 20
"""The outcome of 40 rows."""


def type_of(cells: list[str], name: str = "a") -> tuple[Column, list[str]]:
    schema, notes = infer(table(**{name: cells, "ill": SICK}), "ill")
    (column,) = schema.columns
    return column, [note for note in notes if "outcome" not in note]


def test_numbers_and_words_are_told_apart() -> None:
    assert type_of(["0", "1"] * 20) == (Column("a", "number"), [])
    assert type_of(["1.5", "NA"] * 19 + ["-2", "1e3"]) == (Column("a", "number"), [])
    assert type_of(["yes", "No", "", "n"] * 10) == (Column("a", "yesno"), [])
    assert type_of(["true", "0"] * 20) == (Column("a", "yesno"), [])


def test_a_unit_in_the_name_is_taken_over() -> None:
    column, _ = type_of([str(i) for i in range(40)], "weight (kg)")
    assert column == Column("weight (kg)", "number", unit="kg")


def test_texts_that_repeat_are_levels_in_a_natural_order() -> None:
    column, notes = type_of(["II", "I", "NA", "I"] * 10)
    assert column == Column("a", "category", levels=("I", "II"))
    assert "add those that other hospitals have" in notes[0]
    column, notes = type_of(["10+", "9", "2", "9"] * 9 + ["2", "2", "9", "11"])
    assert column.levels == ("2", "9", "11", "10+")
    assert "fewer than 3 rows have 11" in notes[1]


def test_codes_are_numbers_unless_they_are_named() -> None:
    codes = ["4", "1", "2", "3"] * 10
    column, notes = type_of(codes)
    assert column.type == "number"
    assert "--categories a" in notes[0]
    schema, _ = infer(table(a=codes, ill=SICK), "ill", categories=["a"])
    assert schema.columns == (Column("a", "category", levels=("1", "2", "3", "4")),)


LEFT_OUT = {
    "identifiers by name": ("study_id", [str(i) for i in range(40)], "its name"),
    "a person": ("Patient", ["Ann", "Bob"] * 20, "its name"),
    "different texts": ("a", [f"text {i}" for i in range(40)], "all its texts are different"),
    "free text": ("a", [f"text {i // 2}" for i in range(39)] + ["b"], "21 different texts"),
    "one number": ("a", ["5"] * 40, "one value only"),
    "one text": ("a", ["Ulm", "NA"] * 20, "one value only"),
    "only gaps": ("a", ["", "?"] * 20, "no value"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_explains_nothing_is_left_out_with_a_note(case: str) -> None:
    name, cells, why = LEFT_OUT[case]
    column, (note,) = type_of(cells, name)
    assert column == Column(name, "ignore")
    assert repr(name) in note
    assert why in note


def test_names_of_identifiers() -> None:
    assert all(map(is_identifier, ("ID", "patient_id", "PatientID", "MRN", "surname", "last name")))
    assert not any(map(is_identifier, ("age", "patient age", "acid", "fluid", "valid", "")))


def test_dates_are_refused_with_a_remedy() -> None:
    both = table(
        seen=["2021-03-09"] * 40, born=["9.3.1960", "NA"] * 20, age=["1", "2"] * 20, ill=SICK
    )
    with pytest.raises(
        InputError, match=r"'seen', 'born' hold dates.*age in years.*--ignore seen,born"
    ):
        infer(both, "ill")
    schema, _ = infer(both, "ill", ignore=["seen", "born"])
    assert [column.type for column in schema.columns] == ["ignore", "ignore", "number"]


def test_text_among_numbers_is_refused_and_hidden_from_others() -> None:
    with pytest.raises(
        InputError, match=r"1 cells of other text such as '<5'.*--ignore a"
    ) as caught:
        type_of([str(i) for i in range(39)] + ["<5"])
    assert caught.value.public == "column 'a': 1 of 40 cells are not numbers"


def test_medians_are_written_where_gaps_take_them() -> None:
    cells = [str(100.04 + i) for i in range(39)] + ["NA"]  # the median is 119.04
    filled, _ = infer(table(a=cells, ill=SICK), "ill", missing="median")
    assert filled.columns[0].fill == 119.0
    complete, _ = infer(table(a=cells, ill=SICK), "ill")
    assert complete.columns[0].fill is None


def test_the_event_is_named_where_it_is_not_plain() -> None:
    schema, notes = infer(table(a=SICK, ill=["1", "2"] * 20), "ill")
    assert (schema.positive, schema.negative) == ("2", "1")
    assert "'2' counts as the event" in notes[-1]
    for plain in ["yes", "no"], ["0", "1"], ["true", "false"]:
        schema, _ = infer(table(a=SICK, ill=plain * 20), "ill")
        assert (schema.positive, schema.negative) == ("", "")
    schema, notes = infer(table(a=SICK, ill=[str(i) for i in range(40)]), "ill")
    assert schema.positive == ""
    _, notes = infer(table(a=SICK, ill=["A", "B", "C", "A"] * 10), "ill")
    assert "3 levels" in notes[-1]
    assert "needs two" in notes[-1]


def test_columns_with_a_role_are_no_terms() -> None:
    days = [str(i + 1) for i in range(40)]
    made = table(age=days, ill=SICK, days=days, w=days, o=days)
    schema, _ = infer(made, "ill", time="days", weights="w", offset="o")
    assert [column.name for column in schema.columns] == ["age"]
    assert (schema.time, schema.weights, schema.offset) == ("days", "w", "o")
    assert parse(write(schema)) == schema
    with pytest.raises(InputError, match="unknown column 'day'; did you mean 'days'"):
        infer(made, "ill", time="day")
    with pytest.raises(InputError, match="has no rows"):
        infer(made._replace(rows=[]), "ill")


# ---- the command ----


def test_the_command_writes_a_schema_once(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    rows = [f"p{i};{i},5;{'III'[: i % 3 + 1]};{i % 2}" for i in range(40)]
    path.write_text("\n".join(["patient;age;stage;ill", *rows]))
    out = tmp_path / "schema.toml"
    told = command("data", "schema", path, "--outcome", "ill", "--out", out)
    assert "note: column 'patient' is left out" in told.stderr
    assert f"schema: {out}" in told.stdout
    schema = read(out)
    assert [column.type for column in schema.columns] == ["ignore", "number", "category"]
    assert schema.columns[2].levels == ("I", "II", "III")
    again = command("data", "schema", path, "--column", "ill", "--out", out, code=2)
    assert "already exists" in again.stderr
    printed = command("data", "schema", path, "--target", "ill", "--ignore", "age,stage").stdout
    assert [column.type for column in parse(printed).columns] == ["ignore"] * 3
    wrong = command("data", "schema", path, "--outcome", "ill", "--missing", "mean", code=2)
    assert "unknown rule for missing values 'mean'" in wrong.stderr


def test_decimal_commas_between_commas_are_told(tmp_path: Path) -> None:
    """A column of "1,5" is neither an identifier nor a category."""
    path = tmp_path / "north.csv"
    path.write_text("dose,ill\n" + "".join(f'"{i},5",{i % 2}\n' for i in range(8)))
    with pytest.raises(InputError, match=r"'dose'.*use points, or semicolons") as caught:
        infer(read_table(path), "ill")
    assert "0,5" not in caught.value.public
    schema, _ = infer(read_table(path), "ill", ignore=["dose"])
    assert schema.columns[0].type == "ignore"
    with pytest.raises(InputError, match="use points, or semicolons"):
        design(read_table(path), Schema("ill", (Column("dose", "number"),)), "binomial")
    path.write_text("dose;ill\n" + "".join(f"{i},5;{i % 2}\n" for i in range(8)))
    schema, _ = infer(read_table(path), "ill")
    assert schema.columns[0].type == "number"


@pytest.mark.parametrize("levels", [("0", "1", "2"), ("mild", "none", "severe")])
def test_an_outcome_of_three_levels_is_told(levels: tuple[str, ...]) -> None:
    rows = [[str(40 + i), levels[i % 3]] for i in range(12)]
    table = Table(("age", "ill"), rows)
    schema, notes = infer(table, "ill")
    assert any("3 levels" in note and "recode" in note for note in notes)
    with pytest.raises(InputError, match="recode the outcome to two levels") as caught:
        design(table, schema, "binomial")
    assert "recode" in caught.value.public


def test_a_measured_outcome_has_no_levels() -> None:
    rows = [[str(40 + i % 5), str(i / 4)] for i in range(12)]
    _, notes = infer(Table(("age", "score"), rows), "score")
    assert not any("recode" in note for note in notes)


def test_a_code_written_in_two_ways_is_one_level() -> None:
    """One hospital writes 1.0 where another writes 1; a level more would cost a coefficient."""
    rows = [[code, str(i % 2)] for i, code in enumerate(["1", "1.0", "2.0", "2", "3.0"] * 4)]
    schema, _ = infer(Table(("cp", "ill"), rows), "ill", categories=["cp"])
    assert schema.columns[0].levels == ("1", "2", "3.0")
