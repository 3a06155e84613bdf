"""The paper's figures as data: which tasks and which algorithms they show.

A figure is a row of columns. A column is a task and the methods on it; where all methods have the
same client step, it also names that α. `curves` runs and draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

# The methods of a column, by kind of task; names are those of `tasks.METHODS`. FedNL is left out
# where its d x d matrices do not fit or take too long, FedDANE where it takes too long: it passes
# over all rows twice in every round.
CONVEX = (
    "fedavg",
    "fedsgd",
    "scaffold",
    "feddane",
    "fedac",
    "fedadagrad",
    "fedadam",
    "fedsso",
    "fedsso-default",
)
DEEP = tuple(name for name in CONVEX if name != "feddane")
TEXT = ("fedavg", "scaffold", "feddane", "fedac", "fedadagrad", "fedsso", "fedsso-default")
ENGINE = ("fedavg", "fedac", "fednl", "fedsso", "fedsso-default")
PHOTOS = ("fedavg", "fedadagrad", "fedsso", "fedsso-default")


@dataclass(frozen=True)
class Column:
    """One task of a figure, a column of two pictures: training loss above, test accuracy below.

    With `alpha` all methods have this client step; without it, each has its best setting.
    """

    task: str
    """A key of `tasks.TASKS`."""
    methods: tuple[str, ...]
    """Keys of `tasks.METHODS`, in the order in which they are drawn and listed."""
    alpha: float | None = None
    """The client step of all methods, or None for the best setting of each."""


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: its columns from left to right.

    The remark stands below the title on the figure's page.
    """

    title: str
    """The title of the picture and of the page."""
    columns: tuple[Column, ...]
    """The columns from left to right."""
    remark: str = ""
    """What a reader must know to compare the figure with the paper's."""


# The figures by name, which is the name of the command and of the files that it writes.
FIGURES = {
    "fig-same": Figure(
        "The same α for all",
        (
            Column("mnist-mclr", CONVEX, 0.001),
            Column("fashion-mclr", CONVEX, 0.001),
            Column("mnist-cnn", DEEP, 0.01),
            Column("fashion-cnn", DEEP, 0.01),
        ),
        "α = 0.001 for MCLR, 0.01 for the CNN; η, μ and the like at each algorithm's default. "
        "Our default chooses its α. FedDANE is not run on the CNN, FedNL not at all. "
        "Dots: the authors' released curves.",
    ),
    "fig-optimal": Figure(
        "Every algorithm at its best setting",
        (
            Column("mnist-mclr", CONVEX),
            Column("fashion-mclr", CONVEX),
            Column("mnist-cnn", DEEP),
            Column("fashion-cnn", DEEP),
        ),
        "Settings as in Table 2 (first reached); FedDANE is not run on the CNN, FedNL not at all. "
        "Dots: the authors' released curves.",
    ),
    "fig-cifar": Figure(
        "CIFAR-10, LeNet",
        (Column("cifar-lenet", PHOTOS),),
        "FedOpt is FedAdaGrad, as in the paper.",
    ),
    "fig-libsvm": Figure(
        "ijcnn1, logistic regression",
        (Column("ijcnn1-mclr", ENGINE, 0.001), Column("ijcnn1-mclr", ENGINE)),
        "FedNL has no α: at the left its step is undamped (η = 1).",
    ),
    "fig-nlp": Figure(
        "Shakespeare and Sentiment140",
        (
            Column("shakespeare-mclr", TEXT, 0.003),
            Column("shakespeare-mclr", TEXT),
            Column("sentiment140-mlp", TEXT, 0.03),
            Column("sentiment140-mlp", TEXT),
        ),
        "FedNL does not fit: with d = 211 315 and 67 746 its matrix at every client would have "
        "179 and 18 GB. `fedsso paper fig-fednl` shows it on a smaller network.",
    ),
}
