"""The command `fedsso report`: runs, sweeps and runs on Flower as one interactive HTML page.

What is in the folders is found by `report.sources`, and the page is made by `report.page`. Both
are imported when the command runs, so that the other commands start without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from ..errors import InputError
from ..support.intake import is_file
from .options import Several
from .replace import check_file
from .screen import say, tell

if TYPE_CHECKING:
    from ..report.page import Content

# The options: typer takes the type and the help from here.
Paths = Annotated[
    list[Path],
    typer.Argument(
        help="Folder of a run, of several runs or of a sweep, checkpoint_dir of a Flower run, "
        "trace.csv, or folder of a saved regression.",
        metavar="RUN...",
    ),
]
Out = Annotated[Path, typer.Option(help="File of the report. Only an older report is overwritten.")]
Title = Annotated[str, typer.Option(help="Title of the report. By default the names of the runs.")]
Targets = Annotated[
    Any,
    typer.Option(
        help="Accuracies in the table. By default four suitable ones.",
        click_type=Several(click.FLOAT),
    ),
]

Tables = Annotated[
    Any,
    typer.Option(
        help="Also write the page's table to these files: .tex (LaTeX), .md or .csv.",
        metavar="FILE,...",
        click_type=Several(click.STRING),
    ),
]

WithData = Annotated[
    bool,
    typer.Option(
        "--with-data",
        help="Read the data files named in the settings, to show the data per client.",
    ),
]


def report(
    runs: Paths,
    out: Out = Path("report.html"),
    title: Title = "",
    targets: Targets = None,
    tables: Tables = None,
    with_data: WithData = False,
) -> None:
    """Write an interactive HTML report of runs: curves, tables, grids, settings.

    Example: fedsso report runs/a

    Example: fedsso report runs/a sweeps/b /srv/flower --targets 0.8,0.9 --out compare.html

    Example: fedsso report runs/a --tables table.tex,table.csv

    RUN is the folder of a run, a folder of several runs, the --out folder of a
    sweep, the checkpoint_dir of a Flower run, or a trace.csv. Several are shown
    together, including those in folders below them. Unfinished runs are shown
    as far as they go. Results on different data are not compared.

    For built-in data sets, the report shows the labels of each client and how well
    the models do there. Data files named in the settings of a run are read only
    with --with-data, because a folder may come from somebody else.

    --tables writes the first table of the report for a paper. For a sweep, or for
    many settings, it has the best setting of each algorithm.

    A saved regression (`fedsso glm --out`) gets its own kind of report: forest
    plot, calibration, ROC, table by hospital, convergence.

    The page needs no other file and no network: open it, send it, print it.
    """
    from ..regression.result.model import MODEL, load_model
    from ..report.page import MARK, write
    from ..report.sources import content

    check_file(out, MARK, "a page")
    files = _checked(tables or ())
    if len(runs) == 1 and is_file(runs[0] / MODEL):
        if files:
            raise InputError(
                "--tables is for runs and sweeps; in Python, `load_model(folder).to_latex(path)` "
                "writes the table of a regression"
            )
        load_model(runs[0]).report(out, title)
        tell(f"{out}: a regression, {out.stat().st_size / 1e6:.1f} MB")
        return
    found = content(runs, title=title, targets=targets, with_data=with_data)
    write(out, found)
    for note in found.notes:
        say(f"note: {note}")
    # Every seed is a run of its own.
    count = sum(len(curve.traces) for curve in found.curves)
    word = "run" if count == 1 else "runs"
    tell(f"{out}: {count} {word}, {out.stat().st_size / 1e6:.1f} MB")
    if files:
        _write_tables(files, found)


def _checked(names: Sequence[str]) -> list[Path]:
    """The files of tables; one of another format, or of somebody else's, is refused."""
    from ..report.written import MARKS, check_suffix

    files = [Path(name) for name in names]
    for file in files:
        check_file(file, MARKS[check_suffix(file)], "a table", "--tables")
    return files


def _write_tables(files: Sequence[Path], found: Content) -> None:
    """Write the first table of the page to files, and say so."""
    from ..report.page.view import View
    from ..report.written import table, write

    view = View(found)
    made = table([item.curve for item in view.shown], view.targets)
    for file in files:
        write(file, made)
        tell(f"{file}: the table of {', '.join(view.algorithms)}")
