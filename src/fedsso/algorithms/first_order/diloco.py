"""DiLoCo. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv 2311.08105.

    x      global model theta
    g      -delta, the outer gradient
    delta  mean of the clients' updates
    m      momentum of g, first 0
    alpha  client step
    eta    server step, the outer learning rate
    beta   weight of the past in m, the outer momentum

Clients do their local work as in FedAvg, and the server takes a step of SGD with Nesterov momentum
along g, as torch.optim.SGD with nesterov=True does:

    m = beta m + g        x = x - eta (g + beta m)

In comparison with FedAvgM the newest update counts more: in its own round 1 + beta times, not
once. In the long run both multiply a constant update by eta / (1 - beta).

Defaults of eta and beta are the paper's, 0.7 and 0.9. They move 7 times as far as FedAvg, which
suits the paper's small inner steps: 500 of them by AdamW, from data that are much alike. Here
AdamW is the run option client="adamw". With plain SGD at the step that is best for FedAvg, eta
near 1 - beta is the safe choice.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

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
    hyper,
    norm,
    param,
    positive,
    share,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    m: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of g / (alpha tau)


@hyper
class DiLoCo(Algorithm):
    """Federated averaging with Nesterov momentum at the server.

    >>> DiLoCo(alpha=0.001).eta
    0.7
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α (inner learning rate)")
    eta: Step = param(
        default=0.7, doc="server step size η (outer learning rate); 1 - β steps as far as FedAvg"
    )
    beta: Scalar = param(
        default=0.9, doc="Nesterov momentum β; 0 is FedAvg with server step size η"
    )

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        share(self, "beta")

    def server_init(self, x: Tensor) -> State:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, torch.zeros_like(x), nothing)

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """The inner optimisation: local SGD as in FedAvg."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """The outer step: m = beta m + g, then x = x - eta (g + beta m) with the new m."""
        g = -delta
        m = self.beta * server.m + g
        x = server.x - at(self.eta, cohort.k) * (g + self.beta * m)
        length = norm(g) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(x, m, length)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
