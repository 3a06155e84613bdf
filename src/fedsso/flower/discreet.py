"""Nothing of a row leaves a client by way of an error.

    app = ClientApp(mods=[discreet])

Flower sends the text of an exception to the server, and a reader of tables quotes the cell that it
cannot read. With this mod the server hears the kind of the error and its `public` part, if it has
one, such as InputError's: text without any value of a row. The whole, with its traceback, goes to
the client's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy

from flwr.app import Context, Error, Message

log = logging.getLogger("flwr")
RAISED = 2  # Flower's code of an error inside a client app


def discreet(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A mod for ClientApps: an exception becomes an error reply without its text; the context stays
    as it was."""
    before = deepcopy(context.state)
    try:
        return call_next(message, context)
    except (Exception, SystemExit) as error:
        log.exception("this client could not answer; the server is told: %s", public(error))
        context.state = before
        return Message(Error(RAISED, public(error)), reply_to=message)


def public(error: BaseException) -> str:
    """What others may know of an error."""
    kind, text = type(error).__name__, getattr(error, "public", None)
    return (
        f"{kind}: {text}"
        if isinstance(text, str) and text
        else f"{kind}; the client's own log has the details"
    )
