"""The server step as a torch optimizer: equal to the simulator, and as torch expects of one."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import parity_problem as problem
from fedsso import FedSSO, InputError
from fedsso.optim import ServerBFGS
from fedsso.server import Server

FORMS = ("bfgs", "bfgs-dense", "dfp", "dfp-dense", "lbfgs")


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def put_mean(model: nn.Module, x: Tensor) -> None:
    """What a framework does: the clients' mean of x - v as the gradient."""
    rows = [(a.to(x.dtype), b.to(x.dtype)) for a, b in problem.clients()]
    moved = [x - problem.local(x, data) for data in rows]
    mean = torch.stack(moved, -1) @ problem.weights().to(x.dtype)
    for p, part in zip(model.parameters(), mean.split([problem.INPUTS, 1]), strict=True):
        p.grad = part.view_as(p).to(p.dtype, copy=True)


def go(model: nn.Module, optimizer: ServerBFGS, rounds: int) -> list[float]:
    losses = []
    for _ in range(rounds):
        optimizer.zero_grad()
        put_mean(model, flat(model))
        optimizer.step()
        losses.append(problem.global_loss(flat(model)))
    return losses


def build(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, ServerBFGS]:
    model = problem.Net().to(dtype)
    return model, ServerBFGS(model.parameters(), problem.ALPHA, problem.TAU, **settings)


def test_a_hand_written_loop_is_the_simulation() -> None:
    expected, x = problem.simulate(12)
    model, optimizer = build()
    assert go(model, optimizer, 12) == pytest.approx(expected[1:], abs=problem.SINGLE)
    torch.testing.assert_close(flat(model), x, rtol=0, atol=problem.SINGLE)
    assert expected[8] < expected[2] < expected[0]
    assert optimizer.server.k == 12
    assert optimizer.server.diagnostics()["grad_norm"] > 0


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    frozen=st.integers(0, 3),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.float64]), min_size=4, max_size=4),
    seed=st.integers(0, 999),
)
def test_it_is_the_servers_step_on_the_parameters_in_order(
    sizes: list[int], frozen: int, dtypes: list[torch.dtype], seed: int
) -> None:
    """Whatever tensors the model is cut into, with one that is frozen among them."""
    draw = torch.Generator().manual_seed(seed)
    params = [
        nn.Parameter(torch.randn(n, 2, generator=draw).to(d).mT)
        for n, d in zip(sizes, dtypes, strict=False)
    ]
    wide = torch.float64 if torch.float64 in [p.dtype for p in params] else torch.float32
    still = torch.randn(3, generator=draw)
    inert = nn.Parameter(still.clone(), requires_grad=False)
    optimizer = ServerBFGS([*params[:frozen], inert, *params[frozen:]], 0.2, 3)
    server, x = (
        Server(FedSSO(alpha=0.2, guard="cautious"), 3),
        torch.cat([p.detach().flatten().to(wide) for p in params]),
    )
    inert.grad, lengths = torch.ones(3), [p.numel() for p in params]
    for _ in range(4):
        for p in params:
            p.grad = 0.3 * p.detach() + 0.1 * torch.randn(p.shape, generator=draw).to(p.dtype)
        mean = torch.cat([p.grad.flatten().to(wide) for p in params if p.grad is not None])
        x = server.advance(x, -mean)
        x = torch.cat(
            [part.to(p.dtype).to(wide) for part, p in zip(x.split(lengths), params, strict=True)]
        )
        optimizer.step()
        assert torch.equal(torch.cat([p.detach().flatten().to(wide) for p in params]), x)
    assert torch.equal(inert, still)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounds", [0, 1, 6])
def test_loaded_it_goes_on_to_the_bit(
    form: str, dtype: torch.dtype, rounds: int, tmp_path: Path
) -> None:
    settings = {
        "form": form,
        "pairs": 3,
        "m": 3,
        "R": 9,
    }  # a ring that is full after a few rounds, and a reset
    model, optimizer = build(dtype, **settings)
    go(model, optimizer, rounds)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    parameters, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    again, other = build(dtype, **settings)
    if rounds != 1:  # into a new optimizer, or over another state
        go(again, other, 2)
    again.load_state_dict(parameters)
    other.load_state_dict(state)
    assert go(again, other, 5) == go(model, optimizer, 5)
    assert torch.equal(flat(again), flat(model))
    assert other.server.k == rounds + 5


def test_a_float32_model_keeps_its_float64_state() -> None:
    model, optimizer = build()
    go(model, optimizer, 3)
    state = optimizer.state_dict()
    _, other = build()
    other.load_state_dict(state)
    assert not other.state  # torch's own place for it would hold a second copy, cast to float32
    tensors = other.state_dict()["state"][0]
    assert {t.dtype for t in tensors.values()} == {
        torch.float32,
        torch.float64,
        torch.int64,
        torch.bool,
    }
    for name, tensor in state["state"][0].items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_a_saved_state_is_a_small_copy() -> None:
    model, optimizer = build()
    go(model, optimizer, 3)
    state = optimizer.state_dict()
    before = copy.deepcopy(state["state"])
    go(model, optimizer, 3)
    assert all(torch.equal(state["state"][0][name], tensor) for name, tensor in before[0].items())
    store = state["state"][0]["server.curvature.store"]
    assert (
        store.untyped_storage().nbytes() == 3 * 2 * 7 * 4
    )  # three slots of s and y, not the ring's 200


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_copy_goes_its_own_way(copied: Callable[[Any], Any], rounds: int) -> None:
    model, optimizer = build()
    go(model, optimizer, rounds)
    again, other = copied((model, optimizer))
    first, state = flat(model).clone(), optimizer.state_dict()
    expected = go(again, other, 4)
    assert torch.equal(flat(model), first)
    optimizer.load_state_dict(state)
    assert go(model, optimizer, 4) == expected
    other.load_state_dict(optimizer.state_dict())


def test_a_scheduler_sets_the_server_step_of_each_round() -> None:
    steps = [1.0, 0.5, 0.25, 0.125]
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    twin, server = problem.Net(), Server(FedSSO(alpha=problem.ALPHA, guard="cautious"), problem.TAU)
    for eta in steps:
        put_mean(model, flat(model))
        optimizer.step()
        scheduler.step()
        x = flat(twin)
        put_mean(twin, x)
        server.record = FedSSO(alpha=problem.ALPHA, eta=eta, guard="cautious")
        mean = torch.cat([p.grad.flatten() for p in twin.parameters()])
        vector_to_parameters(server.advance(x, -mean), twin.parameters())
        assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("local_lr", 0.05),
        ("local_steps", 2),
        ("local_steps", 2.5),
        ("lam", 0.9),
        ("Lam", 0.05),
        ("lr", 0.5),
    ],
)
def test_settings_of_the_group_count_from_the_next_step_on(name: str, value: float) -> None:
    """A change before the first step is the same as making the optimizer with it."""
    model, optimizer = build(guard="adaptive")
    optimizer.param_groups[0][name] = value
    given = {
        "local_lr": problem.ALPHA,
        "local_steps": problem.TAU,
        "guard": "adaptive",
        name: value,
    }
    twin = problem.Net()
    made = ServerBFGS(twin.parameters(), **given)
    unchanged, plain = build(guard="adaptive")
    assert go(model, optimizer, 5) == go(twin, made, 5) != go(unchanged, plain, 5)


def test_a_server_step_of_zero_changes_nothing() -> None:
    model, optimizer = build()
    go(model, optimizer, 3)
    x, state = flat(model).clone(), optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.0
    go(model, optimizer, 1)
    assert torch.equal(flat(model), x)
    assert all(
        torch.equal(t, state["state"][0][n]) for n, t in optimizer.state_dict()["state"][0].items()
    )


def test_without_gradients_nothing_happens() -> None:
    model, optimizer = build()
    go(model, optimizer, 2)
    x = flat(model).clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(flat(model), x)
    assert optimizer.server.k == 2


def test_a_parameter_without_gradient_counts_as_unmoved() -> None:
    def trained(missing: Tensor | None) -> Tensor:
        model, optimizer = build()
        for _ in range(4):
            put_mean(model, flat(model))
            model.bias.grad = missing
            optimizer.step()
        return flat(model)

    assert torch.equal(trained(None), trained(torch.zeros(1)))
    assert trained(None)[-1] == problem.initial()[-1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_mean_that_is_not_finite_is_skipped(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """3e38 is finite, but not once it is divided by local_lr * local_steps."""
    model, optimizer = build()
    twin, other = build()
    go(model, optimizer, 3)
    go(twin, other, 3)
    x = flat(model).clone()
    put_mean(model, x)
    assert model.bias.grad is not None
    model.bias.grad[0] = bad
    with caplog.at_level(logging.WARNING, "fedsso"):
        optimizer.step()
    assert [r.getMessage() for r in caplog.records] == [
        "round 4: the clients' mean is not finite; the model is kept"
    ]
    assert torch.equal(flat(model), x)
    assert go(model, optimizer, 3) == go(twin, other, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_are_rounded_alone(dtype: torch.dtype) -> None:
    """The curvature is kept in float32, and s is the step between the rounded models."""
    model, optimizer = build(dtype)
    seen = []
    for _ in range(5):
        x = flat(model).float()
        seen.append(x)
        put_mean(model, x)
        optimizer.step()
    store = optimizer.state_dict()["state"][0]["server.curvature.store"][0, :, 0]
    assert store.dtype == torch.float32
    steps = torch.stack(seen).diff(dim=0)
    assert all((row == steps).all(1).any() for row in store[:3])
    assert problem.global_loss(flat(model)) < 0.55


def test_gradients_may_have_a_precision_of_their_own() -> None:
    model, optimizer = build()
    twin, other = build()
    put_mean(twin, flat(twin))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        p.grad_dtype = torch.float64
        p.grad = q.grad.double()
    optimizer.step()
    other.step()
    assert torch.equal(flat(model), flat(twin))


def test_named_parameters_and_one_dictionary_are_one_group() -> None:
    model, optimizer = build()
    expected = go(model, optimizer, 3)
    for give in (
        lambda net: net.named_parameters(),
        lambda net: [{"params": net.parameters(), "local_lr": 0.1}],
    ):
        twin = problem.Net()
        assert go(twin, ServerBFGS(give(twin), problem.ALPHA, problem.TAU), 3) == expected


# ---- refusals ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_lr": 0}, "local_lr.*> 0 and finite.*local_lr=0"),
        ({"local_lr": float("nan")}, "local_lr must be > 0"),
        ({"local_lr": "0.1"}, "local_lr must be a number"),
        ({"local_lr": "auto"}, "local_lr.*'auto'"),
        ({"lr": -1.0}, "lr.*> 0 and finite.*lr=-1"),
        ({"lr": float("inf")}, "lr must be > 0"),
        ({"local_steps": 0}, "local_steps must be a number >= 1"),
        ({"local_steps": True}, "local_steps must be a number"),
        ({"form": "newton"}, "unknown form 'newton'"),
        ({"guard": "no"}, "unknown guard 'no'"),
        ({"lam": 2.0, "Lam": 1.0}, "lam must be < Lam"),
        ({"R": 1}, "R must be an integer >= 2"),
        ({"pairs": 0}, "pairs must be an integer >= 1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerBFGS(problem.Net().parameters(), **{"local_lr": 0.1, "local_steps": 5, **settings})


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -0.1), ("local_lr", 0.0), ("local_steps", 0), ("lam", -1.0)]
)
def test_settings_of_the_group_are_checked_at_each_step(name: str, value: float) -> None:
    model, optimizer = build()
    go(model, optimizer, 1)
    optimizer.param_groups[0][name] = value
    with pytest.raises(InputError, match=name):
        go(model, optimizer, 1)


def test_what_the_state_is_made_for_cannot_change() -> None:
    model, optimizer = build()
    go(model, optimizer, 1)
    optimizer.param_groups[0]["pairs"] = 7
    with pytest.raises(
        InputError, match="pairs cannot change between steps; make a new ServerBFGS"
    ):
        go(model, optimizer, 1)


def test_a_closure_is_refused() -> None:
    _, optimizer = build()
    with pytest.raises(InputError, match="takes no closure"):
        optimizer.step(lambda: 0.0)


def test_a_second_group_is_refused() -> None:
    model, optimizer = build()
    with pytest.raises(InputError, match="one parameter group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(InputError, match="one parameter group"):
        ServerBFGS(groups, 0.1, 5)


def test_parameters_are_checked() -> None:
    with pytest.raises(InputError, match="no parameter requires a gradient"):
        ServerBFGS(problem.Net().requires_grad_(False).parameters(), 0.1, 5)
    with pytest.raises(InputError, match="complex parameters are not supported"):
        ServerBFGS([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], 0.1, 5)


def test_a_layer_frozen_later_is_refused() -> None:
    model, optimizer = build()
    go(model, optimizer, 1)
    model.bias.requires_grad_(False)
    with pytest.raises(InputError, match="frozen, unfrozen or resized"):
        optimizer.step()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: build(form="dfp"), "made with form='dfp', this optimizer with form='bfgs'"),
        (lambda: build(guard="none"), "made with guard='none'"),
        (lambda: build(pairs=7), "made with pairs=7"),
        (lambda: build(torch.float64), "another model: 7 trained numbers of torch.float64"),
        (lambda: wide_build(), "another model: 13 trained numbers"),
    ],
)
def test_the_state_of_another_is_refused(
    other: Callable[[], tuple[nn.Module, Any]], message: str
) -> None:
    model, optimizer = build()
    go(model, optimizer, 2)
    before = optimizer.state_dict()
    strange, source = other()
    for p in strange.parameters():
        p.grad = torch.ones_like(p)
    source.step()
    with pytest.raises(InputError, match=message):
        optimizer.load_state_dict(source.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(t, before["state"][0][n]) for n, t in after["state"][0].items())


def wide_build() -> tuple[nn.Module, ServerBFGS]:
    model = nn.Linear(12, 1)
    return model, ServerBFGS(model.parameters(), 0.1, 5)


def test_the_state_of_another_optimizer_is_refused() -> None:
    model, optimizer = build()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match="not one of ServerBFGS: its group lacks local_lr"):
        optimizer.load_state_dict(adam.state_dict())


def test_what_torch_saves_is_what_it_loads() -> None:
    """The whole optimizer through torch.save, as some frameworks do, and its printed form."""
    model, optimizer = build(R=5)
    go(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    again, other = torch.load(buffer, weights_only=False)
    assert go(again, other, 2) == go(model, optimizer, 2)
    assert "R: 5" in repr(other)
    assert "local_lr: 0.1" in repr(other)
