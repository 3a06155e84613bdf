"""Readers of image sets.

Every reader takes the paths of its files, in the order that `sets.py` lists them, and the wanted
range of pixels. It returns a pool of uint8 samples [channels, height, width], and the affine map
that takes a byte to that range. It pools all rows of its files in their order, so the same images
in another format give the same rows. It raises InputError, with the name of the file, for a file
that is damaged or of another kind.

Images are never copied as a whole. They are read into one buffer, and their axes are put into the
right order within that buffer, a block at a time.
"""

from __future__ import annotations

import math
import pickle
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeGuard, cast
from zipfile import BadZipFile

import numpy as np
import torch

from ..errors import InputError
from ..support.intake import Pieces, limits, read_bytes, read_npz, unpacked
from .options import PIXEL_RANGE
from .pool import Pool

Array = np.ndarray[Any, Any]
Paths = Sequence[Path]
Range = Sequence[float]
Decoder = Callable[[str, bytes], tuple[Array, Any]]
"""A function from the name and the bytes of a batch to its images and labels."""
Batch = tuple[Decoder, str, bytes]
"""How to decode a batch of CIFAR, its name for messages, and its bytes."""

GREY = (28, 28)
"""The shape of a grey image."""
COLOUR = (3, 32, 32)
"""The shape of a colour image of CIFAR: channels, height, width."""
PIXELS = math.prod(COLOUR)
"""The bytes of a colour image."""
LABELS = 0x801
"""What an idx file of labels begins with. It stands for bytes in one dimension."""
IMAGES = 0x803
"""What an idx file of images begins with. It stands for bytes in three dimensions."""
BLOCK = 1 << 20
"""How many bytes are read at a time."""
ROWS_AT_A_TIME = 1024
"""How many images have their axes permuted at a time."""
CIFAR = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
"""The batches of CIFAR-10 in their order."""
MOST = 1 << 26
"""The most bytes of a CIFAR batch: twice what one has."""
MEMBERS = 1000
"""The most files in a CIFAR archive, which has eight."""
ROWS = 1 << 21
"""The most images in an idx file: more than any set has."""
DAMAGED = "corrupt or cut short"


def digits(
    _: Paths = (),
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read the 1797 8×8 digits that come with scikit-learn. Their pixels are 0 to 16.

    There are no files to read, so the list of paths is ignored.

    >>> pool = digits()
    >>> pool.x.shape, pool.x.dtype
    (torch.Size([1797, 1, 8, 8]), torch.uint8)
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "data set 'digits' comes with scikit-learn: pip install scikit-learn"
        ) from None
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype(np.uint8))
    y = torch.from_numpy(labels.astype(np.int64))
    return Pool(x.view(-1, 1, 8, 8), y, _affine(pixel_range, 16))


# ---- npz: one file of numpy, with arrays x and y ----


def npz(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read 28×28 images from a .npz file.

    It holds x (uint8 [rows, 28, 28]) and y (integers [rows]).
    """
    x, y = _arrays(paths, GREY)
    return _pool(x, y, pixel_range)


def npz_colour(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read 32×32 colour images from a .npz file.

    It holds x (uint8 [rows, 32, 32, 3]) and y (integers [rows]). A model wants the colours first,
    so the axes are permuted.
    """
    x, y = _arrays(paths, (32, 32, 3))
    _permute(x, 3, 1, 2)
    return _pool(x.reshape(-1, *COLOUR), y, pixel_range)


def _arrays(paths: Paths, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Images of the given shape, contiguous in memory, and their labels."""
    (path,) = paths
    x, y = read_npz(path, ("x", "y")).values()
    if x.dtype != np.uint8 or x.shape[1:] != shape:
        need = ", ".join(map(str, shape))
        got = f"{x.dtype} {list(x.shape)}"
        raise InputError(f"{path}: x must be uint8 [rows, {need}], got {got}")
    rows = len(x)
    if y.dtype.kind not in "iu" or y.shape != (rows,):
        got = f"{y.dtype} {list(y.shape)}"
        raise InputError(f"{path}: y must be integers [{rows}], one per image, got {got}")
    return np.ascontiguousarray(x), y


# ---- idx: the format of MNIST and its relatives ----
#
# A set consists of four files: images and labels for training, images and labels for testing. Both
# parts are pooled, because every client later keeps its own rows for testing.


def idx(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read MNIST or Fashion-MNIST from its own files (images, labels, images, labels).

    The files may be packed by gzip or not.
    """
    x, y = _idx(paths, range(10))
    return _pool(x, y, pixel_range)


def emnist_digits(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read EMNIST Digits from its own files (images, labels, images, labels).

    It has 280000 images in ten classes, equally many of each.
    """
    x, y = _emnist(paths, range(10))
    return _pool(x, y, pixel_range)


def emnist_balanced(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read EMNIST Balanced from its own files (images, labels, images, labels).

    It has 47 classes of digits and letters, with equally many images of each.
    """
    x, y = _emnist(paths, range(47))
    return _pool(x, y, pixel_range)


def emnist_letters(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read EMNIST Letters from its own files (images, labels, images, labels).

    The labels 1 to 26 of the files become 0 to 25.
    """
    x, y = _emnist(paths, range(1, 27))
    return _pool(x, y - 1, pixel_range)


def _emnist(paths: Paths, labels: range) -> tuple[Array, Array]:
    """The images, put upright, and their labels: EMNIST stores images transposed."""
    x, y = _idx(paths, labels)
    _permute(x, 2, 1)
    return x, y


def _idx(paths: Paths, labels: range) -> tuple[Array, Array]:
    """The images of all pairs of files, in one buffer, and their labels.

    Args:
        paths: Images, labels, images, labels, and so on.
        labels: The labels that the set has. Another one means that a file is damaged or wrong.

    Returns:
        x uint8 [rows, 28, 28] and y uint8 [rows].
    """
    pixels = bytearray()
    marks = bytearray()
    for image_file, label_file in zip(paths[::2], paths[1::2], strict=True):
        own = bytearray()
        images = _read_idx(image_file, IMAGES, GREY, pixels)
        labelled = _read_idx(label_file, LABELS, (), own)
        if images != labelled:
            raise InputError(
                f"{image_file} has {images} images, {label_file} has {labelled} labels: take both "
                f"from one set"
            )
        _check_known(label_file, own, labels)
        marks += own
    x = np.frombuffer(pixels, np.uint8)
    y = np.frombuffer(marks, np.uint8)
    return x.reshape(-1, *GREY), y


def _read_idx(
    path: Path,
    magic: int,
    shape: tuple[int, ...],
    out: bytearray,
) -> int:
    """Append the content of an idx file to a buffer, and return the number of its items.

    Args:
        path: The file, which may be packed.
        magic: The number that the file must begin with.
        shape: The shape of one item: that of an image, or () for a label.
        out: The buffer. Several files are appended to one, so that no image is copied again.

    Raises:
        InputError: The file is of another kind, or has more or fewer bytes than its header says.
    """
    before = len(out)
    with unpacked(path) as file:
        items = _read_header(path, file, magic, shape)
        size = items * math.prod(shape)
        total = before + size
        limits().check("bytes", total, path, "bytes, unpacked, with the files before it")
        while len(out) <= total:
            block = file.read(BLOCK)
            if not block:
                break
            out += block
    got = len(out) - before
    if got != size:
        has = "more" if got > size else f"{got} bytes"
        raise InputError(
            f"{path}: its header claims {items} items in {size} bytes, it has {has}: "
            "download it again"
        )
    return items


def _read_header(
    path: Path,
    file: IO[bytes],
    magic: int,
    shape: tuple[int, ...],
) -> int:
    """Read the header of an idx file and return the number of items, at least one.

    The header is a row of 4-byte numbers, the most significant byte first: the magic number, the
    number of items, and the shape of one item.
    """
    what = "images" if shape else "labels"
    length = 4 * (2 + len(shape))
    head = file.read(length)
    if head[:4] != magic.to_bytes(4) or len(head) != length:
        raise InputError(
            f"{path}: is not an idx file of {what}, which begins with {magic:#010x}: download "
            "it again"
        )
    numbers = np.frombuffer(head[4:], ">u4")
    items, *sizes = numbers.tolist()
    if tuple(sizes) != shape:
        need = list(shape)
        raise InputError(
            f"{path}: holds images of {sizes} pixels, need {need}: take the files of this set"
        )
    if not 0 < items <= ROWS:
        raise InputError(f"{path}: tells of {items} {what}, need 1 to {ROWS}: download it again")
    return int(items)


# ---- CIFAR-10 ----
#
# It comes in six batches, five for training and one for testing, in two versions: binary records,
# or pickled dictionaries. Either version is read from its files, or from the archive.


def cifar_binary(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read CIFAR-10 from the files data_batch_1.bin, ... of its binary version.

    The files are given in the order of CIFAR.
    """
    return _cifar(_from_files(_records, paths), pixel_range)


def cifar_pickle(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read CIFAR-10 from the files data_batch_1, ... of its Python version.

    These are pickles, which can contain code. Nothing in them is run.
    """
    return _cifar(_from_files(_unpickled, paths), pixel_range)


def cifar_tar(
    paths: Paths,
    *,
    pixel_range: Range = PIXEL_RANGE.default,
) -> Pool:
    """Read CIFAR-10 from cifar-10-binary.tar.gz or cifar-10-python.tar.gz.

    The archive is unpacked in memory, not on the disk.
    """
    (path,) = paths
    return _cifar(_from_archive(path), pixel_range)


def _from_files(decode: Decoder, paths: Paths) -> Iterator[Batch]:
    """The batches in files of their own, read one by one."""
    for path in paths:
        yield decode, str(path), read_bytes(path)


def _cifar(batches: Iterable[Batch], pixel_range: Range) -> Pool:
    """Join the images of all batches in one buffer.

    The batches come one by one, so that only one of them is in memory beside the buffer.
    """
    pixels = bytearray()
    marks = bytearray()
    for decode, name, data in batches:
        if len(data) > MOST:
            raise InputError(
                f"{name}: has {len(data)} bytes, need at most {MOST}: download it again"
            )
        images, labels = decode(name, data)
        _check_known(name, labels, range(10))
        pixels += np.ascontiguousarray(images).data
        marks += bytes(labels)
    x = np.frombuffer(pixels, np.uint8)
    y = np.frombuffer(marks, np.uint8)
    return _pool(x.reshape(-1, *COLOUR), y, pixel_range)


def _records(name: str, data: bytes) -> tuple[Array, bytes]:
    """Decode a batch of the binary version: records of one label and 3072 pixels.

    The pixels of a record are 1024 bytes of red, then of green, then of blue.
    """
    width = 1 + PIXELS
    if not data or len(data) % width:
        raise InputError(
            f"{name}: has {len(data)} bytes, need records of {width} bytes, {DAMAGED}: download it "
            f"again"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    labels = rows[:, 0].tobytes()
    return rows[:, 1:], labels


def _unpickled(name: str, data: bytes) -> tuple[Array, list[int]]:
    """Decode a batch of the Python version: a dictionary with the keys data and labels.

    The data are an array uint8 [rows, 3072], the labels are a list of integers. Other keys are
    ignored.
    """
    try:
        batch = _Unpickler(BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damaged bytes can ask the unpickler for anything
        raise InputError(
            f"{name}: cannot be read as a CIFAR batch, {DAMAGED} ({error}): download it again"
        ) from None
    if not isinstance(batch, dict):
        batch = {}
    x = batch.get(b"data")
    y = batch.get(b"labels")
    if not isinstance(x, _Array) or x.rows is None:
        raise InputError(f"{name}: data must be uint8 [rows, {PIXELS}]: download it again")
    count = len(x.rows)
    if not _are_labels(y, count):
        raise InputError(
            f"{name}: labels must be a list of {count} integers, one per image: download it again"
        )
    return x.rows, y


def _are_labels(y: Any, count: int) -> TypeGuard[list[int]]:
    """Whether y is a list of that many integers."""
    if not isinstance(y, list) or len(y) != count:
        return False
    return all(type(label) is int for label in y)


class _Unpickler(pickle.Unpickler):
    """An unpickler that cannot run code.

    It makes dictionaries, lists, text and numbers, and it takes note of what a pickle says about
    an array of bytes. It calls nothing of numpy.
    """

    encoded = 0  # characters that `encode` has seen

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may ask for: the few things that a CIFAR batch consists of."""
        if (module, name) == ("_codecs", "encode"):
            return self.encode
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch needs")
        return ADMITTED[module, name]

    def encode(self, text: str, encoding: str) -> bytes:
        """Turn text into bytes, which is how Python 3 writes bytes in the format of Python 2.

        The total is limited, because a pickle can ask for the same text again and again.
        """
        self.encoded += len(text)
        if encoding != "latin1" or self.encoded > MOST:
            raise pickle.UnpicklingError(
                f"it has text in {encoding!r}, need 'latin1', or too much of it"
            )
        return text.encode("latin1")


class _Dtype:
    """The number format of an array. Its state is the byte order, which does not matter here."""

    def __init__(self, name: object, *_: object) -> None:
        self.bytes = isinstance(name, str | bytes) and name in ("u1", b"u1")

    def __setstate__(self, _: object) -> None:
        pass


class _Array:
    """An array as its pickled state describes it: version, shape, format, order, bytes.

    `rows` stays None if the state does not describe images.
    """

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
                if rows <= 0 or width != PIXELS or len(content) != rows * width:
                    return
                flat = np.frombuffer(content, np.uint8)
                by_column = bool(order)
                self.rows = flat.reshape((rows, width), order="F" if by_column else "C")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy moved it in version 2
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "ndarray",  # the kind of array: text, which cannot be called
    ("numpy", "dtype"): _Dtype,
}
"""What a CIFAR batch may ask the unpickler for, and what it gets instead."""


def _from_archive(path: Path) -> Iterator[Batch]:
    """The batches of an archive in the order of CIFAR. Each one is forgotten once it is read."""
    files = _untarred(path)
    binary = any(name.endswith(".bin") for name in files)
    names = [f"{name}.bin" for name in CIFAR] if binary else list(CIFAR)
    missing = [name for name in names if name not in files]
    if missing:
        raise InputError(f"{path}: has no {', '.join(missing)}: download it again")
    decode: Decoder = _records if binary else _unpickled
    for name in names:
        yield decode, f"{path}: {name}", files.pop(name)


def _untarred(path: Path) -> dict[str, bytes]:
    """The content of the batches in an archive, by the last part of their names.

    The archive is read to its end, because a checksum stands there that shows damage.
    """
    try:
        with unpacked(path) as raw:
            stream = cast(IO[bytes], Pieces(raw))
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                files = _batches_in(archive, path)
            while raw.read(BLOCK):  # to the end, where gzip has its checksum
                pass
    except InputError:
        raise
    except (tarfile.TarError, BadZipFile, ValueError, OverflowError) as error:
        raise InputError(
            f"{path}: cannot be read as tar.gz, {DAMAGED} ({error}): download it again"
        ) from None
    return files


def _batches_in(archive: tarfile.TarFile, path: Path) -> dict[str, bytes]:
    """Read the batches of an open archive, and nothing else in it.

    Raises InputError if there are too many files, or if a batch is too large.
    """
    files: dict[str, bytes] = {}
    for count, member in enumerate(archive):
        if count > MEMBERS:
            raise InputError(
                f"{path}: has more than {MEMBERS} files, CIFAR-10 has 8: download it again"
            )
        name = member.name.rpartition("/")[2]
        is_batch = member.isfile() and name.removesuffix(".bin") in CIFAR
        file = archive.extractfile(member) if is_batch else None
        if file is None:
            continue
        if member.size > MOST:
            raise InputError(
                f"{path}: {name} has {member.size} bytes, need at most {MOST}: download it again"
            )
        files[name] = file.read()
    return files


# ---- all formats ----


def _pool(x: Array, y: Array, pixel_range: Range) -> Pool:
    """A pool of images [rows, H, W] or [rows, 3, H, W], which are not copied."""
    images = torch.from_numpy(x)
    if x.ndim == 3:
        images = images[:, None]
    labels = torch.from_numpy(y.astype(np.int64))
    return Pool(images, labels, _affine(pixel_range, 255))


def _permute(x: Array, *axes: int) -> None:
    """Permute the axes of every image in place. The caller knows the new shape, x keeps the old.

    A copy of a block of images is made at a time, instead of a copy of all. x must be contiguous in
    memory, or the new pixels would be written to a copy.
    """
    for start in range(0, len(x), ROWS_AT_A_TIME):
        block = x[start : start + ROWS_AT_A_TIME]
        permuted = block.transpose(0, *axes).ravel()
        block.reshape(-1)[:] = permuted


def _check_known(path: str | Path, labels: Iterable[int], known: range) -> None:
    """Raise InputError for a label that is not among those of the set, which `known` holds."""
    for row, label in enumerate(labels):
        if label not in known:
            need = f"{known[0]}..{known[-1]}"
            raise InputError(
                f"{path}: row {row} has label {label}, need {need}: take the files of this set"
            )


def _affine(pixel_range: Range, brightest: int) -> tuple[float, float]:
    """The factor and the offset that take pixels 0..brightest to the wanted range.

    >>> _affine((-1.0, 1.0), 16)
    (0.125, -1.0)
    """
    low, high = pixel_range
    width = high - low
    if not math.isfinite(width) or not low < high:
        raise InputError(
            f"pixel_range must be two finite numbers, low < high, got {list(pixel_range)}"
        )
    return width / brightest, low
