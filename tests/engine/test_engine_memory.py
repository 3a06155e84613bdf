"""What the engine keeps for servers that remember their clients: `Algorithm.receive` and `forget`.

A small algorithm of its own shows the engine's part, FedSSO with memory="clients" the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, FedPer, FedSSO, InputError, compare, simulate
from fedsso.algorithm import Algorithm, Attendance, Cohort, Local, Objective, Reply, hyper, param
from fedsso.algorithm import local as solver
from fedsso.algorithm.records import stack
from fedsso.algorithms import memory
from fedsso.engine import checkpoint
from fedsso.engine import simulate as engine
from fedsso.engine.rounds import Plan, Rounds
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.support.trees import Tree, named_leaves

BASE: dict[str, Any] = {
    "rounds": 40,
    "local_steps": 2,
    "batch_size": 4,
    "dtype": "float64",
    "device": "cpu",
}
SOME = {**BASE, "participation": 0.6, "drop_rate": 0.3, "seed": 3}
TIMES = 20  # how often the others answer, on average, before a client is forgotten
CLOSE = {"rtol": 1e-8, "atol": 1e-10}  # rounding of 1e-16, amplified by some rounds of BFGS


class Kept(NamedTuple):
    """Of one client."""

    last: Tensor  # its last update
    answers: Tensor  # how often it has answered, [trials, 1]


class News(NamedTuple):
    """Of the clients that answer."""

    delta: Tensor
    last: Tensor
    answers: Tensor


class State(NamedTuple):
    """Of the server."""

    x: Tensor
    total: Tensor  # sum of p_i times the last update
    answers: Tensor  # weighted mean of the answers of the last round's clients before it


@hyper
class Recall(Algorithm):
    """FedAvg that steps by half of the mean of all clients' last updates."""

    alpha: float = param(default=0.1, doc="client step", swept=True)

    def server_init(self, x: Tensor) -> State:
        return State(x, torch.zeros_like(x), torch.zeros_like(x[:, :1]))

    def memory_init(self, x: Tensor) -> Kept:
        return Kept(torch.zeros_like(x), torch.zeros_like(x[:, :1]))

    def client(self, f: Objective, x: Tensor, own: tuple[()], local: Local) -> Reply:
        delta, loss = solver.sgd(f, x, local, self.alpha)
        return Reply(delta, own, loss)

    def receive(self, server: State, delta: Tensor, kept: Kept, k: int) -> tuple[News, Kept]:
        assert server.x.shape == delta.shape[1:]
        assert k >= 1
        return News(delta, kept.last, kept.answers), Kept(delta, kept.answers + 1)

    def server(self, server: State, news: News, cohort: Cohort) -> State:
        total = server.total + cohort.mass * (news.delta - news.last)
        return State(server.x + 0.5 * total, total, news.answers)

    def forget(self, server: State, lost: Kept) -> State:
        return server._replace(total=server.total - lost.last)


RECORDS: dict[str, Algorithm] = {
    "recall": Recall(),
    "fedsso": FedSSO(memory="clients"),
    "given": FedSSO(memory="clients", alpha=0.1),
}


def begin(fed: Federation, records: Sequence[Algorithm], **options: Any) -> Simulation:
    full = {**SOME, **options}
    return Simulation(fed, "mclr", records, **full)


def after(fed: Federation, records: Sequence[Algorithm], k: int, **options: Any) -> Simulation:
    sim = begin(fed, records, **options)
    run(sim, k)
    return sim


def tensors(sim: Simulation) -> dict[str, Tensor]:
    """What is known after the last round, but for the time that it took."""
    return {name: leaf for name, leaf in sim.state().items() if "seconds" not in name}


def fix_cohorts(patch: pytest.MonkeyPatch, cohort: Callable[[int], Sequence[int]]) -> None:
    """Let the clients `cohort(k)` answer in round k."""

    def plan(rounds: Rounds, k: int, sample: int = 0) -> Plan:  # noqa: ARG001
        who = torch.tensor(cohort(k), dtype=torch.int64)
        return Plan(who, who, torch.full((len(who),), rounds.settings.local_steps or 0))

    patch.setattr(Rounds, "plan", plan)


# ---- what is handed over ----


def test_uploads_and_memories_belong_to_the_same_client(fed: Federation) -> None:
    """The running total is the sum over all clients, and each knows how often it answered."""
    sim = begin(fed, [Recall()])
    answers = torch.zeros(fed.clients)

    def count(sim: Any) -> None:
        answers[sim.rounds.plan(sim.k).answered] += 1
        kept: list[Any] = list(sim.now.memory)
        total = sum(p * each.last for p, each in zip(sim.p.tolist(), kept, strict=True))
        torch.testing.assert_close(sim.server.total, total, rtol=0, atol=1e-13)
        assert [float(each.answers) for each in kept] == answers.tolist()

    run(sim, 20, count)
    assert answers.min() >= 1  # everybody has answered, and nobody always
    assert answers.max() < 20


@pytest.mark.parametrize("name", RECORDS)
def test_clients_in_chunks_of_one_give_the_same(
    fed: Federation, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = after(fed, [RECORDS[name]], 8)
    seen = []
    monkeypatch.setattr(engine, "BUDGET", {"cpu": 1})
    parts = begin(fed, [RECORDS[name]])
    chunks = parts._chunks
    monkeypatch.setattr(parts, "_chunks", lambda who: (seen.append(c) or c for c in chunks(who)))
    run(parts, 8)
    assert {len(chunk) for chunk in seen} == {1}
    one, other = tensors(whole), tensors(parts)
    assert one.keys() == other.keys()
    for leaf in one:
        if not leaf.startswith("server.curvature"):  # unused slots hold whatever was there
            torch.testing.assert_close(other[leaf], one[leaf], **CLOSE, equal_nan=True)


@pytest.mark.parametrize("kind", [Recall, FedSSO])
def test_a_batch_of_trials_is_its_single_runs(fed: Federation, kind: Any) -> None:
    fields = {"memory": "clients"} if kind is FedSSO else {}
    records = [kind(alpha=alpha, **fields) for alpha in (0.02, 0.1, 0.3)]
    together = after(fed, records, 8)
    for t, record in enumerate(records):
        alone = after(fed, [record], 8)
        pairs = zip(together.now.memory, alone.now.memory, strict=True)
        for both, one in [*pairs, (together.server.x, alone.server.x)]:
            for (_, a), (_, b) in zip(named_leaves(both, ""), named_leaves(one, ""), strict=True):
                torch.testing.assert_close(a[t], b[0], **CLOSE)


@pytest.mark.parametrize("guard", ["adaptive", "cautious", "none"])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_bytes_are_those_without_a_memory(
    fed: Federation, guard: str, compress: str | None
) -> None:
    sent = []
    for kind in ("clients", "none"):
        record = FedSSO(memory=kind, guard=guard, alpha=0.1)
        trace = simulate(fed, "mclr", record, **{**SOME, "rounds": 6, "compress": compress}).trace
        sent.append([trace[name].tolist() for name in ("bytes_up", "bytes_down")])
    assert sent[0] == sent[1]
    assert sum(sent[0][0][1:]) > 0


# ---- checkpoints, interrupts, explosions ----


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_resumed_run_goes_on_to_the_bit(
    fed: Federation, name: str, dtype: str, tmp_path: Path
) -> None:
    records = [RECORDS[name]] * 2
    whole = tensors(after(fed, records, 12, dtype=dtype))
    for k in (1, 4, 9):
        path = tmp_path / f"{k}.safetensors"
        checkpoint.save(path, after(fed, records, k, dtype=dtype).state(), "id")
        resumed = begin(fed, records, dtype=dtype)
        resumed.restore(checkpoint.load(path, "id"))
        run(resumed, 12)
        found = tensors(resumed)
        assert found.keys() == whole.keys()
        for leaf, value in whole.items():
            if not leaf.startswith("server.curvature"):  # unused slots hold whatever was there
                same = torch.equal(found[leaf].nan_to_num(-1.0), value.nan_to_num(-1.0))
                assert same, (k, leaf)


def leaves_of(kept: Tree, trial: int) -> list[Tensor]:
    return [leaf[trial] for _, leaf in named_leaves(kept, "")]


def test_an_undone_round_restores_the_memory_of_its_trial_alone(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = after(fed, [FedSSO(memory="clients")] * 2, 6)
    before = sim.now
    everybody = range(fed.clients)
    with monkeypatch.context() as patch:
        patch.setattr(sim, "_judge", lambda *_: torch.tensor([True, False]))
        run(sim, 7)
    answered = set(sim.rounds.plan(7).answered.tolist())
    assert sim.server.choice.undone[:, 0].tolist() == [0, 1]
    assert 0 < len(answered) < fed.clients
    for i in everybody:
        for trial, kept_new in ((0, i in answered), (1, False)):
            old, new = leaves_of(before.memory[i], trial), leaves_of(sim.now.memory[i], trial)
            same = all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
            assert same is not kept_new
    for field in ("total", "mass", "s", "y"):
        old, new = getattr(before.server.memory, field), getattr(sim.server.memory, field)
        assert torch.equal(old[1], new[1])
    assert not torch.equal(before.server.memory.total[0], sim.server.memory.total[0])
    run(sim, 12)  # and goes on
    assert sim.server.x.isfinite().all()


def test_a_diverged_trial_keeps_its_memory_and_its_neighbours_theirs(fed: Federation) -> None:
    records = [Recall(alpha=0.1), Recall(alpha=1e200)]
    sim = after(fed, records, 10)
    alone = after(fed, records[:1], 10)
    assert sim.diverged.tolist()[0] == 0
    assert sim.diverged.tolist()[1] > 0
    for both, one in zip(sim.now.memory, alone.now.memory, strict=True):
        assert all(leaf.isfinite().all() for leaf in leaves_of(both, 1))
        for a, b in zip(leaves_of(both, 0), leaves_of(one, 0), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_an_interrupted_round_leaves_the_memory_as_it_was(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, whole = (after(fed, [FedSSO(memory="clients")], 5) for _ in range(2))
    before = sim.now

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sim, "_settle", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(sim, 6)
    assert sim.now is before
    for one in (sim, whole):
        run(one, 9)
    assert torch.equal(sim.server.x, whole.server.x)


# ---- clients that stay away ----


def forgotten_in(fed: Federation) -> int:
    """The round before which client 0 is forgotten if it answers in round 1 alone."""
    mass = float(fed.p[1:].sum())
    unheard, k = 0.0, 2
    while unheard <= TIMES:
        unheard, k = unheard + mass, k + 1
    return k


@pytest.mark.parametrize("name", RECORDS)
def test_a_client_that_stays_away_is_forgotten_and_comes_back_as_a_new_one(
    fed: Federation, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = forgotten_in(fed)
    others = list(range(1, fed.clients))
    fix_cohorts(monkeypatch, lambda k: [0, *others] if k in (1, away + 2) else others)
    sim = begin(fed, [RECORDS[name]])
    blank = sim.algorithm.memory_init(sim.server.x)
    run(sim, away - 1)
    kept: Any = sim.now.memory
    assert any(leaf.any() for leaf in leaves_of(kept[0], 0))
    with caplog.at_level(logging.INFO, "fedsso"):
        run(sim, away)
    assert f"round {away}: client(s) 0 are forgotten" in caplog.text
    kept = sim.now.memory
    assert all(
        torch.equal(a, b) for a, b in zip(leaves_of(kept[0], 0), leaves_of(blank, 0), strict=True)
    )
    weights = sim.p.tolist()[1:]
    if name == "recall":
        total = sum(p * each.last for p, each in zip(weights, kept[1:], strict=True))
        torch.testing.assert_close(sim.server.total, total, rtol=0, atol=1e-13)
        run(sim, away + 2)
        assert [float(each.answers) for each in sim.now.memory] == [1, *[away + 2] * len(others)]
    else:
        total = sum(p * each.u for p, each in zip(weights, kept[1:], strict=True))
        torch.testing.assert_close(sim.server.memory.total, total, rtol=0, atol=1e-12)
        assert float(sim.server.memory.mass) == pytest.approx(sum(weights), abs=1e-12)
        if name == "fedsso":  # which takes steps of the memory's own
            models = sum(p * each.x for p, each in zip(weights, kept[1:], strict=True))
            torch.testing.assert_close(sim.server.memory.models, models, rtol=0, atol=1e-12)
        run(sim, away + 2)
        assert float(sim.server.memory.mass) == pytest.approx(1, abs=1e-12)
        assert float(sim.now.memory[0].known) == 1


def test_a_client_that_answers_now_and_then_is_not_forgotten(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every tenth round is often enough, since nine rounds of the others weigh at most 9."""
    others = list(range(1, fed.clients))
    fix_cohorts(monkeypatch, lambda k: others if k % 10 else [0, *others])
    with caplog.at_level(logging.INFO, "fedsso"):
        sim = after(fed, [Recall()], 40)
    assert "forgotten" not in caplog.text
    assert float(sim.now.memory[0].answers) == 4


def test_clients_without_memories_are_not_forgotten(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fix_cohorts(monkeypatch, lambda _: [1, 2])
    with caplog.at_level(logging.INFO, "fedsso"):
        after(fed, [FedAvg(alpha=0.1)], 40)
    assert "forgotten" not in caplog.text


def test_a_client_that_never_answered_is_not_told_to_be_forgotten(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fix_cohorts(monkeypatch, lambda _: list(range(1, fed.clients)))
    with caplog.at_level(logging.INFO, "fedsso"):
        after(fed, [Recall()], forgotten_in(fed))
    assert "forgotten" not in caplog.text


def test_clients_are_forgotten_in_the_next_round_that_somebody_answers(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a round that nobody answers, the trace tells nothing."""
    away = forgotten_in(fed)
    others = list(range(1, fed.clients))
    cohorts = {1: [0, *others], away: []}
    fix_cohorts(monkeypatch, lambda k: cohorts.get(k, others))
    sim = after(fed, [FedSSO(memory="clients")], away)
    assert sim.rows[away]["grad_norm"].isnan().all()
    assert sim.rows[away]["known"].isnan().all()
    assert float(sim.server.memory.mass) == pytest.approx(1, abs=1e-12)
    run(sim, away + 1)
    assert float(sim.server.memory.mass) == pytest.approx(float(fed.p[1:].sum()), abs=1e-12)


def test_no_round_looks_at_all_personal_models(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would copy the states of all clients, and a memory of them would have a wrong shape."""
    sim = Simulation(fed, "mlp", [FedPer(alpha=0.1)], **SOME)
    looked = []
    models = type(sim).models
    monkeypatch.setattr(
        type(sim), "models", lambda own, state=None: looked.append(state) or models(own, state)
    )
    run(sim, 1)
    assert all(state is not None for state in looked)


# ---- FedSSO's choice ----


@pytest.mark.parametrize("form", ["bfgs", "bfgs-dense", "dfp", "lbfgs"])
@pytest.mark.parametrize("guard", ["adaptive", "cautious", "none"])
@pytest.mark.parametrize("alpha", ["auto", 0.1])
def test_with_all_clients_a_memory_changes_no_bit(
    fed: Federation, form: str, guard: str, alpha: Any
) -> None:
    options = {**BASE, "rounds": 12, "seed": 3}
    a, b = (
        simulate(fed, "mclr", FedSSO(memory=kind, form=form, guard=guard, alpha=alpha), **options)
        for kind in ("clients", "none")
    )
    assert torch.equal(a.x, b.x)


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "none"),
        ({"stragglers": 0.5}, "none"),
        ({"participation": 0.6}, "clients"),
        ({"drop_rate": 0.1}, "clients"),
        ({"drop_rate": 0.1, "compress": "topk:0.5"}, "none"),
    ],
)
def test_auto_remembers_where_some_clients_may_be_absent(
    fed: Federation, options: dict[str, Any], chosen: str
) -> None:
    found = Simulation(fed, "mclr", [FedSSO()], **BASE, **options)
    assert found.algorithm.memory == chosen  # type: ignore[attr-defined]
    run(found, 6)
    given = Simulation(fed, "mclr", [FedSSO(memory=chosen)], **BASE, **options)
    run(given, 6)
    assert torch.equal(found.server.x, given.server.x)
    assert ("beta" in found.rows[-1]) is (chosen == "clients")


def test_auto_leaves_the_papers_algorithm_as_it_is(fed: Federation) -> None:
    paper = FedSSO(alpha=0.1, guard="none")
    found = Simulation(fed, "mclr", [paper], **BASE, participation=0.6)
    assert found.algorithm.memory == "none"  # type: ignore[attr-defined]


def test_a_memory_that_does_not_fit_is_left_out_with_a_warning(
    fed: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    d = 4 * 3 + 3
    needed = 2 * fed.clients * d * 4
    some, everybody = Attendance(fed.clients, True), Attendance(fed.clients, False)
    for room, chosen in ((needed, "clients"), (needed - 1, "none")):
        monkeypatch.setattr(memory, "BYTES", room)
        assert FedSSO().join(some, d).memory == chosen
        assert FedSSO(memory="clients").join(some, d).memory == "clients"
        assert FedSSO(memory="none").join(some, d).memory == "none"
    caplog.clear()
    assert FedSSO().join(everybody, d).memory == "none"
    assert caplog.text == ""
    sim = begin(fed, [FedSSO()])
    assert f"a memory of {fed.clients} clients with {d} parameters each exceeds" in caplog.text
    assert list(sim.now.memory) == [()] * fed.clients


def test_an_unknown_memory_is_refused_with_the_three_that_there_are() -> None:
    with pytest.raises(InputError, match="auto, clients, none"):
        FedSSO(memory="elephant")


def test_records_with_different_memories_are_not_stacked_but_compared(fed: Federation) -> None:
    records = [FedSSO(alpha=0.1, memory=kind) for kind in ("clients", "none")]
    with pytest.raises(InputError, match="equal static fields"):
        stack(records, torch.float64, torch.device("cpu"))
    options = {**SOME, "rounds": 6}
    both = compare(fed, "mclr", records, **options)
    for record, found in zip(records, both, strict=True):
        assert torch.equal(found.x, simulate(fed, "mclr", record, **options).x)
