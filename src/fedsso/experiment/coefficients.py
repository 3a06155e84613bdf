"""The coefficients of a trained linear model, by the names and in the units of the table.

A model that is trained on a standardised table has weights for standardised columns. With
z = (x - mean) * factor, w z + b is (w * factor) x + (b - sum of w * factor * mean): slopes in the
table's own units, and another intercept.

Softmax regression has weights for every class, of which only differences matter. The first class is
the reference: the coefficients of another class are those of its log-odds against the first. For
two classes these are the coefficients of a logistic regression.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from ..data import Federation

INTERCEPT = "(intercept)"


def coefficients(model: nn.Module, fed: Federation) -> pd.DataFrame:
    """A table of the coefficients of a linear model that was trained on a federation.

    Returns:
        A row for each class but the first, and for each term: class, term, unit, estimate. Real
        targets, and models with one output, have no column "class".

    Raises:
        InputError: The model is not linear.
    """
    import pandas as pd

    layer = _linear_layer(model)
    held = layer.state_dict()
    weight = held["weight"].double()
    none = torch.zeros(len(weight))
    bias = held.get("bias", none).double()
    weight, bias = _original_units(weight, bias, fed)
    names = _names(fed)
    units = _units(fed, len(names))
    classes = [""]
    if len(weight) > 1:
        weight = weight[1:] - weight[0]
        bias = bias[1:] - bias[0]
        classes = list(fed.labels[1:])
    has_intercept = "bias" in held or bool(bias.any())
    rows: list[dict[str, Any]] = []
    for label, slopes, intercept in zip(classes, weight, bias, strict=True):
        own = {"class": label} if label else {}
        if has_intercept:
            rows.append({**own, "term": INTERCEPT, "unit": "", "estimate": float(intercept)})
        for name, unit, slope in zip(names, units, slopes.tolist(), strict=True):
            rows.append({**own, "term": name, "unit": unit, "estimate": slope})
    return pd.DataFrame(rows)


def _linear_layer(model: nn.Module) -> nn.Linear:
    """The one linear layer of a model that has nothing else. InputError for other models."""
    parts = list(model) if isinstance(model, nn.Sequential) else [model]
    layers = [part for part in parts if not isinstance(part, nn.Flatten)]
    if len(layers) == 1 and isinstance(layers[0], nn.Linear):
        return layers[0]
    raise InputError(
        "only a linear model has coefficients: train 'linear' or 'mclr', or a module that is one "
        "nn.Linear"
    )


def _original_units(weight: Tensor, bias: Tensor, fed: Federation) -> tuple[Tensor, Tensor]:
    """Weights [outputs, columns] and biases [outputs] for rows as the table has them.

    What the model saw is (x - mean) * factor of a standardised table, and x * a + b of images.
    """
    factor, shift = fed.affine
    bias = bias + shift * weight.sum(1)
    weight = factor * weight
    if fed.scaling is None:
        return weight, bias
    weight = weight * fed.scaling.factor
    bias = bias - weight @ fed.scaling.mean
    return weight, bias


def _names(fed: Federation) -> list[str]:
    """The names of the columns, or their numbers from 0 on where they have none."""
    if fed.scaling is not None and fed.scaling.columns:
        return list(fed.scaling.columns)
    return [f"x{place}" for place in range(prod(fed.sample_shape))]


def _units(fed: Federation, count: int) -> tuple[str, ...]:
    """The units of the columns, empty where none are known."""
    if fed.scaling is not None and fed.scaling.units:
        return fed.scaling.units
    return ("",) * count
