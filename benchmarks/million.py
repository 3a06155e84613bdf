"""A million clients of ten rows: what they cost to build, in memory, and in each round.

    python -m benchmarks.million                     # 2 GB of rows, some minutes
    python -m benchmarks.million --clients 100000    # 0.2 GB

Three parts, each in a process of its own so that its peak memory is its own:

    build   Federation.from_arrays on arrays that the caller holds, whose rows come in any order
    file    the data set `npy`, a folder of shards that are mapped; a few rounds on it
    rounds  a round of 100 of all clients beside one of 100 of 1 000, in turn, CPU time, medians

Peak memory is the largest that the process ever had, less what it had with the caller's arrays,
over the bytes of the samples.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedsso
from fedsso import Federation

from .clock import Clock, interleaved
from .targets import Check

ROWS = 10  # of each client
FEATURES = 50
COHORT = 100
FEW = 1000  # clients with which a round is compared
ALGORITHMS = ("fedavg", "fedsso", "scaffold")
AT_ONCE = 100_000  # rows that are drawn together
PARTS = ("build", "file", "rounds")
Array = np.ndarray[Any, Any]


def fill(x: Array) -> Array:
    """Normal numbers, a part at a time, so that nothing but x takes memory."""
    draw = np.random.default_rng(0)
    for begin in range(0, len(x), AT_ONCE):
        rows = len(x[begin : begin + AT_ONCE])
        x[begin : begin + rows] = draw.standard_normal((rows, FEATURES), dtype=np.float32)
    return x


def labels_and_owners(clients: int) -> tuple[Array, Array]:
    """A label for each row, and its client, in no order."""
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 2, ROWS * clients)
    owners = np.repeat(np.arange(clients), ROWS)
    draw.shuffle(owners)
    return labels, owners


def in_memory(clients: int) -> Federation:
    """A federation of so many clients."""
    x = fill(np.empty((ROWS * clients, FEATURES), np.float32))
    return Federation.from_arrays(x, *labels_and_owners(clients))


def used() -> int:
    """Bytes that the process has in memory now; where Linux is not, the most it ever had."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most bytes that the process ever had in memory."""
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measured(work: Callable[[], Any], size: int) -> dict[str, float]:
    """Seconds of some work, and its peak memory beyond what is there, over `size` bytes."""
    before = used()
    began = (time.perf_counter(), time.process_time())
    work()
    wall = time.perf_counter() - began[0]
    cpu = time.process_time() - began[1]
    return {"seconds": wall, "cpu_seconds": cpu, "beyond": (peak() - before) / size}


def build(clients: int) -> dict[str, float]:
    """The rows are in memory."""
    x = fill(np.empty((ROWS * clients, FEATURES), np.float32))
    labels, owners = labels_and_owners(clients)
    return measured(lambda: Federation.from_arrays(x, labels, owners), x.nbytes)


def file(clients: int) -> dict[str, float]:
    """The rows are in shards of numpy files; ten rounds read what they need of them."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_shards(Path(folder), clients)
        made: list[Federation] = []
        found = measured(lambda: made.append(fedsso.load("npy", files=folder)), size)
        simulation = begin(made[0], "fedavg")
        clock = Clock(torch.device("cpu"))
        found["round_ms"] = clock(lambda: one_round(simulation), 10)
        return found


def write_shards(folder: Path, clients: int) -> int:
    """Write the files of the data set `npy`; the bytes of all samples."""
    labels, owners = labels_and_owners(clients)
    size = 0
    for begin in range(0, len(labels), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        name = f"{begin // AT_ONCE:04}.npy"
        x = fill(np.empty((len(labels[some]), FEATURES), np.float32))
        size += x.nbytes
        np.save(folder / f"x-{name}", x)
        np.save(folder / f"y-{name}", labels[some])
        np.save(folder / f"client-{name}", owners[some])
    return size


def one_round(simulation: fedsso.Simulation) -> None:
    """Advance by a round."""
    simulation.step()


def begin(fed: Federation, algorithm: str) -> fedsso.Simulation:
    """A simulation with a hundred clients in each round, which never evaluates."""
    return fedsso.Simulation(
        fed,
        "mclr",
        algorithm,
        rounds=10**6,
        eval_every=10**6,
        participation=COHORT / fed.clients,
        local_epochs=1,
        batch_size=4,
    )


def rounds(clients: int) -> dict[str, float]:
    """CPU milliseconds of a round of 100, of few clients and of many."""
    few = in_memory(FEW)
    many = in_memory(clients)
    clock = Clock(torch.device("cpu"))
    found = {}
    for algorithm in ALGORITHMS:
        contestants = {}
        for name, fed in (("few", few), ("many", many)):
            simulation = begin(fed, algorithm)
            contestants[name] = partial(one_round, simulation)
        took = interleaved(clock, contestants, 60, 1)
        for name, value in took.items():
            found[f"{algorithm}_{name}_ms"] = value
    return found


def in_a_process(part: str, clients: int) -> dict[str, float]:
    """What a part finds, in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.million",
        "--part",
        part,
        "--clients",
        str(clients),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def checks(found: dict[str, dict[str, float]]) -> Iterator[Check]:
    """The targets."""
    yield Check("from_arrays, CPU seconds", found["build"]["cpu_seconds"], "<=", 5)
    yield Check("its peak memory / rows", found["build"]["beyond"], "<=", 0.3)
    for algorithm in ALGORITHMS:
        times = found["rounds"]
        ratio = times[f"{algorithm}_many_ms"] / times[f"{algorithm}_few_ms"]
        yield Check(f"{algorithm}, round of many / of few", ratio, "<=", 1.2)


def main() -> None:
    """Run all parts and print what they found, or one part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clients", type=int, default=1_000_000, help="how many (1000000)")
    parser.add_argument("--part", choices=PARTS, help="one part alone, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[int], dict[str, float]]] = {
        "build": build,
        "file": file,
        "rounds": rounds,
    }
    if given.part:
        print(json.dumps(parts[given.part](given.clients)))
        return
    found = {}
    for part in PARTS:
        found[part] = in_a_process(part, given.clients)
        for name, value in found[part].items():
            print(f"{part:<8}{name:<20}{value:>10.3f}", flush=True)
    for check in checks(found):
        print(check)


if __name__ == "__main__":
    main()
