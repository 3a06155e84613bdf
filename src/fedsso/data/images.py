"""Readers of image sets: uint8 samples [channels, H, W] and the affine map that takes them to a
pixel range.

Every reader pools all rows of its files in their order, so the same images in another format give
the same rows. Images are never copied as a whole: they are read into one buffer and put upright in
it, a block at a time.
"""

from __future__ import annotations

import math
import pickle
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast
from zipfile import BadZipFile

import numpy as np
import torch

from ..errors import InputError
from ..support.intake import Pieces, limits, read_bytes, read_npz, unpacked
from .pool import Pool

Array = np.ndarray[Any, Any]
Batch = tuple[
    Callable[[str, bytes], tuple[Array, Any]], str, bytes
]  # how to decode it, its name, its content
GREY, COLOUR = (28, 28), (3, 32, 32)
LABELS, IMAGES = 0x801, 0x803  # magic numbers of idx files: bytes in one and in three dimensions
BLOCK = 1 << 20  # bytes read at a time
CIFAR = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
MOST = 1 << 26  # bytes of a CIFAR batch, twice what one has
MEMBERS = 1000  # files of a CIFAR archive, which has eight
ROWS = 1 << 21  # images of an idx file, more than any set has
DAMAGED = "corrupt or cut short"


def digits(_: Sequence[Path] = (), *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """The 1797 8×8 digits that come with scikit-learn; pixels are 0..16."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "data set 'digits' comes with scikit-learn: pip install scikit-learn"
        ) from None
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype(np.uint8)).view(-1, 1, 8, 8)
    return Pool(x, torch.from_numpy(labels.astype(np.int64)), _affine(pixel_range, 16))


# --- npz
# -------------------------------------------------------------------------------------------------------------
def npz(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """28×28 images from a .npz file with x (uint8 [rows, 28, 28]) and y (integers [rows])."""
    x, y = _arrays(paths, GREY)
    return _pool(x, y, pixel_range)


def npz_colour(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """32×32 colour images from a .npz file with x (uint8 [rows, 32, 32, 3]) and y (integers
    [rows])."""
    x, y = _arrays(paths, (32, 32, 3))
    _permute(x, 3, 1, 2)
    return _pool(x.reshape(-1, *COLOUR), y, pixel_range)


def _arrays(paths: Sequence[Path], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Images of a shape in row-major order, and their labels."""
    (path,) = paths
    x, y = read_npz(path, ("x", "y")).values()
    if x.dtype != np.uint8 or x.ndim != len(shape) + 1 or x.shape[1:] != shape:
        need = ", ".join(map(str, ("rows", *shape)))
        raise InputError(f"{path}: x must be uint8 [{need}], got {x.dtype} {list(x.shape)}")
    if y.dtype.kind not in "iu" or y.shape != (len(x),):
        raise InputError(
            f"{path}: y must be integers [{len(x)}], one per image, got {y.dtype} {list(y.shape)}"
        )
    return np.ascontiguousarray(x), y


# --- idx
# -------------------------------------------------------------------------------------------------------------
def idx(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """MNIST or Fashion-MNIST from its own files (images, labels, images, labels), gzipped or not."""
    return _pool(*_idx(paths, range(10)), pixel_range)


def emnist_digits(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """EMNIST Digits from its own files (images, labels, images, labels)."""
    return _pool(*_emnist(paths, range(10)), pixel_range)


def emnist_balanced(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """EMNIST Balanced, 47 digits and letters, from its own files (images, labels, images, labels)."""
    return _pool(*_emnist(paths, range(47)), pixel_range)


def emnist_letters(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """EMNIST Letters from its own files (images, labels, images, labels); labels 1..26 become
    0..25."""
    x, y = _emnist(paths, range(1, 27))
    return _pool(x, y - 1, pixel_range)


def _emnist(paths: Sequence[Path], labels: range) -> tuple[Array, Array]:
    """Images put upright: EMNIST stores them transposed."""
    x, y = _idx(paths, labels)
    _permute(x, 2, 1)
    return x, y


def _idx(paths: Sequence[Path], labels: range) -> tuple[Array, Array]:
    """The images of all pairs of files in one buffer, and their labels."""
    pixels, marks = bytearray(), bytearray()
    for image_file, label_file in zip(paths[::2], paths[1::2], strict=True):
        images, own = _read_idx(image_file, IMAGES, GREY, pixels), bytearray()
        labelled = _read_idx(label_file, LABELS, (), own)
        if images != labelled:
            raise InputError(
                f"{image_file} has {images} images, {label_file} has {labelled} labels: take both "
                f"from one set"
            )
        _known(label_file, own, labels)
        marks += own
    return np.frombuffer(pixels, np.uint8).reshape(-1, *GREY), np.frombuffer(marks, np.uint8)


def _read_idx(path: Path, magic: int, shape: tuple[int, ...], out: bytearray) -> int:
    """Append what an idx file holds to a buffer; the number of its items, which have this shape."""
    before = len(out)
    with unpacked(path) as file:
        items = _header(path, file, magic, shape)
        size = items * math.prod(shape)
        limits().check("bytes", before + size, path, "bytes, unpacked, with the files before it")
        while len(out) - before <= size and (block := file.read(BLOCK)):
            out += block
    got = len(out) - before
    if got != size:
        than = "more" if got > size else f"{got} bytes"
        raise InputError(
            f"{path}: its header tells of {items} items in {size} bytes, it has {than}: fetch it "
            f"again"
        )
    return items


def _header(path: Path, file: IO[bytes], magic: int, shape: tuple[int, ...]) -> int:
    """The number of items, at least one, of the wanted kind and shape."""
    head = file.read(4 * (2 + len(shape)))
    what = "images" if shape else "labels"
    if head[:4] != magic.to_bytes(4) or len(head) != 4 * (2 + len(shape)):
        raise InputError(
            f"{path}: is no idx file of {what}, which begins with {magic:#010x}: fetch it again"
        )
    items, *sizes = np.frombuffer(head[4:], ">u4").tolist()
    if tuple(sizes) != shape:
        raise InputError(
            f"{path}: holds images of {sizes} pixels, need {list(shape)}: take the files of this "
            f"set"
        )
    if not 0 < items <= ROWS:
        raise InputError(f"{path}: tells of {items} {what}, need 1 to {ROWS}: fetch it again")
    return int(items)


# --- CIFAR-10
# --------------------------------------------------------------------------------------------------------
def cifar_binary(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """CIFAR-10 from the files data_batch_1.bin, ... of its binary version."""
    return _cifar(((_records, str(path), read_bytes(path)) for path in paths), pixel_range)


def cifar_pickle(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """CIFAR-10 from the files data_batch_1, ... of its Python version; nothing in them is run."""
    return _cifar(((_unpickled, str(path), read_bytes(path)) for path in paths), pixel_range)


def cifar_tar(paths: Sequence[Path], *, pixel_range: Sequence[float] = (-1.0, 1.0)) -> Pool:
    """CIFAR-10 from cifar-10-binary.tar.gz or cifar-10-python.tar.gz, without unpacking it to disk."""
    (path,) = paths
    return _cifar(_members(path), pixel_range)


def _cifar(batches: Iterable[Batch], pixel_range: Sequence[float]) -> Pool:
    """The images of all batches in one buffer."""
    pixels, marks = bytearray(), bytearray()
    for decode, name, data in batches:
        if len(data) > MOST:
            raise InputError(f"{name}: has {len(data)} bytes, need at most {MOST}: fetch it again")
        images, labels = decode(name, data)
        _known(name, labels, range(10))
        pixels += np.ascontiguousarray(images).data
        marks += bytes(labels)
    x = np.frombuffer(pixels, np.uint8).reshape(-1, *COLOUR)
    return _pool(x, np.frombuffer(marks, np.uint8), pixel_range)


def _records(name: str, data: bytes) -> tuple[Array, bytes]:
    """Records of one label and 3072 pixels."""
    width = 1 + math.prod(COLOUR)
    if not data or len(data) % width:
        raise InputError(
            f"{name}: has {len(data)} bytes, need records of {width} bytes, {DAMAGED}: fetch it "
            f"again"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    return rows[:, 1:], rows[:, 0].tobytes()


def _unpickled(name: str, data: bytes) -> tuple[Array, list[int]]:
    """A dictionary with the keys data and labels."""
    try:
        batch = _Unpickler(BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damaged bytes can ask the unpickler for anything
        raise InputError(
            f"{name}: cannot be read as a CIFAR batch, {DAMAGED} ({error}): fetch it again"
        ) from None
    x, y = (
        (batch.get(key) for key in (b"data", b"labels"))
        if isinstance(batch, dict)
        else (None, None)
    )
    if not isinstance(x, _Array) or x.rows is None:
        raise InputError(f"{name}: data must be uint8 [rows, {math.prod(COLOUR)}]: fetch it again")
    if (
        not isinstance(y, list)
        or len(y) != len(x.rows)
        or not all(type(label) is int for label in y)
    ):
        raise InputError(
            f"{name}: labels must be a list of {len(x.rows)} integers, one per image: fetch it "
            f"again"
        )
    return x.rows, y


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries, lists, text and what is said about an array of bytes; it calls nothing of
    numpy."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the few things that a batch consists of."""
        if (module, name) == ("_codecs", "encode"):
            return self.encode
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch needs")
        return ADMITTED[module, name]

    encoded = 0

    def encode(self, text: str, encoding: str) -> bytes:
        """Bytes, as Python 3 writes them in the format of Python 2; not the same text again and
        again."""
        self.encoded += len(text)
        if encoding != "latin1" or self.encoded > MOST:
            raise pickle.UnpicklingError(
                f"it has text in {encoding!r}, need 'latin1', or too much of it"
            )
        return text.encode("latin1")


class _Dtype:
    """The format of an array's numbers; its state, the byte order, says nothing about bytes."""

    def __init__(self, name: object, *_: object) -> None:
        self.bytes = isinstance(name, str | bytes) and name in ("u1", b"u1")

    def __setstate__(self, _: object) -> None:
        pass


class _Array:
    """An array as its state describes it: version, shape, format, order, bytes."""

    rows: Array | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        match state:
            case (
                int(),
                (int() as rows, int() as width),
                _Dtype(bytes=True),
                order,
                bytes() as content,
            ):
                if rows > 0 and width == math.prod(COLOUR) and len(content) == rows * width:
                    self.rows = np.frombuffer(content, np.uint8).reshape(
                        (rows, width), order="F" if order else "C"
                    )


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy moved it in version 2
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "ndarray",  # the kind of array: nothing that can be called
    ("numpy", "dtype"): _Dtype,
}


def _members(path: Path) -> Iterator[Batch]:
    """The batches of an archive in the order of CIFAR, let go of one by one."""
    files = _untarred(path)
    binary = any(name.endswith(".bin") for name in files)
    names = [f"{name}.bin" for name in CIFAR] if binary else CIFAR
    missing = [name for name in names if name not in files]
    if missing:
        raise InputError(f"{path}: has no {', '.join(missing)}: fetch it again")
    for name in names:
        yield (_records if binary else _unpickled), f"{path}: {name}", files.pop(name)


def _untarred(path: Path) -> dict[str, bytes]:
    """The batches among an archive's files, by the last part of their name."""
    files: dict[str, bytes] = {}
    try:
        with (
            unpacked(path) as raw,
            tarfile.open(fileobj=cast(IO[bytes], Pieces(raw)), mode="r:") as archive,
        ):
            for count, member in enumerate(archive):
                if count > MEMBERS:
                    raise InputError(
                        f"{path}: has more than {MEMBERS} files, CIFAR-10 has 8: fetch it again"
                    )
                name = member.name.rpartition("/")[2]
                if (
                    member.isfile()
                    and name.removesuffix(".bin") in CIFAR
                    and (file := archive.extractfile(member))
                ):
                    if member.size > MOST:
                        raise InputError(
                            f"{path}: {name} has {member.size} bytes, need at most {MOST}: fetch "
                            f"it again"
                        )
                    files[name] = file.read()
            while raw.read(BLOCK):  # the checksum comes last
                pass
    except InputError:
        raise
    except (tarfile.TarError, BadZipFile, ValueError, OverflowError) as error:
        raise InputError(
            f"{path}: cannot be read as tar.gz, {DAMAGED} ({error}): fetch it again"
        ) from None
    return files


# --- all
# -------------------------------------------------------------------------------------------------------------
def _pool(x: Array, y: Array, pixel_range: Sequence[float]) -> Pool:
    """Images [rows, H, W] or [rows, 3, H, W], which are not copied."""
    images = torch.from_numpy(x)
    images = images[:, None] if x.ndim == 3 else images
    return Pool(images, torch.from_numpy(y.astype(np.int64)), _affine(pixel_range, 255))


def _permute(x: Array, *axes: int) -> None:
    """Permute the axes of every image in place; the caller knows the new shape, x keeps the old
    one."""
    for start in range(0, len(x), 1024):
        block = x[start : start + 1024]
        block.reshape(-1)[:] = block.transpose(0, *axes).ravel()


def _known(path: str | Path, labels: Iterable[int], known: range) -> None:
    for row, label in enumerate(labels):
        if label not in known:
            raise InputError(
                f"{path}: row {row} has label {label}, need {known[0]}..{known[-1]}: take the "
                f"files of this set"
            )


def _affine(pixel_range: Sequence[float], brightest: int) -> tuple[float, float]:
    low, high = pixel_range
    if not (math.isfinite(high - low) and low < high):
        raise InputError(
            f"pixel_range must be two finite numbers, low < high, got {list(pixel_range)}"
        )
    return (high - low) / brightest, low
