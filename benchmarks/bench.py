"""Times the simulator and says which targets it reaches.

CPU milliseconds per round on one thread, evaluation excluded, medians of interleaved repeats; the
contestants see the same draws and must end at the same model. Writes build/bench.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsso.algorithms import make
from fedsso.data import Federation

from .clock import Clock, WallClock, Work, interleaved
from .jobs import ALPHA, JOBS, advance, federation, has_mnist, model, simulation
from .peak import measured
from .peers import Loop, Stacked
from .server_step import QUICK, SIZES, fill, server_step
from .sweep import sweep
from .targets import report

PAIRS = 200
THREADS = 2  # of the job that is timed on several cores
REPEATS = {"J1": (25, 3), "J2": (15, 2), "J3": (11, 1)}  # repeats, and rounds in each


def job(name: str, clock: Clock, quick: bool) -> dict[str, float]:
    """Ours against the peers on one job."""
    setting = JOBS[name]
    fed = federation(setting)
    sim = simulation(setting, fed, [make("fedavg", {"alpha": ALPHA})])
    loop = Loop(fed, setting.settings, model(setting, fed), ALPHA)
    stacked = Stacked(fed, setting.settings, ALPHA, setting.chunk)
    contestants: dict[str, Work] = {"ours": advance(sim), "loop": loop.round}
    if setting.model == "mclr":
        contestants["stacked"] = stacked.round
    if name == "J1":
        pairs = 2 if quick else PAIRS
        contestants["fedsso"] = _warm_fedsso(fed, pairs, shapes="none")
        contestants["metric"] = _warm_fedsso(fed, pairs, shapes="auto")
    repeats, times = (1, 1) if quick else REPEATS[name]
    costs = interleaved(clock, contestants, repeats, times)
    _agree(
        sim.server.x[0],
        {"loop": loop.x} | ({"stacked": stacked.x} if "stacked" in contestants else {}),
    )
    found = {f"{who}_cpu_ms": cost for who, cost in costs.items()}
    return found | {"peak_mb": measured()} if name == "J1" else found


def cores(clock: Clock, quick: bool) -> dict[str, float]:
    """J3 on two threads, as a user has them: wall and CPU milliseconds of ours and of the loop."""
    setting = JOBS["J3"]
    fed = federation(setting)
    sim = simulation(setting, fed, [make("fedavg", {"alpha": ALPHA})])
    loop = Loop(fed, setting.settings, model(setting, fed), ALPHA)
    contestants: dict[str, Work] = {"ours": advance(sim), "loop": loop.round}
    spent: dict[str, float] = {}
    torch.set_num_threads(THREADS)
    for timer in (clock, WallClock(clock.device)):
        costs = interleaved(timer, contestants, 1 if quick else REPEATS["J3"][0], 1)
        spent |= {f"{who}_{timer.unit}": cost for who, cost in costs.items()}
    torch.set_num_threads(1)
    _agree(sim.server.x[0], {"loop": loop.x})
    return spent


def _warm_fedsso(fed: Federation, pairs: int, shapes: str) -> Work:
    """Rounds of FedSSO on J1 whose store is full, with or without the metric of the weights."""
    fields = {"alpha": ALPHA, "pairs": pairs, "shapes": shapes}
    sim = simulation(JOBS["J1"], fed, [make("fedsso", fields)])
    work = advance(sim)
    fill(work, lambda: sim.server, pairs)
    return work


def _agree(ours: Tensor, peers: dict[str, Tensor]) -> None:
    """All contestants must have computed the same model, or the times mean nothing."""
    for name, theirs in peers.items():
        error = float((ours - theirs).norm() / theirs.norm())
        if not error <= 1e-4:
            raise RuntimeError(
                f"ours and {name} differ by {error:.1e} after the same rounds, allowed: 1e-4"
            )


def server_steps(clock: Clock, quick: bool) -> list[dict[str, float]]:
    """Every size; small ones are repeated more often."""
    return [
        server_step(d, pairs, clock, 3 if quick else 11 if d > 1e6 else 41)
        for d, pairs in (QUICK if quick else SIZES)
    ]


def sweeps(clock: Clock, quick: bool) -> dict[str, float]:
    """The grid on the clock's device."""
    if quick:
        return sweep(clock, repeats=1, rounds=1)
    return sweep(clock, repeats=14 if clock.device.type == "cpu" else 3, rounds=5)


PARTS: dict[str, Callable[[Clock, bool], Any]] = {
    **{name: partial(job, name) for name in JOBS},
    "J3_cores": cores,
    "server_step": server_steps,
    "sweep": sweeps,
}
ON_GPU = ("server_step", "sweep")


def main() -> None:
    """Run the chosen parts, print the table, write the JSON file."""
    args = _arguments()
    torch.set_num_threads(1)
    clock = Clock(torch.device(args.device))
    if not has_mnist():
        print("FEDSSO_DATA names no folder with mnist.npz: random pixels of the same shape instead")
    found: dict[str, Any] = {}
    for name in args.only:
        print(f"timing {name} ...", flush=True)
        found[name] = PARTS[name](clock, args.quick)
    print(report(found))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", help=f"comma-separated, from {','.join(PARTS)}")
    parser.add_argument(
        "--quick", action="store_true", help="one repeat and small sizes: does it run?"
    )
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="cuda: server_step and sweep alone"
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    args = parser.parse_args()
    possible = list(PARTS if args.device == "cpu" else ON_GPU)
    args.only = args.only.split(",") if args.only else possible
    for name in args.only:
        if name not in possible:
            parser.error(f"no part {name!r} on {args.device}: choose from {', '.join(possible)}")
    return args
