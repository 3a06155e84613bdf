"""The folder of a run on Flower: checkpoint.safetensors and trace.csv.

The checkpoint is written whole or not at all. The one before it stays
beside it, and stands in for a damaged one. One run at a time holds the folder.
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

# Names of tensors in a checkpoint: the model's arrays, and a text about the run.
MODEL = "model."
ABOUT = "about"
KIND = "a run on Flower"


class Saved(NamedTuple):
    """What a run needs to go on."""

    k: int
    """How many rounds are done."""
    arrays: ArrayRecord
    """The model."""
    tensors: Mapping[str, Tensor]
    """The server's state. Empty before its first step."""


class Folder:
    """The checkpoints of runs with the same settings.

    Nothing is written or locked before `claim` is called. `load` can be called without it.

    Args:
        path: The folder. It need not exist yet.
        settings: A text that tells runs apart. It is stored with every checkpoint, and a checkpoint
            with another text is refused.
    """

    path: Path
    """The folder, as an absolute path."""
    settings: str
    """A text that tells runs apart."""
    file: Path
    """The checkpoint."""
    trace: Path
    """The trace, a CSV file."""

    def __init__(self, path: str | Path, settings: str) -> None:
        self.path = user_path("checkpoint_dir", path).absolute()
        self.settings = settings
        self.file = self.path / "checkpoint.safetensors"
        self.trace = self.path / "trace.csv"
        self._lock: Lock | None = None

    def claim(self, k: int) -> None:
        """Hold the folder from now on, for a run that has done k rounds.

        Raises InputError if the folder cannot be written, if another run holds it, or if this run
        would overwrite rounds of another one. Whoever holds the folder may claim it again, which
        does nothing.
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
        """Raise InputError unless the checkpoint, if there is one, is of round k.

        Another process may have gone on with the run since this one read the checkpoint.
        """
        if not checkpoint.exists(self.file):
            return
        if k == 0:
            raise InputError(
                f"{self.path} already holds a run; give start() initial_arrays=strategy.resume() "
                "to continue it, or use another checkpoint_dir"
            )
        saved = self.load()
        if saved is not None and saved.k != k:
            raise InputError(
                f"{self.path} holds round {saved.k}, this run has done {k}; call "
                "resume() again, or give another checkpoint_dir"
            )
        checkpoint.recover(self.file)  # puts a damaged one aside

    def save(self, run: Saved, trace: Trace) -> None:
        """Write the trace, and then the checkpoint. The folder must have been claimed.

        In this order, there is a row for every round that the checkpoint counts. A row too many
        does no harm: it is written again when the round is done again.
        """
        about = {
            "settings": self.settings,
            "round": run.k,
            "names": list(run.arrays),
        }
        tensors = dict(run.tensors)
        for name, array in arrays_of(run.arrays).items():
            tensors[f"{MODEL}{name}"] = torch.from_numpy(np.array(array))
        tensors[ABOUT] = of_text(json.dumps(about))
        trace.save(self.trace)
        checkpoint.save(self.file, tensors, KIND)

    def load(self) -> Saved | None:
        """Read the last complete round. None if there is none.

        Raises InputError if the checkpoint is damaged, or of a run with other settings.
        """
        if not checkpoint.exists(self.file):
            return None
        try:
            settings, saved = self._read()
        except Damaged as damage:
            raise InputError(
                f"{damage}; restore it from a copy, or give another checkpoint_dir"
            ) from damage
        except InputError:  # it cannot be read, which says nothing about its content
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.file} is not a checkpoint of a run on Flower ({error}); give another "
                f"checkpoint_dir"
            ) from error
        if settings != self.settings:
            raise InputError(
                f"{self.path} holds a run with other settings: {settings}; these are "
                f"{self.settings}. Use the same or another checkpoint_dir"
            )
        return saved

    def _read(self) -> tuple[str, Saved]:
        """The settings of the run in the checkpoint, and its last round.

        Raises KeyError, TypeError or ValueError if it is a checkpoint of something else.
        """
        tensors = checkpoint.load(self.file)
        about = json.loads(text_of(tensors.pop(ABOUT)))
        arrays = {}
        for name in about["names"]:
            tensor = tensors.pop(f"{MODEL}{name}")
            arrays[name] = Array(tensor.numpy())
        k = int(about["round"])
        if k < 1:
            raise ValueError(f"round {k}")
        return str(about["settings"]), Saved(k, ArrayRecord(arrays), tensors)
