"""The back end for linear layers with activations between them: gradient, Hessian and its products
by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..algorithm import Batch
from .backend import Backend, by_trial
from .losses import RowLoss, bend, slope

Elementwise = Callable[[Tensor], Tensor]
Affine = list[tuple[Tensor, Tensor | None]]  # weight and bias of each linear layer


class Dense(Backend):
    """Linear layers with element-wise activations between them; one matrix product per layer for
    all trials."""

    # a(z); its slope a' and the derivative of a' in a, both as functions of a
    ACTIVATIONS: ClassVar[dict[type[nn.Module], tuple[Elementwise, Elementwise, Elementwise]]] = {
        nn.ReLU: (torch.relu, lambda a: (a > 0).to(a.dtype), torch.zeros_like),
        nn.Tanh: (torch.tanh, lambda a: 1 - a * a, lambda a: -2 * a),
        nn.Sigmoid: (torch.sigmoid, lambda a: a * (1 - a), lambda a: 1 - 2 * a),
    }

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.layers = [
            m for m in sequence(self.module) if not isinstance(m, (nn.Flatten, nn.Identity))
        ]
        self._kept: dict[str, Tensor] = {}

    @classmethod
    def fits(cls, module: nn.Module, sample: Sequence[int]) -> bool:
        """Whether the module is [Flatten,] Linear, (activation, Linear)*, all distinct and
        trainable."""
        chain = [m for m in sequence(module) if type(m) is not nn.Identity]
        flat = len(sample) == 1
        if chain and type(chain[0]) is nn.Flatten:
            flat, chain = True, chain[1:]
        odd = len(chain) % 2 == 1 and len(set(map(id, chain))) == len(chain)
        linear = all(type(m) is nn.Linear for m in chain[::2])
        between = all(type(m) in cls.ACTIVATIONS for m in chain[1::2])
        return flat and odd and linear and between and is_plain(module)

    def _weights(self, x: Tensor) -> Affine:
        params = list(self.layout.unravel(x).values())
        out: Affine = []
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                weight = params.pop(0)
                out.append((weight, params.pop(0) if layer.bias is not None else None))
        return out

    def _forward(self, x: Tensor, rows: Tensor) -> tuple[list[Tensor], Affine]:
        """Inputs of each linear layer and the outputs last; the first input [M, F, B] is shared by
        the trials."""
        weights = self._weights(x)
        trace = [rows.flatten(2).transpose(1, 2)]
        todo = iter(weights)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                weight, bias = next(todo)
                trace.append(self._affine(weight, bias, trace[-1]))
            else:
                trace[-1] = self.ACTIVATIONS[type(layer)][0](trace[-1])
        return trace, weights

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs of the last layer."""
        return self._forward(x, rows)[0][-1]

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """The same: nothing here depends on the mode."""
        return self.predict(x, batch.x)

    def _value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Back-propagation by hand, [M, trials] at once."""
        trace, weights = self._forward(x, batch.x)
        z = trace.pop()
        rows, e = slope(self.loss, z, by_trial(batch.y, z.shape[1]))
        weight = batch.weight[:, None, None, :]
        e = e.mul_(weight)
        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        slots = self._weights(grad)
        for n in reversed(range(len(weights))):
            a = trace[n]
            self._outer(e, a, slots[n])
            if n:
                e = weights[n][0].transpose(-2, -1) @ e
                e = e * self._before(n)[1](a)
        return (rows * weight.squeeze(2)).sum(-1), grad

    def _before(self, n: int) -> tuple[Elementwise, Elementwise, Elementwise]:
        """The activation whose outputs are the inputs of linear layer n >= 1."""
        return self.ACTIVATIONS[type(self.layers[2 * n - 1])]

    def _hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Both passes and, beside them, their derivatives along v (the R-operator): De is that of
        e."""
        trace, weights = self._forward(x, batch.x)
        along = self._weights(v)
        pushed = self._pushed(trace, weights, along)
        z, y, weight = trace.pop(), by_trial(batch.y, x.shape[1]), batch.weight[:, None, None, :]
        De = bend(self.loss, z, y, pushed.pop()) * weight
        e = slope(self.loss, z, y)[1] * weight if len(weights) > 1 else De  # one layer needs no e
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        slots = self._weights(out)
        for n in reversed(range(len(weights))):
            a = trace[n]
            self._outer(De, a, slots[n])
            if n:
                _, slopes, bends = self._before(n)
                slots[n][0].add_(e @ pushed[n - 1].mT)
                De = along[n][0].mT @ e + weights[n][0].mT @ De
                e = weights[n][0].mT @ e
                De = De * slopes(a) + e * bends(a) * pushed[n - 1]
                e = e * slopes(a)
        return out

    def _pushed(self, trace: list[Tensor], weights: Affine, along: Affine) -> list[Tensor]:
        """Derivatives along v of the trace after the first input, which has none."""
        out = [self._affine(*along[0], trace[0])]
        for n in range(1, len(weights)):
            out[-1] = self._before(n)[1](trace[n]) * out[-1]
            out.append(self._affine(*along[n], trace[n]).add_(weights[n][0] @ out[-1]))
        return out

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """In closed form for one layer, else column by column."""
        if len(self.layers) > 1:
            return super()._hessian(x, batch)
        (a, z), ((_, bias),) = self._forward(x, batch.x)
        y, weight = by_trial(batch.y, z.shape[1]), batch.weight[:, None, None, :]
        unit = torch.eye(z.shape[2], dtype=z.dtype, device=z.device).unsqueeze(-1)
        return of_linear(
            a,
            lambda o: bend(self.loss, z, y, unit[o].expand_as(z)) * weight,
            z.shape[2],
            bias is not None,
        )

    def _affine(self, weight: Tensor, bias: Tensor | None, a: Tensor) -> Tensor:
        """W a + b for weights [M, T, O, I] and rows [M, I, B] shared by the trials (first layer),
        or [M, T, I, B]."""
        if a.dim() == 4:
            z = weight @ a
        else:
            M, T, O, I = weight.shape
            whole = self._buffer("weights", weight, M, T * O, I)
            whole.view(weight.shape).copy_(weight)
            z = torch.bmm(whole, a).view(M, T, O, a.shape[-1])
        return z if bias is None else z.add_(bias.unsqueeze(-1))

    def _outer(self, e: Tensor, a: Tensor, slot: tuple[Tensor, Tensor | None]) -> None:
        """Write the gradients e a^T of the weights [M, T, O, I] and sum e of the bias into the flat
        gradient."""
        into, bias = slot
        if bias is not None:
            torch.sum(e, -1, out=bias)
        if a.dim() == 4:
            torch.matmul(e, a.transpose(-2, -1), out=into)
            return
        M, T, O, B = e.shape
        product = self._buffer("gradient", e, M, T * O, a.shape[1])
        torch.bmm(e.view(M, T * O, B), a.transpose(1, 2), out=product)
        into.copy_(product.view(into.shape))

    def _buffer(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """A matrix in one piece, kept between steps: products with the strided flat vector are a
        fifth slower."""
        size, kept = prod(shape), self._kept.get(name)
        if kept is None or len(kept) < size or kept.dtype != like.dtype:
            kept = self._kept[name] = like.new_empty(size)
        return kept[:size].view(shape)


def is_plain(module: nn.Module) -> bool:
    """Whether every parameter is trainable and used once, and no hook changes what a module
    computes."""
    every = [p for _, p in module.named_parameters(remove_duplicate=False)]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(m, name) for m in module.modules() for name in hooks)
    return (
        not hooked
        and len(set(map(id, every))) == len(every)
        and all(p.requires_grad for p in every)
    )


def sequence(module: nn.Module) -> list[nn.Module]:
    """The modules of a plain chain; a subclass of Sequential may do anything in its forward."""
    if type(module) is nn.Sequential:
        return [inner for child in module for inner in sequence(child)]
    return [module]


def of_linear(a: Tensor, bend: Callable[[int], Tensor], outputs: int, bias: bool) -> Tensor:
    """Hessian [M, T, d, d] in the weights [outputs, I] and then the bias of z = W a + b, for inputs
    a [M, I, B].

    It is the sum over rows of S (x) a a^T, where S is the loss's second derivative in z. bend(o)
    gives column o of every S, weighted, as [M, T, outputs, B]. Only pairs of outputs o <= q are
    computed.
    """
    M, I, B = a.shape
    parts = [I, 1] if bias else [I]
    n = sum(parts)
    a = torch.cat([a, a.new_ones(M, n - I, B)], 1)  # the bias is the weight of a constant input
    H = a.new_empty(0)
    for o in range(outputs):
        S = bend(o)[:, :, o:, None] / 2
        T, Q = S.shape[1:3]
        G = torch.bmm((S * a[:, None, None]).reshape(M, T * Q * n, B), a.mT).view(M, T, Q, n, n)
        H = H if o else a.new_empty(M, T, outputs * n, outputs * n)
        _place(H, G + G.mT, o, parts)  # symmetric to the bit
    return H


def _place(H: Tensor, G: Tensor, o: int, parts: list[int]) -> None:
    """Write the blocks G [M, T, Q, n, n] of output o with itself and the Q - 1 after it, and their
    mirror images."""
    outputs = o + G.shape[2]
    sizes = [outputs * i for i in parts]
    for half, rows in zip(torch.split(H, sizes, -2), torch.split(G, parts, -2), strict=True):
        for quarter, block in zip(
            torch.split(half, sizes, -1), torch.split(rows, parts, -1), strict=True
        ):
            i, j = block.shape[-2:]
            view = quarter.view(*H.shape[:2], outputs, i, outputs, j)
            view[:, :, o, :, o:] = block.transpose(2, 3)
            view[:, :, o:, :, o] = block
