"""Losses: one number per row, from outputs [..., classes, rows] and targets [..., rows]."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, unknown

RowLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Softmax cross-entropy of integer labels."""
    return -torch.log_softmax(z, -2).gather(-2, y.unsqueeze(-2)).squeeze(-2)


def bce(z: Tensor, y: Tensor) -> Tensor:
    """Logistic loss of one output and targets 0 or 1."""
    z = _single(z, "bce")
    return F.softplus(z) - y.to(z.dtype) * z


def mse(z: Tensor, y: Tensor) -> Tensor:
    """Squared error of one output."""
    z = _single(z, "mse")
    return (z - y.to(z.dtype)) ** 2


def _single(z: Tensor, loss: str) -> Tensor:
    if z.shape[-2] != 1:
        raise InputError(f"loss {loss!r} needs a model with one output, this one has {z.shape[-2]}")
    return z.squeeze(-2)


def _cross_entropy_slope(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(z, -2)
    index = y.unsqueeze(-2)
    rows = -logp.gather(-2, index).squeeze(-2)
    return rows, logp.exp_().scatter_add_(-2, index, logp.new_full((), -1.0).expand(index.shape))


LOSSES: dict[str, RowLoss] = {"cross_entropy": cross_entropy, "bce": bce, "mse": mse}


def row_loss(loss: str | Callable[[Tensor, Tensor], Tensor]) -> RowLoss:
    """A loss by name, or a user's callable (outputs [n, classes], targets [n]) -> one loss per row
    [n]."""
    if not callable(loss) and not isinstance(loss, str):
        raise InputError(f"a loss is a name or a function, got loss={loss!r}")
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        return LOSSES[loss]

    def rows(z: Tensor, y: Tensor) -> Tensor:
        outputs = z.movedim(-2, -1)
        value = loss(outputs.reshape(-1, z.shape[-2]), y.reshape(-1))
        if not isinstance(value, Tensor) or value.shape != (y.numel(),):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"a loss must return one value per row, shape ({y.numel()},), got {shape}; use "
                f"reduction='none'"
            )
        return value.reshape(y.shape)

    return rows


def slope(loss: RowLoss, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Row losses and their derivative in the outputs."""
    if loss is cross_entropy:
        return _cross_entropy_slope(z, y)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        rows = loss(z, y)
        (slope,) = torch.autograd.grad(rows.sum(), z)
    return rows.detach(), slope.contiguous()  # a user's loss may give a view of one number


def bend(loss: RowLoss, z: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """The second derivative of the row losses in the outputs, times u (as z)."""
    if loss is cross_entropy:
        p = torch.softmax(z, -2)
        pu = p * u
        return pu - p * pu.sum(-2, keepdim=True)
    if loss is bce:
        s = torch.sigmoid(_single(z, "bce")).unsqueeze(-2)
        return s * (1 - s) * u
    if loss is mse:
        return 2 * _single(u, "mse").unsqueeze(-2)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(z, y).sum(), z, create_graph=True)
    if not slope.requires_grad:  # a loss that is linear in the outputs
        return torch.zeros_like(z)
    (product,) = torch.autograd.grad(slope, z, u, materialize_grads=True)
    return product.contiguous()


def draw(loss: RowLoss, z: Tensor, u: Tensor) -> Tensor:
    """Targets [..., rows] from the distribution whose negative log-likelihood is the loss, by
    uniform numbers u."""
    if loss is cross_entropy:
        below = torch.softmax(z, -2).cumsum(-2)
        return (below < u.unsqueeze(-2) * below[..., -1:, :]).sum(
            -2
        )  # rounding may keep the last sum from being 1
    if loss is bce:
        return (u < torch.sigmoid(_single(z, "bce"))).to(z.dtype)
    if loss is mse:  # the density exp(-(z - y)^2) has variance 1/2
        normal: Tensor = torch.special.ndtri(u).to(z.dtype)
        return _single(z, "mse") + sqrt(0.5) * normal
    raise InputError(
        "targets cannot be drawn from a loss of your own; use loss 'cross_entropy', 'bce' or 'mse'"
    )
