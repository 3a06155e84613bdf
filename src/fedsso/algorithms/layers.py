"""The metric that FedSSO's B starts from if the model is a network: shapes="auto".

BFGS learns the curvature of one direction in a round, and a network has far more directions than a
run has rounds. In the directions that no pair has shown, B is what it was at first: B_1 = I in the
paper. The gradients show more than that. A weight matrix turns inputs into outputs, and gradients
are small for inputs and outputs that hardly matter: dark pixels, rare words, idle units. So B
starts from K^-1 / gamma, where K is a metric made of the weights' gradients so far
(`maths/kronecker.py`), and B_1 is not the same for all of them. For the gradient G of one weight

    A  <-  (1 - q) A + q G G^T
    C  <-  (1 - q) C + q G^T G
    K G = c A^(-1/3) G C^(-1/3)

with q = 0.2 p if clients with a share p of all weights answer: A and C then tell of about five
answers of every client. FLOOR times the largest eigenvalue of all weights is added to all
eigenvalues: what has hardly any gradient would otherwise take the longest steps. c is such that
g^T K g = g^T g, so that a short step along K g lowers the loss as much as one along g.

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
from typing import Any, Self, cast

from torch import Tensor

from ..algorithm.contract import Algorithm, Cohort
from ..errors import InputError
from ..maths import kronecker
from ..maths.kronecker import Matrix, Metric
from ..support.trees import Tree
from .shapes import must_suit, read, told
from .trust_region import is_alone

SHARE = 0.2  # of the newest gradient in A and C, if all clients answer
FLOOR = 1e-4  # of the largest eigenvalue of all weights, added to all of them
PLAIN = ("auto", "none")  # values of the field that name no shapes; "auto" until `fit` decides it


class Layered(Algorithm):
    """The part of FedSSO's record that knows the shapes of the weights."""

    shapes: str
    guard: str
    form: str

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Rows and columns of each parameter, where B starts from a metric.

        A vector has one column, and what has no numbers is left out.
        """
        if self.shapes in PLAIN:
            return ()
        shapes = [shape for shape in read(self.shapes) if prod(shape)]
        return tuple((shape[0], prod(shape[1:])) for shape in shapes)

    def fit(self, sizes: Sequence[int], shapes: Sequence[Sequence[int]] = ()) -> Self:
        """Decide shapes="auto": the shapes of a network, where the guard can use them.

        Raises:
            InputError: The user's shapes have not as many numbers as the model.
        """
        suit(self.shapes, sizes)
        if self.shapes != "auto":
            return super().fit(sizes, shapes)
        is_network = len(sizes) > 1 and len(shapes) > 0
        used = is_network and self.guard == "adaptive" and self.form == "bfgs"
        own = replace(cast(Any, self), shapes=told(shapes) if used else "none")
        return cast(Self, super(Layered, own).fit(sizes, shapes))


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


def start(x: Tensor, matrices: Sequence[Matrix]) -> Tree:
    """What the metric is made from before the first round; () without one."""
    return kronecker.start(x, matrices) if matrices else ()


def learned(
    record: Layered,
    moments: Tree,
    g: Tensor,
    cohort: Cohort,
) -> tuple[Metric | None, Tree]:
    """The metric with this round's gradient g [trials, d], and what it is made from."""
    matrices = record.matrices
    if not matrices or is_alone(cohort):
        return None, moments
    moments = kronecker.follow(moments, g, matrices, SHARE * min(1.0, cohort.mass))
    return kronecker.metric(moments, matrices, g, FLOOR), moments
