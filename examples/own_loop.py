"""A loop of your own with plain FedAvg clients, where the server's optimizer decides what becomes
of their mean.

It sees the mean of x - v, what the clients' work took off the model, as a gradient: SGD with lr=1
makes that plain averaging, ServerBFGS makes it FedSSO. FedSSO hardly depends on the client step;
tuned to it, FedAvg is first here.

    python examples/own_loop.py
"""

from __future__ import annotations

from copy import deepcopy

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as logistic

from fedsso.optim import ServerBFGS

ROWS, STEPS, TARGET = (200, 150, 120, 99), 5, 0.065


def clients() -> list[tuple[Tensor, Tensor]]:
    """Four clinics of unequal size: the first sees the smallest tumours, the last the largest."""
    x, y = (torch.tensor(part).float() for part in load_breast_cancer(return_X_y=True))
    order = x[:, 0].argsort()
    x = (x - x.mean(0)) / x.std(0)
    return list(zip(x[order].split(ROWS), y[order].split(ROWS), strict=True))


def train(model: nn.Module, x: Tensor, y: Tensor, local_lr: float) -> nn.Module:
    own = deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), local_lr)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logistic(own(x)[:, 0], y).backward()
        optimizer.step()
    return own


def rounds(name: str, data: list[tuple[Tensor, Tensor]], local_lr: float) -> int:
    """Rounds until the loss on all rows is at most TARGET."""
    model, p = nn.Linear(30, 1), [n / sum(ROWS) for n in ROWS]
    nn.utils.vector_to_parameters(torch.zeros(31), model.parameters())
    fedsso, fedavg = (
        ServerBFGS(model.parameters(), local_lr, STEPS),
        torch.optim.SGD(model.parameters(), lr=1.0),
    )
    server = fedsso if name == "fedsso" else fedavg
    for k in range(500):
        if (
            sum(w * logistic(model(x)[:, 0], y).item() for w, (x, y) in zip(p, data, strict=True))
            <= TARGET
        ):
            return k
        back = [train(model, x, y, local_lr).parameters() for x, y in data]
        for parameter, *v in zip(model.parameters(), *back, strict=True):
            parameter.grad = sum(
                w * (parameter - own).detach() for w, own in zip(p, v, strict=True)
            )
        server.step()
    return 500


if __name__ == "__main__":
    for local_lr in (0.1, 1.0, 3.0):
        found = ", ".join(
            f"{name} {rounds(name, clients(), local_lr)}" for name in ("fedsso", "fedavg")
        )
        print(f"client step {local_lr}, rounds to a loss of {TARGET}: {found}")
