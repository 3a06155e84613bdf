"""Hessians that are learnt from compressed differences: what FedNL and Basis Learn share.

X    a client's Hessian
H    what the client has learnt of it so far, as the server knows it
S    C(X - H), compressed: it is sent, and both sides add it to H
a    learning rate
mu   lower bound of f's curvature
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithm import Local, Scalar, norm
from ..errors import InputError
from ..maths import symmetric
from ..maths.symmetric import Compressor, Sent
from ..support.rng import key

SQUARES = 6  # X, H, their difference, what is sent of it, and room for the work


class Rule(NamedTuple):
    """How Hessians are learnt."""

    compressor: Compressor  # how differences are sent
    a: Scalar  # the learning rate: a number, or [trials, 1, 1]


def rule(compressor: str, a: Scalar, d: int) -> Rule:
    """The rule of a compressor's text and a learning rate, for d parameters.

    An unbiased compressor of variance omega (randk) learns at the rate a / (omega + 1), which
    keeps H from growing with its noise. All others learn at a.
    """
    made = symmetric.parse(compressor)
    a = a.unsqueeze(-1) if isinstance(a, Tensor) else a
    return Rule(made, made.rate(d) * a)


def learn(
    X: Tensor,
    H: Tensor,
    local: Local,
    rule: Rule,
) -> tuple[Sent, Tensor]:
    """S as sent, and the new estimate H + a S.

    Args:
        X: What the estimate lacks, Hessian - H, [M, trials, d, d].
        H: The estimate, of the same shape.
        local: Gives the draws of a compressor that chooses at random, the same for all trials.
        rule: Compressor and learning rate.

    The client decodes what it sends: so its H and the server's mean of them stay in step.
    """
    d = X.shape[-1]
    u = local.uniform("hessian", rule.compressor.draws(d))
    sent = rule.compressor.encode(X, u)
    rate = torch.as_tensor(rule.a, dtype=H.dtype, device=H.device)
    return sent, torch.addcmul(H, rate, sent.dense(d))


def zeros(x: Tensor) -> Tensor:
    """A matrix of zeros for each trial, [trials, d, d]."""
    return x.new_zeros(*x.shape, x.shape[-1])


def size(X: Tensor) -> Tensor:
    """The Frobenius norm of matrices [..., d, d], [..., 1] in their type."""
    return norm(X.flatten(-2)).to(X.dtype)


def raised(H: Tensor, mu: Scalar | None) -> tuple[Tensor, Tensor]:
    """Eigenvalues of H, raised to mu, and its eigenvectors, in float64.

    With mu > 0 the matrix [H]_mu that they make is positive definite, so that a step with its
    inverse descends whatever H has learnt.
    """
    values, vectors = symmetric.eigh(H)
    if mu is None:
        raise InputError("mu is not known; give it, or let the engine call `join`")
    least = torch.as_tensor(mu, dtype=values.dtype, device=values.device)
    return torch.maximum(values, least), vectors


def clipped(H: Tensor, g: Tensor, mu: Scalar | None) -> Tensor:
    """[H]_mu^-1 g, [trials, d]."""
    values, vectors = raised(H, mu)
    turned = vectors.mT @ g.double().unsqueeze(-1) / values.unsqueeze(-1)
    return (vectors @ turned).squeeze(-1).to(g.dtype)


def least_curvature(mu: Scalar | None, l2: float, otherwise: float) -> Scalar:
    """The lower bound mu as given, else the strength of the penalty; without one, `otherwise`."""
    return mu if mu is not None else l2 or otherwise


def tossed(purpose: str, k: int, p: float) -> bool:
    """Whether a coin that shows heads with probability p does so in round k.

    Server and clients toss the same coin: it depends on the purpose and the round alone, so that
    nobody has to be told. In the first round it always shows heads.
    """
    return k == 1 or key(0, "coin", purpose, k) < p * 2**63
