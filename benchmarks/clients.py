"""Clients that are not plain SGD: FedSSO as Flower's users get it beside FedAvg.

    python -m benchmarks.clients --device cuda          # some four minutes on one H200
    python -m benchmarks.clients --tasks fashion --clients sgd --rates 0.1 --seeds 0

The networks are those of two examples of Flower, the rows those of CIFAR-10 and Fashion-MNIST. Each
client passes once over its rows in a round, in batches of 32. FedSSO has its cautious guard, which
knows nothing about the clients. The table gives the accuracy at the end (mean of the last three of
25 rounds, over the seeds, ± their standard deviation), and the rounds until FedAvg's is reached.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedsso
from fedsso.algorithm import Algorithm

ROUNDS = 25
LAST = 3  # evaluations that make the accuracy at the end
PARTITION = 42  # seed of the partition, the same for all runs
RATES = {
    "sgd": (0.033, 0.1, 0.3),
    "momentum": (0.0033, 0.01, 0.033, 0.1),
    "adam": (0.0003, 0.001, 0.003),
}


@dataclass(frozen=True)
class Task:
    """Rows, and how they are dealt to clients."""

    data: str
    rows: int
    clients: int
    concentration: float


TASKS = {
    "cifar": Task("cifar10", 15_000, 10, 0.5),
    "fashion": Task("fashion_mnist", 12_000, 20, 1.0),
}


def quickstart() -> nn.Module:
    """The network of Flower's example quickstart-pytorch."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def advanced() -> nn.Module:
    """A network like that of Flower's example advanced-pytorch."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


NETWORKS = {"cifar": quickstart, "fashion": advanced}


def federation(task: Task) -> fedsso.Federation:
    """The task's first rows, with pixels in [-1, 1], dealt by class with a Dirichlet draw."""
    pool = fedsso.load(task.data, clients=1, partition="iid")
    images = pool.x[: task.rows]
    labels = pool.y[: task.rows].numpy()
    owner = np.zeros(task.rows, int)
    draw = np.random.default_rng(PARTITION)
    for label in range(10):
        rows = draw.permutation(np.flatnonzero(labels == label))
        shares = draw.dirichlet([task.concentration] * task.clients)
        ends = (np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for client, part in enumerate(np.split(rows, ends)):
            owner[part] = client
    scaled: Tensor = images.float() / 127.5 - 1
    return fedsso.Federation.from_arrays(scaled, labels, owner, test_fraction=0.2)


@dataclass(frozen=True)
class Row:
    """One kind of clients: accuracies [seeds] at the end, rounds [seeds] to FedAvg's."""

    task: str
    client: str
    rate: float
    fedavg: list[float]
    fedsso: list[float]
    fedavg_rounds: list[int | None]
    fedsso_rounds: list[int | None]


def first(curve: NDArray[np.float64], target: float) -> int | None:
    """The first round that reaches a target, if one does."""
    reached = np.flatnonzero(curve >= target)
    return int(reached[0]) if len(reached) else None


def measure(
    name: str,
    client: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    device: str,
) -> Iterator[Row]:
    """The rows of one task and one optimizer; all rates of a seed run in one batch."""
    fed = federation(TASKS[name])
    curves: dict[float, list[list[NDArray[np.float64]]]] = {rate: [] for rate in rates}
    for seed in seeds:
        torch.manual_seed(seed)
        model = NETWORKS[name]()
        records: list[Algorithm] = []
        for rate in rates:
            records.append(fedsso.FedAvg(alpha=rate))
            records.append(fedsso.FedSSO(alpha=rate, guard="cautious"))
        runs = fedsso.compare(
            fed,
            model,
            records,
            rounds=ROUNDS,
            local_epochs=1,
            batch_size=32,
            client=client,
            seed=seed,
            device=device,
        )
        found = [np.asarray(run.trace["test_accuracy"]) for run in runs]
        for i, rate in enumerate(rates):
            curves[rate].append(found[2 * i : 2 * i + 2])
    for rate in rates:
        averaged = [pair[0] for pair in curves[rate]]
        ours = [pair[1] for pair in curves[rate]]
        goals = [float(curve[-LAST:].mean()) for curve in averaged]
        yield Row(
            task=name,
            client=client,
            rate=rate,
            fedavg=goals,
            fedsso=[float(curve[-LAST:].mean()) for curve in ours],
            fedavg_rounds=[first(c, goal) for c, goal in zip(averaged, goals, strict=True)],
            fedsso_rounds=[first(c, goal) for c, goal in zip(ours, goals, strict=True)],
        )


def line(row: Row) -> str:
    """A row of the table, in Markdown."""
    accuracies = [f"{np.mean(each):.3f} ± {np.std(each):.3f}" for each in (row.fedavg, row.fedsso)]
    rounds = []
    for each in (row.fedavg_rounds, row.fedsso_rounds):
        rounds.append(", ".join("never" if k is None else str(k) for k in each))
    cells = [row.task, row.client, f"{row.rate:g}", *accuracies, *rounds]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--clients", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates of the clients")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    given = parser.parse_args()
    rows: list[Row] = []
    print("| task | clients | rate | FedAvg | FedSSO | rounds: FedAvg | FedSSO |")
    print("|---|---|---|---|---|---|---|")
    for name in given.tasks:
        for client in given.clients:
            rates = given.rates or RATES[client]
            for row in measure(name, client, rates, given.seeds, given.device):
                rows.append(row)
                print(line(row), flush=True)
    if given.out:
        given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
