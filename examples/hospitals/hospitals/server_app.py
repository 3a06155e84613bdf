"""The server: it asks all hospitals the questions of a regression, and writes the result."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsso.errors import InputError
from fedsso.flower.regression.server import Nodes
from fedsso.regression.fit import fit
from fedsso.regression.records import Round
from fedsso.regression.result import Regression
from hospitals import heart

log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Fit, print the summary, write what there is to keep."""
    config = context.run_config
    nodes = Nodes(grid, int(config["min-nodes"]), float(config["timeout"]))
    try:
        found = Regression(
            fit(
                nodes,
                schema_text(str(config["schema"])),
                str(config["family"]),
                rounds=int(config["rounds"]),
                progress=tell,
                cluster=bool(config["cluster"]),
            )
        )
        print(found.summary())
        print(told(nodes))
        if config["out"]:
            found.save(Path(str(config["out"])), "report.html")
    except InputError as error:
        log.error("there is no result: %s", error)
        raise


def schema_text(path: str) -> str:
    """The schema that all hospitals are asked with, as text."""
    return (Path(path) if path else heart.SCHEMA).read_text(encoding="utf-8")


def tell(one: Round) -> None:
    """Log a round."""
    log.info(
        "round %d: log-likelihood %.6f, %.2g standard errors from the maximum",
        one.round,
        one.loglik,
        one.distance,
    )


def told(nodes: Nodes) -> str:
    """How many messages there were."""
    parts = ", ".join(f"{count} {name}" for name, count in nodes.asked.items())
    return f"messages to each hospital: {sum(nodes.asked.values())} ({parts})"
