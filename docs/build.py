"""Writes what the documentation takes from the code: the table of algorithms.md, and with `--figures` its picture.

python docs/build.py [--figures]
"""

from __future__ import annotations

import importlib.util
import re
import sys
from inspect import getdoc, getmodule
from pathlib import Path

from fedsso.algorithms import ALGORITHMS
from fedsso.costs import costs

DOCS = Path(__file__).parent
PAGE = DOCS / "algorithms.md"
BEGIN, END = "<!-- table: python docs/build.py -->\n", "<!-- end -->\n"
HEAD = ("name", "what it does", "paper", "exchanges", "down", "up", "client keeps", "some clients absent")


def table() -> str:
    """One row for each algorithm of the registry; counts in numbers for a model of d parameters."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for row in costs("mlp").rows:
        cls = ALGORITHMS[row.algorithm]
        title = (getdoc(cls) or "").partition("\n")[0].rstrip(".")
        absent = f"no: use {cls.needs_all}" if cls.needs_all else "yes"
        counts = ["–"] * 4 if row.theory is None else [str(v) for v in (*row.theory[:3], row.theory.client)]
        rows.append((f"`{row.algorithm}`", title, paper(cls), *counts, absent))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def paper(cls: type) -> str:
    """The citation at the head of the algorithm's file; one that holds two papers begins a line with each."""
    head = (getdoc(getmodule(cls)) or "").partition("\n\n")[0]
    cited = [entry.partition(". ")[::2] for entry in re.split(r"\n(?=Fed\w+\. )", head)]
    own = next((text for names, text in cited if cls.__name__ in names), cited[0][1])
    return " ".join(own.split()).rstrip(".")


def page() -> str:
    """algorithms.md with a new table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def figures() -> None:
    """The picture of the fixed points, by the example that draws it."""
    spec = importlib.util.spec_from_file_location("fixed_points", DOCS.parent / "examples" / "fixed_points.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(DOCS)


if __name__ == "__main__":
    PAGE.write_text(page())
    if "--figures" in sys.argv:
        figures()
