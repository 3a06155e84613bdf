"""A fit over hospitals equals the pooled fit of statsmodels and lifelines, in shipped tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from federations import Study, fair, fitted, heart, lung, randhie, small, table

from fedsso.regression.design import design
from fedsso.regression.inference import coefficients
from fedsso.regression.records import Fit

DATA = os.environ.get("FEDSSO_DATA", "")
RTOL = 1e-6  # what is promised; a fit is within 1e-8 standard errors of the maximum


def pooled_design(study: Study) -> pd.DataFrame:
    """All rows of the study as the regression sees them, with the outcome as "y"."""
    made = design(table(study.frame), study.schema, study.family)
    assert len(made.y) + made.dropped == len(study.frame)
    frame = pd.DataFrame(made.x, columns=[term.name for term in made.terms])
    frame["y"] = made.y
    frame["weights"] = made.weights
    frame["offset"] = made.offset
    if study.schema.time:
        frame["time"] = made.time
    return frame


def pooled(study: Study, scale: str | None = None) -> object:
    """statsmodels' fit of all rows, by Newton steps to rounding."""
    import statsmodels.api as sm

    families = {
        "binomial": sm.families.Binomial(),
        "gaussian": sm.families.Gaussian(),
        "poisson": sm.families.Poisson(),
    }
    frame = pooled_design(study)
    y, weights, offset = (frame.pop(name) for name in ("y", "weights", "offset"))
    family = families[study.family]
    model = sm.GLM(y, frame, family, offset=offset, var_weights=weights)
    return model.fit(tol=1e-14, maxiter=100, scale=scale)


def lifelines_fit(study: Study) -> object:
    """lifelines' fit with hospitals as strata."""
    from lifelines import CoxPHFitter

    names = [column.name for column in study.schema.columns]
    frame = study.frame.assign(hospital=study.hospital)[[*names, "status", "time", "hospital"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CoxPHFitter().fit(
            frame.dropna(),
            "time",
            "status",
            strata=["hospital"],
            fit_options={"precision": 1e-14, "r_precision": 1e-14, "max_steps": 100},
        )


def errors(found: Fit) -> np.ndarray:
    return np.sqrt(found.covariance.diagonal())


LINEAR: dict[str, Callable[[], Study]] = {
    "fair": fair,
    "randhie": randhie,
    "randhie gaussian": lambda: randhie("gaussian"),
    "small": small,
    "small gaussian": lambda: small(family="gaussian"),
    "small poisson": lambda: small(family="poisson"),
}
if DATA:
    LINEAR["heart"] = lambda: heart(DATA)


@pytest.mark.parametrize("name", LINEAR)
def test_the_fit_is_the_pooled_fit_of_statsmodels(name: str) -> None:
    study = LINEAR[name]()
    found = fitted(study)
    right = pooled(study)
    assert found.converged
    np.testing.assert_allclose(found.coefficients, right.params, rtol=RTOL)
    np.testing.assert_allclose(errors(found), right.bse, rtol=RTOL)
    np.testing.assert_allclose(found.covariance, right.cov_params(), rtol=1e-5, atol=1e-9)
    assert found.loglik == pytest.approx(right.llf, rel=1e-9)
    assert found.null_loglik == pytest.approx(pooled_null(study), rel=1e-9)
    assert found.deviance == pytest.approx(right.deviance, rel=1e-9)
    assert found.null_deviance == pytest.approx(right.null_deviance, rel=1e-9)
    assert found.rows == right.nobs
    assert found.residual_df == right.df_resid
    gaussian = study.family == "gaussian"  # R counts the variance as a parameter
    assert found.aic == pytest.approx(right.aic + 2 * gaussian, rel=1e-9)


def pooled_null(study: Study) -> float:
    """The log-likelihood of the intercept alone, by statsmodels."""
    right = pooled(study)
    model = right.model
    intercept = np.ones(len(model.endog))
    null = type(model)(
        model.endog,
        intercept,
        model.family,
        offset=pooled_design(study)["offset"],
        var_weights=model.var_weights,
    )
    return float(null.fit(tol=1e-14, maxiter=100).llf)


def test_cox_is_the_stratified_fit_of_lifelines() -> None:
    found = fitted(lung())
    right = lifelines_fit(lung())
    np.testing.assert_allclose(found.coefficients, right.params_, rtol=RTOL)
    np.testing.assert_allclose(errors(found), right.standard_errors_, rtol=RTOL)
    assert found.loglik == pytest.approx(right.log_likelihood_, rel=1e-9)
    assert found.rows == len(right.durations)
    assert found.events == right.event_observed.sum()


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_cox_with_many_ties_is_the_stratified_fit_of_statsmodels(ties: str) -> None:
    from statsmodels.duration.hazard_regression import PHReg

    study = small(family=f"cox {ties}")
    found = fitted(study)
    frame = pooled_design(study)
    y, time = frame.pop("y"), frame.pop("time")
    x = frame.drop(columns=["weights", "offset"])
    model = PHReg(time, x, y, ties=ties, strata=study.hospital)
    right = model.fit(method="newton", tol=1e-14, disp=0)
    np.testing.assert_allclose(found.coefficients, right.params, rtol=RTOL)
    np.testing.assert_allclose(errors(found), right.bse, rtol=RTOL)
    assert found.loglik == pytest.approx(right.llf, rel=1e-9)


@pytest.mark.parametrize("family", ["binomial", "gaussian", "poisson", "cox efron"])
def test_weights_and_offset(family: str) -> None:
    """A row of weight 2 counts as two rows, but for the errors of a gaussian model."""
    study = small(family=family)
    rng = np.random.default_rng(1)
    frame = study.frame.assign(
        w=rng.integers(1, 4, len(study.frame)), o=rng.normal(0, 0.4, len(study.frame))
    )
    schema = replace(study.schema, weights="w", offset="o")
    study = study._replace(frame=frame, schema=schema)
    found = fitted(study)
    if family.startswith("cox"):  # Breslow's ties take rows apart, Efron's do not
        study = study._replace(family="cox breslow")
        found = fitted(study)
        again = frame.index.repeat(frame["w"])
        twice = study._replace(
            frame=frame.loc[again].reset_index(drop=True),
            hospital=study.hospital.loc[again].reset_index(drop=True),
            schema=replace(schema, weights=""),
        )
        right = fitted(twice)
        np.testing.assert_allclose(found.coefficients, right.coefficients, rtol=RTOL)
        np.testing.assert_allclose(errors(found), errors(right), rtol=RTOL)
        return
    right = pooled(study)
    np.testing.assert_allclose(found.coefficients, right.params, rtol=RTOL)
    np.testing.assert_allclose(errors(found), right.bse, rtol=RTOL)
    assert found.null_loglik == pytest.approx(pooled_null(study), rel=1e-9)


def test_a_model_without_intercept() -> None:
    study = small()
    study = study._replace(schema=replace(study.schema, intercept=False))
    found = fitted(study)
    right = pooled(study)
    assert found.names[0] == "age"
    np.testing.assert_allclose(found.coefficients, right.params, rtol=RTOL)
    np.testing.assert_allclose(errors(found), right.bse, rtol=RTOL)


def test_clustered_errors_are_those_of_statsmodels() -> None:
    """statsmodels has a further factor (n - 1) / (n - p)."""
    import statsmodels.api as sm

    study = fair()
    found = fitted(study, cluster=True)
    right = pooled(study)
    groups = pd.factorize(study.hospital)[0]
    model = sm.GLM(right.model.endog, right.model.exog, sm.families.Binomial())
    clustered = model.fit(tol=1e-14, maxiter=100, cov_type="cluster", cov_kwds={"groups": groups})
    factor = (found.rows - 1) / (found.rows - len(found.terms))
    assert found.robust is not None
    np.testing.assert_allclose(np.sqrt(found.robust.diagonal() * factor), clustered.bse, rtol=RTOL)
    assert any("few hospitals" in note for note in found.notes)
    lines = coefficients(found, robust=True)
    assert lines[0].std_error == pytest.approx(np.sqrt(found.robust[0, 0]))
    # Six occupations: half an interval of Student's t with 5 degrees is 2.5706 standard errors.
    assert len(found.hospitals) == 6
    assert lines[0].high - lines[0].estimate == pytest.approx(2.570581836 * lines[0].std_error)


def test_p_values_and_intervals_are_those_of_statsmodels() -> None:
    """Normal for counts; Student's t for a gaussian model, as in R."""
    import statsmodels.api as sm

    study = small(family="poisson")
    right = pooled(study)
    lines = coefficients(fitted(study))
    np.testing.assert_allclose([line.p for line in lines], right.pvalues, rtol=1e-5)
    np.testing.assert_allclose(
        [(line.low, line.high) for line in lines], right.conf_int(), rtol=1e-5, atol=1e-7
    )
    study = small(family="gaussian", rows=40)
    frame = pooled_design(study)
    linear = sm.OLS(frame["y"], frame.drop(columns=["y", "weights", "offset"])).fit()
    lines = coefficients(fitted(study), level=0.9)
    np.testing.assert_allclose([line.p for line in lines], linear.pvalues, rtol=1e-6)
    np.testing.assert_allclose(
        [(line.low, line.high) for line in lines], linear.conf_int(0.1), rtol=1e-6
    )
