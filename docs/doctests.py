"""Shows the examples of docstrings as code: mkdocstrings would take `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)(?:^ *>>> .*\n?(?:^ *\S.*\n?)*)+")


class Doctests(griffe.Extension):
    """Put a fence around every example."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was found."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    """The lines of an example as a block of code."""
    return f"```pycon\n{example[0].rstrip()}\n```\n"
