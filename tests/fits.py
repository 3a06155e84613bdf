"""Fits worked out without a federation: Newton's method on rows made by a formula."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np

from fedsso.regression.design import Table, design
from fedsso.regression.families import named
from fedsso.regression.questions import Refusal
from fedsso.regression.records import Assessment, Fit, Group, Round, Threshold
from fedsso.regression.schema import parse

SCHEMA = """
outcome = "ill"
positive = "yes"

[columns.age]
type = "number"
unit = "years"

[columns.stage]
type = "category"
levels = ["I", "II", "III"]

[columns.smoker]
type = "yesno"
"""
HOSPITALS = ("Graz", "Linz", "Ulm")


def table(hospital: int, rows: int = 80) -> Table:
    """A hospital's table: no two are alike, and nothing separates the outcomes."""
    found = []
    for i in range(rows):
        age = 40 + (17 * i + 5 * hospital) % 41 + 0.25 * hospital
        stage = ("I", "II", "III")[(i * i + hospital) % 3]
        smoker = ("no", "yes")[(i // 3 + hospital) % 2]
        risk = (age - 60) / 25 + 0.4 * ("I", "II", "III").index(stage) + 0.3 * (smoker == "yes")
        chance = ((29 * i + 7 * hospital) % 60) / 60  # even over the rows
        ill = "yes" if chance < 1 / (1 + np.exp(0.5 - risk)) else "no"
        found.append([f"{age}", stage, smoker, ill])
    return Table(("age", "stage", "smoker", "ill"), found, f"{HOSPITALS[hospital]}.csv")


def binomial(**changes: Any) -> Fit:
    """The pooled logistic regression of the three tables, as a federation would hand it over."""
    family = named("binomial")
    schema = parse(SCHEMA)
    every = [design(table(i), schema, "binomial") for i in range(3)]
    x = np.concatenate([one.x for one in every])
    y = np.concatenate([one.y for one in every])
    w = np.zeros(x.shape[1])
    for _ in range(30):
        mu = family.mean(x @ w)
        information = (x * (mu * (1 - mu))[:, None]).T @ x
        w = w + np.linalg.solve(information, x.T @ (y - mu))
    loglik = float(np.sum(y * (x @ w) - np.logaddexp(0, x @ w)))
    share = y.mean()
    null = float(len(y) * (share * np.log(share) + (1 - share) * np.log(1 - share)))
    scaled = np.array([term.scaled for term in every[0].terms])
    trace = [Round(k, loglik - (loglik - null) * 4.0**-k, 40 * 3.0**-k, 3.0**-k) for k in range(9)]
    made: dict[str, Any] = {
        "family": "binomial",
        "schema": SCHEMA,
        "terms": every[0].terms,
        "coefficients": w,
        "covariance": np.linalg.inv(information),
        "robust": None,
        "mean": np.where(scaled, x.mean(0), 0.0),
        "deviation": np.where(scaled, x.std(0), 1.0),
        "loglik": loglik,
        "null_loglik": null,
        "deviance": -2 * loglik,
        "null_deviance": -2 * null,
        "aic": 2 * len(w) - 2 * loglik,
        "dispersion": 1.0,
        "residual_df": len(y) - len(w),
        "rows": len(y),
        "events": float(y.sum()),
        "dropped": 2,
        "rounds": 9,
        "bytes_up": 1500,
        "bytes_down": 12_000,
        "trace": tuple(trace),
        "hospitals": tuple(
            assessment(name, one.x @ w, one.y) for name, one in zip(HOSPITALS, every, strict=True)
        ),
        "refusals": (Refusal("Wels", "fewer than 10 complete rows"),),
        "notes": ("Wels is excluded: fewer than 10 complete rows.",),
        "converged": True,
        "distance": 1e-9,
    }
    return Fit(**{**made, **changes})


def assessment(name: str, eta: Any, y: Any) -> Assessment:
    """How well the predictions fit in one hospital. Slope and intercept are left out."""
    p = 1 / (1 + np.exp(-eta))
    order = np.argsort(p, kind="stable")
    groups = [Group(len(i), float(p[i].mean()), float(y[i].mean())) for i in np.split(order, 8)]
    points = []
    for threshold in np.linspace(0, 1, 21):
        above = p >= threshold
        caught = float(above[y == 1].mean())
        spared = float((~above)[y == 0].mean())
        points.append(Threshold(float(threshold), caught, spared))
    pairs = p[y == 1][:, None] - p[y == 0][None]
    return Assessment(
        name,
        rows=len(y),
        events=float(y.sum()),
        dropped=0,
        loglik=nan,
        observed=float(y.sum()),
        expected=float(p.sum()),
        auc=float(((pairs > 0) + 0.5 * (pairs == 0)).mean()),
        brier=float(((p - y) ** 2).mean()),
        calibration=tuple(groups),
        roc=tuple(points),
    )
