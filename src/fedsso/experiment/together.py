"""Several processes that carry out one plan: the first leads, the others follow.

All of them have made the same plan. The first one looks into folders, decides what is left to do,
writes, and shows the progress. Before it trains a batch it says which, and the others train their
part of it (`engine/ranks.py`). At the end it hands the results to all, so that a script goes on
alike in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..engine.ranks import RankLost, Team, team
from ..errors import InputError

if TYPE_CHECKING:
    from .plan import Planned

T = TypeVar("T")
TRAIN = "train"
WAIT = "wait"
END = "end"
FAIL = "fail"


class Batch(NamedTuple):
    """What the first process is about to train."""

    identities: list[str]  # of the runs
    every: int  # rounds between checkpoints


Train = Callable[[Sequence["Planned"], int], object]
"""Trains some runs as one batch, with so many rounds between checkpoints."""


def lead_or_follow(planned: Sequence[Planned], lead: Callable[[], T], train: Train) -> T:
    """What `lead` returns in the first process, in all of them.

    Args:
        planned: The runs that the first process may train.
        lead: The whole work. It is called in the first process alone.
        train: What the others do for each batch that `lead` trains.

    Raises:
        InputError: The plan of the first process is not that of this one.
        Exception: Whatever `lead` raises.
    """
    ours = team()
    if ours.size == 1:
        return lead()
    if not ours.is_first:
        runs = {run.spec.identity: run._replace(folder=None) for run in planned}
        return _follow(ours, runs, train)  # type: ignore[no-any-return]
    try:
        result = lead()
    except RankLost:
        raise
    except (Exception, KeyboardInterrupt) as error:
        with suppress(Exception):  # the others may have failed as well, and be gone
            ours.share((FAIL, error))
        raise
    ours.share((END, result))
    return result


def announce(batch: Sequence[Planned], every: int) -> None:
    """Tell the others, if there are any and this process leads, which runs are trained next."""
    ours = team()
    if ours.size > 1 and ours.is_first:
        ours.share((TRAIN, Batch([run.spec.identity for run in batch], every)))


def wait_together() -> None:
    """Tell the others that this process is still there, while it waits for somebody else.

    They listen for what comes next, and would give this process up after some minutes.
    """
    ours = team()
    if ours.size > 1 and ours.is_first:
        ours.share((WAIT, None))


def _follow(ours: Team, runs: Mapping[str, Planned], train: Train) -> Any:
    """Train what the first process trains, until it has a result."""
    while True:
        nothing: tuple[str, Any] = ("", None)
        kind, content = ours.share(nothing)
        if kind == END:
            return content
        if kind == FAIL:
            raise content
        if kind == WAIT:
            continue
        unknown = [one for one in content.identities if one not in runs]
        if unknown:
            raise InputError(
                "the processes of this run have different data or settings; give all of them the "
                "same command and the same files"
            )
        # The first process stops at the same place, and says so next.
        with suppress(KeyboardInterrupt):
            train([runs[one] for one in content.identities], content.every)
