"""One round of an algorithm in Flower's messages: what each node is sent, and what the replies make of the server.

A round is kept or undone as a whole. So its state is a value, replaced at the end; tensors travel under names, and what
a node has received in the round, and has confirmed by a good reply, is not sent to it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import Tensor

from ..algorithm import Algorithm, Cohort, Phase
from ..engine.simulate import fitted
from ..objective import Layout
from ..server import packed, unpacked
from ..tree import Tree, leaves, named_leaves, stack, tree_map
from .rehearse import Rehearsal
from .screen import Good, Screened
from .task import BUFFERS, SETUP, TASK, Setup, Task, digest, write
from .wire import Arrays, Model

CPU = torch.device("cpu")


@dataclass(frozen=True)
class State:
    """What the server keeps from round to round."""

    server: Any  # the algorithm's state
    buffers: Tensor  # [1, b] of the model
    done: int = 0  # rounds that moved the model
    weights: Mapping[int, float] = field(default_factory=dict)  # of the nodes that were heard of
    seen: Mapping[int, int] = field(default_factory=dict)  # mini-batches that each has seen
    versions: Mapping[int, int] = field(default_factory=dict)  # of each one's own state
    begun: int = 0  # mini-batches that a node counts as having seen before it is heard of

    def position(self, node: int) -> int:
        """Where a node is in its stream of mini-batches."""
        return self.seen.get(node, self.begun)

    def tensors(self) -> dict[str, Tensor]:
        """What a later run needs to go on; nodes have other ids there, and count as the one that has seen most."""
        most = max(self.seen.values(), default=self.begun)
        numbers = {"done": torch.tensor(self.done), "begun": torch.tensor(most), BUFFERS: self.buffers}
        return numbers | packed(self.server, self.done)

    def restored(self, tensors: Mapping[str, Tensor]) -> State:
        """This state with the numbers of `tensors()`."""
        return State(
            unpacked(self.server, tensors), tensors[BUFFERS], int(tensors["done"]), begun=int(tensors["begun"])
        )


class Problem:
    """An algorithm and the model that it trains, known by its arrays."""

    def __init__(self, record: Algorithm, arrays: Arrays) -> None:
        self.model = Model(arrays)
        params, shapes = self.model.params, {name: torch.Size(shape) for name, (shape, _) in self.model.like.items()}
        self.buffers = {name: shape for name, shape in shapes.items() if name not in params}
        self.record = fitted(record, Layout(tuple(params), tuple(shapes[name] for name in params)))
        self.algorithm: Algorithm = stack([self.record], self.model.dtype, CPU)
        self.rehearsal = Rehearsal(self.record, sum(self.model.sizes), self.model.dtype)
        self.digest = digest([(name, shapes[name]) for name in params], list(self.buffers.items()))
        self.x0 = self.model.ravel(arrays).unsqueeze(0)
        parts = [torch.from_numpy(np.array(arrays[name])).reshape(-1).to(self.x0.dtype) for name in self.buffers]
        self.start = State(self.algorithm.server_init(self.x0), torch.cat([self.x0.new_zeros(0), *parts])[None])

    @property
    def keeps(self) -> bool:
        """Whether clients have a state of their own."""
        return next(leaves(self.rehearsal.own), None) is not None

    def first(self) -> dict[str, Tensor]:
        """The leaves of a new client's state that it could not know, as they depend on the initial model."""
        blank = dict(named_leaves(self.algorithm.client_init(torch.zeros_like(self.x0)), "own"))
        own = named_leaves(self.algorithm.client_init(self.x0), "own")
        return {name: leaf for name, leaf in own if not torch.equal(leaf, blank[name])}

    def x(self, server: Any) -> Tensor:
        """The model [d]; a part that every client has to itself is that of the start."""
        return self.algorithm.model(server, self.algorithm.client_init(self.x0))[0]

    def arrays(self, state: State) -> ArrayRecord:
        """The model as named arrays."""
        sizes = [shape.numel() for shape in self.buffers.values()]
        parts = zip(self.buffers, state.buffers[0].split_with_sizes(sizes), strict=True)
        return self.model.record(self.x(state.server), {name: part.numpy() for name, part in parts})


class Round:
    """A round under way."""

    def __init__(self, problem: Problem, setup: Setup, state: State, number: int) -> None:
        self.problem, self.setup, self.number = problem, setup, number
        self.before = self.state = state
        self.phase = 0  # the exchange under way
        self.asked: Collection[int] = ()  # its nodes
        self.messages: list[Message] = []  # to them
        self.answered: list[int] = []  # nodes whose last reply was good
        self.reason = ""  # why the round failed
        self.dropped = 0
        self.metrics: dict[str, Any] = {}
        self._upload: Tree = ()  # what is expected of each, [1, 1, ...] without numbers
        self._sent: list[Tensor] = []  # a tensor's name is its place here
        self._given: dict[int, set[str]] = {}  # the tensors that a node has once its message arrives
        self._held: dict[int, set[str]] = {}  # those that it is known to have

    # ---- the way down ----

    def ask(self, phase: int, nodes: Collection[int], config: ConfigRecord) -> list[Message]:
        """The messages of an exchange."""
        self.phase, self.asked, state = phase, nodes, self.state
        self._upload = self.problem.rehearsal.upload(phase, state.done + 1)
        names = [self._name(leaf) for leaf in leaves(self._functions.broadcast(state.server))]
        new = {leaf: self._name(tensor) for leaf, tensor in self.problem.first().items()} if self._any_new() else {}
        task = Task(self.number, state.done + 1, phase, 0, names, self._name(state.buffers), new, 0, 0, 0)
        self.messages = [self._message(node, task, config) for node in self.asked]
        return self.messages

    @property
    def _functions(self) -> Phase:
        return self.problem.algorithm.phases[self.phase]

    def _any_new(self) -> bool:
        return self.problem.keeps and any(node not in self.state.versions for node in self.asked)

    def _name(self, tensor: Tensor) -> str:
        """The name of a tensor, the same whenever it is the same object."""
        for place, sent in enumerate(self._sent):
            if sent is tensor:
                return str(place)
        self._sent.append(tensor)
        return str(len(self._sent) - 1)

    def _message(self, node: int, task: Task, config: ConfigRecord) -> Message:
        own = self.state.versions.get(node, 0)
        task = replace(
            task,
            position=self.state.position(node),
            first={} if own else task.first,
            own=own,
            settled=self.before.versions.get(node, 0),
            reply=self._version,
        )
        held = self._held.get(node, set())
        self._given[node] = held | {*task.message, task.buffers, *task.first.values()}
        missing = sorted(self._given[node] - held, key=int)
        arrays = {name: Array(self._sent[int(name)][0].numpy()) for name in missing}
        ours = ConfigRecord({"server-round": self.number, SETUP: write(self.setup), TASK: write(task)})
        content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({**config, **ours})})
        return Message(content, node, MessageType.TRAIN)

    @property
    def _version(self) -> int:
        """The version of a client's state after the exchange."""
        return self.number * len(self.problem.algorithm.phases) + self.phase + 1

    # ---- the way up ----

    def expected(self) -> Arrays:
        """What an upload looks like, for `screen`: zeros, and the buffers as they were sent."""
        upload = named_leaves(self._upload, "upload")
        like = {name: torch.zeros_like(leaf[0, 0], device=CPU).numpy() for name, leaf in upload}
        return {**like, BUFFERS: self.state.buffers[0].numpy()}

    def average(self, found: Screened) -> tuple[Tree, Screened]:
        """The weighted mean of the decoded uploads, leaves [1, ...], and who is left: not all need be decodable."""
        total, good, dropped = None, list[Good](), dict(found.dropped)
        heaviest = max((reply.weight for reply in found.good), default=1.0)
        for reply in found.good:
            try:
                upload = self._functions.decode(self._read(reply))
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                dropped[reply.node] = f"its upload cannot be decoded ({error})"
                continue
            part = tree_map(lambda leaf, w=reply.weight / heaviest: w * leaf[0], upload)
            total = part if total is None else tree_map(torch.add, total, part)
            good.append(reply)
        used = sum(reply.weight / heaviest for reply in good)
        return () if total is None else tree_map(lambda leaf: leaf / used, total), Screened(good, dropped)

    def _read(self, reply: Good) -> Tree:
        """A reply's upload, leaves [1, 1, ...]."""
        names, arrays = iter(name for name, _ in named_leaves(self._upload, "upload")), reply.arrays
        return tree_map(lambda leaf: torch.from_numpy(arrays[next(names)]).to(leaf.dtype)[None, None], self._upload)

    def move(self, mean: Tree, good: list[Good], everybody: Collection[int]) -> None:
        """The server's function, and what is now known of the nodes that answered."""
        state, nodes = self.state, [reply.node for reply in good]
        weights = {**state.weights, **{reply.node: reply.weight for reply in good}}
        steps = int(self._functions.steps(torch.tensor([self.setup.local_steps]))[0])
        cohort = Cohort(state.done + 1, len(good), torch.arange(len(good)), _mass(weights, nodes, everybody), steps)
        server = self._functions.server(state.server, mean, cohort)
        if not torch.isfinite(self.problem.x(server)).all():
            self.reason = "the server's step leads out of the finite numbers"
            return
        self.state = replace(
            state,
            server=server,
            buffers=_buffers(state.buffers, good),
            weights=weights,
            seen={**state.seen, **{node: state.position(node) + steps for node in nodes}},
            versions={**state.versions, **dict.fromkeys(nodes, self._version)},
        )
        self.answered = nodes
        self._held |= {node: self._given[node] for node in nodes}


def _mass(weights: Mapping[int, float], nodes: Collection[int], everybody: Collection[int]) -> float:
    """The nodes' share of all weights; one that was never heard of counts as the mean of the others."""
    unknown = len(set(everybody) - weights.keys())
    known = sum(weights.values())
    return sum(weights[node] for node in nodes) / (known + unknown * known / len(weights))


def _buffers(start: Tensor, good: list[Good]) -> Tensor:
    """The weighted mean of the nodes' buffers; a constant stays, to the bit."""
    total = sum(reply.weight for reply in good)
    moves = [(torch.from_numpy(reply.arrays[BUFFERS]).to(start) - start) * (reply.weight / total) for reply in good]
    return start + sum(moves[1:], moves[0])
