"""Imports go downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsso
from fedsso.algorithms import ALGORITHMS

ROOT = Path(fedsso.__file__).parent
TABLE = tomllib.loads((ROOT.parents[1] / "docs" / "layers.toml").read_text(encoding="utf-8"))[
    "layer"
]
ROOMS = [room for layer in TABLE for room in layer["rooms"]]
RANK = {room: rank for rank, room in enumerate(ROOMS)}
CONTRACT = {"errors", "support", "maths", "algorithm"}  # all that an algorithm may know
ALLOWED = {  # tighter than the order
    "maths": {"errors", "support"},
    "models": {"errors"},
    "algorithms": CONTRACT,
    "data": {"errors", "support"},
    "engine": RANK.keys() - {"algorithms"},
}
SHORTCUTS = {
    "experiment": {"report"},  # results draw themselves
    "regression": {"report"},
    "data": {"regression"},  # a table is read by its schema, which hospitals need without torch
}
PARTS = {
    f"algorithms.{name}"
    for name in (
        "cautious",
        "client_step",
        "hessians",
        "layers",
        "memory",
        "shapes",
        "trust_region",
    )
}
HEAVY = ("flwr", "ray", "pandas", "sklearn", "typer", "rich", "pydantic", "matplotlib")
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def top(path: Path) -> str:
    """The first part of a module's name inside the package."""
    return path.parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Dotted names inside the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from _from(node, path)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fedsso":
                    yield alias.name.partition(".")[2] or "__init__"


def _from(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    base = (node.module or "").split(".") if node.module else []
    if node.level:
        package = list(path.parts[:-1])
        base = package[: len(package) - node.level + 1] + base
    elif base[:1] == ["fedsso"]:
        base = base[1:]
    else:
        return
    for alias in node.names:
        full = [*base, alias.name]
        exists = (ROOT / Path(*full)).is_dir() or (ROOT / Path(*full)).with_suffix(".py").is_file()
        yield ".".join(full if exists else base) or "__init__"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_from_lower_layers_only(path: Path) -> None:
    own = top(path)
    assert own in RANK, f"{own} has no layer: add it to docs/layers.toml"
    for name in imported(path):
        other = name.split(".")[0]
        if other == own or other in SHORTCUTS.get(own, ()):
            continue
        assert RANK[other] < RANK[own], f"{path} imports {name}, which is not below it"
        assert other in ALLOWED.get(own, RANK), f"{path} must not import {name}"


def test_no_folder_is_crowded() -> None:
    """But for the folders of papers, in which every file is an algorithm by itself."""
    for folder in {path.parent for path in MODULES}:
        if folder.parent.name != "algorithms":
            files = [path for path in MODULES if path.parent == folder]
            assert len(files) <= 20, f"src/fedsso/{folder}: put kindred files into a folder"


def test_algorithms_do_not_import_each_other() -> None:
    """An algorithm may be split into parts, which are no algorithms themselves."""
    for path in MODULES:
        if path.parts[0] == "algorithms" and path.stem != "__init__":
            others = {name for name in imported(path) if name.startswith("algorithms")}
            assert others <= PARTS, path


def test_an_algorithm_fits_on_a_page() -> None:
    seen = 0
    for path in MODULES:
        if path.parts[0] == "algorithms":
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.ClassDef):
                    lines = (node.end_lineno or 0) - node.body[0].lineno + 1
                    assert lines <= 90, f"{path}: the body of {node.name} has {lines} lines"
                    seen += 1
    assert seen >= 2 * len(ALGORITHMS) - 8  # a record, and mostly a state


def test_the_walk_sees_imports() -> None:
    """The test would be worthless if `imported` found nothing."""
    assert {"algorithm", "errors", "maths.quasi_newton"} <= set(
        imported(Path("algorithms/fedsso.py"))
    )
    assert {"data", "engine.simulate", "experiment.spec"} <= set(
        imported(Path("experiment/plan.py"))
    )
    assert "errors" in set(imported(Path("support/files.py")))
    assert {"data.federation", "support.rng"} <= set(imported(Path("data/synthetic.py")))


def test_importing_the_package_stays_light() -> None:
    code = f"import sys, fedsso; fedsso.simulate; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_first_run_does_not_load_torchs_compiler() -> None:
    """It would take longer than many a run."""
    code = (
        "import sys, fedsso; fed = fedsso.load('synthetic', clients=2, dim=3);"
        "fedsso.compare(fed, 'linear', [fedsso.FedSSO(form=f) for f in ('bfgs', 'dfp-dense')], "
        "rounds=2, device='cpu');"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
