"""A SuperLink and SuperNodes on this machine, over TLS, each node with its own key and folder.

On a SuperNode every message starts a Python process, and a node that is gone is noticed only after
its heartbeat stays away for most of a minute. So the tests here take minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PATIENCE = 600.0  # seconds until a thing that does not happen is a failure
MISSING = [tool for tool in ("openssl", "ssh-keygen") if shutil.which(tool) is None]
REASON = f"needs {', '.join(MISSING)}: apt-get install openssl openssh-client"


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

    def __init__(self, home: Path, app: Path) -> None:
        self.home, self.app, self.env = home, app, environment(home)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        first, *self.ports = free_ports(8)
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

    def join(
        self, name: str, *files: Path, register: bool = True, superlink: str = ""
    ) -> subprocess.Popen[bytes]:
        """A SuperNode with a new key and a folder with the hospital's files alone.

        `superlink` is where it looks for the SuperLink, if that is another place than usual.
        """
        folder = self.home / name
        folder.mkdir()
        for file in files:
            shutil.copy(file, folder)
        self.do("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}.key")
        if register:
            assert self.flwr("supernode", "register", f"{name}.key.pub").returncode == 0
        keys = ("--root-certificates", "ca.crt", "--auth-supernode-private-key", f"{name}.key")
        told = f'data-folder="{folder}" name="{name}"'
        own = ("--superlink", superlink or self.address, "--node-config", told)
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
        command = [BIN / "flwr", "run", self.app, "--stream", "-c", values]
        return subprocess.Popen(
            command,
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended(self) -> list[str]:
        """How the runs so far ended, such as "finished:completed"."""
        runs = json.loads(self.flwr("ls", "--format", "json").stdout)["runs"]
        return [run["status"] for run in runs]

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


class Tap:
    """A place between SuperNodes and their SuperLink that reads all that they say.

    It has the server's key, so the nodes take it for the SuperLink. Both sides of it speak TLS;
    what is kept is what is inside.
    """

    def __init__(self, federation: Federation) -> None:
        home = federation.home
        self.inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.inside.load_cert_chain(home / "server.pem", home / "server.key")
        self.outside = ssl.create_default_context(cafile=home / "ca.crt")
        for context in (self.inside, self.outside):
            context.set_alpn_protocols(["h2"])
        host, _, port = federation.address.partition(":")
        self.target = (host, int(port))
        self.up = bytearray()  # all bytes from nodes
        self.down = bytearray()  # all bytes to nodes
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self.server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._join, args=(raw,), daemon=True).start()

    def _join(self, raw: socket.socket) -> None:
        """Connect one node with the SuperLink, and pass on what either says."""
        try:
            node = self.inside.wrap_socket(raw, server_side=True)
            link = self.outside.wrap_socket(
                socket.create_connection(self.target), server_hostname=self.target[0]
            )
        except OSError:
            raw.close()
            return
        # One thread for each connection: an SSL socket is not for two at once.
        kept = {node: (link, self.up), link: (node, self.down)}
        for one in kept:
            one.setblocking(False)
        while True:
            try:
                passed = [self._pass(one, *other) for one, other in kept.items()]
            except OSError:
                break
            if not any(passed):
                time.sleep(0.005)
        node.close()
        link.close()

    def _pass(self, source: ssl.SSLSocket, sink: ssl.SSLSocket, kept: bytearray) -> bool:
        """Pass on what there is. False if there is nothing. OSError at the end."""
        try:
            data = source.recv(65536)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        if not data:
            raise OSError("closed")
        kept += data
        while data:
            try:
                data = data[sink.send(data) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                time.sleep(0.001)
        return True

    def close(self) -> None:
        self.server.close()
