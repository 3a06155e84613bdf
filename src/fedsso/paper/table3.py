"""The paper's Table 3, measured: bytes sent in a round and bytes kept, beside its formulas.

    n_c  bytes that FedAvg sends in a round, down and up: 2 x 4 d
    n_m  bytes of one model: 4 d

The memory of a client is what it keeps from round to round; the paper also counts the model that it
works on. The paper's squares are meant as d x d numbers: the square of a number of bytes is no
number of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import models
from ..algorithms import make
from ..experiment.costs import META, Bill, Cost, Work, measure
from ..objective import Layout
from ..support.files import check_writable, records_to_csv, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = (1, 28, 28)
"""The shape of an image of MNIST: channels, rows, columns."""
CLASSES = 10
"""The number of classes of MNIST."""
MODELS = ("mclr", "cnn")
"""The paper's two models, d = 7 850 and 6 230."""


class Printed(NamedTuple):
    """What the paper prints for one algorithm: formulas in n_c and n_m.

    They are empty for an algorithm that its table does not have.
    """

    round: str = ""
    """What is sent in a round, down and up."""
    server: str = ""
    """What the server keeps."""
    client: str = ""
    """What a client keeps, with the model that it works on."""


class Entry(NamedTuple):
    """One row of our table: an algorithm with those hyper-parameters that its costs depend on."""

    label: str
    """What the table calls it."""
    algorithm: str
    """The name of the algorithm in the registry."""
    values: dict[str, Any]
    """The algorithm's hyper-parameters. Others have their defaults."""
    paper: Printed
    """What the paper prints for it."""
    remark: str
    """Where the paper's formulas are off, and what else there is to know."""


# What the paper prints for several rows, and a remark that two rows share.
DOUBLE = Printed("2n_c", "2n_m", "2n_m")
FEDNL = Printed("n_c²", "2n_m² + 2n_m", "n_m² + 2n_m")
FEDSSO = Printed("n_c", "n_m² + 4n_m", "n_m")
PAIRS = (
    "vectors and their products, all room taken at the start; "
    "after k rounds 2 min(k-1, {0}) vectors are in use"
)
ENTRIES = (
    Entry("FedAvg", "fedavg", {}, Printed("n_c", "n_m", "n_m"), "a client keeps nothing"),
    Entry("SCAFFOLD", "scaffold", {}, DOUBLE, "a client keeps its control variate alone"),
    Entry("FedDANE", "feddane", {}, DOUBLE, "a client keeps nothing; the round has two exchanges"),
    Entry(
        "FedNL, no compressor",
        "fednl",
        {"option": 2, "first": "zero", "compressor": "none"},
        FEDNL,
        "twice too much: a symmetric matrix is d(d+1)/2 numbers and goes up only; "
        "one matrix, not two, at the server; Table 2 charges n_c",
    ),
    Entry(
        "FedNL, rank 1",
        "fednl",
        {"option": 2, "first": "zero", "compressor": "rank:1"},
        FEDNL,
        "sends 2d + 2 numbers up; the matrices are kept all the same",
    ),
    Entry(
        "FedSSO, dense BFGS",
        "fedsso",
        {"alpha": 0.01, "form": "bfgs-dense"},
        FEDSSO,
        "three vectors besides the matrix: x, g and the last step; a client keeps nothing",
    ),
    Entry(
        "FedSSO, 200 pairs",
        "fedsso",
        {"alpha": 0.01, "form": "bfgs", "pairs": 200},
        FEDSSO,
        f"the same step without a matrix: 405 {PAIRS.format(200)}",
    ),
    Entry(
        "FedSSO, L-BFGS, m = 20",
        "fedsso",
        {"alpha": 0.01, "form": "lbfgs", "m": 20},
        FEDSSO,
        f"no matrix: 45 {PAIRS.format(20)}",
    ),
    Entry("FedAC", "fedac", {}, Printed(), "not in the paper's table; two models travel each way"),
    Entry(
        "FedAdaGrad",
        "fedadagrad",
        {},
        Printed(),
        "not in the paper's table; momentum and squares at the server",
    ),
)
LEGEND = (
    "Measured in float32 on the second round. "
    "n_c: bytes that FedAvg sends in a round, down and up, 8d; n_m: bytes of one model, 4d. "
    "A client's memory is what it keeps from round to round; "
    "the paper also counts the model it works on. "
    "The paper's squares are meant as d × d numbers."
)
HEADER = (
    "| algorithm | exchanges | round | n_c | paper | server keeps | n_m | paper "
    "| client keeps | n_m | paper | where the paper is off, and notes |\n"
    "|---|---:|---:|---:|---|---:|---:|---|---:|---:|---|---|"
)


def table3(out: Path) -> None:
    """Measure the paper's two models and write table3.md and table3.csv into a folder.

    Nothing is trained: tensors without memory go through one round of each algorithm, and the bytes
    that they would have are counted. So it takes seconds, FedNL's d x d matrices included.

    Args:
        out: The folder. Earlier files of these names are replaced.

    Raises:
        InputError: The folder cannot be written.
    """
    check_writable(out)
    rows = []
    for model in MODELS:
        rows += _rows(model)
    write_atomic(out / "table3.csv", records_to_csv(rows))
    write_atomic(out / "table3.md", _markdown(rows))


def _rows(model: str) -> list[dict[str, Any]]:
    """Every entry measured for a model, one row each, as plain values.

    Bytes are whole numbers, multiples of FedAvg's are floats, the paper's formulas are text.
    """
    with META:  # tensors without memory: only shapes matter
        module = models.build(model, SAMPLE, CLASSES)
    # Nothing is compressed here. FedNL's own compressor belongs to its hyper-parameters.
    work = Work(SAMPLE, None)
    bill = Bill(sum(Layout.of(module).sizes), [])
    rows = []
    with torch.no_grad():
        for entry in ENTRIES:
            record = make(entry.algorithm, entry.values)
            rows.append(_row(model, bill, entry, measure(record, module, work)))
    return rows


def _row(model: str, bill: Bill, entry: Entry, cost: Cost) -> dict[str, Any]:
    """One entry as plain values, by the names that the columns of table3.csv have.

    These are bytes, their multiples of FedAvg's, and what the paper prints.
    """
    units = bill.relative(cost)
    return {
        "model": model,
        "d": bill.d,
        "algorithm": entry.label,
        **cost._asdict(),
        "round": cost.down + cost.up,
        "round_n_c": units["round"],
        "server_n_m": units["server"],
        "client_n_m": units["client"],
        "paper_round": entry.paper.round,
        "paper_server": entry.paper.server,
        "paper_client": entry.paper.client,
        "remark": entry.remark,
    }


def _markdown(rows: list[dict[str, Any]]) -> str:
    """The page: a legend, then a table for each model.

    Behind each number of bytes stand its multiple of FedAvg's and what the paper prints.
    """
    parts = [f"# Table 3: bytes of a round and bytes kept, one client\n\n{LEGEND}\n"]
    for model in MODELS:
        own = [row for row in rows if row["model"] == model]
        lines = "\n".join([HEADER, *map(_line, own)])
        parts.append(f"## {model}, d = {_count(own[0]['d'])}\n\n{lines}\n")
    return "\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    """A row of the Markdown table.

    For the round, the server and the client: bytes, their multiple of FedAvg's, the paper's entry.
    """
    cells = [row["algorithm"], str(row["exchanges"])]
    for name, unit in (("round", "n_c"), ("server", "n_m"), ("client", "n_m")):
        cells.append(_count(row[name]))
        cells.append(_multiple(row[f"{name}_{unit}"]))
        cells.append(row[f"paper_{name}"] or "–")
    cells.append(row["remark"])
    return "| " + " | ".join(cells) + " |"


def _count(number: int) -> str:
    """A number with a space between thousands.

    >>> _count(7850)
    '7 850'
    """
    return f"{number:,}".replace(",", " ")


def _multiple(value: float) -> str:
    """A multiple of FedAvg's bytes as text, with decimals where it is below 100."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
