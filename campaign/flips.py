"""Single bits of a checkpoint: every flip must be noticed."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

from . import verdict as v
from .damage import Reference, copied, judge, read, reference
from .forks import forked
from .mutations import BYTES
from .samples import make
from .targets import Target, targets
from .verdict import Case, Result

PART = "flips"
FULL, QUICK = 200, 20
KINDS = (
    "checkpoint resumed",
    "checkpoint of a finished run",
    "checkpoint of Flower",
    "part of a sweep",
    "part of a tune",
    "model predicts",
)


def cases(folder: Path, seed: int, quick: bool) -> list[Case]:
    """One flip each, the files in turn."""
    make(folder)
    files = [target for target in targets(folder) if target.name in KINDS]
    known = {target.name: reference(folder, target) for target in files}
    turns = [files[number % len(files)] for number in range(QUICK if quick else FULL)]
    return [
        partial(_case, folder, seed, number, one, known[one.name])
        for number, one in enumerate(turns)
    ]


def _case(folder: Path, seed: int, number: int, target: Target, known: Reference) -> Result:
    draw = random.Random(f"{seed} {PART} {number}")
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        work = copied(folder, target, Path(place))
        good = (work / target.file).read_bytes()
        changed = BYTES["one bit"](good, draw)
        (work / target.file).write_bytes(changed)
        ended = forked(partial(read, work, target))
    found, seen = judge(target, False, ended, known)
    if found == v.RIGHT:
        found, seen = v.WRONG, "nobody noticed"
    where = next(i for i, (a, b) in enumerate(zip(good, changed, strict=True)) if a != b)
    return Result(
        PART,
        number,
        target.name,
        f"a bit of byte {where} of {len(good)}",
        found,
        seen,
        ended.seconds,
    )
