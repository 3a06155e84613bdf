"""How well the models of one setting serve each client, for a table of the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from ..experiment.revive import problem_of
from ..experiment.run import Run, load_run
from ..objective.backend import ravel
from .page.content import Served

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from ..data import Federation

MOST_CLIENTS = 200  # that a table shows
CLOSE = 0.01  # accuracies on two machines differ by a few rows at most
MOST_WORK = 2e11  # rows times parameters: some seconds on a CPU


def by_client(runs: Iterable[Run], fed: Federation) -> Served:
    """Ask the models of some seeds how well they serve each client, on its own test rows.

    Args:
        runs: The seeds of one setting, each with its model and its live objects. Each is let go
            before the next is taken.
        fed: Their data.

    Returns:
        The mean over the seeds, for each client.

    Raises:
        InputError: A model is not there or not what its settings say, its algorithm trains on
            rows that it prepares, or the table would be too long or take long to make.
    """
    if fed.clients > MOST_CLIENTS:
        raise InputError(f"{fed.clients:,} clients are too many for a table")
    tables = []
    for run in runs:
        _check(run, fed)
        tables.append(run.clients())
        _check_against(run, tables[-1])
    first = tables[0]
    metric = "accuracy" if "accuracy" in first.columns else "loss"
    values = np.array([table[metric] for table in tables], np.float64)
    return Served(
        first["client"].tolist(),
        first["train_rows"].tolist(),
        first["test_rows"].tolist(),
        metric,
        values.mean(0).tolist(),
    )


def saved_by_client(folders: Iterable[Path], fed: Federation) -> Served:
    """As `by_client`, for runs that were kept in folders.

    Args:
        folders: The folders of the seeds, which may be somebody else's.
        fed: Their data, loaded.
    """
    return by_client((_alive(folder, fed) for folder in folders), fed)


def _alive(folder: Path, fed: Federation) -> Run:
    """A run of a folder with its data; it may have been trained on a device that is not here."""
    run = load_run(folder)
    spec = replace(run.spec, options={**run.spec.options, "device": "cpu"})
    live = problem_of(spec, fed, trained=True)
    return replace(run, live=live)


def _check(run: Run, fed: Federation) -> None:
    """Refuse a model that does not fit its settings, or that takes long to evaluate."""
    assert run.live is not None
    if run.diverged is not None:
        raise InputError("a seed diverged")
    size = run.x.numel()
    if ravel(run.live.module).numel() != size:
        raise InputError(f"the model of {run.label} is not the one that its settings describe")
    if size * int(fed.test_sizes.sum()) > MOST_WORK:
        raise InputError("it would take long; `run.clients()` has the numbers of one run")


def _check_against(run: Run, table: pd.DataFrame) -> None:
    """Refuse numbers of clients that do not add up to the run's own.

    A model may expect rows that its algorithm has prepared. Of an algorithm of the user's own
    nobody knows, so the accuracy over all test rows is compared with that of the trace.
    """
    known = table[table["test_rows"] > 0]
    if not len(known) or not run.trace.has_accuracy:
        return
    rows = known["test_rows"]
    whole = float((known["accuracy"] * rows).sum() / rows.sum())
    if abs(whole - run.final()) > CLOSE:
        raise InputError(
            f"its model has an accuracy of {whole:.4f} here, and {run.final():.4f} in its trace"
        )
