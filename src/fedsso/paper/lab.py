"""Runs what a table or figure needs, and nothing twice.

All runs are kept below the folder of results. A command that needs a run which is already there
reads it instead, whichever command made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..experiment.plan import Question
from ..experiment.results import Results
from ..experiment.sweep import Means, run_grid
from .tasks import METHODS, SEEDS, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ..algorithm import Algorithm
    from ..data.federation import Federation
    from ..experiment.execute import Progress
    from ..experiment.results import Setting
    from ..experiment.run import Run

SWEEPS = "sweeps"  # the folder of runs, below that of results
BATCH = 100
TAU = 5
QUICK = 20  # rounds of a quick look with a convex model
QUICK_DEEP = 6  # and with a network


def _quiet(_: str) -> None:
    """Tell nobody what is going on."""


@dataclass
class Lab:
    """Where, on what and how thoroughly the experiments run.

    `out` is the folder of results, `device` where runs are computed, `jobs` the number of
    processes. Work stops with `OutOfTime` once `time.monotonic()` has reached `deadline`.
    `progress` hears of every round, `note` of every new part of the work. A quick look has one
    seed, few rounds and a thin grid. `federations` holds the data that were read last.
    """

    out: Path
    device: str = "auto"
    quick: bool = False
    jobs: int = 1
    deadline: float = math.inf
    progress: Progress | None = None
    note: Callable[[str], None] = _quiet
    federations: dict[str, Federation] = field(default_factory=dict)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that the chosen settings run with."""
        return SEEDS[:1] if self.quick else SEEDS

    def federation(self, task: Task) -> Federation:
        """The task's data; the last task's are kept, one alone because they are large."""
        if task.name not in self.federations:
            self.federations = {task.name: task.federation()}
        return self.federations[task.name]

    def about(self, task: Task) -> str:
        """A paragraph on the task's data, and on where they differ from the data set itself."""
        fed = self.federation(task)
        shared = task.data.get("partition", fed.source.get("partition"))
        rows = f"{len(fed.train_rows)} training and {len(fed.test_rows)} test rows"
        text = f"Data: {fed.name}, {fed.clients} clients (partition {shared}), {rows}."
        for note in fed.notes:
            text += f" Note: {note.rstrip('.')}."
        return text

    def rounds(self, task: Task) -> int:
        """How many rounds a run of the task has."""
        if not self.quick:
            return task.rounds
        return QUICK if task.convex else QUICK_DEEP

    def study(
        self,
        task: Task,
        records: Sequence[Algorithm],
        seeds: Iterable[int],
        **options: Any,
    ) -> Results:
        """Run algorithms on a task with some seeds, or read what was run before.

        Returns a run for each record and seed. There are τ = 5 local steps with batches of 100,
        as in the paper; `options` of `simulate` may say otherwise.
        """
        common = {
            "rounds": self.rounds(task),
            "local_steps": TAU,
            "batch_size": BATCH,
            "device": self.device,
        }
        given = {**common, **options}
        question = Question(self.federation(task), task.model, records, tuple(seeds), given)
        out = self.out / SWEEPS / task.name
        return run_grid(question, Means(out, self.jobs, self.deadline, self.progress, task.title))

    def grids(self, task: Task, methods: Sequence[str]) -> dict[str, Results]:
        """Run the whole grid of every method, with the seeds that settings are chosen by.

        Returns the runs of each method. All grids are run in one study, so that they share its
        processes; its settings come back in the order of the records.
        """
        seeds = SEEDS[:1] if self.quick else SEEDS[: task.choosing]
        records = {name: METHODS[name].records(thin=self.quick) for name in methods}
        every: list[Algorithm] = []
        for own in records.values():
            every += own
        settings = iter(self.study(task, every, seeds).settings())
        found = {}
        for name, own in records.items():
            runs: list[Run] = []
            for setting in islice(settings, len(own)):
                runs += setting.runs
            found[name] = Results(runs)
        return found

    def again(self, task: Task, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Run the chosen settings with all seeds.

        Methods that chose the same setting share its runs.
        """
        records = {setting.spec.point: setting.record for setting in settings.values()}
        repeated = self.study(task, list(records.values()), self.seeds).settings()
        found = {setting.spec.point: setting for setting in repeated}
        return {name: found[setting.spec.point] for name, setting in settings.items()}
