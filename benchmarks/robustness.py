"""One setting for everything: FedSSO's default beside rivals that are tuned on each cell by itself.

    python -m benchmarks.robustness --device cuda --minutes 8     # again, until it is done
    python -m benchmarks.robustness_report                        # report what there is

A cell is a task with one thing changed: participation, drop-outs, local steps, skew or start.
FedSSO runs as a newcomer gets it. Every rival is tuned in every cell: its whole grid is run with
the first seed, the best three points for rounds and the best three at the end also with the other
seeds, and of these the best counts, for rounds and for the end each by itself.

FedSSO's rules were found on one half of the tasks, and are judged on the other half.

Each method of each cell is one small file below --out. What is there is not run again, so several
processes or machines may share the work by --tasks, --changes and --methods.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsso import Federation, load
from fedsso.algorithm import Algorithm
from fedsso.algorithms import make
from fedsso.errors import InputError, unknown
from fedsso.experiment.grids import grid
from fedsso.experiment.plan import Question
from fedsso.experiment.results import Results
from fedsso.experiment.sweep import Means, run_grid
from fedsso.support.files import write_atomic

from . import tables
from .robustness_score import ACCURACY, LOSS, Goal, Score, chosen, curve, judge, points, promising

SEEDS = (0, 1, 2)
FEW = 3  # points of a grid that run with all seeds, for rounds and for the end each
WIDE = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # client steps alone
CLIENT = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # client steps beside a server step
ADAPTIVE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
METHODS: dict[str, list[Algorithm]] = {
    "auto": [make("fedsso")],
    "published": grid(
        "fedsso",
        {
            "alpha": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
            "eta": (0.03, 0.1, 0.3, 0.7, 1.0),
            "guard": "none",
        },
    ),
    "fedavg": grid("fedavg", {"alpha": WIDE, "eta": 1.0}),
    "fedavgm": grid("fedavgm", {"alpha": (0.001, *CLIENT), "eta": (0.03, 0.1, 0.3, 1.0)}),
    "fedadam": grid("fedadam", {"alpha": CLIENT, "eta": ADAPTIVE}),
    "fedyogi": grid("fedyogi", {"alpha": CLIENT, "eta": ADAPTIVE}),
    "scaffold": grid("scaffold", {"alpha": WIDE, "eta": 1.0}),
    "fedexp": grid("fedexp", {"alpha": WIDE, "eps": 0.001}),
    "fedacg": grid("fedacg", {"alpha": (0.001, *CLIENT), "beta": (0.7, 0.85, 0.95)}),
    "diloco": grid("diloco", {"alpha": (0.001, *CLIENT), "eta": (0.03, 0.1, 0.3, 0.7, 1.0)}),
    "serverlion": grid(
        "serverlion", {"alpha": CLIENT, "eta": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)}
    ),
    "servermuon": grid(
        "servermuon", {"alpha": CLIENT, "eta": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)}
    ),
    "fedvarp": grid("fedvarp", {"alpha": WIDE, "eta": 1.0}),
    "mifa": grid("mifa", {"alpha": WIDE, "eta": 1.0}),
}


@dataclass(frozen=True)
class Task:
    """Data, a model, and the value to which rounds are counted."""

    data: Mapping[str, Any]
    model: str
    target: float
    clients: int
    rounds: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)
    alphas: tuple[float, ...] = ()  # the client steps that are tried; none: those of the grids

    @property
    def goal(self) -> Goal:
        """The loss of all training rows where it is evaluated, else test accuracy."""
        return Goal(LOSS if self.options.get("eval_train") else ACCURACY, self.target)


MNIST = {"name": "mnist", "partition": "paper-20"}
TRAINING_LOSS = {"eval_train": True}


def _table(
    name: str,
    target: float,
    clients: int,
    model: str = "mclr",
) -> Task:
    """A model on one of `tables.TABLES`, judged by the loss of its training rows.

    The target is 98 % of the way from the loss at 0 to that of scikit-learn's LogisticRegression()
    on all training rows, rounded to three digits; it is the same for a network.
    """
    return Task({"table": name}, model, target, clients, rounds=100, options=TRAINING_LOSS)


HALVES: dict[str, dict[str, Task]] = {
    "finding": {
        "digits": Task(
            {"name": "digits", "clients": 20, "partition": "dirichlet", "concentration": 0.1},
            "mclr",
            0.94,
            20,
        ),
        "mnist-mclr": Task(MNIST, "mclr", 0.90, 20),
        "mnist-mlp": Task(MNIST, "mlp", 0.92, 20),
        "mnist-cnn": Task(MNIST, "cnn", 0.88, 20),
        "fashion-cnn": Task(
            {"name": "fashion_mnist", "partition": "paper-fashion-3"}, "cnn", 0.81, 3
        ),
        "emnist-mclr": Task({"name": "emnist_digits", "clients": 20}, "mclr", 0.90, 20),
        "ijcnn1-mclr": Task({"name": "ijcnn1", "clients": 3}, "mclr", 0.915, 3),
        "heart-mclr": Task(
            {"name": "heart"},
            "mclr",
            0.41,
            4,
            rounds=60,
            options={"loss": "bce", "batch_size": None, **TRAINING_LOSS},
        ),
        "shakespeare-mclr": Task(
            {"name": "shakespeare", "clients": 10},
            "mclr",
            2.5,
            10,
            rounds=100,
            options=TRAINING_LOSS,
        ),
        "a9a-mclr": Task({"name": "a9a", "clients": 20}, "mclr", 0.845, 20),
        "phishing-mclr": Task({"name": "phishing", "clients": 20}, "mclr", 0.93, 20),
        "tweets-mclr": Task({"name": "sentiment140", "clients": 20}, "mclr", 0.70, 20),
        "chile-mclr": _table("Chile", 0.838, 5),
        "families-mclr": _table("Contraception", 0.638, 58),
        "names-mclr": _table("ResumeNames", 0.266, 20),
        "juice-mclr": _table("OJ", 0.389, 5),
        "health-mclr": _table("NMES1988", 0.52, 4),
        "health-mlp": _table("NMES1988", 0.52, 4, "mlp"),
        "names-mlp": _table("ResumeNames", 0.266, 20, "mlp"),
    },
    "judging": {
        "cifar-lenet": Task({"name": "cifar10", "clients": 10}, "lenet", 0.40, 10, rounds=100),
        "cifar-resnet20": Task(
            {"name": "cifar10", "clients": 10, "partition": "dirichlet", "concentration": 0.3},
            "resnet20-gn",
            0.40,
            10,
            rounds=60,
            alphas=(0.03, 0.1, 0.3),
        ),
        "emnist-mlp": Task({"name": "emnist_digits", "clients": 20}, "mlp", 0.94, 20),
        "cells-mclr": _table("cells", 0.389, 10),
        "churn-mclr": _table("wa_churn", 0.417, 20),
        "lending-mclr": _table("lending_club", 0.186, 50),
        "leaves-mclr": _table("leaf_id_flavia", 0.09, 20),
        "jobs-mclr": _table("hpc_data", 0.95, 14),
        "developers-mclr": _table("stackoverflow", 0.317, 5),
        "diamonds-mclr": _table("diamonds", 1.004, 20),
        "attrition-mclr": _table("attrition", 0.294, 9),
        "credit-mclr": _table("credit_data", 0.421, 20),
        "calls-mclr": _table("mlc_churn", 0.316, 51),
        "caravan-mclr": _table("Caravan", 0.201, 20),
        "spam-mclr": _table("spam7", 0.442, 20),
        "taxi-mclr": _table("taxi", 0.281, 7),
        "values-mclr": _table("WVS", 0.992, 4),
        "crashes-mclr": _table("nassCDS", 0.137, 20),
        "insurance-mclr": _table("HealthInsurance", 0.432, 20),
        "cars-mclr": _table("Car", 1.466, 20),
        "speech-mclr": _table("pd_speech", 0.025, 10),
        "cells-mlp": _table("cells", 0.389, 10, "mlp"),
        "jobs-mlp": _table("hpc_data", 0.95, 14, "mlp"),
        "credit-mlp": _table("credit_data", 0.421, 20, "mlp"),
        "taxi-mlp": _table("taxi", 0.281, 7, "mlp"),
        "crashes-mlp": _table("nassCDS", 0.137, 20, "mlp"),
        "cars-mlp": _table("Car", 1.466, 20, "mlp"),
    },
}
NEWEST = (
    "taxi-mclr",
    "values-mclr",
    "crashes-mclr",
    "insurance-mclr",
    "cars-mclr",
    "speech-mclr",
    "taxi-mlp",
    "crashes-mlp",
    "cars-mlp",
)
"""The held-out tasks that were named before any rule was run on them."""
TASKS = HALVES["finding"] | HALVES["judging"]
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
        """Where its files lie, below the folder of the bench."""
        return Path(self.task, self.change.replace(" ", "-"))


def cells() -> Iterator[Cell]:
    """All cells: absence on all tasks, everything else on a few."""
    for name, task in TASKS.items():
        yield Cell(name)
        asked: set[int] = set()
        for share in (0.5, 0.25, 0.1):
            few = max(1, round(share * task.clients))
            if few not in asked:
                yield Cell(name, f"{share:.0%} of the clients", {"participation": share})
            asked.add(few)
        yield Cell(name, "30% drop out", {"drop_rate": 0.3})
    for name in CLOSELY:
        for tau in (1, 20):
            change = "1 local step" if tau == 1 else f"{tau} local steps"
            yield Cell(name, change, {"local_steps": tau})
        if TASKS[name].model != "mlp":  # from zero a network's hidden layer never moves
            yield Cell(name, "random start", {"init": "default"})
        if TASKS[name].data is MNIST:
            for skew, c in (("mild skew", 1.0), ("extreme skew", 0.05)):
                own = {"name": "mnist", "clients": 20, "partition": "dirichlet", "concentration": c}
                yield Cell(name, skew, data=own)


def records(task: Task, method: str) -> list[Algorithm]:
    """The grid of a method on a task."""
    every = METHODS[method]
    if not task.alphas or method == "auto":
        return every
    return [record for record in every if getattr(record, "alpha", None) in task.alphas]


def measure(
    cell: Cell,
    method: str,
    fed: Federation,
    *,
    device: str = "auto",
    jobs: int = 1,
) -> Score:
    """The score of one method on one cell; a rival is tuned first."""
    task = TASKS[cell.task]
    given = {"rounds": task.rounds, "local_steps": 5, "batch_size": 100}
    options = {**given, **task.options, **cell.options, "device": device}
    every = records(task, method)

    def trained(some: Sequence[Algorithm], seeds: Sequence[int]) -> Results:
        return run_grid(Question(fed, task.model, some, seeds, options), Means(None, jobs))

    grid = points(trained(every, SEEDS[:1]), task.goal)
    best = promising(grid, task.goal, FEW)
    again = trained([every[number] for number in best], SEEDS[1:]).settings()
    finalists = []
    for number, more in zip(best, again, strict=True):
        traces = [*grid[number].traces, *more.traces]
        finalists.append(judge(grid[number].label, number, traces, task.goal))
    told = chosen(finalists, task.goal)
    last = min(finalists, key=lambda point: (task.goal.rank(point.final), point.rounds))
    return told | {"points": len(every), "curve": curve(last, task.goal, task.rounds)}


def loaded(data: Mapping[str, Any]) -> Federation:
    """The federation of a task: one of the library's, or a table."""
    return tables.federation(data["table"]) if "table" in data else load(**data)


def run(
    cell: Cell,
    methods: Sequence[str],
    out: Path,
    *,
    device: str = "auto",
    jobs: int = 1,
    deadline: float = math.inf,
) -> bool:
    """Measure what is missing of a cell; False if the deadline came before the end."""
    todo = [name for name in methods if not (out / cell.folder / f"{name}.json").is_file()]
    if not todo:
        return True
    fed = loaded(cell.data or TASKS[cell.task].data)
    for name in todo:
        if time.monotonic() >= deadline:
            return False
        began = time.monotonic()
        told = measure(cell, name, fed, device=device, jobs=jobs)
        (out / cell.folder).mkdir(parents=True, exist_ok=True)
        write_atomic(out / cell.folder / f"{name}.json", json.dumps(told))
        print(f"{cell.name}, {name}: {time.monotonic() - began:.0f} s", flush=True)
    return True


def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
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
        "--out", type=Path, default=Path("build/robustness"), help="folder of the files"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing new after so many"
    )
    every = {
        "tasks": list(TASKS),
        "changes": list(dict.fromkeys(c.change for c in cells())),
        "methods": list(METHODS),
    }
    for name, all_of in every.items():
        known = ",".join(all_of).replace("%", "%%")
        parser.add_argument(
            f"--{name}", type=listed(all_of), default=all_of, help=f"only some of {known}"
        )
    given = parser.parse_args()
    wanted = [cell for cell in cells() if cell.task in given.tasks and cell.change in given.changes]
    deadline = time.monotonic() + 60 * given.minutes
    for cell in wanted:
        try:
            done = run(
                cell,
                given.methods,
                given.out,
                device=given.device,
                jobs=given.jobs,
                deadline=deadline,
            )
        except InputError as error:
            print(f"{cell.name}: left out ({error})")
            continue
        if not done:
            print("out of time: the same command goes on")
            return


if __name__ == "__main__":
    main()
