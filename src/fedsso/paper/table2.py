"""Table 2: rounds and bytes to accuracies, every algorithm at its best setting.

A block of the table is a task. Each method's whole grid is run with the first seeds; its best
setting is chosen, once for each way of counting rounds, and then run with all seeds. This module
runs the experiments, `table2_pages` writes what came out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import one_of
from ..experiment.results import COUNTS, Results
from .published import TABLE2 as PUBLISHED
from .table2_pages import Block, write
from .tasks import METHODS, SEEDS, TABLE2, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..algorithm import Algorithm
    from ..experiment.results import Setting
    from .lab import Lab

NAME = "table2"
"""The name of the files."""
QUICK = 40
"""The rounds of a quick look. By the paper's count, FedSSO needs 20 to 67 in its four blocks."""
OURS = "fedsso-default"
"""The method that is not in the paper: FedSSO with our defaults."""


def table2(
    lab: Lab,
    blocks: Sequence[str] = (),
    *,
    slow: bool = False,
) -> None:
    """Run blocks of the table and write the page, the numbers and the pictures.

    Args:
        lab: Where to write, and how thoroughly to run.
        blocks: Keys of `tasks.TABLE2`. Without names all blocks are run, in a quick look those of
            the paper. Some blocks alone are written under another name, beside the whole table.
        slow: Add the methods that cost more than all others. A quick look never has them.

    Raises:
        InputError: There is no block of a name.
        OutOfTime: The lab's deadline has passed. Nothing is written, but all finished runs are
            kept, and the same call goes on with them.
    """
    names = [one_of("block", name, TABLE2) for name in blocks]
    if not names:
        names = list(PUBLISHED if lab.quick else TABLE2)
    done = []
    for number, name in enumerate(names, 1):
        task = TABLE2[name]
        lab.note(f"block {number} of {len(names)}: {task.title}")
        if lab.quick:
            done.append(_untuned(lab, task))
        else:
            done.append(_tuned(lab, task, slow))
    write(lab, done, slow, page(blocks))


def page(blocks: Sequence[str]) -> str:
    """The name of the files: some blocks alone lie beside the whole table."""
    return f"{NAME}-part" if blocks else NAME


def _at_published(task: Task) -> dict[str, Algorithm]:
    """The paper's own settings of a task, by method; none for a task that the paper does not have.

    FedNL is left out: it is slow, and ours has no client step that the paper's α could set.
    """
    points: dict[str, Algorithm] = {}
    if task.name not in PUBLISHED:
        return points
    for row in PUBLISHED[task.name].rows:
        if row.algorithm == "fednl":
            continue
        steps = {"alpha": row.alpha}
        if row.eta is not None:
            steps["eta"] = row.eta
        method = METHODS[row.algorithm]
        points[method.name] = method.at(**steps)
    return points


def _untuned(lab: Lab, task: Task) -> Block:
    """A quick look at a block: the paper's own settings and our default.

    Nothing is chosen, so each method's grid is its one setting, and both ways of counting have the
    same settings.
    """
    points = _at_published(task)
    points[OURS] = METHODS[OURS].at()
    if task.convex:  # other processes would take longer to start than they save
        lab = replace(lab, jobs=1)
    found = lab.study(
        task,
        list(points.values()),
        lab.seeds,
        rounds=QUICK,
    )
    chosen = dict(zip(points, found.settings(), strict=True))
    grids = {}
    for name, setting in chosen.items():
        grids[name] = Results(setting.runs)
    published = dict(chosen)
    del published[OURS]
    clients = lab.federation(task).clients
    return Block(task, clients, grids, dict.fromkeys(COUNTS, chosen), published)


def _tuned(
    lab: Lab,
    task: Task,
    slow: bool,
) -> Block:
    """A whole block: every method's grid, and its best setting for each way of counting.

    The slow method is run on demand alone, and with one seed. The seed that chose its setting is
    then the only one, so its row is more favourable than the others. The page marks it with
    "(1 seed)".

    Args:
        lab: Runs the grids.
        task: The block.
        slow: Whether to run the slow method.
    """
    dear = _dear(task)
    # FedNL is run on the convex model alone, where it is the slow method.
    names = [name for name in METHODS if name not in ("fednl", dear)]
    grids = lab.grids(task, names)
    chosen = {}
    for count in COUNTS:
        best = {}
        for name, grid in grids.items():
            best[name] = grid.best(task.deciding, count=count)
        chosen[count] = lab.again(task, best)
    if slow:
        records = METHODS[dear].records()
        whole = lab.study(task, records, SEEDS[:1])
        grids[dear] = whole
        for count in COUNTS:
            chosen[count][dear] = whole.best(task.deciding, count=count)
    clients = lab.federation(task).clients
    return Block(task, clients, grids, chosen, _published(lab, task))


def _published(lab: Lab, task: Task) -> dict[str, Setting]:
    """The paper's own settings of a task, run by us, by method.

    They show whether our numbers agree with the paper's where nothing was chosen. The slower model
    has the seeds of the grid alone.
    """
    points = _at_published(task)
    if not points:
        return {}
    seeds = lab.seeds
    if not task.convex:
        seeds = seeds[: task.choosing]
    found = lab.study(task, list(points.values()), seeds)
    return dict(zip(points, found.settings(), strict=True))


def _dear(task: Task) -> str:
    """The method that costs more than all others together.

    FedNL has d x d matrices, FedDANE passes over all rows twice in every round.
    """
    return "fednl" if task.convex else "feddane"
