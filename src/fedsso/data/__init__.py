"""Data sets, partitions and federations: which rows there are, and which client holds them.

Begin with `load`, which makes a `Federation` from a named data set, or with the `from_...` methods
of `Federation`, which take your own data.
"""

from __future__ import annotations

from .catalogue import all_options as all_options
from .catalogue import datasets as datasets
from .catalogue import load as load
from .federation import Federation as Federation
from .options import Option as Option
from .partition import PARTITIONS as PARTITIONS
from .partition import TABLES as TABLES
from .sources import DataSet as DataSet
from .sources import data_folder as data_folder
from .synthetic import quadratic as quadratic
