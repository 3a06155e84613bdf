"""Downloads: resumed, verified, unpacked, and put in place together or not at all.

Everything happens in the staging folder `.partial/NAME` below the data folder. After a failure, the
next call goes on from what is there. A file with the wrong content is removed, because going on
from it could never make it right.

`fetch` is the only function that others call. Below it come, in this order: the parts of a call,
the download of one file, and HTTP.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, NamedTuple, cast
from urllib import request
from urllib.error import HTTPError

from ..errors import InputError
from ..support.files import write_atomic
from ..support.intake import opened, read_json
from .archives import MOST, unpack, write

PARTIAL = ".partial"
"""The folder, below the data folder, where downloads happen."""
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each further attempt, after a connection broke."""
BLOCK = 2**18
"""Bytes read at a time."""
TELL_EVERY = 0.1
"""Seconds between two calls of `progress`."""
# "identity" asks for the bytes as they are: urllib does not unpack what a server packs for the
# way.
HEADERS = {"User-Agent": "fedsso", "Accept-Encoding": "identity"}

Progress = Callable[[str, int, int], None]
"""Called with the name of a file, the bytes so far, and the bytes in all (0: not known)."""
Check = Callable[[Path], None]
"""Called with the staging folder. Raises InputError for wrong content."""


@dataclass(frozen=True)
class Remote:
    """A file to download, and what becomes of it."""

    file: str
    """Where it ends up below the data folder. Of an archive only the name matters."""
    urls: tuple[str, ...]
    """The addresses, tried in turn."""
    sha256: str = ""
    """Its checksum. "" where no public source gives it: then the reader of the data set decides."""
    size: int = 0
    """Its size in bytes. 0: not known."""
    members: tuple[tuple[str, str], ...] = ()
    """Of an archive: the names of files in it, and their paths below the data folder."""

    def targets(self) -> list[str]:
        """The files that it leaves below the data folder."""
        return [path for _, path in self.members] or [self.file]


class _Failure(Exception):
    """This address does not give the file. Another one may."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _Cut(Exception):
    """The connection broke. Another attempt at the same address may go on."""


def _silent(_label: str, _done: int, _total: int) -> None:
    """Show no progress."""


def fetch(
    name: str,
    remotes: Sequence[Remote],
    folder: Path,
    *,
    check: Check,
    progress: Progress = _silent,
    mirror: str = "",
    timeout: float = 30,
) -> list[Path]:
    """Download the files of a data set into a folder, and return their paths.

    The files appear in the folder all together, once they are complete, verified and accepted. If
    the call fails or is interrupted, the next call goes on where it stopped.

    Args:
        name: The name of the data set, for the staging folder and the messages.
        remotes: The files to download.
        folder: The data folder.
        check: Is given the staging folder, which is laid out like the data folder, and raises
            InputError for wrong content.
        progress: Is called at most ten times a second, to show how far the download is.
        mirror: The address of a folder that has all files under their own names. The checksums
            must still be right.
        timeout: The longest silence of a server, in seconds.

    Returns:
        The paths of the files in the data folder.

    Raises:
        InputError: No address gives a file, a file is wrong, or the disk is full. The message says
            what to do.
    """
    staging = folder / PARTIAL / name
    targets: list[str] = []
    for remote in remotes:
        targets += remote.targets()
    by_hand = f"put {', '.join(targets)} into {folder} by hand"
    with _disk_errors_told(folder):
        _check_nothing_in_the_way(folder, targets)
        with _alone(name, folder):
            for remote in remotes:
                source = _mirrored(remote, mirror)
                if not _at_hand(source, folder, staging):
                    _obtain(source, staging, progress, timeout, by_hand)
            _accept(remotes, staging, check)
            for target in targets:
                _place(staging / target, folder / target)
            shutil.rmtree(staging)
    return [folder / target for target in targets]


# ---- the parts of a call ----


@contextmanager
def _disk_errors_told(folder: Path) -> Iterator[None]:
    """Turn an OSError within the block into an InputError that tells what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot write in {folder}: {reason}; free some space, or give another folder"
        ) from error


def _check_nothing_in_the_way(folder: Path, targets: Sequence[str]) -> None:
    """Raise InputError if a folder has the name of a file that we want to write, or vice versa."""
    for target in targets:
        path = folder / target
        if path.is_dir():
            raise _in_the_way(path, "folder where a file")
        for above in path.parents:
            if above.exists() and not above.is_dir():
                raise _in_the_way(above, "file where a folder")


def _in_the_way(path: Path, kind: str) -> InputError:
    """The error for a path of the wrong kind."""
    return InputError(f"{path} is a {kind} is needed: move it away, or give another folder")


@contextmanager
def _alone(name: str, folder: Path) -> Iterator[None]:
    """Hold a lock file, so that one process at a time downloads a data set. Tidy up afterwards."""
    lock = folder / PARTIAL / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        if not _is_held(file, lock):
            raise InputError(
                f"another process is downloading {name} into {folder}: wait until it has finished"
            )
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()
            _remove_empty_folders(lock.parent)


def _remove_empty_folders(top: Path) -> None:
    """Remove the empty folders below a folder, and itself if it is empty then.

    What stays is what the next call can go on from.
    """
    below = sorted(top.rglob("*"), reverse=True)
    for folder in (*below, top):
        with suppress(OSError):
            folder.rmdir()


def _is_held(file: IO[str], lock: Path) -> bool:
    """Try to take the lock, and tell whether it is ours now.

    A lock file that its former holder has removed in the meantime does not count. On a system
    without locks, everybody gets it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.fstat(file.fileno())
        return os.path.samestat(ours, lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:  # a file system without locks
        return True


def _mirrored(remote: Remote, mirror: str) -> Remote:
    """The same file from a mirror; without one, as it is.

    A mirror is laid out like the data folder, or has all files in one place.
    """
    if not mirror:
        return remote
    base = mirror.rstrip("/")
    places = dict.fromkeys([remote.file, Path(remote.file).name])
    urls = [f"{base}/{place}" for place in places]
    return replace(remote, urls=tuple(urls))


def _at_hand(remote: Remote, folder: Path, staging: Path) -> bool:
    """Whether the file is in the staging folder, so that it need not be downloaded.

    An earlier call may have left it there. A copy in the data folder with the right checksum is
    copied there now.
    """
    staged = staging / remote.file
    placed = folder / remote.file
    if staged.exists():
        return remote.sha256 in ("", _sha256(staged))
    if remote.members or not remote.sha256 or not placed.exists():
        return False
    if _sha256(placed) != remote.sha256:
        return False
    with opened(placed) as source:
        write(staged, lambda file: shutil.copyfileobj(source, file))
    return True


def _accept(remotes: Sequence[Remote], staging: Path, check: Check) -> None:
    """Unpack the archives and check the whole. What is refused is removed.

    `check` sees the staging folder as if it were the data folder.
    """
    try:
        for remote in remotes:
            if remote.members:
                unpack(staging / remote.file, remote.members, staging)
        check(staging)
    except InputError as error:
        shutil.rmtree(staging)
        raise InputError(
            f"{error}; the download was removed: run the command again, or try a mirror"
        ) from error


def _place(staged: Path, target: Path) -> None:
    """Move a file from the staging folder to its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(staged, target)


def _sha256(path: Path) -> str:
    """The checksum of a file, as hexadecimal digits."""
    with opened(path) as file:
        digest = hashlib.file_digest(cast(io.BufferedReader, file), "sha256")
    return digest.hexdigest()


# ---- the download of one file ----


class _Kept(NamedTuple):
    """What an earlier attempt left: so many bytes, of that version of the file."""

    url: str = ""
    version: str = ""
    """How the server marks the version: by ETag or Last-Modified."""
    total: int = 0
    """The size of the whole file. 0: not known."""
    done: int = 0
    """How many bytes are there."""


@dataclass(frozen=True)
class _Transfer:
    """One address, and the file that its bytes go to.

    `part` grows while bytes come, and is renamed when it is complete and verified.
    """

    url: str
    part: Path
    remote: Remote
    progress: Progress
    timeout: float

    def most(self) -> int:
        """The most bytes that are accepted: four times the known size, else more than any data set.

        Within this bound the checksum decides, not the size.
        """
        return 4 * self.remote.size or MOST

    def kept(self) -> _Kept:
        """What an earlier attempt at this address left."""
        kept = _kept(self.part)
        return kept if kept.url == self.url else _Kept()

    def remember(self, version: str, total: int) -> None:
        """Write down which version of the file is being downloaded, for a later attempt."""
        note = {"url": self.url, "version": version, "total": total}
        write_atomic(_note(self.part), json.dumps(note))


def _obtain(
    remote: Remote,
    staging: Path,
    progress: Progress,
    timeout: float,
    by_hand: str,
) -> None:
    """Download and verify one file, from the first address that gives it.

    An address with which an earlier call began comes first. `by_hand` says what a user can do if
    all addresses fail.
    """
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
            continue
        os.replace(part, target)
        size = target.stat().st_size
        progress(remote.file, size, size)
        return
    raise InputError(
        f"cannot download {remote.file}: {'; '.join(failures)}. Try another server with --mirror "
        f"URL, or {by_hand}"
    )


def _verify(part: Path, expected: str) -> None:
    """Compare the checksum of a download, where one is known.

    A file with another checksum is removed, together with its note: going on from it could never
    make it right.
    """
    if not expected:
        return
    found = _sha256(part)
    if found != expected:
        part.unlink()
        _note(part).unlink(missing_ok=True)
        raise _Failure(f"SHA-256 is {found}, expected {expected}, the download was removed")


def _note(part: Path) -> Path:
    """The file beside a partial download that says what it is a part of."""
    return part.with_name(f"{part.name}.json")


def _kept(part: Path) -> _Kept:
    """What there is to go on from. Nothing, where it is not certain what the bytes are.

    A server that does not mark the version of a file gives nothing to go on from: the file could
    have changed in the meantime.
    """
    try:
        note = read_json(_note(part))
        url = str(note["url"])
        version = str(note["version"])
        total = int(note["total"])
        done = part.stat().st_size
    except (OSError, ValueError, KeyError, TypeError):
        return _Kept()
    if not version:
        return _Kept()
    return _Kept(url, version, total, done)


def _download(transfer: _Transfer) -> None:
    """Get all bytes of the file, in a few attempts. Each goes on where the last one broke off."""
    broken = ""
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        try:
            return _attempt(transfer)
        except _Cut as cut:
            broken = str(cut)
    raise _Failure(f"{broken}; run the command again to continue")


def _attempt(transfer: _Transfer) -> None:
    """Open the connection once, and read until the file is complete or the connection breaks.

    The bytes are on the disk when this returns. A crash after it loses nothing. Raises `_Cut` if
    another attempt may go on, `_Failure` if this address is of no use.
    """
    kept = transfer.kept()
    if kept.done and kept.done == kept.total:  # all bytes are there, but were not verified
        return
    with _answer(transfer, kept) as response:
        start, total = _span(response)
        if total > transfer.most():
            raise _Failure(f"announces {total} bytes, at most {transfer.most()} are expected")
        with transfer.part.open("ab" if start else "wb") as file:
            if not start:  # the old bytes are gone, so the new note never vouches for them
                transfer.remember(_version(response), total)
            _copy(response, file, start, total, transfer)
            file.flush()
            os.fsync(file.fileno())


def _answer(transfer: _Transfer, kept: _Kept) -> HTTPResponse:
    """The server's answer: the rest of the file if that is possible, else the whole file."""
    rest = _rest(transfer, kept) if kept.done else None
    return rest or _whole(transfer)


def _copy(
    response: HTTPResponse,
    file: IO[bytes],
    done: int,
    total: int,
    transfer: _Transfer,
) -> None:
    """Write bytes to the file as they come. `done` bytes of `total` are there already.

    Raises `_Cut` if the connection ends too early. Raises `_Failure` if a file of unknown size
    turns out to be larger than any data set.
    """
    limit = total or transfer.most() + 1
    told = 0.0
    while done < limit:
        size = min(BLOCK, limit - done)
        when = f"after {done} of {total or '?'} bytes"
        block = _read(response, size, transfer.timeout, when)
        if not block:
            break
        file.write(block)
        done += len(block)
        now = time.monotonic()
        if now - told >= TELL_EVERY:
            told = now
            transfer.progress(transfer.remote.file, done, total)
    if done < total:
        raise _Cut(f"ended after {done} of {total} bytes")
    if not total and done == limit:
        file.truncate(0)
        raise _Failure(f"sends more than {transfer.most()} bytes without end")


# ---- HTTP ----


def _read(
    response: HTTPResponse,
    size: int,
    timeout: float,
    when: str,
) -> bytes:
    """Read some bytes. An error becomes a `_Cut` that says after how many bytes it came."""
    try:
        return response.read1(size)
    except (OSError, HTTPException, ValueError) as error:
        raise _Cut(f"{_reason(error, timeout)} {when}") from None


def _whole(transfer: _Transfer) -> HTTPResponse:
    """An answer with the whole file."""
    response = _open(transfer.url, {}, transfer.timeout)
    if response.status != 200:
        response.close()
        raise _Failure(f"HTTP status {response.status}, expected 200")
    return response


def _rest(transfer: _Transfer, kept: _Kept) -> HTTPResponse | None:
    """An answer that goes on where we stopped, or that begins anew.

    None if the server gives neither, or if the file has become another one in the meantime.
    """
    headers = {"Range": f"bytes={kept.done}-", "If-Range": kept.version}
    try:
        response = _open(transfer.url, headers, transfer.timeout)
    except _Failure as failure:
        if failure.status == 416:  # the file has become shorter
            return None
        raise
    if response.status == 200:
        return response
    first, total = _span(response)
    same_version = _version(response) in ("", kept.version)
    same_size = kept.total in (0, total)
    goes_on = response.status == 206 and first == kept.done
    if goes_on and same_version and same_size:
        return response
    response.close()
    return None


def _span(response: HTTPResponse) -> tuple[int, int]:
    """The byte that an answer starts at, and the size of the whole file (0: not known).

    Status 206 is the answer to a request for a part. Its header reads "bytes 100-199/200". The
    first byte is -1 if the header cannot be understood, which is no place to go on from.
    """
    if response.status != 206:
        return 0, response.length or 0
    header = response.headers.get("Content-Range", "")
    span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", header)
    if span is None:
        return -1, 0
    return int(span[1]), int(span[2])


def _version(response: HTTPResponse) -> str:
    """The server's mark of the file's version: its ETag, else its date. Empty if there is none.

    A weak ETag, which begins with W/, does not promise the same bytes.
    """
    tag: str = response.headers.get("ETag", "")
    if tag and not tag.startswith("W/"):
        return tag
    modified: str = response.headers.get("Last-Modified", "")
    return modified


def _open(url: str, headers: Mapping[str, str], timeout: float) -> HTTPResponse:
    """Ask for an address, and return the answer.

    Raises `_Cut` if the server has trouble, which may pass. Raises `_Failure` for all else.
    """
    try:
        asked = request.Request(url, headers={**HEADERS, **headers})
        response: HTTPResponse = _opener().open(asked, timeout=timeout)
    except HTTPError as error:
        error.close()
        status = f"HTTP status {error.code} {error.reason}"
        if error.code >= 500:
            raise _Cut(status) from None
        raise _Failure(status, error.code) from None
    except (OSError, HTTPException, ValueError) as error:
        raise _Failure(_reason(error, timeout)) from None
    return response


def _opener() -> request.OpenerDirector:
    """What opens addresses: http and https and redirections between them, but no file or ftp.

    The default of urllib would follow a redirection to a file on this machine.
    """
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
    """What went wrong with a connection, in a few words."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return f"silent for {timeout:g} s"
    return str(reason) or type(reason).__name__
