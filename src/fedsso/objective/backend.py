"""What the back ends of the objective share.

Papers write the iterate as one vector x, so algorithms see a model as one flat vector. `Layout`
translates between it and a module's parameters. `Backend` is the base of the four back ends: they
give outputs, gradients and Hessian products, and the rest follows from these here.

Outputs are laid out [clients, trials, classes, rows]. The softmax then runs over contiguous rows,
which is several times faster on a CPU than with the classes last.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import InputError
from .losses import RowLoss, draw

if TYPE_CHECKING:
    from ..algorithm import Batch

BLOCK = 1 << 22  # numbers that a block of a Hessian's columns may take


# ---- models as flat vectors ----


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a module lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Layout of the trainable parameters; a frozen one stays as it is in the module."""
        shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        if not shapes:
            raise InputError("the model has no trainable parameters")
        return cls(tuple(shapes), tuple(shapes.values()))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter."""
        return [shape.numel() for shape in self.shapes]

    def unravel(self, x: Tensor) -> dict[str, Tensor]:
        """Views of x [..., d] by parameter name, [..., *shape]."""
        lead = x.shape[:-1]
        parts = x.split_with_sizes(self.sizes, -1)
        views = {}
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            views[name] = part.view((*lead, *shape))
        return views


def ravel(module: nn.Module) -> Tensor:
    """The trainable parameters as one flat vector (a copy)."""
    params = [module.get_parameter(name) for name in Layout.of(module).names]
    return torch.cat([p.detach().reshape(-1) for p in params])


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
        end = start + b.numel()
        part = flat[start:end].reshape(b.shape)
        b.copy_(part if b.is_floating_point() else part.round())
        start = end


# ---- the base of all back ends ----


class Backend:
    """A module's loss at flat points x [M, trials, d], plus the penalty l2/2 |x|^2.

    A subclass gives what the rows alone make of it: `_value_and_grad`, `_hvp`, `predict` and
    `outputs`. The penalty is added here. `l2` and `buffers` [M, trials, b] are set by the engine.
    """

    stacks = True  # whether clients and trials are computed at once
    l2 = 0.0

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        self.module = copy.deepcopy(module)
        self.layout = Layout.of(self.module)
        self.loss = loss
        self.buffers = torch.zeros(0)

    def value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted mean loss [M, trials] and its gradient [M, trials, d]."""
        value, grad = self._value_and_grad(x, batch, out)
        if self.l2:
            value = value + self._penalty(x, batch)
            grad = grad.add_(self._share(batch) * x)
        return value, grad

    def value(self, x: Tensor, batch: Batch) -> Tensor:
        """Weighted mean loss [M, trials], the same as that of `value_and_grad`."""
        value = self._value(x, batch)
        return value + self._penalty(x, batch) if self.l2 else value

    def hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Hessian at x times v, [M, trials, d]."""
        product = self._hvp(x, v, batch)
        return product + self._share(batch) * v if self.l2 else product

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """Hessian [M, trials, d, d]."""
        H = self._hessian(x, batch)
        if self.l2:
            diagonal = H.diagonal(dim1=-2, dim2=-1)
            diagonal.add_(self._share(batch))
        return H

    def _share(self, batch: Batch) -> Tensor:
        """These rows' part of l2, [M, 1, 1].

        The pieces of a full pass share the penalty: their weights sum to 1.
        """
        return self.l2 * batch.weight.sum(-1)[:, None, None]

    def _penalty(self, x: Tensor, batch: Batch) -> Tensor:
        """l2/2 |x|^2, [M, trials]."""
        return self._share(batch).squeeze(-1) * x.square().sum(-1) / 2

    # what a subclass gives

    def _value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradient without the penalty; the gradient goes into `out`, if given."""
        raise NotImplementedError

    def _hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Hessian times v without the penalty."""
        raise NotImplementedError

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [M, trials, classes, rows] for rows [M, B, *sample], in evaluation mode."""
        raise NotImplementedError

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs [M, trials, classes, rows] in training mode, which leaves the buffers as they
        are."""
        raise NotImplementedError

    # what follows from it, unless a subclass knows a faster way

    def _value(self, x: Tensor, batch: Batch) -> Tensor:
        """The loss without the penalty, [M, trials]."""
        y = by_trial(batch.y, x.shape[1])
        rows = self.loss(self.outputs(x, batch), y)
        return (rows * batch.weight.unsqueeze(1)).sum(-1)

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """The Hessian without the penalty: the columns of the identity run as extra trials."""
        M, T, d = x.shape
        H = torch.empty(M, T, d, d, dtype=x.dtype, device=x.device)
        y = by_trial(batch.y, T)
        for part, unit in columns(x, T * (M * d + batch.x.numel())):
            n = len(unit)
            many = batch._replace(y=y.repeat_interleave(n, 1))
            v = unit.repeat(T, 1).expand(M, T * n, d)
            product = self._hvp(x.repeat_interleave(n, 1), v, many)
            H[:, :, part] = product.view(M, T, n, d)
        return mirrored(H)

    def targets(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Targets [M, trials, B] drawn from the model's own distribution.

        u [M, B] are uniform numbers, the same for all trials.
        """
        return draw(self.loss, self.outputs(x, batch), by_trial(u, x.shape[1]))

    def bartlett(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """The Gauss-Newton-Bartlett estimate of the Hessian's diagonal, [M, trials, d].

        It is B g^2, with g the gradient for targets that are drawn by u [M, B].
        """
        drawn = batch._replace(y=self.targets(x, batch, u))
        _, g = self._value_and_grad(x, drawn, None)
        rows = (batch.weight > 0).sum(-1).view(-1, 1, 1)
        return rows * g * g + self._share(batch)


def by_trial(y: Tensor, trials: int) -> Tensor:
    """Targets as [M, trials, B]: those that all trials share, [M, B], are expanded."""
    return y if y.dim() == 3 else y.unsqueeze(1).expand(-1, trials, -1)


def columns(x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns of the identity [n, d], and where they lie.

    A column takes `numbers` numbers in memory; a block is as wide as memory allows.
    """
    d = x.shape[-1]
    width = d if x.is_meta else max(1, BLOCK // numbers)
    for start in range(0, d, width):
        end = min(d, start + width)
        part = slice(start, end)
        unit = x.new_zeros(end - start, d)
        unit[:, part].fill_diagonal_(1)
        yield part, unit


def mirrored(H: Tensor) -> Tensor:
    """H, made symmetric to the bit in place."""
    return H.add_(H.mT.clone()).div_(2)
