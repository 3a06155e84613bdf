"""The folder of a run: checkpoint.safetensors, written whole or not at all after every round, and
trace.csv.

The checkpoint of the round before stays beside it, and stands in for a damaged one. One run at a
time holds the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from ..engine import checkpoint
from ..engine.checkpoint import of_text, text_of
from ..errors import InputError
from ..experiment.trace import Trace
from ..support.files import check_writable
from ..support.intake import Damaged, user_path
from ..support.lock import Lock
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
        self._lock: Lock | None = None

    def claim(self, k: int) -> None:
        """Hold the folder from now on, for a run that has done k rounds.

        Refuses a folder that cannot be written or that another run holds, and to overwrite rounds
        of another run.
        """
        if self._lock is not None:
            return
        check_writable(self.path)
        lock = Lock(self.path)
        lock.acquire()
        try:
            self._check_round(k)
        except InputError:
            lock.release()
            raise
        self._lock = lock

    def release(self) -> None:
        """Let other runs have the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _check_round(self, k: int) -> None:
        if not checkpoint.exists(self.file):
            return
        if k == 0:
            raise InputError(
                f"{self.path} holds a run already; give start() initial_arrays=strategy.resume() "
                f"to go on with it, "
                "or another checkpoint_dir"
            )
        saved = self.load()
        if saved is not None and saved.k != k:
            raise InputError(
                f"{self.path} holds round {saved.k}, this run has done {k}: another run went on "
                f"with it; "
                "call resume() again, or give another checkpoint_dir"
            )
        checkpoint.recover(self.file)  # puts a damaged one aside

    def save(self, run: Saved, trace: Trace) -> None:
        """Write the trace, then the checkpoint: so there is a row for every round that the
        checkpoint counts."""
        about = json.dumps({"settings": self.settings, "round": run.k, "names": list(run.arrays)})
        model = {
            f"{MODEL}{name}": torch.from_numpy(np.array(a))
            for name, a in arrays_of(run.arrays).items()
        }
        trace.save(self.trace)
        tensors = {**run.tensors, **model, ABOUT: of_text(about)}
        checkpoint.save(self.file, tensors, KIND)

    def load(self) -> Saved | None:
        """The last complete round; None if there is none."""
        if not checkpoint.exists(self.file):
            return None
        try:
            tensors = checkpoint.load(self.file)
            about = json.loads(text_of(tensors.pop(ABOUT)))
            arrays = ArrayRecord(
                {name: Array(tensors.pop(f"{MODEL}{name}").numpy()) for name in about["names"]}
            )
            k, settings = int(about["round"]), str(about["settings"])
            if k < 1:
                raise ValueError(f"round {k}")
        except Damaged as damage:
            raise InputError(
                f"{damage}; restore it from a copy, or give another checkpoint_dir"
            ) from damage
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(
                error, InputError
            ):  # it cannot be read: that says nothing of what is in it
                raise
            raise InputError(
                f"{self.file} is not a checkpoint of a run on Flower ({error}); give another "
                f"checkpoint_dir"
            ) from error
        if settings != self.settings:
            raise InputError(
                f"{self.path} holds a run with other settings: {settings}; these are "
                f"{self.settings}. "
                "Use the same or another checkpoint_dir"
            )
        return Saved(k, arrays, tensors)
