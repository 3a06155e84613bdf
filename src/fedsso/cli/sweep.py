"""The command `fedsso sweep`: whole grids, the best setting of each algorithm, and how much of its
grid works."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..algorithm import Algorithm
from ..data import Federation
from ..errors import InputError, one_of
from ..experiment.study import LAST, Setting, Study, study
from ..experiment.workers import OutOfTime
from ..objective.losses import mse
from ..report import figures
from ..report import tables as report
from ..report.sources import PARTS, SETTINGS, TRIALS
from ..support.exits import TIME_IS_UP
from ..support.files import write_atomic
from ..support.intake import read_bytes, read_toml
from ..support.lock import Lock
from ..support.seal import MARK, sealed_toml
from ..version import __version__
from .config import SELECT, Sweep
from .data import Json
from .plan import Config, Live, Plan, SaveConfig, TensorBoard, Verbose, begin, plan, targets_of
from .screen import print_json, print_table, say, tell, visible
from .view import judge, set_logging, watching

AGAIN = "the same command"
TABLE, CURVES, GRID = "table.md", "curves.png", "grid.png"  # beside what a report reads
OWN_KEYS = {
    "model",
    "algorithms",
    "rounds",
    "data",
}  # of any settings file that a sweep has written

Jobs = Annotated[int, typer.Option(min=1, help="Processes that share the work.")]
Minutes = Annotated[
    float | None, typer.Option(help="Stop after the part under way; the same command goes on.")
]


class Outcome(NamedTuple):
    """What a sweep has found."""

    grid: Study
    best: dict[str, Setting]  # of each algorithm, as it is judged: on the test rows


def sweep(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    jobs: Jobs = 1,
    minutes: Minutes = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Search a grid of step sizes for the best setting of each algorithm, on one federation.

    Example: fedsso sweep --algorithms fedsso,fedavg --target 0.9 --out sweeps/a

    Example: fedsso sweep --algorithms fedsso --alpha 0.01,0.03 --form bfgs,dfp

    Left to itself, a sweep tries the paper's twelve client steps, --alpha
    0.0001 to 0.7. For fedsso, fedavgm, fedadam, fedyogi and fedadagrad it
    also tries the seven server steps, --eta 0.01 to 1; for fedprox and fedac
    four values of --mu; for fednl three of --eta.

    A hyper-parameter with one value is fixed; with several, commas between,
    it is an axis, for every algorithm that has it. For one alone write into
    the --config file: \\[fedavg] and below it alpha = \\[0.1, 0.3].

    The best setting has the fewest mean rounds to --target; without one, the
    best accuracy at the end. --select val chooses by training rows that are
    held out, then judges the chosen settings by the test rows.

    --out gets table.md, trials.csv, curves.png, grid.png, all traces (parts/)
    and sweep.toml, a --config that repeats the sweep. Killed or stopped, the
    same command goes on: finished parts are not run again.

    Exit code 1: the best setting of an algorithm diverged, or no setting
    reached --target with every seed. Other settings may diverge.
    """
    set_logging(verbose)
    made = plan(ctx, config, "algorithms", Sweep)
    rows = _judges(made)
    check_minutes(minutes)
    if minutes is not None and made.settings.out is None:
        raise InputError(
            "--minutes needs --out, the folder where the work is kept until the next call"
        )
    begin(made, save_config, _foreign(made.settings.out))
    out = None if made.settings.out is None else Path(made.settings.out)
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with nullcontext() if out is None else Lock(out):
        if out is not None:
            _settle(out / SETTINGS, sealed_toml(made.table))
        with watching(None if out is None else AGAIN, live, tensorboard) as watch, in_time():
            found = _search(
                made, rows, {"out": out and out / PARTS, "jobs": jobs, "deadline": deadline}, watch
            )
        _show(made, found, as_json)
        if out is not None:
            _write(out, made, found)
    judge([setting.curve() for setting in found.best.values()], targets_of(made.settings))


def _foreign(out: str | None) -> Sequence[str]:
    """The files of a sweep that must not be there; in a folder of a sweep they are its own."""
    path = Path(out or "") / SETTINGS
    if out and path.is_file():
        with suppress(InputError):
            ours = MARK.encode() in read_bytes(path) or read_toml(path).keys() >= OWN_KEYS
            return () if ours else (SETTINGS,)
        return (SETTINGS,)
    return (TABLE, TRIALS, CURVES, GRID)


def _settle(path: Path, settings: bytes) -> None:
    """Write the settings; another sweep's are replaced, which is said."""
    if path.is_file() and read_bytes(path) != settings:
        say(
            "note: the folder held other settings; its traces stay, its tables and pictures are "
            "replaced"
        )
    write_atomic(path, settings)


def _judges(made: Plan) -> Federation:
    """The federation on whose test rows the grid is judged."""
    held_out = one_of("choice of rows: --select", made.settings.select, SELECT) == "val"
    if made.live.loss is mse:
        raise InputError(
            "a sweep chooses by accuracy, which the loss mse does not have: give labels and "
            "another loss"
        )
    fed = made.fed.validation() if held_out else made.fed
    if not len(made.fed.test_rows):
        raise InputError("there are no test rows to judge by: it takes --test-fraction above 0")
    if not len(fed.test_rows):
        raise InputError(
            "there are no held-out rows to judge by: it takes clients with three rows at least"
        )
    return fed


def check_minutes(minutes: float | None) -> None:
    """Refuse a time that is over before it begins."""
    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes must be > 0, got {minutes}")


@contextmanager
def in_time() -> Iterator[None]:
    """Says how to go on when the time is up."""
    try:
        yield
    except OutOfTime as error:
        say(f"time is up: {error}; {AGAIN} goes on")
        raise typer.Exit(TIME_IS_UP) from error


def _search(made: Plan, rows: Federation, how: dict[str, Any], watch: Any) -> Outcome:
    """Run the grid, choose, and run the chosen settings where they have not been judged by the test
    rows."""
    settings = made.settings

    def run(fed: Federation, records: Sequence[Algorithm]) -> Study:
        watch.name = f"{len(records) * len(settings.seeds)} trials"
        return study(
            fed,
            settings.model,
            records,
            seeds=settings.seeds,
            progress=watch,
            **how,
            **made.options,
        )

    grid = run(rows, made.records)
    best = {name: own.best(settings.target) for name, own in grid.algorithms().items()}
    if rows is not made.fed:
        again = run(made.fed, [setting.spec.record for setting in best.values()])
        best = {setting.algorithm: setting for setting in again}
    return Outcome(grid, best)


# ---- the result in words and numbers ----


def _sentences(settings: Any) -> str:
    """How the settings were chosen."""
    seeds = f"{len(settings.seeds)} seeds" if len(settings.seeds) > 1 else "one seed"
    rule = f"the best mean accuracy at the end over {seeds}; a run that diverges counts as 0"
    if settings.target is not None:
        rule = (
            f"the fewest mean rounds until {settings.target:g} is first reached, over {seeds}; a "
            f"miss counts as never, "
            "and among equals the accuracy at the end decides"
        )
    rows = "Chosen and judged by the same test rows."
    if settings.select == "val":
        rows = (
            "Chosen by a quarter of each client's training rows, held out; then run on all "
            "training rows and judged "
            "by the test rows."
        )
    end = f"the mean of the last {LAST} evaluations, of a short run of its last quarter"
    return f"Best setting: {rule}. {rows} Final accuracy: {end}."


def _works(own: Study, target: float | None) -> tuple[int, str]:
    """How many settings of a grid are of use, and what that means."""
    if target is None:
        return sum(not setting.diverged for setting in own), "do not diverge"
    return own.working(target), f"reach {target:g} with every seed"


def _table(made: Plan, found: Outcome) -> list[dict[str, str]]:
    """One row of text for each algorithm."""
    target, rows = made.settings.target, []
    for name, own in found.grid.algorithms().items():
        best = found.best[name]
        row = {"algorithm": name, "best setting": _setting(best, own)}
        if target is not None:
            row[f"rounds to {target:g}"] = list(
                report.rounds_table([best.curve()], [target])[0].values()
            )[1]
        count, what = _works(own, target)
        rows.append(
            row | {"final accuracy": _final(best), "of the grid": f"{count} of {len(own)} {what}"}
        )
    return rows


def _setting(best: Setting, own: Study) -> str:
    """What the grid varies, and what is not at its default."""
    varied = {k: best.spec.hyper[k] for k in own.axes()}
    shown = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in varied.items()}
    return " ".join(f"{k}={v}" for k, v in {**shown, **best.spec.short}.items()) or "its defaults"


def _final(setting: Setting) -> str:
    """Mean and sample standard deviation over the seeds."""
    values = setting.finals()
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    lost = f", {setting.diverged} of {len(values)} diverged" if setting.diverged else ""
    return f"{np.mean(values):.4f}{spread}{lost}"


def _document(made: Plan, found: Outcome) -> dict[str, Any]:
    """The same as plain numbers, with every setting."""
    settings, results = made.settings, []
    for name, own in found.grid.algorithms().items():
        count, what = _works(own, settings.target)
        results.append(
            {
                **_plain(found.best[name], settings.target),
                "tried": len(own),
                "work": count,
                "that": what,
            }
        )
    return {
        "version": __version__,
        "folder": settings.out,
        "target": settings.target,
        "select": settings.select,
        "chosen": _sentences(settings),
        "results": results,
        "grid": [_plain(setting, settings.target) for setting in found.grid],
        "left_out": made.left_out,
    }


def _plain(setting: Setting, target: float | None) -> dict[str, Any]:
    return {
        "algorithm": setting.algorithm,
        "setting": setting.label,
        "hyper": dict(setting.spec.hyper),
        "seeds": list(setting.seeds),
        "rounds": None if target is None else setting.rounds(target),
        "final_accuracy": setting.finals(),
        "diverged": [trace.diverged for trace in setting.traces],
    }


def _show(made: Plan, found: Outcome, as_json: bool) -> None:
    if as_json:
        print_json(_document(made, found))
        return
    rows = _table(made, found)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(
            name,
            justify="right" if name.startswith(("rounds", "final")) else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(visible, row.values()))
    print_table(table)
    lines = [
        _sentences(made.settings),
        *(f"left out: {name}: {why}" for name, why in made.left_out.items()),
    ]
    if made.settings.out is not None:
        lines.append(f"results: {made.settings.out}")
    for line in lines:
        tell(line)


# ---- the folder ----


def _write(out: Path, made: Plan, found: Outcome) -> None:
    write_atomic(out / TRIALS, _csv(made, found))
    write_atomic(
        out / TABLE, f"{report.markdown(_table(made, found))}\n{_sentences(made.settings)}\n"
    )
    target, curves = made.settings.target, [setting.curve() for setting in found.best.values()]
    report.plot(curves, out / CURVES, targets=[] if target is None else [target])
    _draw_grid(
        out / GRID,
        made.settings,
        found.grid,
        target or max(report.default_targets(curves), default=None),
    )


def _draw_grid(path: Path, settings: Any, grid: Study, target: float | None) -> None:
    """The grids as maps; where nothing was learned there is no accuracy to count rounds to, and no
    picture."""
    if path.is_file():
        path.unlink()
    if target is not None:
        where = " on held-out rows" if settings.select == "val" else ""
        title = f"Mean rounds to an accuracy of {target:g}{where}"
        figures.heat_maps(path, grid.maps(target), title=title, most=grid[0].spec.options["rounds"])


def _csv(made: Plan, found: Outcome) -> str:
    """A line for each trial of the grid and, where they were run again, before them of the best
    settings."""
    targets = [] if made.settings.target is None else [made.settings.target]
    judged = {
        "test": list(found.best.values()),
        made.settings.select: list(found.grid),
    }  # the whole grid, if by test
    axes = {name: own.axes() for name, own in found.grid.algorithms().items()}
    rows = [
        {**row, "judged_by": by, **{k: setting.spec.hyper[k] for k in axes[setting.algorithm]}}
        for by, settings in judged.items()
        for setting in settings
        for row in Study([setting]).rows(targets)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(dict.fromkeys(k for row in rows for k in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
