"""The training app: its reader, its steps, and the whole of it in one process, beside the
simulator and FedAvg."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import patients
import pytest
import torch
from flwr.app import Context, RecordDict
from grid import RUN, SERVER, LocalGrid
from numpy.typing import NDArray

import fedsso
from fedsso.data.tables import FEATURES, HOSPITALS
from fedsso.experiment.trace import Trace

APP = Path(__file__).parents[2] / "examples" / "training"
sys.path.append(str(APP))
task, client, server = (
    import_module(f"training.{name}") for name in ("task", "client_app", "server_app")
)
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
HERE = Path(os.environ.get("FEDSSO_DATA", ""))
needs_data = pytest.mark.skipif(
    not (HERE / "processed.va.data").is_file(),
    reason="needs the heart disease files: set FEDSSO_DATA",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patients.write(tmp_path_factory.mktemp("heart"))


def trained(out: Path, data: Path, **config: Any) -> NDArray[Any]:
    """The model that the app writes; four nodes in this process."""
    run_config = CONFIG | {name.replace("_", "-"): value for name, value in config.items()}
    run_config |= {"out": str(out), "data-dir": str(data)}
    grid = LocalGrid(client.app, [{"partition-id": i} for i in range(4)])
    for context in grid.contexts.values():
        context.run_config = run_config
    server.app(grid, Context(RUN, SERVER, {}, RecordDict(), run_config))
    lines = (out / "model.csv").read_text().splitlines()
    return np.array([float(line.partition(",")[2]) for line in lines])


def hospitals(data: Path) -> list[Any]:
    """The training rows of each."""
    return [task.load({"partition-id": i}, str(data))[0] for i in range(4)]


def loss(w: NDArray[Any], data: Path) -> float:
    """Over the training rows of all hospitals."""
    each = hospitals(data)
    return sum(len(rows.y) * task.loss(w, rows) for rows in each) / sum(
        len(rows.y) for rows in each
    )


# ---- the app as a whole ----


@needs_data
def test_fedsso_reaches_the_loss_of_a_hundred_rounds_of_fedavg_in_eight(tmp_path: Path) -> None:
    averaged = loss(trained(tmp_path / "avg", HERE, strategy="fedavg", num_server_rounds=100), HERE)
    assert loss(trained(tmp_path / "sso", HERE), HERE) <= averaged
    assert loss(trained(tmp_path / "avg8", HERE, strategy="fedavg"), HERE) > averaged + 0.1


def test_it_ends_where_the_simulator_does_and_leaves_a_trace(tmp_path: Path, data: Path) -> None:
    w = trained(tmp_path, data)
    fed = fedsso.Federation.from_clients(
        [(torch.tensor(rows.x[:, :-1]), torch.tensor(rows.y).long()) for rows in hospitals(data)],
        test_fraction=0,
    )
    options = {"rounds": 8, "local_steps": 5, "batch_size": None, "loss": "bce"}
    server = fedsso.FedSSO(alpha=0.03, shapes="none")  # as on Flower
    run = fedsso.simulate(fed, "mclr", server, **options)
    assert np.abs(w - run.x.numpy()).max() < 1e-5
    trace = Trace.load(tmp_path / "trace.csv")
    assert np.allclose(trace["train_loss"][1:], run.trace["train_loss"][1:], atol=1e-6)
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert np.flatnonzero(np.isfinite(trace["test_loss"])).tolist() == [
        8
    ]  # evaluated in the last round alone
    held_out = [task.load({"partition-id": i}, str(data))[1] for i in range(4)]
    right = sum(round(task.accuracy(w, rows) * len(rows.y)) for rows in held_out)
    assert trace["test_accuracy"][8] == pytest.approx(right / sum(len(rows.y) for rows in held_out))


def test_it_goes_on_from_a_checkpoint(tmp_path: Path, data: Path) -> None:
    whole = trained(tmp_path / "whole", data)
    trained(tmp_path / "first", data, num_server_rounds=3, checkpoint_dir=str(tmp_path / "ckpt"))
    assert np.array_equal(
        whole, trained(tmp_path / "second", data, checkpoint_dir=str(tmp_path / "ckpt"))
    )
    trace = Trace.load(tmp_path / "second" / "trace.csv")
    assert trace["round"].tolist() == list(range(9))
    assert np.isfinite(trace["test_loss"][8])


def test_an_unknown_strategy_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="strategy must be fedsso or fedavg, got 'fedprox'"):
        trained(tmp_path, data, strategy="fedprox")


# ---- the client's side ----

ONE_MESSAGE = """
import sys
from flwr.app import Context, RecordDict
from grid import LocalGrid
from training import client_app, task
from flwr.app import Array, ArrayRecord, Message
grid = LocalGrid(client_app.app, [{"data-folder": sys.argv[1]}])
(node, context), = grid.contexts.items()
context.run_config = {"alpha": 0.1, "local-steps": 2, "data-dir": ""}
content = RecordDict({"arrays": ArrayRecord({"w": Array(task.start())})})
for kind in ("train", "evaluate"):
    reply, = grid.send_and_receive([Message(content, node, kind)])
    print(sorted(reply.content["metrics"]))
print([name for name in ("torch", "pandas", "fedsso", "ray") if name in sys.modules])
"""


def test_a_client_loads_neither_torch_nor_fedsso(tmp_path: Path, data: Path) -> None:
    (tmp_path / "own.data").write_bytes((data / "processed.va.data").read_bytes())
    path = os.pathsep.join([str(APP), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", ONE_MESSAGE, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    expected = "['num-examples', 'train_loss']\n['eval_acc', 'eval_loss', 'num-examples']\n[]\n"
    assert done.stdout == expected


def test_the_step_follows_the_gradient(data: Path) -> None:
    rows = hospitals(data)[0]
    w, d = np.linspace(-1, 1, 14), 1e-6 * np.eye(14)
    slope = [(task.loss(w + e, rows) - task.loss(w - e, rows)) / 2e-6 for e in d]
    after, mean = task.train(w, rows, alpha=0.5, steps=1)
    assert np.allclose((w - after) / 0.5, slope, atol=1e-8)
    assert mean == task.loss(w, rows)


# ---- the files ----


def test_the_columns_are_those_of_the_package() -> None:
    assert task.HOSPITALS == HOSPITALS
    assert tuple(task.SCALES) == FEATURES


def test_gaps_and_impossible_zeros_take_the_typical_value(tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    path.write_text("63,1,3,132,0,?,1,150,0.3,1,1.6,0.7,4.7,2\n54,0.7,3,0,299,0,?,?,?,?,?,?,?,0\n")
    x, y = task.read(path)
    assert y.tolist() == [1, 0]
    assert np.allclose(x[0], [1, 0.6, *[0] * 11, 1])
    assert np.allclose(x[1], [0, 0, 0, 0, 1, -0.15 / 0.35, *[0] * 7, 1])


def test_every_fifth_row_is_held_out(data: Path) -> None:
    rows = task.read(data / "processed.va.data")
    kept, held_out = task.load({"partition-id": 3}, str(data))
    assert np.array_equal(held_out.x, rows.x[4::5])
    assert len(kept.y) + len(held_out.y) == len(rows.y) == 60


def test_a_node_finds_its_own_file_alone(tmp_path: Path, data: Path) -> None:
    assert task.find({"partition-id": 1}, str(data)).name == "processed.hungarian.data"
    with pytest.raises(ValueError, match=r"has 4 files \*\.data, expected one"):
        task.find({"data-folder": str(data)})
    with pytest.raises(ValueError, match=r"has 0 files \*\.data"):
        task.find({"data-folder": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no hospital 4: simulate with num-supernodes=4"):
        task.find({"partition-id": 4}, str(data))
    with pytest.raises(ValueError, match="run `fedsso data get heart`"):
        task.find({"partition-id": 0}, str(tmp_path))


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    good = "63,1,3,132,0,?,1,150,0.3,1,1.6,0.7,4.7,2\n"
    wrong = {
        "": "is empty",
        "1,2,3\n": "line 1: 1 rows have not 14 cells",
        f"{good}1,2\n": "line 2: 1 rows have not 14 cells",
        good.replace("63", "inf"): "line 1, column age: 'inf'; cells that are not numbers",
        good.replace(",2\n", ",?\n"): "line 1, column diagnosis: '?'",
        good.replace("63", "old"): "line 1, column age: 'old'",
    }
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            task.read(path)
    path.write_text(good)
    with pytest.raises(ValueError, match="1 patients are too few"):
        task.load({"data-folder": str(tmp_path)})
    with pytest.raises(ValueError, match="there is no hospital -1"):
        task.find({"partition-id": -1}, str(tmp_path))
