"""Work in a forked process with limits on time and memory; how it ended, and what it said."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedsso.errors import InputError

SECONDS = float(os.environ.get("FEDSSO_CAMPAIGN_SECONDS", "30"))  # beyond, a case hangs
MOST = 2 << 30  # bytes of memory that a case may use beyond those it began with
MEMORY = MOST + (1 << 29)  # and may ask for, since not all that is asked for is used
NO_LIMIT = 0
PR_SET_PDEATHSIG = 1
Work = Callable[[], Any]


class Ending(NamedTuple):
    """How a process ended."""

    code: int  # exit code; that of a process killed by a signal is negative
    said: str  # on standard error
    printed: str
    value: Any  # what the work returned
    error: str  # the traceback of what it raised, beside InputError
    seconds: float
    grown: int  # bytes of memory beyond those it began with
    hung: bool  # it was ended because its time was over

    @property
    def out_of_memory(self) -> bool:
        """Whether it used more than it may, or asked for more and did not bear the answer."""
        return self.grown > MOST or any(
            word in self.error + self.said for word in ("MemoryError", "bad_alloc")
        )


class Child:
    """A process that does some work."""

    def __init__(self, work: Work, memory: int = MEMORY) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        self.began = time.monotonic()
        self._status: tuple[int, Any] | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, self.folder, memory)

    def running(self) -> bool:
        """Whether it is still at work."""
        if self._status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._status = status, usage
        return self._status is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, if it is still there."""
        if self.running():
            os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> Ending:
        """Let it work until it ends, or until its time is over."""
        pause, hung = 0.0005, False
        while self.running():
            if time.monotonic() - self.began > seconds:
                self.kill()
                hung = True
            time.sleep(pause)
            pause = min(0.01, pause * 1.5)
        assert self._status is not None
        status, usage = self._status
        found = _read_result(self.folder / "result")
        began = int(_text(self.folder / "began") or usage.ru_maxrss * 1024)
        said, printed = (_text(self.folder / name) for name in ("stderr", "stdout"))
        shutil.rmtree(self.folder)
        return Ending(
            code=os.waitstatus_to_exitcode(status),
            said=said,
            printed=printed,
            value=found.get("value"),
            error=found.get("error", ""),
            seconds=time.monotonic() - self.began,
            grown=max(0, usage.ru_maxrss * 1024 - began),
            hung=hung,
        )


def forked(work: Work, seconds: float = SECONDS, memory: int = MEMORY) -> Ending:
    """Do some work in a process of its own."""
    return Child(work, memory).wait(seconds)


def each(cases: Sequence[Work], jobs: int, seconds: float = 600.0) -> Iterator[tuple[int, Ending]]:
    """All cases, so many at a time; the endings as they come, with the place of the case."""
    waiting, busy = list(enumerate(cases)), dict[int, Child]()
    while waiting or busy:
        while waiting and len(busy) < jobs:
            place, case = waiting.pop(0)
            busy[place] = Child(case, NO_LIMIT)
        for place, child in list(busy.items()):
            if not child.running() or time.monotonic() - child.began > seconds:
                del busy[place]
                yield place, child.wait(seconds)
        time.sleep(0.005)


def _live(work: Work, folder: Path, memory: int) -> None:
    """The life of the process; it never returns."""
    code, result = 1, dict[str, Any]()
    try:
        _prepare(folder, memory)
        result["value"] = work()
        code = 0
    except InputError as error:
        print(error, file=sys.stderr)
        code = 2
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        result["error"] = traceback.format_exc()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (folder / "result").write_text(json.dumps(result))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _prepare(folder: Path, memory: int) -> None:
    """A session of its own that ends with its parent, files for what it says, a limit of memory."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        path = "/dev/null" if name == "stdin" else folder / name
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    (folder / "began").write_text(str(_resident()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_virtual() + memory, hard))


def _read_result(path: Path) -> dict[str, Any]:
    """What the process left behind; nothing if it was killed."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _text(path: Path) -> str:
    return path.read_text(errors="replace")[-20_000:] if path.exists() else ""


def _pages(place: int) -> int:
    numbers = Path("/proc/self/statm").read_text().split()
    return int(numbers[place]) * os.sysconf("SC_PAGE_SIZE")


def _virtual() -> int:
    return _pages(0)


def _resident() -> int:
    return _pages(1)
