"""The guard that asks nothing about the clients."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

import fedsso
from fedsso.algorithms import cautious, trust_region
from fedsso.server import Server

H = torch.diag(torch.tensor([1.0, 0.3, 0.1, 0.02], dtype=torch.float64))
TARGET = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)
LENGTHS = 1e-9  # what rounding makes of a comparison of lengths


def mean_of_clients(x: Tensor, step: float = 0.5) -> Tensor:
    """What clients make of x, on average: one step of size `step` down a quadratic."""
    return x - step * H @ (x - TARGET)


def run(record: fedsso.FedSSO, steps: float, rounds: int = 20) -> list[Tensor]:
    """The server's models of so many rounds."""
    server = Server(record, steps)
    models = [torch.zeros(4, dtype=torch.float64)]
    for _ in range(rounds):
        x = models[-1]
        models.append(server.step(x, mean_of_clients(x)))
    return models


def careful(**fields: object) -> fedsso.FedSSO:
    return fedsso.FedSSO(**{"alpha": 1.0, "guard": "cautious", **fields})  # type: ignore[arg-type]


def test_the_first_step_is_fedavgs() -> None:
    models = run(careful(), 1)
    torch.testing.assert_close(models[1], mean_of_clients(models[0]), rtol=1e-15, atol=0)


@pytest.mark.parametrize("unit", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("form", ["bfgs", "lbfgs"])
def test_the_unit_of_the_gradient_does_not_matter(unit: float, form: str) -> None:
    """A step size that is wrong by a factor of 100 changes nothing but rounding.

    Rounding may be amplified by the condition of H, here 50, in each of 20 rounds.
    """
    right = run(careful(form=form), 1)
    wrong = run(careful(alpha=0.3 * unit, form=form), 37)
    torch.testing.assert_close(wrong[-1], right[-1], rtol=1e-6, atol=1e-6)


def test_it_is_far_ahead_of_averaging_on_a_quadratic() -> None:
    ours = run(careful(), 1, 30)
    averaged = [ours[0]]
    for _ in range(30):
        averaged.append(mean_of_clients(averaged[-1]))
    error = (ours[-1] - TARGET).norm()
    assert error < 1e-2 * (averaged[-1] - TARGET).norm()


def test_no_step_is_longer_than_the_radius_nor_stops_before_fedavg() -> None:
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    longest = 0.0
    for _ in range(30):
        noise = torch.randn(4, generator=generator, dtype=torch.float64)
        u = x - mean_of_clients(x) + noise
        new = server.step(x, x - u)
        assert server.state is not None
        radius = float(server.state.guard.radius)
        length = float((new - x).norm())
        assert length <= radius * (1 + LENGTHS)
        longest = max(longest, float(u.norm()))
        assert radius >= float(u.norm()) * (1 - LENGTHS)
        assert radius <= max(5 * float(u.norm()), longest) * (1 + LENGTHS)
        x = new


def test_updates_that_drift_for_good_take_it_five_times_as_far_as_fedavg_at_most() -> None:
    """All agree and none becomes shorter, so that agreement alone would go further and further."""
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    for _ in range(12):
        x = server.step(x, x + TARGET)
        assert server.diagnostics()["stretch"] <= 5 * (1 + LENGTHS)
    assert server.diagnostics()["stretch"] == pytest.approx(5)


def test_short_updates_may_take_it_as_far_as_a_long_one_before() -> None:
    """On a quadratic updates become short, while the minimum of its flat directions is far."""
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    longest = 0.0
    stretches = []
    for _ in range(20):
        u = float((mean_of_clients(x) - x).norm())
        longest = max(longest, u)
        new = server.step(x, mean_of_clients(x))
        assert float((new - x).norm()) <= max(5 * u, longest) * (1 + LENGTHS)
        x = new
        stretches.append(server.diagnostics()["stretch"])
    assert max(stretches) > 5


def pairs_of_steps(trials: int = 50) -> tuple[Tensor, Tensor]:
    """u and n [trials, 3] at all angles, both downhill; n is 1.1 to 11 times as long as u."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(trials, 3, generator=generator, dtype=torch.float64)
    n = torch.randn(trials, 3, generator=generator, dtype=torch.float64)
    n = n * (n * u).sum(-1, keepdim=True).sign()
    factor = 1.1 + 9.9 * torch.rand(trials, 1, generator=generator, dtype=torch.float64)
    return u, n * factor * length(u) / length(n)


def length(v: Tensor) -> Tensor:
    return v.norm(dim=-1, keepdim=True)


def step_of(u: Tensor, n: Tensor, radius: Tensor, work: float = 0.7) -> Tensor:
    """What the server subtracts from x where FedAvg subtracts u and the quasi-Newton step n."""
    guard = trust_region.start(u)._replace(radius=radius)
    move, _ = cautious.advance(guard, 1.0, work, u / work, n.clone())
    return -move


def test_no_further_than_fedavg_means_fedavgs_step() -> None:
    """With r = |u| a longer n turns nothing, whatever its angle; |n| itself may have rounding."""
    u, n = pairs_of_steps()
    torch.testing.assert_close(step_of(u, n, length(u)), u, rtol=1e-12, atol=1e-12)
    nearly = length(u) * (1 + 1e-14)
    torch.testing.assert_close(step_of(u, n, nearly), u, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.5, 3.0, 20.0])
def test_no_step_is_longer_than_the_radius_at_any_angle(factor: float) -> None:
    u, n = pairs_of_steps()
    radius = factor * length(u)
    assert (length(step_of(u, n, radius)) <= radius * (1 + LENGTHS)).all()
    straight = step_of(u, 5 * u, radius)  # n points as u does: the radius is used up
    torch.testing.assert_close(length(straight), radius.minimum(5 * length(u)))


def test_the_quasi_newton_step_counts_more_with_a_larger_radius() -> None:
    """From not at all, where r = |u|, to alone, where r = |n|."""
    u, n = pairs_of_steps()
    parts = []
    for along in torch.linspace(0, 1, 6, dtype=torch.float64):
        step = step_of(u, n, length(u) + along * (length(n) - length(u)))
        parts.append(length(step - u) / length(n - u))
    assert (torch.stack(parts).diff(dim=0) > 0).all()
    torch.testing.assert_close(parts[0], torch.zeros_like(parts[0]))
    torch.testing.assert_close(parts[-1], torch.ones_like(parts[-1]))


def test_noise_alone_is_averaged() -> None:
    """Updates without a common direction give no reason to go beyond FedAvg's model."""
    server = Server(careful(), 1)
    x = torch.zeros(1000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        u = torch.randn(1000, generator=generator, dtype=torch.float64)
        x = server.step(x, x - u)
        assert server.diagnostics()["stretch"] == pytest.approx(1.0, abs=0.2)


def test_a_loss_that_rises_takes_the_server_back(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(careful(), 1)
    models = [torch.zeros(4, dtype=torch.float64)]
    averages = []
    for loss in (3.0, 2.5, 2.0, 1.9, 1.8, 1.7):
        averages.append(mean_of_clients(models[-1]))
        models.append(server.step(models[-1], averages[-1], loss=loss))
    assert server.diagnostics()["stretch"] > 1
    with caplog.at_level(logging.WARNING):
        back = server.step(models[-1], mean_of_clients(models[-1]), loss=9.0)
    assert torch.equal(back, averages[-1])  # of the round with the lowest loss
    assert server.diagnostics()["falls"] == 1
    assert "round 7: the last step made things worse" in caplog.text
    x = server.step(back, mean_of_clients(back), loss=1.8)
    torch.testing.assert_close(x, mean_of_clients(back), rtol=1e-14, atol=0)  # it begins anew


def test_an_update_that_jumps_takes_the_server_back_without_any_loss() -> None:
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    for _ in range(5):
        average = mean_of_clients(x)
        before = x
        x = server.step(x, average)
    assert server.diagnostics()["stretch"] > 1
    back = server.step(x, x - 11 * (before - average))
    assert torch.equal(back, average)


def test_after_three_falls_it_only_averages() -> None:
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    for falls in range(1, cautious.PATIENCE + 1):
        for _ in range(cautious.WINDOW + 1):
            x = server.step(x, mean_of_clients(x), loss=1.0)
        x = server.step(x, mean_of_clients(x), loss=100.0)
        assert server.diagnostics()["falls"] == falls
    for _ in range(10):
        average = mean_of_clients(x)
        x = server.step(x, average, loss=1.0)
        torch.testing.assert_close(x, average, rtol=1e-14, atol=1e-15)


def test_a_server_that_averages_never_goes_back() -> None:
    """Neither after its last fall, nor where rounding makes a step a bit longer than FedAvg's."""
    x = torch.zeros(1, 4)
    used = cautious.start(x, used=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    net = used._replace(losses=zero.expand(1, cautious.WINDOW) + 1, stretch=zero + 2)
    loss = zero + 100
    assert cautious.misled(net, loss, zero + 1).all()
    assert not cautious.misled(net._replace(stretch=zero + 1 + 1e-4), loss, zero + 100).any()
    assert not cautious.misled(net._replace(falls=zero + cautious.PATIENCE), loss, zero + 1).any()


def test_after_a_fall_the_length_of_the_bad_update_does_not_count() -> None:
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    for _ in range(6):
        u = x - mean_of_clients(x)
        x = server.step(x, x - u)
    back = server.step(x, x - 100 * u)
    assert server.diagnostics()["falls"] == 1
    server.step(back, mean_of_clients(back))
    assert server.state is not None
    assert float(server.state.net.trend) == 0


def test_a_fall_of_one_trial_leaves_its_neighbour_alone() -> None:
    """Two trials in one batch, of which one diverges, are what they are alone."""
    fed = fedsso.load("digits", clients=5, partition="iid")
    records = [careful(alpha=0.01), careful(alpha=30.0)]
    options = {"rounds": 12, "local_epochs": 1, "batch_size": 50, "client": "momentum"}
    both = fedsso.compare(fed, "mlp", records, **options)
    alone = fedsso.simulate(fed, "mlp", records[0], **options)
    torch.testing.assert_close(both[0].x, alone.x, rtol=1e-4, atol=1e-4)


def test_it_resumes_where_it_was() -> None:
    record = careful()
    whole = run(record, 1, 12)
    server = Server(record, 1)
    x = torch.zeros(4, dtype=torch.float64)
    for _ in range(6):
        x = server.step(x, mean_of_clients(x), loss=None)
    other = Server(record, 1)
    other.restore(x, server.tensors())
    for _ in range(6):
        x = other.step(x, mean_of_clients(x))
    assert torch.equal(x, whole[-1])


def test_it_goes_on_from_a_version_that_did_not_know_the_longest_update() -> None:
    """It then bounds the radius by this update alone."""
    server = Server(careful(), 1)
    x = torch.zeros(4, dtype=torch.float64)
    for _ in range(6):
        x = server.step(x, mean_of_clients(x))
    other = Server(careful(), 1)
    known = server.tensors()
    del known["server.net.longest"]
    other.restore(x, known)
    u = (x - mean_of_clients(x)).norm()
    x = other.step(x, mean_of_clients(x))
    assert other.state is not None
    assert float(other.state.guard.radius) <= 5 * float(u) * (1 + LENGTHS)


# ---- unequal work ----


def test_clients_of_unequal_work_are_averaged_as_fedavg_does() -> None:
    """On quadratics f_i = h_i (x - c_i)^2 / 2, tau_i steps of alpha move x by
    (1 - (1 - alpha h_i)^tau_i)(c_i - x); the server sees their weighted mean, and FedSSO ends
    where FedAvg does, since both stand still where that mean is 0."""
    h = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    c = torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64)
    weight = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    steps = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)
    moved = 1 - (1 - 0.1 * h) ** steps
    still = (weight * moved * c).sum() / (weight * moved).sum()

    server = Server(careful(), 1)
    x = torch.zeros(1, dtype=torch.float64)
    rounds = 0
    while abs(float(x - still)) > 1e-8 and rounds < 100:
        x = server.step(x, x + (weight * moved * (c - x)).sum())
        rounds += 1
    averaged = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        averaged = averaged + (weight * moved * (c - averaged)).sum()
    assert abs(float(x - still)) <= 1e-8
    assert abs(float(averaged - still)) > 1e-8  # FedAvg needs more rounds
