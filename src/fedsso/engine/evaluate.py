"""Loss and metrics of models on test (or training) rows, batched over trials.

Rows are pooled over the clients, so that a client counts by its rows. They are widened and
computed in pieces of 2048, in the module's evaluation mode, and sums are kept in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
Prepare = Callable[[Tensor], Tensor]


def as_they_are(samples: Tensor) -> Tensor:
    """The rows themselves are what models see."""
    return samples


class Evaluator:
    """Evaluates models on rows of a federation.

    Models x [trials, d] are evaluated on `rows`. Where every client has a model of its own, x is
    [clients, trials, d], `rows` is a list, and each model is evaluated on its client's part.

    It sets the buffers of the objective, so it must not be called while clients train.
    """

    def __init__(
        self, f: Backend, fed: Federation, gather: Gather, metrics: dict[str, Metric]
    ) -> None:
        self.f = f
        self.fed = fed
        self.gather = gather
        self.metrics = metrics

    def _outputs(
        self, x: Tensor, buffers: Tensor, rows: Rows, prepare: Prepare
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of outputs [trials, classes, piece] and targets [piece], piece by piece.

        The buffers [trials, b] are the server's. Samples are overwritten by the next piece. What
        models see of them is decided by `prepare`.
        """
        self.f.buffers = buffers.unsqueeze(0)
        parts = [(x, rows)] if isinstance(rows, Tensor) else zip(x, rows, strict=True)
        for model, part in parts:
            if not len(part):
                continue
            for piece in torch.split(part, PIECE):
                samples, y = self.gather.piece(piece)
                z = self.f.predict(model.unsqueeze(0), prepare(samples))
                yield z[0], y

    def loss(
        self, x: Tensor, buffers: Tensor, rows: Rows, prepare: Prepare = as_they_are
    ) -> Tensor:
        """Mean loss over the rows without the penalty, float64 [trials].

        It is 0 where there are no rows.
        """
        total = x.new_zeros(x.shape[-2], dtype=torch.float64)
        for z, y in self._outputs(x, buffers, rows, prepare):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
        return total / max(1, _count(rows))

    def __call__(
        self, x: Tensor, buffers: Tensor, rows: Rows, prepare: Prepare = as_they_are
    ) -> dict[str, Tensor]:
        """The loss and every metric over the rows, each float64 [trials].

        All are NaN where there are no rows. Loss and accuracy are summed up piece by piece. Other
        metrics need all outputs at once, which are kept for them. Real targets under the squared
        loss have no accuracy: it is NaN.
        """
        nan = x.new_full((x.shape[-2],), torch.nan, dtype=torch.float64)
        n = _count(rows)
        if not n:
            return dict.fromkeys(("loss", *self.metrics), nan)
        total = torch.zeros_like(nan)
        right = torch.zeros_like(nan)
        collect = self.metrics.keys() - {"accuracy"}
        kept: list[tuple[Tensor, Tensor]] = []
        for z, y in self._outputs(x, buffers, rows, prepare):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
            right += hits(z, y).sum(-1)
            if collect:
                kept.append((z.clone(), y))
        out = {"loss": total / n}
        out["accuracy"] = nan if self.f.loss is mse else right / n
        if collect:
            all_z = torch.cat([z for z, _ in kept], -1)
            all_y = torch.cat([y for _, y in kept])
            for name in sorted(collect):
                out[name] = self.metrics[name](all_z, all_y).double()
        return {name: out[name] for name in ("loss", *self.metrics)}


def _count(rows: Rows) -> int:
    """The number of rows, of all clients together."""
    return len(rows) if isinstance(rows, Tensor) else sum(map(len, rows))
