"""Registered models: parameter counts, shapes, runs; and users' modules whose buffers must not mix
with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsso import Federation, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithms.fedsso import FedSSO
from fedsso.algorithms.first_order.fedavg import FedAvg
from fedsso.errors import InputError
from fedsso.models import MODELS, build
from fedsso.objective.backend import Layout, buffers_into, buffers_of, ravel, unravel_into

F64 = torch.float64
GREY, COLOUR, TEXT = (1, 28, 28), (3, 32, 32), (50, 65)


# --- registered models
# -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "sample", "outputs", "d"),
    [
        ("mclr", GREY, 10, 7850),
        ("mclr", COLOUR, 10, 30730),
        ("mclr", TEXT, 65, 211315),
        ("mlp", GREY, 10, 25450),
        ("cnn", GREY, 10, 6230),
        ("lenet", COLOUR, 10, 49402),
        ("lenet", GREY, 10, 44426),
        ("resnet20-gn", COLOUR, 100, 275572),
        ("resnet18-gn", COLOUR, 10, 11173962),
        ("vit-tiny", COLOUR, 10, 5362378),
        ("charmlp", TEXT, 65, 424513),
        ("lstm", TEXT, 65, 815945),
        ("gpt-nano", TEXT, 65, 816449),
        ("textmlp", (1024,), 2, 1024 * 64 + 64 + 64 * 32 + 32 + 32 * 2 + 2),
    ],
)
def test_parameter_counts(name: str, sample: Sequence[int], outputs: int, d: int) -> None:
    assert ravel(build(name, sample, outputs)).numel() == d


OF_TEXT = ("lstm", "gpt-nano")
ON_IMAGES = [
    (name, sample)
    for sample in (GREY, COLOUR, (2, 16, 21))
    for name in MODELS
    if name not in OF_TEXT
]


@pytest.mark.parametrize(("name", "sample"), [*ON_IMAGES, *((name, (6, 9)) for name in OF_TEXT)])
def test_every_model_maps_samples_to_outputs_and_has_a_gradient(
    name: str, sample: Sequence[int]
) -> None:
    module = build(name, sample, 7)
    x = torch.randn(3, *sample, generator=torch.Generator().manual_seed(0))
    out = module(x)
    assert out.shape == (3, 7)
    grads = torch.autograd.grad(
        cross_entropy(out, torch.tensor([0, 3, 6])), list(module.parameters())
    )
    for (parameter, _), grad in zip(module.named_parameters(), grads, strict=True):
        assert grad.isfinite().all(), parameter
        assert grad.any(), parameter
    assert not list(module.buffers())


@pytest.mark.parametrize("name", ["mclr", "mlp", "charmlp", "textmlp"])
def test_models_of_vectors_take_tables_and_texts(name: str) -> None:
    assert build(name, (5,), 2)(torch.zeros(4, 5)).shape == (4, 2)
    assert build(name, TEXT, 65)(torch.zeros(4, *TEXT)).shape == (4, 65)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("cnn", 4),
        ("cnn-small", 4),
        ("lenet", 16),
        ("resnet20-gn", 4),
        ("resnet18-gn", 4),
        ("vit-tiny", 4),
    ],
)
def test_a_sample_that_does_not_suit_is_an_error(name: str, least: int) -> None:
    assert build(name, (1, least, least), 2)(torch.zeros(2, 1, least, least)).shape == (2, 2)
    for sample in ((1, least - 1, 28), (1, 28, least - 1), (784,), TEXT, (1, 1, 28, 28)):
        with pytest.raises(InputError) as error:
            build(name, sample, 2)
        shape = f"[channels, height >= {least}, width >= {least}]"
        assert str(error.value) == f"model {name!r} needs images {shape}, got {sample}"


def test_the_logits_of_lenet_can_be_negative() -> None:
    out = build("lenet", GREY, 10)(
        torch.randn(20, *GREY, generator=torch.Generator().manual_seed(0))
    )
    assert (out < 0).any()
    assert (out > 0).any()


def test_a_shortcut_keeps_every_second_pixel_and_adds_empty_channels() -> None:
    """With a body that gives zero, a block of ResNet-20 is its shortcut and a ReLU."""
    module = build("resnet20-gn", COLOUR, 10)
    narrow, wider = module.get_submodule("5"), module.get_submodule("6")
    for values in (*narrow.parameters(), *wider.parameters()):
        nn.init.zeros_(values)
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(narrow(x), x)
    assert torch.equal(wider(x), torch.cat([x[:, :, ::2, ::2], torch.zeros(2, 16, 4, 4)], 1))


def pictures(sample: Sequence[int], sizes: Sequence[int] = (12, 8, 10)) -> Federation:
    """uint8 images whose brightness tells the class, of three clients."""
    draw = torch.Generator().manual_seed(5)

    def client(rows: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(rows) % 2
        x = torch.randint(0, 128, (rows, *sample), generator=draw) + 120 * y.view(-1, 1, 1, 1)
        return x.to(torch.uint8), y

    fed = Federation.from_clients([client(n) for n in sizes], classes=2)
    return Federation(**{**vars(fed), "affine": (2 / 255, -1.0)})


RUN: dict[str, Any] = {
    "rounds": 2,
    "local_steps": 2,
    "batch_size": None,
    "dtype": "float64",
    "eval_train": True,
}


@pytest.mark.parametrize(
    "algorithm", [FedAvg(alpha=0.01), FedSSO(alpha=0.01)], ids=["fedavg", "fedsso"]
)
@pytest.mark.parametrize(("name", "sample"), [("lenet", (1, 16, 16)), ("resnet20-gn", (3, 8, 8))])
def test_large_models_run(name: str, sample: Sequence[int], algorithm: Algorithm) -> None:
    run = simulate(pictures(sample), name, algorithm, **RUN)
    assert not run.diverged
    assert run.x.isfinite().all()
    assert not torch.equal(run.x, ravel(build(name, sample, 2)).double())
    assert run.trace["full_train_loss"][-1] < run.trace["full_train_loss"][0]


def test_stacked_and_looped_clients_agree_on_lenet() -> None:
    fed, options = pictures((1, 16, 16)), {**RUN, "batch_size": 4}
    stacked, loop = (
        simulate(fed, "lenet", FedSSO(alpha=0.01), engine=e, **options) for e in ("stacked", "loop")
    )
    torch.testing.assert_close(stacked.x, loop.x, rtol=1e-9, atol=1e-11)
    assert stacked.trace["test_loss"].tolist() == pytest.approx(
        loop.trace["test_loss"].tolist(), rel=1e-9
    )


# --- users' modules: flat vectors and buffers
# ------------------------------------------------------------------------
class Mixed(nn.Module):
    """Everything that a flat vector could mix up: statistics, an integer count, a single number, a
    frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.bias = nn.Parameter(torch.tensor([0.25]))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.frozen(x)) * self.scale + self.bias)
        return out


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed().double()


TRAINED = ("scale", "bias", "norm.weight", "norm.bias", "head.weight", "head.bias")
STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def test_a_flat_vector_has_the_trainable_parameters_and_nothing_else() -> None:
    module = mixed()
    assert set(Layout.of(module).names) == set(TRAINED)
    assert ravel(module).numel() == 1 + 1 + 5 + 5 + 15 + 3
    assert buffers_of(module).numel() == 5 + 5 + 1


def test_writing_a_flat_vector_leaves_statistics_and_frozen_parameters_alone() -> None:
    module, before = mixed(), mixed().state_dict()
    x = torch.arange(30, dtype=F64) + 100
    unravel_into(module, x)
    after = module.state_dict()
    assert torch.equal(ravel(module), x)
    assert (
        torch.cat([after[name].reshape(-1) for name in TRAINED]).sort().values.tolist()
        == x.tolist()
    )
    for name in before.keys() - set(TRAINED):
        assert torch.equal(after[name], before[name]), name


def test_writing_statistics_leaves_every_parameter_alone_and_keeps_the_count_whole() -> None:
    module, before = mixed(), mixed().state_dict()
    values = torch.cat([torch.arange(10, dtype=F64) + 0.5, torch.tensor([6.6], dtype=F64)])
    buffers_into(module, values)
    after = module.state_dict()
    assert after["norm.running_mean"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert after["norm.running_var"].tolist() == [5.5, 6.5, 7.5, 8.5, 9.5]
    assert after["norm.num_batches_tracked"].dtype == torch.int64
    assert after["norm.num_batches_tracked"] == 7
    assert buffers_of(module).tolist() == [*values[:-1].tolist(), 7.0]
    for name in before.keys() - set(STATISTICS):
        assert torch.equal(after[name], before[name]), name


class Tempered(nn.Module):
    """Logits times a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x) * self.temperature
        return out


@pytest.mark.parametrize("engine", ["stacked", "loop"])
def test_a_parameter_may_have_no_dimensions(engine: str) -> None:
    torch.manual_seed(0)
    module = Tempered().double()
    run = simulate(table(), module, FedSSO(alpha=0.1), engine=engine, **ROUND)
    trained = run.model
    assert isinstance(trained, Tempered)
    assert trained.temperature.shape == ()
    assert trained.temperature.item() != 1.5
    assert torch.equal(ravel(trained), run.x)


def table(weights: Sequence[float] | None = None) -> Federation:
    draw = torch.Generator().manual_seed(2)
    sizes = (9, 16, 5)
    rows = [
        (torch.randn(n, 4, generator=draw, dtype=F64) + i, torch.arange(n) % 3)
        for i, n in enumerate(sizes)
    ]
    return Federation.from_clients(rows, test_fraction=0.2, classes=3, weights=weights)


ROUND: dict[str, Any] = {"rounds": 1, "local_steps": 1, "batch_size": None, "dtype": "float64"}


@pytest.mark.parametrize("weights", [None, (0.2, 0.7, 0.1)])
@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(alpha=0.1, eta=0.5), FedSSO(alpha=0.1, eta=3.0, guard="none")],
    ids=["fedavg", "fedsso"],
)
def test_statistics_are_the_weighted_mean_of_the_clients_whatever_the_server_does(
    algorithm: Algorithm, weights: Sequence[float] | None
) -> None:
    """One step on all rows: each client's statistics are 0.9 * old + 0.1 * (mean, variance) of its
    rows."""
    fed, module = table(weights), mixed()
    run = simulate(fed, module, algorithm, **ROUND)
    mean, var = torch.zeros(5, dtype=F64), torch.zeros(5, dtype=F64)
    for i, p in enumerate(fed.p):
        hidden = module.frozen(fed.x[fed.rows_of(i)])
        mean += p * 0.1 * hidden.mean(0)
        var += p * (0.9 + 0.1 * hidden.var(0))
    trained = run.model
    assert isinstance(trained, Mixed)
    torch.testing.assert_close(trained.norm.running_mean, mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(trained.norm.running_var, var, rtol=1e-12, atol=1e-14)
    assert trained.norm.num_batches_tracked is not None
    assert (trained.norm.num_batches_tracked.dtype, int(trained.norm.num_batches_tracked)) == (
        torch.int64,
        1,
    )


def test_fedsso_steps_the_weights_of_a_batch_norm_model_by_its_own_rule() -> None:
    """The first step is x - eta * g, with g the weighted mean of the clients' gradients in training
    mode."""
    fed, module = table(), mixed()
    seen = mixed()
    weights = [seen.get_parameter(name) for name in Layout.of(seen).names]
    g = torch.zeros_like(ravel(module))
    for i, p in enumerate(fed.p):  # in training mode outputs do not depend on the statistics
        loss = cross_entropy(seen(fed.x[fed.rows_of(i)]), fed.y[fed.rows_of(i)])
        g += p * torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, weights)])
    run = simulate(fed, module, FedSSO(alpha=0.1, eta=3.0, guard="none"), **ROUND)
    torch.testing.assert_close(run.x, ravel(module) - 3.0 * g, rtol=1e-9, atol=1e-12)
    assert isinstance(run.model, Mixed)
    assert torch.equal(run.model.frozen.weight, module.frozen.weight)
    assert torch.equal(run.model.frozen.bias, module.frozen.bias)
    assert torch.equal(ravel(run.model), run.x)


def test_statistics_follow_the_clients_that_answer_and_their_steps() -> None:
    """One client takes part, so its three steps on all its rows make the statistics."""
    fed, module = table(), mixed()
    run = simulate(
        fed,
        module,
        FedSSO(alpha=0.1, eta=0.1),
        **{**ROUND, "local_steps": 3, "participation": 0.34},
    )
    assert isinstance(run.model, Mixed)
    mean, count = run.model.norm.running_mean, run.model.norm.num_batches_tracked
    assert mean is not None
    assert count is not None
    assert int(count) == 3
    hidden = [module.frozen(fed.x[fed.rows_of(i)]) for i in range(fed.clients)]
    alone = [(1 - 0.9**3) * h.mean(0) for h in hidden]  # the frozen layer below does not move
    found = [torch.allclose(mean, wanted, rtol=1e-12) for wanted in alone]
    assert sum(found) == 1
