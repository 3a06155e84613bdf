"""Files are written whole or not at all; TOML survives the way there and back."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsso.errors import InputError
from fedsso.support.files import check_writable, to_toml, write_atomic
from fedsso.support.intake import read_text, read_toml


def test_write_creates_folders_and_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "old, and longer")
    write_atomic(path, "neu: ü\n")
    assert path.read_bytes() == "neu: ü\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_write_keeps_a_link_and_changes_the_file_behind_it(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_atomic(tmp_path / "ours", b"")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["file/below.csv", "folder", "name-too-long" * 40])
def test_unwritable_path_is_named_and_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*; give ") as error:
        write_atomic(tmp_path / name, "x")
    assert str(tmp_path / name) in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_atomic(path, 3.0)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(InputError, match="not a regular file"):
        write_atomic("/dev/null", "x")
    assert Path("/dev/null").is_char_device()


def test_check_writable_creates_an_empty_folder(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_check_writable_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="cannot write"):
            check_writable(folder)


def test_text_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(tmp_path / "t") == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\nb = = 2\n", r"as TOML: .*line 2"),
        (b"a = 1\n\nb = '\xff'\n", "line 3 is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_unreadable_toml_names_file_and_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "spec.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        read_toml(path)
    assert str(path) in str(error.value)


def test_toml_text_is_what_one_would_write_by_hand() -> None:
    table = {
        "name": "run",
        "data": {"clients": 20, "seed": None, "split": {"alpha": 0.1}},
        "lr": [0.1, 1e-05],
    }
    assert to_toml(table) == (
        'name = "run"\nlr = [0.1, 1e-05]\n\n[data]\nclients = 20\n\n[data.split]\nalpha = 0.1\n'
    )


def test_toml_writes_infinities_nan_and_numpy_floats() -> None:
    back = tomllib.loads(
        to_toml({"a": math.inf, "b": -math.inf, "c": math.nan, "d": np.float64(0.1)})
    )
    assert (back["a"], back["b"], back["d"]) == (math.inf, -math.inf, 0.1)
    assert math.isnan(back["c"])


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), [None], [1, b"x"]])
def test_toml_names_a_value_it_cannot_write(value: object) -> None:
    with pytest.raises(InputError, match="cannot write bad"):
        to_toml({"bad": value})


text = st.text(st.characters(codec="utf-8"))
leaf = text | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
value = leaf | st.lists(leaf)
table = st.dictionaries(text, value | st.dictionaries(text, value | st.dictionaries(text, value)))


@given(table)
def test_toml_round_trip(content: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(content)) == content


@given(text)
def test_text_round_trip(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    write_atomic(path, content)
    assert read_text(path) == content.removeprefix("\ufeff")
