"""What all strategies have in common.

They count rounds on after a resume, they keep a trace, and they can keep checkpoints in a folder.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, overload

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ..errors import InputError, integer
from ..experiment.trace import Trace
from ..report.tables import Curve
from .folder import Folder, Saved
from .journal import Journal, Metrics, tells_loss
from .privacy import chain
from .screen import screen, tell
from .settings import join_logs, told
from .wire import arrays_of

log = logging.getLogger("flwr")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
"""A user's function that evaluates the model after a round, on the server."""


class Recorded(Strategy):
    """A strategy with a trace and, if wished, checkpoints.

    Rounds are numbered from 1 over all runs of a folder: a resumed run goes on counting. Flower
    numbers the rounds of each run from 1, so the number of rounds before is added everywhere.

    A subclass gives `configure_train`, `aggregate_train` and `_restore`, and calls `_settle` at the
    end of each round, whether the model has moved or not.
    """

    inner: Strategy
    """The strategy that samples nodes and evaluates."""
    name: str
    """The name of the algorithm in the registry."""
    journal: Journal
    """What becomes the trace."""
    folder: Folder | None
    """Where checkpoints are kept, if they are."""
    every: int
    """After how many rounds the checkpoint is written again."""
    diagnostics: bool
    """Whether Flower's metrics hold the package's own."""
    k: int
    """How many rounds are done."""
    moved: bool
    """Whether one of the rounds since the start moved the model."""

    def __init__(
        self,
        name: str,
        settings: str,
        checkpoint_dir: str | Path | None,
        checkpoint_every: int,
        diagnostics: bool,
    ) -> None:
        """Begin a trace, and open the folder of checkpoints if there is one.

        Args:
            name: The name of the algorithm in the registry.
            settings: A text that tells runs apart. A run goes on only from a checkpoint with the
                same text.
            checkpoint_dir: The folder, or None.
            checkpoint_every: After how many rounds the checkpoint is written again.
            diagnostics: Whether Flower's metrics hold the package's own.
        """
        join_logs()
        self.name = name
        self.journal = Journal()
        self.folder = None
        if checkpoint_dir is not None:
            self.folder = Folder(checkpoint_dir, settings)
        self.every = integer("checkpoint_every", checkpoint_every, 1)
        self.diagnostics = diagnostics
        self.k = 0
        self.moved = False
        # The last round, if it is not on the disk yet.
        self._unsaved: Callable[[], Saved] | None = None
        # How many rounds were done before this start.
        self._before = 0
        # How long an exchange may take, in seconds.
        self._timeout: float | None = None
        # The rounds whose model the user's function gave a loss.
        self._central: set[int] = set()
        # The messages of the last evaluation.
        self._evaluates: list[Message] = []

    @abstractmethod
    def _restore(self, saved: Saved) -> None:
        """Take over the state of a checkpoint."""

    @overload
    def resume(self, initial_arrays: ArrayRecord) -> ArrayRecord: ...

    @overload
    def resume(self, initial_arrays: None = None) -> ArrayRecord | None: ...

    def resume(self, initial_arrays: ArrayRecord | None = None) -> ArrayRecord | None:
        """Restore the last complete round, and return its model for `start`.

        Without a checkpoint, `initial_arrays` comes back. Give the arrays of your network, so that
        a checkpoint of another network is refused:

            arrays = strategy.resume(ArrayRecord(net.state_dict()))
            strategy.start(grid, arrays, num_rounds=strategy.rounds_left(100))

        Raises:
            InputError: The checkpoint is damaged, or of a run with other settings or another
                network.
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
        self.k = saved.k
        self._before = saved.k
        self.journal.restore(saved.k, self.folder.trace)
        log.info("%s continues after round %d (%s)", self.name, saved.k, self.folder.path)
        return saved.arrays

    def rounds_left(self, rounds: int) -> int:
        """How many of `rounds` rounds are still to do, by this run and those that it resumes.

        It looks into the folder if `resume` has not been called. It is never negative.
        """
        done = self.k
        if self.folder is not None and self.k == 0:
            saved = self.folder.load()
            done = 0 if saved is None else saved.k
        return max(0, rounds - done)

    @property
    def trace(self) -> Trace:
        """One row for each round, as of a simulation: losses, curvature, bytes, seconds."""
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
        """Run the rounds. The arguments are those of Flower's own strategies.

        A resumed run counts its rounds on, also towards clients and `evaluate_fn`.

        Args:
            grid: What Flower's ServerApp is given, to reach the nodes.
            initial_arrays: The model to begin with, or what `resume` returns.
            num_rounds: How many rounds to run. 0 is allowed.
            timeout: How long to wait for the replies of an exchange, in seconds.
            train_config: What clients are told for training.
            evaluate_config: What clients are told for evaluation.
            evaluate_fn: Evaluates the model on the server, after every round.

        Returns:
            Flower's result: the model, and the metrics of all rounds.
        """
        self._before = self.k
        self.moved = False
        self._timeout = timeout
        central = None if evaluate_fn is None else self._recorded(evaluate_fn)
        try:
            self._claim()
            if self.k and not self.journal.has(self.k):
                config = evaluate_config or ConfigRecord()
                self._evaluate_again(grid, initial_arrays, config, timeout)
            result = super().start(
                grid,
                initial_arrays,
                num_rounds,
                timeout,
                train_config,
                evaluate_config,
                central,
            )
            self._save()
        finally:
            if self.folder is not None:
                self.folder.release()
        if not len(result.arrays):  # no round, or none that moved the model
            result.arrays = initial_arrays
        result.arrays = self._returned(result.arrays)
        if num_rounds > 0 and not self.moved:
            log.error("%s: no round moved the model; see above who was dropped, and why", self.name)
        if num_rounds == 0:
            log.info("%s: all %d rounds are done", self.name, self.k)
        return result

    def _returned(self, last: ArrayRecord) -> ArrayRecord:
        """The model that `start` returns."""
        return last

    def _evaluate_again(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        config: ConfigRecord,
        timeout: float,
    ) -> None:
        """Evaluate the model of the last round, if the run ended before it could do so."""
        messages = list(self.configure_evaluate(0, arrays, config, grid))
        if messages:
            replies = list(grid.send_and_receive(messages, timeout=timeout))
            self.aggregate_evaluate(0, replies)

    def _claim(self) -> None:
        """Hold the folder, whoever calls the rounds: `start`, or a loop of the user's own."""
        if self.folder is not None:
            self.folder.claim(self.k)

    def _settle(self, k: int, reason: str, saved: Callable[[], Saved]) -> None:
        """Round k is over: put everything on the disk, if it is its turn.

        `reason` says why the round kept the old model. It is empty if the model has moved.
        """
        if reason:
            log.warning("%s: round %d keeps the model: %s", self.name, k, reason)
        self._claim()
        self.k = k
        if not reason:
            self.moved = True
        self._unsaved = saved
        if k % self.every == 0:
            self._save()

    def _save(self) -> None:
        """Put the last round on the disk, if it is not there yet."""
        if self.folder is not None and self._unsaved is not None:
            self.folder.save(self._unsaved(), self.trace)
        self._unsaved = None

    def _told(self, metrics: Metrics, numbers: Mapping[str, float]) -> MetricRecord:
        """The metrics of a round: the clients', and the package's own if they are wished for."""
        own = told(numbers) if self.diagnostics else {}
        return MetricRecord({**(metrics or {}), **own})

    # ---- evaluation ----

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The messages of the inner strategy."""
        k = self._before + server_round
        messages = self.inner.configure_evaluate(k, arrays, config, grid)
        self._evaluates = list(messages)
        return self._evaluates

    def aggregate_evaluate(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """The metrics that the inner strategy makes of the replies that can be used."""
        replies = list(replies)
        if not replies and not self._evaluates:
            return None
        k = self._before + server_round
        weight_key = of(self.inner, "weighted_by_key", "num-examples")
        found = screen(replies, self._evaluates, None, weight_key)
        tell("aggregate_evaluate", found)
        if not found.good:
            return None
        messages = [reply.message for reply in found.good]
        try:
            metrics = self.inner.aggregate_evaluate(k, messages)
        except Exception:
            log.exception("%s: %s failed on the evaluation", self.name, type(self.inner).__name__)
            return None
        self._evaluated(k, metrics)
        return metrics

    def _recorded(self, evaluate_fn: Evaluate) -> Evaluate:
        """The user's evaluation on the server.

        Its round numbers count on, and its metrics enter the trace.
        """

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            k = self._before + server_round
            metrics = evaluate_fn(k, arrays)
            self._evaluated(k, metrics)
            if tells_loss(metrics):
                self._central.add(k)
            return metrics

        return evaluate

    def _evaluated(self, k: int, metrics: MetricRecord | None) -> None:
        """Put metrics into the trace, also into the one on the disk."""
        self.journal.evaluated(k, metrics)
        if self.folder is not None and self.k:
            self.trace.save(self.folder.trace)


def _check_same_network(
    path: Path,
    saved: ArrayRecord,
    own: ArrayRecord | None,
) -> None:
    """Raise InputError if a checkpoint is of another network than the one given."""
    if own is None:
        return
    held = _kinds(saved)
    given = _kinds(own)
    for name in {**held, **given}:
        was = held.get(name, "missing")
        now = given.get(name, "missing")
        if was != now:
            raise InputError(
                f"{path} holds another network: its {name} is {was}, that of the network given is "
                f"{now}; use the same network or another checkpoint_dir"
            )


def _kinds(record: ArrayRecord) -> dict[str, str]:
    """The type and shape of each array, as text."""
    return {name: f"{a.dtype} of shape {a.shape}" for name, a in arrays_of(record).items()}


def of(strategy: Strategy, name: str, default: Any) -> Any:
    """An attribute of a strategy, or of the first one that it wraps which has it."""
    for one in chain(strategy):
        if hasattr(one, name):
            return getattr(one, name)
    return default
