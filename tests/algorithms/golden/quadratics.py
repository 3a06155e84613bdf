"""What the golden tests of several algorithms share: the quadratics of two clients, and how they
are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.data import quadratic
from fedsso.engine.rounds import Plan, Rounds

OPTIONS: dict[str, Any] = {
    "local_steps": 2,
    "batch_size": None,
    "dtype": "float64",
    "device": "cpu",
}


def pair() -> Federation:
    """A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4; A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4."""
    return quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])


def go(fed: Federation, algorithm: Algorithm, rounds: int, **options: Any) -> Run:
    """Some rounds from zero, full batches."""
    result: Run = simulate(fed, "linear", algorithm, rounds=rounds, **{**OPTIONS, **options})
    return result


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    """Equal relative to the length of the vectors."""
    assert float((a - b).norm()) <= tolerance * float(b.norm())


def parts(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i and A_i b_i of quadratics, each the mean of d squares."""
    rows, t = (torch.stack([v[fed.rows_of(i)] for i in range(fed.clients)]) for v in (fed.x, fed.y))
    scale = 2 / rows.shape[1]
    return scale * rows.mT @ rows, scale * torch.einsum("nri,nr->ni", rows, t)


START = (4.0, -3.0)


def trio(start: tuple[float, float] = START) -> Federation:
    """Three quadratics seen from `start`: a run from zero is one from there, moved by -start.

    A_1 = diag(1, 4), A_2 = diag(2, 1), A_3 = [[3, 1], [1, 2]]; b_1 = (1, 0), b_2 = (-1, 2),
    b_3 = (0, 1); p = (0.5, 0.3, 0.2).
    """
    A = [[[1, 0], [0, 4]], [[2, 0], [0, 1]], [[3, 1], [1, 2]]]
    b = [[1, 0], [-1, 2], [0, 1]]
    seen = [[value - begin for value, begin in zip(row, start, strict=True)] for row in b]
    return quadratic(A, seen, [0.5, 0.3, 0.2])


def fix_cohorts(patch: pytest.MonkeyPatch, cohorts: Sequence[Sequence[int]]) -> None:
    """The clients that answer in rounds 1, 2, ...; then from the first cohort again."""

    def plan(rounds: Rounds, k: int, sample: int = 0) -> Plan:  # noqa: ARG001
        who = torch.tensor(cohorts[(k - 1) % len(cohorts)])
        return Plan(who, who, torch.full((len(who),), rounds.settings.local_steps or 0))

    patch.setattr(Rounds, "plan", plan)
