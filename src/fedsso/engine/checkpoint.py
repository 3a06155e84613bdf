"""Checkpoints: named tensors in one safetensors file, written whole or not at all.

The file is sealed (`support.seal`) and carries the version of its form and the identity of the
settings, a digest of all that decides how the run goes. A checkpoint of other settings is
refused: a run that went on from it would be neither the one nor the other.

The checkpoint before it stays beside it, and stands in for one that is damaged:

    checkpoint.safetensors           the newest
    checkpoint.previous.safetensors  the one before
    checkpoint.damaged.safetensors   one that could not be read, put aside for whoever wants to look

A file is read in steps, each of which trusts the one before: its size, its checksum, its tensors,
its identity. `Reader` then hands tensors out, each checked against what the run expects.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from ..errors import MOST, InputError
from ..support.files import write_atomic
from ..support.intake import Damaged, limits, opened, read_bytes
from ..support.seal import BLANK, check, seal
from ..support.trees import Tree, named_leaves, tree_map
from ..version import __version__

log = logging.getLogger("fedsso")
FORM = "2"  # of the file; the first form had no seal
OLD_KEY = "fedsso.identity"  # the tensor in which the first form kept the identity


def save(path: Path, tensors: Mapping[str, Tensor], identity: str) -> None:
    """Write tensors and the identity of their settings; the checkpoint before is kept.

    Args:
        path: The newest checkpoint. A file that is there already becomes the one before.
        tensors: Named tensors, on any device. They are copied, so that they may share memory.
        identity: The digest of the settings that `load` compares.

    Raises:
        InputError: The file cannot be written.
    """
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    about = {
        "fedsso.form": FORM,
        "fedsso.version": __version__,
        "fedsso.identity": identity,
        "fedsso.seal": BLANK,
    }
    write_atomic(path, seal(serialise(plain, about)), keep=before(path))


def before(path: Path) -> Path:
    """Where the checkpoint before the newest one is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def exists(path: Path) -> bool:
    """Whether there is a checkpoint: the newest, or at least the one before."""
    return path.exists() or before(path).exists()


def load(path: Path, identity: str | None = None) -> dict[str, Tensor]:
    """Read what `save` wrote, or the checkpoint before it where the newest is damaged.

    No file is changed.

    Raises:
        Damaged: Neither of the two is whole.
        InputError: It belongs to other settings, or to a version with another form of file.
    """
    return _newest_whole(path, identity)[0]


def recover(path: Path, identity: str | None = None) -> dict[str, Tensor] | None:
    """As `load`, for a run that goes on; None where nothing is whole, and the run begins again.

    A damaged checkpoint is put aside, so that it never takes the place of a good one when the
    next is written. A warning in the log tells what happened.

    Raises:
        InputError: It belongs to other settings, or to a version with another form of file.
    """
    tensors, used = None, before(path)
    try:
        tensors, used = _newest_whole(path, identity)
    except Damaged as damage:
        log.warning("%s; the run starts over", damage)
    if used != path and path.is_file():
        os.replace(path, path.with_name(f"{path.stem}.damaged{path.suffix}"))
    return tensors


def _newest_whole(path: Path, identity: str | None) -> tuple[dict[str, Tensor], Path]:
    """The tensors of the newest checkpoint that is not damaged, and the file they come from.

    Only damage is made up for. A file of other settings is an error at once, since the one before
    it would be of the same other settings.
    """
    try:
        return _read(path, identity), path
    except Damaged as damage:
        with suppress(Damaged):
            tensors = _read(before(path), identity)
            log.warning("%s; the previous checkpoint is used", damage)
            return tensors, before(path)
        raise Damaged(f"{damage}, and there is no whole checkpoint before it") from damage


def _read(path: Path, identity: str | None) -> dict[str, Tensor]:
    """One file's tensors, on the CPU.

    A file without a seal is of the first form and is read without a checksum. With `identity`
    None any settings are accepted.
    """
    if not path.exists():
        raise Damaged(f"{path} is not there")
    _check_size(path)
    data = read_bytes(path, "checkpoint")
    sealed = check(data)
    if sealed is False:
        raise Damaged(f"{path} is damaged: its checksum does not match its content")
    try:
        tensors = parse(data)
        found = _identity(data, tensors, sealed is True)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (SafetensorError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: it is not a whole checkpoint") from error
    if identity is not None and found != identity:
        raise InputError(
            f"{path} belongs to other settings (identity {found[:12]}, these have "
            f"{identity[:12]}); "
            "use its own spec.toml or another folder"
        )
    return tensors


def _check_size(path: Path) -> None:
    """Refuse a file whose list of tensors does not fit its size, before all of it is read.

    A safetensors file begins with the length of its header, 8 bytes, and the header, JSON that
    tells where each tensor ends. A file that was cut off, or a header that claims more than is
    there, is found without reading gigabytes.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = int.from_bytes(file.read(8), "little")
        text = file.read(head) if head <= limits().settings else b""
    try:
        ends = [
            one["data_offsets"][1]
            for name, one in json.loads(text).items()
            if name != "__metadata__"
        ]
        whole = 8 + head + max(ends, default=0) == size
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{path} is damaged: it is not a whole checkpoint")


def _identity(data: bytes, tensors: dict[str, Tensor], sealed: bool) -> str:
    """The identity of the settings that a file belongs to.

    That of a file of the first form is a tensor, which is taken out of `tensors`.
    """
    if not sealed:
        return text_of(tensors.pop(OLD_KEY))
    size = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + size])["__metadata__"]
    if about["fedsso.form"] != FORM:
        raise InputError(
            f"this checkpoint has form {about['fedsso.form']} (fedsso {about['fedsso.version']}), "
            f"this version reads "
            f"form {FORM}; use the version that wrote it"
        )
    return str(about["fedsso.identity"])


class Reader:
    """Takes tensors out of a checkpoint, each checked against what the run expects.

    Every method raises Damaged where a tensor is missing or is not as it must be. So a file that
    is whole, but of another model or version, never gets into a run.
    """

    def __init__(self, saved: Mapping[str, Tensor], device: torch.device) -> None:
        self.saved = saved
        self.device = device

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of that name, which must have this shape and type."""
        if name not in self.saved:
            raise Damaged(
                f"the checkpoint lacks {name}; perhaps another version of fedsso wrote it"
            )
        found = self.saved[name]
        if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            raise Damaged(
                f"the checkpoint's {name} is {found.dtype} of shape {tuple(found.shape)}, this "
                f"run's is {dtype} of "
                f"shape {tuple(shape)}"
            )
        return found.to(self.device)

    def like(self, name: str, own: Tensor) -> Tensor:
        """The tensor of that name, which must look like the run's own."""
        return self.tensor(name, own.shape, own.dtype)

    def tree(self, name: str, own: Tree) -> Tree:
        """The tree of that name, which must look like the run's own in names, shapes and types."""
        parts = iter([self.like(n, leaf) for n, leaf in named_leaves(own, name)])
        return tree_map(lambda _: next(parts), own)

    def numbers(self, name: str, axes: int) -> Tensor:
        """The tensor of that name, which must have so many axes and hold real numbers."""
        found = self.saved.get(name)
        if found is None or found.dim() != axes or not found.is_floating_point():
            raise Damaged(
                f"the checkpoint's {name} is missing, or holds something else than it should"
            )
        return found.to(self.device)

    def finite(self, name: str, axes: int) -> Tensor:
        """The same as `numbers`, for numbers that must be finite."""
        found = self.numbers(name, axes)
        if not found.isfinite().all():
            raise Damaged(f"the checkpoint's {name} holds NaN or infinite numbers")
        return found

    def count(self, name: str) -> int:
        """A whole number from 0 to the largest count that settings may hold."""
        found = int(self.tensor(name, (), torch.int64))
        if not 0 <= found <= MOST:
            raise Damaged(f"the checkpoint's {name} is {found}, it must lie between 0 and {MOST}")
        return found

    def contents(self, name: str, *kinds: str) -> list[list[str]]:
        """Lists of names that a text tensor holds as JSON, one list for each of these kinds."""
        if name not in self.saved:
            raise Damaged(
                f"the checkpoint lacks {name}; perhaps another version of fedsso wrote it"
            )
        try:
            found = json.loads(text_of(self.saved[name]))
            return [[str(one) for one in found[kind]] for kind in kinds]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Damaged(f"the checkpoint's {name} cannot be read") from error

    def clients(self, name: str, kind: str, clients: int) -> list[int]:
        """The clients that a text tensor lists under this kind.

        Earlier versions list none and hold all of them.
        """
        try:
            found = json.loads(text_of(self.saved[name])).get(kind, range(clients))
            listed = [int(one) for one in found]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"the checkpoint's {name} cannot be read") from error
        if any(not 0 <= i < clients for i in listed):
            raise Damaged(f"the checkpoint's {name} names a client beyond the {clients} there are")
        return listed


def of_text(text: str) -> Tensor:
    """A text as a tensor of bytes (UTF-8), since a checkpoint holds nothing but tensors."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def text_of(tensor: Tensor) -> str:
    """The text that such a tensor holds."""
    return bytes(tensor.tolist()).decode()
