"""The runs that the tests of several processes compare: each rank of torchrun executes this file.

Usage: ranks_job.py WRITTEN WHICH WHAT [BEGUN]. WHICH is "some" or "all" variants of the algorithms.
WHAT lists what is done with each case, with commas between: "whole", "begun" (its state after two
rounds) and "continued" (from such a state, which another number of ranks has left in BEGUN). The
results go to the file WRITTEN.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "algorithms")]

from test_contract import BASE, LINEAR, VARIANTS, harsh, models_of, record  # noqa: E402

from conftest import labelled  # noqa: E402
from fedsso import SCAFFOLD, FedAvg, FedSSO  # noqa: E402
from fedsso.algorithm import Algorithm  # noqa: E402
from fedsso.algorithms import ALGORITHMS  # noqa: E402
from fedsso.engine import simulate  # noqa: E402
from fedsso.engine.ranks import team  # noqa: E402
from fedsso.engine.simulate import FORGOTTEN, run  # noqa: E402
from fedsso.experiment import problem  # noqa: E402
from fedsso.experiment.stepper import Simulation  # noqa: E402

HALF = 2  # rounds after which a state is kept for another number of ranks
SIZES = (23, 9, 5, 14, 31, 12, 8)
SHORT = {**BASE, "rounds": 3}
WEIGHTS = (0.25, 0.05, 0.1, 0.2, 0.1, 0.1, 0.2)


class Case(NamedTuple):
    """One simulation."""

    model: str | nn.Module
    records: list[Algorithm]
    options: dict[str, Any]
    linear: bool = False  # two classes and the logistic loss
    weights: tuple[float, ...] | None = None  # of the clients, instead of their rows
    forgets: float = FORGOTTEN  # how soon the server forgets who stays away


def cases(which: str = "some") -> Iterator[tuple[str, Case]]:
    """Every algorithm and the options of the engine.

    With "all" every variant of an algorithm, with all clients and with some; else its first variant
    with some clients.
    """
    for name in ALGORITHMS:
        variants = VARIANTS.get(name, ({},))
        for i, extra in enumerate(variants if which == "all" else variants[:1]):
            trials = [record(name, extra, number) for number in range(2)]
            model = models_of(name)[0]
            linear = name in LINEAR
            yield f"{name} {i} harsh", Case(model, trials, {**SHORT, **harsh(name)}, linear)
            if which == "all":
                yield f"{name} {i}", Case(model, trials[:1], dict(BASE), linear)
    yield from options()


def options() -> Iterator[tuple[str, Case]]:
    """What the engine does beside the mean of some vectors."""
    few = {**BASE, "participation": 0.3}  # two of seven clients: with three ranks one has none
    memory: list[Algorithm] = [FedSSO(alpha=0.05, memory="clients")]
    yield "memory", Case("mlp", memory, few)
    away = {**BASE, "participation": 0.3, "rounds": 8}
    yield "forgotten", Case("mclr", memory, away, forgets=0.7)
    several: list[Algorithm] = [FedSSO(alpha=0.05), FedSSO(alpha=0.02)]
    yield "metric of one layer", Case("mclr", several, {**BASE, "rounds": 4})
    yield "one client", Case("mclr", [FedAvg(alpha=0.05)], {**BASE, "participation": 0.01})
    for code in ("topk:0.3", "int8"):
        lossy = {**few, "compress": code}
        yield f"compressed {code}", Case("mlp", [SCAFFOLD(alpha=0.05)], lossy)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    yield "buffers", Case(network, [FedAvg(alpha=0.05)], {**BASE, "batch_size": None})
    judged = {**BASE, "eval_train": True, "l2": 0.1, "metrics": ("auc", "f1"), "stop_at": 0.99}
    yield "judged", Case("mclr", [FedAvg(alpha=0.05)], judged)
    yield "weighted", Case("mclr", [FedAvg(alpha=0.05)], judged, weights=WEIGHTS)
    personal = {**BASE, "eval_train": True, "l2": 0.1, "metrics": ("auc",)}
    fedper = [record("fedper", {})]
    yield "personal", Case("mlp", fedper, personal, weights=WEIGHTS)
    dead = [FedAvg(alpha=0.05), FedAvg(alpha=1e6)]
    yield "diverged", Case("mlp", dead, dict(BASE))
    yield "single precision", Case("mlp", [FedAvg(alpha=0.05)], {**BASE, "dtype": "float32"})


def simulation(case: Case) -> Simulation:
    """The simulation of a case, before its first round."""
    classes = 2 if case.linear else 3
    fed = labelled(SIZES, 4, classes, case.weights)
    loss = "bce" if case.linear else "cross_entropy"
    with mock.patch.object(problem, "default_loss", return_value=loss):
        return Simulation(fed, case.model, case.records, **case.options)


def result(sim: Simulation) -> dict[str, Any]:
    """What is compared: the trace and the models."""
    return {"columns": sim.columns(), "models": sim.models(), "diverged": sim.diverged}


class Stop(Exception):
    """Ends a run in the middle."""


def begun(case: Case) -> dict[str, Tensor]:
    """The state of a case after two rounds."""
    sim = simulation(case)

    def after(_: Any) -> None:
        if sim.k == HALF:
            raise Stop

    with suppress(Stop):
        run(sim, sim.settings.rounds, after)
    return sim.state()


def continued(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    """The result of a case that goes on from a state."""
    sim = simulation(case)
    sim.restore(state)
    run(sim, sim.settings.rounds)
    return result(sim)


def whole(case: Case) -> dict[str, Any]:
    """The result of a case without a break."""
    sim = simulation(case)
    run(sim, sim.settings.rounds)
    return result(sim)


def main(written: str, which: str, what: str, former: str = "") -> None:
    """Run all cases; the first rank writes."""
    warnings.simplefilter("error")
    states = torch.load(former)["begun"] if former else {}
    found: dict[str, Any] = {kind: {} for kind in what.split(",")}
    for label, case in cases(which):
        with mock.patch.object(simulate, "FORGOTTEN", case.forgets):
            if "whole" in found:
                found["whole"][label] = whole(case)
            if "begun" in found:
                found["begun"][label] = begun(case)
            if "continued" in found:
                found["continued"][label] = continued(case, states[label])
    if team().is_first:
        torch.save(found, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
