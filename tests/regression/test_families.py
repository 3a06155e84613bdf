"""Families: derivatives, numbers by hand, and what a hospital answers and refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from federations import OPEN, Study, hospitals, small, table, toml

from fedsso.errors import InputError
from fedsso.regression.assess import area, assess, assessment, concordance
from fedsso.regression.design import Design, Term, design
from fedsso.regression.families import named
from fedsso.regression.hospital import Hospital
from fedsso.regression.limits import Limits
from fedsso.regression.questions import QUESTIONS, Answer, Question, unpacked

FAMILIES = ("binomial", "gaussian", "poisson", "cox efron", "cox breslow")
STEP = 1e-5


def made(family: str, *, weighted: bool = True) -> Design:
    """Sixty rows of a made-up study, with weights and an offset."""
    study = small(rows=60, family=family)
    found = design(table(study.frame), study.schema, family)
    if not weighted:
        return found
    rng = np.random.default_rng(3)
    weights = rng.integers(0, 3, 60) + 0.0  # some are 0
    return found._replace(weights=weights, offset=rng.normal(0, 0.3, 60))


def model(found: Design) -> np.ndarray:
    return np.random.default_rng(4).normal(0, 0.2, len(found.terms))


def scaled(found: Design) -> np.ndarray:
    x = found.x / np.maximum(1.0, np.abs(found.x).max(0))
    return np.asarray(x)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_and_information_are_derivatives(family: str) -> None:
    """By central differences with step h: the error is h^2 times a third derivative, plus eps / h.

    With columns of size 1 and 60 rows of weight <= 2 third derivatives are below 1e3, so that the
    error is below 1e-7; and eps |loglik| / h below 1e-9.
    """
    found = made(family)
    x = scaled(found)
    b = model(found)
    chosen = named(family)
    loglik, gradient = chosen.score(found, x, b)
    second = chosen.information(found, x, b)
    assert loglik == pytest.approx(chosen.loglik(found, x @ b + found.offset), rel=1e-13)
    for j in range(len(b)):
        h = np.zeros_like(b)
        h[j] = STEP
        up, up_gradient = chosen.score(found, x, b + h)
        down, down_gradient = chosen.score(found, x, b - h)
        assert gradient[j] == pytest.approx((up - down) / (2 * STEP), abs=1e-6)
        difference = (down_gradient - up_gradient) / (2 * STEP)
        np.testing.assert_allclose(second[j], difference, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_weight_zero_is_not_there(family: str) -> None:
    found = made(family)
    kept = found.weights > 0
    rest = Design(
        found.terms,
        found.x[kept],
        found.y[kept],
        found.time[kept] if found.time.size else found.time,
        found.weights[kept],
        found.offset[kept],
    )
    chosen = named(family)
    b = model(found)
    one = chosen.score(found, scaled(found), b)
    other = chosen.score(rest, scaled(found)[kept], b)
    assert one[0] == pytest.approx(other[0], rel=1e-13)
    np.testing.assert_allclose(one[1], other[1], rtol=1e-10, atol=1e-12)
    assert chosen.saturated(found) == pytest.approx(chosen.saturated(rest), abs=1e-12)


def three(y: list[float], time: list[float] | None = None) -> Design:
    """Three rows with one column: 0, 1, 2."""
    x = np.array([[0.0], [1.0], [2.0]])
    at = np.array(time or [])
    return Design((Term("x", "x"),), x, np.array(y), at, np.ones(3), np.zeros(3))


def test_log_likelihoods_by_hand() -> None:
    """At b = 0 each has a value that a line of arithmetic gives."""
    zero = np.zeros(1)
    x = three([]).x

    def loglik(family: str, found: Design) -> float:
        return named(family).score(found, x, zero)[0]

    assert loglik("binomial", three([0, 1, 1])) == pytest.approx(-3 * math.log(2))
    assert loglik("gaussian", three([0, 1, 2])) == pytest.approx(-0.5 * (0 + 1 + 4))
    assert loglik("poisson", three([0, 1, 3])) == pytest.approx(-3 - math.log(6))
    # events at 1 (3 at risk) and 2 (2 at risk)
    assert loglik("cox", three([1, 1, 0], [1, 2, 3])) == pytest.approx(-math.log(3 * 2))
    # two events at once: Breslow 3 * 3, Efron 3 * (3 - 1/2 * 2)
    assert loglik("cox breslow", three([1, 1, 0], [1, 1, 3])) == pytest.approx(-math.log(9))
    assert loglik("cox efron", three([1, 1, 0], [1, 1, 3])) == pytest.approx(-math.log(6))


def test_the_hazard_of_a_huge_predictor_is_finite() -> None:
    """exp(3000) overflows; the partial likelihood of a perfectly ordered table tends to 1."""
    found = three([1, 1, 1], [3, 2, 1])
    loglik, gradient = named("cox").score(found, found.x, np.array([3000.0]))
    assert loglik == 0
    assert gradient[0] == 0
    loglik, gradient = named("cox").score(found, found.x, np.array([-3000.0]))
    assert loglik == pytest.approx(-9000)  # who dies first is 6000 below the highest, then 3000
    assert gradient[0] == pytest.approx(3)
    assert np.isfinite(named("cox").information(found, found.x, np.array([3000.0]))).all()


def test_a_gaussian_log_likelihood_has_the_best_variance() -> None:
    """Sum of squares 5 of 3 rows: -3/2 (log(2 pi 5/3) + 1)."""
    total = named("gaussian").total(-2.5, 0.0, 3)
    assert total == pytest.approx(-1.5 * (math.log(2 * math.pi * 5 / 3) + 1))


def test_saturated_poisson_by_hand() -> None:
    """y = 0, 1, 3: 0, -1, and 3 log 3 - 3 - log 6."""
    right = -1 + 3 * math.log(3) - 3 - math.log(6)
    assert named("poisson").saturated(three([0, 1, 3])) == pytest.approx(right)


@pytest.mark.parametrize("text", FAMILIES)
def test_a_family_is_named_by_its_text(text: str) -> None:
    assert named(text).text == text
    assert named(text.upper()).text == text


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("logistic", "binomial"), ("cox exact", "efron"), ("poisson log", "poisson"), ("", "cox")],
)
def test_an_unknown_family_has_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        named(text)


# ---- hospitals ----


def question(study: Study, name: str) -> Question:
    p = len(design(table(study.frame), study.schema, study.family).terms)
    size = 0 if name == "describe" else p
    return Question(name, toml(study), study.family, np.zeros(size), np.zeros(p), np.ones(p))


def test_a_hospital_describes_its_table() -> None:
    study = small()
    found = design(table(study.frame), study.schema, study.family)
    answer = Hospital("all", table(study.frame), OPEN).answer(question(study, "describe"))
    assert answer.arrays["rows"] == [240]
    assert answer.arrays["events"] == answer.arrays["outcome"] == [study.frame["y"].sum()]
    np.testing.assert_allclose(answer.arrays["mean"], found.x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(answer.arrays["spread"], 240 * found.x.var(0), atol=1e-9)


def test_a_design_is_as_good_as_a_table() -> None:
    study = small()
    found = design(table(study.frame), study.schema, study.family)
    for name in QUESTIONS:
        asked = question(study, name)
        one = Hospital("all", found, OPEN).answer(asked)
        other = Hospital("all", table(study.frame), OPEN).answer(asked)
        assert one.bytes == other.bytes
        for key, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[key])


def test_information_comes_with_the_score() -> None:
    study = small()
    hospital = Hospital("all", table(study.frame), OPEN)
    score = hospital.answer(question(study, "score")).arrays
    both = hospital.answer(question(study, "information")).arrays
    assert np.array_equal(score["gradient"], both["gradient"])
    found = design(table(study.frame), study.schema, study.family)
    right = found.x.T @ found.x / 4  # at b = 0 every v is 1/4
    np.testing.assert_allclose(unpacked(both["information"]), right, rtol=1e-12)


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize(
    ("limits", "public"),
    [
        (Limits(min_rows=241), "fewer than 241 complete rows"),
        (Limits(min_events=121), "fewer than 121 rows with the event or without it"),
        (Limits(max_share=0.01), "more than 0.01 coefficients for each row"),
    ],
)
def test_every_question_is_refused_beyond_the_limits(
    name: str, limits: Limits, public: str
) -> None:
    """The text that travels has the hospital's limit, but not how many rows or events there are."""
    study = small()
    with pytest.raises(InputError) as caught:
        Hospital("all", table(study.frame), limits).answer(question(study, name))
    assert public in caught.value.public
    assert "240" not in caught.value.public
    assert str(study.frame["y"].sum()) not in caught.value.public


def test_events_do_not_limit_a_measured_outcome() -> None:
    study = small(family="gaussian")
    limits = Limits(min_events=10_000)
    Hospital("all", table(study.frame), limits).answer(question(study, "score"))


def test_a_model_of_another_size_is_refused() -> None:
    study = small()
    asked = question(study, "score")._replace(model=np.zeros(3))
    with pytest.raises(InputError, match="about 3 coefficients, the schema has 5"):
        Hospital("all", table(study.frame), OPEN).answer(asked)


def test_another_schema_is_read_anew() -> None:
    study = small()
    hospital = hospitals(study)["east"]
    first = hospital.answer(question(study, "describe"))
    fewer = study._replace(schema=replace(study.schema, columns=study.schema.columns[:1]))
    second = hospital.answer(question(fewer, "describe"))
    assert len(first.arrays["mean"]) == 5
    assert len(second.arrays["mean"]) == 2


# ---- how well a model predicts ----


def test_the_area_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(5)
    y = (rng.random(200) < 0.4) + 0.0
    score = (y + rng.normal(0, 1, 200)).round(1)  # with ties
    w = rng.integers(1, 4, 200) + 0.0
    assert area(y, score, w) == pytest.approx(roc_auc_score(y, score, sample_weight=w))
    assert math.isnan(area(np.ones(3), score[:3], w[:3]))


def test_the_concordance_is_that_of_lifelines() -> None:
    from lifelines.utils import concordance_index

    rng = np.random.default_rng(6)
    time = rng.integers(1, 30, 200) + 0.0
    y = (rng.random(200) < 0.6) + 0.0
    eta = (rng.normal(0, 1, 200) - time / 20).round(1)
    assert concordance(time, y, eta) == pytest.approx(concordance_index(time, -eta, y))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_is_calibrated_in_its_own_rows(family: str) -> None:
    """Refitted to the rows that it was fitted to, a model has slope 1, intercept 0, O = E."""
    found = made(family, weighted=False)
    x = scaled(found)
    chosen = named(family)
    b = np.zeros(len(found.terms))
    for _ in range(30):
        gradient = chosen.score(found, x, b)[1]
        b = b + np.linalg.solve(chosen.information(found, x, b), gradient)
    record = assessment(Answer("all", assess(chosen, found, x, b, OPEN)))
    assert record.rows == 60
    assert record.slope == pytest.approx(1, abs=1e-8)
    if chosen.intercept:
        assert record.intercept == pytest.approx(0, abs=1e-8)
    else:
        assert math.isnan(record.intercept)
    assert record.observed == pytest.approx(record.expected, rel=1e-9)
    assert sum(group.rows for group in record.calibration) == 60
    counts = [1 if family.startswith("cox") else group.rows for group in record.calibration]
    observed = sum(n * one.observed for n, one in zip(counts, record.calibration, strict=True))
    assert observed == pytest.approx(record.observed)


@pytest.mark.parametrize("family", ["binomial", "gaussian", "poisson"])
def test_the_calibration_intercept_is_that_of_a_slope_of_1(family: str) -> None:
    """statsmodels fits it with the linear predictor as offset; it has the sign of O - E.

    The predictions are too steep, so that the intercept beside their own slope is another one.
    """
    import statsmodels.api as sm

    found = made(family, weighted=True)
    x = scaled(found)
    b = np.linspace(-0.6, 1.4, len(found.terms))
    eta = x @ b + found.offset
    families = {
        "binomial": sm.families.Binomial(),
        "gaussian": None,
        "poisson": sm.families.Poisson(),
    }
    model = sm.GLM(found.y, np.ones(60), families[family], offset=eta, freq_weights=found.weights)
    record = assessment(Answer("all", assess(named(family), found, x, b, OPEN)))
    assert record.intercept == pytest.approx(model.fit(tol=1e-14).params[0], rel=1e-8)
    assert np.sign(record.intercept) == np.sign(record.observed - record.expected) != 0
    assert record.slope != pytest.approx(1, abs=0.1)


def test_without_events_there_is_no_calibration() -> None:
    found = made("binomial", weighted=False)
    record = assessment(
        Answer(
            "one",
            assess(
                named("binomial"), found._replace(y=found.y * 0), found.x, np.ones(5) / 50, OPEN
            ),
        )
    )
    assert math.isnan(record.intercept)


def test_the_roc_curve_hides_small_groups() -> None:
    """Four rows: with a limit of 2 only the threshold between the second and the third is left."""
    probabilities = np.array([0.12, 0.22, 0.62, 0.72])
    eta = np.log(probabilities / (1 - probabilities))
    terms = (Term("x", "x"),)
    found = Design(terms, eta[:, None], np.array([0.0, 1, 0, 1]), eta[:0], np.ones(4), np.zeros(4))
    limits = replace(OPEN, min_cell=2)
    record = assessment(
        Answer("one", assess(named("binomial"), found, found.x, np.ones(1), limits))
    )
    assert [tuple(point) for point in record.roc] == [(pytest.approx(0.25), 0.5, 0.5)]
    assert [group.rows for group in record.calibration] == [2, 2]
    assert record.calibration[0].expected == pytest.approx(0.17)
    assert record.brier == pytest.approx(np.mean((probabilities - found.y) ** 2))


def test_a_calibration_without_an_answer_is_nan() -> None:
    """Predictions that are all the same have no slope; nor have those that separate the events."""
    found = made("binomial", weighted=False)
    record = assessment(
        Answer("one", assess(named("binomial"), found, scaled(found) * 0, np.zeros(5), OPEN))
    )
    assert math.isnan(record.slope)
    y = found.y
    apart = found._replace(x=(y + np.linspace(0, 0.1, 60))[:, None], terms=found.terms[:1])
    record = assessment(Answer("one", assess(named("binomial"), apart, apart.x, np.ones(1), OPEN)))
    assert record.auc == 1
    assert math.isnan(record.slope)
