"""Tables of four studies, split by a natural group, as hospitals that answer in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedsso.errors import InputError
from fedsso.regression import schema as schemas
from fedsso.regression.design import Table
from fedsso.regression.fit import fit
from fedsso.regression.hospital import Hospital
from fedsso.regression.limits import UNLIMITED, Limits
from fedsso.regression.questions import Answer, Ask, Question, Refusal
from fedsso.regression.records import Fit
from fedsso.regression.schema import Column, Schema

OPEN = replace(UNLIMITED, min_cell=3)
"""Answers whatever is asked."""


class Study(NamedTuple):
    """A table of all rows, and how a regression sees it."""

    frame: pd.DataFrame
    hospital: pd.Series
    """The hospital of each row."""
    schema: Schema
    family: str


def table(frame: pd.DataFrame) -> Table:
    """A data frame as a table of text, with all digits; a gap is an empty cell."""
    columns = []
    for name in frame.columns:
        cells = frame[name].tolist()
        columns.append(["" if pd.isna(cell) else str(cell) for cell in cells])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return Table(tuple(frame.columns), rows)


def hospitals(
    study: Study,
    limits: Limits = OPEN,
    only: Sequence[str] | None = None,
) -> dict[str, Hospital]:
    """The hospitals of a study, by name."""
    names = sorted(set(study.hospital)) if only is None else only
    return {
        name: Hospital(name, table(study.frame[study.hospital == name]), limits) for name in names
    }


def asking(room: Mapping[str, Hospital]) -> Ask:
    """Asks hospitals in this process, as a network would: an error becomes a refusal."""

    def ask(question: Question) -> list[Answer | Refusal]:
        heard: list[Answer | Refusal] = []
        for name, hospital in room.items():
            try:
                heard.append(hospital.answer(question))
            except InputError as error:
                heard.append(Refusal(name, error.public))
        return heard

    return ask


def toml(study: Study, **changes: object) -> str:
    """The study's schema as text, perhaps changed."""
    return schemas.write(replace(study.schema, **changes))  # type: ignore[arg-type]


def fitted(study: Study, **options: object) -> Fit:
    """The fit over the study's hospitals."""
    ask = asking(hospitals(study))
    return fit(ask, toml(study), study.family, **options)  # type: ignore[arg-type]


def numbers(*names: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(name, "number") for name in names)


def small(
    seed: int = 0,
    rows: int = 240,
    family: str = "binomial",
) -> Study:
    """A made-up study of three hospitals with a number, a yes/no column and a category."""
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 10, rows).round(1)
    smoker = rng.random(rows) < 0.4
    stage = rng.choice(["I", "II", "III"], rows)
    eta = 0.05 * (age - 50) + 0.7 * smoker + 0.5 * (stage == "III") - 0.3
    frame = pd.DataFrame({"age": age, "smoker": np.where(smoker, "yes", "no"), "stage": stage})
    columns = (
        Column("age", "number", unit="years"),
        Column("smoker", "yesno"),
        Column("stage", "category", levels=("I", "II", "III")),
    )
    time = ""
    if family == "gaussian":
        frame["y"] = 3 + eta + rng.normal(0, 1.3, rows)
    elif family == "poisson":
        frame["y"] = rng.poisson(np.exp(eta))
    else:
        frame["y"] = (rng.random(rows) < 1 / (1 + np.exp(-eta))).astype(int)
    if family.startswith("cox"):
        frame["days"] = np.ceil(20 * rng.exponential(np.exp(-eta)))  # with many ties
        time = "days"
    where = pd.Series(rng.choice(["east", "north", "west"], rows))
    return Study(frame, where, Schema("y", columns, time=time), family)


def fair() -> Study:
    """Affairs of 6366 women, by their occupation."""
    from statsmodels.datasets import fair as source

    frame = source.load_pandas().data
    frame["affair"] = (frame.pop("affairs") > 0).astype(int)
    occupation = frame.pop("occupation").astype(int)
    frame["occupation_husb"] = frame["occupation_husb"].astype(int).astype(str)
    names = ("rate_marriage", "age", "yrs_married", "children", "religious", "educ")
    levels = tuple(sorted(set(frame["occupation_husb"])))
    work = Column("occupation_husb", "category", levels=levels)
    return Study(
        frame,
        "occupation " + occupation.astype(str),
        Schema("affair", (*numbers(*names), work)),
        "binomial",
    )


def randhie(family: str = "poisson") -> Study:
    """Visits to the doctor of 20190 people, by how they rate their health."""
    from statsmodels.datasets import randhie as source

    frame = source.load_pandas().data
    frame["mdvis"] = frame["mdvis"].astype(int)
    rated = frame["hlthg"] + 2 * frame["hlthf"] + 3 * frame["hlthp"]
    names = [name for name in frame.columns if name != "mdvis"]
    words = rated.astype(int).map({0: "excellent", 1: "good", 2: "fair", 3: "poor"})
    return Study(frame, words, Schema("mdvis", numbers(*names)), family)


def lung(family: str = "cox efron") -> Study:
    """Survival of patients with lung cancer, by the institution that entered them."""
    from lifelines.datasets import load_lung

    frame = load_lung().dropna(subset=["inst"])
    where = "institution " + frame.pop("inst").astype(int).astype(str)
    frame["status"] = frame["status"].astype(int)
    names = ("age", "sex", "ph.ecog", "ph.karno", "pat.karno", "meal.cal", "wt.loss")
    schema = Schema("status", numbers(*names), time="time")
    return Study(frame.reset_index(drop=True), where.reset_index(drop=True), schema, family)


HEART = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
)


def heart(folder: str) -> Study:
    """Heart disease in four hospitals; columns that hospitals lack altogether are left out."""
    frames = []
    for place in ("cleveland", "hungarian", "switzerland", "va"):
        one = pd.read_csv(f"{folder}/processed.{place}.data", names=HEART, na_values="?")
        frames.append(one.assign(place=place))
    frame = pd.concat(frames, ignore_index=True)
    frame["disease"] = np.where(frame["num"] > 0, "yes", "no")
    frame["cp"] = frame["cp"].astype(int).astype(str)
    frame["restecg"] = frame["restecg"].map({0: "normal", 1: "wave", 2: "hypertrophy"})
    columns = (
        *numbers("age", "sex"),
        Column("cp", "category", levels=("1", "2", "3", "4"), reference="4"),
        *numbers("trestbps", "chol", "fbs"),
        Column("restecg", "category", levels=("normal", "wave", "hypertrophy")),
        *numbers("thalach", "exang", "oldpeak"),
    )
    return Study(frame, frame.pop("place"), Schema("disease", columns), "binomial")
