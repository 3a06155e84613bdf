"""HarmoFL by hand.

Amplitudes: F[0] of a vector is its sum, so with L = 0 the sum of a row becomes sign(sum) times the
mean of all |sums|. Client 1 has the rows (1, 3) and (2, 2), both of sum 4; client 2 has (-1, -1) of
sum -2 and (3, 3) of sum 6, A_2 = 4. With two rows each A = (4 + 4) / 2 = 4, and every row x becomes
x + (sign 4 - sum) / 2: (1, 3), (2, 2), (-2, -2), (2, 2).

Flatness: f(x) = 1/2 (x - b)^T A (x - b) with A = diag(3, 4), b = (1, 1), from 0: g = -(3, 4), |g| =
5, the perturbed point is -rho (3/5, 4/5), the gradient there g - rho (9/5, 16/5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, simulate
from fedsso.algorithms import FedAvg, HarmoFL
from fedsso.algorithms.first_order.harmofl import amplitudes, normalised, spectrum, square
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation

OPTIONS: dict[str, Any] = {
    "local_steps": 3,
    "batch_size": 4,
    "dtype": "float64",
    "device": "cpu",
    "seed": 1,
}
SHAPE = (2, 6, 5)


def images(n: int = 7) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.rand(n, *SHAPE, generator=draw, dtype=torch.float64) - 0.3


def go(fed: Federation, algorithm: Any, rounds: int, model: str = "mclr", **options: Any) -> Run:
    result: Run = simulate(fed, model, algorithm, rounds=rounds, **{**OPTIONS, **options})
    return result


# ---- amplitudes ----


def test_means_by_hand() -> None:
    x = torch.tensor([[1, 3], [2, 2], [-1, -1], [3, 3]], dtype=torch.float64).view(4, 1, 1, 2)
    part = square((2,), 0)
    assert amplitudes(x, part).flatten().tolist() == pytest.approx([4, 4, 2, 6], abs=1e-15)
    new = normalised(x, torch.tensor([4.0], dtype=torch.float64), part)
    expected = [1, 3, 2, 2, -2, -2, 2, 2]
    assert new.flatten().tolist() == pytest.approx(expected, abs=1e-14)


def test_the_server_learns_the_mean_amplitude_once() -> None:
    clients = [([[1.0, 3.0], [2.0, 2.0]], [0, 1]), ([[-1.0, -1.0], [3.0, 3.0]], [0, 1])]
    fed = Federation.from_clients(clients, test_fraction=0)
    sim = Simulation(fed, "mclr", [HarmoFL()], rounds=3, **OPTIONS)
    assert sim.server.A.tolist() == [[0]]
    for k in (1, 2):
        run(sim, k)
        assert sim.server.A.tolist() == [[pytest.approx(4, abs=1e-14)]]
    up = [float(row["bytes_up"][0]) for row in sim.rows[1:]]
    down = [float(row["bytes_down"][0]) for row in sim.rows[1:]]
    d = 6
    assert up == [2 * (d + 1) * 8, 2 * d * 8]  # A_i comes with the first update alone
    assert down == [2 * (d + 1) * 8] * 2


@pytest.mark.parametrize("L", [0, 0.2, 0.4, 0.9])
def test_normalised_images(L: float) -> None:
    """Real, unchanged by a second time, with the wanted amplitudes, the old phases and all else.

    Sums have 30 terms of size 1, and a transform there and back: 1e-13 is generous.
    """
    x, part = images(), square(SHAPE, L)
    A = amplitudes(images(12), part).mean(0)
    new = normalised(x, A, part)
    close = {"rtol": 0, "atol": 1e-13}
    torch.testing.assert_close(normalised(new, A, part), new, **close)
    torch.testing.assert_close(amplitudes(new, part), A.expand(len(x), -1), **close)
    torch.testing.assert_close(normalised(x, amplitudes(x, part), part), x, **close)
    before, after = spectrum(x), spectrum(new)
    torch.testing.assert_close(after.imag * before.real, after.real * before.imag, **close)
    outside = torch.ones(SHAPE, dtype=torch.bool)
    outside[:, part.rows, part.columns] = False
    torch.testing.assert_close(after[:, outside], before[:, outside], **close)


def test_no_band_is_a_shift_of_the_means() -> None:
    """x_c + (sign(sum x_c) A_c - sum x_c) / (height width)."""
    x, part = images(), square(SHAPE, 0)
    A = torch.tensor([3.0, 11.0], dtype=torch.float64)
    total = x.sum((-2, -1), keepdim=True)
    expected = x + (total.sign() * A.view(2, 1, 1) - total) / 30
    torch.testing.assert_close(normalised(x, A, part), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("sample", "L", "n"),
    [((3, 32, 32), 0, 3), ((28, 28), 0.1, 25), ((4,), 0, 1), (SHAPE, 0.5, 50), (SHAPE, 0.9, 60)],
)
def test_numbers_that_travel(sample: tuple[int, ...], L: float, n: int) -> None:
    """floor(0.1 * 28) = 2 is a square of 5 x 5; floor(0.5 * 5) = 2 one of 5 x 5 in 6 x 5."""
    assert square(sample, L).numbers == n


# ---- flatness ----


@pytest.mark.parametrize("rho", [0, 0.5])
def test_flat_step(rho: float) -> None:
    fed = quadratic([[[3, 0], [0, 4]]], [[1, 1]], [1])
    record = HarmoFL(alpha=0.1, rho=rho, normalise="none")
    x = go(fed, record, 1, "linear", local_steps=1, batch_size=None).x
    expected = [0.1 * (3 + rho * 9 / 5), 0.1 * (4 + rho * 16 / 5)]
    assert x.tolist() == pytest.approx(expected, abs=1e-13)


# ---- reductions ----


@pytest.mark.parametrize("model", ["mclr", "mlp"])
def test_is_fedavg_without_both(fed: Federation, model: str) -> None:
    ours = go(fed, HarmoFL(alpha=0.1, rho=0, normalise="none"), 4, model, participation=0.6)
    theirs = go(fed, FedAvg(alpha=0.1), 4, model, participation=0.6)
    assert torch.equal(ours.x, theirs.x)
    for column in ("train_loss", "test_loss", "grad_norm", "bytes_up", "bytes_down"):
        assert ours.trace[column][1:].tolist() == theirs.trace[column][1:].tolist()


def bright(offsets: list[float]) -> Federation:
    """The same images at every client, each client with a brightness of its own."""
    draw = torch.Generator().manual_seed(4)
    x = torch.rand(24, 1, 4, 4, generator=draw, dtype=torch.float64)
    y = (x[:, 0, :, :2].sum((1, 2)) > x[:, 0, :, 2:].sum((1, 2))).long()
    fed = Federation.from_clients([(x + o, y) for o in offsets], test_fraction=0, classes=2)
    in_order = torch.arange(len(fed.x))
    return replace(fed, train_rows=in_order)


def test_clients_of_other_brightness_become_alike() -> None:
    """After round 1 all clients see the same images: each does what one client with them does.

    Round 1 is left out: then every client takes its own amplitudes, which differ.
    """
    fed = bright([0.0, 0.5, 2.0])
    sim = Simulation(fed, "mclr", [HarmoFL(alpha=0.3)], rounds=4, **{**OPTIONS, "batch_size": None})
    run(sim, 4)
    seen = sim.algorithm.prepare(sim.server, fed.x[None]).view(3, 24, 1, 4, 4)
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(seen[2], seen[0], rtol=0, atol=1e-13)


def test_tests_see_normalised_rows(fed: Federation) -> None:
    """The loss in the trace is that of the model on prepared rows."""
    sim = Simulation(fed, "mclr", [HarmoFL(alpha=0.1)], rounds=2, **OPTIONS)
    run(sim, 2)
    rows = fed.x[fed.test_rows].double()
    prepared = sim.algorithm.prepare(sim.server, rows[None])[0]
    weight, bias = sim.server.x[0].split([12, 3])
    z = prepared @ weight.view(3, 4).mT + bias
    loss = torch.nn.functional.cross_entropy(z, fed.y[fed.test_rows])
    assert float(sim.rows[2]["test_loss"][0]) == pytest.approx(float(loss), rel=1e-12)
    assert not torch.allclose(prepared, rows)


def test_a_first_round_without_answers_leaves_rows_as_they_are(fed: Federation) -> None:
    sim = Simulation(fed, "mclr", [HarmoFL()], rounds=3, **OPTIONS)
    samples = fed.x[None, :5].double()
    assert torch.equal(sim.algorithm.prepare(sim.server, samples), samples)


# ---- what is refused ----


def test_clients_of_a_run_are_not_evaluated_on_raw_rows(fed: Federation) -> None:
    with pytest.raises(InputError, match="expects prepared rows"):
        go(fed, HarmoFL(), 1).clients()


@pytest.mark.parametrize("wrong", [{"alpha": 0}, {"rho": -1}, {"L": 1}, {"L": -0.1}])
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        HarmoFL(**wrong)


def test_a_shape_that_does_not_fit_the_rows(fed: Federation) -> None:
    with pytest.raises(InputError, match=r"sample='3x3' does not fit rows of shape \(4,\)"):
        go(fed, HarmoFL(sample="3x3"), 1)


def test_vectors_may_stand_for_images() -> None:
    """The same rows as images of 4 x 4, and as vectors of 16 with the shape given."""
    fed = bright([0.0, 1.0])
    flat = replace(fed, x=fed.x.flatten(1))
    a = go(fed, HarmoFL(L=0.3), 3).x
    b = go(flat, HarmoFL(L=0.3, sample="1x4x4"), 3).x
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sample", ["2x3x4x5", "3xa", "0x4", "3x"])
def test_wrong_shape(sample: str) -> None:
    with pytest.raises(InputError, match="at most three axes; got sample="):
        HarmoFL(sample=sample)


def test_unknown_normalisation() -> None:
    with pytest.raises(InputError, match="amplitude"):
        HarmoFL(normalise="amplitud")
