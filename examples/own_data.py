"""Your own data: `python examples/own_data.py FOLDER TARGET`, with one CSV file per hospital in the
folder.

TARGET is the column to predict; gaps are empty or "?". Without arguments four hospitals with an
invented illness; with a new FOLDER alone their tables are written there, and nothing is trained.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import fedsso


def main(folder: str | Path, target: str) -> None:
    fed = fedsso.Federation.from_csv(folder, target)
    print(fed.summary(), "\n")
    algorithms = [fedsso.FedSSO(alpha=0.03), fedsso.FedAvg(alpha=0.1)]  # fedsso.sweep tries many
    for run in fedsso.compare(fed, "mclr", algorithms, rounds=20, local_steps=5, batch_size=None):
        print(f"{run.label}: test loss {run.final('test_loss'):.4f}, accuracy {run.final():.4f}")
        print(run.clients().to_string(index=False, float_format="{:.3f}".format), "\n")


def invent(folder: Path) -> Path:
    folder.mkdir()  # an error if it is there: nobody's tables are overwritten
    draw = np.random.default_rng(0)
    for name, rows, mean_age in (
        ("east", 300, 45),
        ("north", 200, 55),
        ("south", 120, 65),
        ("west", 60, 75),
    ):
        age, high, gap = draw.normal(
            (mean_age, 130, 48), (12, 18, 8), (rows, 3)
        ).T  # gap between blood pressures
        ill = draw.random(rows) < 1 / (1 + np.exp((60 - age) / 6 + (48 - gap) / 3))
        gap[draw.random(rows) < 0.05] = np.nan  # not always measured
        table = np.stack([age, high, high - gap, ill], 1)
        np.savetxt(
            folder / f"{name}.csv", table, "%.0f", ",", header="age,high,low,ill", comments=""
        )
    return folder


if __name__ == "__main__":
    match sys.argv[1:]:
        case [folder]:
            print(f"{invent(Path(folder))}: tables of four hospitals")
        case [folder, target]:
            main(folder, target)
        case _:
            with tempfile.TemporaryDirectory() as empty:
                main(invent(Path(empty, "hospitals")), "ill")
