"""Runs of FedSSO seen round by round: values, gradients and the matrix B, all from the engine's own
objects.

k    round, x_1 is the initial model
g    the averaged gradient (x_k - v_k) / (alpha_k tau)
s    x_k - x_{k-1}
y    g_k - g_{k-1}
B    estimate of the Hessian
cur  y^T s, or what the curvature rule puts in its place
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import log, nan
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithm import Batch
from ...algorithm.schedule import at
from ...algorithms import FedSSO
from ...algorithms.fedsso import State
from ...data import Federation
from ...engine.simulate import Trials
from ...engine.simulate import run as advance
from ...experiment.stepper import Simulation
from ...maths import quasi_newton as qn
from ...objective import Backend
from ...support.linalg import gram
from ...support.rng import generator

CLIENTS, TAU, ROWS = 4, 4, 60  # rows that differ, of each client
Array = NDArray[np.float64]


class Effort(NamedTuple):
    """How long and how often the runs go."""

    rounds: int
    seeds: tuple[int, ...]


class Fact(NamedTuple):
    """One measured number, a row of theory.csv; where a seed or a round makes no sense it is None."""

    claim: str
    quantity: str
    seed: int | None
    k: float | None
    value: float


class Section(NamedTuple):
    """One claim of the paper: what it says, what was done, what came out."""

    title: str
    says: str
    did: str
    rows: Sequence[tuple[str, str]]  # quantity, measured
    verdict: str
    facts: Sequence[Fact]


class Problem(NamedTuple):
    """A function f, as rows to draw from, the same rows once, and options of `simulate`."""

    fed: Federation
    rows: Federation
    options: Mapping[str, Any]

    def simulation(self, record: FedSSO, rounds: int, seed: int) -> Simulation:
        """A run that is about to begin."""
        more = {
            "rounds": rounds,
            "eval_every": rounds,
            "dtype": "float64",
            "local_steps": TAU,
            "seed": seed,
        }
        return Simulation(self.fed, "linear", record, **{**self.options, **more})

    def smoothness(self, bend: float) -> float:
        """L, for a loss whose second derivative in the output is at most `bend`."""
        largest = max(float(torch.linalg.matrix_norm(x, 2)) ** 2 / ROWS for x in self._clients())
        return float(self.options["l2"]) + bend * largest

    def variance(self) -> float:
        """A bound of the variance of one row's gradient, for a loss whose slope in the output is at
        most 1."""
        return max(float(x.square().sum(1).mean()) for x in self._clients())

    def _clients(self) -> list[Tensor]:
        return [self.rows.x[self.rows.rows_of(i)] for i in range(CLIENTS)]


def problem(
    loss: str | Callable[..., Tensor],
    dim: int,
    batch: int | None,
    effort: Effort,
    *,
    scale: float,
    l2: float,
    start: float,
) -> Problem:
    """Four clients with labels 0/1 of a logistic model of their own and rows in a ball of radius
    `scale`.

    The initial model has length `start`, all its entries are equal.

    Each row is there so often that no run gets through them all: mini-batches are then as good as
    independent draws, while the noise of a full pass over the rows cancels.
    """
    copies = 1 if batch is None else 1 + 2 * effort.rounds * TAU * batch // ROWS
    x = torch.full((dim,), start / dim**0.5, dtype=torch.float64)
    options = {"loss": loss, "batch_size": batch, "l2": l2, "init": x, "device": "cpu"}
    return Problem(labelled(dim, scale, copies), labelled(dim, scale, 1), options)


def labelled(dim: int, scale: float, copies: int) -> Federation:
    """The rows of `problem`."""
    draw = generator(0, "theory", f"rows {dim}")

    def client() -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, dim, generator=draw, dtype=torch.float64)
        x = scale * x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
        w = 3 * torch.randn(dim, generator=draw, dtype=torch.float64)
        y = torch.rand(ROWS, generator=draw, dtype=torch.float64) < torch.sigmoid(x @ w)
        return x.repeat(copies, 1), y.double().repeat(copies)

    return Federation.from_clients([client() for _ in range(CLIENTS)], test_fraction=0)


def whole(problem: Problem, simulation: Trials) -> tuple[Backend, Batch]:
    """f and the batch of all rows; the clients are of equal size, so it needs no weights."""
    fed = problem.rows
    x, y = fed.x[fed.train_rows][None], fed.y[fed.train_rows][None]
    return simulation.f, Batch(x, y, x.new_full(y.shape, 1 / y.shape[1]))


def minimiser(problem: Problem) -> tuple[Tensor, float]:
    """x* and f* of a strongly convex f, by Newton's method."""
    simulation = problem.simulation(FedSSO(), 1, 0)
    f, batch = whole(problem, simulation)
    x = simulation.server.x[None].clone()
    for _ in range(30):
        x = x - torch.linalg.solve(f.hessian(x, batch), f.value_and_grad(x, batch)[1])
    return x[0, 0], float(f.value(x, batch))


# ---- round by round ----


class Round(NamedTuple):
    """Round k; NaN from `grow` on where no pair entered B."""

    k: float
    f: float  # f(x_k)
    square: float  # ||grad f(x_k)||^2
    low: float  # smallest and largest eigenvalue of B_k^-1
    high: float
    bent: float  # grad f(x_k)^T B_k^-1 g_k
    plain: float  # grad f(x_k)^T g_k
    overridden: float
    grow: float  # log det B_k - log det B_{k-1}
    exact: float  # log of (y^T s)^2 / (cur s^T B s)
    powell: float  # log of cur / (s^T B s), the paper's formula


Seen = dict[str, Array]
"""The fields of `Round` as columns over the rounds of a run."""


def watch(problem: Problem, record: FedSSO, rounds: int, seed: int) -> Seen:
    """A run with form="bfgs-dense", guard="none"; shorter than asked for if it diverges."""
    simulation = problem.simulation(record, rounds, seed)
    f, batch = whole(problem, simulation)
    seen: list[Round] = []
    states: list[State] = [simulation.server]

    def after(now: Trials) -> None:
        if not now.finished:
            states.append(now.server)
            seen.append(_round(f, batch, record, states[-2], now))
            del states[0]

    advance(simulation, rounds, after)
    return {name: np.array([getattr(row, name) for row in seen]) for name in Round._fields}


def _round(f: Backend, batch: Batch, record: FedSSO, old: State, now: Trials) -> Round:
    new: State = now.server
    value, grad = f.value_and_grad(old.x[None], batch)
    grad = grad[0, 0]
    values = torch.linalg.eigvalsh(new.curvature.matrix[0])
    ends = (
        1 / float(values[-1]),
        1 / max(float(values[0]), 1e-300),
    )  # rounding may make a tiny one negative
    bent = float(grad @ new.s[0]) / -float(at(record.eta, now.k))
    return Round(
        now.k,
        float(value),
        float(grad @ grad),
        *ends,
        bent,
        float(grad @ new.g[0]),
        *_pair(record, old, now),
    )


def _pair(record: FedSSO, old: State, now: Trials) -> tuple[float, float, float, float]:
    """Whether cur was overridden, and the change of log det B beside the two formulas for it."""
    new: State = now.server
    verdict = qn.judge(gram(old.s, new.g - old.g), record.lam, record.Lam)
    reset = record.R is not None and now.k % record.R == 0  # it drops the pair
    if reset or not bool(verdict.accept):
        return 0.0, nan, nan, nan
    B, s = old.curvature.matrix[0], old.s[0]
    grow = float(torch.linalg.slogdet(new.curvature.matrix[0])[1] - torch.linalg.slogdet(B)[1])
    sBs, ys, cur = log(float(s @ B @ s)), log(abs(float(verdict.rho))), log(float(verdict.cur))
    return float(verdict.overridden), grow, 2 * ys - cur - sBs, cur - sBs


# ---- curves ----


def binned(k: Array, value: Array, start: float = 1.0, bins: int = 40) -> tuple[Array, Array]:
    """Means of k and value over bins of equal width in log k, from k = start on."""
    edges = np.geomspace(start, k[-1] * 1.0001, bins + 1)
    parts = [part for a, b in pairwise(edges) if (part := (k >= a) & (k < b)).any()]
    return np.array([k[part].mean() for part in parts]), np.array(
        [value[part].mean() for part in parts]
    )


def slope(k: Array, value: Array) -> float:
    """Slope of log value on log k over the last decade."""
    x, y = binned(k, value, k[-1] / 10, 20)
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def curve(claim: str, quantity: str, seed: int | None, k: Array, value: Array) -> list[Fact]:
    """A curve as facts."""
    return [
        Fact(claim, quantity, seed, float(a), float(b))
        for a, b in zip(*binned(k, value), strict=True)
    ]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and sample deviation over seeds; a dash where no run is left."""
    if not values:
        return "–"
    sd = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{sd}"


def within(runs: Sequence[Seen]) -> str:
    """The range of the eigenvalues of B^-1 over runs."""
    return f"{min(run['low'].min() for run in runs):.3g} to {max(run['high'].max() for run in runs):.3g}"
