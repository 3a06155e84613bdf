"""Nothing of a row leaves a client by way of an error, a metric or a note."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from grid import LocalGrid
from torch import nn

from fedsso.flower import PhasedStrategy, client_app, discreet

APP = Path(__file__).parents[2] / "examples" / "training"
sys.path.insert(0, str(APP))
from training.client_app import app as hospital_app  # noqa: E402
from training.discreet import discreet as hospital_discreet  # noqa: E402
from training.task import start  # noqa: E402

JANE = "Miller Jane 1951-03-04"
Raise = Callable[[], Any]


class Told(ValueError):
    """An error with a part for others."""

    public = "column 'chol': 3 cells"


def convert() -> Any:
    return float(JANE)


def told() -> Any:
    raise Told(f"line 7: {JANE}")


def chained() -> Any:
    try:
        return float(JANE)
    except ValueError as error:
        raise RuntimeError(f"while reading {JANE}") from error


def leave() -> Any:
    sys.exit(JANE)


RAISED: dict[str, tuple[Raise, str]] = {
    "a cell": (convert, "ValueError; the client's own log has the details"),
    "with a public part": (told, "Told: column 'chol': 3 cells"),
    "chained": (chained, "RuntimeError; the client's own log has the details"),
    "an exit": (leave, "SystemExit; the client's own log has the details"),
}


def own_app(mods: list[Any], work: Raise) -> ClientApp:
    """A user's own client, which touches its state before it fails."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        context.state["seen"] = MetricRecord({"n": 1})
        return Message(work(), reply_to=message)

    return app


def ask(
    app: ClientApp, configs: list[dict[str, Any]], arrays: ArrayRecord | None = None
) -> tuple[Message, LocalGrid]:
    """The answer to one message."""
    grid = LocalGrid(app, configs)
    config = ConfigRecord({"alpha": 0.1, "local-steps": 1})
    content = RecordDict({"arrays": arrays or ArrayRecord(), "config": config})
    (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], "train")])
    return reply, grid


@pytest.mark.parametrize("mod", [discreet, hospital_discreet])
@pytest.mark.parametrize(("work", "reason"), RAISED.values(), ids=RAISED)
def test_the_server_hears_the_kind_alone(
    mod: Any, work: Raise, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "flwr"):
        reply, grid = ask(own_app([mod], work), [{}])
    assert reply.error.reason == reason
    assert reply.error.code == 2
    assert JANE in caplog.text  # the client's own log has it all
    assert not grid.contexts[
        grid.get_node_ids()[0]
    ].state  # as where Flower itself catches the error


def test_flower_alone_sends_the_cell() -> None:
    reply, _ = ask(own_app([], convert), [{}])
    assert JANE in reply.error.reason


def test_a_good_reply_passes_unchanged() -> None:
    reply, grid = ask(own_app([discreet], lambda: RecordDict({"m": MetricRecord({"a": 1})})), [{}])
    assert reply.content["m"] == MetricRecord({"a": 1})
    assert "seen" in grid.contexts[grid.get_node_ids()[0]].state


def test_our_own_client_is_discreet(caplog: pytest.LogCaptureFixture) -> None:
    def data(_context: Context) -> Any:
        raise ValueError(f"line 3: {JANE}")

    replies: list[Message] = []
    app = client_app(lambda: nn.Linear(2, 3), data)
    grid = LocalGrid(app, [{}, {}], lambda reply: replies.append(reply) or reply)
    strategy = PhasedStrategy("fedavg", fraction_evaluate=0.0)
    strategy.start(grid, ArrayRecord(nn.Linear(2, 3).state_dict()), num_rounds=1)
    assert {reply.error.reason for reply in replies} == {
        "ValueError; the client's own log has the details"
    }
    dropped = [
        record.getMessage() for record in caplog.records if "dropped: error" in record.getMessage()
    ]
    assert len(dropped) == 2
    assert not any("Miller" in line for line in dropped)


def test_our_own_client_sends_numbers_alone() -> None:
    replies: list[Message] = []
    app = client_app(
        lambda: nn.Linear(2, 3), lambda _: (torch.eye(2).repeat(4, 1), torch.arange(8) % 3)
    )
    grid = LocalGrid(app, [{}, {}], lambda reply: replies.append(reply) or reply)
    PhasedStrategy("scaffold").start(grid, ArrayRecord(nn.Linear(2, 3).state_dict()), num_rounds=1)
    assert len(replies) == 4
    for reply in replies:
        assert not reply.content.config_records
        for record in reply.content.metric_records.values():
            assert all(isinstance(value, int | float) for value in record.values())


def test_a_hospitals_bad_cell_stays_in_the_hospital(tmp_path: Path) -> None:
    good = "63,1,3,132,0,?,1,150,0.3,1,1.6,0.7,4.7,2\n"
    bad = good.replace("132", JANE)
    (tmp_path / "own.data").write_text(good * 5 + bad * 2 + good.replace("63", "old"))
    grid = LocalGrid(hospital_app, [{"data-folder": str(tmp_path)}] * 2)
    for context in grid.contexts.values():
        context.run_config = {"data-dir": "", "alpha": 0.1, "local-steps": 1}
    messages = FedAvg().configure_train(1, ArrayRecord([start()]), ConfigRecord(), grid)
    for reply in grid.send_and_receive(messages):
        assert reply.error.reason.startswith(
            "RowsError: cells that are not numbers, by column: trestbps 2, age 1"
        )
        assert str(tmp_path) not in reply.error.reason
