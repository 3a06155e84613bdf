"""Our runs beside the curves that the authors released: the same algorithm, task and steps.

A released curve is one run with one draw of the mini-batches. Ours have several seeds. If ours are
right, the released curve should look like one more seed. So the table on the page of Table 2 says
in how many rounds it lies within the range of our seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .published import EVERY, TABLE2, Released, released
from .tasks import METHODS, SEEDS, Task
from .write import table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..experiment.results import Results, Setting
    from .lab import Lab

LOST = 0.15
"""A released run that has diverged ends below this accuracy: it names one class of ten."""
MARGIN = 0.01
"""What is added to both ends of the range of our seeds."""
NAMES = ("fedavg", "scaffold", "fedsso", "fedsso-dfp")
"""The methods that may have released curves."""
HEAD = (
    "Beside the authors' released curves (one run each; the CNN's start from the model of "
    "torch's seed 0, as our seed 0 does). Inside: share of the compared rounds in which theirs "
    "lies within the range of our seeds, widened by 0.01:"
)


def same_setting(task: Task, setting: Setting) -> list[Released]:
    """The released curves of a setting: the same federation, model, start, algorithm and steps.

    There are none for FedSSO with a guard, which the authors do not have.

    Args:
        task: The task that the setting was run on. One that is not in the paper has no curves.
        setting: Our runs of one algorithm with its hyper-parameters.

    Returns:
        Usually one curve or none.
    """
    hyper = setting.spec.hyper
    if task.name not in TABLE2 or hyper.get("guard", "none") != "none":
        return []
    tau = setting.spec.options["local_steps"]
    start = "zero" if task.convex else "default"
    ours = (task.data["partition"], start, hyper.get("alpha"), hyper.get("eta", 1.0))
    same = []
    for curve in released(task.name, setting.algorithm, tau):
        if (curve.partition, curve.init, curve.alpha, curve.eta) == ours:
            same.append(curve)
    return same


def against_released(
    lab: Lab,
    task: Task,
    grids: Mapping[str, Results],
) -> list[str]:
    """A heading and a table of the released curves whose setting is in our grids.

    For the convex model FedAvg with τ = 1 is added, which our grids do not have. Without any such
    curve there is neither heading nor table.

    Args:
        lab: Runs what is missing.
        task: A block of the paper's Table 2.
        grids: Our runs by method. All methods of `NAMES` must be there.

    Returns:
        Two parts of a Markdown page, or none.
    """
    ours = []
    for name in NAMES:
        for setting in grids[name].settings():
            ours.append((name, setting))
    if task.convex:
        for setting in _single_steps(lab, task).settings():
            ours.append(("fedavg", setting))
    rows = []
    for name, setting in ours:
        for curve in same_setting(task, setting):
            rows.append(_row(name, curve, setting))
    return [HEAD, table(rows)] if rows else []


def _single_steps(lab: Lab, task: Task) -> Results:
    """FedAvg with τ = 1, which no grid of ours has, at the client steps of the released curves.

    Only curves that start from zero count, as our runs of the convex model do.
    """
    curves = released(task.name, "fedavg", 1)
    alphas = sorted({curve.alpha for curve in curves if curve.init == "zero"})
    records = [METHODS["fedavg"].at(alpha=alpha) for alpha in alphas]
    return lab.study(task, records, SEEDS[: task.choosing], local_steps=1)


def _row(
    name: str,
    curve: Released,
    ours: Setting,
) -> dict[str, str]:
    """One released curve beside our seeds of the same setting.

    They are compared in the rounds that the released curve has, every fifth. Where theirs diverges
    and all of our seeds do, their accuracies mean nothing and are not compared. The last column but
    one is the mean of |theirs - ours| for our seed 0, whose initial model is theirs.
    """
    rounds = np.arange(len(curve.accuracy)) * EVERY
    values = np.stack([trace["test_accuracy"][rounds] for trace in ours.traces])  # [seed, round]
    theirs = np.array(curve.accuracy)
    above = theirs >= values.min(0) - MARGIN
    below = theirs <= values.max(0) + MARGIN
    inside = f"{(above & below).mean():.0%}"
    if ours.diverged == len(ours.seeds) and theirs[-1] < LOST:
        inside = "both diverge"
    setting = f"α={curve.alpha:g}"
    if curve.algorithm == "fedsso":
        setting += f" η={curve.eta:g}"
    difference = np.abs(theirs - values[0]).mean()
    return {
        "algorithm": METHODS[name].title,
        "setting": setting,
        "τ": str(curve.tau),
        "theirs at the end": f"{theirs[-1]:.3f}",
        "ours": _range(values[:, -1]),
        "their best": f"{curve.best:.3f}",
        "our best": _range(values.max(1)),
        "mean difference from seed 0": f"{difference:.3f}",
        "inside": inside,
    }


def _range(values: NDArray[np.float64]) -> str:
    """The smallest and the largest value, as text, with a dash between them."""
    return f"{min(values):.3f}–{max(values):.3f}"
