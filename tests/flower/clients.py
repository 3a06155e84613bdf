"""Unmodified FedAvg clients: least squares in plain numpy, as a user of Flower writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid import LocalGrid, Tamper
from numpy.typing import NDArray

ALPHA, STEPS, SIZES = 0.05, 4, (30, 50, 20)


def rows(i: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows and targets of client i, whose coefficients are its own."""
    draw = np.random.default_rng(i)
    x = draw.normal(size=(SIZES[i % 3], 4)) * (1.0, 2.0, 0.5, 1.0)
    return x, x @ (np.array([1.0, -2.0, 3.0, 0.5]) + 0.2 * draw.normal(size=4)) + 0.1 * draw.normal(
        size=len(x)
    )


def initial(scale: float = 0.0) -> ArrayRecord:
    """The first model: coefficients in two arrays and BatchNorm's three kinds of buffers."""
    w = {"a.weight": np.full((3, 1), scale, "float32"), "b.bias": np.full(1, scale, "float32")}
    buffers = {"bn.running_mean": np.zeros(2, "float32"), "bn.running_var": np.ones(2, "float32")}
    buffers |= {"bn.num_batches_tracked": np.array(0)}
    return ArrayRecord({name: Array(value) for name, value in (w | buffers).items()})


def vector(record: ArrayRecord) -> NDArray[Any]:
    return np.concatenate([record[name].numpy().ravel() for name in ("a.weight", "b.bias")]).astype(
        float
    )


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    i = int(context.node_config["partition-id"])
    x, y = rows(i)
    w = vector(message.content["arrays"])
    for _ in range(STEPS):
        w = w - ALPHA * x.T @ (x @ w - y) / len(y)
    arrays = {"a.weight": w[:3, None].astype("float32"), "b.bias": w[3:].astype("float32")}
    arrays |= {
        "bn.running_mean": np.full(2, i, "float32"),
        "bn.running_var": np.full(2, 1 + i / 10, "float32"),
    }
    arrays |= {"bn.num_batches_tracked": np.array(10 + i)}
    record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    metrics = MetricRecord({"train_loss": loss(w, i), "num-examples": len(y)})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    i = int(context.node_config["partition-id"])
    metrics = {
        "eval_loss": loss(vector(message.content["arrays"]), i),
        "eval_acc": 0.5,
        "num-examples": SIZES[i % 3],
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def loss(w: NDArray[Any], i: int) -> float:
    x, y = rows(i)
    return float(np.square(x @ w - y).mean() / 2)


def federation(clients: int = 3, tamper: Tamper | None = None) -> LocalGrid:
    return LocalGrid(app, [{"partition-id": i} for i in range(clients)], tamper)
