"""Files written whole or not at all, and TOML text (the standard library only reads it)."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from ..errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")  # the temporary names of `write_atomic`
LONGEST = 200  # letters of a file's name that its temporary name repeats


def unwritable(path: str | Path, error: OSError) -> InputError:
    """The error for a path that cannot be written, with the remedy."""
    remedy = (
        "free some space" if error.errno in FULL else "give a path in a folder that can be written"
    )
    return InputError(f"cannot write {path}: {error.strerror}; {remedy}")


def write_atomic(path: str | Path, data: bytes | bytearray | str, keep: Path | None = None) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees the old or the new
    one.

    With `keep` the old file stays under that name. A process that dies between the two renamings
    leaves the old file there and none in its place.
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing at the file behind it
    if os.path.exists(target) and not os.path.isfile(target):
        raise InputError(f"cannot write {path}: it is not a regular file; give the name of a file")
    temporary = target.with_name(f".{target.name[:LONGEST]}.{token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        content = data.encode() if isinstance(data, str) else data
        write_then_rename(temporary, target, lambda file: file.write(content), keep)
    except OSError as error:
        raise unwritable(path, error) from error


def write_then_rename(
    temporary: Path, target: Path, fill: Callable[[IO[bytes]], object], keep: Path | None = None
) -> None:
    """Let a function fill a file, which gets its name only when it is complete and on the disk."""
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and target.exists():
            os.replace(target, keep)
        os.replace(temporary, target)
        _settle(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _settle(folder: Path) -> None:
    """Bring the names in a folder to the disk as well: after a power failure a file must have its
    new name."""
    with suppress(OSError):  # not every file system can
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half-written in a folder; only for who holds its lock."""
    with suppress(OSError):
        for path in folder.iterdir():
            if LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)


def check_writable(folder: str | Path) -> None:
    """Create the folder and try a file in it: the error comes before hours of work, not after."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unwritable(folder, error) from error


def to_toml(table: Mapping[str, object]) -> str:
    """TOML text of strings, booleans, numbers, lists of those and nested tables; None is left out."""
    return "\n\n".join(_sections((), table)).lstrip("\n") + "\n"


def _sections(path: tuple[str, ...], table: Mapping[str, object]) -> list[str]:
    """A table's own values under its header, then one section for each table below it."""
    header = [f"[{'.'.join(map(_key, path))}]"] if path else []
    leaves = {k: v for k, v in table.items() if v is not None and not isinstance(v, Mapping)}
    lines = header + [f"{_key(name)} = {_value(name, value)}" for name, value in leaves.items()]
    below = [_sections((*path, k), v) for k, v in table.items() if isinstance(v, Mapping)]
    return ["\n".join(lines), *(section for sections in below for section in sections)]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON leaves DEL bare, TOML forbids it


def _value(name: str, value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's float64 is a float with a repr of its own
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    kind = type(value).__name__
    raise InputError(
        f"cannot write {name} = {value!r} as TOML: use text, numbers or lists, not {kind}"
    )
