"""The bench of networks in small: run in parts, tuned around its best points, judged."""

from __future__ import annotations

import math
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.networks import (  # noqa: E402
    METHODS,
    SEEDS,
    TASKS,
    Bench,
    Done,
    Task,
    Try,
    beyond,
    measure,
    neighbours,
    quick,
    read,
    table,
    write,
)

FAST = {"rounds": 3, "local_steps": 2, "batch_size": 4}
SMALL = Task("mlp", {}, (0.3, 2.0), FAST, sample=(5,))


def done(*accuracy: float, diverged: bool = False) -> Done:
    return Done(list(range(len(accuracy))), list(accuracy), diverged, 8.0, 0.1)


def small(growth: int = 1) -> Bench:
    return Bench({"small": SMALL}, {"fedsso": {}, "fedavg": {"alpha": (0.1, 0.3)}}, (0, 1), growth)


def test_it_runs_in_parts_and_does_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    assert not measure(small(), out, "cpu", 1, deadline=0.0)
    assert not out.exists()
    bench = small()
    assert measure(bench, out, "cpu", 2, math.inf)
    assert read(out) == bench.done
    again = small()
    again.done = read(out)
    assert not list(again.missing())
    assert measure(again, out, "cpu", 1, time.monotonic())
    assert len(table(again).splitlines()) == 2


def test_half_a_line_at_the_end_is_run_again(tmp_path: Path) -> None:
    """A kill may leave one; the next run begins a line of its own."""
    out = tmp_path / "runs.jsonl"
    first, second = (Try("small", "fedavg", (("alpha", 0.1),), seed) for seed in (0, 1))
    write(out, first, done(0.1))
    write(out, second, done(0.2))
    out.write_bytes(out.read_bytes()[:-9])
    assert list(read(out)) == [first]
    write(out, second, done(0.2))
    assert read(out) == {first: done(0.1), second: done(0.2)}


def test_the_best_point_has_no_better_neighbour() -> None:
    """Rounds to .3: 2 at α = .1, 1 at α = .3 and 3 at the others, so α = .3 is best.

    First the grid is missing, then what lies around α = .3 (α = 1; .1 is there), then its seed 1.
    """
    curves = {0.1: done(0, 0, 0.5), 0.3: done(0, 0.4, 0.4), 1.0: done(0, 0, 0, 0.9)}
    bench = small()
    asked = []
    for _ in range(4):
        missing = [one for one in bench.missing() if one.method == "fedavg"]
        asked.append([(one.setting[0][1], one.seed) for one in missing])
        for one in missing:
            bench.done[one] = curves[one.setting[0][1]]
    assert asked == [[(0.1, 0), (0.3, 0)], [(1.0, 0)], [(0.3, 1)], []]


def test_the_rounds_to_the_highest_target_decide_then_the_lower_ones_then_the_end() -> None:
    bench = Bench({"t": Task("mlp", {}, (0.2, 0.5), {})}, {"fedavg": {}})
    curves = [done(0.1, 0.5), done(0.2, 0.4, 0.5), done(0.1, 0.2, 0.5), done(0.2, 0.4)]
    tries = [Try("t", "fedavg", (), seed) for seed in range(4)]
    bench.done = dict(zip(tries, curves, strict=True))
    assert sorted(tries, key=bench.rank) == tries
    assert done(0.9, 0.9, diverged=True).end() == 0.0


def test_the_next_number_of_a_grid() -> None:
    row = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
    for before, after in pairwise(row):
        assert beyond(before, up=True) == after
        assert beyond(after, up=False) == before
    for axes in METHODS.values():
        for values in axes.values():
            assert set(values) <= set(row)
    around = neighbours((("alpha", 0.1), ("eta", 1.0)))
    assert [tuple(value for _, value in point) for point in around] == [
        (0.03, 1.0),
        (0.3, 1.0),
        (0.1, 0.3),
        (0.1, 3.0),
    ]


@pytest.mark.full
def test_the_quick_setting_runs_the_real_network(tmp_path: Path) -> None:
    few = {"fedsso": {}, "fedadam": {"alpha": (0.1,), "eta": (0.01,)}}
    bench = Bench({"gpt": quick(TASKS["gpt"])}, few, (0,), 0)
    assert measure(bench, tmp_path / "runs.jsonl", "cpu", 1, math.inf)
    assert len(table(bench).splitlines()) == 2


def test_the_runs_in_the_repository_are_of_tasks_and_methods_that_there_are() -> None:
    bench = Bench(TASKS, METHODS, done=read(ROOT / "results" / "networks.jsonl"))
    for one in bench.done:
        assert one.task in TASKS
        assert set(dict(one.setting)) == set(METHODS[one.method])
        assert one.seed in SEEDS
    assert not any(one.task == "resnet20" for one in bench.missing())


def test_every_task_names_a_network_and_its_targets_rise() -> None:
    from fedsso.models import MODELS

    for task in TASKS.values():
        assert task.model in MODELS
        assert list(task.targets) == sorted(task.targets)
