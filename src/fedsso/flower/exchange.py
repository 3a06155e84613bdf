"""One round of an algorithm in Flower's messages: what each node is sent, and what the replies make
of the server.

A round is kept or undone as a whole. So its state is a value, replaced at the end; tensors travel
under names, and what a node has received in the round, and has confirmed by a good reply, is not
sent to it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from ..algorithm import Algorithm, Cohort, Phase
from ..algorithm.records import stack
from ..engine.simulate import fitted
from ..objective import Layout
from ..server import packed, unpacked
from ..support.trees import Tree, leaves, named_leaves, tree_map
from . import bounds
from .answers import shown
from .averages import Average
from .bounds import Clip
from .rehearse import Rehearsal
from .screen import Good, Screened, note
from .task import BUFFERS, SETUP, TASK, Setup, Task, digest, write
from .wire import Arrays, Model

CPU = torch.device("cpu")
REST = 2.5  # times the bound of the first leaf of an upload is that of the others


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
        """What a later run needs to go on; nodes have other ids there, and count as the one that
        has seen most."""
        most = max(self.seen.values(), default=self.begun)
        numbers = {
            "done": torch.tensor(self.done),
            "begun": torch.tensor(most),
            BUFFERS: self.buffers,
        }
        return numbers | packed(self.server, self.done)

    def restored(self, tensors: Mapping[str, Tensor]) -> State:
        """This state with the numbers of `tensors()`."""
        return State(
            unpacked(self.server, tensors),
            tensors[BUFFERS],
            int(tensors["done"]),
            begun=int(tensors["begun"]),
        )


class Rule(NamedTuple):
    """How replies become one."""

    clip: Clip | None  # what bounds each of them
    average: Average | None  # None: their weighted mean


class Problem:
    """An algorithm and the model that it trains, known by its arrays."""

    def __init__(self, record: Algorithm, arrays: Arrays) -> None:
        self.model = Model(arrays)
        params, shapes = (
            self.model.params,
            {name: torch.Size(shape) for name, (shape, _) in self.model.like.items()},
        )
        self.buffers = {name: shape for name, shape in shapes.items() if name not in params}
        self.places = _places(self.buffers, self.model.kinds)
        self.record = fitted(record, Layout(tuple(params), tuple(shapes[name] for name in params)))
        self.algorithm: Algorithm = stack([self.record], self.model.dtype, CPU)
        self.rehearsal = Rehearsal(self.record, sum(self.model.sizes), self.model.dtype)
        self.digest = digest([(name, shapes[name]) for name in params], list(self.buffers.items()))
        self.x0 = self.model.ravel(arrays).unsqueeze(0)
        parts = [
            torch.from_numpy(np.array(arrays[name])).reshape(-1).to(self.x0.dtype)
            for name in self.buffers
        ]
        self.start = State(
            self.algorithm.server_init(self.x0), torch.cat([self.x0.new_zeros(0), *parts])[None]
        )

    @property
    def keeps(self) -> bool:
        """Whether clients have a state of their own."""
        return next(leaves(self.rehearsal.own), None) is not None

    def statistics(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """The model's buffers in an upload, by name."""
        sizes = np.cumsum([shape.numel() for shape in self.buffers.values()])[:-1]
        return (
            dict(zip(self.buffers, np.split(arrays[BUFFERS], sizes), strict=True))
            if self.buffers
            else {}
        )

    def first(self) -> dict[str, Tensor]:
        """The leaves of a new client's state that it could not know, as they depend on the initial
        model."""
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

    def __init__(
        self, problem: Problem, setup: Setup, state: State, number: int, rule: Rule
    ) -> None:
        self.problem, self.setup, self.number, self.rule = problem, setup, number, rule
        self.before = self.state = state
        self.phase = 0  # the exchange under way
        self.asked: Collection[int] = ()  # its nodes
        self.messages: list[Message] = []  # to them
        self.answered: list[int] = []  # nodes whose last reply was good
        self.reason = ""  # why the round failed
        self.numbers: dict[str, float] = {}  # who was dropped, ..., for the trace
        self.metrics: dict[str, Any] = {}
        self._moves: list[Tensor] = []  # of the good replies' buffers
        self._upload: Tree = ()  # what is expected of each, [1, 1, ...] without numbers
        self._sent: list[Tensor] = []  # a tensor's name is its place here
        self._given: dict[
            int, set[str]
        ] = {}  # the tensors that a node has once its message arrives
        self._held: dict[int, set[str]] = {}  # those that it is known to have

    # ---- the way down ----

    def ask(self, phase: int, nodes: Collection[int], config: ConfigRecord) -> list[Message]:
        """The messages of an exchange."""
        self.phase, self.asked, state = phase, nodes, self.state
        self._upload = self.problem.rehearsal.upload(phase, state.done + 1)
        names = [self._name(leaf) for leaf in leaves(self._functions.broadcast(state.server))]
        new = (
            {leaf: self._name(tensor) for leaf, tensor in self.problem.first().items()}
            if self._any_new()
            else {}
        )
        task = Task(
            self.number, state.done + 1, phase, 0, names, self._name(state.buffers), new, 0, 0, 0
        )
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
        ours = ConfigRecord(
            {"server-round": self.number, SETUP: write(self.setup), TASK: write(task)}
        )
        content = RecordDict(
            {"arrays": ArrayRecord(arrays), "config": ConfigRecord({**config, **ours})}
        )
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
        """One tree from the decoded uploads, leaves [1, ...], and who is left: not all need be
        decodable."""
        lengths: dict[int, list[float]] = {}
        dropped, good = dict(found.dropped), list[Good]()
        for reply in found.good:
            try:
                lengths[reply.node] = [
                    float(leaf.double().norm()) for leaf in leaves(self._decoded(reply))
                ]
                good.append(reply)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                dropped[reply.node] = shown(f"its upload cannot be decoded ({error})")
        scales, clipped = self._scales(good, lengths), dict(found.clipped)
        for reply in good:
            for length, scale in zip(lengths[reply.node], scales[reply.node], strict=True):
                if scale < 1:
                    note(clipped, reply.node, bounds.told("upload of length", length, scale))
        self._moves = self._bounded(good, clipped)
        average = self.rule.average
        mean = self._mean(good, scales) if average is None else self._robust(average, good, scales)
        return mean, found._replace(good=good, dropped=dropped, clipped=clipped)

    def _bounded(self, good: list[Good], clipped: dict[int, str]) -> list[Tensor]:
        """How the nodes' buffers have moved, those of each kind within their bounds; what is
        clipped is noted."""
        start, clip = self.state.buffers, self.rule.clip
        moves = [torch.from_numpy(reply.arrays[BUFFERS]).to(start) - start for reply in good]
        if clip is None:
            return moves
        for kind, places in self.problem.places.items():
            lengths = [float(move[:, places].double().norm()) for move in moves]
            for i, scale in enumerate(bounds.factors(lengths, clip.multiple(kind))):
                if scale < 1:
                    moves[i][:, places] *= scale
                    note(clipped, good[i].node, bounds.told(f"{kind} of length", lengths[i], scale))
        return moves

    def _decoded(self, reply: Good) -> Tree:
        """A reply's upload as it is averaged, leaves [1, 1, ...]."""
        upload = self._functions.decode(self._read(reply))
        if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves(upload)):
            raise ValueError("it becomes NaN or infinite")
        return upload

    def _scales(
        self, good: list[Good], lengths: Mapping[int, list[float]]
    ) -> dict[int, list[float]]:
        """What each leaf of each upload is multiplied by.

        The first leaf moves the model; in what comes with it (memories, curvature) honest clients
        differ far more. Single numbers are bounded as weights are.
        """
        nodes, clip = [reply.node for reply in good], self.rule.clip
        if clip is None or not nodes:
            return {node: [1.0] * len(lengths[node]) for node in nodes}
        single = [leaf.numel() == 1 for leaf in leaves(self._decoded(good[0]))]
        columns = zip(*(lengths[node] for node in nodes), strict=True)
        multiples = [clip.update * (1.0 if i == 0 else REST) for i in range(len(single))]
        factors = [
            bounds.factors(column, clip.weight if one else multiple)
            for column, one, multiple in zip(columns, single, multiples, strict=True)
        ]
        return {node: [factor[i] for factor in factors] for i, node in enumerate(nodes)}

    def _part(self, reply: Good, scales: Mapping[int, list[float]]) -> Tree:
        """A reply's decoded upload within its bounds, leaves [1, ...]."""
        factors = iter(scales[reply.node])
        return tree_map(lambda leaf: leaf[0] * next(factors), self._decoded(reply))

    def _mean(self, good: list[Good], scales: Mapping[int, list[float]]) -> Tree:
        """The weighted mean, one upload at a time: decoded, one may be a matrix."""
        total: Tree = None
        heaviest = max((reply.weight for reply in good), default=1.0)
        for reply in good:
            part = tree_map(
                lambda leaf, w=reply.weight / heaviest: w * leaf, self._part(reply, scales)
            )
            total = part if total is None else tree_map(torch.add, total, part)
        used = sum(reply.weight / heaviest for reply in good)
        return () if total is None else tree_map(lambda leaf: leaf / used, total)

    def _robust(
        self, average: Average, good: list[Good], scales: Mapping[int, list[float]]
    ) -> Tree:
        """A robust average of all uploads at once."""
        parts = [self._part(reply, scales) for reply in good]
        return tree_map(lambda *leaf: average(torch.stack(leaf)), *parts) if parts else ()

    def _read(self, reply: Good) -> Tree:
        """A reply's upload, leaves [1, 1, ...]."""
        names, arrays = iter(name for name, _ in named_leaves(self._upload, "upload")), reply.arrays
        return tree_map(
            lambda leaf: torch.from_numpy(arrays[next(names)]).to(leaf.dtype)[None, None],
            self._upload,
        )

    def move(self, mean: Tree, good: list[Good], everybody: Collection[int]) -> None:
        """The server's function, and what is now known of the nodes that answered."""
        state, nodes = self.state, [reply.node for reply in good]
        weights = {**state.weights, **{reply.node: reply.weight for reply in good}}
        steps = int(self._functions.steps(torch.tensor([self.setup.local_steps]))[0])
        cohort = Cohort(
            state.done + 1,
            len(good),
            torch.arange(len(good)),
            _mass(weights, nodes, everybody),
            steps,
        )
        server = self._functions.server(state.server, mean, cohort)
        if not torch.isfinite(self.problem.x(server)).all():
            self.reason = "the server's step leads out of the finite numbers"
            return
        self.state = replace(
            state,
            server=server,
            buffers=self._buffers(good),
            weights=weights,
            seen={**state.seen, **{node: state.position(node) + steps for node in nodes}},
            versions={**state.versions, **dict.fromkeys(nodes, self._version)},
        )
        self.answered = nodes
        self._held |= {node: self._given[node] for node in nodes}

    def _buffers(self, good: list[Good]) -> Tensor:
        """The average of the nodes' buffers; a constant stays, to the bit."""
        start, moves = self.state.buffers, self._moves
        if self.rule.average is not None:
            return start + self.rule.average(torch.stack(moves))
        total = sum(reply.weight for reply in good)
        parts = [move * (reply.weight / total) for move, reply in zip(moves, good, strict=True)]
        return start + sum(parts[1:], parts[0])


def _places(buffers: Mapping[str, torch.Size], kinds: Mapping[str, str]) -> dict[str, Tensor]:
    """Where in the vector of all buffers those of each kind are."""
    labels = [kinds[name] for name, shape in buffers.items() for _ in range(shape.numel())]
    return {
        kind: torch.tensor([i for i, one in enumerate(labels) if one == kind])
        for kind in dict.fromkeys(labels)
    }


def _mass(
    weights: Mapping[int, float], nodes: Collection[int], everybody: Collection[int]
) -> float:
    """The nodes' share of all weights; one that was never heard of counts as the mean of the
    others."""
    unknown = len(set(everybody) - weights.keys())
    known = sum(weights.values())
    return sum(weights[node] for node in nodes) / (known + unknown * known / len(weights))
