"""The trace of a Flower run: the same columns, tables and plots as a simulation's."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from flwr.app import Message

from ..errors import InputError
from ..experiment.trace import COLUMNS, Trace

log = logging.getLogger("flwr")
TRAIN_LOSS = ("train_loss", "loss")
SYNONYMS = {  # the names that ClientApps use
    "test_loss": ("test_loss", "eval_loss", "val_loss", "loss"),
    "test_accuracy": tuple(
        f"{part}{name}" for name in ("accuracy", "acc") for part in ("test_", "eval_", "val_", "")
    ),
}
COUNTED = {"trial": 0, "seed": 0, "overridden": 0, "skipped": 0, "bytes_up": 0, "bytes_down": 0}


class Journal:
    """One row per round, filled as the round goes on."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {0: {**COUNTED, "round": 0, "seconds": 0.0}}
        self._began = time.perf_counter()

    def begin(self, k: int) -> None:
        """Round k begins."""
        self._began = time.perf_counter()
        self.rows[k] = {**COUNTED, "round": k}

    def sent(self, k: int, messages: Iterable[Message]) -> None:
        """Messages to the clients."""
        self.rows[k]["bytes_down"] += sum(map(size, messages))

    def received(self, k: int, replies: Iterable[Message]) -> None:
        """Replies of the clients, used or not."""
        self.rows[k]["bytes_up"] += sum(map(size, replies))

    def trained(self, k: int, metrics: Mapping[str, object] | None, **numbers: float) -> None:
        """What the round's training told, and what the server knows."""
        found = _scalars(metrics)
        loss = next((found[name] for name in TRAIN_LOSS if name in found), math.nan)
        self.rows[k] |= {
            "train_loss": loss,
            "seconds": time.perf_counter() - self._began,
            **numbers,
        }

    def evaluated(self, k: int, metrics: Mapping[str, object] | None) -> None:
        """Metrics of the model after round k."""
        found, row = _scalars(metrics), self.rows.setdefault(k, {**COUNTED, "round": k})
        for column, names in SYNONYMS.items():
            name = next((name for name in names if name in found), None)
            if name is not None:
                row[column] = found.pop(name)
        row |= {
            f"test_{name}": value for name, value in found.items() if f"test_{name}" not in COLUMNS
        }

    def has(self, k: int) -> bool:
        """Whether the model after round k was evaluated."""
        return any(name.startswith("test_") for name in self.rows.get(k, {}))

    @property
    def trace(self) -> Trace:
        """The rows so far."""
        rounds = sorted(self.rows)
        evaluated = [k for k in rounds if self.has(k)]
        return Trace.from_rows(
            [self.rows[k] for k in rounds], math.gcd(*evaluated) or max(1, rounds[-1])
        )

    def restore(self, k: int, path: Path) -> None:
        """Go on after round k with the rows of a file; they only tell, so a run goes on without
        them."""
        try:
            self.rows |= {round_: row for round_, row in _rows(Trace.load(path)) if round_ <= k}
        except InputError as error:
            log.warning("the rounds so far are missing in the trace: %s", error)


def _rows(trace: Trace) -> Iterator[tuple[int, dict[str, float]]]:
    """The rows of a trace without what was not measured."""
    names = list(trace.columns)
    for values in zip(*(column.tolist() for column in trace.columns.values()), strict=True):
        row = {
            name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)
        }
        yield int(row["round"]), row


def size(message: Message) -> int:
    """Bytes of a message's records."""
    if not message.has_content():
        return 0
    return sum(record.count_bytes() for record in message.content.values())


def _scalars(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """The metrics that are single numbers, by name with underscores; a column's name is a word."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    found = {name.replace("-", "_"): v for name, v in items if isinstance(v, int | float)}
    return {
        name: float(v)
        for name, v in found.items()
        if name.isidentifier() and name != "num_examples"
    }
