"""Keywords in, metrics and messages out: what the strategies for Flower's two generations share.

A strategy takes its own keywords, the fields of the FedSSO record, and the keywords of FedAvg, all
in one call. The functions here sort them and check them.

The modules of this room log to Flower's own logger, "flwr". The core does not know Flower and logs
to "fedsso": that the server went back to an earlier model, that a checkpoint is damaged, that pairs
do not fit into the memory. Python would write these to standard error without their level, between
Flower's lines, and they would be missing in Flower's log file. `join_logs` shows them in Flower's
log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, TypedDict, cast

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from .. import algorithms
from ..algorithm.checks import HUGE
from ..algorithm.schedule import Decay, Step
from ..errors import InputError, integer, number, unknown
from ..server import Server

_FIELDS = fields(cast(Any, algorithms.FedSSO))
RECORD = tuple(field.name for field in _FIELDS if field.name != "alpha")
"""The fields of the FedSSO record that are keywords of a strategy."""
FEDAVG = tuple(signature(FedAvg).parameters)
"""The keywords of Flower's FedAvg."""
RENAMED = {"alpha": "eta_l", "local_lr": "eta_l", "tau": "local_steps"}
"""What is called differently in the simulator or the paper."""

Aggregate = Callable[[list[RecordDict], str], MetricRecord]
"""A function of the user's that averages metrics."""

LOSSES = ("train_loss", "train-loss", "training_loss", "loss")
"""The metrics in which clients usually report their training loss."""

Keywords = dict[str, Any]
"""Keyword arguments by name."""


class Typed(TypedDict, total=False):
    """RECORD and FEDAVG with types: a misspelt keyword is an error for a type checker."""

    eta: Step
    R: int | None
    lam: float
    Lam: float
    form: str
    guard: str
    pairs: int
    m: int
    memory: str
    drift: str
    shapes: str
    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Aggregate | None
    evaluate_metrics_aggr_fn: Aggregate | None


FLOWER = logging.getLogger("flwr")
CORE = logging.getLogger("fedsso")


def split(
    keywords: Mapping[str, Any],
    own: Collection[str],
    fedavg: Collection[str],
) -> tuple[Keywords, Keywords]:
    """Split a user's keywords into those of the FedSSO record and those of FedAvg.

    `own` are the keywords that the strategy has taken itself, `fedavg` are those of FedAvg. An
    unknown keyword is an InputError.
    """
    for name, value in keywords.items():
        if name in RENAMED:
            right = RENAMED[name]
            if value == "auto":
                raise _untold()
            raise InputError(f"{name} is called {right} on Flower; use {right}={value!r}")
        if name not in RECORD and name not in fedavg:
            raise unknown("keyword", name, (*own, *RECORD, *fedavg))
    of_record = {}
    of_fedavg = {}
    for name, value in keywords.items():
        if name in RECORD:
            of_record[name] = value
        else:
            of_fedavg[name] = value
    return of_record, sampling(of_fedavg)


def sampling(keywords: Keywords) -> Keywords:
    """Check that FedAvg's shares are shares and its counts are counts, and return the keywords.

    With a wrong one, Flower would wait for nodes for ever.
    """
    for name, value in keywords.items():
        if name.startswith("fraction_") and not 0 <= number(name, value) <= 1:
            raise InputError(f"{name} must lie in [0, 1], got {name}={value}")
        if name.startswith("min_"):
            integer(name, value, 0)
    return keywords


def server(
    eta_l: Step | None,
    local_steps: float | None,
    values: Mapping[str, Any],
) -> Server:
    """FedSSO's server, for clients that make `local_steps` steps of size `eta_l`.

    `values` are the other fields of the FedSSO record. The default guard is "cautious", which needs
    neither number: without them the clients' mean update is the unit of all that is shown.
    """
    fields = {"guard": "cautious", **values}
    guard = fields["guard"]
    if guard in ("adaptive", "none") and (eta_l is None or local_steps is None):
        raise InputError(
            f"guard={guard!r} needs eta_l and local_steps, the step and the number of local steps "
            "that clients use; leave guard out if you do not know them"
        )
    if eta_l == "auto":
        raise _untold()
    alpha = 1.0 if eta_l is None else eta_l
    if not isinstance(alpha, Decay) and not 0 < number("eta_l", alpha) < HUGE:
        raise InputError(f"eta_l, the clients' step, must be > 0 and finite, got eta_l={eta_l}")
    record = algorithms.FedSSO(alpha=alpha, **fields)
    return Server(record, 1.0 if local_steps is None else local_steps)


def _untold() -> InputError:
    """The error for a step that the server would choose, but cannot tell the clients."""
    return InputError(
        "eta_l='auto' needs clients that receive their step size from the "
        "server; give the one that yours use, or "
        'take PhasedStrategy("fedsso") with the package\'s own client app'
    )


def loss(metrics: Mapping[str, Any] | None, key: str | None) -> float | None:
    """The clients' mean training loss, if they report it.

    `key` is the name of the metric; None looks for the usual names.

    >>> loss({"num-examples": 100, "train_loss": 0.5}, None)
    0.5
    """
    for name in LOSSES if key is None else (key,):
        value = (metrics or {}).get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


def told(numbers: Mapping[str, float]) -> dict[str, float]:
    """What FedSSO adds to the metrics of a round, by names as Flower writes them.

    >>> told({"train_loss": 0.5})
    {'fedsso-train-loss': 0.5}
    """
    found = {}
    for name, value in numbers.items():
        dashed = name.replace("_", "-")
        found[f"fedsso-{dashed}"] = value
    return found


# ---- messages ----


class ToFlower(logging.Handler):
    """Gives each record to the handlers of Flower's logger.

    They are looked up for each record, because Flower adds some of them late. The record is not
    logged again under "flwr": both loggers pass their records on to the root logger, whose handlers
    would then show it twice.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Let those of Flower's handlers show a record whose level admits it."""
        for handler in FLOWER.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def join_logs() -> None:
    """Show what the core logs in Flower's log from now on. A second call changes nothing.

    It leaves the level of "fedsso" alone: unless somebody has set it, warnings and errors are
    shown.
    """
    if not any(isinstance(handler, ToFlower) for handler in CORE.handlers):
        CORE.addHandler(ToFlower())
