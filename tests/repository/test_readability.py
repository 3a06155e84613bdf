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
    assert sum(map(figures.nodes, every)) / lines <= 9
    assert 1000 * sum(map(figures.packed, every)) / lines <= 3
    assert 1000 * sum(map(figures.nested, every)) / lines <= 1
    assert max(max(figures.functions(module), default=0) for module in every) <= 60


def test_chains_of_imports_are_short(figures: ModuleType) -> None:
    found = figures.chain(figures.modules())
    assert len(found) <= 14, " -> ".join(found)


def test_the_figures_see_what_they_count(figures: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text('"""Doc."""\n\na, b = 1, 2\nc = [[x for x in y] for y in ((1,),)]\n')
    module = figures.Module(path, path.read_text(), __import__("ast").parse(path.read_text()))
    assert (figures.packed(module), figures.nested(module), len(figures.code(module))) == (1, 1, 2)
    assert figures.documentation(module) == {1}
