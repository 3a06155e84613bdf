"""FedPM. Ishii et al., "FedPM: Federated Learning Using Second-order Optimization with
Preconditioned Mixing of Local Parameters", AAAI 2026; one local step (K = 1) with the exact
Hessian.

    x    global model theta
    g_i  gradient of f_i at x
    z_i  P_i (theta_i - theta) = -eta g_i
    P_i  preconditioner: Hessian of f_i at x, plus mu I
    eta  step of the clients
    mu   damping

A client steps to theta_i = theta - eta P_i^-1 g_i. Instead of averaging, the server mixes

    (sum p_i P_i)^-1 sum p_i P_i theta_i

With mu = 0 and eta = 1 that is Newton's method on f. A client sends d (d + 3) / 2 numbers. Far from
the minimum the step may be too long: then raise mu or lower eta.

Since P_i theta_i = P_i theta + z_i, the mix is x + (sum p_i P_i)^-1 sum p_i z_i, and the clients'
models themselves are not needed. The d x d matrices limit it to small models, and clients are
computed one at a time.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...algorithm import (
    Algorithm,
    Cohort,
    Local,
    Objective,
    Phase,
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
from ...maths import symmetric


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1]


class Upload(NamedTuple):
    """To the server."""

    z: Tensor  # [M, trials, d]
    P: Any  # packed; decoded, [M, trials, d, d]


def decode(upload: Upload) -> Upload:
    """The upload with P_i as a matrix."""
    return upload._replace(P=upload.P.dense(upload.z.shape[-1]))


@hyper
class FedPM(Algorithm):
    """Preconditioned mixing: average of the clients' Newton steps, weighted by their Hessians.

    >>> FedPM(mu=0.1).eta
    1.0
    """

    alone: ClassVar[bool] = True

    eta: Step = param(default=1.0, doc="step size η of the clients' Newton steps")
    mu: Scalar = param(default=1e-3, doc="damping μ of the clients' Hessians; 0 is the original")

    def __post_init__(self) -> None:
        positive(self, "eta")
        not_negative(self, "mu")

    def asks(self) -> str:
        return "hvp"

    def server_init(self, x: Tensor) -> State:
        """Refuses a model that is too large for d x d matrices."""
        symmetric.check_size(x)
        return State(x, x.new_zeros(x.shape[0], 1).double())

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One exchange without local steps; P_i is sent packed."""
        return (Phase(self.broadcast, self.client, self.server, decode=decode),)

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Sends z_i = -eta g_i and P_i = H_i + mu I, both over all rows of the client."""
        loss, g = solver.gradient(f, x, local)
        P = symmetric.shift(solver.hessian(f, x, local), self.mu)
        z = -at(self.eta, local.k) * g
        packed = symmetric.Packed(symmetric.pack(P))
        return Reply(Upload(z, packed), own, loss)

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """The preconditioned mix: x + (sum w_i P_i)^-1 sum w_i z_i."""
        x = server.x + symmetric.solve(mean.P, mean.z).to(server.x.dtype)
        return State(x, norm(mean.z) / at(self.eta, cohort.k))

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
