"""Hessians that are learnt from compressed differences: what FedNL and Basis Learn share.

    X    a client's Hessian
    H    what the client has learnt of it so far, as the server knows it
    S    C(X - H), compressed: it is sent, and both sides add it to H
    a    learning rate
    mu   lower bound of f's curvature
    V    orthonormal columns that span the rows of a client, d x r
    c    V^T times the gradient without the penalty

The second part is about bases of the clients' own. V^T X V holds all of a linear model's Hessian
without the penalty. Clients have bases of different width r. States are padded with zeros to d x d;
what is sent is not, so that these clients are computed one at a time.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..algorithm.checks import not_negative, positive
from ..algorithm.contract import Algorithm, Attendance, Local, Objective, Phase
from ..algorithm.local import at_clients, gradient, hessian
from ..algorithm.records import filled
from ..errors import InputError, one_of
from ..maths import symmetric
from ..maths.symmetric import Compressor, Eigen, Packed, Sent
from ..support.linalg import norm
from ..support.rng import key
from ..support.trees import Scalar, Tree

SQUARES = 6  # X, H, their difference, what is sent of it, and room for the work
LEAST = 0.1  # mu of a record that no engine has filled in
KINDS = ("none", "rank", "topk")  # compressors that are contractive


# ---- learning ----


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


def worth(lack: Tensor, change: Tensor, zeta: float, k: int) -> Tensor:
    """Who sends its difference, [M, trials, 1, 1] of 0 and 1; in the first round everybody does.

    A client does if its estimate lacks more than a share of what its Hessian has changed by since
    the last time: |lack|^2 > zeta |change|^2.
    """
    sends = lack.square().sum((-2, -1)) > zeta * change.square().sum((-2, -1))
    return (sends | (k == 1)).to(lack.dtype)[..., None, None]


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
    least = torch.as_tensor(LEAST if mu is None else mu, dtype=values.dtype, device=values.device)
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


# ---- a basis of the client's own ----


class View(NamedTuple):
    """What a client sees at a point, in its basis; without one, V is () and r is d."""

    loss: Tensor  # [1, trials]
    c: Tensor  # [1, trials, r]
    X: Tensor  # [1, trials, r, r]
    V: Any  # [1, trials, d, r]


def view(f: Objective, x: Tensor, local: Local, l2: float, V: Any) -> View:
    """Loss, gradient and Hessian of a client at x, without the penalty l2/2 |x|^2.

    V is the basis as far as it is known: that of the client's state, `None` to find it, or () for
    the standard basis.
    """
    loss, g = gradient(f, x, local)
    X = symmetric.shift(hessian(f, x, local), -l2)
    c = g - l2 * x
    if V is None:
        V = basis(f, x, local)
    elif isinstance(V, Tensor):
        V = V[..., : width(V)]
    if not isinstance(V, Tensor):
        return View(loss, c, X, ())
    return View(loss, times(V.mT, c), V.mT @ X @ V, V)


def basis(f: Objective, x: Tensor, local: Local) -> Tensor:
    """V_i of a single client, [1, trials, d, r]: the right singular vectors of its rows.

    Rows are taken in piece by piece into a triangular factor, which has the same ones.
    """
    x = at_clients(x, local)
    d = x.shape[-1]
    factor = x.new_zeros(1, 0, d, dtype=torch.float64)
    count = 0
    for piece in local.full():
        a, _ = f.rows(x, piece)
        inside = (piece.weight > 0).unsqueeze(-1)
        factor = torch.cat([factor, torch.where(inside, a, 0.0).double()], 1)
        count += a.shape[1]
        if factor.shape[1] > d:
            factor = torch.linalg.qr(factor, mode="r").R
    _, values, rows = torch.linalg.svd(factor, full_matrices=False)
    r = rows.shape[1]
    if not x.is_meta:  # shapes alone have no rank
        least = max(count, d) * torch.finfo(x.dtype).eps * values.amax()
        r = max(1, int((values > least).sum()))
    V: Tensor = rows[:, :r].mT.to(x.dtype)
    largest = V.gather(-2, V.abs().argmax(-2, keepdim=True))
    V = V * largest.sign()  # else rounding would choose the signs
    return V.unsqueeze(1).expand(-1, x.shape[1], -1, -1)


def width(V: Tensor) -> int:
    """r, the columns of a padded V [1, trials, d, d] that are not 0."""
    if V.is_meta:
        return V.shape[-1]
    return int(V[0].flatten(0, 1).ne(0).any(0).sum())


def square(X: Tensor, d: int) -> Tensor:
    """A matrix [..., r, r] with zeros around it, [..., d, d]."""
    more = d - X.shape[-1]
    return pad(X, (0, more, 0, more))


def within(X: Tensor, like: Tensor) -> Tensor:
    """The part [..., r, r] of a padded matrix."""
    r = like.shape[-1]
    return X[..., :r, :r]


def wide(V: Tensor) -> Tensor:
    """V [..., d, r] with columns of zeros, [..., d, d]."""
    return pad(V, (0, V.shape[-2] - V.shape[-1]))


def whole(S: Sent, d: int) -> Tensor:
    """What was sent of an r x r matrix, with zeros around it, [..., d, d].

    The place of an entry in the packed triangle does not depend on r.
    """
    if isinstance(S, Packed):
        return symmetric.unpack(pad(S.triangle, (0, symmetric.entries(d) - S[0].shape[-1])), d)
    if isinstance(S, Eigen):
        return square(S.dense(d), d)
    return S.dense(d)


def times(X: Tensor, v: Tensor) -> Tensor:
    """X v for X [..., d, d] and v [..., d]."""
    return (X @ v.unsqueeze(-1)).squeeze(-1)


def back(V: Any, c: Tensor) -> Tensor:
    """V c, for c [..., r]; the standard basis leaves it alone."""
    return times(V, c) if isinstance(V, Tensor) else c


def padded(V: Any) -> Any:
    """The basis as it is kept."""
    return wide(V) if isinstance(V, Tensor) else V


# ---- what the three methods share ----


class Base(Algorithm):
    """What the three methods share: the basis, and what is known of the problem."""

    alone: ClassVar[bool] = True

    compressor: str
    basis: str
    a: Scalar
    lam: float

    def __post_init__(self) -> None:
        symmetric.parse(self.compressor)
        if self.compressor.partition(":")[0] not in KINDS:
            raise InputError(
                f"compressor must be none, rank:R or topk:K, got compressor={self.compressor!r}"
            )
        one_of("basis", self.basis, ("data", "standard"))
        positive(self, "a", schedules=False)
        not_negative(self, "lam")

    def asks(self) -> str:
        return "rows" if self.basis == "data" else "hvp"

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record with the penalty filled in."""
        return filled(self, lam=self.lam or attendance.l2)

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.broadcast, self.client, self.server, receive=self.receive),)

    def room(self, x: Tensor) -> Tree:
        """A place for V_i, which is not known yet; nothing with the standard basis."""
        return zeros(x) if self.basis == "data" else ()

    def known(self, V: Any, first: bool) -> Any:
        """The basis for `view`: None where it is still to be found."""
        return None if first and self.basis == "data" else V

    def rule(self, first: bool, r: int) -> Rule:
        """How L_i is learnt: the first is sent whole."""
        return rule("none", 1.0, r) if first else rule(self.compressor, self.a, r)


def check_share(record: Any) -> None:
    """Raise InputError unless p is a share."""
    positive(record, "p", schedules=False)
    if record.p > 1:
        raise InputError(f"p must lie in (0, 1], got p={record.p:g}; leave it out for 1")


class Upload(NamedTuple):
    """To the server."""

    c: Any  # [M, trials, r], or nothing; received, the gradient [M, trials, d]
    S: Any  # as sent; received, the change of V_i L_i V_i^T
    V: Any  # [M, trials, d, r] in round 1; received, nothing


def received(upload: Upload, V: Any, d: int) -> tuple[Upload, Any]:
    """Gradient and S_i in the standard basis, and the padded V_i that the server remembers."""
    S = whole(upload.S, d)
    c = upload.c
    if isinstance(V, Tensor):
        S = V @ S @ V.mT
        c = times(V, pad(c, (0, d - c.shape[-1]))) if isinstance(c, Tensor) else c
    return Upload(c, S, ()), V


def spread(sent: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """A vector with the values at the places that were sent, and zeros elsewhere."""
    values, places = sent
    index = places.long().expand(*like.shape[:-1], -1)
    return torch.zeros_like(like).scatter(-1, index, values.expand(index.shape))


def product(V: Any, L: Tensor, w: Tensor) -> Tensor:
    """V L V^T w, or L w with the standard basis."""
    return times(V, times(L, times(V.mT, w))) if isinstance(V, Tensor) else times(L, w)


def coefficients(X: Tensor) -> Tensor:
    """Coefficients of a symmetric X in the basis (e_j + e_l)(e_j + e_l)^T, j < l, and e_j e_j^T.

    Off the diagonal they are the entries, on it X_jj minus the other entries of row j.
    """
    diagonal = 2 * X.diagonal(dim1=-2, dim2=-1) - X.sum(-1)
    return X.diagonal_scatter(diagonal, dim1=-2, dim2=-1)


def combined(L: Tensor) -> Tensor:
    """The matrix of coefficients L: the inverse of `coefficients`."""
    return L.diagonal_scatter(L.sum(-1), dim1=-2, dim2=-1)
