"""The robustness bench in small: run, stopped and resumed, scored, and written as tables and
pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsso.algorithms import make
from fedsso.data import datasets
from fedsso.experiment.grids import grid
from fedsso.experiment.results import Setting
from fedsso.experiment.spec import Spec
from fedsso.experiment.trace import Trace
from fedsso.experiment.workers import OutOfTime
from studies import made_up, together

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import robustness, robustness_report  # noqa: E402
from benchmarks.robustness import Cell, Task  # noqa: E402
from benchmarks.robustness_report import (  # noqa: E402
    ACCURACY,
    LOSS,
    Goal,
    Score,
    best_final,
    chosen,
    fewest_rounds,
    leads,
    points,
    score,
    scores,
    table,
    unchosen,
    write,
)

ROUNDS = 6
QUARTER = "25% of the clients"
TASKS = {
    "digits": Task({"name": "digits", "clients": 4}, "mclr", 0.5, rounds=ROUNDS),
    "heart": Task(
        {"name": "heart"},
        "mclr",
        0.65,
        rounds=ROUNDS,
        options={"loss": "bce", "batch_size": None, "eval_train": True},
    ),
}
CELLS = {"digits": Cell("digits", QUARTER, {"participation": 0.25}), "heart": Cell("heart")}
METHODS = {
    "auto": [make("fedsso")],
    "default": grid("fedsso", {"alpha": (0.003, 0.03), "eta": 1.0}),
    "fedavg": grid("fedavg", {"alpha": (0.01, 0.1), "eta": 1.0}),
    "fedadam": grid("fedadam", {"alpha": 0.03, "eta": (0.03, 0.1)}),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks, four methods and two seeds in place of the bench's own."""
    for name, value in {"TASKS": TASKS, "METHODS": METHODS, "SEEDS": (0, 1)}.items():
        monkeypatch.setattr(robustness, name, value)


def cell_of(task: str) -> Cell:
    if task == "heart" and not any(d.present() for d in datasets() if d.name == "heart"):
        pytest.skip("the files of the data set heart are not there")
    return CELLS[task]


class Deadline(float):
    """A time that comes after some parts."""

    left = 3

    def __le__(self, now: float) -> bool:
        self.left -= 1
        return self.left < 0


# ---- the bench itself ----


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("task", CELLS)
def test_a_cell_is_run_scored_and_shown(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, metric = cell_of(task), {"digits": "test_accuracy", "heart": "full_train_loss"}[task]
    robustness.run(cell, list(METHODS)[:-1], tmp_path, device="cpu")
    assert scores(tmp_path, [cell]) == [], "FedAdam is missing"
    found = robustness.run(cell, list(METHODS), tmp_path, device="cpu")
    (told,) = scores(tmp_path, [cell])
    assert (told["task"], told["change"], told["metric"]) == (task, cell.change, metric)
    assert told["methods"].keys() == METHODS.keys()
    for name, own in told["methods"].items():
        means = [by_hand(s, metric, TASKS[task].target) for s in found[name].settings()]
        assert own["rounds"] == expected_rounds(name, means), name
        assert own["final"] == expected_final(name, means, 1 if metric == ACCURACY else -1), name
    row = (
        table([told], participation=True)
        .splitlines()[-1]
        .replace("**", "")
        .strip("| ")
        .split(" | ")
    )
    for text, own in zip(row[3:], told["methods"].values(), strict=True):
        rounds, final = (part.split(" ")[0] for part in text.split(" / "))
        assert (None if rounds == "–" else float(rounds), float(final)) == (
            own["rounds"]["mean"],
            own["final"]["mean"],
        )
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    monkeypatch.setattr(robustness, "run", lambda *_, **__: pytest.fail("it is read again"))
    assert scores(tmp_path, [cell]) == [told]


Means = tuple[str, list[int | None], list[float]]


def by_hand(setting: Setting, metric: str, target: float) -> Means:
    """Label, first hits and means of all seven evaluations (fewer than ten), seed by seed."""
    hits: list[int | None] = []
    ends = []
    for trace in setting.traces:
        assert trace.diverged is None
        values = trace[metric].tolist()
        assert len(values) == ROUNDS + 1
        reached = [
            k for k, v in enumerate(values) if (v >= target if metric == ACCURACY else v <= target)
        ]
        hits.append(reached[0] if reached else None)
        ends.append(sum(values) / len(values))
    return setting.label, hits, ends


def expected_rounds(name: str, means: Sequence[Means]) -> dict[str, Any]:
    every = [math.inf if None in hits else sum(h or 0 for h in hits) / 2 for _, hits, _ in means]
    if name == "default":
        return {
            "mean": finite(sum(every) / 2),
            "best": finite(min(every)),
            "worst": finite(max(every)),
        }
    best = min(every)
    if best == math.inf:
        return {"mean": None, "setting": None}
    (label,) = (
        m[0] for m, rounds in zip(means, every, strict=True) if rounds == best
    )  # no ties in these cells
    return {"mean": finite(best), "setting": label}


def expected_final(name: str, means: Sequence[Means], sign: int) -> dict[str, Any]:
    ordered = sorted(means, key=lambda m: -sign * sum(m[2]))
    ends = [sum(seeds) / 2 for _, _, seeds in ordered]
    if name == "default":
        return {
            "mean": pytest.approx(sum(ends) / 2, abs=6e-5),
            "best": pytest.approx(ends[0], abs=6e-5),
            "worst": pytest.approx(ends[1], abs=6e-5),
        }
    label, _, seeds = ordered[0]
    return {
        "mean": pytest.approx(ends[0], abs=6e-5),
        "low": pytest.approx(min(seeds), abs=6e-5),
        "high": pytest.approx(max(seeds), abs=6e-5),
        "setting": label,
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@pytest.mark.usefixtures("bench")
def test_stopped_by_a_deadline_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    cell, stops = CELLS["digits"], 0
    robustness.run(cell, list(METHODS), tmp_path / "whole", device="cpu")
    while True:
        try:
            robustness.run(
                cell, list(METHODS), tmp_path / "pieces", device="cpu", deadline=Deadline()
            )
            break
        except OutOfTime:
            stops += 1
            assert scores(tmp_path / "pieces", [cell]) == []
    assert stops == 2, "eight parts, a method and a seed each, three at a time"
    assert scores(tmp_path / "pieces", [cell]) == scores(tmp_path / "whole", [cell]) != []


@pytest.mark.usefixtures("bench")
def test_a_score_does_not_outlive_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = CELLS["digits"]
    robustness.run(cell, list(METHODS), tmp_path, device="cpu")
    (first,) = scores(tmp_path, [cell])
    monkeypatch.setitem(TASKS, "digits", Task(TASKS["digits"].data, "mclr", 0.0, rounds=ROUNDS))
    (second,) = scores(tmp_path, [cell])
    assert first["target"] == 0.5
    assert first["methods"]["auto"]["rounds"]["mean"] != 0
    assert second["methods"]["auto"]["rounds"]["mean"] == 0, "any model has an accuracy of 0"
    next(tmp_path.glob("digits/*/fedavg/*.npz")).unlink()
    assert scores(tmp_path, [cell]) == []


# ---- the score, on traces made by hand ----


def trace(values: Sequence[float], metric: str = ACCURACY, diverged: int | None = None) -> Trace:
    whole = dict.fromkeys(("trial", "seed", "overridden", "skipped", "bytes_up", "bytes_down"), 0)
    return Trace.from_rows(
        [{**whole, "round": k, metric: v} for k, v in enumerate(values)], diverged=diverged
    )


def setting(name: str, *traces: Trace) -> Setting:
    spec = Spec(
        {},
        "",
        "mclr",
        "",
        (1,),
        2,
        "fedavg",
        {"alpha": name},
        {"rounds": len(traces[0]) - 1},
        short={"alpha": name},
    )
    return made_up(spec, *traces)


def judge(own: Sequence[Setting], target: float = 0.5, metric: str = ACCURACY) -> Score:
    judged = Goal(metric, target)
    return chosen(points(together(*own), judged), judged)


def test_the_final_value_is_the_mean_of_the_last_ten() -> None:
    told = judge([setting("a", trace([1.0] * 5 + [0.5] * 9 + [0.6]))])
    assert told["final"] == {"mean": 0.51, "low": 0.51, "high": 0.51, "setting": "fedavg alpha=a"}


def test_the_best_for_rounds_need_not_be_the_best_at_the_end() -> None:
    fast, good = setting("fast", trace([0, 0.5, 0.5])), setting("good", trace([0, 0.4, 1.0]))
    told = judge([good, fast])
    assert told["rounds"] == {"mean": 1.0, "setting": "fedavg alpha=fast"}
    assert told["final"]["setting"] == "fedavg alpha=good"
    assert told["final"]["mean"] == round(1.4 / 3, 4)


def test_rounds_are_a_mean_over_seeds_and_the_range_is_theirs() -> None:
    told = judge([setting("a", trace([0.5, 0.5]), trace([0.1, 0.7]))])
    assert told["rounds"]["mean"] == 0.5
    assert told["final"] == {"mean": 0.45, "low": 0.4, "high": 0.5, "setting": "fedavg alpha=a"}


def test_a_setting_of_which_a_seed_never_arrives_loses() -> None:
    lucky = setting("lucky", trace([0.9, 0.9]), trace([0.4, 0.4]))
    slow = setting("slow", trace([0.0, 0.5]), trace([0.0, 0.5]))
    assert judge([lucky, slow])["rounds"] == {"mean": 1.0, "setting": "fedavg alpha=slow"}
    assert judge([lucky])["rounds"] == {"mean": None, "setting": None}
    assert judge([lucky])["final"]["mean"] == 0.65


def test_the_target_itself_is_reached() -> None:
    assert judge([setting("a", trace([0.49, 0.5]))])["rounds"]["mean"] == 1.0
    assert judge([setting("a", trace([0.51, 0.5], LOSS))], metric=LOSS)["rounds"]["mean"] == 1.0


def test_ties_go_to_the_other_value_and_then_to_the_first() -> None:
    a, b = setting("a", trace([0, 0.5, 0.6])), setting("b", trace([0, 0.5, 0.7]))
    judged = Goal(ACCURACY, 0.5)
    assert fewest_rounds(points(together(a, b), judged), judged).setting.runs == b.runs
    late, early = setting("late", trace([0, 0.25, 0.5])), setting("early", trace([0, 0.5, 0.25]))
    assert best_final(points(together(late, early), judged), judged).setting.runs == early.runs
    twin = setting("twin", *a.traces)
    for best in (fewest_rounds, best_final):
        assert best(points(together(a, twin), judged), judged).setting.runs == a.runs


def test_what_diverged_counts_as_the_worst() -> None:
    calm, lost = trace([0, 0.9, 0.9]), trace([0, 0.9, 0.0], diverged=2)
    told = judge([setting("a", calm, calm, lost)])
    assert told["final"] == {"mean": 0.4, "low": 0.0, "high": 0.6, "setting": "fedavg alpha=a"}
    assert told["rounds"]["mean"] == 1.0, "it was there before"
    lost = trace([9.0, 0.1, math.nan], LOSS, diverged=2)
    told = judge([setting("a", lost), setting("b", trace([9.0, 8.0, 7.0], LOSS))], metric=LOSS)
    assert told["rounds"]["setting"] == "fedavg alpha=a"
    assert told["final"] == {"mean": 8.0, "low": 8.0, "high": 8.0, "setting": "fedavg alpha=b"}
    assert judge([setting("a", lost)], metric=LOSS)["final"] == dict.fromkeys(
        ("mean", "low", "high", "setting")
    )


def test_of_what_is_not_tuned_all_settings_count() -> None:
    judged = Goal(ACCURACY, 0.5)
    one, two = (
        setting("1", trace([0.5, 0.5]), trace([0.2, 0.6])),
        setting("2", trace([0.1, 0.5]), trace([0.1, 0.9])),
    )
    told = unchosen(points(together(one, two), judged), judged)
    assert told["rounds"] == {"mean": 0.8, "best": 0.5, "worst": 1.0}, "0.75 with one decimal"
    assert told["final"] == {"mean": 0.425, "best": 0.45, "worst": 0.4}
    lost = setting("3", trace([0.1, 0.0], diverged=1), trace([0.1, 0.1]))
    told = unchosen(points(together(one, lost), judged), judged)
    assert told["rounds"] == {"mean": None, "best": 0.5, "worst": None}
    assert told["final"] == {"mean": 0.25, "best": 0.45, "worst": 0.05}
    assert (told["diverged"], told["trials"]) == (1, 4)


curve = st.lists(st.integers(0, 20), min_size=4, max_size=4)
grids = st.lists(st.tuples(curve, curve), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(grids, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_one_more_setting_never_harms(
    values: list[Any], random: Any
) -> None:
    every = [
        setting(str(i), *(trace([v / 20 for v in own]) for own in pair))
        for i, pair in enumerate(values)
    ]
    whole, part = judge(every), judge(every[:1])
    random.shuffle(every)
    shuffled = judge(every)
    assert [whole[what]["mean"] for what in whole] == [shuffled[what]["mean"] for what in whole]
    assert whole["final"]["mean"] >= part["final"]["mean"]
    assert part["rounds"]["mean"] is None or whole["rounds"]["mean"] <= part["rounds"]["mean"]


@settings(max_examples=60, deadline=None)
@given(grids)
def test_a_loss_is_an_accuracy_upside_down(values: list[Any]) -> None:
    """Sixteenths: the mirror image is exact."""
    up = [
        setting(str(i), *(trace([v / 16 for v in own]) for own in pair))
        for i, pair in enumerate(values)
    ]
    down = [
        setting(str(i), *(trace([2 - v / 16 for v in own], LOSS) for own in pair))
        for i, pair in enumerate(values)
    ]
    one, other = judge(up, 0.5), judge(down, 1.5, LOSS)
    assert one["rounds"] == other["rounds"]
    assert one["final"]["setting"] == other["final"]["setting"]
    assert one["final"]["mean"] == pytest.approx(2 - other["final"]["mean"], abs=1.1e-4)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(("rounds", "few"), [(6, 1), (200, 4)])
def test_curves_are_means_of_a_few_rounds(
    rounds: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracy k / 200 in round k: a block's mean is at the mean of its rounds."""
    monkeypatch.setitem(TASKS, "digits", Task({}, "mclr", 0.5, rounds=rounds))
    line = setting("a", trace([k / 200 for k in range(rounds + 1)]))
    half = setting("b", trace([k / 400 for k in range(rounds + 1)]))
    told = score(
        CELLS["digits"],
        {"auto": together(line), "default": together(half, line), "fedavg": together(half)},
    )
    shown = told["curves"]
    assert shown["round"] == [0, *((k + k + few - 1) / 2 for k in range(1, rounds + 1, few))]
    assert (
        shown["auto"] == shown["high"] == pytest.approx([k / 200 for k in shown["round"]], abs=6e-5)
    )
    assert (
        shown["fedavg"]
        == shown["low"]
        == pytest.approx([k / 400 for k in shown["round"]], abs=6e-5)
    )


# ---- tables and pictures ----


def made(
    metric: str = ACCURACY, change: str = "base", **means: tuple[float | None, float | None]
) -> Score:
    """A score with given (rounds, final) of each method, the default's range being a tenth of it
    more and less."""
    methods: dict[str, Any] = {
        name: {
            "rounds": {"mean": r, "setting": name},
            "final": {"mean": f, "low": f, "high": f, "setting": name},
        }
        for name, (r, f) in means.items()
    }
    rounds, final = means["default"]
    methods["default"] = {
        "rounds": {"mean": rounds, "best": 10.0, "worst": None if rounds is None else 90.0},
        "final": {"mean": final, "best": 0.95, "worst": 0.85},
    }
    return {"task": "digits", "change": change, "metric": metric, "target": 0.9, "methods": methods}


def test_a_row_of_the_table() -> None:
    one = made(auto=(20.0, 0.91), default=(None, 0.9), fedavg=(20.0, 0.9), fedadam=(30.0, 0.905))
    head, _, row = table(
        [one, made(change="30% drop out", auto=(1, 1), default=(1, 1))], participation=True
    ).splitlines()
    assert head == "| task | change | target | FedSSO | FedSSO, five α | FedAvg | FedAdam |"
    assert row == (
        "| `digits` | all clients | accuracy 0.9 | **20.0** / **0.9100** | – (10.0 to –) / 0.9000 "
        "(0.9500 to 0.8500) "
        "| 20.0 / 0.9000 | 30.0 / 0.9050 |"
    )


def test_every_cell_is_in_one_of_the_two_tables() -> None:
    changes = list(dict.fromkeys(cell.change for cell in robustness.cells()))
    found = [
        made(change=change, auto=(1.0, 1.0), default=(1.0, 1.0), fedavg=(1.0, 1.0))
        for change in changes
    ]
    by_participation, others = (
        table(found, participation=which).splitlines()[2:] for which in (True, False)
    )
    assert [row.split(" | ")[1] for row in by_participation] == ["all clients", "50 %", "25 %"]
    assert [row.split(" | ")[1] for row in others] == [
        c for c in changes if "50%" not in c and "25%" not in c
    ][1:]


@pytest.mark.parametrize(
    ("metric", "ours", "rivals", "lead"),
    [
        (ACCURACY, 0.9, [0.9, 0.8], True),
        (ACCURACY, 0.9, [0.8, 0.9001], False),
        (LOSS, 0.4, [0.4, 0.5], True),
        (LOSS, 0.4, [0.3999, 0.5], False),
        (LOSS, 0.4, [None, None], True),
        (LOSS, None, [None, None], False),
    ],
)
def test_who_leads_at_the_end(
    metric: str, ours: float | None, rivals: list[float | None], lead: bool
) -> None:
    """In rounds all are equal, and never there: nobody leads; the other FedSSO is no rival."""
    one = made(
        metric,
        auto=(None, ours),
        default=(None, 0.0),
        fedavg=(None, rivals[0]),
        fedadam=(None, rivals[1]),
    )
    assert leads(one, "auto", "final") is lead
    assert leads(one, "auto", "rounds") is False


def test_fewer_rounds_lead_whatever_the_metric() -> None:
    for metric in (ACCURACY, LOSS):
        one = made(
            metric, auto=(20.0, 0.5), default=(21.0, 0.5), fedavg=(20.0, 0.5), fedadam=(None, 0.5)
        )
        assert leads(one, "auto", "rounds")
        assert not leads(one, "default", "rounds")
        assert not leads(
            made(metric, auto=(1.0, 0.5), default=(1.0, 0.5), fedavg=(0.0, 0.5)), "auto", "rounds"
        )


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_files_are_written_even_of_what_diverged(metric: str, tmp_path: Path) -> None:
    lost = 0.0 if metric == ACCURACY else None
    one = made(
        metric,
        QUARTER,
        auto=(20.0, 0.9),
        default=(30.0, 0.9),
        fedavg=(None, lost),
        fedadam=(9.0, 0.9),
    )
    lines = {name: [0.3, 0.9] for name in ("auto", "fedadam", "low", "high")}
    one["curves"] = {"round": [0, 1], **lines, "fedavg": [0.3, lost]}
    write(tmp_path, [one])
    assert json.loads((tmp_path / "robustness.json").read_text()) == [one]
    for name in ("robustness.png", "robustness-curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_kept_numbers_are_small_and_of_the_bench() -> None:
    file = robustness_report.DOCS / "robustness.json"
    assert file.stat().st_size < 400_000
    names = [(cell.task, cell.change) for cell in robustness.cells()]
    kept = [(one["task"], one["change"]) for one in json.loads(file.read_text())]
    assert kept == [name for name in names if name in kept]
