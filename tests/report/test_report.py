"""Tables say what the traces say; pictures are whole and the same every time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedsso.algorithms import ALGORITHMS
from fedsso.errors import InputError
from fedsso.experiment.trace import Trace
from fedsso.report.plots import Layout, _draw, plot
from fedsso.report.styles import FAMILIES, OWN, looks, style
from fedsso.report.tables import (
    Curve,
    default_targets,
    markdown,
    numbers,
    remarks,
    rounds_table,
)

NAN = math.nan


def trace(*accuracies: float, loss: Sequence[float] = (), diverged: int | None = None) -> Trace:
    """Round k moves 1 MB up and 0.5 MB down; the loss is 1/k unless given."""
    rows = [
        {"trial": 0, "seed": 0, "round": k, "overridden": 0, "skipped": 0}
        | {"test_accuracy": a, "train_loss": loss[k] if loss else 1 / k if k else NAN}
        | {"bytes_up": 1_000_000 * (k > 0), "bytes_down": 500_000 * (k > 0)}
        for k, a in enumerate(accuracies)
    ]
    return Trace.from_rows(rows, diverged=diverged)


ONE = Curve("FedAvg", (trace(0.1, 0.5, 0.8, 0.9),), "fedavg")
SEEDS = Curve(
    "FedSSO", (trace(0.1, 0.5, 0.9), trace(0.1, 0.8, 0.9), trace(0.1, 0.6, 0.7)), "fedsso"
)
LOST = Curve("FedDANE", (trace(0.1, 0.5, NAN, NAN, diverged=2),), "feddane")


def test_one_seed_gives_plain_numbers() -> None:
    assert rounds_table([ONE], [0.8, 0.5]) == [
        {
            "algorithm": "FedAvg",
            "rounds to 0.50": "1",
            "rounds to 0.80": "2",
            "megabytes": "3.00 (to 0.80)",
            "final accuracy": "0.9000",
        }
    ]


def test_several_seeds_give_mean_and_sample_deviation() -> None:
    (row,) = rounds_table([SEEDS], [0.55, 0.8, 0.95])
    assert row["rounds to 0.55"] == "1.3 ± 0.6"  # rounds 2, 1, 1
    assert row["rounds to 0.80"] == "– (2/3)"
    assert row["rounds to 0.95"] == "–"
    assert row["megabytes"] == "2.00 ± 0.87 (to 0.55)"  # 3, 1.5 and 1.5 MB
    assert row["final accuracy"] == "0.8333 ± 0.1155"  # 0.9, 0.9, 0.7


def test_seeds_that_gave_the_same_run_are_shown_as_one_and_the_table_says_why() -> None:
    once = trace(0.1, 0.5, 0.9)
    curves = [SEEDS._replace(traces=(once, once, once)), SEEDS]
    rows = rounds_table(curves, [0.5])
    assert list(rows[0].values()) == ["FedSSO", "1", "1.50 (to 0.50)", "0.9000"]
    assert "±" in rows[1]["final accuracy"]
    (told,) = remarks(curves, rows)
    assert told.startswith("FedSSO: all seeds gave the same run.")


def test_seeds_that_end_alike_get_a_reason_for_their_deviation_of_zero() -> None:
    curve = ONE._replace(traces=(trace(0.1, 0.5, 0.9), trace(0.1, 0.6, 0.9)))
    rows = rounds_table([curve], [])
    assert rows[0]["final accuracy"] == "0.9000 ± 0.0000"
    (told,) = remarks([curve], rows)
    assert told == (
        "FedAvg: the seeds end with the same value, to the decimals shown, though their runs "
        "differ."
    )
    assert remarks([SEEDS, ONE], rounds_table([SEEDS, ONE], [])) == []


def test_divergence_is_named_and_the_survivors_counted() -> None:
    mixed = Curve(
        "mixed", (*LOST.traces, trace(0.1, 0.5, 0.6, 0.7), trace(0.1, NAN, diverged=1)), "feddane"
    )
    lost, some = rounds_table([LOST, mixed], [0.5])
    assert lost["final accuracy"] == "0.0000, diverged in round 2"
    assert some["final accuracy"] == "0.2333 ± 0.4041, diverged in rounds 2, 1"  # 0, 0.7, 0
    assert some["rounds to 0.50"] == "– (2/3)"
    assert some["megabytes"] == "–"


def test_numbers_survive_strict_json() -> None:
    found = numbers([ONE, SEEDS, LOST], [0.5, 0.99])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found[0]["rounds_to"] == {
        "0.50": {"mean": 1.0, "sd": None, "count": 1},
        "0.99": {"mean": None, "sd": None, "count": 0},
    }
    assert found[0]["megabytes"] == {"mean": 1.5, "sd": None, "count": 1, "target": 0.5}
    assert (found[2]["diverged"], found[2]["final_accuracy"]["mean"]) == ([2], 0.0)


def test_odd_targets_keep_their_digits_and_repeated_ones_are_one() -> None:
    (row,) = rounds_table([ONE], [0.885, 0.5, 0.5])
    assert [name for name in row if name.startswith("rounds")] == [
        "rounds to 0.50",
        "rounds to 0.885",
    ]


def test_curve_without_traces_is_refused() -> None:
    with pytest.raises(InputError, match="'empty' has no traces"):
        rounds_table([Curve("empty", (), "fedavg")], [0.5])


@pytest.mark.parametrize(
    ("start", "best", "targets"),
    [
        (0.1, 0.91, (0.5, 0.7, 0.82, 0.86)),
        (0.5, 0.9, (0.7, 0.8, 0.86, 0.88)),
        (0.9, 0.92, (0.91, 0.916, 0.918, 0.919)),
        (0.5, 0.5, ()),
    ],
)
def test_default_targets_lie_between_start_and_end(
    start: float, best: float, targets: tuple[float, ...]
) -> None:
    traces = (trace(start, start, best), trace(start, NAN, best))
    assert default_targets([ONE._replace(traces=traces)]) == targets


def test_no_target_is_above_the_best_final_accuracy() -> None:
    """An accuracy that was seen in one round, before the end, is no goal."""
    curve = ONE._replace(traces=(trace(0.5, 0.95, 0.77),))
    assert max(default_targets([curve])) <= 0.77
    # A run that ends lower does not lower the goal of the others.
    assert max(default_targets([curve, ONE])) > 0.77


def test_runs_that_all_diverge_have_the_targets_that_they_reached() -> None:
    assert max(default_targets([LOST])) == pytest.approx(0.48)  # 0.1 + 0.95 (0.5 - 0.1)


def test_an_accuracy_that_was_measured_once_is_no_start() -> None:
    once = ONE._replace(traces=(trace(NAN, NAN, 0.9),))
    assert default_targets([once]) == ()
    assert default_targets([once, ONE]) == default_targets([ONE])


def test_no_accuracy_no_targets() -> None:
    assert default_targets([]) == ()
    assert default_targets([Curve("blank", (trace(NAN, NAN), trace()), "fedavg")]) == ()


def test_markdown_aligns_and_escapes() -> None:
    text = markdown([{"algorithm": "a|b", "rounds": "3"}])
    assert text == "| algorithm | rounds |\n| --- | ---: |\n| a\\|b | 3 |\n"
    assert markdown([]) == ""


def test_every_known_algorithm_has_its_own_look() -> None:
    names = [name for family in FAMILIES.values() for name in family]
    assert set(names) <= ALGORITHMS.keys()
    assert len({style(name) for name in names}) == len(names)
    # One without a place in the table has the look of an algorithm of one's own.
    assert len(set(looks([*ALGORITHMS, "new"]).values())) == len(ALGORITHMS) + 1
    assert style("fedsso") != style("fedavg")


def test_unknown_algorithm_has_the_same_look_in_every_process() -> None:
    code = "from fedsso.report import style; print(style('my-own').color)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == style("my-own").color


def test_an_own_algorithm_has_a_colour_of_its_own() -> None:
    names = [f"mine-{i}" for i in range(16)]
    assert not set(OWN) & FAMILIES.keys()
    assert all(style(name).color in OWN for name in names)
    # As many as there are colours and dashes are told apart, in whatever order they come.
    found = looks([*names, "fedsso"])
    assert len(set(found.values())) == 17
    assert looks(["fedsso", *reversed(names)]) == found
    assert looks(["mine-0"]) == {"mine-0": style("mine-0")}


def panels(*curves: Curve, targets: Sequence[float] = ()) -> tuple[Axes, Axes]:
    figure = Figure()
    _draw(figure, curves, Layout(targets=targets))
    accuracy, loss = figure.axes
    return accuracy, loss


def thick(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_linewidth() == 1.8]


def heights(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_ydata())]


def crosses(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if line.get_marker() == "X"]


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")]
)
def test_picture_has_its_format_and_is_the_same_again(
    tmp_path: Path, suffix: str, magic: bytes
) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        plot([ONE, SEEDS, LOST], path, title="Demo", targets=[0.5, 0.8])
    assert first.read_bytes().startswith(magic)
    assert first.read_bytes() == second.read_bytes()


def test_line_is_the_mean_and_band_the_range_of_the_seeds() -> None:
    accuracy, loss = panels(SEEDS)
    (line,) = thick(accuracy)
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
    assert heights(line) == pytest.approx([0.1, 1.9 / 3, 2.5 / 3])
    (band,) = accuracy.collections
    assert {(1.0, 0.5), (1.0, 0.8), (2.0, 0.7), (2.0, 0.9)} <= {
        (x, y) for x, y in np.asarray(band.get_paths()[0].vertices)
    }
    assert heights(thick(loss)[0]) == pytest.approx([1, 0.5])
    assert loss.get_yscale() == "log"


def test_seeds_of_different_length_share_the_rounds_they_have() -> None:
    accuracy, _ = panels(Curve("x", (trace(0.0, 0.2, 0.4), trace(0.2, 0.4)), "fedavg"))
    assert heights(thick(accuracy)[0]) == pytest.approx([0.1, 0.3, 0.4])


def test_unevaluated_rounds_leave_no_gap() -> None:
    accuracy, _ = panels(Curve("x", (trace(0.1, NAN, 0.3),), "fedavg"))
    np.testing.assert_array_equal(thick(accuracy)[0].get_xdata(), [0, 2])


def test_what_was_measured_once_has_no_panel() -> None:
    figure = Figure()
    _draw(figure, [Curve("x", (trace(NAN, NAN, 0.3),), "fedsso")], Layout())
    (loss,) = figure.axes
    assert loss.get_ylabel().startswith("training loss")


def test_each_curve_has_its_algorithms_colour() -> None:
    accuracy, loss = panels(ONE, SEEDS)
    for axes in (accuracy, loss):
        assert [line.get_color() for line in thick(axes)] == [
            style("fedavg").color,
            style("fedsso").color,
        ]


def test_curves_of_one_algorithm_go_from_dark_to_light() -> None:
    accuracy, _ = panels(*(ONE._replace(label=str(i)) for i in range(4)))
    brightness = [sum(to_rgb(line.get_color())) for line in thick(accuracy)]
    assert brightness == sorted(set(brightness))


def test_diverged_seed_ends_in_a_cross_and_does_not_bend_the_mean() -> None:
    wild = trace(0.1, 0.2, NAN, loss=(NAN, 1e30, NAN), diverged=2)
    accuracy, loss = panels(Curve("x", (trace(0.1, 0.5, 0.9, loss=(NAN, 1, 0.5)), wild), "fedavg"))
    assert heights(thick(accuracy)[0]) == pytest.approx([0.1, 0.5, 0.9])
    (cross,) = crosses(accuracy)
    assert (list(np.asarray(cross.get_xdata())), heights(cross)) == ([1], [0.2])
    assert heights(crosses(loss)[0]) == [loss.get_ylim()[1]]


def test_explosion_does_not_flatten_the_other_curves() -> None:
    wild = Curve("wild", (trace(0.1, 0.1, NAN, loss=(2.0, 1e30, NAN), diverged=2),), "feddane")
    _, loss = panels(Curve("calm", (trace(0.1, 0.5, 0.9, loss=(2.0, 1.0, 0.5)),), "fedavg"), wild)
    assert loss.get_ylim()[1] < 30
    assert 0.3 < loss.get_ylim()[0] < 0.5


def test_targets_are_lines_with_their_names() -> None:
    accuracy, _ = panels(ONE, targets=[0.5, 0.885])
    assert [text.get_text() for text in accuracy.texts] == ["0.50", "0.885"]
    assert [heights(line) for line in accuracy.lines[:2]] == [[0.5] * 2, [0.885] * 2]


def test_legend_names_every_curve_and_what_the_marks_mean() -> None:
    figure = panels(ONE, SEEDS, LOST)[0].figure
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["FedAvg", "FedSSO", "FedDANE", "range over seeds", "diverged"]


@pytest.mark.parametrize(
    "losses",
    [
        (0.69, 0.6899, 0.6898),
        (1e-12, 1e-3, 5.0),
        (0.0, 0.0, 0.0),
        (NAN, NAN, NAN),
        (1.0, 1e300, math.inf),
    ],
)
def test_any_loss_can_be_drawn(tmp_path: Path, losses: tuple[float, ...]) -> None:
    runs = tuple(trace(0.1, 0.2, 0.3, loss=losses, diverged=d) for d in (None, 2))
    plot([Curve("x", runs, "fedavg")], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_labels_are_text_not_formulas(tmp_path: Path) -> None:
    plot([ONE._replace(label="cost $1_000 for _x")], tmp_path / "p.png", title="50 % of $")
    assert (tmp_path / "p.png").exists()


def test_unusable_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown picture format '\.pngg'; did you mean '\.png'"):
        plot([ONE], tmp_path / "p.pngg")
    with pytest.raises(InputError, match="no curve"):
        plot([], tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []


def test_plotting_leaves_no_global_state(tmp_path: Path) -> None:
    code = f"""
import sys, matplotlib
settings = lambda: {{k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}}
before = settings()
from fedsso.report import Curve, plot
from fedsso.experiment.trace import Trace
plot([Curve("x", (Trace.from_rows([]),), "fedavg")], {str(tmp_path / "p.png")!r})
assert before == settings()
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def drawn(layout: Layout, *curves: Curve) -> Figure:
    figure = Figure()
    _draw(figure, curves, layout)
    return figure


def test_a_picture_has_the_names_colours_metrics_and_size_that_one_wants() -> None:
    layout = Layout(
        metrics=["test_accuracy"],
        labels={"fedsso": "ours", "FedAvg": "theirs"},
        colors={"fedsso": "black", "FedAvg": "#123456"},
        size=(3.4, 2.4),
    )
    figure = drawn(layout, SEEDS, ONE)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "test accuracy"
    assert [line.get_color() for line in thick(axes)] == ["#000000", "#123456"]
    assert figure.get_size_inches().tolist() == [3.4, 2.4]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[:2] == ["ours", "theirs"]


def test_the_colour_of_an_algorithm_is_shaded_where_it_has_several_curves() -> None:
    second = SEEDS._replace(label="FedSSO 2")
    (axes,) = drawn(
        Layout(metrics=["test_accuracy"], colors={"fedsso": "#808080"}), SEEDS, second
    ).axes
    dark, light = (to_rgb(line.get_color())[0] for line in thick(axes))
    assert dark < to_rgb("#808080")[0] < light


def test_any_loss_and_any_column_can_be_drawn() -> None:
    figure = drawn(Layout(metrics=["train_loss", "bytes_up"]), ONE)
    assert [axes.get_ylabel() for axes in figure.axes] == ["training loss (log scale)", "bytes up"]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear"]


def test_the_settings_of_matplotlib_reach_the_picture(tmp_path: Path) -> None:
    rc = {"font.family": "serif", "font.size": 8, "svg.fonttype": "none"}
    plot([ONE], tmp_path / "a.svg", title="Demo", size=(3, 2), rc=rc)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert 'width="216pt" height="144pt"' in text
    assert "10.4px" in text  # the title: 1.3 times the size of the letters
    assert "8px" in text
    assert "Serif" in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"labels": {"fedsx": "a"}}, "unknown curve 'fedsx'"),
        ({"colors": {"fedavg": "blak"}}, "a colour is a name such as 'black'"),
        ({"metrics": "accuracy"}, "unknown column 'accuracy'; did you mean 'test_accuracy'"),
        ({"size": 3}, "size must be a width and a height in inches"),
        ({"size": (3, -1)}, "size must be a width and a height in inches"),
        ({"rc": {"fontsize": 8}}, "matplotlib has no setting 'fontsize'"),
        ({"rc": {"font.size": "huge!"}}, r"rc\['font.size'\]"),
    ],
)
def test_what_a_picture_cannot_have_is_refused(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        plot([ONE], tmp_path / "a.png", **wrong)
    assert not list(tmp_path.iterdir())
