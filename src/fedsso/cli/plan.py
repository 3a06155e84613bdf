"""What `run`, `compare` and `sweep` do first: check everything, then write the settings.

`plan` reads the settings, loads the data and plans the runs. `begin` makes sure that nothing will
be replaced and that the folder can be written. Only then does a command train. So a mistake costs
seconds, not a night.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..algorithms import ALGORITHMS
from ..data.catalogue import load
from ..engine.simulate import admit
from ..errors import InputError, one_of
from ..experiment.plan import (
    SELECT,
    Planned,
    Question,
    check_reachable,
    every_settings,
    judging,
    suited,
)
from ..experiment.plan import plan as plan_runs
from ..experiment.spec import CHECKPOINT, TRACE
from ..experiment.store import PARTS
from ..experiment.sweep import split_devices
from ..models import MODELS
from ..report.page.content import check_targets
from ..support.files import check_writable, to_toml, write_atomic
from .config import Base, Sweep, Tune
from .replace import check_folder, check_settings
from .screen import say
from .settings import effective, read_settings, records, spaces

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from ..algorithm import Algorithm
    from ..data.federation import Federation
    from ..experiment.tuning.space import Space

log = logging.getLogger("fedsso")
PICTURE = "curves.png"
# What run and compare leave, beside the specs; and the parts of a sweep, which would hide a run.
OF_RUNS = (PARTS, PICTURE, TRACE, CHECKPOINT, f"*/{TRACE}", f"*/{CHECKPOINT}")


class Plan(NamedTuple):
    """Checked settings, the data, and the runs that they stand for."""

    settings: Any
    fed: Federation
    question: Question  # what is asked, for processes that plan it themselves
    planned: list[Planned]
    left_out: dict[str, str]  # why an algorithm of "all" cannot run here
    table: dict[str, Any]  # the settings in force, as a file
    devices: tuple[str, ...]  # of a sweep that uses several
    spaces: list[Space]  # what `tune` searches


def plan(
    ctx: typer.Context,
    config: Path | None,
    key: str,
    base: type[Base] = Base,
) -> Plan:
    """Read the settings, load the data, and plan the runs.

    Everything that can be wrong with the settings is found here. Nothing is written.

    Args:
        ctx: The context of the command, which holds the options that were given.
        config: A settings file, or None.
        key: The setting that names the algorithms: "algorithm" or "algorithms".
        base: `Sweep` for a sweep, else `Base`.

    Returns:
        The runs with all that belongs to them. With the name "all", algorithms that cannot run
        here are left out, and `left_out` says why; by name, they are an error.

    Raises:
        InputError: A setting is wrong, the data cannot be read, or nothing can run.
    """
    given = ctx.obj
    settings = read_settings(config, given["run"], given["data"], base)
    check_targets(targets_of(settings))
    chosen = getattr(settings, key)
    names = _names(key, chosen)
    grids = records(settings, names, given["hyper"])
    by_name = [] if chosen == ["all"] else _joined(grids)
    _check_before_loading(settings, by_name)
    fed = _federation(settings, config, given["data"])
    given_options, devices = _options(settings)
    question = Question(fed, settings.model, _joined(grids), settings.seeds, given_options)
    rows = judging(fed, settings.select) if isinstance(settings, Sweep) else fed
    kept, left_out = suited(plan_runs(*question._replace(fed=rows)))
    if left_out and chosen != ["all"]:
        raise InputError(next(iter(left_out.values())))
    if not kept:
        raise InputError(f"no algorithm can run here: {next(iter(left_out.values()))}")
    check_reachable(targets_of(settings), kept)
    # From here on, what cannot run is forgotten: processes that plan again must not meet it.
    grids = {name: own for name, own in grids.items() if name not in left_out}
    question = question._replace(records=_joined(grids))
    table = {key: chosen, **effective(settings, fed, kept[0].settings, grids)}
    if devices:
        table["device"] = settings.device
    searched = spaces(settings, grids, given["hyper"])
    table |= {space.algorithm: space.table() for space in searched}
    return Plan(settings, fed, question, _numbered(kept), left_out, table, devices, searched)


def _options(settings: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The run options that were set, and the devices if a sweep is to use several."""
    if isinstance(settings, Sweep) and not isinstance(settings, Tune):
        return split_devices(settings.given_options())
    return settings.given_options(), ()


def _check_before_loading(settings: Any, by_name: Sequence[Algorithm]) -> None:
    """Refuse wrong settings that can be told without the data, which may take minutes to load.

    These are ranges of run options, and names: of the model, the loss, metrics, the device, and
    the rows that a sweep chooses by; and algorithms, asked for by name, that do not suit the run
    options. What depends on the data is checked when the runs are planned.
    """
    one_of("model", settings.model, MODELS)
    first = every_settings(settings.seeds, _options(settings)[0])[0]
    for record in by_name:
        admit(record, first)
    if isinstance(settings, Sweep):
        one_of("choice of rows: select", settings.select, SELECT)


def _names(key: str, chosen: str | list[str]) -> list[str]:
    """The algorithms that were asked for, by name; "all" stands for the whole registry.

    Args:
        key: The setting that names them, for the message of an error.
        chosen: Its value: one name, or a list.
    """
    if chosen == ["all"]:
        return list(ALGORITHMS)
    names = [chosen] if isinstance(chosen, str) else chosen
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"{key} must list different names, at least one; got {', '.join(names) or 'none'}"
        )
    return names


def _joined(grids: Mapping[str, Sequence[Algorithm]]) -> list[Algorithm]:
    """The records of all algorithms, one after the other."""
    found: list[Algorithm] = []
    for own in grids.values():
        found += own
    return found


def _numbered(kept: Sequence[Planned]) -> list[Planned]:
    """The runs with the numbers that they have without those that were left out.

    Other processes make the plan again without them, and must come to the same numbers.
    """
    return [run._replace(spec=replace(run.spec, trial=number)) for number, run in enumerate(kept)]


def targets_of(settings: Any) -> list[float]:
    """The accuracies that were asked for; missing one of them is exit code 1."""
    if isinstance(settings, Sweep):
        return [] if settings.target is None else [settings.target]
    return settings.targets or []


def _federation(
    settings: Any,
    config: Path | None,
    given: Mapping[str, Any],
) -> Federation:
    """Load the data, and say on standard error what is to be known of them.

    A warning tells if the data have changed since the settings file was written.

    Args:
        settings: The settings, checked.
        config: The settings file, for the warning.
        given: Options of the data on the command line. With some, other data are meant.
    """
    wish = settings.data.given()
    try:
        fed = load(wish.pop("dataset", settings.data.dataset), **wish)
    except InputError as error:
        _check_column(given.get("outcome"), error)
        raise
    say(repr(fed))
    for note in fed.notes:
        say(f"note: {note}")
    recorded = (settings.record or {}).get("digest")
    if recorded and not given and recorded != fed.digest():
        log.warning("the data have changed since %s was written: this is another run", config)
    return fed


def _check_column(column: str | None, error: InputError) -> None:
    """Tell of --targets if the column to predict, which is --target here, is a number.

    Args:
        column: What was given as --outcome, --column or --target, or None.
        error: Why the data could not be loaded.
    """
    try:
        float(column or "none")
    except ValueError:
        return
    raise InputError(
        f"--target {column} names the column to predict; if it is an accuracy to reach, write "
        f"--targets {column} ({error})"
    ) from error


def begin(
    made: Plan,
    save: Path | None,
    leaves: Sequence[str],
) -> None:
    """Check that nothing will be replaced and that the folder can be written, before any work.

    Then the settings are written to `save`, if that is given.

    Args:
        made: The plan.
        save: Where the settings in force are written, or None.
        leaves: Patterns of the names that must not be in the folder, beside specs.

    Raises:
        InputError: Something is in the way, or the folder cannot be written.
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
