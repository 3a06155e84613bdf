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
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from .wire import Arrays, arrays_of

log = logging.getLogger("flwr")
FAR = 1e3  # an update is refused if it is longer than so many times the others'
BEYOND = 1e2  # and than so many times the model, or 1
HEAVY = 1e6  # so is a weight of so many times the others'
ABSURD = 1e9  # of two weights that are so far apart, one above this
SUM = 1e18  # and in any case one above this
SHOWN = 200  # letters of a client's own text in the log
Kind = frozenset[tuple[str, int]]


class Good(NamedTuple):
    """A reply that can be used; its arrays are in the order and of the types that were sent."""

    message: Message
    node: int
    weight: float
    metrics: MetricRecord
    length: float  # of the update

    @property
    def arrays(self) -> Arrays:
        """The upload."""
        return arrays_of(_only(self.message.content.array_records, "ArrayRecord"))


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
    good: list[Good] = []
    dropped: dict[int, str] = {}
    nodes = {message.metadata.dst_node_id for message in asked}
    silent = set(nodes)
    for reply in replies:
        node = _sender(reply, nodes, asked)
        try:
            if node in nodes and node not in silent:
                raise _Unfit("it answered twice")
            silent.discard(node)
            good.append(_read(reply, node, sent, weight_key))
        except _Unfit as reason:
            dropped[node] = _short(str(reason))
    dropped |= dict.fromkeys(silent, "no reply")
    size = 0.0 if sent is None else _length(sent, None)
    for refuse in (_odd_metrics, _heavy, lambda replies: _far(replies, size)):
        reasons = refuse(good)
        dropped |= {reply.node: reason for reply, reason in zip(good, reasons, strict=True) if reason}
        good = [reply for reply, reason in zip(good, reasons, strict=True) if not reason]
    _share_metrics(good)
    return Screened(sorted(good, key=_content), dropped)


def tell(where: str, found: Screened) -> None:
    """Log who was dropped, and why."""
    if found.dropped:
        log.warning("%s: %d good replies, %d dropped", where, len(found.good), len(found.dropped))
    for node, reason in found.dropped.items():
        log.warning("\t> node %d dropped: %s", node, reason)
    if not found.good and set(found.dropped.values()) == {"no reply"}:
        log.warning("\t> nobody replied: is start(timeout=...) long enough for the clients to start and to train?")


def _content(reply: Good) -> tuple[float, float, str]:
    """What replies are sorted by; of who arrives first it knows nothing."""
    return reply.weight, reply.length, repr(sorted(reply.metrics.items()))


# ---- one reply ----


def _sender(reply: Message, nodes: set[int], asked: Sequence[Message]) -> int:
    """The node that replies; for one that is lost, the SuperLink does, in its own name."""
    node, to = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
    if node in nodes or not to:
        return node
    found = (message.metadata.dst_node_id for message in asked if message.metadata.message_id == to)
    return next(found, node)


def _short(text: str) -> str:
    """What a client wrote, on one line of the log."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def _read(message: Message, node: int, sent: Mapping[str, NDArray[Any]] | None, weight_key: str) -> Good:
    """A reply's weight, metrics and, put in order, its arrays."""
    if message.has_error():
        *_, last = (message.error.reason or "").strip().splitlines() or ["no reason given"]  # of a traceback the end
        raise _Unfit(f"error {message.error.code}: {last}")
    if not message.has_content():
        raise _Unfit("an empty reply")
    metrics = _only(message.content.metric_records, "MetricRecord")
    weight, records = _weight(metrics, weight_key), {**message.content.config_records, "metrics": metrics}
    length = 0.0
    if sent is not None:
        records["arrays"], length = _ordered(_only(message.content.array_records, "ArrayRecord"), sent)
    message.content = RecordDict(records)  # under the same names in all replies: strategies go by those of the first
    return Good(message, node, weight, metrics, length)


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


def _ordered(record: ArrayRecord, sent: Mapping[str, NDArray[Any]]) -> tuple[ArrayRecord, float]:
    """An upload, which must be what was sent, in its order and types, and the length of the update: strategies inside
    pair arrays by position, and add them up in the type of the first."""
    missing, extra = sent.keys() - record.keys(), record.keys() - sent.keys()
    if missing or extra:
        parts = (("lacks", missing), ("adds", extra))
        raise _Unfit("; ".join(f"it {verb} {', '.join(sorted(names))}" for verb, names in parts if names))
    arrays = {name: _array(name, record[name], like) for name, like in sent.items()}
    if list(record) != list(sent) or any(arrays[n].dtype != _type(arrays[n], like) for n, like in sent.items()):
        with np.errstate(over="ignore"):  # what becomes infinite is too long as well
            typed = {name: arrays[name].astype(_type(arrays[name], like)) for name, like in sent.items()}
        record = ArrayRecord({name: Array(value) for name, value in typed.items()})
    return record, _length(arrays, sent)


def _array(name: str, array: Array, like: NDArray[Any]) -> NDArray[Any]:
    """One array, refused before a byte is allocated where its shape is another."""
    try:
        shape = _shape(array.data)
        value = array.numpy() if shape == like.shape else None
    except Exception as error:  # whatever a client may have put there
        raise _Unfit(f"{name} cannot be read ({type(error).__name__}: {error})") from error
    if value is None:
        raise _Unfit(f"{name} has the shape {shape} instead of {like.shape}")
    if value.dtype.kind not in ("f" if like.dtype.kind == "f" else "fiub"):
        raise _Unfit(f"{name} holds {value.dtype} instead of {like.dtype}")
    if not np.isfinite(value).all():
        raise _Unfit(f"{name} holds NaN or infinite numbers")
    return value


def _type(value: NDArray[Any], like: NDArray[Any]) -> np.dtype[Any]:
    """The type that a value is taken in: what was sent, but a count that comes as a fraction stays one."""
    return np.dtype(np.float64) if value.dtype.kind == "f" and like.dtype.kind != "f" else like.dtype


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


def _odd_metrics(good: Sequence[Good]) -> list[str]:
    """What is wrong with replies whose metrics go by other names, or are lists of other lengths, than those of more
    than half; nothing with all others."""
    kinds = [_kind(reply.metrics) for reply in good]
    usual, count = Counter(kinds).most_common(1)[0] if kinds else (Kind(), 0)
    told = ", ".join(sorted(name for name, _ in usual))
    odd = f"its metrics are not those of the others ({told})"
    return [odd if kind != usual and 2 * count > len(good) else "" for kind in kinds]


def _share_metrics(good: Sequence[Good]) -> None:
    """Where no kind of metrics is that of most, leave those that all have: only they can be averaged."""
    kinds = [_kind(reply.metrics) for reply in good]
    if len(set(kinds)) > 1:
        shared = {name for name, _ in frozenset.intersection(*kinds)}
        for reply in good:
            for name in reply.metrics.keys() - shared:
                del reply.metrics[name]


def _kind(metrics: MetricRecord) -> Kind:
    return frozenset((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items())


def _heavy(good: Sequence[Good]) -> list[str]:
    """Weights far above the others'. One that is far below does no harm, and must not make the others look heavy."""
    weights, least = [reply.weight for reply in good], ABSURD if len(good) == 2 else 0.0
    bounds = [min(max(HEAVY * other, least), SUM) for other in medians(weights)]
    return [
        f"its weight {weight:.3g} is more than {HEAVY:g} times the others'" if weight > bound else ""
        for weight, bound in zip(weights, bounds, strict=True)
    ]


def _far(good: Sequence[Good], size: float) -> list[str]:
    lengths = [reply.length for reply in good]
    return [
        "" if length <= bound else f"its update of length {length:.3g} is too long, at most {bound:.3g} would do"
        for length, bound in zip(lengths, farthest(lengths, size), strict=True)
    ]


def farthest(lengths: Sequence[float], size: float) -> list[float]:
    """How long each update may be beside the others, for a model of this length; alone, any finite length will do."""
    most = np.finfo(np.float64).max
    return [most if other == inf else max(FAR * other, BEYOND * max(size, 1.0)) for other in medians(lengths)]


def medians(values: Sequence[float]) -> list[float]:
    """For each value the median of the others, the upper of two; infinite where there is no other."""
    order = np.argsort(values, kind="stable")
    middle = (len(values) - 1) // 2
    out = [inf] * len(values)
    if len(values) > 1:
        for place, i in enumerate(order.tolist()):
            out[i] = values[order[middle if middle < place else middle + 1]]
    return out
