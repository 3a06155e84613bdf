"""STEM. Khanduri et al., "STEM: A Stochastic Two-Sided Momentum Algorithm Achieving Near-Optimal
Sample and Communication Complexities for Federated Learning", NeurIPS 2021.

    x       mean of the clients' models
    y       model of a client
    d       direction, mean of the clients'
    t       gradient steps so far
    alpha   first step, kappa in the paper (with its w_t = 1)
    sigma2  decay: eta_t = alpha / (1 + sigma2 t)^(1/3)
    c       a_t = min(1, c (eta_t / alpha)^2)
    xi      mini-batch of the step

Each local step moves along a direction d that is corrected on the same mini-batch at both ends:

    y+ = y - eta_t d        d+ = grad f_i(y+; xi) + (1 - a_t) (d - grad f_i(y; xi))

d removes the noise of mini-batches, not the clients' drift. It goes on across rounds: a round
begins with the server's step x - eta_t d, which is the model. The very first step has d = 0 and
a = 1. Each step takes two gradients. With a = 1 throughout it is FedAvg.

Model and direction go both ways, twice FedAvg's bytes. The step size has the form of the paper's
kappa / (w_t + sigma^2 t)^(1/3). Clients with unequal numbers of steps have unequal t; the server
goes on with their weighted mean.
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
    hyper,
    norm,
    not_negative,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state, all of which goes to the clients: they need both ends of the server's step."""

    x: Tensor  # [trials, d], before that step
    d: Tensor
    t: Tensor  # [trials, 1]


class Upload(NamedTuple):
    """How far a client came."""

    x: Tensor
    d: Tensor


@hyper
class STEM(Algorithm):
    """Local SGD with variance-reducing momentum at clients and server.

    >>> STEM(alpha=0.1, sigma2=0.0).c
    1.0
    """

    alpha: Scalar = param(default=0.01, doc="initial step size α (the paper's κ)")
    sigma2: Scalar = param(default=0.1, doc="decay σ² of the step size η_t = α/(1 + σ² t)^(1/3)")
    c: Scalar = param(
        default=1.0,
        doc="c in the weight a_t = min(1, c (η_t/α)²) of the new gradient; the paper's c is c/α²",
    )

    def __post_init__(self) -> None:
        positive(self, "alpha", "c", schedules=False)
        not_negative(self, "sigma2")

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), x.new_zeros(x.shape[0], 1))

    def model(self, server: State, own: tuple[()]) -> Tensor:  # noqa: ARG002
        """x - eta_t d: the model after the step with which the next round begins."""
        eta, _ = self.rates(server.t)
        return server.x - eta * server.d

    def broadcast(self, server: State) -> State:
        """The whole state: x and d, and t for the step sizes."""
        return server

    def client(
        self,
        f: Objective,
        start: State,
        own: tuple[()],
        local: Local,
    ) -> Reply:
        """tau steps of the two formulas above, from the server's x and d.

        Sends how far model and direction came. Each step moves first along the old d, then
        corrects it by the gradients of one mini-batch at both ends of the move.
        """
        d = solver.at_clients(start.d, local)
        delta = torch.zeros_like(d)
        total = d.new_zeros(())
        for j in range(local.steps):
            eta, a = self.rates(start.t + j)
            batch = local.batch(j)
            on = local.own_steps > j
            # The same mini-batch at both ends: its noise cancels in the difference.
            _, before = f.value_and_grad(start.x + delta, batch)
            delta = torch.where(on, delta - eta * d, delta)
            loss, g = f.value_and_grad(start.x + delta, batch)
            d = torch.where(on, g + (1 - a) * (d - before), d)
            total = total + loss * on[..., 0]
        loss = total / local.own_steps[..., 0]
        return Reply(Upload(delta, d - start.d), own, loss)

    def rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The step eta_t, and the share a_t of the new gradient, after t gradient steps."""
        decay = (1 + self.sigma2 * t) ** (-1 / 3)
        a = torch.where(t > 0, (self.c * decay**2).clamp(max=1), 1.0)
        return self.alpha * decay, a

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """Means of models and directions; t grows by the clients' mean number of steps."""
        x = server.x + mean.x
        d = server.d + mean.d
        return State(x, d, server.t + cohort.steps)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": norm(server.d)[:, 0]}
