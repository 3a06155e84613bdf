"""Four hospitals, one model of heart disease: FedSSO beside FedAvg, beside sending Hessians, beside
the pooled fit.

    fedsso data get heart && python examples/heart.py

Logistic regression on the UCI heart disease data: gaps filled with the training median, features
standardised by the training rows, every client a hospital that takes 5 full-batch steps in a round.
The reference is the unregularised fit of all training rows in one place; all methods are counted
until the training loss is within 0.005 of it.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import fedsso

ROUNDS, SPLITS, GAP = 12, range(5), 0.005
OPTIONS = {
    "rounds": ROUNDS,
    "local_steps": 5,
    "batch_size": None,
    "loss": "bce",
    "eval_train": True,
}
AVERAGING = (0.03, 0.1, 0.3, 1.0)  # steps that FedAvg tries


class Way(NamedTuple):
    """How a method comes near the pooled fit: the losses of its rounds, the first near one, its
    bytes until then."""

    losses: list[float]
    round: int | None
    sent: int

    def __str__(self) -> str:
        return (
            f"round {self.round}, {self.sent} bytes"
            if self.round is not None
            else f"not in {ROUNDS} rounds"
        )


def way(losses: list[float], best: float, bytes_of_a_round: int) -> Way:
    near = next((k for k, loss in enumerate(losses) if loss <= best + GAP), None)
    return Way(losses, near, bytes_of_a_round * (near or 0))


def newton(fed: fedsso.Federation, damping: float, rounds: int) -> list[float]:
    """Losses of damped Newton-Raphson on all training rows, which is what averaging gradients and
    Hessians gives."""
    x, y = fed.x[fed.train_rows].double(), fed.y[fed.train_rows].double()
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    w, losses = x.new_zeros(x.shape[1]), []
    for _ in range(rounds + 1):
        s: Tensor = torch.sigmoid(x @ w)
        losses.append(float(binary_cross_entropy_with_logits(x @ w, y)))
        w = w - damping * torch.linalg.solve((x * (s * (1 - s))[:, None]).mT @ x, x.mT @ (s - y))
    return losses


def simulated(
    fed: fedsso.Federation, algorithm: fedsso.FedSSO | fedsso.FedAvg, best: float
) -> tuple[fedsso.Run, Way]:
    run = fedsso.simulate(fed, "mclr", algorithm, **OPTIONS)
    sent = int(run.trace["bytes_up"][1] + run.trace["bytes_down"][1])
    return run, way(run.trace["full_train_loss"].tolist(), best, sent)


def main() -> int:
    """Print what each method needs on each split, then the hospitals of the first one; 1 if FedSSO
    misses one."""
    shown, missed = "", 0
    for seed in SPLITS:
        fed = fedsso.load("heart", seed=seed)
        best = newton(fed, 1.0, 30)[-1]
        run, sso = simulated(fed, fedsso.FedSSO(alpha=0.03), best)
        averages = {a: simulated(fed, fedsso.FedAvg(alpha=a), best)[1] for a in AVERAGING}
        alpha, avg = min(averages.items(), key=lambda found: found[1].losses[-1])
        d = (
            run.x.numel()
        )  # in float32, as the simulator counts: the model down, gradient and Hessian up
        second = way(newton(fed, 0.8, ROUNDS), best, 4 * (2 * d + d * d) * fed.clients)
        missed += sso.round is None
        print(
            f"split {seed}: pooled loss {best:.4f}; within {GAP}: FedSSO in {sso}; Newton-Raphson "
            f"in {second};"
        )
        print(f"         FedAvg with alpha 0.03: {averages[0.03]}, with its best, {alpha:g}: {avg}")
        shown = shown or run.clients().to_string(index=False, float_format=lambda v: f"{v:.3f}")
    print(f"\nFedSSO on split 0:\n{shown}")
    return int(missed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except fedsso.InputError as error:
        sys.exit(str(error))
