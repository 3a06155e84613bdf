"""Table 2: rounds and bytes to accuracies, every algorithm at its best setting, counted both ways.

A block is a task. Each method's whole grid is run with the first seeds, its best setting is chosen
(once for each way of counting) and then run with all seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..algorithm import Algorithm
from ..errors import one_of
from ..experiment.results import COUNTS, Results
from .lab import Lab
from .published import TABLE2 as PUBLISHED
from .table2_pages import Block, write
from .tasks import METHODS, SEEDS, TABLE2, Task

NAME = "table2"
QUICK = 40  # rounds of a quick look


def table2(lab: Lab, blocks: Sequence[str] = (), *, slow: bool = False) -> None:
    """Run the blocks (none named: all, or in a quick look the paper's) and write table, numbers and
    pictures; of some blocks under another name, beside the whole."""
    names = [one_of("block", name, TABLE2) for name in blocks] or list(
        PUBLISHED if lab.quick else TABLE2
    )
    done = []
    for number, name in enumerate(names, 1):
        lab.note(f"block {number} of {len(names)}: {TABLE2[name].title}")
        done.append(_untuned(lab, TABLE2[name]) if lab.quick else _tuned(lab, TABLE2[name], slow))
    write(lab, done, slow, NAME if not blocks else f"{NAME}-part")


def _at_published(task: Task) -> dict[str, Algorithm]:
    """The paper's own settings, FedNL's aside."""
    points: dict[str, Algorithm] = {}
    for row in PUBLISHED[task.name].rows if task.name in PUBLISHED else ():
        if row.algorithm != "fednl":
            eta = {} if row.eta is None else {"eta": row.eta}
            points[row.algorithm] = METHODS[row.algorithm].at(alpha=row.alpha, **eta)
    return points


def _untuned(lab: Lab, task: Task) -> Block:
    """The paper's own settings and our default, nothing chosen."""
    points = _at_published(task) | {"fedsso-default": METHODS["fedsso-default"].at()}
    alone = (
        replace(lab, jobs=1) if task.convex else lab
    )  # other processes take longer to start than they save
    found = alone.study(task, list(points.values()), lab.seeds, rounds=QUICK)
    chosen = dict(zip(points, found.settings(), strict=True))
    published = {name: setting for name, setting in chosen.items() if name != "fedsso-default"}
    grids = {name: Results(s.runs) for name, s in chosen.items()}
    return Block(
        task, lab.federation(task).clients, grids, dict.fromkeys(COUNTS, chosen), published
    )


def _tuned(lab: Lab, task: Task, slow: bool) -> Block:
    """Every method's whole grid; the slow ones have one seed."""
    dear = _dear(task)
    grids = lab.grids(task, [name for name in METHODS if name not in ("fednl", dear)])
    chosen = {}
    for count in COUNTS:
        chosen[count] = lab.again(
            task, {name: grid.best(task.deciding, count=count) for name, grid in grids.items()}
        )
    if slow:
        grids[dear] = lab.study(task, METHODS[dear].records(), SEEDS[:1])
        for count in COUNTS:
            chosen[count][dear] = grids[dear].best(task.deciding, count=count)
    points = _at_published(task)
    seeds = (
        lab.seeds if task.convex else lab.seeds[: task.choosing]
    )  # the slower model has those of the grid
    published = {}
    if points:
        found = lab.study(task, list(points.values()), seeds)
        published = dict(zip(points, found.settings(), strict=True))
    return Block(task, lab.federation(task).clients, grids, chosen, published)


def _dear(task: Task) -> str:
    """The method that costs more than all others: d x d matrices, or two passes over all rows in
    every round."""
    return "fednl" if task.convex else "feddane"
