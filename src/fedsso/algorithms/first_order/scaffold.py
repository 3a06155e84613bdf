"""SCAFFOLD. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.

    x      global model
    c_i    control variate of client i
    c      sum p_i c_i over all clients
    dy     y_i - x, update of client i
    alpha  client step eta_l
    eta    server step eta_g
    tau    local steps K
    dc     c_i^+ - c_i

Every local gradient is corrected by c - c_i, so clients do not drift towards their own minima: the
limit is the minimiser of f for any tau. The new variate c_i^+ is the full gradient at x (option I)
or the mean gradient of the local steps (option II). The first round has no variates yet, and is
FedAvg's. Clients that are rarely drawn hold stale variates; on non-convex models it needs a smaller
alpha than FedAvg.

Two vectors go each way, and a client keeps one. c is the weighted mean of all clients' variates,
also of those that were absent: a cohort whose weights sum to `mass` moves it by mass times the
mean of its dc.
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
    Step,
    at,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver
from ...errors import one_of


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    c: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of mean dy / (alpha tau)


class Message(NamedTuple):
    """To the clients."""

    x: Tensor
    c: Tensor


class Upload(NamedTuple):
    """To the server."""

    dy: Tensor
    dc: Tensor


@hyper
class SCAFFOLD(Algorithm):
    """Federated averaging with control variates that remove client drift.

    >>> SCAFFOLD(alpha=0.03).option
    'II'
    """

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(default=1.0, doc="server step size η; 1 is plain averaging")
    option: str = param(
        default="II", doc="new control variate: I, full gradient at x; II, mean of the local steps"
    )

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        one_of("option", self.option, ("I", "II"))

    def server_init(self, x: Tensor) -> State:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, torch.zeros_like(x), nothing)

    def client_init(self, x: Tensor) -> Tensor:
        """c_i = 0 before a client's first round."""
        return torch.zeros_like(x)

    def broadcast(self, server: State) -> Message:
        return Message(server.x, server.c)

    def client(self, f: Objective, message: Message, c_i: Tensor, local: Local) -> Reply:
        """Local SGD with corrected gradients: y <- y - alpha (grad f_i(y; batch) - c_i + c).

        Then the new variate c_i^+ is grad f_i(x) (option I, one more pass over all rows) or
        c_i - c + (x - y) / (alpha tau) (option II). Sends y - x and c_i^+ - c_i, keeps c_i^+.
        """
        x, c = message
        alpha = at(self.alpha, local.k)
        drift = c - c_i
        dy, loss = solver.sgd(f, x, local, alpha, lambda _: drift)  # Alg. 1, line 10
        if self.option == "I":  # line 12
            _, new = solver.gradient(f, x, local)
        else:
            new = -drift - dy / (alpha * local.own_steps)
        return Reply(Upload(dy, new - c_i), new, loss)

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """x += eta * mean dy, and c += sum over the cohort of p_i dc_i.

        `mean` is over those who answered; `cohort.mass`, the sum of their p_i, turns it into that
        sum.
        """
        x = server.x + at(self.eta, cohort.k) * mean.dy  # line 17
        c = server.c + cohort.mass * mean.dc
        g = norm(mean.dy) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(x, c, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
