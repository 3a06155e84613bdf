"""The hospitals' app on a real federation, with tables of words, gaps and other orders.

All that the hospitals and the SuperLink say to each other is read, inside of TLS. Run by
`make test-deploy`, some minutes.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import statsmodels.api
from federation import MISSING, PATIENCE, REASON, ROOT, Federation, Tap, environment, left, until

from fedsso import load_model

APP = ROOT / "examples" / "hospitals"
sys.path.append(str(ROOT / "tests" / "flower"))
clinics, patients = import_module("clinics"), import_module("patients")
GOOD = ("east", "north", "south")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)


class Done(NamedTuple):
    """A run that has ended."""

    log: str  # what `flwr run --stream` showed: the log of the ServerApp
    out: Path
    federation: Federation
    tap: Tap


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """A regression over three good clinics and one with two bad cells."""
    home, out = tmp_path_factory.mktemp("federation"), tmp_path_factory.mktemp("out")
    files = clinics.write(tmp_path_factory.mktemp("clinics"), bad=clinics.SECRET)
    (schema := home / "schema.toml").write_text(clinics.SCHEMA)
    federation = Federation(home, APP)
    tap = Tap(federation)
    try:
        for name in clinics.ORDERS:
            federation.join(name, files / f"{name}.csv", superlink=tap.address)
        until(lambda: federation.online() == 4, "all SuperNodes online")
        run = federation.run(schema=str(schema), min_nodes=4, out=str(out))
        yield Done(run.communicate(timeout=PATIENCE)[0], out, federation, tap)
    finally:
        tap.close()
        federation.end()


def pooled() -> Any:
    """The fit of all rows of the good clinics in one place."""
    x, y = clinics.pooled(GOOD)
    return statsmodels.api.Logit(y, x).fit(disp=0, method="newton", tol=1e-14)


def test_the_run_goes_on_without_the_bad_clinic_and_equals_the_pooled_fit(done: Done) -> None:
    assert done.federation.ended() == ["finished:completed"], done.log
    table = load_model(done.out).coefficients()
    reference = pooled()
    np.testing.assert_allclose(table["estimate"], reference.params, rtol=1e-6)
    np.testing.assert_allclose(table["std_error"], reference.bse, rtol=1e-6)
    assert "age" in done.log
    assert "west" in done.log
    assert "messages to each hospital" in done.log


def test_each_clinic_has_its_numbers(done: Done) -> None:
    found = load_model(done.out).fit
    assert [one.hospital for one in found.hospitals] == list(GOOD)
    assert [one.hospital for one in found.refusals] == ["west"]
    assert found.rows == sum(one.rows for one in found.hospitals) == len(clinics.pooled(GOOD)[1])
    assert all(0.5 < one.auc < 1 for one in found.hospitals)


def test_nothing_of_a_row_is_on_the_wire(done: Done) -> None:
    said = bytes(done.tap.up)
    # The tap does read what is sent: names, the sentence about the column, the names of arrays.
    for seen in (b"east", b"west", b"'age'", b"gradient"):
        assert seen in said
    for secret in ("Miller", "1951-03-04", "Dr ", "doctor", "patient"):
        assert secret.encode() not in said, secret
    # Nor is an age as a number of eight bytes, if it has a fraction that no short sum of bits has;
    # nor are the ages of two rows, one after the other, as numbers of four bytes. A single number
    # of four bytes proves nothing: signatures on the wire are random and hold any by chance.
    for name in clinics.ORDERS:
        ages = [float(row["age"]) for row in clinics.patients(name) if row["age"]]
        odd = [age for age in ages if age % 0.5]
        assert len(odd) > 30
        assert not [age for age in odd if struct.pack("<d", age) in said]
        assert not [two for two in pairwise(ages) if struct.pack("<2f", *two) in said]


def test_nothing_of_a_row_is_in_a_log_of_the_server(done: Done) -> None:
    logs = done.log + (done.federation.home / "superlink.log").read_text()
    written = "".join(path.read_text() for path in done.out.rglob("*.*"))
    assert "'age'" in logs
    for text in (logs, written):
        assert "Miller" not in text
        assert "doctor" not in text
    assert clinics.SECRET in (done.federation.home / "west.log").read_text()


def test_a_hospital_starts_a_process_for_each_message_and_no_torch(done: Done) -> None:
    imported = (done.federation.home / "east.log").read_text()
    count = imported.count(" fedsso.regression.hospital\n")
    assert f"messages to each hospital: {count} " in done.log
    assert " torch\n" not in imported
    assert " pandas\n" not in imported


def test_a_clinic_that_is_killed_in_the_middle_is_left_out(done: Done, tmp_path: Path) -> None:
    log = []
    schema = str(done.federation.home / "schema.toml")
    with done.federation.run(schema=schema, min_nodes=4, out=str(tmp_path)) as run:
        for line in run.stdout or ():
            log.append(line)
            if "round 2:" in line and "south" in done.federation.processes:
                done.federation.kill("south")
    assert done.federation.ended()[0] == "finished:completed", "".join(log)
    found = load_model(tmp_path)
    assert [one.hospital for one in found.fit.hospitals] == ["east", "north"]
    assert {one.hospital for one in found.fit.refusals} == {"south", "west"}
    x, y = clinics.pooled(("east", "north"))
    reference = statsmodels.api.Logit(y, x).fit(disp=0, method="newton", tol=1e-14)
    np.testing.assert_allclose(found.coefficients()["estimate"], reference.params, rtol=1e-6)


def script(home: Path, out: Path, *options: str) -> list[str]:
    home.mkdir()
    return [str(APP / "deploy.sh"), "--out", str(out), *options]


def test_the_script_runs_ones_own_tables_and_leaves_nothing(tmp_path: Path) -> None:
    files = clinics.write(tmp_path / "files")
    (files / "west").mkdir()
    (files / "west.csv").rename(files / "west" / "table.csv")
    (files / "west" / "hospital.toml").write_text("[limits]\nmin-rows = 1000\n")
    (tmp_path / "schema.toml").write_text(clinics.SCHEMA)
    own = ("--files", str(files), "--schema", str(tmp_path / "schema.toml"))
    home, out = tmp_path / "home", tmp_path / "out"
    done = subprocess.run(
        script(home, out, *own),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = load_model(out).coefficients()
    np.testing.assert_allclose(table["estimate"], pooled().params, rtol=1e-6)
    assert "fewer than 1000 complete rows" in done.stdout
    assert not list(home.iterdir())
    assert not left(home)


def test_the_script_cleans_up_when_it_is_hung_up(tmp_path: Path) -> None:
    home = tmp_path / "home"
    data = patients.write(tmp_path / "data")
    command = script(home, tmp_path / "out", "--nodes", "1", "--data", str(data))
    # A shell cannot trap what is ignored when it starts, as below nohup.
    hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, text=True, preexec_fn=hears
    ) as running:
        for line in running.stdout or ():
            if "registered and online" in line:
                break
        running.send_signal(signal.SIGHUP)
        running.communicate(timeout=PATIENCE)
    assert running.returncode == 129
    assert not list(home.iterdir())
    assert not left(home)


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    for options, sentence in {
        ("--files", str(tmp_path)): "--files needs --schema",
        ("--schema", "schema.toml"): "--schema needs --files",
        ("--strategy", "fedavg"): "unknown option --strategy",
        ("--files", "nowhere", "--schema", "none.toml"): "no folder nowhere",
        ("--files", str(tmp_path), "--schema", "none.toml"): "no tables NAME.csv",
    }.items():
        command = [str(APP / "deploy.sh"), *options]
        done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
        assert done.returncode == 1
        assert sentence in done.stderr
