"""What a regression over hospitals is to the person who asked for it.

`Regression` prints, draws, saves and predicts. It holds a `Fit`, which has all numbers and nothing
of a row. The table of coefficients is made here; `printed` turns it into text, `model` into files,
and `report.regression` into a page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, isfinite, isinf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InputError, number
from ...support.files import write_atomic
from .. import schema as schemas
from ..design import INTERCEPT
from ..families import Family, named
from ..inference import coefficients, degrees, quantile
from ..outcome import COX
from ..questions import Array
from ..records import Assessment, Fit
from .predict import Predictions, predicted, table_of
from .printed import csv_text, html_table, latex_table, summary_text

if TYPE_CHECKING:
    import pandas as pd

    from ..schema import Schema

MEASURES = {
    "events": "events",
    "observed": "observed",
    "expected": "expected",
    "auc": "AUC",
    "brier": "Brier score",
    "concordance": "concordance",
    "r_squared": "R squared",
    "rmse": "RMSE",
    "slope": "calibration slope",
    "intercept": "calibration intercept",
}
"""What is known of the predictions in one hospital, with the names of the columns of a table."""


class Coefficient(NamedTuple):
    """One line of the table of coefficients, in the unit of its column."""

    term: str
    unit: str
    estimate: float
    std_error: float
    statistic: float
    """The estimate in standard errors: z, or t for a gaussian model and for clustered errors."""
    p: float
    """Of the hypothesis that the coefficient is 0, two-sided."""
    low: float
    high: float
    ratio: float = nan
    """The exponential of the estimate. NaN for an intercept, and for a gaussian model."""
    ratio_low: float = nan
    ratio_high: float = nan


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression across hospitals: coefficients, standard errors, and the fit at each hospital.

    `fedsso.glm` makes one, and `fedsso.load_model` reads one back. `print(result)` shows the
    summary, as R does.

    Attributes:
        fit: All numbers. They are sums over hospitals: nothing in them is of a single row.

    >>> import fedsso
    >>> import pandas as pd
    >>> north = pd.DataFrame({"dose": range(20), "days": [3 + 2 * d + d % 3 for d in range(20)]})
    >>> south = pd.DataFrame({"dose": range(15), "days": [5 + 2 * d - d % 2 for d in range(15)]})
    >>> result = fedsso.glm({"north": north, "south": south}, "gaussian", "days")
    >>> result.hospitals()["rows"].tolist()
    [20, 15]
    >>> result.predict(pd.DataFrame({"dose": [4.5]})).round(1)["prediction"].tolist()
    [13.2]
    >>> print(result.to_csv().splitlines()[0])
    term,unit,estimate,std_error,t,p,low,high
    """

    fit: Fit

    # ---- what it is ----

    @cached_property
    def schema(self) -> Schema:
        """The columns of the tables, as all hospitals agreed on them."""
        return schemas.parse(self.fit.schema)

    @cached_property
    def family(self) -> Family:
        """The family: its name, what a ratio is called, and the mean of a prediction."""
        return named(self.fit.family)

    @property
    def converged(self) -> bool:
        """Whether the fit reached its tolerance. If not, the notes say why."""
        return self.fit.converged

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the results should know, hospitals that refused among it."""
        return self.fit.notes

    @property
    def covariance(self) -> Array:
        """Of the coefficients [p, p]: the sandwich, if that was asked for."""
        return self.fit.covariance if self.fit.robust is None else self.fit.robust

    @property
    def _degrees(self) -> float:
        """The degrees of freedom of all tests and intervals."""
        return degrees(self.fit, robust=self.fit.robust is not None)

    # ---- tables ----

    def rows(self, level: float = 0.95) -> list[Coefficient]:
        """The table of coefficients, line by line, with intervals of this level."""
        found = []
        robust = self.fit.robust is not None
        for term, *numbers in coefficients(self.fit, checked_level(level), robust=robust):
            line = Coefficient(term.name, term.unit, *numbers)
            if self.family.ratio and term.name != INTERCEPT:
                line = line._replace(
                    ratio=_exp(line.estimate),
                    ratio_low=_exp(line.low),
                    ratio_high=_exp(line.high),
                )
            found.append(line)
        return found

    def coefficients(self, level: float = 0.95, ratios: bool = True) -> pd.DataFrame:
        """The coefficients as a data frame, one row for each term.

        Args:
            level: Of the intervals, such as 0.95.
            ratios: Whether to add the odds, rate or hazard ratios, where the family has some.

        Returns:
            The columns term, unit, estimate, std_error, z (t of a gaussian model, and where errors
            are clustered), p, low and high; then ratio, ratio_low and ratio_high.
        """
        import pandas as pd

        names = self.columns(ratios)
        return pd.DataFrame([row[: len(names)] for row in self.rows(level)], columns=names)

    def columns(self, ratios: bool = True) -> list[str]:
        """The names of the columns of the table of coefficients."""
        names = list(Coefficient._fields)
        names[names.index("statistic")] = "z" if isinf(self._degrees) else "t"
        return names if ratios and self.family.ratio else names[:-3]

    def measures(self) -> dict[str, str]:
        """What is known of every hospital: the names of the numbers, and what people call them."""
        found = {}
        for name, title in MEASURES.items():
            if any(isfinite(getattr(one, name)) for one in self.fit.hospitals):
                found[name] = title
        if self.family.name == COX:
            # Every hospital has a baseline of its own, by which both are the events.
            del found["observed"], found["expected"]
        elif all(one.events == one.observed for one in self.fit.hospitals):
            del found["events"]  # they are the observed outcomes
        return found

    @cached_property
    def assessments(self) -> tuple[Assessment, ...]:
        """What is known of every hospital, in the order of their names: 9 comes before 10."""
        return tuple(sorted(self.fit.hospitals, key=lambda one: _order(one.hospital)))

    def hospitals(self) -> pd.DataFrame:
        """How well the model predicts in every hospital, as a data frame.

        Returns:
            The columns hospital, rows and dropped (rows left out because of a gap); then, as far as
            the family has them, events, observed and expected outcome, auc, brier, concordance,
            r_squared, rmse, and slope and intercept of the calibration.
        """
        import pandas as pd

        names = ["hospital", "rows", "dropped", *self.measures()]
        lines = [_line(one, names) for one in self.assessments]
        return pd.DataFrame(lines, columns=names)

    # ---- text and files ----

    def summary(self, level: float = 0.95) -> str:
        """Everything worth reading as text, in the manner of R's `summary`."""
        return summary_text(self, checked_level(level))

    def to_csv(self, path: str | Path = "", level: float = 0.95) -> str:
        """The table of coefficients as CSV with a header and units; written to `path`, if given."""
        return _written(path, csv_text(self, checked_level(level)))

    def to_latex(self, path: str | Path = "", level: float = 0.95) -> str:
        """The table of coefficients for LaTeX (with booktabs); written to `path`, if given."""
        return _written(path, latex_table(self, checked_level(level)))

    def save(self, folder: str | Path, page: str = "") -> None:
        """Save a model that stands alone: `fedsso.load_model` and `fedsso predict` read it.

        Args:
            folder: It is made if it is not there. A model that lies there is replaced.
            page: The name of an HTML page in the folder, such as "report.html"; left out: none.
        """
        from .model import save

        save(self, folder, page)

    def report(self, path: str | Path, title: str = "") -> None:
        """Write one HTML page that needs no other file and no network."""
        from ...report.regression import write

        write(path, self, title)

    def plot(self, path: str | Path, level: float = 0.95, title: str = "") -> None:
        """Draw the coefficients with their intervals: a forest plot as PNG, PDF or SVG.

        Numbers are drawn for a step of one standard deviation, which the label names, since a
        single year or milligram would be too small to see.
        """
        from ...report.regression import plot

        plot(path, self, checked_level(level), title)

    def __repr__(self) -> str:
        explained = " + ".join(term.name for term in self.fit.terms if term.name != INTERCEPT)
        many = len(self.fit.hospitals)
        return (
            f"Regression({self.fit.family}, {self.schema.outcome} ~ {explained or 1}, {many} "
            f"hospitals, {self.fit.rows} rows)"
        )

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return html_table(self, 0.95)

    # ---- new patients ----

    def predict(self, data: Any, level: float = 0.95) -> pd.DataFrame:
        """Predict the outcome of new patients, with intervals.

        Args:
            data: A data frame, a `Table`, or the path of a CSV file, with the columns that explain.
                Their order does not matter, and others are ignored.
            level: Of the intervals.

        Returns:
            One row for each patient: `prediction` (a probability, a mean, a rate, or the hazard
            ratio to a patient with average numbers and reference levels) with `prediction_low` and
            `prediction_high`; then `linear_predictor` and its standard error `linear_std_error`.
            A patient has NaN who has a gap, where the schema leaves such rows out, or a level that
            no hospital had.
        """
        import pandas as pd

        found = self.predictions(data, level)
        index = data.index if isinstance(data, pd.DataFrame) else None
        return pd.DataFrame(found._asdict(), index=index)

    def predictions(self, data: Any, level: float = 0.95) -> Predictions:
        """The same as `predict`, as arrays."""
        wide = quantile(0.5 + checked_level(level) / 2, self._degrees)
        return predicted(self, table_of(data), wide)


def checked_level(level: float) -> float:
    """The level of an interval; InputError unless it lies between 0 and 1."""
    value = number("level", level)
    if not 0 < value < 1:
        raise InputError(f"level must lie between 0 and 1, such as 0.95, got level={level}")
    return value


def _line(one: Assessment, names: list[str]) -> list[Any]:
    """These values of a hospital."""
    return [getattr(one, name) for name in names]


def _order(name: str) -> list[tuple[int, str]]:
    """What names are sorted by: numbers within them count as numbers.

    >>> sorted(["site 10", "site 9"], key=_order)
    ['site 9', 'site 10']
    """
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _exp(value: float) -> float:
    """The exponential; infinite where it is beyond all numbers."""
    try:
        return exp(value)
    except OverflowError:
        return inf


def _written(path: str | Path, text: str) -> str:
    """The text, which is also written to a file unless the path is empty."""
    if str(path):
        write_atomic(path, text)
    return text
