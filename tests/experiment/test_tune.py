"""`fedsso.tune`: what it searches, drops and keeps, and that what was killed goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # typer imports names that click 9 will no longer have
    from typer.testing import CliRunner

import fedsso
from fedsso import FedAdam, Federation, FedSSO, InputError, OutOfTime
from fedsso.algorithm import Algorithm
from fedsso.algorithms import make
from fedsso.cli.main import app
from fedsso.experiment.plan import plan
from fedsso.experiment.tuning.batch import train
from fedsso.experiment.tuning.journal import Journal
from fedsso.experiment.tuning.search import JOURNAL
from fedsso.experiment.tuning.space import Range, space_of
from fedsso.support.claims import Claims

optuna = pytest.importorskip("optuna")
SMALL: dict[str, Any] = {"rounds": 8, "device": "cpu"}


def numbers(results: fedsso.Results) -> list[Any]:
    """What was tried and how it went, seconds aside."""
    return [(run.spec.identity, run.trace["test_loss"].tolist()) for run in results]


# ---- what is searched ----


def test_left_to_itself_the_space_lies_between_the_ends_of_the_grid() -> None:
    space = space_of("fedadam")
    assert space.ranges == {"alpha": Range(0.0001, 0.7), "eta": Range(0.01, 1.0)}
    assert (space.choices, space.fixed) == ({}, {})
    assert all(one.is_logarithmic for one in space.ranges.values())
    assert not space_of("fedacg").ranges["beta"].is_logarithmic  # its grid begins at 0


def test_fields_may_be_ranges_choices_or_fixed() -> None:
    space = space_of("fedsso", {"alpha": "0.001:1", "eta": 1.0, "form": ["bfgs", "dfp"], "R": [9]})
    assert space.ranges == {"alpha": Range(0.001, 1.0)}
    assert space.choices == {"form": ["bfgs", "dfp"]}
    assert space.fixed == {"eta": 1.0, "R": 9}
    assert space_of("fedsso", space.table()) == space


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("fedavg", {"alpha": "1:0.1"}, "smaller one first"),
        ("fedavg", {"alpha": (0.1,)}, "range of two numbers"),
        ("fedavg", {"alpha": "-1:1"}, "alpha"),  # as the record has it
        ("fedavg", {"alpha": ["0.1:1", 2]}, "a range or a list"),
        ("fedavg", {"alpha": [0.1, 0.1]}, "different values"),
        ("fedavg", {"alpha": 0.1}, r"nothing to tune.*alpha=0\.001:1"),
        ("fedsso", {"R": "1.5:3"}, "integers alone"),
        ("fedavgg", {}, "fedavg"),
    ],
)
def test_spaces_that_are_none(name: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        space_of(name, fields)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"trials": 0}, "trials"),
        ({"at_once": 0}, "at_once"),
        ({"prune": "hard"}, "'hard'"),
        ({"space": {"mu": 1.0}}, r"mu is no field of fedavg.*alpha"),
        ({"space": ["alpha"]}, "dictionary"),
        ({"local_steps": [1, 2]}, "local_steps must be one value"),
        ({"algorithms": []}, "at least one"),
        ({"algorithms": [fedsso.FedAvg()]}, "name"),
    ],
)
def test_what_cannot_be_tuned(options: dict[str, Any], told: str, fed: Federation) -> None:
    given = {"algorithms": "fedavg", **SMALL, **options}
    with pytest.raises(InputError, match=told):
        fedsso.tune(fed, "mclr", **given)


def test_without_optuna_the_way_to_it_is_told(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install '\.\[tune\]'"):
        fedsso.tune(fed, "mclr", "fedavg", **SMALL)


# ---- a batch of which some are dropped ----


@pytest.mark.parametrize(
    ("records", "options"),
    [
        ([FedSSO(alpha=a) for a in (0.03, 0.1, 0.2)], {}),
        ([FedAdam(alpha=a) for a in (0.03, 0.1, 0.2)], {"compress": "topk:0.5"}),
        ([make("scaffold", {"alpha": a}) for a in (0.03, 0.1, 0.2)], {"participation": 0.5}),
    ],
)
def test_those_that_stay_do_not_notice_who_is_dropped(
    records: list[Algorithm], options: dict[str, Any], fed: Federation
) -> None:
    """After the move into a smaller stack all states are those of the same trials."""
    given = {"rounds": 6, "dtype": "float64", "device": "cpu", **options}
    planned = plan(fed, "mclr", records, (0, 1), given)
    settings = [0, 1, 2] * 2
    whole = train(planned, settings, [], lambda *_: ())
    runs = train(planned, settings, [2, 4], lambda rung, _: [0] if rung == 2 else [])
    for run, like, setting in zip(runs, whole, settings, strict=True):
        rounds = 2 if setting == 0 else 6
        assert (len(run.trace), run.spec.options["rounds"]) == (rounds + 1, rounds)
        for name in ("train_loss", "test_loss"):
            # Double precision, six damped rounds: what another order of sums moves is far less.
            np.testing.assert_allclose(run.trace[name], like.trace[name][: rounds + 1], rtol=1e-6)
        assert (run.spec.identity == like.spec.identity) == (setting != 0)


def test_a_dropped_run_is_the_run_of_fewer_rounds(fed: Federation) -> None:
    planned = plan(fed, "mclr", [FedAdam(alpha=0.1), FedAdam(alpha=0.2)], (0,), SMALL)
    run = train(planned, [0, 1], [2], lambda *_: [0, 1])[1]
    short = fedsso.simulate(fed, "mclr", FedAdam(alpha=0.2), **{**SMALL, "rounds": 2})
    assert run.spec.identity == short.spec.identity
    np.testing.assert_allclose(run.trace["test_loss"], short.trace["test_loss"], rtol=1e-4)


def test_all_values_are_told_and_nobody_after_divergence(fed: Federation) -> None:
    planned = plan(fed, "mclr", [FedAdam(alpha=0.1), FedAdam(alpha=1e30)], (0,), SMALL)
    seen: list[tuple[int, list[int]]] = []

    def compare(rung: int, values: dict[int, float]) -> list[int]:
        seen.append((rung, sorted(values)))
        return []

    runs = train(planned, [0, 1], [4], compare)
    assert seen == [(4, [0])]
    assert runs[1].diverged
    assert len(runs[1].trace) == 9


# ---- the search ----


def test_it_finds_a_good_setting_and_keeps_all(fed: Federation, tmp_path: Path) -> None:
    found = fedsso.tune(
        fed, "mclr", ["fedavg", "fedadam"], trials=6, at_once=3, seeds=[0, 1], out=tmp_path, **SMALL
    )
    counts = {name: len(own.settings()) for name, own in found.algorithms().items()}
    assert counts == {"fedavg": 6, "fedadam": 6}
    assert all(len(setting.seeds) == 2 for setting in found.settings())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["parts", "table.md", "trials.csv", JOURNAL]
    assert {path.suffix for path in (tmp_path / "parts").iterdir()} == {".npz"}
    again = fedsso.load_runs(tmp_path)
    assert {run.spec.identity for run in again} == {run.spec.identity for run in found}
    assert again.best().label == found.best().label
    found.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize("prune", ["median", "halving"])
def test_settings_that_fall_behind_are_dropped(prune: str) -> None:
    rounds = 16
    fed = fedsso.load("digits", clients=3)
    found = fedsso.tune(
        fed, "mclr", "fedavg", trials=12, prune=prune, rounds=rounds, device="cpu",
        space={"alpha": (1e-7, 0.3)},
    )  # fmt: skip
    lengths = [run.spec.options["rounds"] for run in found]
    assert set(lengths) <= {4, 8, 16}
    assert min(lengths) < rounds
    assert found.best().spec.options["rounds"] == rounds
    assert len(found.settings()) == 12


def test_without_pruning_all_are_whole(fed: Federation) -> None:
    found = fedsso.tune(fed, "mclr", "fedavg", trials=5, at_once=2, prune="none", **SMALL)
    assert [run.spec.options["rounds"] for run in found] == [8] * 5


def test_the_same_call_repeats_itself_and_more_trials_add(fed: Federation, tmp_path: Path) -> None:
    first = fedsso.tune(fed, "mclr", "fedavg", trials=4, at_once=2, out=tmp_path, **SMALL)
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    again = fedsso.tune(fed, "mclr", "fedavg", trials=4, at_once=2, out=tmp_path, **SMALL)
    assert numbers(again) == numbers(first)
    assert parts == {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    more = fedsso.tune(fed, "mclr", "fedavg", trials=6, at_once=2, out=tmp_path, **SMALL)
    assert numbers(more)[:4] == numbers(first)
    assert len(more.settings()) == 6
    elsewhere = fedsso.tune(fed, "mclr", "fedavg", trials=6, at_once=2, **SMALL)
    assert numbers(elsewhere) == numbers(more)


def test_an_interrupted_search_goes_on_as_if_nothing_had_been(
    fed: Federation, tmp_path: Path
) -> None:
    """The settings under way are asked for again, and what follows from them is the same."""
    given = {"trials": 8, "at_once": 2, "prune": "none", **SMALL}
    whole = fedsso.tune(fed, "mclr", "fedavg", **given)
    calls: list[int] = []

    def stop(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 20:  # in the third batch
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsso.tune(fed, "mclr", "fedavg", out=tmp_path, progress=stop, **given)
    assert len(fedsso.load_runs(tmp_path)) == 4
    goes_on = fedsso.tune(fed, "mclr", "fedavg", out=tmp_path, **given)
    assert numbers(goes_on) == numbers(whole)


def test_time_that_is_up(fed: Federation, tmp_path: Path) -> None:
    with pytest.raises(OutOfTime, match="4 of 4 trials are left; call it again"):
        fedsso.tune(fed, "mclr", "fedavg", trials=4, minutes=1e-9, out=tmp_path, **SMALL)


def test_a_target_counts_rounds(fed: Federation) -> None:
    found = fedsso.tune(fed, "mclr", "fedavg", trials=6, target=0.5, prune="none", **SMALL)
    needed = [setting.mean_rounds(0.5) for setting in found.settings()]
    assert found.best().mean_rounds(0.5) == min(needed)


def test_choosing_by_held_out_rows(fed: Federation, tmp_path: Path) -> None:
    found = fedsso.tune(fed, "mclr", "fedavg", trials=4, select="val", out=tmp_path, **SMALL)
    assert {run.judged_by for run in found} == {"val"}
    assert found.judged is not None
    winner = found.winners()["fedavg"]
    assert winner.runs[0].judged_by == "test"
    assert winner.record == found.best().record


def test_a_damaged_journal_is_told(fed: Federation, tmp_path: Path) -> None:
    fedsso.tune(fed, "mclr", "fedavg", trials=2, at_once=2, out=tmp_path, **SMALL)
    journal = tmp_path / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"{half\n", *lines[2:]]))
    with pytest.raises(InputError, match=r"tune\.journal is damaged.*another folder"):
        fedsso.tune(fed, "mclr", "fedavg", trials=4, at_once=2, out=tmp_path, **SMALL)
    journal.unlink()
    os.mkfifo(journal)  # which would be waited for
    with pytest.raises(InputError, match=r"tune\.journal"):
        fedsso.tune(fed, "mclr", "fedavg", trials=4, at_once=2, out=tmp_path, **SMALL)


@pytest.mark.parametrize("select", ["test", "val"])
@pytest.mark.parametrize("how", ["cut", "flipped", "removed"])
def test_a_damaged_part_is_run_again(
    fed: Federation, tmp_path: Path, how: str, select: str
) -> None:
    """Whichever part it is, with settings that were dropped on the way and two seeds."""
    options: dict[str, Any] = {**SMALL, "trials": 8, "at_once": 4, "seeds": [0, 1]}
    options |= {"space": {"alpha": "0.0001:1"}, "select": select, "out": tmp_path}
    first = fedsso.tune(fed, "mclr", "fedavg", **options)
    if select == "test":  # of the few held-out rows all settings predict the same
        assert len({run.spec.options["rounds"] for run in first}) > 1
    parts = sorted((tmp_path / "parts").glob("*.npz"))
    assert len(parts) > 1
    for part in parts:
        data = part.read_bytes()
        if how == "removed":
            part.unlink()
        elif how == "cut":
            part.write_bytes(data[: len(data) // 2])
        else:
            middle = len(data) // 2
            part.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        again = fedsso.tune(fed, "mclr", "fedavg", **options)
        assert numbers(again) == numbers(first)
        assert again.best().record == first.best().record


def test_half_a_line_of_a_killed_process_is_cut_off(fed: Federation, tmp_path: Path) -> None:
    """The kernel may end a write at the border of a page when the process is killed."""
    first = fedsso.tune(fed, "mclr", "fedavg", trials=2, at_once=2, out=tmp_path, **SMALL)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"op_code":4')
    again = fedsso.tune(fed, "mclr", "fedavg", trials=4, at_once=2, out=tmp_path, **SMALL)
    assert numbers(again)[:2] == numbers(first)
    assert all(json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines())


# ---- the command ----

COMMAND = ["--clients", "3", "--rounds", "8", "--device", "cpu", "--algorithms", "fedavg"]
COMMAND += ["--trials", "8", "--at-once", "2"]


def tune(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["tune", *map(str, args)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def test_the_command_and_its_folder(tmp_path: Path) -> None:
    args = [*COMMAND, "--alpha", "0.01:1", "--out", tmp_path, "--json"]
    document = json.loads(tune(*args).stdout)
    assert [one["tried"] for one in document["results"]] == [8]
    assert 0.01 <= document["results"][0]["hyper"]["alpha"] <= 1
    saved = tomllib.loads((tmp_path / "tune.toml").read_text())
    assert (saved["fedavg"], saved["trials"]) == ({"alpha": "0.01:1"}, 8)
    assert not (tmp_path / "grid.png").exists()
    repeated = tune("--config", tmp_path / "tune.toml", "--out", tmp_path, "--json")
    assert json.loads(repeated.stdout) == document
    page = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--alpha", "1:0.1"], "smaller one first"),
        (["--alpha", "high"], "alpha"),
        (["--mu", "0.1:1"], "--mu is not an option of fedavg"),
        (["--prune", "hard"], "'hard'"),
        (["--minutes", "1"], "--minutes needs --out"),
        (["--device", "cpu,cpu"], "'cpu,cpu'"),
    ],
)
def test_the_command_refuses(args: list[str], told: str) -> None:
    assert told in tune(*COMMAND, *args, code=2).stderr


def test_the_folder_of_a_sweep_is_left_alone(tmp_path: Path) -> None:
    steps = ["--algorithms", "fedavg", "--alpha", "0.1,0.3"]
    made = CliRunner().invoke(app, ["sweep", *COMMAND[:6], *steps, "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    assert "already exists" in tune(*COMMAND, "--out", tmp_path, code=2).stderr


def started(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedsso", "tune", *COMMAND, "--prune", "none", "--json"]
    return subprocess.Popen(
        [*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_a_killed_search_goes_on_and_ends_like_one_that_was_not(tmp_path: Path) -> None:
    alone = json.loads(tune(*COMMAND, "--prune", "none", "--json").stdout)
    killed = started(tmp_path)
    limit = time.monotonic() + 600  # only ends a hang
    while len(list((tmp_path / "parts").glob("*.npz"))) < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    both = [started(tmp_path), started(tmp_path)]
    found = []
    for process in both:
        output, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        found.append(json.loads(output))
    assert found[0] == found[1]
    assert found[0]["results"][0]["tried"] == alone["results"][0]["tried"] == 8
    assert {path.suffix for path in (tmp_path / "parts").iterdir()} == {".npz"}


# ---- what a kill may leave behind ----


def test_a_setting_that_still_waits_holds_nobody_up(tmp_path: Path, fed: Federation) -> None:
    """Killed with many trials wished for, then asked for fewer: nothing is left to wait for."""
    given: dict[str, Any] = {"at_once": 2, "prune": "none", "out": tmp_path, **SMALL}
    fedsso.tune(fed, "mclr", "fedavg", trials=2, **given)
    with Claims(tmp_path) as claims:
        storage = optuna.storages.JournalStorage(Journal(tmp_path / JOURNAL, claims))
        (name,) = optuna.get_all_study_names(storage)
        optuna.load_study(study_name=name, storage=storage).enqueue_trial({"alpha": 0.1})
    assert len(fedsso.tune(fed, "mclr", "fedavg", trials=2, **given)) == 2


def test_a_dropped_setting_is_not_the_best(fed: Federation) -> None:
    """Its accuracy at the end is that of an earlier round, which may be higher by chance."""
    short = fedsso.simulate(fed, "mclr", fedsso.FedAvg(alpha=1.0), rounds=2, device="cpu")
    whole = fedsso.simulate(fed, "mclr", fedsso.FedAvg(alpha=1e-9), **SMALL)
    assert short.final() > whole.final()
    assert fedsso.Results([short, whole]).best().runs[0] is whole
