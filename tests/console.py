"""The command line as the tests call it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    from typer.testing import CliRunner

    from fedsso.cli.main import app


def fedsso(*args: object, code: int = 0) -> Any:
    """Run a command in this process."""
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def command(*args: object) -> list[str]:
    """The same as a process of its own."""
    return [sys.executable, "-m", "fedsso", *map(str, args)]


def mentions(text: str, parts: str) -> bool:
    """Whether a text has these parts, which " … " separates, in their order.

    Enough for an error: the value that is wrong and the remedy, whatever stands between them.
    """
    place = 0
    for part in parts.split(" … "):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True
