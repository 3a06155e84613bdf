"""Clients by several threads: the same bits, the caller's random numbers, nothing left at work."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedsso
from fedsso import FedAvg, Federation, Simulation
from fedsso.engine.crew import Crew
from fedsso.models import build
from fedsso.objective.choose import objective
from fedsso.objective.looped import Looped
from fedsso.objective.losses import cross_entropy

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"rounds": 3, "local_steps": 2, "batch_size": 4, "participation": 0.8}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Whatever number of threads a test sets is taken back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def fed() -> Federation:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for n in (10, 15, 5, 10, 15, 10, 5):
        x = torch.randn(n, 1, 8, 8, generator=draw)
        rows.append((x, torch.arange(n) % 3))
    return Federation.from_clients(rows, classes=3, test_fraction=0.2)


class Normed(nn.Module):
    """Convolution, statistics of batches, and dropout where it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.conv(x)).relu())
        out: Tensor = self.head(hidden.view(len(x), -1))
        return out


def normed(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Normed(dropout)


def after(threads: int, fed: Federation, module: Any, algorithm: Any, **more: Any) -> Simulation:
    """A simulation that has run with so many threads."""
    torch.set_num_threads(threads)
    simulation = Simulation(fed, module, algorithm, **OPTIONS | more)
    for _ in simulation:
        pass
    return simulation


@pytest.mark.parametrize("algorithm", [FedAvg(alpha=0.1), fedsso.SCAFFOLD(alpha=0.1)])
@pytest.mark.parametrize("model", ["cnn-small", "normed"])
def test_the_number_of_threads_changes_no_bit(
    fed: Federation, model: str, algorithm: fedsso.Algorithm
) -> None:
    """Models, statistics and what clients keep."""
    module = normed() if model == "normed" else model
    one = after(1, fed, module, algorithm)
    for threads in (2, 3):
        many = after(threads, fed, module, algorithm)
        assert torch.equal(many.models(), one.models())
        assert torch.equal(many.buffers, one.buffers)
        assert torch.equal(many.rows[-1]["train_loss"], one.rows[-1]["train_loss"])
        for kept, alone in zip(many.own, one.own, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(kept, alone, strict=True))
        assert many.crew.together


def test_a_module_that_draws_is_given_the_same_draws(fed: Federation) -> None:
    """It is computed by the caller alone, whose threads share out the work and so round otherwise.

    Other draws of dropout would be felt in the first digit; roundings in float64 grow over six
    steps through three layers to less than 1e-9.
    """
    one = after(1, fed, normed(0.5), FedAvg(alpha=0.1), dtype="float64")
    two = after(2, fed, normed(0.5), FedAvg(alpha=0.1), dtype="float64")
    assert not two.crew.together
    assert (two.models() - one.models()).norm() < 1e-9 * one.models().norm()
    assert torch.allclose(two.buffers, one.buffers, rtol=1e-9)


def test_compressed_uploads_are_the_same_too(fed: Federation) -> None:
    one = after(1, fed, "cnn-small", FedAvg(alpha=0.1), compress="topk:0.1")
    two = after(2, fed, "cnn-small", FedAvg(alpha=0.1), compress="topk:0.1")
    assert torch.equal(one.models(), two.models())
    assert one.errors.keys() == two.errors.keys()
    for name, error in one.errors.items():
        assert torch.equal(error, two.errors[name]), name


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_callers_random_numbers_go_on(fed: Federation, dropout: float) -> None:
    module = normed(dropout)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    after(2, fed, module, FedAvg(alpha=0.1))
    assert torch.equal(torch.rand(3), wanted)


def test_each_thread_computes_with_one_thread_and_the_caller_keeps_its_number(
    fed: Federation,
) -> None:
    torch.set_num_threads(2)
    simulation = Simulation(fed, "cnn-small", FedAvg(alpha=0.1), **OPTIONS)
    seen = []

    def work(_desk: object, share: int) -> int:
        seen.append((torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()))
        return share * share

    assert list(simulation.crew.each(work, [3, 1, 2, 5, 4])) == [9, 1, 4, 25, 16]
    assert {numbers[:2] for numbers in seen} == {(1, False)}
    assert threading.get_ident() not in {ident for _, _, ident in seen}
    assert torch.get_num_threads() == 2
    started = []
    newcomer = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert started == [2]


def test_one_thread_is_the_callers_own(fed: Federation) -> None:
    """With OMP_NUM_THREADS=1, as torchrun sets it, no thread is started."""
    torch.set_num_threads(1)
    simulation = Simulation(fed, "cnn-small", FedAvg(alpha=0.1), **OPTIONS)
    crew = simulation.crew
    found = list(crew.each(lambda desk, _: (desk, threading.get_ident()), [1, 2]))
    assert found == [(crew.desk, threading.get_ident())] * 2


def test_an_error_of_a_client_is_the_callers_and_no_thread_is_left_at_work(
    fed: Federation,
) -> None:
    torch.set_num_threads(2)
    crew = Simulation(fed, "cnn-small", FedAvg(alpha=0.1), **OPTIONS).crew
    at_work = threading.Semaphore(0)
    done = []

    def work(_desk: object, share: int) -> int:
        if share == 1:
            at_work.acquire(timeout=60)
            raise ValueError("client 1")
        at_work.release()
        done.append(share)
        return share

    with pytest.raises(ValueError, match="client 1"):
        list(crew.each(work, [0, 1, 2, 3, 4, 5, 6, 7]))
    count = len(done)
    assert list(crew.each(lambda _, share: share, [1, 2])) == [1, 2]
    assert len(done) == count


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ("mclr", FedAvg(alpha=0.1)),  # stacked
        ("cnn-small", fedsso.LocalNewton()),  # second derivatives switch torch's kernels
    ],
)
def test_what_cannot_be_shared_out_is_not(
    fed: Federation, model: str, algorithm: fedsso.Algorithm
) -> None:
    crew: Crew = Simulation(fed, model, algorithm, **OPTIONS).crew
    assert not crew.together


class Noisy(nn.Module):
    """A convolution whose inputs are scaled by a number that numpy draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * float(np.random.rand())
        return self.layer(scaled).flatten(1)


def test_draws_of_numpy_are_found_out(fed: Federation) -> None:
    """The clients are computed one after the other, with the draws of one thread."""
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        np.random.seed(0)
        simulation = Simulation(fed, Noisy(), FedAvg(alpha=0.1), engine="loop", **OPTIONS)
        for _ in simulation:
            pass
        found.append(simulation.models())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_a_simulation_can_be_copied(fed: Federation) -> None:
    torch.set_num_threads(2)
    simulation = Simulation(fed, "cnn-small", FedAvg(alpha=0.1), **OPTIONS)
    rows = iter(simulation)
    next(rows)
    twin = copy.deepcopy(simulation)
    for one in (simulation, twin):
        for _ in one:
            pass
    assert torch.equal(simulation.models(), twin.models())


def test_threads_that_do_not_start_hang_nothing(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has started is let go: else the process would never end."""
    real = ThreadPoolExecutor.submit
    calls = iter(range(2))

    def second_fails(pool: Any, *work: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("can't start new thread")
        return real(pool, *work)

    torch.set_num_threads(2)
    simulation = Simulation(fed, "cnn-small", FedAvg(alpha=0.1), **OPTIONS)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", second_fails)
    with pytest.raises(RuntimeError, match="new thread"):
        next(iter(simulation))
    own = [one for one in threading.enumerate() if one.name.startswith("fedsso-client")]
    for one in own:
        one.join(60)
        assert not one.is_alive()


# ---- the layout of images in memory ----


def test_only_chains_with_pools_get_another_layout() -> None:
    def layout_of(module: nn.Module) -> torch.memory_format:
        f, _ = objective(module, cross_entropy, "loop", CPU, (3, 16, 16))
        assert isinstance(f, Looped)
        return f.memory_format

    shape = (3, 16, 16)
    assert layout_of(build("cnn-small", shape, 3)) is torch.channels_last
    assert layout_of(build("cnn-small", shape, 3).double()) is torch.contiguous_format
    assert layout_of(build("resnet20-gn", shape, 3)) is torch.contiguous_format
    assert layout_of(nn.ModuleList([build("cnn-small", shape, 3)])) is torch.contiguous_format


def test_the_layout_changes_roundings_alone() -> None:
    """Sums of at most 8 rows * 256 pixels in float32, through four layers: 1e-4 is wide."""
    module = build("cnn-small", (3, 16, 16), 3)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 8, 3, 16, 16, generator=draw)
    batch = fedsso.algorithm.Batch(x, torch.arange(8)[None] % 3, torch.full((1, 8), 1 / 8))
    point = fedsso.objective.ravel(module)[None, None]
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        value, grad = Looped(module, cross_entropy, layout).value_and_grad(point, batch)
        found.append((value, grad))
    (value, grad), (other, turned) = found
    torch.testing.assert_close(other, value, rtol=1e-5, atol=0)
    assert (turned - grad).norm() < 1e-4 * grad.norm()
