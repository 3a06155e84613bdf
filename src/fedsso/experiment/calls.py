"""What users call: `simulate`, `compare`, `sweep` and `resume`.

All four work in the same steps. The arguments become a plan, which is a list of runs (`plan.py`).
The plan is checked before anything is trained or written. Then the runs are trained, batched where
that is possible (`execute.py`, and `sweep.py` for grids). What comes back is one `Run`, or
`Results`, which are several runs with tables and plots.

Two functions serve the command line as well: `run_planned` and `resume`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..engine.ranks import team
from ..engine.settings import with_options
from ..errors import integer
from ..support.lock import Lock, locked
from .execute import Progress, execute, printer
from .folders import COMPARISON, RUN, SWEEP, check_kind, check_no_sweep, forget_other
from .plan import (
    Planned,
    Question,
    below,
    check,
    check_registered,
    complete_plan,
    every_settings,
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
from .run import Run, is_done, load_run, path_of, run_folders
from .spec import SPEC, Spec
from .store import PARTS
from .sweep import Means, answer, deadline_of, purpose_of, split_devices
from .workers import OutOfTime

if TYPE_CHECKING:
    from ..algorithm import Algorithm
    from ..data import Federation

log = logging.getLogger("fedsso")
# Rounds between two checkpoints of a run with a folder, if the caller says nothing else.
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
    """Train one model with one algorithm and return the run.

    Use it if you know the settings. `compare` trains several algorithms or several seeds on
    the same data, and `sweep` searches for good step sizes.

    Args:
        fed: The federated data, from `fedsso.load` or `Federation.from_clients`.
        model: A name (`fedsso.models.MODELS` lists them) or your own `nn.Module`, which is copied
            and not modified.
        algorithm: A name, or a record such as `FedSSO(alpha=0.1)`.
        out: A folder for the run; `fedsso.resume` continues it if it was interrupted. It must not
            already hold a run, a comparison or a sweep.
        progress: True prints a progress line. A function is called after every round, as
            progress(label, round, rounds, numbers). If it also has the methods begin(specs) and
            look(specs, traces), it is shown all rows as they come, for TensorBoard or Weights &
            Biases (docs/papers.md).
        checkpoint_every: Rounds between two checkpoints of a run with `out`.

    Returns:
        The finished run: its trace with one row for each round, its settings, and the model. A
        run that diverges is returned as well, and says so in `run.diverged`.

    Raises:
        InputError: An option is wrong, the model or the algorithm does not fit the data, or the
            folder is taken. This is found before anything is trained. Only a lack of memory on
            a GPU is found later.

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
    check_kind(folder, RUN)
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
    """Compare several algorithms on the same data, cohorts and mini-batches.

    Runs with the same seed differ only in their algorithm: in every round the same clients take
    part, with mini-batches from the same draws. Differences between two curves are therefore due
    to the algorithms.

    Args:
        fed: The federated data.
        model: A name or your own `nn.Module`.
        algorithms: Names and records. A name stands for the algorithm with its defaults; `sweep`
            searches for good settings.
        seeds: Each algorithm runs once for each of these. Left out: the run option `seed`;
            both together are refused.
        out: A folder in which every run has a folder with its model; a second call goes on after
            a kill. It must not hold a single run or a sweep.
        progress: As for `simulate`.

    Returns:
        All runs, first those of the first seed. `table()`, `plot()` and `best()` put the seeds of
        each algorithm together.

    Raises:
        InputError: As for `simulate`; also if an algorithm with the same settings is given twice.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> results = fedsso.compare(fed, "mclr", ["fedsso", "fedavg"], seeds=[0, 1], rounds=5)
    >>> len(results), len(results.settings())
    (4, 2)
    """
    root = folder_of(out)
    check_kind(root, COMPARISON)
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
    """Run what is planned and checked, each run in its own folder below `root`.

    The command line calls it too, because it makes its plan itself.

    Args:
        planned: The runs. Each has its own folder already, or none.
        root: The folder that is locked while they run; None: nothing is kept.
        progress: As for `simulate`.
        every: Rounds between the checkpoints of a run that is alone in its batch.
        fresh: Whether the beginning of the same run in its folder is an error. `simulate` wants
            that; `compare` goes on instead.
    """
    show = printer(progress)  # first: what cannot be called is refused before anything is written
    with locked([root]):
        prepare(planned, fresh=fresh)
        return Results(execute(planned, show or False, every))


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
    at_once: int | None = None,
    minutes: float | None = None,
    progress: bool | Progress = False,
    **options: Any,
) -> Results:
    """Search a grid of hyper-parameters for the best setting of each algorithm.

    All settings of an algorithm train together in batches. The best setting needs the fewest
    rounds to the accuracy `target` on average; without a target, it has the best final accuracy
    (`Results.best` has the whole rule).

    Args:
        fed: The federated data, with test rows.
        model: A name or your own `nn.Module`.
        algorithms: Names and records. A name stands for the algorithm's whole grid, as
            `fedsso.grid` makes it: the paper's twelve client steps and, for some, seven server
            steps. A record stands for itself.
        seeds: Every setting runs once for each of these. Left out: the run option `seed`;
            both together are refused.
        target: The accuracy to reach in few rounds.
        select: The rows to choose by. "test": the test rows. "val": a quarter of each client's
            training rows; the chosen settings are then judged by the test rows.
        out: A folder in which all traces and settings are kept in a few files, but no models. The
            same call continues if it was interrupted. The same call in other processes, also on
            other machines, shares the work. It must not hold runs, nor a table.md or trials.csv of
            your own.
        jobs: Processes that share the work. Their number changes no result. With more than one, a
            script must call the sweep below `if __name__ == "__main__":`, because every process
            imports the script.
        at_once: Most trials that train in one batch; by default as many as are fast on a CPU, and
            as many as fit on a GPU. Calls that share a folder should give the same number.
        minutes: Stop after this time with OutOfTime; with `out`, the same call continues.
        progress: True prints a line with the trials that are done and the round of the batch under
            way. A function is called after every round of a batch, as for `simulate`; the label
            has the trials that are done.
        **options: Run options; `local_steps` and `batch_size` may be lists, whose values are
            combined with the grid. `device` may be several, `"cuda:0,cuda:1"`: one process on
            each, for which holds what is said of `jobs`.

    Returns:
        The runs of the grid, without models. `winners()` has the best setting of each algorithm,
        `best()` the best of all. `simulate(fed, model, setting.record, **setting.spec.options)`
        trains a setting again, with its first seed and all its run options, and has its model. A
        loss, metric or start of your own must be given again, because settings hold only names.

    Raises:
        InputError: As for `simulate`; also if `target` is no accuracy, or if there are no rows to
            judge by.
        OutOfTime: `minutes` are over and work is left.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> results = fedsso.sweep(fed, "mclr", ["fedavg"], rounds=5, target=0.8, select="val")
    >>> len(results), sorted(results.winners())
    (12, ['fedavg'])
    >>> winner = results.winners()["fedavg"]
    >>> run = fedsso.simulate(fed, "mclr", winner.record, **winner.spec.options)
    >>> run.final() == winner.runs[0].final()
    True
    """
    records = grid_of(algorithms)
    root = folder_of(out)
    check_kind(root, SWEEP)
    chosen = seeds_of(seeds, options)  # once: a generator is empty afterwards
    options.pop("seed", None)  # it is among the chosen seeds
    options, devices = split_devices(options)
    every_settings(chosen, options)  # wrong options are told before rows are held out
    question = Question(fed, model, records, chosen, options)
    planned = plan_sweep(question, target, select)
    if root is not None:
        check_registered(planned)
    means = Means(
        None if root is None else root / PARTS,
        jobs,
        deadline_of(minutes),
        printer(progress),
        at_once=at_once,
        devices=devices,
    )
    with nullcontext() if root is None else Lock(root, purpose_of(planned, target, select)):
        try:
            results = answer(question, planned, means, target, select)
        except OutOfTime as late:
            later = "out= to keep finished work and continue later"
            how = "call it again to continue" if root else f"give it more minutes, or {later}"
            raise OutOfTime(f"{late}; {how}") from None
        if root is not None:
            # The room `report` imports this one, so it can only be imported when it is needed.
            from ..report.sweeps import trials_csv, write

            forget_other(root, trials_csv(results))
            write(root, results)
        return results


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    progress: bool | Progress = False,
) -> Results:
    """Continue an interrupted run, or all runs below a folder.

    The trace and the model are bit-identical to those of an uninterrupted run, except for the
    seconds. To continue a sweep, call it again with the same `out`.

    Args:
        folder: The `out` of `simulate` or `compare`.
        federation: The data, if they were arrays of your own.
        model: The module, if it was your own.
        progress: As for `simulate`.

    Returns:
        All runs of the folder, including those that were already finished.

    Raises:
        InputError: The folder holds no run or a sweep, or the data or the model are not those of
            the run. A run with a loss, a metric or a start of your own cannot be resumed from its
            folder alone, because functions and tensors are not kept. The same call of `compare`
            continues; `simulate` starts again in another folder.

    >>> import tempfile, fedsso
    >>> fed = fedsso.load("digits", clients=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fedsso.simulate(fed, "mclr", "fedavg", rounds=2, out=folder)
    ...     fedsso.resume(folder)  # it is finished: there is nothing left to do
    Results(1 runs, 1 settings of fedavg)
    """
    folder = path_of(folder)
    ours = team()
    found, unfinished = ours.told(lambda: _look_into(folder))
    if unfinished:
        with locked([folder] if ours.is_first else []):
            planned = _planned_again(unfinished, found, federation, model)
            execute(planned, progress, CHECKPOINT_EVERY)
    else:
        log.info("%s: every run is finished", folder)
    return Results(ours.told(lambda: [load_run(one) for one in found]))


def _look_into(folder: Path) -> tuple[dict[Path, Spec], list[list[Path]]]:
    """The settings of the runs of a folder, and the batches that are not finished."""
    complete_plan(folder)
    check_no_sweep(folder)
    found = {one: Spec.load(one / SPEC) for one in run_folders(folder)}
    batches: dict[str, list[Path]] = {}  # runs of one problem, which go on batched as they began
    for one, spec in found.items():
        key = repr((spec.digest, spec.model, spec.start, spec.options))
        batches.setdefault(key, []).append(one)
    unfinished = []
    for batch in batches.values():
        if not all(is_done(one, found[one]) for one in batch):
            unfinished.append(batch)
    return found, unfinished


def _planned_again(
    batches: Sequence[Sequence[Path]],
    specs: Mapping[Path, Spec],
    federation: Federation | None,
    model: nn.Module | None,
) -> list[Planned]:
    """The runs of some folders, with the live objects that they need; a batch shares one problem.

    Args:
        batches: Folders of runs, those of one problem together.
        specs: The settings that each folder holds.
        federation: The data of the caller, or None to load them again by name.
        model: The module of the caller, or None to build it by name.
    """
    planned = []
    # Batches of one data set, with other options, share it: loading may take minutes.
    data: dict[str, Federation] = {}
    for batch in batches:
        spec = specs[batch[0]]
        problem = problem_of(spec, federation or data.get(spec.digest), model)
        data[spec.digest] = problem.fed
        planned += [Planned(specs[one], specs[one].record, problem, one) for one in batch]
    return planned
