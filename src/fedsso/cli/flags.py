"""The options that several commands share: typer takes the type and the help from here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .tensorboard import check_tensorboard

Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with settings; options given here win."),
]
SaveConfig = Annotated[
    Path | None,
    typer.Option(
        help="Write the settings in force to this TOML file, which must not be there yet."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the data files; left out: $FEDSSO_DATA, else ~/.cache/fedsso."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead of a table."),
]
Live = Annotated[
    bool,
    typer.Option("--live", help="On a terminal: a dashboard of all runs while they train."),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        callback=check_tensorboard,
        help="Write every round's numbers there for TensorBoard, while the runs train.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(help="Stop after the part under way; the same command goes on."),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Say what is done and why."),
]
