"""The paper's figures: training loss and test accuracy of several algorithms, at the same α or each
at its best.

A figure is a row of columns; a column is a task, the methods on it and, where all have the same
client step, that α. Best settings are chosen as in Table 2, on the tasks that it does not have with
one seed instead of three, and run with five seeds; the same α is run with three.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..experiment.results import Results, Setting
from ..report import figures
from ..report import tables as report
from .lab import Lab
from .published import EVERY
from .released import same_setting
from .tasks import METHODS, SEEDS, TASKS, Task
from .write import save_csv, save_picture, save_text, settings, table

CONVEX = (
    "fedavg",
    "fedsgd",
    "scaffold",
    "feddane",
    "fedac",
    "fedadagrad",
    "fedadam",
    "fedsso",
    "fedsso-default",
)
DEEP = tuple(name for name in CONVEX if name != "feddane")
TEXT = ("fedavg", "scaffold", "feddane", "fedac", "fedadagrad", "fedsso", "fedsso-default")
ENGINE = ("fedavg", "fedac", "fednl", "fedsso", "fedsso-default")
PHOTOS = ("fedavg", "fedadagrad", "fedsso", "fedsso-default")
TAUS = (1, 2, 5, 10, 20, 50)


@dataclass(frozen=True)
class Column:
    """One task of a figure; without α every method has its best setting."""

    task: str
    methods: tuple[str, ...]
    alpha: float | None = None


@dataclass(frozen=True)
class Figure:
    """A figure of the paper."""

    title: str
    columns: tuple[Column, ...]
    remark: str = ""


FIGURES = {
    "fig-same": Figure(
        "The same α for all",
        (
            Column("mnist-mclr", CONVEX, 0.001),
            Column("fashion-mclr", CONVEX, 0.001),
            Column("mnist-cnn", DEEP, 0.01),
            Column("fashion-cnn", DEEP, 0.01),
        ),
        "α = 0.001 for MCLR, 0.01 for the CNN; η, μ and the like at each algorithm's default. Our default chooses "
        "its α. FedDANE is not run on the CNN, FedNL not at all. Dots: the authors' released "
        "curves.",
    ),
    "fig-optimal": Figure(
        "Every algorithm at its best setting",
        (
            Column("mnist-mclr", CONVEX),
            Column("fashion-mclr", CONVEX),
            Column("mnist-cnn", DEEP),
            Column("fashion-cnn", DEEP),
        ),
        "Settings as in Table 2 (first hit); FedDANE is not run on the CNN, FedNL not at all. Dots: the authors' "
        "released curves.",
    ),
    "fig-cifar": Figure(
        "CIFAR-10, LeNet",
        (Column("cifar-lenet", PHOTOS),),
        "FedOpt is FedAdaGrad, as in the paper.",
    ),
    "fig-libsvm": Figure(
        "ijcnn1, logistic regression",
        (Column("ijcnn1-mclr", ENGINE, 0.001), Column("ijcnn1-mclr", ENGINE)),
        "FedNL has no α: at the left its step is undamped (η = 1).",
    ),
    "fig-nlp": Figure(
        "Shakespeare and Sentiment140",
        (
            Column("shakespeare-mclr", TEXT, 0.003),
            Column("shakespeare-mclr", TEXT),
            Column("sentiment140-mlp", TEXT, 0.03),
            Column("sentiment140-mlp", TEXT),
        ),
        "FedNL does not fit: with d = 211 315 and 67 746 its matrix at every client would have 179 and 18 GB. "
        "`fedsso paper fig-fednl` shows it on a smaller network.",
    ),
}


class Shown(NamedTuple):
    """A run of a figure under its name; `told`: the settings are told, too."""

    title: str
    setting: Setting
    told: bool = True

    def curve(self) -> report.Curve:
        return self.setting.curve(
            f"{self.title} {settings(self.setting)}" if self.told else self.title
        )


class Drawn(NamedTuple):
    """A column with its runs, and what there is to say about them."""

    task: Task
    how: str
    runs: Sequence[Shown]
    remarks: Sequence[str] = ()

    @property
    def title(self) -> str:
        return f"{self.task.title}: {self.how}" if self.how else self.task.title


def figure(lab: Lab, name: str) -> None:
    """Run what a figure shows and write its picture, table and numbers."""
    chosen = FIGURES[name]
    drawn = []
    for number, column in enumerate(chosen.columns, 1):
        lab.note(f"column {number} of {len(chosen.columns)}: {TASKS[column.task].title}")
        drawn.append(
            _best(lab, column) if column.alpha is None else _same(lab, column, column.alpha)
        )
    _write(lab, name, chosen.title, chosen.remark, drawn)


def _best(lab: Lab, column: Column) -> Drawn:
    """Every method's grid, then its best setting."""
    task = TASKS[column.task]
    grids = lab.grids(task, column.methods)
    best = lab.again(task, {name: grid.best(task.deciding) for name, grid in grids.items()})
    seeds = "one seed" if task.choosing == 1 or lab.quick else f"{task.choosing} seeds"
    grid = "a thin grid" if lab.quick else "the whole grid"
    rule = (
        f"Chosen on {grid} with {seeds}: the fewest rounds to {task.deciding:g}, or the best "
        f"accuracy at the end where "
        f"that is not reached. Settings that reach it: {_shares(grids, task.deciding)}."
    )
    return Drawn(
        task, "best settings", [Shown(_title(name), s) for name, s in best.items()], [rule]
    )


def _shares(grids: Mapping[str, Results], target: float) -> str:
    tuned = {name: grid for name, grid in grids.items() if len(grid.settings()) > 1}
    return ", ".join(
        f"{METHODS[n].title} {grid.working(target)} of {len(grid.settings())}"
        for n, grid in tuned.items()
    )


def _same(lab: Lab, column: Column, alpha: float) -> Drawn:
    """One α for all; our default has its own."""
    task, methods = TASKS[column.task], [METHODS[name] for name in column.methods]
    records = [m.at(alpha=alpha) if m.tuned else m.records()[0] for m in methods]
    found = lab.study(task, records, lab.seeds[:3])
    runs = [
        Shown(_title(name), s) for name, s in zip(column.methods, found.settings(), strict=True)
    ]
    return Drawn(task, f"α\u00a0=\u00a0{alpha:g}", runs)


def _title(name: str) -> str:
    return METHODS[name].title.removesuffix(", not tuned")


def local_updates(lab: Lab, name: str) -> None:
    """FedSSO as published with one to fifty local steps, on MNIST over twenty clients and over
    three."""
    taus = TAUS[:4] if lab.quick else TAUS
    drawn = []
    for task in (TASKS["mnist-mclr"], TASKS["mnist3-mclr"]):
        lab.note(task.title)
        found = lab.study(
            task, [METHODS["fedsso"].at(alpha=0.001)], lab.seeds, local_steps=list(taus)
        )
        runs = [
            Shown(f"FedSSO τ={t}", s, told=False)
            for t, s in zip(taus, found.settings(), strict=True)
        ]
        drawn.append(Drawn(task, "α\u00a0=\u00a00.001, η\u00a0=\u00a01", runs))
    remark = "FedSSO as published, from zero; the paper has the 20 clients. Bytes in a round do not depend on τ."
    _write(lab, name, "The number of local steps", remark, drawn)


def newton(lab: Lab, name: str) -> None:
    """FedNL on a network so small that its d x d matrices fit, beside others."""
    task = TASKS["sentiment140-short"]
    others = [METHODS[m].at(alpha=0.03) for m in ("fedavg", "feddane")] + METHODS[
        "fedsso-default"
    ].records()
    titles = ["FedAvg", "FedDANE", _title("fedsso-default")]
    beside = lab.study(task, others, SEEDS[:1]).settings()
    runs = [Shown(t, s) for t, s in zip(titles, beside, strict=True)]
    damped = METHODS["fednl"].records()[2 if lab.quick else 0 :]
    few = {"rounds": 10} if lab.quick else {}
    runs += [Shown("FedNL", s) for s in lab.study(task, damped, SEEDS[:1], **few).settings()]
    remark = "One seed; α = 0.03 for FedAvg and FedDANE, FedNL with its dampings η."
    _write(lab, name, "FedNL on a network for text", remark, [Drawn(task, "", runs)])


# ---- what is written ----


def _write(lab: Lab, name: str, title: str, remark: str, drawn: Sequence[Drawn]) -> None:
    columns = [figures.Panel(d.title, [run.curve() for run in d.runs], _dots(d)) for d in drawn]
    save_picture(lab.out / name, lambda path: figures.panels(path, columns, title=title))
    save_csv(lab.out / f"{name}.csv", [row for d in drawn for row in _numbers(d)])
    quick = "A quick look: one seed, few rounds, few settings." if lab.quick else ""
    how = (
        "τ = 5 unless said otherwise, batch 100. Curves are means over the seeds that have not "
        "diverged. Rounds are "
        "first hits, megabytes those of the whole federation; the final accuracy is the last "
        "round's, and 0 for a seed "
        "that has diverged."
    )
    tables = [part for d in drawn for part in (f"## {d.title}", *_facts(lab, d), table(_rows(d)))]
    save_text(
        lab.out / f"{name}.md", f"# {title}", quick, remark, how, f"![{title}]({name}.png)", *tables
    )


def _facts(lab: Lab, drawn: Drawn) -> list[str]:
    """The data, the choice, and who diverged."""
    lost = [(run.curve().label, run.setting) for run in drawn.runs if run.setting.diverged]
    told = ", ".join(f"{label} ({s.diverged} of {len(s.seeds)} seeds)" for label, s in lost)
    return [lab.about(drawn.task), *drawn.remarks, f"Diverged: {told or 'none'}."]


def _dots(drawn: Drawn) -> list[figures.Dots]:
    """The released curves of these settings."""
    dots = []
    for run in drawn.runs:
        for curve in same_setting(drawn.task, run.setting):
            last = len(run.setting.traces[0]) - 1
            kept = [(EVERY * i, a) for i, a in enumerate(curve.accuracy) if EVERY * i <= last]
            dots.append(
                figures.Dots(
                    "released by the authors", run.setting.algorithm, *zip(*kept, strict=True)
                )
            )
    return dots


def _rows(drawn: Drawn) -> list[dict[str, str]]:
    return report.rounds_table([run.curve() for run in drawn.runs], drawn.task.targets)


def _numbers(drawn: Drawn) -> list[dict[str, Any]]:
    runs = itertools.chain.from_iterable(shown.setting.runs for shown in drawn.runs)
    rows = Results(runs).rows(drawn.task.targets)
    return [{"panel": drawn.title, **row} for row in rows]
