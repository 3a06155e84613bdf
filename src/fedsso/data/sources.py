"""How a named data set becomes a federation.

A data set comes in one or more forms: the official files in a folder of their own, or one plain
file. The first form whose files are all there is read. Its rows form a pool, and a partition shares
them out among the clients.

`DataSet` describes one data set. The data sets themselves are listed in `sets.py`. Three functions
build federations: `pooled` from files in the data folder, `own_files` from files of the user, and
`synthetic` from random numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, unknown
from ..support.intake import is_file, user_path
from .federation import Federation
from .fetch import Remote
from .options import (
    CLIENTS,
    CONCENTRATION,
    DATA_DIR,
    FILES,
    MIN_ROWS,
    SEED,
    SKEW,
    TEST_FRACTION,
    Option,
    other_names,
)
from .partition import PARTITION, PARTITIONS, TABLES, Parts, options_of
from .pool import Pool
from .synthetic import KIND, KINDS, OPTIONS_OF_KIND
from .tables import listed

FOLDER = "FEDSSO_DATA"
"""The environment variable that names the folder of data files."""

EVERY = (
    CLIENTS,
    PARTITION,
    MIN_ROWS,
    TEST_FRACTION,
    SEED,
    DATA_DIR,
)
"""The options that every data set takes."""


@dataclass(frozen=True)
class Wish:
    """The options of `load` that every data set takes, checked. None leaves it to the data set.

    `load` makes it, and gives it to `DataSet.build` together with the other options.
    """

    clients: int | None
    """How many clients to make."""
    partition: str | None
    """The name of the partition."""
    skew: Mapping[str, Any]
    """The options of the partition that were given, by name."""
    min_rows: int
    """The fewest rows of a client."""
    test_fraction: float
    """The share of each client's rows that is kept for testing."""
    seed: int
    """The seed of the partition and of the split."""
    data_dir: str | Path | None
    """Where to look for files."""


@dataclass(frozen=True)
class Form:
    """One form of a data set: files below the data folder that hold it, and their reader."""

    files: tuple[str, ...]
    """The paths of the files below the data folder. Empty if none are needed."""
    read: Callable[..., Pool]
    """The reader. It takes the list of paths, and the data set's options as keywords."""
    rows: int = 0
    """How many rows the files have. 0: this is not known."""
    suffix: str = ""
    """Which files to take where a user names a folder."""


Found = tuple[Form, list[Path]]
"""A form, and where its files are."""


@dataclass(frozen=True)
class DataSet:
    """A data set: its name, where its files are, how to read them, and its defaults."""

    name: str
    """The name by which `load` and the command line know it."""
    title: str
    """One line for people."""
    build: Callable[[DataSet, Wish, Mapping[str, object]], Federation]
    """Makes the federation: `pooled`, `own_files` or `synthetic`."""
    forms: tuple[Form, ...] = ()
    """The forms it comes in. The official files come first."""
    options: tuple[Option, ...] = ()
    """The options that belong to this data set."""
    classes: int = 0
    """How many classes it has. 0: real targets, or as many as the files have."""
    partition: str = ""
    """The default partition. Empty if the set makes its own clients."""
    clients: int = 20
    """The default number of clients, where the partition does not decide it."""
    concentration: float = CONCENTRATION.default
    """The concentration of the default partition."""
    models: tuple[str, ...] = ("mclr",)
    """The models that it is tried with."""
    remotes: tuple[Remote, ...] = ()
    """Where to download the official files."""
    trial: Mapping[str, int] = field(default_factory=dict)
    """Options that make a trial reading cheap. A download is checked with them."""
    origin: str = ""
    """Who made it."""
    licence: str = ""
    """On which terms it may be used."""

    @property
    def yours(self) -> bool:
        """Whether the user brings the files."""
        return self.build is own_files

    def present(self, data_dir: str | Path | None = None) -> bool:
        """Whether `load` can build it at once, without a download or files of the user."""
        if self.yours:
            return False
        return not self.forms or self.find(data_dir) is not None

    def find(self, data_dir: str | Path | None = None) -> Found | None:
        """The first form whose files are all there, with the paths of the files.

        None if no form is complete. A set that needs no files is always there.
        """
        folder = data_folder(data_dir)
        for form in self.forms:
            paths = [folder / file for file in form.files]
            if all(map(is_file, paths)):
                return form, paths
        return None

    def wanted(self) -> str:
        """The files of each form as text for people: the first file, and ... for the others."""
        ways = []
        for form in self.forms:
            if form.files:
                more = " ..." if len(form.files) > 1 else ""
                ways.append(f"{form.files[0]}{more}")
        return " or ".join(ways)

    def check(self, folder: Path) -> None:
        """Raise InputError unless a folder holds the official files and they can be read.

        `fedsso data get` calls this for a download before it is put in its place. The number of
        rows must be right, too. `folder` is laid out like the data folder.
        """
        form = self.forms[0]
        paths = [folder / file for file in form.files]
        pool = form.read(paths, **self.trial)
        found = len(pool.y)
        expected = self.trial.get("rows", form.rows)
        if form.rows and found != expected:
            raise InputError(f"{paths[0]}: {found} rows in all, {self.name} has {form.rows}")


def data_folder(data_dir: str | Path | None = None) -> Path:
    """The folder where data files are looked for. It need not exist.

    It is `data_dir` if that is given, else $FEDSSO_DATA, else `fedsso` in the user's cache
    folder, which is $XDG_CACHE_HOME or ~/.cache. InputError if no folder can have that name.
    """
    if data_dir:
        return user_path(DATA_DIR.name, data_dir)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get(FOLDER) or Path(cache) / "fedsso"
    return user_path(f"${FOLDER}", folder)


# ---- data sets in the data folder ----


def pooled(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """Read a data set from the data folder and share its rows out among the clients.

    A note tells if the files hold only a part of the data set.

    Args:
        dataset: The data set.
        wish: The options that every data set takes.
        options: The other keywords of `load`: those of this data set.

    Returns:
        The federation, which knows in `source` how it was made.

    Raises:
        InputError: An option is wrong, the files are not there, or they are damaged.
    """
    check_names(dataset.name, options, (*SKEW, *dataset.options))
    own = _values(dataset.options, options)
    # Wrong options of the partition are found before the files are read, which can take minutes.
    skew = _skew(dataset, wish)
    found = dataset.find(wish.data_dir)
    if found is None:
        raise _not_there(dataset, wish.data_dir)
    form, paths = found
    pool = form.read(paths, **own)
    _check_known_labels(dataset, pool, paths)
    is_sample = bool(options.get("rows"))  # the user asked for a part of the rows
    held = form.rows if is_sample else len(pool.y)
    whole = dataset.forms[0].rows
    if held != whole:
        file = paths[0].name
        get = f"`fedsso data get {dataset.name}` downloads all"
        note = f"{file} holds {held} of {whole} rows; {get}"
        pool = pool._replace(notes=(note, *pool.notes))
    return _shared_out(dataset, pool, wish, {**skew, **own})


def _check_known_labels(
    dataset: DataSet,
    pool: Pool,
    paths: Sequence[Path],
) -> None:
    """Raise InputError for a label that the data set does not have: the file is damaged."""
    classes = pool.classes or dataset.classes
    good = (pool.y >= 0) & (pool.y < classes)
    if good.all():
        return
    row = int(good.int().argmin())
    label = int(pool.y[row])
    files = ", ".join(map(str, paths))
    raise InputError(
        f"{files}: row {row} has label {label}, {dataset.name} has 0 to {classes - 1}: download it "
        f"again"
    )


def _not_there(dataset: DataSet, data_dir: str | Path | None) -> InputError:
    """The error for a data set whose files are not there. It says where they were looked for."""
    get = f"fedsso data get {dataset.name}"
    if data_dir:
        where = DATA_DIR.name
        get += f" --data-dir {data_dir}"
    elif os.environ.get(FOLDER):
        where = f"${FOLDER}"
    else:
        where = "the default"
    folder = data_folder(data_dir)
    return InputError(
        f"data set {dataset.name!r} is not in {folder} ({where}): `{get}` downloads it; or put "
        f"there {dataset.wanted()}, or set {FOLDER} to the folder that has them"
    )


# ---- files of the user ----


def own_files(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """Read files of the user, which the option `files` names, and share their rows out.

    The paths are kept in `source`, as absolute paths, so that the federation can be made again from
    another folder. Arguments, result and errors are those of `pooled`.
    """
    check_names(dataset.name, options, (*SKEW, *dataset.options))
    given: Any = options.get(FILES.name)
    if given is None:
        raise InputError(
            f"data set {dataset.name!r} reads your own files: name them, or a folder (--files, "
            f"files=[...])"
        )
    (form,) = dataset.forms
    paths = listed(given, form.suffix)
    of_reader = [option for option in dataset.options if option is not FILES]
    own = _values(of_reader, options)
    skew = _skew(dataset, wish)
    pool = form.read(paths, **own)
    fed = _shared_out(dataset, pool, wish, {**skew, **own})
    files = [os.path.realpath(path) for path in paths]
    return replace(fed, source={**fed.source, FILES.name: files})


# ---- both ----


def _shared_out(
    dataset: DataSet,
    pool: Pool,
    wish: Wish,
    options: Mapping[str, Any],
) -> Federation:
    """Share the rows of a pool out among clients.

    The federation remembers in `source` how it was made, so that `load(**source)` makes it again.
    `options` are all options of the data set and of the partition, with their values.
    """
    partition = wish.partition or dataset.partition
    parts = _parts(dataset, pool, wish, options)
    fed = Federation.from_rows(
        pool.x,
        pool.y,
        parts.rows,
        test_fraction=wish.test_fraction,
        seed=wish.seed,
        classes=pool.classes or dataset.classes or None,
        standardise=pool.standardise,
    )
    source = {
        "name": dataset.name,
        "clients": fed.clients,
        "partition": partition,
        "test_fraction": wish.test_fraction,
        "seed": wish.seed,
        **_as_toml_has_them(options),
    }
    return replace(
        fed.with_columns(pool.columns, pool.units),
        name=dataset.name,
        affine=pool.affine,
        notes=(*pool.notes, *parts.notes),
        client_names=parts.names,
        class_names=pool.class_names,
        source=source,
    )


def _parts(
    dataset: DataSet,
    pool: Pool,
    wish: Wish,
    options: Mapping[str, Any],
) -> Parts:
    """Call the partition: it decides which client holds which rows.

    The number of clients is the one that was asked for, else that of the paper's table, else the
    data set's own. The partition "group" has as many clients as there are groups.
    """
    name = wish.partition or dataset.partition
    takes = options_of(name)
    skew = {option: value for option, value in options.items() if option in takes}
    partition = PARTITIONS[name]
    if name == "group":
        return partition(pool.y, wish.clients, group=pool.group, seed=wish.seed, **skew)
    in_table = len(TABLES.get(name, ()))
    clients = wish.clients or in_table or dataset.clients
    return partition(pool.y, clients, seed=wish.seed, **skew)


def _skew(dataset: DataSet, wish: Wish) -> dict[str, Any]:
    """The options of the partition: those that were given, else the defaults.

    The data set's own concentration is the default only where its own partition is used.
    InputError for an option that the partition does not take, which would otherwise be ignored
    without a word.
    """
    name = wish.partition or dataset.partition
    takes = options_of(name)
    for option, value in wish.skew.items():
        if option not in takes:
            users = sorted(other for other in PARTITIONS if option in options_of(other))
            raise InputError(
                f"partition {name!r} has no {option}, got {value}: leave it out, or choose from "
                f"{', '.join(users)}"
            )
    every = {option.name: option.default for option in SKEW}
    if not wish.partition:
        every[CONCENTRATION.name] = dataset.concentration
    every.update(wish.skew)
    every[MIN_ROWS.name] = wish.min_rows
    return {option: value for option, value in every.items() if option in takes}


# ---- synthetic problems ----


def synthetic(dataset: DataSet, wish: Wish, options: Mapping[str, object]) -> Federation:
    """Make clients from random numbers. The option `kind` chooses the problem.

    There is no pool and no partition: the problem itself decides how much the clients differ. The
    arguments are those of `pooled`. InputError for an option that this kind of problem does not
    take.
    """
    if wish.partition or wish.skew:
        raise InputError(
            f"data set {dataset.name!r} defines its own clients: leave out the partition; use "
            f"heterogeneity"
        )
    kind = KIND.check(options.get(KIND.name, KIND.default))
    takes = OPTIONS_OF_KIND[kind]
    check_names(f"synthetic {kind}", options, (KIND, *takes))
    own = _values(takes, options)
    if TEST_FRACTION in takes:
        own[TEST_FRACTION.name] = wish.test_fraction
    clients = dataset.clients if wish.clients is None else wish.clients
    fed = KINDS[kind](clients, wish.seed, **own)
    source = {
        "name": dataset.name,
        "clients": clients,
        "seed": wish.seed,
        "kind": kind,
        **own,
    }
    return replace(fed, name=f"synthetic-{kind}", source=source)


# ---- options ----


def check_names(what: str, given: Iterable[str], own: Sequence[Option]) -> None:
    """Raise InputError for an option that does not exist.

    `what` names the data set, `own` are the options that it takes beside those of every data set.
    The error understands what other libraries call an option: n_clients, alpha, test_size.
    """
    options = (*EVERY, *own)
    names = {option.name for option in options}
    for name in given:
        if name not in names:
            raise unknown(f"option of {what}", name, names, other_names(options))


def _values(options: Sequence[Option], given: Mapping[str, object]) -> dict[str, Any]:
    """The values of some options: those that are given, else the defaults. None is left out."""
    values = {}
    for option in options:
        value = given.get(option.name, option.default)
        checked = option.check(value)
        if checked is not None:
            values[option.name] = checked
    return values


def _as_toml_has_them(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values in types that a TOML file has: tuples become lists, and paths become text."""
    plain = {}
    for name, value in options.items():
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Path):
            value = str(value)
        plain[name] = value
    return plain
