"""Our runs beside the curves that the authors released: the same algorithm, task and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..study import Setting, Study
from .lab import TAU, Lab
from .published import EVERY, Released, released
from .tasks import METHODS, SEEDS, Task
from .write import table

NAMES = ("fedavg", "scaffold", "fedsso")


def against_released(lab: Lab, task: Task, grids: Mapping[str, Study]) -> list[str]:
    """A table of the released curves whose setting is in our grids and, for the convex model, FedAvg's with τ = 1."""
    pairs = [(curve, grids[name]) for name in NAMES for curve in released(task.name, name, TAU)]
    if task.convex:
        single = [c for c in released(task.name, "fedavg", 1) if c.init == "zero"]
        alphas = sorted({c.alpha for c in single if c.partition == task.data["partition"]})
        ours = lab.study(task, [METHODS["fedavg"].at(alpha=a) for a in alphas], SEEDS[: task.choosing], local_steps=1)
        pairs += [(curve, ours) for curve in single]
    found = [(curve, _same(curve, grid, task)) for curve, grid in pairs]
    rows = [_row(curve, ours) for curve, ours in found if ours is not None]
    head = (
        "Beside the authors' released curves (one run each; the CNN's from the model of torch's seed 0, ours from "
        "those of seeds 0 to 2). Inside: share of the compared rounds in which theirs lies within the range of our "
        "seeds, widened by 0.01:"
    )
    return [head, table(rows)] if rows else []


def _same(curve: Released, grid: Study, task: Task) -> Setting | None:
    """The setting of our grid that a released curve has."""
    start = "zero" if task.convex else "default"
    if curve.init != start or curve.partition != task.data["partition"]:
        return None
    for setting in grid:
        hyper = setting.spec.hyper
        if hyper["alpha"] == curve.alpha and hyper.get("eta", 1.0) == curve.eta:
            return setting
    return None


def _row(curve: Released, ours: Setting) -> dict[str, str]:
    rounds = np.arange(len(curve.accuracy)) * EVERY
    values = np.stack([trace["test_accuracy"][rounds] for trace in ours.traces])
    theirs = np.array(curve.accuracy)
    inside = (theirs >= values.min(0) - 0.01) & (theirs <= values.max(0) + 0.01)
    return {
        "algorithm": METHODS[curve.algorithm].title,
        "setting": f"α={curve.alpha:g}" + (f" η={curve.eta:g}" if curve.algorithm == "fedsso" else ""),
        "τ": str(curve.tau),
        "theirs at the end": f"{theirs[-1]:.3f}",
        "ours": _range(values[:, -1]),
        "their best": f"{curve.best:.3f}",
        "our best": _range(values.max(1)),
        "mean difference": f"{np.abs(theirs - values.mean(0)).mean():.3f}",
        "inside": f"{inside.mean():.0%}",
    }


def _range(values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> str:
    return f"{min(values):.3f}–{max(values):.3f}"
