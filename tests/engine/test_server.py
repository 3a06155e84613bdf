"""The server's step outside the simulator: equal to it, restorable, and honest about what the
clients saw."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedsso
from fedsso.algorithm.contract import Attendance
from fedsso.algorithms.fedsso import State
from fedsso.data import quadratic
from fedsso.engine import checkpoint
from fedsso.server import STORE, Server

FORMS = ("bfgs", "bfgs-dense", "dfp", "dfp-dense", "lbfgs")
A = torch.diag(torch.tensor([1.0, 0.5, 0.2, 0.05], dtype=torch.float64))
B = torch.tensor([1.0, -1.0, 0.5, 0.2], dtype=torch.float64)


def trained(x: Tensor, alpha: float, steps: int) -> Tensor:
    """What one client with f(x) = (x - b)^T A (x - b) / 2 makes of x."""
    for _ in range(steps):
        x = x - alpha * A.to(x.dtype) @ (x - B.to(x.dtype))
    return x


def go(server: Server, x: Tensor, rounds: int) -> Tensor:
    for _ in range(rounds):
        x = server.step(x, trained(x, 0.3, 3))
    return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("guard", ["adaptive", "none"])
def test_it_is_the_simulators_step(form: str, guard: str) -> None:
    record = fedsso.FedSSO(alpha=0.3, form=form, guard=guard)
    fed = quadratic(A[None], B[None], [1.0])
    options = {
        "rounds": 9,
        "local_steps": 3,
        "batch_size": None,
        "dtype": "float64",
        "init": "zero",
    }
    run = fedsso.simulate(fed, "linear", record, **options)
    x = go(Server(record, 3), torch.zeros(4, dtype=torch.float64), 9)
    torch.testing.assert_close(x, run.x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_restored_it_goes_on_to_the_bit(form: str, tmp_path: Path) -> None:
    record = fedsso.FedSSO(alpha=0.3, form=form, pairs=3)  # a ring that is full after a few rounds
    for rounds in (0, 1, 2, 6):
        server, start = Server(record, 3), torch.zeros(4)
        x = go(server, start, rounds)
        again = Server(record, 3)
        if rounds:
            path = tmp_path / f"{rounds}.safetensors"
            checkpoint.save(path, server.tensors(), "a server")
            again.restore(x, checkpoint.load(path))
        assert torch.equal(go(again, x, 5), go(server, x, 5))
        assert again.k == rounds + 5


def test_only_the_slots_in_use_are_saved() -> None:
    server = Server(fedsso.FedSSO(alpha=0.3), 3)
    go(server, torch.zeros(4), 2)
    assert server.tensors()[STORE].shape == (1, 2, 2, 4)


def test_a_model_that_was_changed_between_rounds_counts_as_the_step() -> None:
    """Rounded to halves on the way to the clients, s and y stay those of the models that the
    clients saw."""
    server, x = Server(fedsso.FedSSO(alpha=0.3), 3), torch.zeros(4)
    seen = []
    for _ in range(6):
        seen.append(x)
        x = server.step(x, trained(x, 0.3, 3)).half().float()
    state = server.state
    assert isinstance(state, State)
    kept = state.curvature.store[0, :5, 0]  # type: ignore[union-attr]
    assert torch.equal(kept, torch.stack([b - a for a, b in pairwise(seen)]))


def test_neither_model_is_changed() -> None:
    server, x = Server(fedsso.FedSSO(alpha=0.3), 3), torch.ones(4)
    v = trained(x, 0.3, 3)
    before = x.clone(), v.clone()
    new = server.step(x, v)
    assert torch.equal(x, before[0])
    assert torch.equal(v, before[1])
    kept = new.clone()
    new += 1  # the caller's own
    assert isinstance(server.state, State)
    assert torch.equal(server.state.x[0], kept)


def test_resets_count_steps_and_step_sizes_count_rounds() -> None:
    record = fedsso.FedSSO(alpha=0.3, R=4)
    server, x = Server(record, 3), torch.zeros(4)
    held = []
    for k in (1, 2, 3, 6, 7):  # rounds 4 and 5 were sat out
        x = server.step(x, trained(x, 0.3, 3), k)
        assert isinstance(server.state, State)
        held.append(int(server.state.curvature.held))  # type: ignore[union-attr]
    assert held == [0, 1, 2, 0, 1]
    assert (server.k, server.steps) == (7, 5)
    late = Server(fedsso.FedSSO(alpha=fedsso.Decay(1.0, 1.0), guard="none", eta=1.0), 1)
    x, v = torch.ones(2), torch.zeros(2)
    assert torch.allclose(late.step(x, v, 9), x - (x - v) / fedsso.Decay(1.0, 1.0)(9))


def test_another_size_and_another_form_are_refused() -> None:
    server = Server(fedsso.FedSSO(alpha=0.3), 3)
    x = go(server, torch.zeros(4), 2)
    with pytest.raises(fedsso.InputError, match="the model has 3 parameters"):
        server.step(x[:3], x[:3])
    with pytest.raises(fedsso.InputError, match="another form"):
        Server(fedsso.FedSSO(alpha=0.3, form="bfgs-dense"), 3).restore(x, server.tensors())
    with pytest.raises(fedsso.InputError, match=r"the saved server.x is .* of shape \(1, 4\)"):
        Server(fedsso.FedSSO(alpha=0.3), 3).restore(x[:3], server.tensors())
    with pytest.raises(fedsso.InputError, match="have 3 numbers, the model has 4"):
        Server(fedsso.FedSSO(alpha=0.1, shapes="3"), 1).step(torch.zeros(4), torch.zeros(4))
    with pytest.raises(fedsso.InputError, match="local_steps"):
        Server(fedsso.FedSSO(alpha=0.3), 0)


def test_a_model_that_somebody_moves_uphill_teaches_nothing() -> None:
    """Then s is not the server's step, so neither B s nor the slope is known: no pair, the same
    radius and gamma."""
    server = Server(fedsso.FedSSO(alpha=0.3), 3)
    x = go(server, torch.zeros(4, dtype=torch.float64), 3)
    assert server.state is not None
    before, g = server.state.guard, server.state.g[0]
    moved = x + 5 * g
    server.step(moved, trained(moved, 0.3, 3))
    assert server.diagnostics()["skipped"] == 1
    assert torch.equal(server.state.guard.radius, before.radius)
    assert torch.equal(server.state.guard.gamma, before.gamma)


def test_a_caller_who_halves_every_step_does_not_teach_it_that_b_is_too_steep() -> None:
    """The share of -B^-1 g that was taken is then half, the slope too: gamma goes by what happened
    along the step."""
    whole, half = Server(fedsso.FedSSO(alpha=0.3), 3), Server(fedsso.FedSSO(alpha=0.3), 3)
    x = torch.zeros(4, dtype=torch.float64)
    go(whole, x, 25)
    for _ in range(25):
        x = x + 0.5 * (half.step(x, trained(x, 0.3, 3)) - x)
    assert 1 < whole.diagnostics()["gamma"] < 20
    assert half.diagnostics()["gamma"] < 2 * whole.diagnostics()["gamma"]


def test_a_step_that_it_would_have_to_choose_is_refused() -> None:
    """It cannot tell the clients, whom somebody else runs: alpha="auto" is refused before any
    round."""
    with pytest.raises(fedsso.InputError, match=r"alpha.*auto"):
        Server(fedsso.FedSSO(), 3)


def test_joining_decides_the_memory_but_not_the_drift() -> None:
    """A server that gets vectors does not know how many layers the model has."""
    server = Server(fedsso.FedSSO(alpha=0.1, guard="adaptive"), 2)
    server.join(Attendance(10, some_absent=True), 1000)
    assert server.record.memory == "clients"
    assert server.record.drift == "auto"
