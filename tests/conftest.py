"""Small federations that the tests of the core share, and how pytest runs the tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from fedsso import Federation
from fedsso.data import quadratic
from fedsso.regression import ledger
from samples import mark_full

# a command that is started in the background ignores Ctrl-C and hands that down; the tests of
# signals need processes that do not
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

SIZES = (23, 9, 5, 14, 31)
MakeFederation = Callable[..., Federation]

# the same examples on every machine and in every run, however slow
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` selects: mark what the short run leaves out."""
    mark_full(items)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """What the hospitals of another test have answered is no business of this one's."""
    ledger.HERE.clear()


def labelled(
    sizes: Sequence[int], dim: int, classes: int, weights: Sequence[float] | None = None
) -> Federation:
    """Gaussian rows with a centre and a label distribution of each client's own; a quarter are for
    testing."""
    draw = torch.Generator().manual_seed(7)

    def client(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, dim, generator=draw, dtype=torch.float64)
        score = x @ torch.randn(dim, classes, generator=draw, dtype=torch.float64)
        return x + 0.3 * torch.randn(dim, generator=draw, dtype=torch.float64), score.argmax(1)

    return Federation.from_clients([client(n) for n in sizes], classes=classes, weights=weights)


def heterogeneous() -> Federation:
    """Four quadratics in six dimensions with Hessians, minimisers and weights of their own (L = 1,
    mu = 1/8)."""
    draw = torch.Generator().manual_seed(3)
    Q = torch.linalg.qr(torch.randn(4, 6, 6, generator=draw, dtype=torch.float64)).Q
    A = Q @ torch.diag(torch.linspace(1 / 8, 1, 6, dtype=torch.float64)) @ Q.mT
    b = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    return quadratic((A + A.mT) / 2, b, [0.4, 0.3, 0.2, 0.1])


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    """A command sets up the logger of the package; the other tests want it as it was."""
    log = logging.getLogger("fedsso")
    before = log.handlers, log.level
    yield
    log.handlers, log.level = before


@pytest.fixture(scope="session")
def make_fed() -> MakeFederation:
    """Builds a labelled federation of given client sizes."""

    def make(
        sizes: Sequence[int] = SIZES,
        dim: int = 4,
        classes: int = 3,
        weights: Sequence[float] | None = None,
    ) -> Federation:
        return labelled(sizes, dim, classes, weights)

    return make


@pytest.fixture(scope="session")
def fed(make_fed: MakeFederation) -> Federation:
    """Five clients of unequal size, four features, three classes."""
    return make_fed()


@pytest.fixture(scope="session")
def quad() -> Federation:
    """Heterogeneous quadratics with a known minimiser."""
    return heterogeneous()
