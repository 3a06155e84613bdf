"""The content of a page with everything that several of its parts ask for.

Three choices are made here, once for the whole page: which accuracy settings are compared by,
which setting of an algorithm is its best, and which curves are drawn at first. With the target of
a sweep as its goal, a page names the same winners as the table of the sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...experiment.trace import LOSS
from ..styles import Style, looks, style, styles
from ..tables import FINAL_LOSS, default_targets, numbers, rounds_table

if TYPE_CHECKING:
    from ..tables import Curve, Numbers
    from .content import Content, Entry

FEW = 10  # curves that are all drawn at first; of more only the best of each algorithm


@dataclass(eq=False)
class Item:
    """One curve of the page, with its numbers.

    Attributes:
        place: Its place in the content, by which the script knows it.
        entry: The curve, and where it belongs on the page.
        numbers: Its numbers.
        row: The same as text, by the names of the columns.
        hits: Mean rounds to each target; None unless every seed gets there.
        look: Its style.
    """

    place: int
    entry: Entry
    numbers: Numbers
    row: dict[str, str]
    hits: dict[float, float | None]
    look: Style

    @property
    def curve(self) -> Curve:
        """The traces, with label and algorithm."""
        return self.entry.curve

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        return self.curve.algorithm

    @property
    def label(self) -> str:
        """The name of the curve on this page."""
        return self.curve.label

    @property
    def final(self) -> float | None:
        """The mean accuracy at the end, if there is one."""
        return self.numbers["final_accuracy"]["mean"]

    @property
    def loss(self) -> float | None:
        """The mean test loss at the end; None unless every seed has one."""
        mean = float(np.mean(self.curve.ends(LOSS)))
        return mean if np.isfinite(mean) else None

    @property
    def end(self) -> float:
        """How good the curve is at its end; small is good.

        This is the final accuracy with a minus sign. Where there is no accuracy, it is the final
        test loss, or else the training loss, both by the rule of `experiment.trace.at_end`.
        """
        if self.final is not None:
            return -self.final
        for name in (LOSS, "train_loss"):
            mean = float(np.mean(self.curve.ends(name)))
            if np.isfinite(mean):
                return mean
        return np.inf

    def reaches(self, target: float) -> bool:
        """Whether every seed reaches the target."""
        return self.hits.get(target) is not None


class View:
    """The content, its numbers, and what follows from them.

    A view is made once for a page, and not changed afterwards.

    Attributes:
        apart: Whether the runs are of different federations, so that they do not compare.
        targets: The accuracies of the table, in ascending order.
        items: All curves.
        by_loss: Whether no curve has an accuracy, so that the final test loss takes its place.
        front: The curves that count, which are all but the background.
        algorithms: The algorithms of these curves.
        title: The heading of the page.
        target: The accuracy that cards compare by; None where no curve on show reaches any.
        shown: The curves that are drawn at first, which the table begins with and the cards
            compare.
    """

    def __init__(self, content: Content) -> None:
        self.content = content
        data = {entry.data for entry in content.entries}
        self.apart = len(data) > 1
        self.targets = _targets(content)
        self.items = _items(content, self.targets)
        self.by_loss = FINAL_LOSS in self.items[0].row
        # Origins in which some entries lead: their other entries are background.
        led = {entry.origin for entry in content.entries if entry.lead}
        self.front = []
        for item in self.items:
            if item.entry.lead or item.entry.origin not in led:
                self.front.append(item)
        names = [item.algorithm for item in self.front]
        self.algorithms = list(dict.fromkeys(names))
        self.title = content.title or f"fedsso: {', '.join(self.algorithms)}"
        self.target = self._target(self.front)
        self.shown = self.front
        if len(self.front) > FEW:
            self.shown = self.best(self.front)
            # The cards are about the curves that are shown: these need not reach the target that
            # some others reach.
            self.target = self._target(self.shown)
        self._choose_looks()

    def end_of(self, item: Item) -> float | None:
        """The number of a curve's last column: the final accuracy, or else the test loss."""
        return item.loss if self.by_loss else item.final

    def _target(self, items: Sequence[Item]) -> float | None:
        """The accuracy by which some curves are compared."""
        return self._wished_target(items) or self._common_target(items)

    def _wished_target(self, items: Sequence[Item]) -> float | None:
        """The goal, if some setting reaches it."""
        goal = self.content.goal
        if goal is None:
            return None
        known = any(item.reaches(goal) for item in items)
        return goal if known else None

    def _common_target(self, items: Sequence[Item]) -> float | None:
        """The highest target that every algorithm reaches with some of these curves.

        If there is none, the highest that one algorithm reaches.
        """
        common = []
        reached = []
        for target in self.targets:
            able = {item.algorithm for item in items if item.reaches(target)}
            if len(able) == len(self.algorithms):
                common.append(target)
            if able:
                reached.append(target)
        return max(common or reached, default=None)

    def best(self, items: Sequence[Item]) -> list[Item]:
        """The best curve of each algorithm among some, on each federation.

        It has the fewest rounds to the goal, or else to the common target. Among equals, the best
        end decides. A goal of infinity is reached by nobody, so the end alone decides.

        Returns:
            At most one curve for each federation and algorithm, in the order of the page.
        """
        goal = self.content.goal
        if goal is None:
            goal = self.target

        def rank(item: Item) -> tuple[float, float]:
            rounds = None if goal is None else item.hits.get(goal)
            return np.inf if rounds is None else rounds, item.end

        found: dict[tuple[str, str], Item] = {}
        for item in sorted(items, key=rank):
            key = (item.entry.data, item.algorithm)
            found.setdefault(key, item)
        federations = dict.fromkeys(item.entry.data for item in self.items)
        chosen = []
        for data in federations:
            for name in self.algorithms:
                if (data, name) in found:
                    chosen.append(found[data, name])
        return chosen

    def _choose_looks(self) -> None:
        """Give each curve its style.

        Curves that are shown at first have their algorithm's own colour. The others are shades.
        """
        known = looks(item.algorithm for item in self.items)
        others = [item for item in self.items if item not in self.shown]
        for own in (self.shown, others):
            curves = [item.curve for item in own]
            for item, look in zip(own, styles(curves, known), strict=True):
                item.look = look


def _items(content: Content, targets: Sequence[float]) -> list[Item]:
    """All curves with their numbers.

    The styles are preliminary: `View` chooses them when it knows which curves are shown.
    """
    curves = content.curves
    every = numbers(curves, targets)
    rows = rounds_table(curves, targets)
    found = []
    for place, entry in enumerate(content.entries):
        one = every[place]
        row = rows[place]
        hits = {target: _hits(entry.curve, target) for target in targets}
        look = style(entry.curve.algorithm)
        found.append(Item(place, entry, one, row, hits, look))
    return found


def _targets(content: Content) -> list[float]:
    """The accuracies of the table, the goal among them if it is one."""
    wished = content.targets
    if wished is None:
        wished = default_targets(content.curves)
    found = set(wished)
    if content.goal is not None and content.goal <= 1:
        found.add(content.goal)
    return sorted(found)


def _hits(curve: Curve, target: float) -> float | None:
    """Mean rounds of a curve to a target; None unless every seed gets there."""
    reached = [trace.rounds_to(target) for trace in curve.traces]
    found = [hit for hit in reached if hit is not None]
    if len(found) < len(reached):
        return None
    return float(np.mean(found))
