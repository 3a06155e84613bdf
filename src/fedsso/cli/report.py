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
        help="A run's folder, a folder of such, a sweep's, a checkpoint_dir of Flower, "
        "a trace.csv, or a saved regression.",
        metavar="RUN...",
    ),
]
Out = Annotated[
    Path, typer.Option(help="The page; of files that lie there only an older page is replaced.")
]
Title = Annotated[str, typer.Option(help="Heading of the page; left out: the names of the runs.")]
Targets = Annotated[
    Any,
    typer.Option(
        help="Accuracies of the table; left out: four that suit.", click_type=Several(click.FLOAT)
    ),
]

WithData = Annotated[
    bool,
    typer.Option(
        "--with-data", help="Read the files that the runs' settings name, to show who holds what."
    ),
]


def report(
    runs: Paths,
    out: Out = Path("report.html"),
    title: Title = "",
    targets: Targets = None,
    with_data: WithData = False,
) -> None:
    """Write one interactive HTML page about runs: curves, tables, grids, settings.

    Example: fedsso report runs/a

    Example: fedsso report runs/a sweeps/b /srv/flower --targets 0.8,0.9 --out compare.html

    RUN is a run's folder, a folder of run folders, the --out folder of a sweep,
    the checkpoint_dir of a run on Flower, or a trace.csv; several are shown
    together, as is what lies in folders below them. A run that is not finished
    is shown as far as it goes. Numbers of different data are not compared.

    Who holds which labels is shown for data sets by name. Files that the settings
    of a run name are read with --with-data only: a folder may be somebody else's.

    The folder of a saved regression (`fedsso glm --out`) has a page of its own:
    forest plot, calibration, ROC, table by hospital, convergence.

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
