"""Data sets, partitions and federations."""

from __future__ import annotations

from .federation import Federation as Federation
from .partition import PARTITIONS as PARTITIONS
from .partition import TABLES as TABLES
from .sources import DataSet as DataSet
from .sources import datasets as datasets
from .sources import load as load
from .synthetic import quadratic as quadratic
