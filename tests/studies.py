"""A grid that is run without choosing, the states of a run, and made-up results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedsso import Federation, Results, Run, Setting
from fedsso.algorithm import Algorithm
from fedsso.engine.simulate import run
from fedsso.experiment.execute import Progress
from fedsso.experiment.plan import Question, grid_of
from fedsso.experiment.spec import Spec
from fedsso.experiment.stepper import Simulation
from fedsso.experiment.sweep import Means, run_grid
from fedsso.experiment.trace import Trace


def study(
    fed: Federation,
    model: str | nn.Module,
    algorithms: Sequence[str | Algorithm],
    *,
    seeds: Iterable[int] = (0,),
    out: Path | None = None,
    jobs: int = 1,
    deadline: float = math.inf,
    progress: Progress | None = None,
    **options: Any,
) -> Results:
    """Every record under every seed, kept in `out`."""
    question = Question(fed, model, grid_of(algorithms), tuple(seeds), options)
    return run_grid(question, Means(out, jobs, deadline, progress))


def states_of(sim: Simulation, rounds: int) -> list[Any]:
    """The server states before and after every round."""
    states = [sim.server]
    run(sim, rounds, lambda sim: states.append(sim.server))
    return states


def made_up(spec: Spec, *traces: Trace) -> Setting:
    """A setting with these traces, one for each seed."""
    runs = []
    for seed, trace in enumerate(traces):
        runs.append(Run(replace(spec, options={**spec.options, "seed": seed}), trace))
    return Setting(spec.label, tuple(runs))


def together(*settings: Setting) -> Results:
    """The runs of several settings."""
    return Results(run for setting in settings for run in setting.runs)
