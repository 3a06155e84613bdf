"""Rows in mapped files: read when they are taken, and otherwise like rows in memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedsso
from fedsso import Federation, InputError, load
from fedsso.data import packing
from fedsso.data.mapped.rows import MappedRows
from fedsso.engine.gather import gathering
from fedsso.support import shuffle

ROWS = 120
Arrays = tuple[Any, Any, Any]


def made(dtype: type = np.float32, shape: tuple[int, ...] = (5,)) -> Arrays:
    """Samples, labels and the client of each row."""
    draw = np.random.default_rng(0)
    x = (50 + 40 * draw.standard_normal((ROWS, *shape))).astype(dtype)
    return x, draw.integers(0, 3, ROWS), draw.integers(0, 8, ROWS)


def on_disk(folder: Path, x: Any, order: str = "C") -> Any:
    np.save(folder / "rows.npy", np.asarray(x, order=order))  # type: ignore[call-overload]
    return np.load(folder / "rows.npy", mmap_mode="r")


def write_shards(folder: Path, arrays: Arrays, cuts: tuple[int, ...] = (50, 51)) -> Path:
    for kind, array in zip(("x", "y", "client"), arrays, strict=True):
        for number, part in enumerate(np.split(array, cuts)):
            np.save(folder / f"{kind}-{number:04}.npy", part)
    return folder


def all_rows(fed: Federation) -> torch.Tensor:
    return fed.x[torch.arange(len(fed.y))]


# ---- the same federation ----


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int16, ">f4"])
def test_rows_in_a_file_make_the_same_federation(tmp_path: Path, dtype: Any, order: str) -> None:
    x, y, owner = made(dtype)
    here = Federation.from_arrays(x, y, owner)
    there = Federation.from_arrays(on_disk(tmp_path, x, order), y, owner)
    assert isinstance(there.x, MappedRows)
    assert torch.equal(all_rows(there), here.x)
    assert there.x.dtype == here.x.dtype
    assert there.digest() == here.digest()
    assert repr(there) == repr(here)


def test_gaps_are_filled_and_columns_scaled_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whether columns are read one by one or together, in pieces of a few rows."""
    x, y, owner = made()
    x[::7, 2] = np.nan
    x[:, 4] = 3
    here = Federation.from_arrays(x, y, owner, standardise=True)
    file = on_disk(tmp_path, x)
    for room in (1, 1 << 20):
        monkeypatch.setattr("fedsso.data.scaling.COLUMNS", room)
        monkeypatch.setattr("fedsso.data.arrays.PIECE", 7 * 20)
        there = Federation.from_arrays(file, y, owner, standardise=True)
        assert there.scaling is not None
        assert here.scaling is not None
        for name in ("median", "mean", "factor"):
            assert torch.equal(getattr(there.scaling, name), getattr(here.scaling, name))
        assert torch.equal(all_rows(there), here.x)
        assert there.digest() == here.digest()


def test_training_on_files_ends_at_the_same_bits(tmp_path: Path) -> None:
    """Images, so that samples have axes and an affine pair; local steps, evaluation, all rows."""
    x, y, owner = made(np.uint8, (1, 8, 8))
    here = Federation.from_arrays(x, y, owner)
    there = Federation.from_arrays(on_disk(tmp_path, x), y, owner)
    options: dict[str, Any] = {"rounds": 4, "batch_size": 4, "participation": 0.5, "seed": 2}
    for name in ("fedavg", "fedsso"):
        one = fedsso.simulate(here, "mclr", name, **options)
        two = fedsso.simulate(there, "mclr", name, **options)
        assert torch.equal(one.x, two.x)
        assert one.trace["test_loss"][-1] == two.trace["test_loss"][-1]


def test_shards_are_one_table(tmp_path: Path) -> None:
    """Three shards, one of them a single row, equal the table that they were cut from."""
    arrays = made()
    write_shards(tmp_path, arrays)
    whole = Federation.from_arrays(*arrays, test_fraction=0.2, seed=4)
    fed = load("npy", files=tmp_path, test_fraction=0.2, seed=4, min_rows=1)
    assert isinstance(fed.x, MappedRows)
    assert len(fed.x.parts) == 3
    assert torch.equal(all_rows(fed), whole.x)
    assert torch.equal(fed.y, whole.y)
    # Clients come in the order of their first rows here, in sorted order there.
    for i, name in enumerate(fed.client_names):
        other = whole.client_names.index(name)
        mine = torch.cat([fed.rows_of(i), fed.rows_of(i, "test")])
        theirs = torch.cat([whole.rows_of(other), whole.rows_of(other, "test")])
        assert sorted(mine.tolist()) == sorted(theirs.tolist())
    again = load(**dict(fed.source))  # type: ignore[arg-type]
    assert again.digest() == fed.digest()


def test_shards_without_clients_are_dealt_by_any_partition(tmp_path: Path) -> None:
    write_shards(tmp_path, made())
    for path in tmp_path.glob("client-*"):
        path.unlink()
    fed = load("npy", files=tmp_path, partition="dirichlet", clients=4, standardise="yes")
    assert fed.clients == 4
    assert fed.scaling is not None
    with pytest.raises(InputError, match="partition 'group' needs"):
        load("npy", files=tmp_path)


# ---- nothing is read that need not be ----


def test_building_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, owner = made()
    file = on_disk(tmp_path, x)

    def refuse(*_: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(MappedRows, "_usable", refuse)
    fed = Federation.from_arrays(file, y, owner)
    assert isinstance(fed.x, MappedRows)
    assert np.shares_memory(fed.x.parts[0], file)
    fed.validation()
    assert "120" not in fed.summary().splitlines()[0]  # train and test rows are told apart
    with pytest.raises(AssertionError, match="rows were read"):
        fed.x[:1]


def test_only_the_rows_that_are_asked_for_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 40 MB; a gather of 10 rows allocates kilobytes, a digest one piece at a time."""
    piece = 1 << 20
    monkeypatch.setattr("fedsso.data.arrays.PIECE", piece)
    wide = 1000
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (10_000, wide))
    x.flush()
    fed = Federation.from_arrays(x, np.zeros(10_000, int), np.arange(10_000) // 10)
    gather = gathering(fed, torch.float32)
    tracemalloc.start()
    gather(torch.arange(0, 10_000, 1000))
    _, few = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    fed.digest()
    _, all_of_them = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert few < 10 * 20 * wide  # ten rows of 4 bytes, and some copies of them
    assert all_of_them < 3 * piece  # one is hashed while the next is read


def test_a_pickled_federation_holds_the_place_of_its_rows(tmp_path: Path) -> None:
    x, y, owner = made()
    file = on_disk(tmp_path, x)
    part = Federation.from_arrays(file[10:90:2], y[10:90:2], owner[10:90:2], standardise=True)
    data = pickle.dumps(part)
    again = pickle.loads(data)
    assert x[10:90:2].tobytes()[:40] not in data
    assert again.digest() == part.digest()
    assert pickle.loads(pickle.dumps(again)).digest() == part.digest()
    changed = np.load(tmp_path / "rows.npy", mmap_mode="c")
    changed[0] = 1  # which the file does not know of
    own = pickle.loads(pickle.dumps(MappedRows([changed])))
    assert own[0].tolist() == [1] * 5


# ---- as a tensor ----


def test_rows_are_taken_like_those_of_a_tensor(tmp_path: Path) -> None:
    x, y, _ = made()
    parts = np.split(on_disk(tmp_path, x), (40, 41))
    rows = MappedRows(parts)
    plain = torch.from_numpy(x)
    index = torch.tensor([[119, 0], [40, -1]])
    assert torch.equal(rows[index], plain[index])
    assert torch.equal(rows[torch.from_numpy(y) == 1], plain[torch.from_numpy(y) == 1])
    assert torch.equal(rows[-1], plain[-1])
    assert torch.equal(rows[30:50], plain[30:50])
    assert torch.equal(rows[3:100:9], plain[3:100:9])
    assert torch.equal(rows[7:7], plain[7:7])
    assert torch.equal(rows.index_select(0, torch.tensor([5, 41])), plain[[5, 41]])
    assert rows.to("cpu") is rows
    with pytest.raises(InputError, match=r"row must be in 0..119, got 120"):
        rows[torch.tensor([120])]


def test_what_would_read_or_change_all_rows_is_refused(tmp_path: Path) -> None:
    x, _, _ = made()
    rows = MappedRows([on_disk(tmp_path, x)])
    for work in (
        lambda: rows.double(),
        lambda: rows + 1,
        lambda: rows.mul_(2),
        lambda: rows[:, 1],
        lambda: rows.__setitem__(0, 1.0),
    ):
        with pytest.raises(InputError, match=r"lie in files.*fed.x\[rows\]"):
            work()


# ---- errors ----


def test_a_wrong_number_is_named_by_its_row_before_the_first_round(tmp_path: Path) -> None:
    x, y, owner = made()
    x[77, 3] = np.inf
    fed = Federation.from_arrays(on_disk(tmp_path, x), y, owner)
    with pytest.raises(InputError, match="x has NaN or Inf in row 77, column 3"):
        fedsso.simulate(fed, "mclr", "fedavg", rounds=1)
    with pytest.raises(InputError, match="row 77, column 3"):
        fed.x[torch.tensor([5, 77])]
    with pytest.raises(InputError, match="x has Inf in row 77, column 3"):
        Federation.from_arrays(on_disk(tmp_path, x), y, owner, standardise=True)
    x[:, 1] = np.nan
    x[77, 3] = 0
    with pytest.raises(InputError, match="column 1 of x has no value"):
        Federation.from_arrays(on_disk(tmp_path, x), y, owner, standardise=True)


def _pickle(folder: Path) -> None:
    np.save(folder / "y-0001.npy", np.array([{}], dtype=object), allow_pickle=True)


def _cut(folder: Path) -> None:
    path = folder / "x-0000.npy"
    path.write_bytes(path.read_bytes()[:-1])


def _pipe(folder: Path) -> None:
    (folder / "x-0000.npy").unlink()
    os.mkfifo(folder / "x-0000.npy")


def _no_brace(folder: Path) -> None:
    path = folder / "y-0001.npy"
    path.write_bytes(path.read_bytes().replace(b"}", b" ", 1))


WRONG: dict[str, tuple[Any, str]] = {
    "width": (
        lambda f: np.save(f / "x-0001.npy", np.zeros((1, 6), np.float32)),
        r"x-0001.npy: has samples of shape \(6,\) float32, .*x-0000.npy of \(5,\)",
    ),
    "type": (lambda f: np.save(f / "x-0001.npy", np.zeros((1, 5))), "float64.*must be alike"),
    "labels": (lambda f: (f / "y-0002.npy").unlink(), "y-0002.npy is missing beside"),
    "client": (lambda f: (f / "client-0001.npy").unlink(), "client-0001.npy is missing"),
    "rows": (lambda f: np.save(f / "y-0001.npy", np.zeros(3, int)), r"y-0001.npy: has shape \(3,"),
    "kind": (lambda f: np.save(f / "y-0001.npy", np.zeros(1)), "y-0001.npy: holds float64"),
    "pickle": (_pickle, "y-0001.npy: cannot be mapped.*numpy.save"),
    "cut": (_cut, "x-0000.npy: cannot be mapped"),
    "text": (lambda f: np.save(f / "x-0001.npy", np.array([["a"]])), "must hold numbers"),
    "vector": (lambda f: np.save(f / "x-0001.npy", np.zeros(1)), r"\[rows, features\]"),
    "empty": (
        lambda f: np.save(f / "x-0001.npy", np.zeros((0, 5), np.float32)),
        r"got shape \(0, 5\)",
    ),
    "name": (lambda f: np.save(f / "z-0001.npy", np.zeros(1)), "z-0001.npy: its name does not say"),
    "pipe": (_pipe, "cannot read .*x-0000.npy: it is a pipe"),
    "header without its brace": (_no_brace, "y-0001.npy: cannot be mapped"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_shard_is_named(tmp_path: Path, wrong: str) -> None:
    write_shards(tmp_path, made())
    spoil, message = WRONG[wrong]
    spoil(tmp_path)
    with pytest.raises(InputError, match=message):
        load("npy", files=tmp_path)


# ---- very many clients ----


class Counted:
    """A function that counts how often it is called."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.calls = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return self.work(*args, **named)


def test_building_makes_no_object_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators, permutations and conversions are counted: as many for 20 000 clients as for 20.

    The split is the one of a generator for each client all the same.
    """
    counts = []
    for clients in (20, 20_000):
        x = torch.zeros(5 * clients, 1)
        owner = torch.arange(5 * clients) % clients
        with monkeypatch.context() as patch:
            counted = [Counted(shuffle.generator), Counted(torch.randperm), Counted(packing.dense)]
            patch.setattr(shuffle, "generator", counted[0])
            patch.setattr(torch, "randperm", counted[1])
            patch.setattr(packing, "dense", counted[2])
            fed = Federation.from_arrays(x, owner % 2, owner)
        counts.append([one.calls for one in counted])
    assert counts[0] == counts[1]
    assert fed.x.data_ptr() == x.data_ptr()
    last = 20_000 - 1
    order = torch.randperm(5, generator=shuffle.generator(0, "split", last))
    rows = torch.arange(5) * 20_000 + last
    both = torch.cat([fed.rows_of(last, "test"), fed.rows_of(last)])
    assert both.tolist() == rows[order].tolist()


def test_the_check_of_the_rows_copies_no_more_than_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is looked at number by number is a piece, also where a sum is too large for float32."""
    largest = 0

    def looked_at(some: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, some.numel())
        return torch.ones_like(some, dtype=torch.bool)

    monkeypatch.setattr("fedsso.data.arrays.PIECE", 400)
    monkeypatch.setattr(torch, "isfinite", looked_at)
    x = torch.full((1000, 2), 3e38)
    Federation.from_arrays(x, [0] * 1000, [0] * 1000)
    assert 0 < largest <= 100


TIGHT = """
import resource
import sys
import numpy as np
import torch
import fedsso

torch.set_num_threads(1)
x = np.load(sys.argv[1], mmap_mode="r")
owner = np.arange(len(x)) % 1000
fedsso.simulate(fedsso.load("digits", clients=3), "mclr", "fedavg", rounds=1)  # imports everything
status = open("/proc/self/status").read()
data = int(status.split("VmData:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (data + (300 << 20),) * 2)
fed = fedsso.Federation.from_arrays(x, owner % 2, owner)
run = fedsso.simulate(fed, "mclr", "fedavg", rounds=2, participation=0.01, batch_size=4)
print(len(run.trace["test_loss"]))
try:
    np.array(x)
except MemoryError:
    print("too large")
"""


@pytest.mark.full
@pytest.mark.skipif(
    sys.platform != "linux", reason="the limit of a process's own memory is Linux's"
)
def test_rows_may_be_larger_than_the_memory_that_a_process_may_have(tmp_path: Path) -> None:
    """1 GB of rows, all 0 and so not on the disk, and 300 MB of memory beyond the imports."""
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (1 << 20, 1024)).flush()
    command = [sys.executable, "-c", TIGHT, str(tmp_path / "x.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["3", "too large"], done.stderr
