"""The figures of `make figures` stay within their bounds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_of_code", ROOT / "docs" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_the_code_reads_one_thought_per_line(figures: ModuleType) -> None:
    every = figures.modules()
    lines = sum(len(figures.code(module)) for module in every)
    told = "on the whole; `python docs/figures.py --rooms` shows which files: one thought per line"
    dense = sum(map(figures.nodes, every)) / lines
    assert dense <= 9.1, f"{dense:.2f} syntax nodes per line of code {told}"
    packed = 1000 * sum(map(figures.packed, every)) / lines
    assert packed <= 3, f"{packed:.1f} assignments `a, b = x, y` in 1000 lines {told}"
    nested = 1000 * sum(map(figures.nested, every)) / lines
    assert nested <= 1, f"{nested:.1f} nested comprehensions in 1000 lines {told}"


def test_functions_are_short(figures: ModuleType) -> None:
    lengths = {place: n for one in figures.modules() for place, n in figures.functions(one).items()}
    long = {place: n for place, n in lengths.items() if n > 60}
    assert not long, f"more than 60 lines of code: take a part out, with a name: {long}"


def test_chains_of_imports_are_short(figures: ModuleType) -> None:
    found = figures.chain(figures.modules())
    assert len(found) <= 14, f"one import less, or within its function: {' -> '.join(found)}"


def test_the_figures_see_what_they_count(figures: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text('"""Doc."""\n\na, b = 1, 2\nc = [[x for x in y] for y in ((1,),)]\n')
    module = figures.Module(path, path.read_text(), __import__("ast").parse(path.read_text()))
    assert (figures.packed(module), figures.nested(module), len(figures.code(module))) == (1, 1, 2)
    assert figures.documentation(module) == {1}
