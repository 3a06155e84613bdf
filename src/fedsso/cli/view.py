"""What the command line shows: rounds as they end, tables of results, and how a run ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..experiment.costs import Bill, Cost
from ..experiment.results import Results
from ..experiment.spec import Spec
from ..experiment.trace import Trace
from ..report import tables as report
from ..support.exits import DIVERGED, INTERRUPTED
from ..support.stopping import at_once, listen, listening
from ..version import __version__
from .live import Dashboard
from .screen import draws, messages, print_json, print_table, say, tell, visible
from .tensorboard import Scalars

log = logging.getLogger("fedsso")


class Watch:
    """Shows the rounds as they end and remembers the last; a signal to stop takes effect between
    two rounds."""

    name = ""  # stands for every label, where it is given
    silent = False  # whether something else shows the rounds

    def __init__(self) -> None:
        self.label, self.k = "", 0
        self.stopping = False
        self.bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"), TimeRemainingColumn(), console=messages,
        )  # fmt: skip
        self.task = TaskID(0)

    def __call__(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
        label = self.name or visible(label)
        if not self.silent:
            self._show(label, k, rounds, numbers)
        self.label, self.k = label, k
        self._stop_if_asked()

    def note(self, text: str) -> None:
        """Say something between two pieces of work."""
        say(text)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.stopping:
            raise KeyboardInterrupt

    def _show(self, label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
        """As a bar, or as a line for every tenth of the way."""
        shown = " ".join(f"{n.replace('_', ' ')} {v:.4f}" for n, v in numbers.items() if v >= 0)
        begins = label != self.label or k <= self.k  # another run
        if draws():
            if begins:
                self.task = self.bars.add_task(label, total=rounds, numbers="")
            self.bars.update(self.task, completed=k, numbers=shown)
        elif 10 * k // rounds > (0 if begins else 10 * self.k // rounds):
            say(f"{label}: round {k}/{rounds} {shown}")

    def stop(self, *_: object) -> None:
        """The first signal; a second one ends the process at once."""
        self.stopping = True
        listen(at_once)
        with suppress(RuntimeError):  # the signal may have come in the middle of a write
            say("stopping after this round (Ctrl-C again: at once)")


class Viewing(Watch):
    """The same, and the traces are seen: by a dashboard in place of the bars, by TensorBoard, or by
    both."""

    def __init__(self, board: Dashboard | None, scalars: Scalars | None) -> None:
        super().__init__()
        self.board, self.scalars, self.silent = board, scalars, board is not None

    def begin(self, specs: Sequence[Spec]) -> None:
        """Tell the dashboard which runs there will be."""
        if self.board is not None:
            self.board.begin(specs)

    def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None:
        """Show the traces of these runs as far as they have come."""
        for viewer in (self.board, self.scalars):
            if viewer is not None:
                viewer.look(specs, traces)


@contextmanager
def watching(
    again: str | None, live: bool = False, tensorboard: Path | None = None
) -> Iterator[Watch]:
    """Progress on standard error while simulating; an interrupted simulation says what goes on with
    it."""
    board = Dashboard(messages) if live and draws() else None
    scalars = None if tensorboard is None else Scalars(tensorboard)
    watch = Watch() if board is None and scalars is None else Viewing(board, scalars)
    shown = board if board is not None else watch.bars if draws() else None
    try:
        with listening(watch.stop), ExitStack() as stack:
            for part in (shown, scalars):
                if part is not None:
                    stack.enter_context(part)
            yield watch
    except (KeyboardInterrupt, InputError) as error:
        if isinstance(error, InputError) and not (watch.stopping and _left_alone(error)):
            raise
        hint = "nothing is kept without --out" if again is None else f"{again} goes on"
        say(f"stopped after round {watch.k}; {hint}")
        raise typer.Exit(INTERRUPTED) from error


def _left_alone(error: InputError) -> bool:
    """Whether a sweep's processes are gone: a signal to the whole group ends them before us."""
    return isinstance(error.__cause__, EOFError | ConnectionError)


def resuming(out: str | Path | None) -> str | None:
    """The command that goes on with the runs of a folder."""
    return None if out is None else f"`fedsso resume {quote(str(out))}`"


def show(
    runs: Results,
    targets: Sequence[float] | None,
    out: str | Path | None,
    as_json: bool,
    left_out: Mapping[str, str],
) -> None:
    """The result as a table or as JSON; `left_out` says why an algorithm was not run."""
    curves = runs.curves()
    targets = report.default_targets(curves) if targets is None else targets
    if as_json:
        print_json({**document(curves, targets, out), "left_out": dict(left_out)})
        return
    print_table(result_table(curves, targets))
    for curve in curves:
        chosen = [trace["alpha"] for trace in curve.traces if "alpha" in trace.columns]
        steps = [
            f"{own[own > 0][-1]:.3g}" for own in chosen if (own > 0).any()
        ]  # NaN where nobody answered
        if steps:
            tell(f"{curve.label}: client step {', '.join(steps)}")
    for name, reason in left_out.items():
        tell(f"left out: {name}: {reason}")
    if out is not None:
        tell(f"results: {out}")


def judge(curves: Sequence[report.Curve], targets: Sequence[float]) -> None:
    """End with exit code 1, and say why, if a run diverged or if no setting reached a target with
    every seed."""
    lost = [
        _where(curve)
        for curve in curves
        if any(trace.diverged is not None for trace in curve.traces)
    ]
    if lost:
        say(
            f"diverged: {'; '.join(lost)}. Take a smaller --alpha (fedsso: --alpha auto), or bring "
            f"the columns of the "
            "data to one scale"
        )
    missed = [
        f"{target:g}" for target in targets if not any(_reaches(curve, target) for curve in curves)
    ]
    if missed:
        who = f"{curves[0].label} did not reach" if len(curves) == 1 else "no setting reached"
        seeds = " with every seed" if len(curves[0].traces) > 1 else ""
        say(f"missed: {who} {', '.join(missed)}{seeds}. Try more --rounds or another --alpha")
    if lost or missed:
        raise typer.Exit(DIVERGED)


def _where(curve: report.Curve) -> str:
    """A setting and the rounds in which its seeds diverged."""
    rounds = [
        (trace.diverged, trace["seed"][0]) for trace in curve.traces if trace.diverged is not None
    ]
    return f"{curve.label} in {', '.join(f'round {k} (seed {seed})' for k, seed in rounds)}"


def _reaches(curve: report.Curve, target: float) -> bool:
    return all(trace.rounds_to(target) is not None for trace in curve.traces)


def document(
    curves: Sequence[report.Curve], targets: Sequence[float], out: str | Path | None
) -> dict[str, Any]:
    """The numbers of the table, and the bytes to each target for each seed."""
    rows = []
    for curve, numbers in zip(curves, report.numbers(curves, targets), strict=True):
        spent = {str(t): [trace.bytes_to(t) for trace in curve.traces] for t in targets}
        rows.append({**numbers, "bytes_to": spent})
    return {
        "version": __version__,
        "folder": out and str(out),
        "targets": list(targets),
        "results": rows,
    }


def result_table(curves: Sequence[report.Curve], targets: Sequence[float]) -> Table:
    """Each target has a column with the rounds and, below, the megabytes until it is reached."""
    title = "rounds and megabytes until the test accuracy is reached" if targets else None
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("algorithm", overflow="fold")
    first = curves[0].traces[0].columns if curves else {}
    more = [
        name
        for name in first
        if name.startswith("test_") and name not in ("test_accuracy", "test_loss")
    ]
    shown = [name.removeprefix("test_") for name in ("test_loss", *more)]
    for name in [*(f"{t:g}" for t in targets), "final accuracy", *shown]:
        table.add_column(name, justify="right")
    for curve in curves:
        rows = [report.rounds_table([curve], [t])[0] for t in targets or [1.0]]
        cells = [_cell(list(row.values())) for row in rows[: len(targets)]]
        ends = [
            sum(trace.final(n) for trace in curve.traces) / len(curve.traces)
            for n in ("test_loss", *more)
        ]
        table.add_row(
            visible(curve.label), *cells, rows[0]["final accuracy"], *(f"{end:.4g}" for end in ends)
        )
    return table


def _cell(row: Sequence[str]) -> str:
    rounds, megabytes = row[1], row[2].partition(" ")[0]
    return f"{rounds}\n{megabytes} MB" if megabytes != "–" else rounds


def cost_table(bill: Bill, title: str) -> Table:
    """Measured bytes, and below them what the papers count, in d and in multiples of FedAvg's."""
    refused = "\n".join(f"{row.algorithm}: {row.refused}" for row in bill.rows if row.refused)
    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, caption=refused or None, box=SIMPLE_HEAD, pad_edge=False, **left)
    table.add_column("algorithm")
    for name in (
        "exchanges",
        "down",
        "up",
        "both ways",
        "n_c",
        "server keeps",
        "n_m",
        "client keeps",
        "n_m",
    ):
        table.add_column(name, justify="right")
    for row in bill.rows:
        measured = _cells(row.measured, row.measured, bill)
        theory = _cells(row.theory, row.theory and bill.in_bytes(row.theory), bill)
        pairs = zip(measured, theory, strict=True)
        table.add_row(
            row.algorithm, *(Text.assemble(f"{upper}\n", (lower, "dim")) for upper, lower in pairs)
        )
    return table


def _cells(shown: Cost | None, in_bytes: Cost | None, bill: Bill) -> list[str]:
    if shown is None or in_bytes is None:
        return ["–"] * 9
    exchanges, down, up, server, client = (_count(v) for v in shown)
    whole, of_server, of_client = (
        f"{v:.2f}" if v < 100 else f"{v:.0f}" for v in bill.relative(in_bytes).values()
    )
    return [
        exchanges,
        down,
        up,
        _count(in_bytes.down + in_bytes.up),
        whole,
        server,
        of_server,
        client,
        of_client,
    ]


def _count(value: Any) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def cost_document(bill: Bill) -> list[dict[str, Any]]:
    """The numbers of the table; theory in bytes, too."""
    rows = []
    for name, measured, theory, refused in bill.rows:
        row: dict[str, Any] = {
            "algorithm": name,
            "refused": refused or None,
            "measured": None,
            "theory": None,
        }
        if measured is not None:
            row["measured"] = {**measured._asdict(), "relative": bill.relative(measured)}
        if theory is not None:
            counted = bill.in_bytes(theory)
            formulas = {k: str(v) for k, v in theory._asdict().items() if k != "exchanges"}
            row["theory"] = {
                **counted._asdict(),
                "relative": bill.relative(counted),
                "formula": formulas,
            }
        rows.append(row)
    return rows


def set_logging(verbose: bool) -> None:
    handler = RichHandler(
        console=messages, show_time=False, show_path=False, highlighter=NullHighlighter()
    )
    log.handlers = [handler]
    log.setLevel(logging.INFO if verbose else logging.WARNING)
