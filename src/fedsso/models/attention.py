"""Transformers: of images in patches, and of characters.

Both are pre-norm: every layer adds to its input what attention and then a small network make of
the normed input. Attention is written as plain matrix products, because torch.func, which stacks
clients, has no rule for torch's fused kernel on a CPU, and because the fused kernels cannot be
differentiated twice.

    T   places: characters of a text, or patches of an image
    C   width: numbers that are held for each place
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shapes import image, text

PATCH = 4  # pixels on a side of a patch
SPREAD = 0.02  # standard deviation of what is first added to tell places apart


def gpt_nano(
    sample: Sequence[int],
    outputs: int,
) -> nn.Module:
    """A causal transformer of 4 layers and width 128 that predicts the next character.

    Samples are one-hot characters [window, alphabet]. With a window of 50 and an alphabet of 65,
    d = 816 449.
    """
    window, alphabet = text(sample, "gpt-nano")
    return CharacterTransformer(
        window,
        alphabet,
        outputs,
        width=128,
        heads=4,
        depth=4,
    )


def vit_tiny(
    sample: Sequence[int],
    outputs: int,
) -> nn.Module:
    """A vision transformer of 12 layers and width 192, on patches of 4 x 4 pixels.

    d = 5 362 378 on CIFAR-10. Every place of the last layer counts the same: there is no extra
    place for the class.
    """
    channels, height, width = image(sample, "vit-tiny", least=PATCH)
    places = -(-height // PATCH) * -(-width // PATCH)
    return VisionTransformer(
        channels,
        places,
        outputs,
        width=192,
        heads=3,
        depth=12,
    )


class Attention(nn.Module):
    """Self-attention with several heads; a causal one sees no later place."""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.mix = nn.Linear(width, 3 * width)  # queries, keys and values
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What each place takes from the others; x [rows, T, C]."""
        parts = self.mix(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each [rows, heads, T, C / heads]
        score = q @ k.mT / sqrt(q.shape[-1])
        if self.causal:
            T = x.shape[1]
            later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            score = score.masked_fill(later, -torch.inf)
        seen = score.softmax(-1) @ v
        out: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention, then a network of one hidden layer for each place."""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
    ) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.between = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Both are added to x [rows, T, C]."""
        x = x + self.attention(self.before(x))
        out: Tensor = x + self.network(self.between(x))
        return out


class CharacterTransformer(nn.Module):
    """One-hot characters [rows, T, alphabet] to logits of the character that follows them."""

    def __init__(
        self,
        window: int,
        alphabet: int,
        outputs: int,
        *,
        width: int,
        heads: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(alphabet, width, bias=False)
        self.place = nn.Parameter(SPREAD * torch.randn(window, width))
        layers = [Layer(width, heads, causal=True) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def hidden(self, x: Tensor) -> Tensor:
        """What is known at each place, [rows, T, C]: it depends on this place and earlier ones."""
        out: Tensor = self.norm(self.layers(self.embed(x) + self.place))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Logits [rows, outputs], from the last place, which has seen the whole window."""
        out: Tensor = self.head(self.hidden(x)[:, -1])
        return out


class VisionTransformer(nn.Module):
    """Images [rows, channels, H, W] to logits, by patches that see each other."""

    def __init__(
        self,
        channels: int,
        places: int,
        outputs: int,
        *,
        width: int,
        heads: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(channels * PATCH * PATCH, width)
        self.place = nn.Parameter(SPREAD * torch.randn(places, width))
        layers = [Layer(width, heads, causal=False) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [rows, outputs], from the mean over all patches."""
        seen = self.layers(self.embed(patches(x)) + self.place)
        out: Tensor = self.head(self.norm(seen).mean(-2))
        return out


def patches(x: Tensor) -> Tensor:
    """Images [rows, channels, H, W] as patches [rows, T, channels * PATCH * PATCH].

    They follow each other row by row. Sides that are no multiple of a patch are padded with zeros
    on the right and below.
    """
    rows, channels, height, width = x.shape
    padded = F.pad(x, (0, -width % PATCH, 0, -height % PATCH))
    parts = padded.reshape(rows, channels, -(-height // PATCH), PATCH, -(-width // PATCH), PATCH)
    by_place = parts.permute(0, 2, 4, 1, 3, 5)  # [rows, down, across, channels, PATCH, PATCH]
    return by_place.flatten(3).flatten(1, 2)
