"""The paper's 84 (alpha, eta) trials of FedSSO on J1: many at a time against one by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median

from fedsso.algorithm import Algorithm
from fedsso.algorithms import make
from fedsso.data import Federation

from .clock import Clock
from .jobs import JOBS, advance, federation, simulation

ALPHAS = [float(f"{digit}e-{power}") for power in (4, 3, 2, 1) for digit in (1, 3, 7)]
ETAS = (0.01, 0.03, 0.07, 0.1, 0.3, 0.7, 1.0)
PAPER = {"guard": "none", "R": 200}
GRID = [
    make("fedsso", {"alpha": alpha, "eta": eta, **PAPER}) for alpha, eta in product(ALPHAS, ETAS)
]
CHUNK = {"cpu": 12, "cuda": len(GRID)}  # trials at a time


def sweep(clock: Clock, repeats: int, rounds: int) -> dict[str, float]:
    """Milliseconds per trial and round, medians over `repeats` chunks of the grid, each run both
    ways."""
    fed = federation(JOBS["J1"])
    size = CHUNK[clock.device.type]
    chunks = [GRID[i : i + size] for i in range(0, len(GRID), size)]
    turns = []
    for i in range(repeats):
        chunk = chunks[i % len(chunks)]
        together = _cost(clock, fed, chunk, rounds) / len(chunk)
        alone = sum(_cost(clock, fed, [record], rounds) for record in chunk) / len(chunk)
        turns.append((together, alone))
    batched, one_by_one = map(median, zip(*turns, strict=True))
    return {f"batched_{clock.unit}": batched, f"one_by_one_{clock.unit}": one_by_one}


def _cost(clock: Clock, fed: Federation, records: Sequence[Algorithm], rounds: int) -> float:
    """Milliseconds per round behind the first one."""
    work = advance(simulation(JOBS["J1"], fed, records, clock.device))
    work()
    return clock(work, rounds)
