"""The figures follow their formulas; the pictures show every client truly and nothing overlaps."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import EllipseCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from fedsso.data import Federation, load
from fedsso.data.federation import label_skew
from fedsso.errors import InputError
from fedsso.report.federation import LINES, SHADES, skew, text
from fedsso.report.federation_picture import _draw, _row_axis, picture
from fedsso.support.picture import LOOK


def holding(
    counts: Sequence[Sequence[int]], test_fraction: float = 0.0, **options: Any
) -> Federation:
    """A federation whose client i holds counts[i][c] rows of label c."""
    labels = [np.repeat(np.arange(len(own)), own) for own in counts]
    pairs = [(np.zeros((len(y), 1), np.float32), y) for y in labels]
    return Federation.from_clients(
        pairs, test_fraction=test_fraction, classes=len(counts[0]), **options
    )


@cache
def drawn(clients: int, labels: int, test_fraction: float = 0.25) -> Federation:
    counts = np.random.default_rng(0).integers(0, 30, (clients, labels)) // np.arange(1, labels + 1)
    counts[:, 0] += 1
    return holding(counts.tolist(), test_fraction)


def real(clients: int = 5) -> Federation:
    return load("synthetic", clients=clients, dim=3)


# ---- the figures ----


def test_figures_of_hand_made_counts() -> None:
    f = skew(holding([[2, 2, 0], [0, 0, 4], [1, 1, 0]]))
    assert {k: f[k] for k in ("clients", "rows", "rows_min", "rows_median", "rows_max")} == {
        "clients": 3, "rows": 10, "rows_min": 2, "rows_median": 4, "rows_max": 4
    }  # fmt: skip
    assert f["size_gini"] == pytest.approx(
        (4 * 2) / (2 * 3 * 10)
    )  # |4 - 2| for each of 4 ordered pairs
    assert f["largest_share"] == pytest.approx(0.4)
    distances = [
        (0.2 + 0.2 + 0.4) / 2,
        (0.3 + 0.3 + 0.6) / 2,
        (0.2 + 0.2 + 0.4) / 2,
    ]  # to (0.3, 0.3, 0.4)
    assert f["label_skew"] == pytest.approx(sum(distances) / 3)
    assert f["label_skew_max"] == pytest.approx(0.6)
    assert f["labels_held"] == pytest.approx(5 / 3)
    assert f["effective_labels"] == pytest.approx(math.exp(2 / 3 * math.log(2)))


def test_equal_clients_have_no_skew() -> None:
    f = skew(holding([[5, 5]] * 4, test_fraction=0.25))
    assert (f["size_gini"], f["label_skew"], f["label_skew_max"]) == (0, 0, 0)
    assert (f["rows"], f["rows_min"], f["largest_share"]) == (
        40,
        10,
        0.25,
    )  # training and test rows together
    assert f["effective_labels"] == pytest.approx(2)


def test_gini_is_the_sum_over_pairs_and_stays_below_one() -> None:
    sizes = [1, 7, 2, 40, 40, 3]
    pairs = sum(abs(a - b) for a in sizes for b in sizes)
    assert skew(holding([[n] for n in sizes]))["size_gini"] == pytest.approx(
        pairs / (2 * 6 * sum(sizes))
    )
    assert skew(holding([[1], [100_000]]))["size_gini"] == pytest.approx(1 - 1 / 2, abs=1e-4)


def test_the_label_skew_is_that_of_the_summary() -> None:
    fed = drawn(20, 10)
    assert skew(fed)["label_skew"] == pytest.approx(
        float(label_skew(fed.label_counts()).mean()), rel=1e-12
    )


def test_real_targets_have_figures_of_size_alone() -> None:
    assert skew(real()).keys() == {
        "clients", "rows", "rows_min", "rows_median", "rows_max", "size_gini", "largest_share"
    }  # fmt: skip


# ---- the picture in plain text ----


def table(fed: Federation, width: int = 100) -> list[str]:
    """The lines of the clients, below their heading."""
    return text(fed, width).split("\n\n")[1].splitlines()


def test_a_line_shows_a_clients_labels_and_rows() -> None:
    fed = holding(
        [[60, 0, 40], [0, 50, 0], [1, 99, 100]],
        test_fraction=0.5,
        client_names=["Bern", "Ulm", "Zürich"],
    )
    heading, *lines = table(fed)
    assert heading.split() == ["client", "0", "1", "2", "rows"]
    assert [line.split() for line in lines] == [
        ["Bern", "▓▓", "▒▒", "100", "█" * 10 + "░" * 10],
        ["Ulm", "██", "50", "█" * 5 + "░" * 5],
        ["Zürich", "··", "▒▒", "▓▓", "200", "█" * 20 + "░" * 20],
    ]
    for label, line in ((0, lines[0]), (2, lines[0]), (1, lines[1])):
        assert line[heading.index(str(label))] in SHADES  # below its heading
    assert "· < 0.05, ░ < 0.25, ▒ < 0.5, ▓ < 0.75, █ more" in text(fed)


@pytest.mark.parametrize("width", [40, 57, 100, 200])
@pytest.mark.parametrize(("clients", "labels"), [(1, 2), (41, 65), (7, 600), (1000, 5)])
def test_no_line_is_wider_than_asked(width: int, clients: int, labels: int) -> None:
    assert max(map(len, text(drawn(clients, labels), width).splitlines())) <= width


@pytest.mark.parametrize("labels", [2, 11, 65, 99, 600])
@pytest.mark.parametrize("width", [40, 64, 100])
def test_the_heading_names_columns_by_their_first_label(labels: int, width: int) -> None:
    """Client i holds label firsts[i] alone: its shade is below that number."""
    heading = table(drawn(1, labels), width)[0]
    firsts = [int(word) for word in heading.split()[1:-1]]
    assert firsts[0] == 0
    assert len({b - a for a, b in itertools.pairwise(firsts)}) <= 1
    fed = holding([[int(c == first) for c in range(labels)] for first in firsts[:LINES]])
    heading, *lines = table(fed, width)
    assert [int(word) for word in heading.split()[1:-1]] == firsts
    places = [i for i, c in enumerate(heading) if c.isdigit() and not heading[i - 1].isdigit()]
    for line, place in zip(lines, places, strict=False):
        assert line.index("█") == place


def test_columns_are_grouped_only_where_they_must_be() -> None:
    assert "neighbouring labels" not in text(drawn(2, 65))
    assert "A column is 9 neighbouring labels, headed by the first." in text(drawn(2, 600))


def test_of_many_clients_the_largest_and_the_smallest_are_shown() -> None:
    fed = holding([[n] for n in range(1, 301)])
    lines = table(fed)[1:]
    rows = [int(line.split()[2]) for line in lines if line != "⋮"]
    assert rows == [*range(300, 280, -1), *range(20, 0, -1)]
    assert lines.index("⋮") == 20
    assert "The 20 largest and the 20 smallest clients; 260 between them." in text(fed)
    assert "⋮" not in text(holding([[1]] * LINES))


def test_a_tiny_client_still_has_a_bar() -> None:
    assert table(holding([[1], [100_000]]))[1].endswith("  ▏")


def test_names_keep_the_columns_straight() -> None:
    names = ["東京大学病院", "a\nb\x1b[31m", "a very long name of a clinic"]
    lines = table(holding([[3, 0]] * 3, client_names=names))[1:]
    assert lines[1].startswith("a?b?[31m ")
    assert lines[2].startswith("a very long nam…")
    assert lines[0].startswith("東京大学病院" + " " * (16 - 12))
    assert len(lines[0]) == len(lines[1]) - 6  # six characters that take two columns each


def test_real_targets_show_sizes_alone() -> None:
    heading, *lines = table(real())
    assert heading.split() == ["client", "rows"]
    assert len(lines) == 5
    assert "label" not in text(real()).lower()


def test_notes_and_figures_are_said() -> None:
    fed = replace(holding([[2, 2, 0], [0, 0, 4], [1, 1, 0]]), notes=("two rows were lost",))
    shown = " ".join(text(fed).split())
    assert "Rows of a client: 2 to 4, median 4; Gini 0.13" in shown
    assert "Label skew 0.467" in shown
    assert shown.endswith("note: two rows were lost")
    assert "test rows." not in shown  # there are none


@pytest.mark.parametrize("width", [39, 0, "wide"])
def test_a_width_that_cannot_be_is_refused(width: Any) -> None:
    with pytest.raises(InputError, match=r"width must be an integer >= 40"):
        text(real(), width)


# ---- the picture ----

NAMED = holding(
    [[165, 138], [188, 106], [8, 115], [51, 149]], 0.25, client_names=["A", "B" * 60, "$ ü_^", "VA"]
)
TINY = holding([[4, 1], [2, 6]])
CASES = {
    "hospitals": NAMED,
    "one": drawn(1, 10),
    "sixty": drawn(60, 2),
    "many": drawn(300, 10),
    "sixty-five labels": drawn(10, 65),
    "hundreds of labels": drawn(4, 300),
    "real": real(20),
    "untested": TINY,
}


def figure(fed: Federation, title: str = "") -> Figure:
    with mpl.rc_context(LOOK):
        made = Figure(layout=ConstrainedLayoutEngine())
        _draw(made, fed, title)
    return made


@cache
def figure_of(case: str) -> Figure:
    return figure(CASES[case], title="long " * 40)


def drawn_texts(made: Figure, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Bbox]]:
    """What is written where, ticks outside the axes left out."""
    seen, draw = [], Text.draw
    monkeypatch.setattr(
        Text, "draw", lambda self, renderer: (seen.append(self), draw(self, renderer))
    )
    made.draw_without_rendering()
    return [(t.get_text(), t.get_window_extent()) for t in seen if t.get_text() and t.get_visible()]


def overlapping(boxes: Sequence[tuple[str, Bbox]]) -> list[tuple[str, str]]:
    low, high = (
        np.array([corner(box) for _, box in boxes])
        for corner in (lambda b: b.min + 1, lambda b: b.max - 1)
    )
    overlap = (low[:, None] < high).all(2) & (low < high[:, None]).all(2)
    return [(boxes[i][0], boxes[j][0]) for i, j in np.argwhere(np.triu(overlap, 1))]


@pytest.mark.parametrize("case", CASES)
def test_no_text_overlaps_another_or_is_cut_off(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = figure_of(case)
    boxes = drawn_texts(made, monkeypatch)
    assert len(boxes) > 5
    for name, box in boxes:
        assert (box.min >= 0).all(), name
        assert (box.max <= made.bbox.max).all(), name
    assert not overlapping(boxes)


@pytest.mark.parametrize("most", [1, 7, 98_765, 123_456, 3_900_000, 390_000_000])
def test_long_numbers_have_room_below_the_bars(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Figure((2.9, 1))
    _row_axis(made.add_axes((0, 0.4, 1, 0.6)), most)
    ticks = [box for box in drawn_texts(made, monkeypatch) if box[0][0].isdigit()]
    assert len(ticks) > 1 + (most > 1)
    assert not overlapping(ticks)


@pytest.mark.parametrize("case", ["hospitals", "one", "sixty", "sixty-five labels"])
def test_a_bubble_has_the_area_of_its_rows_and_fits(case: str) -> None:
    fed = CASES[case]
    axes = figure_of(case).axes[0]
    (bubbles,) = [c for c in axes.collections if isinstance(c, EllipseCollection)]
    places = bubbles.get_offsets().astype(int)
    counts = fed.label_counts().numpy()
    assert {(i, c) for c, i in places.tolist()} == set(
        zip(*(v.tolist() for v in counts.nonzero()), strict=True)
    )
    wide = np.asarray(bubbles.get_widths())
    rows = np.array([counts[i, c] for c, i in places])
    assert wide.tolist() == pytest.approx(
        [0.95 * max(math.sqrt(n / counts.max()), 0.12) for n in rows]
    )
    x, y = np.abs(np.diff(axes.transData.transform([(0, 0), (1, 1)]), axis=0)[0])
    assert bubbles._units == ("x" if x < y else "y")  # type: ignore[attr-defined]


def test_bars_are_the_rows() -> None:
    fed = CASES["hospitals"]
    labels, sizes = figure_of("hospitals").axes
    bars = sizes.containers
    train, test = ([bar.get_width() for bar in part] for part in bars)
    assert train == fed.train_sizes.tolist()
    assert test == fed.test_sizes.tolist()
    assert [bar.get_x() for bar in bars[1]] == train
    assert labels.get_ylim() == (3.5, -0.5)  # the first client on top


def test_many_clients_become_a_heat_map_of_shares() -> None:
    fed = CASES["many"]
    (image,) = figure_of("many").axes[0].images
    counts = fed.label_counts().double()
    assert np.allclose(image.get_array(), counts / counts.sum(1, keepdim=True))
    labels = figure(holding([[i % 2, 1 - i % 2] for i in range(2000)])).axes
    assert np.allclose(
        labels[0].images[0].get_array(), 0.5
    )  # pairs of neighbours that hold one label each
    assert labels[-1].get_ylabel() == "share of the client's rows, mean of neighbours"


def words(made: Figure) -> str:
    return " | ".join(t.get_text() for t in made.findobj(Text) if isinstance(t, Text))


def test_the_head_says_what_is_shown() -> None:
    fed = replace(holding([[999, 1]] * 3), name="digits", source={"partition": "iid"})
    head = (
        "digits, partition iid | 3 clients · 3,000 rows · label skew 0.000"
        " · area of a bubble: rows, 999 at most"
    )
    assert head in words(figure(fed))
    assert "My clinics | 3 clients" in words(figure(fed, "My clinics"))
    assert "1 client ·" in words(figure_of("one"))
    assert "real targets" in words(figure_of("real"))
    assert "B" * 23 + "…" in words(figure_of("hospitals"))
    assert "| test" not in words(figure_of("untested"))


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")]
)
def test_a_picture_has_its_format_and_is_the_same_again(
    tmp_path: Path, suffix: str, magic: bytes
) -> None:
    once, again = (picture(TINY, str(tmp_path / f"{name}{suffix}")) for name in "ab")
    assert once == tmp_path / f"a{suffix}"
    assert once.read_bytes().startswith(magic)
    assert once.read_bytes() == again.read_bytes()


def test_a_picture_that_cannot_be_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InputError, match=r"unknown picture format '\.jpg'.*Known: \.pdf, \.png, \.svg"
    ):
        picture(NAMED, tmp_path / "p.jpg")
    with pytest.raises(InputError, match="unknown picture format ''"):
        picture(NAMED, tmp_path / "p")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="it is not a regular file"):
        picture(NAMED, tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="a picture needs matplotlib: pip install matplotlib"):
        picture(NAMED, tmp_path / "p.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        settings = {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}
        return {**settings, "pyplot": "matplotlib.pyplot" in sys.modules}

    before = state()
    picture(TINY, tmp_path / "p.png")
    assert state() == before
