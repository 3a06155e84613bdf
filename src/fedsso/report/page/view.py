"""The content of a page with everything that several of its parts ask for.

Curves are known by their place in the content. Three choices are made here, once for the whole
page: which accuracy settings are compared by, which setting of an algorithm is its best, and which
curves are drawn at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..styles import Style, styles
from ..tables import default_targets, numbers, rounds_table

if TYPE_CHECKING:
    from ..tables import Curve, Numbers
    from .content import Content

FEW = 10  # curves that are all drawn at first; of more only the best of each algorithm


class View:
    """The content, its numbers, and what follows from them.

    Attributes:
        apart: Whether the runs are of different federations, so that they do not compare.
        targets: The accuracies of the table, in ascending order.
        numbers: The numbers of each curve.
        rows: The same as text, by the names of the columns.
        front: The places of the curves that count, which are all but the background.
        algorithms: The algorithms of these curves.
        target: The accuracy that cards compare by; None where no curve reaches any.
        shown: The places of the curves that are drawn at first.
        looks: The style of each curve, by its place.
    """

    def __init__(self, content: Content) -> None:
        self.content = content
        self.entries = content.entries
        self.curves = content.curves
        self.apart = len({entry.data for entry in self.entries}) > 1
        self.targets = _targets(content)
        self._count()
        led = {entry.origin for entry in self.entries if entry.lead}
        self.front = []
        for i, entry in enumerate(self.entries):
            if entry.lead or entry.origin not in led:
                self.front.append(i)
        names = [self.curves[i].algorithm for i in self.front]
        self.algorithms = list(dict.fromkeys(names))
        self.title = content.title or f"fedsso: {', '.join(self.algorithms)}"
        self.target = self._wished_target() or self._common_target()
        self.shown = self.front
        if len(self.front) > FEW:
            self.shown = self.best(self.front)
        self.looks = self._looks()

    def _count(self) -> None:
        """Compute the numbers of all curves; accuracies at the end are a sweep's, where given."""
        self.rows = rounds_table(self.curves, self.targets)
        self.numbers = numbers(self.curves, self.targets)
        for i, entry in enumerate(self.entries):
            if entry.ends:
                self.numbers[i] = _ended(self.numbers[i], entry.ends)
                self.rows[i]["final accuracy"] = _end_text(self.numbers[i])
        self.hits: dict[tuple[int, float], float | None] = {}
        for i, curve in enumerate(self.curves):
            for target in self.targets:
                self.hits[i, target] = _hits(curve, target)

    # ---- the accuracy to compare by ----

    def _wished_target(self) -> float | None:
        """The goal, if some setting reaches it."""
        goal = self.content.goal
        if goal is None:
            return None
        known = any(self.hits.get((i, goal)) is not None for i in self.front)
        return goal if known else None

    def _common_target(self) -> float | None:
        """The highest target that every algorithm reaches with some setting.

        If there is none, the highest that one algorithm reaches.
        """
        common = []
        reached = []
        for target in self.targets:
            able = {self.curves[i].algorithm for i in self.front if self.reaches(i, target)}
            if len(able) == len(self.algorithms):
                common.append(target)
            if able:
                reached.append(target)
        return max(common or reached, default=None)

    def reaches(self, i: int, target: float) -> bool:
        """Whether every seed of a curve reaches the target."""
        return self.hits[i, target] is not None

    # ---- the best settings ----

    def end(self, i: int) -> float:
        """How good a curve is at its end; small is good.

        This is the final accuracy with a minus sign. Where there is no accuracy, it is the final
        test loss, or else the training loss.
        """
        final = self.numbers[i]["final_accuracy"]["mean"]
        if final is not None:
            return -final
        traces = self.curves[i].traces
        for name in ("test_loss", "train_loss"):
            loss = float(np.mean([trace.final(name) for trace in traces]))
            if np.isfinite(loss):
                return loss
        return np.inf

    def _rank(self, i: int) -> tuple[float, float]:
        """Fewest rounds to the goal, or else to the common target; among equals the best end."""
        goal = self.content.goal
        if goal is None:
            goal = self.target
        rounds = None if goal is None else self.hits.get((i, goal))
        return np.inf if rounds is None else rounds, self.end(i)

    def best(self, places: Sequence[int]) -> list[int]:
        """The best curve of each algorithm among some, on each federation."""
        found: dict[tuple[str, str], int] = {}
        for i in sorted(places, key=self._rank):
            key = (self.entries[i].data, self.curves[i].algorithm)
            found.setdefault(key, i)
        chosen = []
        for data in dict.fromkeys(entry.data for entry in self.entries):
            for name in self.algorithms:
                if (data, name) in found:
                    chosen.append(found[data, name])
        return chosen

    def _looks(self) -> dict[int, Style]:
        """The style of each curve.

        Curves that are shown at first have their algorithm's own colour. The others are shades.
        """
        others = [i for i in range(len(self.curves)) if i not in self.shown]
        looks: dict[int, Style] = {}
        for own in (self.shown, others):
            curves = [self.curves[i] for i in own]
            looks |= zip(own, styles(curves), strict=True)
        return looks


def _targets(content: Content) -> list[float]:
    """The accuracies of the table, the goal among them if it is one."""
    wished = content.targets
    if wished is None:
        wished = default_targets(content.curves)
    found = set(wished)
    if content.goal is not None and content.goal <= 1:
        found.add(content.goal)
    return sorted(found)


def _ended(one: Numbers, ends: Sequence[float]) -> Numbers:
    """The numbers with the accuracies at the end as a sweep counts them."""
    sd = float(np.std(ends, ddof=1)) if len(ends) > 1 else None
    mean = float(np.mean(ends))
    return {**one, "final_accuracy": {"mean": mean, "sd": sd, "count": len(ends)}}


def _end_text(one: Numbers) -> str:
    """The accuracy at the end, in the words of a sweep's own table."""
    stat = one["final_accuracy"]
    text = f"{stat['mean']:.4f}"
    if stat["sd"] is not None:
        text += f" ± {stat['sd']:.4f}"
    if one["diverged"]:
        text += f", {len(one['diverged'])} of {one['seeds']} diverged"
    return text


def _hits(curve: Curve, target: float) -> float | None:
    """Mean rounds of a curve to a target; None unless every seed gets there."""
    reached = [trace.rounds_to(target) for trace in curve.traces]
    found = [hit for hit in reached if hit is not None]
    if len(found) < len(reached):
        return None
    return float(np.mean(found))
