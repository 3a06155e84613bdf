"""Nothing of a patient leaves a hospital by way of an error: `fedsso.flower.discreet`, without
torch and fedsso."""

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
        log.exception("this hospital could not answer; the server is told: %s", public(error))
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
