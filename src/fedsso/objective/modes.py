"""How a module is run: the layout of its outputs, its random numbers, its kernels.

Torch keeps its random state and its choice of kernels for the whole process. What is changed here
is put back when the block ends, but for the random state of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel


def by_classes(out: Tensor) -> Tensor:
    """A module's outputs [rows, classes] or [rows] as [classes, rows], without a copy.

    Further axes of the outputs count as classes.
    """
    return out.unsqueeze(0) if out.dim() == 1 else out.flatten(1).transpose(0, 1)


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[None]:
    """Let a module draw (dropout) from the run's seed, within the block.

    The CPU's stream of random numbers, which is the caller's, goes on afterwards as if nothing
    had been drawn. With the same key a module draws the same numbers again, so that a loss and
    its derivatives see the same function.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(key)  # torch.manual_seed takes forty times as long
    if device.type == "cuda":
        torch.cuda.manual_seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def differentiable_twice(module: nn.Module) -> Iterator[None]:
    """Run attention and recurrent layers by kernels that can be differentiated twice.

    The fast kernels of attention and those of cuDNN for recurrent layers have a first derivative
    only. Outside the block they are used as before.
    """
    recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
    without_cudnn = cudnn.flags(enabled=False) if recurrent else nullcontext()
    with sdpa_kernel(SDPBackend.MATH), without_cudnn:
        yield
