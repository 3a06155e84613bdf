"""Rounds and bytes of a regression over hospitals: `python -m benchmarks.regression`.

Five ways to the same estimate, each until the exact Newton decrement is below 1e-8 standard errors:

fedsso.glm    what `fedsso.regression.fit` does
Newton        loglik, gradient and information in every round
BFGS          scipy's, from the null model on the common scale; an evaluation is a round
FedSSO        the default guard, with the client step of FedAvg
FedAvg        one full local step of the best constant length, which nobody would know beforehand

Bytes are those that one hospital sends up, of score and information alone: 8 for each number.
Heart disease needs FEDSSO_DATA; the other tables come with statsmodels and lifelines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsso.regression.families import named
from fedsso.regression.questions import INFORMATION, SCORE, Array, Question, unpacked

TOLERANCE = 1e-8
MOST = 20_000
"""Rounds of a method at most."""
ROOT = Path(__file__).resolve().parents[1]


class Count(NamedTuple):
    """What a method needed."""

    method: str
    rounds: int
    informations: int
    """Rounds in which the second derivatives travelled as well."""
    distance: float
    """Where it ended, in standard errors."""


class Problem:
    """A study as a function of the coefficients on the common scale, seen by one who may peek.

    `start` is the null model, `scale` the number of rows or events: what a mean is taken over.
    """

    def __init__(self, studies: Any, study: Any) -> None:
        self.fit = studies.fitted(study)
        self.family = named(study.family)
        self.room = list(studies.hospitals(study).values())
        names = {one.hospital for one in self.fit.hospitals}
        self.room = [hospital for hospital in self.room if hospital.name in names]
        self.schema = studies.toml(study)
        self.p = len(self.fit.terms)
        self.scale = float(self.fit.rows)
        self.start = np.zeros(self.p)
        if self.family.intercept:
            self.start[0] = self._intercept()

    def _intercept(self) -> float:
        """Of the null model."""
        asked = self._question("describe", np.zeros(0))
        answers = [hospital.answer(asked) for hospital in self.room]
        sums = [sum(one.arrays[name][0] for one in answers) for name in ("outcome", "exposure")]
        return self.family.start(*sums)[0]

    def _question(self, name: str, b: Array) -> Question:
        fit = self.fit
        return Question(name, self.schema, self.family.text, b, fit.mean, fit.deviation)

    def score(self, b: Array) -> tuple[float, Array]:
        """The log-likelihood over all hospitals and its gradient, divided by `scale`."""
        asked = self._question(SCORE, b)
        answers = [hospital.answer(asked).arrays for hospital in self.room]
        loglik = sum(float(one["loglik"][0]) for one in answers)
        gradient: Array = np.sum([one["gradient"] for one in answers], axis=0)
        return loglik / self.scale, gradient / self.scale

    def information(self, b: Array) -> Array:
        """The information over all hospitals, divided by `scale`."""
        asked = self._question(INFORMATION, b)
        packed = [hospital.answer(asked).arrays["information"] for hospital in self.room]
        return unpacked(np.sum(packed, axis=0)) / self.scale

    def distance(self, b: Array) -> float:
        """The Newton decrement."""
        _, gradient = self.score(b)
        ahead = np.linalg.solve(self.information(b), gradient)
        return float(np.sqrt(self.scale * gradient @ ahead / self.fit.dispersion))


# ---- the five ways ----


def of_glm(problem: Problem) -> Count:
    """The library's fit."""
    fit = problem.fit
    looks = sum(one.information for one in fit.trace)
    return Count("fedsso.glm", fit.rounds, looks, fit.distance)


def of_newton(problem: Problem) -> Count:
    """Newton's method with whole steps; all four studies allow them."""
    b = problem.start
    rounds = 1
    while problem.distance(b) > TOLERANCE and rounds < MOST:
        _, gradient = problem.score(b)
        b = b + np.linalg.solve(problem.information(b), gradient)
        rounds += 1
    return Count("Newton", rounds, rounds, problem.distance(b))


def of_scipy(problem: Problem) -> Count:
    """scipy's BFGS; its evaluations until the first model that is near enough."""
    from scipy.optimize import minimize

    seen: list[Array] = []

    def function(b: Array) -> tuple[float, Array]:
        seen.append(b.copy())
        loglik, gradient = problem.score(b)
        return -loglik, -gradient

    minimize(function, problem.start, jac=True, method="BFGS", options={"gtol": 1e-13})
    for rounds, b in enumerate(seen, 1):
        distance = problem.distance(b)
        if distance <= TOLERANCE:
            return Count("BFGS", rounds, 1, distance)
    return Count("BFGS", len(seen), 1, min(map(problem.distance, seen[-5:])))


def best_step(problem: Problem) -> float:
    """The best constant step near the maximum: 2 / (least + largest eigenvalue)."""
    b = np.linalg.solve(to_table(problem), problem.fit.coefficients)
    values = np.linalg.eigvalsh(problem.information(b))
    return float(2 / (values[0] + values[-1]))


def to_table(problem: Problem) -> Array:
    """From the common scale to the table's units."""
    from fedsso.regression.rounds.scales import Moments, to_table

    fit = problem.fit
    return to_table(fit.terms, Moments(fit.mean, fit.deviation))


def stepped(problem: Problem, method: str, step: Callable[[Array, Array, float], Array]) -> Count:
    """A method that makes the next model of this one, its gradient and its log-likelihood."""
    b = problem.start
    for rounds in range(1, MOST):
        loglik, gradient = problem.score(b)
        if rounds % 10 == 0 or rounds < 100:
            distance = problem.distance(b)
            if distance <= TOLERANCE or not np.isfinite(distance):
                return Count(method, rounds, 1, distance)
        b = step(b, gradient, loglik)
    return Count(method, MOST, 1, problem.distance(b))


def of_fedavg(problem: Problem) -> Count:
    """One full local step."""
    alpha = best_step(problem)
    return stepped(problem, "FedAvg", lambda b, gradient, _: b + alpha * gradient)


def of_fedsso(problem: Problem) -> Count:
    """FedSSO's server with its default guard."""
    import torch

    from fedsso.algorithms import FedSSO
    from fedsso.server import Server

    alpha = best_step(problem)
    server = Server(FedSSO(alpha=alpha), local_steps=1)

    def step(b: Array, gradient: Array, loglik: float) -> Array:
        delta = torch.from_numpy(alpha * gradient)
        after: Array = server.advance(torch.from_numpy(b), delta, loss=-loglik).numpy()
        return after

    return stepped(problem, "FedSSO", step)


WAYS = (of_glm, of_newton, of_scipy, of_fedsso, of_fedavg)


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(ROOT / "tests" / "regression"))
    studies = import_module("federations")
    data = os.environ.get("FEDSSO_DATA", "")
    tables = {
        "fair": studies.fair,
        "randhie": studies.randhie,
        "randhie gaussian": lambda: studies.randhie("gaussian"),
        "lung": studies.lung,
    }
    if data:
        tables = {"heart": lambda: studies.heart(data), **tables}
    line = "{:<18}{:>3}  {:<11}{:>7}{:>13}{:>11}{:>10}"
    print(line.format("table", "p", "method", "rounds", "informations", "bytes up", "distance"))
    for name, load in tables.items():
        problem = Problem(studies, load())
        p = problem.p
        for way in WAYS:
            count = way(problem)
            numbers = count.rounds * (1 + p) + count.informations * p * (p + 1) // 2
            rounds = f">{MOST}" if count.rounds >= MOST else str(count.rounds)
            size = f"{8 * numbers}"
            distance = f"{count.distance:.0e}"
            print(
                line.format(name, p, count.method, rounds, count.informations, size, distance),
                flush=True,
            )


if __name__ == "__main__":
    main()
