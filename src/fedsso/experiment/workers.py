"""The parts of a sweep, one after the other or on several processes of one machine.

Several sweeps may share a folder, also from several machines. `Agenda` knows which parts are left,
and takes one for this sweep under a claim (`support/claims.py`).

Each process makes the same plan from the same pickled arguments, receives the numbers of the runs
of a part over a pipe, and writes the part itself. When the main process dies, the others end.

The main process hands out parts, and hears of every round, of traces to look at, of the end of a
part, and of errors. No tensors travel but those of the arguments.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import InputError
from ..support.claims import BEATS, Claims
from .execute import Look, Progress, run_chunk
from .store import held, save_part
from .together import wait_together

if TYPE_CHECKING:
    from .plan import Planned

Part = Sequence[int]
NEVER = 1 << 60  # rounds between checkpoints: a part is kept when it is finished


class Tally(Protocol):
    """Told of every round, and of every part that is written."""

    def round(self, part: Part, k: int, label: str, numbers: dict[str, float]) -> None: ...
    def end(self, part: Part) -> None: ...
    def elsewhere(self, trials: Sequence[int]) -> None: ...  # others have finished them
    def wait(self) -> None: ...  # now and then, while others are at all that is left


class OutOfTime(Exception):
    """A sweep stopped because its time was up; the same call continues it.

    >>> import fedsso
    >>> fed = fedsso.load("digits", clients=5)
    >>> try:
    ...     results = fedsso.sweep(fed, "mclr", ["fedavg"], rounds=2, minutes=1e-9)
    ... except OutOfTime as late:
    ...     print(late)
    1 of 1 parts are left; give it more minutes, or out= to keep finished work and continue later
    """


class Agenda:
    """The parts of a plan that are left to do, here or in other sweeps that share the folder.

    A part is taken under a claim, so that nobody else does it at the same time. What somebody else
    has finished is found in the folder, and is no longer left.

    Args:
        identities: Of all trials of the plan.
        parts: The indices of the trials of each part. Every process that shares the folder must
            cut the plan alike, or some trials are run twice.
        folder: Where finished parts are written.
        claims: Those of this process, in the same folder: creating a claim there makes a network
            file system list the folder anew.
    """

    def __init__(
        self,
        identities: Sequence[str],
        parts: Sequence[Part],
        folder: Path,
        claims: Claims,
    ) -> None:
        self.identities = identities
        self.folder = folder
        self.claims = claims
        self.pause = min(1.0, claims.patience / BEATS)  # seconds between two looks at the folder
        self.left = {self._name(part): part for part in parts}
        self._names = set(self.left)
        self.open = set(range(len(identities)))  # trials that nobody has finished
        self._known: set[Path] = set()  # files of parts that were read
        self._under_way: dict[int, str] = {}  # names of our parts, by their first trial
        self._busy: set[int] = set()  # their trials
        self._news: list[int] = []
        self.news()
        self.size = len(self.left)  # parts to do

    def _name(self, part: Part) -> str:
        """What a part is called in claims."""
        text = "".join(self.identities[i] for i in part)
        return sha256(text.encode()).hexdigest()[:16]

    def take(self) -> Part | None:
        """A part that is to be done now; None if others are at all that are left.

        Returns:
            The indices of its trials that are not finished.
        """
        for name, part in list(self.left.items()):
            if not self.claims.take(name):
                continue
            self._look()  # who had it before us may have finished it
            todo = [i for i in part if i in self.open]
            if todo:
                self._under_way[todo[0]] = name
                self._busy.update(todo)
                return todo
            self.claims.give_back(name)
        return None

    def finish(self, part: Part) -> None:
        """A part that was taken is written."""
        self._busy.difference_update(part)
        self._close(part)
        self.claims.give_back(self._under_way.pop(part[0]))

    def news(self) -> list[int]:
        """The trials that others have finished since this was asked last."""
        self._look()
        news = self._news
        self._news = []
        return news

    def _look(self) -> None:
        """Find what others have finished meanwhile."""
        found = held(self.folder, self._known)
        new = [i for i in sorted(self.open - self._busy) if self.identities[i] in found]
        self._close(new)
        self._news += new

    def _close(self, trials: Sequence[int]) -> None:
        """Some trials are finished, and with them perhaps parts."""
        self.open.difference_update(trials)
        for name, part in list(self.left.items()):
            if self.open.isdisjoint(part):
                del self.left[name]

    def wait(self, tally: Tally) -> None:
        """Let some time pass: others are at what is left."""
        wait_together()
        tally.wait()
        time.sleep(self.pause)

    def tidy(self) -> None:
        """Remove the claims that killed processes have left, when all is done."""
        self.claims.forget(self._names)

    def out_of_time(self) -> OutOfTime:
        """The error for parts that are left."""
        return OutOfTime(f"{len(self.left)} of {self.size} parts are left")


def in_order(
    planned: Sequence[Planned],
    agenda: Agenda,
    deadline: float,
    tally: Tally,
    look: Look | None = None,
    judged_by: str = "test",
) -> None:
    """One part after the other, in this process, until none is left here or elsewhere.

    Args:
        planned: All trials of the plan.
        agenda: The parts that are left.
        deadline: Of `time.monotonic()`; no part begins after it.
        tally: Told of every round and part.
        look: Shown the traces now and then, or None.
        judged_by: The rows that are evaluated.

    Raises:
        OutOfTime: The deadline has passed and parts are left.
    """
    while agenda.left:
        if time.monotonic() >= deadline:
            raise agenda.out_of_time()
        part = agenda.take()
        tally.elsewhere(agenda.news())
        if part is None:
            if agenda.left:
                agenda.wait(tally)
            continue

        def show(label: str, k: int, _: int, numbers: dict[str, float], part: Part = part) -> None:
            tally.round(part, k, label, numbers)

        _run_part([planned[i] for i in part], agenda.folder, show, look, judged_by)
        agenda.finish(part)
        tally.end(part)


def _run_part(
    part: Sequence[Planned],
    folder: Path,
    show: Progress,
    look: Look | None,
    judged_by: str,
) -> None:
    """Train the trials of a part and write it."""
    runs = run_chunk(part, show, NEVER, look)
    save_part(folder, [replace(run, judged_by=judged_by) for run in runs])


def in_processes(
    arguments: Any,
    agenda: Agenda,
    devices: Sequence[str | None],
    deadline: float,
    tally: Tally,
    look: Look | None = None,
    judged_by: str = "test",
) -> None:
    """Several parts at a time, on processes that take one part after the other.

    Args:
        arguments: Those of `plan.plan`; they must be picklable.
        agenda: The parts that are left.
        devices: Where each process computes; None: where the arguments say.
        deadline: Of `time.monotonic()`; no part begins after it.
        tally: Told of every round and part.
        look: Shown the traces now and then, or None.
        judged_by: The rows that are evaluated.

    Raises:
        OutOfTime: The deadline has passed and parts are left.
        InputError: A process failed or was killed, or the arguments cannot be pickled.
    """
    busy: dict[Any, Part] = {}  # what each process is at
    pickled = _pickled((arguments, judged_by))
    with _started(devices, agenda.folder, pickled, look is not None) as idle:
        while agenda.left:
            while idle and time.monotonic() < deadline and (part := agenda.take()) is not None:
                pipe = idle.pop()
                busy[pipe] = part
                with _alive():
                    pipe.send(part)
            tally.elsewhere(agenda.news())
            if not busy and agenda.left:
                if time.monotonic() >= deadline:
                    break
                agenda.wait(tally)
            # Who has nothing to do looks again what others have left.
            for pipe in connection.wait(list(busy), agenda.pause if idle else None):
                kind, content = _received(pipe)
                if kind == "round":
                    tally.round(busy[pipe], *content)
                elif kind == "look" and look is not None:
                    look(*content)
                else:
                    part = busy.pop(pipe)
                    agenda.finish(part)
                    tally.end(part)
                    idle.append(pipe)
    if agenda.left:
        raise agenda.out_of_time()


def _pickled(arguments: Any) -> bytes:
    """The arguments as bytes; an InputError where they cannot be pickled, as a lambda cannot."""
    try:
        return pickle.dumps(arguments)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"other processes cannot be given this model, loss or metric ({error}); use jobs=1"
        ) from error


@contextmanager
def _started(
    devices: Sequence[str | None],
    folder: Path,
    arguments: bytes,
    looks: bool,
) -> Iterator[list[Any]]:
    """Pipes to processes that have been given the arguments; all of them end with the block.

    They are spawned, not forked: a fork of a process that has used threads or a GPU may hang.
    """
    spawn, workers, pipes = get_context("spawn"), [], []
    try:
        for device in devices:
            ours, theirs = spawn.Pipe()
            given = (theirs, folder, len(devices), looks, device)
            worker = spawn.Process(target=_work, args=given, daemon=True)
            with _deaf():
                worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        # After all have been started: sending blocks until a process is up and reads.
        for pipe in pipes:
            with _alive():
                pipe.send_bytes(arguments)
        yield pipes
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


@contextmanager
def _deaf() -> Iterator[None]:
    """A process that starts here never hears Ctrl-C, which is for the main process."""
    resource_tracker.ensure_running()  # it would unblock the signal if the first start began it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _alive() -> Iterator[None]:
    """Talking to a process that is gone becomes an error with a remedy."""
    try:
        yield
    except (EOFError, OSError) as error:
        # A new process imports the script that started it. Without the guard it would call the
        # sweep again, which Python forbids: it dies, and its traceback is on standard error.
        raise InputError(
            "a process of the sweep ended unexpectedly; finished parts are kept. If "
            "memory ran out, use fewer jobs; your own script must call the sweep below "
            '`if __name__ == "__main__":`, or use jobs=1'
        ) from error


def _received(pipe: Any) -> tuple[str, Any]:
    """The next message of a process: its kind and its content. An error is raised here."""
    with _alive():
        kind, content = pipe.recv()
    if kind == "error":
        raise InputError(content)
    return kind, content


def _work(
    pipe: Any,
    folder: Path,
    jobs: int,
    looks: bool,
    device: str | None,
) -> None:
    """The life of a process: a plan, then parts until it is ended.

    Args:
        pipe: To the main process.
        folder: Where it writes its parts.
        jobs: How many processes there are, which share the cores.
        looks: Whether the main process wants to see traces.
        device: Where it computes; None: where the arguments say.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def show(label: str, k: int, _: int, numbers: dict[str, float]) -> None:
        """Send the numbers of a round."""
        pipe.send(("round", (k, label, numbers)))

    def look(*content: Any) -> None:
        """Send traces to look at."""
        pipe.send(("look", content))

    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    try:
        arguments, judged_by = pickle.loads(pipe.recv_bytes())
        from .plan import Question, plan

        question = Question(*arguments)
        if device is not None:
            question = question._replace(options={**question.options, "device": device})
        planned = plan(*question)
        while True:
            part = pipe.recv()
            trials = [planned[i] for i in part]
            _run_part(trials, folder, show, look if looks else None, judged_by)
            pipe.send(("done", None))
    except (EOFError, ConnectionError):  # nobody is there any more
        return
    except InputError as error:
        pipe.send(("error", str(error)))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        pipe.send(("error", f"a process of the sweep failed ({what}); use jobs=1 to see where"))


def _end_with_parent() -> None:
    """End this process when the main process is gone, even in the middle of a long round."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(1)
