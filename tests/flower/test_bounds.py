"""A bounded influence, and averages that bear a minority of liars."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from attacked import ROUNDS, final
from clients import ALPHA, STEPS, federation, initial, vector
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from grid import NODES, LocalGrid
from hostile import Change, longer

from fedsso.errors import InputError
from fedsso.flower import Clip, FedSSO, PhasedStrategy
from fedsso.flower.averages import average, median, trimmed_avg
from fedsso.flower.bounds import factors
from fedsso.flower.statistics import fault

OFF: Any = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}
BAD = NODES[1]


# ---- the bound ----


def test_what_exceeds_the_others_median_is_shortened_to_the_bound() -> None:
    assert factors([1.0, 2.0, 3.0, 100.0], 10) == [1, 1, 1, 0.2]  # 10 times 2
    assert factors([1.0, 1.0, 10.0], 10) == [1, 1, 1]
    assert factors([1.0, 1e300], 10) == [1, 1]  # two: no majority
    assert factors([5.0], 1) == [1]
    assert factors([0.0, 0.0, 0.0, 7.0], 10) == [1, 1, 1, 1]  # nobody else has moved
    assert factors([], 10) == []
    assert factors([1.0, 2.0, float("inf")], 10)[2] == 0


def sizes_of(weights: dict[int, float]) -> Any:
    def tamper(reply: Message) -> Message:
        if reply.has_content():
            number = NODES.index(reply.metadata.src_node_id)
            reply.content["metrics"]["num-examples"] = weights.get(number, 20.0)
        return reply

    return tamper


@pytest.mark.parametrize(
    "weights", [{0: 1000}, {0: 1000, 1: 200}, dict(enumerate(np.geomspace(20, 1000, 10)))]
)
def test_honest_hospitals_of_unequal_sizes_are_left_alone(weights: dict[int, float]) -> None:
    def run(clip: Clip | None) -> tuple[FedSSO, Any]:
        strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, clip=clip, **OFF)
        return strategy, strategy.start(federation(10, sizes_of(weights)), initial(), num_rounds=4)

    (strategy, clipped), (_, whole) = run(Clip()), run(None)
    assert strategy.trace["clipped"][1:].tolist() == [0.0] * 4
    assert (vector(clipped.arrays) == vector(whole.arrays)).all()


def heavy_grid(clients: int, factor: float, weight: float) -> LocalGrid:
    change = longer(factor, weight)

    def tamper(reply: Message) -> Message | list[Message]:
        return change(reply, grid.asked) if reply.metadata.src_node_id == BAD else reply

    grid = federation(clients, tamper)
    return grid


def test_one_reply_moves_the_mean_by_no_more_than_its_bound() -> None:
    honest = FedSSO(eta_l=ALPHA, local_steps=STEPS, **OFF).start(
        heavy_grid(9, 1.0, 1.0), initial(), num_rounds=1
    )
    x = vector(honest.arrays)
    distance = {}
    for clip in (None, Clip(), Clip(3, 1)):
        strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, clip=clip, **OFF)
        result = strategy.start(heavy_grid(9, -200.0, 1e3), initial(), num_rounds=1)
        distance[clip] = float(np.linalg.norm(vector(result.arrays) - x))
    length = float(np.linalg.norm(x))
    assert distance[None] > 100 * length
    assert (
        distance[Clip()] < 25 * length
    )  # its share is below 1, its update 20 times the others' at most
    assert distance[Clip(3, 1)] < length


def test_two_replies_are_not_clipped() -> None:
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, **OFF)
    strategy.start(heavy_grid(2, 90.0, 1e3), initial(), num_rounds=1)
    assert strategy.trace["clipped"][1] == 0


def test_what_is_clipped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, **OFF)
        result = strategy.start(heavy_grid(5, 90.0, 1e3), initial(), num_rounds=1)
    assert strategy.trace["clipped"][1] == 1
    assert result.train_metrics_clientapp[1]["fedsso-clipped"] == 1
    assert (
        f"node {BAD} clipped: its weight 5e+04 counts as 1.5e+03; its update of length"
        in caplog.text
    )


def test_differential_privacy_clips_by_itself() -> None:
    noisy = DifferentialPrivacyServerSideFixedClipping(FedAvg(**OFF), 0.1, 0.5, 5)
    assert FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=noisy, clip=Clip(1, 1)).clip is None
    assert FedSSO(
        eta_l=ALPHA, local_steps=STEPS, inner=FedAvg(**OFF), clip=Clip(1, 1)
    ).clip == Clip(1, 1)


@pytest.mark.parametrize("clip", [Clip(0.5, 1), Clip(1, float("nan")), (1, 2, 3), 10, Clip("a", 1)])  # type: ignore[arg-type]
@pytest.mark.parametrize(
    "make",
    [
        lambda clip: FedSSO(eta_l=0.1, local_steps=1, clip=clip),
        lambda c: PhasedStrategy("fedavg", clip=c),
    ],
)
def test_wrong_bounds_are_refused(make: Any, clip: Any) -> None:
    with pytest.raises(InputError, match="clip"):
        make(clip)


# ---- buffers ----


def test_buffers_are_judged_by_what_they_are() -> None:
    one, count = np.ones(2, "float32"), np.array(10)
    assert fault("bn.running_var", one, one) == ""
    assert fault("bn.running_var", np.zeros(2), one) == ""
    assert "variance lies in [0" in fault("bn.running_var", np.array([1.0, -1e-9]), one)
    assert fault("bn.running_mean", -one, one) == ""
    assert "a mean" in fault("bn.running_mean", one * 1e20, one)
    assert (
        fault("bn.num_batches_tracked", np.array(0), count) == ""
    )  # a client with statistics of its own
    assert "a count" in fault("bn.num_batches_tracked", np.array(-1), count)
    assert "a count" in fault("bn.num_batches_tracked", np.array(2**40), count)
    assert fault("places", np.array([-3]), np.array([5])) == ""  # integers of the user's own
    assert "has moved by" in fault("places", np.array([-(2**62)]), np.array([5]))
    assert fault("weight", -one, one) == ""
    assert fault("running_var", np.zeros(0), np.zeros(0)) == ""


def test_numbers_beyond_the_models_type_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    def half(record: ArrayRecord) -> ArrayRecord:
        arrays = {name: array.numpy() for name, array in record.items()}
        return ArrayRecord(
            {n: Array(a.astype("float16") if a.dtype.kind == "f" else a) for n, a in arrays.items()}
        )

    def tamper(reply: Message) -> Message:
        if reply.metadata.src_node_id == BAD:
            reply.content["arrays"]["b.bias"] = Array(np.array([1e5], "float32"))
        return reply

    start = half(initial(100.0))
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, **OFF)
    result = strategy.start(federation(4, tamper), start, num_rounds=1)
    assert strategy.trace["dropped"][1] == 1
    assert "b.bias holds numbers beyond float16" in caplog.text
    assert np.isfinite(vector(result.arrays)).all()


# ---- robust averages ----


def test_the_averages_are_those_of_numpy_and_flower() -> None:
    for n in (1, 2, 5, 8):
        stacked = torch.randn(
            n, 3, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64
        )
        np.testing.assert_allclose(median(stacked), np.median(stacked.numpy(), axis=0))
        for beta in (0.0, 0.2, 0.4):
            np.testing.assert_allclose(trimmed_avg(stacked, beta), trim_mean(stacked.numpy(), beta))


def test_averages_by_name() -> None:
    stacked = torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e9]])
    assert average("mean") is None
    found = average("median"), average("trimmedavg"), average("trimmedavg:0.4")
    assert [float(one(stacked)) for one in found if one is not None] == [2, 2, 2]
    for wrong in (
        "mode",
        "median:3",
        "trimmedavg:0.5",
        "trimmedavg:x",
        "trimmedavg:-1",
        "mean:2",
        7,
    ):
        with pytest.raises(InputError):
            PhasedStrategy("fedavg", average=wrong)  # type: ignore[arg-type]


# ---- one liar of ten ----

TIGHT = Clip(update=3, weight=1)
"""Nobody counts more than the others' median, nor pulls more than three times as far."""


def once(change: Change) -> Change:
    """A lie in round 7 alone."""
    count = 0

    def lie(reply: Message, asked: Message) -> list[Message]:
        nonlocal count
        count += 1
        return change(reply, asked) if count == 7 else [reply]

    return lie


@pytest.mark.sample
@pytest.mark.parametrize("name", ["FedSSO", "fedavg", "scaffold"])
def test_one_liar_of_ten(name: str) -> None:
    honest, strategy = final(name, None, Clip())
    assert honest > 0.85
    assert honest == final(name, None, None)[0]
    assert strategy.trace["clipped"][1:].tolist() == [0.0] * ROUNDS
    for attack in (longer(-90.0), longer(-10.0, 1e3)):  # in every round
        assert final(name, attack, None)[0] < 0.5
        if name != "scaffold":  # whose control variates are a second way in
            assert final(name, attack, TIGHT)[0] > honest - 0.3
        assert final(name, attack, Clip(), robust=True)[0] > honest - 0.15


def test_one_long_update_in_one_round_is_got_over() -> None:
    honest, _ = final("fedavg", None, None)
    accuracy, strategy = final("fedavg", once(longer(-300.0)), Clip())
    assert accuracy > honest - 0.2
    assert accuracy > final("fedavg", once(longer(-300.0)), None)[0]
    assert strategy.trace["clipped"][1:].sum() == 1
