"""What a hospital runs: a ClientApp that answers questions about the hospital's own table.

    app = hospital_app(own.hospital)

`own.hospital` finds the table by the node's own configuration. An answer holds the numbers of
`regression.hospital`. Where the hospital refuses, or its table cannot be used, the server hears the
hospital's name and a sentence that holds nothing of a row. The whole error, with the cell that is
wrong, goes to the hospital's own log. So does a line for each answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ...errors import InputError
from ...regression.questions import Answer, Question, Refusal
from ..discreet import discreet
from . import records

log = logging.getLogger("flwr")


class Answering(Protocol):
    """A hospital: a name, and a function that answers questions or raises InputError."""

    @property
    def name(self) -> str:
        """How the results call it."""

    def answer(self, question: Question) -> Answer:
        """Its numbers. See `regression.hospital.Hospital`."""


Find: TypeAlias = Callable[[Context], Answering]
"""Finds the hospital of a node, by what Flower knows of the node."""


def hospital_app(find: Find) -> ClientApp:
    """Make the ClientApp of a hospital.

    Args:
        find: Gives the hospital with its table and limits. It is called for every message, since
            Flower starts a process for each. What it raises is told by its kind alone.

    Returns:
        An app that answers messages of the type "query".
    """
    app = ClientApp(mods=[discreet])

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        hospital = find(context)
        question = records.question_of(message.content)
        return Message(_reply(hospital, question), reply_to=message)

    return app


def _reply(hospital: Answering, question: Question) -> RecordDict:
    """The hospital's answer, or why there is none."""
    try:
        found = hospital.answer(question)
    except InputError as error:
        log.exception("%s: no answer; the server is told: %s", question.name, error.public)
        return records.refused(Refusal(hospital.name, error.public))
    log.info("%s: answered with %d bytes of numbers", question.name, found.bytes)
    return records.answered(found)
