"""Partitions keep their promises: every row once, min_rows, purity, exact tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsso.data.federation import label_skew
from fedsso.data.partition import (
    PARTITIONS,
    TABLES,
    Parts,
    classes,
    contiguous,
    dirichlet,
    group,
    iid,
    options_of,
    quantity,
    shards,
    table,
)
from fedsso.errors import InputError

RANDOM = ["iid", "dirichlet", "classes", "quantity", "shards"]
WHOLE = [*RANDOM, "contiguous"]  # use every row
NAMES = np.array(["Basel", "Ulm", "Basel", "Graz", "Ulm", "Basel", "Linz", "Graz", "Basel"])


def labels(rows: int, kinds: int = 4) -> Tensor:
    return torch.arange(rows) * 7 % kinds


def counts(y: Tensor, rows: list[Tensor]) -> Tensor:
    return torch.stack([torch.bincount(y[own], minlength=int(y.max()) + 1) for own in rows])


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(WHOLE),
    rows=st.integers(40, 300),
    clients=st.integers(2, 12),
    seed=st.integers(0, 2**40),
    min_rows=st.integers(1, 3),
)
def test_partitions_use_every_row_once_and_keep_min_rows(
    name: str, rows: int, clients: int, seed: int, min_rows: int
) -> None:
    parts = PARTITIONS[name](labels(rows), clients, seed=seed, min_rows=min_rows)
    assert len(parts.rows) == clients
    assert torch.equal(torch.cat(parts.rows).sort().values, torch.arange(rows))
    assert min(map(len, parts.rows)) >= min_rows


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(RANDOM), seed=st.integers(0, 2**40))
def test_a_partition_is_a_pure_function_of_its_arguments(name: str, seed: int) -> None:
    y = labels(200)
    before = y.clone()
    state = torch.get_rng_state()
    first = PARTITIONS[name](y, 8, seed=seed, min_rows=2)
    torch.rand(3)
    second = PARTITIONS[name](y, 8, seed=seed, min_rows=2)
    torch.set_rng_state(state)
    PARTITIONS[name](y, 8, seed=seed, min_rows=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(y, before)
    assert all(torch.equal(a, b) for a, b in zip(first.rows, second.rows, strict=True))
    other = PARTITIONS[name](y, 8, seed=seed + 1, min_rows=2)
    assert not torch.equal(torch.cat(first.rows), torch.cat(other.rows))


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = [len(own) for own in iid(labels(103), 10, seed=3).rows]
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_a_small_concentration_skews_labels_and_a_large_one_does_not() -> None:
    y = labels(4000)
    parts = [dirichlet(y, 10, concentration=c, seed=1) for c in (0.05, 0.5, 1000.0)]
    skew = [float(label_skew(counts(y, part.rows)).mean()) for part in parts]
    assert skew[0] > skew[1] > skew[2]
    assert skew[0] > 0.5
    assert skew[2] < 0.05


def test_quantity_skews_sizes_but_not_labels() -> None:
    y = labels(4000)
    parts = quantity(y, 5, concentration=0.3, seed=0, min_rows=200)
    sizes = sorted(map(len, parts.rows))
    assert sizes[-1] > 5 * sizes[0]
    assert label_skew(counts(y, parts.rows)).mean() < 0.06


def test_classes_gives_k_classes_to_each_client_and_equal_shares_to_the_holders() -> None:
    y = labels(1000, 10)
    held = counts(y, classes(y, 15, classes_per_client=2, seed=5).rows)
    assert ((held > 0).sum(1) == 2).all()
    assert ((held > 0).sum(0) == 3).all()
    assert set(held[held > 0].tolist()) <= {33, 34}


@pytest.mark.parametrize("shards_per_client", [1, 2, 5])
def test_shards_hold_few_labels_in_equal_parts(shards_per_client: int) -> None:
    y = labels(1000, 10)
    held = counts(y, shards(y, 20, shards_per_client=shards_per_client, seed=2).rows)
    assert (held.sum(1) == 50).all()
    assert (
        (held > 0).sum(1) <= shards_per_client
    ).all()  # 10 classes fill 20, 40, 100 shards exactly
    assert set(held[held > 0].tolist()) <= {
        n * 50 // shards_per_client for n in range(1, shards_per_client + 1)
    }


def test_one_shard_each_is_a_piece_of_the_sorted_rows() -> None:
    y = torch.tensor([1, 0, 1, 0, 1, 0])
    parts = shards(y, 3, shards_per_client=1, seed=0, min_rows=1)
    assert sorted(sorted(own.tolist()) for own in parts.rows) == [[0, 5], [1, 3], [2, 4]]


def test_shards_smaller_than_a_row_are_an_error_with_a_remedy() -> None:
    with pytest.raises(InputError, match=r"120 rows.*100.*shards_per_client <= 10"):
        shards(labels(100), 10, shards_per_client=12)
    assert min(map(len, shards(labels(100), 10, shards_per_client=10).rows)) == 10


def test_uneven_shards_are_filled_up_to_min_rows() -> None:
    parts = [
        shards(labels(51), 10, seed=seed, min_rows=5) for seed in range(20)
    ]  # shards of 2 and 3 rows
    assert {min(map(len, own.rows)) for own in parts} == {5}
    assert any("rows moved" in note for own in parts for note in own.notes)


def test_contiguous_keeps_the_order_of_the_data_whatever_the_seed() -> None:
    parts = contiguous(labels(10), 3, seed=7, min_rows=3)
    assert [own.tolist() for own in parts.rows] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert parts == Parts(parts.rows)


def by_group(
    clients: int | None = None, *, names: np.ndarray[Any, Any] | None = NAMES, **options: Any
) -> Parts:
    return group(labels(9), clients, group=names, **{"min_rows": 1, **options})


@pytest.mark.parametrize("kind", [str, object])
def test_each_group_is_a_client_in_the_order_of_first_appearance(kind: type) -> None:
    parts = by_group(names=NAMES.astype(kind))
    assert parts.names == ("Basel", "Ulm", "Graz", "Linz")
    assert [own.tolist() for own in parts.rows] == [[0, 2, 5, 8], [1, 4], [3, 7], [6]]
    assert parts.notes == ()


def test_small_groups_are_left_out_and_counted() -> None:
    parts = by_group(min_rows=2)
    assert parts.names == ("Basel", "Ulm", "Graz")
    assert len(torch.cat(list(parts.rows))) == 8
    assert parts.notes == ("1 of 4 groups have fewer than min_rows=2 rows: 1 rows unused",)


def test_fewer_clients_than_groups_are_the_largest_ones() -> None:
    parts = by_group(2, min_rows=2)
    assert parts.names == ("Basel", "Ulm")  # Graz is as large as Ulm but comes later
    assert [own.tolist() for own in parts.rows] == [[0, 2, 5, 8], [1, 4]]
    assert parts.notes[1] == "the clients are the 2 largest of 3 groups: 2 rows unused"
    late = by_group(2, names=NAMES[::-1])
    assert late.names == ("Basel", "Graz")
    assert by_group(2, names=np.roll(NAMES, -1)).names == ("Ulm", "Basel")  # not by size
    assert by_group(4).notes == by_group().notes
    many = np.arange(600).repeat(2)
    assert group(labels(1200), 5, group=many, min_rows=1).names == ("0", "1", "2", "3", "4")


def test_groups_of_numbers_are_named_by_them() -> None:
    assert by_group(names=np.array([3, 1, 3, 1, 3, 1, 3, 1, 3])).names == ("3", "1")


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 6), min_size=8, max_size=60), st.integers(1, 4), st.integers(0, 2**40)
)
def test_groups_hold_their_rows_and_notes_count_the_others(
    owners: list[int], min_rows: int, seed: int
) -> None:
    names = np.array([f"n{i}" for i in owners])
    sizes = {name: int((names == name).sum()) for name in names.tolist()}
    if max(sizes.values()) < min_rows:
        with pytest.raises(InputError, match=f"the largest has {max(sizes.values())}"):
            group(labels(len(names)), None, group=names, min_rows=min_rows, seed=seed)
        return
    parts = group(labels(len(names)), None, group=names, min_rows=min_rows, seed=seed)
    assert set(parts.names) == {name for name, size in sizes.items() if size >= min_rows}
    assert all(
        set(names[own.numpy()]) == {name} for name, own in zip(parts.names, parts.rows, strict=True)
    )
    used = torch.cat(list(parts.rows))
    assert len(used) == len(set(used.tolist())) == sum(sizes[name] for name in parts.names)
    unused = len(names) - len(used)
    assert [note.split(": ")[1] for note in parts.notes] == (
        [f"{unused} rows unused"] if unused else []
    )


GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "none": (
        {"names": None},
        "choose from classes, contiguous, dirichlet, iid, quantity, sh",
    ),
    "short": ({"names": NAMES[:4]}, "each of 9 rows, got 4 names"),
    "all small": (
        {"min_rows": 5},
        "min_rows=5.*the largest has 4.*use min_rows <= 4",
    ),
    "too many": (
        {"clients": 4, "min_rows": 2},
        "3 groups.*min_rows=2.*clients=4.*at most 3 clients",
    ),
    "no clients": ({"clients": 0}, "clients.*integer >= 1.*clients=0"),
    "min_rows": ({"min_rows": 0}, "min_rows.*integer >= 1.*min_rows=0"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_that_cannot_be_clients_are_an_error_with_a_remedy(case: str) -> None:
    options, message = GROUPS[case]
    with pytest.raises(InputError, match=message):
        by_group(**options)


def test_rows_move_from_the_largest_client_and_the_note_counts_them() -> None:
    y = labels(100, 2)
    parts = classes(y, 8, classes_per_client=1, seed=0, min_rows=12)
    assert sorted(map(len, parts.rows)) == [12] * 4 + [13] * 4
    assert parts.notes == ()
    uneven = torch.tensor([0] * 90 + [1] * 10)
    parts = classes(uneven, 2, classes_per_client=1, seed=0, min_rows=25)
    assert sorted(map(len, parts.rows)) == [25, 75]
    assert parts.notes == (
        "15 rows moved from the largest clients so that 1 clients have min_rows=25",
    )


@pytest.mark.parametrize("seed", range(5))
def test_with_no_row_to_spare_all_clients_end_up_equal(seed: int) -> None:
    parts = dirichlet(labels(100), 10, concentration=0.1, seed=seed, min_rows=10)
    assert [len(own) for own in parts.rows] == [10] * 10


def test_a_table_is_kept_exactly_and_the_seed_chooses_the_rows() -> None:
    y = labels(40)
    wanted = [[3, 0, 1, 2], [0, 10, 4, 0]]
    parts, other = (table(y, 2, counts=wanted, seed=seed) for seed in (0, 1))
    assert counts(y, parts.rows).tolist() == wanted
    assert len(set(torch.cat(parts.rows).tolist())) == 20
    assert parts.notes == ("the table leaves 20 of 40 rows unused",)
    assert not torch.equal(parts.rows[0], other.rows[0])


def test_the_published_tables_are_the_class_counts_of_their_data_sets() -> None:
    mnist = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    columns = {
        name: [sum(column) for column in zip(*rows, strict=True)] for name, rows in TABLES.items()
    }
    assert columns == {"paper-20": mnist, "paper-3": mnist, "paper-fashion-3": [7000] * 10}
    assert {name: len(rows) for name, rows in TABLES.items()} == {
        "paper-20": 20,
        "paper-3": 3,
        "paper-fashion-3": 3,
    }
    assert TABLES["paper-20"][0] == [962, 393, 3867, 0, 0, 0, 136, 0, 142, 0]


def test_every_partition_names_its_options() -> None:
    assert options_of("iid") == ["min_rows"]
    assert options_of("dirichlet") == ["concentration", "min_rows"]
    assert options_of("classes") == ["classes_per_client", "min_rows"]
    assert options_of("shards") == ["shards_per_client", "min_rows"]
    assert options_of("contiguous") == options_of("group") == ["min_rows"]
    assert all(options_of(name) == [] for name in TABLES)
    with pytest.raises(InputError, match="did you mean 'dirichlet'"):
        options_of("dirichlt")


@pytest.mark.parametrize("name", WHOLE)
def test_too_many_clients_is_an_error_with_a_remedy(name: str) -> None:
    with pytest.raises(InputError, match=r"104 rows.*100.*at most 12 clients"):
        PARTITIONS[name](labels(100), 13, seed=0)
    with pytest.raises(InputError, match="clients=0"):
        PARTITIONS[name](labels(100), 0, seed=0)
    with pytest.raises(InputError, match="min_rows=0"):
        PARTITIONS[name](labels(100), 2, seed=0, min_rows=0)


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("partition", [dirichlet, quantity])
def test_a_wrong_concentration_is_an_error(partition: object, concentration: float) -> None:
    with pytest.raises(InputError, match="concentration must be > 0"):
        partition(labels(100), 4, concentration=concentration)  # type: ignore[operator]


def test_wrong_types_are_errors() -> None:
    y = labels(100)
    for name in WHOLE:
        with pytest.raises(InputError, match=r"clients.*integer >= 1.*clients=1\.5"):
            PARTITIONS[name](y, 1.5)
        with pytest.raises(InputError, match=r"min_rows.*integer >= 1.*min_rows='a'"):
            PARTITIONS[name](y, 2, min_rows="a")
    for name in ("dirichlet", "quantity"):
        with pytest.raises(InputError, match=r"concentration.*a number.*concentration='a'"):
            PARTITIONS[name](y, 2, concentration="a")
    with pytest.raises(InputError, match=r"classes_per_client.*integer.*classes_per_client=1\.5"):
        PARTITIONS["classes"](y, 4, classes_per_client=1.5)
    with pytest.raises(InputError, match=r"shards_per_client.*integer >= 1.*shards_per_client=0"):
        shards(y, 4, shards_per_client=0)
    with pytest.raises(InputError, match=r"unknown partition \[\]\. Known: classes"):
        options_of([])  # type: ignore[arg-type]


def test_classes_that_cannot_all_be_held_are_an_error() -> None:
    with pytest.raises(InputError, match=r"use classes_per_client >= 4, or at least 10 clients"):
        classes(labels(100, 10), 3, classes_per_client=1)
    with pytest.raises(InputError, match=r"in 1\.\.4.*got 5"):
        classes(labels(100), 3, classes_per_client=5)
    with pytest.raises(InputError, match="got 0"):
        classes(labels(100), 3, classes_per_client=0)


@pytest.mark.parametrize("name", ["dirichlet", "classes", "shards"])
def test_label_partitions_refuse_real_targets(name: str) -> None:
    with pytest.raises(
        InputError,
        match=r"class labels.*torch\.float32.*use 'iid', 'quantity' or",
    ):
        PARTITIONS[name](labels(100).float(), 3, seed=0)


@pytest.mark.parametrize("partition", [iid, quantity, contiguous])
def test_other_partitions_take_real_targets(partition: Callable[..., Parts]) -> None:
    assert len(torch.cat(partition(labels(100).float(), 3).rows)) == 100


def test_a_table_names_the_label_that_is_short_and_the_clients_it_needs() -> None:
    with pytest.raises(InputError, match=r"30 rows of label 1.*has 10"):
        table(labels(40), 2, counts=[[0, 10], [0, 20]])
    with pytest.raises(InputError, match=r"clients must be 2.*got 3"):
        table(labels(40), 3, counts=[[1], [1]])
