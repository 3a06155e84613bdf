"""What the back ends of the objective share.

Papers write the iterate as one vector x, so algorithms see a model as one flat vector. `Layout`
translates between it and a module's parameters. Buffers, such as the running statistics of
BatchNorm, are a second flat vector: they are averaged, but they are no part of x and have no
gradient.

`Backend` is the base of the back ends: they give outputs, gradients and Hessian products,
and the rest follows from these here.

Outputs are laid out [clients, trials, classes, rows]. The softmax then runs over contiguous rows,
which is several times faster on a CPU than with the classes last.

    M, trials   leading axes of points x [M, trials, d]: each client and trial has its own
    B           rows of a batch, padded with rows of weight 0
    b           numbers in the buffers
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
from .losses import RowLoss, bend, draw

if TYPE_CHECKING:
    from ..algorithm import Batch

BLOCK = 1 << 22  # numbers that a block of a Hessian's columns may take
SHOWN = 4  # parameters that a message names


# ---- models as flat vectors ----


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a module lies in the flat vector.

    Parameters follow each other in the order of `named_parameters`, each flattened row by row.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Layout of the trainable parameters; a frozen one stays as it is in the module.

        Raises:
            InputError: No parameter is trainable.
        """
        shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        if not shapes:
            raise InputError("the model has no trainable parameters")
        return cls(tuple(shapes), tuple(shapes.values()))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter; their sum is d."""
        return [shape.numel() for shape in self.shapes]

    @cached_property
    def layers(self) -> list[int]:
        """Number of entries of each layer: of the parameters of one submodule, a weight and its
        bias.
        """
        found: dict[str, int] = {}
        for name, size in zip(self.names, self.sizes, strict=True):
            owner = name.rpartition(".")[0]
            found[owner] = found.get(owner, 0) + size
        return list(found.values())

    def __str__(self) -> str:
        """The first few parameters by name and shape, for messages."""
        shown = [
            f"{name} {list(shape)}"
            for name, shape in zip(self.names[:SHOWN], self.shapes[:SHOWN], strict=True)
        ]
        more = len(self.names) - SHOWN
        return ", ".join([*shown, f"{more} more"] if more > 0 else shown)

    def unravel(self, x: Tensor) -> dict[str, Tensor]:
        """Views of x [..., d] by parameter name, [..., *shape].

        They share memory with x: writing into a view writes into x.
        """
        lead = x.shape[:-1]
        parts = x.split_with_sizes(self.sizes, -1)
        views = {}
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            views[name] = part.view((*lead, *shape))
        return views


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module that shares its frozen parameters, which may be large."""
    shared = {id(p): p for p in module.parameters() if not p.requires_grad}
    return copy.deepcopy(module, shared)


def ravel(module: nn.Module) -> Tensor:
    """The trainable parameters as one flat vector [d] (a copy)."""
    params = [module.get_parameter(name) for name in Layout.of(module).names]
    return torch.cat([p.detach().reshape(-1) for p in params])


def unravel_into(module: nn.Module, x: Tensor) -> None:
    """Write a flat vector [d] into a module's trainable parameters, in place."""
    with torch.no_grad():
        for name, value in Layout.of(module).unravel(x).items():
            module.get_parameter(name).copy_(value)


def buffers_of(module: nn.Module) -> Tensor:
    """The buffers (BatchNorm statistics) as one flat vector [b] in float64.

    Integers, such as BatchNorm's count of batches, are held as floats. A module without buffers
    gives an empty vector.
    """
    parts = [b.detach().reshape(-1).double() for b in module.buffers()]
    return torch.cat(parts) if parts else torch.zeros(0)


def buffers_into(module: nn.Module, flat: Tensor) -> None:
    """Write a flat vector [b] into a module's buffers in place, rounding where they are integers.

    An average over clients need not be whole. The caller has switched autograd off.
    """
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

    Args:
        module: The model. It is copied, since back ends write parameters and modes into it.
            Frozen parameters, which nobody writes, are shared with the copy.
        loss: The loss of single rows.

    It is the `Objective` of the algorithms' contract. Mini-batches carry weights that sum to 1
    over a client's rows. In a full pass the rows come in several batches, whose weights sum to 1
    together: the results of the pieces are then added.
    """

    stacks = True  # whether clients and trials are computed at once
    one_output = False  # whether it is one linear map to one output, as in logistic regression
    l2 = 0.0

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        self.module = copied(module)
        self.layout = Layout.of(self.module)
        self.loss = loss
        self.buffers = torch.zeros(0)

    def value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted mean loss [M, trials] and its gradient [M, trials, d], at x with the penalty.

        Modules run in training mode, and the buffers move along. The gradient is written into
        `out` where it is given, which saves fresh memory in every local step.
        """
        value, grad = self._value_and_grad(x, batch, out)
        if self.l2:
            share = self._share(batch)
            value = value + _penalty(x, share)
            grad = grad.add_(share * x)
        return value, grad

    def value(self, x: Tensor, batch: Batch) -> Tensor:
        """Weighted mean loss [M, trials], the same as that of `value_and_grad`; buffers stay."""
        value = self._value(x, batch)
        return value + _penalty(x, self._share(batch)) if self.l2 else value

    def hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """The Hessian at x times v [M, trials, d], of the same shape."""
        product = self._hvp(x, v, batch)
        return product + self._share(batch) * v if self.l2 else product

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """The Hessian [M, trials, d, d], symmetric to the bit.

        It takes M * trials * d * d numbers: algorithms that ask for it take clients one at a
        time.
        """
        H = self._hessian(x, batch)
        if self.l2:
            diagonal = H.diagonal(dim1=-2, dim2=-1)
            diagonal.add_(self._share(batch))
        return H

    def dense_rows(self, batch: Batch) -> Tensor:
        """The samples of a batch as dense vectors, [M, B, inputs]."""
        return batch.x.flatten(2)

    def rows(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The inputs a_j of a linear model, [M, B, d], and phi''_j at x, [M, trials, B].

        The loss of row j is phi_j(a_j^T x), so that the Hessian is the weighted mean of the
        phi''_j a_j a_j^T, without the penalty. With a bias, a_j ends with a 1.

        Raises:
            InputError: The model is not one linear map to one output.
        """
        if not self.one_output:
            raise InputError(
                "this algorithm needs a loss of one number a^T x for each row: use model 'linear' "
                "or 'mclr' with loss 'bce' or 'mse'; with several outputs (softmax) use fednl"
            )
        z = self.outputs(x, batch)
        y = by_trial(batch.y, x.shape[1])
        a = self.dense_rows(batch)
        ones = a.new_ones(*a.shape[:2], x.shape[-1] - a.shape[-1])
        return torch.cat([a, ones], -1), bend(self.loss, z, y, torch.ones_like(z)).squeeze(2)

    def _share(self, batch: Batch) -> Tensor:
        """These rows' part of l2, [M, 1, 1].

        The pieces of a full pass share the penalty: their weights sum to 1. Each piece thus
        brings the part of the penalty that belongs to its rows, and their sum has it once.
        """
        return self.l2 * batch.weight.sum(-1)[:, None, None]

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
        """Outputs [M, trials, classes, B] for rows [M, B, *sample], in evaluation mode."""
        raise NotImplementedError

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs [M, trials, classes, B] in training mode; the buffers stay as they are."""
        raise NotImplementedError

    # what follows from it, unless a subclass knows a faster way

    def _value(self, x: Tensor, batch: Batch) -> Tensor:
        """The loss without the penalty, [M, trials]."""
        y = by_trial(batch.y, x.shape[1])
        rows = self.loss(self.outputs(x, batch), y)
        return (rows * batch.weight.unsqueeze(1)).sum(-1)

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """The Hessian without the penalty: the columns of the identity run as extra trials.

        So one call of `_hvp` gives a block of n columns for every client and trial.
        """
        M, T, d = x.shape
        H = torch.empty(M, T, d, d, dtype=x.dtype, device=x.device)
        y = by_trial(batch.y, T)
        for part, unit in columns(x, T * (M * d + batch.x.numel())):
            n = len(unit)
            # Trial t becomes the n trials t n, ..., t n + n - 1, which all have its point and its
            # targets.
            many = batch._replace(y=y.repeat_interleave(n, 1))
            v = unit.repeat(T, 1).expand(M, T * n, d)
            product = self._hvp(x.repeat_interleave(n, 1), v, many)
            H[:, :, part] = product.view(M, T, n, d)
        return mirrored(H)

    def targets(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """Targets [M, trials, B] drawn from the model's own distribution.

        u [M, B] are uniform numbers, the same for all trials. Raises InputError for a user's own
        loss, whose distribution nobody knows.
        """
        return draw(self.loss, self.outputs(x, batch), by_trial(u, x.shape[1]))

    def bartlett(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """The Gauss-Newton-Bartlett estimate of the Hessian's diagonal, [M, trials, d].

        It is B g^2, with g the gradient for targets that are drawn by u [M, B] and B the rows of
        the batch. In expectation it is the diagonal of the Gauss-Newton matrix. The penalty's own
        diagonal, l2, is added.
        """
        drawn = batch._replace(y=self.targets(x, batch, u))
        _, g = self._value_and_grad(x, drawn, None)
        rows = (batch.weight > 0).sum(-1).view(-1, 1, 1)
        return rows * g * g + self._share(batch)


def _penalty(x: Tensor, l2: Tensor) -> Tensor:
    """l2/2 |x|^2 [M, trials], for points x [M, trials, d] and l2 [M, 1, 1]."""
    return l2.squeeze(-1) * x.square().sum(-1) / 2


def by_trial(y: Tensor, trials: int) -> Tensor:
    """Targets as [M, trials, B]: those that all trials share, [M, B], are expanded."""
    return y if y.dim() == 3 else y.unsqueeze(1).expand(-1, trials, -1)


def columns(x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns of the identity [n, d], and where they lie.

    Args:
        x: Gives d, the type and the device.
        numbers: The numbers that one column takes in memory while it is computed. A block
            holds as many columns as BLOCK allows, at least one.
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
    """H, made symmetric to the bit in place: (H + H^T) / 2 over the last two axes."""
    return H.add_(H.mT.clone()).div_(2)
