"""What a hospital has set for itself: where its table lies, its name, and its limits.

A SuperNode is told the hospital's folder, and may be told the rest:

    flower-supernode ... --node-config 'data-folder="/data/heart" name="north" min-rows=50'

The folder holds the hospital's table, one CSV file, and may hold a file hospital.toml:

    name = "north"              # how the results call this hospital
    schema = "schema.toml"      # no question with another schema is answered
    family = "binomial"         # nor another family; left out: cox if the schema has a time

    [limits]
    min-rows = 50               # see `regression.limits.Limits` for all of them

What the node is told counts more than the file. No question can set anything here, and a setting
that is not understood ends in a refusal, not in a default. The folder also holds what the hospital
has answered, `answered.npz` (see `regression.ledger`), so it must be writable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import Context

from ...errors import InputError, integer, number, unknown
from ...regression import schema
from ...regression.design import Table, read_table
from ...regression.families import named
from ...regression.hospital import Hospital
from ...regression.ledger import Ledger
from ...regression.limits import Limits
from ...regression.outcome import BINOMIAL, COX
from ...regression.questions import DESCRIBE, Answer, Question
from ...support.intake import inside, is_file, read_text, read_toml, user_path

log = logging.getLogger("flwr")

FILE = "hospital.toml"
FOLDER = "data-folder"
TABLES = (".csv",)
LEDGER = "answered.npz"
"""Beside the table: the rows of all answers so far, by their fingerprints."""
KEYS = ("name", "schema", "family", "limits")
LIMITS = {one.name.replace("_", "-"): one.name for one in fields(Limits)}
"""The fields of Limits, by their names in a configuration."""

Config: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[Path], Table]


@dataclass(frozen=True)
class Own:
    """A hospital by its own settings."""

    name: str
    table: Callable[[], Table]
    """Reads its table, when a question comes."""
    limits: Limits = field(default_factory=Limits)
    schema: str = ""
    """The text of the one schema for which it answers. Empty: it answers for any."""
    family: str = ""
    """The one family for which it answers. Empty: with a schema the usual one, else any."""
    ledger: Ledger | None = None
    """What it has answered before. None: what this process knows of it."""

    def answer(self, question: Question) -> Answer:
        """The hospital's numbers. Raises InputError where it gives none."""
        self._check_agreed(question)
        asked = Hospital(
            self.name, self.table(), self.limits, self.ledger, agreed=bool(self.schema)
        )
        found = asked.answer(question)
        if question.name == DESCRIBE:
            for note in asked.notes:
                log.info(note)
        return found

    def _check_agreed(self, question: Question) -> None:
        """Raise InputError for a question of another schema or family than this hospital's own."""
        family = self.family
        if self.schema:
            own = schema.parse(self.schema)
            family = family or (COX if own.time else BINOMIAL)
            if own != schema.parse(question.schema):
                raise _other("schema")
        if family and named(family).text != named(question.family).text:
            raise _other("family")


def _other(what: str) -> InputError:
    """The error of a question to which the hospital has not agreed."""
    return InputError(
        f"the {what} of the question is not the one that {FILE} names",
        public=f"this hospital answers for another {what}, the one that it has agreed to",
    )


def hospital(
    context: Context,
    read: Read = read_table,
    kinds: tuple[str, ...] = TABLES,
) -> Own:
    """The hospital of a SuperNode, by the node's own configuration.

    Args:
        context: Flower's. Nothing of it that the server sets is used.
        read: Reads a table.
        kinds: How the names of tables end.
    """
    folder, in_file = _folder(context.node_config)
    limits = {**in_file.get("limits", {})}
    for key in LIMITS:
        if key in context.node_config:
            limits[key] = context.node_config[key]
    unnamed = f"node {context.node_id}"
    name = context.node_config.get("name", in_file.get("name", unnamed))
    agreed = in_file.get("schema", "")
    text = read_text(folder / str(agreed)) if agreed else ""
    return Own(
        str(name),
        lambda: read(the_table(folder, kinds)),
        limits_of(limits),
        text,
        str(in_file.get("family", "")),
        Ledger(folder / LEDGER),
    )


def _folder(node_config: Config) -> tuple[Path, Config]:
    """The hospital's folder, and what its file sets."""
    if FOLDER not in node_config:
        raise InputError(
            f"this node does not know the hospital's folder; start its flower-supernode with "
            f"--node-config '{FOLDER}=\"/path\"'",
            public=f"its node is told no {FOLDER}",
        )
    folder = user_path(FOLDER, node_config[FOLDER])
    in_file = read_toml(folder / FILE) if is_file(folder / FILE) else {}
    for key in in_file:
        if key not in KEYS:
            raise unknown(f"setting of {FILE}", key, KEYS)
    if not isinstance(in_file.get("limits", {}), dict):
        raise InputError(f"limits in {FILE} must be a section [limits]")
    return folder, in_file


def limits_of(given: Config) -> Limits:
    """Limits by their names in a configuration, checked.

    >>> limits_of({"min-rows": 50}).min_rows
    50
    """
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in LIMITS:
            raise unknown("limit", key, LIMITS)
        if key == "max-share":
            share = number(key, value)
            if not 0 < share <= 1:
                raise InputError(f"{key} must be above 0 and at most 1, got {value!r}")
            checked[LIMITS[key]] = share
        else:
            checked[LIMITS[key]] = integer(key, value, least=1)
    return Limits(**checked)


def the_table(folder: Path, kinds: tuple[str, ...] = TABLES) -> Path:
    """The one table in a hospital's folder. `kinds` are how the names of tables end."""
    found = [path for path in inside(folder) if path.name.endswith(kinds)]
    if len(found) == 1:
        return found[0]
    endings = " or ".join(f"*{kind}" for kind in kinds)
    wrong = f"has {len(found)} files {endings}, expected one: the hospital's table"
    raise InputError(f"{folder} {wrong}", public=f"its {FOLDER} {wrong}")
