"""What the server asks of a client, as JSON in the configuration of a message.

`Setup` holds for the whole run. `Task` is one exchange with one client. Both travel with every
message, because a client builds everything anew for every message. Tensors travel beside them, as
arrays of the message.
"""

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

# Keys of a message's configuration.
SETUP = "fedsso.setup"
TASK = "fedsso.task"
OWN = "fedsso.own"

BUFFERS = "buffers"
"""The array of an upload that holds the model's buffers."""
T = TypeVar("T", "Setup", "Task")
Shapes = Sequence[tuple[str, Sequence[int]]]
"""The names and shapes of a model's arrays."""


class Mismatch(InputError):
    """Client and server do not fit together. The text holds nothing of a row: all may read it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.public = message


@dataclass(frozen=True)
class Setup:
    """What holds for the whole run."""

    algorithm: str
    """The name of the algorithm in the registry."""
    values: Mapping[str, Any]
    """The fields of its record."""
    model: str
    """What `digest` makes of the model."""
    dtype: str
    """The type of the parameters, such as "float32"."""
    weight: str
    """The metric that tells a client's weight."""
    local_steps: int
    batch_size: int | None
    seed: int
    l2: float
    """The strength of the penalty l2/2 |x|^2."""

    @property
    def record(self) -> Algorithm:
        """The algorithm's record. A field that is a dictionary stands for a schedule."""
        values = {}
        for name, value in self.values.items():
            values[name] = Decay(**value) if isinstance(value, dict) else value
        return make(self.algorithm, values)


@dataclass(frozen=True)
class Task:
    """One exchange with one client.

    Tensors have names, and each one is sent to a client once in a round.
    """

    round: int
    """The round of the run. A client keeps what it has received until another round begins."""
    k: int
    """The round of the algorithm. A round that failed is done again."""
    phase: int
    """The exchange within the round, from 0."""
    position: int
    """How many mini-batches the client has seen."""
    message: Sequence[str]
    """The tensors of the algorithm's message, in order."""
    buffers: str
    """The tensor of the model's buffers."""
    first: Mapping[str, str]
    """The tensors of a new client's state, by the names of its leaves."""
    own: int
    """The version of the client's state to start from. 0: it is new."""
    settled: int
    """The version before this round, to go back to if the round fails."""
    reply: int
    """The version that the client's reply leaves."""


def write(part: Setup | Task) -> str:
    """A setup or a task as text, which `read` understands."""
    return json.dumps(asdict(part))


def read(kind: type[T], key: str, message: Message) -> T:
    """Read a setup or a task from a message. Raises Mismatch if there is none."""
    configs = message.content.config_records.values() if message.has_content() else ()
    text = None
    for config in configs:
        if key in config:
            text = config[key]
            break
    if not isinstance(text, str):
        raise Mismatch(
            "this message has no task for a client of fedsso; use PhasedStrategy on the server"
        )
    return kind(**json.loads(text))


def digest(params: Shapes, buffers: Shapes) -> str:
    """A few letters that change with the names, the shapes or the order of a model's arrays.

    >>> digest([("w", (2, 3))], []) == digest([("w", (3, 2))], [])
    False
    """
    parts = []
    for part in (params, buffers):
        named = [(name, tuple(shape)) for name, shape in part]
        parts.append(named)
    text = repr(parts)
    return blake2b(text.encode(), digest_size=8).hexdigest()
