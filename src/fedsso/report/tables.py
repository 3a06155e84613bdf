"""Traces become tables and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..experiment.trace import Trace
from ..support import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """Several seeds of one setting; `algorithm` is the registry's name and decides the colour."""

    label: str
    traces: tuple[Trace, ...]
    algorithm: str


# ---- the numbers ----


class Stat(TypedDict):
    """Mean and sample standard deviation over the `count` seeds that have a value."""

    mean: float | None
    sd: float | None
    count: int


class Megabytes(Stat):
    target: float


class Numbers(TypedDict):
    """One curve as plain numbers; megabytes are 10^6 bytes of the whole federation, both ways."""

    label: str
    algorithm: str
    seeds: int
    rounds_to: dict[str, Stat]
    megabytes: Megabytes | None
    final_accuracy: Stat
    diverged: list[int]


def numbers(curves: Sequence[Curve], targets: Sequence[float]) -> list[Numbers]:
    """Rounds to each target, megabytes, final accuracy and divergence of each curve."""
    return [_numbers(curve, sorted(set(targets))) for curve in curves]


def _numbers(curve: Curve, targets: Sequence[float]) -> Numbers:
    check(curve)
    return {
        "label": curve.label,
        "algorithm": curve.algorithm,
        "seeds": len(curve.traces),
        "rounds_to": {
            _name(t): _stat([trace.rounds_to(t) for trace in curve.traces]) for t in targets
        },
        "megabytes": _megabytes(curve.traces, targets),
        "final_accuracy": _stat([trace.final() for trace in curve.traces]),
        "diverged": [trace.diverged for trace in curve.traces if trace.diverged is not None],
    }


def check(curve: Curve) -> None:
    """Refuse a curve without traces."""
    if not curve.traces:
        raise InputError(f"curve {curve.label!r} has no traces; give at least one")


def _name(target: float) -> str:
    """0.9 as 0.90, but 0.885 in full."""
    return max(f"{target:.2f}", f"{target:g}", key=len)


def _stat(values: Sequence[float | None]) -> Stat:
    found = np.array([v for v in values if v is not None and np.isfinite(v)])
    return {
        "mean": float(found.mean()) if len(found) else None,
        "sd": float(found.std(ddof=1)) if len(found) > 1 else None,
        "count": len(found),
    }


def _megabytes(traces: Sequence[Trace], targets: Sequence[float]) -> Megabytes | None:
    """What the highest target that every seed reaches has cost."""
    for target in reversed(targets):
        spent = [trace.bytes_to(target) for trace in traces]
        if None not in spent:
            return {**_stat([b / 1e6 for b in spent if b is not None]), "target": target}
    return None


def default_targets(curves: Sequence[Curve]) -> tuple[float, ...]:
    """Four round accuracies on the way from the initial model's to the best one reached."""
    every = [series([trace], "test_accuracy")[1][0] for curve in curves for trace in curve.traces]
    reached = [values[(values >= 0) & (values <= 1)] for values in every]
    reached = [values for values in reached if len(values)]
    if not reached:
        return ()
    start, best = max(values[0] for values in reached), max(values.max() for values in reached)
    for coarse, fine in ((0.05, 0.01), (0.01, 0.01), (0.001, 0.001)):
        steps = zip((0.5, 0.8, 0.9, 0.95), (coarse, coarse, fine, fine), strict=True)
        targets = sorted(
            {_round_down(start + share * (best - start), step) for share, step in steps}
        )
        if len(targets) == 4 and targets[0] > start:
            break
    return tuple(t for t in targets if t > start)


def _round_down(value: float, step: float) -> float:
    return round(floor(value / step + 1e-9) * step, 3)


# ---- the table ----


def rounds_table(curves: Sequence[Curve], targets: Sequence[float]) -> list[dict[str, str]]:
    """The numbers as text, one row for each curve; a dash marks what was not reached."""
    return [_row(n) for n in numbers(curves, targets)]


def _row(n: Numbers) -> dict[str, str]:
    return {
        "algorithm": n["label"],
        **{f"rounds to {t}": _rounds(stat, n["seeds"]) for t, stat in n["rounds_to"].items()},
        "megabytes": _cost(n["megabytes"]),
        "final accuracy": _final(n),
    }


def _rounds(stat: Stat, seeds: int) -> str:
    if stat["count"] < seeds:
        return f"– ({stat['count']}/{seeds})" if stat["count"] else "–"
    return _spread(stat, 0 if seeds == 1 else 1)


def _cost(stat: Megabytes | None) -> str:
    return (
        f"{_spread(stat, _decimals(stat['mean'] or 0))} (to {_name(stat['target'])})"
        if stat
        else "–"
    )


def _decimals(value: float) -> int:
    """Decimals that show three figures."""
    return max(0, 2 - floor(log10(value))) if value else 0


def _final(n: Numbers) -> str:
    stat, rounds = n["final_accuracy"], n["diverged"]
    share = f" ({stat['count']}/{n['seeds']})" if 0 < stat["count"] < n["seeds"] else ""
    value = [_spread(stat, 4) + share] if stat["count"] or not rounds else []
    where = f"round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}"
    return ", ".join(value + [f"diverged in {where}"] * bool(rounds))


def _spread(stat: Stat, decimals: int) -> str:
    if stat["mean"] is None:
        return "–"
    sd = "" if stat["sd"] is None else f" ± {stat['sd']:,.{decimals}f}"
    return f"{stat['mean']:,.{decimals}f}{sd}"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table, first column to the left and the others to the right."""
    if not rows:
        return ""
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    cells = [list(rows[0]), rule, *(list(row.values()) for row in rows)]
    return "".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |\n" for line in cells
    )


# ---- the picture ----

# hues that colour-blind readers tell apart; relatives share one and differ in their dashes
FAMILIES = {
    "#D55E00": ("fedsso", "fedsophia", "fednew"),
    "#0072B2": ("fedavg", "fedprox", "fednova", "fedavgm"),
    "#009E73": ("feddane", "dane", "done", "giant"),
    "#CC79A7": ("fednl", "fednl-ls", "fednl-pp"),
    "#E69F00": ("fedac", "stem", "anderson"),
    "#56B4E9": ("scaffold", "localnewton", "fedpm"),
    "#882255": ("fedadam", "fedyogi", "fedadagrad"),
    "#6B6B6B": ("fedsgd", "ldsgd", "fedper"),
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2)))
CROSS: dict[str, Any] = {
    "marker": "X",
    "markersize": 9,
    "markeredgecolor": "white",
    "linestyle": "none",
}


class Style(NamedTuple):
    color: str
    linestyle: Any


def style(algorithm: str) -> Style:
    """The colour and dashes of an algorithm, the same in every picture."""
    for color, names in FAMILIES.items():
        if algorithm in names:
            return Style(color, DASHES[names.index(algorithm)])
    number = int.from_bytes(blake2b(algorithm.encode(), digest_size=4).digest(), "big")
    return Style(
        list(FAMILIES)[number % len(FAMILIES)], DASHES[number // len(FAMILIES) % len(DASHES)]
    )


def styles(curves: Sequence[Curve]) -> Iterator[Style]:
    """Curves of one algorithm go from a dark shade to a light one."""
    count, seen = Counter(c.algorithm for c in curves), Counter[str]()
    for curve in curves:
        place, of = seen[curve.algorithm], count[curve.algorithm]
        seen[curve.algorithm] += 1
        base = style(curve.algorithm)
        yield (
            base._replace(color=shade(base.color, 0.9 * place / (of - 1) - 0.4)) if of > 1 else base
        )


def shade(color: str, light: float) -> str:
    """Mixed with white for light > 0, with black for light < 0."""
    goal = 255 if light > 0 else 0
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + abs(light) * (goal - p)):02X}" for p in parts)


def plot(
    curves: Sequence[Curve], path: str | Path, *, title: str = "", targets: Sequence[float] = ()
) -> None:
    """Test accuracy and training loss over rounds: the seeds' mean as a line, their range as a
    band; what was measured only once has no curve."""
    if not curves:
        raise InputError("there is no curve to draw; give at least one")
    picture.draw(path, lambda figure: _draw(figure, curves, title, targets))


def _draw(figure: Figure, curves: Sequence[Curve], title: str, targets: Sequence[float]) -> None:
    metrics = ("test_accuracy", "train_loss")
    shown = [
        m for m in metrics if any(len(series(curve.traces, m)[0]) > 1 for curve in curves)
    ] or metrics
    looks, width = list(styles(curves)), 10 if len(shown) > 1 else 6
    for axes, metric in zip(
        figure.subplots(1, len(shown), sharex=True, squeeze=False)[0], shown, strict=True
    ):
        axes.grid(True)
        round_axis(axes)
        if metric == "test_accuracy":
            accuracy_axis(axes, targets)
        else:
            loss_axis(axes, *loss_range(curves))
        for curve, look in zip(curves, looks, strict=True):
            lines(axes, curve, look, metric)
    heading(figure, title)
    labels = [curve.label for curve in curves]
    rows = legend(figure, [*keys(labels, looks), *marks(curves)], width)
    figure.set_size_inches(width, 4.1 + 0.22 * rows)


def heading(figure: Figure, title: str) -> None:
    """A title in the upper left corner, where there is one."""
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")


def lines(axes: Axes, curve: Curve, look: Style, metric: str) -> None:
    """Mean and range of the seeds that stayed finite; each of the others alone, thin, up to a
    cross."""
    rounds, values = series([t for t in curve.traces if t.diverged is None], metric)
    if len(rounds):
        marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(rounds) <= 25 else {}
        axes.plot(rounds, np.nanmean(values, axis=0), lw=1.8, **look._asdict(), **marker)
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(rounds, low, high, color=look.color, alpha=0.2, lw=0)
    for trace in curve.traces:
        if trace.diverged is not None:
            rounds, values = series([trace], metric)
            finite = (
                rounds < trace.diverged
            )  # from there on the accuracy is a 0 that stands for nothing
            _lost(axes, rounds[finite], values[0, finite], look)


def _lost(axes: Axes, rounds: NDArray[Any], values: NDArray[Any], look: Style) -> None:
    if len(rounds):
        axes.plot(rounds, values, lw=1.2, **look._asdict())
        end = np.clip(values[-1], *axes.get_ylim())  # the cross stays in sight
        axes.plot(rounds[-1], end, color=look.color, zorder=5, clip_on=False, **CROSS)


def series(traces: Sequence[Trace], metric: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rounds where some seed has a value, and the values [seeds, rounds], NaN where a seed has
    none."""
    finite = [np.isfinite(trace[metric]) for trace in traces]
    rounds = np.unique(
        [r for t, f in zip(traces, finite, strict=True) for r in t["round"][f].tolist()]
    )
    values = np.full((len(traces), len(rounds)), np.nan)
    for row, t, f in zip(values, traces, finite, strict=True):
        row[np.searchsorted(rounds, t["round"][f])] = t[metric][f]
    return rounds, values


def round_axis(axes: Axes) -> None:
    """Communication rounds from left to right."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("communication round")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0.015)


def accuracy_axis(axes: Axes, targets: Sequence[float] = ()) -> None:
    """Test accuracy, the targets as dotted lines with their names."""
    axes.set_ylabel("test accuracy")
    where = axes.get_yaxis_transform()
    for target in targets:
        axes.axhline(target, color="#888888", lw=0.8, ls=(0, (2, 3)), zorder=1)
        axes.text(
            1.01, target, _name(target), transform=where, va="center", fontsize=8, color="#777777"
        )


def loss_axis(axes: Axes, low: float, high: float) -> None:
    """Training loss in logarithmic scale, with numbers one can read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log", nonpositive="mask")
    axes.set(ylabel="training loss (log scale)", ylim=(low, high))
    few = MaxNLocator(6) if high / low < 4 else LogLocator(subs=(1, 2, 5))
    axes.yaxis.set_major_locator(few if high / low < 400 else LogLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def loss_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The positive losses with a margin, cut where only runs that diverge would be seen."""
    traces = [trace for curve in curves for trace in curve.traces]
    calm = [loss for trace in traces if trace.diverged is None for loss in _losses(trace)]
    wild = [loss for trace in traces if trace.diverged is not None for loss in _losses(trace)]
    every = [*calm, *wild] or [1.0]
    low, high = min(every), min(max(every), 10 * max(calm or wild[:1] or every))
    margin = max((high / low) ** 0.05, 1.02)
    return low / margin, high * margin


def _losses(trace: Trace) -> list[float]:
    """The positive ones, within what an axis can show."""
    values = series([trace], "train_loss")[1]
    return [float(v) for v in np.clip(values[values > 0], 1e-30, 1e30)]


def keys(labels: Sequence[str], looks: Sequence[Style]) -> list[Any]:
    """Lines for a legend."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], lw=1.8, label=label, **look._asdict())
        for label, look in zip(labels, looks, strict=True)
    ]


def marks(curves: Sequence[Curve]) -> list[Any]:
    """What bands and crosses mean, for a legend, where the curves have any."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found: list[Any] = []
    if any(len(curve.traces) > 1 for curve in curves):
        found.append(Patch(color="#888888", alpha=0.3, lw=0, label="range over seeds"))
    if any(trace.diverged is not None for curve in curves for trace in curve.traces):
        found.append(Line2D([], [], color="#444444", label="diverged", **CROSS))
    return found


def legend(figure: Figure, handles: Sequence[Any], width: float) -> int:
    """Below the panels of a figure that is `width` inches wide; returns how many rows it takes."""
    rows, columns = legend_shape(
        [0.7 + 0.08 * len(handle.get_label()) for handle in handles], width - 0.4
    )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.6
    )
    return rows


def legend_shape(widths: Sequence[float], room: float) -> tuple[int, int]:
    """The fewest rows, and their columns, that hold entries of these widths, which go down column
    by column."""
    for rows in range(1, len(widths)):
        columns = -(-len(widths) // rows)
        if sum(float(own.max()) for own in np.array_split(np.array(widths), columns)) <= room:
            return rows, columns
    return len(widths), 1
