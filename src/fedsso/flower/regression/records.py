"""Questions and answers as Flower's records: texts in one, arrays in the other."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from ...errors import InputError
from ...regression.questions import QUESTIONS, Answer, Arrays, Question, Refusal, settings

TEXTS = "texts"
NUMBERS = "numbers"

HOSPITAL = "hospital"
REFUSAL = "refusal"
"""The text of an answer that says why there are no numbers."""


def asked(question: Question) -> RecordDict:
    """A question as the content of a message."""
    numbers = {
        "model": question.model,
        "mean": question.mean,
        "deviation": question.deviation,
    }
    return _content(dict(settings(question)), numbers)


def question_of(content: RecordDict) -> Question:
    """The question that a message asks.

    Raises:
        InputError: The message is no question of a regression.
    """
    try:
        texts = content.config_records[TEXTS]
        numbers = content.array_records[NUMBERS]
        name = str(texts["question"])
        found = Question(
            name,
            str(texts["schema"]),
            str(texts["family"]),
            numbers["model"].numpy(),
            numbers["mean"].numpy(),
            numbers["deviation"].numpy(),
        )
    except KeyError as error:
        wrong = "the message is no question of a regression; server and hospital need the same app"
        raise InputError(f"{wrong} (no {error})", public=wrong) from error
    if name not in QUESTIONS:
        raise InputError(f"there is no question {name!r}, only {', '.join(QUESTIONS)}")
    return found


def answered(answer: Answer) -> RecordDict:
    """An answer as the content of a message."""
    return _content({HOSPITAL: answer.hospital}, answer.arrays)


def refused(refusal: Refusal) -> RecordDict:
    """A refusal as the content of a message."""
    return _content({HOSPITAL: refusal.hospital, REFUSAL: refusal.reason}, {})


def _content(texts: dict[str, str], numbers: Arrays) -> RecordDict:
    arrays = {name: Array(array) for name, array in numbers.items()}
    return RecordDict({TEXTS: ConfigRecord({**texts}), NUMBERS: ArrayRecord(arrays)})
