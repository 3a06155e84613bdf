"""Who holds which rows: partitions of a pooled data set, each a pure function of (labels, clients,
seed).

iid, dirichlet, classes, quantity and shards draw by the seed; contiguous cuts the rows in the order
of the data, as the paper does with text; these use every row exactly once and give each client at
least `min_rows` rows: where the draw gives fewer, rows move from the largest client, and a note
says how many. group makes a client of each hospital, user or speaker with `min_rows` rows; a note
counts the rows left out. The tables are the label counts behind the paper's results: `paper-20` and
`paper-3` for MNIST, `paper-fashion-3` for Fashion-MNIST (its "EMNIST").
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heapreplace
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, integer, number, one_of
from ..support.rng import generator, key


class Parts(NamedTuple):
    """The rows of each client, what was done to keep the promises, and the clients' names where
    they have any."""

    rows: list[Tensor]
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def iid(y: Tensor, clients: int, *, seed: int = 0, min_rows: int = 8) -> Parts:
    """Equal shares of the shuffled rows."""
    _feasible(len(y), clients, min_rows)
    return Parts(list(_shuffled(torch.arange(len(y)), seed, "iid").tensor_split(clients)))


def dirichlet(
    y: Tensor, clients: int, *, concentration: float = 0.5, seed: int = 0, min_rows: int = 8
) -> Parts:
    """Label skew: each label's rows are shared out by a Dirichlet(concentration) draw; small means
    skewed."""
    _feasible(len(y), clients, min_rows)
    held: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in _labels(y, "dirichlet"):
        rows = _shuffled(torch.nonzero(y == label).flatten(), seed, "dirichlet", label)
        share = _shares(clients, concentration, seed, "dirichlet", label)
        for own, piece in zip(held, _cut(rows, share), strict=True):
            own.append(piece)
    return _at_least(_merge(held, seed), min_rows)


def classes(
    y: Tensor, clients: int, *, classes_per_client: int = 2, seed: int = 0, min_rows: int = 8
) -> Parts:
    """Each client holds k classes; a class is shared equally by its holders, about clients * k /
    classes."""
    _feasible(len(y), clients, min_rows)
    labels = _labels(y, "classes")
    holders = _holders(len(labels), clients, classes_per_client, seed)
    held: list[list[Tensor]] = [[] for _ in range(clients)]
    for label, own in zip(labels, holders, strict=True):
        rows = _shuffled(torch.nonzero(y == label).flatten(), seed, "classes", label)
        for client, piece in zip(own, rows.tensor_split(len(own)), strict=True):
            held[client].append(piece)
    return _at_least(_merge(held, seed), min_rows)


def quantity(
    y: Tensor, clients: int, *, concentration: float = 0.5, seed: int = 0, min_rows: int = 8
) -> Parts:
    """Size skew: shares of the shuffled rows by one Dirichlet(concentration) draw; labels stay
    mixed."""
    _feasible(len(y), clients, min_rows)
    share = _shares(clients, concentration, seed, "quantity")
    return _at_least(_cut(_shuffled(torch.arange(len(y)), seed, "quantity"), share), min_rows)


def shards(
    y: Tensor, clients: int, *, shards_per_client: int = 2, seed: int = 0, min_rows: int = 8
) -> Parts:
    """Few labels each: rows sorted by label are cut into equal shards, dealt out at random (McMahan
    et al. 2017)."""
    _feasible(len(y), clients, min_rows)
    total = clients * integer("shards_per_client", shards_per_client, 1)
    if total > len(y):
        raise InputError(
            f"{clients} clients with shards_per_client={shards_per_client} need {total} rows, "
            f"there are {len(y)}: "
            f"use shards_per_client <= {len(y) // clients}, or fewer clients"
        )
    _whole(y, "shards")
    pieces = y.argsort(stable=True).tensor_split(total)
    dealt = _shuffled(torch.arange(total), seed, "shards").view(clients, -1).tolist()
    return _at_least(_merge([[pieces[i] for i in own] for own in dealt], seed), min_rows)


def contiguous(y: Tensor, clients: int, *, seed: int = 0, min_rows: int = 8) -> Parts:  # noqa: ARG001
    """Equal consecutive parts in the order of the data, nothing shuffled: the same for every seed."""
    _feasible(len(y), clients, min_rows)
    return Parts(list(torch.arange(len(y)).tensor_split(clients)))


def group(
    y: Tensor,
    clients: int | None = None,
    *,
    group: np.ndarray[Any, Any] | None,
    seed: int = 0,  # noqa: ARG001
    min_rows: int = 8,
) -> Parts:
    """One client for each group, in the order of first appearance; fewer clients than groups: the
    largest ones."""
    names, owner = _owners(group, len(y))
    sizes = torch.bincount(owner, minlength=len(names))
    large = torch.nonzero(sizes >= integer("min_rows", min_rows, 1)).flatten()
    kept = _largest(large, sizes, clients, min_rows)
    ends, order = sizes.cumsum(0), owner.argsort(stable=True)
    rows = [order[int(ends[i] - sizes[i]) : int(ends[i])] for i in kept.tolist()]
    return Parts(
        rows, _unused(sizes, large, kept, min_rows), tuple(names[i] for i in kept.tolist())
    )


def table(y: Tensor, clients: int, *, counts: Sequence[Sequence[int]], seed: int = 0) -> Parts:
    """Client i holds exactly counts[i][c] rows of label c."""
    if clients != len(counts):
        raise InputError(
            f"clients must be {len(counts)}, the number in the table, got {clients}: leave it out"
        )
    held: list[list[Tensor]] = [[] for _ in counts]
    for label, wanted in enumerate(zip(*counts, strict=True)):
        rows = torch.nonzero(y == label).flatten()
        if len(rows) < sum(wanted):
            raise InputError(
                f"the table needs {sum(wanted)} rows of label {label}, the data set has "
                f"{len(rows)}: "
                "use the data set the table was made for, or a random partition"
            )
        rows = _shuffled(rows, seed, "table", label)[: sum(wanted)]
        for own, piece in zip(held, rows.split_with_sizes(wanted), strict=True):
            own.append(piece)
    used = sum(map(sum, counts))
    notes = () if used == len(y) else (f"the table leaves {len(y) - used} of {len(y)} rows unused",)
    return Parts([torch.cat(own) for own in held], notes)


TABLES: dict[str, list[list[int]]] = json.loads(
    files(__package__).joinpath("partitions.json").read_text()
)

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


def options_of(name: str) -> list[str]:
    """The options a partition takes, by name."""
    partition = PARTITIONS[one_of("partition", name, PARTITIONS)]
    hidden = {"y", "clients", "seed", "counts", "group"}
    return [option for option in inspect.signature(partition).parameters if option not in hidden]


def _feasible(rows: int, clients: int, min_rows: int) -> None:
    if integer("clients", clients, 1) * integer("min_rows", min_rows, 1) > rows:
        raise InputError(
            f"{clients} clients with min_rows={min_rows} need {clients * min_rows} rows, there are "
            f"{rows}: "
            f"use at most {rows // min_rows} clients, or a smaller min_rows"
        )


def _whole(y: Tensor, name: str) -> None:
    if y.is_floating_point():
        raise InputError(
            f"partition {name!r} needs class labels, y has dtype {y.dtype}: use 'iid', 'quantity' "
            f"or 'contiguous'"
        )


def _labels(y: Tensor, name: str) -> list[int]:
    _whole(y, name)
    return sorted(set(y.tolist()))


def _owners(group: np.ndarray[Any, Any] | None, rows: int) -> tuple[list[str], Tensor]:
    """The names of the groups in the order of first appearance, and the number of each row's group."""
    if group is None:
        others = ", ".join(sorted(name for name in PARTITIONS if name not in {"group", *TABLES}))
        raise InputError(
            f"partition 'group' needs the group of each row, which these data do not give: choose "
            f"from {others}"
        )
    if len(group) != rows:
        raise InputError(
            f"group must name the group of each of {rows} rows, got {len(group)} names"
        )
    held = list(map(str, group.tolist()))
    number_of = {name: i for i, name in enumerate(dict.fromkeys(held))}
    return list(number_of), torch.tensor([number_of[name] for name in held])


def _largest(large: Tensor, sizes: Tensor, clients: int | None, min_rows: int) -> Tensor:
    """The numbers of the largest groups, in order; of equal ones those that appear first."""
    if not len(large):
        most = max(sizes.tolist(), default=0)
        raise InputError(
            f"no group has min_rows={min_rows} rows, the largest has {most}: use min_rows <= {most}"
        )
    if clients is not None and integer("clients", clients, 1) > len(large):
        raise InputError(
            f"there are {len(large)} groups with min_rows={min_rows} rows, got clients={clients}: "
            f"use at most {len(large)} clients, or a smaller min_rows"
        )
    return large[sizes[large].argsort(descending=True, stable=True)[:clients]].sort().values


def _unused(sizes: Tensor, large: Tensor, kept: Tensor, min_rows: int) -> tuple[str, ...]:
    """Notes on the groups that are no client, and on their rows."""
    total, held, used = int(sizes.sum()), int(sizes[large].sum()), int(sizes[kept].sum())
    small = (
        f"{len(sizes) - len(large)} of {len(sizes)} groups have fewer than min_rows={min_rows} rows"
    )
    rest = f"the clients are the {len(kept)} largest of {len(large)} groups"
    return tuple(
        f"{what}: {n} rows unused" for what, n in ((small, total - held), (rest, held - used)) if n
    )


def _shuffled(rows: Tensor, seed: int, *purpose: str | int) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator(seed, "partition", *purpose))]


def _shares(clients: int, concentration: float, seed: int, *purpose: str | int) -> Tensor:
    """One Dirichlet draw; numpy's, because torch draws gammas from the global generator only."""
    if not 0 < number("concentration", concentration) <= 1e9:
        raise InputError(
            f"concentration must be > 0 and <= 1e9, got {concentration}; 0.1 is skewed, 100 nearly "
            f"even"
        )
    numbers = np.random.default_rng(key(seed, "partition", "shares", *purpose))
    return torch.from_numpy(numbers.dirichlet([concentration] * clients))


def _cut(rows: Tensor, share: Tensor) -> list[Tensor]:
    """Consecutive pieces in the given proportions; rounding the cuts, not the pieces, loses no row."""
    cuts = (share.cumsum(0)[:-1] * len(rows)).round().long().tolist()
    return [rows[a:b] for a, b in pairwise([0, *cuts, len(rows)])]


def _holders(labels: int, clients: int, k: int, seed: int) -> list[list[int]]:
    """The clients that hold each class: every client takes the k least-held ones, ties broken by
    the draw."""
    if not 1 <= integer("classes_per_client", k) <= labels:
        raise InputError(
            f"classes_per_client must be in 1..{labels}, the classes there are, got {k}"
        )
    if clients * k < labels:
        raise InputError(
            f"{clients} clients with {k} classes each cannot hold all {labels} classes: "
            f"use classes_per_client >= {-(-labels // clients)}, or at least {-(-labels // k)} "
            f"clients"
        )
    ties = torch.rand(clients, labels, generator=generator(seed, "partition", "holders"))
    holders: list[list[int]] = [[] for _ in range(labels)]
    for client in range(clients):
        held = torch.tensor([len(own) for own in holders])
        for label in (held + ties[client]).argsort()[:k].tolist():
            holders[label].append(client)
    return holders


def _merge(held: list[list[Tensor]], seed: int) -> list[Tensor]:
    """Each client's rows in one shuffled array, so that rows taken from its end are a fair sample."""
    return [_shuffled(torch.cat(own), seed, "merge", i) for i, own in enumerate(held)]


def _at_least(rows: list[Tensor], min_rows: int) -> Parts:
    """Fill clients up to min_rows from whoever is largest at the time."""
    rows, sizes = list(rows), [len(own) for own in rows]
    poor = [i for i, n in enumerate(sizes) if n < min_rows]
    moved = sum(min_rows - sizes[i] for i in poor)
    richest = [(-n, i) for i, n in enumerate(sizes)]
    heapify(richest)
    for i in poor:
        while sizes[i] < min_rows:
            rich = richest[0][1]
            n = min(min_rows - sizes[i], sizes[rich] - min_rows)
            rows[i], rows[rich] = torch.cat([rows[i], rows[rich][-n:]]), rows[rich][:-n]
            sizes[i], sizes[rich] = sizes[i] + n, sizes[rich] - n
            heapreplace(richest, (-sizes[rich], rich))
    note = f"{moved} rows moved from the largest clients so that {len(poor)} clients have min_rows={min_rows}"
    return Parts(rows, (note,) if moved else ())
