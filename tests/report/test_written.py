"""A table of settings says the same in Markdown, LaTeX, CSV and as a data frame."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pandas as pd
import pytest
from test_report import LOST, NAN, ONE, SEEDS, trace

from fedsso.errors import InputError
from fedsso.report.tables import Curve, renamed, rounds_table
from fedsso.report.written import MARKS, Table, table, write


def test_a_table_is_its_markdown() -> None:
    found = table([ONE, SEEDS], [0.5])
    assert isinstance(found, str)
    assert found.splitlines()[0] == "| algorithm | rounds to 0.50 | megabytes | final accuracy |"
    assert len(found.splitlines()) == 4
    assert found.to_markdown() == found  # there is nothing to note
    same = table([SEEDS._replace(traces=SEEDS.traces[:1] * 3)], [0.5])
    assert same.to_markdown() == f"{same}\n{same.notes[0]}\n"


def test_latex_has_the_cells_of_the_table_and_marks_the_best() -> None:
    text = table([ONE, SEEDS._replace(label="50 % of our_own")], [0.5, 0.8]).to_latex()
    assert text.splitlines() == [
        r"% needs \usepackage{booktabs}",
        "% Final accuracy: the mean of the last 10 evaluations, of a short run that of its last "
        "quarter.",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r" & \multicolumn{2}{c}{Rounds to accuracy} & & \\",
        r"\cmidrule(lr){2-3}",
        r"Algorithm & 0.50 & 0.80 & Megabytes & Final accuracy \\",
        r"\midrule",
        r"FedAvg & 1 & \textbf{2} & 3.00 (to 0.80) & \textbf{0.9000} \\",
        r"50 \% of our\_own & 1.0 $\pm$ 0.0 & -- (2/3) & 1.50 (to 0.50) & "
        r"0.8333 $\pm$ 0.1155 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert "textbf" not in table([ONE, SEEDS], [0.5]).to_latex(bold=False)


def test_without_targets_there_is_no_head_above_them() -> None:
    text = table([ONE], []).to_latex()
    assert "multicolumn" not in text
    assert r"Algorithm & Megabytes & Final accuracy \\" in text


def test_csv_and_data_frame_have_the_numbers_in_full() -> None:
    found = table([ONE, SEEDS, LOST], [0.5, 0.8])
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    frame = found.to_pandas()
    assert list(frame.columns) == list(rows[0])
    assert rows[1]["seeds"] == "3"
    assert rows[2]["diverged"] == "1"
    assert float(rows[1]["final accuracy"]) == pytest.approx(2.5 / 3, rel=1e-15)
    assert float(rows[1]["final accuracy sd"]) == pytest.approx(math.sqrt(0.04 / 3), rel=1e-12)
    assert rows[1]["rounds to 0.80"] == ""  # which two of three seeds reach
    assert rows[0]["rounds to 0.50 sd"] == ""  # of one seed
    assert float(rows[0]["megabytes to accuracy"]) == 0.8
    read = pd.read_csv(io.StringIO(found.to_csv()))
    pd.testing.assert_frame_equal(read, frame, check_exact=True)


def test_without_an_accuracy_the_test_loss_has_its_place() -> None:
    curve = Curve("a", (trace(NAN, NAN),), "fedavg")
    found = table([curve], [])
    assert list(rounds_table([curve], [])[0]) == found.names
    assert found.names[-1] == "final test loss"
    assert "Final test loss: the mean of" in found.to_latex()


def test_files_are_written_by_their_suffix(tmp_path: Path) -> None:
    found = table([ONE], [0.5])
    for suffix, mark in MARKS.items():
        path = tmp_path / f"table{suffix}"
        write(path, found)
        assert path.read_text(encoding="utf-8").startswith(mark)
    with pytest.raises(InputError, match=r"unknown format of a table '\.xls'"):
        write(tmp_path / "table.xls", found)


def test_curves_are_renamed_by_label_or_algorithm() -> None:
    twice = [ONE, ONE._replace(label="FedAvg 2"), SEEDS]
    found = renamed(twice, {"FedAvg": "a", "fedsso": "b"})
    assert [curve.label for curve in found] == ["a", "FedAvg 2", "b"]
    with pytest.raises(InputError, match="several curves; give their labels: FedAvg, FedAvg 2"):
        renamed(twice, {"fedavg": "a"})


def test_a_table_without_rows_is_empty() -> None:
    assert Table([]) == ""
    assert Table([]).names == []
