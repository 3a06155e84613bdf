"""Ten clients who learn the digits, one of whom lies in every round: how good is the model in the
end?"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedMedian
from grid import NODES, LocalGrid
from hostile import Change
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsso import Federation, load
from fedsso.experiment.problem import build_model
from fedsso.flower import Clip, FedSSO, PhasedStrategy, client_app
from fedsso.flower.recorded import Recorded

CLIENTS, ALPHA, STEPS, ROUNDS = 10, 0.2, 5, 10
NONE: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
LIAR = NODES[3]


@cache
def digits() -> Federation:
    return load("digits", clients=CLIENTS, partition="iid")


def rows(context: Context) -> tuple[Tensor, Tensor]:
    """A client's own digits."""
    own = digits().rows_of(int(context.node_config["partition-id"]), "train")
    return digits().x[own], digits().y[own]


def plain() -> ClientApp:
    """FedAvg's client, as a user of Flower writes it: softmax regression in numpy."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = (part.numpy().reshape(len(part), -1) for part in rows(context))
        y = y[:, 0]
        W, b = (array.numpy().astype(float) for array in message.content["arrays"].values())
        for _ in range(STEPS):
            scores = x @ W.T + b
            p = np.exp(scores - scores.max(1, keepdims=True))
            error = (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)
            W, b = W - ALPHA * error.T @ x, b - ALPHA * error.sum(0)
        new = zip(message.content["arrays"], (W, b), strict=True)
        arrays = ArrayRecord({name: Array(value.astype("float32")) for name, value in new})
        metrics = MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def accuracy(arrays: ArrayRecord) -> float:
    """Share of the test digits that a softmax regression gets right."""
    W, b = (array.numpy() for array in arrays.values())
    x, y = (part[digits().test_rows].numpy() for part in (digits().x, digits().y))
    return float(np.mean((x.reshape(len(x), -1) @ W.T + b).argmax(1) == y))


def strategy(name: str, clip: Clip | None, robust: bool = False) -> Recorded:
    """FedSSO, or one of the registry's algorithms."""
    if name == "FedSSO":
        inside = {"inner": FedMedian(**NONE)} if robust else NONE
        return FedSSO(eta_l=ALPHA, local_steps=STEPS, clip=clip, **inside)
    average = "median" if robust else "mean"
    return PhasedStrategy(name, alpha=ALPHA, local_steps=STEPS, clip=clip, average=average, **NONE)


def final(
    name: str, attack: Change | None, clip: Clip | None, robust: bool = False, rounds: int = ROUNDS
) -> tuple[float, Recorded]:
    """The accuracy after all rounds, and the strategy afterwards."""

    def tamper(reply: Message) -> list[Message]:
        lies = attack is not None and reply.metadata.src_node_id == LIAR
        return (
            attack(reply, grid.asked)
            if lies and attack is not None and reply.has_content()
            else [reply]
        )

    app = plain() if name == "FedSSO" else client_app(lambda: module(), rows)
    grid = LocalGrid(app, [{"partition-id": i} for i in range(CLIENTS)], tamper)
    run = strategy(name, clip, robust)
    start = {key: Array(value) for key, value in first().items()}
    return accuracy(run.start(grid, ArrayRecord(start), num_rounds=rounds).arrays), run


def module() -> nn.Module:
    return build_model("mclr", digits(), seed=0)


@cache
def first() -> dict[str, NDArray[Any]]:
    """The initial model."""
    state = module().state_dict()
    return {name: value.numpy() for name, value in state.items()}
