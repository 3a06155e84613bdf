"""Larger networks: what they see, and that the engine differentiates them as plain torch does."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fedsso import FedAvg, Federation, simulate
from fedsso.errors import InputError
from fedsso.models import build
from fedsso.models.attention import PATCH, CharacterTransformer, VisionTransformer, patches
from fedsso.models.images import Projected
from fedsso.objective.backend import ravel
from samples import case

F64 = torch.float64
WINDOW = 6
ALPHABET = 5


def characters(rows: int, seed: int = 0) -> Tensor:
    """One-hot characters [rows, WINDOW, ALPHABET]."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, ALPHABET, (rows, WINDOW), generator=draw)
    return one_hot(codes, ALPHABET).double()


# ---- what they see ----


def test_no_place_of_gpt_nano_sees_a_later_character() -> None:
    """Another character at place t changes what is known at t and behind it, and nothing before.

    A row of attention is computed from its own place alone, so that the earlier ones keep their
    numbers but for the order of sums in a product: a dozen of roundings of numbers near 1.
    """
    module = build("gpt-nano", (WINDOW, ALPHABET), ALPHABET).double()
    assert isinstance(module, CharacterTransformer)
    x = characters(3)
    known = module.hidden(x)
    for t in range(WINDOW):
        other = x.clone()
        other[:, t] = x[:, t].roll(1, -1)
        moved = (module.hidden(other) - known).abs().amax((0, 2))
        assert (moved[:t] < 1e-12).all()
        assert (moved[t:] > 1e-6).all()


def test_every_character_of_the_window_counts() -> None:
    x = characters(1).requires_grad_()
    for name in ("gpt-nano", "lstm"):
        module = build(name, (WINDOW, ALPHABET), ALPHABET).double()
        (slope,) = torch.autograd.grad(module(x)[0, 0], x)
        assert (slope.abs().amax((0, 2)) > 0).all(), name


def test_the_order_of_characters_counts() -> None:
    module = build("gpt-nano", (WINDOW, ALPHABET), ALPHABET).double()
    x = characters(4)
    swapped = torch.cat([x[:, [1, 0]], x[:, 2:]], 1)
    different = (x[:, 0] != x[:, 1]).any(-1)
    assert different.any()
    moved = (module(x) - module(swapped)).abs().amax(-1)
    assert (moved[different] > 1e-6).all()


@pytest.mark.parametrize("name", ["gpt-nano", "lstm"])
def test_models_of_characters_refuse_other_samples(name: str) -> None:
    for sample in ((784,), (3, 32, 32)):
        with pytest.raises(InputError, match=r"one-hot characters \[window, alphabet\]"):
            build(name, sample, 2)


def test_patches_are_cut_row_by_row_and_padded_with_zeros() -> None:
    x = torch.arange(2 * 6 * 9, dtype=F64).reshape(1, 2, 6, 9) + 1
    cut = patches(x)
    assert cut.shape == (1, 2 * 3, 2 * PATCH * PATCH)
    assert torch.equal(cut[0, 0].reshape(2, PATCH, PATCH), x[0, :, :4, :4])
    assert torch.equal(cut[0, 1].reshape(2, PATCH, PATCH), x[0, :, :4, 4:8])
    last = cut[0, 5].reshape(2, PATCH, PATCH)
    assert torch.equal(last[:, :2, :1], x[0, :, 4:, 8:])
    assert not last[:, 2:].any()
    assert not last[:, :, 1:].any()


def test_attention_is_a_mean_of_values_with_weights_by_softmax() -> None:
    """One head, by the textbook: out(softmax(q k^T / sqrt(C)) v), place by place."""
    torch.manual_seed(0)
    module = VisionTransformer(1, 4, 3, width=4, heads=1, depth=1).double()
    attention = module.layers[0].get_submodule("attention")
    x = torch.randn(1, 4, 4, dtype=F64)
    q, k, v = attention.get_submodule("mix")(x)[0].split(4, -1)
    wanted = []
    for t in range(4):
        weight = torch.exp(k @ q[t] / 2)
        wanted.append(attention.get_submodule("out")(weight @ v / weight.sum()))
    torch.testing.assert_close(attention(x)[0], torch.stack(wanted), rtol=1e-12, atol=1e-14)


def test_a_block_of_resnet18_projects_where_channels_are_new() -> None:
    """With a body that gives zero, a block is its shortcut and a ReLU."""
    same = Projected(32, 32, 32)
    wider = Projected(32, 64, 32)
    for values in (*same.body.parameters(), *wider.body.parameters()):
        nn.init.zeros_(values)
    x = torch.rand(2, 32, 8, 8)
    assert torch.equal(same(x), x)
    assert wider(x).shape == (2, 64, 4, 4)
    assert torch.equal(wider(x), wider.project(x).relu())


# ---- in the engine ----


def of_two(x: Sequence[Tensor], classes: int) -> Federation:
    """Two clients with these samples, and labels in turn."""
    rows = [(one, torch.arange(len(one)) % classes) for one in x]
    return Federation.from_clients(rows, classes=classes)


def by_hand(fed: Federation, module: nn.Module, steps: int, alpha: float) -> Tensor:
    """A round of FedAvg with full batches, as one would write it in torch."""
    mean = torch.zeros_like(ravel(module))
    for i, p in enumerate(fed.p):
        own = deepcopy(module)
        rows = fed.rows_of(i)
        optimizer = torch.optim.SGD(own.parameters(), alpha)
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(own(fed.x[rows].double()), fed.y[rows]).backward()
            optimizer.step()
        mean += p * ravel(own)
    return mean


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("gpt-nano", "stacked"),
        ("gpt-nano", "loop"),
        ("vit-tiny", "stacked"),
        case("vit-tiny", "loop", name="vit-tiny-loop", spare=True),
        ("lstm", "stacked"),
        ("lstm", "loop"),
        case("resnet18-gn", "stacked", name="resnet18-gn-stacked", spare=True),
        case("resnet18-gn", "loop", name="resnet18-gn-loop", spare=True),
    ],
)
def test_the_engine_trains_a_network_as_plain_torch_does(name: str, engine: str) -> None:
    """Two steps of two clients. Gradients pass through a dozen layers in float64: each loses a few
    roundings of sums of some hundred terms, so that 1e-9 of the step is a wide bound."""
    if name in ("gpt-nano", "lstm"):
        x = [characters(4, 1), characters(3, 2)]
    else:
        draw = torch.Generator().manual_seed(0)
        x = [torch.randn(n, 1, 4, 8, generator=draw, dtype=F64) for n in (3, 2)]
    fed = of_two(x, ALPHABET)
    module = build(name, fed.sample_shape, ALPHABET).double()
    options = {"rounds": 1, "local_steps": 2, "batch_size": None, "dtype": "float64"}
    if name == "lstm" and engine == "stacked":
        with pytest.raises(InputError, match="cannot be stacked"):
            simulate(fed, module, FedAvg(alpha=0.1), engine=engine, **options)
        return
    run = simulate(fed, module, FedAvg(alpha=0.1), engine=engine, **options)
    wanted = by_hand(fed, module, 2, 0.1)
    moved = (wanted - ravel(module)).norm()
    assert moved > 1e-3
    assert (run.x - wanted).norm() < 1e-9 * moved
