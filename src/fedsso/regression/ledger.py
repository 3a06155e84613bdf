"""What a hospital remembers of its answers, so that nobody can subtract one from another.

The rows of a question are those without a gap in its columns. A sum over 400 rows less the same
sum over 399 is the row between them, and more answers can be combined in more ways. So the rows
are grouped by the answers that they were part of, and no group may be smaller than the limit:
whatever is added and subtracted then tells about so many rows at least.

A row is known by a fingerprint of its cells. If a patient is added, or a cell corrected, that is
another row.
"""

from __future__ import annotations

import io
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import InputError
from ..support.files import write_atomic
from ..support.intake import is_file, read_npz
from ..support.lock import PAUSE, Held, Lock
from .design import Table

Prints: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""Fingerprints of rows."""
PATIENCE = 60.0  # seconds to wait for another process
MOST = 64
"""Sets of rows that a ledger holds. A group of rows is a number with a bit for each."""


class Ledger:
    """The sets of rows that a hospital has answered for.

    Args:
        path: The file that holds them. Left out: they are forgotten with this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._sets: list[Prints] = []

    def admit(self, rows: Prints, least: int) -> None:
        """Remember the rows of a question.

        Raises:
            InputError: With earlier answers it would tell about fewer than `least` rows, or the
                file cannot be read or written.
        """
        if least <= 1 or self._holds(rows):
            return
        with self._alone():
            if self._holds(rows):
                return
            sets = [*self._read(), np.sort(rows)]
            if len(sets) > MOST:
                raise self._refusal(f"answers for {MOST} different sets of rows were given")
            if _smallest(sets) < least:
                raise self._refusal(
                    f"together with an earlier answer this one would tell about fewer than {least} "
                    "rows, this hospital's limit: ask with columns that leave the same rows "
                    'complete, or with missing = "median"; if the table was changed, its hospital '
                    "has to agree"
                )
            self._write(sets)

    def _holds(self, rows: Prints) -> bool:
        """Whether there was an answer for exactly these rows."""
        wanted = np.sort(rows)
        return any(np.array_equal(wanted, one) for one in self._read())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes from writing the file. Waits for those that are at it."""
        if self.path is None:
            yield
            return
        lock = Lock(self.path.parent)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                lock.acquire()
                break
            except Held:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE)
        try:
            yield
        finally:
            lock.release()

    def _read(self) -> list[Prints]:
        """The sets so far."""
        if self.path and is_file(self.path):
            return [one.astype(np.uint64) for one in read_npz(self.path).values()]
        return self._sets

    def _write(self, sets: list[Prints]) -> None:
        """Hold these sets."""
        self._sets = sets
        if self.path:
            file = io.BytesIO()
            np.savez_compressed(file, *sets)
            write_atomic(self.path, file.getvalue())

    def _refusal(self, public: str) -> InputError:
        """The error of a question that is not answered."""
        place = self.path or "this process"
        return InputError(
            f"no answer: {public} ({place} remembers what was answered; remove it to begin anew, "
            "if you agree to that)",
            public=public,
        )


HERE: defaultdict[str, Ledger] = defaultdict(Ledger)
"""What this process remembers for hospitals that have no file for it."""


def fingerprints(table: Table) -> Prints:
    """A number for each row of a table [rows], by its cells, whatever the order of the columns."""
    order = sorted(range(len(table.names)), key=lambda place: table.names[place])
    seen: Counter[str] = Counter()
    found = []
    for row in table.rows:
        text = "\0".join(row[place] for place in order)
        seen[text] += 1  # so that two patients with the same cells are two rows
        found.append(blake2b(f"{seen[text]}\0{text}".encode(), digest_size=8).digest())
    return np.frombuffer(b"".join(found), np.uint64)


def _smallest(sets: list[Prints]) -> int:
    """The fewest rows that are in the same sets."""
    every = np.unique(np.concatenate(sets))
    groups = np.zeros(len(every), np.uint64)
    for place, one in enumerate(sets):
        groups |= np.isin(every, one).astype(np.uint64) << np.uint64(place)
    return int(np.unique(groups, return_counts=True)[1].min())
