"""FedExP. Jhunjhunwala, Wang and Joshi, "FedExP: Speeding Up Federated Averaging via
Extrapolation", ICLR 2023.

    x       global model w^(t)
    before  the iterate before x; first x itself
    delta   mean of the clients' updates Delta_i, with weights w_i
    square  mean of |Delta_i|^2, with the same weights
    alpha   client step, eta_l in the paper
    eta     server step, eta_g in the paper
    eps     epsilon, which keeps eta small where delta is small

Clients are FedAvg's. Where their updates point in different directions, the mean is shorter than
each of them, and FedAvg slows down. The server makes up for it:

    eta = max(1, square / (2 (|delta|^2 + eps)))        x = x + eta delta

So eta is 1 as long as the clients agree, and grows with their disagreement. Near a fixed point of
unequal clients delta vanishes and square does not: there eta can reach square / (2 eps), and x
oscillates. The paper therefore evaluates the mean of the last two iterates, and so does `model`;
clients go on from x itself. Raise eps where the oscillation is too strong.

The server needs square, one number. A server that sees every update can compute it. Here every
client sends |Delta_i|^2 beside its update, one number more than FedAvg (4 bytes in float32), since
this also works with secure aggregation, which reveals sums alone. Compressed uploads leave this
number exact: it is the length of the update before it was compressed.

The authors' code multiplies eps by the number of clients in the cohort, lowers it with the square
of a decaying client step, and evaluates x alone after the first round. Here eps is a constant as
in the paper's formula, and the start counts as an iterate.
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
    Scalar,
    Step,
    at,
    dot,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    before: Tensor  # [trials, d]
    eta: Tensor  # [trials, 1] the server step of the last round
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


class Upload(NamedTuple):
    """What a client sends."""

    delta: Tensor  # [M, trials, d]
    square: Tensor  # [M, trials, 1] its squared length


@hyper
class FedExP(Algorithm):
    """Federated averaging with a server step that grows with the disagreement of the clients.

    eps is compared with |delta|^2, so it belongs to the size of the updates. The authors' code has
    0.001 for CIFAR with client step 0.01, and 0.1 for EMNIST with client step 0.1.

    >>> FedExP(alpha=0.1, eps=0.1).eps
    0.1
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α (the paper's η_l)")
    eps: Scalar = param(
        default=1e-3, doc="ε, added to |Δ|²; larger values give smaller server steps"
    )

    def __post_init__(self) -> None:
        positive(self, "alpha")
        positive(self, "eps", schedules=False)

    def server_init(self, x: Tensor) -> State:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, x.clone(), nothing + 1, nothing)

    def model(self, server: State, own: tuple[()]) -> Tensor:  # noqa: ARG002
        """The mean of the last two iterates, which is what the paper evaluates."""
        return (server.before + server.x) / 2

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD as in FedAvg; sends the update and its squared length."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        square = dot(delta, delta).to(delta.dtype)
        return Reply(Upload(delta, square), own, loss)

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """x_{k+1} = x_k + eta delta, with eta = max(1, square / (2 (|delta|^2 + eps)))."""
        delta = mean.delta
        agreement = 2 * (dot(delta, delta) + self.eps)
        eta = (mean.square / agreement).clamp(min=1)  # NaN stays NaN
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        x = server.x + eta.to(delta.dtype) * delta
        return State(x, server.x, eta, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        """`stretch` is eta: the step in lengths of FedAvg's."""
        return {"grad_norm": server.grad_norm[:, 0], "stretch": server.eta[:, 0]}
