"""Fed-Sophia. Elbakary et al., "Fed-Sophia: A Communication-Efficient Second-Order Federated
Learning Algorithm", arXiv 2406.06655; its client is Sophia-G of Liu et al., arXiv 2305.14342.

    x             global model
    m             moving mean of mini-batch gradients
    v             moving mean of the curvature's diagonal
    g_hat         gradient on labels that the model draws
    h_hat         B g_hat^2, B rows in the batch
    alpha         client step, the papers' eta
    beta1, beta2  weights of the old means
    rho           bound of every entry of m / v
    T             local steps between refreshes of v
    weight_decay  the papers' lambda

Clients walk with Sophia and keep m, v and their step count; the server averages the models. Every
entry moves by at most alpha rho in a step. m and v describe the client's own loss, so unequal
clients drift apart as in FedAvg.

A step of Sophia is

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) h_hat                       in every T-th step
    y = y - alpha (weight_decay y + clip(m / max(v, eps), rho))

h_hat estimates the diagonal of the Gauss-Newton matrix (Gauss-Newton-Bartlett). It takes a second
gradient, on labels that the model draws itself, and so a loss that is the negative logarithm of a
likelihood.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...algorithm import (
    Algorithm,
    Cohort,
    Local,
    Objective,
    Reply,
    Scalar,
    Step,
    at,
    at_least,
    hyper,
    norm,
    not_negative,
    param,
    positive,
    share,
)


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    grad_norm: (
        Tensor  # [trials, 1] length of (x_k - v_k) / (alpha tau), the clients' mean direction
    )


class Memory(NamedTuple):
    """What a client keeps."""

    m: Tensor  # [trials, d]
    v: Tensor  # [trials, d]
    t: Tensor  # [trials, 1] local steps taken so far


@hyper
class FedSophia(Algorithm):
    """FedAvg with Sophia as the clients' optimizer.

    Entries are bounded, so a parameter moves by at most alpha rho per step.

    >>> FedSophia(alpha=0.03).T
    10
    """

    alpha: Step = param(default=0.2, doc="client step size α")
    beta1: Scalar = param(default=0.965, doc="weight β₁ of the old mean gradient")
    beta2: Scalar = param(default=0.99, doc="weight β₂ of the old curvature")
    rho: Scalar = param(default=0.04, doc="bound ρ on every entry of the direction")
    T: int = param(default=10, doc="local steps between estimates of the curvature")
    eps: Scalar = param(default=1e-12, doc="minimum curvature ε")
    weight_decay: Scalar = param(default=0.0, doc="weight decay λ")

    def __post_init__(self) -> None:
        positive(self, "alpha")
        positive(self, "rho", "eps", schedules=False)
        share(self, "beta1", "beta2")
        not_negative(self, "weight_decay")
        at_least(self, "T", 1)

    def asks(self) -> str:
        """Labels must be drawn from the model, which not every loss allows."""
        return "targets"

    def server_init(self, x: Tensor) -> State:
        return State(x, x.new_zeros(x.shape[0], 1).double())

    def client_init(self, x: Tensor) -> Memory:
        """m = v = 0 and no steps: before a client's first round."""
        steps = x.new_zeros(x.shape[0], 1)
        return Memory(torch.zeros_like(x), torch.zeros_like(x), steps)

    def client(
        self,
        f: Objective,
        x: Tensor,
        own: Memory,
        local: Local,
    ) -> Reply:
        """tau steps of Sophia from x; sends y - x, keeps m, v and the number of its steps.

        The client counts its own steps, so that v is refreshed in every T-th of them across
        rounds.
        """
        alpha = at(self.alpha, local.k)
        m, v, t = own
        delta = torch.zeros_like(m)
        total = m.new_zeros(m.shape[:-1])
        for j in range(local.steps):
            point = x + delta
            batch = local.batch(j)
            active = local.own_steps > j
            loss, g = f.value_and_grad(point, batch)
            m = torch.where(active, self.beta1 * m + (1 - self.beta1) * g, m)
            due = active & (t % self.T == 0)
            # The second gradient is computed if any client of the chunk is due. Draws have a
            # purpose for each step, so that two refreshes of one round draw different labels.
            if due.is_meta or due.any():
                u = local.uniform(f"labels {j}", batch.weight.shape[-1])
                h = f.bartlett(point, batch, u)
                v = torch.where(due, self.beta2 * v + (1 - self.beta2) * h, v)
            direction = _clip(m / _at_least(v, self.eps), self.rho)
            walk = self.weight_decay * point + direction
            delta = torch.where(active, delta - alpha * walk, delta)
            total = total + loss * active[..., 0]
            t = t + active
        return Reply(delta, Memory(m, v, t), total / local.own_steps[..., 0])

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """The mean of the clients' models, as in FedAvg."""
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(server.x + delta, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}


def _at_least(v: Tensor, bound: Scalar) -> Tensor:
    """v with its entries raised to the bound."""
    return torch.maximum(v, torch.as_tensor(bound, dtype=v.dtype, device=v.device))


def _clip(z: Tensor, rho: Scalar) -> Tensor:
    """z with its entries brought into [-rho, rho]."""
    bound = torch.as_tensor(rho, dtype=z.dtype, device=z.device)
    return torch.clamp(z, -bound, bound)
