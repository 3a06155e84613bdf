"""What the strategies have in common: rounds that count on after a resume, a trace, a folder with
checkpoints."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ..errors import InputError
from ..experiment.trace import Trace
from ..report.tables import Curve
from .folder import Folder, Saved
from .journal import Journal
from .privacy import chain
from .screen import screen, tell
from .wire import arrays_of

log = logging.getLogger("flwr")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Recorded(Strategy):
    """A strategy with a trace and, if wished, checkpoints; `inner` does the evaluation."""

    inner: Strategy

    def __init__(self, name: str, settings: str, checkpoint_dir: str | Path | None) -> None:
        self.name = name  # of the algorithm, in the registry
        self.journal = Journal()
        self.folder = None if checkpoint_dir is None else Folder(checkpoint_dir, settings)
        self.k = 0  # rounds done
        self._before = 0  # rounds done before this start
        self.moved = False  # whether one of the rounds since start moved the model
        self._timeout: float | None = None  # of an exchange, in seconds
        self._evaluates: list[Message] = []  # the last messages

    @abstractmethod
    def _restore(self, saved: Saved) -> None:
        """Take over the state of a checkpoint."""

    def resume(self, initial_arrays: ArrayRecord | None = None) -> ArrayRecord | None:
        """The model of the last complete round, with everything else restored; `initial_arrays`
        without a checkpoint.

        Give the network's own arrays, and a checkpoint of another network is refused.
        """
        saved = None if self.folder is None else self.folder.load()
        if self.folder is None or saved is None:
            log.info("%s: there is no checkpoint, it starts with round 1", self.name)
            return initial_arrays
        _check_same_network(self.folder.file, saved.arrays, initial_arrays)
        try:
            self._restore(saved)
        except (KeyError, TypeError, IndexError, RuntimeError) as error:
            raise InputError(
                f"{self.folder.file} does not hold the state of this strategy ({error}); give "
                f"another checkpoint_dir"
            ) from error
        self.k = self._before = saved.k
        self.journal.restore(saved.k, self.folder.trace)
        log.info("%s goes on after round %d (%s)", self.name, saved.k, self.folder.path)
        return saved.arrays

    def rounds_left(self, rounds: int) -> int:
        """How many of so many rounds are still to do, for this run and those that it resumes."""
        saved = self.folder.load() if self.folder is not None and self.k == 0 else None
        return max(0, rounds - (self.k if saved is None else saved.k))

    @property
    def trace(self) -> Trace:
        """One row per round, as of a simulation: losses, curvature, bytes, seconds."""
        return self.journal.trace

    def curve(self, label: str = "") -> Curve:
        """The run for `fedsso.report`: tables and plots, beside simulations if wished."""
        return Curve(label or f"{self.name} on Flower", (self.trace,), self.name)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the rounds; a resumed run counts on, also towards clients and evaluate_fn."""
        self._before, self.moved, self._timeout = self.k, False, timeout
        central = None if evaluate_fn is None else self._recorded(evaluate_fn)
        try:
            self._claim()
            if self.k and not self.journal.has(self.k):
                self._evaluate_again(
                    grid, initial_arrays, evaluate_config or ConfigRecord(), timeout
                )
            result = super().start(
                grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, central
            )
        finally:
            if self.folder is not None:
                self.folder.release()
        if not len(result.arrays):  # no round, or none that moved the model
            result.arrays = initial_arrays
        if num_rounds > 0 and not self.moved:
            log.error("%s: no round moved the model; see above who was dropped, and why", self.name)
        if num_rounds == 0:
            log.info("%s: all %d rounds are done; the model is that of the last", self.name, self.k)
        return result

    def _evaluate_again(
        self, grid: Grid, arrays: ArrayRecord, config: ConfigRecord, timeout: float
    ) -> None:
        """Evaluate the model of the last round, which the run that made it did not live to do."""
        messages = list(self.configure_evaluate(0, arrays, config, grid))
        if messages:
            self.aggregate_evaluate(0, list(grid.send_and_receive(messages, timeout=timeout)))

    def _claim(self) -> None:
        """Hold the folder, whoever calls the rounds: `start`, or a loop of the user's own."""
        if self.folder is not None:
            self.folder.claim(self.k)

    def _settle(self, k: int, reason: str, saved: Callable[[], Saved]) -> None:
        """Round k is over: say so if it kept the model, and put everything on the disk."""
        if reason:
            log.warning("%s: round %d keeps the model: %s", self.name, k, reason)
        self._claim()
        self.k, self.moved = k, self.moved or not reason
        if self.folder is not None:
            self.folder.save(saved(), self.trace)

    # ---- evaluation ----

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages."""
        self._evaluates = list(
            self.inner.configure_evaluate(self._before + server_round, arrays, config, grid)
        )
        return self._evaluates

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The inner strategy's metrics of the replies that can be used."""
        replies = list(replies)
        if not replies and not self._evaluates:
            return None
        k = self._before + server_round
        found = screen(
            replies, self._evaluates, None, of(self.inner, "weighted_by_key", "num-examples")
        )
        tell("aggregate_evaluate", found)
        if not found.good:
            return None
        try:
            metrics = self.inner.aggregate_evaluate(k, [reply.message for reply in found.good])
        except Exception:
            log.exception("%s: %s failed on the evaluation", self.name, type(self.inner).__name__)
            return None
        self._evaluated(k, metrics)
        return metrics

    def _recorded(self, evaluate_fn: Evaluate) -> Evaluate:
        """The user's central evaluation, with round numbers that count on; its metrics enter the
        trace."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            k = self._before + server_round
            metrics = evaluate_fn(k, arrays)
            self._evaluated(k, metrics)
            return metrics

        return evaluate

    def _evaluated(self, k: int, metrics: MetricRecord | None) -> None:
        self.journal.evaluated(k, metrics)
        if self.folder is not None and self.k:
            self.trace.save(self.folder.trace)


def _check_same_network(path: Path, saved: ArrayRecord, own: ArrayRecord | None) -> None:
    """Refuse a checkpoint of another network than the one given."""
    if own is None:
        return
    held, given = (
        {n: (a.shape, a.dtype) for n, a in arrays_of(arrays).items()} for arrays in (saved, own)
    )
    differ = [name for name in {**held, **given} if held.get(name) != given.get(name)]
    if differ:
        name = differ[0]
        raise InputError(
            f"{path} holds another network: its {name} is {_kind(held.get(name))}, that of the "
            f"network given is "
            f"{_kind(given.get(name))}; use the same network or another checkpoint_dir"
        )


def _kind(array: tuple[tuple[int, ...], object] | None) -> str:
    return "missing" if array is None else f"{array[1]} of shape {array[0]}"


def of(strategy: Strategy, name: str, default: Any) -> Any:
    """An attribute of a strategy or of one that it wraps."""
    return next((getattr(one, name) for one in chain(strategy) if hasattr(one, name)), default)
