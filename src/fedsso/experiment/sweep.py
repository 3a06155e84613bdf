"""A sweep: every record of a grid under every seed, with all traces in a few files.

One function plans a sweep, one store keeps its trials with their settings, one rule chooses the
best setting of each algorithm; `fedsso.sweep` and the command `fedsso sweep` both end up here.

The trials are cut into parts, which are trained batched, one after the other or on several
processes. Each part is written when it is finished. A sweep that is called again looks which
trials are there and trains the others. Several sweeps that ask the same may share a folder, from
several machines too: each takes parts that no other has taken, and all of them end with the same
result.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.ranks import team
from ..engine.settings import device_of
from ..errors import InputError, integer, number
from ..support.claims import Claims
from ..support.files import check_writable
from ..support.lock import Lock
from .execute import Counter, Progress, Standing, begin, chunks, follow
from .plan import VARIED, Planned, Question, check, judging, plan
from .results import Results
from .run import Run
from .store import (
    Held,
    add_settings,
    held,
    put_aside_damaged,
    read,
)
from .together import lead_or_follow
from .workers import Agenda, in_order, in_processes

if TYPE_CHECKING:
    from ..algorithm import Algorithm
    from .spec import Spec


log = logging.getLogger("fedsso")
SHARED = "sweeps"  # all sweeps may write parts into a folder at once
CHOSEN = "chosen settings"  # the second phase of a sweep that chooses by held-out rows


class Means(NamedTuple):
    """How a sweep is carried out, which changes no number of its result."""

    out: Path | None = None  # folder of the parts; None: nothing is kept
    jobs: int = 1  # processes that share the work
    deadline: float = math.inf  # of time.monotonic(): no new part begins after it
    progress: Progress | None = None
    phase: str = "grid"  # what the progress calls this part of the work
    at_once: int | None = None  # trials of a part at most; None: as many as fit
    devices: tuple[str, ...] = ()  # one process on each; none: where the run options say


def deadline_of(minutes: float | None) -> float:
    """The time of `time.monotonic()` at which so many minutes are over; None: never.

    Raises:
        InputError: It is not a number above 0.
    """
    if minutes is None:
        return math.inf
    if not number("minutes", minutes) > 0:
        raise InputError(f"minutes must be > 0, got minutes={minutes}")
    return time.monotonic() + 60 * minutes


def split_devices(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Run options whose device may be several, as a list or with commas between.

    Returns:
        The options with the first device, and all devices if there are several.

    Raises:
        InputError: One of them is not there.

    >>> split_devices({"device": "cpu,cpu"})
    ({'device': 'cpu'}, ('cpu', 'cpu'))
    """
    given = options.get("device", "auto")
    several = given
    if not isinstance(given, list | tuple):
        several = str(given).split(",")
    names = tuple(str(name).strip() for name in several)
    if not names:
        raise InputError("device must name at least one device, got an empty list")
    for name in names:
        device_of(name)
    first = {**options, "device": names[0]}
    return first, names if len(names) > 1 else ()


def purpose_of(
    planned: Sequence[Planned],
    target: float | None,
    select: str,
) -> str:
    """What a sweep asks, as a word: those who ask the same may share a folder.

    Args:
        planned: The trials of the grid.
        target: The accuracy to reach, or None.
        select: The rows to choose by.
    """
    parts = [run.spec.identity for run in planned]
    parts.append(repr(target))
    parts.append(select)
    text = " ".join(parts)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"sweep {digest[:16]}"


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

    Args:
        question: What is asked, with the whole federation.
        planned: The trials of the grid, planned on the rows that judge it.
        means: How it is carried out.
        target: The accuracy to reach, or None.
        select: The rows to choose by, "test" or "val".

    Returns:
        The runs of the grid. With "val", `judged` has those of the chosen settings.
    """
    grid = question._replace(fed=judging(question.fed, select))
    runs = _with_all(grid, planned, means, judged_by=select)
    results = Results(runs, target=target)
    if select == "test":
        return results
    # By the plan: an algorithm of the caller's own need not be in the registry.
    records = {run.spec.point: run.record for run in planned}
    chosen = {name: records[best.spec.point] for name, best in results.winners().items()}
    return judge_chosen(question, results, means, chosen)


def judge_chosen(
    question: Question,
    results: Results,
    means: Means,
    chosen: Mapping[str, Algorithm],
) -> Results:
    """Run the best setting of each algorithm on all training rows, judged by the test rows.

    Args:
        question: What is asked, with the whole federation.
        results: The runs that were judged by held-out rows.
        means: How it is carried out.
        chosen: The record of the best setting of each algorithm.
    """
    winners = results.winners()
    # A winner runs with its own local steps and batch size, not with all that were listed.
    own = []
    for setting in winners.values():
        own.append({name: setting.spec.options[name] for name in VARIED})
    again = question._replace(records=[chosen[name] for name in winners], own=own)
    last = means._replace(phase=CHOSEN)
    return Results(results, target=results.target, judged=_with_all(again, plan(*again), last))


def run_grid(question: Question, means: Means) -> Results:
    """Plan and check a grid, then run it; nothing is chosen.

    The paper's tables use it, which choose by rules of their own.
    """
    planned = plan(*question)
    check(planned)
    return _with_all(question, planned, means)


def _with_all(
    question: Question, planned: Sequence[Planned], means: Means, judged_by: str = "test"
) -> Results:
    """As `carry_out`, by all processes that torchrun has started, one batch after the other."""
    ours = team()
    if ours.size > 1 and means.devices:
        raise InputError(
            f"device={','.join(means.devices)} lists several, but torchrun gives each of its "
            f"processes one; leave device out"
        )
    if ours.size > 1 and means.jobs > 1:
        if ours.is_first:
            log.warning("jobs=%d is left out: torchrun has started the processes", means.jobs)
        means = means._replace(jobs=1)

    def lead() -> list[Run]:
        return list(carry_out(question, planned, means, judged_by))

    return Results(lead_or_follow(planned, lead, follow))


def carry_out(
    question: Question, planned: Sequence[Planned], means: Means, judged_by: str = "test"
) -> Results:
    """Run every planned trial, batched, and keep all traces; what is kept is not run again.

    Args:
        question: The arguments of `plan`, with which other processes make the same plan.
        planned: The trials, in the order of that plan.
        means: How it is carried out.
        judged_by: The rows that are evaluated, which is written down with each trial.

    Raises:
        OutOfTime: The deadline has passed and parts are left.
        InputError: The folder cannot be written, or a process failed.
    """
    with kept_in(means.out) as folder, Lock(folder, SHARED), Claims(folder) as claims:
        check_writable(folder)
        put_aside_damaged(folder)
        there = held(folder)
        specs = [run.spec for run in planned]
        look = begin(means.progress, specs)
        if look is not None:
            kept = [spec for spec in specs if spec.identity in there]
            runs = read([there[spec.identity] for spec in kept], kept)
            look(kept, [run.trace for run in runs])
        # All trials are cut, those that are finished too: so others cut alike who come later.
        parts = list(chunks(planned, range(len(planned)), most=_most(planned, means)))
        agenda = Agenda([spec.identity for spec in specs], parts, folder, claims)
        tally = _Tally(planned, sorted(agenda.open), means)
        # More processes than parts would have nothing to do.
        places = _places(means)[: agenda.size]
        if len(places) > 1:
            arguments = tuple(question)
            in_processes(
                arguments,
                agenda,
                places,
                means.deadline,
                tally,
                look,
                judged_by,
            )
        else:
            in_order(
                planned,
                agenda,
                means.deadline,
                tally,
                look,
                judged_by,
            )
        agenda.tidy()
        return Results(_collect(specs, folder))


def _most(planned: Sequence[Planned], means: Means) -> int | None:
    """How many trials a part has at most; every device is to get some, if nothing else is said."""
    if means.at_once is not None:
        return integer("at_once", means.at_once, 1)
    return math.ceil(len(planned) / len(means.devices)) if means.devices else None


def _places(means: Means) -> list[str | None]:
    """Where each process computes; None: where the run options say."""
    jobs = integer("jobs", means.jobs, 1)
    if not means.devices:
        return [None] * jobs
    if jobs > 1:
        raise InputError(
            f"jobs={jobs} and device={','.join(means.devices)} were both given; there is one "
            f"process for each device: leave jobs out"
        )
    return list(means.devices)


@contextmanager
def kept_in(out: Path | None) -> Iterator[Path]:
    """The folder of the results; a temporary one if nothing is to be kept."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="fedsso-") as name:
        yield Path(name)


def _collect(specs: Sequence[Spec], folder: Path) -> Results:
    """The runs in the order of the plan, read from the parts."""
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
    """Counts the trials and rounds over all parts of a phase, for one progress display."""

    def __init__(self, planned: Sequence[Planned], todo: Sequence[int], means: Means) -> None:
        """Begin to count.

        Args:
            planned: All trials of the phase.
            todo: The indices of those that are not finished yet.
            means: Has the progress callback, and the name of the phase.
        """
        self.planned = planned
        self.rounds = [run.settings.rounds for run in planned]
        self.total = sum(self.rounds[i] for i in todo)
        self.progress = means.progress
        self.phase = means.phase
        self.finished = len(planned) - len(todo)  # trials
        self.done = 0  # rounds of the finished parts, one of each trial counted by itself
        self.told = 0  # the most rounds that were told so far
        self.under_way: dict[int, int] = {}  # rounds of the parts that run, by their first trial
        self.labels: dict[int, str] = {}
        self.numbers: dict[str, float] = {}
        self.last: tuple[Sequence[int], int] = ([0], 0)  # the part and round that were told last

    def round(self, part: Sequence[int], k: int, label: str, numbers: dict[str, float]) -> None:
        """A part has done k rounds."""
        self.under_way[part[0]] = k * len(part)
        self.labels[part[0]] = label
        self.numbers = numbers
        self._tell(part, k)

    def end(self, part: Sequence[int]) -> None:
        """A part is written; it may have ended early."""
        self.under_way.pop(part[0], None)
        self.done += sum(self.rounds[i] for i in part)
        self.finished += len(part)
        self._tell(part, self.rounds[part[0]])

    def elsewhere(self, trials: Sequence[int]) -> None:
        """Others have finished these trials."""
        self.done += sum(self.rounds[i] for i in trials)
        self.finished += len(trials)

    def wait(self) -> None:
        """Nothing is left to do here: tell again how far it is, since others go on."""
        self._tell(*self.last)

    def _tell(self, part: Sequence[int], k: int) -> None:
        """Tell the progress what has become more: halves of a part that was too large begin again.

        A callback that counts is told of the end of each part as well, any other of rounds alone.
        """
        self.last = (part, k)
        now = self.done + sum(self.under_way.values())
        further = now > self.told
        self.told = max(self.told, now)
        if self.progress is None:
            return
        spec = self.planned[part[0]].spec
        label = self.labels.get(part[0], spec.label)
        standing = Standing(
            self.phase,
            self.finished,
            len(self.planned),
            label,
            k,
            self.rounds[part[0]],
            self.told / max(1, self.total),
        )
        if isinstance(self.progress, Counter):
            self.progress.count(standing, self.numbers)
        elif further:
            told = f"{self.phase}, {self.finished} of {len(self.planned)} trials done: {label}"
            self.progress(told, k, self.rounds[part[0]], self.numbers)
