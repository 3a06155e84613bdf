"""Hostile replies: what a broken or lying client may send instead of a good reply, whatever the
strategy.

`HOSTILE[name].change(reply, asked)` gives the messages that arrive at the server instead of
`reply`, a good answer to `asked`; both are Flower's own. The reply may be changed in place.
`effect` says what must become of it, `says` what the server's log must tell of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

DROPPED = "dropped"  # as if the node had not answered
IGNORED = "ignored"  # the good reply counts, what came beside it does not
HARMLESS = "harmless"  # nothing is wrong with it
BLANK = "blank"  # the model counts, a metric does not
CLIPPED = "clipped"  # it counts, within bounds
BOUNDED = "bounded"  # it counts, and is within the bounds already
WEIGHT = "num-examples"
BUFFERS = "buffers"  # the vector of all buffers in an upload to PhasedStrategy
ESCAPE = "\x1b[2J\x1b]0;owned\x07 node 7 dropped: \u202e\r\n[92mINFO: all is well\n"

Change = Callable[[Message, Message], list[Message]]


class Hostile(NamedTuple):
    """One kind of hostile reply."""

    change: Change
    effect: str
    says: str = ""


# ---- parts of a good reply ----


def arrays_of(message: Message) -> ArrayRecord:
    """The only ArrayRecord of a message."""
    (record,) = message.content.array_records.values()
    return record


def metrics_of(message: Message) -> MetricRecord:
    (record,) = message.content.metric_records.values()
    return record


def largest(record: ArrayRecord) -> str:
    """The name of the largest array that is no buffer."""
    sizes = {name: array.numpy().size for name, array in record.items() if name != BUFFERS}
    return max(sizes, key=lambda name: sizes[name])


def origin(name: str, asked: Message) -> NDArray[Any] | float:
    """Where an update begins: at the array of that name that was sent, else at 0."""
    sent = arrays_of(asked)
    return sent[name].numpy() if name in sent else 0.0


# ---- ways to change it ----


def array(make: Callable[[NDArray[Any]], Any]) -> Change:
    """Replace the largest array."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        record = arrays_of(reply)
        name = largest(record)
        value = make(record[name].numpy().copy())
        record[name] = value if isinstance(value, Array) else Array(np.asarray(value))
        return [reply]

    return change


def entry(number: float) -> Change:
    """Put a number into the largest array."""

    def put(value: NDArray[Any]) -> NDArray[Any]:
        value.flat[0] = number
        return value

    return array(put)


def data(make: Callable[[bytes], bytes]) -> Change:
    """Other bytes under the description of a good array."""
    return array(
        lambda value: Array(str(value.dtype), value.shape, "numpy.ndarray", make(Array(value).data))
    )


def header(dtype: str, shape: tuple[int, ...] | None = None) -> Callable[[NDArray[Any]], Array]:
    """An array whose header asks for more than there is."""

    def make(value: NDArray[Any]) -> Array:
        buffer = BytesIO()
        about = {
            "descr": dtype,
            "fortran_order": False,
            "shape": value.shape if shape is None else shape,
        }
        npy.write_array_header_1_0(buffer, about)
        return Array(
            str(value.dtype), value.shape, "numpy.ndarray", buffer.getvalue() + value.tobytes()
        )

    return make


def objects(value: NDArray[Any]) -> Array:
    """An array of Python objects, which numpy would have to unpickle."""
    buffer = BytesIO()
    np.save(buffer, np.full(value.shape, {"a": 1}, dtype=object), allow_pickle=True)
    return Array("object", value.shape, "numpy.ndarray", buffer.getvalue())


class Boom:
    """Unpickled, it would end the process."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def longer(factor: float, weight: float = 1.0) -> Change:
    """The update many times as long, and perhaps heavier; buffers stay."""

    def change(reply: Message, asked: Message) -> list[Message]:
        record = arrays_of(reply)
        for name, one in list(record.items()):
            value, start = one.numpy(), origin(name, asked)
            if value.dtype.kind == "f" and name != BUFFERS and "running" not in name:
                record[name] = Array(np.asarray(start + factor * (value - start), value.dtype))
        metrics_of(reply)[WEIGHT] = metrics_of(reply)[WEIGHT] * weight
        return [reply]

    return change


def tiny(value: NDArray[Any]) -> NDArray[Any]:
    """Numbers that are nearly 0."""
    return np.full_like(value, np.finfo(value.dtype).smallest_subnormal)


def keys(make: Callable[[dict[str, Array]], dict[str, Array]]) -> Change:
    """Other names, or an other order, of the arrays."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        (name,) = reply.content.array_records
        reply.content[name] = ArrayRecord(make(dict(reply.content[name])))
        return [reply]

    return change


def without_one(arrays: dict[str, Array]) -> dict[str, Array]:
    return dict(list(arrays.items())[1:])


def renamed(arrays: dict[str, Array]) -> dict[str, Array]:
    return {ESCAPE if i == 0 else name: value for i, (name, value) in enumerate(arrays.items())}


def backwards(arrays: dict[str, Array]) -> dict[str, Array]:
    return dict(reversed(list(arrays.items())))


def metric(**values: Any) -> Change:
    """Other metrics beside the good ones; None takes one away."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        record = metrics_of(reply)
        for name, value in values.items():
            key = WEIGHT if name == "weight" else name
            if value is None:
                del record[key]
            else:
                record[key] = value
        return [reply]

    return change


def loss(value: float) -> Change:
    """Another loss where one is told."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        if "train_loss" in metrics_of(reply):
            metrics_of(reply)["train_loss"] = value
        return [reply]

    return change


def light(reply: Message, _asked: Message) -> list[Message]:
    metrics_of(reply)[WEIGHT] = 1e-9
    return [reply]


def named_metric(name: str) -> Change:
    return metric(**{name: 1.0})


def content(make: Callable[[RecordDict], dict[str, Any]]) -> Change:
    """Other records."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        reply.content = RecordDict(make(reply.content))
        return [reply]

    return change


def doubled(kind: type) -> Callable[[RecordDict], dict[str, Any]]:
    """A second record of a kind."""

    def make(records: RecordDict) -> dict[str, Any]:
        again = {
            f"{name} again": record for name, record in records.items() if isinstance(record, kind)
        }
        return {**records, **again}

    return make


def only(kind: type) -> Callable[[RecordDict], dict[str, Any]]:
    return lambda records: {
        name: record for name, record in records.items() if isinstance(record, kind)
    }


def error(code: int, text: str) -> Change:
    return lambda _reply, asked: [Message(Error(code, text), reply_to=asked)]


def labelled(**fields: Any) -> Change:
    """Other words about the message itself: who sends it, what it answers."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        for name, value in fields.items():
            reply.metadata.__dict__[f"_{name}"] = (
                value(reply.metadata) if callable(value) else value
            )
        return [reply]

    return change


def copy_of(reply: Message, asked: Message) -> Message:
    """A reply with the same records of its own."""
    records = {name: type(record)(dict(record)) for name, record in reply.content.items()}  # type: ignore[call-arg]
    return Message(RecordDict(records), reply_to=asked)


def beside(change: Change) -> Change:
    """The good reply, and a hostile one after it."""
    return lambda reply, asked: [reply, *change(copy_of(reply, asked), asked)]


def lost(_reply: Message, _asked: Message) -> list[Message]:
    return []


def flood(reply: Message, asked: Message) -> list[Message]:
    """Two hundred more replies, each a lie."""
    lies = (longer(-50.0)(copy_of(reply, asked), asked) for _ in range(200))
    return [reply, *(lie for some in lies for lie in some)]


def buffer(kind: str, number: float) -> Change:
    """Put a number into BatchNorm's variances, means or count."""

    def change(reply: Message, _asked: Message) -> list[Message]:
        record = arrays_of(reply)
        name = next((name for name in record if name.endswith(kind)), BUFFERS)
        value = record[name].numpy().copy()
        features = (value.size - 1) // 2  # of one layer: means, variances, count
        place = (
            {"running_mean": 0, "running_var": features, "num_batches_tracked": -1}[kind]
            if name == BUFFERS
            else 0
        )
        value.flat[place] = number
        record[name] = Array(value)
        return [reply]

    return change


def chain(*changes: Change) -> Change:
    """Several at once."""

    def change(reply: Message, asked: Message) -> list[Message]:
        for one in changes:
            (reply,) = one(reply, asked)
        return [reply]

    return change


ARRAYS = {
    "NaN": Hostile(entry(np.nan), DROPPED, "holds NaN or infinite"),
    "infinite": Hostile(entry(np.inf), DROPPED, "holds NaN or infinite"),
    "minus infinite": Hostile(entry(-np.inf), DROPPED, "holds NaN or infinite"),
    "all NaN": Hostile(array(lambda v: v * np.nan), DROPPED, "holds NaN or infinite"),
    "huge": Hostile(longer(1e9), DROPPED, "is too long"),
    "huge in double": Hostile(
        array(lambda v: v.astype("float64") + 1e300), DROPPED, "too long|beyond float"
    ),
    "float16 that overflows": Hostile(
        array(lambda v: np.full(v.shape, np.inf, "float16")), DROPPED, "holds NaN or infinite"
    ),
    "wrong shape": Hostile(array(lambda v: np.concatenate([v, v])), DROPPED, "has the shape"),
    "one axis more": Hostile(array(lambda v: v[None]), DROPPED, "has the shape"),
    "transposed": Hostile(
        array(lambda v: v.T if v.ndim > 1 else v[:, None]), DROPPED, "has the shape"
    ),
    "broadcastable": Hostile(array(lambda v: v.reshape(-1)[:1]), DROPPED, "has the shape"),
    "a number": Hostile(array(lambda v: v.reshape(-1)[0]), DROPPED, "has the shape"),
    "no rows": Hostile(array(lambda v: v[:0]), DROPPED, "has the shape"),
    "header asks for a terabyte": Hostile(array(header("<f4", (2**38,))), DROPPED, "has the shape"),
    "header asks for gigabytes a cell": Hostile(
        array(header("|S2000000000")), DROPPED, "instead of float"
    ),
    "complex": Hostile(
        array(lambda v: v.astype("complex64")), DROPPED, "holds complex64 instead of"
    ),
    "integers": Hostile(
        array(lambda v: np.ones(v.shape, "int64")), DROPPED, "holds int64 instead of"
    ),
    "text": Hostile(array(lambda v: np.full(v.shape, "x")), DROPPED, "holds <U1 instead of"),
    "dates": Hostile(
        array(lambda v: np.zeros(v.shape, "datetime64[s]")), DROPPED, "instead of float"
    ),
    "records": Hostile(
        array(lambda v: np.zeros(v.shape, [("a", "f4")])), DROPPED, "instead of float"
    ),
    "objects": Hostile(array(objects), DROPPED, "holds object instead of"),
    "pickled bytes": Hostile(data(lambda _: pickle.dumps(Boom())), DROPPED, "cannot be read"),
    "unreadable bytes": Hostile(data(lambda _: b"junk"), DROPPED, "cannot be read"),
    "no bytes": Hostile(data(lambda _: b""), DROPPED, "cannot be read"),
    "cut short": Hostile(data(lambda good: good[:-3]), DROPPED, "cannot be read"),
    "another serialisation": Hostile(
        array(lambda v: Array(str(v.dtype), v.shape, "cbor", Array(v).data)),
        DROPPED,
        "cannot be read",
    ),
    "missing key": Hostile(keys(without_one), DROPPED, "it lacks"),
    "extra key": Hostile(
        keys(lambda a: {**a, "extra": Array(np.zeros(1))}), DROPPED, "it adds extra"
    ),
    "renamed key": Hostile(keys(renamed), DROPPED, r"it adds .*\\x1b"),
    "a thousand keys": Hostile(
        keys(lambda a: a | {f"{i}-{ESCAPE}": Array(np.zeros(1)) for i in range(1000)}),
        DROPPED,
        "it adds 1000 arrays",
    ),
    "reordered, and NaN": Hostile(
        chain(keys(backwards), entry(np.nan)), DROPPED, "holds NaN or infinite"
    ),
    "reordered keys": Hostile(keys(backwards), HARMLESS),
    "big-endian": Hostile(array(lambda v: v.astype(v.dtype.newbyteorder(">"))), HARMLESS),
    "denormals": Hostile(array(tiny), BOUNDED),
}
WEIGHTS = {
    "no weight": Hostile(metric(weight=None), DROPPED, "no 'num-examples' among its metrics"),
    "weight 0": Hostile(metric(weight=0), DROPPED, "num-examples is 0, not a positive number"),
    "negative weight": Hostile(metric(weight=-5), DROPPED, "num-examples is -5"),
    "NaN as weight": Hostile(metric(weight=np.nan), DROPPED, "num-examples is nan"),
    "infinite weight": Hostile(metric(weight=np.inf), DROPPED, "num-examples is inf"),
    "absurd weight": Hostile(metric(weight=10**12), DROPPED, r"its weight 1e\+12 is more than"),
    "list as weight": Hostile(metric(weight=[5, 5]), DROPPED, r"num-examples is \[5, 5\]"),
    "enormous list as weight": Hostile(
        metric(weight=[1.5] * 10**5), DROPPED, r"num-examples is \[1.5"
    ),
    "tiny weight": Hostile(light, BOUNDED),
    "weight times 1000": Hostile(longer(1.0, 1e3), CLIPPED, "clipped: its weight"),
}
METRICS = {
    "another metric": Hostile(metric(mine=1.0), DROPPED, "its metrics are not those of the others"),
    "enormous list as metric": Hostile(
        metric(train_loss=[1.0] * 10**5), DROPPED, "its metrics are not those"
    ),
    "escapes in a metric's name": Hostile(
        named_metric(ESCAPE), DROPPED, "its metrics are not those"
    ),
    "NaN loss": Hostile(loss(np.nan), BLANK, "its train_loss is not finite"),
    "infinite loss": Hostile(loss(-np.inf), BLANK, "its train_loss is not finite"),
    "text beside": Hostile(
        content(lambda r: {**r, "note": ConfigRecord({"a": ESCAPE, "b": b"\0"})}), HARMLESS
    ),
    "two records of metrics": Hostile(
        content(doubled(MetricRecord)), DROPPED, "2 MetricRecords instead of one"
    ),
}
MESSAGES = {
    "empty": Hostile(content(lambda _: {}), DROPPED, "0 MetricRecords instead of one"),
    "no arrays": Hostile(content(only(MetricRecord)), DROPPED, "0 ArrayRecords instead of one"),
    "no metrics": Hostile(content(only(ArrayRecord)), DROPPED, "0 MetricRecords instead of one"),
    "two models": Hostile(content(doubled(ArrayRecord)), DROPPED, "2 ArrayRecords instead of one"),
    "only settings": Hostile(
        content(lambda _: {"c": ConfigRecord({"a": 1})}), DROPPED, "0 MetricRecords"
    ),
    "an error": Hostile(error(3, "out of memory"), DROPPED, "error 3: out of memory"),
    "an error without a word": Hostile(error(3, ""), DROPPED, "error 3: no reason given"),
    "an error with escapes": Hostile(error(3, f"x {ESCAPE}"), DROPPED, "error 3: "),
    "an endless error": Hostile(error(3, "no " * 10**6), DROPPED, "error 3: no no"),
    "lost": Hostile(lost, DROPPED, "no reply"),
    "stale": Hostile(
        labelled(reply_to_message_id="earlier"), DROPPED, "answers another message than"
    ),
    "of another message type": Hostile(
        labelled(message_type="query"), DROPPED, "it is of the kind 'query'"
    ),
    "of another group": Hostile(labelled(group_id=ESCAPE), DROPPED, "it is of the kind"),
    "of another run": Hostile(labelled(run_id=12345), DROPPED, "it belongs to run 12345"),
    "in another's name": Hostile(
        labelled(src_node_id=lambda m: m.src_node_id + 999), DROPPED, "it was not asked"
    ),
    "in the server's name": Hostile(
        labelled(src_node_id=lambda m: m.dst_node_id), DROPPED, "it was not asked"
    ),
    "twice": Hostile(
        beside(lambda reply, _: [reply]), IGNORED, "a second reply was ignored, its first counts"
    ),
    "a good one, then NaN": Hostile(
        beside(entry(np.nan)), IGNORED, "a second reply was ignored, its first counts"
    ),
    "a good one, then a stale one": Hostile(
        beside(labelled(reply_to_message_id="earlier")),
        IGNORED,
        "a message was ignored: it answers another message",
    ),
    "a good one, and of a node not asked": Hostile(
        beside(labelled(src_node_id=lambda m: m.src_node_id + 999)),
        IGNORED,
        "a message was ignored: it was not asked",
    ),
    "a flood": Hostile(flood, IGNORED, "and 100 more"),
    "NaN, then a good one": Hostile(
        lambda reply, asked: [*entry(np.nan)(copy_of(reply, asked), asked), reply],
        DROPPED,
        "a second reply was ignored, its first was dropped",
    ),
}
STATISTICS = {
    "negative variance": Hostile(
        buffer("running_var", -1.0), DROPPED, "running_var holds -1, a variance"
    ),
    "absurd mean": Hostile(
        buffer("running_mean", 1e30), DROPPED, r"running_mean holds 1e\+30, a mean"
    ),
    "NaN variance": Hostile(buffer("running_var", np.nan), DROPPED, "holds NaN or infinite"),
    "count far below 0": Hostile(
        buffer("num_batches_tracked", -(2**62)), DROPPED, "a count lies in"
    ),
    "count below 0": Hostile(buffer("num_batches_tracked", -1), DROPPED, "a count lies in"),
    "count far above": Hostile(buffer("num_batches_tracked", 2**62), DROPPED, "a count lies in"),
    "variance 90": Hostile(
        buffer("running_var", 90.0), CLIPPED, "clipped: its statistics of length"
    ),
    "count 1000": Hostile(
        buffer("num_batches_tracked", 1000), CLIPPED, "clipped: its counts of length"
    ),
}
UPDATES = {
    "update times 5": Hostile(longer(5.0), BOUNDED),
    "update times 90": Hostile(longer(90.0), CLIPPED, "clipped: its up"),
    "update times 300": Hostile(longer(300.0), CLIPPED, "clipped: its up"),
    "update reversed, times 90": Hostile(longer(-90.0), CLIPPED, "clipped: its up"),
    "update times 90, weight times 1000": Hostile(
        longer(90.0, 1e3), CLIPPED, "its weight .* counts as .*; its up"
    ),
    "several at once": Hostile(
        chain(metric(weight=-1, train_loss=np.nan), longer(1e6), entry(np.inf)),
        DROPPED,
        "num-examples is -1",
    ),
}
HOSTILE: dict[str, Hostile] = {**ARRAYS, **WEIGHTS, **METRICS, **MESSAGES, **STATISTICS, **UPDATES}
