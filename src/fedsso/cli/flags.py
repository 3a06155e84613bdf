"""The options that several commands share: typer takes the type and the help from here.

A command takes one by naming it as the type of a parameter, such as `as_json: Json = False`. The
options of a run, of the data and of the algorithms are not here: `options.py` makes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .tensorboard import check_tensorboard

# A settings file, for `run`, `compare` and `sweep`. Its form is that of `config.py`.
Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with settings. Options on the command line take precedence."),
]
# The other way round: the file has every setting, those at their defaults as well.
SaveConfig = Annotated[
    Path | None,
    typer.Option(help="Write all settings of this command to a new TOML file."),
]
# For commands without the options of the data, where it is one of them.
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the data files. By default $FEDSSO_DATA, or else ~/.cache/fedsso."
    ),
]
# For other programs. Messages go to standard error, so nothing else is in the output.
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead of a table."),
]
# Where standard error is no terminal it changes nothing.
Live = Annotated[
    bool,
    typer.Option("--live", help="Show a live dashboard of all runs (in a terminal)."),
]
# The callback refuses it at once if the package is missing, before any data are loaded.
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        callback=check_tensorboard,
        help="Write the numbers of every round to this folder, for TensorBoard.",
    ),
]
# For queues that kill a job after some time. The exit code is then 75.
Minutes = Annotated[
    float | None,
    typer.Option(help="Time limit: stop after the current part. The same command continues."),
]
# Shows the messages of level INFO of the logger "fedsso"; warnings are always shown.
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print more about what is done and why."),
]
