"""Data sets by name: `load` makes a federation of one, `datasets` lists them.

The options that `load` takes are declared in `options.py`. Their descriptions are added to the
documentation of `load` at the end of this file, so `help(fedsso.load)` explains every option.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from ..errors import one_of
from .federation import Federation
from .options import CLIENTS, MIN_ROWS, SEED, SKEW, TEST_FRACTION, Option, with_current_names
from .partition import PARTITIONS, options_of
from .sets import DATASETS
from .sources import EVERY, DataSet, Wish

WIDTH = 92
"""How wide the list of options is in the documentation of `load`."""


def load(
    name: str,
    *,
    clients: int | None = CLIENTS.default,
    partition: str | None = None,
    min_rows: int = MIN_ROWS.default,
    test_fraction: float = TEST_FRACTION.default,
    seed: int = SEED.default,
    data_dir: str | Path | None = None,
    **options: object,
) -> Federation:
    """Load a data set by name and split it over clients.

    A partition splits the rows of the data set over the clients. Each client then holds out a
    part of its rows for testing. The same arguments always give the same federation, on every
    machine.

    `fedsso data list` on the command line shows the data sets, and where their files are looked
    for. `fedsso data get NAME` downloads them. The data set "digits" needs no files, and "csv"
    reads your own tables.

    >>> load("digits", clients=4, partition="iid")
    Federation(digits, 4 clients, 1349 train + 448 test rows, sample 1×8×8 uint8, 10 classes)

    A small `concentration` makes the clients very different from each other. `summary` tells how
    much:

    >>> fed = load("digits", clients=4, partition="dirichlet", concentration=0.1)
    >>> print(fed.summary())
    Federation(digits, 4 clients, 1348 train + 449 test rows, sample 1×8×8 uint8, 10 classes)
    per client         min    median       max
    train rows         232     259.5       597
    test rows           77      86.5       199
    labels held          3         6         8
    label skew  0.552  (0: all alike, near 1: disjoint)

    Args:
        name: The name of the data set.
        clients: How many clients share the rows. By default, the data set's own number.
        partition: The rule that decides which client holds which rows.
        min_rows: The fewest rows that a client may have.
        test_fraction: The share of each client's rows that is kept for testing.
        seed: The seed of the partition and of the split into training and test rows.
        data_dir: The folder of the data files.
        **options: The options of the partition and of the data set. `help(fedsso.load)` lists
            all of them.

    Returns:
        The federation. Its `source` holds the arguments with which `load` makes it again.

    Raises:
        InputError: An option is unknown or has a wrong value, or the files are not there. The
            message says what to do.
    """
    dataset = DATASETS[one_of("data set", name, DATASETS)]
    if partition is not None:
        one_of("partition", partition, PARTITIONS)
    skew = {}
    for option in SKEW:
        value = options.pop(option.name, None)
        if value is not None:
            skew[option.name] = option.check(value)
    wish = Wish(
        clients=CLIENTS.check(clients),
        partition=partition,
        skew=skew,
        min_rows=MIN_ROWS.check(min_rows),
        test_fraction=TEST_FRACTION.check(test_fraction),
        seed=SEED.check(seed),
        data_dir=data_dir,
    )
    current = with_current_names(options, dataset.options)
    return dataset.build(dataset, wish, current)


def datasets() -> list[DataSet]:
    """Every data set there is, in the order of the documentation.

    Returns:
        A list of `DataSet`. Each tells its title, its licence, its default partition and the files
        it needs. Its method `present` tells whether these files are on this machine.

    >>> [dataset.name for dataset in datasets()][:3]
    ['digits', 'mnist', 'fashion_mnist']
    >>> datasets()[0].present()
    True
    """
    return list(DATASETS.values())


def all_options() -> dict[Option, tuple[str, ...]]:
    """Every option of `load`, with the names of the data sets or partitions that take it.

    The command line and the documentation are made from this.

    Returns:
        The owners of each option. No names mean that every data set takes it. Two options can have
        the same name, if they belong to different data sets: the `length` of a piece of text, and
        the `length` of a tweet.

    >>> for option, owners in all_options().items():
    ...     if option.name == "length":
    ...         print(owners, option.default)
    ('shakespeare',) 50
    ('sentiment140',) 200
    """
    found: dict[Option, tuple[str, ...]] = dict.fromkeys(EVERY, ())
    for option in SKEW:
        takers = [name for name in PARTITIONS if option.name in options_of(name)]
        found[option] = tuple(takers)
    for dataset in DATASETS.values():
        for option in dataset.options:
            found[option] = (*found.get(option, ()), dataset.name)
    return found


def _listing() -> str:
    """The list of options for the documentation of `load`: first those of every data set."""
    every = []
    of_some = []
    for option, owners in all_options().items():
        entry = _entry(option, owners)
        if owners:
            of_some.append(entry)
        else:
            every.append(entry)
    head = ["Options of every data set:", ""]
    middle = ["", "Options of some partitions and data sets, named in brackets:", ""]
    return "\n".join([*head, *every, *middle, *of_some])


def _entry(option: Option, owners: Iterable[str]) -> str:
    """One option in a list: its name, who takes it, what it does, its default and its choices."""
    text = f"- `{option.name}`"
    if owners:
        text += f" ({', '.join(owners)})"
    text += f": {option.doc}"
    if option.choices:
        text += f" One of {', '.join(option.choices)}."
    if option.bounds is not None:
        text += f" Must be {option.bounds.text}."
    if option.default not in (None, "", ()):
        text += f" Default: {option.default}."
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


if load.__doc__:  # there are no docstrings under `python -OO`
    load.__doc__ += "\n" + textwrap.indent(_listing(), "    ") + "\n    "
