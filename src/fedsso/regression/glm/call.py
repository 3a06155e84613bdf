"""`fedsso.glm`: a regression over the tables of several hospitals, on one machine.

Every hospital is an object that answers questions from its own table, as it would over a network:
the same questions, the same numbers, the same refusals. Nothing but these answers enters the fit.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ...errors import InputError, one_of, unknown
from ...support.intake import composed
from ...support.records import column_names
from .. import schema as schemas
from ..families import named
from ..fit import fit
from ..hospital import Hospital
from ..infer import TWO_LEVELS, infer
from ..ledger import Ledger
from ..limits import OWN, Limits
from ..outcome import COX, FAMILIES
from ..questions import Answer, Ask, Question, Refusal
from ..result import Regression
from ..rounds.climb import Progress
from ..schema import COMPLETE, IGNORE, Schema
from .sources import Tabled, check_apart, shared, tables_of

log = logging.getLogger("fedsso")
F = TypeVar("F", bound=Callable[..., Any])

OTHER_LEVELS = "that other hospitals have"
"""In the note of `infer` about the levels of one hospital's table."""
ROLES = ("time", "weights", "offset")
"""Columns that explain nothing but belong to the outcome."""
LISTS = ("ignore", "categories")
"""Settings that name several columns."""


@dataclass(frozen=True)
class Settings:
    """How the tables are read, and how the fit is made."""

    time: str = ""
    """Survival data: the column of the time at risk."""
    weights: str = ""
    """The column of the rows' weights."""
    offset: str = ""
    """The column that is added to the linear predictor, such as the logarithm of an exposure."""
    missing: str = COMPLETE
    """Rows with gaps: "complete" leaves them out; "median" fills them and adds an indicator."""
    ignore: str | Collection[str] = ()
    """Columns to leave out: a list, or a text with commas between them."""
    categories: str | Collection[str] = ()
    """Columns whose numbers are codes of levels, likewise."""
    ties: str = ""
    """Survival data: how equal times count, "efron" (the default) or "breslow"."""
    cluster: bool = False
    """Whether standard errors are those of a sandwich, clustered by hospital."""
    tolerance: float = 1e-8
    """The fit ends when the gradient is so small that the maximum is this near."""
    rounds: int = 200
    """The most rounds of the fit."""


def with_settings(function: F) -> F:
    """Show the names and defaults of the settings where a function takes `**settings`."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(one.name, kind, default=one.default) for one in fields(Settings)]
    made: Any = function
    made.__signature__ = signature.replace(parameters=[*own, *more])
    return function


@with_settings
def glm(
    data: Any,
    family: str = "binomial",
    outcome: str = "",
    schema: str | os.PathLike[str] | Schema | None = None,
    *,
    hospital: str = "",
    limits: Limits | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Regression:
    """Fit a regression over hospitals: coefficients with standard errors, as in one pooled table.

    Every hospital's table is asked for sums alone, as over a network. The fit is the maximum of the
    likelihood of all rows, found by FedSSO.

    Args:
        data: A folder, list or dictionary of CSV files, a data frame with `hospital`, a dictionary
            of data frames, or a `Federation`.
        family: "binomial" (logistic), "gaussian" (linear), "poisson" or "cox" (stratified by
            hospital).
        outcome: The column to explain. Survival data: whether the event was seen.
        schema: What the columns mean: a `Schema`, its TOML text, or a file, as
            `fedsso data schema` writes it. Left out: it is inferred from all tables together.
        hospital: The column that says which hospital a row belongs to. Left out: a file, or an
            entry of a dictionary, is a hospital.
        limits: What hospitals refuse to answer. `Limits()` is what they refuse over a network. Left
            out: few rows or events; rare levels are answered, since you hold the rows.
        out: A folder to save the model in.
        progress: Is told about every round.
        **settings: time, weights, offset (columns of the table); missing ("complete" or
            "median"); ignore, categories (columns, in a list or with commas between them); ties
            ("efron" or "breslow"); cluster=True for sandwich errors clustered by hospital;
            tolerance; rounds.

    Returns:
        The regression, which prints itself as R's `summary` does.

    Raises:
        InputError: The data do not fit the family or the schema, no hospital answers, or there is
            no finite estimate. The message names the column and the remedy.

    >>> import pandas as pd
    >>> ages = list(range(40, 70))
    >>> ill = [int(age * 7 % 30 < age - 45) for age in ages]
    >>> north = pd.DataFrame({"age": ages, "ill": ill})
    >>> south = north.assign(age=north["age"] + 0.5)
    >>> result = glm({"north": north, "south": south}, "binomial", "ill")
    >>> result.coefficients()["term"].tolist()
    ['(intercept)', 'age']
    >>> result.converged
    True
    """
    wish = _settings(settings)
    if out is not None:
        check_apart(data, out)
    tabled = tables_of(data, composed(outcome), composed(hospital or ""))
    text = _family(family, wish.ties)
    agreed, notes = _schema(schema, tabled, wish)
    sources: dict[str, Any] = {**tabled.tables, **tabled.lost}
    hospitals = [
        Hospital(name, source, limits or OWN, Ledger(), agreed=True)
        for name, source in sources.items()
    ]
    found = fit(
        asking(hospitals),
        schemas.write(agreed),
        text,
        tolerance=wish.tolerance,
        rounds=wish.rounds,
        progress=progress,
        cluster=wish.cluster,
    )
    result = Regression(replace(found, notes=(*tabled.notes, *notes, *found.notes)))
    if out is not None:
        result.save(out)
    return result


def asking(hospitals: Sequence[Hospital]) -> Ask:
    """Ask hospitals in this process. Who refuses is told by its public reason alone."""

    told: set[str] = set()

    def ask(question: Question) -> list[Answer | Refusal]:
        found: list[Answer | Refusal] = []
        for one in hospitals:
            try:
                found.append(one.answer(question))
            except InputError as error:
                found.append(Refusal(one.name, error.public))
                # Who calls this holds all tables, so the message that quotes cells may be shown.
                if one.name not in told:
                    log.warning("%s is excluded: %s", one.name, error)
                    told.add(one.name)
        return found

    return ask


def _settings(given: dict[str, Any]) -> Settings:
    """The settings; InputError for a name that is none."""
    known = [one.name for one in fields(Settings)]
    for name in given:
        if name not in known:
            raise unknown("setting", name, known, also={"target": "outcome", "group": "hospital"})
    wish = Settings(**given)
    changed: dict[str, Any] = {name: composed(getattr(wish, name) or "") for name in ROLES}
    changed |= {name: column_names(getattr(wish, name)) for name in LISTS}
    return replace(wish, **changed)


def _family(name: str, ties: str) -> str:
    """The family with its settings as text."""
    if not isinstance(name, str):
        raise unknown("family", name, FAMILIES)
    one_of("family", name.partition(" ")[0], FAMILIES)
    if not ties:
        return named(name).text
    if not name.startswith(COX):
        raise InputError(f"ties={ties!r} is for survival data; leave it out for {name!r}")
    return named(f"{COX} {ties}").text


# ---- the schema ----


def _schema(
    given: str | os.PathLike[str] | Schema | None,
    tabled: Tabled,
    wish: Settings,
) -> tuple[Schema, list[str]]:
    """The schema that all hospitals use, and notes about one that was inferred."""
    if given is None:
        given = tabled.schema
    if given is None:
        return _inferred(tabled, wish)
    schema = given if isinstance(given, Schema) else schemas.read(given)
    return _with_roles(schema, tabled.outcome, wish), []


def _inferred(tabled: Tabled, wish: Settings) -> tuple[Schema, list[str]]:
    """A schema from all tables together, which only who holds all of them can make."""
    if not tabled.outcome:
        raise InputError("name the outcome column: --outcome NAME (in Python outcome=)")
    table, others = shared(tabled.tables)
    absent = [name for name in (tabled.outcome, wish.time) if name in others]
    if absent:
        raise InputError(f"not every table has the column {absent[0]!r}; add it to all of them")
    schema, notes = infer(
        table,
        tabled.outcome,
        time=wish.time,
        weights=wish.weights,
        offset=wish.offset,
        missing=wish.missing,
        ignore=[name for name in wish.ignore if name not in others],
        categories=wish.categories,
    )
    # These levels are those of all hospitals: there are no others to add. And an outcome of more
    # than two is refused, or the family takes it.
    notes = [note for note in notes if OTHER_LEVELS not in note and TWO_LEVELS not in note]
    if others:
        notes = [*notes, f"not every table has these columns, left out: {', '.join(others)}"]
    return schema, notes


def _with_roles(schema: Schema, outcome: str, wish: Settings) -> Schema:
    """A schema in which columns have the roles that were asked for as well."""
    roles = {name: getattr(wish, name) for name in ROLES if getattr(wish, name)}
    if outcome:
        roles["outcome"] = outcome
    taken = {*roles.values(), *wish.ignore}
    columns = []
    for column in schema.columns:
        if column.name in wish.ignore:
            columns.append(replace(column, type=IGNORE))
        elif column.name not in taken:
            columns.append(column)
    if wish.missing != COMPLETE:
        roles["missing"] = wish.missing
    changed = replace(schema, columns=tuple(columns), **roles)
    schemas.check(changed)
    return changed
