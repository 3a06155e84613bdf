"""Paths become a report's content: run folders, sweeps, runs on Flower and bare traces, several beside each other."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from .algorithms import ALGORITHMS
from .data import Federation, load
from .engine import checkpoint
from .errors import InputError
from .files import read_text, read_toml, to_toml, user_path
from .report import Curve
from .report_page import Content, Entry, Holding, Recipe, check_targets
from .runs import CHECKPOINT, SPEC, TRACE, entries, holding, is_done, load_run, recipe, run_folders
from .spec import FREE, Spec
from .store import held, read
from .trace import Trace
from .tree import fields_of

PARTS, TRIALS, SETTINGS = "parts", "trials.csv", "sweep.toml"
HELP = (
    "give a run's folder, a folder of run folders, the --out folder of a sweep, the checkpoint_dir of a run on Flower, "
    "or a trace.csv"
)
MOST = 3  # federations of which it is shown who holds what


class Source(NamedTuple):
    """What one path holds; each federation is loaded only when it is drawn."""

    name: str
    entries: list[Entry]
    notes: list[str]
    recipes: list[Recipe]
    federations: dict[str, Callable[[], Federation]]  # by digest, or by settings where there is none


def content(paths: Sequence[str | Path], *, title: str = "", targets: Sequence[float] | None = None) -> Content:
    """Everything that the paths hold, for one page."""
    if not paths:
        raise InputError(f"there is nothing to report: {HELP}")
    check_targets(targets or ())
    sources = [source(user_path("RUN", path)) for path in paths]
    notes = [note for one in sources for note in one.notes]
    feds = {key: made for one in sources for key, made in one.federations.items()}
    held, missing = _holdings(feds)
    recipes = [one for own in sources for one in own.recipes]
    title = title or f"fedsso: {', '.join(one.name for one in sources)}"
    return Content(_together(sources), title, "", targets, [*notes, *missing], held, recipes)


def source(path: Path) -> Source:
    """What a path holds, by the files in it."""
    if path.is_file():
        beside = path.name == TRACE and (path.parent / SPEC).is_file()
        return _runs(path.parent) if beside else _trace(path)
    if not path.is_dir():
        raise InputError(f"there is no {path}: {HELP}")
    if (path / PARTS).is_dir() or any(path.glob("*.npz")):
        return _sweep(path)
    if (path / SPEC).is_file() or any(path.glob(f"*/{SPEC}")):
        return _runs(path)
    if (path / TRACE).is_file():
        return _trace(path / TRACE)
    raise InputError(f"{path} holds nothing to report: {HELP}")


def _together(sources: Sequence[Source]) -> list[Entry]:
    """All entries; a label that several sources have gets the source's name."""
    count = Counter(label for one in sources for label in {entry.curve.label for entry in one.entries})
    found = []
    for one in sources:
        for entry in one.entries:
            label = entry.curve.label
            shown = f"{label} ({one.name})" if count[label] > 1 else label
            origin = f"({one.name})" if len(sources) > 1 else ""  # on its own maps
            found.append(entry._replace(curve=entry.curve._replace(label=shown), origin=origin))
    return found


def _name(path: Path) -> str:
    """The last two parts of a path."""
    return "/".join([part for part in path.parts if part not in (".", "..", "/")][-2:]) or str(path)


def _holdings(feds: Mapping[str, Callable[[], Federation]]) -> tuple[list[Holding], list[str]]:
    """Who holds what in each federation, and why some are not shown."""
    found: list[Holding] = []
    notes: list[str] = []
    for make in list(feds.values())[:MOST]:
        try:
            one = holding(make())
        except InputError as error:
            notes.append(f"Who holds which labels is not shown: {error}.")
        else:
            if one is not None and not any(np.array_equal(one.counts, other.counts) for other in found):
                found.append(one)
    if len(feds) > MOST:
        notes.append(f"Who holds which labels is shown for the first {MOST} of {len(feds)} federations.")
    return found, list(dict.fromkeys(notes))


# ---- run folders ----


def _runs(path: Path) -> Source:
    pairs, notes, places = [], [], []
    for folder in run_folders(path):
        spec = Spec.from_toml(read_toml(folder / SPEC))
        trace, note = _whole_or_part(folder, spec)
        notes += [note] if note else []
        if trace is not None:
            pairs.append((spec, trace))
            places.append(folder)
    if not pairs:
        raise InputError(f"no run in {path} has a round to show; `fedsso resume {path}` goes on with it")
    told = _told_apart([spec for spec, _ in pairs])
    recipes: dict[str, Recipe] = {}
    for spec, shown, folder in zip([s for s, _ in pairs], told, places, strict=True):
        seeds = [other.seed for other in told if other.label == shown.label]
        made = recipe(spec, seeds, str(folder / SPEC))._replace(title=shown.label)
        recipes.setdefault(shown.label, made)
    own = entries([(shown, trace) for shown, (_, trace) in zip(told, pairs, strict=True)])
    return Source(_name(path), own, notes, list(recipes.values()), {s.digest: s.federation for s, _ in pairs})


def _whole_or_part(folder: Path, spec: Spec) -> tuple[Trace | None, str]:
    """A run's trace as far as it goes, and a note if it is not finished."""
    if is_done(folder, spec):
        return load_run(folder).trace, ""
    again = f"`fedsso resume {folder}` completes it."
    if not (folder / TRACE).is_file():
        return None, f"{folder} has no round yet; {again}"
    trace = Trace.load(folder / TRACE, spec.options["eval_every"])
    return trace, f"{folder} is not finished: {len(trace) - 1} of {spec.options['rounds']} rounds; {again}"


def _told_apart(specs: Sequence[Spec]) -> list[Spec]:
    """Runs of one label that differ in more than the seed get the difference into their labels."""
    found = []
    for spec in specs:
        alike = [_plain(other) for other in specs if other.label == spec.label]
        varied = {k: v for k, v in _plain(spec).items() if any(other.get(k) != v for other in alike)}
        found.append(replace(spec, short={**spec.short, **{k: str(v) for k, v in varied.items()}}))
    return found


def _plain(spec: Spec) -> dict[str, Any]:
    """What makes two runs different, but the seed."""
    options = {k: v for k, v in spec.options.items() if k not in (*FREE, "seed")}
    data = {"partition_seed" if k == "seed" else k: v for k, v in spec.data.items()} or {"data": spec.digest[:8]}
    return {"model": spec.model, **options, **data}


# ---- sweeps ----

Pool = dict[tuple[str, int], list[Trace]]  # by label and seed; a folder may hold several sweeps' trials


def _sweep(path: Path) -> Source:
    pool = _pool(path / PARTS if (path / PARTS).is_dir() else path)
    listed, notes = (path / TRIALS).is_file(), []
    if not listed and (path / SETTINGS).is_file():
        notes.append(f"The sweep in {path} is not finished; its command goes on. The trials so far are shown.")
    groups = _listed(path / TRIALS, pool) if listed else _unlisted(pool)
    rest = sum(map(len, pool.values()))
    if rest:
        notes.append(f"{path} holds {rest} more trials, of another sweep or of one under way; they are not shown.")
    chosen = any(by == "val" for _, by in groups)
    if chosen:
        notes.append(
            "Settings were chosen by held-out training rows, on which the grids are judged; the best of each "
            "algorithm was then run on all training rows and is judged by the test rows."
        )
    own = [_entry(label, by, traces, chosen) for (label, by), traces in groups.items()]
    table = read_toml(path / SETTINGS) if (path / SETTINGS).is_file() else {}
    return Source(_name(path), own, notes, _sweep_recipe(path, table), _sweep_data(table))


def _pool(folder: Path) -> Pool:
    there = list(held(folder).values())
    if not there:
        raise InputError(f"{folder} holds no finished trial of this version of fedsso; run the sweep to its end")
    pool: Pool = {}
    for one, trace in zip(there, read(there), strict=True):
        pool.setdefault((str(one.meta["label"]), one.meta["seed"]), []).append(trace)
    return pool


def _listed(path: Path, pool: Pool) -> dict[tuple[str, str], list[Trace]]:
    """The traces of the trials that a finished sweep lists, by label and by the rows they are judged by."""
    groups: dict[tuple[str, str], list[Trace]] = {}
    for row in csv.DictReader(io.StringIO(read_text(path))):
        try:
            label, by, own = row["setting"], row["judged_by"], pool.get((row["setting"], int(row["seed"])), [])
            ends = f"{row['last']} {row['diverged']}"
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not the list of a sweep's trials ({error}); run the sweep again") from error
        found = next((t for t in own if f"{t.final()} {'' if t.diverged is None else t.diverged}" == ends), None)
        if found is not None:
            own.remove(found)
            groups.setdefault((label, by), []).append(found)
    if not groups:
        raise InputError(f"none of the trials that {path} lists are in {PARTS}; run the sweep again")
    return groups


def _unlisted(pool: Pool) -> dict[tuple[str, str], list[Trace]]:
    """One trace of each label and seed."""
    groups: dict[tuple[str, str], list[Trace]] = {}
    for label, seed in sorted(pool, key=lambda key: key[1]):
        groups.setdefault((label, "test"), []).append(pool[label, seed].pop())
    return groups


def _entry(label: str, by: str, traces: Sequence[Trace], chosen: bool) -> Entry:
    """A setting of a grid; where settings were chosen by held-out rows, the grid is those and the test rows lead."""
    algorithm, lead = label.split(" ")[0], chosen and by == "test"
    shown = f"{label} on held-out rows" if by == "val" else label
    return Entry(Curve(shown, tuple(traces), algorithm), {} if lead else _hyper(label), lead)


def _hyper(label: str) -> dict[str, Any]:
    """An algorithm's fields as a label tells them, the others at their defaults."""
    algorithm, *told = label.split(" ")
    fields = fields_of(ALGORITHMS[algorithm]) if algorithm in ALGORITHMS else ()
    return {f.name: f.default for f in fields} | {k: _value(v) for k, _, v in (one.partition("=") for one in told)}


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _sweep_recipe(path: Path, table: Mapping[str, Any]) -> list[Recipe]:
    command = f"fedsso sweep --config {quote(str(path / SETTINGS))}"
    return [Recipe(f"{_name(path)}, the whole sweep", to_toml(table), command)] if table else []


def _sweep_data(table: Mapping[str, Any]) -> dict[str, Callable[[], Federation]]:
    data = table.get("data")
    if not isinstance(data, dict):
        return {}
    named = {"name" if key == "dataset" else key: value for key, value in data.items()}
    return {json.dumps(named, sort_keys=True, default=str): lambda: load(**named)}


# ---- runs on Flower, bare traces ----


def _trace(path: Path) -> Source:
    """A trace alone; the checkpoint beside that of a run on Flower tells its algorithm and settings."""
    trace = Trace.load(path)
    if not len(trace):
        raise InputError(f"{path} has no round to show")
    trace = replace(trace, eval_every=_eval_every(trace))
    told = _flower(path.with_name(CHECKPOINT))
    name = _name(path.parent if path.name == TRACE else path)
    words = re.split(r"[^a-z0-9]+", name.lower())
    guess = next((known for known in ALGORITHMS if known in words), name)
    algorithm = next((known for known, cls in ALGORITHMS.items() if told.startswith(f"{cls.__name__}(")), guess)
    label = f"{algorithm} on Flower" if told else name
    recipes = [Recipe(f"{label}: {name}", told)] if told else []
    return Source(name, [Entry(Curve(label, (trace,), algorithm))], [], recipes, {})


def _eval_every(trace: Trace) -> int:
    """Rounds between evaluations, by the rounds that have one."""
    tests = [column for name, column in trace.columns.items() if name.startswith("test_")]
    rounds = trace["round"][np.isfinite(tests).any(0)].tolist()
    return math.gcd(*rounds) or max(1, int(trace["round"].max()))


def _flower(path: Path) -> str:
    """The settings of a run on Flower as its checkpoint tells them; none where it is another file, or none."""
    try:
        return str(json.loads(bytes(checkpoint.load(path)["about"].tolist()))["settings"])
    except (InputError, KeyError, TypeError, ValueError):
        return ""
