"""What users call: simulate, sweep, compare, resume, Run and Runs, and the folders they write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import fedsso
from fedsso import (
    Decay,
    FedAvg,
    Federation,
    FedSGD,
    FedSSO,
    InputError,
    Run,
    Runs,
    compare,
    load,
    load_run,
    load_runs,
    resume,
    simulate,
    sweep,
)
from fedsso.objective import ravel
from fedsso.runs import CHECKPOINT, SPEC, TRACE
from fedsso.trace import COLUMNS

FAST: dict[str, Any] = {"rounds": 3, "local_steps": 2, "batch_size": 4, "device": "cpu"}


def equal(a: Run, b: Run) -> None:
    """The same run: model and trace to the last bit, wall time aside."""
    assert torch.equal(a.x, b.x)
    assert a.spec.identity == b.spec.identity
    for column in a.trace.columns:
        if column != "seconds":
            np.testing.assert_array_equal(a.trace[column], b.trace[column], err_msg=column)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return load("digits", clients=6, partition="dirichlet", concentration=0.5, seed=0)


@pytest.fixture(scope="module")
def trained(digits: Federation) -> Run:
    return simulate(digits, "mclr", FedSSO(alpha=0.01), rounds=15, batch_size=50, device="cpu")


# --- the tour of the README ------------------------------------------------------------------------------------------
def test_a_run_answers_questions(trained: Run, digits: Federation) -> None:
    trace = trained.trace
    accuracy = trace["test_accuracy"]
    assert len(trace) == 16
    hit = trained.rounds_to(0.8)
    assert hit is not None
    assert accuracy[hit] >= 0.8 > accuracy[:hit].max()
    last = trained.last_below(0.8)
    assert last is not None
    assert accuracy[last] < 0.8 <= accuracy[last + 1 :].min()
    assert trained.final() == accuracy[-1]
    assert trained.final("test_accuracy", last=5) == pytest.approx(accuracy[-5:].mean())
    assert trained.bytes_to(0.8) == hit * 2 * 6 * 4 * 650
    assert trained.rounds_to(1.1) is trained.last_below(1.1) is trained.bytes_to(1.1) is None
    assert trained.label == "fedsso alpha=0.01"
    assert trained.diverged is None
    assert list(trained.to_pandas().columns)[: len(COLUMNS)] == list(COLUMNS)
    assert repr(Runs([trained])) == "Runs(1 runs, 1 settings)"
    assert digits.clients == 6


def test_a_runs_model_and_clients(trained: Run, digits: Federation) -> None:
    model = trained.model
    assert not model.training
    assert torch.equal(ravel(model), trained.x)
    scale, shift = digits.affine
    rows = digits.x[digits.test_rows].float() * scale + shift
    right = (model(rows).argmax(1) == digits.y[digits.test_rows]).double()
    assert float(right.mean()) == pytest.approx(trained.final(), abs=1e-9)
    table = trained.clients()
    assert list(table.columns) == ["client", "train_rows", "test_rows", "loss", "accuracy"]
    assert table["test_rows"].tolist() == digits.test_sizes.tolist()
    mean = np.average(table["accuracy"], weights=table["test_rows"])
    assert mean == pytest.approx(trained.final(), abs=1e-9)
    with torch.no_grad():
        model.get_parameter("1.weight").zero_()
    assert torch.equal(ravel(trained.model), trained.x)  # a new copy each time


def test_clients_with_one_label_have_no_auc(make_fed: Callable[..., Federation]) -> None:
    rows = make_fed(sizes=[12, 12])
    one = replace(rows, y=torch.where(torch.arange(24) < 12, 0, rows.y))
    table = simulate(one, "mclr", "fedavg", metrics=("auc",), **FAST).clients()
    assert np.isnan(table["auc"][0])
    assert len(table) == 2


def test_save_and_load(trained: Run, digits: Federation, tmp_path: Path) -> None:
    trained.save(tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == {SPEC, TRACE, CHECKPOINT}
    same = load_run(tmp_path / "a")
    equal(same, trained)
    assert same.label == trained.label
    assert torch.equal(ravel(same.model), trained.x)
    pd.testing.assert_frame_equal(same.clients(), trained.clients())
    given = load_run(tmp_path / "a", federation=digits)
    pd.testing.assert_frame_equal(given.clients(), trained.clients())
    trained.plot(tmp_path / "curve.png", targets=(0.8,))
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_sweep_tables_and_ranks_its_runs(digits: Federation, tmp_path: Path) -> None:
    grid = [FedSSO(alpha=a, eta=e) for a in (0.001, 0.01) for e in (0.3, 1.0)]
    many = sweep(digits, "mclr", grid, rounds=12, seeds=(0, 1), device="cpu")
    assert len(many) == 8
    assert [run.spec.seed for run in many] == [0] * 4 + [1] * 4
    assert [run.spec.trial for run in many] == list(range(8))
    settings = many.settings()
    assert list(settings) == [
        "fedsso alpha=0.001 eta=0.3",
        "fedsso alpha=0.001",
        "fedsso alpha=0.01 eta=0.3",
        "fedsso alpha=0.01",
    ]
    assert all([run.spec.seed for run in runs] == [0, 1] for runs in settings.values())
    best = many.best(target=0.7)
    mean = {k: np.mean([run.rounds_to(0.7) or np.inf for run in v]) for k, v in settings.items()}
    assert mean[best.label] == min(mean.values())
    final = {k: np.mean([run.final() for run in v]) for k, v in settings.items()}
    assert final[many.best().label] == max(final.values())
    text = many.table([0.5, 0.7])
    assert all(label in text for label in settings)
    frame = many.to_pandas()
    assert len(frame) == 8 * 13
    assert frame.columns[0] == "label"
    assert isinstance(many[1:3], Runs)
    assert len(many[1:3]) == 2
    many.save(tmp_path)
    for a, b in zip(load_runs(tmp_path), many, strict=True):
        equal(a, b)


def test_a_target_that_one_seed_misses_does_not_win(digits: Federation) -> None:
    """Settings are ranked by the mean over seeds; a miss counts as never."""
    quick, slow, failed = (
        simulate(digits, "mclr", FedAvg(alpha=a), rounds=12, device="cpu") for a in (0.1, 0.03, 1e-9)
    )
    failed = replace(failed, spec=replace(failed.spec, short=quick.spec.short))  # "another seed" of the quick setting
    target = 0.845
    assert (quick.rounds_to(target) or 99) < (slow.rounds_to(target) or 99) < 99
    assert failed.rounds_to(target) is None
    assert Runs([quick, slow]).best(target=target).label == quick.label
    assert Runs([quick, failed, slow]).best(target=target).label == slow.label
    with pytest.raises(InputError, match="no runs to choose from"):
        Runs([]).best()


def test_compare_uses_the_same_cohorts_and_batches(fed: Federation) -> None:
    runs = compare(fed, "mclr", ["fedavg", "fedsgd", FedSSO(guard="none")], **FAST, participation=0.6, drop_rate=0.3)
    assert [run.spec.algorithm for run in runs] == ["fedavg", "fedsgd", "fedsso"]
    for run in runs:
        np.testing.assert_array_equal(run.trace["bytes_up"], runs[0].trace["bytes_up"])
    assert runs[0].trace["train_loss"][1] == pytest.approx(runs[2].trace["train_loss"][1], rel=1e-6)
    assert [run.spec.algorithm for run in compare(fed, **FAST)] == ["fedsso", "fedavg", "fedsgd"]


def test_names_and_records_mean_the_same(fed: Federation) -> None:
    equal(simulate(fed, "mclr", "fedavg", **FAST), simulate(fed, "mclr", FedAvg(), **FAST))
    equal(simulate(fed, **FAST), simulate(fed, "mclr", FedSSO(), **FAST))


# --- seeds, lists, starts --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seeds", [(3, 1), range(2), np.arange(2)])
def test_seeds_give_one_run_each(fed: Federation, seeds: Any, tmp_path: Path) -> None:
    runs = simulate(fed, "mlp", "fedavg", seeds=seeds, out=tmp_path, **FAST)
    assert isinstance(runs, Runs)
    assert [run.spec.seed for run in runs] == list(seeds)
    for run in runs:
        alone = simulate(fed, "mlp", "fedavg", seed=run.spec.seed, **FAST)
        equal(
            run,
            replace(alone, trace=replace(alone.trace, columns={**alone.trace.columns, "trial": run.trace["trial"]})),
        )
    assert not torch.equal(runs[0].x, runs[1].x)
    for a, b in zip(load_runs(tmp_path), runs, strict=True):
        equal(a, b)


def test_lists_of_local_steps_and_batch_sizes(fed: Federation) -> None:
    options = {**FAST, "local_steps": [1, 3], "batch_size": (4, None)}
    runs = sweep(fed, "mclr", ["fedavg"], **options)
    assert [run.label for run in runs] == [
        f"fedavg alpha=0.01 local_steps={t} batch_size={b}" for t in (1, 3) for b in (4, None)
    ]
    for run in runs:
        own = {n: run.spec.options[n] for n in ("local_steps", "batch_size")}
        assert torch.equal(run.x, simulate(fed, "mclr", "fedavg", **{**FAST, **own}).x)


def test_a_long_list_is_cut_into_chunks(fed: Federation) -> None:
    grid = [FedAvg(alpha=0.01 * (i + 1)) for i in range(15)]
    runs = sweep(fed, "mclr", grid, **FAST)
    for i in (0, 11, 12, 14):
        alone = simulate(fed, "mclr", grid[i], **FAST)
        torch.testing.assert_close(runs[i].x, alone.x, rtol=1e-5, atol=1e-6)
        assert runs[i].label == alone.label


def test_starts(fed: Federation, tmp_path: Path) -> None:
    def first(model: str | nn.Module, init: Any, **options: Any) -> Tensor:
        run: Run = simulate(
            fed, model, FedAvg(alpha=1e-38, eta=1e-30), **{**FAST, "rounds": 1, "init": init, **options}
        )
        return run.x

    assert not first("mclr", None).any()
    assert not first("mlp", "zero").any()
    assert first("mclr", "default").any()
    assert torch.equal(first("mlp", None), first("mlp", "default"))
    assert not torch.equal(first("mlp", None, seed=0), first("mlp", None, seed=1))
    x = torch.linspace(-1, 1, 15, dtype=torch.float64) / 3
    assert torch.equal(first("mclr", x, dtype="float64"), x)
    module = nn.Linear(4, 3)
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    for path in (tmp_path / "weights.safetensors", str(tmp_path / "weights.safetensors")):
        assert torch.equal(first(nn.Linear(4, 3), path), ravel(module))
    earlier = simulate(fed, "mclr", "fedavg", out=tmp_path / "run", **FAST)
    assert torch.equal(first("mclr", tmp_path / "run" / CHECKPOINT), earlier.x)


def test_dtypes(fed: Federation) -> None:
    for dtype in ("float32", torch.float32, "float64", torch.float64):
        run = simulate(fed, "mlp", "fedsso", dtype=dtype, **FAST)
        assert str(run.x.dtype).endswith(str(dtype).removeprefix("torch."))
        assert next(run.model.parameters()).dtype == run.x.dtype
    assert run.trace["bytes_up"][1] == 5 * 8 * run.x.numel()


# --- own modules, losses, metrics, data -------------------------------------------------------------------------------
class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.silu(self.a(x)))
        return out


def test_own_module_loss_and_metric(fed: Federation, tmp_path: Path) -> None:
    def smooth(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, reduction="none", label_smoothing=0.1)

    def top2(z: Tensor, y: Tensor) -> float:
        return float((z.topk(2, 1).indices == y[:, None]).any(1).double().mean())

    options = {**FAST, "loss": smooth, "metrics": (top2, "f1")}
    torch.manual_seed(0)
    module = Own()
    run = simulate(fed, module, FedSSO(alpha=0.05), out=tmp_path / "run", **options)
    assert isinstance(run.model, Own)
    z, y = run.model(fed.x[fed.test_rows].float()).detach(), fed.y[fed.test_rows]
    assert run.final("test_top2") == pytest.approx(top2(z, y))
    assert run.final("test_loss") == pytest.approx(float(smooth(z, y).mean()), rel=1e-6)
    assert run.final("test_accuracy") <= run.final("test_top2")
    assert list(run.clients().columns[3:]) == ["loss", "accuracy", "top2", "f1"]
    back = load_run(tmp_path / "run")
    equal(back, run)
    with pytest.raises(InputError, match="module of your own: give it to load_run"):
        _ = back.model
    with pytest.raises(InputError, match="module of your own"):
        resume_again(tmp_path / "run")
    with pytest.raises(InputError, match="used loss of your own: it can be resumed only by calling simulate again"):
        resume_again(tmp_path / "run", federation=fed, model=module)


def resume_again(folder: Path, **given: Any) -> Runs:
    """Forget that a run is finished, then resume it."""
    (folder / CHECKPOINT).unlink()
    try:
        return resume(folder, **given)
    finally:
        (folder / CHECKPOINT).touch()


def test_a_run_with_an_own_metric_says_so_when_it_is_resumed(fed: Federation, tmp_path: Path) -> None:
    def largest(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        return float(z.max())

    simulate(fed, "mclr", "fedavg", out=tmp_path, metrics=(largest,), **FAST)
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(InputError, match="used metrics of your own"):
        resume(tmp_path, federation=fed)


def test_federations_from_arrays_and_clients_agree() -> None:
    draw = np.random.default_rng(0)
    x, y, owner = draw.normal(size=(40, 3)), draw.integers(0, 2, 40), draw.integers(0, 4, 40)
    by_rows = Federation.from_arrays(x, y, owner)
    by_client = Federation.from_clients([(x[owner == i], y[owner == i]) for i in range(4)])
    a, b = (simulate(f, "mclr", "fedsso", dtype="float64", **FAST) for f in (by_rows, by_client))
    assert torch.equal(a.x, b.x)
    assert a.clients()["client"].tolist() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("kind", "loss"), [("quadratic", None), ("logistic", "bce")])
def test_synthetic_problems_are_solved(kind: str, loss: str | None) -> None:
    fed = load("synthetic", kind=kind, clients=4, dim=5)
    options: dict[str, Any] = {"batch_size": None, "local_steps": 1, "dtype": "float64", "device": "cpu", "loss": loss}
    run = simulate(fed, "linear", FedSSO(alpha=0.1), rounds=60, **options)
    assert fed.optimum is not None
    torch.testing.assert_close(run.x, fed.optimum, rtol=1e-6, atol=1e-8)
    assert np.isnan(run.trace["test_accuracy"]).all() == (kind == "quadratic")


def test_two_classes_as_one_output() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 3))
    y = (x[:, 0] > 0).astype(int)
    fed = Federation.from_arrays(x, y, np.arange(60) % 3)
    one = simulate(fed, "mclr", FedAvg(alpha=0.5), loss="bce", **{**FAST, "rounds": 30})
    assert one.x.numel() == 4
    assert one.final() > 0.85
    two = simulate(fed, "mclr", FedAvg(alpha=0.5), **{**FAST, "rounds": 30})
    assert two.x.numel() == 8


# --- folders, checkpoints, resuming -----------------------------------------------------------------------------------
class Stop(Exception):
    pass


def stop_after(k: int) -> Callable[..., None]:
    def progress(label: str, round_: int, rounds: int, numbers: dict[str, float]) -> None:  # noqa: ARG001
        if round_ == k:
            raise Stop

    return progress


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("kill", [Stop, KeyboardInterrupt])
def test_a_killed_run_goes_on_bit_for_bit(
    digits: Federation, tmp_path: Path, k: int, kill: type[BaseException]
) -> None:
    options: dict[str, Any] = {"rounds": 10, "participation": 0.6, "stragglers": 0.3, "device": "cpu"}
    whole = simulate(digits, "mclr", FedSSO(alpha=0.01, R=6), **options)

    def progress(label: str, round_: int, rounds: int, numbers: dict[str, float]) -> None:  # noqa: ARG001
        if round_ == k:
            raise kill

    with pytest.raises(kill):
        simulate(
            digits,
            "mclr",
            FedSSO(alpha=0.01, R=6),
            out=tmp_path / "a",
            checkpoint_every=2,
            progress=progress,
            **options,
        )
    if (tmp_path / "a" / CHECKPOINT).exists():
        with pytest.raises(InputError, match="not finished; `fedsso resume"):
            load_run(tmp_path / "a")
    again = resume(tmp_path / "a")
    assert len(again) == 1
    equal(again[0], whole)
    equal(load_run(tmp_path / "a"), whole)
    equal(resume(tmp_path / "a")[0], whole)


def test_ctrl_c_in_an_evaluation_leaves_a_checkpoint_that_works(fed: Federation, tmp_path: Path) -> None:
    calls = []

    def f1(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return 0.0

    options = {**FAST, "rounds": 8, "metrics": (f1,)}
    with pytest.raises(KeyboardInterrupt):
        simulate(fed, "mclr", "fedsso", out=tmp_path / "a", **options)
    runs = sweep_into(fed, tmp_path / "a", options)
    assert torch.equal(runs.x, simulate(fed, "mclr", "fedsso", **options).x)
    assert len(runs.trace) == 9


def sweep_into(fed: Federation, folder: Path, options: dict[str, Any]) -> Run:
    """Go on with a single run from Python: a sweep of one accepts a folder that is not finished."""
    shutil.copytree(folder, folder.parent / "sweep" / "0000-fedsso_alpha=0.01_seed=0")
    return sweep(fed, "mclr", ["fedsso"], out=folder.parent / "sweep", **options)[0]


def test_own_data_is_given_again_to_resume(fed: Federation, quad: Federation, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        simulate(fed, "mclr", "fedsso", out=tmp_path, checkpoint_every=1, progress=stop_after(2), **FAST)
    with pytest.raises(InputError, match="arrays of your own: give the federation"):
        resume(tmp_path)
    with pytest.raises(InputError, match="not the one of the run: their digests differ"):
        resume(tmp_path, federation=quad)
    equal(resume(tmp_path, federation=fed)[0], simulate(fed, "mclr", "fedsso", **FAST))


def test_a_sweep_goes_on_where_it_was(fed: Federation, tmp_path: Path) -> None:
    grid = [FedSSO(alpha=a) for a in (0.01, 0.02, 0.05)]
    seen: list[str] = []

    def progress(label: str, round_: int, rounds: int, numbers: dict[str, float]) -> None:  # noqa: ARG001
        seen.append(label)

    first = sweep(fed, "mclr", grid, out=tmp_path, progress=progress, **FAST)
    assert seen == ["fedsso, 3 trials"] * 3
    seen.clear()
    again = sweep(fed, "mclr", grid, out=tmp_path, progress=progress, **FAST)
    assert seen == []
    for a, b in zip(again, first, strict=True):
        equal(a, b)
    (sorted(tmp_path.iterdir())[1] / CHECKPOINT).unlink()
    third = sweep(fed, "mclr", grid, out=tmp_path, progress=progress, **FAST)
    assert seen == ["fedsso alpha=0.02"] * 3
    assert torch.equal(third[0].x, first[0].x)
    torch.testing.assert_close(third[1].x, first[1].x, rtol=1e-4, atol=1e-6)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        f"000{i}-fedsso_alpha={a}_seed=0" for i, a in enumerate((0.01, 0.02, 0.05))
    ]


def test_a_killed_sweep_knows_what_is_left(fed: Federation, tmp_path: Path) -> None:
    records = [FedSSO(alpha=0.05), FedAvg(alpha=0.05)]
    with pytest.raises(Stop):
        sweep(fed, "mclr", records, out=tmp_path, progress=stop_after(2), **FAST)
    assert len(list(tmp_path.glob(f"*/{SPEC}"))) == 2
    runs = resume(tmp_path, federation=fed)
    for run, record in zip(runs, records, strict=True):
        assert torch.equal(run.x, simulate(fed, "mclr", record, **FAST).x)


def test_folders_are_not_overwritten(fed: Federation, tmp_path: Path) -> None:
    simulate(fed, "mclr", "fedavg", out=tmp_path / "a", **FAST)
    with pytest.raises(InputError, match=r"a holds a run already; `fedsso resume` completes it, or choose another"):
        simulate(fed, "mclr", "fedavg", out=tmp_path / "a", **FAST)
    sweep(fed, "mclr", ["fedavg"], out=tmp_path / "s", **FAST)
    for change in ({"local_steps": 3}, {"rounds": 5}, {"seed": 0, "dtype": "float64"}):
        with pytest.raises(InputError, match="holds a run already"):
            sweep(fed, "mclr", ["fedavg"], out=tmp_path / "s", **{**FAST, **change})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file"):
        simulate(fed, "mclr", "fedavg", out=tmp_path / "file" / "x", **FAST)


def test_damaged_and_foreign_folders(fed: Federation, tmp_path: Path) -> None:
    run = simulate(fed, "mclr", "fedavg", out=tmp_path / "a", **FAST)
    other = simulate(fed, "mclr", "fedsso", out=tmp_path / "b", **FAST)
    assert run.spec.identity != other.spec.identity
    shutil.copy(tmp_path / "b" / CHECKPOINT, tmp_path / "a" / CHECKPOINT)
    with pytest.raises(InputError, match="belongs to other settings"):
        load_run(tmp_path / "a")
    data = (tmp_path / "b" / CHECKPOINT).read_bytes()
    (tmp_path / "b" / CHECKPOINT).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"not a whole checkpoint .*delete it to start the run again"):
        load_run(tmp_path / "b")
    with pytest.raises(InputError, match="holds no run"):
        load_runs(tmp_path / "a" / "nothing")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / SPEC).write_text("model = 'mclr'\n")
    with pytest.raises(InputError, match=r"spec\.toml is not one of a run"):
        load_run(tmp_path / "c")


def test_schedules_and_none_survive_the_folder(fed: Federation, tmp_path: Path) -> None:
    algorithm = FedSSO(alpha=Decay(0.5, 2.0), eta=Decay(1.0, 0.0, 0.5), R=None, form="dfp", lam=1e-3)
    options = {**FAST, "batch_size": None, "stop_at": 0.99, "eval_every": 2, "metrics": ("auc",)}
    run = simulate(fed, "mclr", algorithm, out=tmp_path / "a", **options)
    back = load_run(tmp_path / "a")
    equal(back, run)
    assert back.spec.record == algorithm
    assert dict(back.spec.options) == dict(run.spec.options)
    assert back.label == run.label == "fedsso alpha=decay(0.5,2,1) eta=decay(1,0,0.5) lam=0.001 form=dfp"


def test_a_diverged_run_survives_the_folder(fed: Federation, tmp_path: Path) -> None:
    run = simulate(fed, "mlp", FedAvg(alpha=1e6), out=tmp_path / "a", **{**FAST, "rounds": 6})
    assert run.diverged is not None
    assert load_run(tmp_path / "a").diverged == run.diverged
    assert run.final() == 0.0
    assert np.isnan(run.final("test_loss"))
    assert run.last_below(0.1) is None


# --- progress --------------------------------------------------------------------------------------------------------
def test_progress(fed: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, int, int, dict[str, float]]] = []
    run = simulate(fed, "mclr", FedAvg(), progress=lambda *call: calls.append(call), **{**FAST, "eval_every": 2})
    assert [(label, k, n) for label, k, n, _ in calls] == [("fedavg alpha=0.01", k, 3) for k in (1, 2, 3)]
    assert calls[0][3] == {}
    assert calls[2][3] == {"test_accuracy": run.final()}
    simulate(fed, "mclr", FedAvg(), progress=True, **FAST)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "fedavg alpha=0.01: round 3/3  test_accuracy" in shown.err
    assert shown.err.endswith("\n")


# --- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": 5}, r"unknown option 'round'; did you mean 'rounds'\?"),
        ({"rounds": 0}, r"rounds must be an integer >= 1, got rounds=0"),
        ({"rounds": 2.5}, r"rounds must be an integer >= 1, got rounds=2.5"),
        ({"eval_every": 0}, r"eval_every must be an integer >= 1, got eval_every=0"),
        ({"stop_at": 90}, r"stop_at is an accuracy in \(0, 1\], got stop_at=90"),
        ({"dtype": "float16"}, r"unknown dtype 'float16'; did you mean 'float64'\?|unknown dtype 'float16'"),
        ({"device": "gpu"}, r"unknown device 'gpu'; use 'auto', 'cpu' or 'cuda'"),
        ({"device": "meta"}, r"device 'meta' is not supported; use 'auto', 'cpu' or 'cuda'"),
        ({"engine": "fast"}, r"unknown engine 'fast'"),
        ({"loss": "hinge"}, r"unknown loss 'hinge'\. Known: bce, cross_entropy, mse\."),
        ({"loss": "bce"}, r"'bce' needs targets 0 and 1, this federation has 3 classes; use 'cross_entropy'"),
        ({"seed": 1.5}, r"seed must be an integer, got seed=1.5"),
        ({"algorithm": FedAvg}, r"an algorithm is a name or a record such as FedAvg\(alpha=0.01\), got <class"),
        ({"model": nn.Linear(5, 3)}, r"the model does not take samples of shape \(4,\)"),
        ({"model": nn.Sequential(nn.Linear(5, 3), nn.GELU())}, r"the model does not take samples of shape \(4,\)"),
        ({"model": nn.Linear(4, 2)}, r"the model has 2 outputs for 3 classes; give it one per class"),
        ({"metrics": ("acuracy",)}, r"unknown metric 'acuracy'; did you mean 'accuracy'\?"),
        ({"local_steps": [1, 2]}, r"local_steps must be an integer >= 1, got local_steps=\[1, 2\]"),
        ({"participation": 2}, r"participation must lie in \(0, 1\], got participation=2"),
        ({"init": torch.zeros(3)}, r"init has 3 numbers, the model has d = 15 parameters"),
        ({"init": torch.full((15,), torch.nan)}, r"init holds complex, NaN or infinite numbers"),
        ({"init": "no/such.safetensors"}, r"init='no/such.safetensors' is neither 'zero', 'default' nor"),
        ({"algorithm": "fedsso2"}, r"unknown algorithm 'fedsso2'; did you mean 'fedsso'\?"),
        ({"model": "mclr2"}, r"unknown model 'mclr2'; did you mean 'mclr'\?"),
        ({"checkpoint_every": 0}, r"checkpoint_every must be an integer >= 1, got checkpoint_every=0"),
    ],
)
def test_wrong_input_names_value_bound_and_remedy(fed: Federation, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(fed, **{**FAST, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(fed: Federation) -> None:
    with pytest.raises(InputError, match="torch sees no GPU; use device='cpu'"):
        simulate(fed, **{**FAST, "device": "cuda"})
    assert simulate(fed, **{**FAST, "device": "auto"}).x.device.type == "cpu"


def test_other_wrong_calls(fed: Federation, quad: Federation) -> None:
    with pytest.raises(InputError, match="at least one algorithm, got an empty list"):
        sweep(fed, "mclr", [])
    with pytest.raises(InputError, match=r"seeds must be different and at least one, got \(1, 1\)"):
        simulate(fed, seeds=(1, 1), **FAST)
    with pytest.raises(InputError, match=r"seeds must be different and at least one, got \(\)"):
        simulate(fed, seeds=(), **FAST)
    with pytest.raises(InputError, match="'cross_entropy' needs class labels, this federation has real targets"):
        simulate(quad, "linear", loss="cross_entropy", **FAST)
    with pytest.raises(InputError, match="unknown column 'test_acc'"):
        simulate(fed, **FAST).final("test_acc")


def test_public_names() -> None:
    assert all(hasattr(fedsso, name) for name in fedsso.__all__)
    assert sorted(fedsso.__all__) == list(fedsso.__all__)
    assert {FedAvg, FedSGD, FedSSO} <= {getattr(fedsso, name) for name in fedsso.__all__}
    assert fedsso.build_model("mclr", load("synthetic", clients=2, dim=3)) is not None
