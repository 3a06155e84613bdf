"""Readers of image files: the official formats in small, damaged in every way, and the real sets
where they are."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsso.data import Federation, images
from fedsso.data.images import (
    CIFAR,
    cifar_binary,
    cifar_pickle,
    cifar_tar,
    emnist_balanced,
    emnist_digits,
    emnist_letters,
    idx,
    npz,
    npz_colour,
)
from fedsso.data.pool import Pool
from fedsso.errors import InputError

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)
Array = np.ndarray[Any, Any]


def grey(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (rows, 28, 28), np.uint8)


def labels(rows: int, first: int = 0, classes: int = 10) -> Array:
    return (first + np.arange(rows) % classes).astype(np.uint8)


def idx_bytes(array: Array) -> bytes:
    """An array as an idx file: two zeros, 8 for bytes, the number of dimensions, the sizes, the
    numbers."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_set(folder: Path, x: Array, y: Array, train: int = 7, packed: bool = True) -> list[Path]:
    """The four files of MNIST, of which the first two hold `train` rows."""
    pack, end = (gzip.compress, ".gz") if packed else (bytes, "")
    paths = []
    for name, part in (("train", slice(train)), ("t10k", slice(train, None))):
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            paths.append(folder / f"{name}-{kind}-ubyte{end}")
            paths[-1].write_bytes(pack(idx_bytes(array[part])))
    return paths


# --- idx
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_pooled_in_their_order(tmp_path: Path, packed: bool) -> None:
    x, y = grey(12), labels(12)
    pool = idx(idx_set(tmp_path, x, y, packed=packed))
    assert (pool.x.dtype, pool.x.shape, pool.y.dtype) == (torch.uint8, (12, 1, 28, 28), torch.int64)
    assert np.array_equal(pool.x[:, 0].numpy(), x)
    assert np.array_equal(pool.y.numpy(), y)
    assert pool.affine == (2 / 255, -1.0)
    assert idx(idx_set(tmp_path, x, y), pixel_range=(0.0, 1.0)).affine == (1 / 255, 0.0)


def test_emnist_is_put_upright_and_letters_count_from_zero(tmp_path: Path) -> None:
    x = grey(2500)  # more than are turned at a time
    stored = x.transpose(0, 2, 1)
    for reader, first, classes in (
        (emnist_digits, 0, 10),
        (emnist_balanced, 0, 47),
        (emnist_letters, 1, 26),
    ):
        pool = reader(idx_set(tmp_path, stored, labels(2500, first, classes), train=1300))
        assert np.array_equal(pool.x[:, 0].numpy(), x)
        assert pool.x.is_contiguous()
        assert np.array_equal(pool.y.numpy(), labels(2500, 0, classes))


Damage = Callable[[list[Path]], object]


def swapped(paths: list[Path]) -> None:
    images, marks = paths[0].read_bytes(), paths[1].read_bytes()
    paths[0].write_bytes(marks)
    paths[1].write_bytes(images)


IDX: dict[str, tuple[Damage, str]] = {
    "swapped": (
        swapped,
        r"train-images\S*: .*not an idx file of images.*0x00000803",
    ),
    "images as labels": (
        lambda p: p[1].write_bytes(p[0].read_bytes()),
        r"train-labels\S*: .*not an idx file of labels.*0x00000801",
    ),
    "empty": (lambda p: p[2].write_bytes(b""), r"t10k-images\S*: is not an idx file of images"),
    "half a header": (
        lambda p: p[2].write_bytes(idx_bytes(grey(1))[:10]),
        r"t10k-images\S*: is not an idx file",
    ),
    "another size": (
        lambda p: p[0].write_bytes(idx_bytes(np.zeros((7, 32, 28), np.uint8))),
        r"train-images\S*: .*\[32, 28\].*need \[28, 28\]",
    ),
    "no rows": (
        lambda p: p[0].write_bytes(idx_bytes(grey(0))),
        r"train-images\S*: tells of 0 images, need 1 to",
    ),
    "too few bytes": (
        lambda p: p[0].write_bytes(idx_bytes(grey(7))[:-1]),
        r"train-images\S*: .*7 items in 5488 bytes.*5487 bytes",
    ),
    "too many bytes": (
        lambda p: p[0].write_bytes(idx_bytes(grey(7)) + b"\0"),
        r"train-images\S*: .*7 items in 5488 bytes.*has more",
    ),
    "a boast": (
        lambda p: p[0].write_bytes(struct.pack(">4I", 0x803, 2**32 - 1, 28, 28) + bytes(784)),
        r"tells of 4294967295 images, need 1 to",
    ),
    "fewer labels": (
        lambda p: p[1].write_bytes(idx_bytes(labels(6))),
        r"train-images\S* .*7 images.*train-labels\S* .*6 labels.*both from one set",
    ),
    "unknown label": (
        lambda p: p[3].write_bytes(idx_bytes(np.array([1, 2, 10, 3, 4], np.uint8))),
        r"t10k-labels\S*: row 2 has label 10, need 0\.\.9",
    ),
    "cut gzip": (
        lambda p: p[0].write_bytes(gzip.compress(idx_bytes(grey(7)))[:-20]),
        r"train-images\S*: .*gzip.*cut short.*download it again",
    ),
    "corrupt gzip": (
        lambda p: p[0].write_bytes(b"\x1f\x8b" + bytes(50)),
        r"train-images\S*: cannot be read as gzip",
    ),
    "wrong checksum": (
        lambda p: p[1].write_bytes(gzip.compress(idx_bytes(labels(7)))[:-8] + bytes(8)),
        r"train-labels\S*: cannot be read as gzip, .*CRC",
    ),
    "missing": (
        lambda p: p[1].unlink(),
        r"cannot read \S*train-labels\S*: No such file.*check the name",
    ),
}


@pytest.mark.parametrize("case", IDX)
def test_a_damaged_idx_file_is_an_error_that_names_it(case: str, tmp_path: Path) -> None:
    damage, message = IDX[case]
    paths = idx_set(tmp_path, grey(12), labels(12))
    damage(paths)
    with pytest.raises(InputError, match=message):
        idx(paths)


def test_labels_of_letters_begin_with_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train-labels\S*: row 0 has label 0, need 1\.\.26"):
        emnist_letters(idx_set(tmp_path, grey(12), labels(12)))
    with pytest.raises(InputError, match=r"row 1 has label 47, need 0\.\.46"):
        emnist_balanced(idx_set(tmp_path, grey(12), labels(12, 46, 2)))


# --- npz
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["C", "F"])
def test_colour_images_of_an_npz_have_their_channels_first(tmp_path: Path, order: Any) -> None:
    x = np.random.default_rng(0).integers(0, 256, (1100, 32, 32, 3), np.uint8)
    np.savez(
        tmp_path / "c.npz", x=np.asarray(x, order=order), y=labels(1100).astype(np.int32), n_train=3
    )
    pool = npz_colour([tmp_path / "c.npz"])
    assert pool.x.is_contiguous()
    assert np.array_equal(pool.x.numpy(), x.transpose(0, 3, 1, 2))
    assert np.array_equal(pool.y.numpy(), labels(1100))
    with pytest.raises(
        InputError, match=r"c\.npz: .*uint8 \[rows, 28, 28\].*got uint8 \[1100, 32, 32, 3\]"
    ):
        npz([tmp_path / "c.npz"])


@pytest.mark.parametrize("order", ["C", "F"])
def test_grey_images_of_an_npz(tmp_path: Path, order: Any) -> None:
    x = grey(5)
    np.savez(tmp_path / "g.npz", x=np.asarray(x, order=order), y=labels(5), n_train=3)
    pool = npz([tmp_path / "g.npz"])
    assert pool.x.is_contiguous()
    assert np.array_equal(pool.x[:, 0].numpy(), x)
    with pytest.raises(
        InputError, match=r"g\.npz: .*uint8 \[rows, 32, 32, 3\].*got uint8 \[5, 28, 28\]"
    ):
        npz_colour([tmp_path / "g.npz"])


# --- CIFAR-10
# --------------------------------------------------------------------------------------------------
def colour(rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (rows, 3072), np.uint8)


def records(x: Array, y: Array) -> bytes:
    return np.concatenate([y[:, None], x], 1).tobytes()


def pickled(x: Array, y: Array) -> bytes:
    return pickle.dumps(
        {b"data": x, b"labels": y.tolist(), b"batch_label": b"training batch 1 of 5"}, protocol=2
    )


def python2(x: Array, y: Array) -> bytes:
    """The same as Python 2 wrote it: its strings, and the places where numpy then kept its
    functions."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(M"
        + struct.pack("<H", len(x))
        + b"M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|"
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbI00\nT"
        + struct.pack("<I", x.size)
        + x.tobytes()
        + b"tb"
    )
    marks = b"](" + b"".join(b"K" + bytes([label]) for label in y.tolist()) + b"e"
    names = b"](" + b"U\x05a.png" * len(y) + b"e"
    return (
        b"\x80\x02}(U\x04data" + array + b"U\x06labels" + marks + b"U\x09filenames" + names + b"u."
    )


ROWS = [(colour(4, i), labels(4, i)) for i in range(5)] + [(colour(3, 5), labels(3))]


def cifar_set(folder: Path, write: Callable[[Array, Array], bytes], end: str = "") -> list[Path]:
    paths = [folder / f"{name}{end}" for name in CIFAR]
    for path, rows in zip(paths, ROWS, strict=True):
        path.write_bytes(write(*rows))
    return paths


def archive(folder: Path, files: dict[str, bytes], mode: Any = "w:gz") -> list[Path]:
    path = folder / "cifar.tar.gz"
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return [path]


def batches(write: Callable[[Array, Array], bytes], end: str = "") -> dict[str, bytes]:
    """The batches in the order of the official archive, with the other files in it."""
    content = {f"{name}{end}": write(*rows) for name, rows in zip(CIFAR, ROWS, strict=True)}
    order = [f"{CIFAR[i]}{end}" for i in (3, 5, 2, 4, 1, 0)]
    return {
        "readme.html": b"read me",
        **{name: content[name] for name in order},
        "batches.meta": b"no pickle",
    }


CIFAR_SETS: dict[str, Callable[[Path], Pool]] = {
    "binary": lambda folder: cifar_binary(cifar_set(folder, records, ".bin")),
    "pickle": lambda folder: cifar_pickle(cifar_set(folder, pickled)),
    "pickle of Python 2": lambda folder: cifar_pickle(cifar_set(folder, python2)),
    "binary archive": lambda folder: cifar_tar(archive(folder, batches(records, ".bin"))),
    "pickle archive": lambda folder: cifar_tar(archive(folder, batches(python2))),
    "unpacked archive": lambda folder: cifar_tar(archive(folder, batches(records, ".bin"), "w")),
}


@pytest.mark.parametrize("case", CIFAR_SETS)
def test_every_form_of_cifar_gives_the_same_rows(case: str, tmp_path: Path) -> None:
    pool = CIFAR_SETS[case](tmp_path)
    assert (pool.x.dtype, pool.x.shape, pool.y.dtype) == (torch.uint8, (23, 3, 32, 32), torch.int64)
    assert np.array_equal(pool.x.flatten(1).numpy(), np.concatenate([x for x, _ in ROWS]))
    assert np.array_equal(pool.y.numpy(), np.concatenate([y for _, y in ROWS]))
    assert pool.affine == (2 / 255, -1.0)


X, Y = ROWS[0]
BINARY: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, need records of 3073 bytes"),
    "cut": (
        records(X, Y)[:-1],
        "has 12291 bytes.*records of 3073 bytes.*download it again",
    ),
    "label": (records(X, Y + 7), r"row 3 has label 10, need 0\.\.9"),
}


@pytest.mark.parametrize("case", BINARY)
def test_a_damaged_binary_batch_is_an_error(case: str, tmp_path: Path) -> None:
    data, message = BINARY[case]
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"data_batch_1\.bin: {message}"):
        cifar_binary([path])
    files = {**batches(records, ".bin"), "data_batch_1.bin": data}
    with pytest.raises(InputError, match=rf"cifar\.tar\.gz: data_batch_1\.bin: {message}"):
        cifar_tar(archive(tmp_path, files))


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


PICKLES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "CIFAR batch.*cut short"),
    "cut": (python2(X, Y)[:-30], "CIFAR batch.*cut short"),
    "evil": (pickle.dumps(Evil()), r"asks for posix\.mkdir"),
    "evil inside": (pickle.dumps({b"data": X, b"labels": [Evil()]}, 2), r"asks for posix\.mkdir"),
    "evil by name": (b"cbuiltins\neval\n(U\x011tR.", r"asks for builtins\.eval"),
    "evil attribute": (
        b"\x80\x04cnumpy\nndarray.__class__\n.",
        r"asks for numpy\.ndarray\.__class__",
    ),
    "objects": (b"cnumpy\ndtype\n(U\x01OK\x00K\x01tR.", "data must be uint8"),
    "other text": (
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00zipt" + b"R.",
        "text in 'zip', need 'latin1'",
    ),
    "no dictionary": (pickle.dumps([1, 2]), r"data must be uint8 \[rows, 3072\]"),
    "no data": (pickle.dumps({b"labels": [1]}, 2), r"data must be uint8 \[rows, 3072\]"),
    "wide data": (pickled(X[:, :3000], Y), r"data must be uint8 \[rows, 3072\]"),
    "no rows": (python2(X[:0], Y[:0]), r"data must be uint8 \[rows, 3072\]"),
    "fewer labels": (pickled(X, Y[:3]), "labels must be a list of 4 integers, one per image"),
    "names as labels": (
        pickle.dumps({b"data": X, b"labels": [1, 2, 3, b"cat"]}, 2),
        "labels must be a list of 4",
    ),
    "label": (pickled(X, Y + 7), r"row 3 has label 10, need 0\.\.9"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_a_damaged_or_hostile_pickle_is_an_error_and_runs_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, message = PICKLES[case]
    path = tmp_path / "data_batch_1"
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"data_batch_1: .*{message}"):
        cifar_pickle([path])
    assert not (tmp_path / "harm").exists()


def test_an_archive_must_have_all_batches(tmp_path: Path) -> None:
    files = batches(records, ".bin")
    del files["data_batch_2.bin"], files["test_batch.bin"]
    with pytest.raises(
        InputError,
        match=r"cifar\.tar\.gz: .*data_batch_2\.bin, test_batch\.bin.*download it again",
    ):
        cifar_tar(archive(tmp_path, files))
    with pytest.raises(
        InputError, match=r"data_batch_1, data_batch_2, .*, test_batch.*download it again"
    ):
        cifar_tar(archive(tmp_path, {"readme.html": b"read me"}))


def test_a_link_in_an_archive_is_no_batch(tmp_path: Path) -> None:
    (path,) = archive(tmp_path, {})
    with tarfile.open(path, "w:gz") as tar:
        for name in CIFAR:
            member = tarfile.TarInfo(f"../../{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(member)
    with pytest.raises(InputError, match="has no data_batch_1"):
        cifar_tar([path])


@pytest.mark.parametrize("keep", [0, 1, 20, 5000, -4])
def test_a_cut_archive_is_an_error(keep: int, tmp_path: Path) -> None:
    (path,) = archive(tmp_path, batches(records, ".bin"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"cifar\.tar\.gz: .*(gzip|tar\.gz).*cut short"):
        cifar_tar([path])


def test_an_archive_with_a_wrong_checksum_is_an_error(tmp_path: Path) -> None:
    (path,) = archive(tmp_path, batches(records, ".bin"))
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(InputError, match=r"cifar\.tar\.gz: cannot be read as gzip, .*CRC"):
        cifar_tar([path])


# --- all
# --------------------------------------------------------------------------------------------------
def _npz_bytes(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


WHOLE: dict[str, tuple[bytes, Callable[[list[Path]], Pool]]] = {
    "npz": (_npz_bytes(x=grey(3), y=labels(3)), npz),
    "npz_colour": (_npz_bytes(x=X.reshape(-1, 32, 32, 3), y=Y), npz_colour),
    "pickle": (python2(X, Y), cifar_pickle),
    "idx": (
        gzip.compress(idx_bytes(grey(1))),
        lambda paths: idx([*paths, paths[0].with_name("labels")]),
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_damage_anywhere_is_noticed_or_harmless(case: str, tmp_path: Path) -> None:
    """Random bytes at random places, most of them in the header: whatever fails, fails as an
    InputError."""
    data, reader = WHOLE[case]
    path, draw, failed = tmp_path / "file", random.Random(0), 0
    path.with_name("labels").write_bytes(idx_bytes(labels(1)))
    path.write_bytes(data)
    reader([path])
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 3, 20])):
            damaged[draw.randrange(draw.choice([min(300, len(data)), len(data)]))] = draw.randrange(
                256
            )
        path.write_bytes(damaged)
        try:
            assert len(reader([path]).x)
        except InputError:
            failed += 1
    assert failed > 10


@pytest.mark.parametrize(
    "name", ["idx", "emnist_digits", "npz", "npz_colour", "cifar_binary", "cifar_pickle"]
)
def test_reading_and_sharing_out_keeps_one_copy_of_the_images(name: str, tmp_path: Path) -> None:
    rows = 8000
    bright = np.random.default_rng(0).integers(0, 256, (rows, 3072), np.uint8)
    x, y = grey(rows), labels(rows)
    if name in ("idx", "emnist_digits"):
        paths = idx_set(tmp_path, x, y, train=7000)
    elif name.startswith("npz"):
        paths = [tmp_path / "x.npz"]
        np.savez(paths[0], x=x if name == "npz" else bright.reshape(-1, 32, 32, 3), y=y)
    else:
        paths = [tmp_path / f"{i}" for i in range(10)]
        for i, path in enumerate(paths):
            part = slice(800 * i, 800 * (i + 1))
            path.write_bytes(
                (records if name == "cifar_binary" else python2)(bright[part], y[part])
            )
    del bright, x
    tracemalloc.start()
    try:
        pool = getattr(images, name)(paths)
        fed = Federation.from_rows(pool.x, pool.y, torch.arange(rows).tensor_split(10), classes=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fed.x.data_ptr() == pool.x.data_ptr()
    assert peak < 1.5 * pool.x.numel() + (2 << 20)


def _mean_images(path: Path) -> Array:
    pool = npz([path])
    return np.stack([pool.x[pool.y == c, 0].float().mean(0).numpy() for c in range(10)])


def _likeness(a: Array, b: Array) -> Array:
    """Correlation of each pair of images."""
    return np.array([np.corrcoef(p.ravel(), q.ravel())[0, 1] for p, q in zip(a, b, strict=True)])


@needs_data
def test_the_real_emnist_is_upright_and_survives_its_official_form(tmp_path: Path) -> None:
    """Its mean digits look like those of MNIST, and less so when transposed as in the official
    files."""
    folder = Path(os.environ["FEDSSO_DATA"])
    emnist, mnist = (_mean_images(folder / f"{name}.npz") for name in ("emnist_digits", "mnist"))
    upright, transposed = (_likeness(means, mnist) for means in (emnist, emnist.transpose(0, 2, 1)))
    assert (upright > transposed).all()
    assert upright.mean() > 0.75 > 0.5 > transposed.mean()
    with np.load(folder / "emnist_digits.npz") as file:
        x, y = file["x"][:300], file["y"][:300]
    pool = emnist_digits(idx_set(tmp_path, x.transpose(0, 2, 1), y, train=200))
    assert np.array_equal(pool.x[:, 0].numpy(), x)


@needs_data
def test_the_real_cifar_subset_is_balanced_and_has_its_colours_in_place() -> None:
    path = Path(os.environ["FEDSSO_DATA"]) / "cifar10_20k.npz"
    pool = npz_colour([path])
    assert pool.x.shape == (20000, 3, 32, 32)
    assert pool.y.bincount().tolist() == [2000] * 10
    with np.load(path) as file:
        assert np.array_equal(pool.x[::500].numpy(), file["x"][::500].transpose(0, 3, 1, 2))


HOSTILE = {
    "an array of objects over bytes": b"\x80\x02cnumpy\ndtype\ncnumpy\nndarray\n"
    b"(K\x01\x85U\x01OT\x08\0\0\0AAAAAAAAtR\x85R.",
    "a format with fields": b"\x80\x02cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
    b"(K\x03U\x01|N(U\x01atq\x00}U\x01aK\x01K\x00\x86sK\xffK\xffK\x00tb.",
}
READ = "import sys, pathlib, fedsso.data.images as i; i.cifar_pickle([pathlib.Path(sys.argv[1])])"


@pytest.mark.parametrize("case", HOSTILE)
def test_a_pickle_reaches_nothing_of_numpy(case: str, tmp_path: Path) -> None:
    """In a process of its own: what it guards against ends the process."""
    (tmp_path / "batch").write_bytes(HOSTILE[case])
    done = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "batch"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "InputError" in done.stderr
