"""One server step of FedSSO (form "bfgs", with its guard) at growing size, against one pass over
its pairs.

The whole `FedSSO.server` is timed: gradient, curvature rule, B^-1 g, guard, new model. The floor is
`torch.sum` over the slots in use.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedsso.algorithm import Cohort
from fedsso.algorithm.records import stack
from fedsso.algorithms import make

from .clock import Clock, Work

SIZES = ((7850, 20), (7850, 200), (100_000, 20), (1_000_000, 20), (10_000_000, 20))
QUICK = ((7850, 20),)
ALPHA = 0.01


def fill(work: Work, state: Callable[[], Any], pairs: int) -> None:
    """Rounds of FedSSO until its store is full; a few pairs may be refused on the way."""
    for _ in range(2 * pairs + 10):
        if int(state().curvature.held) == pairs:
            return
        work()
    raise RuntimeError(
        f"the store holds {int(state().curvature.held)} pairs after {2 * pairs + 10} rounds, not "
        f"{pairs}"
    )


class Server:
    """A server that minimises the quadratic 1/2 sum_i h_i x_i^2 in small steps, so that every pair
    is sound."""

    def __init__(self, d: int, pairs: int, device: torch.device) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.h = 0.5 + torch.rand(1, d, generator=draw, device=device)
        x = torch.randn(1, d, generator=draw, device=device)
        self.algorithm = stack(
            [make("fedsso", {"alpha": ALPHA, "eta": 0.01, "pairs": pairs})], x.dtype, device
        )
        self.clients = torch.arange(20)
        self.state: Any = self.algorithm.server_init(x)
        self.k = 0
        fill(self._round, lambda: self.state, pairs)

    def _round(self) -> None:
        self.prepare()
        self.step()

    def prepare(self) -> None:
        """The mean update of the next round's clients."""
        self.k += 1
        self.cohort = Cohort(self.k, 20, self.clients, 1.0, 5.0)
        self.delta: Tensor = (-5.0 * ALPHA) * self.h * self.state.x

    def step(self) -> None:
        """The server's part of the round."""
        self.state = self.algorithm.server(self.state, self.delta, self.cohort)

    def floor(self) -> None:
        """Read every slot in use once."""
        torch.sum(self.state.curvature.store[:, : self.k])


def server_step(d: int, pairs: int, clock: Clock, repeats: int) -> dict[str, float]:
    """Medians for one size."""
    with torch.no_grad():
        server = Server(d, pairs, clock.device)
        turns = []
        for _ in range(repeats):
            server.prepare()
            turns.append((clock(server.step), clock(server.floor)))
    ms, floor_ms = map(median, zip(*turns, strict=True))
    return {"d": d, "pairs": pairs, "ms": ms, "floor_ms": floor_ms}
