"""Readers of tables: CSV files with one client each, svmlight files, the four hospitals of UCI
heart disease."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import pairwise, tee
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer, one_of, unknown
from ..support.intake import (
    csv_rows,
    inside,
    is_file,
    is_folder,
    limits,
    lines,
    text_lines,
    user_path,
)
from .pool import Pool

Array: TypeAlias = np.ndarray[Any, Any]
PathLike: TypeAlias = str | os.PathLike[str]
Files: TypeAlias = PathLike | Mapping[str, PathLike] | Sequence[PathLike]
Record: TypeAlias = tuple[str, list[str]]  # where it is, for messages, and its cells

TASKS = ("auto", "regression")
MISSING = ("", "?", "NA", "nan")
"""What marks a gap in a CSV file."""
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
"""The columns of heart disease before num, the diagnosis."""
INT32 = 2**31 - 1
EXACT = 2**53  # float64 tells whole numbers apart up to here
FLOAT32 = float(np.finfo(np.float32).max)


def csv(
    paths: Sequence[Path],
    *,
    target: str = "",
    features: tuple[str, ...] = (),
    group: str = "",
    task: str = "auto",
) -> Pool:
    """CSV files; `target` is the column to predict, from `features` or all others.

    A client is a value of the column `group`, else a file. Targets that are names, or all whole
    numbers, are labels; with `task` regression numbers stay numbers.
    """
    regression = one_of("task", task, TASKS) == "regression"
    return csv_pool(paths, target, features or None, group=group, classes=0 if regression else None)


def csv_pool(
    files: Files,
    target: str,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    classes: int | None = None,
    group: str = "",
) -> Pool:
    """The rows of several CSV files, columns in the order of `features` or of the first file.

    A client is a value of the column `group`, else a file. Targets that are names, or all whole
    numbers, are labels, numbered from 0 in sorted order; with `classes` numbers are as written.
    """
    if not target or not isinstance(target, str):
        raise InputError(
            f"the column to predict must be named (--column NAME; in Python target=), got "
            f"{target!r}"
        )
    paths = _clients(files)
    tables = [read_csv(path, target, features, missing, group) for path in paths.values()]
    names = tables[0][0]
    x = np.concatenate(
        [
            _aligned(own, x, names, path)
            for (own, x, _), path in zip(tables, paths.values(), strict=True)
        ]
    )
    _some_value(x, names)
    y = _alike([y for *_, y in tables], list(paths.values()), target)
    if classes == 0 and _are_names(y):
        raise InputError(
            f"column {target!r} holds names such as {str(y[0])!r}, a regression needs numbers: "
            f"choose another",
            public=f"column {target!r}: holds names, a regression needs numbers",
        )
    as_written = classes is not None and not _are_names(y)
    label, notes = (torch.from_numpy(y.astype(np.float64)), ()) if as_written else _numbered(y)
    clients = np.repeat(np.array(list(paths), dtype=object), [len(y) for *_, y in tables])
    if group:
        named = [name for path in paths.values() for name in _column(path, target, group)]
        clients = np.array(named, dtype=object)
    return Pool(
        torch.from_numpy(x), label, group=clients, notes=notes, standardise=True, columns=names
    )


def read_csv(
    path: PathLike,
    target: str,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    group: str = "",
) -> tuple[tuple[str, ...], Array, Array]:
    """(feature names, x float64 [rows, features] with NaN for gaps, y [rows]) of a file with a
    header.

    y holds numbers (float64, or exact integers where float64 cannot tell them apart) or the names
    of classes, text.

    Without `features` they are all columns but the target and `group`. UTF-8; commas or semicolons
    between the cells.
    """
    marks = _texts("missing", missing)
    wanted = None if features is None else _texts("features", features)
    (where, header), records = _opened(Path(path), target)
    names = _chosen(
        [name for name in header if name != group] if group else header, target, wanted, where
    )
    places = {name: i for i, name in enumerate(header)}
    columns, cells = {name: places[name] for name in names}, Targets([], array("q"))
    x = _table(_noted(records, places[target], cells), columns, len(header), marks)
    if not len(x):
        raise InputError(f"{where}: a header without rows, need at least 1 row")
    return names, x, _target(Path(path), cells, target, marks)


def svmlight(paths: Sequence[Path], *, dim: int = 0) -> Pool:
    """Lines "label index:value ..." with indices from 1, plain or packed by gzip, bzip2 or xz,
    pooled in order.

    `dim` is the number of columns; 0 takes the largest index. Whole labels are numbered from 0 in
    sorted order.
    """
    most = integer("dim", dim, 0, limits().columns)
    parts = [_sparse(path, most) for path in paths]
    if not parts:
        raise InputError("svmlight needs at least 1 file, got 0")
    _same_labels(paths, parts)
    y = np.concatenate([part.y for part in parts])
    width = most or max(int(part.columns.max(initial=0)) for part in parts)
    if not width:
        raise InputError(f"{paths[0]}: has no feature in any row, need at least 1")
    limits().check("cells", len(y) * width, paths[0], f"numbers, {len(y)} rows of {width} features")
    x = np.zeros((len(y), width), np.float32)
    for part, rows in zip(
        parts, np.split(x, np.cumsum([len(part.y) for part in parts])[:-1]), strict=True
    ):
        rows[np.repeat(np.arange(len(rows)), part.sizes), part.columns - 1] = part.values
    label, notes = _numbered(y)
    return Pool(torch.from_numpy(x), label, notes=notes)


def heart(paths: Sequence[Path]) -> Pool:
    """UCI heart disease, processed.NAME.data of the four HOSPITALS; the label is whether num, the
    diagnosis, is > 0."""
    if len(paths) != len(HOSPITALS):
        raise InputError(
            f"heart needs {len(HOSPITALS)} files ({', '.join(HOSPITALS)}), got {len(paths)}"
        )
    tables = [_hospital(path) for path in paths]
    table = np.concatenate(tables)
    x, sick = torch.from_numpy(table[:, :-1].astype(np.float32)), torch.from_numpy(table[:, -1] > 0)
    group = np.repeat(np.array(HOSPITALS), [len(own) for own in tables])
    return Pool(x, sick.long(), group=group, standardise=True)


def listed(files: PathLike | Sequence[PathLike], suffix: str) -> list[Path]:
    """A file or several; a folder stands for the files with that suffix in it, in the order of
    their names."""
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, Iterable) or not all(
        isinstance(one, str | os.PathLike) for one in given
    ):
        raise InputError(f"files must be a path, a list of paths or a folder, got files={files!r}")
    paths: list[Path] = []
    for path in (user_path("files", one) for one in given):
        own = (
            [p for p in inside(path) if _wanted(p.name, suffix) and is_file(p)]
            if is_folder(path)
            else [path]
        )
        if not own:
            raise InputError(f"no file *{suffix} in the folder {path}: check its name")
        paths += own
    if not paths:
        raise InputError("there are no files, need at least 1: check the folder")
    return paths


def _wanted(name: str, suffix: str) -> bool:
    return name.lower().endswith(suffix) and not name.startswith(".")


def _clients(files: Files) -> dict[str, Path]:
    """Client names and their files, in the order given."""
    if isinstance(files, Mapping):
        names, paths = (
            [str(name) for name in files],
            [user_path("files", path) for path in files.values()],
        )
    else:
        paths = listed(files, ".csv")
        names = [path.stem for path in paths]
    for name, path in zip(names, paths, strict=True):
        if names.count(name) > 1:
            raise InputError(
                f"{path}: two clients would be called {name!r}: rename a file, or pass "
                f"{{name: path}}"
            )
    return dict(zip(names, map(Path, paths), strict=True))


def _texts(what: str, values: Iterable[str]) -> tuple[str, ...]:
    """Several texts, none twice."""
    listed = () if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if not listed or not all(isinstance(value, str) for value in listed):
        raise InputError(f"{what} must be a list of texts, got {values!r}")
    if len(set(listed)) < len(listed):
        raise InputError(f"{what} must name each once, got {list(listed)}")
    return listed


def _records(path: Path, text: Iterable[str], delimiter: str) -> Iterator[Record]:
    """The line where each record starts and its cells; empty lines are passed over.

    Where semicolons part the cells, a comma in a number is a decimal point.
    """
    for line, cells in csv_rows(path, text, delimiter):
        stripped = [cell.strip() for cell in cells]
        yield (
            f"{path}: line {line}",
            list(map(_pointed, stripped)) if delimiter == ";" else stripped,
        )


def _pointed(cell: str) -> str:
    return cell.replace(",", ".") if re.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?", cell) else cell


def _opened(path: Path, target: str) -> tuple[Record, Iterator[Record]]:
    """The header, and the records after it."""
    begin, rest = tee(text_lines(path))
    first = next((line for line in begin if line.strip()), "")
    del begin  # what it has seen would be kept
    records = _records(path, rest, _delimiter(first, target))
    header = next(records, None)
    if header is None:
        raise InputError(f"{path}: the file is empty, need a line with the names of the columns")
    return header, records


def _column(path: Path, target: str, name: str) -> list[str]:
    """The cells of one column, none empty; the table itself has been read already."""
    (where, header), records = _opened(path, target)
    if name not in header:
        raise InputError(f"{where}: {unknown('column', name, header)}")
    if header.count(name) != 1 or name == target:
        raise InputError(
            f"{where}: group must name one column other than the target, got group={name!r}"
        )
    cells = []
    for place, record in records:
        if not record[header.index(name)]:
            raise InputError(
                f"{place}: has no {name!r}, which names the client: fill it in, or remove the row"
            )
        cells.append(record[header.index(name)])
    return cells


def _delimiter(first: str, target: str) -> str:
    """Comma or semicolon: the one that shows the target in the first line, else the one that shows
    more columns."""
    names = {d: [name.strip(' "\r\n') for name in first.split(d)] for d in ",;"}
    return max(names, key=lambda d: (target in names[d], len(names[d])))


def _chosen(
    header: Sequence[str], target: str, wanted: Sequence[str] | None, where: str
) -> tuple[str, ...]:
    """The feature columns: those wanted, or all but the target."""
    names = tuple(name for name in header if name != target) if wanted is None else tuple(wanted)
    count = Counter(header)
    for name in (*names, target):
        if name not in count:
            raise InputError(f"{where}: {unknown('column', name, header)}")
        if not name:
            raise InputError(
                f"{where}: column {header.index(name) + 1} has no name: name it, or choose features"
            )
        if count[name] > 1:
            raise InputError(
                f"{where}: {count[name]} columns are called {name!r}, expected one: rename them"
            )
    if target in names or not names:
        raise InputError(
            f"{where}: need at least 1 feature column, and the target {target!r} not among them"
        )
    return names


def _table(
    records: Iterable[Record], columns: Mapping[str, int], width: int, marks: Collection[str]
) -> Array:
    """The named columns of all records as float64 [rows, columns], with NaN for gaps."""
    rows, most, left = array("d"), limits(), iter(records)
    for where, cells in left:
        if len(cells) != width:
            raise InputError(
                f"{where}: has {len(cells)} cells, expected {width}: one for each column",
                public=f"at least 1 row has {len(cells)} cells, expected {width}",
            )
        most.check("cells", len(rows) + len(columns), where, "numbers up to here")
        try:
            rows.extend(
                [np.nan if cells[i] in marks else _finite(cells[i]) for i in columns.values()]
            )
        except ValueError:
            name = next(name for name, i in columns.items() if not _fits(cells[i], marks))
            count = _count(left, columns[name], marks)
            raise _no_number(where, cells[columns[name]], name, marks, count) from None
    return np.frombuffer(rows).reshape(-1, len(columns))


class Targets(NamedTuple):
    """The cells of the column to predict."""

    cells: list[str]
    lines: array[int]  # where they stand


def _noted(records: Iterable[Record], i: int, targets: Targets) -> Iterator[Record]:
    """The records as they are; column i of each and its line are noted."""
    for where, record in records:
        targets.cells.append(record[i] if i < len(record) else "")
        targets.lines.append(int(where.rpartition(" ")[2]))
        yield where, record


def _target(path: Path, targets: Targets, name: str, marks: Collection[str]) -> Array:
    """Numbers, or the names of classes where not one of them is a number."""
    gaps = [i for i, cell in enumerate(targets.cells) if cell in marks]
    if gaps:
        raise InputError(
            f"{path}: line {targets.lines[gaps[0]]}: has no {name!r}, the target: fill it in, or "
            f"remove the row",
            public=f"column {name!r}, the target: {len(gaps)} rows have no value",
        )
    if not any(map(_is_number, targets.cells)):
        return np.array(targets.cells, dtype=object)
    wrong = [i for i, cell in enumerate(targets.cells) if not _is_number(cell)]
    if wrong:
        raise InputError(
            f"{path}: line {targets.lines[wrong[0]]}: has {targets.cells[wrong[0]]!r} in column "
            f"{name!r}, "
            "expected a number such as -1.5, as other rows have",
            public=f"column {name!r}, the target: {len(wrong)} cells are no numbers, {len(targets.cells)} rows are",
        )
    return _told_apart(np.array(list(map(float, targets.cells))), targets.cells)


def _told_apart(y: Array, cells: Sequence[str]) -> Array:
    """The numbers, or as exact integers the same where float64 would make two of them one."""
    if (y % 1).any() or not (np.abs(y) >= EXACT).any():
        return y
    exact = list(map(Decimal, cells))
    return (
        y
        if any(one != one.to_integral_value() for one in exact)
        else np.array(list(map(int, exact)), dtype=object)
    )


def _are_names(y: Array) -> bool:
    return isinstance(y[0], str)


def _is_number(cell: str) -> bool:
    try:
        _finite(cell)
    except ValueError:
        return False
    return True


def _fits(cell: str, marks: Collection[str]) -> bool:
    """Whether a cell is a number or a gap."""
    return cell in marks or _is_number(cell)


def _count(records: Iterable[Record], i: int, marks: Collection[str]) -> int:
    """In how many rows column i does not fit: one, and those that follow it."""
    return 1 + sum(i < len(cells) and not _fits(cells[i], marks) for _, cells in records)


def _no_number(where: str, cell: str, name: str, marks: Collection[str], count: int) -> InputError:
    """The cell is for whoever holds the table, its column and how many there are for others."""
    gaps = f", or a gap written as one of {', '.join(map(repr, marks))}"
    return InputError(
        f"{where}: has {cell!r} in column {name!r}, expected a number such as -1.5{gaps}",
        public=f"column {name!r}: {count} cells are neither numbers nor gaps",
    )


def _finite(text: str) -> float:
    """A number that float32 can hold, else ValueError."""
    value = float(text)
    if not -FLOAT32 <= value <= FLOAT32 or "_" in text:
        raise ValueError
    return value


def _aligned(own: Sequence[str], x: Array, names: Sequence[str], path: Path) -> Array:
    """The columns of a file in the order of the first file's."""
    places, first = {name: i for i, name in enumerate(own)}, set(names)
    for name in names:
        if name not in places:
            raise InputError(
                f"{path}: lacks the column {name!r}, which the first file has: add it, or choose "
                f"features"
            )
    for name in own:
        if name not in first:
            raise InputError(
                f"{path}: column {name!r} is not in the first file: remove it, or choose features"
            )
    return x[:, [places[name] for name in names]]


def _some_value(x: Array, names: Sequence[str]) -> None:
    empty = np.isnan(x).all(0)
    if empty.any():
        name = names[int(empty.argmax())]
        raise InputError(f"column {name!r} has no value in any file: remove it, or choose features")


def _alike(targets: Sequence[Array], paths: Sequence[Path], name: str) -> Array:
    """All targets, numbers or names everywhere."""
    for own, path in zip(targets, paths, strict=True):
        if _are_names(own) != _are_names(targets[0]):
            here, first = ("names" if _are_names(t) else "numbers" for t in (own, targets[0]))
            raise InputError(
                f"{path}: has {here} in column {name!r}, {paths[0]} has {first}: write all in one "
                f"way"
            )
    return np.concatenate(targets)


def _numbered(y: Array) -> tuple[Tensor, tuple[str, ...]]:
    """Names and whole numbers as labels 0, 1, ... in sorted order, with a note if that changes
    them."""
    if y.dtype.kind == "f" and (y % 1).any():
        return torch.from_numpy(y), ()
    values, label = np.unique(y, return_inverse=True)
    first, last = (f"{v:g}" if y.dtype.kind == "f" else str(v) for v in (values[0], values[-1]))
    note = f"labels {first} to {last} are numbered 0 to {len(values) - 1} in sorted order"
    same = y.dtype.kind == "f" and np.array_equal(values, np.arange(len(values)))
    return torch.from_numpy(label.astype(np.int64)), () if same else (note,)


class Sparse(NamedTuple):
    """The rows of one svmlight file."""

    y: Array  # [rows]
    sizes: Array  # [rows], entries of each row
    columns: Array  # [entries], from 1
    values: Array  # [entries]


def _sparse(path: Path, most: int) -> Sparse:
    y, sizes, columns, values = array("d"), array("i"), array("i"), array("f")
    bound = limits()
    for line, text in enumerate(lines(path), start=1):
        if text == b"\n":
            continue
        tokens = text.decode("latin-1").partition("#")[0].split()
        if tokens:
            label, index, value = _line(tokens, most or INT32, f"{path}: line {line}")
            if index and index[-1] > bound.columns:
                raise bound.beyond("columns", f"{path}: line {line}", f"has {index[-1]} columns")
            if len(columns) + len(index) > bound.cells:
                raise bound.beyond(
                    "cells",
                    f"{path}: line {line}",
                    f"has more than {bound.cells} numbers up to here",
                )
            y.append(label)
            sizes.append(len(index))
            columns.extend(index)
            values.extend(value)
    if not y:
        raise InputError(f"{path}: has no rows, need at least 1")
    return Sparse(_as_array(y), _as_array(sizes), _as_array(columns), _as_array(values))


def _as_array(numbers: array[Any]) -> Array:
    """The same memory."""
    return np.frombuffer(numbers, numbers.typecode) if numbers else np.zeros(0, numbers.typecode)


def _line(tokens: Sequence[str], most: int, where: str) -> tuple[float, list[int], list[float]]:
    """The label, the indices and the values of one row."""
    try:
        label = _finite(tokens[0])
    except ValueError:
        raise InputError(f"{where}: has {tokens[0]!r} as label, expected a number") from None
    entries = [_entry(token, where) for token in tokens[1:]]
    index = [i for i, _ in entries]
    for before, own in pairwise((0, *index)):
        if own <= before:
            raise InputError(
                f"{where}: has feature {own} after {before}, expected indices from 1 in rising "
                f"order"
            )
    if index and index[-1] > most:
        raise InputError(f"{where}: has feature {index[-1]}, expected at most dim={most}")
    if abs(label) >= EXACT:
        raise InputError(
            f"{where}: has a label of 2^53 or more, where labels run together: number them from 0"
        )
    return label, index, [value for _, value in entries]


def _entry(token: str, where: str) -> tuple[int, float]:
    index, _, value = token.partition(":")
    try:
        return int(index if index.isdecimal() else ""), _finite(value)
    except ValueError:
        rule = (
            "queries are not supported: remove them"
            if index == "qid"
            else "expected index:value as in 3:0.5"
        )
        raise InputError(f"{where}: has {token!r}, {rule}") from None


def _same_labels(paths: Sequence[Path], parts: Sequence[Sparse]) -> None:
    """Files that write two classes differently, such as -1/1 and 0/1, must not be pooled."""
    kinds = [set(part.y.tolist()) for part in parts]
    if max(map(len, kinds)) == 2 and len(set().union(*kinds)) > 2:
        written = ("/".join(f"{label:g}" for label in sorted(kind)) for kind in kinds)
        said = "; ".join(
            f"{path} has {labels}" for path, labels in zip(paths, written, strict=True)
        )
        raise InputError(f"two classes are written in different ways: {said}: number them alike")


def _hospital(path: Path) -> Array:
    columns = {name: i for i, name in enumerate((*FEATURES, "num"))}
    records = list(_records(path, text_lines(path), ","))
    table = _table(records, columns, len(columns), ("?",))
    if not len(table):
        raise InputError(f"{path}: the file is empty, need lines of {len(columns)} cells")
    for (where, cells), num in zip(records, table[:, -1], strict=True):
        if num not in range(5):
            raise InputError(
                f"{where}: has {cells[-1]!r} in column 'num', the diagnosis, expected 0, 1, 2, 3 "
                f"or 4"
            )
    return table
