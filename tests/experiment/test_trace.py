"""Traces keep every bit on disk and answer the questions that tables ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsso.errors import InputError
from fedsso.experiment.trace import COLUMNS, INTEGERS, Trace

NAN = math.nan


def rows(accuracies: Sequence[float], **others: float) -> list[dict[str, float]]:
    """A row for each accuracy; round k moves 10 bytes up and 1 down, the initial model none."""
    return [
        dict.fromkeys(COLUMNS, 0.0)
        | {"round": k, "test_accuracy": a, "bytes_up": 10 * (k > 0), "bytes_down": int(k > 0)}
        | others
        for k, a in enumerate(accuracies)
    ]


def trace(*accuracies: float, eval_every: int = 1, diverged: int | None = None) -> Trace:
    return Trace.from_rows(rows(accuracies), eval_every, diverged)


def test_columns_have_their_order_and_types() -> None:
    t = Trace.from_rows(rows([0.1, 0.2], test_auc=0.5))
    assert tuple(t.columns) == (*COLUMNS, "test_auc")
    assert {name for name, c in t.columns.items() if c.dtype == np.int64} == INTEGERS
    assert all(c.dtype == np.float64 for name, c in t.columns.items() if name not in INTEGERS)
    assert len(t) == 2


def test_a_measurement_left_out_is_nan_and_a_count_left_out_is_an_error() -> None:
    first, second = rows([0.1, 0.2])
    del first["train_loss"]
    second["test_auc"] = 0.7
    t = Trace.from_rows([first, second])
    np.testing.assert_array_equal(t["train_loss"], [NAN, 0])
    np.testing.assert_array_equal(t["test_auc"], [NAN, 0.7])
    del first["bytes_up"]
    with pytest.raises(InputError, match="64-bit integer bytes_up"):
        Trace.from_rows([first, second])


def test_unknown_column_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'test_accuracy'"):
        trace(0.5)["test_acuracy"]


def test_malformed_columns_are_refused() -> None:
    good = dict(trace(0.1, 0.2).columns)
    with pytest.raises(InputError, match="needs the columns ys"):
        Trace({name: c for name, c in good.items() if name != "ys"})
    with pytest.raises(InputError, match="equally long"):
        Trace(good | {"ys": np.zeros(3)})
    with pytest.raises(InputError, match="row 2: round 0 follows round 1"):
        Trace(good | {"round": np.array([1, 0])})
    with pytest.raises(InputError, match=r"eval_every.*integer >= 1.*eval_every=0"):
        Trace(good, eval_every=0)


@given(st.lists(st.floats(), max_size=8), st.integers(-(2**63), 2**63 - 1))
def test_saved_trace_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], count: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.csv"
    t = Trace.from_rows(rows(values, seed=count))
    t.save(path)
    back = Trace.load(path, eval_every=5, diverged=3)
    assert (back.eval_every, back.diverged) == (5, 3)
    for name in COLUMNS:
        np.testing.assert_array_equal(back[name], t[name])
        assert back[name].dtype == t[name].dtype
    number = ~np.isnan(t["test_accuracy"])  # the sign of a NaN has no text
    assert back["test_accuracy"][number].tobytes() == t["test_accuracy"][number].tobytes()


def test_pandas_reads_the_file_and_the_trace_alike(tmp_path: Path) -> None:
    t = trace(0.1, NAN, 0.625)
    t.save(tmp_path / "t.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "t.csv"), t.to_pandas(), check_exact=True)


HEADER = ",".join(COLUMNS)
ROW = "0,0,{},1.5,1.5,0.5,1.5,1.5,0,0,1.5,8,8,0.1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: the column trial is missing"),
        (HEADER.replace("ys,", "") + "\n", "line 1: the column ys is missing"),
        (f"{HEADER}\n{ROW.format(0)}\n{ROW.format(1)}", "line 3: the file is truncated"),
        (f"{HEADER}\n{ROW.format(0)}\n0,0,1,1.5\n", "line 3: 4 values for 14 columns"),
        (f"{HEADER}\n{ROW.format('x')}\n", "line 2: round must be a 64-bit integer, got 'x'"),
        (
            f"{HEADER}\n{ROW.format(0)}\n{ROW.format(1).replace('0.5', '0.5x')}\n",
            "line 3: .*'0.5x'",
        ),
        (f"{HEADER}\n{ROW.format(4)}\n{ROW.format(4)}\n", "row 2: round 4 follows round 4"),
        (f"{HEADER}\n{ROW.format(2**63)}\n", "line 2: round must be a 64-bit integer"),
    ],
)
def test_corrupt_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        Trace.load(path)
    assert str(path) in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent\.csv"):
        Trace.load(tmp_path / "absent.csv")


def test_first_hit_and_last_miss_differ_when_accuracy_dips() -> None:
    t = trace(0.1, 0.9, 0.7, 0.9, 0.95)
    assert t.rounds_to(0.9) == 1
    assert t.last_below(0.9) == 2
    assert t.last_below(0.5) == 0
    assert t.last_below(0.1) == -1
    assert t.rounds_to(0.1) == 0
    assert (t.rounds_to(0.96), t.last_below(0.96)) == (None, None)


def test_run_that_ends_below_never_passes_for_good() -> None:
    assert trace(0.1, 0.9, 0.8).last_below(0.9) is None
    assert trace(0.1, 0.9, NAN, diverged=2).last_below(0.9) is None
    assert trace(0.1, 0.9, NAN, diverged=2).rounds_to(0.9) == 1


def test_only_evaluated_rounds_and_the_last_one_count() -> None:
    t = trace(0.1, 0.9, 0.5, NAN, 0.6, 0.95, eval_every=2)
    assert t.rounds_to(0.8) == 5  # round 1 is not an evaluation, round 5 is the last
    assert t.last_below(0.8) == 4
    assert t.final(last=2) == pytest.approx((0.6 + 0.95) / 2)
    assert math.isnan(trace(0.1, 0.5, NAN, eval_every=2, diverged=1).final())


def test_final_counts_what_follows_divergence() -> None:
    assert trace(0.1, 0.2, 0.4).final(last=2) == pytest.approx(0.3)
    assert trace(0.1, 0.2, 0.4).final(last=9) == pytest.approx(0.7 / 3)
    assert math.isnan(trace(0.1, 0.9, NAN, diverged=2).final())
    assert math.isnan(trace(0.1, 0.9, NAN, diverged=2).final(last=2))
    with pytest.raises(InputError, match="last must be >= 1, got 0"):
        trace(0.1).final(last=0)


def test_bytes_include_the_round_that_hits() -> None:
    t = trace(0.1, 0.5, 0.9)
    assert t.bytes_to(0.9) == 22
    assert t.bytes_to(0.1) == 0
    assert t.bytes_to(0.99) is None


def test_other_metrics_can_be_asked_for() -> None:
    t = Trace.from_rows([row | {"test_auc": k / 4} for k, row in enumerate(rows([0, 0, 0, 0]))])
    assert t.rounds_to(0.5, "test_auc") == 2
    assert t.last_below(0.5, "test_auc") == 1
    assert t.bytes_to(0.5, "test_auc") == 22
    assert t.final("test_auc") == 0.75


def test_empty_trace_answers_without_a_number() -> None:
    t = Trace.from_rows([])
    assert (len(t), t.rounds_to(0.1), t.last_below(0.1), t.bytes_to(0.1)) == (0, None, None, None)
    assert math.isnan(t.final())


def test_a_run_that_ended_worse_than_it_began_says_so() -> None:
    def ended(train: Sequence[float], test: Sequence[float], diverged: int | None = None) -> Trace:
        told = zip(rows([0.5] * len(test)), train, test, strict=True)
        return Trace.from_rows(
            [row | {"train_loss": a, "test_loss": b} for row, a, b in told], 1, diverged
        )

    assert ended([NAN, 0.7, 20, 40], [0.7, 9, 21, 42.3]).worse_than_start() == (
        "ended worse than it began: test loss 0.7 -> 42.3; standardise the columns, or use a "
        "smaller step size"
    )
    assert "train loss 0.7 -> 40" in str(ended([NAN, 0.7, 20, 40], [NAN] * 4).worse_than_start())
    for fine in (
        ended([NAN, 0.7, 20, 0.1], [0.7, 9, 21, 42.3]),  # overdone, not lost
        ended([NAN, 0.7, 20, 40], [0.7, 9, 21, 0.7]),
        ended([NAN, 0.7, 20, 40], [0.7, 9, 21, NAN], diverged=3),
        ended([NAN, 0.7, 20, 40], [0.7, 9, 21, 0.75]),
        ended([NAN], [0.7]),
    ):
        assert fine.worse_than_start() is None
