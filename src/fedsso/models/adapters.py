"""Low-rank adapters: a large model stays as it is, and a few small matrices are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022). The weight W of a
linear layer becomes W + B A; W is frozen, A and B are trained. Their factor alpha / r is left out:
it is a part of the client's step size.

    W   [outputs, inputs], frozen
    A   `down` [rank, inputs], drawn as torch draws a linear layer
    B   `up` [outputs, rank], zero, so that training begins at the model as it was given
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError, unknown

log = logging.getLogger("fedsso")


class Adapted(nn.Module):
    """A frozen linear layer and its adapter: W a + b + B (A a)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = base.weight
        self.base = base
        self.down = nn.Parameter(weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(weight.new_zeros(base.out_features, rank))
        bound = 1 / sqrt(base.in_features)
        nn.init.uniform_(self.down, -bound, bound)

    def forward(self, a: Tensor) -> Tensor:
        """Outputs for inputs [..., inputs]."""
        added = F.linear(F.linear(a, self.down), self.up)
        out: Tensor = self.base(a) + added
        return out

    def merged(self) -> nn.Linear:
        """One linear layer that computes the same, with the weight W + B A."""
        layer = copy.deepcopy(self.base)
        with torch.no_grad():
            layer.weight += self.up @ self.down
        return layer


def lora(
    model: nn.Module,
    rank: int = 8,
    *,
    layers: Sequence[str] | None = None,
    train: Sequence[str] = (),
    seed: int = 0,
) -> nn.Module:
    """A copy of a model of which only low-rank adapters of its linear layers are trained.

    All else is frozen: it is neither trained nor sent, and no part of a checkpoint. Which layers
    have an adapter, and how many parameters are trained, is told in the log. `run.model` has the
    adapters merged into the weights: it is a model of the class that was given.

    Args:
        model: Any module with linear layers, such as one that is trained already. It is left as
            it is.
        rank: Of the matrices that are added to the weights; in a layer with fewer inputs or
            outputs as many as there are.
        layers: Names of the layers that get an adapter, as `model.named_modules()` has them; left
            out: all that are exactly `nn.Linear`, but for those of `nn.TransformerEncoderLayer`,
            which reads their weights by itself.
        train: Names of modules or parameters that are trained as a whole, such as the last layer.
        seed: Of the adapters' first numbers.

    Returns:
        The model with its adapters, to be passed to `fedsso.simulate`. Parameters that you freeze
        yourself, by `requires_grad_(False)`, are treated alike without this function.

    Raises:
        InputError: A name is unknown, no layer can have an adapter, or the rank is not positive.

    >>> import fedsso
    >>> from fedsso.models import build
    >>> adapted = fedsso.lora(build("mlp", (64,), 10), rank=2)
    >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
    ['1.down', '1.up', '3.down', '3.up']
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise InputError(f"rank must be a whole number >= 1, got {rank!r}")
    adapted = copy.deepcopy(model).requires_grad_(False)
    for name in train:
        _thaw(adapted, name)
    chosen = _chosen(adapted, layers, train)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = _each(adapted, chosen, partial(_with_adapter, rank))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    held = sum(p.numel() for p in model.parameters())
    names = ", ".join(name or "the model itself" for name in chosen)
    log.info("adapters of rank %d: %d parameters beside %d, in %s", rank, trained, held, names)
    return adapted


def merged(model: nn.Module) -> nn.Module:
    """The model with every adapter added to the weight that it belongs to, in place.

    A model without adapters stays as it is.
    """
    everything = model.named_modules(remove_duplicate=False)
    adapters = [name for name, layer in everything if isinstance(layer, Adapted)]
    return _each(model, adapters, Adapted.merged)


def _with_adapter(
    rank: int,
    layer: nn.Linear,
) -> Adapted:
    """A linear layer with an adapter, whose rank is at most its inputs and outputs."""
    return Adapted(layer, min(rank, layer.in_features, layer.out_features))


def _thaw(
    model: nn.Module,
    name: str,
) -> None:
    """Let a module or a parameter of this name be trained."""
    modules = dict(model.named_modules())
    params = dict(model.named_parameters())
    if name in modules:
        modules[name].requires_grad_()
    elif name in params:
        params[name].requires_grad_()
    else:
        raise unknown("module or parameter", name, [*modules, *params])


def _chosen(
    model: nn.Module,
    layers: Sequence[str] | None,
    train: Sequence[str],
) -> list[str]:
    """The names of the layers that get an adapter, in the order of the model."""
    able = [name for name in _linear(model) if not _is_within(name, train)]
    for name in layers or ():
        if name not in able:
            raise unknown("linear layer that can have an adapter", name, able)
    chosen = able if layers is None else [name for name in able if name in layers]
    if not chosen:
        raise InputError(
            "the model has no linear layer that can have an adapter: freeze parameters by "
            "requires_grad_(False) instead, or name other layers"
        )
    return chosen


def _linear(model: nn.Module) -> list[str]:
    """The names of all layers that can have an adapter.

    A subclass of `nn.Linear`, such as the last layer of `nn.MultiheadAttention`, may do anything
    with its weight. So does torch's encoder layer with those of its two linear layers.
    """
    found = []
    for name, layer in model.named_modules(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        if type(layer) is nn.Linear and not isinstance(owner, nn.TransformerEncoderLayer):
            found.append(name)
    return found


def _is_within(
    name: str,
    modules: Sequence[str],
) -> bool:
    """Whether a layer is one of these modules, or a part of one."""
    return any(name == one or name.startswith(f"{one}.") for one in modules)


def _each(
    model: nn.Module,
    names: Sequence[str],
    make: Callable[[Any], nn.Module],
) -> nn.Module:
    """The model with the layers of these names replaced, in place where it is not one itself.

    A layer that has several names is made once, so that it is still shared.
    """
    made: dict[int, nn.Module] = {}
    for name in names:
        layer = model.get_submodule(name)
        if id(layer) not in made:
            made[id(layer)] = make(layer)
        if not name:
            return made[id(layer)]
        model.set_submodule(name, made[id(layer)])
    return model
