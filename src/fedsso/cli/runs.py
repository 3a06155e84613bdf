"""The commands `fedsso run`, `fedsso compare` and `fedsso resume`.

`run` and `compare` are alike: settings and data are read and checked (`plan`), the runs train
while a `Watch` shows them, then the result is printed and judged. They differ in the settings
that name the algorithms, and in their folders. A single run is kept in `--out` itself, several
have folders below it. `resume` has no settings: it finds them in the folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.sources import FOLDER
from ..engine.ranks import team
from ..errors import InputError
from ..experiment.folders import check_no_sweep
from ..experiment.plan import below, complete_plan, folder_of
from ..experiment.run import is_done, run_folders
from ..experiment.spec import SPEC, Spec
from ..experiment.store import SETTINGS
from ..support.lock import Lock
from .flags import Config, DataDir, Json, Live, SaveConfig, TensorBoard, Verbose
from .plan import OF_RUNS, PICTURE, begin, plan, targets_of
from .screen import say
from .view import judge, show
from .watch import resuming, set_logging, watching

if TYPE_CHECKING:
    from ..experiment.results import Results


def run(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train one model with one algorithm.

    Example: fedsso run --dataset digits --clients 10 --algorithm fedsso --alpha 0.05 --rounds 50
    --out runs/a

    With --out, the run can be interrupted and resumed, and runs/a/spec.toml is a --config file that
    repeats it.

    Exit code 1: a run diverged, or missed one of the requested --targets.
    """
    from ..experiment.calls import run_planned

    set_logging(verbose)
    made = plan(ctx, config, "algorithm")
    team().told(lambda: begin(made, save_config, OF_RUNS))
    settings = made.settings
    root = folder_of(settings.out)
    # Several seeds of one algorithm have folders of their own, as in a comparison.
    if len(made.planned) > 1:
        planned = below(made.planned, root)
    else:
        # A single run is kept in the folder itself.
        planned = [run._replace(folder=root) for run in made.planned]
    with watching(resuming(settings.out), live, tensorboard) as watch:
        every = settings.checkpoint_every
        runs = run_planned(planned, root, watch, every, fresh=len(planned) == 1)
    _draw(runs, settings)
    show(runs, settings.targets, settings.out, as_json, {})
    judge(runs.curves(), targets_of(settings))


def compare(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compare several algorithms on the same data, clients and mini-batches.

    Example: fedsso compare --algorithms fedsso,fedavg --alpha 0.05 --rounds 50 --seeds 0,1,2 --out
    runs/b

    A step size such as --alpha applies to every algorithm that has it. To set it for one algorithm,
    use a table such as \\[fedavg] in the --config file. --out also gets a picture, curves.png.

    Exit code 1: a run diverged, or no algorithm reached one of the --targets with every seed.
    """
    from ..experiment.calls import run_planned

    set_logging(verbose)
    made = plan(ctx, config, "algorithms")
    team().told(lambda: begin(made, save_config, OF_RUNS))
    settings = made.settings
    with watching(resuming(settings.out), live, tensorboard) as watch:
        root = folder_of(settings.out)
        runs = run_planned(below(made.planned, root), root, watch)
    _draw(runs, settings)
    show(runs, settings.targets, settings.out, as_json, made.left_out)
    judge(runs.curves(), targets_of(settings))


def _draw(runs: Results, settings: Any) -> None:
    """Draw the curves into the folder of the results, if there is one."""
    root = folder_of(settings.out)
    if root is not None:
        runs.plot(root / PICTURE, targets=settings.targets or ())


def resume(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, or a folder of several runs.", metavar="RUN")
    ],
    data_dir: DataDir = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Continue interrupted runs. The result is the same as without the interruption.

    Example: fedsso resume runs/a

    Exit code 1: a run diverged.
    """
    from ..experiment.calls import resume as resume_runs
    from ..experiment.reading import load_runs

    set_logging(verbose)
    # `fedsso.load` looks into the environment if the settings name no folder.
    if data_dir is not None:
        os.environ[FOLDER] = str(data_dir)
    ours = team()
    if ours.told(lambda: _is_finished(folder)):
        if not ours.is_first:  # which has nothing to train
            return
        say(f"{folder}: finished already")
        # Nothing is trained, so neither the data nor a module of the user's own are needed.
        runs = load_runs(folder)
        _draw_missing(runs, folder / PICTURE)
    else:
        with watching(resuming(folder), live, tensorboard) as watch:
            runs = resume_runs(folder, progress=watch)
        if ours.is_first:
            runs.plot(folder / PICTURE)
    show(runs, None, folder, as_json, {})
    judge(runs.curves(), ())


def _is_finished(folder: Path) -> bool:
    """Whether all runs of a folder are finished."""
    return all(is_done(one, Spec.load(one / SPEC)) for one in _runs_below(folder))


def _runs_below(folder: Path) -> list[Path]:
    """The folders of the runs in a folder; an error says what to give instead.

    Raises:
        InputError: The folder is missing, holds no runs, or is that of a sweep, which is not
            resumed but called again. The message has the command.
    """
    if not folder.is_dir():
        raise InputError(
            f"folder {folder} does not exist; give the --out folder of a run or a comparison"
        )
    if (folder / SETTINGS).is_file():
        again = f"fedsso sweep --config {quote(str(folder / SETTINGS))} --out {quote(str(folder))}"
        raise InputError(f"{folder} holds a sweep, which the same command continues: `{again}`")
    complete_plan(folder)
    check_no_sweep(folder)  # one of Python's, which has no settings file
    return run_folders(folder)


def _draw_missing(runs: Results, path: Path) -> None:
    """Draw the picture of runs that were killed after their last round.

    If the folder cannot be written there is none, and a note says so.

    Args:
        runs: The finished runs.
        path: The picture, which is left alone if it is there.
    """
    if path.is_file():
        return
    try:
        with Lock(path.parent):  # which also tidies up after the process that was killed
            runs.plot(path)
    except InputError as error:
        say(f"note: no picture: {error}")
