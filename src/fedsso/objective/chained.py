"""The back end for chains of convolutions: clients and trials are leading axes of every layer,
autograd does the rest.

Activations are [M, trials, channels, B, H, W] and, once flattened, [M, trials, features, B]. The
rows are shared by the trials, so the first convolution is a matrix product of all trials' filters
with each row's patches; later ones have a product for each client and trial. Each of these has a
loss of its own: the gradient of the sum holds all gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..algorithm import Batch
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
        if (
            len(sample) != 3
            or len(flat) != 1
            or len(set(map(id, chain))) != len(chain)
            or not is_plain(module)
        ):
            return False
        images, vectors = chain[: flat[0]], chain[flat[0] + 1 :]
        known = all(type(m) in POOLS or _is_simple(m) for m in images) and all(
            type(m) is nn.Linear for m in vectors
        )
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
                a = _pooled(layer, a)
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
    if (
        not isinstance(layer, nn.Conv2d)
        or type(layer) is not nn.Conv2d
        or isinstance(layer.padding, str)
    ):
        return False
    return layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"


def _convolved(layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, a: Tensor) -> Tensor:
    """Filters [M, T, O, C, kh, kw] on images [M, T or 1, C, B, H, W]: a product with the patches of
    the images."""
    (high, wide), (down, right), (top, left) = (
        layer.kernel_size,
        layer.stride,
        cast(Any, layer.padding),
    )
    windows = F.pad(a, (left, left, top, top)).unfold(4, high, down).unfold(5, wide, right)
    filters = weight.flatten(3)  # [M, trials, O, K]
    M, T, O = filters.shape[:3]
    B, H, W = windows.shape[3:6]
    if windows.shape[1] > 1:
        patches = windows.permute(0, 1, 2, 6, 7, 3, 4, 5).reshape(M, T, -1, B * H * W)
        z = (filters @ patches).view(M, T, O, B, H, W)
        return z if bias is None else z + bias[..., None, None, None]
    # all trials share the rows: a product for each row, or few threads would sum over all pixels in
    # the way back
    patches = windows[:, 0].permute(0, 2, 1, 5, 6, 3, 4).reshape(M, B, -1, H * W)
    if bias is not None:  # a patch of ones, which saves two passes over the largest tensor
        filters = torch.cat([filters, bias.unsqueeze(-1)], -1)
        patches = torch.cat([patches, patches.new_ones(M, B, 1, H * W)], 2)
    z = filters.flatten(1, 2).unsqueeze(1) @ patches
    return z.view(M, B, T, O, H, W).permute(0, 2, 3, 1, 4, 5)


def _pooled(layer: nn.Module, a: Tensor) -> Tensor:
    """A pool over [..., H, W], in the order in which the images lie in memory."""
    order = sorted(range(4), key=lambda i: -a.stride()[i])
    images = a.permute(*order, 4, 5)
    pooled: Tensor = layer(images.flatten(0, 2))
    back = [order.index(i) for i in range(4)]
    return pooled.view(*images.shape[:4], *pooled.shape[2:]).permute(*back, 4, 5)
