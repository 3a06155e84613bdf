"""The one place where files of other people come in.

Only regular files are opened, and nothing is read beyond a limit. Whatever is wrong with a file,
the error names the file, the place in it and the remedy. It is an InputError of one of three kinds:

- `Unreadable`: the file is not there, may not be read, or is not a regular file.
- `TooLarge`: the file is beyond one of the `Limits`. The message names the environment variable
  that raises this limit.
- `Damaged`: the content is not what it should be.
"""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import math
import os
import re
import stat
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO, TypeAlias, cast
from unicodedata import normalize

import numpy as np

from ..errors import InputError

PathLike: TypeAlias = str | os.PathLike[str]
Array: TypeAlias = np.ndarray[Any, Any]

PREFIX = "FEDSSO_MAX_"
"""What the environment variables of the limits begin with, as in FEDSSO_MAX_ROWS=1000000."""
DAMAGE = (
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
"""What the standard library raises for a damaged archive, beside an OSError without a number."""
BLOCK = 1 << 20
"""Bytes read at a time."""
SMALL = 1 << 26
"""Bytes up to which a packed file may expand by any factor."""
CONTENTS = 1 << 22
"""The most bytes of the list of contents of an archive."""
KINDS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
}
"""The first bytes of packed files."""
NUMBERS = "biuf"
"""The kinds of numpy's formats that are numbers: bool, signed, unsigned, floating."""


class Unreadable(InputError):
    """The file is not there, may not be read, or is not a regular file.

    Nothing is known about its content.
    """

    kind = "a file that cannot be read"


class TooLarge(InputError):
    """The file is larger than a limit allows."""

    kind = "a file beyond a limit"


class Damaged(InputError):
    """The content of the file is not what it should be."""

    kind = "a file that is damaged"


# ---- limits ----


@dataclass(frozen=True)
class Limits:
    """The most that is read of a file.

    With the defaults, a file that lies about its size takes less than 2 GB of memory.
    """

    bytes: int = 1 << 30
    """Bytes of a file that is read as a whole."""
    checkpoint: int = 1 << 34
    """Bytes of a run's own checkpoint, which is as large as its model and its curvature."""
    text: int = 1 << 28
    """Bytes of a text that is read as a whole."""
    settings: int = 1 << 22
    """Bytes of a TOML or JSON file."""
    unpacked: int = 1 << 32
    """Bytes that come out of a packed file, of which never more than a piece is in memory."""
    expansion: int = 100
    """How many times larger a packed file may become, beyond 64 MiB."""
    rows: int = 1 << 23
    """Lines or rows of a table."""
    columns: int = 1 << 20
    """Columns of a table."""
    cells: int = 1 << 26
    """Numbers of a table: rows times columns."""
    samples: int = 7 << 28
    """Bytes of all samples of a text set."""
    words: int = 1 << 22
    """Distinct words of a text set."""
    line: int = 1 << 24
    """Bytes of a line."""
    field: int = 1 << 17
    """Characters of a cell."""
    nesting: int = 64
    """Depth of tables and lists within each other in TOML or JSON."""
    digits: int = 1000
    """Digits of a number in TOML or JSON."""

    def check(self, name: str, found: int, where: object, what: str) -> None:
        """Raise TooLarge if `found` is beyond the limit of that name.

        `where` is the file, or the place in it. `what` says what was counted, such as "rows".
        """
        if found > getattr(self, name):
            raise self.beyond(name, where, f"has {found} {what}")

    def beyond(self, name: str, where: object, has: str) -> TooLarge:
        """The error for a file that is beyond the limit of that name. `has` says what it has."""
        limit = getattr(self, name)
        remedy = f"set {PREFIX}{name.upper()} to a larger number if the file is to be trusted"
        return TooLarge(f"{where}: {has}, at most {limit} are read; {remedy}")


def limits() -> Limits:
    """The limits in force: the defaults, except for those that the environment sets.

    They are read anew for every file, so a variable can be changed while a program runs.
    """
    found = {}
    for field in fields(Limits):
        variable = PREFIX + field.name.upper()
        text = os.environ.get(variable, "")
        if text:
            found[field.name] = _positive(variable, text)
    return Limits(**found)


def _positive(name: str, text: str) -> int:
    """The value of an environment variable as a positive integer."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or not int(text):
        raise InputError(f"${name} must be a whole number from 1 to 10^18 - 1, got {text[:40]!r}")
    return int(text)


# ---- paths ----


def user_path(what: str, path: object) -> Path:
    """Turn a path as users write it, with ~ for their home, into a Path.

    Args:
        what: The option it was given for, for the error.
        path: A text or a path.

    Raises:
        InputError: No file can have that name. A file that does not exist, or may not be read, is
            left to whoever reads it.
    """
    try:
        found = Path(path).expanduser()  # type: ignore[arg-type]
        str(found).encode()
        os.stat(found)
    except FileNotFoundError:
        return found
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EINVAL):
            return found
        why: object = error.strerror
    except (TypeError, ValueError, RuntimeError) as error:
        why = error
    else:
        return found
    raise InputError(f"{what} must be the path of a file or folder, got {path!r} ({why})")


def is_file(path: PathLike) -> bool:
    """Whether a regular file is there. Raises Unreadable for a pipe, a device and the like."""
    mode = _mode(path)
    if mode and not stat.S_ISDIR(mode):
        _check_regular(path, mode)
    return stat.S_ISREG(mode)


def is_folder(path: PathLike) -> bool:
    """Whether a folder is there. Raises Unreadable if that cannot be found out."""
    return stat.S_ISDIR(_mode(path))


def inside(folder: PathLike) -> list[Path]:
    """What is in a folder, in the order of the names. Nothing, if there is no such folder."""
    if not is_folder(folder):
        return []
    try:
        return sorted(Path(folder).iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from None


def _mode(path: PathLike) -> int:
    """What kind of file is at a path, as the system encodes it. 0 if there is nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


NOT_ALLOWED = "ask its owner for the permission to read it; nothing is known about its content"
REMEDIES = {
    errno.ENOENT: "check the name",
    errno.EACCES: NOT_ALLOWED,
    errno.EPERM: NOT_ALLOWED,
    errno.ENXIO: "give the name of a regular file",
}
"""What a user can do, by the number of an OSError."""


def _unreadable(path: PathLike, error: Exception) -> Unreadable:
    """The error for a file that cannot be opened, or that the disk does not give."""
    if not isinstance(error, OSError):
        name = str(path)
        return Unreadable(f"cannot read {name!r}: no file can have this name ({error})")
    reason = error.strerror or error
    remedy = REMEDIES.get(error.errno or 0, "check the name and the disk")
    return Unreadable(f"cannot read {path}: {reason}; {remedy}")


# ---- bytes and text ----


@contextmanager
def opened(path: PathLike) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    A pipe, a device or a folder is refused at once, without waiting for what it may send.
    """
    with os.fdopen(_handle(path), "rb") as file:
        yield file


def _handle(path: PathLike) -> int:
    """Open a file and return its number. Raises Unreadable unless it is a regular file.

    Without O_NONBLOCK, opening a pipe would wait for somebody who writes to it. Without O_NOCTTY, a
    terminal could become the one that controls this process.
    """
    flags = os.O_RDONLY | _flag("O_NONBLOCK") | _flag("O_NOCTTY") | _flag("O_BINARY")
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        _check_regular(path, os.fstat(handle).st_mode)
    except Unreadable:
        os.close(handle)
        raise
    return handle


def _check_regular(path: PathLike, mode: int) -> None:
    """Raise Unreadable unless the mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = IRREGULAR.get(stat.S_IFMT(mode), "something else")
        raise Unreadable(
            f"cannot read {path}: it is {kind}, not a regular file; give the name of a file"
        )


def _flag(name: str) -> int:
    """A flag of `os.open`, or 0 if the system does not have it."""
    return int(getattr(os, name, 0))


IRREGULAR = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What a file can be that is not a regular file."""


def read_bytes(path: PathLike, limit: str = "bytes") -> bytes:
    """Read all bytes of a file, within the limit of that name.

    Raises:
        TooLarge: The file is beyond the limit, which is checked before it is read.
        Unreadable: It is no regular file, may not be read, or grows while it is read.
    """
    most = limits()
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        most.check(limit, size, path, "bytes")
        more = size + BLOCK  # a file that grows shows itself
        try:
            data = file.read(more)
        except OSError as error:
            raise _unreadable(path, error) from None
    if len(data) == more:
        raise Unreadable(
            f"cannot read {path}: it grows while it is read; copy it, and give the copy"
        )
    return data


def read_text(path: PathLike, limit: str = "text") -> str:
    """Read the text of a UTF-8 file, with or without a byte-order mark.

    The file must be within the limit of that name. Raises as `read_bytes` does, and Damaged where
    it is not UTF-8.
    """
    return decoded(read_bytes(path, limit), path)


def decoded(data: bytes, where: object) -> str:
    """Turn UTF-8 bytes into text, without a byte-order mark.

    `where` is the file, for the error, which names the first line that is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Damaged(
            f"cannot read {where}: line {line} is not UTF-8 text; save the file as UTF-8"
        ) from None


def composed(text: str) -> str:
    """The text with one character for a letter and its marks: some systems write two.

    >>> len("u\u0308"), len(composed("u\u0308"))
    (2, 1)
    """
    return normalize("NFC", text)


# ---- TOML and JSON ----


def read_toml(path: PathLike) -> dict[str, Any]:
    """Read a TOML file as nested dictionaries, within the limits of settings."""
    return parse_toml(read_text(path, "settings"), path)


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """Turn TOML text into nested dictionaries. `where` is the file, for the error.

    >>> parse_toml("rounds = 5", "a.toml")
    {'rounds': 5}
    """
    _check_shape(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raise Damaged(f"cannot read {where} as TOML: {error}; correct that line") from None


def read_json(path: PathLike) -> Any:
    """Read what a JSON file holds, within the limits of settings."""
    return parse_json(read_text(path, "settings"), path)


def parse_json(text: str, where: object) -> Any:
    """Turn JSON text into what it stands for. `where` is the file, for the error.

    >>> parse_json("[1, 2]", "a.json")
    [1, 2]
    """
    _check_shape(text, where)
    try:
        return json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError, OverflowError) as error:
        raise Damaged(f"cannot read {where} as JSON: {error}; correct that place") from None


def _whole(text: str) -> int:
    """A whole number of JSON. ValueError if it has more than 64 bits: no number of ours has."""
    if len(text) > 20 or abs(int(text)) >= 1 << 64:
        raise ValueError(f"it has a whole number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    """Another number of JSON. ValueError for infinity, NaN, and what is too large for a float."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is no finite number")
    return float(text)


QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|\Z)'
    r"|'[^'\n]*+(?:'|(?=\n)|\Z)"
    r"|#[^\n]*",
    re.DOTALL,
)
"""Quoted texts and comments, in which brackets, dots and digits mean nothing.

A quote that is not closed goes on to the end of the file, or of its line.
"""


def _check_shape(text: str, where: object) -> None:
    """Check the limits of nesting and digits, before a parser sees the text.

    A parser's time grows with the digits of a number, and its stack with the nesting. A small file
    could keep it busy for hours, or crash it. Names with dots, as in a.b.c, nest as well.
    """
    most = limits()
    bare = QUOTED.sub(_blanked, text)
    long = re.search(rf"(?<![0-9_])[0-9][0-9_]{{{most.digits},}}", bare)
    if long:
        place = _line(where, bare, long.start())
        has = f"has a number of {len(long[0])} digits"
        raise most.beyond("digits", place, has)
    chain = re.search(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{most.nesting},}}", bare)
    if chain:
        place = _line(where, bare, chain.start())
        parts = chain[0].count(".") + 1
        raise most.beyond("nesting", place, f"has a name of {parts} parts")
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", bare):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > most.nesting:
            place = _line(where, bare, bracket.start())
            has = f"has more than {most.nesting} brackets within each other"
            raise most.beyond("nesting", place, has)


def _blanked(found: re.Match[str]) -> str:
    """A text of the same length and lines, without anything that has a meaning."""
    return re.sub(r"[^\n]", "q", found[0])


def _line(where: object, text: str, place: int) -> str:
    """The file and the number of the line at a place of its text, for messages."""
    number = text.count("\n", 0, place) + 1
    return f"{where}: line {number}"


# ---- packed files ----


@contextmanager
def unpacked(path: PathLike) -> Iterator[IO[bytes]]:
    """Open a file and unpack it while it is read.

    gzip, bzip2 and xz are understood, and a zip archive with one text file in it. Any other file
    is given as it is.

    Raises:
        TooLarge: More comes out than the limits `unpacked` and `expansion` allow.
        Damaged: The file is corrupt or cut short.
        Unreadable: It cannot be opened, or the disk does not give it.
    """
    kind = "it is"
    most = limits()
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(opened(path))
            size = os.fstat(raw.fileno()).st_size
            kind = _kind(raw) or kind
            inner = stack.enter_context(_unpacking(raw, kind, path))
            metered = _Metered(inner, path, size, most)
            buffered = stack.enter_context(io.BufferedReader(metered, 1 << 16))
            yield cast(IO[bytes], buffered)
    except MemoryError:
        raise InputError(
            f"{path}: is too large for the memory of this machine; use a part of it"
        ) from None
    except (OSError, *DAMAGE) as error:
        if isinstance(error, OSError) and error.errno:
            raise _unreadable(path, error) from None
        raise Damaged(
            f"{path}: cannot be read as {kind}, corrupt or cut short ({error}): download it again"
        ) from None


def _kind(raw: BinaryIO) -> str:
    """How a file is packed, by its first bytes. "" if it is not packed."""
    head = cast(io.BufferedReader, raw).peek(6)
    for magic, name in KINDS.items():
        if head.startswith(magic):
            return name
    return ""


class _Metered(io.RawIOBase):
    """A stream that counts what it gives, and raises TooLarge beyond the limits.

    It reads forward only. Its methods are those that io.BufferedReader and tarfile call.
    """

    def __init__(
        self,
        inner: IO[bytes],
        path: PathLike,
        size: int,
        most: Limits,
    ) -> None:
        self.inner = inner
        self.path = path
        self.size = size
        self.most = most
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return their number."""
        wanted = min(len(buffer), BLOCK)
        data = self.inner.read(wanted)
        count = len(data)
        buffer[:count] = data
        self.given += count
        check_expansion(self.given, self.size, self.path, self.most)
        return count

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.given

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        """Go forward, by reading. There is no way back."""
        target = place
        if whence == os.SEEK_CUR:
            target += self.given
        if whence == os.SEEK_END or target < self.given:
            raise io.UnsupportedOperation("a packed file is read from its start to its end")
        while self.given < target:
            wanted = min(BLOCK, target - self.given)
            if not self.read(wanted):
                break
        return self.given


def check_expansion(given: int, size: int, where: object, most: Limits) -> None:
    """Raise TooLarge if a packed file of `size` bytes gives too many bytes.

    A few kilobytes of zeros can become gigabytes. Up to 64 MiB any factor is allowed, because some
    honest files pack very well.
    """
    most.check("unpacked", given, where, "or more bytes, unpacked")
    allowed = max(SMALL, most.expansion * size)
    if given > allowed:
        factor = given / max(size, 1)
        raise most.beyond("expansion", where, f"becomes {factor:.0f} times larger, unpacked")


def lines(path: PathLike) -> Iterator[bytes]:
    """The lines of a file as bytes, unpacked, with their line ends.

    Their number and their length are limited (`rows`, `line`).
    """
    with unpacked(path) as file:
        yield from _limited(path, file)


def text_lines(path: PathLike) -> Iterator[str]:
    """The lines of a UTF-8 file as text, unpacked, with their line ends. Limited like `lines`."""
    with (
        unpacked(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text,
    ):
        for number, line in enumerate(_limited(path, text), start=1):
            if not _is_text(line):
                raise Damaged(
                    f"cannot read {path}: line {number} is not UTF-8 text; save the file as UTF-8",
                    public="the table is not UTF-8 text: save it as UTF-8",
                )
            yield line


def _limited(path: PathLike, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of an open file, within the limits `rows` and `line`."""
    most = limits()
    number = 0
    while line := file.readline(most.line + 1):
        number += 1
        if number > most.rows:
            raise most.beyond("rows", path, f"has more than {most.rows} lines")
        if len(line) > most.line:
            raise most.beyond("line", f"{path}: line {number}", "is longer")
        yield line


def _is_text(line: str) -> bool:
    """Whether a line was UTF-8 text: no zero bytes, and no bytes that could not be decoded.

    Python marks a byte that cannot be decoded by a character between U+D800 and U+DFFF.
    """
    if "\0" in line:
        return False
    if line.isascii():
        return True
    return not any("\ud800" <= c <= "\udfff" for c in line)


def _unpacking(raw: BinaryIO, kind: str, path: PathLike) -> IO[bytes]:
    """A stream of the unpacked bytes of an open file. `kind` says how it is packed."""
    if kind == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == "bzip2":
        return bz2.open(raw)
    if kind == "xz":
        return lzma.open(raw)
    if kind == "zip":
        archive = zip_archive(raw)
        return archive.open(_only_text(archive, path))
    return raw


def _only_text(archive: zipfile.ZipFile, path: PathLike) -> zipfile.ZipInfo:
    """The one text file in a zip archive. InputError if there are none or several.

    Other files in the archive, such as a licence, are ignored.
    """
    texts = [one for one in archive.infolist() if one.filename.endswith((".txt", ".csv"))]
    if len(texts) != 1:
        found = ", ".join(one.filename for one in texts[:10]) or "none"
        raise InputError(
            f"{path}: need one .txt or .csv file in it, got {found}: unpack it and name the one to "
            f"use"
        )
    _check_method(texts[0])
    return texts[0]


class Pieces:
    """A file that refuses to give very many bytes at once.

    zipfile and tarfile read a list of contents, or a name, as long as the archive says it is. An
    archive that lies could make them fill the memory.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file = file
        self.seek = file.seek
        self.tell = file.tell
        self.seekable = file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read bytes, but no more at once than a list of contents ought to have."""
        if size > CONTENTS:
            raise zipfile.BadZipFile(
                f"it asks for {size} bytes at once, at most {CONTENTS} are read"
            )
        return self.file.read(size)


def zip_archive(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip file. Its list of contents is read only if it is short."""
    return zipfile.ZipFile(cast(IO[bytes], Pieces(file)))


def _check_method(member: zipfile.ZipInfo) -> None:
    """Raise BadZipFile for a method other than stored and deflated.

    The other methods can unpack a block into any number of bytes at once.
    """
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(
            f"{member.filename} is packed by method {member.compress_type}, need 0 or 8"
        )


# ---- arrays ----


def read_npz(path: PathLike, names: Collection[str] | None = None) -> dict[str, Array]:
    """Read the arrays of an .npz file, all or those named.

    Of a large file only the wanted arrays are read. See `parse_npz` for what is accepted.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        limits().check("bytes", size, path, "bytes")
        return _npz(file, size, path, names)


def parse_npz(
    data: bytes,
    where: object,
    names: Collection[str] | None = None,
) -> dict[str, Array]:
    """Read the arrays in the bytes of an .npz file, all or those named.

    Args:
        data: The file.
        where: Its name, for errors.
        names: The arrays that are wanted; None: all.

    Raises:
        TooLarge: The arrays are beyond the limits.
        Damaged: An array is missing, holds other than numbers, or is not as long as it says.

    Nothing pickled is accepted. The sizes that the file states are compared with the limits and
    with each other, before any memory is allocated.
    """
    return _npz(io.BytesIO(data), len(data), where, names)


def _npz(
    file: IO[bytes],
    size: int,
    where: object,
    names: Collection[str] | None,
) -> dict[str, Array]:
    """Read an open .npz file of `size` bytes. Any trouble becomes an InputError."""
    try:
        with zip_archive(file) as archive:
            wanted = _wanted_arrays(archive, where, names)
            whole = sum(one.file_size for one in wanted.values())
            most = limits()
            most.check("bytes", whole, where, "bytes, unpacked")
            check_expansion(whole, size, where, most)
            return {name: _npy(archive, one) for name, one in wanted.items()}
    except InputError:
        raise
    except MemoryError:
        raise TooLarge(
            f"{where}: is too large for the memory of this machine; use a part of it"
        ) from None
    except Exception as error:  # numpy and zipfile let through whatever damaged bytes lead to
        if isinstance(error, OSError) and error.errno:
            raise _unreadable(str(where), error) from None
        raise Damaged(
            f"{where}: cannot be read as .npz, corrupt or cut short ({error}): download it again"
        ) from None


def _wanted_arrays(
    archive: zipfile.ZipFile,
    where: object,
    names: Collection[str] | None,
) -> dict[str, zipfile.ZipInfo]:
    """The members of an .npz file that are wanted, by the names of their arrays."""
    held = {}
    for one in archive.infolist():
        name = one.filename.removesuffix(".npy")
        held[name] = one
    if names is None:
        return held
    for name in names:
        if name not in held:
            some = ", ".join(list(held)[:10]) or "none"
            raise Damaged(f"{where}: has no array {name!r}, only {some}: download it again")
    return {name: held[name] for name in names}


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Read one array of an .npz file.

    Raises ValueError if it holds no numbers, or if its header and its size disagree. Both are
    checked before any memory is allocated.
    """
    _check_method(member)
    name = member.filename
    with archive.open(member) as file:
        shape, fortran, dtype = _npy_header(file)
        if dtype.kind not in NUMBERS or dtype.subdtype:
            raise ValueError(f"{name} holds {dtype}, which are no numbers")
        size = math.prod(shape) * dtype.itemsize
        left = member.file_size - file.tell()
        if size != left or min(shape, default=0) < 0:
            told = f"{list(shape)} {dtype}, {size} bytes"
            raise ValueError(f"{name} tells of {told}, and has {left}")
        content = bytearray(size)
        place = 0
        while block := file.read(BLOCK):
            end = place + len(block)
            content[place:end] = block
            place = end
    if place != size:
        raise ValueError(f"{name} ends after {place} of {size} bytes")
    flat = np.frombuffer(content, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array: its shape, whether columns come first, and its format.

    Raises ValueError for a version of the format that numpy writes only for exotic types.
    """
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"it has a header of version {version}, need (1, 0) or (2, 0)")
    shape, fortran, dtype = readers[version](file)
    return shape, fortran, dtype


# ---- CSV ----


def read_csv(path: PathLike) -> list[dict[str, str]]:
    """Read the rows of a CSV file with a header, as dictionaries. Every row has all columns.

    Values stay text. Raises Damaged for a row with more or fewer cells than the header.
    """
    rows = csv_rows(path, text_lines(path))
    nothing: tuple[int, list[str]] = (0, [])
    _, header = next(rows, nothing)
    columns = len(header)
    found = []
    for line, cells in rows:
        if len(cells) != columns:
            has = f"{len(cells)} cells for {columns} columns"
            raise Damaged(f"{path}: line {line}: has {has}; correct that line")
        found.append(dict(zip(header, cells, strict=True)))
    return found


def csv_rows(
    path: PathLike,
    text: Iterable[str],
    delimiter: str = ",",
) -> Iterator[tuple[int, list[str]]]:
    """The rows of CSV text: the line where each one starts, and its cells.

    Args:
        path: The file, for errors.
        text: Its lines, with their line ends: a quoted cell may go on in the next one.
        delimiter: What separates cells.

    Empty lines are passed over. The numbers of rows, of columns and of characters in a cell are
    limited.
    """
    most = limits()
    line = 1
    # The csv module has a limit of its own for the whole process, which is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), most.field))
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        for number, cells in enumerate(reader):
            place = f"{path}: line {line}"
            longest = max(map(len, cells), default=0)
            most.check("columns", len(cells), place, "columns")
            most.check("rows", number, place, "rows before it")
            most.check("field", longest, place, "characters in a cell")
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        place = f"{path}: line {line}"
        if "field limit" in str(error):
            raise most.beyond("field", place, "has more characters in a cell") from None
        raise Damaged(f"{place}: cannot be read as CSV ({error}): check the quotes") from None
