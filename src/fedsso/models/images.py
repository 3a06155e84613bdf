"""Models of images [channels, height, width].

Every function takes the shape of an image and the number of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from .shapes import image

GROUPS = 8
"""Groups of every GroupNorm of ResNet-20, with 2, 4 or 8 channels each.

With one channel in each group it would be InstanceNorm, which takes away every channel's mean. With
one group for all it would be LayerNorm, where one strong channel sets the scale of all others.
"""
MANY_GROUPS = 32
"""The same for ResNet-18, with 2, 4, 8 or 16 channels each."""


def cnn(sample: Sequence[int], outputs: int) -> nn.Module:
    """The paper's small CNN, with d = 6 230 parameters on MNIST.

    It is reconstructed from the paper's parameter count and released curves.
    """
    c, h, w = image(sample, "cnn")
    return nn.Sequential(
        nn.Conv2d(c, 1, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear((h // 2) * (w // 2), 30),
        nn.Linear(30, outputs),
    )


def cnn_small(sample: Sequence[int], outputs: int) -> nn.Module:
    """Two real convolutions of 8 and 16 channels and a linear layer.

    Each convolution keeps the size of the image, each pool halves it.
    """
    c, h, w = image(sample, "cnn-small")
    return nn.Sequential(
        nn.Conv2d(c, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (h // 4) * (w // 4), outputs),
    )


def lenet(sample: Sequence[int], outputs: int) -> nn.Module:
    """The paper's LeNet: d = 49 402 on CIFAR-10, 44 426 on one-channel images of 28×28.

    The second layer is wider for one channel. The logits have no ReLU. The one-channel model of the
    released code has one, but a logit that it holds at zero gets no gradient.
    """
    c, h, w = image(sample, "lenet", least=16)
    wide = 16 if c == 1 else 12
    h = _after_two_pools(h)
    w = _after_two_pools(w)
    return nn.Sequential(
        nn.Conv2d(c, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, wide, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(wide * h * w, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )


def _after_two_pools(side: int) -> int:
    """A side of an image after two convolutions of 5 pixels, each halved by a pool."""
    return ((side - 4) // 2 - 4) // 2


def resnet20_gn(sample: Sequence[int], outputs: int) -> nn.Module:
    """ResNet-20 with GroupNorm in the place of BatchNorm (d = 275 572 on CIFAR-100).

    BatchNorm keeps statistics of the activations. Clients with skewed labels have statistics of
    their own, and their average suits none of them. GroupNorm keeps none, and has as many
    parameters.
    """
    c, _, _ = image(sample, "resnet20-gn")
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(before, after) for before, after in pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(c, 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, outputs),
    )


def resnet18_gn(sample: Sequence[int], outputs: int) -> nn.Module:
    """ResNet-18 with GroupNorm, for small images (d = 11 173 962 on CIFAR-10).

    As usual for images of 32 pixels it begins with a 3×3 convolution and without a pool.
    """
    c, _, _ = image(sample, "resnet18-gn")
    widths = [64] * 3 + [128] * 2 + [256] * 2 + [512] * 2
    blocks = [Projected(before, after, MANY_GROUPS) for before, after in pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(c, 64, 3, padding=1, bias=False),
        nn.GroupNorm(MANY_GROUPS, 64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, outputs),
    )


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters.

    A block that has more channels after it than before halves the image: its shortcut takes every
    second pixel, and zeros for the new channels.
    """

    def __init__(self, before: int, after: int, groups: int = GROUPS) -> None:
        super().__init__()
        self.new = after - before
        self.stride = 2 if self.new else 1
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False),
            nn.GroupNorm(groups, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(groups, after),
        )

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the two convolutions plus the shortcut; images [rows, channels, H, W]."""
        return F.relu(self.body(x) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """The input, in the shape of the output."""
        pixels = x[..., :: self.stride, :: self.stride]
        return F.pad(pixels, (0, 0, 0, 0, 0, self.new))


class Projected(Block):
    """The same, but a shortcut to more channels is a 1×1 convolution with a GroupNorm."""

    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__(before, after, groups)
        self.project = (
            nn.Identity()
            if not self.new
            else nn.Sequential(
                nn.Conv2d(before, after, 1, self.stride, bias=False),
                nn.GroupNorm(groups, after),
            )
        )

    def shortcut(self, x: Tensor) -> Tensor:
        """The input, in the shape of the output."""
        out: Tensor = self.project(x)
        return out
