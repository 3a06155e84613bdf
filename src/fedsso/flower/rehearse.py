"""What a server without model and data can know of messages, client states and uploads: their
shapes.

The algorithm's own functions run on tensors of torch's device "meta", with an objective that has
shapes and no numbers.
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
    """The objective of a client whose numbers nobody knows."""

    def value_and_grad(
        self, x: Tensor, batch: Batch, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.value(x, batch), torch.empty_like(x) if out is None else out

    def value(self, x: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        return x.new_empty(x.shape[:-1])

    def hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        return torch.empty_like(v)

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        return x.new_empty(*x.shape, x.shape[-1])

    def bartlett(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:  # noqa: ARG002
        return torch.empty_like(x)


class Rehearsal:
    """One client's exchanges without numbers, for a model of d parameters."""

    def __init__(self, record: Algorithm, d: int, dtype: torch.dtype) -> None:
        x = torch.empty(1, d, dtype=dtype, device=META)
        short = replace(cast(Any, record), **{name: 1 for name in LOOPS if hasattr(record, name)})
        self.algorithm: Algorithm = stack([short], dtype, META)
        self._server, self._dtype = self.algorithm.server_init(x), dtype
        self.own: Tree = self.algorithm.client_init(x)

    def upload(self, phase: int, k: int) -> Tree:
        """The upload of an exchange in round k, leaves [1, 1, ...]."""
        now, own = self.algorithm.phases[phase], tree_map(lambda leaf: leaf.unsqueeze(0), self.own)
        local = Shapes(k, 0, (1,))  # no step has the shapes of all
        local.own_steps = local.own_steps.to(self._dtype)
        with torch.no_grad():
            return now.client(Blank(), now.broadcast(self._server), own, local).upload
