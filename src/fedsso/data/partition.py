"""Partitions: rules that decide which client holds which rows of a data set.

Every partition is a pure function of the labels, the number of clients and the seed: the same
arguments always give the same clients.

- `iid`, `dirichlet`, `classes`, `quantity` and `shards` draw at random, by the seed.
- `contiguous` cuts the rows in the order of the data, as the paper does with text.
- `group` makes one client of each hospital, user or speaker that has at least `min_rows` rows. A
  note counts the rows that this leaves out.
- The tables are the label counts behind the paper's results: `paper-20` and `paper-3` for MNIST,
  `paper-fashion-3` for Fashion-MNIST, which the paper calls "EMNIST".

The first six use every row exactly once and give every client at least `min_rows` rows. Where the
draw gives a client fewer, rows move to it from the largest client, and a note says how many.

All of them take the same arguments: y [rows], which are labels (int64) or real targets
(floating), the number of clients, and as keywords `seed`, `min_rows` (but for the tables) and
options of their own. They return `Parts`. They raise InputError for an option out of bounds, for
fewer rows than the clients need, and for real targets where labels are needed. To add a
partition, write such a function and enter it in `PARTITIONS`: `options_of` reads its options from
its signature.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heapreplace
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer, one_of
from ..support.rng import generator, key
from .options import (
    CLASSES_PER_CLIENT,
    CLIENTS,
    CONCENTRATION,
    MIN_ROWS,
    SEED,
    SHARDS_PER_CLIENT,
    Option,
)
from .packing import Held, starts

Pieces = list[list[Tensor]]  # the pieces, each a tensor of row indices, that each client holds
Names = np.ndarray[Any, Any]  # text or integers


class Parts(NamedTuple):
    """The result of a partition."""

    rows: Sequence[Tensor]  # the row indices of each client, int64
    notes: tuple[str, ...] = ()  # what a user should know, such as rows that were moved
    names: tuple[str, ...] = ()  # the clients' names, where they have names


# ---- the partitions ----


def iid(
    y: Tensor,
    clients: int,
    *,
    seed: int = SEED.default,
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Shuffle all rows and cut them into equal shares: every client sees the same mix of labels.

    The name stands for "independent and identically distributed". It is the easy case of federated
    learning, and a baseline for the others.

    >>> parts = iid(torch.arange(10) % 2, clients=3, min_rows=1)
    >>> [len(rows) for rows in parts.rows]
    [4, 3, 3]
    """
    _check_enough_rows(len(y), clients, min_rows)
    shuffled = _shuffled(torch.arange(len(y)), seed, "iid")
    return Parts(list(shuffled.tensor_split(clients)))


def dirichlet(
    y: Tensor,
    clients: int,
    *,
    concentration: float = CONCENTRATION.default,
    seed: int = SEED.default,
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Label skew: share out the rows of each label in proportions from a Dirichlet draw.

    A small concentration gives most rows of a label to a few clients. A large one is nearly even.
    Every label has its own draw, so clients differ in their labels and also in their sizes. y
    must be labels.

    >>> y = torch.arange(100) % 2
    >>> parts = dirichlet(y, clients=3, concentration=0.3)
    >>> [torch.bincount(y[rows]).tolist() for rows in parts.rows]
    [[5, 3], [45, 10], [0, 37]]
    """
    _check_enough_rows(len(y), clients, min_rows)
    held = _nothing_for(clients)
    for label in _labels(y, "dirichlet"):
        rows = _shuffled(_rows_with(y, label), seed, "dirichlet", label)
        share = _shares(clients, concentration, seed, "dirichlet", label)
        for own, piece in zip(held, _cut(rows, share), strict=True):
            own.append(piece)
    return _with_at_least(_merge(held, seed), min_rows)


def classes(
    y: Tensor,
    clients: int,
    *,
    classes_per_client: int = CLASSES_PER_CLIENT.default,
    seed: int = SEED.default,
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Give each client k classes. A class is shared equally by the clients that hold it.

    With C classes, each one has about clients * k / C holders. Every class has at least one, so
    that no row is lost; so clients * k must be at least C. k is `classes_per_client`.

    >>> y = torch.arange(60) % 3
    >>> parts = classes(y, clients=3, classes_per_client=1)
    >>> [y[rows].unique().tolist() for rows in parts.rows]
    [[2], [1], [0]]
    """
    _check_enough_rows(len(y), clients, min_rows)
    labels = _labels(y, "classes")
    holders = _holders(len(labels), clients, classes_per_client, seed)
    held = _nothing_for(clients)
    for label, own in zip(labels, holders, strict=True):
        rows = _shuffled(_rows_with(y, label), seed, "classes", label)
        pieces = rows.tensor_split(len(own))
        for client, piece in zip(own, pieces, strict=True):
            held[client].append(piece)
    return _with_at_least(_merge(held, seed), min_rows)


def quantity(
    y: Tensor,
    clients: int,
    *,
    concentration: float = CONCENTRATION.default,
    seed: int = SEED.default,
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Size skew: the clients' sizes come from one Dirichlet draw, while their labels stay mixed.

    y may be real targets, because only the number of rows counts.

    >>> parts = quantity(torch.arange(100) % 2, clients=3, concentration=0.5)
    >>> [len(rows) for rows in parts.rows]
    [8, 8, 84]
    >>> parts.notes
    ('13 rows moved from the largest clients so that 2 clients have min_rows=8',)
    """
    _check_enough_rows(len(y), clients, min_rows)
    share = _shares(clients, concentration, seed, "quantity")
    shuffled = _shuffled(torch.arange(len(y)), seed, "quantity")
    return _with_at_least(_cut(shuffled, share), min_rows)


def shards(
    y: Tensor,
    clients: int,
    *,
    shards_per_client: int = SHARDS_PER_CLIENT.default,
    seed: int = SEED.default,
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Few labels per client: sort rows by label, cut them into equal shards and deal these out.

    This is the "pathological" partition of McMahan et al. 2017. Most shards lie within one label,
    so a client has about `shards_per_client` labels. There must be a row for each shard at least.

    >>> y = torch.arange(40) % 4
    >>> parts = shards(y, clients=4, shards_per_client=1)
    >>> [y[rows].unique().tolist() for rows in parts.rows]
    [[3], [2], [1], [0]]
    """
    _check_enough_rows(len(y), clients, min_rows)
    total = clients * SHARDS_PER_CLIENT.check(shards_per_client)
    if total > len(y):
        raise InputError(
            f"{clients} clients with shards_per_client={shards_per_client} need {total} rows, "
            f"there are {len(y)}: use shards_per_client <= {len(y) // clients}, or fewer clients"
        )
    _check_labels(y, "shards")
    pieces = y.argsort(stable=True).tensor_split(total)
    dealt = _shuffled(torch.arange(total), seed, "shards")
    held = _nothing_for(clients)
    for own, numbers in zip(held, dealt.view(clients, -1).tolist(), strict=True):
        for number in numbers:
            own.append(pieces[number])
    return _with_at_least(_merge(held, seed), min_rows)


def contiguous(
    y: Tensor,
    clients: int,
    *,
    seed: int = SEED.default,  # noqa: ARG001
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Cut the rows into equal consecutive parts, without shuffling: the same for every seed.

    How much the clients differ is decided by the order of the rows in the files.

    >>> [rows.tolist() for rows in contiguous(torch.zeros(5), clients=2, min_rows=1).rows]
    [[0, 1, 2], [3, 4]]
    """
    _check_enough_rows(len(y), clients, min_rows)
    parts = torch.arange(len(y)).tensor_split(clients)
    return Parts(list(parts))


def group(
    y: Tensor,
    clients: int | None = None,
    *,
    group: Names | None,
    seed: int = SEED.default,  # noqa: ARG001
    min_rows: int = MIN_ROWS.default,
) -> Parts:
    """Make one client of each group of rows, in the order in which the groups first appear.

    Args:
        y: The labels or targets, of which only the number matters.
        clients: How many clients to make. If there are more groups, the largest are taken. None
            takes all.
        group: The name of the group of each row, [rows]. None raises InputError: the data set does
            not tell groups.
        seed: Ignored. It is here because every partition has it.
        min_rows: Groups with fewer rows are left out.

    >>> who = np.array(["Ulm", "Basel", "Ulm", "Graz", "Basel"])
    >>> parts = group(torch.zeros(5), group=who, min_rows=2)
    >>> parts.names, [rows.tolist() for rows in parts.rows]
    (('Ulm', 'Basel'), [[0, 2], [1, 4]])
    >>> parts.notes
    ('1 of 3 groups have fewer than min_rows=2 rows: 1 rows unused',)
    """
    names, owner = _owners(group, len(y))
    sizes = torch.bincount(owner, minlength=len(names))
    enough = sizes >= MIN_ROWS.check(min_rows)
    large = torch.nonzero(enough).flatten()
    kept = _largest(large, sizes, clients, min_rows)
    order = owner.argsort(stable=True)  # all rows, those of the same group side by side
    held = Held(order, starts(sizes.numpy()))
    kept_names = tuple(names[number] for number in kept.tolist())
    notes = _notes_on_unused(sizes, large, kept, min_rows)
    return Parts(held.only(kept), notes, kept_names)


def table(
    y: Tensor,
    clients: int,
    *,
    counts: Sequence[Sequence[int]],
    seed: int = SEED.default,
) -> Parts:
    """Give client i exactly counts[i][c] rows of label c, drawn at random.

    The seed decides which rows of a label a client gets, but not how many. `clients` must be the
    number of clients in the table. InputError if the data set has too few rows of a label; rows
    that the table does not need stay unused, and a note counts them.

    >>> y = torch.tensor([0, 0, 1, 1, 1])
    >>> parts = table(y, clients=2, counts=[[2, 0], [0, 3]])
    >>> [sorted(rows.tolist()) for rows in parts.rows]
    [[0, 1], [2, 3, 4]]
    """
    if clients != len(counts):
        raise InputError(
            f"clients must be {len(counts)}, the number in the table, got {clients}: leave it out"
        )
    held = _nothing_for(clients)
    used = 0
    for label, wanted in enumerate(zip(*counts, strict=True)):
        rows = _rows_with(y, label)
        total = sum(wanted)
        if len(rows) < total:
            raise InputError(
                f"the table needs {total} rows of label {label}, the data set has {len(rows)}: "
                "use the data set the table was made for, or a random partition"
            )
        used += total
        drawn = _shuffled(rows, seed, "table", label)[:total]
        pieces = drawn.split_with_sizes(wanted)
        for own, piece in zip(held, pieces, strict=True):
            own.append(piece)
    joined = [torch.cat(own) for own in held]
    if used == len(y):
        return Parts(joined)
    note = f"the table leaves {len(y) - used} of {len(y)} rows unused"
    return Parts(joined, (note,))


# ---- the registry ----

_FILE = files(__package__).joinpath("partitions.json")
TABLES: dict[str, list[list[int]]] = json.loads(_FILE.read_text())
"""The paper's tables by name: rows are clients, columns are labels."""

PARTITIONS: dict[str, Callable[..., Parts]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "classes": classes,
    "quantity": quantity,
    "shards": shards,
    "contiguous": contiguous,
    "group": group,
    **{name: partial(table, counts=counts) for name, counts in TABLES.items()},
}
"""All partitions by name."""

PARTITION = Option(
    "partition",
    str,
    None,
    "How rows are split over the clients. By default the data set's own partition.",
    choices=tuple(PARTITIONS),
    also=("split", "partitioner", "partition_method", "distribution"),
)


def options_of(name: str) -> list[str]:
    """The names of the options that a partition takes, beside the number of clients and the seed.

    >>> options_of("dirichlet")
    ['concentration', 'min_rows']
    """
    partition = PARTITIONS[one_of("partition", name, PARTITIONS)]
    parameters = inspect.signature(partition).parameters
    # What the caller fills in by itself, and what is fixed in a table of the paper.
    hidden = {"y", "clients", "seed", "counts", "group"}
    return [name for name in parameters if name not in hidden]


# ---- checks ----


def _check_enough_rows(rows: int, clients: int, min_rows: int) -> None:
    """Raise InputError if there are too few rows to give each client `min_rows` of them."""
    needed = CLIENTS.check(clients) * MIN_ROWS.check(min_rows)
    if needed > rows:
        raise InputError(
            f"{clients} clients with min_rows={min_rows} need {needed} rows, there are {rows}: "
            f"use at most {rows // min_rows} clients, or a smaller min_rows"
        )


def _check_labels(y: Tensor, name: str) -> None:
    """Raise InputError if y holds real targets, where a partition needs labels."""
    if y.is_floating_point():
        raise InputError(
            f"partition {name!r} needs class labels, y has dtype {y.dtype}: use 'iid', 'quantity' "
            f"or 'contiguous'"
        )


def _labels(y: Tensor, name: str) -> list[int]:
    """The labels that occur in y, in rising order."""
    _check_labels(y, name)
    found = set(y.tolist())
    return sorted(found)


# ---- groups ----


def _owners(group: Names | None, rows: int) -> tuple[list[str], Tensor]:
    """The names of the groups, in the order of first appearance, and each row's group number."""
    if group is None:
        others = sorted(PARTITIONS.keys() - {"group", *TABLES})
        raise InputError(
            f"partition 'group' needs the group of each row, which these data do not give: choose "
            f"from {', '.join(others)}"
        )
    if len(group) != rows:
        raise InputError(
            f"group must name the group of each of {rows} rows, got {len(group)} names"
        )
    if group.dtype.kind in "iu":
        return _numbered(group)
    name_of_row = list(map(str, group.tolist()))
    names = list(dict.fromkeys(name_of_row))
    number_of = {name: number for number, name in enumerate(names)}
    number_of_row = [number_of[name] for name in name_of_row]
    return names, torch.tensor(number_of_row)


def _numbered(group: Names) -> tuple[list[str], Tensor]:
    """The same for groups that are integers, of which there may be a million."""
    found, first, owner = np.unique(group, return_index=True, return_inverse=True)
    appearance = first.argsort()
    number = np.empty_like(appearance)
    number[appearance] = np.arange(len(appearance))
    names = list(map(str, found[appearance].tolist()))
    return names, torch.from_numpy(number[owner])


def _largest(
    large: Tensor,
    sizes: Tensor,
    clients: int | None,
    min_rows: int,
) -> Tensor:
    """The numbers of the groups that become clients, in rising order.

    `large` are the groups with enough rows. If fewer clients are wanted, the largest groups win;
    among groups of the same size, those that appear first.
    """
    if not len(large):
        most = max(sizes.tolist(), default=0)
        raise InputError(
            f"no group has min_rows={min_rows} rows, the largest has {most}: use min_rows <= {most}"
        )
    if clients is not None and CLIENTS.check(clients) > len(large):
        raise InputError(
            f"there are {len(large)} groups with min_rows={min_rows} rows, got clients={clients}: "
            f"use at most {len(large)} clients, or a smaller min_rows"
        )
    by_size = sizes[large].argsort(descending=True, stable=True)
    chosen = large[by_size[:clients]]
    return chosen.sort().values


def _notes_on_unused(
    sizes: Tensor,
    large: Tensor,
    kept: Tensor,
    min_rows: int,
) -> tuple[str, ...]:
    """Say how many rows belong to groups that are too small, or that were not taken."""
    total = int(sizes.sum())
    in_large = int(sizes[large].sum())
    in_kept = int(sizes[kept].sum())
    too_small = total - in_large
    not_taken = in_large - in_kept
    notes = []
    if too_small:
        small = len(sizes) - len(large)
        groups = f"{small} of {len(sizes)} groups have fewer than min_rows={min_rows} rows"
        notes.append(f"{groups}: {too_small} rows unused")
    if not_taken:
        groups = f"the clients are the {len(kept)} largest of {len(large)} groups"
        notes.append(f"{groups}: {not_taken} rows unused")
    return tuple(notes)


# ---- draws ----


def _nothing_for(clients: int) -> Pieces:
    """An empty list of pieces for each client."""
    return [[] for _ in range(clients)]


def _rows_with(y: Tensor, label: int) -> Tensor:
    """The indices of the rows that have a label."""
    return torch.nonzero(y == label).flatten()


def _shuffled(rows: Tensor, seed: int, *purpose: str | int) -> Tensor:
    """The rows in a random order, which depends on the seed and the purpose alone."""
    draw = generator(seed, "partition", *purpose)
    order = torch.randperm(len(rows), generator=draw)
    return rows[order]


def _shares(
    clients: int,
    concentration: float,
    seed: int,
    *purpose: str | int,
) -> Tensor:
    """One Dirichlet draw: the share of each client, float64 [clients], summing to 1.

    It comes from numpy, because torch can draw gammas from its global generator only.
    """
    CONCENTRATION.check(concentration)
    own_seed = key(seed, "partition", "shares", *purpose)
    numbers = np.random.default_rng(own_seed)
    shares = numbers.dirichlet([concentration] * clients)
    return torch.from_numpy(shares)


def _cut(rows: Tensor, share: Tensor) -> list[Tensor]:
    """Cut rows into consecutive pieces of the given shares.

    The places of the cuts are rounded, not the sizes of the pieces, so that no row is lost.
    """
    ends = share.cumsum(0)[:-1] * len(rows)
    cuts = ends.round().long().tolist()
    pieces = []
    for start, end in pairwise([0, *cuts, len(rows)]):
        pieces.append(rows[start:end])
    return pieces


def _holders(
    labels: int,
    clients: int,
    k: int,
    seed: int,
) -> list[list[int]]:
    """Choose the clients that hold each class: for each of `labels` classes a list of clients.

    The clients choose in turn. Each one takes the k classes that have the fewest holders so far;
    random numbers between 0 and 1 break ties.
    """
    if not 1 <= integer("classes_per_client", k) <= labels:
        raise InputError(
            f"classes_per_client must be in 1..{labels}, the classes there are, got {k}"
        )
    if clients * k < labels:
        raise InputError(
            f"{clients} clients with {k} classes each cannot hold all {labels} classes: use "
            f"classes_per_client >= {math.ceil(labels / clients)}, or at least "
            f"{math.ceil(labels / k)} clients"
        )
    draw = generator(seed, "partition", "holders")
    ties = torch.rand(clients, labels, generator=draw)
    holders: list[list[int]] = [[] for _ in range(labels)]
    for client in range(clients):
        counts = torch.tensor([len(own) for own in holders])
        # Counts are whole numbers and ties are below 1, so ties never outweigh a count.
        fewest = (counts + ties[client]).argsort()[:k]
        for label in fewest.tolist():
            holders[label].append(client)
    return holders


def _merge(held: Pieces, seed: int) -> list[Tensor]:
    """Join and shuffle the pieces of each client, so that rows from its end are a fair sample.

    `_with_at_least` takes rows from the end of a large client. Unshuffled, these would all have
    the last label.
    """
    merged = []
    for client, pieces in enumerate(held):
        rows = torch.cat(pieces)
        merged.append(_shuffled(rows, seed, "merge", client))
    return merged


def _with_at_least(rows: list[Tensor], min_rows: int) -> Parts:
    """Fill every client up to `min_rows` rows, with rows from the client that is largest then.

    A heap keeps the largest client at hand, so that thousands of small clients are filled quickly.
    A client never gives away so many rows that it would have fewer than `min_rows` itself.
    """
    rows = list(rows)
    largest = [(-len(own), client) for client, own in enumerate(rows)]
    heapify(largest)
    moved = 0
    filled = 0
    for client, own in enumerate(rows):
        missing = min_rows - len(own)
        if missing <= 0:
            continue
        filled += 1
        moved += missing
        while missing > 0:
            rich = largest[0][1]
            left = len(rows[rich]) - missing
            left = max(left, min_rows)
            given = rows[rich][left:]
            rows[client] = torch.cat([rows[client], given])
            rows[rich] = rows[rich][:left]
            missing -= len(given)
            # The client that is filled up keeps its old size in the heap. Its new size, min_rows,
            # is not the largest as long as another client has too few rows.
            heapreplace(largest, (-left, rich))
    if not moved:
        return Parts(rows)
    clients = f"{filled} clients have min_rows={min_rows}"
    note = f"{moved} rows moved from the largest clients so that {clients}"
    return Parts(rows, (note,))
