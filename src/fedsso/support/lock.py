"""One writer for a folder: a lock that ends with its process.

The lock is one of the operating system (flock) on a file `.lock` in the folder. The file names the
host and the process, for whoever finds the folder taken. A process that is killed leaves the file
but loses the lock, and the next writer takes both over.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from ..errors import InputError
from .files import remove_leftovers, unwritable

log = logging.getLogger("fedsso")
NAME = ".lock"

# How many times each thread of this process holds a folder, by (folder, thread).
_held: dict[tuple[Path, int], int] = {}
# The numbers of the open lock files.
_open: set[int] = set()


def _let_go() -> None:
    """Forget the locks in a child of this process.

    The folders belong to the parent. If the child kept the files open, the folders would stay
    locked after the end of the parent.
    """
    for file in _open:
        os.close(file)
    _open.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Lock:
    """Keeps other writers out of a folder, as in `with Lock(folder): ...`.

    The thread that holds a folder may take it again. It is free when every `with` has ended.
    Readers need no lock: files appear whole.

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
        """Take the folder. It is made if it does not exist.

        Raises InputError if another writer has it. What a killed process left half-written is
        removed.
        """
        if self._key not in _held:
            self._file = _taken(self.folder)
            _open.add(self._file)
            remove_leftovers(self.folder)
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
    """Lock a folder, and return the number of its open lock file.

    If the former holder removes the lock file between our opening and our locking it, we try again
    with a new one.
    """
    path = folder / NAME
    while True:
        file = _opened(folder, path)
        if not _locked(file):
            told = os.read(file, 200).decode(errors="replace")
            holder = told.strip() or "another process"
            os.close(file)
            raise InputError(
                f"{folder} is being written by {holder}; wait until it ends, or give another folder"
            )
        if _is_still(path, file):
            break
        os.close(file)
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()}\n".encode())
    return file


def _opened(folder: Path, path: Path) -> int:
    """Open the lock file of a folder, and make both where they do not exist."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise unwritable(folder, error) from error


def _locked(file: int) -> bool:
    """Try to lock a file, and tell whether it is ours now.

    On a system without locks everybody gets it, and a warning tells so.
    """
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
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def locked(folders: Iterable[Path | None]) -> Iterator[None]:
    """Keep other writers out of some folders; None among them stands for a run without a folder.

    Raises:
        InputError: Somebody else writes to one of them. Those that were taken are given back.
    """
    with ExitStack() as held:
        for folder in folders:
            if folder is not None:
                held.enter_context(Lock(folder))
        yield
