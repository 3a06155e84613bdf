"""Results: what they choose, count and keep."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsso import FedAvg, Federation, FedSSO, Results, Setting, compare, simulate, sweep
from fedsso.errors import InputError
from fedsso.experiment.execute import Standing, Tenths
from fedsso.experiment.results import LAST, entries
from fedsso.experiment.spec import Spec
from fedsso.experiment.trace import Trace
from fedsso.report import numbers
from fedsso.report.page.script import _maps
from fedsso.report.sweeps import trials_csv, write
from studies import made_up, study, together

NAN = math.nan
FAST: dict[str, Any] = {"rounds": 6, "device": "cpu"}
GRID = [
    *(FedAvg(alpha=a) for a in (0.1, 1.0)),
    *(FedSSO(alpha=0.1, form=f) for f in ("bfgs", "dfp")),
]


def trace(*accuracies: float, diverged: int | None = None) -> Trace:
    fixed = {"trial": 0, "seed": 0, "overridden": 0, "skipped": 0, "bytes_up": 1, "bytes_down": 1}
    return Trace.from_rows(
        [{**fixed, "round": k, "test_accuracy": a} for k, a in enumerate(accuracies)], 1, diverged
    )


def setting(*traces: Trace, alpha: float = 0.1, **hyper: Any) -> Setting:
    values = {"alpha": alpha, "eta": 1.0, **hyper}
    short = {k: str(v) for k, v in values.items()}
    options = {"seed": 0, "rounds": max(map(len, traces)) - 1}
    spec = Spec(
        {},
        "",
        "mclr",
        "",
        (4,),
        3,
        "fedsso" if "form" in hyper else "fedavg",
        values,
        options,
        0,
        short,
    )
    return made_up(spec, *traces)


SLOW = setting(trace(0, 0.2, 0.6, 0.9), trace(0, 0.2, 0.3, 0.7))
HALF = setting(trace(0, 0.9, 0.9, 0.9), trace(0, 0.1, 0.1, 0.1), alpha=0.3)
LOST = setting(trace(0, 0.9, 0, 0, diverged=2), trace(0, 0.8, 0.8, 0.8), alpha=1.0)


# ---- one setting ----


def test_rounds_are_counted_seed_by_seed() -> None:
    assert SLOW.rounds(0.6) == [2, 3]
    assert SLOW.rounds(0.6, "last below") == [1, 2]
    assert LOST.rounds(0.8) == [1, 1]
    assert LOST.rounds(0.8, "last below") == [None, 0]
    with pytest.raises(InputError, match="did you mean 'first hit'"):
        SLOW.rounds(0.6, "frist hit")


def test_a_miss_counts_as_never() -> None:
    assert SLOW.mean_rounds(0.6) == 2.5
    assert HALF.mean_rounds(0.6) == math.inf


def test_the_end_is_the_mean_of_ten_evaluations() -> None:
    rising = setting(trace(*(k / 100 for k in range(60))))
    assert LAST == 10
    assert rising.final() == pytest.approx(0.545)


def test_the_end_of_a_short_run_is_its_last_quarter_and_of_a_stopped_one_its_last_round() -> None:
    climb = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    assert setting(trace(*climb)).final() == pytest.approx(0.75)
    assert setting(trace(0.1, 0.7)).final() == 0.7  # not the untrained model's
    both = setting(trace(*climb), trace(0.1, 0.4, 0.9))  # the second stopped at its goal
    assert both.finals() == [pytest.approx(0.75), 0.9]


def test_a_diverged_seed_counts_as_zero_whenever_it_diverged() -> None:
    late = trace(*[0.9] * 20, 0.0, diverged=20)
    assert setting(late).finals() == [0.0]
    assert LOST.finals() == [0.0, 0.8]
    assert (LOST.diverged, SLOW.diverged) == (1, 0)


def test_every_table_has_the_final_accuracy_that_sweeps_choose_by() -> None:
    climb = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    both = together(setting(trace(*climb), trace(0.1, 0.4, 0.9)))  # the second stopped at its goal
    told = "0.8250 ± 0.1061"  # 0.75 and 0.9
    assert f"| {told} |" in both.table([0.5])
    (found,) = numbers(both.curves(), [0.5])
    assert found["final_accuracy"]["mean"] == pytest.approx(both.settings()[0].final())
    (lost,) = numbers([LOST.curve()], [0.5])
    assert lost["final_accuracy"] == {"mean": 0.4, "sd": pytest.approx(0.8 / 2**0.5), "count": 2}


# ---- several ----


def test_the_best_reaches_the_target_first_with_every_seed() -> None:
    assert together(SLOW, HALF).best(0.6).runs == SLOW.runs
    assert together(SLOW, HALF, LOST).best(0.6).runs == LOST.runs
    assert together(SLOW, HALF, LOST).best(0.6, count="last below").runs == SLOW.runs


def test_ties_and_no_target_go_by_the_end() -> None:
    every = together(SLOW, HALF, LOST)
    assert every.best().runs == SLOW.runs
    assert every.best(0.99).runs == SLOW.runs
    assert (every.working(0.6), every.lasting(0.6)) == (2, 1)


def test_a_diverged_run_has_no_accuracy_where_there_is_none() -> None:
    """Traces of earlier versions have the accuracy 0 after divergence, even for real targets."""
    sound, lost = setting(trace(NAN, NAN, NAN)), setting(trace(NAN, NAN, 0, diverged=2), alpha=1.0)
    both = together(sound, lost)
    assert both.metric() == "test_loss"
    assert math.isnan(lost.final())
    assert together(sound, LOST).metric() == "test_accuracy"


@pytest.mark.parametrize("select", ["test", "val"])
def test_a_diverged_setting_does_not_win_a_regression(select: str, quad: Federation) -> None:
    steps = [FedAvg(alpha=a) for a in (0.001, 0.1, 50.0)]
    found = sweep(quad, "linear", steps, select=select, rounds=20, device="cpu")
    assert [one.diverged for one in found.settings()] == [0, 0, 1]
    assert found.metric() == "test_loss"
    smallest = min(found.settings()[:2], key=lambda one: one.final("test_loss"))
    assert found.best().record == smallest.record
    assert found.winners()["fedavg"].record == smallest.record


def test_there_must_be_something_to_choose_by() -> None:
    with pytest.raises(InputError, match="no runs to choose from"):
        Results([]).best()
    with pytest.raises(InputError, match="give a metric such as test_accuracy"):
        together(setting(trace(math.nan, math.nan))).best(0.5)


def test_results_are_a_sequence() -> None:
    every = together(SLOW, HALF, LOST)
    assert [*every][:3] == [every[0], every[1], every[2]]
    assert isinstance(every[1:], Results)
    assert (len(every), len(every[1:]), len(every.settings())) == (6, 5, 3)
    assert repr(every) == "Results(6 runs, 3 settings of fedavg)"


def test_rows_are_plain_numbers() -> None:
    rows = together(SLOW, LOST).rows([0.6])
    assert [row["seed"] for row in rows] == [0, 1, 0, 1]
    assert rows[0] == {
        "algorithm": "fedavg", "setting": "fedavg alpha=0.1 eta=1.0", "seed": 0, "first hit 0.6": 2,
        "last below 0.6": 1, "final": 0.9, "last": 0.9, "best": 0.9, "diverged": None,
    }  # fmt: skip
    assert (rows[2]["best"], rows[2]["final"], rows[2]["diverged"]) == (0.9, 0.0, 2)


def test_work_grows_with_the_number_of_trials_and_not_with_its_square(
    fed: Federation, tmp_path: Path
) -> None:
    """Calls of functions are counted, by all that a sweep writes and chooses: twice the trials take
    twice the calls, and a pass over all pairs of them would take four times as many."""
    grid = [FedAvg(alpha=0.01 * i) for i in range(1, 81)]
    runs = list(sweep(fed, "mclr", grid, rounds=1, local_steps=1, device="cpu"))

    def calls(trials: int) -> int:
        counted = 0

        def count(_: Any, event: str, __: Any) -> None:
            nonlocal counted
            counted += event == "call"

        made = [replace(run, spec=replace(run.spec)) for run in runs[:trials]]
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            results = Results(made)
            write(tmp_path, results)
            results.best()
        finally:
            sys.setprofile(before)
        return counted

    calls(20)  # what is imported and looked up once
    assert calls(80) < 2.2 * calls(40)


def test_maps_of_one_two_and_three_axes() -> None:
    one = [SLOW, HALF, LOST]
    (strip,) = together(*one).maps(0.6)
    assert (strip.title, strip.down, strip.across, strip.rows, strip.columns) == (
        "fedavg", "α", "", ["0.1", "0.3", "1"], [""],
    )  # fmt: skip
    np.testing.assert_array_equal(strip.values, [[2.5], [np.nan], [1.0]])
    np.testing.assert_array_equal(strip.lost, [[False], [False], [True]])
    three = [
        setting(trace(0, a), alpha=a, eta=e, form=f)
        for f in ("bfgs", "dfp")
        for a in (0.1, 0.7)
        for e in (0.3, 1.0)
    ]
    maps = together(*three, *one).maps(0.6)
    assert [m.title for m in maps] == ["fedsso form=bfgs", "fedsso form=dfp", "fedavg"]
    np.testing.assert_array_equal(maps[1].values, [[np.nan, np.nan], [1.0, 1.0]])
    assert (maps[0].down, maps[0].across, maps[0].columns) == ("α", "η", ["0.3", "1"])
    (point,) = together(SLOW).maps(0.6)
    assert (point.rows, point.columns, point.values.tolist()) == ([""], [""], [[2.5]])


def test_settings_that_differ_in_run_options_have_places_of_their_own() -> None:
    def varied(alpha: float, eta: float, steps: int, rounds: int) -> Setting:
        made = setting(trace(*[0.0] * rounds, 0.9, 0.9), alpha=alpha, eta=eta)
        options = {"seed": 0, "rounds": 9, "local_steps": steps}
        return made_up(replace(made.spec, options=options), *made.traces)

    places = ((0.1, 1, 1), (0.1, 5, 2), (0.7, 1, 3), (0.7, 5, 4))
    four = [varied(alpha, 1.0, steps, rounds) for alpha, steps, rounds in places]
    results = together(*four)
    assert results.axes() == {"alpha": [0.1, 0.7], "local_steps": [1, 5]}
    (table,) = results.maps(0.5)
    assert (table.down, table.across, table.columns) == ("α", "local_steps", ["1", "5"])
    np.testing.assert_array_equal(table.values, [[1, 2], [3, 4]])
    assert "local_steps" in trials_csv(results).splitlines()[0]
    others = [varied(a, 0.3, t, 5) for a in (0.1, 0.7) for t in (1, 5)]
    maps = together(*four, *others).maps(0.5)
    assert [one.title for one in maps] == ["fedavg local_steps=1", "fedavg local_steps=5"]
    np.testing.assert_array_equal(maps[0].values, [[1, 5], [3, 5]])
    np.testing.assert_array_equal(maps[1].values, [[2, 5], [4, 5]])
    drawn = list(_maps(entries(results)))
    assert [one["cells"] for one in drawn] == [[[0, 1], [2, 3]]]


# ---- running ----


def test_a_grid_has_the_runs_of_a_comparison(fed: Federation) -> None:
    found = study(fed, "mclr", GRID, seeds=(0, 1), **FAST)
    runs = compare(fed, "mclr", GRID, seeds=(0, 1), **FAST)
    assert [run.spec for run in found] == [run.spec for run in runs]
    assert [setting.record for setting in found.settings()] == GRID
    assert {setting.seeds for setting in found.settings()} == {(0, 1)}
    assert list(found.algorithms()) == ["fedavg", "fedsso"]
    for one, other in zip(found, runs, strict=True):
        np.testing.assert_array_equal(one.trace["test_accuracy"], other.trace["test_accuracy"])
    with pytest.raises(InputError, match=r"keeps traces, not models.*fedsso.simulate"):
        found[0].model  # noqa: B018


def test_progress_goes_forward_to_the_end_and_what_is_there_is_not_run_again(
    fed: Federation, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []

    def progress(label: str, k: int, rounds: int, numbers: dict[str, float]) -> None:
        assert numbers.keys() == {"test_accuracy"}
        told.append((label, k, rounds))

    study(fed, "mclr", GRID[:2], out=tmp_path, progress=progress, **FAST)
    first = "grid, 0 of 2 trials done: fedavg, seed 0, 2 trials"
    assert told == [(first, k, 6) for k in range(1, 7)]
    told.clear()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    more = study(fed, "mclr", GRID, out=tmp_path, progress=progress, **FAST)
    labels = [f"grid, {2 + i} of 4 trials done: {more[2 + i].label}" for i in range(2)]
    assert told == [(label, k, 6) for label in labels for k in range(1, 7)]
    assert len(more.settings()) == 4
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(tmp_path.iterdir())) == 3


def test_a_part_that_stops_early_completes_the_bar(fed: Federation) -> None:
    told: list[int] = []
    study(fed, "mclr", [FedAvg()], stop_at=0.01, progress=lambda *row: told.append(row[1]), **FAST)
    assert told[-1] == 6


class Counted:
    """A progress callback that counts trials."""

    def __init__(self) -> None:
        self.told: list[Standing] = []

    def __call__(self, *_: object) -> None:
        raise AssertionError("it is told by `count` alone")

    def count(self, now: Standing, numbers: dict[str, float]) -> None:
        assert numbers.keys() == {"test_accuracy"}
        self.told.append(now)


def test_a_sweep_counts_its_trials_phase_by_phase(fed: Federation) -> None:
    counted = Counted()
    sweep(fed, "mclr", GRID, select="val", progress=counted, **FAST)
    grid = [now for now in counted.told if now.phase == "grid"]
    chosen = [now for now in counted.told if now.phase == "chosen settings"]
    assert [*grid, *chosen] == counted.told
    for phase, trials in ((grid, 4), (chosen, 2)):
        assert {now.trials for now in phase} == {trials}
        assert [now.done for now in phase] == sorted(now.done for now in phase)
        shares = [now.share for now in phase]
        assert shares == sorted(shares)
        assert (phase[-1].done, shares[-1]) == (trials, 1.0)
        assert all(1 <= now.k <= now.rounds == 6 for now in phase)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_winner_keeps_its_own_options_when_it_is_judged(fed: Federation, jobs: int) -> None:
    lists: dict[str, Any] = {"local_steps": [8, 1], "batch_size": [None, 4]}
    options: dict[str, Any] = {**FAST, **lists, "seeds": (0, 1), "select": "val", "jobs": jobs}
    found = sweep(fed, "mclr", [*GRID[:1], GRID[2]], **options)
    assert len(found) == 2 * 2 * 4
    assert found.judged is not None
    assert len(found.judged) == 2 * 2
    for name, own in found.algorithms().items():
        winner, chosen = found.winners()[name], own.best()
        assert winner.record == chosen.record
        assert winner.label == chosen.label
        for option in lists:
            assert winner.spec.options[option] == chosen.spec.options[option]
        again = simulate(fed, "mclr", winner.record, **winner.spec.options)
        assert again.spec.identity == winner.spec.identity
        assert again.final() == winner.runs[0].final()


def test_lines_come_for_every_tenth_of_a_phase() -> None:
    tenths = Tenths()

    def due(phase: str, done: int, share: float) -> bool:
        return tenths.due(Standing(phase, done, 4, "fedavg", 1, 2, share))

    shares = (0.05, 0.1, 0.15, 0.2, 1.0)
    assert [due("grid", 0, share) for share in shares] == [False, True, False, True, True]
    assert due("grid", 4, 1.0), "all trials are done"
    assert not due("chosen settings", 0, 0.05)
    assert due("chosen settings", 0, 0.1)
    assert not due("chosen settings", 0, 0.0), "another one of the same name"
    assert due("chosen settings", 4, 1.0)


def test_validation_is_another_study(fed: Federation, tmp_path: Path) -> None:
    held_out = fed.validation()
    assert held_out.test_sizes.tolist() == [round(size / 4) for size in fed.train_sizes.tolist()]
    assert not set(held_out.test_rows.tolist()) & {
        *held_out.train_rows.tolist(),
        *fed.test_rows.tolist(),
    }
    for data in (fed, held_out):
        study(data, "mclr", GRID[:1], out=tmp_path, **FAST)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"jobs": 0}, "jobs must be an integer >= 1"),
        ({"seeds": (0, 0)}, "seeds must be different"),
        ({"round": 3}, "did you mean 'rounds'"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str, fed: Federation) -> None:
    with pytest.raises(InputError, match=message):
        study(fed, "mclr", ["fedavg"], **wrong)


def test_out_that_is_a_file(fed: Federation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot write"):
        study(fed, "mclr", ["fedavg"], out=tmp_path / "file", **FAST)


def test_results_of_settings_have_their_runs() -> None:
    both = Results([SLOW, HALF])
    assert [*both] == [*SLOW.runs, *HALF.runs]
    assert both.best(0.6).runs == SLOW.runs


def test_a_sweeps_target_is_in_its_table_and_held_out_rows_are_told(fed: Federation) -> None:
    many = sweep(fed, "mclr", ["fedavg"], rounds=4, device="cpu", target=0.37, select="val")
    assert "0.37" in many.table()
    assert all(curve.label.endswith(" on held-out rows") for curve in many.curves())
    winners = Results(many.winners().values())
    assert "held-out" not in winners.table()
