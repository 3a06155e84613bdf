"""Who does which piece of work, among processes on several machines that share a folder.

A claim is a file in that folder, `NAME.GENERATION.claim`. Creating it is atomic (O_EXCL), so that
one of several processes gets it. Its content changes every few seconds while its holder lives.
Whoever waits for the work watches the content. When it has not changed for a while *on the
watcher's own clock*, the holder is taken for dead and the watcher creates the next generation of
the claim, again atomically. No two clocks are compared, and no claim can be taken from a holder
that has renewed it meanwhile: the next generation is a file of its own.

A holder that was merely slow is not told. It ends its work and writes its result as ever, and so
does the one that took over: a result must be the same whoever writes it, and be written whole.
What a claim saves is work; nothing depends on it for being right.

The holder also has the operating system's lock on its claim. Another process on the same machine
sees by it at once that the holder is dead. Between machines this lock is not trusted, because on
some network file systems each machine has its own.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import NamedTuple

from .files import unwritable
from .lock import lock_file
from .processes import seconds_of

TIMEOUT = "FEDSSO_CLAIM_TIMEOUT"
"""The environment variable that says after how many seconds without a sign a holder is dead."""
PATIENCE = 60.0  # seconds, if the variable says nothing else
BEATS = 6  # signs of life within that time
FORM = re.compile(r"(?P<name>.+)\.(?P<generation>\d+)\.claim")
MOST = 400  # bytes of a claim


class _Held(NamedTuple):
    """A claim of this process."""

    generation: int
    file: int  # the number of the open file
    host: str  # the machine, if the file is locked; else nothing


class _Seen(NamedTuple):
    """What a claim of somebody else said, and since when, by the clock of this process."""

    content: bytes
    since: float


class Claims:
    """Claims on the pieces of work in a folder, kept alive as long as the `with` block lasts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name, Claims(name) as ours, Claims(name) as theirs:
    ...     print(ours.take("a"), theirs.take("a"))
    ...     ours.give_back("a")
    ...     print(theirs.take("a"))
    True False
    True
    """

    def __init__(self, folder: str | Path) -> None:
        """Prepare to claim work; nothing is written yet.

        Raises:
            InputError: The environment variable for the patience is not a number above 0.
        """
        self.folder = Path(folder)
        self.patience = _patience()
        self._token = token_hex(8)
        self._beat = 0
        self._held: dict[str, _Held] = {}
        self._seen: dict[Path, _Seen] = {}
        self._guard = threading.Lock()  # the thread that gives signs of life uses `_held` as well
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        for name in list(self._held):
            self.give_back(name)

    def take(self, name: str) -> bool:
        """Claim a piece of work; False if it is ours already, or a living process has it.

        After it, look again whether the work is still to be done: the former holder may just have
        finished it and given it back.

        Args:
            name: Of the work, a word that a file's name can hold.

        Raises:
            InputError: The folder cannot be written.
        """
        if name in self._held:
            return False
        newest = max(self._generations(name), default=-1)
        if newest >= 0 and not self._is_abandoned(self._path(name, newest)):
            return False
        path = self._path(name, newest + 1)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # somebody was faster
            return False
        except OSError as error:
            raise unwritable(path, error) from error
        # Locked before it says on which machine: who reads that may rely on the lock.
        host = platform.node() if lock_file(file) else ""
        claim = _Held(newest + 1, file, host)
        self._sign(claim)
        with self._guard:
            self._held[name] = claim
        return True

    def give_back(self, name: str) -> None:
        """Say that a piece of work is done, or left undone."""
        with self._guard:
            claim = self._held.pop(name)
        self._remove(name, claim.generation)
        os.close(claim.file)

    def forget(self, names: Container[str]) -> None:
        """Remove what dead processes have left of claims, once the work is done."""
        for file in os.listdir(self.folder):
            match = FORM.fullmatch(file)
            if match and match["name"] in names:
                with suppress(OSError):
                    (self.folder / file).unlink(missing_ok=True)

    def holder(self, name: str) -> str:
        """Who has a piece of work, for people to read; empty if nobody says."""
        newest = max(self._generations(name), default=0)
        lines = _read(self._path(name, newest)).decode(errors="replace").splitlines()
        return lines[2].strip() if len(lines) > 2 else ""

    def _remove(self, name: str, newest: int) -> None:
        """Remove the files of a claim, the newest last: it is the one that counts."""
        for generation in sorted(self._generations(name)):
            if generation > newest:
                break
            with suppress(OSError):
                self._path(name, generation).unlink(missing_ok=True)

    def _path(self, name: str, generation: int) -> Path:
        """The file of a claim."""
        return self.folder / f"{name}.{generation}.claim"

    def _generations(self, name: str) -> list[int]:
        """How often a piece of work was claimed; only the newest counts."""
        found = map(FORM.fullmatch, os.listdir(self.folder))
        return [int(match["generation"]) for match in found if match and match["name"] == name]

    def _is_abandoned(self, path: Path) -> bool:
        """Whether a claim of somebody else has given no sign of life for long enough."""
        content = _read(path)
        if not content and not path.exists():  # given back; who asks again will get it
            return False
        if _is_free_here(path, content):
            return True
        now = time.monotonic()
        seen = self._seen.get(path)
        if seen is None or seen.content != content:
            self._seen[path] = _Seen(content, now)
            return False
        return now - seen.since >= self.patience

    def _live(self) -> None:
        """Give signs of life until it is over."""
        while not self._over.wait(self.patience / BEATS):
            self._beat += 1
            with self._guard:
                for claim in self._held.values():
                    self._sign(claim)

    def _sign(self, claim: _Held) -> None:
        """Write a sign of life into a claim.

        The file may be gone: somebody took this process for dead, did its work and tidied up.
        """
        who = f"process {os.getpid()} on {platform.node()}"
        text = f"{self._token} {self._beat}\n{claim.host}\n{who}\n"
        with suppress(OSError):
            os.pwrite(claim.file, text.encode(), 0)
            os.fsync(claim.file)  # other machines see what is on the server


def _read(path: Path) -> bytes:
    """What a claim says; nothing if it is gone.

    It is opened anew each time: a network file system asks the server then.
    """
    try:
        with path.open("rb") as file:
            return file.read(MOST)
    except OSError:
        return b""


def _is_free_here(path: Path, content: bytes) -> bool:
    """Whether the holder of a claim was a process of this machine that has ended."""
    lines = content.decode(errors="replace").splitlines()
    if len(lines) < 3 or lines[1] != platform.node():
        return False
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return lock_file(file)
    finally:
        os.close(file)


def _patience() -> float:
    """After how many seconds without a sign of life a holder is taken for dead."""
    return min(seconds_of(TIMEOUT, PATIENCE), threading.TIMEOUT_MAX)
