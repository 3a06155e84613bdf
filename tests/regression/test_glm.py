"""fedsso.glm: whatever the data come in, the result is that of the pooled table."""

from __future__ import annotations

import csv
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pandas as pd
import pytest
import torch

import fedsso
import fits
from fedsso import Federation, InputError, glm
from fedsso.regression.limits import UNLIMITED
from fedsso.regression.schema import parse
from fedsso.report.regression.steps import steps

EXPECTED = fits.binomial()


def write(folder: Path, hospital: int, turn: int = 0, extra: bool = False) -> Path:
    """A hospital's table as a CSV file, its columns in another order."""
    table = fits.table(hospital)
    order = [(place + turn) % 4 for place in range(4)]
    path = folder / f"{fits.HOSPITALS[hospital]}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for row in [table.names, *table.rows]:
            cells = [row[place] for place in order]
            writer.writerow([*cells, "ward" if row is table.names else "7b"] if extra else cells)
    return path


def frame(hospital: int) -> pd.DataFrame:
    table = fits.table(hospital)
    found = pd.DataFrame(table.rows, columns=list(table.names))
    return found.assign(age=found["age"].astype(float))


def everybody() -> pd.DataFrame:
    parts = [frame(i).assign(site=name) for i, name in enumerate(fits.HOSPITALS)]
    return pd.concat(parts).sample(frac=1, random_state=1)


def assert_pooled(result: fedsso.Regression) -> None:
    """The fit ends 1e-8 standard errors from the maximum; the errors themselves follow."""
    errors = np.sqrt(np.diag(EXPECTED.covariance))
    distance = np.abs(result.fit.coefficients - EXPECTED.coefficients) / errors
    assert distance.max() < 1e-6
    np.testing.assert_allclose(result.fit.covariance, EXPECTED.covariance, rtol=1e-6)
    assert result.fit.loglik == pytest.approx(EXPECTED.loglik, rel=1e-10)
    assert [one.hospital for one in result.fit.hospitals] == list(fits.HOSPITALS)


@pytest.mark.parametrize(
    "form", ["folder", "list", "paths by name", "one frame", "frames by name", "one file"]
)
def test_every_form_of_data_gives_the_pooled_fit(tmp_path: Path, form: str) -> None:
    paths = [write(tmp_path, i, turn=i, extra=i == 1) for i in range(3)]
    hospital = ""
    data: Any = tmp_path
    if form == "list":
        data = [str(path) for path in paths]
    elif form == "paths by name":
        data = dict(zip(fits.HOSPITALS, paths, strict=True))
    elif form == "frames by name":
        data = {name: frame(i) for i, name in enumerate(fits.HOSPITALS)}
    elif form == "one frame":
        data, hospital = everybody(), "site"
    elif form == "one file":
        data, hospital = tmp_path / "all.csv", "site"
        everybody().to_csv(data, index=False)
    result = glm(data, "binomial", "ill", hospital=hospital)
    assert_pooled(result)


def test_columns_that_not_all_have_are_left_out_with_a_note(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path, i, extra=i == 1)
    result = glm(tmp_path, outcome="ill")
    assert any("left out: ward" in note for note in result.notes)


def test_a_schema_decides_what_columns_mean(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path, i)
    path = tmp_path / "schema.toml"
    path.write_text(fits.SCHEMA)
    for schema in (path, fits.SCHEMA, parse(fits.SCHEMA)):
        assert_pooled(glm(tmp_path, schema=schema))
    other = fits.SCHEMA.replace('levels = ["I", "II", "III"]', 'levels = ["III", "I", "II"]')
    turned = glm(tmp_path, schema=other).coefficients().set_index("term")["estimate"]
    # Compared with stage III, stage I has the negative of III compared with I.
    assert turned["stage: I"] == pytest.approx(-EXPECTED.coefficients[3], rel=1e-6)


def test_columns_can_be_left_out_and_given_roles_beside_a_schema(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path, i)
    terms = glm(tmp_path, schema=fits.SCHEMA, ignore=["smoker"]).coefficients()["term"]
    assert "smoker: yes" not in terms.tolist()
    weighted = glm(tmp_path, schema=fits.SCHEMA, weights="age")
    assert weighted.schema.weights == "age"
    assert "age" not in weighted.coefficients()["term"].tolist()


def test_a_federation_is_fitted_in_the_units_of_its_table() -> None:
    """The table is standardised in float32, so the numbers return with seven figures."""
    x = [[float(row[0]), float(row[2] == "yes")] for i in range(3) for row in fits.table(i).rows]
    y = [int(row[3] == "yes") for i in range(3) for row in fits.table(i).rows]
    names = [name for name in fits.HOSPITALS for _ in range(80)]
    plain = glm(Federation.from_arrays(torch.tensor(x).double(), y, names))
    scaled = glm(Federation.from_arrays(torch.tensor(x).double(), y, names, standardise=True))
    np.testing.assert_allclose(scaled.fit.coefficients, plain.fit.coefficients, rtol=1e-5)
    assert plain.fit.rows == 240  # training and test rows
    assert plain.schema.outcome == "outcome"
    # Standardising fills gaps, and nobody can tell afterwards whether there were any.
    assert any("replaced by medians" in note for note in scaled.notes)
    assert not any("median" in note for note in plain.notes)


def test_what_cannot_be_a_table_is_refused() -> None:
    digits = fedsso.load("digits", clients=3)
    with pytest.raises(InputError, match="1×8×8"):
        glm(digits)
    with pytest.raises(InputError, match="folder of CSV files"):
        glm(3, outcome="ill")
    with pytest.raises(InputError, match="--hospital"):
        glm(frame(0), outcome="ill")
    with pytest.raises(InputError, match="--outcome"):
        glm({"a": frame(0)})
    with pytest.raises(InputError, match="did you mean 'site'"):
        glm(everybody(), outcome="ill", hospital="sites")
    gap = everybody().assign(site=None)
    with pytest.raises(InputError, match="no 'site'"):
        glm(gap, outcome="ill", hospital="site")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weight": "w"}, "'weights'"),
        ({"target": "ill"}, "'outcome'|unknown setting"),
        ({"ties": "efron"}, "survival"),
        ({"tolerance": 0}, "tolerance"),
        ({"rounds": 0}, "rounds"),
        ({"family": "gamma"}, "gamma"),
        ({"family": "cox"}, "time"),
        ({"missing": "mean"}, "mean"),
    ],
)
def test_wrong_settings_are_told_with_a_remedy(settings: dict[str, Any], words: str) -> None:
    tables = {"a": frame(0), "b": frame(1)}
    with pytest.raises(InputError, match=words):
        glm(tables, outcome="ill", **settings)


def test_who_refuses_is_named_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    tables = {"a": frame(0), "b": frame(1), "tiny": frame(2)[:4]}
    with caplog.at_level(logging.WARNING, "fedsso"):
        result = glm(tables, outcome="ill")
    assert [one.hospital for one in result.fit.refusals] == ["tiny"]
    assert any("tiny" in note and "10 complete rows" in note for note in result.notes)
    assert len([one for one in caplog.records if "tiny" in one.message]) == 1
    assert glm(tables, outcome="ill", limits=UNLIMITED).fit.rows == 164


LOST: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "latin-1": lambda path: path.write_bytes("größe,ill\n1,yes\n".encode("latin-1")),
    "empty": Path.touch,
    "ragged": lambda path: path.write_text("age,ill\n1\n"),
}


@pytest.mark.parametrize("kind", LOST)
def test_who_cannot_be_read_is_named_and_the_others_go_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        write(tmp_path, i)
    LOST[kind](tmp_path / "Wels.csv")
    with caplog.at_level(logging.WARNING, "fedsso"):
        result = glm(tmp_path, outcome="ill")
    assert_pooled(result)
    assert [one.hospital for one in result.fit.refusals] == ["Wels"]
    assert any(note.startswith("Wels is excluded: ") for note in result.notes)
    assert str(tmp_path / "Wels.csv") in caplog.text
    with pytest.raises(InputError, match=r"Wels\.csv"):
        glm([tmp_path / "Wels.csv"], outcome="ill")


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match=r"two hospitals would be called '1'"):
        glm({1: frame(0), "1": frame(1)}, outcome="ill")


def test_the_order_of_categories_is_that_of_the_levels() -> None:
    """As with a factor of R: the first is the reference, also where the levels are numbers."""
    levels = ["III", "I", "II"]
    grade = {"I": 3, "II": 2, "III": 1}
    tables = {}
    for i, name in enumerate(fits.HOSPITALS):
        stage = pd.Categorical(frame(i)["stage"], [*levels, "IV"])
        tables[name] = frame(i).assign(stage=stage)
    result = glm(tables, outcome="ill")
    terms = result.coefficients()["term"].tolist()
    assert [term for term in terms if "stage" in term] == ["stage: I", "stage: II"]
    # Compared with stage III, stage I has the negative of III compared with I.
    found = result.coefficients().set_index("term")["estimate"]
    assert found["stage: I"] == pytest.approx(-EXPECTED.coefficients[3], rel=1e-6)
    one = pd.concat([table.assign(site=name) for name, table in tables.items()])
    graded = pd.Categorical(one["stage"].map(grade).astype(int), [1, 3, 2])
    same = glm(one.assign(stage=graded), outcome="ill", hospital="site")
    np.testing.assert_allclose(same.fit.coefficients, result.fit.coefficients, rtol=1e-6)
    assert same.schema.columns[1].levels == ("1", "3", "2")


def test_the_last_of_two_categories_is_the_event() -> None:
    """Sorted, 'dead' would be the reference and 'alive' the event."""
    tables = {}
    for i in range(2):
        ends = frame(i)["ill"].map({"yes": "ends", "no": "lives"})
        tables[str(i)] = frame(i).assign(ill=pd.Categorical(ends, ["lives", "ends"]))
    assert glm(tables, outcome="ill").schema.positive == "ends"


def test_an_optional_column_may_be_none() -> None:
    tables = {"a": frame(0), "b": frame(1)}
    nothing = dict.fromkeys(("weights", "offset", "time", "ignore"))
    wanted = glm(tables, outcome="ill").fit.coefficients
    assert np.array_equal(glm(tables, outcome="ill", **nothing).fit.coefficients, wanted)


def test_columns_may_be_listed_in_a_text() -> None:
    tables = {"a": frame(0), "b": frame(1)}
    names = glm(tables, outcome="ill", ignore="smoker, stage").fit.names
    assert names == ("(intercept)", "age")
    coded = glm(tables, schema=fits.SCHEMA, ignore="smoker,stage").fit.names
    assert coded == names


def test_a_name_may_be_written_with_marks_of_its_own(tmp_path: Path) -> None:
    """A hospital's system may write ö as o and a mark: it has the schema's column all the same."""
    for i in range(3):
        path = write(tmp_path, i)
        form = ("NFC", "NFD")[i % 2]
        path.write_text(normalize(form, path.read_text().replace("smoker", "gröber")))
    schema = fits.SCHEMA.replace("[columns.smoker]", '[columns."gröber"]')
    for form in ("NFC", "NFD"):
        assert_pooled(glm(tmp_path, schema=normalize(form, schema)))
        assert (
            "gröber: yes"
            not in glm(tmp_path, outcome="ill", ignore=[normalize(form, "gröber")]).fit.names
        )
    tables = {str(i): frame(i).rename(columns={"ill": "krank\u0308"}) for i in range(2)}
    assert glm(tables, outcome="krank\u0308").fit.rows == 160


def test_a_coefficient_may_be_that_of_many_units(tmp_path: Path) -> None:
    """The ratio for a single year of 40 000 is 1.0000; for ten it can be read."""
    schema = fits.SCHEMA.replace('unit = "years"', 'unit = "years"\nper = 10')
    tables = {name: frame(i) for i, name in enumerate(fits.HOSPITALS)}
    plain = glm(tables, schema=fits.SCHEMA)
    tens = glm(tables, schema=schema, out=tmp_path / "model")
    first, second = plain.rows()[1], tens.rows()[1]
    assert (second.term, second.unit) == ("age (per 10)", "years")
    for name in ("estimate", "std_error", "low", "high"):
        assert getattr(second, name) == pytest.approx(10 * getattr(first, name), rel=1e-6)
    assert second.ratio == pytest.approx(first.ratio**10, rel=1e-6)
    assert second.statistic == pytest.approx(first.statistic, rel=1e-6)
    again = fedsso.load_model(tmp_path / "model")
    for model in (tens, again):
        np.testing.assert_allclose(model.predict(frame(0)), plain.predict(frame(0)), rtol=1e-6)
    ours, theirs = steps(tens, 0.95)[0], steps(plain, 0.95)[0]
    assert ours[:2] == theirs[:2] == ("age", "per 10 years")
    assert ours[2:] == pytest.approx(theirs[2:], rel=1e-6)
    with pytest.raises(InputError, match="per"):
        glm(tables, schema=schema.replace("per = 10", "per = 0"))


def test_a_wrong_cell_is_quoted_to_its_holder_and_to_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = frame(2).astype(object)
    wrong.loc[3, "age"] = "secret"
    with caplog.at_level(logging.WARNING, "fedsso"):
        result = glm({"a": frame(0), "b": frame(1), "c": wrong}, schema=fits.SCHEMA)
    assert "secret" in caplog.text
    assert "secret" not in result.summary()
    assert any("'age'" in note for note in result.notes)


def test_a_model_is_saved_where_out_says(tmp_path: Path) -> None:
    result = glm(everybody(), outcome="ill", hospital="site", out=tmp_path / "model")
    assert fedsso.load_model(tmp_path / "model").summary() == result.summary()


def test_survival_by_its_first_word_or_by_ties() -> None:
    rows = everybody().assign(days=lambda f: (f["age"] * 7 % 31).round() + 1)
    by_word = glm(rows, "cox breslow", "ill", hospital="site", time="days")
    by_ties = glm(rows, "cox", "ill", hospital="site", time="days", ties="breslow")
    assert by_word.fit.family == by_ties.fit.family == "cox breslow"
    assert by_word.to_csv() == by_ties.to_csv()
    assert glm(rows, "cox", "ill", hospital="site", time="days").fit.family == "cox efron"


def test_clustered_errors_on_request() -> None:
    result = glm(everybody(), outcome="ill", hospital="site", cluster=True)
    assert result.fit.robust is not None
    assert "clustered by hospital" in result.summary()


def test_help_shows_every_setting() -> None:
    signature = inspect.signature(glm)
    assert signature.parameters["missing"].default == "complete"
    assert signature.parameters["cluster"].default is False
    for name in signature.parameters:
        assert name in (inspect.getdoc(glm) or ""), name


def test_numbers_of_a_frame_keep_their_bits() -> None:
    """0.1 + 0.2 is not 0.3: a column that passes through text must stay itself."""
    odd = frame(0).assign(age=np.linspace(0.1, 0.3, 80) + 0.2)
    from fedsso.regression.result.predict import table_of

    cells = [float(row[0]) for row in table_of(odd).rows]
    assert cells == odd["age"].tolist()


def test_a_limit_tells_how_to_lift_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedsso"):
        glm({"a": frame(0), "b": frame(1), "tiny": frame(2)[:1]}, schema=fits.SCHEMA)
    assert "1 row in use" in caplog.text
    assert "--no-limits" in caplog.text
    assert "docs/what-travels.md" in caplog.text


def test_a_rare_reference_level_is_named_where_it_separates() -> None:
    """'M' is sorted before 'f' and 'm', so one slip of the pen is what all are compared with."""
    tables = {}
    for i, name in enumerate(fits.HOSPITALS):
        sexes = ["m" if row % 2 else "f" for row in range(80)]
        tables[name] = frame(i).assign(sex=sexes)
    tables["Graz"].loc[0, "sex"] = "M"
    with pytest.raises(InputError, match=r"no finite estimate.*compared with sex: M"):
        glm(tables, outcome="ill")
