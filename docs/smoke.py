"""FedAvg and FedSSO on every data set with each of its models: the numbers behind the table of
docs/datasets.md.

python docs/smoke.py [NAME ...] [--seeds 0,1,2]     # left out: every data set that is there

Each algorithm tries six client steps and shows the one with the least training loss after 50
rounds, the mean over the seeds; nothing is chosen by test rows. Results are added to
docs/smoke.json; `make docs` makes the table of them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch

import fedsso
from fedsso.data import DataSet, datasets

RESULTS = Path(__file__).with_name("smoke.json")
ROUNDS = 50
GRIDS = {
    fedsso.FedAvg: (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    fedsso.FedSSO: (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
}
OPTIONS = {
    "rounds": ROUNDS,
    "local_steps": 5,
    "batch_size": 100,
    "eval_every": ROUNDS,
    "eval_train": True,
}


def smoke(dataset: DataSet, model: str, seeds: list[int]) -> dict[str, Any]:
    """One line of the table."""
    fed = fedsso.load(dataset.name)
    began = time.perf_counter()
    line: dict[str, Any] = {
        "rows": len(fed.train_rows) + len(fed.test_rows),
        "clients": fed.clients,
        "seeds": seeds,
    }
    for algorithm, steps in GRIDS.items():
        records = [algorithm(alpha=alpha) for alpha in steps]
        runs = fedsso.compare(fed, model, records, seeds=seeds, **OPTIONS)
        line[algorithm.__name__] = min(
            map(_result, runs.curves()), key=lambda found: found["train_loss"]
        )
        line["d"] = runs[0].x.numel()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {**line, "seconds": round(time.perf_counter() - began, 1), "device": device}


def _result(curve: Any) -> dict[str, Any]:
    """The end of one setting: test accuracy of each seed, and the training loss that decides."""
    losses = [trace.final("full_train_loss") for trace in curve.traces]
    worst = [loss if math.isfinite(loss) else math.inf for loss in losses]
    final = [trace.final("test_accuracy") for trace in curve.traces]
    accuracy = [
        None if math.isnan(value) else round(value, 4) for value in final
    ]  # a real target has none
    return {"setting": curve.label, "train_loss": sum(worst) / len(worst), "accuracy": accuracy}


def main() -> None:
    """Run what is asked for and add it to the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="data sets; left out: all that are there")
    parser.add_argument(
        "--models", default="", help="with commas between; left out: those of the data set"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    for dataset in datasets():
        if dataset.name in asked.names or (not asked.names and dataset.present()):
            for model in asked.models.split(",") if asked.models else dataset.models:
                line = smoke(dataset, model, [int(seed) for seed in asked.seeds.split(",")])
                results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
                results[f"{dataset.name} {model}"] = line
                asked.out.write_text(json.dumps(results, indent=1) + "\n")
                print(dataset.name, model, json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
