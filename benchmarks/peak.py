"""Peak memory of our J1 alone: `python -m benchmarks.peak` prints megabytes."""

from __future__ import annotations

import resource
import subprocess
import sys

import torch

from fedsso.algorithms import make

from .jobs import ALPHA, JOBS, advance, federation, simulation


def measured() -> float:
    """Peak memory of a fresh process that runs J1."""
    command = [sys.executable, "-m", __name__]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Run a few rounds and print the high-water mark."""
    torch.set_num_threads(1)
    setting = JOBS["J1"]
    work = advance(simulation(setting, federation(setting), [make("fedavg", {"alpha": ALPHA})]))
    for _ in range(10):
        work()
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


if __name__ == "__main__":
    main()
