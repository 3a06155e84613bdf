"""What the paper trains, and with what: learning tasks and methods.

A `Task` is a data set on clients with a model, and the accuracies that are counted. A `Method` is
an algorithm as a row of a table, with the grid of settings that is searched for the best one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..algorithm.records import fields_of
from ..algorithms import ALGORITHMS, make
from ..data.catalogue import load
from ..experiment.grids import axes, grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..algorithm import Algorithm
    from ..data.federation import Federation

SEEDS = (0, 1, 2, 3, 4)
"""The seeds that the chosen settings are run with. The first ones also choose them."""
THIN = {"alpha": (0.01, 0.1), "eta": (0.1, 1.0), "mu": (0.1,)}
"""The values of each axis in the grid of a quick look."""


@dataclass(frozen=True)
class Task:
    """A federation, a model, and the test accuracies whose rounds are counted.

    The best setting of a method is the one with the fewest rounds to the `deciding` accuracy. It is
    chosen on the whole grid with the first `choosing` seeds and then run with all seeds.
    """

    name: str
    """The key in `TASKS`. The runs of the task are kept in a folder of this name."""
    title: str
    """What pages and pictures call it."""
    data: Mapping[str, Any]
    """The arguments of `load`."""
    model: str
    """The name of the model, as `simulate` takes it."""
    targets: tuple[float, ...]
    """The test accuracies whose rounds are counted, in rising order."""
    deciding: float
    """The accuracy that settings are chosen by, one of the targets."""
    convex: bool = True
    """Whether the loss is convex. Convex models start from zero, others from torch's draw."""
    rounds: int = 200
    """How many rounds a run has, except in a quick look."""
    choosing: int = 1
    """How many seeds the grid is run with."""

    def federation(self) -> Federation:
        """Read the task's data.

        Raises InputError if the files are missing. `Lab.federation` keeps the last one, so call
        that where there is a lab.
        """
        return load(**self.data)


def _by_name(*tasks: Task) -> dict[str, Task]:
    """Tasks in the order given, found by name."""
    return {task.name: task for task in tasks}


# ---- Table 2 ----

# The data. The partitions called paper-... give each client the label counts behind the paper's
# results.
MNIST = {"name": "mnist", "partition": "paper-20"}
FASHION = {"name": "fashion_mnist", "partition": "paper-fashion-3"}
EMNIST = {"name": "emnist_digits", "clients": 20}

# The targets, from Table 2 of the paper. EMNIST digits, which it does not have, has those of MNIST.
DIGITS = (0.40, 0.60, 0.80, 0.88, 0.90)
CLOTHES = (0.40, 0.60, 0.80, 0.83, 0.84)
CNN_DIGITS = (0.40, 0.60, 0.80, 0.88, 0.91)
CNN_CLOTHES = (0.40, 0.60, 0.80, 0.81, 0.83)


def _convex(name: str, title: str, data: Mapping[str, Any], *targets: float) -> Task:
    """A task of Table 2 with softmax regression, a convex model.

    The last but one target decides, as in the paper.
    """
    deciding = targets[-2]
    return Task(f"{name}-mclr", f"{title}, MCLR", data, "mclr", targets, deciding, choosing=3)


def _deep(name: str, title: str, data: Mapping[str, Any], *targets: float) -> Task:
    """A task of Table 2 with the paper's CNN.

    The last but one target decides, as in the paper.
    """
    deciding = targets[-2]
    return Task(f"{name}-cnn", f"{title}, CNN", data, "cnn", targets, deciding, False, choosing=3)


# The authors call their Fashion-MNIST "EMNIST". So there are both sets here, under their own names.
TABLE2 = _by_name(
    _convex("mnist", "MNIST, 20 clients", MNIST, *DIGITS),
    _convex("fashion", "Fashion-MNIST, 3 clients", FASHION, *CLOTHES),
    _convex("emnist", "EMNIST digits, 20 clients", EMNIST, *DIGITS),
    _deep("mnist", "MNIST, 20 clients", MNIST, *CNN_DIGITS),
    _deep("fashion", "Fashion-MNIST, 3 clients", FASHION, *CNN_CLOTHES),
    _deep("emnist", "EMNIST digits, 20 clients", EMNIST, *CNN_DIGITS),
)

# ---- the figures ----

TWEETS = {"name": "sentiment140", "clients": 10}

# All tasks, by name. Those of the figures alone have their settings chosen with one seed.
TASKS = TABLE2 | _by_name(
    Task(
        "mnist3-mclr",
        "MNIST, 3 clients, MCLR",
        {**MNIST, "partition": "paper-3"},
        "mclr",
        DIGITS,
        deciding=0.88,
    ),
    Task(
        "cifar-lenet",
        "CIFAR-10, 10 clients, LeNet",
        {"name": "cifar10", "clients": 10},
        "lenet",
        (0.30, 0.35, 0.40, 0.45),
        deciding=0.40,
        convex=False,
        rounds=100,
    ),
    Task(
        "ijcnn1-mclr",
        "ijcnn1, 3 clients, logistic regression",
        {"name": "ijcnn1", "clients": 3},
        "mclr",
        (0.905, 0.91, 0.915, 0.92),
        deciding=0.915,
    ),
    Task(
        "shakespeare-mclr",
        "Shakespeare, 10 clients, MCLR",
        {"name": "shakespeare", "clients": 10},
        "mclr",
        (0.20, 0.25, 0.27, 0.28),
        deciding=0.27,
    ),
    Task(
        "sentiment140-mlp",
        "Sentiment140, 10 clients, MLP",
        TWEETS,
        "textmlp",
        (0.60, 0.65, 0.68, 0.70),
        deciding=0.68,
        convex=False,
    ),
    Task(  # small enough for FedNL, which keeps a d x d matrix at every client
        "sentiment140-short",
        "Sentiment140, 8 buckets, 10 clients, MLP (d = 354)",
        {**TWEETS, "buckets": 8},
        "mlp",
        (0.52, 0.54),
        deciding=0.54,
        convex=False,
        rounds=60,
    ),
)


# ---- methods ----


@dataclass(frozen=True)
class Method:
    """An algorithm as a row of a table.

    `fixed` holds hyper-parameters that are the same in its whole grid. A method that is not tuned
    has one setting: these, and defaults for the rest.

    >>> METHODS["fedsso"].at(alpha=0.1).guard, len(METHODS["fedavg"].records())
    ('none', 12)
    """

    name: str
    """The key in `METHODS`."""
    title: str
    """What tables and pictures call it."""
    algorithm: str
    """The name of the algorithm in the registry. Several methods can share one."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters that are the same in the whole grid."""
    tuned: bool = True
    """Whether a grid is searched. If not, there is one setting."""

    def records(self, *, thin: bool = False) -> list[Algorithm]:
        """All settings of its grid, each as a record that `simulate` takes.

        With `thin` there are a few of them, for a quick look. A method that is not tuned has one.
        """
        if not self.tuned:
            return [make(self.algorithm, dict(self.fixed))]
        # A value in `fixed` wins over an axis of the same name.
        values: dict[str, Any] = {}
        if thin:
            values = {key: THIN[key] for key in axes(self.algorithm) if key in THIN}
        return grid(self.algorithm, {**values, **self.fixed})

    def at(self, **values: float) -> Algorithm:
        """One setting with the given hyper-parameters, which need not be a point of the grid.

        Values that the algorithm has no field for are left out: FedNL, for example, has no α. So
        one call can set the same α for all methods of a figure.
        """
        own = {field.name for field in fields_of(ALGORITHMS[self.algorithm])}
        known = {name: value for name, value in values.items() if name in own}
        return make(self.algorithm, {**self.fixed, **known})


def _methods(*methods: Method) -> dict[str, Method]:
    """Methods in the order given, found by name."""
    return {method.name: method for method in methods}


# Algorithm 1 as printed, without the reset of B: R = 200 would reset it in the last of 200 rounds.
AS_PRINTED = {"guard": "none"}

# FedNL without first Hessians: safe on networks, and no bytes before the first step.
COLD = {"option": 2, "first": "zero"}

# All methods, in the order in which tables show them.
METHODS = _methods(
    Method("fedavg", "FedAvg", "fedavg"),
    Method("fedsgd", "FedSGD", "fedsgd"),
    Method("scaffold", "SCAFFOLD", "scaffold"),
    Method("feddane", "FedDANE", "feddane"),
    Method("fednl", "FedNL", "fednl", COLD),
    Method("fedac", "FedAC", "fedac"),
    Method("fedadagrad", "FedAdaGrad (FedOpt)", "fedadagrad"),
    Method("fedadam", "FedAdam", "fedadam"),
    Method("fedsso", "FedSSO", "fedsso", AS_PRINTED),
    Method("fedsso-dfp", "FedSSO, DFP form", "fedsso", {**AS_PRINTED, "form": "dfp"}),
    Method("fedsso-lbfgs", "FedSSO, L-BFGS form", "fedsso", {**AS_PRINTED, "form": "lbfgs"}),
    Method("fedsso-default", "FedSSO, our default, not tuned", "fedsso", tuned=False),
)
