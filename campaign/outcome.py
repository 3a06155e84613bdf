"""What a folder holds, as plain numbers and texts, and whether two folders hold the same."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fedsso import load_model, load_run
from fedsso.experiment.spec import SPEC, TRACE
from fedsso.experiment.store import PARTS, read_all
from fedsso.experiment.tuning.search import JOURNAL
from fedsso.regression.result.model import MODEL

FREE = ("*.lock", "*previous*")  # files that may be there or not
TRIALS = "trials.csv"
MODELS = ("coefficients.csv", "hospitals.csv", "summary.txt")
TEXTS = ("*.md", TRIALS, "table2*.csv", *MODELS)
TIMED = "seconds"


def outcome(folder: Path) -> dict[str, Any]:
    """Names, traces without their seconds, models, and texts of all that lies below a folder."""
    found: dict[str, Any] = {"files": names(folder)}
    if _drawn(folder):
        return {**found, "trials": len((folder / TRIALS).read_text().splitlines())}
    for path in sorted(folder.rglob(SPEC)):
        run = load_run(path.parent)
        label = f"run {path.parent.relative_to(folder)}"
        found[f"{label} trace"] = plain_trace(run.trace.to_csv())
        found[f"{label} model"] = hashlib.sha256(
            run.x.numpy().tobytes() + run.buffers.numpy().tobytes()
        ).hexdigest()
    for path in sorted(folder.rglob(TRACE)):
        if not (path.parent / SPEC).exists():
            found[f"trace {path.parent.relative_to(folder)}"] = plain_trace(path.read_text())
    for place in sorted({path.parent for path in folder.rglob("*.npz")}):
        found |= parts(place)
    for path in sorted(folder.rglob(MODEL)):
        load_model(path)
        found[f"model {path.parent.relative_to(folder)}"] = path.read_text()
    for pattern in TEXTS:
        found |= {f"text {path.name}": path.read_text() for path in sorted(folder.rglob(pattern))}
    return found


def names(folder: Path) -> list[str]:
    """All files below a folder, but those that come and go."""
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    free = (*FREE, f"{PARTS}/*.npz") if _drawn(folder) else FREE
    return sorted(name for name in files if not any(fnmatch(name, one) for one in free))


def _drawn(folder: Path) -> bool:
    """Whether it is a search: killed while it drew settings, it may draw others."""
    return (folder / JOURNAL).exists()


def plain_trace(text: str) -> list[list[str]]:
    """The cells of a trace as they are written, without the seconds."""
    rows = list(csv.reader(text.splitlines()))
    keep = [i for i, name in enumerate(rows[0]) if name != TIMED]
    return [[row[i] for i in keep] for row in rows]


def parts(folder: Path) -> dict[str, Any]:
    """The traces that a sweep's parts hold, by their trials' identity; numbers as text, for NaN."""
    found = {}
    for run in read_all(folder):
        columns = {
            name: str(column.tolist())
            for name, column in run.trace.columns.items()
            if name not in (TIMED, "trial")
        }
        found[f"part {run.spec.identity[:12]}"] = columns
    return found


def litter(folder: Path, reference: Mapping[str, Any]) -> list[str]:
    """Files that an undisturbed run does not leave."""
    return sorted(set(names(folder)) - set(reference["files"]))


def difference(found: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The first thing that is missing or another; empty if there is none."""
    for key, wanted in reference.items():
        if key == "files":
            missing = sorted(set(wanted) - set(found[key]))
            if missing:
                return f"missing: {', '.join(missing)}"
        elif key not in found:
            return f"missing: {key}"
        elif found[key] != wanted:
            return f"other numbers: {key}{_where(found[key], wanted)}"
    return ""


def _where(found: Any, wanted: Any) -> str:
    """The first cell of two traces that is another."""
    if not isinstance(found, list) or not isinstance(wanted, list) or len(found) != len(wanted):
        return ""
    for row, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a != b:
            return f", row {row}: {a} instead of {b}"
    return ""
