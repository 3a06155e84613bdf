"""Files that guard themselves: damage is noticed, the checkpoint before stands in, one writer holds
a folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedsso import FedAvg, Federation, FedSSO, InputError, Run, compare, load_run, resume, simulate
from fedsso.engine import checkpoint
from fedsso.engine.checkpoint import before, text_of
from fedsso.experiment.spec import CHECKPOINT, SPEC, TRACE, Spec
from fedsso.support.files import write_atomic
from fedsso.support.intake import Damaged
from fedsso.support.lock import Lock
from fedsso.support.seal import BLANK, MARK, check, read_sealed_toml, seal, sealed_toml

SMALL: dict[str, Any] = {"rounds": 6, "local_steps": 2, "batch_size": 4, "device": "cpu"}


class Stop(Exception):
    """Ends a run as a kill would: nothing is saved any more."""


def stop_after(rounds: int) -> Callable[..., None]:
    def progress(label: str, k: int, total: int, numbers: dict[str, float]) -> None:  # noqa: ARG001
        if k > rounds:
            raise Stop

    return progress


def interrupted(fed: Federation, folder: Path, after: int = 4, **options: Any) -> None:
    """A run that ended after that round, with a checkpoint of every round."""
    with pytest.raises(Stop):
        simulate(
            fed,
            "mclr",
            FedSSO(),
            out=folder,
            checkpoint_every=1,
            progress=stop_after(after),
            **{**SMALL, **options},
        )


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def same(a: Run, b: Run) -> None:
    assert torch.equal(a.x, b.x)
    assert list(a.trace.columns) == list(b.trace.columns)
    for name in a.trace.columns:
        if name != "seconds":
            np.testing.assert_array_equal(a.trace[name], b.trace[name], err_msg=name)


# ---- seals ----


def test_a_sealed_file_is_found_changed_by_any_bit() -> None:
    data = seal(f"some text # {BLANK} more".encode())
    assert check(data) is True
    assert check(b"no seal") is None
    for bit in range(8 * len(data)):
        assert check(flipped(data, bit)) is not True


def test_text_that_looks_like_a_seal_is_refused() -> None:
    with pytest.raises(InputError, match=MARK):
        seal(f"label = '{MARK}' # {BLANK}".encode())


def test_sealed_toml_is_read_back_and_an_edit_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(sealed_toml({"a": 1, "b": {"c": "ü"}}))
    assert read_sealed_toml(path) == {"a": 1, "b": {"c": "ü"}}
    path.write_text(path.read_text().replace("a = 1", "a = 2"))
    with pytest.raises(Damaged, match="checksum"):
        read_sealed_toml(path)
    path.write_text("a = 2\n")  # as earlier versions wrote it
    assert read_sealed_toml(path) == {"a": 2}


# ---- checkpoints ----


@pytest.fixture(scope="module")
def finished(fed: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run that has only its last checkpoint."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    simulate(fed, "mclr", FedSSO(), out=folder, **SMALL)
    return folder


def test_other_programs_read_the_model(finished: Path) -> None:
    assert torch.equal(load_file(finished / CHECKPOINT)["model"], load_run(finished).x)


def test_every_bit_flip_in_a_checkpoint_is_noticed(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / CHECKPOINT
    whole = path.read_bytes()
    assert not before(path).exists()
    for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 200).tolist():
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(InputError, match="damaged"):
            load_run(tmp_path / "run")


@pytest.mark.parametrize("name", [SPEC, TRACE])
def test_every_bit_flip_in_spec_and_trace_is_noticed(
    finished: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / name
    whole, run = path.read_bytes(), load_run(finished)
    for bit in np.random.default_rng(1).integers(0, 8 * len(whole), 40).tolist():
        path.write_bytes(flipped(whole, bit))
        caplog.clear()
        try:
            same(load_run(tmp_path / "run"), run)
        except InputError:
            continue
        in_the_seal = name == SPEC and bit // 8 < whole.index(b"\n")
        assert in_the_seal or "the copy in the checkpoint is used" in caplog.text


def test_a_run_goes_on_from_the_checkpoint_before(
    fed: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(fed, tmp_path)
    path = tmp_path / CHECKPOINT
    assert int(checkpoint.load(path)["k"]) == 4
    path.write_bytes(flipped(path.read_bytes(), 9000))
    (run,) = resume(tmp_path, federation=fed)
    assert "the previous checkpoint is used" in caplog.text
    same(run, simulate(fed, "mclr", FedSSO(), **SMALL))
    assert path.with_name("checkpoint.damaged.safetensors").exists()


def test_a_run_without_a_whole_checkpoint_begins_again(
    fed: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(fed, tmp_path)
    path = tmp_path / CHECKPOINT
    path.write_bytes(b"nonsense")
    before(path).write_bytes(b"")
    (run,) = resume(tmp_path, federation=fed)
    assert "the run starts over" in caplog.text
    same(run, simulate(fed, "mclr", FedSSO(), **SMALL))


def test_a_kill_between_the_two_renamings_loses_nothing(fed: Federation, tmp_path: Path) -> None:
    interrupted(fed, tmp_path)
    path = tmp_path / CHECKPOINT
    os.replace(path, before(path))
    (run,) = resume(tmp_path, federation=fed)
    same(run, simulate(fed, "mclr", FedSSO(), **SMALL))


def test_a_finished_run_that_is_damaged_is_computed_again(
    fed: Federation, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / CHECKPOINT
    path.write_bytes(flipped(path.read_bytes(), 12345))
    with pytest.raises(InputError, match="computes it again"):
        load_run(tmp_path / "run")
    (run,) = resume(tmp_path / "run", federation=fed)
    same(run, load_run(finished))


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "no k": lambda t: t.pop("k"),
    "no position": lambda t: t.pop("position"),
    "no diverged": lambda t: t.pop("diverged"),
    "no contents": lambda t: t.pop("contents"),
    "no lost part of an upload": lambda t: t.pop(next(n for n in t if n.startswith("errors."))),
    "k of -1": lambda t: t.update(k=torch.tensor(-1)),
    "k too large": lambda t: t.update(k=torch.tensor(5)),
    "k of another type": lambda t: t.update(k=torch.tensor(4.0)),
    "k of another shape": lambda t: t.update(k=torch.tensor([4, 4])),
    "a negative position": lambda t: t.update(position=-t["position"] - 1),
    "a position too few": lambda t: t.update(position=t["position"][1:]),
    "a position of another type": lambda t: t.update(position=t["position"].double()),
    "a model of another size": lambda t: t.update({"server.x": t["server.x"][:, 1:].contiguous()}),
    "a model of another type": lambda t: t.update({"server.x": t["server.x"].double()}),
    "a model with NaN": lambda t: t["server.x"].view(-1)[:1].fill_(torch.nan),
    "a column too short": lambda t: t.update({"rows.train_loss": t["rows.train_loss"][1:]}),
    "an end far away": lambda t: t.update(ended=t["ended"] + 10**12),
    "a divergence to come": lambda t: t.update(diverged=t["diverged"] + 9),
    "contents that are no JSON": lambda t: t.update(contents=torch.zeros(3, dtype=torch.uint8)),
    "contents of another type": lambda t: t.update(contents=torch.zeros(3)),
    "contents of another kind": lambda t: t.update(
        contents=torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8)
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_that_does_not_fit_the_run_is_refused(
    fed: Federation, tmp_path: Path, name: str
) -> None:
    """With a right identity and a right seal, as a faulty program could write it."""
    interrupted(fed, tmp_path, compress="int8")
    path = tmp_path / CHECKPOINT
    identity = json.loads(
        path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    )
    tensors = checkpoint.load(path)
    CHANGES[name](tensors)
    checkpoint.save(path, tensors, identity["__metadata__"]["fedsso.identity"])
    kept = path.read_bytes()
    with pytest.raises(InputError, match="checkpoint"):
        resume(tmp_path, federation=fed)
    assert path.read_bytes() == kept


def test_a_resumed_trace_has_its_columns_in_the_same_order(fed: Federation, tmp_path: Path) -> None:
    whole = simulate(fed, "mclr", FedSSO(), **SMALL)
    interrupted(fed, tmp_path)
    (run,) = resume(tmp_path, federation=fed)
    assert list(run.trace.columns) == list(whole.trace.columns)
    assert (
        text_of(checkpoint.load(tmp_path / CHECKPOINT)["trace"]) == (tmp_path / TRACE).read_text()
    )


def test_a_checkpoint_of_the_first_form_is_read(finished: Path, tmp_path: Path) -> None:
    """Earlier versions kept the identity in a tensor, and no seal."""
    from safetensors.torch import save_file

    shutil.copytree(finished, tmp_path / "run")
    run = load_run(finished)
    tensors = {name: t for name, t in load_file(finished / CHECKPOINT).items() if name != "trace"}
    tensors["fedsso.identity"] = torch.frombuffer(
        bytearray(run.spec.identity.encode()), dtype=torch.uint8
    )
    save_file(tensors, tmp_path / "run" / CHECKPOINT)
    same(load_run(tmp_path / "run"), run)


def test_a_checkpoint_of_a_later_form_is_refused(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / CHECKPOINT
    later = path.read_bytes().replace(b'"fedsso.form":"2"', b'"fedsso.form":"3"')
    assert later != path.read_bytes()
    blank = re.sub(rb"fedsso-sha256:[0-9a-f]{64}", BLANK.encode(), later)
    path.write_bytes(seal(blank))
    with pytest.raises(InputError, match="use the version that wrote it"):
        load_run(tmp_path / "run")


def test_a_start_from_a_damaged_checkpoint_is_refused(
    fed: Federation, finished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "start.safetensors"
    whole = (finished / CHECKPOINT).read_bytes()
    path.write_bytes(whole)
    simulate(fed, "mclr", FedAvg(), init=path, **SMALL)
    path.write_bytes(flipped(whole, 8 * len(whole) - 1))
    with pytest.raises(InputError, match="damaged"):
        simulate(fed, "mclr", FedAvg(), init=path, **SMALL)


def test_a_file_that_lies_about_its_size_is_not_read(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / CHECKPOINT
    with path.open("r+b") as file:
        file.truncate(1 << 42)  # 4 TiB, of which the disk holds next to nothing
    with pytest.raises(InputError, match="damaged"):
        load_run(tmp_path / "run")


def test_a_run_that_ends_with_an_infinite_variance_is_read_back(tmp_path: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 1e19
    own = Federation.from_arrays(x, (x[:, 0] > 0).long(), [0] * 20 + [1] * 20)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    run = simulate(own, module, FedAvg(alpha=0.1), out=tmp_path, **SMALL)
    assert torch.equal(load_run(tmp_path, model=module).buffers, run.buffers)


def test_a_run_is_not_saved_over_another(fed: Federation, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before_ = load_run(tmp_path / "run")
    other = simulate(fed, "mclr", FedAvg(alpha=0.3), **SMALL)
    with pytest.raises(InputError, match="holds another run"):
        other.save(tmp_path / "run")
    before_.save(tmp_path / "run")
    same(load_run(tmp_path / "run"), before_)


# ---- a sweep's chunk is one unit ----


def test_a_sweep_killed_while_it_saves_ends_with_the_same_bits(
    fed: Federation, tmp_path: Path
) -> None:
    grid = [FedSSO(alpha=a) for a in (0.01, 0.02, 0.05)]
    whole = compare(fed, "mlp", grid, out=tmp_path / "whole", **SMALL)
    compare(fed, "mlp", grid, out=tmp_path / "cut", **SMALL)
    for folder in sorted((tmp_path / "cut").iterdir())[
        1:
    ]:  # as if it was killed after the first of the three
        (folder / CHECKPOINT).unlink()
        (folder / TRACE).unlink()
    for a, b in zip(resume(tmp_path / "cut", federation=fed), whole, strict=True):
        same(a, b)


def test_a_sweep_killed_while_it_plans_knows_all_its_runs(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = [FedSSO(), FedAvg(alpha=0.1), FedAvg(alpha=0.2)]
    whole = compare(fed, "mclr", grid, **SMALL)
    save, saved = Spec.save, list[Path]()

    def killed(self: Spec, path: Path) -> None:
        if saved:
            raise Stop
        saved.append(path)
        save(self, path)

    monkeypatch.setattr(Spec, "save", killed)
    with pytest.raises(Stop):
        compare(fed, "mclr", grid, out=tmp_path, **SMALL)
    monkeypatch.undo()
    assert len(list(tmp_path.glob(f"*/{SPEC}"))) == 1
    for a, b in zip(resume(tmp_path, federation=fed), whole, strict=True):
        same(a, b)
    assert not (tmp_path / "plan.toml").exists()


# ---- locks ----


def refused(folder: Path, action: Callable[[], object]) -> str:
    """What another thread is told while this one holds the folder."""
    told: list[str] = []

    def attempt() -> None:
        try:
            action()
        except InputError as error:
            told.append(str(error))

    with Lock(folder):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert len(told) == 1
    return told[0]


def test_two_writers_of_a_run(fed: Federation, tmp_path: Path) -> None:
    told = refused(tmp_path, lambda: simulate(fed, "mclr", FedAvg(), out=tmp_path, **SMALL))
    assert f"is being written by process {os.getpid()} on " in told
    simulate(fed, "mclr", FedAvg(), out=tmp_path, **SMALL)
    assert not (tmp_path / ".lock").exists()


def test_two_writers_of_a_sweep_and_of_one_of_its_runs(fed: Federation, tmp_path: Path) -> None:
    compare(fed, "mclr", [FedAvg()], out=tmp_path, **SMALL)
    (folder,) = tmp_path.iterdir()
    (folder / CHECKPOINT).unlink()
    assert "is being written by" in refused(
        tmp_path, lambda: compare(fed, "mclr", [FedAvg()], out=tmp_path, **SMALL)
    )
    assert "is being written by" in refused(folder, lambda: resume(tmp_path, federation=fed))
    assert "is being written by" in refused(folder, lambda: simulate(fed, out=folder, **SMALL))


def hold_for_ever(folder: Path, ready: Any) -> None:
    Lock(folder).acquire()
    ready.set()
    signal.pause()


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    holder = spawn.Process(target=hold_for_ever, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(120)
    with pytest.raises(InputError, match=f"written by process {holder.pid} on "), Lock(tmp_path):
        pass
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join()
    assert (tmp_path / ".lock").exists()
    with Lock(tmp_path), Lock(tmp_path):  # the same thread may take it twice
        pass
    assert not (tmp_path / ".lock").exists()


def fork_and_wait(folder: Path, ready: Any) -> None:
    Lock(folder).acquire()
    child = os.fork()
    if not child:
        signal.pause()
    ready.put(child)
    signal.pause()


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready: Any = spawn.SimpleQueue()
    holder = spawn.Process(target=fork_and_wait, args=(tmp_path, ready))
    holder.start()
    child = ready.get()
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join()
    with Lock(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)


# ---- temporary files ----


def test_only_our_leftovers_are_removed(tmp_path: Path) -> None:
    names = [".a.csv.0123456789abcdef.tmp", ".b.csv.0123.tmp", "mine.tmp", ".a.csv.tmp"]
    for name in names:
        (tmp_path / name).touch()
    with Lock(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_the_file_before_is_kept(tmp_path: Path) -> None:
    path, kept = tmp_path / "a", tmp_path / "b"
    for text in ("1", "2", "3"):
        write_atomic(path, text, keep=kept)
    assert (path.read_text(), kept.read_text()) == ("3", "2")
