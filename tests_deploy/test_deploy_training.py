"""The training app on a real federation: FedSSO around FedAvg, over TLS.

Run by `make test-deploy`, some minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import MISSING, PATIENCE, REASON, ROOT, Federation, until
from numpy.typing import NDArray

import fedsso
from fedsso.experiment.trace import Trace

APP = ROOT / "examples" / "training"
sys.path += [str(APP), str(ROOT / "tests" / "flower")]
task, patients = import_module("training.task"), import_module("patients")
NAMES = task.HOSPITALS[:2]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hospitals' files, or such of made-up patients."""
    folder = Path(os.environ.get("FEDSSO_DATA", ""))
    if all((folder / f"processed.{name}.data").is_file() for name in task.HOSPITALS):
        return folder
    return Path(patients.write(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Federation]:
    """Two hospitals online."""
    made = Federation(tmp_path_factory.mktemp("federation"), APP)
    try:
        for name in NAMES:
            made.join(name, data / f"processed.{name}.data")
        until(lambda: made.online() == 2, "both SuperNodes online")
        yield made
    finally:
        made.end()


def simulated(data: Path, names: tuple[str, ...], rounds: int) -> NDArray[np.float32]:
    """The simulator's model of the same hospitals."""
    numbers = [task.HOSPITALS.index(name) for name in names]
    each = [task.load({"partition-id": i}, str(data))[0] for i in numbers]
    rows = [(torch.tensor(own.x[:, :-1]), torch.tensor(own.y).long()) for own in each]
    fed = fedsso.Federation.from_clients(rows, test_fraction=0, classes=2)
    options: Mapping[str, object] = {
        "rounds": rounds,
        "local_steps": 5,
        "batch_size": None,
        "loss": "bce",
    }
    server = fedsso.FedSSO(alpha=0.03, shapes="none")  # as on Flower
    return fedsso.simulate(fed, "mclr", server, **options).x.numpy()


def model(folder: Path) -> NDArray[np.float64]:
    lines = (folder / "model.csv").read_text().splitlines()
    return np.array([float(line.partition(",")[2]) for line in lines])


def test_two_rounds_end_where_the_simulator_does(
    federation: Federation, data: Path, tmp_path: Path
) -> None:
    run = federation.run(num_server_rounds=2, out=str(tmp_path))
    log = run.communicate(timeout=PATIENCE)[0]
    assert set(federation.ended()) == {"finished:completed"}, log
    assert np.abs(model(tmp_path) - simulated(data, NAMES, 2)).max() < 1e-5
    trace = Trace.load(tmp_path / "trace.csv")
    assert trace["dropped"][1:].tolist() == [0, 0]
    assert np.isfinite(trace["test_accuracy"]).tolist() == [False, False, True]
    imported = (federation.home / f"{NAMES[0]}.log").read_text()
    assert imported.count(" training.task\n") == 3  # a process for each message
    assert " torch\n" not in imported


def test_a_key_that_was_not_registered_is_refused(federation: Federation) -> None:
    assert federation.join("stranger", register=False).wait(timeout=PATIENCE) == 1
    said = (federation.home / "stranger.log").read_text()
    assert "Exit Code: 305" in said
    assert "Failed to activate SuperNode" in said
    assert federation.online() == 2


def test_a_hospital_that_is_killed_is_missed_and_the_run_ends_well(
    federation: Federation, tmp_path: Path
) -> None:
    log = []
    with federation.run(num_server_rounds=2, min_nodes=1, out=str(tmp_path)) as run:
        for line in run.stdout or ():
            log.append(line)
            if "[ROUND 1/2]" in line:
                federation.kill(NAMES[1])
    assert set(federation.ended()) == {"finished:completed"}, "".join(log)
    trace = Trace.load(tmp_path / "trace.csv")
    assert trace["dropped"][1:].max() == 1
    assert any(" dropped: " in line and "Node Unavailable" in line for line in log)
    assert trace["kept"][1:].tolist() == [0, 0]  # both rounds moved the model
    assert np.isfinite(model(tmp_path)).all()
