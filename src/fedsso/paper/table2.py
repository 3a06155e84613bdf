"""Table 2: rounds and bytes to accuracies, every algorithm at its best setting, counted both ways.

A block is a task. Each method's whole grid is run with the first seeds, its best setting is chosen (once for each way
of counting) and then run with all seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import figures
from ..algorithm import Algorithm
from ..errors import one_of
from ..study import COUNTS, Setting, Study
from ..trace import Trace
from .lab import Lab
from .published import TABLE2 as PUBLISHED
from .published import Published
from .released import against_released
from .tasks import METHODS, SEEDS, TABLE2, Task
from .write import save_csv, save_picture, save_text, settings, spread, table

NAME = "table2"
SLOW = "FedNL on the convex model and FedDANE on the CNN, each with one seed"  # cost more than all the rest


class Block(NamedTuple):
    """What was run of a task: grids by method, and by way of counting the chosen settings with all seeds."""

    task: Task
    clients: int
    grids: Mapping[str, Study]
    chosen: Mapping[str, Mapping[str, Setting]]
    published: Mapping[str, Setting]  # at the paper's own settings


def table2(lab: Lab, blocks: Sequence[str] = (), *, slow: bool = False) -> None:
    """Run the blocks (none named: all, or in a quick look the paper's) and write table, numbers and pictures."""
    names = [one_of("block", name, TABLE2) for name in blocks] or list(PUBLISHED if lab.quick else TABLE2)
    done = []
    for number, name in enumerate(names, 1):
        lab.note(f"block {number} of {len(names)}: {TABLE2[name].title}")
        done.append(_untuned(lab, TABLE2[name]) if lab.quick else _tuned(lab, TABLE2[name], slow))
    _write(lab, done, slow)


def _at_published(lab: Lab, task: Task) -> dict[str, Setting]:
    """The paper's own settings, FedNL's aside, with all seeds."""
    points: dict[str, Algorithm] = {}
    for row in PUBLISHED[task.name].rows if task.name in PUBLISHED else ():
        if row.algorithm != "fednl":
            eta = {} if row.eta is None else {"eta": row.eta}
            points[row.algorithm] = METHODS[row.algorithm].at(alpha=row.alpha, **eta)
    return dict(zip(points, lab.study(task, list(points.values()), lab.seeds), strict=True)) if points else {}


def _untuned(lab: Lab, task: Task) -> Block:
    """The paper's own settings and our default, nothing chosen."""
    published = _at_published(lab, task)
    chosen = published | {"fedsso-default": lab.study(task, METHODS["fedsso-default"].records(), lab.seeds)[0]}
    grids = {name: Study([s]) for name, s in chosen.items()}
    return Block(task, lab.federation(task).clients, grids, dict.fromkeys(COUNTS, chosen), published)


def _tuned(lab: Lab, task: Task, slow: bool) -> Block:
    """Every method's whole grid; the slow ones have one seed."""
    dear = _dear(task)
    grids = lab.grids(task, [name for name in METHODS if name not in ("fednl", dear)])
    chosen = {}
    for count in COUNTS:
        chosen[count] = lab.again(task, {name: grid.best(task.deciding, count) for name, grid in grids.items()})
    if slow:
        grids[dear] = lab.study(task, METHODS[dear].records(thin=lab.quick), SEEDS[:1])
        for count in COUNTS:
            chosen[count][dear] = grids[dear].best(task.deciding, count)
    return Block(task, lab.federation(task).clients, grids, chosen, _at_published(lab, task))


def _dear(task: Task) -> str:
    """The method that costs more than all others: d x d matrices, or two passes over all rows in every round."""
    return "fednl" if task.convex else "feddane"


# ---- what is written ----


def _write(lab: Lab, blocks: Sequence[Block], slow: bool) -> None:
    out = lab.out
    save_text(out / f"{NAME}.md", _head(lab, slow), *(part for block in blocks for part in _section(lab, block)))
    save_csv(out / f"{NAME}.csv", [row for block in blocks for row in _numbers(block)])
    trials = [{"block": b.task.name, **row} for b in blocks for name in b.grids for row in _trials(b, name)]
    save_csv(out / f"{NAME}-trials.csv", trials)
    most = max(len(s.traces[0]) - 1 for b in blocks for s in b.chosen["first hit"].values())
    bars = [(b.task.title, _bars(b)) for b in blocks]
    title = "Rounds until the deciding accuracy is first reached, best setting of each algorithm"
    save_picture(out / NAME, lambda path: figures.rounds_bars(path, bars, title=title, most=most))
    if not lab.quick:
        for block in blocks:
            _draw_grids(lab, block)


def _head(lab: Lab, slow: bool) -> str:
    if lab.quick:
        return (
            "# Table 2, a quick look\n\nThe paper's published settings, one seed, 40 rounds; a dash means: not within "
            "them. Left out: FedNL, whose server solves a d × d system in every round."
        )
    aside = f"With one seed: {SLOW}." if slow else f"Left out: {SLOW} (`--slow` runs them)."
    return (
        "# Table 2: rounds to test accuracy\n\n"
        "τ = 5, batch 100, 200 rounds; mean ± standard deviation of seeds 0 to 4. Settings are chosen on the whole "
        "grid with seeds 0 to 2: the fewest mean rounds to the deciding accuracy (bold), a seed that misses it "
        "counting as never, ties by the accuracy at the end. Rounds are counted from 0, the initial model. "
        "“– (3/5)”: only three of five seeds get there. “works”: settings of the grid that reach the deciding accuracy "
        "with every seed. MB: of one client, both ways, to the deciding accuracy. "
        f"{aside}"
    )


def _section(lab: Lab, block: Block) -> list[str]:
    task = block.task
    parts = [f"## {task.title}"]
    for count in COUNTS:
        parts += [f"Counted as {_count_name(count)}:", table(_rows(block, count)), _first(block, count)]
    if task.name in PUBLISHED:
        parts += ["At the paper's own settings, ours and the paper's numbers:", table(_paper_rows(block))]
        parts += [] if lab.quick else against_released(lab, task, block.grids)
    return parts


def _count_name(count: str) -> str:
    return {"first hit": "the first hit", "last below": "the last round below, which is the paper's way"}[count]


def _rows(block: Block, count: str) -> list[dict[str, str]]:
    task, rows = block.task, []
    for name, setting in block.chosen[count].items():
        hits = {_head_of(task, t): spread(setting.rounds(t, count)) for t in task.targets}
        works = f"{block.grids[name].working(task.deciding)} of {len(block.grids[name])}"
        rows.append(
            {
                "algorithm": METHODS[name].title,
                "setting": settings(setting),
                **hits,
                "MB": spread(_megabytes(block, setting, count), 2),
                "at the end": f"{setting.final():.4f}",
                "works": works,
            }
        )
    return rows


def _head_of(task: Task, target: float) -> str:
    return f"**{target:.2f}**" if target == task.deciding else f"{target:.2f}"


def _megabytes(block: Block, setting: Setting, count: str) -> list[float | None]:
    """Of one client, both ways, seed by seed."""
    pairs = zip(setting.traces, setting.rounds(block.task.deciding, count), strict=True)
    return [None if hit is None else _sent(trace, max(hit, 0)) / block.clients / 1e6 for trace, hit in pairs]


def _sent(trace: Trace, hit: int) -> int:
    spent = trace["round"] <= hit
    return int(trace["bytes_up"][spent].sum() + trace["bytes_down"][spent].sum())


def _paper_rows(block: Block) -> list[dict[str, str]]:
    """For each row of the paper: ours counted both ways, and the paper's."""
    rows = []
    for row in PUBLISHED[block.task.name].rows:
        ours = block.published.get(row.algorithm)
        if ours is not None:
            rows += [_our_row(block, METHODS[row.algorithm].title, ours, count) for count in COUNTS]
        rows.append(_their_row(block.task, row))
    return rows


def _our_row(block: Block, title: str, ours: Setting, count: str) -> dict[str, str]:
    hits = {_head_of(block.task, t): spread(ours.rounds(t, count)) for t in block.task.targets}
    sent = spread(_megabytes(block, ours, count), 2)
    return {"algorithm": f"{title}, {count}", "setting": settings(ours), **hits, "MB": sent}


def _their_row(task: Task, row: Published) -> dict[str, str]:
    pairs = zip(task.targets, row.rounds, strict=True)
    hits = {_head_of(task, t): "–" if hit is None else str(hit) for t, hit in pairs}
    eta = "" if row.eta is None else f" η={row.eta:g}"
    sent = "–" if row.bytes is None else f"{row.bytes / 1e6:.2f}"
    title = f"{METHODS[row.algorithm].title}, the paper (last below)"
    return {"algorithm": title, "setting": f"α={row.alpha:g}{eta}", **hits, "MB": sent}


# ---- who is first ----


def ranking(block: Block, count: str) -> list[tuple[str, float]]:
    """Methods by mean rounds to the deciding accuracy, those that do not get there with every seed left out."""
    means = {name: s.mean_rounds(block.task.deciding, count) for name, s in block.chosen[count].items()}
    return sorted(((name, m) for name, m in means.items() if m < math.inf), key=lambda pair: pair[1])


def _first(block: Block, count: str) -> str:
    """One plain sentence on who gets there first, and where FedSSO is."""
    order = ranking(block, count)
    where = f"{block.task.deciding:.2f}"
    if not order:
        return f"Nobody reaches {where} with every seed."
    (name, rounds), *rest = order
    said = f"First to {where} with every seed: {METHODS[name].title} ({rounds:.1f})"
    said += "".join(f", then {METHODS[n].title} ({r:.1f})" for n, r in rest[:2]) + "."
    names = [n for n, _ in order]
    for own in ("fedsso", "fedsso-default"):
        if own in block.chosen[count] and own not in names[:3]:
            place = f"is number {names.index(own) + 1}" if own in names else "does not get there with every seed"
            said += f" {METHODS[own].title} {place}."
    return said


# ---- plain numbers and pictures ----


def _numbers(block: Block) -> list[dict[str, Any]]:
    rows = []
    for count, chosen in block.chosen.items():
        for name, setting in chosen.items():
            for row in Study([setting]).rows(block.task.targets):
                rows.append({"block": block.task.name, "chosen by": count, "method": name, **row})
    return rows


def _trials(block: Block, name: str) -> list[dict[str, Any]]:
    """Every trial of a grid, the deciding target alone."""
    rows = block.grids[name].rows([block.task.deciding])
    return [{"method": name, **{k.replace(f" {block.task.deciding:g}", ""): v for k, v in r.items()}} for r in rows]


def _bars(block: Block) -> list[figures.Bar]:
    bars: list[figures.Bar] = []
    for name, setting in block.chosen["first hit"].items():
        hits = setting.rounds(block.task.deciding)
        found = [h for h in hits if h is not None]
        reached = len(found) == len(hits)
        middle = sum(found) / len(found) if reached else None
        wide = None if middle is None or len(found) < 2 else _deviation(found, middle)
        bars.append((METHODS[name].title, METHODS[name].algorithm, middle, wide))
    return bars


def _deviation(values: Sequence[int], middle: float) -> float:
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def _draw_grids(lab: Lab, block: Block) -> None:
    task = block.task
    tuned = {name: grid for name, grid in block.grids.items() if len(grid) > 1}
    maps = [grid.maps(task.deciding)[0]._replace(title=METHODS[name].title) for name, grid in tuned.items()]
    title = f"{task.title}: mean rounds to {task.deciding:g} over the grid"
    path = lab.out / f"{NAME}-grid-{task.name}"
    save_picture(path, lambda where: figures.heat_maps(where, maps, title=title, most=task.rounds))
