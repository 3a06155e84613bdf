"""Downloads: resumed, verified, unpacked without trusting the archive, and put in place together or
not at all.

Everything happens in `.partial/NAME` below the data folder. What is there after a failure is what
the next call goes on from; a file of the wrong content is removed, since no resuming could ever
mend it.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PureWindowsPath
from typing import IO, NamedTuple, cast
from urllib import request
from urllib.error import HTTPError

from ..errors import InputError
from ..support.files import write_atomic, write_then_rename
from ..support.intake import DAMAGE, Pieces, opened, read_json, zip_archive

PARTIAL = ".partial"
PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt at a connection that broke
MOST = (
    2**33
)  # bytes of a download of unknown size, or of what an archive unpacks to: beyond any data set here
BLOCK = 2**18
MEMBERS = 10_000  # files of an archive: beyond any data set here

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Remote:
    """A file to download, and what becomes of it."""

    file: str  # where it ends up below the data folder; of an archive only the name
    urls: tuple[str, ...]  # tried in turn
    sha256: str = ""  # "" where no public source gives it: then the data set's reader decides
    size: int = 0  # bytes; 0 unknown
    members: tuple[
        tuple[str, str], ...
    ] = ()  # of an archive: (name in it, path below the data folder)

    def targets(self) -> list[str]:
        """The files it leaves below the data folder."""
        return [path for _, path in self.members] or [self.file]


class _Failure(Exception):
    """This address does not give the file."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _Cut(Exception):
    """The connection broke; another attempt may go on."""


def _silent(_label: str, _done: int, _total: int) -> None:
    pass


def fetch(
    name: str,
    remotes: Sequence[Remote],
    folder: Path,
    *,
    check: Callable[[Path], None],
    progress: Progress = _silent,
    mirror: str = "",
    timeout: float = 30,
) -> list[Path]:
    """Download a data set's files into a folder; they appear there together, once `check` has
    accepted them.

    check is given the staging folder, laid out like the data folder, and raises InputError for
    wrong content. progress is given a file, the bytes so far and the bytes in all (0: unknown), at
    most ten times a second. mirror is the URL of a folder with all files under their own names; the
    checksums still hold. timeout is the longest silence of a server, in seconds.
    """
    staging = folder / PARTIAL / name
    targets = [target for remote in remotes for target in remote.targets()]
    with _disk(folder):
        _nothing_in_the_way(folder, targets)
        with _alone(name, folder):
            for remote in (_mirrored(remote, mirror) for remote in remotes):
                if not _at_hand(remote, folder, staging):
                    _obtain(
                        remote,
                        staging,
                        progress,
                        timeout,
                        f"put {', '.join(targets)} into {folder} by hand",
                    )
            _accept(remotes, staging, check)
            for target in targets:
                _place(staging / target, folder / target)
            shutil.rmtree(staging)
    return [folder / target for target in targets]


def unpack(archive: Path, members: Sequence[tuple[str, str]], folder: Path) -> list[Path]:
    """Extract the named members of a zip or tar file, under our own names, once the whole archive
    is found safe."""
    with _disk(folder):
        return _unpack(archive, members, folder)


# ---- The call as a whole


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot write in {folder}: {reason}; free some space, or give another folder"
        ) from error


def _nothing_in_the_way(folder: Path, targets: Sequence[str]) -> None:
    for target in targets:
        path = folder / target
        files = [above for above in path.parents if above.exists() and not above.is_dir()]
        if files or path.is_dir():
            blocked = files[0] if files else path
            kind = "file where a folder" if files else "folder where a file"
            raise InputError(
                f"{blocked} is a {kind} is needed: move it away, or give another folder"
            )


@contextmanager
def _alone(name: str, folder: Path) -> Iterator[None]:
    """Hold a lock file, so that one process at a time downloads a data set; tidy up afterwards."""
    lock = folder / PARTIAL / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        if not _held(file, lock):
            raise InputError(
                f"another process is downloading {name} into {folder}: wait until it has finished"
            )
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()
            for below in sorted(lock.parent.rglob("*"), reverse=True):
                _remove_empty(below)
            _remove_empty(lock.parent)


def _remove_empty(folder: Path) -> None:
    """Leave nothing behind but what there is to resume."""
    with suppress(OSError):
        folder.rmdir()


def _held(file: IO[str], lock: Path) -> bool:
    """Whether the lock is ours now; a lock file that its holder has meanwhile removed does not
    count."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks
        return True


def _mirrored(remote: Remote, mirror: str) -> Remote:
    """The same file from a folder on another server, laid out like the data folder or all in one
    place."""
    places = dict.fromkeys((remote.file, Path(remote.file).name))
    return (
        replace(remote, urls=tuple(f"{mirror.rstrip('/')}/{place}" for place in places))
        if mirror
        else remote
    )


def _at_hand(remote: Remote, folder: Path, staging: Path) -> bool:
    """Whether the file is staged already, by an earlier call or now from a verified copy in place."""
    staged, placed = staging / remote.file, folder / remote.file
    if staged.exists():
        return remote.sha256 in ("", _sha256(staged))
    if (
        remote.members
        or not remote.sha256
        or not placed.exists()
        or _sha256(placed) != remote.sha256
    ):
        return False
    with opened(placed) as source:
        _write(staged, lambda file: shutil.copyfileobj(source, file))
    return True


def _accept(remotes: Sequence[Remote], staging: Path, check: Callable[[Path], None]) -> None:
    """Unpack the archives and check the whole; what is refused is removed."""
    try:
        for remote in remotes:
            if remote.members:
                _unpack(staging / remote.file, remote.members, staging)
        check(staging)
    except InputError as error:
        shutil.rmtree(staging)
        raise InputError(
            f"{error}; the download was removed: run the command again, or try a mirror"
        ) from error


def _place(staged: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(staged, target)


def _write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """A file that has its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_then_rename(path.with_name(f"{path.name}.new"), path, fill)


def _sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()


# ---- One file


def _obtain(
    remote: Remote, staging: Path, progress: Progress, timeout: float, by_hand: str
) -> None:
    """Download and verify one file from the first address that gives it, the one begun with first."""
    target = staging / remote.file
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    begun = _kept(part).url
    failures = []
    for url in sorted(remote.urls, key=lambda url: url != begun):
        try:
            _download(_Transfer(url, part, remote, progress, timeout))
            _verify(part, remote.sha256)
        except _Failure as failure:
            failures.append(f"{url}: {failure}")
        else:
            os.replace(part, target)
            progress(remote.file, target.stat().st_size, target.stat().st_size)
            return
    raise InputError(
        f"cannot download {remote.file}: {'; '.join(failures)}. Try another server with --mirror "
        f"URL, or {by_hand}"
    )


def _verify(part: Path, expected: str) -> None:
    found = _sha256(part) if expected else ""
    if found != expected:
        part.unlink()
        _note(part).unlink(missing_ok=True)
        raise _Failure(f"SHA-256 is {found}, expected {expected}, the download was removed")


class _Kept(NamedTuple):
    """What an earlier attempt left: so many bytes of that version of the file."""

    url: str = ""
    version: str = ""  # as the server marks it: ETag or Last-Modified
    total: int = 0  # 0 unknown
    done: int = 0


def _note(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _kept(part: Path) -> _Kept:
    """What there is to go on from; nothing where it is not certain what it is."""
    try:
        note = read_json(_note(part))
        kept = _Kept(
            str(note["url"]), str(note["version"]), int(note["total"]), part.stat().st_size
        )
    except (OSError, ValueError, KeyError, TypeError):
        return _Kept()
    return kept if kept.version else _Kept()


@dataclass(frozen=True)
class _Transfer:
    """One address, and the file that its bytes go to."""

    url: str
    part: Path
    remote: Remote
    progress: Progress
    timeout: float

    def most(self) -> int:
        """More bytes than this are refused."""
        return 4 * self.remote.size or MOST

    def kept(self) -> _Kept:
        kept = _kept(self.part)
        return kept if kept.url == self.url else _Kept()

    def remember(self, version: str, total: int) -> None:
        write_atomic(
            _note(self.part), json.dumps({"url": self.url, "version": version, "total": total})
        )


def _download(transfer: _Transfer) -> None:
    """All bytes of the file, in a few attempts, each going on where the last one broke off."""
    broken = ""
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        try:
            return _attempt(transfer)
        except _Cut as cut:
            broken = str(cut)
    raise _Failure(f"{broken}; run the command again to go on")


def _attempt(transfer: _Transfer) -> None:
    kept = transfer.kept()
    if kept.done and kept.done == kept.total:  # all there, stopped before it was verified
        return
    with (_rest(transfer, kept) if kept.done else None) or _whole(transfer) as response:
        start, total = _span(response)
        if total > transfer.most():
            raise _Failure(f"announces {total} bytes, at most {transfer.most()} are expected")
        with transfer.part.open("ab" if start else "wb") as file:
            if not start:  # the old bytes are gone already: the new note never vouches for them
                transfer.remember(_version(response), total)
            _copy(response, file, start, total, transfer)
            file.flush()
            os.fsync(file.fileno())


def _copy(
    response: HTTPResponse, file: IO[bytes], done: int, total: int, transfer: _Transfer
) -> None:
    """Move the bytes to the file as they come."""
    limit, told = total or transfer.most() + 1, 0.0
    while done < limit:
        block = _read(
            response,
            min(BLOCK, limit - done),
            transfer.timeout,
            f"after {done} of {total or '?'} bytes",
        )
        if not block:
            break
        file.write(block)
        done += len(block)
        if time.monotonic() - told >= 0.1:
            told = time.monotonic()
            transfer.progress(transfer.remote.file, done, total)
    if done < total:
        raise _Cut(f"ended after {done} of {total} bytes")
    if not total and done == limit:
        file.truncate(0)
        raise _Failure(f"sends more than {transfer.most()} bytes without end")


# ---- HTTP


def _read(response: HTTPResponse, size: int, timeout: float, when: str) -> bytes:
    try:
        return response.read1(size)
    except (OSError, HTTPException, ValueError) as error:
        raise _Cut(f"{_reason(error, timeout)} {when}") from None


def _whole(transfer: _Transfer) -> HTTPResponse:
    response = _open(transfer.url, {}, transfer.timeout)
    if response.status != 200:
        response.close()
        raise _Failure(f"HTTP status {response.status}, expected 200")
    return response


def _rest(transfer: _Transfer, kept: _Kept) -> HTTPResponse | None:
    """An answer that goes on where we stopped or begins anew; None where the server gives neither."""
    try:
        response = _open(
            transfer.url,
            {"Range": f"bytes={kept.done}-", "If-Range": kept.version},
            transfer.timeout,
        )
    except _Failure as failure:
        if failure.status == 416:  # the file has become shorter
            return None
        raise
    first, total = _span(response)
    same = _version(response) in ("", kept.version) and kept.total in (0, total)
    if response.status == 200 or (response.status == 206 and same and first == kept.done):
        return response
    response.close()
    return None


def _span(response: HTTPResponse) -> tuple[int, int]:
    """The byte an answer starts at, and the size of the whole file (0: unknown)."""
    if response.status != 206:
        return 0, response.length or 0
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
    return (int(span[1]), int(span[2])) if span else (-1, 0)


def _version(response: HTTPResponse) -> str:
    """The server's mark of the file's version; a weak ETag does not promise the same bytes."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


def _open(url: str, headers: Mapping[str, str], timeout: float) -> HTTPResponse:
    own = {"User-Agent": "fedsso", "Accept-Encoding": "identity"}
    try:
        response: HTTPResponse = _opener().open(
            request.Request(url, headers={**own, **headers}), timeout=timeout
        )
    except HTTPError as error:
        error.close()
        if error.code >= 500:  # the server's trouble, which may pass
            raise _Cut(f"HTTP status {error.code} {error.reason}") from None
        raise _Failure(f"HTTP status {error.code} {error.reason}", error.code) from None
    except (OSError, HTTPException, ValueError) as error:
        raise _Failure(_reason(error, timeout)) from None
    return response


def _opener() -> request.OpenerDirector:
    """http and https, and redirections between them: no file, no ftp, no data."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler,
        request.UnknownHandler,
        request.HTTPHandler,
        request.HTTPSHandler,
        request.HTTPDefaultErrorHandler,
        request.HTTPRedirectHandler,
        request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _reason(error: Exception, timeout: float) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"silent for {timeout:g} s"
    return str(reason) or type(reason).__name__


# ---- Archives

_DAMAGE = (*DAMAGE, tarfile.TarError, OverflowError, ValueError)


class _Member(NamedTuple):
    place: int  # in the archive
    size: int
    plain: bool  # a regular file: no folder, link or device
    open: Callable[[], IO[bytes] | None]


def _unpack(archive: Path, members: Sequence[tuple[str, str]], folder: Path) -> list[Path]:
    try:
        with opened(archive) as file, _members(archive, file) as found:
            wanted = {folder / path: _wanted(archive, name, found) for name, path in members}
            for path in sorted(
                wanted, key=lambda path: wanted[path].place
            ):  # a tar.gz is read once, not to and fro
                _write(path, partial(_extract, wanted[path]))
    except (OSError, *_DAMAGE) as error:
        disk = isinstance(error, OSError) and error.errno not in (
            None,
            errno.EINVAL,
        )  # not gzip's, nor a mad seek
        if disk or isinstance(error, InputError):
            raise
        raise InputError(
            f"{archive}: cannot be unpacked, corrupt or cut short ({error}): fetch it again"
        ) from None
    return list(wanted)


def _wanted(archive: Path, name: str, found: Mapping[str, _Member]) -> _Member:
    if name not in found:
        raise InputError(
            f"{archive}: has no member {name!r}, it is not the archive expected: fetch it again"
        )
    if not found[name].plain:
        raise InputError(
            f"{archive}: member {name!r} leaves the folder, it is not a regular file: do not use it"
        )
    return found[name]


def _extract(member: _Member, out: IO[bytes]) -> None:
    left = member.size
    with member.open() or io.BytesIO() as source:
        while left > 0 and (block := source.read(min(BLOCK, left))):
            out.write(block)
            left -= len(block)
    if left:
        raise EOFError(f"{left} bytes are missing")


@contextmanager
def _members(archive: Path, file: IO[bytes]) -> Iterator[dict[str, _Member]]:
    """What is in an archive, told by its first bytes."""
    start = file.read(512)
    file.seek(0)
    if start.startswith(b"PK"):
        with zip_archive(file) as packed:
            yield _safe(archive, _zipped(packed))
    elif start.startswith(b"\x1f\x8b") or start[257:262] == b"ustar":
        stream = gzip.GzipFile(fileobj=file) if start.startswith(b"\x1f\x8b") else file
        with tarfile.open(fileobj=cast(IO[bytes], Pieces(stream)), mode="r:") as taped:
            yield _safe(archive, _taped(taped, stream))
    else:
        raise InputError(f"{archive}: is neither a zip nor a tar file: fetch it again")


def _safe(archive: Path, members: Iterator[tuple[str, _Member]]) -> dict[str, _Member]:
    """All members by name; one that points outside condemns the archive, and so does an absurd
    size."""
    found, size = {}, 0
    for name, member in members:
        path = PureWindowsPath(name)  # knows both slashes, and drives
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


def _zipped(packed: zipfile.ZipFile) -> Iterator[tuple[str, _Member]]:
    for info in packed.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        plain = not info.is_dir() and kind in (0, stat.S_IFREG)
        yield (
            info.filename,
            _Member(info.header_offset, info.file_size, plain, partial(packed.open, info)),
        )


def _taped(
    taped: tarfile.TarFile, stream: IO[bytes] | gzip.GzipFile
) -> Iterator[tuple[str, _Member]]:
    for info in taped:
        yield (
            info.name,
            _Member(info.offset, info.size, info.isreg(), partial(taped.extractfile, info)),
        )
    while stream.read(BLOCK):  # to the end, where gzip keeps its checksum
        if stream.tell() > MOST:
            raise EOFError(f"more than {MOST} bytes")
