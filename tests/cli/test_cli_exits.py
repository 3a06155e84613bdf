"""How commands end: exit codes, signals, files that are in the way, streams that break, and text of
others."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from console import command, fedsso, mentions
from fedsso.cli.screen import Screen, visible
from fedsso.support import exits
from fedsso.support.stopping import listen

SMALL = ["--clients", "4", "--rounds", "3"]
CALM = ["--algorithm", "fedavg", "--alpha", "0.1"]
WILD = ["--algorithm", "fedavg", "--alpha", "1e6", "--model", "mlp"]
DOCS = Path(__file__).parents[2] / "docs"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- finished, diverged, missed ----


def test_the_codes_are_in_the_help_and_in_the_docs() -> None:
    shown = " ".join(fedsso("--help").stdout.split())
    page = " ".join((DOCS / "start.md").read_text(encoding="utf-8").split())
    for code, meaning in exits.MEANING.items():
        assert f"Exit code {code}: {meaning}." in shown
        assert f"| {code} | {meaning} |" in page


def test_a_run_that_diverges_ends_with_1_and_says_where_and_what_to_do(tmp_path: Path) -> None:
    result = fedsso("run", *SMALL, *WILD, "--seeds", "0,1", "--out", tmp_path / "a", code=1)
    (told,) = [line for line in result.stderr.splitlines() if line.startswith("diverged: ")]
    assert "fedavg alpha=1e+06 in round " in told
    assert "(seed 0), round " in told
    assert "--alpha auto" in told
    assert "columns" in told
    assert "diverged in round" in result.stdout
    assert fedsso("resume", tmp_path / "a", code=1).stderr.count("diverged: ") == 1


def test_json_stays_whole_when_a_run_diverges() -> None:
    assert json.loads(fedsso("run", *SMALL, *WILD, "--json", code=1).stdout)["results"][0][
        "diverged"
    ]


def test_one_diverged_run_of_a_comparison_is_enough(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('model = "mlp"\n[fedavg]\nalpha = 1e6\n[fedsgd]\nalpha = 0.1\n')
    told = fedsso(
        "compare", *SMALL, "--config", config, "--algorithms", "fedavg,fedsgd", code=1
    ).stderr
    assert "diverged: fedavg" in told
    assert "fedsgd alpha=0.1 in round" not in told


def test_a_target_asked_for_must_be_reached() -> None:
    assert "missed" not in fedsso("run", *SMALL, *CALM, "--targets", "0.1").stderr
    told = fedsso("run", *SMALL, *CALM, "--targets", "0.1,0.9999", code=1).stderr
    assert mentions(told, "missed: fedavg alpha=0.1 … 0.9999 … more --rounds")


def test_of_a_comparison_one_algorithm_has_to_reach_it() -> None:
    both = ["compare", "--clients", "4", "--algorithms", "fedsso,fedavg", "--rounds", "8"]
    told = fedsso(*both, "--targets", "0.9").stderr  # fedavg's step of 0.01 is far too small
    assert "missed" not in told
    assert (
        "missed: no setting reached 0.9999. "
        in fedsso(*both, "--targets", "0.9,0.9999", code=1).stderr
    )


def test_a_sweep_is_judged_by_its_best_settings() -> None:
    grid = ["sweep", *SMALL, "--algorithms", "fedavg", "--model", "mlp"]
    fedsso(*grid, "--alpha", "0.1,1e6")
    assert "diverged: fedavg alpha=1e+06" in fedsso(*grid, "--alpha", "1e6,1e7", code=1).stderr
    assert (
        "missed: fedavg alpha=0.3 did not reach 0.9999. "
        in fedsso(*grid, "--alpha", "0.1,0.3", "--target", "0.9999", code=1).stderr
    )


@pytest.mark.parametrize(
    "args", [["run", "--targets"], ["compare", "--targets"], ["sweep", "--target"]]
)
@pytest.mark.parametrize("value", ["nan", "0", "2", "inf"])
def test_a_target_that_is_no_accuracy(args: list[str], value: str) -> None:
    told = fedsso(*args, value, code=2).stderr
    assert mentions(told, f"above 0 and at most 1 … such as 0.9 … got {value}")


BROKEN = """
from fedsso.cli import main as cli

@cli.app.command()
def broken() -> None:
    raise {error}

cli.main()
"""


@pytest.mark.sample
@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        ("RuntimeError('oh')", exits.BUG, "please report it"),
        (
            "PermissionError(13, 'Permission denied', '/there')",
            exits.WRONG_INPUT,
            "cannot use /there: Permission",
        ),
        ("MemoryError()", exits.WRONG_INPUT, "not enough memory"),
    ],
)
def test_what_nobody_expected(error: str, code: int, told: str) -> None:
    """A fault of ours must not look like a run that diverged."""
    code_of = [sys.executable, "-c", BROKEN.format(error=error), "broken"]
    done = subprocess.run(code_of, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert told in done.stderr
    assert ("Traceback" in done.stderr) == (code == exits.BUG)


# ---- signals (more in test_cli.py, test_cli_live.py and test_cli_sweep.py) ----


@pytest.mark.sample
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_command_loads(number: signal.Signals) -> None:
    loading = [
        sys.executable,
        "-X",
        "importtime",
        *command("run")[1:],
    ]  # says what has been imported
    process = subprocess.Popen(loading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "numpy" in line:
            break
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == exits.INTERRUPTED
    assert "Traceback" not in said


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    """nohup does that."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        listen(print)
        found = [
            signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
        ]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == [signal.SIG_IGN, print, print]


@pytest.mark.full
def test_a_signal_outside_of_a_run_leaves_no_half_written_file(tmp_path: Path) -> None:
    """A command that is not under way with rounds is left through its `finally`."""
    code = (
        "import os, signal\nfrom pathlib import Path\n"
        "from fedsso.cli import main as cli\nfrom fedsso.support import files\n"
        "@cli.app.command()\ndef write() -> None:\n"
        f"    temporary = Path({str(tmp_path)!r}) / 'half'\n"
        "    fill = lambda file: (file.write(b'x'), signal.raise_signal(signal.SIGTERM))\n"
        "    files.write_then_rename(temporary, temporary.with_name('whole'), fill)\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "write"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (exits.INTERRUPTED, "interrupted\n")
    assert contents(tmp_path) == {}


@pytest.mark.full
def test_a_signal_after_the_work_changes_nothing() -> None:
    """While the interpreter shuts down, for which torch takes its time."""
    late = "atexit.register(signal.raise_signal, signal.SIGINT)"
    code = f"import atexit, signal; from fedsso.cli import main as cli; {late}; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fedsso ")


# ---- streams and surroundings ----


def test_standard_output_on_a_full_device() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("algorithms"), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == exits.WRONG_INPUT
    assert done.stderr.startswith(
        "error: cannot write to standard output: No space left on device; "
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_a_reader_who_leaves_misses_nothing(tmp_path: Path) -> None:
    """The work is done all the same, and the exit code tells of it."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        command("run", *SMALL, *CALM, "--out", out), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert "round 3/3" in said
    assert "Traceback" not in said
    assert "error" not in said
    assert (out / "curves.png").is_file()


@pytest.mark.full
def test_a_bare_environment(tmp_path: Path) -> None:
    """Neither a home nor a terminal, an old locale, and nobody who reads the messages."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")
        if name in os.environ
    }
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("run", *SMALL, *CALM, "--out", tmp_path / "a"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=full,
            env={**kept, "LC_ALL": "C", "TERM": "dumb"},
            check=False,
        )
    assert done.returncode == 0
    assert b"fedavg alpha=0.1" in done.stdout
    assert (tmp_path / "a" / "curves.png").is_file()


# ---- what is in the way ----


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["run", *CALM], "curves.png"),
        (["run", *CALM], "trace.csv"),
        (["run", *CALM], "checkpoint.safetensors"),
        (["compare"], "curves.png"),
        (["compare"], "0000-mine/trace.csv"),
        *(
            (["sweep", "--algorithms", "fedavg"], name)
            for name in ("table.md", "trials.csv", "curves.png", "grid.png")
        ),
        (["sweep", "--algorithms", "fedavg"], "sweep.toml"),
    ],
)
def test_files_of_others_in_the_folder(args: list[str], name: str, tmp_path: Path) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine = 1")
    saved = tmp_path / "saved.toml"
    told = fedsso(*args, *SMALL, "--out", tmp_path / "out", "--save-config", saved, code=2).stderr
    assert mentions(told, f"{file} already exists … another folder for --out")
    assert contents(tmp_path) == {f"out/{name}": b"mine = 1"}


def test_other_files_of_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    fedsso("run", *SMALL, *CALM, "--out", tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_settings_file_that_is_there(tmp_path: Path) -> None:
    saved = tmp_path / "my.csv"
    saved.write_text("a,b\n")
    told = fedsso(
        "run", *SMALL, *CALM, "--save-config", saved, "--out", tmp_path / "out", code=2
    ).stderr
    assert mentions(told, f"{saved} already exists … another name for --save-config")
    assert contents(tmp_path) == {"my.csv": b"a,b\n"}
    saved.unlink()
    for _ in range(2):  # the second time it would stay as it is
        fedsso("run", *SMALL, *CALM, "--save-config", saved)
    fedsso("run", *SMALL, *CALM, "--rounds", 2, "--save-config", saved, code=2)


def test_a_report_replaces_reports_alone(tmp_path: Path) -> None:
    fedsso("run", *SMALL, *CALM, "--out", tmp_path / "run")
    page = tmp_path / "report.html"
    for _ in range(2):
        fedsso("report", tmp_path / "run", "--out", page)
    page.write_text("<p>mine</p>")
    told = fedsso("report", tmp_path / "run", "--out", page, code=2).stderr
    assert mentions(
        told, f"{page} already exists … not a page written by fedsso … another name for --out"
    )
    assert page.read_text() == "<p>mine</p>"


@pytest.mark.sample
@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_picture_replaces_pictures_of_ours_alone(suffix: str, tmp_path: Path) -> None:
    picture = tmp_path / f"who.{suffix}"
    for _ in range(2):
        fedsso("data", "show", "--clients", 3, "--out", picture)
    picture.write_bytes(b"mine")
    told = fedsso("data", "show", "--clients", 3, "--out", picture, code=2).stderr
    assert "already exists and is not a picture written by fedsso" in told
    assert picture.read_bytes() == b"mine"


# ---- resume ----


@pytest.mark.parametrize("args", [["run", *CALM], ["compare", "--algorithms", "fedavg,fedsgd"]])
def test_a_run_killed_before_its_picture_gets_it_from_resume(
    args: list[str], tmp_path: Path
) -> None:
    fedsso(*args, *SMALL, "--out", tmp_path)
    picture = tmp_path / "curves.png"
    before = picture.read_bytes()
    picture.unlink()
    assert "finished already" in fedsso("resume", tmp_path).stderr
    assert picture.read_bytes() == before


def test_resume_of_a_sweep_names_the_command(tmp_path: Path) -> None:
    fedsso("sweep", *SMALL, "--algorithms", "fedavg", "--alpha", "0.1", "--out", tmp_path)
    told = fedsso("resume", tmp_path, code=2).stderr
    again = f"fedsso sweep --config {tmp_path / 'sweep.toml'} --out {tmp_path}"
    assert f"`{again}`" in told
    fedsso(*again.split()[1:])


# ---- text of others ----

HOSTILE = "\x1b[31m:x: [red]\x9b2J\u202e"
SHOWN = r"\x1b[31m:x: [red]\x9b2J\u202e"


def test_control_characters_are_written_out() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("Köln → 東京\nβ") == "Köln → 東京\nβ"


def test_whatever_is_printed_is_shown_as_it_is() -> None:
    """As a line, a styled text, a cell, a title and a message of the log."""
    file = io.StringIO()
    screen = Screen(
        file=file, width=200, force_terminal=True, color_system="standard", legacy_windows=False
    )
    table = Table(title=HOSTILE)
    table.add_row(HOSTILE)
    screen.print(HOSTILE)
    screen.print(Text(HOSTILE, "bold"))
    screen.print(table)
    RichHandler(console=screen, highlighter=NullHighlighter()).emit(
        logging.LogRecord("x", logging.WARNING, "x", 1, HOSTILE, None, None)
    )
    written = file.getvalue()
    assert "\x1b[1m" in written  # our own style is there
    assert written.count(r"\x1b[31m") == 5
    assert written.count(":x:") == 5
    assert "\x1b[31m:" not in written
    assert "\x9b" not in written
    assert "\u202e" not in written


def test_a_label_from_a_file(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fedsso("run", *SMALL, *CALM, "--out", out)
    spec = out / "spec.toml"
    text = spec.read_text()
    assert 'alpha = "0.1"' in text
    text = text.partition("\n")[2]  # without its seal
    spec.write_text(text.replace('alpha = "0.1"', 'alpha = "\\u001b[31m:x: [red]\\u009b2J\\u202e"'))
    shown = fedsso("resume", out).stdout
    assert f"fedavg alpha={SHOWN}" in shown
    document = fedsso("resume", out, "--json").stdout
    assert json.loads(document)["results"][0]["label"] == f"fedavg alpha={HOSTILE}"
    for raw in "\x1b\x9b\u202e":
        assert raw not in shown
        assert raw not in document


def test_names_and_errors(tmp_path: Path) -> None:
    out = tmp_path / HOSTILE
    done = fedsso("run", *SMALL, *CALM, "--out", out)
    assert f"results: {tmp_path / SHOWN}" in done.stdout
    refused = fedsso("run", *SMALL, *CALM, "--out", out, code=2)
    assert SHOWN in refused.stderr
    usage = fedsso("run", "--alpha", HOSTILE, code=2)
    assert SHOWN in usage.stderr
    for raw in "\x1b\x9b\u202e":
        assert raw not in done.output + refused.output + usage.output
