"""What `run`, `compare` and `sweep` do before they run: check everything, then write the settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..algorithm import Algorithm
from ..algorithms import ALGORITHMS
from ..data import Federation, load
from ..errors import InputError
from ..experiment import execute as experiment
from ..experiment.problem import Context, context
from ..experiment.results import CHECKPOINT, TRACE
from ..experiment.settings import complete
from ..report.page import check_targets
from ..support.files import check_writable, to_toml, write_atomic
from . import config as cli_config
from .live import check_tensorboard
from .replace import check_folder, check_settings
from .screen import say

log = logging.getLogger("fedsso")
PICTURE = "curves.png"
OF_RUNS = (
    PICTURE,
    TRACE,
    CHECKPOINT,
    f"*/{TRACE}",
    f"*/{CHECKPOINT}",
)  # what run and compare leave, beside the specs

Config = Annotated[
    Path | None, typer.Option(help="TOML file with settings; options given here win.")
]
SaveConfig = Annotated[
    Path | None,
    typer.Option(
        help="Write the settings in force to this TOML file, which must not be there yet."
    ),
]
Live = Annotated[
    bool, typer.Option("--live", help="On a terminal: a dashboard of all runs while they train.")
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        callback=check_tensorboard,
        help="Write every round's numbers there for TensorBoard, while the runs train.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what is done and why.")]


class Plan(NamedTuple):
    """Checked settings and the objects behind them."""

    settings: Any
    live: Context
    grids: dict[
        str, list[Algorithm]
    ]  # one record for each algorithm, or for a sweep all of its grid
    options: dict[str, Any]
    left_out: dict[str, str]  # why an algorithm of "all" cannot run here
    table: dict[str, Any]  # the settings in force, as a file

    @property
    def fed(self) -> Federation:
        """The data."""
        return self.live.fed

    @property
    def records(self) -> list[Algorithm]:
        """All that are to run."""
        return [record for own in self.grids.values() for record in own]


def plan(
    ctx: typer.Context, config: Path | None, key: str, base: type[cli_config.Base] = cli_config.Base
) -> Plan:
    """Everything that can be wrong with the settings is found here; nothing is written."""
    given = ctx.obj
    settings = cli_config.settings(config, given["run"], given["data"], base)
    check_targets(targets_of(settings))
    chosen = getattr(settings, key)
    names = (
        list(ALGORITHMS) if chosen == ["all"] else [chosen] if isinstance(chosen, str) else chosen
    )
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"{key} must list different names, at least one; got {', '.join(names) or 'none'}"
        )
    grids = cli_config.records(settings, names, given["hyper"])
    fed = _federation(settings, config, given["data"])
    full = complete({**settings.options, "seed": settings.seeds[0]})
    live = context(fed, settings.model, full)
    live.check(full)
    left_out = _unsuited(grids, live, full)
    if left_out and chosen != ["all"]:
        raise InputError(next(iter(left_out.values())))
    grids = {name: own for name, own in grids.items() if name not in left_out}
    table = {key: chosen, **cli_config.effective(settings, fed, full, grids)}
    return Plan(settings, live, grids, settings.options, left_out, table)


def targets_of(settings: Any) -> list[float]:
    """The accuracies that were asked for."""
    if isinstance(settings, cli_config.Sweep):
        return [] if settings.target is None else [settings.target]
    return settings.targets or []


def _federation(settings: Any, config: Path | None, given: Mapping[str, Any]) -> Federation:
    """The data, and on standard error what is to be known of them."""
    wish = settings.data.given()
    fed = load(wish.pop("dataset", settings.data.dataset), **wish)
    for line in (repr(fed), *(f"note: {note}" for note in fed.notes)):
        say(line)
    recorded = (settings.record or {}).get("digest")
    if recorded and not given and recorded != fed.digest():
        log.warning("the data have changed since %s was written: this is another run", config)
    return fed


def _unsuited(
    grids: Mapping[str, Sequence[Algorithm]], live: Context, options: Mapping[str, Any]
) -> dict[str, str]:
    """Why some of the algorithms cannot run with this model and these cohorts."""
    reasons = {}
    for name, own in grids.items():
        try:
            for record in own:
                experiment.suits(record, live, options)
        except InputError as error:
            reasons[name] = str(error)
    return reasons


def begin(made: Plan, save: Path | None, leaves: Sequence[str]) -> None:
    """Make sure that nothing is replaced and of the folder, then write the settings where they are
    wished.

    `leaves` are the forms of the names that the command will write into the folder, beside specs.
    """
    out = made.settings.out
    if out is not None:
        check_folder(out, leaves)
    if save is not None:
        check_settings(save, to_toml(made.table))
    if out is not None:
        check_writable(out)
    if save is not None:
        write_atomic(save, to_toml(made.table))
