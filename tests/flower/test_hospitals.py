"""The hospitals' app: heart disease, tables of one's own, and the whole of it in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import clinics
import numpy as np
import patients
import pytest
import statsmodels.api
from flwr.app import Array, Context, Message, RecordDict
from flwr.common.serde import message_to_proto
from grid import NODES, RUN, SERVER, LocalGrid, Tamper

import fedsso
from fedsso.errors import InputError
from fedsso.regression import schema
from fedsso.regression.design import design

APP = Path(__file__).parents[2] / "examples" / "hospitals"
sys.path.append(str(APP))
heart, client, server = (
    import_module(f"hospitals.{name}") for name in ("heart", "client_app", "server_app")
)
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
HERE = Path(os.environ.get("FEDSSO_DATA", ""))
needs_data = pytest.mark.skipif(
    not (HERE / "processed.va.data").is_file(),
    reason="needs the heart disease files: set FEDSSO_DATA",
)


def fitted(nodes: list[dict[str, Any]], tamper: Tamper | None = None, **config: Any) -> None:
    """Run the app with nodes in this process. `tamper` sees all that the server is sent."""
    run_config = CONFIG | {name.replace("_", "-"): value for name, value in config.items()}
    grid = LocalGrid(client.app, nodes, tamper)
    for context in grid.contexts.values():
        context.run_config = run_config
    server.app(grid, Context(RUN, SERVER, {}, RecordDict(), run_config))


def kept(arrived: list[Message]) -> Tamper:
    """Keeps all replies in a list."""
    return lambda reply: arrived.append(reply) or reply


@pytest.fixture
def study(tmp_path: Path) -> dict[str, Any]:
    """The run config of a simulation over four clinics."""
    (tmp_path / "schema.toml").write_text(clinics.SCHEMA)
    files = clinics.write(tmp_path / "files")
    return {
        "files": str(files),
        "schema": str(tmp_path / "schema.toml"),
        "out": str(tmp_path / "out"),
    }


SIMULATED = [{"partition-id": i} for i in range(4)]


# ---- the files beside the app ----


@pytest.mark.skipif(not which("openssl"), reason="needs openssl")
@pytest.mark.parametrize("name", ["deploy.sh", "README.md"])
def test_certificates_last_longer_than_a_year(name: str, tmp_path: Path) -> None:
    text = (APP / name).read_text()
    commands = re.findall(r"^ *(openssl (?:req|x509) (?:.*\\\n)*.*)$", text, re.MULTILINE)
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    script = "\n".join(["set -e", *commands, "openssl verify -CAfile ca.crt server.pem"])
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    for certificate in ("ca.crt", "server.pem"):
        year = ["openssl", "x509", "-checkend", str(366 * 86400), "-in", tmp_path / certificate]
        assert "will not expire" in subprocess.run(year, capture_output=True, text=True).stdout


# ---- the app as a whole ----


def test_it_equals_the_pooled_fit_and_the_fit_in_one_process(study: dict[str, Any]) -> None:
    fitted(SIMULATED, **study)
    found = fedsso.load_model(study["out"])
    x, y = clinics.pooled()
    reference = statsmodels.api.Logit(y, x).fit(disp=0, method="newton", tol=1e-14)
    table = found.coefficients()
    np.testing.assert_allclose(table["estimate"], reference.params, rtol=1e-6)
    np.testing.assert_allclose(table["std_error"], reference.bse, rtol=1e-6)
    here = fedsso.glm(study["files"], "binomial", schema=study["schema"])
    assert np.array_equal(here.coefficients()["estimate"], table["estimate"])
    assert found.fit.rows == len(y)


def test_it_says_how_many_messages_there_were(
    study: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arrived: list[Message] = []
    fitted(SIMULATED, kept(arrived), **study)
    told = capsys.readouterr().out
    assert f"messages to each hospital: {len(arrived) // 4} (1 describe, " in told
    assert ", 1 assess)" in told
    assert "stage: III" in told


def test_a_bad_cell_excludes_one_clinic_and_is_in_no_message(study: dict[str, Any]) -> None:
    clinics.write(Path(study["files"]), bad=clinics.SECRET)
    arrived: list[Message] = []
    fitted(SIMULATED, kept(arrived), **study)
    found = fedsso.load_model(study["out"]).fit
    assert [one.hospital for one in found.hospitals] == ["east", "north", "south"]
    ((hospital, reason),) = found.refusals
    assert hospital == "west"
    assert "'age'" in reason
    sent = b"".join(message_to_proto(reply).SerializeToString() for reply in arrived)
    assert b"'age'" in sent
    written = b"".join(path.read_bytes() for path in Path(study["out"]).rglob("*.*"))
    for text in (sent, written):
        assert b"Miller" not in text
        assert b"doctor" not in text


def test_a_run_that_nobody_answers_ends_with_a_sentence(
    study: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for path in Path(study["files"]).iterdir():
        path.write_text("age,ill\n50,yes\n")
    with pytest.raises(InputError, match="all hospitals are excluded"):
        fitted(SIMULATED, **study)
    assert "there is no result: all hospitals are excluded" in caplog.text
    assert not Path(study["out"]).exists()


def test_a_clinic_that_is_gone_in_the_middle_is_left_out(study: dict[str, Any]) -> None:
    lost = NODES[2]
    answers = 0

    def lose(reply: Message) -> Message | None:
        nonlocal answers
        answers += reply.metadata.src_node_id == lost
        return None if answers > 4 and reply.metadata.src_node_id == lost else reply

    fitted(SIMULATED, lose, **study)
    found = fedsso.load_model(study["out"])
    assert [one.hospital for one in found.fit.hospitals] == ["east", "north", "west"]
    assert [one.hospital for one in found.fit.refusals] == ["south"]
    assert answers == 6  # four answers, and two that were lost
    x, y = clinics.pooled(("east", "north", "west"))
    reference = statsmodels.api.Logit(y, x).fit(disp=0, method="newton", tol=1e-14)
    np.testing.assert_allclose(found.coefficients()["estimate"], reference.params, rtol=1e-6)


@pytest.mark.parametrize("value", [np.array([3]), np.array([1e300]), np.zeros((0, 0))])
def test_a_clinic_whose_last_answer_cannot_be_right_is_left_out(
    study: dict[str, Any], value: np.ndarray[Any, Any]
) -> None:
    def lie(reply: Message) -> Message:
        (arrays,) = reply.content.array_records.values()
        if reply.metadata.src_node_id == NODES[2] and "calibration" in arrays:
            arrays["rows"] = Array(value)
        return reply

    fitted(SIMULATED, lie, **study)
    found = fedsso.load_model(study["out"])
    ((hospital, reason),) = found.fit.refusals
    assert hospital == "south"
    assert "answered 'assess' wrongly: rows" in reason
    x, y = clinics.pooled(("east", "north", "west"))
    reference = statsmodels.api.Logit(y, x).fit(disp=0, method="newton", tol=1e-14)
    np.testing.assert_allclose(found.coefficients()["estimate"], reference.params, rtol=1e-6)


def test_more_nodes_than_tables_are_told_so(study: dict[str, Any]) -> None:
    fitted([*SIMULATED, {"partition-id": 4}], **study)
    ((_, reason),) = fedsso.load_model(study["out"]).fit.refusals
    assert "there are 4 tables" in reason


def test_a_node_with_a_folder_of_its_own_ignores_what_the_server_says(
    study: dict[str, Any], tmp_path: Path
) -> None:
    nodes = []
    for name in ("east", "north"):
        folder = tmp_path / name
        folder.mkdir()
        (Path(study["files"]) / f"{name}.csv").rename(folder / "table.csv")
        nodes.append({"data-folder": str(folder), "name": name})
    fitted(nodes, **study)
    found = fedsso.load_model(study["out"]).fit
    assert [(one.hospital, one.dropped) for one in found.hospitals] == [("east", 14), ("north", 11)]


# ---- heart disease ----


def test_numbers_of_heart_disease_become_words(tmp_path: Path) -> None:
    path = tmp_path / "processed.va.data"
    path.write_text(
        "63.0,1,4.0,145,0,1,2,150,0,2.3,3,0,6,0\n\n37,0,2,?,250,0,0,187,1,3.5,1,?,?,3\n"
    )
    table = heart.read(path)
    assert dict(zip(table.names, table.rows[0], strict=True)) == {
        "age": "63.0",
        "sex": "male",
        "chest_pain": "none",
        "blood_pressure": "145",
        "cholesterol": "",
        "blood_sugar": "yes",
        "ecg": "hypertrophy",
        "heart_rate": "150",
        "angina": "no",
        "st_depression": "2.3",
        "st_slope": "down",
        "vessels": "0",
        "thallium": "fixed",
        "disease": "no",
    }
    assert table.rows[1][-1] == "yes"
    assert table.lines == (1, 3)
    assert heart.name(path) == "va"
    path.write_text(f"63,{clinics.SECRET}\n")
    with pytest.raises(InputError, match="line 1: has 2 cells, expected 14") as caught:
        heart.read(path)
    assert caught.value.public == "a row has 2 cells, expected 14"


def test_the_shipped_schema_reads_made_up_patients(tmp_path: Path) -> None:
    """Their codes are no whole numbers, so the schema must refuse them, by column and count."""
    patients.write(tmp_path)
    table = heart.read(tmp_path / "processed.va.data")
    with pytest.raises(InputError) as caught:
        design(table, schema.read(heart.SCHEMA), "binomial")
    assert "'sex'" in caught.value.public


def test_without_its_files_the_app_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSO_DATA", str(tmp_path))
    with pytest.raises(InputError, match="run `fedsso data get heart`"):
        client.simulated(0, "")
    with pytest.raises(InputError, match=r"has no files \*\.csv"):
        client.simulated(0, str(tmp_path))


@needs_data
def test_heart_disease_equals_the_pooled_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSO_DATA", str(HERE))
    fitted(SIMULATED, out=str(tmp_path))
    x, y = [], []
    for path in heart.files():
        made = design(heart.read(path), schema.read(heart.SCHEMA), "binomial")
        x.append(made.x)
        y.append(made.y)
    reference = statsmodels.api.Logit(np.concatenate(y), np.concatenate(x)).fit(disp=0)
    found = fedsso.load_model(tmp_path)
    table = found.coefficients()
    np.testing.assert_allclose(table["estimate"], reference.params, rtol=1e-6)
    np.testing.assert_allclose(table["std_error"], reference.bse, rtol=1e-6)
    assert [one.hospital for one in found.fit.hospitals] == list(heart.HOSPITALS)
