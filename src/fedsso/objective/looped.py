"""The back end for any module at all: plain autograd, one client and one trial after the other.

It serves modules whose rows depend on each other or on chance (BatchNorm, dropout), those that
torch.func cannot batch (LSTM), and convolutions on a CPU, which are faster this way.

The point and the buffers of a client and trial are written into the one module, the module runs
as in any torch program, and what it leaves in its buffers is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..algorithm.contract import Batch
from .backend import Backend, buffers_into, buffers_of, by_trial, columns, mirrored
from .modes import by_classes, differentiable_twice, seeded

if TYPE_CHECKING:
    from .losses import RowLoss


class Looped(Backend):
    """A loop over clients and trials; padding is cut off before the module sees it.

    BatchNorm would count padded rows otherwise. `stacks` is False, so that the engine hands over
    one client at a time.

    `draws` says whether the module may draw random numbers, from torch's one stream, which is then
    seeded for each client. The engine sets it to False where several threads compute clients.

    Args:
        module: The model.
        loss: The loss of single rows.
        layout: How images and filters lie in memory. With `torch.channels_last` a CPU pools
            several times as fast; numbers are the same up to rounding.
    """

    stacks = False
    draws = True

    def __init__(
        self,
        module: nn.Module,
        loss: RowLoss,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        super().__init__(module, loss)
        self.memory_format = layout
        self.module.to(memory_format=layout)  # type: ignore[call-overload]
        self.params = [self.module.get_parameter(n) for n in self.layout.names]

    def twin(self) -> Looped:
        """The same objective with a module of its own, whose frozen parameters are shared."""
        twin = Looped(self.module, self.loss, self.memory_format)
        twin.l2 = self.l2
        twin.one_output = self.one_output
        return twin

    # one client i and one trial t

    def _load(self, x: Tensor, i: int, t: int) -> None:
        """Write the point and the buffers of client i and trial t into the module."""
        parts = torch.split(x[i, t], self.layout.sizes)
        with torch.no_grad():
            for p, part in zip(self.params, parts, strict=True):
                p.copy_(part.view_as(p))
            if self.buffers.numel():
                buffers_into(self.module, self.buffers[i, t])

    def _each(self, x: Tensor, batch: Batch) -> Iterator[tuple[int, int, Batch]]:
        """Client, trial and the client's own rows, with the point x[i, t] loaded into the module.

        Rows of weight 0 stand behind the others and are cut off. Clients without rows are passed
        over. The module is in training mode.
        """
        self.module.train()
        trials = x.shape[1]
        y = by_trial(batch.y, trials)
        counts = (batch.weight > 0).sum(1).tolist()
        for i, n in enumerate(counts):
            if n == 0:
                continue
            for t in range(trials):
                self._load(x, i, t)
                rows = Batch(batch.x[i, :n], y[i, t, :n], batch.weight[i, :n], batch.key)
                yield i, t, rows

    def _outputs(self, rows: Batch) -> Tensor:
        """Outputs [classes, rows] of the loaded module; the batch's key fixes its draws."""
        with seeded(rows.key, rows.x.device) if self.draws else nullcontext():
            return self._run(rows.x)

    def _run(self, rows: Tensor) -> Tensor:
        """Outputs [classes, rows] of the loaded module."""
        return by_classes(self.module(rows.contiguous(memory_format=self.memory_format)))

    def _loss(self, rows: Batch) -> Tensor:
        """The weighted sum of the rows' losses."""
        return (self.loss(self._outputs(rows), rows.y) * rows.weight).sum()

    def _product(self, rows: Batch) -> Callable[[Tensor], Tensor]:
        """The function v [d] -> (Hessian) v, which keeps the graph of the gradient.

        So a full Hessian pays for forward and first backward pass once.
        """
        with torch.enable_grad(), differentiable_twice(self.module):
            loss = self._loss(rows)
            parts = torch.autograd.grad(
                loss, self.params, create_graph=True, materialize_grads=True
            )
            slope = _flat(parts)

        def product(v: Tensor) -> Tensor:
            if not slope.requires_grad:  # the gradient is constant
                return torch.zeros_like(v)
            parts = torch.autograd.grad(
                slope, self.params, v, retain_graph=True, materialize_grads=True
            )
            return _flat(parts)

        return product

    # all of them

    def _value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Autograd of the module in training mode; its buffers move along.

        What BatchNorm has learned goes into `buffers` [M, trials, b] of that client and trial,
        from where the engine takes it.
        """
        value = x.new_zeros(x.shape[:2])
        grad = x.new_zeros(x.shape) if out is None else out.zero_()
        for i, t, rows in self._each(x, batch):
            with torch.enable_grad():
                loss = self._loss(rows)
            parts = torch.autograd.grad(loss, self.params, materialize_grads=True)
            torch.cat([g.reshape(-1) for g in parts], out=grad[i, t])
            value[i, t] = loss.detach()
            if self.buffers.numel():
                self.buffers[i, t] = buffers_of(self.module)
        return value, grad

    def _value(self, x: Tensor, batch: Batch) -> Tensor:
        """The loss in training mode, which leaves the buffers as they are."""
        value = x.new_zeros(x.shape[:2])
        with torch.no_grad():
            for i, t, rows in self._each(x, batch):
                value[i, t] = self._loss(rows)
        return value

    def _hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Double backward; buffers stay as they are."""
        out = x.new_zeros(x.shape)
        for i, t, rows in self._each(x, batch):
            product = self._product(rows)
            out[i, t] = product(v[i, t])
        return out

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """Double backward of the identity's columns through one graph.

        They are done one by one, since torch cannot batch this for GroupNorm.
        """
        d = x.shape[-1]
        H = x.new_zeros(*x.shape, d)
        for i, t, rows in self._each(x, batch):
            product = self._product(rows)
            for part, unit in columns(x, d):
                H[i, t, part] = torch.stack([product(v) for v in unit])
        return mirrored(H)

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs in training mode, [M, trials, classes, B]; zero on padding.

        The number of classes is known when the first client has run.
        """
        z = x.new_zeros(0)
        with torch.no_grad():
            for i, t, rows in self._each(x, batch):
                one = self._outputs(rows)
                classes, n = one.shape
                if z.numel() == 0:
                    z = x.new_zeros(*x.shape[:2], classes, batch.weight.shape[1])
                z[i, t, :, :n] = one
        return z

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs in evaluation mode, [M, trials, classes, rows].

        A module that draws even then is seeded, so that an evaluation can be repeated.
        """
        self.module.eval()
        clients, trials = x.shape[:2]
        out: list[Tensor] = []
        with torch.no_grad(), seeded(0, x.device):
            for i in range(clients):
                for t in range(trials):
                    self._load(x, i, t)
                    out.append(self._run(rows[i]))
        z = torch.stack(out)
        return z.view(clients, trials, *z.shape[1:])


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Gradients of several parameters as one vector [d], in the order of the layout."""
    return torch.cat([g.reshape(-1) for g in parts])
