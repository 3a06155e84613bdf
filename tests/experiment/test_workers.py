"""Parts on several processes: the same result, and a clear word however a process ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedsso import FedAvg, Federation, FedSSO
from fedsso.algorithm import Algorithm
from fedsso.errors import InputError
from fedsso.experiment.plan import plan
from fedsso.experiment.store import held
from fedsso.experiment.workers import Agenda, OutOfTime, in_order, in_processes
from fedsso.support.claims import Claims
from studies import study

RECORDS: list[Algorithm] = [FedAvg(alpha=0.1), FedSSO(alpha=0.1), FedSSO(alpha=0.1, form="dfp")]
PARTS = [[0], [1], [2]]


def arguments(fed: Federation, **options: Any) -> tuple[Any, ...]:
    """Three runs that do not stack: three parts."""
    return fed, "mclr", RECORDS, (0,), {"rounds": 4, "device": "cpu", **options}


def agenda(fed: Federation, folder: Path, **options: Any) -> Agenda:
    """The three parts of these runs, none of them claimed by anybody else."""
    identities = [run.spec.identity for run in plan(*arguments(fed, **options))]
    return Agenda(identities, PARTS, folder, Claims(folder))


class Tally:
    """Remembers what it was told, and does something at the first round."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        self.rounds: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.first = first

    def round(self, part: Sequence[int], k: int, label: str, numbers: dict[str, float]) -> None:
        assert label
        assert 0 <= numbers["test_accuracy"] <= 1
        if not self.rounds:
            self.first()
        self.rounds.append((part[0], k))

    def end(self, part: Sequence[int]) -> None:
        self.ended.append(part[0])

    def elsewhere(self, trials: Sequence[int]) -> None:
        assert not trials, "nobody else is there"

    def wait(self) -> None:
        raise AssertionError("nobody else is there")


class Deadline(float):
    """A time that has come once it is said to."""

    come = False

    def __gt__(self, now: float) -> bool:
        return not self.come

    def __le__(self, now: float) -> bool:
        return self.come


def test_processes_do_what_one_does(fed: Federation, tmp_path: Path) -> None:
    alone = study(fed, "mclr", RECORDS, seeds=(0, 1), rounds=4, device="cpu")
    told: list[int] = []
    done = study(
        fed, "mclr", RECORDS, seeds=(0, 1), rounds=4, device="cpu", jobs=2, out=tmp_path,
        progress=lambda *row: told.append(row[1]),
    )  # fmt: skip
    assert sorted(told) == sorted([1, 2, 3, 4] * 6)  # four rounds of each of six parts
    assert [run.spec for run in done] == [run.spec for run in alone]
    for one, other in zip(alone, done, strict=True):
        np.testing.assert_allclose(one.trace["test_loss"], other.trace["test_loss"], rtol=1e-5)
    assert active_children() == []


def test_the_deadline_falls_between_two_parts(fed: Federation, tmp_path: Path) -> None:
    deadline = Deadline()
    tally = Tally(lambda: setattr(deadline, "come", True))
    with pytest.raises(OutOfTime, match="2 of 3 parts are left"):
        in_order(plan(*arguments(fed)), agenda(fed, tmp_path), deadline, tally)
    assert (tally.ended, len(held(tmp_path)), tally.rounds[-1]) == ([0], 1, (0, 4))


@pytest.mark.full
def test_at_the_deadline_every_process_ends_its_part(fed: Federation, tmp_path: Path) -> None:
    deadline = Deadline()
    tally = Tally(lambda: setattr(deadline, "come", True))
    with pytest.raises(OutOfTime, match="1 of 3 parts are left"):
        in_processes(arguments(fed), agenda(fed, tmp_path), [None, None], deadline, tally)
    assert (sorted(tally.ended), len(held(tmp_path))) == ([0, 1], 2)
    assert active_children() == []


def test_no_part_begins_after_the_deadline(fed: Federation, tmp_path: Path) -> None:
    with pytest.raises(OutOfTime, match="3 of 3"):
        in_order(plan(*arguments(fed)), agenda(fed, tmp_path), time.monotonic(), Tally())
    assert held(tmp_path) == {}


def test_a_killed_process_is_told(fed: Federation, tmp_path: Path) -> None:
    def kill() -> None:
        pid = active_children()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    long = arguments(fed, rounds=3000)
    with pytest.raises(
        InputError,
        match=r"unexpectedly; finished parts are kept.*memory ran out, use fewer jobs",
    ):
        in_processes(long, agenda(fed, tmp_path, rounds=3000), [None], np.inf, Tally(kill))
    assert active_children() == []


def test_the_error_of_a_process_is_told_as_it_is(fed: Federation, tmp_path: Path) -> None:
    there = agenda(fed, tmp_path)
    there.folder = tmp_path / "file"
    there.folder.write_text("x")
    with pytest.raises(InputError, match=r"cannot write .*file.*a folder that can be written"):
        in_processes(arguments(fed), there, [None], np.inf, Tally())
    assert active_children() == []


def broken(z: Tensor, y: Tensor) -> float:
    raise RuntimeError(f"{tuple(z.shape)} and {tuple(y.shape)} do not please me")


@pytest.mark.full
def test_any_other_failure_is_one_line(fed: Federation, tmp_path: Path) -> None:
    asked = arguments(fed, metrics=(broken,))
    with pytest.raises(
        InputError, match=r"a process of the sweep failed \(RuntimeError: .* do not please me\)"
    ):
        in_processes(asked, agenda(fed, tmp_path), [None], np.inf, Tally())


def test_what_cannot_be_sent_to_a_process(fed: Federation) -> None:
    class Local(nn.Linear):
        """Known in this function alone."""

    with pytest.raises(InputError, match=r"cannot be given this model.*use jobs=1"):
        study(fed, Local(4, 3), RECORDS, rounds=2, device="cpu", jobs=2)
