"""How the robustness bench judges a method: by the rounds to a target and by the value at the end.

A task is judged by test accuracy or, where it evaluates the training rows, by their loss. The value
at the end is the mean of the last ten evaluations; a run that diverged has accuracy 0 or an
infinite loss. What is infinite, as the rounds to a target that some seed never reaches, is null in
the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsso.experiment.results import LAST, Results
from fedsso.experiment.trace import Trace

ACCURACY = "test_accuracy"
LOSS = "full_train_loss"
POINTS = 50  # of a curve, about
DECIMALS = {"rounds": 1, "final": 4}  # as they are kept, compared and shown
Score = dict[str, Any]


class Goal(NamedTuple):
    """What a task is judged by."""

    metric: str
    target: float

    @property
    def worst(self) -> float:
        """What a run that diverged has."""
        return 0.0 if self.metric == ACCURACY else math.inf

    def rank(self, value: Any) -> Any:
        """The same number, or array, so that less is better."""
        return -value if self.metric == ACCURACY else value

    def rounds(self, trace: Trace) -> float:
        """The first evaluated round that reaches the target; infinite if none does."""
        at, values = trace.evaluations(self.metric)
        return float(next(iter(at[self.rank(values) <= self.rank(self.target)]), math.inf))

    def final(self, trace: Trace) -> float:
        """The mean of the last evaluations."""
        return self.worst if trace.diverged is not None else trace.final(self.metric, last=LAST)


class Point(NamedTuple):
    """A setting of a grid with the traces of its seeds, judged."""

    label: str
    number: int  # its place in the grid
    traces: Sequence[Trace]
    rounds: float  # mean over the seeds
    finals: list[float]

    @property
    def final(self) -> float:
        return float(np.mean(self.finals))


def judge(label: str, number: int, traces: Sequence[Trace], goal: Goal) -> Point:
    """A setting with what its traces are worth."""
    rounds = float(np.mean([goal.rounds(trace) for trace in traces]))
    return Point(label, number, traces, rounds, [goal.final(trace) for trace in traces])


def points(grid: Results, goal: Goal) -> list[Point]:
    """Every setting of a grid, in its order."""
    return [judge(s.label, i, s.traces, goal) for i, s in enumerate(grid.settings())]


def by_rounds(grid: Iterable[Point], goal: Goal) -> list[Point]:
    """First those that reach the target first; of several, those that end best."""
    return sorted(grid, key=lambda p: (p.rounds, goal.rank(p.final)))


def by_final(grid: Iterable[Point], goal: Goal) -> list[Point]:
    """First those that end best; of several, those that reach the target first."""
    return sorted(grid, key=lambda p: (goal.rank(p.final), p.rounds))


def promising(grid: Sequence[Point], goal: Goal, few: int) -> list[int]:
    """The places of the best few points for rounds and of the best few at the end."""
    best = by_rounds(grid, goal)[:few] + by_final(grid, goal)[:few]
    return sorted({point.number for point in best})


def chosen(grid: Sequence[Point], goal: Goal) -> Score:
    """A tuned method: its best setting for rounds, and its best one at the end."""
    first, last = by_rounds(grid, goal)[0], by_final(grid, goal)[0]
    finals = {"mean": last.final, "low": min(last.finals), "high": max(last.finals)}
    return {
        "rounds": _plain("rounds", {"mean": first.rounds}) | _setting(first, first.rounds),
        "final": _plain("final", finals) | _setting(last, last.final),
        "lost": sum(trace.diverged is not None for trace in last.traces),
    }


def _setting(point: Point, value: float) -> Score:
    """Which setting it is; none where no setting has a value."""
    return {"setting": point.label if math.isfinite(value) else None}


def _plain(what: str, values: Mapping[str, float]) -> Score:
    """Numbers as JSON has them: None for what is not finite."""
    told: Score = {}
    for key, value in values.items():
        told[key] = round(float(value), DECIMALS[what]) if math.isfinite(value) else None
    return told


def curve(point: Point, goal: Goal, rounds: int) -> list[float | None]:
    """The seeds' mean over the rounds, thinned; a diverged run is at the worst from then on."""
    values = np.full((len(point.traces), rounds + 1), goal.worst)
    for row, trace in zip(values, point.traces, strict=True):
        at, own = trace.evaluations(goal.metric)
        row[at] = np.where(np.isfinite(own), own, goal.worst)
    return thin(np.asarray(values.mean(axis=0)))


def thin(values: NDArray[Any]) -> list[float | None]:
    """The first value, then means of a few rounds each."""
    few = max(1, len(values) // POINTS)
    blocks = np.split(values[1:], range(few, len(values) - 1, few))
    means = [float(own.mean()) for own in (values[:1], *blocks)]
    return [round(mean, DECIMALS["final"]) if math.isfinite(mean) else None for mean in means]
