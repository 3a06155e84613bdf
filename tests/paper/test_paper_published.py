"""The paper's numbers agree with themselves and with the authors' released curves, except where it
is said."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fedsso import load, simulate
from fedsso.algorithms import ALGORITHMS, make
from fedsso.data.partition import TABLES
from fedsso.errors import InputError
from fedsso.paper.published import EVERY, TABLE2, Block, Published, Released, released

D = {"mclr": 7850, "cnn": 6230}
VECTORS = {"scaffold": 2, "feddane": 2}
CURVES = [curve for block in TABLE2 for curve in released(block)]
ROWS = [(name, row) for name, block in TABLE2.items() for row in block.rows]

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)


def row_of(block: str, algorithm: str) -> Published:
    return next(row for row in TABLE2[block].rows if row.algorithm == algorithm)


def best_of(block: str, algorithm: str) -> Released:
    """The released curve with the steps of Table 2."""
    row = row_of(block, algorithm)
    (curve,) = (
        c for c in released(block, algorithm, 5) if (c.alpha, c.eta) == (row.alpha, row.eta or 1.0)
    )
    return curve


# ---- Table 2 ----


def charged(name: str, block: Block, row: Published) -> int:
    """Bytes of one client, both ways, to the deciding target or the last one reached."""
    reached = dict(zip(block.targets, row.rounds, strict=True))
    last = [r for r in row.rounds if r is not None][-1]
    rounds = reached[block.deciding] or last
    return 2 * 4 * D[name.split("-")[1]] * VECTORS.get(row.algorithm, 1) * rounds


def test_bytes_follow_from_rounds_with_two_exceptions() -> None:
    off = {
        (n, r.algorithm): (r.bytes, charged(n, TABLE2[n], r))
        for n, r in ROWS
        if r.bytes != charged(n, TABLE2[n], r)
    }
    assert off == {
        ("mnist-mclr", "feddane"): (22_361_600, 23_361_600),  # a slip of one digit
        ("fashion-mclr", "fednl"): (None, 565_200),  # the paper gives none
    }


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_rows_are_of_registered_algorithms_and_rounds_grow(name: str, row: Published) -> None:
    assert row.algorithm in ALGORITHMS
    assert (row.eta is not None) == (row.algorithm == "fedsso")
    reached = [r for r in row.rounds if r is not None]
    assert reached == sorted(reached)
    assert row.rounds == (*reached, *[None] * (5 - len(reached)))
    assert len(TABLE2[name].targets) == 5


def test_the_deciding_accuracy_is_where_fedavg_has_200() -> None:
    for name, block in TABLE2.items():
        assert row_of(name, "fedavg").rounds[block.targets.index(block.deciding)] == 200


# ---- the released curves ----


def test_fedsso_on_fashion_is_the_published_row() -> None:
    assert best_of("fashion-cnn", "fedsso").last_below == row_of("fashion-cnn", "fedsso").rounds


@pytest.mark.parametrize("algorithm", ["scaffold", "fedavg"])
def test_counts_on_mnist_are_the_published_ones(algorithm: str) -> None:
    """As far as the paper counts: SCAFFOLD reaches no more, FedAvg's 200 for 0.88 is allotted."""
    found, row = best_of("mnist-cnn", algorithm).last_below, row_of("mnist-cnn", algorithm)
    assert found[:3] == row.rounds[:3]
    assert found[3:] == {"scaffold": (None, None), "fedavg": (164, None)}[algorithm]


def test_fedsso_on_mnist_differs_in_the_two_entries_named() -> None:
    assert best_of("mnist-cnn", "fedsso").last_below == (10, 13, 19, 34, 192)
    assert row_of("mnist-cnn", "fedsso").rounds == (10, 13, 34, 40, 192)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_first_order_rows_on_fashion_agree_where_the_curve_is_calm(algorithm: str) -> None:
    curve = best_of("fashion-cnn", algorithm)
    assert curve.last_below[:2] == row_of("fashion-cnn", algorithm).rounds[:2]
    assert curve.last_below[2:] == ({"fedavg": 199, "scaffold": 198}[algorithm], None, None)


def test_every_curve_is_there_once() -> None:
    assert len(CURVES) == len({curve[:9] for curve in CURVES}) == 109


@pytest.mark.parametrize(
    "curve", CURVES, ids=lambda c: f"{c.block}-{c.algorithm}-{c.partition}-{c.alpha}-{c.tau}"
)
def test_a_curve_agrees_with_itself(curve: Released) -> None:
    targets = TABLE2[curve.block].targets
    assert all(0 <= a <= 1 for a in (*curve.accuracy, curve.best, curve.final))
    assert len(curve.accuracy) == 200 // EVERY + 1
    assert (curve.accuracy[0], curve.accuracy[-1]) == (curve.start_accuracy, curve.final)
    assert max(curve.accuracy) <= curve.best
    for target, hit, below in zip(targets, curve.first_hit, curve.last_below, strict=True):
        assert (hit is not None) == (curve.best >= target)
        assert (below is not None) == (curve.final >= target)
        assert below is None or (hit is not None and hit <= below + 1)


@pytest.mark.parametrize(
    "curve", CURVES, ids=lambda c: f"{c.block}-{c.algorithm}-{c.partition}-{c.alpha}-{c.tau}"
)
def test_counts_bracket_the_sampled_accuracies(curve: Released) -> None:
    for target, hit, below in zip(
        TABLE2[curve.block].targets, curve.first_hit, curve.last_below, strict=True
    ):
        for i, accuracy in enumerate(curve.accuracy):
            if accuracy > target + 5e-5:
                assert hit is not None
                assert hit <= EVERY * i
            elif accuracy < target - 5e-5:
                assert below is None or below >= EVERY * i


def test_the_start_tells_the_model() -> None:
    starts = {("mclr", "zero"): 2.3026, ("mclr", "default"): 2.4794, ("cnn", "default"): 2.2975}
    for curve in CURVES:
        expected = 2.3010 if curve.block == "fashion-cnn" else starts[curve.model, curve.init]
        assert curve.start_loss == pytest.approx(expected, abs=4e-4)


def test_settings_can_be_run() -> None:
    for curve in CURVES:
        assert curve.partition in TABLES
        make(curve.algorithm, {"alpha": curve.alpha})
    assert {curve.batch for curve in CURVES} == {100}


def test_curves_are_chosen_by_algorithm_and_local_steps() -> None:
    taus = [(c.tau, c.partition) for c in released("mnist-mclr", "fedsso")]
    assert taus == [(tau, "paper-3") for tau in (1, 10, 20, 30, 40, 50)]
    assert {c.algorithm for c in released("mnist-cnn", tau=5)} == {
        "fedavg",
        "feddane",
        "fedsso",
        "scaffold",
    }
    assert released("mnist-cnn", "fedsso", 7) == []


def test_diverged_curves_end_at_the_share_of_the_first_class() -> None:
    ends = {(c.dataset, c.final) for c in CURVES if c.diverged is not None}
    assert ends == {("mnist", 0.0987), ("fashion_mnist", 0.1)}
    assert all(c.diverged is not None for c in released("mnist-cnn", "feddane"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mnist-cn", None), "did you mean 'mnist-cnn'"),
        (("mnist-cnn", "fedavgg"), "did you mean 'fedavg'"),
    ],
)
def test_unknown_names_are_refused(arguments: tuple[str, str | None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        released(*arguments)


@needs_data
def test_our_fedavg_follows_a_released_curve() -> None:
    """From the same model, that of seed 0, with other batches: 40 rounds differ by 0.006 on average
    (seed 1: 0.10)."""
    (curve,) = (c for c in released("mnist-mclr", "fedavg", 5) if c.init == "default")
    run = simulate(
        load(curve.dataset, partition=curve.partition),
        curve.model,
        make("fedavg", {"alpha": curve.alpha}),
        rounds=40,
        local_steps=curve.tau,
        batch_size=curve.batch,
        init=curve.init,
        eval_every=EVERY,
        device="cpu",
    )
    ours = run.trace.evaluations()[1]
    assert float(np.abs(ours - curve.accuracy[: len(ours)]).mean()) < 0.015
