"""Losses: one number for each row, and their derivatives in the model's outputs.

Outputs are z [..., classes, rows], targets y [..., rows]. Three losses are built in:

    cross_entropy   -log softmax(z)_y          labels 0, 1, ..., classes - 1
    bce             log(1 + e^z) - y z         one output, targets in [0, 1]
    mse             (z - y)^2, without 1/2     one output, real targets

`slope` gives the first derivative in z, `bend` the second one times a vector. Those of
cross_entropy and bce, and the second one of mse, are written out; all others come from autograd.
Built-in losses are recognised by identity (`loss is mse`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError, unknown

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [..., classes, rows], targets [..., rows]) -> one loss for each row, [..., rows]."""


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Softmax cross-entropy of integer labels: -log softmax(z)_y for each row.

    >>> cross_entropy(torch.zeros(4, 1), torch.tensor([2])).exp()
    tensor([4.])
    """
    logp = torch.log_softmax(z, -2)
    return -logp.gather(-2, y.unsqueeze(-2)).squeeze(-2)


def bce(z: Tensor, y: Tensor) -> Tensor:
    """Logistic loss of one output and targets 0 or 1: log(1 + e^z) - y z for each row.

    softplus computes log(1 + e^z) without overflow.
    """
    z = _single(z, "bce")
    return F.softplus(z) - y.to(z.dtype) * z


def mse(z: Tensor, y: Tensor) -> Tensor:
    """Squared error (z - y)^2 of one output, for each row."""
    z = _single(z, "mse")
    return (z - y.to(z.dtype)) ** 2


# What the option `loss` may name.
LOSSES: dict[str, RowLoss] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": mse,
}


def _single(z: Tensor, loss: str) -> Tensor:
    """The one output [..., rows] of a model; an error if it has several."""
    classes = z.shape[-2]
    if classes != 1:
        raise InputError(f"loss {loss!r} needs a model with one output, this one has {classes}")
    return z.squeeze(-2)


def row_loss(loss: str | Callable[[Tensor, Tensor], Tensor]) -> RowLoss:
    """A loss by name, or a user's function.

    Args:
        loss: A name in LOSSES, or a function that takes outputs [n, classes] and targets [n], as
            torch's own losses do, and returns one loss for each row, [n].

    Returns:
        A function in the layout of this package. For a user's function it brings clients, trials
        and rows into one axis and checks what comes back.

    Raises:
        InputError: No loss has that name, or it is neither a name nor a function.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        return LOSSES[loss]
    if not callable(loss):
        raise InputError(f"a loss is a name or a function, got loss={loss!r}")

    def rows(z: Tensor, y: Tensor) -> Tensor:
        """The user's losses [..., rows]; all leading axes become rows of one long batch."""
        outputs = z.movedim(-2, -1).reshape(-1, z.shape[-2])
        value = loss(outputs, y.reshape(-1))
        _check_rows(value, y.numel())
        return value.reshape(y.shape)

    return rows


def _check_rows(value: object, rows: int) -> None:
    """Refuse what a user's loss has returned unless it is one number for each row.

    A mean over the rows, which torch's losses return by default, cannot be weighted row by row.
    """
    if isinstance(value, Tensor):
        if value.shape == (rows,):
            return
        found = str(tuple(value.shape))
    else:
        found = type(value).__name__
    raise InputError(
        f"a loss must return one value per row, shape ({rows},), got {found}; use reduction='none'"
    )


def slope(loss: RowLoss, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of the rows [..., rows], and their derivatives in the outputs, shaped as z.

    The second tensor is the caller's: it may be written into.
    """
    if loss is cross_entropy:
        return _cross_entropy_slope(z, y)
    if loss is bce:
        return _bce_slope(z, y)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        rows = loss(z, y)
        (slope,) = torch.autograd.grad(rows.sum(), z)
    return rows.detach(), slope.contiguous()  # a user's loss may give a view of one number


def _cross_entropy_slope(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As `slope`. The derivative is softmax(z) minus 1 at the label.

    It is written over the log-softmax, which saves a tensor of the size of z in every step.
    """
    logp = torch.log_softmax(z, -2)
    index = y.unsqueeze(-2)
    rows = -logp.gather(-2, index).squeeze(-2)
    minus = logp.new_full((), -1.0).expand(index.shape)
    return rows, logp.exp_().scatter_add_(-2, index, minus)


def _bce_slope(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As `slope`. The derivative is sigmoid(z) - y, with the bits that autograd gives.

    It is torch's own derivative of softplus, without the graph that autograd would make.
    """
    single = _single(z, "bce")
    y = y.to(z.dtype)
    rows = F.softplus(single) - y * single
    one = z.new_ones(()).expand(single.shape)
    rise: Tensor = torch.ops.aten.softplus_backward(one, single, 1, 20)
    return rows, rise.sub_(y).unsqueeze(-2)


def bend(
    loss: RowLoss,
    z: Tensor,
    y: Tensor,
    u: Tensor,
) -> Tensor:
    """The second derivatives of the row losses in the outputs, times u; z and u alike in shape.

    For each row it is S u, with S [classes, classes]: diag(p) - p p^T for cross_entropy with
    p = softmax(z), s (1 - s) for bce with s = sigmoid(z), 2 for mse. A loss that is linear in z
    gives zeros.
    """
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
        total = loss(z, y).sum()
        (slope,) = torch.autograd.grad(total, z, create_graph=True)
    if not slope.requires_grad:  # a loss that is linear in the outputs
        return torch.zeros_like(z)
    (product,) = torch.autograd.grad(slope, z, u, materialize_grads=True)
    return product.contiguous()


def draw(loss: RowLoss, z: Tensor, u: Tensor) -> Tensor:
    """Targets [..., rows] drawn from the model's own distribution.

    This is the distribution whose negative log-likelihood is the loss: a class by softmax, 0 or 1
    by the sigmoid, a normal number with variance 1/2 around z. u [..., rows] are uniform numbers
    in (0, 1), one for each target: the same u gives the same draw.

    Raises:
        InputError: A user's own loss, whose distribution is not known.
    """
    if loss is cross_entropy:
        # The inverse of the distribution function: as many classes as lie below u.
        below = torch.softmax(z, -2).cumsum(-2)
        total = below[..., -1:, :]  # not quite 1, because of rounding
        return (below < u.unsqueeze(-2) * total).sum(-2)
    if loss is bce:
        return (u < torch.sigmoid(_single(z, "bce"))).to(z.dtype)
    if loss is mse:  # the density exp(-(z - y)^2) has variance 1/2
        normal: Tensor = torch.special.ndtri(u).to(z.dtype)
        return _single(z, "mse") + sqrt(0.5) * normal
    raise InputError(
        "targets cannot be drawn from a loss of your own; use loss 'cross_entropy', 'bce' or 'mse'"
    )
