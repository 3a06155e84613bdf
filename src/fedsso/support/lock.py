"""One writer for a folder: a lock that dies with its process.

The lock is the operating system's (flock) on a file `.lock` in the folder, which names host and
process for whoever finds the folder taken. A killed process leaves the file and loses the lock; the
next writer takes both over.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..errors import InputError
from .files import remove_leftovers, unwritable

log = logging.getLogger("fedsso")
NAME = ".lock"
_held: dict[tuple[Path, int], int] = {}  # how often each thread of this process holds a folder
_open: set[int] = set()  # the lock files


def _let_go() -> None:
    """In a child of this process: the folders are the parent's, and must be free when the parent
    ends."""
    for file in _open:
        os.close(file)
    _open.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Lock:
    """Keeps other writers out of a folder: `with Lock(folder): ...`; the thread that holds it may
    take it again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Lock(folder):
    ...     (Path(folder) / ".lock").exists()
    True
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._key = (Path(os.path.realpath(folder)), threading.get_ident())
        self._file: int | None = None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the folder, which is made where it is not there; InputError if another writer has
        it."""
        if self._key not in _held:
            self._file = _taken(self.folder)
            _open.add(self._file)
            remove_leftovers(self.folder)  # of a process that was killed while it wrote
        _held[self._key] = _held.get(self._key, 0) + 1

    def release(self) -> None:
        """Give the folder back."""
        if self._key not in _held:  # a child of the process that took it
            return
        _held[self._key] -= 1
        if _held[self._key] == 0:
            del _held[self._key]
        if self._file is None:
            return
        with suppress(OSError):  # the folder may be gone
            (self.folder / NAME).unlink(missing_ok=True)
        _open.discard(self._file)
        os.close(self._file)
        self._file = None


def _taken(folder: Path) -> int:
    """The open lock file of a folder that is now ours."""
    path = folder / NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise unwritable(folder, error) from error
        if not _locked(file):
            holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise InputError(
                f"{folder} is being written by {holder}; wait until it ends, or give another folder"
            )
        if _is_still(path, file):
            break
        os.close(file)  # its holder has meanwhile removed it
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}\n".encode())
    return file


def _locked(file: int) -> bool:
    """Whether the lock is ours now; where there are no locks, everybody has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning(
            "this file system has no locks (%s): see to it that only one process writes", error
        )
    return True


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
