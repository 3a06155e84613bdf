"""Runs as one HTML page that needs no other file and no network: cards, interactive curves, tables,
maps, settings.

Every series stands in the page once, as base64 of float32; `assets/report.js` draws it with Plotly.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from math import prod
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..experiment.trace import Trace
from ..support.files import write_atomic
from ..support.intake import read_bytes, read_text
from ..version import __version__
from .styles import Style, styles
from .tables import Curve, Numbers, default_targets, numbers, rounds_table

ASSETS = Path(__file__).with_name("assets")
MARK = (
    '<meta name="generator" content="fedsso">'  # in assets/report.html: tells our pages from others
)
FEW = 10  # curves that are all drawn at first; of more only the best of each algorithm
METRICS = {
    "test_accuracy": "Test accuracy",
    "train_loss": "Training loss",
    "test_loss": "Test loss",
}
DIAGNOSTICS = {
    "ys": ("yᵀs", "curvature along the last step; negative: the estimate cannot use it as it is"),
    "grad_norm": ("‖g‖", "length of the averaged gradient"),
    "radius": ("radius", "the longest step that the guard allows"),
    "gamma": ("γ", "the estimate starts from I/γ"),
    "alpha": ("client step α", "as the server chose it"),
    "overridden": ("overridden pairs", "1: the pair's curvature was replaced by a bound"),
    "skipped": ("skipped pairs", "1: the pair did not enter the estimate"),
}
SYMBOLS = {"alpha": "α", "eta": "η", "mu": "μ"}
SMALLEST = 4  # settings of a grid that is worth a map
ENDS = (
    "The final accuracy of a sweep's setting is that of the sweep's table: "
    "the mean of the last evaluations."
)
MOST_CLIENTS = 200  # drawn one by one; of more the largest and the smallest
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


class Entry(NamedTuple):
    """A curve with the hyper-parameters that place it on its algorithm's map, one for each
    `origin`.

    If some entries of an origin lead, its others are background: on its maps, but in no card, and
    drawn on demand.
    """

    curve: Curve
    hyper: Mapping[str, Any] = {}
    lead: bool = False
    origin: str = ""
    data: str = ""  # the federation; curves of different ones are not compared
    ends: tuple[
        float, ...
    ] = ()  # accuracy at the end as a sweep counts it, seed by seed; none: the last evaluation


class Recipe(NamedTuple):
    """Settings to reproduce, and the command that takes them from `file`, where there is one."""

    title: str
    text: str
    command: str = ""
    file: str = "spec.toml"


class Holding(NamedTuple):
    """Rows of each label that each client holds, [clients, labels]."""

    title: str
    clients: Sequence[str]
    counts: NDArray[Any]


@dataclass(frozen=True)
class Content:
    """What a page is made of; blank lines in `text` part paragraphs.

    The best setting has the fewest rounds to `goal`, infinity standing for the best end; None: to a
    target that suits.
    """

    entries: Sequence[Entry]
    title: str = ""
    text: str = ""
    targets: Sequence[float] | None = None
    notes: Sequence[str] = ()
    holdings: Sequence[Holding] = ()
    recipes: Sequence[Recipe] = ()
    goal: float | None = None

    @property
    def curves(self) -> list[Curve]:
        """All curves in order."""
        return [entry.curve for entry in self.entries]


def write(path: str | Path, content: Content) -> None:
    """Write the page; a file that lies there is replaced."""
    write_atomic(path, page(content))


def page(content: Content) -> str:
    """The whole page as text."""
    if not content.entries:
        raise InputError("there is no run to report; give at least one")
    view = _View(content)
    plotly = gzip.decompress(read_bytes(ASSETS / "plotly-cartesian.min.js.gz")).decode()
    script = read_text(ASSETS / "report.js")
    parts = {
        "policy": escape(POLICY.format(scripts=" ".join(map(_hash, (plotly, script))))),
        "title": escape(view.title),
        "style": read_text(ASSETS / "report.css"),
        "about": escape(view.about()),
        "text": _paragraphs(content.text),
        "notes": _notes(content.notes),
        "cards": "\n".join(view.cards()),
        "tables": view.tables(),
        "recipes": _recipes(content.recipes),
        "data": _json(view.data()),
        "plotly": plotly,
        "script": script,
    }
    text = Template(read_text(ASSETS / "report.html")).substitute(parts)
    return text.encode(errors="replace").decode()  # a path may hold what is no text


def check_targets(targets: Sequence[float]) -> None:
    """Refuse a target that no accuracy can reach."""
    for target in targets:
        if not 0 < target <= 1:
            raise InputError(
                f"a target is an accuracy above 0 and at most 1, such as 0.9; got {target:g}"
            )


def _hash(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def _json(value: Any) -> str:
    """JSON that cannot end its script element; NaN does not occur in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _paragraphs(text: str) -> str:
    return "\n".join(
        f"<p>{escape(part.strip())}</p>" for part in text.split("\n\n") if part.strip()
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if notes else ""


def _recipes(recipes: Sequence[Recipe]) -> str:
    """Folded up; many of them together once more."""
    blocks = "\n".join(map(_recipe, recipes))
    if len(recipes) > FEW:
        blocks = f"<details><summary>{len(recipes)} settings</summary>\n{blocks}\n</details>"
    return (
        f'<section id="settings"><h2>Settings to reproduce</h2>\n{blocks}\n</section>'
        if recipes
        else ""
    )


def _recipe(recipe: Recipe) -> str:
    how = f'<p class="hint">Save the settings below as {escape(recipe.file)}, then:</p>'
    command = f"{how}<pre><code>{escape(recipe.command)}</code></pre>" if recipe.command else ""
    text = f"<pre><code>{escape(recipe.text)}</code></pre>"
    return f"<details><summary>{escape(recipe.title)}</summary>{command}{text}</details>"


class _View:
    """The content with everything that several parts of the page ask for."""

    def __init__(self, content: Content) -> None:
        self.content, self.entries, self.curves = content, content.entries, content.curves
        self.apart = len({entry.data for entry in self.entries}) > 1
        wished = default_targets(self.curves) if content.targets is None else content.targets
        self.targets = sorted(
            {*wished, *([content.goal] if content.goal is not None and content.goal <= 1 else [])}
        )
        counted = numbers(self.curves, self.targets)
        self.numbers = [
            _ended(n, entry.ends) for n, entry in zip(counted, self.entries, strict=True)
        ]
        self.rows = rounds_table(self.curves, self.targets)
        for row, n, entry in zip(self.rows, self.numbers, self.entries, strict=True):
            row |= {"final accuracy": _end_text(n)} if entry.ends else {}
        self.hits = {
            (i, t): _hits(curve, t) for i, curve in enumerate(self.curves) for t in self.targets
        }
        led = {entry.origin for entry in self.entries if entry.lead}
        self.front = [
            i for i, entry in enumerate(self.entries) if entry.lead or entry.origin not in led
        ]
        self.algorithms = list(dict.fromkeys(self.curves[i].algorithm for i in self.front))
        self.title = content.title or f"fedsso: {', '.join(self.algorithms)}"
        self.target = self._wished_target() or self._common_target()
        self.shown = self._shown()
        self.looks = self._looks()

    # ---- what is chosen ----

    def _wished_target(self) -> float | None:
        """The goal, if some setting reaches it."""
        goal = self.content.goal
        known = goal is not None and any(self.hits.get((i, goal)) is not None for i in self.front)
        return goal if known else None

    def _reached(self, i: int, target: float) -> float | None:
        """Mean rounds of a curve to a target; None unless every seed gets there."""
        return self.hits[i, target]

    def _common_target(self) -> float | None:
        """The highest target that every algorithm reaches with some setting, else the highest that
        one does."""
        able = {
            t: {self.curves[i].algorithm for i in self.front if self._reached(i, t) is not None}
            for t in self.targets
        }
        found = [t for t, names in able.items() if len(names) == len(self.algorithms)]
        return max(found or [t for t, names in able.items() if names], default=None)

    def _rank(self, i: int) -> tuple[float, float]:
        """Fewest rounds to the goal, or else the common target, then the best end."""
        goal = self.target if self.content.goal is None else self.content.goal
        rounds = None if goal is None else self.hits.get((i, goal))
        return np.inf if rounds is None else rounds, self._end(i)

    def _end(self, i: int) -> float:
        """Small is good: the final accuracy, or a loss where there is none."""
        final = self.numbers[i]["final_accuracy"]["mean"]
        if final is not None:
            return -final
        traces = self.curves[i].traces
        losses = [
            float(np.mean([trace.final(name) for trace in traces]))
            for name in ("test_loss", "train_loss")
        ]
        return next((loss for loss in losses if np.isfinite(loss)), np.inf)

    def best(self, indices: Sequence[int]) -> list[int]:
        """The best curve of each algorithm among some, on each federation."""
        found: dict[tuple[str, str], int] = {}
        for i in sorted(indices, key=self._rank):
            found.setdefault((self.entries[i].data, self.curves[i].algorithm), i)
        every = dict.fromkeys(entry.data for entry in self.entries)
        return [
            found[data, name] for data in every for name in self.algorithms if (data, name) in found
        ]

    def _shown(self) -> list[int]:
        return self.front if len(self.front) <= FEW else self.best(self.front)

    def _looks(self) -> dict[int, Style]:
        """The curves shown at first have their algorithms' own colours; the others are shades of
        them."""
        others = [i for i in range(len(self.curves)) if i not in self.shown]
        groups = (self.shown, others)
        return {
            i: look
            for own in groups
            for i, look in zip(own, styles([self.curves[i] for i in own]), strict=True)
        }

    # ---- words ----

    def about(self) -> str:
        traces = [trace for curve in self.curves for trace in curve.traces]
        settings, rounds = (
            len(self.curves),
            max(int(trace["round"].max(initial=0)) for trace in traces),
        )
        counted = ((settings, "setting"), (len(traces), "run"), (rounds, "round"))
        return " · ".join(
            [*(f"{n:,} {word}{'s' * (n != 1)}" for n, word in counted), f"fedsso {__version__}"]
        )

    def cards(self) -> Iterator[str]:
        """The main findings, each with its sentence; no comparison of different federations."""
        if not self.apart:
            yield from self._findings()
        lost = sum(len(n["diverged"]) for n in self.numbers)
        runs = sum(n["seeds"] for n in self.numbers)
        who = ", ".join(dict.fromkeys(n["algorithm"] for n in self.numbers if n["diverged"]))
        yield self._card(
            "Diverged", f"{lost} of {runs}", f"of {who}" if lost else "every run stayed finite"
        )

    def _findings(self) -> Iterator[str]:
        ends = [i for i in self.front if self.numbers[i]["final_accuracy"]["mean"] is not None]
        if ends:
            i = min(ends, key=self._end)
            yield self._card("Best final accuracy", f"{-self._end(i):.4f}", self.curves[i].label, i)
        if self.target is not None:
            yield self._fastest(self.target)
            yield from self._saved(self.target)

    def _fastest(self, target: float) -> str:
        def order(i: int) -> tuple[float, float]:
            return self.hits[i, target] or 0.0, self._end(i)

        fastest: dict[str, int] = {}
        for i in sorted((i for i in self.front if self._reached(i, target) is not None), key=order):
            fastest.setdefault(self.curves[i].algorithm, i)
        first, *others = fastest.values()
        said = ", ".join(
            f"{self.curves[i].algorithm} {_rounds(self._reached(i, target))}" for i in others[:3]
        )
        text = self.curves[first].label + (f"; {said}" if said else "")
        return self._card(
            f"Fewest rounds to {target:g}", _rounds(self._reached(first, target)), text, first
        )

    def _saved(self, target: float) -> Iterator[str]:
        """Bytes until the target, against FedAvg's best setting; nothing where bytes were not
        counted."""
        spent = {i: cost for i in self.front if (cost := _spent(self.curves[i], target))}
        ours, others = (
            [i for i in spent if (self.curves[i].algorithm == "fedavg") is own]
            for own in (True, False)
        )
        if ours and others:
            base, i = min(spent[i] for i in ours), min(others, key=spent.__getitem__)
            share = spent[i] / base - 1
            text = f"{self.curves[i].label}: {_size(spent[i])} to {target:g}, FedAvg {_size(base)}"
            yield self._card("Bytes against FedAvg", f"{share:+.0%}".replace("-", "−"), text, i)

    def _card(self, name: str, value: str, text: str, i: int | None = None) -> str:
        mark = "" if i is None else _swatch(self.looks[i])
        return (
            f'<div class="card"><h3>{escape(name)}</h3><p class="value">{escape(value)}</p>'
            f"<p>{mark}{escape(text)}</p></div>"
        )

    # ---- tables ----

    def tables(self) -> str:
        """One table; of many curves the best of each algorithm first and the whole folded up."""
        said = f'<p class="hint">{ENDS}</p>' if any(entry.ends for entry in self.entries) else ""
        every = list(range(len(self.curves)))
        if len(self.shown) == len(every):
            return said + self._table(every, "Rounds to an accuracy")
        whole = self._table(every, "All settings")
        rest = f"<details><summary>All {len(every)} settings</summary>{whole}</details>"
        one_each = len(self.shown) == len(self.best(self.front))
        best = f"Best setting of each algorithm{' on each data set' * self.apart}"
        return said + self._table(self.shown, best if one_each else "Drawn at first") + rest

    def _table(self, indices: Sequence[int], title: str) -> str:
        names = list(self.rows[0])
        head = "".join(_header(name) for name in names)
        cells = {i: self._values(self.numbers[i]) for i in indices}
        rivals = [] if self.apart else indices
        top = [_best(name, [cells[i][column] for i in rivals]) for column, name in enumerate(names)]
        body = "\n".join(f"<tr>{self._cells(i, cells[i], top)}</tr>" for i in indices)
        caption = (
            f"<caption>{escape(title)}</caption>" if len(self.shown) < len(self.curves) else ""
        )
        return (
            f'<div class="table" tabindex="0" role="region" aria-label="{escape(title)}">'
            f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def _values(self, n: Numbers) -> list[float | str | None]:
        """What a row is sorted by; None for what was not reached."""
        cost = n["megabytes"]
        rounds = [
            stat["mean"] if stat["count"] == n["seeds"] else None
            for stat in n["rounds_to"].values()
        ]
        return [n["label"], *rounds, cost and cost["mean"], n["final_accuracy"]["mean"]]

    def _cells(
        self, i: int, values: Sequence[float | str | None], top: Sequence[float | None]
    ) -> str:
        label, *texts = self.rows[i].values()
        name = f"{_swatch(self.looks[i])}{escape(label)}"
        cells = [f'<th scope="row" data-value="{escape(label)}">{name}</th>']
        for text, value, best in zip(texts, values[1:], top[1:], strict=True):
            mark = ' class="best"' if best is not None and value == best else ""
            cells.append(
                f'<td{mark} data-value="{"" if value is None else value}">{escape(text)}</td>'
            )
        return "".join(cells)

    # ---- numbers for the script ----

    def data(self) -> dict[str, Any]:
        arrays = _Arrays()
        curves = [self._curve(i, arrays) for i in range(len(self.curves))]
        own = [
            name
            for c in curves
            for t in c["traces"]
            for name in t["columns"]
            if name.startswith("test_")
        ]
        names = {
            **METRICS,
            **{
                name: name.removeprefix("test_").replace("_", " ")
                for name in own
                if name not in METRICS
            },
        }
        present = {name for c in curves for t in c["traces"] for name in t["columns"]}
        return {
            "curves": curves,
            "metrics": [
                {"key": key, "name": name} for key, name in names.items() if key in present
            ],
            "axes": [key for key in ("round", "megabytes", "seconds") if key in present],
            "diagnostics": [
                {"key": k, "name": n, "about": a}
                for k, (n, a) in DIAGNOSTICS.items()
                if k in present
            ],
            "targets": self.targets,
            "judged": self._judged(),
            "maps": list(_maps(self.entries)),
            "holdings": [_holding(one, arrays) for one in self.content.holdings],
            "arrays": arrays.texts,
        }

    def _judged(self) -> str:
        """What the maps show at first: rounds to the goal, else to the highest target, by its
        place; or the end."""
        goal, last = self.content.goal, len(self.targets) - 1
        place = self.targets.index(goal) if goal in self.targets else last
        return "final" if last < 0 else str(place)

    def _curve(self, i: int, arrays: _Arrays) -> dict[str, Any]:
        curve, n, look = self.curves[i], self.numbers[i], self.looks[i]
        return {
            "label": curve.label,
            "algorithm": curve.algorithm,
            "color": look.color,
            "dash": _dashes(look, 2.2),
            "shown": i in self.shown,
            "rounds": [self._reached(i, target) for target in self.targets],
            "final": n["final_accuracy"]["mean"],
            "lost": len(n["diverged"]),
            "traces": [
                {"diverged": t.diverged, "columns": _columns(t, arrays)} for t in curve.traces
            ],
        }


class _Arrays:
    """Series as text, equal ones once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[bytes, int] = {}

    def add(self, values: NDArray[Any]) -> int:
        """The place of a series."""
        with np.errstate(
            over="ignore"
        ):  # what single precision cannot hold is infinite, and not drawn
            raw = values.astype("<f4").tobytes()
        if raw not in self._places:
            self._places[raw] = len(self.texts)
            self.texts.append(b64encode(raw).decode())
        return self._places[raw]


def _columns(trace: Trace, arrays: _Arrays) -> dict[str, int]:
    """The columns that hold something; bytes and seconds are summed up over the rounds."""
    sums = {
        "megabytes": np.cumsum(trace["bytes_up"] + trace["bytes_down"]) / 1e6,
        "seconds": np.cumsum(np.nan_to_num(trace["seconds"])),
    }
    found = {"round": trace["round"], **{name: c for name, c in sums.items() if c.any()}}
    for name, column in trace.columns.items():
        if name.startswith("test_") or name in METRICS or name in DIAGNOSTICS:
            counted = name in ("overridden", "skipped")
            if column.any() if counted else np.isfinite(column).any():
                found[name] = column
    return {name: arrays.add(column) for name, column in found.items()}


def _maps(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Each algorithm's grid: the place of every setting's curve; from the third axis on, a map for
    each value."""
    grids: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for i, entry in enumerate(entries):
        if entry.hyper:
            grids.setdefault((entry.curve.algorithm, entry.origin), {})[i] = entry.hyper
    for (name, origin), own in grids.items():
        others = list(_axes(list(own.values())))[2:]
        for fixed in _in_order([{key: hyper[key] for key in others} for hyper in own.values()]):
            within = {
                i: hyper for i, hyper in own.items() if all(hyper[k] == v for k, v in fixed.items())
            }
            title = [name, *(f"{SYMBOLS.get(k, k)}={_tidy(v)}" for k, v in fixed.items()), origin]
            yield from _map(" ".join(title).strip(), within)


def _map(title: str, within: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One map, of one line if there is one axis; none of settings that are picked by hand."""
    axes = _axes(list(within.values()))
    if not axes or len(within) < SMALLEST or prod(map(len, axes.values())) > 1.5 * len(within):
        return
    down, across = ["", *axes] if len(axes) == 1 else list(axes)
    lines, columns = axes.get(down, [None]), axes[across]
    cells: list[list[int | None]] = [[None] * len(columns) for _ in lines]
    for i, hyper in within.items():
        cells[lines.index(hyper.get(down))][columns.index(hyper[across])] = i
    yield {
        "title": title,
        "down": SYMBOLS.get(down, down),
        "across": SYMBOLS.get(across, across),
        "rows": [_tidy(value) if down else "" for value in lines],
        "columns": [_tidy(value) for value in columns],
        "cells": cells,
    }


def _axes(grid: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The hyper-parameters with several values, in order: the client step and the server step
    first."""
    keys = [key for key in (grid[0] if grid else {}) if all(key in hyper for hyper in grid)]
    found = {key: _in_order([hyper[key] for hyper in grid]) for key in keys}
    wide = {key: values for key, values in found.items() if len(values) > 1}
    return {key: wide[key] for key in sorted(wide, key=lambda k: {"alpha": 0, "eta": 1}.get(k, 2))}


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Different ones; numbers ascending, then the rest as it came."""
    found = [v for i, v in enumerate(values) if v not in values[:i]]
    return sorted(found, key=lambda v: (0, v) if isinstance(v, int | float) else (1, 0))


def _holding(holding: Holding, arrays: _Arrays) -> dict[str, Any]:
    """Of very many clients the largest and the smallest."""
    sizes = holding.counts.sum(1)
    chosen, note = np.arange(len(sizes)), ""
    if len(sizes) > MOST_CLIENTS:
        half = MOST_CLIENTS // 2
        order = np.argsort(-sizes, kind="stable")
        chosen = np.concatenate([order[:half], order[-half:]])
        note = f"The {half} largest and the {half} smallest of {len(sizes):,} clients."
    return {
        "title": holding.title,
        "note": note,
        "clients": [holding.clients[i] for i in chosen.tolist()],
        "labels": holding.counts.shape[1],
        "counts": arrays.add(holding.counts[chosen].ravel()),
    }


# ---- small numbers and texts ----


def _ended(n: Numbers, ends: Sequence[float]) -> Numbers:
    """The numbers with the accuracies at the end as a sweep counts them, where they are given."""
    if not ends:
        return n
    sd = float(np.std(ends, ddof=1)) if len(ends) > 1 else None
    return {**n, "final_accuracy": {"mean": float(np.mean(ends)), "sd": sd, "count": len(ends)}}


def _end_text(n: Numbers) -> str:
    """As a sweep's own table has it."""
    stat, lost = n["final_accuracy"], len(n["diverged"])
    spread = "" if stat["sd"] is None else f" ± {stat['sd']:.4f}"
    return f"{stat['mean']:.4f}{spread}" + (f", {lost} of {n['seeds']} diverged" if lost else "")


def _hits(curve: Curve, target: float) -> float | None:
    found = [hit for trace in curve.traces if (hit := trace.rounds_to(target)) is not None]
    return float(np.mean(found)) if len(found) == len(curve.traces) else None


def _spent(curve: Curve, target: float) -> float | None:
    """Mean bytes until the target; None unless every seed gets there."""
    found = [trace.bytes_to(target) for trace in curve.traces]
    return None if None in found else float(np.mean([b for b in found if b is not None]))


def _size(count: float) -> str:
    """Bytes with three figures."""
    units = ("bytes", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, max(0, int(np.log10(max(count, 1)) // 3)))
    return f"{count / 1000**power:.3g} {units[power]}"


def _tidy(value: Any) -> str:
    """A number with four figures at most."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rounds(value: float | None) -> str:
    """At most one decimal."""
    return "never" if value is None else f"{round(value, 1):g}"


def _header(name: str) -> str:
    """A sorted column begins with its best: few rounds, few bytes, much accuracy."""
    first = "descending" if name == "final accuracy" else "ascending"
    button = f'<button type="button">{escape(name)}</button>'
    return f'<th scope="col" aria-sort="none" data-first="{first}">{button}</th>'


def _best(name: str, values: Sequence[float | str | None]) -> float | None:
    """The best of a column with several rows."""
    found = [v for v in values if isinstance(v, int | float)]
    if len(values) < 2 or name == "megabytes":  # each row's megabytes are for a target of its own
        return None
    return (max if name == "final accuracy" else min)(found, default=None)


def _dashes(look: Style, scale: float) -> list[float]:
    return (
        [] if look.linestyle == "-" else [round(scale * length, 1) for length in look.linestyle[1]]
    )


def _swatch(look: Style) -> str:
    dashes = " ".join(f"{length:g}" for length in _dashes(look, 2))
    return (
        '<svg class="swatch" width="26" height="10" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="25" y2="5" stroke="{look.color}" data-color="{look.color}" '
        f'stroke-width="3" stroke-dasharray="{dashes}"/></svg>'
    )
