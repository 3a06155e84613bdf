"""The page and the forest plot of a regression: they show its numbers, and nothing acts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_report_page import EVIL, Outline

import fits
from fedsso.errors import InputError
from fedsso.regression.records import Round
from fedsso.regression.result import Regression
from fedsso.report.regression import page
from fedsso.report.regression.charts import linear, logarithmic
from fedsso.report.regression.steps import Step, axis_of, round_step, steps

FIT = fits.binomial()
MODEL = Regression(FIT)


def shares(html: str, name: str) -> list[float]:
    """Where things of a class lie on the axis of the forest plot, in per cent."""
    found = re.findall(rf'class="{name}" style="left:([\d.]+)%', html)
    return [float(text) for text in found]


def test_the_page_shows_forest_calibration_roc_hospitals_and_ends_with_convergence() -> None:
    outline = Outline(page(MODEL))
    ids = [attributes.get("id") for attributes in outline.all("section")]
    assert ids == [*(None, "coefficients", "predictions", "hospitals", "settings", "convergence")]
    titles = [attributes["aria-label"] or "" for attributes in outline.all("svg")]
    assert [title.split()[0] for title in titles] == [
        *("Calibration:", "ROC", "log-likelihood", "length")
    ]
    for name in fits.HOSPITALS:
        assert name in outline.text
    assert "Wels is excluded" in outline.text


def test_the_forest_plot_is_drawn_to_scale() -> None:
    """Places are linear in the coefficients, so differences of places have their proportions."""
    html = page(MODEL)
    lines = steps(MODEL, 0.95)
    places = shares(html, "dot")
    values = [line.value for line in lines]
    assert len(places) == len(values) == 4
    slope = (places[2] - places[0]) / (values[2] - values[0])
    for place, value in zip(places, values, strict=True):
        assert place == pytest.approx(places[0] + slope * (value - values[0]), abs=0.02)
    (none,) = {float(x) for x in re.findall(r'class="at none" style="left:([\d.]+)%', html)}
    assert none == pytest.approx(places[0] - slope * values[0], abs=0.02)


def test_numbers_are_shown_for_a_round_step_and_levels_beside_their_reference() -> None:
    """Ages are spread by about 12 years: ten are nearest among 1, 2 and 5 times powers of ten."""
    age, second, _, smoker = steps(MODEL, 0.95)
    assert age.detail == "per 10 years"
    assert age.value == pytest.approx(10 * FIT.coefficients[1])
    assert (second.detail, smoker.detail) == ("vs I", "vs no")
    assert [round_step(d) for d in (1.0, 0.03, 700, 0.0, math.nan)] == [1, 0.02, 500, 1, 1]


def test_codes_of_0_and_1_have_no_half_steps() -> None:
    """One row in a hundred has a 1: the deviation is 0.0995, but 0.1 of a code means nothing."""
    rare = fits.binomial(mean=FIT.mean.copy(), deviation=FIT.deviation.copy())
    rare.mean[1] = 0.01
    rare.deviation[1] = math.sqrt(0.01 * 0.99)
    assert steps(Regression(rare), 0.95)[0].detail == "per 1 years"


def test_an_absurdly_wide_interval_does_not_flatten_the_others() -> None:
    usual = [Step(str(i), "", 0.1 * i, 0.1 * i - 0.3, 0.1 * i + 0.3) for i in range(5)]
    axis = axis_of([*usual, Step("wide", "", 0.2, -400.0, 400.0)], ratios=True)
    assert -3 < axis.low < -0.3
    assert 0.7 < axis.high < 3
    wide = FIT.covariance.copy()
    wide[4, 4] = 1e4
    html = page(Regression(fits.binomial(covariance=wide)))
    assert html.count("reach cut cut-left") == 1


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.1), (-1.0, 2.0), (-8.0, 8.0), (-0.001, 0.3)])
def test_ticks_of_ratios_are_round_and_few(low: float, high: float) -> None:
    axis = axis_of([Step("a", "", (low + high) / 2, low, high)], ratios=True)
    assert 2 <= len(axis.ticks) <= 9
    for place, text in axis.ticks:
        assert math.exp(place) == pytest.approx(float(text), rel=1e-5)
    assert any(abs(place) < 1e-12 for place, _ in axis.ticks)


def test_axes_of_charts_contain_what_is_drawn() -> None:
    for low, high in ((0.0, 1.0), (3.7, 4.6), (-2.0, 0.0), (5.0, 5.0)):
        scale = linear(low, high)
        assert scale.low <= low < scale.high
        assert high <= scale.high
        assert 2 <= len(scale.ticks) <= 12
    scale = logarithmic(3e-9, 0.2)
    assert scale.low <= 3e-9
    assert scale.high >= 0.2


def test_nothing_on_the_page_acts_or_is_fetched() -> None:
    terms = (FIT.terms[0], FIT.terms[1]._replace(name=EVIL, unit=EVIL), *FIT.terms[2:])
    hospitals = tuple(replace(one, hospital=EVIL) for one in FIT.hospitals)
    html = page(Regression(fits.binomial(terms=terms, hospitals=hospitals, notes=(EVIL,))), EVIL)
    outline = Outline(html)
    assert outline.all("script") == []
    assert EVIL in outline.text
    assert "default-src 'none'" in html.replace("&#x27;", "'")
    for tag in ("link", "img", "iframe", "object", "a"):
        assert outline.all(tag) == []


def test_the_same_result_gives_the_same_page() -> None:
    assert page(MODEL) == page(Regression(fits.binomial()))


def test_a_gaussian_model_has_differences_and_no_roc() -> None:
    plain = tuple(replace(one, roc=(), auc=math.nan, brier=math.nan) for one in FIT.hospitals)
    html = page(Regression(fits.binomial(family="gaussian", hospitals=plain)))
    assert "Differences of the outcome" in html
    assert "odds ratio" not in Outline(html).text.lower()
    assert "ROC" not in html


def test_a_fit_of_one_step_has_no_curve_of_convergence() -> None:
    trace = (Round(1, -10.0, 5.0, 1.0), Round(2, -5.0, 1e-14, 1e-12))
    html = page(Regression(fits.binomial(trace=trace)))
    assert "2 models were sent" in html
    assert len(Outline(html).all("svg")) == 2


def test_many_hospitals_share_a_grey() -> None:
    one = FIT.hospitals[0]
    many = tuple(replace(one, hospital=f"h{i}") for i in range(12))
    html = page(Regression(fits.binomial(hospitals=many)))
    assert '<li class="other">3 more</li>' in html
    assert html.count('<g class="other">') == 6  # three hospitals, two charts


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_forest_plot_is_a_picture_and_the_same_again(
    tmp_path: Path, suffix: str, magic: bytes
) -> None:
    for name in ("a", "b"):
        MODEL.plot(tmp_path / f"{name}{suffix}")
    data = (tmp_path / f"a{suffix}").read_bytes()
    assert data.startswith(magic)
    assert data == (tmp_path / f"b{suffix}").read_bytes()


def test_an_intercept_alone_cannot_be_drawn(tmp_path: Path) -> None:
    alone = Regression(
        fits.binomial(
            schema='outcome = "ill"',
            terms=FIT.terms[:1],
            coefficients=FIT.coefficients[:1],
            covariance=FIT.covariance[:1, :1],
            mean=np.zeros(1),
            deviation=np.ones(1),
        )
    )
    with pytest.raises(InputError, match="intercept"):
        alone.plot(tmp_path / "a.png")
    assert 'class="forest"' not in page(alone)
