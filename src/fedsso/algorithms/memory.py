"""The server's memory of every client's last gradient: FedSSO with memory="clients".

Where only some clients answer, their mean gradient is not the federation's, and y = g_k - g_{k-1}
compares different clients. A server that sees single replies can remember what each client sent
last, and make up for those who are absent. Clients and bytes stay as they are. The symbols are
those of `fedsso.py`, and further:

    S, p_i, w_i   who answers; the clients' weights; p_i over the sum of p_j of S
    u_i           (x - v_i) / alpha, the sum of the local gradients of client i in this round
    o_i, x_i      u_i of its last answer, and the model that it had then
    o             the mean of all o_i that are known, with weights p_i
    tau           the mean of the local steps of S in this round, with weights w_i
    m             the share of all weights that S has, sum of the p_i of S

The corrected gradient. A client of S was above the mean by o_i - o when it last answered. As far
as that lasts, it tells how much this cohort differs from the federation:

    tau g = sum_S w_i u_i - beta sum_S w_i (o_i - o)

beta = 0 would be no memory, beta = 1 is the correction of FedVARP and SAGA. How much lasts is
learned from the clients' own answers. It is the slope of the deviations in this round over those
of the clients' last answers:

    beta = A / C, within 0 <= beta <= 1
    A    = 0.8 A + sum_S w_i (u_i - o)^T (o_i - o)
    C    = 0.8 C + sum_S w_i |o_i - o|^2

A client that has never answered counts with o_i = o, so that it adds nothing to these sums. One
that has not answered for long is forgotten (`Algorithm.forget`), and is then treated in the same
way.

The better pair. The server has two pairs (s, y) to learn from: that of its own last step, with
corrected gradients, and that of the clients who answer again. Each of them knows its gradient at
two models, x_i and x, and no other client is involved:

    s = (1 - m) s + m sum_S w_i (x - x_i),    y = (1 - m) y + m sum_S w_i (u_i - o_i) / tau

The sums run on over some 1 / m rounds, in which about every client answers once: the curvature of
a single client is not that of the mean. This pair is used where cos(s, y) is at least 0.5 and
larger than in the other pair, whose y is the one that the guard has damped: noise and differences
between clients make the cosine small. Otherwise the pair of the server's step is used, but not
where a client of S answered for the first time: y would then mostly tell how this client differs.

The step of a single client. Where one client alone answers, its gradient is hardly the
federation's, whatever is subtracted. The memory knows all others, at the models x_i that they had.
B tells what their gradients have become since then: at x, that of client i is o_i / tau + B (x -
x_i), as far as B is right. So the mean of the memory gives a step of its own, without any product
with B: with the mean x_o of the models x_i, weighted as o is,

    B^-1 (o / tau + B (x - x_o)) = B^-1 o / tau + (x - x_o)

The server's direction is then a mean of both:

    (1 - h) B^-1 g + h (B^-1 o / tau + (x - x_o)),    h = 1/2 (known share) min(1, (5 m_o)^2)

m_o is the mean of m over the rounds so far, so that a client waits for about 1 / m_o rounds. What B
tells of a gradient is wrong by about the square of the way since then. So the memory counts half
where five clients or fewer take turns, and less with the square of the time that they wait.

Only a server with the adaptive guard that chooses alpha takes such steps. B s = -t g_{k-1}
(`trust_region.py`) is then only roughly so.

Where all clients answer, none of this changes anything: the correction is 0, and the server's own
pair is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from ..algorithm.contract import Algorithm, Attendance, Cohort
from ..algorithm.schedule import at
from ..support.linalg import dot, gram
from ..support.trees import Scalar, Tree
from .trust_region import ALL, CLEAR, TINY, is_alone

log = logging.getLogger("fedsso")
KINDS = ("auto", "clients", "none")
HALF = 0.5  # the most that the memory's own step counts
WAIT = 5  # rounds that a client may wait until the memory's own step counts less
LASTS = 0.8  # what a round leaves of the sums that beta is learned from
ROUNDING = 1e-5  # what rounding may take from a sum of weights
BYTES = 2_000_000_000  # the largest memory that memory="auto" takes, for one trial


class Kept(NamedTuple):
    """What the server remembers of one client; [..., trials, d] and [..., trials, 1]."""

    u: Tensor  # o_i
    x: Tensor  # x_i
    known: Tensor  # 1 if it has answered, else 0


class Memory(NamedTuple):
    """What the server knows about all clients together; [trials, d] and [trials, 1]."""

    total: Tensor  # sum of p_i o_i over the clients that are known
    mass: Tensor  # sum of their p_i
    s: Tensor  # the pair of the clients that answer again; y is not yet divided by tau
    y: Tensor
    along: Tensor  # A
    square: Tensor  # C
    beta: Tensor
    models: Tensor  # sum of p_i x_i over the known clients; of no numbers where it is not used
    rounds: Tensor  # that were answered
    share: Tensor  # m_o


class Heard(NamedTuple):
    """What is averaged over the clients of S instead of their updates."""

    delta: Tensor  # v_i - x
    deviation: Tensor  # o_i - o; 0 for a client that is not known
    known: Tensor
    s: Tensor  # x - x_i, and 0 likewise
    y: Tensor  # u_i - o_i, and 0 likewise
    along: Tensor  # (u_i - o)^T (o_i - o)
    square: Tensor  # |o_i - o|^2


def fits(clients: int, d: int, itemsize: int = 4) -> bool:
    """Whether so many clients' gradients and models, of d numbers each, fit into the budget.

    `join` does not know the run's precision and counts 4 bytes for a number. In float64 the memory
    may therefore take twice the budget.
    """
    return 2 * clients * d * itemsize <= BYTES


def start(x: Tensor, *, used: bool, steps: bool = False) -> Memory:
    """The memory before the first round from the models x [trials, d].

    One that is not used takes no space. `steps` tells whether it gives steps of its own.
    """
    trials, d = x.shape
    vector = x.new_zeros(trials, d if used else 0)
    number = x.new_zeros(trials, 1 if used else 0, dtype=torch.float64)
    models = x.new_zeros(trials, d if used and steps else 0)
    return Memory(
        total=vector,
        mass=number,
        s=vector,
        y=vector,
        along=number,
        square=number,
        beta=number,
        models=models,
        rounds=number,
        share=number,
    )


def blank(x: Tensor) -> Kept:
    """What is known of a client that has not answered yet, for models x [trials, d]."""
    zero = x.new_zeros(x.shape)
    return Kept(zero, zero, zero[:, :1])


def hear(
    memory: Memory,
    x: Tensor,
    alpha: Scalar,
    delta: Tensor,
    kept: Kept,
) -> tuple[Heard, Kept]:
    """What is averaged, and what is remembered from now on.

    `delta` [M, trials, d] are the updates v_i - x of some clients, `kept` is what the server
    remembers of them. x is [trials, d].
    """
    u = delta / -alpha
    known = kept.known
    deviation = known * (kept.u - mean(memory))
    heard = Heard(
        delta=delta,
        deviation=deviation,
        known=known,
        s=known * (x - kept.x),
        y=known * (u - kept.u),
        along=dot(u - mean(memory), deviation),
        square=dot(deviation, deviation),
    )
    return heard, Kept(u, x.expand_as(u), torch.ones_like(known))


def mean(memory: Memory) -> Tensor:
    """o [trials, d], the mean of what is known; 0 before anybody has answered."""
    nobody = memory.mass == 0
    return memory.total / torch.where(nobody, 1.0, memory.mass).to(memory.total.dtype)


def correct(
    memory: Memory,
    heard: Heard,
    x: Tensor,
    alpha: Scalar,
    cohort: Cohort,
) -> tuple[Tensor, Memory]:
    """The update v - x of the whole federation, as far as it can be told; and the new memory."""
    m = cohort.mass
    along = LASTS * memory.along + heard.along
    square = LASTS * memory.square + heard.square
    beta = (along / square.clamp(min=TINY)).clamp(0, 1)
    answered = -heard.delta / alpha  # sum_S w_i u_i
    replaced = heard.deviation + heard.known * mean(memory)  # sum_S w_i o_i of the known
    rounds = memory.rounds + 1
    new = Memory(
        total=memory.total + m * (answered - replaced),
        mass=(memory.mass + m * (1 - heard.known.double())).clamp(max=1),
        s=(1 - m) * memory.s + m * heard.s,
        y=(1 - m) * memory.y + m * heard.y,
        along=along,
        square=square,
        beta=beta,
        models=memory.models,
        rounds=rounds,
        share=memory.share + (m - memory.share) / rounds,
    )
    if memory.models.numel():
        met = x - heard.known * x + heard.s  # x less sum_S w_i x_i of the known
        new = new._replace(models=memory.models + m * met)
    if m > ALL:
        return heard.delta, new
    return heard.delta + alpha * beta.to(answered.dtype) * heard.deviation, new


def forget(memory: Memory, lost: Kept) -> Memory:
    """The memory without clients; `lost` is the sum of p_i times what was remembered of them."""
    return memory._replace(
        total=memory.total - lost.u,
        mass=(memory.mass - lost.known.double()).clamp(min=0),
        models=memory.models - lost.x if memory.models.numel() else memory.models,
    )


def blended(
    memory: Memory,
    g: Tensor,
    x: Tensor,
    cohort: Cohort,
) -> tuple[Tensor, Tensor | float]:
    """The gradient that B^-1 is applied to, and what is added to the direction afterwards.

    Both are [trials, d]; they are g and 0 unless a single client has answered, and the memory gives
    steps of its own.
    """
    if not memory.models.numel() or not is_alone(cohort):
        return g, 0.0
    known = torch.where(memory.mass > 0, memory.mass, 1.0).to(x.dtype)
    soon = (WAIT * memory.share).square().clamp(max=1)
    h = (HALF * memory.mass * soon).to(x.dtype)
    back = x - memory.models / known
    return torch.lerp(g, mean(memory) / cohort.steps, h), h * back


def better(
    memory: Memory,
    heard: Heard,
    s: Tensor,
    y: Tensor,
    products: Tensor,
    g: Tensor,
    cohort: Cohort,
    inner: Callable[[Tensor, Tensor, Tensor], Tensor] = gram,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pair that the server learns from: (s, y, their inner products with g).

    s and y [trials, d] are the pair of the server's own step, `products` [trials, 3, 3] its inner
    products and those with g, as `inner` computes them.
    """
    if cohort.mass > ALL:
        return s, y, products
    y_clients = memory.y / cohort.steps
    of_clients = inner(memory.s, y_clients, g)
    clients = (_cosine(of_clients) >= CLEAR) & (_cosine(of_clients) > _cosine(products))
    new_client = heard.known < 1 - ROUNDING
    nothing = torch.zeros_like(y)
    y = torch.where(clients, y_clients, torch.where(new_client, nothing, y))
    s = torch.where(clients, memory.s, s)
    return s, y, inner(s, y, g)


def _cosine(products: Tensor) -> Tensor:
    """cos(s, y), [trials, 1]; -1 where one of them is 0."""
    ss = products[..., 0, :1]
    sy = products[..., 0, 1:2]
    yy = products[..., 1, 1:2]
    return (sy / (ss * yy).sqrt()).nan_to_num(-1.0)


class Remembering(Algorithm):
    """The part of FedSSO's record that keeps the memory, where its field `memory` says so."""

    memory: str
    guard: str

    @property
    def remembers(self) -> bool:
        """Whether there is a memory; "auto" means no until `join` has decided it."""
        return self.memory == "clients"

    def join(self, attendance: Attendance, d: int) -> Self:
        """Decide memory="auto": on if some clients may be absent and the memory fits.

        It is off with guard="none", which is the paper's algorithm. It is also off where uploads
        are compressed: a single one is then far from the client's gradient, since it holds back a
        part and carries parts that earlier ones held back.
        """
        if self.memory != "auto":
            return self
        useful = attendance.some_absent and not attendance.compressed and self.guard != "none"
        room = fits(attendance.clients, d)
        if useful and not room:
            log.warning(
                "a memory of %d clients with %d parameters each exceeds 2 GB: FedSSO goes without; "
                "memory='clients' takes it all the same",
                attendance.clients,
                d,
            )
        chosen = "clients" if useful and room else "none"
        return cast(Self, replace(cast(Any, self), memory=chosen))

    def memory_init(self, x: Tensor) -> Tree:
        return blank(x) if self.remembers else ()

    def receive(self, server: Any, upload: Tensor, memory: Any, k: int) -> tuple[Tree, Tree]:
        if not self.remembers:
            return upload, memory
        own: Any = self
        alpha = at(own.alpha, k, server.choice.alpha)
        return hear(server.memory, server.x, alpha, upload, memory)

    def forget(self, server: Any, lost: Any) -> Any:
        return server._replace(memory=forget(server.memory, lost))
