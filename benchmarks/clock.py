"""Milliseconds of work.

On a CPU this is CPU time, so that a busy machine matters less; on a GPU it is wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Work = Callable[[], None]


class Clock:
    """Times work on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unit = "cpu_ms" if device.type == "cpu" else "wall_ms"

    def __call__(self, work: Work, times: int = 1) -> float:
        """Milliseconds per call."""
        began = self._now()
        for _ in range(times):
            work()
        return (self._now() - began) * 1e3 / times

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


class WallClock(Clock):
    """Wall time, for work of several threads; a busy machine makes it longer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.unit = "wall_ms"

    def _now(self) -> float:
        return time.perf_counter()


def interleaved(
    clock: Clock, contestants: Mapping[str, Work], repeats: int, times: int
) -> dict[str, float]:
    """Median milliseconds per call of each contestant.

    Every repeat times all of them in turn, so that all see the same load on the machine.
    """
    for work in contestants.values():
        work()
    turns = [
        {name: clock(work, times) for name, work in contestants.items()} for _ in range(repeats)
    ]
    return {name: median(turn[name] for turn in turns) for name in contestants}
