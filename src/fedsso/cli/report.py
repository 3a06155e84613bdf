"""The command `fedsso report`: runs, sweeps and runs on Flower as one interactive HTML page.

What is in the folders is found by `report.sources`, and the page is made by `report.page`. Both
are imported when the command runs, so that the other commands start without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click
import typer

from ..support.intake import is_file
from .options import Several
from .replace import check_file
from .screen import say, tell

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
    with_data: WithData = False,
) -> None:
    """Write an interactive HTML report of runs: curves, tables, grids, settings.

    Example: fedsso report runs/a

    Example: fedsso report runs/a sweeps/b /srv/flower --targets 0.8,0.9 --out compare.html

    RUN is the folder of a run, a folder of several runs, the --out folder of a
    sweep, the checkpoint_dir of a Flower run, or a trace.csv. Several are shown
    together, including those in folders below them. Unfinished runs are shown
    as far as they go. Results on different data are not compared.

    For built-in data sets, the report shows the labels of each client. Data files
    named in the settings of a run are read only with --with-data, because a
    folder may come from somebody else.

    A saved regression (`fedsso glm --out`) gets its own kind of report: forest
    plot, calibration, ROC, table by hospital, convergence.

    The page needs no other file and no network: open it, send it, print it.
    """
    from ..regression.result.model import MODEL, load_model
    from ..report.page import MARK, write
    from ..report.sources import content

    check_file(out, MARK, "a page")
    if len(runs) == 1 and is_file(runs[0] / MODEL):
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
