"""The examples with a user's own data and model, run as a user runs them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import fedsso

FOLDER = Path(__file__).parents[2] / "examples"


def run(script: Path, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-W", "error", str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sample
@pytest.mark.parametrize("script", sorted(FOLDER.glob("own_*.py")), ids=lambda script: script.stem)
def test_an_example_is_short_and_runs_anywhere(script: Path, tmp_path: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
    text = run(script, cwd=tmp_path)
    assert "fedsso" in text
    assert "fedavg" in text
    assert not list(tmp_path.iterdir())


def test_own_data_takes_a_folder_and_a_column(tmp_path: Path) -> None:
    for name, shift in (("alpha", 0), ("omega", 5)):
        rows = [f"{i % 7 + shift},{i % 5 or '?'},{int(i % 7 > 3)}" for i in range(40)]
        (tmp_path / f"{name}.csv").write_text(
            "\n".join(["dose,weight,cured", *rows]), encoding="utf-8"
        )
    text = run(FOLDER / "own_data.py", str(tmp_path), "cured", cwd=tmp_path)
    assert "2 clients, 60 train + 20 test rows, sample 2 float32, 2 classes" in text
    assert text.count("alpha  ") == text.count("omega  ") == 2


def test_the_invented_tables_are_there_for_a_regression(tmp_path: Path) -> None:
    run(FOLDER / "own_data.py", "hospitals", cwd=tmp_path)
    tables = sorted(path.name for path in (tmp_path / "hospitals").iterdir())
    assert tables == ["east.csv", "north.csv", "south.csv", "west.csv"]
    result = fedsso.glm(tmp_path / "hospitals", outcome="ill")
    assert (result.converged, len(result.hospitals())) == (True, 4)
    age = result.coefficients().set_index("term").loc["age"]
    assert age["low"] > 0  # the invented illness is one of the old


def test_the_demo_writes_its_page_picture_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With five rounds and one seed, which take a moment instead of a minute."""
    spec = importlib.util.spec_from_file_location("demo", FOLDER / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "ROUNDS", 5)
    monkeypatch.setattr(demo, "SEEDS", (0,))
    demo.main(tmp_path / "demo")
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "curves.png",
        "index.html",
        "table.md",
    ]
    html = (tmp_path / "demo" / "index.html").read_text(encoding="utf-8")
    assert "<h1>fedsso: rounds to a target accuracy</h1>" in html
    assert "Twenty clients hold handwritten digits" in html
    assert (
        html.count("<tr>") == 1 + 3 + 1 + 15
    )  # the best of each algorithm, then all five client steps of each
