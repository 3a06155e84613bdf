"""Which replies of a round can be used, and why the others cannot.

A federation goes on without a client that sends nonsense. A reply counts when it answers what was
asked, holds the arrays that were asked for (names, shapes, real finite numbers, buffers that can be
such), an update that is not absurdly long, and a weight that is positive and not absurd beside the
others'. What is merely far from the others is shortened (`bounds.py`); against clients that lie
within the bounds, take a robust average.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from . import bounds, statistics
from .answers import SECOND, match, shown
from .bounds import Clip, medians
from .wire import Arrays, arrays_of

log = logging.getLogger("flwr")
FAR = 1e3  # an update is refused if it is longer than so many times the others'
BEYOND = 1e2  # and than so many times the model, or 1
HEAVY = 1e6  # so is a weight of so many times the others'
ABSURD = 1e9  # of two weights that are so far apart, one above this
SUM = 1e18  # and in any case one above this
LINES = 100  # of the log for one exchange
Kind = frozenset[tuple[str, int]]
Names = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""The arrays of an upload by the names that the model has for them."""


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
    """The replies of an exchange, and by node what is to be told of the others and of parts of
    them."""

    good: list[Good]
    dropped: dict[int, str]  # who does not count, and why
    ignored: list[
        tuple[int, str]
    ]  # messages beside the replies: who sent them, and why they do not count
    blank: dict[int, str]  # metrics that do not count
    clipped: dict[int, str]  # what counts less than was sent

    @property
    def numbers(self) -> dict[str, float]:
        """Columns of the trace."""
        parts = {"dropped": self.dropped, "ignored": self.ignored, "clipped": self.clipped}
        return {name: float(len(part)) for name, part in parts.items()}


class _Unfit(Exception):
    """Why a reply cannot be used."""


def screen(
    messages: Iterable[Message],
    asked: Sequence[Message],
    sent: Mapping[str, NDArray[Any]] | None,
    weight_key: str,
    names: Names = dict,
) -> Screened:
    """Sort the replies to these messages; `sent` is what an upload must look like, and lie near to.

    Without `sent` no arrays are expected (an evaluation). Good replies come in an order that
    depends on nothing but their content, so that a sum over them does, too.
    """
    replies, ignored = match(messages, asked)
    good: list[Good] = []
    dropped: dict[int, str] = {}
    for node, reply in replies.items():
        try:
            good.append(_read(reply, node, sent, weight_key, names))
        except _Unfit as reason:
            dropped[node] = shown(str(reason))
    nodes = [message.metadata.dst_node_id for message in asked]
    dropped |= {node: "no reply" for node in nodes if node not in replies}
    size = 0.0 if sent is None else _length(sent, None)
    for refuse in (_odd_metrics, _heavy, lambda replies: _far(replies, size)):
        reasons = refuse(good)
        dropped |= {
            reply.node: shown(reason) for reply, reason in zip(good, reasons, strict=True) if reason
        }
        good = [reply for reply, reason in zip(good, reasons, strict=True) if not reason]
    _share_metrics(good)
    blank = _fill_metrics(good)
    return Screened(sorted(good, key=_content), dropped, ignored, blank, {})


def tell(where: str, found: Screened) -> None:
    """Log who was dropped, and why, and what else does not count as it was sent."""
    if found.dropped:
        log.warning("%s: %d good replies, %d dropped", where, len(found.good), len(found.dropped))
    lines = [f"node {node} dropped: {reason}" for node, reason in found.dropped.items()]
    lines += [f"node {node}: {_ignored(node, reason, found)}" for node, reason in found.ignored]
    lines += [f"node {node}: {reason}" for node, reason in found.blank.items()]
    lines += [f"node {node} clipped: {reason}" for node, reason in found.clipped.items()]
    for line in lines[:LINES]:
        log.warning("\t> %s", line)
    if len(lines) > LINES:
        log.warning("\t> and %d more", len(lines) - LINES)
    if not found.good and set(found.dropped.values()) == {"no reply"}:
        log.warning(
            "\t> nobody replied: is start(timeout=...) long enough for the clients to start and to "
            "train?"
        )


def _ignored(node: int, reason: str, found: Screened) -> str:
    """What became of a message beside the replies."""
    if reason != SECOND:
        return f"a message was ignored: {reason}"
    return f"{SECOND} was ignored, its first {'was dropped' if node in found.dropped else 'counts'}"


def _content(reply: Good) -> tuple[float, float, str]:
    """What replies are sorted by; of who arrives first it knows nothing."""
    return reply.weight, reply.length, repr(sorted(reply.metrics.items()))


# ---- a bounded influence ----


def lighten(found: Screened, weight_key: str, clip: Clip) -> Screened:
    """The replies with weights of at most a multiple of the others' median."""
    scales = bounds.factors([reply.weight for reply in found.good], clip.weight)
    good, clipped = list(found.good), dict(found.clipped)
    for i, (reply, scale) in enumerate(zip(found.good, scales, strict=True)):
        if scale < 1:
            good[i] = reply._replace(weight=reply.weight * scale)
            reply.metrics[weight_key] = good[i].weight
            note(clipped, reply.node, bounds.told("weight", reply.weight, scale))
    return found._replace(good=good, clipped=clipped)


def shorten(
    found: Screened, sent: Mapping[str, NDArray[Any]], kinds: Mapping[str, str], clip: Clip
) -> Screened:
    """The replies with updates of at most a multiple of the others' median, each kind of arrays for
    itself."""
    if len(found.good) < bounds.LEAST:
        return found
    clipped, order = dict(found.clipped), list(dict.fromkeys(kinds.values()))
    lengths = [bounds.moves(reply.arrays, sent, kinds) for reply in found.good]
    columns = [
        bounds.factors(c, clip.multiple(k))
        for k, c in zip(order, zip(*lengths, strict=True), strict=True)
    ]
    for i, reply in enumerate(found.good):
        scales = {kind: column[i] for kind, column in zip(order, columns, strict=True)}
        for kind, length in zip(order, lengths[i], strict=True):
            if scales[kind] < 1:
                note(clipped, reply.node, bounds.told(f"{kind} of length", length, scales[kind]))
        if min(scales.values()) < 1:
            arrays = bounds.shortened(reply.arrays, sent, kinds, scales)
            record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
            reply.message.content = RecordDict({**reply.message.content, "arrays": record})
    return found._replace(clipped=clipped)


def note(clipped: dict[int, str], node: int, text: str) -> None:
    """Add to what was clipped of a node's reply."""
    clipped[node] = f"{clipped[node]}; {text}" if node in clipped else text


# ---- one reply ----


def _read(
    message: Message,
    node: int,
    sent: Mapping[str, NDArray[Any]] | None,
    weight_key: str,
    names: Names,
) -> Good:
    """A reply's weight, metrics and, put in order, its arrays."""
    if message.has_error():
        *_, last = (message.error.reason or "").strip().splitlines() or [
            "no reason given"
        ]  # of a traceback the end
        raise _Unfit(f"error {message.error.code}: {last}")
    if not message.has_content():
        raise _Unfit("an empty reply")
    metrics = _only(message.content.metric_records, "MetricRecord")
    weight, records = (
        _weight(metrics, weight_key),
        {**message.content.config_records, "metrics": metrics},
    )
    length = 0.0
    if sent is not None:
        records["arrays"], length = _ordered(
            _only(message.content.array_records, "ArrayRecord"), sent, names
        )
    message.content = RecordDict(
        records
    )  # under the same names in all replies: strategies go by those of the first
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


def _ordered(
    record: ArrayRecord, sent: Mapping[str, NDArray[Any]], names: Names
) -> tuple[ArrayRecord, float]:
    """An upload, which must be what was sent, in its order and types, and the length of the update:
    strategies inside pair arrays by position, and add them up in the type of the first."""
    missing, extra = sent.keys() - record.keys(), record.keys() - sent.keys()
    if missing or extra:
        parts = (("lacks", missing), ("adds", extra))
        raise _Unfit(
            "; ".join(f"it {verb} {_few(sorted(found))}" for verb, found in parts if found)
        )
    arrays = {name: _array(name, record[name], like) for name, like in sent.items()}
    were = names(sent)
    for name, value in names(arrays).items():
        if reason := statistics.fault(name, value, were[name]):
            raise _Unfit(reason)
    if list(record) != list(sent) or any(
        arrays[n].dtype != _type(arrays[n], like) for n, like in sent.items()
    ):
        typed = {name: _cast(name, arrays[name], like) for name, like in sent.items()}
        record = ArrayRecord({name: Array(value) for name, value in typed.items()})
    return record, _length(arrays, sent)


def _few(names: Sequence[str]) -> str:
    few = ", ".join(names[:5])
    return few if len(names) <= 5 else f"{len(names)} arrays, such as {few}"


def _array(name: str, array: Array, like: NDArray[Any]) -> NDArray[Any]:
    """One array, refused before a byte is allocated where its shape or type is another."""
    try:
        shape, dtype = header(array.data)
        value = array.numpy() if shape == like.shape and holds(dtype, like) else None
    except Exception as error:  # whatever a client may have put there
        raise _Unfit(f"{name} cannot be read ({type(error).__name__}: {error})") from error
    if shape != like.shape:
        raise _Unfit(f"{name} has the shape {shape} instead of {like.shape}")
    if value is None:
        raise _Unfit(f"{name} holds {dtype} instead of {like.dtype}")
    if not np.isfinite(value).all():
        raise _Unfit(f"{name} holds NaN or infinite numbers")
    return value


def _cast(name: str, value: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """A value in the type that it is taken in."""
    with np.errstate(over="ignore"):
        typed = value.astype(_type(value, like))
    if not np.isfinite(typed).all():
        raise _Unfit(f"{name} holds numbers beyond {typed.dtype}")
    return typed


def _type(value: NDArray[Any], like: NDArray[Any]) -> np.dtype[Any]:
    """The type that a value is taken in: what was sent, but a count that comes as a fraction stays
    one."""
    return (
        np.dtype(np.float64) if value.dtype.kind == "f" and like.dtype.kind != "f" else like.dtype
    )


def holds(dtype: np.dtype[Any], like: NDArray[Any]) -> bool:
    """Whether numbers of a type can stand for those that were sent: real ones for real ones, any
    for counts."""
    return dtype.kind in ("f" if like.dtype.kind == "f" else "fiub")


def header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type in the header of an array in numpy's format."""
    buffer = BytesIO(data)
    read = (
        npy.read_array_header_1_0 if npy.read_magic(buffer) == (1, 0) else npy.read_array_header_2_0
    )
    shape, _, dtype = read(buffer)
    return shape, dtype


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
    """What is wrong with replies whose metrics go by other names, or are lists of other lengths,
    than those of more than half; nothing with all others."""
    kinds = [_kind(reply.metrics) for reply in good]
    usual, count = Counter(kinds).most_common(1)[0] if kinds else (Kind(), 0)
    told = ", ".join(sorted(name for name, _ in usual))
    odd = f"its metrics are not those of the others ({told})"
    return [odd if kind != usual and 2 * count > len(good) else "" for kind in kinds]


def _share_metrics(good: Sequence[Good]) -> None:
    """Where no kind of metrics is that of most, leave those that all have: only they can be
    averaged."""
    kinds = [_kind(reply.metrics) for reply in good]
    if len(set(kinds)) > 1:
        shared = {name for name, _ in frozenset.intersection(*kinds)}
        for reply in good:
            for name in reply.metrics.keys() - shared:
                del reply.metrics[name]


def _fill_metrics(good: Sequence[Good]) -> dict[int, str]:
    """Put the others' weighted mean in the place of NaN and infinite metrics: so the mean over all
    is that of the others, whatever function of the user's takes it. Where nobody has a finite one,
    it stays."""
    blank: dict[int, str] = {}
    for name in good[0].metrics if good else ():
        rows = [_row(reply.metrics[name]) for reply in good]
        fine = [all(map(isfinite, row)) for row in rows]
        if all(fine) or not any(fine):
            continue
        total = sum(reply.weight for reply, ok in zip(good, fine, strict=True) if ok)
        mean = [0.0] * len(rows[0])
        for reply, row, ok in zip(good, rows, fine, strict=True):
            if ok:
                mean = [a + reply.weight / total * b for a, b in zip(mean, row, strict=True)]
        for reply, ok in zip(good, fine, strict=True):
            if not ok:
                note(
                    blank,
                    reply.node,
                    shown(f"its {name} is not finite, and is left out of the mean"),
                )
                reply.metrics[name] = mean if isinstance(reply.metrics[name], list) else mean[0]
    return blank


def _row(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _kind(metrics: MetricRecord) -> Kind:
    return frozenset((name, len(v) if isinstance(v, list) else -1) for name, v in metrics.items())


def _heavy(good: Sequence[Good]) -> list[str]:
    """Weights far above the others'. One that is far below does no harm, and must not make the
    others look heavy."""
    weights = [reply.weight for reply in good]
    return [
        f"its weight {weight:.3g} is more than {HEAVY:g} times the others'"
        if weight > bound
        else ""
        for weight, bound in zip(weights, heaviest(weights), strict=True)
    ]


def heaviest(weights: Sequence[float]) -> list[float]:
    """How much each may weigh beside the others."""
    least = ABSURD if len(weights) == 2 else 0.0
    return [min(max(HEAVY * other, least), SUM) for other in medians(weights)]


def _far(good: Sequence[Good], size: float) -> list[str]:
    lengths = [reply.length for reply in good]
    return [
        ""
        if length <= bound
        else f"its update of length {length:.3g} is too long, at most {bound:.3g} would do"
        for length, bound in zip(lengths, farthest(lengths, size), strict=True)
    ]


def farthest(lengths: Sequence[float], size: float) -> list[float]:
    """How long each update may be beside the others, for a model of this length; alone, any finite
    length will do."""
    most = np.finfo(np.float64).max
    return [
        most if other == inf else max(FAR * other, BEYOND * max(size, 1.0))
        for other in medians(lengths)
    ]
