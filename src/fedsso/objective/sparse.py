"""The back end for one linear layer on sparse rows: work and memory go with the entries.

The rows of all clients are one block-diagonal matrix A [M B, M I] (`support.sparse`), so that a
product with it takes every client's own point. Trials and outputs are columns of the other factor:

    z = A W        W [M I, T O], the weights of all clients, trials and outputs
    gradient       A^T e [M I, T O], with A^T kept as a matrix of its own
    Hv             A^T (S (A V)), with S the loss's second derivative in z
    Hessian        A^T (S D) of one output, with D [M B, I] the rows made dense

    M, T, B    clients, trials, rows of a batch
    I, O       inputs and outputs of the layer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..support.sparse import by_client, select
from .backend import Backend, by_trial
from .dense import Dense, of_linear
from .losses import RowLoss, bend, slope

if TYPE_CHECKING:
    from ..algorithm import Batch


class Sparse(Backend):
    """One linear layer whose inputs are sparse rows, such as `mclr` and `linear`."""

    def __init__(self, module: nn.Module, loss: RowLoss) -> None:
        super().__init__(module, loss)
        self.inputs = self.layout.shapes[0][1]

    @classmethod
    def fits(cls, module: nn.Module, sample: Sequence[int]) -> bool:
        """Whether the module is one plain linear layer, perhaps flattened first."""
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        return len(linear) == 1 and Dense.fits(module, sample)

    # ---- from flat vectors to factors and back ----

    def _times(self, A: Tensor, x: Tensor) -> Tensor:
        """A W, and the bias: the layer's outputs at points x [M, T, d], [M, T, O, B]."""
        M, T, _ = x.shape
        parts = list(self.layout.unravel(x).values())
        weight = parts[0]
        O = weight.shape[2]
        if T * O == 1:
            z = torch.mv(A, weight.reshape(-1)).view(M, 1, 1, -1)
        else:
            columns = weight.permute(0, 3, 1, 2).reshape(-1, T * O)
            z = (A @ columns).view(M, -1, T, O).permute(0, 2, 3, 1)
        return z if len(parts) == 1 else z + parts[1].unsqueeze(-1)

    def _back(self, e: Tensor, batch: Batch, out: Tensor) -> Tensor:
        """The layer's gradient for errors e [M, T, O, B], written into out [M, T, d]."""
        assert batch.transposed is not None
        weight, *bias = self.layout.unravel(out).values()
        for slot in bias:
            torch.sum(e, -1, out=slot)
        M, T, O, B = e.shape
        if T * O == 1:
            weight.copy_(torch.mv(batch.transposed, e.reshape(-1)).view(weight.shape))
        else:
            columns = e.permute(0, 3, 1, 2).reshape(M * B, T * O)
            product = batch.transposed @ columns
            weight.copy_(product.view(M, self.inputs, T, O).permute(0, 2, 3, 1))
        return out

    # ---- what a back end gives ----

    def predict(self, x: Tensor, rows: Tensor) -> Tensor:
        """Outputs [M, T, O, B] for rows as a block-diagonal matrix [M B, M I]."""
        return self._times(rows, x)

    def outputs(self, x: Tensor, batch: Batch) -> Tensor:
        """The same: nothing here depends on the mode."""
        return self._times(batch.x, x)

    def dense_rows(self, batch: Batch) -> Tensor:
        """The rows of a batch with their zeros, [M, B, I]."""
        return by_client(batch.x, len(batch.weight))

    def _value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Two products: one with the rows, one with their transpose."""
        z = self._times(batch.x, x)
        share = batch.weight[:, None, None, :]
        rows, e = slope(self.loss, z, by_trial(batch.y, x.shape[1]))
        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        self._back(e.mul_(share), batch, grad)
        return (rows * share.squeeze(2)).sum(-1), grad

    def _hvp(
        self,
        x: Tensor,
        v: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Three products: outputs, their change along v, and the way back."""
        z = self._times(batch.x, x)
        along = self._times(batch.x, v)
        y = by_trial(batch.y, x.shape[1])
        e = bend(self.loss, z, y, along) * batch.weight[:, None, None, :]
        return self._back(e, batch, torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def _hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """In closed form: a sparse product if there is one output and rows are few, else dense.

        As many rows are made dense at a time as the Hessian has columns, so that they take no more
        memory than it does. The sparse product needs them all at once: it may take twice that.
        """
        M, T, d = x.shape
        z = self._times(batch.x, x)
        B, O = z.shape[3], z.shape[2]
        y = by_trial(batch.y, T)
        share = batch.weight[:, None, None, :]
        if O == 1 and 2 * d >= B:
            return self._of_one_output(bend(self.loss, z, y, torch.ones_like(z)) * share, batch)
        unit = torch.eye(O, dtype=z.dtype, device=z.device).unsqueeze(-1)
        numbers = torch.arange(M * B, device=z.device).view(M, B)
        total = x.new_zeros(M, T, d, d)
        for start in range(0, B, d):
            piece = slice(start, min(B, start + d))
            own = batch._replace(x=select(batch.x, numbers[:, piece].reshape(-1)))

            def column(o: int, piece: slice = piece) -> Tensor:
                """Column o of the second derivatives in z of these rows, times their weights."""
                u = unit[o].expand(M, T, O, piece.stop - piece.start)
                bent = bend(self.loss, z[..., piece], y[..., piece], u)
                return bent * share[..., piece]

            a = self.dense_rows(own).transpose(1, 2)
            total += of_linear(a, column, O, len(self.layout.shapes) > 1)
        return total

    def _of_one_output(self, bent: Tensor, batch: Batch) -> Tensor:
        """The sum over rows a of bent a a^T, [M, T, d, d], for bent [M, T, 1, B].

        The factor on the left is sparse, so that a row with few entries is little work. The bias is
        the weight of a constant input.
        """
        assert batch.transposed is not None
        M, T, _, B = bent.shape
        bias = len(self.layout.shapes) - 1
        rows = by_client(batch.x, M, ones=bias).unsqueeze(2)
        half = bent.permute(0, 3, 1, 2) / 2
        # [M, B, T, d]; in place where that is possible, since fresh memory costs page faults
        scaled = rows.mul_(half) if T == 1 else rows * half
        product = batch.transposed @ scaled.view(M * B, -1)
        G = scaled.new_empty(M, T, rows.shape[-1], rows.shape[-1])
        G[:, :, : self.inputs] = product.view(M, self.inputs, T, -1).transpose(1, 2)
        if bias:
            torch.sum(scaled, 1, out=G[:, :, -1])
        return G + G.mT  # symmetric to the bit
