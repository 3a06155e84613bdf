"""Federations built from a user's own arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsso.data import Federation
from fedsso.data.arrays import client_weights
from fedsso.data.federation import label_skew
from fedsso.errors import InputError


def own(**options: Any) -> Federation:
    x = torch.arange(60, dtype=torch.float32).view(20, 3)
    owner = [0] * 4 + [1] * 6 + [2] * 10
    return Federation.from_arrays(x, torch.arange(20) % 4, owner, **options)


def test_rows_are_split_within_each_client() -> None:
    fed = own()
    assert fed.clients == 3
    assert fed.sample_shape == (3,)
    assert fed.train_sizes.tolist() == [3, 4, 8]
    assert fed.test_sizes.tolist() == [1, 2, 2]
    for i, rows in enumerate((range(4), range(4, 10), range(10, 20))):
        held = torch.cat([fed.rows_of(i), fed.rows_of(i, "test")])
        assert held.sort().values.tolist() == list(rows)


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    fraction=st.floats(0, 0.99),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_the_split_rounds_keeps_a_training_row_and_loses_nothing(
    sizes: list[int], fraction: float, seed: int
) -> None:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    fed = Federation.from_arrays(
        np.ones((len(owner), 1)), owner * 0, owner, test_fraction=fraction, seed=seed
    )
    assert fed.test_sizes.tolist() == [min(round(fraction * n), n - 1) for n in sizes]
    assert torch.cat([fed.train_rows, fed.test_rows]).sort().values.tolist() == list(
        range(len(owner))
    )


def test_a_clients_split_depends_on_the_seed_and_itself_only() -> None:
    fed, more = own(), Federation.from_clients([([[0.0]] * 4, [0] * 4), ([[0.0]] * 9, [0] * 9)])
    assert torch.equal(fed.rows_of(0), more.rows_of(0))
    assert not torch.equal(own(seed=1).train_rows, fed.train_rows)
    twins = Federation.from_clients([([[0.0]] * 50, [0] * 50)] * 2)
    assert not torch.equal(twins.rows_of(0), twins.rows_of(1) - 50)
    state = torch.get_rng_state()
    own()
    assert torch.equal(torch.get_rng_state(), state)


def test_no_test_rows_is_allowed() -> None:
    fed = own(test_fraction=0)
    assert fed.test_sizes.tolist() == [0, 0, 0]
    assert fed.rows_of(2, "test").tolist() == []
    assert fed.train_sizes.tolist() == [4, 6, 10]


def test_clients_by_name_come_in_sorted_order() -> None:
    owner = ["north", "east", "north", "west", "east"]
    fed = Federation.from_arrays(np.eye(5), np.zeros(5, int), owner, test_fraction=0)
    assert fed.client_names == ("east", "north", "west")
    assert [sorted(fed.rows_of(i).tolist()) for i in range(3)] == [[1, 4], [0, 2], [3]]
    same = Federation.from_arrays(
        np.eye(5), np.zeros(5, int), np.array(owner, dtype=object), test_fraction=0
    )
    assert same.digest() == fed.digest()
    numbered = Federation.from_arrays(np.eye(3), [0, 0, 0], [70, -2, 70])
    assert numbered.client_names == ("-2", "70")


def test_one_pair_per_client_is_the_same_as_one_array() -> None:
    fed = own()
    cuts = ((0, 4), (4, 10), (10, 20))
    pairs = [(fed.x[a:b].tolist(), fed.y[a:b].numpy()) for a, b in cuts]
    again = Federation.from_clients(
        [(np.array(x, np.float32), y) for x, y in pairs], client_names=["a", "b", "c"]
    )
    assert again.digest() == fed.digest()
    assert again.client_names == ("a", "b", "c")
    assert len({float(v) for v in again.x.flatten()}) == 60


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.uint8, torch.uint8),
        (np.float64, torch.float64),
        (np.float32, torch.float32),
        (np.float16, torch.float16),
        (np.int64, torch.float32),
        (np.uint16, torch.float32),
        (np.bool_, torch.float32),
        (">f8", torch.float64),
    ],
)
def test_samples_keep_uint8_and_floats_and_widen_other_integers(
    dtype: Any, stored: torch.dtype
) -> None:
    x = np.array([[0, 1], [1, 0], [1, 1]]).astype(dtype)
    fed = Federation.from_arrays(x, [0, 1, 0], [0, 0, 0])
    assert fed.x.dtype == stored
    assert fed.x.double().tolist() == [[0, 1], [1, 0], [1, 1]]


def test_arrays_are_shared_and_read_only_or_reversed_ones_copied() -> None:
    x = np.zeros((4, 2), np.float32)
    assert Federation.from_arrays(x, [0] * 4, [0] * 4).x.data_ptr() == x.ctypes.data
    x.flags.writeable = False
    assert Federation.from_arrays(x, [0] * 4, [0] * 4).x.data_ptr() != x.ctypes.data
    backwards = Federation.from_arrays(np.arange(4.0)[::-1, None], [0] * 4, [0] * 4)
    assert backwards.x.flatten().tolist() == [3, 2, 1, 0]


def test_data_frames_are_joined_by_the_names_of_their_columns() -> None:
    frame = pd.DataFrame({"age": [50.0, 60.0], "dose": [1.0, 2.0]})
    fed = Federation.from_clients([(frame, [0, 1]), (frame[["dose", "age"]], [0, 1])])
    assert fed.x.tolist() == [[50, 1], [60, 2]] * 2
    for other in (frame.rename(columns={"dose": "does"}), frame[["age"]], frame.assign(sex=1.0)):
        with pytest.raises(InputError, match=r"client 1: .*see '(does|dose|sex)'"):
            Federation.from_clients([(frame, [0, 1]), (other, [0, 1])])
    twice = frame.set_axis(["age", "age"], axis=1)
    assert Federation.from_clients([(twice, [0, 1])] * 2).x.tolist() == [[50, 1], [60, 2]] * 2


def test_owners_may_come_in_reverse() -> None:
    fed = Federation.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 0], np.array([1, 0, 0])[::-1])
    assert (fed.train_sizes + fed.test_sizes).tolist() == [2, 1]


ODD: dict[str, Callable[[], Any]] = {
    "float8": lambda: torch.zeros(4, 4).to(torch.float8_e4m3fn),
    "meta": lambda: torch.zeros(4, 4, device="meta"),
    "sparse meta": lambda: torch.eye(4).to_sparse_csr().to("meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4)] * 4),
    "qint8": lambda: torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.qint8),
    "masked array": lambda: np.ma.array(np.zeros((4, 4)), mask=np.eye(4)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_what_has_no_plain_numbers_is_refused(kind: str) -> None:
    """A masked value would count as the number below the mask."""
    odd = ODD[kind]()
    told = kind.removeprefix("sparse ")
    with pytest.raises(InputError, match=f"x must be a plain tensor.*{told}|x is a {told} with 4"):
        Federation.from_arrays(odd, [0] * 4, [0] * 4)
    if kind == "sparse meta":
        return
    with pytest.raises(InputError, match=told):
        Federation.from_arrays(np.zeros((4, 4)), odd, [0] * 4)
    with pytest.raises(InputError, match=told):
        Federation.from_arrays(np.zeros((4, 4)), [0] * 4, odd)


def test_rows_are_indices_or_masks() -> None:
    x, y = np.arange(4.0)[:, None], [0, 1, 0, 1]
    fed = Federation.from_rows(
        x, y, [[True, False, True, False], np.array([3], np.uint8)], test_fraction=0
    )
    assert [sorted(fed.rows_of(i).tolist()) for i in range(2)] == [[0, 2], [3]]
    same = Federation.from_rows(x, y, iter([torch.tensor([0, 2]), range(3, 4)]), test_fraction=0)
    assert same.digest() == fed.digest()


def test_numpy_numbers_are_plain_numbers() -> None:
    same = own(seed=np.int64(3), test_fraction=np.float32(0.5), classes=np.int64(4))
    assert same.digest() == own(seed=3, test_fraction=0.5, classes=4).digest()
    assert same.rows_of(np.int64(2)).tolist() == same.rows_of(2).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_tensors_are_labels_samples_and_owners(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 2, 1]).to(dtype)
    fed = Federation.from_arrays(values[:, None], values, values, test_fraction=0)
    assert (fed.x.flatten().tolist(), fed.y.tolist(), fed.clients) == ([0, 2, 1], [0, 2, 1], 3)


def test_classes_are_limited_by_the_rows_of_all_clients_together() -> None:
    rare = Federation.from_clients([([[0.0]], [1500]), ([[0.0]] * 15, [0] * 15)])
    assert rare.classes == 1501
    assert own(classes=2000).classes == 2000


def test_integer_y_is_a_label_and_float_y_a_target() -> None:
    x = np.eye(3, dtype=np.float32)
    label = Federation.from_arrays(x, np.array([0, 4, 1], np.uint8), [0, 0, 0])
    assert (label.y.dtype, label.classes) == (torch.int64, 5)
    assert Federation.from_arrays(x, [True, False, True], [0, 0, 0]).classes == 2
    assert Federation.from_arrays(x, [0, 1, 2], [0, 0, 0], classes=7).classes == 7
    target = Federation.from_arrays(x, np.array([0.0, 4.0, 1.0]), [0, 0, 0])
    assert (target.y.dtype, target.classes) == (torch.float32, 0)
    whole = Federation.from_arrays(x, np.array([0.0, 4.0, 1.0]), [0, 0, 0], classes=5)
    assert (whole.y.dtype, whole.classes) == (torch.int64, 5)


def test_weights_are_training_shares_unless_given() -> None:
    assert torch.allclose(own().p, torch.tensor([3, 4, 8], dtype=torch.float64) / 15)
    assert own(weights=[0.5, 0.5, 0.0]).p.tolist() == [0.5, 0.5, 0.0]
    assert own().p.dtype == own(weights=[0.5, 0.5, 0.0]).p.dtype == torch.float64


def test_label_counts_and_skew() -> None:
    fed = Federation.from_clients([([[0.0]] * 4, [0, 0, 0, 1]), ([[0.0]] * 4, [1, 1, 1, 2])])
    assert fed.label_counts().tolist() == [[3, 1, 0], [0, 3, 1]]
    # own distributions (3/4, 1/4, 0) and (0, 3/4, 1/4), global (3/8, 4/8, 1/8): distance 3/8 each
    assert float(label_skew(fed.label_counts()).mean()) == pytest.approx(3 / 8)
    with pytest.raises(InputError, match="real targets"):
        Federation.from_clients([([[0.0]], [0.5])]).label_counts()


def test_summary_says_what_a_person_wants_to_know() -> None:
    text = replace(own(), notes=("2 rows moved",)).summary().splitlines()
    assert (
        text[0] == "Federation(own, 3 clients, 15 train + 5 test rows, sample 3 float32, 4 classes)"
    )
    assert text[2].split() == ["train", "rows", "3", "4", "8"]
    assert text[3].split() == ["test", "rows", "1", "2", "2"]
    assert text[4].split() == ["labels", "held", "4", "4", "4"]
    assert text[5].startswith("label skew  0.0")
    assert text[6] == "note: 2 rows moved"
    assert "label" not in Federation.from_clients([([[0.0]] * 2, [0.5, 1])]).summary()


def test_the_digest_sees_everything_training_sees() -> None:
    fed = own()
    assert fed.digest() == own().digest()
    changed = [
        own(seed=1),
        own(test_fraction=0.5),
        own(classes=5),
        own(weights=[0.2, 0.4, 0.4]),
        replace(fed, affine=(2.0, 0.0)),
        replace(fed, x=fed.x + 1),
        replace(fed, x=fed.x.view(20, 1, 3)),
        replace(fed, y=fed.y.flip(0)),
    ]
    assert len({fed.digest(), *(other.digest() for other in changed)}) == len(changed) + 1
    assert replace(fed, name="other").digest() == fed.digest()


def test_the_digest_is_the_same_on_every_machine() -> None:
    train, train_start, test, test_start = (torch.tensor(v) for v in ([0, 2], [0, 2], [1], [0, 1]))
    fed = Federation(torch.eye(3), torch.arange(3), train, train_start, test, test_start, classes=3)
    assert fed.digest() == "25252fb7a9adafaadd62f33e29ce62c320579736f2dc61c3f58a1ac4433df5ed"


def test_moving_to_a_device_moves_every_tensor() -> None:
    fed = own(weights=[0.2, 0.4, 0.4]).to("meta")
    index = (fed.train_rows, fed.train_start, fed.test_rows, fed.test_start)
    assert {t.device.type for t in (fed.x, fed.y, *index, fed.p)} == {"meta"}
    assert fed.name == "own"


X, Y, WHO = [[1.0], [2.0], [3.0]], [0, 1, 0], [0, 0, 1]
NAN, INF = float("nan"), float("inf")
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "nan x": (
        lambda: Federation.from_arrays([[1.0], [NAN], [INF]], Y, WHO),
        "x has NaN or Inf in row 1",
    ),
    "inf y": (lambda: Federation.from_arrays(X, [0.0, 1.0, INF], WHO), "y has NaN or Inf in row 2"),
    "y too large": (
        lambda: Federation.from_arrays(torch.tensor(X), [0.0, 1e300, 0.0], WHO),
        r"y as torch.float32 has NaN or Inf in row 1",
    ),
    "negative": (
        lambda: Federation.from_arrays(X, [0, 1, -1], WHO),
        "y must be >= 0.*got -1 in row 2",
    ),
    "fraction": (
        lambda: Federation.from_arrays(X, [0, 0.5, 1], WHO, classes=2),
        "y must be whole numbers.*got 0.5 in row 1",
    ),
    "range": (
        lambda: Federation.from_arrays(X, [0, 1, 2], WHO, classes=2),
        "< classes=2, got 2 in row 2",
    ),
    "classes": (
        lambda: Federation.from_arrays(X, Y, WHO, classes=0),
        "classes.*integer >= 1.*classes=0",
    ),
    "lengths": (lambda: Federation.from_arrays(X, [0, 1], WHO), "x has 3 rows, y has 2"),
    "owner length": (
        lambda: Federation.from_arrays(X, Y, [0]),
        r"client_of_row has shape \(1,\).* of 3 rows",
    ),
    "owner type": (
        lambda: Federation.from_arrays(X, Y, [0.5, 1, 1]),
        "integers or names, got dtype float64",
    ),
    "owner gap": (
        lambda: Federation.from_arrays(X, Y, np.array(["a", None, "b"])),
        "got dtype object",
    ),
    "empty arrays": (lambda: Federation.from_arrays([], [], []), "federation is empty"),
    "no clients": (lambda: Federation.from_clients([]), "federation is empty: got 0 clients"),
    "no row lists": (lambda: Federation.from_rows(X, Y, []), "federation is empty: got 0 clients"),
    "empty client": (
        lambda: Federation.from_clients([(X, Y), (np.zeros((0, 1)), [])]),
        "client 1: x and y have no rows",
    ),
    "empty rows": (
        lambda: Federation.from_rows(X, Y, [[0, 1], []]),
        "client 1 has no training rows",
    ),
    "outside": (
        lambda: Federation.from_rows(X, Y, [[0, 3]]),
        r"rows of client 0 must be in 0\.\.2, got 0\.\.3",
    ),
    "shapes": (
        lambda: Federation.from_clients([(X, Y), ([[1.0, 2.0]], [0])]),
        r"client 1 .*shape \(2,\).*client 0 .*shape \(1,\)",
    ),
    "kinds": (
        lambda: Federation.from_clients([(X, Y), (X, [0.5, 1, 1])]),
        "client 1 has torch.float64 y",
    ),
    "client row": (
        lambda: Federation.from_clients([(X, Y), ([[1.0], [NAN]], [0, 0])]),
        "client 1: x has NaN or Inf in row 1",
    ),
    "ragged": (lambda: Federation.from_arrays([[1.0], [2.0, 3.0]], [0, 1], [0, 0]), "x is ragged"),
    "text": (lambda: Federation.from_arrays([["a"], ["b"]], [0, 1], [0, 0]), "x must hold numbers"),
    "flat": (lambda: Federation.from_arrays([1.0, 2.0], [0, 1], [0, 0]), r"got shape \(2,\)"),
    "no features": (
        lambda: Federation.from_arrays(np.zeros((2, 0)), [0, 1], [0, 0]),
        r"got shape \(2, 0\)",
    ),
    "complex": (
        lambda: Federation.from_arrays(torch.ones(2, 1) * 1j, [0, 1], [0, 0]),
        "x must be real",
    ),
    "one-hot y": (
        lambda: Federation.from_arrays(X, np.eye(3), WHO),
        r"y must be \[rows\], got shape \(3, 3\)",
    ),
    "all test": (
        lambda: Federation.from_arrays(X, Y, WHO, test_fraction=1.0),
        r"in \[0, 1\), got test_fraction=1.0",
    ),
    "minus test": (
        lambda: Federation.from_arrays(X, Y, WHO, test_fraction=-0.1),
        r"in \[0, 1\), got test_fraction=-0.1",
    ),
    "nan test": (
        lambda: Federation.from_arrays(X, Y, WHO, test_fraction=NAN),
        r"in \[0, 1\), got test_fraction=nan",
    ),
    "names": (
        lambda: Federation.from_clients([(X, Y)], client_names=["a", "b"]),
        "must name 1 clients, got 2",
    ),
    "weights": (lambda: Federation.from_arrays(X, Y, WHO, weights=[0.5, 0.6]), "sum to 1"),
    "weight sign": (lambda: Federation.from_arrays(X, Y, WHO, weights=[1.5, -0.5]), ">= 0"),
    "weight nan": (lambda: client_weights([NAN, 1.0], 2), ">= 0"),
    "weight count": (lambda: client_weights([1.0], 2), "one number for each of 2 clients"),
    "weights text": (lambda: client_weights("a", 2), "weights must hold numbers, got dtype <U1"),
    "weights dict": (lambda: client_weights({}, 2), "weights must hold numbers, got dtype object"),
    "weights words": (
        lambda: client_weights(["a", "b"], 2),
        "weights must hold numbers, got dtype <U1",
    ),
    "float rows": (
        lambda: Federation.from_rows(X, Y, [[0.7, 1.2]]),
        r"list of integers.*got torch.float64",
    ),
    "2-D rows": (
        lambda: Federation.from_rows(X, Y, [[[0], [1]]]),
        r"list of integers.*got .* shape \(2, 1\)",
    ),
    "short mask": (
        lambda: Federation.from_rows(X, Y, [[True, False]]),
        r"mask of 3 booleans, got torch.bool",
    ),
    "empty mask": (
        lambda: Federation.from_rows(X, Y, [[False] * 3]),
        "client 0 has no training rows",
    ),
    "row twice": (
        lambda: Federation.from_rows(X, Y, [[0], [2, 1, 2]]),
        r"row 2 is listed 2 times, by clients \[1, 1\], need once",
    ),
    "row shared": (
        lambda: Federation.from_rows(X, Y, [[0, 1], [1, 2]]),
        r"row 1 is listed 2 times, by clients \[0, 1\]",
    ),
    "rows none": (
        lambda: Federation.from_rows(X, Y, None),
        "rows must list the row indices.*got None",
    ),  # type: ignore[arg-type]
    "rows flat": (
        lambda: Federation.from_rows(X, Y, [3]),
        "rows of client 0 must be an array or a list, got 3",
    ),
    "rows text": (lambda: Federation.from_rows(X, Y, ["ab"]), "rows of client 0 must hold numbers"),
    "seed text": (lambda: own(seed="a"), "seed.*integer.*seed='a'"),
    "seed float": (lambda: own(seed=1.5), "seed.*integer.*seed=1.5"),
    "seed none": (lambda: own(seed=None), "seed.*integer.*seed=None"),
    "seed high": (
        lambda: own(seed=2**63),
        r"seed must be in -2\*\*63.*got seed=9223372036854775808",
    ),
    "seed low": (lambda: own(seed=-(2**63) - 1), "got seed=-9223372036854775809"),
    "test text": (
        lambda: own(test_fraction="a"),
        "test_fraction.*a number.*test_fraction='a'",
    ),
    "classes text": (lambda: own(classes="a"), "classes.*integer >= 1.*classes='a'"),
    "classes many": (
        lambda: own(classes=10**9),
        "got classes=1000000000 .* at most 2000 for 20 rows",
    ),
    "classes huge": (lambda: own(classes=2**70), r"at most 1000000000, got classes=1.18e\+21"),
    "label large": (
        lambda: Federation.from_arrays(X, [0, 1, 10**10], WHO),
        "got classes=10000000001 .*at most 1000",
    ),
    "label largest": (
        lambda: Federation.from_arrays(X, [0, 1, 2**63 - 1], WHO),
        f"got classes={2**63} ",
    ),
    "label unsigned": (
        lambda: Federation.from_arrays(X, np.array([0, 1, 2**63], np.uint64), WHO),
        r"y must be < 2\*\*63, got 9223372036854775808",
    ),
    "clients none": (lambda: Federation.from_clients(None), "one pair .* per client, got None"),  # type: ignore[arg-type]
    "no pair": (lambda: Federation.from_clients([5]), r"client 0: need a pair \(x, y\), got int"),  # type: ignore[list-item]
    "half a pair": (lambda: Federation.from_clients([(X,)]), "client 0: need a pair .*got 1 items"),  # type: ignore[list-item]
    "three": (
        lambda: Federation.from_clients([(X, Y), (X, Y, Y)]),
        "client 1: need a pair .*got 3 items",
    ),  # type: ignore[list-item]
    "names none": (
        lambda: Federation.from_clients([(X, Y)], client_names=None),  # type: ignore[arg-type]
        "client_names must name 1 clients, got None",
    ),
    "sparse y": (
        lambda: Federation.from_arrays(X, torch.tensor(Y).to_sparse(), WHO),
        r"dense.*torch.sparse_coo.*use .to_dense\(\)",
    ),
    "sparse owner": (
        lambda: Federation.from_arrays(X, Y, torch.tensor(WHO).to_sparse()),
        "client_of_row is ragged or",
    ),
    "scalar y": (lambda: Federation.from_arrays(X, 5, WHO), "y must be an array or a list, got 5"),
    "no x": (lambda: Federation.from_arrays(None, Y, WHO), "x must hold numbers, got dtype object"),
    "complex y": (lambda: Federation.from_arrays(X, torch.tensor(Y) * 1j, WHO), "y must be real"),
    "client type": (lambda: own().rows_of("a"), "client.*integer.*client='a'"),  # type: ignore[arg-type]
    "part type": (lambda: own().rows_of(0, []), r"unknown part \[\]\. Known: test, train"),  # type: ignore[arg-type]
    "part": (lambda: own().rows_of(0, "tset"), "did you mean 'test'"),
    "client": (lambda: own().rows_of(3), r"client must be in 0\.\.2, got 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_named(case: str) -> None:
    build, message = BAD[case]
    with pytest.raises(InputError, match=message):
        build()
