"""Writes what the documentation takes from the code: the tables of algorithms.md and datasets.md, the latter with the
results of smoke.py, those of robustness.md from the numbers of its bench, and those of results/README.md; with
`--figures` also the pictures.

python docs/build.py [--figures]
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import getdoc, getmodule
from pathlib import Path
from typing import Any

from fedsso.algorithms import ALGORITHMS
from fedsso.costs import costs
from fedsso.data import TABLES, datasets, load
from fedsso.data.show import picture

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
END = "<!-- end -->\n"
HEAD = ("name", "what it does", "paper", "exchanges", "down", "up", "client keeps", "some clients absent")
SETS = ("name", "what it is", "rows", "classes", "default partition, clients", "licence")
SMOKE = ("data set", "model", "d", "FedAvg", "its α", "FedSSO", "its α")


def algorithms() -> str:
    """One row for each algorithm of the registry; counts in numbers for a model of d parameters."""
    rows = []
    for row in costs("mlp").rows:
        cls = ALGORITHMS[row.algorithm]
        title = (getdoc(cls) or "").partition("\n")[0].rstrip(".")
        absent = f"no: use {cls.needs_all}" if cls.needs_all else "yes"
        counts = ["–"] * 4 if row.theory is None else [str(v) for v in (*row.theory[:3], row.theory.client)]
        rows.append((f"`{row.algorithm}`", title, paper(cls), *counts, absent))
    return markdown(HEAD, rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def sets() -> str:
    """One row for each data set of the catalogue, of all its forms the first."""
    rows = []
    for d in datasets():
        count = d.forms[0].rows if d.forms else 0
        clients = len(TABLES.get(d.partition, ())) or ("all" if d.partition == "group" else d.clients)
        how = f"{d.partition}, {clients}" if d.partition else f"its own, {d.clients}"
        rows.append((f"`{d.name}`", d.title, number(count), number(d.classes), how, d.licence or "–"))
    return markdown(SETS, rows)


def number(count: int) -> str:
    return f"{count:,}".replace(",", " ") if count else "–"


def smoke() -> str:
    """The results of smoke.py: mean accuracy and its range, or the training loss where targets are real."""
    found = json.loads((DOCS / "smoke.json").read_text())
    rows = []
    for d in (d for d in datasets() if not d.yours):
        lines = {model: found[f"{d.name} {model}"] for model in d.models if f"{d.name} {model}" in found}
        if not lines:
            rows.append((f"`{d.name}`", "", "", "not measured: no files", "", "", ""))
        for model, line in lines.items():
            cells = [cell for name in ("FedAvg", "FedSSO") for cell in (ending(line[name]), alpha(line[name]))]
            rows.append((f"`{d.name}`", f"`{model}`", number(line["d"]), *cells))
    return markdown(SMOKE, rows)


def ending(result: dict[str, Any]) -> str:
    """Mean over the seeds, with the least and the largest."""
    values = result["accuracy"]
    if None in values:
        return f"loss {result['train_loss']:.4f}"
    return f"{sum(values) / len(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def alpha(result: dict[str, Any]) -> str:
    return str(result["setting"].partition("alpha=")[2].partition(" ")[0])


def paper(cls: type) -> str:
    """The citation at the head of the algorithm's file; one that holds two papers begins a line with each."""
    head = (getdoc(getmodule(cls)) or "").partition("\n\n")[0]
    cited = [entry.partition(". ")[::2] for entry in re.split(r"\n(?=Fed\w+\. )", head)]
    own = next((text for names, text in cited if cls.__name__ in names), cited[0][1])
    return " ".join(own.split()).rstrip(".")


def summary() -> str:
    """Table 2 in short, as `fedsso paper table2` wrote it."""
    return (RESULTS / "table2-summary.md").read_text()


def robustness(*, participation: bool) -> str:
    """A table of the robustness bench, from robustness.json: the cells that differ in participation, or all others."""
    sys.path.insert(0, str(DOCS.parent))  # the benchmarks are not installed
    from benchmarks.robustness_report import table

    return table(json.loads((DOCS / "robustness.json").read_text()), participation=participation)


TABLES_OF: dict[str, dict[str, Callable[[], str]]] = {
    "algorithms.md": {"table": algorithms},
    "datasets.md": {"sets": sets, "smoke": smoke},
    "robustness.md": {
        "participation": partial(robustness, participation=True),
        "changes": partial(robustness, participation=False),
    },
    "../results/README.md": {"table2-summary": summary},
}


def page(name: str) -> str:
    """A page with new tables."""
    text = (DOCS / name).read_text()
    for mark, table in TABLES_OF[name].items():
        begin = f"<!-- {mark}: python docs/build.py -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table()}{END}{rest.partition(END)[2]}"
    return text


def figures() -> None:
    """The picture of the fixed points, by the example that draws it, and that of MNIST, if it is there."""
    if any(d.present() for d in datasets() if d.name == "mnist"):
        picture(load("mnist"), DOCS / "mnist-paper-20.png")
    spec = importlib.util.spec_from_file_location("fixed_points", DOCS.parent / "examples" / "fixed_points.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(DOCS)


if __name__ == "__main__":
    for name in TABLES_OF:
        (DOCS / name).write_text(page(name))
    if "--figures" in sys.argv:
        figures()
