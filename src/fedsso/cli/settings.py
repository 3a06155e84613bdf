"""Settings from a TOML file and from the command line: read, checked, and what they stand for.

Options of the command line take precedence over the file. Errors name the key, the value and what
was expected.

`read_settings` gives the settings, `records` the algorithms with their hyper-parameters, and
`effective` the whole as a table, which --save-config and the folder of a sweep keep.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from ..algorithm.schedule import Decay
from ..algorithms import make
from ..errors import InputError, unknown
from ..experiment.grids import grid, tried
from ..experiment.tuning.space import Space, space_of
from ..report.page.content import check_targets
from ..support.intake import read_bytes, read_toml, user_path
from ..support.seal import END, is_cut
from ..support.seal import check as check_seal
from .config import TABLES, Base, Sweep, Tune, alternatives, flag, model

if TYPE_CHECKING:
    from pathlib import Path

    from ..algorithm import Algorithm
    from ..data import Federation
    from ..engine.settings import Settings

log = logging.getLogger("fedsso")
LONGEST = 200  # characters of a wrong value that an error shows


def read_settings(
    file: Path | None,
    run: Mapping[str, Any],
    data: Mapping[str, Any],
    base: type[Base] = Base,
) -> Any:
    """The settings of the file, overridden by those of the command line.

    Args:
        file: A TOML file, or None.
        run: Run options that the command line gives.
        data: Options of the data that the command line gives.
        base: `Sweep` for a sweep, else `Base`.

    Returns:
        An object with an attribute for each key, of the form that `config.model(base)` has.

    Raises:
        InputError: A key is unknown or a value is of the wrong type. The message begins with the
            name of the file, or with "command line".
    """
    below = {} if file is None else _read(file, base).given()
    of_data = {**below.get("data", {}), **data}
    whole = {**below, **run, "data": of_data}
    return _check(whole, "command line", base)


def _read(file: Path, base: type[Base]) -> Any:
    """A settings file, checked.

    A warning tells if somebody changed what fedsso wrote: that is allowed, it is a settings file.
    One that was cut is refused.
    """
    data = read_bytes(file, "settings")
    if is_cut(data):
        raise InputError(
            f"{file} has lost its end: fedsso wrote {END!r} as its last line; restore it from a "
            f"copy, or delete its first line to use the rest as settings of your own"
        )
    if check_seal(data) is False:
        log.warning("%s was changed since fedsso wrote it; it is used as it is now", file)
    raw = read_toml(file)
    if not raw:
        raise InputError(f"{file} holds no settings; write them into it, or leave --config out")
    if "record" in raw and "data" not in raw:
        raise InputError(f"{file}: this run used arrays of your own; repeat it from Python")
    return _check(raw, str(file), base)


def _check(
    raw: Mapping[str, Any],
    origin: str,
    base: type[Base],
) -> Any:
    """Settings from plain values; an error begins with their origin.

    Args:
        raw: The values by their keys, tables within.
        origin: The name of the file, or "command line".
        base: `Sweep` for a sweep, else `Base`.
    """
    try:
        found: Any = model(base).model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{origin}: {_explain(error, raw, model(base))}") from None
    check_targets(found.targets or ())
    for name in ("out", "init"):
        value = getattr(found, name)
        if value is not None:
            user_path(name, value)
    return found


# ---- errors ----


def _explain(
    error: ValidationError,
    raw: Mapping[str, Any],
    top: type[BaseModel],
) -> str:
    """The deepest problem in words: of a union, the alternative that fits best.

    pydantic tells a problem for every alternative of a union. The one that got furthest into the
    tables is most probably what the user meant.

    Args:
        error: What pydantic found.
        raw: The values that it was given.
        top: The form of the whole file.
    """
    problems = [(_path(one["loc"], raw), one) for one in error.errors()]
    path, worst = max(problems, key=lambda problem: len(problem[0]))
    above = path[:-1]
    if worst["type"] == "extra_forbidden":
        kind = f"key of [{'.'.join(above)}]" if above else "key"
        return str(unknown(kind, path[-1], _keys(top, above)))
    messages = [one["msg"] for other, one in problems if other == path]
    expected = dict.fromkeys(map(_expected, messages))
    got = repr(worst["input"])[:LONGEST]
    return f"{'.'.join(path)} must be {' or '.join(expected)}, got {got}"


def _expected(message: str) -> str:
    """What pydantic expected, in the words of TOML."""
    what = message.removeprefix("Input should be ")
    return "a table" if what.startswith("a valid dictionary") else what


def _path(loc: Sequence[int | str], raw: Any) -> tuple[str, ...]:
    """The keys on the way to a problem, without pydantic's names of a union's members.

    Args:
        loc: The way as pydantic tells it.
        raw: The values, in which only real keys are found.
    """
    path = []
    for part in loc:
        if isinstance(raw, Mapping) and part in raw:
            path.append(str(part))
            raw = raw[part]
    return tuple(path)


def _keys(top: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that a table may have.

    Args:
        top: The form of the whole file.
        path: The keys on the way to the table; none for the top.
    """
    for part in path:
        for member in alternatives(top.model_fields[part].annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                top = member
                break
    return list(top.model_fields)


# ---- what the settings stand for ----


def records(
    chosen: Any,
    names: Sequence[str],
    hyper: Mapping[str, Any],
) -> dict[str, list[Algorithm]]:
    """The algorithms by name: one record each, or for a sweep a grid of them.

    A field has the value of the command line, else that of the algorithm's table in the file. An
    option of the command line goes to every algorithm that has it.

    Args:
        chosen: The settings.
        names: The algorithms that were asked for.
        hyper: Hyper-parameters that the command line gives.

    Raises:
        InputError: A name is unknown, a value is out of its range, or no algorithm has an option.
    """
    made: dict[str, list[Algorithm]] = {}
    known: dict[str, None] = {}
    for name in names:
        own = _values(chosen, name, hyper)
        made[name] = _records(chosen, name, own)
        first = cast(Any, made[name][0])
        known |= dict.fromkeys(field.name for field in fields(first))
    for option in hyper:
        if option not in known:
            has = ", ".join(map(flag, known))
            raise InputError(
                f"{flag(option)} is not an option of {' or '.join(names)}; choose from {has}"
            )
    return made


def _records(chosen: Any, name: str, own: dict[str, Any]) -> list[Algorithm]:
    """The records of one algorithm; where settings are tuned, those at the ends of its space."""
    if isinstance(chosen, Tune):
        return space_of(name, own).corners()
    return grid(name, own) if isinstance(chosen, Sweep) else [make(name, own)]


def spaces(chosen: Any, names: Iterable[str], hyper: Mapping[str, Any]) -> list[Space]:
    """What `tune` searches for each algorithm, by its table in the file and by the command line."""
    if not isinstance(chosen, Tune):
        return []
    return [space_of(name, _values(chosen, name, hyper)) for name in names]


def _values(
    chosen: Any,
    name: str,
    hyper: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of one algorithm that were given; sub-tables become schedules."""
    if name not in TABLES:
        return {}
    own = getattr(chosen, name)
    values = {} if own is None else own.given()
    takes = TABLES[name].model_fields
    values |= {key: value for key, value in hyper.items() if key in takes}
    for key, value in values.items():
        if isinstance(value, dict):
            values[key] = Decay(**value)
    return values


def effective(
    chosen: Any,
    fed: Federation,
    full: Settings,
    made: Mapping[str, Sequence[Algorithm]],
) -> dict[str, Any]:
    """The settings in force, with their defaults, as a table that `read_settings` takes.

    Where the results go is not among them.

    Args:
        chosen: The settings as they were given.
        fed: The data, whose source has every option that was used.
        full: All run options, with their defaults.
        made: The records of each algorithm.
    """
    plain = {
        **full.values(),
        "seed": chosen.seed,
        "targets": chosen.targets,
        "checkpoint_every": chosen.checkpoint_every,
    }
    if plain["batch_size"] is None:
        plain["batch_size"] = "full"
    if isinstance(chosen, Sweep):
        plain |= {"target": chosen.target, "select": chosen.select}
    data = {"dataset": fed.source["name"], **fed.source}
    del data["name"]
    data["data_dir"] = chosen.data.data_dir
    if isinstance(chosen, Tune):
        plain |= {"trials": chosen.trials, "at_once": chosen.at_once, "prune": chosen.prune}
    tables = {name: _table(own) for name, own in made.items()}
    return {"model": chosen.model, **plain, "data": data, **tables}


def _table(own: Sequence[Algorithm]) -> dict[str, Any]:
    """The table of one algorithm: a value for each field, or a list where a grid has several."""
    found = {}
    for name, values in tried(own).items():
        found[name] = values if len(values) > 1 else values[0]
    return found
