"""Runs of FedSSO seen round by round: values, gradients and the matrix B.

Everything is read from the simulator's own objects, after each round. Letters are the paper's:

k    round; x_1 is the initial model
g    averaged gradient, (x_k - v_k) / (alpha_k tau)
s    step of the server, x_k - x_{k-1}
y    change of the averaged gradient, g_k - g_{k-1}
B    estimate of the Hessian
cur  y^T s, or what the curvature rule puts in its place
"""

from __future__ import annotations

from math import log, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...algorithm import Batch
from ...algorithm.schedule import at
from ...algorithms import FedSSO
from ...data.federation import Federation
from ...engine.simulate import run as advance
from ...maths import quasi_newton as qn
from ...support.linalg import gram
from ...support.rng import generator
from .claims import Array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ...algorithms.fedsso import State
    from ...engine.simulate import Trials
    from ...experiment.stepper import Simulation
    from ...objective import Backend
    from .claims import Effort

CLIENTS = 4
"""The number of clients, the paper's N."""
TAU = 4
"""The local steps of a client in a round, the paper's τ."""
ROWS = 60
"""How many different rows each client has."""
NEWTON_STEPS = 30
"""The steps of Newton's method, more than enough from any start used here."""
TINY = 1e-300
"""The least eigenvalue of B that is taken for true. It keeps the inverse finite."""


# ---- the functions that are minimised ----


class Problem(NamedTuple):
    """A function f to minimise, given by rows of data and a loss."""

    fed: Federation
    """The rows that mini-batches are drawn from, with copies."""
    rows: Federation
    """The same rows without copies, which define f."""
    options: Mapping[str, Any]
    """Options of `simulate`: the loss, the penalty, the batch size and the initial model."""

    def simulation(
        self,
        record: FedSSO,
        rounds: int,
        seed: int,
    ) -> Simulation:
        """A run of `record` on this problem that is about to begin, in float64.

        Args:
            record: The algorithm.
            rounds: How many rounds it will have. The model is evaluated after the last one alone.
            seed: The seed of the mini-batches. The initial model does not depend on it.
        """
        from ...experiment.stepper import Simulation

        more = {
            "rounds": rounds,
            "eval_every": rounds,
            "dtype": "float64",
            "local_steps": TAU,
            "seed": seed,
        }
        return Simulation(self.fed, "linear", record, **{**self.options, **more})

    def smoothness(self, bend: float) -> float:
        """The paper's L, a Lipschitz constant of every client's gradient.

        `bend` bounds the second derivative of the loss in the model's output.
        """
        norms = [float(torch.linalg.matrix_norm(x, 2)) for x in self._clients()]
        largest = max(norm**2 / ROWS for norm in norms)
        return float(self.options["l2"]) + bend * largest

    def variance(self) -> float:
        """A bound of the variance of one row's gradient.

        The loss must have a slope of at most 1 in the model's output.
        """
        return max(float(x.square().sum(1).mean()) for x in self._clients())

    def _clients(self) -> list[Tensor]:
        """The inputs of each client, [ROWS, d]."""
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
    """Four clients, each with labels 0/1 from a logistic model of its own.

    Args:
        loss: The name of a loss, or a function of outputs and targets.
        dim: The number d of parameters. There is no intercept.
        batch: The rows of a mini-batch. None: all rows, so gradients are exact.
        effort: How many rounds there will be at most.
        scale: The rows lie in a ball of this radius.
        l2: The strength of the penalty.
        start: The length of the initial model, whose entries are all equal.

    Mini-batches should be independent draws, as in the theorems. The simulator goes through all
    rows before it draws one again, and then the noise of the batches would cancel. So each row is
    copied as often as needed for no run to get through all of them.
    """
    copies = 1
    if batch is not None:
        copies += 2 * effort.rounds * TAU * batch // ROWS
    x = torch.full((dim,), start / dim**0.5, dtype=torch.float64)
    options = {"loss": loss, "batch_size": batch, "l2": l2, "init": x, "device": "cpu"}
    return Problem(labelled(dim, scale, copies), labelled(dim, scale, 1), options)


def labelled(
    dim: int,
    scale: float,
    copies: int,
) -> Federation:
    """The rows of `problem`, each as often as `copies` says.

    The draws depend on `dim` alone, so that federations with and without copies hold the same rows.
    """
    draw = generator(0, "theory", f"rows {dim}")

    def client() -> tuple[Tensor, Tensor]:
        x = torch.randn(ROWS, dim, generator=draw, dtype=torch.float64)
        x = scale * x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
        w = 3 * torch.randn(dim, generator=draw, dtype=torch.float64)
        y = torch.rand(ROWS, generator=draw, dtype=torch.float64) < torch.sigmoid(x @ w)
        return x.repeat(copies, 1), y.double().repeat(copies)

    return Federation.from_clients([client() for _ in range(CLIENTS)], test_fraction=0)


def squashed(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss (sigmoid(z) - y)^2 of each row: bounded, smooth and not convex."""
    return (torch.sigmoid(outputs[:, 0]) - targets) ** 2


def bumpy(
    dim: int,
    batch: int | None,
    effort: Effort,
) -> Problem:
    """The function of Theorem 3.1, which is not convex where the runs start.

    A small L2 penalty keeps the models bounded.
    """
    return problem(squashed, dim, batch, effort, scale=4.0, l2=0.01, start=1.0)


def whole(problem: Problem, simulation: Trials) -> tuple[Backend, Batch]:
    """The objective f and the batch of all rows, at which it is the problem's function.

    All rows weigh the same, because the clients are of equal size.
    """
    fed = problem.rows
    x = fed.x[fed.train_rows][None]
    y = fed.y[fed.train_rows][None]
    return simulation.f, Batch(x, y, x.new_full(y.shape, 1 / y.shape[1]))


def minimiser(problem: Problem) -> tuple[Tensor, float]:
    """x* [d] and f* of a strongly convex f, by Newton's method from the initial model."""
    simulation = problem.simulation(FedSSO(), 1, 0)
    f, batch = whole(problem, simulation)
    x = simulation.server.x[None].clone()
    for _ in range(NEWTON_STEPS):
        x = x - torch.linalg.solve(f.hessian(x, batch), f.value_and_grad(x, batch)[1])
    return x[0, 0], float(f.value(x, batch))


# ---- round by round ----


class Pair(NamedTuple):
    """What became of the pair (s, y) of a round; NaN where no pair entered B."""

    overridden: float
    """1 where the curvature rule replaced y^T s, otherwise 0."""
    grow: float = nan
    """log det B_k - log det B_{k-1}, measured from the matrices."""
    exact: float = nan
    """log of (y^T s)^2 / (cur s^T B s), which is the right formula for `grow`."""
    powell: float = nan
    """log of cur / (s^T B s), the paper's formula."""


class Round(NamedTuple):
    """What is seen of round k; the last four are those of `Pair`."""

    k: float
    f: float  # f(x_k)
    square: float  # ||grad f(x_k)||^2
    low: float  # smallest eigenvalue of B_k^-1
    high: float  # largest eigenvalue of B_k^-1
    bent: float  # grad f(x_k)^T B_k^-1 g_k
    plain: float  # grad f(x_k)^T g_k
    overridden: float
    grow: float
    exact: float
    powell: float


Seen = dict[str, Array]
"""The fields of `Round` as columns over the rounds of a run."""


def watch(
    problem: Problem,
    record: FedSSO,
    rounds: int,
    seed: int,
) -> Seen:
    """Run FedSSO and note what is seen of every round; a run that diverges is shorter.

    Args:
        problem: What is minimised.
        record: FedSSO with form="bfgs-dense", which keeps B as a matrix, and guard="none".
        rounds: How many rounds to run.
        seed: The seed of the mini-batches.

    Returns:
        The fields of `Round`, each as an array over the rounds.
    """
    simulation = problem.simulation(record, rounds, seed)
    f, batch = whole(problem, simulation)
    seen: list[Round] = []
    # The states before and after a round. B of the round before is needed for the change of det B.
    states: list[State] = [simulation.server]

    def after(now: Trials) -> None:
        if not now.finished:
            states.append(now.server)
            seen.append(_round(f, batch, record, states[-2], now))
            del states[0]

    advance(simulation, rounds, after)
    columns = {}
    for name in Round._fields:
        columns[name] = np.array([getattr(row, name) for row in seen])
    return columns


def _round(
    f: Backend,
    batch: Batch,
    record: FedSSO,
    old: State,
    now: Trials,
) -> Round:
    """What is seen of the round that led from the server's state `old` to `now`.

    f and its gradient are those at the model the round began with, over all rows.
    """
    new: State = now.server
    value, grads = f.value_and_grad(old.x[None], batch)
    grad = grads[0, 0]
    eigenvalues = torch.linalg.eigvalsh(new.curvature.matrix[0])
    least = max(float(eigenvalues[0]), TINY)  # rounding may make it negative
    eta = float(at(record.eta, now.k))
    pair = _pair(record, old, now)
    return Round(
        k=now.k,
        f=float(value),
        square=float(grad @ grad),
        low=1 / float(eigenvalues[-1]),
        high=1 / least,
        bent=float(grad @ new.s[0]) / -eta,  # s = -eta B^-1 g
        plain=float(grad @ new.g[0]),
        **pair._asdict(),
    )


def _pair(
    record: FedSSO,
    old: State,
    now: Trials,
) -> Pair:
    """Whether cur was overridden, and the change of log det B beside the two formulas for it.

    The pair that enters B in this round is the step before it, and the change of g that it caused.
    """
    new: State = now.server
    verdict = qn.judge(gram(old.s, new.g - old.g), record.lam, record.Lam)
    reset = record.R is not None and now.k % record.R == 0  # a reset drops the pair
    if reset or not bool(verdict.accept):
        return Pair(0.0)
    B = old.curvature.matrix[0]
    s = old.s[0]
    log_det = torch.linalg.slogdet(B)[1]
    grow = float(torch.linalg.slogdet(new.curvature.matrix[0])[1] - log_det)
    sBs = log(float(s @ B @ s))
    ys = log(abs(float(verdict.rho)))
    cur = log(float(verdict.cur))
    return Pair(
        float(verdict.overridden),
        grow,
        2 * ys - cur - sBs,
        cur - sBs,
    )


def within(runs: Sequence[Seen]) -> str:
    """The range of the eigenvalues of B^-1 over all rounds of some runs, as text."""
    least = min(run["low"].min() for run in runs)
    largest = max(run["high"].max() for run in runs)
    return f"{least:.3g} to {largest:.3g}"
