"""The commands `fedsso data ...`: what there is, fetching it, looking at a federation or a table.

`list` shows the catalogue and what of it is on this machine. `get` fetches the official files.
`show` draws how the rows of a data set are shared out among clients, without training anything.
`schema` makes a schema of one hospital's table, for a person to correct.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..data.catalogue import datasets, load
from ..data.fetch import fetch
from ..data.partition import TABLES
from ..data.sources import DataSet, data_folder
from ..errors import InputError, one_of
from ..regression.design import read_table
from ..regression.infer import infer
from ..regression.schema import RULES, write
from ..report.federation import skew, text
from ..report.federation_picture import picture
from ..support.files import write_atomic
from ..support.picture import MARK
from .flags import DataDir, Json
from .options import WithData
from .replace import check_file
from .screen import messages, output, print_json, print_table, say, tell, visible
from .settings import read_settings

# The group of commands; `main` adds it to the program under the name data.
app = typer.Typer(
    no_args_is_help=True,
    help="List, download and inspect data sets; describe your own tables in a schema.",
)


@app.command("list")
def list_data(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List all data sets: size, licence, which are on this machine, where they are searched for.

    Example: fedsso data list --data-dir ~/data
    """
    rows = [describe(dataset, data_dir) for dataset in datasets()]
    if as_json:
        print_json(rows)
        return
    table = Table("data set", "rows", "classes", "partition, clients", "there", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*_cells(row))
    print_table(table)
    tell(f"Looked for in {data_folder(data_dir)}")


def _cells(row: dict[str, Any]) -> list[Any]:
    """A line of the list: name and origin, rows, classes, default partition, and what is there.

    Args:
        row: What `describe` returns.
    """
    origin = row["origin"]
    if row["licence"]:
        origin += f"; licence: {row['licence']}"
    about = [row["title"], origin, f"models: {', '.join(row['models'])}", *_where(row)]
    lines = visible("\n".join(filter(None, about)))
    clients = "–"
    if row["partition"]:
        clients = f"{row['partition']}, {row['clients'] or 'all'}"
    there = "no"
    if row["present"]:
        there = _size(row["bytes"]) if row["bytes"] else "yes"
    return [
        Text.assemble((row["name"], "bold"), f"\n{lines}\n"),
        str(row["rows"] or "–"),
        str(row["classes"] or "–"),
        clients,
        there,
    ]


def describe(dataset: DataSet, data_dir: Path | None) -> dict[str, Any]:
    """What is known of a data set, and which of its files are there.

    Args:
        dataset: An entry of the catalogue.
        data_dir: The folder of the data files; None: the one of the environment.

    Returns:
        Plain values, which `--json` prints as they are. "files" are those that were found,
        "looked_for" the names that each form of the data set may have, "download" and "bytes" are
        sizes in bytes. "clients" is None where the data decide how many there are. "present" is
        True for a data set that needs no files.
    """
    found = dataset.find(data_dir)
    # Without files the first form stands for the data set: it is the official one.
    form = dataset.forms[0] if dataset.forms else None
    paths: list[Path] = []
    if found is not None:
        form, paths = found
    folder = data_folder(data_dir)
    looked_for = []
    for one in dataset.forms:
        looked_for.append([str(folder / file) for file in one.files])
    urls: list[str] = []
    for remote in dataset.remotes:
        urls += remote.urls
    return {
        "name": dataset.name,
        "title": dataset.title,
        "classes": dataset.classes,
        "partition": dataset.partition,
        "clients": _default_clients(dataset),
        "models": dataset.models,
        "origin": dataset.origin,
        "licence": dataset.licence,
        "rows": form.rows if form else 0,
        "present": dataset.present(data_dir),
        "bytes": sum(path.stat().st_size for path in paths),
        "files": [str(path) for path in paths],
        "looked_for": looked_for,
        "wanted": dataset.wanted(),
        "download": sum(remote.size for remote in dataset.remotes),
        "urls": urls,
    }


def _default_clients(dataset: DataSet) -> int | None:
    """How many clients there are by default; None where the data decide.

    The partition "group" has a client for each group that the data set names. One of the paper's
    tables has a row for each client. Otherwise the data set has a number of its own.
    """
    if dataset.partition == "group":
        return None
    table = TABLES.get(dataset.partition, ())  # one of the paper's tables has a row for each client
    return len(table) or dataset.clients


def _where(row: dict[str, Any]) -> list[str]:
    """Where the files of a data set are, or how to get them: lines below its name."""
    files = row["files"]
    if files:
        more = " ..." if len(files) > 2 else ""
        return [f"in {', '.join(files[:2])}{more}"]
    if row["present"]:
        return []
    if not row["urls"]:
        return ["files of your own: --files"]
    size = f" ({_size(row['download'])})" if row["download"] else ""
    return [f"looked for: {row['wanted']}", f"fedsso data get {row['name']}{size}"]


def _size(count: float) -> str:
    """Bytes with three figures, in a unit that suits; a kB is 1000 bytes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


@app.command("get")
def get_data(
    names: Annotated[
        list[str],
        typer.Argument(help="Data sets; `fedsso data list` lists them.", metavar="NAME..."),
    ],
    data_dir: DataDir = None,
    mirror: Annotated[str, typer.Option(help="Download the files from this address instead.")] = "",
) -> None:
    """Download the official files of data sets.

    Example: fedsso data get mnist fashion_mnist --data-dir ~/data

    An interrupted download continues where it stopped. Every file is checked before it is put into
    the data folder: by its SHA-256, where a public source gives one, and by its structure.
    """
    # All names are checked before anything is fetched.
    known = {dataset.name: dataset for dataset in datasets()}
    failed = []
    for name in [one_of("data set", name, known) for name in names]:
        try:
            said = _get(known[name], data_dir, mirror)
        except InputError as error:  # the others may be had
            failed.append(str(error))
        else:
            say(f"{name}{said}")
    if failed:
        raise InputError("\n".join(failed))


def _get(dataset: DataSet, data_dir: Path | None, mirror: str) -> str:
    """Fetch a data set unless it is there, and say what was done.

    Args:
        dataset: An entry of the catalogue.
        data_dir: Where its files go; None: the folder of the environment.
        mirror: Another address to take the files from; empty: the official one.

    Returns:
        The end of a sentence that begins with the name of the data set.

    Raises:
        InputError: There is nothing to fetch, or it could not be fetched.
    """
    if dataset.yours:
        raise InputError(
            f"data set {dataset.name!r} has no files to fetch: it reads your own, with --files"
        )
    found = dataset.find(data_dir)
    folder = data_folder(data_dir)
    # A smaller form, such as a sample, does not stand for the whole data set.
    if not dataset.remotes or (found and found[0].rows >= dataset.forms[0].rows):
        here = ", ".join(map(str, found[1] if found else ()))
        return f" is already on this machine: {here or 'it needs no files'}"
    with _bars() as progress:
        paths = fetch(
            dataset.name,
            dataset.remotes,
            folder,
            check=dataset.check,
            progress=progress,
            mirror=mirror,
        )
    return f": {_size(sum(path.stat().st_size for path in paths))} in {folder}"


@contextmanager
def _bars() -> Iterator[Any]:
    """Shows how a download goes on: a bar on a terminal, else a line at every tenth.

    Yields:
        A function of the file's label, the bytes so far and all bytes, 0 where nobody knows them.
    """
    shown: dict[str, int] = {}

    def lines(label: str, done: int, total: int) -> None:
        """Say how far a file is, unless it was said for this tenth already."""
        # Where the size is unknown, a line for every 16 MiB.
        tenth = 10 * done // total if total else done >> 24
        if shown.get(label) != tenth:
            shown[label] = tenth
            say(f"{label}: {_size(done)}{f' of {_size(total)}' if total else ''}")

    if not messages.is_terminal:
        yield lines
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), console=messages) as bars:

        def bar(label: str, done: int, total: int) -> None:
            """Move the bar of a file; the first call makes it."""
            if label not in shown:
                shown[label] = bars.add_task(label)
            bars.update(shown[label], completed=done, total=total or None)  # type: ignore[arg-type]

        yield bar


@app.command("show", cls=WithData)
def show_data(
    ctx: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(help="File of the picture. By default DATASET-PARTITION.png, here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the data of each client: a table and a picture of clients and labels, and their skew.

    Example: fedsso data show --dataset mnist --partition paper-20
    """
    # The options are read as those of `run` are, so that the picture is that of a run.
    wish = read_settings(None, {}, ctx.obj["data"]).data.given()
    fed = load(wish.pop("dataset", "digits"), **wish)
    how = str(fed.source.get("partition", fed.source.get("kind")))
    # The name tells what the picture shows, so that several of them fit into one folder.
    path = out or Path(f"{fed.source['name']}-{how}.png")
    # Before it is drawn: a picture of somebody else's is not replaced.
    check_file(path, MARK, "a picture")
    picture(fed, path)
    if as_json:
        # Real targets cannot be counted by label.
        counts = fed.label_counts().tolist() if fed.classes else None
        figures = {
            "source": dict(fed.source),
            **skew(fed),
            "label_counts": counts,
            "notes": fed.notes,
        }
        print_json({**figures, "picture": str(path)})
        return
    tell(text(fed, max(40, output.width)))
    tell(f"picture: {path}")


# ---- a schema ----


def _column(help: str, *names: str) -> Any:
    """The option for the name of a column."""
    return typer.Option(*names, metavar="COLUMN", help=help)


@app.command("schema")
def make_schema(
    table: Annotated[Path, typer.Argument(help="CSV table of one hospital.", metavar="TABLE")],
    outcome: Annotated[str, _column("Outcome column.", "--outcome", "--column", "--target")],
    out: Annotated[
        Path | None, typer.Option(help="File of the schema. By default it is printed.")
    ] = None,
    time: Annotated[str, _column("Time at risk, for survival data.")] = "",
    weights: Annotated[str, _column("Weights of the rows.")] = "",
    offset: Annotated[str, _column("Offset, added to the linear predictor.")] = "",
    missing: Annotated[
        str,
        typer.Option(
            help="complete: drop rows with missing values; median: impute, with an indicator."
        ),
    ] = RULES[0],
    ignore: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")] = "",
    categories: Annotated[
        str, typer.Option(help="Columns whose numbers are category codes, separated by commas.")
    ] = "",
) -> None:
    """Generate a schema from one hospital's table: its columns, their levels, and the outcome.

    Example: fedsso data schema north.csv --outcome disease --out schema.toml

    Check and correct it by hand: all hospitals use the same schema. It names columns, levels and
    units, and contains no rows. Dates, and numbers mixed with text, give an error with a fix.
    """
    if out is not None and out.exists():
        raise InputError(f"{out} already exists; choose another name for --out, or remove it")
    schema, notes = infer(
        read_table(table, outcome),
        outcome,
        time=time,
        weights=weights,
        offset=offset,
        missing=one_of("rule for missing values", missing, RULES),
        ignore=ignore,
        categories=categories,
    )
    for note in notes:
        say(f"note: {note}")
    written = write(schema)
    if out is None:
        tell(written.rstrip())
        return
    write_atomic(out, written)
    tell(f"schema: {out}")
