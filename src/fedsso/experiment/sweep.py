"""A sweep: every record of a grid under every seed, with all traces in a few files.

One function plans a sweep, one store keeps its trials with their settings, one rule chooses the
best setting of each algorithm; `fedsso.sweep` and the command `fedsso sweep` both end up here.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError, integer
from ..support.files import check_writable
from ..support.intake import is_file, is_folder, read_csv
from ..support.lock import Lock
from ..support.seal import read_sealed_toml
from .execute import Progress, begin, chunks
from .plan import Planned, Question, check, judging, plan
from .results import Results
from .store import (
    DIGITS,
    PARTS,
    SETTINGS,
    TRIALS,
    Held,
    add_settings,
    held,
    put_aside_damaged,
    read,
    read_all,
)
from .workers import in_order, in_processes

if TYPE_CHECKING:
    from .run import Run
    from .spec import Spec


class Means(NamedTuple):
    """How a sweep is carried out, which changes no number of its result."""

    out: Path | None = None  # folder of the parts; None: nothing is kept
    jobs: int = 1  # processes that share the work
    deadline: float = math.inf  # of time.monotonic(): no new part begins after it
    progress: Progress | None = None


def answer(
    question: Question,
    planned: Sequence[Planned],
    means: Means,
    target: float | None,
    select: str,
) -> Results:
    """Run a planned grid and choose the best setting of each algorithm.

    With `select` "val" the grid is judged by training rows that are held out; then the chosen
    settings are run on all training rows and judged by the test rows.
    """
    grid = question._replace(fed=judging(question.fed, select))
    runs = carry_out(grid, planned, means, judged_by=select)
    results = Results(runs, target=target)
    if select == "test":
        return results
    winners = [setting.record for setting in results.winners().values()]
    again = question._replace(records=winners)
    return Results(runs, target=target, judged=carry_out(again, plan(*again), means))


def run_grid(question: Question, means: Means) -> Results:
    """Plan and check a grid, then run it; nothing is chosen."""
    planned = plan(*question)
    check(planned)
    return carry_out(question, planned, means)


def carry_out(
    question: Question, planned: Sequence[Planned], means: Means, judged_by: str = "test"
) -> Results:
    """Run every planned trial, batched, and keep all traces; what is kept is not run again."""
    with _folder(means.out) as folder, Lock(folder):
        check_writable(folder)
        put_aside_damaged(folder)
        there = held(folder)
        specs = [run.spec for run in planned]
        look = begin(means.progress, specs)
        if look is not None:
            kept = [spec for spec in specs if spec.identity in there]
            runs = read([there[spec.identity] for spec in kept], kept)
            look(kept, [run.trace for run in runs])
        todo = [i for i, spec in enumerate(specs) if spec.identity not in there]
        parts = list(chunks(planned, todo))
        tally = _Tally(planned, todo, means.progress)
        processes = min(integer("jobs", means.jobs, 1), len(parts))
        if processes > 1:
            arguments = tuple(question)
            in_processes(
                arguments, parts, folder, processes, means.deadline, tally, look, judged_by
            )
        else:
            in_order(planned, parts, folder, means.deadline, tally, look, judged_by)
        return Results(_collect(specs, folder))


class Kept(NamedTuple):
    """What the folder of a sweep holds."""

    results: Results
    finished: bool  # whether the sweep has come to its end and listed its trials
    missing: int  # trials that it lists and that are gone
    others: int  # trials in the folder that it does not list


def read_sweep(folder: Path) -> Kept:
    """The trials that the folder of a sweep holds, as runs without models.

    Of a finished sweep these are the trials that it lists, though the folder may hold others.
    """
    parts = folder / PARTS if is_folder(folder / PARTS) else folder
    runs = read_all(parts)
    if not runs:
        raise InputError(
            f"{parts} holds no finished trial of this version of fedsso; run the sweep to its end"
        )
    finished = is_file(folder / TRIALS)
    missing = 0
    others = 0
    if finished:
        names = _listed(folder / TRIALS)
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
    return Kept(_divided(runs, _asked(folder / SETTINGS)), finished, missing, others)


def _listed(path: Path) -> list[str]:
    """The identities of the trials that a finished sweep lists."""
    names = [row.get("identity", "") for row in read_csv(path)]
    if not all(names):
        raise InputError(
            f"{path} was written by an earlier version; run the same sweep again: it is rewritten "
            f"without training anything anew"
        )
    return names


def _divided(runs: Sequence[Run], target: float | None) -> Results:
    """The grid and, where it was judged by held-out rows, the settings that were run again."""
    grid = [run for run in runs if run.judged_by == "val"]
    if not grid:
        return Results(runs, target=target)
    chosen = [run for run in runs if run.judged_by == "test"]
    return Results(grid, target=target, judged=Results(chosen) if chosen else None)


def _asked(path: Path) -> float | None:
    """The target of a sweep, as its settings file tells it."""
    if not is_file(path):
        return None
    return _target(path, read_sealed_toml(path).get("target"))


def _target(path: Path, target: object) -> float | None:
    """The accuracy that a settings file asks for."""
    if target is None:
        return None
    if not isinstance(target, int | float) or not 0 < target <= 1:
        raise InputError(
            f"{path}: target must be an accuracy in (0, 1], got {repr(target)[:40]}; correct that "
            f"line"
        )
    return float(target)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """The folder of the parts; a temporary one if nothing is to be kept."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="fedsso-") as name:
        yield Path(name)


def _collect(specs: Sequence[Spec], folder: Path) -> Results:
    """The runs in the order of the plan."""
    there: Mapping[str, Held] = held(folder)
    gone = sum(spec.identity not in there for spec in specs)
    if gone:
        raise InputError(
            f"the traces of {gone} trials are gone: somebody removed them meanwhile; run it again"
        )
    runs = read([there[spec.identity] for spec in specs], specs)
    add_settings(folder, runs)
    return Results(runs)


class _Tally:
    """Counts the rounds of all trials over all parts, for one progress bar."""

    def __init__(
        self, planned: Sequence[Planned], todo: Sequence[int], progress: Progress | None
    ) -> None:
        self.rounds = [run.settings.rounds for run in planned]
        self.total = sum(self.rounds[i] for i in todo)
        self.progress = progress
        self.done = 0
        self.told = 0
        self.under_way: dict[int, int] = {}
        self.label = ""
        self.numbers: dict[str, float] = {}

    def round(self, part: Sequence[int], k: int, label: str, numbers: dict[str, float]) -> None:
        """A part has done k rounds."""
        self.under_way[part[0]] = k * len(part)
        self.label = label
        self.numbers = numbers
        self._tell()

    def end(self, part: Sequence[int]) -> None:
        """A part is written; it may have ended early."""
        self.under_way.pop(part[0], None)
        self.done += sum(self.rounds[i] for i in part)
        self._tell()

    def _tell(self) -> None:
        """Call the progress, never backwards: halves of a part that was too large begin again."""
        now = self.done + sum(self.under_way.values())
        if self.progress is not None and now > self.told:
            self.told = now
            self.progress(self.label, now, self.total, self.numbers)
