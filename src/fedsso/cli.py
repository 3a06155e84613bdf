"""The command `fedsso`: one short function for each sub-command.

The options of `run` and `compare` are not written here: they are made from the settings of `cli_config` and from the
fields of the registered algorithms.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

try:
    import click
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.logging import RichHandler
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from typer.core import TyperGroup

    from . import cli_config
    from .cli_options import WithSettings
except ModuleNotFoundError as error:
    raise SystemExit(f"the command line needs `pip install 'fedsso[cli]'` ({error})") from error

from . import experiment, report
from .algorithm import Algorithm
from .algorithms import ALGORITHMS
from .data import Federation, datasets, load
from .data.sources import FOLDER
from .errors import InputError
from .files import check_writable, read_toml, to_toml, write_atomic
from .objective import objective
from .runs import SPEC, Runs, is_done, load_runs, run_folders
from .spec import Spec, complete, context
from .version import __version__

log = logging.getLogger("fedsso")
output, messages = Console(), Console(stderr=True)
PICTURE = "curves.png"


class Program(TyperGroup):
    """Turns wrong input into a message and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            messages.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Second-order federated optimisation, simulated. Start with: fedsso compare --rounds 30",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets.")
app.add_typer(data_app, name="data")


# ---- what the commands share ----


class Plan(NamedTuple):
    """Checked settings and the objects behind them."""

    settings: Any
    fed: Federation
    records: dict[str, Algorithm]
    options: dict[str, Any]


def plan(ctx: typer.Context, config: Path | None, save: Path | None, names: str) -> Plan:
    """Everything that can be wrong with the input is found here, before anything is written."""
    given = ctx.obj
    settings = cli_config.settings(config, given["run"], given["data"])
    chosen = getattr(settings, names)
    chosen = list(ALGORITHMS) if chosen == ["all"] else [chosen] if isinstance(chosen, str) else chosen
    records = dict(zip(chosen, cli_config.records(settings, chosen, given["hyper"]), strict=True))
    wish = settings.data.given()
    fed = load(wish.pop("dataset", settings.data.dataset), **wish)
    for note in fed.notes:
        log.info(note)
    full = complete({**settings.options, "seed": settings.seeds[0]})
    job = context(fed, settings.model, full).job(full)
    objective(job.module, job.loss, job.engine, job.device, fed.sample_shape)
    _check_out(settings.out)
    if save is not None:
        write_atomic(save, to_toml(cli_config.effective(settings, fed, full, records)))
    return Plan(settings, fed, records, settings.options)


def _check_out(out: str | None) -> None:
    if out is not None and any(any(Path(out).glob(where)) for where in (SPEC, f"*/{SPEC}")):
        raise InputError(f"{out} holds a run already; `fedsso resume {out}` completes it, or choose another folder")
    if out is not None:
        check_writable(out)


class Watch:
    """Shows the rounds as they end and remembers the last; Ctrl-C takes effect between two rounds."""

    def __init__(self) -> None:
        self.label, self.k = "", 0
        self.stopping = False
        self.bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(), console=messages,
        )  # fmt: skip
        self.task = TaskID(0)

    def __call__(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
        shown = " ".join(f"{n.replace('_', ' ')} {v:.4f}" for n, v in numbers.items() if v >= 0)
        if messages.is_terminal:
            if label != self.label or k <= self.k:  # another run begins
                self.task = self.bars.add_task(label, total=rounds, numbers="")
            self.bars.update(self.task, completed=k, numbers=shown)
        elif k == rounds or k % -(-rounds // 10) == 0:
            messages.print(f"{label}: round {k}/{rounds} {shown}", soft_wrap=True, highlight=False, markup=False)
        self.label, self.k = label, k
        if self.stopping:
            raise KeyboardInterrupt

    def stop(self, *_: object) -> None:
        """The first Ctrl-C; a second one ends the process at once."""
        self.stopping = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        messages.print("stopping after this round (Ctrl-C again: at once)")


@contextmanager
def watching(out: str | Path | None) -> Iterator[Watch]:
    """Progress on standard error while simulating; an interrupted simulation says how to go on."""
    watch = Watch()
    before = signal.signal(signal.SIGINT, watch.stop)
    try:
        with watch.bars if messages.is_terminal else open(os.devnull):
            yield watch
    except KeyboardInterrupt as error:
        hint = f"; `fedsso resume {out}` goes on" if out is not None else ""
        messages.print(f"stopped after round {watch.k}{hint}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from error
    finally:
        signal.signal(signal.SIGINT, before)


def show(runs: Runs, targets: Sequence[float] | None, out: str | Path | None, as_json: bool) -> None:
    """The result as a table, or as one JSON document."""
    curves = runs.curves()
    targets = report.default_targets(curves) if targets is None else targets
    if as_json:
        typer.echo(json.dumps(document(curves, targets, out), indent=2, ensure_ascii=False))
        return
    _print(result_table(curves, targets))
    if out is not None:
        output.print(f"results: {out}", markup=False, soft_wrap=True)


def document(curves: Sequence[report.Curve], targets: Sequence[float], out: str | Path | None) -> dict[str, Any]:
    """The numbers of the table, and the bytes to each target for each seed."""
    rows = []
    for curve, numbers in zip(curves, report.numbers(curves, targets), strict=True):
        spent = {str(t): [trace.bytes_to(t) for trace in curve.traces] for t in targets}
        rows.append({**numbers, "bytes_to": spent})
    return {"version": __version__, "folder": out and str(out), "targets": list(targets), "results": rows}


def result_table(curves: Sequence[report.Curve], targets: Sequence[float]) -> Table:
    """Each target has a column with the rounds and, below, the megabytes until it is reached."""
    title = "rounds and megabytes until the test accuracy is reached" if targets else None
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("algorithm", overflow="fold", min_width=12)
    for name in [*(f"{t:g}" for t in targets), "final accuracy", "loss"]:
        table.add_column(name, justify="right")
    for curve in curves:
        rows = [report.rounds_table([curve], [t])[0] for t in targets or [1.0]]
        cells = [_cell(list(row.values())) for row in rows[: len(targets)]]
        loss = sum(trace.final("test_loss") for trace in curve.traces) / len(curve.traces)
        table.add_row(escape(curve.label), *cells, rows[0]["final accuracy"], f"{loss:.4g}")
    return table


def _cell(row: Sequence[str]) -> str:
    rounds, megabytes = row[1], row[2].partition(" ")[0]
    return f"{rounds}\n{megabytes} MB" if megabytes != "–" else rounds


def _print(table: Table) -> None:
    """A pipe has no width: nothing is folded there."""
    Console(width=None if output.is_terminal else 200).print(table)


def set_logging(verbose: bool) -> None:
    handler = RichHandler(console=messages, show_time=False, show_path=False)
    log.handlers = [handler]
    log.setLevel(logging.INFO if verbose else logging.WARNING)


Config = Annotated[Path | None, typer.Option(help="TOML file with settings; options given here win.")]
SaveConfig = Annotated[Path | None, typer.Option(help="Write the settings in force to this TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is done and why.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data files; left out: $FEDSSO_DATA.")]


# ---- the commands ----


@app.command(cls=WithSettings)
def run(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train one model with one algorithm.

    Example: fedsso run --dataset digits --clients 10 --algorithm fedsso --alpha 0.05 --rounds 50 --out runs/a

    With --out the run can be interrupted and resumed, and runs/a/spec.toml is a --config that repeats it.
    """
    set_logging(verbose)
    settings, fed, records, options = plan(ctx, config, save_config, "algorithm")
    seeds = settings.seeds
    many = {"seeds": seeds} if len(seeds) > 1 else {"seed": seeds[0], "checkpoint_every": settings.checkpoint_every}
    (record,) = records.values()
    with watching(settings.out) as watch:
        done = experiment.simulate(
            fed, settings.model, record, out=settings.out, progress=watch, **cast(Any, {**options, **many})
        )
    show(done if isinstance(done, Runs) else Runs([done]), settings.targets, settings.out, as_json)


@app.command(cls=WithSettings)
def compare(
    ctx: typer.Context,
    config: Config = None,
    save_config: SaveConfig = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train with several algorithms on one federation, with the same cohorts and mini-batches.

    Example: fedsso compare --algorithms fedsso,fedavg --alpha 0.05 --rounds 50 --seeds 0,1,2 --out runs/b

    A step size such as --alpha goes to every algorithm that has it; a table in the --config file, such as
    \\[fedavg], sets one algorithm's. With --out there is also a picture, curves.png.
    """
    set_logging(verbose)
    settings, fed, records, options = plan(ctx, config, save_config, "algorithms")
    with watching(settings.out) as watch:
        runs = experiment.compare(
            fed,
            settings.model,
            list(records.values()),
            seeds=settings.seeds,
            out=settings.out,
            progress=watch,
            **options,
        )
    if settings.out is not None:
        runs.plot(Path(settings.out) / PICTURE, targets=settings.targets or ())
    show(runs, settings.targets, settings.out, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a folder of such folders.", metavar="RUN")],
    data_dir: DataDir = None,
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
    if all(is_done(one, Spec.from_toml(read_toml(one / SPEC))) for one in found):
        messages.print(f"{folder}: finished already", markup=False, soft_wrap=True)
        runs = load_runs(folder)
    else:
        with watching(folder) as watch:
            runs = experiment.resume(folder, progress=watch)
        if found != [folder]:
            runs.plot(folder / PICTURE)
    show(runs, None, folder, as_json)


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the algorithms and their hyper-parameters.

    Example: fedsso algorithms
    """
    rows = [_describe(name, cls) for name, cls in ALGORITHMS.items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for row in rows:
        table = Table(
            "option",
            "default",
            "meaning",
            title=f"{row['name']}: {row['title']}",
            title_justify="left",
            box=SIMPLE_HEAD,
        )
        for field in row["fields"]:
            shown = "none" if field["default"] is None else str(field["default"])
            table.add_row(cli_config.flag(field["name"]), shown, escape(field["doc"]))
        _print(table)


def _describe(name: str, cls: type[Algorithm]) -> dict[str, Any]:
    title = (getdoc(cls) or "").partition("\n")[0]
    own = [{"name": f.name, "type": f.type, "default": f.default, **f.metadata} for f in fields(cast(Any, cls))]
    return {"name": name, "title": title, "fields": own}


@data_app.command("list")
def list_data(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets, and whether their files are there.

    Example: fedsso data list --data-dir ~/data
    """
    rows = []
    for d in datasets():
        path = d.path(data_dir)
        plain = {k: v for k, v in asdict(d).items() if k not in ("build", "read")}
        rows.append({**plain, "present": d.present(data_dir), "path": path and str(path)})
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table("data set", "rows", "classes", "partition", "present", box=SIMPLE_HEAD)
    for row in rows:
        about = "\n".join(part for part in (row["title"], row["origin"], row["licence"], _where(row)) if part)
        counts = [str(row[n] or "–") for n in ("rows", "classes", "partition")]
        table.add_row(f"[bold]{row['name']}[/]\n{escape(about)}\n", *counts, "yes" if row["present"] else "no")
    _print(table)


def _where(row: Mapping[str, Any]) -> str:
    return row["path"] or (f"{row['file']} in ${FOLDER}, which is not set" if row["file"] else "")


@app.command()
def version() -> None:
    """Print the version.

    Example: fedsso version
    """
    typer.echo(f"fedsso {__version__}")


def main() -> None:
    """The entry point of the command."""
    app(prog_name="fedsso")
