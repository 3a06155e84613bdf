"""Metrics of outputs [trials, classes, rows] against targets [rows]: one number per trial."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import unknown

Metric = Callable[[Tensor, Tensor], Tensor]


def hits(z: Tensor, y: Tensor) -> Tensor:
    """Whether the largest output is the label's; with one output, whether it lies on the target's
    side of 0."""
    if z.shape[-2] == 1:
        return (z.squeeze(-2) > 0) == (y > 0.5)
    return z.argmax(-2) == y


def accuracy(z: Tensor, y: Tensor) -> Tensor:
    """Share of rows that are right."""
    return hits(z, y).double().mean(-1)


def auc(z: Tensor, y: Tensor) -> Tensor:
    """Area under the ROC curve; with more than two classes the mean over classes that occur, each
    against the rest."""
    if z.shape[-2] == 1:
        return _area(z[..., 0, :], y > 0.5)
    if z.shape[-2] == 2:
        return _area(z[..., 1, :] - z[..., 0, :], y == 1)
    logp = z.double().log_softmax(-2)  # the outputs themselves have no order between rows
    areas = torch.stack([_area(logp[..., c, :], y == c) for c in range(z.shape[-2])])
    return areas.nanmean(0)


def _area(score: Tensor, positive: Tensor) -> Tensor:
    """Mann-Whitney statistic with mid-ranks for ties; NaN if one side is empty."""
    ranks = []
    for row in score.reshape(-1, score.shape[-1]):
        _, place, count = torch.unique(row, return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2.0).double()[place])
    rank = torch.stack(ranks)
    up = positive.double().sum()
    down = len(positive) - up
    area = ((rank * positive).sum(-1) - up * (up + 1) / 2) / (up * down)
    return area.view(score.shape[:-1])


def f1(z: Tensor, y: Tensor) -> Tensor:
    """F1 of the positive class for two classes, otherwise the mean over the classes (macro)."""
    guess = (z.squeeze(-2) > 0).long() if z.shape[-2] == 1 else z.argmax(-2)
    y = (y > 0.5).long() if z.shape[-2] == 1 else y
    classes = [1] if z.shape[-2] <= 2 else range(z.shape[-2])
    scores = []
    for c in classes:
        both = ((guess == c) & (y == c)).double().sum(-1)
        either = (guess == c).double().sum(-1) + (y == c).double().sum(-1)
        scores.append(torch.where(either > 0, 2 * both / either.clamp(min=1), 0.0))
    return torch.stack(scores).mean(0)


METRICS: dict[str, Metric] = {"accuracy": accuracy, "auc": auc, "f1": f1}


def metric(wish: str | Callable[[Tensor, Tensor], float]) -> tuple[str, Metric]:
    """A metric by name, or from a user's function of outputs [rows, classes] and targets [rows]."""
    if isinstance(wish, str):
        if wish not in METRICS:
            raise unknown("metric", wish, METRICS)
        return wish, METRICS[wish]

    def each(z: Tensor, y: Tensor) -> Tensor:
        flat = z.reshape(-1, *z.shape[-2:])
        values = [float(wish(one.transpose(0, 1), y)) for one in flat]
        return torch.tensor(values, dtype=torch.float64, device=z.device).view(z.shape[:-2])

    return getattr(wish, "__name__", "metric"), each
