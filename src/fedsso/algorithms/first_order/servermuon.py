"""ServerMuon. The Muon of Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
2024, as the server's optimiser in the scheme of Reddi et al., ICLR 2021.

    x       global model
    delta   mean of the clients' updates; -delta is Muon's gradient
    m       momentum of delta, first 0
    M, D    the parts of m and delta that belong to one weight matrix
    U V^T   D + beta M with its singular values replaced by 1
    alpha   client step
    eta     server step of matrices: about the singular values of a round's change (if rows <= cols)
    eta_v   server step of vectors
    beta    weight of the past in m

Clients are FedAvg's. The server keeps the momentum m = beta m + delta, and steps by layers:

    matrix [rows, cols]     x = x + eta sqrt(max(1, rows / cols)) U V^T
    vector (biases, norms)  x = x + eta_v m, as in FedAvgM

All directions of a matrix move alike, also those in which the updates are small. A kernel of a
convolution counts as the matrix [outputs, rest]. U V^T is not computed exactly. Five steps of
Newton and Schulz's iteration bring the singular values near 1:

    X = a X + b (X X^T) X + c (X X^T)^2 X        from X = (D + beta M) / |D + beta M|

With Muon's a, b and c, singular values of the first X above 0.002 end between 0.68 and 1.21, and
smaller ones grow at most 485 times. The length of a step does not depend on delta, so x does not
settle unless eta decays.

Muon itself is for hidden layers: its authors leave input embeddings, the output layer and vectors
to AdamW. Here every matrix takes its step, since the small models of federated learning have few
others; `shapes` can name a layer as a vector instead. beta = 0.95 and eta = 0.02 are Muon's. eta_v
is 1 - beta, which moves vectors as far as FedAvg does. Muon's code iterates in bfloat16 and has
the weights 1 - beta and beta where we have 1 and beta; this changes the length of D + beta M
alone, which does not count.

FedMuon (arXiv 2510.27403) is another method: there the clients step by Muon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import ClassVar, NamedTuple, Self

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
from ..shapes import must_suit, read, told

OWN = "model"
A, B, C = 3.4445, -4.7750, 2.0315  # Muon's a, b and c
STEPS = 5


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    m: Tensor  # [trials, d]
    grad_norm: Tensor  # [trials, 1] length of delta / (alpha tau)


def orthogonal(flat: Tensor, rows: int, cols: int) -> Tensor:
    """About sqrt(max(1, rows / cols)) U V^T of matrices U S V^T.

    Args:
        flat: A matrix for each trial, [trials, rows * cols].
        rows: Of each matrix.
        cols: Of each matrix.

    Returns:
        A matrix of the same form. That of a matrix of zeros is zero.

    Newton and Schulz's iteration needs products alone, so that all trials run at once.
    """
    least = torch.finfo(flat.dtype).tiny
    length = norm(flat).to(flat.dtype).clamp(min=least)
    X = (flat / length).view(-1, rows, cols)
    if rows > cols:
        X = X.mT  # the products X X^T of a wide matrix are smaller
    for _ in range(STEPS):
        gram = X @ X.mT
        X = A * X + (B * gram + C * gram @ gram) @ X
    if rows > cols:
        X = X.mT
    return sqrt(max(1, rows / cols)) * X.reshape(flat.shape)


@hyper
class ServerMuon(Algorithm):
    """Muon at the server: momentum with orthogonalised weight matrices.

    >>> ServerMuon().fit([650], [(10, 64), (10,)]).shapes
    '10x64 10'
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α")
    eta: Step = param(default=0.02, doc="server step size η of weight matrices")
    eta_v: Step = param(
        default=0.05,
        doc="server step size of vectors (biases, norms); 1 - β steps as far as FedAvg",
    )
    beta: Scalar = param(default=0.95, doc="momentum β")
    shapes: str = param(
        default=OWN, doc="shapes of the parameters, such as 10x64 10; model: taken from the model"
    )

    def __post_init__(self) -> None:
        positive(self, "alpha", "eta", "eta_v")
        share(self, "beta")
        if self.shapes != OWN:
            read(self.shapes)

    def fit(self, sizes: Sequence[int], shapes: Sequence[Sequence[int]] = ()) -> Self:
        """The record with `shapes` filled in, unless the user has given them.

        Raises:
            InputError: The user's shapes have not as many numbers as the model.
        """
        if self.shapes == OWN:
            return replace(self, shapes=told(shapes))
        must_suit(self.shapes, sizes)
        return self

    def server_init(self, x: Tensor) -> State:
        nothing = x.new_zeros(x.shape[0], 1).double()
        return State(x, torch.zeros_like(x), nothing)

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        """Local SGD as in FedAvg."""
        delta, loss = solver.sgd(f, x, local, at(self.alpha, local.k))
        return Reply(delta, own, loss)

    def server(self, server: State, delta: Tensor, cohort: Cohort) -> State:
        """m = beta m + delta; matrices step along U V^T of delta + beta m, vectors along m."""
        m = self.beta * server.m + delta
        ahead = delta + self.beta * m
        layers = read(self.shapes)
        sizes = [prod(shape) for shape in layers]
        eta = at(self.eta, cohort.k)
        eta_v = at(self.eta_v, cohort.k)
        steps = []
        pasts = m.split_with_sizes(sizes, -1)
        nexts = ahead.split_with_sizes(sizes, -1)
        for shape, past, new in zip(layers, pasts, nexts, strict=True):
            is_vector = len(shape) == 1
            steps.append(eta_v * past if is_vector else eta * orthogonal(new, *shape))
        g = norm(delta) / (at(self.alpha, cohort.k) * cohort.steps)
        return State(server.x + torch.cat(steps, -1), m, g)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}
