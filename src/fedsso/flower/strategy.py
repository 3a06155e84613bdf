"""FedSSO as a Flower strategy: the clients are those of FedAvg, only the server's step is another.

Another strategy (FedAvg, a robust one, a private one) sits inside and does what it always does: it
samples nodes, and turns their replies into one model v. FedSSO then makes its own step from v. So a
guarantee that the inner strategy gives for v holds, whatever FedSSO makes of v.

How the symbols of the paper are called here:

    alpha   eta_l         the clients' learning rate
    tau     local_steps   the number of their local steps
    eta     eta           the server's step
    g                     (x - v) / (alpha tau), an estimate of the gradient

Users of Flower seldom know alpha and tau, and their clients may run Adam, momentum or whole epochs.
So the default here is guard="cautious" (`algorithms/cautious.py`), which needs neither number.

Where FedAvg itself averages and some nodes do not answer, the server remembers what each node sent
last, by its id (`remembered.py`). All other strategies inside show FedSSO nothing but their mean.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from copy import copy
from math import inf
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor

from ..algorithm.contract import Attendance
from ..algorithm.schedule import Step, at
from ..algorithms.cautious import BEYOND
from ..errors import InputError
from ..remembered import Answer, Remembered
from ..server import Answers, Server
from . import privacy, settings
from .answers import shown
from .bounds import Clip, checked
from .folder import Saved
from .journal import BEST, Best
from .recorded import Recorded, of
from .screen import Screened, lighten, screen, shorten, tell
from .settings import FEDAVG, server, split
from .wire import BUFFERS, Arrays, Model, arrays_of, same

log = logging.getLogger("flwr")

PATIENCE = 3
"""After this many failures of the inner strategy in a row, its error is raised."""
OWN = (
    *("eta_l", "local_steps", "inner", "checkpoint_dir", "checkpoint_every", "diagnostics"),
    *("buffers", "clip", "loss_key", "return_best"),
)
"""The keywords that the strategy takes itself."""
STEPPING = (
    flower.FedAdagrad,
    flower.FedAdam,
    flower.FedYogi,
    flower.FedAvgM,
    flower.QFedAvg,
    flower.FedXgbBagging,
    flower.FedXgbCyclic,
)
"""Strategies of Flower that do not only average, but step on their own."""


class FedSSO(Recorded):
    """FedSSO as a strategy of Flower, for clients that train as for FedAvg.

    Args:
        eta_l: The size of the clients' local steps. It only sets the unit in which numbers are
            shown, unless guard is "adaptive" or "none": then it must be what the clients use.
        local_steps: The number of local steps that clients make in a round, the mean if it differs
            among them; likewise.
        inner: The strategy that averages, FedAvg by default.
        checkpoint_dir: A folder that keeps the whole state, for `resume`.
        checkpoint_every: After how many rounds it is written again. `start` also writes the last.
        diagnostics: Whether Flower's metrics hold those named "fedsso-". The trace does anyway.
        buffers: Patterns of the names of arrays that are averaged and never stepped. Arrays of
            integers are always treated so.
        clip: What bounds the influence of one reply. None does not bound it.
        loss_key: The metric in which clients report their training loss. By default "train_loss",
            "train-loss", "training_loss" or "loss", if they report one of these.
        return_best: Whether `start` returns the model with the lowest evaluation loss, not the
            last.
        **keywords: The fields of `fedsso.FedSSO`, such as eta, form, guard, R and memory, and the
            keywords of FedAvg, such as fraction_train and min_train_nodes.

    memory="clients" remembers what each node sent last, and makes up for those that do not answer.
    "none" does not. The default "auto" begins to remember in the first round that a connected node
    does not answer, if FedAvg averages and the memory takes at most 2 GB. Where another strategy
    averages, "clients" is refused.

    >>> strategy = FedSSO(fraction_train=0.5)
    >>> strategy.name
    'fedsso'
    """

    server: Server
    """FedSSO's server: it makes the step, and keeps the curvature."""
    inner: Strategy
    """The strategy that samples nodes and averages."""
    buffers: tuple[str, ...]
    """Patterns of the names of arrays that are averaged and never stepped."""
    clip: Clip | None
    """What bounds the influence of one reply."""
    loss_key: str | None
    """The metric in which clients report their training loss. None: one of the usual names."""
    remembered: Remembered
    """What the nodes sent last, by their ids. Empty without a memory."""
    return_best: bool
    """Whether `start` returns the best model instead of the last."""

    def __init__(
        self,
        *,
        eta_l: Step | None = None,
        local_steps: float | None = None,
        inner: Strategy | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 1,
        diagnostics: bool = True,
        buffers: Sequence[str] = BUFFERS,
        clip: Clip | None = Clip(),  # noqa: B008
        loss_key: str | None = None,
        return_best: bool = False,
        **keywords: Unpack[settings.Typed],
    ) -> None:
        of_record, of_fedavg = split(keywords, OWN, FEDAVG)
        self.server = server(eta_l, local_steps, of_record)
        self.inner = _inner(inner, of_fedavg)
        _check_memory(self.server, self.inner)
        self.remembered = Remembered()
        self.buffers = _patterns(buffers)
        self.loss_key = loss_key
        self.return_best = return_best
        self._best = Best()
        # A private strategy clips by itself.
        is_private = privacy.private(self.inner) is not None
        self.clip = None if is_private else checked(clip)
        super().__init__("fedsso", self._settings(), checkpoint_dir, checkpoint_every, diagnostics)
        self._model: Model | None = None
        # The model of the last round, and the same as the clients have it.
        self._current = ArrayRecord()
        self._sent: Arrays = {}
        self._asked: list[Message] = []
        # The nodes that could have been asked.
        self._connected: set[int] = set()
        # How many rounds in a row the inner strategy has failed.
        self._failures = 0

    def _settings(self) -> str:
        """A text that tells runs apart.

        A run is resumed only with the same one, because with other settings it would be another
        run.
        """
        names = [type(one).__name__ for one in privacy.chain(self.inner)]
        inside = " of ".join(names)
        steps = f"local_steps={self.server.local_steps:g}"
        replies = f"inner {inside}, buffers {self.buffers}, clip {self.clip}"
        # Checkpoints of versions without a memory do not name it, and go on with the default.
        record = str(self.server.record).replace(", memory='auto'", "")
        return f"{record}, {steps}, {replies}"

    def _restore(self, saved: Saved) -> None:
        """Take over the state of a checkpoint: curvature, memory, and round."""
        privacy.check_resumable(self.inner)
        arrays = arrays_of(saved.arrays)
        model = self._layout(arrays)
        self._current = saved.arrays
        self._best = Best.of(arrays, saved.tensors)
        if any(not name.startswith(BEST) for name in saved.tensors):
            x = model.ravel(arrays)
            self.server.restore(x, saved.tensors)
            self.remembered = Remembered.of(x, saved.tensors)

    def summary(self) -> None:
        """Log the settings of FedSSO and of the strategy inside."""
        privacy.refuse_outside()
        record = self.server.record
        reset = record.R or "never"
        folder = self.folder.path if self.folder else "none"
        server_line = "\t│\t├── Server: eta = %s, form = %s, guard = %s"
        log.info("\t├──> FedSSO settings:")
        log.info("\t│\t├── Clients: %s", _clients(self.server))
        log.info(server_line, record.eta, record.form, record.guard)
        log.info("\t│\t├── Curvature: in (%g, %g), reset: %s", record.lam, record.Lam, reset)
        log.info("\t│\t├── Memory of clients: %s", self._memory_told())
        log.info("\t│\t├── Replies: %s", self.clip or "not clipped")
        log.info("\t│\t├── Checkpoints: %s", folder)
        log.info("\t│\t└── Inner strategy: %s", type(self.inner).__name__)
        self.inner.summary()

    # ---- training ----

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The messages of the inner strategy. Rounds are counted on from an earlier run.

        If a run starts with another model than that of the last round, the curvature that was
        learnt does not belong to it, and starts anew.
        """
        privacy.refuse_outside()
        k = self._before + server_round
        self.journal.begin(k)
        has_begun = len(self._current) > 0
        if server_round == 1 and has_begun and not same(arrays, self._current):
            log.info("FedSSO: another model than that of the last round, the curvature is reset")
            self.server = Server(self.server.record, self.server.local_steps)
            self.remembered = Remembered()
            self._best = Best()
        else:
            self._best = self._seen(k - 1, arrays)
        self._current = arrays
        self._sent = arrays_of(arrays)
        self._layout(self._sent)
        privacy.check(self.inner, self._sent)
        self._asked = list(self.inner.configure_train(k, arrays, config, grid))
        self.journal.sent(k, self._asked)
        asked = {message.metadata.dst_node_id for message in self._asked}
        self._connected = asked | set(grid.get_node_ids())
        return self._asked

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make one step of FedSSO from what the inner strategy makes of the good replies.

        Returns the new model, or None if there are too few good replies, and the metrics.
        """
        k = self._before + server_round
        replies = list(replies)
        self.journal.received(k, replies)
        found = screen(replies, self._asked, self._sent, self._weight_key)
        found = self._bounded(found)
        tell("aggregate_train", found)
        arrays = None
        metrics = None
        reason = self._too_few(found)
        if not reason:
            reason, mean, metrics = self._averaged(k, found)
        loss = settings.loss(metrics, self.loss_key)
        if not reason:
            reason, arrays = self._stepped(k, mean, loss, found)
        numbers = {**found.numbers, "kept": float(bool(reason))}
        if not reason:
            numbers |= self.server.diagnostics()
        self.journal.trained(k, loss, **numbers)
        self._current = arrays or self._current
        self._settle(k, reason, lambda: Saved(k, self._current, self._tensors()))
        return arrays, self._told(metrics, numbers)

    def _tensors(self) -> dict[str, Tensor]:
        """What a later run needs to go on, beside the model."""
        return {**self.server.tensors(), **self.remembered.tensors(), **self._best.tensors()}

    @property
    def _weight_key(self) -> str:
        """The metric that tells a client's weight."""
        return str(of(self.inner, "weighted_by_key", "num-examples"))

    def _bounded(self, found: Screened) -> Screened:
        """The replies, of which none counts many times more than the others.

        Weights are bounded first, then the updates, each kind of arrays for itself.
        """
        if self.clip is None:
            return found
        kinds = self._layout(self._sent).kinds
        lighter = lighten(found, self._weight_key, self.clip)
        return shorten(lighter, self._sent, kinds, self.clip)

    def _too_few(self, found: Screened) -> str:
        """Why there are too few replies for a step. Empty if there are enough.

        A private strategy scales its noise for a number of clients. With fewer of them, the noise
        would be too little for the guarantee.
        """
        least = max(1, of(self.inner, "min_train_nodes", 1))
        noisy = privacy.private(self.inner)
        scaled = getattr(noisy, "num_sampled_clients", 0)
        replies = f"{len(found.good)} good replies"
        if len(found.good) < least:
            return f"{replies}, min_train_nodes is {least}"
        if len(found.good) < scaled:
            return f"{replies}, but the noise is scaled for num_sampled_clients = {scaled}"
        return ""

    def _averaged(
        self,
        k: int,
        found: Screened,
    ) -> tuple[str, ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy average the good replies: (why it failed or "", model, metrics).

        If it fails, the federation goes on, unless it fails again and again. One bad reply that
        passed the screening must not end a run of days.
        """
        if privacy.private(self.inner) is not None:  # its noise is scaled for equal weights
            for reply in found.good:
                reply.metrics[self._weight_key] = 1.0
        messages = [reply.message for reply in found.good]
        try:
            mean, metrics = self.inner.aggregate_train(k, messages)
            told = MetricRecord(dict(metrics or {}))
        except Exception as error:
            self._failures += 1
            if self._failures == PATIENCE:
                raise
            log.exception("FedSSO: %s failed in round %d", type(self.inner).__name__, k)
            text = f"{type(error).__name__}: {shown(str(error))}"
            return f"the inner strategy failed ({text})", None, None
        self._failures = 0
        return "", mean, told

    def _stepped(
        self,
        k: int,
        mean: ArrayRecord | None,
        loss: float | None,
        found: Screened,
    ) -> tuple[str, ArrayRecord | None]:
        """Make FedSSO's step from the inner strategy's model: (why it failed or "", new model).

        The inner strategy may be the user's own, so its model is checked like a reply. If the step
        is not finite, the server goes back to where it was.
        """
        if not isinstance(mean, ArrayRecord) or not mean:
            return "the inner strategy gave no model", None
        v = arrays_of(mean)
        if _shapes(v) != _shapes(self._sent):
            return "the inner strategy gave a model of another shape", None
        are_real = all(array.dtype.kind in "fiub" for array in v.values())
        if not are_real or not _are_finite(v):
            return "the inner strategy gave a model that is not real and finite", None
        model = self._layout(self._sent)
        before = copy(self.server)
        x_k = model.ravel(self._sent)
        mean_update = model.ravel(v) - x_k
        answers, remembered = self._recalled(k, x_k, mean_update, found)
        x = self.server.advance(x_k, answers, k, self._judged(loss))
        if torch.equal(x, x_k + mean_update):
            x = model.ravel(v)  # FedAvg's own numbers: x_k + (v - x_k) would round
        new = model.record(x, v)
        if not _are_finite(arrays_of(new)):
            self.server = before
            return "the step is not finite", None
        self.remembered = remembered
        return "", new

    def _recalled(
        self,
        k: int,
        x: Tensor,
        mean_update: Tensor,
        found: Screened,
    ) -> tuple[Tensor | Answers, Remembered]:
        """What the server makes its step from, and what it remembers afterwards.

        Without a memory it is the mean update [d] itself. memory="auto" is decided here, when a
        connected node does not answer for the first time.
        """
        answered = {reply.node for reply in found.good}
        some_absent = bool(self._connected - answered)
        if some_absent and _shows_replies(self.inner):
            attendance = Attendance(len(self._connected), some_absent)
            self.server.join(attendance, x.numel())
        if not self.server.record.remembers:
            return mean_update, self.remembered
        model = self._layout(self._sent)
        answers = []
        for reply in found.good:
            update = model.ravel(reply.arrays) - x
            answers.append(Answer(reply.node, reply.weight, update))
        alpha = at(self.server.record.alpha, k)
        return self.remembered.hear(x, alpha, k, answers, mean_update, self._connected)

    def _memory_told(self) -> str:
        """Whether there is a memory of clients, in words."""
        kind = self.server.record.memory
        if kind != "auto":
            return kind
        if _shows_replies(self.inner):
            return "auto (from the first round that a node does not answer)"
        return "none (the inner strategy shows its mean alone)"

    def _layout(self, arrays: Arrays) -> Model:
        """The layout of the model, which must stay the same in all rounds.

        The curvature that FedSSO has learnt belongs to the places of parameters in x.
        """
        model = Model(arrays, self.buffers)
        before = self._model
        now = list(model.like.items())
        if before is not None and list(before.like.items()) != now:
            raise InputError(
                f"the model has changed from {before.like} to {model.like}; use a new strategy"
            )
        self._model = model
        self.server.fit(model.layout)
        return model

    # ---- evaluation ----

    @property
    def best(self) -> ArrayRecord | None:
        """The model with the lowest evaluation loss. None if no evaluation has told a loss."""
        return self._seen(self.k, self._current).arrays

    def _seen(self, k: int, arrays: ArrayRecord) -> Best:
        """What evaluation tells, that of the model after round k included."""
        loss = self.journal.rows.get(k, {}).get("test_loss")
        return self._best.after(loss, arrays, k in self._central)

    def _returned(self, last: ArrayRecord) -> ArrayRecord:
        """The model that `start` returns: the last one, or the best if the user wishes so."""
        if not self.return_best:
            return last
        if self.best is None:
            log.warning("FedSSO: no evaluation has told a loss, so the last model is returned")
        return self.best or last

    def _judged(self, loss: float | None) -> float | None:
        """The clients' mean loss as the guard hears of it.

        It is infinite, which takes the guard back, if evaluation shows that a step beyond FedAvg's
        has made the model worse. Where only some nodes evaluate, losses of two rounds are those of
        other rows, and show nothing.
        """
        same_rows = self._best.central or of(self.inner, "fraction_evaluate", 1.0) >= 1
        is_beyond = self.server.diagnostics().get("stretch", 0.0) > BEYOND
        return inf if self._best.worse and same_rows and is_beyond else loss


def _shows_replies(inner: Strategy) -> bool:
    """Whether the inner strategy's model is the weighted mean of single replies: FedAvg's own.

    It is also where a strategy is derived from FedAvg and averages as FedAvg does, such as FedProx.
    """
    function = getattr(inner.aggregate_train, "__func__", None)
    return isinstance(inner, FedAvg) and function is FedAvg.aggregate_train


def _check_memory(server: Server, inner: Strategy) -> None:
    """Refuse a memory of clients where only the inner strategy may look at single replies."""
    if server.record.memory == "clients" and not _shows_replies(inner):
        name = type(inner).__name__
        raise InputError(
            f"memory='clients' remembers single replies, but with {name} only the average of them "
            "may be used: it is robust or private, single replies are not; use memory='none', or "
            "FedAvg inside"
        )


def _clients(server: Server) -> str:
    """What is known about the clients, in words."""
    record = server.record
    if record.guard == "cautious" and record.alpha == 1 and server.local_steps == 1:
        return "any (the guard needs no eta_l, no local_steps)"
    return f"eta_l = {record.alpha}, local_steps = {server.local_steps:g}"


def _shapes(arrays: Arrays) -> dict[str, Any]:
    """The shapes of arrays, by name."""
    shapes = {}
    for name, array in arrays.items():
        shapes[name] = array.shape
    return shapes


def _are_finite(arrays: Arrays) -> bool:
    """Whether no array holds NaN or infinite numbers."""
    return all(np.isfinite(array).all() for array in arrays.values())


def _patterns(buffers: Sequence[str]) -> tuple[str, ...]:
    """The patterns of the names of buffers, checked."""
    are_texts = all(isinstance(pattern, str) for pattern in buffers)
    if isinstance(buffers, str) or not are_texts:
        raise InputError(
            f"buffers must be a list of patterns such as '*running_mean', got {buffers!r}"
        )
    return tuple(buffers)


def _inner(inner: Strategy | None, keywords: dict[str, Any]) -> Strategy:
    """The strategy inside: the user's, or FedAvg with the user's keywords.

    Raises InputError for a strategy that steps on its own: two servers cannot move one model.
    """
    if inner is None:
        return FedAvg(**keywords)
    if keywords:
        raise InputError(
            f"{', '.join(keywords)}: give these to the inner strategy {type(inner).__name__} itself"
        )
    if not isinstance(inner, Strategy):
        raise InputError(f"inner must be a strategy of flwr.serverapp.strategy, got {inner!r}")
    for one in privacy.chain(inner):
        if isinstance(one, (*STEPPING, Recorded)):
            raise InputError(
                f"{type(one).__name__} steps on its own; inner must only average, as FedAvg or "
                f"FedMedian do"
            )
        if type(one).start is not Strategy.start:
            log.warning(
                "FedSSO: start() of the inner strategy %s is never called, FedSSO's own is; move "
                "what it does to configure_train, aggregate_train or evaluate_fn",
                type(one).__name__,
            )
    return inner
