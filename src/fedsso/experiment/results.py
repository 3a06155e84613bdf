"""What the user holds after a simulation: `Run` and `Runs`, with their folder form.

A run's folder holds spec.toml (the settings, also valid for `fedsso run --config`), trace.csv and
checkpoint.safetensors (the model; while the run is under way also everything needed to go on).
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data import Federation
from ..engine import checkpoint
from ..engine.checkpoint import of_text, text_of
from ..engine.evaluate import Evaluator
from ..engine.gather import Gather
from ..engine.simulate import Simulation
from ..errors import InputError
from ..objective import buffers_into, buffers_of, objective, ravel, unravel_into
from ..report import page as report_page
from ..report import tables as report
from ..support.files import to_toml, write_atomic
from ..support.intake import Damaged, inside, is_file, is_folder, read_text
from ..support.lock import Lock
from .problem import Context
from .spec import Spec
from .trace import COLUMNS, INTEGERS, Trace

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedsso")
SPEC, TRACE, CHECKPOINT = "spec.toml", "trace.csv", "checkpoint.safetensors"
ZERO = {*INTEGERS, "seconds"}


@dataclass(frozen=True, eq=False)
class Run:
    """One algorithm with one setting and one seed: the trace and the trained model."""

    spec: Spec
    trace: Trace
    x: Tensor  # the model as a flat vector [d]
    buffers: Tensor  # [b]
    live: Context | None = (
        None  # federation, architecture, loss; None after loading a run from its folder
    )
    personal: Tensor | None = (
        None  # each client's own model [clients, d], of which x is then the weighted mean
    )
    module: nn.Module | None = (
        None  # the architecture, where it is the user's own and the run was loaded
    )

    def __repr__(self) -> str:
        return f"Run({self.label}, seed {self.spec.seed}, {len(self.trace) - 1} rounds, accuracy {self.final():.4f})"

    @property
    def label(self) -> str:
        """Algorithm and the settings that differ from its defaults."""
        return self.spec.label

    @property
    def diverged(self) -> int | None:
        """The round in which the run diverged, or None."""
        return self.trace.diverged

    def rounds_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """First evaluated round that reaches the target (round 0 is the initial model), None if
        never."""
        return self.trace.rounds_to(target, metric)

    def last_below(self, target: float, metric: str = "test_accuracy") -> int | None:
        """Last evaluated round below the target (the paper's count): None if the run ends below it,
        -1 if none is."""
        return self.trace.last_below(target, metric)

    def bytes_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """Bytes of the whole federation, both ways, until the target is first reached."""
        return self.trace.bytes_to(target, metric)

    def final(self, metric: str = "test_accuracy", last: int = 1) -> float:
        """Mean of the last evaluations."""
        return self.trace.final(metric, last)

    def to_pandas(self) -> pd.DataFrame:
        """The trace, one row per round."""
        return self.trace.to_pandas()

    def plot(self, path: str | Path, *, targets: Sequence[float] = ()) -> None:
        """Accuracy and loss over rounds as PNG, PDF or SVG, by the path's suffix."""
        Runs([self]).plot(path, targets=targets)

    @property
    def model(self) -> nn.Module:
        """The trained module (a new copy each time); of personal models the weighted mean, which is
        not what was tested: `personal` holds those."""
        module = copy.deepcopy(self.live.module if self.live else self.module or self.spec.module())
        module = module.to("cpu", self.x.dtype)
        unravel_into(module, self.x)
        with torch.no_grad():
            buffers_into(module, self.buffers)
        return module.eval()

    def clients(self) -> pd.DataFrame:
        """Test loss and metrics at each client, of its own model where it has one."""
        import pandas as pd

        live = self.live or self.spec.context(model=self.module, trained=True)
        fed = live.fed
        f, _ = objective(self.model, live.loss, "auto", torch.device("cpu"), fed.sample_shape)
        evaluate = Evaluator(f, fed, Gather(fed, self.x.dtype), live.metrics)
        names = fed.client_names or [str(i) for i in range(fed.clients)]
        rows = []
        for i, name in enumerate(names):
            x = self.x if self.personal is None else self.personal[i]
            with torch.no_grad():
                found = evaluate(x[None], self.buffers[None], fed.rows_of(i, "test"))
            sizes = {"train_rows": int(fed.train_sizes[i]), "test_rows": int(fed.test_sizes[i])}
            rows.append({"client": name, **sizes, **{k: float(v[0]) for k, v in found.items()}})
        return pd.DataFrame(rows)

    def save(self, folder: str | Path) -> None:
        """Write the run's folder; `fedsso.load_run` reads it back."""
        self.spec.record  # noqa: B018  # an algorithm that is not registered could not be read back
        folder = Path(folder)
        text = self.trace.to_csv()
        done = {
            "model": self.x,
            "buffers": self.buffers,
            "done": _digest(text),
            "trace": of_text(text),
        }
        done["diverged"] = torch.tensor(self.diverged or 0)
        if self.personal is not None:
            done["personal"] = self.personal
        with Lock(folder):
            if is_file(folder / SPEC) and Spec.load(folder / SPEC).identity != self.spec.identity:
                raise InputError(f"{folder} holds another run; choose another folder")
            self.spec.save(folder / SPEC)
            write_atomic(folder / TRACE, text)
            checkpoint.save(folder / CHECKPOINT, done, self.spec.identity)


class Runs(Sequence[Run]):
    """Several runs: a sweep, a comparison, the seeds of one setting."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __repr__(self) -> str:
        return f"Runs({len(self)} runs, {len(self.settings())} settings)"

    def settings(self) -> dict[str, Runs]:
        """The runs of each setting, seeds together."""
        groups: dict[str, list[Run]] = {}
        for run in self:
            groups.setdefault(run.label, []).append(run)
        return {label: Runs(runs) for label, runs in groups.items()}

    def best(self, target: float | None = None, metric: str | None = None) -> Run:
        """The run of the best setting (its first seed): fewest rounds to the target on the mean
        over seeds, a seed that misses it counting as never; ties and no target: the best final
        value. A loss is best when small; without a metric it is the accuracy, or the test loss
        where there is no accuracy."""
        if not len(self):
            raise InputError("there are no runs to choose from")
        name = metric or ("test_accuracy" if any(run.final() >= 0 for run in self) else "test_loss")
        sign = 1.0 if name.endswith("loss") else -1.0
        if target is not None and sign > 0:
            raise InputError(
                f"a target is reached from below: give a metric such as test_accuracy, not {name}"
            )

        def cost(runs: Runs) -> tuple[float, float]:
            hits = (
                [math.inf]
                if target is None
                else [_or_never(run.rounds_to(target, name)) for run in runs]
            )
            final = float(np.mean([run.final(name) for run in runs]))
            return float(np.mean(hits)), sign * final if math.isfinite(final) else math.inf

        return min(self.settings().values(), key=cost)[0]

    def curves(self) -> list[report.Curve]:
        """The runs as curves for tables and plots."""
        return [
            report.Curve(label, tuple(run.trace for run in runs), runs[0].spec.algorithm)
            for label, runs in self.settings().items()
        ]

    def table(self, targets: Sequence[float] | None = None) -> str:
        """Rounds and megabytes to each target accuracy, as Markdown."""
        curves = self.curves()
        return report.markdown(
            report.rounds_table(curves, targets or report.default_targets(curves))
        )

    def to_pandas(self) -> pd.DataFrame:
        """All traces below each other, with the setting's label first."""
        import pandas as pd

        frames = [run.to_pandas().assign(label=run.label) for run in self]
        frame = pd.concat(frames, ignore_index=True)
        return frame[["label", *[c for c in frame if c != "label"]]]

    def plot(self, path: str | Path, *, targets: Sequence[float] = (), title: str = "") -> None:
        """Accuracy and loss over rounds, seeds as bands."""
        report.plot(self.curves(), path, title=title, targets=targets)

    def report(
        self,
        path: str | Path,
        *,
        title: str = "",
        text: str = "",
        targets: Sequence[float] | None = None,
    ) -> None:
        """One interactive HTML page that needs no other file: curves, tables, grids, who holds
        what, settings."""
        pairs = [(run.spec, run.trace) for run in self]
        feds = {run.spec.digest: run.live.fed for run in self if run.live is not None}
        held = [one for one in map(holding, feds.values()) if one is not None]
        recipes = [
            recipe(runs[0].spec, [run.spec.seed for run in runs])
            for runs in self.settings().values()
        ]
        report_page.write(
            path, report_page.Content(entries(pairs), title, text, targets, (), held, recipes)
        )

    def save(self, folder: str | Path) -> None:
        """One folder per run below `folder`."""
        for i, run in enumerate(self):
            run.save(Path(folder) / run.spec.folder(i))


# ---- parts of a report ----


def entries(pairs: Sequence[tuple[Spec, Trace]]) -> list[report_page.Entry]:
    """Settings and traces as curves, seeds together."""
    groups: dict[str, list[tuple[Spec, Trace]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].label, []).append(pair)
    return [
        report_page.Entry(
            report.Curve(label, tuple(t for _, t in own), own[0][0].algorithm), own[0][0].hyper
        )
        for label, own in groups.items()
    ]


def recipe(spec: Spec, seeds: Sequence[int], path: str = SPEC) -> report_page.Recipe:
    """A setting's TOML, and the command that repeats it."""
    several = f" --seeds {','.join(map(str, seeds))}" if len(seeds) > 1 else ""
    return report_page.Recipe(
        spec.label, to_toml(spec.to_toml()), f"fedsso run --config {quote(path)}{several}"
    )


def holding(fed: Federation) -> report_page.Holding | None:
    """Who holds which labels; None where targets are real."""
    if not fed.classes:
        return None
    names = fed.client_names or [str(i) for i in range(fed.clients)]
    return report_page.Holding(
        f"{fed.name}, {fed.clients} clients", names, fed.label_counts().cpu().numpy()
    )


def _or_never(hit: int | None) -> float:
    return math.inf if hit is None else float(hit)


def traces(simulation: Simulation, specs: Sequence[Spec]) -> list[Trace]:
    """One trace per trial from the engine's rows of [trials] tensors.

    A stopped trial ends at its stop. A diverged one has all rounds, also where nobody was left to
    run them.
    """
    rows, diverged = simulation.rows, simulation.diverged.tolist()
    table = {name: column.cpu().numpy() for name, column in simulation.columns().items()}
    out = []
    for t, (spec, ended) in enumerate(zip(specs, simulation.ended.tolist(), strict=True)):
        length = len(rows) if ended < 0 else ended + 1
        if diverged[t]:
            length = spec.options["rounds"] + 1 if simulation.finished else len(rows)
        columns = {
            n: _filled(table.get(n), t, n, length) for n in dict.fromkeys((*COLUMNS, *table))
        }
        columns |= {
            "trial": np.full(length, spec.trial),
            "seed": np.full(length, spec.seed),
            "round": np.arange(length),
        }
        if diverged[t]:
            columns["test_accuracy"][diverged[t] :] = 0.0
            for name in ("bytes_up", "bytes_down", "seconds"):  # nothing more is sent
                columns[name][diverged[t] + 1 :] = 0
        out.append(Trace(columns, spec.options["eval_every"], diverged[t] or None))
    return out


def _filled(values: NDArray[Any] | None, t: int, name: str, length: int) -> NDArray[Any]:
    """A trial's column of the wished length: what is unknown is NaN, or 0 where a number is
    counted."""
    column = np.full(length, np.nan)
    if values is not None:
        known = values[:length, t]
        column[: len(known)] = known
    if name in ZERO:
        column = np.nan_to_num(column)
    return column.astype(np.int64) if name in INTEGERS else column


def load_run(
    folder: str | Path, *, federation: Federation | None = None, model: nn.Module | None = None
) -> Run:
    """Read a finished run's folder; `model` is the architecture where it was a module of your own."""
    folder = Path(folder)
    if not (folder / SPEC).is_file() and any(folder.glob(f"*/{SPEC}")):
        raise InputError(
            f"{folder} holds several runs: load_runs reads them, load_run one of the folders below"
        )
    spec = Spec.load(folder / SPEC)
    path = folder / CHECKPOINT
    if not checkpoint.exists(path):
        raise InputError(
            f"{folder} holds a run that has not begun; `fedsso resume {folder}` completes it"
        )
    try:
        saved = checkpoint.load(path, spec.identity)
        if "done" not in saved:
            raise InputError(
                f"{folder} holds a run that is not finished; `fedsso resume {folder}` completes it"
            )
        diverged = _check_finished(saved)
    except Damaged as damage:
        raise InputError(f"{damage}; `fedsso resume {folder}` computes it again") from damage
    trace = Trace.from_csv(
        _trace_text(folder / TRACE, saved), folder / TRACE, spec.options["eval_every"], diverged
    )
    if model is not None:
        _same_size(model, saved)
    live = None if federation is None else spec.context(federation, model, trained=True)
    return Run(spec, trace, saved["model"], saved["buffers"], live, saved.get("personal"), model)


def _check_finished(saved: Mapping[str, Tensor]) -> int | None:
    """The round in which a finished run diverged; refuses a checkpoint that does not hold what one
    must."""
    read = checkpoint.Reader(saved, torch.device("cpu"))
    read.finite("model", axes=1)
    read.numbers("buffers", axes=1)  # a variance may be infinite where columns are huge
    if "personal" in saved:
        read.finite("personal", axes=2)
    return read.count("diverged") or None


def _trace_text(path: Path, saved: Mapping[str, Tensor]) -> str:
    """The trace of a finished run: that of its file or, where this is damaged, the copy in the
    checkpoint."""
    digest = saved["done"]
    with suppress(InputError):
        text = read_text(path)
        if torch.equal(digest, _digest(text)):
            return text
    copy = text_of(saved["trace"]) if "trace" in saved else ""
    if not torch.equal(digest, _digest(copy)):
        raise InputError(f"{path} is not the trace that this run wrote; restore it, or run again")
    log.warning("%s is not as this run wrote it; the copy in the checkpoint is used", path)
    return copy


def _same_size(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    for what, own, held in (
        ("parameters", ravel(model), saved["model"]),
        ("numbers in buffers", buffers_of(model), saved["buffers"]),
    ):
        if own.numel() != held.numel():
            raise InputError(
                f"this model has {own.numel()} {what}, that of the run {held.numel()}: give its "
                f"architecture"
            )


def load_runs(folder: str | Path) -> Runs:
    """A run's folder, or a folder of such folders, as runs."""
    return Runs([load_run(one) for one in run_folders(folder)])


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders at or directly below a folder, in order."""
    folder = Path(folder)
    if is_file(folder / SPEC):
        return [folder]
    found = [one for one in inside(folder) if is_folder(one) and is_file(one / SPEC)]
    if not found:
        raise InputError(
            f"{folder} holds no run (no {SPEC} in it or below it); give the --out folder of a run"
        )
    return found


def _digest(text: str) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def is_done(folder: Path, spec: Spec) -> bool:
    """Whether a run's folder holds the finished run of these settings."""
    try:
        saved = checkpoint.load(folder / CHECKPOINT, spec.identity)
        if "done" not in saved:
            return False
        _check_finished(saved)
    except Damaged:  # it will be computed again
        return False
    return True
