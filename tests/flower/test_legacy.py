"""FedSSO under secure aggregation: Flower's own SecAgg+ protocol, with keys, shares and masks,
inside one process."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import History, LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, DPFedAvgFixed, FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.supercore.run import Run
from grid import RUN, SERVER, LocalGrid, identify
from hostile import ARRAYS, CLIPPED, DROPPED, UPDATES, WEIGHTS, Hostile
from numpy.typing import NDArray

from fedsso import Decay, FedSSO, InputError, flower
from fedsso.flower.legacy import LegacyFedSSO
from fedsso.server import Server

Arrays = list[NDArray[Any]]
Fit = Callable[[int, int, Arrays], tuple[Arrays, int]]
ROWS = (30, 60, 90, 120)
ETA_L, TAU, ROUNDS = 0.05, 4, 3
BUFFER, COUNT = 2, 3  # positions of a running mean and of a count
OUT = (2, 2)  # the client and the round that go wrong
SECURE = SecAggPlusWorkflow(3, 2, max_weight=120.0, clipping_range=4.0, quantization_range=2**24)


class LegacyGrid(LocalGrid):
    """The earlier generation asks for the run as well."""

    @property
    def run(self) -> Run:
        return Run.create_empty(RUN)


def rows(i: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Data of client i, around a centre and a line of its own."""
    draw = np.random.default_rng(i)
    X = draw.normal(size=(ROWS[i], 3)) + 0.2 * i
    return X, X @ draw.normal(size=(3, 2)) + 0.1 * draw.normal(size=(ROWS[i], 2))


def trained(i: int, _k: int, arrays: Arrays) -> tuple[Arrays, int]:
    """Local steps on all rows of client i; the buffer and the count move as BatchNorm's do."""
    W, b, mean, count = (a.astype(np.float64) for a in arrays)
    X, Y = rows(i)
    for _ in range(TAU):
        E = (X @ W + b - Y) / len(X)
        W, b = W - ETA_L * X.T @ E, b - ETA_L * E.sum(0)
    new = [W, b, 0.9 * mean + 0.1 * X.mean(0), count + 1]
    return [a.astype(like.dtype) for a, like in zip(new, arrays, strict=True)], ROWS[i]


def left_out(i: int, k: int, arrays: Arrays) -> tuple[Arrays, int]:
    """One client without weight in one round."""
    new, n = trained(i, k, arrays)
    return new, 0 if (i, k) == OUT else n


def initial(dtype: Any = np.float32) -> Arrays:
    return [np.zeros((3, 2), dtype), np.zeros(2, dtype), np.ones(3, dtype), np.zeros(1, np.int64)]


def federate(
    strategy: FedAvg, workflow: Any = None, fit: Fit = trained
) -> tuple[History, list[int]]:
    """Three rounds of the workflow with `fit(client, round, arrays)`: their history, the arrays in
    each reply."""
    seen: list[int] = []

    def note(reply: Message) -> Message:
        seen.append(
            sum(map(len, reply.content.array_records.values())) if reply.has_content() else 0
        )
        return reply

    class Client(NumPyClient):
        def __init__(self, i: int) -> None:
            self.i = i

        def fit(
            self, parameters: Arrays, config: dict[str, Any]
        ) -> tuple[Arrays, int, dict[str, Any]]:
            return *fit(self.i, int(config["k"]), parameters), {}

    mods = [secaggplus_mod] if workflow else []
    app = ClientApp(
        lambda context: Client(int(context.node_config["partition-id"])).to_client(), mods=mods
    )
    grid = LegacyGrid(app, [{"partition-id": i} for i in range(len(ROWS))], note)
    context = LegacyContext(
        Context(RUN, SERVER, {}, RecordDict(), {}), ServerConfig(num_rounds=ROUNDS), strategy
    )
    DefaultWorkflow(fit_workflow=workflow)(grid, context)
    return context.history, seen


def test_a_strategy_of_single_replies_names_the_one_for_secure_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = ClientApp(mods=[secaggplus_mod])
    app.train()(lambda message, _: message)
    start = ArrayRecord(initial())
    flower.FedSSO(fraction_evaluate=0.0).start(LocalGrid(app, [{}, {}]), start, num_rounds=1)
    assert "secaggplus_mod): take fedsso.flower.legacy.LegacyFedSSO" in caplog.text


def make(
    start: Arrays | None = None, cls: Any = LegacyFedSSO, **keywords: Any
) -> tuple[Any, list[Arrays]]:
    """A strategy for four clients and the models it will go through."""
    models: list[Arrays] = []
    own = (
        {"eta_l": ETA_L, "local_steps": TAU, "buffers": [BUFFER]}
        if cls is LegacyFedSSO
        else {"inplace": False}
    )
    strategy = cls(
        initial_parameters=ndarrays_to_parameters(initial() if start is None else start),
        min_fit_clients=4,
        min_available_clients=4,
        fraction_evaluate=0.0,
        on_fit_config_fn=lambda k: {"k": k},
        evaluate_fn=lambda _k, arrays, _config: models.append(arrays),
        **{**own, **keywords},
    )
    return strategy, models


def by_hand(start: Arrays, fit: Fit = trained, **fields: Any) -> list[Arrays]:
    """The same rounds without Flower: exact means and the server's step."""
    server, model, models = (
        Server(FedSSO(alpha=ETA_L, **{"guard": "cautious", **fields}), TAU),
        start,
        [start],
    )
    for k in range(1, ROUNDS + 1):
        replies = [fit(i, k, model) for i in range(len(ROWS))]
        weights = np.array([n for _, n in replies]) / sum(n for _, n in replies)
        mean = [sum(w * r[j] for w, (r, _) in zip(weights, replies, strict=True)) for j in range(4)]
        x, v = (torch.from_numpy(np.concatenate([a.ravel() for a in m[:2]])) for m in (model, mean))
        new = server.step(x, v.to(x.dtype)).numpy()
        model = [
            new[:6].reshape(3, 2),
            new[6:],
            mean[2].astype(start[2].dtype),
            np.rint(mean[3]).astype(np.int64),
        ]
        models.append(model)
    return models


def apart(a: list[Arrays], b: list[Arrays]) -> float:
    """The largest difference between any numbers of two runs."""
    assert len(a) == len(b) == ROUNDS + 1
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]
    return max(float(np.abs(p.astype(np.float64) - q).max()) for p, q in pairs)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """SecAgg+ rounds at random, from numpy's own generator."""
    np.random.seed(0)


# ---- the same models with and without masks ----


@pytest.mark.parametrize(
    ("dtype", "levels", "near"), [(np.float32, 2**24, 1e-5), (np.float64, 2**29, 5e-7)]
)
def test_three_secure_rounds_match_plain_averaging_and_the_server_by_hand(
    dtype: Any, levels: int, near: float
) -> None:
    secure = SecAggPlusWorkflow(
        3, 2, max_weight=120.0, clipping_range=4.0, quantization_range=levels
    )
    (masked, a), (plain, b), (averaged, c) = (
        make(initial(dtype), cls) for cls in (LegacyFedSSO, LegacyFedSSO, FedAvg)
    )
    federate(masked, secure)
    federate(plain)
    federate(averaged)
    exact = by_hand(initial(dtype))
    assert apart(b, exact) < (2e-6 if dtype is np.float32 else 1e-14)
    assert apart(a, exact) < near
    assert apart(b, c) > 0.1  # and not FedAvg's
    assert all(
        x.dtype == y.dtype and x.shape == y.shape
        for x, y in zip(a[-1], initial(dtype), strict=True)
    )
    assert a[-1][COUNT] == ROUNDS


def test_the_metric_is_of_the_shapes_of_the_arrays() -> None:
    identify()
    strategy = LegacyFedSSO(guard="adaptive", eta_l=ETA_L, local_steps=TAU)
    start = [np.ones(shape) for shape in ((5, 4), (5,), (2, 5), (2,))]
    strategy.sent = {str(i): array for i, array in enumerate(start)}
    moved = reply_of([0.9 * array for array in start], 10, None)
    strategy.aggregate_fit(1, [(None, moved)] * 2, [])  # type: ignore[list-item]
    assert strategy.server.record.shapes == "5x4 5 2x5 2"


def test_the_defaults_of_secure_aggregation_are_far_less_exact() -> None:
    strategy, models = make()
    federate(strategy, SecAggPlusWorkflow(3, 2))
    assert 1e-5 < apart(models, by_hand(initial())) < 1e-3


def test_the_server_gets_no_model_of_a_client() -> None:
    assert federate(make()[0])[1] == [len(initial())] * len(ROWS) * ROUNDS
    stages = 4  # keys, shares, masked models, unmasking
    assert federate(make()[0], SECURE)[1] == [0] * len(ROWS) * ROUNDS * stages


def test_a_client_that_fails_is_left_out_of_its_round() -> None:
    def raises(i: int, k: int, arrays: Arrays) -> tuple[Arrays, int]:
        if (i, k) == OUT:
            raise RuntimeError("out of memory")
        return trained(i, k, arrays)

    strategy, models = make()
    federate(strategy, SECURE, raises)
    exact = by_hand(initial(), left_out)
    assert apart(models, exact) < 1e-5
    assert apart(models, by_hand(initial())) > 1e-2


def test_curvature_is_told_in_the_history_and_schedules_follow_the_round() -> None:
    decay = Decay(scale=0.8, shift=0.0, power=0.5)
    strategy, models = make(eta=decay, form="lbfgs", guard="none")
    history = federate(strategy)[0].metrics_distributed_fit
    told = {"fedsso-ys", "fedsso-overridden", "fedsso-skipped", "fedsso-grad-norm", "fedsso-radius"}
    assert set(history) == {*told, "fedsso-dropped", "fedsso-clipped"}
    assert [k for k, _ in history["fedsso-ys"]] == [1, 2, 3]
    assert history["fedsso-ys"][1][1] > 0
    assert apart(models, by_hand(initial(), eta=decay, form="lbfgs", guard="none")) < 2e-6


# ---- replies that cannot be used ----


def spoilt(arrays: Arrays, n: int, how: str) -> tuple[Arrays, int]:
    if how == "nan":
        return [arrays[0] * np.nan, *arrays[1:]], n
    if how == "infinite buffer":
        return [*arrays[:2], arrays[2] + np.inf, arrays[3]], n
    if how == "long":
        return [arrays[0] + np.float32(1e4), *arrays[1:]], n
    if how == "shape":
        return [arrays[0][:1, :1], *arrays[1:]], n  # would be broadcast
    if how == "missing":
        return arrays[:-1], n
    return arrays, -n  # weight


HOWS = {
    "nan": "NaN",
    "infinite buffer": "NaN",
    "long": "too long",
    "shape": "shapes",
    "missing": "shapes",
    "weight": "num_examples is",
}


@pytest.mark.parametrize("how", HOWS)
def test_a_bad_reply_without_masks_is_dropped(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def fit(i: int, k: int, arrays: Arrays) -> tuple[Arrays, int]:
        new, n = trained(i, k, arrays)
        return spoilt(new, n, how) if (i, k) == OUT else (new, n)

    strategy, models = make()
    federate(strategy, fit=fit)
    assert apart(models, by_hand(initial(), left_out)) < 2e-6
    dropped = [r.getMessage() for r in caplog.records if "replies dropped" in r.getMessage()]
    assert len(dropped) == 1
    assert "round 2: 1 of 4 replies dropped" in dropped[0]
    assert HOWS[how] in dropped[0]


@pytest.mark.parametrize("how", ["nan", "weight", "raises"])
def test_without_a_usable_mean_the_model_is_kept_and_the_next_round_goes_on(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(i: int, k: int, arrays: Arrays) -> tuple[Arrays, int]:
        if k == 2 and how == "raises":
            raise RuntimeError("no data")
        new, n = trained(i, k, arrays)
        return spoilt(new, n, how) if k == 2 else (new, n)

    caplog.set_level(logging.WARNING)
    strategy, models = make()
    federate(strategy, fit=fit)
    good = by_hand(initial())
    for model, like in zip(models, [good[0], good[1], good[1], good[2]], strict=True):
        assert all(np.allclose(a, b, atol=2e-6) for a, b in zip(model, like, strict=True))
    assert "round 2: 0 usable replies, the model is kept" in caplog.text


def test_a_mean_that_masks_made_useless_is_not_stepped_on(caplog: pytest.LogCaptureFixture) -> None:
    def fit(i: int, k: int, arrays: Arrays) -> tuple[Arrays, int]:
        new, n = trained(i, k, arrays)
        return new, 120 if k == 2 else n

    wraps = SecAggPlusWorkflow(3, 2, max_weight=120.0, clipping_range=4.0, quantization_range=2**30)
    strategy, models = make()
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # four full weights of 2^30 levels are 0 modulo 2^32
        federate(strategy, wraps, fit)
    assert "round 2: 4 of 4 replies dropped: it holds NaN or infinite numbers" in caplog.text
    assert all(np.array_equal(a, b) for a, b in zip(models[1], models[2], strict=True))
    assert (
        apart([models[0], models[1], models[3], models[3]], [*by_hand(initial())[:3], models[3]])
        < 1e-5
    )


NAMED = {
    "renamed key",
    "another serialisation",
    "reordered, and NaN",
}  # replies of this generation have no names
KINDS = {
    name: kind
    for name, kind in {**ARRAYS, **WEIGHTS, **UPDATES}.items()
    if kind.effect in (DROPPED, CLIPPED) and name not in NAMED and "float" not in name
}


def reply_of(arrays: Arrays, n: int, kind: Hostile | None) -> FitRes:
    """A client's reply in the form of the earlier generation, hostile if wished."""
    sent = Message(RecordDict({"arrays": ArrayRecord(initial())}), 5, "train")
    record = ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)})
    metrics = MetricRecord({"num-examples": n, "train_loss": 1.0})
    message = Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=sent)
    if kind is not None:
        (message,) = kind.change(message, sent)
    weight = message.content["metrics"].get("num-examples", 0)
    tensors = [array.data for array in message.content["arrays"].values()]
    count = int(weight) if isinstance(weight, int | float) and math.isfinite(weight) else 0
    return FitRes(Status(Code.OK, ""), Parameters(tensors, "numpy.ndarray"), count, {})


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_replies_without_masks(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def step(hostile: Hostile | None, left_out: bool) -> tuple[Any, Any]:
        identify()
        strategy, _ = make()
        strategy.sent = {str(i): array for i, array in enumerate(initial())}
        replies = [(i, *trained(i, 1, initial())) for i in range(len(ROWS))]
        results = [
            (None, reply_of(a, n, hostile if i == 1 else None))
            for i, a, n in replies
            if i != 1 or not left_out
        ]
        return strategy.aggregate_fit(1, results, [])

    parameters, metrics = step(KINDS[kind], False)
    model = parameters_to_ndarrays(parameters)
    assert all(np.isfinite(array).all() for array in model)
    assert any("dropped" in r.getMessage() or "clipped" in r.getMessage() for r in caplog.records)
    if KINDS[kind].effect == DROPPED:
        alone = parameters_to_ndarrays(step(None, True)[0])
        assert all(np.array_equal(a, b) for a, b in zip(model, alone, strict=True))
        assert metrics["fedsso-dropped"] == 1
    else:
        assert metrics["fedsso-clipped"] == 1
        assert max(np.abs(array).max() for array in model) < 30


# ---- wrong input ----


def test_what_secure_aggregation_averages_wrongly_is_refused_before_anything_is_sent() -> None:
    start = initial()
    start[COUNT] = np.array(0)  # as BatchNorm counts its batches
    strategy, _ = make(start)
    with pytest.raises(InputError, match=r"array 3 .* shape \(1,\), or leave it out"):
        strategy.configure_fit(1, ndarrays_to_parameters(start), None)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"min_fit_client": 4}, "unknown keyword 'min_fit_client'; did you mean 'min_fit_clients'"),
        ({"pair": 4}, "did you mean 'pairs'"),
        ({"fraction_train": 0.5}, "unknown keyword 'fraction_train'"),
        ({"lam": 10.0, "Lam": 1.0}, "lam must be < Lam"),
        ({"buffers": [-1]}, "each of buffers must be an integer >= 0"),
        ({"eta_l": 0.0}, "eta_l, the clients' step, must be > 0"),
        ({"local_steps": 0}, "local_steps must be"),
    ],
)
def test_wrong_keywords_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        LegacyFedSSO(**{"eta_l": 0.1, "local_steps": 1, **keywords})
    assert message in str(error.value)


def test_a_buffer_that_the_model_does_not_have_is_refused() -> None:
    strategy, _ = make(buffers=[2, 4])
    with pytest.raises(InputError, match="positions among the model's 4 arrays"):
        strategy.configure_fit(1, ndarrays_to_parameters(initial()), None)


@pytest.mark.parametrize("wrapper", [DifferentialPrivacyServerSideFixedClipping, DPFedAvgFixed])
def test_privacy_around_it_is_refused(wrapper: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inside = LegacyFedSSO(eta_l=0.1, local_steps=1)
        outside = (
            wrapper(inside, 1.0, 0.1, 4)
            if wrapper is not DPFedAvgFixed
            else wrapper(inside, 4, 0.1, 1.0)
        )
    with pytest.raises(InputError, match="Put it inside"):
        outside.configure_fit(1, ndarrays_to_parameters([np.zeros(2)]), SimpleClientManager())


def test_what_the_core_tells_is_in_flowers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("fedsso"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [handler])
    for _ in range(2):  # a second strategy does not double the messages
        LegacyFedSSO()
    logging.getLogger("fedsso").warning("going back")
    assert heard == ["going back"]
