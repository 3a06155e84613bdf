"""One writer for a folder: a lock that dies with its process.

The lock is the operating system's (flock) on a file `.lock` in the folder, which names host and process for whoever
finds the folder taken. A killed process leaves the file and loses the lock; the next writer takes both over.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from .errors import InputError
from .files import unwritable

log = logging.getLogger("fedsso")
NAME = ".lock"
_held: dict[tuple[Path, int], int] = {}  # how often each thread of this process holds a folder


class Lock:
    """Keeps other writers out of a folder: `with Lock(folder): ...`; the thread that holds it may take it again.

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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the folder, which is made where it is not there; InputError if another writer has it."""
        if self._key not in _held:
            self._file = _taken(self.folder)
        _held[self._key] = _held.get(self._key, 0) + 1

    def release(self) -> None:
        """Give the folder back."""
        _held[self._key] -= 1
        if _held[self._key] == 0:
            del _held[self._key]
        if self._file is None:
            return
        with suppress(OSError):  # the folder may be gone
            (self.folder / NAME).unlink(missing_ok=True)
        os.close(self._file)
        self._file = None


def _taken(folder: Path) -> int:
    """The open lock file of a folder that is now ours."""
    path = folder / NAME
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise unwritable(folder, error) from error
        if not _locked(file):
            holder = os.read(file, 200).decode(errors="replace").strip() or "another process"
            os.close(file)
            raise InputError(f"{folder} is being written by {holder}; wait until it ends, or give another folder")
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
        log.warning("this file system has no locks (%s): see to it that only one process writes", error)
    return True


def _is_still(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
