"""The clients' objective f_i(x): value, gradient and outputs at flat vectors, for many clients and trials at once.

The iterate is one flat vector x, as papers write it; this module ravels at the border. Three back ends compute the
same function, and `objective()` picks one:

    Dense     linear layers with activations between them (mclr, mlp): a hand-written batched gradient
    Vmapped   any module that torch.func can batch (convolutions on a GPU)
    Looped    any module at all, one client and one trial at a time (BatchNorm, LSTM, dropout, convolutions on a CPU)

Outputs are laid out [clients, trials, classes, rows]: the softmax then runs over contiguous rows, which is several
times faster on a CPU than classes last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .algorithm import Batch
from .errors import InputError, unknown
from .losses import RowLoss, slope

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each parameter of a module lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Layout of the trainable parameters; a frozen one stays as it is in the module."""
        params = [(n, p.shape) for n, p in module.named_parameters() if p.requires_grad]
        if not params:
            raise InputError("the model has no trainable parameters")
        return cls(tuple(n for n, _ in params), tuple(s for _, s in params))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter."""
        return [s.numel() for s in self.shapes]

    def unravel(self, x: Tensor) -> dict[str, Tensor]:
        """Views of x [..., d] by parameter name, [..., *shape]."""
        parts = x.split_with_sizes(self.sizes, -1)
        return {n: p.view(*x.shape[:-1], *s) for n, s, p in zip(self.names, self.shapes, parts, strict=True)}


def ravel(module: nn.Module) -> Tensor:
    """The trainable parameters as one flat vector (a copy)."""
    return torch.cat([module.get_parameter(n).detach().reshape(-1) for n in Layout.of(module).names])


def unravel_into(module: nn.Module, x: Tensor) -> None:
    """Write a flat vector into a module's trainable parameters."""
    with torch.no_grad():
        for name, value in Layout.of(module).unravel(x).items():
            module.get_parameter(name).copy_(value)


def buffers_of(module: nn.Module) -> Tensor:
    """The buffers (BatchNorm statistics) as one flat vector; integers are held as floats."""
    parts = [b.detach().reshape(-1).double() for b in module.buffers()]
    return torch.cat(parts) if parts else torch.zeros(0)


def buffers_into(module: nn.Module, flat: Tensor) -> None:
    """Write a flat vector into a module's buffers, rounding where they are integers."""
    start = 0
    for b in module.buffers():
        part = flat[start : start + b.numel()].reshape(b.shape)
        b.copy_(part if b.is_floating_point() else part.round())
        start += b.numel()


class Backend:
    """A module's loss at flat points x [M, trials, d]. `buffers` [M, trials, b] belong to the engine."""

    stacks = True

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        self.module = copy.deepcopy(module)
        self.layout = Layout.of(self.module)
        self.loss = loss
        self.buffers = torch.zeros(0)

    def value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weighted mean loss [M, trials] and its gradient [M, trials, d]."""
        raise NotImplementedError

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [M, trials, classes, rows] for rows [M, B, *sample]."""
        raise NotImplementedError


class Dense(Backend):
    """Linear layers with element-wise activations between them; one matrix product per layer for all trials."""

    ACTIVATIONS: ClassVar[dict[type[nn.Module], tuple[Elementwise, Elementwise]]] = {
        nn.ReLU: (torch.relu, lambda a: (a > 0).to(a.dtype)),
        nn.Tanh: (torch.tanh, lambda a: 1 - a * a),
        nn.Sigmoid: (torch.sigmoid, lambda a: a * (1 - a)),
    }

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.layers = [m for m in _sequence(self.module) if not isinstance(m, (nn.Flatten, nn.Identity))]
        self._kept: dict[str, Tensor] = {}

    @classmethod
    def fits(cls, module: nn.Module, sample: Sequence[int]) -> bool:
        """Whether the module is [Flatten,] Linear, (activation, Linear)*, all distinct and trainable."""
        chain = [m for m in _sequence(module) if type(m) is not nn.Identity]
        flat = len(sample) == 1
        if chain and type(chain[0]) is nn.Flatten:
            flat, chain = True, chain[1:]
        odd = len(chain) % 2 == 1 and len(set(map(id, chain))) == len(chain)
        linear = all(type(m) is nn.Linear for m in chain[::2])
        between = all(type(m) in cls.ACTIVATIONS for m in chain[1::2])
        return flat and odd and linear and between and _plain(module)

    def _weights(self, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        params = list(self.layout.unravel(x).values())
        out: list[tuple[Tensor, Tensor | None]] = []
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                weight = params.pop(0)
                out.append((weight, params.pop(0) if layer.bias is not None else None))
        return out

    def _forward(self, x: Tensor, rows: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor | None]]]:
        """Inputs of each linear layer and the outputs last; the first input [M, F, B] is shared by the trials."""
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

    def value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Back-propagation by hand, [M, trials] at once."""
        trace, weights = self._forward(x, batch.x)
        z = trace.pop()
        rows, e = slope(self.loss, z, batch.y.unsqueeze(1).expand(z.shape[0], z.shape[1], z.shape[3]))
        weight = batch.weight[:, None, None, :]
        e = e.mul_(weight)
        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        slots = self._weights(grad)
        for n in reversed(range(len(weights))):
            a, into = trace[n], slots[n]
            self._outer(e, a, into[0])
            if into[1] is not None:
                torch.sum(e, -1, out=into[1])
            if n:
                e = weights[n][0].transpose(-2, -1) @ e
                e = e * self.ACTIVATIONS[type(self.layers[2 * n - 1])][1](a)
        return (rows * weight.squeeze(2)).sum(-1), grad

    def _affine(self, weight: Tensor, bias: Tensor | None, a: Tensor) -> Tensor:
        """W a + b for weights [M, T, O, I] and rows [M, I, B] shared by the trials (first layer), or [M, T, I, B]."""
        if a.dim() == 4:
            z = weight @ a
        else:
            M, T, O, I = weight.shape
            whole = self._buffer("weights", weight, M, T * O, I)
            whole.view(weight.shape).copy_(weight)
            z = torch.bmm(whole, a).view(M, T, O, a.shape[-1])
        return z if bias is None else z.add_(bias.unsqueeze(-1))

    def _outer(self, e: Tensor, a: Tensor, into: Tensor) -> None:
        """Write the gradient e a^T of the weights into its place [M, T, O, I] in the flat gradient."""
        if a.dim() == 4:
            torch.matmul(e, a.transpose(-2, -1), out=into)
            return
        M, T, O, B = e.shape
        product = self._buffer("gradient", e, M, T * O, a.shape[1])
        torch.bmm(e.view(M, T * O, B), a.transpose(1, 2), out=product)
        into.copy_(product.view(into.shape))

    def _buffer(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """A matrix in one piece, kept between steps: products with the strided flat vector are a fifth slower."""
        size, kept = prod(shape), self._kept.get(name)
        if kept is None or len(kept) < size or kept.dtype != like.dtype:
            kept = self._kept[name] = like.new_empty(size)
        return kept[:size].view(shape)


def _plain(module: nn.Module) -> bool:
    """Whether every parameter is trainable and used once, and no hook changes what a module computes."""
    every = [p for _, p in module.named_parameters(remove_duplicate=False)]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(m, name) for m in module.modules() for name in hooks)
    return not hooked and len(set(map(id, every))) == len(every) and all(p.requires_grad for p in every)


def _sequence(module: nn.Module) -> list[nn.Module]:
    """The modules of a plain chain; a subclass of Sequential may do anything in its forward."""
    if type(module) is nn.Sequential:
        return [inner for child in module for inner in _sequence(child)]
    return [module]


class Vmapped(Backend):
    """torch.func over clients and trials, for any module it can batch."""

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.module.train()
        one = torch.func.grad_and_value(self._loss)
        over_trials = torch.func.vmap(one, (0, None, None, None))
        self._grad = torch.func.vmap(over_trials, (0, 0, 0, 0))
        self._predict = torch.func.vmap(torch.func.vmap(self._outputs, (0, None)), (0, 0))

    def _outputs(self, x: Tensor, rows: Tensor) -> Tensor:
        out = torch.func.functional_call(self.module, self.layout.unravel(x), (rows,))
        return _columns(out)

    def _loss(self, x: Tensor, rows: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (self.loss(self._outputs(x, rows), y) * weight).sum()

    def value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Nested vmap of grad."""
        grad, value = self._grad(x, batch.x, batch.y, batch.weight)
        return value, grad if out is None else out.copy_(grad)

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs, [M, trials, classes, rows]."""
        self.module.eval()
        out: Tensor = self._predict(x, rows)
        self.module.train()
        return out


class Looped(Backend):
    """Plain autograd, one client and one trial after the other; padding is cut off before the module sees it."""

    stacks = False

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.params = [self.module.get_parameter(n) for n in self.layout.names]

    def _load(self, x: Tensor, i: int, t: int) -> None:
        with torch.no_grad():
            for p, part in zip(self.params, torch.split(x[i, t], self.layout.sizes), strict=True):
                p.copy_(part.view_as(p))
            if self.buffers.numel():
                buffers_into(self.module, self.buffers[i, t])

    def value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Autograd of the module in training mode; its buffers move along."""
        M, T, _ = x.shape
        value, grad = (
            x.new_empty(M, T),
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out,
        )
        self.module.train()
        for i in range(M):
            real = int((batch.weight[i] > 0).sum())
            for t in range(T):
                self._load(x, i, t)
                loss = self._one(Batch(batch.x[i, :real], batch.y[i, :real], batch.weight[i, :real], batch.key))
                parts = torch.autograd.grad(loss, self.params, materialize_grads=True)
                torch.cat([g.reshape(-1) for g in parts], out=grad[i, t])
                value[i, t] = loss.detach()
                if self.buffers.numel():
                    self.buffers[i, t] = buffers_of(self.module)
        return value, grad

    def _one(self, rows: Batch) -> Tensor:
        with torch.enable_grad(), _seeded(rows.key, rows.x.device):
            return (self.loss(_columns(self.module(rows.x)), rows.y) * rows.weight).sum()

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs in evaluation mode."""
        self.module.eval()
        out: list[Tensor] = []
        with torch.no_grad(), _seeded(0, x.device):
            for i in range(x.shape[0]):
                for t in range(x.shape[1]):
                    self._load(x, i, t)
                    out.append(_columns(self.module(rows[i])))
        z = torch.stack(out)
        return z.view(*x.shape[:2], *z.shape[1:])


def _columns(out: Tensor) -> Tensor:
    """A module's outputs [rows, classes] or [rows] as [classes, rows]."""
    return out.unsqueeze(0) if out.dim() == 1 else out.flatten(1).transpose(0, 1)


@contextmanager
def _seeded(key: int, device: torch.device) -> Iterator[None]:
    """Let a module draw (dropout) from the run's seed; the caller's own stream goes on afterwards."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(key)  # torch.manual_seed takes forty times as long
    if device.type == "cuda":
        torch.cuda.manual_seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(before)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def objective(
    module: nn.Module, loss: RowLoss, engine: str, device: torch.device, sample: Sequence[int]
) -> tuple[Backend, str]:
    """The back end for a module, and why it was chosen. engine: "auto", "stacked" or "loop"."""
    if engine not in ("auto", "stacked", "loop"):
        raise unknown("engine", engine, ("auto", "stacked", "loop"))
    if engine == "loop":
        return Looped(module, loss), "clients one by one, as asked"
    if Dense.fits(module, sample):
        return Dense(module, loss), "clients and trials stacked"
    if engine == "auto" and device.type == "cpu" and any(isinstance(m, CONVOLUTIONS) for m in module.modules()):
        return Looped(module, loss), "clients one by one: on a CPU convolutions are faster so"
    reason = _cannot_batch(module, loss, sample)
    if reason and engine == "stacked":
        raise InputError(f"this model cannot be stacked ({reason}); use engine='auto' or engine='loop'")
    if reason:
        return Looped(module, loss), f"clients one by one: {reason}"
    return Vmapped(module, loss), "clients and trials stacked by torch.func"


def _cannot_batch(module: nn.Module, loss: RowLoss, sample: Sequence[int]) -> str:
    """Why torch.func cannot batch this module; empty if it can."""
    kinds = (nn.modules.batchnorm._NormBase, nn.RNNBase, nn.modules.dropout._DropoutNd)
    by_row = nn.modules.instancenorm._InstanceNorm  # without statistics of its own it sees one row at a time
    for m in module.modules():
        if isinstance(m, kinds) and not (isinstance(m, by_row) and not m.track_running_stats):
            return f"torch.func cannot batch {type(m).__name__}"
    back = Vmapped(module, loss)
    x = ravel(module).expand(2, 2, -1)
    rows = torch.zeros(2, 2, *sample, dtype=x.dtype, device=x.device)
    try:
        out = back.predict(x, rows)
        target: Any = torch.zeros(2, 2, dtype=torch.long, device=x.device)
        back.value_and_grad(x, Batch(rows, target, rows.new_full((2, 2), 0.5)))
        return "" if out.dim() == 4 else "its outputs are not [rows, classes]"
    except RuntimeError as error:
        return f"torch.func cannot batch it ({str(error).splitlines()[0][:80]})"
