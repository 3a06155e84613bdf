"""What the calls of Python refuse before they train, in sentences that name the remedy."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedsso
from console import fedsso as command
from fedsso import (
    Decay,
    FedAvg,
    Federation,
    InputError,
    OutOfTime,
    Results,
    Simulation,
    compare,
    load_run,
    load_runs,
    resume,
    simulate,
    sweep,
)

FAST: dict[str, Any] = {"rounds": 2, "device": "cpu"}


# ---- one run counts once ----


def test_a_run_that_lies_in_two_folders_is_one_seed(fed: Federation, tmp_path: Path) -> None:
    once = compare(fed, "mclr", ["fedavg"], seeds=[0, 1, 2], out=tmp_path, **FAST)
    compare(fed, "mclr", ["fedavg"], seeds=[2, 1, 0], out=tmp_path, **FAST)
    found = load_runs(tmp_path)
    (setting,) = found.settings()
    assert sorted(setting.seeds) == [0, 1, 2]
    assert found.table([0.1]) == once.table([0.1])
    assert Results([*once, *once]).settings() == once.settings()


def test_an_option_lists_different_values(fed: Federation) -> None:
    with pytest.raises(InputError, match=r"batch_size=\[10, 10\] must list different values"):
        sweep(fed, "mclr", [FedAvg()], batch_size=[10, 10], **FAST)


# ---- a folder holds one kind of results ----


CALLS: dict[str, Any] = {"a run": simulate, "a comparison": compare, "a sweep": sweep}


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(CALLS, 2)])
def test_a_folder_holds_one_kind(first: str, second: str, fed: Federation, tmp_path: Path) -> None:
    CALLS[first](fed, "mclr", FedAvg(), out=tmp_path, **FAST)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=f"holds {first} already.*choose another folder"):
        CALLS[second](fed, "mclr", FedAvg(), out=tmp_path, **FAST)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(load_runs(tmp_path)) == 1


@pytest.mark.parametrize("name", ["table.md", "trials.csv"])
def test_a_sweep_leaves_tables_of_others(fed: Federation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("my own")
    with pytest.raises(InputError, match=f"{name} already exists and would be overwritten"):
        sweep(fed, "mclr", [FedAvg()], out=tmp_path, **FAST)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(name, "my own")]


def test_a_sweep_may_be_called_again(fed: Federation, tmp_path: Path) -> None:
    for alpha in (0.1, 0.1, 0.3):
        found = sweep(fed, "mclr", [FedAvg(alpha=alpha)], out=tmp_path, **FAST)
        assert [run.record for run in load_runs(tmp_path)] == [run.record for run in found]


def test_a_sweep_is_called_again_not_resumed(fed: Federation, tmp_path: Path) -> None:
    sweep(fed, "mclr", [FedAvg()], out=tmp_path, **FAST)
    with pytest.raises(InputError, match=r"holds a sweep.*call the sweep again.*out="):
        resume(tmp_path, federation=fed)


def test_another_sweep_leaves_no_settings_or_pictures_of_the_first(tmp_path: Path) -> None:
    fed = fedsso.load("digits", clients=3)
    first = ("--algorithms", "fedavg", "--alpha", "0.1,0.3", "--device", "cpu", "--out", tmp_path)
    command("sweep", "--clients", 3, "--rounds", 2, *first)
    names = ("sweep.toml", "curves.png", "grid.png")
    sweep(fed, "mclr", [FedAvg(alpha=0.1), FedAvg(alpha=0.3)], out=tmp_path, **FAST)
    assert all((tmp_path / name).is_file() for name in names)  # it is the same sweep
    (tmp_path / "grid.png").write_text("my own")
    sweep(fed, "mclr", [FedAvg(alpha=0.1)], out=tmp_path, **FAST)
    assert [(tmp_path / name).is_file() for name in names] == [False, False, True]


# ---- algorithms of one's own ----


@dataclass(frozen=True)
class Mine(FedAvg):
    """Averages under another name, which is not in the registry."""


def test_a_sweep_with_a_folder_wants_registered_algorithms(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_: Any) -> None:
        raise AssertionError("it must be refused before it trains")

    grid = [Mine(alpha=0.1), Mine(alpha=0.3)]
    with pytest.raises(InputError, match=r"mine is not registered.*ALGORITHMS\['mine'\]"):
        sweep(fed, "mclr", grid, out=tmp_path / "x", progress=called, **FAST)
    assert not (tmp_path / "x").exists()
    monkeypatch.setitem(fedsso.algorithms.ALGORITHMS, "mine", Mine)
    sweep(fed, "mclr", grid, out=tmp_path / "x", **FAST)
    assert load_runs(tmp_path / "x").best().record in grid


def test_a_sweep_without_a_folder_chooses_among_own_algorithms(fed: Federation) -> None:
    found = sweep(fed, "mclr", [Mine(alpha=0.1), Mine(alpha=0.3)], select="val", **FAST)
    best = found.winners()["mine"]
    assert best.spec.hyper["alpha"] in (0.1, 0.3)
    with pytest.raises(InputError, match=r"mine is not registered.*ALGORITHMS\['mine'\]"):
        best.record  # noqa: B018


# ---- processes, seeds ----


def test_a_script_without_the_guard_of_its_main_part_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    call = 'fedsso.sweep(fed, "mclr", ["fedavg"], seeds=[0, 1], rounds=1, device="cpu", jobs=2)'
    script.write_text(f'import fedsso\nfed = fedsso.load("digits", clients=3)\n{call}\n')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert 'below `if __name__ == "__main__":`' in last


@pytest.mark.parametrize("call", [compare, sweep])
def test_seeds_may_come_from_a_generator(call: Any, fed: Federation) -> None:
    found = call(fed, "mclr", [FedAvg()], seeds=(seed for seed in range(2)), **FAST)
    assert found.best().seeds == (0, 1)


# ---- targets ----


def test_a_target_must_be_within_reach(fed: Federation, quad: Federation) -> None:
    with pytest.raises(InputError, match=r"ends at stop_at=0.5 does not reach the target 0.9"):
        sweep(fed, "mclr", [FedAvg()], target=0.9, stop_at=0.5, **FAST)
    sweep(fed, "mclr", [FedAvg()], target=0.5, stop_at=0.5, **FAST)
    with pytest.raises(InputError, match=r"stop_at is an accuracy.*mse does not have"):
        simulate(quad, "mclr", FedAvg(), stop_at=0.5, **FAST)


QUESTIONS: dict[str, Callable[[Results, Any], Any]] = {
    "table": lambda found, target: found.table([target]),
    "one number": lambda found, target: found.table(target),
    "rows": lambda found, target: found.rows([target]),
    "best": lambda found, target: found.best(target),
    "winners": lambda found, target: found.winners(target),
    "maps": lambda found, target: found.maps(target),
    "report": lambda found, target: found.report("page.html", targets=[target]),
    "plot": lambda found, target: found.plot("a.png", targets=[target]),
    "rounds": lambda found, target: found.settings()[0].rounds(target),
    "rounds_to": lambda found, target: found[0].rounds_to(target),
    "last_below": lambda found, target: found[0].last_below(target),
    "bytes_to": lambda found, target: found[0].bytes_to(target),
}


@pytest.fixture(scope="module")
def found() -> Results:
    return compare(fedsso.load("digits", clients=3), "mclr", ["fedavg"], **FAST)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_target_in_per_cent_is_told(
    name: str, found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"a target is an accuracy above 0 and at most 1.*got 90"):
        QUESTIONS[name](found, 90)
    with pytest.raises(InputError, match=r"target must be a number"):
        QUESTIONS[name](found, "x")
    assert list(tmp_path.iterdir()) == []
    QUESTIONS[name](found, 0.5)


def test_one_target_is_a_list_of_one_and_other_metrics_have_any_values(found: Results) -> None:
    assert found.table(0.5) == found.table([0.5])
    assert found.rows(0.5) == found.rows([0.5])
    assert found[0].rounds_to(1.5, "test_loss") == 0


# ---- functions of one's own ----


@pytest.mark.parametrize("result", [None, "high", np.zeros(2), torch.zeros(2)], ids=repr)
@pytest.mark.parametrize("call", [simulate, compare, sweep])
def test_a_metric_returns_a_number(call: Any, result: Any, fed: Federation, tmp_path: Path) -> None:
    def score(z: Any, y: Any) -> Any:  # noqa: ARG001
        return result

    with pytest.raises(InputError, match=r"the metric score failed .* returns a number"):
        call(fed, "mclr", FedAvg(), metrics=[score], out=tmp_path / "a", **FAST)
    assert not (tmp_path / "a").exists()


def test_a_metric_may_need_more_rows_than_two(fed: Federation) -> None:
    def score(z: Any, y: Any) -> float:  # noqa: ARG001
        if len(y) < 3:
            raise ValueError("too few rows")
        return 0.5

    assert simulate(fed, "mclr", FedAvg(), metrics=[score], **FAST).final("test_score") == 0.5


@pytest.mark.parametrize("call", [simulate, compare, sweep])
def test_progress_is_a_function(call: Any, fed: Federation, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="progress must be True, False or a function"):
        call(fed, "mclr", FedAvg(), progress="yes", out=tmp_path / "a", **FAST)
    assert not (tmp_path / "a").exists()


# ---- arguments of the wrong kind ----


WRONG: dict[str, tuple[Callable[[Federation], Any], str]] = {
    "minutes": (
        lambda fed: sweep(fed, "mclr", FedAvg(), minutes="2", **FAST),  # type: ignore[arg-type]
        "minutes must be a number, got minutes='2'",
    ),
    "no algorithm": (
        lambda fed: Simulation(fed, "mclr", None),  # type: ignore[arg-type]
        "an algorithm must be a name or an object .*got None",
    ),
    "a class": (
        lambda fed: Simulation(fed, "mclr", FedAvg),  # type: ignore[arg-type]
        "an algorithm must be a name or an object .*got <class",
    ),
    "an empty list": (
        lambda fed: Simulation(fed, "mclr", []),
        "at least one algorithm is needed, got an empty list",
    ),
    "no federation": (
        lambda fed: sweep(None, "mclr", FedAvg(), **FAST),  # type: ignore[arg-type]  # noqa: ARG005
        "a federation is needed, got None",
    ),
    "a list of names": (
        lambda fed: fedsso.grid(["fedavg"]),  # type: ignore[arg-type]  # noqa: ARG005
        r"one algorithm: give its name, got \['fedavg'\]",
    ),
    "values": (
        lambda fed: fedsso.grid("fedavg", [0.1]),  # type: ignore[arg-type]  # noqa: ARG005
        r"values must be a dictionary.*got \[0.1\]",
    ),
    "results": (
        lambda fed: Results([1]),  # type: ignore[list-item]  # noqa: ARG005
        "results are made of runs and settings, got 1",
    ),
    "a lazy layer": (
        lambda fed: simulate(fed, nn.Sequential(nn.LazyLinear(3)), FedAvg(), **FAST),
        r"layer 0 has no size yet \(LazyLinear\); call the model once",
    ),
    "a schedule's class": (
        lambda fed: simulate(fed, "mclr", FedAvg(alpha=Decay), **FAST),  # type: ignore[arg-type]
        "alpha must be a number, got alpha=<class",
    ),
    "load_runs": (lambda fed: load_runs(None), "must be a path, got None"),  # type: ignore[arg-type]  # noqa: ARG005
    "load_run": (lambda fed: load_run(None), "must be a path, got None"),  # type: ignore[arg-type]  # noqa: ARG005
    "resume": (lambda fed: resume(None), "must be a path, got None"),  # type: ignore[arg-type]  # noqa: ARG005
}


STARTS: dict[str, tuple[Any, str]] = {
    "text": (np.array(["a"]), "dtype <U1"),
    "objects": (np.array([object()]), "dtype object"),
    "dates": (np.zeros(15, "M8[s]"), r"dtype datetime64\[s\]"),
    "meta": (torch.zeros(15, device="meta"), "dtype torch.float32"),
    "sparse": (torch.zeros(15).to_sparse(), "dtype torch.float32"),
    "complex": (torch.zeros(15, dtype=torch.complex64), "complex, NaN or infinite"),
}


@pytest.mark.parametrize("kind", STARTS)
def test_a_start_that_is_no_tensor_of_numbers(kind: str, fed: Federation) -> None:
    start, told = STARTS[kind]
    with pytest.raises(InputError, match=f"init .*{told}"):
        simulate(fed, "mclr", FedAvg(), init=start, **FAST)


def test_a_start_may_lie_in_memory_as_it_likes(fed: Federation) -> None:
    """Backwards, in the other order of bytes, or in a short type: the numbers count."""
    x = np.arange(15.0)
    plain = simulate(fed, "mclr", FedAvg(), init=x, **FAST).x
    for other in (x[::-1].copy()[::-1], x.astype(">f8"), torch.from_numpy(x).bfloat16()):
        assert torch.equal(simulate(fed, "mclr", FedAvg(), init=other, **FAST).x, plain)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kind_is_told_in_a_sentence(name: str, fed: Federation) -> None:
    call, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        call(fed)


def test_data_and_models_of_a_folder_are_of_their_kind(fed: Federation, tmp_path: Path) -> None:
    simulate(fed, "mclr", FedAvg(), out=tmp_path, **FAST)
    with pytest.raises(InputError, match="a federation is needed, got 'x'"):
        load_run(tmp_path, federation="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"model must be an nn.Module object, got 'x'"):
        load_run(tmp_path, model="x")  # type: ignore[arg-type]
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(InputError, match="a federation is needed, got 'x'"):
        resume(tmp_path, federation="x")  # type: ignore[arg-type]


def test_a_sweep_whose_time_is_up_says_how_to_go_on(fed: Federation, tmp_path: Path) -> None:
    for out, how in (
        (None, "give it more minutes, or out="),
        (tmp_path, "call it again to continue"),
    ):
        with pytest.raises(OutOfTime, match=f"1 of 1 parts are left; {how}"):
            sweep(fed, "mclr", [FedAvg()], minutes=1e-9, out=out, **FAST)


def test_a_lazy_layer_with_its_size_is_a_layer(fed: Federation) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    model(fed.x[:2].float())
    assert len(simulate(fed, model, FedAvg(), **FAST).trace) == 3
