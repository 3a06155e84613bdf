"""Checkpoints: named tensors in one safetensors file, written whole or not at all, tied to the settings."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from ..errors import InputError
from ..files import write_atomic
from ..intake import read_bytes

KEY = "fedsso.identity"


def save(path: Path, tensors: dict[str, Tensor], identity: str) -> None:
    """Write tensors and the identity of the settings they belong to."""
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}  # no shared memory
    plain[KEY] = torch.frombuffer(bytearray(identity.encode()), dtype=torch.uint8)
    write_atomic(path, serialise(plain))


def load(path: Path, identity: str | None = None) -> dict[str, Tensor]:
    """Read what `save` wrote; refuses a damaged file and one that belongs to other settings."""
    try:
        tensors = parse(read_bytes(path))
        found = bytes(tensors.pop(KEY).tolist()).decode()
    except (SafetensorError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path} is not a whole checkpoint ({error}); delete it to start the run again") from error
    if identity is not None and found != identity:
        raise InputError(
            f"{path} belongs to other settings (identity {found[:12]}, these have {identity[:12]}); "
            "use its own spec.toml or another folder"
        )
    return tensors
