"""Table 3, measured: the bytes that the formulas give, in both files, and remarks that are true."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from fedsso import Federation
from fedsso.algorithms import make
from fedsso.engine.simulate import run
from fedsso.errors import InputError
from fedsso.experiment.stepper import Simulation
from fedsso.paper.table3 import ENTRIES, table3
from fedsso.support.trees import nbytes

SIZES = {"mclr": 7850, "cnn": 6230}
SCALARS = 96  # bytes of norms, counters and flags
LABELS = [entry.label for entry in ENTRIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("paper") / "new"
    table3(out)
    return out


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "table3.csv").open(encoding="utf-8", newline="") as file:
        return {(row["model"], row["algorithm"]): row for row in csv.DictReader(file)}


def kept(pairs: int, d: int) -> int:
    """x, g, s, the pairs and a copy of one; in 8 bytes two Gram matrices, cur, 13 scalars; the
    client step; 1 flag."""
    return 4 * (3 + 2 * (pairs + 1)) * d + 8 * (2 * pairs**2 + pairs + 13) + 4 + 1


@pytest.mark.parametrize(("model", "d"), SIZES.items())
def test_bytes_are_those_of_the_formulas(
    rows: dict[tuple[str, str], dict[str, str]], model: str, d: int
) -> None:
    half = d * (d + 1) // 2
    expected = {  # numbers of a round; numbers that the server and a client keep
        "FedAvg": (2 * d, d, 0),
        "SCAFFOLD": (4 * d, 2 * d, d),
        "FedDANE": (4 * d, 2 * d, 0),
        "FedNL, no compressor": (2 * d + half + 1, d * d + d, d * d),
        "FedNL, rank 1": (3 * d + 2, d * d + d, d * d),
        "FedSSO, dense BFGS": (2 * d, d * d + 3 * d, 0),
        "FedSSO, 200 pairs": (2 * d, kept(200, d) // 4, 0),
        "FedSSO, L-BFGS, m = 20": (2 * d, kept(20, d) // 4, 0),
        "FedAC": (4 * d, 2 * d, 0),
        "FedAdaGrad": (2 * d, 3 * d, 0),
    }
    assert list(expected) == LABELS
    for label, (sent, server, client) in expected.items():
        row = rows[model, label]
        assert int(row["d"]) == d
        assert int(row["round"]) == int(row["down"]) + int(row["up"]) == 4 * sent, label
        assert 0 <= int(row["server"]) - 4 * server <= SCALARS, label
        assert int(row["client"]) == 4 * client, label


def test_multiples_are_of_fedavgs(rows: dict[tuple[str, str], dict[str, str]]) -> None:
    row = rows["mclr", "FedSSO, 200 pairs"]
    assert float(row["round_n_c"]) == 1
    assert float(row["server_n_m"]) == kept(200, 7850) / 31_400
    assert float(rows["cnn", "SCAFFOLD"]["client_n_m"]) == 1


def test_the_papers_entries_stand_beside(rows: dict[tuple[str, str], dict[str, str]]) -> None:
    names = ("paper_round", "paper_server", "paper_client")
    found = {label: tuple(rows["mclr", label][name] for name in names) for label in LABELS}
    assert found["FedNL, rank 1"] == ("n_c²", "2n_m² + 2n_m", "n_m² + 2n_m")
    assert found["FedSSO, dense BFGS"] == ("n_c", "n_m² + 4n_m", "n_m")
    assert found["FedAC"] == ("", "", "")


def test_the_page_shows_the_same_numbers(
    folder: Path, rows: dict[tuple[str, str], dict[str, str]]
) -> None:
    lines = (folder / "table3.md").read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("| ")]
    assert len(tables) == 2 * (1 + len(LABELS))
    assert len({line.count("|") for line in tables}) == 1
    assert [line for line in lines if line.startswith("## ")] == [
        "## mclr, d = 7 850",
        "## cnn, d = 6 230",
    ]
    assert (
        "| FedNL, no compressor | 1 | 123 323 504 | 1964 | n_c² | 246 521 408 | 7851 |"
        in "\n".join(lines)
    )
    for (_, label), row in rows.items():
        shown = f"{int(row['server']):,}".replace(",", " ")
        assert any(line.startswith(f"| {label} |") and f"| {shown} |" in line for line in tables)


def test_room_for_pairs_is_taken_at_the_start_and_fills_by_one_a_round() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(40, 3, generator=draw), torch.randint(0, 2, (40,), generator=draw))
        for _ in range(2)
    ]
    full = {"rounds": 4, "batch_size": 40, "device": "cpu", "local_steps": 1}
    fed = Federation.from_clients(rows)
    sim = Simulation(fed, "mclr", [make("fedsso", {"pairs": 20, "guard": "none"})], **full)
    start = nbytes(sim.server, 1)
    assert start == kept(20, 8)
    run(sim, 4)
    assert nbytes(sim.server, 1) == start
    assert sim.server.curvature.held.tolist() == [3]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        table3(tmp_path / "out")
