"""Every algorithm of the registry as a Flower strategy, for clients made by `client_app`.

A round has as many exchanges as the algorithm has phases, with the functions that the simulator
runs as well. Where an exchange fails, server and clients go back to where they were before the
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
from ..errors import InputError, integer, number
from . import privacy
from .averages import MEAN
from .averages import average as average_of
from .bounds import Clip, checked
from .exchange import Problem, Round, Rule, State
from .folder import Saved
from .recorded import Recorded
from .screen import Screened, lighten, screen, tell
from .settings import FEDAVG, sampling, told
from .task import OWN, SETUP, Setup, write
from .wire import arrays_of, same

log = logging.getLogger("flwr")


class PhasedStrategy(Recorded):
    """Any algorithm of the registry, by name and the fields of its record:
    PhasedStrategy("scaffold", alpha=0.1).

    Its clients are those of `client_app`. The keywords of FedAvg (fraction_train, min_train_nodes,
    ...) are taken as well. A round without min_train_nodes good replies in each exchange, or
    without everybody's where the algorithm needs all clients, changes nothing. `l2` is the strength
    of the penalty l2/2 |x|^2. `average` makes one upload of many: "mean", weighted, or without
    weights "median" or "trimmedavg:0.2". `clip` bounds what one reply can do beside the others;
    None does not. `checkpoint_dir` keeps the server's state after every round, for `resume`.
    """

    inner: FedAvg

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
        **keywords: Any,
    ) -> None:
        self.record = _record(
            algorithm, {name: v for name, v in keywords.items() if name not in FEDAVG}
        )
        self.inner = FedAvg(**sampling({name: v for name, v in keywords.items() if name in FEDAVG}))
        _admit(self.record, self.inner.fraction_train)
        local_steps, seed = integer("local_steps", local_steps, 1), integer("seed", seed)
        batch_size = None if batch_size is None else integer("batch_size", batch_size, 1)
        self.local_steps = local_steps
        self.work = Settings(local_steps=local_steps, batch_size=batch_size, seed=seed)
        work = f"local_steps={local_steps}, batch_size={batch_size}, seed={seed}"
        self.l2 = _penalty(l2)
        self.average, self.rule = average, Rule(checked(clip), average_of(average))
        settings = f"{self.record}, {work}, l2={self.l2}, average {average}, clip {self.rule.clip}"
        super().__init__(name_of(self.record), settings, checkpoint_dir)
        self._problem: Problem | None = None
        self._state: State | None = None
        self._round: Round | None = None
        self._everybody: set[int] = set()

    def _restore(self, saved: Saved) -> None:
        problem = Problem(self.record, arrays_of(saved.arrays))
        if problem.keeps:
            raise InputError(
                f"{self.name} keeps a state with every client, which Flower forgets when a run "
                f"ends: it cannot go on "
                f"after round {saved.k}. Start again with another checkpoint_dir; fedsso can go on"
            )
        self._problem, self._state = problem, problem.start.restored(saved.tensors)

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
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All exchanges of a round but the last, whose messages come back."""
        privacy.refuse_outside()
        k = self._before + server_round
        self.journal.begin(k)
        problem, state = self._at(arrays)
        now = self._round = Round(problem, self._setup(problem), state, k, self.rule)
        *early, last = range(len(self.record.phases))
        for phase in early:
            self._take(
                now,
                grid.send_and_receive(self._ask(phase, now, config, grid), timeout=self._timeout),
            )
            if now.reason:
                return []
        return self._ask(last, now, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The last exchange, and with it the round: the new model, or none where an exchange
        failed."""
        if self._round is None or self._problem is None or self._state is None:
            raise InputError("a round begins with configure_train; call start()")
        k, now, problem, state = (
            self._before + server_round,
            self._round,
            self._problem,
            self._state,
        )
        if not now.reason:
            self._take(now, replies)
        arrays, numbers = None, {**now.numbers, "kept": float(bool(now.reason))}
        if not now.reason:
            state = self._state = replace(now.state, done=now.state.done + 1)
            arrays = problem.arrays(state)
            numbers |= {
                n: float(v[0]) for n, v in problem.algorithm.diagnostics(state.server).items()
            }
        self.journal.trained(k, now.metrics, **numbers)
        self._settle(k, now.reason, lambda: Saved(k, problem.arrays(state), state.tensors()))
        return arrays, MetricRecord({**now.metrics, **told(numbers)})

    def _at(self, arrays: ArrayRecord) -> tuple[Problem, State]:
        """The state whose model these arrays are; a new one where they are another model."""
        if (
            self._problem is None
            or self._state is None
            or not same(arrays, self._problem.arrays(self._state))
        ):
            self._problem = Problem(self.record, arrays_of(arrays))
            self._state = self._problem.start
            if self._problem.keeps and self.folder is not None:
                log.warning(
                    "%s cannot be resumed, as its clients' state ends with the run", self.name
                )
        return self._problem, self._state

    def _setup(self, problem: Problem) -> Setup:
        p = self.work
        dtype = str(problem.model.dtype).removeprefix("torch.")
        values, weight, steps = to_dict(self.record), self.inner.weighted_by_key, p.local_steps or 1
        return Setup(
            name_of(self.record),
            values,
            problem.digest,
            dtype,
            weight,
            steps,
            p.batch_size,
            p.seed,
            self.l2,
        )

    def _ask(self, phase: int, now: Round, config: ConfigRecord, grid: Grid) -> list[Message]:
        """The messages of an exchange: to the nodes that answered the last one, or to a new sample."""
        nodes = now.answered
        if phase == 0 or self.record.phases[phase].fresh:
            drawn = self.inner.configure_train(now.number, ArrayRecord(), ConfigRecord(), grid)
            nodes = [message.metadata.dst_node_id for message in drawn]
            self._everybody = set(grid.get_node_ids()) | now.state.weights.keys()
        if self.record.needs_all and now.state.weights:  # who joins later is left out
            self._everybody = set(now.state.weights)
            nodes = [node for node in nodes if node in self._everybody]
        messages = now.ask(phase, nodes, config)
        self.journal.sent(now.number, messages)
        return messages

    def _take(self, now: Round, replies: Iterable[Message]) -> None:
        """Move the round on by the good replies of an exchange, or say why it fails."""
        replies = list(replies)
        self.journal.received(now.number, replies)
        key = self.inner.weighted_by_key
        with torch.no_grad():
            found = screen(replies, now.messages, now.expected(), key, now.problem.statistics)
            mean, found = now.average(
                found if self.rule.clip is None else lighten(found, key, self.rule.clip)
            )
            tell(f"exchange {now.phase + 1} of {len(self.record.phases)}", found)
            now.numbers = {
                name: now.numbers.get(name, 0.0) + n for name, n in found.numbers.items()
            }
            now.reason = self._failed(found)
            if not now.reason:
                now.move(mean, found.good, self._everybody)
                contents = [reply.message.content for reply in found.good]
                now.metrics |= self.inner.train_metrics_aggr_fn(contents, key)

    def _failed(self, found: Screened) -> str:
        """Why an exchange cannot be used; empty if it can."""
        good, least = {reply.node for reply in found.good}, max(1, self.inner.min_train_nodes)
        if len(good) < least:
            return f"{len(good)} good replies, min_train_nodes is {least}"
        missing = self._everybody - good
        if self.record.needs_all and missing:
            return f"{type(self.record).__name__} needs all {len(self._everybody)} nodes, {len(missing)} are missing"
        return ""

    # ---- evaluation ----

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """FedAvg's messages; where every client has a model of its own, with the version of its
        part."""
        problem, state = self._at(arrays)
        setup = ConfigRecord({**config, SETUP: write(self._setup(problem))})
        messages = list(
            self.inner.configure_evaluate(self._before + server_round, arrays, setup, grid)
        )
        for message in messages:
            own = ConfigRecord({**setup, OWN: state.versions.get(message.metadata.dst_node_id, 0)})
            message.content = RecordDict({**message.content, self.inner.configrecord_key: own})
        self._evaluates = messages
        return messages


def _record(algorithm: str | Algorithm, values: dict[str, Any]) -> Algorithm:
    """A record that clients can build from its name and values."""
    for name, right in {
        "eta_l": "alpha",
        "inner": "FedSSO(..., inner=...), which takes other strategies inside",
    }.items():
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
            f"fedsso.algorithms.ALGORITHMS[{name!r}] on both "
            "sides"
        )
    return algorithm


def _admit(record: Algorithm, fraction: float) -> None:
    """Refuse a share of nodes that trains nobody, or that the algorithm cannot bear."""
    if not 0 < number("fraction_train", fraction) <= 1:
        raise InputError(f"fraction_train must lie in (0, 1], got fraction_train={fraction}")
    if record.needs_all and fraction < 1:
        raise InputError(
            f"{type(record).__name__} needs all clients in every round, got "
            f"fraction_train={fraction}; "
            f"use fraction_train=1.0, or {record.needs_all}"
        )


def _penalty(l2: float) -> float:
    if not 0 <= number("l2", l2) < inf:
        raise InputError(
            f"l2, the strength of the penalty l2/2 |x|^2, must be >= 0 and finite, got l2={l2}"
        )
    return float(l2)
