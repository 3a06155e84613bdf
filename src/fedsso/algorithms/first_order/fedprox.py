"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    x      global model w^t
    delta  y - x, the update of a client
    alpha  client step
    mu     strength of the proximal term mu/2 |y - x|^2

Clients take local SGD steps on f_i(y) + mu/2 |y - x|^2, and the server averages. The term holds
unequal clients back: mu trades speed for a smaller bias of the fixed point. A large mu needs a
small alpha: from alpha (L + mu) = 2 on the local steps themselves no longer settle.

The paper lets clients solve their local problems as exactly as they can afford. Here that is the
number of local steps, which may differ between clients.
"""

from __future__ import annotations

from typing import NamedTuple

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
    not_negative,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


@hyper
class FedProx(Algorithm):
    """Federated averaging with a proximal term that keeps clients near the global model.

    The paper tries mu in {0.001, 0.01, 0.1, 1}.

    >>> FedProx(mu=0.1).alpha
    0.01
    """

    alpha: Step = param(default=0.01, doc="client step size α")
    mu: Scalar = param(default=0.01, doc="proximal strength μ; 0 is FedAvg")

    def __post_init__(self) -> None:
        positive(self, "alpha")
        not_negative(self, "mu")

    def server_init(self, x: Tensor) -> State:
        return State(x, x.new_zeros(x.shape[0], 1).double())

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD on f_i(y) + mu/2 |y - x|^2: y <- y - alpha (grad f_i(y; batch) + mu (y - x)).

        The gradient of the proximal term is mu times the update so far, which is what
        `correction` gets.
        """
        alpha = at(self.alpha, local.k)
        delta, loss = solver.sgd(f, x, local, alpha, lambda delta: self.mu * delta)
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """The mean of the clients' models, as in FedAvg with server step 1."""
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(server.x + delta, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
