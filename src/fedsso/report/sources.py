"""Paths become a report's content: run folders, sweeps, runs on Flower and bare traces, several
beside each other."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..algorithms import ALGORITHMS
from ..data import Federation, datasets, load
from ..engine import checkpoint
from ..errors import InputError
from ..experiment.results import Results, entries, holding, recipe
from ..experiment.revive import federation_of
from ..experiment.run import Run, is_done, load_run, run_folders
from ..experiment.spec import CHECKPOINT, SPEC, TRACE, Spec
from ..experiment.store import PARTS, SETTINGS, TRIALS
from ..experiment.sweep import Kept, read_sweep
from ..experiment.trace import Trace
from ..support.files import to_toml
from ..support.intake import (
    inside,
    is_file,
    is_folder,
    opened,
    parse_json,
    read_bytes,
    user_path,
    zip_archive,
)
from ..support.seal import check as check_seal
from ..support.seal import read_sealed_toml
from .page import Content, Entry, Holding, Recipe, check_targets
from .tables import Curve

HELP = (
    "give a run's folder, a folder of run folders, the --out folder of a sweep, the checkpoint_dir "
    "of a run on Flower, "
    "or a trace.csv"
)
UNSEEN = "Who holds which labels is not shown"
LEVELS = 2  # of folders below a path that are searched for folders of runs, sweeps and traces
PATHS = {"files", "data_dir", "vectors"}  # settings of a federation that name files
MOST = 3  # federations of which it is shown who holds what


class Data(NamedTuple):
    """A federation's settings; none of arrays of one's own."""

    table: Mapping[str, Any]
    load: Callable[[], Federation]

    @property
    def named(self) -> bool:
        """Whether it comes from the own data folder, by the name of a data set: no path that
        somebody else chose."""
        known = {one.name: one for one in datasets()}
        name = self.table.get("name")
        return (
            isinstance(name, str)
            and name in known
            and bool(known[name].forms)
            and not PATHS & self.table.keys()
        )


class Source(NamedTuple):
    """What one path holds; entries and recipes name their federation by its key, "" where it is
    unknown."""

    name: str
    entries: list[Entry]
    notes: list[str]
    recipes: list[tuple[str, Recipe]]
    federations: dict[str, Data]  # by digest, or by settings where there is none
    goal: float | None = None  # a sweep's target, infinity where it has none


def content(
    paths: Sequence[str | Path],
    *,
    title: str = "",
    targets: Sequence[float] | None = None,
    with_data: bool = False,
) -> Content:
    """Everything that the paths hold, for one page.

    The settings of a run or a sweep may be somebody else's: files that they name are read
    `with_data` only.
    """
    if not paths:
        raise InputError(f"there is nothing to report: {HELP}")
    check_targets(targets or ())
    places = [user_path("RUN", path) for path in paths]
    sources, left_out = _sources(places, with_data)
    feds = {key: data for one in sources for key, data in one.federations.items()}
    names = _data_names({key: feds[key].table if key in feds else {} for key in _keys(sources)})
    apart = [
        f"These runs are of different data: {'; '.join(names.values())}. Numbers compare within "
        f"one."
    ]
    notes = [note for one in sources for note in one.notes]
    held, missing = _holdings(list(feds.values()), with_data)
    own, recipes = _together(sources, names)
    title = title or f"fedsso: {', '.join(dict.fromkeys(map(_name, places)))}"
    notes = [*(apart if len(names) > 1 else []), *left_out, *notes, *missing]
    return Content(own, title, "", targets, notes, held, recipes, _goal(sources))


def _sources(paths: Sequence[Path], with_data: bool) -> tuple[list[Source], list[str]]:
    """What the paths hold, each folder once, and why something below them is left out."""
    places = {
        Path(os.path.realpath(place)): place
        for path in paths
        for place in _places(path, LEVELS) or [path]
    }
    found: list[Source] = []
    notes: list[str] = []
    for true, place in places.items():
        if is_file(true / SPEC) and true.parent in places:
            continue  # it is among the runs of that folder
        try:
            found.append(source(place, with_data))
        except InputError as error:
            if place in paths or len(places) == 1:
                raise
            notes.append(f"{place} is left out: {error}.")
    if not found:
        raise InputError(f"there is nothing to report: {' '.join(notes)}")
    return found, notes


def _places(path: Path, levels: int) -> list[Path]:
    """A run, a sweep, a trace, or a folder of runs and what lies in its other folders."""
    if is_file(path):
        return [path.parent if path.name == TRACE and is_file(path.parent / SPEC) else path]
    if _is_sweep(path) or is_file(path / SPEC):
        return [path]
    folders = [p for p in inside(path) if is_folder(p)]
    inner = [p for p in folders if not is_file(p / SPEC)] if levels else []
    own = [path] if _has_runs(path) or is_file(path / TRACE) else []
    return [*own, *(place for one in inner for place in _places(one, levels - 1))]


def _has_runs(path: Path) -> bool:
    """Whether there are run folders in a folder."""
    return any(is_folder(one) and is_file(one / SPEC) for one in inside(path))


def _is_sweep(path: Path) -> bool:
    """Whether a folder is a sweep's, or one of its parts; what lies beside runs is not."""
    if is_folder(path / PARTS):
        return True
    runs = is_file(path / SPEC) or _has_runs(path)
    return not runs and any(_is_part(file) for file in inside(path) if file.suffix == ".npz")


def _goal(sources: Sequence[Source]) -> float | None:
    """The target of the sweeps, if they agree."""
    goals = {one.goal for one in sources if one.goal is not None}
    return goals.pop() if len(goals) == 1 else None


def _keys(sources: Sequence[Source]) -> list[str]:
    """The federations of the entries."""
    return list(dict.fromkeys(entry.data for one in sources for entry in one.entries))


def _data_names(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A name for each federation: the data set's, with what differs where several have it."""
    plain = {
        key: str(table.get("name", "own arrays" if key else "unknown data"))
        for key, table in tables.items()
    }
    found = {}
    for key, table in tables.items():
        alike = [tables[other] for other in tables if plain[other] == plain[key]]
        varied = [f"{k}={v}" for k, v in table.items() if any(other.get(k) != v for other in alike)]
        found[key] = " ".join([plain[key], *(varied or [key[:8]] * (len(alike) > 1))])
    return found


def source(path: Path, with_data: bool = False) -> Source:
    """What a path holds, by the files in it."""
    if is_file(path):
        return _trace(path)
    if not is_folder(path):
        what = "neither a file nor a folder" if path.exists() else "not there"
        raise InputError(f"there is no run: {path} is {what}; {HELP}")
    if _is_sweep(path):
        return _sweep(path, with_data)
    if is_file(path / SPEC) or _has_runs(path):
        return _runs(path)
    if is_file(path / TRACE):
        return _trace(path / TRACE)
    raise InputError(f"{path} holds nothing to report: {HELP}")


def _is_part(path: Path) -> bool:
    """Whether a file of arrays is a sweep's: a part says what its trials are."""
    try:
        with opened(path) as file, zip_archive(file) as archive:
            return "meta.npy" in archive.namelist()
    except Exception:  # zipfile lets through whatever damaged bytes lead to
        return False


def _together(
    sources: Sequence[Source], names: Mapping[str, str]
) -> tuple[list[Entry], list[Recipe]]:
    """All entries and recipes; labels tell the data where these differ, and the source where
    several have the same."""

    def on(label: str, data: str) -> str:
        return f"{label} on {names[data]}" if len(names) > 1 else label

    labels = [
        {(e.curve.label, e.data): on(e.curve.label, e.data) for e in one.entries} for one in sources
    ]
    count = Counter(label for own in labels for label in own.values())
    found, recipes = [], []
    for one, own in zip(sources, labels, strict=True):
        shown = {
            key: f"{label} ({one.name})" if count[label] > 1 else label
            for key, label in own.items()
        }
        for entry in one.entries:
            curve = entry.curve._replace(label=shown[entry.curve.label, entry.data])
            place = [on("", entry.data).strip(), f"({one.name})" if len(sources) > 1 else ""]
            found.append(
                entry._replace(
                    curve=curve, origin=" ".join(filter(None, place)), data=names[entry.data]
                )
            )
        recipes += [
            r._replace(title=shown.get((r.title, data), r.title)) for data, r in one.recipes
        ]
    return found, recipes


def _name(path: Path) -> str:
    """The last two parts of a path."""
    return "/".join([part for part in path.parts if part not in (".", "..", "/")][-2:]) or str(path)


def _holdings(feds: Sequence[Data], with_data: bool) -> tuple[list[Holding], list[str]]:
    """Who holds what in each federation, and why some are not shown; nothing that a file holds is
    quoted."""
    found: list[Holding] = []
    notes: list[str] = []
    for data in feds[:MOST]:
        if data.table and not (data.named or with_data):
            notes.append(
                f"{UNSEEN}: the data are no set by name; --with-data (in Python with_data=True) "
                f"reads them."
            )
            continue
        try:
            one = holding(data.load())
        except InputError as error:
            notes.append(f"{UNSEEN}: {error if data.named or not data.table else error.kind}.")
        else:
            if one is not None and not any(
                np.array_equal(one.counts, other.counts) for other in found
            ):
                found.append(one)
    if len(feds) > MOST:
        notes.append(
            f"Who holds which labels is shown for the first {MOST} of {len(feds)} federations."
        )
    return found, list(dict.fromkeys(notes))


# ---- run folders ----


def _runs(path: Path) -> Source:
    found: dict[str, list[Run]] = {}  # by federation
    notes = []
    for folder in run_folders(path):
        spec = Spec.load(folder / SPEC)
        trace, note = _whole_or_part(folder, spec)
        if note:
            notes.append(note)
        if trace is not None:
            found.setdefault(spec.digest, []).append(Run(spec, trace))
    if not found:
        raise InputError(
            f"no run in {path} has a round to show; `fedsso resume {path}` goes on with it"
        )
    curves: list[Entry] = []
    recipes: list[tuple[str, Recipe]] = []
    federations = {}
    for digest, runs in found.items():
        results = Results(runs)
        curves += [entry._replace(data=digest) for entry in entries(results)]
        recipes += [(digest, recipe(setting)) for setting in results.settings()]
        federations[digest] = Data(runs[0].spec.data, partial(federation_of, runs[0].spec))
    return Source(_name(path), curves, notes, recipes, federations)


def _whole_or_part(folder: Path, spec: Spec) -> tuple[Trace | None, str]:
    """A run's trace as far as it goes, and a note if it is not finished."""
    if is_done(folder, spec):
        return load_run(folder).trace, ""
    again = f"`fedsso resume {folder}` completes it."
    if not is_file(folder / TRACE):
        return None, f"{folder} has no round yet; {again}"
    trace = _ended(Trace.load(folder / TRACE, spec.options["eval_every"]))
    if not len(trace):
        return None, f"{folder} has no round yet; {again}"
    done, rounds = len(trace) - 1, spec.options["rounds"]
    if done == rounds:
        return (
            trace,
            f"{folder} has a damaged checkpoint; its trace is shown as it stands, and {again}",
        )
    return trace, f"{folder} is not finished: {done} of {rounds} rounds; {again}"


# ---- sweeps ----


def _sweep(path: Path, with_data: bool) -> Source:
    kept = read_sweep(path)
    settings = path / SETTINGS
    table = read_sealed_toml(settings) if is_file(settings) else {}
    federations = _sweep_data(table, with_data)
    data = next(iter(federations), "")
    curves = [entry._replace(data=data) for entry in _sweep_entries(kept.results)]
    goal = None
    if table:
        goal = math.inf if kept.results.target is None else kept.results.target
    notes = _sweep_notes(path, kept)
    return Source(_name(path), curves, notes, _sweep_recipe(path, table), federations, goal)


def _sweep_notes(path: Path, kept: Kept) -> list[str]:
    """What a reader of the page should know about a sweep's folder."""
    notes = []
    settings = path / SETTINGS
    if not kept.finished and is_file(settings):
        notes.append(
            f"The sweep in {path} is not finished, and the trials so far are shown: run the same "
            f"`fedsso sweep` command again to complete it."
        )
    if is_file(settings) and check_seal(read_bytes(settings)) is None:
        notes.append(
            f"{settings} carries no checksum: an earlier version wrote it, or somebody changed it."
        )
    if kept.missing:
        notes.append(
            f"{kept.missing} trials that {path / TRIALS} lists are not in {PARTS}, and not shown: "
            f"run the same `fedsso sweep` command again to have them."
        )
    if kept.others:
        notes.append(
            f"{path} holds {kept.others} more trials, of another sweep or of one under way; they "
            f"are not shown."
        )
    if kept.results.judged is not None:
        notes.append(
            "Settings were chosen by held-out training rows, on which the grids are judged; the "
            "best of each algorithm was then run on all training rows and is judged by the test "
            "rows."
        )
    return notes


def _sweep_entries(results: Results) -> list[Entry]:
    """The settings of a grid; where they were chosen by held-out rows, the chosen ones lead."""
    found = []
    if results.judged is not None:
        found = [entry._replace(hyper={}, lead=True) for entry in entries(results.judged)]
    held_out = results[0].judged_by == "val"
    for entry in entries(results):
        if held_out:
            shown = f"{entry.curve.label} on held-out rows"
            entry = entry._replace(curve=entry.curve._replace(label=shown))
        found.append(entry)
    return found


def _sweep_recipe(path: Path, table: Mapping[str, Any]) -> list[tuple[str, Recipe]]:
    command = f"fedsso sweep --config {SETTINGS}"
    return (
        [("", Recipe(f"{_name(path)}, the whole sweep", to_toml(table), command, SETTINGS))]
        if table
        else []
    )


def _sweep_data(table: Mapping[str, Any], with_data: bool) -> dict[str, Data]:
    """The federation by its digest, as runs have it, or by its settings if it is not or cannot be
    loaded."""
    data = table.get("data")
    if not isinstance(data, dict):
        return {}
    named = {"name" if key == "dataset" else key: value for key, value in data.items()}
    found = Data(named, cache(lambda: _loaded(named)))
    key = json.dumps(named, sort_keys=True, default=str)
    if found.named or with_data:
        with suppress(InputError):
            key = found.load().digest()
    return {key: found}


def _loaded(table: Mapping[str, Any]) -> Federation:
    """The federation of a table of settings; InputError where they are none."""
    try:
        return load(**table)
    except TypeError as error:
        raise InputError(f"these are no settings of a data set ({error})") from None


# ---- runs on Flower, bare traces ----


def _trace(path: Path) -> Source:
    """A trace alone; the checkpoint beside that of a run on Flower tells its algorithm and
    settings."""
    try:
        trace = Trace.load(path)
    except InputError as error:
        raise InputError(f"{error}; {HELP}") from error
    if not len(trace):
        raise InputError(f"{path} has no round to show")
    trace = _ended(replace(trace, eval_every=_eval_every(trace)))
    told = _flower(path.with_name(CHECKPOINT))
    name = _name(path.parent if path.name == TRACE else path)
    words = re.split(r"[^a-z0-9]+", name.lower())
    guess = next((known for known in ALGORITHMS if known in words), name)
    algorithm = next(
        (known for known, cls in ALGORITHMS.items() if told.startswith(f"{cls.__name__}(")), guess
    )
    label = f"{algorithm} on Flower" if told else name
    recipes = [("", Recipe(label, told))] if told else []
    return Source(name, [Entry(Curve(label, (trace,), algorithm))], [], recipes, {})


def _ended(trace: Trace) -> Trace:
    """A trace does not say that its run has diverged, but from there on the accuracy is 0 and no
    loss is a number."""
    going = np.flatnonzero((trace["test_accuracy"] != 0) | np.isfinite(trace["test_loss"]))
    first = int(going[-1]) + 1 if len(going) else len(trace)
    return replace(trace, diverged=int(trace["round"][first])) if first < len(trace) else trace


def _eval_every(trace: Trace) -> int:
    """Rounds between evaluations, by the rounds that have one."""
    tests = [column for name, column in trace.columns.items() if name.startswith("test_")]
    rounds = trace["round"][np.isfinite(tests).any(0)].tolist()
    return math.gcd(*rounds) or max(1, int(trace["round"].max()))


def _flower(path: Path) -> str:
    """The settings of a run on Flower as its checkpoint tells them; none where it is another file,
    or none."""
    try:
        return str(parse_json(checkpoint.text_of(checkpoint.load(path)["about"]), path)["settings"])
    except (InputError, KeyError, TypeError, ValueError):
        return ""
