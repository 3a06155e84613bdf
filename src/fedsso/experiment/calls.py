"""What users call: `simulate`, `compare`, `sweep`, `resume`, and the readers of their folders."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..engine.settings import with_options
from ..errors import InputError, integer
from ..support.lock import locked
from .execute import Progress, execute, printer
from .plan import (
    Planned,
    Question,
    below,
    check,
    complete_plan,
    folder_of,
    grid_of,
    plan,
    plan_sweep,
    prepare,
    record_of,
    records_of,
    seeds_of,
    settings_of,
)
from .problem import pose
from .results import Results
from .revive import problem_of, specify
from .run import Run, is_done, load_run, run_folders
from .spec import SPEC, Spec
from .store import PARTS
from .sweep import Means, answer, read_sweep

if TYPE_CHECKING:
    from ..algorithm import Algorithm
    from ..data import Federation

log = logging.getLogger("fedsso")
CHECKPOINT_EVERY = 10


@with_options
def simulate(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithm: str | Algorithm = "fedsso",
    *,
    out: str | Path | None = None,
    progress: bool | Progress = False,
    checkpoint_every: int = CHECKPOINT_EVERY,
    **options: Any,
) -> Run:
    """Train one model with one algorithm; the result is one run.

    `model` is a name (`fedsso.models.MODELS` lists them) or your own `nn.Module`; `algorithm` a
    name or a record such as `FedSSO(alpha=0.1)`. With `out` the run is kept in that folder, with a
    checkpoint every `checkpoint_every` rounds, and `fedsso.resume` completes it after a kill.
    `progress=True` prints a line that tells how far it is.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> run = fedsso.simulate(fed, "mclr", "fedsso", rounds=10, participation=0.6)
    >>> run.final() > 0.8
    True
    """
    integer("checkpoint_every", checkpoint_every, 1)
    record = record_of(algorithm)
    problem = pose(fed, model, settings_of(options))
    folder = folder_of(out)
    planned = [Planned(specify(problem, model, record), record, problem, folder)]
    check(planned)
    return run_planned(planned, folder, progress, checkpoint_every, fresh=True)[0]


@with_options
def compare(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithms: Sequence[str | Algorithm] = ("fedsso", "fedavg", "fedsgd"),
    *,
    seeds: Iterable[int] | None = None,
    out: str | Path | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> Results:
    """Run several algorithms on one federation, with the same cohorts and mini-batches.

    A name stands for the algorithm with its defaults; `sweep` searches for good settings. With
    several `seeds` each algorithm runs once for each of them. With `out` every run has a folder
    with its model there, and a second call goes on after a kill.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> results = fedsso.compare(fed, "mclr", ["fedsso", "fedavg"], seeds=[0, 1], rounds=5)
    >>> len(results), len(results.settings())
    (4, 2)
    """
    root = folder_of(out)
    planned = below(plan(fed, model, records_of(algorithms), seeds, options), root)
    check(planned)
    return run_planned(planned, root, progress)


def run_planned(
    planned: Sequence[Planned],
    root: Path | None,
    progress: bool | Progress,
    every: int = CHECKPOINT_EVERY,
    *,
    fresh: bool = False,
) -> Results:
    """Run what is planned and checked, each run in its own folder below `root`."""
    with locked([root]):
        prepare(planned, fresh=fresh)
        return Results(execute(planned, progress, every))


@with_options
def sweep(
    fed: Federation,
    model: str | nn.Module = "mclr",
    algorithms: Sequence[str | Algorithm] = ("fedsso",),
    *,
    seeds: Iterable[int] | None = None,
    target: float | None = None,
    select: str = "test",
    out: str | Path | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> Results:
    """Search a grid of hyper-parameters for the best setting of each algorithm.

    A name stands for the algorithm's whole grid, as `fedsso.grid` makes it: the paper's twelve
    client steps and, for some, seven server steps. A record stands for itself. All trials of an
    algorithm train together in one batch; `local_steps` and `batch_size` may be lists.

    The best setting has the fewest mean rounds to the accuracy `target`; without one, the best
    accuracy at the end (`Results.best` has the whole rule). `select="val"` chooses by a quarter of
    each client's training rows, then judges the chosen settings by the test rows.

    With `out` all traces and settings are kept in a few files there, but no models; the same call
    goes on after a kill, or after `minutes`, when it raises OutOfTime. `jobs` processes share the
    work.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> results = fedsso.sweep(fed, "mclr", ["fedavg"], rounds=5, target=0.8, select="val")
    >>> len(results), sorted(results.winners())
    (12, ['fedavg'])
    """
    chosen = seeds_of(seeds, options)
    question = Question(fed, model, grid_of(algorithms), chosen, options)
    planned = plan_sweep(question, target, select)
    root = folder_of(out)
    means = Means(
        None if root is None else root / PARTS, jobs, deadline_of(minutes), printer(progress)
    )
    with locked([root]):
        results = answer(question, planned, means, target, select)
        if root is not None:
            from ..report.sweeps import write

            write(root, results)
        return results


def deadline_of(minutes: float | None) -> float:
    """The time of `time.monotonic()` at which so many minutes are over."""
    if minutes is None:
        return math.inf
    if not minutes > 0:
        raise InputError(f"minutes must be > 0, got minutes={minutes}")
    return time.monotonic() + 60 * minutes


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    progress: bool | Progress = False,
) -> Results:
    """Complete a run, or all runs below a folder, exactly as if nothing had interrupted them.

    Arrays and modules of your own have to be given again.
    """
    complete_plan(Path(folder))
    found = {one: Spec.load(one / SPEC) for one in run_folders(folder)}
    batches: dict[str, list[Path]] = {}  # runs of one problem, which go on batched as they began
    for one, spec in found.items():
        key = repr((spec.digest, spec.model, spec.start, spec.options))
        batches.setdefault(key, []).append(one)
    unfinished = [
        batch for batch in batches.values() if not all(is_done(one, found[one]) for one in batch)
    ]
    if unfinished:
        with locked([Path(folder)]):
            planned = _planned_again(unfinished, found, federation, model)
            execute(planned, progress, CHECKPOINT_EVERY)
    else:
        log.info("%s: every run is finished", folder)
    return Results(load_run(one) for one in found)


def _planned_again(
    batches: Sequence[Sequence[Path]],
    specs: Mapping[Path, Spec],
    federation: Federation | None,
    model: nn.Module | None,
) -> list[Planned]:
    """The runs of some folders; those of a batch share one problem."""
    planned = []
    data: dict[str, Federation] = {}
    for batch in batches:
        spec = specs[batch[0]]
        problem = problem_of(spec, federation or data.get(spec.digest), model)
        data[spec.digest] = problem.fed
        planned += [Planned(specs[one], specs[one].record, problem, one) for one in batch]
    return planned


def load_runs(folder: str | Path) -> Results:
    """Read a run's folder, a folder of such folders, or the folder of a sweep.

    The runs of a sweep have settings and traces, but no models.
    """
    folder = Path(folder)
    if (folder / PARTS).is_dir():
        return read_sweep(folder).results
    return Results(load_run(one) for one in run_folders(folder))
