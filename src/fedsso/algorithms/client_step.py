"""The client step that FedSSO chooses by itself: alpha="auto".

The paper tunes alpha on a grid. With alpha="auto" the server chooses it in the first rounds, and
sends it to the clients together with the model. The symbols are those of `fedsso.py`.

Choosing. From the last step the server sees how fast the mean gradient changes: L = |y| / |s|.
Rounds 1 and 2 have no step to look back at when alpha is sent, and use alpha = 0.01. From round 2
on each round sets, for the next one,

    alpha = drift / (tau L), at most 0.1

with the least L so far. Then tau local steps change a client's gradient by about the part `drift`.
The bound 0.1 is there because single clients can be steeper than their mean.

Rounds 2 to 5 choose L. A network of which several, but not all, clients answer chooses for longer,
until every client has answered about five times: most pairs compare different clients and make L
too large. Then L stays as it is; only if no round has shown a pair until then, the first one to
come decides alone.

The drift. It is a choice between two errors. What the clients' own steps change makes g differ from
a gradient, and moves the point at which g vanishes: with a small drift FedSSO ends nearer to the
minimum. But a larger drift lets clients come forward by themselves, which counts where the server
hears only some of them, and trusts its own steps less. So there are six kinds:

    none      alpha = 0.01 in all rounds                one layer, one exact gradient from everybody
    small     drift = 0.02                              one layer, and all clients answer
    steady    drift = 0.1                               one layer, and some may be absent
    large     drift = 0.2                               one layer, and less than 15 % are asked
    gentle    drift = 0.05                              a network with a metric (`layers.py`)
    fading    drift = 0.2 + (0.7 - 0.2) exp(-k / 30)    a network without one, in round k

Where each client sends one gradient over all its rows and all of them answer, nothing drifts: g is
the same whatever alpha is. The guard then trusts it further (`trust_region.py`).

A network without a metric gains from more at the start: large local steps leave directions that are
too steep for them, and what the server then learns is a flatter region. Later on, near a minimum,
drift only does harm there as well. With a metric the server takes the flat directions itself, and
large local steps only do harm.

Undoing. A round explodes if its loss is no longer a number, or 1000 times the first loss. The
server then goes back to the model before its last step, forgets what the guard knew about step
lengths, and goes on as in round 1 with a thousandth of alpha: the next sound round counts as round
1, and the four after it choose alpha again. From then on the *largest* L of these rounds is used
instead of the least: where a loss has run away, its slope hardly changes, so a small L says
nothing. A run whose alpha cannot become smaller and which has no step to undo has diverged.

After an undone round, and as long as no round of the run has been sound, a loss 10 times the first
one counts as an explosion. Later the bound is 1000 again, also after an undone round: the model
that the server goes back to may have such a loss, which no smaller alpha would mend.

Only runs with the guard are undone: without it the server's steps do not depend on alpha, so a
smaller one would not mend them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from ..algorithm.contract import BLOW_UP, Algorithm, Attendance, Cohort
from ..support.trees import Scalar
from .trust_region import ALL

FIRST = 0.01  # alpha of the first round
LARGEST = 0.1  # the largest alpha
SMALL = 0.02  # alpha tau L, the change of a client's gradient on its way, if all clients answer
STEADY = 0.1  # the same if some may be absent
LARGE = 0.2  # the same if a smaller part than `FEW` of the clients is asked
FEW = 0.15
LATE = 0.2  # the same of a network without a metric in the end
EARLY = 0.7  # the same of a network without a metric at the start
GENTLE = 0.05  # the same of a network if B starts from a metric
FADING = 30  # rounds after which a third of what is early is left
CHOOSING = 5  # the last round in which alpha is chosen
SHRINK = 1e-3  # what an explosion leaves of alpha
WARY = 10.0  # how far the loss may rise while no round has been sound
LEAST = 1e-4  # the penalty l2 from which on no curvature is below the paper's bound lam


DRIFTS = ("auto", "none", "small", "steady", "large", "fading", "gentle")
NETWORKS = ("fading", "gentle")  # those of networks
LINEAR = ("small", "steady", "large")  # those of a model of one layer whose alpha is chosen


class Stepping(Algorithm):
    """The part of FedSSO's record that knows which drift suits the model."""

    drift: str
    guard: str
    shapes: str  # decided before the drift is

    def fit(
        self,
        sizes: Sequence[int],
        shapes: Sequence[Sequence[int]] = (),  # noqa: ARG002
    ) -> Self:
        """Decide drift="auto" for networks."""
        if len(sizes) == 1:
            return self
        return self._drifting("fading" if self.shapes == "none" else "gentle")

    def join(self, attendance: Attendance, d: int) -> Self:
        """Decide drift="auto" for models of one layer: by who answers, and with what."""
        own = super().join(attendance, d)
        convex = attendance.exact and attendance.l2 >= LEAST
        if convex and self.guard == "adaptive":
            return own._drifting("none")
        if not attendance.some_absent:
            return own._drifting("small")
        return own._drifting("large" if attendance.share < FEW else "steady")

    @property
    def is_network(self) -> bool:
        """Whether the drift is that of a network."""
        return self.drift in NETWORKS

    def bears(self, server: Any) -> Scalar:
        return bears(server.choice, server.g)

    def _drifting(self, kind: str) -> Self:
        """The record with this kind of drift, unless it has one."""
        if self.drift != "auto":
            return self
        return cast(Self, replace(cast(Any, self), drift=kind))


class Choice(NamedTuple):
    """What the server has chosen, and why; all [trials, 1]."""

    alpha: Tensor  # the client step of the next round
    L: Tensor  # the steepness it was chosen by; infinite before the first pair
    undone: Tensor  # rounds that do not count: those undone, and the sound ones before them


def start(x: Tensor) -> Choice:
    """The choice before the first round, for models x [trials, d]."""
    zero = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
    alpha = x.new_full(zero.shape, FIRST)
    return Choice(alpha, zero.new_full(zero.shape, torch.inf), zero)


def drift_in(rounds: Tensor, kind: str) -> float | Tensor:
    """How far tau local steps may change a client's gradient after so many rounds [trials, 1]."""
    if kind == "fading":
        return LATE + (EARLY - LATE) * torch.exp(-rounds / FADING)
    return {"steady": STEADY, "large": LARGE, "gentle": GENTLE}.get(kind, SMALL)


def last_choice(size: int, mass: float, kind: str) -> float:
    """The last round in which alpha is chosen, if `size` clients with `mass` of all weights answer.

    A network whose clients are partly absent takes until every client has answered about
    `CHOOSING` times, since y compares different clients in most rounds. Not so if a single client
    answers: its own slope is all that a round shows.
    """
    waits = kind in NETWORKS and size > 1 and mass < ALL
    return CHOOSING / mass if waits else CHOOSING


def choose(
    choice: Choice,
    products: Tensor,
    cohort: Cohort,
    kind: str = "small",
) -> Choice:
    """The client step of the next round.

    `products` [trials, 3, 3] holds the inner products of s, y and g, `kind` is that of the drift.
    """
    ss = products[..., 0, :1]
    yy = products[..., 1, 1:2]
    tau = cohort.steps
    rounds = cohort.k - choice.undone  # [trials, 1], this one included
    wary = choice.undone > 0
    last = last_choice(cohort.size, cohort.mass, kind)
    early = rounds <= torch.where(wary, CHOOSING, last)
    unseen = choice.L.eq(torch.inf)
    found = (yy / ss).sqrt()
    largest = torch.maximum(found, choice.L)
    least = torch.minimum(found, choice.L)
    wanted = torch.where(wary > unseen, largest, least)  # wary, and seen
    counts = (ss > 0) & (early | unseen)
    L = torch.where(counts, wanted, choice.L)
    drift = drift_in(rounds, kind)
    alpha = (drift / (tau * L)).clamp(max=LARGEST).to(choice.alpha.dtype)
    stays = L.eq(torch.inf)
    if kind != "fading":
        stays = stays | ((L == choice.L) > early)  # settled, and late
    # An undone round leaves no step: the first sound one after it counts as round 1.
    first = wary & unseen & (ss == 0)
    undone = choice.undone + first * (rounds - 1)
    return Choice(torch.where(stays, choice.alpha, alpha), L, undone)


def bears(choice: Choice, g: Tensor) -> Tensor:
    """How many times the first loss a round may show, [trials]; g [trials, d] is the last gradient.

    g = 0 means that no round of the run has been sound yet.
    """
    probing = (choice.undone[:, 0] > 0) & (g == 0).all(-1)
    return torch.where(probing, WARY, BLOW_UP)


def shrink(choice: Choice) -> tuple[Choice, Tensor]:
    """The choice after an explosion, and whether alpha could become smaller, [trials, 1]."""
    least = torch.finfo(choice.alpha.dtype).tiny
    alpha = SHRINK * choice.alpha
    shrunk = Choice(
        alpha=alpha.clamp(min=least),
        L=torch.full_like(choice.L, torch.inf),
        undone=choice.undone + 1,
    )
    return shrunk, alpha >= least
