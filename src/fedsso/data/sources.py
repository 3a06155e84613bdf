"""The data sets by name: one registry line makes a set exist in `load`, the command line and the docs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, integer, number, one_of, unknown
from .federation import Federation, split_options
from .images import Pool, digits, npz
from .partition import PARTITIONS, TABLES, options_of
from .synthetic import KINDS

FOLDER = "FEDSSO_DATA"
"""The environment variable that names the folder of data files."""


@dataclass(frozen=True)
class Wish:
    """What the caller of `load` wants of any data set; None leaves it to the set."""

    clients: int | None
    partition: str | None
    concentration: float | None
    classes_per_client: int | None
    min_rows: int
    test_fraction: float
    seed: int
    data_dir: str | Path | None


@dataclass(frozen=True)
class DataSet:
    """One line of the registry."""

    name: str
    title: str
    rows: int  # 0: as many as asked for
    classes: int  # 0: real targets
    build: Callable[[DataSet, Wish, Mapping[str, object]], Federation]
    read: Callable[..., Pool] = npz
    partition: str = ""  # the default; "" where the set makes its own clients
    concentration: float = 0.5  # of the default partition
    file: str = ""  # looked for in data_dir or $FEDSSO_DATA; "" needs none
    origin: str = ""
    licence: str = ""

    def path(self, data_dir: str | Path | None = None) -> Path | None:
        """Where the file is looked for; None when no folder is known or no file is needed."""
        folder = data_dir or os.environ.get(FOLDER)
        if folder and not isinstance(folder, str | os.PathLike):
            raise InputError(f"data_dir must be the path of a folder, got data_dir={data_dir!r}")
        return Path(folder).expanduser() / self.file if folder and self.file else None

    def present(self, data_dir: str | Path | None = None) -> bool:
        """Whether `load` would find it."""
        path = self.path(data_dir)
        return not self.file or (path is not None and path.is_file())


def load(
    name: str,
    *,
    clients: int | None = None,
    partition: str | None = None,
    concentration: float | None = None,
    classes_per_client: int | None = None,
    min_rows: int = 8,
    test_fraction: float = 0.25,
    seed: int = 0,
    data_dir: str | Path | None = None,
    **options: object,
) -> Federation:
    """A federation from a named data set, the same for the same arguments.

    None means the set's default partition and number of clients, and the partition's default skew.
    min_rows is a promise of the random partitions; the tables need none.
    Further options are the set's own: pixel_range of images; kind, dim, heterogeneity ... of synthetic.

    >>> load("digits", clients=4, partition="iid")
    Federation(digits, 4 clients, 1349 train + 448 test rows, sample 1×8×8 uint8, 10 classes)
    """
    dataset = DATASETS[one_of("data set", name, DATASETS)]
    test_fraction, seed = split_options(test_fraction, seed)
    wish = Wish(
        clients=None if clients is None else integer("clients", clients, 1),
        partition=None if partition is None else one_of("partition", partition, PARTITIONS),
        concentration=None if concentration is None else number("concentration", concentration),
        classes_per_client=None if classes_per_client is None else integer("classes_per_client", classes_per_client),
        min_rows=integer("min_rows", min_rows, 1),
        test_fraction=test_fraction,
        seed=seed,
        data_dir=data_dir,
    )
    return dataset.build(dataset, wish, options)


def datasets() -> list[DataSet]:
    """Every data set there is."""
    return list(DATASETS.values())


def _pooled(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """A pooled data set, shared out by a partition."""
    own = _options(dataset.read, options, dataset.name)
    name = wish.partition or dataset.partition
    skew = _skew(dataset, wish, name)
    clients = wish.clients if wish.clients is not None else len(TABLES.get(name, ())) or 20
    x, y, affine = dataset.read(*_file(dataset, wish.data_dir), **own)
    parts = PARTITIONS[name](y, clients, seed=wish.seed, **skew)
    fed = Federation.from_rows(
        x, y, parts.rows, test_fraction=wish.test_fraction, seed=wish.seed, classes=dataset.classes
    )
    asked = {
        "clients": clients,
        "partition": name,
        **skew,
        "test_fraction": wish.test_fraction,
        "seed": wish.seed,
    }
    source = {"name": dataset.name, **asked, **_plain(own)}
    return replace(fed, name=dataset.name, affine=affine, notes=parts.notes, source=source)


def _synthetic(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """Clients made to measure; `kind` chooses the problem."""
    if wish.partition or wish.concentration is not None or wish.classes_per_client is not None:
        raise InputError(f"data set {dataset.name!r} makes its own clients: leave out the partition; use heterogeneity")
    kind = one_of("kind", options.get("kind", "quadratic"), KINDS)
    clients = 20 if wish.clients is None else wish.clients
    own = _options(KINDS[kind], {k: v for k, v in options.items() if k != "kind"}, f"synthetic {kind}")
    if "test_fraction" in own:
        own["test_fraction"] = wish.test_fraction
    source = {"name": dataset.name, "clients": clients, "seed": wish.seed, "kind": kind, **own}
    return replace(KINDS[kind](clients, wish.seed, **own), name=f"synthetic-{kind}", source=source)


def _skew(dataset: DataSet, wish: Wish, name: str) -> dict[str, Any]:
    """The partition's options: those asked for, else the data set's default."""
    takes = options_of(name)
    asked = {"concentration": wish.concentration, "classes_per_client": wish.classes_per_client}
    for option, value in asked.items():
        if value is not None and option not in takes:
            users = ", ".join(sorted(p for p in PARTITIONS if option in options_of(p)))
            raise InputError(f"partition {name!r} has no {option}, got {value}: leave it out, or choose from {users}")
    default = {"concentration": 0.5 if wish.partition else dataset.concentration, "classes_per_client": 2}
    values = {k: default[k] if v is None else v for k, v in asked.items()} | {"min_rows": wish.min_rows}
    return {k: v for k, v in values.items() if k in takes}


def _file(dataset: DataSet, data_dir: str | Path | None) -> list[Path]:
    """The data set's file as the reader's argument; none where it needs none."""
    if not dataset.file:
        return []
    path = dataset.path(data_dir)
    if path is None:
        raise InputError(
            f"data set {dataset.name!r} needs {dataset.file}: pass data_dir, or set {FOLDER} to its folder"
        )
    if not path.is_file():
        where = "data_dir" if data_dir else f"${FOLDER}"
        raise InputError(
            f"no {dataset.file} in {path.parent} (from {where}): put it there, or set {where} to its folder"
        )
    return [path]


def _options(function: Callable[..., object], given: Mapping[str, object], what: str) -> dict[str, Any]:
    """A function's keyword-only parameters: their defaults, overridden by what is given."""
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for option in given:
        if option not in known:
            raise unknown(f"option of {what}", option, known)
    return {k: _typed(k, given.get(k, default), default) for k, default in known.items()}


def _typed(name: str, value: Any, default: Any) -> Any:
    """The value in the type of the default."""
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            raise InputError(f"{name} must be {len(default)} numbers, got {value!r}")
        return tuple(_typed(name, v, d) for v, d in zip(value, default, strict=True))
    return integer(name, value) if isinstance(default, int) else number(name, value)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as lists, which TOML has."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}


DATASETS = {
    dataset.name: dataset
    for dataset in (
        DataSet(
            "digits",
            "8×8 handwritten digits",
            rows=1797,
            classes=10,
            build=_pooled,
            read=digits,
            partition="dirichlet",
            concentration=0.1,
            origin="UCI Optical Recognition of Handwritten Digits, shipped with scikit-learn",
            licence="CC BY 4.0",
        ),
        DataSet(
            "mnist",
            "28×28 handwritten digits, training and test images pooled",
            rows=70000,
            classes=10,
            build=_pooled,
            partition="paper-20",
            file="mnist.npz",
            origin="LeCun, Cortes and Burges: MNIST",
            licence="CC BY-SA 3.0",
        ),
        DataSet(
            "fashion_mnist",
            "28×28 articles of clothing, training and test images pooled",
            rows=70000,
            classes=10,
            build=_pooled,
            partition="paper-fashion-3",
            file="fashion_mnist.npz",
            origin="Zalando Research: Fashion-MNIST",
            licence="MIT",
        ),
        DataSet(
            "emnist_digits",
            "28×28 handwritten digits of the EMNIST ByClass test part",
            rows=57918,
            classes=10,
            build=_pooled,
            partition="dirichlet",
            concentration=0.1,
            file="emnist_digits.npz",
            origin="Cohen, Afshar, Tapson and van Schaik: EMNIST, from NIST Special Database 19",
            licence="none stated",
        ),
        DataSet(
            "synthetic",
            "quadratic or logistic problems with a known minimiser",
            rows=0,
            classes=0,
            build=_synthetic,
            origin="drawn from the seed",
        ),
    )
}
