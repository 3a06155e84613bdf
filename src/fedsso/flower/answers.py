"""Which messages answer an exchange: of a node that was asked, to the message that it was sent, the
first of each.

Flower's SuperLink matches replies to messages as well; this does not rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flwr.app import Message, Metadata

SHOWN = 200  # letters of a client's own text in the log
SECOND = "a second reply"
FOREIGN = "it was not asked"


class Answers(NamedTuple):
    """The replies of an exchange by node, and the messages that are none: who sent them, and why
    they do not count."""

    replies: dict[int, Message]
    ignored: list[tuple[int, str]]


def match(messages: Iterable[Message], asked: Sequence[Message]) -> Answers:
    """Sort what has arrived by what was asked for."""
    sent = {message.metadata.dst_node_id: message.metadata for message in asked}
    found = Answers({}, [])
    for message in messages:
        node = _node(message, sent)
        reason = _fault(message, sent.get(node))
        if not reason and node in found.replies:
            reason = SECOND
        if reason:
            found.ignored.append((node, reason))
        else:
            found.replies[node] = message
    return found


def shown(text: str) -> str:
    """What a client wrote, on one line of the log: cut, with nothing that a terminal would obey."""
    line = " ".join(text[: 4 * SHOWN].split())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return safe if len(safe) <= SHOWN and len(text) <= 4 * SHOWN else f"{safe[:SHOWN]}..."


def _node(message: Message, sent: Mapping[int, Metadata]) -> int:
    """The node that a message comes from; of one that is lost the SuperLink tells, in the server's
    name."""
    source, to = message.metadata.src_node_id, message.metadata.reply_to_message_id
    if source in sent or not message.has_error() or not to:
        return source
    lost = (
        node for node, one in sent.items() if one.message_id == to and one.src_node_id == source
    )
    return next(lost, source)


def _fault(message: Message, sent: Metadata | None) -> str:
    """Why a message does not answer the one that was sent; empty if it does."""
    got = message.metadata
    if sent is None:
        return FOREIGN
    if got.run_id != sent.run_id:
        return f"it belongs to run {got.run_id}, this is run {sent.run_id}"
    if (
        sent.message_id and got.reply_to_message_id != sent.message_id
    ):  # a grid that sets no ids tells nothing
        return "it answers another message than the one that was sent, of an earlier round perhaps"
    if (
        got.src_node_id == sent.src_node_id
    ):  # the SuperLink's own word, which has no type and no group
        return ""
    if (got.message_type, got.group_id) != (sent.message_type, sent.group_id):
        was, should = (shown(f"{one.message_type!r} {one.group_id!r}") for one in (got, sent))
        return f"it is of the kind {was}, asked for was {should}"
    return ""
