"""FedAdaGrad, FedAdam, FedYogi. Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
FedAvgM. Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335.

    x      global model x_t
    delta  mean of the clients' updates
    m      momentum of delta, first 0
    v      second moment, first eps^2
    alpha  client step, eta_l in the paper
    eta    server step
    beta1  weight of the past in m
    beta2  weight of the past in v
    eps    adaptivity, tau in the paper

Clients are FedAvg's; the server treats -delta as a gradient and takes a step of AdaGrad, Adam or
Yogi, without bias correction. A small eps makes coordinates explode that had almost no gradient so
far. A large one turns FedAdaGrad into FedAvg with the server step eta / (2 eps) and momentum
beta1.

The server's step of the adaptive three is

    m = beta1 m + (1 - beta1) delta
    v = v + delta^2                                       FedAdaGrad
    v = beta2 v + (1 - beta2) delta^2                     FedAdam
    v = v - (1 - beta2) delta^2 sign(v - delta^2)         FedYogi
    x = x + eta m / (sqrt(v) + eps)

and that of FedAvgM is m = beta1 m + delta, x = x + eta m. All products are entry by entry.
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
    """Server state of the adaptive three."""

    x: Tensor  # [trials, d]
    m: Tensor
    v: Tensor
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


class Momentum(NamedTuple):
    """Server state of FedAvgM."""

    x: Tensor  # [trials, d]
    m: Tensor
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


@hyper
class _Adaptive(Algorithm):
    """A server step of eta m / (sqrt(v) + eps); the three differ in v alone.

    Subclasses give `second`, and beta2 where they have one.
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α (the paper's η_l)")
    eta: Step = param(default=0.01, doc="server step size η")
    beta1: Scalar = param(default=0.9, doc="decay β₁ of the momentum")
    eps: Scalar = param(default=1e-3, doc="adaptivity ε (the paper's τ); v starts at its square")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        positive(self, "eps", schedules=False)
        share(self, "beta1")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v [trials, d] from the old one and `square` = delta^2."""
        raise NotImplementedError(f"{type(self).__name__} needs second")

    def server_init(self, x: Tensor) -> State:
        """m = 0 and v = eps^2, the least that the paper allows."""
        zero = torch.zeros_like(x)
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, zero, zero + self.eps**2, nothing)

    def client(
        self,
        f: Objective,
        x: Tensor,
        own: tuple[()],
        local: Local,
    ) -> Reply:
        """Local SGD as in FedAvg."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """One step of the adaptive method with delta as its negative gradient."""
        m = self.beta1 * server.m + (1 - self.beta1) * delta
        v = self.second(server.v, delta * delta)
        x = server.x + at(self.eta, cohort.k) * m / (v.sqrt() + self.eps)
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(x, m, v, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}


@hyper
class FedAdaGrad(_Adaptive):
    """AdaGrad at the server, with momentum.

    >>> FedAdaGrad(alpha=0.1).beta1
    0.9
    """

    eta: Step = param(default=0.1, doc="server step size η")
    beta1: Scalar = param(
        default=0.9,
        doc="momentum β₁: 0 in Reddi et al., 0.9 in the FedSSO paper",
    )

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """v only grows, so that the steps become smaller."""
        return v + square


@hyper
class FedAdam(_Adaptive):
    """Adam at the server, without bias correction.

    >>> FedAdam(beta1=0.5).beta2
    0.99
    """

    beta2: Scalar = param(default=0.99, doc="decay β₂ of the second moment")

    def __post_init__(self) -> None:
        super().__post_init__()
        share(self, "beta2")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """A moving mean of delta^2."""
        return self.beta2 * v + (1 - self.beta2) * square


@hyper
class FedYogi(_Adaptive):
    """Yogi at the server: Adam whose second moment changes by at most (1 - beta2) delta^2.

    >>> FedYogi(eps=0.01).eta
    0.01
    """

    beta2: Scalar = param(
        default=0.99, doc="decay β₂ of the second moment, which changes by at most 1 - β₂"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        share(self, "beta2")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """v moves towards delta^2 by (1 - beta2) delta^2, whatever its distance.

        So it falls more slowly than Adam's where delta becomes small.
        """
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@hyper
class FedAvgM(Algorithm):
    """Federated averaging with momentum at the server.

    >>> FedAvgM(alpha=0.1, beta1=0.5, eta=0.5).eta
    0.5
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(
        default=0.1,
        doc="server step size η; 1 - β₁ steps as far as FedAvg, 1 is that of Hsu et al.",
    )
    beta1: Scalar = param(default=0.9, doc="momentum β")

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        share(self, "beta1")

    def server_init(self, x: Tensor) -> Momentum:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return Momentum(x, torch.zeros_like(x), nothing)

    def client(
        self,
        f: Objective,
        x: Tensor,
        own: tuple[()],
        local: Local,
    ) -> Reply:
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: Momentum, delta: Tensor, cohort: Cohort) -> Momentum:
        """m = beta1 m + delta and x = x + eta m.

        A constant delta is multiplied by 1 / (1 - beta1) in the long run, hence the default of
        eta.
        """
        m = self.beta1 * server.m + delta
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        x = server.x + at(self.eta, cohort.k) * m
        return Momentum(x, m, g)

    def diagnostics(self, server: Momentum) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
