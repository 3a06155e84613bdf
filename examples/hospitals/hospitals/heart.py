"""The four hospitals of UCI heart disease, as a table with names and words.

Their files, processed.NAME.data, have no header and write everything in numbers: 13 about a patient
and the diagnosis, "?" for a gap. Here 4 becomes "none" in a column chest_pain.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

from fedsso.errors import InputError
from fedsso.regression.design import Table
from fedsso.support.intake import text_lines

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
KIND = ".data"
SCHEMA = Path(__file__).with_name("heart.toml")

COLUMNS: dict[str, dict[str, str]] = {
    "age": {},
    "sex": {"0": "female", "1": "male"},
    "chest_pain": {"1": "typical", "2": "atypical", "3": "other", "4": "none"},
    "blood_pressure": {"0": ""},
    "cholesterol": {"0": ""},
    "blood_sugar": {"0": "no", "1": "yes"},
    "ecg": {"0": "normal", "1": "abnormal", "2": "hypertrophy"},
    "heart_rate": {},
    "angina": {"0": "no", "1": "yes"},
    "st_depression": {},
    "st_slope": {"1": "up", "2": "flat", "3": "down"},
    "vessels": {},
    "thallium": {"3": "normal", "6": "fixed", "7": "reversible"},
    "disease": {"0": "no", "1": "yes", "2": "yes", "3": "yes", "4": "yes"},
}
"""The columns of a file in their order, with the word for each number where there are words. A
pressure or cholesterol of 0 was not measured."""


def files() -> list[Path]:
    """The hospitals' files in $FEDSSO_DATA, or where `fedsso data get heart` puts them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedsso"
    folder = Path(os.environ.get("FEDSSO_DATA") or cache).expanduser()
    found = [folder / f"processed.{hospital}{KIND}" for hospital in HOSPITALS]
    missing = [path for path in found if not path.is_file()]
    if missing:
        raise InputError(
            f"no file {missing[0]}: run `fedsso data get heart`, or say files in the run config",
            public="no file with its patients: run `fedsso data get heart`, or say files",
        )
    return found


def name(path: Path) -> str:
    """How a table's hospital is called: "va" of processed.va.data."""
    return path.stem.removeprefix("processed.")


def read(path: Path) -> Table:
    """The table of one hospital. A cell without a word stays as it is, for the schema to judge."""
    rows: list[list[str]] = []
    lines: list[int] = []
    for line, cells in enumerate(csv.reader(text_lines(path)), 1):
        if not cells:
            continue
        if len(cells) != len(COLUMNS):
            raise InputError(
                f"{path}: line {line}: has {len(cells)} cells, expected {len(COLUMNS)}",
                public=f"a row has {len(cells)} cells, expected {len(COLUMNS)}",
            )
        rows.append(list(map(_word, cells, COLUMNS.values())))
        lines.append(line)
    return Table(tuple(COLUMNS), rows, str(path), tuple(lines))


def _word(cell: str, words: dict[str, str]) -> str:
    """What a cell stands for: the files write the same number as 1 and as 1.0."""
    return words.get(cell.strip().removesuffix(".0"), cell.strip())
