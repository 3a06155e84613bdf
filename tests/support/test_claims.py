"""Claims on work: one holder, the dead are followed, the slow do no harm; and locks that are
shared."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fedsso.errors import InputError
from fedsso.support import claims
from fedsso.support.claims import Claims
from fedsso.support.lock import Lock


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(claims, "time", made)
    return made


def on_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims.platform, "node", lambda: name)


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    every = [Claims(tmp_path) for _ in range(8)]
    start = threading.Barrier(8)
    got: list[bool] = []

    def attempt(one: Claims) -> None:
        start.wait()
        got.append(one.take("a"))

    threads = [threading.Thread(target=attempt, args=(one,)) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_what_is_given_back_can_be_taken_and_leaves_no_file(tmp_path: Path) -> None:
    with Claims(tmp_path) as ours, Claims(tmp_path) as theirs:
        assert ours.take("a")
        assert not ours.take("a")
        assert not theirs.take("a")
        assert theirs.take("b")
        ours.give_back("a")
        assert theirs.take("a")
    assert list(tmp_path.iterdir()) == []


def take_and_wait(folder: Path, ready: Any) -> None:
    Claims(folder).take("a")
    ready.set()
    signal.pause()


def test_a_killed_process_of_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    holder = spawn.Process(target=take_and_wait, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(120)
    with Claims(tmp_path) as ours:
        assert not ours.take("a")
        os.kill(holder.pid or 0, signal.SIGKILL)
        holder.join()
        assert ours.take("a")
    assert list(tmp_path.iterdir()) == []


def test_a_silent_holder_elsewhere_is_followed_after_the_patience(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher's clock alone counts, from when it first saw the claim."""
    on_machine("far", monkeypatch)
    holder = Claims(tmp_path)  # outside `with` it gives no signs of life
    assert holder.take("a")
    on_machine("near", monkeypatch)
    clock.now = 1000.0
    watcher = Claims(tmp_path)
    assert not watcher.take("a")
    clock.now += claims.PATIENCE - 1
    assert not watcher.take("a")
    clock.now += 1
    assert watcher.take("a")
    assert not Claims(tmp_path).take("a")  # the new holder counts from now on


def test_a_sign_of_life_begins_the_patience_anew(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine("far", monkeypatch)
    holder = Claims(tmp_path)
    assert holder.take("a")
    on_machine("near", monkeypatch)
    watcher = Claims(tmp_path)
    for beat in range(1, 4):
        assert not watcher.take("a")
        clock.now += claims.PATIENCE
        holder._beat = beat
        holder._sign(holder._held["a"])
    assert not watcher.take("a")


def test_signs_of_life_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(claims.TIMEOUT, "0.06")
    with Claims(tmp_path) as ours:
        ours.take("a")
        (file,) = tmp_path.iterdir()
        before = file.read_bytes()
        waited = threading.Event()
        for _ in range(60_000):  # only ends a hang
            if file.read_bytes() != before:
                break
            waited.wait(0.01)
        assert file.read_bytes() != before


def test_a_slow_holder_does_not_disturb_the_one_that_followed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine("far", monkeypatch)
    slow = Claims(tmp_path)
    slow.take("a")
    on_machine("near", monkeypatch)
    second = Claims(tmp_path)
    second.take("a")
    clock.now += claims.PATIENCE
    assert second.take("a")
    slow.give_back("a")
    third = Claims(tmp_path)
    assert not third.take("a")
    second.give_back("a")
    assert third.take("a")


def test_two_watchers_of_one_dead_holder(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen it dead; the second must not take the claim of the first."""
    on_machine("far", monkeypatch)
    Claims(tmp_path).take("a")
    on_machine("near", monkeypatch)
    watchers = [Claims(tmp_path), Claims(tmp_path)]
    assert [one.take("a") for one in watchers] == [False, False]
    clock.now += claims.PATIENCE
    assert [one.take("a") for one in watchers] == [True, False]


def test_a_claim_that_was_never_written_is_followed_too(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "a.0.claim").touch()
    watcher = Claims(tmp_path)
    assert not watcher.take("a")
    clock.now += claims.PATIENCE
    assert watcher.take("a")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_patience_that_is_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(claims.TIMEOUT, text)
    with pytest.raises(InputError, match=f"number of seconds above 0, got '{text}'"):
        Claims(tmp_path)


# ---- locks for several ----


def in_thread(work: Any) -> list[Any]:
    """What a call in another thread returns, or its InputError; a thread has its own locks."""
    found: list[Any] = []

    def call() -> None:
        try:
            found.append(work())
        except InputError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found


def join(folder: Path, purpose: str | None, first: Any = lambda: None) -> str:
    with Lock(folder, purpose, first):
        return "in"


def test_those_of_one_purpose_share_a_folder(tmp_path: Path) -> None:
    leftover = tmp_path / ".a.npz.0123456789abcdef.tmp"
    firsts: list[str] = []
    with Lock(tmp_path, "sweep 1", lambda: firsts.append("ours")):
        leftover.touch()  # somebody may just be writing it
        assert in_thread(lambda: join(tmp_path, "sweep 1", lambda: firsts.append("x"))) == ["in"]
        assert leftover.exists()
        for purpose in ("sweep 2", None):
            (error,) = in_thread(lambda purpose=purpose: join(tmp_path, purpose))
            assert f"is being written by process {os.getpid()} on " in str(error)
        assert in_thread(lambda: join(tmp_path, "sweep 1")) == ["in"]
    assert firsts == ["ours"]
    assert not (tmp_path / ".lock").exists()
    assert join(tmp_path, "sweep 2") == "in"
    assert not leftover.exists()


def test_nobody_joins_a_writer_who_does_not_share(tmp_path: Path) -> None:
    with Lock(tmp_path):
        (error,) = in_thread(lambda: join(tmp_path, "sweep 1"))
    assert "is being written by" in str(error)


def test_others_wait_until_the_first_has_put_the_folder_in_order(tmp_path: Path) -> None:
    order: list[str] = []
    second = threading.Thread(target=lambda: (join(tmp_path, "sweep 1"), order.append("second")))

    def first() -> None:
        second.start()
        second.join(0.3)  # it cannot end, however long this is
        order.append("first")

    with Lock(tmp_path, "sweep 1", first):
        second.join()
    assert order == ["first", "second"]


def test_a_first_that_fails_lets_the_folder_go(tmp_path: Path) -> None:
    def fail() -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"), Lock(tmp_path, "sweep 1", fail):
        pass
    assert in_thread(lambda: join(tmp_path, None)) == ["in"]
