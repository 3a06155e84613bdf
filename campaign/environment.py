"""Faults of the machine and of its user: full or read-only disks, signals, two writers and more."""

from __future__ import annotations

import errno
import os
import platform
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import fedsso

from . import mounts
from . import verdict as v
from .faults import Act, Files, fails_from
from .forks import Child, Ending, forked
from .kills import PATIENCE, Reference, read_outcome, reference
from .outcome import difference, litter
from .process import OUTPUTS, SURROUNDINGS, command_with
from .scenes import SCENES, Scene, command
from .verdict import Case, Result

PART = "environment"
COMMANDS = ("run", "compare", "sweep", "paper", "tune", "glm")  # those that are stopped by a key
Found = tuple[str, str]  # verdict, and what was seen
FINE: Found = (v.RIGHT, "")
REASONS = {"disk full": errno.ENOSPC, "disk broken": errno.EIO, "disk write-protected": errno.EROFS}
REFUSED = {
    "disk full": ("run", "sweep", "flower", "compare", "simulate", "python sweep"),
    "disk broken": ("run", "flower"),
    "disk write-protected": ("run", "flower"),
}
SHARED = ("sweep", "python sweep", "tune")  # scenes that several processes may work on
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)  # bytes of a disk, or of the largest file


class Trial(NamedTuple):
    """One fault."""

    group: str
    name: str
    work: Callable[[Path], Found]  # gets an empty folder


def cases(_folder: Path, seed: int, quick: bool) -> list[Case]:
    """Every fault; in a quick look some of them."""
    trials = list(_trials(seed))
    if quick:
        trials = _spread(trials)
    return [partial(_case, number, trial) for number, trial in enumerate(trials)]


def _spread(trials: Sequence[Trial]) -> list[Trial]:
    """A few of each kind: the same on every machine."""
    groups = dict.fromkeys(trial.group for trial in trials)
    own = {group: [trial for trial in trials if trial.group == group] for group in groups}
    return [one for some in own.values() for one in some[:: max(1, len(some) // 3)]]


def _trials(seed: int) -> Iterator[Trial]:
    draw = random.Random(f"{seed} {PART}")
    yield from _disk_trials(draw)
    for size in SIZES:
        yield Trial("small disk", f"run on {size >> 10} kB", partial(_small_disk, size))
        yield Trial("small disk", f"files of at most {size >> 10} kB", partial(_small_files, size))
    yield from _read_only_trials()
    for name in ("run", "sweep", "flower", "compare"):
        for step in sorted(draw.sample(range(1, _known(name).steps + 1), 4)):
            yield Trial("folder removed", f"{name}, at step {step}", partial(_removed, name, step))
    for name, scene in SCENES.items():
        yield Trial("two writers", f"{name}, begun twice", partial(_two, name, scene.begin))
        yield Trial("two writers", f"{name}, completed meanwhile", partial(_two, name, scene.again))
    yield from _signal_trials(draw)
    for name in SURROUNDINGS:
        yield Trial("surroundings", name, partial(_surrounded, name))
    for name in OUTPUTS:
        yield Trial("output", name, partial(_output, name))


def _disk_trials(draw: random.Random) -> Iterator[Trial]:
    """Full at every write of some scenes, and at some of the others; broken, or write-protected."""
    for what, why in REASONS.items():
        for name in REFUSED[what]:
            stride = 1 if what == "disk full" and name in ("run", "sweep", "flower") else 5
            for step in range(draw.randint(1, stride), _known(name).steps + 1, stride):
                yield Trial(what, f"{name}, from step {step} on", partial(_fails, name, step, why))


def _case(number: int, trial: Trial) -> Result:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        disk = Path(place) / "disk"
        disk.mkdir()
        found, told = trial.work(disk)
        mounts.remove(disk)
    return Result(PART, number, trial.group, trial.name, found, told, time.monotonic() - began)


@cache
def _known(name: str) -> Reference:
    return reference(SCENES[name])


# ---- what may come of a fault ----


def _told(ended: Ending, codes: Sequence[int] = (2,)) -> Found:
    """It ended as it may, with a sentence."""
    if ended.hung:
        return v.HANG, ended.said[-300:]
    if ended.error or "Traceback (most recent call last)" in ended.said:
        return v.TRACEBACK, (ended.error or ended.said)[-700:]
    if ended.code not in codes:
        return v.WRONG, f"exit code {ended.code}, not {codes}: {ended.said[-300:]}"
    if ended.code > 0 and not ended.said.strip():
        return v.WRONG, f"exit code {ended.code} without a word"
    return v.REFUSED if ended.code else v.RIGHT, ended.said[-300:]


def _completed(scene: Scene, out: Path) -> Found:
    """Afterwards, with nothing in the way, the work is completed, and is as if nothing had been."""
    known = _known(scene.name)
    ended = forked(partial(scene.again, out), PATIENCE)
    if ended.code or ended.error:
        return v.LOST, f"it cannot be completed: {(ended.error or ended.said)[-500:]}"
    return _same(out, ended.value, known)


def _same(out: Path, value: Any, known: Reference) -> Found:
    try:
        other = difference(read_outcome(out, value), known.outcome)
    except RuntimeError as error:
        return v.LOST, str(error)[-500:]
    if other:
        return (v.LOST if other.startswith("missing") else v.WRONG), other
    left = litter(out, known.outcome)
    return (v.LITTER, ", ".join(left)) if left else FINE


def _then(first: Found, second: Callable[[], Found]) -> Found:
    """The worse of two findings; the second only where the first is no failure."""
    if first[0] in v.BAD:
        return first
    after = second()
    return after if after[0] in v.BAD else first


def _begun(scene: Scene, out: Path, act: Act) -> Any:
    Files(out, act).install()
    return scene.begin(out)


# ---- disks ----


def _fails(name: str, step: int, why: int, place: Path) -> Found:
    """A refusal; or an end as usual, where all that mattered was written."""
    scene, out = SCENES[name], place / "out"
    ended = forked(partial(_begun, scene, out, fails_from(step, why)), PATIENCE)
    return _then(_told(ended, (0, 2)), lambda: _completed(scene, out))


def _small_files(size: int, place: Path) -> Found:
    """The system itself refuses to make a file longer than that."""
    scene, out = SCENES["run"], place / "out"

    def limited() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            return scene.begin(out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    return _then(_told(forked(limited, PATIENCE), (0, 2)), lambda: _completed(scene, out))


def _small_disk(size: int, place: Path) -> Found:
    """A real disk that is too small; then it grows."""
    scene, out = SCENES["run"], place / "out"
    try:
        mounts.separate()
        mounts.small(place, size)
    except mounts.NotAllowed as error:
        return v.SKIPPED, str(error)
    first = _told(forked(partial(scene.begin, out), PATIENCE), (0, 2))
    mounts.small(place, 64 << 20, again=True)
    return _then(first, lambda: _completed(scene, out))


def _read_only_trials() -> Iterator[Trial]:
    yield Trial("read-only disk", "run begins", _read_only_begin)
    yield Trial("read-only disk", "a killed run is resumed", _read_only_resume)
    yield Trial("read-only disk", "a finished run is read", _read_only_read)
    yield Trial("read-only disk", "a file in place of the folder", _file_for_folder)


def _guarded(place: Path) -> Found | None:
    """Make it possible to write-protect a folder; why not, where it is not."""
    try:
        mounts.separate()
        mounts.bind(place)
    except mounts.NotAllowed as error:
        return v.SKIPPED, str(error)
    return None


def _read_only_begin(place: Path) -> Found:
    scene, out = SCENES["run"], place / "out"
    skipped = _guarded(place)
    if skipped:
        return skipped
    mounts.read_only(place)
    first = _told(forked(partial(scene.begin, out), PATIENCE))
    mounts.read_only(place, on=False)
    return _then(first, lambda: _completed(scene, out))


def _read_only_resume(place: Path) -> Found:
    scene, out = SCENES["run"], place / "out"
    skipped = _guarded(place)
    if skipped:
        return skipped
    forked(partial(_begun, scene, out, _die_after("checkpoint.safetensors", out)), PATIENCE)
    mounts.read_only(place)
    first = _told(forked(partial(command, "resume", out), PATIENCE))
    mounts.read_only(place, on=False)
    return _then(first, lambda: _completed(scene, out))


def _read_only_read(place: Path) -> Found:
    """Who only reads needs no right to write."""
    scene, out = SCENES["run"], place / "out"
    skipped = _guarded(place)
    if skipped:
        return skipped
    forked(partial(scene.begin, out), PATIENCE)
    mounts.read_only(place)
    with tempfile.TemporaryDirectory(prefix="campaign-") as other:
        page = Path(other) / "page.html"
        first = _told(forked(partial(command, "report", out, "--out", page), PATIENCE), (0,))
    return _then(first, lambda: _told(forked(partial(_load, out), PATIENCE), (0,)))


def _load(out: Path) -> None:
    fedsso.load_run(out)


def _file_for_folder(place: Path) -> Found:
    out = place / "out"
    out.write_text("mine")
    found = _told(forked(partial(SCENES["run"].begin, out), PATIENCE))
    if out.read_text() != "mine":
        return v.LOST, "the file was overwritten"
    return found


def _die_after(name: str, out: Path) -> Act:
    """Dies at the first step after a file has its name."""

    def act(_number: int, _kind: str) -> None:
        if (out / name).exists():
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def _removed(name: str, step: int, place: Path) -> Found:
    """Somebody removes the folder: an end with a sentence, or in a folder that is made again.

    What was removed is gone; the work can be begun anew.
    """
    scene, out = SCENES[name], place / "out"
    aside = place / "aside"

    def act(number: int, _kind: str) -> None:
        if number == step and out.exists():
            real_rename(out, aside)
            shutil.rmtree(aside)

    real_rename = os.rename
    first = _told(forked(partial(_begun, scene, out, act), PATIENCE), (0, 2))
    shutil.rmtree(out, ignore_errors=True)
    return _then(first, lambda: _completed(scene, out))


# ---- two writers ----


def _two(name: str, second: Callable[[Path], Any], place: Path) -> Found:
    """The first waits in the middle of its work; the second must be refused, and told by whom.

    Who begins anew may also be told that the folder holds a run. The same sweep may be begun again:
    both take part, and end with what one would have found.
    """
    scene, out, go = SCENES[name], place / "out", place / "go"
    half = _known(name).steps // 2

    def act(number: int, _kind: str) -> None:
        while number == half and not go.exists():
            time.sleep(0.01)

    first = Child(partial(_begun, scene, out, act))
    _until_quiet(first, out)
    other = forked(partial(second, out), PATIENCE)
    go.touch()
    ended = first.wait(PATIENCE)
    found = _told(other)
    if other.code == 0 and not other.error:
        if name not in SHARED:
            return v.WRONG, "both wrote at once"
        found = FINE
    completes = second is scene.again
    if (
        found[0] == v.REFUSED
        and completes
        and not (str(first.pid) in other.said and platform.node() in other.said)
    ):
        found = v.WRONG, f"the sentence does not name host and process: {other.said[-300:]}"
    if ended.code or ended.error:
        return v.LOST, f"the first failed: {(ended.error or ended.said)[-500:]}"
    return _then(found, lambda: _same(out, ended.value, _known(name)))


def _until_quiet(child: Child, out: Path) -> None:
    """Until nothing changes any more in a folder that has something in it."""
    before: list[tuple[str, int]] = []
    calm = 0
    limit = time.monotonic() + PATIENCE
    while calm < 20 and child.running() and time.monotonic() < limit:
        time.sleep(0.05)
        now = [(str(p), p.lstat().st_mtime_ns) for p in _listed(out)]
        calm = calm + 1 if now and now == before else 0
        before = now


def _listed(out: Path) -> list[Path]:
    return sorted(path for path in out.rglob("*") if path.exists()) if out.exists() else []


# ---- signals ----


def _signal_trials(draw: random.Random) -> Iterator[Trial]:
    for name in COMMANDS:
        for what, numbers in (
            ("SIGINT", [signal.SIGINT]),
            ("SIGINT twice", [signal.SIGINT, signal.SIGINT]),
            ("SIGTERM", [signal.SIGTERM]),
        ):
            for step in sorted(draw.sample(range(1, _known(name).steps), 2)):
                work = partial(_signalled, name, step, numbers)
                yield Trial("signals", f"{name}, {what} at step {step}", work)


def _signalled(name: str, step: int, numbers: Sequence[int], place: Path) -> Found:
    """130, or death by the signal; what was all but done may end as usual."""
    scene, out = SCENES[name], place / "out"

    def act(number: int, _kind: str) -> None:
        if step <= number < step + len(numbers):
            os.kill(os.getpid(), numbers[number - step])

    ended = forked(partial(_begun, scene, out, act), PATIENCE)
    deadly = {-number for number in numbers} | {128 + number for number in numbers}
    return _then(_told(ended, (0, 130, *deadly)), lambda: _completed(scene, out))


# ---- surroundings and outputs: processes that are started anew ----


def _surrounded(name: str, place: Path) -> Found:
    """The same result as anywhere, or a refusal."""
    out = place / "out"
    ended = command_with(SURROUNDINGS[name], SCENES["run"], out, place)
    found = _told(ended, (0, 2))
    if found[0] == v.REFUSED:
        return _then(found, lambda: _completed(SCENES["run"], out))
    return _then(found, lambda: _same(out, None, _known("run")))


def _output(name: str, place: Path) -> Found:
    """Nobody listens; the files are written all the same, or the rest is completed later."""
    out = place / "out"
    ended = command_with(OUTPUTS[name], SCENES["run"], out, place)
    if "Traceback (most recent call last)" in ended.said or "Exception ignored" in ended.said:
        return v.TRACEBACK, ended.said[-700:]
    if ended.hung or ended.code < 0:
        return (v.HANG if ended.hung else v.TRACEBACK), f"code {ended.code}: {ended.said[-300:]}"
    return _completed(SCENES["run"], out)
