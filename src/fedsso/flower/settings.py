"""Keywords in, metrics out: what the strategies for Flower's two generations share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, cast

from .. import algorithms
from ..errors import InputError, unknown

RECORD = tuple(f.name for f in fields(cast(Any, algorithms.FedSSO)) if f.name != "alpha")
RENAMED = {"alpha": "eta_l", "local_lr": "eta_l", "tau": "local_steps"}


def split(
    keywords: Mapping[str, Any], own: Collection[str], fedavg: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of the FedSSO record and of FedAvg; `own` are those that the strategy has taken itself."""
    for name in keywords:
        if name in RENAMED:
            right = RENAMED[name]
            raise InputError(f"{name} is called {right} on Flower; use {right}={keywords[name]!r}")
        if name not in (*RECORD, *fedavg):
            raise unknown("keyword", name, (*own, *RECORD, *fedavg))
    values = {name: value for name, value in keywords.items() if name in RECORD}
    return values, {name: value for name, value in keywords.items() if name not in RECORD}


def told(numbers: Mapping[str, float]) -> dict[str, float]:
    """What FedSSO adds to the metrics of a round."""
    return {f"fedsso-{name.replace('_', '-')}": value for name, value in numbers.items()}
