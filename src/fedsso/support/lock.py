"""One writer for a folder: a lock that ends with its process.

The lock is one of the operating system (flock) on a file `.lock` in the folder. The file names the
host and the process, for whoever finds the folder taken. A process that is killed leaves the file
but loses the lock, and the next writer takes both over.

Some may write at once: those who say the same purpose, such as the processes of one sweep. They
hold a shared lock, and the purpose is the second line of the file. The first of them is alone for
a moment, to put the folder in order.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ..errors import InputError
from .files import remove_leftovers, unwritable

log = logging.getLogger("fedsso")
NAME = ".lock"
PAUSE = 0.05  # seconds between two attempts, while the first of several is alone

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


class Held(InputError):
    """Another writer has the folder."""


class Lock:
    """Keeps other writers out of a folder, as in `with Lock(folder): ...`.

    The thread that holds a folder may take it again. It is free when every `with` has ended.
    Readers need no lock: files appear whole.

    Args:
        folder: The folder, which is made if it does not exist.
        shared_for: A purpose. Everybody who says the same one may hold the folder at once; left
            out: nobody else may.
        first: Called if nobody else holds the folder, while everybody else waits.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Lock(folder):
    ...     (Path(folder) / ".lock").exists()
    True
    """

    def __init__(
        self,
        folder: str | Path,
        shared_for: str | None = None,
        first: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = Path(folder)
        self.purpose = shared_for
        self._first = first
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
        removed, unless somebody else may be writing.
        """
        if self._key not in _held:
            taken = _taken(self.folder, self.purpose)
            self._file = taken.file
            _open.add(taken.file)
            try:
                self._put_in_order(taken)
            except BaseException:
                _open.discard(taken.file)
                os.close(taken.file)
                raise
        _held[self._key] = _held.get(self._key, 0) + 1

    def _put_in_order(self, taken: _Taken) -> None:
        """What the only holder does, before it lets others in that have the same purpose."""
        if not taken.alone:
            return
        if taken.certain or self.purpose is None:
            remove_leftovers(self.folder)
        self._first()
        if self.purpose is not None and taken.certain:
            _share(taken.file)

    def release(self) -> None:
        """Give the folder back."""
        if self._key not in _held:  # a child of the process that took it
            return
        _held[self._key] -= 1
        if _held[self._key] == 0:
            del _held[self._key]
        if self._file is None:
            return
        # The file stays while others hold it: who comes next must find them.
        if self.purpose is None or _locked(self._file) is not False:
            with suppress(OSError):  # the folder may be gone
                (self.folder / NAME).unlink(missing_ok=True)
        _open.discard(self._file)
        os.close(self._file)
        self._file = None


class _Taken(NamedTuple):
    """A lock file that this process has taken."""

    file: int  # the number of the open file
    alone: bool  # whether nobody else holds it, as far as the file system can tell
    certain: bool  # whether the file system has locks


def _taken(folder: Path, purpose: str | None) -> _Taken:
    """Lock a folder.

    If the former holder removes the lock file between our opening and our locking it, we try again
    with a new one. Who wants to share waits while the first of the same purpose is alone.
    """
    path = folder / NAME
    while True:
        file = _opened(folder, path)
        alone = _locked(file)
        joined = alone is False and purpose is not None and _locked(file, shared=True)
        told = _read(file)
        if alone is False and not (joined and told[1:] == [purpose]):
            os.close(file)
            if purpose is not None and (not told or told[1:] == [purpose]):
                time.sleep(PAUSE)
                continue
            holder = told[0] if told else "another process"
            raise Held(
                f"{folder} is being written by {holder}; wait until it ends, or give another folder"
            )
        if _is_still(path, file):
            break
        os.close(file)
    lines = [f"process {os.getpid()} on {platform.node()}", *([purpose] if purpose else [])]
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(file, 0)
        os.pwrite(file, "".join(f"{line}\n" for line in lines).encode(), 0)
    if alone is None and purpose is None:
        log.warning("this file system has no locks: see to it that only one process writes")
    return _Taken(file, alone is not False, alone is not None)


def _read(file: int) -> list[str]:
    """The lines of a lock file: who wrote it, and for which purpose the folder is shared."""
    return os.pread(file, 400, 0).decode(errors="replace").splitlines()


def _opened(folder: Path, path: Path) -> int:
    """Open the lock file of a folder, and make both where they do not exist."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)
    except OSError as error:
        raise unwritable(folder, error) from error


def _locked(file: int, shared: bool = False) -> bool | None:
    """Try to lock a file, and tell whether it is ours now; None: this system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def lock_file(file: int) -> bool:
    """Lock an open file, and tell whether that was possible: nobody has it, and locks are known.

    The lock ends when the file is closed, at the latest with the process.
    """
    return _locked(file) is True


def _share(file: int) -> None:
    """Let others in, who lock the file for the same purpose."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_SH)


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
