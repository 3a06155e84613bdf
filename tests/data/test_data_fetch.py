"""Downloads from a server that misbehaves in every way there is; archives that nobody should
unpack."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedsso.data import archives
from fedsso.data import fetch as module
from fedsso.data.archives import unpack
from fedsso.data.fetch import Remote, fetch
from fedsso.data.remotes import REMOTES
from fedsso.errors import InputError

BODY = bytes(range(256)) * 400  # 102400 bytes


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Page:
    """One address of the server, and its manners."""

    body: bytes = BODY
    status: int = 200
    location: str = ""
    etag: str = '"one"'
    modified: str = ""
    ranges: bool = True
    if_range: bool = True  # False: ignores it, as some servers do
    content_range: str = ""  # what to say instead of the truth
    length: int | None = None  # what to announce instead of the truth; -1 nothing
    chunked: bool = False
    cut: int = 0  # bytes after which the connection ends
    cuts: int = 99  # answers that are cut
    drip: float = 0.0  # seconds between pieces of 4096 bytes
    stall: bool = False  # headers, then silence
    hold: int = 0  # bytes after which it is silent until the test is over
    sent: int = 0


@dataclass
class Site:
    """A server on a port of its own; it counts what it sends."""

    base: str
    pages: dict[str, Page] = field(default_factory=dict)
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    served: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def url(self, name: str) -> str:
        return f"{self.base}/{name}"

    def ranges(self) -> list[str]:
        return [headers.get("Range", "") for headers in self.headers]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        site: Site = self.server.site  # type: ignore[attr-defined]
        name = self.path.rpartition("/")[2]
        site.asked.append(name)
        site.headers.append(dict(self.headers))
        self.close_connection = True
        page = site.pages.get(name, Page(b"not here", 404))
        start = self.start(page)
        if start >= len(page.body) > 0 and start > 0:
            page, start = Page(b"", 416), 0
        self.head(page, start)
        if page.stall:
            site.over.wait(5)
        with suppress(OSError):  # the client may be gone
            self.send(site, page, page.body[start:])

    def start(self, page: Page) -> int:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        current = self.headers.get("If-Range") in (page.etag, page.modified) or not page.if_range
        return int(asked[1]) if asked and page.ranges and current and page.status == 200 else 0

    def head(self, page: Page, start: int) -> None:
        total = len(page.body)
        self.send_response(206 if start else page.status)
        length = total - start if page.length is None else page.length
        if page.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif length >= 0:
            self.send_header("Content-Length", str(length))
        told = {"ETag": page.etag, "Last-Modified": page.modified, "Location": page.location}
        if start:
            told["Content-Range"] = page.content_range or f"bytes {start}-{total - 1}/{total}"
        for header, value in told.items():
            if value:
                self.send_header(header, value)
        self.send_header("Connection", "close")
        self.end_headers()

    def send(self, site: Site, page: Page, body: bytes) -> None:
        broken = page.cut and page.cuts > 0
        page.cuts -= 1
        body = body[: page.cut] if broken else body
        size = 4096 if page.drip else max(len(body), 1)
        for piece in (body[i : i + size] for i in range(0, len(body), size)):
            page.sent += len(piece)
            site.served += len(piece) * (page.status == 200)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if page.chunked else piece)
            time.sleep(page.drip)
            if page.hold and page.sent >= page.hold:
                site.over.wait(60)
        if page.chunked and not broken:
            self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    site: Site

    def handle_error(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.site = Site(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.site
        server.site.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setenv("no_proxy", "*")


def fine(_: Path) -> None:
    pass


def get(site: Site, folder: Path, name: str = "a.bin", **options: Any) -> list[Path]:
    """The file `name` of the server, as the data set `set`."""
    own = {
        field: options.pop(field)
        for field in ("sha256", "size", "members", "urls")
        if field in options
    }
    remote = Remote(f"sub/{name}", **{"urls": (site.url(name),), **own})
    return fetch("set", [remote], folder, **{"check": fine, **options})


def left(folder: Path) -> list[str]:
    """The files in a folder, but for what waits to be resumed."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path) for path in found if path.parts[0] != ".partial")


def begun(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / ".partial").rglob("*") if p.is_file())


def failed(site: Site, folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        get(site, folder, **options)
    assert left(folder) == []
    assert not list(folder.rglob("*.lock"))
    return str(caught.value)


# ---- Downloads that succeed


def test_a_download_is_verified_checked_and_put_in_place(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page()
    seen: list[bytes] = []
    told: list[tuple[str, int, int]] = []

    def check(staging: Path) -> None:
        assert left(tmp_path) == []
        seen.append((staging / "sub" / "a.bin").read_bytes())

    paths = get(
        site,
        tmp_path,
        sha256=sha(BODY),
        check=check,
        progress=lambda *step: told.append(step),
        size=len(BODY),
    )
    assert paths == [tmp_path / "sub" / "a.bin"]
    assert paths[0].read_bytes() == BODY
    assert seen == [BODY]
    assert told[-1] == ("sub/a.bin", len(BODY), len(BODY))
    assert [p.name for p in tmp_path.iterdir()] == ["sub"]
    assert site.headers[0]["Accept-Encoding"] == "identity"
    assert "Range" not in site.headers[0]


class Clock:
    """A clock that goes on by 0.03 s whenever somebody looks at it, however fast the machine is."""

    now = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        self.now += 0.03
        return self.now


def test_progress_is_told_at_most_ten_times_a_second(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, site.pages["a.bin"] = Clock(), Page()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        module, "BLOCK", 4096
    )  # at least 25 pieces, and a look at the clock for each
    told: list[tuple[float, int, int]] = []
    get(site, tmp_path, progress=lambda _, done, total: told.append((clock.now, done, total)))
    moments, done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {len(BODY)}
    assert len(told) >= 5
    assert all(
        0.1 <= later - earlier <= 0.16 for earlier, later in pairwise(moments[:-1])
    )  # the end is always told


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_of_unknown_length_is_read_to_its_end(
    chunked: bool, site: Site, tmp_path: Path
) -> None:
    site.pages["a.bin"] = Page(length=-1, chunked=chunked)
    told: list[int] = []
    (path,) = get(site, tmp_path, progress=lambda _, __, total: told.append(total))
    assert path.read_bytes() == BODY
    assert told == [0, len(BODY)]


def test_redirections_are_followed_and_keep_the_range(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(b"", 302, site.url("b.bin"))
    site.pages["b.bin"] = Page(cut=70000, cuts=1)
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert site.ranges()[-1] == "bytes=70000-"


def test_addresses_are_tried_in_turn(site: Site, tmp_path: Path) -> None:
    site.pages |= {"wrong.bin": Page(BODY[::-1]), "good.bin": Page()}
    urls = (
        site.url("gone.bin"),
        site.url("wrong.bin"),
        site.url("good.bin"),
        site.url("never.bin"),
    )
    assert get(site, tmp_path, urls=urls, sha256=sha(BODY))[0].read_bytes() == BODY
    assert site.asked == ["gone.bin", "wrong.bin", "good.bin"]


def test_a_mirror_takes_the_place_of_all_addresses(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page()
    assert get(site, tmp_path, urls=("http://fedsso.invalid/x",), mirror=site.url("any/where/"))[
        0
    ].exists()
    site.pages["a.bin"] = Page(BODY[::-1])
    message = failed(site, tmp_path / "other", mirror=site.base, sha256=sha(BODY))
    assert sha(BODY[::-1]) in message


def test_files_at_hand_are_not_downloaded_again(site: Site, tmp_path: Path) -> None:
    one, two = Remote("one", (site.url("one"),), sha(b"1")), Remote("two", (site.url("two"),))
    site.pages |= {"one": Page(b"1")}
    with pytest.raises(InputError, match="cannot download two"):
        fetch("set", [one, two], tmp_path, check=fine)
    site.pages["two"] = Page(b"2")
    fetch("set", [one, two], tmp_path, check=fine)  # one was staged
    fetch(
        "set", [one, two], tmp_path, check=fine
    )  # one is in place; of two nobody knows whether it is right
    assert site.asked == ["one", "two", "two", "two"]
    (tmp_path / "one").write_bytes(b"0")
    fetch("set", [one, two], tmp_path, check=fine)
    assert (tmp_path / "one").read_bytes() == b"1"
    assert left(tmp_path) == ["one", "two"]


# ---- Downloads that break off


def test_a_broken_connection_is_resumed_within_the_call(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(cut=30000)
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert site.ranges() == ["", "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    assert site.headers[1]["If-Range"] == '"one"'
    assert site.served == len(BODY)


def test_the_next_call_goes_on_where_the_last_one_gave_up(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(cut=10000)
    message = failed(site, tmp_path)
    assert f"40000 of {len(BODY)} bytes" in message
    assert "run the command again" in message
    assert begun(tmp_path) == ["a.bin.part", "a.bin.part.json"]
    site.pages["a.bin"] = Page()
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert site.served == len(BODY)
    assert left(tmp_path) == ["sub/a.bin"]


def test_the_address_begun_with_is_gone_on_with(site: Site, tmp_path: Path) -> None:
    urls = (site.url("a.bin"), site.url("b.bin"))
    site.pages["b.bin"] = Page(cut=20000)
    failed(site, tmp_path, urls=urls)
    site.pages |= {"a.bin": Page(), "b.bin": Page()}
    get(site, tmp_path, urls=urls, sha256=sha(BODY))
    assert site.served == len(BODY)
    assert site.asked[-1] == "b.bin"


def test_bytes_of_two_servers_are_not_mixed(site: Site, tmp_path: Path) -> None:
    site.pages |= {
        "a.bin": Page(cut=10000),
        "b.bin": Page(BODY[::-1]),
    }  # both say it is version "one"
    (path,) = get(site, tmp_path, urls=(site.url("a.bin"), site.url("b.bin")))
    assert path.read_bytes() == BODY[::-1]
    assert site.asked == ["a.bin"] * 4 + ["b.bin"]


@pytest.mark.parametrize(
    "manners",
    [
        {"ranges": False},
        {"etag": ""},
        {"etag": 'W/"weak"'},
        {"content_range": "bytes 5-9/10"},
        {"content_range": f"bytes 5-102399/{len(BODY)}"},
        {"content_range": "nonsense"},
        {"content_range": f"bytes 70000-102399/{len(BODY) + 1}"},
    ],
)
def test_a_server_that_cannot_go_on_starts_from_zero(
    manners: dict[str, Any], site: Site, tmp_path: Path
) -> None:
    site.pages["a.bin"] = Page(cut=70000, cuts=1, **manners)
    assert get(site, tmp_path)[0].read_bytes() == BODY
    assert site.served >= 70000 + len(BODY)


def test_the_date_marks_the_version_where_there_is_no_tag(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(cut=70000, cuts=1, etag="", modified="Mon, 01 Jan 2024 00:00:00 GMT")
    assert get(site, tmp_path)[0].read_bytes() == BODY
    assert site.headers[1]["If-Range"] == "Mon, 01 Jan 2024 00:00:00 GMT"
    assert site.served == len(BODY)


@pytest.mark.parametrize("if_range", [True, False])
@pytest.mark.parametrize("size", [len(BODY), 10000])
def test_a_file_that_changed_meanwhile_is_not_mixed(
    if_range: bool, size: int, site: Site, tmp_path: Path
) -> None:
    site.pages["a.bin"] = Page(cut=10000)
    failed(site, tmp_path)
    new = BODY[::-1][:size]
    site.pages["a.bin"] = Page(new, etag='"two"', if_range=if_range)
    assert get(site, tmp_path)[0].read_bytes() == new
    assert site.ranges()[4] == "bytes=40000-"


def test_an_uncertain_beginning_is_not_used(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(cut=10000)
    part = tmp_path / ".partial" / "set" / "sub" / "a.bin.part"
    note = part.with_name("a.bin.part.json")
    for spoil in ("{", "[]", '{"url": 1}', None):
        site.pages["a.bin"] = Page(cut=10000)
        failed(site, tmp_path)
        if spoil is None:
            part.write_bytes(BODY + b"more")
        else:
            note.write_text(spoil)
        site.pages["a.bin"] = Page()
        assert get(site, tmp_path)[0].read_bytes() == BODY
        assert site.ranges()[-1] == ""
        (tmp_path / "sub" / "a.bin").unlink()


def test_all_bytes_there_but_not_yet_verified_need_no_request(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(cut=10000)
    failed(site, tmp_path)
    part = tmp_path / ".partial" / "set" / "sub" / "a.bin.part"
    assert json.loads(part.with_name("a.bin.part.json").read_text())["total"] == len(BODY)
    part.write_bytes(BODY)
    asked = len(site.asked)
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert len(site.asked) == asked


DOWNLOAD = """
import sys, types
from itertools import pairwise
from pathlib import Path
here = Path(sys.argv[1]).parent
# bare packages, so as not to wait for torch
for name, folder in (("fedsso", here.parent), ("fedsso.data", here)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]
from fedsso.data.fetch import Remote, fetch
fetch("set", [Remote("sub/a.bin", (sys.argv[2],))], Path(sys.argv[3]), check=lambda staging: None)
"""


def test_a_killed_download_is_completed_by_the_next_call(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(drip=0.001, hold=30_000)  # it is never whole before it is killed
    process = subprocess.Popen(
        [sys.executable, "-c", DOWNLOAD, module.__file__, site.url("a.bin"), str(tmp_path)]
    )
    part = tmp_path / ".partial" / "set" / "sub" / "a.bin.part"
    while process.poll() is None and not (part.exists() and part.stat().st_size > 20000):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = part.stat().st_size
    assert 20000 < kept < len(BODY)
    assert [str(p.relative_to(tmp_path)).split("/")[0] for p in tmp_path.iterdir()] == [".partial"]
    site.pages["a.bin"] = again = Page()
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert again.sent == len(BODY) - kept
    assert left(tmp_path) == ["sub/a.bin"]


def test_an_interrupt_leaves_the_beginning_for_the_next_call(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(drip=0.001)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(site, tmp_path, progress=interrupt)
    assert left(tmp_path) == []
    assert begun(tmp_path) == ["a.bin.part", "a.bin.part.json"]
    site.pages["a.bin"] = Page()
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert site.ranges()[-1].startswith("bytes=")


def test_a_cut_chunked_transfer_is_noticed(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(chunked=True, cut=50000, cuts=1)
    assert get(site, tmp_path)[0].read_bytes() == BODY
    assert site.ranges() == ["", "bytes=50000-"]


# ---- Downloads that fail


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (Page(status=404), "HTTP status 404 Not Found"),
        (Page(status=403), "HTTP status 403 Forbidden"),
        (Page(status=500), "HTTP status 500"),
        (Page(b"", status=204), "HTTP status 204, expected 200"),
        (Page(b"", 302, "file:///etc/passwd"), "file:///etc/passwd.* is not allowed"),
        (Page(b"", 302, "ftp://127.0.0.1/a"), "unknown url type: ftp"),
        (Page(b"", 302, "a.bin"), "redirect"),
        (Page(length=2 * len(BODY)), f"ended after {len(BODY)} of {2 * len(BODY)} bytes"),
        (Page(length=10**15), "1000000000000000 bytes.*at most 8589934592"),
        (Page(stall=True), f"silent for 0.5 s after 0 of {len(BODY)} bytes.*run the command again"),
        (Page(stall=True, chunked=True), r"silent for 0.5 s after 0 of \? bytes"),
    ],
)
def test_a_failing_server_is_named_with_the_remedy(
    page: Page, message: str, site: Site, tmp_path: Path
) -> None:
    site.pages["a.bin"] = page
    text = failed(site, tmp_path, timeout=0.5 if page.stall else 2)
    assert re.search(
        f"cannot download sub/a.bin: {re.escape(site.url('a.bin'))}: .*{message}", text
    )
    assert "--mirror URL" in text
    assert f"put sub/a.bin into {tmp_path}" in text


def test_addresses_that_lead_nowhere(site: Site, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/a"
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    cases = {
        closed: "Connection refused",
        "http://fedsso.invalid/a": "Errno",
        site.base.replace("http:", "https:") + "/a": "SSL",
        secret.as_uri(): "unknown url type: file",
        "data:text/plain,a": "unknown url type: data",
        "nonsense": "unknown url type",
        "http://[half/a": "Invalid IPv6",
        "http://127.0.0.1:port/a": "nonnumeric port",
        "http://127.0.0.1/a b": "control characters",
        f"http://{'a' * 70}.org/": "label",
        "http:///a": "no host given",
    }
    for url, reason in cases.items():
        text = failed(site, tmp_path / "data", urls=(url,), timeout=5)
        assert f"{url}: " in text
        assert reason in text
    text = failed(site, tmp_path / "data", urls=tuple(cases), timeout=5)
    assert all(url in text for url in cases)


def test_a_wrong_checksum_removes_the_download(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(BODY[::-1])
    text = failed(site, tmp_path, sha256=sha(BODY))
    assert f"cannot download sub/a.bin: {site.url('a.bin')}: " in text
    assert re.search(f"SHA-256.*{sha(BODY[::-1])}.*expected {sha(BODY)}.*removed", text)
    assert begun(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    site.pages["a.bin"] = Page()
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY


def test_too_short_an_announcement_is_caught_by_the_checksum(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(length=1000)
    assert f"SHA-256 is {sha(BODY[:1000])}" in failed(site, tmp_path, sha256=sha(BODY))


def test_an_endless_stream_is_stopped(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(length=-1)
    assert "sends more than 4000 bytes without end" in failed(site, tmp_path, size=1000)
    assert (tmp_path / ".partial" / "set" / "sub" / "a.bin.part").stat().st_size == 0


def test_a_refused_file_is_removed_and_nothing_of_it_stays(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page()

    def refuse(staging: Path) -> None:
        raise InputError(f"{staging / 'sub' / 'a.bin'}: is not what it should be")

    text = failed(site, tmp_path, check=refuse)
    assert re.search("a.bin: is not what it should be.*removed.*run the command again", text)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error_before_any_request(
    site: Site, tmp_path: Path
) -> None:
    site.pages["a.bin"] = Page()
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "sub" / "a.bin").mkdir(parents=True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "sub").touch()
    for name, reason in {
        "file": "file is a file where a folder is needed",
        "folder": "sub/a.bin is a folder where a file is needed",
        "half": "sub is a file where a folder is needed",
    }.items():
        with pytest.raises(InputError, match=reason):
            get(site, tmp_path / name)
    with pytest.raises(InputError, match=r"cannot write in /proc/here.*give another folder"):
        get(site, Path("/proc/here"))
    assert site.asked == []


def test_a_full_disk_keeps_what_there_was_room_for(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page(drip=0.001)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50000, hard))
    try:
        text = failed(site, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"cannot write in {tmp_path}: File too large; free some space" in text
    site.pages["a.bin"] = Page()
    assert get(site, tmp_path, sha256=sha(BODY))[0].read_bytes() == BODY
    assert site.ranges()[-1] == "bytes=50000-"


def test_one_process_at_a_time(site: Site, tmp_path: Path) -> None:
    site.pages["a.bin"] = Page()

    def again(_: Path) -> None:
        get(site, tmp_path)

    text = failed(site, tmp_path, check=again)
    assert re.search(f"another process.*set into {re.escape(str(tmp_path))}.*wait", text)
    assert get(site, tmp_path)


# ---- Archives

FILES = {"in/a.txt": b"alpha" * 1000, "in/b.txt": b"", "in/c.txt": b"gamma", "readme": b"no"}
WANTED = (("in/c.txt", "set/c.txt"), ("in/a.txt", "set/a.txt"), ("in/b.txt", "set/b.txt"))


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def taped(path: Path, files: dict[str, bytes], mode: str = "w:gz", **special: bytes) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), special.get("type", tarfile.REGTYPE)
            if info.type != tarfile.REGTYPE:
                info.size, info.linkname = 0, "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
    return path


PACKERS: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "zip": zipped,
    "tar.gz": taped,
    "tar": lambda path, files: taped(path, files, "w"),
}


def refused(archive: Path, folder: Path, members: tuple[tuple[str, str], ...] = WANTED) -> str:
    with pytest.raises(InputError) as caught:
        unpack(archive, members, folder)
    assert str(caught.value).startswith(f"{archive}: ")
    assert not [path for path in folder.rglob("*") if path.name.endswith(".new")]
    return str(caught.value)


@pytest.mark.parametrize("packer", PACKERS)
def test_the_wanted_members_come_out_under_our_names(packer: str, tmp_path: Path) -> None:
    archive = PACKERS[packer](tmp_path / "archive", FILES)
    paths = unpack(archive, WANTED, tmp_path / "out")
    assert [str(p.relative_to(tmp_path / "out")) for p in paths] == [
        "set/c.txt",
        "set/a.txt",
        "set/b.txt",
    ]
    assert [p.read_bytes() for p in paths] == [FILES[name] for name, _ in WANTED]
    assert left(tmp_path / "out") == ["set/a.txt", "set/b.txt", "set/c.txt"]


@pytest.mark.parametrize("packer", PACKERS)
def test_an_archive_is_downloaded_unpacked_and_not_kept(
    packer: str, site: Site, tmp_path: Path
) -> None:
    data = PACKERS[packer](tmp_path / "archive", FILES).read_bytes()
    site.pages["x"] = Page(data, cut=200, cuts=1)
    remote = Remote("x", (site.url("x"),), sha(data), len(data), WANTED)
    seen: list[str] = []
    paths = fetch(
        "set",
        [remote],
        tmp_path / "data",
        check=lambda s: seen.append((s / "set/c.txt").read_text()),
    )
    assert [p.read_bytes() for p in paths] == [FILES[name] for name, _ in WANTED]
    assert seen == ["gamma"]
    assert left(tmp_path / "data") == ["set/a.txt", "set/b.txt", "set/c.txt"]
    assert not (tmp_path / "data" / ".partial").exists()


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "in/../../evil",
        "/evil",
        "..\\evil",
        "in\\..\\..\\evil",
        "C:\\evil",
        "C:evil",
        "\\\\host\\evil",
    ],
)
def test_a_member_that_leaves_the_folder_condemns_the_archive(
    packer: str, name: str, tmp_path: Path
) -> None:
    archive = PACKERS[packer](tmp_path / "archive", {**FILES, name: b"evil"})
    assert f"member {name!r} leaves the folder" in refused(archive, tmp_path / "out")
    assert left(tmp_path) == ["archive"]


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "FIFOTYPE", "CHRTYPE", "DIRTYPE"])
def test_a_wanted_member_must_be_a_regular_file(kind: str, tmp_path: Path) -> None:
    archive = taped(tmp_path / "archive", {"in/a.txt": b""}, type=getattr(tarfile, kind))
    message = refused(archive, tmp_path / "out", (("in/a.txt", "a.txt"),))
    assert re.search("'in/a.txt' leaves the folder.*not a regular file", message)
    assert left(tmp_path) == ["archive"]


def test_a_link_in_a_zip_is_no_regular_file(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("in/a.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    assert "leaves the folder" in refused(
        tmp_path / "archive", tmp_path / "out", (("in/a.txt", "a.txt"),)
    )


@pytest.mark.parametrize("packer", PACKERS)
def test_a_missing_member_is_named_and_nothing_is_written(packer: str, tmp_path: Path) -> None:
    archive = PACKERS[packer](tmp_path / "archive", FILES)
    message = refused(archive, tmp_path / "out", (*WANTED, ("in/d.txt", "d.txt")))
    assert re.search("no member 'in/d.txt'.*download it again", message)
    assert left(tmp_path) == ["archive"]


@pytest.mark.parametrize("packer", PACKERS)
def test_a_cut_archive_is_an_error_at_every_length(packer: str, tmp_path: Path) -> None:
    noise = {"in/a.txt": os.urandom(3000), "in/b.txt": b"", "in/c.txt": os.urandom(3000)}
    data = PACKERS[packer](tmp_path / "whole", noise).read_bytes()
    end = (
        len(data) if packer != "tar" else data.rindex(noise["in/c.txt"]) + 3000
    )  # the rest is padding
    for size in range(0, end, 331):
        (tmp_path / "archive").write_bytes(data[:size])
        message = refused(tmp_path / "archive", tmp_path / "out")
        assert message.endswith("download it again")


@pytest.mark.parametrize("packer", ["zip", "tar.gz"])
def test_a_flipped_bit_is_noticed(packer: str, tmp_path: Path) -> None:
    noise = {"in/a.txt": os.urandom(3000), "in/b.txt": b"", "in/c.txt": os.urandom(3000)}
    data = bytearray(PACKERS[packer](tmp_path / "whole", noise).read_bytes())
    for place in range(len(data) // 8, len(data) // 3, 97):
        data[place] ^= 16
        (tmp_path / "archive").write_bytes(data)
        assert "corrupt or cut short" in refused(tmp_path / "archive", tmp_path / "out")
        data[place] ^= 16


@pytest.mark.parametrize("packer", PACKERS)
def test_a_bomb_is_refused_before_anything_is_written(
    packer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = PACKERS[packer](tmp_path / "archive", {**FILES, "zeros": bytes(10**6)})
    monkeypatch.setattr(archives, "MOST", 10**5)
    assert "unpacks to more than 100000 bytes" in refused(archive, tmp_path / "out")
    assert left(tmp_path) == ["archive"]


def test_zeros_behind_the_end_of_a_tar_are_not_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = taped(tmp_path / "tar", FILES, "w").read_bytes()
    (tmp_path / "archive").write_bytes(gzip.compress(plain + bytes(10**6)))
    monkeypatch.setattr(archives, "MOST", 5 * 10**5)
    assert "more than 500000 bytes" in refused(tmp_path / "archive", tmp_path / "out")


def test_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path) -> None:
    data = zipped(tmp_path / "whole", {"in/a.txt": bytes(5000)}).read_bytes()
    for lie in (100, 4999, 5001, 10**9):
        honest = (5000).to_bytes(4, "little")
        (tmp_path / "archive").write_bytes(data.replace(honest, lie.to_bytes(4, "little")))
        assert "corrupt or cut short" in refused(
            tmp_path / "archive", tmp_path / "out", (("in/a.txt", "a.txt"),)
        )
        assert left(tmp_path / "out") == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>sorry</html>",
        gzip.compress(b"no tar" * 1000, mtime=0),
        b"PK\x03\x04" + b"x" * 99,
    ],
    ids=["nothing", "a page", "gzip without tar", "a broken zip"],
)
def test_what_is_no_archive_says_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(data)
    assert "download it again" in refused(tmp_path / "archive", tmp_path / "out")


def test_a_zip_whose_directory_points_before_the_file_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped(tmp_path / "whole", FILES).read_bytes())
    for offset in (1, 2**16, 2**31):
        true = int.from_bytes(data[-6:-2], "little")
        (tmp_path / "archive").write_bytes(
            data[:-6] + (true + offset).to_bytes(4, "little") + data[-2:]
        )
        assert "corrupt or cut short" in refused(tmp_path / "archive", tmp_path / "out")


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped(tmp_path / "whole", FILES).read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.index(mark) + flags
        data[place] |= 1
    (tmp_path / "archive").write_bytes(data)
    assert "encrypted" in refused(tmp_path / "archive", tmp_path / "out", (("in/a.txt", "a.txt"),))


def test_an_unsafe_download_is_removed(site: Site, tmp_path: Path) -> None:
    site.pages["x"] = Page(zipped(tmp_path / "archive", {**FILES, "../evil": b""}).read_bytes())
    remote = Remote("x", (site.url("x"),), members=WANTED)
    with pytest.raises(InputError, match=r"leaves the folder.*do not use this archive.*removed"):
        fetch("set", [remote], tmp_path / "data", check=fine)
    assert list((tmp_path / "data").iterdir()) == []


# ---- The addresses

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)


def test_the_remotes_are_well_formed() -> None:
    for name, remotes in REMOTES.items():
        targets = [target for remote in remotes for target in remote.targets()]
        assert len(set(targets)) == len(targets), name
        assert not any(
            Path(target).is_absolute() or ".." in Path(target).parts for target in targets
        )
        for remote in remotes:
            assert remote.urls[0].startswith("https://")
            assert all(re.fullmatch(r"https?://[\w.-]+/\S+", url) for url in remote.urls)
            assert re.fullmatch(r"([0-9a-f]{64})?", remote.sha256)
            assert bool(remote.sha256) == bool(remote.size)
            assert remote.sha256 or not remote.members  # an archive is never opened unverified
            assert (
                Path(remote.file).name == remote.urls[0].rpartition("/")[2] or name == "shakespeare"
            )
    sums = [remote.sha256 for remotes in REMOTES.values() for remote in remotes if remote.sha256]
    assert len(set(sums)) == len(sums) - 2  # one archive for the three EMNIST sets


@needs_data
@pytest.mark.parametrize("name", ["shakespeare", "heart"])
def test_the_recorded_sums_are_those_of_the_real_files(
    name: str, site: Site, tmp_path: Path
) -> None:
    folder = Path(os.environ["FEDSSO_DATA"])
    for remote in REMOTES[name]:
        if not (folder / remote.file).exists():
            pytest.skip(f"no {remote.file} in FEDSSO_DATA")
        site.pages[remote.file] = Page((folder / remote.file).read_bytes())
        assert len(site.pages[remote.file].body) == remote.size
    shutil.copy(folder / REMOTES[name][0].file, tmp_path)  # one by hand, the others from the mirror
    paths = fetch(name, REMOTES[name], tmp_path, check=fine, mirror=site.base)
    assert [p.read_bytes() for p in paths] == [
        (folder / r.file).read_bytes() for r in REMOTES[name]
    ]
    assert len(site.asked) == len(REMOTES[name]) - 1
