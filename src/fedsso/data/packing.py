"""Which client holds which rows, as tensors of row numbers.

The rows of all clients lie in one tensor, client after client, and a second tensor tells where each
client begins. The functions here make these tensors, and count with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..support.shuffle import shuffled
from .arrays import Array, as_array, dense

Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Held(Sequence[Tensor]):
    """The rows of each client, as a sequence of tensors that takes no object for each client.

    >>> held = pack([torch.tensor([4, 2]), torch.tensor([7])])
    >>> len(held), held[1]
    (2, tensor([7]))
    """

    rows: Tensor  # row numbers, int64 [rows], client after client
    start: Tensor  # int64 [clients + 1], where each client begins, and the number of rows

    def __len__(self) -> int:
        return len(self.start) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(len(self))[client]]
        i = range(len(self))[client]
        return self.rows[int(self.start[i]) : int(self.start[i + 1])]

    def only(self, clients: Tensor) -> Held:
        """The rows of some clients, in the order of their numbers, which rise."""
        sizes = self.start.diff()
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[clients] = True
        kept = chosen.repeat_interleave(sizes)
        return Held(self.rows[kept], starts(sizes[clients].numpy()))


def split(held: Held, test_fraction: float, seed: int) -> tuple[Held, Held]:
    """Split each client's rows into (training rows, test rows), after shuffling them.

    Every client has a draw of its own, which depends on the seed and on the client's number. At
    least one row is for training. So the split of a client does not depend on the rows of the
    others.
    """
    start = held.start.cpu().numpy()
    rows = shuffled(held.rows.cpu().numpy(), start, seed, "split")
    sizes = np.diff(start)
    wanted = np.rint(test_fraction * sizes).astype(np.int64)
    cut = np.minimum(wanted, sizes - 1)
    # A client's first rows are for testing, as many as its cut.
    first = start[:-1][cut > 0]
    change = np.zeros(len(rows), np.int8)
    change[first] = 1
    change[first + cut[cut > 0]] = -1
    is_test = np.cumsum(change, dtype=np.int8).view(bool)
    train = Held(torch.from_numpy(rows[~is_test]), starts(sizes - cut))
    return train, Held(torch.from_numpy(rows[is_test]), starts(cut))


def starts(sizes: Array) -> Tensor:
    """Where each of several parts begins, and where the last one ends."""
    start = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=start[1:])
    return torch.from_numpy(start)


def pack(parts: Sequence[Tensor]) -> Held:
    """Join the clients' rows in one tensor, and tell where each client begins in it.

    >>> pack([torch.tensor([4, 2]), torch.tensor([7])])
    Held(rows=tensor([4, 2, 7]), start=tensor([0, 2, 3]))
    """
    sizes = np.array([len(part) for part in parts], np.int64)
    return Held(torch.cat(list(parts)), starts(sizes))


def in_order(sizes: Sequence[int]) -> Held:
    """The rows of clients that come one after the other, each with so many of them.

    >>> in_order([2, 1])
    Held(rows=tensor([0, 1, 2]), start=tensor([0, 2, 3]))
    """
    start = starts(np.array(sizes, np.int64))
    return Held(torch.arange(int(start[-1])), start)


def count_labels(
    y: Tensor,
    rows: Tensor,
    start: Tensor,
    classes: int,
) -> Tensor:
    """Count the rows of each label that each client holds, int64 [clients, classes].

    `rows` and `start` are what `pack` returns.
    """
    clients = len(start) - 1
    numbers = torch.arange(clients, device=rows.device)
    owner = numbers.repeat_interleave(start.diff())
    cell = owner * classes + y[rows]
    counts = torch.bincount(cell, minlength=clients * classes)
    return counts.view(clients, classes)


def rows_by_client(client_of_row: Any, total: int) -> tuple[Names, Held]:
    """Return the clients' names in sorted order, and the rows of each in the order of the data.

    `client_of_row` has one integer or one name for each of `total` rows.

    >>> rows_by_client(["Ulm", "Graz", "Ulm"], 3)
    (('Graz', 'Ulm'), Held(rows=tensor([1, 0, 2]), start=tensor([0, 1, 3])))
    """
    ids = as_array(client_of_row, "client_of_row")
    if ids.shape != (total,):
        raise InputError(
            f"client_of_row has shape {ids.shape}, need one entry for each of {total} rows"
        )
    if ids.dtype.kind == "O":
        only_names = all(isinstance(name, str) for name in ids)
        ids = ids.astype(str) if only_names else ids
    if ids.dtype.kind not in "iuU":
        raise InputError(f"client_of_row must hold integers or names, got dtype {ids.dtype}")
    ordered, rows = _sorted(ids)
    is_first = np.ones(total, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    begin = np.flatnonzero(is_first)
    names = tuple(map(str, ordered[begin].tolist()))
    start = torch.from_numpy(np.append(begin, total))
    return names, Held(rows, start)


def _sorted(ids: Array) -> tuple[Array, Tensor]:
    """The ids in ascending order, and the row of each; equal ones in the order of their rows.

    Torch sorts integers by their digits, several times faster than numpy does by comparing.
    """
    if ids.dtype.kind == "U" or ids.dtype == np.uint64:
        order = ids.argsort(kind="stable")
        return ids[order], torch.from_numpy(order)
    numbers = np.require(ids, np.int64, ["C", "W"])  # torch cannot share others
    found = torch.sort(torch.from_numpy(numbers), stable=True)
    return found.values.numpy(), found.indices


def masks_by_client(group: Array) -> tuple[Names, list[Tensor]]:
    """Return the clients' names in the order of their first rows, and a mask of each one's rows.

    `group` is an array with the name of the client of each row.

    >>> masks_by_client(np.array(["Ulm", "Graz", "Ulm"]))[0]
    ('Ulm', 'Graz')
    """
    names = dict.fromkeys(group.tolist())
    masks = []
    for name in names:
        mask = torch.from_numpy(group == name)
        masks.append(mask)
    return tuple(names), masks


# ---- lists of row numbers from users ----


def checked_rows(given: Sequence[Any], total: int) -> Held:
    """Return the rows that a user lists for each client, of `total` rows.

    Raises:
        InputError: A list is empty or holds something else than row numbers, or a row is in two
            lists. The message names the client.
    """
    if not given:
        raise InputError("the federation is empty: got 0 clients, need at least 1")
    parts = []
    for client, rows in enumerate(given):
        is_plain = isinstance(rows, Tensor) and rows.dtype == torch.int64 and rows.ndim == 1
        known = is_plain and len(rows) > 0 and rows.device.type == "cpu"
        parts.append(rows if known else checked_indices(rows, total, client))
    held = pack(parts)
    low, high = held.rows.aminmax()
    if int(low) < 0 or int(high) >= total:
        for client, rows in enumerate(parts):
            checked_indices(rows, total, client)
    _check_held_once(held, total)
    return held


def checked_indices(rows: Any, total: int, client: int) -> Tensor:
    """Return the rows of a client as int64 indices.

    Args:
        rows: The list of indices, from 0 to total - 1, or a mask of `total` booleans.
        total: The number of rows of all clients.
        client: The number of the client, for the error.

    >>> checked_indices([True, False, True], 3, client=0)
    tensor([0, 2])
    """
    what = f"rows of client {client}"
    own = dense(rows, what)
    is_mask = own.dtype == torch.bool
    if is_mask and own.shape == (total,):
        own = own.nonzero().flatten()
        is_mask = False
    if not len(own):
        raise InputError(
            f"client {client} has no training rows: leave it out, or use fewer clients"
        )
    if own.ndim != 1 or is_mask or own.is_floating_point():
        got = f"{own.dtype} of shape {tuple(own.shape)}"
        raise InputError(
            f"{what} must be a list of integers, or a mask of {total} booleans, got {got}"
        )
    own = own.long()
    low = int(own.min())
    high = int(own.max())
    if low < 0 or high >= total:
        last = total - 1
        raise InputError(f"{what} must be in 0..{last}, got {low}..{high}")
    return own


def _check_held_once(held: Held, total: int) -> None:
    """Raise InputError if two clients hold the same row, or one client holds it twice."""
    seen = torch.zeros(total, dtype=torch.bool)
    seen[held.rows] = True
    if int(seen.sum()) == len(held.rows):
        return
    row = int(torch.bincount(held.rows, minlength=total).argmax())
    places = (held.rows == row).nonzero().flatten()
    holders = (torch.searchsorted(held.start, places, right=True) - 1).tolist()
    some = holders[:4]
    raise InputError(
        f"row {row} is listed {len(holders)} times, by clients {some}, need once at most: "
        "drop the repeats, or copy the row in x and y"
    )
