"""Runs the paper's figures: training loss and test accuracy of several algorithms, by round.

In a column of a figure all algorithms have the same client step α, or each has its best setting.
Best settings are chosen as in Table 2; on tasks that it does not have they are chosen with one seed
instead of three. They are then run with five seeds, the same α with three.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from ..experiment.results import Results
from ..report import figures
from ..report import tables as report
from .figures import FIGURES, Column
from .published import EVERY
from .released import same_setting
from .tasks import METHODS, SEEDS, TASKS, Task
from .write import save_csv, save_picture, save_text, settings, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..experiment.results import Setting
    from .lab import Lab

TAUS = (1, 2, 5, 10, 20, 50)
HOW = (
    "τ = 5 unless said otherwise, batch 100. Curves are means over the seeds that have not "
    "diverged. Rounds are first hits, megabytes those of the whole federation; the final accuracy "
    "is the last round's, and 0 for a seed that has diverged."
)


class Shown(NamedTuple):
    """A setting in a figure under its title; with `told` its hyper-parameters follow the title."""

    title: str
    setting: Setting
    told: bool = True

    def curve(self) -> report.Curve:
        """The setting as plots and tables take it."""
        label = self.title
        if self.told:
            label = f"{label} {settings(self.setting)}"
        return self.setting.curve(label)


class Drawn(NamedTuple):
    """A column of a figure that has been run, and what there is to say about it."""

    task: Task
    how: str  # what is special about the settings; may be empty
    runs: Sequence[Shown]
    remarks: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The title of the column."""
        return f"{self.task.title}: {self.how}" if self.how else self.task.title


def figure(lab: Lab, name: str) -> None:
    """Run what a figure of `FIGURES` shows, and write its picture, table and numbers."""
    chosen = FIGURES[name]
    drawn = []
    for number, column in enumerate(chosen.columns, 1):
        lab.note(f"column {number} of {len(chosen.columns)}: {TASKS[column.task].title}")
        if column.alpha is None:
            drawn.append(_best(lab, column))
        else:
            drawn.append(_same(lab, column, column.alpha))
    _write(lab, name, chosen.title, chosen.remark, drawn)


def _best(lab: Lab, column: Column) -> Drawn:
    """A column in which every method has its best setting."""
    task = TASKS[column.task]
    grids = lab.grids(task, column.methods)
    chosen = {name: grid.best(task.deciding) for name, grid in grids.items()}
    best = lab.again(task, chosen)
    seeds = "one seed" if task.choosing == 1 or lab.quick else f"{task.choosing} seeds"
    grid = "a thin grid" if lab.quick else "the whole grid"
    rule = (
        f"Chosen on {grid} with {seeds}: the fewest rounds to {task.deciding:g}, "
        "or the best accuracy at the end where that is not reached. "
        f"Settings that reach it: {_shares(grids, task.deciding)}."
    )
    runs = [Shown(_title(name), setting) for name, setting in best.items()]
    return Drawn(task, "best settings", runs, [rule])


def _shares(grids: Mapping[str, Results], target: float) -> str:
    """How many settings of each tuned method's grid reach the target."""
    shares = []
    for name, grid in grids.items():
        size = len(grid.settings())
        if size > 1:
            shares.append(f"{METHODS[name].title} {grid.working(target)} of {size}")
    return ", ".join(shares)


def _same(lab: Lab, column: Column, alpha: float) -> Drawn:
    """A column with one α for all; our default chooses its own."""
    task = TASKS[column.task]
    records = []
    for name in column.methods:
        method = METHODS[name]
        records.append(method.at(alpha=alpha) if method.tuned else method.records()[0])
    found = lab.study(task, records, lab.seeds[:3]).settings()
    pairs = zip(column.methods, found, strict=True)
    runs = [Shown(_title(name), setting) for name, setting in pairs]
    return Drawn(task, f"α\u00a0=\u00a0{alpha:g}", runs)


def _title(name: str) -> str:
    """The title of a method in a figure."""
    return METHODS[name].title.removesuffix(", not tuned")


def local_updates(lab: Lab, name: str) -> None:
    """Run FedSSO as published with one to fifty local steps, on MNIST, and write the figure.

    MNIST is shared by twenty clients, as in the paper, and by three.
    """
    taus = list(TAUS[:4] if lab.quick else TAUS)
    record = METHODS["fedsso"].at(alpha=0.001)
    drawn = []
    for task in (TASKS["mnist-mclr"], TASKS["mnist3-mclr"]):
        lab.note(task.title)
        found = lab.study(task, [record], lab.seeds, local_steps=taus).settings()
        runs = []
        for tau, setting in zip(taus, found, strict=True):
            runs.append(Shown(f"FedSSO τ={tau}", setting, told=False))
        drawn.append(Drawn(task, "α\u00a0=\u00a00.001, η\u00a0=\u00a01", runs))
    remark = (
        "FedSSO as published, from zero; the paper has the 20 clients. "
        "Bytes in a round do not depend on τ."
    )
    _write(lab, name, "The number of local steps", remark, drawn)


def newton(lab: Lab, name: str) -> None:
    """Run FedNL on a network so small that its d x d matrices fit, and write the figure.

    FedAvg, FedDANE and our default stand beside it.
    """
    task = TASKS["sentiment140-short"]
    beside = {
        "FedAvg": METHODS["fedavg"].at(alpha=0.03),
        "FedDANE": METHODS["feddane"].at(alpha=0.03),
        _title("fedsso-default"): METHODS["fedsso-default"].at(),
    }
    found = lab.study(task, list(beside.values()), SEEDS[:1]).settings()
    runs = [Shown(title, setting) for title, setting in zip(beside, found, strict=True)]
    damped = METHODS["fednl"].records()
    few = {}
    if lab.quick:
        damped = damped[2:]
        few = {"rounds": 10}
    for setting in lab.study(task, damped, SEEDS[:1], **few).settings():
        runs.append(Shown("FedNL", setting))
    remark = "One seed; α = 0.03 for FedAvg and FedDANE, FedNL with its dampings η."
    _write(lab, name, "FedNL on a network for text", remark, [Drawn(task, "", runs)])


# ---- what is written ----


def _write(lab: Lab, name: str, title: str, remark: str, drawn: Sequence[Drawn]) -> None:
    """Write the picture, the numbers and the page of a figure."""
    columns = []
    numbers: list[dict[str, Any]] = []
    parts = [f"# {title}"]
    if lab.quick:
        parts.append("A quick look: one seed, few rounds, few settings.")
    parts += [remark, HOW, f"![{title}]({name}.png)"]
    for column in drawn:
        curves = [run.curve() for run in column.runs]
        columns.append(figures.Panel(column.title, curves, _dots(column)))
        numbers += _numbers(column)
        parts.append(f"## {column.title}")
        parts += _facts(lab, column)
        parts.append(table(report.rounds_table(curves, column.task.targets)))
    save_picture(lab.out / name, lambda path: figures.panels(path, columns, title=title))
    save_csv(lab.out / f"{name}.csv", numbers)
    save_text(lab.out / f"{name}.md", *parts)


def _facts(lab: Lab, drawn: Drawn) -> list[str]:
    """Paragraphs on a column: its data, how settings were chosen, and who diverged."""
    lost = []
    for run in drawn.runs:
        setting = run.setting
        if setting.diverged:
            seeds = f"{setting.diverged} of {len(setting.seeds)} seeds"
            lost.append(f"{run.curve().label} ({seeds})")
    told = ", ".join(lost) or "none"
    return [lab.about(drawn.task), *drawn.remarks, f"Diverged: {told}."]


def _dots(drawn: Drawn) -> list[figures.Dots]:
    """The released curves of a column's settings, as far as our runs go."""
    dots = []
    for run in drawn.runs:
        last = len(run.setting.traces[0]) - 1
        for curve in same_setting(drawn.task, run.setting):
            rounds = range(0, last + 1, EVERY)[: len(curve.accuracy)]
            values = curve.accuracy[: len(rounds)]
            algorithm = run.setting.algorithm
            dots.append(figures.Dots("released by the authors", algorithm, tuple(rounds), values))
    return dots


def _numbers(drawn: Drawn) -> list[dict[str, Any]]:
    """A row of plain numbers for each run of a column."""
    runs = itertools.chain.from_iterable(shown.setting.runs for shown in drawn.runs)
    rows = Results(runs).rows(drawn.task.targets)
    return [{"panel": drawn.title, **row} for row in rows]
