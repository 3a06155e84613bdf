"""What one path holds: a run, a folder of runs, a sweep, a run on Flower, or a bare trace.

`source` tells these apart by the names of the files, reads them, and returns a `Source`: curves
with labels, notes for the reader, settings to reproduce, and how to load the data. `sources.py`
puts the sources of several paths on one page.

    parts/                                  a sweep
    spec.toml, trace.csv                    a run, whose checkpoint tells whether it is finished
    trace.csv, checkpoint.safetensors       a run on Flower
    trace.csv alone, under any name         a bare trace

Folders may come from somebody else. What they hold is read within limits (`support.intake`), and
their settings are not followed to other files unless the user says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..algorithms import ALGORITHMS
from ..data import datasets, load
from ..engine import checkpoint
from ..errors import InputError
from ..experiment.reading import Kept, read_sweep
from ..experiment.results import HELD_OUT, Results, entries, recipe
from ..experiment.revive import federation_of
from ..experiment.run import Run, is_done, load_run, run_folders
from ..experiment.spec import CHECKPOINT, SPEC, TRACE, Spec
from ..experiment.store import PARTS, SETTINGS, TRIALS
from ..experiment.trace import Trace
from ..support.files import to_toml
from ..support.intake import (
    inside,
    is_file,
    is_folder,
    opened,
    parse_json,
    read_bytes,
    zip_archive,
)
from ..support.seal import check as check_seal
from ..support.seal import read_sealed_toml
from .by_client import saved_by_client
from .page.content import Entry, Recipe
from .tables import Curve

if TYPE_CHECKING:
    from pathlib import Path

    from ..data import Federation
    from .page.content import Served

HELP = (
    "give a run's folder, a folder of run folders, the --out folder of a sweep, the checkpoint_dir "
    "of a run on Flower, "
    "or a trace.csv"
)
PATHS = {"files", "data_dir", "vectors"}  # settings of a federation that name files


class Data(NamedTuple):
    """The settings of a federation, and a function that loads it.

    The function is called only for a page that shows who holds which labels, or to get the digest
    of a sweep's federation: loading can take long, and a run's traces are enough for everything
    else.
    """

    # What `fedsso.load` takes, by name. Empty for arrays of one's own, which no file can hold.
    table: Mapping[str, Any]
    # Raises InputError where the data are gone or are not what they were.
    load: Callable[[], Federation]

    @property
    def named(self) -> bool:
        """Whether it comes from the own data folder, by the name of a data set.

        If so, no path that somebody else chose is read, and the data are loaded without asking. A
        data set without files, such as "synthetic", and one whose settings name files do not
        count.
        """
        if PATHS & self.table.keys():
            return False
        name = self.table.get("name")
        return any(one.name == name and bool(one.forms) for one in datasets())


class Source(NamedTuple):
    """What one path holds.

    Entries and recipes name their federation by its key in `federations`: its digest, or its
    settings where there is no digest. The key is "" where the federation is unknown.
    """

    # For labels, where several sources have curves of the same name.
    name: str
    # The curves. Their `data` is a key of `federations`, not yet a name for people.
    entries: list[Entry]
    # What a reader should know: a run that is not finished, trials that are missing.
    notes: list[str]
    # The key of a federation, and the settings of runs on it.
    recipes: list[tuple[str, Recipe]]
    # How to load each federation, by its key.
    federations: dict[str, Data]
    # The target of a sweep. Infinity where the sweep has none, None where the path is no sweep.
    goal: float | None = None


def source(path: Path, with_data: bool = False) -> Source:
    """Read what a path holds; the files in it decide what it is.

    Args:
        path: A file or a folder.
        with_data: Whether files that the settings of a sweep name may be read. The settings may
            be somebody else's.

    Returns:
        The curves and all that the page says about them.

    Raises:
        InputError: There is nothing at the path, nothing in it to show, or it is damaged. The
            message says what can be given instead.
    """
    if is_file(path):
        return _trace(path)
    if not is_folder(path):
        what = "neither a file nor a folder" if path.exists() else "not there"
        raise InputError(f"there is no run: {path} is {what}; {HELP}")
    # The order matters: a run's folder also has a trace.csv, which alone would look like a bare
    # trace.
    if is_sweep(path):
        return _sweep(path, with_data)
    if is_file(path / SPEC) or has_runs(path):
        return _runs(path, with_data)
    if is_file(path / TRACE):
        return _trace(path / TRACE)
    raise InputError(f"{path} holds nothing to report: {HELP}")


def has_runs(path: Path) -> bool:
    """Whether there are run folders in a folder.

    Only the folders directly in it are looked at, as `fedsso resume` and `load_runs` do.
    """
    return any(is_folder(one) and is_file(one / SPEC) for one in inside(path))


def is_sweep(path: Path) -> bool:
    """Whether a folder is a sweep's, or holds parts of one without runs beside them.

    The second is the folder `parts` itself, or one in which somebody has collected such files.
    """
    if is_folder(path / PARTS):
        return True
    if is_file(path / SPEC) or has_runs(path):
        return False
    return any(_is_part(file) for file in inside(path) if file.suffix == ".npz")


def _is_part(path: Path) -> bool:
    """Whether an npz file is a part of a sweep, which alone holds an array `meta` about its trials.

    Only the list of contents is read. A file that cannot be opened is no part.
    """
    try:
        with opened(path) as file, zip_archive(file) as archive:
            return "meta.npy" in archive.namelist()
    except Exception:  # zipfile lets through whatever damaged bytes lead to
        return False


def name_of(path: Path) -> str:
    """A short name for a path: its last two parts, as in "runs/a".

    The last part alone is often a number or a word such as "out", which tells little.

    >>> from pathlib import Path
    >>> name_of(Path("projects/heart/runs/a"))
    'runs/a'
    """
    parts = [part for part in path.parts if part not in (".", "..", "/")]
    return "/".join(parts[-2:]) or str(path)


# ---- run folders ----


def _runs(path: Path, with_data: bool) -> Source:
    """The runs of a folder, grouped by their federations.

    Runs on different data become results of their own, because settings are compared only within
    one federation. A run that has no round yet is left out with a note. InputError if all are.
    """
    found: dict[str, list[Run]] = {}  # by the digest of the federation
    folders: dict[str, Path] = {}  # of the finished runs, by their identities
    notes = []
    for folder in run_folders(path):
        spec = Spec.load(folder / SPEC)
        trace, note = _whole_or_part(folder, spec)
        if note:
            notes.append(note)
        else:
            folders[spec.identity] = folder
        if trace is not None:
            found.setdefault(spec.digest, []).append(Run(spec, trace))
    if not found:
        raise InputError(
            f"no run in {path} has a round to show; `fedsso resume {path}` continues it"
        )
    curves: list[Entry] = []
    recipes: list[tuple[str, Recipe]] = []
    federations = {}
    for digest, runs in found.items():
        results = Results(runs)
        spec = runs[0].spec
        # The page may ask for the federation several times: it is loaded once.
        data = Data(spec.data, cache(partial(federation_of, spec)))
        federations[digest] = data
        for setting, entry in zip(results.settings(), entries(results), strict=True):
            own = [folders.get(run.spec.identity) for run in setting.runs]
            asked = _asked(own, data) if data.named or with_data else None
            curves.append(entry._replace(data=digest, by_client=asked))
            recipes.append((digest, recipe(setting)))
    return Source(name_of(path), curves, notes, recipes, federations)


def _asked(folders: Sequence[Path | None], data: Data) -> Callable[[], Served] | None:
    """What asks the models in some folders how they serve each client.

    None if a run is not finished, or if its data were arrays that no file holds.
    """
    finished = [folder for folder in folders if folder is not None]
    if len(finished) < len(folders) or not data.table:
        return None
    return lambda: saved_by_client(finished, data.load())


def _whole_or_part(folder: Path, spec: Spec) -> tuple[Trace | None, str]:
    """A run's trace as far as it goes, and a note if the run is not finished.

    The trace is None if the run has no round to show; the note is "" if it is finished.
    """
    if is_done(folder, spec):
        return load_run(folder).trace, ""
    again = f"`fedsso resume {folder}` completes it."
    nothing = f"{folder} has no round yet; {again}"
    if not is_file(folder / TRACE):
        return None, nothing
    trace = _ended(Trace.load(folder / TRACE, spec.options["eval_every"]))
    if not len(trace):
        return None, nothing
    done = len(trace) - 1
    rounds = spec.options["rounds"]
    note = f"{folder} is not finished: {done} of {rounds} rounds; {again}"
    # All rounds are there, but `is_done` has refused the checkpoint.
    if done == rounds:
        note = f"{folder} has a damaged checkpoint; its trace is shown as it stands, and {again}"
    return trace, note


# ---- sweeps ----


def _sweep(path: Path, with_data: bool) -> Source:
    """A sweep: all settings of its grids, and those that were chosen.

    A sweep that was called from Python has no sweep.toml. Then there is nothing to reproduce it
    with. Its target is in the list of its trials, which is written at the end; until then the page
    chooses a goal of its own. The same holds where a sweep of the command has left its sweep.toml
    in the folder before.
    """
    kept = read_sweep(path)
    settings = path / SETTINGS
    table = read_sealed_toml(settings) if is_file(settings) else {}
    run = (kept.results.judged or kept.results)[0]
    if run.judged_by == "val":
        # The runs that are there know the held-out rows only, not the whole federation.
        federations = _sweep_data(table, with_data)
    else:
        table = table if _is_of(table, run.spec) else {}
        federations = {run.spec.digest: _run_data(run.spec, table)}
    data = next(iter(federations), "")
    curves = [entry._replace(data=data) for entry in entries(kept.results)]
    goal = None
    if table or kept.finished:
        goal = math.inf if kept.results.target is None else kept.results.target
    notes = _sweep_notes(path, kept)
    recipes = _sweep_recipe(path, table)
    return Source(name_of(path), curves, notes, recipes, federations, goal)


def _is_of(table: Mapping[str, Any], spec: Spec) -> bool:
    """Whether a sweep.toml can be that of a run: data, model and rounds are the same."""
    asked = table.get("data")
    if not isinstance(asked, dict):
        return False
    # Where the files lie is no part of a run's settings.
    asked = {key: value for key, value in asked.items() if key != "data_dir"}
    data = spec.to_toml().get("data")
    told = (table.get("model"), table.get("rounds"), asked)
    return told == (spec.model, spec.options["rounds"], data)


def _run_data(spec: Spec, table: Mapping[str, Any]) -> Data:
    """The federation of a sweep's run; its sweep.toml tells the folder of the files, if any."""
    data = dict(spec.data)
    if "data_dir" in table.get("data", {}):
        data["data_dir"] = table["data"]["data_dir"]
    return Data(data, partial(federation_of, replace(spec, data=data)))


def _sweep_notes(path: Path, kept: Kept) -> list[str]:
    """What a reader of the page should know about a sweep's folder.

    That is: it is unfinished, its settings are not sealed, some of its trials are missing, it
    holds trials that are not its own, or its settings were chosen by held-out rows.
    """
    notes = []
    settings = path / SETTINGS
    again = "call `fedsso.sweep` with the same arguments again"
    if is_file(settings):
        again = "run the same `fedsso sweep` command again"
    # Parts that somebody has put elsewhere do not tell whether their sweep is finished.
    if not kept.finished and is_folder(path / PARTS):
        notes.append(
            f"The sweep in {path} is not finished, and the trials so far are shown: {again} to "
            f"complete it."
        )
    if is_file(settings) and check_seal(read_bytes(settings)) is None:
        notes.append(
            f"{settings} carries no checksum: an earlier version wrote it, or somebody changed it."
        )
    if kept.missing:
        notes.append(
            f"{kept.missing} trials that {path / TRIALS} lists are not in {PARTS}, and not shown: "
            f"{again} to have them."
        )
    if kept.others:
        notes.append(
            f"{path} holds {kept.others} more trials, of another sweep or of one under way; they "
            f"are not shown."
        )
    if kept.results.judged is not None:
        notes.append(HELD_OUT)
    return notes


def _sweep_recipe(path: Path, table: Mapping[str, Any]) -> list[tuple[str, Recipe]]:
    """The settings of the whole sweep, where its folder has them: one recipe, or none."""
    if not table:
        return []
    title = f"{name_of(path)}, the whole sweep"
    command = f"fedsso sweep --config {SETTINGS}"
    return [("", Recipe(title, to_toml(table), command, SETTINGS))]


def _sweep_data(table: Mapping[str, Any], with_data: bool) -> dict[str, Data]:
    """The federation of a sweep by its digest, as its settings file tells it.

    It is for a sweep of which there are only runs on a part of the training rows: these do not
    know the digest of the whole federation, and neither does the file. The federation has to be
    loaded to know it. With the same key, runs and a sweep on the same data are compared on one
    page. The settings take the place of the digest where the federation must not or cannot be
    loaded.

    Args:
        table: What sweep.toml holds. Its `data` has the keywords of `load`, but for the name of
            the data set, which is called `dataset` there.
        with_data: As in `source`.

    Returns:
        One federation, or none where the settings do not tell the data.
    """
    data = table.get("data")
    if not isinstance(data, dict):
        return {}
    named = {"name" if key == "dataset" else key: value for key, value in data.items()}
    # The page may ask for the federation several times: it is loaded once.
    found = Data(named, cache(lambda: _loaded(named)))
    key = json.dumps(named, sort_keys=True, default=str)
    if found.named or with_data:
        with suppress(InputError):
            key = found.load().digest()
    return {key: found}


def _loaded(table: Mapping[str, Any]) -> Federation:
    """The federation of a table of settings; InputError where they are none.

    A table that somebody changed by hand may lack the name of the data set.
    """
    try:
        return load(**table)
    except TypeError as error:
        raise InputError(f"these are not settings of a data set ({error})") from None


# ---- runs on Flower, bare traces ----


def _trace(path: Path) -> Source:
    """A trace alone.

    A run on Flower leaves a checkpoint beside it, which tells the algorithm and its settings. Of
    any other trace the algorithm is guessed from the words of its path: it decides the colour.

    Raises InputError if the file is no trace, or has no row.
    """
    try:
        trace = Trace.load(path)
    except InputError as error:
        raise InputError(f"{error}; {HELP}") from error
    if not len(trace):
        raise InputError(f"{path} has no round to show")
    trace = _ended(replace(trace, eval_every=_eval_every(trace)))
    told = _flower(path.with_name(CHECKPOINT))
    name = name_of(path.parent if path.name == TRACE else path)
    algorithm = _algorithm(told, name)
    label = f"{algorithm} on Flower" if told else name
    recipes = [("", Recipe(label, told))] if told else []
    entry = Entry(Curve(label, (trace,), algorithm))
    return Source(name, [entry], [], recipes, {})


def _algorithm(told: str, name: str) -> str:
    """The name of an algorithm in the registry, for the colour of a curve.

    Args:
        told: The settings of a run on Flower, which begin with the name of the algorithm's class,
            as in "FedSSO(alpha=0.1". Empty for other traces.
        name: The name of the path. The first algorithm that is a whole word of it counts.

    Returns:
        The name of the algorithm, or else the name of the path: any text has a colour.

    >>> _algorithm("", "runs/fedavg-1")
    'fedavg'
    """
    for known, cls in ALGORITHMS.items():
        if told.startswith(f"{cls.__name__}("):
            return known
    words = re.split(r"[^a-z0-9]+", name.lower())
    for known in ALGORITHMS:
        if known in words:
            return known
    return name


def _ended(trace: Trace) -> Trace:
    """The trace, with the round in which its run diverged.

    A file does not say so, but from that round on the accuracy is 0 and no loss is a number. A
    round that was not evaluated has the accuracy NaN, so it does not count as diverged. Without
    any accuracy, as for real targets, the losses alone tell: such a run has diverged if a round
    that was to be evaluated has none, and every round after it has none either.
    """
    tested = np.isfinite(trace["test_loss"])
    if np.isnan(trace["test_accuracy"]).all():
        # The loss of the round that explodes may be finite, so the round may be one too late.
        alive = tested | np.isfinite(trace["train_loss"])
        due = np.flatnonzero(trace["round"] % trace.eval_every == 0)
        if not len(due) or alive[due[-1]]:
            return trace
    else:
        alive = tested | (trace["test_accuracy"] != 0)
    going = np.flatnonzero(alive)
    first = int(going[-1]) + 1 if len(going) else len(trace)
    if first == len(trace):
        return trace
    return replace(trace, diverged=int(trace["round"][first]))


def _eval_every(trace: Trace) -> int:
    """Rounds between evaluations, by the rounds that have one.

    It is their greatest common divisor, so it is too small where the last round is no multiple of
    the others. This does no harm: a round without a value reaches no target.
    """
    tests = [column for name, column in trace.columns.items() if name.startswith("test_")]
    rounds = trace["round"][np.isfinite(tests).any(0)].tolist()
    # gcd is 0 if nothing but round 0 was evaluated, or nothing at all.
    return math.gcd(*rounds) or max(1, int(trace["round"].max()))


def _flower(path: Path) -> str:
    """The settings of a run on Flower as its checkpoint tells them; "" for any other file.

    A checkpoint is not needed to draw a trace, so whatever is wrong with it does not matter here.
    """
    try:
        about = checkpoint.text_of(checkpoint.load(path)["about"])
        return str(parse_json(about, path)["settings"])
    except (InputError, KeyError, TypeError, ValueError):
        return ""
