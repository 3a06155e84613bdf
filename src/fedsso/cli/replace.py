"""Nothing of somebody else's is replaced: what is in the way is refused before any work.

A file that fedsso wrote is recognised by a mark in it, a run's folder by its spec.toml. Anything
else under a name that a command is about to write belongs to somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from ..errors import InputError
from ..experiment.plan import PLAN
from ..experiment.spec import SPEC
from ..experiment.store import PARTS
from ..support.intake import read_bytes
from ..support.lock import Lock

MOST = 1 << 24  # bytes in which a mark of ours is looked for


def check_file(path: Path, mark: str, what: str, option: str = "--out") -> None:
    """Refuse a file that is there, unless it has the mark of what fedsso writes.

    Args:
        path: What is about to be written.
        mark: The text that is in every file of this kind.
        what: The kind, for the message: "a page", "a picture".
        option: The option that names it, for the message.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(MOST)
    except OSError as error:
        raise InputError(
            f"{path} is there and cannot be read ({error.strerror}); give {option} another name"
        ) from error
    if mark.encode() not in start:
        raise InputError(
            f"{path} already exists and is not {what} written by fedsso; choose another name "
            f"for {option}"
        )


def check_settings(path: Path, text: str) -> None:
    """Refuse a settings file that is there, unless it would stay as it is.

    Args:
        path: What is about to be written.
        text: Its new content.
    """
    if path.is_file() and read_bytes(path) != text.encode():
        raise InputError(
            f"{path} already exists with different content; choose another name for --save-config"
        )


def check_folder(out: str, leaves: Sequence[str]) -> None:
    """Refuse a folder that holds a run, or files that the command would replace.

    Args:
        out: The folder, which need not be there.
        leaves: Patterns of the names that the command writes into it, or that would hide them.
    """
    if not out:
        raise InputError("--out must name a folder, got an empty name")
    if _held(out, [SPEC, f"*/{SPEC}", PLAN]):
        with Lock(out):  # a run that is under way is told first, with its process
            pass
        raise InputError(
            f"{out} already holds a run; choose another folder (`fedsso resume {quote(out)}` "
            f"completes a run)"
        )
    foreign = _held(out, leaves)
    if foreign and foreign[0].name == PARTS:
        raise InputError(f"{out} already holds a sweep; choose another folder for --out")
    if foreign:
        raise InputError(
            f"{foreign[0]} already exists and would be overwritten; choose another folder for --out"
        )


def _held(folder: str, patterns: Sequence[str]) -> list[Path]:
    """What lies in a folder under names of these forms.

    A folder that cannot be looked into holds nothing as far as we know; that it cannot be written
    is found a moment later.
    """
    try:
        found: list[Path] = []
        for pattern in patterns:
            found += sorted(Path(folder).glob(pattern))
        return found
    except OSError:
        return []
    except ValueError as error:
        raise InputError(f"--out must name a folder, got {folder!r} ({error})") from error
