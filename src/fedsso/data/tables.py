"""Readers of CSV tables: a user's own files, and the four hospitals of UCI heart disease.

A CSV file begins with a line that names its columns. One column is the target, the others are
features, which must be numbers unless a schema says what they mean (`schema_tables`). Commas,
semicolons or tabs separate the cells:

    age,dose,ill
    50,1.5,yes
    60,?,no

By default a file is a client. Errors name the file, the line and the column. They have a second
text, `public`, that quotes no cell: a client in a network may show it to the server.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, unknown
from ..support.intake import (
    composed,
    inside,
    is_folder,
    limits,
    text_lines,
    user_path,
)
from ..support.records import Record as Row
from ..support.records import open_table, read_records
from .options import FEATURES as FEATURES_OPTION
from .options import GROUP, OUTCOME, TASK
from .pool import Pool

if TYPE_CHECKING:
    from ..regression.schema import Schema

Array: TypeAlias = np.ndarray[Any, Any]
PathLike: TypeAlias = str | os.PathLike[str]
Files: TypeAlias = PathLike | Mapping[str, PathLike] | Sequence[PathLike]
Names: TypeAlias = tuple[str, ...]
SchemaLike: TypeAlias = "Schema | PathLike"
"""A schema, its file, or its text."""
Record: TypeAlias = tuple[str, list[str]]
"""A record of a file: where it is, for messages ("a.csv: line 3"), and its cells."""

MISSING = ("", "?", "NA", "nan")
"""The texts that mark a gap in a CSV file, unless a user names others."""
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
"""The hospitals of UCI heart disease. Their files are called processed.NAME.data."""
FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
"""The columns of heart disease before the last one, num, which is the diagnosis."""
EXACT = 2**53
"""Up to here, float64 can tell whole numbers apart."""
FLOAT32 = float(np.finfo(np.float32).max)
"""The largest number of float32."""


# ---- a user's own files ----


def csv(
    paths: Sequence[Path],
    *,
    outcome: str = OUTCOME.default,
    schema: SchemaLike | None = None,
    features: Names = FEATURES_OPTION.default,
    group: str = GROUP.default,
    task: str = TASK.default,
) -> Pool:
    """Read CSV files for the data set "csv".

    Args:
        paths: The files. Their columns must be the same, in any order.
        outcome: The name of the column to predict.
        schema: What the columns mean. None: all but the outcome are numbers.
        features: The names of the columns to learn from. Empty: all others.
        group: The name of the column that says which client a row belongs to. Empty: a file is a
            client.
        task: "auto" takes names and whole numbers as labels. "regression" takes numbers as they
            are.

    Returns:
        The rows of all files, to be standardised. See `csv_pool` and `schema_pool`.
    """
    is_regression = TASK.check(task) == "regression"
    classes = 0 if is_regression else None
    if schema is None:
        return csv_pool(paths, outcome, features or None, group=group, classes=classes)
    from .schema_tables import schema_pool

    _check_unused(features=features)
    return schema_pool(paths, schema, outcome, group, classes)


def own_pool(
    files: Files,
    outcome: str,
    schema: SchemaLike | None,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    classes: int | None = None,
    group: str = "",
) -> Pool:
    """Read tables with or without a schema. See `csv_pool` and `schema_pool` for the arguments."""
    if schema is None:
        return csv_pool(files, outcome, features, missing, classes, group)
    from .schema_tables import schema_pool

    _check_unused(features=features, missing=() if missing == MISSING else missing)
    return schema_pool(files, schema, outcome, group, classes)


def _check_unused(**options: object) -> None:
    """Raise InputError for options that a schema stands for."""
    for name, value in options.items():
        if value:
            raise InputError(
                f"{name} is for tables without a schema, got {name}={value!r}: write it into the "
                f"schema"
            )


def csv_pool(
    files: Files,
    target: str,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    classes: int | None = None,
    group: str = "",
) -> Pool:
    """Read several CSV files into one pool of rows.

    Args:
        files: A folder, a list of paths, or a dictionary {client's name: path}.
        target: The name of the column to predict.
        features: The names of the columns to learn from, in the order that x shall have. None
            takes all others, in the order of the first file.
        missing: The texts that mark a gap.
        classes: None numbers names and whole numbers from 0 in sorted order, as labels. Otherwise
            numbers are taken as they are written: 0 means that they are real targets, n that they
            are labels from 0 to n - 1.
        group: The name of the column that says which client a row belongs to. Empty: a file is a
            client.

    Returns:
        The rows of all files, one file after the other. The group of a row is its client's name.
        Gaps are NaN, to be filled when the training rows are known.

    Raises:
        InputError: A file cannot be read, or the files do not fit together.
    """
    if not target or not isinstance(target, str):
        raise InputError(
            f"the column to predict must be named (--outcome NAME; in Python outcome=), got "
            f"{target!r}"
        )
    target = composed(target)
    group = composed(group)
    clients = clients_of(files)
    paths = list(clients.values())
    tables = [read_csv(path, target, features, missing, group) for path in paths]
    names = tables[0][0]
    samples = []
    targets = []
    for path, (own_names, own_x, own_y) in zip(paths, tables, strict=True):
        samples.append(_aligned(own_names, own_x, names, path))
        targets.append(own_y)
    x = np.concatenate(samples)
    _check_not_empty(x, names)
    y = joined(targets, paths, target)
    label, notes = labels_of(y, target, classes)
    if group:
        owners = _groups(paths, target, group)
    else:
        sizes = [len(own) for own in targets]
        owners = np.repeat(np.array(list(clients), dtype=object), sizes)
    return Pool(
        torch.from_numpy(x),
        label,
        group=owners,
        class_names=class_names_of(y, label),
        notes=notes,
        standardise=True,
        columns=names,
    )


def read_csv(
    path: PathLike,
    target: str,
    features: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    group: str = "",
) -> tuple[Names, Array, Array]:
    """Read one CSV file in UTF-8. Returns (feature names, x, y).

    Args:
        path: The file, which may be packed.
        target: The name of the column to predict.
        features: The names of the columns to learn from. None: all but the target and `group`.
        missing: The texts that mark a gap. A target must not be a gap.
        group: The name of the column that says which client a row belongs to, if there is one.

    Returns:
        The names of the features, x and y. x is float64 [rows, features], with NaN for gaps. y
        [rows] holds numbers or text: float64, exact integers where float64 cannot tell them apart,
        or the names of classes.

    Raises:
        InputError: A column is missing or there twice, a cell is no number, or there is no row. The
            message names the file, the line and the column.
    """
    marks = _texts("missing", missing)
    wanted = None if features is None else _texts("features", features)
    (where, header), records = _opened(Path(path), target)
    candidates = header
    if group:
        candidates = [name for name in header if name != group]
    names = _chosen(candidates, target, wanted, where)
    place_of = {name: place for place, name in enumerate(header)}
    columns = {name: place_of[name] for name in names}
    targets = Targets([], array("q"))
    noted = _noted(records, place_of[target], targets)
    x = _table(noted, columns, len(header), marks)
    if not len(x):
        raise InputError(f"{where}: a header without rows, need at least 1 row")
    return names, x, checked_targets(Path(path), targets, target, marks)


# ---- which files, which clients ----


def listed(files: PathLike | Sequence[PathLike], suffix: str) -> list[Path]:
    """Turn what a user gave as files into a list of paths: a path, a list of paths or a folder.

    A folder stands for all in it that has the suffix, in the order of the names, also for what is
    no file: who reads it says so. Hidden files do not count.
    """
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, Iterable) or not _are_paths(given):
        raise InputError(f"files must be a path, a list of paths or a folder, got files={files!r}")
    paths: list[Path] = []
    for one in given:
        path = user_path("files", one)
        if path.name.lower().endswith(suffix) or not is_folder(path):
            paths.append(path)
            continue
        found = [one for one in inside(path) if one.name.lower().endswith(suffix)]
        found = [one for one in found if not one.name.startswith(".")]
        if not found:
            raise InputError(f"no file *{suffix} in the folder {path}: check its name")
        paths += found
    if not paths:
        raise InputError("there are no files, need at least 1: check the folder")
    return paths


def _are_paths(values: Iterable[object]) -> bool:
    """Whether all values are text or paths."""
    return all(isinstance(one, str | os.PathLike) for one in values)


def clients_of(files: Files) -> dict[str, Path]:
    """The file of each client, by the client's name, in the order given.

    Without names, a client is called as its file is, without the suffix.
    """
    if isinstance(files, Mapping):
        names = [str(name) for name in files]
        paths = [user_path("files", path) for path in files.values()]
    else:
        paths = listed(files, ".csv")
        names = [path.stem for path in paths]
    clients: dict[str, Path] = {}
    for name, path in zip(names, paths, strict=True):
        if names.count(name) > 1:
            raise InputError(
                f"{path}: two files would be called {name!r}: rename one, or pass {{name: path}}"
            )
        clients[name] = path
    return clients


def _groups(paths: Sequence[Path], target: str, group: str) -> Array:
    """The client of each row of all files, as the column `group` names it, [rows]."""
    names: list[str] = []
    for path in paths:
        names += _column(path, target, group)
    return np.array(names, dtype=object)


def _column(path: Path, target: str, name: str) -> list[str]:
    """The cells of one column as text. None may be empty. The table itself was read before.

    The file is read a second time, because `read_csv` keeps numbers alone.
    """
    (where, header), records = _opened(path, target)
    if name not in header:
        raise InputError(f"{where}: {unknown('column', name, header)}")
    if header.count(name) != 1 or name == target:
        raise InputError(
            f"{where}: group must name one column other than the target, got group={name!r}"
        )
    place = header.index(name)
    cells = []
    for line, record in records:
        cell = record[place]
        if not cell:
            raise InputError(
                f"{line}: has no {name!r}, which names the client: fill it in, or remove the row"
            )
        cells.append(cell)
    return cells


# ---- the lines of a file ----


def _opened(path: Path, target: str) -> tuple[Record, Iterator[Record]]:
    """Open a file. Returns its header, and its records as an iterator."""
    header, rows = open_table(path, target)
    placed = _placed(path, rows)
    return (f"{path}: line {header.line}", header.cells), placed


def _placed(path: Path, rows: Iterable[Row]) -> Iterator[Record]:
    """The rows of a file with where they are, for messages."""
    for line, cells in rows:
        yield f"{path}: line {line}", cells


def _chosen(
    header: Sequence[str],
    target: str,
    wanted: Sequence[str] | None,
    where: str,
) -> Names:
    """The names of the feature columns: those wanted, or all but the target.

    Args:
        header: The names of all columns.
        target: The name of the column to predict.
        wanted: The names that the user gave. None: all but the target.
        where: The beginning of an error message.

    Raises:
        InputError: A name occurs in the header twice or not at all, a column has no name, or there
            is no feature.
    """
    names = wanted
    if names is None:
        names = [name for name in header if name != target]
    count = Counter(header)
    for name in (*names, target):
        if name not in count:
            raise InputError(f"{where}: {unknown('column', name, header)}")
        if not name:
            number = header.index(name) + 1
            raise InputError(f"{where}: column {number} has no name: name it, or choose features")
        if count[name] > 1:
            raise InputError(
                f"{where}: {count[name]} columns are called {name!r}, expected one: rename them"
            )
    if target in names or not names:
        raise InputError(
            f"{where}: need at least 1 feature column, and the target {target!r} not among them"
        )
    return tuple(names)


def _texts(what: str, values: Iterable[str]) -> Names:
    """Several texts, none of them twice. A single text is not a list of texts.

    `what` is the name of the option, for the error. Python would take "NA" as a list of two
    letters.
    """
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    texts = tuple(values) if is_list else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{what} must be a list of texts, got {values!r}")
    texts = tuple(map(composed, texts))
    if len(set(texts)) < len(texts):
        raise InputError(f"{what} must name each once, got {list(texts)}")
    return texts


# ---- numbers ----


def finite(text: str) -> float:
    """Turn text into a number that float32 can hold. Raises ValueError for anything else.

    Python would also take 1_000 as a number, but a table that says so is more likely wrong.
    """
    value = float(text)
    if not -FLOAT32 <= value <= FLOAT32 or "_" in text:
        raise ValueError
    return value


def _is_number(cell: str) -> bool:
    """Whether a cell is a number that float32 can hold."""
    try:
        finite(cell)
    except ValueError:
        return False
    return True


def _fits(cell: str, marks: Collection[str]) -> bool:
    """Whether a cell is a number or a gap."""
    return cell in marks or _is_number(cell)


def _table(
    records: Iterable[Record],
    columns: Mapping[str, int],
    width: int,
    marks: Collection[str],
) -> Array:
    """Read some columns of all records as float64 [rows, columns], with NaN for gaps.

    Args:
        records: The records of a file.
        columns: The place of each wanted column in a record, by the column's name.
        width: How many cells a record must have.
        marks: The texts of a gap.

    Raises:
        InputError: A record has another number of cells, or a cell is neither a number nor a gap.
    """
    # Plain numbers take eight bytes each. A list of Python's floats takes four times as much.
    numbers = array("d")
    bound = limits()
    # After a wrong cell the rest of the records is still there to be counted.
    left = iter(records)
    for where, cells in left:
        if len(cells) != width:
            raise InputError(
                f"{where}: has {len(cells)} cells, expected {width}: one for each column",
                public=f"at least 1 row has {len(cells)} cells, expected {width}",
            )
        bound.check("cells", len(numbers) + len(columns), where, "numbers up to here")
        for name, place in columns.items():
            cell = cells[place]
            try:
                number = np.nan if cell in marks else finite(cell)
            except ValueError:
                count = 1 + _count_misfits(left, place, marks)
                raise _not_a_number(where, cell, name, marks, count) from None
            numbers.append(number)
    return np.frombuffer(numbers).reshape(-1, len(columns))


def _count_misfits(records: Iterable[Record], place: int, marks: Collection[str]) -> int:
    """How many of the remaining records have neither a number nor a gap in a column.

    The count goes into the public text of the error, which must not quote a cell.
    """
    count = 0
    for _, cells in records:
        if place < len(cells) and not _fits(cells[place], marks):
            count += 1
    return count


def _not_a_number(
    where: str,
    cell: str,
    name: str,
    marks: Collection[str],
    count: int,
) -> InputError:
    """The error for a cell that is neither a number nor a gap.

    The message quotes the cell, for whoever holds the table. Others learn only the column, and how
    many such cells there are.
    """
    gaps = ", ".join(map(repr, marks))
    return InputError(
        f"{where}: has {cell!r} in column {name!r}, expected a number such as -1.5, or a "
        f"missing value written as one of {gaps}",
        public=f"column {name!r}: {count} cells are neither numbers nor missing values",
    )


def _aligned(
    own: Sequence[str],
    x: Array,
    names: Sequence[str],
    path: Path,
) -> Array:
    """The columns of a file in the order of the first file's columns, which are `names`.

    Args:
        own: The names of this file's columns.
        x: Its table, [rows, columns].
        names: The names of the first file's columns.
        path: The file, for errors.

    Raises:
        InputError: The file lacks a column, or has one that the first file does not have.
    """
    place_of = {name: place for place, name in enumerate(own)}
    for name in names:
        if name not in place_of:
            raise InputError(
                f"{path}: lacks the column {name!r}, which the first file has: add it, or choose "
                f"features"
            )
    known = set(names)
    for name in own:
        if name not in known:
            raise InputError(
                f"{path}: column {name!r} is not in the first file: remove it, or choose features"
            )
    places = [place_of[name] for name in names]
    return x[:, places]


def _check_not_empty(x: Array, names: Sequence[str]) -> None:
    """Raise InputError for a column that has no value at all."""
    empty = np.isnan(x).all(0)
    if empty.any():
        name = names[int(empty.argmax())]
        raise InputError(f"column {name!r} has no value in any file: remove it, or choose features")


# ---- targets ----


class Targets(NamedTuple):
    """The cells of the column to predict, and the numbers of the lines they stand in."""

    cells: list[str]
    lines: array[int]


def _noted(records: Iterable[Record], place: int, targets: Targets) -> Iterator[Record]:
    """Pass the records on, and note the target of each one on the way.

    So a file is read once, although its targets are looked at after its features.
    """
    for where, record in records:
        cell = record[place] if place < len(record) else ""
        line = int(where.rpartition(" ")[2])
        targets.cells.append(cell)
        targets.lines.append(line)
        yield where, record


def checked_targets(
    path: Path,
    targets: Targets,
    name: str,
    marks: Collection[str],
) -> Array:
    """The targets as numbers, or as the names of classes if not one of them is a number.

    Args:
        path: The file, for errors.
        targets: The cells, and their lines.
        name: The name of the column.
        marks: The texts of a gap.

    Raises:
        InputError: There is a gap, or a name among numbers. The message names the line; `public`
            tells only how many such cells there are.
    """
    cells = targets.cells
    gaps = [row for row, cell in enumerate(cells) if cell in marks]
    if gaps:
        line = targets.lines[gaps[0]]
        raise InputError(
            f"{path}: line {line}: has no {name!r}, the target: fill it in, or remove the row",
            public=f"column {name!r}, the target: {len(gaps)} rows have no value",
        )
    wrong = [row for row, cell in enumerate(cells) if not _is_number(cell)]
    if len(wrong) == len(cells):
        return np.array(cells, dtype=object)
    if wrong:
        line = targets.lines[wrong[0]]
        cell = cells[wrong[0]]
        count = f"{len(wrong)} cells are not numbers, {len(cells)} rows are"
        raise InputError(
            f"{path}: line {line}: has {cell!r} in column {name!r}, expected a number such as "
            "-1.5, as other rows have",
            public=f"column {name!r}, the target: {count}",
        )
    numbers = list(map(float, cells))
    return _told_apart(np.array(numbers), cells)


def _told_apart(y: Array, cells: Sequence[str]) -> Array:
    """The numbers, as exact integers where float64 would make two different ones equal.

    Labels such as 9007199254740992 and 9007199254740993 are then still two classes.
    """
    are_whole = not (y % 1).any()
    are_large = (np.abs(y) >= EXACT).any()
    if not are_whole or not are_large:
        return y
    # A cell such as 1e16 is a whole number, but Python's int does not read it.
    exact = list(map(Decimal, cells))
    if any(one != one.to_integral_value() for one in exact):
        return y
    return np.array(list(map(int, exact)), dtype=object)


def _are_names(y: Array) -> bool:
    """Whether targets are the names of classes."""
    return isinstance(y[0], str)


def joined(targets: Sequence[Array], paths: Sequence[Path], name: str) -> Array:
    """The targets of all files in one array. All files must have numbers, or all names."""
    kinds = ["names" if _are_names(own) else "numbers" for own in targets]
    for kind, path in zip(kinds, paths, strict=True):
        if kind != kinds[0]:
            raise InputError(
                f"{path}: has {kind} in column {name!r}, {paths[0]} has {kinds[0]}: write all in "
                f"one way"
            )
    return np.concatenate(targets)


def labels_of(y: Array, target: str, classes: int | None) -> tuple[Tensor, Names]:
    """Targets as labels or real numbers, with notes for the user. See `csv_pool` for the rules."""
    are_names = _are_names(y)
    if classes == 0 and are_names:
        raise InputError(
            f"column {target!r} holds names such as {str(y[0])!r}, a regression needs numbers: "
            f"choose another",
            public=f"column {target!r}: holds names, a regression needs numbers",
        )
    if classes is None or are_names:
        return numbered(y)
    as_written = y.astype(np.float64)
    return torch.from_numpy(as_written), ()


def numbered(y: Array) -> tuple[Tensor, Names]:
    """Number names or whole numbers 0, 1, ... in sorted order, with a note if that changes them.

    Numbers of which one has a fraction are real targets, and stay as they are.

    >>> label, notes = numbered(np.array([-1.0, 1.0, -1.0]))
    >>> label.tolist(), notes
    ([0, 1, 0], ('labels -1 to 1 are numbered 0 to 1 in sorted order',))
    """
    are_floats = y.dtype.kind == "f"
    if are_floats and (y % 1).any():
        return torch.from_numpy(y), ()
    values, label = np.unique(y, return_inverse=True)
    labels = torch.from_numpy(label.astype(np.int64))
    count = len(values)
    if are_floats and np.array_equal(values, np.arange(count)):
        return labels, ()
    form = "g" if are_floats else ""
    first = format(values[0], form)
    last = format(values[-1], form)
    note = f"labels {first} to {last} are numbered 0 to {count - 1} in sorted order"
    return labels, (note,)


def class_names_of(y: Array, label: Tensor) -> Names:
    """What stands in the files for label 0, 1, ...; nothing where that is the number itself."""
    if label.is_floating_point():
        return ()
    form = "g" if y.dtype.kind == "f" else ""
    names = tuple(format(value, form) for value in np.unique(y))
    return () if names == tuple(map(str, range(len(names)))) else names


# ---- UCI heart disease ----


def heart(paths: Sequence[Path]) -> Pool:
    """Read UCI heart disease: processed.NAME.data of the four HOSPITALS, in their order.

    The label is whether num, the diagnosis, is above 0. A row's group is its hospital.
    """
    if len(paths) != len(HOSPITALS):
        names = ", ".join(HOSPITALS)
        raise InputError(f"heart needs {len(HOSPITALS)} files ({names}), got {len(paths)}")
    tables = [_hospital(path) for path in paths]
    sizes = [len(own) for own in tables]
    table = np.concatenate(tables)
    x = table[:, :-1].astype(np.float32)
    sick = torch.from_numpy(table[:, -1] > 0)
    return Pool(
        torch.from_numpy(x),
        sick.long(),
        group=np.repeat(np.array(HOSPITALS), sizes),
        class_names=("no disease", "disease"),
        standardise=True,
        columns=FEATURES,
    )


def _hospital(path: Path) -> Array:
    """The table of one hospital, float64 [rows, 14]. The last column is the diagnosis, 0 to 4.

    The file has no header. A question mark is a gap.
    """
    names = (*FEATURES, "num")
    columns = {name: place for place, name in enumerate(names)}
    # A wrong diagnosis is told with its line, so the records are kept.
    rows = read_records(path, text_lines(path), ",")
    records = list(_placed(path, rows))
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
