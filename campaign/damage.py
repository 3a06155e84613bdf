"""A structured fuzzer over every kind of file that the library reads."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import mutations as m
from . import tensors as t
from . import verdict as v
from .forks import NO_LIMIT, Ending, forked
from .outcome import difference
from .samples import make
from .seal import sealed_again
from .targets import Target, targets
from .verdict import Case, Result

PART = "damage"
QUICK = 100
FAULT = 70  # the exit code of a fault in the library itself
FORGED = 0.5  # how often structured damage to a sealed file is sealed again
NUMBER = re.compile(r"-?\d[\d.]*(?:e[+-]?\d+)?")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
PROGRESS = "round 0/0"
PLACE = re.compile(r"/\S*campaign-\w+")
FORMS: Mapping[str, Mapping[str, m.Change]] = {
    "json": {**m.TEXT, **m.JSON},
    "toml": {**m.TEXT, **m.TOML},
    "csv": {**m.TEXT, **m.CSV},
    "svm": {**m.TEXT, **m.SVM},
    "text": m.TEXT,
    "safetensors": t.SAFETENSORS,
    "npz": t.NPZ,
    "npy": t.NPY,
    "gzip": m.GZIP,
    "bzip2": m.BZIP2,
    "idx": m.IDX,
    "pickle": t.PICKLE,
    "binary": {},
}


class Reference(NamedTuple):
    """What the undamaged files give."""

    value: Any
    said: str


def kinds(target: Target) -> list[str]:
    """All damage that a file can take."""
    return [*m.BYTES, *FORMS[target.form], *m.PLACES, *["another file"] * bool(target.other)]


def plan(files: Sequence[Target], seed: int) -> list[tuple[Target, str]]:
    """Every file with every damage, in an order that depends on the seed."""
    pairs = [(target, kind) for target in files for kind in kinds(target)]
    random.Random(f"{seed} {PART}").shuffle(pairs)
    return pairs


def cases(folder: Path, seed: int, quick: bool) -> list[Case]:
    """Make the samples, read each once as it is, and plan the damage."""
    make(folder)
    known = {target.name: reference(folder, target) for target in targets(folder)}
    pairs = plan(targets(folder), seed)
    return [
        partial(_case, folder, seed, number, target, kind, known[target.name])
        for number, (target, kind) in enumerate(pairs[:QUICK] if quick else pairs)
    ]


def reference(folder: Path, target: Target) -> Reference:
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        ended = forked(partial(read, copied(folder, target, Path(place)), target), 120, NO_LIMIT)
    if ended.code or ended.error:
        raise RuntimeError(f"{target.name} fails undamaged: {ended.error or ended.said}")
    return Reference(ended.value, ended.said)


def copied(folder: Path, target: Target, place: Path) -> Path:
    """A folder of its own with what the reader needs; its name is always the same, for reports."""
    work = place / "w"
    (work / target.copied).parent.mkdir(parents=True)
    if (folder / target.copied).is_dir():
        shutil.copytree(folder / target.copied, work / target.copied)
    else:
        shutil.copy(folder / target.copied, work / target.copied)
    return work


def read(work: Path, target: Target) -> Any:
    os.chdir(work)
    return target.read()


def _case(
    folder: Path, seed: int, number: int, target: Target, kind: str, known: Reference
) -> Result:
    draw = random.Random(f"{seed} {PART} {number}")
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        work = copied(folder, target, Path(place))
        path = work / target.file
        forged = damage(path, target, kind, draw, folder)
        before = _content(path)
        ended = forked(partial(read, work, target))
        found, seen = judge(target, forged, ended, known, kind in m.PLACES)
        if found == v.TAKEN and os.path.lexists(path) and not path.is_file():
            found, seen = v.WRONG, f"passed over without a word: {seen}"
        if found == v.REFUSED and not _content(path).startswith(before):  # a journal may grow
            found, seen = v.LOST, f"the damaged file is gone or another: {ended.said[-300:]}"
        if (work / t.MARK).exists():
            found, seen = v.WRONG, "the file's own command was executed"
    return Result(
        PART, number, target.name, kind + ", sealed again" * forged, found, seen, ended.seconds
    )


def damage(path: Path, target: Target, kind: str, draw: random.Random, folder: Path) -> bool:
    """Damage a file; whether its checksum is right again."""
    good = path.read_bytes()
    path.unlink()
    if kind in m.PLACES:
        m.PLACES[kind](path)
        return False
    if kind == "another file":
        shutil.copy(folder / target.other, path)
        return False
    changed = {**m.BYTES, **FORMS[target.form]}[kind](good, draw)
    forged = (
        sealed_again(good, changed)
        if kind in FORMS[target.form] and draw.random() < FORGED
        else None
    )
    path.write_bytes(changed if forged is None else forged)
    return forged is not None and forged != good


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else str(path.exists()).encode()


def judge(
    target: Target, forged: bool, ended: Ending, known: Reference, gone: bool = False
) -> tuple[str, str]:
    """What the reader made of the file, and what was seen; `gone` if there is no file any more."""
    if ended.hung:
        return v.HANG, f"after {ended.seconds:.0f} s: {ended.said[-200:]}"
    if ended.out_of_memory:
        return v.MEMORY, f"{ended.grown >> 20} MB; {(ended.error or ended.said)[-300:]}"
    if ended.error or ended.code < 0 or "Traceback (most recent call last)" in ended.said:
        return v.TRACEBACK, ended.error[-700:] or f"code {ended.code}: {ended.said[-300:]}"
    if ended.code == 2:
        return (
            (v.REFUSED, ended.said[-300:])
            if ended.said.strip()
            else (v.TRACEBACK, "refused without a word")
        )
    if ended.code == FAULT:
        return v.TRACEBACK, ended.said[-700:]
    if ended.code:
        return (
            v.WRONG if target.guarded and not forged else v.TAKEN
        ), f"code {ended.code}: {ended.said[-300:]}"
    return _used(target, forged, ended, known, gone)


def _used(
    target: Target, forged: bool, ended: Ending, known: Reference, gone: bool
) -> tuple[str, str]:
    """The reader went on."""
    told = _news(ended.said, known.said)
    if isinstance(ended.value, dict) and not ended.value.get("finite", True):
        return v.WRONG, "numbers that are not finite were taken"
    other = _difference(ended.value, known.value, gone)
    if not other:
        return (v.FELL_BACK, told) if told else (v.RIGHT, "")
    if told and (gone or not target.exact):
        return v.FELL_BACK, told
    if forged or not target.guarded:
        return v.TAKEN, other
    return v.WRONG, other + (f"; it said: {told[:200]}" if told else "")


def _difference(found: Any, wanted: Any, gone: bool) -> str:
    """What is another; of a page only the curves count, where a file that tells of them is gone."""
    if "files" in wanted:
        return difference({**found, "files": []}, {**wanted, "files": []})
    if "page" in wanted and found["curves"] == wanted["curves"] and not gone:
        return "" if found["page"] == wanted["page"] else "the page tells something else"
    key = "curves" if "page" in wanted else "digest"
    return "" if found[key] == wanted[key] else f"another result: {key}"


def _news(said: str, usual: str) -> str:
    """What was said that is not said of the undamaged file."""
    known = {"", *map(_bare, usual.splitlines())}
    return "\n".join(line for line in said.splitlines() if _bare(line) not in known)


def _bare(line: str) -> str:
    """A line without its colours, the case's folder and numbers; "" if it only tells progress."""
    bare = NUMBER.sub("0", PLACE.sub("", COLOUR.sub("", line))).strip()
    return "" if PROGRESS in bare else bare
