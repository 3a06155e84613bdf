"""What Table 2 writes: a page for people, plain numbers, and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from ..experiment.grids import axes
from ..experiment.results import COUNTS, LAST, Results, Setting
from ..experiment.trace import Trace
from ..report import figures
from .lab import Lab
from .published import REMARKS, Published
from .published import TABLE2 as PUBLISHED
from .released import against_released
from .tasks import METHODS, Task
from .write import save_csv, save_picture, save_text, settings, spread, table

# cost more than all the rest
SLOW = "FedNL on the convex model and FedDANE on the CNN, each with one seed"


class Block(NamedTuple):
    """What was run of a task: grids by method, and by way of counting the chosen settings with all
    seeds."""

    task: Task
    clients: int
    grids: Mapping[str, Results]
    chosen: Mapping[str, Mapping[str, Setting]]
    published: Mapping[str, Setting]  # at the paper's own settings


def write(lab: Lab, blocks: Sequence[Block], slow: bool, name: str) -> None:
    """All files of the table."""
    out = lab.out
    save_text(
        out / f"{name}.md",
        _head(lab, slow),
        *(part for block in blocks for part in _section(lab, block)),
    )
    save_text(
        out / f"{name}-summary.md", *(part for count in COUNTS for part in _summary(blocks, count))
    )
    save_csv(out / f"{name}.csv", [row for block in blocks for row in _numbers(block)])
    trials = [
        {"block": b.task.name, **row}
        for b in blocks
        for method in b.grids
        for row in _trials(b, method)
    ]
    save_csv(out / f"{name}-trials.csv", trials)
    most = max(len(s.traces[0]) - 1 for b in blocks for s in b.chosen["first hit"].values())
    bars = [(b.task.title, _bars(b)) for b in blocks]
    what = "the paper's settings" if lab.quick else "the best setting of each algorithm"
    title = f"Rounds until the deciding accuracy is first reached: {what}"
    save_picture(out / name, lambda path: figures.rounds_bars(path, bars, title=title, most=most))
    for block in () if lab.quick else blocks:
        _draw_grids(block, lab, name)


def _head(lab: Lab, slow: bool) -> str:
    if lab.quick:
        return (
            "# Table 2, a quick look\n\nThe paper's published settings, one seed, 40 rounds; a "
            "dash means: not within "
            "them. Left out: FedNL, whose server solves a d × d system in every round."
        )
    aside = f"With one seed: {SLOW}." if slow else f"Left out: {SLOW} (`--slow` runs them)."
    return f"""# Table 2: rounds to test accuracy

τ = 5, batch 100, 200 rounds; mean ± standard deviation of seeds 0 to 4. FedSSO, FedAdaGrad and FedAdam have the
paper's 12 α × 7 η, FedAC 12 α × 4 μ, the others 12 α (η = 1). Settings are chosen on the whole grid with seeds
0 to 2: the fewest mean rounds to the deciding accuracy (bold), a seed that misses it counting as never, ties by
the accuracy at the end. The chosen setting may then miss with seed 3 or 4: “– (3/5)” means that only three of
five seeds get there. “At the end” is the mean of the last {LAST} rounds, a diverged seed counting as 0.
“Works”: settings of the grid that reach the deciding accuracy with each of the three seeds, and how many of
them never diverge afterwards. MB: of one client, both ways, to the deciding accuracy. Rounds are counted from
0, the initial model. The last round below: “–” where a run ends below, while the paper counts such a run to its
last rise. FedSSO is the paper's Algorithm 1 without the reset of B, which R = 200 would place into the last
round. A run whose loss is not finite, or a thousand times the first, has diverged. {aside}"""


def _section(lab: Lab, block: Block) -> list[str]:
    task = block.task
    parts = [f"## {task.title}", lab.about(task)]
    for count in COUNTS:
        parts += [
            f"Counted as {_count_name(count)}:",
            table(_rows(block, count)),
            _first(block, count),
        ]
    if task.name in PUBLISHED:
        seeds = max((len(s.seeds) for s in block.published.values()), default=0)
        parts += [
            f"At the paper's own settings, ours ({'one seed' if seeds == 1 else f'{seeds} seeds'}) "
            f"and the paper's:",
            table(_paper_rows(block)),
        ]
        parts += [
            REMARKS.get(task.name, ""),
            *([] if lab.quick else against_released(lab, task, block.grids)),
        ]
    return parts + ([] if lab.quick else [_edges(block)])


def _count_name(count: str) -> str:
    return {
        "first hit": "the first hit",
        "last below": "the last round below, which is the paper's way",
    }[count]


def _rows(block: Block, count: str) -> list[dict[str, str]]:
    task, rows = block.task, []
    for name, setting in block.chosen[count].items():
        hits = {_head_of(task, t): spread(setting.rounds(t, count)) for t in task.targets}
        sent = spread(_megabytes(block, setting, count), 2)
        lost = f" ({setting.diverged} diverged)" if setting.diverged else ""
        ends = {
            "at the end": f"{setting.final():.4f}{lost}",
            "works": _works(block.grids[name], task.deciding),
        }
        rows.append(
            {
                "algorithm": _name(block, count, name),
                "setting": settings(setting),
                **hits,
                "MB": sent,
                **ends,
            }
        )
    return rows


def _name(block: Block, count: str, name: str) -> str:
    """The title of a method, and whether it has fewer seeds than the rest."""
    few = len(block.chosen[count][name].seeds) < _seeds(block, count)
    return METHODS[name].title + " (1 seed)" * few


def _seeds(block: Block, count: str) -> int:
    return max(len(s.seeds) for s in block.chosen[count].values())


def _works(grid: Results, target: float) -> str:
    reach, last = grid.working(target), grid.lasting(target)
    return f"{reach} of {len(grid.settings())}" + (f", {last} for good" if last < reach else "")


def _edges(block: Block) -> str:
    """Which best settings lie at the end of an axis, where a longer one might do better."""
    told = []
    for name, setting in block.chosen["first hit"].items():
        tuned = axes(setting.algorithm) if METHODS[name].tuned else {}
        steps = {
            key: values for key, values in tuned.items() if key != "eta"
        }  # η = 1, the whole step, is no end
        if any(setting.spec.hyper[key] in (values[0], values[-1]) for key, values in steps.items()):
            told.append(METHODS[name].title)
    return (
        f"Best settings (first hit) at an end of the grid in α or μ: {', '.join(told)}."
        if told
        else ""
    )


def _head_of(task: Task, target: float) -> str:
    return f"**{target:.2f}**" if target == task.deciding else f"{target:.2f}"


def _megabytes(block: Block, setting: Setting, count: str) -> list[float | None]:
    """Of one client, both ways, seed by seed."""
    pairs = zip(setting.traces, setting.rounds(block.task.deciding, count), strict=True)
    return [
        None if hit is None else _sent(trace, max(hit, 0)) / block.clients / 1e6
        for trace, hit in pairs
    ]


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
    """Methods by mean rounds to the deciding accuracy; not those that miss it with a seed, or have
    fewer seeds."""
    whole = {n: s for n, s in block.chosen[count].items() if len(s.seeds) == _seeds(block, count)}
    means = {name: s.mean_rounds(block.task.deciding, count) for name, s in whole.items()}
    return sorted(
        ((name, m) for name, m in means.items() if m < math.inf), key=lambda pair: pair[1]
    )


def _first(block: Block, count: str) -> str:
    """Plain sentences on who gets there first, where FedSSO is, and whose setting misses with some
    seeds."""
    order, where = ranking(block, count), f"{block.task.deciding:.2f}"
    if not order:
        return f"Nobody reaches {where} with every seed."
    first = [f"{METHODS[name].title} ({rounds:.1f})" for name, rounds in order[:3]]
    said = [f"First to {where} with every seed: {', then '.join(first)}."]
    names = [name for name, _ in order]
    for own in ("fedsso", "fedsso-default"):
        if own in names[3:]:
            said.append(f"{METHODS[own].title} is number {names.index(own) + 1}.")
    return " ".join([*said, *_misses(block, count)])


def _misses(block: Block, count: str) -> list[str]:
    missed = []
    for name, setting in block.chosen[count].items():
        hits = [hit for hit in setting.rounds(block.task.deciding, count) if hit is not None]
        if 0 < len(hits) < len(setting.seeds):
            missed.append(f"{METHODS[name].title} ({len(hits)} of {len(setting.seeds)})")
    return (
        [f"The chosen setting gets there with some seeds only: {', '.join(missed)}."]
        if missed
        else []
    )


def _summary(blocks: Sequence[Block], count: str) -> list[str]:
    """All blocks in one table: rounds to the deciding accuracy, the fewest of a block in bold."""
    names = [name for name in METHODS if any(name in block.chosen[count] for block in blocks)]
    rows = []
    for block in blocks:
        order = ranking(block, count)
        best = [name for name, rounds in order if rounds == order[0][1]]
        cells = {METHODS[name].title: _cell(block, count, name, best) for name in names}
        rows.append({"block": f"{block.task.title}, {block.task.deciding:.2f}", **cells})
    return [f"Rounds to the deciding accuracy, counted as {_count_name(count)}:", table(rows)]


def _cell(block: Block, count: str, name: str, best: Sequence[str]) -> str:
    if name not in block.chosen[count]:
        return "not run"
    text = spread(block.chosen[count][name].rounds(block.task.deciding, count))
    return f"**{text}**" if name in best else text


# ---- plain numbers and pictures ----


def _numbers(block: Block) -> list[dict[str, Any]]:
    rows = []
    for count, chosen in block.chosen.items():
        for name, setting in chosen.items():
            for row in Results(setting.runs).rows(block.task.targets):
                rows.append({"block": block.task.name, "chosen by": count, "method": name, **row})
    return rows


def _trials(block: Block, name: str) -> list[dict[str, Any]]:
    """Every trial of a grid, the deciding target alone."""
    rows = block.grids[name].rows([block.task.deciding])
    return [
        {"method": name, **{k.replace(f" {block.task.deciding:g}", ""): v for k, v in r.items()}}
        for r in rows
    ]


def _bars(block: Block) -> list[figures.Bar]:
    bars: list[figures.Bar] = []
    for name, setting in block.chosen["first hit"].items():
        hits = setting.rounds(block.task.deciding)
        found = [hit for hit in hits if hit is not None]
        some = f" ({len(found)} of {len(hits)} seeds)" if 0 < len(found) < len(hits) else ""
        middle = mean(found) if len(found) == len(hits) else None
        wide = stdev(found) if middle is not None and len(found) > 1 else None
        bars.append((METHODS[name].title + some, METHODS[name].algorithm, middle, wide))
    return bars


def _draw_grids(block: Block, lab: Lab, name: str) -> None:
    task = block.task
    tuned = {METHODS[n].title: grid for n, grid in block.grids.items() if len(grid.settings()) > 1}
    maps = [
        heat._replace(title=title)
        for title, grid in tuned.items()
        for heat in grid.maps(task.deciding)
    ]
    title = f"{task.title}: rounds to {task.deciding:g} over the grid, mean of seeds 0 to {task.choosing - 1}"
    path = lab.out / f"{name}-grid-{task.name}"
    save_picture(path, lambda where: figures.heat_maps(where, maps, title=title, most=task.rounds))
