"""What a sweep has found: a table of the best settings, a list of all trials, and pictures."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from ..experiment.results import ACCURACY, LAST, Results, Setting
from ..experiment.store import DIGITS, TRIALS
from ..support.files import write_atomic
from . import figures, plots, tables

TABLE = "table.md"
CURVES = "curves.png"
GRID = "grid.png"


def explain_choice(results: Results) -> str:
    """How the best settings were chosen, in sentences."""
    count = max(len(setting.seeds) for setting in results.settings())
    seeds = f"{count} seeds" if count > 1 else "one seed"
    if results.target is not None:
        rule = (
            f"the fewest mean rounds until {results.target:g} is first reached, over {seeds}; a "
            f"miss counts as never, and among equals the accuracy at the end decides"
        )
    elif results.metric() == ACCURACY:
        rule = f"the best mean accuracy at the end over {seeds}; a run that diverges counts as 0"
    else:
        rule = f"the smallest mean test loss at the end over {seeds}"
    rows = "Chosen and judged by the same test rows."
    if results.judged is not None:
        rows = (
            "Chosen by a quarter of each client's training rows, held out; then run on all "
            "training rows and judged by the test rows."
        )
    what = "accuracy" if results.metric() == ACCURACY else "test loss"
    end = f"the mean of the last {LAST} evaluations, of a short run of its last quarter"
    return f"Best setting: {rule}. {rows} Final {what}: {end}."


def works(own: Results, target: float | None) -> tuple[int, str]:
    """How many settings of a grid are of use, and what that means."""
    if target is None:
        return sum(not setting.diverged for setting in own.settings()), "do not diverge"
    return own.working(target), f"reach {target:g} with every seed"


def winners_table(results: Results) -> list[dict[str, str]]:
    """One row of text for each algorithm: its best setting and how it fares."""
    target = results.target
    metric = results.metric()
    winners = results.winners()
    rows = []
    for name, own in results.algorithms().items():
        best = winners[name]
        row = {"algorithm": name, "best setting": _told(best, own)}
        if target is not None:
            counted = tables.rounds_table([best.curve()], [target])[0]
            row[f"rounds to {target:g}"] = list(counted.values())[1]
        what = "final accuracy" if metric == ACCURACY else "final test loss"
        row[what] = _final(best, metric)
        count, meaning = works(own, target)
        row["of the grid"] = f"{count} of {len(own.settings())} {meaning}"
        rows.append(row)
    return rows


def _told(best: Setting, own: Results) -> str:
    """The values that the grid varies, then what else is not at its default."""
    shown = {}
    for name in own.axes():
        value = best.spec.hyper[name]
        shown[name] = f"{value:g}" if isinstance(value, float) else str(value)
    shown |= best.spec.short
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "its defaults"


def _final(setting: Setting, metric: str) -> str:
    """Mean and sample standard deviation over the seeds."""
    values = setting.finals(metric)
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    lost = f", {setting.diverged} of {len(values)} diverged" if setting.diverged else ""
    return f"{np.mean(values):.4f}{spread}{lost}"


def write(folder: Path, results: Results) -> None:
    """Write the table of the best settings and the list of all trials."""
    write_atomic(folder / TRIALS, trials_csv(results))
    text = f"{tables.markdown(winners_table(results))}\n{explain_choice(results)}\n"
    write_atomic(folder / TABLE, text)


def draw(folder: Path, results: Results) -> None:
    """Draw the curves of the best settings, and every grid as a map."""
    target = results.target
    curves = [setting.curve() for setting in results.winners().values()]
    plots.plot(curves, folder / CURVES, targets=[] if target is None else [target])
    path = folder / GRID
    if path.is_file():
        path.unlink()
    shown = target or max(tables.default_targets(curves), default=None)
    if shown is None:  # nothing was learned: there is no accuracy to count rounds to
        return
    where = " on held-out rows" if results.judged is not None else ""
    title = f"Mean rounds to an accuracy of {shown:g}{where}"
    most = results[0].spec.options["rounds"]
    figures.heat_maps(path, results.maps(shown), title=title, most=most)


def trials_csv(results: Results) -> str:
    """A line for each trial: first of the settings that were run again, then of the grid."""
    targets = [] if results.target is None else [results.target]
    axes = {name: list(own.axes()) for name, own in results.algorithms().items()}
    parts = [results] if results.judged is None else [results.judged, results]
    rows: list[dict[str, Any]] = []
    for part in parts:
        for setting in part.settings():
            hyper = setting.spec.hyper
            varied = {name: hyper[name] for name in axes[setting.algorithm]}
            told = Results(setting.runs).rows(targets)
            for row, run in zip(told, setting.runs, strict=True):
                last = {
                    "judged_by": run.judged_by,
                    **varied,
                    "identity": run.spec.identity[:DIGITS],
                }
                rows.append(row | {"setting": setting.label} | last)
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
