"""What a hospital has set for itself: where its table lies, its name, and its limits.

A SuperNode is told the hospital's folder, and may be told the rest:

    flower-supernode ... --node-config 'data-folder="/data/heart" name="north" min-rows=50'

The folder holds the hospital's table, one CSV file, and may hold a file hospital.toml:

    name = "north"              # how the results call this hospital
    schema = "schema.toml"      # no question with another schema is answered

    [limits]
    min-rows = 50               # see `regression.limits.Limits` for all of them

What the node is told counts more than the file. Nothing here can be set by the server, and a
setting that is not understood ends in a refusal, not in a default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from flwr.app import Context

from ...errors import InputError, integer, number, unknown
from ...regression import schema
from ...regression.design import Table, read_table
from ...regression.hospital import Hospital
from ...regression.limits import Limits
from ...regression.questions import Answer, Question
from ...support.intake import inside, is_file, read_text, read_toml, user_path

FILE = "hospital.toml"
FOLDER = "data-folder"
TABLES = (".csv",)
LIMITS = {one.name.replace("_", "-"): one.name for one in fields(Limits)}
"""The fields of Limits, by their names in a configuration."""

Config: TypeAlias = Mapping[str, Any]
Read: TypeAlias = Callable[[Path], Table]


@dataclass(frozen=True)
class Own:
    """A hospital by its own settings. Its table is read when a question comes."""

    name: str
    folder: Path
    limits: Limits
    schema: str = ""
    """The text of the one schema for which it answers. Empty: it answers for any."""
    read: Read = read_table
    kinds: tuple[str, ...] = TABLES
    """How the names of tables end."""

    def answer(self, question: Question) -> Answer:
        """The hospital's numbers. Raises InputError where it gives none."""
        if self.schema and schema.read(self.schema) != schema.read(question.schema):
            raise InputError(
                f"the schema of the question is not that of {self.folder / FILE}",
                public="this hospital answers for another schema, the one that it has agreed to",
            )
        table = self.read(the_table(self.folder, self.kinds))
        return Hospital(self.name, table, self.limits).answer(question)


def hospital(context: Context) -> Own:
    """The hospital of a SuperNode, by the node's configuration."""
    return settings(context.node_config, f"node {context.node_id}")


def settings(node_config: Config, name: str) -> Own:
    """What a hospital has set, in its file and in its node's configuration.

    Args:
        node_config: What the SuperNode was told.
        name: The hospital's name, if it has set none.
    """
    if FOLDER not in node_config:
        raise InputError(
            f"this node does not know the hospital's folder; start its flower-supernode with "
            f"--node-config '{FOLDER}=\"/path\"'",
            public=f"its node is told no {FOLDER}",
        )
    folder = user_path(FOLDER, node_config[FOLDER])
    in_file = read_toml(folder / FILE) if is_file(folder / FILE) else {}
    _check_names(in_file)
    limits = {**in_file.get("limits", {})}
    limits.update((key, node_config[key]) for key in LIMITS if key in node_config)
    called = node_config.get("name", in_file.get("name", name))
    agreed = in_file.get("schema", "")
    text = read_text(folder / str(agreed)) if agreed else ""
    return Own(str(called), folder, limits_of(limits), text)


def limits_of(given: Config) -> Limits:
    """Limits by their names in a configuration, checked.

    >>> limits_of({"min-rows": 50}).min_rows
    50
    """
    found = Limits()
    for key, value in given.items():
        if key not in LIMITS:
            raise unknown("limit", key, LIMITS)
        if key == "max-share":
            checked: float = number(key, value)
            if not 0 < checked <= 1:
                raise InputError(f"{key} must be above 0 and at most 1, got {value!r}")
        else:
            checked = integer(key, value, least=1)
        found = replace(found, **{LIMITS[key]: checked})
    return found


def the_table(folder: Path, kinds: tuple[str, ...] = TABLES) -> Path:
    """The one table in a hospital's folder. `kinds` are how the names of tables end."""
    found = [path for path in inside(folder) if path.name.endswith(kinds)]
    if len(found) == 1:
        return found[0]
    endings = " or ".join(f"*{kind}" for kind in kinds)
    wrong = f"has {len(found)} files {endings}, expected one: the hospital's table"
    raise InputError(f"{folder} {wrong}", public=f"its {FOLDER} {wrong}")


def _check_names(given: Config) -> None:
    """Refuse a file with a setting that does not exist, such as a limit by a wrong name."""
    known = ("name", "schema", "limits")
    for key in given:
        if key not in known:
            raise unknown(f"setting of {FILE}", key, known)
    if not isinstance(given.get("limits", {}), dict):
        raise InputError(f"limits in {FILE} must be a section [limits]")
