"""What Table 2 writes: a page for people, plain numbers, and pictures.

Everything here is made from `Block`s, which hold the runs of one task each. Rounds are counted in
two ways, `COUNTS`: to the first round that reaches an accuracy, and to the last round below it,
which is the paper's way.
"""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from ..experiment.grids import axes
from ..experiment.results import COUNTS, LAST, Results
from ..report import figures
from .published import REMARKS, Published
from .published import TABLE2 as PUBLISHED
from .released import against_released
from .tasks import METHODS, Task
from .write import save_csv, save_picture, save_text, settings, spread, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..experiment.results import Setting
    from ..experiment.trace import Trace
    from .lab import Lab

FIRST_HIT = "first hit"
"""The way of counting that pictures and remarks use, a key of `COUNTS`."""
COUNT_NAMES = {FIRST_HIT: "first reached", "last below": "last time below"}
"""What the page calls the ways of counting. Its head explains both."""
# What --slow adds. These methods cost more than all the rest.
SLOW = "FedNL on the convex model and FedDANE on the CNN, each with one seed"
# How the table was made, at the top of the page: for a quick look, and for the whole table.
QUICK_HEAD = (
    "# Table 2, a quick look\n\n"
    "The paper's published settings, one seed, 40 rounds; a dash means: not within them. "
    "Left out: FedNL, whose server solves a d × d system in every round."
)
HEAD = (
    "# Table 2: rounds to test accuracy\n\n"
    "τ = 5, batch 100, 200 rounds; mean ± standard deviation of seeds 0 to 4. "
    "FedSSO, FedAdaGrad and FedAdam have the\npaper's 12 α × 7 η, FedAC 12 α × 4 μ, "
    "the others 12 α (η = 1). "
    "Settings are chosen on the whole grid with seeds\n0 to 2: "
    "the fewest mean rounds to the deciding accuracy (bold), "
    "a seed that misses it counting as never, ties by\nthe accuracy at the end. "
    "The chosen setting may then miss with seed 3 or 4: "
    "“– (3/5)” means that only three of\nfive seeds get there. "
    f"“At the end” is the mean of the last {LAST} rounds, a diverged seed counting as 0.\n"
    "“Works”: settings of the grid that reach the deciding accuracy with each of the three seeds, "
    "and how many of\nthem never diverge afterwards. "
    "MB: of one client, both ways, to the deciding accuracy. "
    "Rounds are counted from\n0, the initial model. "
    "“First reached” is the first round at or above an accuracy,\n"
    "“last time below”, as in the paper, the last round below it: “–” where a run ends below, "
    "while the paper\ncounts such a run to its last rise. "
    "FedSSO is the paper's Algorithm 1 without the reset of B, "
    "which R = 200 would place into the last\nround. "
    "A run whose loss is not finite, or a thousand times the first, has diverged."
)

Row = dict[str, str]
"""A row of a Markdown table: its cells by the heads of their columns."""


class Block(NamedTuple):
    """What was run of a task."""

    task: Task
    """The task, which is a quarter of the paper's table or one of ours beside it."""
    clients: int
    """The number of clients, by which the bytes of the federation are divided."""
    grids: Mapping[str, Results]
    """The runs of each method's grid, by method."""
    chosen: Mapping[str, Mapping[str, Setting]]
    """The best settings with all seeds, by way of counting, then by method."""
    published: Mapping[str, Setting]
    """Our runs at the paper's own settings, by algorithm. Empty for a task of ours."""


def write(
    lab: Lab,
    blocks: Sequence[Block],
    slow: bool,
    name: str,
) -> None:
    """Write all files of the table into the lab's folder.

    `name`.md has a section for each block, `name`-summary.md all blocks in one table. `name`.csv
    has a row for each run of the chosen settings, `name`-trials.csv one for each trial of the
    grids. Pictures show the rounds of each method and, except in a quick look, the grids.

    Args:
        lab: Where to write.
        blocks: What was run, in the order of the page. There must be at least one.
        slow: Whether the slow methods were run, which the page tells.
        name: The name of the files, without a suffix.
    """
    _write_pages(lab, blocks, slow, name)
    _write_numbers(lab, blocks, name)
    _draw_bars(lab, blocks, name)
    if not lab.quick:
        for block in blocks:
            _draw_grids(block, lab, name)


# ---- the page ----


def _write_pages(
    lab: Lab,
    blocks: Sequence[Block],
    slow: bool,
    name: str,
) -> None:
    """The page with a section for each block, and the page with the summary.

    The summary has a table for each way of counting.
    """
    parts = [_head(lab, slow)]
    for block in blocks:
        parts += _section(lab, block)
    save_text(lab.out / f"{name}.md", *parts)
    parts = []
    for count in COUNTS:
        parts += _summary(blocks, count)
    save_text(lab.out / f"{name}-summary.md", *parts)


def _head(lab: Lab, slow: bool) -> str:
    """The title of the page and how the table was made.

    It tells whether the slow methods are in it.
    """
    if lab.quick:
        return QUICK_HEAD
    if slow:
        return f"{HEAD} With one seed: {SLOW}."
    return f"{HEAD} Left out: {SLOW} (`--slow` runs them)."


def _section(lab: Lab, block: Block) -> list[str]:
    """The paragraphs and tables of a block, in their order on the page.

    First the data, then for each way of counting the table and who is first. A block that the paper
    has goes on with its own settings, and with the authors' released curves; a quick look has too
    few rounds for these.
    """
    task = block.task
    parts = [f"## {task.title}", lab.about(task)]
    for count in COUNTS:
        parts.append(f"Rounds to accuracy, {COUNT_NAMES[count]}:")
        parts.append(table(_rows(block, count)))
        parts.append(_first(block, count))
    if task.name in PUBLISHED:
        parts.append(f"At the paper's own settings, ours ({_our_seeds(block)}) and the paper's:")
        parts.append(table(_paper_rows(block)))
        parts.append(REMARKS.get(task.name, ""))
        if not lab.quick:
            parts += against_released(lab, task, block.grids)
    if not lab.quick:
        parts.append(_edges(block))
    return parts


def _our_seeds(block: Block) -> str:
    """How many seeds our runs at the paper's settings have."""
    counts = [len(setting.seeds) for setting in block.published.values()]
    seeds = max(counts, default=0)
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _rows(block: Block, count: str) -> list[Row]:
    """The table of a block for one way of counting: a row for each method at its best setting.

    Returns the cells of each row by the head of their column.
    """
    rows = []
    for name, setting in block.chosen[count].items():
        end = f"{setting.final():.4f}"
        if setting.diverged:
            end += f" ({setting.diverged} diverged)"
        row = {
            "algorithm": _name(block, count, name),
            **_counts(block, setting, count),
            "at the end": end,
            "works": _works(block.grids[name], block.task.deciding),
        }
        rows.append(row)
    return rows


def _counts(
    block: Block,
    setting: Setting,
    count: str,
) -> Row:
    """The cells that all rows of ours have.

    These are the setting, the rounds to every target and the megabytes to the deciding one, each as
    mean ± deviation over the seeds.
    """
    row = {"setting": settings(setting)}
    for target in block.task.targets:
        head = _head_of(block.task, target)
        row[head] = spread(setting.rounds(target, count))
    row["MB"] = spread(_megabytes(block, setting, count), 2)
    return row


def _name(
    block: Block,
    count: str,
    name: str,
) -> str:
    """The title of a method in the table.

    A slow method has one seed where the others have five; then the title says so.
    """
    title = METHODS[name].title
    setting = block.chosen[count][name]
    if len(setting.seeds) < _seeds(block, count):
        return f"{title} (1 seed)"
    return title


def _seeds(block: Block, count: str) -> int:
    """The number of seeds of most methods. A slow method can have fewer, but none has more."""
    chosen = block.chosen[count].values()
    return max(len(setting.seeds) for setting in chosen)


def _works(grid: Results, target: float) -> str:
    """How many settings of a grid reach a target with every seed, as in "12 of 84".

    If some of them diverge afterwards, the number of those that do not is added.
    """
    reach = grid.working(target)
    last = grid.lasting(target)
    text = f"{reach} of {len(grid.settings())}"
    if last < reach:
        text += f", {last} for good"
    return text


def _edges(block: Block) -> str:
    """A sentence on the methods whose best setting lies at the end of an axis, if there are any.

    There a longer axis might have held a better setting.
    """
    told = []
    for name, setting in block.chosen[FIRST_HIT].items():
        if METHODS[name].tuned and _at_an_end(setting):
            told.append(METHODS[name].title)
    if not told:
        return ""
    return f"Best settings (first reached) at an end of the grid in α or μ: {', '.join(told)}."


def _at_an_end(setting: Setting) -> bool:
    """Whether a tuned value is the first or the last of its axis.

    η does not count: at η = 1, the whole step, the axis is meant to end.
    """
    for key, values in axes(setting.algorithm).items():
        if key == "eta":
            continue
        ends = (values[0], values[-1])
        if setting.spec.hyper[key] in ends:
            return True
    return False


def _head_of(task: Task, target: float) -> str:
    """The head of a target's column; that of the deciding one is bold."""
    head = f"{target:.2f}"
    if target == task.deciding:
        return f"**{head}**"
    return head


def _megabytes(
    block: Block,
    setting: Setting,
    count: str,
) -> list[float | None]:
    """For each seed, the megabytes that one client sends and receives until the deciding accuracy.

    All clients send the same, so these are the federation's bytes over the number of clients. None
    where a seed does not reach the accuracy. A megabyte is 10^6 bytes.
    """
    hits = setting.rounds(block.task.deciding, count)
    found: list[float | None] = []
    for trace, hit in zip(setting.traces, hits, strict=True):
        if hit is None:
            found.append(None)
        else:
            # "Last below" is -1 where even the initial model is above the accuracy.
            sent = _sent(trace, max(hit, 0))
            found.append(sent / block.clients / 1e6)
    return found


def _sent(trace: Trace, hit: int) -> int:
    """The bytes of all clients up to a round, both ways."""
    spent = trace["round"] <= hit
    up = trace["bytes_up"][spent].sum()
    down = trace["bytes_down"][spent].sum()
    return int(up + down)


def _paper_rows(block: Block) -> list[Row]:
    """The table of the paper's own settings.

    For each row of the paper there are up to three: ours counted in both ways, where we ran it, and
    the paper's numbers.
    """
    rows = []
    for row in PUBLISHED[block.task.name].rows:
        ours = block.published.get(row.algorithm)
        if ours is not None:
            title = METHODS[row.algorithm].title
            for count in COUNTS:
                cells = _counts(block, ours, count)
                rows.append({"algorithm": f"{title}, {COUNT_NAMES[count]}", **cells})
        rows.append(_their_row(block.task, row))
    return rows


def _their_row(task: Task, published: Published) -> Row:
    """A row of the paper's table in the form of ours, with a dash where a target is not reached."""
    setting = f"α={published.alpha:g}"
    if published.eta is not None:
        setting += f" η={published.eta:g}"
    row = {
        "algorithm": f"{METHODS[published.algorithm].title}, the paper (last time below)",
        "setting": setting,
    }
    for target, hit in zip(task.targets, published.rounds, strict=True):
        head = _head_of(task, target)
        row[head] = "–" if hit is None else str(hit)
    row["MB"] = "–"
    if published.bytes is not None:
        row["MB"] = f"{published.bytes / 1e6:.2f}"
    return row


# ---- who is first ----


def ranking(block: Block, count: str) -> list[tuple[str, float]]:
    """Methods with their mean rounds to the deciding accuracy, the fewest first.

    Methods that miss it with a seed, or that have fewer seeds than the rest, are left out.

    Args:
        block: What was run.
        count: The way of counting, a key of `COUNTS`.

    Returns:
        Pairs of a method's key and its mean rounds.
    """
    seeds = _seeds(block, count)
    means = []
    for name, setting in block.chosen[count].items():
        if len(setting.seeds) < seeds:
            continue
        rounds = setting.mean_rounds(block.task.deciding, count)
        if rounds < math.inf:
            means.append((name, rounds))
    return sorted(means, key=lambda pair: pair[1])


def _first(block: Block, count: str) -> str:
    """Sentences on who gets to the deciding accuracy first.

    They name the first three methods, the place of FedSSO if it is not among them, and the methods
    whose chosen setting misses the accuracy with some seeds.
    """
    order = ranking(block, count)
    where = f"{block.task.deciding:.2f}"
    if not order:
        return f"Nobody reaches {where} with every seed."
    first = []
    for name, rounds in order[:3]:
        first.append(f"{METHODS[name].title} ({rounds:.1f})")
    said = [f"First to {where} with every seed: {', then '.join(first)}."]
    names = [name for name, _ in order]
    for name in ("fedsso", "fedsso-default"):
        if name in names[3:]:
            place = names.index(name) + 1
            said.append(f"{METHODS[name].title} is number {place}.")
    return " ".join([*said, *_misses(block, count)])


def _misses(block: Block, count: str) -> list[str]:
    """A sentence on the methods whose chosen setting gets there with some seeds only, if any.

    A setting is chosen with the first seeds and may miss with the others.
    """
    missed = []
    for name, setting in block.chosen[count].items():
        seeds = len(setting.seeds)
        rounds = setting.rounds(block.task.deciding, count)
        hits = seeds - rounds.count(None)
        if 0 < hits < seeds:
            missed.append(f"{METHODS[name].title} ({hits} of {seeds})")
    if not missed:
        return []
    return [f"The chosen setting gets there with some seeds only: {', '.join(missed)}."]


def _summary(blocks: Sequence[Block], count: str) -> list[str]:
    """A heading and a table of all blocks for one way of counting.

    A row is a block, a column a method; a cell holds the rounds to the deciding accuracy, the
    fewest of a block in bold.
    """
    run: set[str] = set()
    for block in blocks:
        run.update(block.chosen[count])
    names = [name for name in METHODS if name in run]
    rows = []
    for block in blocks:
        order = ranking(block, count)
        # Several methods can have the fewest rounds. Then all of them are bold.
        fewest = order[0][1] if order else math.inf
        best = [name for name, rounds in order if rounds == fewest]
        row = {"block": f"{block.task.title}, {block.task.deciding:.2f}"}
        for name in names:
            title = METHODS[name].title
            row[title] = _cell(block, count, name, best)
        rows.append(row)
    return [f"Rounds to the deciding accuracy, {COUNT_NAMES[count]}:", table(rows)]


def _cell(
    block: Block,
    count: str,
    name: str,
    best: Sequence[str],
) -> str:
    """One cell of the summary: the rounds of a method in a block.

    `best` lists the methods with the fewest rounds, which are bold.
    """
    if name not in block.chosen[count]:
        return "not run"
    setting = block.chosen[count][name]
    text = spread(setting.rounds(block.task.deciding, count))
    return f"**{text}**" if name in best else text


# ---- plain numbers ----


def _write_numbers(
    lab: Lab,
    blocks: Sequence[Block],
    name: str,
) -> None:
    """Write the plain numbers: every run of the chosen settings, and every trial of the grids."""
    numbers: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []
    for block in blocks:
        numbers += _numbers(block)
        for method in block.grids:
            trials += _trials(block, method)
    save_csv(lab.out / f"{name}.csv", numbers)
    save_csv(lab.out / f"{name}-trials.csv", trials)


def _numbers(block: Block) -> list[dict[str, Any]]:
    """A row for each run of the chosen settings, with the rounds to every target.

    A setting that is chosen by both ways of counting is there twice.
    """
    rows = []
    for count, chosen in block.chosen.items():
        for name, setting in chosen.items():
            labels = {"block": block.task.name, "chosen by": count, "method": name}
            for row in Results(setting.runs).rows(block.task.targets):
                rows.append({**labels, **row})
    return rows


def _trials(block: Block, name: str) -> list[dict[str, Any]]:
    """A row for each trial of a method's grid, with the rounds to the deciding accuracy alone.

    The heads of the columns do not name that accuracy, because it differs between blocks that share
    a file.
    """
    deciding = block.task.deciding
    rows = []
    for trial in block.grids[name].rows([deciding]):
        row = {"block": block.task.name, "method": name}
        for key, value in trial.items():
            row[key.replace(f" {deciding:g}", "")] = value
        rows.append(row)
    return rows


# ---- pictures ----


def _draw_bars(
    lab: Lab,
    blocks: Sequence[Block],
    name: str,
) -> None:
    """The picture of rounds to the deciding accuracy, with a group of bars for each block.

    Bars of methods that miss it reach to the end of the longest run.
    """
    most = max(_longest(block) for block in blocks)
    bars = [(block.task.title, _bars(block)) for block in blocks]
    what = "the paper's settings" if lab.quick else "the best setting of each algorithm"
    title = f"Rounds until the deciding accuracy is first reached: {what}"

    def draw(path: Path) -> None:
        figures.rounds_bars(path, bars, title=title, most=most)

    save_picture(lab.out / name, draw)


def _longest(block: Block) -> int:
    """The rounds of the longest run. A trace has one row more, that of the initial model."""
    settings = block.chosen[FIRST_HIT].values()
    return max(len(setting.traces[0]) - 1 for setting in settings)


def _bars(block: Block) -> list[figures.Bar]:
    """A bar for each method: title, algorithm, mean rounds and their deviation.

    There is no mean if a seed misses the deciding accuracy; then the title says how many seeds
    reach it.
    """
    bars: list[figures.Bar] = []
    for name, setting in block.chosen[FIRST_HIT].items():
        method = METHODS[name]
        hits = setting.rounds(block.task.deciding)
        found = [hit for hit in hits if hit is not None]
        title = method.title
        if 0 < len(found) < len(hits):
            title += f" ({len(found)} of {len(hits)} seeds)"
        height = None
        deviation = None
        if len(found) == len(hits):
            height = mean(found)
            deviation = stdev(found) if len(found) > 1 else None
        bars.append((title, method.algorithm, height, deviation))
    return bars


def _draw_grids(
    block: Block,
    lab: Lab,
    name: str,
) -> None:
    """The picture of a block's grids: a heat map of rounds for each method that is tuned.

    It shows how sharply a method depends on its steps, which the best setting alone does not.
    """
    task = block.task
    maps = []
    for method, grid in block.grids.items():
        if len(grid.settings()) > 1:
            for heat in grid.maps(task.deciding):
                maps.append(heat._replace(title=METHODS[method].title))
    title = (
        f"{task.title}: rounds to {task.deciding:g} over the grid, "
        f"mean of seeds 0 to {task.choosing - 1}"
    )

    def draw(path: Path) -> None:
        figures.heat_maps(path, maps, title=title, most=task.rounds)

    save_picture(lab.out / f"{name}-grid-{task.name}", draw)
