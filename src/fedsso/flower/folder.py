"""The folder of a run: checkpoint.safetensors, written whole or not at all after every round, and trace.csv."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from ..engine import checkpoint
from ..errors import InputError
from ..files import check_writable
from ..intake import user_path
from ..trace import Trace
from .wire import arrays_of

MODEL, ABOUT, KIND = "model.", "about", "a run on Flower"


class Saved(NamedTuple):
    """What a run needs to go on."""

    k: int  # rounds done
    arrays: ArrayRecord
    tensors: Mapping[str, Tensor]  # of the server; none before its first step


class Folder:
    """Checkpoints of runs with the same settings."""

    def __init__(self, path: str | Path, settings: str) -> None:
        self.path, self.settings = user_path("checkpoint_dir", path).absolute(), settings
        self.file, self.trace = self.path / "checkpoint.safetensors", self.path / "trace.csv"

    def check(self, fresh: bool) -> None:
        """Refuse a folder that cannot be written, and to overwrite a run that was not resumed."""
        check_writable(self.path)
        for left in self.path.glob(".*.tmp"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        if fresh and self.file.exists():
            raise InputError(
                f"{self.path} holds a run already; give start() initial_arrays=strategy.resume() to go on with it, "
                "or another checkpoint_dir"
            )

    def save(self, run: Saved, trace: Trace) -> None:
        """Write the trace, then the checkpoint: so there is a row for every round that the checkpoint counts."""
        about = json.dumps({"settings": self.settings, "round": run.k, "names": list(run.arrays)})
        model = {f"{MODEL}{name}": torch.from_numpy(np.array(a)) for name, a in arrays_of(run.arrays).items()}
        trace.save(self.trace)
        tensors = {**run.tensors, **model, ABOUT: torch.frombuffer(bytearray(about.encode()), dtype=torch.uint8)}
        checkpoint.save(self.file, tensors, KIND)

    def load(self) -> Saved | None:
        """The last complete round; None if there is none."""
        if not self.file.exists():
            return None
        try:
            about, tensors = self._parts()
            arrays = ArrayRecord({name: Array(tensors.pop(f"{MODEL}{name}").numpy()) for name in about["names"]})
            k, settings = int(about["round"]), str(about["settings"])
            if k < 1:
                raise ValueError(f"round {k}")
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.file} is not a whole checkpoint of a run on Flower ({error}); give another checkpoint_dir"
            ) from error
        if settings != self.settings:
            raise InputError(
                f"{self.path} holds a run with other settings: {settings}; these are {self.settings}. "
                "Use the same or another checkpoint_dir"
            )
        return Saved(k, arrays, tensors)

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the file tells of itself, and its tensors."""
        tensors = checkpoint.load(self.file)
        return json.loads(bytes(tensors.pop(ABOUT).tolist())), tensors
