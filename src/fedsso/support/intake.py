"""The one place where files of others come in: regular files only, within limits, damage told from
absence.

Whatever is wrong with a file is an InputError that names the file, the place in it and the remedy:
`Unreadable` (not there, no permission, not a regular file), `TooLarge` (beyond one of the `Limits`,
with the variable that raises it) or `Damaged` (the content is not what it should be).
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
from typing import IO, Any, BinaryIO, TypeAlias, cast

import numpy as np

from ..errors import InputError

PathLike: TypeAlias = str | os.PathLike[str]
Array: TypeAlias = np.ndarray[Any, Any]

PREFIX = "FEDSSO_MAX_"
"""What the environment variables of the limits begin with: FEDSSO_MAX_ROWS=1000000."""
DAMAGE = (EOFError, RuntimeError, struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What the standard library raises for a damaged archive, beside OSError without a number."""
BLOCK = 1 << 20  # bytes read at a time
SMALL = 1 << 26  # bytes: up to here a packed file may expand by any factor
CONTENTS = 1 << 22  # bytes of the list of contents of an archive
KINDS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
}
NUMBERS = "biuf"  # kinds of numpy's formats


class Unreadable(InputError):
    """A file that is not there, not allowed, or not a regular file; what it holds is not known."""

    kind = "a file that cannot be read"


class TooLarge(InputError):
    """A file beyond a limit."""

    kind = "a file beyond a limit"


class Damaged(InputError):
    """A file whose content is not what it should be."""

    kind = "a file that is damaged"


# ---- limits ----


@dataclass(frozen=True)
class Limits:
    """The most that is read of a file. The defaults keep a file that lies about its size below 2
    GB."""

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
        """Raise TooLarge where `found` is beyond the limit of that name."""
        if found > getattr(self, name):
            raise self.beyond(name, where, f"has {found} {what}")

    def beyond(self, name: str, where: object, has: str) -> TooLarge:
        """The error for a file that is beyond the limit of that name."""
        raised = f"set {PREFIX}{name.upper()} to a larger number if the file is to be trusted"
        return TooLarge(f"{where}: {has}, at most {getattr(self, name)} are read; {raised}")


def limits() -> Limits:
    """The limits in force: the defaults, but for those that the environment sets."""
    found = {}
    for field in fields(Limits):
        text = os.environ.get(PREFIX + field.name.upper(), "")
        if text:
            found[field.name] = _positive(PREFIX + field.name.upper(), text)
    return Limits(**found)


def _positive(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or not int(text):
        raise InputError(f"${name} must be a whole number from 1 to 10^18 - 1, got {text[:40]!r}")
    return int(text)


# ---- paths ----


def user_path(what: str, path: object) -> Path:
    """A path as users write it, with ~ for their home; InputError if no file can have that name."""
    try:
        found = Path(path).expanduser()  # type: ignore[arg-type]
        str(found).encode()
        os.stat(found)
    except FileNotFoundError:
        return found
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.EINVAL):
            return found  # something for the reader to find
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{what} must be the path of a file or folder, got {path!r} ({why})"
        ) from None
    return found


def is_file(path: PathLike) -> bool:
    """Whether a regular file is there; Unreadable where that cannot be found out."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: PathLike) -> bool:
    """Whether a folder is there; Unreadable where that cannot be found out."""
    return stat.S_ISDIR(_mode(path))


def inside(folder: PathLike) -> list[Path]:
    """What a folder holds, in the order of the names; nothing where there is no folder."""
    if not is_folder(folder):
        return []
    try:
        return sorted(Path(folder).iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from None


def _mode(path: PathLike) -> int:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


REMEDIES = {
    errno.ENOENT: "check the name",
    errno.EACCES: "ask its owner for the permission to read it; nothing is known about its content",
    errno.EPERM: "ask its owner for the permission to read it; nothing is known about its content",
    errno.ENXIO: "give the name of a regular file",
}


def _unreadable(path: PathLike, error: Exception) -> Unreadable:
    """The file cannot be opened or its disk does not give it."""
    if isinstance(error, OSError):
        remedy = REMEDIES.get(error.errno or 0, "check the name and the disk")
        return Unreadable(f"cannot read {path}: {error.strerror or error}; {remedy}")
    return Unreadable(f"cannot read {str(path)!r}: no file can have this name ({error})")


# ---- bytes and text ----


@contextmanager
def opened(path: PathLike) -> Iterator[BinaryIO]:
    """A regular file, open for reading; a pipe, a device or a folder is refused without waiting for
    it."""
    with os.fdopen(_handle(path), "rb") as file:
        yield file


def _handle(path: PathLike) -> int:
    """The open file's number."""
    try:
        handle = os.open(
            path, os.O_RDONLY | _flag("O_NONBLOCK") | _flag("O_NOCTTY") | _flag("O_BINARY")
        )
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = IRREGULAR.get(stat.S_IFMT(mode), "something else")
        raise Unreadable(
            f"cannot read {path}: it is {kind}, not a regular file; give the name of a file"
        )
    return handle


def _flag(name: str) -> int:
    """A flag of open, 0 where the system does not have it."""
    return int(getattr(os, name, 0))


IRREGULAR = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_bytes(path: PathLike, limit: str = "bytes") -> bytes:
    """All bytes of a file, within the limit of that name."""
    most = limits()
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        most.check(limit, size, path, "bytes")
        try:
            data = file.read(size + BLOCK)
        except OSError as error:
            raise _unreadable(path, error) from None
    if len(data) == size + BLOCK:
        raise Unreadable(
            f"cannot read {path}: it grows while it is read; copy it, and give the copy"
        )
    return data


def read_text(path: PathLike, limit: str = "text") -> str:
    """The text of a UTF-8 file, with or without a byte-order mark."""
    return decoded(read_bytes(path, limit), path)


def decoded(data: bytes, where: object) -> str:
    """UTF-8 bytes as text, without a byte-order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Damaged(
            f"cannot read {where}: line {line} is not UTF-8 text; save the file as UTF-8"
        ) from None


# ---- TOML and JSON ----


def read_toml(path: PathLike) -> dict[str, Any]:
    """A TOML file as nested dictionaries."""
    return parse_toml(read_text(path, "settings"), path)


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """TOML text as nested dictionaries."""
    _check_shape(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raise Damaged(f"cannot read {where} as TOML: {error}; correct that line") from None


def read_json(path: PathLike) -> Any:
    """What a JSON file holds."""
    return parse_json(read_text(path, "settings"), path)


def parse_json(text: str, where: object) -> Any:
    """What JSON text holds."""
    _check_shape(text, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        raise Damaged(f"cannot read {where} as JSON: {error}; correct that place") from None


QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|\Z)'
    r"|'[^'\n]*+(?:'|(?=\n)|\Z)"
    r"|#[^\n]*",
    re.DOTALL,
)
"""Texts and comments, in which brackets, dots and digits mean nothing; one that is not closed goes
on to the end."""


def _check_shape(text: str, where: object) -> None:
    """Hold the limits of nesting and digits before a parser sees the text, whose time and stack
    they bound."""
    most = limits()
    bare = QUOTED.sub(lambda found: re.sub(r"[^\n]", "q", found[0]), text)
    long = re.search(rf"(?<![0-9_])[0-9][0-9_]{{{most.digits},}}", bare)
    if long:
        raise most.beyond(
            "digits", _line(where, bare, long.start()), f"has a number of {len(long[0])} digits"
        )
    chain = re.search(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{most.nesting},}}", bare)
    if chain:
        has = f"has a name of {chain[0].count('.') + 1} parts"
        raise most.beyond("nesting", _line(where, bare, chain.start()), has)
    depth = 0
    for bracket in re.finditer(r"[\[\]{}]", bare):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > most.nesting:
            has = f"has more than {most.nesting} brackets within each other"
            raise most.beyond("nesting", _line(where, bare, bracket.start()), has)


def _line(where: object, text: str, place: int) -> str:
    return f"{where}: line {text.count(chr(10), 0, place) + 1}"


# ---- packed files ----


@contextmanager
def unpacked(path: PathLike) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where they are gzip, bzip2 or xz, or the one text file in a zip
    archive.

    What comes out is bounded by the limits `unpacked` and `expansion`.
    """
    kind, most = "it is", limits()
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(opened(path))
            size = os.fstat(raw.fileno()).st_size
            head = cast(io.BufferedReader, raw).peek(6)
            kind = next((name for magic, name in KINDS.items() if head.startswith(magic)), kind)
            inner = stack.enter_context(_unpacking(raw, kind, path))
            yield cast(
                IO[bytes],
                stack.enter_context(io.BufferedReader(_Metered(inner, path, size, most), 1 << 16)),
            )
    except MemoryError:
        raise InputError(
            f"{path}: is too large for the memory of this machine; use a part of it"
        ) from None
    except (OSError, *DAMAGE) as error:
        if isinstance(error, OSError) and error.errno:
            raise _unreadable(path, error) from None
        raise Damaged(
            f"{path}: cannot be read as {kind}, corrupt or cut short ({error}): fetch it again"
        ) from None


class _Metered(io.RawIOBase):
    """A stream that counts what it gives, and ends with TooLarge beyond the limits."""

    def __init__(self, inner: IO[bytes], path: PathLike, size: int, most: Limits) -> None:
        self.inner, self.path, self.size, self.most, self.given = inner, path, size, most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.inner.read(min(len(buffer), BLOCK))
        buffer[: len(data)] = data
        self.given += len(data)
        check_expansion(self.given, self.size, self.path, self.most)
        return len(data)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.given

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        """Go forward by reading; there is no way back."""
        target = place + (self.given if whence == os.SEEK_CUR else 0)
        if whence == os.SEEK_END or target < self.given:
            raise io.UnsupportedOperation("a packed file is read from its start to its end")
        while self.given < target and self.read(min(BLOCK, target - self.given)):
            pass
        return self.given


def check_expansion(given: int, size: int, where: object, most: Limits) -> None:
    """Raise TooLarge where a file of `size` bytes gives too many."""
    most.check("unpacked", given, where, "or more bytes, unpacked")
    if given > max(SMALL, most.expansion * size):
        raise most.beyond(
            "expansion", where, f"becomes {given / max(size, 1):.0f} times larger, unpacked"
        )


def lines(path: PathLike) -> Iterator[bytes]:
    """The lines of a file, unpacked; their number and their length are limited."""
    most = limits()
    with unpacked(path) as file:
        n = 0
        while line := file.readline(most.line + 1):
            n += 1
            if n > most.rows:
                raise most.beyond("rows", path, f"has more than {most.rows} lines")
            if len(line) > most.line:
                raise most.beyond("line", f"{path}: line {n}", "is longer")
            yield line


def text_lines(path: PathLike) -> Iterator[str]:
    """The lines of a UTF-8 file as text, unpacked, with the ends that they have; limited as `lines`
    are."""
    most = limits()
    with (
        unpacked(path) as file,
        io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text,
    ):
        n = 0
        while line := text.readline(most.line + 1):
            n += 1
            if n > most.rows:
                raise most.beyond("rows", path, f"has more than {most.rows} lines")
            if len(line) > most.line:
                raise most.beyond("line", f"{path}: line {n}", "is longer")
            if "\0" in line or (
                not line.isascii() and any("\ud800" <= c <= "\udfff" for c in line)
            ):
                raise Damaged(
                    f"cannot read {path}: line {n} is not UTF-8 text; save the file as UTF-8"
                )
            yield line


def _unpacking(raw: BinaryIO, kind: str, path: PathLike) -> IO[bytes]:
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
    texts = [one for one in archive.infolist() if one.filename.endswith((".txt", ".csv"))]
    if len(texts) != 1:
        found = ", ".join(one.filename for one in texts[:10]) or "none"
        raise InputError(
            f"{path}: need one .txt or .csv file in it, got {found}: unpack it and name the one to "
            f"use"
        )
    _deflated(texts[0])
    return texts[0]


class Pieces:
    """A file for zipfile or tarfile, which read a list of contents, or a name, as long as the
    archive says it is."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file, self.seek, self.tell, self.seekable = file, file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """So many bytes, which must not be more than a list of contents ought to have."""
        if size > CONTENTS:
            raise zipfile.BadZipFile(
                f"it asks for {size} bytes at once, at most {CONTENTS} are read"
            )
        return self.file.read(size)


def zip_archive(file: IO[bytes]) -> zipfile.ZipFile:
    """A zip file whose list of contents is read only if it is short."""
    return zipfile.ZipFile(cast(IO[bytes], Pieces(file)))


def _deflated(member: zipfile.ZipInfo) -> None:
    """The other methods unpack a block into any number of bytes at once."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(
            f"{member.filename} is packed by method {member.compress_type}, need 0 or 8"
        )


# ---- arrays ----


def read_npz(path: PathLike, names: Collection[str] | None = None) -> dict[str, Array]:
    """The arrays of an .npz file, all or those named; see `parse_npz`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        limits().check("bytes", size, path, "bytes")
        return _npz(file, size, path, names)


def parse_npz(data: bytes, where: object, names: Collection[str] | None = None) -> dict[str, Array]:
    """The arrays of an .npz file's bytes: numbers only, nothing pickled.

    The sizes that the file states are checked against the limits and each other before anything is
    allocated.
    """
    return _npz(io.BytesIO(data), len(data), where, names)


def _npz(
    file: IO[bytes], size: int, where: object, names: Collection[str] | None
) -> dict[str, Array]:
    try:
        with zip_archive(file) as archive:
            held = {one.filename.removesuffix(".npy"): one for one in archive.infolist()}
            missing = [name for name in names or () if name not in held]
            if missing:
                raise Damaged(
                    f"{where}: has no array {missing[0]!r}, only "
                    f"{', '.join(list(held)[:10]) or 'none'}: fetch it again"
                )
            wanted = {name: held[name] for name in (held if names is None else names)}
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
            f"{where}: cannot be read as .npz, corrupt or cut short ({error}): fetch it again"
        ) from None


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array; ValueError where its header and its size disagree, or it is not plain."""
    _deflated(member)
    with archive.open(member) as file:
        shape, fortran, dtype = _npy_header(file)
        if dtype.kind not in NUMBERS or dtype.subdtype:
            raise ValueError(f"{member.filename} holds {dtype}, which are no numbers")
        size, left = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if size != left or min(shape, default=0) < 0:
            raise ValueError(
                f"{member.filename} tells of {list(shape)} {dtype}, {size} bytes, and has {left}"
            )
        content, place = bytearray(size), 0
        while block := file.read(BLOCK):
            content[place : place + len(block)] = block
            place += len(block)
    if place != size:
        raise ValueError(f"{member.filename} ends after {place} of {size} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
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
    """The rows of a CSV file with a header, as dictionaries; every row has all columns."""
    rows = csv_rows(path, text_lines(path))
    _, header = next(rows, (0, list[str]()))
    found = []
    for line, cells in rows:
        if len(cells) != len(header):
            raise Damaged(
                f"{path}: line {line}: has {len(cells)} cells for {len(header)} columns; correct "
                f"that line"
            )
        found.append(dict(zip(header, cells, strict=True)))
    return found


def csv_rows(
    path: PathLike, text: Iterable[str], delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """The line where each row starts and its cells, within the limits; empty lines are passed over."""
    most, line = limits(), 1
    csv.field_size_limit(max(csv.field_size_limit(), most.field))
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        for n, cells in enumerate(reader):
            place = f"{path}: line {line}"
            most.check("columns", len(cells), place, "columns")
            most.check("rows", n, place, "rows before it")
            most.check("field", max(map(len, cells), default=0), place, "characters in a cell")
            if cells:
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        if "field limit" in str(error):
            raise most.beyond(
                "field", f"{path}: line {line}", "has more characters in a cell"
            ) from None
        raise Damaged(
            f"{path}: line {line}: cannot be read as CSV ({error}): check the quotes"
        ) from None
