"""The traces of hundreds of trials in a few files.

A part is a chunk of trials that ran batched: the columns of their traces [trials, rounds + 1] and,
as JSON, what each trial is. It is written whole or not at all, by whichever process ran it; a trial
is found again by the identity of its run, whatever part it is in. So a killed sweep goes on after
its last finished part, and sweeps that share runs share their work.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..support.files import write_atomic
from ..support.intake import Damaged, parse_npz, read_bytes
from ..support.seal import BLANK, check, seal
from ..version import __version__
from .results import Run
from .trace import INTEGERS, Trace

log = logging.getLogger("fedsso")

EXACT = ("test_accuracy",)  # compared with targets: kept in double precision, the rest in single
PART = ".npz"
OURS = re.compile(r".+-[0-9a-f]{12}\.npz")  # names that `save_part` gives
INDEX = ("trial", "seed", "round")
DAMAGED = (BadZipFile, ValueError, LookupError, TypeError, RecursionError)
Columns = Mapping[str, NDArray[Any]]


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
    with ZipFile(buffer, "a") as archive:
        archive.comment = BLANK.encode()
    digest = sha256("".join(m["identity"] for m in meta).encode()).hexdigest()[:12]
    write_atomic(folder / f"{runs[0].spec.algorithm}-{digest}{PART}", seal(buffer.getvalue()))


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


def put_aside_damaged(folder: Path) -> None:
    """Rename parts that are not whole, so that their trials are run again; only for who holds the
    folder's lock."""
    for path in _parts(folder):
        try:
            _read_part(path)
        except Damaged as damage:
            if not OURS.fullmatch(path.name):
                raise InputError(
                    f"{damage}; move it out of this folder, or choose another one"
                ) from damage
            aside = path.with_name(f"{path.name}.damaged")
            os.replace(path, aside)
            log.warning("%s; its trials are run again, and it is kept as %s", damage, aside.name)


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{PART}") if path.is_file())


def held(folder: Path) -> dict[str, Held]:
    """The trials that a folder holds, by identity; those of another version of the package do not
    count."""
    found: dict[str, Held] = {}
    for path in _parts(folder):
        meta, _ = _read_part(path, ["meta"])
        if any(m["version"] != __version__ for m in meta):
            log.warning(
                "%s was made by fedsso %s, this is %s: it is run again",
                path,
                meta[0]["version"],
                __version__,
            )
            continue
        found.update({m["identity"]: Held(path, i, m) for i, m in enumerate(meta)})
    return found


def _read_part(
    path: Path, names: Sequence[str] | None = None
) -> tuple[list[dict[str, Any]], Columns]:
    """What a part tells of its trials, and its columns, all or those named."""
    data = read_bytes(path)
    sealed = check(data)
    if sealed is False:
        raise Damaged(f"{path} is damaged: its checksum is not that of its content")
    try:
        if (
            sealed is None and ZipFile(BytesIO(data)).comment
        ):  # earlier versions wrote neither seal nor comment
            raise ValueError("its seal is broken")
        columns = parse_npz(data, path, names)
        meta = [_checked(one) for one in json.loads(columns.pop("meta").tobytes())]
        for name, table in columns.items():
            _check_table(name, table, meta)
    except DAMAGED as error:
        raise Damaged(f"{path} is damaged: it is not a whole part of a sweep ({error})") from error
    return meta, columns


def _checked(meta: Any) -> dict[str, Any]:
    """What is told of a trial, each of its type."""
    whole = {"version": __version__, **meta}
    counts = [whole[key] for key in ("seed", "rounds", "eval_every")]
    texts = [whole[key] for key in ("identity", "label", "version")]
    good = all(type(count) is int for count in counts) and all(
        isinstance(text, str) for text in texts
    )
    if not (
        good
        and whole["rounds"] > 0
        and whole["eval_every"] > 0
        and isinstance(whole["diverged"], int | None)
    ):
        raise ValueError("a trial is described wrongly")
    return whole


def _check_table(name: str, table: NDArray[Any], meta: Sequence[Mapping[str, Any]]) -> None:
    longest = max((one["rounds"] for one in meta), default=0)
    if table.ndim != 2 or len(table) != len(meta) or table.shape[1] < longest:
        raise ValueError(
            f"{name} has the shape {table.shape} for {len(meta)} trials of {longest} rows"
        )
    if table.dtype not in ((np.int64,) if name in INTEGERS else (np.float32, np.float64)):
        raise ValueError(f"it has {name} as {table.dtype}")


def read(wanted: Sequence[Held]) -> list[Trace]:
    """The traces of some trials; each file is read once."""
    columns = {path: _read_part(path)[1] for path in {one.path for one in wanted}}
    return [_trace(one, columns[one.path]) for one in wanted]


def _trace(one: Held, columns: Columns) -> Trace:
    length = int(one.meta["rounds"])
    rows = {name: table[one.row, :length] for name, table in columns.items()}
    rows = {name: c if c.dtype == np.int64 else c.astype(np.float64) for name, c in rows.items()}
    index = {
        "trial": np.full(length, one.row),
        "seed": np.full(length, one.meta["seed"]),
        "round": np.arange(length),
    }
    try:
        return Trace({**index, **rows}, one.meta["eval_every"], one.meta["diverged"])
    except InputError as error:
        raise Damaged(
            f"{one.path} is damaged: it is not a whole part of a sweep ({error})"
        ) from error
