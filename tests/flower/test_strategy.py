"""The Flower strategy: the step of the simulator, checkpoints, evaluation, metrics, and every wrong
use."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_overloads, get_type_hints

import numpy as np
import pytest
import torch
from clients import ALPHA, STEPS, app, federation, initial, rows, vector
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Result, Strategy
from grid import LocalGrid
from torch import nn

import fedsso
from fedsso import report
from fedsso.algorithm import Attendance
from fedsso.algorithms.cautious import PATIENCE
from fedsso.engine import checkpoint
from fedsso.engine.simulate import fitted
from fedsso.flower import FedSSO, settings
from fedsso.flower.wire import Model, arrays_of
from fedsso.objective import Layout
from fedsso.server import Server


def sso(**keywords: object) -> FedSSO:
    return FedSSO(eta_l=ALPHA, local_steps=STEPS, **keywords)  # type: ignore[arg-type]


def by_hand(rounds: int, clients: Iterable[int] = range(3)) -> np.ndarray:
    """The same rounds with the core alone, in float64."""
    server, w = (
        Server(fedsso.FedSSO(alpha=ALPHA, guard="cautious"), STEPS),
        torch.zeros(4, dtype=torch.float64),
    )
    data = [rows(i) for i in clients]
    n = sum(len(y) for _, y in data)
    for _ in range(rounds):
        mean = np.zeros(4)
        for x, y in data:
            v = w.numpy().copy()
            for _ in range(STEPS):
                v -= ALPHA * x.T @ (x @ v - y) / len(y)
            mean += len(y) / n * v
        w = server.step(w, torch.from_numpy(mean))
    return w.numpy()


def test_unmodified_clients_take_the_step_of_the_core() -> None:
    result = sso().start(federation(), initial(), num_rounds=8)
    np.testing.assert_allclose(vector(result.arrays), by_hand(8), atol=1e-5)


def test_a_step_that_is_fedavgs_is_so_to_the_bit() -> None:
    """In round 1, and where the server only averages; a sum of two terms has one order alone."""
    averaged = FedAvg().start(federation(2), initial(33.3), num_rounds=1)
    strategy = FedSSO()
    ours = strategy.start(federation(2), initial(33.3), num_rounds=1)
    assert np.array_equal(vector(ours.arrays), vector(averaged.arrays))

    state = strategy.server.state
    assert state is not None
    only_averages = torch.full_like(state.net.falls, PATIENCE)
    strategy.server.state = state._replace(net=state.net._replace(falls=only_averages))
    averaged = FedAvg().start(federation(2), averaged.arrays, num_rounds=5)
    ours = strategy.start(federation(2), ours.arrays, num_rounds=5)
    assert np.array_equal(vector(ours.arrays), vector(averaged.arrays))


def test_it_beats_averaging_with_the_same_clients() -> None:
    averaged = FedAvg().start(federation(), initial(), num_rounds=40)
    ours = sso().start(federation(), initial(), num_rounds=8)
    train = [r.train_metrics_clientapp for r in (averaged, ours)]
    assert train[1][8]["train_loss"] <= train[0][40]["train_loss"]


def test_bytes_on_the_wire_are_those_of_fedavg() -> None:
    sizes = []
    for strategy in (FedAvg(), sso()):
        grid = federation()
        strategy.start(grid, initial(), num_rounds=3)
        sizes.append((sum(grid.down), sum(grid.up)))
    for ours, theirs in zip(*sizes, strict=True):
        assert ours / theirs == pytest.approx(
            1.0, abs=0.002
        )  # a time stamp takes a byte more or less


def test_buffers_are_averaged_and_keep_their_types() -> None:
    arrays = sso().start(federation(), initial(), num_rounds=2).arrays
    weights = np.array([30, 50, 20]) / 100
    np.testing.assert_allclose(
        arrays["bn.running_mean"].numpy(), np.full(2, weights @ [0, 1, 2]), rtol=1e-6
    )
    count = arrays["bn.num_batches_tracked"].numpy()
    assert count.dtype == np.int64
    assert count == round(weights @ [10, 11, 12])
    assert arrays["a.weight"].numpy().dtype == np.float32
    assert list(arrays) == list(initial())


def test_a_name_can_be_declared_a_buffer() -> None:
    arrays = sso(buffers=("b.*", "bn.*")).start(federation(), initial(), num_rounds=1).arrays
    plain = FedAvg().start(federation(), initial(), num_rounds=1).arrays
    np.testing.assert_allclose(arrays["b.bias"].numpy(), plain["b.bias"].numpy(), rtol=1e-6)
    with pytest.raises(fedsso.InputError, match="no trainable array"):
        sso(buffers=("*",)).start(federation(), initial(), num_rounds=1)


def test_a_double_model_stays_double() -> None:
    start = ArrayRecord([np.zeros((3, 1)), np.zeros(1)])
    wide = ArrayRecord(dict(zip(("a.weight", "b.bias"), start.values(), strict=True)))
    for name in ("bn.running_mean", "bn.num_batches_tracked"):
        wide[name] = initial()[name]
    arrays = sso().start(federation(), wide, num_rounds=2).arrays
    assert arrays["a.weight"].numpy().dtype == np.float64


def test_the_order_of_replies_changes_nothing() -> None:
    class Shuffled(LocalGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            return super().send_and_receive(messages, timeout=timeout)[::-1]

    nodes = [{"partition-id": i} for i in range(3)]
    results = [
        sso().start(grid(app, nodes), initial(), num_rounds=6) for grid in (LocalGrid, Shuffled)
    ]
    assert (vector(results[0].arrays) == vector(results[1].arrays)).all()


# ---- metrics, evaluation, trace ----


def test_curvature_is_among_the_metrics() -> None:
    metrics = sso().start(federation(), initial(), num_rounds=3).train_metrics_clientapp[3]
    assert metrics["fedsso-ys"] > 0
    assert metrics["fedsso-grad-norm"] > 0
    assert metrics["fedsso-dropped"] == metrics["fedsso-kept"] == 0
    assert {"train_loss", "fedsso-radius", "fedsso-overridden", "fedsso-skipped"} <= set(metrics)


def test_the_metrics_of_a_round_can_be_the_clients_alone() -> None:
    strategy = sso(diagnostics=False)
    result = strategy.start(federation(), initial(), num_rounds=2)
    assert set(result.train_metrics_clientapp[2]) == {"train_loss"}
    assert strategy.trace["grad_norm"][2] > 0


@pytest.mark.parametrize(
    ("name", "loss_key"),
    [("train_loss", None), ("train-loss", None), ("training_loss", None), ("nll", "nll")],
)
def test_the_loss_is_in_the_trace_by_whatever_name(name: str, loss_key: str | None) -> None:
    def rename(reply: Message) -> Message:
        metrics = reply.content["metrics"]
        if "train_loss" in metrics:
            metrics[name] = metrics.pop("train_loss")
        return reply

    strategy = sso(loss_key=loss_key)
    result = strategy.start(federation(3, rename), initial(), num_rounds=2)
    assert strategy.trace["train_loss"][2] == result.train_metrics_clientapp[2][name]


def test_a_run_becomes_a_trace_with_the_plots_of_a_simulation(tmp_path: Path) -> None:
    grid, strategy = federation(), sso()
    result = strategy.start(grid, initial(), num_rounds=4, evaluate_fn=None)
    trace = strategy.trace
    assert trace["round"].tolist() == [0, 1, 2, 3, 4]
    assert trace["train_loss"][4] == result.train_metrics_clientapp[4]["train_loss"]
    assert trace["test_loss"][4] == result.evaluate_metrics_clientapp[4]["eval_loss"]
    assert trace["test_accuracy"][1:].tolist() == [0.5] * 4
    assert trace["bytes_up"][1] > 3 * 4 * 4
    assert (trace["seconds"][1:] > 0).all()
    simulated = fedsso.simulate(fedsso.load("digits", clients=3), "mclr", fedsso.FedAvg(), rounds=4)
    curves = [strategy.curve(), *fedsso.Results([simulated]).curves()]
    report.plot(curves, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000
    assert "fedsso on Flower" in report.markdown(report.rounds_table(curves, (0.5,)))


def test_rounds_without_evaluation_are_left_out_of_the_curve() -> None:
    strategy = sso(fraction_evaluate=0.0)
    seen = []

    def central(k: int, _: ArrayRecord) -> MetricRecord | None:
        seen.append(k)
        return MetricRecord({"accuracy": float(k), "auc": 0.75}) if k % 2 == 0 else None

    strategy.start(federation(), initial(), num_rounds=6, evaluate_fn=central)
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    assert strategy.trace.evaluations()[0].tolist() == [0, 2, 4, 6]
    assert strategy.trace.evaluations("test_auc")[1].tolist() == [0.75] * 4
    assert strategy.trace.rounds_to(4.0) == 4


def test_the_summary_names_the_settings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flwr"):
        sso(guard="none", R=200).summary()
    assert "eta_l = 0.05, local_steps = 4" in caplog.text
    assert "guard = none" in caplog.text
    assert "FedAvg" in caplog.text
    assert "Minimum nodes" in caplog.text


class Heard(logging.Handler):
    """Keeps the messages that a logger's handlers get."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def test_a_fall_is_told_once_in_flowers_log(caplog: pytest.LogCaptureFixture) -> None:
    """The core logs to "fedsso"; Flower shows, and writes to its log file, what "flwr" handles."""
    grid = federation()

    def alarmed(reply: Message) -> Message:
        if (
            grid.asked.content.get("config", {}).get("server-round") == 7
            and "arrays" in reply.content
        ):
            reply.content["metrics"]["train_loss"] = 1e6
        return reply

    grid.tamper = alarmed
    heard, deaf = Heard(), Heard(logging.ERROR)
    flower = logging.getLogger("flwr")
    flower.addHandler(heard)
    flower.addHandler(deaf)
    try:
        FedSSO()  # a second strategy in the same process does not double the messages
        result = FedSSO().start(grid, initial(), num_rounds=8)
    finally:
        flower.removeHandler(heard)
        flower.removeHandler(deaf)
    assert result.train_metrics_clientapp[8]["fedsso-falls"] == 1
    told = [line for line in heard.lines if "the last step made things worse" in line]
    assert len(told) == 1
    assert told[0].startswith("WARNING FedSSO: round 7: ")
    assert deaf.lines == []
    assert caplog.text.count("the last step made things worse") == 1


# ---- evaluation ----


class Judge:
    """Evaluates the model of round k with the k-th of some losses, and remembers the models."""

    def __init__(self, *losses: float) -> None:
        self.losses = losses
        self.models: dict[int, np.ndarray] = {}

    def __call__(self, k: int, arrays: ArrayRecord) -> MetricRecord:
        self.models[k] = vector(arrays)
        return MetricRecord({"loss": self.losses[k]})


def falls(strategy: FedSSO) -> list[float]:
    """How often the guard had gone back, after each round."""
    return strategy.trace["falls"][1:].tolist()


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((9, 5, 5, 4, 5, 5, 5.3, 5), [0, 0, 0, 0, 0, 0, 1]),
        ((9, 5, 5, 4, 5, 5, 5.2, 5), [0] * 7),  # by less than 5 %
        ((9, 6, 5, 4, 5, 5, 5.3, 5), [0] * 7),  # one of the five before was higher
        ((9, 8, 7, 10, 5, 5, 5, 5), [0, 0, 0, 1, 1, 1, 1]),  # there are only three before
        ((9, 8, 7, np.nan, 5, 5, 5, 5), [0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_an_evaluation_above_the_five_before_takes_the_guard_back_in_the_next_round(
    losses: tuple[float, ...], expected: list[float]
) -> None:
    """Although the losses that the clients report go on falling."""
    strategy = FedSSO()
    strategy.start(federation(), initial(), 7, evaluate_fn=Judge(*losses))
    assert strategy.trace["stretch"][6] > 1
    assert falls(strategy) == expected


@pytest.mark.parametrize(("share", "expected"), [(1.0, 1), (0.5, 0)])
def test_losses_of_other_nodes_in_each_round_do_not_count(share: float, expected: int) -> None:
    grid = federation()

    def alarmed(reply: Message) -> Message:
        is_evaluation = "arrays" not in reply.content
        if is_evaluation and grid.asked.content["config"]["server-round"] == 5:
            reply.content["metrics"]["eval_loss"] = 1e6
        return reply

    grid.tamper = alarmed
    strategy = FedSSO(fraction_evaluate=share)
    strategy.start(grid, initial(), num_rounds=6)
    assert falls(strategy)[-1] == expected


def test_the_best_model_is_kept_over_a_resume_and_returned_if_wished(tmp_path: Path) -> None:
    judge = Judge(9, 8, 3, 10, 6, 5)
    strategy = FedSSO(checkpoint_dir=tmp_path)
    last = strategy.start(federation(), initial(), 3, evaluate_fn=judge).arrays
    assert (vector(last) == judge.models[3]).all()
    assert strategy.best is not None
    assert (vector(strategy.best) == judge.models[2]).all()
    second = FedSSO(checkpoint_dir=tmp_path, return_best=True)
    arrays = second.resume(initial()) or initial()
    best = second.start(federation(), arrays, 2, evaluate_fn=judge).arrays
    assert (vector(best) == judge.models[2]).all()
    assert list(best) == list(initial())
    assert falls(second) == [0, 0, 0, 1, 1]  # by all three losses before


def test_the_best_model_may_be_the_last(tmp_path: Path) -> None:
    judge = Judge(9, 8, 3, 2)
    strategy = FedSSO(checkpoint_dir=tmp_path, return_best=True)
    best = strategy.start(federation(), initial(), 3, evaluate_fn=judge).arrays
    assert (vector(best) == judge.models[3]).all()
    second = FedSSO(checkpoint_dir=tmp_path)
    arrays = second.resume(initial())
    second.start(federation(), arrays, 0, evaluate_fn=judge)
    assert second.best is not None
    assert (vector(second.best) == judge.models[3]).all()


def test_losses_of_clients_do_not_count_beside_those_of_the_server() -> None:
    """Clients evaluate all models and tell lower losses than the server of every second one."""
    models: dict[int, np.ndarray] = {}

    def judge(k: int, arrays: ArrayRecord) -> MetricRecord | None:
        models[k] = vector(arrays)
        return MetricRecord({"loss": 1e6 - k}) if k in (2, 4) else None

    strategy = FedSSO()
    strategy.start(federation(), initial(), 5, evaluate_fn=judge)
    assert strategy.best is not None
    assert (vector(strategy.best) == models[4]).all()


def test_without_a_loss_the_last_model_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    inner = FedAvg(fraction_evaluate=0.0)
    strategy = FedSSO(inner=inner, return_best=True)
    last = strategy.start(federation(), initial(), 3).arrays
    assert strategy.best is None
    assert (vector(last) == vector(FedSSO().start(federation(), initial(), 3).arrays)).all()
    assert "no evaluation has told a loss" in caplog.text


# ---- checkpoints ----


def test_interrupted_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = sso().start(federation(), initial(), num_rounds=7)
    first = sso(checkpoint_dir=tmp_path)
    assert first.resume() is None
    assert first.rounds_left(7) == 7
    first.start(federation(), initial(), num_rounds=3)
    second = sso(checkpoint_dir=tmp_path)
    arrays = second.resume()
    assert arrays is not None
    assert second.rounds_left(7) == 4
    grid = federation()
    result = second.start(grid, arrays, num_rounds=second.rounds_left(7))
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    assert second.trace["round"].tolist() == list(range(8))
    assert [m.content["config"]["server-round"] for m in grid.sent[:3]] == [4, 4, 4]
    third = sso(checkpoint_dir=tmp_path)
    done = third.start(federation(), third.resume() or initial(), num_rounds=third.rounds_left(7))
    assert (
        vector(done.arrays) == vector(whole.arrays)
    ).all()  # nothing left to do, and the model is there


def test_a_second_start_goes_on(tmp_path: Path) -> None:
    whole = sso().start(federation(), initial(), num_rounds=5)
    strategy = sso(checkpoint_dir=tmp_path)
    arrays = strategy.start(federation(), initial(), num_rounds=2).arrays
    assert (
        vector(strategy.start(federation(), arrays, num_rounds=3).arrays) == vector(whole.arrays)
    ).all()


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)
    with pytest.raises(fedsso.InputError, match=r"strategy\.resume"):
        sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)


@pytest.mark.parametrize(
    "other", [{"eta": 0.5}, {"inner": FedMedian()}, {"buffers": ("b.*", "bn.*")}]
)
def test_a_run_with_other_settings_is_refused(other: dict[str, object], tmp_path: Path) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)
    with pytest.raises(fedsso.InputError, match="other settings"):
        sso(checkpoint_dir=tmp_path, **other).resume()


def test_rounds_left_is_the_same_before_and_after_resuming(tmp_path: Path) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=3)
    strategy = sso(checkpoint_dir=tmp_path)
    assert strategy.rounds_left(5) == 2
    assert strategy.resume() is not None
    assert strategy.rounds_left(5) == 2
    assert strategy.rounds_left(2) == 0


def test_another_model_starts_anew() -> None:
    strategy = sso()
    strategy.start(federation(), initial(), num_rounds=4)
    again = strategy.start(federation(), initial(), num_rounds=3)
    whole = sso().start(federation(), initial(), num_rounds=3)
    assert (vector(again.arrays) == vector(whole.arrays)).all()


def test_an_inner_strategy_that_always_fails_ends_the_run() -> None:
    def broken(*_: object) -> MetricRecord:
        raise ZeroDivisionError

    strategy = sso(train_metrics_aggr_fn=broken)
    with pytest.raises(ZeroDivisionError):
        strategy.start(federation(), initial(), num_rounds=9)
    assert strategy.k == 2


def test_a_reset_that_falls_into_a_kept_round_comes_with_the_next_step() -> None:
    def tamper(reply: Message) -> Message | None:
        return None if strategy.k == 1 else reply

    strategy = sso(R=2, fraction_evaluate=0.0)
    result = strategy.start(federation(3, tamper), initial(), num_rounds=6)
    whole = sso(R=2).start(federation(), initial(), num_rounds=5)
    assert strategy.trace["kept"][1:].tolist() == [0, 1, 0, 0, 0, 0]
    assert (vector(result.arrays) == vector(whole.arrays)).all()


def test_odd_names_of_metrics_do_not_spoil_the_trace(tmp_path: Path) -> None:
    strategy = sso(checkpoint_dir=tmp_path, fraction_evaluate=0.0)
    odd = {"a,b": 1.0, "c\nd": 2.0, "auc": 0.5}
    strategy.start(federation(), initial(), num_rounds=1, evaluate_fn=lambda *_: MetricRecord(odd))
    assert sso(checkpoint_dir=tmp_path, fraction_evaluate=0.0).resume() is not None
    assert fedsso.experiment.trace.Trace.load(tmp_path / "trace.csv")["test_auc"][1] == 0.5


def test_a_damaged_checkpoint_is_refused_and_a_damaged_trace_is_not(tmp_path: Path) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=2)
    (tmp_path / "trace.csv").write_text("round,")
    strategy = sso(checkpoint_dir=tmp_path)
    assert strategy.resume() is not None
    assert strategy.trace["round"].tolist() == [0]
    strategy.start(
        federation(),
        initial(),
        num_rounds=1,
        evaluate_fn=lambda k, _: MetricRecord({"loss": float(k)}),
    )
    assert strategy.trace["test_loss"][-2] == 2.0  # the row of round 2 is there again
    file, older = tmp_path / "checkpoint.safetensors", tmp_path / "checkpoint.previous.safetensors"
    tensors = checkpoint.load(file)
    for spoilt in (
        {"about": None},
        {"server.x": None},
        {"model.b.bias": None},
        {"about": torch.zeros(3)},
    ):
        parts = {
            name: tensor for name, tensor in {**tensors, **spoilt}.items() if tensor is not None
        }
        checkpoint.save(file, parts, "a run on Flower")
        with pytest.raises(fedsso.InputError):
            sso(checkpoint_dir=tmp_path).resume()
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    older.unlink()
    with pytest.raises(fedsso.InputError, match="is damaged"):
        sso(checkpoint_dir=tmp_path).resume()


def test_a_damaged_checkpoint_falls_back_to_the_round_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=3)
    file = tmp_path / "checkpoint.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    strategy = sso(checkpoint_dir=tmp_path)
    arrays = strategy.resume()
    assert arrays is not None
    assert strategy.rounds_left(3) == 1
    assert "the previous checkpoint is used" in caplog.text
    again = strategy.start(federation(), arrays, num_rounds=1)
    assert (
        vector(again.arrays) == vector(sso().start(federation(), initial(), num_rounds=3).arrays)
    ).all()
    assert (tmp_path / "checkpoint.damaged.safetensors").exists()


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """As for a file without read permission, which a test that runs as root cannot have."""
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)
    file = tmp_path / "checkpoint.safetensors"
    file.unlink()
    file.mkdir()
    with pytest.raises(fedsso.InputError, match="cannot read") as error:
        sso(checkpoint_dir=tmp_path).resume()
    assert "damaged" not in str(error.value)
    assert "delete" not in str(error.value)


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    """The second is refused while the first is under way, and leaves its files alone."""
    told: list[str] = []

    class Watched(LocalGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            half = tmp_path / ".checkpoint.safetensors.0123456789abcdef.tmp"
            half.write_bytes(b"half a checkpoint of the first run")

            def second() -> None:
                try:
                    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)
                except fedsso.InputError as error:
                    told.append(str(error))

            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
            assert half.exists()
            half.unlink()
            return super().send_and_receive(messages, timeout=timeout)

    grid = Watched(app, [{"partition-id": i} for i in range(3)])
    sso(checkpoint_dir=tmp_path).start(grid, initial(), num_rounds=1)
    assert len(told) > 0
    assert all(f"is being written by process {os.getpid()} on " in text for text in told)
    assert not (tmp_path / ".lock").exists()


def test_a_loop_of_the_users_own_cannot_overwrite_a_run(tmp_path: Path) -> None:
    class Own(FedSSO):
        def start(self, *args: Any, **keywords: Any) -> Any:
            return Strategy.start(self, *args, **keywords)

    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=3)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(fedsso.InputError, match="already holds a run"):
        Own(eta_l=ALPHA, local_steps=STEPS, checkpoint_dir=tmp_path).start(
            federation(), initial(), num_rounds=1
        )
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_the_evaluation_of_a_round_that_died_before_it_is_made_up_for(tmp_path: Path) -> None:
    class Killed(LocalGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            messages = list(messages)
            if (
                messages[0].metadata.message_type == "evaluate"
                and messages[0].content["config"]["server-round"] == 2
            ):
                raise KeyboardInterrupt
            return super().send_and_receive(messages, timeout=timeout)

    grid = Killed(app, [{"partition-id": i} for i in range(3)])
    with pytest.raises(KeyboardInterrupt):
        sso(checkpoint_dir=tmp_path).start(grid, initial(), num_rounds=3)
    strategy = sso(checkpoint_dir=tmp_path)
    strategy.start(
        federation(), strategy.resume(initial()) or initial(), num_rounds=strategy.rounds_left(3)
    )
    whole = sso()
    whole.start(federation(), initial(), num_rounds=3)
    np.testing.assert_array_equal(strategy.trace["test_loss"], whole.trace["test_loss"])


def test_a_run_that_another_one_went_on_with_is_not_overwritten(tmp_path: Path) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)
    late, early = sso(checkpoint_dir=tmp_path), sso(checkpoint_dir=tmp_path)
    arrays = [late.resume(), early.resume()]
    early.start(federation(), arrays[1], num_rounds=2)  # type: ignore[arg-type]
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(fedsso.InputError, match="holds round 3, this run has done 1"):
        late.start(federation(), arrays[0], num_rounds=1)  # type: ignore[arg-type]
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    sso(checkpoint_dir=tmp_path).start(federation(), initial(), num_rounds=1)
    strategy = sso(checkpoint_dir=tmp_path)
    other = ArrayRecord({**initial(), "c.weight": Array(np.zeros((2, 2), np.float32))})
    with pytest.raises(fedsso.InputError, match=r"holds another network: its c\.weight is missing"):
        strategy.resume(other)
    assert strategy.resume(initial()) is not None
    assert sso().resume(other) is other


@pytest.mark.parametrize(("every", "done"), [(1, 3), (2, 2), (9, 0)])
def test_what_is_on_the_disk_when_round_4_dies(every: int, done: int, tmp_path: Path) -> None:
    class Killed(LocalGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            messages = list(messages)
            if messages and messages[0].content["config"]["server-round"] == 4:
                raise KeyboardInterrupt
            return super().send_and_receive(messages, timeout=timeout)

    grid = Killed(app, [{"partition-id": i} for i in range(3)])
    with pytest.raises(KeyboardInterrupt):
        sso(checkpoint_dir=tmp_path, checkpoint_every=every).start(grid, initial(), num_rounds=6)
    strategy = sso(checkpoint_dir=tmp_path, checkpoint_every=every)
    arrays = strategy.resume(initial())
    left = strategy.rounds_left(6)
    assert left == 6 - done
    result = strategy.start(federation(), arrays, num_rounds=left)
    assert sso(checkpoint_dir=tmp_path).rounds_left(6) == 0
    whole = sso().start(federation(), initial(), num_rounds=6)
    assert (vector(result.arrays) == vector(whole.arrays)).all()
    (tmp_path / ".checkpoint.safetensors.0123456789abcdef.tmp").write_bytes(b"half a checkpoint")
    again = sso(checkpoint_dir=tmp_path)
    again.start(federation(), again.resume() or initial(), num_rounds=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint.previous.safetensors", "checkpoint.safetensors", "trace.csv"]


# ---- wrong use ----


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"alpha": 0.1}, "alpha is called eta_l"),
        ({"tau": 3}, "tau is called local_steps"),
        ({"fraction_trian": 0.5}, "did you mean 'fraction_train'"),
        ({"guard": "nope"}, "guard"),
        ({"fraction_train": 2.0}, r"fraction_train must lie in \[0, 1\]"),
        ({"checkpoint_every": 0}, "checkpoint_every must be an integer >= 1"),
        ({"min_train_nodes": "a"}, "min_train_nodes must be an integer >= 0"),
        ({"buffers": "bn.*"}, "buffers must be a list of patterns"),
        ({"eta": -1.0}, "eta"),
        (
            {"inner": FedAvg(), "fraction_train": 0.5},
            "fraction_train: give these to the inner strategy FedAvg",
        ),
        ({"inner": FedAdam()}, "FedAdam steps on its own"),
        ({"inner": FedSSO(eta_l=0.1, local_steps=1)}, "FedSSO steps on its own"),
        ({"inner": "FedAvg"}, "inner must be a strategy"),
    ],
)
def test_wrong_keywords_name_the_remedy(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(fedsso.InputError, match=message):
        sso(**keywords)


def test_no_place_means_another_thing_than_fedavgs() -> None:
    """FedAvg(0.5) sets fraction_train."""
    with pytest.raises(TypeError, match="positional"):
        FedSSO(0.5)  # type: ignore[misc]


def test_a_start_that_is_never_called_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Own(FedAvg):
        def start(self, *_: object, **__: object) -> Result:
            raise AssertionError

    FedSSO(inner=FedAvg())
    assert "start()" not in caplog.text
    FedSSO(inner=Own())
    assert "start() of the inner strategy Own is never called" in caplog.text


def test_a_type_checker_knows_that_a_resumed_run_has_a_model() -> None:
    first = get_overloads(FedSSO.resume)[0]
    hints = get_type_hints(first)
    assert hints == {"initial_arrays": ArrayRecord, "return": ArrayRecord}


def test_a_type_checker_knows_every_keyword() -> None:
    hints = get_type_hints(FedSSO.__init__)
    assert hints["keywords"] == Unpack[settings.Typed]
    assert settings.Typed.__annotations__.keys() == {*settings.RECORD, *settings.FEDAVG}


@pytest.mark.parametrize("local_steps", [0, -1, "5", True, float("nan"), float("inf")])
def test_local_steps_must_be_a_count(local_steps: object) -> None:
    with pytest.raises(fedsso.InputError, match="local_steps"):
        FedSSO(eta_l=0.1, local_steps=local_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("eta_l", [0, -1.0, "0.1", "auto", float("nan")])
def test_the_clients_step_goes_by_its_name_here(eta_l: object) -> None:
    with pytest.raises(fedsso.InputError, match="eta_l"):
        FedSSO(eta_l=eta_l, local_steps=2)  # type: ignore[arg-type]
    with pytest.raises(fedsso.InputError, match="alpha is called eta_l on Flower"):
        FedSSO(alpha=0.1, local_steps=2)


def test_a_guard_that_needs_the_clients_step_says_so() -> None:
    for guard in ("adaptive", "none"):
        with pytest.raises(
            fedsso.InputError, match=r"needs eta_l and local_steps.*leave guard out"
        ):
            FedSSO(guard=guard)
    with pytest.raises(fedsso.InputError, match=r"brave.*adaptive, cautious, none"):
        FedSSO(guard="brave")
    assert FedSSO().server.record.guard == "cautious"


def test_a_step_that_the_server_chooses_is_refused_with_a_remedy() -> None:
    """Flower's clients train as they always do: no strategy can tell them a step, but
    PhasedStrategy can its own."""
    for keywords in ({"eta_l": "auto"}, {"alpha": "auto"}):
        with pytest.raises(fedsso.InputError, match=r"PhasedStrategy"):
            FedSSO(**keywords, local_steps=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.array([np.nan]), np.array([1j]), np.array(["x"]), np.zeros(0)])
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_sent(bad: np.ndarray) -> None:
    grid = federation()
    with pytest.raises(fedsso.InputError, match=r"must hold real and finite|no trainable"):
        sso().start(grid, ArrayRecord([bad]), num_rounds=1)
    assert not grid.sent


def test_half_precision_that_would_overflow_keeps_the_model() -> None:
    wild = FedSSO(eta_l=1e-6, local_steps=1, guard="none", fraction_evaluate=0.0)
    start = {name: array.numpy() for name, array in initial().items()}
    start = {
        name: Array(a.astype("float16") if a.dtype == np.float32 else a)
        for name, a in start.items()
    }
    result = wild.start(federation(), ArrayRecord(start), num_rounds=2)
    assert np.isfinite(vector(result.arrays)).all()
    assert wild.trace["kept"][1] == 1


class Mixed(nn.Module):
    """An embedding, a kernel, statistics, vectors and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.kernel = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 2)


SHAPES = {
    "of all kinds": (Mixed(), "1 20x4 8x27 8 8 2x6 2"),
    "one layer": (nn.Linear(6, 2), "none"),
    "one layer within another": (nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), "none"),
    "one layer and a norm": (nn.Sequential(nn.Linear(6, 2), nn.LayerNorm(2)), "2x6 2 2 2"),
}


@pytest.mark.parametrize(("module", "shapes"), SHAPES.values(), ids=SHAPES)
def test_the_metric_is_of_the_shapes_in_the_record(module: nn.Module, shapes: str) -> None:
    """As the simulator tells them of the module, where it sees means alone."""
    record = fedsso.FedSSO(alpha=0.1)
    server = Server(record, 1)
    server.fit(Model(arrays_of(ArrayRecord(module.state_dict()))).layout)
    assert server.record.shapes == shapes
    assert fitted(record, module, Attendance(only_means=True)).shapes == shapes
    cautious = Server(fedsso.FedSSO(alpha=0.1, guard="cautious"), 1)
    cautious.fit(Layout.of(module))
    assert cautious.record.shapes == "none"


def test_arrays_without_names_have_layers_too() -> None:
    """A record that is made of a list, and the earlier generation's arrays, have only positions."""
    shapes = [(5, 4), (5,), (2, 5), (2,)]
    for count, told in ((4, "5x4 5 2x5 2"), (2, "none")):
        arrays = arrays_of(ArrayRecord([np.ones(shape, "float32") for shape in shapes[:count]]))
        server = Server(fedsso.FedSSO(alpha=0.1), 1)
        server.fit(Model(arrays).layout)
        assert server.record.shapes == told


def test_a_run_that_began_without_a_metric_goes_on_without(tmp_path: Path) -> None:
    adaptive = partial(sso, guard="adaptive", checkpoint_dir=tmp_path)
    adaptive().start(federation(), initial(), num_rounds=2)
    file = tmp_path / "checkpoint.safetensors"
    tensors = checkpoint.load(file)
    older = {name: leaf for name, leaf in tensors.items() if "moments" not in name}
    assert len(older) < len(tensors)
    checkpoint.save(file, older, "a run on Flower")
    for resumed, shapes in ((adaptive(), "none"), (adaptive(checkpoint_dir=None), "3x1 1")):
        resumed.start(federation(), resumed.resume(initial()), num_rounds=1)
        assert resumed.server.record.shapes == shapes


def test_the_keywords_of_fedavg_reach_it() -> None:
    inner = sso(fraction_train=0.5, min_train_nodes=1, min_available_nodes=3).inner
    assert isinstance(inner, FedAvg)
    assert (inner.fraction_train, inner.min_train_nodes, inner.min_available_nodes) == (0.5, 1, 3)


def test_a_model_of_another_size_between_rounds_is_refused() -> None:
    strategy = sso()
    strategy.start(federation(), initial(), num_rounds=1)
    with pytest.raises(fedsso.InputError, match="use a new strategy"):
        strategy.start(federation(), ArrayRecord([np.zeros(3, "float32")]), num_rounds=1)


def test_half_of_the_clients_in_each_round_works() -> None:
    strategy = sso(fraction_train=0.5, min_train_nodes=1, inner=None)
    strategy.start(federation(6), initial(), num_rounds=12)
    losses = strategy.trace["test_loss"]
    assert losses[12] < 0.2 * losses[1]


def test_a_robust_strategy_inside() -> None:
    result = FedSSO(eta_l=ALPHA, local_steps=STEPS, inner=FedMedian()).start(
        federation(5), initial(), num_rounds=6
    )
    losses = [result.evaluate_metrics_clientapp[k]["eval_loss"] for k in (1, 6)]
    assert losses[1] < 0.2 * losses[0]
