"""Whose folder it is: each holds results of one kind, and files of others are not replaced.

`load_runs` reads a folder as a run if it has a spec.toml, as a sweep if it has a folder `parts`,
else as a comparison, whose runs lie in folders below it. In a folder with two kinds of results,
one of them would never be read. So a call refuses a folder that holds another kind than its own.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..support import picture, seal
from ..support.intake import is_file, read_bytes
from .plan import PLAN
from .spec import SPEC
from .store import PARTS, SETTINGS, TRIALS

RUN, COMPARISON, SWEEP = "a run", "a comparison", "a sweep"
# What a folder of each kind holds, as patterns of names.
MARKS = {RUN: (SPEC,), COMPARISON: (f"*/{SPEC}", PLAN), SWEEP: (PARTS,)}


def check_kind(folder: Path | None, kind: str) -> None:
    """Refuse a folder that holds other results than those that a call is about to write.

    Args:
        folder: The `out` of the call, which need not be there; None: nothing is kept.
        kind: What the call writes: `RUN`, `COMPARISON` or `SWEEP`.

    Raises:
        InputError: The folder holds another kind of results, or files that a sweep would replace.
    """
    if folder is None:
        return
    for other, names in MARKS.items():
        if other != kind and _has(folder, names):
            raise InputError(
                f"{folder} holds {other} already, beside which {kind} would not be read; choose "
                f"another folder"
            )
    if kind == SWEEP and not _has(folder, [PARTS]):
        _check_tables(folder)


def check_no_sweep(folder: Path) -> None:
    """Refuse the folder of a sweep where runs are to be resumed, and say how to go on with it.

    Raises:
        InputError: The folder holds a sweep and no runs.
    """
    runs = (*MARKS[RUN], *MARKS[COMPARISON])
    if _has(folder, MARKS[SWEEP]) and not _has(folder, runs):
        raise InputError(
            f"{folder} holds a sweep, which is not resumed: call the sweep again, with the same "
            f"arguments and out={str(folder)!r}; what is finished is not run again"
        )


def _check_tables(folder: Path) -> None:
    """Refuse a table or a list of trials that no sweep has written into the folder."""
    # The room `report` imports this one, so it can only be imported when it is needed.
    from ..report.sweeps import TABLE

    for name in (TABLE, TRIALS):
        if (folder / name).exists():
            raise InputError(
                f"{folder / name} already exists and would be overwritten; choose another folder"
            )


def forget_other(folder: Path, listed: str) -> None:
    """Remove the settings file and the pictures of another sweep, which would look like this one's.

    `fedsso.sweep` writes neither. Files that fedsso did not write are left alone.

    Args:
        folder: The folder of the sweep, which the caller has locked.
        listed: The new content of trials.csv. If the old one is the same, so is the sweep.
    """
    from ..report.sweeps import CURVES, GRID

    if is_file(folder / TRIALS) and read_bytes(folder / TRIALS) == listed.encode():
        return
    for name, mark in ((SETTINGS, seal.MARK), (CURVES, picture.MARK), (GRID, picture.MARK)):
        path = folder / name
        if is_file(path) and mark.encode() in read_bytes(path):
            path.unlink()


def _has(folder: Path, patterns: tuple[str, ...] | list[str]) -> bool:
    """Whether something lies in a folder under a name of these forms.

    A folder that cannot be looked into has nothing as far as we know; that it cannot be written
    is found a moment later.
    """
    try:
        return any(next(folder.glob(pattern), None) for pattern in patterns)
    except OSError:
        return False
