"""Quasi-Newton matrices of the server: the curvature rule and five ways to apply the inverse.

FedSSO's server learns an estimate B of the Hessian from pairs (s, y), and needs the direction
B^-1 g. `judge` is the paper's test of a pair; a `Form` keeps the matrix and gives the direction.
Everything is pure and branch-free for any leading axes L (trials): vectors are [*L, d], scalars
[*L, 1]. Pairs are kept in the run's dtype, those of very large models in bfloat16; inner products,
Gram matrices and small solves are in float64.

=========  =========================================================================================
s, y       x_k - x_{k-1} and g_k - g_{k-1}, the pair of round k
rho        y^T s, the true inner product
cur        rho, or 2 ||y||^2/(lam + Lam) where the test fails (dual: ||s||^2 instead of ||y||^2)
lam, Lam   bounds of the curvature test lam < ||y||^2/rho < Lam
B, H       estimate of the Hessian, and its inverse
gamma      H_0 = gamma I, with gamma = 1 in `dfp` and the dense forms
K          a metric (`kronecker.py`): H_0 = gamma K where there is one, in `bfgs` alone
h, e       H y and y^T H y at the time of the pair (`dfp`)
P, V       pairs kept at most; vectors for each pair: (s, y), or (s, y, h)
n          min(k, P): slots read in round k
gram       [*L, V, P, P]: v_i^T y_j for i <= j and v = s, y, h, mirrored below; newest pair last
=========  =========================================================================================

BFGS, for any cur, and its inverse:

    B+ = B + y y^T/cur - B s s^T B/(s^T B s)
    H+ = (I - s y^T/rho) H (I - y s^T/rho) + (cur/rho^2) s s^T

Hence in compact form, with R = triu(S^T Y), D = diag(cur) + gamma Y^T Y and W = [S, gamma Y]:

    H = gamma I + W [[R^-T D R^-1, -R^-T], [-R^-1, 0]] W^T

With a metric the same is computed without products K y of the stored pairs:

    H g = p + S R^-T (diag(cur) a - Y^T p),    a = R^-1 S^T g,    p = gamma K (g - Y a)

DFP is a product of projections, and compact in the same way:

    H+ = T^T H T + s s^T/cur,  T = I - y h^T/e

With the store in float32 and these sums in float64 the compact form keeps nearly all digits of
float32, where a d x d matrix in float32 may lose all of them (`Dense`). A round costs two passes
over the store, and solves of n x n systems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from ..errors import InputError, unknown
from ..support.linalg import solve

FORMS = ("bfgs", "bfgs-dense", "dfp", "dfp-dense", "lbfgs")
FLAT = 1e-8  # a pair with |cos(s, y)| below this makes B (numerically) singular and is skipped
STORE_BYTES = 2_000_000_000  # per trial
FEW = 20  # where not even so many pairs fit in float32, they are kept in bfloat16
DENSE_BYTES = 8_000_000_000  # per trial, beyond which a d x d matrix is refused


class Block(NamedTuple):
    """How much of a float32 store is widened to float64 at once.

    `columns` bounds the entries of a vector, `entries` those of all trials and rows together.
    """

    columns: int
    entries: int


# On a CPU a block stays in the cache; a GPU wants large products.
CPU_BLOCK = Block(1 << 14, 1 << 20)
DEVICE_BLOCK = Block(1 << 20, 1 << 26)


# ---- the curvature test ----


class Verdict(NamedTuple):
    """One pair judged; all [*L, 1]."""

    rho: Tensor  # y^T s in float64
    cur: Tensor  # rho, or the enforced value
    accept: Tensor  # the pair enters the matrix
    overridden: Tensor  # it does, with an enforced cur
    skipped: Tensor  # there was a step, but its pair does not enter


def judge(
    products: Tensor,
    lam: float | Tensor,
    Lam: float | Tensor,
    *,
    dual: bool = False,
    convex: bool = False,
) -> Verdict:
    """The paper's curvature test of a pair: lines 4-6 of its BFGS updating.

    Args:
        products: Inner products [*L, n, n] of s, y and perhaps other vectors in float64, as
            `gram(s, y)` gives them.
        lam: Lower bound of the curvature; a number or [*L, 1], as Lam.
        Lam: Upper bound of the curvature.
        dual: Test ||s||^2/rho instead of ||y||^2/rho, for DFP.
        convex: Do not accept a pair of negative rho, which a convex loss has by rounding alone.

    Returns:
        The verdict. Where the test fails, cur is enforced so that the ratio is the mean of the
        bounds.

    Pairs that are zero, not finite or flat are not accepted. A pair of negative rho is accepted,
    with an enforced cur > 0: B stays positive definite for any rho that is not 0.
    """
    ss = products[..., 0, :1]
    rho = products[..., 0, 1:2]
    yy = products[..., 1, 1:2]
    square = ss if dual else yy
    ratio = square / rho
    # false for rho <= 0 as well: the ratio is then negative or infinite
    ok = (lam < ratio) & (ratio < Lam)
    length = ss.sqrt() * yy.sqrt()
    # one comparison covers s = 0, y = 0, NaN and infinity: each makes it false
    accept = (rho if convex else rho.abs()) > FLAT * length
    cur = torch.where(ok, rho, 2 * square / (_double(lam) + _double(Lam)))
    return Verdict(
        rho=rho,
        cur=cur,
        accept=accept,
        overridden=accept & ~ok,
        skipped=~accept & (ss > 0),
    )


def _double(bound: float | Tensor) -> float | Tensor:
    """A bound in float64, also if a float32 sweep holds it."""
    return bound.double() if isinstance(bound, Tensor) else bound


# ---- the forms of the matrix ----


class Form(Protocol):
    """A way to keep the matrix: `init` makes its state, `step` updates it and returns H g.

    All forms are functions of their arguments, with one exception: those that keep pairs write
    the new pair into their store in place (see `Pairs`).
    """

    @property
    def dual(self) -> bool:
        """Whether the curvature test compares ||s||^2 instead of ||y||^2."""

    def init(self, x: Tensor) -> Any:
        """The state without pairs."""

    def forget(self, state: Any) -> Any:
        """The state without pairs, in the memory of an old one."""

    def step(
        self,
        state: Any,
        s: Tensor,
        y: Tensor,
        g: Tensor,
        verdict: Verdict,
        k: int,
        reset: bool,
    ) -> tuple[Any, Tensor]:
        """Round k = 1, 2, ...: the new state, and H g as a fresh tensor.

        The pair enters as its verdict says. `reset` forgets it and all older pairs.
        """


class Pairs(NamedTuple):
    """The newest pairs, in a ring.

    `store` is [*L, slots, V, d]. It is donated: `step` writes one slot of it in place.

    A caller may go back by one step, to the state before, as FedSSO does with a round that
    explodes. In a full ring of P slots that step has overwritten the oldest pair. So `oldest` holds
    a copy of it, which `step` writes back unless a new pair takes its place. In a ring of P + 1
    slots (`Dfp`) nothing is lost, and `oldest` is empty, [*L, 0, d].
    """

    store: Tensor
    head: Tensor  # [*L] slot of the next pair
    held: Tensor  # [*L] pairs held
    gram: Tensor  # [*L, V, P, P]
    cur: Tensor  # [*L, P]
    oldest: Tensor  # [*L, V, d]: what the slot `head` holds; [*L, 0, d] with P + 1 slots


@dataclass(frozen=True)
class Bfgs:
    """BFGS without the matrix, exact for the pairs that are kept, with H_0 = gamma I or gamma K.

    `scaled` takes gamma from the newest pair instead, as L-BFGS does. `half` keeps the pairs in
    bfloat16. The pairs that are given must then have been `rounded`: the matrix is exact for them.
    `metric` is the product with K, for vectors [*L, d]; it may be another one in every round.
    """

    pairs: int
    scaled: bool = False
    gamma: float | Tensor = 1.0
    half: bool = False
    metric: Callable[[Tensor], Tensor] | None = None
    dual: ClassVar[bool] = False

    def init(self, x: Tensor) -> Pairs:
        """Room for the pairs of models x [*L, d], and no pair: H = gamma I."""
        like = x.new_empty(0, dtype=torch.bfloat16) if self.half else x
        store = like.new_zeros(*x.shape[:-1], self.pairs, 2, x.shape[-1])
        return _blank(store, self.pairs)

    def forget(self, state: Pairs) -> Pairs:
        """No pair; the store stays as it is, since nobody reads slots without a pair."""
        return _blank(state.store, self.pairs)

    def step(
        self,
        state: Pairs,
        s: Tensor,
        y: Tensor,
        g: Tensor,
        verdict: Verdict,
        k: int,
        reset: bool,
    ) -> tuple[Pairs, Tensor]:
        """One pass over the store for the products with y and g, one for H g.

        With a metric there are two passes for H g.
        """
        if reset:  # which keeps the scale
            start = g if self.metric is None else self.metric(g)
            direction = (self.gamma * start).to(g.dtype)
            return self.forget(state), direction
        state = _append(state, (s, y), verdict, k)
        used = _used(state, k)
        of_y, of_g = _project(state, (y, g), used).unbind(-3)
        state = _grow(state, of_y, verdict.accept)
        gamma = self._gamma(state)
        if self.metric is not None:
            return state, self._from_metric(state, used, of_g, gamma, g)
        weights = self._weights(state, of_g, gamma[..., None])
        direction = _combine(weights, used)
        return state, direction.addcmul_(gamma.to(g.dtype), g)

    def _from_metric(
        self,
        state: Pairs,
        used: Used,
        of_g: Tensor,
        gamma: Tensor,
        g: Tensor,
    ) -> Tensor:
        """H g [*L, d] with H_0 = gamma K; `of_g` [*L, n, V] holds the products with g."""
        assert self.metric is not None
        (R, _), cur = _newest(state, of_g.shape[-2])
        Sg, _ = of_g.tensor_split(2, -1)
        a = solve_triangular(R, Sg, upper=True)
        nothing = torch.zeros_like(a)
        rest = g + _combine(torch.cat((nothing, -a), -1), used)
        p = gamma.to(g.dtype) * self.metric(rest)
        of_p = _project(state, (p,), used)[..., 0, :, :]
        _, Yp = of_p.tensor_split(2, -1)
        b = solve_triangular(R, cur * a - Yp, upper=False)
        return p.add_(_combine(torch.cat((b, nothing), -1), used))

    def _gamma(self, state: Pairs) -> Tensor:
        """cur/||y||^2 of the newest pair, or the given one; [*L, 1]."""
        newest = state.cur[..., -1:]
        if self.scaled:
            return newest / state.gram[..., 1, -1, -1:]
        if isinstance(self.gamma, Tensor):
            return self.gamma.double()
        return torch.full_like(newest, self.gamma)

    @staticmethod
    def _weights(
        state: Pairs,
        q: Tensor,
        gamma: Tensor,
    ) -> Tensor:
        """Weights [*L, n, V] of s_i and y_i in H q - gamma q.

        q [*L, n, V] holds the products s_i^T q and y_i^T q. Reads the compact form from right to
        left: a is R^-1 S^T q.
        """
        (R, YY), cur = _newest(state, q.shape[-2])
        Sq, Yq = q.tensor_split(2, -1)
        a = solve_triangular(R, Sq, upper=True)
        top = solve_triangular(R, cur * a + gamma * (YY @ a - Yq), upper=False)
        return torch.cat((top, -gamma * a), -1)


@dataclass(frozen=True)
class Dfp:
    """DFP without the matrix, as a product of projections.

    Beyond P pairs the oldest factor leaves.
    """

    pairs: int
    dual: ClassVar[bool] = True

    def init(self, x: Tensor) -> Pairs:
        """Room for the pairs, and no pair.

        h is computed from all pairs, also from the one that will leave. So the new pair gets a
        slot of its own: a step that is interrupted and taken again finds what it found before.
        """
        store = x.new_zeros(*x.shape[:-1], self.pairs + 1, 3, x.shape[-1])
        return _blank(store, self.pairs)

    def forget(self, state: Pairs) -> Pairs:
        """No pair, as in `Bfgs`."""
        return _blank(state.store, self.pairs)

    def step(
        self,
        state: Pairs,
        s: Tensor,
        y: Tensor,
        g: Tensor,
        verdict: Verdict,
        k: int,
        reset: bool,
    ) -> tuple[Pairs, Tensor]:
        """As BFGS, with one more combination for h = H y.

        The products of the new pair with y and g are computed on their own.
        """
        if reset:
            return self.forget(state), g.clone()
        used = _used(state, k)
        old = _project(state, (y, g), used)
        of_h = self._weights(state, old[..., 0, :, :])
        h = _combine(of_h, used).add_(y)
        pair = (s, y, h)
        new = torch.stack([inner((y, g), v[..., None, :]) for v in pair], -1)
        appended = torch.cat((old[..., 1:, :], new), -2)
        products = torch.where(verdict.accept[..., None, None], appended, old)
        of_y, of_g = products.unbind(-3)
        state = _append(state, pair, verdict, k)
        state = _grow(state, of_y, verdict.accept)
        weights = self._weights(state, of_g)
        return state, _combine(weights, _used(state, k)).add_(g)

    @staticmethod
    def _weights(state: Pairs, q: Tensor) -> Tensor:
        """Weights [*L, n, V] of s_i, y_i, h_i in H q - q.

        q [*L, n, V] holds the products s_i^T q, y_i^T q and h_i^T q. The product of projections
        is applied from the newest pair to the oldest, then back; the triangular systems in
        U = h^T y, whose diagonal is e, do both loops at once.
        """
        (SY, YY, U), cur = _newest(state, q.shape[-2])
        Sq, Yq, Hq = q.tensor_split(3, -1)
        a = solve_triangular(U, Hq, upper=True)
        beta = (Sq - SY.triu(1) @ a) / cur
        c = solve_triangular(U, Yq - YY @ a + SY.tril(-1) @ beta, upper=False)
        return torch.cat((beta, -a, -c), -1)


class Matrix(NamedTuple):
    """The state of the dense forms: B, or H in the dual one."""

    matrix: Tensor  # [*L, d, d]


@dataclass(frozen=True)
class Dense:
    """The paper's two versions with a d x d matrix: BFGS and a solve or, dual, DFP.

    The matrix is in the run's dtype, so it holds no eigenvalue below the rounding of its largest
    one, and the error of the solve grows like eps cond(B). No cheap step mends that. `Bfgs` has the
    same directions without the loss; this form is for checks on small models.
    """

    dual: bool

    def init(self, x: Tensor) -> Matrix:
        """The identity."""
        d = x.shape[-1]
        size = d**2 * x.element_size()
        if size > DENSE_BYTES:
            raise InputError(f"a {d} x {d} matrix needs {size / 1e9:.0f} GB; use form='bfgs'")
        return Matrix(_identity(x.shape, x.dtype, x.device))

    def forget(self, state: Matrix) -> Matrix:
        """The identity."""
        matrix = state.matrix
        return Matrix(_identity(matrix.shape[:-1], matrix.dtype, matrix.device))

    def step(
        self,
        state: Matrix,
        s: Tensor,
        y: Tensor,
        g: Tensor,
        verdict: Verdict,
        k: int,  # noqa: ARG002
        reset: bool,
    ) -> tuple[Matrix, Tensor]:
        """The dual form is the BFGS update with s and y exchanged, and no solve."""
        if reset:
            return self.init(g), g.clone()
        if self.dual:
            H = _rank_two(state.matrix, s, y, verdict)
            direction = (H @ g[..., None])[..., 0]
            return Matrix(H), direction
        B = _rank_two(state.matrix, y, s, verdict)
        return Matrix(B), solve(B, g)


def form(
    name: str,
    pairs: int,
    m: int,
    gamma: float | Tensor = 1.0,
    half: bool = False,
    metric: Callable[[Tensor], Tensor] | None = None,
) -> Form:
    """The form of that name, which keeps at most `pairs` pairs (`lbfgs`: m).

    Args:
        name: One of FORMS.
        pairs: The most pairs that are kept; dense forms keep none.
        m: The window of `lbfgs`.
        gamma: `bfgs` starts from H_0 = gamma I; a number or [*L, 1].
        half: Whether `bfgs` and `lbfgs` keep their pairs in bfloat16.
        metric: The product with K, if `bfgs` starts from H_0 = gamma K.

    Raises:
        InputError: The name is not known, or there would be no room for a pair.
    """
    if pairs < 1 or m < 1:
        raise InputError(
            f"pairs and m must be >= 1, got pairs={pairs}, m={m}; keep at least one pair"
        )
    if name == "bfgs":
        return Bfgs(pairs, gamma=gamma, half=half, metric=metric)
    if name == "lbfgs":
        return Bfgs(min(m, pairs), scaled=True, half=half)
    if name == "dfp":
        return Dfp(pairs)
    if name in FORMS:
        return Dense(dual=name == "dfp-dense")
    raise unknown("form", name, FORMS)


def capacity(
    name: str,
    pairs: int,
    d: int,
    itemsize: int,
) -> int:
    """How many of `pairs` pairs the form can hold in the memory of one trial; at least one.

    Args:
        name: One of FORMS. `dfp` keeps three vectors for each pair, all others two.
        pairs: How many are wanted.
        d: Parameters of the model.
        itemsize: Bytes of one number.
    """
    vectors = 3 if name == "dfp" else 2
    slots = STORE_BYTES // (vectors * d * itemsize)
    # One is spare: the copy of the oldest pair, or the further slot of `dfp`.
    return max(1, min(pairs, slots - 1))


def needs_half(
    name: str,
    pairs: int,
    d: int,
    dtype: torch.dtype,
) -> bool:
    """Whether a form keeps its pairs in bfloat16: too few of them would fit in float32.

    It depends on the model's size alone, so that every machine comes to the same numbers. The
    arguments are those of `capacity`; in float64 nothing is rounded.
    """
    if name not in ("bfgs", "lbfgs") or dtype != torch.float32:
        return False
    return capacity(name, pairs, d, dtype.itemsize) < min(pairs, FEW)


def rounded(form: Form, v: Tensor) -> Tensor:
    """A vector as the form keeps it, in the vector's own dtype."""
    half = isinstance(form, Bfgs) and form.half
    return v.bfloat16().to(v.dtype) if half else v


# ---- inner products in float64 ----


def inner(columns: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Products [*L, c, r] in float64 of c vectors [*L, d] and rows [*L, r, d].

    A float32 store is widened block by block: a float64 copy of it would not fit into memory.
    """
    r, d = rows.shape[-2:]
    block = CPU_BLOCK if rows.is_cpu else DEVICE_BLOCK
    if rows.dtype == torch.float64 or rows.numel() <= block.entries:
        return torch.stack(tuple(columns), -2).double() @ rows.double().mT
    width = min(block.columns, d)
    trials = max(1, block.entries // (r * width))
    height = max(1, block.entries // (trials * width))
    row_groups = torch.split(rows.reshape(-1, r, d), trials)
    split_columns = [torch.split(c.reshape(-1, d), trials) for c in columns]
    column_groups = zip(*split_columns, strict=True)
    products = []
    for group, columns_of_group in zip(row_groups, column_groups, strict=True):
        products.append(_widen(columns_of_group, group, width, height))
    return torch.cat(products).reshape(*rows.shape[:-2], len(columns), r)


def _widen(
    columns: Sequence[Tensor],
    rows: Tensor,
    width: int,
    height: int,
) -> Tensor:
    """`inner` for some trials: blocks [height, width] of the rows are widened one by one.

    They are widened in a buffer that stays in the processor's cache.
    """
    trials, r, d = rows.shape
    buffer = rows.new_empty(trials * height * width, dtype=torch.float64)
    total = buffer.new_zeros(trials, len(columns), r)
    for start in range(0, d, width):
        strip = slice(start, start + width)
        column = torch.stack([c[:, strip] for c in columns], -2).double()
        products = []
        for block in torch.split(rows[..., strip], height, -2):
            wide = buffer[: block.numel()].view(block.shape).copy_(block)
            products.append(column @ wide.mT)
        total += torch.cat(products, -1)
    return total


# ---- parts of the forms ----


def _rank_two(
    B: Tensor,
    y: Tensor,
    s: Tensor,
    verdict: Verdict,
) -> Tensor:
    """B + y y^T/cur - B s s^T B/(s^T B s) where the pair is accepted, else B; [*L, d, d]."""
    Bs = B @ s[..., None]
    sBs = s[..., None, :] @ Bs
    y = y[..., None]
    cur = verdict.cur.to(B.dtype)[..., None]
    new = B + y @ y.mT / cur - Bs @ Bs.mT / sBs
    return torch.where(verdict.accept[..., None], new, B)


def _blank(store: Tensor, pairs: int) -> Pairs:
    """No pair held.

    Gram matrices I and cur = 1 make absent pairs drop out of the solves, and gamma 1.
    """
    *lead, slots, vectors, d = store.shape
    head = torch.zeros(lead, dtype=torch.int64, device=store.device)
    gram = _identity((*lead, vectors, pairs), torch.float64, store.device)
    oldest = store.new_zeros(*lead, vectors if slots == pairs else 0, d)
    return Pairs(store, head, head.clone(), gram, gram.new_ones(*lead, pairs), oldest)


def _identity(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Identity matrices, [*shape, shape[-1]].

    On the meta device, where sweeps measure states, torch.eye would load a compiler (2 s).
    """
    matrix = torch.zeros(*shape, shape[-1], dtype=dtype, device=device)
    matrix.diagonal(dim1=-2, dim2=-1).fill_(1)
    return matrix


def _append(
    state: Pairs,
    pair: Sequence[Tensor],
    verdict: Verdict,
    k: int,
) -> Pairs:
    """Write the pair over the oldest one; where it is not accepted, write that one again.

    The store is written in place; all else is new tensors. Round 1 has no pair, so that in round k
    the ring cannot be full before k is above its number of slots.
    """
    store = state.store
    accept = verdict.accept[..., 0]
    slots, vectors, d = store.shape[-3:]
    kept = state.oldest.shape[-2]
    # All trials' rings lie below each other, each with its own slot.
    rings = torch.arange(0, accept.numel() * slots, slots, device=store.device)
    all_slots = store.view(-1, vectors, d)
    # Written in any case: after an undone step the slot holds the pair of that step.
    old = state.oldest if kept else 0.0
    new = torch.where(verdict.accept.unsqueeze(-1), torch.stack(tuple(pair), -2), old)
    new = new.to(store.dtype).view(-1, vectors, d)
    all_slots.index_copy_(0, rings + state.head.flatten(), new)
    more = accept.long()
    head = (state.head + more) % slots
    oldest = state.oldest
    if kept and k > slots:
        oldest = all_slots.index_select(0, rings + head.flatten()).view_as(oldest)
    cur = torch.cat((state.cur[..., 1:], verdict.cur), -1)
    return state._replace(
        head=head,
        held=(state.held + more).clamp(max=state.cur.shape[-1]),
        cur=torch.where(verdict.accept, cur, state.cur),
        oldest=oldest,
    )


def _grow(
    state: Pairs,
    of_y: Tensor,
    accept: Tensor,
) -> Pairs:
    """Shift the Gram matrices by one pair, where it is accepted.

    The products of_y [*L, n, V] with the new y become the last column and row.
    """
    accept = accept[..., None]
    grown = state.gram.clone()
    # Beyond the newest n pairs there is none yet: the matrices are those of the identity there.
    n = of_y.shape[-2]
    before = state.gram[..., -n:, -n:]
    after = grown[..., -n:, -n:]
    column = torch.where(accept, of_y.mT, before[..., -1])
    torch.where(
        accept[..., None], before[..., 1:, 1:], before[..., :-1, :-1], out=after[..., :-1, :-1]
    )
    after[..., -1] = column
    after[..., -1, :] = column
    return state._replace(gram=grown)


def _newest(state: Pairs, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gram matrices [*L, n, n] and cur [*L, n, 1] of the newest n pairs."""
    return state.gram[..., -n:, -n:].unbind(-3), state.cur[..., -n:, None]


class Used(NamedTuple):
    """The part of the store that is in use."""

    rows: Tensor  # [*L, m V, d]
    slots: Tensor  # [*L, n]: those of the newest n pairs in order, the oldest pair first


def _used(state: Pairs, k: int) -> Used:
    """The part of the store that is in use by round k."""
    n = min(k, state.cur.shape[-1])
    m = min(k, state.store.shape[-3])
    rows = state.store[..., :m, :, :].flatten(-3, -2)
    ages = torch.arange(-n, 0, device=state.head.device)
    # before the ring is full, modulo m only keeps the slots of absent pairs in range
    slots = (state.head[..., None] + ages) % m
    return Used(rows, slots)


def _project(
    state: Pairs,
    columns: Sequence[Tensor],
    used: Used,
) -> Tensor:
    """Products [*L, c, n, V] of the newest n pairs with c vectors [*L, d]; 0 for absent pairs.

    The rows are multiplied in the order in which they lie, and the few products are sorted by
    age: the store itself is never copied.
    """
    rows, slots = used
    n = slots.shape[-1]
    vectors = state.store.shape[-2]
    products = torch.unflatten(inner(columns, rows), -1, (-1, vectors))
    products = torch.take_along_dim(products, slots[..., None, :, None], -2)
    present = torch.arange(n, 0, -1, device=slots.device) <= state.held[..., None]
    return torch.where(present[..., None, :, None], products, 0.0)


def _combine(weights: Tensor, used: Used) -> Tensor:
    """Sum of the vectors of the newest n pairs with weights [*L, n, V], in the run's dtype.

    The weights are brought into the order of the slots, for the same reason. Pairs in bfloat16 are
    widened strip by strip.
    """
    rows, slots = used
    vectors = weights.shape[-1]
    held = rows.shape[-2] // vectors
    by_slot = weights.new_zeros(*weights.shape[:-2], held, vectors)
    by_slot.scatter_(-2, slots[..., None].expand_as(weights), weights)
    by_row = by_slot.flatten(-2)[..., None, :]
    if rows.dtype != torch.bfloat16:
        return (by_row.to(rows.dtype) @ rows)[..., 0, :]
    narrow = by_row.float()
    width = (CPU_BLOCK if rows.is_cpu else DEVICE_BLOCK).columns
    total = narrow.new_empty(*rows.shape[:-2], rows.shape[-1])
    for start in range(0, rows.shape[-1], width):
        strip = slice(start, start + width)
        total[..., strip] = (narrow @ rows[..., strip].float())[..., 0, :]
    return total
