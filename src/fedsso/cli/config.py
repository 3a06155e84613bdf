"""The settings of the command line: one model checks a TOML file and, field by field, makes the
options.

The file has the form of a run's spec.toml: run options at the top, a table [data], one table for
each algorithm. Ranges are not checked here but where they hold for everybody: by the records,
`spec.complete` and `data.load`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import Tensor

from ..algorithm import Algorithm
from ..algorithm.schedule import Decay
from ..algorithms import ALGORITHMS, make
from ..data import PARTITIONS, Federation, datasets
from ..data.synthetic import KINDS
from ..engine.settings import Settings, options
from ..errors import InputError, unknown
from ..experiment.grids import grid, tried
from ..models import MODELS
from ..report.page.content import check_targets
from ..support.intake import read_bytes, read_toml, user_path
from ..support.seal import check as check_seal

log = logging.getLogger("fedsso")


class Table(BaseModel):
    """A TOML table: no unknown keys, no silent conversion."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def given(self) -> dict[str, Any]:
        """What was set, without defaults."""
        return self.model_dump(exclude_unset=True)


class Data(Table):
    """Table [data]: the arguments of `fedsso.load`."""

    dataset: str = Field("digits", description="data set; `fedsso data list` shows them")
    clients: int | None = Field(None, description="number of clients; left out: the data set's own")
    files: list[str] | None = Field(
        None, description="your own files or folders, for data set csv or svmlight"
    )
    target: str | None = Field(None, description="column to predict, for data set csv")
    task: str | None = Field(
        None, description="auto, or regression for whole numbers; for data set csv"
    )
    features: list[str] | None = Field(
        None, description="columns to learn from, for data set csv; left out: all others"
    )
    group: str | None = Field(
        None, description="column that names the client, for data set csv; left out: the file"
    )
    partition: str | None = Field(
        None, description=f"{', '.join(PARTITIONS)}; left out: the set's own"
    )
    concentration: float | None = Field(
        None, description="of the Dirichlet draw; small means skewed"
    )
    classes_per_client: int | None = Field(None, description="of partition classes")
    shards_per_client: int | None = Field(None, description="of partition shards")
    min_rows: int = Field(8, description="least rows of a client")
    test_fraction: float = Field(0.25, description="share of each client's rows kept for testing")
    seed: int = Field(0, description="seed of the partition")
    data_dir: str | None = Field(
        None, description="folder of the data files; left out: $FEDSSO_DATA or ~/.cache/fedsso"
    )


class Head(Table):
    """The keys at the top of the file that are no run options."""

    model: str = Field("mclr", description=", ".join(MODELS))
    algorithm: str = Field("fedsso", description="`fedsso algorithms` shows them")
    algorithms: list[str] = Field(
        ["fedsso", "fedavg", "fedsgd"], description="names with commas between, or all"
    )


class Base(Head):
    """The keys at the top of a file for `run` and `compare`; run options are added to it."""

    targets: list[float] | None = Field(
        None, description="accuracies of the table; left out: four that suit"
    )
    out: str | None = Field(
        None, description="folder for the results; left out: nothing is written"
    )
    checkpoint_every: int = Field(
        10, ge=1, description="rounds between checkpoints of a run with --out"
    )

    @property
    def seeds(self) -> list[int]:
        """The seeds that were asked for, at least one and all different."""
        seed = self.run_options()["seed"]
        if seed == []:
            raise InputError("seed must list at least one number, got []")
        several = seed if isinstance(seed, list) else [seed]
        if len(set(several)) < len(several):
            raise InputError(f"seeds must be different, got {', '.join(map(str, several))}")
        return several

    def run_options(self) -> dict[str, Any]:
        """All run options, with their defaults."""
        return {one.name: getattr(self, one.name) for one in options()}

    def given_options(self) -> dict[str, Any]:
        """The run options that were set, as `simulate` takes them, but the seed."""
        names = [one.name for one in options() if one.name != "seed"]
        given = self.given()
        chosen = {name: given[name] for name in names if name in given}
        if chosen.get("batch_size") == "full":
            chosen["batch_size"] = None
        return chosen


class Sweep(Base):
    """The keys at the top of a file for a sweep; in its tables a field may list several values."""

    target: float | None = Field(
        None,
        description="accuracy to reach in few rounds; left out: the accuracy at the end counts",
    )
    select: str = Field(
        "test",
        description="rows to choose settings by: test, or val, a quarter of each client's training "
        "rows",
    )


def run_fields() -> dict[str, Any]:
    """The run options as fields of the file's model, from their one declaration."""
    made: dict[str, Any] = {}
    for one in options():
        default = list(one.default) if isinstance(one.default, tuple) else one.default
        more: dict[str, Any] = {}
        doc = one.doc[0].lower() + one.doc[1:] if one.doc[:2].istitle() else one.doc
        doc = doc.rstrip(".")
        if one.name == "seed":
            more["validation_alias"] = AliasChoices("seed", "seeds")
            doc += "; several with commas between: one run each"
        if one.choices:
            doc += f": {', '.join(one.choices)}"
        made[one.name] = (one.in_files, Field(default, description=doc, **more))
    return made


# ---- tables that registries define ----


def table(record: type, several: bool = False) -> type[Table]:
    """A TOML table with the fields of a record; a field that is itself a record (a schedule) is a
    sub-table."""
    every = get_type_hints(record)
    hints = {f.name: _plain(every[f.name]) for f in fields(record)}
    if several:
        hints = {name: hint | list[_simple(hint)] for name, hint in hints.items()}  # type: ignore[misc]
    made: dict[str, Any] = {
        f.name: (hints[f.name], Field(f.default, description=f.metadata["doc"]))
        for f in fields(record)
    }
    return create_model(record.__name__, __base__=Table, **made)


def _simple(hint: Any) -> Any:
    """The part of a type that a TOML list can hold."""
    parts = [
        p
        for p in alternatives(hint)
        if p is not type(None) and not (isinstance(p, type) and issubclass(p, BaseModel))
    ]
    return reduce(or_, parts)


def _plain(hint: Any) -> Any:
    """The part of a type that TOML can write."""
    parts = [
        table(cast(type, p)) if is_dataclass(p) else p
        for p in alternatives(hint)
        if p is not Tensor
    ]
    return reduce(or_, parts)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _own_options() -> dict[str, Any]:
    """Options that only some data sets have; `load` knows which, and their types."""
    readers = [*(form.read for d in datasets() for form in d.forms), *KINDS.values()]
    parameters = [p for reader in readers for p in inspect.signature(reader).parameters.values()]
    names = ["kind", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)]
    return {name: (Any, None) for name in names if name not in Data.model_fields}


TABLES = {name: table(record) for name, record in ALGORITHMS.items()}


@cache
def model(base: type[Base]) -> type[Base]:
    """The model of a whole file; [record], which a run's spec.toml has, is let through."""
    data = create_model("Data", __base__=Data, **_own_options())
    tables = (
        {name: table(ALGORITHMS[name], several=True) for name in TABLES}
        if base is Sweep
        else TABLES
    )
    hyper: dict[str, Any] = {name: (made | None, None) for name, made in tables.items()}
    rest: dict[str, Any] = {
        "data": (data, Field(default_factory=data)),
        "record": (dict[str, Any] | None, None),
    }
    return create_model("Settings", __base__=base, **run_fields(), **rest, **hyper)


# ---- file and command line ----


def settings(
    file: Path | None, run: Mapping[str, Any], data: Mapping[str, Any], base: type[Base] = Base
) -> Any:
    """The settings of the file, overridden by those of the command line."""
    below = {} if file is None else read(file, base).given()
    return check({**below, **run, "data": {**below.get("data", {}), **data}}, "command line", base)


def read(file: Path, base: type[Base]) -> Any:
    """A settings file, checked."""
    if check_seal(read_bytes(file, "settings")) is False:
        log.warning("%s was changed since fedsso wrote it; it is used as it is now", file)
    raw = read_toml(file)
    if "record" in raw and "data" not in raw:
        raise InputError(f"{file}: this run used arrays of your own; repeat it from Python")
    return check(raw, str(file), base)


def check(raw: Mapping[str, Any], origin: str, base: type[Base]) -> Any:
    """Settings from plain values; an error names the key, the value and what is expected."""
    try:
        found = model(base).model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{origin}: {_explain(error, raw, model(base))}") from None
    check_targets(found.targets or ())
    for name in ("out", "init"):
        if getattr(found, name) is not None:
            user_path(name, getattr(found, name))
    return found


def _explain(error: ValidationError, raw: Mapping[str, Any], top: type[BaseModel]) -> str:
    """The deepest problem: of a union, the alternative that fits best."""
    problems = [(_path(e["loc"], raw), e) for e in error.errors()]
    path, worst = max(problems, key=lambda p: len(p[0]))
    if worst["type"] == "extra_forbidden":
        kind = f"key of [{'.'.join(path[:-1])}]" if path[:-1] else "key"
        return str(unknown(kind, path[-1], _keys(top, path[:-1])))
    expected = dict.fromkeys(_expected(e["msg"]) for p, e in problems if p == path)
    return f"{'.'.join(path)} must be {' or '.join(expected)}, got {repr(worst['input'])[:200]}"


def _expected(message: str) -> str:
    what = message.removeprefix("Input should be ")
    return "a table" if what.startswith("a valid dictionary") else what


def _path(loc: Sequence[int | str], raw: Any) -> tuple[str, ...]:
    """The keys on the way to a problem, without pydantic's names of a union's members."""
    path = []
    for part in loc:
        if isinstance(raw, Mapping) and part in raw:
            path.append(str(part))
            raw = raw[part]
    return tuple(path)


def _keys(top: type[BaseModel], path: Sequence[str]) -> list[str]:
    """The keys that a table may have."""
    for part in path:
        members = alternatives(top.model_fields[part].annotation)
        top = next(m for m in members if isinstance(m, type) and issubclass(m, BaseModel))
    return list(top.model_fields)


# ---- what the settings stand for ----


def flag(name: str) -> str:
    """local_steps as --local-steps."""
    return "--" + name.replace("_", "-")


def records(
    chosen: Any, names: Sequence[str], hyper: Mapping[str, Any]
) -> dict[str, list[Algorithm]]:
    """The algorithms by name, with the fields of their tables and then those of the command line
    they have: one record each, or for a sweep a grid of them."""
    values = {name: _values(chosen, name, hyper) for name in names}
    if isinstance(chosen, Sweep):
        made = {name: grid(name, own) for name, own in values.items()}
    else:
        made = {name: [make(name, own)] for name, own in values.items()}
    known = dict.fromkeys(f.name for own in made.values() for f in fields(cast(Any, own[0])))
    for option in hyper:
        if option not in known:
            has = ", ".join(map(flag, known))
            raise InputError(
                f"{flag(option)} is no option of {' or '.join(names)}; choose from {has}"
            )
    return made


def _values(chosen: Any, name: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
    if name not in TABLES:
        return {}
    own = getattr(chosen, name)
    values = {} if own is None else own.given()
    values |= {k: v for k, v in hyper.items() if k in TABLES[name].model_fields}
    return {k: Decay(**v) if isinstance(v, dict) else v for k, v in values.items()}


def effective(
    chosen: Any, fed: Federation, full: Settings, made: Mapping[str, Sequence[Algorithm]]
) -> dict[str, Any]:
    """Settings with their defaults as a table that `read` takes.

    Where the results go is not among them.
    """
    plain = {
        **full.values(),
        "seed": chosen.seed,
        "targets": chosen.targets,
        "checkpoint_every": chosen.checkpoint_every,
    }
    if plain["batch_size"] is None:
        plain["batch_size"] = "full"
    source = {k: v for k, v in fed.source.items() if k != "name"}
    data = {"dataset": fed.source["name"], **source, "data_dir": chosen.data.data_dir}
    if isinstance(chosen, Sweep):
        plain |= {"target": chosen.target, "select": chosen.select}
    spread = {name: tried(own) for name, own in made.items()}
    tables = {
        name: {k: v if len(v) > 1 else v[0] for k, v in own.items()} for name, own in spread.items()
    }
    return {"model": chosen.model, **plain, "data": data, **tables}
