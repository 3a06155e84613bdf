"""What the robustness bench has found, as plain numbers, tables and pictures.

    python -m benchmarks.robustness_report --out build/robustness

writes docs/robustness.json and docs/robustness*.png.

A cell counts when every method is there. Of a rival's grid the best setting counts, for rounds and
for the final value each by itself; of FedSSO's five client steps the mean counts, and the best and
the worst are told. A task is judged by test accuracy or, where it evaluates the training rows, by
their loss. The final value is the mean of the last ten evaluations; a run that diverged has
accuracy 0 or an infinite loss. What is infinite, as the rounds to a target that some seed never
reaches, is null.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsso.errors import InputError
from fedsso.experiment.results import LAST, Results, Setting
from fedsso.experiment.trace import Trace
from fedsso.experiment.workers import OutOfTime
from fedsso.paper.write import table as markdown
from fedsso.support.files import write_atomic
from fedsso.support.intake import read_text
from fedsso.version import __version__

from . import robustness
from .robustness import Cell, Task
from .robustness_figures import ACCURACY, NAMES, OURS, PARTICIPATION, curves, finals

DOCS = Path(__file__).parents[1] / "docs"
LOSS = "full_train_loss"
WITH_CURVES = "25% of the clients"
POINTS = 50  # of a curve, about
DECIMALS = {"rounds": 1, "final": 4}  # as they are kept, compared and shown
Score = dict[str, Any]


class Goal(NamedTuple):
    """What a task is judged by."""

    metric: str
    target: float

    @property
    def worst(self) -> float:
        """What a run that diverged has."""
        return 0.0 if self.metric == ACCURACY else math.inf

    def rank(self, value: Any) -> Any:
        """The same number, or array, so that less is better."""
        return -value if self.metric == ACCURACY else value

    def rounds(self, trace: Trace) -> float:
        """The first evaluated round that reaches the target; infinite if none does."""
        at, values = trace.evaluations(self.metric)
        return float(next(iter(at[self.rank(values) <= self.rank(self.target)]), math.inf))

    def final(self, trace: Trace) -> float:
        """The mean of the last evaluations."""
        return self.worst if trace.diverged is not None else trace.final(self.metric, last=LAST)


def goal(task: Task) -> Goal:
    """The loss of all training rows where it is evaluated, else test accuracy."""
    return Goal(LOSS if task.options.get("eval_train") else ACCURACY, task.target)


# ---- the score ----


class Point(NamedTuple):
    """A setting of a grid: mean rounds to the target, and the final values of its seeds."""

    setting: Setting
    rounds: float
    finals: list[float]

    @property
    def final(self) -> float:
        return float(np.mean(self.finals))


def points(grid: Results, judged: Goal) -> list[Point]:
    """Every setting of a grid."""
    return [
        Point(
            s,
            float(np.mean([judged.rounds(t) for t in s.traces])),
            [judged.final(t) for t in s.traces],
        )
        for s in grid.settings()
    ]


def fewest_rounds(grid: Sequence[Point], judged: Goal) -> Point:
    """The setting that is first at the target; of several the one that ends best."""
    return min(grid, key=lambda p: (p.rounds, judged.rank(p.final)))


def best_final(grid: Sequence[Point], judged: Goal) -> Point:
    """The setting that ends best; of several the one that is first at the target."""
    return min(grid, key=lambda p: (judged.rank(p.final), p.rounds))


def chosen(grid: Sequence[Point], judged: Goal) -> Score:
    """A tuned method: its best setting for rounds, and its best one for the final value."""
    first, last = fewest_rounds(grid, judged), best_final(grid, judged)
    return {
        "rounds": _plain("rounds", mean=first.rounds) | {"setting": _label(first, first.rounds)},
        "final": _plain("final", mean=last.final, low=min(last.finals), high=max(last.finals))
        | {"setting": _label(last, last.final)},
    }


def _label(point: Point, value: float) -> str | None:
    """Which setting it is; none where no setting has a value."""
    return point.setting.label if math.isfinite(value) else None


def unchosen(grid: Sequence[Point], judged: Goal) -> Score:
    """A method that is not tuned: mean, best and worst of all its settings."""
    rounds, ends = [p.rounds for p in grid], sorted((p.final for p in grid), key=judged.rank)
    return {
        "rounds": _plain("rounds", mean=np.mean(rounds), best=min(rounds), worst=max(rounds)),
        "final": _plain("final", mean=np.mean(ends), best=ends[0], worst=ends[-1]),
        "diverged": sum(p.setting.diverged for p in grid),
        "trials": sum(len(p.finals) for p in grid),
    }


def _plain(what: str, **values: Any) -> Score:
    """Numbers as JSON has them: None for what is not finite."""
    return {
        key: round(float(v), DECIMALS[what]) if math.isfinite(v) else None
        for key, v in values.items()
    }


def score(cell: Cell, found: Mapping[str, Results]) -> Score:
    """All that is told of a cell."""
    task = robustness.TASKS[cell.task]
    judged = goal(task)
    grids = {name: points(own, judged) for name, own in found.items()}
    told = {
        name: (unchosen if name == "default" else chosen)(own, judged)
        for name, own in grids.items()
    }
    head = {
        "task": cell.task,
        "change": cell.change,
        "metric": judged.metric,
        "target": judged.target,
    }
    lines = {"curves": _curves(grids, judged, task.rounds)} if cell.change == WITH_CURVES else {}
    return {**head, "methods": told, **lines}


# ---- curves ----


def _curves(grids: Mapping[str, Sequence[Point]], judged: Goal, rounds: int) -> Score:
    """The seeds' mean over the rounds: of a tuned method's best setting, and the least and largest
    of the default's."""
    lines = {
        name: [
            _path(p.setting, judged, rounds)
            for p in (own if name == "default" else [best_final(own, judged)])
        ]
        for name, own in grids.items()
    }
    return {
        "round": _thin(np.arange(rounds + 1.0)),
        **{name: _thin(own[0]) for name, own in lines.items() if name != "default"},
        "low": _thin(np.min(lines["default"], axis=0)),
        "high": _thin(np.max(lines["default"], axis=0)),
    }


def _path(setting: Setting, judged: Goal, rounds: int) -> NDArray[Any]:
    """The seeds' mean, round by round; a run that diverged is at the worst from then on."""
    values = np.full((len(setting.traces), rounds + 1), judged.worst)
    for row, trace in zip(values, setting.traces, strict=True):
        at, own = trace.evaluations(judged.metric)
        row[at] = np.where(np.isfinite(own), own, judged.worst)
    return np.asarray(values.mean(axis=0))


def _thin(values: NDArray[Any]) -> list[float | None]:
    """The first value, then means of a few rounds each."""
    few = max(1, len(values) // POINTS)
    blocks = np.split(values[1:], range(few, len(values) - 1, few))
    means = [float(own.mean()) for own in (values[:1], *blocks)]
    return [round(mean, DECIMALS["final"]) if math.isfinite(mean) else None for mean in means]


# ---- from a folder of parts ----


def scores(out: Path, wanted: Iterable[Cell] | None = None) -> list[Score]:
    """The complete cells of a folder, in the bench's order; what was scored before is not read
    again."""
    every, found = list(robustness.cells() if wanted is None else wanted), []
    for number, cell in enumerate(every, 1):
        one = _kept(out, cell)
        print(
            f"{number}/{len(every)} {cell.name}: {'scored' if one else 'not complete'}",
            file=sys.stderr,
            flush=True,
        )
        found += [one] if one else []
    return found


def _kept(out: Path, cell: Cell) -> Score | None:
    """The score of a cell, from the file beside its parts if they are still the same; None if
    something is missing."""
    folder = out / cell.folder
    if not all(any((folder / name).glob("*.npz")) for name in robustness.METHODS):
        return None
    file, state = folder / "score.json", _state(folder, cell)
    if file.is_file() and (kept := json.loads(read_text(file)))["state"] == state:
        return dict(kept["score"])
    try:
        found = robustness.run(cell, list(robustness.METHODS), out, deadline=0.0)
    except OutOfTime:
        return None
    except InputError as error:
        print(f"{cell.name}: left out ({error})", file=sys.stderr)
        return None
    told = score(cell, found)
    write_atomic(file, json.dumps({"state": state, "score": told}))
    return told


def _state(folder: Path, cell: Cell) -> str:
    """A digest of all that decides a score: the parts, what is asked of the cell, and this code."""
    asked = (__version__, cell, robustness.TASKS[cell.task], robustness.METHODS, robustness.SEEDS)
    digest = sha256(repr(asked).encode())
    for path in (Path(__file__), Path(robustness.__file__), *sorted(folder.glob("*/*.npz"))):
        digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# ---- the tables ----


def table(found: Iterable[Score], *, participation: bool) -> str:
    """Rounds to the target and final values as Markdown: the cells that differ in participation, or
    all others."""
    return markdown(
        [_row(one) for one in found if (one["change"] in PARTICIPATION) is participation]
    )


def _row(one: Score) -> dict[str, str]:
    what = "accuracy" if one["metric"] == ACCURACY else "loss"
    head: dict[str, str] = {
        "task": f"`{one['task']}`",
        "change": PARTICIPATION.get(one["change"], str(one["change"])),
        "target": f"{what} {one['target']:g}",
    }
    return head | {NAMES.get(name, name): _text(one, name) for name in one["methods"]}


def _text(one: Score, name: str) -> str:
    """Rounds / final value, bold where FedSSO is at least as good as every rival."""
    own = one["methods"][name]
    return " / ".join(
        _value(own[what], d, name in OURS and leads(one, name, what))
        for what, d in DECIMALS.items()
    )


def _value(own: Mapping[str, Any], decimals: int, bold: bool) -> str:
    """A mean, of several settings with the best and the worst."""
    mean = _number(own["mean"], decimals)
    told = own.get("best") is not None
    spread = (
        f" ({_number(own['best'], decimals)} to {_number(own['worst'], decimals)})" if told else ""
    )
    return (f"**{mean}**" if bold else mean) + spread


def _number(value: float | None, decimals: int) -> str:
    return "–" if value is None else f"{value:.{decimals}f}"


def leads(one: Score, name: str, what: str) -> bool:
    """Whether a method has a value that no rival's best exceeds; never to reach the target is no
    lead."""
    rank = Goal(one["metric"], one["target"]).rank if what == "final" else float
    own = one["methods"][name][what]["mean"]
    rivals = [told[what]["mean"] for rival, told in one["methods"].items() if rival not in OURS]
    return own is not None and all(rank(own) <= rank(best) for best in rivals if best is not None)


# ---- the files ----


def write(folder: Path, found: Sequence[Score]) -> None:
    """The numbers, a line for each cell, and the pictures."""
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
    write_atomic(folder / "robustness.json", f"[\n{lines}\n]\n")
    if shown := [one for one in found if one["change"] in PARTICIPATION]:
        finals(folder / "robustness.png", shown)
    if shown := [one for one in found if "curves" in one]:
        curves(folder / "robustness-curves.png", shown)


def main() -> None:
    """Score what there is and write it into docs/."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robustness_report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/robustness"), help="folder of the parts"
    )
    found = scores(parser.parse_args().out)
    if not found:
        sys.exit("no cell is complete: run python -m benchmarks.robustness first")
    write(DOCS, found)


if __name__ == "__main__":
    main()
