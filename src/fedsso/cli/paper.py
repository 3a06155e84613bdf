"""The commands `fedsso paper ...`: every table and figure of the paper, from our own runs.

`paper.COMMANDS` lists what there is. Each entry becomes a command here, with the options that all
of them share; `table2` has some of its own. A command gets a `Lab`, which runs sweeps and keeps
them, and writes its files into the folder of the results.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import click
import torch
import typer
from rich.markdown import Markdown

from ..data.sources import FOLDER
from ..engine.ranks import team
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
    help="Reproduce a table or figure of the paper. "
    "Start with: fedsso paper table2 --quick --out quick",
)
# The help that all commands have in common, below their own sentence.
TEACH = """

Writes {name}.md, .csv and pictures (PNG, PDF) into --out and overwrites
older files with these names. All runs are kept in its folder sweeps, which
the commands share, so nothing runs twice. If it was interrupted, the same
command continues. --quick takes a few minutes on a CPU: one seed, fewer
rounds and settings. The full version is meant for a GPU.

Example: fedsso paper {name} --quick --out quick
"""
# Where results go if nothing else is said. A quick look must not replace the whole.
RESULTS = Path("results")
QUICK = Path("quick")
PLAIN = ("table3", "theory")
"""Commands that take a minute on one core and keep no runs, so that they stop at once."""

# The options of the commands: typer takes the type and the help from here.
Quick = Annotated[bool, typer.Option("--quick", help="A few minutes on two CPU cores.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results. By default results, or quick with --quick."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Parallel processes. By default one per core, at most 4."),
]
Blocks = Annotated[
    Any,
    typer.Option(help=f"By default all of {', '.join(TABLE2)}.", click_type=Several(click.STRING)),
]
Slow = Annotated[bool, typer.Option("--slow", help=f"Also run {SLOW}, meant for a GPU.")]


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

    Args:
        name: The name of its files, which is that of the command unless it has several.
        command: What makes the files.
        how: The options.

    Raises:
        InputError: An option is wrong, or the folder cannot be written or is in use.
        typer.Exit: It was interrupted, or the time was up; what is done is kept.
    """
    out = how.out or (QUICK if how.quick else RESULTS)
    check_minutes(how.minutes)
    with _kept_in(out) as folder:
        _conduct(name, command, how, folder)


@contextmanager
def _kept_in(out: Path) -> Iterator[Path]:
    """The folder of the results; of several processes all but the first write into a passing one.

    So they do the same as the first, which has the runs, and nothing of theirs stays.
    """
    if team().is_first:
        yield out
        return
    with TemporaryDirectory(prefix="fedsso-") as name:
        yield Path(name)


def _conduct(name: str, command: Command, how: How, out: Path) -> None:
    """As `conduct`, with results in this folder."""
    from ..paper.lab import Lab

    check_writable(out)
    began = time.monotonic()
    # No new part of a sweep begins after this time; the one under way is finished.
    deadline = math.inf if how.minutes is None else began + 60 * how.minutes
    cores = os.cpu_count() or 1
    jobs = how.jobs or (1 if team().size > 1 else min(4, cores))
    device = str(device_of(how.device))
    with Lock(out):
        # These take no signals into account and show no bars: they are over in a minute. They train
        # nothing that several processes could share.
        if name in PLAIN and not team().is_first:
            return
        if name in PLAIN:
            command(Lab(out, device, how.quick, note=say))
        else:
            with watching(AGAIN) as watch, in_time():
                command(Lab(out, device, how.quick, jobs, deadline, watch, watch.note))
    _show(out / f"{name}.md")
    # A time is of use only with the machine on which it was measured.
    where = f" on {torch.cuda.get_device_name()}" if device == "cuda" else ""
    say(f"{name}: {time.monotonic() - began:.0f} s{where}, processes: {jobs}")


def _show(path: Path) -> None:
    """The Markdown as tables on a terminal, as it is elsewhere, and where the files are."""
    text = read_text(path)
    if output.is_terminal:
        output.print(Markdown(text))
    else:
        typer.echo(text)
    say(f"written: {path.with_suffix('')}.*")


def _prepare(data_dir: Path | None, verbose: bool) -> None:
    """Do what two options ask for: set the folder of the data, and the logging.

    The folder goes into the environment, where the processes that share the work find it too.
    """
    set_logging(verbose)
    if data_dir is not None:
        os.environ[FOLDER] = str(data_dir)


def _help(name: str, title: str) -> str:
    """The help of a command: what it makes, and what all commands of the paper have in common.

    Args:
        name: The name of the command.
        title: What it makes, as `paper.COMMANDS` says.
    """
    return f"{_sentence(title)}{TEACH.format(name=name)}"


def _sentence(title: str) -> str:
    """A title with a capital and a full stop.

    Titles are written for lists, where they have neither.
    """
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
    """Table 2, whose blocks may be chosen: it is by far the longest of the commands."""
    from ..paper.table2 import page, table2

    _prepare(data_dir, verbose)
    # Two options are its own; from here on it is a command like the others.
    command = partial(table2, blocks=blocks or (), slow=slow)
    conduct(page(blocks or ()), command, How(quick, out, device, jobs, minutes))


def _add(name: str, entry: Entry) -> None:
    """Add a command with the options that all have.

    Args:
        name: Its name.
        entry: What it makes, and the function that does it.
    """

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
    """Add a command that takes a minute on one core and keeps no runs.

    It has no options for devices, processes or time.
    """

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
