"""Differential privacy and robust averages inside FedSSO: the noise is as large as it must be,
liars do little harm."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from clients import ALPHA, STEPS, federation, initial, loss, vector
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    Strategy,
)
from grid import NODES, LocalGrid
from numpy.typing import NDArray

from fedsso import InputError
from fedsso.flower import FedSSO

Vector = NDArray[np.float64]
D, CLIENTS, ROUNDS, NOISE, CLIP = 20_000, 5, 8, 0.8, 0.5
CURVATURE = np.geomspace(0.02, 1.0, D)
WRAPPERS = {
    DifferentialPrivacyServerSideFixedClipping: [],
    DifferentialPrivacyClientSideFixedClipping: [fixedclipping_mod],
    DifferentialPrivacyServerSideAdaptiveClipping: [],
    DifferentialPrivacyClientSideAdaptiveClipping: [adaptiveclipping_mod],
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Flower draws its noise from numpy's own generator."""
    np.random.seed(1)


# ---- noise beside one client's influence ----


def update(i: int, x: Vector) -> Vector:
    """What client i adds to the model: local steps on a quadratic around a point of its own."""
    centre, v = np.random.default_rng(i).normal(0.3, 1.0, D), x.copy()
    for _ in range(STEPS):
        v -= ALPHA * CURVATURE * (v - centre)
    return v - x


def clipped(i: int, x: Vector, norm: float) -> Vector:
    u = update(i, x)
    return u * min(1.0, norm / float(np.linalg.norm(u)))


def clients(mods: list[Any], absent: int | None = None) -> LocalGrid:
    """Clients of equal weight; `absent` adds next to nothing in the last round."""
    app = ClientApp()

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        x = message.content["arrays"]["w"].numpy()
        last = message.content["config"]["server-round"] == ROUNDS
        share = 1e-9 if last and i == absent else 1.0
        content = {
            "arrays": record(x + share * update(i, x)),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    return LocalGrid(app, [{"partition-id": i} for i in range(CLIENTS)])


def record(x: Vector) -> ArrayRecord:
    return ArrayRecord({"w": Array(x)})


def private(wrapper: Any, inside: Strategy | None = None, noise: float = NOISE) -> Any:
    """A private strategy; the adaptive ones begin at the norm that the others keep."""
    inside = inside or FedAvg(fraction_evaluate=0.0)
    if "Adaptive" in wrapper.__name__:
        return wrapper(inside, noise, CLIENTS, initial_clipping_norm=CLIP, clipped_count_stddev=2.0)
    return wrapper(inside, noise, CLIP, CLIENTS)


def sso(inner: Strategy) -> FedSSO:
    return FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=inner)


def averaged(strategy: FedSSO, grid: LocalGrid) -> tuple[Vector, Vector]:
    """The last model that was sent, and what the inner strategy made of the replies."""
    x = grid.sent[-1].content["arrays"]["w"].numpy()
    state = strategy.server.state
    assert state is not None
    return x, x - ALPHA * STEPS * state.g[0].numpy()


def influence(one: Vector, other: Vector) -> float:
    return float(np.linalg.norm(one - other))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inside_the_noise_is_as_large_as_one_clients_share_asks_for(wrapper: Any) -> None:
    grid, inner = clients(WRAPPERS[wrapper]), private(wrapper)
    norms: list[float] = []  # with which each round clips
    strategy = sso(inner)
    strategy.start(
        grid,
        record(np.zeros(D)),
        num_rounds=ROUNDS,
        evaluate_fn=lambda *_: norms.append(inner.clipping_norm),
    )
    x, v = averaged(strategy, grid)
    mean = x + sum(clipped(i, x, norms[-2]) for i in range(CLIENTS)) / CLIENTS
    asked = inner.noise_multiplier * inner.clipping_norm / CLIENTS
    assert float(np.std(v - mean)) / asked == pytest.approx(1.0, rel=0.05)
    assert abs(np.mean(v - mean)) < 0.05 * asked


def test_outside_the_noise_would_be_too_small_for_one_clients_influence() -> None:
    """Noise over noise_multiplier times influence: 1 is what the Gaussian mechanism asks for, less
    is unsafe."""
    server_side, absent = DifferentialPrivacyServerSideFixedClipping, 2
    plain = private(server_side)
    x0 = np.zeros(D)
    noisy = plain.start(clients([]), record(x0), num_rounds=1).arrays["w"].numpy()
    exact = x0 + sum(clipped(i, x0, CLIP) for i in range(CLIENTS)) / CLIENTS
    noise = float(np.std(noisy - exact))

    grids = clients([]), clients([], absent)
    strategies = [sso(private(server_side, noise=0.0)) for _ in grids]
    models = [
        s.start(g, record(x0), num_rounds=ROUNDS).arrays["w"].numpy()
        for s, g in zip(strategies, grids, strict=True)
    ]
    means = [averaged(s, g)[1] for s, g in zip(strategies, grids, strict=True)]
    assert noise / (NOISE * influence(*means)) == pytest.approx(1.0, rel=0.05)
    assert noise / (NOISE * influence(*models)) < 0.5  # a step may be five times as long


# ---- wrong order, too few replies ----


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_outside_it_is_refused_before_any_message(wrapper: Any) -> None:
    grid = clients(WRAPPERS[wrapper])
    outside = private(wrapper, FedSSO(eta_l=ALPHA, local_steps=STEPS))
    explained = rf"(?s)too little noise.*inner={wrapper.__name__}\(FedAvg"
    with pytest.raises(InputError, match=explained):
        outside.start(grid, record(np.zeros(D)), num_rounds=1)
    with pytest.raises(InputError, match=explained):
        outside.configure_train(1, record(np.zeros(D)), ConfigRecord(), grid)
    assert grid.sent == []


def test_it_is_refused_behind_another_wrapper_as_well() -> None:
    twice = private(
        DifferentialPrivacyServerSideFixedClipping,
        private(DifferentialPrivacyServerSideFixedClipping, FedSSO(eta_l=ALPHA, local_steps=STEPS)),
    )
    with pytest.raises(InputError, match="too little noise"):
        twice.start(clients([]), record(np.zeros(D)), num_rounds=1)
    with pytest.raises(InputError, match="steps on its own"):
        FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=twice)


def spoilt(reply: Message, how: str, sent: Message) -> Message | None:
    if reply.metadata.src_node_id != NODES[0]:
        return reply
    if how == "lost":
        return None
    if how == "error":
        return Message(Error(1, "no data"), reply_to=sent)
    reply.content["arrays"] = record(np.full(D, np.nan))
    return reply


@pytest.mark.parametrize("how", ["lost", "error", "nan"])
def test_with_fewer_replies_than_the_noise_is_made_for_the_model_is_kept(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid, start = clients([]), np.ones(D)
    grid.tamper = lambda reply: spoilt(reply, how, grid.sent[-1])
    strategy = sso(private(DifferentialPrivacyServerSideFixedClipping))
    result = strategy.start(grid, record(start), num_rounds=2)
    assert np.array_equal(result.arrays["w"].numpy(), start)
    assert [result.train_metrics_clientapp[k]["fedsso-kept"] for k in (1, 2)] == [1.0, 1.0]
    assert (
        f"4 good replies, but the noise is scaled for num_sampled_clients = {CLIENTS}"
        in caplog.text
    )
    grid.tamper = None  # everybody is back
    result = strategy.start(grid, record(start), num_rounds=1)
    assert result.train_metrics_clientapp[1]["fedsso-kept"] == 0.0
    assert not np.array_equal(result.arrays["w"].numpy(), start)


# ---- a client that lies ----

MANY = 7  # Bulyan bears one liar among so many
ROBUST: dict[str, Callable[[], Strategy]] = {
    "FedMedian": FedMedian,
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "FedTrimmedAvg": FedTrimmedAvg,
    "Bulyan": lambda: Bulyan(num_malicious_nodes=1),
}


def attacked(inner: Strategy) -> float:
    """The honest clients' loss after five rounds in which the first client sends -50 times its
    update."""
    grid = federation(MANY)

    def lie(reply: Message) -> Message:
        if reply.metadata.src_node_id == NODES[0] and "arrays" in reply.content:
            sent, arrays = grid.sent[-1].content["arrays"], reply.content["arrays"]
            for name in ("a.weight", "b.bias"):
                x = sent[name].numpy()
                arrays[name] = Array(x - 50 * (arrays[name].numpy() - x))
        return reply

    grid.tamper = lie
    result = sso(inner).start(grid, initial(), num_rounds=5)
    assert all(result.train_metrics_clientapp[k]["fedsso-kept"] == 0.0 for k in (1, 2, 3))
    return honest(result.arrays)


def honest(arrays: ArrayRecord) -> float:
    return float(np.mean([loss(vector(arrays), i) for i in range(1, MANY)]))


def test_a_liar_spoils_an_average() -> None:
    assert attacked(FedAvg()) > 10 * honest(initial())


@pytest.fixture
def _frozen() -> Iterator[None]:
    """Flower's Bulyan collects garbage again and again; what was loaded before need not be searched
    each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_frozen")
@pytest.mark.parametrize("name", ROBUST)
def test_a_robust_strategy_inside_bears_a_liar(name: str) -> None:
    assert attacked(ROBUST[name]()) < 0.1 * honest(initial())


# ---- what Flower's clipping cannot protect ----


@pytest.mark.parametrize(
    "array", [np.array(0.5), np.array(3), np.array([1, 2])], ids=["single", "count", "integers"]
)
def test_arrays_that_cannot_be_clipped_are_refused_before_anything_is_sent(
    array: NDArray[Any],
) -> None:
    grid = federation()
    start = ArrayRecord({"w": Array(np.zeros(3)), "odd": Array(array)})
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.5, 1.0, 3)
    with pytest.raises(InputError, match="cannot clip odd"):
        FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=inner).start(grid, start, num_rounds=1)
    assert not grid.sent


def test_an_inner_strategy_that_fails_costs_a_round_and_not_the_run() -> None:
    """Flower's clipping divides by the length of an update, which a client can make 0."""

    def idle(reply: Message) -> Message:
        if reply.metadata.src_node_id == NODES[0] and strategy.k == 1:
            reply.content["arrays"] = grid.sent[-1].content["arrays"]
        return reply

    grid = clients([])
    grid.tamper = idle
    inner = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 0.0, CLIP, CLIENTS
    )
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=inner)
    strategy.start(grid, record(np.zeros(D)), num_rounds=3)
    assert strategy.trace["kept"][1:].tolist() == [0, 1, 0]


def test_every_client_counts_the_same_where_the_noise_is_made_for_that() -> None:
    """However heavy a client says it is, it moves the average by its share of the clipping norm at
    most."""

    def heavy(reply: Message) -> Message:
        if reply.metadata.src_node_id == NODES[0]:
            reply.content["metrics"]["num-examples"] = 900_000
        return reply

    grids = [clients([]), clients([])]
    grids[1].tamper = heavy
    results = []
    for grid in grids:
        inner = DifferentialPrivacyServerSideFixedClipping(
            FedAvg(fraction_evaluate=0.0), 0.0, CLIP, CLIENTS
        )
        results.append(
            FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=inner).start(
                grid, record(np.zeros(D)), num_rounds=1
            )
        )
    np.testing.assert_allclose(*(result.arrays["w"].numpy() for result in results), atol=1e-12)


def test_swapped_arrays_are_clipped_as_all_others() -> None:
    """Flower's clipping pairs arrays by position."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        sent = message.content["arrays"]
        arrays = ArrayRecord({name: sent[name] for name in ("b", "a")})
        return Message(
            RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    start = ArrayRecord({"a": Array(np.full(9, 5.0)), "b": Array(np.full(9, -5.0))})
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e-3, 3)
    strategy = FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=inner)
    result = strategy.start(LocalGrid(app, [{}] * 3), start, num_rounds=1)
    assert abs(result.arrays["a"].numpy() - 5).max() <= 1e-3


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_private_run_goes_on_if_its_strategy_has_learnt_nothing(
    adaptive: bool, tmp_path: Any
) -> None:
    fixed, adapted = (
        DifferentialPrivacyServerSideFixedClipping,
        DifferentialPrivacyServerSideAdaptiveClipping,
    )

    def make() -> FedSSO:
        inner = private(adapted if adaptive else fixed, FedAvg(fraction_evaluate=0.0))
        return FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=inner, checkpoint_dir=tmp_path)

    make().start(clients([]), record(np.zeros(D)), num_rounds=1)
    if adaptive:
        with pytest.raises(InputError, match="the adapted clipping norm"):
            make().resume()
    else:
        assert make().resume() is not None


def test_who_merely_has_such_a_name_may_call_it() -> None:
    class DifferentialPrivacyStudy:
        def run(self) -> None:
            FedSSO(eta_l=ALPHA, local_steps=STEPS).start(federation(), initial(), num_rounds=1)

    DifferentialPrivacyStudy().run()
