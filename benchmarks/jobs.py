"""The jobs that are timed, and our simulator on them.

J1  MNIST, 20 label-skewed clients, all take part, softmax regression (d = 7850), FedAvg,
    5 local steps with batches of 100
J2  the same with 1000 clients, 100 per round
J3  J1 with a CNN of two convolutions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsso.algorithm import Algorithm
from fedsso.data import Federation, datasets, load
from fedsso.engine.metrics import metric
from fedsso.engine.settings import Settings
from fedsso.engine.simulate import Job, Trials
from fedsso.models import MODELS, build
from fedsso.objective.losses import cross_entropy

ALPHA = 1e-3
NEVER = 10**9  # rounds between evaluations
CPU = torch.device("cpu")
LABELS = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)  # rows of each digit in MNIST


@dataclass(frozen=True)
class Setting:
    """One job."""

    model: str
    settings: Settings = field(default_factory=Settings)
    data: Mapping[str, Any] = field(default_factory=dict)  # how the rows are shared out
    chunk: int = 20  # clients that the hand-stacked reference takes at a time


JOBS = {
    "J1": Setting("mclr"),
    "J2": Setting(
        "mclr",
        Settings(participation=0.1),
        {"clients": 1000, "partition": "dirichlet", "concentration": 0.1},
        chunk=8,
    ),
    "J3": Setting("cnn-small"),
}


def has_mnist() -> bool:
    """Whether the real file is there."""
    return next(d for d in datasets() if d.name == "mnist").present()


def federation(setting: Setting) -> Federation:
    """The job's rows; random pixels under MNIST's label counts where the file is not there."""
    if has_mnist():
        return load("mnist", **setting.data)
    with TemporaryDirectory() as folder:
        _write_random(Path(folder) / "mnist.npz")
        return load("mnist", data_dir=folder, **setting.data)


def _write_random(path: Path) -> None:
    """Bright pixels are rare, as in handwriting."""
    numbers = np.random.default_rng(0)
    y = numbers.permutation(np.repeat(np.arange(10), LABELS))
    x = numbers.integers(0, 256, (len(y), 28, 28), np.uint8)
    np.savez(path, x=np.where(x < 204, np.uint8(0), x), y=y)


def model(setting: Setting, fed: Federation) -> nn.Module:
    """The job's initial model."""
    module = build(setting.model, fed.sample_shape, fed.classes)
    if MODELS[setting.model].init == "zero":
        for p in module.parameters():
            nn.init.zeros_(p)
    return module


def simulation(
    setting: Setting,
    fed: Federation,
    records: Sequence[Algorithm],
    device: torch.device = CPU,
) -> Trials:
    """Our engine on the job; no round is evaluated but the initial model."""
    settings = replace(setting.settings, eval_every=NEVER, device=str(device))
    metrics = dict([metric("accuracy")])
    job = Job(fed, model(setting, fed), cross_entropy, metrics, settings)
    return Trials(job, records)


def advance(sim: Trials) -> Callable[[], None]:
    """One round of it, as work to be timed."""

    def work() -> None:
        with torch.no_grad():
            sim.round()

    return work
