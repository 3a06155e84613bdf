"""The commands `fedsso paper ...`: every table and figure of the paper, from our own runs."""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
import torch
import typer
from rich.markdown import Markdown

from ..data.sources import FOLDER
from ..engine.settings import device_of
from ..paper import COMMANDS, Command, Entry
from ..paper.table2_pages import SLOW
from ..paper.tasks import TABLE2
from ..support.files import check_writable
from ..support.intake import read_text
from ..support.lock import Lock
from .flags import DataDir, Minutes, Verbose
from .options import Several
from .screen import output, say
from .watch import AGAIN, check_minutes, in_time, set_logging, watching

app = typer.Typer(
    no_args_is_help=True,
    help="Regenerate a table or figure of the paper. "
    "Start with: fedsso paper table2 --quick --out quick",
)
TEACH = """

Writes {name}.md, .csv and pictures (PNG, PDF) into --out; older files of
these names are replaced. All runs are
kept in its folder sweeps, which the commands share, so that nothing runs
twice. Killed or stopped, the same command goes on. --quick is a look of
about two minutes on a CPU: one seed, fewer rounds and settings. The whole
is meant for a GPU.

Example: fedsso paper {name} --quick --out quick
"""
RESULTS = Path("results")
QUICK = Path("quick")
PLAIN = ("table3", "theory")
"""Commands that take a minute on one core and keep no runs, so that they stop at once."""

Quick = Annotated[bool, typer.Option("--quick", help="About two minutes on two CPU cores.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the results; left out: results, or quick with --quick."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes to share the work; left out: one a core, at most 4."),
]
Blocks = Annotated[
    Any, typer.Option(help=f"Left out: all. {', '.join(TABLE2)}.", click_type=Several(click.STRING))
]
Slow = Annotated[bool, typer.Option("--slow", help=f"Also {SLOW}: for a GPU.")]


class How(NamedTuple):
    """The options that all commands have."""

    quick: bool
    out: Path | None
    device: str
    jobs: int | None
    minutes: float | None


def conduct(name: str, command: Command, how: How) -> None:
    """Run one command and show what it wrote.

    A command gets a `Lab`, which runs sweeps and keeps them in the folder of the results.
    """
    from ..paper.lab import Lab

    out = how.out or (QUICK if how.quick else RESULTS)
    check_minutes(how.minutes)
    check_writable(out)
    began = time.monotonic()
    deadline = math.inf if how.minutes is None else began + 60 * how.minutes
    cores = os.cpu_count() or 1
    jobs = how.jobs or min(4, cores)
    device = str(device_of(how.device))
    with Lock(out):
        if name in PLAIN:
            command(Lab(out, device, how.quick, note=say))
        else:
            with watching(AGAIN) as watch, in_time():
                command(Lab(out, device, how.quick, jobs, deadline, watch, watch.note))
    _show(out / f"{name}.md")
    where = f" on {torch.cuda.get_device_name()}" if device == "cuda" else ""
    say(f"{name}: {time.monotonic() - began:.0f} s{where}, processes: {jobs}")


def _show(path: Path) -> None:
    """The Markdown as tables on a terminal, as it is elsewhere."""
    text = read_text(path)
    if output.is_terminal:
        output.print(Markdown(text))
    else:
        typer.echo(text)
    say(f"written: {path.with_suffix('')}.*")


def _prepare(data_dir: Path | None, verbose: bool) -> None:
    """Do what two options ask for: set the folder of the data, and the logging."""
    set_logging(verbose)
    if data_dir is not None:
        os.environ[FOLDER] = str(data_dir)


def _help(name: str, title: str) -> str:
    """The help of a command: what it makes, and what all commands of the paper have in common."""
    return f"{_sentence(title)}{TEACH.format(name=name)}"


def _sentence(title: str) -> str:
    """A title with a capital and a full stop."""
    return f"{title[0].upper()}{title[1:]}."


@app.command("table2", help=_help("table2", COMMANDS["table2"].title))
def _table2(
    quick: Quick = False,
    out: Out = None,
    device: Device = "auto",
    blocks: Blocks = None,
    slow: Slow = False,
    jobs: Jobs = None,
    minutes: Minutes = None,
    data_dir: DataDir = None,
    verbose: Verbose = False,
) -> None:
    from ..paper.table2 import table2

    _prepare(data_dir, verbose)
    command = partial(table2, blocks=blocks or (), slow=slow)
    conduct("table2", command, How(quick, out, device, jobs, minutes))


def _add(name: str, entry: Entry) -> None:
    """Add a command with the options that all have."""

    def run(
        quick: Quick = False,
        out: Out = None,
        device: Device = "auto",
        jobs: Jobs = None,
        minutes: Minutes = None,
        data_dir: DataDir = None,
        verbose: Verbose = False,
    ) -> None:
        _prepare(data_dir, verbose)
        conduct(name, entry.command, How(quick, out, device, jobs, minutes))

    app.command(name, help=_help(name, entry.title))(run)


def _add_plain(name: str, entry: Entry) -> None:
    """Add a command that takes a minute on one core and keeps no runs."""

    def run(quick: Quick = False, out: Out = None) -> None:
        conduct(name, entry.command, How(quick, out, "cpu", 1, None))

    app.command(name, help=f"{_sentence(entry.title)}\n\nWrites {name}.md and .csv into --out.")(
        run
    )


for _name, _entry in COMMANDS.items():
    if _name in PLAIN:
        _add_plain(_name, _entry)
    elif _name != "table2":
        _add(_name, _entry)
