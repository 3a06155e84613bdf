"""Loss and metrics of models on test (or training) rows, batched over trials."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..data import Federation
from ..losses import mse
from ..objective import Backend
from .gather import Gather
from .metrics import Metric, hits

PIECE = 2048  # rows widened at a time


class Evaluator:
    """Evaluates models x [trials, d] on rows of a federation."""

    def __init__(self, f: Backend, fed: Federation, gather: Gather, metrics: dict[str, Metric]) -> None:
        self.f, self.fed, self.gather, self.metrics = f, fed, gather, metrics

    def _outputs(self, x: Tensor, buffers: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(outputs [trials, classes, piece], targets [piece])."""
        self.f.buffers = buffers.unsqueeze(0)
        for piece in torch.split(rows, PIECE):
            a, y = self.gather(piece)
            yield self.f.predict(x.unsqueeze(0), a.unsqueeze(0))[0], y

    def loss(self, x: Tensor, buffers: Tensor, rows: Tensor) -> Tensor:
        """Mean loss over the rows, [trials]."""
        total = x.new_zeros(x.shape[0], dtype=torch.float64)
        for z, y in self._outputs(x, buffers, rows):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
        return total / max(1, len(rows))

    def __call__(self, x: Tensor, buffers: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """loss and every metric over the rows, each [trials]; NaN where there are no rows."""
        nan = x.new_full((x.shape[0],), torch.nan, dtype=torch.float64)
        if not len(rows):
            return dict.fromkeys(("loss", *self.metrics), nan)
        total, right = torch.zeros_like(nan), torch.zeros_like(nan)
        collect = self.metrics.keys() - {"accuracy"}
        kept: list[tuple[Tensor, Tensor]] = []
        for z, y in self._outputs(x, buffers, rows):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
            right += hits(z, y).sum(-1)
            if collect:
                kept.append((z.clone(), y))
        out = {"loss": total / len(rows), "accuracy": nan if self.f.loss is mse else right / len(rows)}
        if collect:
            z, y = torch.cat([z for z, _ in kept], -1), torch.cat([y for _, y in kept])
            out |= {name: self.metrics[name](z, y).double() for name in sorted(collect)}
        return {name: out[name] for name in ("loss", *self.metrics)}
