"""What the back ends of the objective share: flat vectors and the functions that follow from
outputs and products.

The iterate is one flat vector x, as papers write it; this module ravels at the border. Outputs are
laid out [clients, trials, classes, rows]: the softmax then runs over contiguous rows, which is
several times faster on a CPU than classes last.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..algorithm import Batch
from ..errors import InputError
from .losses import RowLoss, draw

BLOCK = 1 << 22  # numbers that a block of a Hessian's columns may take


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a module lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Layout of the trainable parameters; a frozen one stays as it is in the module."""
        params = [(n, p.shape) for n, p in module.named_parameters() if p.requires_grad]
        if not params:
            raise InputError("the model has no trainable parameters")
        return cls(tuple(n for n, _ in params), tuple(s for _, s in params))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter."""
        return [s.numel() for s in self.shapes]

    def unravel(self, x: Tensor) -> dict[str, Tensor]:
        """Views of x [..., d] by parameter name, [..., *shape]."""
        parts = x.split_with_sizes(self.sizes, -1)
        return {
            n: p.view((*x.shape[:-1], *s))
            for n, s, p in zip(self.names, self.shapes, parts, strict=True)
        }


def ravel(module: nn.Module) -> Tensor:
    """The trainable parameters as one flat vector (a copy)."""
    return torch.cat(
        [module.get_parameter(n).detach().reshape(-1) for n in Layout.of(module).names]
    )


def unravel_into(module: nn.Module, x: Tensor) -> None:
    """Write a flat vector into a module's trainable parameters."""
    with torch.no_grad():
        for name, value in Layout.of(module).unravel(x).items():
            module.get_parameter(name).copy_(value)


def buffers_of(module: nn.Module) -> Tensor:
    """The buffers (BatchNorm statistics) as one flat vector; integers are held as floats."""
    parts = [b.detach().reshape(-1).double() for b in module.buffers()]
    return torch.cat(parts) if parts else torch.zeros(0)


def buffers_into(module: nn.Module, flat: Tensor) -> None:
    """Write a flat vector into a module's buffers, rounding where they are integers."""
    start = 0
    for b in module.buffers():
        part = flat[start : start + b.numel()].reshape(b.shape)
        b.copy_(part if b.is_floating_point() else part.round())
        start += b.numel()


class Backend:
    """A module's loss at flat points x [M, trials, d], plus l2/2 |x|^2; a subclass gives what the
    rows alone make of it. `l2` and `buffers` [M, trials, b] are set by the engine."""

    stacks = True
    l2 = 0.0

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        self.module = copy.deepcopy(module)
        self.layout = Layout.of(self.module)
        self.loss = loss
        self.buffers = torch.zeros(0)

    def value_and_grad(
        self, x: Tensor, batch: Batch, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weighted mean loss [M, trials] and its gradient [M, trials, d]."""
        value, grad = self._value_and_grad(x, batch, out)
        if self.l2:
            value, grad = value + self._penalty(x, batch), grad.add_(self._share(batch) * x)
        return value, grad

    def value(self, x: Tensor, batch: Batch) -> Tensor:
        """Weighted mean loss [M, trials], the same as that of `value_and_grad`."""
        value = self._value(x, batch)
        return value + self._penalty(x, batch) if self.l2 else value

    def hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Hessian at x times v, [M, trials, d]."""
        product = self._hvp(x, v, batch)
        return product + self._share(batch) * v if self.l2 else product

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """Hessian [M, trials, d, d]."""
        H = self._hessian(x, batch)
        if self.l2:
            H.diagonal(dim1=-2, dim2=-1).add_(self._share(batch))
        return H

    def _share(self, batch: Batch) -> Tensor:
        """l2 [M, 1, 1] for these rows: pieces of a client's rows, whose weights sum to 1, share the
        penalty."""
        return self.l2 * batch.weight.sum(-1)[:, None, None]

    def _penalty(self, x: Tensor, batch: Batch) -> Tensor:
        return self._share(batch).squeeze(-1) * x.square().sum(-1) / 2

    def _value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [M, trials, classes, rows] for rows [M, B, *sample], in evaluation mode."""
        raise NotImplementedError

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs [M, trials, classes, rows] in training mode, which leaves the buffers as they
        are."""
        raise NotImplementedError

    def _value(self, x: Tensor, batch: Batch) -> Tensor:
        rows = self.loss(self.outputs(x, batch), by_trial(batch.y, x.shape[1]))
        return (rows * batch.weight.unsqueeze(1)).sum(-1)

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """Columns of the identity run as extra trials."""
        M, T, d = x.shape
        H = torch.empty(M, T, d, d, dtype=x.dtype, device=x.device)
        for part, unit in columns(x, T * (M * d + batch.x.numel())):
            n = len(unit)
            many = batch._replace(y=by_trial(batch.y, T).repeat_interleave(n, 1))
            v = unit.repeat(T, 1).expand(M, T * n, d)
            H[:, :, part] = self._hvp(x.repeat_interleave(n, 1), v, many).view(M, T, n, d)
        return mirrored(H)

    def targets(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Targets [M, trials, B] drawn from the model's own distribution by uniform numbers u [M,
        B]."""
        return draw(self.loss, self.outputs(x, batch), by_trial(u, x.shape[1]))

    def bartlett(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """The Gauss-Newton-Bartlett estimate [M, trials, d] of the Hessian's diagonal: B g^2 for
        drawn targets."""
        g = self._value_and_grad(x, batch._replace(y=self.targets(x, batch, u)), None)[1]
        rows = (batch.weight > 0).sum(-1).view(-1, 1, 1)
        return rows * g * g + self._share(batch)


def by_trial(y: Tensor, trials: int) -> Tensor:
    """Targets [M, B] that all trials share, or [M, trials, B] of their own, as [M, trials, B]."""
    return y if y.dim() == 3 else y.unsqueeze(1).expand(-1, trials, -1)


def columns(x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns of the identity [n, d] and where they lie, if one column takes that many
    numbers in memory."""
    d = x.shape[-1]
    width = d if x.is_meta else max(1, BLOCK // numbers)
    for start in range(0, d, width):
        part = slice(start, min(d, start + width))
        unit = x.new_zeros(part.stop - start, d)
        unit[:, part].fill_diagonal_(1)
        yield part, unit


def mirrored(H: Tensor) -> Tensor:
    """H, made symmetric to the bit in place."""
    return H.add_(H.mT.clone()).div_(2)
