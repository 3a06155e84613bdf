"""The paper's figures: training loss and test accuracy of several algorithms, at the same α or each at its best.

A figure is a row of columns; a column is a task, the methods on it and, where all have the same client step, that α.
Best settings are run with five seeds, the same α with three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import figures, report
from ..study import Setting, Study
from .lab import Lab
from .published import EVERY, TABLE2, released
from .tasks import METHODS, SEEDS, TASKS, Task
from .write import save_csv, save_picture, save_text, settings, table

CONVEX = ("fedavg", "fedsgd", "scaffold", "feddane", "fedac", "fedadagrad", "fedadam", "fedsso", "fedsso-default")
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
        "α = 0.001 for MCLR, 0.01 for the CNN; η, μ and the like at each algorithm's default. Our default has α = 0.01 "
        "everywhere.",
    ),
    "fig-optimal": Figure(
        "Every algorithm at its best setting",
        (
            Column("mnist-mclr", CONVEX),
            Column("fashion-mclr", CONVEX),
            Column("mnist-cnn", DEEP),
            Column("fashion-cnn", DEEP),
        ),
        "Settings as in Table 2 (first hit). Dots are accuracies of the authors' released curves, where there is one "
        "with five local steps.",
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
    ),
}


class Drawn(NamedTuple):
    """A column with its runs."""

    column: Column
    task: Task
    runs: Mapping[str, Setting]

    @property
    def title(self) -> str:
        if not self.column.methods:
            return self.task.title
        how = "best settings" if self.column.alpha is None else f"α = {self.column.alpha:g}"
        return f"{self.task.title}: {how}"


def figure(lab: Lab, name: str) -> None:
    """Run what a figure shows and write its picture, table and numbers."""
    chosen = FIGURES[name]
    drawn = []
    for number, column in enumerate(chosen.columns, 1):
        lab.note(f"column {number} of {len(chosen.columns)}: {TASKS[column.task].title}")
        drawn.append(_run(lab, column))
    _write(lab, name, chosen.title, chosen.remark, drawn)


def _run(lab: Lab, column: Column) -> Drawn:
    task, methods = TASKS[column.task], [METHODS[name] for name in column.methods]
    if column.alpha is None:
        grids = lab.grids(task, column.methods)
        best = {name: grid.best(task.deciding) for name, grid in grids.items()}
        return Drawn(column, task, lab.again(task, best))
    records = [m.at(alpha=column.alpha) if m.tuned else m.records()[0] for m in methods]
    return Drawn(column, task, dict(zip(column.methods, lab.study(task, records, lab.seeds[:3]), strict=True)))


def local_updates(lab: Lab, name: str) -> None:
    """FedSSO as published with one to fifty local steps, on MNIST over three clients."""
    task, taus = TASKS["mnist3-mclr"], TAUS[:4] if lab.quick else TAUS
    found = lab.study(task, [METHODS["fedsso"].at(alpha=0.001)], lab.seeds, local_steps=list(taus))
    drawn = Drawn(Column(task.name, ("fedsso",), 0.001), task, {f"τ={t}": s for t, s in zip(taus, found, strict=True)})
    remark = "FedSSO as published, α = 0.001, η = 1; bytes in a round do not depend on τ."
    _write(lab, name, "The number of local steps", remark, [drawn])


def newton(lab: Lab, name: str) -> None:
    """FedNL on a network so small that its d x d matrices fit, beside others."""
    task = TASKS["sentiment140-short"]
    others = {m: METHODS[m].at(alpha=0.03) for m in ("fedavg", "feddane")}
    others["fedsso-default"] = METHODS["fedsso-default"].at()
    runs = dict(zip(others, lab.study(task, list(others.values()), SEEDS[:1]), strict=True))
    damped = METHODS["fednl"].records()[2 if lab.quick else 0 :]
    found = lab.study(task, damped, SEEDS[:1], **({"rounds": 10} if lab.quick else {}))
    drawn = Drawn(Column(task.name, ()), task, runs | {f"fednl-{i}": s for i, s in enumerate(found)})
    _write(lab, name, "FedNL on a network for text", "One seed, α = 0.03; FedNL with its dampings η.", [drawn])


# ---- what is written ----


def _write(lab: Lab, name: str, title: str, remark: str, drawn: Sequence[Drawn]) -> None:
    columns = [figures.Panel(d.title, _curves(d), _dots(d)) for d in drawn]
    save_picture(lab.out / name, lambda path: figures.panels(path, columns, title=title))
    save_csv(lab.out / f"{name}.csv", [row for d in drawn for row in _numbers(d)])
    quick = "A quick look: one seed, 40 rounds, a thin grid." if lab.quick else ""
    tables = [part for d in drawn for part in (f"## {d.title}", table(_rows(d)))]
    save_text(lab.out / f"{name}.md", f"# {title}", quick, remark, f"![{title}]({name}.png)", *tables)


def _title(name: str) -> str:
    if name.startswith("τ"):
        return f"FedSSO {name}"
    return METHODS["fednl" if name.startswith("fednl") else name].title.removesuffix(", not tuned")


def _curves(drawn: Drawn) -> list[report.Curve]:
    shown = []
    for name, setting in drawn.runs.items():
        own = "" if name.startswith("τ") else f" {settings(setting)}"
        shown.append(setting.curve(_title(name) + own))
    return shown


def _dots(drawn: Drawn) -> list[figures.Dots]:
    """Released curves of the chosen settings."""
    if drawn.task.name not in TABLE2:
        return []
    dots = []
    for name, setting in drawn.runs.items():
        for curve in released(drawn.task.name, setting.algorithm, 5):
            hyper = setting.spec.hyper
            same = curve.alpha == hyper.get("alpha") and curve.eta == hyper.get("eta", 1.0)
            start = "zero" if drawn.task.convex else "default"
            if same and curve.init == start and name != "fedsso-default":
                rounds = [EVERY * i for i in range(len(curve.accuracy))]
                last = len(setting.traces[0]) - 1
                kept = [(r, a) for r, a in zip(rounds, curve.accuracy, strict=True) if r <= last]
                dots.append(figures.Dots("released by the authors", setting.algorithm, *zip(*kept, strict=True)))
    return dots


def _rows(drawn: Drawn) -> list[dict[str, str]]:
    curves = _curves(drawn)
    return report.rounds_table(curves, drawn.task.targets)


def _numbers(drawn: Drawn) -> list[dict[str, Any]]:
    alpha = "best" if drawn.column.alpha is None else drawn.column.alpha
    rows = Study(drawn.runs.values()).rows(drawn.task.targets)
    targets = [f"{c} {t:g}" for c in ("first hit", "last below") for t in drawn.task.targets]
    kept = [{k: v for k, v in row.items() if k not in targets} for row in rows]
    counted = [{"reached": "; ".join(f"{t}: {row[t]}" for t in targets if row[t] is not None)} for row in rows]
    return [{"task": drawn.task.name, "alpha": alpha, **a, **b} for a, b in zip(kept, counted, strict=True)]
