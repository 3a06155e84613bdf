"""Runs what a table or figure needs, and nothing twice.

All runs are kept below the folder of results. A command that needs a run which is already there
reads it instead, whichever command made it. So a command that was stopped goes on where it ended,
and all figures and tables of one folder show the same runs.
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

SWEEPS = "sweeps"
"""The folder of runs, below that of results."""
BATCH = 100
"""The rows of a mini-batch in all experiments, as in the paper."""
TAU = 5
"""The local steps of a client in a round, the paper's τ, unless a figure says otherwise."""
QUICK = 20
"""The rounds of a quick look with a convex model."""
QUICK_DEEP = 6
"""The rounds of a quick look with a network, whose rounds take longer."""


def _quiet(_: str) -> None:
    """Tell nobody what is going on."""


@dataclass
class Lab:
    """Where, on what and how thoroughly the experiments run.

    Every command of the paper is given one. It knows nothing of a particular table or figure.
    """

    out: Path
    """The folder of results."""
    device: str = "auto"
    """Where runs are computed: auto, cpu or cuda."""
    quick: bool = False
    """Whether this is a quick look: one seed, few rounds and a thin grid."""
    jobs: int = 1
    """The number of processes that share the runs."""
    deadline: float = math.inf
    """Work stops with `OutOfTime` once `time.monotonic()` has reached this."""
    progress: Progress | None = None
    """Hears of every round."""
    note: Callable[[str], None] = _quiet
    """Hears of every new part of the work, as a line of text."""
    federations: dict[str, Federation] = field(default_factory=dict)
    """The data that were read last, by the name of the task: at most one entry."""

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
        """A paragraph on the task's data, and on where they differ from the data set itself.

        It says how many clients there are, how the rows were shared among them, and how many rows
        there are for training and testing.
        """
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

        Args:
            task: The data and the model.
            records: The algorithms with their hyper-parameters.
            seeds: Each record is run once with each of them.
            **options: Options of `simulate`, which replace the paper's τ = 5 local steps, batches
                of 100 and the task's rounds. A list is a further axis: each value is run.

        Returns:
            A run for each record and seed, the settings in the order of the records.

        Raises:
            OutOfTime: The deadline has passed. What was finished is kept.
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

        All grids are run in one study, so that they share its processes; its settings come back in
        the order of the records.

        Args:
            task: The data and the model.
            methods: Keys of `tasks.METHODS`.

        Returns:
            The runs of each method, by its key.
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

        Methods that chose the same setting share its runs. The seeds that chose it are not run
        again, because their runs are there already.

        Args:
            task: The data and the model.
            settings: The chosen setting of each method.

        Returns:
            The same settings with all seeds of the lab, by method.
        """
        # `point` is the same for equal settings, so two methods can lead to one record.
        records = {setting.spec.point: setting.record for setting in settings.values()}
        repeated = self.study(task, list(records.values()), self.seeds).settings()
        found = {setting.spec.point: setting for setting in repeated}
        return {name: found[setting.spec.point] for name, setting in settings.items()}
