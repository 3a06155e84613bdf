"""The ClientApp that serves every algorithm: what it answers, what it keeps, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg
from grid import NODES, LocalGrid
from torch import nn
from torch.nn.functional import cross_entropy

from fedsso.flower.client import client_app
from fedsso.flower.phased import PhasedStrategy

Rows = Callable[[Context], Any]


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, outputs))


def table(context: Context) -> tuple[Any, ...]:
    """Rows of a node's own, in numpy."""
    draw = np.random.default_rng(context.node_id % 97)
    x = draw.normal(size=(6, 2)).astype("float32")
    return x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)


def split(context: Context) -> tuple[Any, ...]:
    x, y = table(context)
    return x[:4], y[:4], x[4:], y[4:]


def started(
    grid: LocalGrid, name: str = "scaffold", rounds: int = 2, **options: Any
) -> PhasedStrategy:
    strategy = PhasedStrategy(name, local_steps=2, **options)
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds)
    return strategy


def nodes(app: Any, configs: Any = ({}, {})) -> LocalGrid:
    return LocalGrid(app, configs)


@pytest.mark.parametrize("data", [split, table])
def test_it_evaluates_on_test_rows_or_else_on_all(data: Rows) -> None:
    replies: list[Message] = []
    grid = LocalGrid(client_app(net, data), ({},), lambda reply: replies.append(reply) or reply)
    strategy = PhasedStrategy(
        "fedavg", min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1
    )
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=1)
    trained, evaluated = (reply.content["metrics"] for reply in replies)
    module, (x, y) = net(), data(grid.contexts[NODES[0]])[-2:]
    module.load_state_dict(result.arrays.to_torch_state_dict())
    outputs = module(torch.from_numpy(x)).detach()
    assert set(trained) == {"train_loss", "num-examples"}
    assert evaluated["eval_loss"] == pytest.approx(
        float(cross_entropy(outputs, torch.from_numpy(y))), rel=1e-6
    )
    assert evaluated["eval_acc"] == float((outputs.argmax(1).numpy() == y).mean())
    assert evaluated["num-examples"] == len(y)


def test_a_real_target_has_no_accuracy() -> None:
    def data(context: Context) -> tuple[Any, Any]:
        x, y = table(context)
        return x, y.astype("float32")

    grid = nodes(client_app(lambda: net(1), data, loss="mse"))
    strategy = PhasedStrategy("fedavg", alpha=0.1)
    result = strategy.start(grid, ArrayRecord(net(1).state_dict()), num_rounds=3)
    assert set(result.evaluate_metrics_clientapp[1]) == {"eval_loss"}
    loss = strategy.trace["test_loss"][1:]
    assert loss[2] < loss[1] < loss[0]


def test_the_weight_goes_by_the_name_that_the_server_asks_for() -> None:
    strategy = started(nodes(client_app(net, table)), rounds=1, weighted_by_key="rows")
    assert strategy.trace["kept"].tolist()[1:] == [0]


def test_it_keeps_no_more_than_it_needs() -> None:
    grid = nodes(client_app(net, table))
    started(grid, "scaffold", rounds=4)
    assert [len(context.state) for context in grid.contexts.values()] == [
        2,
        2,
    ]  # this state and the one before it
    grid = nodes(client_app(net, table))
    started(grid, "feddane", rounds=2)
    assert [len(context.state) for context in grid.contexts.values()] == [0, 0]


def test_a_client_without_partition_draws_by_its_node() -> None:
    def same(_: Context) -> tuple[Any, Any]:
        draw = np.random.default_rng(0)
        return draw.normal(size=(6, 2)).astype("float32"), np.arange(6) % 3

    uploads: list[Any] = []

    def tamper(reply: Message) -> Message:
        uploads.append(reply.content.array_records)
        return reply

    def updates(configs: Any) -> list[Any]:
        uploads.clear()
        grid = LocalGrid(client_app(net, same), configs, tamper)
        started(grid, "fedavg", rounds=1, batch_size=2, fraction_evaluate=0.0)
        return [records["arrays"]["upload"].numpy() for records in uploads]

    one, other = updates([{}, {}])
    assert not np.array_equal(one, other)
    one, other = updates([{"partition-id": 4}, {"partition-id": 4}])
    assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("model", "data", "complaint"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 3, bias=False)),
            table,
            "this client's model is not the server's",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
            table,
            "this client's model is not the server's",
        ),
        (net, lambda _: (1, 2, 3), "data(context) must give"),
        (net, lambda _: ([[np.nan, 1.0]], [0]), "NaN"),
    ],
)
def test_what_a_client_refuses(
    model: Callable[[], nn.Module], data: Rows, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = started(nodes(client_app(model, data)), rounds=1, fraction_evaluate=0.0)
    assert strategy.trace["kept"].tolist()[1:] == [1]
    assert complaint in caplog.text


def test_a_client_that_lost_its_state_says_so(caplog: pytest.LogCaptureFixture) -> None:
    grid = nodes(client_app(net, table), ({}, {}, {}))
    strategy = started(grid, rounds=1)
    grid.contexts[NODES[0]].state = RecordDict()
    result = strategy.start(grid, strategy._problem.arrays(strategy._state), num_rounds=1)  # type: ignore[union-attr, arg-type]
    assert result.train_metrics_clientapp[1]["fedsso-dropped"] == 1
    assert "has lost the state" in caplog.text
    grid = nodes(client_app(net, table), ({}, {}, {}))

    def forget(reply: Message) -> Message:
        if reply.metadata.src_node_id == NODES[0]:
            grid.contexts[NODES[0]].state = RecordDict()
        return reply

    grid.tamper = forget
    assert started(grid, "feddane", rounds=1).trace["dropped"].tolist()[1:] == [1]
    assert "has lost what it received earlier in the round" in caplog.text


def test_a_message_of_another_strategy_is_refused() -> None:
    grid = nodes(client_app(net, table))
    messages = FedAvg().configure_train(1, ArrayRecord(net().state_dict()), ConfigRecord(), grid)
    for reply in grid.send_and_receive(messages):
        assert "use PhasedStrategy on the server" in reply.error.reason
    empty = Message(RecordDict(), NODES[0], MessageType.EVALUATE)
    assert "use PhasedStrategy" in grid.send_and_receive([empty])[0].error.reason
