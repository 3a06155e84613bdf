"""The clients' objective f_i(x): value, gradient, curvature and outputs at flat vectors, for many
clients and trials.

Four back ends compute the same function, and `objective()` picks one:

    Dense     linear layers with activations between them (mclr, mlp): hand-written, batched derivatives
    Chained   convolutions, pools and linear layers in a chain, on a GPU (cnn, lenet): batched, derivatives by autograd
    Vmapped   any module that torch.func can batch (on a GPU also residual networks)
    Looped    any module at all, one client and one trial at a time (BatchNorm, LSTM, dropout, convolutions on a CPU)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..algorithm import Batch
from ..errors import InputError, unknown
from .backend import (
    Backend,
    Layout,
    buffers_into,
    buffers_of,
    by_trial,
    columns,
    mirrored,
    ravel,
    unravel_into,
)
from .chained import Chained
from .dense import Dense
from .losses import RowLoss

__all__ = [
    "Backend",
    "Dense",
    "Layout",
    "Looped",
    "Vmapped",
    "buffers_into",
    "buffers_of",
    "objective",
    "ravel",
    "unravel_into",
]


class Vmapped(Backend):
    """torch.func over clients and trials, for any module it can batch."""

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.module.train()
        self._grad = torch.func.grad_and_value(self._loss)
        self._predict = torch.func.vmap(torch.func.vmap(self._outputs, (0, None)), (0, 0))

    def _outputs(self, x: Tensor, rows: Tensor) -> Tensor:
        out = torch.func.functional_call(self.module, self.layout.unravel(x), (rows,))
        return _columns(out)

    def _loss(self, x: Tensor, rows: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (self.loss(self._outputs(x, rows), y) * weight).sum()

    def _value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Nested vmap of grad."""
        grad, value = self._over(self._grad, batch, x)
        return value, grad if out is None else out.copy_(grad)

    def _over(self, fn: Callable[..., Any], batch: Batch, *points: Tensor) -> Any:
        """fn(*points, rows, targets, weights) over clients and, inside, over trials."""
        own = 0 if batch.y.dim() == 3 else None
        over_trials = torch.func.vmap(fn, (*(0 for _ in points), None, own, None))
        return torch.func.vmap(over_trials)(*points, batch.x, batch.y, batch.weight)

    def _product(self, x: Tensor, v: Tensor, *rows: Tensor) -> Tensor:
        """Reverse over reverse; forward mode would load torch's deprecated script compiler."""
        grad = torch.func.grad(self._loss)
        product: Tensor = torch.func.vjp(lambda point: grad(point, *rows), x)[1](v)[0]
        return product

    def _hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Nested vmap of the gradient's gradient along v."""
        with _twice(self.module):
            product: Tensor = self._over(self._product, batch, x, v)
        return product

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs of the module in training mode."""
        out: Tensor = self._predict(x, batch.x)
        return out

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs, [M, trials, classes, rows]."""
        self.module.eval()
        out: Tensor = self._predict(x, rows)
        self.module.train()
        return out


class Looped(Backend):
    """Plain autograd, one client and one trial after the other; padding is cut off before the
    module sees it."""

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

    def _value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Autograd of the module in training mode; its buffers move along."""
        value, grad = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape) if out is None else out.zero_()
        for i, t, rows in self._each(x, batch):
            with torch.enable_grad():
                loss = self._loss(rows)
            parts = torch.autograd.grad(loss, self.params, materialize_grads=True)
            torch.cat([g.reshape(-1) for g in parts], out=grad[i, t])
            value[i, t] = loss.detach()
            if self.buffers.numel():
                self.buffers[i, t] = buffers_of(self.module)
        return value, grad

    def _each(self, x: Tensor, batch: Batch) -> Iterator[tuple[int, int, Batch]]:
        """Client, trial and the client's rows, with their point in the module; who has no rows is
        passed over."""
        self.module.train()
        y = by_trial(batch.y, x.shape[1])
        for i, real in enumerate((batch.weight > 0).sum(1).tolist()):
            for t in range(x.shape[1] if real else 0):
                self._load(x, i, t)
                yield (
                    i,
                    t,
                    Batch(batch.x[i, :real], y[i, t, :real], batch.weight[i, :real], batch.key),
                )

    def _value(self, x: Tensor, batch: Batch) -> Tensor:
        """The loss in training mode, which leaves the buffers as they are."""
        value = x.new_zeros(x.shape[:2])
        with torch.no_grad():
            for i, t, rows in self._each(x, batch):
                value[i, t] = self._loss(rows)
        return value

    def _hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Double backward."""
        out = x.new_zeros(x.shape)
        for i, t, rows in self._each(x, batch):
            out[i, t] = self._product(rows)(v[i, t])
        return out

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """Double backward of the identity's columns through one graph; torch cannot batch it for
        GroupNorm."""
        d = x.shape[-1]
        H = x.new_zeros(*x.shape, d)
        for i, t, rows in self._each(x, batch):
            product = self._product(rows)
            for part, unit in columns(x, d):
                H[i, t, part] = torch.stack([product(v) for v in unit])
        return mirrored(H)

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """Outputs in training mode; zero on padding."""
        z = x.new_zeros(0)
        with torch.no_grad():
            for i, t, rows in self._each(x, batch):
                one = self._outputs(rows)
                z = z if z.numel() else x.new_zeros(*x.shape[:2], len(one), batch.weight.shape[1])
                z[i, t, :, : one.shape[1]] = one
        return z

    def _outputs(self, rows: Batch) -> Tensor:
        with _seeded(rows.key, rows.x.device):
            return _columns(self.module(rows.x))

    def _loss(self, rows: Batch) -> Tensor:
        return (self.loss(self._outputs(rows), rows.y) * rows.weight).sum()

    def _product(self, rows: Batch) -> Callable[[Tensor], Tensor]:
        """The function v -> (Hessian) v."""
        with torch.enable_grad(), _twice(self.module):
            parts = torch.autograd.grad(
                self._loss(rows), self.params, create_graph=True, materialize_grads=True
            )
            slope = torch.cat([g.reshape(-1) for g in parts])

        def product(v: Tensor) -> Tensor:
            if not slope.requires_grad:  # the gradient is constant
                return torch.zeros_like(v)
            parts = torch.autograd.grad(
                slope, self.params, v, retain_graph=True, materialize_grads=True
            )
            return torch.cat([g.reshape(-1) for g in parts])

        return product

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


@contextmanager
def _twice(module: nn.Module) -> Iterator[None]:
    """Run attention and recurrent layers by kernels that can be differentiated twice."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
    with sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=False) if recurrent else nullcontext():
        yield


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
    if Chained.fits(module, sample) and (engine == "stacked" or device.type == "cuda"):
        return Chained(module, loss), "clients and trials stacked, convolutions as matrix products"
    if (
        engine == "auto"
        and device.type == "cpu"
        and any(isinstance(m, CONVOLUTIONS) for m in module.modules())
    ):
        return Looped(module, loss), "clients one by one: on a CPU convolutions are faster so"
    reason = _cannot_batch(module, loss, sample)
    if reason and engine == "stacked":
        raise InputError(
            f"this model cannot be stacked ({reason}); use engine='auto' or engine='loop'"
        )
    if reason:
        return Looped(module, loss), f"clients one by one: {reason}"
    return Vmapped(module, loss), "clients and trials stacked by torch.func"


def _cannot_batch(module: nn.Module, loss: RowLoss, sample: Sequence[int]) -> str:
    """Why torch.func cannot batch this module; empty if it can."""
    kinds = (nn.modules.batchnorm._NormBase, nn.RNNBase, nn.modules.dropout._DropoutNd)
    by_row = (
        nn.modules.instancenorm._InstanceNorm
    )  # without statistics of its own it sees one row at a time
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
