"""`fedsso sweep`: what it chooses, prints and keeps, and that what was killed goes on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    from typer.testing import CliRunner

import fedsso
from console import mentions
from fedsso import load
from fedsso.algorithms import ALGORITHMS
from fedsso.cli.main import app
from fedsso.experiment.grids import grid
from fedsso.support.lock import Lock
from studies import study

SMALL = ["--clients", "3", "--rounds", "6", "--device", "cpu"]
GRID = [*SMALL, "--algorithms", "fedsso,fedavg", "--alpha", "0.03,0.3", "--eta", "0.3,1"]


def sweep(*args: object, code: int = 0) -> Any:
    """Run the command in this process."""
    result = CliRunner().invoke(app, ["sweep", *map(str, args)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def found(*args: object) -> Any:
    return json.loads(sweep(*args, "--json").stdout)


def parts(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The parts and when they were written."""
    return {
        path.name: (path.stat().st_mtime_ns, path.read_bytes())
        for path in (folder / "parts").glob("*.npz")
    }


def trials(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))


# ---- what it finds ----


def test_a_sweep_finds_what_a_study_finds(tmp_path: Path) -> None:
    result = sweep(*GRID, "--seeds", "0,1", "--target", 0.7, "--out", tmp_path)
    document = found(*GRID, "--seeds", "0,1", "--target", 0.7, "--out", tmp_path)
    records = [
        r for n in ("fedsso", "fedavg") for r in grid(n, {"alpha": [0.03, 0.3], "eta": [0.3, 1.0]})
    ]
    own = study(load("digits", clients=3), "mclr", records, seeds=(0, 1), rounds=6, device="cpu")
    assert [s["final_accuracy"] for s in document["grid"]] == [s.finals() for s in own.settings()]
    assert [r["setting"] for r in document["results"]] == [
        s.best(0.7).label for s in own.algorithms().values()
    ]
    for row in document["results"]:
        reached = [
            s
            for s in document["grid"]
            if s["algorithm"] == row["algorithm"] and None not in s["rounds"]
        ]
        fewest = min(sum(s["rounds"]) for s in reached)
        assert (row["work"], row["tried"], sum(row["rounds"])) == (len(reached), 4, fewest)
        assert f"{row['work']} of 4 reach 0.7 with every seed" in result.stdout
        assert f"{sum(row['final_accuracy']) / 2:.4f} ± " in result.stdout
        assert f"alpha={row['hyper']['alpha']:g} eta={row['hyper']['eta']:g}" in result.stdout
    assert (
        "fewest mean rounds until 0.7 is first reached, over 2 seeds; a miss counts as never"
        in result.stdout
    )
    assert "evaluated on the same test rows" in result.stdout
    assert document["chosen"] in result.stdout
    assert document["left_out"] == {}


def test_the_folder(tmp_path: Path) -> None:
    sweep(*GRID, "--out", tmp_path)
    names = {"parts", "trials.csv", "table.md", "curves.png", "grid.png", "sweep.toml"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in ("curves.png", "grid.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    rows = trials(tmp_path)
    assert len(rows) == 8
    assert {(row["alpha"], row["eta"]) for row in rows} == {
        (a, e) for a in ("0.03", "0.3") for e in ("0.3", "1.0")
    }
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("| algorithm | best setting | final accuracy | of the grid |")
    assert "4 of 4 do not diverge" in table
    assert "Best setting: the best mean accuracy at the end over one seed" in table


def test_the_same_call_and_its_settings_file_repeat_without_running(tmp_path: Path) -> None:
    first = sweep(*GRID, "--form", "bfgs,dfp", "--out", tmp_path)
    before, settings = parts(tmp_path), (tmp_path / "sweep.toml").read_text()
    again = sweep("--config", tmp_path / "sweep.toml", "--out", tmp_path)
    assert "round" not in again.stderr
    assert again.stdout == first.stdout
    assert parts(tmp_path) == before
    assert (tmp_path / "sweep.toml").read_text() == settings
    table = tomllib.loads(settings)
    assert (table["fedsso"]["form"], table["fedsso"]["alpha"], table["fedsso"]["pairs"]) == (
        ["bfgs", "dfp"], [0.03, 0.3], 200,
    )  # fmt: skip


def test_another_sweep_in_the_same_folder_keeps_the_parts(tmp_path: Path) -> None:
    sweep(*GRID, "--out", tmp_path)
    before = parts(tmp_path)
    sweep(*SMALL, "--algorithms", "fedavg", "--alpha", "0.3,0.7", "--out", tmp_path)
    assert {(row["algorithm"], row["alpha"]) for row in trials(tmp_path)} == {
        ("fedavg", "0.3"),
        ("fedavg", "0.7"),
    }
    after = parts(tmp_path)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1


def test_without_a_list_the_grid_is_the_papers() -> None:
    document = found(*SMALL, "--algorithms", "fedsso,fedavg", "--rounds", 1)
    assert [row["tried"] for row in document["results"]] == [84, 12]


def test_one_value_is_fixed_and_goes_to_those_that_have_it() -> None:
    document = found(
        *SMALL,
        "--algorithms",
        "fedsso,fedavg,fedprox",
        "--alpha",
        0.1,
        "--mu",
        "0.1,1",
        "--R",
        "none,3",
    )
    assert [row["tried"] for row in document["results"]] == [14, 1, 2]
    assert {setting["hyper"]["alpha"] for setting in document["grid"]} == {0.1}


def test_a_file_may_list_values_for_one_algorithm(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "seeds = [1, 2]\n[fedavg]\nalpha = [0.1, 0.3, 0.7]\n[fedsgd.alpha]\nscale = 1\nshift = 9\n"
    )
    document = found(*SMALL, "--algorithms", "fedavg,fedsgd", "--config", config)
    assert [(row["tried"], row["seeds"]) for row in document["results"]] == [
        (3, [1, 2]),
        (1, [1, 2]),
    ]
    assert document["results"][1]["hyper"]["alpha"] == {"scale": 1.0, "shift": 9.0, "power": 1.0}


def test_a_word_among_the_numbers(tmp_path: Path) -> None:
    """alpha=auto is a setting of the grid as any number is: in the table, in the map and in the
    settings file."""
    document = found(
        *SMALL, "--algorithms", "fedsso", "--alpha", "0.1,auto", "--eta", "0.3,1", "--out", tmp_path
    )
    assert [setting["hyper"]["alpha"] for setting in document["grid"]] == [0.1, 0.1, "auto", "auto"]
    assert {row["alpha"] for row in trials(tmp_path)} == {"0.1", "auto"}
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert tomllib.loads((tmp_path / "sweep.toml").read_text())["fedsso"]["alpha"] == [0.1, "auto"]
    before = parts(tmp_path)
    assert found("--config", tmp_path / "sweep.toml", "--out", tmp_path)["grid"] == document["grid"]
    assert parts(tmp_path) == before
    (only,) = found(*SMALL, "--algorithms", "fedsso", "--alpha", "auto", "--eta", "1")["grid"]
    assert only["final_accuracy"] == document["grid"][3]["final_accuracy"]


def test_all_algorithms_and_what_cannot_run() -> None:
    document = found(
        *SMALL, "--rounds", 1, "--algorithms", "all", "--alpha", 0.1, "--eta", 1, "--mu", 0.1
    )
    linear = ["nl1", "nl2", "bl1", "bl2", "bl3"]  # softmax regression has several outputs
    assert list(document["left_out"]) == ["fedper", *linear]  # and one layer
    assert len(document["results"]) == len(ALGORITHMS) - 6


def test_divergence_is_counted() -> None:
    wild = ["--model", "mlp", "--algorithms", "fedavg", "--alpha", "0.1,1e6"]
    result = sweep(*SMALL, *wild)
    assert "1 of 2 do not diverge" in result.stdout
    assert "alpha=0.1" in result.stdout
    assert "1 of 1 diverged" in sweep(*SMALL, *wild[:-1], "1e6", code=1).stdout


def test_a_target_that_nobody_reaches(tmp_path: Path) -> None:
    result = sweep(*GRID, "--target", 1, "--out", tmp_path, code=1)
    assert "0 of 4 reach 1 with every seed" in result.stdout
    assert (tmp_path / "grid.png").is_file()


def test_where_nothing_is_learned_an_old_map_does_not_stay(tmp_path: Path) -> None:
    sweep(*GRID, "--out", tmp_path)
    assert (tmp_path / "grid.png").is_file()
    sweep(*SMALL, "--algorithms", "fedavg", "--alpha", "1e-60,1e-50", "--out", tmp_path)
    assert not (tmp_path / "grid.png").exists()


def test_choosing_by_held_out_rows(tmp_path: Path) -> None:
    result = sweep(*GRID, "--select", "val", "--target", 0.7, "--out", tmp_path)
    assert (
        "Chosen by a quarter of each client's training rows, held out; then run on all"
        in result.stdout
    )
    rows = trials(tmp_path)
    assert [row["judged_by"] for row in rows] == ["test"] * 2 + ["val"] * 8
    document = found("--config", tmp_path / "sweep.toml", "--out", tmp_path)
    by_test = {setting["setting"]: setting for setting in found(*GRID, "--target", 0.7)["grid"]}
    for row, line in zip(document["results"], rows, strict=False):
        within = [
            s
            for s in document["grid"]
            if s["algorithm"] == row["algorithm"] and s["rounds"] != [None]
        ]
        chosen = min(within, key=lambda s: (s["rounds"][0], -s["final_accuracy"][0]))
        assert chosen["hyper"] == row["hyper"]
        assert chosen["final_accuracy"] != row["final_accuracy"]
        own = by_test[row["setting"]]
        assert (own["rounds"], own["final_accuracy"]) == (row["rounds"], row["final_accuracy"])
        assert line["first hit 0.7"] == str(row["rounds"][0])


def test_progress_is_a_line_at_every_tenth() -> None:
    lines = [line for line in sweep(*GRID).stderr.splitlines() if "trials done" in line]
    told = [line.split("  test ")[0] for line in lines]
    assert told[0] == "grid: 0 of 8 trials done, round 2/6 of fedsso, seed 0, 4 trials"
    assert told[-2] == "grid: 4 of 8 trials done, round 5/6 of fedavg, seed 0, 4 trials"
    assert told[-1] == "grid: 8 of 8 trials done"
    assert len(told) <= 10


def test_help_teaches() -> None:
    shown = sweep("--help").stdout
    for text in (
        "Example: fedsso sweep",
        "twelve client steps",
        "--alpha",
        "--target",
        "--select",
        "--jobs",
        "--minutes",
    ):
        assert text in shown
    assert "--column" in shown
    assert "--targets" not in shown
    assert "[fedavg] and below it alpha = [0.1, 0.3]" in shown


def test_the_column_of_own_tables_has_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("north", "south"):
        lines = [f"{i},{(i * 7) % 5}.5,{i % 2}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,dose,ill", *lines]))
    own = [
        "--dataset",
        "csv",
        "--files",
        tmp_path,
        "--column",
        "ill",
        "--rounds",
        2,
        "--device",
        "cpu",
    ]
    assert found(*own, "--target", 0.3, "--algorithms", "fedavg")["results"][0]["tried"] == 12
    result = CliRunner().invoke(app, ["run", *map(str, own)])
    assert result.exit_code == 0, result.output


# ---- wrong input ----

BAD = {
    "algorithm": (["--algorithms", "fedso"], "algorithm 'fedso' … did you mean 'fedsso'?"),
    "algorithm twice": (["--algorithms", "fedavg,fedavg"], "must list different names"),
    "option": (["--alhpa", "1"], "--alpha"),
    "not its option": (
        ["--algorithms", "fedavg", "--form", "bfgs,dfp"],
        "--form is not an option of fedavg",
    ),
    "jobs": (["--jobs", "0"], "0 is not in the range x>=1"),
    "a column": (["--target", "ill"], "'ill' is not a valid float"),
    "select": (["--select", "vla"], "did you mean 'val'?"),
    "empty": (["--alpha", ""], "'' is not a valid float"),
    "a gap": (["--alpha", "0.1,,0.3"], "'' is not a valid float"),
    "twice": (["--alpha", "0.1,0.3,0.1"], "alpha must list different values"),
    "value": (["--alpha", "0.1,-1"], "alpha must be > 0"),
    "word": (["--alpha", "0.1,outo"], "auto"),
    "form": (["--form", "bfgs,dpf"], "did you mean 'dfp'?"),
    "seeds": (["--seeds", "0,0"], "seeds must be different"),
    "minutes": (["--minutes", "0"], "--minutes must be > 0, got 0"),
    "regression": (
        ["--dataset", "synthetic", "--target", "0.9"],
        "a target is an accuracy … loss mse … leave it out",
    ),
    "no test rows": (
        ["--test-fraction", "0"],
        "no test rows … test_fraction above 0",
    ),
    "no test rows, val": (["--test-fraction", "0", "--select", "val"], "no test rows to judge by"),
    "tiny clients": (
        [
            "--clients",
            "898",
            "--partition",
            "iid",
            "--min-rows",
            "1",
            "--test-fraction",
            "0.5",
            "--select",
            "val",
        ],
        "no held-out rows … clients with three rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_told_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    args, message = BAD[name]
    result = sweep(
        *args, "--out", tmp_path / "out", "--save-config", tmp_path / "saved.toml", code=2
    )
    assert mentions(result.stderr, message)
    assert not list(tmp_path.iterdir())


BAD_FILES = {
    "empty": ("[fedavg]\nalpha = []", "alpha must list different values, at least one"),
    "type": ('[fedavg]\nalpha = ["x"]', "fedavg.alpha … number"),
    "text": (
        '[fedavg]\nalpha = "x"',
        "fedavg.alpha … number … table … list … got 'x'",
    ),
    "field": ("[fedavg]\nalpah = [1.0]", "[fedavg] … 'alpah' … did you mean 'alpha'?"),
    "key": ("targte = 0.9", "did you mean 'target'?"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_settings_file_is_refused(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    (tmp_path / "c.toml").write_text(text)
    told = sweep("--algorithms", "fedavg", "--config", tmp_path / "c.toml", code=2).stderr
    assert mentions(told, message)


def test_a_list_is_for_a_sweep_alone(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[fedavg]\nalpha = [0.1, 0.3]")
    result = CliRunner().invoke(app, ["compare", "--config", str(tmp_path / "c.toml")])
    assert result.exit_code == 2
    assert mentions(result.stderr, "fedavg.alpha … number … table … got [0.1, 0.3]")


def test_minutes_need_a_folder() -> None:
    assert "--minutes needs --out" in sweep("--minutes", 1, code=2).stderr


def test_out_that_is_a_file_or_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot write" in sweep(*GRID, "--out", tmp_path / "file", code=2).stderr
    CliRunner().invoke(app, ["run", *SMALL, "--out", str(tmp_path / "runs" / "a")])
    for out in (tmp_path / "runs", tmp_path / "runs" / "a"):
        assert (
            "already holds a run; choose another folder"
            in sweep(*GRID, "--out", out, code=2).stderr
        )


def test_a_second_sweep_leaves_the_settings_of_the_first(tmp_path: Path) -> None:
    sweep(*GRID, "--out", tmp_path)
    before = (tmp_path / "sweep.toml").read_bytes()
    taken, done = threading.Event(), threading.Event()

    def first() -> None:
        with Lock(tmp_path):
            taken.set()
            done.wait()

    holder = threading.Thread(target=first)
    holder.start()
    taken.wait()
    told = sweep(*GRID, "--rounds", 3, "--out", tmp_path, code=2).stderr
    done.set()
    holder.join()
    assert "is being written by process" in told
    assert (tmp_path / "sweep.toml").read_bytes() == before


def test_a_damaged_part_is_named_and_run_again(tmp_path: Path) -> None:
    sweep(*GRID, "--out", tmp_path)
    table = (tmp_path / "table.md").read_text()
    part = next((tmp_path / "parts").iterdir())
    part.write_bytes(part.read_bytes()[:-9])
    assert f"{part.name} is damaged" in sweep(*GRID, "--out", tmp_path).stderr
    assert (tmp_path / "table.md").read_text() == table


# ---- interrupted ----

LONG = [
    *SMALL[:2],
    "--device",
    "cpu",
    "--rounds",
    "40",
    "--algorithms",
    "fedsso,fedavg",
    "--eta",
    "0.3,1",
]
LONG += ["--alpha", "0.01,0.03,0.1,0.3", "--form", "bfgs,dfp", "--seeds", "0,1"]  # six parts


def test_when_the_time_is_up_the_same_command_goes_on(tmp_path: Path) -> None:
    said, seen = [], set()
    for _ in range(20):
        before = parts(tmp_path) if (tmp_path / "parts").is_dir() else {}
        result = CliRunner().invoke(
            app, ["sweep", *LONG, "--minutes", "0.005", "--out", str(tmp_path)]
        )
        seen.add(result.exit_code)
        after = parts(tmp_path)
        assert {name: after[name] for name in before} == before
        if result.exit_code == 0:
            break
        said.append(result.stderr)
        assert not (tmp_path / "trials.csv").exists()
    assert seen == {0, 75}
    assert all("parts are left; the same command continues" in text for text in said)
    assert len(trials(tmp_path)) == 48


def started(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedsso", "sweep", *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(what: Any, process: subprocess.Popen[str] | None = None) -> None:
    limit = time.monotonic() + 600  # only ends a hang
    while not what():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_kill_9_leaves_no_process_behind_and_finished_parts_are_kept(tmp_path: Path) -> None:
    process = started(*LONG, "--jobs", 2, "--out", tmp_path)
    wait_for(
        lambda: (tmp_path / "parts").is_dir() and any((tmp_path / "parts").glob("*.npz")), process
    )
    others = children(process.pid)
    assert len(others) >= 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(lives, others)))
    before = parts(tmp_path)
    assert 1 <= len(before) < 6
    assert not (tmp_path / "trials.csv").exists()
    sweep(*LONG, "--out", tmp_path)
    after = parts(tmp_path)
    assert {name: after[name] for name in before} == before
    assert len(trials(tmp_path)) == 48


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_processes_start(number: signal.Signals, tmp_path: Path) -> None:
    """A terminal, and who ends a whole group, sends it to all of them."""
    process = started(*LONG, "--jobs", 2, "--out", tmp_path)
    wait_for(
        lambda: len(children(process.pid)) >= 3, process
    )  # two, and the one that multiprocessing has
    others = children(process.pid)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert "; the same command continues" in said
    assert "Traceback" not in said
    wait_for(lambda: not any(map(lives, others)))


# ---- the same from Python ----


@pytest.mark.parametrize("select", ["test", "val"])
def test_python_and_the_command_find_the_same(select: str, tmp_path: Path) -> None:
    """The same trials, the same winners and the same table, whoever asks."""
    out = tmp_path / "command"
    options = ("--rounds", 5, "--seeds", "0,1", "--target", 0.7, "--select", select)
    command = ("--clients", 3, "--algorithms", "fedavg,fedsgd", "--device", "cpu")
    sweep(*command, *options, "--out", out)
    results = fedsso.sweep(
        load("digits", clients=3),
        "mclr",
        ["fedavg", "fedsgd"],
        seeds=(0, 1),
        target=0.7,
        select=select,
        rounds=5,
        device="cpu",
        out=tmp_path / "python",
    )
    assert len(results.settings()) == 24, "names stand for whole grids"
    kept = fedsso.load_runs(out)
    assert [run.spec for run in kept] == [run.spec for run in results]
    for one, other in zip(kept, results, strict=True):
        np.testing.assert_array_equal(one.trace["test_accuracy"], other.trace["test_accuracy"])
    winners = results.winners()
    assert fedsso.load_runs(tmp_path / "python").target == 0.7, "kept without the command, too"
    assert {name: s.record for name, s in kept.winners().items()} == {
        name: s.record for name, s in winners.items()
    }
    for name in ("table.md", "trials.csv"):
        assert (out / name).read_text() == (tmp_path / "python" / name).read_text()
    again = fedsso.compare(
        load("digits", clients=3),
        "mclr",
        [setting.record for setting in winners.values()],
        seeds=(0, 1),
        rounds=5,
        device="cpu",
    )
    ends = [setting.finals() for setting in again.settings()]
    np.testing.assert_allclose(ends, [s.finals() for s in winners.values()], atol=5e-3)
