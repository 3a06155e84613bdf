"""What every algorithm of the registry promises, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as serialise
from torch import Tensor

from fedsso import Federation, Run, Runs, simulate, sweep
from fedsso.algorithm import Algorithm
from fedsso.algorithms import ALGORITHMS, make
from fedsso.context import context
from fedsso.engine import checkpoint
from fedsso.engine.gather import Chunk
from fedsso.engine.simulate import Simulation, run
from fedsso.options import complete
from fedsso.tree import fields_of, leaves, named_leaves, tree_map

HARSH = {"participation": 0.8, "drop_rate": 0.3, "stragglers": 0.5}
BASE: dict[str, Any] = {"rounds": 5, "local_steps": 3, "batch_size": 4, "dtype": "float64", "seed": 1, "device": "cpu"}
FULL = {**BASE, "batch_size": None}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "fedsso": ({}, {"guard": "none"}, {"form": "lbfgs", "m": 2}, {"form": "dfp", "R": 3}, {"form": "bfgs-dense"}),
}
RECORDS = [(name, extra) for name in ALGORITHMS for extra in VARIANTS.get(name, ({},))]

pytestmark = pytest.mark.parametrize(
    ("name", "extra"), RECORDS, ids=["-".join(map(str, (n, *e.values()))) for n, e in RECORDS]
)


def record(name: str, extra: dict[str, Any], alpha: float = 0.05) -> Algorithm:
    return make(name, {"alpha": alpha, **extra})


def simulation(fed: Federation, records: Sequence[Algorithm], model: str = "mclr", **options: Any) -> Simulation:
    full = complete({**BASE, **options})
    return Simulation(context(fed, model, full).job(full), records)


def advanced(sim: Simulation, rounds: int) -> Simulation:
    run(sim, rounds)
    return sim


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    """Equal relative to the length of the vectors."""
    assert torch.isfinite(a).all()
    assert float((a - b).norm()) <= tolerance * float(b.norm())


def same_trace(a: Run, b: Run) -> None:
    """Equal to the last bit in every column but the wall time; NaN equals NaN."""
    assert list(a.trace.columns) == list(b.trace.columns)
    for column in a.trace.columns:
        if column not in ("seconds", "trial"):
            np.testing.assert_array_equal(a.trace[column], b.trace[column], err_msg=column)


def same_state(a: Simulation, b: Simulation) -> None:
    left, right = a.state(), b.state()
    assert left.keys() == right.keys()
    for key in left.keys() - {"rows.seconds"} - _stores(a):
        assert torch.equal(left[key].nan_to_num(1e300), right[key].nan_to_num(1e300)), key


def _stores(sim: Simulation) -> set[str]:
    """The donated store has slots whose content is never read."""
    return {name for name, _ in named_leaves(sim.server, "server") if name.endswith(".store")}


@pytest.mark.parametrize("model", ["mclr", "mlp"])
@pytest.mark.parametrize("batch_size", [4, None])
def test_stacked_equals_looped(
    fed: Federation, name: str, extra: dict[str, Any], model: str, batch_size: int | None
) -> None:
    algorithm = record(name, extra)
    options = {**BASE, **HARSH, "batch_size": batch_size}
    stacked = simulate(fed, model, algorithm, **options)
    looped = simulate(fed, model, algorithm, engine="loop", **options)
    close(stacked.x, looped.x)
    for column in ("train_loss", "test_loss", "grad_norm"):
        np.testing.assert_allclose(stacked.trace[column], looped.trace[column], rtol=1e-9, err_msg=column)
    for column in ("bytes_up", "bytes_down", "overridden", "skipped"):
        np.testing.assert_array_equal(stacked.trace[column], looped.trace[column], err_msg=column)


def test_trials_at_once_equal_one_by_one(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    records = [record(name, extra, alpha) for alpha in (0.01, 0.05, 0.2)]
    together = sweep(fed, "mlp", records, **{**BASE, **HARSH})
    for algorithm, run_ in zip(records, together, strict=True):
        alone = simulate(fed, "mlp", algorithm, **{**BASE, **HARSH})
        close(run_.x, alone.x)
        np.testing.assert_allclose(run_.trace["train_loss"], alone.trace["train_loss"], rtol=1e-10)
        np.testing.assert_array_equal(run_.trace["bytes_up"], alone.trace["bytes_up"])


def test_permuting_clients_changes_nothing(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    order = [3, 0, 4, 2, 1]
    rows = [fed.rows_of(i) for i in order]
    start = torch.tensor([0, *np.cumsum([len(r) for r in rows])])
    permuted = replace(fed, train_rows=torch.cat(rows), train_start=start)
    a = simulate(fed, "mlp", record(name, extra), **FULL)
    b = simulate(permuted, "mlp", record(name, extra), **FULL)
    close(a.x, b.x)
    np.testing.assert_allclose(a.trace["test_loss"], b.trace["test_loss"], rtol=1e-10)


def test_duplicating_a_client_with_split_weight_changes_nothing(
    fed: Federation, name: str, extra: dict[str, Any]
) -> None:
    p = fed.p
    weights = torch.cat([p[:-1], p[-1:] * 0.3, p[-1:] * 0.7])
    last = fed.rows_of(fed.clients - 1)
    doubled = replace(
        fed,
        train_rows=torch.cat([fed.train_rows, last]),
        train_start=torch.cat([fed.train_start, fed.train_start[-1:] + len(last)]),
        weights=weights,
    )
    a = simulate(fed, "mlp", record(name, extra), **FULL)
    b = simulate(doubled, "mlp", record(name, extra), **FULL)
    close(a.x, b.x)


def test_inputs_are_not_changed(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    sim = advanced(simulation(fed, [record(name, extra), record(name, extra, 0.1)]), 3)
    donated = _stores(sim)
    given = {n: leaf.clone() for n, leaf in named_leaves(sim.server, "server") if n not in donated}
    held = dict(named_leaves(sim.server, "server"))
    hyper = {f.name: getattr(sim.algorithm, f.name) for f in fields_of(sim.algorithm)}
    numbers = {n: v.clone() for n, v in hyper.items() if isinstance(v, Tensor)}
    data, labels, own = fed.x.clone(), fed.y.clone(), [leaf.clone() for leaf in leaves(sim.own)]
    before_own = sim.own
    sim.round()
    assert all(torch.equal(held[n], leaf) for n, leaf in given.items())
    assert all(torch.equal(getattr(sim.algorithm, n), v) for n, v in numbers.items())
    assert all(torch.equal(a, b) for a, b in zip(leaves(before_own), own, strict=True))
    assert torch.equal(fed.x, data)
    assert torch.equal(fed.y, labels)
    assert not torch.equal(sim.algorithm.model(sim.server), held["server.x"])


def test_client_function_leaves_message_and_state_alone(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    sim = advanced(simulation(fed, [record(name, extra)]), 2)
    for phase in sim.algorithm.phases:
        message = phase.broadcast(sim.server)
        before = [leaf.clone() for leaf in leaves(message)]
        clients = np.arange(fed.clients)
        local = Chunk(sim.gather, sim.rounds, 3, clients, sim.position, np.full(fed.clients, 2))
        phase.client(sim.f, message, sim.own, local)
        assert all(torch.equal(a, b) for a, b in zip(leaves(message), before, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_diverging_trial_harms_no_neighbour(fed: Federation, name: str, extra: dict[str, Any], dtype: str) -> None:
    def trio(middle: float) -> Runs:
        records = [record(name, extra, alpha) for alpha in (0.01, middle, 0.05)]
        return sweep(fed, "mlp", records, **{**BASE, "rounds": 8, "dtype": dtype})

    sick, sane = trio(1e6), trio(0.02)
    for t in (0, 2):
        assert torch.equal(sick[t].x, sane[t].x)
        same_trace(sick[t], sane[t])
        alone = simulate(fed, "mlp", record(name, extra, (0.01, 0, 0.05)[t]), **{**BASE, "rounds": 8})
        close(sick[t].x.double(), alone.x, 1e-10 if dtype == "float64" else 1e-3)
    assert [run_.diverged for run_ in sane] == [None] * 3
    end = sick[1].diverged
    assert end is not None
    assert 1 <= end < 8
    assert len(sick[1].trace) == 9
    for column in ("test_loss", "grad_norm"):
        assert np.isfinite(sick[1].trace[column][1:end]).all(), column
        assert np.isnan(sick[1].trace[column][end:]).all(), column
    assert not sick[1].trace["test_accuracy"][end:].any()
    assert np.isnan(sick[1].trace["train_loss"][end + 1 :]).all()
    assert sick[1].x.isfinite().all()  # frozen at the last good model
    assert sick[1].trace["overridden"][end:].sum() == sick[1].trace["skipped"][end:].sum() == 0


def payload(tree: Any, prefix: Callable[[Tensor], Tensor]) -> int:
    """Bytes of one copy of a message in a safetensors file, without the file's header."""
    tensors = {n: prefix(leaf).contiguous() for n, leaf in named_leaves(tree, "t")}
    blob = serialise(tensors)
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_counted_are_bytes_serialised(fed: Federation, name: str, extra: dict[str, Any], dtype: str) -> None:
    options: dict[str, Any] = {**HARSH, "dtype": dtype}
    sim = simulation(fed, [record(name, extra), record(name, extra, 0.1)], **options)
    for k in range(1, 6):
        plan = sim.rounds.plan(k)
        down = up = 0
        for phase in sim.algorithm.phases:
            message = phase.broadcast(sim.server)
            down += payload(message, lambda leaf: leaf[0]) * len(plan.chosen)
            for i, steps in zip(plan.answered.tolist(), plan.steps.tolist(), strict=True):
                local = Chunk(sim.gather, sim.rounds, k, np.array([i]), sim.position[[i]], np.array([steps]))
                own = tree_map(lambda leaf, i=i: leaf[[i]], sim.own)
                upload = phase.client(sim.f, message, own, local).upload
                up += payload(upload, lambda leaf: leaf[0, 0])
        sim.round()
        assert sim.rows[-1]["bytes_down"].tolist() == [down, down]
        assert sim.rows[-1]["bytes_up"].tolist() == [up, up]
        assert down > 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_checkpoint_and_resume_equal_the_uninterrupted_run_at_every_round(
    fed: Federation, name: str, extra: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**HARSH, "dtype": dtype, "rounds": 6}
    records = [record(name, extra), record(name, extra, 1e6)]  # a frozen trial survives a checkpoint, too
    whole = advanced(simulation(fed, records, **options), 6)
    for k in range(7):
        path = tmp_path / f"{k}.safetensors"
        checkpoint.save(path, advanced(simulation(fed, records, **options), k).state(), "id")
        resumed = simulation(fed, records, **options)
        resumed.restore(checkpoint.load(path, "id"))
        assert resumed.k == k
        same_state(advanced(resumed, 6), whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_the_same_seed_gives_the_same_bits(
    fed: Federation, name: str, extra: dict[str, Any], dtype: str, engine: str
) -> None:
    options = {**BASE, **HARSH, "dtype": dtype, "engine": engine}
    a, b = (simulate(fed, "mlp", record(name, extra), **options) for _ in range(2))
    assert a.x.dtype == getattr(torch, dtype)
    assert torch.equal(a.x, b.x)
    same_trace(a, b)
    other = simulate(fed, "mlp", record(name, extra), **{**options, "seed": 2})
    assert not torch.equal(a.x, other.x)


def test_float32_follows_float64(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    single, double = (
        simulate(fed, "mclr", record(name, extra), **{**BASE, **HARSH, "dtype": dtype})
        for dtype in ("float32", "float64")
    )
    close(single.x.double(), double.x, 1e-4)
