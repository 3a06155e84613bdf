"""Hostile and broken replies: each is dropped with its reason, and the round goes on as if the node were not there."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from clients import ALPHA, STEPS, app, federation, initial, vector
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from grid import FIRST_NODE, LocalGrid

from fedsso.flower import FedSSO
from fedsso.flower.screen import medians, screen

BAD = FIRST_NODE + 1
Spoil = Callable[[Message], Message | None]


def with_array(name: str, value: Any) -> Spoil:
    def spoil(reply: Message) -> Message:
        arrays = reply.content["arrays"]
        arrays[name] = value if isinstance(value, Array) else Array(np.asarray(value))
        return reply

    return spoil


def with_metric(**values: Any) -> Spoil:
    def spoil(reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord(
            {k.replace("_", "-") if k.startswith("num") else k: v for k, v in values.items() if v is not None}
        )
        return reply

    return spoil


def without(name: str) -> Spoil:
    def spoil(reply: Message) -> Message:
        del reply.content["arrays"][name]
        return reply

    return spoil


def content(**records: Any) -> Spoil:
    return lambda reply: Message(RecordDict(records), reply_to=asked_by(reply))


def asked_by(reply: Message) -> Message:
    """A message that the node could have answered."""
    return Message(RecordDict(), reply.metadata.src_node_id, "train")


def scaled(factor: float) -> Spoil:
    def spoil(reply: Message) -> Message:
        for name in ("a.weight", "b.bias"):
            reply.content["arrays"][name] = Array((reply.content["arrays"][name].numpy() * factor).astype("float32"))
        return reply

    return spoil


def reordered(reply: Message | None) -> Message:
    assert reply is not None
    arrays = reply.content["arrays"]
    reply.content["arrays"] = ArrayRecord({name: arrays[name] for name in reversed(list(arrays))})
    return reply


def cast(dtype: str) -> Spoil:
    """The upload in another type, which is no fault."""

    def spoil(reply: Message) -> Message:
        for name in ("a.weight", "b.bias"):
            reply.content["arrays"][name] = Array(reply.content["arrays"][name].numpy().astype(dtype))
        return reply

    return spoil


def failed(reply: Message) -> Message:
    return Message(Error(3, "out of memory"), reply_to=asked_by(reply))


def lying(shape: tuple[int, ...]) -> Array:
    """An array whose description is right and whose header asks for a terabyte."""
    data = Array(np.zeros((3, 1), "float32")).data
    return Array("float32", (3, 1), "numpy.ndarray", data.replace(b"(3, 1)", repr(shape).encode().ljust(6)))


NAN = np.array([[0.1], [np.nan], [0.2]], "float32")
SPOILT: dict[str, tuple[Spoil, str]] = {
    "nan": (with_array("a.weight", NAN), "a.weight holds NaN"),
    "infinite": (with_array("b.bias", np.array([np.inf], "float32")), "b.bias holds NaN or infinite"),
    "nan in a buffer": (with_array("bn.running_mean", np.array([np.nan, 0], "float32")), "running_mean holds NaN"),
    "huge": (scaled(1e9), "update of length .* is too long"),
    "huge in double": (with_array("b.bias", np.array([1e300])), "update of length .* is too long"),
    "wrong shape": (with_array("a.weight", np.zeros((4, 1), "float32")), r"shape \(4, 1\) instead of \(3, 1\)"),
    "transposed": (with_array("a.weight", np.zeros((1, 3), "float32")), r"shape \(1, 3\) instead of \(3, 1\)"),
    "broadcastable": (with_array("a.weight", np.zeros((1, 1), "float32")), r"shape \(1, 1\) instead of \(3, 1\)"),
    "a number": (with_array("a.weight", np.float32(0.5)), r"shape \(\) instead of \(3, 1\)"),
    "complex": (with_array("b.bias", np.array([1j], "complex64")), "b.bias holds complex64 instead of float32"),
    "integers": (with_array("b.bias", np.array([1])), "b.bias holds int64 instead of float32"),
    "text": (with_array("b.bias", np.array(["x"])), "b.bias holds <U1 instead of float32"),
    "not numpy": (with_array("b.bias", Array("float32", (1,), "numpy.ndarray", b"junk")), "b.bias cannot be read"),
    "other bytes": (with_array("b.bias", Array("float32", (1,), "cbor", b"")), "b.bias cannot be read"),
    "lying header": (with_array("a.weight", lying((2**38,))), "a.weight has the shape"),
    "reordered, and NaN": (lambda reply: reordered(with_array("a.weight", NAN)(reply)), "a.weight holds NaN"),
    "missing key": (without("b.bias"), "it lacks b.bias"),
    "extra key": (with_array("c.extra", np.zeros(1, "float32")), "it adds c.extra"),
    "no weight": (with_metric(train_loss=1.0), "no 'num-examples' among its metrics"),
    "weight 0": (with_metric(train_loss=1.0, num_examples=0), "num-examples is 0, not a positive number"),
    "negative weight": (with_metric(train_loss=1.0, num_examples=-5), "num-examples is -5"),
    "nan weight": (with_metric(train_loss=1.0, num_examples=float("nan")), "num-examples is nan"),
    "infinite weight": (with_metric(train_loss=1.0, num_examples=float("inf")), "num-examples is inf"),
    "absurd weight": (with_metric(train_loss=1.0, num_examples=10**12), "its weight 1e\\+12 is more than"),
    "list as weight": (with_metric(train_loss=1.0, num_examples=[5, 5]), "num-examples is \\[5, 5\\]"),
    "other metrics": (with_metric(num_examples=50), "its metrics are not those of the others"),
    "list as metric": (with_metric(train_loss=[1.0, 2.0], num_examples=50), "its metrics are not those of the others"),
    "empty": (content(), "0 MetricRecords instead of one"),
    "no arrays": (content(m=MetricRecord({"num-examples": 5})), "0 ArrayRecords instead of one"),
    "only settings": (content(c=ConfigRecord({"a": 1})), "0 MetricRecords instead of one"),
    "error": (failed, "error 3: out of memory"),
    "lost": (lambda _: None, "no reply"),
}


def spoiling(spoil: Spoil, *nodes: int) -> LocalGrid:
    """Three clients, some of whose training replies are spoilt."""

    def tamper(reply: Message) -> Message | None:
        bad = reply.metadata.src_node_id in nodes and reply.metadata.message_type == "train"
        return spoil(reply) if bad else reply

    return federation(3, tamper)


@pytest.mark.parametrize(("spoil", "reason"), SPOILT.values(), ids=SPOILT)
def test_a_bad_reply_is_as_none(spoil: Spoil, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedSSO(ALPHA, STEPS)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(spoiling(spoil, BAD), initial(), num_rounds=4)
    others = LocalGrid(app, [{"partition-id": i} for i in (0, 2)])
    alone = FedSSO(ALPHA, STEPS).start(others, initial(), num_rounds=4)
    assert (vector(result.arrays) == vector(alone.arrays)).all()
    assert strategy.trace["dropped"][1:].tolist() == [1.0] * 4
    assert re.search(rf"node {BAD} dropped: .*{reason}", caplog.text), caplog.text
    assert result.train_metrics_clientapp[4]["fedsso-dropped"] == 1


@pytest.mark.parametrize("spoil", [SPOILT[name][0] for name in ("nan", "error", "lost", "no weight", "weight 0")])
def test_when_all_fail_the_model_is_kept_and_the_round_marked(spoil: Spoil, caplog: pytest.LogCaptureFixture) -> None:
    strategy = FedSSO(ALPHA, STEPS)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(spoiling(spoil, *range(FIRST_NODE, FIRST_NODE + 3)), initial(0.5), num_rounds=2)
    assert vector(result.arrays).tolist() == [0.5] * 4
    assert strategy.trace["kept"][1:].tolist() == [1.0, 1.0]
    assert result.train_metrics_clientapp[2]["fedsso-kept"] == 1
    assert "round 2 keeps the model: 0 good replies, min_train_nodes is 2" in caplog.text
    assert "no round moved the model" in caplog.text


def test_below_min_train_nodes_the_model_is_kept_until_enough_reply() -> None:
    lost = {2, 3}

    def tamper(reply: Message) -> Message | None:
        return None if strategy.k + 1 in lost and reply.metadata.src_node_id == BAD else reply

    strategy = FedSSO(ALPHA, STEPS, min_train_nodes=3, min_evaluate_nodes=0, fraction_evaluate=0.0)
    result = strategy.start(federation(3, tamper), initial(), num_rounds=7)
    assert strategy.trace["kept"][1:].tolist() == [0, 1, 1, 0, 0, 0, 0]
    whole = FedSSO(ALPHA, STEPS).start(federation(), initial(), num_rounds=5)
    assert (vector(result.arrays) == vector(whole.arrays)).all()


def test_silence_names_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        FedSSO(ALPHA, STEPS).start(federation(3, lambda _: None), initial(), num_rounds=1)
    assert "start(timeout=...)" in caplog.text


def test_bad_evaluations_are_dropped_too() -> None:
    def tamper(reply: Message) -> Message | None:
        if reply.metadata.message_type == "evaluate" and reply.metadata.src_node_id == BAD:
            return Message(RecordDict({"m": MetricRecord({"eval_loss": 1e9})}), reply_to=asked_by(reply))
        return reply

    strategy = FedSSO(ALPHA, STEPS)
    strategy.start(federation(3, tamper), initial(), num_rounds=2)
    assert strategy.trace["test_loss"][2] < 10
    silent = FedSSO(ALPHA, STEPS)
    silent.start(federation(3, lambda r: r if r.metadata.message_type == "train" else None), initial(), num_rounds=2)
    assert np.isnan(silent.trace["test_loss"]).all()


def test_a_failing_mean_of_evaluations_does_not_end_the_run() -> None:
    def broken(*_: object) -> MetricRecord:
        raise ZeroDivisionError

    strategy = FedSSO(ALPHA, STEPS, evaluate_metrics_aggr_fn=broken)
    strategy.start(federation(), initial(), num_rounds=2)
    assert strategy.k == 2


def test_flowers_own_average_takes_nan_where_ours_does_not() -> None:
    result = FedAvg().start(spoiling(SPOILT["nan"][0], BAD), initial(), num_rounds=1)
    assert np.isnan(vector(result.arrays)).any()


def test_who_answers_twice_is_heard_once() -> None:
    messages = train_messages()
    replies = list(federation().send_and_receive(messages))
    found = screen([*replies, replies[0]], messages, sent(), "num-examples")
    assert found.dropped == {FIRST_NODE: "it answered twice"}
    assert sorted(reply.node for reply in found.good) == [FIRST_NODE, FIRST_NODE + 1, FIRST_NODE + 2]


def test_an_error_that_the_superlink_writes_is_that_of_the_lost_node() -> None:
    messages = train_messages()
    replies = list(federation().send_and_receive(messages))
    for i, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = f"id{i}"  # as the grid sets it
    lost = Message(Error(4, "Node Unavailable"), reply_to=messages[1])
    lost.metadata.__dict__["_src_node_id"] = 1  # the SuperLink
    found = screen([replies[0], lost, replies[2]], messages, sent(), "num-examples")
    assert found.dropped == {FIRST_NODE + 1: "error 4: Node Unavailable"}


@pytest.mark.parametrize("harmless", [reordered, cast("float64"), cast(">f4"), cast("longdouble")])
def test_order_and_types_of_an_upload_change_nothing(harmless: Spoil) -> None:
    strategy = FedSSO(ALPHA, STEPS)
    result = strategy.start(spoiling(harmless, BAD, FIRST_NODE + 2), initial(), num_rounds=4)
    whole = FedSSO(ALPHA, STEPS).start(federation(), initial(), num_rounds=4)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert strategy.trace["dropped"][1:].tolist() == [0] * 4


@pytest.mark.parametrize("clients", [2, 3, 4])
def test_a_weight_next_to_nothing_does_not_make_the_others_heavy(clients: int) -> None:
    def light(reply: Message) -> Message:
        if reply.metadata.src_node_id == BAD:
            reply.content["metrics"]["num-examples"] = 1e-9
        return reply

    strategy = FedSSO(ALPHA, STEPS)
    result = strategy.start(federation(clients, light), initial(), num_rounds=3)
    assert strategy.trace["dropped"][1:].tolist() == [0] * 3
    others = LocalGrid(app, [{"partition-id": i} for i in range(clients) if i != 1])
    alone = FedSSO(ALPHA, STEPS, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    np.testing.assert_allclose(vector(result.arrays), vector(alone.start(others, initial(), 3).arrays), atol=1e-5)


def test_records_by_other_names_are_no_fault() -> None:
    def renamed(reply: Message) -> Message:
        if reply.metadata.src_node_id == BAD:
            reply.content = RecordDict({f"my-{name}": record for name, record in reply.content.items()})
        return reply

    strategy = FedSSO(ALPHA, STEPS)
    result = strategy.start(federation(3, renamed), initial(), num_rounds=3)
    whole = FedSSO(ALPHA, STEPS).start(federation(), initial(), num_rounds=3)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert result.evaluate_metrics_clientapp[3] == whole.evaluate_metrics_clientapp[3]


def test_a_half_precision_upload_costs_nobody_else_precision() -> None:
    strategy = FedSSO(ALPHA, STEPS, fraction_evaluate=0.0)
    result = strategy.start(spoiling(cast("float16"), FIRST_NODE + 2), initial(), num_rounds=4)  # the lightest
    whole = FedSSO(ALPHA, STEPS).start(federation(), initial(), num_rounds=4)
    np.testing.assert_allclose(vector(result.arrays), vector(whole.arrays), atol=1e-2)
    assert result.arrays["a.weight"].numpy().dtype == np.float32


def test_where_two_disagree_on_metrics_both_models_count() -> None:
    grid = federation(2, lambda r: with_metric(num_examples=30, mine=1.0)(r) if from_first(r) else r)
    strategy = FedSSO(ALPHA, STEPS)
    result = strategy.start(grid, initial(), num_rounds=2)
    whole = FedSSO(ALPHA, STEPS).start(federation(2), initial(), num_rounds=2)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert "train_loss" not in result.train_metrics_clientapp[2]


def from_first(reply: Message) -> bool:
    return reply.metadata.src_node_id == FIRST_NODE and reply.metadata.message_type == "train"


def test_alone_a_client_may_move_far() -> None:
    grid = federation(1, lambda r: scaled(1e6)(r) if r.metadata.message_type == "train" else r)
    strategy = FedSSO(ALPHA, STEPS, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    strategy.start(grid, initial(), num_rounds=1)
    assert strategy.trace["dropped"][1] == 0


def test_a_long_text_of_a_client_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def shout(reply: Message) -> Message:
        return Message(Error(3, "no\n" * 10_000), reply_to=asked_by(reply))

    with caplog.at_level(logging.WARNING, "flwr"):
        FedSSO(ALPHA, STEPS).start(spoiling(shout, BAD), initial(), num_rounds=1)
    assert max(len(record.getMessage()) for record in caplog.records) < 300


def test_the_median_of_a_thousand_others() -> None:
    values = np.random.default_rng(0).lognormal(size=1001).tolist()
    found = medians(values)
    for i in (0, 17, 1000):
        others = sorted(values[:i] + values[i + 1 :])
        assert found[i] == others[len(others) // 2]


def test_a_client_far_from_the_others_but_not_absurdly_stays() -> None:
    strategy = FedSSO(ALPHA, STEPS)
    strategy.start(spoiling(scaled(20.0), BAD), initial(), num_rounds=1)
    assert strategy.trace["dropped"][1] == 0


def train_messages() -> list[Message]:
    grid = federation()
    record = RecordDict({"arrays": initial(), "config": ConfigRecord()})
    return [Message(record, node, "train") for node in grid.get_node_ids()]


def sent() -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in ArrayRecord(dict(initial())).items()}
