"""Which messages answer an exchange.

A message counts if it comes from a node that was asked, and answers the message that this node was
sent. Of several such messages from one node, the first counts. Flower's SuperLink also matches
replies to messages, but this code does not rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flwr.app import Message, Metadata

SHOWN = 200
"""How many letters of a client's own text the log shows."""
SECOND = "a second reply"
"""Why a node's second message does not count. `screen.tell` writes a line of its own for it."""
FOREIGN = "it was not asked"
"""Why a message of a node that got no message in this exchange does not count."""


class Answers(NamedTuple):
    """What has arrived in an exchange."""

    replies: dict[int, Message]
    """The reply of each node."""
    ignored: list[tuple[int, str]]
    """The other messages: which node sent them, and why they do not count."""


def match(messages: Iterable[Message], asked: Sequence[Message]) -> Answers:
    """Sort the messages that have arrived into replies and others.

    Args:
        messages: What has arrived, in the order of arrival.
        asked: The messages that were sent, one to each node.

    Returns:
        At most one reply of each node, and the messages that do not count with the reason. A node
        that has sent nothing is in neither. An error message of a node is a reply, too: `screen`
        decides what it is worth.
    """
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
    """A client's text on one line of the log.

    It is cut, and characters that a terminal would obey are written as escapes. A client could
    otherwise move the cursor of whoever reads the log, or forge lines in it.

    >>> shown("bad\\nvalue")
    'bad value'
    """
    # A text can be very long. It is cut before any work is done on all of it.
    longest = 4 * SHOWN
    line = " ".join(text[:longest].split())
    safe = ""
    for character in line:
        if character.isprintable():
            safe += character
        else:
            safe += character.encode("unicode_escape").decode()
    if len(safe) <= SHOWN and len(text) <= longest:
        return safe
    return f"{safe[:SHOWN]}..."


def _node(message: Message, sent: Mapping[int, Metadata]) -> int:
    """The node that a message is about.

    If a node is lost, the SuperLink tells so in the server's name. Then the node is the one that
    got the message which this one answers.
    """
    source = message.metadata.src_node_id
    answers = message.metadata.reply_to_message_id
    if source in sent or not message.has_error() or not answers:
        return source
    for node, one in sent.items():
        if one.message_id == answers and one.src_node_id == source:
            return node
    return source


def _fault(message: Message, sent: Metadata | None) -> str:
    """Why a message does not answer the one that was sent. Empty if it does.

    `sent` is about the message to the node that this one comes from, or None if there was none.
    """
    got = message.metadata
    if sent is None:
        return FOREIGN
    if got.run_id != sent.run_id:
        return f"it belongs to run {got.run_id}, this is run {sent.run_id}"
    # A grid that sets no message ids tells nothing about what is answered.
    if sent.message_id and got.reply_to_message_id != sent.message_id:
        return "it answers another message than the one that was sent, of an earlier round perhaps"
    # A message of the SuperLink itself has no type and no group.
    if got.src_node_id == sent.src_node_id:
        return ""
    same_type = got.message_type == sent.message_type
    same_group = got.group_id == sent.group_id
    if same_type and same_group:
        return ""
    return f"it is of the kind {_kind(got)}, asked for was {_kind(sent)}"


def _kind(one: Metadata) -> str:
    """The type and the group of a message, for the log."""
    return shown(f"{one.message_type!r} {one.group_id!r}")
