"""Which replies of an exchange can be used, and why the others cannot.

A federation goes on without a client that sends nonsense. A reply counts if

- it answers what was asked,
- it holds the arrays that were asked for: their names, their shapes, real and finite numbers, and
  buffers that can be such,
- its update is not absurdly long, and
- its weight is positive, and not absurd beside the others' weights.

What is merely far from the others is shortened, by the rules of `bounds.py`. Against clients that
lie within the bounds, use a robust average.
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

from . import bounds, statistics
from .answers import SECOND, match, shown
from .bounds import Clip, medians
from .wire import Arrays, Given, Values, arrays_of

log = logging.getLogger("flwr")

FAR = 1e3
"""An update is refused if it is longer than this many times the others' median,"""
BEYOND = 1e2
"""and longer than this many times the model, or 1."""
HEAVY = 1e6
"""A weight is refused if it is more than this many times the others' median,"""
ABSURD = 1e9
"""or, of two weights that far apart, if it is above this,"""
SUM = 1e18
"""and in any case if it is above this."""
SECURE = "secaggplus_configs"
"""What a client with Flower's secaggplus_mod looks for in vain without its protocol."""
LINES = 100
"""How many lines of the log one exchange may take."""

Type = np.dtype[Any]
"""A type of numbers."""
Shape = tuple[int, ...]
Kind = frozenset[tuple[str, int]]
"""The names of metrics, each with the length of its list, or -1 for a single number."""
Names = Callable[[Given], Given]
"""A function from the arrays of an upload to those that the model has names for."""


class Good(NamedTuple):
    """A reply that can be used. Its arrays are in the order and of the types that were sent."""

    message: Message
    """The reply itself. Its content was put in order."""
    node: int
    """The node that it comes from."""
    weight: float
    """How much it counts in an average: usually the number of the node's rows."""
    metrics: MetricRecord
    """What the client has measured."""
    length: float
    """The length of the update."""

    @property
    def arrays(self) -> Arrays:
        """The upload."""
        records = self.message.content.array_records
        return arrays_of(_only(records, "ArrayRecord"))


class Screened(NamedTuple):
    """The replies of an exchange, and what is to be told of the others, by node."""

    good: list[Good]
    """The replies that can be used."""
    dropped: dict[int, str]
    """Who does not count, and why."""
    ignored: list[tuple[int, str]]
    """Messages beside the replies: who sent them, and why they do not count."""
    blank: dict[int, str]
    """Which metrics do not count."""
    clipped: dict[int, str]
    """What counts less than was sent."""

    @property
    def numbers(self) -> dict[str, float]:
        """What the trace tells: how many replies were dropped, ignored and clipped."""
        return {
            "dropped": float(len(self.dropped)),
            "ignored": float(len(self.ignored)),
            "clipped": float(len(self.clipped)),
        }


class _Unfit(Exception):
    """Why a reply cannot be used. `screen` catches it, and notes its text for the log."""


def screen(
    messages: Iterable[Message],
    asked: Sequence[Message],
    sent: Given | None,
    weight_key: str,
    names: Names = dict,
) -> Screened:
    """Sort the messages that have arrived into replies that can be used and others.

    Args:
        messages: What has arrived.
        asked: The messages that were sent.
        sent: What an upload must look like, and from which the length of an update is measured.
            None if no arrays are expected, as in an evaluation.
        weight_key: The metric that tells a client's weight.
        names: Gives the arrays of an upload the names that the model has for them, where these
            differ.

    Returns:
        The good replies, and what is to be told of the others. The good replies come in an order
        that depends on their content alone. So a sum over them does not depend on who answered
        first.
    """
    replies, ignored = match(messages, asked)
    good: list[Good] = []
    dropped: dict[int, str] = {}
    for node, reply in replies.items():
        try:
            read = _read(reply, node, sent, weight_key, names)
            good.append(read)
        except _Unfit as reason:
            dropped[node] = shown(str(reason))
    for message in asked:
        node = message.metadata.dst_node_id
        if node not in replies:
            dropped[node] = "no reply"
    size = 0.0 if sent is None else _length(sent, None)
    # A reply that is refused for one reason must not shift the medians of the next checks.
    good = _without(good, _odd_metrics(good), dropped)
    good = _without(good, _heavy(good), dropped)
    good = _without(good, _far(good, size), dropped)
    _share_metrics(good)
    blank = _fill_metrics(good)
    in_order = sorted(good, key=_content)
    return Screened(in_order, dropped, ignored, blank, {})


def _without(
    good: list[Good],
    reasons: Sequence[str],
    dropped: dict[int, str],
) -> list[Good]:
    """The replies that there is no reason to refuse. The others are added to `dropped`."""
    left = []
    for reply, reason in zip(good, reasons, strict=True):
        if reason:
            dropped[reply.node] = shown(reason)
        else:
            left.append(reply)
    return left


def tell(where: str, found: Screened) -> None:
    """Log who was dropped, and why, and what else does not count as it was sent.

    `where` says which exchange it was. A hundred lines are enough to see what is wrong.
    """
    if found.dropped:
        good = len(found.good)
        dropped = len(found.dropped)
        log.warning("%s: %d good replies, %d dropped", where, good, dropped)
    lines = []
    for node, reason in found.dropped.items():
        lines.append(f"node {node} dropped: {reason}")
    for node, reason in found.ignored:
        lines.append(f"node {node}: {_ignored(node, reason, found)}")
    for node, reason in found.blank.items():
        lines.append(f"node {node}: {reason}")
    for node, reason in found.clipped.items():
        lines.append(f"node {node} clipped: {reason}")
    for line in lines[:LINES]:
        log.warning("\t> %s", line)
    more = len(lines) - LINES
    if more > 0:
        log.warning("\t> and %d more", more)
    reasons = set(found.dropped.values())
    if not found.good and reasons == {"no reply"}:
        log.warning(
            "\t> nobody replied: is start(timeout=...) long enough for the clients to start and to "
            "train?"
        )
    if any(SECURE in reason for reason in reasons):
        log.warning(
            "\t> these clients aggregate securely (secaggplus_mod): take "
            "fedsso.flower.legacy.LegacyFedSSO as the strategy, or leave the mod out"
        )


def _ignored(node: int, reason: str, found: Screened) -> str:
    """What became of a message beside the replies."""
    if reason != SECOND:
        return f"a message was ignored: {reason}"
    first = "was dropped" if node in found.dropped else "counts"
    return f"{SECOND} was ignored, its first {first}"


def _content(reply: Good) -> tuple[float, float, str]:
    """What replies are sorted by: their content, and not who answered first."""
    metrics = sorted(reply.metrics.items())
    return reply.weight, reply.length, repr(metrics)


# ---- a bounded influence ----


def lighten(
    found: Screened,
    weight_key: str,
    clip: Clip,
) -> Screened:
    """Bound the weights: none is more than `clip.weight` times the others' median.

    The metrics of a reply that was clipped tell the new weight, so that the user's own functions
    and Flower's strategies count with it, too.
    """
    weights = [reply.weight for reply in found.good]
    scales = bounds.factors(weights, clip.weight)
    clipped = dict(found.clipped)
    good = []
    for reply, scale in zip(found.good, scales, strict=True):
        if scale < 1:
            told = bounds.told("weight", reply.weight, scale)
            note(clipped, reply.node, told)
            weight = reply.weight * scale
            reply = reply._replace(weight=weight)
            reply.metrics[weight_key] = weight
        good.append(reply)
    return found._replace(good=good, clipped=clipped)


def shorten(
    found: Screened,
    sent: Given,
    kinds: Mapping[str, str],
    clip: Clip,
) -> Screened:
    """Bound the updates, each kind of arrays for itself.

    None is longer than a multiple of the others' median. The messages of the replies that were
    clipped get new arrays.

    Args:
        found: The replies that passed the screening.
        sent: The arrays that the nodes were sent.
        kinds: The kind of each array, by name.
        clip: The bounds.
    """
    if len(found.good) < bounds.LEAST:
        return found
    lengths = []
    for reply in found.good:
        lengths.append(bounds.moves(reply.arrays, sent, kinds))
    scales = scales_of(lengths, kinds, clip)
    clipped = dict(found.clipped)
    for reply, own, scale_of in zip(found.good, lengths, scales, strict=True):
        told = told_moves(own, scale_of)
        if not told:
            continue
        note(clipped, reply.node, told)
        arrays = bounds.shortened(reply.arrays, sent, kinds, scale_of)
        content = {**reply.message.content, "arrays": _as_record(arrays)}
        reply.message.content = RecordDict(content)
    return found._replace(clipped=clipped)


def told_moves(
    lengths: Sequence[float],
    scale_of: Mapping[str, float],
) -> str:
    """What was clipped of a reply's arrays, for the log. Empty if nothing was."""
    parts = []
    for length, kind in zip(lengths, scale_of, strict=True):
        scale = scale_of[kind]
        if scale < 1:
            told = bounds.told(f"{kind} of length", length, scale)
            parts.append(told)
    return "; ".join(parts)


def scales_of(
    lengths: Sequence[Sequence[float]],
    kinds: Mapping[str, str],
    clip: Clip,
) -> list[dict[str, float]]:
    """For each reply, the factor of each kind of arrays.

    Args:
        lengths: For each reply, what `bounds.moves` returns.
        kinds: The kind of each array, by name. The kinds are in the order of `bounds.moves`.
        clip: The bounds.
    """
    scales: list[dict[str, float]] = []
    for _ in lengths:
        scales.append({})
    order = dict.fromkeys(kinds.values())
    for place, kind in enumerate(order):
        column = [own[place] for own in lengths]
        multiple = clip.multiple(kind)
        factors = bounds.factors(column, multiple)
        for own_scales, factor in zip(scales, factors, strict=True):
            own_scales[kind] = factor
    return scales


def note(
    clipped: dict[int, str],
    node: int,
    text: str,
) -> None:
    """Add a text to what was noted of a node's reply."""
    if node in clipped:
        text = f"{clipped[node]}; {text}"
    clipped[node] = text


def _as_record(arrays: Given) -> ArrayRecord:
    """Arrays as a record of Flower."""
    record = {}
    for name, value in arrays.items():
        record[name] = Array(value)
    return ArrayRecord(record)


# ---- one reply ----


def _read(
    message: Message,
    node: int,
    sent: Given | None,
    weight_key: str,
    names: Names,
) -> Good:
    """Read a reply: its weight, its metrics and, put in order, its arrays.

    The records get the same names in all replies, because Flower's strategies take the names from
    the first one. Raises `_Unfit` with the reason if the reply cannot be used.

    Args:
        message: The reply.
        node: The node that it comes from.
        sent: What its arrays must look like, or None if there are none.
        weight_key: The metric that tells its weight.
        names: Gives its arrays the names that the model has for them.
    """
    if message.has_error():
        reason = (message.error.reason or "").strip()
        lines = reason.splitlines() or ["no reason given"]
        end = lines[-1]  # of a traceback, the last line says what is wrong
        raise _Unfit(f"error {message.error.code}: {end}")
    if not message.has_content():
        raise _Unfit("an empty reply")
    content = message.content
    metrics = _only(content.metric_records, "MetricRecord")
    weight = _weight(metrics, weight_key)
    records = {**content.config_records, "metrics": metrics}
    length = 0.0
    if sent is not None:
        given = _only(content.array_records, "ArrayRecord")
        records["arrays"], length = _ordered(given, sent, names)
    message.content = RecordDict(records)
    return Good(message, node, weight, metrics, length)


def _only(records: Mapping[str, Any], kind: str) -> Any:
    """The one record of its kind. A reply with none or several of them is refused."""
    count = len(records)
    if count != 1:
        raise _Unfit(f"{count} {kind}s instead of one")
    (record,) = records.values()
    return record


def _weight(metrics: MetricRecord, key: str) -> float:
    """The client's weight, which must be a positive number."""
    weight = metrics.get(key)
    if weight is None:
        raise _Unfit(f"no {key!r} among its metrics")
    wrong = f"{key} is {weight}, not a positive number"
    if isinstance(weight, list):
        raise _Unfit(wrong)
    if not isfinite(weight) or weight <= 0:
        raise _Unfit(wrong)
    return float(weight)


def _ordered(
    record: ArrayRecord,
    sent: Given,
    names: Names,
) -> tuple[ArrayRecord, float]:
    """Check an upload, and return it in the order and types of `sent`, with the update's length.

    The order and types matter, because Flower's strategies pair arrays by their position, and add
    them up in the type of the first.
    """
    _check_names(record, sent)
    arrays = {}
    for name, like in sent.items():
        arrays[name] = _array(name, record[name], like)
    were = names(sent)
    for name, value in names(arrays).items():
        reason = statistics.fault(name, value, were[name])
        if reason:
            raise _Unfit(reason)
    length = _length(arrays, sent)
    same_order = list(record) == list(sent)
    if same_order and _same_types(arrays, sent):
        return record, length
    typed = {}
    for name, like in sent.items():
        typed[name] = _cast(name, arrays[name], like)
    return _as_record(typed), length


def _check_names(record: ArrayRecord, sent: Given) -> None:
    """Refuse an upload that lacks an array, or has one that was not asked for.

    A few names are told, because a model can have thousands of arrays.
    """
    missing = sorted(sent.keys() - record.keys())
    extra = sorted(record.keys() - sent.keys())
    faults = []
    if missing:
        faults.append(f"it lacks {_few(missing)}")
    if extra:
        faults.append(f"it adds {_few(extra)}")
    if faults:
        raise _Unfit("; ".join(faults))


def _few(names: Sequence[str]) -> str:
    """A few of several names, for the log."""
    few = ", ".join(names[:5])
    if len(names) <= 5:
        return few
    return f"{len(names)} arrays, such as {few}"


def _array(
    name: str,
    array: Array,
    like: Values,
) -> Values:
    """Read one array. One of another shape or type is refused before any memory is allocated.

    A header can tell of any size. So it is read first, and compared with what was sent.
    """
    try:
        shape, dtype = header(array.data)
        value = None
        if shape == like.shape and holds(dtype, like):
            value = array.numpy()
    except Exception as error:  # whatever a client may have put there
        kind = type(error).__name__
        raise _Unfit(f"{name} cannot be read ({kind}: {error})") from error
    if shape != like.shape:
        raise _Unfit(f"{name} has the shape {shape} instead of {like.shape}")
    if value is None:
        raise _Unfit(f"{name} holds {dtype} instead of {like.dtype}")
    if not np.isfinite(value).all():
        raise _Unfit(f"{name} holds NaN or infinite numbers")
    return value


def _same_types(arrays: Given, sent: Given) -> bool:
    """Whether all arrays have the types that they are taken in."""
    for name, like in sent.items():
        value = arrays[name]
        if value.dtype != _type(value, like):
            return False
    return True


def _cast(
    name: str,
    value: Values,
    like: Values,
) -> Values:
    """An array in the type that it is taken in."""
    with np.errstate(over="ignore"):
        typed = value.astype(_type(value, like))
    if not np.isfinite(typed).all():
        raise _Unfit(f"{name} holds numbers beyond {typed.dtype}")
    return typed


def _type(value: Values, like: Values) -> Type:
    """The type that an array is taken in.

    It is the type of what was sent. But a count that comes back as a fraction stays one.
    """
    is_fraction = value.dtype.kind == "f"
    if is_fraction and like.dtype.kind != "f":
        return np.dtype(np.float64)
    return like.dtype


def holds(dtype: Type, like: Values) -> bool:
    """Whether numbers of a type can stand for those that were sent.

    Floats stand for floats. Counts may come as any real numbers.
    """
    allowed = "f" if like.dtype.kind == "f" else "fiub"
    return dtype.kind in allowed


def header(data: bytes) -> tuple[Shape, Type]:
    """The shape and type in the header of an array in numpy's format.

    Nothing behind the header is read. Raises ValueError if the data do not begin with one.
    """
    buffer = BytesIO(data)
    version = npy.read_magic(buffer)
    if version == (1, 0):
        read = npy.read_array_header_1_0
    else:
        read = npy.read_array_header_2_0
    shape, _, dtype = read(buffer)
    return shape, dtype


def _length(
    arrays: Given,
    origin: Given | None,
) -> float:
    """The distance of all real arrays from the origin. Counts may grow, and are left out.

    Without an origin, it is the distance from zero. The sum is in float64.
    """
    total = 0.0
    for name, value in arrays.items():
        if value.dtype.kind != "f":
            continue
        away = value.astype(np.float64)
        if origin is not None:
            if origin[name].dtype.kind != "f":
                continue
            away = away - origin[name]
        square = np.vdot(away, away)
        total += float(square)
    return sqrt(total)


# ---- one reply beside the others ----


def _odd_metrics(good: Sequence[Good]) -> list[str]:
    """For each reply, why its metrics are unlike those of more than half. Empty if they are not.

    Metrics are unlike if they have other names, or are lists of other lengths.
    """
    if not good:
        return []
    kinds = [_kind(reply.metrics) for reply in good]
    usual, count = Counter(kinds).most_common(1)[0]
    is_majority = 2 * count > len(good)
    names = ", ".join(sorted(dict(usual)))
    odd = f"its metrics are not those of the others ({names})"
    faults = []
    for kind in kinds:
        is_odd = is_majority and kind != usual
        faults.append(odd if is_odd else "")
    return faults


def _share_metrics(good: Sequence[Good]) -> None:
    """Where no kind of metrics is that of most, leave only those that all replies have.

    Only these can be averaged.
    """
    kinds = [_kind(reply.metrics) for reply in good]
    if len(set(kinds)) <= 1:
        return
    shared = dict(frozenset.intersection(*kinds))
    for reply in good:
        others = reply.metrics.keys() - shared.keys()
        for name in others:
            del reply.metrics[name]


def _fill_metrics(good: Sequence[Good]) -> dict[int, str]:
    """Put the others' weighted mean in the place of metrics that are NaN or infinite.

    So the mean over all is that of the others, whatever function of the user's computes it. Where
    nobody has a finite metric, it stays. Returns what was replaced, by node.
    """
    blank: dict[int, str] = {}
    for name in good[0].metrics if good else ():
        fine: list[Good] = []
        others: list[Good] = []
        for reply in good:
            group = fine if _is_finite(reply.metrics[name]) else others
            group.append(reply)
        if not fine or not others:
            continue
        mean = _mean_metric(name, fine)
        for reply in others:
            text = shown(f"its {name} is not finite, and is left out of the mean")
            note(blank, reply.node, text)
            is_list = isinstance(reply.metrics[name], list)
            reply.metrics[name] = mean if is_list else mean[0]
    return blank


def _mean_metric(name: str, replies: Sequence[Good]) -> list[float]:
    """The weighted mean of a metric over some replies, as a list."""
    total = sum(reply.weight for reply in replies)
    first = _row(replies[0].metrics[name])
    mean = [0.0] * len(first)
    for reply in replies:
        share = reply.weight / total
        row = _row(reply.metrics[name])
        for place, value in enumerate(row):
            mean[place] += share * value
    return mean


def _row(value: Any) -> list[float]:
    """A metric as a list."""
    return value if isinstance(value, list) else [value]


def _is_finite(value: Any) -> bool:
    """Whether a metric holds no NaN and no infinite number."""
    return all(map(isfinite, _row(value)))


def _kind(metrics: MetricRecord) -> Kind:
    """What metrics a reply has: their names and lengths, but not their values."""
    found = set()
    for name, value in metrics.items():
        length = len(value) if isinstance(value, list) else -1
        found.add((name, length))
    return frozenset(found)


def _heavy(good: Sequence[Good]) -> list[str]:
    """For each reply, why its weight is far above the others'. Empty if it is not.

    A weight far below the others' does no harm, and must not make them look heavy. So weights are
    compared with the median, which one small weight hardly moves.
    """
    weights = [reply.weight for reply in good]
    allowed = heaviest(weights)
    faults = []
    for weight, bound in zip(weights, allowed, strict=True):
        fault = ""
        if weight > bound:
            fault = f"its weight {weight:.3g} is more than {HEAVY:g} times the others'"
        faults.append(fault)
    return faults


def heaviest(weights: Sequence[float]) -> list[float]:
    """How much each client may weigh beside the others.

    It is HEAVY times the others' median, but never more than SUM. With two clients there is no
    majority. Then a weight below ABSURD is always accepted.
    """
    least = ABSURD if len(weights) == 2 else 0.0
    bounds_ = []
    for other in medians(weights):
        bound = max(HEAVY * other, least)
        bounds_.append(min(bound, SUM))
    return bounds_


def _far(good: Sequence[Good], size: float) -> list[str]:
    """For each reply, why its update is too long. Empty if it is not."""
    lengths = [reply.length for reply in good]
    allowed = farthest(lengths, size)
    faults = []
    for length, bound in zip(lengths, allowed, strict=True):
        fault = ""
        if not length <= bound:
            too_long = f"its update of length {length:.3g} is too long"
            fault = f"{too_long}, at most {bound:.3g} would do"
        faults.append(fault)
    return faults


def farthest(lengths: Sequence[float], size: float) -> list[float]:
    """How long each update may be beside the others, for a model of length `size`.

    It is FAR times the others' median, and at least BEYOND times the model: clients can learn at
    very different speeds. Alone, any finite length will do.
    """
    most = float(np.finfo(np.float64).max)
    least = BEYOND * max(size, 1.0)
    bounds_ = []
    for other in medians(lengths):
        bound = most
        if other != inf:
            bound = max(FAR * other, least)
        bounds_.append(bound)
    return bounds_
