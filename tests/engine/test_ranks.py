"""Runs on several processes, started by torchrun with gloo: the same traces as in one."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ranks_job
import torch
from torch import Tensor

from fedsso import InputError, load_run
from fedsso.engine import ranks, simulate
from fedsso.engine.dealing import Dealing
from fedsso.engine.ranks import TIMEOUT, Ranks, Team, checksum, deal, patience

WAIT = 600.0  # seconds, only to end a hang
# Five rounds of damped problems: one process with clients one by one stays within the same bounds
# of one that stacks them (test_contract.py). Single precision has 1.2e-7 for each operation.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
EXACT = ("bytes_up", "bytes_down", "overridden", "skipped", "test_accuracy")
OWN = ("seconds", "reduce_bytes", "reduce_seconds")  # of the number of ranks, and of the clock
OPTIONS = {
    "--dataset": "digits",
    "--clients": "6",
    "--algorithm": "scaffold",
    "--model": "mlp",
    "--alpha": "0.05",
    "--participation": "0.5",
    "--eval-every": "20",
    "--checkpoint-every": "7",
}
COMMAND = ["run", *itertools.chain(*OPTIONS.items())]


def started(ranks: int, *arguments: str, **how: Any) -> subprocess.Popen[str]:
    """torchrun with so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *launcher, str(ranks), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, **{**streams, **how})


def finished(process: subprocess.Popen[str]) -> str:
    """What a process has printed until its end."""
    try:
        return process.communicate(timeout=WAIT)[0]
    finally:
        process.kill()


def outcome(ranks: int, folder: Path, *how: str) -> dict[str, Any]:
    """The results of all cases with so many ranks; the rest as for `ranks_job.main`."""
    written = folder / f"{ranks}.pt"
    with started(ranks, ranks_job.__file__, str(written), *how) as process:
        printed = finished(process)
    assert process.returncode == 0, printed
    found: dict[str, Any] = torch.load(written)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Every algorithm in this one process."""
    ranks_job.main(str(folder / "1.pt"), "some", "whole,begun")
    found: dict[str, Any] = torch.load(folder / "1.pt")
    return found


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same trace and models to rounding, in every case."""
    assert ours.keys() == theirs.keys()
    for label in ours:
        one, other = ours[label], theirs[label]
        bound = CLOSE[one["models"].dtype]
        assert torch.equal(one["diverged"], other["diverged"]), label
        gap = float((one["models"] - other["models"]).norm())
        assert gap <= bound * float(one["models"].norm()), label
        assert one["columns"].keys() | set(OWN) == other["columns"].keys() | set(OWN), label
        for name in one["columns"].keys() - set(OWN):
            rtol = 0.0 if name in EXACT else bound
            message = f"{label}: {name}"
            left, right = one["columns"][name], other["columns"][name]
            np.testing.assert_allclose(left, right, rtol=rtol, atol=1e-12, err_msg=message)


def test_two_and_three_ranks_follow_one(folder: Path, alone: dict[str, Any]) -> None:
    """Every algorithm: three ranks from the start, and two from a state that one has left."""
    three = outcome(3, folder, "some", "whole")
    same(alone["whole"], three["whole"])
    two = outcome(2, folder, "some", "continued", str(folder / "1.pt"))
    same(alone["whole"], two["continued"])


@pytest.mark.full
def test_every_variant_on_any_number_of_ranks(tmp_path: Path) -> None:
    """States of one rank go on with two, those of two with three, and those of three with one."""
    ranks_job.main(str(tmp_path / "1.pt"), "all", "whole,begun")
    alone = torch.load(tmp_path / "1.pt")
    everything = "whole,begun,continued"
    two = outcome(2, tmp_path, "all", everything, str(tmp_path / "1.pt"))
    three = outcome(3, tmp_path, "all", everything, str(tmp_path / "2.pt"))
    for found in (two, three):
        same(alone["whole"], found["whole"])
        same(alone["whole"], found["continued"])
    again = outcome(2, tmp_path, "all", "continued", str(tmp_path / "2.pt"))["continued"]
    for label, one in two["whole"].items():  # with the same number of ranks to the bit
        assert torch.equal(one["models"], again[label]["models"]), label
    ranks_job.main(str(tmp_path / "1.pt"), "all", "continued", str(tmp_path / "3.pt"))
    same(alone["whole"], torch.load(tmp_path / "1.pt")["continued"])


@pytest.mark.full
def test_eight_ranks_follow_one(folder: Path, alone: dict[str, Any]) -> None:
    """More ranks than clients in a round, and than clients."""
    same(alone["whole"], outcome(8, folder, "some", "whole")["whole"])


def test_some_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """The case is what it says: else what is forgotten would never be summed up over ranks."""
    case = dict(ranks_job.options())["forgotten"]
    caplog.set_level("INFO", "fedsso")
    with mock.patch.object(simulate, "FORGOTTEN", case.forgets):
        ranks_job.whole(case)
    assert "are forgotten" in caplog.text


LEAVING = """
import os
import torch
from fedsso.engine import ranks

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
ours = ranks.team()
assert float(ours.sum(torch.ones(1))) == 2
assert threads() > before
import torch._dynamo  # imports what would keep the group alive
ranks._leave()
assert threads() == before
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_leaving_ends_the_threads_of_the_group(tmp_path: Path) -> None:
    """One that outlives the interpreter aborts the process, at some ends and not at others."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    with started(2, str(script)) as process:
        printed = finished(process)
    assert process.returncode == 0, printed


# ---- how the work is dealt ----


def test_deal_balances_the_work() -> None:
    """Whoever gets the last client was least loaded before: loads differ by at most one client."""
    work = np.random.default_rng(0).integers(1, 1000, 200)
    for size in (1, 2, 3, 7):
        ranks = deal(work, size)
        loads = np.bincount(ranks, weights=work, minlength=size)
        assert loads.max() - loads.min() <= work.max()
        assert loads.sum() == work.sum()


def test_fewer_clients_than_ranks() -> None:
    assert sorted(deal(np.array([3, 3]), 4).tolist()) == [0, 1]
    assert deal(np.empty(0, np.int64), 4).tolist() == []


def test_one_process_is_left_alone() -> None:
    team = Team()
    tree = (torch.ones(2), (torch.zeros(3),))
    assert team.sum(tree) is tree
    assert team.share(tree) is tree
    assert team.gather(tree) == [tree]
    assert team.is_first


def test_other_bits_have_another_checksum() -> None:
    x = torch.linspace(0, 1, 1000)
    y = x.clone()
    y[500] = torch.nextafter(y[500], torch.tensor(2.0))
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(y)
    assert checksum(x.double()) != checksum(y.double())


def test_models_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose server came to other bits ends the run instead of going its own way."""
    sim = ranks_job.simulation(dict(ranks_job.cases())["one client"])

    def with_another(tree: Any) -> Any:
        """The sums of two ranks, of which the other has a model of other bits."""
        up, bad, about, clock = tree
        return 2 * up, 2 * bad, 2 * about + torch.tensor([1.0, 0.0]), clock

    other = Ranks(0, 2)
    monkeypatch.setattr(other, "sum", with_another)
    dealing = Dealing(other, sim.rounds.sizes, keeps=False)
    judged = torch.ones(1, dtype=torch.bool)
    with pytest.raises(InputError, match="machines of one kind"):
        dealing.meet(sim.now, judged, torch.zeros(1, dtype=torch.float64), 0.0)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf"])
def test_the_time_to_wait_must_be_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(InputError, match=re.escape(repr(text))):
        patience()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_an_environment_that_is_not_torchruns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**whole, name: "x"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(InputError, match=r"cannot be joined .*'x'.*start them by torchrun"):
        ranks._joined()


def test_a_launcher_that_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at its port. With the time that ranks have for a round, this would hang."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # which nobody else can take, and which does not listen
        port = str(taken.getsockname()[1])
        here = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for key, value in {**here, TIMEOUT: "1e6"}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(ranks, "MEETING", 1.0)
        with pytest.raises(InputError, match="cannot be joined"):
            ranks._joined()


# ---- commands ----


def trace_of(folder: Path) -> dict[str, Tensor]:
    """A run's trace but for the clock."""
    trace = load_run(folder).trace
    return {name: trace[name] for name in trace.columns if name not in OWN}


def same_runs(one: Path, other: Path) -> None:
    """Two folders with the same run, to rounding in single precision over its rounds."""
    left, right = trace_of(one), trace_of(other)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-3, atol=1e-5, err_msg=name)


def command(ranks: int, *arguments: str, cwd: Path, **how: Any) -> subprocess.Popen[str]:
    """The command fedsso under torchrun, or as it is."""
    if ranks > 1:
        return started(ranks, "-m", "fedsso", *arguments, cwd=cwd, **how)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    plain = [sys.executable, "-m", "fedsso", *arguments]
    return subprocess.Popen(plain, cwd=cwd, **{**streams, **how})


def done(ranks: int, *arguments: str, cwd: Path) -> str:
    """What a command prints that succeeds."""
    with command(ranks, *arguments, cwd=cwd) as process:
        printed = finished(process)
    assert process.returncode == 0, printed
    return printed


@pytest.mark.full
def test_one_rank_prints_and_writes(tmp_path: Path) -> None:
    """run, compare, resume, sweep: each line once, the same files as from one process."""
    printed = done(2, *COMMAND, "--rounds", "20", "--out", "two", cwd=tmp_path)
    assert printed.count("results: two") == 1
    assert printed.count("round 20/20") == 1
    done(1, *COMMAND, "--rounds", "20", "--out", "one", cwd=tmp_path)
    same_runs(tmp_path / "two", tmp_path / "one")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == sorted(
        p.name for p in (tmp_path / "one").iterdir()
    )
    assert "finished already" in done(2, "resume", "two", cwd=tmp_path)
    of_digits = ["--dataset", "digits", "--clients", "5", "--rounds", "5"]
    several = ["compare", "--algorithms", "fedavg,fedper", "--model", "mlp", *of_digits]
    assert done(2, *several, "--out", "several", cwd=tmp_path).count("results: several") == 1
    assert len(list((tmp_path / "several").glob("*/spec.toml"))) == 2
    grid = ["sweep", "--algorithms", "fedavg", *of_digits, "--select", "val", "--jobs", "2"]
    printed = done(2, *grid, "--out", "grid", cwd=tmp_path)
    assert printed.count("results: grid") == 1
    assert "jobs=2 is left out" in printed
    done(1, *grid[:-2], "--out", "plain", cwd=tmp_path)
    ours, theirs = ((tmp_path / name / "table.md").read_text() for name in ("grid", "plain"))
    assert ours == theirs


@pytest.mark.full
def test_paper_on_two_ranks(tmp_path: Path) -> None:
    """Tables are written once; the passing folder of the other process is gone."""
    printed = done(2, "paper", "table3", "--quick", "--out", "here", cwd=tmp_path)
    assert printed.count("written: here/table3.*") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


@pytest.mark.full
def test_an_error_is_told(tmp_path: Path) -> None:
    with command(2, "resume", "nowhere", cwd=tmp_path) as process:
        printed = finished(process)
    assert process.returncode != 0
    assert "folder nowhere does not exist" in printed


# ---- death and signals ----


def workers(launcher: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun has started, in their order."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return sorted(map(int, children.split()))


def until(condition: Any, process: subprocess.Popen[str]) -> None:
    """Wait for a condition while a process lives."""
    limit = time.monotonic() + WAIT
    while not condition():
        assert process.poll() is None, finished(process)
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Iterator[Path]:
    """The run that others are killed in, by one process."""
    done(1, *COMMAND, "--rounds", "400", "--out", "one", cwd=folder)
    return folder / "one"


def killed(folder: Path, draw: random.Random) -> None:
    """Kill one of two ranks at some moment of a run, and complete it with another number."""
    out = folder / "dead"
    with command(2, *COMMAND, "--rounds", "400", "--out", "dead", cwd=folder) as process:
        until((out / "trace.csv").exists, process)
        time.sleep(draw.uniform(0, 1.5))
        victims = workers(process)
        if len(victims) == 2:  # else it was finished in the meantime
            os.kill(draw.choice(victims), signal.SIGKILL)
        began = time.monotonic()
        printed = finished(process)
        took = time.monotonic() - began
        print(f"the others ended after {took:.1f} s, exit code {process.returncode}")
        assert took < 120
    if process.returncode != 0:
        assert "continues" in printed, printed
        assert "fedsso resume" in printed
    done(draw.choice((1, 2, 3)), "resume", "dead", cwd=folder)


@pytest.mark.full
@pytest.mark.parametrize("moment", range(int(os.environ.get("FEDSSO_KILLS", "2"))))
def test_a_rank_that_dies_ends_the_others(moment: int, tmp_path: Path, uninterrupted: Path) -> None:
    killed(tmp_path, random.Random(moment))
    same_runs(tmp_path / "dead", uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_after_a_round(
    number: signal.Signals, tmp_path: Path, uninterrupted: Path
) -> None:
    """torchrun hands the signal on; a checkpoint of the last round is written."""
    out = tmp_path / "dead"
    with command(2, *COMMAND, "--rounds", "400", "--out", "dead", cwd=tmp_path) as process:
        until((out / "trace.csv").exists, process)
        process.send_signal(number)
        printed = finished(process)
    assert re.search(r"stopped after round \d+; `fedsso resume dead` continues", printed), printed
    done(2, "resume", "dead", cwd=tmp_path)
    same_runs(out, uninterrupted)
    sent = load_run(out).trace["reduce_bytes"][1:]
    assert (sent == sent[0]).all()  # behind an evaluation and the resume as well
