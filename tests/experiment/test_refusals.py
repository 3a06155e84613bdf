"""What the calls of Python refuse before they train, in sentences that name the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsso import (
    FedAvg,
    Federation,
    InputError,
    Results,
    compare,
    load_runs,
    sweep,
)

FAST: dict[str, Any] = {"rounds": 2, "device": "cpu"}


# ---- one run counts once ----


def test_a_run_that_lies_in_two_folders_is_one_seed(fed: Federation, tmp_path: Path) -> None:
    once = compare(fed, "mclr", ["fedavg"], seeds=[0, 1, 2], out=tmp_path, **FAST)
    compare(fed, "mclr", ["fedavg"], seeds=[2, 1, 0], out=tmp_path, **FAST)
    found = load_runs(tmp_path)
    (setting,) = found.settings()
    assert sorted(setting.seeds) == [0, 1, 2]
    assert found.table([0.1]) == once.table([0.1])
    assert Results([*once, *once]).settings() == once.settings()


def test_an_option_lists_different_values(fed: Federation) -> None:
    with pytest.raises(InputError, match=r"batch_size=\[10, 10\] must list different values"):
        sweep(fed, "mclr", [FedAvg()], batch_size=[10, 10], **FAST)
