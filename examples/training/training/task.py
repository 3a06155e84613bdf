"""The hospital's rows, the model and its steps, in numpy alone: every message to a SuperNode starts
a Python process.

A file is that of UCI heart disease, processed.NAME.data: 13 numbers about a patient and the
diagnosis, "?" for a gap.
"""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
SCALES = {  # name: (typical value, typical spread)
    "age": (54, 9),
    "sex": (0.7, 0.5),
    "cp": (3, 1),
    "trestbps": (132, 18),
    "chol": (247, 52),
    "fbs": (0.15, 0.35),
    "restecg": (1, 1),
    "thalach": (150, 23),
    "exang": (0.3, 0.5),
    "oldpeak": (1, 1.2),
    "slope": (1.6, 0.6),
    "ca": (0.7, 0.9),
    "thal": (4.7, 1.9),
}
"""Agreed before the first round, so that no hospital needs another's rows; rounded from Cleveland's
public file."""
NEVER_ZERO = ("trestbps", "chol")  # a pressure or cholesterol of 0 was not measured
HELD_OUT = 5  # every fifth row is for evaluation

Vector = NDArray[np.float64]


class Rows(NamedTuple):
    """Patients of one hospital."""

    x: Vector  # [rows, 14]: the features, standardised, and 1 for the intercept
    y: Vector  # [rows]: 1 for heart disease


class RowsError(ValueError):
    """Rows that cannot be used: the message is for the hospital, `public` for the others."""

    def __init__(self, message: str, public: str) -> None:
        super().__init__(message)
        self.public = public


def start() -> Vector:
    """The model of round 0."""
    return np.zeros(len(SCALES) + 1)


def load(node_config: Mapping[str, Any], data_dir: str = "") -> tuple[Rows, Rows]:
    """Training and held-out rows of this node's hospital."""
    rows = read(find(node_config, data_dir))
    if len(rows.y) < HELD_OUT:
        few = f"{len(rows.y)} patients are too few; {HELD_OUT} are the least"
        raise RowsError(few, f"fewer than {HELD_OUT} patients")
    held_out = np.arange(len(rows.y)) % HELD_OUT == HELD_OUT - 1
    return Rows(rows.x[~held_out], rows.y[~held_out]), Rows(rows.x[held_out], rows.y[held_out])


def find(node_config: Mapping[str, Any], data_dir: str = "") -> Path:
    """In deployment the one file in the node's own data-folder, in simulation that of the hospital
    partition-id."""
    if "data-folder" in node_config:
        files = sorted(Path(str(node_config["data-folder"])).glob("*.data"))
        if len(files) != 1:
            wrong = f"has {len(files)} files *.data, expected one: the hospital's"
            raise RowsError(f"{node_config['data-folder']}: {wrong}", f"its data-folder {wrong}")
        return files[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedsso"
    folder = Path(data_dir or os.environ.get("FEDSSO_DATA") or cache).expanduser()
    number = int(node_config["partition-id"])
    if not 0 <= number < len(HOSPITALS):
        raise ValueError(
            f"there is no hospital {number}: simulate with num-supernodes={len(HOSPITALS)}"
        )
    path = folder / f"processed.{HOSPITALS[number]}.data"
    if not path.is_file():
        remedy = "run `fedsso data get heart`, or say data-dir in the run config"
        raise RowsError(f"no file {path}: {remedy}", f"no file with its patients: {remedy}")
    return path


def read(path: Path) -> Rows:
    """A hospital's file; a gap gets the typical value, which is 0 on the common scale."""
    with path.open(encoding="utf-8-sig") as file:
        lines = [(number, cells) for number, cells in enumerate(csv.reader(file), 1) if cells]
    if not lines:
        raise RowsError(f"{path} is empty", "an empty file")
    _check(path, lines)
    table = np.array([[float(cell.replace("?", "nan")) for cell in cells] for _, cells in lines])
    x, y = table[:, :-1], (table[:, -1] > 0).astype(np.float64)
    for name in NEVER_ZERO:
        column = x[:, list(SCALES).index(name)]
        column[column == 0] = np.nan
    centre, spread = np.array(list(SCALES.values())).T
    x = np.nan_to_num((x - centre) / spread)
    return Rows(np.column_stack([x, np.ones(len(x))]), y)


def _check(path: Path, lines: list[tuple[int, list[str]]]) -> None:
    """Refuse cells that are no numbers, or rows of another length; the server hears of columns and
    counts alone."""
    names = (*SCALES, "diagnosis")
    short = [number for number, cells in lines if len(cells) != len(names)]
    if short:
        wanted = f"{len(names)} cells: {len(SCALES)} numbers and the diagnosis"
        wrong = f"{len(short)} rows have not {wanted}"
        raise RowsError(f"{path}, line {short[0]}: {wrong}", wrong)
    bad = [
        (number, name)
        for number, cells in lines
        for name, cell in zip(names, cells, strict=True)
        if _bad(name, cell)
    ]
    if bad:
        columns = ", ".join(
            f"{name} {count}" for name, count in Counter(name for _, name in bad).items()
        )
        remedy = "write a gap as ?, the diagnosis as 0 or more"
        wrong = f"cells that are not numbers, by column: {columns}; {remedy}"
        number, name = bad[0]
        cell = dict(lines)[number][names.index(name)]
        raise RowsError(f"{path}, line {number}, column {name}: {cell!r}; {wrong}", wrong)


def _bad(name: str, cell: str) -> bool:
    """Whether a cell is neither a number nor, but for the diagnosis, a gap."""
    try:
        value = float(cell.replace("?", "nan"))
    except ValueError:
        return True
    return not value >= 0 if name == "diagnosis" else math.isinf(value)


def loss(w: Vector, rows: Rows) -> float:
    """Mean cross-entropy."""
    score = rows.x @ w
    return float(np.mean(np.logaddexp(0, score) - rows.y * score))


def accuracy(w: Vector, rows: Rows) -> float:
    return float(np.mean((rows.x @ w > 0) == (rows.y == 1)))


def train(w: Vector, rows: Rows, alpha: float, steps: int) -> tuple[Vector, float]:
    """The model after gradient steps over all rows, and the mean of the losses on the way."""
    losses = []
    for _ in range(steps):
        losses.append(loss(w, rows))
        chance = (1 + np.tanh(rows.x @ w / 2)) / 2  # the logistic function; exp might overflow
        w = w - alpha * rows.x.T @ (chance - rows.y) / len(rows.y)
    return w, float(np.mean(losses))
