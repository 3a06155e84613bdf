"""The benchmark runs and writes what it promises; its times are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.peers import Loop, Stacked  # noqa: E402
from benchmarks.targets import Check  # noqa: E402

from fedsso.data import Federation  # noqa: E402
from fedsso.engine.settings import Settings  # noqa: E402


def federation() -> Federation:
    """Three clients of 5, 9 and 12 rows: short batches, one client with a single batch."""
    draw = torch.Generator().manual_seed(0)
    sizes = (5, 9, 12)
    return Federation.from_clients(
        [
            (torch.randn(n, 4, generator=draw), torch.randint(0, 3, (n,), generator=draw).tolist())
            for n in sizes
        ],
        test_fraction=0,
        classes=3,
    )


def test_the_peers_are_the_same_algorithm() -> None:
    fed, protocol = federation(), Settings(batch_size=5, local_steps=3)
    module = nn.Linear(4, 3)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    loop, stacked = Loop(fed, protocol, module, 0.1), Stacked(fed, protocol, 0.1, chunk=2)
    for _ in range(4):
        loop.round()
        stacked.round()
    assert loop.x.norm() > 0.1
    torch.testing.assert_close(stacked.x, loop.x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "sign", "reached"),
    [(4.0, ">=", True), (3.9, ">=", False), (4.0, "<=", True), (4.1, "<=", False)],
)
def test_a_target_is_reached_at_its_bound(value: float, sign: str, reached: bool) -> None:
    check = Check("x", value, sign, 4.0)
    assert check.reached is reached
    assert ("MISSED" in str(check)) is not reached


def test_the_server_step_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--only",
        "server_step",
        "--out",
        str(out),
    ]
    subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    (step,) = json.loads(out.read_text())["server_step"]
    assert step.keys() == {"d", "pairs", "ms", "floor_ms"}
    assert step["ms"] > 0
    assert step["floor_ms"] > 0
