"""Every message of docs/faq.md comes, word for word, from what stands above it."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    from typer.testing import CliRunner

    from fedsso.cli.main import app

import fedsso

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
ENTRY = re.compile(
    r"^### ([^\n]+)\n\n```(sh|python)\n(.*?)```\n\n```\n(.*?)\n```$", re.MULTILINE | re.DOTALL
)


class Entry(NamedTuple):
    title: str
    language: str
    code: str
    message: str


ENTRIES = [Entry(*found) for found in ENTRY.findall(PAGE)]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hospital, a spoilt table and an empty folder: what the page speaks of."""
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{i % 7 + 0.5},{i % 5},{int(i % 7 > 3)}" for i in range(40))
    Path("hospitals").mkdir()
    Path("empty").mkdir()
    Path("hospitals/north.csv").write_text(f"age,dose,outcome\n{rows}", encoding="utf-8")
    Path("spoilt.csv").write_text(f"age,dose,outcome\n50,1,0\n5O,1,0\n{rows}", encoding="utf-8")


def test_every_entry_is_found() -> None:
    assert len(ENTRIES) == PAGE.count("\n### ")
    assert PAGE.count("```") == 4 * len(ENTRIES), "code outside of an entry would not be run"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title.replace(" ", "-"))
def test_the_message_is_the_one_on_the_page(entry: Entry) -> None:
    if "cuda" in entry.code and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    told = refused(entry.code) if entry.language == "python" else complaint(entry.code)
    pattern = ".+".join(map(re.escape, entry.message.split("…")))
    assert re.fullmatch(pattern, told), told


def refused(code: str) -> str:
    """What the last statement raises."""
    with pytest.raises(fedsso.InputError) as error:
        exec(compile(code, "faq.md", "exec"), {"__name__": "page"})
    return str(error.value)


def complaint(code: str) -> str:
    """What the last command says as it ends with exit code 2; those before succeed."""
    *before, last = code.splitlines()
    for line in before:
        assert call(line)[0] == 0
    status, told = call(last)
    assert status == 2
    return told.partition("error: ")[2].strip()


def call(line: str) -> tuple[int, str]:
    """A command with variables of its environment before it: exit code and output."""
    words = shlex.split(line)
    start = words.index("fedsso")
    environment = dict(word.split("=", 1) for word in words[:start])
    told = CliRunner().invoke(app, words[start + 1 :], env={"COLUMNS": "400", **environment})
    return told.exit_code, told.output
