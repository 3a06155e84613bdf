"""Data sets by name: where their files are looked for, and how they become a federation.

A data set comes in one or more forms: the official files in a folder of their own, or one plain
file. The first form whose files are all there is read. The sets themselves are listed in
`catalogue.py`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, integer, number, one_of, unknown
from ..support.intake import is_file, user_path
from .federation import Federation
from .fetch import Remote
from .partition import PARTITIONS, TABLES, Parts, options_of
from .pool import Pool
from .synthetic import KINDS
from .tables import listed

FOLDER = "FEDSSO_DATA"
"""The environment variable that names the folder of data files."""

SKEW = {"concentration": 0.5, "classes_per_client": 2, "shards_per_client": 2}
"""Options of the partitions, and their defaults."""


@dataclass(frozen=True)
class Wish:
    """What the caller of `load` wants of any data set; None leaves it to the set."""

    clients: int | None
    partition: str | None
    skew: Mapping[str, Any]  # what was given of SKEW
    min_rows: int
    test_fraction: float
    seed: int
    data_dir: str | Path | None


@dataclass(frozen=True)
class Form:
    """Files below the data folder that together hold a data set, and their reader."""

    files: tuple[str, ...]
    read: Callable[..., Pool]
    rows: int = 0  # 0: as many as the files have
    suffix: str = ""  # of the user's own files, where they are given as a folder


@dataclass(frozen=True)
class DataSet:
    """One entry of the catalogue."""

    name: str
    title: str
    build: Callable[[DataSet, Wish, Mapping[str, object]], Federation]
    forms: tuple[Form, ...] = ()
    classes: int = 0  # 0: real targets, or as many as the files have
    partition: str = ""  # the default; "" where the set makes its own clients
    clients: int = 20  # the default, where the partition has none of its own
    concentration: float = SKEW["concentration"]  # of the default partition
    models: tuple[str, ...] = ("mclr",)  # those it is tried with
    remotes: tuple[Remote, ...] = ()  # where the official files are
    trial: Mapping[str, int] = field(
        default_factory=dict
    )  # options that make a trial reading cheap
    origin: str = ""
    licence: str = ""

    @property
    def yours(self) -> bool:
        """Whether the files are the user's own."""
        return self.build is own_files

    def present(self, data_dir: str | Path | None = None) -> bool:
        """Whether `load` needs nothing more."""
        return not self.yours and (not self.forms or self.find(data_dir) is not None)

    def find(self, data_dir: str | Path | None = None) -> tuple[Form, list[Path]] | None:
        """The first form whose files are all there, and the files."""
        folder = data_folder(data_dir)
        found = ((form, [folder / file for file in form.files]) for form in self.forms)
        return next(
            ((form, paths) for form, paths in found if all(is_file(path) for path in paths)), None
        )

    def wanted(self) -> str:
        """The files of its forms, for people."""
        files = [form.files for form in self.forms if form.files]
        ways = [first if not more else f"{first} ..." for first, *more in files]
        return " or ".join(ways)

    def check(self, folder: Path) -> None:
        """Raise InputError unless a folder holds the official files, and they can be read."""
        form = self.forms[0]
        pool = form.read([folder / file for file in form.files], **self.trial)
        if form.rows and len(pool.y) != self.trial.get("rows", form.rows):
            raise InputError(
                f"{folder / form.files[0]}: {len(pool.y)} rows in all, {self.name} has {form.rows}"
            )


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Where data files are looked for: data_dir, else $FEDSSO_DATA, else fedsso in the user's cache
    folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = data_dir or os.environ.get(FOLDER) or Path(cache) / "fedsso"
    return user_path("data_dir" if data_dir else f"${FOLDER}", folder)


def pooled(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """A data set from the data folder, shared out by a partition."""
    own = _options(dataset.forms[0].read, options, dataset.name)
    name = wish.partition or dataset.partition
    skew = _skew(dataset, wish, name)  # found wrong before hours of reading
    form, paths = dataset.find(wish.data_dir) or _missing(dataset, wish.data_dir)
    pool = form.read(paths, **own)
    _known_labels(dataset, pool, paths)
    whole = dataset.forms[0].rows
    held = form.rows if options.get("rows") else len(pool.y)  # a sample of them is no surprise
    if held != whole:
        some = f"{paths[0].name} holds {held} of {whole} rows; `fedsso data get {dataset.name}` fetches all"
        pool = pool._replace(notes=(some, *pool.notes))
    return _shared_out(dataset, pool, wish, {**skew, **own})


def _known_labels(dataset: DataSet, pool: Pool, paths: Sequence[Path]) -> None:
    """A label that the set does not have is a damaged file."""
    classes = pool.classes or dataset.classes
    good = (pool.y >= 0) & (pool.y < classes)
    if not good.all():
        row = int(good.int().argmin())
        files = ", ".join(map(str, paths))
        raise InputError(
            f"{files}: row {row} has label {int(pool.y[row])}, {dataset.name} has 0 to "
            f"{classes - 1}: fetch it again"
        )


def own_files(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """Files of the user's own, which the option `files` lists; a folder stands for the files in it."""
    if options.get("files") is None:
        raise InputError(
            f"data set {dataset.name!r} reads your own files: name them, or a folder (--files, "
            f"files=[...])"
        )
    (form,) = dataset.forms
    given: Any = options["files"]
    paths = listed(given, form.suffix)
    own = _options(form.read, {k: v for k, v in options.items() if k != "files"}, dataset.name)
    skew = _skew(dataset, wish, wish.partition or dataset.partition)
    fed = _shared_out(dataset, form.read(paths, **own), wish, {**skew, **own})
    return replace(fed, source={**fed.source, "files": [os.path.realpath(path) for path in paths]})


def _shared_out(dataset: DataSet, pool: Pool, wish: Wish, options: Mapping[str, Any]) -> Federation:
    """A federation of the pool's rows, which remembers how it was made."""
    name = wish.partition or dataset.partition
    skew = {k: v for k, v in options.items() if k in options_of(name)}
    parts = _parts(dataset, pool, wish, name, skew)
    fed = Federation.from_rows(
        pool.x,
        pool.y,
        parts.rows,
        test_fraction=wish.test_fraction,
        seed=wish.seed,
        classes=pool.classes or dataset.classes or None,
        standardise=pool.standardise,
    )
    scaling = fed.scaling and fed.scaling._replace(columns=pool.columns)
    asked = {
        "clients": fed.clients,
        "partition": name,
        "test_fraction": wish.test_fraction,
        "seed": wish.seed,
    }
    return replace(
        fed,
        name=dataset.name,
        affine=pool.affine,
        notes=(*pool.notes, *parts.notes),
        client_names=parts.names,
        scaling=scaling,
        source={"name": dataset.name, **asked, **_plain(options)},
    )


def _parts(dataset: DataSet, pool: Pool, wish: Wish, name: str, skew: Mapping[str, Any]) -> Parts:
    """Who holds which rows."""
    if name == "group":
        return PARTITIONS[name](pool.y, wish.clients, group=pool.group, seed=wish.seed, **skew)
    clients = wish.clients or len(TABLES.get(name, ())) or dataset.clients
    return PARTITIONS[name](pool.y, clients, seed=wish.seed, **skew)


def synthetic(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """Clients made to measure; `kind` chooses the problem."""
    if wish.partition or wish.skew:
        raise InputError(
            f"data set {dataset.name!r} makes its own clients: leave out the partition; use "
            f"heterogeneity"
        )
    kind = one_of("kind", options.get("kind", "quadratic"), KINDS)
    clients = dataset.clients if wish.clients is None else wish.clients
    own = _options(
        KINDS[kind], {k: v for k, v in options.items() if k != "kind"}, f"synthetic {kind}"
    )
    if "test_fraction" in own:
        own["test_fraction"] = wish.test_fraction
    source = {"name": dataset.name, "clients": clients, "seed": wish.seed, "kind": kind, **own}
    return replace(KINDS[kind](clients, wish.seed, **own), name=f"synthetic-{kind}", source=source)


def _skew(dataset: DataSet, wish: Wish, name: str) -> dict[str, Any]:
    """The partition's options: those asked for, else the data set's default."""
    takes = options_of(name)
    for option, value in wish.skew.items():
        if option not in takes:
            users = ", ".join(sorted(p for p in PARTITIONS if option in options_of(p)))
            raise InputError(
                f"partition {name!r} has no {option}, got {value}: leave it out, or choose from "
                f"{users}"
            )
    default = SKEW if wish.partition else {**SKEW, "concentration": dataset.concentration}
    return {
        k: v for k, v in {**default, **wish.skew, "min_rows": wish.min_rows}.items() if k in takes
    }


def _missing(dataset: DataSet, data_dir: str | Path | None) -> tuple[Form, list[Path]]:
    where = "data_dir" if data_dir else f"${FOLDER}" if os.environ.get(FOLDER) else "the default"
    get = f"fedsso data get {dataset.name}" + (f" --data-dir {data_dir}" if data_dir else "")
    raise InputError(
        f"data set {dataset.name!r} is not in {data_folder(data_dir)} ({where}): `{get}` fetches "
        f"it; "
        f"or put there {dataset.wanted()}, or set {FOLDER} to the folder that has them"
    )


def _options(
    function: Callable[..., object], given: Mapping[str, object], what: str
) -> dict[str, Any]:
    """A function's keyword-only parameters: their defaults, overridden by what is given."""
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for option in given:
        if not known:
            raise InputError(
                f"data set {what!r} has no options of its own, got {option}: leave it out"
            )
        if option not in known:
            raise unknown(f"option of {what}", option, known)
    typed = {k: _typed(k, given.get(k, default), default) for k, default in known.items()}
    return {k: v for k, v in typed.items() if v is not None}


def _typed(name: str, value: Any, default: Any) -> Any:
    """The value in the type of the default."""
    if default == ():
        return _texts(name, value)
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            raise InputError(f"{name} must be {len(default)} numbers, got {value!r}")
        return tuple(_typed(name, v, d) for v, d in zip(value, default, strict=True))
    if default is None:  # a file, or none
        return None if value is None else Path(os.path.realpath(user_path(name, value)))
    if isinstance(default, str):
        if not isinstance(value, str):
            raise InputError(f"{name} must be text, got {value!r}")
        return value
    return integer(name, value) if isinstance(default, int) else number(name, value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{name} must be a list of names, got {value!r}")
    return tuple(value)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as lists and paths as text, which TOML has."""
    lists = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    return {k: str(v) if isinstance(v, Path) else v for k, v in lists.items()}
