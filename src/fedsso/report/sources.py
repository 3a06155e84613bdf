"""Paths become the content of a report page: what lies in them is found and put together.

`content` does all of it, in four steps:

1. `_sources` finds what there is: several paths may be given, and folders are searched for runs,
   sweeps and traces. `reading.source` reads each one.
2. `_data_names` gives each federation a name. Curves of different federations are not compared.
3. `_together` gives the curves labels that differ, by their data and by their source.
4. `_holdings` loads the first few federations, to show who holds which labels.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..experiment.results import holding
from ..experiment.spec import SPEC, TRACE, data_name
from ..support.intake import inside, is_file, is_folder, user_path
from .page.content import Content, check_targets
from .reading import HELP, has_runs, is_sweep, name_of, source

if TYPE_CHECKING:
    from .page.content import Entry, Holding, Recipe
    from .reading import Data, Source

UNSEEN = "The data per client are not shown"
LEVELS = 2  # of folders below a path that are searched for folders of runs, sweeps and traces
MOST = 3  # federations of which it is shown who holds what


def content(
    paths: Sequence[str | Path],
    *,
    title: str = "",
    targets: Sequence[float] | None = None,
    with_data: bool = False,
) -> Content:
    """Everything that the paths hold, for one page.

    Args:
        paths: Folders of runs or sweeps, traces, or folders that hold such things. What is given
            twice, or once more by a link, counts once.
        title: The heading of the page. By default the names of the paths.
        targets: The accuracies of the table, in (0, 1]. None chooses four that suit.
        with_data: Whether to read files that the settings of a run or a sweep name. The settings
            may be somebody else's, so this is off by default.

    Returns:
        The content, for `page.write`. Its notes say what is not finished, not shown or not found.

    Raises:
        InputError: No path is given, one of them holds nothing to show or is damaged, or a target
            is no accuracy. What is found below a path and cannot be read is left out with a note.
    """
    if not paths:
        raise InputError(f"there is nothing to report: {HELP}")
    check_targets(targets or ())
    places = [user_path("RUN", path) for path in paths]
    sources, left_out = _sources(places, with_data)
    # Sources with the same federation have it under the same key.
    federations: dict[str, Data] = {}
    for one in sources:
        federations |= one.federations
    names = _data_names(sources, federations)
    held, missing = _holdings(list(federations.values()), with_data)
    own, recipes = _together(sources, names)
    notes = []
    if len(names) > 1:
        told = "; ".join(names.values())
        notes.append(f"These runs are of different data: {told}. Numbers compare within one.")
    notes += left_out
    for one in sources:
        notes += one.notes
    notes += missing
    if not title:
        short = dict.fromkeys(map(name_of, places))
        title = f"fedsso: {', '.join(short)}"
    return Content(own, title, "", targets, notes, held, recipes, _goal(sources))


def _goal(sources: Sequence[Source]) -> float | None:
    """The target that settings are compared by: that of the sweeps, if they agree.

    It is None if there is no sweep, or if two of them have different targets. Then the page
    chooses.
    """
    goals = {one.goal for one in sources if one.goal is not None}
    return goals.pop() if len(goals) == 1 else None


# ---- finding ----


def _sources(paths: Sequence[Path], with_data: bool) -> tuple[list[Source], list[str]]:
    """What the paths hold, each folder once, and why something below them is left out.

    An error about a path that the user named is raised. One about a folder that was found below
    it becomes a note: the other runs are still worth a page.
    """
    places: dict[Path, Path] = {}  # by the true path, without links
    for path in paths:
        # If nothing is found, `source` is asked for the path itself: its error says why.
        for place in _places(path, LEVELS) or [path]:
            places[Path(os.path.realpath(place))] = place
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
    """The paths to read: a run, a sweep or a trace; or a folder of runs and its other folders.

    Args:
        path: A file or folder. The trace of a run stands for the folder of the run, which tells
            more about it.
        levels: How many levels of folders below the path are searched.

    Returns:
        Paths for `reading.source`. None if nothing is there.
    """
    if is_file(path):
        of_run = path.name == TRACE and is_file(path.parent / SPEC)
        return [path.parent if of_run else path]
    if is_sweep(path) or is_file(path / SPEC):
        return [path]
    found = []
    if has_runs(path) or is_file(path / TRACE):
        found.append(path)
    if levels:
        for one in inside(path):
            # Run folders are passed over: those of this folder are read together, by the place
            # that was added above.
            if is_folder(one) and not is_file(one / SPEC):
                found += _places(one, levels - 1)
    return found


# ---- names ----


def _data_names(
    sources: Sequence[Source],
    federations: Mapping[str, Data],
) -> dict[str, str]:
    """A name for each federation of the entries, by its key.

    This is the name of the data set or of its files. Where several federations have the same, the
    settings that differ follow: "digits clients=4" and "digits clients=5". If none differ, the
    beginning of the key follows.
    """
    tables: dict[str, Mapping[str, Any]] = {}
    for one in sources:
        for entry in one.entries:
            known = federations.get(entry.data)
            tables[entry.data] = {} if known is None else known.table
    # A bare trace has the key "": nothing tells on which data its run was.
    plain = {}
    for key, table in tables.items():
        unnamed = "own arrays" if key else "unknown data"
        plain[key] = data_name(table) or unnamed
    found = {}
    for key, table in tables.items():
        alike = [tables[other] for other in tables if plain[other] == plain[key]]
        words = [plain[key], *_varied(table, alike)]
        if len(words) == 1 and len(alike) > 1:
            words.append(key[:8])
        found[key] = " ".join(words)
    return found


def _varied(table: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of a table in which some of the others differ, each as text "name=value".

    >>> _varied({"name": "digits", "clients": 4}, [{"name": "digits", "clients": 5}])
    ['clients=4']
    """
    found = []
    for name, value in table.items():
        if any(other.get(name) != value for other in alike):
            found.append(f"{name}={value}")
    return found


def _together(
    sources: Sequence[Source],
    names: Mapping[str, str],
) -> tuple[list[Entry], list[Recipe]]:
    """All entries and recipes, with labels that differ.

    A label tells the data where these differ, and the source where several sources have the same
    label. The origin of an entry tells both: curves of one origin share the maps of their grids.
    A recipe gets the title of the curve whose settings it holds.
    """
    labels = [_labels(one, names) for one in sources]
    count = Counter[str]()
    for own in labels:
        count.update(own.values())
    found: list[Entry] = []
    recipes: list[Recipe] = []
    for one, own in zip(sources, labels, strict=True):
        shown = {}
        for key, label in own.items():
            shown[key] = f"{label} ({one.name})" if count[label] > 1 else label
        for entry in one.entries:
            curve = entry.curve._replace(label=shown[entry.curve.label, entry.data])
            words = [f"on {names[entry.data]}"] if len(names) > 1 else []
            if len(sources) > 1:
                words.append(f"({one.name})")
            origin = " ".join(words)
            found.append(
                entry._replace(
                    curve=curve,
                    origin=origin,
                    data=names[entry.data],
                )
            )
        for data, recipe in one.recipes:
            title = shown.get((recipe.title, data), recipe.title)
            recipes.append(recipe._replace(title=title))
    return found, recipes


def _labels(one: Source, names: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """The labels of a source by label and federation, with the data's name where these differ.

    The label alone is no key: two runs with the same settings on different data have the same
    one.
    """
    found = {}
    for entry in one.entries:
        label = entry.curve.label
        key = (label, entry.data)
        found[key] = f"{label} on {names[entry.data]}" if len(names) > 1 else label
    return found


# ---- who holds what ----


def _holdings(
    federations: Sequence[Data],
    with_data: bool,
) -> tuple[list[Holding], list[str]]:
    """Who holds what in the first federations, and why some are not shown.

    A note quotes nothing that a file holds: the file may be one that somebody else chose.

    Args:
        federations: How to load them, in the order of the page.
        with_data: As in `content`.

    Returns:
        The counts, without federations whose counts are those of another one or whose targets are
        real numbers; and notes, each of them once.
    """
    found: list[Holding] = []
    notes: list[str] = []
    for data in federations[:MOST]:
        if data.table and not (data.named or with_data):
            notes.append(
                f"{UNSEEN}: the data are no set by name; --with-data (in Python with_data=True) "
                f"reads them."
            )
            continue
        try:
            one = holding(data.load())
        except InputError as error:
            # The message of an error may quote a cell of that file. Its kind does not.
            safe = data.named or not data.table
            notes.append(f"{UNSEEN}: {error if safe else error.kind}.")
        else:
            if one is not None and not _is_among(one, found):
                found.append(one)
    if len(federations) > MOST:
        notes.append(
            f"The data per client are shown for the first {MOST} of {len(federations)} federations."
        )
    return found, list(dict.fromkeys(notes))


def _is_among(one: Holding, others: Sequence[Holding]) -> bool:
    """Whether another federation has the same counts.

    Two federations that share the rows out in the same way would give the same picture twice.
    """
    return any(np.array_equal(one.counts, other.counts) for other in others)
