"""Numerical oddities over every algorithm: each run ends, or is marked as diverged, or is refused
with a sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsso import Federation, InputError, Run, simulate
from fedsso.algorithms import ALGORITHMS
from oddities import Table, oddities, refused

OPTIONS: dict[str, Any] = {"rounds": 5, "local_steps": 3, "batch_size": 4, "device": "cpu"}
ODD = oddities()
LINEAR = ("nl1", "nl2", "bl1", "bl2", "bl3")
PARTS = 5  # of the tables, each of which is a case of its own


def run(name: str, table: Table) -> Run | None:
    """The run of an algorithm's default; none where it is refused."""
    fed = Federation.from_arrays(*table)
    model = "mlp" if name == "fedper" else "mclr" if fed.classes else "linear"
    try:
        return simulate(fed, model, name, **OPTIONS)
    except InputError:
        return None


def told(run_: Run) -> None:
    """A run that has not diverged has numbers in every round; an undone round has its step."""
    trace, k = run_.trace, slice(1, None)
    assert np.isfinite(run_.x.numpy()).all()
    if run_.diverged is not None:
        return
    undone = (
        ~np.isnan(trace["alpha"]) & np.isnan(trace["grad_norm"])
        if "alpha" in trace.columns
        else False
    )
    assert (np.isfinite(trace["train_loss"]) | undone)[k].all()
    tested = (
        ("test_loss", "test_accuracy")
        if run_.live is not None and run_.live.fed.classes
        else ("test_loss",)
    )
    if run_.live is not None and len(run_.live.fed.test_rows):
        for name in tested:
            assert np.isfinite(trace[name]).all(), name


@pytest.mark.sample("name")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_bears_odd_tables(name: str, part: int) -> None:
    tables = list(ODD)[part::PARTS]
    refusals = 0
    for what in tables:
        try:
            found = run(name, ODD[what])
            refusals += found is None
            if found is not None:
                told(found)
        except Exception as error:
            raise AssertionError(f"{name}, {what}: {error!r}") from error
    # those for models of one output refuse tables of several classes
    assert refusals < len(tables) / 2 or name in LINEAR


@pytest.mark.parametrize("what", refused())
def test_what_is_no_number_is_refused_by_its_place(what: str) -> None:
    with pytest.raises(InputError) as caught:
        Federation.from_arrays(*refused()[what])
    text = str(caught.value)
    assert "row 5" in text
    assert ("column 1" in text) == ("in x" in what)
