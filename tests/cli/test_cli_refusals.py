"""What the commands refuse before they train, in sentences that name the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from console import fedsso as command
from fedsso import FedAvg, load, sweep

SMALL = ["--clients", "3", "--rounds", "2", "--device", "cpu"]
FAST: dict[str, Any] = {"rounds": 2, "device": "cpu"}


@pytest.mark.parametrize("name", ["run", "compare"])
def test_a_run_is_not_written_beside_a_sweep(name: str, tmp_path: Path) -> None:
    sweep(load("digits", clients=3), "mclr", [FedAvg()], out=tmp_path, **FAST)
    before = sorted(tmp_path.rglob("*"))
    told = command(name, *SMALL, "--out", tmp_path, code=2).stderr
    assert "holds a sweep already; choose another folder" in told
    assert sorted(tmp_path.rglob("*")) == before
