"""The robustness bench in small: run, resumed, scored, and written as tables and pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsso import load
from fedsso.algorithms import make
from fedsso.experiment.grids import grid
from fedsso.experiment.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import robustness, robustness_figures, robustness_report  # noqa: E402
from benchmarks.robustness import Cell, Task, cells, records  # noqa: E402
from benchmarks.robustness_report import (  # noqa: E402
    behind,
    best_rival,
    duels,
    leads,
    measured,
    merged,
    shares,
    table,
    write,
)
from benchmarks.robustness_score import (  # noqa: E402
    ACCURACY,
    LOSS,
    Goal,
    Point,
    by_final,
    by_rounds,
    chosen,
    curve,
    judge,
    promising,
    thin,
)

ROUNDS = 6
QUARTER = "25% of the clients"
SMALL = Task({"name": "digits", "clients": 4}, "mclr", 0.5, 4, rounds=ROUNDS)
CELL = Cell("digits", QUARTER, {"participation": 0.25})
METHODS = {
    "auto": [make("fedsso")],
    "fedavg": grid("fedavg", {"alpha": (0.001, 0.01, 0.1), "eta": 1.0}),
    "fedadam": grid("fedadam", {"alpha": (0.01, 0.03), "eta": (0.03, 0.1)}),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small task, three methods and two seeds in place of the bench's own."""
    small = {
        "TASKS": {"digits": SMALL},
        "HALVES": {"finding": {"digits": SMALL}},
        "METHODS": METHODS,
        "SEEDS": (0, 1),
        "FEW": 1,
        "cells": lambda: iter([CELL]),
    }
    for name, value in small.items():
        monkeypatch.setattr(robustness, name, value)
    monkeypatch.setattr(robustness_report, "CURVES_OF", ("digits",))


# ---- the bench itself ----


@pytest.mark.usefixtures("bench")
def test_a_cell_is_run_once_scored_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not robustness.run(CELL, list(METHODS), tmp_path, device="cpu", deadline=0.0)
    assert measured(tmp_path) == []
    assert robustness.run(CELL, list(METHODS)[:2], tmp_path, device="cpu")
    assert robustness.run(CELL, list(METHODS), tmp_path, device="cpu")
    (told,) = measured(tmp_path)
    assert (told["task"], told["change"], told["metric"]) == ("digits", QUARTER, ACCURACY)
    assert list(told["methods"]) == list(METHODS)
    assert [own["points"] for own in told["methods"].values()] == [1, 3, 4]
    assert all(len(own["curve"]) == ROUNDS + 1 for own in told["methods"].values())
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    write(tmp_path, [told])
    assert json.loads((tmp_path / "robustness.json").read_text()) == [told]
    for name in ("robustness.png", "robustness-curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(robustness, "measure", lambda *_, **__: pytest.fail("it is run again"))
    assert robustness.run(CELL, list(METHODS), tmp_path, device="cpu")


@pytest.mark.usefixtures("bench")
def test_a_rival_is_tuned_with_the_first_seed_and_judged_with_all() -> None:
    fed = load(**SMALL.data)
    told = robustness.measure(CELL, "fedavg", fed, device="cpu")
    options = {"rounds": ROUNDS, "local_steps": 5, "batch_size": 100, "participation": 0.25}
    finals = {}
    for record in METHODS["fedavg"]:
        runs = [robustness.Question(fed, "mclr", [record], [seed], options) for seed in (0, 1)]
        traces = [
            robustness.run_grid(run, robustness.Means()).settings()[0].traces[0] for run in runs
        ]
        finals[record] = [SMALL.goal.final(trace) for trace in traces]
    tuned = max(finals, key=lambda record: finals[record][0])
    assert told["final"]["mean"] == pytest.approx(sum(finals[tuned]) / 2, abs=1e-4)
    assert told["final"]["low"] == pytest.approx(min(finals[tuned]), abs=1e-4)


def test_every_task_is_changed_and_no_cell_comes_twice() -> None:
    every = list(cells())
    assert len({cell.name for cell in every}) == len(every)
    for task in robustness.TASKS:
        changes = [cell.change for cell in every if cell.task == task]
        assert {"base", "50% of the clients", QUARTER, "30% drop out"} <= set(changes)
    # One of three or four clients is both 25 % and 10 %.
    assert "10% of the clients" not in [c.change for c in every if c.task == "heart-mclr"]
    assert not set(robustness.HALVES["finding"]) & set(robustness.HALVES["judging"])


def test_a_task_may_narrow_the_client_steps() -> None:
    narrow = Task({}, "mclr", 0.5, 4, alphas=(0.03, 0.1))
    assert {record.alpha for record in records(narrow, "fedadam")} == {0.03, 0.1}
    assert records(narrow, "auto") == robustness.METHODS["auto"]
    assert records(SMALL, "fedavg") == robustness.METHODS["fedavg"]


# ---- the score ----


def trace(values: Sequence[float], metric: str = ACCURACY, diverged: int | None = None) -> Trace:
    whole = dict.fromkeys(("trial", "seed", "overridden", "skipped", "bytes_up", "bytes_down"), 0)
    return Trace.from_rows(
        [{**whole, "round": k, metric: v} for k, v in enumerate(values)], diverged=diverged
    )


def point(number: int, *traces: Trace, goal: Goal = Goal(ACCURACY, 0.5)) -> Point:  # noqa: B008
    return judge(f"point {number}", number, traces, goal)


HALF = Goal(ACCURACY, 0.5)


def test_the_final_value_is_the_mean_of_the_last_ten() -> None:
    assert HALF.final(trace([0.0] * 5 + [0.1 * k for k in range(10)])) == pytest.approx(0.45)


def test_rounds_count_until_the_target_itself() -> None:
    assert HALF.rounds(trace([0.1, 0.5, 0.4])) == 1
    assert HALF.rounds(trace([0.1, 0.49])) == math.inf
    assert Goal(LOSS, 0.5).rounds(trace([0.9, 0.5], LOSS)) == 1


def test_what_diverged_counts_as_the_worst() -> None:
    assert HALF.final(trace([0.1, 0.9], diverged=1)) == 0.0
    assert Goal(LOSS, 0.5).final(trace([0.1, 0.2], LOSS, diverged=1)) == math.inf


def test_the_best_for_rounds_need_not_be_the_best_at_the_end() -> None:
    quick, good = point(0, trace([0.1, 0.6, 0.6])), point(1, trace([0.1, 0.4, 0.9]))
    assert by_rounds([good, quick], HALF)[0] is quick
    assert by_final([quick, good], HALF)[0] is good
    assert promising([quick, good], HALF, 1) == [0, 1]
    told = chosen([quick, good], HALF)
    assert told["rounds"] == {"mean": 1.0, "setting": "point 0"}
    assert told["final"]["setting"] == "point 1"


def test_a_setting_of_which_a_seed_never_arrives_loses() -> None:
    lucky = point(0, trace([0.1, 0.9]), trace([0.1, 0.2]))
    steady = point(1, trace([0.1, 0.2, 0.5]), trace([0.1, 0.2, 0.5]))
    assert by_rounds([lucky, steady], HALF)[0] is steady
    told = chosen([lucky], HALF)
    assert told["rounds"] == {"mean": None, "setting": None}
    assert (told["final"]["low"], told["final"]["high"]) == (0.15, 0.5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_loss_is_an_accuracy_upside_down(values: list[list[float]]) -> None:
    up = [point(i, trace(own)) for i, own in enumerate(values)]
    goal = Goal(LOSS, 0.5)
    down = [point(i, trace([1 - v for v in own], LOSS), goal=goal) for i, own in enumerate(values)]
    for order in (by_rounds, by_final):
        best, worst_case = order(up, HALF)[0], order(down, goal)[0]
        assert best.final == pytest.approx(1 - worst_case.final, abs=1e-12)


def test_curves_are_means_over_seeds_and_of_a_few_rounds() -> None:
    own = point(0, trace([0.0, 0.5, 1.0]), trace([0.0, 0.7, 0.6]))
    assert curve(own, HALF, 2) == [0.0, 0.6, 0.8]
    lost = point(0, trace([0.2, 0.4]))
    assert curve(lost, HALF, 2) == [0.2, 0.4, 0.0]
    assert len(thin(np.arange(201.0))) == 51


# ---- who leads ----


def made(metric: str = ACCURACY, change: str = "base", **methods: tuple[Any, Any]) -> Any:
    """A cell with (rounds, final) of each method."""
    return {
        "task": "digits",
        "half": "finding",
        "change": change,
        "metric": metric,
        "target": 0.9,
        "rounds": 200,
        "methods": {
            name: {"rounds": {"mean": rounds}, "final": {"mean": final}}
            for name, (rounds, final) in methods.items()
        },
    }


def test_who_leads() -> None:
    one = made(auto=(20.0, 0.91), fedavg=(30.0, 0.92), scaffold=(25.0, 0.90))
    assert best_rival(one, "rounds") == ("scaffold", 25.0)
    assert best_rival(one, "final") == ("fedavg", 0.92)
    assert leads(one, "rounds")
    assert not leads(one, "final")
    assert behind(one) == pytest.approx(0.01 / 0.92)
    loss = made(LOSS, auto=(None, 0.40), fedavg=(3.0, 0.41))
    assert leads(loss, "final")
    assert not leads(loss, "rounds"), "never to reach the target is no lead"
    assert behind(loss) == pytest.approx(-0.01 / 0.41)


def test_a_rival_that_diverged_is_beaten_and_ours_is_not_excused() -> None:
    assert behind(made(LOSS, auto=(1.0, 0.4), fedavg=(None, None))) == -math.inf
    assert behind(made(LOSS, auto=(None, None), fedavg=(1.0, 0.4))) == math.inf


def test_tables_count_and_mark_leads() -> None:
    found = [
        made(auto=(20.0, 0.93), fedavg=(30.0, 0.92), mifa=(15.0, 0.90)),
        made(change="50% of the clients", auto=(20.0, 0.80), fedavg=(30.0, 0.92)),
        made(change=QUARTER, fedavg=(30.0, 0.92)),  # FedSSO is missing
    ]
    assert "| development tasks | 1 of 2 | 1 of 2 | 1 of 2 |" in shares(found)
    assert "| models of one layer | 1 of 2 | 1 of 2 | 1 of 2 |" in shares(found)
    assert "looked at once" not in shares(found)
    assert "| FedAvg | 1 of 2 | 2 of 2 |" in duels(found)
    assert "| MIFA | 1 of 1 | 0 of 1 |" in duels(found)
    rows = table(found, "finding").splitlines()[2:]
    assert len(rows) == 2
    assert "| 20.0 | 15.0 MIFA | **0.9300** | 0.9200 FedAvg | 2 |" in rows[0]
    assert "| **20.0** | 30.0 FedAvg | 0.8000 | 0.9200 FedAvg | 1 |" in rows[1]


def test_new_numbers_replace_old_ones() -> None:
    old = made(fedavg=(30.0, 0.92), mifa=(1.0, 0.1))
    new = made(auto=(20.0, 0.93), fedavg=(29.0, 0.93))
    (one,) = merged([old], [new])
    assert list(one["methods"]) == ["auto", "fedavg", "mifa"]
    assert one["methods"]["fedavg"]["final"]["mean"] == 0.93
    assert one["methods"]["mifa"]["final"]["mean"] == 0.1


def test_pictures_bear_what_diverged(tmp_path: Path) -> None:
    one = made(LOSS, QUARTER, auto=(20.0, 0.9), fedavg=(None, None), fedadam=(9.0, 0.9))
    for name, own in one["methods"].items():
        own["curve"] = thin(np.arange(201.0) + 0.1) if name != "fedavg" else [0.3] * 50 + [None]
    write(tmp_path, [one])
    assert (tmp_path / "robustness-curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_kept_numbers_are_small_and_of_the_bench() -> None:
    file = robustness_report.DOCS / "robustness.json"
    assert file.stat().st_size < 700_000
    names = [(cell.task, cell.change) for cell in cells()]
    kept = [(one["task"], one["change"]) for one in json.loads(file.read_text())]
    assert kept == [name for name in names if name in kept]


def test_every_task_has_a_title_in_the_pictures() -> None:
    assert set(robustness.TASKS) <= set(robustness_figures.TITLES)
