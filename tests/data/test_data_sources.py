"""Named data sets: their defaults, their files, the tables of the paper on real data, known
minimisers."""

from __future__ import annotations

import gzip
import os
import struct
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fedsso.data import PARTITIONS, TABLES, Federation, all_options, datasets, load, quadratic
from fedsso.data.options import SKEW, other_names
from fedsso.data.sources import EVERY
from fedsso.data.synthetic import KINDS, OPTIONS_OF_KIND
from fedsso.errors import InputError
from fedsso.models import MODELS

needs_data = pytest.mark.skipif(
    not os.environ.get("FEDSSO_DATA"), reason="FEDSSO_DATA names no data folder"
)


def write(folder: Path, name: str = "mnist", rows: int = 120, **arrays: Any) -> Path:
    numbers = np.random.default_rng(0)
    content = {
        "x": numbers.integers(0, 256, (rows, 28, 28), np.uint8),
        "y": np.arange(rows, dtype=np.uint8) % 10,
    }
    np.savez(
        folder / f"{name}.npz", **{k: v for k, v in {**content, **arrays}.items() if v is not None}
    )
    return folder / f"{name}.npz"


def small(folder: Path, **options: Any) -> Federation:
    return load("mnist", data_dir=folder, **{"partition": "iid", "clients": 4, **options})


def test_digits_is_skewed_over_twenty_clients_by_default() -> None:
    fed = load("digits")
    assert (fed.clients, fed.classes, fed.sample_shape, fed.x.dtype) == (
        20,
        10,
        (1, 8, 8),
        torch.uint8,
    )
    assert len(fed.train_rows) + len(fed.test_rows) == 1797
    assert int((fed.train_sizes + fed.test_sizes).min()) >= 8
    assert (fed.source["partition"], fed.source["concentration"]) == ("dirichlet", 0.1)
    assert load("digits", partition="dirichlet").source["concentration"] == 0.5
    assert "rows moved" in fed.summary()


def test_pixels_span_the_range(tmp_path: Path) -> None:
    scale, shift = load("digits", pixel_range=(0.0, 2.0)).affine
    assert (0 * scale + shift, 16 * scale + shift) == (0.0, 2.0)
    write(tmp_path)
    scale, shift = small(tmp_path).affine
    assert 0 * scale + shift == -1.0
    assert 255 * scale + shift == pytest.approx(1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "digits"},
        {
            "name": "digits",
            "partition": "classes",
            "classes_per_client": 3,
            "clients": 7,
            "seed": 5,
        },
        {"name": "digits", "partition": "quantity", "concentration": 2.0, "test_fraction": 0.5},
        {"name": "digits", "partition": "iid", "min_rows": 20, "pixel_range": [0, 1]},
        {"name": "synthetic"},
        {"name": "synthetic", "dim": 3, "condition": 5, "heterogeneity": 0, "clients": 2},
        {"name": "synthetic", "kind": "logistic", "dim": 3, "test_fraction": 0.4, "noise": 0.2},
    ],
)
def test_the_source_rebuilds_the_federation_and_the_seed_changes_it(
    options: dict[str, Any],
) -> None:
    fed = load(**options)
    source: dict[str, Any] = dict(fed.source)
    again = load(**source)
    assert again.digest() == fed.digest()
    assert again.source == fed.source
    assert all(type(v) in (str, int, float) or v == [float(a) for a in v] for v in source.values())
    assert load(**{**source, "seed": 77}).digest() != fed.digest()


def test_the_source_of_a_file_does_not_say_where_it_was(tmp_path: Path) -> None:
    write(tmp_path)
    fed = small(tmp_path)
    assert str(tmp_path) not in str(fed.source)
    assert load(**dict(fed.source), data_dir=tmp_path).digest() == fed.digest()  # type: ignore[arg-type]


def test_files_are_found_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.setenv("FEDSSO_DATA", str(tmp_path))
    known = {dataset.name: dataset for dataset in datasets()}
    assert {name for name, dataset in known.items() if dataset.present()} == {
        "digits",
        "mnist",
        "synthetic",
    }
    found = known["mnist"].find()
    assert found is not None
    assert found[1] == [path]
    assert load("mnist", partition="iid", clients=4).digest() == small(tmp_path).digest()
    assert not known["mnist"].present(tmp_path / "elsewhere")
    monkeypatch.delenv("FEDSSO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not known["mnist"].present()
    (tmp_path / "cache" / "fedsso").mkdir(parents=True)
    write(tmp_path / "cache" / "fedsso")
    assert known["mnist"].present()  # where `fedsso data get` puts files unless told otherwise


NAMES = [
    *(
        "digits",
        "mnist",
        "fashion_mnist",
        "emnist_digits",
        "emnist_letters",
        "emnist_balanced",
        "cifar10",
    ),
    *(
        "shakespeare",
        "sentiment140",
        "ijcnn1",
        "a9a",
        "phishing",
        "heart",
        "synthetic",
        "csv",
        "svmlight",
        "npy",
    ),
]


def test_every_data_set_says_what_it_is() -> None:
    assert [d.name for d in datasets()] == NAMES
    for d in datasets():
        assert d.title
        assert d.origin
        assert d.yours or d.name == "synthetic" or (d.licence and d.forms[0].rows and d.classes)
        assert set(d.models) <= set(MODELS)
        assert d.partition in PARTITIONS or d.name == "synthetic"


def test_what_is_fetched_is_what_is_read() -> None:
    """The files that the downloads leave are those of the first form; digits comes with
    scikit-learn."""
    for d in datasets():
        fetched = {target for remote in d.remotes for target in remote.targets()}
        assert set(d.forms[0].files if d.forms else ()) <= fetched, d.name
        assert d.remotes or d.yours or d.name in ("digits", "synthetic")


def test_all_forms_of_a_set_take_the_options_that_it_declares() -> None:
    for d in datasets():
        declared = [option for option in d.options if option.name != "files"]
        for form in d.forms:
            taken = signature(form.read).parameters.values()
            own = {p.name: p.default for p in taken if p.kind is p.KEYWORD_ONLY}
            assert own == {option.name: option.default for option in declared}, d.name


def test_synthetic_problems_take_the_options_that_they_declare() -> None:
    for kind, function in KINDS.items():
        taken = signature(function).parameters.values()
        own = {p.name: p.default for p in taken if p.kind is p.KEYWORD_ONLY}
        assert own == {option.name: option.default for option in OPTIONS_OF_KIND[kind]}


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("digits", "n_clients", "clients"),
        ("digits", "num_clients", "clients"),
        ("mnist", "nodes", "clients"),
        ("heart", "num_nodes", "clients"),
        ("synthetic", "silos", "clients"),
        ("digits", "alpha", "concentration"),
        ("digits", "beta", "concentration"),
        ("a9a", "dirichlet_alpha", "concentration"),
        ("digits", "num_classes", "classes_per_client"),
        ("csv", "path", "files"),
        ("csv", "file", "files"),
        ("svmlight", "paths", "files"),
        ("csv", "label", "outcome"),
        ("csv", "y", "outcome"),
        ("csv", "column", "outcome"),
        ("digits", "test_size", "test_fraction"),
        ("digits", "random_state", "seed"),
    ],
)
def test_the_names_of_other_libraries_are_understood(name: str, wrong: str, right: str) -> None:
    given: dict[str, Any] = {wrong: 4}
    message = f"unknown option of {name}.*{wrong!r}; did you mean {right!r}"
    with pytest.raises(InputError, match=message):
        load(name, **given)


def test_no_option_is_called_as_another_one_is_in_other_libraries() -> None:
    """Else an error would send a user from a name that exists to another one."""
    for d in datasets():
        skew = () if d.name == "synthetic" else SKEW
        taken = (*EVERY, *skew, *d.options)
        others = other_names(taken)
        assert not {option.name for option in taken} & others.keys(), d.name
        assert len(others) == sum(len(option.also) for option in taken), d.name


def test_the_help_of_load_explains_every_option() -> None:
    text = " ".join((load.__doc__ or "").split())
    for option, owners in all_options().items():
        brackets = f" ({', '.join(owners)})" if owners else ""
        assert f"- `{option.name}`{brackets}: {option.doc}" in text
        assert option.doc.endswith(".")
    for name in list(signature(load).parameters)[1:-1]:
        assert name in [option.name for option in EVERY]
    assert len(EVERY) == len(signature(load).parameters) - 2


def test_an_option_says_what_a_settings_file_may_write() -> None:
    types = {option.name: option.plain_type for option in all_options()}
    assert types["clients"] is int
    assert types["data_dir"] is str
    assert types["files"] == types["features"] == list[str]
    assert types["pixel_range"] == list[float]


def idx_files(folder: Path, rows: int, start: str = "", test: str = "t10k") -> None:
    """The four official files, the images of `write` in them."""
    numbers = np.random.default_rng(0)
    x, y = numbers.integers(0, 256, (rows, 28, 28), np.uint8), np.arange(rows, dtype=np.uint8) % 10
    folder.mkdir(parents=True)
    for part, images, labels in (("train", x[:-20], y[:-20]), (test, x[-20:], y[-20:])):
        head = struct.pack(">4i", 0x803, len(images), 28, 28)
        name = f"{start}{part}-images-idx3-ubyte.gz"
        (folder / name).write_bytes(gzip.compress(head + images.tobytes()))
        name = f"{start}{part}-labels-idx1-ubyte.gz"
        (folder / name).write_bytes(
            gzip.compress(struct.pack(">2i", 0x801, len(labels)) + labels.tobytes())
        )


def test_official_and_plain_files_give_the_same_federation(tmp_path: Path) -> None:
    write(tmp_path)
    plain = small(tmp_path)
    idx_files(tmp_path / "mnist", 120)
    (tmp_path / "mnist.npz").unlink()
    assert small(tmp_path).digest() == plain.digest()


def test_emnist_is_looked_for_under_its_own_names(tmp_path: Path) -> None:
    idx_files(tmp_path / "emnist", 120, "emnist-digits-", "test")
    fed = load("emnist_digits", data_dir=tmp_path, partition="iid", clients=2)
    write(tmp_path)
    upright = small(tmp_path)
    assert torch.equal(fed.x, upright.x.mT)


def test_a_download_of_too_few_rows_is_refused(tmp_path: Path) -> None:
    idx_files(tmp_path / "mnist", 120)
    mnist = next(d for d in datasets() if d.name == "mnist")
    with pytest.raises(InputError, match="mnist has 70000"):
        mnist.check(tmp_path)


def test_own_csv_files_by_name(tmp_path: Path) -> None:
    for name, rows in (("north", 12), ("south", 9)):
        lines = [f"{i},{i % 5}.5,{i % 2},{'ab'[i % 2]}" for i in range(rows)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,dose,ill,ward", *lines]))
    with pytest.raises(InputError, match=r"north.csv: line 2: has 'a' in column 'ward'"):
        load("csv", files=[tmp_path], target="ill")
    fed = load("csv", files=tmp_path, target="ill", group="ward", min_rows=1)
    assert fed.client_names == ("a", "b")
    assert (fed.sample_shape, fed.classes) == ((2,), 2)
    source: dict[str, Any] = dict(fed.source)
    assert load(**source).digest() == fed.digest()
    for name in ("north", "south"):
        text = (tmp_path / f"{name}.csv").read_text()
        (tmp_path / f"{name}.csv").write_text(
            "\n".join(line.rpartition(",")[0] for line in text.split("\n"))
        )
    fed = load(
        "csv", files=[str(tmp_path / f"{name}.csv") for name in ("south", "north")], target="ill"
    )
    assert fed.client_names == ("south", "north")
    assert fed.train_sizes.tolist() == [7, 9]


def test_own_svmlight_files_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.svm"
    path.write_text("\n".join(f"{1 if i % 3 else -1} 1:{i} 3:0.5" for i in range(40)))
    fed = load("svmlight", files=[path], clients=4)
    assert (fed.clients, fed.sample_shape, fed.classes) == (4, (3,), 2)
    with pytest.raises(
        InputError, match=r"mine.svm: line 1: has feature 3, expected at most dim=2"
    ):
        load("svmlight", files=path, dim=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "csv"}, "reads your own files: name them, or a folder"),
        ({"name": "csv", "files": 5}, "got files=5"),
        ({"name": "csv", "files": "/nowhere.csv", "target": "y"}, "cannot read /nowhere.csv"),
        ({"name": "digits", "files": "a.csv"}, "unknown option of digits 'files'"),
        ({"name": "svmlight", "files": "a", "target": "y"}, "unknown option of svmlight 'target'"),
        ({"name": "digits", "partition": "group"}, "needs the group of each row"),
    ],
)
def test_wrong_own_files(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(**options)


def test_an_empty_folder_of_csv_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file \*\.csv in the folder"):
        load("csv", files=tmp_path, target="y")


def test_a_file_read_keeps_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path)
    fed = small(tmp_path)
    with np.load(path) as file:
        assert np.array_equal(fed.x[:, 0].numpy(), file["x"])
        assert np.array_equal(fed.y.numpy(), file["y"])
    assert (fed.x.dtype, fed.sample_shape) == (torch.uint8, (1, 28, 28))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no y": ({"y": None}, "has no array 'y', only x: download it again"),
    "no x": ({"x": None}, "has no array 'x', only y: download it again"),
    "float x": ({"x": np.zeros((120, 28, 28))}, r"x must be uint8 \[rows, 28, 28\], got float64"),
    "flat x": ({"x": np.zeros((120, 784), np.uint8)}, r"got uint8 \[120, 784\]"),
    "colour x": ({"x": np.zeros((120, 32, 32, 3), np.uint8)}, r"got uint8 \[120, 32, 32, 3\]"),
    "short y": (
        {"y": np.zeros(119, np.uint8)},
        r"y must be integers \[120\].*got uint8 \[119\]",
    ),
    "float y": ({"y": np.zeros(120)}, "y must be integers"),
    "large y": (
        {"y": np.arange(120, dtype=np.uint8) % 11},
        "mnist.npz: row 10 has label 10, mnist has 0 to 9",
    ),
    "pickled y": (
        {"y": np.array([None] * 120)},
        "npz.*y.npy holds object",
    ),
    "no rows": (
        {"x": np.zeros((0, 28, 28), np.uint8), "y": np.zeros(0, np.uint8)},
        "need 32 rows, there are 0",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_with_wrong_arrays_is_an_error(case: str, tmp_path: Path) -> None:
    arrays, message = BROKEN[case]
    write(tmp_path, **arrays)
    with pytest.raises(InputError, match=message):
        small(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, 3000, -1])
def test_a_truncated_file_is_an_error(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"mnist\.npz: cannot be read as \.npz"):
        small(tmp_path)


def test_a_corrupt_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    content[2000:2100] = bytes(100)
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"cannot be read as .*Bad CRC"):
        small(tmp_path)
    path.write_text("not an archive")
    with pytest.raises(InputError, match="cannot be read"):
        small(tmp_path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError, match="cannot be read"):
        small(tmp_path)


def test_a_missing_file_names_the_place_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = f"`fedsso data get mnist --data-dir {tmp_path}`"
    remedy = (
        rf"{get} downloads it; or put there mnist/train-images.* or mnist\.npz, or set FEDSSO_DATA"
    )
    with pytest.raises(InputError, match=rf"'mnist' is not in {tmp_path} \(data_dir\): {remedy}"):
        load("mnist", data_dir=tmp_path)
    monkeypatch.setenv("FEDSSO_DATA", str(tmp_path / "none"))
    with pytest.raises(InputError, match=rf"is not in {tmp_path}/none \(\$FEDSSO_DATA\)"):
        load("mnist")
    monkeypatch.delenv("FEDSSO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=rf"is not in {tmp_path}/cache/fedsso \(the default\)"):
        load("mnist")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "digit"}, "unknown data set 'digit'; did you mean 'digits'"),
    "partition": ({"name": "digits", "partition": "dirichet"}, "did you mean 'dirichlet'"),
    "option": (
        {"name": "digits", "pixel_rnge": (0, 1)},
        "unknown option of digits.*did you mean 'pixel_range'",
    ),
    "synthetic option": (
        {"name": "synthetic", "rows": 3},
        "unknown option of synthetic quadratic 'rows'.*condition",
    ),
    "unused skew": (
        {"name": "digits", "partition": "iid", "concentration": 1.0},
        "choose from dirichlet, quantity",
    ),
    "unused classes": ({"name": "digits", "classes_per_client": 3}, "choose from classes"),
    "range order": ({"name": "digits", "pixel_range": (1, -1)}, "low < high, got"),
    "range nan": ({"name": "digits", "pixel_range": (float("nan"), 1.0)}, "two finite numbers"),
    "range length": ({"name": "digits", "pixel_range": (0, 1, 2)}, "pixel_range must be 2 numbers"),
    "range type": (
        {"name": "digits", "pixel_range": ("a", 1)},
        "pixel_range.*a number.*pixel_range='a'",
    ),
    "table": (
        {"name": "digits", "partition": "paper-20"},
        "needs 6903 rows of label 0, the data set has 178",
    ),
    "table clients": (
        {"name": "digits", "partition": "paper-3", "clients": 4},
        "clients must be 3",
    ),
    "too many": ({"name": "digits", "clients": 225}, "use at most 224 clients"),
    "test": ({"name": "digits", "test_fraction": 1}, r"test_fraction must be in \[0, 1\)"),
    "own clients": ({"name": "synthetic", "partition": "iid"}, "defines its own clients"),
    "kind": ({"name": "synthetic", "kind": "logistc"}, "did you mean 'logistic'"),
    "dim": ({"name": "synthetic", "dim": 0}, "dim=0"),
    "dim type": ({"name": "synthetic", "dim": 2.5}, "dim.*integer >= 1.*dim=2.5"),
    "no clients": ({"name": "synthetic", "clients": 0}, "clients=0"),
    "heterogeneity": ({"name": "synthetic", "heterogeneity": -1.0}, "heterogeneity=-1.0"),
    "condition": (
        {"name": "synthetic", "condition": 0.5},
        "condition must be >= 1 and finite, got condition=0.5",
    ),
    "noise": ({"name": "synthetic", "kind": "logistic", "noise": 0.5}, "noise=0.5"),
    "condition inf": (
        {"name": "synthetic", "condition": float("inf")},
        "condition must be >= 1 and finite, got condition=inf",
    ),
    "endless": (
        {"name": "synthetic", "heterogeneity": float("inf")},
        "heterogeneity must be >= 0 and finite, got heterogeneity=inf",
    ),
    "too large": (
        {"name": "synthetic", "clients": 10**9},
        "got clients=1000000000, .*need at most 268435456",
    ),
    "too long": (
        {"name": "synthetic", "kind": "logistic", "rows": 10**8},
        "100000000 rows each make",
    ),
    "wide range": ({"name": "digits", "pixel_range": (-1e308, 1e308)}, "two finite numbers"),
    "name int": ({"name": 5}, "unknown data set 5. Known: a9a, cifar10"),
    "name none": ({"name": None}, "unknown data set None. Known: a9a, cifar10"),
    "name list": ({"name": []}, r"unknown data set \[\]. Known: a9a, cifar10"),
    "kind list": (
        {"name": "synthetic", "kind": []},
        r"unknown kind \[\]. Known: logistic, quadratic",
    ),
    "data_dir": (
        {"name": "mnist", "data_dir": 5},
        "data_dir must be the path of a file or folder, got 5",
    ),
    "separable": (
        {"name": "synthetic", "kind": "logistic", "rows": 2, "clients": 2},
        "no finite minimiser",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_wish_is_an_error(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        load(**options)


@pytest.mark.parametrize("name", ["digits", "synthetic"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("seed", "a", "seed.*integer.*seed='a'"),
        ("seed", 1.5, "seed.*integer.*seed=1.5"),
        ("seed", None, "seed.*integer.*seed=None"),
        ("seed", 2**63, "got seed=9223372036854775808"),
        ("clients", 1.5, "clients.*integer >= 1.*clients=1.5"),
        ("clients", "a", "clients.*integer >= 1.*clients='a'"),
        ("clients", True, "clients.*integer >= 1.*clients=True"),
        ("min_rows", "a", "min_rows.*integer >= 1.*min_rows='a'"),
        ("min_rows", -4, "min_rows.*integer >= 1.*min_rows=-4"),
        ("test_fraction", "a", "test_fraction.*a number.*test_fraction='a'"),
        ("test_fraction", None, "test_fraction.*a number.*test_fraction=None"),
        ("test_fraction", 7.0, r"test_fraction.*in \[0, 1\).*test_fraction=7.0"),
        ("partition", 5, "unknown partition 5. Known: classes"),
        ("concentration", "a", "concentration.*a number.*concentration='a'"),
        ("concentration", 10**400, "concentration must be a number below 1e308"),
        (
            "classes_per_client",
            1.5,
            "classes_per_client.*integer.*classes_per_client=1.5",
        ),
    ],
)
def test_every_data_set_checks_the_common_options(
    name: str, option: str, value: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load(name, **{option: value})


def test_a_concentration_that_is_no_number_is_an_error() -> None:
    with pytest.raises(InputError, match="must be > 0 and <= 1e9, got concentration=nan"):
        load("digits", concentration=float("nan"))


def test_numpy_options_give_a_plain_source() -> None:
    options = {"clients": 4, "seed": 5, "min_rows": 9}
    fed = load(
        "digits", concentration=np.float64(0.5), **{k: np.int64(v) for k, v in options.items()}
    )  # type: ignore[arg-type]
    assert fed.digest() == load("digits", concentration=0.5, **options).digest()  # type: ignore[arg-type]
    assert {type(v) for k, v in fed.source.items() if k != "pixel_range"} == {str, int, float}
    assert load("synthetic", dim=np.int64(3)).source["dim"] == 3


def objective(fed: Federation, loss: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
    losses = [loss(fed.x[fed.rows_of(i)] @ w, fed.y[fed.rows_of(i)]) for i in range(fed.clients)]
    return fed.p @ torch.stack(losses)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gradient(fed: Federation, loss: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(objective(fed, loss, w), w)[0]


def test_a_quadratic_worked_out_by_hand() -> None:
    """f_1 = x^2/2 + 2y^2, f_2 = (x-2)^2/2 + 2(y-3)^2 and p = (1/4, 3/4): the minimum is at (3/2,
    9/4)."""
    A = [[[1.0, 0.0], [0.0, 4.0]]] * 2
    fed = quadratic(A, [[0.0, 0.0], [2.0, 3.0]], p=[0.25, 0.75])
    assert fed.optimum is not None
    assert fed.optimum.tolist() == pytest.approx([1.5, 2.25])
    assert fed.p.tolist() == [0.25, 0.75]
    assert torch.equal(fed.test_rows, fed.train_rows)
    at_zero = objective(fed, mse, torch.zeros(2, dtype=torch.float64))
    assert float(at_zero) == pytest.approx(0.75 * (4 / 2 + 2 * 9))


def test_a_quadratic_is_exactly_the_one_asked_for() -> None:
    A = torch.tensor(
        [
            [[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 3.0]],
            [[1.0, 0.0, 0.3], [0.0, 2.0, 0.0], [0.3, 0.0, 1.0]],
        ]
    )
    b, x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]]), torch.tensor([0.3, -0.7, 0.9])
    fed = quadratic(A, b)
    f = sum(0.25 * (x - bi) @ Ai @ (x - bi) for Ai, bi in zip(A, b, strict=True))
    assert float(objective(fed, mse, x.double())) == pytest.approx(float(f), rel=1e-6)
    assert fed.x.dtype == fed.y.dtype == torch.float64
    assert fed.optimum is not None
    assert gradient(fed, mse, fed.optimum).norm() < 1e-14


def test_a_wrong_quadratic_is_an_error() -> None:
    with pytest.raises(InputError, match=r"got shapes \(2, 2\) and \(2,\)"):
        quadratic(np.eye(2), [0.0, 0.0])
    with pytest.raises(InputError, match="positive definite"):
        quadratic([[[1.0, 2.0], [2.0, 1.0]]], [[0.0, 0.0]])
    with pytest.raises(InputError, match="symmetric"):
        quadratic([[[1.0, 0.5], [0.0, 1.0]]], [[0.0, 0.0]])


@pytest.mark.parametrize("heterogeneity", [0.0, 1.0, 10.0])
@pytest.mark.parametrize(
    ("kind", "loss"), [("quadratic", mse), ("logistic", binary_cross_entropy_with_logits)]
)
def test_the_known_optimum_has_no_gradient(
    kind: str, loss: Callable[[Tensor, Tensor], Tensor], heterogeneity: float
) -> None:
    fed = load("synthetic", kind=kind, heterogeneity=heterogeneity, clients=6, dim=5)
    assert fed.optimum is not None
    assert fed.classes == 0
    assert gradient(fed, loss, fed.optimum).norm() < 2e-12
    assert gradient(fed, loss, fed.optimum + 0.1).norm() > 1e-3


def test_heterogeneity_moves_the_clients_apart_and_zero_makes_quadratics_alike() -> None:
    alike, apart = (load("synthetic", clients=3, dim=4, heterogeneity=h) for h in (0.0, 2.0))
    assert float(objective(alike, mse, _optimum(alike))) < 1e-20
    assert float(objective(apart, mse, _optimum(apart))) > 0.1


def test_noise_is_the_share_of_flipped_labels() -> None:
    clean, noisy = (load("synthetic", kind="logistic", noise=share) for share in (0.0, 0.3))
    assert torch.equal(clean.x, noisy.x)
    assert float((clean.y != noisy.y).double().mean()) == pytest.approx(0.3, abs=0.03)


def test_the_condition_number_is_kept() -> None:
    fed = load("synthetic", clients=2, dim=6, heterogeneity=0.0, condition=50.0)
    rows = fed.x[fed.rows_of(0)]
    eigenvalues = torch.linalg.eigvalsh(rows.mT @ rows * 2 / 6)
    assert eigenvalues.min() == pytest.approx(1 / 50)
    assert eigenvalues.max() == pytest.approx(1)


def _optimum(fed: Federation) -> Tensor:
    assert fed.optimum is not None
    return fed.optimum


@needs_data
@pytest.mark.parametrize(
    ("name", "table"),
    [("mnist", "paper-20"), ("mnist", "paper-3"), ("fashion_mnist", "paper-fashion-3")],
)
def test_the_papers_tables_on_real_images(name: str, table: str) -> None:
    fed, other = (load(name, partition=table, seed=seed) for seed in (0, 1))
    assert fed.label_counts().tolist() == other.label_counts().tolist() == TABLES[table]
    assert len({*fed.train_rows.tolist(), *fed.test_rows.tolist()}) == 70000
    assert fed.digest() != other.digest()
    assert torch.allclose(
        fed.test_sizes / (fed.train_sizes + fed.test_sizes), torch.tensor(0.25), atol=1e-3
    )
    assert fed.notes == ()


@needs_data
def test_the_defaults_on_real_images() -> None:
    assert load("mnist").source["partition"] == "paper-20"
    assert load("fashion_mnist").source["partition"] == "paper-fashion-3"
    emnist = load("emnist_digits")
    assert (emnist.clients, emnist.source["concentration"]) == (20, 0.1)


@needs_data
def test_a_table_needs_a_data_set_with_enough_rows() -> None:
    with pytest.raises(InputError, match="needs 7877 rows of label 1, the data set has 7000"):
        load("fashion_mnist", partition="paper-20")


ODD_PATHS = ["~nobody-of-this-name/x", "a" * 5000, "a\0b", "\udcff.csv", 5, [None], [b"x"]]


@pytest.mark.parametrize("path", ODD_PATHS, ids=range(len(ODD_PATHS)))
def test_no_file_can_have_such_a_name(path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"path|No such file"):
        load("csv", files=path, target="y")
    if isinstance(path, str):
        with pytest.raises(InputError, match=r"data_dir must be the path"):
            load("mnist", data_dir=path)
        if "\0" not in path:
            monkeypatch.setenv("FEDSSO_DATA", path)
            with pytest.raises(InputError, match=r"FEDSSO_DATA must be the path"):
                load("mnist")


def test_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("csv", "svmlight"):
        for path in ("/dev/zero", tmp_path / "pipe.csv"):
            with pytest.raises(InputError, match="not a regular file"):
                load(name, files=[path], **({"target": "y"} if name == "csv" else {}))


def test_thousands_of_small_clients_are_filled_up_at_once() -> None:
    began = time.process_time()
    fed = load("digits", partition="quantity", concentration=0.01, clients=1700, min_rows=1)
    assert fed.clients == 1700
    assert time.process_time() - began < 5
