"""What a regression says of itself: tables, text, a saved model, predictions."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fits
from fedsso import load_model
from fedsso.errors import InputError
from fedsso.regression.design import Table, design
from fedsso.regression.result import Regression
from fedsso.regression.result.printed import aligned, figures, p_text
from fedsso.regression.schema import parse
from fedsso.support.intake import Damaged
from fedsso.support.latex import escaped
from fedsso.support.seal import BLANK, MARK, seal

FIT = fits.binomial()
MODEL = Regression(FIT)


def pooled() -> Any:
    """The same model by statsmodels, on all rows."""
    every = [design(fits.table(i), parse(fits.SCHEMA), "binomial") for i in range(3)]
    x = np.concatenate([one.x for one in every])
    y = np.concatenate([one.y for one in every])
    return sm.GLM(y, x, family=sm.families.Binomial()).fit(tol=1e-12, maxiter=100)


# ---- tables ----


def test_coefficients_are_those_of_a_pooled_fit() -> None:
    """Both are Newton's method to rounding: 1e-8 leaves room for the stopping rule."""
    found = MODEL.coefficients()
    expected = pooled()
    assert found["term"].tolist() == [
        "(intercept)",
        "age",
        "stage: II",
        "stage: III",
        "smoker: yes",
    ]
    assert found["unit"].tolist() == ["", "years", "", "", ""]
    np.testing.assert_allclose(found["estimate"], expected.params, rtol=1e-8)
    np.testing.assert_allclose(found["std_error"], expected.bse, rtol=1e-8)
    np.testing.assert_allclose(found["z"], expected.tvalues, rtol=1e-8)
    np.testing.assert_allclose(found["p"], expected.pvalues, rtol=1e-7)
    np.testing.assert_allclose(found[["low", "high"]], expected.conf_int(), rtol=1e-7)
    np.testing.assert_allclose(found["ratio"][1:], np.exp(expected.params[1:]), rtol=1e-8)
    assert math.isnan(found["ratio"][0])  # an intercept compares nothing


def test_the_level_widens_intervals_and_ratios_can_be_left_out() -> None:
    narrow = MODEL.coefficients(level=0.5)
    np.testing.assert_allclose(
        narrow[["low", "high"]], pooled().conf_int(alpha=0.5), rtol=1e-7, atol=1e-9
    )
    assert list(MODEL.coefficients(ratios=False).columns)[-1] == "high"


@pytest.mark.parametrize("level", [0, 1, 1.5, "95", True])
def test_a_level_that_is_none_is_refused(level: Any) -> None:
    with pytest.raises(InputError, match="level"):
        MODEL.coefficients(level=level)


def test_sandwich_errors_are_used_where_they_were_asked_for() -> None:
    robust = Regression(fits.binomial(robust=4 * FIT.covariance))
    ratio = robust.coefficients()["std_error"] / MODEL.coefficients()["std_error"]
    np.testing.assert_allclose(ratio, 2.0)
    assert "clustered by hospital" in robust.summary()


def test_clustered_tests_are_students_with_one_less_than_the_hospitals() -> None:
    """Three hospitals: half the 95 % interval is 4.3027 standard errors, not 1.96."""
    robust = Regression(fits.binomial(robust=FIT.covariance))
    found = robust.coefficients()
    assert "t" in found.columns
    wide = (found["high"] - found["estimate"]) / found["std_error"]
    np.testing.assert_allclose(wide, 4.302652730, rtol=1e-8)
    patient = pd.DataFrame({"age": [60], "stage": ["I"], "smoker": ["no"]})
    row = robust.predict(patient).iloc[0]
    reach = np.log(row.prediction_high / (1 - row.prediction_high)) - row.linear_predictor
    assert reach == pytest.approx(4.302652730 * row.linear_std_error, rel=1e-8)


def test_a_gaussian_model_has_t_tests_and_no_ratios() -> None:
    """10 degrees of freedom: half the 95 % interval is 2.2281 standard errors, not 1.96."""
    gaussian = Regression(fits.binomial(family="gaussian", residual_df=10))
    found = gaussian.coefficients()
    assert list(found.columns) == [
        *("term", "unit", "estimate", "std_error"),
        *("t", "p", "low", "high"),
    ]
    wide = (found["high"] - found["estimate"]) / found["std_error"]
    np.testing.assert_allclose(wide, 2.228138852, rtol=1e-8)


def test_hospitals_are_in_the_order_of_their_numbers() -> None:
    one = FIT.hospitals[0]
    many = tuple(replace(one, hospital=name) for name in ("site 10", "site 9", "site 1"))
    found = Regression(fits.binomial(hospitals=many)).hospitals()
    assert found["hospital"].tolist() == ["site 1", "site 9", "site 10"]
    assert list(found.columns) == [
        *("hospital", "rows", "dropped", "observed", "expected", "auc", "brier")
    ]


# ---- text ----


def test_the_summary_says_what_r_says_and_what_a_federation_adds() -> None:
    text = MODEL.summary()
    (age,) = [line for line in text.splitlines() if line.startswith("age")]
    row = MODEL.coefficients().iloc[1]
    assert age.split()[:4] == ["age", "years", f"{row.estimate:.5f}", f"{row.std_error:.5f}"]
    for words in (
        "Logistic regression of ill (yes) over 3 hospitals",
        f"{FIT.rows} rows, {FIT.events:.0f} events; 2 more left out because of missing values",
        "odds ratio",
        f"Log-likelihood {FIT.loglik:.4f}",
        f"AIC {FIT.aic:.2f}",
        "Reference levels: stage: I, smoker: no",
        "Converged after 9 rounds; 1.5 kB up and 12 kB down",
        "Note: Wels is excluded",
    ):
        assert words in text, words
    assert str(MODEL) == text
    assert repr(MODEL).startswith("Regression(binomial, ill ~ age + stage: II")


def test_what_did_not_converge_says_so_in_capitals() -> None:
    assert "NOT CONVERGED" in Regression(fits.binomial(converged=False)).summary()


def test_csv_keeps_every_bit(tmp_path: Path) -> None:
    text = MODEL.to_csv(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == text
    found = list(csv.DictReader(io.StringIO(text)))
    assert [float(row["estimate"]) for row in found] == FIT.coefficients.tolist()
    assert found[1]["unit"] == "years"


def test_no_name_is_a_formula_of_a_spreadsheet(tmp_path: Path) -> None:
    """Numbers stay numbers, below 0 as well."""
    schema = fits.SCHEMA.replace("[columns.age]", '[columns."=1+1"]')
    terms = tuple(
        term._replace(name=term.name.replace("age", "=1+1"), column="=1+1")
        if term.column == "age"
        else term
        for term in FIT.terms
    )
    hospitals = (replace(FIT.hospitals[0], hospital="=cmd|'/C calc'!A0"), *FIT.hospitals[1:])
    fit = fits.binomial(schema=schema, terms=terms, hospitals=hospitals)
    Regression(fit).save(tmp_path)
    assert "\n'=cmd|'/C calc'!A0,80," in (tmp_path / "hospitals.csv").read_text()
    lines = (tmp_path / "coefficients.csv").read_text().splitlines()
    _, (_, _, intercept, *_), (name, *_), *_ = csv.reader(lines)
    assert name == "'=1+1"
    assert float(intercept) == FIT.coefficients[0] < 0


def test_latex_is_a_table_whose_names_mean_nothing_to_latex() -> None:
    odd = fits.SCHEMA.replace("columns.age", 'columns."age_%&$#{}~^\\\\"')
    terms = tuple(
        term._replace(name="age_%&$#{}~^\\", column="age_%&$#{}~^\\")
        if term.column == "age"
        else term
        for term in FIT.terms
    )
    text = Regression(fits.binomial(schema=odd, terms=terms)).to_latex()
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + len(FIT.terms)
    assert all(line.replace(r"\&", "").count("&") == 5 for line in rows)
    assert r"age\_\%\&\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 1
    assert escaped("100 %") == r"100 \%"


def test_html_of_a_notebook_shows_names_as_they_are() -> None:
    evil = "<script>alert(1)</script>"
    terms = (FIT.terms[0], *[term._replace(name=evil) for term in FIT.terms[1:2]], *FIT.terms[2:])
    html = Regression(fits.binomial(terms=terms))._repr_html_()
    assert evil not in html
    assert "&lt;script&gt;" in html


def test_numbers_are_shown_with_figures_that_count() -> None:
    assert [figures(v) for v in (0.0, 12345.6, 1e-7, 1e9, math.inf, math.nan)] == [
        *("0.0000", "12346", "1.000e-07", "1.000e+09", "Inf", ".")
    ]
    assert [p_text(p) for p in (0.0, 0.5, 0.0001, math.nan)] == [
        "<2e-16",
        "0.5000",
        "1.00e-04",
        ".",
    ]
    assert aligned([["a", "b"], ["long", "1"]], 1) == ["a     b", "long  1"]


# ---- the saved model ----


def same(one: Regression, other: Regression) -> bool:
    return one.summary() == other.summary() and one.to_csv() == other.to_csv()


def test_a_saved_model_is_the_same_again(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "model")
    back = load_model(tmp_path / "model")
    assert same(back, MODEL)
    np.testing.assert_array_equal(back.fit.covariance, FIT.covariance)
    assert back.fit.hospitals[0].roc == FIT.hospitals[0].roc
    assert back.fit.hospitals[0].calibration == FIT.hospitals[0].calibration
    assert back.fit.trace == FIT.trace
    assert same(load_model(tmp_path / "model" / "model.json"), MODEL)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {
        *("model.json", "schema.toml", "coefficients.csv", "hospitals.csv", "summary.txt")
    }
    assert (tmp_path / "model" / "summary.txt").read_text() == MODEL.summary()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("steps", range(12))
def test_a_killed_save_leaves_the_old_model_or_the_new_one_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, old: bool
) -> None:
    """Whichever change of the folder the process dies at: no text is of another model."""
    new = Regression(replace(FIT, rounds=9))
    if old:
        MODEL.save(tmp_path, "report.html")
    left = steps

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *more: Any, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
            change(path, *more, **options)

        return made

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr("os.replace", counted(os.replace))
        patch.setattr("pathlib.Path.unlink", counted(Path.unlink))
        new.save(tmp_path, "report.html")
    if old or (tmp_path / "model.json").exists():
        found = load_model(tmp_path)
        assert same(found, MODEL) or same(found, new)
        texts = {"summary.txt": found.summary(), "coefficients.csv": found.to_csv()}
        for name, text in texts.items():
            path = tmp_path / name
            assert not path.exists() or path.read_text() == text
    for name in (".lock", f".model.json.{'0' * 16}.tmp"):  # a killed process leaves them
        (tmp_path / name).write_text("half")
    new.save(tmp_path, "report.html")
    assert same(load_model(tmp_path), new)
    assert (tmp_path / "summary.txt").read_text() == new.summary()
    assert len(list(tmp_path.iterdir())) == 6


def test_saving_again_replaces_the_model_but_nothing_of_somebody_else(tmp_path: Path) -> None:
    MODEL.save(tmp_path)
    changed = Regression(fits.binomial(notes=("another",)))
    changed.save(tmp_path)
    assert load_model(tmp_path).notes == ("another",)
    (tmp_path / "model.json").write_text('{"weights": [1, 2]}')
    with pytest.raises(InputError, match="not a model written by fedsso"):
        MODEL.save(tmp_path)


def test_saving_does_not_replace_a_schema_that_somebody_wrote(tmp_path: Path) -> None:
    own = tmp_path / "schema.toml"
    own.write_text("# corrected by hand\n" + fits.SCHEMA)
    with pytest.raises(InputError, match="choose another folder"):
        MODEL.save(tmp_path)
    assert own.read_text().startswith("# corrected by hand")
    assert list(tmp_path.iterdir()) == [own]


def test_a_model_without_its_schema_file_still_predicts(tmp_path: Path) -> None:
    MODEL.save(tmp_path)
    (tmp_path / "schema.toml").unlink()
    assert same(load_model(tmp_path), MODEL)


def test_a_schema_that_was_changed_is_refused(tmp_path: Path) -> None:
    """It would change nothing: the model has its own copy."""
    MODEL.save(tmp_path)
    path = tmp_path / "schema.toml"
    path.write_text(path.read_text() + "# a comment is no change\n")
    load_model(tmp_path)
    path.write_text(path.read_text().replace('"years"', '"months"'))
    with pytest.raises(InputError, match="changed since the model was fitted"):
        load_model(tmp_path)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_damaged_model_is_refused(tmp_path: Path, place: float) -> None:
    MODEL.save(tmp_path)
    path = tmp_path / "model.json"
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"model\.json"):
        load_model(tmp_path)


def forged(tmp_path: Path, **changes: Any) -> Path:
    """A model with other values and a right checksum, as somebody else could write it."""
    MODEL.save(tmp_path)
    path = tmp_path / "model.json"
    table = json.loads(path.read_text())
    text = json.dumps({**table, **changes, "seal": BLANK})
    path.write_bytes(seal(text.encode()))
    (tmp_path / "schema.toml").unlink()
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"coefficients": [1.0]}, "shape"),
        ({"coefficients": ["a"] * 5}, "no number"),
        ({"covariance": [[1.0]]}, "shape"),
        ({"terms": [["ages", "age", "", "years", True]]}, "not those of its schema"),
        ({"terms": [["age", "age", "", "years", True, 7]]}, "Term has 5 values"),
        ({"rows": 1.5}, "rows is no whole number"),
        ({"aic": "x"}, "aic is no number"),
        ({"family": 3}, "family is no text"),
        ({"family": "gamma"}, "unknown family"),
        ({"schema": 'outcome = "ill"\nmood = "bad"'}, "unknown key"),
        ({"trace": [[1, 2.0]]}, "Round has"),
        ({"hospitals": [{}]}, "hospital is wrong"),
        ({"hospitals": 3}, "hospitals is no list"),
        ({"rows": 10**400}, "a whole number of 401 digits"),
        ({"mean": [10**400] * 5}, "a whole number of 401 digits"),
        ({"bytes_up": 2**64}, "a whole number of 20 digits"),
        ({"loglik": math.inf}, "Infinity is no finite number"),
        ({"deviance": math.nan}, "NaN is no finite number"),
        ({"coefficients": [None] * 5}, "numbers that no fit has"),
        ({"coefficients": [1e300] * 5}, "numbers that no fit has"),
        ({"covariance": (-np.eye(5)).tolist()}, "numbers that no fit has"),
    ],
)
def test_a_forged_model_is_refused_with_a_sentence(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = forged(tmp_path, **changes)
    with pytest.raises(InputError, match=words):
        load_model(path)


def test_forged_numbers_that_are_some_are_drawn(tmp_path: Path) -> None:
    """An odds ratio of exp(1e20), and rounds that do not rise."""
    trace = [[7, -1.0, 1.0, 1.0, True, True], [7, -0.5, 0.5, 0.5, True, True]]
    coefficients = [1.0, 1e20, 0.1, 0.2, 0.3]
    model = load_model(forged(tmp_path, coefficients=coefficients, trace=trace))
    model.report(tmp_path / "report.html")
    assert "1.000e+20" in (tmp_path / "report.html").read_text()


def test_where_there_is_no_model_a_sentence_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fedsso glm --out"):
        load_model(tmp_path)
    (tmp_path / "model.json").write_text(f'["{MARK}"]')
    with pytest.raises(Damaged):
        load_model(tmp_path)


# ---- new patients ----


def test_a_prediction_is_worked_out_by_hand() -> None:
    """Age 60, stage III, no smoker: x = (1, 60, 0, 1, 0); a dozen operations in float64."""
    patients = pd.DataFrame(
        {"more": ["?"], "smoker": [False], "stage": ["III"], "age": [60]}, index=["p7"]
    )
    found = MODEL.predict(patients, level=0.9)
    x = np.array([1.0, 60.0, 0.0, 1.0, 0.0])
    eta = float(x @ FIT.coefficients)
    error = math.sqrt(x @ FIT.covariance @ x)
    wide = 1.6448536269514722  # the 95 % point of the normal distribution
    assert found.index.tolist() == ["p7"]
    row = found.loc["p7"]
    assert row.linear_predictor == pytest.approx(eta, rel=1e-12)
    assert row.linear_std_error == pytest.approx(error, rel=1e-12)
    chance = [1 / (1 + math.exp(-eta - shift)) for shift in (0, -wide * error, wide * error)]
    assert [row.prediction, row.prediction_low, row.prediction_high] == pytest.approx(chance)


def test_patients_with_gaps_or_levels_that_nobody_had_have_no_prediction() -> None:
    terms = [term for term in FIT.terms if term.level != "II"]
    keep = [place for place, term in enumerate(FIT.terms) if term.level != "II"]
    part = Regression(
        fits.binomial(
            terms=tuple(terms),
            coefficients=FIT.coefficients[keep],
            covariance=FIT.covariance[np.ix_(keep, keep)],
            mean=FIT.mean[keep],
            deviation=FIT.deviation[keep],
        )
    )
    rows = [["50", "I", "no"], ["50", "II", "no"], ["", "I", "no"]]
    found = part.predictions(Table(("age", "stage", "smoker"), rows))
    assert np.isnan(found.prediction).tolist() == [False, True, True]


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    path.write_text("age,smoker\n50,yes\n")
    with pytest.raises(InputError, match="stage"):
        MODEL.predict(path)
    path.write_text("age,smoker,stage\n50,yes,IX\n")
    with pytest.raises(InputError, match="IX"):
        MODEL.predict(path)
    with pytest.raises(InputError, match="got int"):
        MODEL.predict(7)


def test_hazards_are_relative_to_the_average_patient() -> None:
    """Survival data have no intercept; at the means and reference levels the ratio is 1."""
    keep = slice(1, None)
    cox = Regression(
        fits.binomial(
            family="cox efron",
            schema=fits.SCHEMA.replace('positive = "yes"', 'positive = "yes"\ntime = "days"'),
            terms=FIT.terms[keep],
            coefficients=FIT.coefficients[keep],
            covariance=FIT.covariance[keep, keep],
            mean=FIT.mean[keep],
            deviation=FIT.deviation[keep],
        )
    )
    average = pd.DataFrame({"age": [FIT.mean[1]], "stage": ["I"], "smoker": ["no"]})
    found = cox.predict(average).iloc[0]
    assert found.prediction == pytest.approx(1.0, abs=1e-12)
    assert found.linear_std_error == pytest.approx(0.0, abs=1e-12)
    ten = cox.predict(average.assign(age=FIT.mean[1] + 10)).iloc[0]
    assert ten.prediction == pytest.approx(math.exp(10 * FIT.coefficients[1]), rel=1e-12)
    assert "hazard ratio" in cox.summary()
    assert "stratified by hospital, efron ties" in cox.summary()
