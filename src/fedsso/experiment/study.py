"""Studies: sweeps of hundreds of trials, summed up by setting; `store` keeps their traces,
`workers` runs them."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from torch import nn

from ..algorithm import Algorithm
from ..data import Federation
from ..errors import InputError, integer, one_of
from ..report.figures import Heat
from ..report.tables import Curve
from ..support.files import check_writable
from ..support.intake import user_path
from ..support.lock import Lock
from .execute import Planned, Progress, begin, check, chunks, plan
from .grids import tried
from .spec import Spec
from .store import Held, held, put_aside_damaged, read
from .trace import Trace
from .workers import OutOfTime as OutOfTime
from .workers import in_order, in_processes

COUNTS = {"first hit": Trace.rounds_to, "last below": Trace.last_below}
"""How rounds to an accuracy are counted: the first that reaches it, or the last below it, as the
paper does."""
LAST = 10  # evaluations whose mean is the accuracy at the end, at most
SYMBOLS = {"alpha": "α", "eta": "η", "mu": "μ"}


def at_end(trace: Trace, rounds: int) -> float:
    """The mean accuracy of the last ten evaluations, of a short run of the last quarter; the last
    one of a run that stopped early, and 0 of one that diverged."""
    if trace.diverged is not None:
        return 0.0
    stopped = len(trace) <= rounds
    return trace.final(last=1 if stopped else max(1, min(LAST, len(trace.evaluations()[0]) // 4)))


class Setting(NamedTuple):
    """One point of a grid with the traces of its seeds."""

    spec: Spec  # of the first seed
    seeds: tuple[int, ...]
    traces: tuple[Trace, ...]

    @property
    def algorithm(self) -> str:
        """Its name in the registry."""
        return self.spec.algorithm

    @property
    def label(self) -> str:
        """Algorithm and settings in short."""
        return self.spec.label

    def curve(self, label: str = "") -> Curve:
        """As tables and plots take it."""
        return Curve(label or self.label, self.traces, self.algorithm)

    def rounds(self, target: float, count: str = "first hit") -> list[int | None]:
        """Rounds to an accuracy, seed by seed; None: not reached, or not kept."""
        counted = COUNTS[one_of("count", count, COUNTS)]
        return [counted(trace, target) for trace in self.traces]

    def mean_rounds(self, target: float, count: str = "first hit") -> float:
        """The seeds' mean; infinite if one of them never gets there."""
        return float(np.mean([math.inf if r is None else r for r in self.rounds(target, count)]))

    def final(self) -> float:
        """Mean accuracy at the end; a diverged seed counts as 0."""
        return float(np.mean(self.finals()))

    def finals(self) -> list[float]:
        """The same, seed by seed."""
        return [at_end(trace, self.spec.options["rounds"]) for trace in self.traces]

    @property
    def diverged(self) -> int:
        """How many seeds left the finite numbers."""
        return sum(trace.diverged is not None for trace in self.traces)


class Study(Sequence[Setting]):
    """The settings of a sweep."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._settings = list(settings)

    def __len__(self) -> int:
        return len(self._settings)

    @overload
    def __getitem__(self, index: int) -> Setting: ...
    @overload
    def __getitem__(self, index: slice) -> Study: ...
    def __getitem__(self, index: int | slice) -> Setting | Study:
        return Study(self._settings[index]) if isinstance(index, slice) else self._settings[index]

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._settings)

    def __repr__(self) -> str:
        return f"Study({len(self)} settings of {', '.join(self.algorithms())})"

    def algorithms(self) -> dict[str, Study]:
        """The settings of each algorithm, in the order of the sweep."""
        names = dict.fromkeys(s.algorithm for s in self)
        return {name: Study(s for s in self if s.algorithm == name) for name in names}

    def best(self, target: float | None = None, count: str = "first hit") -> Setting:
        """Fewest mean rounds to the target, a seed that misses it counting as never; ties and no
        target: the best mean accuracy at the end."""
        if not len(self):
            raise InputError("there is no setting to choose from")
        if all(math.isnan(s.final()) for s in self):
            raise InputError(
                "settings are chosen by their accuracy, and these have none; give labels, and test "
                "rows"
            )
        return min(
            self,
            key=lambda s: (
                math.inf if target is None else s.mean_rounds(target, count),
                -s.final(),
            ),
        )

    def working(self, target: float) -> int:
        """How many settings reach the target with every seed."""
        return sum(s.mean_rounds(target) < math.inf for s in self)

    def lasting(self, target: float) -> int:
        """How many of these never diverge afterwards."""
        return sum(s.mean_rounds(target) < math.inf and not s.diverged for s in self)

    def axes(self) -> dict[str, list[Any]]:
        """The hyper-parameters of one algorithm's grid that have several values."""
        return {k: v for k, v in tried([s.spec.record for s in self]).items() if len(v) > 1}

    def maps(self, target: float) -> list[Heat]:
        """Mean rounds to the target over each algorithm's grid; from the third axis on, a map for
        each value."""
        return [heat for own in self.algorithms().values() for heat in _maps(own, target)]

    def rows(self, targets: Sequence[float]) -> list[dict[str, Any]]:
        """One row of plain numbers for each trial."""
        return [
            _row(s, seed, trace, targets)
            for s in self
            for seed, trace in zip(s.seeds, s.traces, strict=True)
        ]


def _maps(grid: Study, target: float) -> Iterator[Heat]:
    axes = grid.axes()
    (down, across), others = [*axes, "", ""][:2], list(axes)[2:]
    for picked in itertools.product(*(axes[name] for name in others)):
        fixed = dict(zip(others, picked, strict=True))
        title = " ".join(
            [grid[0].algorithm, *(f"{_symbol(k)}={_text(v)}" for k, v in fixed.items())]
        )
        within = [s for s in grid if all(s.spec.hyper[k] == v for k, v in fixed.items())]
        yield _map(
            title, within, (down, axes.get(down, [""])), (across, axes.get(across, [""])), target
        )


def _map(
    title: str,
    settings: Iterable[Setting],
    down: tuple[str, list[Any]],
    across: tuple[str, list[Any]],
    target: float,
) -> Heat:
    values = np.full((len(down[1]), len(across[1])), np.nan)
    lost = np.zeros(values.shape, bool)
    for s in settings:
        (row, column) = (axis.index(s.spec.hyper.get(name, "")) for name, axis in (down, across))
        mean = s.mean_rounds(target)
        values[row, column] = mean if math.isfinite(mean) else np.nan
        lost[row, column] = s.diverged > 0
    rows, columns = ([_text(value) for value in axis] for _, axis in (down, across))
    return Heat(title, _symbol(down[0]), _symbol(across[0]), rows, columns, values, lost)


def _symbol(name: str) -> str:
    return SYMBOLS.get(name, name)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(setting: Setting, seed: int, trace: Trace, targets: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"algorithm": setting.algorithm, "setting": setting.label, "seed": seed}
    for name, counted in COUNTS.items():
        row |= {f"{name} {target:g}": counted(trace, target) for target in targets}
    reached = trace.evaluations()[1]
    best = float(np.nanmax(reached)) if np.isfinite(reached).any() else math.nan
    end = at_end(trace, setting.spec.options["rounds"])
    return row | {"final": end, "last": trace.final(), "best": best, "diverged": trace.diverged}


def study(
    fed: Federation,
    model: str | nn.Module,
    algorithms: Sequence[str | Algorithm],
    *,
    seeds: Iterable[int] = (0,),
    out: str | Path | None = None,
    jobs: int = 1,
    deadline: float = math.inf,
    progress: Progress | None = None,
    **options: Any,
) -> Study:
    """Run every record under every seed, batched, and keep all traces in `out`; what lies there is
    not run again.

    `jobs` processes share the parts. `progress` is called with the trial-rounds done and to do. At
    `deadline`, a time of `time.monotonic()`, no new part begins and OutOfTime is raised; the same
    call goes on later.
    """
    arguments = (fed, model, tuple(algorithms), tuple(seeds), options)
    planned = plan(*arguments)
    check(planned)
    temporary = (
        tempfile.TemporaryDirectory(prefix="fedsso-")
        if out is None
        else nullcontext(user_path("out", out))
    )
    with temporary as where, Lock(where):
        folder = Path(where)
        check_writable(folder)
        put_aside_damaged(folder)
        there = held(folder)
        look = begin(progress, [run.spec for run in planned])
        if look is not None:
            kept = [run.spec for run in planned if run.spec.identity in there]
            look(kept, read([there[spec.identity] for spec in kept]))
        todo = [i for i, run in enumerate(planned) if run.spec.identity not in there]
        parts = list(chunks(planned, todo))
        tally = _Tally(planned, todo, progress)
        processes = min(integer("jobs", jobs, 1), len(parts))
        if processes > 1:
            in_processes(arguments, parts, folder, processes, deadline, tally, look)
        else:
            in_order(planned, parts, folder, deadline, tally, look)
        return _summed_up([run.spec for run in planned], held(folder))


def _summed_up(specs: Sequence[Spec], there: Mapping[str, Held]) -> Study:
    """Settings in the order of the plan, seeds together."""
    gone = sum(spec.identity not in there for spec in specs)
    if gone:
        raise InputError(
            f"the traces of {gone} trials are gone: somebody removed them meanwhile; run it again"
        )
    traces = read([there[spec.identity] for spec in specs])
    groups: dict[str, list[tuple[Spec, Trace]]] = {}
    for pair in zip(specs, traces, strict=True):
        groups.setdefault(pair[0].label, []).append(pair)
    return Study(_setting(pairs) for pairs in groups.values())


def _setting(pairs: Sequence[tuple[Spec, Trace]]) -> Setting:
    specs, traces = zip(*pairs, strict=True)
    return Setting(specs[0], tuple(spec.seed for spec in specs), traces)


class _Tally:
    """Counts trial-rounds over all parts, for one bar."""

    def __init__(
        self, planned: Sequence[Planned], todo: Sequence[int], progress: Progress | None
    ) -> None:
        self.rounds = [run.options["rounds"] for run in planned]
        self.total = sum(self.rounds[i] for i in todo)
        self.progress, self.done, self.told = progress, 0, 0
        self.under_way: dict[int, int] = {}
        self.newest: tuple[str, dict[str, float]] = ("", {})

    def round(self, part: Sequence[int], k: int, label: str, numbers: dict[str, float]) -> None:
        """A part has done k rounds."""
        self.under_way[part[0]] = k * len(part)
        self.newest = label, numbers
        self._tell()

    def end(self, part: Sequence[int]) -> None:
        """A part is written; it may have ended early."""
        self.under_way.pop(part[0], None)
        self.done += sum(self.rounds[i] for i in part)
        self._tell()

    def _tell(self) -> None:
        """Never backwards: halves of a part that was too large for the GPU begin again."""
        now, (label, numbers) = self.done + sum(self.under_way.values()), self.newest
        if self.progress is not None and now > self.told:
            self.told = now
            self.progress(label, now, self.total, numbers)
