"""The numbers that `assets/report.js` draws: curves, maps of grids, and who holds which labels.

Every series stands in the page once, as base64 of float32, and is known by its place in a list.
That takes far less room than the numbers as text, and the rounds of equally long runs are one
series. Curves are known by their places, too: a cell of a map names the curve of its setting.

What this module names, the script reads under the same name. Change both together.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tables import FINAL, FINAL_LOSS
from .sections import dashes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...experiment.trace import Trace
    from .content import Entry, Holding
    from .view import Item, View

# What may be drawn upwards, in this order, with the names on the page. The first of which some
# trace has a curve is drawn at first.
METRICS = {
    "test_accuracy": "Test accuracy",
    "train_loss": "Training loss",
    "test_loss": "Test loss",
}
# What the server of a second-order algorithm saw, with a name and a meaning. Each has a panel.
DIAGNOSTICS = {
    "ys": ("yᵀs", "curvature along the last step; negative: the estimate cannot use it as it is"),
    "grad_norm": ("‖g‖", "length of the averaged gradient"),
    "radius": ("radius", "the longest step that the guard allows"),
    "gamma": ("γ", "the estimate starts from I/γ, of a network from its metric over γ"),
    "stretch": ("stretch", "length of the step, in lengths of FedAvg's"),
    "falls": ("falls", "how often the guard went back to an earlier model"),
    "alpha": ("client step α", "as the server chose it"),
    "overridden": ("overridden pairs", "1: the pair's curvature was replaced by a bound"),
    "skipped": ("skipped pairs", "1: the pair did not enter the estimate"),
}
COUNTS = ("overridden", "skipped")  # diagnostics of which 0 says nothing
# The letters that the paper has for hyper-parameters.
SYMBOLS = {"alpha": "α", "eta": "η", "mu": "μ"}
SMALLEST = 4  # settings of a grid that is worth a map
MOST_CLIENTS = 200  # drawn one by one; of more the largest and the smallest

Hyper = Mapping[str, Any]


def data(view: View) -> dict[str, Any]:
    """Everything that the script draws, as values that JSON can hold.

    - `curves`: one dictionary for each item of the view, in their order
    - `metrics`, `axes`, `diagnostics`: what some trace has, so that the page offers nothing empty;
      `first`: the metric that is drawn at first
    - `targets`: the accuracies of the table; `goal`: the one that a sweep was to reach, or None;
      `judged`: what maps show at first
    - `final`: what the number `final` of a curve is, by the name of the table's last column
    - `maps`, `holdings`: what is drawn below the tables
    - `arrays`: the series, to which the others refer by their places
    """
    arrays = _Arrays()
    curves = [_curve(view, item, arrays) for item in view.items]
    present: dict[str, None] = {}  # the columns that some trace has, in their order
    for curve in curves:
        for trace in curve["traces"]:
            present |= dict.fromkeys(trace["columns"])
    return {
        "curves": curves,
        "metrics": _metrics(present),
        "first": _first_metric(view),
        "axes": [key for key in ("round", "megabytes", "seconds") if key in present],
        "diagnostics": _diagnostics(present),
        "targets": view.targets,
        "goal": view.content.goal if view.content.goal in view.targets else None,
        "judged": _judged(view),
        "final": FINAL_LOSS if view.by_loss else FINAL,
        "maps": list(_maps(view.content.entries)),
        "holdings": [_holding(one, arrays) for one in view.content.holdings],
        "arrays": arrays.texts,
    }


class _Arrays:
    """A list of series as text, in which equal series stand once.

    Equality is that of the bytes in single precision, which is what the page has.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[bytes, int] = {}

    def add(self, values: NDArray[Any]) -> int:
        """The place of a series in the list, to which it is added if it is new.

        The script reads little-endian numbers, as nearly every machine has them. What single
        precision cannot hold becomes infinite, and is not drawn.
        """
        with np.errstate(over="ignore"):
            raw = values.astype("<f4").tobytes()
        if raw not in self._places:
            self._places[raw] = len(self.texts)
            self.texts.append(b64encode(raw).decode())
        return self._places[raw]


# ---- curves ----


def _curve(
    view: View,
    item: Item,
    arrays: _Arrays,
) -> dict[str, Any]:
    """One curve: how it looks, its numbers, and its traces.

    `rounds` has one entry for each target: mean rounds, or None unless every seed gets there.
    `lost` counts the seeds that diverged. Names of columns are those of the trace.
    """
    every = item.curve.traces
    # A seed without such pairs counts as 0 in the mean, if another seed has some.
    counts = []
    for name in COUNTS:
        if any(trace[name].any() for trace in every):
            counts.append(name)
    traces = []
    for trace in every:
        columns = _columns(trace, counts, arrays)
        traces.append({"diverged": trace.diverged, "columns": columns})
    return {
        "label": item.label,
        "algorithm": item.algorithm,
        "color": item.look.color,
        "dash": dashes(item.look, 2.2),
        "shown": item in view.shown,
        "rounds": [item.hits[target] for target in view.targets],
        "final": view.end_of(item),
        "lost": len(item.numbers["diverged"]),
        "traces": traces,
    }


def _columns(
    trace: Trace,
    counts: Sequence[str],
    arrays: _Arrays,
) -> dict[str, int]:
    """The columns that hold something; bytes and seconds are summed up over the rounds.

    A column without a finite value is left out.

    Args:
        trace: One seed.
        counts: Those of `COUNTS` that are not 0 in every round of every seed of the curve. The
            others are left out.
        arrays: The series of the page.

    Returns:
        The place of each column in the list of series, by its name.
    """
    found = {"round": trace["round"]}
    spent = trace["bytes_up"] + trace["bytes_down"]
    megabytes = np.cumsum(spent) / 1e6
    # A run that did not count its bytes has only zeros.
    if megabytes.any():
        found["megabytes"] = megabytes
    # Sums go on over rounds whose time is not known.
    seconds = np.cumsum(np.nan_to_num(trace["seconds"]))
    if seconds.any():
        found["seconds"] = seconds
    for name, column in trace.columns.items():
        if not _is_drawn(name):
            continue
        told = name in counts if name in COUNTS else np.isfinite(column).any()
        if told:
            found[name] = column
    return {name: arrays.add(column) for name, column in found.items()}


def _is_drawn(name: str) -> bool:
    """Whether a column is one that the page can draw. Users' own metrics begin with "test_"."""
    return name.startswith("test_") or name in METRICS or name in DIAGNOSTICS


def _metrics(present: Mapping[str, None]) -> list[dict[str, str]]:
    """What may be drawn upwards: the usual metrics, then those that the user measured.

    `present` has the columns that some trace has, in their order.
    """
    names = dict(METRICS)
    for name in present:
        if name.startswith("test_") and name not in METRICS:
            names[name] = name.removeprefix("test_").replace("_", " ")
    found = []
    for key, name in names.items():
        if key in present:
            found.append({"key": key, "name": name})
    return found


def _first_metric(view: View) -> str:
    """The metric that is drawn at first: one that some trace has in more than one round.

    A run on Flower may be evaluated after its last round alone. Its training loss is a curve, its
    accuracy a dot. "" leaves the choice to the page.
    """
    for name in METRICS:
        for item in view.items:
            known = [np.isfinite(trace[name]).sum() for trace in item.curve.traces]
            if max(known) > 1:
                return name
    return ""


def _diagnostics(present: Mapping[str, None]) -> list[dict[str, str]]:
    """The diagnostics that some trace has, with their names and meanings."""
    found = []
    for key, (name, meaning) in DIAGNOSTICS.items():
        if key in present:
            found.append({"key": key, "name": name, "about": meaning})
    return found


def _judged(view: View) -> str:
    """What the maps show at first.

    This is the place of the target that the cards compare by, so that some cell has a number. If
    no setting reaches any target, it is the word "final", for the value at the end.
    """
    if view.target is None:
        return "final"
    return str(view.targets.index(view.target))


# ---- maps of grids ----


def _maps(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """The grid of each algorithm and origin; from the third axis on, a map for each value.

    A map has two axes. A grid over alpha, eta and form has one map for each form.
    """
    grids: dict[tuple[str, str], dict[int, Hyper]] = {}
    for i, entry in enumerate(entries):
        if entry.hyper:
            key = (entry.curve.algorithm, entry.origin)
            grids.setdefault(key, {})[i] = entry.hyper
    for (name, origin), own in grids.items():
        others = list(_axes(list(own.values())))[2:]
        values = [_part(hyper, others) for hyper in own.values()]
        for fixed in _in_order(values):
            within = {}
            for i, hyper in own.items():
                if _part(hyper, others) == fixed:
                    within[i] = hyper
            # The title tells what all cells of this map share.
            words = [name]
            for key, value in fixed.items():
                words.append(f"{_symbol(key)}={_tidy(value)}")
            words.append(origin)
            title = " ".join(words).strip()
            yield from _map(title, within)


def _part(hyper: Hyper, names: Sequence[str]) -> dict[str, Any]:
    """Some of the hyper-parameters."""
    return {name: hyper[name] for name in names}


def _map(title: str, within: Mapping[int, Hyper]) -> Iterator[dict[str, Any]]:
    """One map, of one line if there is one axis; its cells are places of curves.

    Settings that were picked by hand leave too many cells empty, and have no map. Neither has a
    grid of fewer than four settings, which the table shows as well.

    Args:
        title: The heading of the map.
        within: What places each setting on the map (`Entry.hyper`), by the place of its curve.

    Yields:
        The map, if there is one. A cell without a setting is None.
    """
    axes = _axes(list(within.values()))
    cells_wanted = prod(map(len, axes.values()))
    settings = len(within)
    if not axes or settings < SMALLEST or cells_wanted > 1.5 * settings:
        return
    # Two axes at most: the caller has fixed the others.
    *above, across = axes
    down = above[0] if above else ""
    lines = axes.get(down, [None])
    columns = axes[across]
    cells: list[Any] = []
    for _ in lines:
        cells.append([None] * len(columns))
    for i, hyper in within.items():
        line = lines.index(hyper.get(down))
        column = columns.index(hyper[across])
        cells[line][column] = i
    yield {
        "title": title,
        "down": _symbol(down),
        "across": _symbol(across),
        "rows": [_tidy(value) if down else "" for value in lines],
        "columns": [_tidy(value) for value in columns],
        "cells": cells,
    }


def _axes(grid: Sequence[Hyper]) -> dict[str, list[Any]]:
    """The hyper-parameters with several values: first the client step and the server step.

    Those that only some of the settings have are no axes.

    Returns:
        The values of each one in order, by its name.
    """
    wide: dict[str, list[Any]] = {}
    for key in grid[0] if grid else ():
        if all(key in hyper for hyper in grid):
            values = _in_order([hyper[key] for hyper in grid])
            if len(values) > 1:
                wide[key] = values
    # Most grids vary the two steps, so these make the axes of the maps.
    first = [key for key in ("alpha", "eta") if key in wide]
    others = [key for key in wide if key not in first]
    return {key: wide[key] for key in (*first, *others)}


def _in_order(values: Sequence[Any]) -> list[Any]:
    """The different values; numbers ascend, then the rest follows as it came.

    Values need not be hashable: a schedule of steps is a dictionary.

    >>> _in_order([0.3, "auto", 0.1, 0.3])
    [0.1, 0.3, 'auto']
    """
    found = []
    for value in values:
        if value not in found:
            found.append(value)
    numbers = [value for value in found if isinstance(value, int | float)]
    others = [value for value in found if not isinstance(value, int | float)]
    return [*sorted(numbers), *others]


def _symbol(name: str) -> str:
    """The letter that the paper has for a hyper-parameter, else its name."""
    return SYMBOLS.get(name, name)


def _tidy(value: Any) -> str:
    """A number with four figures at most, a schedule as in labels, the rest as it is written.

    >>> _tidy({"scale": 0.1, "shift": 0.0, "power": 1.0})
    'decay(0.1,0,1)'
    """
    if isinstance(value, dict):
        return f"decay({','.join(map(_tidy, value.values()))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- who holds what ----


def _holding(holding: Holding, arrays: _Arrays) -> dict[str, Any]:
    """Who holds which labels; of very many clients the largest and the smallest.

    The script draws a line for each client, and hundreds of lines cannot be told apart.
    """
    sizes = holding.counts.sum(1)
    chosen = np.arange(len(sizes))
    note = ""
    if len(sizes) > MOST_CLIENTS:
        half = MOST_CLIENTS // 2
        order = np.argsort(-sizes, kind="stable")
        largest = order[:half]
        smallest = order[-half:]
        chosen = np.concatenate([largest, smallest])
        note = f"The {half} largest and the {half} smallest of {len(sizes):,} clients."
    return {
        "title": holding.title,
        "note": note,
        "clients": [holding.clients[i] for i in chosen.tolist()],
        "labels": list(holding.labels or map(str, range(holding.counts.shape[1]))),
        "counts": arrays.add(holding.counts[chosen].ravel()),
    }
