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
    per = 10                    # the coefficient is that of ten years
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from typing import Any

from ..errors import InputError, number, unknown
from ..support.files import to_toml
from ..support.intake import PathLike, composed, parse_toml, read_text, user_path
from .cells import is_gap

NUMBER = "number"
YESNO = "yesno"
CATEGORY = "category"
IGNORE = "ignore"
TYPES = (NUMBER, YESNO, CATEGORY, IGNORE)

COMPLETE = "complete"
MEDIAN = "median"
RULES = (COMPLETE, MEDIAN)

TEXTS = ("outcome", "positive", "negative", "time", "weights", "offset")
"""The keys of a schema that are texts."""
DATES = "; make a number of a date, such as an age in years or days since the first visit"
COMMENTS = {
    "outcome": "the column to model",
    "positive": "the level of the outcome that counts as an event",
    "negative": "the other level",
    "time": "the time at risk",
    "weights": "the weights of the rows",
    "offset": "is added to the linear predictor, such as log(exposure)",
    "missing": '"complete": drop rows with missing values; "median": impute `fill`, add an '
    "indicator",
    "marks": "further texts that mean missing",
    "type": "number, yesno, category or ignore",
    "unit": "for the tables of results",
    "per": "the coefficient is that of so many units",
    "levels": "the first is the reference, unless `reference` names another",
    "scale": "false: the fit takes the numbers as they are",
    "fill": "replaces missing values",
    "gaps": "true: an indicator for missing values; false: drop such rows",
    IGNORE: "identifiers, names, free text: never read",
}
"""What `write` says about a key, where it first comes."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type: str
    """One of TYPES."""
    unit: str = ""
    per: float = 1.0
    """Of a number: the coefficient is that of so many units."""
    levels: tuple[str, ...] = ()
    """Of a category: its levels. Of a yes/no column: how no and yes are written, if given."""
    reference: str = ""
    """Of a category: the level that the others are compared with. Empty: the first."""
    scale: bool = True
    """Whether the fit divides a number by its deviation. Results are in the unit all the same."""
    fill: float | None = None
    """Of a number: what a gap takes with missing="median"."""
    gaps: bool = True
    """With missing="median": whether gaps have an indicator, or a level, of their own. False leaves
    out the rows with a gap in this column."""

    @property
    def baseline(self) -> str:
        """The level without a coefficient, which the others are compared with. "" of a number."""
        if self.type == YESNO:
            return self.levels[0] if self.levels else "no"
        return self.reference or next(iter(self.levels), "")

    @property
    def compared(self) -> tuple[str, ...]:
        """The levels with a coefficient of their own: all but the reference, or yes."""
        if self.type == YESNO:
            return self.levels[1:] or ("yes",)
        return tuple(level for level in self.levels if level != self.baseline)


@dataclass(frozen=True)
class Schema:
    """What a regression is told about the tables of all hospitals."""

    outcome: str
    """The column to explain. Of survival data: the column of the event."""
    columns: tuple[Column, ...] = field(default=())
    """The columns to explain it with, in the order of the coefficients."""
    positive: str = ""
    """Of an outcome with two levels: the one that counts as an event. Empty: yes, true or 1."""
    negative: str = ""
    """The other level. Empty: no, false or 0, or else the one other text that there is."""
    time: str = ""
    """Of survival data: the column of the time at risk."""
    weights: str = ""
    """The column of weights of the rows, if there is one."""
    offset: str = ""
    """The column that is added to the linear predictor, if there is one."""
    missing: str = COMPLETE
    """What happens to a row with a gap: one of RULES. A gap in the outcome always drops the row."""
    marks: tuple[str, ...] = ()
    """Texts of a gap beside the usual ones (empty, ?, NA, nan, ...), such as "-9"."""
    intercept: bool = True
    """Whether the model has an intercept. Survival models never have one."""


DEFAULTS = {one.name: one.default for one in fields(Schema)}


# ---- reading ----


def read(source: PathLike) -> Schema:
    """Read a schema from a file, or from TOML text.

    A text with a line end or an equals sign, other than a path that ends in .toml, is TOML.

    >>> read('outcome = "ill"\\n[columns.age]\\ntype = "number"').columns[0].name
    'age'
    """
    if isinstance(source, str) and _is_toml(source):
        return parse(source)
    path = user_path("schema", source)
    return parse(read_text(path, "settings"), str(path))


def _is_toml(text: str) -> bool:
    """Whether a text is TOML, and not the path of a file."""
    if "\n" in text:
        return True
    return "=" in text and not text.endswith(".toml")


def parse(text: str, where: str = "schema") -> Schema:
    """Turn TOML text into a schema. `where` begins the messages of errors.

    Raises:
        InputError: The text is no schema. Its `public` says why too: a schema holds no row.
    """
    return _schema(parse_toml(composed(text), where), where)


def _schema(table: Mapping[str, Any], where: str) -> Schema:
    """The schema in the dictionary of a TOML file, checked."""
    known = [one.name for one in fields(Schema)]
    _check_keys(table, known, where)
    texts = {name: _text(table, name, where) for name in TEXTS}
    columns = table.get("columns", {})
    if not isinstance(columns, Mapping):
        raise wrong(f"{where}: write the columns as tables, such as [columns.age]")
    schema = Schema(
        **texts,
        missing=table.get("missing", COMPLETE),
        marks=_texts(table, "marks", where),
        intercept=_flag(table, "intercept", where),
        columns=tuple(_column(name, one, where) for name, one in columns.items()),
    )
    check(schema, where)
    return schema


def _column(name: str, table: object, where: str) -> Column:
    """The column in a table [columns.NAME]."""
    place = f"{where}: [columns.{name}]"
    if not isinstance(table, Mapping):
        raise wrong(f'{place} must be a table with at least type = "number" or another type')
    known = [one.name for one in fields(Column) if one.name != "name"]
    _check_keys(table, known, place)
    numbers = {key: _number(table, key, place) for key in ("fill", "per") if key in table}
    return Column(
        name,
        _text(table, "type", place),
        unit=_text(table, "unit", place),
        levels=_texts(table, "levels", place),
        reference=_text(table, "reference", place),
        scale=_flag(table, "scale", place),
        gaps=_flag(table, "gaps", place),
        **numbers,
    )


def _check_keys(table: Mapping[str, object], known: Sequence[str], where: str) -> None:
    """Raise InputError for a key that a schema does not have."""
    for key in table:
        if key not in known:
            raise wrong(f"{where}: {unknown('key', key, known)}")


def _text(table: Mapping[str, object], key: str, where: str) -> str:
    """A text of a schema, "" where there is none. Numbers are taken as they are written."""
    value = table.get(key, "")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise wrong(f"{where}: {key} must be a text in quotes, got {value!r}")


def _texts(table: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    """A list of texts of a schema, none of them twice."""
    value = table.get(key, [])
    if not isinstance(value, list):
        raise wrong(f'{where}: {key} must be a list such as ["I", "II"], got {value!r}')
    texts = tuple(_text({key: one}, key, where) for one in value)
    if len(set(texts)) < len(texts):
        raise wrong(f"{where}: {key} must name each once, got {list(texts)}")
    return texts


def _flag(table: Mapping[str, object], key: str, where: str) -> bool:
    """A true or false of a schema. True where it says nothing."""
    value = table.get(key, True)
    if isinstance(value, bool):
        return value
    raise wrong(f"{where}: {key} must be true or false, got {value!r}")


def _number(table: Mapping[str, object], key: str, where: str) -> float:
    """A number that a schema has."""
    try:
        found = number(key, table[key])
    except InputError as error:
        raise wrong(f"{where}: {error}") from None
    if not isfinite(found):
        raise wrong(f"{where}: {key} must be a number, got {found}")
    return found


def wrong(message: str) -> InputError:
    """The error of a schema. Everybody may read it, since a schema holds no row."""
    return InputError(message, public=message)


# ---- checking ----


def check(schema: Schema, where: str = "schema") -> None:
    """Raise InputError for a schema that contradicts itself. `where` begins the message."""
    if not schema.outcome:
        raise wrong(f'{where}: name the outcome column, such as outcome = "disease"')
    if schema.missing not in RULES:
        raise wrong(f"{where}: missing must be one of {', '.join(RULES)}, got {schema.missing!r}")
    if schema.positive and schema.positive == schema.negative:
        raise wrong(f"{where}: positive and negative are both {schema.positive!r}, need two levels")
    parts = [schema.outcome, schema.time, schema.weights, schema.offset]
    parts = [name for name in parts if name]
    names = [column.name for column in schema.columns if column.type != IGNORE]
    for name in parts:
        if name in names or parts.count(name) > 1:
            raise wrong(
                f"{where}: column {name!r} has two roles; name it once among outcome, time, "
                f"weights, offset and [columns.*]"
            )
    if not names and not schema.intercept:
        raise wrong(f"{where}: there is nothing to estimate: no column and no intercept")
    for column in schema.columns:
        _check_column(column, schema.missing, f"{where}: [columns.{column.name}]")


def _check_column(column: Column, missing: str, where: str) -> None:
    """Raise InputError for a column that contradicts itself."""
    if not column.name:
        raise wrong(f"{where}: a column has no name: give it one")
    if column.type not in TYPES:
        remedy = DATES if column.type in ("date", "time", "datetime") else ""
        raise wrong(f"{where}: {unknown('type', column.type, TYPES)}{remedy}")
    if any(is_gap(level) for level in column.levels):
        raise wrong(f"{where}: levels must not be texts that mean missing")
    if not 0 < column.per < inf or (column.per != 1 and column.type != NUMBER):
        raise wrong(
            f"{where}: per is how many units of a number its coefficient is for, above 0, got "
            f"{column.per!r}"
        )
    if column.type == CATEGORY and len(column.levels) < 2:
        raise wrong(
            f'{where}: a category needs at least 2 levels, such as levels = ["I", "II"], got '
            f"{list(column.levels)}"
        )
    if column.type == YESNO and len(column.levels) not in (0, 2):
        raise wrong(
            f'{where}: levels of yesno are how no and yes are written, such as ["nein", "ja"], got '
            f"{list(column.levels)}"
        )
    if column.reference and column.reference not in column.levels:
        raise wrong(f"{where}: {unknown('reference', column.reference, column.levels)}")
    if column.type == NUMBER and missing == MEDIAN and column.gaps and column.fill is None:
        raise wrong(
            f"{where}: say what replaces a missing value, such as fill = 50.0, or gaps = false "
            "where there is "
            f"none"
        )


# ---- writing ----


def write(schema: Schema) -> str:
    """The TOML text of a schema, with comments for the person who corrects it.

    `parse` reads the same schema from it.
    """
    head: dict[str, object] = {}
    for key in (*TEXTS, "missing", "marks", "intercept"):
        value = getattr(schema, key)
        if value != DEFAULTS.get(key) or key == "missing":
            head[key] = value
    columns = {column.name: _written(column) for column in schema.columns}
    lines = to_toml({**head, "columns": columns}).splitlines()
    told: set[str] = set()
    return "".join(f"{_commented(line, told)}\n" for line in lines)


def _written(column: Column) -> dict[str, object]:
    """The keys of a column that differ from their defaults."""
    keys: dict[str, object] = {}
    for one in fields(Column):
        value = getattr(column, one.name)
        if one.name != "name" and value != one.default:
            keys[one.name] = value
    return keys


def _commented(line: str, told: set[str]) -> str:
    """A line with a comment on its key, if the key was not told about before."""
    if line == "[columns]":
        return "# The explanatory columns, in the order of the coefficients."
    key = line.partition(" = ")[0]
    if line.endswith(f'type = "{IGNORE}"'):
        key = IGNORE
    if key not in COMMENTS or key in told:
        return line
    told.add(key)
    return f"{line}  # {COMMENTS[key]}"
