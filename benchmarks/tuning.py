"""`fedsso.tune` beside the grid of `fedsso.sweep`: how good is what a third of the trials finds?

Both choose by the accuracy at the end, on the same rows. A seed is one of the run and of the
search. `python -m benchmarks.tuning` prints the table of docs/clusters.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import fedsso
from fedsso.experiment.tuning import PRUNERS

SHARE = 3  # the grid has so many times the trials


class Task(NamedTuple):
    """A federation, a model and how long it is trained."""

    data: dict[str, Any]
    model: str
    options: dict[str, Any]


TASKS = {
    "digits": Task({"name": "digits", "clients": 20}, "mclr", {"rounds": 60}),
    "heart": Task({"name": "heart", "clients": 4, "partition": "iid"}, "mclr", {"rounds": 60}),
    "phishing": Task({"name": "phishing", "clients": 20}, "mclr", {"rounds": 60}),
}


def cell(results: fedsso.Results) -> str:
    """The accuracy of the best setting, and the rounds that all trials took together."""
    rounds = sum(len(run.trace) - 1 for run in results)
    return f"{results.best().final():.4f} ({rounds})"


def compare(name: str, algorithm: str, seed: int) -> str:
    """One line of the table."""
    task = TASKS[name]
    options = {**task.options, "device": "cpu", "seed": seed}
    fed = fedsso.load(**task.data)
    grid = fedsso.sweep(fed, task.model, [algorithm], **options)
    trials = len(grid) // SHARE
    cells = [f"{name}, {algorithm}", str(seed), f"{len(grid)}, {trials}", cell(grid)]
    for prune in PRUNERS:
        found = fedsso.tune(fed, task.model, algorithm, trials=trials, prune=prune, **options)
        cells.append(cell(found))
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, a line for each task and seed as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="digits,phishing", help="with commas between")
    parser.add_argument("--algorithm", default="fedadam")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    given = parser.parse_args(arguments)
    print(f"| task | seed | trials | grid | {' | '.join(PRUNERS)} |")
    print("|---" * (4 + len(PRUNERS)) + "|")
    for name in given.tasks.split(","):
        for seed in range(given.seeds):
            print(compare(name, given.algorithm, seed), flush=True)


if __name__ == "__main__":
    main()
