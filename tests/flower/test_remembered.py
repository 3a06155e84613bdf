"""The server's memory of nodes on Flower: the steps of the simulator, and nodes that come, go, lie,
stay silent, or are asked again after a crash."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from clients import ALPHA, STEPS, app, federation, initial, vector
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedProx,
    Strategy,
)
from grid import NODES, LocalGrid
from torch import nn

import fedsso
import parity_problem as problem
from fedsso.engine import checkpoint
from fedsso.flower import FedSSO, PhasedStrategy
from fedsso.flower.legacy import LegacyFedSSO
from fedsso.flower.wire import same
from fedsso.optim import ServerBFGS
from fedsso.remembered import Answer, Client, Remembered

Cohorts = Callable[[int], Iterable[int]]
GUARDS = ("adaptive", "cautious", "none")


class Scheduled(FedAvg):
    """FedAvg whose cohorts are given: a function from the round to the places of nodes."""

    def __init__(self, cohorts: Cohorts) -> None:
        super().__init__(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
        self.cohorts = cohorts

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        config["server-round"] = server_round
        record = RecordDict({"arrays": arrays, "config": config})
        nodes = [NODES[i] for i in self.cohorts(server_round)]
        return self._construct_messages(record, nodes, "train")


def by_turns(k: int) -> list[int]:
    """Two of five nodes, in turns."""
    return [k % 5, (2 * k + 1) % 5] if k % 5 != (2 * k + 1) % 5 else [k % 5, (k + 2) % 5]


def sso(cohorts: Cohorts = by_turns, **keywords: Any) -> FedSSO:
    keywords = {"memory": "clients", "inner": Scheduled(cohorts), **keywords}
    return FedSSO(eta_l=ALPHA, local_steps=STEPS, **keywords)


def start(strategy: Strategy, rounds: int, grid: LocalGrid | None = None) -> np.ndarray:
    return vector(strategy.start(grid or federation(5), initial(), num_rounds=rounds).arrays)


# ---- the steps ----


class Deep(nn.Sequential):
    """A network that comes with its initial weights."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(nn.Linear(problem.INPUTS, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize(("module", "shapes"), [(problem.Net, "none"), (Deep, "auto")])
def test_flower_is_the_simulator_where_some_are_absent(
    module: type[nn.Module], shapes: str, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many rows at each client: a node that has not answered yet counts with the mean.

    The metric of a model of one layer needs single gradients, which the strategy's server has not.
    """
    monkeypatch.setattr(problem, "ROWS", (40,) * 6)
    problem.clients.cache_clear()
    data = problem.clients()
    problem.clients.cache_clear()
    fed = fedsso.Federation.from_clients([(x, y.long()) for x, y in data], test_fraction=0)
    record = fedsso.FedSSO(alpha=problem.ALPHA, guard=guard, memory="clients", shapes=shapes)
    simulation = fedsso.Simulation(
        fed,
        module(),
        record,
        loss="bce",
        rounds=12,
        local_steps=problem.TAU,
        batch_size=None,
        participation=0.5,
        device="cpu",
    )
    plans = [simulation.rounds.plan(k).answered.tolist() for k in range(1, 13)]
    rows = [simulation.step() for _ in plans]
    own = ClientApp()

    @own.train()
    def train(message: Message, context: Context) -> Message:
        net = module()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = data[int(context.node_config["partition-id"])]
        for _ in range(problem.TAU):
            loss = nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], y)
            slopes = torch.autograd.grad(loss, list(net.parameters()))
            for parameter, slope in zip(net.parameters(), slopes, strict=True):
                parameter.data -= problem.ALPHA * slope
        metrics = {"num-examples": 40, "loss": loss.item()}
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    strategy = FedSSO(
        eta_l=problem.ALPHA,
        local_steps=problem.TAU,
        guard=guard,
        memory="clients",
        inner=Scheduled(lambda k: plans[k - 1]),
        clip=None,
        loss_key="none",  # the simulator's clients report the mean over their steps
    )
    grid = LocalGrid(own, [{"partition-id": i} for i in range(6)])
    arrays = strategy.start(grid, ArrayRecord(module().state_dict()), num_rounds=12).arrays
    assert (strategy.server.record.matrices != ()) == (module is Deep and guard == "adaptive")
    x = torch.cat([t.reshape(-1) for t in arrays.to_torch_state_dict().values()])
    torch.testing.assert_close(x, simulation.models()[0], rtol=0, atol=problem.SINGLE)
    for name in ("beta", "known"):
        expected = [float(row[name]) for row in rows]
        assert strategy.trace[name][1:].tolist() == pytest.approx(expected, abs=1e-4)
    assert not strategy.trace["dropped"][1:].any()
    assert strategy.trace["known"][1] == 0.5
    assert strategy.trace["known"][-1] == 1.0
    assert 0 < strategy.trace["beta"][-1] <= 1


@pytest.mark.parametrize("guard", GUARDS)
def test_where_all_answer_the_memory_changes_no_bit(guard: str) -> None:
    with_memory, without = (
        start(sso(lambda _: range(5), guard=guard, memory=memory), 9)
        for memory in ("clients", "none")
    )
    assert (with_memory == without).all()


@pytest.mark.parametrize("guard", ["adaptive", "cautious"])
def test_it_makes_up_for_the_absent(guard: str) -> None:
    """Five clients whose optima differ, two in a round: the mean of all is what counts."""
    best = start(FedAvg(fraction_evaluate=0.0), 400)
    far = {
        memory: np.linalg.norm(start(sso(guard=guard, memory=memory), 60) - best)
        for memory in ("clients", "none")
    }
    assert far["clients"] < 0.5 * far["none"]


def test_integers_and_buffers_are_not_remembered() -> None:
    strategy = sso()
    start(strategy, 3)
    assert {tuple(entry.u.shape) for entry in strategy.remembered.clients.values()} == {(4,)}


def test_the_order_of_replies_changes_nothing() -> None:
    class Shuffled(LocalGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> list[Message]:
            return super().send_and_receive(messages, timeout=timeout)[::-1]

    nodes = [{"partition-id": i} for i in range(5)]
    ways = [start(sso(), 8, grid(app, nodes)) for grid in (LocalGrid, Shuffled)]
    assert (ways[0] == ways[1]).all()


# ---- when there is a memory ----


def test_auto_begins_when_a_node_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    strategy = sso(lambda k: range(5) if k < 4 else (0, 1, 2), memory="auto")
    with caplog.at_level(logging.INFO, "flwr"):
        strategy.summary()
    assert "Memory of clients: auto" in caplog.text
    start(strategy, 3)
    assert not strategy.remembered.clients
    assert "beta" not in strategy.trace.columns
    whole = sso(lambda k: range(5) if k < 4 else (0, 1, 2), memory="auto")
    result = whole.start(federation(5), initial(), num_rounds=5)
    assert len(whole.remembered.clients) == 3
    assert whole.trace["known"][4] == pytest.approx(0.6)  # the other two count with the mean
    assert result.train_metrics_clientapp[5]["fedsso-known"] == whole.trace["known"][5]
    assert "fedsso-beta" in result.train_metrics_clientapp[5]


def test_auto_is_off_where_the_memory_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsso.algorithms.memory.BYTES", 100)
    strategy = sso(memory="auto")
    plain = start(sso(memory="none"), 6)
    assert (start(strategy, 6) == plain).all()
    assert not strategy.remembered.clients


def noisy() -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 2)


@pytest.mark.parametrize("inner", [FedMedian(), noisy()], ids=["robust", "private"])
def test_what_only_the_inner_strategy_may_see_is_not_remembered(inner: Strategy) -> None:
    with pytest.raises(fedsso.InputError, match=r"use memory='none'"):
        FedSSO(inner=inner, memory="clients")
    with pytest.raises(fedsso.InputError, match="memory"):
        FedSSO(memory="all")


def test_auto_is_off_with_a_robust_average() -> None:
    strategy = FedSSO(inner=FedMedian(fraction_train=0.5, fraction_evaluate=0.0))
    start(strategy, 3)
    assert not strategy.remembered.clients
    assert "beta" not in strategy.trace.columns


def test_a_strategy_that_averages_as_fedavg_does_may_be_inside() -> None:
    inner = FedProx(proximal_mu=0.0, fraction_train=0.5, fraction_evaluate=0.0)
    strategy = FedSSO(inner=inner)
    start(strategy, 3)
    assert strategy.remembered.clients


def test_whoever_sees_the_mean_alone_refuses_a_memory() -> None:
    for make in (
        lambda memory: LegacyFedSSO(memory=memory),
        lambda memory: PhasedStrategy("fedsso", memory=memory),
        lambda memory: ServerBFGS([torch.nn.Parameter(torch.zeros(2))], memory=memory),
    ):
        make("auto")
        make("none")
        with pytest.raises(fedsso.InputError, match=r"memory='none'.*fedsso\.flower\.FedSSO"):
            make("clients")
    with pytest.raises(fedsso.InputError, match="memory"):
        ServerBFGS([torch.nn.Parameter(torch.zeros(2))], memory="all")


# ---- nodes ----


def test_a_reply_that_is_screened_out_is_not_remembered() -> None:
    strategy = sso(lambda k: (0, 1, 2, 3) if k < 3 else (1, 2, 4), memory="clients")
    liar = NODES[1]

    def tamper(reply: Message) -> Message:
        if reply.metadata.src_node_id == liar:
            reply.content["arrays"]["a.weight"] = Array(np.full((3, 1), np.nan, "float32"))
        return reply

    start(strategy, 4, federation(5, tamper))
    assert set(strategy.remembered.clients) == {NODES[i] for i in (0, 2, 3, 4)}


def test_what_is_remembered_is_what_the_bounds_have_left() -> None:
    strategy = sso(lambda _: range(4))
    liar = NODES[1]

    def tamper(reply: Message) -> Message:
        if reply.metadata.src_node_id == liar:
            reply.content["metrics"]["num-examples"] = 10**6
            reply.content["arrays"]["a.weight"] = Array(np.full((3, 1), 90.0, "float32"))
        return reply

    start(strategy, 1, federation(5, tamper))
    entries = strategy.remembered.clients
    others = [entry for node, entry in entries.items() if node != liar]
    usual = float(np.median([float(entry.u.norm()) for entry in others]))
    assert entries[liar].u.norm() == pytest.approx(20 * usual, rel=1e-3)
    assert entries[liar].weight == pytest.approx(50 * 30)  # 30, 20 and 30 rows


def test_a_node_that_stays_silent_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    silent = NODES[4]
    strategy = sso(lambda k: range(5) if k == 1 else range(4))
    with caplog.at_level(logging.INFO, "fedsso"):
        grid = federation(5)
        arrays = strategy.start(grid, initial(), num_rounds=28).arrays
        assert 19 < strategy.remembered.clients[silent].unheard < 20  # 27 rounds, 130 of 180 rows
        strategy.start(grid, arrays, num_rounds=2)
    assert silent not in strategy.remembered.clients
    assert f"client(s) {silent} are forgotten" in caplog.text


def test_nodes_come_and_go() -> None:
    """A node that has left does not count; it is remembered, and counts when it comes back."""
    strategy = sso(lambda k: (k % 3, 3 + k % 2) if k < 6 else (1, 2))
    grid = federation(5)
    arrays = strategy.start(grid, initial(), num_rounds=5).arrays
    gone = [NODES[i] for i in (3, 4)]
    contexts = [grid.contexts.pop(node) for node in gone]
    arrays = strategy.start(grid, arrays, num_rounds=2).arrays
    assert set(gone) < set(strategy.remembered.clients)
    assert strategy.remembered.clients[gone[0]].unheard > 1
    assert strategy.trace["known"][-1] == pytest.approx(1)  # of the three that are left
    for node, context in zip((NODES[3], NODES[9]), contexts, strict=True):
        grid.contexts[node] = context
    strategy.start(grid, arrays, num_rounds=1)
    assert strategy.trace["known"][-1] < 1  # the newcomer has not answered
    assert NODES[9] not in strategy.remembered.clients


def answers(*clients: int) -> list[Answer]:
    return [Answer(i, 10.0 * i, torch.full((2,), float(i))) for i in clients]


def hear(
    remembered: Remembered, k: int, given: list[Answer], connected: Collection[int]
) -> tuple[Any, Remembered]:
    weights = torch.tensor([one.weight for one in given])
    mean = (weights / weights.sum()) @ torch.stack([one.update for one in given])
    return remembered.hear(torch.zeros(2), 1.0, k, given, mean, connected)


def test_weights_are_those_of_the_connected_nodes() -> None:
    heard, remembered = hear(Remembered(), 1, answers(1, 3), {1, 2, 3, 4})
    assert heard.mass == 0.5  # the two others count with 20 each
    assert heard.known == 0
    heard, remembered = hear(remembered, 2, answers(1, 2), {1, 2, 3, 4})
    assert heard.mass == pytest.approx(30 / 80)
    assert heard.known == pytest.approx(40 / 80)
    assert heard.heard.known.item() == pytest.approx(1 / 3)
    heard, remembered = hear(remembered, 3, answers(1, 2, 3), {1, 2, 3})
    assert heard.mass == heard.known == heard.heard.known.item() == 1
    torch.testing.assert_close(heard.total, torch.full((1, 2), -(1 + 4 + 9) / 6))
    assert heard.heard.deviation.abs().max() < 1e-6
    assert list(remembered.models) == [3]
    with pytest.raises(fedsso.InputError, match="nobody has answered"):
        remembered.hear(torch.zeros(2), 1.0, 4, [], torch.zeros(2), {1})


# ---- checkpoints ----


@pytest.mark.parametrize("memory", ["auto", "clients"])
@pytest.mark.parametrize("guard", ["adaptive", "cautious"])
def test_killed_and_resumed_is_uninterrupted(guard: str, memory: str, tmp_path: Path) -> None:
    options = {"guard": guard, "memory": memory}
    whole = start(sso(**options), 10)
    start(sso(checkpoint_dir=tmp_path, **options), 6)
    strategy = sso(checkpoint_dir=tmp_path, **options)
    arrays = strategy.resume(initial())
    assert len(strategy.remembered.clients) == 5
    result = strategy.start(federation(5), arrays, num_rounds=strategy.rounds_left(10))
    assert (vector(result.arrays) == whole).all()
    assert strategy.trace["known"][-1] == 1


def quarter(folder: Path, rounds: int = 60) -> FedSSO:
    """Twenty nodes, of which the same five answer in the same round of every run."""

    def five(k: int) -> list[int]:
        return Random(k).sample(range(20), 5)

    strategy = sso(five, memory="auto", checkpoint_dir=folder, checkpoint_every=3)
    arrays = strategy.resume(initial())
    strategy.start(federation(20), arrays, num_rounds=strategy.rounds_left(rounds))
    return strategy


@pytest.mark.full
def test_twenty_nodes_of_which_a_quarter_answers_killed_again_and_again(tmp_path: Path) -> None:
    """Whenever kill -9 falls, the run ends as the undisturbed one."""
    folder = tmp_path / "kept"
    program = "import sys, pathlib, test_remembered as t; t.quarter(pathlib.Path(sys.argv[1]))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    whole = quarter(tmp_path / "whole")
    kills = 0
    for wait in (0.0, 0.01, 0.04, 0.1):
        child = subprocess.Popen([sys.executable, "-c", program, folder], env=env)
        before = written(folder)
        while child.poll() is None and written(folder) == before:
            time.sleep(0.001)
        time.sleep(wait)
        child.kill()
        kills += child.wait() == -signal.SIGKILL
    assert kills
    resumed = quarter(folder)
    for column in ("round", "train_loss", "known", "beta", "stretch"):
        np.testing.assert_array_equal(resumed.trace[column], whole.trace[column])
    assert same(resumed._current, whole._current)
    assert set(resumed.remembered.clients) == set(NODES[:20])


def written(folder: Path) -> int:
    """When the checkpoint was written last. 0 if there is none."""
    file = folder / "checkpoint.safetensors"
    return file.stat().st_mtime_ns if file.exists() else 0


def test_a_checkpoint_of_a_version_without_memory_goes_on(tmp_path: Path) -> None:
    everybody = {"cohorts": lambda k: range(5) if k < 3 else (0, 1), "memory": "auto"}
    start(sso(checkpoint_dir=tmp_path, **everybody), 2)
    file = tmp_path / "checkpoint.safetensors"
    tensors = checkpoint.load(file)
    assert b"memory=" not in bytes(tensors["about"].tolist())
    older = {name: leaf for name, leaf in tensors.items() if "memory" not in name}
    assert len(older) < len(tensors)
    checkpoint.save(file, older, "a run on Flower")
    strategy = sso(checkpoint_dir=tmp_path, **everybody)
    arrays = strategy.resume()
    assert arrays is not None
    strategy.start(federation(5), arrays, num_rounds=2)
    assert len(strategy.remembered.clients) == 2


@pytest.mark.parametrize("ids", [NODES[:5], [0, 1, 2**63 - 1, 2**63, 2**64 - 1]])
def test_all_ids_that_flower_draws_come_back(ids: list[int], tmp_path: Path) -> None:
    assert min(ids) < 2**63 <= max(ids)
    own = {node: Client(1.0, 0.0, 3, torch.tensor([float(i)])) for i, node in enumerate(ids)}
    file = tmp_path / "checkpoint.safetensors"
    checkpoint.save(file, Remembered(own, {3: torch.zeros(1)}).tensors(), "")
    assert Remembered.of(torch.zeros(1), checkpoint.load(file)).clients == own


def test_ids_of_an_earlier_version_are_signed() -> None:
    _, remembered = hear(Remembered(), 1, answers(1, 3), {1, 3})
    tensors = remembered.tensors()
    tensors["remembered.ids"] = tensors["remembered.ids"].to(torch.int64)
    assert Remembered.of(torch.zeros(2), tensors).clients.keys() == {1, 3}


def test_a_memory_of_another_model_is_refused() -> None:
    _, remembered = hear(Remembered(), 1, answers(1, 3), {1, 3})
    tensors = remembered.tensors()
    again = Remembered.of(torch.zeros(2), tensors)
    assert again.clients.keys() == {1, 3}
    assert not Remembered.of(torch.zeros(2), {}).clients
    with pytest.raises(fedsso.InputError, match="memory of a client"):
        Remembered.of(torch.zeros(3), tensors)
