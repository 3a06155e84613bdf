"""ServerLion. The Lion of Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS
2023, as the server's optimiser in the scheme of Reddi et al., ICLR 2021.

    x      global model
    delta  mean of the clients' updates; -delta is Lion's gradient
    m      momentum of delta, first 0
    c      m with more weight on the newest delta
    alpha  client step
    eta    server step: what every entry of x moves in a round
    beta1  weight of the past in c
    beta2  weight of the past in m

Clients are FedAvg's. The server takes the sign of each entry:

    c = beta1 m + (1 - beta1) delta
    x = x + eta sign(c)
    m = beta2 m + (1 - beta2) delta

Every entry moves by eta whatever the size of delta, so alpha only decides the direction, and x
never settles: it ends within some multiples of eta of a minimum unless eta decays. An entry whose
updates are all zero, such as the weight of a pixel that is always black, stays.

beta1 and beta2 are Lion's. Its code steps by 1e-4, for each of many gradients. A server has
hundreds of rounds, in which an entry moves by at most eta times their number: hence 0.01. Lion's
weight decay is left out; the run option l2 is a penalty that the clients see.

FedLion (Tang and Chang, arXiv 2402.09941) is another method: there the clients step by Lion.
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
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


@hyper
class ServerLion(Algorithm):
    """Lion at the server: every entry moves by the same step, in the direction of its momentum.

    >>> ServerLion(eta=0.003).beta2
    0.99
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(default=0.01, doc="server step size η: how far every entry moves per round")
    beta1: Scalar = param(default=0.9, doc="weight β₁ of the momentum in the direction")
    beta2: Scalar = param(default=0.99, doc="decay β₂ of the momentum")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        share(self, "beta1", "beta2")

    def server_init(self, x: Tensor) -> State:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, torch.zeros_like(x), nothing)

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD as in FedAvg."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """x_{k+1} = x_k + eta sign(beta1 m + (1 - beta1) delta), with m of the round before."""
        c = self.beta1 * server.m + (1 - self.beta1) * delta
        # Alone, the sign of NaN or infinity would be a number, and hide that a trial has diverged.
        direction = c.sign() + 0 * c
        x = server.x + at(self.eta, cohort.k) * direction
        m = self.beta2 * server.m + (1 - self.beta2) * delta
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(x, m, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
