"""FedSSO as a Flower strategy: FedAvg's clients unchanged, one other line on the server.

    alpha   eta_l         the clients' learning rate         v   what the inner strategy makes of the replies
    tau     local_steps   their local steps                  g   (x - v) / (alpha tau)
    eta     eta           the server's step

Another strategy (FedAvg, a robust or a private one) sits inside and does what it always does: it
samples nodes and turns replies into one model v. So a guarantee that it gives for v holds, whatever
FedSSO makes of v.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from ..algorithm.schedule import Step
from ..errors import InputError
from ..server import Server
from . import privacy, settings
from .answers import shown
from .bounds import Clip, checked
from .folder import Saved
from .recorded import Recorded, of
from .screen import Screened, lighten, screen, shorten, tell
from .settings import FEDAVG, server, split
from .wire import BUFFERS, Arrays, Model, arrays_of, same

log = logging.getLogger("flwr")
PATIENCE = 3  # rounds in a row in which the inner strategy may fail
OWN = ("eta_l", "local_steps", "inner", "checkpoint_dir", "buffers", "clip")
STEPPING = (
    *(flower.FedAdagrad, flower.FedAdam, flower.FedYogi, flower.FedAvgM, flower.QFedAvg),
    *(flower.FedXgbBagging, flower.FedXgbCyclic),
)


class FedSSO(Recorded):
    """FedSSO around an inner strategy, FedAvg by default, whose keywords are taken as well.

    eta_l and local_steps must be what the clients use (a mean, where they differ); `eta`, `form`,
    `guard`, `R`, ... are those of `fedsso.FedSSO`. `buffers` are patterns of the names that are
    averaged, never stepped; integers always are. `clip` bounds what one reply can do beside the
    others; None does not. `checkpoint_dir` keeps the whole state after every round, for `resume`.
    """

    def __init__(
        self,
        eta_l: Step | None = None,
        local_steps: float | None = None,
        *,
        inner: Strategy | None = None,
        checkpoint_dir: str | Path | None = None,
        buffers: Sequence[str] = BUFFERS,
        clip: Clip | None = Clip(),  # noqa: B008
        **keywords: Any,
    ) -> None:
        values, rest = split(keywords, OWN, FEDAVG)
        self.server = server(eta_l, local_steps, values)
        self.inner = _inner(inner, rest)
        self.buffers = _patterns(buffers)
        self.clip = (
            None if privacy.private(self.inner) is not None else checked(clip)
        )  # which clips by itself
        inside = " of ".join(type(one).__name__ for one in privacy.chain(self.inner))
        made = f"{self.server.record}, local_steps={self.server.local_steps:g}, inner {inside}, buffers {self.buffers}"
        super().__init__("fedsso", f"{made}, clip {self.clip}", checkpoint_dir)
        self._model: Model | None = None
        self._current, self._sent = ArrayRecord(), Arrays()  # the model, and as the clients have it
        self._asked: list[Message] = []
        self._failures = 0  # rounds in a row in which the inner strategy failed

    def _restore(self, saved: Saved) -> None:
        privacy.check_resumable(self.inner)
        arrays = arrays_of(saved.arrays)
        model = self._layout(arrays)
        if saved.tensors:
            self.server.restore(model.ravel(arrays), saved.tensors)

    def summary(self) -> None:
        """Log the settings of FedSSO and of the strategy inside."""
        privacy.refuse_outside()
        record = self.server.record
        log.info("\t├──> FedSSO settings:")
        log.info(
            "\t│\t├── Clients: eta_l = %s, local_steps = %g", record.alpha, self.server.local_steps
        )
        log.info(
            "\t│\t├── Server: eta = %s, form = %s, guard = %s",
            record.eta,
            record.form,
            record.guard,
        )
        log.info(
            "\t│\t├── Curvature: in (%g, %g), reset: %s",
            record.lam,
            record.Lam,
            record.R or "never",
        )
        log.info("\t│\t├── Replies: %s", self.clip or "not clipped")
        log.info("\t│\t├── Checkpoints: %s", self.folder.path if self.folder else "none")
        log.info("\t│\t└── Inner strategy: %s", type(self.inner).__name__)
        self.inner.summary()

    # ---- training ----

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages; round numbers go on where an earlier run ended."""
        privacy.refuse_outside()
        k = self._before + server_round
        self.journal.begin(k)
        if server_round == 1 and len(self._current) and not same(arrays, self._current):
            log.info("FedSSO: another model than that of the last round, the curvature starts anew")
            self.server = Server(self.server.record, self.server.local_steps)
        self._current, self._sent = arrays, arrays_of(arrays)
        self._layout(self._sent)
        privacy.check(self.inner, self._sent)
        self._asked = list(self.inner.configure_train(k, arrays, config, grid))
        self.journal.sent(k, self._asked)
        return self._asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One FedSSO step on what the inner strategy makes of the good replies; without enough of
        them, none."""
        k, replies = self._before + server_round, list(replies)
        self.journal.received(k, replies)
        found = self._bounded(screen(replies, self._asked, self._sent, self._weight_key))
        tell("aggregate_train", found)
        reason, mean, arrays, metrics = self._too_few(found), None, None, None
        if not reason:
            reason, mean, metrics = self._averaged(k, found)
        if not reason:
            reason, arrays = self._stepped(k, mean)
        numbers = {**found.numbers, "kept": float(bool(reason))}
        numbers |= {} if reason else self.server.diagnostics()
        self.journal.trained(k, metrics, **numbers)
        self._current = arrays or self._current
        self._settle(k, reason, lambda: Saved(k, self._current, self.server.tensors()))
        return arrays, MetricRecord({**(metrics or {}), **settings.told(numbers)})

    @property
    def _weight_key(self) -> str:
        return str(of(self.inner, "weighted_by_key", "num-examples"))

    def _bounded(self, found: Screened) -> Screened:
        """The replies, of which none counts many times more than the others."""
        if self.clip is None:
            return found
        kinds = self._layout(self._sent).kinds
        return shorten(lighten(found, self._weight_key, self.clip), self._sent, kinds, self.clip)

    def _too_few(self, found: Screened) -> str:
        """Why this round cannot step; empty if it can."""
        least = max(1, of(self.inner, "min_train_nodes", 1))
        noisy = privacy.private(self.inner)
        scaled = getattr(noisy, "num_sampled_clients", 0)
        if len(found.good) < least:
            return f"{len(found.good)} good replies, min_train_nodes is {least}"
        if len(found.good) < scaled:
            return f"{len(found.good)} good replies, but the noise is scaled for num_sampled_clients = {scaled}"
        return ""

    def _averaged(
        self, k: int, found: Screened
    ) -> tuple[str, ArrayRecord | None, MetricRecord | None]:
        """What the inner strategy makes of the good replies; if it fails on them, the federation
        still goes on, unless it does so again and again."""
        if privacy.private(self.inner) is not None:  # its noise is scaled for equal weights
            for reply in found.good:
                reply.metrics[self._weight_key] = 1.0
        try:
            mean, metrics = self.inner.aggregate_train(k, [reply.message for reply in found.good])
            told = MetricRecord(dict(metrics or {}))
        except Exception as error:
            self._failures += 1
            if self._failures == PATIENCE:
                raise
            log.exception("FedSSO: %s failed in round %d", type(self.inner).__name__, k)
            return (
                f"the inner strategy failed ({type(error).__name__}: {shown(str(error))})",
                None,
                None,
            )
        self._failures = 0
        return "", mean, told

    def _stepped(self, k: int, mean: ArrayRecord | None) -> tuple[str, ArrayRecord | None]:
        """The new model from the inner strategy's, or why there is none."""
        if not isinstance(mean, ArrayRecord) or not mean:
            return "the inner strategy gave no model", None
        v, model = arrays_of(mean), self._layout(self._sent)
        if v.keys() != self._sent.keys() or any(v[n].shape != self._sent[n].shape for n in v):
            return "the inner strategy gave a model of another shape", None
        if not all(array.dtype.kind in "fiub" and np.isfinite(array).all() for array in v.values()):
            return "the inner strategy gave a model that is not real and finite", None
        before = copy(self.server)
        new = model.record(self.server.step(model.ravel(self._sent), model.ravel(v), k), v)
        if not all(np.isfinite(array).all() for array in arrays_of(new).values()):
            self.server = before
            return "the step is not finite", None
        return "", new

    def _layout(self, arrays: Arrays) -> Model:
        """The layout of the model, which stays the same in all rounds."""
        model = Model(arrays, self.buffers)
        if self._model is not None and list(self._model.like.items()) != list(model.like.items()):
            raise InputError(
                f"the model has changed from {self._model.like} to {model.like}; use a new strategy"
            )
        self._model = model
        return model


def _patterns(buffers: Sequence[str]) -> tuple[str, ...]:
    if isinstance(buffers, str) or not all(isinstance(pattern, str) for pattern in buffers):
        raise InputError(
            f"buffers must be a list of patterns such as '*running_mean', got {buffers!r}"
        )
    return tuple(buffers)


def _inner(inner: Strategy | None, keywords: dict[str, Any]) -> Strategy:
    """The strategy inside: the user's, or FedAvg with the user's keywords."""
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
    return inner
