"""Stands between a process and its files: a step that changes one is counted, refused or the last.

Real files are written by real calls. What is replaced are the functions of `os` and `io` that lead
there, in a process of the campaign, which ends with them.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

Act = Callable[[int, str], None]
"""Called before each step with its number, from 1, and its kind."""

SPACE = ("open", "write", "fsync", "mkdir", "link")  # the steps that a full disk refuses
EVERY = (*SPACE, "replace", "unlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Files:
    """The steps that this process takes below a folder."""

    def __init__(self, folder: Path, act: Act, done: Path | None = None) -> None:
        self.folder, self.act = str(folder.absolute()), act
        self.count = 0
        self.done = None if done is None else os.open(done, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.real_open, self.real_write = io.open, os.write

    def install(self) -> Files:
        """From now on all steps pass through here."""
        io.open = builtins.open = self._open
        os.open = self._wrapped(
            "open", os.open, lambda a: bool(a[1] & WRITING) and self._below(a[0])
        )
        os.write = self._wrapped("write", os.write, lambda a: self._below(a[0]))
        os.fsync = self._wrapped("fsync", os.fsync, lambda a: self._below(a[0]))
        os.mkdir = self._wrapped("mkdir", os.mkdir, lambda a: self._below(a[0]))
        os.link = self._wrapped("link", os.link, lambda a: self._below(a[1]))
        os.unlink = os.remove = self._wrapped("unlink", os.unlink, lambda a: self._below(a[0]))
        os.replace = self._wrapped(
            "replace", os.replace, lambda a: self._below(a[1]), self._renamed
        )
        os.rename = self._wrapped("replace", os.rename, lambda a: self._below(a[1]), self._renamed)
        return self

    def _step(self, kind: str) -> None:
        self.count += 1
        self.act(self.count, kind)

    def _wrapped(
        self,
        kind: str,
        real: Callable[..., Any],
        ours: Callable[[tuple[Any, ...]], bool],
        after: Callable[[Any], None] | None = None,
    ) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            if not ours(args):
                return real(*args, **keywords)
            self._step(kind)
            found = real(*args, **keywords)
            if after is not None:
                after(args[1])
            return found

        return call

    def _renamed(self, target: Any) -> None:
        """Note which file has its name now."""
        if self.done is not None:
            self.real_write(self.done, f"{Path(target).name}\n".encode())

    def _below(self, file: Any) -> bool:
        """Whether a path, or an open file, is in the folder."""
        if isinstance(file, int):
            try:
                path = os.readlink(f"/proc/self/fd/{file}")
            except OSError:
                return False
        else:
            path = os.path.abspath(os.fsdecode(file))
        return path == self.folder or path.startswith(self.folder + os.sep)

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """As `open`, with a raw file that takes its steps."""
        if not set(mode) & set("wax+") or not self._below(file):
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):
            self._step("open")
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.step = self._step
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class _Raw(io.FileIO):
    """A file whose writes are steps."""

    step: Callable[[str], None]

    def write(self, data: Any) -> int:
        self.step("write")
        return super().write(data)


def never(_number: int, _kind: str) -> None:
    """Only count."""


def die_at(wanted: int) -> Act:
    """kill -9 before this step."""

    def act(number: int, _kind: str) -> None:
        if number == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def fails_from(wanted: int, why: int) -> Act:
    """From this step on the disk refuses: it is full, cannot be written, or is broken."""
    refused = SPACE if why == errno.ENOSPC else EVERY

    def act(number: int, kind: str) -> None:
        if number >= wanted and kind in refused:
            raise OSError(why, os.strerror(why))

    return act
