"""The command `fedsso`: one short function for each sub-command.

The options of `run` and `compare` are not written here: they are made from the settings of `cli_config` and from the
fields of the registered algorithms.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from dataclasses import fields
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, cast

try:
    import click
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table
    from typer.core import TyperGroup

    from . import cli_config, cli_data, cli_paper, cli_report, cli_sweep
    from .cli_data import DataDir, Json
    from .cli_options import Several, WithSettings
    from .cli_plan import Config, Live, SaveConfig, TensorBoard, Verbose, begin, plan
    from .cli_view import cost_document, cost_table, messages, print_table, resuming, set_logging, show, watching
except ModuleNotFoundError as error:
    raise SystemExit(f"the command line needs `pip install 'fedsso[cli]'` ({error})") from error

from . import experiment
from .algorithm import Algorithm
from .algorithms import ALGORITHMS
from .costs import costs as measure_costs
from .data.sources import FOLDER
from .errors import InputError, unknown
from .models import MODELS
from .runs import SPEC, Runs, is_done, load_runs, run_folders
from .spec import Spec
from .version import __version__

log = logging.getLogger("fedsso")
PICTURE = "curves.png"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
NAMES, SHAPE = Several(click.STRING), Several(click.INT)


class Program(TyperGroup):
    """Turns wrong input into a message and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            text = CONTROL.sub(lambda found: repr(found[0])[1:-1], str(error))  # from a file or a server, perhaps
            messages.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Second-order federated optimisation, simulated. Start with: fedsso compare --rounds 30",
)
app.add_typer(cli_data.app, name="data")
app.add_typer(cli_paper.app, name="paper")


# ---- the commands ----


def _draw(runs: Runs, settings: Any) -> None:
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

    Example: fedsso run --dataset digits --clients 10 --algorithm fedsso --alpha 0.05 --rounds 50 --out runs/a

    With --out the run can be interrupted and resumed, and runs/a/spec.toml is a --config that repeats it.
    """
    set_logging(verbose)
    made = plan(ctx, config, "algorithm")
    begin(made, save_config)
    settings, seeds = made.settings, made.settings.seeds
    many = {"seeds": seeds} if len(seeds) > 1 else {"seed": seeds[0], "checkpoint_every": settings.checkpoint_every}
    (record,) = made.records
    with watching(resuming(settings.out), live, tensorboard) as watch:
        done = experiment.simulate(
            made.fed, settings.model, record, out=settings.out, progress=watch, **cast(Any, {**made.options, **many})
        )
    runs = done if isinstance(done, Runs) else Runs([done])
    _draw(runs, settings)
    show(runs, settings.targets, settings.out, as_json, {})


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

    Example: fedsso compare --algorithms fedsso,fedavg --alpha 0.05 --rounds 50 --seeds 0,1,2 --out runs/b

    A step size such as --alpha goes to every algorithm that has it; a table in the --config file, such as
    \\[fedavg], sets one algorithm's. With --out there is also a picture, curves.png.
    """
    set_logging(verbose)
    made = plan(ctx, config, "algorithms")
    begin(made, save_config)
    settings = made.settings
    with watching(resuming(settings.out), live, tensorboard) as watch:
        common = {"seeds": settings.seeds, "out": settings.out, "progress": watch}
        runs = experiment.compare(made.fed, settings.model, made.records, **common, **made.options)
    _draw(runs, settings)
    show(runs, settings.targets, settings.out, as_json, made.left_out)


app.command(cls=WithSettings)(cli_sweep.sweep)
app.command()(cli_report.report)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a folder of such folders.", metavar="RUN")],
    data_dir: DataDir = None,
    live: Live = False,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Complete what was interrupted, exactly as if it had not been.

    Example: fedsso resume runs/a
    """
    set_logging(verbose)
    if data_dir is not None:
        os.environ[FOLDER] = str(data_dir)
    found = run_folders(folder)
    if all(is_done(one, Spec.load(one / SPEC)) for one in found):
        messages.print(f"{folder}: finished already", markup=False, soft_wrap=True)
        runs = load_runs(folder)
    else:
        with watching(resuming(folder), live, tensorboard) as watch:
            runs = experiment.resume(folder, progress=watch)
        runs.plot(folder / PICTURE)
    show(runs, None, folder, as_json, {})


@app.command()
def algorithms(
    names: Annotated[list[str] | None, typer.Argument(help="Only these; left out: all.", metavar="[NAME]...")] = None,
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
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for row in rows:
        whole = f" It needs all clients in every round; {row['needs_all']} does not." if row["needs_all"] else ""
        title = f"{row['name']}: {row['title']}{whole}"
        table = Table("option", "default", "meaning", title=title, title_justify="left", box=SIMPLE_HEAD)
        for field in row["fields"]:
            shown = "none" if field["default"] is None else str(field["default"])
            table.add_row(cli_config.flag(field["name"]), shown, escape(field["doc"]))
        print_table(table)


def _describe(name: str, cls: type[Algorithm]) -> dict[str, Any]:
    title = (getdoc(cls) or "").partition("\n")[0]
    own = [{"name": f.name, "type": f.type, "default": f.default, **f.metadata} for f in fields(cast(Any, cls))]
    return {"name": name, "title": title, "needs_all": cls.needs_all, "fields": own}


@app.command()
def costs(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "mclr",
    algorithms: Annotated[Any, typer.Option(help="Names with commas between, or all.", click_type=NAMES)] = "all",
    sample: Annotated[Any, typer.Option(help="Shape of one row of the data.", click_type=SHAPE)] = "1,28,28",
    classes: Annotated[int, typer.Option(help="Outputs of the model.")] = 10,
    compress: Annotated[str | None, typer.Option(help="Of the uploads: topk:SHARE, int8 or rank:R.")] = None,
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
        document = {"version": __version__, "model": model, "d": bill.d, **shape, "results": cost_document(bill)}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    title = f"{model}, d = {bill.d}: bytes of a round for each client (below: theory)"
    print_table(cost_table(bill, title))


@app.command()
def version() -> None:
    """Print the version.

    Example: fedsso version
    """
    typer.echo(f"fedsso {__version__}")


def main() -> None:
    """The entry point of the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every letter
    app(prog_name="fedsso")
