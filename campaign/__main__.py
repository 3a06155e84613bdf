"""`python -m campaign` runs the parts and prints a table; exit code 1 if anything failed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# A process with several threads must not be forked: torch and numpy are told to use one.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("MPLBACKEND", "agg")

from fedsso.version import __version__  # noqa: E402

from . import verdict as v  # noqa: E402
from .forks import Ending, each  # noqa: E402
from .scenes import preload  # noqa: E402
from .table import document, examples, of_parts  # noqa: E402
from .verdict import Case, Result  # noqa: E402

PARTS = ("kills", "damage", "flips", "environment", "replies", "hospitals", "numbers")
PACE = 10.0  # seconds between two lines of progress


def main() -> int:
    """Run the chosen parts."""
    args = _arguments()
    preload()
    results: list[Result] = []
    began = time.monotonic()
    for part in args.only:
        with tempfile.TemporaryDirectory(prefix="campaign-") as place:
            cases = import_module(f".{part}", __package__).cases(
                Path(place) / "samples", args.seed, args.quick
            )
            if args.case is not None:
                cases = [cases[args.case]]
            results += _run(part, cases, args.jobs)
    about = {
        "version": __version__,
        "seed": args.seed,
        "quick": args.quick,
        "minutes": _minutes(began),
    }
    found = document(
        sorted(results, key=lambda result: (args.only.index(result.part), result.number)), about
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.case is not None:
        print(*(f"{key}: {value}" for key, value in asdict(results[0]).items()), sep="\n")
    print(
        f"\n{of_parts(found)}\n{examples(found)}\nwritten to {args.out}, {found['minutes']} minutes"
    )
    return int(bool(found["failures"]))


def _minutes(began: float) -> float:
    return round((time.monotonic() - began) / 60, 1)


def _run(part: str, cases: Sequence[Case], jobs: int) -> list[Result]:
    """All cases of a part, with a line of progress now and then."""
    results: list[Result] = []
    told = 0.0
    for place, ended in each([partial(_plain, case) for case in cases], jobs):
        result = _result(part, place, ended)
        results.append(result)
        if result.bad:
            said = f"{result.verdict}: {result.group}: {result.name} (--case {result.number})"
            print(said, file=sys.stderr, flush=True)
        if time.monotonic() - told > PACE or len(results) == len(cases):
            told = time.monotonic()
            bad = sum(result.bad for result in results)
            print(
                f"{part}: {len(results)} of {len(cases)}, failures: {bad}",
                file=sys.stderr,
                flush=True,
            )
    return results


def _plain(case: Callable[[], Result]) -> dict[str, Any]:
    return asdict(case())


def _result(part: str, place: int, ended: Ending) -> Result:
    """What a case found; a case that fails itself is no success of the library."""
    if ended.value is None:
        return Result(
            part, place, "the campaign itself", "failed", v.TRACEBACK, ended.error or ended.said
        )
    return Result(**ended.value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaign", description=__doc__)
    parser.add_argument("--only", help=f"comma-separated, from {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="about two minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--case", type=int, help="the number of one case, to repeat it; with one part"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cases at a time"
    )
    parser.add_argument("--out", type=Path, default=Path("build/campaign.json"))
    args = parser.parse_args()
    args.only = args.only.split(",") if args.only else list(PARTS)
    for name in args.only:
        if name not in PARTS:
            parser.error(f"no part {name!r}: choose from {', '.join(PARTS)}")
    if args.case is not None and len(args.only) != 1:
        parser.error("--case takes one part, for example --only damage")
    return args


if __name__ == "__main__":
    sys.exit(main())
