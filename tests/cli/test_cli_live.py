"""The live view: a dashboard on a real terminal, plain lines elsewhere, and TensorBoard's files."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from console import command, fedsso
from fedsso import FedAvg, Federation, FedSSO, load, load_run, load_runs, resume, simulate, sweep
from fedsso.cli.live import BLOCKS, Dashboard, sparkline
from fedsso.experiment.spec import Spec
from fedsso.experiment.trace import Trace, at_end
from studies import study

BUILD = Path(__file__).parents[2] / "build" / "screenshots"
SMALL = ["--clients", "4", "--rounds", "20", "--device", "cpu"]
LONG = ["run", "--clients", "4", "--rounds", "3000", "--device", "cpu"]
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
AGAIN = re.compile(r"(?:\x1b\[2K\x1b\[1A)+\x1b\[2K")  # how a frame is wiped for the next one


class Terminal:
    """A command on a terminal of its own; `shown` is everything that was sent to it."""

    def __init__(
        self, *args: object, rows: int = 24, columns: int = 100, kind: str = "xterm-256color"
    ) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {
            k: v
            for k, v in os.environ.items()
            if k not in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE")
        }
        self.process = subprocess.Popen(
            command(*args),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": kind, "PYTHONUTF8": "1"},
        )
        os.close(theirs)
        self.bytes = b""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.ours, 65536)
            except OSError:  # the command has ended
                return
            self.bytes += data

    @property
    def shown(self) -> str:
        return self.bytes.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str) -> None:
        ends = time.monotonic() + 600  # only ends a hang
        while text not in CODES.sub("", self.shown):
            if time.monotonic() > ends or self.process.poll() is not None:
                self.process.kill()
                raise AssertionError(self.shown)
            time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(timeout=600)
        self.reader.join(timeout=600)
        os.close(self.ours)
        return code

    def frames(self) -> list[str]:
        """What stood there, one drawing after the other; the last one with all that follows."""
        return [CODES.sub("", part) for part in AGAIN.split(self.shown)]


def row(frame: str, label: str) -> str:
    (found,) = [line for line in frame.splitlines() if line.startswith(label) and "/" in line]
    return found.rstrip()


# ---- the curve in a line of text ----

NUMBERS = st.floats(-1e6, 1e6)
WIDTHS = st.integers(1, 50)


@given(st.lists(NUMBERS, min_size=1, max_size=200), WIDTHS)
def test_what_rises_is_drawn_rising(values: list[float], width: int) -> None:
    drawn = sparkline(sorted(values), width)
    assert list(drawn) == sorted(drawn, key=BLOCKS.index)
    assert len(drawn) == min(width, len(values))
    assert drawn[-1] == (BLOCKS[-1] if len(drawn) > 1 and max(values) > min(values) else drawn[0])


def test_few_values_get_a_block_each_and_many_share_them() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 50) == BLOCKS
    assert sparkline(np.arange(800), 8) == "▂▃▄▄▅▆▇█"  # 99, 199, ... 799 in sevenths of 799
    assert sparkline([1, 0, 1, 0], 2) == "▁▁"  # the last of each pair


@given(NUMBERS, st.integers(1, 80), WIDTHS)
def test_a_constant_is_a_flat_line(value: float, count: int, width: int) -> None:
    assert sparkline([value] * count, width) == BLOCKS[0] * min(count, width)


def test_what_is_not_finite_is_a_gap() -> None:
    nan, inf = float("nan"), float("inf")
    assert sparkline([0, nan, 1], 3) == "▁ █"
    assert sparkline([0, inf, 1, -inf], 4) == "▁ █ "
    assert sparkline([0, nan, 1, nan], 2) == "▁█"  # a gap within a block does not empty it
    assert sparkline([nan, nan, nan], 2) == "  "
    assert sparkline([], 5) == ""


def test_a_given_scale_holds_and_cuts() -> None:
    assert sparkline([0.5], 5, 0.0, 1.0) in ("▄", "▅")
    assert sparkline([-1, 0, 1, 2], 4, 0.0, 1.0) == "▁▁██"


# ---- on a terminal ----


def test_the_dashboard_on_a_terminal(tmp_path: Path) -> None:
    slow = ["--local-steps", 100]  # some seconds, and so several drawings
    terminal = Terminal("run", "--live", *SMALL, *slow, "--out", tmp_path / "a")
    assert terminal.end() == 0
    run, frames = load_run(tmp_path / "a"), terminal.frames()
    assert len(frames) >= 2
    assert any(
        row(frame, run.label).endswith("running") for frame in frames[:-1] if run.label in frame
    )
    found = row(frames[-1], run.label)
    assert "20/20" in found
    assert f"{run.final():.4f}" in found
    assert f"{run.trace['train_loss'][-1]:.4f}" in found
    assert f"{(run.trace['bytes_up'].sum() + run.trace['bytes_down'].sum()) / 1e6:.1f}" in found
    assert re.search(f"[{BLOCKS}]{{20}} ", found)
    assert found.endswith("done")
    assert "1 of 1 runs" in frames[-1]
    assert "100%" in frames[-1]
    table = frames[-1].partition("rounds and megabytes until the test accuracy is reached")[2]
    assert f"{at_end(run.trace):.4f}" in table
    assert f"results: {tmp_path / 'a'}" in table.replace("\n", "")
    assert "\x1b[?25h" in terminal.shown  # the cursor is back


@pytest.mark.full
def test_every_run_of_a_comparison_has_a_line() -> None:
    terminal = Terminal(
        "compare", "--live", *SMALL, "--algorithms", "fedsso,fedavg", "--seeds", "0,1"
    )
    assert terminal.end() == 0
    last = terminal.frames()[-1]
    lines = [line.split() for line in last.splitlines() if "20/20" in line]
    assert sorted((line[0], line[2]) for line in lines) == [
        (n, s) for n in ("fedavg", "fedsso") for s in "01"
    ]
    assert all(line[-1] == "done" for line in lines)
    assert "4 of 4 runs" in last
    assert not [
        line for line in last.partition("rounds and megabytes")[0].splitlines() if len(line) > 100
    ]


@pytest.mark.full
def test_a_sweep_in_processes_fills_the_terminal_and_no_more(tmp_path: Path) -> None:
    grid = [
        "--algorithms",
        "fedsso,fedavg",
        "--alpha",
        "0.01,0.1,0.3",
        "--eta",
        "0.3,1",
        "--jobs",
        2,
    ]
    terminal = Terminal("sweep", "--live", *SMALL, *grid, "--out", tmp_path, rows=12, columns=80)
    assert terminal.end() == 0
    frames = terminal.frames()
    assert "12 of 12 runs" in frames[-1]
    assert "and 8 more: 8 done" in frames[-1]
    assert all(len(frame.strip("\n").splitlines()) < 12 for frame in frames[1:-1])
    assert "of the grid" in frames[-1]


def test_ctrl_c_stops_after_the_round_and_the_run_goes_on_in_a_dashboard(tmp_path: Path) -> None:
    out = tmp_path / "run"
    terminal = Terminal(*LONG, "--live", "--out", out, columns=200)
    terminal.wait_for("running")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    last = terminal.frames()[-1]
    (k,) = re.findall(r"stopped after round (\d+); `fedsso resume", last)
    assert f" {k}/3000 " in row(last, "fedsso")
    assert row(last, "fedsso").endswith("stopped")
    assert "stopping after this round" in CODES.sub("", terminal.shown)
    again = Terminal("resume", "--live", out, columns=200)
    again.wait_for("running")
    first = next(frame for frame in again.frames() if "running" in frame)
    assert int(re.findall(r"(\d+)/3000", first)[0]) > int(k)
    again.process.send_signal(signal.SIGINT)
    assert again.end() == 130


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once_and_the_cursor_comes_back(tmp_path: Path) -> None:
    minutes = [
        "--clients",
        "4",
        "--rounds",
        "2",
        "--local-steps",
        "1000000",
        "--batch-size",
        "1",
        "--device",
        "cpu",
    ]
    terminal = Terminal("run", *minutes, "--out", tmp_path / "run")
    terminal.wait_for("sample 1×8×8")
    ends = time.monotonic() + 60
    while not (
        tmp_path / "run" / "spec.toml"
    ).is_file():  # from then on the first Ctrl-C waits for the round
        assert time.monotonic() < ends, terminal.shown
        time.sleep(0.02)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopping after this round")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
    assert "\x1b[?25l" in terminal.shown
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")


def test_without_a_terminal_the_lines_are_those_of_a_run_without_it() -> None:
    plain, live = fedsso("run", *SMALL), fedsso("run", "--live", *SMALL)
    assert live.output == plain.output
    assert live.stderr.count("round ") == 10
    assert "\x1b" not in live.output


@pytest.mark.full
def test_a_dumb_terminal_gets_lines() -> None:
    terminal = Terminal("run", "--live", *SMALL, kind="dumb")
    assert terminal.end() == 0
    assert [f"round {k}/20" in terminal.shown for k in range(1, 21)] == [
        k % 2 == 0 for k in range(1, 21)
    ]
    assert "\x1b" not in terminal.shown
    assert "running" not in terminal.shown


# ---- what a dashboard draws ----


def spec(label: str = "fedsso", rounds: int = 10, **options: Any) -> Spec:
    settings = {"rounds": rounds, "seed": 0, "stop_at": None, **options}
    return Spec({}, "", "mclr", "", (1,), 2, label, {}, settings)


def trace(accuracy: Sequence[float], diverged: int | None = None) -> Trace:
    same = {"trial": 0, "seed": 0, "overridden": 0, "skipped": 0}
    same |= {"bytes_up": 10**6, "bytes_down": 10**6}
    rows = [
        {**same, "round": k, "test_accuracy": a, "test_loss": 1 - a, "train_loss": 2 - a}
        for k, a in enumerate(accuracy)
    ]
    return Trace.from_rows(rows, 1, diverged)


def board(width: int = 120, height: int = 30) -> Dashboard:
    return Dashboard(Console(record=True, width=width, height=height, file=io.StringIO()))


def drawn(shown: Dashboard) -> str:
    shown.console.print(shown.render())
    return shown.console.export_text(clear=False)


def test_a_line_says_where_a_run_is() -> None:
    shown = board()
    specs = [spec("one"), spec("two"), spec("three"), spec("four"), spec("five", stop_at=0.9)]
    shown.begin(specs)
    ran = [trace([0.1, 0.5, 0.4]), trace(np.linspace(0, 1, 11)), trace([0.1, 0.6, 0, 0, 0], 2)]
    shown.look([*specs[:3], specs[4]], [*ran, trace([0.1, 0.95])])
    text = drawn(shown)
    assert row(text, "one").split() == [
        "one",
        "2/10",
        "0.4000",
        "↓",
        "0.5000",
        "1.6000",
        "↑",
        "▄▃",
        "6.0",
        "running",
    ]
    assert row(text, "two").split()[-1] == "done"
    assert row(text, "three").split()[1:4] == ["1/10", "0.6000", "↑"]  # before it diverged
    assert row(text, "three").split()[-3:] == ["▅", "10.0", "diverged"]  # of a scale from 0.1 to 1
    assert row(text, "four").split() == ["four", "0/10", "–", "–", "–", "0.0", "waiting"]
    assert row(text, "five").split()[-1] == "done"
    assert "3 of 5 runs" in text
    assert "64%" in text  # 2 + 10 + 10 + 0 + 10 of 50 rounds


def test_the_time_left_counts_what_was_done_here() -> None:
    shown, one = board(), spec()
    shown.begin([one])
    shown.look([one], [trace([0.1] * 3)])  # two rounds were there
    shown.began -= 10
    shown.look([one], [trace([0.1] * 8)])
    assert "0:00:10 spent, 0:00:06 left" in drawn(
        shown
    )  # five rounds in ten seconds; three are left


def test_where_there_is_no_accuracy_the_loss_is_shown() -> None:
    shown, one = board(), spec()
    known = trace([0.1, 0.2, 0.4])
    shown.begin([one])
    shown.look([one], [Trace({**known.columns, "test_accuracy": np.full(3, np.nan)})])
    text = drawn(shown)
    assert "test loss" in text
    assert row(text, "fedsso").split()[2:5] == ["0.6000", "↓", "0.6000"]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    shown = board(width)
    specs = [
        spec(f"fedsso alpha=0.0001 eta=0.3 form=dfp number={i}", 1000, seed=i) for i in range(3)
    ]
    shown.begin(specs)
    shown.look(specs, [trace(np.linspace(0, 1, 1001))] * 3)
    lines = drawn(shown).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 7
    assert all("1000/1000" in line and line.rstrip().endswith("done") for line in lines[4:])


def test_of_many_runs_those_that_run_are_shown_then_the_best() -> None:
    shown = board(height=12)
    specs = [spec(f"run{i:02d}") for i in range(30)]
    shown.begin(specs)
    shown.look(specs[:10], [trace(np.full(11, i / 10)) for i in range(10)])
    shown.look(specs[20:22], [trace([0.1, 0.1])] * 2)
    text = drawn(shown)
    assert re.findall(r"run\d\d", text) == ["run08", "run09", "run20", "run21"]
    assert "and 26 more: 8 done, 18 waiting" in text


def test_a_picture_of_the_dashboard() -> None:
    """For people to look at: build/screenshots/live.svg."""
    fed = load("digits", clients=6)
    shown = board(110)

    class Watching(Seen):
        def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None:
            shown.look(specs, traces)

    records = [FedSSO(), FedAvg(alpha=0.05), FedAvg(alpha=0.01)]
    waiting = spec("scaffold alpha=0.01", 30, seed=1)
    shown.begin(
        [run.spec for run in sweep(fed, "mclr", records, seeds=(0, 1), rounds=30, device="cpu")]
    )
    sweep(fed, "mclr", records[:2], seeds=(0, 1), rounds=30, device="cpu", progress=Watching())
    half = simulate(fed, "mclr", records[2], rounds=30, device="cpu")
    shown.look(
        [half.spec], [Trace({name: column[:18] for name, column in half.trace.columns.items()})]
    )
    lost = spec("fedavg alpha=1e+06", 30)
    shown.begin([lost, waiting])
    shown.look([lost], [trace([0.1, 0.2, 0.0], 2)])
    text = drawn(shown)
    assert all(state in text for state in ("done", "running", "diverged", "waiting"))
    BUILD.mkdir(parents=True, exist_ok=True)
    picture = shown.console.export_svg(title="fedsso compare --live")
    (BUILD / "live.svg").write_text(picture, encoding="utf-8")
    assert "diverged" in picture


# ---- what a watcher is shown ----


class Seen:
    """Keeps what it is shown."""

    def __init__(self, stop: int = 0) -> None:
        self.specs: list[Spec] = []
        self.traces: dict[str, list[Trace]] = {}
        self.stop = stop

    def __call__(self, _: str, k: int, *rest: Any) -> None:
        assert len(rest) == 2
        if k == self.stop:
            raise KeyboardInterrupt

    def begin(self, specs: Sequence[Spec]) -> None:
        self.specs += specs

    def look(self, specs: Sequence[Spec], traces: Sequence[Trace]) -> None:
        for one, found in zip(specs, traces, strict=True):
            self.traces.setdefault(one.identity, []).append(found)


@pytest.fixture(scope="module")
def fed() -> Federation:
    return load("digits", clients=3)


FAST: dict[str, Any] = {"rounds": 6, "device": "cpu"}
GRID = [FedAvg(alpha=0.01), FedAvg(alpha=0.1), FedSSO(alpha=0.1)]


def same(
    one: Trace, other: Trace, names: Sequence[str] = ("test_accuracy", "train_loss", "bytes_up")
) -> None:
    for name in names:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-6)


def test_each_of_the_batched_trials_is_seen_from_its_first_round_to_its_last(
    fed: Federation,
) -> None:
    seen = Seen()
    runs = sweep(fed, "mclr", GRID, seeds=(0, 1), progress=seen, **FAST)
    assert [one.identity for one in seen.specs] == [run.spec.identity for run in runs]
    for run in runs:
        looks = seen.traces[run.spec.identity]
        lengths = [len(one) for one in looks]
        assert lengths == sorted(lengths)
        assert (lengths[0], lengths[-1]) == (2, 7)
        same(looks[-1], run.trace)


@pytest.mark.sample
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_study_shows_what_runs_and_what_lies_there(
    fed: Federation, tmp_path: Path, jobs: int
) -> None:
    study(fed, "mclr", GRID[:1], out=tmp_path, **FAST)
    seen = Seen()
    found = study(fed, "mclr", GRID, out=tmp_path, jobs=jobs, progress=seen, **FAST)
    assert [one.label for one in seen.specs] == [run.label for run in found]
    assert [len(one) for one in seen.traces[found[0].spec.identity]] == [7]
    for run in found:
        same(seen.traces[run.spec.identity][-1], run.trace)
    assert all(len(seen.traces[run.spec.identity]) >= 2 for run in found[1:])


def test_an_interrupted_run_is_seen_to_its_last_round_and_again_when_it_goes_on(
    fed: Federation, tmp_path: Path
) -> None:
    first, second = Seen(stop=4), Seen()
    with pytest.raises(KeyboardInterrupt):
        simulate(fed, "mclr", "fedsso", out=tmp_path, progress=first, **FAST)
    (looks,) = first.traces.values()
    assert len(looks[-1]) == 5
    (run,) = resume(tmp_path, progress=second)
    assert len(second.traces[run.spec.identity][0]) == 6
    same(second.traces[run.spec.identity][-1], run.trace)


# ---- TensorBoard ----


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every column of a run as TensorBoard reads it; a step that comes twice is an error."""
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    found = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    columns = {}
    for name in found.Tags()["scalars"]:
        steps = [event.step for event in found.Scalars(name)]
        assert len(set(steps)) == len(steps), name
        columns[name] = {event.step: event.value for event in found.Scalars(name)}
    return columns


def expected(found: Trace) -> dict[str, dict[int, float]]:
    """The numbers of a trace in single precision, where there are any."""
    columns = {
        n: c.astype(np.float32)
        for n, c in found.columns.items()
        if n not in ("trial", "seed", "round")
    }
    rows = {
        n: {k: float(v) for k, v in enumerate(c) if not np.isnan(v)} for n, c in columns.items()
    }
    return {name: values for name, values in rows.items() if values}


def test_the_scalars_are_the_numbers_of_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    fedsso(
        "run", *SMALL, "--eval-every", 3, "--out", tmp_path / "a", "--tensorboard", tmp_path / "tb"
    )
    run = load_run(tmp_path / "a")
    (folder,) = (tmp_path / "tb").iterdir()
    assert folder.name == "fedsso_alpha=auto_seed=0"
    found = scalars(folder)
    assert found == expected(run.trace)
    assert {"train_loss", "test_loss", "test_accuracy", "bytes_up", "radius"} <= found.keys()
    assert sorted(found["test_accuracy"]) == [0, 3, 6, 9, 12, 15, 18, 20]


def test_each_run_of_a_comparison_has_its_folder_also_one_that_diverges(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    extreme = [
        "--model",
        "mlp",
        "--alpha",
        "1e6",
        "--algorithms",
        "fedavg,fedsgd",
        "--seeds",
        "0,1",
    ]
    fedsso(
        "compare",
        *SMALL,
        *extreme,
        "--out",
        tmp_path / "a",
        "--tensorboard",
        tmp_path / "tb",
        code=1,
    )
    runs = load_runs(tmp_path / "a")
    assert all(run.diverged for run in runs)
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {
        f"{run.spec.algorithm}_alpha=1e_06_seed={run.spec.seed}" for run in runs
    }
    for run in runs:
        own = tmp_path / "tb" / f"{run.spec.algorithm}_alpha=1e_06_seed={run.spec.seed}"
        assert scalars(own) == expected(run.trace)


def test_a_sweep_writes_every_trial_and_repeats_none(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    wish = ["--algorithms", "fedavg", "--alpha", "0.1,0.3", "--select", "val", "--jobs", 2]
    wish = ["sweep", *SMALL, *wish, "--out", tmp_path / "a", "--tensorboard", tmp_path / "tb"]
    for _ in range(2):
        chosen = json.loads(fedsso(*wish, "--json").stdout)["results"][0]["setting"]
        folders = {path.name: scalars(path) for path in (tmp_path / "tb").iterdir()}
        # the chosen setting runs again on all training rows, in a folder beside that of the
        # held-out rows
        labels = sorted([f"fedavg alpha={a}" for a in ("0.1", "0.3")] + [chosen])
        assert sorted(re.sub("_seed=0.*", "", name).replace("_", " ") for name in folders) == labels
        assert all(sorted(own["test_accuracy"]) == list(range(21)) for own in folders.values())
        assert all(len(list(path.iterdir())) == 1 for path in (tmp_path / "tb").iterdir())


def wait_until(process: subprocess.Popen[Any], there: Callable[[], bool]) -> None:
    ends = time.monotonic() + 600  # only ends a hang
    while not there():
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.full
def test_scalars_come_while_the_run_trains_and_a_resumed_run_repeats_none(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    out, tb = tmp_path / "a", tmp_path / "tb"
    wish = [
        "run",
        "--clients",
        4,
        "--rounds",
        400,
        "--device",
        "cpu",
        "--out",
        out,
        "--tensorboard",
        tb,
    ]
    process = subprocess.Popen(command(*wish), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    folder = tb / "fedsso_alpha=auto_seed=0"
    try:
        wait_until(
            process, lambda: folder.is_dir() and len(scalars(folder).get("test_accuracy", ())) >= 10
        )
    finally:
        process.kill()
        process.wait()
    assert 10 <= len(scalars(folder)["train_loss"]) < 400
    fedsso("resume", out, "--tensorboard", tb)
    assert scalars(folder) == expected(load_run(out).trace)
    assert len(list(tb.iterdir())) == 1


def test_another_run_of_the_same_label_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    for clients in (3, 4, 3):
        fedsso("run", "--rounds", 5, "--clients", clients, "--tensorboard", tmp_path)
    first, second = sorted(tmp_path.iterdir())
    assert second.name.startswith(f"{first.name}-")
    assert all(sorted(scalars(own)["train_loss"]) == [1, 2, 3, 4, 5] for own in (first, second))
    assert (
        scalars(first)["bytes_up"][1] < scalars(second)["bytes_up"][1]
    )  # three clients send less than four


def test_neither_option_is_part_of_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    saved = tmp_path / "saved.toml"
    view = ["--live", "--tensorboard", tmp_path / "tb", "--save-config", saved]
    fedsso("run", *SMALL, "--out", tmp_path / "a", *view)
    fedsso("run", *SMALL, "--out", tmp_path / "b")
    assert not {"live", "tensorboard"} & tomllib.loads(saved.read_text()).keys()
    assert load_run(tmp_path / "a").spec == load_run(tmp_path / "b").spec


@pytest.mark.full
def test_without_the_package_it_is_said_before_anything_is_written(tmp_path: Path) -> None:
    code = "import sys; sys.modules['tensorboard'] = None; from fedsso.cli.main import main; main()"
    wish = ["run", *SMALL, "--out", str(tmp_path / "a"), "--tensorboard", str(tmp_path / "tb")]
    done = subprocess.run(
        [sys.executable, "-c", code, *wish], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--tensorboard needs" in done.stderr
    assert "`pip install tensorboard`" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (tmp_path / "file").write_text("x")
    said = fedsso("run", *SMALL, "--tensorboard", tmp_path / "file" / "tb", code=2).stderr
    assert "cannot write" in said


@pytest.mark.parametrize("name", ["run", "compare", "sweep", "resume"])
def test_the_options_are_in_the_help(name: str) -> None:
    shown = fedsso(name, "--help").stdout
    assert "--live" in shown
    assert "--tensorboard" in shown
