"""Several sweeps on one folder: nothing twice, nothing lost, the same table for all."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsso
from fedsso import FedAvg, Federation, FedSSO, InputError
from fedsso.algorithm import Algorithm
from fedsso.experiment.execute import run_chunk
from fedsso.experiment.plan import Planned, plan
from fedsso.experiment.store import held, read_all, save_part
from fedsso.experiment.workers import Agenda, in_order
from fedsso.support.claims import Claims

RECORDS: list[Algorithm] = [FedAvg(alpha=0.1), FedSSO(alpha=0.1), FedSSO(alpha=0.1, form="dfp")]


@pytest.fixture
def planned(fed: Federation) -> list[Planned]:
    """Three runs that do not stack."""
    return plan(fed, "mclr", RECORDS, (0,), {"rounds": 3, "device": "cpu"})


def agenda(planned: list[Planned], folder: Path) -> Agenda:
    identities = [run.spec.identity for run in planned]
    return Agenda(identities, [[0], [1], [2]], folder, Claims(folder))


def finish(one: Agenda, planned: list[Planned], part: Any) -> None:
    """Train a part and keep it, as a sweep does."""
    runs = run_chunk([planned[i] for i in part], None, 1000)
    save_part(one.folder, [replace(run, judged_by="test") for run in runs])
    one.finish(part)


def test_two_sweeps_never_have_the_same_part(planned: list[Planned], tmp_path: Path) -> None:
    one, other = agenda(planned, tmp_path), agenda(planned, tmp_path)
    assert [one.take(), other.take(), one.take(), other.take()] == [[0], [1], [2], None]
    finish(other, planned, [1])
    assert (sorted(one.news()), one.news()) == ([1], [])
    finish(one, planned, [0])
    finish(one, planned, [2])
    assert not one.left
    assert sorted(other.news()) == [0, 2]
    assert not other.left
    one.tidy()
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}


def test_what_was_finished_before_the_claim_is_not_run_again(
    planned: list[Planned], tmp_path: Path
) -> None:
    """One looks at the folder; the other finishes a part and gives it back; then one claims it."""
    one, other = agenda(planned, tmp_path), agenda(planned, tmp_path)
    assert other.take() == [0]
    finish(other, planned, [0])
    assert one.take() == [1]


def test_a_slow_holder_and_its_follower_write_one_trial(
    planned: list[Planned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsso.support.claims.platform.node", lambda: "far")
    slow = agenda(planned, tmp_path)
    slow.take()
    monkeypatch.setattr("fedsso.support.claims.platform.node", lambda: "near")
    follower = agenda(planned, tmp_path)
    follower.claims.patience = 0.0  # at the second look at the latest
    assert [1] in (follower.take(), follower.take())
    follower.claims.patience = 60.0
    assert follower._under_way.keys() == {0, 1}
    finish(follower, planned, [0])
    finish(slow, planned, [0])
    finish(follower, planned, [1])
    assert len(read_all(tmp_path)) == len(held(tmp_path)) == 2


def test_who_has_nothing_to_do_waits_for_the_others(planned: list[Planned], tmp_path: Path) -> None:
    other = agenda(planned, tmp_path)
    part = other.take()
    waits: list[list[int]] = []

    class Tally:
        seen: list[int] = []  # noqa: RUF012

        def round(self, *_: Any) -> None: ...
        def end(self, part: Any) -> None:
            self.seen.extend(part)

        def elsewhere(self, trials: Any) -> None:
            self.seen.extend(trials)

        def wait(self) -> None:
            waits.append(sorted(self.seen))
            if len(waits) == 1:
                finish(other, planned, part)

    mine = agenda(planned, tmp_path)
    mine.pause = 0.0
    in_order(planned, mine, np.inf, Tally())
    assert waits == [[1, 2]]
    assert sorted(Tally.seen) == [0, 1, 2]


def test_several_calls_share_a_folder_and_others_are_refused(
    fed: Federation, tmp_path: Path
) -> None:
    alone = fedsso.sweep(fed, "mclr", RECORDS, rounds=4, device="cpu")
    found: list[Any] = []
    inner: list[threading.Thread] = []

    def call(rounds: int) -> None:
        try:
            found.append(
                fedsso.sweep(fed, "mclr", RECORDS, rounds=rounds, device="cpu", out=tmp_path)
            )
        except InputError as error:
            found.append(str(error))

    def join_in(*_: Any) -> None:
        if not inner:
            inner.extend(threading.Thread(target=call, args=(rounds,)) for rounds in (5, 4))
            inner[0].start()
            inner[0].join()
            inner[1].start()

    ours = fedsso.sweep(
        fed, "mclr", RECORDS, rounds=4, device="cpu", out=tmp_path, progress=join_in
    )
    inner[1].join()
    assert "is being written by process" in found[0]
    for results in (ours, found[1]):
        assert [run.spec for run in results] == [run.spec for run in alone]
    assert len(held(tmp_path / "parts")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "table.md", "trials.csv"]


# ---- several devices ----


def test_parts_are_dealt_to_several_devices(fed: Federation, tmp_path: Path) -> None:
    steps = fedsso.grid("fedavg", {"alpha": [0.01, 0.03, 0.1, 0.3]})
    options = {"rounds": 4, "dtype": "float64"}
    one = fedsso.sweep(fed, "mclr", steps, device="cpu", **options)
    two = fedsso.sweep(fed, "mclr", steps, device="cpu,cpu", out=tmp_path, **options)
    assert len(list((tmp_path / "parts").iterdir())) == 2  # half of the trials for each
    assert [run.spec for run in two] == [run.spec for run in one]
    for mine, like in zip(two, one, strict=True):
        # Another batch size may sum in another order: four rounds in double precision.
        np.testing.assert_allclose(mine.trace["train_loss"], like.trace["train_loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device": "cpu,tpu"}, "'tpu'"),
        ({"device": ["cpu", "cpu"], "jobs": 2}, r"jobs=2 and device=cpu,cpu .* leave jobs out"),
        ({"at_once": 0}, r"at_once.*0"),
    ],
)
def test_devices_and_batches_that_cannot_be(
    options: dict[str, Any], told: str, fed: Federation
) -> None:
    with pytest.raises(InputError, match=told):
        fedsso.sweep(fed, "mclr", RECORDS, rounds=2, **options)


def test_at_once_cuts_the_parts(fed: Federation, tmp_path: Path) -> None:
    steps = fedsso.grid("fedavg", {"alpha": [0.01, 0.03, 0.1]})
    fedsso.sweep(fed, "mclr", steps, rounds=2, device="cpu", at_once=2, out=tmp_path)
    assert len(list((tmp_path / "parts").iterdir())) == 2


# ---- processes that are killed ----

LONG = ["--clients", "3", "--device", "cpu", "--rounds", "40", "--algorithms", "fedsso,fedavg"]
LONG += ["--eta", "0.3,1", "--alpha", "0.01,0.03,0.1,0.3", "--form", "bfgs,dfp", "--seeds", "0,1"]


def started(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedsso", "sweep", *LONG, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trials(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))


@pytest.mark.full
def test_one_of_two_sweeps_is_killed(tmp_path: Path) -> None:
    """The other one does all, and has the table of a sweep that was alone."""
    alone = started(tmp_path / "alone")
    printed, said = alone.communicate(timeout=600)
    assert alone.returncode == 0, said
    shared = tmp_path / "two"
    both = [started(shared), started(shared)]
    limit = time.monotonic() + 600  # only ends a hang
    while len(list((shared / "parts").glob("*.npz"))) < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)
    both[0].kill()
    both[0].communicate()
    output, said = both[1].communicate(timeout=600)
    assert both[1].returncode == 0, said
    assert output == printed.replace(str(tmp_path / "alone"), str(shared))
    assert (shared / "table.md").read_text() == (tmp_path / "alone" / "table.md").read_text()
    assert trials(shared) == trials(tmp_path / "alone")
    assert len({row["identity"] for row in trials(shared)}) == len(trials(shared)) == 48
    names = sorted(path.name for path in (tmp_path / "alone" / "parts").iterdir())
    assert sorted(path.name for path in (shared / "parts").iterdir()) == names
    assert not os.path.exists(shared / ".lock")
