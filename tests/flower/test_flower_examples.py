"""The bench of Flower's examples: its clients, its federation and its table."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import flower_examples  # noqa: E402
from benchmarks.flower_examples import EXAMPLES, Case, run, table  # noqa: E402


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows of noise for each node, and two rounds."""
    for name, example in list(EXAMPLES.items()):
        monkeypatch.setitem(EXAMPLES, name, replace(example, rounds=2, held_out=0))
    draw = torch.Generator().manual_seed(0)

    def rows(task: str) -> list[object]:
        shape = (3, 32, 32) if task == "cifar" else (1, 28, 28)
        nodes = []
        for count in range(4, 24):  # other counts, since replies are sorted by them
            x = torch.randn(count, *shape, generator=draw)
            y = torch.randint(10, (count,), generator=draw)
            nodes.append(((x, y), (x, y)))
        return nodes

    kept = {task: rows(task) for task in ("cifar", "fashion")}
    monkeypatch.setattr(flower_examples, "_rows", kept.__getitem__)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("example", ["quickstart", "advanced"])
@pytest.mark.parametrize("client", ["sgd", "momentum", "adam", "adamw"])
def test_every_kind_of_client_trains(example: str, client: str) -> None:
    """The first step of FedSSO() is FedAvg's, to the bit where all nodes answer."""
    averaged = run(Case(example, client, 0.01, 0, "fedavg"))
    ours = run(Case(example, client, 0.01, 0, "fedsso"))
    assert len(averaged) == len(ours) == 2
    if example == "quickstart":
        assert ours[0] == pytest.approx(averaged[0], abs=1e-12)  # a mean over nodes, in any order


def test_mirrored_and_moved_images_keep_their_pixels() -> None:
    """A bright pixel in the middle is moved by four at most in each direction."""
    images = torch.full((64, 1, 28, 28), -1.0)
    images[:, 0, 14, 14] = 1.0
    moved = flower_examples._augmented(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    places = (moved[:, 0] == 1.0).nonzero()
    assert len(places) == 64
    assert (places[:, 1] - 14).abs().max() <= 4
    assert (places[:, 2] - 14).abs().max() <= 5  # the mirror of column 14 is column 13
    assert len(places[:, 1:].unique(dim=0)) > 20


def test_the_table_counts_the_seeds_that_have_both_runs(tmp_path: Path) -> None:
    curves = {"fedavg": [0.1, 0.2, 0.3, 0.3, 0.3], "fedsso": [0.1, 0.3, 0.4, 0.4, 0.4]}
    for name, curve in curves.items():
        (tmp_path / Case("quickstart", "sgd", 0.1, 0, name).file).write_text(json.dumps(curve))
    (tmp_path / Case("quickstart", "sgd", 0.1, 1, "fedavg").file).write_text("[0.1]")
    rows = list(table(tmp_path, ["quickstart"], [0, 1]))
    assert rows[2:] == ["| quickstart | sgd | 0.1 | 1 | 0.300 (0.300) | 0.400 (0.400) | 3 | 2 |"]
