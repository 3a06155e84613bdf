"""The way to the terminal: messages on standard error, results on standard output.

Labels, names of data sets and files, and the texts of errors come from others. They are printed as
they are: no markup, no emoji, and what would steer the terminal is shown as \\x1b.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..support import processes

CONTROL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)  # the latter turn text round
WIDE = 200  # columns of a table that goes to a pipe, which has no width


def visible(text: str) -> str:
    """The text with control characters, except the end of a line, as Python writes them.

    >>> print(visible("a\\x1b[2J"))
    a\\x1b[2J
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class Screen(Console):
    """A console that prints every text as it is.

    rich would take [bold] in a label for markup and :smile: for an emoji.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Whatever is printed passes here."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=visible(part.text))


output = Screen()
messages = Screen(stderr=True)


def draws() -> bool:
    """Whether standard error is a terminal on which something can be drawn again in its place."""
    return messages.is_terminal and not messages.is_dumb_terminal


def say(text: str) -> None:
    """A line on standard error: what is done, notes, hints; of several processes the first."""
    if processes.number() > 0:
        return
    messages.print(text, soft_wrap=True)


def complain(text: str) -> None:
    """A line on standard error that begins with "error:", for what went wrong.

    Where there are several processes, it says which one it comes from.
    """
    where = f"process {processes.number()}: " if processes.count() > 1 else ""
    messages.print(
        Text.assemble(
            where,
            ("error:", "bold red"),
            " ",
            visible(text),
        ),
        soft_wrap=True,
    )


def tell(text: str) -> None:
    """A line of the result, on standard output."""
    output.print(text, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table on standard output. A pipe has no width: nothing is folded there."""
    Screen(width=None if output.is_terminal else WIDE).print(table)


def print_json(document: object) -> None:
    """One JSON document, alone on standard output.

    Control characters within texts are written as \\u escapes, so that the document can be looked
    at on a terminal as well.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


# ---- streams that may break ----


class Outlet(io.FileIO):
    """A file descriptor that takes everything: once a write has failed, what follows is dropped."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write what can be written."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return len(memoryview(data).cast("B"))

    @property
    def lost(self) -> OSError | None:
        """Why something was lost; a reader who has left (a closed pipe) misses nothing."""
        return None if isinstance(self.failure, BrokenPipeError) else self.failure


def unbreakable(stream: TextIO | None) -> tuple[TextIO | None, Outlet | None]:
    """A standard stream that never raises, and its outlet, which knows what was lost.

    Letters that the terminal's encoding does not have are replaced. A stream that is no text
    wrapper of a file, such as one of a test, is returned as it is, without an outlet.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream, None
    stream.flush()
    outlet = Outlet(stream.fileno(), "w", closefd=False)
    buffer = io.BufferedWriter(outlet)
    return io.TextIOWrapper(
        buffer, stream.encoding, "replace", line_buffering=stream.line_buffering
    ), outlet
