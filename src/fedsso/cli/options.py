"""The options of `run`, `compare` and `sweep`: from the settings of `cli_config` and the fields of
the algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from rich.markup import escape
from typer.core import TyperCommand, TyperOption

from ..engine.settings import options as run_options
from . import config as cli_config

if TYPE_CHECKING:
    Kind = click.ParamType[Any, Any]
else:
    Kind = click.ParamType  # has type parameters since click 8.5 only

PANELS = {
    "run": "Run",
    "data": "Data",
    "hyper": "Hyper-parameters (an algorithm takes those it has)",
}
NAMES = {
    ("data", "seed"): ["--partition-seed"],
    ("data", "target"): ["--column", "--target"],
    ("run", "seed"): ["--seed", "--seeds"],
}
SWEEP = "sweep"  # whose --target is an accuracy
ABSENT = {
    "run": ("algorithms",),
    "compare": ("algorithm", "checkpoint_every"),
    SWEEP: ("algorithm", "checkpoint_every", "targets"),
}


class Value(Kind):
    """One of a few words, or of the first type that fits."""

    def __init__(self, bases: Sequence[Kind], words: Mapping[str, Any]) -> None:
        self.bases, self.words = bases, words
        self.name = "|".join([*(base.name.upper() for base in bases), *words])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.words:
            return self.words[value]
        for base in self.bases[:-1]:
            with suppress(click.BadParameter):
                return base.convert(value, param, ctx)
        try:
            return self.bases[-1].convert(value, param, ctx)
        except click.BadParameter as error:
            if not self.words:
                raise
            words = ", ".join(map(repr, self.words))
            raise click.BadParameter(
                f"{error.message.rstrip('.')}, nor {words}.", ctx, param
            ) from None


class Several(Kind):
    """Values with commas between them."""

    def __init__(self, base: Kind) -> None:
        self.base = base
        self.name = f"{base.name.upper()},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return [self.base.convert(part.strip(), param, ctx) for part in value.split(",")]


def parser(hint: Any) -> Kind:
    """How the text of an option becomes a value of this type."""
    members = cli_config.alternatives(hint)
    lists = [m for m in members if get_origin(m) is list]
    if lists:
        return Several(parser(get_args(lists[0])[0]))
    words: dict[str, Any] = {
        word: word for m in members if get_origin(m) is Literal for word in get_args(m)
    }
    if type(None) in members and str not in members:  # a text may be the word none
        words["none"] = None
    types = [t for t in (int, float, str) if t in members]
    bases = [click.types.convert_type(t) for t in types] or [click.types.convert_type(members[0])]
    return Value(bases, words) if words or len(bases) > 1 else bases[0]


def option(section: str, key: str, hint: Any, doc: str, names: Sequence[str]) -> TyperOption:
    """An option whose value goes to settings[section][key]."""
    kind = parser(hint)
    decls = [f"{section}_{key}", *(f"{n}/--no-{n[2:]}" if hint is bool else n for n in names)]
    metavar = kind.name if isinstance(kind, Value | Several) else None
    flag = (
        {"is_flag": True} if hint is bool else {"type": kind, "multiple": isinstance(kind, Several)}
    )
    return TyperOption(
        param_decls=decls,
        help=escape(doc),
        metavar=metavar,
        rich_help_panel=PANELS[section],
        **flag,
    )


def setting_options(section: str, command: str) -> Iterator[TyperOption]:
    """One option for each key of a part of the settings file that this command uses."""
    for key, field in _fields(section, command).items():
        if section == "run" and key in ABSENT[command]:
            continue
        names = NAMES.get((section, key), [cli_config.flag(key)])
        if (command, section, key) == (SWEEP, "data", "target"):
            names = names[:1]
        default = (
            f" [default: {_text(field.default)}]"
            if field.default is not None and field.default is not False
            else ""
        )
        yield option(section, key, field.annotation, f"{field.description}{default}", names)


def _fields(section: str, command: str) -> Mapping[str, Any]:
    """The fields of a part of the settings file; run options come first, then what is kept."""
    if section == "data":
        return cli_config.Data.model_fields
    base = cli_config.Sweep if command == SWEEP else cli_config.Base
    model = cli_config.model(base).model_fields
    head = list(cli_config.Head.model_fields)
    run = [one.name for one in run_options()]
    rest = [key for key in base.model_fields if key not in head]
    return {key: model[key] for key in (*head, *run, *rest)}


def hyper_options(command: str) -> Iterator[TyperOption]:
    """One option for each field that some algorithm has; a sweep takes several values."""
    tables = cli_config.TABLES
    for key in dict.fromkeys(key for table in tables.values() for key in table.model_fields):
        owners = {
            name: table.model_fields[key]
            for name, table in tables.items()
            if key in table.model_fields
        }
        meanings: dict[str, dict[str, list[str]]] = {}
        for name, field in owners.items():
            defaults = meanings.setdefault(str(field.description), {})
            defaults.setdefault(_text(field.default), []).append(name)
        doc = "; ".join(
            f"{meaning} [{_owners(defaults)}]" for meaning, defaults in meanings.items()
        )
        hint: Any = reduce(or_, [field.annotation for field in owners.values()])
        yield option(
            "hyper", key, list[hint] if command == SWEEP else hint, doc, [cli_config.flag(key)]
        )


def _owners(defaults: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{', '.join(names)}: {default}" for default, names in defaults.items())


def _text(default: Any) -> str:
    if isinstance(default, list):
        return ",".join(map(_text, default))
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if isinstance(default, bool | None) else str(default)


class WithData(TyperCommand):
    """A command that also takes settings as options and finds those given in `ctx.obj`; here those
    of the data."""

    def __init__(
        self, name: str | None, *, params: list[click.Parameter] | None = None, **rest: Any
    ) -> None:
        self.settings = list(self.made(name or ""))
        super().__init__(name, params=[*(params or []), *self.settings], **rest)

    def made(self, name: str) -> Iterator[TyperOption]:
        """The options of the command with this name."""
        return setting_options("data", name)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = {section: {} for section in PANELS}
        for made in self.settings:
            name = str(made.name)
            value = ctx.params.pop(name)
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                section, _, key = name.partition("_")
                ctx.obj[section][key] = (
                    [v for part in value for v in part] if made.multiple else value
                )
        return super().invoke(ctx)


class WithSettings(WithData):
    """The same with every setting of a run."""

    def made(self, name: str) -> Iterator[TyperOption]:
        """Options of the run, of the data and of the algorithms."""
        yield from setting_options("run", name)
        yield from setting_options("data", name)
        yield from hyper_options(name)
