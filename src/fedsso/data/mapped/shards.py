"""A folder of numpy files that together are larger than memory: the data set `npy`.

    x-0000.npy       samples [rows, *sample]: uint8, floats, or integers, which become float32
    y-0000.npy       one label (integers, from 0) or target (floats) for each row
    client-0000.npy  whose row it is, an integer or a name; may be left out in all shards
    x-0001.npy  ...

What stands behind the dash may be anything, and names the shard: every x needs a y of the same
name. Shards are taken in the order of their names. A single shard may do without: x.npy, y.npy.

Samples stay in their files, which are mapped. Labels and clients are read. Nothing pickled is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ...support.intake import opened
from ..arrays import dense
from ..options import STANDARDISE
from ..pool import Pool
from .rows import MappedRows

Array = np.ndarray[Any, Any]
KINDS = ("x", "y", "client")
NAMES = "x-NAME.npy, y-NAME.npy and, where rows have owners, client-NAME.npy"


def npy(paths: Sequence[Path], *, standardise: str = STANDARDISE.default) -> Pool:
    """Read a folder of shards, of which the samples stay in the files.

    Args:
        paths: All files of all shards.
        standardise: "yes" fills gaps in a table and scales its columns.

    Raises:
        InputError: A file is missing, has another name than it should, cannot be read, or does not
            fit to the others. The message names the file.
    """
    shards = _by_shard(paths)
    samples = []
    targets = []
    clients = []
    for files in shards.values():
        x = _samples(files["x"])
        samples.append(x)
        targets.append(_column(files["y"], len(x), files["x"]))
        if "client" in files:
            clients.append(_column(files["client"], len(x), files["x"]))
    files_of = list(shards.values())
    _check_alike(samples, [files["x"] for files in files_of])
    _check_kinds(targets, [files["y"] for files in files_of])
    group = None
    if clients:
        _check_kinds(clients, [files["client"] for files in files_of])
        group = np.concatenate(clients)
    return Pool(
        MappedRows(samples),
        _targets(np.concatenate(targets)),
        group=group,
        standardise=standardise == "yes",
    )


def _by_shard(paths: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """The files of each shard by their kind, the shards in the order of their names."""
    found: dict[str, dict[str, Path]] = {}
    for path in paths:
        kind, _, name = path.name.removesuffix(".npy").partition("-")
        if kind not in KINDS:
            raise InputError(f"{path}: its name does not say what it holds, need {NAMES}")
        files = found.setdefault(name, {})
        if kind in files:
            raise InputError(f"{path}: {files[kind]} is the same shard: name them apart")
        files[kind] = path
    has_clients = any("client" in files for files in found.values())
    wanted = KINDS if has_clients else KINDS[:2]
    for name, files in found.items():
        for kind in wanted:
            if kind not in files:
                missing = f"{kind}-{name}.npy" if name else f"{kind}.npy"
                there = ", ".join(str(path) for path in files.values())
                raise InputError(f"{missing} is missing beside {there}: every shard needs {NAMES}")
    return dict(sorted(found.items()))


def _opened(path: Path) -> Array:
    """The array in a file, mapped for reading."""
    with opened(path):  # it says what is wrong with a path that is no readable file
        pass
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy lets through whatever damaged bytes lead to
        raise InputError(
            f"{path}: cannot be mapped as .npy ({error}): write it with numpy.save, as an array of "
            f"numbers with at least one row"
        ) from None
    if not isinstance(array, np.ndarray):
        raise InputError(
            f"{path}: is not a .npy file but an archive of several arrays: save each on its own"
        )
    return array


def _samples(path: Path) -> Array:
    """The samples of a shard, [rows, *sample]."""
    x = _opened(path)
    if x.dtype.kind not in "biuf":
        raise InputError(f"{path}: must hold numbers, got dtype {x.dtype}: encode names")
    if x.ndim < 2 or x[:1].size == 0:
        raise InputError(
            f"{path}: must be [rows, features] or [rows, C, H, W], got shape {x.shape}"
        )
    return x


def _column(path: Path, rows: int, beside: Path) -> Array:
    """The labels, targets or clients of a shard, read into memory."""
    column = _opened(path)
    if column.shape != (rows,):
        raise InputError(
            f"{path}: has shape {column.shape}, need one entry for each of the {rows} rows of "
            f"{beside}"
        )
    return np.array(column)


def _check_alike(arrays: Sequence[Array], paths: Sequence[Path]) -> None:
    """Raise InputError unless all samples have one shape and type."""
    first = arrays[0]
    for array, path in zip(arrays, paths, strict=True):
        if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
            raise InputError(
                f"{path}: has samples of shape {array.shape[1:]} {array.dtype}, {paths[0]} of "
                f"{first.shape[1:]} {first.dtype}: all shards must be alike"
            )


def _check_kinds(arrays: Sequence[Array], paths: Sequence[Path]) -> None:
    """Raise InputError if some shards hold integers, and others floats or names."""
    kinds: Mapping[str, str] = {"u": "i", "b": "i"}
    first = arrays[0].dtype
    for array, path in zip(arrays, paths, strict=True):
        if kinds.get(array.dtype.kind, array.dtype.kind) != kinds.get(first.kind, first.kind):
            raise InputError(
                f"{path}: holds {array.dtype}, {paths[0]} {first}: all shards must be alike"
            )


def _targets(y: Array) -> Tensor:
    """Labels as int64; real targets as they are."""
    targets = dense(y, "y")
    return targets if targets.is_floating_point() else targets.to(torch.int64)
