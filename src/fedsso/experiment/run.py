"""One finished run: its settings, its trace and its trained model, with the folder that keeps them.

A run's folder holds spec.toml (the settings, also valid for `fedsso run --config`), trace.csv and
checkpoint.safetensors (the model; while the run is under way also everything needed to go on).
The checkpoint of a finished run holds a copy of the trace and its digest, so a changed or
truncated trace.csv is noticed, and the copy is used in its place.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithm import Algorithm
from ..algorithms import ALGORITHMS
from ..engine import checkpoint
from ..engine.checkpoint import of_text, text_of
from ..engine.evaluate import Evaluator
from ..engine.gather import gathering
from ..errors import InputError
from ..models.adapters import merged
from ..objective.backend import Layout, buffers_into, buffers_of, ravel, unravel_into
from ..objective.choose import objective
from ..support.files import write_atomic
from ..support.intake import Damaged, inside, is_file, is_folder, read_text
from ..support.lock import Lock
from .spec import CHECKPOINT, SPEC, TRACE, Spec
from .trace import Trace, check_accuracy

if TYPE_CHECKING:
    import pandas as pd

    from ..algorithm import Algorithm
    from ..data import Federation
    from ..report.written import Table
    from .problem import Problem

log = logging.getLogger("fedsso")


class Weights(NamedTuple):
    """A trained model as flat vectors.

    The trainable parameters of the module lie one after the other in `x`, in the module's own
    order. Buffers, such as BatchNorm's statistics, are kept apart.
    """

    x: Tensor  # the parameters [d]
    buffers: Tensor  # [b]
    personal: Tensor | None = None  # each client's own model [clients, d]; x is their mean


@dataclass(frozen=True, eq=False)
class Run:
    """One run of an algorithm, with one setting and one seed: its training curve and its model.

    `simulate` returns one, and `Results` is a sequence of them. It is a record of what has
    happened and does not change. Round 0 is the initial model, so the trace of a run of K rounds
    has K + 1 rows.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5, partition="iid")
    >>> run = fedsso.simulate(fed, "mclr", "fedavg", rounds=5)
    >>> run.rounds_to(0.5), len(run.trace), sum(p.numel() for p in run.model.parameters())
    (1, 6, 650)

    The trace has a column for each measurement:

    >>> run.trace["bytes_up"].tolist()
    [0, 13000, 13000, 13000, 13000, 13000]
    >>> list(run.clients().columns)
    ['client', 'train_rows', 'test_rows', 'loss', 'accuracy']
    >>> run.to_pandas()["bytes_up"].sum()
    np.int64(65000)

    Attributes:
        spec: The settings as plain values; `spec.options` has the run options by name.
        trace: One row for each round, as columns of numbers.
        weights: The trained model as flat vectors; None for the runs of a sweep, which keeps no
            models.
        live: The data, the architecture and the loss; None after a run was loaded.
        module: The architecture of a loaded run, where it is the user's own.
        judged_by: The rows that were evaluated: "test", or "val" for rows that were held out.
    """

    spec: Spec
    trace: Trace
    weights: Weights | None = None
    live: Problem | None = None
    module: nn.Module | None = None
    judged_by: str = "test"

    def __repr__(self) -> str:
        """Label, seed, rounds done and the last accuracy, in one line."""
        told = f"seed {self.spec.seed}, {len(self.trace) - 1} rounds"
        return f"Run({self.label}, {told}, accuracy {self.final():.4f})"

    @property
    def label(self) -> str:
        """Algorithm and the settings that differ from its defaults, for people to read.

        Two settings may share a label, if they differ in run options. `Results.settings` adds
        what tells them apart.
        """
        return self.spec.label

    @property
    def record(self) -> Algorithm:
        """The algorithm with its hyper-parameters, as `simulate` takes it.

        It is made anew from the settings, so it works for a run that was read from a folder.
        """
        return self.spec.record

    @property
    def diverged(self) -> int | None:
        """The round in which the run diverged, or None.

        A run has diverged if its model or its loss is no longer a finite number, or if the loss
        has grown far beyond the first one. From that round on its accuracy, if it had
        one, counts as 0.
        """
        return self.trace.diverged

    def rounds_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """The first evaluated round that reaches the target; None if no round does.

        Round 0 is the initial model. With `eval_every` above 1, only evaluated rounds count.

        Args:
            target: The value to reach from below, for an accuracy in (0, 1].
            metric: The column of the trace.
        """
        check_accuracy(target, metric)
        return self.trace.rounds_to(target, metric)

    def last_below(self, target: float, metric: str = "test_accuracy") -> int | None:
        """The last evaluated round below the target, which is how the paper counts.

        A run that reaches the target, falls below it and reaches it again is counted by its last
        visit below. `rounds_to` counts the first hit.

        Args:
            target: The value to stay at or above.
            metric: The column of the trace.

        Returns:
            The round; None if the run ends below the target, -1 if no round is below it.
        """
        check_accuracy(target, metric)
        return self.trace.last_below(target, metric)

    def bytes_to(self, target: float, metric: str = "test_accuracy") -> int | None:
        """Bytes sent by all clients and the server until the target is first reached.

        Args:
            target: The value to reach from below.
            metric: The column of the trace.

        Returns:
            Bytes in both directions, the round of the hit included; None if no round reaches it.
        """
        check_accuracy(target, metric)
        return self.trace.bytes_to(target, metric)

    def final(self, metric: str = "test_accuracy", last: int = 1) -> float:
        """The mean of the last evaluations, by default of the very last one.

        The final accuracy of tables and sweeps is `experiment.trace.at_end`: the mean of the last
        ten evaluations, of a short run that of its last quarter.

        Args:
            metric: A column of the trace, such as "test_accuracy" or "test_loss".
            last: How many evaluations to average over; fewer if the run has fewer.

        Returns:
            The mean. After divergence the accuracy, where the run had one, is 0, and everything
            else is NaN.
        """
        return self.trace.final(metric, last)

    def to_pandas(self) -> pd.DataFrame:
        """The trace as a data frame, one row for each round; it needs the package pandas."""
        return self.trace.to_pandas()

    def table(self, targets: float | Sequence[float] | None = None) -> Table:
        """Rounds and megabytes to each target accuracy, as `Results.table` has them for several.

        Args:
            targets: Accuracies in (0, 1], or one of them; left out: some that suit.
        """
        # Imported here, because `results` imports this module.
        from .results import Results

        return Results([self]).table(targets)

    def plot(
        self,
        path: str | Path,
        *,
        targets: float | Sequence[float] = (),
        **look: Any,
    ) -> None:
        """Draw accuracy and loss over rounds as PNG, PDF or SVG, by the path's suffix.

        Args:
            path: The file, which is replaced if it is there.
            targets: Accuracies to mark by dotted lines.
            **look: Title, metrics, labels, colors, size and rc, as for `Results.plot`.
        """
        from .results import Results

        Results([self]).plot(path, targets=targets, **look)

    @property
    def trained(self) -> Weights:
        """The trained model as flat vectors; an error where it was not kept.

        Raises:
            InputError: This is a run of a sweep, which keeps traces and settings but no models.
        """
        if self.weights is None:
            raise InputError(
                "a sweep keeps traces, not models: train this one again with "
                "fedsso.simulate(fed, model, run.record, **run.spec.options)"
            )
        return self.weights

    @property
    def x(self) -> Tensor:
        """The parameters of the trained model as one flat vector [d]."""
        return self.trained.x

    @property
    def buffers(self) -> Tensor:
        """The buffers of the trained model (BatchNorm's statistics) as one flat vector."""
        return self.trained.buffers

    @property
    def personal(self) -> Tensor | None:
        """Each client's own model [clients, d], of an algorithm that makes such models."""
        return self.trained.personal

    @property
    def model(self) -> nn.Module:
        """The trained module, a new copy each time, on the CPU and in evaluation mode.

        The adapters of `fedsso.lora` are merged into the weights that they belong to.

        Where every client has a model of its own, this is their weighted mean, which is not what
        was tested; `personal` holds those.

        Raises:
            InputError: The model was not kept, or it was a module of your own and the run was
                loaded without it.
        """
        return merged(self._as_trained())

    def _as_trained(self) -> nn.Module:
        """The same with adapters as they were trained, so that its flat vector is `x`."""
        x, buffers, _ = self.trained
        if self.live is not None:
            architecture = self.live.module
        else:
            architecture = self.module or self.spec.module()
        module = copy.deepcopy(architecture).to("cpu", x.dtype)
        unravel_into(module, x)
        with torch.no_grad():
            buffers_into(module, buffers)
        return module.eval()

    def clients(self) -> pd.DataFrame:
        """Test loss and metrics at each client, of its own model where it has one.

        Use it to see how evenly a model serves the clients: the trace has the mean over all test
        rows only.

        Returns:
            A row for each client: its name, its training and test rows, the loss and every
            metric.

        Raises:
            InputError: The model was not kept, or the data were your own and the run was loaded
                without them (`load_run(folder, federation=fed)`).
        """
        import pandas as pd

        from .revive import problem_of

        self._check_rows()
        # A run that was loaded has no data: they are loaded again, by name.
        live = self.live or problem_of(self.spec, model=self.module, trained=True)
        fed = live.fed
        cpu = torch.device("cpu")
        f, _ = objective(
            self._as_trained(), live.loss, "auto", cpu, fed.sample_shape, fed.is_sparse
        )
        evaluate = Evaluator(f, fed, gathering(fed, self.x.dtype), live.metrics)
        names = fed.client_names or [str(i) for i in range(fed.clients)]
        rows = []
        for i, name in enumerate(names):
            own = self.x if self.personal is None else self.personal[i]
            with torch.no_grad():
                found = evaluate(own[None], self.buffers[None], fed.rows_of(i, "test"))
            row = {
                "client": name,
                "train_rows": int(fed.train_sizes[i]),
                "test_rows": int(fed.test_sizes[i]),
            }
            rows.append(row | {metric: float(value[0]) for metric, value in found.items()})
        return pd.DataFrame(rows)

    def coefficients(self) -> pd.DataFrame:
        """The coefficients of a linear model, by the names and in the units of the table.

        For the models "linear" and "mclr", and modules that are one `nn.Linear`. Slopes are for
        columns as the table has them, also where the table was standardised for training. Of
        several classes the first is the reference; with two of them the numbers are those of a
        logistic regression. `fedsso.glm` adds standard errors.

        Returns:
            A row for each term: its name, its unit where a schema tells it, the estimate, and the
            class where there are classes. `to_csv(path, index=False)` and `to_latex(index=False)`
            of the data frame write it.

        Raises:
            InputError: The model is not linear or was not kept, or the data were your own and the
                run was loaded without them (`load_run(folder, federation=fed)`).

        >>> import fedsso
        >>> pairs = [([[0.0], [2.0]], [1.5, 5.5]), ([[1.0], [4.0]], [3.5, 9.5])]
        >>> fed = fedsso.Federation.from_clients(pairs, test_fraction=0, standardise=True)
        >>> run = fedsso.simulate(fed, "mclr", "fedsso", rounds=30)
        >>> run.coefficients().estimate.round(3).tolist()  # y = 1.5 + 2 x
        [1.5, 2.0]
        """
        from .coefficients import coefficients
        from .revive import problem_of

        live = self.live or problem_of(self.spec, model=self.module, trained=True)
        return coefficients(self.model, live.fed)

    def _check_rows(self) -> None:
        """Refuse to evaluate a model that expects rows which its algorithm has prepared."""
        kind = ALGORITHMS.get(self.spec.algorithm, Algorithm)
        if kind.prepare is not Algorithm.prepare:
            raise InputError(
                f"the model of {self.spec.algorithm} expects prepared rows, and how is not kept "
                "with a run; look at test_loss and test_accuracy of its trace"
            )

    def save(self, folder: str | Path) -> None:
        """Write the run's folder; `fedsso.load_run` reads it back.

        Saving the same run again replaces its files.

        Args:
            folder: It is made if it is not there.

        Raises:
            InputError: The folder holds another run, another process writes to it, or the run has
                no model or an algorithm that is not registered.
        """
        self.spec.record  # noqa: B018  # an algorithm that is not registered could not be read back
        folder = Path(folder)
        # The trace goes into the checkpoint too, with its digest: trace.csv is a plain file that
        # anybody may open and change.
        text = self.trace.to_csv()
        done = {"model": self.x, "buffers": self.buffers}
        done |= {"done": _digest(text), "trace": of_text(text)}
        done["diverged"] = torch.tensor(self.diverged or 0)
        if self.personal is not None:
            done["personal"] = self.personal
        with Lock(folder):
            if is_file(folder / SPEC) and Spec.load(folder / SPEC).identity != self.spec.identity:
                raise InputError(f"{folder} holds another run; choose another folder")
            self.spec.save(folder / SPEC)
            write_atomic(folder / TRACE, text)
            checkpoint.save(folder / CHECKPOINT, done, self.spec.identity)


def load_run(
    folder: str | Path, *, federation: Federation | None = None, model: nn.Module | None = None
) -> Run:
    """Load a finished run from its folder.

    Args:
        folder: What `out=` or `Run.save` wrote.
        federation: The data, if `Run.clients` is to be asked and they were arrays of your own.
        model: The architecture, if it was a module of your own.

    Returns:
        The run, as `simulate` returned it. Its data are loaded when `Run.clients` needs them.

    Raises:
        InputError: There is no run, or it is not finished, or a file is damaged. The message says
            what to do. `fedsso.load_runs` reads a folder of several runs.

    >>> import tempfile, fedsso
    >>> fed = fedsso.load("digits", clients=5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fedsso.simulate(fed, "mclr", "fedavg", rounds=2, out=folder)
    ...     fedsso.load_run(folder).final() == run.final()
    True
    """
    folder = path_of(folder)
    if not (folder / SPEC).is_file() and any(folder.glob(f"*/{SPEC}")):
        raise InputError(
            f"{folder} holds several runs: use load_runs, or load_run with one of the folders "
            "below it"
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
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be an nn.Module object, got {model!r}")
        _same_size(model, saved)
    live = None
    if federation is not None:
        from .revive import problem_of

        live = problem_of(spec, federation, model, trained=True)
    weights = Weights(saved["model"], saved["buffers"], saved.get("personal"))
    return Run(spec, trace, weights, live, model)


def path_of(folder: object) -> Path:
    """The folder that a caller names; an InputError if it is neither a text nor a path."""
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"the folder of a run must be a path, got {folder!r}")
    return Path(folder)


def _check_finished(saved: Mapping[str, Tensor]) -> int | None:
    """The round in which a finished run diverged, or None; refuses a checkpoint that is not whole.

    The seal of the file has been checked before. This looks at what it holds: types, shapes, and
    that the model consists of finite numbers.

    Raises:
        Damaged: Something is missing or of the wrong kind.
    """
    read = checkpoint.Reader(saved, torch.device("cpu"))
    read.finite("model", axes=1)
    read.numbers("buffers", axes=1)  # a variance may be infinite where columns are huge
    if "personal" in saved:
        read.finite("personal", axes=2)
    return read.count("diverged") or None


def _trace_text(path: Path, saved: Mapping[str, Tensor]) -> str:
    """The trace of a finished run: its file or, if that is damaged, the copy in the checkpoint.

    Args:
        path: The file trace.csv, which need not be there.
        saved: The checkpoint, whose "done" is the digest of the trace.

    Raises:
        InputError: Neither the file nor the copy has the digest.
    """
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
    """Refuse a module that has not as many parameters and buffers as the run.

    That is all that can be checked: a checkpoint does not hold the architecture.
    """
    for what, own, held in (
        ("parameters", ravel(model), saved["model"]),
        ("numbers in buffers", buffers_of(model), saved["buffers"]),
    ):
        if own.numel() != held.numel():
            raise InputError(
                f"this model has {own.numel()} {what} ({Layout.of(model)}), that of the run "
                f"{held.numel()}: give its architecture"
            )


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders at or directly below a folder, in order.

    Args:
        folder: A run's own folder, or the `out` of a comparison.

    Returns:
        At least one folder. Each of them holds a spec.toml.

    Raises:
        InputError: There is no run in the folder or directly below it.
    """
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
    """The SHA-256 of a text as a tensor of 32 bytes, which is what a safetensors file can hold."""
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def is_done(folder: Path, spec: Spec) -> bool:
    """Whether a run's folder holds the finished run of these settings.

    A damaged checkpoint counts as unfinished, so that the run is computed again.

    Args:
        folder: The run's folder.
        spec: The settings that the run must have.
    """
    try:
        saved = checkpoint.load(folder / CHECKPOINT, spec.identity)
        if "done" not in saved:
            return False
        _check_finished(saved)
    except Damaged:  # it will be computed again
        return False
    return True
