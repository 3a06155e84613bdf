"""The parts of a sweep, one after the other or on several processes of one machine.

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
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import InputError
from .execute import Look, Progress, run_chunk
from .store import save_part

if TYPE_CHECKING:
    from .plan import Planned

Part = Sequence[int]
NEVER = 1 << 60  # rounds between checkpoints: a part is kept when it is finished


class Tally(Protocol):
    """Told of every round, and of every part that is written."""

    def round(self, part: Part, k: int, label: str, numbers: dict[str, float]) -> None: ...
    def end(self, part: Part) -> None: ...


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


def in_order(
    planned: Sequence[Planned],
    parts: Sequence[Part],
    folder: Path,
    deadline: float,
    tally: Tally,
    look: Look | None = None,
    judged_by: str = "test",
) -> None:
    """One part after the other, in this process.

    Args:
        planned: All trials of the plan.
        parts: The indices of the trials of each part.
        folder: Where finished parts are written.
        deadline: Of `time.monotonic()`; no part begins after it.
        tally: Told of every round and part.
        look: Shown the traces now and then, or None.
        judged_by: The rows that are evaluated.

    Raises:
        OutOfTime: The deadline has passed and parts are left.
    """
    for number, part in enumerate(parts):
        if time.monotonic() >= deadline:
            raise _out_of_time(parts[number:], parts)

        def show(label: str, k: int, _: int, numbers: dict[str, float], part: Part = part) -> None:
            tally.round(part, k, label, numbers)

        _run_part([planned[i] for i in part], folder, show, look, judged_by)
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


def _out_of_time(left: Sequence[Part], parts: Sequence[Part]) -> OutOfTime:
    """The error for parts that are left."""
    return OutOfTime(f"{len(left)} of {len(parts)} parts are left")


def in_processes(
    arguments: Any,
    parts: Sequence[Part],
    folder: Path,
    jobs: int,
    deadline: float,
    tally: Tally,
    look: Look | None = None,
    judged_by: str = "test",
) -> None:
    """Several parts at a time, on processes that take one part after the other.

    Args:
        arguments: Those of `plan.plan`; they must be picklable.
        parts: The indices of the trials of each part.
        folder: Where finished parts are written.
        jobs: How many processes.
        deadline: Of `time.monotonic()`; no part begins after it.
        tally: Told of every round and part.
        look: Shown the traces now and then, or None.
        judged_by: The rows that are evaluated.

    Raises:
        OutOfTime: The deadline has passed and parts are left.
        InputError: A process failed or was killed, or the arguments cannot be pickled.
    """
    waiting = list(parts)
    busy: dict[Any, Part] = {}  # what each process is at
    with _started(jobs, folder, _pickled((arguments, judged_by)), look is not None) as idle:
        while True:
            while idle and waiting and time.monotonic() < deadline:
                pipe = idle.pop()
                busy[pipe] = waiting.pop(0)
                with _alive():
                    pipe.send(busy[pipe])
            if not busy:
                break
            for pipe in connection.wait(list(busy)):
                kind, content = _received(pipe)
                if kind == "round":
                    tally.round(busy[pipe], *content)
                elif kind == "look" and look is not None:
                    look(*content)
                else:
                    tally.end(busy.pop(pipe))
                    idle.append(pipe)
    if waiting:
        raise _out_of_time(waiting, parts)


def _pickled(arguments: Any) -> bytes:
    """The arguments as bytes; an InputError where they cannot be pickled, as a lambda cannot."""
    try:
        return pickle.dumps(arguments)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"other processes cannot be given this model, loss or metric ({error}); use jobs=1"
        ) from error


@contextmanager
def _started(jobs: int, folder: Path, arguments: bytes, looks: bool) -> Iterator[list[Any]]:
    """Pipes to processes that have been given the arguments; all of them end with the block.

    They are spawned, not forked: a fork of a process that has used threads or a GPU may hang.
    """
    spawn, workers, pipes = get_context("spawn"), [], []
    try:
        for _ in range(jobs):
            ours, theirs = spawn.Pipe()
            worker = spawn.Process(target=_work, args=(theirs, folder, jobs, looks), daemon=True)
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


def _work(pipe: Any, folder: Path, jobs: int, looks: bool) -> None:
    """The life of a process: a plan, then parts until it is ended.

    Args:
        pipe: To the main process.
        folder: Where it writes its parts.
        jobs: How many processes there are, which share the cores.
        looks: Whether the main process wants to see traces.
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
        from .plan import plan

        planned = plan(*arguments)
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
