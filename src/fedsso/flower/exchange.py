"""One round of an algorithm in Flower's messages.

It decides what each node is sent, and what the replies make of the server's state. A round is kept
or undone as a whole. So the state is a value, which is replaced when the round has succeeded.

Tensors travel under names. What a node has received in a round, and has confirmed by a good reply,
is not sent to it again in this round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from torch import Tensor

from ..algorithm import Algorithm, Attendance, Cohort, Phase
from ..algorithm.records import stack
from ..engine.simulate import fitted
from ..objective import Layout
from ..server import packed, unpacked
from ..support.trees import Tree, leaves, named_leaves, tree_map
from . import bounds, settings
from .answers import shown
from .averages import Average
from .bounds import Clip
from .rehearse import Rehearsal
from .screen import Good, Screened, note
from .task import BUFFERS, SETUP, TASK, Setup, Task, digest, write
from .wire import UPDATE, Arrays, Given, Model

CPU = torch.device("cpu")
REST = 2.5
"""The bound of the first leaf of an upload, times this, is the bound of the others.

The first leaf is the change of the model. The others hold what an algorithm sends beside it, such
as SCAFFOLD's control variates.
"""

Numbers = dict[int, list[float]]
"""For each node, a number for each leaf of its upload."""


@dataclass(frozen=True)
class State:
    """What the server keeps from round to round.

    A state is never modified. A round makes a new one, and the strategy takes it over if the whole
    round has succeeded.
    """

    server: Any
    """The algorithm's state."""
    buffers: Tensor
    """The model's buffers, [1, b]."""
    done: int = 0
    """How many rounds have moved the model."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """The weights of the nodes that have ever answered."""
    seen: Mapping[int, int] = field(default_factory=dict)
    """How many mini-batches each of them has seen."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """The version of each one's own state."""
    begun: int = 0
    """How many mini-batches a node counts as having seen, before it answers for the first time."""

    def position(self, node: int) -> int:
        """Where a node is in its stream of mini-batches."""
        return self.seen.get(node, self.begun)

    def tensors(self) -> dict[str, Tensor]:
        """What a later run needs to go on.

        Nodes have other numbers in a later run. All of them then count as the node that has seen
        most mini-batches, so that none of them sees the same ones again.
        """
        most = max(self.seen.values(), default=self.begun)
        numbers = {
            "done": torch.tensor(self.done),
            "begun": torch.tensor(most),
            BUFFERS: self.buffers,
        }
        return numbers | packed(self.server, self.done)

    def restored(self, tensors: Mapping[str, Tensor]) -> State:
        """This state with the numbers that `tensors` returned in an earlier run.

        What belongs to single nodes is not restored: weights, positions and versions are empty.
        """
        return State(
            unpacked(self.server, tensors),
            tensors[BUFFERS],
            int(tensors["done"]),
            begun=int(tensors["begun"]),
        )


class Rule(NamedTuple):
    """How many replies become one: first each is bounded, then all are averaged."""

    clip: Clip | None
    """What bounds each of them. None: nothing."""
    average: Average | None
    """How they are averaged. None: by their weighted mean."""


class Problem:
    """An algorithm, and the model that it trains, which is known by its arrays.

    The server needs no module and no data. What it must know follows from the names, the shapes
    and the types of the model's arrays.

    Args:
        record: The algorithm with its hyper-parameters, as the user has given it.
        arrays: The initial model, by name.
        l2: The strength of the penalty, which some algorithms must know.
    """

    model: Model
    """How the arrays become the vector x, and back."""
    buffers: dict[str, torch.Size]
    """The shapes of the arrays that are averaged, and not trained."""
    places: dict[str, Tensor]
    """Where the buffers of each kind are, in the vector of all buffers."""
    record: Algorithm
    """The algorithm with its hyper-parameters, fitted to the model."""
    algorithm: Algorithm
    """The same with tensors of the model's type, as the functions of the algorithm take it."""
    rehearsal: Rehearsal
    """What tells the shapes of client states and uploads."""
    digest: str
    """A few letters by which a client recognises the model."""
    x0: Tensor
    """The initial model, [1, d]."""
    start: State
    """The state before the first round."""

    def __init__(self, record: Algorithm, arrays: Arrays, l2: float = 0.0) -> None:
        self.model = Model(arrays)
        params: dict[str, torch.Size] = {}
        self.buffers = {}
        for name, (shape, _) in self.model.like.items():
            is_param = self.model.kinds[name] == UPDATE
            group = params if is_param else self.buffers
            group[name] = torch.Size(shape)
        self.places = _places(self.buffers, self.model.kinds)
        layout = Layout(tuple(params), tuple(params.values()))
        self.record = fitted(record, layout, Attendance(l2=l2, only_means=True))
        dtype = self.model.dtype
        self.algorithm = stack([self.record], dtype, CPU)
        d = sum(self.model.sizes)
        self.rehearsal = Rehearsal(self.record, d, dtype)
        self.digest = digest(
            list(params.items()),
            list(self.buffers.items()),
        )
        self.x0 = self.model.ravel(arrays).unsqueeze(0)
        self.start = State(
            self.algorithm.server_init(self.x0),
            self._first_buffers(arrays),
        )

    def _first_buffers(self, arrays: Arrays) -> Tensor:
        """The buffers of the initial model as one vector, [1, b]."""
        parts = [self.x0.new_zeros(0)]
        for name in self.buffers:
            buffer = torch.from_numpy(np.array(arrays[name]))
            flat = buffer.reshape(-1)
            parts.append(flat.to(self.x0.dtype))
        return torch.cat(parts)[None]

    @property
    def keeps(self) -> bool:
        """Whether the algorithm keeps a state with every client, as SCAFFOLD does.

        Flower forgets such a state when a run ends, so the run cannot be resumed.
        """
        first_leaf = next(leaves(self.rehearsal.own), None)
        return first_leaf is not None

    def statistics(self, arrays: Given) -> Arrays:
        """The model's buffers in an upload, by their names in the model.

        An upload has all buffers in one vector. Each of them is looked at by itself, because a
        variance must not be negative while a mean may be.
        """
        if not self.buffers:
            return {}
        sizes = [shape.numel() for shape in self.buffers.values()]
        cuts = np.cumsum(sizes)[:-1]
        parts = np.split(arrays[BUFFERS], cuts)
        return dict(zip(self.buffers, parts, strict=True))

    def first(self) -> dict[str, Tensor]:
        """The parts of a new client's state that it cannot know by itself.

        These are the leaves that depend on the initial model. They are found by comparing the state
        for the initial model with the state for a model of zeros.
        """
        zeros = torch.zeros_like(self.x0)
        blank = dict(named_leaves(self.algorithm.client_init(zeros), "own"))
        own = self.algorithm.client_init(self.x0)
        found = {}
        for name, leaf in named_leaves(own, "own"):
            if not torch.equal(leaf, blank[name]):
                found[name] = leaf
        return found

    def x(self, server: Any) -> Tensor:
        """The model [d]. A part that every client has for itself is that of the start."""
        own = self.algorithm.client_init(self.x0)
        return self.algorithm.model(server, own)[0]

    def arrays(self, state: State) -> ArrayRecord:
        """The model as named arrays."""
        buffers = self.statistics({BUFFERS: state.buffers[0].numpy()})
        x = self.x(state.server)
        return self.model.record(x, buffers)


class Round:
    """A round under way.

    For each exchange, the strategy calls `ask` for the messages, screens the replies, and calls
    `average` and `move`. If the exchange fails, it sets `reason` instead, and forgets the round.

    Args:
        problem: The algorithm and the layout of the model.
        setup: What all clients are told about the run.
        state: The server's state before the round.
        number: The number of the round, counted over all runs of a folder.
        rule: How the uploads are bounded and averaged.
    """

    def __init__(
        self,
        problem: Problem,
        setup: Setup,
        state: State,
        number: int,
        rule: Rule,
    ) -> None:
        self.problem = problem
        self.setup = setup
        self.number = number
        self.rule = rule
        # The state before the round, and the state so far.
        self.before = state
        self.state = state
        # The exchange under way, its nodes, and the messages to them.
        self.phase = 0
        self.asked: Collection[int] = ()
        self.messages: list[Message] = []
        # The nodes whose last reply was good.
        self.answered: list[int] = []
        # Why the round has failed. Empty if it has not.
        self.reason = ""
        # What the trace tells: how many replies were dropped, and so on.
        self.numbers: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}
        # How the buffers of the good replies have moved.
        self._moves: list[Tensor] = []
        # What an upload looks like: leaves [1, 1, ...] without numbers.
        self._upload: Tree = ()
        # The tensors that were sent. The name of a tensor is its place here.
        self._sent: list[Tensor] = []
        # The names of the tensors that a node has once its message arrives.
        self._given: dict[int, set[str]] = {}
        # The names of the tensors that a node is known to have.
        self._held: dict[int, set[str]] = {}

    # ---- the way down ----

    def ask(
        self,
        phase: int,
        nodes: Collection[int],
        config: ConfigRecord,
    ) -> list[Message]:
        """The messages of an exchange.

        Args:
            phase: The number of the exchange within the round, from 0.
            nodes: The nodes to ask.
            config: The user's configuration, which travels with our own.

        Returns:
            One message to each node. They differ, because a message leaves out the tensors that its
            node has already, and names the version of that node's own state.
        """
        self.phase = phase
        self.asked = nodes
        state = self.state
        k = state.done + 1
        self._upload = self.problem.rehearsal.upload(phase, k)
        broadcast = self._functions.broadcast(state.server)
        names = [self._name(leaf) for leaf in leaves(broadcast)]
        first = {}
        if self._any_new():
            for leaf, tensor in self.problem.first().items():
                first[leaf] = self._name(tensor)
        task = Task(
            round=self.number,
            k=k,
            phase=phase,
            position=0,
            message=names,
            buffers=self._name(state.buffers),
            first=first,
            own=0,
            settled=0,
            reply=self._version,
        )
        self.messages = []
        for node in self.asked:
            message = self._message(node, task, config)
            self.messages.append(message)
        return self.messages

    @property
    def _functions(self) -> Phase:
        """The functions of the algorithm for this exchange."""
        return self.problem.algorithm.phases[self.phase]

    def _any_new(self) -> bool:
        """Whether one of the nodes needs the state of a new client."""
        if not self.problem.keeps:
            return False
        known = self.state.versions.keys()
        return bool(set(self.asked) - known)

    def _name(self, tensor: Tensor) -> str:
        """The name of a tensor. It is the same whenever it is the same object.

        So a tensor that several exchanges of a round need is sent to a node once.
        """
        for place, sent in enumerate(self._sent):
            if sent is tensor:
                return str(place)
        self._sent.append(tensor)
        return str(len(self._sent) - 1)

    def _message(self, node: int, task: Task, config: ConfigRecord) -> Message:
        """The message to one node. `task` holds what is the same for all of them.

        It carries only those tensors that the node does not have yet.
        """
        own = self.state.versions.get(node, 0)
        task = replace(
            task,
            position=self.state.position(node),
            first={} if own else task.first,
            own=own,
            settled=self.before.versions.get(node, 0),
        )
        held = self._held.get(node, set())
        needed = {*task.message, task.buffers, *task.first.values()}
        given = held | needed
        self._given[node] = given
        arrays = {}
        for name in sorted(given - held, key=int):
            tensor = self._sent[int(name)]
            arrays[name] = Array(tensor[0].numpy())
        full_config = ConfigRecord(
            {
                **config,
                "server-round": self.number,
                SETUP: write(self.setup),
                TASK: write(task),
            }
        )
        content = RecordDict({"arrays": ArrayRecord(arrays), "config": full_config})
        return Message(content, node, MessageType.TRAIN)

    @property
    def _version(self) -> int:
        """The version of a client's state after this exchange. Versions rise, and begin with 1."""
        phases = len(self.problem.algorithm.phases)
        return self.number * phases + self.phase + 1

    # ---- the way up ----

    def expected(self) -> Arrays:
        """What an upload must look like, for `screen`: zeros, and the buffers as they were sent.

        An upload is a change of the model, so its length is its distance from zero. Buffers come
        back whole, so theirs is the distance from what was sent.
        """
        like: Arrays = {}
        for name, leaf in named_leaves(self._upload, "upload"):
            zeros = torch.zeros_like(leaf[0, 0], device=CPU)
            like[name] = zeros.numpy()
        like[BUFFERS] = self.state.buffers[0].numpy()
        return like

    def average(self, found: Screened) -> tuple[Tree, Screened]:
        """Average the decoded uploads.

        A reply whose upload cannot be decoded is dropped. What exceeds its bounds is shortened, and
        noted for the log.

        Args:
            found: The replies that passed the screening.

        Returns:
            The average, a tree with leaves [1, ...], and the replies with what was noted of them.
        """
        lengths: Numbers = {}
        good: list[Good] = []
        dropped = dict(found.dropped)
        for reply in found.good:
            try:
                upload = self._decoded(reply)
                own = [_norm(leaf) for leaf in leaves(upload)]
                lengths[reply.node] = own
                good.append(reply)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                dropped[reply.node] = shown(f"its upload cannot be decoded ({error})")
        scales = self._scales(good, lengths)
        clipped = dict(found.clipped)
        for node, own in lengths.items():
            for length, scale in zip(own, scales[node], strict=True):
                if scale < 1:
                    told = bounds.told("upload of length", length, scale)
                    note(clipped, node, told)
        self._moves = self._bounded_moves(good, clipped)
        if self.rule.average is None:
            mean = self._mean(good, scales)
        else:
            mean = self._robust(self.rule.average, good, scales)
        mean = self._with_largest(mean, good, scales)
        return mean, found._replace(good=good, dropped=dropped, clipped=clipped)

    def _decoded(self, reply: Good) -> Tree:
        """The upload of a reply in the form that is averaged, leaves [1, 1, ...].

        Some algorithms compress their uploads. A client can send numbers that are finite, but
        decode to infinite ones. Such an upload is a ValueError.
        """
        upload = self._functions.decode(self._read(reply))
        for leaf in leaves(upload):
            if not torch.isfinite(leaf).all():
                raise ValueError("it becomes NaN or infinite")
        return upload

    def _read(self, reply: Good) -> Tree:
        """The upload of a reply as a tree of tensors, leaves [1, 1, ...]."""
        arrays = reply.arrays
        names = [name for name, _ in named_leaves(self._upload, "upload")]
        left = iter(names)

        def tensor(leaf: Tensor) -> Tensor:
            """The array for a leaf, in its type."""
            array = arrays[next(left)]
            own = torch.from_numpy(array)
            return own.to(leaf.dtype)[None, None]

        return tree_map(tensor, self._upload)

    def _scales(self, good: list[Good], lengths: Numbers) -> Numbers:
        """What each leaf of each upload is multiplied by, so that it keeps its bound: 1 or less.

        The first leaf moves the model. In what comes with it, such as memories or curvature, honest
        clients differ far more, so its bound is wider. Single numbers are bounded as weights are.
        """
        nodes = [reply.node for reply in good]
        scales: Numbers = {}
        for node in nodes:
            leaves_of_node = len(lengths[node])
            scales[node] = [1.0] * leaves_of_node
        clip = self.rule.clip
        if clip is None or not nodes:
            return scales
        example = self._decoded(good[0])
        for place, leaf in enumerate(leaves(example)):
            multiple = clip.update
            if leaf.numel() == 1:
                multiple = clip.weight
            elif place > 0:
                multiple = clip.update * REST
            column = [lengths[node][place] for node in nodes]
            factors = bounds.factors(column, multiple)
            for node, factor in zip(nodes, factors, strict=True):
                scales[node][place] = factor
        return scales

    def _bounded_moves(
        self,
        good: list[Good],
        clipped: dict[int, str],
    ) -> list[Tensor]:
        """How the nodes' buffers have moved, each kind within its bounds, [1, b] each.

        Args:
            good: The replies.
            clipped: Where it is noted what counts less than was sent.
        """
        start = self.state.buffers
        clip = self.rule.clip
        moves = []
        for reply in good:
            buffers = torch.from_numpy(reply.arrays[BUFFERS])
            moves.append(buffers.to(start) - start)
        if clip is None:
            return moves
        for kind, places in self.problem.places.items():
            lengths = [_norm(move[:, places]) for move in moves]
            scales = bounds.factors(lengths, clip.multiple(kind))
            for i, scale in enumerate(scales):
                if scale < 1:
                    node = good[i].node
                    moves[i][:, places] *= scale
                    told = bounds.told(f"{kind} of length", lengths[i], scale)
                    note(clipped, node, told)
        return moves

    def _part(self, reply: Good, scales: Numbers) -> Tree:
        """The decoded upload of a reply within its bounds, leaves [1, ...]."""
        upload = self._decoded(reply)
        factors = iter(scales[reply.node])
        return tree_map(lambda leaf: leaf[0] * next(factors), upload)

    def _mean(self, good: list[Good], scales: Numbers) -> Tree:
        """The weighted mean.

        The uploads are added one at a time, because a decoded upload can be as large as a matrix.
        """
        total: Tree = None
        # Shares of the heaviest weight are at most 1, so a large weight cannot make a sum overflow.
        heaviest = max((reply.weight for reply in good), default=1.0)
        for reply in good:
            share = reply.weight / heaviest
            part = self._part(reply, scales)
            weighted = tree_map(lambda leaf, share=share: share * leaf, part)
            if total is None:
                total = weighted
            else:
                total = tree_map(torch.add, total, weighted)
        if total is None:
            return ()
        used = sum(reply.weight / heaviest for reply in good)
        return tree_map(lambda leaf: leaf / used, total)

    def _with_largest(self, mean: Tree, good: list[Good], scales: Numbers) -> Tree:
        """The average with the maximum over the nodes in those fields that the algorithm names.

        It is no robust average: a node that lies can raise it as far as the bound of single
        numbers allows.
        """
        for name in self._functions.largest if good else ():
            most = getattr(self._part(good[0], scales), name)
            for reply in good[1:]:
                most = torch.maximum(most, getattr(self._part(reply, scales), name))
            mean = mean._replace(**{name: most})
        return mean

    def _robust(
        self,
        average: Average,
        good: list[Good],
        scales: Numbers,
    ) -> Tree:
        """A robust average of all uploads at once."""
        parts = [self._part(reply, scales) for reply in good]
        if not parts:
            return ()

        def averaged(*leaf: Tensor) -> Tensor:
            """The average of one leaf of all uploads."""
            stacked = torch.stack(leaf)
            return average(stacked)

        return tree_map(averaged, *parts)

    def move(
        self,
        mean: Tree,
        good: list[Good],
        everybody: Collection[int],
    ) -> None:
        """Run the server's function, and note what is now known of the nodes that answered.

        If the new model is not finite, the state stays, and `reason` says so.

        Args:
            mean: The average of the uploads.
            good: The replies that it was made of.
            everybody: All nodes of the federation, whether they were asked or not.
        """
        state = self.state
        nodes = [reply.node for reply in good]
        weights = {**state.weights}
        for reply in good:
            weights[reply.node] = reply.weight
        local_steps = torch.tensor([self.setup.local_steps])
        steps = int(self._functions.steps(local_steps)[0])
        cohort = Cohort(
            state.done + 1,
            len(good),
            torch.arange(len(good)),
            _mass(weights, nodes, everybody),
            steps,
            _loss(good, robust=self.rule.average is not None),
        )
        server = self._functions.server(state.server, mean, cohort)
        if not torch.isfinite(self.problem.x(server)).all():
            self.reason = "the server's step leads out of the finite numbers"
            return
        seen = {**state.seen}
        versions = {**state.versions}
        for node in nodes:
            seen[node] = state.position(node) + steps
            versions[node] = self._version
            self._held[node] = self._given[node]
        self.state = replace(
            state,
            server=server,
            buffers=self._buffers(good),
            weights=weights,
            seen=seen,
            versions=versions,
        )
        if not self._functions.lead:  # after it the others are asked again
            self.answered = nodes

    def _buffers(self, good: list[Good]) -> Tensor:
        """The average of the nodes' buffers. One that nobody changed stays the same, to the bit.

        The moves are averaged and added to what was sent. An average of the buffers themselves
        would round a constant.
        """
        start = self.state.buffers
        moves = self._moves
        average = self.rule.average
        if average is not None:
            return start + average(torch.stack(moves))
        total = sum(reply.weight for reply in good)
        parts = []
        for move, reply in zip(moves, good, strict=True):
            share = reply.weight / total
            parts.append(move * share)
        first, *others = parts
        return start + sum(others, first)


def _loss(good: Collection[Good], *, robust: bool) -> Tensor | None:
    """What the nodes report of their loss, [1, 1]; None if one reports nothing.

    It is their weighted mean, or the median where uploads are averaged robustly.
    """
    told = [settings.loss(reply.metrics, None) for reply in good]
    losses = [loss for loss in told if loss is not None]
    if not losses or len(losses) < len(told):
        return None
    if robust:
        return torch.tensor([[median(losses)]], dtype=torch.float64)
    weights = [reply.weight for reply in good]
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    return torch.tensor([[mean]], dtype=torch.float64)


def _norm(tensor: Tensor) -> float:
    """The Euclidean length, computed in float64."""
    return float(tensor.double().norm())


def _places(
    buffers: Mapping[str, torch.Size],
    kinds: Mapping[str, str],
) -> dict[str, Tensor]:
    """Where the buffers of each kind are, in the vector of all buffers."""
    places: dict[str, list[int]] = {}
    start = 0
    for name, shape in buffers.items():
        end = start + shape.numel()
        own = places.setdefault(kinds[name], [])
        own.extend(range(start, end))
        start = end
    found = {}
    for kind, own in places.items():
        if own:
            found[kind] = torch.tensor(own)
    return found


def _mass(
    weights: Mapping[int, float],
    nodes: Collection[int],
    everybody: Collection[int],
) -> float:
    """The nodes' share of all weights.

    Algorithms that estimate a sum over all clients from some of them need this share. The weight of
    a node that has never answered is not known. It counts as the mean of the others.
    """
    unheard = len(set(everybody) - weights.keys())
    known = sum(weights.values())
    own = sum(weights[node] for node in nodes)
    everything = known + unheard * known / len(weights)
    return own / everything
