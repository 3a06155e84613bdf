"""The bench of networks in small: run, resumed, its grids grown, its costs counted."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fedsso.algorithms import make
from fedsso.experiment.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import networks  # noqa: E402
from benchmarks.networks import (  # noqa: E402
    METHODS,
    SHARES,
    TASKS,
    Bench,
    Task,
    beyond,
    edges,
    quick,
    random_rows,
    reached,
    run,
    shortened,
    table,
)

FAST = {"rounds": 3, "local_steps": 2, "batch_size": 4}
SMALL = Task("mlp", {}, (0.0, 2.0), FAST, sample=(5,))


def bench(out: Path, deadline: float = math.inf) -> Bench:
    methods = {"fedsso": {}, "fedavg": {"alpha": (0.1, 0.3)}}
    return Bench({"small": SMALL}, methods, (0, 1), 1, out, "cpu", deadline=deadline)


def test_it_runs_in_parts_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not run(bench(tmp_path, deadline=0.0), list(SHARES))
    assert not list(tmp_path.glob("*/*/*.json"))
    assert run(bench(tmp_path), ["quarter"])
    assert {path.stem for path in tmp_path.glob("small/quarter/*.json")} == {"fedsso", "fedavg"}
    assert not list(tmp_path.glob("small/all/*.json"))
    monkeypatch.setattr(networks, "run_grid", None)
    assert run(bench(tmp_path), ["quarter"])
    lines = table(tmp_path).splitlines()
    assert len(lines) == 2
    assert "2.0: not reached" in lines[0]


def test_a_rival_is_tuned_beyond_the_edges_and_measured_with_all_seeds(tmp_path: Path) -> None:
    """The grid begins with two steps and grows once, by one at each end that is best."""
    told = bench(tmp_path).run("small", "all", "fedavg", random_rows((5,)))
    assert told["tried"] in (2, 3)
    traces = list((tmp_path / "small" / "all" / "fedavg" / "chosen").rglob("*"))
    assert traces
    assert told["targets"]["0.0"] == {"rounds": 0.0, "bytes": 0.0, "seconds": 0.0}
    assert told["targets"]["2.0"] == {"rounds": None, "bytes": None, "seconds": None}
    assert told["final"]["low"] <= told["final"]["mean"] <= told["final"]["high"]
    json.dumps(told)


def test_the_next_number_of_a_grid() -> None:
    row = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
    for before, after in pairwise(row):
        assert beyond(before, up=True) == after
        assert beyond(after, up=False) == before
    for axes in METHODS.values():
        for values in axes.values():
            assert set(values) <= set(row)


def test_a_grid_grows_where_its_best_point_is_an_end() -> None:
    axes = {"alpha": (0.01, 0.03, 0.1), "eta": (0.3, 1.0)}
    assert edges(axes, make("fedavgm", {"alpha": 0.03, "eta": 1.0})) == {"eta": (3.0,)}
    assert edges(axes, make("fedavgm", {"alpha": 0.01, "eta": 0.3})) == {
        "alpha": (0.003,),
        "eta": (0.1,),
    }
    alone = edges({"alpha": (0.1,)}, make("fedavg", {"alpha": 0.1}))
    assert alone == {"alpha": (0.3, 0.03)}


def test_what_a_target_takes_is_counted_until_it_is_reached() -> None:
    """Bytes and seconds of the rounds up to the first evaluation that reaches it, in the mean."""
    nothing = dict.fromkeys(("trial", "seed", "overridden", "skipped"), 0)
    traces = []
    for curve in ([0.1, 0.5, 0.9], [0.1, 0.2, 0.6]):
        rows = []
        for k, accuracy in enumerate(curve):
            spent = {"bytes_up": 10 * k, "bytes_down": k, "seconds": 0.5 if k else math.nan}
            rows.append({**nothing, **spent, "round": k, "test_accuracy": accuracy})
        traces.append(Trace.from_rows(rows))
    took = reached(traces, 0.5)
    assert took == {"rounds": 1.5, "bytes": np.mean([11, 11 + 22]), "seconds": 0.75}
    assert reached(traces, 0.7) == {"rounds": None, "bytes": None, "seconds": None}


@pytest.mark.full
def test_the_quick_setting_runs_the_real_network(tmp_path: Path) -> None:
    small = {"shakespeare-gpt": quick(TASKS["shakespeare-gpt"])}
    few = {name: shortened(METHODS[name]) for name in ("fedsso", "fedadam")}
    assert run(Bench(small, few, (0,), 0, tmp_path, "cpu"), ["quarter"])
    assert len(table(tmp_path).splitlines()) == 2


def test_every_task_names_a_network_and_its_targets_rise() -> None:
    from fedsso.models import MODELS

    for task in TASKS.values():
        assert task.model in MODELS
        assert list(task.targets) == sorted(task.targets)
