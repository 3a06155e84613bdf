"""What an algorithm is: a frozen record of hyper-parameters and the pure functions of one round.

A round is a list of exchanges between server and clients, called phases. Each of them is

    message = broadcast(state)                      the server speaks
    upload  = client(f, message, own, local)        every client works, and answers
    state   = server(state, mean upload, cohort)    the server goes on

The mean is that of the decoded uploads, weighted with the clients' weights p_i over those who
answered.

Engines own the loop, the weighted mean, the randomness, the devices and the network. Algorithms
only compute, for any number of clients and trials at once. A *trial* is one setting of a sweep, or
one seed. Arrays of the server are [trials, d], those of clients [clients, trials, d],
hyper-parameters [trials, 1]. `algorithms/first_order/fedavg.py` is the smallest complete example:
read it next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..support.trees import Scalar, Tree, tree_map
from .client_optimizer import ClientOptimizer

BLOW_UP = 1e3  # a loss this many times the first one is an explosion
FORGOTTEN = 20.0  # how often the others answer before the server forgets who does not


class Batch(NamedTuple):
    """Rows of M clients, padded to the same number B.

    Weights are 0 on padding. They sum to 1 over a client's rows of the batch; in a full pass, which
    comes in several batches, over all of these together.

    Where rows are sparse, x is a matrix [M B, M width] of layout CSR with the rows of client m in
    block m of its diagonal, and `transposed` its transpose, as CSR.
    """

    x: Tensor  # [M, B, *sample]
    y: Tensor  # [M, B], or [M, trials, B] where trials see targets of their own
    weight: Tensor  # [M, B]
    key: int = 0  # seed for modules that draw (dropout)
    transposed: Tensor | None = None  # of sparse rows


class Objective(Protocol):
    """The clients' losses f_i, each at points of its own: x [M, trials, d].

    An engine makes it from the model and the loss, and hands it to the clients' functions.
    """

    def value_and_grad(
        self, x: Tensor, batch: Batch, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss [M, trials] and gradient [M, trials, d], which is written into `out` if given."""
        ...

    def value(self, x: Tensor, batch: Batch) -> Tensor:
        """The loss alone, [M, trials]."""
        ...

    def hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """The Hessian at x times v, [M, trials, d]."""
        ...

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:
        """The Hessian at x, [M, trials, d, d]."""
        ...

    def rows(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The inputs a_j [M, B, d] of a linear model, and phi''_j at x [M, trials, B].

        The loss of row j is phi_j(a_j^T x). Only models with one output are of this form.
        """
        ...

    def bartlett(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        """An estimate of the Hessian's diagonal, [M, trials, d].

        It draws targets from the model's own distribution, by uniform numbers u [M, B].
        """
        ...


class Local(Protocol):
    """What M clients hold in one exchange: their rows, steps and random numbers.

    The M clients are a cohort, or as many of a cohort as fit into memory.
    """

    k: int  # the round, 1, 2, ...
    steps: int  # the most local steps that any of them takes
    own_steps: Tensor  # [M, 1, 1]: the local steps that each really takes
    optimizer: ClientOptimizer  # what they step with, where the algorithm leaves that open

    def batch(self, j: int) -> Batch:
        """The mini-batch of local step j; it is overwritten by the next call."""
        ...

    def active(self, j: int) -> Tensor | None:
        """[M, 1, 1] of 0 and 1: who takes step j; None means everybody."""
        ...

    def full(self) -> Iterator[Batch]:
        """All training rows, piece by piece.

        Each piece overwrites the one before, and the last mini-batch.
        """
        ...

    def uniform(self, purpose: str, n: int) -> Tensor:
        """Uniform draws in (0, 1), [M, n]: each client has its own.

        They are a function of seed, purpose, client and round, so that a run can be repeated.
        """
        ...


class Cohort(NamedTuple):
    """Who answered in this exchange."""

    k: int  # the round
    size: int  # how many clients answered
    clients: Tensor  # which ones
    mass: float  # their share of all clients' weights p_i
    steps: float  # weighted mean of their local steps
    loss: Tensor | None = None  # [trials, 1]: weighted mean of the losses that they report


class Attendance(NamedTuple):
    """Who takes part in a run, and what is known of their problem beforehand."""

    clients: int = 1  # how many there are
    some_absent: bool = False  # whether some may be missing in a round
    compressed: bool = False  # whether uploads lose something on their way
    rows: int = 0  # the most training rows that one of them holds; 0: nobody knows
    sample: tuple[int, ...] = ()  # the shape of a row; (): nobody knows
    l2: float = 0.0  # strength of the penalty l2/2 |x|^2
    # Whether each of them sends one step along the gradient of all its rows, and the model is a
    # single linear layer, so that the loss is convex.
    exact: bool = False
    only_means: bool = False  # whether the server sees the mean of the uploads alone
    share: float = 1.0  # the part of the clients that is asked in a round


class Reply(NamedTuple):
    """What a client function returns."""

    upload: Tree  # goes to the server, as it is sent
    own: Tree = ()  # stays with the client until its next exchange
    loss: Tensor | None = None  # [M, trials] mean loss, which clients report anyway
    unsent: Tensor | None = None  # [M, trials] bytes of zeros in the upload that are left out


def weighted_mean(weights: Tensor, uploads: Tree) -> Tree:
    """The mean over some clients with these weights [M]; leaves [M, trials, ...]."""

    def mean(leaf: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(weights.to(leaf.dtype), leaf, 1)
        return total

    return tree_map(mean, uploads)


def as_sent(upload: Tree) -> Tree:
    """The upload itself is what is averaged."""
    return upload


def as_received(
    server: Any,  # noqa: ARG001
    upload: Tree,
    memory: Tree,
    k: int,  # noqa: ARG001
) -> tuple[Tree, Tree]:
    """The server remembers nothing about single clients."""
    return upload, memory


def none(tau: Tensor) -> Tensor:
    """An exchange without local steps."""
    return torch.zeros_like(tau)


class Phase(NamedTuple):
    """One exchange between server and clients.

    A tensor that a client has received earlier in the round need not be sent again: put the same
    object into the message, and it is neither counted nor, over a network, repeated.

    `steps` turns the user's tau into the mini-batch steps of each client in this exchange: none by
    default, `self.local_steps` for tau. `decode` turns an upload as it was sent (factors, indices)
    into the tree that is averaged. `receive` is for servers that remember their clients
    (`Algorithm.receive`). `largest` names fields of the decoded upload, a named tuple, of which
    the server is given the maximum over the clients instead of the mean. No sum of uploads tells
    it, so that secure aggregation cannot hide these fields.

    `average` is what the server is given of some clients in place of their mean: from their shares
    in the mean [M], which add up to 1 over all clients of the round, and their decoded uploads. It
    is called for some clients at a time, and what it returns is added up. A server that sees only
    means must do without it (`Attendance.only_means`).

    A `lead` exchange is with one client alone: the first of those who answer in this round.

    In an exchange that is `apart` every client has a message and an ear of its own. The engine
    calls `broadcast(state, clients)` with the numbers of the clients, and gets leaves
    [clients, trials, ...]. `server` gets all uploads in the order of `Cohort.clients`, of the same
    shape, instead of their mean.
    """

    broadcast: Callable[..., Tree]
    client: Callable[[Any, Any, Any, Local], Reply]
    server: Callable[[Any, Any, Cohort], Any]
    steps: Callable[[Tensor], Tensor] = none
    decode: Callable[[Tree], Tree] = as_sent
    receive: Callable[[Any, Any, Any, int], tuple[Tree, Tree]] = as_received
    fresh: bool = False  # a new sample of clients instead of the one before
    exact: bool = False  # uploads are never compressed: the losses of a line search
    lead: bool = False  # the first client alone
    apart: bool = False  # a message to each client, and all uploads instead of their mean
    largest: tuple[str, ...] = ()  # fields of which the server is given the maximum
    average: Callable[[Tensor, Tree], Tree] = weighted_mean

    def over_clients(self, weights: Tensor, uploads: Tree) -> Tree:
        """What the server is given of the uploads of some clients, leaves [trials, ...].

        Args:
            weights: The share of each of these clients in the mean, [M].
            uploads: Decoded, leaves [M, trials, ...].
        """
        reduced = self.average(weights, uploads)
        if not self.largest:
            return reduced
        return reduced._replace(**{n: getattr(uploads, n).amax(0) for n in self.largest})

    def together(self, some: Tree, others: Tree) -> Tree:
        """The same of all clients, from what `over_clients` makes of two parts of them."""
        reduced = tree_map(torch.add, some, others)
        if not self.largest:
            return reduced
        most = {n: torch.maximum(getattr(some, n), getattr(others, n)) for n in self.largest}
        return reduced._replace(**most)


class Algorithm:
    """Base of all records: one phase, no client state, the model is `server.x`.

    A subclass must give `server_init`, `client` and `server`. All else has a default. It is made
    a record by `@hyper`, and its fields are declared by `param`. This one is FedAvg with half of
    its server step:

    >>> import fedsso
    >>> from fedsso.algorithm import Reply, hyper, local, param
    >>> class State(NamedTuple):
    ...     x: Tensor
    >>> @hyper
    ... class Half(fedsso.Algorithm):
    ...     alpha: float = param(default=0.1, doc="client step", swept=True)
    ...
    ...     def server_init(self, x):
    ...         return State(x)
    ...
    ...     def client(self, f, x, own, rows):
    ...         delta, loss = local.sgd(f, x, rows, self.alpha)
    ...         return Reply(delta, own, loss)
    ...
    ...     def server(self, server, delta, cohort):
    ...         return State(server.x + delta / 2)
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> run = fedsso.simulate(fed, "mclr", Half(), rounds=10)
    >>> run.final() > 0.8
    True

    Functions must not change what is passed in, must not branch on the numbers in a tensor, and
    must work for any number of clients and trials. They draw random numbers by `Local.uniform`
    alone.
    """

    # What the engine has to know of the class. Instances cannot change it.
    needs_all: ClassVar[str] = ""  # if all clients must answer: which algorithm bears absence
    alone: ClassVar[bool] = False  # clients one at a time: their work takes d x d memory
    squares: ClassVar[int] = 0  # d x d matrices that the work of one client takes at once
    personal: ClassVar[bool] = False  # every client has a model of its own
    any_client: ClassVar[bool] = False  # its clients may run any optimizer instead of plain SGD

    def asks(self) -> str:
        """What it asks of the objective beyond gradients.

        That is "hvp" (second derivatives), "rows" (a linear model with one output), "targets"
        (draws from the model) or "". A model or loss that lacks it is refused before the run
        begins.
        """
        return ""

    def fit(
        self,
        sizes: Sequence[int],  # noqa: ARG002
        shapes: Sequence[Sequence[int]] = (),  # noqa: ARG002
    ) -> Self:
        """The record for a given model. The engine calls it once before the run.

        Args:
            sizes: How many numbers each layer has, in the order of x. A weight and its bias are
                one layer.
            shapes: The shapes of the single parameters, in the same order. The engine always
                gives them.

        Returns:
            This record, or one with fields filled in. Most algorithms need not know the model.
        """
        return self

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record for a given federation and a model of d parameters.

        The engine calls it once before the run, after `fit`. It returns this record, or one with
        fields filled in.
        """
        return self

    def server_init(self, x: Tensor) -> Any:
        """Server state from the initial model x [trials, d].

        The state is a tree of tensors, each with the trials as its first axis. It is all that is
        kept between rounds, and what checkpoints hold.
        """
        raise NotImplementedError(f"{type(self).__name__} needs server_init")

    def client_init(self, x: Tensor) -> Tree:  # noqa: ARG002
        """State that one client keeps between rounds; leaves [trials, ...]."""
        return ()

    def memory_init(self, x: Tensor) -> Tree:  # noqa: ARG002
        """What the server remembers of one client before its first answer; leaves [trials, ...]."""
        return ()

    def receive(self, server: Any, upload: Any, memory: Any, k: int) -> tuple[Tree, Tree]:
        """What the server makes of single uploads, before they are averaged.

        A server that must tell its clients apart, such as one that remembers what each of them
        sent last, overrides it. Uploads come in parts, and are not kept: all that later steps need
        must be in what this returns.

        Args:
            server: The state before this exchange.
            upload: The decoded uploads of some of the clients, leaves [M, trials, ...].
            memory: What the server remembers of them, leaves [M, trials, ...].
            k: The round.

        Returns:
            What is averaged instead of the uploads and handed to `server`, and what the server
            remembers from now on, of the shape that `memory_init` gave it.
        """
        return as_received(server, upload, memory, k)

    def forget(self, server: Any, lost: Any) -> Any:  # noqa: ARG002
        """The server's state without clients that have not answered for long.

        The engine calls it before a round when the others have answered twenty times each, on
        average, since these clients did. It then remembers them as before their first answer.

        Args:
            server: The state before.
            lost: The sum of p_i times what the server remembered of them, leaves [trials, ...].
        """
        return server

    def local_steps(self, tau: Tensor) -> Tensor:
        """The local steps each client takes when the user asks for tau."""
        return tau

    def model(self, server: Any, own: Any) -> Tensor:  # noqa: ARG002
        """The model that is evaluated, [trials, d].

        If `personal`, there is one for each client, [clients, trials, d].
        """
        x: Tensor = server.x
        return x

    def prepare(self, server: Any, samples: Tensor) -> Tensor:  # noqa: ARG002
        """What the evaluated model sees of rows [1, rows, *sample]: by default these rows."""
        return samples

    def broadcast(self, server: Any) -> Tree:
        """The message to the clients: by default the model alone."""
        return server.x

    def client(self, f: Objective, message: Any, own: Any, local: Local) -> Reply:
        """Work of the clients in one exchange.

        Args:
            f: The clients' losses, for points [M, trials, d].
            message: What `broadcast` returned, leaves [trials, ...].
            own: What each client has kept since its last exchange, leaves [M, trials, ...].
            local: Their rows, steps and random numbers.

        Returns:
            The upload and the new state, leaves [M, trials, ...]. The state must have the shape
            that `client_init` gave it.
        """
        raise NotImplementedError(f"{type(self).__name__} needs client")

    def server(self, server: Any, mean: Any, cohort: Cohort) -> Any:
        """New server state from the weighted mean of the uploads.

        Args:
            server: The state before, which must not be changed.
            mean: The mean of the decoded uploads, leaves [trials, ...]. The fields that the phase
                calls `largest` hold the maximum over the clients.
            cohort: Who answered, and after how many steps.

        Returns:
            A state of the same shape.
        """
        raise NotImplementedError(f"{type(self).__name__} needs server")

    def bears(self, server: Any) -> Scalar:  # noqa: ARG002
        """How many times the first loss a round from this state may show.

        Beyond that it has exploded. One number, or [trials].
        """
        return BLOW_UP

    def undo(self, server: Any) -> tuple[Any, Tensor] | None:  # noqa: ARG002
        """What to do where a round from this state explodes.

        Returns the state to go on from, and which trials can go on, [trials] of booleans; None if
        no trial can. A trial that cannot has diverged.
        """
        return None

    def diagnostics(self, server: Any) -> dict[str, Tensor]:  # noqa: ARG002
        """Columns of the trace that this algorithm knows, each [trials].

        Usual names are grad_norm, ys, overridden, skipped, radius, gamma and alpha.
        """
        return {}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The exchanges of one round, in order."""
        only = Phase(
            self.broadcast, self.client, self.server, self.local_steps, receive=self.receive
        )
        return (only,)
