"""Writing files whole or not at all, and writing TOML.

A process can be killed while it writes, and a disk can be full. A file is therefore written under a
temporary name and renamed when it is complete, so that nobody ever reads half a file.

The standard library reads TOML but does not write it, so `to_toml` is here. `to_csv` is the one
place where tables with texts of other people become CSV.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from ..errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that is full."""
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""What the temporary names of `write_atomic` look like."""
LONGEST = 200
"""How many letters of a file's name its temporary name repeats."""
FORMULA = ("=", "+", "-", "@")
"""What a cell begins with that a spreadsheet computes."""
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""A key that TOML takes without quotes."""


def unwritable(path: str | Path, error: OSError) -> InputError:
    """The error for a path that cannot be written. It says what to do about it."""
    if error.errno in FULL:
        remedy = "free some space"
    else:
        remedy = "give a path in a folder that can be written"
    return InputError(f"cannot write {path}: {error.strerror}; {remedy}")


def write_atomic(
    path: str | Path,
    data: bytes | bytearray | str,
    keep: Path | None = None,
) -> None:
    """Write a file, so that a reader sees the old content or the new one but never a mixture.

    Args:
        path: The file. Its folder is made if it does not exist. A link stays a link: what it
            points at is written.
        data: The content; text is written as UTF-8.
        keep: If given, the old file stays under that name. A process that dies between the two
            renamings leaves the old file there, and no file in its place.

    Raises:
        InputError: The path is not a regular file, or cannot be written.
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing at the file behind it
    if os.path.exists(target) and not os.path.isfile(target):
        raise InputError(f"cannot write {path}: it is not a regular file; give the name of a file")
    short = target.name[:LONGEST]
    temporary = target.with_name(f".{short}.{token_hex(8)}.tmp")
    content = data.encode() if isinstance(data, str) else data
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_then_rename(temporary, target, lambda file: file.write(content), keep)
    except OSError as error:
        raise unwritable(path, error) from error


def write_then_rename(
    temporary: Path,
    target: Path,
    fill: Callable[[IO[bytes]], object],
    keep: Path | None = None,
) -> None:
    """Let `fill` write a file, and give it its name when it is complete and on the disk.

    Args:
        temporary: The name until then, in the same folder as the target. It is removed in any
            case.
        target: The name afterwards.
        fill: Writes the content into the open file.
        keep: As for `write_atomic`.
    """
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and target.exists():
            os.replace(target, keep)
        os.replace(temporary, target)
        _sync_names(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_names(folder: Path) -> None:
    """Bring the names in a folder to the disk.

    Without this, a renamed file could have its old name again after a power failure.
    """
    with suppress(OSError):  # not every file system can do it
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_leftovers(folder: Path) -> None:
    """Remove the half-written files of killed processes. Only the holder of the lock may do it."""
    with suppress(OSError):
        for path in folder.iterdir():
            if LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)


def check_writable(folder: str | Path) -> None:
    """Create a folder and try to write in it: the error comes before hours of work, not after."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(folder, error) from error


# ---- CSV ----


def to_csv(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV text; None is an empty cell.

    A spreadsheet runs a text that begins like a formula: it gets an apostrophe, unless it is a
    number.

    >>> to_csv([["name", "x"], ["=cmd|' /C calc'!A0", -1.5], ["-1.5", None]])
    "name,x\\n'=cmd|' /C calc'!A0,-1.5\\n-1.5,\\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([_harmless(cell) for cell in row])
    return text.getvalue()


def records_to_csv(records: Iterable[Mapping[str, object]]) -> str:
    """Records as CSV text, with the names of the columns in the first line.

    Columns stand in the order in which the records first have them. What a record lacks is empty.
    """
    rows = list(records)
    names: dict[str, None] = {}  # a set that keeps the order
    for row in rows:
        names |= dict.fromkeys(row)
    return to_csv([names, *([row.get(name) for name in names] for row in rows)])


def _harmless(cell: object) -> object:
    """A cell that no spreadsheet takes for a formula."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


# ---- TOML ----


def to_toml(table: Mapping[str, object]) -> str:
    """Write a dictionary as TOML.

    Values may be text, booleans, numbers, lists of these, and dictionaries, which become tables.
    None is left out. Raises InputError for anything else.

    >>> print(to_toml({"rounds": 5, "data": {"name": "digits", "clients": None}}), end="")
    rounds = 5
    <BLANKLINE>
    [data]
    name = "digits"
    """
    sections = _sections((), table)
    return "\n\n".join(sections).lstrip("\n") + "\n"


def _sections(path: tuple[str, ...], table: Mapping[str, object]) -> list[str]:
    """The sections of a table: its own values under its header, then those of the tables in it.

    `path` lists the keys that lead to the table.
    """
    lines = []
    if path:
        header = ".".join(map(_key, path))
        lines.append(f"[{header}]")
    below: list[str] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            below += _sections((*path, name), value)
        elif value is not None:
            lines.append(f"{_key(name)} = {_value(name, value)}")
    return ["\n".join(lines), *below]


def _key(name: str) -> str:
    """A key, in quotes if it needs them."""
    return name if BARE_KEY.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """A text in quotes. JSON writes it as TOML wants it, but for the character DEL."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("\x7f", "\\u007f")


def _value(name: str, value: object) -> str:
    """A value as TOML writes it. `name` is its key, for the error."""
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's float64 is a float with a repr of its own
    if isinstance(value, list | tuple):
        items = [_value(name, item) for item in value]
        return f"[{', '.join(items)}]"
    kind = type(value).__name__
    raise InputError(
        f"cannot write {name} = {value!r} as TOML: use text, numbers or lists, not {kind}"
    )
