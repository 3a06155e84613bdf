"""Seals: files that carry a checksum of themselves, so that damage is noticed.

A sealed file holds the mark `fedsso-sha256:` and 64 hexadecimal digits, in a place that its format
leaves free, such as a comment or a metadata field. The digits are the SHA-256 of the whole file
with zeros in the place of the digits. So every bit of the file counts, and it stays what it is: a
TOML file, an npz archive or a safetensors file that other programs can read.

A seal finds damage. It is not a signature: whoever can change a file can also seal it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from ..errors import InputError
from .files import to_toml
from .intake import Damaged, decoded, parse_toml, read_bytes

MARK = "fedsso-sha256:"
DIGITS = 64
BLANK = MARK + "0" * DIGITS
"""What stands in the place of the seal before a file is sealed."""
END = "# end of settings"
"""The last line of a sealed TOML file, whose seal is in the first: a file that was cut lacks it."""
_SEALED = re.compile(MARK.encode() + rb"([0-9a-f]{64})")


def seal(data: bytes) -> bytearray:
    """Seal a file: return its bytes with the checksum in the place that holds `BLANK`."""
    if data.count(MARK.encode()) != 1:
        raise InputError(f"a name or label may not hold the text {MARK!r}; choose another one")
    start = data.index(BLANK.encode()) + len(MARK)
    sealed = bytearray(data)
    sealed[start : start + DIGITS] = _digest(data, start)
    return sealed


def check(data: bytes) -> bool | None:
    """Whether a file is as it was when it was sealed. None if it has no seal.

    >>> check(bytes(seal(f"x = 1 # {BLANK}".encode())))
    True
    """
    found = _SEALED.search(data)
    if found is None:
        return False if MARK.encode() in data else None
    return found[1] == _digest(data, found.start(1))


def sealed_toml(table: Mapping[str, object]) -> bytes:
    """The bytes of a TOML file with a seal, a comment in the first line: a cut file keeps it."""
    text = f"# {BLANK}\n\n{to_toml(table)}\n{END}\n"
    return bytes(seal(text.encode()))


def is_cut(data: bytes) -> bool:
    """Whether a sealed TOML file has lost its end."""
    return data.startswith(f"# {MARK}".encode()) and END.encode() not in data


def read_sealed_toml(path: Path) -> dict[str, object]:
    """Read a TOML file that fedsso wrote. Raises Damaged if it was changed since then.

    A file without a seal is accepted, because earlier versions of fedsso wrote none.
    """
    data = read_bytes(path, "settings")
    if check(data) is False:
        raise Damaged(
            f"{path} is not as fedsso wrote it: its checksum does not match its content; restore "
            f"it from a copy"
        )
    return parse_toml(decoded(data, path), path)


def _digest(data: bytes, start: int) -> bytes:
    """The checksum of a file with zeros in the place of the digits, which begin at `start`."""
    view = memoryview(data)
    whole = sha256(view[:start])
    whole.update(b"0" * DIGITS)
    whole.update(view[start + DIGITS :])
    return whole.hexdigest().encode()
