"""The command as a process that is started anew, in odd surroundings or with odd outputs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .forks import Ending
from .scenes import Scene

PATIENCE = 120.0
GONE = "gone"  # a current folder that is removed


def _nothing() -> None:
    """Changes nothing."""


@dataclass(frozen=True)
class Around:
    """What is odd."""

    unset: tuple[str, ...] = ()
    set: Mapping[str, str] = field(default_factory=dict)
    first: Callable[[], Any] = _nothing  # in the process, before it starts
    stdout: str = ""  # a path, or "pipe" for one that nobody reads
    stderr: str = ""
    folder: str = ""  # the current one


def _close(number: int) -> Callable[[], None]:
    return lambda: os.close(number)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SURROUNDINGS: Mapping[str, Around] = {
    "no HOME": Around(unset=("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")),
    "a HOME that is not there": Around(
        set={"HOME": "/nonexistent", "MPLCONFIGDIR": "/nonexistent"}
    ),
    "no TERM": Around(unset=("TERM", "COLUMNS")),
    "a terminal of one column": Around(set={"COLUMNS": "1", "LINES": "1"}),
    "the locale C": Around(set=ASCII),
    "a Turkish locale": Around(set={"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}),
    "ASCII alone": Around(set={**ASCII, "PYTHONIOENCODING": "ascii"}),
    "umask 077": Around(first=lambda: os.umask(0o077)),
    "no PATH": Around(unset=("PATH",)),
    "no folder for temporary files": Around(set={"TMPDIR": "/nonexistent"}),
    "the current folder is gone": Around(folder=GONE),
    "no standard input": Around(first=_close(0)),
    "another order of hashes": Around(set={"PYTHONHASHSEED": "12345"}),
    "two threads": Around(set={"OMP_NUM_THREADS": "2"}),
}
OUTPUTS: Mapping[str, Around] = {
    "standard output on a full device": Around(stdout="/dev/full"),
    "standard error on a full device": Around(stderr="/dev/full"),
    "both on a full device": Around(stdout="/dev/full", stderr="/dev/full"),
    "standard output is a pipe that nobody reads": Around(stdout="pipe"),
    "standard error is a pipe that nobody reads": Around(stderr="pipe"),
    "no standard output": Around(first=_close(1)),
    "no standard error": Around(first=_close(2)),
}


def command_with(around: Around, scene: Scene, out: Path, place: Path) -> Ending:
    """Start the scene's command so, and wait for its end."""
    assert scene.args is not None
    env = {**{k: v for k, v in os.environ.items() if k not in around.unset}, **around.set}
    folder = place / "current"
    folder.mkdir()
    files = {name: _target(getattr(around, name), place / name) for name in ("stdout", "stderr")}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsso", *map(str, scene.args(out))],
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=files["stdout"],
        stderr=files["stderr"],
        preexec_fn=lambda: _prepare(around, folder),
    )
    hung = False
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        hung = True
    for number in files.values():
        os.close(number)
    said, printed = (_text(place / name) for name in ("stderr", "stdout"))
    return Ending(process.returncode, said, printed, None, "", time.monotonic() - began, 0, hung)


def _prepare(around: Around, folder: Path) -> None:
    """Runs in the new process."""
    around.first()
    if around.folder == GONE:
        folder.rmdir()


def _target(where: str, path: Path) -> int:
    """An open file for what the process prints."""
    if where == "pipe":
        read, write = os.pipe()
        os.close(read)
        return write
    return os.open(where or path, os.O_WRONLY | os.O_CREAT, 0o600)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
