"""The three back ends compute the same function, and `objective` picks the right one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsso import FedAvg, Federation, InputError, simulate
from fedsso.algorithm import Batch
from fedsso.models import MODELS, build
from fedsso.objective import (
    Dense,
    Layout,
    Looped,
    Vmapped,
    backend,
    buffers_of,
    objective,
    ravel,
    unravel_into,
)
from fedsso.objective.chained import Chained
from fedsso.objective.losses import LOSSES, draw, row_loss

CPU = torch.device("cpu")
M, T, B, D = 3, 2, 5, 4


def mlp(activation: type[nn.Module], outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(D, 6),
        activation(),
        nn.Linear(6, 5),
        activation(),
        nn.Linear(5, outputs),
    )


def conv(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, outputs)
    )


BUILD: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda n: build("linear", (D,), n), (D,)),
    "mclr": (lambda n: build("mclr", (2, 2), n), (2, 2)),
    "relu": (lambda n: mlp(nn.ReLU, n), (D,)),
    "tanh": (lambda n: mlp(nn.Tanh, n), (D,)),
    "sigmoid": (lambda n: mlp(nn.Sigmoid, n), (D,)),
    "conv": (conv, (1, 4, 4)),
}


def focal(z: Tensor, y: Tensor) -> Tensor:
    """A user's loss: cross-entropy damped where the model is sure."""
    ce = F.cross_entropy(z, y, reduction="none")
    return (1 - torch.exp(-ce)) ** 2 * ce


WISHES: dict[str, Any] = {**{name: name for name in LOSSES}, "callable": focal}


def problem(model: str, wish: str) -> tuple[nn.Module, Any, Tensor, Batch]:
    """A module, a loss, points [M, T, d] and a ragged batch: clients use 5, 3 and 1 of 5 rows."""
    make, sample = BUILD[model]
    torch.manual_seed(0)
    outputs = 1 if wish in ("bce", "mse") else 3
    module = make(outputs).double()
    x = ravel(module) + 0.3 * torch.randn(M, T, ravel(module).numel(), dtype=torch.float64)
    rows = torch.randn(M, B, *sample, dtype=torch.float64)
    y = (
        torch.randn(M, B, dtype=torch.float64)
        if wish == "mse"
        else torch.randint(0, max(2, outputs), (M, B))
    )
    weight = torch.zeros(M, B, dtype=torch.float64)
    for i, n in enumerate((5, 3, 1)):
        weight[i, :n] = 1 / n
    return module, row_loss(WISHES[wish]), x, Batch(rows, y, weight, key=1)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("model", BUILD)
def test_back_ends_agree(model: str, wish: str) -> None:
    module, loss, x, batch = problem(model, wish)
    value, grad = Looped(module, loss).value_and_grad(x, batch)
    outputs = Looped(module, loss).predict(x, batch.x)
    assert outputs.shape == (M, T, 1 if wish in ("bce", "mse") else 3, B)
    for kind in (Vmapped,) if model == "conv" else (Dense, Vmapped):
        other, other_grad = kind(module, loss).value_and_grad(x, batch)
        torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(other_grad, grad, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(
            kind(module, loss).predict(x, batch.x), outputs, rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("model", BUILD)
def test_values_are_the_modules_own(model: str) -> None:
    module, loss, x, batch = problem(model, "cross_entropy")
    value, _ = Looped(module, loss).value_and_grad(x, batch)
    for i in range(M):
        real = batch.weight[i] > 0
        for t in range(T):
            unravel_into(module, x[i, t])
            expected = F.cross_entropy(module(batch.x[i, real]), batch.y[i, real]).detach()
            assert float(value[i, t]) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("kind", [Dense, Vmapped, Looped])
@pytest.mark.parametrize("wish", WISHES)
def test_gradients_match_finite_differences(
    kind: type[Dense | Vmapped | Looped], wish: str
) -> None:
    module, loss, x, batch = problem("tanh", wish)
    f = kind(module, loss)
    direction = torch.randn_like(x)
    h = 1e-6
    up, down = (f.value_and_grad(x + sign * h * direction, batch)[0] for sign in (1, -1))
    slope = (f.value_and_grad(x, batch)[1] * direction).sum(-1)
    torch.testing.assert_close((up - down) / (2 * h), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [Dense, Vmapped, Looped])
@pytest.mark.parametrize("wish", WISHES)
def test_padding_changes_nothing(kind: type[Dense | Vmapped | Looped], wish: str) -> None:
    module, loss, x, batch = problem("relu", wish)
    f = kind(module, loss)
    value, grad = f.value_and_grad(x, batch)
    garbage = torch.where(batch.weight[..., None] > 0, batch.x, 1e6)
    labels = torch.where(batch.weight > 0, batch.y, 1)
    again, grad_again = f.value_and_grad(x, batch._replace(x=garbage, y=labels))
    assert torch.equal(again, value)
    assert torch.equal(grad_again, grad)
    first = Batch(batch.x[1:2, :3], batch.y[1:2, :3], batch.weight[1:2, :3])
    alone, grad_alone = f.value_and_grad(x[1:2], first)
    torch.testing.assert_close(alone, value[1:2], rtol=1e-13, atol=0)
    torch.testing.assert_close(grad_alone, grad[1:2], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("kind", [Dense, Vmapped, Looped])
def test_inputs_stay_as_they_were(kind: type[Dense | Vmapped | Looped]) -> None:
    module, loss, x, batch = problem("relu", "cross_entropy")
    kept = [t.clone() for t in (x, batch.x, batch.weight, ravel(module))]
    f = kind(module, loss)
    f.value_and_grad(x, batch)
    f.predict(x, batch.x)
    f.value(x, batch)
    f.hvp(x, x, batch)
    f.hessian(x, batch)
    f.targets(x, batch, batch.weight.clamp(0.1))
    assert all(
        torch.equal(a, b)
        for a, b in zip(kept, (x, batch.x, batch.weight, ravel(module)), strict=True)
    )


def test_a_loss_with_a_constant_slope() -> None:
    """Its derivative is one number seen as a whole tensor, which must not be written to."""
    module, _, x, batch = problem("linear", "mse")
    loss = row_loss(lambda z, y: y - z[:, 0])
    value, grad = Looped(module, loss).value_and_grad(x, batch)
    for kind in (Dense, Vmapped):
        other, other_grad = kind(module, loss).value_and_grad(x, batch)
        torch.testing.assert_close(other, value, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(other_grad, grad, rtol=1e-12, atol=1e-13)


# --- which back end
# -------------------------------------------------------------------------------------------------
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.view(len(x), 2, 2))[0][:, -1])
        return out


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5, self.training)


class Residual(nn.Module):
    """Nothing that the dense back end knows, but torch.func batches it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(x + torch.tanh(self.a(x)))
        return out


def batch_norm(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6, **options), nn.ReLU(), nn.Linear(6, 3))


PICKS: list[tuple[Callable[[], nn.Module], tuple[int, ...], type, str]] = [
    (lambda: build("mclr", (2, 2), 3), (2, 2), Dense, "stacked"),
    (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(D, 6), nn.Tanh()), nn.Identity(), nn.Linear(6, 3)
        ),
        (D,),
        Dense,
        "stacked",
    ),
    (lambda: nn.Linear(D, 3), (D,), Dense, "stacked"),
    (Residual, (D,), Vmapped, "torch.func"),
    (
        lambda: nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, 3)),
        (D,),
        Vmapped,
        "torch.func",
    ),
    (
        lambda: nn.Sequential(nn.Linear(D, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        (D,),
        Vmapped,
        "torch.func",
    ),
    (lambda: conv(3), (1, 4, 4), Looped, "on a CPU convolutions are faster"),
    (batch_norm, (D,), Looped, "BatchNorm1d"),
    (lambda: batch_norm(track_running_stats=False), (D,), Looped, "BatchNorm1d"),
    (Recurrent, (D,), Looped, "LSTM"),
    (
        lambda: nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
        (D,),
        Looped,
        "Dropout",
    ),
    (FunctionalDropout, (D,), Looped, "torch.func cannot batch it"),
]


@pytest.mark.parametrize(("make", "sample", "kind", "reason"), PICKS)
def test_the_back_end_and_its_reason(
    make: Callable[[], nn.Module], sample: tuple[int, ...], kind: type, reason: str
) -> None:
    f, why = objective(make(), row_loss("cross_entropy"), "auto", CPU, sample)
    assert type(f) is kind
    assert reason in why
    looped, why = objective(make(), row_loss("cross_entropy"), "loop", CPU, sample)
    assert type(looped) is Looped
    assert "as asked" in why


def test_stacked_on_request() -> None:
    f, _ = objective(conv(3), row_loss("cross_entropy"), "stacked", CPU, (1, 4, 4))
    assert type(f) is Chained
    with pytest.raises(
        InputError, match=r"cannot be stacked .*BatchNorm1d.*use engine='auto' or engine='loop'"
    ):
        objective(batch_norm(), row_loss("cross_entropy"), "stacked", CPU, (D,))
    with pytest.raises(InputError, match="unknown engine 'lop'; did you mean 'loop'"):
        objective(conv(3), row_loss("cross_entropy"), "lop", CPU, (1, 4, 4))


def test_shared_layers_are_not_dense() -> None:
    layer = nn.Linear(D, D)
    f, _ = objective(
        nn.Sequential(layer, nn.ReLU(), layer), row_loss("cross_entropy"), "auto", CPU, (D,)
    )
    assert type(f) is Vmapped
    assert f.layout.sizes == [16, 4]


# --- second derivatives and drawn targets
# ----------------------------------------------------------------------------
Kind = type[Dense | Vmapped | Looped]
KINDS: list[Kind] = [Dense, Vmapped, Looped]
SOME: list[tuple[str, Kind]] = [
    ("mclr", Dense),
    ("tanh", Dense),
    ("mclr", Vmapped),
    ("tanh", Vmapped),
    ("mclr", Looped),
]
CLOSE: dict[str, float] = {"rtol": 1e-10, "atol": 1e-12}


def times(H: Tensor, v: Tensor) -> Tensor:
    return (H @ v.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("model", BUILD)
def test_curvature_of_the_back_ends_agrees(model: str, wish: str) -> None:
    module, loss, x, batch = problem(model, wish)
    v = torch.randn_like(x)
    value, product = Looped(module, loss).value(x, batch), Looped(module, loss).hvp(x, v, batch)
    assert float(product.norm()) > 0.1
    assert torch.equal(value, Looped(module, loss).value_and_grad(x, batch)[0])
    for kind in (Vmapped,) if model == "conv" else (Dense, Vmapped):
        f = kind(module, loss)
        torch.testing.assert_close(f.value(x, batch), value, **CLOSE)
        torch.testing.assert_close(f.hvp(x, v, batch), product, **CLOSE)
        H = f.hessian(x, batch)
        assert torch.equal(H, H.mT)
        torch.testing.assert_close(times(H, v), product, **CLOSE)


@pytest.mark.parametrize(("model", "kind"), [*SOME, ("conv", Vmapped), ("conv", Looped)])
def test_hessians_are_torchs_own(model: str, kind: Kind) -> None:
    module, loss, x, batch = problem(model, "cross_entropy")
    with torch.no_grad():  # as in a run
        H = kind(module, loss).hessian(x[:2], Batch(*(part[:2] for part in batch[:3])))
    assert torch.equal(H, H.mT)
    for i, t in ((0, 0), (1, 1)):
        real = batch.weight[i] > 0

        def one(point: Tensor, i: int = i, real: Tensor = real) -> Tensor:
            outputs = torch.func.functional_call(
                module, Layout.of(module).unravel(point), (batch.x[i, real],)
            )
            return F.cross_entropy(outputs, batch.y[i, real])

        torch.testing.assert_close(
            H[i, t], torch.autograd.functional.hessian(one, x[i, t]), **CLOSE
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_logistic_hessian_by_hand(kind: Kind) -> None:
    """At x = 0 the loss bends by 1/4, so H is 1/4 times the mean of a a^T over the rows a = (1, 1)
    and (3, 1)."""
    module = nn.Linear(1, 1).double()
    rows = torch.tensor([[[1.0], [3.0]]], dtype=torch.float64)
    batch = Batch(rows, torch.tensor([[0, 1]]), torch.full((1, 2), 0.5, dtype=torch.float64))
    H = kind(module, row_loss("bce")).hessian(torch.zeros(1, 1, 2, dtype=torch.float64), batch)
    expected = torch.tensor([[10.0, 4.0], [4.0, 2.0]], dtype=torch.float64) / 8
    torch.testing.assert_close(H[0, 0], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("model", "kind"), SOME)
def test_pieces_of_a_full_pass_add_up(model: str, kind: Kind) -> None:
    """The third client has no rows in the second piece."""
    module, loss, x, batch = problem(model, "cross_entropy")
    f, v = kind(module, loss), torch.randn_like(x)
    f.l2 = 0.3
    pieces = [
        Batch(*(part[:, piece] for part in batch[:3])) for piece in (slice(0, 2), slice(2, 5))
    ]
    assert not pieces[1].weight[2].any()
    for whole, parts in (
        (f.value(x, batch), [f.value(x, piece) for piece in pieces]),
        (f.value_and_grad(x, batch)[1], [f.value_and_grad(x, piece)[1] for piece in pieces]),
        (f.hvp(x, v, batch), [f.hvp(x, v, piece) for piece in pieces]),
        (f.hessian(x, batch), [f.hessian(x, piece) for piece in pieces]),
    ):
        torch.testing.assert_close(parts[0] + parts[1], whole, **CLOSE)
        assert not parts[1][2].any()


@pytest.mark.parametrize(("model", "kind"), SOME)
def test_padding_does_not_bend(model: str, kind: Kind) -> None:
    module, loss, x, batch = problem(model, "callable")
    f, v = kind(module, loss), torch.randn_like(x)
    real = batch.weight > 0
    garbage = batch._replace(
        x=torch.where(real.view(M, B, *[1] * (batch.x.dim() - 2)), batch.x, 100.0),
        y=torch.where(real, batch.y, 1),
    )
    assert torch.equal(f.value(x, garbage), f.value(x, batch))
    assert torch.equal(f.hvp(x, v, garbage), f.hvp(x, v, batch))
    assert torch.equal(f.hessian(x, garbage), f.hessian(x, batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wish", WISHES)
def test_targets_of_each_trials_own(wish: str, kind: Kind) -> None:
    module, loss, x, batch = problem("tanh", wish)
    f, v = kind(module, loss), torch.randn_like(x)
    y = torch.stack([batch.y, batch.y.flip(0, 1)], 1)
    own = batch._replace(y=y)
    for t in range(T):
        at, alone = slice(t, t + 1), batch._replace(y=y[:, t])
        for one, many in zip(
            f.value_and_grad(x[:, at], alone), f.value_and_grad(x, own), strict=True
        ):
            torch.testing.assert_close(many[:, at], one, **CLOSE)
        torch.testing.assert_close(f.value(x, own)[:, at], f.value(x[:, at], alone), **CLOSE)
        torch.testing.assert_close(
            f.hvp(x, v, own)[:, at], f.hvp(x[:, at], v[:, at], alone), **CLOSE
        )
    if kind is not Looped:
        torch.testing.assert_close(times(f.hessian(x, own), v), f.hvp(x, v, own), **CLOSE)


@pytest.mark.parametrize("model", ["mclr", "tanh", "conv"])
def test_blocks_of_columns_make_the_same_hessian(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, loss, x, batch = problem(model, "cross_entropy")
    f = Vmapped(module, loss)
    H = f.hessian(x, batch)
    column = T * (M * x.shape[-1] + batch.x.numel())
    monkeypatch.setattr(backend, "BLOCK", 7 * column)
    assert {len(unit) for _, unit in backend.columns(x, column)} == {7, x.shape[-1] % 7} - {0}
    torch.testing.assert_close(f.hessian(x, batch), H, **CLOSE)


def test_a_loss_that_is_linear_has_no_curvature() -> None:
    module, _, x, batch = problem("linear", "mse")
    loss = row_loss(lambda z, y: y - z[:, 0])
    for kind in KINDS:
        f = kind(module, loss)
        assert torch.equal(f.hvp(x, x, batch), torch.zeros_like(x)), kind
        assert not f.hessian(x, batch).any(), kind


def test_wrong_outputs_are_refused_in_second_derivatives() -> None:
    module, _, x, batch = problem("mclr", "cross_entropy")
    for wish in ("bce", "mse"):
        with pytest.raises(
            InputError, match=f"loss '{wish}' needs a model with one output, this one has 3"
        ):
            Dense(module, row_loss(wish)).hvp(x, x, batch)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.inner(x.view(len(x), 1, 2, 2))
        out: Tensor = self.head(F.scaled_dot_product_attention(q, q, q).mean((1, 2)))
        return out


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 3))


def smooth_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    "make", [smooth_batch_norm, normed, Recurrent, Attention, FunctionalDropout]
)
def test_curvature_of_any_module(make: Callable[[], nn.Module]) -> None:
    """Products match differences of gradients, in training mode and with the same draws; buffers
    stay."""
    torch.manual_seed(0)
    module = make().double()
    _, loss, _, batch = problem("tanh", "cross_entropy")
    batch = Batch(batch.x[:2], batch.y[:2], batch.weight[:2], key=5)
    x = ravel(module) + 0.3 * torch.randn(2, T, ravel(module).numel(), dtype=torch.float64)
    f, v, h = Looped(module, loss), torch.randn_like(x), 1e-5
    f.buffers = buffers_of(module).expand(2, T, -1).clone() if list(module.buffers()) else f.buffers
    kept, state = f.buffers.clone(), torch.get_rng_state()
    with torch.no_grad():
        product, H, value = f.hvp(x, v, batch), f.hessian(x, batch), f.value(x, batch)
        f.targets(x, batch, torch.full((2, B), 0.5))
        assert torch.equal(f.buffers, kept)
        assert torch.equal(value, f.value_and_grad(x, batch)[0])
        up, down = (f.value_and_grad(x + sign * h * v, batch)[1] for sign in (1, -1))
    torch.testing.assert_close((up - down) / (2 * h), product, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(times(H, v), product, **CLOSE)
    assert torch.equal(torch.get_rng_state(), state)
    if make is smooth_batch_norm:
        assert not torch.equal(f.buffers, kept)  # a gradient moves them


def spread(n: int) -> tuple[Tensor, Tensor]:
    """The same row n times, and n uniform numbers spread evenly."""
    return torch.ones(1, n, D, dtype=torch.float64), (
        (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ).unsqueeze(0)


def drawn(kind: Kind, wish: str, outputs: int, n: int) -> tuple[Tensor, Tensor]:
    """Outputs [T, classes] at one row, and the targets [T, n] drawn for it."""
    torch.manual_seed(0)
    module = build("mclr", (D,), outputs).double()
    x = torch.randn(1, T, ravel(module).numel(), dtype=torch.float64)
    rows, u = spread(n)
    f = kind(module, row_loss(wish))
    batch = Batch(
        rows, torch.zeros(1, n, dtype=torch.long), torch.full((1, n), 1 / n, dtype=torch.float64)
    )
    return f.predict(x, rows)[0, :, :, 0], f.targets(x, batch, u)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_targets_come_from_the_models_own_distribution(kind: Kind) -> None:
    """Over n evenly spread uniform numbers each label comes n p times, to rounding at the two ends
    of its interval."""
    n = 1000
    z, y = drawn(kind, "cross_entropy", 3, n)
    counts = torch.stack([(y == label).sum(-1) for label in range(3)], -1)
    assert y.dtype == torch.long
    assert float((counts - n * torch.softmax(z, -1)).abs().max()) <= 1
    z, y = drawn(kind, "bce", 1, n)
    assert y.dtype == torch.float64
    assert set(y.unique().tolist()) == {0.0, 1.0}
    assert float((y.sum(-1) - n * torch.sigmoid(z[:, 0])).abs().max()) <= 1
    z, y = drawn(kind, "mse", 1, n)
    share = (
        1 + torch.erf(y - z)
    ) / 2  # the distribution function of density exp(-(y - z)^2) / sqrt(pi)
    torch.testing.assert_close(share, spread(n)[1].expand(T, n), rtol=1e-9, atol=1e-12)


def test_an_impossible_label_is_never_drawn() -> None:
    z = torch.tensor([0.1, 0.2, 0.3, -1e4]).view(4, 1)
    u = torch.nextafter(torch.tensor([1.0]), torch.tensor([0.0]))
    assert draw(LOSSES["cross_entropy"], z, u).tolist() == [2]
    assert draw(LOSSES["cross_entropy"], z.flip(0), torch.tensor([1e-30])).tolist() == [1]


@pytest.mark.parametrize("wish", LOSSES)
def test_back_ends_draw_the_same_targets(wish: str) -> None:
    module, loss, x, batch = problem("relu", wish)
    u = torch.rand(M, B, dtype=torch.float64)
    real = (batch.weight > 0).unsqueeze(1)
    expected = Dense(module, loss).targets(x, batch, u)
    assert expected.shape == (M, T, B)
    for kind in (Vmapped, Looped):
        y = kind(module, loss).targets(x, batch, u)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(torch.where(real, y, 0), torch.where(real, expected, 0), **CLOSE)


def test_no_targets_from_a_loss_of_ones_own() -> None:
    module, loss, x, batch = problem("mclr", "callable")
    with pytest.raises(InputError, match="use loss 'cross_entropy', 'bce' or 'mse'"):
        Dense(module, loss).targets(x, batch, batch.weight)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("model", BUILD)
def test_shapes_without_numbers(model: str, wish: str) -> None:
    """On torch's device "meta" everything has the shape and type that it has elsewhere."""
    module, loss, x, batch = problem(model, wish)
    kind = Vmapped if model == "conv" else Dense
    results = []
    for device in ("cpu", "meta"):
        f = kind(module.to(device), loss)
        point, held = x.to(device), Batch(*(part.to(device) for part in batch[:3]))
        out = [
            *f.value_and_grad(point, held),
            f.value(point, held),
            f.hvp(point, point, held),
            f.hessian(point, held),
        ]
        if wish in LOSSES:
            out.append(f.targets(point, held, held.weight))
            out += f.value_and_grad(point, held._replace(y=out[-1]))
        results.append([(part.shape, part.dtype) for part in out])
        assert all(part.device.type == device for part in out)
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_stays(kind: Kind) -> None:
    """A model that all clients share comes as a view, in float32."""
    module, loss, x, batch = problem("mclr", "cross_entropy")
    f, exact = kind(module.float(), loss), Looped(module.double(), loss)
    shared = x[0].float().expand(M, *x.shape[1:])
    held = Batch(batch.x.float(), batch.y, batch.weight.float())
    for name in ("value", "hessian"):
        result = getattr(f, name)(shared, held)
        assert result.dtype == torch.float32
        torch.testing.assert_close(
            result, getattr(exact, name)(shared.double(), batch).float(), rtol=1e-4, atol=1e-5
        )
    assert f.hvp(shared, shared, held).dtype == torch.float32


# --- whole runs
# --------------------------------------------------------------------------------------------------
RUN: dict[str, Any] = {
    "rounds": 4,
    "local_steps": 3,
    "batch_size": 4,
    "dtype": "float64",
    "device": "cpu",
}


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("make", [Residual, lambda: mlp(nn.Tanh, 3)])
def test_a_users_module_is_not_changed(
    fed: Federation, make: Callable[[], nn.Module], engine: str
) -> None:
    module = make()
    before = copy.deepcopy(module.state_dict())
    mode = module.training
    run = simulate(fed, module, FedAvg(alpha=0.1), engine=engine, **RUN)
    assert module.training == mode
    assert all(
        torch.equal(v, before[n]) and v.dtype == torch.float32
        for n, v in module.state_dict().items()
    )
    assert not torch.equal(run.x, ravel(module).double())


class Shrunk(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 0.1 * super().forward(x)
        return out


def hooked() -> nn.Module:
    module = mlp(nn.Tanh, 3)
    module.get_submodule("1").register_forward_hook(lambda _, __, out: out.clamp(min=0))
    module.get_submodule("3").register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    return module


def tied() -> nn.Module:
    first, second = nn.Linear(D, D), nn.Linear(D, D)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), nn.Linear(D, 3))


@pytest.mark.parametrize(
    "make", [lambda: Shrunk(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 3)), hooked, tied]
)
def test_a_chain_that_is_not_what_it_seems(fed: Federation, make: Callable[[], nn.Module]) -> None:
    """It looks like linear layers and activations, but the back end for those would compute
    something else."""
    torch.manual_seed(0)
    module = make()
    auto, loop = (
        simulate(fed, module, FedAvg(alpha=0.1), engine=engine, **RUN)
        for engine in ("auto", "loop")
    )
    assert float((auto.x - loop.x).norm()) <= 1e-10 * float(loop.x.norm())
    np.testing.assert_allclose(auto.trace["test_loss"], loop.trace["test_loss"], rtol=1e-10)


def test_batch_norm_statistics_are_averaged_and_never_stepped(fed: Federation) -> None:
    """One round, one full batch: statistics are 0.9 * old + 0.1 * batch at each client, then the
    weighted mean."""
    torch.manual_seed(0)
    module = batch_norm().double()
    run = simulate(
        fed,
        module,
        FedAvg(alpha=0.1, eta=0.5),
        **{**RUN, "rounds": 1, "local_steps": 1, "batch_size": None},
    )
    mean, var = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for i, p in enumerate(fed.p):
        hidden = module.get_submodule("0")(fed.x[fed.rows_of(i)]).detach()
        mean += p * 0.1 * hidden.mean(0)
        var += p * (0.9 + 0.1 * hidden.var(0))
    norm = run.model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    torch.testing.assert_close(norm.running_mean, mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(norm.running_var, var, rtol=1e-12, atol=1e-14)
    assert int(norm.num_batches_tracked) == 1
    assert run.x.numel() == ravel(module).numel()
    assert run.trace["bytes_up"][1] == fed.clients * 8 * (
        ravel(module).numel() + buffers_of(module).numel()
    )


def test_batch_norm_model_predicts_what_the_trace_says(fed: Federation) -> None:
    run = simulate(fed, batch_norm(), FedAvg(alpha=0.1), **{**RUN, "batch_size": None})
    rows = fed.test_rows
    guess = run.model(fed.x[rows]).argmax(1)
    assert float((guess == fed.y[rows]).double().mean()) == pytest.approx(run.final())


def test_a_start_from_a_runs_checkpoint_has_its_batch_norm_statistics(
    fed: Federation, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    options = {**RUN, "rounds": 20, "batch_size": None}
    first = simulate(fed, batch_norm(), FedAvg(alpha=0.3), out=tmp_path / "run", **options)
    warm = simulate(
        fed, batch_norm(), FedAvg(), init=tmp_path / "run" / "checkpoint.safetensors", **options
    )
    assert warm.trace["test_accuracy"][0] == first.final() != first.trace["test_accuracy"][0]
    assert warm.trace["test_loss"][0] == first.final("test_loss")
    bare = batch_norm(track_running_stats=False)
    with pytest.raises(InputError, match="holds 13 numbers in buffers, the model has 0"):
        simulate(fed, bare, FedAvg(), init=tmp_path / "run" / "checkpoint.safetensors", **options)


def test_batch_norm_on_a_batch_of_one_row_is_refused_before_anything_is_written(
    make_fed: Callable[..., Federation], tmp_path: Path
) -> None:
    fed = make_fed(sizes=[8, 12])
    assert fed.train_sizes.tolist() == [6, 9]
    with pytest.raises(
        InputError, match=r"client 1 has 9 rows and so a batch of one.*change batch_size=4"
    ):
        simulate(fed, batch_norm(), FedAvg(), out=tmp_path / "run", **RUN)
    assert not (tmp_path / "run").exists()
    assert len(simulate(fed, batch_norm(), FedAvg(), **{**RUN, "batch_size": 3}).trace) == 5


class Centred(nn.Module):
    """A running mean of the rows that is another tensor after each forward, and a whole number.

    `how` says what the forward does with them.
    """

    mean: Tensor | None
    seen: Tensor

    def __init__(self, how: str = "reassigned") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("seen", torch.tensor(0))
        self.inner = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.mean is not None
        if self.training and self.how == "reassigned":
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.seen = self.seen + 1
        elif self.training:
            data = self.mean.data if self.how == "data" else self.mean
            data.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.seen += 1
        out: Tensor = self.inner(x - self.mean)
        return out


def average_by_hand(fed: Federation, module: nn.Module, steps: int, alpha: float) -> nn.Module:
    """A round of FedAvg in plain torch, with full batches: parameters and buffers are averaged."""
    mean = {name: torch.zeros_like(t).double() for name, t in module.state_dict().items()}
    for i, p in enumerate(fed.p):
        own = copy.deepcopy(module)
        rows = fed.rows_of(i)
        optimizer = torch.optim.SGD(own.parameters(), alpha)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(own(fed.x[rows]), fed.y[rows]).backward()
            optimizer.step()
        for name, t in own.state_dict().items():
            mean[name] += p * t.double()
    averaged = copy.deepcopy(module)
    averaged.load_state_dict(mean)
    return averaged


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("how", ["reassigned", "in place", "data"])
@pytest.mark.parametrize("nested", [False, True])
def test_buffers_of_ones_own_are_fedavgs(
    fed: Federation, how: str, nested: bool, engine: str
) -> None:
    torch.manual_seed(0)
    inner = Centred(how)
    module = (nn.Sequential(nn.Identity(), inner) if nested else inner).double()
    options = {**RUN, "rounds": 1, "batch_size": None, "engine": engine}
    run = simulate(fed, module, FedAvg(alpha=0.1), **options)
    wanted = average_by_hand(fed, module, 3, 0.1).state_dict()
    for name, t in run.model.state_dict().items():
        torch.testing.assert_close(t, wanted[name], rtol=1e-12, atol=1e-14)
    assert int(wanted["1.seen" if nested else "seen"]) == 3
    with pytest.raises(InputError, match=r"cannot be stacked \(its forward changes"):
        simulate(fed, module, FedAvg(alpha=0.1), **{**options, "engine": "stacked"})


class Faulty(nn.Module):
    """A forward that cannot be trained, or whose buffers cannot be averaged."""

    mean: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", None if how == "made" else torch.zeros(D))
        self.first = nn.Linear(D, D)
        self.words = nn.Embedding(5, D, max_norm=1.0 if how == "max_norm" else None)
        self.last = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.first(x) + self.words((x[:, 0] > 0).long())
        if self.how == "no gradient":
            z = z.detach()
            with torch.no_grad():
                out: Tensor = self.last(z)
            return out
        if self.how in ("made", "graph"):
            self.mean = z.mean(0) if self.how == "graph" else z.mean(0).detach()
        elif self.how == "None":
            self.mean = None
        elif self.how == "reshaped":
            self.mean = z.detach()
        elif self.how == "frozen":
            self.first.weight.data = self.first.weight.data.clamp(min=0)
        answer: Tensor = self.last(z)
        return answer


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("max_norm", r"writes to words\.weight, as max_norm does"),
        ("frozen", r"writes to first\.weight"),
        ("made", "adds, removes or reshapes mean"),
        ("None", "adds, removes or reshapes mean"),
        ("reshaped", "adds, removes or reshapes mean"),
        ("graph", r"leaves mean in the graph of the gradient: write \.detach"),
        ("no gradient", r"gives no gradient to first\.bias.*take torch\.no_grad\(\)"),
    ],
)
def test_a_forward_that_cannot_be_trained_is_refused(
    fed: Federation, how: str, told: str, engine: str
) -> None:
    with pytest.raises(InputError, match=told):
        simulate(fed, Faulty(how), FedAvg(alpha=0.1), engine=engine, **RUN)


class Scaled(nn.Module):
    """A constant buffer and a frozen parameter, which must stay as they are to the bit."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([0.1, 0.7, 1.3, 3.7]))
        self.frozen = nn.Parameter(torch.full((D,), 0.3), requires_grad=False)
        self.unused = nn.Parameter(torch.full((2,), 5.0))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x * self.scale + self.frozen)
        return out


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_constants_frozen_and_unused_parameters_stay(fed: Federation, engine: str) -> None:
    module = Scaled()
    run = simulate(
        fed, module, FedAvg(alpha=0.1), engine=engine, **{**RUN, "dtype": "float32", "rounds": 20}
    )
    trained = run.model
    assert isinstance(trained, Scaled)
    for name in ("scale", "frozen", "unused"):
        assert torch.equal(getattr(trained, name), getattr(module, name)), name
    assert not torch.equal(trained.head.weight, module.head.weight)
    assert run.x.numel() == 2 + 15


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(D, 6), nn.Dropout(0.5), nn.Linear(6, 3)), FunctionalDropout],
)
def test_dropout_draws_from_the_runs_seed(fed: Federation, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = make()
    torch.manual_seed(1)
    a = simulate(fed, module, FedAvg(alpha=0.1), **RUN)
    torch.manual_seed(2)
    b = simulate(fed, module, FedAvg(alpha=0.1), **RUN)
    assert torch.equal(a.x, b.x)
    full = {**RUN, "batch_size": None}
    c, d = (simulate(fed, module, FedAvg(alpha=0.1), **{**full, "seed": seed}) for seed in (0, 1))
    assert not torch.equal(c.x, d.x)  # the same rows, other masks


def test_a_run_leaves_torchs_generator_alone(fed: Federation) -> None:
    module = nn.Sequential(nn.Linear(D, 3), nn.Dropout(0.5))
    state = torch.get_rng_state()
    simulate(fed, module, FedAvg(alpha=0.1), **RUN)
    simulate(fed, "mlp", FedAvg(alpha=0.1), **RUN)
    assert torch.equal(torch.get_rng_state(), state)


class AlwaysDropout(nn.Module):
    """Draws in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5)


def test_a_module_that_draws_in_evaluations(fed: Federation) -> None:
    module = AlwaysDropout()
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        runs.append(simulate(fed, module, FedAvg(alpha=0.1), **RUN))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0].x, runs[1].x)
    np.testing.assert_array_equal(runs[0].trace["test_loss"], runs[1].trace["test_loss"])


@pytest.mark.parametrize("make", [Recurrent, batch_norm, Residual])
def test_any_module_learns(fed: Federation, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    run = simulate(fed, make(), FedAvg(alpha=0.3), **{**RUN, "rounds": 40, "batch_size": None})
    assert run.trace["train_loss"][-1] < 0.85 * run.trace["train_loss"][1]


# --- models and flat vectors
# ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "d"),
    [
        ("linear", 7840),
        ("mclr", 7850),
        ("mlp", 25450),
        ("cnn", 6230),
        ("cnn-small", 208 + 1168 + 7850),
    ],
)
def test_parameter_counts_on_mnist(name: str, d: int) -> None:
    assert ravel(build(name, (1, 28, 28), 10)).numel() == d


def test_building_a_model_is_reproducible_and_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    a, b, c = (ravel(build("mlp", (D,), 3, seed=s)) for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)


def test_ravel_and_unravel_are_inverse() -> None:
    module = conv(3)
    x = torch.arange(float(ravel(module).numel()))
    unravel_into(module, x)
    assert torch.equal(ravel(module), x)


def test_wrong_models_and_losses_are_refused(fed: Federation) -> None:
    with pytest.raises(InputError, match="unknown model 'mcrl'; did you mean 'mclr'"):
        simulate(fed, "mcrl")
    with pytest.raises(InputError, match=r"model 'cnn' needs images .*got \(4,\)"):
        simulate(fed, "cnn")
    with pytest.raises(
        InputError, match="loss 'mse' needs a model with one output, this one has 3"
    ):
        simulate(fed, nn.Linear(D, 3), loss="mse")
    with pytest.raises(InputError, match=r"one value per row.*use reduction='none'"):
        simulate(fed, "mclr", loss=F.cross_entropy)
    with pytest.raises(InputError, match="no trainable parameters"):
        simulate(fed, nn.Linear(D, 3).requires_grad_(False))
    assert {"linear", "mclr", "mlp", "cnn", "cnn-small"} <= set(MODELS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_added_to_value_gradient_and_curvature(kind: Kind) -> None:
    module, loss, x, batch = problem("tanh" if kind is not Dense else "mclr", "cross_entropy")
    plain, ridge, v = kind(module, loss), kind(module, loss), torch.randn_like(x)
    ridge.l2 = 0.3
    with torch.no_grad():
        value, grad = plain.value_and_grad(x, batch)
        found, slope = ridge.value_and_grad(x, batch)
        expected = value + 0.15 * x.square().sum(-1)
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(ridge.value(x, batch), expected, **CLOSE)
        torch.testing.assert_close(slope, grad + 0.3 * x, **CLOSE)
        torch.testing.assert_close(
            ridge.hvp(x, v, batch), plain.hvp(x, v, batch) + 0.3 * v, **CLOSE
        )
        eye = torch.eye(x.shape[-1], dtype=x.dtype)
        torch.testing.assert_close(
            ridge.hessian(x, batch), plain.hessian(x, batch) + 0.3 * eye, **CLOSE
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_of_the_diagonal_has_the_penalty_once(kind: Kind) -> None:
    module, loss, x, batch = problem("mclr", "cross_entropy")
    plain, ridge, u = (
        kind(module, loss),
        kind(module, loss),
        torch.full(batch.weight.shape, 0.4, dtype=torch.float64),
    )
    ridge.l2 = 0.3
    with torch.no_grad():
        g = plain.value_and_grad(x, batch._replace(y=plain.targets(x, batch, u)))[1]
        expected = torch.tensor([5.0, 3.0, 1.0]).view(M, 1, 1) * g * g
        torch.testing.assert_close(plain.bartlett(x, batch, u), expected, **CLOSE)
        torch.testing.assert_close(ridge.bartlett(x, batch, u), expected + 0.3, **CLOSE)
