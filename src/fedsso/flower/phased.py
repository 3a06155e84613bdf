"""Every algorithm of the registry as a Flower strategy, for clients that `client_app` makes.

A round has as many exchanges as the algorithm has phases, and runs the same functions as the
simulator. If an exchange fails, the server and the clients go back to where they were before the
round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ..algorithm import Algorithm
from ..algorithm.records import to_dict
from ..algorithms import ALGORITHMS, make, name_of
from ..engine.settings import Settings
from ..errors import InputError, number
from . import privacy
from .averages import MEAN
from .averages import average as average_of
from .bounds import Clip, checked
from .exchange import Problem, Round, Rule, State
from .folder import Saved
from .recorded import Recorded
from .screen import Screened, lighten, screen, tell
from .settings import FEDAVG, loss, sampling
from .task import OWN, SETUP, Setup, write
from .wire import arrays_of, same

log = logging.getLogger("flwr")

ELSEWHERE = {
    "eta_l": "alpha",
    "inner": "FedSSO(..., inner=...), which takes other strategies inside",
}
"""Keywords of the strategy `FedSSO`, and what to use here instead."""


class PhasedStrategy(Recorded):
    """Any algorithm of the registry as a strategy of Flower.

    The clients must be those of `client_app`. A round changes nothing if an exchange has fewer than
    min_train_nodes good replies, or if the algorithm needs all clients and one is missing.

    Args:
        algorithm: The name of the algorithm in the registry, or its record.
        local_steps: How many local steps a client makes in a round.
        batch_size: How many rows a mini-batch has. None: all that a client has.
        seed: The seed of the mini-batches.
        l2: The strength of the penalty l2/2 |x|^2.
        average: How many uploads become one: "mean", which is weighted, or without weights "median"
            or "trimmedavg:0.2".
        clip: What bounds the influence of one reply. None does not bound it.
        checkpoint_dir: A folder that keeps the server's state, for `resume`.
        checkpoint_every: After how many rounds it is written again. `start` also writes the last.
        diagnostics: Whether Flower's metrics hold those named "fedsso-". The trace does anyway.
        **keywords: The fields of the algorithm's record, if its name is given, and the keywords of
            Flower's FedAvg: fraction_train, min_train_nodes, ...

    >>> strategy = PhasedStrategy("scaffold", alpha=0.1, min_train_nodes=4)
    >>> strategy.name, strategy.local_steps
    ('scaffold', 5)
    """

    inner: FedAvg
    """What samples nodes, evaluates, and averages metrics."""
    record: Algorithm
    """The algorithm with its hyper-parameters."""
    work: Settings
    """How clients draw their mini-batches."""
    local_steps: int
    """How many local steps a client makes in a round."""
    l2: float
    """The strength of the penalty."""
    average: str
    """How uploads are averaged, as the user wrote it."""
    rule: Rule
    """How uploads are bounded and averaged."""

    def __init__(
        self,
        algorithm: str | Algorithm,
        *,
        local_steps: int = 5,
        batch_size: int | None = None,
        seed: int = 0,
        l2: float = 0.0,
        average: str = MEAN,
        clip: Clip | None = Clip(),  # noqa: B008
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 1,
        diagnostics: bool = True,
        **keywords: Any,
    ) -> None:
        of_fedavg = {}
        of_record = {}
        for name, value in keywords.items():
            if name in FEDAVG:
                of_fedavg[name] = value
            else:
                of_record[name] = value
        self.record = _record(algorithm, of_record)
        self.inner = FedAvg(**sampling(of_fedavg))
        _check_fraction(self.record, self.inner.fraction_train)
        _check_memory(self.record)
        _check_rows(self.record, self.inner.fraction_evaluate)
        self.work = Settings(local_steps=local_steps, batch_size=batch_size, seed=seed)
        self.local_steps = self.work.local_steps or 1
        self.l2 = _penalty(l2)
        self.average = average
        self.rule = Rule(checked(clip), average_of(average))
        reduction = f"average {average}, clip {self.rule.clip}"
        work = f"local_steps={local_steps}, batch_size={batch_size}, seed={seed}"
        settings = f"{self.record}, {work}, l2={self.l2}, {reduction}"
        name = name_of(self.record)
        super().__init__(name, settings, checkpoint_dir, checkpoint_every, diagnostics)
        self._problem: Problem | None = None
        self._state: State | None = None
        self._round: Round | None = None
        # All nodes of the federation: those that are connected, and those that ever answered.
        self._everybody: set[int] = set()

    def _restore(self, saved: Saved) -> None:
        """Take over the state of a checkpoint: the server's, and the model's buffers.

        An algorithm that keeps a state with every client cannot go on, because Flower has forgotten
        these states.
        """
        problem = Problem(self.record, arrays_of(saved.arrays), self.l2)
        if problem.keeps:
            raise InputError(
                f"{self.name} keeps a state with every client, which Flower forgets when a run "
                f"ends: it cannot continue after round {saved.k}. Start again with another "
                "checkpoint_dir; fedsso can continue"
            )
        self._problem = problem
        self._state = problem.start.restored(saved.tensors)

    def summary(self) -> None:
        """Log the settings."""
        privacy.refuse_outside()
        log.info("\t├──> %s, exchanges in a round: %d", self.record, len(self.record.phases))
        work = self.work
        told = (work.local_steps, work.batch_size or "full", self.l2)
        log.info("\t├──> local steps %s, batch size %s, l2 = %g", *told)
        log.info("\t├──> Replies: average %s, %s", self.average, self.rule.clip or "not clipped")
        self.inner.summary()

    # ---- training ----

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Do all exchanges of a round but the last, and return the messages of the last one.

        Flower calls this at the beginning of a round. It sends the messages, and hands the replies
        to `aggregate_train`. If an early exchange fails, there is nothing to send.
        """
        privacy.refuse_outside()
        k = self._before + server_round
        self.journal.begin(k)
        problem, state = self._at(arrays)
        now = Round(problem, self._setup(problem), state, k, self.rule)
        self._round = now
        last = len(self.record.phases) - 1
        for phase in range(last):
            messages = self._ask(phase, now, config, grid)
            replies = grid.send_and_receive(messages, timeout=self._timeout)
            self._take(now, replies)
            if now.reason:
                return []
        return self._ask(last, now, config, grid)

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finish the last exchange, and with it the round.

        Returns the new model, or None if an exchange failed, and the metrics.
        """
        if self._round is None or self._problem is None or self._state is None:
            raise InputError("a round begins with configure_train; call start()")
        k = self._before + server_round
        now = self._round
        problem = self._problem
        if not now.reason:
            self._take(now, replies)
        has_failed = bool(now.reason)
        numbers = {**now.numbers, "kept": float(has_failed)}
        arrays = None
        if not has_failed:
            self._state = replace(now.state, done=now.state.done + 1)
            arrays = problem.arrays(self._state)
            diagnostics = problem.algorithm.diagnostics(self._state.server)
            for name, value in diagnostics.items():
                numbers[name] = float(value[0])
        state = self._state
        self.journal.trained(k, loss(now.metrics, None), **numbers)
        self._settle(k, now.reason, lambda: Saved(k, problem.arrays(state), state.tensors()))
        return arrays, self._told(now.metrics, numbers)

    def _at(self, arrays: ArrayRecord) -> tuple[Problem, State]:
        """The problem, and the state whose model these arrays are.

        Flower hands the model to every function, but an algorithm has more state than the model. If
        the arrays are those of the last round, its state is still right. If they are another model,
        problem and state begin anew.
        """
        problem = self._problem
        state = self._state
        if problem is not None and state is not None and same(arrays, problem.arrays(state)):
            return problem, state
        problem = Problem(self.record, arrays_of(arrays), self.l2)
        self._problem = problem
        self._state = problem.start
        if problem.keeps and self.folder is not None:
            log.warning("%s cannot be resumed, as its clients' state ends with the run", self.name)
        return problem, problem.start

    def _setup(self, problem: Problem) -> Setup:
        """What clients must know for the whole run.

        It goes with every message, because a client remembers nothing of it.
        """
        dtype = str(problem.model.dtype)
        return Setup(
            algorithm=name_of(self.record),
            values=to_dict(self.record),
            model=problem.digest,
            dtype=dtype.removeprefix("torch."),
            weight=self.inner.weighted_by_key,
            local_steps=self.work.local_steps or 1,
            batch_size=self.work.batch_size,
            seed=self.work.seed,
            l2=self.l2,
        )

    def _ask(
        self,
        phase: int,
        now: Round,
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """The messages of an exchange.

        They go to the nodes that answered the exchange before. Where the phase wants fresh clients,
        they go to a new sample, which FedAvg draws. An algorithm that needs all clients keeps those
        of its first round. A lead exchange is with the node of the lowest number alone.
        """
        nodes = now.answered
        weights = now.state.weights
        if phase == 0 or self.record.phases[phase].fresh:
            drawn = self.inner.configure_train(now.number, ArrayRecord(), ConfigRecord(), grid)
            nodes = [message.metadata.dst_node_id for message in drawn]
            self._everybody = set(grid.get_node_ids()) | weights.keys()
        if self.record.needs_all and weights:  # whoever joins later is left out
            self._everybody = set(weights)
            nodes = [node for node in nodes if node in self._everybody]
        if self.record.phases[phase].lead:
            nodes = sorted(nodes)[:1]
        messages = now.ask(phase, nodes, config)
        self.journal.sent(now.number, messages)
        return messages

    def _take(self, now: Round, replies: Iterable[Message]) -> None:
        """Move the round on by the good replies of an exchange, or note why it fails.

        The replies are counted, screened, bounded, averaged and handed to the server's function.
        """
        replies = list(replies)
        self.journal.received(now.number, replies)
        key = self.inner.weighted_by_key
        clip = self.rule.clip
        with torch.no_grad():
            found = screen(replies, now.messages, now.expected(), key, now.problem.statistics)
            if clip is not None:
                found = lighten(found, key, clip)
            mean, found = now.average(found)
            tell(f"exchange {now.phase + 1} of {len(self.record.phases)}", found)
            numbers = {}
            for name, count in found.numbers.items():
                numbers[name] = now.numbers.get(name, 0.0) + count
            now.numbers = numbers
            now.reason = self._failed(found, self.record.phases[now.phase].lead)
            if now.reason:
                return
            now.move(mean, found.good, self._everybody)
            contents = [reply.message.content for reply in found.good]
            now.metrics |= self.inner.train_metrics_aggr_fn(contents, key)

    def _failed(self, found: Screened, lead: bool) -> str:
        """Why an exchange cannot be used. Empty if it can.

        There must be as many good replies as the user asked for, and all of them if the algorithm
        needs all clients. In a lead exchange it takes the lead's.
        """
        good = {reply.node for reply in found.good}
        if lead:
            return "" if good else "the lead's reply is missing"
        least = max(1, self.inner.min_train_nodes)
        if len(good) < least:
            return f"{len(good)} good replies, min_train_nodes is {least}"
        missing = self._everybody - good
        if self.record.needs_all and missing:
            name = type(self.record).__name__
            nodes = len(self._everybody)
            return f"{name} needs all {nodes} nodes, {len(missing)} are missing"
        return ""

    # ---- evaluation ----

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The messages of FedAvg, each with the version of the client's own state.

        An algorithm that gives every client a model of its own needs it. Version 0 tells a client
        that it has not taken part yet.
        """
        problem, state = self._at(arrays)
        setup = ConfigRecord({**config, SETUP: write(self._setup(problem))})
        k = self._before + server_round
        messages = list(self.inner.configure_evaluate(k, arrays, setup, grid))
        for message in messages:
            version = state.versions.get(message.metadata.dst_node_id, 0)
            own = ConfigRecord({**setup, OWN: version})
            message.content = RecordDict({**message.content, self.inner.configrecord_key: own})
        self._evaluates = messages
        return messages


def _record(algorithm: str | Algorithm, values: dict[str, Any]) -> Algorithm:
    """The record of an algorithm, from its name and values, or as it was given.

    Clients must be able to build the same record from its name and values. So an algorithm of the
    user's own must be registered on both sides.
    """
    for name, right in ELSEWHERE.items():
        if name in values:
            raise InputError(
                f"PhasedStrategy has no {name}; it goes by the simulator's names: use {right}"
            )
    if isinstance(algorithm, str):
        return make(algorithm, values)
    if not isinstance(algorithm, Algorithm) or values:
        raise InputError(
            f"give a name and its fields, or a record alone; got {algorithm!r} and {values}"
        )
    name = name_of(algorithm)
    if ALGORITHMS.get(name) is not type(algorithm):
        raise InputError(
            f"clients could not build {name}: it is not registered; set "
            f"fedsso.algorithms.ALGORITHMS[{name!r}] on both sides"
        )
    return algorithm


def _check_fraction(record: Algorithm, fraction: float) -> None:
    """Raise InputError for a share of nodes that trains nobody, or too few for the algorithm.

    An algorithm that needs all clients says what to use instead of it.
    """
    if not 0 < number("fraction_train", fraction) <= 1:
        raise InputError(f"fraction_train must lie in (0, 1], got fraction_train={fraction}")
    if record.needs_all and fraction < 1:
        raise InputError(
            f"{type(record).__name__} needs all clients in every round, got "
            f"fraction_train={fraction}; use fraction_train=1.0, or {record.needs_all}"
        )


def _check_memory(record: Algorithm) -> None:
    """Raise InputError for an algorithm whose server remembers or addresses single clients.

    This strategy averages the uploads of all nodes and hands no single one to the algorithm
    (`Algorithm.receive`, `Phase.apart`).
    """
    if any(phase.apart for phase in record.phases):
        raise InputError(
            f"{type(record).__name__} sends every client a message of its own, which "
            "PhasedStrategy does not; use fedper, or the simulator"
        )
    if record.memory_init(torch.empty(1, 1)) == ():
        return
    remedy = "use fedavg or scaffold, or the simulator"
    if hasattr(record, "memory"):
        remedy = "use memory='none', or fedsso.flower.FedSSO with memory='clients'"
    raise InputError(
        f"{type(record).__name__} remembers what each client sent last, which PhasedStrategy does "
        f"not keep; {remedy}"
    )


def _check_rows(record: Algorithm, fraction: float) -> None:
    """Raise InputError where nodes would evaluate a model on rows that are not prepared for it."""
    if fraction and type(record).prepare is not Algorithm.prepare:
        raise InputError(
            f"{type(record).__name__}'s model expects prepared rows, and nodes evaluate on theirs "
            f"as they are, got fraction_evaluate={fraction}; use fraction_evaluate=0"
        )


def _penalty(l2: float) -> float:
    """The strength of the penalty, checked."""
    if not 0 <= number("l2", l2) < inf:
        raise InputError(
            f"l2, the strength of the penalty l2/2 |x|^2, must be >= 0 and finite, got l2={l2}"
        )
    return float(l2)
