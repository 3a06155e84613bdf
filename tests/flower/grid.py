"""A federation inside one process: Flower's own client app, contexts and messages, over a wire of
real bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN, SERVER = 7, 1  # ids of the run and of the server's node
DRAW = Random(3)
NODES = [int.from_bytes(DRAW.randbytes(8), "little") for _ in range(256)]  # as Flower draws ids
RAISED = 2  # Flower's code of an error inside a client app

Tamper = Callable[[Message], Message | list[Message] | None]
"""Changes a reply on its way to the server, makes several of it, or loses it (None)."""


def identify() -> None:
    """Give this process the identity without which Flower makes no message."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SERVER, 1


class LocalGrid(Grid):
    """Nodes that answer at once, each with a context of its own; `node_configs` has one entry for
    each. The ids of `in_order` rise, as a server that sorts them has them."""

    def __init__(
        self,
        app: ClientApp,
        node_configs: Sequence[Mapping[str, Any]],
        tamper: Tamper | None = None,
        in_order: bool = False,
    ) -> None:
        identify()
        nodes = NODES[: len(node_configs)]
        self.app, self.tamper = app, tamper
        self.contexts = {
            node: Context(RUN, node, dict(config), RecordDict(), {})
            for node, config in zip(sorted(nodes) if in_order else nodes, node_configs, strict=True)
        }
        self.down: list[int] = []  # bytes of each message to a node
        self.up: list[int] = []  # and of each reply
        self.sent: list[Message] = []
        self.asked = Message(RecordDict(), SERVER, "train")  # what the reply under way answers

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002
    ) -> list[Message]:
        """All replies; a node works on copies of message and context that went through protobuf."""
        return [reply for message in messages for reply in self._answer(message)]

    def _answer(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = str(uuid4())  # as Flower's own grids do
        received = _wire(message, self.down)
        self.sent.append(received)
        context = context_from_proto(context_to_proto(self.contexts[node]))
        try:
            reply = self.app(received, context)
            self.contexts[node] = context_from_proto(context_to_proto(context))
        except Exception as error:  # whatever the app raises, the server hears of an error
            reply = Message(Error(RAISED, f"{type(error).__name__}: {error}"), reply_to=received)
        reply = _wire(reply, self.up)
        self.asked = received
        arrived = reply if self.tamper is None else self.tamper(reply)
        return arrived if isinstance(arrived, list) else [] if arrived is None else [arrived]

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


def _wire(message: Message, sizes: list[int]) -> Message:
    """The message as the other side reads it, with its size in bytes noted."""
    data = message_to_proto(message).SerializeToString()
    sizes.append(len(data))
    return message_from_proto(ProtoMessage.FromString(data))
