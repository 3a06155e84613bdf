"""One setting for everything: FedSSO's default beside rivals that are tuned on each cell by itself.

    python -m benchmarks.robustness --device cuda --jobs 5 --minutes 8    # again, until it is done
    python -m benchmarks.robustness_report                                # report what there is

A cell is a task with one thing changed: participation, drop-outs, local steps, skew or start. In
every cell each rival has its own grid of at most 36 points. FedSSO runs once as a newcomer gets it
("auto"), and with five client steps over a factor of 30 ("default"), none of which is chosen.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsso import load
from fedsso.algorithm import Algorithm
from fedsso.algorithms import make
from fedsso.errors import InputError, unknown
from fedsso.experiment.grids import ALPHA, grid
from fedsso.experiment.plan import Question
from fedsso.experiment.results import Results
from fedsso.experiment.sweep import Means, run_grid
from fedsso.experiment.workers import OutOfTime

SEEDS = (0, 1, 2)
CLIENT = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SERVER = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
RANGE = (0.001, 0.0023, 0.0055, 0.013, 0.03)  # a factor of 30, in equal steps
METHODS: dict[str, list[Algorithm]] = {
    "auto": [make("fedsso")],
    "default": grid("fedsso", {"alpha": RANGE, "eta": 1.0}),
    "published": grid(
        "fedsso", {"alpha": CLIENT, "eta": (0.03, 0.1, 0.3, 0.7, 1.0), "guard": "none"}
    ),
    "fedavg": grid("fedavg", {"alpha": ALPHA, "eta": 1.0}),
    "fedadam": grid("fedadam", {"alpha": CLIENT, "eta": SERVER}),
    "fedyogi": grid("fedyogi", {"alpha": CLIENT, "eta": SERVER}),
    "scaffold": grid("scaffold", {"alpha": ALPHA, "eta": (0.3, 1.0)}),
}


@dataclass(frozen=True)
class Task:
    """Data, a model, and the accuracy to which rounds are counted."""

    data: Mapping[str, Any]
    model: str
    target: float
    rounds: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)


MNIST = {"name": "mnist", "partition": "paper-20"}
TASKS = {
    "digits": Task(
        {"name": "digits", "clients": 20, "partition": "dirichlet", "concentration": 0.1},
        "mclr",
        0.94,
    ),
    "mnist-mclr": Task(MNIST, "mclr", 0.90),
    "mnist-mlp": Task(MNIST, "mlp", 0.92),
    "mnist-cnn": Task(MNIST, "cnn", 0.88),
    "fashion-cnn": Task({"name": "fashion_mnist", "partition": "paper-fashion-3"}, "cnn", 0.81),
    "emnist-mclr": Task({"name": "emnist_digits", "clients": 20}, "mclr", 0.90),
    "cifar-lenet": Task({"name": "cifar10", "clients": 10}, "lenet", 0.40, rounds=100),
    "ijcnn1-mclr": Task({"name": "ijcnn1", "clients": 3}, "mclr", 0.915),
    "heart-mclr": Task(
        {"name": "heart"},
        "mclr",
        0.41,
        rounds=60,
        options={"loss": "bce", "batch_size": None, "eval_train": True},
    ),
    "shakespeare-mclr": Task(
        {"name": "shakespeare", "clients": 10},
        "mclr",
        2.5,
        rounds=100,
        options={"eval_train": True},
    ),
}
LOCAL = {"1 local step": 1, "20 local steps": 20}
CLOSELY = ("mnist-mclr", "mnist-mlp", "heart-mclr")  # tasks on which every factor is changed


@dataclass(frozen=True)
class Cell:
    """A task with one thing changed."""

    task: str
    change: str = "base"
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.task}, {self.change}"

    @property
    def folder(self) -> Path:
        """Where its parts lie, below the folder of the bench."""
        return Path(self.task, self.change.replace(" ", "-"))


def cells() -> Iterator[Cell]:
    """All cells: participation everywhere, everything else on a few tasks."""
    for name in TASKS:
        yield Cell(name)
        yield from (
            Cell(name, f"{p:.0%} of the clients", {"participation": p}) for p in (0.5, 0.25)
        )
    for name in CLOSELY:
        yield Cell(name, "10% of the clients", {"participation": 0.1})
        yield Cell(name, "30% drop out", {"drop_rate": 0.3})
        yield from (Cell(name, change, {"local_steps": tau}) for change, tau in LOCAL.items())
        if TASKS[name].model != "mlp":  # from zero a network's hidden layer never moves
            yield Cell(name, "random start", {"init": "default"})
        if TASKS[name].data is MNIST:
            for skew, c in (("mild skew", 1.0), ("extreme skew", 0.05)):
                own = {"name": "mnist", "clients": 20, "partition": "dirichlet", "concentration": c}
                yield Cell(name, skew, data=own)


def run(
    cell: Cell,
    methods: Sequence[str],
    out: Path,
    *,
    device: str = "auto",
    jobs: int = 1,
    deadline: float = math.inf,
) -> dict[str, Results]:
    """Every method's grid on one cell; what lies in `out` is not run again."""
    task = TASKS[cell.task]
    common = {
        "rounds": task.rounds,
        "local_steps": 5,
        "batch_size": 100,
        **task.options,
        **cell.options,
    }
    fed = load(**(cell.data or task.data))
    options = {**common, "device": device}
    found = {}
    for name in methods:
        question = Question(fed, task.model, METHODS[name], SEEDS, options)
        means = Means(out / cell.folder / name, jobs, deadline)
        found[name] = run_grid(question, means)
    return found


def _listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A reader of names with commas between them."""

    def read(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(str(unknown("name", wrong[0], known)))
        return text.split(",")

    return read


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robustness", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/robustness"), help="folder of the parts"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no new part after so many"
    )
    every = {
        "tasks": list(TASKS),
        "changes": list(dict.fromkeys(c.change for c in cells())),
        "methods": list(METHODS),
    }
    for name, all_of in every.items():
        known = ",".join(all_of).replace("%", "%%")
        parser.add_argument(
            f"--{name}", type=_listed(all_of), default=all_of, help=f"only some of {known}"
        )
    given = parser.parse_args()
    wanted = [cell for cell in cells() if cell.task in given.tasks and cell.change in given.changes]
    deadline = time.monotonic() + 60 * given.minutes
    for cell in wanted:
        began = time.monotonic()
        try:
            run(
                cell,
                given.methods,
                given.out,
                device=given.device,
                jobs=given.jobs,
                deadline=deadline,
            )
        except OutOfTime:
            print("out of time: the same command goes on")
            return
        except InputError as error:
            print(f"{cell.name}: left out ({error})")
            continue
        print(f"{cell.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
