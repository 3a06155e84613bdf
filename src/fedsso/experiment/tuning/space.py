"""What is searched for an algorithm: ranges, choices and fixed values of its fields.

Left to itself, an algorithm is searched where its grid lies (`grids.axes`): between the smallest
and the largest value of each axis, on a logarithmic scale if both are above 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from ...algorithm.records import fields_of, to_dict
from ...algorithms import ALGORITHMS, make
from ...errors import InputError
from ..grids import axes

if TYPE_CHECKING:
    import optuna

    from ...algorithm import Algorithm

DIGITS = 3  # of a number that is tried: more would not be told apart by anybody


class Range(NamedTuple):
    """Numbers between two ends, both of them included."""

    low: float
    high: float
    whole: bool = False  # integers alone

    @property
    def is_logarithmic(self) -> bool:
        """Whether factors count, not differences."""
        return self.low > 0

    def __str__(self) -> str:
        """The range as it is typed."""
        return f"{self.low:g}:{self.high:g}"


class Space(NamedTuple):
    """The fields of one algorithm that are searched, and those that have one value."""

    algorithm: str
    ranges: Mapping[str, Range]
    choices: Mapping[str, list[Any]]
    fixed: Mapping[str, Any]

    @property
    def size(self) -> int:
        """How many fields are searched."""
        return len(self.ranges) + len(self.choices)

    def record(self, values: Mapping[str, Any]) -> Algorithm:
        """The algorithm with some values of the fields that are searched."""
        return make(self.algorithm, {**self.fixed, **values})

    def corners(self) -> list[Algorithm]:
        """Records at both ends of the ranges, with each choice; to check them before any work."""
        lowest: dict[str, Any] = {}
        highest: dict[str, Any] = {}
        for name, one in self.ranges.items():
            lowest[name] = one.low
            highest[name] = one.high
        for name, several in self.choices.items():
            lowest[name] = several[0]
            highest[name] = several[0]
        found = [self.record(lowest)]
        if self.ranges:
            found.append(self.record(highest))
        for name, several in self.choices.items():
            for value in several[1:]:
                found.append(self.record({**lowest, name: value}))
        return found

    def draw(self, trial: optuna.Trial) -> Algorithm:
        """A record with values that a trial suggests, in few digits."""
        values: dict[str, Any] = {}
        for name, one in self.ranges.items():
            scale = one.is_logarithmic
            if one.whole:
                low = int(one.low)
                high = int(one.high)
                values[name] = trial.suggest_int(name, low, high, log=scale)
                continue
            exact = trial.suggest_float(name, one.low, one.high, log=scale)
            short = float(f"{exact:.{DIGITS}g}")
            values[name] = min(max(short, one.low), one.high)
        for name, several in self.choices.items():
            values[name] = trial.suggest_categorical(name, several)
        return self.record(values)

    def table(self) -> dict[str, Any]:
        """The space as a settings file holds it."""
        ranges = {name: str(one) for name, one in self.ranges.items()}
        fixed = {}
        for name, value in self.fixed.items():
            fixed[name] = to_dict(value) if is_dataclass(value) else value
        return {**fixed, **ranges, **self.choices}


def space_of(name: str, values: Mapping[str, Any] | None = None) -> Space:
    """What is searched for an algorithm.

    Args:
        name: The algorithm's name in the registry.
        values: By field: a range as text, "0.001:1", or as a pair of numbers, (0.001, 1); a list
            of choices; or one value, which is then fixed. Fields that are left out are searched
            where the grid lies, or have their defaults.

    Raises:
        InputError: A name is unknown, a range is none, or nothing is left to search.

    >>> space_of("fedprox", {"mu": 0.1})
    Space(algorithm='fedprox', ranges={'alpha': Range(low=0.0001, high=0.7, whole=False)},
          choices={}, fixed={'mu': 0.1})
    """
    given: dict[str, Any] = {}
    for key, axis in axes(name).items():
        given[key] = (min(axis), max(axis))
    given |= values or {}
    fields = [field.name for field in fields_of(ALGORITHMS[name])]
    hints = get_type_hints(ALGORITHMS[name])
    ranges: dict[str, Range] = {}
    choices: dict[str, list[Any]] = {}
    fixed: dict[str, Any] = {}
    for key, value in given.items():
        one = value
        if isinstance(value, list) and len(value) == 1:
            one = value[0]
        if isinstance(one, list):
            choices[key] = _different(key, one)
        elif _is_range(one):
            hint = hints.get(key)
            kinds = get_args(hint) or (hint,)
            whole = int in kinds and float not in kinds
            ranges[key] = _range(key, one, whole)
        else:
            fixed[key] = one
    space = Space(name, ranges, choices, fixed)
    if not space.size:
        raise InputError(
            f"{name} has nothing to tune here; give a range, such as "
            f"{next(iter(fields), 'alpha')}=0.001:1, or list several values"
        )
    space.corners()  # which check every field
    return space


def _is_range(value: Any) -> bool:
    """Whether a value is meant as a range: a pair, or text such as 0.001:1.

    A word may have a colon as well, such as the compressor rank:1 of FedNL, which is no range.
    """
    if not isinstance(value, str):
        return isinstance(value, tuple)
    low, colon, high = value.partition(":")
    return bool(colon) and _is_number(low) and _is_number(high)


def _is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _range(key: str, given: Any, whole: bool) -> Range:
    """A range from text such as 0.001:1, or from a pair of numbers."""
    ends = given.split(":") if isinstance(given, str) else given
    try:
        low, high = map(float, ends)
    except (TypeError, ValueError):
        low = math.inf
        high = math.inf
    if not -math.inf < low < high < math.inf:
        raise InputError(
            f"{key} must be a range of two numbers, the smaller one first, such as 0.001:1; got "
            f"{key}={given!r}"
        )
    if whole and not (low.is_integer() and high.is_integer()):
        raise InputError(f"{key} takes integers alone; got the range {key}={given!r}")
    return Range(low, high, whole)


def _different(key: str, several: list[Any]) -> list[Any]:
    """The choices, if there are some and all differ, and none is itself a range."""
    if len(set(map(repr, several))) < max(1, len(several)):
        raise InputError(f"{key} must list different values, at least one; got {key}={several}")
    for one in several:
        if _is_range(one):
            raise InputError(f"{key} is a range or a list of values; got {key}={several}")
    return several
