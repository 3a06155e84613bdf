"""The traces of hundreds of trials in a few files.

A part is a chunk of trials that ran batched: the columns of their traces [trials, rounds + 1] and,
as JSON, the settings of every trial. It is written whole or not at all, by whichever process ran
it; a trial is found again by the identity of its run, whatever part it is in. So a killed sweep
goes on after its last finished part, and sweeps that share runs share their work.
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
from .run import Run
from .spec import Spec
from .trace import INTEGERS, Trace

log = logging.getLogger("fedsso")

PARTS = "parts"  # folder of the traces below that of the sweep
TRIALS = "trials.csv"  # list of a finished sweep's trials
SETTINGS = "sweep.toml"  # settings with which `fedsso sweep --config` repeats it
DIGITS = 16  # of a trial's identity in the list
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
    """Write the settings and traces of a chunk.

    The file's name has the algorithm and a digest of the trials in it, so that the same chunk is
    always the same file. It is sealed in the comment of the archive.

    Args:
        folder: The folder of the parts.
        runs: The trials of the chunk, with their traces.
    """
    meta = [_describe(run) for run in runs]
    identities = "".join(one["identity"] for one in meta)
    digest = sha256(identities.encode()).hexdigest()[:12]
    traces = [run.trace for run in runs]
    names: dict[str, None] = {}
    for trace in traces:
        names |= dict.fromkeys(name for name in trace.columns if name not in INDEX)
    columns = {name: _table(name, traces) for name in names}
    text = np.frombuffer(json.dumps(meta, default=str).encode(), np.uint8)
    buffer = BytesIO()
    np.savez_compressed(buffer, meta=text, **columns)
    with ZipFile(buffer, "a") as archive:
        archive.comment = BLANK.encode()
    write_atomic(folder / f"{runs[0].spec.algorithm}-{digest}{PART}", seal(buffer.getvalue()))


def _describe(run: Run) -> dict[str, Any]:
    """What is told of a trial; its settings are in the form of spec.toml."""
    trace = run.trace
    return {
        "version": __version__,
        "identity": run.spec.identity,
        "spec": run.spec.to_toml(),
        "judged_by": run.judged_by,
        "rounds": len(trace),
        "eval_every": trace.eval_every,
        "diverged": trace.diverged,
    }


def _table(name: str, traces: Sequence[Trace]) -> Any:
    """One column of all trials; a trial that ended early is filled up with zeros.

    Returns:
        [trials, rows of the longest trace]. Zeros compress well; "rounds" tells how many count.
    """
    kind = np.int64 if name in INTEGERS else np.float64 if _exact(name) else np.float32
    table = np.zeros((len(traces), max(map(len, traces))), kind)
    with np.errstate(over="ignore"):  # what single precision cannot hold is infinite
        for row, trace in zip(table, traces, strict=True):
            row[: len(trace)] = trace[name] if name in trace.columns else np.nan
    return table


def _exact(name: str) -> bool:
    """Whether a column is kept in double precision: metrics may be compared with a target.

    A target that a metric just reaches would be missed after rounding. Losses have no target; they
    are kept in single precision, as everything else is.
    """
    return name.startswith("test_") and name != "test_loss"


def put_aside_damaged(folder: Path) -> None:
    """Rename parts that are not whole, so that their trials are run again.

    Other sweeps may do the same at the same time. Should one of them put aside what another has
    just run again, it is run once more.

    Raises:
        InputError: A damaged file has a name that fedsso does not give; it is left alone.
    """
    for path in _parts(folder):
        try:
            _read_part(path)
        except Damaged as damage:
            if not OURS.fullmatch(path.name):
                raise InputError(
                    f"{damage}; move it out of this folder, or choose another one"
                ) from damage
            aside = path.with_name(f"{path.name}.damaged")
            try:
                os.replace(path, aside)
            except FileNotFoundError:  # another process was faster
                continue
            log.warning("%s; its trials are run again, and it is kept as %s", damage, aside.name)


def _parts(folder: Path) -> list[Path]:
    """The files of parts, in the order of their names."""
    return sorted(path for path in folder.glob(f"*{PART}") if path.is_file())


def held(folder: Path, known: set[Path] | None = None) -> dict[str, Held]:
    """The trials that a folder holds, by identity.

    Those of another version of the package do not count: its numbers may differ, so they are run
    again.

    Args:
        folder: The folder of the parts.
        known: Parts that are not read, to which those that are read now are added. So whoever
            waits for the parts of others reads each of them once.
    """
    found: dict[str, Held] = {}
    read_before = known if known is not None else set()
    for path in _parts(folder):
        if path in read_before:
            continue
        read_before.add(path)
        # The columns are not unpacked: only the list of trials is asked for.
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
    """What a part tells of its trials, and its columns, all or those named.

    Raises:
        Damaged: The seal is broken, or something is missing, or of the wrong type or shape.
    """
    data = read_bytes(path)
    sealed = check(data)
    if sealed is False:
        raise Damaged(f"{path} is damaged: its checksum does not match its content")
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
    """What is told of a trial, each of its type.

    Parts of earlier versions lack some keys, which get their defaults.
    """
    whole = {"version": __version__, "spec": None, "judged_by": "test", **meta}
    texts = [whole["identity"], whole["version"], whole["judged_by"]]
    counts = [whole["rounds"], whole["eval_every"]]
    good = all(isinstance(text, str) for text in texts)
    good = good and all(type(count) is int and count > 0 for count in counts)
    good = good and isinstance(whole["spec"], dict | None)
    good = good and isinstance(whole["diverged"], int | None)
    if not good:
        raise ValueError("a trial is described wrongly")
    return whole


def _check_table(name: str, table: NDArray[Any], meta: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a column that does not fit the trials, or has another type than ours."""
    longest = max((one["rounds"] for one in meta), default=0)
    if table.ndim != 2 or len(table) != len(meta) or table.shape[1] < longest:
        raise ValueError(
            f"{name} has the shape {table.shape} for {len(meta)} trials of {longest} rows"
        )
    if table.dtype not in ((np.int64,) if name in INTEGERS else (np.float32, np.float64)):
        raise ValueError(f"it has {name} as {table.dtype}")


def read(wanted: Sequence[Held], specs: Sequence[Spec]) -> list[Run]:
    """Some trials as runs without models. Each file is read once.

    Args:
        wanted: Where the trials lie.
        specs: Their settings, in the same order. They decide the numbers of the trials, which may
            be others than when the part was written.
    """
    columns = {path: _read_part(path)[1] for path in {one.path for one in wanted}}
    found = []
    for one, spec in zip(wanted, specs, strict=True):
        trace = _trace(one, spec, columns[one.path])
        found.append(Run(spec, trace, judged_by=one.meta["judged_by"]))
    return found


def read_all(folder: Path) -> list[Run]:
    """All trials that a folder holds, as runs without models."""
    there = list(held(folder).values())
    return read(there, [spec_of(one) for one in there])


def spec_of(one: Held) -> Spec:
    """The settings of a trial, as its part tells them.

    Raises:
        InputError: An earlier version wrote the part without settings.
        Damaged: The settings are not those of the trial's identity.
    """
    if one.meta["spec"] is None:
        raise InputError(
            f"{one.path} was written by an earlier version, which did not keep the settings of its "
            f"trials; run the same sweep again: it adds them without training again"
        )
    try:
        spec = Spec.from_toml(one.meta["spec"])
    except InputError as error:
        raise InputError(f"{one.path}: {error}") from error
    if spec.identity != one.meta["identity"]:
        raise Damaged(f"{one.path} is damaged: a trial's settings are not those that it ran with")
    return spec


def add_settings(folder: Path, runs: Sequence[Run]) -> None:
    """Write the settings of trials into parts of an earlier version, which lack them.

    Args:
        folder: The folder of the parts.
        runs: Trials whose settings are known. A part is completed if all of its trials are here.
    """
    there = held(folder)
    known = {run.spec.identity: run for run in runs}
    for path in {one.path for one in there.values() if one.meta["spec"] is None}:
        trials = [one for one in there.values() if one.path == path]
        if all(one.meta["identity"] in known for one in trials):
            save_part(folder, [known[one.meta["identity"]] for one in trials])


def _trace(one: Held, spec: Spec, columns: Columns) -> Trace:
    """The trace of one trial, cut to its own length, with the columns that every trial shares."""
    length = int(one.meta["rounds"])
    rows: dict[str, NDArray[Any]] = {
        "trial": np.full(length, spec.trial),
        "seed": np.full(length, spec.seed),
        "round": np.arange(length),
    }
    for name, table in columns.items():
        column = table[one.row, :length]
        rows[name] = column if column.dtype == np.int64 else column.astype(np.float64)
    try:
        return Trace(rows, one.meta["eval_every"], one.meta["diverged"])
    except InputError as error:
        raise Damaged(
            f"{one.path} is damaged: it is not a whole part of a sweep ({error})"
        ) from error
