"""The clients' objective f_i(x): value, gradient, curvature and outputs at flat vectors.

f_i(x) = sum over the rows of client i of weight * loss(model(x, row), target) + l2/2 |x|^2, with
weights that sum to 1. Everything is computed for many clients and trials: points are x
[clients, trials, d], and every client has rows of its own, which its trials share.

Five back ends compute the same function, and `objective()` picks one:

    Dense     linear layers with activations between them (mclr, mlp): all clients and trials at
              once, with derivatives written by hand
    Sparse    one linear layer on sparse rows (mclr, linear): the same, with sparse products
    Chained   convolutions, pools and linear layers in a chain, on a GPU (cnn, lenet): all at once,
              with derivatives by autograd
    Vmapped   any module that torch.func can batch (on a GPU also residual networks)
    Looped    any module at all, one client and one trial at a time (BatchNorm, LSTM, dropout,
              convolutions on a CPU)

They agree up to rounding. `backend.py` holds what they share, `losses.py` the losses of single
rows, `modes.py` how torch is set up while a module runs, `choose.py` the choice.
"""

from __future__ import annotations

from .backend import Backend, Layout, buffers_into, buffers_of, ravel, unravel_into
from .chained import Chained
from .choose import objective
from .dense import Dense
from .looped import Looped
from .sparse import Sparse
from .vmapped import Vmapped

__all__ = [
    "Backend",
    "Chained",
    "Dense",
    "Layout",
    "Looped",
    "Sparse",
    "Vmapped",
    "buffers_into",
    "buffers_of",
    "objective",
    "ravel",
    "unravel_into",
]
