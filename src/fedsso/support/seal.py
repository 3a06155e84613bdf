"""Files that notice damage: each carries the SHA-256 of its own bytes.

A sealed file holds, in a place that its format leaves free (a comment, a metadata field), the mark
`fedsso-sha256:` and 64 hexadecimal digits: the SHA-256 of the whole file with zeros in the place of
the digits. So every bit counts, and the file stays what it is: TOML, an npz archive, a safetensors
file that other programs read.

A seal finds damage. It is no signature: who can change a file can seal it again.
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
"""What a file holds in the place of its seal before it is sealed."""
_SEALED = re.compile(MARK.encode() + rb"([0-9a-f]{64})")


def seal(data: bytes) -> bytearray:
    """The file with its digest in the place that holds `BLANK`."""
    if data.count(MARK.encode()) != 1:
        raise InputError(f"a name or label may not hold the text {MARK!r}; choose another one")
    start = data.index(BLANK.encode()) + len(MARK)
    sealed = bytearray(data)
    sealed[start : start + DIGITS] = _digest(data, start)
    return sealed


def check(data: bytes) -> bool | None:
    """Whether a file is as it was sealed; None if it has no seal."""
    found = _SEALED.search(data)
    if found is None:
        return None
    return found[1] == _digest(data, found.start(1))


def sealed_toml(table: Mapping[str, object]) -> bytes:
    """A TOML file with its seal, a comment in the last line."""
    return bytes(seal(f"{to_toml(table)}\n# {BLANK}\n".encode()))


def read_sealed_toml(path: Path) -> dict[str, object]:
    """Read a TOML file that fedsso wrote; refuses one that was changed since. Earlier versions
    wrote no seal."""
    data = read_bytes(path, "settings")
    if check(data) is False:
        raise Damaged(
            f"{path} is not as fedsso wrote it: its checksum is not that of its content; restore "
            f"it from a copy"
        )
    return parse_toml(decoded(data, path), path)


def _digest(data: bytes, start: int) -> bytes:
    """The digest of a file with zeros in the place of its digits."""
    view = memoryview(data)
    whole = sha256(view[:start])
    whole.update(b"0" * DIGITS)
    whole.update(view[start + DIGITS :])
    return whole.hexdigest().encode()
