"""What one round of each algorithm costs: bytes on the wire and bytes kept, measured beside theory.

Measured means: the algorithm's own functions run, as in the simulator, but on tensors of torch's
device "meta", which have a shape and no numbers. So nothing is computed, no data are needed and any
model size is possible; the bytes are counted on the messages and states that come out. One client
stands for all: every number holds for each client that takes part, in float32.

    d    parameters of the model
    n_c  bytes that FedAvg sends in a round, down and up: 2 x 4 d
    n_m  bytes of one model, which is all that FedAvg's server keeps: 4 d
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import models
from ..algorithm import Algorithm, Attendance, Batch, Cohort, Phase, Tree
from ..algorithm.client_optimizer import PLAIN
from ..algorithm.records import stack
from ..algorithms import ALGORITHMS, make
from ..engine.ledger import Ledger
from ..engine.simulate import fitted
from ..engine.uplink import Errors, uplink
from ..errors import InputError, integer
from ..maths import kronecker
from ..maths.compress import compressor
from ..objective.backend import Layout, ravel
from ..objective.choose import objective
from ..objective.losses import bce, cross_entropy
from ..support.trees import nbytes, tree_map

META = torch.device("meta")
FLOAT = 4  # bytes
ROWS = STEPS = 2  # rows and local steps of the one client; more would change nothing
LOOPS = ("cg_steps", "newton_steps")  # a client's iterations: one has the shapes of all


class Size(NamedTuple):
    """A count of numbers, dd d^2 + d d + one, where d is the number of the model's parameters."""

    d: float = 0
    one: float = 0
    dd: float = 0

    def at(self, d: int) -> float:
        """The count for a model of d parameters."""
        return self.dd * d * d + self.d * d + self.one

    def __str__(self) -> str:
        """The count as a formula in d, such as "2d+1"."""
        terms = [(self.dd, "d²"), (self.d, "d"), (self.one, "")]
        shown = [
            f"{c:+g}{unit}" if abs(c) != 1 or not unit else f"{c:+g}"[0] + unit
            for c, unit in terms
            if c
        ]
        return "".join(shown).removeprefix("+") or "0"


class Cost(NamedTuple):
    """What one round of an algorithm takes, for each client and for the server.

    `exchanges` counts the times that the server sends and the clients answer. `down` and `up` go
    to and from each client. `server` and `client` are what they keep until the next round;
    working memory does not count. `per_client` is what the server remembers of every client of
    the federation, beside `server`.

    Measured costs are in bytes. In theory they are counts of numbers (`Size`).
    """

    exchanges: int
    down: Any
    up: Any
    server: Any
    client: Any
    per_client: Any = 0


class Row(NamedTuple):
    """One algorithm: what was measured, what the paper says, or why it refuses the model.

    `refused` is the reason, and empty for an algorithm that takes the model. Then `measured` is
    None.
    """

    algorithm: str
    measured: Cost | None
    theory: Cost | None
    refused: str = ""


class Bill(NamedTuple):
    """The costs of several algorithms for one model of `d` parameters."""

    d: int
    rows: list[Row]

    def in_bytes(self, theory: Cost) -> Cost:
        """The bytes that theory comes to for this model, in float32."""
        exchanges, *sizes = theory
        return Cost(exchanges, *(round(FLOAT * size.at(self.d)) if size else 0 for size in sizes))

    def relative(self, cost: Cost) -> dict[str, float]:
        """Bytes as multiples of FedAvg's: its round without compression, its server."""
        n_m = FLOAT * self.d
        return {
            "round": (cost.down + cost.up) / (2 * n_m),
            "server": cost.server / n_m,
            "client": cost.client / n_m,
        }


def costs(
    model: str = "mclr",
    algorithms: Sequence[str] | None = None,
    *,
    sample: Sequence[int] = (1, 28, 28),
    classes: int = 10,
    compress: str | None = None,
) -> Bill:
    """The costs of one round of registered algorithms, at their defaults, for a named model.

    Nothing is trained and no data are read, so any size of model is possible.

    Args:
        model: A name of `fedsso.models.MODELS`.
        algorithms: Names of the registry; None: all.
        sample: The shape of one row of the data.
        classes: The outputs of the model; 1 for the logistic loss.
        compress: Compression of the uploads, as the run option of that name.

    Returns:
        A row for each algorithm, in the order of the names.

    Raises:
        InputError: A name is unknown, or a size or the compression is wrong. An algorithm that
            does not take the model is no error: its row says why.

    >>> costs("mclr", ["fedavg"]).rows[0].measured[:3]
    (1, 31400, 31400)
    """
    outputs = integer("classes", classes, 1)
    work = Work(tuple(integer("sample", n, 1) for n in sample), compress, outputs)
    integer("numbers of a sample", prod(work.sample), 1)
    with META:
        module = models.build(model, work.sample, outputs)
    layout = Layout.of(module)
    if compress is not None:
        compressor(compress, layout.shapes)  # refuses what no algorithm could use
    with torch.no_grad():
        rows = [_row(name, make(name), module, work) for name in algorithms or ALGORITHMS]
    return Bill(sum(layout.sizes), rows)


class Work(NamedTuple):
    """What a round is measured on: the shape of a row, the uploads' compression, the outputs."""

    sample: tuple[int, ...]
    compress: str | None
    outputs: int = 2


def _row(name: str, record: Algorithm, module: nn.Module, work: Work) -> Row:
    """Measure one algorithm, and put beside it what its paper counts."""
    # An algorithm may refuse the model while it is fitted, or in its first round.
    theory = None
    try:
        record = fitted(record, module, Attendance(rows=ROWS, sample=work.sample))
        theory = THEORY[name](record) if name in THEORY else None
        return Row(name, measure(record, module, work), theory)
    except InputError as refused:
        return Row(name, None, theory, str(refused))


def measure(record: Algorithm, module: nn.Module, work: Work) -> Cost:
    """The bytes of one round, measured on shapes alone.

    The second round counts. In the first, vectors that start equal are sent once, and states are
    still empty.
    """
    run = Rehearsal(record, module, work)
    run.round(1)
    ledger = run.round(2)
    kept = nbytes(run.own, 1) + nbytes(tuple(run.errors.values()), 1)
    exchanges = len(run.algorithm.phases)
    server, remembered = nbytes(run.server, 1), nbytes(run.memory, 1)
    return Cost(exchanges, ledger.down, ledger.up, server, kept, remembered)


class Rehearsal:
    """One client's rounds, without numbers: the simulator's exchanges on the device "meta"."""

    def __init__(self, record: Algorithm, module: nn.Module, work: Work) -> None:
        """Prepare the objective, the algorithm and its states, as the simulator does.

        Iterations of a client's inner solver are cut to one: each has the shapes of the others.
        """
        self.work = work
        loss = bce if work.outputs == 1 else cross_entropy
        self.f, _ = objective(module, loss, "stacked", META, work.sample)
        x = ravel(module).unsqueeze(0)
        short = replace(cast(Any, record), **{name: 1 for name in LOOPS if hasattr(record, name)})
        self.algorithm: Algorithm = stack([short], x.dtype, META)
        self.server, self.own = self.algorithm.server_init(x), self.algorithm.client_init(x)
        self.memory = self.algorithm.memory_init(x)
        self.uplink, self.errors = (
            uplink(self.algorithm, self.server, self.f.layout, work.compress),
            Errors(),
        )

    def round(self, k: int) -> Ledger:
        """The exchanges of round k, as the simulator has them.

        Args:
            k: The number of the round, from 1 on.

        Returns:
            The bytes that went down and up, of a client that is not the lead.
        """
        total, one = Ledger(1, 1), torch.arange(1)
        for number, phase in enumerate(self.algorithm.phases):
            ledger = Ledger(1, 1) if phase.lead else total  # one client in many is the lead
            message = self._speak(phase, ledger, one)
            local = Shapes(k, int(phase.steps(torch.tensor(STEPS))), self.work.sample)
            reply = phase.client(
                self.f, message, tree_map(lambda leaf: leaf.unsqueeze(0), self.own), local
            )
            sent, read = self.uplink(phase, number, [0], reply.upload, self.errors)
            ledger.upload(sent, 1)
            self.own = tree_map(lambda leaf: leaf[0], reply.own)
            held = tree_map(lambda leaf: leaf.unsqueeze(0), self.memory)
            heard, held = phase.receive(self.server, read, held, k)
            self.memory = tree_map(lambda leaf: leaf[0], held)
            everybody = torch.ones(1, device=META)
            mean = heard if phase.apart else phase.over_clients(everybody, heard)
            self.server = phase.server(self.server, mean, Cohort(k, 1, one, 1.0, local.steps))
        return total

    def _speak(self, phase: Phase, ledger: Ledger, one: Tensor) -> Tree:
        """The server's message, counted."""
        if phase.apart:
            message = phase.broadcast(self.server, one)
            ledger.letters(message)
            return message
        message = phase.broadcast(self.server)
        ledger.broadcast(message, one)
        return message


class Shapes:
    """The `Local` of one client whose rows have a shape and no numbers.

    An algorithm asks it for mini-batches, for all rows and for random draws. What it gets has the
    right shapes, so that every tensor that follows has them too.
    """

    def __init__(self, k: int, steps: int, sample: Sequence[int]) -> None:
        self.k, self.steps = k, steps
        self.own_steps = torch.empty(1, 1, 1, device=META)
        self.optimizer = PLAIN
        rows, labels = (
            torch.empty(1, ROWS, *sample, device=META),
            torch.empty(1, ROWS, dtype=torch.long, device=META),
        )
        self._batch = Batch(rows, labels, torch.empty(1, ROWS, device=META))

    def batch(self, j: int) -> Batch:  # noqa: ARG002
        """Every mini-batch looks the same."""
        return self._batch

    def active(self, j: int) -> Tensor | None:  # noqa: ARG002
        """The client takes every step."""
        return None

    def full(self) -> Iterator[Batch]:
        """All rows in one piece."""
        yield self._batch

    def uniform(self, purpose: str, n: int) -> Tensor:  # noqa: ARG002
        """Draws without numbers."""
        return torch.empty(1, n, device=META)


# ---- theory: the papers' counts, with the numbers of our line search and our store of pairs ----

Theory = Callable[[Any], Cost]
SEARCH = 11  # losses of a line search: at x and at ten steps


def _even(exchanges: int, vectors: float, server: float, client: float = 0) -> Theory:
    """As many vectors down as up."""
    return lambda _: Cost(exchanges, Size(vectors), Size(vectors), Size(server), Size(client))


def _rank(a: Any, one: int) -> Size:
    """A gradient, R eigenvalues and eigenvectors, and `one` numbers more."""
    R = int(a.compressor.removeprefix("rank:"))
    return Size(1 + R, R + one)


def _places(a: Any) -> int:
    """K values and their places."""
    return 2 * int(a.compressor.removeprefix("topk:"))


def _kept(a: Any) -> Any:
    """The matrices of which FedSSO keeps A and C: not the bias of a model of one layer."""
    return a.matrices[:1] if a.by_client else a.matrices


# of Newton-Learn without the m_i numbers that a client keeps, of Basis Learn with r = d
THEORY: dict[str, Theory] = {
    "fedsso": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=Size(1),
        server=Size(2 * a.pairs + 3, 2 * kronecker.numbers(_kept(a))),
        client=Size(),
    ),  # s and y of each pair; x, g, s; A and C of the weights, in float64; all clients answer, so
    # there is no memory of each
    "fedavg": _even(1, 1, server=1),
    "fedsgd": _even(1, 1, server=1),
    "fedprox": _even(1, 1, server=1),
    "fednova": lambda _: Cost(1, Size(1), Size(1, 1), Size(1), Size()),
    "fedavgm": _even(1, 1, server=2),
    "fedadagrad": _even(1, 1, server=3),
    "fedadam": _even(1, 1, server=3),
    "fedyogi": _even(1, 1, server=3),
    "fedac": _even(1, 2, server=2),
    "scaffold": _even(1, 2, server=2, client=1),
    "feddane": _even(2, 2, server=2),
    "dane": _even(2, 2, server=2),
    "done": _even(2, 2, server=2),
    "giant": lambda _: Cost(3, Size(3), Size(2, SEARCH), Size(3), Size()),
    "localnewton": lambda _: Cost(2, Size(2), Size(1, SEARCH + 1), Size(2), Size()),
    "stem": lambda _: Cost(1, Size(2, 1), Size(2), Size(2), Size()),  # a count of steps goes down
    "ldsgd": lambda a: Cost(a.I2, Size(a.I2), Size(a.I2), Size(1), Size()),
    "fednl": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=_rank(a, a.option - 1),
        server=Size(2, dd=1),
        client=Size(dd=1),
    ),
    "fednl-ls": lambda a: Cost(
        exchanges=2,
        down=Size(2),
        up=_rank(a, SEARCH),
        server=Size(3, dd=1),
        client=Size(dd=1),
    ),
    "fednl-pp": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=_rank(a, 1),
        server=Size(2, dd=1),
        client=Size(2, dd=1),
    ),
    "fedpm": lambda _: Cost(1, Size(1), Size(1.5, dd=0.5), Size(1), Size()),
    "fednew": _even(1, 1, server=1, client=1),
    "fedsophia": _even(1, 1, server=1, client=2),
    "fedper": lambda a: Cost(1, Size(1, -a.own), Size(1, -a.own), Size(1, -a.own), Size(0, a.own)),
    "fedexp": lambda _: Cost(1, Size(1), Size(1, 1), Size(2), Size()),  # the last two iterates
    "fedacg": _even(1, 1, server=2),
    "diloco": _even(1, 1, server=2),
    "serverlion": _even(1, 1, server=2),
    "servermuon": _even(1, 1, server=2),
    "fedvarp": lambda _: Cost(1, Size(1), Size(1), Size(2), Size(), Size(1)),  # x and the mean
    "mifa": lambda _: Cost(1, Size(1), Size(1), Size(2), Size(), Size(1)),
    "aide": lambda a: Cost(2 * a.inner, Size(2 * a.inner), Size(2 * a.inner), Size(2), Size()),
    "disco": lambda a: Cost(
        1 + a.products * (2 if a.precondition == "lead" else 1),
        Size(1 + a.products),
        Size(1 + a.products),
        Size(6 + 2 * a.pairs * (a.precondition == "bfgs")),
        Size(),
    ),  # of a client that is not the lead
    "harmofl": lambda a: Cost(1, Size(1, a.part.numbers), Size(1), Size(1), Size()),
    "mocha": lambda a: Cost(
        1,
        Size(1, 2 * a.outputs),
        Size(1),
        Size(2 * a.tasks, a.outputs * a.tasks**2),
        Size(0, a.outputs * a.most_rows),
    ),  # W, B and Sigma; a dual variable for each row and output
    "anderson": lambda a: Cost(1, Size(1), Size(1), Size(2 * a.m + 3), Size()),
    "nl1": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=Size(1 + a.K, a.K),
        server=Size(1, dd=1),
        client=Size(),
    ),
    "nl2": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=Size(1 + a.K, a.K + 1),
        server=Size(1, dd=2),
        client=Size(),
    ),
    "bl1": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=Size(1, _places(a)),
        server=Size(3, dd=1),  # x, w, gw and H
        client=Size(dd=2),  # V and L
        per_client=Size(dd=1),  # V
    ),
    "bl2": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=Size(1, _places(a) + 1),
        server=Size(2, dd=1),
        client=Size(2, dd=2),
        per_client=Size(1, 1, dd=1),
    ),
    "bl3": lambda a: Cost(
        exchanges=1,
        down=Size(1),
        up=Size(1, _places(a) + 2),
        server=Size(1, dd=1),
        client=Size(dd=2),
        per_client=Size(dd=1),
    ),
}
