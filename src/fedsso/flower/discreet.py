"""Errors that tell a server nothing about a client's rows.

    app = ClientApp(mods=[discreet])

Flower sends the text of an exception to the server, and a reader of tables quotes the cell that it
cannot read. With this mod, the server hears only the kind of the error and its attribute `public`,
where it has one. InputError has one: a text without any value of a row. The whole error, with its
traceback, goes to the client's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy

from flwr.app import Context, Error, Message

log = logging.getLogger("flwr")
RAISED = 2
"""Flower's code of an error inside a ClientApp."""


def discreet(
    message: Message,
    context: Context,
    call_next: Callable[[Message, Context], Message],
) -> Message:
    """A mod for ClientApps: turn an exception into an error reply that hides its text.

    The context stays as it was before the message, so that the client can answer the next one.

    Args:
        message: The message to answer.
        context: What Flower keeps for the client.
        call_next: The ClientApp, or the next mod.

    Returns:
        The reply of `call_next`, or an error message with Flower's code for a failed ClientApp.

    >>> from flwr.clientapp import ClientApp
    >>> app = ClientApp(mods=[discreet])
    """
    # A handler may change the context, and fail afterwards.
    before = deepcopy(context.state)
    try:
        return call_next(message, context)
    except (Exception, SystemExit) as error:
        text = public(error)
        log.exception("this client could not answer; the server is told: %s", text)
        context.state = before
        return Message(Error(RAISED, text), reply_to=message)


def public(error: BaseException) -> str:
    """What others may know of an error: its class, and its attribute `public` if it has one.

    >>> public(ValueError("row 7 holds 'Ms Smith'"))
    "ValueError; the client's own log has the details"
    """
    kind = type(error).__name__
    text = getattr(error, "public", None)
    if isinstance(text, str) and text:
        return f"{kind}: {text}"
    return f"{kind}; the client's own log has the details"
