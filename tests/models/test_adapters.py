"""Adapters and frozen parameters: what is trained, sent and kept is what is trainable, no more."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsso
from fedsso import FedAvg, Federation, FedSSO, InputError, Simulation, lora, simulate
from fedsso.engine import checkpoint
from fedsso.models import build
from fedsso.models.adapters import Adapted, merged
from fedsso.objective.backend import Layout, copied, ravel

F64 = torch.float64
ROUND: dict[str, Any] = {"local_steps": 2, "batch_size": None, "dtype": "float64"}


@pytest.fixture(scope="module")
def fed() -> Federation:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for n in (9, 14, 6):
        x = torch.randn(n, 5, generator=draw, dtype=F64)
        rows.append((x, torch.arange(n) % 3))
    return Federation.from_clients(rows, classes=3, test_fraction=0.2)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters by name."""
    return {name: p for name, p in module.named_parameters() if not p.requires_grad}


# ---- the wrapper ----


def test_a_new_adapter_changes_nothing_and_the_model_given_stays_as_it_was() -> None:
    module = network()
    before = deepcopy(module.state_dict())
    x = torch.randn(4, 5, dtype=F64)
    adapted = lora(module, 2)
    assert torch.equal(adapted(x), module(x))
    assert module.state_dict().keys() == before.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.requires_grad for p in module.parameters())
    assert Layout.of(adapted).names == ("0.down", "0.up", "3.down", "3.up")


def test_a_merged_model_computes_the_same_and_has_the_given_architecture() -> None:
    module = network()
    adapted = lora(module, 2)
    for name, p in adapted.named_parameters():
        if name.endswith("up"):
            nn.init.normal_(p)
    x = torch.randn(4, 5, dtype=F64)
    wanted = adapted(x)
    full = merged(deepcopy(adapted))
    assert type(full.get_submodule("0")) is nn.Linear
    assert full.state_dict().keys() == module.state_dict().keys()
    # Sums of at most 7 numbers near 1, in another order.
    torch.testing.assert_close(full(x), wanted, rtol=1e-12, atol=1e-13)
    assert not torch.equal(full(x), module(x))


def test_the_rank_is_at_most_the_inputs_and_outputs() -> None:
    adapted = lora(network(), 6)
    shapes = {name: tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}
    assert shapes == {"0.down": (5, 5), "0.up": (7, 5), "3.down": (3, 7), "3.up": (3, 3)}


def test_layers_and_whole_modules_can_be_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedsso"):
        adapted = lora(network(), 2, layers=["0"], train=["3", "2.bias"])
    names = Layout.of(adapted).names
    assert names == ("0.down", "0.up", "2.bias", "3.weight", "3.bias")
    trained = 2 * 5 + 7 * 2 + 7 + 7 * 3 + 3
    assert f"{trained} parameters beside {5 * 7 + 7 + 14 + 24}, in 0" in caplog.text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lora(network(), 0), "rank must be a whole number >= 1, got 0"),
        (lambda: lora(network(), layers=["1"]), "'1'.*Known: 0, 3"),
        (lambda: lora(network(), layers=["3"], train=["3"]), "'3'.*Known: 0"),
        (lambda: lora(network(), train=["head"]), "unknown module or parameter 'head'"),
        (lambda: lora(nn.Conv2d(1, 2, 3)), "no linear layer that can have an adapter"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_a_layer_of_two_names_stays_one() -> None:
    shared = nn.Linear(4, 4)
    adapted = lora(nn.Sequential(shared, nn.Tanh(), shared), 2)
    assert adapted.get_submodule("0") is adapted.get_submodule("2")
    full = merged(adapted)
    assert full.get_submodule("0") is full.get_submodule("2")


def test_torchs_own_transformer_uses_its_adapters_in_evaluation_too() -> None:
    """Its encoder layer reads weights by itself while it predicts: it is left alone."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    adapted = lora(nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3)), 2)
    assert Layout.of(adapted).names == ("2.down", "2.up")
    nn.init.normal_(adapted.get_parameter("2.up"))
    x = torch.randn(2, 3, 8)
    training = adapted(x)
    with torch.no_grad():
        predicted = adapted.eval()(x)
    torch.testing.assert_close(predicted, training, rtol=1e-4, atol=1e-5)


# ---- in a run ----


def test_with_full_rank_an_adapter_learns_what_the_layer_would(fed: Federation) -> None:
    """With A the identity and frozen, W + B A has the gradient of W: both take the same steps."""
    layer = nn.Linear(5, 3, bias=False).double()
    adapted = lora(layer, 3)
    assert isinstance(adapted, Adapted)
    adapted.down = nn.Parameter(torch.eye(5, dtype=F64), requires_grad=False)
    adapted.up = nn.Parameter(torch.zeros(3, 5, dtype=F64))
    own = simulate(fed, layer, FedAvg(alpha=0.1), rounds=3, **ROUND)
    low = simulate(fed, adapted, FedAvg(alpha=0.1), rounds=3, **ROUND)
    # Six steps of sums over at most 14 rows: some hundred roundings of numbers near 1.
    torch.testing.assert_close(ravel(own.model), low.model.weight.reshape(-1), rtol=0, atol=1e-12)
    assert isinstance(low.model, nn.Linear)
    assert (own.x - ravel(layer)).norm() > 0.01


@pytest.mark.parametrize("engine", ["stacked", "loop"])
@pytest.mark.parametrize("algorithm", [FedAvg(alpha=0.1), FedSSO(alpha=0.1)])
def test_only_what_is_trained_travels(
    fed: Federation, engine: str, algorithm: fedsso.Algorithm
) -> None:
    adapted = lora(network(), 1)
    d = 5 + 7 + 7 + 3
    run = simulate(fed, adapted, algorithm, rounds=2, engine=engine, **ROUND)
    assert run.x.shape == (d,)
    up = run.trace["bytes_up"][1:]
    vectors = up[0] / (fed.clients * d * 8)
    assert 1 <= vectors < 3  # a model, and what FedSSO sends beside it
    for name, p in frozen(adapted).items():
        parts = name.split(".base.")
        if len(parts) == 1:
            assert torch.equal(run.model.get_parameter(name), p), name
    assert torch.equal(run.model.get_parameter("0.bias"), adapted.get_parameter("0.base.bias"))
    assert not torch.equal(
        run.model.get_parameter("0.weight"), adapted.get_parameter("0.base.weight")
    )


def test_frozen_parameters_are_shared_and_stay_to_the_bit(fed: Federation) -> None:
    adapted = lora(network(), 2)
    before = {name: p.clone() for name, p in frozen(adapted).items()}
    simulation = Simulation(fed, adapted, FedSSO(alpha=0.1), rounds=3, **ROUND)
    held = frozen(simulation.f.module)
    given = frozen(simulation.job.module)
    assert held.keys() == given.keys() == before.keys()
    for name, p in held.items():
        assert p is given[name], name
    for _ in simulation:
        pass
    for name, p in held.items():
        assert torch.equal(p, before[name]), name
    twin = copied(adapted)
    for name, p in twin.named_parameters():
        assert (p is adapted.get_parameter(name)) == (not p.requires_grad), name


def test_a_run_with_adapters_is_resumed_to_the_bit(fed: Federation, tmp_path: Path) -> None:
    adapted = lora(network(), 2, train=["3.bias"])
    whole = simulate(fed, adapted, FedSSO(alpha=0.1), rounds=4, **ROUND)

    def stop_after_three(label: str, k: int, rounds: int, numbers: object) -> None:  # noqa: ARG001
        if k == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate(
            fed,
            adapted,
            FedSSO(alpha=0.1),
            rounds=4,
            out=folder,
            checkpoint_every=2,
            progress=stop_after_three,
            **ROUND,
        )
    fedsso.resume(folder, federation=fed, model=adapted)
    read = fedsso.load_run(folder, federation=fed, model=adapted)
    assert torch.equal(read.x, whole.x)
    assert torch.equal(ravel(read.model.requires_grad_()), ravel(whole.model.requires_grad_()))
    assert read.clients().loss.tolist() == whole.clients().loss.tolist()
    kept = checkpoint.load(folder / "checkpoint.safetensors", read.spec.identity)
    assert kept["model"].numel() == 2 * 5 + 7 * 2 + 2 * 7 + 3 * 2 + 3


def test_errors_name_parameters(fed: Federation) -> None:
    adapted = lora(network(), 1)
    with pytest.raises(InputError, match=r"d = 22 parameters: 0\.down \[1, 5\], 0\.up \[7, 1\]"):
        simulate(fed, adapted, FedAvg(alpha=0.1), init=torch.zeros(3))


def test_a_transformer_is_adapted_through_both_engines() -> None:
    """Two clients of characters: stacked by torch.func and one by one, the same model."""
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 4, (8, 5), generator=draw)
    x = nn.functional.one_hot(codes, 4).double()
    fed = Federation.from_clients([(x[:5], codes[:5, 0]), (x[5:], codes[5:, 0])], classes=4)
    adapted = lora(build("gpt-nano", (5, 4), 4).double(), 2, train=["head"])
    runs = [
        simulate(fed, adapted, FedAvg(alpha=0.1), rounds=1, engine=engine, **ROUND)
        for engine in ("stacked", "loop")
    ]
    moved = (runs[0].x - ravel(adapted)).norm()
    assert moved > 1e-4
    assert (runs[0].x - runs[1].x).norm() < 1e-9 * moved
