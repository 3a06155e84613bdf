"""Results: the runs of a simulation, a comparison or a sweep, and which setting is best.

A *setting* is an algorithm with its hyper-parameters and run options; its runs differ in their
seeds alone. The best setting is the one with the fewest mean rounds until a target accuracy is
first reached, where a seed that never reaches it counts as never. Without a target, and among
equals, the best accuracy at the end decides (`trace.at_end`); where a model has no accuracy, the
smallest test loss at the end. Python, the commands, the paper's tables and the report all choose
by this rule.

The first part of this file has the rule and the two classes that users see, `Setting` and
`Results`. The other parts turn results into labels, rows, maps of grids and pieces of a report.
What they draw with is imported when it is needed, because the room `report` imports this one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from ..algorithms import ALGORITHMS
from ..errors import InputError, one_of
from ..support.files import to_toml
from .run import Run
from .spec import FREE, SPEC, Spec, data_name
from .trace import ACCURACY as ACCURACY
from .trace import LAST as LAST
from .trace import LOSS, Trace, accuracies, at_end, check_accuracy

if TYPE_CHECKING:
    import pandas as pd

    from ..algorithm import Algorithm
    from ..data import Federation
    from ..report.figures import Heat
    from ..report.page import Entry, Holding, Recipe, Served
    from ..report.tables import Curve
    from ..report.written import Table

COUNTS = {"first hit": Trace.rounds_to, "last below": Trace.last_below}
"""How rounds to an accuracy are counted: the first that reaches it, or the last below it, as the
paper does."""
SYMBOLS = {"alpha": "α", "eta": "η", "mu": "μ"}
HELD_OUT = (
    "Settings were chosen by held-out training rows, on which the grids are judged; the best of "
    "each algorithm was then run on all training rows and is judged by the test rows."
)
"""For the reader of a page about a sweep that chose so."""


class Setting(NamedTuple):
    """An algorithm with its hyper-parameters and run options, with one run per seed.

    `Results.settings` makes them, and `Results.best` returns one. Its numbers are means over the
    seeds, or lists with one entry for each seed.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> best = fedsso.compare(fed, "mclr", ["fedavg"], seeds=[0, 1], rounds=5).best()
    >>> best.record, best.seeds
    (FedAvg(alpha=0.01, eta=1.0), (0, 1))
    >>> len(best.rounds(0.5)), best.diverged
    (2, 0)

    Attributes:
        label: The algorithm and what distinguishes this setting from others, for people to read.
        runs: Its runs, one for each seed.
    """

    label: str  # for people to read
    runs: tuple[Run, ...]

    @property
    def spec(self) -> Spec:
        """The settings of the first seed.

        Those of the other seeds differ in the seed, and in the start of a model built by name.
        """
        return self.runs[0].spec

    @property
    def algorithm(self) -> str:
        """The algorithm's name in the registry."""
        return self.spec.algorithm

    @property
    def record(self) -> Algorithm:
        """The algorithm with its hyper-parameters, as `simulate` takes it."""
        return self.spec.record

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs, in their order."""
        return tuple(run.spec.seed for run in self.runs)

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of the runs, in the order of the seeds."""
        return tuple(run.trace for run in self.runs)

    @property
    def diverged(self) -> int:
        """How many of the runs diverged."""
        return sum(run.diverged is not None for run in self.runs)

    def curve(self, label: str = "") -> Curve:
        """The setting as tables and plots take it.

        Args:
            label: Another name for the legend; empty: the setting's own.
        """
        from ..report.tables import Curve

        rounds = int(self.spec.options["rounds"])
        return Curve(label or self.label, self.traces, self.algorithm, rounds)

    def rounds(self, target: float, count: str = "first hit") -> list[int | None]:
        """Rounds to an accuracy, one number for each seed; None: not reached, or not kept.

        Args:
            target: The accuracy to reach.
            count: "first hit": the first evaluated round that reaches the target. "last below":
                the last evaluated round below it, as the paper counts.
        """
        counted = COUNTS[one_of("count", count, COUNTS)]
        check_accuracy(target, ACCURACY)
        return [counted(trace, target) for trace in self.traces]

    def mean_rounds(self, target: float, count: str = "first hit", metric: str = ACCURACY) -> float:
        """The mean rounds to a target over the seeds; infinite if one of them never gets there.

        A mean over the lucky seeds alone would make an unreliable setting look fast.

        Args:
            target: The value to reach from below.
            count: As for `rounds`.
            metric: The column of the trace.
        """
        counted = COUNTS[one_of("count", count, COUNTS)]
        check_accuracy(target, metric)
        found = [counted(trace, target, metric) for trace in self.traces]
        return float(np.mean([math.inf if rounds is None else rounds for rounds in found]))

    def finals(self, metric: str = ACCURACY) -> list[float]:
        """A metric at the end of each run, by default the accuracy.

        Args:
            metric: The column of the trace.

        Returns:
            One number for each seed, by the rule of `at_end`.
        """
        return [at_end(trace, self.spec.options["rounds"], metric) for trace in self.traces]

    def final(self, metric: str = ACCURACY) -> float:
        """The mean of `finals` over the seeds; not a number if one of them is none."""
        return float(np.mean(self.finals(metric)))


class Results(Sequence[Run]):
    """Several runs, from a comparison, a sweep, or several seeds of one setting.

    It is a sequence of runs: `len`, indices, slices and `for` work as with a list. Results of
    several calls can be put together, and chosen settings taken out:
    `Results([*first, *second])`, `Results(results.winners().values())`.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> results = fedsso.compare(fed, "mclr", ["fedsso", "fedavg"], rounds=10)
    >>> [setting.algorithm for setting in results.settings()]
    ['fedsso', 'fedavg']
    >>> results.best(target=0.8).algorithm
    'fedsso'
    >>> print(results.table([0.8]).splitlines()[0])
    | algorithm | rounds to 0.80 | megabytes | final accuracy |

    Attributes:
        target: The accuracy that a sweep was to reach, or None.
        judged: Where a sweep chose by held-out rows: the chosen settings, run again on all
            training rows. Else None.
    """

    def __init__(
        self,
        runs: Iterable[Run | Setting],
        *,
        target: float | None = None,
        judged: Results | None = None,
    ) -> None:
        """Results of runs, or of settings, whose runs are taken.

        Args:
            runs: Runs and settings, in any mixture.
            target: The accuracy that a sweep was to reach.
            judged: The best settings of a sweep, run again and evaluated on the test rows.

        Raises:
            InputError: Something else is among them.
        """
        self._runs: list[Run] = []
        for one in runs:
            if not isinstance(one, Run | Setting):
                raise InputError(f"results are made of runs and settings, got {one!r}")
            self._runs.extend(one.runs if isinstance(one, Setting) else [one])
        self.target = target
        self.judged = judged

    def __len__(self) -> int:
        """The number of runs, seeds counted one by one."""
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        """The runs in their order."""
        return iter(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Run | Results:
        """One run, or the results of a slice of them.

        A slice keeps the target, but not the settings that were judged by the test rows.
        """
        if isinstance(index, slice):
            return Results(self._runs[index], target=self.target)
        return self._runs[index]

    def __repr__(self) -> str:
        """The numbers of runs and settings, and the algorithms."""
        names = ", ".join(self.algorithms())
        return f"Results({len(self)} runs, {len(self.settings())} settings of {names})"

    # ---- settings, and the best of them ----

    def settings(self) -> list[Setting]:
        """The settings in the order of their first runs, with the seeds of each together.

        Runs belong to one setting if data, model, algorithm, hyper-parameters and run options are
        the same, the seed and the device aside. Their labels tell them apart. A run that occurs
        twice counts once: it would look like another seed, and make the deviation too small.
        """
        return list(self._settings)

    @cached_property
    def _settings(self) -> list[Setting]:
        """What `settings` returns, made once: every table and every choice asks for it."""
        groups: dict[str, list[Run]] = {}
        seen: set[str] = set()
        for run in self:
            if run.spec.identity not in seen:
                seen.add(run.spec.identity)
                groups.setdefault(run.spec.point, []).append(run)
        labels = _labels([runs[0].spec for runs in groups.values()])
        return [
            Setting(label, tuple(runs)) for label, runs in zip(labels, groups.values(), strict=True)
        ]

    def algorithms(self) -> dict[str, Results]:
        """The runs of each algorithm by its name, in the order of the sweep.

        Each part keeps the target, so that its own `best` follows the same rule.
        """
        found: dict[str, list[Run]] = {}
        for run in self:
            found.setdefault(run.spec.algorithm, []).append(run)
        return {name: Results(runs, target=self.target) for name, runs in found.items()}

    def best(
        self, target: float | None = None, metric: str | None = None, count: str = "first hit"
    ) -> Setting:
        """The best setting.

        It has the fewest mean rounds to the target, which defaults to the sweep's own; a seed
        that misses the target counts as never. Without a target, and among equals, the best mean
        value at the end decides, of those that were trained for the most rounds. The metric is the
        accuracy, or the test loss where there is no accuracy; a loss is best when small. Where a
        sweep was told to choose by held-out rows, so does this; `winners` has the chosen settings
        as the test rows judge them.

        Args:
            target: The accuracy to reach in few rounds; None: that of the sweep, if it had one.
            metric: The column of the trace to compare by; None: what `metric()` says.
            count: How rounds to a target are counted: "first hit", or "last below" as in the
                paper.

        Raises:
            InputError: There are no runs, or a target is given for a loss.

        >>> import fedsso
        >>> fed = fedsso.load("digits", clients=5, partition="iid")
        >>> steps = fedsso.grid("fedavg", {"alpha": [0.001, 0.1]})
        >>> fedsso.sweep(fed, "mclr", steps, rounds=5).best().record
        FedAvg(alpha=0.1, eta=1.0)
        """
        if not len(self):
            raise InputError("there are no runs to choose from")
        goal = self.target if target is None else target
        name = metric or self.metric()
        wants_small = name.endswith("loss")
        if goal is not None and wants_small:
            raise InputError(
                f"a target is reached from below: give a metric such as {ACCURACY}, not {name}"
            )

        def cost(setting: Setting) -> tuple[float, float, float]:
            rounds = math.inf if goal is None else setting.mean_rounds(goal, count, name)
            final = setting.final(name)
            # A setting without a number at the end loses against all that have one.
            if not math.isfinite(final):
                return rounds, 0.0, math.inf
            # One that a search has dropped on the way loses against those that went on.
            trained = float(setting.spec.options.get("rounds", 0))
            return rounds, -trained, final if wants_small else -final

        return min(self.settings(), key=cost)

    def metric(self) -> str:
        """What settings are compared by: the test accuracy, or the test loss if there is none.

        There is none for real targets, where no prediction is right or wrong.
        """
        has_accuracy = any(run.trace.has_accuracy for run in self)
        return ACCURACY if has_accuracy else LOSS

    def winners(self, target: float | None = None) -> dict[str, Setting]:
        """The best setting of each algorithm, as the test rows judge it.

        Where a sweep chose by held-out rows, these are the runs of the chosen settings on all
        training rows. `Results(results.winners().values())` has their table and plot.

        Args:
            target: As for `best`. It changes nothing where a sweep has judged its choice already.

        Returns:
            The settings by the names of the algorithms.
        """
        if target is not None:
            accuracies([target])
        if self.judged is not None:
            return {setting.algorithm: setting for setting in self.judged.settings()}
        return {name: own.best(target) for name, own in self.algorithms().items()}

    def working(self, target: float) -> int:
        """How many settings reach the target with every seed.

        Args:
            target: The accuracy to reach.
        """
        return sum(s.mean_rounds(target) < math.inf for s in self.settings())

    def lasting(self, target: float) -> int:
        """How many settings reach the target with every seed and never diverge afterwards.

        Args:
            target: The accuracy to reach.
        """
        reach = [s for s in self.settings() if s.mean_rounds(target) < math.inf]
        return sum(not setting.diverged for setting in reach)

    def axes(self) -> dict[str, list[Any]]:
        """What has several values in one algorithm's grid: its axes.

        Call it on the results of one algorithm, as `algorithms()` returns them.

        Returns:
            The values of each axis in their order, by its name. Hyper-parameters come first, then
            run options such as `local_steps`, and whatever else tells the settings apart.

        >>> import fedsso
        >>> fed = fedsso.load("digits", clients=5, partition="iid")
        >>> steps = fedsso.grid("fedavg", {"alpha": [0.01, 0.1]})
        >>> fedsso.sweep(fed, "mclr", steps, rounds=2, local_steps=[1, 5]).axes()
        {'alpha': [0.01, 0.1], 'local_steps': [1, 5]}
        """
        each = [described(setting.spec) for setting in self.settings()]
        names = dict.fromkeys(name for one in each for name in one)
        varied = _varied(each)
        return {name: _distinct(one.get(name) for one in each) for name in names if name in varied}

    # ---- tables, plots, files ----

    def curves(self) -> list[Curve]:
        """The settings as curves for tables and plots.

        The label tells if a sweep judged them by held-out rows instead of the test rows.
        """
        found = []
        for setting in self.settings():
            held_out = setting.runs[0].judged_by == "val"
            found.append(setting.curve(f"{setting.label} on held-out rows" if held_out else ""))
        return found

    def table(
        self,
        targets: float | Sequence[float] | None = None,
        *,
        labels: Mapping[str, str] | None = None,
    ) -> Table:
        """Rounds and megabytes to each target accuracy: a text in Markdown that can do more.

        A row for each setting. Megabytes are those of the highest target that every seed reaches,
        for the whole federation and in both directions. With several seeds a cell is "mean ±
        standard deviation"; a dash stands for a target that is not reached. The final accuracy is
        that of `Setting.final`, by which sweeps choose; where there is no accuracy, the final test
        loss takes its place.

        For a paper, `table().to_latex("table.tex")`; there are also `to_markdown`, `to_csv` and
        `to_pandas`. The best settings of a sweep: `Results(results.winners().values()).table()`.

        Args:
            targets: Accuracies in (0, 1], or one of them. Left out, they are some that suit, and
                that of the sweep.
            labels: Other names, by the labels of the settings or by the names of algorithms, such
                as {"fedsso": "FedSSO (ours)"}.

        Raises:
            InputError: A target is no accuracy, such as 90 where 0.9 was meant, or a label is not
                known.
        """
        from ..report import tables, written

        curves = self.curves()
        chosen = [] if targets is None else accuracies(targets)
        if not chosen:
            own = [] if self.target is None else [self.target]
            chosen = sorted({*tables.default_targets(curves), *own})
        return written.table(tables.renamed(curves, labels or {}), chosen)

    def rows(self, targets: float | Sequence[float] = ()) -> list[dict[str, Any]]:
        """One row of plain numbers for each run, seeds of a setting together.

        Args:
            targets: Accuracies; for each there are the rounds to it, counted in both ways.

        Returns:
            Rows with the keys "algorithm", "setting", "seed", "final" (by the rule of `at_end`),
            "last" (the last evaluation), "best" (the best one) and "diverged", and for a target
            of 0.9 also "first hit 0.9" and "last below 0.9".
        """
        found = []
        chosen = accuracies(targets)
        for setting in self.settings():
            for run in setting.runs:
                found.append(_row(setting, run, chosen))
        return found

    def to_pandas(self) -> pd.DataFrame:
        """All traces below each other, with the setting's label first.

        `table().to_pandas()` has one row for each setting instead, and `rows` one for each run.

        Returns:
            A row for each round of each run; "seed" and "round" are among the columns. It needs
            the package pandas.

        >>> import fedsso
        >>> fed = fedsso.load("digits", clients=5, partition="iid")
        >>> frame = fedsso.compare(fed, "mclr", ["fedsso", "fedavg"], rounds=2).to_pandas()
        >>> frame.groupby("label", sort=False)["round"].max().to_dict()
        {'fedsso alpha=auto': 2, 'fedavg alpha=0.01': 2}
        """
        import pandas as pd

        frames = []
        for setting in self.settings():
            for run in setting.runs:
                frame = run.to_pandas()
                frame.insert(0, "label", setting.label)
                frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def plot(
        self,
        path: str | Path,
        *,
        targets: float | Sequence[float] = (),
        title: str = "",
        metrics: str | Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        colors: Mapping[str, str] | None = None,
        size: tuple[float, float] | None = None,
        rc: Mapping[str, Any] | None = None,
    ) -> None:
        """Draw accuracy and loss over rounds, with the seeds as a band.

        Args:
            path: The file. Its suffix decides the format: .png, or .pdf and .svg, which can be
                enlarged without end.
            targets: Accuracies to mark by dotted lines.
            title: A heading for the picture.
            metrics: Columns of the trace to draw, or one of them; left out: the test accuracy and
                the training loss, each in a panel.
            labels: Names for the legend, by the labels of the settings or by the names of
                algorithms, such as {"fedsso": "FedSSO (ours)"}.
            colors: Colours, by the same keys, such as {"fedsso": "black"}.
            size: Width and height in inches; left out: a size that suits a screen.
            rc: Settings of matplotlib by name, such as {"font.family": "serif", "font.size": 8}.

        Raises:
            InputError: The format, a label, a column, a colour or a setting is not known, or the
                file cannot be written.
        """
        from ..report import plot

        plot(
            self.curves(),
            path,
            title=title,
            targets=accuracies(targets),
            metrics=metrics,
            labels=labels,
            colors=colors,
            size=size,
            rc=rc,
        )

    def maps(self, target: float) -> list[Heat]:
        """Mean rounds to the target over each algorithm's grid, for `report.figures.heat_maps`.

        A grid with three axes or more has a map for each combination of the further values. Run
        options that were varied are axes too, behind the hyper-parameters.

        Args:
            target: The accuracy to reach.
        """
        accuracies([target])
        found: list[Heat] = []
        for own in self.algorithms().values():
            found.extend(_maps(own, target))
        return found

    def report(
        self,
        path: str | Path,
        *,
        title: str = "",
        text: str = "",
        targets: float | Sequence[float] | None = None,
    ) -> None:
        """Write one interactive HTML page that needs no other file.

        It has curves, tables, grids, the data of each client, and the settings. The best settings
        on it are those of `winners`. Where a sweep chose by held-out rows, these lead, as the test
        rows judge them, and the grid is in the background.

        Args:
            path: The page; a file that is there is replaced.
            title: Its heading; empty: one is made.
            text: An introduction, in which blank lines part paragraphs.
            targets: Accuracies of the table; left out: some that suit.
        """
        from ..report import page

        chosen = None if targets is None else accuracies(targets)
        # Data are shown once, though many runs share them. A run that was loaded has none.
        feds = {run.spec.digest: run.live.fed for run in self if run.live is not None}
        held = [one for one in map(holding, feds.values()) if one is not None]
        notes = [] if self.judged is None else [HELD_OUT]
        # What was run on a part of the training rows cannot be repeated by a command.
        settings = (self.judged or self).settings()
        recipes = [recipe(setting) for setting in settings]
        # Without a target the end decides, as in `best`.
        goal = math.inf if self.target is None else self.target
        content = page.Content(entries(self), title, text, chosen, notes, held, recipes, goal)
        page.write(path, content)

    def save(self, folder: str | Path) -> None:
        """Write one folder per run below `folder`, each with its model.

        `fedsso.load_runs` reads them back. It is what `compare(..., out=folder)` does by itself.

        Args:
            folder: It is made if it is not there.

        Raises:
            InputError: A run has no model, as those of a sweep, or its folder holds another run.
        """
        for i, run in enumerate(self):
            run.save(Path(folder) / run.spec.folder(i))


def _labels(specs: Sequence[Spec]) -> list[str]:
    """A label for each setting; where two would be the same, they tell what differs.

    Args:
        specs: The settings, one of each.
    """
    told = [_told(spec) for spec in specs]
    names = [spec.label for spec in specs]
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, one in zip(names, told, strict=True):
        groups.setdefault(name, []).append(one)
    varied = {name: _varied(group) for name, group in groups.items()}
    found = []
    for name, one in zip(names, told, strict=True):
        words = [f"{key}={value}" for key, value in one.items() if key in varied[name]]
        found.append(" ".join([name, *words]))
    return found


def _varied(group: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names that have several values in a group of settings."""
    first = group[0]
    names = {name for one in group for name in one}
    return {name for name in names if any(one.get(name) != first.get(name) for one in group)}


def _told(spec: Spec) -> dict[str, Any]:
    """What may differ between settings of one label, by name.

    These are the model, the run options and the data. The seed of the data is called
    "partition_seed", so that it is not taken for the seed of the run.
    """
    options = {name: v for name, v in spec.options.items() if name not in (*FREE, "seed")}
    data = {"partition_seed" if name == "seed" else name: v for name, v in spec.data.items()}
    return {"model": spec.model, **options, **(data or {"data": spec.digest[:8]})}


def described(spec: Spec) -> dict[str, Any]:
    """Everything that may differ between settings of one algorithm, hyper-parameters first."""
    others = {name: value for name, value in _told(spec).items() if name not in spec.hyper}
    return {**spec.hyper, **others}


def _row(setting: Setting, run: Run, targets: Sequence[float]) -> dict[str, Any]:
    """The numbers of one run, for `Results.rows`."""
    trace = run.trace
    row: dict[str, Any] = {
        "algorithm": setting.algorithm,
        "setting": setting.label,
        "seed": run.spec.seed,
    }
    for name, counted in COUNTS.items():
        for target in targets:
            row[f"{name} {target:g}"] = counted(trace, target)
    values = trace.evaluations()[1]
    best = float(np.nanmax(values)) if np.isfinite(values).any() else math.nan
    row["final"] = at_end(trace, run.spec.options["rounds"])
    row["last"] = trace.final()
    row["best"] = best
    row["diverged"] = trace.diverged
    return row


# ---- grids as maps ----


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Values in the order of their first appearance, each once.

    A schedule is a dictionary, which only its text can stand for in a set.
    """
    return list({_key(value): value for value in values}.values())


def _key(value: Any) -> Any:
    """What stands for the value of an axis in a set."""
    return repr(value) if isinstance(value, dict | list) else value


class _Axis(NamedTuple):
    """One side of a map: an axis of the grid, and its values in order."""

    name: str
    values: list[Any]

    def place(self, setting: Setting) -> int:
        """Where a setting stands on this side; on a side without a name there is one place."""
        return self.values.index(described(setting.spec).get(self.name)) if self.name else 0


def _maps(grid: Results, target: float) -> Iterator[Heat]:
    """The maps of one algorithm's grid: the first two axes are the sides of each.

    Args:
        grid: The results of one algorithm.
        target: The accuracy to reach.
    """
    sides = [_Axis(name, values) for name, values in grid.axes().items()]
    further = sides[2:]
    # A grid with fewer than two axes is filled up with sides of a single, nameless value.
    down, across = [*sides, _Axis("", [""]), _Axis("", [""])][:2]
    settings = grid.settings()
    for picked in itertools.product(*(side.values for side in further)):
        fixed = {side.name: value for side, value in zip(further, picked, strict=True)}
        told = [f"{_symbol(name)}={_text(value)}" for name, value in fixed.items()]
        within = []
        for setting in settings:
            values = described(setting.spec)
            if all(values.get(name) == value for name, value in fixed.items()):
                within.append(setting)
        # Not all combinations need be there if results of several calls are put together.
        if within:
            yield _map(" ".join([settings[0].algorithm, *told]), within, down, across, target)


def _map(
    title: str, settings: Sequence[Setting], down: _Axis, across: _Axis, target: float
) -> Heat:
    """One map: mean rounds to the target, NaN where a seed misses it.

    Args:
        title: Its heading.
        settings: The settings that belong on it.
        down: The vertical side.
        across: The horizontal side.
        target: The accuracy to reach.
    """
    from ..report.figures import Heat

    values = np.full((len(down.values), len(across.values)), np.nan)
    lost = np.zeros(values.shape, bool)
    for setting in settings:
        place = down.place(setting), across.place(setting)
        mean = setting.mean_rounds(target)
        values[place] = mean if math.isfinite(mean) else np.nan
        lost[place] = setting.diverged > 0
    rows = [_text(value) for value in down.values]
    columns = [_text(value) for value in across.values]
    return Heat(title, _symbol(down.name), _symbol(across.name), rows, columns, values, lost)


def _symbol(name: str) -> str:
    """The paper's symbol of a field, or its name."""
    return SYMBOLS.get(name, name)


def _text(value: Any) -> str:
    """A value of an axis as the map shows it; a schedule looks as in labels."""
    if isinstance(value, dict):
        return f"decay({','.join(map(_text, value.values()))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- parts of a report ----


def entries(results: Results) -> list[Entry]:
    """The settings as curves of a report page, with what the page needs to draw their grid.

    Where settings were chosen by held-out rows, the chosen ones come first and lead. They were run
    again on all training rows. They have no place on the maps of the grid, so their `hyper` is
    empty: the runs on the maps are those by which they were chosen.
    """
    from ..report.page import Entry

    found = []
    names = _data_names(results)
    if results.judged is not None:
        for entry in entries(results.judged):
            found.append(entry._replace(hyper={}, lead=True))
        # The grid was run on a part of the same data.
        names = dict.fromkeys(names, found[0].data)
    # `curves` tells in the label if a setting was judged by held-out rows.
    for setting, curve in zip(results.settings(), results.curves(), strict=True):
        spec = setting.spec
        data = names[spec.digest]
        found.append(Entry(curve, described(spec), data=data, by_client=_asked(setting)))
    return found


def _data_names(results: Results) -> dict[str, str]:
    """A name for each federation, by its digest; equal names are told apart by the digests."""
    names = {}
    for run in results:
        unnamed = "held-out rows" if run.judged_by == "val" else "own arrays"
        names[run.spec.digest] = data_name(run.spec.data) or unnamed
    count = Counter(names.values())
    found = {}
    for digest, name in names.items():
        found[digest] = name
        if count[name] > 1:
            found[digest] = f"{name} {digest[:8]}"
    return found


def _asked(setting: Setting) -> Callable[[], Served] | None:
    """What asks the models of a setting how they serve each client; None without models."""
    from ..report.by_client import by_client

    for run in setting.runs:
        if run.live is None or run.weights is None:
            return None
    live = setting.runs[0].live
    assert live is not None
    return partial(by_client, setting.runs, live.fed)


def recipe(setting: Setting, path: str = SPEC) -> Recipe:
    """A setting's TOML, and the command that repeats it, or why there is no such command.

    Args:
        setting: The setting; its file is that of the first seed.
        path: Where the file will be, for the command.
    """
    from ..report.page import Recipe

    text = to_toml(setting.spec.to_toml())
    own = _own(setting.spec)
    if own:
        why = (
            f"No command repeats this, because no file holds {' and '.join(own)} of one's own: "
            f"call fedsso from Python."
        )
        return Recipe(setting.label, text, why=why)
    seeds = setting.seeds
    several = f" --seeds {','.join(map(str, seeds))}" if len(seeds) > 1 else ""
    command = f"fedsso run --config {quote(path)}{several}"
    return Recipe(setting.label, text, command)


def _own(spec: Spec) -> list[str]:
    """What the run took from Python that no file of settings can hold, in words."""
    found = []
    if spec.algorithm not in ALGORITHMS:
        found.append("an algorithm")
    if not spec.data:
        found.append("data")
    if spec.model == "own":
        found.append("a module")
    # `specify` writes such objects as "own" and a name.
    words = {"loss": "a loss", "init": "an initial model", "metrics": "metrics"}
    for name, word in words.items():
        value = spec.options[name]
        values = value if isinstance(value, tuple | list) else [value]
        if any(str(one).startswith("own ") for one in values):
            found.append(word)
    return found


def holding(fed: Federation) -> Holding | None:
    """How many rows of each label every client has; None where targets are real numbers."""
    from ..report.page import Holding

    if not fed.classes:
        return None
    names = fed.client_names or [str(i) for i in range(fed.clients)]
    title = f"{data_name(fed.source) or 'own arrays'}, {fed.clients} clients"
    counts = fed.label_counts().cpu().numpy()
    return Holding(title, names, counts, fed.labels)
