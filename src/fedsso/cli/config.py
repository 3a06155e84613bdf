"""The form of a settings file: one model checks the file, and the options are made from it.

The file has the form of a run's spec.toml: run options at the top, a table [data], and one table
for each algorithm. No option is declared here a second time. The fields are made from the records
that declare them: those of a run (`engine.settings`), those of data sets (`data.options`), and
the fields of the algorithms. Ranges are checked where they hold for everybody, by these records.

`model(Base)` is the form for `run` and `compare`, `model(Sweep)` the form for `sweep`, in whose
tables a field may list several values, and `model(Tune)` the form for `tune`, where it may also be
a range.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model
from torch import Tensor

from ..algorithms import ALGORITHMS
from ..data.catalogue import all_options
from ..data.options import Option
from ..data.partition import PARTITIONS
from ..engine.settings import options
from ..errors import InputError
from ..experiment.tuning import AT_ONCE
from ..models import MODELS

# What only Python can give in these options, and what is said of them in files and on the command
# line, which cannot hold a function or a tensor.
TYPED = {
    "loss": ("mse, bce or your own function", "mse or bce"),
    "metrics": ("auc, f1 or your own functions", "auc or f1"),
    "init": ("random weights), a flat tensor or", "random weights) or"),
    "batch_size": ("None (in files and on the command line: full)", "full"),
}
OWN_TABLES = "csv"  # the data set of a user's own tables, whose options are on the command line


class Table(BaseModel):
    """A TOML table: no unknown keys, no silent conversion.

    A misspelt key is an error, because it would otherwise be ignored. So is "5" in place of 5.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    def given(self) -> dict[str, Any]:
        """What was set, without defaults.

        Only this goes on to `fedsso.load` and `fedsso.simulate`, which have their own defaults.
        """
        return self.model_dump(exclude_unset=True)


class Head(Table):
    """The keys at the top of the file that are no run options."""

    model: str = Field("mclr", description=f"Model: {', '.join(MODELS)}.")
    algorithm: str = Field("fedsso", description="Algorithm; `fedsso algorithms` lists them.")
    algorithms: list[str] = Field(
        ["fedsso", "fedavg", "fedsgd"], description="Comma-separated names, or all."
    )


class Base(Head):
    """The keys at the top of a file for `run` and `compare`; run options are added to it."""

    targets: list[float] | None = Field(
        None, description="Accuracies in the table. By default four suitable ones."
    )
    out: str | None = Field(
        None, description="Folder for the results. By default nothing is written."
    )
    checkpoint_every: int = Field(
        10, ge=1, description="Rounds between checkpoints of a run with --out."
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
        """The run options that were set, as `simulate` takes them, without the seed.

        The word "full" for the batch size becomes None, which TOML cannot write.
        """
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
        description="Accuracy to reach in as few rounds as possible. By default the final accuracy "
        "counts.",
    )
    select: str = Field(
        "test",
        description="Rows to select settings on: test, or val (a quarter of each client's training "
        "rows).",
    )


class Tune(Sweep):
    """The keys at the top of a file for `tune`; in its tables a field may be a range, "0.001:1"."""

    trials: int = Field(24, ge=1, description="settings that are tried for each algorithm")
    at_once: int = Field(
        AT_ONCE, ge=1, description="settings that are asked for and trained together"
    )
    prune: str = Field(
        "halving",
        description="which settings are dropped while they train: halving (the worse half), median "
        "(what is below it) or none",
    )


# ---- options of a run ----


def run_fields() -> dict[str, Any]:
    """The options of a run as fields of a model, from their one declaration.

    Returns:
        The type and the field of each option, by its name, as `create_model` takes them.
    """
    made: dict[str, Any] = {}
    for one in options():
        default = list(one.default) if isinstance(one.default, tuple) else one.default
        more: dict[str, Any] = {}
        doc = one.doc
        in_python, in_files = TYPED.get(one.name, ("", ""))
        doc = doc.replace(in_python, in_files)
        if one.name == "seed":
            more["validation_alias"] = AliasChoices("seed", "seeds")
            doc += " Several, separated by commas, give one run each."
        if not all(choice in doc for choice in one.choices):
            doc += f" One of {', '.join(one.choices)}."
        made[one.name] = (one.in_files, Field(default, description=doc, **more))
    return made


# ---- options of data sets ----


def data_fields() -> dict[str, Any]:
    """The options of data sets that are on the command line, as fields of the table [data].

    These are the options of every data set, of the partitions, and of the user's own tables.
    Those of a single data set are for settings files: on the command line they would be too many.

    Returns:
        The type and the field of each option, by its name, as `create_model` takes them.
    """
    made: dict[str, Any] = {}
    for option, owners in all_options().items():
        of_some = bool(owners)
        if of_some and owners[0] not in PARTITIONS and OWN_TABLES not in owners:
            continue
        hint = option.plain_type
        if of_some or option.default is None:
            hint = hint | None  # None leaves the choice to the data set
        default = None if option.default in ("", ()) else option.default
        names = AliasChoices(option.name, *option.former)
        field = Field(default, description=_explained(option, owners), validation_alias=names)
        made[option.name] = (hint, field)
    return made


def _explained(option: Option, owners: Sequence[str]) -> str:
    """What an option does, its choices, and who takes it.

    Args:
        option: The option of a data set or of a partition.
        owners: The data sets or partitions that take it; none: all data sets do.
    """
    text = option.doc
    if option.choices:
        text += f" One of {', '.join(option.choices)}."
    if owners:
        kind = "partition" if owners[0] in PARTITIONS else "data set"
        text += f" For {kind} {' or '.join(owners)}."
    return text


class _Named(Table):
    """The key of table [data] that is no option but the name of the data set."""

    dataset: str = Field("digits", description="Data set; `fedsso data list` lists them.")


with warnings.catch_warnings():
    # pydantic has a method of that name, which it no longer uses.
    warnings.filterwarnings("ignore", 'Field name "schema"')
    Data: Any = create_model("Data", __base__=_Named, **data_fields())
"""Table [data] as far as it is on the command line: the arguments of `fedsso.load`."""


def _other_fields() -> dict[str, Any]:
    """Options of single data sets, which files may hold; `load` knows their types."""
    names = [option.name for option in all_options()]
    return {name: (Any, None) for name in names if name not in Data.model_fields}


# ---- tables of algorithms ----


def table(record: type, several: bool = False, ranges: bool = False) -> type[Table]:
    """A TOML table with the fields of a record.

    Args:
        record: The class of an algorithm, or of a schedule. A field that is itself a record, such
            as a schedule, becomes a sub-table.
        several: Whether a field may also be a list of values, as in a sweep.
        ranges: Whether a field may also be a text such as 0.001:1, as where settings are tuned.
    """
    every = get_type_hints(record)
    made: dict[str, Any] = {}
    for field in fields(record):
        hint = _plain(every[field.name])
        if several:
            hint = hint | list[_simple(hint)]  # type: ignore[misc]
        if ranges:
            hint = hint | str
        made[field.name] = (hint, Field(field.default, description=field.metadata["doc"]))
    return create_model(record.__name__, __base__=Table, **made)


def _plain(hint: Any) -> Any:
    """The part of a type that TOML can write: no tensors, and tables in place of records."""
    parts = []
    for part in alternatives(hint):
        if part is not Tensor:
            parts.append(table(cast(type, part)) if is_dataclass(part) else part)
    return reduce(or_, parts)


def _simple(hint: Any) -> Any:
    """The part of a type that a TOML list can hold: neither None nor tables."""
    parts = []
    for part in alternatives(hint):
        is_table = isinstance(part, type) and issubclass(part, BaseModel)
        if part is not type(None) and not is_table:
            parts.append(part)
    return reduce(or_, parts)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, itself.

    >>> alternatives(int | str)
    (<class 'int'>, <class 'str'>)
    """
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (hint,)


TABLES = {name: table(record) for name, record in ALGORITHMS.items()}
"""The tables of the algorithms by name, for commands that take one value of each field."""


# ---- the whole file ----


@cache
def model(base: type[Base]) -> type[Base]:
    """The model of a whole file; [record], which a run's spec.toml has, is let through.

    `base` is `Sweep` for a sweep, whose tables may list several values, `Tune` where they may have
    ranges as well, else `Base`.
    """
    data = create_model("Data", __base__=Data, **_other_fields())
    made: dict[str, Any] = run_fields()
    made["data"] = (data, Field(default_factory=data))
    made["record"] = (dict[str, Any] | None, None)
    for name, record in ALGORITHMS.items():
        own = TABLES[name]
        if issubclass(base, Sweep):
            own = table(record, several=True, ranges=issubclass(base, Tune))
        made[name] = (own | None, None)
    return create_model("Settings", __base__=base, **made)


def flag(name: str) -> str:
    """The option of the command line for a key: local_steps is --local-steps."""
    return "--" + name.replace("_", "-")
