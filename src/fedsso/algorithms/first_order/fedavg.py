"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.

    x      global model x_k
    delta  x_{k,tau} - x_k of a client
    alpha  client step
    eta    server step, 1 in the paper

Clients take tau local SGD steps from x_k, and the server averages their models. With tau > 1 and
unequal clients the fixed point is not the minimiser of f: each client drifts to its own minimum.

This is the smallest complete algorithm of the package. `client` and `server` are the paper's
Algorithm 1, written for all clients and trials at once; the engine draws the cohort and takes the
weighted mean in between.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

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


class State(NamedTuple):
    """Server state: the model, and what the trace tells about the last round."""

    x: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of (x_k - v_k) / (alpha tau)


@hyper
class FedAvg(Algorithm):
    """Federated averaging with a server step size.

    >>> FedAvg(alpha=0.03).eta
    1.0
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(default=1.0, doc="server step size η; 1 is plain averaging")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")

    def server_init(self, x: Tensor) -> State:
        """The state before round 1 from the initial model x [trials, d]."""
        return State(x, x.new_zeros(x.shape[0], 1).double())

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """ClientUpdate: tau steps y <- y - alpha * grad f_i(y; batch) from y = x.

        Sends y - x [M, trials, d] instead of y: the same number of bytes, with more digits.
        """
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """x_{k+1} = x_k + eta * sum w_i (y_i - x_k), with weights w_i of those who answered.

        With eta = 1 that is the weighted mean of the clients' models.
        """
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        x = server.x + at(self.eta, cohort.k) * delta
        return State(x, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
