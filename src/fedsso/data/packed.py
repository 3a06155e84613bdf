"""Files that may be packed, told apart by what they hold, not by what they are called."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from ..errors import InputError

KINDS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"PK": "zip"}
DAMAGE = (EOFError, RuntimeError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What the standard library raises for a damaged archive, beside OSError without a number."""


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where they are gzip, bzip2 or xz, or the one text file in a zip archive."""
    kind = "it is"
    if Path(path).exists() and not Path(path).is_file():
        raise InputError(f"cannot read {path}: it is not a regular file; give the name of a file")
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(Path(path).open("rb"))
            head = raw.peek(6)
            kind = next((name for magic, name in KINDS.items() if head.startswith(magic)), kind)
            yield stack.enter_context(_unpacking(raw, kind, path))
    except MemoryError:
        raise InputError(f"{path}: is too large for the memory of this machine; use a part of it") from None
    except (OSError, *DAMAGE) as error:
        if isinstance(error, OSError) and error.errno:
            raise InputError(f"cannot read {path}: {error.strerror}; check the name") from None
        raise InputError(f"{path}: cannot be read as {kind}, corrupt or cut short ({error}): fetch it again") from None


def content(path: str | os.PathLike[str], most: int = 1 << 31) -> bytes:
    """All bytes of a file, unpacked; at most so many, since a small archive can hold the memory of a machine."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(f"{path}: holds more than {most} bytes, unpacked; use a part of it")
    return data


def lines(path: str | os.PathLike[str], most: int = 1 << 20) -> Iterator[bytes]:
    """The lines of a file, unpacked, none longer than so many bytes."""
    with opened(path) as file:
        n = 0
        while line := file.readline(most):
            n += 1
            if len(line) == most:
                raise InputError(f"{path}: line {n}: has {most} bytes or more; is this the right file?")
            yield line


def _unpacking(raw: BinaryIO, kind: str, path: str | os.PathLike[str]) -> IO[bytes]:
    if kind == "gzip":
        return cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw))))
    if kind == "bzip2":
        return bz2.open(raw)
    if kind == "xz":
        return lzma.open(raw)
    if kind == "zip":
        archive = zipfile.ZipFile(raw)
        return archive.open(_only_text(archive, path))
    return raw


def _only_text(archive: zipfile.ZipFile, path: str | os.PathLike[str]) -> str:
    texts = [name for name in archive.namelist() if name.endswith((".txt", ".csv"))]
    if len(texts) != 1:
        found = ", ".join(texts) or "none"
        raise InputError(f"{path}: need one .txt or .csv file in it, got {found}: unpack it and name the one to use")
    return texts[0]
