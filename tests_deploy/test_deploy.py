"""The hospitals' app on a real federation: a SuperLink and SuperNodes over TLS, each with its own
key and folder.

Run by `make test-deploy`, some minutes: on a SuperNode every message starts a Python process, and a
node that is gone is noticed only after its heartbeat stays away for most of a minute.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fedsso
from fedsso.experiment.trace import Trace

ROOT = Path(__file__).parents[1]
APP = ROOT / "examples" / "hospitals"
BIN = Path(sys.executable).parent
sys.path += [str(APP), str(ROOT / "tests" / "flower")]
task, patients = import_module("hospitals.task"), import_module("patients")
NAMES = task.HOSPITALS[:2]
PATIENCE = 240.0  # seconds until a thing that does not happen is a failure
MISSING = [tool for tool in ("openssl", "ssh-keygen") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: apt-get install openssl openssh-client"
)


def until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def environment(home: Path) -> dict[str, str]:
    switches = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
    }
    switches |= {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    }
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return (
        os.environ | switches | {"FLWR_HOME": str(home / "flwr"), "TMPDIR": str(home), "PATH": path}
    )


def left(home: Path) -> list[str]:
    """Commands that still run with `home` as their temporary folder: those that a federation
    started, at any depth."""
    found, mark = [], f"\0TMPDIR={home}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in b"\0" + (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [
        command for command in found if command
    ]  # a process that ended and was not waited for has none


class Federation:
    """A SuperLink with its certificates, and SuperNodes by name."""

    def __init__(self, home: Path, data: Path) -> None:
        self.home, self.data, self.env = home, data, environment(home)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        first, *self.ports = free_ports(4)
        self.address = f"127.0.0.1:{first}"
        self.certify()
        (home / "flwr").mkdir()
        connection = f'[superlink]\ndefault = "tls"\n[superlink.tls]\naddress = "{self.address}"\n'
        (home / "flwr" / "config.toml").write_text(
            f'{connection}root-certificates = "{home / "ca.crt"}"\n'
        )
        tls = (
            "--ssl-ca-certfile",
            "ca.crt",
            "--ssl-certfile",
            "server.pem",
            "--ssl-keyfile",
            "server.key",
        )
        self.spawn("superlink", "flower-superlink", "--enable-supernode-auth", *tls, port=first)
        until(lambda: self.flwr("supernode", "list").returncode == 0, "the SuperLink")

    def certify(self) -> None:
        """An authority of our own and its certificate for 127.0.0.1."""
        (self.home / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        key = ("-newkey", "rsa:2048", "-nodes")
        self.do(
            "openssl",
            "req",
            "-x509",
            *key,
            "-subj",
            "/CN=test",
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
        )
        self.do(
            "openssl",
            "req",
            *key,
            "-subj",
            "/CN=127.0.0.1",
            "-keyout",
            "server.key",
            "-out",
            "server.csr",
        )
        signed = (
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "names",
            "-out",
            "server.pem",
        )
        self.do("openssl", "x509", "-req", "-in", "server.csr", *signed)

    def do(self, *command: str) -> None:
        subprocess.run(command, cwd=self.home, check=True, capture_output=True)

    def spawn(self, name: str, command: str, *options: str, port: int) -> subprocess.Popen[bytes]:
        """A process in a session of its own; NAME.log tells what it and its children print, and
        what they import."""
        place = ("--host", "127.0.0.1", "--port", str(port))
        with (self.home / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command, *place, *options],
                cwd=self.home,
                env=self.env | {"PYTHONPROFILEIMPORTTIME": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[name]

    def join(self, name: str, *, register: bool = True) -> subprocess.Popen[bytes]:
        """A SuperNode with a new key and a folder with the hospital's file alone."""
        folder = self.home / name
        folder.mkdir()
        self.do("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key")
        if register:
            shutil.copy(self.data / f"processed.{name}.data", folder)
            assert self.flwr("supernode", "register", f"{name}.key.pub").returncode == 0
        keys = ("--root-certificates", "ca.crt", "--auth-supernode-private-key", f"{name}.key")
        own = ("--superlink", self.address, "--node-config", f'data-folder="{folder}"')
        return self.spawn(name, "flower-supernode", *keys, *own, port=self.ports.pop())

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "flwr"), *arguments]
        return subprocess.run(
            command, cwd=self.home, env=self.env, capture_output=True, text=True, timeout=PATIENCE
        )

    def online(self) -> int:
        told = self.flwr("supernode", "list", "--format", "json")
        return told.stdout.count('"status": "online"')

    def run(self, **config: object) -> subprocess.Popen[str]:
        """`flwr run` of the app, its log on stdout."""
        values = " ".join(
            f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items()
        )
        command = [BIN / "flwr", "run", APP, "--stream", "-c", values]
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended_well(self) -> bool:
        """Whether all runs so far did."""
        runs = json.loads(self.flwr("ls", "--format", "json").stdout)["runs"]
        return all(run["status"] == "finished:completed" for run in runs)

    def kill(self, name: str) -> None:
        """kill -9 of a SuperNode and its children, which are in its session."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def end(self) -> None:
        """End what was started; what a SuperLink started ends by itself, after its parent."""
        for name in [name for name in self.processes if name != "superlink"]:
            if self.processes[name].poll() is None:
                self.kill(name)
        self.processes["superlink"].terminate()
        self.processes["superlink"].wait(timeout=PATIENCE)
        until(lambda: not left(self.home), "the end of all processes")


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
    made = Federation(tmp_path_factory.mktemp("federation"), data)
    try:
        for name in NAMES:
            made.join(name)
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
    return fedsso.simulate(fed, "mclr", fedsso.FedSSO(alpha=0.03), **options).x.numpy()


def model(folder: Path) -> NDArray[np.float64]:
    lines = (folder / "model.csv").read_text().splitlines()
    return np.array([float(line.partition(",")[2]) for line in lines])


def test_two_rounds_end_where_the_simulator_does(
    federation: Federation, data: Path, tmp_path: Path
) -> None:
    run = federation.run(num_server_rounds=2, out=str(tmp_path))
    log = run.communicate(timeout=PATIENCE)[0]
    assert federation.ended_well(), log
    assert np.abs(model(tmp_path) - simulated(data, NAMES, 2)).max() < 1e-5
    trace = Trace.load(tmp_path / "trace.csv")
    assert trace["dropped"][1:].tolist() == [0, 0]
    assert np.isfinite(trace["test_accuracy"]).tolist() == [False, False, True]
    imported = (federation.home / f"{NAMES[0]}.log").read_text()
    assert imported.count(" hospitals.task\n") == 3  # a process for each message
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
    assert federation.ended_well(), "".join(log)
    trace = Trace.load(tmp_path / "trace.csv")
    assert trace["dropped"][1:].max() == 1
    assert any(" dropped: " in line and "Node Unavailable" in line for line in log)
    assert trace["kept"][1:].tolist() == [0, 0]  # both rounds moved the model
    assert np.isfinite(model(tmp_path)).all()


def test_the_script_shows_the_result_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    out, home = tmp_path / "out", tmp_path / "home"
    home.mkdir()
    command = [
        APP / "deploy.sh",
        "--nodes",
        "2",
        "--rounds",
        "1",
        "--data",
        str(data),
        "--out",
        str(out),
    ]
    done = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "eval_acc" in done.stdout
    assert np.abs(model(out) - simulated(data, NAMES, 1)).max() < 1e-5
    assert not list(home.iterdir())
    assert not left(home)


def test_the_script_cleans_up_when_it_is_hung_up(data: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [
        APP / "deploy.sh",
        "--nodes",
        "1",
        "--data",
        str(data),
        "--out",
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(
        command, env=environment(home), stdout=subprocess.PIPE, text=True
    ) as script:
        for line in script.stdout or ():
            if "[ROUND 1" in line:
                break
        script.send_signal(signal.SIGHUP)
        script.communicate(timeout=PATIENCE)
    assert script.returncode == 129
    assert not list(home.iterdir())
    assert not left(home)
