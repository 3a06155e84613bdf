"""The command `fedsso`: one short function for each sub-command.

The options of `run`, `compare` and `sweep` are not written here: `options` makes them from the
records that declare them.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from dataclasses import fields
from inspect import getdoc
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, cast

from ..support.exits import BUG, FINISHED, INTERRUPTED, MEANING, WRONG_INPUT

try:
    import click
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from typer.core import TyperGroup

    from . import data as cli_data
    from . import paper as cli_paper
    from . import report as cli_report
    from . import sweep as cli_sweep
    from .config import flag
    from .data import DataDir, Json
    from .options import Several, WithSettings
    from .plan import (
        OF_RUNS,
        PICTURE,
        Config,
        Live,
        SaveConfig,
        TensorBoard,
        Verbose,
        begin,
        plan,
        targets_of,
    )
    from .screen import complain, print_json, print_table, say, tell, unbreakable, visible
    from .view import cost_document, cost_table, judge, show
    from .watch import resuming, set_logging, watching
except ModuleNotFoundError as error:
    print(f"the command line needs `pip install 'fedsso[cli]'` ({error})", file=sys.stderr)
    raise SystemExit(WRONG_INPUT) from error

from ..algorithm import Algorithm
from ..algorithms import ALGORITHMS
from ..data.sources import FOLDER
from ..errors import InputError, unknown
from ..experiment.calls import resume as resume_runs
from ..experiment.calls import run_planned
from ..experiment.costs import costs as measure_costs
from ..experiment.plan import below, complete_plan, folder_of
from ..experiment.reading import load_runs
from ..experiment.results import Results
from ..experiment.run import is_done, run_folders
from ..experiment.spec import SPEC, Spec
from ..experiment.store import SETTINGS
from ..models import MODELS
from ..support.lock import Lock
from ..support.stopping import listen, unwind
from ..version import __version__

log = logging.getLogger("fedsso")
NAMES, SHAPE = Several(click.STRING), Several(click.INT)


class Program(TyperGroup):
    """Turns wrong input, and a lack of files or memory, into a message and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            text = error.format_message()
            if visible(text) == text:
                raise
            raise click.UsageError(visible(text), error.ctx) from None
        except InputError as error:
            complain(str(error))
            raise typer.Exit(WRONG_INPUT) from error
        except OSError as error:
            complain(
                f"cannot use {error.filename or 'a file or device'}: {error.strerror or error}; "
                f"look at its permissions"
            )
            raise typer.Exit(WRONG_INPUT) from error
        except MemoryError as error:
            complain(
                "there is not enough memory; take a smaller model, smaller data or fewer --jobs"
            )
            raise typer.Exit(WRONG_INPUT) from error


CODES = "\n\n".join(f"Exit code {code}: {meaning}." for code, meaning in MEANING.items())
app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Second-order federated optimisation, simulated. Start with: fedsso compare --rounds 30",
    epilog=CODES,
)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_paper.app, name="paper")


# ---- the commands ----


def _draw(runs: Results, settings: Any) -> None:
    if settings.out is not None:
        runs.plot(Path(settings.out) / PICTURE, targets=settings.targets or ())


@app.command(cls=WithSettings)
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

    With --out the run can be interrupted and resumed, and runs/a/spec.toml is a --config that
    repeats it.

    Exit code 1: a run diverged, or missed one of the --targets that were asked for.
    """
    set_logging(verbose)
    made = plan(ctx, config, "algorithm")
    begin(made, save_config, OF_RUNS)
    settings = made.settings
    root = folder_of(settings.out)
    if len(made.planned) > 1:
        planned = below(made.planned, root)
    else:
        planned = [run._replace(folder=root) for run in made.planned]
    with watching(resuming(settings.out), live, tensorboard) as watch:
        every = settings.checkpoint_every
        runs = run_planned(planned, root, watch, every, fresh=len(planned) == 1)
    _draw(runs, settings)
    show(runs, settings.targets, settings.out, as_json, {})
    judge(runs.curves(), targets_of(settings))


@app.command(cls=WithSettings)
def compare(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train with several algorithms on one federation, with the same cohorts and mini-batches.

    Example: fedsso compare --algorithms fedsso,fedavg --alpha 0.05 --rounds 50 --seeds 0,1,2 --out
    runs/b

    A step size such as --alpha goes to every algorithm that has it; a table in the --config file,
    such as \\[fedavg], sets one algorithm's. With --out there is also a picture, curves.png.

    Exit code 1: a run diverged, or no algorithm reached one of the --targets with every seed.
    """
    set_logging(verbose)
    made = plan(ctx, config, "algorithms")
    begin(made, save_config, OF_RUNS)
    settings = made.settings
    with watching(resuming(settings.out), live, tensorboard) as watch:
        root = folder_of(settings.out)
        runs = run_planned(below(made.planned, root), root, watch)
    _draw(runs, settings)
    show(runs, settings.targets, settings.out, as_json, made.left_out)
    judge(runs.curves(), targets_of(settings))


app.command(cls=WithSettings)(cli_sweep.sweep)
app.command()(cli_report.report)


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(help="A run's folder, or a folder of such folders.", metavar="RUN")
    ],
    data_dir: DataDir = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Complete what was interrupted, exactly as if it had not been.

    Example: fedsso resume runs/a

    Exit code 1: a run diverged.
    """
    set_logging(verbose)
    if data_dir is not None:
        os.environ[FOLDER] = str(data_dir)
    found = _runs_below(folder)
    if all(is_done(one, Spec.load(one / SPEC)) for one in found):
        say(f"{folder}: finished already")
        runs = load_runs(folder)
        _draw_missing(runs, folder / PICTURE)
    else:
        with watching(resuming(folder), live, tensorboard) as watch:
            runs = resume_runs(folder, progress=watch)
        runs.plot(folder / PICTURE)
    show(runs, None, folder, as_json, {})
    judge(runs.curves(), ())


def _runs_below(folder: Path) -> list[Path]:
    """The folders of the runs; an error says what to give instead."""
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; give the --out folder of a run or a comparison"
        )
    if (folder / SETTINGS).is_file():
        again = f"fedsso sweep --config {quote(str(folder / SETTINGS))} --out {quote(str(folder))}"
        raise InputError(f"{folder} holds a sweep, which the same command goes on with: `{again}`")
    complete_plan(folder)
    return run_folders(folder)


def _draw_missing(runs: Results, path: Path) -> None:
    """The picture of runs that were killed after their last round; a folder that cannot be written
    has none."""
    if not path.is_file():
        try:
            with Lock(path.parent):  # which also tidies up after the process that was killed
                runs.plot(path)
        except InputError as error:
            say(f"note: no picture: {error}")


@app.command()
def algorithms(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these; left out: all.", metavar="[NAME]...")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms and their hyper-parameters.

    Example: fedsso algorithms scaffold giant
    """
    for name in names or ():
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
    rows = [_describe(name, ALGORITHMS[name]) for name in names or ALGORITHMS]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        whole = (
            f" It needs all clients in every round; {row['needs_all']} does not."
            if row["needs_all"]
            else ""
        )
        title = f"{row['name']}: {row['title']}{whole}"
        table = Table(
            "option", "default", "meaning", title=title, title_justify="left", box=SIMPLE_HEAD
        )
        for field in row["fields"]:
            shown = "none" if field["default"] is None else str(field["default"])
            table.add_row(flag(field["name"]), shown, field["doc"])
        print_table(table)


def _describe(name: str, cls: type[Algorithm]) -> dict[str, Any]:
    title = (getdoc(cls) or "").partition("\n")[0]
    own = [
        {"name": f.name, "type": f.type, "default": f.default, **f.metadata}
        for f in fields(cast(Any, cls))
    ]
    return {"name": name, "title": title, "needs_all": cls.needs_all, "fields": own}


@app.command()
def costs(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "mclr",
    algorithms: Annotated[
        Any, typer.Option(help="Names with commas between, or all.", click_type=NAMES)
    ] = "all",
    sample: Annotated[
        Any, typer.Option(help="Shape of one row of the data.", click_type=SHAPE)
    ] = "1,28,28",
    classes: Annotated[int, typer.Option(help="Outputs of the model.")] = 10,
    compress: Annotated[
        str | None, typer.Option(help="Of the uploads: topk:SHARE, int8 or rank:R.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a round costs: bytes sent and bytes kept, measured beside theory.

    Example: fedsso costs --model cnn --algorithms fedsso,fedavg --compress int8

    Upper lines are measured: what the algorithm's own functions send and keep,
    in bytes of float32, for each client that takes part. Lower lines are theory:
    the papers' counts without compression, for a model of d parameters.

    n_c: multiples of a FedAvg round, down and up (8 d bytes).
    n_m: multiples of a model (4 d bytes), which is all that FedAvg's server keeps.
    "Keeps" means: until the next round. Working memory does not count.

    Nothing is trained and no data are read, so any size of model is possible.
    """
    names = None if algorithms == ["all"] else algorithms
    shape = {"sample": sample, "classes": classes, "compress": compress}
    bill = measure_costs(model, names, **shape)
    if as_json:
        document = {
            "version": __version__,
            "model": model,
            "d": bill.d,
            **shape,
            "results": cost_document(bill),
        }
        print_json(document)
        return
    title = f"{model}, d = {bill.d}: bytes of a round for each client (below: theory)"
    print_table(cost_table(bill, title))


@app.command()
def version() -> None:
    """Print the version.

    Example: fedsso version
    """
    tell(f"fedsso {__version__}")


def main() -> None:
    """Run the command, listen to signals, and end with one of the exit codes."""
    listen(unwind)
    sys.stdout, outlet = unbreakable(sys.stdout)
    sys.stderr, _ = unbreakable(sys.stderr)
    code = _run()
    if outlet is not None and sys.stdout is not None:
        sys.stdout.flush()
        if outlet.lost is not None:
            complain(
                f"cannot write to standard output: {outlet.lost.strerror}; give it a file on a "
                f"disk with room"
            )
            code = code if code == INTERRUPTED else WRONG_INPUT
    listen(
        lambda *_: os._exit(code)
    )  # while the interpreter shuts down there is nothing left to interrupt
    sys.exit(code)


def _run() -> int:
    """The exit code of the command."""
    try:
        app(prog_name="fedsso")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FINISHED
    except Exception:
        traceback.print_exc()
        say("this is a fault in fedsso: please report it with the lines above")
        return BUG
    return FINISHED
