"""The back end for chains of convolutions, on a GPU: all clients and trials at once.

Clients and trials are leading axes of every layer: activations are [M, T, channels, B, H, W] and,
once flattened, [M, T, features, B]. Autograd gives the derivatives: every client and trial has a
loss of its own, so the gradient of the sum of all losses holds all gradients.

Convolutions are matrix products with the patches of the images. The rows of a client are shared by
the trials, so the first convolution is one product of all trials' filters with each row's patches.
Later ones are a product for each client and trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .backend import Backend, by_trial
from .dense import are_distinct, is_plain, sequence

if TYPE_CHECKING:
    from ..algorithm import Batch
    from .losses import RowLoss

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Identity)
POOLS = (nn.MaxPool2d, nn.AvgPool2d)


class Chained(Backend):
    """Convolutions, pools and activations, then linear layers.

    `layers` pairs every layer with the name under which the layout knows its parameters.
    """

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        names = {id(m): name for name, m in self.module.named_modules()}
        self.layers = [(m, names[id(m)]) for m in sequence(self.module)]

    @classmethod
    def fits(cls, module: nn.Module, sample: Sequence[int]) -> bool:
        """Whether the module is a plain chain that starts with a convolution and is flattened once.

        Args:
            module: Any module.
            sample: The shape of one sample; images are [channels, height, width].
        """
        chain = [m for m in sequence(module) if not isinstance(m, ELEMENTWISE)]
        flattened = [i for i, m in enumerate(chain) if type(m) is nn.Flatten]
        if len(sample) != 3 or len(flattened) != 1:
            return False
        (middle,) = flattened
        on_images = chain[:middle]
        on_vectors = chain[middle + 1 :]
        if not on_images or type(on_images[0]) is not nn.Conv2d or not on_vectors:
            return False
        known = all(type(m) in POOLS or _is_simple(m) for m in on_images)
        linear = all(type(m) is nn.Linear for m in on_vectors)
        return known and linear and are_distinct(chain) and is_plain(module)

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs of the last layer, [M, T, classes, B]."""
        with torch.no_grad():
            return self._forward(x, rows)

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """The same: nothing here depends on the mode."""
        return self.predict(x, batch.x)

    def _forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [M, T, classes, B], with a graph where autograd is on."""
        params = self.layout.unravel(x)
        a = rows.transpose(1, 2).unsqueeze(1)  # [M, 1, C, B, H, W]: one copy for all trials
        for layer, name in self.layers:
            weight = params.get(f"{name}.weight")
            bias = params.get(f"{name}.bias")
            if isinstance(layer, nn.Conv2d):
                a = _convolve(layer, cast(Tensor, weight), bias, a)
            elif isinstance(layer, nn.Linear):
                a = cast(Tensor, weight) @ a
                a = a if bias is None else a + bias.unsqueeze(-1)
            elif isinstance(layer, nn.Flatten):
                # Features in torch's own order, channel by channel, and the rows last.
                a = a.permute(0, 1, 2, 4, 5, 3).flatten(2, 4)
            elif isinstance(layer, POOLS):
                a = _pool(layer, a)
            else:
                a = layer(a)
        return a

    def _losses(self, x: Tensor, batch: Batch) -> Tensor:
        """Weighted mean losses [M, T], without the penalty, with a graph where autograd is on."""
        z = self._forward(x, batch.x)
        rows = self.loss(z, by_trial(batch.y, x.shape[1]))
        return (rows * batch.weight.unsqueeze(1)).sum(-1)

    def _value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One backward pass for all clients and trials.

        Each loss depends on its own point alone, so the gradient of their sum holds every
        gradient.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = self._losses(x, batch)
            (grad,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), grad if out is None else out.copy_(grad)

    def _hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Double backward: the gradient's product with v is differentiated once more."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            total = self._losses(x, batch).sum()
            (grad,) = torch.autograd.grad(total, x, create_graph=True)
            (product,) = torch.autograd.grad(grad, x, v, materialize_grads=True)
        return product


def _is_simple(layer: nn.Module) -> bool:
    """Whether a layer is a convolution without groups, dilation or padding other than zeros."""
    if not isinstance(layer, nn.Conv2d) or type(layer) is not nn.Conv2d:
        return False
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return False
    return layer.groups == 1 and layer.dilation == (1, 1)


def _convolve(
    layer: nn.Conv2d,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
) -> Tensor:
    """A convolution as matrix products, [M, T, O, B, H', W'].

    Args:
        layer: Gives kernel size, stride and padding; its own parameters are not used.
        weight: Filters [M, T, O, C, kh, kw].
        bias: [M, T, O] or None.
        a: Images [M, T or 1, C, B, H, W]. An axis of 1 means that all trials share the images.
    """
    windows = _windows(layer, a)
    filters = weight.flatten(3)  # [M, T, O, K]
    if windows.shape[1] > 1:
        return _filter_apart(windows, filters, bias)
    return _filter_shared(windows[:, 0], filters, bias)


def _windows(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """What each pixel of the outputs sees: [..., H', W', kh, kw] for images [..., H, W].

    It is a view: no patch is copied until the product needs it.
    """
    high, wide = layer.kernel_size
    down, right = layer.stride
    top, left = cast(Any, layer.padding)
    padded = F.pad(a, (left, left, top, top))
    return padded.unfold(4, high, down).unfold(5, wide, right)


def _filter_apart(
    windows: Tensor,
    filters: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The product for each client and trial, which have their own windows.

    Args:
        windows: [M, T, C, B, H, W, kh, kw]
        filters: [M, T, O, K], with K = C kh kw.
        bias: [M, T, O] or None.

    Returns:
        Outputs [M, T, O, B, H, W].
    """
    M, T, O, _ = filters.shape
    B, H, W = windows.shape[3:6]
    patches = windows.permute(0, 1, 2, 6, 7, 3, 4, 5).reshape(M, T, -1, B * H * W)
    z = (filters @ patches).view(M, T, O, B, H, W)
    return z if bias is None else z + bias[..., None, None, None]


def _filter_shared(
    windows: Tensor,
    filters: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The product where all trials share the windows: one for each row, with all trials' filters.

    With one product for all rows, few threads would have to sum over all pixels on the way back.

    Args:
        windows: [M, C, B, H, W, kh, kw]
        filters: [M, T, O, K], with K = C kh kw.
        bias: [M, T, O] or None.

    Returns:
        Outputs [M, T, O, B, H, W]; a view, whose rows come before the trials in memory.
    """
    M, T, O, _ = filters.shape
    B, H, W = windows.shape[2:5]
    patches = windows.permute(0, 2, 1, 5, 6, 3, 4).reshape(M, B, -1, H * W)
    if bias is not None:  # a patch of ones, which saves two passes over the largest tensor
        filters = torch.cat([filters, bias.unsqueeze(-1)], -1)
        patches = torch.cat([patches, patches.new_ones(M, B, 1, H * W)], 2)
    z = filters.flatten(1, 2).unsqueeze(1) @ patches
    return z.view(M, B, T, O, H, W).permute(0, 2, 3, 1, 4, 5)


def _pool(layer: nn.Module, a: Tensor) -> Tensor:
    """A pool over the last two axes, H and W, of a [M, T, channels, B, H, W].

    The other axes are brought into the order in which they lie in memory, which saves a copy.
    """
    order = sorted(range(4), key=lambda i: -a.stride()[i])
    images = a.permute(*order, 4, 5)
    pooled: Tensor = layer(images.flatten(0, 2))
    back = [order.index(i) for i in range(4)]
    return pooled.view(*images.shape[:4], *pooled.shape[2:]).permute(*back, 4, 5)
