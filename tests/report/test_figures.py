"""Figures show every curve, cell and bar once, in its colour, within the page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend

from fedsso.errors import InputError
from fedsso.experiment.trace import Trace
from fedsso.report.figures import Bar, Dots, Heat, Panel, heat_maps, panels, rounds_bars
from fedsso.report.figures.bars import _rounds_bars
from fedsso.report.figures.maps import _heat_maps
from fedsso.report.figures.panels import _panels
from fedsso.report.plots import legend_shape
from fedsso.report.styles import NEVER, style
from fedsso.report.tables import Curve
from fedsso.support.picture import LOOK

NAN = math.nan
NAMES = {
    "FedSSO": "fedsso",
    "FedAvg": "fedavg",
    "SCAFFOLD": "scaffold",
    "FedDANE": "feddane",
    "FedNL": "fednl",
}


def trace(*accuracies: float, diverged: int | None = None) -> Trace:
    """As the simulator leaves it: the loss begins with round 1 and ends with the finite numbers."""
    end = len(accuracies) if diverged is None else diverged
    rows = [
        {
            "trial": 0,
            "seed": 0,
            "round": k,
            "overridden": 0,
            "skipped": 0,
            "bytes_up": 1,
            "bytes_down": 1,
        }
        | {"test_accuracy": accuracy, "train_loss": 1 / k if 0 < k < end else NAN}
        for k, accuracy in enumerate(accuracies)
    ]
    return Trace.from_rows(rows, diverged=diverged)


def curve(label: str, *traces: Trace) -> Curve:
    return Curve(label, traces or (trace(0.1, 0.5, 0.8),), NAMES[re.split("[ ,]", label)[0]])


LOST = curve("FedDANE", trace(0.1, 0.3, 0.2, 0.0, 0.0, diverged=3))
RELEASED = [
    Dots("released by the authors", name, [0, 2], [0.1, 0.7]) for name in ("fedsso", "fedavg")
]
GRID = Heat(
    "FedSSO",
    "α",
    "η",
    ["0.01", "0.1"],
    ["0.1", "0.3", "1"],
    np.array([[NAN, 50, 7], [0, 200, NAN]]),
    np.eye(2, 3) > 0,
)
STRIP = Heat(
    "FedAvg", "α", "", ["0.01", "0.1"], [""], np.array([[NAN], [30.0]]), np.zeros((2, 1), bool)
)
BARS: list[Bar] = [
    ("FedAvg", "fedavg", 150.0, None),
    ("FedNL", "fednl", None, None),
    ("FedSSO", "fedsso", 20.0, 1.5),
]


def blank() -> Figure:
    return Figure(layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.07))


def columns(*given: Panel) -> tuple[Figure, list[Axes], list[Axes]]:
    """The figure, its upper axes (losses) and its lower ones (accuracies)."""
    figure = blank()
    with rc_context(LOOK):  # type: ignore[arg-type]
        _panels(figure, given, "Title")
    return figure, figure.axes[: len(given)], figure.axes[len(given) :]


def entries(legend: Legend | None) -> list[str]:
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def inside(figure: Figure) -> bool:
    """Whether the page holds everything that is drawn."""
    FigureCanvasAgg(figure).draw()
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return bool(drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height)


def test_a_column_has_loss_above_accuracy_and_names_its_axes_once() -> None:
    _, losses, accuracies = columns(Panel("a", [curve("FedSSO")]), Panel("b", [curve("FedSSO")]))
    assert [axes.get_title() for axes in losses] == ["a", "b"]
    assert [axes.get_yscale() for axes in (*losses, *accuracies)] == [
        "log",
        "log",
        "linear",
        "linear",
    ]
    assert [axes.get_ylabel() for axes in accuracies] == ["test accuracy", ""]
    assert [axes.get_xlabel() for axes in (losses[0], accuracies[0])] == ["", "communication round"]
    assert losses[0].get_shared_x_axes().joined(losses[0], accuracies[0])


def test_equal_labels_stand_in_the_legend_once() -> None:
    own = [curve("FedSSO α=0.1"), curve("FedAvg α=0.1")]
    figure, _, accuracies = columns(Panel("a", own), Panel("b", own[::-1]))
    assert entries(figure.legends[0]) == ["FedSSO α=0.1", "FedAvg α=0.1"]
    assert [axes.get_legend() for axes in accuracies] == [None, None]


@pytest.mark.parametrize("form", ["{} α={} η=1", "{}, α={} η=1", "{} (α={} η=1)"])
def test_settings_that_differ_between_panels_stand_below_them(form: str) -> None:
    one, two = (
        [curve(form.format(name, alpha)) for name in ("FedSSO", "FedAvg")] for alpha in (0.1, 0.3)
    )
    figure, _, accuracies = columns(Panel("a", one), Panel("b", [*two, curve("FedNL")]))
    assert entries(figure.legends[0]) == ["FedSSO", "FedAvg", "FedNL"]
    assert [entries(axes.get_legend()) for axes in accuracies] == [
        ["α=0.1 η=1"] * 2,
        ["α=0.3 η=1"] * 2,
    ]
    assert [line.get_color() for line in accuracies[1].lines] == [
        style(NAMES[n]).color for n in entries(figure.legends[0])
    ]


def test_settings_within_one_panel_stay_in_the_legend_and_keep_their_shades() -> None:
    steps = [curve(f"FedSSO τ={tau}") for tau in (1, 5, 10)]
    figure, _, accuracies = columns(Panel("a", steps), Panel("b", steps[1:]))
    assert entries(figure.legends[0]) == ["FedSSO τ=1", "FedSSO τ=5", "FedSSO τ=10"]
    shades = [[line.get_color() for line in axes.lines] for axes in accuracies]
    assert len(set(shades[0])) == 3
    assert shades[1] == shades[0][1:]


def test_published_curves_are_dots_in_the_algorithms_colour() -> None:
    figure, losses, accuracies = columns(
        Panel("a", [curve("FedSSO")], RELEASED), Panel("b", [], RELEASED[1:])
    )
    assert entries(figure.legends[0]) == ["FedSSO", "released by the authors"]
    for axes, names in zip(accuracies, (["fedsso", "fedavg"], ["fedavg"]), strict=True):
        dots = [line for line in axes.lines if line.get_linestyle() == "None"]
        assert [dot.get_color() for dot in dots] == [style(name).color for name in names]
        np.testing.assert_array_equal(dots[0].get_xydata(), [[0, 0.1], [2, 0.7]])
    assert [len(axes.lines) for axes in losses] == [1, 0]


def test_bands_and_the_cross_at_the_last_finite_round_are_explained() -> None:
    seeds = curve("FedSSO", trace(0.1, 0.5, 0.8), trace(0.1, 0.6, 0.9))
    figure, _, (accuracy,) = columns(Panel("a", [seeds, LOST]))
    assert entries(figure.legends[0]) == ["FedSSO", "FedDANE", "range over seeds", "diverged"]
    (cross,) = (line for line in accuracy.lines if line.get_marker() == "X")
    np.testing.assert_array_equal(cross.get_xydata(), [[2, 0.2]])
    assert (
        min(np.min(np.asarray(line.get_ydata())) for line in accuracy.lines) == 0.1
    )  # not the zeros that follow


@pytest.mark.parametrize("count", [2, 6])
def test_panels_keep_their_width_and_their_words(count: int) -> None:
    names = [*NAMES, "FedSSO-2", "FedAdaGrad", "FedSophia"]
    figure, _, accuracies = columns(
        *(
            Panel(
                "Fashion-MNIST, MCLR",
                [Curve(f"{n} α=0.000{i} η=0.03", (trace(0.1, 0.5),), n) for n in names],
                RELEASED,
            )
            for i in range(1, count + 1)
        )
    )
    assert inside(figure)
    width = figure.get_size_inches()[0] / count
    boxes = [axes.get_window_extent() for axes in accuracies]
    assert min(box.width for box in boxes) / figure.dpi > 0.6 * width
    keys = [box.get_window_extent() for axes in accuracies if (box := axes.get_legend())]
    assert len(keys) == count
    assert all(left.x1 <= right.x0 for left, right in pairwise(keys))


@pytest.mark.parametrize(
    ("widths", "room", "shape"),
    [
        ([1, 1, 1], 3, (1, 3)),
        ([1, 1, 1], 2.9, (2, 2)),
        ([1, 1, 1], 0.5, (3, 1)),
        ([2, 1, 1, 1], 3, (2, 2)),
        ([1, 1, 1, 1, 1, 1, 1, 1, 9, 1], 9.9, (10, 1)),
        ([4], 1, (1, 1)),
    ],
)
def test_a_legend_takes_as_few_rows_as_fit(
    widths: Sequence[float], room: float, shape: tuple[int, int]
) -> None:
    assert legend_shape(widths, room) == shape


def maps(*given: Heat, most: int = 200) -> Figure:
    figure = blank()
    with rc_context(LOOK):  # type: ignore[arg-type]
        _heat_maps(figure, given, "Title", most)
    return figure


def cells(axes: Axes) -> np.ndarray:
    (mesh,) = (found for found in axes.collections if isinstance(found, QuadMesh))
    mesh.update_scalarmappable()
    return np.asarray(mesh.get_facecolors()).reshape(*np.shape(mesh.get_array()), 4)


def test_never_is_grey_and_few_rounds_are_dark() -> None:
    colours = cells(maps(GRID).axes[0])
    assert [tuple(colours[row, column]) for row, column in ((0, 0), (1, 2))] == [to_rgba(NEVER)] * 2
    light = colours[..., :3].sum(-1)
    assert (
        light[1, 0] == light[0, 2] < light[0, 1] < light[1, 1]
    )  # 0 rounds as dark as the scale's end


def test_cells_hold_their_rounds_a_star_and_crosses() -> None:
    axes = maps(GRID).axes[0]
    assert [text.get_text() for text in axes.texts] == ["50", "7", "0", "200"]
    marks = [
        (line.get_marker(), [math.floor(v) for v in np.ravel(line.get_xydata())])
        for line in axes.lines
    ]
    assert marks == [("X", [0, 0]), ("X", [1, 1]), ("*", [0, 1])]


def test_cells_of_all_maps_are_equal_and_a_single_column_is_a_strip() -> None:
    figure = maps(GRID, STRIP)
    first, second, bar = figure.axes
    FigureCanvasAgg(figure).draw()
    one, two = first.get_window_extent(), second.get_window_extent()
    assert (two.width, two.height) == pytest.approx((one.width / 3, one.height))
    assert [text.get_text() for text in second.get_xticklabels()] == [""]
    assert bar.get_xlabel() == "rounds to the target (log scale)"
    assert entries(figure.legends[0]) == [
        "not with every seed in 200 rounds",
        "diverged",
        "fewest rounds of its map",
    ]


def test_twelve_maps_wrap_without_touching() -> None:
    figure = maps(*[GRID, STRIP, STRIP._replace(title="a long name")] * 4)
    assert inside(figure)
    assert figure.get_size_inches()[0] <= 12
    boxes = [box for axes in figure.axes if (box := axes.get_tightbbox())]
    assert len(boxes) == 13
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]


def test_small_cells_have_no_numbers() -> None:
    wide = Heat(
        "x",
        "α",
        "η",
        ["1"],
        [str(i) for i in range(40)],
        np.full((1, 40), 5.0),
        np.zeros((1, 40), bool),
    )
    figure = maps(wide)
    assert list(figure.axes[0].texts) == []
    assert figure.get_size_inches()[0] <= 12


def test_a_map_where_nothing_is_reached_has_no_star() -> None:
    axes = maps(STRIP._replace(values=np.full((2, 1), NAN)), most=1).axes[0]
    assert list(axes.lines) == list(axes.texts) == []


def bars(*groups: tuple[str, Sequence[Bar]]) -> Figure:
    figure = blank()
    with rc_context(LOOK):  # type: ignore[arg-type]
        _rounds_bars(figure, groups, "Title", 200)
    return figure


def test_bars_are_sorted_and_ours_is_the_strong_one() -> None:
    (axes,) = bars(("MNIST", BARS)).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["FedSSO", "FedAvg", "FedNL"]
    assert [tick.get_fontweight() for tick in axes.get_yticklabels()] == [
        "bold",
        "normal",
        "normal",
    ]
    assert [bar.get_width() for bar in axes.patches] == [20, 150, 200]
    assert [text.get_text() for text in axes.texts] == [
        "20.0 ± 1.5",
        "150",
        "not with every seed in 200 rounds",
    ]
    ours, other, never = (bar.get_facecolor() for bar in axes.patches)
    assert (ours, never) == (to_rgba(style("fedsso").color), to_rgba(NEVER))
    assert sum(other) > sum(to_rgba(style("fedavg").color))


@pytest.mark.parametrize("count", [2, 3])
def test_every_group_has_its_axis_and_bars_are_equally_thick(count: int) -> None:
    figure = bars(*((f"block {i}", BARS[: i + 1]) for i in range(count)))
    assert inside(figure)
    drawn = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in drawn] == [f"block {i}" for i in range(count)]
    assert len([axes for axes in drawn if axes.get_xlabel()]) == (1 if count < 3 else 2)
    heights = [bar.get_window_extent().height for axes in drawn for bar in axes.patches]
    assert max(heights) < 1.05 * min(heights)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_files_are_whole_and_the_same_again(tmp_path: Path, suffix: str, magic: bytes) -> None:
    for turn in ("1", "2"):
        panels(
            tmp_path / f"p{turn}{suffix}",
            [Panel("$a_1", [curve("FedSSO $x"), LOST], RELEASED)],
            title="50 % of $",
        )
        heat_maps(tmp_path / f"h{turn}{suffix}", [GRID, STRIP], title="x", most=200)
        rounds_bars(tmp_path / f"b{turn}{suffix}", [("MNIST", BARS)], most=200)
    for name in "phb":
        first, second = ((tmp_path / f"{name}{turn}{suffix}").read_bytes() for turn in ("1", "2"))
        assert first == second
        assert first.startswith(magic)
        if suffix == ".png":
            assert imread(tmp_path / f"{name}1.png").std() > 0.05


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no panel to draw"),
        ([Panel("a", [])], "'a' is empty"),
        ([Panel("a", [Curve("x", (), "fedavg")])], "'x' has no traces"),
        (
            [Panel("a", [], [Dots("y", "fedavg", [0, 5], [0.1])])],
            "'y' have 2 rounds and 1 accuracies",
        ),
    ],
)
def test_unusable_panels_are_refused(tmp_path: Path, given: list[Panel], words: str) -> None:
    with pytest.raises(InputError, match=words):
        panels(tmp_path / "p.png", given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no map to draw"),
        ([GRID._replace(rows=[])], "0 rows and 3 columns"),
        ([GRID._replace(rows=["0.1"])], r"values of shape \(1, 3\), got \(2, 3\)"),
        ([GRID._replace(lost=np.zeros(3, bool))], r"lost of shape \(2, 3\), got \(3,\)"),
        ([STRIP._replace(values=np.array([[-1.0], [3.0]]))], "from 0 to most=200"),
        ([STRIP._replace(values=np.array([[201.0], [3.0]]))], "from 0 to most=200"),
    ],
)
def test_unusable_maps_are_refused(tmp_path: Path, given: list[Heat], words: str) -> None:
    with pytest.raises(InputError, match=words):
        heat_maps(tmp_path / "h.png", given, title="", most=200)
    with pytest.raises(InputError, match="most must be an integer >= 1"):
        heat_maps(tmp_path / "h.png", [STRIP], title="", most=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no group of bars"),
        ([("MNIST", [])], "'MNIST' is empty"),
        ([("MNIST", [("x", "fedavg", 201.0, None)])], "'x' needs rounds from 0 to most=200"),
        ([("MNIST", [("x", "fedavg", NAN, None)])], "got mean=nan"),
        ([("MNIST", [("x", "fedavg", 3.0, -1.0)])], "sd=-1.0"),
    ],
)
def test_unusable_bars_are_refused(
    tmp_path: Path, given: list[tuple[str, list[Bar]]], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        rounds_bars(tmp_path / "b.png", given, most=200)
