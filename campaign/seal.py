"""The checksum that a file of the library carries, made anew: what a careful forger would do.

A change that a checksum tells of shows nothing of the checks behind it. So some of the damage is
sealed again.
"""

from __future__ import annotations

import hashlib
import re

SEAL = re.compile(rb"fedsso-sha256:([0-9a-f]{64})")
BLANKS = (b"0" * 64, b"\0" * 64)  # what stands in the digest's place while it is computed


def sealed_again(original: bytes, changed: bytes) -> bytes | None:
    """The changed file with a right checksum; None where there is none in one of the two."""
    blank = next((blank for blank in BLANKS if _digest(original, blank) == _held(original)), None)
    if blank is None or _held(changed) is None:
        return None
    digest = _digest(changed, blank)
    return SEAL.sub(b"fedsso-sha256:" + digest, changed, count=1)


def _held(data: bytes) -> bytes | None:
    found = SEAL.search(data)
    return found[1] if found else None


def _digest(data: bytes, blank: bytes) -> bytes:
    found = SEAL.search(data)
    if found is None:
        return b""
    start, end = found.span(1)
    return hashlib.sha256(data[:start] + blank + data[end:]).hexdigest().encode()
