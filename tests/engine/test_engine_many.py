"""Very many clients: a round's work goes with those who take part, and draws stay as they were."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedsso import Federation
from fedsso.engine import checkpoint
from fedsso.engine.checkpoint import of_text, text_of
from fedsso.engine.per_client import WIDTH, Absence, PerClient
from fedsso.engine.rounds import Rounds
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.support.intake import Damaged
from fedsso.support.rng import generator
from fedsso.support.trees import leaves, named_leaves

COHORT = 10
BASE: dict[str, Any] = {
    "rounds": 40,
    "local_steps": 2,
    "batch_size": 2,
    "eval_every": 40,
    "device": "cpu",
}


def of(clients: int) -> Federation:
    """Three rows for each of so many clients."""
    owner = torch.arange(3 * clients) % clients
    draw = generator(0, "rows of a test")
    x = torch.randn(3 * clients, 2, generator=draw)
    return Federation.from_arrays(x, (x[:, 0] > 0).long(), owner, test_fraction=0)


def begin(clients: int, name: str, **options: Any) -> Simulation:
    some = {**BASE, "participation": COHORT / clients, **options}
    return Simulation(of(clients), "mclr", name, **some)


# ---- values of clients ----


def test_a_copy_shares_what_it_does_not_change() -> None:
    """Two neighbours are in one block, so that of 100 blocks two are replaced."""
    old = PerClient(list(range(100 * WIDTH)))
    new = old.copy()
    new.put([0, 1, 50 * WIDTH], [-1, -2, -3])
    assert new.shared(old) == 98
    assert old[:2] == [0, 1]
    assert new[:3] == [-1, -2, 2]
    assert new.take([50 * WIDTH, 1]) == [-3, -2]
    assert len(new) == len(list(new)) == 100 * WIDTH
    with pytest.raises(IndexError):
        new[100 * WIDTH]


def test_only_what_was_replaced_is_merged() -> None:
    old: PerClient[tuple[int, ...]] = PerClient.alike(1000, (0,))
    new = old.copy()
    new.put([3, 999], [(1,), (2,)])
    calls = []

    def both(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
        calls.append((before, now))
        return (9,)

    merged = new.merged(old, both)
    assert calls == [((0,), (1,)), ((0,), (2,))]
    assert merged.changed_from(old) == [3, 999]
    assert new[3] == (1,)


def test_absence_is_the_sum_that_each_client_would_keep() -> None:
    """To the bit: sums of 0.1 and the like depend on where they begin."""
    clients, limit = 50, 3.0
    draw = np.random.default_rng(0)
    plain = np.zeros(clients)
    absence = Absence.none(clients)
    forgotten = 0
    for step in range(400):
        away = np.flatnonzero(plain > limit).tolist()
        assert absence.beyond(limit) == away
        if away:
            plain[away] = 0
            absence = absence.heard(away, 0.0)
            forgotten += len(away)
        some = clients if step % 97 == 96 else int(draw.integers(1, 9))
        who = np.sort(draw.choice(clients - 3, min(some, clients - 3), replace=False))
        if some == clients:
            who = np.arange(clients)
        mass = float(draw.choice([0.1, 0.3, 1 / 7]))
        plain += mass
        plain[who] = 0
        absence = absence.heard(who.tolist(), mass)
        assert absence.each().tolist() == plain.tolist()
        assert int(absence.left.sum()) == clients
        if step % 50 == 0:
            absence = Absence.of(absence.each())
    assert forgotten > 20


# ---- rounds ----


@pytest.mark.parametrize("clients", [30, 999, 12_345])
@pytest.mark.parametrize("sample", [0, 2])
def test_cohorts_are_the_first_of_a_permutation_of_all(clients: int, sample: int) -> None:
    """The draws of all versions so far, with those who drop out and those who are slow."""
    settings = Settings(
        participation=7 / clients, seed=5, drop_rate=0.3, stragglers=0.5, local_steps=9
    )
    rounds = Rounds(of(clients), settings)
    again = (sample,) if sample else ()
    for k in range(1, 6):
        plan = rounds.plan(k, sample)
        order = torch.randperm(clients, generator=generator(5, "cohort", k, *again))
        chosen = order[:7].sort().values
        numbers = {}
        for purpose, when in (("drop", (k, *again)), ("late", (k,)), ("steps", (k,))):
            draw = generator(5, purpose, *when)
            numbers[purpose] = torch.rand(clients, generator=draw, dtype=torch.float64)
        answered = chosen[numbers["drop"][chosen] >= 0.3]
        late = 1 + (numbers["steps"] * 9).long()
        tau = torch.where(numbers["late"] < 0.5, late, 9)
        assert plan.chosen.tolist() == chosen.tolist()
        assert plan.answered.tolist() == answered.tolist()
        assert plan.steps.tolist() == tau[answered].tolist()


@pytest.mark.parametrize("name", ["fedavg", "fedsso", "scaffold"])
def test_a_round_replaces_no_more_blocks_than_clients_that_answer(name: str) -> None:
    clients = 40 * WIDTH
    sim = begin(clients, name)
    for _ in range(3):
        before = sim.now
        sim.step()
        for field in ("own", "memory", "position"):
            blocks = -(-clients // WIDTH)
            assert getattr(sim.now, field).shared(getattr(before, field)) >= blocks - COHORT
        assert len(sim.now.absence.sums) <= sim.k + 1


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation of torch returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.numbers = max(self.numbers, one.numel())
        return out


@pytest.mark.parametrize("name", ["fedavg", "fedsso", "scaffold"])
def test_a_round_allocates_as_much_for_many_clients_as_for_few(name: str) -> None:
    """A list or an array of 8 bytes for each of 100 000 clients more would be 800 kB.

    Of blocks there are three lists, 2 % of that, and in each as many new ones as clients answer.
    `tracemalloc` sees Python and numpy; tensors are seen by torch.
    """
    peaks = []
    largest = []
    more = 100_000
    for clients in (200, 200 + more):
        sim = begin(clients, name)
        for _ in range(3):
            sim.step()
        tracemalloc.start()
        sim.step()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        with Largest() as seen:
            sim.step()
        largest.append(seen.numbers)
    assert peaks[1] - peaks[0] < 3 * (COHORT + 1) * WIDTH * 8 + 8 * more / 4
    assert 0 < largest[1] < largest[0] + more / 10


# ---- checkpoints ----


@pytest.mark.parametrize("name", ["fedsso", "scaffold"])
def test_a_checkpoint_holds_the_clients_that_have_taken_part(name: str, tmp_path: Path) -> None:
    """After two rounds of ten of 500 clients at most 20; the run goes on to the same bits."""
    whole = begin(500, name)
    run(whole, 6)
    sim = begin(500, name)
    run(sim, 2)
    state = sim.state()
    seen = {key.split(".")[1] for key in state if key.startswith(("own.", "memory."))}
    assert 10 <= len(seen) <= 20
    checkpoint.save(tmp_path / "c.safetensors", state, "one")
    later = begin(500, name)
    later.restore(checkpoint.load(tmp_path / "c.safetensors", "one"))
    run(later, 6)
    assert torch.equal(later.server.x, whole.server.x)
    assert later.position.tolist() == whole.position.tolist()
    assert later.now.absence.each().tolist() == whole.now.absence.each().tolist()


def test_a_checkpoint_with_all_clients_is_still_read() -> None:
    """Earlier versions wrote every client, and no list of them."""
    whole = begin(60, "scaffold")
    run(whole, 5)
    sim = begin(60, "scaffold")
    run(sim, 3)
    state = sim.state()
    for i, own in enumerate(sim.own):
        state |= dict(named_leaves(own, f"own.{i}"))
    contents = json.loads(text_of(state["contents"]))
    del contents["own"]
    del contents["memory"]
    state["contents"] = of_text(json.dumps(contents))
    later = begin(60, "scaffold")
    later.restore(state)
    run(later, 5)
    assert torch.equal(later.server.x, whole.server.x)
    pairs = zip(leaves(tuple(later.own)), leaves(tuple(whole.own)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("wrong", [["60"], ["-1"], ["x"], 5])
def test_a_list_of_clients_that_are_not_there_is_damage(wrong: object) -> None:
    sim = begin(60, "scaffold")
    run(sim, 1)
    state = sim.state()
    contents = json.loads(text_of(state["contents"]))
    state["contents"] = of_text(json.dumps({**contents, "own": wrong}))
    before = sim.now
    with pytest.raises(Damaged, match="contents"):
        sim.restore(state)
    assert sim.now is before
