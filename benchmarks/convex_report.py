"""The tables and the figure of the convex bench, from docs/convex.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsso.paper.write import table as markdown
from fedsso.support import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = Mapping[str, Any]
GOALS = ("0.001", "1e-06", "1e-09")
SHOWN = {  # what the figure shows, with colour and width
    "fedsso": ("#C0392B", 2.2),
    "fedsso L-BFGS": ("#E59866", 1.6),
    "giant": ("#1F618D", 1.3),
    "dane": ("#5DADE2", 1.3),
    "fednl": ("#7D3C98", 1.3),
    "fednl-ls": ("#BB8FCE", 1.3),
    "disco": ("#1E8449", 1.6),
    "nl1": ("#B7950B", 1.3),
    "bl1": ("#839192", 1.3),
    "scipy L-BFGS-B, pooled": ("#111111", 1.3),
}
# What the C++ simulator u-FedNL was measured to need to 1e-9, as rounds, seconds and kB.
MEASURED = {
    "phishing": {"u-FedNL, best in time": (15, 0.12, 298), "best in bytes": (23, 0.127, 96)},
    "a9a": {"u-FedNL, best in time": (20, 0.59, 1260), "best in bytes": (26, 0.83, 329)},
}


def table(found: Found, task: str) -> str:
    """One task: rounds, seconds and kilobytes to each goal, the fewest bytes to 1e-9 first."""
    rows = []
    for course in sorted(found[task]["courses"], key=_order):
        cells = {"algorithm": course["name"], "setting": course["setting"] or "default"}
        if "pooled" in course["name"]:
            cells["setting"] = course["setting"]
        for goal in GOALS:
            cells[f"to {goal}"] = _cell(course, goal)
        rows.append(cells)
    for name, (rounds, seconds, kilobytes) in MEASURED.get(task, {}).items():
        told = f"{rounds} · {seconds:g} s · {kilobytes} kB"
        rows.append({"algorithm": name, "setting": "C++", "to 0.001": "", "to 1e-06": ""})
        rows[-1]["to 1e-09"] = told
    return markdown(rows)


def _order(course: Found) -> tuple[bool, float, float]:
    """Pooled ones last, then by bytes to the last goal, then by how far it came."""
    pooled = "pooled" in course["name"]
    goal = course["goals"].get(GOALS[-1], [0, 0.0, float("inf")])
    return pooled, goal[2] if not pooled else goal[1], min(course["norm"])


def _cell(course: Found, goal: str) -> str:
    """Rounds, seconds and kilobytes as one cell; how far it came where the goal was missed."""
    reached = course["goals"].get(goal)
    if reached is None:
        return "–" if goal != GOALS[-1] else f"– ({min(course['norm']):.0e})"
    rounds, seconds, up = reached
    sent = "" if "pooled" in course["name"] else f" · {up / 1e3:.3g} kB"
    return f"{rounds} · {seconds:.2g} s{sent}"


def draw(path: Path, found: Found) -> None:
    """|grad f| against bytes of a client, and against CPU seconds, for each task."""

    def onto(figure: Figure) -> None:
        figure.set_size_inches(3.7 * len(found), 6.4)
        axes = figure.subplots(2, len(found), squeeze=False)
        for column, (task, told) in enumerate(found.items()):
            for row, unit in enumerate(("up", "seconds")):
                _panel(axes[row][column], told, unit)
            axes[0][column].set_title(f"{task}, 142 clients")
            axes[0][column].set_xlabel("kB that a client has sent")
            axes[1][column].set_xlabel("CPU seconds, one thread")
        for row in (0, 1):
            axes[row][0].set_ylabel("|grad f|")
        lines = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=5, frameon=False)
        engine: Any = figure.get_layout_engine()
        engine.set(rect=(0, 0.09, 1, 0.91))

    picture.draw(path, onto)


def _panel(axis: Any, told: Found, unit: str) -> None:
    """One panel: every course that is shown."""
    for course in told["courses"]:
        if course["name"] not in SHOWN or (unit == "up" and "pooled" in course["name"]):
            continue
        colour, width = SHOWN[course["name"]]
        factor = 1e-3 if unit == "up" else 1.0
        along = [factor * value for value in course[unit]]
        first = 1 if unit == "up" else 0  # before the first round nothing was sent
        points = along[first:], course["norm"][first:]
        axis.plot(*points, color=colour, linewidth=width, label=course["name"])
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(3e-10, 3)
    axis.grid(True)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(lambda value, _: f"{value:g}")
        side.set_minor_formatter(lambda *_: "")
