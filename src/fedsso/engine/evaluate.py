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
from .ranks import Team

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

    With a team of several ranks each takes a part of the rows, and all must call it together. Of
    models and rows in a list each rank gives its own, and gets the result for all.
    """

    def __init__(
        self,
        f: Backend,
        fed: Federation,
        gather: Gather,
        metrics: dict[str, Metric],
        team: Team | None = None,
    ) -> None:
        self.team = team or Team()
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
        own = self._part(rows)
        total, n = self._over_ranks(self.total(x, buffers, own, prepare), _count(own))
        return total / max(1, n)

    def total(
        self, x: Tensor, buffers: Tensor, rows: Rows, prepare: Prepare = as_they_are
    ) -> Tensor:
        """The sum of the loss over these rows, computed here alone, float64 [trials]."""
        total = x.new_zeros(x.shape[-2], dtype=torch.float64)
        for z, y in self._outputs(x, buffers, rows, prepare):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
        return total

    def _part(self, rows: Rows) -> Rows:
        """The rows that this rank takes; those in a list are its own already."""
        if self.team.size == 1 or not isinstance(rows, Tensor):
            return rows
        return rows.tensor_split(self.team.size)[self.team.rank]

    def _over_ranks(self, sums: Tensor, n: int) -> tuple[Tensor, int]:
        """Sums over the rows of all ranks, and how many rows these are."""
        if self.team.size == 1:
            return sums, n
        sums, count = self.team.sum((sums, sums.new_full((1,), n)))
        return sums, int(count)

    def __call__(
        self, x: Tensor, buffers: Tensor, rows: Rows, prepare: Prepare = as_they_are
    ) -> dict[str, Tensor]:
        """The loss and every metric over the rows, each float64 [trials].

        All are NaN where there are no rows. Loss and accuracy are summed up piece by piece. Other
        metrics need all outputs at once, which are kept for them. Real targets under the squared
        loss have no accuracy: it is NaN.
        """
        nan = x.new_full((x.shape[-2],), torch.nan, dtype=torch.float64)
        rows = self._part(rows)
        total = torch.zeros_like(nan)
        right = torch.zeros_like(nan)
        collect = self.metrics.keys() - {"accuracy"}
        kept: list[tuple[Tensor, Tensor]] = []
        for z, y in self._outputs(x, buffers, rows, prepare):
            total += self.f.loss(z, y.expand(len(z), -1)).double().sum(-1)
            right += hits(z, y).sum(-1)
            if collect:
                kept.append((z.clone(), y))
        sums, n = self._over_ranks(torch.stack((total, right)), _count(rows))
        if not n:
            return dict.fromkeys(("loss", *self.metrics), nan)
        out = {"loss": sums[0] / n}
        out["accuracy"] = nan if self.f.loss is mse else sums[1] / n
        if collect:
            kept = self._of_all(kept)
            all_z = torch.cat([z for z, _ in kept], -1)
            all_y = torch.cat([y for _, y in kept])
            for name in sorted(collect):
                out[name] = self.metrics[name](all_z, all_y).double()
        return {name: out[name] for name in ("loss", *self.metrics)}

    def _of_all(self, kept: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Outputs and targets of all ranks, in their order, on every rank."""
        if self.team.size == 1:
            return kept
        device = self.fed.x.device
        own = [(z.cpu(), y.cpu()) for z, y in kept]
        everything = []
        for part in self.team.share(self.team.gather(own)):
            everything += [(z.to(device), y.to(device)) for z, y in part]
        return everything


def _count(rows: Rows) -> int:
    """The number of rows, of all clients together."""
    return len(rows) if isinstance(rows, Tensor) else sum(map(len, rows))
