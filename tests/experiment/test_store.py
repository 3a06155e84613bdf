"""Traces in parts: what is read is what was written, and a damaged file is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsso import FedAvg, Federation, FedSSO, Results, compare
from fedsso.errors import InputError
from fedsso.experiment.store import Held, held, read, read_all, save_part
from fedsso.experiment.trace import Trace
from fedsso.support.intake import Damaged
from studies import study


@pytest.fixture(scope="module")
def runs(fed: Federation) -> Results:
    """One that goes its way, one that stops early, one that diverges."""
    records = [FedAvg(alpha=a) for a in (1e-6, 3.0, 1e9)]
    return compare(
        fed, "mlp", records, rounds=12, eval_every=2, stop_at=0.5, metrics=("f1",), device="cpu"
    )


def found(folder: Path, runs: Results) -> list[Held]:
    there = held(folder)
    return [there[run.spec.identity] for run in runs]


def traces(folder: Path, runs: Results) -> list[Trace]:
    """What a folder gives back of these runs."""
    return [run.trace for run in read(found(folder, runs), [run.spec for run in runs])]


def test_a_part_gives_back_its_traces(tmp_path: Path, runs: Results) -> None:
    save_part(tmp_path, list(runs))
    lengths = [len(run.trace) for run in runs]
    assert lengths[1] < lengths[0] == lengths[2] == 13
    assert [run.diverged is None for run in runs] == [True, True, False]
    for run, trace in zip(runs, traces(tmp_path, runs), strict=True):
        assert (trace.eval_every, trace.diverged) == (run.trace.eval_every, run.diverged)
        assert trace.columns.keys() == run.trace.columns.keys()
        for exact in ("test_accuracy", "test_f1", "round", "seed", "bytes_up", "bytes_down"):
            np.testing.assert_array_equal(trace[exact], run.trace[exact])
        for rounded in ("test_loss", "train_loss", "grad_norm"):
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(trace[rounded], run.trace[rounded].astype(np.float32))


def test_a_trial_is_found_in_whatever_part_it_is(tmp_path: Path, runs: Results) -> None:
    save_part(tmp_path, [runs[2], runs[0]])
    save_part(tmp_path, [runs[1]])
    assert len(list(tmp_path.iterdir())) == 2
    for run, trace in zip(runs, traces(tmp_path, runs), strict=True):
        np.testing.assert_array_equal(trace["test_accuracy"], run.trace["test_accuracy"])


def test_the_same_part_is_the_same_file(tmp_path: Path, runs: Results) -> None:
    save_part(tmp_path, list(runs))
    (before,) = tmp_path.iterdir()
    save_part(tmp_path, list(runs))
    assert list(tmp_path.iterdir()) == [before]
    assert before.name.startswith("fedavg-")


def test_columns_that_only_some_trials_have_are_nan_for_the_others(
    tmp_path: Path, fed: Federation
) -> None:
    mixed = [
        compare(fed, "mclr", [FedAvg()], rounds=2, metrics=m, device="cpu")[0]
        for m in ((), ("f1",))
    ]
    save_part(tmp_path, mixed)
    without, own = traces(tmp_path, Results(mixed))
    assert np.isnan(without["test_f1"]).all()
    assert np.isfinite(own["test_f1"]).all()


def test_an_empty_or_missing_folder_holds_nothing(tmp_path: Path) -> None:
    assert held(tmp_path) == held(tmp_path / "nowhere") == {}
    assert read([], []) == []


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory, fed: Federation) -> Path:
    folder = tmp_path_factory.mktemp("part")
    save_part(folder, list(compare(fed, "mclr", [FedSSO()], rounds=2, device="cpu")))
    return next(folder.iterdir())


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\x93NUMPY", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_part_is_named(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(damage)
    with pytest.raises(InputError, match=r"x\.npz is damaged"):
        held(tmp_path)


def test_any_damaged_byte_is_refused(part: Path, tmp_path: Path) -> None:
    """Every 97th byte turned round, and the file cut there."""
    data = part.read_bytes()
    for place in range(0, len(data), 97):
        for damaged in (
            data[:place],
            data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :],
        ):
            (tmp_path / part.name).write_bytes(damaged)
            with pytest.raises(Damaged):
                held(tmp_path)


def test_a_damaged_part_is_put_aside_and_its_trials_run_again(
    tmp_path: Path, fed: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"seeds": (0,), "rounds": 2, "device": "cpu", "out": tmp_path}
    first = study(fed, "mclr", [FedSSO(), FedAvg()], **options)
    path = sorted(tmp_path.glob("*.npz"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    again = study(fed, "mclr", [FedSSO(), FedAvg()], **options)
    assert "its trials are run again" in caplog.text
    assert len(list(tmp_path.glob("*.npz.damaged"))) == 1
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.trace["train_loss"], b.trace["train_loss"])


def test_an_archive_of_somebody_else_is_left_alone(tmp_path: Path, fed: Federation) -> None:
    np.savez(tmp_path / "mine.npz", a=np.zeros(3))
    with pytest.raises(InputError, match=r"mine\.npz .*move it out of this folder"):
        study(fed, "mclr", [FedAvg()], rounds=2, device="cpu", out=tmp_path)
    assert (tmp_path / "mine.npz").is_file()


def test_a_part_of_something_else(tmp_path: Path) -> None:
    for content in ({"a": np.zeros(3)}, {"meta": np.frombuffer(b'[{"x": 1}]', np.uint8)}):
        np.savez(tmp_path / "x.npz", **content)
        with pytest.raises(InputError, match="not a whole part of a sweep"):
            held(tmp_path)


def test_a_copy_of_a_part_does_no_harm(part: Path, tmp_path: Path) -> None:
    shutil.copy(part, tmp_path / "a.npz")
    shutil.copy(part, tmp_path / "b.npz")
    assert len(held(tmp_path)) == 1


def altered(folder: Path, runs: Results, **changes: object) -> None:
    """A part whose description of the first trial, or one of its columns, was changed."""
    save_part(folder, list(runs))
    (path,) = folder.glob("*.npz")
    with np.load(path) as part:
        columns = {name: part[name] for name in part.files}
    meta = json.loads(columns.pop("meta").tobytes())
    for name, value in changes.items():
        if name in columns:
            columns[name] = np.asarray(value)
        else:
            meta[0][name] = value
    np.savez(path, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        *({"rounds": wrong} for wrong in ("x", -1, 99)),
        *({"eval_every": 0}, {"diverged": "no"}, {"spec": 3}, {"identity": None}),
        *({"test_accuracy": wrong} for wrong in ([[0.1]], [0.1], [["a"] * 13] * 3)),
    ],
    ids=str,
)
def test_a_part_that_contradicts_itself_is_named(
    changes: dict[str, object], tmp_path: Path, runs: Results
) -> None:
    altered(tmp_path, runs, **changes)
    with pytest.raises(InputError, match=r"is not a whole part of a sweep"):
        traces(tmp_path, runs)


def test_a_part_with_rounded_metrics_is_read(tmp_path: Path, runs: Results) -> None:
    """Earlier versions kept all metrics but the accuracy in single precision."""
    save_part(tmp_path, list(runs))
    (path,) = tmp_path.glob("*.npz")
    with np.load(path) as part:
        rounded = part["test_f1"].astype(np.float32)
    altered(tmp_path, runs, test_f1=rounded)
    for row, trace in zip(rounded, traces(tmp_path, runs), strict=True):
        np.testing.assert_array_equal(trace["test_f1"], row[: len(trace)])


def test_a_metric_that_equals_its_target_reaches_it_in_a_sweep(fed: Federation) -> None:
    def share(z: object, y: object) -> float:  # noqa: ARG001
        return 0.7

    found = study(fed, "mclr", [FedAvg()], rounds=2, metrics=[share], device="cpu")
    assert found[0].rounds_to(0.7, "test_share") == 0


def test_a_part_holds_the_settings_of_its_trials(tmp_path: Path, runs: Results) -> None:
    save_part(tmp_path, list(runs))
    again = read_all(tmp_path)
    assert [run.spec for run in again] == [run.spec for run in runs]
    assert [run.record for run in again] == [run.record for run in runs]


def test_a_part_without_settings_is_refused_and_gets_them_from_the_next_sweep(
    tmp_path: Path, fed: Federation
) -> None:
    """Earlier versions did not keep them."""
    options: dict[str, Any] = {"rounds": 2, "device": "cpu", "out": tmp_path}
    first = study(fed, "mclr", [FedAvg()], **options)
    altered(tmp_path, first, spec=None)
    with pytest.raises(InputError, match=r"earlier version.*run the same sweep again"):
        read_all(tmp_path)
    told: list[int] = []
    study(fed, "mclr", [FedAvg()], progress=lambda *row: told.append(row[1]), **options)
    assert told == [], "nothing is trained"
    assert [run.spec for run in read_all(tmp_path)] == [run.spec for run in first]


def test_settings_that_are_not_those_of_the_trial_are_noticed(
    tmp_path: Path, runs: Results
) -> None:
    other = runs[0].spec.to_toml() | {"l2": 0.5}
    altered(tmp_path, runs, spec=other)
    with pytest.raises(Damaged, match="settings are not those that it ran with"):
        read_all(tmp_path)


def test_parts_of_another_version_do_not_count(
    tmp_path: Path, runs: Results, caplog: pytest.LogCaptureFixture
) -> None:
    altered(tmp_path, runs, version="0.0.1")
    assert held(tmp_path) == {}
    assert "was made by fedsso 0.0.1" in caplog.text


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waits.npz")
    assert held(tmp_path) == {}
