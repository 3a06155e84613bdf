"""Runs the paper's figures: training loss and test accuracy of several algorithms, by round.

In a column of a figure all algorithms have the same client step α, or each has its best setting.
Best settings are chosen as in Table 2; on tasks that it does not have they are chosen with one seed
instead of three. They are then run with five seeds, the same α with three.
"""

from __future__ import annotations

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
    from pathlib import Path

    from ..experiment.results import Setting
    from ..experiment.run import Run
    from .lab import Lab

TAUS = (1, 2, 5, 10, 20, 50)
"""The numbers of local steps that the figure on them compares."""
# How to read a figure, for every page.
HOW = (
    "τ = 5 unless said otherwise, batch 100. Curves are means over the seeds that have not "
    "diverged. Rounds are those in which an accuracy is first reached, megabytes those of the "
    "whole federation; the final accuracy "
    "is the mean of the last ten evaluations, of a short run that of its last quarter, and 0 for a "
    "seed that has diverged."
)


class Shown(NamedTuple):
    """A setting in a figure, under a title."""

    title: str
    """The name of the method, or what else tells the curves of the figure apart."""
    setting: Setting
    """The runs, one for each seed."""
    told: bool = True
    """Whether its hyper-parameters follow the title, as in "FedSSO α=0.001 η=1"."""

    def curve(self) -> report.Curve:
        """The setting as plots and tables take it."""
        label = self.title
        if self.told:
            label = f"{label} {settings(self.setting)}"
        return self.setting.curve(label)


class Drawn(NamedTuple):
    """A column of a figure that has been run, and what there is to say about it."""

    task: Task
    """The task that all runs of the column share."""
    how: str
    """What is special about the settings, for the title of the column. It may be empty."""
    runs: Sequence[Shown]
    """The curves, in the order of the legend."""
    remarks: Sequence[str] = ()
    """Paragraphs for the page."""

    @property
    def title(self) -> str:
        """The title of the column."""
        if not self.how:
            return self.task.title
        return f"{self.task.title}: {self.how}"


def figure(lab: Lab, name: str) -> None:
    """Run what a figure of `FIGURES` shows and write it.

    Writes the picture as `name`.png and `name`.pdf, a page with tables as `name`.md, and the
    numbers of every run as `name`.csv.

    Args:
        lab: Where to write, and how thoroughly to run.
        name: A key of `FIGURES`.
    """
    chosen = FIGURES[name]
    drawn = []
    for number, column in enumerate(chosen.columns, 1):
        title = TASKS[column.task].title
        lab.note(f"column {number} of {len(chosen.columns)}: {title}")
        if column.alpha is None:
            drawn.append(_best(lab, column))
        else:
            drawn.append(_same(lab, column, column.alpha))
    _write(lab, name, chosen.title, chosen.remark, drawn)


def _best(lab: Lab, column: Column) -> Drawn:
    """Run a column in which every method has its best setting.

    The whole grid of each method is run with the seeds that settings are chosen by; the chosen
    setting is then run with all seeds.
    """
    task = TASKS[column.task]
    grids = lab.grids(task, column.methods)
    # Rounds are counted to the first hit here, not to the last round below.
    chosen = {}
    for name, grid in grids.items():
        chosen[name] = grid.best(task.deciding)
    best = lab.again(task, chosen)
    rule = _rule(lab, task, grids)
    return Drawn(task, "best settings", _shown(best), [rule])


def _rule(
    lab: Lab,
    task: Task,
    grids: Mapping[str, Results],
) -> str:
    """How the settings of a column were chosen, and how many reach the deciding accuracy."""
    seeds = f"{task.choosing} seeds"
    if task.choosing == 1 or lab.quick:
        seeds = "one seed"
    grid = "a thin grid" if lab.quick else "the whole grid"
    return (
        f"Chosen on {grid} with {seeds}: the fewest rounds to {task.deciding:g}, "
        "or the best accuracy at the end where that is not reached. "
        f"Settings that reach it: {_shares(grids, task.deciding)}."
    )


def _shown(settings: Mapping[str, Setting]) -> list[Shown]:
    """Settings by name of method, under the titles of the methods."""
    return [Shown(_title(name), setting) for name, setting in settings.items()]


def _shares(grids: Mapping[str, Results], target: float) -> str:
    """How many settings of each method's grid reach the target, as text.

    Methods with a single setting are left out.
    """
    shares = []
    for name, grid in grids.items():
        size = len(grid.settings())
        if size > 1:
            works = grid.working(target)
            shares.append(f"{METHODS[name].title} {works} of {size}")
    return ", ".join(shares)


def _same(
    lab: Lab,
    column: Column,
    alpha: float,
) -> Drawn:
    """Run a column in which all methods have the same client step.

    A method that is not tuned, our default, chooses its own. The other hyper-parameters have the
    defaults of each algorithm, so nothing is searched. There are three seeds, in a quick look one.
    """
    task = TASKS[column.task]
    records = []
    for name in column.methods:
        method = METHODS[name]
        if method.tuned:
            records.append(method.at(alpha=alpha))
        else:
            records.append(method.at())
    seeds = lab.seeds[:3]
    found = lab.study(task, records, seeds).settings()
    runs = _shown(dict(zip(column.methods, found, strict=True)))
    return Drawn(task, f"α\u00a0=\u00a0{alpha:g}", runs)


def _title(name: str) -> str:
    """The title of a method in a figure.

    That our default is not tuned goes without saying there: its label shows α=auto.
    """
    return METHODS[name].title.removesuffix(", not tuned")


def local_updates(lab: Lab, name: str) -> None:
    """Run FedSSO as published with one to fifty local steps, on MNIST, and write the figure.

    MNIST is shared by twenty clients, as in the paper, and by three. All runs have α = 0.001 and
    η = 1. A quick look has up to ten local steps.

    Args:
        lab: Where to write, and how thoroughly to run.
        name: The name of the files.
    """
    taus = list(TAUS[:4] if lab.quick else TAUS)
    record = METHODS["fedsso"].at(alpha=0.001)
    drawn = []
    for task in (TASKS["mnist-mclr"], TASKS["mnist3-mclr"]):
        lab.note(task.title)
        found = lab.study(
            task,
            [record],
            lab.seeds,
            local_steps=taus,
        )
        runs = []
        for tau, setting in zip(taus, found.settings(), strict=True):
            runs.append(Shown(f"FedSSO τ={tau}", setting, told=False))
        drawn.append(Drawn(task, "α\u00a0=\u00a00.001, η\u00a0=\u00a01", runs))
    remark = (
        "FedSSO as published, from zero; the paper has the 20 clients. "
        "Bytes in a round do not depend on τ."
    )
    _write(lab, name, "The number of local steps", remark, drawn)


def newton(lab: Lab, name: str) -> None:
    """Run FedNL on a network so small that its d x d matrices fit, and write the figure.

    FedAvg, FedDANE and our default stand beside it. FedNL is run with each of its dampings η. A
    quick look has the undamped step alone, for ten rounds.

    Args:
        lab: Where to write, and how thoroughly to run.
        name: The name of the files.
    """
    task = TASKS["sentiment140-short"]
    beside = {
        "FedAvg": METHODS["fedavg"].at(alpha=0.03),
        "FedDANE": METHODS["feddane"].at(alpha=0.03),
        _title("fedsso-default"): METHODS["fedsso-default"].at(),
    }
    seeds = SEEDS[:1]
    others = lab.study(task, list(beside.values()), seeds)
    runs = []
    for title, setting in zip(beside, others.settings(), strict=True):
        runs.append(Shown(title, setting))
    damped = METHODS["fednl"].records()
    few = {}
    # The grid has three dampings, and the last is η = 1, the undamped step.
    if lab.quick:
        damped = damped[2:]
        few = {"rounds": 10}
    found = lab.study(task, damped, seeds, **few)
    for setting in found.settings():
        runs.append(Shown("FedNL", setting))
    remark = "One seed; α = 0.03 for FedAvg and FedDANE, FedNL with its dampings η."
    _write(
        lab,
        name,
        "FedNL on a network for text",
        remark,
        [Drawn(task, "", runs)],
    )


# ---- what is written ----


def _write(
    lab: Lab,
    name: str,
    title: str,
    remark: str,
    drawn: Sequence[Drawn],
) -> None:
    """Write the picture, the numbers and the page of a figure.

    Args:
        lab: Where to write.
        name: The name of the files, without a suffix.
        title: The title of the picture and of the page.
        remark: What stands below the title.
        drawn: The columns from left to right. The page has a section with a table for each.
    """
    columns = []
    numbers: list[dict[str, Any]] = []
    parts = [f"# {title}"]
    if lab.quick:
        parts.append("A quick look: one seed, few rounds, few settings.")
    parts += [remark, HOW, f"![{title}]({name}.png)"]
    for column in drawn:
        curves = [run.curve() for run in column.runs]
        dots = _dots(column)
        columns.append(figures.Panel(column.title, curves, dots))
        numbers += _numbers(column)
        parts.append(f"## {column.title}")
        parts += _facts(lab, column)
        rows = report.rounds_table(curves, column.task.targets)
        parts.append(table(rows))

    def draw(path: Path) -> None:
        figures.panels(path, columns, title=title)

    save_picture(lab.out / name, draw)
    save_csv(lab.out / f"{name}.csv", numbers)
    save_text(lab.out / f"{name}.md", *parts)


def _facts(lab: Lab, drawn: Drawn) -> list[str]:
    """Paragraphs on a column: its data, how settings were chosen, and which runs diverged."""
    lost = []
    for run in drawn.runs:
        setting = run.setting
        if setting.diverged:
            seeds = f"{setting.diverged} of {len(setting.seeds)} seeds"
            lost.append(f"{run.curve().label} ({seeds})")
    about = lab.about(drawn.task)
    diverged = ", ".join(lost) if lost else "none"
    return [about, *drawn.remarks, f"Diverged: {diverged}."]


def _dots(drawn: Drawn) -> list[figures.Dots]:
    """The authors' released curves of the settings in a column, as dots for the picture.

    Released curves have 200 rounds; they are cut where ours end.
    """
    dots = []
    for run in drawn.runs:
        last = len(run.setting.traces[0]) - 1
        for curve in same_setting(drawn.task, run.setting):
            # Theirs has a value in every fifth round. Ours may be shorter, and theirs as well.
            every = len(curve.accuracy)
            rounds = range(0, last + 1, EVERY)[:every]
            values = curve.accuracy[: len(rounds)]
            algorithm = run.setting.algorithm
            dots.append(figures.Dots("released by the authors", algorithm, tuple(rounds), values))
    return dots


def _numbers(drawn: Drawn) -> list[dict[str, Any]]:
    """A row of plain numbers for each run of a column, with the column's title in front."""
    runs: list[Run] = []
    for shown in drawn.runs:
        runs += shown.setting.runs
    rows = Results(runs).rows(drawn.task.targets)
    return [{"panel": drawn.title, **row} for row in rows]
