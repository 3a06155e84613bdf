"""Asks the hospitals over Flower's grid, for `fedsso.regression.fit`.

    nodes = Nodes(grid, least=4)
    found = fit(nodes, schema_text, "binomial")

The first question waits for the hospitals, and goes to all that are online then. These are the
federation: who comes later is not asked. A hospital that refuses the first question takes no part,
and one that has not answered twice in a row is gone: neither is asked again.

On a busy machine Flower may lose a message: a process that starts too late finds its token
withdrawn, and a node without a sign for a minute counts as offline. So who has not answered is
asked again once it is back.

A message starts a Python process in the hospital. So when a question is repeated because some
hospitals have not answered it, only these get it again.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ...errors import InputError
from ...regression.questions import DESCRIBE, Answer, Array, Question, Refusal, Wrong
from ..answers import match, shown
from ..screen import header
from . import records

log = logging.getLogger("flwr")

PAUSE = 1.0
"""Seconds between two looks at who is online."""
TRIES = 2
"""Who has not answered so often in a row is gone."""
RETURN = 90.0
"""Seconds to wait for a node that has not answered: Flower hears of one that is well within 60."""


class Nodes:
    """All hospitals that Flower connects, as an `Ask`.

    Args:
        grid: What Flower's ServerApp is given.
        least: How many hospitals must be online before the first question is asked.
        timeout: For how many seconds to wait, for the hospitals to come, and for each answer.
    """

    asked: Counter[str]
    """How many questions of each kind there were. Each is one message to every hospital."""
    messages: int
    """How many messages were sent to hospitals."""

    def __init__(self, grid: Grid, least: int = 2, timeout: float = 600.0) -> None:
        self.grid = grid
        self.least = least
        self.timeout = timeout
        self.asked = Counter()
        self.messages = 0
        # The nodes that were online at first, the names they claim, and names without doubles.
        self._nodes: list[int] = []
        self._claims: dict[int, str] = {}
        self._names: dict[int, str] = {}
        # How often in a row each node has not answered, and who is not asked any more.
        self._misses: Counter[int] = Counter()
        self._gone: dict[int, Refusal] = {}
        # The last question, and who has answered it.
        self._last: Question | None = None
        self._answers: dict[int, dict[str, Array]] = {}

    def __call__(self, question: Question) -> list[Answer | Refusal]:
        """The answers and refusals of all hospitals, always in the same order."""
        self._nodes = self._nodes or self._online()
        if self._last is None or not _same(question, self._last):
            self._last = question
            self._answers = {}
            self.asked[question.name] += 1
        refusals: dict[int, Refusal] = {}
        # Who fits asks all questions but the first one again.
        for _ in range(TRIES if question.name == DESCRIBE else 1):
            refusals |= self._send(question, self._waiting())
        found: list[Answer | Refusal] = []
        for node in self._nodes:
            if node in self._answers:
                found.append(Answer(self._names[node], self._answers[node]))
            else:
                found.append(self._gone.get(node) or refusals[node])
        return found

    def _waiting(self) -> list[int]:
        """The nodes that have not answered the last question, back online as far as they come."""
        waiting = [node for node in self._nodes if node not in (self._gone.keys() | self._answers)]
        missed = {node for node in waiting if self._misses[node]}
        if missed:
            self._await(lambda online: missed <= online, min(RETURN, self.timeout))
        return waiting

    def _send(self, question: Question, nodes: list[int]) -> dict[int, Refusal]:
        """Ask some nodes. Their answers are kept, their refusals come back."""
        content = records.asked(question)
        asked = [Message(content, node, MessageType.QUERY) for node in nodes]
        self.messages += len(asked)
        arrived = list(self.grid.send_and_receive(asked, timeout=self.timeout)) if asked else []
        replies, ignored = match(arrived, asked)
        for node, reason in ignored:
            log.warning("a message of node %d is ignored: %s", node, reason)
        if self.asked.total() == 1:  # after the first question, nobody changes a name
            self._claims |= {node: _name(node, replies.get(node)) for node in nodes}
            self._names = _apart(self._claims)
        refusals = {}
        for node in nodes:
            try:
                self._answers[node] = self._arrays(replies.get(node))
                self._misses[node] = 0
            except _NoAnswer as reason:
                refusals[node] = self._note(node, question.name, reason)
        return refusals

    def _note(self, node: int, question: str, reason: _NoAnswer) -> Refusal:
        """Note and log that a node has not answered."""
        kind = Wrong if isinstance(reason, _Unreadable) else Refusal
        refusal = kind(self._names[node], shown(str(reason)))
        log.warning("%s does not answer %s: %s", refusal.hospital, question, refusal.reason)
        self._misses[node] += 1
        refuses = question == DESCRIBE and isinstance(reason, _Refused)
        if refuses or kind is Wrong or self._misses[node] == TRIES:
            self._gone[node] = refusal
        return refusal

    def _online(self) -> list[int]:
        """The nodes that are online, once there are enough of them."""
        nodes = self._await(lambda online: len(online) >= self.least, self.timeout)
        if len(nodes) < self.least:
            raise InputError(
                f"{len(nodes)} of {self.least} hospitals were online within {self.timeout:g} s; "
                f"start the others' flower-supernode, or ask for fewer with min-nodes"
            )
        return sorted(nodes)

    def _await(self, enough: Callable[[set[int]], bool], seconds: float) -> set[int]:
        """The nodes that are online, once they are enough or the time is over."""
        deadline = time.monotonic() + seconds
        while not enough(nodes := set(self.grid.get_node_ids())) and time.monotonic() < deadline:
            log.info("%d hospitals are online; waiting for others", len(nodes))
            time.sleep(PAUSE)
        return nodes

    def _arrays(self, reply: Message | None) -> dict[str, Array]:
        """The numbers of a reply. Raises _NoAnswer."""
        if reply is None:
            raise _NoAnswer(f"no answer within {self.timeout:g} s")
        if reply.has_error():
            raise _NoAnswer(f"error {reply.error.code}: {reply.error.reason or 'no reason given'}")
        texts = _texts(reply)
        if records.REFUSAL in texts:
            raise _Refused(str(texts[records.REFUSAL]))
        numbers = reply.content.array_records.get(records.NUMBERS) if texts else None
        if numbers is None:
            raise _Unreadable("its reply is no answer of a hospital; it needs the same app")
        return {name: _numbers(name, array) for name, array in numbers.items()}


class _NoAnswer(Exception):
    """Why a reply has no numbers."""


class _Refused(_NoAnswer):
    """The hospital itself says why."""


class _Unreadable(_NoAnswer):
    """The reply is none that a hospital sends."""


def _unnamed(node: int) -> str:
    """How a hospital is called before it has told its name."""
    return f"node {node}"


def _name(node: int, reply: Message | None) -> str:
    """The name that a hospital gives itself."""
    return shown(str(_texts(reply).get(records.HOSPITAL, ""))) or _unnamed(node)


def _texts(reply: Message | None) -> Mapping[str, object]:
    """The texts of a reply, none if there are none."""
    if reply is None or not reply.has_content():
        return {}
    return reply.content.config_records.get(records.TEXTS, {})


def _apart(names: dict[int, str]) -> dict[int, str]:
    """Names by node. Where several nodes claim one name, nobody knows whose it is: all have both.

    >>> _apart({5: "north", 6: "south", 7: "north"})
    {5: 'north (node 5)', 6: 'south', 7: 'north (node 7)'}
    """
    counts = Counter(names.values())
    if max(counts.values(), default=1) == 1:
        return names
    return _apart(
        {
            node: name if counts[name] == 1 else f"{name} ({_unnamed(node)})"
            for node, name in names.items()
        }
    )


def _numbers(name: str, array: FlowerArray) -> Array:
    """An array of an answer. Whether it is the right one, the fit asks."""
    try:
        shape, dtype = header(array.data)
        if math.prod(shape) * dtype.itemsize > len(array.data):
            raise ValueError("it is cut off")
        value: Array = array.numpy()
    except Exception as error:  # whatever a hospital may have put there
        raise _Unreadable(f"its {shown(name)} cannot be read ({type(error).__name__})") from error
    return value


def _same(a: Question, b: Question) -> bool:
    """Whether two questions ask the same."""
    arrays = zip(a[3:], b[3:], strict=True)
    return a[:3] == b[:3] and all(np.array_equal(one, other) for one, other in arrays)
