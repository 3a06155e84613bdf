"""What every algorithm of the registry promises, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as serialise
from torch import Tensor

from fedsso import Federation, Results, Run, compare, simulate
from fedsso.algorithm import Algorithm, Local, Objective, Phase, Reply
from fedsso.algorithm.records import fields_of
from fedsso.algorithms import ALGORITHMS, make
from fedsso.engine import checkpoint
from fedsso.engine.simulate import run
from fedsso.experiment import problem
from fedsso.experiment.stepper import Simulation
from fedsso.support.trees import Tree, leaves, named_leaves
from samples import case

HARSH = {"participation": 0.8, "drop_rate": 0.3, "stragglers": 0.5}
BASE: dict[str, Any] = {
    "rounds": 5,
    "local_steps": 3,
    "batch_size": 4,
    "dtype": "float64",
    "seed": 1,
    "device": "cpu",
}
FULL = {**BASE, "batch_size": None}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "fedsso": (
        {},
        {"guard": "none"},
        {"form": "lbfgs", "m": 2},
        {"form": "dfp", "R": 3},
        {"form": "bfgs-dense"},
    ),
    "scaffold": ({}, {"option": "I"}),
    "fedac": ({}, {"option": "II"}),
    "fednl": (
        {},
        {"option": 2, "first": "zero", "compressor": "topk:0.2"},
        {"often": 0.5},
    ),
    "nl1": ({"K": 2},),
    "nl2": ({"K": 2},),
    "bl1": (
        {"compressor": "topk:3"},
        {"compressor": "rank:1", "p": 0.5, "down": 2, "basis": "standard"},
    ),
    "bl2": ({"compressor": "topk:3"}, {"compressor": "rank:1", "basis": "standard"}),
    "bl3": ({"compressor": "topk:3"}, {"compressor": "topk:5", "basis": "standard"}),
    "dane": ({"newton_steps": 2, "cg_steps": 6},),
    "giant": ({"cg_steps": 6},),
    "localnewton": ({"newton_steps": 2, "cg_steps": 6},),
    "fednew": ({"cg_steps": 6}, {"cg_steps": 6, "r": 2}),
    "harmofl": ({}, {"L": 0.5}),
    "aide": (
        {"q": 0.2, "newton_steps": 2, "cg_steps": 6},
        {"q": 0.2, "newton_steps": 2, "cg_steps": 6, "inner": 2},
    ),
    "disco": ({"cg_steps": 6}, {"precondition": "bfgs", "pairs": 8}),
    "mocha": ({"inner": 2},),
    "fedpm": (
        {"mu": 0.1},
    ),  # undamped it steps so far, to |x| = 600, that the Hessian is all but singular
}
LINEAR = ("bl1", "bl2", "bl3", "nl1", "nl2")  # for models with one output: logistic regression
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
    "mocha",
)
LEVERS = {
    "alpha": (0.05, 0.01, 0.2),
    "eta": (1.0, 0.5, 0.8),
    "mu": (0.1, 0.5, 1.0),
    "a": (1.0, 0.5, 0.8),
    "lam": (0.1, 0.2, 0.5),
}  # what a test varies, and how
BOUNDED = ("fedadagrad", "fedadam", "fedyogi", "serverlion")  # a huge step: x stays finite
DRAWS = (
    "fedsophia",
    "mocha",
    "nl1",
    "nl2",
)  # clients draw numbers of their own, so another order or another client is another run


def records() -> list[Any]:
    """Every algorithm with each of its variants, of which the first is always tested."""
    found = []
    for name in ALGORITHMS:
        variants = VARIANTS.get(name, ({},))
        for extra in variants:
            label = "-".join(map(str, (name, *extra.values())))
            found.append(case(name, extra, name=label, spare=extra != variants[0]))
    return found


pytestmark = [
    pytest.mark.parametrize(("name", "extra"), records()),
    pytest.mark.sample("name"),
]


@pytest.fixture
def fed(fed: Federation, make_fed: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> Federation:
    """The federation of all tests; two classes and the logistic loss where one output is needed."""
    if name not in LINEAR:
        return fed
    monkeypatch.setattr(problem, "default_loss", lambda _: "bce")
    made: Federation = make_fed(classes=2)
    return made


def lever(name: str) -> str:
    """The swept field that a test varies."""
    have = [f.name for f in fields_of(ALGORITHMS[name])]
    return next(n for n in LEVERS if n in have)


def record(name: str, extra: dict[str, Any], which: int = 0) -> Algorithm:
    field = lever(name)
    return make(name, {field: LEVERS[field][which], **extra})


def sick(name: str, extra: dict[str, Any]) -> Algorithm:
    """A record that diverges: with a huge client step, a regularisation whose inverse is infinite,
    or else a number that no user could give."""
    one = record(name, extra)
    field = lever(name)
    wild = {"alpha": torch.nan if name in BOUNDED else 1e6, "lam": 5e-324}
    object.__setattr__(one, field, wild.get(field, torch.nan))
    return one


def models_of(name: str) -> tuple[str, ...]:
    """Methods for convex problems are tested on one, where rounding is not amplified; FedPer needs
    two layers."""
    return ("mclr",) if name in CONVEX else ("mlp",) if name == "fedper" else ("mlp", "mclr")


def harsh(name: str) -> dict[str, Any]:
    """Cohorts that change, where the algorithm bears that."""
    return {"stragglers": 0.5} if ALGORITHMS[name].needs_all else HARSH


def simulation(
    fed: Federation, records: Sequence[Algorithm], model: str = "mclr", **options: Any
) -> Simulation:
    full = {**BASE, **options}
    return Simulation(fed, model, records, **full)


def advanced(sim: Simulation, rounds: int) -> Simulation:
    run(sim, rounds)
    return sim


class Stop(Exception):
    """Ends a run in the middle."""


def stopped(sim: Simulation, k: int, rounds: int) -> Simulation:
    """A run of so many rounds that ends after round k, which is not its last."""

    def after(_: Simulation) -> None:
        if sim.k == k:
            raise Stop

    if 0 < k < rounds:
        with suppress(Stop):
            run(sim, rounds, after)
    return advanced(sim, rounds) if k == rounds else sim


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


@pytest.mark.parametrize("batch_size", [4, None])
def test_stacked_equals_looped(
    fed: Federation, name: str, extra: dict[str, Any], batch_size: int | None
) -> None:
    algorithm = record(name, extra)
    options = {**BASE, **harsh(name), "batch_size": batch_size}
    for model in models_of(name):
        stacked = simulate(fed, model, algorithm, **options)
        looped = simulate(fed, model, algorithm, engine="loop", **options)
        close(stacked.x, looped.x)
        for column in ("train_loss", "test_loss", "grad_norm"):
            np.testing.assert_allclose(
                stacked.trace[column], looped.trace[column], rtol=1e-9, err_msg=column
            )
        for column in ("bytes_up", "bytes_down", "overridden", "skipped"):
            np.testing.assert_array_equal(
                stacked.trace[column], looped.trace[column], err_msg=column
            )


def test_trials_at_once_equal_one_by_one(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    records = [record(name, extra, which) for which in range(3)]
    together = compare(fed, models_of(name)[0], records, **{**BASE, **harsh(name)})
    for algorithm, run_ in zip(records, together, strict=True):
        alone = simulate(fed, models_of(name)[0], algorithm, **{**BASE, **harsh(name)})
        close(run_.x, alone.x)
        np.testing.assert_allclose(run_.trace["train_loss"], alone.trace["train_loss"], rtol=1e-10)
        np.testing.assert_array_equal(run_.trace["bytes_up"], alone.trace["bytes_up"])


def test_permuting_clients_changes_nothing(
    fed: Federation, name: str, extra: dict[str, Any]
) -> None:
    if name in DRAWS:
        pytest.skip("clients draw numbers of their own")
    if any(phase.lead for phase in record(name, extra).phases):
        pytest.skip("another client would lead")
    order = [3, 0, 4, 2, 1]
    rows = [fed.rows_of(i) for i in order]
    start = torch.tensor([0, *np.cumsum([len(r) for r in rows])])
    tests = [fed.rows_of(i, "test") for i in order]
    permuted = replace(fed, train_rows=torch.cat(rows), train_start=start)
    permuted = replace(
        permuted,
        test_rows=torch.cat(tests),
        test_start=torch.tensor([0, *np.cumsum([*map(len, tests)])]),
    )
    a = simulate(fed, models_of(name)[0], record(name, extra), **FULL)
    b = simulate(permuted, models_of(name)[0], record(name, extra), **FULL)
    close(a.x, b.x)
    np.testing.assert_allclose(a.trace["test_loss"], b.trace["test_loss"], rtol=1e-10)


def test_duplicating_a_client_with_split_weight_changes_nothing(
    fed: Federation, name: str, extra: dict[str, Any]
) -> None:
    if name in DRAWS:
        pytest.skip("clients draw numbers of their own")
    p = fed.p
    weights = torch.cat([p[:-1], p[-1:] * 0.3, p[-1:] * 0.7])
    last = fed.rows_of(fed.clients - 1)
    doubled = replace(
        fed,
        train_rows=torch.cat([fed.train_rows, last]),
        train_start=torch.cat([fed.train_start, fed.train_start[-1:] + len(last)]),
        test_start=torch.cat(
            [fed.test_start, fed.test_start[-1:]]
        ),  # the second half tests nothing
        weights=weights,
    )
    a = simulate(fed, models_of(name)[0], record(name, extra), **FULL)
    b = simulate(doubled, models_of(name)[0], record(name, extra), **FULL)
    close(a.x, b.x)


def test_inputs_are_not_changed(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    sim = advanced(
        simulation(fed, [record(name, extra), record(name, extra, 1)], models_of(name)[0]), 3
    )
    donated = _stores(sim)
    given = {n: leaf.clone() for n, leaf in named_leaves(sim.server, "server") if n not in donated}
    held = dict(named_leaves(sim.server, "server"))
    hyper = {f.name: getattr(sim.algorithm, f.name) for f in fields_of(sim.algorithm)}
    numbers = {n: v.clone() for n, v in hyper.items() if isinstance(v, Tensor)}
    data, labels, own = fed.x.clone(), fed.y.clone(), [leaf.clone() for leaf in leaves(sim.own)]
    before_own, model = sim.own, sim.models()
    sim.round()
    assert all(torch.equal(held[n], leaf) for n, leaf in given.items())
    assert all(torch.equal(getattr(sim.algorithm, n), v) for n, v in numbers.items())
    assert all(torch.equal(a, b) for a, b in zip(leaves(before_own), own, strict=True))
    assert torch.equal(fed.x, data)
    assert torch.equal(fed.y, labels)
    assert not torch.equal(sim.models(), model)


def test_client_functions_leave_message_and_state_alone(
    fed: Federation, name: str, extra: dict[str, Any]
) -> None:
    sim = advanced(simulation(fed, [record(name, extra)], models_of(name)[0]), 2)

    def client(phase: Phase, f: Objective, message: Tree, own: Tree, local: Local) -> Reply:
        before = [leaf.clone() for leaf in leaves((message, own))]
        reply = phase.client(f, message, own, local)
        assert all(torch.equal(a, b) for a, b in zip(leaves((message, own)), before, strict=True))
        return reply

    watch(sim, client)
    sim.round()


def watch(
    sim: Simulation,
    client: Callable[..., Reply],
    broadcast: Callable[[Tree], Tree] = lambda tree: tree,
) -> None:
    """Run client functions through `client(phase, ...)` and messages through `broadcast`."""

    class Watched(type(sim.algorithm)):  # type: ignore[misc]
        @property
        def phases(self) -> tuple[Phase, ...]:
            return tuple(
                phase._replace(
                    client=partial(client, phase),
                    broadcast=lambda *s, phase=phase: broadcast(phase.broadcast(*s)),
                )
                for phase in super().phases
            )

    object.__setattr__(sim.algorithm, "__class__", Watched)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_diverging_trial_harms_no_neighbour(
    fed: Federation, name: str, extra: dict[str, Any], dtype: str
) -> None:
    model, options = models_of(name)[0], {**BASE, "rounds": 8, "dtype": dtype}

    def trio(middle: Algorithm) -> Results:
        return compare(fed, model, [record(name, extra, 1), middle, record(name, extra)], **options)

    ill, sane = trio(sick(name, extra)), trio(record(name, extra, 2))
    for t in (0, 2):
        assert torch.equal(ill[t].x, sane[t].x)
        same_trace(ill[t], sane[t])
        alone = simulate(fed, model, record(name, extra, (1, 2, 0)[t]), **{**BASE, "rounds": 8})
        close(ill[t].x.double(), alone.x, 1e-10 if dtype == "float64" else 1e-3)
    assert [run_.diverged for run_ in sane] == [None] * 3
    end = ill[1].diverged
    assert end is not None
    assert 1 <= end < 8
    assert len(ill[1].trace) == 9
    for column in ("test_loss", "grad_norm"):
        assert np.isfinite(ill[1].trace[column][1:end]).all(), column
        assert np.isnan(ill[1].trace[column][end:]).all(), column
    assert not ill[1].trace["test_accuracy"][end:].any()
    assert np.isnan(ill[1].trace["train_loss"][end + 1 :]).all()
    assert ill[1].x.isfinite().all()  # frozen at the last good model
    assert ill[1].trace["overridden"][end:].sum() == ill[1].trace["skipped"][end:].sum() == 0


def payload(tree: Any, prefix: Callable[[Tensor], Tensor]) -> int:
    """Bytes of one copy of a message in a safetensors file, without the file's header."""
    tensors = {n: prefix(leaf).contiguous() for n, leaf in named_leaves(tree, "t")}
    blob = serialise(tensors)
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_counted_are_bytes_serialised(
    fed: Federation, name: str, extra: dict[str, Any], dtype: str
) -> None:
    records = [record(name, extra), record(name, extra, 1)]
    sim = simulation(fed, records, models_of(name)[0], **{**harsh(name), "dtype": dtype})
    seen = {"down": 0, "up": 0}
    held: list[tuple[Tensor, int]] = []  # a tensor that a client has received in this round

    def broadcast(message: Tree) -> Tree:
        plan = sim.rounds.plan(sim.k + 1, sum(phase.fresh for phase in phases[: len(calls) + 1]))
        phase = phases[len(calls)]
        plan = plan.lead if phase.lead else plan
        calls.append(message)
        if phase.apart:
            for m in range(len(plan.chosen)):
                seen["down"] += payload(message, lambda leaf, m=m: leaf[m, 0])
            return message
        for i in plan.chosen.tolist():
            new = [
                leaf for leaf in leaves(message) if not any(leaf is t and i == c for t, c in held)
            ]
            seen["down"] += payload(tuple(new), lambda leaf: leaf[0])
            held.extend((leaf, i) for leaf in leaves(message))
        return message

    def client(phase: Phase, f: Objective, message: Tree, own: Tree, local: Local) -> Reply:
        reply = phase.client(f, message, own, local)
        for i in range(len(local.own_steps)):
            seen["up"] += payload(reply.upload, lambda leaf, i=i: leaf[i, 0])
        return reply

    phases, calls = sim.algorithm.phases, list[Tree]()
    watch(sim, client, broadcast)
    for _ in range(5):
        sim.round()
        assert sim.rows[-1]["bytes_down"].tolist() == [seen["down"]] * 2
        assert sim.rows[-1]["bytes_up"].tolist() == [seen["up"]] * 2
        assert seen["down"] > 0
        seen.update(down=0, up=0)
        held.clear()
        calls.clear()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_checkpoint_and_resume_equal_the_uninterrupted_run_at_every_round(
    fed: Federation, name: str, extra: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**harsh(name), "dtype": dtype, "rounds": 6}
    records = [record(name, extra), sick(name, extra)]  # a frozen trial survives a checkpoint, too
    model = models_of(name)[0]
    whole = advanced(simulation(fed, records, model, **options), 6)
    for k in range(7):
        path = tmp_path / f"{k}.safetensors"
        checkpoint.save(
            path, stopped(simulation(fed, records, model, **options), k, 6).state(), "id"
        )
        resumed = simulation(fed, records, model, **options)
        resumed.restore(checkpoint.load(path, "id"))
        assert resumed.k == k
        same_state(advanced(resumed, 6), whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_the_same_seed_gives_the_same_bits(
    fed: Federation, name: str, extra: dict[str, Any], dtype: str, engine: str
) -> None:
    options, model = {**BASE, **harsh(name), "dtype": dtype, "engine": engine}, models_of(name)[0]
    a, b = (simulate(fed, model, record(name, extra), **options) for _ in range(2))
    assert a.x.dtype == getattr(torch, dtype)
    assert torch.equal(a.x, b.x)
    same_trace(a, b)
    other = simulate(fed, model, record(name, extra), **{**options, "seed": 2})
    if (
        model == "mlp" or not ALGORITHMS[name].needs_all
    ):  # else nothing is drawn: full passes from zero
        assert not torch.equal(a.x, other.x)


def test_float32_follows_float64(fed: Federation, name: str, extra: dict[str, Any]) -> None:
    single, double = (
        simulate(
            fed, models_of(name)[-1], record(name, extra), **{**BASE, **harsh(name), "dtype": dtype}
        )
        for dtype in ("float32", "float64")
    )
    # some hundred operations in a row, and solves with matrices whose condition is below ten
    close(single.x.double(), double.x, 1e3 * torch.finfo(torch.float32).eps)
