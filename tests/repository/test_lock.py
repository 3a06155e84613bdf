"""The lock fits what pyproject.toml asks for, and what these packages need in turn; it installs on
the oldest Python that is promised, and has nothing below a published fix."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST = "3.11.0"  # of `requires-python`
Pins = dict[Any, Version]


def locked() -> Pins:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {
        canonicalize_name(name): Version(pin) for name, pin in (line.split("==") for line in lines)
    }


def asked() -> list[str]:
    """What the package and all its extras name; an extra that names other extras adds nothing."""
    project = SETTINGS["project"]
    named = chain(project["dependencies"], *project["optional-dependencies"].values())
    return [one for one in named if not one.startswith("fedsso[")]


def broken(pins: Pins, asked: list[str]) -> list[str]:
    """The requirements, and those of the packages that they name, that the pins do not meet."""
    waiting = [Requirement(one) for one in asked]
    seen: set[str] = set()
    while waiting:
        one = waiting.pop()
        if str(one) not in seen:
            seen.add(str(one))
            waiting += needs(one)
    return sorted(one for one in seen if not meets(pins, Requirement(one)))


def meets(pins: Pins, one: Requirement) -> bool:
    pin = pins.get(canonicalize_name(one.name))
    return pin is not None and pin in one.specifier


def needs(one: Requirement) -> Iterator[Requirement]:
    """What a package needs here, if it is installed; CUDA's are not beside a CPU's torch."""
    if canonicalize_name(one.name) in installed():
        for need in map(Requirement, metadata.requires(one.name) or []):
            extras = one.extras | {""}
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras):
                need.marker = None
                yield need


def installed() -> set[str]:
    return {canonicalize_name(one.metadata["Name"]) for one in metadata.distributions()}


def test_the_lock_has_all_that_is_needed_in_a_version_that_suits() -> None:
    assert broken(locked(), asked()) == [], "run `make lock`"


def test_a_lock_that_does_not_suit_is_found() -> None:
    """Too old a version of what is asked for, and nothing of what typer needs."""
    pins = locked() | {"numpy": Version("1.0")}
    del pins["click"]
    found = {Requirement(one).name for one in broken(pins, ["numpy>=1.26", "typer"])}
    assert found == {"numpy", "click"}


def test_the_lock_has_nothing_below_a_published_fix() -> None:
    floors = SETTINGS["tool"]["uv"]["constraint-dependencies"]
    pins = locked()
    assert [one for one in floors if not meets(pins, Requirement(one))] == []


def test_the_lock_installs_on_the_oldest_python_that_is_promised() -> None:
    """By what the locked versions say themselves, as far as they are installed."""
    assert OLDEST in SpecifierSet(SETTINGS["project"]["requires-python"])
    pins = locked()
    refused = [
        one.name
        for one in metadata.distributions()
        if pins.get(canonicalize_name(one.name)) == Version(one.version)
        and OLDEST not in SpecifierSet(one.metadata.get("Requires-Python") or "")
    ]
    assert refused == []
