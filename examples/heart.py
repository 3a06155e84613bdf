"""Four hospitals, one model of heart disease: FedSSO beside the pooled fit, and beside sending Hessians.

    fedsso data get heart && python examples/heart.py

Logistic regression on the UCI heart disease data: gaps filled with the training median, features standardised by the
training rows, every client a hospital that takes 5 full-batch steps of alpha = 0.03 in a round. The reference is the
unregularised fit of all training rows in one place.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

import fedsso

ROUNDS, SEEDS, GAP = 12, range(5), 0.005
NEWTON_ROUNDS = 5  # NVFlare's example, examples/advanced/lr-newton-raphson, by federated Newton-Raphson


def pooled_loss(fed: fedsso.Federation) -> float:
    """The least mean logistic loss of all training rows in one place, by Newton's method."""
    x, y = fed.x[fed.train_rows].double(), fed.y[fed.train_rows].double()
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    w = x.new_zeros(x.shape[1])
    for _ in range(30):
        s = torch.sigmoid(x @ w)
        w -= torch.linalg.solve((x * (s * (1 - s))[:, None]).mT @ x, x.mT @ (s - y))
    return float(torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y))


def rounds_to_the_pooled_fit(run: fedsso.Run, best: float) -> int | None:
    """The first round within GAP of the pooled fit's loss."""
    losses = np.array(run.trace["full_train_loss"])
    reached = np.flatnonzero(losses <= best + GAP)
    return int(reached[0]) if len(reached) else None


def bytes_of_newton(d: int, clients: int, rounds: int) -> int:
    """Numpy's float64: the model down, its gradient and its whole Hessian up."""
    return 8 * (d + d + d * d) * clients * rounds


def main() -> int:
    """Print one line for each seed, then the hospitals of the first one; 1 if a seed misses the pooled fit."""
    options = {"rounds": ROUNDS, "local_steps": 5, "batch_size": None, "loss": "bce", "eval_train": True}
    missed, first = 0, None
    for seed in SEEDS:
        fed = fedsso.load("heart", seed=seed)
        best = pooled_loss(fed)
        run, avg = (fedsso.simulate(fed, "mclr", a(alpha=0.03), **options) for a in (fedsso.FedSSO, fedsso.FedAvg))
        k = rounds_to_the_pooled_fit(run, best)
        missed += k is None
        sent = sum(run.trace["bytes_up"][: (k or ROUNDS) + 1]) + sum(run.trace["bytes_down"][: (k or ROUNDS) + 1])
        gaps = ", ".join(f"{r.spec.algorithm} {r.final('full_train_loss') - best:.4f}" for r in (run, avg))
        print(f"split {seed}: pooled loss {best:.4f}; within {GAP} in round {k}, {sent:.0f} bytes; end: {gaps} above")
        first = first or (fed, run)
    fed, run = first
    newton = bytes_of_newton(run.x.numel(), fed.clients, NEWTON_ROUNDS)
    print(f"\nNewton-Raphson with {NEWTON_ROUNDS} rounds sends {newton} bytes (float64), {newton // 2} in float32\n")
    print(run.clients().to_string(index=False, float_format=lambda v: f"{v:.3f}"))
    return math.ceil(missed / len(SEEDS))


if __name__ == "__main__":
    sys.exit(main())
