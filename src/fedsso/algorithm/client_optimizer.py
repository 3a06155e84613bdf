"""What clients step with: plain SGD, SGD with momentum, Adam or AdamW.

The algorithms of this package are written for clients that run plain SGD. The clients of a real
federation may run something else. With the run options `client` and `client_weight_decay` the
simulator's clients do the same, so that a federation can be rehearsed before it is deployed.

The formulas and constants are those of `torch.optim`:

    sgd        x <- x - alpha g
    momentum   b <- 0.9 b + g,  x <- x - alpha b
    adam       m <- 0.9 m + 0.1 g,  v <- 0.999 v + 0.001 g^2,  x <- x - alpha m' / (sqrt(v') + 1e-8)
               with m' = m / (1 - 0.9^j) and v' = v / (1 - 0.999^j) in local step j = 1, 2, ...
    adamw      as adam

`client_weight_decay` adds decay * x to the gradient; adamw instead shrinks x by
alpha * decay * x. What an optimizer remembers starts anew in every round, as it does where a
client builds its optimizer when it is asked to train.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("sgd", "momentum", "adam", "adamw")
MOMENTUM = 0.9
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8


class ClientOptimizer(NamedTuple):
    """Which optimizer clients use.

    >>> ClientOptimizer("adam").is_plain
    False
    """

    kind: str = "sgd"
    weight_decay: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether it is SGD without weight decay."""
        return self.kind == "sgd" and self.weight_decay == 0

    @property
    def is_adam(self) -> bool:
        """Whether steps are divided by the size of past gradients."""
        return self.kind in ("adam", "adamw")


PLAIN = ClientOptimizer()


class Memory:
    """What the optimizers of M clients remember during one round; overwritten in every step."""

    def __init__(self, optimizer: ClientOptimizer, like: Tensor) -> None:
        self.optimizer = optimizer
        if optimizer.kind != "sgd":
            self._first = torch.zeros_like(like)  # b or m
        if optimizer.is_adam:
            self._second = torch.zeros_like(like)  # v

    def direction(self, g: Tensor, x: Tensor, j: int) -> Tensor:
        """What alpha is multiplied with in local step j = 0, 1, ...

        g is the gradient at the models x, all [M, trials, d]. Neither is changed.
        """
        decay = self.optimizer.weight_decay
        decoupled = self.optimizer.kind == "adamw"
        if decay and not decoupled:
            g = torch.add(g, x, alpha=decay)
        step = self._step(g, j)
        if decay and decoupled:
            step = torch.add(step, x, alpha=decay)
        return step

    def _step(self, g: Tensor, j: int) -> Tensor:
        """The optimizer's own step, without the decay of AdamW."""
        if self.optimizer.kind == "sgd":
            return g
        if self.optimizer.kind == "momentum":
            return self._first.mul_(MOMENTUM).add_(g)
        self._first.mul_(BETA1).add_(g, alpha=1 - BETA1)
        self._second.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        mean = self._first / (1 - BETA1 ** (j + 1))
        square = self._second / (1 - BETA2 ** (j + 1))
        return mean / (square.sqrt() + EPS)
