"""A file system of one's own for a process: small, or read-only. It vanishes with the process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # of unshare(2)
RDONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18  # of mount(2)
DETACH = 2  # of umount2(2)
_libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(Exception):
    """This machine lets no process have mounts of its own."""


def separate() -> None:
    """From here on, mounts of this process are its own."""
    if _libc.unshare(NEW_MOUNTS) and _libc.unshare(NEW_MOUNTS | NEW_USER):
        raise NotAllowed(os.strerror(ctypes.get_errno()))
    _mount("none", Path("/"), REC | PRIVATE)


def small(folder: Path, size: int, again: bool = False) -> None:
    """A file system of so many bytes in a folder; `again` changes its size."""
    _mount("tmpfs", folder, REMOUNT if again else 0, "tmpfs", f"size={size}")


def bind(folder: Path) -> None:
    """Make a folder a mount, which `read_only` can change."""
    _mount(str(folder), folder, BIND)


def read_only(folder: Path, on: bool = True) -> None:
    """Let nobody write below a mount, or everybody again."""
    _mount("none", folder, BIND | REMOUNT | (RDONLY if on else 0))


def remove(folder: Path) -> None:
    """Take a mount away again; without one, nothing happens."""
    _libc.umount2(str(folder).encode(), DETACH)


def _mount(source: str, folder: Path, flags: int, kind: str = "", options: str = "") -> None:
    texts = (source.encode(), str(folder).encode(), kind.encode() or None)
    if _libc.mount(*texts, flags, options.encode() or None):
        raise NotAllowed(os.strerror(ctypes.get_errno()))
