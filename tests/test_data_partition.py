"""Partitions keep their promises: every row once, min_rows, purity, exact tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsso.data.federation import label_skew
from fedsso.data.partition import PARTITIONS, TABLES, classes, dirichlet, iid, options_of, quantity, table
from fedsso.errors import InputError

RANDOM = ["iid", "dirichlet", "classes", "quantity"]


def labels(rows: int, kinds: int = 4) -> Tensor:
    return torch.arange(rows) * 7 % kinds


def counts(y: Tensor, rows: list[Tensor]) -> Tensor:
    return torch.stack([torch.bincount(y[own], minlength=int(y.max()) + 1) for own in rows])


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(RANDOM),
    rows=st.integers(40, 300),
    clients=st.integers(2, 12),
    seed=st.integers(0, 2**40),
    min_rows=st.integers(1, 3),
)
def test_random_partitions_use_every_row_once_and_keep_min_rows(
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
    skew = [label_skew(counts(y, dirichlet(y, 10, concentration=c, seed=1).rows)) for c in (0.05, 0.5, 1000.0)]
    assert skew[0] > skew[1] > skew[2]
    assert skew[0] > 0.5
    assert skew[2] < 0.05


def test_quantity_skews_sizes_but_not_labels() -> None:
    y = labels(4000)
    parts = quantity(y, 5, concentration=0.3, seed=0, min_rows=200)
    sizes = sorted(map(len, parts.rows))
    assert sizes[-1] > 5 * sizes[0]
    assert label_skew(counts(y, parts.rows)) < 0.06


def test_classes_gives_k_classes_to_each_client_and_equal_shares_to_the_holders() -> None:
    y = labels(1000, 10)
    held = counts(y, classes(y, 15, classes_per_client=2, seed=5).rows)
    assert ((held > 0).sum(1) == 2).all()
    assert ((held > 0).sum(0) == 3).all()
    assert set(held[held > 0].tolist()) <= {33, 34}


def test_rows_move_from_the_largest_client_and_the_note_counts_them() -> None:
    y = labels(100, 2)
    parts = classes(y, 8, classes_per_client=1, seed=0, min_rows=12)
    assert sorted(map(len, parts.rows)) == [12] * 4 + [13] * 4
    assert parts.notes == ()
    uneven = torch.tensor([0] * 90 + [1] * 10)
    parts = classes(uneven, 2, classes_per_client=1, seed=0, min_rows=25)
    assert sorted(map(len, parts.rows)) == [25, 75]
    assert parts.notes == ("15 rows moved from the largest clients so that 1 clients have min_rows=25",)


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
    columns = {name: [sum(column) for column in zip(*rows, strict=True)] for name, rows in TABLES.items()}
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
    assert all(options_of(name) == [] for name in TABLES)
    with pytest.raises(InputError, match="did you mean 'dirichlet'"):
        options_of("dirichlt")


@pytest.mark.parametrize("name", RANDOM)
def test_too_many_clients_is_an_error_with_a_remedy(name: str) -> None:
    with pytest.raises(InputError, match=r"need 104 rows, there are 100: use at most 12 clients"):
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
    for name in RANDOM:
        with pytest.raises(InputError, match=r"clients must be an integer >= 1, got clients=1\.5"):
            PARTITIONS[name](y, 1.5)
        with pytest.raises(InputError, match="min_rows must be an integer >= 1, got min_rows='a'"):
            PARTITIONS[name](y, 2, min_rows="a")
    for name in ("dirichlet", "quantity"):
        with pytest.raises(InputError, match="concentration must be a number, got concentration='a'"):
            PARTITIONS[name](y, 2, concentration="a")
    with pytest.raises(InputError, match=r"classes_per_client must be an integer, got classes_per_client=1\.5"):
        PARTITIONS["classes"](y, 4, classes_per_client=1.5)
    with pytest.raises(InputError, match=r"unknown partition \[\]\. Known: classes"):
        options_of([])  # type: ignore[arg-type]


def test_classes_that_cannot_all_be_held_are_an_error() -> None:
    with pytest.raises(InputError, match=r"use classes_per_client >= 4, or at least 10 clients"):
        classes(labels(100, 10), 3, classes_per_client=1)
    with pytest.raises(InputError, match=r"must be in 1\.\.4, the classes there are, got 5"):
        classes(labels(100), 3, classes_per_client=5)
    with pytest.raises(InputError, match="got 0"):
        classes(labels(100), 3, classes_per_client=0)


@pytest.mark.parametrize("name", ["dirichlet", "classes"])
def test_label_partitions_refuse_real_targets(name: str) -> None:
    with pytest.raises(InputError, match=r"needs class labels, y has dtype torch\.float32: use 'iid'"):
        PARTITIONS[name](labels(100).float(), 3, seed=0)


def test_iid_and_quantity_take_real_targets() -> None:
    y = labels(100).float()
    assert len(torch.cat(iid(y, 3).rows)) == len(torch.cat(quantity(y, 3).rows)) == 100


def test_a_table_names_the_label_that_is_short_and_the_clients_it_needs() -> None:
    with pytest.raises(InputError, match="needs 30 rows of label 1, the data set has 10"):
        table(labels(40), 2, counts=[[0, 10], [0, 20]])
    with pytest.raises(InputError, match="clients must be 2, the number in the table, got 3"):
        table(labels(40), 3, counts=[[1], [1]])
