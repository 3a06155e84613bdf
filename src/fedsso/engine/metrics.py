"""Metrics of outputs [trials, classes, rows] against targets [rows]: one number per trial.

Outputs are the model's raw ones (logits), classes before rows. A model with a single output
decides by its sign, as under the loss bce. Results are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import unknown

# metric(outputs [trials, classes, rows], targets [rows]) -> float64 [trials]
Metric = Callable[[Tensor, Tensor], Tensor]


def hits(z: Tensor, y: Tensor) -> Tensor:
    """Whether each row is classified rightly, [trials, rows].

    It is if the largest output is that of its label. A single output is right if it lies on the
    target's side of 0.
    """
    if z.shape[-2] == 1:
        return (z.squeeze(-2) > 0) == (y > 0.5)
    return z.argmax(-2) == y


def accuracy(z: Tensor, y: Tensor) -> Tensor:
    """The share of rows that are classified rightly, [trials] in 0 to 1.

    >>> z = torch.tensor([[[2.0, 0.0, 1.0], [1.0, 3.0, 0.0]]])  # one trial, two classes, three rows
    >>> accuracy(z, torch.tensor([0, 1, 0]))
    tensor([1.], dtype=torch.float64)
    """
    return hits(z, y).double().mean(-1)


def auc(z: Tensor, y: Tensor) -> Tensor:
    """The area under the ROC curve, [trials] in 0 to 1.

    With more than two classes it is the mean over the classes that occur, each against the rest.
    """
    if z.shape[-2] == 1:
        return _area(z[..., 0, :], y > 0.5)
    if z.shape[-2] == 2:
        return _area(z[..., 1, :] - z[..., 0, :], y == 1)
    logp = z.double().log_softmax(-2)  # the outputs themselves have no order between rows
    areas = []
    for c in range(z.shape[-2]):
        areas.append(_area(logp[..., c, :], y == c))
    return torch.stack(areas).nanmean(0)


def _area(score: Tensor, positive: Tensor) -> Tensor:
    """The area under the curve as a Mann-Whitney statistic; NaN if one side is empty.

    Args:
        score: Higher means more likely positive, [..., rows].
        positive: Which rows are, [rows] of booleans.

    Equal scores share the mean of their ranks. The area is the share of pairs (positive,
    negative) that the scores put in the right order.
    """
    ranks = []
    for row in score.reshape(-1, score.shape[-1]):
        _, place, count = torch.unique(row, return_inverse=True, return_counts=True)
        # Of `count` equal scores the last has rank cumsum, the first cumsum - count + 1: this is
        # the middle.
        middle = count.cumsum(0) - (count - 1) / 2.0
        ranks.append(middle.double()[place])
    rank = torch.stack(ranks)
    up = positive.double().sum()
    down = len(positive) - up
    wins = (rank * positive).sum(-1) - up * (up + 1) / 2
    area = wins / (up * down)
    return area.view(score.shape[:-1])


def f1(z: Tensor, y: Tensor) -> Tensor:
    """F1 of the positive class for two classes, otherwise the mean over the classes (macro).

    Per class it is 2 both / (guessed + true), counted in rows. A class that neither occurs nor is
    guessed scores 0.
    """
    if z.shape[-2] == 1:
        guess = (z.squeeze(-2) > 0).long()
        y = (y > 0.5).long()
    else:
        guess = z.argmax(-2)
    classes = [1] if z.shape[-2] <= 2 else range(z.shape[-2])
    scores = []
    for c in classes:
        guessed = guess == c
        true = y == c
        both = (guessed & true).double().sum(-1)
        either = guessed.double().sum(-1) + true.double().sum(-1)
        scores.append(torch.where(either > 0, 2 * both / either.clamp(min=1), 0.0))
    return torch.stack(scores).mean(0)


# What the option `metrics` may name.
METRICS: dict[str, Metric] = {"accuracy": accuracy, "auc": auc, "f1": f1}


def metric(wish: str | Callable[[Tensor, Tensor], float]) -> tuple[str, Metric]:
    """The name and the function of a metric.

    Args:
        wish: A name in METRICS, or a user's own function. That one takes outputs [rows, classes]
            and targets [rows] and returns a number; it is called once for each trial.

    Returns:
        The column's name, for a function its own, and a function of batched outputs.

    Raises:
        InputError: No metric has that name.
    """
    if isinstance(wish, str):
        if wish not in METRICS:
            raise unknown("metric", wish, METRICS)
        return wish, METRICS[wish]

    def each(z: Tensor, y: Tensor) -> Tensor:
        """The user's function for every trial on its own, put together as [trials]."""
        flat = z.reshape(-1, *z.shape[-2:])
        values = [float(wish(one.transpose(0, 1), y)) for one in flat]
        return torch.tensor(values, dtype=torch.float64, device=z.device).view(z.shape[:-2])

    return getattr(wish, "__name__", "metric"), each
