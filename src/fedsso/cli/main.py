"""The command `fedsso`: its sub-commands, and how it ends.

Each sub-command is a function in a module of its own. The options of `run`, `compare`, `sweep` and
`tune` are not written there: `options` makes them from the records that declare them.

Whatever happens, the program ends with one of the exit codes of `support.exits`. Wrong input is a
sentence on standard error and exit code 2, never a traceback. A traceback means a fault of ours,
and exit code 70.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

from ..support.exits import BUG, FINISHED, INTERRUPTED, MEANING, WRONG_INPUT

# The command line is an extra of the package: without it, a sentence says how to install it.
try:
    import click
    import typer
    from typer.core import TyperGroup

    from . import lists, runs
    from .data import app as data_app
    from .glm import glm, predict
    from .options import WithSettings
    from .paper import app as paper_app
    from .report import report
    from .screen import complain, say, tell, unbreakable, visible
    from .sweep import sweep, tune
except ModuleNotFoundError as error:
    remedy = "install fedsso with its extra, in a checkout `pip install '.[cli]'`"
    print(f"the command line needs more packages: {remedy} ({error})", file=sys.stderr)
    raise SystemExit(WRONG_INPUT) from error

from ..engine.ranks import RankLost
from ..errors import InputError
from ..support import processes
from ..support.intake import limits
from ..support.stopping import at_once, listen, unwind
from ..version import __version__

ALIKE = 10.0  # seconds that a process waits for the first one to tell an error that both may have


class Program(TyperGroup):
    """Turns wrong input, and a lack of files or memory, into a message and exit code 2.

    All commands pass through it, so none of them needs to catch these errors itself.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command, and turn its errors into messages.

        Raises:
            typer.Exit: With exit code 2, after the message has been printed.
            click.UsageError: An option is wrong; click prints it with the command's usage.
        """
        try:
            limits()  # a wrong one would be noticed only when the first file is read
            return super().invoke(ctx)
        except click.UsageError as error:
            _let_the_first_speak()
            text = error.format_message()
            # What a user typed may hold characters that steer the terminal: they are made
            # visible.
            if visible(text) == text:
                raise
            raise click.UsageError(visible(text), error.ctx) from None
        except InputError as error:
            _let_the_first_speak()
            complain(str(error))
            raise typer.Exit(WRONG_INPUT) from error
        except RankLost as error:
            complain(str(error))
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            complain(
                f"cannot use {error.filename or 'a file or device'}: {error.strerror or error}; "
                f"look at its permissions"
            )
            raise typer.Exit(WRONG_INPUT) from error
        except MemoryError as error:
            complain("not enough memory; use a smaller model, less data or fewer --jobs")
            raise typer.Exit(WRONG_INPUT) from error


def _let_the_first_speak() -> None:
    """Of several processes that fail alike, let the first one say why.

    When it has ended, torchrun ends the others. One that is still there after a while has an error
    of its own, and goes on to tell it.
    """
    if processes.number() > 0:
        listen(at_once)
        time.sleep(ALIKE)


# ---- the commands, in the order of the help ----

CODES = "\n\n".join(f"Exit code {code}: {meaning}." for code, meaning in MEANING.items())
app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Second-order federated optimisation, simulated. Start with: fedsso compare --rounds 30",
    epilog=CODES,
)
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")
app.command(cls=WithSettings)(runs.run)
app.command(cls=WithSettings)(runs.compare)
app.command(cls=WithSettings)(sweep)
app.command(cls=WithSettings)(tune)
app.command()(glm)
app.command()(predict)
app.command()(report)
app.command()(runs.resume)
app.command()(lists.algorithms)
app.command()(lists.costs)


@app.command()
def version() -> None:
    """Print the version.

    Example: fedsso version
    """
    tell(f"fedsso {__version__}")


# ---- the program ----


def main() -> None:
    """Run the command, listen to signals, and end with one of the exit codes.

    A signal ends the program in order: files are closed, and locks let go. Standard output and
    standard error may break (a closed pipe, a full disk) without an error in the middle of the
    work; what was lost is told at the end.
    """
    listen(unwind)
    os.environ["MPLBACKEND"] = "agg"  # that of a notebook around need not be installed here
    if processes.number() > 0:  # the first process prints the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, outlet = unbreakable(sys.stdout)
    sys.stderr, _ = unbreakable(sys.stderr)
    code = _run()
    if outlet is not None and sys.stdout is not None:
        sys.stdout.flush()
        if outlet.lost is not None:
            complain(
                f"cannot write to standard output: {outlet.lost.strerror}; give it a file on a "
                f"disk with room"
            )
            # Lost output is no success. An interrupt keeps its own code.
            code = code if code == INTERRUPTED else WRONG_INPUT
    # While the interpreter shuts down there is nothing left to interrupt.
    # A signal that comes now must not turn a finished command into an interrupted one.
    listen(lambda *_: os._exit(code))
    sys.exit(code)


def _run() -> int:
    """Run the command and return its exit code.

    Anything that is not wrong input is a fault of ours: its traceback is shown for a report.
    """
    try:
        app(prog_name="fedsso")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FINISHED
    except Exception:
        traceback.print_exc()
        say("this is a bug in fedsso: please report it with the lines above")
        return BUG
    return FINISHED
