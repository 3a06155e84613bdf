"""The shapes of messages, client states and uploads, without a model and without data.

The server must know what an upload looks like, to refuse others. It runs the algorithm's own client
functions on tensors of torch's device "meta", which have shapes but no numbers, with an objective
that computes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..algorithm import Algorithm, Batch
from ..algorithm.records import stack
from ..experiment.costs import LOOPS, META, Shapes
from ..support.trees import Tree, tree_map


class Blank:
    """An objective whose results have the right shapes, and no numbers.

    Its methods are those of an objective: see `fedsso.objective`.
    """

    def value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A loss for each model, and a gradient of the shape of x."""
        gradient = torch.empty_like(x) if out is None else out
        return self.value(x, batch), gradient

    def value(self, x: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        """A loss for each model."""
        shape = x.shape[:-1]
        return x.new_empty(shape)

    def hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        """The Hessian times v."""
        return torch.empty_like(v)

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        """The Hessian, [..., d, d]."""
        d = x.shape[-1]
        return x.new_empty(*x.shape, d)

    def rows(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The inputs of a linear model, and a second derivative for each row."""
        M, B = batch.weight.shape
        return x.new_empty(M, B, x.shape[-1]), x.new_empty(M, x.shape[1], B)

    def bartlett(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:  # noqa: ARG002
        """An estimate of the Hessian's diagonal, of the shape of x."""
        return torch.empty_like(x)


class Rehearsal:
    """One client's exchanges without numbers, for a model of d parameters.

    It takes no time and no memory, however large the model is.
    """

    algorithm: Algorithm
    """The algorithm, with inner loops of one pass."""
    own: Tree
    """The shapes of a client's state, leaves [1, ...]."""

    def __init__(
        self,
        record: Algorithm,
        d: int,
        dtype: torch.dtype,
    ) -> None:
        x = torch.empty(1, d, dtype=dtype, device=META)
        # One pass of every inner loop has the shapes of all.
        loops = {name: 1 for name in LOOPS if hasattr(record, name)}
        short = replace(cast(Any, record), **loops)
        self.algorithm = stack([short], dtype, META)
        self.own = self.algorithm.client_init(x)
        self._server = self.algorithm.server_init(x)
        self._dtype = dtype

    def upload(self, phase: int, k: int) -> Tree:
        """The upload of an exchange in round k. Its leaves are [1, 1, ...].

        The round may matter: an algorithm can send something else in its first one.
        """
        functions = self.algorithm.phases[phase]
        message = functions.broadcast(self._server)
        own = tree_map(lambda leaf: leaf.unsqueeze(0), self.own)
        sample = getattr(self.algorithm, "shape", (1,))  # of a record that must know it
        local = Shapes(k, 0, sample)  # no local step, which has the shapes of all
        local.own_steps = local.own_steps.to(self._dtype)
        with torch.no_grad():
            reply = functions.client(Blank(), message, own, local)
        return reply.upload
