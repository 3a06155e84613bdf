"""Networks of today: FedSSO untuned beside rivals that are tuned on every task by itself.

    python -m benchmarks.networks --device cuda --minutes 50    # again, until it is done
    python -m benchmarks.networks --quick --out build/quick     # on random rows: does it run?

A task is a network on CIFAR-10 or on Shakespeare, whose speakers are the clients; it runs with all
clients and with a quarter of them. FedSSO runs as a newcomer gets it. The grid of a rival is run
with the first seed. While its best point lies at an edge, the grid grows there, a few times. The
best setting, by the rounds to the last target and then by the value at the end, then runs by itself
with all seeds: what it needs to each target in rounds, bytes and seconds is what counts.

Each method of each task is one small file below --out, with its traces in a folder beside it. What
is there is not run again, so that several machines may share the work by --tasks, --shares and
--methods. The table at the end is of all files that there are.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsso import Federation, OutOfTime, load
from fedsso.algorithm import Algorithm
from fedsso.algorithms import make
from fedsso.experiment.grids import grid
from fedsso.experiment.plan import Question
from fedsso.experiment.results import Results
from fedsso.experiment.sweep import Means, run_grid
from fedsso.experiment.trace import Trace
from fedsso.support.files import write_atomic

from .robustness import listed
from .robustness_score import ACCURACY, Goal, by_rounds, points

SEEDS = (0, 1, 2)
GROWTH = 3  # how often a grid may grow
Axes = dict[str, tuple[float, ...]]
Score = dict[str, Any]
CLIENT = (0.01, 0.03, 0.1, 0.3)  # client steps
METHODS: dict[str, Axes] = {
    "fedsso": {},
    "fedavg": {"alpha": CLIENT},
    "fedavgm": {"alpha": CLIENT, "eta": (0.1, 0.3, 1.0)},
    "diloco": {"alpha": CLIENT, "eta": (0.1, 0.3, 1.0)},
    "fedadam": {"alpha": CLIENT, "eta": (0.001, 0.003, 0.01)},
    "fedyogi": {"alpha": CLIENT, "eta": (0.001, 0.003, 0.01)},
    "scaffold": {"alpha": CLIENT},
}


@dataclass(frozen=True)
class Task:
    """A network on rows of clients, and the test accuracies to reach, the highest last."""

    model: str
    data: Mapping[str, Any]
    targets: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    sample: tuple[int, ...] = ()  # of random rows, in place of data

    def federation(self) -> Federation:
        """The rows, and which client holds them."""
        return random_rows(self.sample) if self.sample else load(**self.data)


CIFAR = {"name": "cifar10", "clients": 20, "partition": "dirichlet", "concentration": 0.3}
SPEAKERS = {"name": "shakespeare", "partition": "group", "clients": 60}
LONG = {"rounds": 200, "local_steps": 10, "batch_size": 50}
TASKS: dict[str, Task] = {
    "cifar-resnet20": Task("resnet20-gn", CIFAR, (0.4, 0.5, 0.6), LONG),
    "cifar-resnet18": Task("resnet18-gn", CIFAR, (0.4, 0.5, 0.6), LONG),
    "cifar-vit": Task("vit-tiny", CIFAR, (0.3, 0.4, 0.5), LONG),
    "shakespeare-gpt": Task("gpt-nano", SPEAKERS, (0.2, 0.25, 0.3), LONG | {"batch_size": 20}),
}
SHARES = {"all": 1.0, "quarter": 0.25}


def random_rows(sample: tuple[int, ...]) -> Federation:
    """Four clients with a few random rows each, to see whether everything runs."""
    draw = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(4):
        x = torch.randn(6, *sample, generator=draw)
        pairs.append((x, torch.arange(6) % 3))
    return Federation.from_clients(pairs, classes=3, test_fraction=0.3)


def quick(task: Task) -> Task:
    """The same network on a few random rows, for one round."""
    sample = (5, 4) if task.data is SPEAKERS else (3, 4, 4)
    options = {"rounds": 1, "local_steps": 1, "batch_size": 4}
    return replace(task, options=options, sample=sample, targets=(0.0, 1.1))


# ---- grids that grow ----


def beyond(value: float, up: bool) -> float:
    """The next number of the row ..., 0.1, 0.3, 1, 3, 10, ... on one side of a number of it.

    >>> beyond(0.3, up=True), beyond(0.3, up=False), beyond(1.0, up=False)
    (1.0, 0.1, 0.3)
    """
    place = round(2 * math.log10(value)) + (1 if up else -1)
    tens, odd = divmod(place, 2)
    return float(f"{3 if odd else 1}e{tens}")


def edges(axes: Axes, best: Algorithm) -> Axes:
    """Each axis at an end of which the best point lies, with the number to try beyond it."""
    found: Axes = {}
    for name, values in axes.items():
        value = float(getattr(best, name))
        ends = []
        if value >= max(values):
            ends.append(beyond(max(values), up=True))
        if value <= min(values):
            ends.append(beyond(min(values), up=False))
        if ends:
            found[name] = tuple(ends)
    return found


# ---- one method on one task ----


@dataclass(frozen=True)
class Bench:
    """How the bench is run."""

    tasks: Mapping[str, Task]
    methods: Mapping[str, Axes]
    seeds: Sequence[int]
    growth: int
    out: Path
    device: str = "auto"
    jobs: int = 1
    deadline: float = math.inf

    def run(self, task: str, share: str, method: str, fed: Federation) -> Score:
        """Tune a method and measure the setting that was best; traces are kept on the way."""
        folder = self.out / task / share / method
        own = self.tasks[task]
        goal = Goal(ACCURACY, own.targets[-1])
        options = {**own.options, "participation": SHARES[share], "device": self.device}

        def trained(records: Sequence[Algorithm], seeds: Sequence[int], part: str) -> Results:
            means = Means(folder / part, self.jobs, self.deadline)
            return run_grid(Question(fed, own.model, records, seeds, options), means)

        axes = dict(self.methods[method])
        best = make(method)
        outside: Axes = {}
        tried = 1
        for growth in range(self.growth + 1 if axes else 0):
            records = grid(method, axes)
            tried = len(records)
            judged = points(trained(records, self.seeds[:1], "grid"), goal)
            best = records[by_rounds(judged, goal)[0].number]
            outside = edges(axes, best)
            if not outside or growth == self.growth:
                break
            axes = {name: (*values, *outside.get(name, ())) for name, values in axes.items()}
        # By itself, so that the seconds are those of this setting alone.
        (chosen,) = trained([best], self.seeds, "chosen").settings()
        told = {str(target): reached(chosen.traces, target) for target in own.targets}
        finals = [goal.final(trace) for trace in chosen.traces]
        return {
            "setting": chosen.label,
            "tried": tried,
            "at an edge": sorted(outside),
            "targets": told,
            "final": {"mean": float(np.mean(finals)), "low": min(finals), "high": max(finals)},
        }

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """All that is to be measured: task, share of the clients, method."""
        for task in self.tasks:
            for share in SHARES:
                for method in self.methods:
                    yield task, share, method


def reached(traces: Sequence[Trace], target: float) -> dict[str, float | None]:
    """What a target takes, as means over the seeds; None where one of them never reaches it."""
    goal = Goal(ACCURACY, target)
    rounds = [goal.rounds(trace) for trace in traces]
    if not all(map(math.isfinite, rounds)):
        return {"rounds": None, "bytes": None, "seconds": None}
    spent = []
    seconds = []
    for trace, last in zip(traces, rounds, strict=True):
        until = trace["round"] <= last
        spent.append(float((trace["bytes_up"] + trace["bytes_down"])[until].sum()))
        seconds.append(float(np.nansum(trace["seconds"][until])))
    return {
        "rounds": float(np.mean(rounds)),
        "bytes": float(np.mean(spent)),
        "seconds": float(np.mean(seconds)),
    }


def run(bench: Bench, shares: Sequence[str]) -> bool:
    """Measure what is missing; False if the deadline came before the end."""
    federation = cache(lambda task: bench.tasks[task].federation())
    for task, share, method in bench.cells():
        path = bench.out / task / share / f"{method}.json"
        if share not in shares or path.is_file():
            continue
        began = time.monotonic()
        try:
            told = bench.run(task, share, method, federation(task))
        except OutOfTime:
            return False
        write_atomic(path, json.dumps(told, indent=1))
        print(f"{task}, {share}, {method}: {time.monotonic() - began:.0f} s", flush=True)
    return True


# ---- the table ----


def table(out: Path) -> str:
    """All files that there are, a line for each method of a task."""
    lines = []
    for path in sorted(out.glob("*/*/*.json")):
        told = json.loads(path.read_text())
        parts = [f"{path.parent.parent.name:<16} {path.parent.name:<8} {path.stem:<9}"]
        parts.append(f"end {told['final']['mean']:.3f}")
        for target, took in told["targets"].items():
            if took["rounds"] is None:
                parts.append(f"{target}: not reached")
            else:
                size = took["bytes"] / 1e9
                parts.append(
                    f"{target}: {took['rounds']:.0f} rounds, {size:.3g} GB, {took['seconds']:.3g} s"
                )
        at = told["at an edge"]
        parts.append(told["setting"] + (f" at an edge of {', '.join(at)}" if at else ""))
        lines.append("   ".join(parts))
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.networks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("build/networks"), help="folder of files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin nothing new after so many"
    )
    parser.add_argument("--quick", action="store_true", help="a round of each on random rows")
    for name, known in (("tasks", TASKS), ("shares", SHARES), ("methods", METHODS)):
        every = list(known)
        text = f"only some of {','.join(every)}"
        parser.add_argument(f"--{name}", type=listed(every), default=every, help=text)
    given = parser.parse_args()
    tasks = {name: TASKS[name] for name in given.tasks}
    methods = {name: METHODS[name] for name in given.methods}
    deadline = time.monotonic() + 60 * given.minutes
    how = {"device": given.device, "jobs": given.jobs, "deadline": deadline}
    if given.quick:
        small = {name: quick(task) for name, task in tasks.items()}
        few = {method: shortened(axes) for method, axes in methods.items()}
        bench = Bench(small, few, SEEDS[:1], 0, given.out, **how)
    else:
        bench = Bench(tasks, methods, SEEDS, GROWTH, given.out, **how)
    done = run(bench, given.shares)
    print(table(given.out))
    if not done:
        print("out of time: the same command goes on")


def shortened(axes: Axes) -> Axes:
    """One value of each axis."""
    return {name: values[:1] for name, values in axes.items()}


if __name__ == "__main__":
    main()
