"""FedAc. Yuan and Ma, "Federated Accelerated Stochastic Gradient Descent", NeurIPS 2020.

    x      w^ag, the model
    w      the other sequence; both start at x_0
    md     w / b + (1 - 1/b) x: where g is taken
    g      gradient of a client at md
    r      w - x
    alpha  client step, eta in the paper
    a, b   coupling, alpha and beta in the paper
    gamma  step of w
    mu     strong convexity of f, or a guess of it
    K      local steps of the client

Every local step is a step of an accelerated method; the server averages both sequences. The
constants of a round follow from alpha, mu and K:

    gamma = max(alpha, sqrt(alpha/(mu K)))
    option I    a = 1/(gamma mu)            b = a + 1
    option II   a = 3/(2 gamma mu) - 1/2    b = (2 a^2 - 1)/(a - 1)

It needs alpha <= 1/L and alpha mu < 1. gamma is far above alpha, so with heterogeneous or noisy
clients it can diverge where FedAvg converges: then raise mu or lower alpha.

Two vectors go each way, twice FedAvg's bytes. With a = b = 1 and gamma = alpha it is FedAvg.
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
    Scalar,
    Step,
    at,
    hyper,
    norm,
    param,
    positive,
)
from ...algorithm import local as solver
from ...errors import InputError, unknown

OPTIONS = ("I", "II")


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    w: Tensor
    grad_norm: Tensor  # [trials, 1] length of the change of x / (alpha tau)


class Pair(NamedTuple):
    """The two sequences, or their changes in a round."""

    x: Tensor
    w: Tensor


class Coupling(NamedTuple):
    """Constants of a round; [M, trials, 1], or the user's numbers."""

    a: Scalar
    b: Scalar
    gamma: Scalar


def accelerated(
    f: Objective,
    start: Pair,
    local: Local,
    alpha: Scalar,
    c: Coupling,
) -> tuple[Pair, Tensor]:
    """Local accelerated SGD from `start`, the paper's Algorithm 1 for one client.

    Each step is, in the symbols above,

        md = w / b + (1 - 1/b) x        g = grad f_i(md; batch)
        x+ = md - alpha g               w+ = (1 - 1/a) w + md / a - gamma g

    Returns the changes of both sequences [M, trials, d], and the mean loss of the mini-batches
    [M, trials]. As in `local.sgd` the changes are carried, not the points, and a client that has
    done all its steps stays where it is.
    """
    x = w = torch.zeros_like(solver.at_clients(start.x, local))
    apart = start.w - start.x
    total = x.new_zeros(())
    for j in range(local.steps):
        r = apart + (w - x)
        md = x + r / c.b  # as a change from the start, too
        loss, g = f.value_and_grad(start.x + md, local.batch(j))
        on = local.own_steps > j
        # w+ of the formula, with md - w = -(1 - 1/b) r: the change of w alone is needed.
        new = w - (1 - 1 / c.b) / c.a * r - c.gamma * g
        x = torch.where(on, md - alpha * g, x)
        w = torch.where(on, new, w)
        total = total + loss * on[..., 0]
    return Pair(x, w), total / local.own_steps[..., 0]


@hyper
class FedAC(Algorithm):
    """Federated accelerated SGD.

    >>> FedAC(alpha=0.1, mu=0.001, option="II").mu
    0.001
    """

    alpha: Step = param(default=0.01, doc="client step size α (the paper's η)")
    mu: Scalar = param(
        default=0.01, doc="strong convexity μ of f; if unknown, tune it between 1e-4 and 1"
    )
    option: str = param(default="I", doc="I or II: coupling of FedAc-I or FedAc-II")
    a: float | None = param(default=None, doc="the paper's α; none: from the option")
    b: float | None = param(default=None, doc="the paper's β; none: from the option")
    gamma: float | None = param(
        default=None, doc="step γ of the sequence w; none: max(α, √(α/(μK)))"
    )

    def __post_init__(self) -> None:
        positive(self, "alpha")
        positive(self, "mu", schedules=False)
        given = [name for name in ("a", "b", "gamma") if getattr(self, name) is not None]
        positive(self, *given, schedules=False)
        if self.option not in OPTIONS:
            raise unknown("option", self.option, OPTIONS)
        if self.option == "II" and self.a is not None and self.a <= 1 and self.b is None:
            raise InputError(f"option II needs a > 1, got a={self.a:g}; raise a or give b")

    def server_init(self, x: Tensor) -> State:
        return State(x, x.clone(), x.new_zeros(x.shape[0], 1).double())

    def broadcast(self, server: State) -> Pair:
        return Pair(server.x, server.w)

    def client(
        self,
        f: Objective,
        start: Pair,
        own: tuple[()],
        local: Local,
    ) -> Reply:
        """One round of both sequences; the constants may differ between clients by their K."""
        alpha = at(self.alpha, local.k)
        change, loss = accelerated(f, start, local, alpha, self.coupling(alpha, local.own_steps))
        return Reply(change, own, loss)

    def coupling(self, alpha: Scalar, K: Tensor) -> Coupling:
        """The constants for clients that take K steps [M, 1, 1], unless the user has set them.

        Fields that the user has given replace those of the option one by one: b follows from the
        a that is used.
        """
        fast = torch.sqrt(alpha / (self.mu * K))
        gamma = torch.where(fast > alpha, fast, alpha) if self.gamma is None else self.gamma
        rate = gamma * self.mu
        if self.a is not None:
            a: Scalar = self.a
        else:
            a = 1 / rate if self.option == "I" else 1.5 / rate - 0.5
        if self.b is not None:
            return Coupling(a, self.b, gamma)
        b = a + 1 if self.option == "I" else (2 * a**2 - 1) / (a - 1)
        return Coupling(a, b, gamma)

    def server(self, server: State, change: Pair, cohort: Cohort) -> State:
        """Both sequences are averaged; x is the model that is evaluated."""
        g = norm(change.x) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(server.x + change.x, server.w + change.w, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
