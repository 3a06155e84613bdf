"""Threads and convolutions that suit the work; what is switched is put back afterwards.

The switches are torch's own and hold for the whole process. They change the speed, and the
results by rounding at most.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .simulate import Trials

SMALL = 100_000  # parameters up to which one thread is fastest
SMALL_WITH_MATRICES = 2_000  # the same for algorithms with d x d matrices


@contextmanager
def one_thread_for_small_models(simulation: Trials) -> Iterator[None]:
    """Compute small models with one thread, within the block.

    Their products are so small that several threads would wait for each other more than they
    work. A user who has set OMP_NUM_THREADS has decided, and nothing is changed. Nor is it on a
    GPU, nor where clients are computed one by one.
    """
    before = torch.get_num_threads()
    algorithm = simulation.algorithm
    limit = SMALL_WITH_MATRICES if algorithm.alone or algorithm.squares else SMALL
    small = simulation.f.stacks and sum(simulation.f.layout.sizes) <= limit
    if small and simulation.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def plain_convolutions(module: nn.Module) -> Iterator[None]:
    """Do without oneDNN where every convolution has one channel in and one out, within the block.

    For these oneDNN takes up to five times as long as torch's own code. Modules without
    convolutions are left alone.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    sizes = [layer.in_channels * layer.out_channels for layer in layers]
    if not sizes or max(sizes) > 1:
        yield
        return
    before = torch._C._get_mkldnn_enabled()  # the public switch also touches others, and warns
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
