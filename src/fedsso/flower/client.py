"""One ClientApp for every algorithm: what a client does in a round comes with the message.

A client keeps in its context the states that the algorithm gave it, by version, and what it has
received in the round under way. Every message says which version counts: that of the last reply
which the server could use. So a reply that was lost or refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ..algorithm import Algorithm, Reply
from ..algorithm.records import stack
from ..data import Federation
from ..engine.evaluate import Evaluator
from ..engine.gather import Chunk, Gather
from ..engine.metrics import METRICS
from ..engine.rounds import Rounds
from ..engine.settings import DTYPES, Loss, Settings, device_of
from ..engine.simulate import fitted
from ..objective import Layout, buffers_of, objective, ravel
from ..objective.losses import RowLoss, mse, row_loss
from ..support.trees import Tree, named_leaves, tree_map
from .discreet import discreet
from .task import BUFFERS, OWN, SETUP, TASK, Mismatch, Setup, Task, digest, read

ROUND, STATE = (
    "fedsso.round.",
    "fedsso.own.",
)  # records of a context, followed by the round or the version
Rows = tuple[Any, Any] | tuple[Any, Any, Any, Any]
"""A client's x and y for training and, if it has any, for testing."""


def client_app(
    model: Callable[[], nn.Module], data: Callable[[Context], Rows], loss: Loss = "cross_entropy"
) -> ClientApp:
    """The clients of `PhasedStrategy`: `model()` builds the module, `data(context)` gives a node's
    own rows.

    It evaluates on the test rows, or on the training rows where there are none.
    """
    losses, app = row_loss(loss), ClientApp(mods=[discreet])

    def work(
        message: Message, context: Context, run: Callable[[Client, Message, Context], RecordDict]
    ) -> Message:
        with torch.no_grad():
            client = Client(read(Setup, SETUP, message), model(), data(context), losses)
            return Message(run(client, message, context), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return work(message, context, Client.train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return work(message, context, Client.evaluate)

    return app


class Client:
    """One client while it answers one message."""

    def __init__(self, setup: Setup, module: nn.Module, rows: Rows, loss: RowLoss) -> None:
        self.setup, self.dtype, self.device = setup, DTYPES[setup.dtype], device_of("auto")
        self.module = module.to(self.device, self.dtype)
        _same_model(self.module, setup.model)
        self.train_rows, self.test_rows = _federations(rows, self.device)
        self.f, _ = objective(self.module, loss, "auto", self.device, self.train_rows.sample_shape)
        self.f.l2 = setup.l2
        self.algorithm: Algorithm = stack(
            [fitted(setup.record, self.module)], self.dtype, self.device
        )
        self.blank = torch.zeros_like(ravel(self.module)).unsqueeze(
            0
        )  # a model that shows what trees look like

    # ---- training ----

    def train(self, message: Message, context: Context) -> RecordDict:
        """The upload of one exchange."""
        task = read(Task, TASK, message)
        phases = self.algorithm.phases
        tensors = self._tensors(
            _received(task, message, context.state, task.phase + 1 == len(phases))
        )
        like, names = (
            phases[task.phase].broadcast(self.algorithm.server_init(self.blank)),
            iter(task.message),
        )
        sent = tree_map(lambda _: tensors[next(names)].unsqueeze(0), like)
        self.f.buffers = tensors[task.buffers].view(1, 1, -1).clone()
        reply = self._exchange(
            task, sent, self._state(task, tensors, context.state), _number(context)
        )
        _keep(context.state, task.reply, tree_map(lambda leaf: leaf[0], reply.own))
        return self._answer(reply)

    def _exchange(self, task: Task, message: Tree, own: Tree, number: int) -> Reply:
        """What the algorithm's client does, with the mini-batches of client `number` in the
        simulator."""
        setup, phase = self.setup, self.algorithm.phases[task.phase]
        settings = Settings(
            local_steps=setup.local_steps, batch_size=setup.batch_size, seed=setup.seed
        )
        rounds, gather = (
            Rounds(self.train_rows, settings, number),
            Gather(self.train_rows, self.dtype),
        )
        steps = phase.steps(torch.tensor([setup.local_steps])).numpy()
        local = Chunk(
            gather, rounds, task.k, np.zeros(1, np.int64), np.array([task.position]), steps
        )
        return phase.client(self.f, message, tree_map(lambda leaf: leaf.unsqueeze(0), own), local)

    def _answer(self, reply: Reply) -> RecordDict:
        upload = {name: leaf[0, 0] for name, leaf in named_leaves(reply.upload, "upload")}
        metrics: dict[str, Any] = {self.setup.weight: len(self.train_rows.train_rows)}
        if reply.loss is not None:
            metrics["train_loss"] = float(reply.loss[0, 0])
        arrays = _record({**upload, BUFFERS: self.f.buffers[0, 0]})
        return RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})

    def _state(self, task: Task, tensors: Mapping[str, Tensor], state: RecordDict) -> Tree:
        """The client's state in the version that counts; versions that never will again are
        dropped."""
        for name in [name for name in state if name.startswith(STATE)]:
            if name not in (f"{STATE}{task.own}", f"{STATE}{task.settled}"):
                del state[name]
        if task.own:
            return self._version(task.own, state)
        own = self.algorithm.client_init(self.blank)
        first = {name: tensors[tensor].unsqueeze(0) for name, tensor in task.first.items()}
        return _filled(own, {**dict(named_leaves(own, "own")), **first})

    def _version(self, version: int, state: RecordDict) -> Tree:
        """A version of the client's state."""
        record = state.array_records.get(f"{STATE}{version}", ArrayRecord())
        own = self.algorithm.client_init(self.blank)
        if any(name not in record for name, _ in named_leaves(own, "own")):
            raise Mismatch(
                "this client has lost the state that the algorithm keeps with it; start the run "
                "again"
            )
        return _filled(own, self._tensors(record))

    def _tensors(self, record: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array.numpy()).to(self.device) for name, array in record.items()
        }

    # ---- evaluation ----

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """Loss and accuracy of the model in the message, or of the client's own where every client
        has one."""
        (arrays,) = message.content.array_records.values()
        self.module.load_state_dict(arrays.to_torch_state_dict())
        x, fed = ravel(self.module).unsqueeze(0), self.test_rows
        if self.algorithm.personal:
            x = self.algorithm.model(
                self.algorithm.server_init(x), self._personal(x, message, context)
            )
        gather = Gather(fed, self.dtype)
        evaluator = Evaluator(self.f, fed, gather, {"accuracy": METRICS["accuracy"]})
        found = evaluator(x, buffers_of(self.module).to(x).unsqueeze(0), fed.train_rows)
        metrics: dict[str, Any] = {
            "eval_loss": float(found["loss"]),
            self.setup.weight: len(fed.train_rows),
        }
        if self.f.loss is not mse:
            metrics["eval_acc"] = float(found["accuracy"])
        return RecordDict({"metrics": MetricRecord(metrics)})

    def _personal(self, x: Tensor, message: Message, context: Context) -> Tree:
        """The client's own part of its model."""
        (config,) = message.content.config_records.values()
        version = config[OWN]
        return (
            self._version(int(str(version)), context.state)
            if version
            else self.algorithm.client_init(x)
        )


def _received(task: Task, message: Message, state: RecordDict, last: bool) -> dict[str, Any]:
    """The arrays of the round so far; what came in earlier rounds is forgotten, as is all after the
    last exchange."""
    held: dict[str, Any] = {}
    for name in [name for name in state if name.startswith(ROUND)]:
        record = state.array_records[name]
        del state[name]
        held |= record if name == f"{ROUND}{task.round}" else {}
    (arrays,) = message.content.array_records.values()
    held |= arrays
    missing = [n for n in (*task.message, *task.first.values(), task.buffers) if n not in held]
    if missing:
        raise Mismatch(
            "this client has lost what it received earlier in the round; it can take part in the "
            "next one"
        )
    if not last:
        state[f"{ROUND}{task.round}"] = ArrayRecord(held)
    return held


def _keep(state: RecordDict, version: int, own: Tree) -> None:
    """Put a version of the client's state into its context."""
    tensors = dict(named_leaves(own, "own"))
    if tensors:
        state[f"{STATE}{version}"] = _record(tensors)


def _record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def _filled(tree: Tree, tensors: Mapping[str, Tensor]) -> Tree:
    """A tree like this one of tensors with the names of its leaves."""
    parts = iter([tensors[name] for name, _ in named_leaves(tree, "own")])
    return tree_map(lambda _: next(parts), tree)


def _number(context: Context) -> int:
    """The client's number in all draws: its partition where it has one, else its node."""
    return int(context.node_config.get("partition-id", context.node_id))


def _same_model(module: nn.Module, expected: str) -> None:
    """Refuse a module whose arrays are not those of the server's model, in the same order."""
    layout = Layout.of(module)
    params = list(zip(layout.names, layout.shapes, strict=True))
    if digest(params, [(name, b.shape) for name, b in module.named_buffers()]) != expected:
        raise Mismatch(
            f"this client's model is not the server's: it trains {', '.join(layout.names)}; both "
            f"sides need the same "
            "class, every parameter trainable, and no other buffers than BatchNorm's"
        )


def _federations(rows: Sequence[Any], device: torch.device) -> tuple[Federation, Federation]:
    """One client's rows for training and for testing, the same where there is no test part."""
    if not isinstance(rows, list | tuple) or len(rows) not in (2, 4):
        raise Mismatch("data(context) must give (x, y) or (x_train, y_train, x_test, y_test)")
    pairs = [rows[:2], rows[-2:]]
    feds = [Federation.from_clients([(x, y)], test_fraction=0) for x, y in pairs]
    train, test = (
        replace(fed, train_rows=torch.arange(len(fed.x))).to(device) for fed in feds
    )  # as they were given
    return train, test
