"""FedNova. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020; with plain SGD at the clients.

    x        global model
    d        mean gradient along a client's steps
    alpha    client step, eta in the paper
    tau_i    local steps of client i, |a_i|_1 of the paper
    tau_eff  weighted mean of tau_i

Where clients take unequal numbers of steps, FedAvg favours those that take many. Here each client
sends the mean of its gradients instead of its update, and the model moves tau_eff steps along the
weighted mean of these. With equal tau_i it is FedAvg, drift included.

A client sends one number more than with FedAvg. Unequal numbers of steps arise from
`local_epochs`, where they grow with a client's rows, and from stragglers.
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
    Step,
    at,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of the mean of d


class Upload(NamedTuple):
    """What a client sends."""

    d: Tensor  # [M, trials, d]
    tau: Tensor  # [M, trials, 1]


@hyper
class FedNova(Algorithm):
    """Federated averaging of normalised updates, for clients with unequal local work.

    >>> FedNova(alpha=0.1).alpha
    0.1
    """

    alpha: Step = param(default=0.01, doc="client step size α")

    def __post_init__(self) -> None:
        positive(self, "alpha")

    def server_init(self, x: Tensor) -> State:
        return State(x, x.new_zeros(x.shape[0], 1).double())

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD; sends d_i = (x - y_i) / (alpha tau_i) and tau_i.

        d_i is the mean of the gradients along the client's steps.
        """
        alpha = at(self.alpha, local.k)
        delta, loss = solver.sgd(f, x, local, alpha)
        tau = local.own_steps.expand(*delta.shape[:-1], 1)
        return Reply(Upload(delta / (-alpha * tau), tau), own, loss)

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """x_{k+1} = x_k - alpha tau_eff * sum w_i d_i, with tau_eff = sum w_i tau_i."""
        tau_eff = mean.tau
        x = server.x - at(self.alpha, cohort.k) * tau_eff * mean.d
        return State(x, norm(mean.d))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
