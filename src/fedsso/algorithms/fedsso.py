"""FedSSO. Ma et al., "FedSSO: A Federated Server-Side Second-Order Optimization Algorithm", arXiv
2206.09576.

    x         global model x_k
    v         weighted mean of the local models
    g         (x_k - v_k) / (alpha tau), the averaged gradient
    s         x_k - x_{k-1}, the server's last step
    y         g_k - g_{k-1}
    B         estimate of the Hessian, B_1 = I in the paper
    alpha     client step
    tau       local steps (their weighted mean if clients differ)
    eta       server step
    lam, Lam  bounds of the curvature ||y||^2 / y^T s
    R         B starts anew whenever k mod R = 0
    r         radius of the guard
    gamma     B starts from I / gamma (guarded form bfgs; else from I)
    K         the metric of the weights; B then starts from K^-1 / gamma
    t         the part of -B^-1 g that a step was
    L         |y| / |s|, the gradient's steepness

The clients do what FedAvg's clients do. The server turns their mean v into an averaged gradient g,
learns an estimate B of the Hessian from how g changes between rounds, and takes the step
-eta B^-1 g. `FedSSO.server` is the paper's Algorithm 1, line by line; B and the update of B are in
`maths/quasi_newton.py`.

Five parts are not in the paper. With guard="adaptive" a trust region bounds the server's step and
pairs (s, y) that are mostly noise count less: `trust_region.py`. With guard="cautious" steps begin
at FedAvg's model, so that clients may do anything that FedAvg's clients may: `cautious.py`. With
alpha="auto" the server chooses the client step and undoes rounds that explode: `client_step.py`.
Where some clients are absent the server remembers what each of them sent last: `memory.py`. B
starts from a metric of the weights, in which the guard's lengths and angles are measured:
`layers.py`. guard="none" and a number for alpha give the paper's algorithm; the defaults
memory="auto" and shapes="auto" are then off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..algorithm import (
    Auto,
    Cohort,
    Local,
    Objective,
    Reply,
    Scalar,
    Step,
    Tree,
    at,
    at_least,
    dot,
    gram,
    hyper,
    norm,
    param,
    positive,
    tree_map,
)
from ..algorithm import local as solver
from ..errors import InputError, unknown
from ..maths import quasi_newton as qn
from ..maths.kronecker import Metric, Moments
from . import cautious, client_step, layers, memory, trust_region
from .client_step import Stepping
from .layers import Layered, WithSquares
from .memory import Heard, Remembering

log = logging.getLogger("fedsso")
GUARDS = ("adaptive", "cautious", "none")
Inner = Callable[[Tensor, Tensor, Tensor], Tensor]  # inner products of s, y and g


class Seen(NamedTuple):
    """What the trace tells about the last round; all [trials, 1] in float64."""

    ys: Tensor  # y^T s
    overridden: Tensor  # 1 if the pair entered with an enforced curvature, else 0
    skipped: Tensor  # 1 if there was a step, but its pair did not enter, else 0
    grad_norm: Tensor  # |g|
    alpha: Tensor  # the client step


class State(NamedTuple):
    """What the server keeps between rounds."""

    x: Tensor  # [trials, d]
    g: Tensor  # g of the last round, [trials, d]
    s: Tensor  # the last step, [trials, d]
    curvature: Tree  # B, in one of its forms
    guard: trust_region.Guard
    seen: Seen
    choice: client_step.Choice
    net: cautious.Net
    memory: memory.Memory
    moments: Tree  # what the metric is made from; () without one


class Message(NamedTuple):
    """What a client needs to know; x alone is sent where the server does not choose alpha."""

    x: Tensor  # [trials, d]
    alpha: Scalar


@hyper
class FedSSO(Layered, Stepping, Remembering):
    """Server-side BFGS on averaged gradients.

    >>> FedSSO(alpha=0.001, guard="none", R=200).eta
    1.0
    """

    any_client: ClassVar[bool] = True

    alpha: Step | Auto = param(default="auto", doc="client step size α; auto: chosen early on")
    eta: Step = param(default=1.0, doc="server step size η")
    R: int | None = param(default=None, doc="reset B every R rounds; none: never (paper: 200)")
    lam: Scalar = param(default=1e-4, doc="lower bound λ of the curvature")
    Lam: Scalar = param(default=9999.0, doc="upper bound Λ of the curvature")
    form: str = param(default="bfgs", doc="bfgs, bfgs-dense, dfp, dfp-dense or lbfgs")
    guard: str = param(default="adaptive", doc="adaptive, cautious (any clients) or none (paper)")
    pairs: int = param(default=200, doc="maximum number of stored pairs (s, y)")
    m: int = param(default=20, doc="number of pairs of form lbfgs")
    memory: str = param(default="auto", doc="auto (if some are absent), clients or none (paper)")
    drift: str = param(
        default="auto", doc="for alpha=auto: none, small, steady, large, fading, gentle"
    )
    shapes: str = param(default="auto", doc="metric that B starts from: auto, none, or 10x64 10")

    def __post_init__(self) -> None:
        _check(self)

    def server_init(self, x: Tensor) -> State:
        return _start(self, x)

    def broadcast(self, server: State) -> Tensor | Message:
        return Message(server.x, server.choice.alpha) if _chooses(self) else server.x

    def client(
        self, f: Objective, message: Tensor | Message, own: tuple[()], local: Local
    ) -> Reply:
        if isinstance(message, Tensor):
            message = Message(message, at(self.alpha, local.k))
        x, alpha = message
        delta, loss = solver.sgd(f, x, local, alpha)  # Alg. 1, lines 4-8
        return Reply(delta, own, loss)

    def server(self, server: State, mean: Tensor | Heard | WithSquares, cohort: Cohort) -> State:
        """The state after this round, from v_k - x_k: the mean of line 10 is the engine's.

        What is marked as not in the paper does nothing with guard="none" and a given alpha.
        """
        k = cohort.k
        tau = cohort.steps
        x = server.x
        s = server.s
        guard = server.guard
        net = server.net
        alpha = at(self.alpha, k, server.choice.alpha)
        work = alpha * tau  # FedAvg's step is -work g
        mean, told = _parted(mean, alpha)  # not in the paper: single gradients, for the metric
        delta, recalled = _recalled(server, mean, alpha, cohort)  # not in the paper: memory

        g = delta / (-alpha * tau)  # Alg. 1, line 11
        y = g - server.g  # line 12; in round 1 s = 0, so no pair enters
        plain = gram(s, y, g)
        choice = _chosen(self, server, plain, cohort)  # not in the paper: alpha="auto"
        K, moments = layers.learned(self, server.moments, g, cohort, told)  # not in it either
        inner = gram if K is None else K.gram
        products = plain if K is None else inner(s, y, g)
        if _guarded(self):  # not in the paper: guard="adaptive" or "cautious"
            look = Look(products, work, _slope_heard(mean, s, work, cohort), cohort)
            guard, net = _adapted(self, server, look)
            y, products = _trusted(self, server, y, products, g, inner)
        if isinstance(mean, Heard):  # not in the paper: memory
            s, y, products = memory.better(recalled, mean, s, y, products, g, cohort, inner)

        unit = work if _is_cautious(self) else 1.0  # of B^-1
        form = _form(self, x, k, unit * guard.gamma, K)
        s, y, products = _as_kept(form, s, y, g, products, inner)
        pair = _judged(self, products, unit, form)
        reset = self.R is not None and k % self.R == 0
        aim, back = memory.blended(recalled, g, x, cohort)  # not in the paper: memory
        curvature, direction = form.step(server.curvature, s, y, aim, pair, k, reset)  # line 13
        move, guard = _move(self, guard, at(self.eta, k), work, g, direction.add_(back), K)
        new = x + move  # line 14
        s = torch.sub(new, x, out=move)  # after rounding, as the clients see it
        seen = _seen(pair, reset, plain, alpha)
        after = State(new, g, s, curvature, guard, seen, choice, net, recalled, moments)
        return _caught(form, server, after, x + delta, cohort) if _is_cautious(self) else after

    def undo(self, server: State) -> tuple[State, Tensor] | None:
        return _undone(server) if _chooses(self) and _guarded(self) else None

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return _columns(self, server)


def _check(record: FedSSO) -> None:
    """Refuse values that the algorithm cannot work with."""
    if not _chooses(record):
        positive(record, "alpha")
    elif record.alpha != "auto":
        raise InputError(f"alpha must be a number or 'auto', got alpha={record.alpha!r}")
    positive(record, "eta")
    positive(record, "lam", "Lam", schedules=False)
    if record.lam >= record.Lam:
        raise InputError(
            f"lam must be < Lam, got lam={record.lam}, Lam={record.Lam}; the paper: 1e-4 and 9999"
        )
    at_least(record, "R", 2, none=True)
    at_least(record, "pairs", 1, most=10_000)
    at_least(record, "m", 1, most=10_000)
    if record.guard not in GUARDS:
        raise unknown("guard", record.guard, GUARDS)
    if record.memory not in memory.KINDS:
        raise unknown("memory", record.memory, memory.KINDS)
    if record.drift not in client_step.DRIFTS:
        raise unknown("drift", record.drift, client_step.DRIFTS)
    qn.form(record.form, record.pairs, record.m)
    layers.check(record)


def _start(record: FedSSO, x: Tensor) -> State:
    """The state before the first round from the models x [trials, d]."""
    zero = x.new_zeros(x.shape)
    return State(
        x=x,
        g=zero,
        s=zero,
        curvature=_form(record, x, 0).init(x),
        guard=trust_region.start(x),
        seen=_nothing_seen(x),
        choice=client_step.start(x),
        net=cautious.start(x, used=_is_cautious(record)),
        memory=memory.start(
            x, used=record.remembers, steps=_chooses(record) and record.guard == "adaptive"
        ),
        moments=layers.start(x, record.matrices, by_client=record.by_client),
    )


def _chooses(record: FedSSO) -> bool:
    """Whether the server chooses the client step."""
    return isinstance(record.alpha, str)


def _guarded(record: FedSSO) -> bool:
    """Whether a guard is in force."""
    return record.guard != "none"


def _is_cautious(record: FedSSO) -> bool:
    """Whether it is the guard that asks nothing about the clients."""
    return record.guard == "cautious"


def _is_exact(record: FedSSO) -> bool:
    """Whether g is a gradient without any error, whatever alpha is."""
    return _chooses(record) and record.guard == "adaptive" and record.drift == "none"


def _parted(
    mean: Tensor | Heard | WithSquares,
    alpha: Scalar,
) -> tuple[Tensor | Heard, tuple[Tensor, Moments] | None]:
    """What there would be without a metric; the means of the u_i and of their squares, if known."""
    plain, squares = layers.parted(mean)
    return plain, None if squares is None else (_plain(plain) / -alpha, squares)


def _recalled(
    server: State,
    mean: Tensor | Heard,
    alpha: Scalar,
    cohort: Cohort,
) -> tuple[Tensor, memory.Memory]:
    """delta = v_k - x_k [trials, d], corrected where there is a memory; and the memory."""
    if isinstance(mean, Tensor):
        return mean, server.memory
    return memory.correct(server.memory, mean, server.x, alpha, cohort)


def _chosen(
    record: FedSSO,
    server: State,
    plain: Tensor,
    cohort: Cohort,
) -> client_step.Choice:
    """The client step of the next round; `plain` holds the inner products of s, y and g."""
    if not _chooses(record) or _is_exact(record):
        return server.choice
    return client_step.choose(server.choice, plain, cohort, record.drift)


class Look(NamedTuple):
    """What the guard looks back with."""

    products: Tensor  # [trials, 3, 3]: the inner products of s, y and g
    work: Scalar  # alpha tau
    heard: Tensor | None  # [trials, 1]: s^T times the plain mean gradient of those who answered
    cohort: Cohort


def _slope_heard(
    mean: Tensor | Heard,
    s: Tensor,
    work: Scalar,
    cohort: Cohort,
) -> Tensor | None:
    """s^T times the plain mean gradient of those who answered; None if g is that already."""
    if isinstance(mean, Tensor) or cohort.mass > trust_region.ALL:
        return None
    return dot(s, mean.delta) / (-work * torch.ones_like(s[:, :1]))


def _plain(mean: Tensor | Heard) -> Tensor:
    """The mean update of those who answered, without any correction."""
    return mean if isinstance(mean, Tensor) else mean.delta


def _adapted(
    record: FedSSO,
    server: State,
    look: Look,
) -> tuple[trust_region.Guard, cautious.Net]:
    """The guard and its net after a look back along the last step."""
    products, work, heard, cohort = look
    if _is_cautious(record):
        net = cautious.follow(server.net, server.guard, products, work)
        return cautious.adapt(server.guard, net, products, work), net
    undone = server.choice.undone
    if _is_exact(record):
        trust = trust_region.exact(cohort.k, undone, record.lam)
    else:
        growth = trust_region.early_growth(cohort.size, cohort.mass)
        linear = record.drift in client_step.LINEAR
        first = trust_region.first_rounds(cohort.mass if linear else 1.0)
        trust = trust_region.careful(cohort.k - undone, growth, first)
    loss = _first_loss(record, server, cohort)
    return trust_region.adapt(server.guard, products, work, trust, heard, loss), server.net


def _first_loss(record: FedSSO, server: State, cohort: Cohort) -> Tensor | None:
    """f [trials, 1], where the radius may begin with it; 0 after a sound or an exploded round.

    Polyak's step is the same for any alpha, so one that has exploded must not be taken again. And
    after a round 1 that has exploded, the next loss may still be that of diverging local steps.
    """
    linear = record.drift in client_step.LINEAR
    if cohort.loss is None or not linear or not _chooses(record):
        return None
    sound_before = (server.g != 0).any(-1, keepdim=True)
    exploded = server.choice.undone > 0
    return torch.where(sound_before | exploded, 0.0, cohort.loss)


def _trusted(
    record: FedSSO,
    server: State,
    y: Tensor,
    products: Tensor,
    g: Tensor,
    inner: Inner,
) -> tuple[Tensor, Tensor]:
    """y [trials, d] as far as the guard trusts it, and the inner products of s, y and g."""
    if _is_exact(record):
        return y, products
    y = trust_region.damp(y, server.g, products, server.guard)
    return y, inner(server.s, y, g)


def _judged(
    record: FedSSO,
    products: Tensor,
    unit: Scalar,
    form: qn.Form,
) -> qn.Verdict:
    """The verdict on the pair whose inner products with g are given; `unit` is that of B^-1."""
    lam = record.lam / unit
    Lam = record.Lam / unit
    return qn.judge(
        products,
        lam,
        Lam,
        dual=form.dual,
        convex=_is_exact(record),
    )


def _move(
    record: FedSSO,
    guard: trust_region.Guard,
    eta: Scalar,
    work: Scalar,
    g: Tensor,
    direction: Tensor,
    K: Metric | None,
) -> tuple[Tensor, trust_region.Guard]:
    """The step [trials, d] from direction = B^-1 g, which is overwritten, and the guard after it.

    It is -eta B^-1 g, cut by the guard.
    """
    if _is_cautious(record):
        return cautious.advance(guard, eta, work, g, direction)
    square = None if K is None else K.square(direction)
    cut = _guarded(record)
    t, guard = trust_region.limit(guard, eta, g, direction, square, cut=cut)  # t <= eta
    return direction.mul_(-t.to(g.dtype)), guard


def _caught(
    form: qn.Form,
    before: State,
    after: State,
    averaged: Tensor,
    cohort: Cohort,
) -> State:
    """The state after a round with guard="cautious"; `averaged` [trials, d] is FedAvg's model.

    Where the last step has misled the server, it goes back to an earlier model and begins anew.
    """
    lengths = norm(after.g) / norm(before.g)
    fell = cautious.misled(before.net, cohort.loss, lengths)
    only_averages = before.net.falls >= cautious.PATIENCE
    is_fedavg = only_averages | cautious.is_fedavg(before.x, after.x, averaged)
    x = torch.where(is_fedavg, averaged, after.x)
    x = torch.where(fell, before.net.model, x)
    s = torch.where(fell, 0.0, x - before.x)
    stretch = norm(s) / norm(averaged - before.x).clamp(min=trust_region.TINY)
    net = cautious.remember(after.net, cohort.loss, averaged, stretch, fell)

    def anew(fresh: Tensor, old: Tensor) -> Tensor:
        """Where the server fell, the fresh value."""
        if fresh is old:
            return old
        return torch.where(fell.view(-1, *[1] * (old.dim() - 1)), fresh, old)

    guard = tree_map(anew, trust_region.start(x), after.guard)
    curvature = tree_map(anew, form.forget(after.curvature), after.curvature)
    return after._replace(x=x, s=s, curvature=curvature, guard=guard, net=net)


def _as_kept(
    form: qn.Form,
    s: Tensor,
    y: Tensor,
    g: Tensor,
    products: Tensor,
    inner: Inner,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pair as the form keeps it, and its inner products: what is judged is what enters B.

    Only pairs of very large models, which are kept in half precision, are other than they were.
    """
    s_kept = qn.rounded(form, s)
    y_kept = qn.rounded(form, y)
    if s_kept is s:
        return s, y, products
    return s_kept, y_kept, inner(s_kept, y_kept, g)


def _form(
    record: FedSSO,
    x: Tensor,
    k: int,
    gamma: float | Tensor = 1.0,
    K: Metric | None = None,
) -> qn.Form:
    """The form of B, with as many pairs as fit into the memory of one trial.

    The log tells if these are fewer than wanted, and from which round on the oldest pair leaves.
    """
    windows = {"lbfgs": min(record.m, record.pairs), "bfgs-dense": 0, "dfp-dense": 0}
    wanted = windows.get(record.form, record.pairs)
    d = x.shape[-1]
    held = 0
    half = wanted > 0 and qn.needs_half(record.form, wanted, d, x.dtype)
    if wanted:
        held = qn.capacity(record.form, wanted, d, 2 if half else x.element_size())
    if k == 0 and held < wanted and not x.is_meta:
        kept = "held in half precision" if half else "held"
        log.warning("%d pairs of %d numbers exceed 2 GB: %d are %s", wanted, d, held, kept)
    was_reset = record.R is not None and k >= record.R
    if k == held + 2 and not was_reset and record.form in ("bfgs", "dfp"):
        log.info("round %d: %d pairs are held at most, from now on the oldest is dropped", k, held)
    held = max(1, held)
    product = None if K is None else K.apply
    return qn.form(record.form, held, held, gamma, half, product)


def _undone(server: State) -> tuple[State, Tensor]:
    """The state to go on from after an explosion, and which trials can go on, [trials].

    A trial can if its state has changed: there was a step to undo, or alpha could become smaller.
    """
    choice, smaller = client_step.shrink(server.choice)
    moved = (server.s != 0).any(-1, keepdim=True)
    nothing = _nothing_seen(server.x)
    nan = torch.full_like(nothing.ys, torch.nan)
    tried = server.choice.alpha.double()
    back = server._replace(
        x=server.x - server.s,
        s=torch.zeros_like(server.s),
        guard=trust_region.start(server.x),
        seen=nothing._replace(ys=nan, grad_norm=nan, alpha=tried),
        choice=choice,
    )
    return back, (smaller | moved)[:, 0]


def _seen(
    pair: qn.Verdict,
    reset: bool,
    plain: Tensor,
    alpha: Scalar,
) -> Seen:
    """What the trace tells about this round.

    `plain` [trials, 3, 3] holds the inner products of s, y and g. A pair that a reset drops counts
    neither as overridden nor as skipped.
    """
    size = plain[..., 2, 2:].sqrt()
    overridden = pair.overridden.double()
    skipped = pair.skipped.double()
    if reset:
        overridden = torch.zeros_like(overridden)
        skipped = torch.zeros_like(skipped)
    return Seen(
        ys=pair.rho,
        overridden=overridden,
        skipped=skipped,
        grad_norm=size,
        alpha=alpha * torch.ones_like(size),
    )


def _nothing_seen(x: Tensor) -> Seen:
    """Before the first round from the models x [trials, d]."""
    zero = x.new_zeros(x.shape[0], 1, dtype=torch.float64)
    return Seen(ys=zero, overridden=zero, skipped=zero, grad_norm=zero, alpha=zero)


def _columns(record: FedSSO, server: State) -> dict[str, Tensor]:
    """Columns of the trace, each [trials]; some only where they mean something."""
    told = {name: value[:, 0] for name, value in server.seen._asdict().items()}
    alpha = told.pop("alpha")
    radius = server.guard.radius[:, 0]
    told["radius"] = radius if _guarded(record) else radius * torch.nan
    if _guarded(record) and record.form == "bfgs":
        told["gamma"] = server.guard.gamma[:, 0]
    if _is_cautious(record):
        told["stretch"] = server.net.stretch[:, 0]
        told["falls"] = server.net.falls[:, 0]
    if _chooses(record):
        told["alpha"] = alpha
    if record.remembers:
        told["beta"] = server.memory.beta[:, 0]
        told["known"] = server.memory.mass[:, 0]
    return told
