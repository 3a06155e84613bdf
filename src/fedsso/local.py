"""Local solvers that clients share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .algorithm import Local, Objective
from .tree import Scalar

Correction = Callable[[Tensor], Tensor]


def sgd(
    f: Objective, x: Tensor, local: Local, alpha: Scalar, correction: Correction | None = None
) -> tuple[Tensor, Tensor]:
    """Local SGD from the global model x: the update x_tau - x [M, trials, d] and the mean mini-batch loss [M, trials].

    The difference is carried instead of the model: at alpha = 1e-4 a float32 model would drown its own update in
    rounding. `correction` adds a term to every gradient, given the update so far. Step j acts only on clients that
    still have a step to do.
    """
    delta = x.new_zeros(local.own_steps.shape[0], *x.shape)
    point, grad = torch.empty_like(delta), torch.empty_like(delta)  # fresh ones in each step cost page faults
    rate = torch.as_tensor(alpha, dtype=x.dtype, device=x.device)
    total = x.new_zeros(())
    for j in range(local.steps):
        loss, g = f.value_and_grad(torch.add(x, delta, out=point), local.batch(j), out=grad)
        if correction is not None:
            g = g + correction(delta)
        active = local.active(j)
        delta.addcmul_(g, rate if active is None else rate * active, value=-1)
        total = total + (loss if active is None else loss * active[..., 0])
    return delta, total / local.own_steps[..., 0]
