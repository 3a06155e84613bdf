"""Keyword arguments that `simulate`, `sweep` and `compare` share: defaults and checks, in one
place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithm.records import fields_of
from ..algorithms import ALGORITHMS
from ..engine.rounds import Protocol
from ..errors import InputError, integer, number, unknown
from ..maths.compress import check

DTYPES = {"float32": torch.float32, "float64": torch.float64}
Loss = str | Callable[[Tensor, Tensor], Tensor]
Metrics = Sequence[str | Callable[[Tensor, Tensor], float]]


class Options(TypedDict, total=False):
    """Keyword arguments that `simulate`, `sweep` and `compare` share; `DEFAULTS` holds their
    defaults."""

    rounds: int
    local_steps: int
    local_epochs: int | None
    batch_size: int | None
    participation: float
    drop_rate: float
    stragglers: float
    seed: int
    eval_every: int
    eval_train: bool
    init: str | Tensor | NDArray[Any] | Path | None
    loss: Loss | None
    metrics: Metrics
    stop_at: float | None
    dtype: str | torch.dtype
    device: str
    engine: str
    compress: str | None
    l2: float


DEFAULTS: dict[str, Any] = {
    "rounds": 100,
    "local_steps": 5,
    "local_epochs": None,
    "batch_size": 100,
    "participation": 1.0,
    "drop_rate": 0.0,
    "stragglers": 0.0,
    "seed": 0,
    "eval_every": 1,
    "eval_train": False,
    "init": None,
    "loss": None,
    "metrics": ("accuracy",),
    "stop_at": None,
    "dtype": "float32",
    "device": "auto",
    "engine": "auto",
    "compress": None,
    "l2": 0.0,
}
WHOLE = {
    "rounds": 1,
    "local_steps": 1,
    "local_epochs": 1,
    "batch_size": 1,
    "eval_every": 1,
    "seed": None,
}  # least
NUMBERS = ("participation", "drop_rate", "stragglers", "stop_at", "l2")
MAY_BE_NONE = ("local_steps", "local_epochs", "batch_size", "stop_at")


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options, the missing ones at their defaults; each checked."""
    for name in options:
        if name not in DEFAULTS and any(
            name == f.name for cls in ALGORITHMS.values() for f in fields_of(cls)
        ):
            raise InputError(
                f"{name} belongs to the algorithm: give a record such as "
                f"algorithm=FedAvg({name}=...)"
            )
        if name not in DEFAULTS:
            raise unknown("option", name, DEFAULTS)
    full = {**DEFAULTS, **options}
    if full["local_epochs"] is not None:
        if options.get("local_steps") is not None:
            raise InputError(
                "local_steps and local_epochs were both given; a client's work is one or the other"
            )
        full["local_steps"] = None
    given = {name for name in full if full[name] is not None or name not in MAY_BE_NONE}
    full |= {
        name: integer(name, full[name], least) for name, least in WHOLE.items() if name in given
    }
    full |= {name: number(name, full[name]) for name in NUMBERS if name in given}
    if full["stop_at"] is not None and not 0 < full["stop_at"] <= 1:
        raise InputError(f"stop_at is an accuracy in (0, 1], got stop_at={full['stop_at']!r}")
    if not 0 <= full["l2"] < math.inf:
        raise InputError(
            f"l2, the strength of the penalty l2/2 |x|^2, must be >= 0 and finite, got "
            f"l2={full['l2']}"
        )
    if not isinstance(full["eval_train"], bool):
        raise InputError(f"eval_train must be True or False, got eval_train={full['eval_train']!r}")
    full["dtype"] = str(full["dtype"]).removeprefix("torch.")
    full["device"] = str(full["device"])
    if full["dtype"] not in DTYPES:
        raise unknown("dtype", full["dtype"], DTYPES)
    if full["compress"] == "none":
        full["compress"] = None
    if full["compress"] is not None:
        check(full["compress"])
    full["metrics"] = _metrics(full["metrics"])
    protocol(full)
    return full


def _metrics(wished: Any) -> tuple[Any, ...]:
    """Accuracy and what is wished besides, each once."""
    several = wished if isinstance(wished, list | tuple) else [wished]
    for one in several:
        if not isinstance(one, str) and not callable(one):
            raise InputError(f"a metric is a name or a function, got metrics={wished!r}")
    return tuple(dict.fromkeys(("accuracy", *several)))


def protocol(options: Mapping[str, Any]) -> Protocol:
    """The part of the options that says how a round runs."""
    return Protocol(**{f.name: options[f.name] for f in fields(Protocol)})


def device_of(name: str) -> torch.device:
    """ "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; use 'auto', 'cpu' or 'cuda'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device 'cuda' was asked for but torch sees no GPU; use device='cpu' or install the "
            "CUDA build"
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use 'auto', 'cpu' or 'cuda'")
    return device
