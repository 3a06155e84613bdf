"""Damage that keeps the form of a file of tensors, and headers that lie."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .mutations import Change, deflate_bomb

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1, "F16": 2, "I16": 2}
NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "I8": "i1",
    "BOOL": "?",
}
Header = dict[str, Any]


# ---- safetensors ----


def split(data: bytes) -> tuple[Header, bytes]:
    """The header and the payload of a safetensors file."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Header, payload: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + payload


def _names(header: Header) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def _in_header(change: Callable[[Header, str, random.Random], None]) -> Change:
    """A change of what the header tells of one tensor."""

    def changed(data: bytes, draw: random.Random) -> bytes:
        header, payload = split(data)
        change(header, draw.choice(_names(header)), draw)
        return joined(header, payload)

    return changed


def _lying_shape(header: Header, name: str, draw: random.Random) -> None:
    header[name]["shape"] = draw.choice(
        ([2**40], [3], [], [0], [2**63 - 1, 2], [-1], ["x"], [1.5], None)
    )


def _other_shape(header: Header, name: str, draw: random.Random) -> None:
    shape = header[name]["shape"]
    header[name]["shape"] = draw.choice(([1, *shape], [*shape, 1], shape[::-1]))


def _lying_type(header: Header, name: str, draw: random.Random) -> None:
    own = header[name]["dtype"]
    alike = [other for other, size in SIZES.items() if size == SIZES.get(own) and other != own]
    header[name]["dtype"] = draw.choice([*alike, "F128", 5])


def _lying_place(header: Header, name: str, draw: random.Random) -> None:
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = draw.choice(
        ([start + 4, end + 4], [end, start], [0, 2**62], [start], [-8, end], None)
    )


def _renamed(header: Header, name: str, _draw: random.Random) -> None:
    header["other"] = header.pop(name)


def _exchanged(header: Header, name: str, draw: random.Random) -> None:
    other = draw.choice(_names(header))
    header[name], header[other] = header[other], header[name]


def _metadata(header: Header, _name: str, draw: random.Random) -> None:
    header["__metadata__"] = draw.choice(
        ({}, {"a": "b"}, {"a": 1}, 5, {"format": "x" * 10_000}, None)
    )


def _rebuilt(change: Callable[[dict[str, Any], str, random.Random], None]) -> Change:
    """A change of the tensors themselves, in a file that is whole."""

    def changed(data: bytes, draw: random.Random) -> bytes:
        header, payload = split(data)
        arrays = {name: _array(header[name], payload) for name in _names(header)}
        change(arrays, draw.choice(list(arrays)), draw)
        return _written(arrays, header.get("__metadata__"))

    return changed


def _array(told: Mapping[str, Any], payload: bytes) -> Any:
    start, end = told["data_offsets"]
    return np.frombuffer(payload[start:end], NUMPY[told["dtype"]]).reshape(told["shape"])


def _written(arrays: Mapping[str, Any], metadata: Any) -> bytes:
    kinds = {np.dtype(numpy): name for name, numpy in NUMPY.items()}
    header: Header = {} if metadata is None else {"__metadata__": metadata}
    payload = b""
    for name, array in arrays.items():
        content = array.tobytes()
        place = [len(payload), len(payload) + len(content)]
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": place,
        }
        payload += content
    return joined(header, payload)


def _converted(arrays: dict[str, Any], name: str, draw: random.Random) -> None:
    arrays[name] = arrays[name].astype(draw.choice(("f8", "f4", "i8", "u1", "?")))


def _grown(arrays: dict[str, Any], name: str, draw: random.Random) -> None:
    flat = arrays[name].ravel()
    arrays[name] = draw.choice(
        (np.append(flat, flat[:1]), flat[:-1], np.tile(arrays[name], (2,) * arrays[name].ndim))
    )


def _filled(arrays: dict[str, Any], name: str, draw: random.Random) -> None:
    array = arrays[name]
    values = {"f": (np.nan, np.inf, 1e30, -1.0, 0.0), "i": (-1, 0, 1, 2**31 - 1, 2**62)}.get(
        array.dtype.kind, (0, 1, 255)
    )
    with np.errstate(all="ignore"):
        arrays[name] = np.full_like(array, np.array(draw.choice(values)).astype(array.dtype))


def _one_changed(arrays: dict[str, Any], name: str, draw: random.Random) -> None:
    array = arrays[name].copy()
    if array.size:
        array.reshape(-1)[draw.randrange(array.size)] = draw.choice((0, 1, 7))
    arrays[name] = array


def _gone(arrays: dict[str, Any], name: str, _draw: random.Random) -> None:
    del arrays[name]


def _added(arrays: dict[str, Any], _name: str, _draw: random.Random) -> None:
    arrays["extra"] = np.zeros(3, "f4")


def _length(data: bytes, draw: random.Random) -> bytes:
    length = draw.choice((0, 1, 2**63, 2**64 - 1, 10**8 + 1, len(data) - 8, len(data)))
    return struct.pack("<Q", length) + data[8:]


def _text_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


SAFETENSORS: Mapping[str, Change] = {
    **{f"shape lies {i}": _in_header(_lying_shape) for i in (1, 2)},
    **{f"shape turned {i}": _in_header(_other_shape) for i in (1, 2)},
    **{f"type lies {i}": _in_header(_lying_type) for i in (1, 2)},
    **{f"place lies {i}": _in_header(_lying_place) for i in (1, 2)},
    "tensor renamed": _in_header(_renamed),
    "tensors exchanged": _in_header(_exchanged),
    "metadata": _in_header(_metadata),
    **{f"other type {i}": _rebuilt(_converted) for i in (1, 2, 3)},
    **{f"other size {i}": _rebuilt(_grown) for i in (1, 2, 3)},
    **{f"filled {i}": _rebuilt(_filled) for i in range(1, 7)},
    **{f"one number {i}": _rebuilt(_one_changed) for i in (1, 2)},
    **{f"tensor gone {i}": _rebuilt(_gone) for i in range(1, 5)},
    "tensor added": _rebuilt(_added),
    "length of the header": _length,
    "deep header": lambda _d, _r: _text_header(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "long number in the header": lambda _d, _r: _text_header(b'{"a":' + b"9" * 6000 + b"}"),
}


# ---- npz ----


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def _packed(members: Mapping[str, bytes], like: bytes) -> bytes:
    """A zip file of these members, with the comment of the one before."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
        with zipfile.ZipFile(io.BytesIO(like)) as before:
            file.comment = before.comment
    return out.getvalue()


def _in_members(change: Callable[[dict[str, bytes], str, random.Random], None]) -> Change:
    def changed(data: bytes, draw: random.Random) -> bytes:
        members = _members(data)
        change(members, draw.choice(list(members)), draw)
        return _packed(members, data)

    return changed


def _alone(change: Callable[[dict[str, bytes], str, random.Random], None]) -> Change:
    """The same change of an array that is a file of its own."""

    def changed(data: bytes, draw: random.Random) -> bytes:
        members = {"x.npy": data}
        change(members, "x.npy", draw)
        return members["x.npy"]

    return changed


def _npy(array: Any, pickled: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=pickled)
    return out.getvalue()


def _as_array(content: bytes) -> Any:
    return np.load(io.BytesIO(content))


def _member_type(members: dict[str, bytes], name: str, draw: random.Random) -> None:
    with np.errstate(all="ignore"):
        members[name] = _npy(
            _as_array(members[name]).astype(draw.choice(("f8", "f2", "i2", "u8", "?", "c8", "U3")))
        )


def _member_shape(members: dict[str, bytes], name: str, draw: random.Random) -> None:
    array = _as_array(members[name])
    members[name] = _npy(
        draw.choice((array[:-1], array.ravel(), array[None], array.T, array[..., :1], array[:0]))
    )


def _member_filled(members: dict[str, bytes], name: str, draw: random.Random) -> None:
    array = _as_array(members[name])
    value = draw.choice((np.nan, np.inf, -1.0) if array.dtype.kind == "f" else (0, 1, 255))
    with np.errstate(all="ignore"):
        members[name] = _npy(np.full_like(array, np.array(value).astype(array.dtype)))


def _member_lies(members: dict[str, bytes], name: str, draw: random.Random) -> None:
    """A header that tells of another shape or type, in the same number of bytes."""
    content = members[name]
    size = struct.unpack("<H", content[8:10])[0]
    told = draw.choice(
        (
            "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }",
            "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }",
            "{'descr': '<f4', 'fortran_order': True, 'shape': (9223372036854775807, 2), }",
            "__import__('os').getpid()",
            "{'descr': '<f4', 'fortran_order': False}",
            "(" * 90,
            "{'descr': '<f4', 'fortran_order': False, 'shape': (60,), ",
        )
    )
    members[name] = (
        content[:10] + told.encode().ljust(size - 1)[: size - 1] + b"\n" + content[10 + size :]
    )


def _member_gone(members: dict[str, bytes], name: str, _draw: random.Random) -> None:
    del members[name]


def _member_renamed(members: dict[str, bytes], name: str, draw: random.Random) -> None:
    members[draw.choice(("other.npy", "../x.npy", "/x.npy", name.removesuffix(".npy")))] = (
        members.pop(name)
    )


def _member_pickled(members: dict[str, bytes], name: str, _draw: random.Random) -> None:
    members[name] = _npy(np.array([Hostile()], dtype=object), pickled=True)


def _meta(members: dict[str, bytes], _name: str, draw: random.Random) -> None:
    """What a part tells of its trials."""
    if "meta.npy" not in members:
        return _member_type(members, "x.npy", draw)
    told = json.loads(_as_array(members["meta.npy"]).tobytes())
    one = draw.choice(told)
    if draw.random() < 0.2:
        del one[draw.choice(list(one))]
    else:
        one[draw.choice(list(one))] = draw.choice(
            (
                None,
                -1,
                0,
                10**12,
                10**30,
                1.5,
                float("nan"),
                "x",
                [],
                {},
                True,
                "\0",
                "x" * 100_000,
                [[[]]],
            )
        )
    members["meta.npy"] = _npy(np.frombuffer(json.dumps(told).encode(), np.uint8))
    return None


def _meta_text(text: bytes) -> Callable[[dict[str, bytes], str, random.Random], None]:
    def change(members: dict[str, bytes], name: str, _draw: random.Random) -> None:
        place = "meta.npy" if "meta.npy" in members else name
        members[place] = _npy(np.frombuffer(text, np.uint8))

    return change


def zip_bomb(data: bytes, draw: random.Random) -> bytes:
    """A member that unpacks to gigabytes, in a directory that says so."""
    name = draw.choice(list(_members(data)))
    stream, checksum = deflate_bomb()
    body = stream
    told = struct.pack("<HHHHHIII", 20, 0, 8, 0, 33, checksum, len(body), 0xFFFFFFFF)
    extra = struct.pack("<HHQQ", 1, 16, 5 << 30, len(body))
    local = (
        b"PK\3\4" + told + struct.pack("<HH", len(name), len(extra)) + name.encode() + extra + body
    )
    place = struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, 0)
    central = b"PK\1\2" + struct.pack("<H", 45) + told + place + name.encode() + extra
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + end


NPZ: Mapping[str, Change] = {
    **{f"array of another type {i}": _in_members(_member_type) for i in (1, 2)},
    **{f"array of another shape {i}": _in_members(_member_shape) for i in range(1, 5)},
    **{f"array filled {i}": _in_members(_member_filled) for i in (1, 2)},
    **{f"array lies {i}": _in_members(_member_lies) for i in range(1, 5)},
    **{f"array gone {i}": _in_members(_member_gone) for i in (1, 2)},
    "array renamed": _in_members(_member_renamed),
    "array of objects": _in_members(_member_pickled),
    **{f"meta {i}": _in_members(_meta) for i in range(1, 9)},
    "meta nested deeply": _in_members(_meta_text(b"[" * 100_000 + b"]" * 100_000)),
    "meta with a long number": _in_members(_meta_text(b'[{"seed":' + b"9" * 6000 + b"}]")),
    "meta is no list": _in_members(_meta_text(b"5")),
    "bomb": zip_bomb,
}
NPY: Mapping[str, Change] = {
    name: _alone(change)
    for kind, change in (
        ("another type", _member_type),
        ("another shape", _member_shape),
        ("filled", _member_filled),
        ("lies", _member_lies),
        ("objects", _member_pickled),
    )
    for name in (f"{kind} {i}" for i in range(1, 5))
}


# ---- pickles ----

MARK = "executed"


class Hostile:
    """Runs a command when it is unpickled by a careless reader."""

    def __reduce__(self) -> Any:
        return os.mkdir, (MARK,)


def _billions() -> bytes:
    """A small pickle of a list that has ten to the ninth elements, one object each."""
    one: list[Any] = []
    for _ in range(9):
        one = [one] * 10
    return pickle.dumps({b"data": one, b"labels": one}, 2)


PICKLE: Mapping[str, Change] = {
    "a command": lambda _d, _r: pickle.dumps(Hostile(), 2),
    "a command inside": lambda _d, _r: pickle.dumps({b"data": Hostile(), b"labels": [1]}, 2),
    "a list of lists": lambda _d, _r: _billions(),
    "other keys": lambda _d, _r: pickle.dumps({b"x": 1}, 2),
    "other types": lambda _d, _r: pickle.dumps({b"data": "text", b"labels": {}}, 2),
    "other shapes": lambda _d, _r: pickle.dumps(
        {b"data": np.zeros((2, 7), "u1"), b"labels": [1] * 9}, 2
    ),
    "a long string": lambda _d, _r: b"\x80\x02X\xff\xff\xff\x7f" + b"x" * 100,
    "much memory": lambda _d, _r: b"\x80\x02r\xff\xff\xff\x7f.",
}
