"""Unpacking zip and tar files without trusting them.

An archive can be made to do harm: by names that leave the folder, by links, by sizes that fill the
disk. So the whole list of contents is checked before anything is written, only the members that we
ask for are extracted, and each one gets a name of our own.
"""

from __future__ import annotations

import errno
import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import IO, NamedTuple, cast

from ..errors import InputError
from ..support.files import write_then_rename
from ..support.intake import DAMAGE, Pieces, opened, zip_archive

MOST = 2**33
"""The most bytes that an archive may unpack to: more than any data set here."""
MEMBERS = 10_000
"""The most files of an archive: more than any data set here."""
BLOCK = 2**18
"""Bytes read at a time."""
GZIP = b"\x1f\x8b"
"""What a gzip file begins with."""

_DAMAGE = (*DAMAGE, tarfile.TarError, OverflowError, ValueError)
_NOT_THE_DISK = (None, errno.EINVAL)
"""Error numbers that stand for damage: gzip gives none, and an absurd seek is invalid."""

Names = Sequence[tuple[str, str]]
"""Pairs of a name in an archive and a path below a folder."""


class Member(NamedTuple):
    """A file in an archive."""

    place: int
    """Where it begins in the archive."""
    size: int
    """Its size in bytes, unpacked."""
    plain: bool
    """Whether it is a regular file: no folder, link or device."""
    open: Callable[[], IO[bytes] | None]
    """Opens it for reading."""


def unpack(archive: Path, members: Names, folder: Path) -> list[Path]:
    """Extract some members of a zip or tar file into a folder.

    Args:
        archive: The zip file, or the tar file, which may be packed by gzip.
        members: Pairs of a name in the archive and a path below the folder.
        folder: Where the files go.

    Returns:
        The paths of the files, in the order of `members`.

    Raises:
        InputError: The archive is damaged, dangerous, or lacks a member.
        OSError: The disk fails.
    """
    try:
        with opened(archive) as file, _contents(archive, file) as found:
            wanted = {}
            for name, path in members:
                wanted[folder / path] = _wanted(archive, name, found)
            _extract_all(wanted)
    except (OSError, *_DAMAGE) as error:
        if isinstance(error, InputError):
            raise
        if isinstance(error, OSError) and error.errno not in _NOT_THE_DISK:
            raise
        raise InputError(
            f"{archive}: cannot be unpacked, corrupt or cut short ({error}): download it again"
        ) from None
    return list(wanted)


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file that gets its name only when it is complete.

    `fill` is given an open file and writes the content. The folder is made if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    write_then_rename(temporary, path, fill)


def _wanted(archive: Path, name: str, found: Mapping[str, Member]) -> Member:
    """The member of that name, which must be a regular file."""
    if name not in found:
        raise InputError(
            f"{archive}: has no member {name!r}, it is not the archive expected: download it again"
        )
    if not found[name].plain:
        raise InputError(
            f"{archive}: member {name!r} leaves the folder, it is not a regular file: do not use it"
        )
    return found[name]


def _extract_all(wanted: Mapping[Path, Member]) -> None:
    """Extract members in the order of the archive: a tar.gz is then read once, from end to end."""
    in_order = sorted(wanted.items(), key=lambda item: item[1].place)
    for path, member in in_order:
        write(path, partial(_extract, member))


def _extract(member: Member, out: IO[bytes]) -> None:
    """Copy a member to an open file. EOFError if it has fewer bytes than the archive says."""
    left = member.size
    with member.open() or io.BytesIO() as source:
        while left > 0:
            block = source.read(min(BLOCK, left))
            if not block:
                break
            out.write(block)
            left -= len(block)
    if left:
        raise EOFError(f"{left} bytes are missing")


# ---- the contents of an archive ----


@contextmanager
def _contents(archive: Path, file: IO[bytes]) -> Iterator[dict[str, Member]]:
    """Open an archive and give its members by name. Its first bytes tell its format."""
    start = file.read(512)
    file.seek(0)
    is_gzip = start.startswith(GZIP)
    is_tar = start[257:262] == b"ustar"
    if start.startswith(b"PK"):
        with zip_archive(file) as packed:
            yield _safe(archive, _zipped(packed))
    elif is_gzip or is_tar:
        stream = gzip.GzipFile(fileobj=file) if is_gzip else file
        pieces = cast(IO[bytes], Pieces(stream))
        with tarfile.open(fileobj=pieces, mode="r:") as taped:
            yield _safe(archive, _taped(taped, stream))
    else:
        raise InputError(f"{archive}: is neither a zip nor a tar file: download it again")


def _safe(archive: Path, members: Iterator[tuple[str, Member]]) -> dict[str, Member]:
    """All members of an archive by name.

    Raises InputError if one of them points outside the folder, or if there are too many of them,
    or if they are too large. Then the whole archive is refused: somebody made it with bad intent.
    """
    found: dict[str, Member] = {}
    size = 0
    for name, member in members:
        path = PureWindowsPath(name)  # it knows both slashes, and drives
        if path.anchor or ".." in path.parts:
            raise InputError(
                f"{archive}: member {name!r} leaves the folder: do not use this archive"
            )
        size += member.size
        if size > MOST:
            raise InputError(
                f"{archive}: unpacks to more than {MOST} bytes: do not use this archive"
            )
        found[name] = member
        if len(found) > MEMBERS:
            raise InputError(f"{archive}: has more than {MEMBERS} members: do not use this archive")
    return found


def _zipped(packed: zipfile.ZipFile) -> Iterator[tuple[str, Member]]:
    """The members of a zip file, with their names."""
    for info in packed.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where the zip file does not tell
        plain = not info.is_dir() and kind in (0, stat.S_IFREG)
        read = partial(packed.open, info)
        member = Member(info.header_offset, info.file_size, plain, read)
        yield info.filename, member


def _taped(
    taped: tarfile.TarFile,
    stream: IO[bytes] | gzip.GzipFile,
) -> Iterator[tuple[str, Member]]:
    """The members of a tar file, with their names.

    Then the rest of the stream is read to its end, because gzip keeps its checksum there.
    """
    for info in taped:
        read = partial(taped.extractfile, info)
        member = Member(info.offset, info.size, info.isreg(), read)
        yield info.name, member
    while stream.read(BLOCK):
        if stream.tell() > MOST:
            raise EOFError(f"more than {MOST} bytes")
