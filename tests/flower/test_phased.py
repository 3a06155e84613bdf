"""Every algorithm of the registry over Flower's messages: the simulator's results, and rounds in
which clients fail."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from grid import NODES, LocalGrid, Tamper
from torch import Tensor, nn

from fedsso import Federation, Run, simulate
from fedsso.algorithm import Algorithm
from fedsso.algorithm.schedule import Decay
from fedsso.algorithms import ALGORITHMS, make
from fedsso.errors import InputError
from fedsso.experiment.problem import build_model
from fedsso.flower import exchange
from fedsso.flower.client import client_app
from fedsso.flower.phased import PhasedStrategy
from fedsso.objective import buffers_of, ravel
from samples import case

SIZES = (23, 9, 14)
IN_ORDER = sorted(NODES[: len(SIZES)])
SETTINGS: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "seed": 1}
FEW = {"cg_steps": 6}  # of the solvers that would take most of the time
LINEAR = ("nl1", "nl2")  # for models with one output
CONVEX = (
    "aide",
    *LINEAR,
    "dane",
    "disco",
    "done",
    "fednew",
    "fednl",
    "fednl-ls",
    "fednl-pp",
    "fedpm",
    "giant",
    "localnewton",
)
EXTRA: dict[str, tuple[dict[str, Any], ...]] = {
    "fedsso": (
        {},
        {"alpha": 0.05, "form": "lbfgs", "m": 2},
    ),  # the clients' step comes with the message, or not
    "scaffold": ({}, {"option": "I"}),
    "fednl": (
        {},
        {"option": 2, "first": "zero", "compressor": "topk:0.2"},
        {"often": 0.5},
        {"compressor": "randk:0.5"},
        {"compressor": "powersgd:2"},
    ),
    "nl1": ({"K": 3},),
    "nl2": ({"K": 12},),  # more than the smallest client has
    "fednew": (FEW, {"r": 2, **FEW}),
    "dane": ({"newton_steps": 2, **FEW},),
    "harmofl": ({"sample": "4"}, {"sample": "2x2", "L": 0.5}),
    "aide": ({"newton_steps": 2, **FEW},),
    "disco": (FEW, {"precondition": "bfgs"}),
    "giant": (FEW,),
    "localnewton": ({"newton_steps": 2, **FEW},),
}
REMEMBER = ("fedvarp", "mifa", "bl1", "bl2", "bl3")  # are refused: their servers tell clients apart
APART = ("mocha",)  # are refused: their servers speak to single clients
FULL_PASSES = ("fedsso", "fedavg", "ldsgd")  # are tested without mini-batches as well


@pytest.fixture(scope="module")
def fed(make_fed: Callable[..., Federation]) -> Federation:
    return make_fed(SIZES)


def rows(fed: Federation) -> Callable[[Context], Any]:
    """The rows of the client that a node's partition names."""

    def data(context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = [
            fed.rows_of(int(context.node_config["partition-id"]), part)
            for part in ("train", "test")
        ]
        return fed.x[parts[0]], fed.y[parts[0]], fed.x[parts[1]], fed.y[parts[1]]

    return data


def model_of(name: str, fed: Federation) -> nn.Module:
    """Methods for convex problems are tested on one; FedPer needs two layers."""
    loss = loss_of(name)
    return build_model("mclr" if name in CONVEX else "mlp", fed, seed=3, loss=loss).double()


def loss_of(name: str) -> str:
    """The logistic loss where the model has one output."""
    return "bce" if name in LINEAR else "cross_entropy"


def app_of(module: nn.Module, fed: Federation) -> ClientApp:
    outputs = ravel(module).numel() == 5  # four features and a bias
    return client_app(lambda: module, rows(fed), "bce" if outputs else "cross_entropy")


def grid_of(module: nn.Module, fed: Federation, tamper: Tamper | None = None) -> LocalGrid:
    configs = [{"partition-id": i} for i in range(fed.clients)]
    return LocalGrid(app_of(module, fed), configs, tamper, in_order=True)


def strategy_of(algorithm: str | Algorithm, **options: Any) -> PhasedStrategy:
    return PhasedStrategy(algorithm, **{**SETTINGS, "min_train_nodes": 3, **options})


def start_of(module: nn.Module) -> ArrayRecord:
    return ArrayRecord(module.state_dict())


def flat(arrays: ArrayRecord, module: nn.Module) -> Tensor:
    module.load_state_dict(arrays.to_torch_state_dict())
    return ravel(module)


def simulated(
    fed: Federation, module: nn.Module, algorithm: str | Algorithm, rounds: int = 3, **options: Any
) -> Run:
    settings = {**SETTINGS, "dtype": "float64", "device": "cpu", **options}
    return simulate(fed, module, algorithm, rounds=rounds, **settings)


def run(
    name: str, fed: Federation, rounds: int = 3, tamper: Tamper | None = None, **options: Any
) -> tuple[PhasedStrategy, LocalGrid, Tensor]:
    """A run on Flower: the strategy and the grid afterwards, and the model."""
    module = model_of(name, fed)
    strategy, grid = (
        strategy_of(name, **{"fraction_evaluate": 0.0, **options}),
        grid_of(module, fed, tamper),
    )
    result = strategy.start(grid, start_of(module), num_rounds=rounds)
    return strategy, grid, flat(result.arrays, module)


def close(a: Tensor, b: Tensor) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


# ---- the simulator's results ----


def records() -> list[Any]:
    """Every algorithm with each of its variants, of which the first is always tested."""
    found = []
    for name in ALGORITHMS:
        if name in REMEMBER + APART:
            continue
        variants = EXTRA.get(name, ({},))
        for extra in variants:
            label = "-".join(map(str, (name, *extra.values(), 4)))
            found.append(case(name, extra, 4, name=label, spare=extra != variants[0]))
    for name in FULL_PASSES:
        found.append(case(name, {}, None, name=f"{name}-None", spare=True))
    return found


@pytest.mark.parametrize(("name", "extra", "batch_size"), records())
def test_flower_equals_the_simulator(
    fed: Federation,
    make_fed: Callable[..., Federation],
    name: str,
    extra: dict[str, Any],
    batch_size: int | None,
) -> None:
    fed = make_fed(SIZES, classes=2) if name in LINEAR else fed
    options = {"batch_size": batch_size, "loss": loss_of(name)}
    expected = simulated(fed, model_of(name, fed), make(name, extra), **options)
    personal = ALGORITHMS[name].personal
    strategy, _, x = run(
        name, fed, **extra, batch_size=batch_size, fraction_evaluate=float(personal)
    )
    if not personal:
        close(x, expected.x)
    for column in (
        "train_loss",
        "grad_norm",
        *(("test_loss", "test_accuracy") if personal else ()),
    ):
        np.testing.assert_allclose(
            strategy.trace[column][1:], expected.trace[column][1:], rtol=1e-9, err_msg=column
        )


@pytest.mark.parametrize("batch_size", [4, None])
def test_flower_equals_the_simulator_with_one_layer(
    fed: Federation, batch_size: int | None
) -> None:
    """FedSSO's radius then starts with the clients' loss: here f / |g|, where FedAvg's step is
    0.01 * 3 |g| and |g| is below 1. The strategy's server sees only means, so that it has no
    metric, and the simulator's one is told to have none."""
    module = build_model("mclr", fed, seed=3, loss="cross_entropy").double()
    plain = make("fedsso", {"shapes": "none"})
    expected = simulated(fed, module, plain, batch_size=batch_size)
    strategy = strategy_of("fedsso", fraction_evaluate=0.0, batch_size=batch_size)
    result = strategy.start(grid_of(module, fed), start_of(module), num_rounds=3)
    close(flat(result.arrays, module), expected.x)
    for column in ("radius", "gamma", "alpha", "train_loss"):
        np.testing.assert_allclose(strategy.trace[column][1:], expected.trace[column][1:], 1e-9)
    assert expected.trace["grad_norm"][1] < 1
    assert strategy._state is not None
    assert strategy._state.server.moments == ()
    length = expected.trace["train_loss"][1] / expected.trace["grad_norm"][1]
    assert strategy.trace["radius"][1] == pytest.approx(length, rel=1e-9)


class Noisy(nn.Module):
    """A model with statistics and draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def test_buffers_are_averaged_and_dropout_draws_as_in_the_simulator(fed: Federation) -> None:
    expected = simulated(fed, Noisy(), "scaffold", batch_size=5)
    grid = LocalGrid(client_app(Noisy, rows(fed)), [{"partition-id": i} for i in range(3)])
    strategy = strategy_of("scaffold", batch_size=5)
    result = strategy.start(grid, start_of(Noisy().double()), num_rounds=3)
    module = Noisy().double()
    close(flat(result.arrays, module), expected.x)
    close(buffers_of(module), buffers_of(expected.model))
    assert int(module.layers[1].num_batches_tracked) == 9
    np.testing.assert_allclose(
        strategy.trace["test_loss"][1:], expected.trace["test_loss"][1:], rtol=1e-9
    )


def test_penalty_schedule_and_float32_as_in_the_simulator(fed: Federation) -> None:
    module, record = build_model("mlp", fed, seed=3), make("fedavg", {"alpha": Decay(0.5, 1.0)})
    expected = simulate(fed, module, record, rounds=3, **SETTINGS, l2=0.1, device="cpu")
    strategy = strategy_of(record, l2=0.1)
    result = strategy.start(grid_of(module, fed), start_of(module), num_rounds=3)
    np.testing.assert_allclose(flat(result.arrays, module), expected.x, rtol=1e-5, atol=1e-6)
    assert strategy.curve().algorithm == "fedavg"


def test_a_tensor_is_sent_once_in_a_round(fed: Federation) -> None:
    _, grid, _ = run("feddane", fed, rounds=1)
    tasks = [(m.content["config"]["fedsso.task"], list(m.content["arrays"])) for m in grid.sent]
    first, second = tasks[0], tasks[3]
    assert first[1] == ["0", "1"]  # x and the (empty) buffers
    assert second[1] == ["2", "3"]  # g and new buffers
    assert '"message": ["0", "2"]' in second[0]


# ---- rounds in which clients fail ----


class Loses:
    """A way up on which replies are lost or changed: `when` holds clients and the numbers of their
    replies."""

    def __init__(self, when: Collection[tuple[int, int]], change: Tamper = lambda _: None) -> None:
        self.when, self.change, self.count = when, change, Counter[int]()

    def __call__(self, reply: Message) -> Message | None:
        client = IN_ORDER.index(reply.metadata.src_node_id)
        self.count[client] += 1
        return self.change(reply) if (client, self.count[client]) in self.when else reply


def spoiled(name: str, value: float) -> Tamper:
    """Puts a number into an array of a reply."""

    def change(reply: Message) -> Message:
        arrays = reply.content["arrays"]
        array = arrays[name].numpy().copy()
        array.flat[0] = value
        arrays[name] = Array(array)
        return reply

    return change


def test_a_lost_reply_leaves_no_trace_at_its_client(fed: Federation) -> None:
    lost = Loses({(0, 2), (1, 3), (2, 3), (0, 5)})
    strategy, grid, _ = run("scaffold", fed, rounds=6, tamper=lost, min_train_nodes=1)
    assert strategy.trace["dropped"].tolist()[1:] == [0, 1, 2, 0, 1, 0]
    state, nodes = strategy._state, grid.get_node_ids()
    assert state is not None
    assert [state.seen[node] // SETTINGS["local_steps"] for node in nodes] == [4, 5, 5]
    variates = [
        grid.contexts[n].state[f"fedsso.own.{state.versions[n]}"]["own"].numpy()[0] for n in nodes
    ]
    c = sum(p * variate for p, variate in zip(fed.p.tolist(), variates, strict=True))
    close(
        state.server.c[0], torch.from_numpy(c)
    )  # so every client went on from the reply that the server had


@pytest.mark.parametrize(
    ("name", "least", "reason"),
    [
        ("fednl-ls", 2, "FedNLLS needs all 3 nodes, 1 are missing"),
        ("fednew", 2, "FedNew needs all 3 nodes, 1 are missing"),
        ("giant", 3, "2 good replies, min_train_nodes is 3"),
    ],
)
def test_a_round_that_failed_is_undone_everywhere(
    fed: Federation, name: str, least: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    last = 2 * len(make(name).phases)  # exchange of round 2
    expected = simulated(fed, model_of(name, fed), name)
    strategy, _, x = run(name, fed, rounds=4, tamper=Loses({(1, last)}), min_train_nodes=least)
    close(x, expected.x)
    assert strategy.trace["kept"].tolist()[1:] == [0, 1, 0, 0]
    assert f"round 2 keeps the model: {reason}" in caplog.text
    assert strategy.k == 4


@pytest.mark.parametrize(
    ("values", "array", "value", "reason"),
    [
        ({}, "upload.g", np.nan, "NaN"),
        ({}, "upload.g", 1e30, "too long"),
        ({"compressor": "topk:3"}, "upload.S.places", 10**6, "cannot be decoded"),
        ({"compressor": "topk:3"}, "upload.S.places", -1, "cannot be decoded"),
    ],
)
def test_a_spoiled_upload_is_dropped(
    fed: Federation,
    values: Any,
    array: str,
    value: float,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tamper = Loses({(1, 2)}, spoiled(array, value))
    strategy, _, x = run("fednl-pp", fed, tamper=tamper, min_train_nodes=2, **values)
    assert torch.isfinite(x).all()
    assert strategy.trace["dropped"].tolist()[1:] == [0, 1, 0]
    assert f"node {IN_ORDER[1]} dropped" in caplog.text
    assert reason in caplog.text


def test_without_enough_replies_nothing_moves(
    fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, _, x = run("feddane", fed, rounds=2, tamper=lambda _: None, min_train_nodes=1)
    assert torch.equal(x, ravel(model_of("feddane", fed)))
    assert strategy.trace["kept"].tolist()[1:] == [1, 1]
    assert "0 good replies, min_train_nodes is 1" in caplog.text


def test_a_step_out_of_the_finite_numbers_is_not_made(
    fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    module = build_model("mlp", fed, seed=3)  # in float32
    before = ravel(module)
    result = strategy_of("fedavg", alpha=1e3, eta=1e37).start(
        grid_of(module, fed), start_of(module), num_rounds=1
    )
    assert torch.equal(flat(result.arrays, module), before)
    assert "leads out of the finite numbers" in caplog.text


def test_who_joins_later_is_left_out_where_all_are_needed(fed: Federation) -> None:
    module = model_of("fednl", fed)
    strategy, grid = strategy_of("fednl", fraction_evaluate=0.0), grid_of(module, fed)
    late = grid.contexts.popitem()
    strategy.inner.min_train_nodes = 2
    result = strategy.start(grid, start_of(module), num_rounds=1)
    grid.contexts[late[0]] = late[1]
    strategy.start(grid, result.arrays, num_rounds=2)
    assert late[0] not in {message.metadata.dst_node_id for message in grid.sent}
    assert strategy.trace["kept"].tolist()[1:] == [0, 0, 0]


def test_samples_of_nodes(fed: Federation) -> None:
    random.seed(1)
    for name in ("feddane", "scaffold"):
        strategy, grid, x = run(name, fed, rounds=4, fraction_train=0.7, min_train_nodes=2)
        assert torch.isfinite(x).all()
        assert len(grid.sent) == 4 * 2 * len(make(name).phases)
        assert strategy.trace["kept"].tolist()[1:] == [0] * 4


# ---- checkpoints, evaluation, input ----


def test_killed_and_resumed_as_if_nothing_had_happened(fed: Federation, tmp_path: Path) -> None:
    for name in ("fedadam", "fedsso", "stem"):
        module, folder = model_of(name, fed), tmp_path / name
        expected = simulated(fed, model_of(name, fed), name, rounds=5)
        assert strategy_of(name, checkpoint_dir=folder).resume() is None
        strategy_of(name, checkpoint_dir=folder).start(
            grid_of(module, fed), start_of(module), num_rounds=2
        )
        strategy = strategy_of(name, checkpoint_dir=folder)
        arrays = strategy.resume()
        assert arrays is not None
        result = strategy.start(grid_of(module, fed), arrays, num_rounds=strategy.rounds_left(5))
        close(flat(result.arrays, module), expected.x)
        np.testing.assert_allclose(
            strategy.trace["train_loss"][1:], expected.trace["train_loss"][1:], rtol=1e-9
        )


def test_what_cannot_be_resumed(fed: Federation, tmp_path: Path) -> None:
    module = model_of("scaffold", fed)
    strategy_of("scaffold", checkpoint_dir=tmp_path).start(
        grid_of(module, fed), start_of(module), num_rounds=1
    )
    with pytest.raises(InputError, match="keeps a state with every client"):
        strategy_of("scaffold", checkpoint_dir=tmp_path).resume()
    with pytest.raises(InputError, match="other settings"):
        strategy_of("scaffold", checkpoint_dir=tmp_path, alpha=0.5).resume()
    with pytest.raises(InputError, match="already holds a run"):
        strategy_of("scaffold", checkpoint_dir=tmp_path).start(
            grid_of(module, fed), start_of(module)
        )


def test_evaluation_by_clients_and_by_the_server(fed: Federation) -> None:
    module = model_of("scaffold", fed)
    expected = simulated(fed, module, "scaffold", rounds=2)
    seen: list[int] = []

    def central(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(server_round)
        return MetricRecord({"auc": float(flat(arrays, model_of("scaffold", fed)).norm())})

    strategy = strategy_of("scaffold")
    result = strategy.start(
        grid_of(module, fed), start_of(module), num_rounds=2, evaluate_fn=central
    )
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["eval_loss"] == pytest.approx(expected.trace["test_loss"][2], rel=1e-9)
    assert metrics["eval_acc"] == pytest.approx(expected.trace["test_accuracy"][2])
    assert seen == [0, 1, 2]
    assert strategy.trace["test_auc"][2] == pytest.approx(float(expected.x.norm()))
    assert result.train_metrics_clientapp[2]["fedsso-kept"] == 0


@pytest.mark.parametrize(
    ("algorithm", "options", "complaint"),
    [
        (
            "fednl",
            {"fraction_train": 0.5},
            "FedNL needs all clients in every round.*fraction_train=1.0, or fednl-pp",
        ),
        ("fedavg", {"fraction_train": 0.0}, "fraction_train must lie in"),
        ("fedavg", {"local_steps": 0}, "local_steps must be an integer >= 1"),
        ("fedavg", {"l2": -1.0}, "l2"),
        ("fedavgg", {}, "did you mean 'fedavg'"),
        ("fedavg", {"alfa": 1.0}, "did you mean 'alpha'"),
        (make("fedavg"), {"alpha": 1.0}, "a record alone"),
        (Algorithm(), {}, "not registered"),
        *((name, {}, "remembers what each client sent last") for name in REMEMBER),
        ("harmofl", {"sample": "4"}, "use fraction_evaluate=0"),
        *((name, {}, "sends every client a message of its own") for name in APART),
    ],
)
def test_bad_input(algorithm: Any, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        PhasedStrategy(algorithm, **options)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"fraction_evaluate": 2.0}, "fraction_evaluate must lie in"),
        ({"min_train_nodes": -1}, "min_train_nodes must be an integer >= 0"),
        ({"eta_l": 0.1}, "use alpha"),
        ({"inner": None}, "use FedSSO"),
    ],
)
def test_keywords_of_others_are_told_apart(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PhasedStrategy("scaffold", **keywords)


@pytest.mark.parametrize(
    ("told", "mean", "middle"),
    [
        # weights 1, 1 and 2: (1 + 5 + 2 * 3) / 4 = 3
        ([1.0, 5.0, 3.0], 3.0, 3.0),
        ([1.0, 3.0, 1e6], 500001.0, 3.0),
    ],
)
def test_a_lying_node_does_not_move_the_median_of_the_losses(
    told: list[float], mean: float, middle: float
) -> None:
    weights = (1.0, 1.0, 2.0)
    pairs = zip(told, weights, strict=True)
    good: Any = [SimpleNamespace(metrics={"train_loss": x}, weight=w) for x, w in pairs]
    assert exchange._loss(good, robust=False) == torch.tensor([[mean]], dtype=torch.float64)
    assert exchange._loss(good, robust=True) == torch.tensor([[middle]], dtype=torch.float64)
    good[0].metrics = {}
    assert exchange._loss(good, robust=True) is None
