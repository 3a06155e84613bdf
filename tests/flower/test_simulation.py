"""Flower's own simulation of the hospitals, as users start it; killed half-way it goes on to the
same model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import patients
import pytest

from fedsso.experiment.trace import Trace

APP = Path(__file__).parents[2] / "examples" / "training"
BIN = Path(sys.executable).parent
ROUNDS, PATIENCE = 24, 600.0


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"{what} took more than {PATIENCE:.0f} s"
        time.sleep(0.02)


class Flower:
    """A SuperLink of our own that simulates; its processes end with it."""

    def __init__(self, home: Path) -> None:
        self.port, control = free_port(), free_port()
        self.env = os.environ | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": self.port,
            "FLWR_LOCAL_CONTROL_API_PORT": control,
            "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
            "OMP_NUM_THREADS": "1",
        }
        home.mkdir(exist_ok=True)
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        command += [
            "--control-api-address",
            f"127.0.0.1:{control}",
            "--host",
            "127.0.0.1",
            "--port",
            self.port,
        ]
        with (home / "superlink.log").open("wb") as log:
            self.link = subprocess.Popen(
                [BIN / command[0], *command[1:]],
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self.healthy, "the SuperLink")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=1
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def run(self, **config: object) -> subprocess.Popen[str]:
        """`flwr run` of the app with this run config."""
        values = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        nodes = "num-supernodes=4 client-resources-num-cpus=1"
        command = [
            BIN / "flwr",
            "run",
            str(APP),
            "--stream",
            "--federation-config",
            nodes,
            "-c",
            values,
        ]
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def kill(self) -> None:
        """kill -9 of the SuperLink and everything that it started, Ray included."""
        family = descendants(self.link.pid)
        for pid in (self.link.pid, *family):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.link.wait()


def descendants(pid: int) -> list[int]:
    """Processes below one, as Linux lists them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


@contextmanager
def flower(home: Path) -> Iterator[Flower]:
    link = Flower(home)
    try:
        yield link
    finally:
        link.kill()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the format of the four hospitals."""
    return patients.write(tmp_path_factory.mktemp("hospitals"))


def finish(process: subprocess.Popen[str]) -> str:
    text = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, text
    return text


def model(folder: Path) -> list[str]:
    return (folder / "model.csv").read_text().splitlines()


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="ends processes by what /proc tells")
def test_a_simulation_killed_half_way_ends_with_the_same_model(data: Path, tmp_path: Path) -> None:
    common = {"data_dir": str(data), "num_server_rounds": ROUNDS, "min_nodes": 4}
    with flower(tmp_path / "home") as link:
        text = finish(link.run(out=str(tmp_path / "whole"), **common))
        assert f"[ROUND {ROUNDS}/{ROUNDS}]" in text
        assert "eval_acc" in text
        run = link.run(out=str(tmp_path / "never"), checkpoint_dir=str(tmp_path / "kept"), **common)
        until((tmp_path / "kept" / "checkpoint.safetensors").exists, "the first round")
        link.kill()
        run.kill()
        run.communicate()
    assert not (tmp_path / "never").exists()
    done = int(Trace.load(tmp_path / "kept" / "trace.csv")["round"][-1])
    assert 1 <= done < ROUNDS
    with flower(tmp_path / "home") as link:
        text = finish(
            link.run(out=str(tmp_path / "resumed"), checkpoint_dir=str(tmp_path / "kept"), **common)
        )
    assert f"[ROUND 1/{ROUNDS - done}]" in text or f"[ROUND 1/{ROUNDS - done + 1}]" in text
    assert model(tmp_path / "resumed") == model(tmp_path / "whole")
    traces = [Trace.load(tmp_path / name / "trace.csv") for name in ("whole", "resumed")]
    assert traces[1]["round"].tolist() == list(range(ROUNDS + 1))
    np.testing.assert_array_equal(traces[0]["train_loss"], traces[1]["train_loss"])
    assert (tmp_path / "resumed" / "curves.png").stat().st_size > 10_000
