"""Several processes beside several threads: the wall time of a round on the cores of one machine.

    python -m benchmarks.ranks                      # J1, J2, J3 and a ResNet-20, two ranks
    python -m benchmarks.ranks --jobs J2 --ranks 4 --out build/ranks.json

The same round is timed in one process with one thread, in one process with as many threads as there
are ranks, and on the ranks, which torchrun starts with one thread each. They take turns within one
run, so that all see the same load. The table gives the median and the least wall time of a round,
how many times faster the ranks are, and what their all-reduces take. On a busy machine the last
column but one tells more: the CPU time of one thread over that of the busier rank, which is how
many times faster the ranks would be if nothing else ran and nothing waited.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedsso import FedAvg, Federation
from fedsso.engine.metrics import metric
from fedsso.engine.ranks import Team, team
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import Job, Trials
from fedsso.models import build
from fedsso.objective.losses import cross_entropy

from .jobs import ALPHA, JOBS, NEVER, federation, model

RESNET = "resnet"
ALONE = "one thread"
THREADS = "threads"
RANKS = "ranks"
ROUNDS = {"J1": 5, "J2": 2, "J3": 1, RESNET: 1}  # of one turn


def resnet_job() -> Job:
    """Four clients of 64 random images, two local steps with batches of 32."""
    draw = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(4):
        x = torch.randint(0, 256, (64, 3, 32, 32), generator=draw, dtype=torch.uint8)
        pairs.append((x, torch.randint(0, 10, (64,), generator=draw)))
    fed = Federation.from_clients(pairs, classes=10, test_fraction=0)
    settings = Settings(local_steps=2, batch_size=32, eval_every=NEVER, device="cpu")
    network = build("resnet20-gn", fed.sample_shape, fed.classes)
    return Job(fed, network, cross_entropy, dict([metric("accuracy")]), settings)


def job_of(name: str) -> Job:
    """A job by its name; no round is evaluated."""
    if name == RESNET:
        return resnet_job()
    setting = JOBS[name]
    fed = federation(setting)
    options = {**setting.settings.values(), "eval_every": NEVER, "device": "cpu"}
    settings = Settings(**options)
    metrics = dict([metric("accuracy")])
    return Job(fed, model(setting, fed), cross_entropy, metrics, settings)


# ---- one rank ----


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(work: Callable[[], None], times: int) -> tuple[float, float]:
    """Milliseconds of one call: wall time, and CPU time of this process."""
    began = time.perf_counter()
    spent = time.process_time()
    for _ in range(times):
        work()
    spent = time.process_time() - spent
    return (time.perf_counter() - began) * 1e3 / times, spent * 1e3 / times


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Times of a job, taken in turns; all ranks call it, the first one measures."""
    ours = team()
    job = job_of(name)
    times = ROUNDS[name]
    together = Trials(job, [FedAvg(alpha=ALPHA)])
    alone = Trials(job, [FedAvg(alpha=ALPHA)], Team()) if ours.is_first else None
    found: dict[str, list[float]] = {ALONE: [], THREADS: [], RANKS: []}
    busy: dict[str, list[float]] = {ALONE: [], THREADS: [], RANKS: []}
    with torch.no_grad():
        for turn in range(repeats + 1):  # the first turn warms up
            for contestant in found:
                ours.share(None)  # all wait for the one that measures
                took, spent = 0.0, 0.0
                if contestant == RANKS:
                    took, spent = timed(together.round, times)
                elif alone is not None:
                    with threads(1 if contestant == ALONE else ours.size):
                        took, spent = timed(alone.round, times)
                busiest = max(ours.gather(spent), default=0.0)
                if turn:
                    found[contestant].append(took)
                    busy[contestant].append(busiest)
    rows = together.rows[-repeats * times :]
    sent = float(rows[-1]["reduce_bytes"][0])
    waited = median(float(row["reduce_seconds"][0]) for row in rows)
    times_of = {"milliseconds": found, "cpu_milliseconds": busy}
    return times_of | {"reduce_bytes": sent, "reduce_ms": 1e3 * waited}


def work(names: Sequence[str], repeats: int, out: Path) -> None:
    """What each rank does."""
    found = {name: measure(name, repeats) for name in names}
    if team().is_first:
        about = {"ranks": team().size, "cores": os.cpu_count(), "load": os.getloadavg()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"about": about, "jobs": found}, indent=1))


# ---- the table ----


def table(found: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| job | one thread | threads | ranks | ranks against one thread | against threads "
        "| by CPU time | all-reduce |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found["jobs"].items():
        times = one["milliseconds"]
        cells = [f"{median(times[who]):.1f} ({min(times[who]):.1f})" for who in times]
        for rival in (ALONE, THREADS):
            pairs = zip(times[rival], times[RANKS], strict=True)
            ratio = median(a / b for a, b in pairs)
            least = min(times[rival]) / min(times[RANKS])
            cells.append(f"{ratio:.2f} ({least:.2f})")
        spent = one["cpu_milliseconds"]
        cells.append(f"{median(spent[ALONE]) / median(spent[RANKS]):.2f}")
        cells.append(f"{one['reduce_bytes'] / 1e3:.1f} kB, {one['reduce_ms']:.2f} ms")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    about = found["about"]
    load = about["load"][0]
    lines.append("")
    lines.append(
        f"Wall milliseconds of a round: median (least). {about['ranks']} ranks and threads, "
        f"{about['cores']} cores, load {load:.1f}."
    )
    return "\n".join(lines)


def main() -> None:
    """Start the ranks, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", default=",".join(ROUNDS), help="with commas between")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("build/ranks.json"))
    given = parser.parse_args()
    if "RANK" in os.environ:
        work(given.jobs.split(","), given.repeats, given.out)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [*launcher, "--nproc-per-node", str(given.ranks), "-m", "benchmarks.ranks"]
    subprocess.run([*command, *sys.argv[1:]], check=True, env=environment)
    print(table(json.loads(given.out.read_text())))


if __name__ == "__main__":
    main()
