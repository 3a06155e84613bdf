"""Models of images [channels, height, width]."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError

GROUPS = 8
"""Groups of every GroupNorm: 2, 4 or 8 channels each. With one channel each it would be
InstanceNorm, which takes away every channel's mean; with one group LayerNorm, where one strong
channel sets the scale of all."""


def cnn(sample: Sequence[int], outputs: int) -> nn.Module:
    """The paper's small CNN as reconstructed from its parameter count and released curves (d = 6
    230 on MNIST)."""
    c, h, w = _image(sample, "cnn")
    return nn.Sequential(
        nn.Conv2d(c, 1, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear((h // 2) * (w // 2), 30),
        nn.Linear(30, outputs),
    )


def cnn_small(sample: Sequence[int], outputs: int) -> nn.Module:
    """Two real convolutions of 8 and 16 channels and a linear layer."""
    c, h, w = _image(sample, "cnn-small")
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
    """The paper's LeNet: d = 49 402 on CIFAR-10; 44 426 on one-channel 28×28 images, whose second
    layer is wider.

    The logits have no ReLU; the one-channel model of the released code has one, but a logit that it
    holds at zero gets no gradient.
    """
    c, h, w = _image(sample, "lenet", least=16)
    wide = 16 if c == 1 else 12
    h, w = (((side - 4) // 2 - 4) // 2 for side in (h, w))
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


def resnet20_gn(sample: Sequence[int], outputs: int) -> nn.Module:
    """ResNet-20 with GroupNorm in the place of BatchNorm (d = 275 572 on CIFAR-100).

    Clients with skewed labels have statistics of their own, and averaging those suits none of them;
    GroupNorm needs none, and has as many parameters.
    """
    c, _, _ = _image(sample, "resnet20-gn")
    widths = [16] * 3 + [32] * 3 + [64] * 3
    blocks = [Block(before, after) for before, after in zip([16, *widths], widths, strict=False)]
    return nn.Sequential(
        nn.Conv2d(c, 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, outputs),
    )


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters: every second pixel, and zeros for the
    new channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.new = (1 if before == after else 2), after - before
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))
        return F.relu(self.body(x) + shortcut)


def _image(sample: Sequence[int], name: str, least: int = 4) -> tuple[int, int, int]:
    if len(sample) != 3 or min(sample[1:]) < least:
        shape = f"[channels, height >= {least}, width >= {least}]"
        raise InputError(f"model {name!r} needs images {shape}, got {tuple(sample)}")
    return sample[0], sample[1], sample[2]
