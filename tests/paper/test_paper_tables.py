"""Table 2 and the figures, on a small task of our own: what is run, chosen and written."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsso.errors import InputError
from fedsso.experiment.results import COUNTS, Results, Setting
from fedsso.experiment.trace import Trace
from fedsso.experiment.workers import OutOfTime
from fedsso.paper import COMMANDS
from fedsso.paper import curves as curves_module
from fedsso.paper.curves import TAUS, figure
from fedsso.paper.figures import FIGURES, Column, Figure
from fedsso.paper.lab import SWEEPS, Lab
from fedsso.paper.published import TABLE2 as PUBLISHED
from fedsso.paper.released import same_setting
from fedsso.paper.table2 import _tuned, table2
from fedsso.paper.table2_pages import (
    Block,
    _first,
    _head_of,
    _misses,
    _numbers,
    _rows,
    _section,
    ranking,
    write,
)
from fedsso.paper.tasks import METHODS, SEEDS, TABLE2, TASKS, Task
from fedsso.paper.write import save_csv, settings, spread
from studies import made_up

SMALL = Task(
    "digits-mclr", "Digits, 4 clients", {"name": "digits", "clients": 4}, "mclr", (0.5, 0.8), 0.8
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("paper"), device="cpu", quick=True)


@pytest.fixture(scope="module")
def block(lab: Lab) -> Block:
    return _tuned(lab, SMALL, slow=False)


def test_the_tasks_are_those_of_the_paper() -> None:
    for name, block in PUBLISHED.items():
        assert TABLE2[name].targets == block.targets
        assert TABLE2[name].deciding == block.deciding
    assert {"emnist-mclr", "emnist-cnn"} <= TABLE2.keys()
    assert all(task.name == name and task.deciding in task.targets for name, task in TASKS.items())


def test_methods_have_the_papers_grid() -> None:
    sizes = {name: len(method.records()) for name, method in METHODS.items()}
    assert sizes["fedsso"] == sizes["fedsso-dfp"] == sizes["fedadam"] == sizes["fedadagrad"] == 84
    assert sizes["fedavg"] == sizes["scaffold"] == sizes["feddane"] == 12
    assert sizes["fednl"] == 3
    assert sizes["fedsso-default"] == 1
    assert METHODS["fedsso"].at(alpha=0.3).guard == "none"  # type: ignore[attr-defined]
    assert METHODS["fednl"].at(alpha=0.3) == METHODS["fednl"].records()[2]  # it has no alpha


def test_a_block_holds_every_method_and_the_best_of_each_grid(block: Block) -> None:
    assert set(block.grids) == set(METHODS) - {"fednl"}
    for count in COUNTS:
        for name, setting in block.chosen[count].items():
            means = [s.mean_rounds(0.8, count) for s in block.grids[name].settings()]
            assert setting.mean_rounds(0.8, count) == min(means)


def test_nothing_runs_twice(lab: Lab, block: Block) -> None:
    parts = sorted((lab.out / SWEEPS / SMALL.name).iterdir())
    again = Lab(
        lab.out, device="cpu", quick=True, deadline=-math.inf
    )  # would stop at the first new run
    assert (
        _tuned(again, SMALL, slow=False).chosen["first hit"].keys()
        == block.chosen["first hit"].keys()
    )
    assert sorted((lab.out / SWEEPS / SMALL.name).iterdir()) == parts
    with pytest.raises(OutOfTime):
        again.study(SMALL, METHODS["fedavg"].records(thin=True), SEEDS[:2])


def test_rows_show_rounds_bytes_and_the_share_that_works(block: Block) -> None:
    rows = {row["algorithm"]: row for row in _rows(block, "first hit")}
    fedavg, setting = rows["FedAvg"], block.chosen["first hit"]["fedavg"]
    hit = setting.rounds(0.8)[0]
    assert hit is not None
    assert fedavg["**0.80**"] == str(hit)
    d = 64 * 10 + 10
    assert float(fedavg["MB"]) == pytest.approx(hit * 8 * d / 1e6, abs=0.005)
    assert fedavg["works"].startswith(f"{block.grids['fedavg'].working(0.8)} of 2")
    assert fedavg["setting"] == f"α={setting.spec.hyper['alpha']:g}"
    scaffold, both = rows["SCAFFOLD"], block.chosen["first hit"]["scaffold"].rounds(0.8)[0]
    assert both is not None
    assert float(scaffold["MB"]) == pytest.approx(
        both * 16 * d / 1e6, abs=0.005
    )  # two vectors each way
    assert _head_of(SMALL, 0.5) == "0.50"


def test_who_is_first_is_said_plainly(block: Block) -> None:
    order = ranking(block, "first hit")
    assert order == sorted(order, key=lambda pair: pair[1])
    text = _first(block, "first hit")
    assert METHODS[order[0][0]].title in text
    place = [name for name, _ in order].index("fedsso-default") + 1
    assert place <= 3 or f"number {place}" in text
    high = block._replace(task=Task("x", "x", SMALL.data, "mclr", (0.5, 0.99999), 0.99999))
    assert _first(high, "first hit") == "Nobody reaches 1.00 with every seed."


def test_table2_is_written_as_markdown_csv_and_pictures(lab: Lab, block: Block) -> None:
    write(Lab(lab.out, device="cpu"), [block], slow=False, name="table2")
    text = (lab.out / "table2.md").read_text()
    assert "## Digits, 4 clients" in text
    assert all(METHODS[name].title in text for name in block.grids)
    with (lab.out / "table2-trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    assert len(trials) == sum(len(grid) for grid in block.grids.values())
    assert len(_numbers(block)) == 2 * len(block.grids)
    for name in (
        "table2.png",
        "table2.pdf",
        "table2-grid-digits-mclr.png",
        "table2-grid-digits-mclr.pdf",
    ):
        assert (lab.out / name).stat().st_size > 5000


def test_a_block_that_the_paper_has_shows_its_numbers(lab: Lab, block: Block) -> None:
    known = block._replace(
        task=Task("mnist-mclr", "x", SMALL.data, "mclr", TABLE2["mnist-mclr"].targets, 0.88)
    )
    text = "\n".join(_section(lab, known))
    assert "FedNL, the paper (last time below)" in text
    assert "| 14 | 14 | 17 | 20 | 24 |" in text


def test_wrong_block(lab: Lab) -> None:
    with pytest.raises(InputError, match="mnist-mclr"):
        table2(lab, ["mnist-mlcr"])


def test_a_figure_is_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(curves_module.TASKS, SMALL.name, SMALL)
    columns = (
        Column(SMALL.name, ("fedavg", "fedsso"), 0.1),
        Column(SMALL.name, ("fedavg", "fedsso")),
    )
    monkeypatch.setitem(FIGURES, "fig-test", Figure("A test", columns, "A remark."))
    figure(lab, "fig-test")
    text = (lab.out / "fig-test.md").read_text()
    assert "A remark." in text
    assert "quick look" in text
    assert text.count("| FedSSO α=") == 2
    assert (lab.out / "fig-test.png").stat().st_size > 5000
    with (lab.out / "fig-test.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["panel"].partition(": ")[2] for row in rows] == ["α\u00a0=\u00a00.1"] * 2 + [
        "best settings"
    ] * 2
    assert all(f"first hit {target:g}" in rows[0] for target in SMALL.targets)
    assert "Settings that reach it: FedAvg" in text
    assert "Diverged: none." in text or "seeds)" in text


def test_every_command_of_the_paper_is_there() -> None:
    wanted = {
        "table2",
        "table3",
        "fig-same",
        "fig-optimal",
        "fig-cifar",
        "fig-libsvm",
        "fig-nlp",
        "fig-tau",
        "theory",
    }
    assert wanted <= COMMANDS.keys()
    assert TAUS == (1, 2, 5, 10, 20, 50)
    same = {column.task: column.alpha for column in FIGURES["fig-same"].columns}
    assert same == {
        "mnist-mclr": 0.001,
        "fashion-mclr": 0.001,
        "mnist-cnn": 0.01,
        "fashion-cnn": 0.01,
    }
    assert [c.alpha for c in FIGURES["fig-nlp"].columns] == [0.003, None, 0.03, None]


def test_spread() -> None:
    assert spread([3]) == "3"
    assert spread([1, 2, 3]) == "2.0 ± 1.0"
    assert spread([1, None]) == "– (1/2)"
    assert spread([None, None]) == "–"
    assert spread([0.1234], 2) == "0.12"


def test_settings_show_what_is_tuned(block: Block) -> None:
    shown = {name: settings(s) for name, s in block.chosen["first hit"].items()}
    assert "η=" in shown["fedsso"]
    assert "guard" not in shown["fedsso"]
    assert shown["fedsso-default"].split() == ["α=auto", "η=1"]
    assert "η" not in shown["fedavg"]
    assert "μ=0.1" in shown["fedac"]


def test_csv_has_empty_cells_for_none(tmp_path: Path) -> None:
    save_csv(tmp_path / "a.csv", [{"a": 1, "b": None}, {"a": 2, "b": 3}])
    assert (tmp_path / "a.csv").read_text() == "a,b\n1,\n2,3\n"


def test_the_share_of_an_empty_study() -> None:
    with pytest.raises(InputError, match="no runs"):
        Results([]).best()


def test_released_curves_are_matched_by_partition_start_and_steps(block: Block) -> None:
    """A curve of the 3-client set does not stand for the 20-client one."""
    cnn = TABLE2["fashion-cnn"]
    setting = block.grids["fedsso"].settings()[0]

    def changed(**hyper: Any) -> Setting:
        spec = replace(setting.spec, hyper={**setting.spec.hyper, **hyper})
        return made_up(spec, *setting.traces)

    known = changed(alpha=0.003, eta=1.0)
    assert [c.last_below for c in same_setting(cnn, known)] == [(14, 17, 46, 67, 191)]
    assert same_setting(cnn, changed(alpha=0.003, eta=1.0, guard="adaptive")) == []
    moved = replace(cnn, data={**cnn.data, "partition": "paper-20"})
    assert same_setting(moved, known) == []
    assert same_setting(SMALL, setting) == []


def test_a_setting_that_misses_with_a_seed_is_named(block: Block) -> None:
    fedavg = block.chosen["first hit"]["fedavg"]
    first = fedavg.traces[0]
    never = Trace({**first.columns, "test_accuracy": 0 * first["test_accuracy"]})
    mixed = made_up(fedavg.spec, first, never)
    assert None in mixed.rounds(0.8)
    two = {"fedavg": mixed, "scaffold": made_up(fedavg.spec, first, first)}
    half = block._replace(chosen={"first hit": two})
    assert _misses(half, "first hit") == [
        "The chosen setting gets there with some seeds only: FedAvg (1 of 2)."
    ]
    assert [name for name, _ in ranking(half, "first hit")] == ["scaffold"]
