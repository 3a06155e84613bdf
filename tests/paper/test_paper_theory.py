"""The facts behind the sections on the paper's theory, each on a small run, and the files that tell
them."""

from __future__ import annotations

import csv
from math import pi
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsso import FedSSO, InputError
from fedsso.algorithm.schedule import theorem_3
from fedsso.data import quadratic
from fedsso.data.synthetic import random_quadratic
from fedsso.paper.theory import CLAIMS, theory, write
from fedsso.paper.theory.claims import KAPPA, KAPPA_BAR, Array, Effort, binned, slope
from fedsso.paper.theory.claims import LAM as LOW
from fedsso.paper.theory.claims import LAM_BAR as HIGH
from fedsso.paper.theory.matrix import (
    LAM,
    LAM_BAR,
    counted,
    failing,
    flat_pair,
    forced_runs,
    formula_error,
    plain_runs,
)
from fedsso.paper.theory.points import end, parts, residual_at_mean
from fedsso.paper.theory.rates import (
    BEND,
    Descent,
    convex,
    descent,
    floor_slope,
    in_one_dimension,
    log_growth,
    record,
    weights,
)
from fedsso.paper.theory.watch import Seen, bumpy, minimiser, squashed, watch, whole

EFFORT = Effort(60, (0, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a short effort."""
    out = tmp_path_factory.mktemp("theory")
    notes: list[str] = []
    write(out, Effort(12, (8,)), notes.append)
    assert len(notes) == len(CLAIMS)
    return out


@pytest.fixture(scope="module")
def facts(folder: Path) -> list[dict[str, str]]:
    """The rows of theory.csv."""
    return list(csv.DictReader((folder / "theory.csv").read_text().splitlines()))


def value(facts: list[dict[str, str]], quantity: str) -> float:
    """The first fact of that name."""
    return next(float(row["value"]) for row in facts if row["quantity"] == quantity)


@pytest.fixture(scope="module")
def forced() -> list[Seen]:
    """Runs in which many pairs are overridden."""
    return forced_runs(EFFORT)


# --- the tools
# --------------------------------------------------------------------------------------------------
def test_slope_of_a_power_law() -> None:
    k = np.arange(1.0, 500.0)
    assert slope(k, 3 * k**-1.5) == pytest.approx(-1.5, abs=0.01)


def test_bins_keep_the_mean() -> None:
    k = np.arange(1.0, 11.0)
    centres, means = binned(k, 2 * k, bins=3)
    assert np.allclose(means, 2 * centres)
    assert 1 < centres[0] < centres[-1] < 10


def test_the_minimiser_has_no_gradient_and_f_is_the_runs_own() -> None:
    one = convex(5, None, EFFORT)
    x, least = minimiser(one)
    simulation = one.simulation(FedSSO(), 1, 0)
    f, batch = whole(one, simulation)
    value, grad = f.value_and_grad(x[None, None], batch)
    assert float(grad.norm()) < 1e-14
    assert float(value) == least
    rows = one.rows.x @ x
    direct = (torch.nn.functional.softplus(rows) - one.rows.y * rows).mean() + x @ x / 2
    assert least == pytest.approx(float(direct), rel=1e-14)


def test_many_copies_of_the_rows_are_the_same_function() -> None:
    one = convex(1, 1, EFFORT)
    assert len(one.fed.x) > len(one.rows.x)
    assert set(one.fed.x[:, 0].tolist()) == set(one.rows.x[:, 0].tolist())
    assert float(one.fed.y.mean()) == pytest.approx(float(one.rows.y.mean()))


def test_the_bounds_of_the_derivatives_hold() -> None:
    """BEND bounds the second derivative of the squashed loss, tightly; smoothness() bounds every
    Hessian seen."""
    z = torch.linspace(-10, 10, 4001, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(
        squashed(z[:, None], torch.zeros_like(z)).sum(), z, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), z)
    assert 0.999 * BEND < float(second.abs().max()) <= BEND
    one = convex(5, None, EFFORT)
    f, batch = whole(one, one.simulation(FedSSO(), 1, 0))
    top = torch.linalg.eigvalsh(f.hessian(torch.zeros(1, 1, 5, dtype=torch.float64), batch)).max()
    assert 1 < float(top) <= one.smoothness(0.25) < 1.25


# --- Theorem 2.1
# --------------------------------------------------------------------------------------------------
def test_the_corrected_schedule_meets_its_conditions_and_keeps_its_bound() -> None:
    found = in_one_dimension(EFFORT, printed=False)
    assert found.promise.beta_u == pytest.approx(2)
    assert found.promise.alpha_L <= 1
    assert found.share() <= 1
    assert found.share(10) < 0.1 * found.share()  # the start is where the bound is tight
    assert found.overridden > 0.9  # so B is (lam + Lam) / 2 in most rounds
    fixed = np.isclose(found.runs[0]["low"], 2 / (LOW + HIGH), rtol=1e-12)
    assert (fixed >= (found.runs[0]["overridden"] > 0)).all()
    for run, gap in zip(found.runs, found.gaps, strict=True):
        assert run["low"].min() >= KAPPA
        assert run["high"].max() <= KAPPA_BAR
        assert (gap > 0).all()
        assert gap[-10:].mean() < 1e-2 * gap[0]
    assert not np.array_equal(found.gaps[0], found.gaps[1])  # mini-batches differ between seeds


def test_the_printed_schedule_fails_its_own_condition_and_its_first_bound() -> None:
    found = in_one_dimension(EFFORT._replace(rounds=5, seeds=(0,)), printed=True)
    assert found.promise.beta_u < 1
    assert found.gaps[0][0] > found.promise.bound(found.runs[0]["k"])[0]  # mu where L is needed


def test_in_five_dimensions_mini_batches_break_the_bounds_of_the_lemma() -> None:
    one = convex(5, 5, EFFORT)
    steps = in_one_dimension(EFFORT._replace(rounds=1, seeds=(0,)), printed=False).promise.steps
    run = watch(one, record(steps, 1 / KAPPA_BAR, 1 / KAPPA), 40, 0)
    assert run["high"].max() > 3 * KAPPA_BAR
    assert run["low"].min() < 0.7 * KAPPA


# --- Theorem 3.1
# --------------------------------------------------------------------------------------------------
def test_squared_gradients_of_a_function_that_is_not_convex() -> None:
    found = descent(bumpy(5, None, EFFORT), EFFORT._replace(rounds=80))
    assert found.dip < -0.05
    (least,), (mean,), (run,) = found.least, found.mean, found.runs
    assert least[-1] < 0.1 * least[0]
    assert (np.diff(least) <= 0).all()
    assert (mean >= least).all()
    eta = 1 / np.sqrt(run["k"] + 1)
    assert mean[-1] == pytest.approx(np.average(run["square"], weights=eta))
    assert found.total[0][-1] == pytest.approx(eta @ run["square"])


def _told_by(squares: list[Array], rounds: int) -> Descent:
    runs = [{"k": np.arange(1.0, len(v) + 1), "square": v} for v in squares]
    total = [np.cumsum(weights(run["k"]) * run["square"]) for run in runs]
    return Descent(0.0, squares, squares, total, runs, rounds)


def test_a_bounded_sum_meets_the_theorem_and_a_lasting_gradient_or_a_lost_run_does_not() -> None:
    k = np.arange(1.0, 201.0)
    settled, lasting, alone = k**-2, np.ones(200), np.where(k == 1, 1.0, 0.0)
    assert _told_by([settled], 200).met
    assert not _told_by([settled, lasting], 200).met
    assert not _told_by([settled, settled[:50]], 200).met
    assert _told_by([settled[:50]], 200).growth == []
    assert _told_by([alone], 200).growth == [1.0]
    assert _told_by([lasting], 200).growth[0] > 3 > log_growth(200)
    assert _told_by([lasting], 200).late == [1.0]


def test_the_weights_alone_give_the_mean_a_slope() -> None:
    assert floor_slope(300) == pytest.approx(-0.565, abs=0.002)
    assert floor_slope(2000) == pytest.approx(-0.525, abs=0.002)


# --- the reset
# --------------------------------------------------------------------------------------------------
def test_a_reset_drops_its_pair_and_starts_again_from_the_identity() -> None:
    steps = theorem_3(L=1.0, tau=4)
    run = watch(bumpy(5, 5, EFFORT), record(steps, R=4), 9, 0)
    again = run["k"] % 4 == 0
    assert (run["low"][again] == 1).all()
    assert (run["high"][again] == 1).all()
    assert np.isnan(run["grow"][again]).all()
    assert not run["overridden"][again].any()
    assert np.isfinite(run["grow"][~again][1:]).all()


# --- Lemma 2.3
# --------------------------------------------------------------------------------------------------
def test_without_overrides_both_determinant_formulas_hold() -> None:
    runs = plain_runs(EFFORT)
    assert runs[0]["overridden"].sum() == 0
    assert (
        np.isfinite(runs[0]["grow"]).sum() == len(runs[0]["k"]) - 1
    )  # every round but the first has a pair
    assert formula_error(runs, "exact", False) < 1e-11
    assert formula_error(runs, "powell", False) < 1e-11


def test_with_an_override_only_the_corrected_formula_holds(forced: list[Seen]) -> None:
    assert sum(run["overridden"].sum() for run in forced) > 20
    assert formula_error(forced, "exact", True) < 1e-6
    assert formula_error(forced, "powell", True) > 5


@pytest.mark.parametrize("cosine", [1e-1, 1e-4, 1e-7])
def test_an_overridden_flat_pair_makes_b_nearly_singular(cosine: float) -> None:
    """What makes det B small is a difference of numbers near 1: eps beside cosine^2."""
    det, powell, least = flat_pair(cosine)
    rounding = 4 * np.finfo(float).eps / cosine**2
    assert det == pytest.approx((LAM + LAM_BAR) / 2 * cosine**2, rel=1e-12 + rounding)
    assert powell == pytest.approx(2 / (LAM + LAM_BAR))
    assert least == pytest.approx(
        cosine**2, rel=1e-3 + rounding
    )  # the largest eigenvalue is 5001, not 5000


def test_the_inequality_of_the_proofs_fails_on_a_real_run(forced: list[Seen]) -> None:
    assert max(failing(run) for run in forced) > 0
    for run in forced:
        assert counted(run).mean() > 0.9
        assert run["bent"][0] == pytest.approx(run["plain"][0])  # B_1 = I


def test_after_convergence_the_inequality_is_not_judged() -> None:
    (run,) = plain_runs(EFFORT)
    judged = counted(run)
    assert judged[:4].all()
    assert not judged[-4:].any()
    assert (run["bent"] < run["low"].min() * run["plain"])[~judged].any()  # there it would fail
    assert failing(run) == 0


# --- points
# --------------------------------------------------------------------------------------------------
def test_with_a_common_hessian_the_mean_of_the_local_points_is_the_lighthouse_point() -> None:
    own = random_quadratic(3, 0, dim=4, condition=10.0)
    A, b = parts(own)
    assert residual_at_mean(quadratic(A[:1].expand_as(A), b), 0.3) < 1e-12
    assert residual_at_mean(own, 0.3) > 1e-3


def test_convex_functions_of_one_variable_have_the_point(
    folder: Path, facts: list[dict[str, str]]
) -> None:
    assert value(facts, "residual, one dimension") < 1e-12
    (row,) = (
        line
        for line in (folder / "theory.md").read_text().splitlines()
        if "between the local points |" in line
    )
    assert row.endswith(", yes |")


def test_two_functions_without_the_point(facts: list[dict[str, str]]) -> None:
    assert value(facts, "g, two functions") > 1.4 * pi / 8  # f' = atan(x)/4 stays below pi/8
    assert value(facts, "mean slope of the second step, two functions") == pytest.approx(
        3 * pi / 8, rel=0.01
    )


def test_fedsso_ends_at_fedavgs_fixed_point() -> None:
    fed = random_quadratic(5, 0, dim=6, condition=10.0)
    wide, narrow, single = (
        end(fed, *steps, EFFORT._replace(rounds=40)) for steps in ((0.1, 5), (0.05, 5), (0.1, 1))
    )
    assert max(wide.fixed, narrow.fixed, single.fixed, single.minimiser) < 1e-12
    assert wide.minimiser > 1e-2
    assert wide.minimiser / narrow.minimiser == pytest.approx(2, rel=0.1)


# --- the files
# --------------------------------------------------------------------------------------------------
def test_the_files_are_written_and_agree(folder: Path, facts: list[dict[str, str]]) -> None:
    text = (folder / "theory.md").read_text()
    assert text.count("\n## ") == text.count("**Verdict.**") == len(CLAIMS)
    assert "nan" not in text
    assert {row["claim"] for row in facts} == {
        "Theorem 2.1",
        "Theorem 3.1",
        "Lemma 2.3",
        "Theorem 1.1",
        "Limit",
    }
    assert {row["seed"] for row in facts} == {"", "8"}
    assert f"{value(facts, 'g, two functions'):.4f}" in text
    assert text.count("with R = 200") >= 4  # both theorems, in what was done and in the verdict
    assert (folder / "theory.png").stat().st_size > 50_000
    assert (folder / "theory.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(("seeds", "message"), [((), "at least one"), ((1, 1), "different")])
def test_bad_input_is_refused_before_any_work(
    tmp_path: Path, seeds: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        theory(tmp_path, seeds=seeds)
    assert not list(tmp_path.iterdir())
