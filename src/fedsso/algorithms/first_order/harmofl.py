"""HarmoFL. Jiang, Wang and Dou, "HarmoFL: Harmonizing Local and Global Drifts in Federated Learning
on Heterogeneous Medical Images", AAAI 2022.

    x      global model theta
    F      two-dimensional Fourier transform of an image, channel by channel
    A_i    mean of |F| over the images of client i
    A      mean of the A_i
    L      share of the frequencies whose amplitudes are replaced
    b      floor(L min(height, width)), half the width of their square around frequency 0
    alpha  client step
    rho    length of the perturbation, alpha in the paper

It is for images that differ from client to client in brightness, contrast and the like, as those of
scanners do. Two things are added to FedAvg.

Amplitudes. Clients send A_i with their first update, and from then on replace the amplitudes |F| of
their images by A near frequency 0, keeping the phases. In the first round, when A is not known, a
client takes its own A_i. With L = 0, as in the released code, b = 0 and the mean of every channel
becomes that of all clients. Images are normalised before they are tested, too: who uses the model
later must do the same (`normalised`).

Flatness. A local step takes the gradient at theta + rho g / |g| instead of g, the gradient at theta
(sharpness-aware minimisation). So a step costs two gradients.

The released code weights clients alike, here they count with their weights p_i: with as many images
at each client, to which the authors cut them, that is the same. It computes A_i from the first
mini-batch alone, by a slip of types; here it is that of all images. If nobody answers in round 1,
images stay as they are.

Only amplitudes near frequency 0 travel, n = channels x height x width of their square: d + n
numbers down in each round, and d up, in the first round d + n. A row without channels counts as one
channel, a vector as an image of one line. With rho = 0 and normalise="none" this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ...algorithm import (
    Algorithm,
    Attendance,
    Batch,
    Cohort,
    Local,
    Objective,
    Reply,
    Scalar,
    Step,
    at,
    hyper,
    norm,
    not_negative,
    param,
    positive,
    share,
)
from ...algorithm import local as solver
from ...errors import InputError, one_of

TINY = 1e-12  # added to |g|


class State(NamedTuple):
    """Server state."""

    x: Tensor  # [trials, d]
    A: Tensor  # [trials, n], flattened; 0 as long as it is not known
    grad_norm: Tensor  # [trials, 1] length of (x_k - v_k) / (alpha tau)


class Message(NamedTuple):
    """To the clients."""

    x: Tensor
    A: Tensor


class Upload(NamedTuple):
    """To the server."""

    delta: Tensor
    A: Any  # [M, trials, n] in round 1, else ()


class Square(NamedTuple):
    """The frequencies around 0 of an image [channels, height, width], where it is fftshifted."""

    rows: slice
    columns: slice
    numbers: int  # n, the amplitudes in it


def square(sample: tuple[int, ...], L: float) -> Square:
    """The square of half-width b = floor(L min(height, width)), cut at the borders.

    >>> square((3, 28, 28), 0.1).numbers
    75
    """
    channels, height, width = (1,) * (3 - len(sample)) + tuple(sample)
    b = int(L * min(height, width))

    def around(size: int) -> range:
        middle = size // 2
        return range(size)[max(0, middle - b) : middle + b + 1]

    rows = around(height)
    columns = around(width)
    n = channels * len(rows) * len(columns)
    return Square(slice(rows.start, rows.stop), slice(columns.start, columns.stop), n)


def shape_of(text: str) -> tuple[int, ...]:
    """The shape that a text such as 3x32x32 tells.

    Raises:
        InputError: It is none, or has more than three axes.
    """
    sizes = text.split("x")
    if len(sizes) > 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise InputError(
            f"HarmoFL is for images, or rows of at most three axes; got sample={text!r}; give it "
            "as in 3x32x32, or use fedavg"
        )
    return tuple(map(int, sizes))


def fitting(given: str, rows: tuple[int, ...]) -> str:
    """The shape that counts, as text: the given one, so that vectors may stand for images.

    Args:
        given: What the user says, or nothing.
        rows: The shape of the federation's rows; () where nobody knows it.

    Raises:
        InputError: Nobody knows the shape, it has more than three axes, or the given one does not
            fit the rows.
    """
    if not (given or rows):
        raise InputError(
            "HarmoFL must know the shape of the images, which a server on a network does not; "
            "give it, as in sample='3x32x32'"
        )
    text = given or "x".join(map(str, rows))
    if rows and prod(rows) != prod(shape_of(text)):
        raise InputError(f"sample={text!r} does not fit rows of shape {rows}; leave it out")
    return text


def spectrum(images: Tensor) -> Tensor:
    """F of images [..., channels, height, width], frequency 0 in the middle."""
    shifted: Tensor = torch.fft.fftshift(torch.fft.fft2(images), (-2, -1))
    return shifted


def amplitudes(images: Tensor, part: Square) -> Tensor:
    """|F| in the square, [..., n]."""
    return spectrum(images)[..., part.rows, part.columns].abs().flatten(-3)


def normalised(images: Tensor, A: Tensor, part: Square) -> Tensor:
    """Images whose amplitudes in the square are A, with their own phases.

    Args:
        images: [..., channels, height, width].
        A: [..., n], of the same leading axes or fewer.
        part: The square.

    A frequency without amplitude has the phase 0, as in numpy's angle.
    """
    F = spectrum(images)
    inner = F[..., part.rows, part.columns]
    phase = torch.polar(torch.ones_like(inner.real), inner.angle())
    wanted = A.reshape(*A.shape[:-1], *inner.shape[-3:])
    F[..., part.rows, part.columns] = wanted * phase
    new: Tensor = torch.fft.ifft2(torch.fft.ifftshift(F, (-2, -1)))
    return new.real


def as_images(samples: Tensor, lead: int, sample: tuple[int, ...]) -> Tensor:
    """Rows as [..., channels, height, width], behind so many leading axes."""
    return samples.reshape(*samples.shape[:lead], *(1,) * (3 - len(sample)), *sample)


def mean_amplitudes(local: Local, sample: tuple[int, ...], part: Square) -> Tensor:
    """A_i over all rows of each client, [M, n]."""
    parts = []
    for piece in local.full():
        found = amplitudes(as_images(piece.x, 2, sample), part)
        parts.append((piece.weight.unsqueeze(-1) * found).sum(1))
    return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class Flat:
    """The gradients of a local step: those at theta + rho g / |g|, on prepared batches.

    Args:
        f: The clients' losses.
        rho: Length of the perturbation, a number or [trials, 1].
        prepare: What to do with a batch.
    """

    f: Objective
    rho: Scalar
    prepare: Callable[[Batch], Batch]

    def value_and_grad(
        self, x: Tensor, batch: Batch, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss at x, and the gradient beside it."""
        batch = self.prepare(batch)
        loss, g = self.f.value_and_grad(x, batch)
        length = norm(g).to(x.dtype) + TINY
        _, g = self.f.value_and_grad(x + self.rho * g / length, batch, out)
        return loss, g


@hyper
class HarmoFL(Algorithm):
    """Federated averaging on images with harmonised amplitudes, with flat-minimum local training.

    >>> HarmoFL(alpha=0.1, L=0.05).rho
    0.05
    """

    any_client: ClassVar[bool] = True

    alpha: Step = param(default=0.01, doc="client step size α")
    rho: Scalar = param(default=0.05, doc="length ρ of the perturbation; 0: none")
    normalise: str = param(
        default="amplitude", doc="what all images have in common: amplitude or none"
    )
    L: float = param(
        default=0.0, doc="fraction of the frequencies in common; 0: the channels' means"
    )
    sample: str = param(
        default="", doc="shape of an image, such as 3x32x32; empty: that of the federation"
    )

    def __post_init__(self) -> None:
        positive(self, "alpha")
        not_negative(self, "rho")
        share(self, "L")
        one_of("normalise", self.normalise, ("amplitude", "none"))
        if self.sample:
            self.shape  # noqa: B018  # refuses what is no shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row as numbers."""
        return shape_of(self.sample)

    @property
    def normalises(self) -> bool:
        """Whether images are changed."""
        return self.normalise == "amplitude"

    @property
    def part(self) -> Square:
        """The frequencies whose amplitudes are replaced."""
        return square(self.shape, self.L)

    def join(self, attendance: Attendance, d: int) -> Self:  # noqa: ARG002
        """The record for a federation, whose rows have a shape."""
        return replace(self, sample=fitting(self.sample, attendance.sample))

    def server_init(self, x: Tensor) -> State:
        """A = 0: it is not known yet."""
        A = x.new_zeros(x.shape[0], self.part.numbers if self.normalises else 0)
        return State(x, A, x.new_zeros(x.shape[0], 1).double())

    def broadcast(self, server: State) -> Message:
        return Message(server.x, server.A)

    def client(self, f: Objective, message: Message, own: tuple[()], local: Local) -> Reply:
        """Local SGD with flat gradients on normalised images; sends A_i in round 1."""
        A = shared(message.A)
        sent: Any = ()
        if self.normalises and local.k == 1:
            A = mean_amplitudes(local, self.shape, self.part).to(message.x.dtype).unsqueeze(1)
            sent = A.expand(-1, message.x.shape[0], -1)
        step: Any = Flat(f, self.rho, lambda batch: batch._replace(x=self._seen(batch.x, 2, A)))
        delta, loss = solver.sgd(step, message.x, local, at(self.alpha, local.k))
        return Reply(Upload(delta, sent), own, loss)

    def server(self, server: State, mean: Upload, cohort: Cohort) -> State:
        """The updates are averaged as in FedAvg, and after round 1 the amplitudes."""
        g = norm(mean.delta) / (at(self.alpha, cohort.k) * cohort.steps)
        A = mean.A if self.normalises and cohort.k == 1 else server.A
        return State(server.x + mean.delta, A, g)

    def prepare(self, server: State, samples: Tensor) -> Tensor:
        """Rows are normalised before they are tested."""
        return self._seen(samples, 2, shared(server.A))

    def _seen(self, samples: Tensor, lead: int, A: Tensor) -> Tensor:
        """Rows with the amplitudes A, where these are known; they have so many leading axes."""
        if not self.normalises:
            return samples
        new = normalised(as_images(samples, lead, self.shape), A, self.part)
        return torch.where((A > 0).any(), new.view(samples.shape), samples)

    def diagnostics(self, server: State) -> dict[str, Tensor]:
        return {"grad_norm": server.grad_norm[:, 0]}


def shared(A: Tensor) -> Tensor:
    """The amplitudes that all trials share, [n].

    They are those of the same images in each trial; one that diverged in round 1 has 0.
    """
    return A.amax(0)
