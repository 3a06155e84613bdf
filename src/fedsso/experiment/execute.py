"""Running a plan: trials that fit together are batched, finished runs are kept.

Runs of one problem whose records stack form a group. A group is cut into chunks of trials that
run batched on one device. A run with a folder is completed there; a single one also writes a
checkpoint every few rounds, so that it can go on after a kill. Trials of a batch write no
checkpoints: they are kept when the batch is finished.

While it runs, a progress callback is told of every round. A `Watcher`, such as the dashboard of
the command line, is also shown the traces as they grow.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithm.records import signature, stack
from ..engine import checkpoint
from ..engine.ranks import team
from ..engine.simulate import Trials, attendance_of, fitted
from ..engine.simulate import run as advance
from ..errors import InputError
from ..support.intake import Damaged
from ..support.lock import locked
from ..support.trees import nbytes
from .run import Run, Weights, is_done, load_run
from .spec import CHECKPOINT, TRACE, Spec
from .together import announce, lead_or_follow
from .trace import ACCURACY, COLUMNS, INTEGERS, Trace

if TYPE_CHECKING:
    from .plan import Planned

log = logging.getLogger("fedsso")
TRIALS = 12  # trials of a chunk on a CPU: 8 to 16 are fastest
MEMORY = {"cpu": 2 << 30, "cuda": 24 << 30}  # bytes of server and client states of a chunk
SHORTEST, LONGEST = 0.25, 5.0  # seconds between two looks at the traces
SHARE = 20  # a look takes at most this part of the time
ZERO = {*INTEGERS, "seconds"}  # columns in which nothing is 0, not NaN

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called as progress(label, round, rounds, numbers) after each round.

Of batched trials, the numbers are those of the best one. Of a sweep, label and round are those of
the batch, and the label says how many trials are done.
"""
Look = Callable[[Sequence[Spec], Sequence[Trace]], None]
"""Called as look(specs, traces) with what the trials of a chunk have done so far."""


@runtime_checkable
class Watcher(Protocol):
    """A progress callback that is also shown traces.

    It is told all runs before the first begins and, now and then, every trial's trace so far.
    """

    # After each round, as `Progress` is.
    def __call__(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None: ...
    # Once, with the settings of all runs, before the first of them begins.
    def begin(self, specs: Sequence[Spec]) -> None: ...
    # Now and then, with the traces of some trials as far as they have come.
    def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None: ...


class Standing(NamedTuple):
    """How far a sweep is, after a round of one of its batches."""

    phase: str  # "grid", or the "chosen settings" that are judged by the test rows
    done: int  # trials that are finished, those of earlier calls among them
    trials: int  # all trials of the phase
    label: str  # the batch that has just done a round
    k: int  # its round
    rounds: int  # all its rounds
    share: float  # of the work of the phase that this call has to do, in [0, 1]


@runtime_checkable
class Counter(Protocol):
    """A progress callback that also counts the trials of a sweep.

    Of a sweep it is told by `count` alone. Any other callback is told the round of each batch, as
    of a run, with phase and trials in the label.
    """

    def __call__(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None: ...
    def count(self, now: Standing, numbers: dict[str, float]) -> None: ...


def execute(planned: Sequence[Planned], progress: bool | Progress, every: int) -> list[Run]:
    """Run what is not finished; results are in the order of the plan.

    Args:
        planned: The runs, checked. Each may have a folder of its own.
        progress: As for `fedsso.simulate`.
        every: Rounds between the checkpoints of a run that is alone in its batch.

    Returns:
        All runs. Those that were finished are read from their folders.
    """

    def lead() -> list[Run]:
        return [replace(run, live=None) for run in _execute(planned, progress, every)]

    runs = lead_or_follow(planned, lead, follow)
    return [replace(run, live=one.problem) for run, one in zip(runs, planned, strict=True)]


def _execute(planned: Sequence[Planned], progress: bool | Progress, every: int) -> list[Run]:
    """As `execute`, in the process that looks into folders and writes."""
    show = printer(progress)
    look = begin(show, [run.spec for run in planned])
    several = len({run.spec.seed for run in planned}) > 1
    done: dict[int, Run] = {}
    for i, run in enumerate(planned):
        if run.folder is not None and is_done(run.folder, run.spec):
            done[i] = replace(load_run(run.folder), live=run.problem)
            if look is not None:
                look([run.spec], [done[i].trace])
    for chunk in list(chunks(planned, range(len(planned)), done)):
        new = [i for i in chunk if i not in done]
        if not new:
            continue
        with locked([planned[i].folder for i in new]):
            # trials that are finished run again beside the others: in another batch their sums
            # would round otherwise
            batch = [planned[i] if i in new else planned[i]._replace(folder=None) for i in chunk]
            told = show
            if several and len(batch) == 1:
                told = _with_seed(show, batch[0].spec)
            runs = dict(zip(chunk, run_chunk(batch, told, every, look), strict=True))
        done |= {i: runs[i] for i in new}
    return [done[i] for i in range(len(planned))]


def _with_seed(show: Progress | None, spec: Spec) -> Progress | None:
    """A callback that is told the seed as well, where labels alone do not tell runs apart."""
    if show is None:
        return None

    def told(label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
        show(f"{label}, seed {spec.seed}", k, rounds, numbers)

    return told


def printer(progress: bool | Progress) -> Progress | None:
    """What is called after each round: the user's own function, or one that prints a line.

    Raises:
        InputError: It is neither a truth value nor something that can be called.
    """
    if progress is True:
        return _Line()
    if callable(progress):
        return progress
    if progress:
        raise InputError(f"progress must be True, False or a function, got progress={progress!r}")
    return None


def begin(show: Progress | None, specs: Sequence[Spec]) -> Look | None:
    """Tell a watcher what is to run.

    Returns:
        What it is to be shown traces with; None for any other callback.
    """
    if not isinstance(show, Watcher):
        return None
    show.begin(specs)
    return show.look


def chunks(
    planned: Sequence[Planned],
    todo: Sequence[int],
    done: Container[int] = (),
    most: int | None = None,
) -> Iterator[list[int]]:
    """Indices of runs that are batched together.

    Args:
        planned: All runs of the plan.
        todo: Indices of the runs to group.
        done: Indices of runs that are finished. They keep their place among the others: a batch
            is cut in the same way as before the kill, so that its sums round alike.
        most: The largest number of runs in a chunk; None: as many as fit.

    Yields:
        Indices of the runs of one chunk, at most as many as fit into memory.
    """
    groups: dict[Any, list[int]] = {}
    for i in todo:
        run = planned[i]
        begun = (
            run.folder is not None and checkpoint.exists(run.folder / CHECKPOINT) and i not in done
        )
        alone = i if begun else None  # a run with a checkpoint of its own goes on from it
        groups.setdefault((id(run.problem), signature(run.record), alone), []).append(i)
    for group in groups.values():
        first = planned[group[0]]
        size = min(_trials(first), most or len(group))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _trials(run: Planned) -> int:
    """How many trials fit into a chunk.

    Measured are the states of one trial, without allocating them. On a CPU a chunk has at most
    `TRIALS` trials, because a larger one would be slower.
    """
    device = run.settings.torch_device.type
    meta = run.problem.without_memory()
    attendance = attendance_of(run.problem.fed, run.settings, run.problem.module)
    record = fitted(run.record, run.problem.module, attendance)
    stacked = stack([record], meta.dtype, meta.device)
    of_client = nbytes(stacked.client_init(meta), 1) + nbytes(stacked.memory_init(meta), 1)
    each = nbytes(stacked.server_init(meta), 1) + of_client * attendance.clients
    fit = max(1, MEMORY[device] // max(1, each))
    return int(min(TRIALS, fit) if device == "cpu" else fit)


def run_chunk(
    chunk: Sequence[Planned], show: Progress | None, every: int, look: Look | None = None
) -> list[Run]:
    """Run trials batched; if they are too many for the GPU's memory, in two halves.

    Args:
        chunk: Runs of one problem whose records stack.
        show: Called after each round, or None.
        every: Rounds between checkpoints, which only a single run writes.
        look: Shown the traces now and then, or None.

    Raises:
        InputError: A single run does not fit into the GPU's memory, or several do not with several
            processes, which cannot halve them together.
    """
    announce(chunk, every)
    try:
        return _run_batched(chunk, show, every, look)
    except torch.OutOfMemoryError as error:
        if len(chunk) == 1 or team().size > 1:
            raise InputError(
                f"{chunk[0].spec.label} does not fit into the GPU's memory; use device='cpu', a "
                f"smaller batch_size or "
                "fewer clients in a round"
            ) from error
    log.info("%d trials do not fit into the GPU's memory: half of them at a time", len(chunk))
    torch.cuda.empty_cache()
    half = len(chunk) // 2
    return run_chunk(chunk[:half], show, every, look) + run_chunk(chunk[half:], show, every, look)


def follow(chunk: Sequence[Planned], every: int) -> None:
    """Train along with the process that leads, and keep nothing."""
    _run_batched(chunk, None, every, None)


def _run_batched(
    chunk: Sequence[Planned], show: Progress | None, every: int, look: Look | None
) -> list[Run]:
    """Run trials batched and write their folders.

    An interrupt between two rounds saves what a single run has done, then goes up to the caller.
    """
    first = chunk[0]
    specs = [run.spec for run in chunk]
    simulation = Trials(first.problem, [run.record for run in chunk])
    log.info("%s: %d trial(s), %s", specs[0].algorithm, len(chunk), simulation.reason)
    # Only a single run has checkpoints: the state of a batch belongs to no folder.
    alone = first.folder if len(chunk) == 1 else None
    keeps = simulation.team.share(alone is not None)
    rounds = first.settings.rounds
    if keeps:
        _go_on(simulation, alone, specs[0].identity, rounds)
    label = (
        specs[0].label
        if len(chunk) == 1
        else f"{specs[0].algorithm}, seed {specs[0].seed}, {len(chunk)} trials"
    )

    def save() -> None:
        """Write a checkpoint and the trace so far, if this is a single run with a folder.

        All processes take part, and the one that has the folder writes.
        """
        state = simulation.state() if keeps else {}
        if alone is not None:
            checkpoint.save(alone / CHECKPOINT, state, specs[0].identity)
            traces(simulation, specs)[0].save(alone / TRACE)

    glance = None if look is None else _Glance(look, simulation, specs)

    def after(_: Trials) -> None:
        """What follows each round: look, tell, save."""
        if glance is not None and glance.due():
            glance()
        if show is not None:
            show(label, simulation.k, rounds, _numbers(simulation))
        # After the last round the finished run is written instead.
        if simulation.k % every == 0 and simulation.k < rounds:
            save()

    try:
        advance(simulation, rounds, after)
    except KeyboardInterrupt:
        save()
        if glance is not None:
            glance()
        raise
    runs = _finish(simulation, chunk)
    if len(runs) == 1 and (worse := runs[0].trace.worse_than_start()) is not None:
        log.warning("%s: %s", label, worse)
    if look is not None:
        look(specs, [run.trace for run in runs])
    return runs


def _go_on(simulation: Trials, folder: Path | None, identity: str, rounds: int) -> None:
    """Take up a run where its folder left it.

    Without a usable checkpoint it begins anew.

    Args:
        simulation: The run at its start, which is brought to the checkpoint's round.
        folder: The run's folder; None in a process that is told by the one that has it.
        identity: The identity of the settings, which the checkpoint must have.
        rounds: The rounds that the run has, which the checkpoint must not exceed.
    """
    path = Path(CHECKPOINT) if folder is None else folder / CHECKPOINT

    def recover() -> dict[str, Tensor] | None:
        return checkpoint.recover(path, identity) if checkpoint.exists(path) else None

    saved = simulation.team.told(recover)
    if saved is None:
        return
    try:
        simulation.restore(saved)
    except Damaged as damage:
        raise InputError(
            f"{path}: {damage}; continue with the version that wrote it, restore it from a copy, "
            f"or start again in another folder"
        ) from damage
    if simulation.k > rounds:
        raise InputError(f"{path} counts {simulation.k} rounds of {rounds}; use another folder")


class _Glance:
    """Shows the traces of a chunk under way, so seldom that it hardly costs time.

    Between two looks passes twenty times the time that a look takes, within a quarter of a second
    and five seconds.
    """

    def __init__(self, look: Look, simulation: Trials, specs: Sequence[Spec]) -> None:
        self.look, self.simulation, self.specs = look, simulation, specs
        self.next = -math.inf

    def due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() >= self.next

    def __call__(self) -> None:
        """Show the traces, and note when the next look is due."""
        began = time.monotonic()
        self.look(self.specs, traces(self.simulation, self.specs))
        ended = time.monotonic()
        self.next = ended + min(max(SHORTEST, SHARE * (ended - began)), LONGEST)


def _finish(simulation: Trials, chunk: Sequence[Planned]) -> list[Run]:
    """The finished runs, written to their folders.

    Of personal models [clients, trials, d], a run keeps all, and as its model their weighted
    mean.
    """
    models = simulation.models().cpu()
    own = models if models.dim() == 3 else None  # [clients, trials, d]
    x = models if own is None else torch.tensordot(simulation.p.to(models.dtype), models, 1)
    buffers = simulation.buffers.cpu()
    runs = []
    for t, trace in enumerate(traces(simulation, [run.spec for run in chunk])):
        personal = None if own is None else own[:, t].clone()
        weights = Weights(x[t].clone(), buffers[t].clone(), personal)
        run = Run(chunk[t].spec, trace, weights, chunk[t].problem)
        folder = chunk[t].folder
        if folder is not None:
            run.save(folder)
        runs.append(run)
    return runs


def _numbers(simulation: Trials) -> dict[str, float]:
    """The newest numbers of the best trial, for a progress display."""
    row = simulation.rows[-1]
    return {n: float(row[n].nan_to_num(-1.0).max()) for n in ("test_accuracy",) if n in row}


def is_due(k: int, rounds: int) -> bool:
    """Whether a round is worth a line in a file or a pipe: at most ten are, in even steps.

    >>> [k for k in range(1, 26) if is_due(k, 25)]
    [3, 6, 9, 12, 15, 18, 21, 24, 25]
    """
    step = -(-rounds // 10)  # rounded up
    return k == rounds or k % step == 0


class Newest:
    """What was measured last, in words: not every round is evaluated."""

    def __init__(self, before: str = "") -> None:
        """`before` is a word that stands before each name."""
        self.before = before
        self.label = ""
        self.k = 0  # the last round of this run
        self.measured = 0  # the round that was measured last
        self.text = ""

    def told(self, label: str, k: int, numbers: dict[str, float]) -> str:
        """The newest numbers of a run, and their round where it is an earlier one.

        Args:
            label: The run.
            k: Its round.
            numbers: What was measured in this round; what was not is -1.
        """
        if label != self.label or k <= self.k:  # another run
            self.text = ""
        self.label = label
        self.k = k
        known = self.words(numbers)
        if known:
            self.measured = k
            self.text = known
        if not self.text or self.measured == k:
            return self.text
        return f"{self.text} (round {self.measured})"

    def words(self, numbers: dict[str, float]) -> str:
        """Numbers with their names; what is not known (-1) is left out."""
        known = {name: value for name, value in numbers.items() if value >= 0}
        told = []
        for name, value in known.items():
            spoken = name.replace("_", " ")
            told.append(f"{self.before}{spoken} {value:.4f}")
        return " ".join(told)


class Tenths:
    """Says when a sweep is worth a line in a file or a pipe: for every tenth of a phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.tenths = 0

    def due(self, now: Standing) -> bool:
        """Whether another tenth is done. The last one is when all trials are finished."""
        tenths = 10 if now.done == now.trials else min(9, int(10 * now.share))
        if now.phase != self.phase or tenths < self.tenths:  # another phase has begun
            self.tenths = 0
        before = self.tenths
        self.phase = now.phase
        self.tenths = tenths
        return tenths > before


class _Line:
    """A line on standard error that a terminal overwrites; elsewhere one for every tenth."""

    def __init__(self) -> None:
        self.tenths = Tenths()
        self.newest = Newest("best ")
        self.width = 0  # of the line on the terminal

    def __call__(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
        """Tell of a run after round k."""
        shown = self.newest.told(label, k, numbers)
        text = f"{label}: round {k}/{rounds}"
        due = is_due(k, rounds)
        self._print(text, shown, due, last=k == rounds)

    def count(self, now: Standing, numbers: dict[str, float]) -> None:
        """Tell of a sweep."""
        shown = self.newest.words(numbers)
        due = self.tenths.due(now)
        last = now.done == now.trials
        self._print(told_of(now), shown, due, last)

    def _print(self, text: str, shown: str, due: bool, last: bool) -> None:
        """Print a line: on a terminal always, elsewhere when it is due."""
        line = f"{text}  {shown}".rstrip()
        if sys.stderr.isatty():
            # Blanks cover what a longer line before has left.
            sys.stderr.write(f"\r{line.ljust(self.width)}" + "\n" * last)
            self.width = 0 if last else len(line)
        elif due:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def told_of(now: Standing) -> str:
    """How far a sweep is, in words.

    >>> told_of(Standing("grid", 24, 96, "fedavg, seed 0, 12 trials", 7, 30, 0.3))
    'grid: 24 of 96 trials done, round 7/30 of fedavg, seed 0, 12 trials'
    """
    under_way = f", round {now.k}/{now.rounds} of {now.label}" if now.done < now.trials else ""
    return f"{now.phase}: {now.done} of {now.trials} trials done{under_way}"


# ---- the engine's rows as traces ----


def traces(simulation: Trials, specs: Sequence[Spec]) -> list[Trace]:
    """One trace per trial from the engine's rows of [trials] tensors.

    A stopped trial ends at its stop. A diverged one has all rounds, also where nobody was left to
    run them. From then on everything that was measured is NaN, but the accuracy is 0 where the
    model had one before.

    Args:
        simulation: The trials, under way or finished.
        specs: Their settings, in their order.
    """
    rows, diverged = simulation.rows, simulation.diverged.tolist()
    table = {name: column.cpu().numpy() for name, column in simulation.columns().items()}
    out = []
    for t, (spec, ended) in enumerate(zip(specs, simulation.ended.tolist(), strict=True)):
        length = len(rows) if ended < 0 else ended + 1
        if diverged[t]:
            length = spec.options["rounds"] + 1 if simulation.finished else len(rows)
        columns = {
            n: _filled(table.get(n), t, n, length) for n in dict.fromkeys((*COLUMNS, *table))
        }
        columns |= {
            "trial": np.full(length, spec.trial),
            "seed": np.full(length, spec.seed),
            "round": np.arange(length),
        }
        if diverged[t]:
            accuracy = columns[ACCURACY]
            has_some = not np.isnan(accuracy[: diverged[t]]).all()
            accuracy[diverged[t] :] = 0.0 if has_some else np.nan
            for name in ("bytes_up", "bytes_down", "seconds"):  # nothing more is sent
                columns[name][diverged[t] + 1 :] = 0
        out.append(Trace(columns, spec.options["eval_every"], diverged[t] or None))
    return out


def _filled(values: NDArray[Any] | None, t: int, name: str, length: int) -> NDArray[Any]:
    """A trial's column of the wished length: what is unknown is NaN, or 0 where a number is
    counted."""
    column = np.full(length, np.nan)
    if values is not None:
        known = values[:length, t]
        column[: len(known)] = known
    if name in ZERO:
        column = np.nan_to_num(column)
    return column.astype(np.int64) if name in INTEGERS else column
