"""The metric of the weights that FedSSO's B starts from: shapes="auto".

BFGS learns the curvature of one direction in a round, and a model has far more directions than a
run has rounds. In the directions that no pair has shown, B is what it was at first: B_1 = I in the
paper. The gradients show more than that. A weight matrix turns inputs into outputs, and gradients
are small for inputs and outputs that hardly matter: dark pixels, rare words, idle units. So B
starts from K^-1 / gamma, where K is a metric made of the weights' gradients so far
(`maths/kronecker.py`), and B_1 is not the same for all of them. For the gradient G of one weight

    K G = c A^(-1/3) G C^(-1/3)

A and C are means over the rounds, in which a round with a share p of all weights counts q = 0.2 p:
they then tell of about five answers of every client. What is added to all eigenvalues is a share
`floor` of the largest one: what has hardly any gradient would otherwise take the longest steps. c
is such that g^T K g = g^T g, so that a short step along K g lowers the loss as much as one along g.

A network. A and C are those of the mean gradient of each weight, with one floor for all weights:

    A  <-  (1 - q) A + q G G^T
    C  <-  (1 - q) C + q G^T G
    floor = 0.0001

A model of one layer, whose loss is convex. A mean gradient may be small because the feature does
not matter, or because the mean is near its minimum; the loss is then not flat. How much single
clients differ from their mean tells more: at its minimum a logistic loss has as its Hessian the
covariance of the rows' gradients. So A and C are those of the single clients' gradients G_i of this
round around their mean G, with weights w_i:

    A  <-  (1 - q) A + q (sum_S w_i G_i G_i^T - 0.9 G G^T)
    C  <-  (1 - q) C + q (sum_S w_i G_i^T G_i - 0.9 G^T G)
    floor = 0.01, or 1 / (2 N) if that is more
    N  <-  (1 - q) N + (the number of clients that answer) - 1

The mean counts a tenth, since a few clients alone show hardly any spread. N differences between
clients tell only N directions, so fewer are trusted less. The bias counts as one more column of
inputs, of usual size: its own spread is mostly that of the labels, which tells little about the
Hessian. So its A is that of the weight, and its C is one number, the mean of the eigenvalues of the
weight's C.

This needs single gradients. Where the server sees only their mean, where uploads are compressed,
and where gradients are exact (`trust_region.py`), a model of one layer has no metric, whoever gave
its shapes.

Everything else stays as it is, in other coordinates. Where the guard (`trust_region.py`) speaks of
lengths and angles, they are those of K^(-1/2) s, K^(1/2) y and K^(1/2) g, in which K is the
identity; the radius, the cosine of s and y, the curvature test of the paper and the choice of the
better pair (`memory.py`) follow from that. Inner products of a step with a gradient are the same in
all coordinates. The clients' step is chosen as before, since they step along plain gradients.

Where a single one of several clients answers there is no metric in this round: its small gradients
are its own, and the model would be carried away along them.

Lengths of different rounds are measured in metrics that differ a little. The radius is carried over
as it is, and B s = -t g_{k-1} (`trust_region.py`) holds for the B of the round before.

The clients do not know of it. The server keeps A and C of every weight in float64 (of a side with
more than 1024 rows only the diagonal), and takes their eigenvectors in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from ..algorithm.contract import Algorithm, Attendance, Cohort, Phase, weighted_mean
from ..algorithm.schedule import at
from ..errors import InputError
from ..maths import kronecker
from ..maths.kronecker import Matrix, Metric, Moments
from ..support.trees import Tree
from .shapes import must_suit, read, told
from .trust_region import is_alone

SHARE = 0.2  # of the newest gradient in A and C, if all clients answer
FLOOR = 1e-4  # of the largest eigenvalue of all weights, added to all of them; of a network
LEAST = 0.01  # the same of a model of one layer, if many clients have answered
FEW = 0.5  # the same times N, if few have
COMMON = 0.9  # what is taken from the clients' squares of the square of their mean
PLAIN = ("auto", "none")  # values of the field that name no shapes; "auto" until `fit` decides it


class Spread(NamedTuple):
    """What the metric of a model of one layer is made from."""

    moments: Moments  # A and C of the weight
    seen: Tensor  # N, [trials, 1]


class WithSquares(NamedTuple):
    """What is averaged where the metric needs single gradients."""

    received: Tree  # what would be averaged without it
    own: Any  # the weight's part of u_i, [M, trials, rows, cols]; then the means of its squares


class Layered(Algorithm):
    """The part of FedSSO's record that knows the shapes of the weights."""

    shapes: str
    guard: str
    form: str
    drift: str  # decided before `join` asks for it

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Rows and columns of each parameter, where B starts from a metric.

        A vector has one column, and what has no numbers is left out.
        """
        if self.shapes in PLAIN:
            return ()
        shapes = [shape for shape in read(self.shapes) if prod(shape)]
        return tuple((shape[0], prod(shape[1:])) for shape in shapes)

    @property
    def by_client(self) -> bool:
        """Whether the metric is learned from single clients: that of a model of one layer.

        Shapes alone do not tell it: a layer with a normalisation behind it is a network.
        """
        return not cast(Any, self).is_network and is_one_layer(self.matrices)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The one exchange, in which squares of single gradients are averaged if they are asked."""
        (only,) = super().phases
        return (only._replace(average=averaged),) if self.by_client else (only,)

    def receive(self, server: Any, upload: Tensor, memory: Any, k: int) -> tuple[Tree, Tree]:
        received, remembered = super().receive(server, upload, memory, k)
        if not self.by_client:
            return received, remembered
        alpha = at(cast(Any, self).alpha, k, server.choice.alpha)
        return WithSquares(received, _weight(upload / -alpha, self.matrices)), remembered

    def fit(self, sizes: Sequence[int], shapes: Sequence[Sequence[int]] = ()) -> Self:
        """Decide shapes="auto": those of the model, where the guard can use them.

        Raises:
            InputError: The user's shapes have not as many numbers as the model.
        """
        suit(self.shapes, sizes)
        if self.shapes != "auto":
            return super().fit(sizes, shapes)
        usable = len(shapes) > 0 and self.guard == "adaptive" and self.form == "bfgs"
        own = replace(cast(Any, self), shapes=told(shapes) if usable else "none")
        if len(sizes) == 1 and not is_one_layer(own.matrices):
            own = replace(own, shapes="none")
        return cast(Self, super(Layered, own).fit(sizes, shapes))

    def join(self, attendance: Attendance, d: int) -> Self:
        """Do without the metric of a model of one layer where it would not suit."""
        own = super().join(attendance, d)
        unsuited = attendance.compressed or attendance.only_means or own.drift == "none"
        if own.by_client and unsuited:
            return cast(Self, replace(cast(Any, own), shapes="none"))
        return own


def is_one_layer(matrices: Sequence[Matrix]) -> bool:
    """Whether they are a matrix and, at most, biases: vectors with a number for each row."""
    if not matrices or matrices[0][1] == 1:
        return False
    return all(shape == (matrices[0][0], 1) for shape in matrices[1:])


def suit(text: str, sizes: Sequence[int]) -> None:
    """Refuse given shapes with another number of parameters than the model's layers together."""
    if text not in PLAIN:
        must_suit(text, sizes)


def check(record: Layered) -> None:
    """Refuse shapes that cannot be read, or that the guard or the form cannot use."""
    if record.shapes in PLAIN:
        return
    read(record.shapes)
    if record.guard != "adaptive" or record.form != "bfgs":
        raise InputError(
            f"shapes={record.shapes!r} needs guard='adaptive' and form='bfgs', got "
            f"guard={record.guard!r}, form={record.form!r}; leave shapes out"
        )


def start(x: Tensor, matrices: Sequence[Matrix], *, by_client: bool = False) -> Tree:
    """What the metric is made from before the first round; () without one.

    `by_client` tells whether it is learned from single clients.
    """
    if not matrices:
        return ()
    if not by_client:
        return kronecker.start(x, matrices)
    seen = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
    return Spread(kronecker.start(x, matrices[:1]), seen)


def averaged(weights: Tensor, uploads: WithSquares) -> WithSquares:
    """The means over some clients with these weights [M]: of what is received, and of squares."""
    squares = kronecker.mean_squares(weights, uploads.own)
    return WithSquares(weighted_mean(weights, uploads.received), squares)


def parted(mean: Any) -> tuple[Any, Moments | None]:
    """What the server would be given without a metric, and the clients' squares if it has them."""
    return (mean.received, mean.own) if isinstance(mean, WithSquares) else (mean, None)


def learned(
    record: Layered,
    moments: Tree,
    g: Tensor,
    cohort: Cohort,
    singles: tuple[Tensor, Moments] | None = None,
) -> tuple[Metric | None, Tree]:
    """The metric with this round's gradients, and what it is made from.

    Args:
        record: Knows the shapes of the weights.
        moments: From `start`, or of the round before.
        g: The gradient that the server has from this round, [trials, d].
        cohort: Who answered.
        singles: Of the cohort, where its single gradients are known: the mean of its u_i
            [trials, d], and those of their squares.
    """
    matrices = record.matrices
    if not matrices or is_alone(cohort):
        return None, moments
    share = SHARE * min(1.0, cohort.mass)
    if not record.by_client:
        moments = kronecker.follow(moments, g, matrices, share)
        return kronecker.metric(moments, matrices, g, FLOOR), moments
    if singles is None or cohort.size == 1:
        return None, moments
    u, squares = singles
    common = kronecker.squares(_weight(u, matrices).flatten(-2), matrices[:1])
    around = []
    for a, b in zip(squares, common, strict=True):
        around.append((a - COMMON * b) / cohort.steps**2)  # u_i = tau G_i
    spread = Spread(
        moments=kronecker.blend(moments.moments, tuple(around), share),
        seen=(1 - share) * moments.seen + (cohort.size - 1),
    )
    floor = (FEW / spread.seen).clamp(min=LEAST)
    return kronecker.metric(spread.moments, matrices, g, floor), spread


def _weight(v: Tensor, matrices: Sequence[Matrix]) -> Tensor:
    """The first matrix [..., rows, cols] of vectors [..., d]."""
    rows, cols = matrices[0]
    return v[..., : rows * cols].reshape(*v.shape[:-1], rows, cols)
