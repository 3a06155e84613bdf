"""The commands `fedsso paper ...`: what they take, write and refuse."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    import typer
    from typer.testing import CliRunner

    from fedsso.cli import paper as cli_paper
    from fedsso.cli.main import app

from fedsso.paper import COMMANDS
from fedsso.paper.lab import Lab
from fedsso.paper.tasks import METHODS, Task

TINY = Task(
    "digits-mclr", "Digits", {"name": "digits", "clients": 3}, "mclr", (0.5,), 0.5, rounds=3
)


def paper(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["paper", *map(str, args)], env={"COLUMNS": "200"})
    assert "Traceback" not in result.output
    assert result.exit_code == code, result.output
    return result.output


def page(lab: Lab) -> None:
    """A command of our own: a run and a page."""
    found = lab.study(TINY, [METHODS["fedavg"].at(alpha=0.3)], lab.seeds)
    (lab.out / "page.md").write_text(
        f"# {found[0].label}, quick: {lab.quick}, seeds: {len(found)}\n"
    )


def conduct(**how: object) -> None:
    values = {"quick": False, "out": None, "device": "cpu", "jobs": 1, "minutes": None} | how
    cli_paper.conduct("page", page, cli_paper.How(**values))  # type: ignore[arg-type]


def test_every_command_teaches() -> None:
    shown = paper("--help")
    assert all(name in shown for name in COMMANDS)
    assert "sweeps" in paper("fig-cifar", "--help")
    assert "--slow" in paper("table2", "--help")
    assert "--device" not in paper("table3", "--help")  # it would do nothing


def test_a_quick_look_does_not_replace_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    conduct(quick=True)
    conduct()
    assert (
        tmp_path / "quick" / "page.md"
    ).read_text() == "# fedavg alpha=0.3, quick: True, seeds: 1\n"
    assert (
        tmp_path / "results" / "page.md"
    ).read_text() == "# fedavg alpha=0.3, quick: False, seeds: 5\n"


def test_the_page_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conduct(out=tmp_path)
    assert "# fedavg alpha=0.3" in capsys.readouterr().out


@pytest.mark.parametrize("old", [None, "# an older page\n"])
def test_some_blocks_alone_have_a_page_of_their_own_which_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    monkeypatch.setattr("fedsso.paper.table2.TABLE2", {TINY.name: TINY})
    if old is not None:
        (tmp_path / "table2.md").write_text(old)
    shown = paper("table2", "--quick", "--blocks", TINY.name, "--out", tmp_path)
    assert "## Digits" in shown
    assert "older" not in shown
    assert "table2-part.*" in shown
    assert (tmp_path / "table2.md").exists() == (old is not None)


def test_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit) as stopped:
        conduct(out=tmp_path, minutes=1e-9)
    assert stopped.value.exit_code == 75


def test_table3(tmp_path: Path) -> None:
    assert "SCAFFOLD" in paper("table3", "--out", tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"table3.md", "table3.csv"}


def test_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did you mean 'mnist-mclr'" in paper(
        "table2", "--blocks", "mnist-mlcr", "--out", tmp_path, code=2
    )
    assert "--minutes must be > 0" in paper("fig-tau", "--minutes", "-1", "--out", tmp_path, code=2)
    assert (
        "unknown device" in paper("fig-tau", "--device", "tpu", "--out", tmp_path, code=2).lower()
    )
    (tmp_path / "file").write_text("")
    assert "file" in paper("fig-tau", "--out", tmp_path / "file", code=2)
    monkeypatch.setenv("FEDSSO_DATA", str(tmp_path / "nothing"))
    assert "fedsso data get" in paper("fig-cifar", "--quick", "--out", tmp_path / "out", code=2)
