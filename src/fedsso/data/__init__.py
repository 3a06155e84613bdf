"""Data sets, partitions and federations."""

from __future__ import annotations

from .catalogue import datasets as datasets
from .catalogue import load as load
from .federation import Federation as Federation
from .partition import PARTITIONS as PARTITIONS
from .partition import TABLES as TABLES
from .sources import DataSet as DataSet
from .sources import data_folder as data_folder
from .synthetic import quadratic as quadratic
