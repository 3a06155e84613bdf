"""Tables of made-up patients in four clinics: words, gaps, other orders, one column more.

All four are drawn from one logistic model, so a regression over them has a finite maximum. The
clinic "west" can be given a bad cell.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

SECRET = "Miller Jane 1951-03-04"
"""What must never leave a clinic."""
SCHEMA = """
outcome = "ill"

[columns.age]
type = "number"
unit = "years"

[columns.smoker]
type = "yesno"

[columns.stage]
type = "category"
levels = ["I", "II", "III"]

[columns.patient]
type = "ignore"
"""
ORDERS = {  # the columns of each clinic; "doctor" is in no schema
    "east": ("patient", "age", "smoker", "stage", "ill"),
    "north": ("stage", "ill", "patient", "smoker", "age"),
    "south": ("patient", "doctor", "age", "smoker", "stage", "ill"),
    "west": ("ill", "stage", "smoker", "age", "patient"),
}
SIZES = {"east": 90, "north": 70, "south": 80, "west": 60}


def patients(name: str) -> list[dict[str, str]]:
    """The patients of one clinic. Every eleventh has no age, every thirteenth no stage."""
    draw = np.random.default_rng(sorted(ORDERS).index(name))
    rows = []
    for i in range(SIZES[name]):
        age = float(np.round(draw.normal(60, 10), 1))
        smoker = bool(draw.random() < 0.4)
        stage = int(draw.integers(3))
        eta = 0.05 * (age - 60) + 0.7 * smoker + 0.5 * stage - 0.6
        ill = bool(draw.random() < 1 / (1 + np.exp(-eta)))
        rows.append(
            {
                "patient": f"{name}-{SECRET}-{i}",
                "doctor": f"Dr {SECRET} {i % 3}",
                "age": "" if i % 11 == 10 else str(age),
                "smoker": "yes" if smoker else "no",
                "stage": "NA" if i % 13 == 12 else ("I", "II", "III")[stage],
                "ill": "yes" if ill else "no",
            }
        )
    return rows


def table(name: str, separator: str = ",") -> str:
    """The CSV text of one clinic."""
    text = io.StringIO()
    writer: Any = csv.DictWriter(
        text, ORDERS[name], delimiter=separator, extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(patients(name))
    return text.getvalue()


def write(folder: Path, bad: str = "") -> Path:
    """NAME.csv of each clinic. `bad` is a text that stands for two ages of the clinic "west"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ORDERS:
        text = table(name, ";" if name == "north" else ",")
        if bad and name == "west":
            for row in patients(name)[:2]:
                text = text.replace(f",{row['age']},{row['patient']}", f",{bad},{row['patient']}")
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    return folder


def pooled(names: tuple[str, ...] = tuple(ORDERS)) -> tuple[Any, Any]:
    """All complete rows of some clinics in one place, by hand: x with an intercept, and y."""
    x, y = [], []
    for name in names:
        for row in patients(name):
            if row["age"] and row["stage"] != "NA":
                levels = [float(row["stage"] == level) for level in ("II", "III")]
                x.append([1.0, float(row["age"]), float(row["smoker"] == "yes"), *levels])
                y.append(float(row["ill"] == "yes"))
    return np.array(x), np.array(y)
