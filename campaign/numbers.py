"""Numerical oddities under every algorithm: a run ends, is marked as diverged, or is refused."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import fedsso
from fedsso.algorithms import ALGORITHMS
from fedsso.engine.simulate import SMALL

from . import verdict as v
from .forks import Ending, forked
from .scenes import from_tests
from .verdict import Case, Result

PART = "numbers"
QUICK = 60
OPTIONS: dict[str, Any] = {"rounds": 5, "local_steps": 3, "batch_size": 4, "device": "cpu"}
WORSE = 1000.0  # times the first loss: from there on a run has diverged


def cases(_folder: Path, seed: int, quick: bool) -> list[Case]:
    """Every algorithm on every table."""
    module = from_tests("", "oddities")
    good = [
        (name, odd, table, False) for odd, table in module.oddities().items() for name in ALGORITHMS
    ]
    bad = [
        (name, odd, table, True) for odd, table in module.refused().items() for name in ALGORITHMS
    ]
    chosen = good + bad
    random.Random(f"{seed} {PART}").shuffle(chosen)
    if quick:
        chosen = chosen[:QUICK]
    return [partial(_case, number, *one) for number, one in enumerate(chosen)]


def _case(number: int, name: str, odd: str, table: Any, wrong: bool) -> Result:
    ended = forked(partial(_run, name, table))
    found, told = _judge(ended, wrong)
    return Result(PART, number, odd, name, found, told, ended.seconds)


def _run(name: str, table: Any) -> dict[str, Any]:
    fed = fedsso.Federation.from_arrays(*table)
    model = "mlp" if name == "fedper" else "mclr" if fed.classes else "linear"
    run = fedsso.simulate(fed, model, name, **OPTIONS)
    losses = [float(one) for one in run.trace["train_loss"][1:]]
    return {"diverged": run.diverged, "finite": bool(run.x.isfinite().all()), "losses": losses}


def _judge(ended: Ending, wrong: bool) -> tuple[str, str]:
    if ended.hung:
        return v.HANG, ended.said[-300:]
    if ended.out_of_memory:
        return v.MEMORY, ended.error[-300:]
    if ended.error or ended.code < 0:
        return v.TRACEBACK, ended.error[-700:]
    if ended.code == 2:
        return v.REFUSED, ended.said[-300:]
    if wrong:
        return v.WRONG, "a table with NaN or infinite numbers was taken"
    return _finished(ended.value)


def _finished(run: dict[str, Any]) -> tuple[str, str]:
    """What diverged must be marked; it is left at its last finite model."""
    if not run["finite"]:
        return v.WRONG, f"the model is not finite: {run}"
    if run["diverged"] is not None:
        return v.FELL_BACK, f"marked as diverged in round {run['diverged']}"
    losses = [
        loss for loss in run["losses"] if not math.isnan(loss)
    ]  # NaN: a round that was undone
    if not losses or not all(map(math.isfinite, losses)):
        return v.WRONG, f"no finite loss, and not marked: {run}"
    if losses[-1] > WORSE * max(losses[0], SMALL):
        return v.WRONG, f"the loss went from {losses[0]:g} to {losses[-1]:g}, and is not marked"
    return v.RIGHT, ""
