"""FedNew. Elgabli et al., "FedNew: A Communication-Efficient and Privacy-Preserving Newton-Type
Method for Federated Learning", ICML 2022.

    x      global model
    y_i    Newton direction of client i
    y      sum p_i y_i = x_k - x_{k+1}
    lam_i  dual variable of client i
    mu     damping of the Newton system, the paper's alpha
    rho    strength of ADMM's consensus
    r      rounds between new Hessians
    z      where client i takes its Hessian

In each round the clients take one step of ADMM for the Newton system:

    y_i = (H_i + (mu + rho) I)^-1 (gradient_i - lam_i + rho y)
    lam_i += rho (y_i - y),    x -= y

Gradients and Hessians stay at the clients. A client keeps lam_i + rho y_i, and knows y from two
models in a row. The damping mu + rho makes it slow where f is flat.

A client receives x and sends y_i, as with FedAvg. The paper calls it private because the server
sees neither gradients nor Hessians. All clients must answer, because each takes y from the change
of the model between two rounds in a row.
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
    Phase,
    Reply,
    Scalar,
    Tree,
    at_least,
    hyper,
    not_negative,
    param,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]


class Own(NamedTuple):
    """What a client keeps: three vectors at most, no matrix.

    The Hessian is not kept but its point z: its products with vectors are computed there anew.
    """

    x: Tensor  # the last model
    dual: Tensor  # lam_i + rho y_i
    z: Tree  # [trials, d], or nothing if it is always the model


@hyper
class FedNew(Algorithm):
    """Newton's method with one ADMM step per round, and messages as small as FedAvg's.

    mu and rho between 0.01 and 1 are usual; their sum damps every step.

    >>> FedNew(rho=0.1).r
    1
    """

    needs_all: ClassVar[str] = "scaffold"

    mu: Scalar = param(default=0.01, doc="damping α of the Newton system")
    rho: Scalar = param(default=0.1, doc="strength ρ of the consensus")
    r: int = param(default=1, doc="rounds between new Hessians; 0: only in the first round")
    cg_steps: int = param(default=50, doc="conjugate-gradient steps of a client")
    tol: float = param(default=1e-4, doc="relative residual at which conjugate gradients stop")

    def __post_init__(self) -> None:
        not_negative(self, "mu", "rho", "tol")
        at_least(self, "r", 0)
        at_least(self, "cg_steps", 1)

    def asks(self) -> str:
        return "hvp"

    def server_init(self, x: Tensor) -> State:
        return State(x)

    def client_init(self, x: Tensor) -> Own:
        """The initial model and no dual variable, before a client's first round.

        With r = 1 the Hessian is always taken at the newest model, and no z is kept.
        """
        return Own(x, torch.zeros_like(x), () if self.r == 1 else x)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.broadcast, self.client, self.server),)

    def client(self, f: Objective, x: Tensor, own: Own, local: Local) -> Reply:
        """One step of ADMM: the system for y_i is solved by conjugate gradients.

        lam_i of this round is lam_i + rho y_i - rho y of the round before. The client has kept
        the first two terms as `dual` and knows y = x_{k-1} - x_k from the two models.
        """
        loss, g = solver.gradient(f, x, local)
        y = own.x - x  # 0 in the first round
        lam = own.dual - self.rho * y
        now = solver.at_clients(x, local)
        z = now if self._renews(local.k) else own.z
        H = solver.curvature(f, z, local)
        damping = self.mu + self.rho
        b = g - lam + self.rho * y
        y_i = solver.cg(lambda v: H(v) + damping * v, b, self.cg_steps, self.tol)
        dual = lam + self.rho * y_i
        return Reply(y_i, Own(now, dual, () if self.r == 1 else z), loss)

    def _renews(self, k: int) -> bool:
        """Whether clients take their Hessian at the model of round k."""
        if k == 1:
            return True
        return self.r > 0 and (k - 1) % self.r == 0

    def server(self, server: State, y: Tensor, _: Cohort) -> State:
        """x_{k+1} = x_k - sum p_i y_i."""
        return State(server.x - y)
