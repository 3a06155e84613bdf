"""What can come of a case, and which of it is a failure of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RIGHT = "right"  # the result is that of the undamaged, uninterrupted run
REFUSED = "refused"  # with a sentence, and exit code 2
FELL_BACK = "fell back"  # to an older state, or left something out, and said so
TAKEN = "taken"  # no checksum guards such a file: what it says now is used
SKIPPED = "skipped"  # this machine cannot make the case
LOST = "lost"  # work that was done is gone, or cannot be completed
WRONG = "wrong"  # other numbers, without a word
LITTER = "litter"  # temporary files stay
TRACEBACK = "traceback"  # or the death of the process
HANG = "hang"  # longer than the limit
MEMORY = "memory"  # more than the limit

GOOD = (RIGHT, REFUSED, FELL_BACK, TAKEN, SKIPPED)
BAD = (LOST, WRONG, LITTER, TRACEBACK, HANG, MEMORY)


@dataclass(frozen=True)
class Result:
    """One case: what was tried, what came of it, and in a bad case what was seen."""

    part: str
    number: int
    group: str  # what it was tried on
    name: str  # what was done to it
    verdict: str
    seen: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether the library failed."""
        return self.verdict in BAD


Case = Callable[[], Result]
