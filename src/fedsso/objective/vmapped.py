"""The back end for any module that torch.func can batch.

Loss and outputs are written as functions of one client and one trial. `torch.func.vmap` maps them
over the trials, which share the client's rows, and these over the clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .backend import Backend
from .modes import by_classes, differentiable_twice

if TYPE_CHECKING:
    from ..algorithm import Batch
    from .losses import RowLoss


class Vmapped(Backend):
    """torch.func over clients and, inside, over trials.

    The module stays in training mode but while it predicts. It has no buffers that change:
    modules with statistics of their own are left to `Looped`.
    """

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.module.train()
        self._grad = torch.func.grad_and_value(self._loss)
        over_trials = torch.func.vmap(self._outputs, (0, None))
        self._predict = torch.func.vmap(over_trials, (0, 0))

    # for one client and one trial: x [d], rows [B, *sample], y and weight [B]

    def _outputs(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [classes, B]."""
        params = self.layout.unravel(x)
        return by_classes(torch.func.functional_call(self.module, params, (rows,)))

    def _loss(
        self,
        x: Tensor,
        rows: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """The weighted sum of the rows' losses, one number; padding has weight 0."""
        return (self.loss(self._outputs(x, rows), y) * weight).sum()

    def _product(self, x: Tensor, v: Tensor, *rows: Tensor) -> Tensor:
        """The Hessian times v [d], reverse over reverse.

        Forward mode would load torch's deprecated script compiler.
        """
        grad = torch.func.grad(self._loss)
        pull_back = torch.func.vjp(lambda point: grad(point, *rows), x)[1]
        product: Tensor = pull_back(v)[0]
        return product

    # for all of them

    def _over(
        self,
        fn: Callable[..., Any],
        batch: Batch,
        *points: Tensor,
    ) -> Any:
        """fn(*points, rows, targets, weights) for all clients and trials; points [M, trials, d].

        The results have the axes [M, trials] in front of what fn returns for one client and one
        trial.
        """
        targets = 0 if batch.y.dim() == 3 else None  # the trials have targets of their own or not
        each = [0] * len(points)
        over_trials = torch.func.vmap(fn, (*each, None, targets, None))
        over_clients = torch.func.vmap(over_trials)
        return over_clients(*points, batch.x, batch.y, batch.weight)

    def _value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradient by `torch.func.grad_and_value`, which gives the gradient first."""
        grad, value = self._over(self._grad, batch, x)
        return value, grad if out is None else out.copy_(grad)

    def _hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Hessian times v, with kernels that have second derivatives."""
        with differentiable_twice(self.module):
            product: Tensor = self._over(self._product, batch, x, v)
        return product

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs of the module in training mode, [M, trials, classes, rows]."""
        out: Tensor = self._predict(x, batch.x)
        return out

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs in evaluation mode, [M, trials, classes, rows]."""
        self.module.eval()
        out: Tensor = self._predict(x, rows)
        self.module.train()
        return out
