"""What a sweep has found: a table of the best settings, a list of all trials, and pictures.

`write` puts the table and the list into the folder of the sweep, `draw` the pictures. `fedsso
sweep` calls both and prints the same table; `fedsso.sweep` calls `write` alone.

    table.md       the best setting of each algorithm, and how it was chosen
    trials.csv     one line for each trial; a folder with this file is a finished sweep
    curves.png     accuracy and loss of the best settings
    grid.png       rounds to the target over every grid

The rule by which settings are chosen is that of `experiment.results`; this module only puts it
into words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..experiment.results import ACCURACY, Results, described
from ..experiment.store import DIGITS, TRIALS
from ..support.files import records_to_csv, write_atomic
from . import figures
from .plots import plot
from .tables import ENDS, default_targets, markdown, rounds_table

if TYPE_CHECKING:
    from pathlib import Path

    from ..experiment.results import Setting

TABLE = "table.md"
CURVES = "curves.png"
GRID = "grid.png"


def explain_choice(results: Results) -> str:
    """How the best settings were chosen, in sentences for the reader of the table.

    They name the rule, the rows by which settings were chosen and judged, and what "final" means.
    """
    rule = _rule(results)
    rows = "Selected and evaluated on the same test rows."
    if results.judged is not None:
        rows = (
            "Chosen by a quarter of each client's training rows, held out; then run on all "
            "training rows and judged by the test rows."
        )
    what = "accuracy" if results.metric() == ACCURACY else "test loss"
    return f"Best setting: {rule}. {rows} Final {what}: {ENDS}."


def _rule(results: Results) -> str:
    """What makes a setting the best one, as the middle of a sentence."""
    count = max(len(setting.seeds) for setting in results.settings())
    seeds = f"{count} seeds" if count > 1 else "one seed"
    if results.target is not None:
        return (
            f"the fewest mean rounds until {results.target:g} is first reached, over {seeds}; a "
            f"miss counts as never, and among equals the accuracy at the end decides"
        )
    if results.metric() == ACCURACY:
        return f"the best mean accuracy at the end over {seeds}; a run that diverges counts as 0"
    return f"the smallest mean test loss at the end over {seeds}"


def works(own: Results, target: float | None) -> tuple[int, str]:
    """How many settings of a grid are of use, and what that means.

    Args:
        own: The runs of one algorithm.
        target: The accuracy to reach. With one, the settings that reach it with every seed are of
            use. Without one, those that do not diverge with any seed.

    Returns:
        The number, and the words that follow it, such as "do not diverge".
    """
    if target is None:
        calm = [setting for setting in own.settings() if not setting.diverged]
        return len(calm), "do not diverge"
    return own.working(target), f"reach {target:g} with every seed"


# ---- the table of the best settings ----


def winners_table(results: Results) -> list[dict[str, str]]:
    """One row of text for each algorithm: its best setting and how it fares.

    A row maps the names of the columns to their texts. The column of rounds is there only if the
    sweep has a target. Where the model has no accuracy, the test loss takes its place.
    """
    target = results.target
    metric = results.metric()
    what = "final accuracy" if metric == ACCURACY else "final test loss"
    winners = results.winners()
    rows = []
    for name, own in results.algorithms().items():
        best = winners[name]
        row = {"algorithm": name, "best setting": _told(best, own)}
        if target is not None:
            counted = rounds_table([best.curve()], [target])[0]
            # The first column of that table is the label, the second one the rounds.
            row[f"rounds to {target:g}"] = list(counted.values())[1]
        row[what] = _final(best, metric)
        count, meaning = works(own, target)
        row["of the grid"] = f"{count} of {len(own.settings())} {meaning}"
        rows.append(row)
    return rows


def _told(best: Setting, own: Results) -> str:
    """The values that the grid varies, then what else is not at its default."""
    shown = {}
    values = described(best.spec)
    for name in own.axes():
        value = values.get(name)
        shown[name] = f"{value:g}" if isinstance(value, float) else str(value)
    # What is in both stands once: the place is that of the grid, the text that of the label.
    shown |= best.spec.short
    words = [f"{name}={value}" for name, value in shown.items()]
    return " ".join(words) or "its defaults"


def _final(setting: Setting, metric: str) -> str:
    """Mean and sample standard deviation over the seeds, and how many of them diverged.

    `metric` is the accuracy or the test loss. A seed that diverged has the accuracy 0, which
    counts in the mean. Its loss is not a number, and neither is the mean then.
    """
    values = setting.finals(metric)
    text = f"{np.mean(values):.4f}"
    if len(values) > 1:
        text += f" ± {np.std(values, ddof=1):.4f}"
    if setting.diverged:
        text += f", {setting.diverged} of {len(values)} diverged"
    return text


# ---- files ----


def write(folder: Path, results: Results) -> None:
    """Write the table of the best settings (table.md) and the list of all trials (trials.csv).

    Each file is written whole or not at all; those that are there are replaced. The caller holds
    the lock of the folder.
    """
    write_atomic(folder / TRIALS, trials_csv(results))
    table = markdown(winners_table(results))
    write_atomic(folder / TABLE, f"{table}\n{explain_choice(results)}\n")


def draw(folder: Path, results: Results, maps: bool = True) -> None:
    """Draw the curves of the best settings (curves.png) and every grid as a map (grid.png).

    Without `maps` there is no grid.png: settings that were searched for form no grid.

    Maps show the rounds to the target of the sweep. A sweep without one takes the highest of the
    default targets. If nothing was learned there is none, and then there are no maps.

    Raises InputError if matplotlib is not installed.
    """
    target = results.target
    curves = [setting.curve() for setting in results.winners().values()]
    plot(curves, folder / CURVES, targets=[] if target is None else [target])
    path = folder / GRID
    # An old map would look as if it belonged to the new table.
    if path.is_file():
        path.unlink()
    shown = target or max(default_targets(curves), default=None)
    if shown is None or not maps:
        return
    where = " on held-out rows" if results.judged is not None else ""
    title = f"Mean rounds to an accuracy of {shown:g}{where}"
    most = results[0].spec.options["rounds"]
    figures.heat_maps(path, results.maps(shown), title=title, most=most)


def trials_csv(results: Results) -> str:
    """A line for each trial: first of the settings that were run again, then of the grid.

    The columns are those of `_trials`. A cell is empty where a trial has no such value:
    algorithms have different hyper-parameters.
    """
    return records_to_csv(_trials(results))


def _trials(results: Results) -> list[dict[str, Any]]:
    """The numbers of each trial, its setting, and the values that its grid varies.

    `judged_by` is "val" for a trial that was judged by held-out rows, else "test". `target` and
    `identity` are for the reader of the folder: the same accuracy chooses the settings again, and
    the identity finds the trace of the trial in `parts`.
    """
    targets = [] if results.target is None else [results.target]
    axes = {name: list(own.axes()) for name, own in results.algorithms().items()}
    parts = [results] if results.judged is None else [results.judged, results]
    rows: list[dict[str, Any]] = []
    for part in parts:
        for setting in part.settings():
            numbers = Results(setting.runs).rows(targets)
            values = described(setting.spec)
            for row, run in zip(numbers, setting.runs, strict=True):
                row["setting"] = setting.label
                row["judged_by"] = run.judged_by
                for name in axes[setting.algorithm]:
                    row[name] = values.get(name)
                row["target"] = results.target
                row["identity"] = run.spec.identity[:DIGITS]
                rows.append(row)
    return rows
