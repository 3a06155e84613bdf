"""The journal of a search: what Optuna knows, one line for each event, added to by all processes.

It is a back end of `optuna.storages.JournalStorage`. Optuna's own has two faults here. A process
that is killed while it writes may leave half a line, to which the next one adds its own, and then
nobody can read the file any more. And the lock of a killed process is waited for half a minute,
after which two who waited may both take it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...support.claims import Claims
from ...support.intake import opened

PAUSE = 0.005  # seconds between two attempts to write


class Journal:
    """A file of JSON lines, to which one process at a time adds, under a claim.

    Args:
        path: The file, which is made if it does not exist.
        claims: Those of this process.
    """

    def __init__(self, path: Path, claims: Claims) -> None:
        self.path = path
        self.claims = claims
        self._starts = [0]  # where the lines begin that were read, and where the next one does
        path.touch()
        with opened(path):  # which refuses a pipe or a device, for which Optuna would wait
            pass

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """The events from a number on. Half a line at the end is none yet, or never will be."""
        found = []
        with self.path.open("rb") as file:
            file.seek(self._starts[log_number_from])
            del self._starts[log_number_from + 1 :]
            for line in file:
                if not line.endswith(b"\n"):
                    break
                found.append(json.loads(line))
                self._starts.append(self._starts[-1] + len(line))
        return found

    def append_logs(self, logs: Sequence[dict[str, Any]]) -> None:
        """Add events. What a killed process left of a line is cut off first."""
        text = "".join(f"{json.dumps(log)}\n" for log in logs)
        name = self.path.name
        while not self.claims.take(name):
            time.sleep(PAUSE)
        try:
            with self.path.open("r+b") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)
                file.seek(0, os.SEEK_END)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        finally:
            self.claims.give_back(name)
