"""Reading the folders that runs, comparisons and sweeps have written.

A run's folder has a spec.toml, a comparison's has such folders below it, and a sweep's has a
folder `parts`. `load_runs` tells them apart by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from ..support.intake import is_file, is_folder, read_csv
from ..support.seal import read_sealed_toml
from .results import Results
from .run import Run, load_run, path_of, run_folders
from .store import DIGITS, PARTS, SETTINGS, TRIALS, read_all


def load_runs(folder: str | Path) -> Results:
    """Load the runs of a folder: a single run, several runs, or a sweep.

    The runs of a sweep have settings and traces, but no models. An unfinished sweep is read as
    far as its parts go; unfinished runs are an error.

    Args:
        folder: The `out` of `simulate`, `compare` or `sweep`, or of the command of the same name.

    Returns:
        The runs. Those of a sweep have its target, so `winners()` chooses as the sweep did.

    Raises:
        InputError: There is no run in the folder, or one is not finished or damaged.

    >>> import tempfile, fedsso
    >>> fed = fedsso.load("digits", clients=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = fedsso.compare(fed, "mclr", ["fedavg", "fedsgd"], rounds=2, out=folder)
    ...     fedsso.load_runs(folder)
    Results(2 runs, 2 settings of fedavg, fedsgd)
    """
    folder = path_of(folder)
    if (folder / PARTS).is_dir():
        return read_sweep(folder).results
    return Results(load_run(one) for one in run_folders(folder))


class Kept(NamedTuple):
    """What the folder of a sweep holds."""

    results: Results
    finished: bool  # whether the sweep has come to its end and listed its trials
    missing: int  # trials that it lists and that are gone
    others: int  # trials in the folder that it does not list


def read_sweep(folder: Path) -> Kept:
    """The trials that the folder of a sweep holds, as runs without models.

    Of a finished sweep these are the trials that it lists, though the folder may hold others:
    sweeps with other settings may share a folder, and each rewrites the list.

    Args:
        folder: The folder of a sweep, or its folder of parts.

    Raises:
        InputError: It holds no trials, or none of those that it lists.
    """
    parts = folder / PARTS if is_folder(folder / PARTS) else folder
    runs = read_all(parts)
    if not runs:
        raise InputError(
            f"{parts} holds no finished trial of this version of fedsso; run the sweep to the end"
        )
    finished = is_file(folder / TRIALS)
    target = _asked(folder / SETTINGS)
    missing = 0
    others = 0
    if finished:
        rows = read_csv(folder / TRIALS)
        names = _listed(folder / TRIALS, rows)
        target = _chosen_by(folder / TRIALS, rows[0].get("target", ""))
        known = {run.spec.identity[:DIGITS]: run for run in runs}
        found = [known[name] for name in names if name in known]
        if not found:
            raise InputError(
                f"none of the trials that {folder / TRIALS} lists are in {PARTS}; run the sweep "
                f"again"
            )
        missing = len(names) - len(found)
        others = len(runs) - len(found)
        runs = sorted(found, key=lambda run: run.spec.trial)
    return Kept(_divided(runs, target), finished, missing, others)


def _listed(path: Path, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The identities of the trials that a finished sweep lists."""
    names = [row.get("identity", "") for row in rows]
    if not names or not all(names):
        raise InputError(
            f"{path} was written by an earlier version; run the same sweep again: it is rewritten "
            f"without training again"
        )
    return names


def _divided(runs: Sequence[Run], target: float | None) -> Results:
    """The grid and, where it was judged by held-out rows, the settings that were run again.

    Args:
        runs: All trials, told apart by the rows that judged them.
        target: The accuracy that the sweep was to reach.
    """
    grid = [run for run in runs if run.judged_by == "val"]
    if not grid:
        return Results(runs, target=target)
    chosen = [run for run in runs if run.judged_by == "test"]
    return Results(grid, target=target, judged=Results(chosen) if chosen else None)


def _chosen_by(path: Path, text: str) -> float | None:
    """The target that a finished sweep has chosen its settings by; an empty cell: none.

    Args:
        path: The list of trials, for the message of an error.
        text: The cell of its first line.
    """
    if not text:
        return None
    target: object = text
    with suppress(ValueError):
        target = float(text)
    return _target(path, target)


def _asked(path: Path) -> float | None:
    """The target of a sweep that is not finished, as its settings file tells it."""
    if not is_file(path):
        return None
    return _target(path, read_sealed_toml(path).get("target"))


def _target(path: Path, target: object) -> float | None:
    """The accuracy that a file of a sweep asks for, checked."""
    if target is None:
        return None
    if not isinstance(target, int | float) or not 0 < target <= 1:
        raise InputError(
            f"{path}: target must be an accuracy in (0, 1], got {repr(target)[:40]}; correct that "
            f"line"
        )
    return float(target)
