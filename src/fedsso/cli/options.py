"""The options of commands that train or show data, made from the form of a settings file.

Every key of `config` becomes an option, and so does every field that some algorithm has. A
command finds the options that were given in `ctx.obj`, in three parts: run, data and hyper.

The type of a key decides how its text is read: `parser` makes the parser. Lists are written with
commas, None as the word none. Options that were not given are left out, so that a settings file
counts there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
from rich.markup import escape
from typer.core import TyperCommand, TyperOption

from ..algorithm.records import OTHER_NAMES as OF_ALGORITHMS
from ..data.catalogue import all_options
from ..engine.settings import OTHER_NAMES as OF_RUNS
from ..engine.settings import options as run_options
from .config import TABLES, Base, Data, Head, Sweep, Tune, alternatives, flag, model

if TYPE_CHECKING:
    Kind = click.ParamType[Any, Any]
else:
    Kind = click.ParamType  # has type parameters since click 8.5 only

PANELS = {
    "run": "Run",
    "data": "Data",
    "hyper": "Hyper-parameters (an algorithm takes those it has)",
}
"""The parts of the settings, and their headings in the help."""

NAMES = {
    ("data", "seed"): ["--partition-seed"],
    ("data", "outcome"): ["--outcome", "--column", "--target"],
    ("run", "seed"): ["--seed", "--seeds"],
}
"""Keys whose option has another name, or several."""

SWEEP = "sweep"
TUNE = "tune"
ACCURACY = "--target"  # an accuracy of a sweep; elsewhere the outcome
ABSENT = {
    "run": ("algorithms",),
    "compare": ("algorithm", "checkpoint_every"),
    SWEEP: ("algorithm", "checkpoint_every", "targets"),
    TUNE: ("algorithm", "checkpoint_every", "targets"),
}
"""Keys of the settings file that a command has no option for."""


# ---- from text to values ----


class Value(Kind):
    """The value of an option: one of a few words, or a text of the first type that fits.

    An example is the batch size, which is an integer or the word full.
    """

    def __init__(
        self,
        bases: Sequence[Kind],
        words: Mapping[str, Any],
    ) -> None:
        """Join several types and words.

        Args:
            bases: The types, in the order in which they are tried.
            words: What each word stands for.
        """
        self.bases = bases
        self.words = words
        names = [base.name.upper() for base in bases]
        self.name = "|".join([*names, *words])

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """The value of a text; a message lists the words where no type fits.

        Args:
            value: What was typed.
            param: The option, for the message.
            ctx: The command, for the message.
        """
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
            message = f"{error.message.rstrip('.')}, nor {words}."
            raise click.BadParameter(message, ctx, param) from None


class Several(Kind):
    """Several values with commas between them, such as 0.1,0.3."""

    def __init__(self, base: Kind) -> None:
        """Take the type of a single value."""
        self.base = base
        self.name = f"{base.name.upper()},..."

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """The list of values. Blanks around a comma do not count."""
        parts = [part.strip() for part in value.split(",")]
        return [self.base.convert(part, param, ctx) for part in parts]


def parser(hint: Any) -> Kind:
    """How the text of an option becomes a value of this type.

    Args:
        hint: A type of a settings file, such as `int | None` or `list[float]`.

    Returns:
        A type of click. A list becomes `Several`; words (`Literal`, none) or several types become
        `Value`.
    """
    members = alternatives(hint)
    words: dict[str, Any] = {}
    for member in members:
        if get_origin(member) is list:
            inner = get_args(member)[0]
            return Several(parser(inner))
        if get_origin(member) is Literal:
            words |= {word: word for word in get_args(member)}
    if type(None) in members and str not in members:  # a text may be the word none
        words["none"] = None
    types = [t for t in (int, float, str) if t in members] or [members[0]]
    bases = [click.types.convert_type(t) for t in types]
    if words or len(bases) > 1:
        return Value(bases, words)
    return bases[0]


# ---- options ----


def option(
    section: str,
    key: str,
    hint: Any,
    doc: str,
    names: Sequence[str],
) -> TyperOption:
    """An option whose value goes to settings[section][key].

    A bool becomes a pair of flags, --name and --no-name. An option that takes a list may be given
    several times.

    Args:
        section: A key of `PANELS`: run, data or hyper.
        key: The key in that part of the settings.
        hint: Its type in a settings file.
        doc: What the help says.
        names: How it is written on the command line.
    """
    kind = parser(hint)
    more: dict[str, Any] = {"type": kind, "multiple": isinstance(kind, Several)}
    if hint is bool:
        names = [f"{name}/--no-{name[2:]}" for name in names]
        more = {"is_flag": True}
    return TyperOption(
        param_decls=[f"{section}_{key}", *names],
        help=escape(doc),
        metavar=kind.name if isinstance(kind, Value | Several) else None,
        rich_help_panel=PANELS[section],
        **more,
    )


def setting_options(section: str, command: str) -> Iterator[TyperOption]:
    """One option for each key of a part of the settings file that this command uses.

    Args:
        section: "run" or "data".
        command: The name of the command, which decides what is left out.

    Yields:
        The options, in the order of the help.
    """
    for key, field in _fields(section, command).items():
        if section == "run" and key in ABSENT[command]:
            continue
        names = NAMES.get((section, key), [flag(key)])
        if command in (SWEEP, TUNE) and section == "data":
            names = [name for name in names if name != ACCURACY]
        doc = str(field.description)
        if field.default is not None and field.default is not False:
            doc += f" [default: {_text(field.default)}]"
        yield option(section, key, field.annotation, doc, names)


def _fields(section: str, command: str) -> Mapping[str, Any]:
    """The fields of a part of the settings file; run options come first, then what is kept.

    Args:
        section: "run" or "data".
        command: The name of the command: a sweep has some keys more.
    """
    if section == "data":
        found: Mapping[str, Any] = Data.model_fields
        return found
    bases: dict[str, type[Base]] = {SWEEP: Sweep, TUNE: Tune}
    base = bases.get(command, Base)
    every = model(base).model_fields
    head = list(Head.model_fields)
    run = [one.name for one in run_options()]
    rest = [key for key in base.model_fields if key not in head]
    return {key: every[key] for key in (*head, *run, *rest)}


def hyper_options(command: str) -> Iterator[TyperOption]:
    """One option for each field that some algorithm has; sweep and tune take several values.

    Algorithms that share a field share the option. The help tells what the field means, and in
    brackets which algorithms have it with which default.

    Args:
        command: The name of the command.
    """
    owners: dict[str, dict[str, Any]] = {}  # by key, then by algorithm
    for name, table in TABLES.items():
        for key, field in table.model_fields.items():
            owners.setdefault(key, {})[name] = field
    for key, own in owners.items():
        hint: Any = reduce(or_, [field.annotation for field in own.values()])
        if command == TUNE:
            hint = hint | str  # a range, such as 0.001:1
        if command in (SWEEP, TUNE):
            hint = list[hint]
        yield option("hyper", key, hint, _meanings(own), [flag(key)])


def _meanings(fields: Mapping[str, Any]) -> str:
    """What a field means for the algorithms that have it, with their defaults.

    Algorithms that mean the same by a field share the sentence, and those with the same default
    share the bracket. So the help of a common field such as alpha stays short.

    Args:
        fields: The field of each algorithm that has it, by the algorithm's name.
    """
    meanings: dict[str, dict[str, list[str]]] = {}  # by meaning, then by default
    for name, field in fields.items():
        defaults = meanings.setdefault(str(field.description), {})
        defaults.setdefault(_text(field.default), []).append(name)
    told = []
    for meaning, defaults in meanings.items():
        each = [f"{', '.join(names)}: {default}" for default, names in defaults.items()]
        told.append(f"{meaning} [{'; '.join(each)}]")
    return "; ".join(told)


def _text(default: Any) -> str:
    """A default in the form in which it would be typed."""
    if isinstance(default, list):
        return ",".join(map(_text, default))
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, bool | None):
        return str(default).lower()
    return str(default)


def other_names(section: str) -> dict[str, tuple[str, ...]]:
    """What other libraries call the keys of a part of the settings.

    Args:
        section: A key of `PANELS`: run, data or hyper.

    Returns:
        The keys that each other name may stand for.
    """
    if section == "hyper":
        return OF_ALGORITHMS
    if section == "run":
        return {other: (key,) for other, key in OF_RUNS.items()}
    found: dict[str, tuple[str, ...]] = {}
    for one in all_options():
        for other in one.also:
            found[other] = (*found.get(other, ()), one.name)
    return found


# ---- commands ----


class WithData(TyperCommand):
    """A command that also takes the settings of the data as options.

    typer makes options of a function's parameters. Those of the settings are made here instead,
    and are taken out again before the function is called.
    """

    def __init__(
        self,
        name: str | None,
        *,
        params: list[click.Parameter] | None = None,
        **rest: Any,
    ) -> None:
        """Add the options of the settings to those that typer has made.

        Args:
            name: The name of the command, which decides what options it has.
            params: The options that typer has made.
            **rest: Passed on to typer.
        """
        self.settings = list(self.made(name or ""))
        super().__init__(
            name,
            params=[*(params or []), *self.settings],
            **rest,
        )

    def made(self, name: str) -> Iterator[TyperOption]:
        """The options of the command with this name."""
        return setting_options("data", name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line; an option that other libraries have is told by its name here."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            ours = self._called_here(error.option_name)
            if not ours:
                raise
            told = f"No such option '{error.option_name}'; here it is called {' or '.join(ours)}."
            raise click.NoSuchOption(error.option_name, told, ctx=error.ctx) from None

    def _called_here(self, typed: str) -> list[str]:
        """Options of this command that stand for a name of other libraries, such as --lr.

        click would suggest what is spelt alike, which for --lr is --l2.

        Args:
            typed: What was typed, with its dashes.
        """
        name = typed.removeprefix("--").replace("-", "_")
        found = []
        for made in self.settings:
            section, _, key = str(made.name).partition("_")
            if key in other_names(section).get(name, ()):
                found.append(made.opts[0])
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with the settings that were given, and no others, in `ctx.obj`.

        An option that was left out is no setting: the settings file, or the default, counts.
        """
        ctx.obj = {section: {} for section in PANELS}
        for made in self.settings:
            name = str(made.name)
            value = ctx.params.pop(name)
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                section, _, key = name.partition("_")
                ctx.obj[section][key] = _joined(value) if made.multiple else value
        return super().invoke(ctx)


def _joined(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The values of an option that was given several times, in one list."""
    found: list[Any] = []
    for part in parts:
        found += part
    return found


class WithSettings(WithData):
    """A command that takes every setting of a run as an option."""

    def made(self, name: str) -> Iterator[TyperOption]:
        """Options of the run, of the data and of the algorithms."""
        yield from setting_options("run", name)
        yield from setting_options("data", name)
        yield from hyper_options(name)
