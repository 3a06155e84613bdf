"""LD-SGD. Li et al., "Communication-Efficient Local Decentralized SGD Methods", arXiv 1910.09126.

    x      mean of the models
    delta  update of a client
    alpha  step, eta in the paper
    I2     steps of a round that end in an average
    I1     tau - 1, those before that do not

A round is I1 local SGD steps, then I2 steps that are each followed by an average. The paper's
workers average with their neighbours. Here all are neighbours, with their weights p_i, so there are
I2 exchanges over the server. I2 = 1 is FedAvg. Averaged steps follow the gradient of f itself and
pull back what the local ones drifted, at the price of I2 messages.

A client receives and sends the model I2 times in a round. The first exchange has tau steps, the
last of which is averaged already; each later one has a single step.
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
    Phase,
    Reply,
    Step,
    at,
    at_least,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha steps) in the last exchange


@hyper
class LDSGD(Algorithm):
    """Local SGD, then I2 steps of distributed SGD, in every round.

    >>> len(LDSGD(I2=3).phases)
    3
    """

    alpha: Step = param(default=0.01, doc="step size α")
    I2: int = param(default=2, doc="number I₂ of averages per round; 1 is FedAvg")

    def __post_init__(self) -> None:
        positive(self, "alpha")
        at_least(self, "I2", 1)

    def server_init(self, x: Tensor) -> State:
        return State(x, x.new_zeros(x.shape[0], 1).double())

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD: tau steps in the first exchange, one in each later one."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """The mean of the clients' models, after each exchange."""
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(server.x + delta, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """I2 exchanges that differ in their number of steps alone."""
        first = Phase(self.broadcast, self.client, self.server, self.local_steps)
        single = first._replace(steps=torch.ones_like)
        later = [single] * (self.I2 - 1)
        return (first, *later)
