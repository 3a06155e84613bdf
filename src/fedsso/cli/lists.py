"""The commands `fedsso algorithms` and `fedsso costs`: what there is, and what a round costs.

Neither reads data or trains anything. `algorithms` shows the fields of the registered records,
and `costs` what `experiment.costs` measures.
"""

from __future__ import annotations

from dataclasses import fields
from inspect import getdoc
from typing import TYPE_CHECKING, Annotated, Any, cast

import click
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..algorithms import ALGORITHMS
from ..errors import unknown
from ..experiment.costs import costs as measure_costs
from ..models import MODELS
from ..version import __version__
from .config import flag
from .flags import Json
from .options import Several
from .screen import print_json, print_table
from .view import cost_document, cost_table

if TYPE_CHECKING:
    from ..algorithm import Algorithm

# How the texts of two options are read: with commas between.
NAMES = Several(click.STRING)
SHAPE = Several(click.INT)


def algorithms(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Only these algorithms. By default all.", metavar="[NAME]..."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the algorithms and their hyper-parameters.

    Example: fedsso algorithms scaffold giant
    """
    for name in names or ():
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
    rows = [_describe(name, ALGORITHMS[name]) for name in names or ALGORITHMS]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print_table(_fields_table(row))


def _describe(name: str, cls: type[Algorithm]) -> dict[str, Any]:
    """An algorithm and its hyper-parameters, as plain values.

    The title is the first line of the class's docstring. The explanation of each field comes from
    its declaration.
    """
    # Only what a class says of itself: nothing about an algorithm is written down twice.
    title = (getdoc(cls) or "").partition("\n")[0]
    own = []
    for field in fields(cast(Any, cls)):
        plain = {"name": field.name, "type": field.type, "default": field.default}
        own.append({**plain, **field.metadata})
    return {"name": name, "title": title, "needs_all": cls.needs_all, "fields": own}


def _fields_table(row: dict[str, Any]) -> Table:
    """The hyper-parameters of one algorithm, a line for each, named as options."""
    title = f"{row['name']}: {row['title']}"
    if row["needs_all"]:
        title += f" It needs all clients in every round; {row['needs_all']} does not."
    table = Table(
        "option",
        "default",
        "meaning",
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for field in row["fields"]:
        default = field["default"]
        shown = "none" if default is None else str(default)
        table.add_row(flag(field["name"]), shown, field["doc"])
    return table


def costs(
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "mclr",
    algorithms: Annotated[
        Any, typer.Option(help="Comma-separated names, or all.", click_type=NAMES)
    ] = "all",
    sample: Annotated[
        Any, typer.Option(help="Shape of one row of the data.", click_type=SHAPE)
    ] = "1,28,28",
    classes: Annotated[int, typer.Option(help="Number of model outputs.")] = 10,
    compress: Annotated[
        str | None, typer.Option(help="Compression of uploads: topk:SHARE, int8 or rank:R.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the cost of a round: bytes sent and stored, measured and in theory.

    Example: fedsso costs --model cnn --algorithms fedsso,fedavg --compress int8

    Upper lines are measured: what the algorithm's own functions send and store,
    in float32 bytes per participating client. Lower lines are theory: the
    papers' counts without compression, for a model with d parameters.

    n_c: multiples of a FedAvg round, down and up (8 d bytes).
    n_m: multiples of a model (4 d bytes), which is all that FedAvg's server keeps.
    "Keeps" means: until the next round. Working memory does not count. What a
    server remembers of every client is told below the table. All clients answer
    in this round; where some are absent fedsso remembers 2 d numbers of each.

    Nothing is trained and no data are read, so any size of model is possible.
    """
    # None stands for the whole registry.
    names = None if algorithms == ["all"] else algorithms
    shape = {"sample": sample, "classes": classes, "compress": compress}
    bill = measure_costs(model, names, **shape)
    if as_json:
        # The arguments are part of the document, so that it can be understood by itself.
        document = {
            "version": __version__,
            "model": model,
            "d": bill.d,
            **shape,
            "results": cost_document(bill),
        }
        print_json(document)
        return
    title = f"{model}, d = {bill.d}: bytes of a round for each client (below: theory)"
    print_table(cost_table(bill, title))
