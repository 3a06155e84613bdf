"""What the paper trains, and with what: learning tasks and methods, each with the grid that is
searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..algorithm import Algorithm
from ..algorithm.records import fields_of
from ..algorithms import ALGORITHMS, make
from ..data import Federation, load
from ..experiment.grids import axes, grid

SEEDS = (0, 1, 2, 3, 4)
THIN = {"alpha": (0.01, 0.1), "eta": (0.1, 1.0), "mu": (0.1,)}
DIGITS, CLOTHES = (0.40, 0.60, 0.80, 0.88, 0.90), (0.40, 0.60, 0.80, 0.83, 0.84)


@dataclass(frozen=True)
class Task:
    """A federation, a model, and the accuracies that are counted; the deciding one chooses
    settings."""

    name: str
    title: str
    data: Mapping[str, Any]
    model: str
    targets: tuple[float, ...]
    deciding: float
    convex: bool = True
    rounds: int = 200
    choosing: int = 1  # seeds of the whole grid; the chosen setting then runs with all

    def federation(self) -> Federation:
        return load(**self.data)


def _tasks(*tasks: Task) -> dict[str, Task]:
    return {task.name: task for task in tasks}


MNIST = {"name": "mnist", "partition": "paper-20"}
FASHION = {"name": "fashion_mnist", "partition": "paper-fashion-3"}
EMNIST = {"name": "emnist_digits", "clients": 20}
TWEETS = {"name": "sentiment140", "clients": 10}
PLAYS = {"name": "shakespeare", "clients": 10}
CNN_TARGETS = (0.40, 0.60, 0.80, 0.88, 0.91)
TABLE2 = _tasks(
    Task("mnist-mclr", "MNIST, 20 clients, MCLR", MNIST, "mclr", DIGITS, 0.88, choosing=3),
    Task("fashion-mclr", "Fashion-MNIST, 3 clients, MCLR", FASHION, "mclr", CLOTHES, 0.83, choosing=3),
    Task("emnist-mclr", "EMNIST digits, 20 clients, MCLR", EMNIST, "mclr", DIGITS, 0.88, choosing=3),
    Task("mnist-cnn", "MNIST, 20 clients, CNN", MNIST, "cnn", CNN_TARGETS, 0.88, False, choosing=3),
    Task(
        "fashion-cnn", "Fashion-MNIST, 3 clients, CNN", FASHION, "cnn", (0.40, 0.60, 0.80, 0.81, 0.83), 0.81, False,
        choosing=3,
    ),
    Task("emnist-cnn", "EMNIST digits, 20 clients, CNN", EMNIST, "cnn", CNN_TARGETS, 0.88, False, choosing=3),
)  # fmt: skip
TASKS = TABLE2 | _tasks(
    Task("mnist3-mclr", "MNIST, 3 clients, MCLR", {**MNIST, "partition": "paper-3"}, "mclr", DIGITS, 0.88),
    Task(
        "cifar-lenet", "CIFAR-10, 10 clients, LeNet", {"name": "cifar10", "clients": 10}, "lenet",
        (0.30, 0.35, 0.40, 0.45), 0.40, False, rounds=100,
    ),
    Task(
        "ijcnn1-mclr", "ijcnn1, 3 clients, logistic regression", {"name": "ijcnn1", "clients": 3}, "mclr",
        (0.905, 0.91, 0.915, 0.92), 0.915,
    ),
    Task("shakespeare-mclr", "Shakespeare, 10 clients, MCLR", PLAYS, "mclr", (0.20, 0.25, 0.27, 0.28), 0.27),
    Task(
        "sentiment140-mlp", "Sentiment140, 10 clients, MLP", TWEETS, "textmlp", (0.60, 0.65, 0.68, 0.70), 0.68, False
    ),
    Task(  # small enough for FedNL, which keeps a d x d matrix at every client
        "sentiment140-short", "Sentiment140, 8 buckets, 10 clients, MLP (d = 354)", {**TWEETS, "buckets": 8}, "mlp",
        (0.52, 0.54), 0.54, False, rounds=60,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """An algorithm as a row of a table: what is fixed, and whether anything is tuned."""

    name: str
    title: str
    algorithm: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tuned: bool = True

    def records(self, *, thin: bool = False) -> list[Algorithm]:
        """Its grid, or a few points of it for a quick look."""
        if not self.tuned:
            return [make(self.algorithm, dict(self.fixed))]
        few = {key: THIN[key] for key in axes(self.algorithm) if key in THIN} if thin else {}
        return grid(self.algorithm, {**few, **self.fixed})

    def at(self, **values: float) -> Algorithm:
        """One point of its grid; what it has no field for is left out."""
        own = {f.name for f in fields_of(ALGORITHMS[self.algorithm])}
        return make(self.algorithm, {**self.fixed, **{k: v for k, v in values.items() if k in own}})


def _methods(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}


AS_PRINTED = {
    "guard": "none"
}  # Algorithm 1 as printed; R = 200 would reset B in the last of 200 rounds
METHODS = _methods(
    Method("fedavg", "FedAvg", "fedavg"),
    Method("fedsgd", "FedSGD", "fedsgd"),
    Method("scaffold", "SCAFFOLD", "scaffold"),
    Method("feddane", "FedDANE", "feddane"),
    Method("fednl", "FedNL", "fednl"),
    Method("fedac", "FedAC", "fedac"),
    Method("fedadagrad", "FedAdaGrad (FedOpt)", "fedadagrad"),
    Method("fedadam", "FedAdam", "fedadam"),
    Method("fedsso", "FedSSO", "fedsso", AS_PRINTED),
    Method("fedsso-dfp", "FedSSO, DFP form", "fedsso", {**AS_PRINTED, "form": "dfp"}),
    Method("fedsso-lbfgs", "FedSSO, L-BFGS form", "fedsso", {**AS_PRINTED, "form": "lbfgs"}),
    Method("fedsso-default", "FedSSO, our default, not tuned", "fedsso", tuned=False),
)
