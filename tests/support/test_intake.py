"""Files of others: regular ones only, within limits, and every failure told in one sentence."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from fedsso.errors import InputError
from fedsso.support.intake import (
    Damaged,
    Limits,
    TooLarge,
    Unreadable,
    inside,
    is_file,
    is_folder,
    limits,
    lines,
    parse_json,
    parse_npz,
    parse_toml,
    read_bytes,
    read_csv,
    read_json,
    read_npz,
    read_text,
    read_toml,
    unpacked,
)

READERS: tuple[Callable[[Path], object], ...] = (
    read_bytes,
    read_text,
    read_toml,
    read_json,
    read_npz,
    read_csv,
    lambda path: list(lines(path)),
)


@pytest.fixture(autouse=True)
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in fields(Limits):
        monkeypatch.delenv(f"FEDSSO_MAX_{field.name.upper()}", raising=False)


# ---- what is opened ----


@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "socket", tmp_path, Path("/dev/zero")):
            with pytest.raises(Unreadable, match="cannot read") as error:
                read(path)
            assert str(path) in str(error.value)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", ["absent", "file/below", "loop", "n" * 300, "a\0b", "\udc80"])
def test_a_path_without_a_file_is_told_in_one_sentence(
    tmp_path: Path, read: Callable[[Path], object], name: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(Unreadable, match="cannot read"):
        read(tmp_path / name)


AS_ANOTHER_USER = """
import os, sys
from fedsso.support import intake
from fedsso.errors import InputError

if os.getuid() == 0:  # no permission stops root
    os.setuid(65534)
file, folder = sys.argv[1:]
for look, path in (intake.read_toml, file), (intake.is_file, file), (intake.inside, folder):
    try:
        print(look(path))
    except InputError as error:
        print(type(error).__name__, error)
"""


def test_a_file_without_permission_is_not_called_damaged() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "locked"
        path = folder / "mine.toml"
        folder.mkdir()
        path.write_text("a = 1\n")
        Path(name).chmod(0o755)
        said = []
        for locked in (path, folder):
            locked.chmod(0)
            command = [sys.executable, "-c", AS_ANOTHER_USER, str(path), str(folder)]
            said.append(
                subprocess.run(
                    command, capture_output=True, text=True, check=True
                ).stdout.splitlines()
            )
        folder.chmod(0o700)
    assert said[0][0].startswith(f"Unreadable cannot read {path}: Permission denied; ask its owner")
    assert [line.split()[0] for line in said[1]] == ["Unreadable"] * 3
    assert "delete" not in str(said)


def test_what_is_not_there_is_neither_file_nor_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_file(tmp_path / "file")
    assert not is_folder(tmp_path / "file")
    assert is_folder(tmp_path)
    assert not is_file(tmp_path)
    for name in ("absent", "file/below"):
        assert not is_file(tmp_path / name)
        assert not is_folder(tmp_path / name)
        assert inside(tmp_path / name) == []
    assert inside(tmp_path) == [tmp_path / "file"]
    for look in (is_file, is_folder, inside):
        for name in ("n" * 300, "a\0b"):
            with pytest.raises(Unreadable, match="cannot read"):
                look(tmp_path / name)


# ---- limits ----


@pytest.mark.parametrize("text", ["0", "-1", "many", "1e9", "9" * 19])
def test_a_limit_is_a_whole_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FEDSSO_MAX_ROWS", text)
    with pytest.raises(InputError, match=r"FEDSSO_MAX_ROWS must be a whole number"):
        limits()


def test_the_docs_list_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `FEDSSO_MAX_([A-Z]+)` \| (\d+) \|", page, re.MULTILINE))
    assert told == {field.name.upper(): str(field.default) for field in fields(Limits)}


def zipped_npy(path: Path, header: bytes, size: int) -> None:
    """An .npz whose array x says what it likes, and has `size` zeros."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as file,
    ):
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        for _ in range(size // (1 << 20)):
            file.write(bytes(1 << 20))
        file.write(bytes(size % (1 << 20)))


def npy_header(shape: object, dtype: str = "|u1") -> bytes:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()


BEYOND = {
    "bytes": (b"123456", read_bytes),
    "text": (b"123456", read_text),
    "settings": (b"a = 1\n", read_toml),
    "unpacked": (gzip.compress(bytes(6)), lambda path: list(lines(path))),
    "rows": (b"\n" * 6, lambda path: list(lines(path))),
    "line": (b"123456", lambda path: list(lines(path))),
    "columns": (b"a,b,c,d,e,f\n", read_csv),
    "field": (b"a\n123456\n", read_csv),
    "nesting": (b"a = [[[[[[1]]]]]]\n", read_toml),
    "digits": (b"a = 123456\n", read_toml),
}


@pytest.mark.parametrize("name", BEYOND)
def test_an_error_states_the_limit_and_the_way_to_raise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content, read = BEYOND[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    read(path)
    monkeypatch.setenv(f"FEDSSO_MAX_{name.upper()}", "5")
    with pytest.raises(
        TooLarge, match=rf"at most 5 are read; set FEDSSO_MAX_{name.upper()} "
    ) as error:
        read(path)
    assert str(path) in str(error.value)
    monkeypatch.setenv(f"FEDSSO_MAX_{name.upper()}", "6")
    read(path)


# ---- TOML and JSON ----

DEEP = 2000
HOSTILE_TOML = {
    "brackets": "a = " + "[" * DEEP + "]" * DEEP,
    "braces": "a = " + "{a=" * DEEP + "1" + "}" * DEEP,
    "open": "a = " + "[" * 10**6,
    "dotted key": ".".join("a" * DEEP) + " = 1",
    "dotted header": "[" + ".".join("a" * 10**6) + "]",
    "dots in braces": "a = {" + " . ".join("a" * DEEP) + " = 1}",
    "digits": "a = " + "1" * 5000,
    "digits with underscores": "a = " + "1_" * 5000 + "1",
    "behind a text of four quotes": 'a = ["""x"""", ' + "[" * DEEP + "]" * DEEP + "]",
    "escapes": '"""\n' + '\\"""\n' * 10**5,
    "quotes": "a = '" + '"\\' * 10**5,
    "one word": "a" * 4 * 10**6,
}


@pytest.mark.parametrize("name", HOSTILE_TOML)
def test_hostile_toml_is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(HOSTILE_TOML[name])
    with pytest.raises(InputError, match=r"spec\.toml.*") as error:
        read_toml(path)
    assert len(str(error.value)) < 500


def test_hostile_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    for text in ("[" * 10**5, '{"a":' * 10**5, "1" * 5000, "{", "", '{"a": }'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"meta\.json"):
            read_json(path)


def test_brackets_dots_and_digits_in_texts_and_comments_mean_nothing() -> None:
    noise = "[" * 100 + "." * 100 + "1" * 2000 + "a." * 100
    text = f'a = \'{noise}\' # {noise}\nb = "\\"{noise}"\n'
    text += f"c = '''\n'{noise}'''\n"
    text += f'd = """"{noise}\n""""\n'
    table = parse_toml(text, "here")
    assert table == {"a": noise, "b": f'"{noise}', "c": f"'{noise}", "d": f'"{noise}\n"'}
    assert parse_json(json.dumps(table), "here") == table
    deepest = parse_toml("a = " + "[" * 64 + "]" * 64, "here")
    assert str(deepest["a"]).count("[") == 64


def test_the_line_of_a_deep_place_is_named() -> None:
    with pytest.raises(TooLarge, match=r"here: line 3: .*brackets.*at most 64"):
        parse_toml("a = 1\nb = '''[[\n'''" + "[" * 70, "here")


# ---- packed files ----

PACKERS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACKERS)
def test_a_packed_file_must_not_expand_without_end(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(PACKERS[kind](bytes(65 << 20)))
    told = r"times larger, unpacked, at most 100 .* FEDSSO_MAX_EXPANSION"
    with pytest.raises(TooLarge, match=told), unpacked(path) as file:
        file.read()


@pytest.mark.parametrize("kind", PACKERS)
def test_what_is_packed_comes_out_whole_and_damage_is_told(tmp_path: Path, kind: str) -> None:
    path, content = tmp_path / "packed", os.urandom(100_000)
    packed = PACKERS[kind](content)
    path.write_bytes(packed)
    with unpacked(path) as file:
        assert file.read() == content
    path.write_bytes(packed[:-20])
    with (
        pytest.raises(Damaged, match=f"cannot be read as {kind}, corrupt or cut short"),
        unpacked(path) as file,
    ):
        file.read()


# ---- arrays ----


def saved(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_arrays_come_back_as_they_were_and_can_be_written_to() -> None:
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "c": np.array(True),
        "d": np.zeros((0, 3), np.float32),
        "e": np.arange(3, dtype=">i4"),
    }
    found = parse_npz(saved(**arrays), "here")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
        assert found[name].flags.writeable
    assert list(parse_npz(saved(**arrays), "here", ["e"])) == ["e"]
    with pytest.raises(Damaged, match="has no array 'f', only a, b, c, d, e"):
        parse_npz(saved(**arrays), "here", ["f"])


HEADERS = {
    "more than there is": npy_header("(4,)"),
    "beyond memory": npy_header((10**12,)),
    "beyond int64": npy_header((10**30,)),
    "negative": npy_header((-1, -3)),
    "objects": npy_header((3,), "|O"),
    "structures": npy_header((3,), "V1"),
    "no size": npy_header((10**18,), "|S0"),
    "text": b"rubbish",
    "nested": b"(" * 5000,
    "long": b" " * 60000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_allocates_nothing(tmp_path: Path, name: str) -> None:
    zipped_npy(tmp_path / "lie.npz", HEADERS[name], 3)
    with pytest.raises(Damaged, match=r"lie\.npz: cannot be read as \.npz") as error:
        read_npz(tmp_path / "lie.npz")
    assert "Traceback" not in str(error.value)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.array([{"a": 1}], dtype=object))
    (tmp_path / "bare.npz").write_bytes(pickle.dumps({"x": 1}))
    for name in ("own.npz", "bare.npz"):
        with pytest.raises(Damaged, match="cannot be read as"):
            read_npz(tmp_path / name)


def test_any_cut_or_flipped_archive_is_damaged_or_the_same() -> None:
    whole = saved(x=np.arange(50), y=np.zeros(3))
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for data in (whole[:place], bytes(flipped)):
            try:
                found = parse_npz(data, "here", ["x"])
            except InputError:
                continue
            assert np.array_equal(found["x"], np.arange(50))


def test_an_archive_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    zipped_npy(tmp_path / "bomb.npz", npy_header((200 << 20,)), 200 << 20)
    with pytest.raises(TooLarge, match="FEDSSO_MAX_EXPANSION"):
        read_npz(tmp_path / "bomb.npz")


def test_a_long_list_of_contents_is_not_read() -> None:
    """Its length stands at the end of the file, and says 1 GB."""
    whole = bytearray(saved(x=np.arange(3)))
    at = whole.rindex(b"PK\x05\x06")
    padded = bytes(whole[:at]) + bytes(5 << 20) + bytes(whole[at : at + 12])
    padded += (len(padded) - 12).to_bytes(4, "little") + (0).to_bytes(4, "little") + b"\0\0"
    with pytest.raises(Damaged, match="it asks for"):
        parse_npz(padded, "here")


# ---- CSV ----


def test_csv_rows_by_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,b\n1,"2\n3"\n\n4,5\n')
    assert read_csv(path) == [{"a": "1", "b": "2\n3"}, {"a": "4", "b": "5"}]
    path.write_text("")
    assert read_csv(path) == []
    for text, message in (
        ("a,b\n1\n", "line 2: has 1 cells for 2"),
        ('a\n"b\n', "line 2: cannot be read as CSV"),
    ):
        path.write_text(text)
        with pytest.raises(Damaged, match=message):
            read_csv(path)
    path.write_text("a\n" + "x" * 200_000 + "\n")
    with pytest.raises(
        TooLarge,
        match=r"line 2: .*at most 131072.*set FEDSSO_MA",
    ):
        read_csv(path)


# ---- what others are told ----


def test_an_error_has_a_text_for_others_which_quotes_nothing() -> None:
    error = InputError("row 3 has 'Miller'")
    assert error.public == "wrong input; details are in the client's own log"
    assert Damaged("row 3 has 'Miller'").public.startswith("a file that is damaged; ")
    told = pickle.loads(
        pickle.dumps(InputError("row 3 has 'Miller'", public="1 cell of column 'age'"))
    )
    assert (str(told), told.public) == ("row 3 has 'Miller'", "1 cell of column 'age'")
