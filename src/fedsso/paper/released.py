"""Our runs beside the curves that the authors released: the same algorithm, task and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..experiment.results import Results, Setting
from .lab import Lab
from .published import EVERY, TABLE2, Released, released
from .tasks import METHODS, SEEDS, Task
from .write import table

LOST = 0.15  # accuracy of a released run that has diverged: it names one class
NAMES = ("fedavg", "scaffold", "fedsso", "fedsso-dfp")


def same_setting(task: Task, setting: Setting) -> list[Released]:
    """The released curves of a setting: the same federation, model, start, algorithm and steps."""
    hyper, tau = setting.spec.hyper, setting.spec.options["local_steps"]
    if task.name not in TABLE2 or hyper.get("guard", "none") != "none":
        return []
    start = "zero" if task.convex else "default"
    return [
        curve
        for curve in released(task.name, setting.algorithm, tau)
        if (curve.partition, curve.init) == (task.data["partition"], start)
        and (curve.alpha, curve.eta) == (hyper.get("alpha"), hyper.get("eta", 1.0))
    ]


def against_released(lab: Lab, task: Task, grids: Mapping[str, Results]) -> list[str]:
    """A table of the released curves whose setting is in our grids and, for the convex model,
    FedAvg's with τ = 1."""
    ours = [(name, setting) for name in NAMES for setting in grids[name].settings()]
    if task.convex:
        alphas = sorted({c.alpha for c in released(task.name, "fedavg", 1) if c.init == "zero"})
        single = lab.study(
            task,
            [METHODS["fedavg"].at(alpha=a) for a in alphas],
            SEEDS[: task.choosing],
            local_steps=1,
        )
        ours += [("fedavg", setting) for setting in single.settings()]
    rows = [
        _row(name, curve, setting)
        for name, setting in ours
        for curve in same_setting(task, setting)
    ]
    head = (
        "Beside the authors' released curves (one run each; the CNN's start from the model of "
        "torch's seed 0, as our "
        "seed 0 does). Inside: share of the compared rounds in which theirs lies within the range "
        "of our "
        "seeds, widened by 0.01:"
    )
    return [head, table(rows)] if rows else []


def _row(name: str, curve: Released, ours: Setting) -> dict[str, str]:
    rounds = np.arange(len(curve.accuracy)) * EVERY
    values = np.stack([trace["test_accuracy"][rounds] for trace in ours.traces])
    theirs = np.array(curve.accuracy)
    inside = (theirs >= values.min(0) - 0.01) & (theirs <= values.max(0) + 0.01)
    lost = ours.diverged == len(ours.seeds) and theirs[-1] < LOST
    return {
        "algorithm": METHODS[name].title,
        "setting": f"α={curve.alpha:g}"
        + (f" η={curve.eta:g}" if curve.algorithm == "fedsso" else ""),
        "τ": str(curve.tau),
        "theirs at the end": f"{theirs[-1]:.3f}",
        "ours": _range(values[:, -1]),
        "their best": f"{curve.best:.3f}",
        "our best": _range(values.max(1)),
        "mean difference from seed 0": f"{np.abs(theirs - values[0]).mean():.3f}",
        "inside": "both diverge" if lost else f"{inside.mean():.0%}",
    }


def _range(values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    return f"{min(values):.3f}–{max(values):.3f}"
