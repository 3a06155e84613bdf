"""`fedsso glm`, `fedsso predict`, and `fedsso report` of a saved regression."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from test_glm import write

import fedsso as library
import fits
from console import fedsso, mentions


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospitals")
    for i in range(3):
        write(folder, i, turn=i, extra=i == 1)
    return folder


@pytest.fixture(scope="module")
def model(hospitals: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "model"
    fedsso("glm", "--files", hospitals, "--outcome", "ill", "--out", out)
    return out


def test_glm_prints_the_summary_that_it_saves(hospitals: Path, model: Path) -> None:
    done = fedsso("glm", "--files", hospitals, "--column", "ill")
    assert done.stdout == (model / "summary.txt").read_text()
    assert done.stdout == library.load_model(model).summary()
    assert (model / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_model_is_replaced_and_a_run_is_not(hospitals: Path, tmp_path: Path) -> None:
    command = ("glm", "--files", hospitals, "--outcome", "ill", "--out", tmp_path / "out")
    assert "replaces" not in fedsso(*command).stderr
    assert mentions(fedsso(*command).stderr, "it replaces the one that was there")
    (tmp_path / "out" / "spec.toml").write_text("")
    done = fedsso(*command, code=2)
    assert mentions(done.stderr, "already holds a run; choose another folder")


def test_json_is_one_document_with_all_tables(hospitals: Path) -> None:
    done = fedsso("glm", "--files", hospitals, "--outcome", "ill", "--json")
    found = json.loads(done.stdout)
    assert [row["term"] for row in found["coefficients"]][:2] == ["(intercept)", "age"]
    assert found["coefficients"][0]["ratio"] is None
    assert [one["hospital"] for one in found["hospitals"]] == list(fits.HOSPITALS)
    assert found["converged"] is True


def test_verbose_tells_the_rounds(hospitals: Path) -> None:
    done = fedsso("glm", "--files", hospitals, "--outcome", "ill", "--verbose")
    assert "round 1: log-likelihood" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--outcome", "sick"], "sick"),
        (["--family", "gamma", "--outcome", "ill"], "gamma"),
        (["--outcome", "ill", "--missing", "mean"], "mean"),
        (["--outcome", "ill", "--level", "95"], "level"),
        (["--outcome", "ill", "--schema", "nowhere.toml"], "nowhere.toml"),
        ([], "--outcome"),
    ],
)
def test_wrong_input_is_a_sentence(hospitals: Path, arguments: list[str], words: str) -> None:
    done = fedsso("glm", "--files", hospitals, *arguments, code=2)
    assert mentions(done.stderr, words)
    assert "Traceback" not in done.stderr


def test_predictions_follow_the_columns_of_the_table(model: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("patient;stage;smoker;age\n7;II;yes;55,5\n8;I;no;\n")
    out = tmp_path / "predictions.csv"
    done = fedsso("predict", model, new, "--out", out)
    assert "1 of 2 patients have no prediction" in done.stderr
    first, second = csv.DictReader(out.read_text().splitlines())
    told = library.load_model(model).predict(new)
    assert float(first["prediction"]) == pytest.approx(told["prediction"][0], rel=1e-9)
    assert (first["patient"], second["patient"], second["prediction"]) == ("7", "8", "")
    again = fedsso("predict", model, new)
    assert again.stdout == out.read_text()
    refused = fedsso("predict", model, new, "--out", out, code=2)
    assert mentions(refused.stderr, "already exists")


def test_predictions_repeat_no_formula(model: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("@who,age,smoker,stage,change\n=1+1,71,yes,III,-2.5\n")
    lines = fedsso("predict", model, table).stdout.splitlines()
    assert lines[0].startswith("'@who,age,")
    assert lines[1].startswith("'=1+1,71,yes,III,-2.5,0.")


def test_report_of_a_saved_regression(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    fedsso("report", model, "--out", page, "--title", "Three hospitals")
    assert "<h1>Three hospitals</h1>" in page.read_text()


@pytest.mark.parametrize("below", ["", "model"])
def test_a_model_does_not_lie_among_the_tables(hospitals: Path, below: str) -> None:
    out = hospitals / below
    done = fedsso("glm", "--files", hospitals, "--outcome", "ill", "--out", out, code=2)
    assert mentions(done.stderr, "choose one elsewhere")
    with pytest.raises(library.InputError, match="elsewhere"):
        library.glm(hospitals, outcome="ill", out=out)
    assert len(list(hospitals.iterdir())) == 3


def test_survival_without_a_time_is_one_line(hospitals: Path) -> None:
    """No hospital is asked, so that none is said to refuse."""
    done = fedsso("glm", "--files", hospitals, "--outcome", "ill", "--family", "cox", code=2)
    assert mentions(done.stderr, "--time")
    assert "is excluded" not in done.stderr
