"""Your own network: any nn.Module goes where a model's name goes, any function where a metric's
name goes.

This network has BatchNorm. Its scale and shift are parameters, which the algorithms train. Its
running statistics are buffers: the server averages the clients' and never takes a step on them, so
that after 15 rounds of 5 local steps its counter says 75 batches under any algorithm. (On data this
easy FedAvg, with a larger step, needs fewer rounds.)

    python examples/own_model.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fedsso


def worst_digit(outputs: Tensor, labels: Tensor) -> float:
    """The accuracy on the digit known least, from the outputs [rows, classes] and labels [rows] of
    the test rows."""
    hit = (outputs.argmax(1) == labels).double()
    return min(float(hit[labels == digit].mean()) for digit in set(labels.tolist()))


def main() -> None:
    fed = fedsso.load("digits", clients=10, partition="dirichlet", concentration=0.3, seed=0)
    torch.manual_seed(0)  # training starts from the weights that the module comes with
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
    )
    algorithms = [fedsso.FedSSO(alpha=0.1), fedsso.FedAvg(alpha=1.0)]
    runs = fedsso.compare(
        fed, net, algorithms, rounds=15, batch_size=50, metrics=["accuracy", worst_digit]
    )
    print(runs.table([0.8, 0.9, 0.95]))
    for run in runs:
        batches = run.model.state_dict()["2.num_batches_tracked"]
        print(
            f"{run.label}: worst digit {run.final('test_worst_digit'):.3f}, {batches:.0f} batches"
        )


if __name__ == "__main__":
    main()
