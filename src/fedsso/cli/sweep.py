"""The commands `fedsso sweep` and `fedsso tune`: the best setting of each algorithm.

The first tries a grid (`experiment.sweep`), the second searches (`experiment.tuning`). Table and
pictures are those of `report.sweeps`. Here are the folder with its settings, the progress, and
what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..engine.ranks import team
from ..errors import InputError
from ..experiment.plan import folder_of
from ..experiment.reading import read_sweep
from ..experiment.results import Results, Setting
from ..experiment.store import PARTS, SETTINGS, TRIALS
from ..experiment.sweep import Means, answer, kept_in, purpose_of
from ..report import sweeps
from ..support.files import write_atomic
from ..support.intake import read_bytes, read_toml
from ..support.lock import Lock
from ..support.seal import MARK, sealed_toml
from ..version import __version__
from .config import Sweep, Tune
from .flags import Config, Json, Live, Minutes, SaveConfig, TensorBoard, Verbose
from .plan import Plan, begin, plan, targets_of
from .screen import print_json, print_table, say, tell, visible
from .view import judge
from .watch import AGAIN, check_minutes, in_time, set_logging, watching

OWN_KEYS = {"model", "algorithms", "rounds", "data"}  # of every settings file that a sweep writes

KEPT_UNTIL = "--minutes needs --out, the folder where the work is kept until the next call"
TUNED = "tune.toml"  # settings with which `fedsso tune --config` repeats a search

Jobs = Annotated[int, typer.Option(min=1, help="Number of parallel processes.")]
AtOnce = Annotated[
    int | None,
    typer.Option(min=1, help="Most trials that train in one batch; by default as many as fit."),
]


def sweep(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    jobs: Jobs = 1,
    at_once: AtOnce = None,
    minutes: Minutes = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find the best setting of each algorithm in a grid of step sizes, on the same data.

    Example: fedsso sweep --algorithms fedsso,fedavg --target 0.9 --out sweeps/a

    Example: fedsso sweep --algorithms fedsso --alpha 0.01,0.03 --form bfgs,dfp

    By default, a sweep tries the paper's twelve client steps, --alpha
    0.0001 to 0.7. For fedsso, fedavgm, fedadam, fedyogi, fedadagrad and
    diloco it also tries the seven server steps, --eta 0.01 to 1; for fedprox
    and fedac four values of --mu; for fedexp seven of --eps; for fedacg six of
    --beta; for serverlion seven of --eta, for servermuon six, for fednl three.

    A hyper-parameter with one value is fixed. With several values, separated
    by commas, it is searched, for every algorithm that has it. To search it
    for one algorithm, write \\[fedavg] and below it alpha = \\[0.1, 0.3] into
    the --config file.

    The best setting needs the fewest rounds to --target on average; without a
    target, it has the best final accuracy. --select val selects on held-out
    training rows, then evaluates the selected settings on the test rows.

    --out gets table.md, trials.csv, curves.png, grid.png, all training curves
    (parts/) and sweep.toml, a --config file that repeats the sweep. If it was
    interrupted, the same command continues; finished parts do not run again.
    The same command on other machines, with the same --out on a shared file
    system, shares the work.

    --device cuda:0,cuda:1 spreads the parts over several GPUs, with one process
    for each. --at-once makes the parts smaller, so that more machines get work.

    Exit code 1: the best setting of an algorithm diverged, or no setting
    reached --target with every seed. Other settings may diverge.
    """
    from ..experiment.sweep import deadline_of

    set_logging(verbose)
    check_minutes(minutes)
    made = plan(ctx, config, "algorithms", Sweep)
    settings = made.settings
    if minutes is not None and settings.out is None:
        raise InputError(KEPT_UNTIL)
    team().told(lambda: begin(made, save_config, _foreign(made)))
    out = folder_of(settings.out)
    with nullcontext() if out is None else _joined(out, made):
        again = None if settings.out is None else AGAIN
        with watching(again, live, tensorboard) as watch, in_time():
            parts = None if out is None else out / PARTS
            limit = deadline_of(minutes)
            means = Means(parts, jobs, limit, watch, at_once=at_once, devices=made.devices)
            found = answer(made.question, made.planned, means, settings.target, settings.select)
        _show(made, found, as_json)
        if out is not None:
            sweeps.write(out, found)
            sweeps.draw(out, found)
    judge([setting.curve() for setting in found.winners().values()], targets_of(settings))


def tune(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    minutes: Minutes = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    r"""Search for the best setting of each algorithm, with fewer trials than a grid.

    Example: fedsso tune --algorithms fedadam --trials 24 --target 0.9 --out tuned/a

    Example: fedsso tune --algorithms fedsso --alpha 0.001:1 --form bfgs,dfp

    Settings are drawn where those before them fared well (Optuna's TPE), a few
    at a time, which train together. Those that fall behind are dropped after a
    quarter or half of the rounds (--prune halving, median or none).
    It needs Optuna: pip install '.\[tune]' in a checkout.

    Left to itself, it searches between the ends of the algorithm's grid, on a
    logarithmic scale (fedsso sweep --help lists the grids). A hyper-parameter
    is a range, --alpha 0.001:1; a list of choices, --form bfgs,dfp; or one
    value, which is then fixed. For one algorithm alone write into the --config
    file: \[fedavg] and below it alpha = "0.001:1".

    The best setting is chosen as by fedsso sweep, and --out gets the same
    files, with tune.journal, which Optuna writes, and tune.toml, a --config
    that repeats the search. Killed or stopped, the same command goes on. The
    same command on other machines takes part, with the same --out. More
    --trials add to what is there.

    Exit code 1: the best setting of an algorithm diverged, or no setting
    reached --target with every seed. Other settings may diverge.
    """
    from ..experiment.sweep import deadline_of
    from ..experiment.tuning.call import search_all
    from ..experiment.tuning.search import Means as SearchMeans
    from ..experiment.tuning.search import load_optuna

    set_logging(verbose)
    load_optuna()
    check_minutes(minutes)
    made = plan(ctx, config, "algorithms", Tune)
    settings = made.settings
    if minutes is not None and settings.out is None:
        raise InputError(KEPT_UNTIL)
    begin(made, save_config, _foreign(made, TUNED))
    out = folder_of(settings.out)
    purpose = f"tune {purpose_of(made.planned, settings.target, settings.select)}"
    with kept_in(out) as folder, Lock(folder, purpose, _settling(folder / TUNED, made.table)):
        again = None if out is None else AGAIN
        with watching(again) as watch, in_time():
            limit = deadline_of(minutes)
            means = SearchMeans(
                root=folder,
                parts=folder / PARTS,
                trials=settings.trials,
                at_once=settings.at_once,
                prune=settings.prune,
                deadline=limit,
                progress=watch,
            )
            found = search_all(made.question, made.spaces, settings.target, settings.select, means)
        _show(made, found, as_json)
        if out is not None:
            sweeps.write(out, found)
            sweeps.draw(out, found, maps=False)
    judge([setting.curve() for setting in found.winners().values()], targets_of(settings))


def _foreign(made: Plan, own: str = SETTINGS) -> Sequence[str]:
    """Patterns of the files that must not be there; in the folder of a sweep they are its own.

    Args:
        made: The plan, whose settings name the folder, or none.
        own: The name of the settings file that the command writes.

    Returns:
        Nothing for the folder of a sweep. One of a command is recognised by its settings file, one
        of Python by its trials, which must be those of the plan.
    """
    out = made.settings.out
    path = Path(out or "") / own
    if out and path.is_file():
        with suppress(InputError):
            ours = MARK.encode() in read_bytes(path) or read_toml(path).keys() >= OWN_KEYS
            return () if ours else (own,)
        return (own,)
    if out and _same_trials(made, Path(out)):
        return ()
    return (sweeps.TABLE, TRIALS, sweeps.CURVES, sweeps.GRID)


def _same_trials(made: Plan, folder: Path) -> bool:
    """Whether a folder holds the finished sweep of a plan, as `fedsso.sweep` has left it."""
    if not ((folder / PARTS).is_dir() and (folder / TRIALS).is_file()):
        return False
    with suppress(InputError):
        found = read_sweep(folder).results
        there = {run.spec.identity for run in found}
        planned = {run.spec.identity for run in made.planned}
        return there == planned and found.target == made.settings.target
    return False  # it cannot be read


def _joined(out: Path, made: Plan) -> Lock:
    """The lock of a folder, which others may hold who ask the same.

    The first of them writes the settings.
    """
    settings = made.settings
    purpose = purpose_of(made.planned, settings.target, settings.select)
    return Lock(out, purpose, _settling(out / SETTINGS, made.table))


def _settling(path: Path, table: Mapping[str, Any]) -> Callable[[], None]:
    """What writes the settings, when nobody else is in the folder."""
    return lambda: _settle(path, sealed_toml(table))


def _settle(path: Path, settings: bytes) -> None:
    """Write the settings; another sweep's are replaced, which is said.

    Its table and its list of trials go first. Whoever reads the folder while this sweep is under
    way would otherwise find the trials of the one and the settings of the other.

    Args:
        path: The settings file of the folder.
        settings: Its new content, sealed.
    """
    # Parts are found by the identity of their trials, so those of other settings do no harm.
    if path.is_file() and read_bytes(path) != settings:
        say(
            "note: the folder held other settings; its traces stay, its tables and pictures are "
            "replaced"
        )
        for name in (TRIALS, sweeps.TABLE):
            path.with_name(name).unlink(missing_ok=True)
    write_atomic(path, settings)


# ---- the result in words and numbers ----


def _document(made: Plan, found: Results) -> dict[str, Any]:
    """The result as plain numbers, with every setting.

    "results" has the best setting of each algorithm, "grid" all settings.
    """
    settings = made.settings
    winners = found.winners()
    results = []
    for name, own in found.algorithms().items():
        count, what = sweeps.works(own, found.target)
        told = {"tried": len(own.settings()), "work": count, "that": what}
        results.append(_plain(winners[name], found.target) | told)
    return {
        "version": __version__,
        "folder": settings.out,
        "target": settings.target,
        "select": settings.select,
        "chosen": sweeps.explain_choice(found),
        "results": results,
        "grid": [_plain(setting, found.target) for setting in found.settings()],
        "left_out": made.left_out,
    }


def _plain(setting: Setting, target: float | None) -> dict[str, Any]:
    """One setting as plain numbers, lists with an entry for each seed.

    Args:
        setting: The setting.
        target: The accuracy to reach; without one, "rounds" is None.
    """
    return {
        "algorithm": setting.algorithm,
        "setting": setting.label,
        "hyper": dict(setting.spec.hyper),
        "seeds": list(setting.seeds),
        "rounds": None if target is None else setting.rounds(target),
        "final_accuracy": setting.finals(),
        "diverged": [trace.diverged for trace in setting.traces],
    }


def _show(made: Plan, found: Results, as_json: bool) -> None:
    """Print the best setting of each algorithm, and how they were chosen.

    Args:
        made: The plan, which knows what was left out.
        found: The result.
        as_json: Whether to print JSON, which has every setting.
    """
    if as_json:
        print_json(_document(made, found))
        return
    rows = sweeps.winners_table(found)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        right = name.startswith(("rounds", "final"))
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(visible, row.values()))
    print_table(table)
    tell(sweeps.explain_choice(found))
    for name, reason in made.left_out.items():
        tell(f"left out: {name}: {reason}")
    if made.settings.out is not None:
        tell(f"results: {made.settings.out}")
