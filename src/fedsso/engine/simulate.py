"""The simulator: clients and hyper-parameter trials as leading axes, in chunks that fit a memory budget.

One `Simulation` runs the trials of one group (records that stack) under one seed. Its state is a handful of trees;
`round()` replaces them at once, so an interrupted round leaves nothing half-done. Two buffers are written in place
and named so: the gather buffers of `gather.py`, and the curvature store of FedSSO.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithm import Algorithm, Cohort, Phase
from ..data import Federation
from ..losses import RowLoss
from ..objective import buffers_of, objective, ravel
from ..tree import Tree, leaves, named_leaves, nbytes, stack, tree_map
from .evaluate import Evaluator
from .gather import Chunk, Gather
from .metrics import Metric
from .rounds import Ints, Protocol, Rounds

BLOW_UP = 1e3  # a loss this many times the first one counts as divergence
BUDGET = {"cpu": 24 << 20, "cuda": 8 << 30}  # bytes of a chunk of clients
MIN_CHUNK = 8  # clients, however ragged
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """Everything about a run but its algorithm."""

    fed: Federation
    module: nn.Module  # the initial model
    loss: RowLoss
    metrics: dict[str, Metric]
    protocol: Protocol
    eval_every: int = 1
    eval_train: bool = False
    stop_at: float | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    engine: str = "auto"


class Simulation:
    """Trials of one algorithm on one federation, advanced round by round."""

    def __init__(self, job: Job, records: Sequence[Algorithm]) -> None:
        self.job, self.trials = job, len(records)
        self.fed = job.fed.to(job.device)
        module = job.module.to(job.device, job.dtype)
        self.f, self.reason = objective(module, job.loss, job.engine, job.device, job.fed.sample_shape)
        self.algorithm = stack(records, job.dtype, job.device)
        self.rounds = Rounds(job.fed, job.protocol)
        self.gather = Gather(self.fed, job.dtype)
        self.evaluator = Evaluator(self.f, self.fed, Gather(self.fed, job.dtype), job.metrics)
        self.p = job.fed.p.cpu()
        x = ravel(module).expand(self.trials, -1).contiguous()
        self.server: Any = self.algorithm.server_init(x)
        own = self.algorithm.client_init(x)
        n = job.fed.clients
        self.own: Tree = tree_map(lambda leaf: leaf.expand(n, *leaf.shape).contiguous(), own)
        self.buffers = buffers_of(module).to(job.device, job.dtype).expand(self.trials, -1).contiguous()
        self.position: Ints = np.zeros(n, np.int64)
        self.ended = torch.full((self.trials,), -1, device=job.device)  # round of divergence or stop; -1: running
        self.diverged = torch.zeros_like(self.ended)  # round of divergence; 0: none
        self.first_loss = torch.full((self.trials,), torch.nan, dtype=torch.float64, device=job.device)
        self.k = 0
        self.rows: list[dict[str, Tensor]] = [self._evaluate(vars(self))]
        self.start_loss = self.rows[0]["test_loss"]
        if not len(self.fed.test_rows):
            self.start_loss = self.evaluator.loss(x, self.buffers, self.fed.train_rows)

    # --- one round ---------------------------------------------------------------------------------------------------
    def round(self, last: bool = False) -> None:
        """One communication round; `last` forces an evaluation. Nothing changes until all of it is done."""
        began = time.perf_counter()
        k, algorithm = self.k + 1, self.algorithm
        plan = self.rounds.plan(k)
        who = plan.answered.numpy()
        steps = algorithm.local_steps(plan.steps).numpy()
        under_way = _Round(self.server, self.own, self.buffers)
        down = up = 0
        for phase in algorithm.phases:
            message = phase.broadcast(under_way.server)
            down += (nbytes(message, self.trials) + self._buffer_bytes) * len(plan.chosen)
            if self.p[who].sum() > 0:  # a cohort without weight moves nothing, as one that nobody answers
                up += self._exchange(phase, message, under_way, k, who, steps)
        new, row = self._settle(under_way, k)
        new["position"] = self.position.copy()
        new["position"][who] += steps
        row |= {"bytes_up": self._all(up), "bytes_down": self._all(down)}
        row["seconds"] = self._all(time.perf_counter() - began)
        if last or k % self.job.eval_every == 0:
            row |= self._evaluate(new)
        vars(self).update(new, rows=[*self.rows, row])  # one call, which no interrupt can split

    @property
    def _buffer_bytes(self) -> int:
        return nbytes(self.buffers, self.trials)

    def _exchange(self, phase: Phase, message: Tree, under_way: _Round, k: int, who: Ints, steps: Ints) -> int:
        """Clients work in chunks, their uploads are averaged, the server moves; returns the bytes sent up."""
        weight = self.p[who] / self.p[who].sum()
        mean: Tree = None
        loss: Tensor | None = None
        buffers = self.buffers
        sent = 0
        for part in self._chunks(who):
            clients = who[part]
            local = Chunk(self.gather, self.rounds, k, clients, self.position[clients], steps[part])
            w = weight[part].to(self.job.device, self.job.dtype)
            index = torch.from_numpy(clients).to(self.job.device)
            own = tree_map(lambda leaf, i=index: leaf[i], under_way.own)
            self.f.buffers = self.buffers.expand(len(clients), *self.buffers.shape).clone()
            reply = phase.client(self.f, message, own, local)
            sent += (nbytes(reply.upload, len(clients) * self.trials) + self._buffer_bytes) * len(clients)
            part_mean = tree_map(lambda leaf, w=w: torch.tensordot(w, leaf, 1), reply.upload)
            mean = part_mean if mean is None else tree_map(torch.add, mean, part_mean)
            if reply.loss is not None:
                part_loss = torch.tensordot(w.double(), reply.loss.double(), 1)
                loss = part_loss if loss is None else loss + part_loss
            if len(list(leaves(reply.own))):
                under_way.own = tree_map(lambda old, new, i=index: old.index_copy(0, i, new), under_way.own, reply.own)
            buffers = buffers + torch.tensordot(w, self.f.buffers - self.buffers, 1)  # a constant stays, to the bit
        taken = float((weight * torch.from_numpy(steps)).sum())
        cohort = Cohort(k, len(who), torch.from_numpy(who), float(self.p[who].sum()), taken)
        under_way.server = phase.server(under_way.server, mean, cohort)
        under_way.buffers = buffers
        under_way.loss = under_way.loss if loss is None else loss
        return sent

    def _settle(self, under_way: _Round, k: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The new state where a trial is alive, and the row of the trace.

        A diverged or stopped trial is frozen, its neighbours go on.
        """
        loss = self._all(torch.nan) if under_way.loss is None else under_way.loss
        first = torch.where(self.first_loss.isnan(), loss, self.first_loss)
        finite = self.algorithm.model(under_way.server).isfinite().all(-1)
        if under_way.loss is not None:
            # a skewed first cohort may fit by chance, so the loss of the initial model counts as well
            bound = torch.maximum(first.abs(), self.start_loss.abs().nan_to_num(0.0))
            finite &= loss.isfinite() & (loss.abs() <= BLOW_UP * bound.clamp(min=1e-30))
        running = self.ended < 0
        died, alive = running & ~finite, running & finite

        def keep(old: Tensor, new: Tensor) -> Tensor:
            return new if new is old else torch.where(alive.view(-1, *[1] * (new.dim() - 1)), new, old)

        server = tree_map(keep, self.server, under_way.server)
        new = {
            "k": k,
            "server": server,
            "own": under_way.own,
            "buffers": keep(self.buffers, under_way.buffers),
            "first_loss": first,
            "diverged": torch.where(died, k, self.diverged),
            "ended": torch.where(died, k, self.ended),
        }
        row = {"train_loss": loss + torch.where(running, 0.0, torch.nan)}
        moved = under_way.server is not self.server  # a round that nobody answered has nothing to tell
        nan = torch.where(alive & moved, 0.0, torch.nan)
        return new, row | {n: v.double() + nan for n, v in self.algorithm.diagnostics(server).items()}

    def _chunks(self, who: Ints) -> Iterator[Ints]:
        """Positions in `who`, clients of similar size together, as many at a time as the budget holds."""
        if not self.f.stacks:
            yield from np.arange(len(who))[:, None]
            return
        order = np.lexsort((who, -self.rounds.width[who]))
        sample = self.fed.x[0].numel()
        item = torch.finfo(self.job.dtype).bits // 8
        state = 4 * self.trials * sum(self.f.layout.sizes) * item
        start = 0
        while start < len(order):
            widths = self.rounds.width[who[order[start:]]]
            rows = int(widths[0]) * sample * (item + self.fed.x.element_size())
            size = max(1, BUDGET[self.job.device.type] // (rows + state))
            if self.job.device.type == "cpu":  # a GPU wants few large chunks, a CPU little padding
                size = min(size, max(MIN_CHUNK, int((widths >= 0.8 * widths[0]).sum())))
            yield order[start : start + size]
            start += size

    # --- evaluation and trace ----------------------------------------------------------------------------------------
    def _evaluate(self, new: dict[str, Any]) -> dict[str, Tensor]:
        """Metrics of a new state; a trial that reaches `stop_at` is marked in it as ended."""
        x, buffers = self.algorithm.model(new["server"]), new["buffers"]
        dead = new["diverged"] > 0
        nan = torch.where(dead, torch.nan, 0.0)
        found = self.evaluator(x, buffers, self.fed.test_rows)
        row = {f"test_{name}": value + nan for name, value in found.items()}
        row["test_accuracy"] = torch.where(dead, 0.0, row["test_accuracy"])  # no answer is right
        if self.job.eval_train:
            row["full_train_loss"] = self._full_train_loss(x, buffers) + nan
        if self.job.stop_at is not None:
            reached = (new["ended"] < 0) & (row["test_accuracy"] >= self.job.stop_at)
            new["ended"] = torch.where(reached, new["k"], new["ended"])
        return row

    def _full_train_loss(self, x: Tensor, buffers: Tensor) -> Tensor:
        """f(x) = sum p_i f_i(x) over all training rows."""
        if self.job.fed.weights is None:
            return self.evaluator.loss(x, buffers, self.fed.train_rows)
        each = [self.evaluator.loss(x, buffers, self.fed.rows_of(i)) for i in range(self.fed.clients)]
        total: Tensor = torch.tensordot(self.p.to(x.device), torch.stack(each), 1)
        return total

    def _all(self, value: float) -> Tensor:
        return torch.full((self.trials,), float(value), dtype=torch.float64, device=self.job.device)

    @property
    def finished(self) -> bool:
        """Whether every trial has diverged or reached `stop_at`."""
        return bool((self.ended >= 0).all())

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        """Everything a later process needs to go on, as named tensors."""
        names = ("server", "own", "buffers", "ended", "diverged", "first_loss")
        out = {n: leaf for name in names for n, leaf in named_leaves(getattr(self, name), name)}
        out["position"] = torch.from_numpy(self.position)
        out["k"] = torch.tensor(self.k)
        for name in dict.fromkeys(n for row in self.rows for n in row):
            column = [row.get(name, self._all(torch.nan)) for row in self.rows]
            out[f"rows.{name}"] = torch.stack(column)
        return out

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Go on from `state()`; the caller has checked that it belongs to the same settings."""

        def load(tree: Tree, name: str) -> Tree:
            parts = iter([saved[n].to(self.job.device) for n, _ in named_leaves(tree, name)])
            return tree_map(lambda _: next(parts), tree)

        for name in ("server", "own", "buffers", "ended", "diverged", "first_loss"):
            setattr(self, name, load(getattr(self, name), name))
        self.position = saved["position"].numpy().copy()
        self.k = int(saved["k"])
        columns = {n.removeprefix("rows."): v for n, v in saved.items() if n.startswith("rows.")}
        self.rows = [{n: v[i].to(self.job.device) for n, v in columns.items()} for i in range(self.k + 1)]


@dataclass
class _Round:
    """State under way in one round."""

    server: Any
    own: Tree
    buffers: Tensor
    loss: Tensor | None = None


def run(simulation: Simulation, rounds: int, after: Callable[[Simulation], None] = lambda _: None) -> None:
    """Advance to round `rounds`, calling `after` behind each round; ends early when no trial is left."""
    with torch.no_grad():
        while simulation.k < rounds and not simulation.finished:
            simulation.round(last=simulation.k + 1 == rounds)
            after(simulation)
