"""A saved model that stands alone: a folder that needs neither the tables nor the hospitals.

    model.json          schema, scaling, terms, coefficients, covariance, and all that was measured
    schema.toml         the schema once more, to be read and to be given to other hospitals
    coefficients.csv    the table of coefficients with units, for a spreadsheet
    hospitals.csv       how well the model predicts in each hospital
    summary.txt         everything as text

`load` reads model.json alone. A folder may come from somebody else: it is read within limits, its
checksum is compared, and every number has to fit the schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import numpy as np

from ...errors import InputError
from ...support.files import check_writable, to_csv, unwritable, write_atomic
from ...support.intake import (
    Damaged,
    decoded,
    is_file,
    is_folder,
    parse_json,
    read_bytes,
    user_path,
)
from ...support.lock import Lock
from ...support.seal import BLANK, MARK, check, seal
from ...version import __version__
from .. import schema as schemas
from ..design import Term, terms
from ..families import named
from ..questions import Array, Refusal
from ..records import Assessment, Fit, Group, Round, Threshold
from ..rounds.forms import MOST
from .printed import csv_text, summary_text
from .regression import Regression

MODEL = "model.json"
SCHEMA = "schema.toml"
NAMES = (SCHEMA, "coefficients.csv", "hospitals.csv", "summary.txt")
"""What lies beside the model."""
FORMAT = 1
"""The version of model.json. A reader refuses what it does not know."""
LEVEL = 0.95
"""Of the intervals in the texts of the folder."""
WHOLE = ("residual_df", "rows", "dropped", "rounds", "bytes_up", "bytes_down")
REAL = (
    *("loglik", "null_loglik", "deviance", "null_deviance", "aic"),
    *("dispersion", "events", "distance"),
)
VECTORS = ("coefficients", "mean", "deviation")
CURVES = {"calibration": Group, "roc": Threshold}


# ---- saving ----


def save(model: Regression, folder: str | Path, page: str = "") -> None:
    """Write the folder of a model. One that lies there is replaced.

    A process may be killed at any moment. model.json alone is the model, and is replaced as a
    whole; what else lies there is made of it, goes before it and comes after it. So the folder has
    the old model or the new one, no text of another, and saving again completes it.

    Args:
        model: What to save.
        folder: The folder.
        page: The name of an HTML page to write into the folder as well, if any.

    Raises:
        InputError: The folder cannot be written, or has files of these names beside no model.
    """
    place = user_path("folder", folder)
    check_free(place, NAMES)
    check_writable(place)
    texts = {
        SCHEMA: model.fit.schema,
        "coefficients.csv": csv_text(model, LEVEL),
        "hospitals.csv": _hospitals(model),
        "summary.txt": summary_text(model, LEVEL),
    }
    with Lock(place):  # which also removes what a killed process left half-written
        for name in (*texts, page):
            if name:
                _remove(place / name)
        write_atomic(place / MODEL, seal(_json(model.fit).encode()))
        for name, text in texts.items():
            write_atomic(place / name, text)
        if page:
            model.report(place / page)


def _remove(path: Path) -> None:
    """Remove a file, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def check_free(place: Path, names: Iterable[str]) -> bool:
    """Whether a folder has a model. Refuse one in which saving would replace what is no model's."""
    path = place / MODEL
    if is_file(path):
        if MARK.encode() not in read_bytes(path):
            raise InputError(
                f"{path} already exists and is not a model written by fedsso; choose another folder"
            )
        return True
    for name in names:
        if (place / name).exists():
            raise InputError(
                f"{place / name} already exists without a model beside it; choose another folder"
            )
    return False


def _hospitals(model: Regression) -> str:
    """The table of the hospitals as CSV."""
    names = ["hospital", "rows", "dropped", *model.measures()]
    rows: list[list[Any]] = [names]
    for one in model.assessments:
        values = [getattr(one, name) for name in names]
        rows.append([None if value != value else value for value in values])
    return to_csv(rows)


def _json(fit: Fit) -> str:
    """A fit as JSON, a line for each of its parts. What is no finite number is null."""
    found: dict[str, Any] = {"fedsso": __version__, "format": FORMAT, "seal": BLANK}
    for one in fields(fit):
        found[one.name] = _plain(getattr(fit, one.name))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(value: Any) -> Any:
    """A value of a record as JSON has it. Records become lists of their values, or tables."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Assessment):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


# ---- loading ----


def load_model(folder: str | Path) -> Regression:
    """Read a model that `Regression.save`, `fedsso glm --out` or a deployment has written.

    Args:
        folder: The folder, or its model.json.

    Raises:
        InputError: There is no model, it is damaged, or a newer version of fedsso wrote it.

    >>> import tempfile
    >>> north = "age,ill\\n" + "".join(f"{a},{int(a % 5 > 2)}\\n" for a in range(30, 60))
    >>> folder = tempfile.mkdtemp()
    >>> for city in ("Graz", "Ulm"):
    ...     _ = Path(folder, f"{city}.csv").write_text(north)
    >>> import fedsso
    >>> fedsso.glm(folder, outcome="ill").save(f"{folder}/model")
    >>> load_model(f"{folder}/model")
    Regression(binomial, ill ~ age, 2 hospitals, 60 rows)
    """
    path = user_path("model", folder)
    if is_folder(path):
        path = path / MODEL
    if not is_file(path):
        raise InputError(f"there is no model: {path} is not there; `fedsso glm --out` writes one")
    data = read_bytes(path, "text")
    if not check(data):
        raise Damaged(f"{path} is not as fedsso wrote it: restore it from a copy")
    fit = _Reader(parse_json(decoded(data, path), path), path).fit()
    _check_copy(path.with_name(SCHEMA), fit.schema)
    return Regression(fit)


def _check_copy(path: Path, text: str) -> None:
    """Refuse a folder whose schema.toml means something else: a change there would do nothing."""
    if is_file(path) and schemas.read(path) != schemas.parse(text):
        raise InputError(
            f"{path} was changed since the model was fitted, and a model has one schema: restore "
            f"it, or delete it, since {MODEL} has its own copy"
        )


class _Reader:
    """Reads the values of model.json one by one, and checks each."""

    def __init__(self, table: Any, path: Path) -> None:
        self.path = path
        if not isinstance(table, Mapping):
            self.fail("it holds no model")
        self.table = table
        version = table.get("format")
        if version != FORMAT:
            self.fail(f"it has format {version!r}, this version of fedsso reads {FORMAT}")

    def fail(self, why: str) -> NoReturn:
        """Raise the error of a file that is no model."""
        raise Damaged(f"cannot read {self.path} as a model: {why}")

    def fit(self) -> Fit:
        """The fit, whose parts fit together."""
        family = self.text("family")
        schema = self.text("schema")
        made = self.terms(schema, family)
        p = len(made)
        robust = self.table.get("robust")
        plain: dict[str, Any] = {name: self.array(name, (p,)) for name in VECTORS}
        plain |= {name: self.real(self.table, name) for name in REAL}
        plain |= {name: self.whole(self.table, name) for name in WHOLE}
        return Fit(
            family=family,
            schema=schema,
            terms=made,
            **plain,
            covariance=self.array("covariance", (p, p)),
            robust=None if robust is None else self.array("robust", (p, p)),
            trace=tuple(self.records("trace", Round)),
            hospitals=tuple(self.hospital(one) for one in self.listed(self.table, "hospitals")),
            refusals=tuple(self.records("refusals", Refusal)),
            notes=tuple(map(str, self.listed(self.table, "notes"))),
            converged=self.table.get("converged") is True,
        )

    def terms(self, schema: str, family: str) -> tuple[Term, ...]:
        """The terms that have a coefficient: those of the schema, in their order."""
        every = terms(schemas.parse(schema), named(family).text)
        saved = self.records("terms", Term)
        found = tuple(term for term in every if term in saved)
        if list(found) != saved:
            self.fail("its terms are not those of its schema")
        return found

    def text(self, key: str) -> str:
        """A text."""
        value = self.table.get(key)
        return value if isinstance(value, str) else self.fail(f"{key} is no text")

    def real(self, table: Mapping[str, Any], key: str) -> float:
        """A number; null stands for one that does not exist."""
        value = table.get(key)
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{key} is no number")
        return float(value)

    def whole(self, table: Mapping[str, Any], key: str) -> int:
        """A whole number."""
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{key} is no whole number")
        return value

    def listed(self, table: Mapping[str, Any], key: str) -> list[Any]:
        """A list."""
        value = table.get(key)
        return value if isinstance(value, list) else self.fail(f"{key} is no list")

    def array(self, key: str, shape: tuple[int, ...]) -> Array:
        """An array of numbers with this shape."""
        try:
            found: Array = np.array(self.table.get(key), dtype=np.float64)
        except (TypeError, ValueError):
            self.fail(f"{key} holds something that is no number")
        if found.shape != shape:
            self.fail(f"{key} has the shape {found.shape}, expected {shape}")
        if not (np.abs(found) < MOST).all() or (found.ndim == 2 and (found.diagonal() < 0).any()):
            self.fail(f"{key} has numbers that no fit has")
        return found

    def records(self, key: str, kind: Any) -> list[Any]:
        """A list of named tuples of one kind."""
        return [self.record(one, kind) for one in self.listed(self.table, key)]

    def record(self, values: Any, kind: Any) -> Any:
        """A named tuple: each value has the type that its field has."""
        types = get_type_hints(kind)
        if not isinstance(values, list) or len(values) != len(types):
            self.fail(f"a {kind.__name__} has {len(types)} values")
        table = dict(zip(types, values, strict=True))
        return kind(**{name: self.value(table, name, types[name]) for name in types})

    def value(self, table: Mapping[str, Any], key: str, wanted: Any) -> Any:
        """A value of a record, which must have this type."""
        if wanted is int:
            return self.whole(table, key)
        if wanted is float:
            return self.real(table, key)
        value = table.get(key)
        return value if isinstance(value, wanted) else self.fail(f"{key} is wrong")

    def hospital(self, table: Any) -> Assessment:
        """What is known of one hospital."""
        if not isinstance(table, Mapping):
            self.fail("a hospital is no table")
        found: dict[str, Any] = {}
        for name, wanted in get_type_hints(Assessment).items():
            kind = CURVES.get(name)
            if kind is None:
                found[name] = self.value(table, name, wanted)
            else:
                points = self.listed(table, name)
                found[name] = tuple(self.record(point, kind) for point in points)
        return Assessment(**found)
