"""The commands `fedsso glm` and `fedsso predict`: a regression over hospitals, and new patients.

Both are thin: `regression.glm` fits, `regression.result` prints, saves and predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from ..errors import InputError, one_of
from ..experiment.store import PARTS
from ..regression.outcome import FAMILIES
from ..regression.schema import RULES
from ..support.exits import DIVERGED
from ..support.files import to_csv, write_atomic
from .flags import Json, Verbose
from .options import Several
from .replace import check_file, check_folder
from .screen import print_json, say, tell
from .watch import set_logging

if TYPE_CHECKING:
    from ..regression.design import Table
    from ..regression.records import Round
    from ..regression.result import Regression
    from ..regression.result.predict import Predictions

REPORT = "report.html"


def _column(help: str, *names: str) -> Any:
    """The option for the name of a column."""
    return typer.Option(*names, metavar="COLUMN", help=help)


# The options: typer takes the type and the help from here.
Files = Annotated[
    Any,
    typer.Option(
        help="Folder of CSV files, or files: one per hospital, or a single one with --hospital.",
        click_type=Several(click.STRING),
    ),
]
Outcome = Annotated[
    str,
    _column(
        "Outcome column. By default the one in the schema.", "--outcome", "--column", "--target"
    ),
]
FamilyName = Annotated[str, typer.Option(help=f"One of {', '.join(FAMILIES)}.")]
SchemaFile = Annotated[
    Path | None,
    typer.Option(help="Describes the columns (see `fedsso data schema`). By default inferred."),
]
Gaps = Annotated[
    str,
    typer.Option(
        help="complete: drop rows with missing values; median: impute, with an indicator."
    ),
]
Names = Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")]
Codes = Annotated[
    str, typer.Option(help="Columns whose numbers are category codes, separated by commas.")
]
Ties = Annotated[str, typer.Option(help="Ties in survival data: efron (default) or breslow.")]
Cluster = Annotated[
    bool, typer.Option("--cluster", help="Sandwich standard errors, clustered by hospital.")
]
NoLimits = Annotated[
    bool,
    typer.Option(
        "--no-limits", help="Include hospitals with few rows, few events or many coefficients."
    ),
]
Level = Annotated[float, typer.Option(help="Confidence level of the intervals.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder for the model, its tables and a report ({REPORT}); a model there is replaced."
    ),
]


def glm(
    files: Files,
    outcome: Outcome = "",
    family: FamilyName = FAMILIES[0],
    schema: SchemaFile = None,
    hospital: Annotated[str, _column("Hospital of each row, for a single table.")] = "",
    time: Annotated[str, _column("Time at risk, for survival data.")] = "",
    weights: Annotated[str, _column("Weights of the rows.")] = "",
    offset: Annotated[str, _column("Offset, added to the linear predictor.")] = "",
    missing: Gaps = RULES[0],
    ignore: Names = "",
    categories: Codes = "",
    ties: Ties = "",
    cluster: Cluster = False,
    no_limits: NoLimits = False,
    level: Level = 0.95,
    out: Out = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Fit a regression across hospitals: the coefficients and standard errors of the pooled fit.

    Example: fedsso glm --files hospitals/ --outcome disease --out model

    Example: fedsso glm --files lung.csv --hospital inst --family cox --outcome died --time days

    Each hospital sends only sums, as over a network, and refuses below some rows and events. The
    exit code is 1 if the fit did not reach its tolerance.
    """
    from ..regression.glm import glm as fit
    from ..regression.limits import UNLIMITED
    from ..regression.result.regression import checked_level

    set_logging(verbose)
    checked_level(level)
    replaced = out is not None and _is_replaced(files, out)
    result = fit(
        files,
        family,
        outcome,
        schema,
        hospital=hospital,
        limits=UNLIMITED if no_limits else None,
        progress=_tell_round if verbose else None,
        time=time,
        weights=weights,
        offset=offset,
        missing=one_of("rule for missing values", missing, RULES),
        ignore=ignore,
        categories=categories,
        ties=ties,
        cluster=cluster,
    )
    if out is not None:
        result.save(out, REPORT)
    if as_json:
        print_json(document(result, level))
    else:
        tell(result.summary(level).rstrip())
    if out is not None:
        also = " (it replaces the one that was there)" if replaced else ""
        say(f"model: {out}{also}; page: {out / REPORT}")
    if not result.converged:
        raise typer.Exit(DIVERGED)


def _is_replaced(files: Any, out: Path) -> bool:
    """Whether a model is in the folder. InputError if it has what is not to be replaced."""
    from ..regression.glm.sources import check_apart
    from ..regression.result.model import NAMES, check_free
    from ..report.page import MARK as PAGE

    check_apart(files, out)
    check_folder(str(out), [PARTS])
    check_file(out / REPORT, PAGE, "a page")
    return check_free(out, NAMES)


def _tell_round(one: Round) -> None:
    """A round on standard error."""
    say(f"round {one.round}: log-likelihood {one.loglik:.6f}, gradient {one.gradient:.3g}")


def document(result: Regression, level: float) -> dict[str, Any]:
    """The result for other programs: tables as lists of records; null where there is no number."""
    fit = result.fit
    names = result.columns()
    rows = [dict(zip(names, row, strict=False)) for row in result.rows(level)]
    hospitals = [asdict(one) for one in result.assessments]
    told = ("family", "rows", "events", "dropped", "rounds", "bytes_up", "bytes_down")
    numbers = ("loglik", "null_loglik", "deviance", "null_deviance", "aic", "converged")
    found: dict[str, Any] = {name: getattr(fit, name) for name in (*told, *numbers)}
    found |= {"outcome": result.schema.outcome, "level": level, "coefficients": rows}
    found |= {"hospitals": hospitals, "notes": list(result.notes)}
    cleaned: dict[str, Any] = _finite(found)
    return cleaned


def _finite(value: Any) -> Any:
    """The same values, None for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


# ---- new patients ----


def predict(
    model: Annotated[Path, typer.Argument(help="Folder of a saved model.", metavar="MODEL")],
    table: Annotated[Path, typer.Argument(help="CSV file of new patients.", metavar="TABLE")],
    out: Annotated[Path | None, typer.Option(help="CSV file. By default standard output.")] = None,
    level: Level = 0.95,
) -> None:
    """Predict the outcome of new patients with a saved model, with intervals.

    Example: fedsso predict model/ new_patients.csv --out predictions.csv

    The new table needs the columns of the model, in any order. The output repeats all its columns
    and adds the predictions: a probability, mean or rate, or the hazard ratio relative to a patient
    with average numbers and reference levels. Neither the hospitals nor their tables are needed.
    """
    from ..regression.result import load_model
    from ..regression.result.predict import table_of

    found = load_model(model)
    patients = table_of(table)
    predictions = found.predictions(patients, level)
    text = _joined(patients, predictions)
    absent = sum(cell != cell for cell in predictions.prediction.tolist())
    if absent:
        say(
            f"note: {absent} of {len(patients.rows)} patients have no prediction: a missing "
            "value, or a "
            f"level that no hospital had"
        )
    if out is None:
        tell(text.rstrip())
        return
    if out.exists():
        raise InputError(f"{out} already exists; choose another name for --out, or remove it")
    write_atomic(out, text)
    say(f"predictions: {out}")


def _joined(patients: Table, predictions: Predictions) -> str:
    """The table of the patients as CSV, with the predictions as further columns."""
    names = predictions._fields
    taken = [name for name in names if name in patients.names]
    if taken:
        raise InputError(f"the table has a column {taken[0]!r} already; rename it")
    columns: Sequence[list[float]] = [column.tolist() for column in predictions]
    rows: list[list[str]] = [[*patients.names, *names]]
    for row, *values in zip(patients.rows, *columns, strict=True):
        rows.append([*row, *("" if value != value else f"{value:.10g}" for value in values)])
    return to_csv(rows)
