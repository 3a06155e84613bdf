"""What our engine is compared with: FedAvg as a plain loop over clients, and as a hand-written
stack of them.

Both take cohorts and mini-batches from the engine's own draws, inside the timed part, as the engine
does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsso.data import Federation
from fedsso.engine.rounds import Ints, Rounds
from fedsso.engine.settings import Settings
from fedsso.objective import ravel


class Draws:
    """Who takes part, with which weight, and which rows each of its steps sees."""

    def __init__(self, fed: Federation, settings: Settings) -> None:
        self.rounds = Rounds(fed, settings)
        self.tau = settings.local_steps or 0
        self.position = [0] * fed.clients
        self.p = fed.p.float()
        self.k = 0

    def cohort(self) -> tuple[list[int], Tensor]:
        """Clients of the next round and their shares of the mean."""
        self.k += 1
        who = self.rounds.plan(self.k).answered
        return who.tolist(), self.p[who] / self.p[who].sum()

    def blocks(self, client: int) -> Iterator[Ints]:
        """Rows of the client's next local steps, as blocks [steps, width] of equal batches."""
        start = self.position[client]
        end = self.position[client] = start + self.tau
        while start < end:
            block = self.rounds.batches(client, start, end - start)
            start += len(block)
            yield block


class Loop:
    """Client after client: an `nn.Module`, `torch.optim.SGD` and indexed rows."""

    def __init__(
        self, fed: Federation, settings: Settings, module: nn.Module, alpha: float
    ) -> None:
        self.fed, self.module, self.draws = fed, module, Draws(fed, settings)
        self.params = list(module.parameters())
        self.optimiser = torch.optim.SGD(self.params, lr=alpha)

    @property
    def x(self) -> Tensor:
        """The global model as one flat vector."""
        return ravel(self.module)

    def round(self) -> None:
        """One round of FedAvg."""
        who, share = self.draws.cohort()
        start = [p.detach().clone() for p in self.params]
        mean = [torch.zeros_like(p) for p in start]
        for client, w in zip(who, share.tolist(), strict=True):
            self._load(start)
            for block in self.draws.blocks(client):
                for rows in torch.from_numpy(block):
                    self._step(rows)
            with torch.no_grad():
                for m, p in zip(mean, self.params, strict=True):
                    m.add_(p, alpha=w)
        self._load(mean)

    def _step(self, rows: Tensor) -> None:
        scale, shift = self.fed.affine
        x = self.fed.x[rows].float().mul_(scale).add_(shift)
        self.optimiser.zero_grad()
        F.cross_entropy(self.module(x), self.fed.y[rows]).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()

    def _load(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)


class Stacked:
    """Softmax regression from zero, several clients at a time: weights [M, 10, 784], logits [M, 10,
    B].

    Rows stay uint8 until they are gathered into buffers that are used again. The pixel range is
    folded into the weights, W (scale x + shift) = scale (W x) + shift W 1, and steps are added to
    the weights by baddbmm.
    """

    def __init__(self, fed: Federation, settings: Settings, alpha: float, chunk: int) -> None:
        self.fed, self.draws, self.alpha, self.chunk = fed, Draws(fed, settings), alpha, chunk
        self.width = self.draws.rounds.width
        self.flat = fed.x.flatten(1)
        n = chunk * int(self.width.max())
        self.raw, self.wide = (
            self.flat.new_empty(n, self.flat.shape[1]),
            torch.empty(n, self.flat.shape[1]),
        )
        self.W, self.b = torch.zeros(fed.classes, self.flat.shape[1]), torch.zeros(fed.classes)
        self.minus = torch.tensor(-1.0)

    @property
    def x(self) -> Tensor:
        """The global model as one flat vector."""
        return torch.cat((self.W.flatten(), self.b))

    def round(self) -> None:
        """One round of FedAvg; clients of similar size share a chunk, so that little is padded."""
        who, share = self.draws.cohort()
        order = torch.from_numpy(np.argsort(-self.width[who], kind="stable"))
        W, b = torch.zeros_like(self.W), torch.zeros_like(self.b)
        for part in torch.split(order, self.chunk):
            theirs = self._train([who[i] for i in part.tolist()])
            W += torch.tensordot(share[part], theirs[0], 1)
            b += torch.tensordot(share[part], theirs[1], 1)
        self.W, self.b = W, b

    def _train(self, clients: list[int]) -> tuple[Tensor, Tensor]:
        """The local models of a few clients."""
        rows, weight = self._draw(clients)
        M = len(clients)
        W, b = self.W.repeat(M, 1, 1), self.b.repeat(M, 1)
        once = bool(
            (self.draws.rounds.per_epoch[clients] == 1).all()
        )  # every step sees the same rows
        for j in range(self.draws.tau):
            if j == 0 or not once:
                x, y = self._gather(rows[j])
            self._step(W, b, x, y, weight[j])
        return W, b

    def _draw(self, clients: list[int]) -> tuple[Tensor, Tensor]:
        """Row indices [tau, M, B] and weights [tau, M, 1, B].

        Clients with fewer rows are padded: a row is repeated with weight 0.
        """
        shape = self.draws.tau, len(clients), int(self.width[clients].max())
        rows, weight = np.empty(shape, np.int64), np.zeros(shape, np.float32)
        for m, client in enumerate(clients):
            j = 0
            for block in self.draws.blocks(client):
                n, width = block.shape
                rows[j : j + n, m, :width] = block
                rows[j : j + n, m, width:] = block[:, :1]
                weight[j : j + n, m, :width] = 1 / width
                j += n
        return torch.from_numpy(rows), torch.from_numpy(weight).unsqueeze(2)

    def _gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels 0..255 as floats [M, B, 784], and labels [M, 1, B]."""
        index = rows.reshape(-1)
        raw, wide = self.raw[: len(index)], self.wide[: len(index)]
        torch.index_select(self.flat, 0, index, out=raw)
        wide.copy_(raw)
        return wide.view(*rows.shape, -1), self.fed.y.index_select(0, index).view(len(rows), 1, -1)

    def _step(self, W: Tensor, b: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """One SGD step of every client, in place."""
        scale, shift = self.fed.affine
        z = torch.baddbmm((b + shift * W.sum(-1)).unsqueeze(-1), W, x.transpose(1, 2), alpha=scale)
        e = z.softmax(1).scatter_add_(1, y, self.minus.expand(y.shape)).mul_(weight)
        slope = e.sum(-1)
        W.baddbmm_(e, x, alpha=-self.alpha * scale).sub_(
            slope.unsqueeze(-1), alpha=self.alpha * shift
        )
        b.sub_(slope, alpha=self.alpha)
