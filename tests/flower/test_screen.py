"""Hostile and broken replies: whatever one node sends, the run goes on, and the log tells what
became of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from clients import ALPHA, STEPS, app, federation, initial, vector
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum, Result
from grid import NODES, LocalGrid
from hostile import (
    BLANK,
    BOUNDED,
    CLIPPED,
    DROPPED,
    HARMLESS,
    HOSTILE,
    IGNORED,
    Hostile,
    entry,
    lost,
)
from torch import Tensor, nn

from fedsso.flower import FedSSO, PhasedStrategy, client_app
from fedsso.flower.recorded import Recorded
from fedsso.flower.screen import medians, screen

BAD = NODES[1]
CLIENTS = 5
Spoil = Callable[[Message], Message | None]


# ---- every kind of hostile reply, for every strategy ----


class Net(nn.Module):
    """A small model with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def rows(context: Context) -> tuple[Tensor, Tensor]:
    """A node's own rows."""
    i = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(i)
    x = torch.randn(20 + 5 * i, 4, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


NONE: dict[str, Any] = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
STRATEGIES: dict[str, Callable[[], Recorded]] = {
    "FedSSO": lambda: FedSSO(eta_l=ALPHA, local_steps=STEPS, **NONE),
    "FedSSO of FedMedian": lambda: FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=FedMedian(**NONE)),
    "FedSSO of Krum": lambda: FedSSO(
        eta_l=ALPHA, local_steps=STEPS, inner=Krum(num_malicious_nodes=1, **NONE)
    ),
    "FedSSO of FedTrimmedAvg": lambda: FedSSO(
        eta_l=ALPHA, local_steps=STEPS, inner=FedTrimmedAvg(**NONE)
    ),
    "PhasedStrategy fedavg": lambda: PhasedStrategy("fedavg", local_steps=3, **NONE),
    "PhasedStrategy fedavg, median": lambda: PhasedStrategy(
        "fedavg", local_steps=3, average="median", **NONE
    ),
    "PhasedStrategy scaffold": lambda: PhasedStrategy("scaffold", local_steps=3, **NONE),
    "PhasedStrategy feddane, trimmedavg": lambda: PhasedStrategy(
        "feddane", local_steps=3, average="trimmedavg:0.2", **NONE
    ),
}


OTHER_LOSS = (
    "FedSSO of Krum",
    "PhasedStrategy feddane, trimmedavg",
)  # of the one reply chosen; of a later exchange
BESIDE = (  # what is wrong with it shows beside good replies alone
    *("huge", "huge in double", "absurd weight", "another metric"),
    *("enormous list as metric", "escapes in a metric's name"),
)


def rounds_of(name: str) -> int:
    """Two where anything stays from round to round."""
    return 2 if name.startswith("FedSSO") or "scaffold" in name else 1


def grid_of(name: str, kinds: dict[int, Hostile]) -> LocalGrid:
    """Five clients, of which some send hostile replies."""

    def tamper(reply: Message) -> list[Message]:
        kind = kinds.get(reply.metadata.src_node_id)
        return [reply] if kind is None or reply.has_error() else kind.change(reply, grid.asked)

    app_of = app if name.startswith("FedSSO") else client_app(Net, rows)
    grid = LocalGrid(app_of, [{"partition-id": i} for i in range(CLIENTS)], tamper)
    return grid


def run(name: str, kinds: dict[int, Hostile]) -> tuple[Recorded, Result]:
    strategy = STRATEGIES[name]()
    start = initial(0.1) if name.startswith("FedSSO") else ArrayRecord(Net().state_dict())
    return strategy, strategy.start(grid_of(name, kinds), start, num_rounds=rounds_of(name))


@cache
def reference(name: str, silent: bool) -> tuple[Recorded, Result]:
    """The run with good replies alone, or with those of one node lost."""
    return run(name, {BAD: Hostile(lost, DROPPED)} if silent else {})


def equal(a: ArrayRecord, b: ArrayRecord) -> bool:
    return list(a) == list(b) and all(
        np.array_equal(a[name].numpy(), b[name].numpy()) for name in a
    )


def apart(a: ArrayRecord, b: ArrayRecord) -> float:
    """The largest difference between two models; counts aside."""
    pairs = [(a[name].numpy(), b[name].numpy()) for name in a]
    return max(float(np.abs(x - y).max()) for x, y in pairs if x.dtype.kind == "f")


@pytest.mark.sample("kind")
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", STRATEGIES)
def test_whatever_a_node_sends_the_run_goes_on(
    name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = HOSTILE[kind]
    (_, whole), (quiet, without) = reference(name, False), reference(name, True)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy, result = run(name, {BAD: hostile})
    lines = [record.getMessage() for record in caplog.records]
    trace, effect = strategy.trace, hostile.effect
    assert strategy.k == rounds_of(name)
    assert trace["kept"][1:].tolist() == [0.0] * rounds_of(name)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())
    assert np.isfinite(trace["train_loss"][1:]).all()
    assert any(re.search(hostile.says, line) for line in lines) or not hostile.says, lines
    assert all(line.removeprefix("\t").isprintable() and len(line) < 400 for line in lines)
    if effect == DROPPED:
        assert equal(result.arrays, without.arrays)
        assert trace["dropped"].tolist()[1:] == quiet.trace["dropped"].tolist()[1:]
        assert any(f"node {BAD} dropped: " in line for line in lines)
    else:
        assert trace["dropped"][1:].tolist() == [0.0] * rounds_of(name)
        assert not any("dropped" in line for line in lines)
    if effect in (HARMLESS, IGNORED, BLANK):
        assert equal(result.arrays, whole.arrays)
    if effect == BLANK and name not in OTHER_LOSS:
        assert trace["train_loss"][1] == pytest.approx(quiet.trace["train_loss"][1])
    if effect in (CLIPPED, BOUNDED):
        assert apart(result.arrays, without.arrays) < 100
    assert (trace["clipped"][1:].max() > 0) == (effect == CLIPPED)
    assert (trace["ignored"][1:].max() > 0) == any("ignored" in line for line in lines)


@pytest.mark.parametrize("name", STRATEGIES)
def test_when_everybody_is_hostile_the_model_is_kept(name: str) -> None:
    bad = [kind for name, kind in HOSTILE.items() if kind.effect == DROPPED and name not in BESIDE]
    start = initial(0.1) if name.startswith("FedSSO") else ArrayRecord(Net().state_dict())
    for i in range(0, len(bad), CLIENTS):
        kinds = {NODES[j]: bad[(i + j) % len(bad)] for j in range(CLIENTS)}
        strategy, result = run(name, kinds)
        assert strategy.trace["kept"][1:].tolist() == [1.0] * rounds_of(name)
        assert equal(result.arrays, start)


# ---- rounds, timeouts, evaluations ----


def spoiling(spoil: Spoil, *nodes: int) -> LocalGrid:
    """Three clients, some of whose training replies are spoilt."""

    def tamper(reply: Message) -> Message | None:
        bad = reply.metadata.src_node_id in nodes and reply.metadata.message_type == "train"
        return spoil(reply) if bad else reply

    return federation(3, tamper)


def scaled(factor: float) -> Spoil:
    def spoil(reply: Message) -> Message:
        for name in ("a.weight", "b.bias"):
            reply.content["arrays"][name] = Array(
                (reply.content["arrays"][name].numpy() * factor).astype("float32")
            )
        return reply

    return spoil


def reordered(reply: Message) -> Message:
    arrays = reply.content["arrays"]
    reply.content["arrays"] = ArrayRecord({name: arrays[name] for name in reversed(list(arrays))})
    return reply


def cast(dtype: str) -> Spoil:
    """The upload in another type, which is no fault."""

    def spoil(reply: Message) -> Message:
        for name in ("a.weight", "b.bias"):
            reply.content["arrays"][name] = Array(
                reply.content["arrays"][name].numpy().astype(dtype)
            )
        return reply

    return spoil


def nan(reply: Message) -> Message:
    return entry(np.nan)(reply, reply)[0]


def test_when_all_fail_the_model_is_kept_and_the_round_marked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(spoiling(nan, *NODES[:3]), initial(0.5), num_rounds=2)
    assert vector(result.arrays).tolist() == [0.5] * 4
    assert strategy.trace["kept"][1:].tolist() == [1.0, 1.0]
    assert result.train_metrics_clientapp[2]["fedsso-kept"] == 1
    assert result.train_metrics_clientapp[2]["fedsso-dropped"] == 3
    assert "round 2 keeps the model: 0 good replies, min_train_nodes is 2" in caplog.text
    assert "no round moved the model" in caplog.text


def test_below_min_train_nodes_the_model_is_kept_until_enough_reply() -> None:
    lost = {2, 3}

    def tamper(reply: Message) -> Message | None:
        return None if strategy.k + 1 in lost and reply.metadata.src_node_id == BAD else reply

    strategy = FedSSO(
        eta_l=ALPHA,
        local_steps=STEPS,
        min_train_nodes=3,
        min_evaluate_nodes=0,
        fraction_evaluate=0.0,
    )
    result = strategy.start(federation(3, tamper), initial(), num_rounds=7)
    assert strategy.trace["kept"][1:].tolist() == [0, 1, 1, 0, 0, 0, 0]
    whole = FedSSO(eta_l=ALPHA, local_steps=STEPS).start(federation(), initial(), num_rounds=5)
    assert (vector(result.arrays) == vector(whole.arrays)).all()


def test_silence_names_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        FedSSO(eta_l=ALPHA, local_steps=STEPS).start(
            federation(3, lambda _: None), initial(), num_rounds=1
        )
    assert "start(timeout=...)" in caplog.text


def test_bad_evaluations_are_dropped_too() -> None:
    def tamper(reply: Message) -> Message | None:
        if reply.metadata.message_type == "evaluate" and reply.metadata.src_node_id == BAD:
            reply.content = RecordDict({"m": MetricRecord({"eval_loss": 1e9})})
        return reply

    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    strategy.start(federation(3, tamper), initial(), num_rounds=2)
    assert strategy.trace["test_loss"][2] < 10
    silent = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    silent.start(
        federation(3, lambda r: r if r.metadata.message_type == "train" else None),
        initial(),
        num_rounds=2,
    )
    assert np.isnan(silent.trace["test_loss"]).all()


def test_a_failing_mean_of_evaluations_does_not_end_the_run() -> None:
    def broken(*_: object) -> MetricRecord:
        raise ZeroDivisionError

    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, evaluate_metrics_aggr_fn=broken)
    strategy.start(federation(), initial(), num_rounds=2)
    assert strategy.k == 2


def test_flowers_own_average_takes_nan_where_ours_does_not() -> None:
    result = FedAvg().start(spoiling(nan, BAD), initial(), num_rounds=1)
    assert np.isnan(vector(result.arrays)).any()


def test_who_answers_twice_is_heard_once() -> None:
    messages, replies = exchange()
    found = screen([*replies, replies[0]], messages, sent(), "num-examples")
    assert found.dropped == {}
    assert found.ignored == [(NODES[0], "a second reply")]
    assert {reply.node for reply in found.good} == set(NODES[:3])
    assert len(found.good) == 3


def test_replies_of_an_earlier_round_do_not_count() -> None:
    _, old = exchange()
    messages, new = exchange()
    found = screen([*old, *new], messages, sent(), "num-examples")
    assert len(found.ignored) == 3
    assert all("answers another message" in reason for _, reason in found.ignored)
    assert {id(reply.message) for reply in found.good} == {id(reply) for reply in new}


def test_an_answer_to_the_message_of_another_node_does_not_silence_it() -> None:
    messages, replies = exchange()
    thief = Message(RecordDict(dict(replies[0].content)), reply_to=messages[1])
    thief.metadata.__dict__["_src_node_id"] = NODES[0]
    found = screen([thief, *replies], messages, sent(), "num-examples")
    assert len(found.good) == 3
    assert found.ignored == [(NODES[0], found.ignored[0][1])]


def test_an_error_that_the_superlink_writes_is_that_of_the_lost_node() -> None:
    messages, replies = exchange()
    gone = Message(Error(4, "Node Unavailable"), reply_to=messages[1])
    gone.metadata.__dict__["_src_node_id"] = messages[1].metadata.src_node_id  # the SuperLink
    gone.metadata.__dict__["_group_id"] = ""
    found = screen([replies[0], gone, replies[2]], messages, sent(), "num-examples")
    assert found.dropped == {NODES[1]: "error 4: Node Unavailable"}
    forged = Message(Error(4, "Node Unavailable"), reply_to=messages[1])
    forged.metadata.__dict__["_src_node_id"] = 4242  # not the SuperLink
    assert screen([forged, *replies], messages, sent(), "num-examples").dropped == {}


def test_a_grid_without_message_ids_is_served_by_node() -> None:
    messages, replies = exchange()
    for message in messages:
        message.metadata.__dict__["_message_id"] = ""
    assert len(screen(replies, messages, sent(), "num-examples").good) == 3


@pytest.mark.parametrize("harmless", [reordered, cast("float64"), cast(">f4"), cast("longdouble")])
def test_order_and_types_of_an_upload_change_nothing(harmless: Spoil) -> None:
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    result = strategy.start(spoiling(harmless, BAD, NODES[2]), initial(), num_rounds=4)
    whole = FedSSO(eta_l=ALPHA, local_steps=STEPS).start(federation(), initial(), num_rounds=4)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert strategy.trace["dropped"][1:].tolist() == [0] * 4


@pytest.mark.parametrize("clients", [2, 3, 4])
def test_a_weight_next_to_nothing_does_not_make_the_others_heavy(clients: int) -> None:
    def light(reply: Message) -> Message:
        if reply.metadata.src_node_id == BAD:
            reply.content["metrics"]["num-examples"] = 1e-9
        return reply

    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    result = strategy.start(federation(clients, light), initial(), num_rounds=3)
    assert strategy.trace["dropped"][1:].tolist() == [0] * 3
    others = LocalGrid(app, [{"partition-id": i} for i in range(clients) if i != 1])
    alone = FedSSO(
        eta_l=ALPHA,
        local_steps=STEPS,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )
    np.testing.assert_allclose(
        vector(result.arrays), vector(alone.start(others, initial(), 3).arrays), atol=1e-5
    )


def test_records_by_other_names_are_no_fault() -> None:
    def renamed(reply: Message) -> Message:
        if reply.metadata.src_node_id == BAD:
            reply.content = RecordDict(
                {f"my-{name}": record for name, record in reply.content.items()}
            )
        return reply

    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    result = strategy.start(federation(3, renamed), initial(), num_rounds=3)
    whole = FedSSO(eta_l=ALPHA, local_steps=STEPS).start(federation(), initial(), num_rounds=3)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert result.evaluate_metrics_clientapp[3] == whole.evaluate_metrics_clientapp[3]


def test_a_half_precision_upload_costs_nobody_else_precision() -> None:
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, fraction_evaluate=0.0)
    result = strategy.start(
        spoiling(cast("float16"), NODES[2]), initial(), num_rounds=4
    )  # the lightest
    whole = FedSSO(eta_l=ALPHA, local_steps=STEPS).start(federation(), initial(), num_rounds=4)
    np.testing.assert_allclose(vector(result.arrays), vector(whole.arrays), atol=1e-2)
    assert result.arrays["a.weight"].numpy().dtype == np.float32


def test_where_two_disagree_on_metrics_both_models_count() -> None:
    def other(reply: Message) -> Message:
        if from_first(reply):
            reply.content["metrics"] = MetricRecord({"num-examples": 30, "mine": 1.0})
        return reply

    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    result = strategy.start(federation(2, other), initial(), num_rounds=2)
    whole = FedSSO(eta_l=ALPHA, local_steps=STEPS).start(federation(2), initial(), num_rounds=2)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert "train_loss" not in result.train_metrics_clientapp[2]


def from_first(reply: Message) -> bool:
    return reply.metadata.src_node_id == NODES[0] and reply.metadata.message_type == "train"


def test_alone_a_client_may_move_far() -> None:
    grid = federation(1, lambda r: scaled(1e6)(r) if r.metadata.message_type == "train" else r)
    strategy = FedSSO(
        eta_l=ALPHA,
        local_steps=STEPS,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )
    strategy.start(grid, initial(), num_rounds=1)
    assert strategy.trace["dropped"][1] == 0


def test_the_median_of_the_others() -> None:
    values = np.random.default_rng(0).lognormal(size=1001).tolist()
    found = medians(values)
    for i in (0, 17, 1000):
        others = sorted(values[:i] + values[i + 1 :])
        assert found[i] == others[len(others) // 2]


def test_a_client_far_from_the_others_but_not_absurdly_stays() -> None:
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS)
    strategy.start(spoiling(scaled(20.0), BAD), initial(), num_rounds=1)
    assert strategy.trace["dropped"][1] == 0


def exchange() -> tuple[list[Message], list[Message]]:
    """Messages to three nodes, and their answers."""
    grid = federation()
    record = RecordDict({"arrays": initial(), "config": ConfigRecord()})
    messages = [Message(record, node, "train") for node in grid.get_node_ids()]
    return messages, list(grid.send_and_receive(messages))


def sent() -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in ArrayRecord(dict(initial())).items()}
