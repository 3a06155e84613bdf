"""The convex duel: logistic regression over 142 clients, to a gradient of 1e-9.

    python -m benchmarks.convex                                  # all tasks, some minutes
    python -m benchmarks.convex --tasks a9a --only fedsso,giant
    python -m benchmarks.convex --draw                           # the figure from convex.json again

The tasks are LIBSVM's training files, sparse, with an intercept that is penalised like all else:
f(x) = mean of log(1 + e^z) - y z over all rows + l2/2 |x|^2, l2 = 1e-3, in float64, from x = 0.
Every second-order algorithm of the registry runs at the settings of RIVALS, of which the one that
gets furthest in bytes counts. scipy and scikit-learn minimise the same f on the pooled rows.

Counted are rounds, bytes that one client sends, and CPU seconds of one thread: making the
simulation and all rounds, without reading the file. Of courses of less than a second the least of
seven runs counts. |grad f| is computed outside the clock.
The results go to docs/convex.json, which `python docs/build.py` makes the tables of docs/convex.md
from, and to docs/convex.png.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch are loaded

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

import fedsso
from fedsso.algorithm import Algorithm
from fedsso.algorithms import ALGORITHMS, make
from fedsso.data.sets import DATASETS
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import Trials, run
from fedsso.errors import InputError
from fedsso.experiment.problem import pose
from fedsso.support.files import write_atomic
from fedsso.support.intake import read_text
from fedsso.support.sparse import entries

from .convex_report import draw

DOCS = Path(__file__).parents[1] / "docs"
CLIENTS = 142
L2 = 1e-3
GOALS = (1e-3, 1e-6, 1e-9)
ROUNDS = 200
SECONDS = 10.0  # of CPU for one setting
SHORT = 1.0  # seconds of a course that is run again
REPEATS = 6
TASKS = {"phishing": 68, "a9a": 123, "ijcnn1": 22}  # features
Floats = NDArray[np.float64]

# The settings of each algorithm: the defaults, and what its paper or its page proposes for such
# problems. Names that the registry lacks are left out.
RIVALS: dict[str, list[dict[str, Any]]] = {
    "fedsso": [{}],
    "fedsso L-BFGS": [{"form": "lbfgs", "m": 100}, {"form": "lbfgs"}],
    "fedsso α = 10": [{"alpha": 10.0}],
    "giant": [{}, {"mu": 0.0}],
    "dane": [{}, {"mu": 0.01}, {"mu": 0.001}],
    "feddane": [{"solver": "exact", "mu": 0.01}],
    "localnewton": [{}],
    "done": [{}, {"alpha": 1.0}],
    "fednew": [{}],
    "fedpm": [{}],
    "anderson": [{}],
    "fednl": [{}],
    "fednl-ls": [{}],
    "fednl-pp": [{}],
    "aide": [{}],
    "disco": [{"precondition": kind} for kind in ("none", "lead", "bfgs")],
    "nl1": [{}],
    "nl2": [{}],
    "bl1": [{}],
    "bl2": [{}],
    "bl3": [{}],
}


@dataclass
class Course:
    """What one algorithm did: |grad f| against rounds, CPU seconds and bytes of one client."""

    name: str
    setting: str
    norm: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)

    def add(self, norm: float, seconds: float, up: float) -> None:
        """One round more."""
        self.norm.append(norm)
        self.seconds.append(seconds)
        self.up.append(up)

    def reached(self, goal: float) -> int | None:
        """The first round after which |grad f| is at most the goal."""
        return next((k for k, norm in enumerate(self.norm) if norm <= goal), None)

    def told(self) -> dict[str, Any]:
        """As plain numbers, rounded for the file."""
        found = {}
        for goal in GOALS:
            k = self.reached(goal)
            if k is not None:
                found[f"{goal:g}"] = [k, round(self.seconds[k], 5), round(self.up[k])]
        return {
            "name": self.name,
            "setting": self.setting,
            "goals": found,
            "norm": [float(f"{norm:.3g}") for norm in self.norm],
            "seconds": [round(second, 5) for second in self.seconds],
            "up": [round(byte) for byte in self.up],
        }

    def rank(self) -> tuple[float, ...]:
        """Whose is smaller has done better: bytes to the last goal, to the one before, the end."""
        needed = []
        for goal in reversed(GOALS):
            k = self.reached(goal)
            needed.append(np.inf if k is None else self.up[k])
        return (*needed, min(self.norm, default=np.inf))


# ---- the federation and the same rows in one matrix ----


def federation(name: str, data_dir: str | None) -> fedsso.Federation:
    """The training file of a LIBSVM set, shared out evenly over the clients."""
    found = DATASETS[name].find(data_dir)
    if found is None:
        raise InputError(f"{name} is not there: `fedsso data get {name}`, or give --data-dir")
    return fedsso.load(
        "svmlight",
        files=[found[1][0]],
        dim=TASKS[name],
        clients=CLIENTS,
        partition="iid",
        test_fraction=0,
        layout="sparse",
    )


class Pooled:
    """f and its gradient on all rows at once, with a column of ones for the intercept."""

    def __init__(self, fed: fedsso.Federation) -> None:
        start, columns, values = (part.numpy() for part in entries(fed.x))
        x = scipy.sparse.csr_matrix((values.astype(np.float64), columns, start), fed.x.shape)
        ones = np.ones((x.shape[0], 1))
        self.x = scipy.sparse.hstack([x, ones]).tocsr()
        self.turned = self.x.T.tocsr()
        self.y = fed.y.numpy().astype(np.float64)
        # A client of n_i rows counts n_i / n: every row counts the same.
        self.rows = len(self.y)

    def __call__(self, w: Floats) -> tuple[float, Floats]:
        """f(w) and its gradient."""
        z = self.x @ w
        loss = np.logaddexp(0, z) - self.y * z
        slope = self.turned @ ((expit(z) - self.y) / self.rows)
        return float(loss.mean() + L2 / 2 * w @ w), slope + L2 * w

    def norm(self, w: Floats) -> float:
        """|grad f(w)|."""
        return float(np.linalg.norm(self(w)[1]))


# ---- the contestants ----


def federated(fed: fedsso.Federation, pooled: Pooled, record: Algorithm, name: str) -> Course:
    """Run one algorithm until the last goal, or until rounds or seconds are spent."""
    shown = fedsso.algorithm.records.changed(record)
    course = Course(name, ", ".join(f"{key}={value}" for key, value in shown.items()))
    settings = Settings(
        rounds=ROUNDS,
        local_steps=1,
        batch_size=None,
        loss="bce",
        l2=L2,
        dtype="float64",
        device="cpu",
        eval_every=ROUNDS + 1,
    )
    began = time.process_time()
    trials = Trials(pose(fed, "mclr", settings), [record])
    seconds = time.process_time() - began
    up = 0.0
    course.add(pooled.norm(_model(trials)), seconds, up)
    while course.norm[-1] > GOALS[-1] and seconds < SECONDS:
        if trials.finished or trials.k == ROUNDS - 1:
            break
        began = time.process_time()
        run(trials, trials.k + 1)
        seconds += time.process_time() - began
        up += float(trials.rows[-1]["bytes_up"][0]) / CLIENTS
        course.add(pooled.norm(_model(trials)), seconds, up)
    return course


def _model(trials: Trials) -> Floats:
    """The present model of the only trial: weights, then the intercept."""
    found: Floats = trials.models()[0].numpy().astype(np.float64)
    return found


def with_scipy(pooled: Pooled) -> Course:
    """L-BFGS of scipy on the pooled rows; a round is one gradient."""
    course = Course("scipy L-BFGS-B, pooled", "20 pairs")
    began = time.process_time()

    def measured(w: Floats) -> tuple[float, Floats]:
        value, slope = pooled(w)
        course.add(float(np.linalg.norm(slope)), time.process_time() - began, 0.0)
        return value, slope

    start = np.zeros(pooled.x.shape[1])
    options = {"maxcor": 20, "gtol": 1e-12, "ftol": 0.0, "maxiter": 500}
    minimize(measured, start, jac=True, method="L-BFGS-B", options=options)
    return course


def with_sklearn(pooled: Pooled, solver: str) -> Course:
    """LogisticRegression of scikit-learn on the pooled rows, once for each of twelve tolerances.

    Its rounds are the iterations that it counts itself.
    """
    course = Course(f"scikit-learn {solver}, pooled", "")
    # Its objective is the sum of the losses times C, and |w|^2 / 2.
    strength = 1 / (pooled.rows * L2)
    for exponent in range(1, 13):
        model = LogisticRegression(
            C=strength, tol=10.0**-exponent, solver=solver, fit_intercept=False, max_iter=1000
        )
        seconds = np.inf
        for _ in range(REPEATS):
            began = time.process_time()
            model.fit(pooled.x, pooled.y)
            seconds = min(seconds, time.process_time() - began)
        done = int(model.n_iter_[0])
        norm = pooled.norm(model.coef_[0])
        while len(course.norm) <= done:
            course.add(norm, seconds, 0.0)
    return course


def contestants(
    fed: fedsso.Federation, pooled: Pooled
) -> Iterator[tuple[str, Callable[[], Course]]]:
    """The names and runs of all: the federated ones, then the pooled ones."""
    for name, settings in RIVALS.items():
        kind = name.split()[0]
        if kind in ALGORITHMS:
            records = [make(kind, given) for given in settings]
            yield name, partial(_best, fed, pooled, records, name)
    yield "scipy", lambda: _repeated(with_scipy(pooled), lambda: with_scipy(pooled))
    for solver in ("lbfgs", "newton-cg", "newton-cholesky"):
        yield f"sklearn {solver}", partial(with_sklearn, pooled, solver)


def _best(
    fed: fedsso.Federation, pooled: Pooled, records: Sequence[Algorithm], name: str
) -> Course:
    """The course of the best of some settings."""
    courses = [federated(fed, pooled, record, name) for record in records]
    best = min(range(len(courses)), key=lambda i: courses[i].rank())
    return _repeated(courses[best], lambda: federated(fed, pooled, records[best], name))


def _repeated(course: Course, again: Callable[[], Course]) -> Course:
    """A short course with the least seconds of several runs: a busy machine disturbs it."""
    for _ in range(REPEATS if course.seconds[-1] < SHORT else 0):
        other = again()
        pairs = zip(course.seconds, other.seconds, strict=True)
        course.seconds = [min(pair) for pair in pairs]
    return course


# ---- all of it ----


def measure(
    tasks: Sequence[str], only: Sequence[str], data_dir: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The course of one contestant after the other, with the name of its task."""
    for task in tasks:
        fed = federation(task, data_dir)
        pooled = Pooled(fed)
        products = _products(fed, pooled)
        for name, go in contestants(fed, pooled):
            if only and not any(name.startswith(wish) for wish in only):
                continue
            told = go().told()
            print(task, _line(told), flush=True)
            yield task, {"products_ms": products, "courses": [told]}


def _products(fed: fedsso.Federation, pooled: Pooled) -> float:
    """CPU milliseconds of the two sparse products of a gradient, with torch: the least of many."""
    from fedsso.support.sparse import transposed

    x = fed.x.to(torch.float64)
    turned = transposed(x)
    w = torch.zeros(x.shape[1], dtype=torch.float64)
    e = torch.from_numpy(pooled.y)
    least = np.inf
    for _ in range(200):
        began = time.process_time()
        torch.mv(x, w)
        torch.mv(turned, e)
        least = min(least, time.process_time() - began)
    return round(float(least) * 1e3, 4)


def _line(told: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    parts = []
    for goal, (rounds, seconds, up) in told["goals"].items():
        parts.append(f"{goal}: {rounds} rounds {seconds:.3f} s {up / 1e3:.1f} kB")
    end = f"ends at {told['norm'][-1]:.1e} after {len(told['norm']) - 1}"
    return f"{told['name']} ({told['setting']}) {'; '.join(parts) or 'no goal'}; {end}"


def main() -> None:
    """Measure, write the numbers, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--only", default="", help="algorithms whose names begin so")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", type=Path, default=DOCS)
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    file = given.out / "convex.json"
    found = json.loads(read_text(file)) if file.exists() else {}
    if not given.draw:
        only = [wish for wish in given.only.split(",") if wish]
        for task, new in measure(given.tasks.split(","), only, given.data_dir):
            found[task] = _merged(found.get(task), new)
            write_atomic(file, json.dumps(found) + "\n")  # so that nothing is lost with the rest
    draw(given.out / "convex.png", found)


def _merged(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """A task's courses with newer ones in the place of older ones."""
    by_name = {course["name"]: course for course in (old or {}).get("courses", [])}
    by_name |= {course["name"]: course for course in new["courses"]}
    return {"products_ms": new["products_ms"], "courses": list(by_name.values())}


if __name__ == "__main__":
    main()
