"""Hostile answers to a regression: one of four hospitals lies, and the fit ends with the others."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsso import load_model
from fedsso.regression.fit import fit
from fedsso.regression.result import Regression

from . import verdict as v
from .forks import Ending, forked
from .scenes import from_tests
from .verdict import Case, Result

PART = "hospitals"
FULL, QUICK = 500, 40
SUMS = ("coefficients", "covariance", "robust", "loglik", "null_loglik", "rows")


def cases(_folder: Path, seed: int, quick: bool) -> list[Case]:
    """A lie for each number; where its hospital is left out, all is as if it had never been."""
    liars = from_tests("regression", "liars")
    lies = [liars.lie(seed * FULL + number) for number in range(QUICK if quick else FULL)]
    known = {}
    for study in sorted({_study(lie) for lie in lies}):
        made = liars.study(*study)
        whole = fit(liars.asking(liars.hospitals(made)), liars.toml(made), study[0], cluster=True)
        known[study] = _sums(liars.without(*study)), _sums(whole)
    return [partial(_case, number, lie, *known[_study(lie)]) for number, lie in enumerate(lies)]


def _study(lie: Any) -> tuple[str, bool]:
    """The tables that it is told about."""
    return lie.family, lie.weighted


def _sums(found: Any) -> dict[str, Any]:
    return {name: np.asarray(getattr(found, name)).tolist() for name in SUMS}


def _case(number: int, lie: Any, without: Any, whole: Any) -> Result:
    ended = forked(partial(_run, lie))
    found, seen = _judge(ended, without, whole)
    return Result(PART, number, lie.question, lie.text, found, seen, ended.seconds)


def _run(lie: Any) -> dict[str, Any]:
    """The fit with the liar, and all that is made of it."""
    liars = from_tests("regression", "liars")
    made = liars.study(*_study(lie))
    ask = liars.lying(liars.asking(liars.hospitals(made)), lie)
    found = fit(ask, liars.toml(made), lie.family, cluster=True)
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        Regression(found).save(place, "report.html")
        read = load_model(place)
    excluded = liars.LIAR in [one.hospital for one in found.refusals]
    return {"sums": _sums(read.fit), "excluded": excluded, "told": read.summary()}


def _judge(ended: Ending, without: Any, whole: Any) -> tuple[str, str]:
    if ended.hung or ended.out_of_memory:
        return (v.HANG if ended.hung else v.MEMORY), ended.said[-300:]
    if ended.code == 2:
        return v.LOST, f"one hospital has ended the fit: {ended.said[-300:]}"
    if ended.error or ended.code:
        return v.TRACEBACK, (ended.error or ended.said)[-700:]
    sums = ended.value["sums"]
    if sums == (without if ended.value["excluded"] else whole):
        return (v.REFUSED if ended.value["excluded"] else v.RIGHT), ""
    if ended.value["excluded"]:
        return v.WRONG, f"the hospital is left out, and its numbers are not: {sums}"
    finite = all(np.isfinite(np.array(one, float)).all() for one in sums.values())
    return (v.TAKEN, "") if finite else (v.WRONG, f"numbers that are not finite: {sums}")
