"""What a hospital does with a message: it answers a question about its own table.

On a SuperNode the hospital's own configuration names its folder, see
`fedsso.flower.regression.own`. In a simulation node i stands for the i-th table of one folder.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context

from fedsso.errors import InputError
from fedsso.flower.regression import own
from fedsso.flower.regression.client import hospital_app
from fedsso.regression.design import Table, read_table
from hospitals import heart

KINDS = (".csv", heart.KIND)


def find(context: Context) -> own.Own:
    """The hospital of a node."""
    if "partition-id" in context.node_config:
        number = int(context.node_config["partition-id"])
        return simulated(number, str(context.run_config["files"]))
    return own.hospital(context, read, KINDS)


def simulated(number: int, files: str) -> own.Own:
    """One of the tables in a folder, or of the hospitals of heart disease, by its number."""
    tables = heart.files() if not files else _tables(Path(files).expanduser())
    if number >= len(tables):
        raise InputError(
            f"there is no table {number + 1}, only {len(tables)}; simulate with "
            f"num-supernodes={len(tables)}",
            public=f"there are {len(tables)} tables: simulate with so many num-supernodes",
        )
    path = tables[number]
    return own.Own(heart.name(path), lambda: read(path))


def read(path: Path) -> Table:
    """A hospital's table: a CSV file, or a file of UCI heart disease, which has no header."""
    return heart.read(path) if path.suffix == heart.KIND else read_table(path)


def _tables(folder: Path) -> list[Path]:
    """The tables in a folder, by their names."""
    found = sorted(path for path in folder.glob("*") if path.suffix in KINDS)
    if not found:
        raise InputError(
            f"{folder} has no files *.csv; say another folder with files",
            public="the folder of the simulation has no tables",
        )
    return found


app = hospital_app(find)
