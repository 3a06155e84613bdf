"""Damage: what happens to files by accident, and what somebody does to them on purpose.

A mutation of bytes gets the content and a source of random numbers, and gives the new content; one
of a place replaces the file by something that is none.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

Change = Callable[[bytes, random.Random], bytes]
Place = Callable[[Path], None]
BOMB = 5 << 30  # bytes that a small packed file unpacks to
BLOCK = 1 << 24


# ---- any bytes ----


def _flip(data: bytes, draw: random.Random, count: int = 1) -> bytes:
    changed = bytearray(data)
    for _ in range(count):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def _span(data: bytes, draw: random.Random) -> tuple[int, int]:
    start = draw.randrange(len(data))
    return start, min(len(data), start + draw.randint(1, max(1, len(data) // 4)))


def _without_block(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw)
    return data[:start] + data[end:]


def _block_twice(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw)
    return data[:end] + data[start:]


def _block_of_zeros(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw)
    return data[:start] + bytes(end - start) + data[end:]


def _random_block(data: bytes, draw: random.Random) -> bytes:
    start, end = _span(data, draw)
    return data[:start] + draw.randbytes(end - start) + data[end:]


def _inserted(what: bytes) -> Change:
    def change(data: bytes, draw: random.Random) -> bytes:
        place = draw.randrange(len(data) + 1)
        return data[:place] + what + data[place:]

    return change


BYTES: Mapping[str, Change] = {
    "one bit": _flip,
    "eight bits": lambda d, r: _flip(d, r, 8),
    "a byte": lambda d, r: _random_at(d, r, 1),
    "cut": _cut,
    "last byte gone": lambda d, _: d[:-1],
    "first byte gone": lambda d, _: d[1:],
    "eight bytes left": lambda d, _: d[:8],
    "empty": lambda _d, _r: b"",
    "block gone": _without_block,
    "block twice": _block_twice,
    "block of zeros": _block_of_zeros,
    "block of noise": _random_block,
    "all noise": lambda d, r: r.randbytes(len(d)),
    "all zeros": lambda d, _: bytes(len(d)),
    "twice": lambda d, _: d + d,
    "noise at the end": lambda d, r: d + r.randbytes(64),
    "a NUL": _inserted(b"\0"),
    "no UTF-8": _inserted(b"\xff\xfe\xc3\x28"),
}


def _random_at(data: bytes, draw: random.Random, size: int) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + draw.randbytes(size) + data[place + size :]


# ---- text ----

NUMBER = re.compile(rb"-?\d+\.?\d*(?:e[+-]?\d+)?")
HUGE = b"9" * 5000
NUMBERS = (
    *(
        b"nan",
        b"inf",
        b"-inf",
        b"1e400",
        b"-1e308",
        b"1e-320",
        b"0",
        b"-1",
        b"-0.0",
        b"0x10",
        b"1_000",
        b"\xd9\xa3",
    ),
    *(
        b"9223372036854775807",
        b"9223372036854775808",
        b"-9223372036854775809",
        b"1" + b"0" * 30,
        b"1" + b"0" * 400,
        HUGE,
        b"",
        b"one",
    ),
    *(b'"2"', b"[]", b"[1, 2]", b"true", b"{}", b"1979-05-27", b"1e9", b"1000000000000"),
)


def _number(data: bytes, draw: random.Random) -> bytes:
    """A number becomes something else."""
    found = list(NUMBER.finditer(data))
    if not found:
        return data + draw.choice(NUMBERS)
    one = draw.choice(found)
    return data[: one.start()] + draw.choice(NUMBERS) + data[one.end() :]


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True) or [b""]


def _line_gone(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def _line_twice(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    return b"".join(lines)


def _head(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    return b"".join(lines[: draw.randrange(len(lines))])


def _lines_swapped(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    draw.shuffle(lines)
    return b"".join(lines)


def _nested(data: bytes, draw: random.Random) -> bytes:
    deep = draw.choice((500, 2000, 100_000))
    opened, closed = draw.choice(((b"[", b"]"), (b"{a=", b"}"), (b'{"a":', b"}"), (b"(", b")")))
    return _inserted(b"\nx = " + opened * deep + b"1" + closed * deep + b"\n")(data, draw)


TEXT: Mapping[str, Change] = {
    "a number": _number,
    "another number": _number,
    "a third number": _number,
    "five thousand digits": lambda d, r: NUMBER.sub(
        lambda m: HUGE if r.random() < 0.2 else m[0], d
    ),
    "line gone": _line_gone,
    "line twice": _line_twice,
    **{f"first lines alone {i}": _head for i in (1, 2, 3)},
    "lines in disorder": _lines_swapped,
    "deep brackets": _nested,
    "a line of a megabyte": lambda d, r: _inserted(b"7" * (1 << 20))(d, r),
    "a field of 200 kB": lambda d, r: _inserted(b'"' + b"x" * 200_000 + b'"')(d, r),
    "an open quote": _inserted(b'"'),
    "byte-order mark": lambda d, _: b"\xef\xbb\xbf" + d,
    "UTF-16": lambda d, _: d.decode("latin-1").encode("utf-16"),
    "CRLF": lambda d, _: d.replace(b"\n", b"\r\n"),
}


JSON: Mapping[str, Change] = {f"number {i}": _number for i in range(4, 16)}

# ---- TOML ----

VALUES = (
    *NUMBERS,
    b'"text"',
    b'""',
    b'"\\u0000"',
    b'"../x"',
    b"[[]]",
    b"{a = 1}",
    b"[nan]",
    b"[1, nan]",
    b'"own x"',
)
PAIR = re.compile(rb"^([\w-]+) = (.*)$", re.MULTILINE)
TABLE = re.compile(rb"^\[([\w.-]+)\]$", re.MULTILINE)


def _field(data: bytes, draw: random.Random) -> bytes:
    """A field gets another type or value."""
    found = list(PAIR.finditer(data))
    if not found:
        return b"x = " + draw.choice(VALUES) + b"\n" + data
    one = draw.choice(found)
    return data[: one.start(2)] + draw.choice(VALUES) + data[one.end() :]


def _renamed(data: bytes, draw: random.Random) -> bytes:
    pattern = draw.choice((PAIR, TABLE))
    found = list(pattern.finditer(data))
    if not found:
        return b"x = 1\n" + data
    one = draw.choice(found)
    return data[: one.start(1)] + b"other" + data[one.end(1) :]


def _added(data: bytes, draw: random.Random) -> bytes:
    one = draw.choice(
        (
            b"x = 1\n",
            b"out = 'a\\u0000b'\n",
            b"data = 5\n",
            b"record = 3\n",
            b"fedavg = 'x'\n",
            b"[data.x]\n",
        )
    )
    return one + data if draw.random() < 0.5 else data + b"\n" + one


TOML: Mapping[str, Change] = {
    **{f"field {i}": _field for i in range(1, 13)},
    "key renamed": _renamed,
    "table renamed": _renamed,
    "key added": _added,
}


# ---- comma-separated ----

CELLS = (
    *NUMBERS,
    b"NaN",
    b"?",
    b"NA",
    b"Miller Jane",
    b"=1+1",
    b"9007199254740993",
    b"1e39",
    b"3.5e38",
)


def _cell(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    row = draw.randrange(len(lines))
    cells = lines[row].rstrip(b"\n").split(b",")
    cells[draw.randrange(len(cells))] = draw.choice(CELLS)
    lines[row] = b",".join(cells) + b"\n"
    return b"".join(lines)


def _cell_gone(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    row = draw.randrange(len(lines))
    lines[row] = b",".join(lines[row].rstrip(b"\n").split(b",")[1:]) + b"\n"
    return b"".join(lines)


def _column_gone(data: bytes, draw: random.Random) -> bytes:
    rows = [line.rstrip(b"\n").split(b",") for line in _lines(data)]
    place = draw.randrange(max(1, len(rows[0])))
    return b"".join(b",".join(cells[:place] + cells[place + 1 :]) + b"\n" for cells in rows)


CSV: Mapping[str, Change] = {
    **{f"cell {i}": _cell for i in range(1, 11)},
    "cell gone": _cell_gone,
    "column gone": _column_gone,
    "header gone": lambda d, _: b"".join(_lines(d)[1:]),
}


# ---- svmlight ----

TOKENS = (
    *(
        b"268435456:1",
        b"536870912:1",
        b"4294967296:1",
        b"0:1",
        b"-1:1",
        b"3:nan",
        b"3:inf",
        b"3:1e39",
        b"3:",
        b":3",
        b"3",
    ),
    *(b"qid:1", b"3:1 3:1", HUGE + b":1", b"3:" + HUGE, b"#", b"x"),
)


def _token(data: bytes, draw: random.Random) -> bytes:
    lines = _lines(data)
    row = draw.randrange(len(lines))
    tokens = lines[row].split()
    tokens[draw.randrange(len(tokens))] = draw.choice(TOKENS)
    lines[row] = b" ".join(tokens) + b"\n"
    return b"".join(lines)


SVM: Mapping[str, Change] = {f"token {i}": _token for i in range(1, 11)} | {
    "column 2^28": lambda d, _: d + b"1 268435456:1\n",
}


# ---- packed files, idx ----


def gzip_bomb(_data: bytes, _draw: random.Random) -> bytes:
    """Members that follow each other: five gigabytes of newlines in five megabytes."""
    return gzip.compress(b"\n" * BLOCK, 9) * (BOMB // BLOCK)


def bzip2_bomb(_data: bytes, _draw: random.Random) -> bytes:
    import bz2

    return bz2.compress(b"\n" * BLOCK, 9) * (BOMB // BLOCK)


def deflate_bomb() -> tuple[bytes, int]:
    """A raw deflate stream of five gigabytes of zeros, and its checksum."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packer.compress(bytes(BLOCK))
    packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 0
    for _ in range(BOMB // BLOCK):
        checksum = zlib.crc32(bytes(BLOCK), checksum)
    return block * (BOMB // BLOCK) + packer.flush(zlib.Z_FINISH), checksum


def _unpacked(change: Change) -> Change:
    """The same damage inside a gzip file that is whole."""

    def packed(data: bytes, draw: random.Random) -> bytes:
        return gzip.compress(change(gzip.decompress(data), draw))

    return packed


def _idx_header(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(0, 16)
    value = draw.choice((b"\0", b"\xff", b"\x7f", b"\x01"))
    return data[:place] + value + data[place + 1 :]


GZIP: Mapping[str, Change] = {
    "bomb": gzip_bomb,
    **{
        f"inside: {name}": _unpacked(BYTES[name])
        for name in ("one bit", "cut", "empty", "block of noise", "a NUL")
    },
    "length at the end": lambda d, _: d[:-4] + b"\xff\xff\xff\xff",
    "packed twice": lambda d, _: gzip.compress(d),
}
BZIP2: Mapping[str, Change] = {"bomb": bzip2_bomb}
IDX: Mapping[str, Change] = {f"header {i}": _idx_header for i in range(1, 9)} | {
    "four billion images": lambda d, _: d[:4] + b"\xff\xff\xff\xff" + d[8:],
    "many dimensions": lambda d, _: d[:3] + b"\xff" + d[4:],
}

# ---- no file at all ----


def _link(target: str) -> Place:
    return lambda path: os.symlink(target, path)


PLACES: Mapping[str, Place] = {
    "a FIFO": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda _path: None,
    "a dangling link": _link("nowhere"),
    "a link to itself": lambda path: os.symlink(path.name, path),
    "/dev/zero": _link("/dev/zero"),
    "/dev/null": _link("/dev/null"),
    "endless noise": _link("/dev/urandom"),
}
