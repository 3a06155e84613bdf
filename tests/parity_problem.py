"""One federation for every engine: logistic regression at four clients of unequal size, full local
batches.

The model is a vector x [7]: the six weights of `nn.Linear(6, 1)`, then its bias. Everything follows
from a fixed seed, so that engines in different environments work on the same bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHA, TAU, ROUNDS = 0.1, 5, 8
ROWS = (40, 25, 80, 55)  # at clients 0 to 3
INPUTS = 6
# In float32 a client's model is rounded by 1e-7, hence its gradient (x - v)/(ALPHA TAU) by 2e-7.
# The flattest curvature
# is 0.029, so a step B^-1 g is off by 35 times that: 7e-6, which some ten rounds may add up.
SINGLE = 1e-4
Data = tuple[Tensor, Tensor]


@cache
def clients() -> list[Data]:
    """Rows x [n, 6] and targets y [n], 0.0 or 1.0, of each client; the clients' rows lie apart."""
    draw = np.random.default_rng(0)
    truth, spread = draw.normal(size=INPUTS), np.linspace(0.5, 2, INPUTS)
    pairs = []
    for rows in ROWS:
        x = draw.normal(0.5 * draw.normal(size=INPUTS), spread, (rows, INPUTS))
        y = draw.random(rows) < 1 / (1 + np.exp(-x @ truth - 0.5))
        pairs.append((torch.from_numpy(x).float(), torch.from_numpy(y).float()))
    return pairs


def weights() -> Tensor:
    """The clients' shares of all rows."""
    return torch.tensor(ROWS) / sum(ROWS)


def initial() -> Tensor:
    """The model that everybody starts from."""
    return torch.linspace(-0.5, 0.5, INPUTS + 1)


class Net(nn.Linear):
    """The model as a module that comes with its initial weights: some engines make it anew from its
    class."""

    def __init__(self) -> None:
        super().__init__(INPUTS, 1)
        nn.utils.vector_to_parameters(initial(), self.parameters())


def loss(x: Tensor, data: Data) -> Tensor:
    """The mean logistic loss of a model on one client's rows."""
    rows, y = data
    return F.binary_cross_entropy_with_logits(rows @ x[:-1] + x[-1], y)


def grad(x: Tensor, data: Data) -> Tensor:
    """The gradient of that loss."""
    rows, y = data
    slope = (torch.sigmoid(rows @ x[:-1] + x[-1]) - y) / len(y)
    return torch.cat([slope @ rows, slope.sum(0, keepdim=True)])


def local(x: Tensor, data: Data, alpha: float = ALPHA, tau: int = TAU) -> Tensor:
    """A FedAvg client with full batches: the model after tau gradient steps of size alpha."""
    for _ in range(tau):
        x = x - alpha * grad(x, data)
    return x


def global_loss(x: Tensor) -> float:
    """The loss on all clients' rows, in float64."""
    values = [loss(x.double(), (rows.double(), y.double())) for rows, y in clients()]
    return float(torch.stack(values) @ weights().double())


def simulate(rounds: int = ROUNDS) -> tuple[list[float], Tensor]:
    """The loss after each round, from that of the initial model on, and the last model: by fedsso's
    simulator."""
    import fedsso

    fed = fedsso.Federation.from_clients([(x, y.long()) for x, y in clients()], test_fraction=0)
    options = {
        "rounds": rounds,
        "local_steps": TAU,
        "batch_size": None,
        "eval_train": True,
        "device": "cpu",
    }
    record = fedsso.FedSSO(alpha=ALPHA, guard="cautious")  # the default of the frameworks
    run = fedsso.simulate(fed, Net(), record, loss="bce", **options)
    return run.trace["full_train_loss"].tolist(), run.x


def reference(rounds: int = ROUNDS) -> list[float]:
    """The losses of `simulate`."""
    return simulate(rounds)[0]
