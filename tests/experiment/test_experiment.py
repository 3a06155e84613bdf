"""What users call: simulate, sweep, compare, resume, Run, Results, and the folders they write."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    Results,
    Run,
    Simulation,
    compare,
    load,
    load_run,
    load_runs,
    resume,
    simulate,
    sweep,
)
from fedsso.experiment.spec import CHECKPOINT, SPEC, TRACE
from fedsso.experiment.trace import COLUMNS
from fedsso.objective import ravel

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


# --- the tour of the README
# ------------------------------------------------------------------------------------------
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
    assert trained.rounds_to(1.0) is trained.last_below(1.0) is trained.bytes_to(1.0) is None
    assert trained.label == "fedsso alpha=0.01"
    assert trained.diverged is None
    assert list(trained.to_pandas().columns)[: len(COLUMNS)] == list(COLUMNS)
    assert repr(Results([trained])) == "Results(1 runs, 1 settings of fedsso)"
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
    many = compare(digits, "mclr", grid, rounds=12, seeds=(0, 1), device="cpu")
    assert len(many) == 8
    assert [run.spec.seed for run in many] == [0] * 4 + [1] * 4
    assert [run.spec.trial for run in many] == list(range(8))
    settings = {setting.label: setting for setting in many.settings()}
    assert list(settings) == [
        "fedsso alpha=0.001 eta=0.3",
        "fedsso alpha=0.001",
        "fedsso alpha=0.01 eta=0.3",
        "fedsso alpha=0.01",
    ]
    assert all(setting.seeds == (0, 1) for setting in settings.values())
    best = many.best(target=0.7)
    mean = {
        k: np.mean([run.rounds_to(0.7) or np.inf for run in v.runs]) for k, v in settings.items()
    }
    assert mean[best.label] == min(mean.values())
    final = {k: np.mean([run.final(last=3) for run in v.runs]) for k, v in settings.items()}
    assert final[many.best().label] == max(final.values())  # 13 evaluations: the last quarter
    assert many.best().record in grid
    text = many.table([0.5, 0.7])
    assert all(label in text for label in settings)
    frame = many.to_pandas()
    assert len(frame) == 8 * 13
    assert frame.columns[0] == "label"
    assert isinstance(many[1:3], Results)
    assert len(many[1:3]) == 2
    many.save(tmp_path)
    for a, b in zip(load_runs(tmp_path), many, strict=True):
        equal(a, b)


def test_a_target_that_one_seed_misses_does_not_win(digits: Federation) -> None:
    """Settings are ranked by the mean over seeds; a miss counts as never."""
    quick, slow, failed = (
        simulate(digits, "mclr", FedAvg(alpha=a), rounds=12, device="cpu")
        for a in (0.1, 0.03, 1e-9)
    )
    other = replace(quick.spec, options={**quick.spec.options, "seed": 1})
    failed = replace(failed, spec=other)  # another seed of the quick setting
    target = 0.845
    assert (quick.rounds_to(target) or 99) < (slow.rounds_to(target) or 99) < 99
    assert failed.rounds_to(target) is None
    assert Results([quick, slow]).best(target=target).label == quick.label
    assert Results([quick, failed, slow]).best(target=target).label == slow.label
    with pytest.raises(InputError, match="no runs to choose from"):
        Results([]).best()


def test_settings_that_differ_in_the_seventh_digit_are_two(fed: Federation, tmp_path: Path) -> None:
    runs = compare(
        fed, "mclr", [FedAvg(alpha=a) for a in (0.1234567, 0.1234568)], out=tmp_path, **FAST
    )
    labels = [setting.label for setting in runs.settings()]
    assert labels == ["fedavg alpha=0.1234567", "fedavg alpha=0.1234568"]
    for twice in (["fedavg", FedAvg()], [FedAvg(alpha=1), FedAvg(alpha=1.0)]):
        with pytest.raises(InputError, match="same settings was given twice; give several seeds"):
            compare(fed, "mclr", twice, **FAST)


def test_the_best_of_losses_is_the_smallest(quad: Federation, fed: Federation) -> None:
    grid = [FedAvg(alpha=a) for a in (0.001, 0.3, 0.01)]
    for runs in (compare(quad, "linear", grid, **FAST), compare(fed, "mclr", grid, **FAST)):
        losses = [run.final("test_loss") for run in runs]
        assert int(np.argmin(losses)) == 1
        assert runs.best(metric="test_loss").runs == (runs[1],)
        with pytest.raises(InputError, match=r"a target is reached from below: .* not test_loss"):
            runs.best(target=0.5, metric="test_loss")
    reals = compare(quad, "linear", grid, **FAST)
    assert reals.best().runs == (reals[1],)
    with pytest.raises(InputError, match="not test_loss"):
        reals.best(target=0.5)


def test_compare_uses_the_same_cohorts_and_batches(fed: Federation) -> None:
    runs = compare(
        fed,
        "mclr",
        ["fedavg", "fedsgd", FedSSO(alpha=0.01, guard="none")],
        **FAST,
        participation=0.6,
        drop_rate=0.3,
    )
    assert [run.spec.algorithm for run in runs] == ["fedavg", "fedsgd", "fedsso"]
    for run in runs:
        np.testing.assert_array_equal(run.trace["bytes_up"], runs[0].trace["bytes_up"])
    assert runs[0].trace["train_loss"][1] == pytest.approx(runs[2].trace["train_loss"][1], rel=1e-6)
    assert [run.spec.algorithm for run in compare(fed, **FAST)] == ["fedsso", "fedavg", "fedsgd"]


def test_names_and_records_mean_the_same(fed: Federation) -> None:
    equal(simulate(fed, "mclr", "fedavg", **FAST), simulate(fed, "mclr", FedAvg(), **FAST))
    equal(simulate(fed, **FAST), simulate(fed, "mclr", FedSSO(), **FAST))


# --- seeds, lists, starts
# --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seeds", [(3, 1), range(2), np.arange(2)])
def test_seeds_give_one_run_each(fed: Federation, seeds: Any, tmp_path: Path) -> None:
    runs = compare(fed, "mlp", ["fedavg"], seeds=seeds, out=tmp_path, **FAST)
    assert isinstance(runs, Results)
    assert [run.spec.seed for run in runs] == list(seeds)
    for run in runs:
        alone = simulate(fed, "mlp", "fedavg", seed=run.spec.seed, **FAST)
        equal(
            run,
            replace(
                alone,
                trace=replace(
                    alone.trace, columns={**alone.trace.columns, "trial": run.trace["trial"]}
                ),
            ),
        )
    assert not torch.equal(runs[0].x, runs[1].x)
    for a, b in zip(load_runs(tmp_path), runs, strict=True):
        equal(a, b)


def test_lists_of_local_steps_and_batch_sizes(fed: Federation) -> None:
    options = {**FAST, "local_steps": [1, 3], "batch_size": (4, None)}
    runs = compare(fed, "mclr", ["fedavg"], **options)
    assert [run.label for run in runs] == [
        f"fedavg alpha=0.01 local_steps={t} batch_size={b}" for t in (1, 3) for b in (4, None)
    ]
    for run in runs:
        own = {n: run.spec.options[n] for n in ("local_steps", "batch_size")}
        assert torch.equal(run.x, simulate(fed, "mclr", "fedavg", **{**FAST, **own}).x)


def test_a_long_list_is_cut_into_chunks(fed: Federation) -> None:
    grid = [FedAvg(alpha=0.01 * (i + 1)) for i in range(15)]
    runs = compare(fed, "mclr", grid, **FAST)
    for i in (0, 11, 12, 14):
        alone = simulate(fed, "mclr", grid[i], **FAST)
        torch.testing.assert_close(runs[i].x, alone.x, rtol=1e-5, atol=1e-6)
        assert runs[i].label == alone.label


def test_starts(fed: Federation, tmp_path: Path) -> None:
    def first(model: str | nn.Module, init: Any, **options: Any) -> Tensor:
        run: Run = simulate(
            fed,
            model,
            FedAvg(alpha=1e-38, eta=1e-30),
            **{**FAST, "rounds": 1, "init": init, **options},
        )
        return run.x

    assert not first("mclr", None).any()
    assert not first("mlp", "zero").any()
    assert first("mclr", "default").any()
    assert torch.equal(first("mlp", None), first("mlp", "default"))
    assert not torch.equal(first("mlp", None, seed=0), first("mlp", None, seed=1))
    x = torch.linspace(1, 2, 15, dtype=torch.float64) / 3  # no number that a tiny step could change
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


def test_numbers_of_numpy_are_numbers(fed: Federation, tmp_path: Path) -> None:
    alpha = np.float32(0.1)
    options: dict[str, Any] = {
        **FAST,
        "rounds": np.int64(2),
        "participation": np.float64(0.6),
        "seed": np.int32(-1),
    }
    run = simulate(fed, "mclr", FedAvg(alpha=alpha), out=tmp_path, **options)  # type: ignore[arg-type]
    same = {**FAST, "rounds": 2, "participation": 0.6, "seed": -1}
    equal(run, simulate(fed, "mclr", FedAvg(alpha=float(alpha)), **same))
    equal(load_run(tmp_path), run)
    ones = [simulate(fed, "mclr", FedAvg(alpha=a), **FAST) for a in (1, 1.0)]
    assert ones[0].spec.identity == ones[1].spec.identity
    assert ones[0].label == ones[1].label


def test_other_forms_of_the_same_call(fed: Federation, tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 15)
    run = simulate(
        fed,
        "mclr",
        "fedsso",
        init=x,
        metrics="auc",
        **{**FAST, "device": torch.device("cpu")},
        out=tmp_path,
    )
    assert load_run(tmp_path).spec.options["device"] == "cpu"
    equal(run, simulate(fed, "mclr", "fedsso", init=torch.from_numpy(x), metrics=("auc",), **FAST))
    assert 0 <= run.final("test_auc") <= 1
    assert torch.equal(
        compare(fed, "mclr", "fedsso", **FAST)[0].x, simulate(fed, "mclr", "fedsso", **FAST).x
    )


# --- own modules, losses, metrics, data
# -------------------------------------------------------------------------------
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
    with pytest.raises(InputError, match=r"loss of your own.*same call of fedsso.compare"):
        resume_again(tmp_path / "run", federation=fed, model=module)


def resume_again(folder: Path, **given: Any) -> Results:
    """Forget that a run is finished, then resume it."""
    (folder / CHECKPOINT).unlink()
    try:
        return resume(folder, **given)
    finally:
        (folder / CHECKPOINT).touch()


def test_a_run_with_an_own_metric_says_so_when_it_is_resumed(
    fed: Federation, tmp_path: Path
) -> None:
    def largest(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        return float(z.max())

    simulate(fed, "mclr", "fedavg", out=tmp_path, metrics=(largest,), **FAST)
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(InputError, match=r"used metrics of your own.*compare continues.*another"):
        resume(tmp_path, federation=fed)
    # What the message says is true: `simulate` refuses the folder, `compare` goes on in its own.
    with pytest.raises(InputError, match="already holds a run"):
        simulate(fed, "mclr", "fedavg", out=tmp_path, metrics=(largest,), **FAST)
    for _ in range(2):
        (run,) = compare(fed, "mclr", ["fedavg"], out=tmp_path / "c", metrics=(largest,), **FAST)
        assert len(run.trace) == FAST["rounds"] + 1
        next((tmp_path / "c").glob(f"*/{CHECKPOINT}")).unlink()


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
    options: dict[str, Any] = {
        "batch_size": None,
        "local_steps": 1,
        "dtype": "float64",
        "device": "cpu",
        "loss": loss,
    }
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


# --- folders, checkpoints, resuming
# -----------------------------------------------------------------------------------
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
    options: dict[str, Any] = {
        "rounds": 10,
        "participation": 0.6,
        "stragglers": 0.3,
        "device": "cpu",
    }
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


def test_ctrl_c_in_an_evaluation_leaves_a_checkpoint_that_works(
    fed: Federation, tmp_path: Path
) -> None:
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
    return compare(fed, "mclr", ["fedsso"], out=folder.parent / "sweep", **options)[0]


def test_own_data_is_given_again_to_resume(
    fed: Federation, quad: Federation, tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        simulate(
            fed, "mclr", "fedsso", out=tmp_path, checkpoint_every=1, progress=stop_after(2), **FAST
        )
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

    first = compare(fed, "mclr", grid, out=tmp_path, progress=progress, **FAST)
    assert seen == ["fedsso, seed 0, 3 trials"] * 3
    seen.clear()
    again = compare(fed, "mclr", grid, out=tmp_path, progress=progress, **FAST)
    assert seen == []
    for a, b in zip(again, first, strict=True):
        equal(a, b)
    (sorted(tmp_path.iterdir())[1] / CHECKPOINT).unlink()
    third = compare(fed, "mclr", grid, out=tmp_path, progress=progress, **FAST)
    assert seen == ["fedsso, seed 0, 3 trials"] * 3  # in the batch in which it began: the same bits
    for a, b in zip(third, first, strict=True):
        equal(a, b)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        f"000{i}-fedsso_alpha={a}_seed=0" for i, a in enumerate((0.01, 0.02, 0.05))
    ]


def test_a_killed_sweep_knows_what_is_left(fed: Federation, tmp_path: Path) -> None:
    records = [FedSSO(alpha=0.05), FedAvg(alpha=0.05)]
    with pytest.raises(Stop):
        compare(fed, "mclr", records, out=tmp_path, progress=stop_after(2), **FAST)
    assert len(list(tmp_path.glob(f"*/{SPEC}"))) == 2
    runs = resume(tmp_path, federation=fed)
    for run, record in zip(runs, records, strict=True):
        assert torch.equal(run.x, simulate(fed, "mclr", record, **FAST).x)


@pytest.mark.parametrize("name", [TRACE, CHECKPOINT])
def test_files_of_others_are_not_overwritten(fed: Federation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody else's")
    with pytest.raises(InputError, match=f"{name} already exists"):
        simulate(fed, "mclr", "fedavg", out=tmp_path, **FAST)
    assert files(tmp_path) == {name: b"somebody else's"}


def test_folders_are_not_overwritten(fed: Federation, tmp_path: Path) -> None:
    simulate(fed, "mclr", "fedavg", out=tmp_path / "a", **FAST)
    with pytest.raises(InputError, match=r"a already holds a run; choose another folder"):
        simulate(fed, "mclr", "fedavg", out=tmp_path / "a", **FAST)
    compare(fed, "mclr", ["fedavg"], out=tmp_path / "s", **FAST)
    for change in ({"local_steps": 3}, {"rounds": 5}, {"seed": 0, "dtype": "float64"}):
        with pytest.raises(InputError, match="already holds a run"):
            compare(fed, "mclr", ["fedavg"], out=tmp_path / "s", **{**FAST, **change})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file"):
        simulate(fed, "mclr", "fedavg", out=tmp_path / "file" / "x", **FAST)


def plain(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: factor * plain(z, y)


def two_layers(
    activation: type[nn.Module] = nn.ReLU, frozen: str = "", offset: float = 0.0
) -> nn.Module:
    """Always the same weights, but for an offset in the bias of the first layer."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(4, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 3)
    )
    module.get_parameter("0.bias").data.add_(offset)
    if frozen:
        module.get_submodule(frozen).requires_grad_(False)
    return module


class Bent(Own):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x)))
        return out


Bent.__name__ = Bent.__qualname__ = "Own"


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "code of a loss": (
        {"loss": lambda z, y: plain(z, y)},
        {"loss": lambda z, y: 100 * plain(z, y)},
    ),
    "closure of a loss": ({"loss": scaled(1.0)}, {"loss": scaled(100.0)}),
    "arguments of a loss": (
        {"loss": partial(F.cross_entropy, reduction="none")},
        {"loss": partial(F.cross_entropy, reduction="none", label_smoothing=0.1)},
    ),
    "settings of a loss": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)},
    ),
    "code of a metric": ({"metrics": [lambda z, y: 0.0]}, {"metrics": [lambda z, y: 1.0]}),  # noqa: ARG005
    "activation": ({"model": two_layers(nn.ReLU)}, {"model": two_layers(nn.Tanh)}),
    "values of a frozen layer": (
        {"model": two_layers(frozen="0")},
        {"model": two_layers(frozen="0", offset=0.1)},
    ),
    "frozen layer": ({"model": two_layers(frozen="0")}, {"model": two_layers(frozen="2")}),
    "code of a module": ({"model": seeded(Own)}, {"model": seeded(Bent)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sweep_is_done_only_if_nothing_of_it_has_changed(
    fed: Federation, tmp_path: Path, name: str
) -> None:
    first, second = CHANGES[name]
    done = compare(fed, algorithms="fedavg", out=tmp_path, **{**FAST, **first})
    with pytest.raises(InputError, match="already holds a run"):
        compare(fed, algorithms="fedavg", out=tmp_path, **{**FAST, **second})
    equal(compare(fed, algorithms="fedavg", out=tmp_path, **{**FAST, **first})[0], done[0])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def never(*_: object) -> None:
    raise AssertionError("a round was run")


def killed_at_once(
    fed: Federation, folder: Path, model: str | nn.Module = "mclr", **options: Any
) -> None:
    """A run killed before its first checkpoint."""
    with pytest.raises(Stop):
        simulate(fed, model, "fedavg", out=folder, progress=stop_after(1), **{**FAST, **options})
    assert set(files(folder)) == {SPEC}


def write_unsealed(path: Path, text: str) -> None:
    """A spec as earlier versions wrote it, without a seal: whoever edits it must do without the
    checksum's help."""
    path.write_text(re.sub(r"# fedsso-sha256:.*\n", "", text))


def test_a_run_from_before_there_was_a_memory_is_read_as_one_without(
    fed: Federation, tmp_path: Path
) -> None:
    run = simulate(fed, "mclr", FedSSO(memory="none"), out=tmp_path / "old", **FAST)
    path = tmp_path / "old" / SPEC
    write_unsealed(path, path.read_text().replace('\nmemory = "none"\n', "\n"))
    old = load_run(tmp_path / "old")
    assert old.spec.record == FedSSO(memory="none")
    equal(old, run)


def test_a_network_from_before_there_was_a_metric_goes_on_without(
    fed: Federation, tmp_path: Path
) -> None:
    record = FedSSO(shapes="none")
    with pytest.raises(Stop):
        simulate(fed, "mlp", record, out=tmp_path / "old", progress=stop_after(1), **FAST)
    path = tmp_path / "old" / SPEC
    write_unsealed(path, path.read_text().replace('\nshapes = "none"\n', "\n"))
    assert "shapes" not in path.read_text()
    resume(tmp_path / "old", federation=fed)
    assert load_run(tmp_path / "old").spec.record == record
    assert record != FedSSO()


def test_a_memory_of_clients_that_does_not_fit_names_the_remedy(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsso.experiment.plan._memory", lambda _: 1000)
    with pytest.raises(InputError, match=r"keeps .* GB .*: use memory='none', a smaller model"):
        simulate(fed, "mclr", FedSSO(memory="clients"), **FAST)


def test_resume_with_another_start_is_refused(fed: Federation, tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    save_file({"1.weight": torch.zeros(3, 4), "1.bias": torch.zeros(3)}, weights)
    killed_at_once(fed, tmp_path / "file", init=weights)
    killed_at_once(fed, tmp_path / "own", nn.Linear(4, 3))
    save_file({"1.weight": torch.ones(3, 4), "1.bias": torch.zeros(3)}, weights)
    for folder, model in (("file", None), ("own", nn.Linear(4, 3))):
        with pytest.raises(InputError, match="the initial model is not the one of the run"):
            resume(tmp_path / folder, federation=fed, model=model, progress=never)
        assert set(files(tmp_path / folder)) == {SPEC}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('start = "0000"', "the initial model is not the one of the run"),
        ('model = "linear"', "the initial model is not the one of the run"),
        ('rounds = "x"', "rounds.*integer >= 1.*rounds='x'"),
        ("rounds = -3", "rounds.*integer >= 1.*rounds=-3"),
        ("eval_every = 0", "eval_every.*integer >= 1.*eval_every=0"),
        ('dtype = "float8"', "unknown dtype 'float8'"),
        ('participation = "a"', "participation.*a number.*participation='a'"),
        ('trial = "q"', "trial.*integer >= 0.*trial='q'"),
    ],
)
def test_an_edited_spec_is_refused(
    fed: Federation, tmp_path: Path, line: str, message: str
) -> None:
    killed_at_once(fed, tmp_path)
    key = line.partition(" ")[0]
    text, edits = re.subn(rf"(?m)^{key} = .*$", line, (tmp_path / SPEC).read_text())
    assert edits == 1
    (tmp_path / SPEC).write_text(text)
    with pytest.raises(InputError, match=r"spec\.toml is not as fedsso wrote it"):
        resume(tmp_path, federation=fed, progress=never)
    write_unsealed(tmp_path / SPEC, text)
    before = files(tmp_path)
    with pytest.raises(InputError, match=message):
        resume(tmp_path, federation=fed, progress=never)
    assert files(tmp_path) == before


def test_a_trace_that_is_not_the_runs_own_is_not_used(
    fed: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(fed, "mclr", FedAvg(alpha=0.1), out=tmp_path / "a", **FAST)
    simulate(fed, "mclr", FedAvg(alpha=0.2), out=tmp_path / "b", **FAST)
    own, other = ((tmp_path / name / TRACE).read_text() for name in "ab")
    shorter = "".join(own.splitlines(keepends=True)[:-1])
    for wrong in (other, shorter):
        (tmp_path / "a" / TRACE).write_text(wrong)
        for read in (load_run, lambda folder: resume(folder)[0]):
            caplog.clear()
            assert read(tmp_path / "a").trace.to_csv() == own
            assert "the copy in the checkpoint is used" in caplog.text


def test_a_run_of_another_version_goes_on_with_a_warning(
    fed: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_at_once(fed, tmp_path)
    spec = tmp_path / SPEC
    write_unsealed(
        spec, spec.read_text().replace(f'version = "{fedsso.__version__}"', 'version = "0.0.7"')
    )
    with caplog.at_level("WARNING", "fedsso"):
        (run,) = resume(tmp_path, federation=fed)
    assert f"this run was begun by fedsso 0.0.7, this is {fedsso.__version__}" in caplog.text
    equal(run, simulate(fed, "mclr", "fedavg", **FAST))


WRONG: dict[str, dict[str, Any]] = {
    "loss": {"loss": F.cross_entropy},
    "engine": {"engine": "fast"},
    "device": {"device": "gpu"},
    "model": {"model": nn.Linear(5, 3)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_leaves_nothing_behind(fed: Federation, tmp_path: Path, name: str) -> None:
    for call in (simulate, compare):
        with pytest.raises(InputError):
            call(fed, out=tmp_path, **{**FAST, **WRONG[name]})
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [simulate, compare])
def test_a_metric_that_raises_can_be_corrected(
    fed: Federation, tmp_path: Path, call: Callable[..., Any]
) -> None:
    def score(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        raise RuntimeError("mine")

    with pytest.raises(InputError, match=r"the metric score failed \(mine\)"):
        call(fed, out=tmp_path, metrics=[score], **FAST)
    assert list(tmp_path.iterdir()) == []
    call(fed, out=tmp_path, **FAST)
    assert len(load_runs(tmp_path)[0].trace) == 4


class Mine(FedAvg):
    """An algorithm that the registry does not know."""


class Disguised(FedAvg):
    """One whose name is taken."""


Disguised.__name__ = "FedAvg"


@pytest.mark.parametrize("record", [Mine(alpha=0.1), Disguised(alpha=0.1)])
def test_an_algorithm_outside_the_registry(fed: Federation, tmp_path: Path, record: FedAvg) -> None:
    assert torch.equal(
        simulate(fed, "mclr", record, **FAST).x, simulate(fed, "mclr", FedAvg(alpha=0.1), **FAST).x
    )
    with pytest.raises(
        InputError, match=r"not registered.*set fedsso\.algorithms\.ALGORITHMS\['.*'\] first"
    ):
        simulate(fed, "mclr", record, out=tmp_path / "run", **FAST)
    assert not (tmp_path / "run").exists()


def test_damaged_and_foreign_folders(fed: Federation, tmp_path: Path) -> None:
    run = simulate(fed, "mclr", "fedavg", out=tmp_path / "a", **FAST)
    other = simulate(fed, "mclr", "fedsso", out=tmp_path / "b", **FAST)
    assert run.spec.identity != other.spec.identity
    shutil.copy(tmp_path / "b" / CHECKPOINT, tmp_path / "a" / CHECKPOINT)
    with pytest.raises(InputError, match="belongs to other settings"):
        load_run(tmp_path / "a")
    data = (tmp_path / "b" / CHECKPOINT).read_bytes()
    (tmp_path / "b" / CHECKPOINT).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"damaged.*`fedsso resume .*b` computes it again"):
        load_run(tmp_path / "b")
    with pytest.raises(InputError, match="holds no run"):
        load_runs(tmp_path / "a" / "nothing")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / SPEC).write_text("model = 'mclr'\n")
    with pytest.raises(InputError, match=r"spec\.toml is not one of a run"):
        load_run(tmp_path / "c")


def test_schedules_and_none_survive_the_folder(fed: Federation, tmp_path: Path) -> None:
    algorithm = FedSSO(
        alpha=Decay(0.5, 2.0), eta=Decay(1.0, 0.0, 0.5), R=None, form="dfp", lam=1e-3
    )
    options = {**FAST, "batch_size": None, "stop_at": 0.99, "eval_every": 2, "metrics": ("auc",)}
    run = simulate(fed, "mclr", algorithm, out=tmp_path / "a", **options)
    back = load_run(tmp_path / "a")
    equal(back, run)
    assert back.spec.record == algorithm
    assert dict(back.spec.options) == dict(run.spec.options)
    assert (
        back.label
        == run.label
        == "fedsso alpha=decay(0.5,2,1) eta=decay(1,0,0.5) lam=0.001 form=dfp"
    )


def test_a_diverged_run_survives_the_folder(fed: Federation, tmp_path: Path) -> None:
    run = simulate(fed, "mlp", FedAvg(alpha=1e6), out=tmp_path / "a", **{**FAST, "rounds": 6})
    assert run.diverged is not None
    assert load_run(tmp_path / "a").diverged == run.diverged
    assert run.final() == 0.0
    assert np.isnan(run.final("test_loss"))
    assert run.last_below(0.1) is None


# --- progress
# --------------------------------------------------------------------------------------------------
def test_progress(fed: Federation, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, int, int, dict[str, float]]] = []
    run = simulate(
        fed,
        "mclr",
        FedAvg(),
        progress=lambda *call: calls.append(call),
        **{**FAST, "eval_every": 2},
    )
    assert [(label, k, n) for label, k, n, _ in calls] == [
        ("fedavg alpha=0.01", k, 3) for k in (1, 2, 3)
    ]
    assert calls[0][3] == {}
    assert calls[2][3] == {"test_accuracy": run.final()}
    simulate(fed, "mclr", FedAvg(), progress=True, **FAST)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "fedavg alpha=0.01: round 3/3  best test accuracy" in shown.err
    assert shown.err.endswith("\n")


def test_whole_float_targets_are_told_to_be_a_regression(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(12, 2)
    for y, told in (
        (torch.arange(12) % 2 * 1.0, 1),
        (torch.rand(12), 0),
        (torch.arange(12) % 2, 0),
    ):
        caplog.clear()
        simulate(Federation.from_arrays(x, y, [0] * 6 + [1] * 6), rounds=1)
        assert len([m for m in caplog.messages if "give integers for classes" in m]) == told


def test_runs_are_shown_in_a_line(fed: Federation) -> None:
    run = simulate(fed, "mclr", FedAvg(), **FAST)
    assert repr(run) == f"Run(fedavg alpha=0.01, seed 0, 3 rounds, accuracy {run.final():.4f})"


# --- errors
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round": 5}, r"unknown option 'round'; did you mean 'rounds'\?"),
        ({"rounds": 0}, r"rounds.*integer >= 1.*rounds=0"),
        ({"rounds": 2.5}, r"rounds.*integer >= 1.*rounds=2.5"),
        ({"eval_every": 0}, r"eval_every.*integer >= 1.*eval_every=0"),
        ({"stop_at": 90}, r"stop_at.*in \(0, 1\].*stop_at=90"),
        (
            {"dtype": "float16"},
            r"unknown dtype 'float16'",
        ),
        ({"device": "gpu"}, r"unknown device 'gpu'; use auto, cpu, cuda or cuda:1"),
        ({"device": "meta"}, r"device 'meta'.*use auto, cpu, cuda or cuda:1"),
        ({"engine": "fast"}, r"unknown engine 'fast'"),
        ({"loss": "hinge"}, r"unknown loss 'hinge'\. Known: bce, cross_entropy, mse\."),
        (
            {"loss": "bce"},
            r"'bce'.*targets 0 and 1.*3 classes.*use 'cross_entropy'",
        ),
        ({"seed": 1.5}, r"seed.*integer.*seed=1.5"),
        (
            {"algorithm": FedAvg},
            r"a name or an object such as FedAvg\(alpha=0.01\).*got <class",
        ),
        ({"model": nn.Linear(5, 3)}, r"the model cannot process samples of shape \(4,\)"),
        (
            {"model": nn.Sequential(nn.Linear(5, 3), nn.GELU())},
            r"the model cannot process samples of shape \(4,\)",
        ),
        (
            {"model": nn.Linear(4, 2)},
            r"2 outputs for 3 classes.*one per class",
        ),
        ({"metrics": ("acuracy",)}, r"unknown metric 'acuracy'; did you mean 'accuracy'\?"),
        ({"local_steps": [1, 2]}, r"local_steps.*integer >= 1.*local_steps=\[1, 2\]"),
        ({"participation": 2}, r"participation.*in \(0, 1\].*participation=2"),
        ({"init": torch.zeros(3)}, r"init has 3 numbers, the model has d = 15 parameters"),
        ({"init": torch.full((15,), torch.nan)}, r"init holds complex, NaN or infinite numbers"),
        (
            {"init": "no/such.safetensors"},
            r"init='no/such.safetensors' is neither 'zero', 'default' nor",
        ),
        ({"algorithm": "fedsso2"}, r"unknown algorithm 'fedsso2'; did you mean 'fedsso'\?"),
        ({"model": "mclr2"}, r"unknown model 'mclr2'; did you mean 'mclr'\?"),
        (
            {"checkpoint_every": 0},
            r"checkpoint_every.*integer >= 1.*checkpoint_every=0",
        ),
        ({"rounds": True}, r"rounds.*integer >= 1.*rounds=True"),
        ({"rounds": "3"}, r"rounds.*integer >= 1.*rounds='3'"),
        ({"rounds": None}, r"rounds.*integer >= 1.*rounds=None"),
        ({"participation": True}, r"participation.*a number.*participation=True"),
        ({"participation": None}, r"participation.*a number.*participation=None"),
        ({"seed": 2**64}, r"seed must fit into 64 bits, got seed=18446744073709551616"),
        ({"seed": None}, r"seed.*integer.*seed=None"),
        ({"local_epochs": 1}, r"local_steps and local_epochs were both given"),
        ({"out": ""}, r"out must name a folder, got out=''"),
        ({"metrics": 3}, r"a metric is a name or a function, got metrics=3"),
    ],
)
def test_wrong_input_names_value_bound_and_remedy(
    fed: Federation, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        simulate(fed, **{**FAST, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(fed: Federation) -> None:
    with pytest.raises(InputError, match="torch sees no GPU; use device='cpu'"):
        simulate(fed, **{**FAST, "device": "cuda"})
    assert simulate(fed, **{**FAST, "device": "auto"}).x.device.type == "cpu"


def test_other_wrong_calls(fed: Federation, quad: Federation) -> None:
    with pytest.raises(InputError, match="at least one algorithm is needed, got an empty list"):
        compare(fed, "mclr", [])
    with pytest.raises(InputError, match=r"seeds must be different and at least one, got \(1, 1\)"):
        compare(fed, seeds=(1, 1), **FAST)
    with pytest.raises(InputError, match=r"seeds must be different and at least one, got \(\)"):
        compare(fed, seeds=(), **FAST)
    for call in (compare, sweep):
        with pytest.raises(InputError, match=r"seed=3 and seeds were both.*seeds=\[\.\.\.\]"):
            call(fed, "mclr", ["fedavg"], seed=3, seeds=[0, 1], **FAST)
    with pytest.raises(InputError, match=r"'cross_entropy'.*class labels.*real targets"):
        simulate(quad, "linear", loss="cross_entropy", **FAST)
    with pytest.raises(InputError, match="local_steps must list at least one value each"):
        compare(fed, **{**FAST, "local_steps": []})
    with pytest.raises(InputError, match="unknown column 'test_acc'"):
        simulate(fed, **FAST).final("test_acc")


def named(name: str) -> Callable[[Tensor, Tensor], float]:
    def score(z: Tensor, y: Tensor) -> float:  # noqa: ARG001
        return 0.0

    score.__name__ = name
    return score


@pytest.mark.parametrize(
    "names", [("score", "score"), ("loss",), ("a,b",), ("a\nb",), ("",), ("accuracy",)]
)
def test_metrics_need_names_of_their_own(fed: Federation, names: tuple[str, ...]) -> None:
    with pytest.raises(
        InputError, match="metrics need different plain names, and none may be 'loss'"
    ):
        simulate(fed, metrics=[named(name) for name in names], **FAST)
    assert simulate(fed, metrics=[named("score")], **FAST).final("test_score") == 0.0


@pytest.mark.parametrize("y", [-0.5, 1.5])
def test_logistic_loss_needs_targets_between_0_and_1(y: float) -> None:
    fed = Federation.from_clients([(np.eye(2), np.array([0.5, y]))], test_fraction=0)
    with pytest.raises(
        InputError, match=rf"loss 'bce' needs targets in \[0, 1\], got .*{y:g}.*; use 'mse'"
    ):
        simulate(fed, "linear", loss="bce", **FAST)


@pytest.mark.parametrize("alpha", [True, "0.1", None, 0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [FedAvg, FedSGD, FedSSO])
def test_a_step_size_is_a_positive_number(kind: Callable[..., Any], alpha: Any) -> None:
    with pytest.raises(InputError, match="alpha must be"):
        kind(alpha=alpha)


def test_public_names() -> None:
    assert all(hasattr(fedsso, name) for name in fedsso.__all__)
    assert len(set(fedsso.__all__)) == len(fedsso.__all__)
    assert {FedAvg, FedSGD, FedSSO} <= {getattr(fedsso, name) for name in fedsso.__all__}
    assert fedsso.build_model("mclr", load("synthetic", clients=2, dim=3)) is not None


def test_l2_ends_at_the_regularised_minimiser(quad: Federation) -> None:
    """One local step has no drift: FedSSO ends where the gradient of f(x) + l2/2 |x|^2 is zero."""
    once = {"local_steps": 1, "batch_size": None, "dtype": "float64", "eval_train": True}
    run = simulate(quad, "linear", fedsso.FedSSO(alpha=0.1), rounds=40, l2=0.5, loss="mse", **once)
    x = quad.x[quad.train_rows].double()
    p = quad.p.repeat_interleave(quad.train_sizes) / quad.train_sizes.repeat_interleave(
        quad.train_sizes
    )
    H = 2 * (x * p[:, None]).mT @ x
    optimum = torch.linalg.solve(H + 0.5 * torch.eye(len(H)), H @ quad.optimum)
    torch.testing.assert_close(run.x, optimum, rtol=1e-10, atol=1e-10)
    loss = (p * (x @ optimum - quad.y[quad.train_rows]) ** 2).sum() + 0.25 * optimum @ optimum
    assert run.final("full_train_loss") == pytest.approx(float(loss), rel=1e-10)


@pytest.mark.parametrize("l2", [-1.0, math.inf, math.nan, "x"])
def test_a_wrong_l2_is_refused(fed: Federation, l2: Any) -> None:
    with pytest.raises(InputError, match="l2"):
        simulate(fed, "mclr", rounds=1, l2=l2)


def test_a_run_of_ones_own_module_needs_its_architecture_alone(
    fed: Federation, tmp_path: Path
) -> None:
    """Another process has other initial weights, and perhaps not the data."""

    def net(hidden: int = 5) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)
        )

    run = simulate(fed, net(), rounds=2, batch_size=5)
    run.save(tmp_path)
    back = load_run(tmp_path, model=net())
    rows = torch.randn(6, 4)
    assert torch.equal(back.model(rows), run.model(rows))
    given = load_run(tmp_path, model=net(), federation=fed)
    assert given.clients().equals(run.clients())
    with pytest.raises(InputError, match=r"this model has .* parameters .*, that of the run"):
        load_run(tmp_path, model=net(6))


# ---- round by round ----


def test_a_simulation_by_hand_is_the_run(fed: Federation) -> None:
    run = simulate(fed, "mclr", "fedsso", **FAST)
    stepper = Simulation(fed, "mclr", "fedsso", **FAST)
    rows = list(stepper)
    assert [row["test_accuracy"] for row in rows] == run.trace["test_accuracy"][1:].tolist()
    assert torch.equal(stepper.models()[0], run.x)
    for ours, theirs in zip(stepper.model().parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(InputError, match="rounds are done"):
        stepper.step()


@pytest.mark.parametrize(("name", "here"), [("lr", "alpha"), ("server_lr", "eta"), ("mu", "mu")])
def test_a_hyper_parameter_among_the_options_is_sent_to_its_record(
    fed: Federation, name: str, here: str
) -> None:
    with pytest.raises(InputError, match=rf"{name} belongs to the algorithm.*\({here}=\.\.\.\)"):
        simulate(fed, **{name: 0.1})


def test_names_of_algorithms_are_near_in_any_case(fed: Federation) -> None:
    with pytest.raises(InputError, match="did you mean 'fedsso'"):
        simulate(fed, "mclr", "FedSSO")


def test_a_simulation_that_diverged_is_done_and_says_so(
    digits: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    wild = Simulation(digits, "mlp", FedAvg(alpha=1e6), rounds=20, device="cpu")
    rows = list(wild)
    assert wild.done
    assert wild.k == len(rows) < 20
    assert f"it diverged in round {wild.k}" in caplog.text
    with pytest.raises(InputError, match=rf"it diverged in round {wild.k}.*use a smaller step"):
        wild.step()
    assert len(wild.rows) == len(rows) + 1
    assert list(wild) == []
    pair = [FedAvg(alpha=1e6), FedAvg(alpha=0.01)]
    both = Simulation(digits, "mlp", pair, rounds=wild.k + 1, device="cpu")
    assert len(list(both)) == wild.k + 1  # the other trial goes on
    with pytest.raises(InputError, match=rf"all {wild.k + 1} rounds are done"):
        both.step()
    quick = Simulation(digits, "mclr", "fedavg", rounds=9, stop_at=0.01, device="cpu")
    assert quick.done
    with pytest.raises(InputError, match=r"stop_at=0.01 was reached in round 0"):
        quick.step()
