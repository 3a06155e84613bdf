"""The back end for chains of convolutions: clients and trials are leading axes of every layer, autograd does the rest.

Activations are [M, trials, channels, B, H, W] and, once flattened, [M, trials, features, B]. The rows are shared by the
trials, so the first convolution is one matrix product of all trials' filters with the rows' patches; later ones have a
product for each client and trial. Each of these has a loss of its own: the gradient of the sum holds all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algorithm import Batch
from .backend import Backend, by_trial
from .dense import is_plain, sequence
from .losses import RowLoss

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)
POOLS = (nn.MaxPool2d, nn.AvgPool2d)


class Chained(Backend):
    """Convolutions, pools and activations, then linear layers; all clients and trials at once."""

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        names = {id(m): name for name, m in self.module.named_modules()}
        self.layers = [(m, names[id(m)]) for m in sequence(self.module)]

    @classmethod
    def fits(cls, module: nn.Module, sample: Sequence[int]) -> bool:
        """Whether the module is a plain chain that starts with a convolution and is flattened once."""
        chain = [m for m in sequence(module) if not isinstance(m, ELEMENTWISE)]
        flat = [i for i, m in enumerate(chain) if type(m) is nn.Flatten]
        if len(sample) != 3 or len(flat) != 1 or len(set(map(id, chain))) != len(chain) or not is_plain(module):
            return False
        images, vectors = chain[: flat[0]], chain[flat[0] + 1 :]
        known = all(type(m) in POOLS or _is_simple(m) for m in images) and all(type(m) is nn.Linear for m in vectors)
        return known and bool(images) and type(images[0]) is nn.Conv2d and bool(vectors)

    def _forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [M, trials, classes, B]."""
        params = self.layout.unravel(x)
        a = rows.transpose(1, 2).unsqueeze(1)  # [M, 1, C, B, H, W]: one copy for all trials
        for layer, name in self.layers:
            if isinstance(layer, nn.Conv2d):
                a = _convolved(layer, params[f"{name}.weight"], params.get(f"{name}.bias"), a)
            elif isinstance(layer, nn.Linear):
                a = params[f"{name}.weight"] @ a
                a = a if layer.bias is None else a + params[f"{name}.bias"].unsqueeze(-1)
            elif isinstance(layer, nn.Flatten):
                a = a.permute(0, 1, 2, 4, 5, 3).flatten(2, 4)
            elif isinstance(layer, POOLS):
                pooled: Tensor = layer(a.flatten(0, 2))
                a = pooled.view(*a.shape[:3], *pooled.shape[1:])
            else:
                a = layer(a)
        return a

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs of the last layer."""
        with torch.no_grad():
            return self._forward(x, rows)

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """The same: nothing here depends on the mode."""
        return self.predict(x, batch.x)

    def _losses(self, x: Tensor, batch: Batch) -> Tensor:
        rows = self.loss(self._forward(x, batch.x), by_trial(batch.y, x.shape[1]))
        return (rows * batch.weight.unsqueeze(1)).sum(-1)

    def _value_and_grad(self, x: Tensor, batch: Batch, out: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self._losses(x, batch)
            (grad,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), grad if out is None else out.copy_(grad)

    def _hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Double backward."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self._losses(x, batch).sum(), x, create_graph=True)
            (product,) = torch.autograd.grad(grad, x, v, materialize_grads=True)
        return product


def _is_simple(layer: nn.Module) -> bool:
    """A convolution without groups, dilation or padding other than zeros."""
    if not isinstance(layer, nn.Conv2d) or type(layer) is not nn.Conv2d or isinstance(layer.padding, str):
        return False
    return layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"


def _convolved(layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, a: Tensor) -> Tensor:
    """Filters [M, T, O, C, kh, kw] on images [M, T or 1, C, B, H, W]: a product with the patches of the images."""
    (high, wide), (down, right), (top, left) = layer.kernel_size, layer.stride, cast(Any, layer.padding)
    windows = F.pad(a, (left, left, top, top)).unfold(4, high, down).unfold(5, wide, right)
    M, T, C, B, H, W = windows.shape[:6]
    patches = windows.permute(0, 1, 2, 6, 7, 3, 4, 5).reshape(M, T, C * high * wide, B * H * W)
    filters = weight.flatten(3)  # [M, trials, O, K]
    if T == 1:  # one product for all trials, where broadcasting would copy the patches for each
        z = torch.bmm(filters.flatten(1, 2), patches[:, 0])
    else:
        z = filters @ patches
    z = z.view(M, filters.shape[1], filters.shape[2], B, H, W)
    return z if bias is None else z + bias[..., None, None, None]
