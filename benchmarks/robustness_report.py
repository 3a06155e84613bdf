"""What the robustness bench has found, as plain numbers, tables and a picture.

    python -m benchmarks.robustness_report --out build/robustness

reads the files of the bench, adds them to docs/robustness.json, where a newer number replaces an
older one, and draws docs/robustness.png and docs/robustness-curves.png. The tables of
docs/robustness.md are made from these numbers by `python docs/build.py`.

A cell counts when FedSSO and some rivals are there. Of every rival the best point of its grid
counts, for rounds and for the end each by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsso.paper.write import table as markdown
from fedsso.support.files import write_atomic
from fedsso.support.intake import read_text

from . import robustness
from .robustness_figures import CURVES_OF, NAMES, OURS, curves, summary
from .robustness_score import ACCURACY, DECIMALS, Goal, Score

DOCS = Path(__file__).parents[1] / "docs"
WITH_CURVES = "25% of the clients"
CLOSE = 0.01  # relative: an end so far behind the best rival's is told apart from one further back
TASKS = {"finding": "development", "judging": "held-out"}
"""What the two halves of the tasks are called on the page."""


# ---- the numbers ----


def measured(out: Path) -> list[Score]:
    """The cells of a folder of the bench, in the bench's order."""
    found = []
    for cell in robustness.cells():
        methods = {}
        for name in robustness.METHODS:
            file = out / cell.folder / f"{name}.json"
            if file.is_file():
                methods[name] = json.loads(read_text(file))
        if methods:
            found.append(described(cell, methods))
    return found


def described(cell: robustness.Cell, methods: Mapping[str, Score]) -> Score:
    """A cell with its methods; curves are kept where they are drawn."""
    goal = robustness.TASKS[cell.task].goal
    half = next(name for name, tasks in robustness.HALVES.items() if cell.task in tasks)
    kept = {}
    for name, own in methods.items():
        drawn = cell.change == WITH_CURVES and cell.task in CURVES_OF
        kept[name] = {key: value for key, value in own.items() if drawn or key != "curve"}
    return {
        "task": cell.task,
        "half": half,
        "change": cell.change,
        "metric": goal.metric,
        "target": goal.target,
        "rounds": robustness.TASKS[cell.task].rounds,
        "methods": kept,
    }


def merged(old: Iterable[Score], new: Iterable[Score]) -> list[Score]:
    """Old cells with the numbers of new ones added, in the order of the bench."""
    cells: dict[tuple[str, str], Score] = {}
    for one in (*old, *new):
        key = one["task"], one["change"]
        before = cells.get(key, one)
        methods = before["methods"] | one["methods"]
        in_order = {name: methods[name] for name in robustness.METHODS if name in methods}
        cells[key] = one | {"methods": in_order}
    return [cells[c.task, c.change] for c in robustness.cells() if (c.task, c.change) in cells]


def judged(found: Iterable[Score]) -> list[Score]:
    """The cells that have FedSSO and rivals."""
    return [one for one in found if OURS in one["methods"] and len(one["methods"]) > 1]


# ---- who leads ----


def rank(one: Score, what: str, value: float | None) -> float:
    """A number that is less where a method is better; infinite where there is none."""
    if value is None:
        return float("inf")
    goal = Goal(one["metric"], one["target"])
    return float(goal.rank(value) if what == "final" else value)


def best_rival(one: Score, what: str) -> tuple[str, float | None]:
    """The rival with the best value, and the value; None if no rival has one."""
    values = {name: own[what]["mean"] for name, own in one["methods"].items() if name != OURS}
    name = min(values, key=lambda rival: rank(one, what, values[rival]))
    return name, values[name]


def leads(one: Score, what: str) -> bool:
    """Whether no rival is better; never to reach the target is no lead."""
    own = one["methods"][OURS][what]["mean"]
    return own is not None and rank(one, what, own) <= rank(one, what, best_rival(one, what)[1])


def behind(one: Score) -> float:
    """How far the end is behind the best rival's, relative to it; negative where it is ahead.

    A loss that is 0 to all digits that are kept counts as one of the last digit.
    """
    own, best = one["methods"][OURS]["final"]["mean"], best_rival(one, "final")[1]
    if own is None:
        return float("inf")
    if best is None:
        return float("-inf")
    last_digit = 10.0 ** -DECIMALS["final"]
    return (rank(one, "final", own) - rank(one, "final", best)) / max(abs(best), last_digit)


# ---- the tables ----


def shares(found: Iterable[Score]) -> str:
    """In how many cells FedSSO leads, by half, model and what is changed, as Markdown."""
    groups: dict[str, list[Score]] = {}
    for one in judged(found):
        groups.setdefault(f"{TASKS[one['half']]} tasks", []).append(one)
    for one in judged(found):
        if one["task"] in robustness.NEWEST:
            groups.setdefault("of these, the newest tables", []).append(one)
    for one in judged(found):
        groups.setdefault(_layers(one), []).append(one)
    for one in judged(found):
        groups.setdefault(_change(one), []).append(one)
    rows = []
    for name, cells in groups.items():
        n = len(cells)
        rows.append(
            {
                "cells": name,
                "final result as good as the best rival's": _of(
                    sum(leads(c, "final") for c in cells), n
                ),
                "at most 1 % behind": _of(sum(behind(c) <= CLOSE for c in cells), n),
                "no more rounds than the best rival": _of(
                    sum(leads(c, "rounds") for c in cells), n
                ),
            }
        )
    return markdown(rows)


def duels(found: Iterable[Score]) -> str:
    """Against each rival alone: cells in which FedSSO is at least as good, as Markdown."""
    cells = judged(found)
    rows = []
    for name in robustness.METHODS:
        met = [one for one in cells if name in one["methods"]]
        if name == OURS or not met:
            continue
        row = {"rival, tuned in each cell": NAMES.get(name, name)}
        for what, title in (("final", "final result as good"), ("rounds", "no more rounds")):
            won = sum(
                rank(one, what, one["methods"][OURS][what]["mean"])
                <= rank(one, what, one["methods"][name][what]["mean"])
                for one in met
            )
            row[title] = _of(won, len(met))
        rows.append(row)
    return markdown(rows)


def table(found: Iterable[Score], half: str) -> str:
    """Every cell of a half: FedSSO beside the best rival, as Markdown."""
    return markdown([_row(one) for one in judged(found) if one["half"] == half])


def _row(one: Score) -> dict[str, str]:
    what = "accuracy" if one["metric"] == ACCURACY else "loss"
    row = {
        "task": f"`{one['task']}`",
        "change": _change(one),
        "target": f"{what} {one['target']:g}",
    }
    for key, title in (("rounds", "rounds"), ("final", "end")):
        own = _number(one["methods"][OURS][key]["mean"], key)
        row[f"FedSSO, {title}"] = f"**{own}**" if leads(one, key) else own
        name, value = best_rival(one, key)
        rival = _number(value, key)
        row[f"best rival, {title}"] = rival if value is None else f"{rival} {NAMES.get(name, name)}"
    row["rivals"] = str(len(one["methods"]) - 1)
    return row


def _layers(one: Score) -> str:
    linear = robustness.TASKS[one["task"]].model == "mclr"
    return "models of one layer" if linear else "networks"


def _change(one: Score) -> str:
    return "all clients" if one["change"] == "base" else str(one["change"])


def _of(count: int, n: int) -> str:
    return f"{count} of {n}"


def _number(value: float | None, what: str) -> str:
    return "–" if value is None else f"{value:.{DECIMALS[what]}f}"


# ---- the files ----


def write(folder: Path, found: Sequence[Score]) -> None:
    """The numbers, a line for each cell, and the pictures."""
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
    write_atomic(folder / "robustness.json", f"[\n{lines}\n]\n")
    cells = judged(found)
    if cells:
        summary(folder / "robustness.png", _differences(cells))
    with_curves = [one for one in cells if "curve" in one["methods"][OURS]]
    if with_curves:
        curves(folder / "robustness-curves.png", with_curves)


def _differences(cells: Sequence[Score]) -> list[dict[str, Any]]:
    """What the first picture shows of each cell: the end in per cent ahead, the ratio of rounds."""
    rows = []
    for one in cells:
        own, best = one["methods"][OURS]["rounds"]["mean"], best_rival(one, "rounds")[1]
        ratio = own / best if own and best else None
        head = {key: one[key] for key in ("task", "half", "change")}
        rows.append({**head, "ahead": -100 * behind(one), "ratio": ratio, "reached": own})
    return rows


def main() -> None:
    """Add what there is to docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robustness_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/robustness"), help="folder of the bench's files"
    )
    new = measured(parser.parse_args().out)
    if not new:
        sys.exit("nothing is measured yet: run python -m benchmarks.robustness first")
    kept = DOCS / "robustness.json"
    old = json.loads(read_text(kept)) if kept.is_file() else []
    write(DOCS, merged(old, new))


if __name__ == "__main__":
    main()
