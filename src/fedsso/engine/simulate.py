"""The simulator: clients and hyper-parameter trials as leading axes, in chunks that fit a memory
budget.

One `Trials` object runs the trials of one group (records that stack) under one seed. Its state is a
handful of trees; `round()` replaces them at once, so an interrupted round leaves nothing half-done.
Uploads are counted as sent, then decoded and averaged. A client's state is a tree of its own,
shared with all others until its first round. Two buffers are written in place and named so: the
gather buffers of `gather.py`, and the curvature store of FedSSO.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithm import Algorithm, Cohort, Phase
from ..algorithm.records import stack
from ..errors import InputError
from ..objective.backend import Layout, buffers_of, ravel
from ..objective.choose import objective
from ..support.intake import Damaged
from ..support.trees import Tree, named_leaves, tree_map
from .checkpoint import Reader, of_text
from .evaluate import Evaluator, Rows
from .gather import BUDGET, Chunk, Gather
from .ledger import Ledger
from .rounds import Ints, Plan, Rounds
from .uplink import Errors, part_of, uplink

if TYPE_CHECKING:
    from ..data import Federation
    from ..objective.losses import RowLoss
    from .metrics import Metric
    from .settings import Settings

log = logging.getLogger("fedsso")
SMALL = 1e-6  # the least that counts as a first loss: a run may start at the optimum
MIN_CHUNK = 8  # clients, however ragged
ONE_THREAD = (
    100_000,
    2_000,
)  # parameters up to which one thread does the work; with d x d matrices
STATE = ("server", "own", "buffers", "ended", "diverged", "first_loss")
A = TypeVar("A", bound=Algorithm)


@dataclass(frozen=True)
class Job:
    """Everything about a run but its algorithm."""

    fed: Federation
    module: nn.Module  # the initial model
    loss: RowLoss
    metrics: dict[str, Metric]
    settings: Settings


def fitted(record: A, model: nn.Module | Layout) -> A:
    """The record for this model: it learns the sizes of the layers, the parameters of one submodule
    together."""
    layout, layers = model if isinstance(model, Layout) else Layout.of(model), dict[str, int]()
    for name, size in zip(layout.names, layout.sizes, strict=True):
        owner = name.rpartition(".")[0]
        layers[owner] = layers.get(owner, 0) + size
    return record.fit(list(layers.values()))


def admit(record: Algorithm, settings: Settings) -> None:
    """Refuse an algorithm that needs every client where some do not answer."""
    if record.needs_all and (settings.participation < 1 or settings.drop_rate > 0):
        raise InputError(
            f"{type(record).__name__} needs all clients in every round, got "
            f"participation={settings.participation:g}, "
            f"drop_rate={settings.drop_rate:g}; use participation=1 and drop_rate=0, or "
            f"{record.needs_all}"
        )


class Trials:
    """Trials of one algorithm on one federation, advanced round by round."""

    def __init__(self, job: Job, records: Sequence[Algorithm]) -> None:
        self.job = job
        self.trials = len(records)
        self.settings = job.settings
        self.device = job.settings.torch_device
        self.dtype = job.settings.torch_dtype
        for record in records:
            admit(record, job.settings)
        self.fed = job.fed.to(self.device)
        module = job.module.to(self.device, self.dtype)
        self.f, self.reason = objective(
            module, job.loss, job.settings.engine, self.device, job.fed.sample_shape
        )
        self.f.l2 = job.settings.l2
        self.algorithm = stack(
            [fitted(record, module) for record in records], self.dtype, self.device
        )
        self.rounds = Rounds(job.fed, job.settings)
        self.gather = Gather(self.fed, self.dtype)
        self.evaluator = Evaluator(self.f, self.fed, Gather(self.fed, self.dtype), job.metrics)
        self.p = job.fed.p.cpu()
        x = ravel(module).expand(self.trials, -1).contiguous()
        self.server: Any = self.algorithm.server_init(x)
        self.own: list[Tree] = [
            self.algorithm.client_init(x)
        ] * job.fed.clients  # shared until a client's first round
        self.errors: Errors = {}
        self.uplink = uplink(self.algorithm, self.server, self.f.layout, job.settings.compress)
        self.buffers = (
            buffers_of(module).to(self.device, self.dtype).expand(self.trials, -1).contiguous()
        )
        self.position: Ints = np.zeros(job.fed.clients, np.int64)
        self.ended = torch.full(
            (self.trials,), -1, device=self.device
        )  # round of divergence or stop; -1: running
        self.diverged = torch.zeros_like(self.ended)  # round of divergence; 0: none
        self.first_loss = torch.full(
            (self.trials,), torch.nan, dtype=torch.float64, device=self.device
        )
        self.k = 0
        self._columns: dict[str, Tensor] = {}  # of the first rows, as far as they were asked for
        self.rows: list[dict[str, Tensor]] = [self._evaluate(vars(self))]
        self.start_loss = self.rows[0]["test_loss"]
        if not len(self.fed.test_rows):
            self.start_loss = self.evaluator.loss(self.models(), self.buffers, self._rows("train"))

    def models(self, server: Any = None, own: Sequence[Tree] | None = None) -> Tensor:
        """The models that are evaluated: [trials, d], or [clients, trials, d] where every client
        has its own."""
        algorithm = self.algorithm
        held = _gathered(self.own if own is None else own) if algorithm.personal else ()
        return algorithm.model(self.server if server is None else server, held)

    def _rows(self, part: str) -> Rows:
        """Test or training rows, those of each client apart where it has a model of its own."""
        if self.algorithm.personal:
            return [self.fed.rows_of(i, part) for i in range(self.fed.clients)]
        return self.fed.test_rows if part == "test" else self.fed.train_rows

    # --- one round
    # ---------------------------------------------------------------------------------------------------
    def round(self, last: bool = False) -> None:
        """One communication round; `last` forces an evaluation. Nothing changes until all of it is
        done."""
        began = time.perf_counter()
        k = self.k + 1
        ledger = Ledger(self.fed.clients, self.trials)
        under_way = _Round(
            self.server, self.own.copy(), self.errors.copy(), self.buffers, self.position.copy()
        )
        plan, samples = self.rounds.plan(k), 0
        for number, phase in enumerate(self.algorithm.phases):
            if phase.fresh:
                samples += 1
                plan = self.rounds.plan(k, samples)
            message = phase.broadcast(under_way.server)
            ledger.broadcast((message, under_way.buffers), plan.chosen)
            if (
                not self.p[plan.answered].sum() > 0
            ):  # a cohort without weight moves nothing, as one that nobody answers
                break
            self._exchange(phase, number, message, under_way, k, plan, ledger)
        new, row = self._settle(under_way, k, self._judge(under_way), last)
        spent = {"bytes_up": self._all(ledger.up), "bytes_down": self._all(ledger.down)}
        spent["seconds"] = self._all(time.perf_counter() - began)
        found: dict[str, Tensor] = {}
        if last or k % self.settings.eval_every == 0:
            found = self._evaluate(new)
            sound = self._judge_evaluated(new, found, last)
            if not sound.all():
                new, row = self._settle(under_way, k, sound & self._judge(under_way), last)
                found = self._evaluate(new)
        vars(self).update(
            new, rows=[*self.rows, row | spent | found]
        )  # one call, which no interrupt can split

    def _exchange(
        self,
        phase: Phase,
        number: int,
        message: Tree,
        under_way: _Round,
        k: int,
        plan: Plan,
        ledger: Ledger,
    ) -> None:
        """Clients work in chunks, their uploads are averaged, the server moves."""
        who, steps = plan.answered.numpy(), phase.steps(plan.steps).numpy()
        weight = self.p[who] / self.p[who].sum()
        mean: Tree = None
        loss: Tensor | None = None
        start, buffers = under_way.buffers, under_way.buffers
        for part in self._chunks(who):
            clients = who[part]
            local = Chunk(
                self.gather, self.rounds, k, clients, under_way.position[clients], steps[part]
            )
            w = weight[part].to(self.device, self.dtype)
            self.f.buffers = start.expand(len(clients), *start.shape).clone()
            reply = phase.client(
                self.f, message, _gathered([under_way.own[i] for i in clients]), local
            )
            sent, upload = self.uplink(
                phase, number, clients.tolist(), reply.upload, under_way.errors
            )
            ledger.upload((sent, self.f.buffers), len(clients))
            part_mean = tree_map(lambda leaf, w=w: torch.tensordot(w, leaf, 1), upload)
            mean = part_mean if mean is None else tree_map(torch.add, mean, part_mean)
            if reply.loss is not None:
                part_loss = torch.tensordot(w.double(), reply.loss.double(), 1)
                loss = part_loss if loss is None else loss + part_loss
            self._same_state(reply.own)
            for m, i in enumerate(clients):
                under_way.own[i] = tree_map(lambda leaf, m=m: part_of(leaf, m), reply.own)
            buffers = buffers + torch.tensordot(
                w, self.f.buffers - start, 1
            )  # a constant stays, to the bit
        taken = float((weight * torch.from_numpy(steps)).sum())
        cohort = Cohort(k, len(who), plan.answered, float(self.p[who].sum()), taken)
        under_way.server = phase.server(under_way.server, mean, cohort)
        under_way.buffers = buffers
        under_way.position[who] += steps
        under_way.loss = under_way.loss if loss is None else loss

    def _same_state(self, own: Tree) -> None:
        """A client must keep what `client_init` gave it: a resumed run could not read anything
        else."""
        names = [[name for name, _ in named_leaves(tree, "own")] for tree in (self.own[0], own)]
        if names[0] != names[1]:
            kind = type(self.algorithm).__name__
            raise InputError(
                f"{kind}: a client keeps {names[1]}, but client_init gave it {names[0]}; they must "
                f"agree"
            )

    def _first(self, under_way: _Round) -> Tensor:
        """The loss of the first round that was answered, [trials]; NaN before it."""
        loss = self._all(torch.nan) if under_way.loss is None else under_way.loss
        return torch.where(self.first_loss.isnan(), loss, self.first_loss)

    def _limit(self, first: Tensor) -> Tensor:
        """The largest loss that is no explosion, [trials].

        A skewed first cohort may fit badly or, by chance, well: the loss of the initial model
        counts as well.
        """
        start = self.start_loss.abs().nan_to_num(0.0).clamp(min=SMALL)
        rise = self.algorithm.bears(self.server)
        limit: Tensor = rise * torch.maximum(
            start, torch.where(first.abs() <= rise * start, first.abs(), start)
        )
        return limit

    def _judge(self, under_way: _Round) -> Tensor:
        """Which trials the round has left with a finite model and a loss that is no explosion,
        [trials]."""
        finite = self.models(under_way.server, under_way.own).isfinite().all(-1)
        finite = finite.all(0) if finite.dim() > 1 else finite
        if under_way.loss is None:
            return finite
        return finite & _within(under_way.loss, self._limit(self._first(under_way)))

    def _judge_evaluated(self, new: dict[str, Any], found: dict[str, Tensor], last: bool) -> Tensor:
        """Which trials' new models an evaluation finds sound, [trials]: a test loss must be a
        number.

        The last model, which no later round judges, must not be an explosion either. A large test
        loss may belong to a good fit, so that it is one only if the loss over all training rows is
        as large.
        """
        tested, limit = found["test_loss"], self._limit(new["first_loss"])
        judged = (self.ended < 0) & (new["diverged"] == 0)
        sound = ~judged | tested.isfinite() if len(self.fed.test_rows) else torch.ones_like(judged)
        doubtful = judged & sound & ~_within(tested, limit)
        if not last or not doubtful.any():
            return sound
        trained = found.get("full_train_loss")
        if trained is None:
            trained = self._full_train_loss(self.models(new["server"], new["own"]), new["buffers"])
        bounded: Tensor = sound & (~doubtful | _within(trained, limit))
        return bounded

    def _settle(
        self, under_way: _Round, k: int, sound: Tensor, last: bool
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The new state where a trial is alive, and the row of the trace.

        A trial whose round is not sound goes back to where its algorithm says; where that cannot be
        it has diverged. A diverged or stopped trial is frozen, its neighbours go on.
        """
        running = self.ended < 0
        alive, lost = running & sound, running & ~sound

        def keep(old: Tensor, new: Tensor) -> Tensor:
            return _where(alive, new, old)

        server, own, errors = (
            tree_map(keep, self.server, under_way.server),
            under_way.own,
            under_way.errors,
        )
        undone = torch.zeros_like(lost)
        if not alive.all():
            own = [tree_map(keep, *pair) for pair in zip(self.own, own, strict=True)]
            errors = {
                name: keep(self.errors.get(name, torch.zeros_like(e)), e)
                for name, e in errors.items()
            }
            hopeful = self.start_loss.isfinite() & ~(
                self.first_loss.isnan() & last
            )  # else no round was ever sound
            server, undone = self._undo(server, lost & hopeful, k)
        died = lost & ~undone
        new = {
            "k": k,
            "server": server,
            "own": own,
            "errors": errors,
            "position": under_way.position,
            "buffers": keep(self.buffers, under_way.buffers),
            "first_loss": torch.where(undone, self.first_loss, self._first(under_way)),
            "diverged": torch.where(died, k, self.diverged),
            "ended": torch.where(died, k, self.ended),
        }
        loss = self._all(torch.nan) if under_way.loss is None else under_way.loss
        row = {"train_loss": loss + torch.where(running & ~undone, 0.0, torch.nan)}
        moved = (
            under_way.server is not self.server
        )  # a round that nobody answered has nothing to tell
        nan = torch.where((alive | undone) & moved, 0.0, torch.nan)
        return new, row | {
            n: v.double() + nan for n, v in self.algorithm.diagnostics(server).items()
        }

    def _undo(self, server: Any, lost: Tensor, k: int) -> tuple[Any, Tensor]:
        """The state where the algorithm goes back with the trials that are lost, and with which of
        them it can."""
        found = self.algorithm.undo(self.server) if lost.any() else None
        if found is None:
            return server, torch.zeros_like(lost)
        back, possible = found
        undone = lost & possible
        log.info(
            "round %d exploded: undone in %d of %d trial(s)", k, int(undone.sum()), self.trials
        )
        return tree_map(lambda new, old: _where(undone, new, old), back, server), undone

    def _chunks(self, who: Ints) -> Iterator[Ints]:
        """Positions in `who`, clients of similar size together, as many at a time as the budget
        holds."""
        if not self.f.stacks or self.algorithm.alone:
            yield from np.arange(len(who))[:, None]
            return
        order = np.lexsort((who, -self.rounds.width[who]))
        sample = self.fed.x[0].numel()
        item = torch.finfo(self.dtype).bits // 8
        state = 4 * self.trials * sum(self.f.layout.sizes) * item
        start = 0
        while start < len(order):
            widths = self.rounds.width[who[order[start:]]]
            rows = int(widths[0]) * sample * (item + self.fed.x.element_size())
            size = max(1, BUDGET[self.device.type] // (rows + state))
            if self.device.type == "cpu":  # a GPU wants few large chunks, a CPU little padding
                size = min(size, max(MIN_CHUNK, int((widths >= 0.8 * widths[0]).sum())))
            yield order[start : start + size]
            start += size

    # --- evaluation and trace
    # ----------------------------------------------------------------------------------------
    def _evaluate(self, new: dict[str, Any]) -> dict[str, Tensor]:
        """Metrics of a new state; a trial that reaches `stop_at` is marked in it as ended."""
        x, buffers = self.models(new["server"], new["own"]), new["buffers"]
        dead = new["diverged"] > 0
        nan = torch.where(dead, torch.nan, 0.0)
        found = self.evaluator(x, buffers, self._rows("test"))
        row = {f"test_{name}": value + nan for name, value in found.items()}
        row["test_accuracy"] = torch.where(dead, 0.0, row["test_accuracy"])  # no answer is right
        if self.settings.eval_train:
            row["full_train_loss"] = self._full_train_loss(x, buffers) + nan
        if self.settings.stop_at is not None:
            reached = (new["ended"] < 0) & (row["test_accuracy"] >= self.settings.stop_at)
            new["ended"] = torch.where(reached, new["k"], new["ended"])
        return row

    def _full_train_loss(self, x: Tensor, buffers: Tensor) -> Tensor:
        """f(x) = sum p_i f_i(x) over all training rows, with the penalty."""
        squares = x.double().square().sum(-1)
        penalty = (
            self.settings.l2
            / 2
            * (squares if x.dim() == 2 else torch.tensordot(self.p.to(x.device), squares, 1))
        )
        if self.job.fed.weights is None:
            return self.evaluator.loss(x, buffers, self._rows("train")) + penalty
        points = x.expand(self.fed.clients, *x.shape[-2:])
        each = [
            self.evaluator.loss(points[i], buffers, self.fed.rows_of(i))
            for i in range(self.fed.clients)
        ]
        total: Tensor = torch.tensordot(self.p.to(x.device), torch.stack(each), 1)
        return total + penalty

    def _all(self, value: float) -> Tensor:
        return torch.full((self.trials,), float(value), dtype=torch.float64, device=self.device)

    @property
    def finished(self) -> bool:
        """Whether every trial has diverged or reached `stop_at`."""
        return bool((self.ended >= 0).all())

    # --- checkpoints
    # -------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        """Everything a later process needs to go on, as named tensors."""
        out = {n: leaf for name in STATE for n, leaf in named_leaves(getattr(self, name), name)}
        out |= {f"errors.{name}": e for name, e in self.errors.items()}
        out["position"] = torch.from_numpy(self.position)
        out["k"] = torch.tensor(self.k)
        columns = self.columns()
        out |= {f"rows.{name}": column for name, column in columns.items()}
        out["contents"] = of_text(
            json.dumps({"rows": list(columns), "errors": list(self.errors)})
        )  # in their order
        return out

    def columns(self) -> dict[str, Tensor]:
        """The rows so far as columns [rows, trials]; what a row does not have is NaN.

        Columns are kept, and rows that came since the last call are put below them: with a
        checkpoint in every round the work would otherwise grow with the square of the rounds.
        """
        old = self._columns
        height = len(next(iter(old.values()), ()))
        new = self.rows[height:]
        if not new:
            return dict(old)
        nan = self._all(torch.nan)
        grown = {}
        for name in dict.fromkeys((*old, *(name for row in new for name in row))):
            above = old.get(name, nan.expand(height, -1))
            below = torch.stack([row.get(name, nan) for row in new])
            grown[name] = torch.cat((above, below))
        self._columns = grown  # at once, so that an interrupt leaves columns of one height
        return dict(grown)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `state()`; the caller has checked that it belongs to the same settings.

        Nothing is used before shapes, types and numbers are found to be those of this run.
        """
        read = Reader(saved, self.device)
        k = read.count("k")
        columns, lossy = read.contents("contents", "rows", "errors")
        rows = {n: read.tensor(f"rows.{n}", (k + 1, self.trials), torch.float64) for n in columns}
        lost = torch.empty(self.trials, self.uplink.width, dtype=self.dtype)
        errors = {n: read.like(f"errors.{n}", lost) for n in lossy}
        position = read.tensor("position", (self.fed.clients,), torch.int64)
        state = {name: read.tree(name, getattr(self, name)) for name in STATE}
        models = self.models(state["server"], state["own"])
        if not models.isfinite().all():
            raise Damaged("the checkpoint's model holds NaN or infinite numbers")
        ended, diverged = state["ended"], state["diverged"]
        counts = (position >= 0, ended >= -1, ended <= k, diverged >= 0, diverged <= k)
        if not all(bool(right.all()) for right in counts):
            raise Damaged(f"the checkpoint counts rounds or steps that cannot be after {k} rounds")
        vars(self).update(state, own=list(state["own"]), errors=errors, k=k)
        self.position = position.cpu().numpy().copy()
        self.rows = [{n: column[i] for n, column in rows.items()} for i in range(k + 1)]
        self._columns = rows


def _where(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """A leaf [trials, ...] of the new state in the trials of the mask [trials], of the old one in
    the others."""
    return new if new is old else torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old)


def _within(loss: Tensor, limit: Tensor) -> Tensor:
    """Whether a loss is a number within the limit."""
    return loss.isfinite() & (loss.abs() <= limit)


def _gathered(own: Sequence[Tree]) -> Tree:
    """The states of some clients as one tree, leaves [clients, trials, ...]."""
    if len(own) == 1:
        return tree_map(lambda leaf: leaf.unsqueeze(0), own[0])  # no copy: it may be a large matrix
    return tree_map(lambda *each: torch.stack(each), *own)


@dataclass
class _Round:
    """State under way in one round."""

    server: Any
    own: list[Tree]
    errors: Errors
    buffers: Tensor
    position: Ints
    loss: Tensor | None = None


@contextmanager
def _threads(simulation: Trials) -> Iterator[None]:
    """One thread for the small products of small models, which others would wait for more than work
    at; unless the user has set OMP_NUM_THREADS."""
    before = torch.get_num_threads()
    small = (
        simulation.f.stacks
        and sum(simulation.f.layout.sizes) <= ONE_THREAD[simulation.algorithm.alone]
    )
    if small and simulation.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _convolutions(module: nn.Module) -> Iterator[None]:
    """Without oneDNN where every convolution has one channel in and one out: for these it takes up
    to five times as long as torch's own."""
    sizes = [m.in_channels * m.out_channels for m in module.modules() if isinstance(m, nn.Conv2d)]
    if not sizes or max(sizes) > 1:
        yield
        return
    before = torch._C._get_mkldnn_enabled()  # the public switch also touches others, and warns
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def run(simulation: Trials, until: int, after: Callable[[Trials], None] = lambda _: None) -> None:
    """Advance to round `until`, calling `after` behind each round.

    It ends early when no trial is left. The last round that the settings ask for is evaluated in
    any case.
    """
    rounds = simulation.settings.rounds
    with torch.no_grad(), _threads(simulation), _convolutions(simulation.job.module):
        while simulation.k < until and not simulation.finished:
            simulation.round(last=simulation.k + 1 == rounds)
            after(simulation)
