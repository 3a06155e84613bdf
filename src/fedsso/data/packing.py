"""Which client holds which rows, as tensors of row numbers.

The rows of all clients lie in one tensor, client after client, and a second tensor tells where each
client begins. The functions here make these tensors, and count with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..support.rng import generator
from .arrays import Array, as_array, dense

Names = tuple[str, ...]


def split(
    rows: Sequence[Tensor],
    test_fraction: float,
    seed: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Split each client's rows into (training rows, test rows), after shuffling them.

    Every client has a draw of its own, which depends on the seed and on the client's number. At
    least one row is for training. So the split of a client does not depend on the rows of the
    others.
    """
    train = []
    test = []
    for client, own in enumerate(rows):
        count = len(own)
        draw = generator(seed, "split", client)
        order = torch.randperm(count, generator=draw)
        shuffled = own[order]
        wanted = round(test_fraction * count)
        cut = min(wanted, count - 1)
        test.append(shuffled[:cut])
        train.append(shuffled[cut:])
    return train, test


def pack(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the clients' rows in one tensor, and tell where each client begins in it.

    >>> pack([torch.tensor([4, 2]), torch.tensor([7])])
    (tensor([4, 2, 7]), tensor([0, 2, 3]))
    """
    sizes = [len(part) for part in parts]
    start = torch.tensor([0, *sizes]).cumsum(0)
    return torch.cat(list(parts)), start


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


def rows_by_client(client_of_row: Any, total: int) -> tuple[Names, list[Tensor]]:
    """Return the clients' names in sorted order, and the rows of each in the order of the data.

    `client_of_row` has one integer or one name for each of `total` rows.

    >>> rows_by_client(["Ulm", "Graz", "Ulm"], 3)
    (('Graz', 'Ulm'), [tensor([1]), tensor([0, 2])])
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
    names, owner, sizes = np.unique(
        ids,
        return_inverse=True,
        return_counts=True,
    )
    order = owner.argsort(kind="stable")
    rows = torch.from_numpy(order).split_with_sizes(sizes.tolist())
    return tuple(map(str, names)), list(rows)


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


def check_held_once(held: Sequence[Tensor], total: int) -> None:
    """Raise InputError if two clients hold the same row, or one client holds it twice."""
    if not held:
        raise InputError("the federation is empty: got 0 clients, need at least 1")
    rows = torch.cat(list(held))
    times = torch.bincount(rows, minlength=total)
    if times.max() <= 1:
        return
    row = int(times.argmax())
    holders: list[int] = []
    for client, own in enumerate(held):
        count = int((own == row).sum())
        holders.extend([client] * count)
    some = holders[:4]
    raise InputError(
        f"row {row} is listed {len(holders)} times, by clients {some}, need once at most: "
        "drop the repeats, or copy the row in x and y"
    )
