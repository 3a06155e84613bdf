"""The schema of a table: what every hospital calls its columns, and how they become numbers.

A schema is a small text file (TOML) that all hospitals share. `fedsso data schema` writes one from
a hospital's table, to be read and corrected by a person. It names columns, levels and units, but
holds no row of anybody.

    outcome = "disease"
    positive = "yes"            # the level of the outcome that is counted as an event
    missing = "complete"        # or "median": a gap takes `fill`, and an indicator column says so

    [columns.age]
    type = "number"
    unit = "years"
    fill = 54.0                 # what a gap takes with missing = "median"

    [columns.smoker]
    type = "yesno"

    [columns.stage]
    type = "category"
    levels = ["I", "II", "III"]     # the first is the reference, unless `reference` names another

    [columns.patient]
    type = "ignore"             # identifiers, names, free text
"""

from __future__ import annotations

from dataclasses import dataclass, field

NUMBER = "number"
YESNO = "yesno"
CATEGORY = "category"
IGNORE = "ignore"
TYPES = (NUMBER, YESNO, CATEGORY, IGNORE)

COMPLETE = "complete"
MEDIAN = "median"
RULES = (COMPLETE, MEDIAN)


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type: str
    """One of TYPES."""
    unit: str = ""
    levels: tuple[str, ...] = ()
    """Of a category: its levels. Of a yes/no column: how no and yes are written, if given."""
    reference: str = ""
    """Of a category: the level that the others are compared with. Empty: the first."""
    scale: bool = True
    """Whether the fit divides a number by its deviation. Results are in the unit all the same."""
    fill: float | None = None
    """Of a number: what a gap takes with missing="median"."""


@dataclass(frozen=True)
class Schema:
    """What a regression is told about the tables of all hospitals."""

    outcome: str
    """The column to explain. Of survival data: the column of the event."""
    columns: tuple[Column, ...] = field(default=())
    """The columns to explain it with, in the order of the coefficients."""
    positive: str = ""
    """Of an outcome with two levels: the one that counts as an event. Empty: yes, true or 1."""
    time: str = ""
    """Of survival data: the column of the time at risk."""
    weights: str = ""
    """The column of weights of the rows, if there is one."""
    offset: str = ""
    """The column that is added to the linear predictor, if there is one."""
    missing: str = COMPLETE
    """What happens to a row with a gap: one of RULES. A gap in the outcome always drops the row."""
    intercept: bool = True
    """Whether the model has an intercept. Survival models never have one."""
