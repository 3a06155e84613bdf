"""Keywords in, metrics out: what the strategies for Flower's two generations share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, cast

from flwr.serverapp.strategy import FedAvg

from .. import algorithms
from ..algorithm.checks import HUGE
from ..algorithm.schedule import Decay, Step
from ..errors import InputError, integer, number, unknown
from ..server import Server

RECORD = tuple(f.name for f in fields(cast(Any, algorithms.FedSSO)) if f.name != "alpha")
FEDAVG = tuple(signature(FedAvg).parameters)
RENAMED = {"alpha": "eta_l", "local_lr": "eta_l", "tau": "local_steps"}


def split(
    keywords: Mapping[str, Any], own: Collection[str], fedavg: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of the FedSSO record and of FedAvg; `own` are those that the strategy has taken
    itself."""
    for name in keywords:
        if name in RENAMED:
            right = RENAMED[name]
            if keywords[name] == "auto":
                raise _untold()
            raise InputError(f"{name} is called {right} on Flower; use {right}={keywords[name]!r}")
        if name not in (*RECORD, *fedavg):
            raise unknown("keyword", name, (*own, *RECORD, *fedavg))
    values = {name: value for name, value in keywords.items() if name in RECORD}
    return values, sampling({name: value for name, value in keywords.items() if name not in RECORD})


def sampling(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords of FedAvg with shares that are shares and counts that are counts; else Flower would
    wait for ever."""
    for name, value in keywords.items():
        if name.startswith("fraction_") and not 0 <= number(name, value) <= 1:
            raise InputError(f"{name} must lie in [0, 1], got {name}={value}")
        if name.startswith("min_"):
            integer(name, value, 0)
    return keywords


def server(eta_l: Step | None, local_steps: float | None, values: Mapping[str, Any]) -> Server:
    """FedSSO's server for clients of this step and so many of them."""
    if eta_l is None or local_steps is None:
        raise InputError(
            "FedSSO needs eta_l and local_steps: the step and the number of local steps that "
            "clients use"
        )
    if eta_l == "auto":
        raise _untold()
    if not isinstance(eta_l, Decay) and not 0 < number("eta_l", eta_l) < HUGE:
        raise InputError(f"eta_l, the clients' step, must be > 0 and finite, got eta_l={eta_l}")
    return Server(algorithms.FedSSO(alpha=eta_l, **values), local_steps)


def _untold() -> InputError:
    """An error for a step that the server would choose."""
    return InputError(
        "eta_l='auto' needs clients that are told their step; give the number that yours use, or "
        "take "
        'PhasedStrategy("fedsso") with the package\'s own client app'
    )


def told(numbers: Mapping[str, float]) -> dict[str, float]:
    """What FedSSO adds to the metrics of a round."""
    return {f"fedsso-{name.replace('_', '-')}": value for name, value in numbers.items()}
