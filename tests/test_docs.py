"""What the documentation takes from the code is up to date, and what it shows still comes out."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fedsso
from fedsso.algorithms import ALGORITHMS
from fedsso.data import datasets

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
ABSENT = ["AIDE", "DiSCO", "Newton-Learn", "MOCHA", "HarmoFL", "FedPD", "FedCM", "pFedMe", "Per-FedAvg"]


def module(path: str) -> ModuleType:
    """A script of the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", ["algorithms.md", "datasets.md", "robustness.md", "../results/README.md"])
def test_the_tables_are_the_registrys(name: str) -> None:
    assert module("docs/build.py").page(name) == (ROOT / "docs" / name).read_text(), "run `make docs`"


def test_every_data_set_at_hand_was_tried_with_each_of_its_models() -> None:
    """All but the two whose official files could not be had."""
    found = json.loads((ROOT / "docs" / "smoke.json").read_text())
    asked = {f"{d.name} {model}" for d in datasets() if not d.yours for model in d.models}
    assert {name.split()[0] for name in asked - found.keys()} == {"emnist_letters", "emnist_balanced"}
    assert found.keys() <= asked


def test_every_algorithm_has_a_row_with_its_paper() -> None:
    for name in ALGORITHMS:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 8
        assert '"' in cells[2], "a citation"
        assert "–" not in cells[3:7], "the paper's counts"


@pytest.mark.parametrize("name", [*ABSENT, "Basis Learn"])
def test_what_is_not_here_says_why(name: str) -> None:
    assert re.search(rf"^\| {name}[^|]*\| .{{20,}} \|$", PAGE, re.MULTILINE)


def test_every_algorithm_is_in_the_package() -> None:
    assert sorted(fedsso.algorithms.__all__) == sorted(cls.__name__ for cls in ALGORITHMS.values())
    assert all(getattr(fedsso, cls.__name__) is cls for cls in ALGORITHMS.values())


def test_where_algorithms_end_up() -> None:
    """The example of the docs: each reaches its point, and the points are far apart."""
    example = module("examples/fixed_points.py")
    fed, A, b = example.problem()
    points = {
        "minimiser": fed.optimum,
        "FedAvg's fixed point": example.fixed_point(fed, A, b),
        "FedProx's fixed point": example.fixed_point(fed, A, b, example.MU),
    }
    assert torch.pdist(torch.stack(list(points.values()))).min() > 1e-3
    for name, (record, goal) in example.algorithms().items():
        run = fedsso.simulate(
            fed, "linear", record, rounds=example.ROUNDS, local_steps=example.TAU, batch_size=None, dtype="float64",
            device="cpu", eval_every=50,
        )  # fmt: skip
        assert (run.x - points[goal]).norm() < 1e-7, name
