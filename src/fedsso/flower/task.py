"""What the server asks of a client, as JSON in a message's config: the settings of the run, and one
exchange of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from flwr.app import Message

from ..algorithm import Algorithm
from ..algorithm.schedule import Decay
from ..algorithms import make
from ..errors import InputError

SETUP, TASK, OWN = "fedsso.setup", "fedsso.task", "fedsso.own"  # keys of a config
BUFFERS = "buffers"  # the array of an upload that holds the model's buffers
T = TypeVar("T", "Setup", "Task")


class Mismatch(InputError):
    """What is wrong between client and server. Its text holds nothing of a row, so the other side
    may read it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.public = message


@dataclass(frozen=True)
class Setup:
    """What holds for the whole run."""

    algorithm: str  # its name in the registry
    values: Mapping[str, Any]  # its fields
    model: str  # what `digest` makes of the model
    dtype: str
    weight: str  # the metric that tells a client's weight
    local_steps: int
    batch_size: int | None
    seed: int
    l2: float

    @property
    def record(self) -> Algorithm:
        """The algorithm's record."""
        return make(
            self.algorithm,
            {k: Decay(**v) if isinstance(v, dict) else v for k, v in self.values.items()},
        )


@dataclass(frozen=True)
class Task:
    """One exchange with one client. Tensors go by names, and each is sent to a client once in a
    round."""

    round: int  # a client keeps what it has received until another round begins
    k: int  # the algorithm's round: rounds that failed are done again
    phase: int
    position: int  # mini-batches that the client has seen
    message: Sequence[str]  # tensors of the algorithm's message, in order
    buffers: str  # tensor of the model's buffers
    first: Mapping[str, str]  # tensors of a new client's state, by its leaves
    own: int  # version of the client's state to start from; 0: it is new
    settled: int  # the version before this round, to go back to if the round fails
    reply: int  # the version that the reply leaves


def write(part: Setup | Task) -> str:
    """Settings or a task as text."""
    return json.dumps(asdict(part))


def read(kind: type[T], key: str, message: Message) -> T:
    """Settings or the task in a message."""
    configs = message.content.config_records.values() if message.has_content() else ()
    text = next((config[key] for config in configs if key in config), None)
    if not isinstance(text, str):
        raise Mismatch(
            "this message has no task for a client of fedsso; use PhasedStrategy on the server"
        )
    return kind(**json.loads(text))


def digest(
    params: Sequence[tuple[str, Sequence[int]]], buffers: Sequence[tuple[str, Sequence[int]]]
) -> str:
    """A few letters that differ where names, shapes or order of a model's arrays differ."""
    text = repr([[(name, tuple(shape)) for name, shape in part] for part in (params, buffers)])
    return blake2b(text.encode(), digest_size=8).hexdigest()
