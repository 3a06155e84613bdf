"""Some settings trained stacked, of which the worse ones are dropped on the way.

All runs of the settings advance together from one rung to the next. There the settings are
compared, and the stacks go on without those that are dropped. A dropped run is kept as what it is:
a whole run of fewer rounds, whose settings say so. So nobody can take it for a longer one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...engine.simulate import Trials
from ...engine.simulate import run as advance
from ..execute import Progress, chunks, traces
from ..run import Run
from ..trace import ACCURACY, LOSS, Trace

if TYPE_CHECKING:
    from ..plan import Planned

WHOLE = ("k", "position", "unheard", "contents")
"""What a simulation's state holds of all trials together."""
Compare = Callable[[int, dict[int, float]], Collection[int]]
"""Called as compare(round, values): which settings are dropped. Larger values are better."""


class Stack:
    """Runs of one problem that train together; `members` are their places in the batch."""

    def __init__(self, planned: Sequence[Planned], members: Sequence[int]) -> None:
        self.planned = [planned[i] for i in members]
        self.members = list(members)
        self.simulation = self._begin()

    def _begin(self) -> Trials:
        """The runs before their first round."""
        records = [run.record for run in self.planned]
        return Trials(self.planned[0].problem, records)

    def traces(self) -> dict[int, Trace]:
        """The traces so far, by place in the batch."""
        found = traces(self.simulation, [run.spec for run in self.planned])
        return dict(zip(self.members, found, strict=True))

    def drop(self, lost: Collection[int]) -> None:
        """Go on without some of the runs: the state of the others moves into a smaller stack."""
        places = []
        members = []
        planned = []
        for place, member in enumerate(self.members):
            if member not in lost:
                places.append(place)
                members.append(member)
                planned.append(self.planned[place])
        if len(members) == len(self.members):
            return
        state = self.simulation.state()
        self.members = members
        self.planned = planned
        if members:
            self.simulation = self._begin()
            self.simulation.restore(_selected(state, places))


def _selected(state: Mapping[str, Tensor], places: Sequence[int]) -> dict[str, Tensor]:
    """The state of some of the trials of a stack."""
    found = {}
    for name, tensor in state.items():
        found[name] = tensor
        if name not in WHOLE:
            axis = 1 if name.startswith("rows.") else 0
            index = torch.tensor(places, device=tensor.device)
            found[name] = tensor.index_select(axis, index)
    return found


def train(
    planned: Sequence[Planned],
    settings: Sequence[int],
    rungs: Sequence[int],
    compare: Compare,
    show: Progress | None = None,
) -> list[Run]:
    """Train runs together, and drop the worse settings on the way.

    Args:
        planned: The runs, with equal numbers of rounds.
        settings: For each run the number of its setting; runs of one setting differ in their seed.
        rungs: The rounds after which settings are compared, ascending.
        compare: Says after each of them which settings are dropped.
        show: Called after each round of each stack, or None.

    Returns:
        The runs in their order, without models. Those that were dropped have fewer rounds.
    """
    rounds = planned[0].settings.rounds
    every = range(len(planned))
    stacks = [Stack(planned, chunk) for chunk in chunks(planned, every)]
    runs: dict[int, Run] = {}
    for rung in [*rungs, rounds]:
        for stack in stacks:
            _advance(stack, rung, show)
        if rung == rounds:
            break
        values = _values(stacks, settings)
        losers = compare(rung, values) if values else ()
        lost = [i for i in every if settings[i] in losers]
        for stack in stacks:
            traces_now = stack.traces()
            for i in lost:
                if i in traces_now:
                    runs[i] = _shortened(planned[i], traces_now[i])
            stack.drop(lost)
        stacks = [stack for stack in stacks if stack.members]
    for stack in stacks:
        for i, trace in stack.traces().items():
            runs[i] = Run(planned[i].spec, trace)
    return [runs[i] for i in every]


def _advance(stack: Stack, rung: int, show: Progress | None) -> None:
    """Advance a stack to a round."""
    spec = stack.planned[0].spec
    rounds = spec.options["rounds"]
    label = f"{spec.algorithm}, seed {spec.seed}, {len(stack.members)} trials"

    def after(simulation: Trials) -> None:
        if show is None:
            return
        row = simulation.rows[-1]
        numbers = {}
        if ACCURACY in row:
            known = row[ACCURACY].nan_to_num(-1.0)
            numbers[ACCURACY] = float(known.max())
        show(label, simulation.k, rounds, numbers)

    advance(stack.simulation, rung, after)


def _values(stacks: Sequence[Stack], settings: Sequence[int]) -> dict[int, float]:
    """What the newest evaluation says of every setting that may be dropped, the mean of its seeds.

    A setting of which a run has diverged or has reached `stop_at` is left alone: it costs nothing
    any more, or is good.
    """
    found: dict[int, list[float]] = {}
    for stack in stacks:
        ended = stack.simulation.ended.tolist()
        newest = stack.traces()
        for i, end in zip(stack.members, ended, strict=True):
            value = _newest(newest[i]) if end < 0 else np.nan
            found.setdefault(settings[i], []).append(value)
    means = {}
    for setting, values in found.items():
        mean = float(np.mean(values))
        if np.isfinite(mean):
            means[setting] = mean
    return means


def _newest(trace: Trace) -> float:
    """The newest accuracy, or the loss with its sign changed where there is no accuracy."""
    if trace.has_accuracy:
        return trace.final()
    return -trace.final(LOSS)


def _shortened(planned: Planned, trace: Trace) -> Run:
    """A run that was dropped, as a run of the rounds that it has."""
    rounds = len(trace) - 1
    spec = planned.spec
    options = {**spec.options, "rounds": rounds}
    short = {**spec.short, "rounds": str(rounds)}
    shorter = replace(spec, options=options, short=short)
    return Run(shorter, trace)
