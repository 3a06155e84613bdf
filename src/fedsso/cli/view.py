"""Results on the terminal: tables of runs and of costs, the same as JSON, and how runs ended.

`show` prints what `run`, `compare` and `resume` have found, and `judge` decides their exit code.
The numbers come from `report.tables`, so that the terminal, JSON and the report page agree. The
last part is the table of `fedsso costs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..report.tables import default_targets, final_text, numbers, remarks, rounds_table
from ..support.exits import DIVERGED
from ..version import __version__
from .screen import print_json, print_table, say, tell, visible

if TYPE_CHECKING:
    from pathlib import Path

    from ..experiment.costs import Bill, Cost
    from ..experiment.results import Results
    from ..report.tables import Curve

USUAL = ("test_accuracy", "test_loss")  # columns that every trace has
COSTS = (
    "exchanges",
    "down",
    "up",
    "both ways",
    "n_c",
    "server keeps",
    "n_m",
    "client keeps",
    "n_m",
)
"""The columns of the table of costs, after the algorithm."""


# ---- runs ----


def show(
    runs: Results,
    targets: Sequence[float] | None,
    out: str | Path | None,
    as_json: bool,
    left_out: Mapping[str, str],
) -> None:
    """Print the result as a table, or as one JSON document.

    Below the table stands what else is worth knowing: client steps that the server has chosen,
    algorithms that were left out, and the folder of the results.

    Args:
        runs: The result.
        targets: Accuracies of the table; None chooses four that suit.
        out: The folder of the results, which is told at the end.
        as_json: Whether to print JSON.
        left_out: Why an algorithm was not run, by its name.
    """
    curves = runs.curves()
    targets = default_targets(curves) if targets is None else targets
    if as_json:
        print_json({**document(curves, targets, out), "left_out": dict(left_out)})
        return
    print_table(result_table(curves, targets))
    for remark in remarks(curves, rounds_table(curves, targets)):
        tell(remark)
    for curve in curves:
        steps = _chosen_steps(curve)
        if steps:
            tell(f"{curve.label}: client step {', '.join(steps)}")
    for name, reason in left_out.items():
        tell(f"left out: {name}: {reason}")
    if out is not None:
        tell(f"results: {out}")


def _chosen_steps(curve: Curve) -> list[str]:
    """The last client step of each seed for which the server chose it.

    The trace of such a run has a column "alpha"; with a step that was given there is none.
    """
    found = []
    for trace in curve.traces:
        if "alpha" in trace.columns:
            own = trace["alpha"]
            known = own[own > 0]  # NaN where nobody answered
            if len(known):
                found.append(f"{known[-1]:.3g}")
    return found


def judge(curves: Sequence[Curve], targets: Sequence[float]) -> None:
    """End with exit code 1, and say why, if a run diverged or a target was missed.

    A target is missed if no setting reaches it with every seed.

    Args:
        curves: The settings to judge. A sweep gives its best ones only.
        targets: The accuracies that the user asked for; not those chosen for the table.

    Raises:
        typer.Exit: With exit code 1.
    """
    lost = [_where(curve) for curve in curves if _diverges(curve)]
    if lost:
        say(
            f"diverged: {'; '.join(lost)}. Use a smaller --alpha (fedsso: --guard adaptive "
            "--alpha auto), or standardise the columns of the data"
        )
    missed = []
    for target in targets:
        if not any(_reaches(curve, target) for curve in curves):
            missed.append(f"{target:g}")
    if missed:
        who = f"{curves[0].label} did not reach" if len(curves) == 1 else "no setting reached"
        seeds = " with every seed" if len(curves[0].traces) > 1 else ""
        say(f"missed: {who} {', '.join(missed)}{seeds}. Try more --rounds or another --alpha")
    if lost or missed:
        raise typer.Exit(DIVERGED)


def _diverges(curve: Curve) -> bool:
    """Whether some seed diverged: one is enough to call a setting unreliable."""
    return any(trace.diverged is not None for trace in curve.traces)


def _where(curve: Curve) -> str:
    """A setting and the rounds in which its seeds diverged, for a sentence."""
    told = []
    for trace in curve.traces:
        if trace.diverged is not None:
            told.append(f"round {trace.diverged} (seed {trace['seed'][0]})")
    return f"{curve.label} in {', '.join(told)}"


def _reaches(curve: Curve, target: float) -> bool:
    """Whether every seed reaches the target at least once."""
    return all(trace.rounds_to(target) is not None for trace in curve.traces)


def document(
    curves: Sequence[Curve],
    targets: Sequence[float],
    out: str | Path | None,
) -> dict[str, Any]:
    """The numbers of the table for JSON, with the bytes to each target for each seed.

    Args:
        curves: The settings.
        targets: The accuracies of the table.
        out: The folder of the results, or None.
    """
    rows = []
    for curve, one in zip(curves, numbers(curves, targets), strict=True):
        spent = {}
        for target in targets:
            spent[str(target)] = [trace.bytes_to(target) for trace in curve.traces]
        rows.append({**one, "bytes_to": spent})
    return {
        "version": __version__,
        "folder": out and str(out),
        "targets": list(targets),
        "results": rows,
    }


def result_table(curves: Sequence[Curve], targets: Sequence[float]) -> Table:
    """A row for each curve.

    Each target has a column with the rounds until it is reached and, below them, the megabytes.
    Then follow the final accuracy, the test loss and whatever else was measured on the test rows,
    all at the end of the run (`experiment.trace.at_end`).

    Args:
        curves: The settings.
        targets: The accuracies of the columns; there may be none.
    """
    title = "rounds and megabytes until the test accuracy is reached" if targets else None
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("algorithm", overflow="fold")
    measured = ["test_loss", *_more_metrics(curves)]
    names = [f"{target:g}" for target in targets]
    names.append("final accuracy")
    names += [name.replace("_", " ") for name in measured]
    for name in names:
        table.add_column(name, justify="right")
    for curve in curves:
        # One table for each target: megabytes are told for the highest target of a table only.
        rows = [rounds_table([curve], [target])[0] for target in targets]
        cells = [_cell(list(row.values())) for row in rows]
        cells.append(final_text(curve))
        for name in measured:
            ends = curve.ends(name)
            cells.append(f"{sum(ends) / len(ends):.4g}")
        table.add_row(visible(curve.label), *cells)
    return table


def _more_metrics(curves: Sequence[Curve]) -> list[str]:
    """What the user measured on the test rows, beside accuracy and loss.

    Runs that are shown together were measured alike, so the first one stands for all.
    """
    if not curves:
        return []
    columns = curves[0].traces[0].columns
    return [name for name in columns if name.startswith("test_") and name not in USUAL]


def _cell(row: Sequence[str]) -> str:
    """Rounds and, below them, megabytes.

    Args:
        row: The cells of a table with one target: label, rounds, megabytes, and others.
    """
    _, rounds, cost, *_ = row
    megabytes = cost.partition(" ")[0]
    return rounds if megabytes == "–" else f"{rounds}\n{megabytes} MB"


# ---- costs ----


def cost_table(bill: Bill, title: str) -> Table:
    """The table of `fedsso costs`, with two lines for each algorithm.

    The upper line has measured bytes, the lower one what the papers count, in d and in multiples
    of FedAvg's. Algorithms that refuse the model have dashes, and the reason below the table.
    There it also stands what a server remembers of every client.
    """
    notes = []
    for row in bill.rows:
        if row.refused:
            notes.append(f"{row.algorithm}: {row.refused}")
        elif row.measured is not None and row.measured.per_client:
            kept = f"{_count(row.measured.per_client)} bytes"
            formula = f" ({row.theory.per_client} numbers)" if row.theory else ""
            notes.append(f"{row.algorithm}: the server keeps {kept}{formula} more for each client")
    table = Table(
        title=title,
        caption="\n".join(notes) or None,
        box=SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("algorithm")
    for name in COSTS:
        table.add_column(name, justify="right")
    for row in bill.rows:
        measured = _cells(row.measured, row.measured, bill)
        theory = _cells(row.theory, row.theory and bill.in_bytes(row.theory), bill)
        cells = []
        for upper, lower in zip(measured, theory, strict=True):
            cells.append(Text.assemble(f"{upper}\n", (lower, "dim")))
        table.add_row(row.algorithm, *cells)
    return table


def _cells(
    shown: Cost | None,
    in_bytes: Cost | None,
    bill: Bill,
) -> list[str]:
    """The cells of a line.

    Args:
        shown: The costs as they are shown: bytes, or formulas in d.
        in_bytes: The same in bytes, for the multiples of FedAvg's.
        bill: All costs, which know the size of the model.
    """
    if shown is None or in_bytes is None:
        return ["–"] * len(COSTS)
    exchanges, down, up, server, client = map(_count, shown[:5])
    both = _count(in_bytes.down + in_bytes.up)
    multiples = bill.relative(in_bytes).values()
    whole, of_server, of_client = map(_multiple, multiples)
    return [
        exchanges,
        down,
        up,
        both,
        whole,
        server,
        of_server,
        client,
        of_client,
    ]


def _count(value: Any) -> str:
    """A number with blanks between groups of three digits; a formula as it is."""
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def _multiple(value: float) -> str:
    """A multiple with two decimals, with none from 100 on."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def cost_document(bill: Bill) -> list[dict[str, Any]]:
    """The numbers of the table of costs for JSON.

    Theory is there in bytes and as formulas. What is not known is null.
    """
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
