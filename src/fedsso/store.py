"""The traces of hundreds of trials in a few files.

A part is a chunk of trials that ran batched: the columns of their traces [trials, rounds + 1] and, as JSON, what each
trial is. It is written whole or not at all, by whichever process ran it; a trial is found again by the identity of its
run, whatever part it is in. So a killed sweep goes on after its last finished part, and sweeps that share runs share
their work.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from .errors import InputError
from .files import write_atomic
from .intake import read_bytes
from .runs import Run
from .trace import INTEGERS, Trace
from .version import __version__

log = logging.getLogger("fedsso")

EXACT = ("test_accuracy",)  # compared with targets: kept in double precision, the rest in single
INDEX = ("trial", "seed", "round")
DAMAGED = (BadZipFile, zlib.error, ValueError, KeyError, TypeError, EOFError, OSError, IndexError, RuntimeError)


class Held(NamedTuple):
    """Where a trial's trace lies."""

    path: Path
    row: int
    meta: Mapping[str, Any]


def save_part(folder: Path, runs: Sequence[Run]) -> None:
    """Write the traces of a chunk."""
    meta = [_describe(run) for run in runs]
    names = dict.fromkeys(n for run in runs for n in run.trace.columns if n not in INDEX)
    columns = {name: _table(name, [run.trace for run in runs]) for name in names}
    text = np.frombuffer(json.dumps(meta, default=str).encode(), np.uint8)
    buffer = BytesIO()
    np.savez_compressed(buffer, meta=text, **columns)
    digest = sha256("".join(m["identity"] for m in meta).encode()).hexdigest()[:12]
    write_atomic(folder / f"{runs[0].spec.algorithm}-{digest}.npz", buffer.getvalue())


def _describe(run: Run) -> dict[str, Any]:
    spec, trace = run.spec, run.trace
    return {
        "version": __version__,
        "identity": spec.identity,
        "label": spec.label,
        "seed": spec.seed,
        "rounds": len(trace),
        "eval_every": trace.eval_every,
        "diverged": trace.diverged,
    }


def _table(name: str, traces: Sequence[Trace]) -> Any:
    """One column of all trials; a trial that ended early is filled up with zeros."""
    kind = np.int64 if name in INTEGERS else np.float64 if name in EXACT else np.float32
    table = np.zeros((len(traces), max(map(len, traces))), kind)
    with np.errstate(over="ignore"):  # what single precision cannot hold is infinite
        for row, trace in zip(table, traces, strict=True):
            row[: len(trace)] = trace[name] if name in trace.columns else np.nan
    return table


def held(folder: Path) -> dict[str, Held]:
    """The trials that a folder holds, by identity; those of another version of the package do not count."""
    found: dict[str, Held] = {}
    for path in sorted(p for p in folder.glob("*.npz") if p.is_file()):
        with _opened(path) as part:
            meta = [_checked(m) for m in json.loads(part["meta"].tobytes())]
        if any(m["version"] != __version__ for m in meta):
            log.warning("%s was made by fedsso %s, this is %s: it is run again", path, meta[0]["version"], __version__)
            continue
        found.update({m["identity"]: Held(path, i, m) for i, m in enumerate(meta)})
    return found


def _checked(meta: Any) -> dict[str, Any]:
    """What is told of a trial, each of its type."""
    whole = {"version": __version__, **meta}
    good = all(type(whole[key]) is int for key in ("seed", "rounds", "eval_every")) and whole["rounds"] > 0
    good = good and all(isinstance(whole[key], str) for key in ("identity", "label", "version"))
    if not (good and isinstance(whole["diverged"], int | None)):
        raise ValueError("a trial is described wrongly")
    return whole


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with _guarded(path), np.load(BytesIO(read_bytes(path)), allow_pickle=False) as part:
        yield part


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """A file that cannot be understood is named, with the remedy."""
    try:
        yield
    except DAMAGED as error:
        raise InputError(f"{path} is not a part of a sweep ({error}): remove it, and it is computed again") from error


def read(wanted: Sequence[Held]) -> list[Trace]:
    """The traces of some trials; each file is read once."""
    columns: dict[Path, dict[str, NDArray[Any]]] = {}
    for path in {one.path for one in wanted}:
        with _opened(path) as part:
            columns[path] = {name: part[name] for name in part.files if name != "meta"}
    traces = []
    for one in wanted:
        with _guarded(one.path):
            traces.append(_trace(one, columns[one.path]))
    return traces


def _trace(one: Held, columns: Mapping[str, NDArray[Any]]) -> Trace:
    length = int(one.meta["rounds"])
    if not columns or any(c.ndim != 2 or len(c) <= one.row or c.shape[1] < length for c in columns.values()):
        raise ValueError(f"it tells of {length} rounds of trial {one.row}, and does not hold them")
    for name, column in columns.items():
        if column.dtype not in ((np.int64,) if name in INTEGERS else (np.float32, np.float64)):
            raise ValueError(f"it has {name} as {column.dtype}")
    rows = {name: table[one.row, :length] for name, table in columns.items()}
    rows = {name: c if c.dtype == np.int64 else c.astype(np.float64) for name, c in rows.items()}
    index = {"trial": np.full(length, one.row), "seed": np.full(length, one.meta["seed"]), "round": np.arange(length)}
    return Trace({**index, **rows}, one.meta["eval_every"], one.meta["diverged"])
