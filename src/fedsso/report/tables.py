"""Traces become numbers, and numbers become a table.

A curve stands for one setting of an algorithm: a trace for each seed. Two questions are asked of
it. How many rounds, and how many bytes, did it take until the test accuracy first reached a target?
And how accurate was the model at the end? `numbers` answers in plain numbers, `rounds_table` in
text, and `markdown` puts the text into a table; `written.Table` also writes LaTeX and CSV. Where
there is no accuracy, as for real targets, the table has the test loss at the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, unknown
from ..experiment.trace import ACCURACY, LAST, LOSS, at_end

if TYPE_CHECKING:
    from ..experiment.trace import Trace

DASH = "–"  # stands for what was not reached
# The last column of a table: the second where no curve has an accuracy.
FINAL = "final accuracy"
FINAL_LOSS = "final test loss"
ENDS = f"the mean of the last {LAST} evaluations, of a short run that of its last quarter"
"""What "final" means in every table: the rule of `experiment.trace.at_end` in words."""
NO_SPREAD = re.compile(r"± 0(\.0*)?(?![\d.])")  # a deviation of which no figure is shown
MEASURED = ("train_loss", LOSS, ACCURACY)  # columns by which runs are told apart
SHARES = (0.5, 0.8, 0.9, 0.95)  # of the way to the best accuracy, where the default targets lie
# Steps to which the first two and the last two targets are rounded; finer ones if these do not do.
STEPS = ((0.05, 0.01), (0.01, 0.01), (0.001, 0.001))


class Curve(NamedTuple):
    """Several seeds of one setting, which tables and plots show together.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> run = fedsso.simulate(fed, "mclr", "fedavg", rounds=5)
    >>> curve = Curve("FedAvg", (run.trace,), "fedavg")
    >>> rounds_table([curve], [0.5])[0]["rounds to 0.50"]
    '1'
    """

    # For people to read.
    label: str
    # One trace for each seed. A table refuses a curve without any.
    traces: tuple[Trace, ...]
    # The name that the algorithm has in the registry. It decides the colour.
    algorithm: str
    # How many rounds the runs were to have, so that a run that stopped early is known. None takes
    # every trace for a whole run.
    rounds: int | None = None

    def ends(self, metric: str = ACCURACY) -> list[float]:
        """A metric at the end of each seed's run, by the rule of `experiment.trace.at_end`."""
        return [at_end(trace, self.rounds, metric) for trace in self.traces]

    @property
    def is_repeated(self) -> bool:
        """Whether there are several seeds, and all of them gave the same run."""
        first, *others = self.traces
        for name in MEASURED:
            for other in others:
                if not np.array_equal(first[name], other[name], equal_nan=True):
                    return False
        return bool(others)


# ---- the numbers ----


class Stat(TypedDict):
    """Mean and sample standard deviation over the `count` seeds that have a value."""

    mean: float | None
    sd: float | None
    count: int


class Megabytes(Stat):
    """The megabytes until `target` was reached, as a statistic over the seeds."""

    target: float


class Numbers(TypedDict):
    """One curve as plain numbers.

    `rounds_to` has one entry for each target, by the target as text. A megabyte is 10^6 bytes, and
    the whole federation is counted, in both directions. `diverged` lists the rounds in which seeds
    diverged; their final accuracy counts as 0.
    """

    label: str
    algorithm: str
    seeds: int
    rounds_to: dict[str, Stat]
    megabytes: Megabytes | None
    final_accuracy: Stat
    diverged: list[int]


def numbers(curves: Sequence[Curve], targets: Sequence[float]) -> list[Numbers]:
    """Rounds to each target, megabytes, final accuracy and divergence of each curve.

    Args:
        curves: The settings, each with at least one trace.
        targets: Accuracies in (0, 1]. They are sorted, and doubles are dropped.

    Returns:
        One dictionary for each curve, in their order. It holds plain numbers, text and None, so
        it can be written as JSON.

    Raises:
        InputError: A curve has no traces.
    """
    ascending = sorted(set(targets))
    return [_numbers(curve, ascending) for curve in curves]


def _numbers(curve: Curve, targets: Sequence[float]) -> Numbers:
    """The numbers of one curve; the targets are in ascending order."""
    check(curve)
    traces = curve.traces
    rounds_to = {}
    for target in targets:
        reached = [trace.rounds_to(target) for trace in traces]
        rounds_to[name_of(target)] = statistic(reached)
    return {
        "label": curve.label,
        "algorithm": curve.algorithm,
        "seeds": len(traces),
        "rounds_to": rounds_to,
        "megabytes": _megabytes(traces, targets),
        "final_accuracy": statistic(curve.ends()),
        "diverged": [trace.diverged for trace in traces if trace.diverged is not None],
    }


def check(curve: Curve) -> None:
    """Refuse a curve without traces."""
    if not curve.traces:
        raise InputError(f"curve {curve.label!r} has no traces; give at least one")


def name_of(target: float) -> str:
    """A target as text with at least two decimals: 0.9 as 0.90, but 0.885 in full."""
    return max(f"{target:.2f}", f"{target:g}", key=len)


def statistic(values: Sequence[float | None]) -> Stat:
    """The statistic of the values that are there: None, NaN and infinity are left out."""
    found = np.array([v for v in values if v is not None and np.isfinite(v)])
    count = len(found)
    return {
        "mean": float(found.mean()) if count else None,
        "sd": float(found.std(ddof=1)) if count > 1 else None,
        "count": count,
    }


def _megabytes(traces: Sequence[Trace], targets: Sequence[float]) -> Megabytes | None:
    """The cost of the highest target that every seed reaches; None if there is no such target.

    A cost that some of the seeds never paid in full would look lower than it is.
    """
    for target in reversed(targets):
        spent = [trace.bytes_to(target) for trace in traces]
        if None not in spent:
            stat = statistic([count / 1e6 for count in spent if count is not None])
            return {**stat, "target": target}
    return None


def renamed(curves: Sequence[Curve], labels: Mapping[str, str]) -> list[Curve]:
    """The curves under other names.

    Args:
        curves: The settings.
        labels: A text for the label of a curve, or for the name of an algorithm that has one
            curve.

    Raises:
        InputError: A key is neither, or names the algorithm of several curves.
    """
    places = {key: found_by(curves, key) for key in labels}
    found = list(curves)
    for key, own in places.items():
        if len(own) > 1:
            told = ", ".join(curves[place].label for place in own)
            raise InputError(f"{key} is the name of several curves; give their labels: {told}")
        place = own[0]
        found[place] = curves[place]._replace(label=labels[key])
    return found


def found_by(curves: Sequence[Curve], key: str) -> list[int]:
    """The places of the curves of a label or, if there is none, of an algorithm's name.

    Raises:
        InputError: The key is neither.
    """
    for own in ([curve.label for curve in curves], [curve.algorithm for curve in curves]):
        places = [place for place, name in enumerate(own) if name == key]
        if places:
            return places
    known = {curve.label for curve in curves}
    known |= {curve.algorithm for curve in curves}
    raise unknown("curve", key, known)


def default_targets(curves: Sequence[Curve]) -> tuple[float, ...]:
    """Four round accuracies on the way from the initial model's to the best one at the end.

    They lie at 50, 80, 90 and 95 % of that way, rounded down: coarsely if four different ones
    come out, else more finely. There are fewer if four do not fit in between, and none if no
    trace has an accuracy or nothing was learned. No target is above the best final accuracy: what
    was seen for a round or two is no goal. Where all runs diverge, the best one reached counts.
    """
    reached = _accuracies(curves)
    # A run on Flower may be evaluated once, at its end: this tells nothing about a start.
    several = [values for values in reached if len(values) > 1]
    if not several:
        return ()
    start = max(values[0] for values in several)
    best = _best_end(curves) or max(values.max() for values in several)
    targets: list[float] = []
    for coarse, fine in STEPS:
        steps = (coarse, coarse, fine, fine)
        found = set()
        for share, step in zip(SHARES, steps, strict=True):
            found.add(_round_down(start + share * (best - start), step))
        targets = sorted(found)
        if len(targets) == 4 and targets[0] > start:
            break
    return tuple(target for target in targets if target > start)


def _best_end(curves: Sequence[Curve]) -> float | None:
    """The best mean accuracy at the end, of curves of which some seed stays finite."""
    found = []
    for curve in curves:
        mean = statistic(curve.ends())["mean"]
        lost = all(trace.diverged is not None for trace in curve.traces)
        if mean is not None and not lost:
            found.append(mean)
    return max(found, default=None)


def _accuracies(curves: Sequence[Curve]) -> list[NDArray[Any]]:
    """The test accuracies of each trace that has some; a trace without any is left out."""
    found = []
    for curve in curves:
        for trace in curve.traces:
            _, values = series([trace], "test_accuracy")
            known = values[0]
            within = known[(known >= 0) & (known <= 1)]
            if len(within):
                found.append(within)
    return found


def _round_down(value: float, step: float) -> float:
    """The greatest multiple of the step that is not above the value, with three decimals at most.

    >>> _round_down(0.8999, 0.01), _round_down(0.9, 0.01)
    (0.89, 0.9)
    """
    # 0.29 / 0.01 is 28.999999999999996: without the small number, some multiples of the step
    # would be rounded down to the one before.
    return round(floor(value / step + 1e-9) * step, 3)


def series(
    traces: Sequence[Trace],
    metric: str,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """One column of several traces on common rounds.

    Returns:
        The rounds where some seed has a finite value, and the values [seeds, rounds], NaN where a
        seed has none.
    """
    finite = [np.isfinite(trace[metric]) for trace in traces]
    measured: list[Any] = []
    for trace, known in zip(traces, finite, strict=True):
        measured += trace["round"][known].tolist()
    rounds = np.unique(measured)
    values = np.full((len(traces), len(rounds)), np.nan)
    for row, trace, known in zip(values, traces, finite, strict=True):
        places = np.searchsorted(rounds, trace["round"][known])
        row[places] = trace[metric][known]
    return rounds, values


# ---- the table ----


def rounds_table(
    curves: Sequence[Curve],
    targets: Sequence[float],
) -> list[dict[str, str]]:
    """The numbers as text, one row for each curve; a dash marks what was not reached.

    Args:
        curves: The settings, each with at least one trace.
        targets: Accuracies in (0, 1], in any order.

    Returns:
        A row maps the names of the columns to their texts: the label, the rounds to each target,
        the megabytes and the final accuracy, or the final test loss if no curve has an accuracy.
        With several seeds a text is "mean ± standard deviation". Where only some seeds reach a
        target, the text is a dash and how many do: "– (2/3)". Seeds that all gave the same run
        are shown as one, and `remarks` says so.
    """
    shown = [_once(curve) for curve in curves]
    every = numbers(shown, targets)
    rows = [_row(one) for one in every]
    if any(one["final_accuracy"]["count"] for one in every):
        return rows
    for row, curve, one in zip(rows, shown, every, strict=True):
        del row[FINAL]
        row[FINAL_LOSS] = _ending(one, statistic(curve.ends(LOSS)))
    return rows


def _once(curve: Curve) -> Curve:
    """The curve, with one of its seeds if all of them gave the same run."""
    check(curve)
    if curve.is_repeated:
        return curve._replace(traces=curve.traces[:1])
    return curve


def final_text(curve: Curve) -> str:
    """The accuracy at the end and, if seeds diverged, in which rounds, as tables have it."""
    (one,) = numbers([_once(curve)], [])
    return _ending(one, one["final_accuracy"], decimals=4)


def remarks(curves: Sequence[Curve], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Why a table has no deviation where there are several seeds, in sentences.

    Args:
        curves: The settings.
        rows: Their rows, as `rounds_table` makes them.
    """
    repeated = []
    agreeing = []
    for curve, row in zip(curves, rows, strict=True):
        final = list(row.values())[-1]
        if curve.is_repeated:
            repeated.append(curve.label)
        elif NO_SPREAD.search(final):
            agreeing.append(curve.label)
    found = []
    if repeated:
        found.append(
            f"{_listed(repeated)}: all seeds gave the same run. Seeds draw clients, mini-batches "
            f"and first weights, and here none of these is drawn."
        )
    if agreeing:
        found.append(
            f"{_listed(agreeing)}: the seeds end with the same value, to the decimals shown, "
            f"though their runs differ."
        )
    return found


def _listed(labels: Sequence[str]) -> str:
    """The first labels, and how many more there are."""
    more = len(labels) - 3
    if more > 1:
        return f"{', '.join(labels[:3])} and {more} more"
    return ", ".join(labels)


# ---- the best of a column ----

Cell = float | str | None  # what a cell of a table is sorted by; None: not reached


def cell_values(one: Numbers, end: float | None) -> list[Cell]:
    """What a row is sorted by, cell by cell: numbers where the text has more than a number.

    A mean over some of the seeds does not count: a setting must reach a target with all of them.
    `end` is the number of the last column, the final accuracy or the final test loss.
    """
    cells: list[Cell] = [one["label"]]
    for stat in one["rounds_to"].values():
        whole = stat["count"] == one["seeds"]
        cells.append(stat["mean"] if whole else None)
    cost = one["megabytes"]
    cells.append(None if cost is None else cost["mean"])
    cells.append(end)
    return cells


def best_value(name: str, values: Sequence[Cell]) -> float | None:
    """The best of a column with several rows; None where there is none.

    Megabytes have none: those of each row are for a target of its own. The first column holds
    labels, of which none is the best. Where all rows are equal, none is the best either.
    """
    if len(set(values)) < 2 or name == "megabytes":
        return None
    found = [value for value in values if isinstance(value, int | float)]
    if name == FINAL:
        return max(found, default=None)
    return min(found, default=None)


# ---- cells ----


def _row(one: Numbers) -> dict[str, str]:
    """One row of the table, by the names of the columns; the last is the final accuracy."""
    row = {"algorithm": one["label"]}
    for target, stat in one["rounds_to"].items():
        row[f"rounds to {target}"] = _rounds(stat, one["seeds"])
    row["megabytes"] = _cost(one["megabytes"])
    row[FINAL] = _ending(one, one["final_accuracy"], decimals=4)
    return row


def _rounds(stat: Stat, seeds: int) -> str:
    """Rounds to a target; where some seeds miss it, how many of them reach it."""
    count = stat["count"]
    if not count:
        return DASH
    if count < seeds:
        return f"{DASH} ({count}/{seeds})"
    return _spread(stat, 0 if seeds == 1 else 1)


def _cost(stat: Megabytes | None) -> str:
    """Megabytes, and the target that they were spent for."""
    if stat is None:
        return DASH
    decimals = _decimals(stat["mean"] or 0)
    # Seeds that need equally many rounds send the same: a deviation of 0 would look like a slip.
    shown = stat if stat["sd"] else {**stat, "sd": None}
    return f"{_spread(shown, decimals)} (to {name_of(stat['target'])})"


def _decimals(value: float, figures: int = 3) -> int:
    """How many decimals show so many figures of a number."""
    if not value:
        return 0
    power = floor(log10(abs(value)))
    return max(0, figures - 1 - power)


def _ending(
    one: Numbers,
    stat: Stat,
    decimals: int | None = None,
) -> str:
    """A value at the end and, if seeds diverged, in which rounds.

    Args:
        one: The curve.
        stat: The value over the seeds.
        decimals: Of the value. None shows four figures: a loss may be of any size.
    """
    lost = one["diverged"]
    told = []
    if stat["count"] or not lost:
        some = 0 < stat["count"] < one["seeds"]
        share = f" ({stat['count']}/{one['seeds']})" if some else ""
        shown = _decimals(stat["mean"] or 0, 4) if decimals is None else decimals
        told.append(_spread(stat, shown) + share)
    if lost:
        word = "rounds" if len(lost) > 1 else "round"
        told.append(f"diverged in {word} {', '.join(map(str, lost))}")
    return ", ".join(told)


def _spread(stat: Stat, decimals: int) -> str:
    """Mean ± standard deviation; the mean alone where there is one seed."""
    if stat["mean"] is None:
        return DASH
    mean = f"{stat['mean']:,.{decimals}f}"
    if stat["sd"] is None:
        return mean
    return f"{mean} ± {stat['sd']:,.{decimals}f}"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows that have the same keys, which become its heading.

    The first column is set to the left, the others to the right.

    >>> print(markdown([{"algorithm": "fedavg", "rounds": "12"}]), end="")
    | algorithm | rounds |
    | --- | ---: |
    | fedavg | 12 |
    """
    if not rows:
        return ""
    names = list(rows[0])
    rule = ["---"] + ["---:"] * (len(names) - 1)
    lines = [names, rule]
    for row in rows:
        lines.append(list(row.values()))
    return "".join(_markdown_line(cells) for cells in lines)


def _markdown_line(cells: Sequence[str]) -> str:
    """One line of a Markdown table; a bar within a cell is escaped."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |\n"
