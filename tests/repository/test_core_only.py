"""The core works with torch, numpy and safetensors alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys

BLOCKED = {"pandas", "sklearn", "scipy", "matplotlib", "rich", "typer", "click", "pydantic"}
BLOCKED |= {"flwr", "ray"}
for name in BLOCKED:
    sys.modules[name] = None  # importing it raises as if it were not installed
"""

WORK = """
import os
import torch
import fedsso

fed = fedsso.load("synthetic", clients=3, dim=4)
folder = sys.argv[1]
options = dict(rounds=4, batch_size=None, device="cpu")
run = fedsso.simulate(fed, "linear", fedsso.FedSSO(alpha=0.1), out=folder + "/run", **options)
back = fedsso.load_run(folder + "/run")
assert torch.equal(back.x, run.x)
assert back.final("test_loss") == run.final("test_loss") < run.trace["test_loss"][0]
grid = [fedsso.FedAvg(alpha=a) for a in (0.1, 0.2)]
runs = fedsso.sweep(fed, "linear", grid, seeds=(0, 1), out=folder + "/sweep", **options)
assert len(fedsso.load_runs(folder + "/sweep")) == len(runs) == 4
assert runs.best(metric="test_loss").label
assert "alpha=0.1" in runs.table([0.5])
arrays = fedsso.Federation.from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])], test_fraction=0)
assert fedsso.simulate(arrays, "mclr", "fedavg", **options).x.isfinite().all()
tables = os.path.join(folder, "tables")
os.makedirs(tables, exist_ok=True)
for city, shift in (("graz", 0), ("ulm", 3)):
    ages = [40 + (7 * i + shift) % 31 for i in range(60)]
    lines = [f"{age},{'yes' if 11 * age % 30 < age - 40 else 'no'}" for age in ages]
    with open(os.path.join(tables, f"{city}.csv"), "w") as file:
        file.write("\\n".join(["age,ill", *lines]))
result = fedsso.glm(tables, "binomial", "ill", out=folder + "/model")
assert fedsso.load_model(folder + "/model").summary() == result.summary()
result.report(folder + "/page.html")
assert 0 < result.predictions(os.path.join(tables, "ulm.csv")).prediction[0] < 1
assert all(sys.modules[name] is None for name in BLOCKED)
print("done")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def test_core_without_the_optional_packages(tmp_path: Path) -> None:
    done = run(BLOCK + WORK, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_the_block_blocks() -> None:
    done = run(BLOCK + "import pandas")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_flower_is_named_where_it_is_missing() -> None:
    done = run(BLOCK + "import fedsso.flower")
    assert "pip install '.[flower]'" in done.stderr
