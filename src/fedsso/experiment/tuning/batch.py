"""Some settings trained stacked, of which the worse ones are dropped on the way.

All runs of the settings advance together from one rung to the next. There the settings are
compared, and the stacks go on without those that are dropped. A dropped run is kept as what it is:
a whole run of fewer rounds, whose settings say so. So nobody can take it for a longer one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

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
        self.simulation = Trials(self.planned[0].problem, [run.record for run in self.planned])

    def traces(self) -> dict[int, Trace]:
        """The traces so far, by place in the batch."""
        found = traces(self.simulation, [run.spec for run in self.planned])
        return dict(zip(self.members, found, strict=True))

    def drop(self, lost: Collection[int]) -> None:
        """Go on without some of the runs: the state of the others moves into a smaller stack."""
        stay = [place for place, member in enumerate(self.members) if member not in lost]
        if len(stay) == len(self.members):
            return
        self.members = [self.members[place] for place in stay]
        self.planned = [self.planned[place] for place in stay]
        if not stay:
            return
        saved = {}
        for name, tensor in self.simulation.state().items():
            axis = 1 if name.startswith("rows.") else 0
            index = torch.tensor(stay, device=tensor.device)
            saved[name] = tensor if name in WHOLE else tensor.index_select(axis, index)
        self.simulation = Trials(self.planned[0].problem, [run.record for run in self.planned])
        self.simulation.restore(saved)


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
    stacks = [Stack(planned, chunk) for chunk in chunks(planned, range(len(planned)))]
    runs: dict[int, Run] = {}
    for rung in [*rungs, rounds]:
        for stack in stacks:
            _advance(stack, rung, show)
        if rung == rounds:
            break
        values = _values(stacks, settings)
        losers = set(compare(rung, values)) if values else set()
        lost = {i for i, setting in enumerate(settings) if setting in losers}
        for stack in stacks:
            for member, trace in stack.traces().items():
                if member in lost:
                    runs[member] = _shortened(planned[member], trace)
            stack.drop(lost)
        stacks = [stack for stack in stacks if stack.members]
    for stack in stacks:
        for member, trace in stack.traces().items():
            runs[member] = Run(planned[member].spec, trace)
    return [runs[i] for i in range(len(planned))]


def _advance(stack: Stack, rung: int, show: Progress | None) -> None:
    """Advance a stack to a round."""
    spec = stack.planned[0].spec
    label = f"{spec.algorithm}, seed {spec.seed}, {len(stack.members)} trials"

    def after(simulation: Trials) -> None:
        row = simulation.rows[-1]
        numbers = {n: float(row[n].nan_to_num(-1.0).max()) for n in (ACCURACY,) if n in row}
        if show is not None:
            show(label, simulation.k, spec.options["rounds"], numbers)

    advance(stack.simulation, rung, after)


def _values(stacks: Sequence[Stack], settings: Sequence[int]) -> dict[int, float]:
    """What the newest evaluation says of every setting that may be dropped, the mean of its seeds.

    A setting of which a run has diverged or has reached `stop_at` is left alone: it costs nothing
    any more, or is good.
    """
    found: dict[int, list[float]] = {}
    for stack in stacks:
        running = (stack.simulation.ended < 0).tolist()
        for runs_on, (member, trace) in zip(running, stack.traces().items(), strict=True):
            value = _newest(trace) if runs_on else np.nan
            found.setdefault(settings[member], []).append(value)
    means = {setting: float(np.mean(values)) for setting, values in found.items()}
    return {setting: mean for setting, mean in means.items() if np.isfinite(mean)}


def _newest(trace: Trace) -> float:
    """The newest accuracy, or the loss with its sign changed where there is no accuracy."""
    if trace.has_accuracy:
        return trace.final()
    return -trace.final(LOSS)


def _shortened(planned: Planned, trace: Trace) -> Run:
    """A run that was dropped, as a run of the rounds that it has."""
    rounds = len(trace) - 1
    spec = planned.spec
    short = {**spec.short, "rounds": str(rounds)}
    return Run(replace(spec, options={**spec.options, "rounds": rounds}, short=short), trace)
