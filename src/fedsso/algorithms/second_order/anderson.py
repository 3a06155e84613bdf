"""Anderson acceleration at the server. Walker & Ni, "Anderson Acceleration for Fixed-Point
Iterations", SIAM J. Numer. Anal. 49, 2011 (type II); for local updates of federated clients: Feng,
Laiu & Strohmer, "FedOSAA", CPAL 2025.

    x       global model x_k
    r       residual v_k - x_k of FedAvg's round map
    dX      the last m differences x_k - x_{k-1}
    dR      the last m differences r_k - r_{k-1}
    gamma   argmin |r - dR gamma|^2
    alpha   client step
    eta     mixing, Walker & Ni's beta
    m       window
    reg     Tikhonov strength, relative to each |dR_j|^2
    cosine  least cosine of step and r

Clients are FedAvg's, and so is the fixed point. The server looks for the combination of the last m
rounds whose residual is smallest. With m >= d a linear round map is solved in d + 1 rounds, up to
reg. But |r| may also shrink uphill or towards a saddle: a step that does not follow r is replaced
by FedAvg's. Under partial participation r_k - r_{k-1} compares different clients, and FedAvg is
faster.

The step is eta r - sum_j gamma_j (dX_j + eta dR_j): the combination of the last m points that has
the smallest residual, moved along that residual by eta. Without differences it is FedAvg's step
eta r. Messages are FedAvg's; the server keeps 2 m + 3 vectors.
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
    at_least,
    gram,
    hyper,
    norm,
    not_negative,
    param,
    positive,
    solve,
)
from ...algorithm import local as solver
from ...errors import InputError, number


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    s: Tensor  # last step
    r: Tensor  # residual of the last round
    dX: Tensor  # [trials, m, d], oldest first; 0 where there is none yet
    dR: Tensor  # [trials, m, d]
    grad_norm: Tensor  # [trials, 1] length of r / (alpha tau)


@hyper
class Anderson(Algorithm):
    """Anderson acceleration of FedAvg at the server.

    >>> Anderson(alpha=0.1).m
    5
    """

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(default=1.0, doc="mixing β of the residual; 1 is FedAvg's step")
    m: int = param(default=5, doc="window of differences")
    reg: Scalar = param(default=1e-10, doc="relative Tikhonov strength of the least squares")
    cosine: Scalar = param(
        default=0.1,
        doc="minimum cosine of step and residual, below which FedAvg's step is taken; -1: never",
    )

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta")
        at_least(self, "m", 1, most=1000)
        not_negative(self, "reg")
        object.__setattr__(self, "cosine", _cosine(self.cosine))

    def server_init(self, x: Tensor) -> State:
        """Empty windows: the first round is FedAvg's."""
        window = x.new_zeros(x.shape[0], self.m, x.shape[-1])
        zero = torch.zeros_like(x)
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, zero, zero, window, window, nothing)

    def client(
        self,
        f: Objective,
        x: Tensor,
        own: tuple[()],
        local: Local,
    ) -> Reply:
        """Local SGD as in FedAvg; the mean of the updates is the residual r."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, r: Tensor, cohort: Cohort) -> State:
        """The accelerated step, or FedAvg's where that does not follow r.

        The windows move on by the difference that this round has completed.
        """
        x = server.x
        s = server.s
        eta = at(self.eta, cohort.k)
        y = torch.where(norm(s) > 0, r - server.r, 0.0)  # no difference before the first step
        dX = torch.cat((server.dX[:, 1:], s[:, None]), 1)
        dR = torch.cat((server.dR[:, 1:], y[:, None]), 1)
        gamma = _gamma(gram(*dR.unbind(1), r), self.reg).to(x.dtype)[:, None]
        plain = eta * r
        step = plain - (gamma @ dX)[:, 0] - eta * (gamma @ dR)[:, 0]
        new = x + torch.where(_follows(step, r, self.cosine), step, plain)
        g = norm(r) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(new, new - x, r, dX, dR, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}


def _cosine(value: Scalar) -> float:
    """The least cosine as a float in [-1, 1)."""
    cosine = number("cosine", value)
    if not -1 <= cosine < 1:
        raise InputError(f"cosine must be in [-1, 1), got cosine={cosine:g}; -1 keeps every step")
    return cosine


def _follows(step: Tensor, r: Tensor, cosine: Scalar) -> Tensor:
    """Whether the angle between step and residual is small enough, [trials, 1].

    False for NaN, where no gamma was found.
    """
    products = gram(step, r)
    length = products.diagonal(dim1=-2, dim2=-1).sqrt().prod(-1, keepdim=True)
    return products[:, 0, 1:] >= cosine * length


def _gamma(products: Tensor, reg: Scalar) -> Tensor:
    """argmin |r - dR gamma|^2 + reg sum_j |dR_j|^2 gamma_j^2, as [trials, m].

    `products` [trials, m + 1, m + 1] holds the inner products of the columns of dR and of r. The
    columns are scaled to length 1: those of late rounds are small, but tell most.
    """
    dRdR = products[..., :-1, :-1]
    square = dRdR.diagonal(dim1=-2, dim2=-1)
    length = torch.where(square > 0, square, 1.0).sqrt()
    G = dRdR / (length[..., None] * length[..., None, :])
    # 1 on the diagonal of an absent column makes its gamma 0
    extra = torch.where(square > 0, reg * torch.ones_like(square), 1.0)
    G.diagonal(dim1=-2, dim2=-1).add_(extra)
    return solve(G, products[..., :-1, -1] / length) / length
