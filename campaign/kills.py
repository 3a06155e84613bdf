"""kill -9 and SIGTERM at random moments; completed, the work is as if nothing had happened."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedsso.regression.result.model import MODEL

from . import verdict as v
from .faults import Act, Files, die_at, never
from .forks import Child, Ending, forked
from .outcome import difference, litter, outcome
from .scenes import JOBS, ROOT, SCENES, Scene
from .verdict import Case, Result

PART = "kills"
ROUNDS = 12  # kills of each scene
TURNS = [*SCENES.values(), JOBS]
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
AGAIN = 0.25  # how often the completion is killed as well
PATIENCE = 120.0  # seconds for a scene; a busy machine is no hang
KEPT = ("checkpoint.safetensors", "*.npz")  # work that is done when it has its name


class Reference(NamedTuple):
    """An undisturbed scene."""

    outcome: dict[str, Any]
    steps: int  # that change a file
    kept: dict[str, int]  # how often each file of results got its name
    seconds: float
    before: dict[str, Any]  # what was there first


def reference(scene: Scene) -> Reference:
    """Run a scene to its end."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        out, log = Path(place) / "out", Path(place) / "log"
        before = _prepared(scene, out)
        ended = forked(partial(_watched, scene.begin, out, never, log), PATIENCE)
        if ended.code or ended.error:
            raise RuntimeError(f"{scene.name} fails undisturbed: {ended.error or ended.said}")
        steps, value = ended.value
        return Reference(read_outcome(out, value), steps, _kept(log), ended.seconds, before)


def _prepared(scene: Scene, out: Path) -> dict[str, Any]:
    """What the scene replaces, if anything."""
    if scene.first is None:
        return {}
    forked(partial(scene.first, out), PATIENCE)
    return read_outcome(out, None)


def _watched(work: Callable[[Path], Any], out: Path, act: Act, log: Path) -> tuple[int, Any]:
    files = Files(out, act, log).install()
    value = work(out)
    return files.count, value


def read_outcome(out: Path, value: Any) -> dict[str, Any]:
    """The outcome, read by a process of its own."""
    ended = forked(partial(outcome, out), PATIENCE)
    if ended.code or ended.error:
        raise RuntimeError(f"the results cannot be read: {ended.error or ended.said}")
    return {**ended.value, "value": value}


def _kept(log: Path) -> dict[str, int]:
    """How often each file of results got its name."""
    lines = log.read_text().split() if log.exists() else []
    return dict(Counter(name for name in lines if any(Path(name).match(k) for k in KEPT)))


def cases(_folder: Path, seed: int, quick: bool) -> list[Case]:
    """Scenes in turn; the last is a sweep with processes of its own."""
    known = {scene.name: reference(scene) for scene in SCENES.values()}
    known[JOBS.name] = known["sweep"]
    turns = TURNS * (1 if quick else ROUNDS)
    return [
        partial(_case, seed, number, scene, known[scene.name]) for number, scene in enumerate(turns)
    ]


def _case(seed: int, number: int, scene: Scene, known: Reference) -> Result:
    draw = random.Random(f"{seed} {PART} {number}")
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        out, log = Path(place) / "out", Path(place) / "log"
        if scene is JOBS:
            told = _kill_processes(scene, out, draw)
        else:
            _prepared(scene, out)
            told = _kill_at(scene.begin, out, log, known, draw, number)
            if draw.random() < AGAIN:
                told += ", then again " + _kill_at(scene.again, out, log, known, draw, number)
        torn = _torn(scene, out, known)
        ended = forked(partial(_watched, scene.again, out, never, log), PATIENCE)
        stops = told.count(signal.SIGTERM.name)
        found, seen = (v.LOST, torn) if torn else _judge(scene, out, log, ended, known, stops)
    return Result(PART, number, scene.name, f"killed {told}", found, seen)


def _kill_at(
    work: Callable[[Path], Any],
    out: Path,
    log: Path,
    known: Reference,
    draw: random.Random,
    number: int,
) -> str:
    """Kill before a step that changes a file, or after a random time, in turn."""
    if number // len(TURNS) % 2 == 0:
        step = draw.randint(1, known.steps)
        forked(partial(_watched, work, out, die_at(step), log), PATIENCE)
        return f"before step {step} of {known.steps}"
    after, by = draw.uniform(0, known.seconds), draw.choice(SIGNALS)
    child = Child(partial(_watched, work, out, never, log))
    time.sleep(after)
    child.kill(by)
    child.wait(PATIENCE)
    return f"by {by.name} after {after:.2f} s of {known.seconds:.2f}"


def _torn(scene: Scene, out: Path, known: Reference) -> str:
    """What is wrong after the kill with what the scene replaces.

    The model is the old or the new one. What is made of it may be missing, but not of another.
    """
    if scene.first is None:
        return ""
    try:
        found = read_outcome(out, None)
    except RuntimeError as error:
        return f"after the kill: {error}"
    if not any(MODEL in name for name in found["files"]):
        return "after the kill there is no model"
    there = {**found, "files": []}
    old, new = (difference(one, there) for one in (known.before, known.outcome))
    return f"neither the old one ({old}) nor the new ({new})" if old and new else ""


def _kill_processes(scene: Scene, out: Path, draw: random.Random) -> str:
    """Kill the first of several processes; the others must end by themselves."""
    assert scene.args is not None
    command = [sys.executable, "-m", "fedsso", *map(str, scene.args(out))]
    silent = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "stdin": subprocess.DEVNULL,
    }
    process = subprocess.Popen(command, cwd=ROOT, **silent)  # type: ignore[call-overload]
    _until((out / "parts").exists, process)
    wait = draw.uniform(0, 8.0)
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.wait()
    return f"{wait:.2f} s after its first folder"


def _until(ready: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    limit = time.monotonic() + PATIENCE
    while not ready() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)


def _judge(
    scene: Scene, out: Path, log: Path, ended: Ending, known: Reference, stops: int
) -> tuple[str, str]:
    """What the completion made of it."""
    if ended.hung:
        return v.HANG, f"completing it takes more than {PATIENCE:.0f} s"
    if ended.error or ended.code < 0:
        return v.TRACEBACK, ended.error or f"it died: {ended.code}"
    if ended.code:
        return v.LOST, f"completing it ends with {ended.code}: {ended.said[-300:]}"
    try:
        found = read_outcome(out, ended.value[1])
    except RuntimeError as error:
        return v.LOST, str(error)
    other = difference(found, known.outcome)
    if other:
        return (v.LOST if other.startswith("missing") else v.WRONG), other
    left = litter(out, known.outcome)
    if left:
        return v.LITTER, ", ".join(left)
    return _done_once(scene, log, known, stops)


def _done_once(scene: Scene, log: Path, known: Reference, stops: int) -> tuple[str, str]:
    """Nothing that had its name was computed again. Who is stopped keeps what there is so far."""
    if scene is JOBS or scene.batched:
        return v.RIGHT, ""
    kept = _kept(log)
    usual = known.kept
    twice = [
        f"{name} {n} times instead of {usual.get(name, 0)}"
        for name, n in kept.items()
        if n > usual.get(name, 0) + stops
    ]
    return (v.LOST, f"done again: {', '.join(twice)}") if twice else (v.RIGHT, "")
