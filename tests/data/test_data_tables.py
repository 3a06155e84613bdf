"""Tables: CSV files, svmlight files, the four hospitals, and columns standardised by the training
rows."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pandas as pd
import pytest
import torch

from fedsso.data import Federation, load
from fedsso.data.svmlight import svmlight
from fedsso.data.tables import FEATURES, HOSPITALS, csv, heart, read_csv
from fedsso.errors import InputError
from fedsso.regression.design import read_table

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)
NAN, INF = float("nan"), float("inf")


def file(folder: Path, text: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ---- CSV
# --------------------------------------------------------------------------------------------------

GOOD = "age,dose,ill\n50,1.5,1\n60,?,0\n70,-2e1,1\n"
FORMS: dict[str, str | bytes] = {
    "plain": GOOD,
    "mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "crlf": GOOD.replace("\n", "\r\n"),
    "cr": GOOD.replace("\n", "\r"),
    "semicolon": GOOD.replace(",", ";"),
    "quoted": '"age";"dose";"ill"\n"50";"1.5";"1"\n"60";"";"0"\n"70";"-2e1";"1"\n',
    "spaces": "\n age , dose , ill \n 50 , 1.5 , 1 \n\n 60 , NA , 0 \n 70 , -2e1 , 1",
    "order": "ill,age,dose\n1,50,1.5\n0,60,nan\n1,70,-2e1\n",
    "tab": GOOD.replace(",", "\t"),
    "told": "\ufeffsep=;\r\n" + GOOD.replace(",", ";"),
    "told in quotes": '"sep=,"\n' + GOOD,
    "told tab": "sep=\t\n" + GOOD.replace(",", "\t"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_csv_file_is_read_in_every_common_form(form: str, tmp_path: Path) -> None:
    names, x, y = read_csv(file(tmp_path, FORMS[form]), "ill")
    assert names == ("age", "dose")
    assert x.dtype == np.float64
    np.testing.assert_array_equal(x, np.array([[50, 1.5], [60, NAN], [70, -20]]))
    assert y.tolist() == [1, 0, 1]


def test_named_features_come_in_their_order_and_leave_the_rest_unread(tmp_path: Path) -> None:
    path = file(tmp_path, 'a;name;b;y\n1;"two\nlines";2;0\n3;three;4;1\n')
    names, x, y = read_csv(path, "y", ["b", "a"])
    assert (names, x.tolist(), y.tolist()) == (("b", "a"), [[2, 1], [4, 3]], [0, 1])


def test_where_semicolons_part_the_cells_a_comma_is_a_decimal_point(tmp_path: Path) -> None:
    _, x, y = read_csv(file(tmp_path, "a;b;y\n1,5;-2;0\n,25;1,5e3;1,0\n"), "y")
    assert (x.tolist(), y.tolist()) == ([[1.5, -2], [0.25, 1500]], [0, 1])


@pytest.mark.parametrize(
    ("rows", "line", "first", "second"),
    [
        ("8434,6;1;0\n7;1;1\n2.736;2;1\n", 4, "'8434,6' in column 'a'", "'2.736' in column 'a'"),
        ("2.736;1;0\n2;-1,5e3;1\n", 3, "'2.736' in column 'a'", "'-1,5e3' in column 'b'"),
    ],
)
def test_two_conventions_of_decimals_in_one_table_are_refused(
    rows: str, line: int, first: str, second: str, tmp_path: Path
) -> None:
    path = file(tmp_path, f"a;b;y\n{rows}")
    words = rf"a\.csv: line {line}: {first} \(line 2\) and {second} .*all numbers with a decimal"
    for read in (lambda: read_csv(path, "y"), lambda: read_table(path)):
        with pytest.raises(InputError, match=words) as caught:
            read()
        assert "2.736" not in caught.value.public


def test_a_letter_with_its_marks_may_be_written_in_two_ways(tmp_path: Path) -> None:
    """Some systems write ö as o and a mark: both look the same to whoever compares two files."""
    texts = [normalize(form, "größe,y\n1,nö\n2,ja\n") for form in ("NFC", "NFD")]
    assert texts[0] != texts[1]
    files = [file(tmp_path, text, f"{place}.csv") for place, text in enumerate(texts)]
    for name in ("größe", normalize("NFD", "größe")):
        fed = Federation.from_csv(files, "y", features=[name], test_fraction=0)
        assert (fed.train_sizes.tolist(), fed.class_names) == ([2, 2], ("ja", "nö"))


ODD: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_file_of_a_folder_that_cannot_be_read_is_named(kind: str, tmp_path: Path) -> None:
    file(tmp_path, GOOD, "north.csv")
    ODD[kind](tmp_path / "east.csv")
    with pytest.raises(InputError, match=r"cannot read .*east\.csv"):
        Federation.from_csv(tmp_path, "ill")
    with pytest.raises(InputError, match=r"cannot read .*east\.csv"):
        load("csv", files=tmp_path, outcome="ill")


def test_classes_may_be_named(tmp_path: Path) -> None:
    paths = [file(tmp_path, "a,y\n1,yes\n2,no\n"), file(tmp_path, "a,y\n3,unclear\n", "b.csv")]
    fed = Federation.from_csv(paths, "y", test_fraction=0)
    assert (fed.y.tolist(), fed.classes) == ([2, 0, 1], 3)
    assert fed.notes == ("labels no to yes are numbered 0 to 2 in sorted order",)
    with pytest.raises(InputError, match=r"names such as 'yes'.*needs numbers"):
        Federation.from_csv(paths, "y", classes=0)
    with pytest.raises(
        InputError,
        match=r"b.csv: .*numbers in column 'y'.*a.csv has names.*write all in one way",
    ):
        Federation.from_csv([paths[0], file(tmp_path, "a,y\n3,1\n", "b.csv")], "y")


def test_a_folder_and_a_column_that_names_the_client(tmp_path: Path) -> None:
    file(tmp_path, "id,ward,age,y\n1,b,50,0\n2,a,60,1\n3,b,70,0\n")
    fed = Federation.from_csv(tmp_path, "y", features=["age"], group="ward", test_fraction=0)
    assert (fed.client_names, fed.train_sizes.tolist(), fed.sample_shape) == (
        ("b", "a"),
        [2, 1],
        (1,),
    )
    with pytest.raises(
        InputError, match=r"a.csv: line 1: unknown column 'wards'; did you mean 'ward'"
    ):
        Federation.from_csv(tmp_path, "y", features=["age"], group="wards")
    file(tmp_path, "ward,age,y\na,1,0\n,2,1\n")
    with pytest.raises(InputError, match=r"a.csv: line 3: has no 'ward'"):
        Federation.from_csv(tmp_path, "y", group="ward")


def test_new_rows_are_prepared_as_the_training_rows_were(tmp_path: Path) -> None:
    file(tmp_path, "age,dose,y\n50,1,0\n60,?,1\n70,3,0\n")
    fed = Federation.from_csv(tmp_path, "y", test_fraction=0)
    scaling = fed.scaling
    assert scaling is not None
    assert scaling.columns == ("age", "dose")
    torch.testing.assert_close(
        scaling([[50.0, 1], [60, NAN], [70, 3]]), fed.x[fed.train_rows.sort().values]
    )
    assert scaling([60, NAN]).shape == (1, 2)
    frame = pd.DataFrame({"dose": [1.0], "name": ["x"], "age": [50]})
    torch.testing.assert_close(scaling(frame), scaling([50.0, 1]))
    with pytest.raises(InputError, match="x lacks the columns dose"):
        scaling(frame[["age"]])
    with pytest.raises(InputError, match=r"2 columns.*got 3"):
        scaling([1, 2, 3])


def test_the_delimiter_is_the_one_that_shows_the_target(tmp_path: Path) -> None:
    names, x, _ = read_csv(file(tmp_path, "y;dose, in mg, a day\n0;5\n"), "y")
    assert (names, x.tolist()) == (("dose, in mg, a day",), [[5]])


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "the file is empty, need a line with the names"),
    "blank": ("\n\n", "the file is empty"),
    "header": ("a,y\n", "line 1: a header without rows"),
    "target": ("a,ys\n1,2\n", r"line 1: unknown column 'y'; did you mean 'ys'\? Known: a, ys\."),
    "semicolon target": ("a;b;z\n1;2;3\n", r"line 1: unknown column 'y'\. Known: a, b, z\."),
    "twice": ("a,a,y\n1,2,3\n", "line 1: 2 columns are called 'a', expected one"),
    "target twice": ("a,y,y\n1,2,3\n", "line 1: 2 columns are called 'y'"),
    "unnamed": (",a,y\n0,1,2\n", "line 1: column 1 has no name.*name it"),
    "lonely": ("y\n1\n", "line 1: need at least 1 feature column"),
    "text": (
        "a,y\n1,0\nfew,1\n",
        "line 3: has 'few' in column 'a'.*number such as -1.5.*missing value.*'NA'",
    ),
    "comma": ('a,y\n"1,5",0\n', "line 2: has '1,5' in column 'a'.*number such as -1.5"),
    "thousands": ("a;y\n1.000,5;0\n", "line 2: has '1.000,5' in column 'a'"),
    "date": ("a,y\n2020-01-01,0\n", "line 2: has '2020-01-01' in column 'a'"),
    "underscore": ("a,y\n1_000,0\n", "line 2: has '1_000' in column 'a'"),
    "infinite": ("a,y\ninf,0\n", "line 2: has 'inf' in column 'a'"),
    "large": ("a,y\n1e39,0\n", "line 2: has '1e39' in column 'a'"),
    "other gap": ("a,y\nNaN,0\n", "line 2: has 'NaN' in column 'a', .* written as one of '', "),
    "target gap": (
        "a,y\n1,0\n1,\n",
        "line 3: has no 'y'.*fill it in, or remove the row",
    ),
    "target text": (
        "a,y\n1,0\n1,yes\n",
        "line 3: has 'yes' in column 'y'.*expected a number",
    ),
    "short": ("a,y\n1,0\n\n1\n", "line 4: has 1 cells, expected 2"),
    "long": ("a,y\n1,0,3\n", "line 2: has 3 cells, expected 2"),
    "after a quoted line end": ('a,y\n"1\n",0\nx,1\n', "line 4: has 'x'"),
    "open quote": ('a,y\n1,0\n"1,0\n2,0\n3,0\n', "line 3: cannot be read as CSV"),
    "latin-1": ("a,y\n1,0\nä,1\n".encode("latin-1"), "line 3 is not UTF-8"),
    "binary": (bytes(range(256)), "not UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_csv_file_is_an_error_with_its_line(case: str, tmp_path: Path) -> None:
    text, message = BROKEN[case]
    path = file(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        read_csv(path, "y")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["age", "dos"]}, "line 1: unknown column 'dos'; did you mean 'dose'"),
        ({"features": ["age", "age"]}, "features must name each once"),
        ({"features": ["age", "ill"]}, "the target 'ill' not among them"),
        ({"features": "age"}, "features must be a list of texts, got 'age'"),
        ({"features": []}, r"features must be a list of texts, got \[\]"),
        ({"missing": "NA"}, "missing must be a list of texts, got 'NA'"),
        ({"missing": [-9]}, r"missing must be a list of texts, got \[-9\]"),
        ({"missing": ["-9"]}, r"line 3: has '\?' in column 'dose', .*one of '-9'"),
    ],
)
def test_a_wrong_wish_for_columns_is_an_error(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_csv(file(tmp_path, GOOD), "ill", **options)


def hospitals(folder: Path) -> list[Path]:
    texts = {"north": GOOD, "east": "ill;dose;age\n0;1;40\n1;3;80\n"}
    return [file(folder, text, f"{name}.csv") for name, text in texts.items()]


def test_a_pool_of_csv_files_keeps_order_and_names(tmp_path: Path) -> None:
    pool = csv(hospitals(tmp_path), outcome="ill")
    assert pool.group is not None
    assert pool.group.tolist() == ["north"] * 3 + ["east"] * 2
    assert pool.x[3:].tolist() == [[40, 1], [80, 3]]
    assert (pool.y.dtype, pool.y.tolist()) == (torch.int64, [1, 0, 1, 0, 1])
    assert (pool.standardise, pool.notes) == (True, ())


def test_a_federation_of_csv_files(tmp_path: Path) -> None:
    paths = hospitals(tmp_path)
    fed = Federation.from_csv(paths, "ill", test_fraction=0)
    assert fed.client_names == ("north", "east")
    assert fed.train_sizes.tolist() == [3, 2]
    raw = np.array(
        [[50, 1.5], [60, 1.25], [70, -20], [40, 1], [80, 3]]
    )  # 1.25 is the median of 1.5, -20, 1, 3
    np.testing.assert_allclose(fed.x, (raw - raw.mean(0)) / raw.std(0), rtol=1e-6)
    named = Federation.from_csv(
        {"B": str(paths[1]), "A": paths[0]}, "ill", features=["age"], standardise=False
    )
    assert (named.client_names, named.sample_shape) == (("B", "A"), (1,))
    assert named.x[:, 0].tolist() == [40, 80, 50, 60, 70]
    with pytest.raises(
        InputError, match=r"x has NaN or Inf in row 1, column 1: .*standardise=True"
    ):
        Federation.from_csv(paths, "ill", standardise=False)


def test_whole_targets_are_labels_unless_told_otherwise(tmp_path: Path) -> None:
    path = file(tmp_path, "a,y\n1,2\n2,1.0\n3,2\n4,4\n")
    fed = Federation.from_csv([path], "y")
    assert (fed.y.tolist(), fed.classes) == ([1, 0, 1, 2], 3)
    assert fed.notes == ("labels 1 to 4 are numbered 0 to 2 in sorted order",)
    written = Federation.from_csv([path], "y", classes=5)
    assert (written.y.tolist(), written.classes, written.notes) == ([2, 1, 2, 4], 5, ())
    real = Federation.from_csv([path], "y", classes=0)
    assert (real.y.tolist(), real.y.dtype, real.classes) == ([2, 1, 2, 4], torch.float64, 0)
    with pytest.raises(InputError, match=r"y must be < classes=3, got 4\.0 in row 3"):
        Federation.from_csv([path], "y", classes=3)
    half = file(tmp_path, "a,y\n1,0.5\n", "b.csv")
    assert Federation.from_csv([path, half], "y").classes == 0


def test_own_marks_of_a_gap(tmp_path: Path) -> None:
    path = file(tmp_path, "a,y\n-9,0\n2,1\n4,1\n")
    fed = Federation.from_csv([path], "y", missing=["-9"], test_fraction=0)
    assert fed.x[0] == 0


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "extra": (
        lambda f: [file(f, "a,y\n1,0\n"), file(f, "a,b,y\n1,2,0\n", "b.csv")],
        "b.csv: column 'b' is not in the",
    ),
    "fewer": (
        lambda f: [file(f, "a,b,y\n1,2,0\n"), file(f, "a,y\n1,0\n", "b.csv")],
        "b.csv: lacks the column 'b'",
    ),
    "no value": (
        lambda f: [file(f, "a,b,y\n1,?,0\n1,NA,1\n")],
        "column 'b' has no value in any file",
    ),
    "same name": (
        lambda f: [file(f, "a,y\n1,0\n"), f / "sub" / "a.csv"],
        r"called 'a'.*rename one, or pass \{name: path\}",
    ),
    "same key": (lambda f: {1: f / "a", "1": f / "b"}, "two files would be called '1'"),
    "one path": (lambda f: f / "a.csv", "cannot read .*a.csv: No such file"),
    "text": (lambda f: str(f / "a.csv"), "cannot read .*a.csv: No such file"),
    "none": (lambda _: [], "there are no files"),
    "number": (
        lambda _: [5],
        r"a path, a list of paths or a folder.*files=\[5\]",
    ),
    "not iterable": (lambda _: 5, "a list of paths or a folder, got files=5"),
    "absent": (lambda f: [f / "none.csv"], "cannot read .*none.csv: No such file"),
    "folder": (lambda f: [f], r"no file \*\.csv in the folder"),
    "mapped folder": (lambda f: {"a": f}, "cannot read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_an_error(case: str, tmp_path: Path) -> None:
    files, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        Federation.from_csv(files(tmp_path), "y")  # type: ignore[arg-type]


def test_named_features_admit_further_columns(tmp_path: Path) -> None:
    paths = [file(tmp_path, "a,y\n1,0\n"), file(tmp_path, "b,a,y\nword,3,1\n", "b.csv")]
    fed = Federation.from_csv(paths, "y", features=["a"], standardise=False)
    assert fed.x.tolist() == [[1], [3]]


# ---- standardise
# --------------------------------------------------------------------------------------------------


def table(
    rows: int = 40,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    draw = np.random.default_rng(0)
    x = draw.normal((5, -3, 0), (2, 1e-4, 1e3), (rows, 3)).astype(np.float32)
    x[draw.random(x.shape) < 0.2] = NAN
    return x, draw.integers(0, 2, rows), draw.integers(0, 3, rows)


def test_columns_are_filled_and_scaled_by_the_training_rows_alone() -> None:
    x, y, who = table()
    before = x.copy()
    fed = Federation.from_arrays(x, y, who, standardise=True)
    np.testing.assert_array_equal(x, before)  # the caller's array is not written to
    train = fed.train_rows.numpy()
    filled = np.where(np.isnan(x), np.nanmedian(x[train].astype(np.float64), 0), x)
    np.testing.assert_allclose(
        fed.x, (filled - filled[train].mean(0)) / filled[train].std(0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(fed.x[train].double().mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(fed.x[train].double().std(0, correction=0), 1, atol=1e-6)
    assert fed.x[fed.test_rows].mean(0).abs().min() > 1e-3


def test_standardise_changes_neither_split_nor_targets() -> None:
    x, y, who = table()
    plain, scaled = (
        Federation.from_arrays(
            np.nan_to_num(x), y, who, weights=[0.2, 0.3, 0.5], seed=3, standardise=s
        )
        for s in (False, True)
    )
    for name in ("train_rows", "train_start", "test_rows", "test_start", "y", "weights"):
        assert torch.equal(getattr(plain, name), getattr(scaled, name))
    assert scaled.client_names == plain.client_names
    assert scaled.x.dtype == plain.x.dtype


def test_three_ways_to_the_same_table() -> None:
    x, y, who = table()
    rows = [np.flatnonzero(who == i) for i in range(3)]
    order = np.concatenate(rows)
    one = Federation.from_clients([(x[own], y[own]) for own in rows], standardise=True)
    two = Federation.from_arrays(x[order], y[order], who[order], standardise=True)
    three = Federation.from_rows(x, y, rows, standardise=True)
    assert one.digest() == two.digest()
    assert torch.equal(three.x[order], one.x)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ([0.1, 0.1, 0.1], [0, 0, 0]),
        ([0.1, NAN, 0.1], [0, 0, 0]),
        ([NAN, 1.0, 3.0], [0, -(1.5**0.5), 1.5**0.5]),
        ([1e300, -1e300, 0.0], [1.5**0.5, -(1.5**0.5), 0]),
        ([1e-300, -1e-300, 0.0], [1.5**0.5, -(1.5**0.5), 0]),
        ([1, 3, 2], [-(1.5**0.5), 1.5**0.5, 0]),
    ],
)
def test_a_column_worked_out_by_hand(column: list[float], expected: list[float]) -> None:
    fed = Federation.from_rows(
        np.array(column)[:, None], [0, 1, 0], [[0, 1, 2]], test_fraction=0, standardise=True
    )
    assert fed.x[:, 0].tolist() == pytest.approx(expected)


def test_a_column_constant_in_training_is_zero_everywhere() -> None:
    fed = Federation.from_rows([[1.0]] * 4, [0] * 4, [range(4)])
    x = torch.ones(4, 1)
    x[fed.test_rows] = 9.0
    assert Federation.from_rows(x, [0] * 4, [range(4)], standardise=True).x.tolist() == [[0.0]] * 4


BAD: dict[str, tuple[Any, str]] = {
    "image": (
        np.zeros((2, 1, 3, 3), np.float32),
        r"standardise needs a table x .*got torch.float32 of shape \(2, 1,",
    ),
    "bytes": (
        np.zeros((2, 3), np.uint8),
        r"standardise needs a table x .*got torch.uint8 of shape \(2, 3\)",
    ),
    "infinite": ([[1.0], [INF]], "x has Inf in row 1"),
    "empty column": ([[1.0, NAN], [2.0, NAN]], "column 1 of x has no value in any training row"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_standardised_is_an_error(case: str) -> None:
    x, message = BAD[case]
    with pytest.raises(InputError, match=message):
        Federation.from_clients([(x, [0, 1])], standardise=True)
    with pytest.raises(InputError, match=message):
        Federation.from_arrays(x, [0, 1], [0, 0], standardise=True)


def test_a_test_row_beyond_every_scale_is_an_error() -> None:
    test = int(Federation.from_rows([[1.0]] * 4, [0] * 4, [range(4)]).test_rows[0])
    x = torch.tensor([[1e-30], [2e-30], [3e-30], [4e-30]])
    x[test] = 1e30
    with pytest.raises(InputError, match=f"x, standardised, has NaN or Inf in row {test}"):
        Federation.from_rows(x, [0] * 4, [range(4)], standardise=True)


# ---- svmlight
# --------------------------------------------------------------------------------------------------

SPARSE = "-1 1:0.5 3:-2 # a comment\n\n+1 2:1e-3\r\n# nothing\n-1.0\n"
PACK: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("pack", PACK)
def test_an_svmlight_file_is_read_packed_or_not(pack: str, tmp_path: Path) -> None:
    pool = svmlight([file(tmp_path, PACK[pack](SPARSE.encode()), "data")])
    assert pool.x.dtype == torch.float32
    np.testing.assert_array_equal(
        pool.x, np.array([[0.5, 0, -2], [0, 1e-3, 0], [0, 0, 0]], np.float32)
    )
    assert (pool.y.dtype, pool.y.tolist()) == (torch.int64, [0, 1, 0])
    assert pool.notes == ("labels -1 to 1 are numbered 0 to 1 in sorted order",)
    assert (pool.group, pool.standardise) == (None, False)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["0", "1", "1"], [0, 1, 1]),
        (["2", "1", "2"], [1, 0, 1]),
        (["+1", "-1", "-1"], [1, 0, 0]),
        (["7", "-3", "0"], [2, 0, 1]),
        (["0.5", "-3", "0"], [0.5, -3.0, 0.0]),
    ],
)
def test_labels_are_numbered_in_sorted_order(
    labels: list[str], expected: list[float], tmp_path: Path
) -> None:
    pool = svmlight([file(tmp_path, "".join(f"{label} 1:1\n" for label in labels))])
    assert pool.y.tolist() == expected
    assert pool.y.is_floating_point() == (labels[0] == "0.5")


def test_several_svmlight_files_are_pooled_in_order(tmp_path: Path) -> None:
    paths = [file(tmp_path, "1 1:1\n-1 3:1\n", "a"), file(tmp_path, "-1 2:1\n", "b")]
    pool = svmlight(paths)
    assert pool.x.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert pool.y.tolist() == [1, 0, 0]
    assert svmlight(paths, dim=5).x.shape == (3, 5)
    with pytest.raises(InputError, match=r"a has -1/1; .*b has 0/1.*number them alike"):
        svmlight([paths[0], file(tmp_path, "0 1:1\n1 1:1\n", "b")])
    many = [file(tmp_path, "0 1:1\n1 1:1\n2 1:1\n", "a"), file(tmp_path, "1 1:1\n3 1:1\n", "b")]
    assert svmlight(many).y.tolist() == [0, 1, 2, 1, 3]


def test_large_numbers_keep_their_differences_when_standardised(tmp_path: Path) -> None:
    path = file(tmp_path, "time,y\n" + "".join(f"{1700000000 + i},{i % 2}\n" for i in range(50)))
    fed = Federation.from_csv([path], "y")
    assert len(set(fed.x[:, 0].tolist())) == 50


LINES: dict[str, tuple[str, str]] = {
    "zero": ("1 0:1", "line 2: has feature 0 after 0.*from 1 in rising order"),
    "falling": ("1 3:1 2:1", "line 2: has feature 2 after 3, expected indices"),
    "repeated": ("1 3:1 3:1", "line 2: has feature 3 after 3"),
    "beyond": ("1 1:1 24:1", "line 2: has feature 24, expected at most dim=22"),
    "no value": ("1 3:", "line 2: has '3:', expected index:value as in 3:0.5"),
    "no index": ("1 :3", "line 2: has ':3', expected"),
    "no colon": ("1 3", "line 2: has '3', expected"),
    "two colons": ("1 1:2:3", "line 2: has '1:2:3', expected"),
    "fraction": ("1 1.5:2", "line 2: has '1.5:2', expected"),
    "negative": ("1 -1:2", "line 2: has '-1:2', expected"),
    "underscore": ("1 1_0:2", "line 2: has '1_0:2', expected"),
    "text": ("1 1:x", "line 2: has '1:x', expected"),
    "nan": ("1 1:nan", "line 2: has '1:nan', expected"),
    "infinite": ("1 1:inf", "line 2: has '1:inf', expected"),
    "large": ("1 1:1e39", "line 2: has '1:1e39', expected"),
    "digits": (f"1 {'9' * 5000}:1", "line 2: has '9999.*, expected"),
    "label": ("yes 1:1", "line 2: has 'yes' as label, expected a number"),
    "no label": ("1:1 2:1", "line 2: has '1:1' as label"),
    "label nan": ("nan 1:1", "line 2: has 'nan' as label"),
    "labels": ("1,2 1:1", "line 2: has '1,2' as label"),
    "query": ("1 qid:3 1:1", "line 2: has 'qid:3'.*remove them"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_broken_svmlight_line_is_an_error(case: str, tmp_path: Path) -> None:
    line, message = LINES[case]
    path = file(tmp_path, f"1 1:1\n{line}\n")
    with pytest.raises(InputError, match=message) as caught:
        svmlight([path], dim=22)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("pack", ["gzip", "bzip2", "xz"])
@pytest.mark.parametrize("keep", [7, 40, -1])
def test_a_packed_file_cut_short_is_an_error(pack: str, keep: int, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random(200)
    data = PACK[pack]("".join(f"1 1:{value}\n" for value in noise).encode())
    path = file(tmp_path, data[:keep])
    with pytest.raises(InputError, match=f"{pack}.*cut short.*download it again"):
        svmlight([path])
    middle = len(data) // 2
    file(tmp_path, data[:middle] + bytes(20) + data[middle + 20 :])
    with pytest.raises(InputError, match=f"cannot be read as {pack}"):
        svmlight([path])


def test_svmlight_sizes_that_cannot_be_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        svmlight([file(tmp_path, "# nothing\n")])
    with pytest.raises(InputError, match="has no feature in any row"):
        svmlight([file(tmp_path, "1\n-1\n")])
    with pytest.raises(
        InputError,
        match=r"line 1: has 500000000 columns, at most 1048576.*FEDSSO_MAX_COL",
    ):
        svmlight([file(tmp_path, "1 500000000:1\n-1 1:1\n")])
    with pytest.raises(
        InputError,
        match=r"line 1: has feature 10000000000000000000000.*at most dim=2147483647",
    ):
        svmlight([file(tmp_path, "1 10000000000000000000000:1\n")])
    with pytest.raises(InputError, match=r"dim.*integer >= 0.*dim=-1"):
        svmlight([file(tmp_path, SPARSE)], dim=-1)
    with pytest.raises(InputError, match="at least 1 file, got 0"):
        svmlight([])


@needs_data
@pytest.mark.parametrize(
    ("name", "shape"), [("phishing.bz2", (11055, 68)), ("a9a.t.bz2", (16281, 123))]
)
def test_real_files_are_read_as_scikit_learn_does(name: str, shape: tuple[int, int]) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    path = Path(os.environ["FEDSSO_DATA"]) / name
    if not path.is_file():
        pytest.skip(f"no {name} in FEDSSO_DATA")
    x, y = datasets.load_svmlight_file(str(path), n_features=shape[1], dtype=np.float32)
    pool = svmlight([path], dim=shape[1])
    np.testing.assert_array_equal(pool.x, x.toarray())
    np.testing.assert_array_equal(pool.y, y > 0)


# ---- heart disease
# --------------------------------------------------------------------------------------------------

PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
OTHER = "28,1,2,130,132,0,2,185,0,.7,?,?,?,3"


def four(folder: Path, last: str = OTHER) -> list[Path]:
    texts = (f"{PATIENT}\n{OTHER}\n", OTHER, PATIENT, f"{PATIENT}\n{last}\n")
    return [file(folder, t, f"processed.{h}.data") for h, t in zip(HOSPITALS, texts, strict=True)]


def test_hospitals_are_groups_and_a_diagnosis_above_0_is_the_label(tmp_path: Path) -> None:
    pool = heart(four(tmp_path))
    assert pool.group is not None
    assert pool.group.tolist() == ["cleveland"] * 2 + ["hungarian", "switzerland"] + ["va"] * 2
    assert pool.y.tolist() == [0, 1, 1, 0, 0, 1]
    assert (pool.x.shape, pool.x.dtype, pool.standardise) == ((6, 13), torch.float32, True)
    assert pool.x[0, FEATURES.index("oldpeak")] == np.float32(2.3)
    assert pool.x[1].isnan().tolist() == [name in ("slope", "ca", "thal") for name in FEATURES]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (OTHER[:-2], "line 2: has 13 cells, expected 14"),
        (f"{OTHER},1", "line 2: has 15 cells, expected 14"),
        (OTHER.replace("28", "old"), "line 2: has 'old' in column 'age', expected a number"),
        (OTHER.replace("28", ""), r"line 2: has '' in column 'age', .* written as one of '\?'"),
        (
            f"{OTHER[:-1]}5",
            "line 2: has '5' in column 'num'.*expected 0, 1, 2, 3 or 4",
        ),
        (f"{OTHER[:-1]}0.5", "line 2: has '0.5' in column 'num'"),
        (f"{OTHER[:-1]}?", "line 2: has '\\?' in column 'num'.*expected 0, 1"),
    ],
)
def test_a_broken_line_of_a_hospital_is_an_error(line: str, message: str, tmp_path: Path) -> None:
    paths = four(tmp_path, line)
    with pytest.raises(InputError, match=message) as caught:
        heart(paths)
    assert str(caught.value).startswith(f"{paths[3]}: ")


def test_a_hospital_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    paths = four(tmp_path)
    with pytest.raises(InputError, match=r"heart needs 4 files \(cleveland, .*\), got 3"):
        heart(paths[:3])
    file(tmp_path, "", paths[1].name)
    with pytest.raises(InputError, match=r"hungarian\.data: the file is empty"):
        heart(paths)


@needs_data
def test_the_real_hospitals() -> None:
    folder = Path(os.environ["FEDSSO_DATA"])
    paths = [folder / f"processed.{name}.data" for name in HOSPITALS]
    if not all(path.is_file() for path in paths):
        pytest.skip("not all of processed.*.data are in FEDSSO_DATA")
    pool = heart(paths)
    assert pool.group is not None
    assert np.unique(pool.group, return_counts=True)[1].tolist() == [303, 294, 123, 200]
    assert [int(pool.y[torch.from_numpy(pool.group == name)].sum()) for name in HOSPITALS] == [
        139,
        106,
        115,
        149,
    ]
    assert int(pool.x.isnan().any(1).sum()) == 621
    fed = Federation.from_arrays(pool.x, pool.y, pool.group, standardise=pool.standardise)
    assert bool(fed.x.isfinite().all())


def test_a_wide_table_is_read_in_linear_time(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(20_000)]
    path = file(tmp_path, ",".join([*names, "y"]) + "\n" + "1," * 20_000 + "0\n")
    began = time.process_time()
    assert read_csv(path, "y")[1].shape == (1, 20_000)
    assert time.process_time() - began < 3
