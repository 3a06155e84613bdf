"""Networks of today: FedSSO untuned beside rivals that are tuned on every task by itself.

    python -m benchmarks.networks --device cuda --jobs 15 --minutes 8    # again, until it is done
    python -m benchmarks.networks --quick    # two rounds of each on random rows: does it run?

A task is a network, rows of clients and the share of them that answers. FedSSO runs as a newcomer
gets it. A rival's grid is run with the first seed; then what lies around its best point, until
nothing there is better. The best setting then runs with the other seeds. A seed draws the
partition, the initial weights, the cohorts and the batches.

Every run is one line of the file --out, and what is there is not run again. A run is begun only
where the longest one so far would end in time. The table is of all lines that there are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsso
from fedsso import Federation
from fedsso.algorithms import make

from .robustness import listed

SEEDS = (0, 1, 2)
GROWTH = 5  # how often the best point may move
LAST = 5  # evaluations whose mean is the value at the end
Axes = Mapping[str, tuple[float, ...]]
Setting = tuple[tuple[str, float], ...]
CLIENT = (0.03, 0.1, 0.3)  # client steps
METHODS: dict[str, Axes] = {
    "fedsso": {},
    "fedavg": {"alpha": CLIENT},
    "fedavgm": {"alpha": CLIENT, "eta": (0.3, 1.0)},
    "diloco": {"alpha": CLIENT, "eta": (0.3, 1.0)},
    "fedadam": {"alpha": CLIENT, "eta": (0.003, 0.01)},
    "servermuon": {"alpha": CLIENT, "eta": (0.03, 0.1)},
    "scaffold": {"alpha": CLIENT},
}


@dataclass(frozen=True)
class Task:
    """A network on rows of clients, and the test accuracies to reach, the highest last."""

    model: str
    data: Mapping[str, Any]
    targets: tuple[float, ...]
    options: Mapping[str, Any]
    sample: tuple[int, ...] = ()  # of random rows, in place of data

    def federation(self, seed: int) -> Federation:
        """The rows, and which client holds them."""
        return random_rows(self.sample, seed) if self.sample else load(seed, **self.data)


@cache
def load(seed: int, **data: Any) -> Federation:
    """A federation that a process reads once."""
    return fedsso.load(**data, seed=seed)


def cifar(clients: int) -> dict[str, Any]:
    """CIFAR-10 over clients by their classes."""
    return {
        "name": "cifar10",
        "clients": clients,
        "partition": "dirichlet",
        "concentration": 0.3,
    }


SPEAKERS = {"name": "shakespeare", "partition": "group", "clients": 60}
ALL = {"rounds": 60, "local_steps": 20, "batch_size": 64, "eval_every": 2}
TENTH = {"rounds": 100, "local_steps": 20, "batch_size": 50, "eval_every": 5, "participation": 0.1}
QUARTER = {"rounds": 100, "local_steps": 20, "batch_size": 20, "participation": 0.25}
TASKS: dict[str, Task] = {
    "resnet20": Task("resnet20-gn", cifar(10), (0.3, 0.4, 0.5, 0.6), ALL),
    "resnet20-tenth": Task("resnet20-gn", cifar(100), (0.3, 0.4, 0.5), TENTH),
    "resnet18": Task("resnet18-gn", cifar(10), (0.3, 0.4, 0.5, 0.6), ALL),
    "vit": Task("vit-tiny", cifar(10), (0.3, 0.4, 0.5), ALL),
    "gpt": Task("gpt-nano", SPEAKERS, (0.2, 0.25, 0.3), QUARTER),
}


def random_rows(sample: tuple[int, ...], seed: int) -> Federation:
    """Four clients with a few random rows each, to see whether everything runs."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(4):
        x = torch.randn(6, *sample, generator=draw)
        pairs.append((x, torch.arange(6) % 3))
    return Federation.from_clients(pairs, classes=3, test_fraction=0.3)


def quick(task: Task) -> Task:
    """The same network on a few random rows, for two rounds."""
    sample = (5, 4) if task.data is SPEAKERS else (3, 4, 4)
    options = {"rounds": 2, "local_steps": 1, "batch_size": 4}
    return replace(task, options=options, sample=sample, targets=(0.0, 1.1))


# ---- one run ----


@dataclass(frozen=True)
class Try:
    """A setting of a method on a task, with a seed."""

    task: str
    method: str
    setting: Setting
    seed: int


@dataclass(frozen=True)
class Done:
    """What a run showed: accuracies after some rounds, and what it took."""

    rounds: list[int]
    accuracy: list[float]
    diverged: bool
    bytes: float  # up and down, of a round
    seconds: float  # of a round, shared with the other processes

    def reached(self, target: float) -> float:
        """The first evaluated round that reaches an accuracy; infinite if none does."""
        hits = (k for k, own in zip(self.rounds, self.accuracy, strict=True) if own >= target)
        return next(hits, math.inf)

    def end(self) -> float:
        """The mean of the last evaluations; a run that diverged has none."""
        return 0.0 if self.diverged else float(np.mean(self.accuracy[-LAST:]))


def train(task: Task, one: Try, device: str) -> Done:
    """A run on one thread of the CPU."""
    torch.set_num_threads(1)
    algorithm = make(one.method, dict(one.setting))
    run = fedsso.simulate(
        task.federation(one.seed),
        model=task.model,
        algorithm=algorithm,
        seed=one.seed,
        device=device,
        **task.options,
    )
    rounds, accuracy = run.trace.evaluations("test_accuracy")
    sent = run.trace["bytes_up"] + run.trace["bytes_down"]
    return Done(
        rounds.tolist(),
        np.nan_to_num(accuracy).round(4).tolist(),
        run.trace.diverged is not None,
        float(sent[-1]),
        float(np.nanmedian(run.trace["seconds"])),
    )


# ---- which runs, in which order ----


def beyond(value: float, up: bool) -> float:
    """The next number of the row ..., 0.1, 0.3, 1, 3, 10, ... on one side of a number of it.

    >>> beyond(0.3, up=True), beyond(0.3, up=False), beyond(1.0, up=False)
    (1.0, 0.1, 0.3)
    """
    place = round(2 * math.log10(value)) + (1 if up else -1)
    tens, odd = divmod(place, 2)
    return float(f"{3 if odd else 1}e{tens}")


def neighbours(setting: Setting) -> list[Setting]:
    """The settings that differ in one number, by one step of the row."""
    found = []
    for i, (name, value) in enumerate(setting):
        for up in (False, True):
            found.append((*setting[:i], (name, beyond(value, up)), *setting[i + 1 :]))
    return found


def points(axes: Axes) -> list[Setting]:
    """Every setting of a grid."""
    return [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclass
class Bench:
    """Tasks, methods, and the runs that there are."""

    tasks: Mapping[str, Task]
    methods: Mapping[str, Axes]
    seeds: Sequence[int] = SEEDS
    growth: int = GROWTH
    done: dict[Try, Done] = field(default_factory=dict)

    def rank(self, one: Try) -> tuple[float, ...]:
        """The rounds to the highest target, then to the lower ones, then the value at the end."""
        done = self.done[one]
        targets = sorted(self.tasks[one.task].targets, reverse=True)
        return (*map(done.reached, targets), -done.end())

    def tries(self, task: str, method: str) -> list[Try]:
        """The runs with the first seed that are wanted: a grid, and all around the best of it."""
        wanted = [Try(task, method, point, self.seeds[0]) for point in points(self.methods[method])]
        for _ in range(self.growth):
            if any(one not in self.done for one in wanted):
                break
            best = min(wanted, key=self.rank)
            around = [replace(best, setting=point) for point in neighbours(best.setting)]
            wanted += [one for one in around if one not in wanted]
        return wanted

    def chosen(self, task: str, method: str) -> list[Try]:
        """The runs of the best setting, one for each seed."""
        best = min(self.tries(task, method), key=self.rank)
        return [replace(best, seed=seed) for seed in self.seeds]

    def missing(self) -> Iterator[Try]:
        """The runs that can begin now: of unfinished grids, then of chosen settings."""
        for task, method in itertools.product(self.tasks, self.methods):
            tries = self.tries(task, method)
            if all(one in self.done for one in tries):
                tries = self.chosen(task, method)
            yield from (one for one in tries if one not in self.done)


def read(out: Path) -> dict[Try, Done]:
    """The runs of a file. The half line that a kill leaves at its end is not one."""
    done = {}
    for line in out.read_text().splitlines() if out.is_file() else ():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        setting = tuple(told["setting"].items())
        one = Try(told["task"], told["method"], setting, told["seed"])
        done[one] = Done(**told["done"])
    return done


def write(out: Path, one: Try, done: Done) -> None:
    """Add the line of a run."""
    told = {**vars(one), "setting": dict(one.setting), "done": vars(done)}
    with out.open("a") as file:
        file.write("\n" + json.dumps(told))


def measure(bench: Bench, out: Path, device: str, jobs: int, deadline: float) -> bool:
    """Run what is missing, several at a time; False if the deadline came before the end."""
    longest = 0.0
    running: dict[Future[Done], tuple[Try, float]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        while True:
            begun = {one for one, _ in running.values()}
            ready = [one for one in bench.missing() if one not in begun]
            late = time.monotonic() + longest > deadline
            for one in [] if late else ready[: jobs - len(running)]:
                job = pool.submit(train, bench.tasks[one.task], one, device)
                running[job] = (one, time.monotonic())
            if not running:
                return not ready
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                one, began = running.pop(job)
                bench.done[one] = job.result()
                write(out, one, bench.done[one])
                longest = max(longest, time.monotonic() - began)
                print(f"{one}: {bench.done[one].end():.3f}", flush=True)


# ---- the table ----


def table(bench: Bench) -> str:
    """A line for each method of a task whose grid is there."""
    lines = []
    for task, method in itertools.product(bench.tasks, bench.methods):
        grid = bench.tries(task, method)
        if any(one not in bench.done for one in grid):
            continue
        runs = [bench.done[one] for one in bench.chosen(task, method) if one in bench.done]
        ends = [run.end() for run in runs]
        parts = [f"{task:<15} {method:<10} end {np.mean(ends):.3f} ({min(ends):.3f})"]
        for target in bench.tasks[task].targets:
            rounds = np.mean([run.reached(target) for run in runs])
            parts.append(f"{target:g}: {rounds:.1f}")
        best = dict(bench.chosen(task, method)[0].setting)
        tried = {one.setting for one in grid}
        edge = " at an edge" * (not tried.issuperset(neighbours(tuple(best.items()))))
        parts.append(f"{best}{edge}, {len(grid)} tries, {len(runs)} seeds")
        parts.append(f"{np.mean([run.bytes for run in runs]) / 1e6:.1f} MB a round")
        lines.append("   ".join(parts))
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.networks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("results/networks.jsonl"), help="the runs")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for so many minutes")
    parser.add_argument("--quick", action="store_true", help="two rounds each on random rows")
    for name, known in (("tasks", TASKS), ("methods", METHODS)):
        every = list(known)
        text = f"only some of {','.join(every)}"
        parser.add_argument(f"--{name}", type=listed(every), default=every, help=text)
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tasks = {name: TASKS[name] for name in given.tasks}
    methods = {name: METHODS[name] for name in given.methods}
    if given.quick:
        tasks = {name: quick(task) for name, task in tasks.items()}
        few = {name: {axis: METHODS[name][axis][:1] for axis in METHODS[name]} for name in methods}
        given.out = Path("build/networks-quick.jsonl")
        given.out.unlink(missing_ok=True)
        bench = Bench(tasks, few, SEEDS[:1], 0)
    else:
        bench = Bench(tasks, methods, done=read(given.out))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = measure(bench, given.out, given.device, given.jobs, deadline)
    print(table(bench))
    if not done:
        print("out of time: the same command goes on")


if __name__ == "__main__":
    main()
