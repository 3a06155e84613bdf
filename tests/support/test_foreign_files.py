"""Files of others at every door: one sentence, no traceback, no waiting, bounded memory, and
nothing of a row told."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsso
from console import fedsso as command
from fedsso.data.svmlight import svmlight
from fedsso.data.tables import csv_pool
from fedsso.errors import InputError
from fedsso.experiment.revive import federation_of, problem_of
from fedsso.experiment.trace import COLUMNS
from fedsso.report.sources import content
from fedsso.support.intake import TooLarge

SECRET = "Miller Jane 1951-03-04"
BRIEF = ("--rounds", 1, "--clients", 3, "--device", "cpu")


def refused(*args: object) -> str:
    """What a command says that ends with code 2, in an error and not in a traceback."""
    told = command(*args, code=2)
    assert told.stderr.startswith("error: ") or "\nerror: " in told.stderr
    return str(told.stderr)


def unsealed(path: Path) -> str:
    """A TOML file as an earlier version or another program writes it, without a checksum in a
    comment."""
    return "".join(line for line in path.read_text().splitlines(True) if not line.startswith("#"))


# ---- settings ----

SETTINGS = {
    "nested": (
        "a = " + "[" * 2000 + "]" * 2000,
        "line 1: has more than 64 brackets within each other",
    ),
    "digits": ("rounds = " + "1" * 5000, "line 1: has a number of 5000 digits, at most 1000"),
    "rounds": (
        "rounds = 1" + "0" * 400,
        "rounds must be at most 1000000000, got rounds=an integer beyond",
    ),
    "rounds, 10^12": ("rounds = 1000000000000", "rounds must be at most"),
    "evaluations": ("eval_every = 1" + "0" * 30, "eval_every must be at most"),
    "out": ('out = "a\\u0000b"', "out must be the path of a file or folder"),
    "init": ('init = "a\\u0000b"', "init must be the path of a file or folder"),
    "endless init": ('init = "/dev/zero"', "it is a device, not a regular file"),
    "files": (
        'data.dataset = "csv"\ndata.target = "y"\ndata.files = ["a\\u0000b"]',
        "files must be the path",
    ),
    "folder": ('data.dataset = "mnist"\ndata.data_dir = "a\\u0000b"', "data_dir must be the path"),
    "schedule": (
        'algorithm = "fedavg"\nfedavg.alpha.foo = 1',
        "unknown key of [fedavg.alpha] 'foo'",
    ),
    "no targets": ("targets = [nan]", "a target is an accuracy above 0 and at most 1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_hostile_settings(name: str, tmp_path: Path) -> None:
    text, said = SETTINGS[name]
    (tmp_path / "c.toml").write_text(text)
    rounds = () if "rounds" in text else ("--rounds", 1)
    assert said in refused(
        "run", *rounds, "--clients", 3, "--device", "cpu", "--config", tmp_path / "c.toml"
    )


def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    pipe, run = tmp_path / "pipe", tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    for path in (pipe, run / "spec.toml", tmp_path / "runs" / "part.npz"):
        os.mkfifo(path)
    for config in (pipe, "/dev/zero"):
        assert "not a regular file" in refused("run", "--config", config)
    for init in (pipe, "/dev/zero"):
        assert "not a regular file" in refused("run", *BRIEF, "--init", init)
    (run / "trace.csv").write_text(f"{HEADER}\n{ROW.format(0, 1)}\n")
    for args in (("report", pipe), ("report", run), ("report", run.parent), ("resume", run)):
        assert "it is a pipe, not a regular file" in refused(*args)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "one"
    command("run", *BRIEF, "--algorithm", "fedavg", "--alpha", 0.1, "--out", folder)
    return folder


SPECS = {
    "label, number": (
        "[record.label]",
        "label = 5\n[other]",
        "record.label must be a table of texts",
    ),
    "label, list": (
        "[record.label]",
        "label = [1]\n[other]",
        "record.label must be a table of texts",
    ),
    "label of numbers": (
        "[record.label]",
        "[record.label]\nz = 5",
        "record.label must be a table of texts",
    ),
    "no data set": ('dataset = "digits"\n', "", "[data] must name its data set"),
    "schedule": ("alpha = 0.1", "alpha = {foo = 1}", "unknown key of alpha, a schedule 'foo'"),
    "sample": ("sample = [1,", 'sample = ["x",', "sample must be an integer >= 1"),
    "rounds": ("rounds = 1", "rounds = 1000000000000", "rounds must be at most"),
    "algorithm": ('algorithm = "fedavg"', 'algorithm = ["fedavg"]', "unknown algorithm"),
}


@pytest.mark.parametrize("name", SPECS)
def test_hostile_specs(name: str, run_folder: Path) -> None:
    """As a table: reading a file with it is tested above, and sealed files are refused before."""
    old, new, said = SPECS[name]
    whole = unsealed(run_folder / "spec.toml")
    text = whole.replace(old, new)
    assert text != whole
    with pytest.raises(InputError) as error:
        fedsso.experiment.spec.Spec.from_toml(fedsso.support.intake.parse_toml(text, "spec.toml"))
    assert said in str(error.value)


# ---- traces and sweeps ----

HEADER = ",".join(COLUMNS)
ROW = "0,0,{},1.5,1.5,0.5,1.5,1.5,0,0,1.5,{},8,0.1"
TRACES = {
    "end of int64": (
        f"{HEADER}\n{ROW.format(0, 2**63 - 1)}\n",
        "all bytes together at most 2^63 - 1",
    ),
    "sum": (
        f"{HEADER}\n{ROW.format(0, 2**62)}\n{ROW.format(1, 2**62)}\n",
        "all bytes together at most 2^63 - 1",
    ),
    "negative": (f"{HEADER}\n{ROW.format(0, -1)}\n", "must be >= 0"),
    "digits": (
        f"{HEADER}\n{ROW.format('1' * 5000, 1)}\n",
        "line 2: round must be a 64-bit integer, got '111",
    ),
    "field": ("x" * 200_000, "line 1: the column trial is missing"),
    "twice": (f"{HEADER},round\n{ROW.format(0, 1)},0\n", "line 1: a column is there twice"),
}


@pytest.mark.parametrize("name", TRACES)
def test_hostile_traces(name: str, tmp_path: Path) -> None:
    text, said = TRACES[name]
    (tmp_path / "trace.csv").write_text(text)
    assert said in refused("report", tmp_path / "trace.csv", "--out", tmp_path / "r.html")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    grid = ("--algorithms", "fedavg", "--alpha", "0.03,0.3", "--eta", 1)
    command("sweep", *BRIEF, *grid, "--out", tmp_path / "sweep")
    return tmp_path / "sweep"


def test_hostile_sweeps(sweep: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "r.html")
    trials, settings = sweep / "trials.csv", sweep / "sweep.toml"
    good, plain = trials.read_text(), unsealed(settings)
    trials.write_text(good.replace("identity", "identities"))
    assert "trials.csv was written by an earlier version" in refused("report", sweep, *out)
    head, *rows = good.splitlines()
    others = [f"{row.rpartition(',')[0]},0123456789abcdef" for row in rows]
    trials.write_text("\n".join([head, *others]) + "\n")
    assert "none of the trials that" in refused("report", sweep, *out)
    trials.write_text(good + "x" * 200_000 + "\n")
    assert "line 4: has more characters in a cell, at most 131072" in refused("report", sweep, *out)
    trials.write_text(good)
    for value in ("nan", "inf", "'x'", "1" + "0" * 400):
        settings.write_text(f"target = {value}\n{plain}")
        assert "sweep.toml: target must be an accuracy in (0, 1]" in refused("report", sweep, *out)
    settings.write_text(plain)
    command("report", sweep, *out)


PARTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no identity": lambda arrays: described(arrays, identity=None),
    "settings, number": lambda arrays: described(arrays, spec=5),
    "settings of nobody": lambda arrays: described(arrays, spec={"model": "mclr"}),
    "rounds": lambda arrays: described(arrays, rounds=10**12),
    "evaluations": lambda arrays: described(arrays, eval_every=10**30),
    "flat": lambda arrays: arrays.update(bytes_up=np.zeros(3, np.int64)),
    "bytes that are no integers": lambda arrays: arrays.update(bytes_up=np.full((2, 2), np.nan)),
    "bytes at the end of int64": lambda arrays: arrays.update(bytes_up=np.full((2, 2), 2**63 - 1)),
}


def described(arrays: dict[str, Any], **told: object) -> None:
    meta = json.loads(arrays["meta"].tobytes())
    meta[0] = {k: v for k, v in {**meta[0], **told}.items() if v is not None or k == "diverged"}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)


def test_hostile_parts(sweep: Path, tmp_path: Path) -> None:
    (path,) = (sweep / "parts").glob("*.npz")
    with np.load(path) as file:
        whole = dict(file)
    for change in PARTS.values():
        arrays = dict(whole)
        change(arrays)
        np.savez_compressed(path, **arrays)
        assert path.name in refused("report", sweep, "--out", tmp_path / "r.html")


# ---- folders that cannot be entered ----

LOCKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from console import fedsso
import fedsso.report.sources, fedsso.report.page, fedsso.data
if os.getuid() == 0:  # no permission stops root
    os.setuid(65534)
locked = sys.argv[2]
from console import fedsso as command
os.environ["FEDSSO_DATA"] = locked
for args in (["report", locked + "/run"], ["resume", locked + "/run"],
             ["data", "list"], ["run", "--dataset", "mnist"],
             ["run", "--config", locked + "/c.toml"],
             ["run", "--dataset", "csv", "--files", locked, "--column", "y"]):
    print(command(*args, code=2).stderr.splitlines()[-1])
"""


def test_folders_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        locked = Path(name) / "locked"
        locked.mkdir()
        Path(name).chmod(0o755)
        locked.chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", LOCKED, str(Path(__file__).parents[1]), str(locked)],
            capture_output=True,
            text=True,
        )
        locked.chmod(0o700)
    assert done.returncode == 0, done.stderr + done.stdout
    said = done.stdout.splitlines()
    assert len(said) == 6
    for line in said:
        assert line.startswith("error: cannot ")
        assert "Permission denied" in line


def test_links_and_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path / ("n" * 300)):
        for args in (
            ("report", path),
            ("resume", path),
            ("data", "list", "--data-dir", path),
            ("run", "--config", path),
        ):
            refused(*args)
        monkeypatch.setenv("FEDSSO_DATA", str(path))
        refused("data", "list")


# ---- bounded memory ----

BOUNDED = """
import resource, sys
from pathlib import Path
from fedsso.data.images import npz
from fedsso.data.svmlight import svmlight
from fedsso.errors import InputError

size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 1_500_000_000,) * 2)
for path in map(Path, sys.argv[1:]):
    try:
        (npz if path.suffix == ".npz" else svmlight)([path])
    except InputError as error:
        print(path.name, type(error).__name__, str(error).partition("FEDSSO_MAX_")[2].split()[0])
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_bombs_do_not_take_the_memory_of_the_machine(tmp_path: Path) -> None:
    """Not more than 1.5 GB beyond what the library takes itself."""
    (tmp_path / "column").write_text("1 268435456:1\n")
    (tmp_path / "cells").write_text("1 1048576:1\n" * 1000)  # 4 GB dense; it stays sparse
    (tmp_path / "lines").write_bytes(gzip.compress(b"\n" * (9 << 20), 1))
    (tmp_path / "line").write_bytes(gzip.compress(bytes(20 << 20), 1))
    x = np.zeros((100_000, 28, 28), np.uint8)
    np.savez_compressed(tmp_path / "zeros.npz", x=x, y=x[:, 0, 0])
    paths = [tmp_path / name for name in ("column", "cells", "lines", "line", "zeros.npz")]
    command = [sys.executable, "-c", BOUNDED, *map(str, paths)]
    assert subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines() == [
        "column TooLarge COLUMNS",
        "lines TooLarge ROWS",
        "line TooLarge LINE",
        "zeros.npz TooLarge EXPANSION",
    ]


def test_a_small_table_with_long_names_stays_small(tmp_path: Path) -> None:
    """Names in one array of a fixed width would take 400 kB each."""
    (tmp_path / "a.csv").write_text(
        "x,y,who\n" + f"1,{'n' * 100_000},{'w' * 100_000}\n" + "2,b,c\n" * 1000
    )
    pool = csv_pool([tmp_path / "a.csv"], "y", group="who")
    assert pool.y.tolist() == [1, *[0] * 1000]
    assert pool.group.nbytes <= 8 * 1001


# ---- labels ----


def test_large_labels_stay_apart(tmp_path: Path) -> None:
    labels = ["9007199254740992", "9007199254740993", "1", "9007199254740993", "9007199254740994"]
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "".join(f"{i},{label}\n" for i, label in enumerate(labels)))
    pool = csv_pool([path], "y")
    assert pool.y.tolist() == [1, 2, 0, 2, 3]
    assert pool.notes == ("labels 1 to 9007199254740994 are numbered 0 to 3 in sorted order",)
    huge = tmp_path / "huge.csv"
    huge.write_text("x,y\n1,1e30\n2,2e30\n3,1e30\n" + "4," + "9" * 35 + "\n")
    assert csv_pool([huge], "y").y.tolist() == [0, 1, 0, 2]
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    assert csv_pool([path, tmp_path / "b.csv"], "y").y.tolist() == [2, 3, 0, 3, 4, 1]
    path.write_text("9007199254740993 1:1\n1 1:2\n")
    with pytest.raises(InputError, match=r"line 1: has a label of 2\^53 or more"):
        svmlight([path])


# ---- privacy ----

LEAKS = {
    "a feature": (
        "age,y\n1,0\n" + f"{SECRET},1\n" * 3,
        "column 'age': 3 cells are neither numbers nor missing values",
    ),
    "the target": (
        f"age,y\n1,0\n2,{SECRET}\n3,{SECRET}\n",
        "column 'y', the target: 2 cells are not numbers, 3 rows",
    ),
    "no target": (
        f"age,y\n1,\n2,0\n{SECRET},1\n".replace(SECRET, "3"),
        "column 'y', the target: 1 rows have no value",
    ),
    "too many cells": (f"age,y\n1,0,{SECRET}\n", "at least 1 row has 3 cells, expected 2"),
    "no header": (f"{SECRET},1\n{SECRET},0\n", "wrong input; details are in the client's own log"),
    "quotes": (f'age,y\n"{SECRET},1\n', "a file that is damaged; details"),
    "not UTF-8": (f"age,y\n{SECRET}\udcff,1\n", "the table is not UTF-8 text"),
    "long": (f"age,y\n{SECRET * 10_000},1\n", "a file beyond a limit; details"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_others_are_told_of_a_table_quotes_no_cell(name: str, tmp_path: Path) -> None:
    text, public = LEAKS[name]
    path = tmp_path / "Miller.csv"
    path.write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(InputError) as error:
        fedsso.Federation.from_csv([path], "y")
    assert error.value.public.startswith(public)
    assert "Miller" not in error.value.public


def test_names_where_numbers_are_needed_are_not_told(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"age,y\n1,{SECRET}\n")
    with pytest.raises(InputError, match="Miller") as error:
        fedsso.Federation.from_csv([tmp_path / "a.csv"], "y", classes=0)
    assert error.value.public == "column 'y': holds names, a regression needs numbers"


def test_the_report_does_not_open_what_a_foreign_file_names(
    run_folder: Path, tmp_path: Path, sweep: Path
) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text(f"{SECRET},y\n" + f"{SECRET},1\n" * 20)
    paths = [str(secret), "/etc/passwd"]
    text = unsealed(sweep / "sweep.toml")
    for number, own in enumerate(
        (f'target = "y"\ngroup = "{SECRET[:6]}"', 'target = "y"', 'target = "absent"')
    ):
        data = f'[data]\ndataset = "csv"\nfiles = {json.dumps(paths[: 1 + number])}\n{own}\n'
        (sweep / "sweep.toml").write_text(text.partition("[data]")[0] + data)
        for asked in ((), ("--with-data",)):
            told = command("report", sweep, "--out", tmp_path / "r.html", *asked)
            page = (tmp_path / "r.html").read_text()
            for output in (told.output, page.replace(own, "")):
                assert SECRET not in output
                assert "root:x:" not in output
    assert content([run_folder]).holdings  # a data set by its name


def test_data_are_opened_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(12)))
    own = fedsso.load("csv", files=str(tmp_path), target="y")
    fedsso.simulate(own, "mclr", "fedavg", rounds=1, device="cpu").save(tmp_path / "run")
    (tmp_path / "a.csv").unlink()
    os.mkfifo(tmp_path / "a.csv")  # to open it would show
    (note,) = content([tmp_path / "run"]).notes
    assert note.endswith(
        "the data are no set by name; --with-data (in Python with_data=True) reads them."
    )
    (note,) = content([tmp_path / "run"], with_data=True).notes
    assert note == "The data per client are not shown: a file that cannot be read."


# ---- runs that are moved, data that are fewer ----


def test_a_start_from_a_file_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = fedsso.load("digits", clients=3)
    fedsso.simulate(fed, "mclr", "fedavg", rounds=1, device="cpu").save(tmp_path / "first")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    start = "first/checkpoint.safetensors"
    fedsso.simulate(fed, "mclr", "fedavg", rounds=1, device="cpu", init=start).save(
        tmp_path / "second"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    spec = fedsso.load_run(tmp_path / "second").spec
    assert spec.options["init"] == str(tmp_path.resolve() / start)
    problem_of(spec)


def test_a_run_whose_files_were_moved_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(12)))
    fed = fedsso.load("csv", files=[folder], target="y")
    run = fedsso.simulate(fed, "mclr", "fedavg", rounds=1, device="cpu")
    folder.rename(tmp_path / "moved")
    with pytest.raises(
        InputError,
        match=r"data/a\.csv: No such file .*put it back, or load it from elsewhere, in Pyt",
    ):
        federation_of(run.spec)
    again = fedsso.load("csv", files=[tmp_path / "moved"], target="y")
    assert problem_of(run.spec, again).fed is again


def test_a_data_set_with_fewer_rows_says_so(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (400, 28, 28), np.uint8)
    np.savez(tmp_path / "mnist.npz", x=x, y=np.arange(400) % 10)
    fed = fedsso.load("mnist", data_dir=tmp_path, partition="iid", clients=4)
    assert fed.notes[0] == (
        "mnist.npz holds 400 of 70000 rows; `fedsso data get mnist` downloads all"
    )


def test_a_limit_holds_at_every_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers take their limits from the environment, each the one that fits."""
    (tmp_path / "a.csv").write_text("x,z,y\n" + "1,2,0\n" * 10)
    (tmp_path / "a.svm").write_text("1 3:1\n0 1:1\n" * 5)
    doors: dict[str, Callable[[], object]] = {
        "CELLS=19": lambda: csv_pool([tmp_path / "a.csv"], "y"),
        "COLUMNS=2": lambda: csv_pool([tmp_path / "a.csv"], "y"),
        "ROWS=9": lambda: csv_pool([tmp_path / "a.csv"], "y"),
        "CELLS=29": lambda: svmlight([tmp_path / "a.svm"], layout="dense"),
        "ROWS=8": lambda: svmlight([tmp_path / "a.svm"]),
    }
    for limit, read in doors.items():
        name, _, most = limit.partition("=")
        read()
        monkeypatch.setenv(f"FEDSSO_MAX_{name}", most)
        with pytest.raises(TooLarge, match=f"FEDSSO_MAX_{name}"):
            read()
        monkeypatch.delenv(f"FEDSSO_MAX_{name}")


def test_a_wrong_limit_is_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = fedsso.load("digits", clients=3)
    monkeypatch.setenv("FEDSSO_MAX_BYTES", "abc")
    assert "FEDSSO_MAX_BYTES must be" in refused("run", *BRIEF, "--out", tmp_path / "run")
    with pytest.raises(InputError, match="FEDSSO_MAX_BYTES must be"):
        fedsso.simulate(fed, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
