"""Loss and metrics of models on test (or training) rows, batched over trials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..objective.losses import mse
from .metrics import Metric, hits

if TYPE_CHECKING:
    from ..data import Federation
    from ..objective import Backend
    from .gather import Gather

PIECE = 2048  # rows widened at a time
Rows = Tensor | list[Tensor]


class Evaluator:
    """Evaluates models on rows of a federation: x [trials, d] on `rows`, or x [clients, trials, d],
    each client's own model on its part of `rows`, a list."""

    def __init__(
        self, f: Backend, fed: Federation, gather: Gather, metrics: dict[str, Metric]
    ) -> None:
        self.f, self.fed, self.gather, self.metrics = f, fed, gather, metrics

    def _outputs(self, x: Tensor, buffers: Tensor, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
        """(outputs [trials, classes, piece], targets [piece])."""
        self.f.buffers = buffers.unsqueeze(0)
        parts = [(x, rows)] if isinstance(rows, Tensor) else zip(x, rows, strict=True)
        for model, part in parts:
            for piece in torch.split(part, PIECE) if len(part) else ():
                a, y = self.gather(piece)
                yield self.f.predict(model.unsqueeze(0), a.unsqueeze(0))[0], y

    def loss(self, x: Tensor, buffers: Tensor, rows: Rows) -> Tensor:
        """Mean loss over the rows, [trials]."""
        total = x.new_zeros(x.shape[-2], dtype=torch.float64)
        for z, y in self._outputs(x, buffers, rows):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
        return total / max(1, _count(rows))

    def __call__(self, x: Tensor, buffers: Tensor, rows: Rows) -> dict[str, Tensor]:
        """loss and every metric over the rows, each [trials]; NaN where there are no rows."""
        nan = x.new_full((x.shape[-2],), torch.nan, dtype=torch.float64)
        n = _count(rows)
        if not n:
            return dict.fromkeys(("loss", *self.metrics), nan)
        total, right = torch.zeros_like(nan), torch.zeros_like(nan)
        collect = self.metrics.keys() - {"accuracy"}
        kept: list[tuple[Tensor, Tensor]] = []
        for z, y in self._outputs(x, buffers, rows):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
            right += hits(z, y).sum(-1)
            if collect:
                kept.append((z.clone(), y))
        out = {"loss": total / n, "accuracy": nan if self.f.loss is mse else right / n}
        if collect:
            z, y = torch.cat([z for z, _ in kept], -1), torch.cat([y for _, y in kept])
            out |= {name: self.metrics[name](z, y).double() for name in sorted(collect)}
        return {name: out[name] for name in ("loss", *self.metrics)}


def _count(rows: Rows) -> int:
    return len(rows) if isinstance(rows, Tensor) else sum(map(len, rows))
