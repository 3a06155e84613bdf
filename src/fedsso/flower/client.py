"""One ClientApp for every algorithm: what a client does in a round comes with the message.

Flower keeps a context for every client, in which the client stores two things. The first is the
state that the algorithm gives to each client, in versions. The second is what it has received in
the round under way.

Every message says which version of the state counts: the one after the last reply that the server
could use. So a reply that was lost or refused leaves no trace.
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

from ..algorithm import Algorithm, Attendance, Reply
from ..algorithm.records import stack
from ..data import Federation
from ..engine.evaluate import Evaluator
from ..engine.gather import Chunk, gathering
from ..engine.metrics import METRICS
from ..engine.rounds import Rounds
from ..engine.settings import DTYPES, Loss, Settings, device_of
from ..engine.simulate import fitted
from ..objective import Layout, buffers_of, objective, ravel
from ..objective.losses import RowLoss, mse, row_loss
from ..support.trees import Tree, named_leaves, tree_map
from .discreet import discreet
from .task import BUFFERS, OWN, SETUP, TASK, Mismatch, Setup, Task, digest, read

# Names of records in a client's context. The number of the round, or of the version, follows.
ROUND = "fedsso.round."
STATE = "fedsso.own."

Pair = tuple[Any, Any]
Pairs = tuple[Any, Any, Any, Any]
Rows = Pair | Pairs
"""A client's x and y for training and, if it has any, for testing."""
Named = Mapping[str, Tensor]
"""Tensors by name."""


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Rows],
    loss: Loss = "cross_entropy",
) -> ClientApp:
    """Make the ClientApp for a server that runs `PhasedStrategy`.

    The client does whatever the server's algorithm asks for: the messages carry the algorithm's
    name and settings. Errors tell the server nothing about the rows.

    Args:
        model: Builds the module. It must be the same on all clients and the server.
        data: Is given the context of the node, and returns its own rows: (x, y), or
            (x_train, y_train, x_test, y_test). In a simulation, context.node_config has the number
            of the node as "partition-id". A client is evaluated on its test rows, or on its
            training rows if it has no test rows.
        loss: The name of the loss, or a function of the model's output and the targets.

    Returns:
        The app for `flwr run`, or for a SuperNode.

    >>> def rows(context):
    ...     return [[0.0], [1.0]], [0, 1]
    >>> app = client_app(lambda: nn.Linear(1, 2), rows)
    """
    losses = row_loss(loss)
    app = ClientApp(mods=[discreet])

    def work(
        message: Message,
        context: Context,
        run: Callable[[Client, Message, Context], RecordDict],
    ) -> Message:
        """Build a client for one message, and let it answer."""
        with torch.no_grad():
            setup = read(Setup, SETUP, message)
            client = Client(setup, model(), data(context), losses)
            content = run(client, message, context)
            return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return work(message, context, Client.train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return work(message, context, Client.evaluate)

    return app


class Client:
    """One client, while it answers one message.

    It is built anew for every message. What must survive is in the context. The constructor raises
    Mismatch if the user's model is not the server's, or if the rows have a wrong form.

    Args:
        setup: What the server says about the whole run.
        module: The user's model, freshly built. Its parameters come with the message.
        rows: The client's own rows, as the user's function `data` returns them.
        loss: The loss of each row.
    """

    setup: Setup
    """What holds for the whole run."""
    dtype: torch.dtype
    """The type of the parameters."""
    device: torch.device
    """Where the client computes: on a graphics card, if it has one."""
    module: nn.Module
    """The user's model, moved to that type and device."""
    train_rows: Federation
    """The rows for training, as a federation of one client."""
    test_rows: Federation
    """The rows for evaluation."""
    algorithm: Algorithm
    """The algorithm, with its hyper-parameters as tensors."""
    blank: Tensor
    """A model of zeros, [1, d], from which the shapes of messages and states follow."""

    def __init__(
        self,
        setup: Setup,
        module: nn.Module,
        rows: Rows,
        loss: RowLoss,
    ) -> None:
        self.setup = setup
        self.dtype = DTYPES[setup.dtype]
        self.device = device_of("auto")
        self.module = module.to(self.device, self.dtype)
        _check_same_model(self.module, setup.model)
        self.train_rows, self.test_rows = _federations(rows, self.device)
        sample = self.train_rows.sample_shape
        sparse = self.train_rows.is_sparse
        self.f, _ = objective(self.module, loss, "auto", self.device, sample, sparse)
        self.f.l2 = setup.l2
        rows_here = int(self.train_rows.train_sizes.max())
        known = Attendance(l2=setup.l2, rows=rows_here)
        record = fitted(setup.record, self.module, known)
        self.algorithm = stack([record], self.dtype, self.device)
        zeros = torch.zeros_like(ravel(self.module))
        self.blank = zeros.unsqueeze(0)

    # ---- training ----

    def train(self, message: Message, context: Context) -> RecordDict:
        """Do one exchange, and return the upload.

        The context afterwards holds the new version of the client's state, beside the one before
        the round. The server says with its next message which of the two counts.

        Args:
            message: The tensors that this client does not have yet, and the task.
            context: What Flower keeps for this client between messages. It is modified.

        Raises:
            Mismatch: The client has lost a part of what it received or of its own state.
        """
        task = read(Task, TASK, message)
        last = len(self.algorithm.phases) - 1
        is_last = task.phase == last
        received = _received(task, message, context.state, is_last)
        tensors = self._tensors(received)
        sent = self._message(task, tensors)
        buffers = tensors[task.buffers]
        # The objective updates its buffers in place, so it gets a copy.
        self.f.buffers = buffers.view(1, 1, -1).clone()
        own = self._state(task, tensors, context.state)
        reply = self._exchange(task, sent, own, _number(context))
        new = tree_map(lambda leaf: leaf[0], reply.own)
        _keep(context.state, task.reply, new)
        return self._answer(reply)

    def _message(self, task: Task, tensors: Named) -> Tree:
        """The algorithm's message, put together from the tensors that have arrived.

        Only the tensors travel, and not the tree that holds them. The client makes the same tree
        from a blank model, and puts the tensors in the places of its leaves.
        """
        server = self.algorithm.server_init(self.blank)
        phase = self.algorithm.phases[task.phase]
        like = phase.broadcast(server)
        names = iter(task.message)

        def arrived(_: Tensor) -> Tensor:
            name = next(names)
            return tensors[name].unsqueeze(0)

        return tree_map(arrived, like)

    def _exchange(
        self,
        task: Task,
        message: Tree,
        own: Tree,
        number: int,
    ) -> Reply:
        """Run the algorithm's client function.

        Args:
            task: Which exchange it is, and where the client is in its stream of mini-batches.
            message: What the server has sent, a tree with leaves [1, ...].
            own: The client's state, a tree with leaves [1, ...].
            number: The client's number. The mini-batches are those of this client in the
                simulator, so a run on Flower can repeat a simulation.

        Returns:
            The upload, the client's new state and its loss. All leaves begin with [1, 1, ...]: the
            simulator runs several trials and clients at once, and here there is one of each.
        """
        setup = self.setup
        phase = self.algorithm.phases[task.phase]
        settings = Settings(
            local_steps=setup.local_steps, batch_size=setup.batch_size, seed=setup.seed
        )
        steps = phase.steps(torch.tensor([setup.local_steps]))
        local = Chunk(
            gathering(self.train_rows, self.dtype),
            Rounds(self.train_rows, settings, number),
            task.k,
            np.zeros(1, np.int64),
            np.array([task.position]),
            steps.numpy(),
        )
        alone = tree_map(lambda leaf: leaf.unsqueeze(0), own)
        return phase.client(self.f, message, alone, local)

    def _answer(self, reply: Reply) -> RecordDict:
        """The content of the reply: the upload, the buffers, the client's weight and its loss."""
        tensors = {}
        for name, leaf in named_leaves(reply.upload, "upload"):
            tensors[name] = leaf[0, 0]
        tensors[BUFFERS] = self.f.buffers[0, 0]
        metrics: dict[str, Any] = {}
        metrics[self.setup.weight] = len(self.train_rows.train_rows)
        if reply.loss is not None:
            metrics["train_loss"] = float(reply.loss[0, 0])
        return RecordDict(
            {
                "arrays": _record(tensors),
                "metrics": MetricRecord(metrics),
            }
        )

    def _state(
        self,
        task: Task,
        tensors: Named,
        state: RecordDict,
    ) -> Tree:
        """The client's state in the version that counts, a tree with leaves [1, ...].

        Versions that can never count again are removed from the context. These are all but the one
        to start from, and the one to go back to if the round fails. A client that takes part for
        the first time gets the algorithm's initial state.
        """
        needed = (
            f"{STATE}{task.own}",
            f"{STATE}{task.settled}",
        )
        for name in list(state):
            if name.startswith(STATE) and name not in needed:
                del state[name]
        if task.own:
            return self._version(task.own, state)
        own = self.algorithm.client_init(self.blank)
        values = dict(named_leaves(own, "own"))
        # The blank model is zero, so what depends on the initial model comes with the message.
        for leaf, tensor in task.first.items():
            values[leaf] = tensors[tensor].unsqueeze(0)
        return _filled(own, values)

    def _version(self, version: int, state: RecordDict) -> Tree:
        """A version of the client's state from its context.

        Raises Mismatch if it is not there. A fresh state would be wrong without any error, because
        the server counts on the one that this client reported.
        """
        record = state.array_records.get(f"{STATE}{version}", ArrayRecord())
        own = self.algorithm.client_init(self.blank)
        for name, _ in named_leaves(own, "own"):
            if name not in record:
                raise Mismatch(
                    "this client has lost the state that the algorithm keeps with it; start the "
                    "run again"
                )
        return _filled(own, self._tensors(record))

    def _tensors(self, record: Mapping[str, Any]) -> dict[str, Tensor]:
        """Flower's arrays as tensors on the client's device."""
        tensors = {}
        for name, array in record.items():
            tensor = torch.from_numpy(array.numpy())
            tensors[name] = tensor.to(self.device)
        return tensors

    # ---- evaluation ----

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """Measure the loss and the accuracy of a model on the client's rows.

        It is the model of the message, or the client's own where every client has one. With real
        targets there is no accuracy.

        Returns:
            One record of metrics: eval_loss, eval_acc where there are classes, and the weight. The
            weight is the number of rows that were evaluated.
        """
        (arrays,) = message.content.array_records.values()
        self.module.load_state_dict(arrays.to_torch_state_dict())
        x = ravel(self.module).unsqueeze(0)
        if self.algorithm.personal:
            own = self._personal(x, message, context)
            server = self.algorithm.server_init(x)
            x = self.algorithm.model(server, own)
        fed = self.test_rows
        wanted = {"accuracy": METRICS["accuracy"]}
        gather = gathering(fed, self.dtype)
        evaluator = Evaluator(self.f, fed, gather, wanted)
        buffers = buffers_of(self.module).to(x)
        found = evaluator(x, buffers.unsqueeze(0), fed.train_rows)
        metrics: dict[str, Any] = {
            "eval_loss": float(found["loss"]),
            self.setup.weight: len(fed.train_rows),
        }
        if self.f.loss is not mse:
            metrics["eval_acc"] = float(found["accuracy"])
        return RecordDict({"metrics": MetricRecord(metrics)})

    def _personal(self, x: Tensor, message: Message, context: Context) -> Tree:
        """The client's own part of its model, where the algorithm gives every client one.

        A client that has not taken part yet begins with the model of the message.
        """
        (config,) = message.content.config_records.values()
        version = config[OWN]
        if not version:
            return self.algorithm.client_init(x)
        return self._version(int(str(version)), context.state)


# ---- a client's context ----


def _received(
    task: Task,
    message: Message,
    state: RecordDict,
    last: bool,
) -> dict[str, Any]:
    """The arrays that have arrived in this round so far, with those of this message.

    They are kept in the context until the last exchange. Those of earlier rounds are forgotten.

    Args:
        task: The exchange, which lists the arrays that it needs.
        message: What has arrived now.
        state: The client's context.
        last: Whether this is the last exchange of the round.

    Raises:
        Mismatch: An array is missing, for example because the client was restarted in between.
    """
    held: dict[str, Any] = {}
    for name in list(state):
        if name.startswith(ROUND):
            record = state.array_records[name]
            del state[name]
            if name == f"{ROUND}{task.round}":
                held |= record
    (arrays,) = message.content.array_records.values()
    held |= arrays
    needed = (*task.message, *task.first.values(), task.buffers)
    for name in needed:
        if name not in held:
            raise Mismatch(
                "this client has lost what it received earlier in the round; it can take part in "
                "the next one"
            )
    if not last:
        state[f"{ROUND}{task.round}"] = ArrayRecord(held)
    return held


def _keep(state: RecordDict, version: int, own: Tree) -> None:
    """Put a version of the client's state into its context."""
    tensors = dict(named_leaves(own, "own"))
    if tensors:
        state[f"{STATE}{version}"] = _record(tensors)


def _record(tensors: Named) -> ArrayRecord:
    """Tensors as a record of Flower."""
    plain = {}
    for name, tensor in tensors.items():
        plain[name] = tensor.cpu().contiguous()
    return ArrayRecord(plain)


def _filled(tree: Tree, tensors: Named) -> Tree:
    """A tree of the same shape, whose leaves are the tensors with the names of its leaves.

    `tree_map` visits the leaves in the order in which `named_leaves` names them.
    """
    parts = []
    for name, _ in named_leaves(tree, "own"):
        parts.append(tensors[name])
    left = iter(parts)
    return tree_map(lambda _: next(left), tree)


def _number(context: Context) -> int:
    """The client's number in all draws: its partition if it has one, else its node."""
    return int(context.node_config.get("partition-id", context.node_id))


# ---- what a user gives ----


def _check_same_model(module: nn.Module, expected: str) -> None:
    """Raise Mismatch unless a module has the arrays of the server's model, in the same order.

    `expected` is what `digest` made of the server's model.
    """
    layout = Layout.of(module)
    params = list(zip(layout.names, layout.shapes, strict=True))
    buffers = [(name, buffer.shape) for name, buffer in module.named_buffers()]
    if digest(params, buffers) != expected:
        names = ", ".join(layout.names)
        raise Mismatch(
            f"this client's model is not the server's: it trains {names}; both sides need the same "
            "class, every parameter trainable, and no other buffers than BatchNorm's"
        )


def _federations(
    rows: Sequence[Any],
    device: torch.device,
) -> tuple[Federation, Federation]:
    """A client's rows for training and for testing. Both are the same if it has no test rows.

    Raises Mismatch if `rows` is not a list or tuple of two or four parts.
    """
    is_sequence = isinstance(rows, list | tuple)
    if not is_sequence or len(rows) not in (2, 4):
        raise Mismatch("data(context) must give (x, y) or (x_train, y_train, x_test, y_test)")
    # The last two parts are the test rows. Of two parts, these are the training rows again.
    train = _alone(rows[0], rows[1], device)
    test = _alone(rows[-2], rows[-1], device)
    return train, test


def _alone(x: Any, y: Any, device: torch.device) -> Federation:
    """A federation of one client, whose rows are all for training and keep their order.

    The order decides which rows a mini-batch draws. A shuffle would make a run on Flower differ
    from the simulation of the same clients.
    """
    fed = Federation.from_clients([(x, y)], test_fraction=0)
    in_order = torch.arange(len(fed.x))
    unshuffled = replace(fed, train_rows=in_order)
    return unshuffled.to(device)
