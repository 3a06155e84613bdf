"""What the commands refuse before they train, in sentences that name the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from console import fedsso as command
from fedsso import FedAvg, InputError, load, load_runs, sweep
from fedsso.cli import sweep as module

SMALL = ["--clients", "3", "--rounds", "2", "--device", "cpu"]
FAST: dict[str, Any] = {"rounds": 2, "device": "cpu"}


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_run_is_not_written_beside_a_sweep(name: str, tmp_path: Path) -> None:
    sweep(load("digits", clients=3), "mclr", [FedAvg()], out=tmp_path, **FAST)
    before = sorted(tmp_path.rglob("*"))
    told = command(name, *SMALL, "--out", tmp_path, code=2).stderr
    assert "already holds a sweep; choose another folder" in told
    assert sorted(tmp_path.rglob("*")) == before


def test_an_algorithm_that_does_not_suit_is_refused_before_the_data_are_looked_for(
    tmp_path: Path,
) -> None:
    nowhere = ("--dataset", "mnist", "--data-dir", tmp_path)
    told = command("run", *nowhere, "--algorithm", "scaffold", "--client", "adam", code=2).stderr
    assert "SCAFFOLD prescribes what its clients do" in told
    told = command("compare", *nowhere, "--algorithms", "fednl", "--drop-rate", 0.5, code=2).stderr
    assert "FedNL needs all clients in every round" in told


@pytest.mark.parametrize("name", ["run", "compare"])
def test_an_accuracy_is_no_column(name: str, tmp_path: Path) -> None:
    told = command(name, *SMALL, "--target", 0.9, code=2).stderr
    assert "if it is an accuracy to reach, write --targets 0.9" in told
    (tmp_path / "a.csv").write_text("age,ill\n1,0\n2,1\n")
    own = ("--dataset", "csv", "--files", tmp_path)
    assert "write --targets 0.9" in command(name, *own, "--target", 0.9, code=2).stderr
    told = command(name, *own, "--target", "sick", code=2).stderr
    assert "unknown column 'sick'" in told
    assert "--targets" not in told


def test_targets_must_be_within_reach(tmp_path: Path) -> None:
    stop = (*SMALL, "--stop-at", 0.5)
    for name, option in (("run", "--targets"), ("compare", "--targets"), ("sweep", "--target")):
        told = command(name, *stop, option, 0.9, code=2).stderr
        assert "stop_at=0.5 does not reach the target 0.9" in told
    rows = "\n".join(f"{i},{i}.5" for i in range(20))
    (tmp_path / "a.csv").write_text(f"age,dose\n{rows}\n")
    own = ("--dataset", "csv", "--files", tmp_path, "--column", "dose", "--rounds", 2)
    for option, what in (("--targets", "a target"), ("--stop-at", "stop_at")):
        told = command("run", *own, option, 0.5, code=2).stderr
        assert f"{what} is an accuracy, which the loss mse does not have" in told


def test_a_sweep_of_python_is_told_and_taken_over(tmp_path: Path) -> None:
    fed = load("digits", clients=3)
    sweep(fed, "mclr", [FedAvg(alpha=0.1), FedAvg(alpha=0.3)], target=0.2, out=tmp_path, **FAST)
    assert "call the sweep again" in command("resume", tmp_path, code=2).stderr
    same = ("sweep", *SMALL, "--algorithms", "fedavg", "--out", tmp_path)
    listed = (tmp_path / "trials.csv").read_bytes()
    for other in ("--alpha", 0.1, "--target", 0.2), ("--alpha", "0.1,0.3", "--target", 0.3):
        told = command(*same, *other, code=2).stderr
        assert "table.md already exists" in told
    assert (tmp_path / "trials.csv").read_bytes() == listed
    command(*same, "--alpha", "0.1,0.3", "--target", 0.2)
    assert (tmp_path / "trials.csv").read_bytes() == listed
    assert (tmp_path / "sweep.toml").is_file()


def test_a_new_sweep_removes_the_list_of_the_old_one_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = ("sweep", *SMALL, "--algorithms", "fedavg", "--out", tmp_path)
    command(*grid, "--alpha", "0.1,0.3")

    def stopped(*_: Any) -> None:
        raise InputError("stopped before it trains")

    with monkeypatch.context() as patch:
        patch.setattr(module, "answer", stopped)
        command(*grid, "--alpha", "0.1,0.3", code=2)
        assert (tmp_path / "trials.csv").is_file()  # the same sweep
        command(*grid, "--alpha", "0.1", code=2)
    assert not (tmp_path / "trials.csv").exists()
    assert not (tmp_path / "table.md").exists()
    command(*grid, "--alpha", "0.1")
    assert len(load_runs(tmp_path)) == 1
