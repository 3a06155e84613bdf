"""Models by name.

These are for convenience and for the paper's experiments; any other `nn.Module` works as well. A
model is a function of a sample's shape and the number of outputs that returns a plain module:
`vectors.py` has those that flatten a sample, `images.py` those with convolutions, `attention.py`
transformers, `recurrent.py` an LSTM. A line in MODELS makes one known to Python and the command
line. `adapters.py` freezes a model of any kind and gives it a few trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import unknown
from .attention import gpt_nano, vit_tiny
from .images import cnn, cnn_small, lenet, resnet18_gn, resnet20_gn
from .recurrent import lstm
from .vectors import charmlp, linear, mclr, mlp, textmlp


@dataclass(frozen=True)
class Model:
    """A registered model.

    Convex models begin at zero, which needs no seed; others need torch's own draw to break
    symmetry.
    """

    build: Callable[[Sequence[int], int], nn.Module]  # from a sample's shape and the outputs
    title: str
    init: str = "default"  # where training begins: torch's own weights, or zero


MODELS: dict[str, Model] = {
    "linear": Model(linear, "one linear map without bias", init="zero"),
    "mclr": Model(mclr, "multi-class logistic regression", init="zero"),
    "mlp": Model(mlp, "one hidden layer of 32 units"),
    "cnn": Model(cnn, "the paper's CNN, 6 230 parameters on MNIST"),
    "cnn-small": Model(cnn_small, "two convolutions of 8 and 16 channels"),
    "lenet": Model(lenet, "the paper's LeNet, 49 402 parameters on CIFAR-10"),
    "resnet20-gn": Model(resnet20_gn, "ResNet-20 with GroupNorm, 275 572 parameters on CIFAR-100"),
    "resnet18-gn": Model(resnet18_gn, "ResNet-18 with GroupNorm, 11.2 million on CIFAR-10"),
    "vit-tiny": Model(vit_tiny, "a vision transformer of 12 layers, 5.4 million on CIFAR-10"),
    "charmlp": Model(charmlp, "one hidden layer of 128 units, 424 513 parameters on Shakespeare"),
    "lstm": Model(lstm, "an LSTM of characters, 815 945 parameters on Shakespeare"),
    "gpt-nano": Model(gpt_nano, "a transformer of characters, 816 449 on Shakespeare"),
    "textmlp": Model(textmlp, "hidden layers of 64 and 32 units"),
}


def build(
    name: str,
    sample: Sequence[int],
    outputs: int,
    seed: int = 0,
) -> nn.Module:
    """A model by name, for samples of this shape and so many outputs.

    Args:
        name: A key of MODELS.
        sample: The shape of one sample, such as (1, 28, 28).
        outputs: Classes, or 1 for a single real output.
        seed: Its weights are torch's own initialisation under `torch.manual_seed(seed)`. The
            caller's stream of random numbers is left as it was.

    Raises:
        InputError: No model has that name, or it cannot take such samples.

    >>> sum(p.numel() for p in build("mclr", (1, 28, 28), 10).parameters())
    7850
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name].build(sample, outputs)
