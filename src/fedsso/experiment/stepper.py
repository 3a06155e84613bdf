"""A simulation that is advanced by hand, round by round.

`simulate` trains to the end and returns a run. `Simulation` is for those who want to look at the
model between rounds, stop by a rule of their own, or plot while it trains. It takes the same
arguments, is checked in the same way, and computes the same numbers. It writes no folder.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..algorithm import Algorithm
from ..engine.settings import with_options
from ..engine.simulate import Trials, run
from ..errors import InputError
from ..models.adapters import merged
from ..objective.backend import buffers_into, unravel_into
from .execute import traces
from .plan import Planned, check, record_of, settings_of
from .problem import pose
from .revive import specify

if TYPE_CHECKING:
    from ..data import Federation
    from .trace import Trace


log = logging.getLogger("fedsso")


@with_options
class Simulation(Trials):
    """Trains round by round, under your control.

    Each step returns the numbers of its round. `algorithm` may be a list of records that differ
    in numbers only: these are trained together, and every number is a tensor [trials].

    `k` is the number of rounds so far, `server` the state of the algorithm's server, and
    `rows` holds the numbers of every round, from the initial model on. `done` says whether
    anything is left to train: a run that diverges is done early, and a warning says so.

    Args:
        fed: The federated data.
        model: A name or your own `nn.Module`, which is copied.
        algorithm: A name, a record, or a list of records that can be trained together.

    Raises:
        InputError: As for `simulate`; also if the records of a list differ in their algorithm or
            in more than numbers.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> simulation = fedsso.Simulation(fed, "mclr", "fedsso", rounds=20)
    >>> for row in simulation:
    ...     if row["test_accuracy"] > 0.8:
    ...         break
    >>> simulation.k < 20, simulation.trace().rounds_to(0.8) == simulation.k
    (True, True)

    Several step sizes at once:

    >>> steps = [fedsso.FedAvg(alpha=a) for a in (0.01, 0.1)]
    >>> fedsso.Simulation(fed, "mclr", steps, rounds=2).step()["test_accuracy"].shape
    torch.Size([2])
    """

    def __init__(
        self,
        fed: Federation,
        model: str | nn.Module = "mclr",
        algorithm: str | Algorithm | Sequence[Algorithm] = "fedsso",
        **options: Any,
    ) -> None:
        if isinstance(algorithm, Iterable) and not isinstance(algorithm, str):
            records = [record_of(one) for one in algorithm]
        else:
            records = [record_of(algorithm)]
        if not records:
            raise InputError("at least one algorithm is needed, got an empty list")
        problem = pose(fed, model, settings_of(options))
        # The settings as plain values: `trace` takes the number of rounds and the seed from them.
        self.specs = [specify(problem, model, record, i) for i, record in enumerate(records)]
        pairs = zip(self.specs, records, strict=True)
        check([Planned(spec, record, problem) for spec, record in pairs])
        super().__init__(problem, records)

    def step(self) -> dict[str, Any]:
        """Train for one round, and return its row of the trace.

        Returns:
            The numbers of the round by the names of the trace's columns, such as "train_loss" and
            "bytes_up". Metrics are there in rounds that are evaluated (`eval_every`). With several
            trials, every value is a tensor [trials].

        Raises:
            InputError: It is done; the message says why.
        """
        if self.done:
            raise InputError(self._why_done())
        run(self, self.k + 1)
        if self.finished and bool((self.diverged > 0).any()):
            log.warning("%s", self._why_done())
        row = self.rows[-1]
        if self.trials > 1:
            return dict(row)
        return {name: value[0].item() for name, value in row.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Step until it is done.

        A loop that was left by `break` can be continued by another one.
        """
        while not self.done:
            yield self.step()

    @property
    def done(self) -> bool:
        """Whether nothing is left to train.

        All rounds are done, or every trial has diverged or reached `stop_at`.
        """
        return self.finished or self.k >= self.settings.rounds

    def _why_done(self) -> str:
        """A sentence that says why nothing is left to train, and what to do about it."""
        lost = [k for k in self.diverged.tolist() if k]
        if not self.finished:
            return f"all {self.k} rounds are done; build the simulation with more rounds"
        if not lost:
            return f"stop_at={self.settings.stop_at:g} was reached in round {self.k}; leave it out"
        which = "it" if self.trials == 1 else f"{len(lost)} of {self.trials} trials"
        rounds = ", ".join(str(k) for k in sorted(set(lost)))
        return (
            f"{which} diverged in round {rounds}; nothing is left to train: use a smaller step size"
        )

    def model(self, trial: int = 0) -> nn.Module:
        """The model as it is now, a new copy on the CPU, in evaluation mode.

        Where every client has a model of its own, this is their weighted mean. The adapters of
        `fedsso.lora` are merged into the weights that they belong to.

        Args:
            trial: Which of several records; 0 where there is one.
        """
        models = self.models()
        if models.dim() > 2:
            models = torch.tensordot(self.p.to(models), models, 1)
        module = copy.deepcopy(self.job.module).to("cpu", models.dtype)
        unravel_into(module, models[trial].cpu())
        with torch.no_grad():
            buffers_into(module, self.buffers[trial].cpu())
        return merged(module).eval()

    def trace(self, trial: int = 0) -> Trace:
        """The rounds so far, as the trace of a run has them.

        Args:
            trial: Which of several records; 0 where there is one.
        """
        return traces(self, self.specs)[trial]
