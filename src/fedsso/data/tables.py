"""Readers of tables: CSV files with one client each, svmlight files, the four hospitals of UCI heart disease."""

from __future__ import annotations

import io
import os
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer, one_of, unknown
from ..intake import lines, read_text, user_path
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
LARGEST = 2**29  # numbers in x: 2 GiB
FLOAT32 = float(np.finfo(np.float32).max)


def csv(
    paths: Sequence[Path], *, target: str = "", features: tuple[str, ...] = (), group: str = "", task: str = "auto"
) -> Pool:
    """CSV files; `target` is the column to predict, from `features` or all others.

    A client is a value of the column `group`, else a file. Targets that are names, or all whole numbers, are
    labels; with `task` regression numbers stay numbers.
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

    A client is a value of the column `group`, else a file. Targets that are names, or all whole numbers, are labels,
    numbered from 0 in sorted order; with `classes` numbers are as written.
    """
    if not target or not isinstance(target, str):
        raise InputError(f"the column to predict must be named (--column NAME; in Python target=), got {target!r}")
    paths = _clients(files)
    tables = [read_csv(path, target, features, missing, group) for path in paths.values()]
    names = tables[0][0]
    x = np.concatenate(
        [_aligned(own, x, names, path) for (own, x, _), path in zip(tables, paths.values(), strict=True)]
    )
    _some_value(x, names)
    y = _alike([y for *_, y in tables], list(paths.values()), target)
    if classes == 0 and y.dtype.kind == "U":
        raise InputError(
            f"column {target!r} holds names such as {str(y[0])!r}, a regression needs numbers: choose another"
        )
    label, notes = _numbered(y) if classes is None or y.dtype.kind == "U" else (torch.from_numpy(y), ())
    clients = np.repeat(np.array(list(paths)), [len(y) for *_, y in tables])
    if group:
        clients = np.array([name for path in paths.values() for name in _column(path, target, group)])
    return Pool(torch.from_numpy(x), label, group=clients, notes=notes, standardise=True, columns=names)


def read_csv(
    path: PathLike,
    target: str,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    group: str = "",
) -> tuple[tuple[str, ...], Array, Array]:
    """(feature names, x float64 [rows, features] with NaN for gaps, y [rows]) of a file with a header.

    y holds numbers, float64, or the names of classes, text.

    Without `features` they are all columns but the target and `group`. UTF-8; commas or semicolons between the cells.
    """
    marks = _texts("missing", missing)
    wanted = None if features is None else _texts("features", features)
    (where, header), records = _opened(Path(path), target)
    names = _chosen([name for name in header if name != group] if group else header, target, wanted, where)
    places = {name: i for i, name in enumerate(header)}
    columns, cells = {name: places[name] for name in names}, list[tuple[str, str]]()
    x = _table(_noted(records, places[target], cells), columns, len(header), marks)
    if not len(x):
        raise InputError(f"{where}: a header without rows, need at least 1 row")
    return names, x, _target(cells, target, marks)


def svmlight(paths: Sequence[Path], *, dim: int = 0) -> Pool:
    """Lines "label index:value ..." with indices from 1, plain or packed by gzip, bzip2 or xz, pooled in order.

    `dim` is the number of columns; 0 takes the largest index. Whole labels are numbered from 0 in sorted order.
    """
    most = integer("dim", dim, 0, LARGEST)
    parts = [_sparse(path, most) for path in paths]
    if not parts:
        raise InputError("svmlight needs at least 1 file, got 0")
    _same_labels(paths, parts)
    y, sizes, columns, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    width = most or int(columns.max(initial=0))
    _worth_storing(len(y), width, paths)
    x = np.zeros((len(y), width), np.float32)
    x[np.repeat(np.arange(len(y)), sizes), columns - 1] = values
    label, notes = _numbered(y)
    return Pool(torch.from_numpy(x), label, notes=notes)


def heart(paths: Sequence[Path]) -> Pool:
    """UCI heart disease, processed.NAME.data of the four HOSPITALS; the label is whether num, the diagnosis, is > 0."""
    if len(paths) != len(HOSPITALS):
        raise InputError(f"heart needs {len(HOSPITALS)} files ({', '.join(HOSPITALS)}), got {len(paths)}")
    tables = [_hospital(path) for path in paths]
    table = np.concatenate(tables)
    x, sick = torch.from_numpy(table[:, :-1].astype(np.float32)), torch.from_numpy(table[:, -1] > 0)
    group = np.repeat(np.array(HOSPITALS), [len(own) for own in tables])
    return Pool(x, sick.long(), group=group, standardise=True)


def listed(files: PathLike | Sequence[PathLike], suffix: str) -> list[Path]:
    """A file or several; a folder stands for the files with that suffix in it, in the order of their names."""
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, Iterable) or not all(isinstance(one, str | os.PathLike) for one in given):
        raise InputError(f"files must be a path, a list of paths or a folder, got files={files!r}")
    paths: list[Path] = []
    for path in (user_path("files", one) for one in given):
        inside = sorted(p for p in path.glob("*") if p.is_file() and _wanted(p.name, suffix))
        if path.exists() and not path.is_dir() and not path.is_file():
            raise InputError(f"cannot read {path}: it is not a regular file; give the name of a file")
        if path.is_dir() and not inside:
            raise InputError(f"no file *{suffix} in the folder {path}: check its name")
        paths += inside if path.is_dir() else [path]
    if not paths:
        raise InputError("there are no files, need at least 1: check the folder")
    return paths


def _wanted(name: str, suffix: str) -> bool:
    return name.lower().endswith(suffix) and not name.startswith(".")


def _clients(files: Files) -> dict[str, Path]:
    """Client names and their files, in the order given."""
    if isinstance(files, Mapping):
        names, paths = [str(name) for name in files], [user_path("files", path) for path in files.values()]
    else:
        paths = listed(files, ".csv")
        names = [path.stem for path in paths]
    for name, path in zip(names, paths, strict=True):
        if names.count(name) > 1:
            raise InputError(f"{path}: two clients would be called {name!r}: rename a file, or pass {{name: path}}")
    return dict(zip(names, map(Path, paths), strict=True))


def _texts(what: str, values: Iterable[str]) -> tuple[str, ...]:
    """Several texts, none twice."""
    listed = () if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if not listed or not all(isinstance(value, str) for value in listed):
        raise InputError(f"{what} must be a list of texts, got {values!r}")
    if len(set(listed)) < len(listed):
        raise InputError(f"{what} must name each once, got {list(listed)}")
    return listed


def _records(path: Path, text: str, delimiter: str) -> Iterator[Record]:
    """The place where each record starts and its cells; empty lines are passed over.

    Where semicolons part the cells, a comma in a number is a decimal point.
    """
    reader = csv_reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                stripped = [cell.strip() for cell in cells]
                yield f"{path}: line {line}", list(map(_pointed, stripped)) if delimiter == ";" else stripped
            line = reader.line_num + 1
    except CsvError as error:
        raise InputError(f"{path}: line {line}: cannot be read as CSV ({error}): check the quotes") from None


def _pointed(cell: str) -> str:
    return cell.replace(",", ".") if re.fullmatch(r"[+-]?\d*,\d+([eE][+-]?\d+)?", cell) else cell


def _opened(path: Path, target: str) -> tuple[Record, Iterator[Record]]:
    """The header, and the records after it."""
    text = read_text(path)
    records = _records(path, text, _delimiter(text, target))
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
        raise InputError(f"{where}: group must name one column other than the target, got group={name!r}")
    cells = []
    for place, record in records:
        if not record[header.index(name)]:
            raise InputError(f"{place}: has no {name!r}, which names the client: fill it in, or remove the row")
        cells.append(record[header.index(name)])
    return cells


def _delimiter(text: str, target: str) -> str:
    """Comma or semicolon: the one that shows the target in the first line, else the one that shows more columns."""
    line = re.match(r"[^\r\n]*", text.lstrip())
    first = line[0] if line else ""
    names = {d: [name.strip(' "') for name in first.split(d)] for d in ",;"}
    return max(names, key=lambda d: (target in names[d], len(names[d])))


def _chosen(header: Sequence[str], target: str, wanted: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """The feature columns: those wanted, or all but the target."""
    names = tuple(name for name in header if name != target) if wanted is None else tuple(wanted)
    count = Counter(header)
    for name in (*names, target):
        if name not in count:
            raise InputError(f"{where}: {unknown('column', name, header)}")
        if not name:
            raise InputError(f"{where}: column {header.index(name) + 1} has no name: name it, or choose features")
        if count[name] > 1:
            raise InputError(f"{where}: {count[name]} columns are called {name!r}, expected one: rename them")
    if target in names or not names:
        raise InputError(f"{where}: need at least 1 feature column, and the target {target!r} not among them")
    return names


def _table(records: Iterable[Record], columns: Mapping[str, int], width: int, marks: Collection[str]) -> Array:
    """The named columns of all records as float64 [rows, columns], with NaN for gaps."""
    rows = array("d")
    for where, cells in records:
        if len(cells) != width:
            raise InputError(f"{where}: has {len(cells)} cells, expected {width}: one for each column")
        rows.extend(_number(cells[i], name, marks, where) for name, i in columns.items())
    return np.array(rows).reshape(-1, len(columns))


def _noted(records: Iterable[Record], i: int, cells: list[tuple[str, str]]) -> Iterator[Record]:
    """The records as they are; column i of each and where it stands are noted."""
    for where, record in records:
        cells.append((where, record[i] if i < len(record) else ""))
        yield where, record


def _target(cells: Sequence[tuple[str, str]], name: str, marks: Collection[str]) -> Array:
    """Numbers, or the names of classes where not one of them is a number."""
    for where, cell in cells:
        if cell in marks:
            raise InputError(f"{where}: has no {name!r}, the target: fill it in, or remove the row")
    if not any(_is_number(cell) for _, cell in cells):
        return np.array([cell for _, cell in cells])
    return np.array([_number(cell, name, (), where) for where, cell in cells])


def _is_number(cell: str) -> bool:
    try:
        _finite(cell)
    except ValueError:
        return False
    return True


def _number(cell: str, name: str, marks: Collection[str], where: str) -> float:
    if cell in marks:
        return np.nan
    try:
        return _finite(cell)
    except ValueError:
        gaps = f", or a gap written as one of {', '.join(map(repr, marks))}" if marks else ", as other rows have"
        rule = f"expected a number such as -1.5{gaps}"
        raise InputError(f"{where}: has {cell!r} in column {name!r}, {rule}") from None


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
            raise InputError(f"{path}: lacks the column {name!r}, which the first file has: add it, or choose features")
    for name in own:
        if name not in first:
            raise InputError(f"{path}: column {name!r} is not in the first file: remove it, or choose features")
    return x[:, [places[name] for name in names]]


def _some_value(x: Array, names: Sequence[str]) -> None:
    empty = np.isnan(x).all(0)
    if empty.any():
        name = names[int(empty.argmax())]
        raise InputError(f"column {name!r} has no value in any file: remove it, or choose features")


def _alike(targets: Sequence[Array], paths: Sequence[Path], name: str) -> Array:
    """All targets, numbers or names everywhere."""
    for own, path in zip(targets, paths, strict=True):
        if own.dtype.kind != targets[0].dtype.kind:
            kinds = {"f": "numbers", "U": "names"}
            here, first = (kinds[t.dtype.kind] for t in (own, targets[0]))
            raise InputError(f"{path}: has {here} in column {name!r}, {paths[0]} has {first}: write all in one way")
    return np.concatenate(targets)


def _numbered(y: Array) -> tuple[Tensor, tuple[str, ...]]:
    """Names and whole numbers as labels 0, 1, ... in sorted order, with a note if that changes them."""
    if y.dtype.kind == "f" and (y % 1).any():
        return torch.from_numpy(y), ()
    values, label = np.unique(y, return_inverse=True)
    first, last = (str(v) if y.dtype.kind == "U" else f"{v:g}" for v in (values[0], values[-1]))
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
    y, sizes, columns, values = array("d"), array("l"), array("l"), array("f")
    for line, text in enumerate(lines(path), start=1):
        tokens = text.decode("latin-1").partition("#")[0].split()
        if tokens:
            label, index, value = _line(tokens, most or LARGEST, f"{path}: line {line}")
            y.append(label)
            sizes.append(len(index))
            columns.extend(index)
            values.extend(value)
    if not y:
        raise InputError(f"{path}: has no rows, need at least 1")
    return Sparse(*map(np.array, (y, sizes, columns, values)))


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
            raise InputError(f"{where}: has feature {own} after {before}, expected indices from 1 in rising order")
    if index and index[-1] > most:
        raise InputError(f"{where}: has feature {index[-1]}, expected at most {most}")
    return label, index, [value for _, value in entries]


def _entry(token: str, where: str) -> tuple[int, float]:
    index, _, value = token.partition(":")
    try:
        return int(index if index.isdecimal() else ""), _finite(value)
    except ValueError:
        rule = "queries are not supported: remove them" if index == "qid" else "expected index:value as in 3:0.5"
        raise InputError(f"{where}: has {token!r}, {rule}") from None


def _same_labels(paths: Sequence[Path], parts: Sequence[Sparse]) -> None:
    """Files that write two classes differently, such as -1/1 and 0/1, must not be pooled."""
    kinds = [set(part.y.tolist()) for part in parts]
    if max(map(len, kinds)) == 2 and len(set().union(*kinds)) > 2:
        written = ("/".join(f"{label:g}" for label in sorted(kind)) for kind in kinds)
        said = "; ".join(f"{path} has {labels}" for path, labels in zip(paths, written, strict=True))
        raise InputError(f"two classes are written in different ways: {said}: number them alike")


def _worth_storing(rows: int, width: int, paths: Sequence[Path]) -> None:
    if not width:
        raise InputError(f"{paths[0]}: has no feature in any row, need at least 1")
    if rows * width > LARGEST:
        size = f"{rows} rows of {width} features"
        raise InputError(f"{paths[0]}: {size} are too many to hold in full (at most {LARGEST} numbers): keep fewer")


def _hospital(path: Path) -> Array:
    columns = {name: i for i, name in enumerate((*FEATURES, "num"))}
    records = list(_records(path, read_text(path), ","))
    table = _table(records, columns, len(columns), ("?",))
    if not len(table):
        raise InputError(f"{path}: the file is empty, need lines of {len(columns)} cells")
    for (where, cells), num in zip(records, table[:, -1], strict=True):
        if num not in range(5):
            raise InputError(f"{where}: has {cells[-1]!r} in column 'num', the diagnosis, expected 0, 1, 2, 3 or 4")
    return table
