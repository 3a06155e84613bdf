"""Runs what a table or figure needs, once: everything is kept below the folder of results and found
there again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..algorithm import Algorithm
from ..data import Federation
from ..experiment.execute import Progress
from ..experiment.plan import Question
from ..experiment.results import Results, Setting
from ..experiment.sweep import Means, run_grid
from .tasks import METHODS, SEEDS, Task

SWEEPS = "sweeps"
BATCH, TAU = 100, 5
QUICK, QUICK_DEEP = 20, 6  # rounds of a quick look, with a convex model and with a network


def _quiet(_: str) -> None:
    """Nobody listens."""


@dataclass
class Lab:
    """Where, on what and how thoroughly the experiments run."""

    out: Path
    device: str = "auto"
    quick: bool = False
    jobs: int = 1
    deadline: float = math.inf  # of time.monotonic()
    progress: Progress | None = None
    note: Callable[[str], None] = _quiet
    federations: dict[str, Federation] = field(default_factory=dict)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Those of the chosen settings."""
        return SEEDS[:1] if self.quick else SEEDS

    def federation(self, task: Task) -> Federation:
        """The task's data, read once."""
        if task.name not in self.federations:
            self.federations = {task.name: task.federation()}  # one at a time: they are large
        return self.federations[task.name]

    def about(self, task: Task) -> str:
        """What the data are, and where they differ from the set's own."""
        fed = self.federation(task)
        shared = task.data.get("partition", fed.source.get("partition"))
        notes = "".join(f" Note: {note.rstrip('.')}." for note in fed.notes)
        rows = f"{len(fed.train_rows)} training and {len(fed.test_rows)} test rows"
        return f"Data: {fed.name}, {fed.clients} clients (partition {shared}), {rows}.{notes}"

    def study(
        self, task: Task, records: Sequence[Algorithm], seeds: Iterable[int], **options: Any
    ) -> Results:
        """The records on a task, with the paper's τ = 5 and batches of 100 unless said otherwise."""
        rounds = (QUICK if task.convex else QUICK_DEEP) if self.quick else task.rounds
        common = {"rounds": rounds, "local_steps": TAU, "batch_size": BATCH, "device": self.device}
        given = {**common, **options}
        question = Question(self.federation(task), task.model, records, tuple(seeds), given)
        out = self.out / SWEEPS / task.name
        return run_grid(question, Means(out, self.jobs, self.deadline, self._named(task)))

    def _named(self, task: Task) -> Progress | None:
        progress = self.progress
        if progress is None:
            return None
        return lambda _, k, rounds, numbers: progress(task.title, k, rounds, numbers)

    def grids(self, task: Task, methods: Sequence[str]) -> dict[str, Results]:
        """Every method's whole grid, under the seeds that settings are chosen by."""
        records = {name: METHODS[name].records(thin=self.quick) for name in methods}
        seeds = SEEDS[: 1 if self.quick else task.choosing]
        every = [record for own in records.values() for record in own]
        settings = iter(self.study(task, every, seeds).settings())
        found = {}
        for name, own in records.items():
            runs = [run for _, setting in zip(own, settings, strict=False) for run in setting.runs]
            found[name] = Results(runs)
        return found

    def again(self, task: Task, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """The chosen settings with all seeds."""
        records = {setting.spec.point: setting.record for setting in settings.values()}
        repeated = self.study(task, list(records.values()), self.seeds).settings()
        found = {setting.spec.point: setting for setting in repeated}
        return {name: found[setting.spec.point] for name, setting in settings.items()}
