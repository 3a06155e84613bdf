"""FedSSO() beside FedAvg on Flower, with clients that fit logistic regressions.

    python -m benchmarks.flower_tables        # a few minutes on one core

sklearn: scikit-learn's LogisticRegression on the digits over five nodes (Dirichlet 0.5), which goes
on from the server's model for a few iterations of its solver, as in Flower's example
sklearn-logreg-mnist. hospitals: heart disease over its four hospitals, plain gradient steps over
all rows or one epoch in batches of 32. Thirty rounds; the log loss of held-out rows is compared,
the mean of the last three evaluations.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

import fedsso
from fedsso.flower import FedSSO

from .flower_examples import LAST, InProcess

ROUNDS = 30
BATCH = 32
Numbers = NDArray[np.float64]
Rows = tuple[Numbers, NDArray[np.int64]]
Fit = Callable[[Numbers, Rows, int], Numbers]
"""From a model [features + 1, classes], rows and a seed to the model after local work."""


def solved(iterations: int, w: Numbers, rows: Rows, seed: int) -> Numbers:  # noqa: ARG001
    """So many iterations of scikit-learn's solver, from the model w."""
    from sklearn.linear_model import LogisticRegression

    x, y = rows
    classes = np.arange(w.shape[1])
    own = np.isin(classes, y)
    model = LogisticRegression(max_iter=iterations, warm_start=True)
    model.classes_ = classes[own]
    model.coef_ = w[:-1, own].T.copy()
    model.intercept_ = w[-1, own].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not converge in a few iterations
        model.fit(x, y)
    new = w.copy()
    new[:-1, own] = model.coef_.T
    new[-1, own] = model.intercept_
    return new


def stepped(rate: float, steps: int, batch: int, w: Numbers, rows: Rows, seed: int) -> Numbers:
    """Gradient steps: so many over all rows, or with a batch size one pass over them."""
    x, y = rows
    parts = [np.arange(len(y))] * steps
    if batch:
        order = np.random.default_rng(seed).permutation(len(y))
        parts = np.split(order, range(batch, len(y), batch))
    for part in parts:
        w = w - rate * _gradient(w, x[part], y[part])
    return w


def _chances(w: Numbers, x: Numbers) -> Numbers:
    scores = x @ w[:-1] + w[-1]
    powers = np.exp(scores - scores.max(1, keepdims=True))
    chances: Numbers = powers / powers.sum(1, keepdims=True)
    return chances


def _gradient(w: Numbers, x: Numbers, y: NDArray[np.int64]) -> Numbers:
    error = _chances(w, x)
    error[np.arange(len(y)), y] -= 1
    return np.vstack([x.T @ error, error.sum(0)]) / len(y)


def loss(w: Numbers, rows: Rows) -> float:
    """The mean log loss."""
    x, y = rows
    chances = _chances(w, x)[np.arange(len(y)), y]
    return float(-np.log(np.maximum(chances, 1e-12)).mean())


def rows_of(fed: fedsso.Federation, which: str) -> list[Rows]:
    """The "train" or "test" rows of every client."""
    rows, start = getattr(fed, f"{which}_rows"), getattr(fed, f"{which}_start")
    parts = []
    for i in range(fed.clients):
        own = rows[start[i] : start[i + 1]]
        x = fed.x[own].reshape(len(own), -1).double().numpy()
        parts.append((x * fed.affine[0] + fed.affine[1], fed.y[own].numpy()))
    return parts


def client_app(train: list[Rows], fit: Fit, seed: int) -> ClientApp:
    """FedAvg's client: fit from the server's model, and send the model back."""
    app = ClientApp()

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        k = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        w = message.content.array_records["arrays"]["w"].numpy().astype(float)
        draw = 1_000_003 * seed + 1009 * number + k
        new = fit(w, train[number], draw)
        metrics: Any = {"train_loss": loss(w, train[number]), "num-examples": len(train[number][1])}
        arrays = ArrayRecord({"w": Array(new)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app


def run(fed: fedsso.Federation, fit: Fit, seed: int, name: str) -> list[float]:
    """The log loss of all held-out rows after every round."""
    test = rows_of(fed, "test")
    pooled = np.concatenate([x for x, _ in test]), np.concatenate([y for _, y in test])
    losses: list[float] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:  # noqa: ARG001
        losses.append(loss(arrays["w"].numpy(), pooled))
        return None

    inner = FedAvg(fraction_evaluate=0.0)
    strategy = inner if name == "fedavg" else FedSSO(inner=inner)
    start = np.zeros((pooled[0].shape[1] + 1, fed.classes))
    strategy.start(
        grid=InProcess(client_app(rows_of(fed, "train"), fit, seed), fed.clients),
        initial_arrays=ArrayRecord({"w": Array(start)}),
        num_rounds=ROUNDS,
        train_config=ConfigRecord(),
        evaluate_fn=evaluate,
    )
    return losses[1:]


CASES: dict[str, tuple[dict[str, Any], Fit]] = {}
DIGITS = {"name": "digits", "clients": 5, "partition": "dirichlet", "concentration": 0.5}
for count in (1, 2, 5):
    CASES[f"sklearn, {count} iterations"] = DIGITS, partial(solved, count)
for step in (0.03, 0.1, 0.3):
    CASES[f"hospitals, 5 steps of {step:g}"] = {"name": "heart"}, partial(stepped, step, 5, 0)
for step in (0.01, 0.03, 0.1):
    text = f"hospitals, an epoch with steps of {step:g}"
    CASES[text] = {"name": "heart"}, partial(stepped, step, 1, BATCH)


def main() -> None:
    """Print a row for each kind of clients."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flower_tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print("| clients | FedAvg | FedSSO() | rounds to FedAvg's end: FedAvg | FedSSO() |")
    print("|---|---|---|---|---|")
    for title, (data, fit) in CASES.items():
        ends: dict[str, list[float]] = {"fedavg": [], "fedsso": []}
        rounds: dict[str, list[str]] = {"fedavg": [], "fedsso": []}
        for seed in given.seeds:
            fed = fedsso.load(**data, seed=seed)
            curves = {name: np.array(run(fed, fit, seed, name)) for name in ends}
            goal = curves["fedavg"][-LAST:].mean()
            for name, curve in curves.items():
                ends[name].append(float(curve[-LAST:].mean()))
                reached = np.flatnonzero(curve <= goal)
                rounds[name].append(str(reached[0] + 1) if len(reached) else "never")
        told = [f"{np.mean(v):.4f} ({', '.join(f'{e:.4f}' for e in v)})" for v in ends.values()]
        print(f"| {title} | {' | '.join(told)} | {' | '.join(map(', '.join, rounds.values()))} |")


if __name__ == "__main__":
    main()
