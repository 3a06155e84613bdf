"""Which replies of a round can be used, and why the others cannot.

A federation goes on without a client that sends nonsense. A reply counts when it holds the arrays that were asked for
(names, shapes, real finite numbers), an update that is not absurdly long, and a weight that is positive and not absurd
beside the others'. What is merely unusual passes: against clients that lie within these bounds, put a robust strategy
(FedMedian, Krum) inside.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from math import isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, Message, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from .wire import Arrays

log = logging.getLogger("flwr")
FAR = 1e3  # an update is refused if it is longer than so many times the others'
BEYOND = 1e2  # and than so many times the model, or 1
HEAVY = 1e6  # so is a weight of so many times the others'


class Good(NamedTuple):
    """A reply that can be used."""

    message: Message
    node: int
    arrays: Arrays
    weight: float
    metrics: MetricRecord
    length: float  # of the update


class Screened(NamedTuple):
    """The replies of an exchange; who was dropped, or did not answer, and why."""

    good: list[Good]
    dropped: dict[int, str]


class _Unfit(Exception):
    """Why a reply cannot be used."""


def screen(
    replies: Iterable[Message],
    asked: Sequence[Message],
    sent: Mapping[str, NDArray[Any]] | None,
    weight_key: str,
) -> Screened:
    """Sort the replies to these messages; `sent` is what an upload must look like, and lie near to.

    Without `sent` no arrays are expected (an evaluation). Good replies come in an order that depends on nothing but
    their content, so that a sum over them does, too.
    """
    nodes = {message.metadata.dst_node_id for message in asked}
    good: list[Good] = []
    dropped: dict[int, str] = {}
    for reply in replies:
        node = _sender(reply, asked)
        try:
            if node not in nodes:
                raise _Unfit("it was not asked")
            if any(node == other.node for other in good):
                raise _Unfit("it answered twice")
            good.append(_read(reply, node, sent, weight_key))
        except _Unfit as reason:
            dropped[node] = str(reason)
    heard = {reply.node for reply in good} | dropped.keys()
    dropped |= {node: "no reply" for node in nodes if node not in heard}
    size = 0.0 if sent is None else _length(sent, None)
    for refuse in (_odd_metrics, _heavy, lambda replies: _far(replies, size)):
        dropped |= (found := refuse(good))
        good = [reply for reply in good if reply.node not in found]
    return Screened(sorted(good, key=lambda reply: (reply.weight, reply.length)), dropped)


def tell(where: str, found: Screened) -> None:
    """Log how many replies can be used, and who was dropped and why."""
    log.info("%s: %d good replies, %d dropped", where, len(found.good), len(found.dropped))
    for node, reason in found.dropped.items():
        log.warning("\t> node %d dropped: %s", node, reason)
    if not found.good and set(found.dropped.values()) == {"no reply"}:
        log.warning("\t> nobody replied: is start(timeout=...) long enough for the clients to start and to train?")


# ---- one reply ----


def _sender(reply: Message, asked: Sequence[Message]) -> int:
    """The node that replies; for one that is lost, the SuperLink does, in its own name."""
    to = reply.metadata.reply_to_message_id
    found = (message.metadata.dst_node_id for message in asked if to and message.metadata.message_id == to)
    return next(found, reply.metadata.src_node_id)


def _read(message: Message, node: int, sent: Mapping[str, NDArray[Any]] | None, weight_key: str) -> Good:
    """A reply's arrays, weight and metrics."""
    if message.has_error():
        raise _Unfit(f"error {message.error.code}: {message.error.reason}")
    if not message.has_content():
        raise _Unfit("an empty reply")
    content = message.content
    metrics = _only(content.metric_records, "MetricRecord")
    arrays = {} if sent is None else _arrays(content, sent)
    length = 0.0 if sent is None else _length(arrays, sent)
    return Good(message, node, arrays, _weight(metrics, weight_key), metrics, length)


def _only(records: Mapping[str, Any], kind: str) -> Any:
    if len(records) != 1:
        raise _Unfit(f"{len(records)} {kind}s instead of one")
    return next(iter(records.values()))


def _weight(metrics: MetricRecord, key: str) -> float:
    weight = metrics.get(key)
    if weight is None:
        raise _Unfit(f"no {key!r} among its metrics")
    if isinstance(weight, list) or not isfinite(weight) or weight <= 0:
        raise _Unfit(f"{key} is {weight}, not a positive number")
    return float(weight)


def _arrays(content: RecordDict, sent: Mapping[str, NDArray[Any]]) -> Arrays:
    """The arrays of an upload, which must be those that were sent."""
    record = _only(content.array_records, "ArrayRecord")
    missing, extra = sent.keys() - record.keys(), record.keys() - sent.keys()
    if missing or extra:
        parts = (("lacks", missing), ("adds", extra))
        raise _Unfit("; ".join(f"it {verb} {', '.join(sorted(names))}" for verb, names in parts if names))
    return {name: _array(name, record[name], like) for name, like in sent.items()}


def _array(name: str, array: Array, like: NDArray[Any]) -> NDArray[Any]:
    """One array, refused before a byte is allocated where its shape is another."""
    try:
        shape = _shape(array.data)
        value = array.numpy() if shape == like.shape else None
    except Exception as error:  # whatever a client may have put there
        raise _Unfit(f"{name} cannot be read ({type(error).__name__}: {str(error)[:80]})") from error
    if value is None:
        raise _Unfit(f"{name} has the shape {shape} instead of {like.shape}")
    if value.dtype.kind not in ("f" if like.dtype.kind == "f" else "fiub"):
        raise _Unfit(f"{name} holds {value.dtype} instead of {like.dtype}")
    if not np.isfinite(value).all():
        raise _Unfit(f"{name} holds NaN or infinite numbers")
    return value


def _shape(data: bytes) -> tuple[int, ...]:
    """The shape in the header of an array in numpy's format."""
    buffer = BytesIO(data)
    read = npy.read_array_header_1_0 if npy.read_magic(buffer) == (1, 0) else npy.read_array_header_2_0
    shape: tuple[int, ...] = read(buffer)[0]
    return shape


def _length(arrays: Mapping[str, NDArray[Any]], origin: Mapping[str, NDArray[Any]] | None) -> float:
    """Distance from the origin over all real arrays; counts, such as BatchNorm's, may grow."""
    total = 0.0
    for name, value in arrays.items():
        if value.dtype.kind == "f" and (origin is None or origin[name].dtype.kind == "f"):
            away = value.astype(np.float64) - (0.0 if origin is None else origin[name])
            total += float(np.vdot(away, away))
    return sqrt(total)


# ---- one beside the others ----


def _odd_metrics(good: Sequence[Good]) -> dict[int, str]:
    """Replies whose metrics go by other names, or are lists of other lengths, than most: they cannot be averaged."""
    kinds = {reply.node: _kind(reply.metrics) for reply in good}
    if len(set(kinds.values())) < 2:
        return {}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    told = ", ".join(sorted(name for name, _ in usual))
    return {node: f"its metrics are not those of the others ({told})" for node, kind in kinds.items() if kind != usual}


def _kind(metrics: MetricRecord) -> frozenset[tuple[str, int]]:
    return frozenset((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items())


def _heavy(good: Sequence[Good]) -> dict[int, str]:
    bounds = _bounds([reply.weight for reply in good], HEAVY)
    pairs = zip(good, bounds, strict=True)
    return {
        reply.node: f"its weight {reply.weight:.3g} is more than {HEAVY:g} times the others'"
        for reply, bound in pairs
        if reply.weight > bound > 0
    }


def _far(good: Sequence[Good], size: float) -> dict[int, str]:
    usual = BEYOND * max(size, 1.0)
    bounds = [max(bound, usual) for bound in _bounds([reply.length for reply in good], FAR)]
    pairs = zip(good, bounds, strict=True)
    return {
        reply.node: f"its update of length {reply.length:.3g} is too long, at most {bound:.3g} would do"
        for reply, bound in pairs
        if not reply.length <= bound
    }


def _bounds(values: Sequence[float], times: float) -> list[float]:
    """For each value so many times the median of the others, the lower of two; 0 where there is no other."""
    out = []
    for i in range(len(values)):
        others = sorted([*values[:i], *values[i + 1 :]])
        out.append(times * others[(len(others) - 1) // 2] if others else 0.0)
    return out
