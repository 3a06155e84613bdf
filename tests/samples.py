"""Which cases of a test `make test` runs, and which are left to `make test-full`.

A test with several parameters has a case for every combination of their values. All of them run
before a change lands, but a few are enough while one works. Three ways say which are left out:

- `@pytest.mark.full` on a test: all its cases are. It is for tests that take seconds because they
  start processes, build the site or train for long.
- `@pytest.mark.sample("name")` on a test: all but one case for each value of the parameter `name`
  are. The values take turns with the cases of the other parameters: the first value keeps its first
  case, the second value its second one, and so on, so that a short run sees every value of every
  parameter. Without a name, only the first case of the test is kept.
- `case(..., spare=True)` among the values of a parameter: the cases with this value are.

The tests of the kernels (`tests/kernels.py`) leave out none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def case(*values: Any, name: str, spare: bool) -> Any:
    """One entry of `pytest.mark.parametrize`; a spare one is left to `make test-full`."""
    marks = [pytest.mark.full] if spare else []
    return pytest.param(*values, id=name, marks=marks)


def mark_full(items: Iterable[Any]) -> None:
    """Mark the cases as `full` that their test's marker `sample` leaves out."""
    tests: dict[str, dict[tuple[Any, ...], list[Any]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is None or item.get_closest_marker("full") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        value = tuple(item.callspec.params[name] for name in marker.args)
        tests[test][value].append(item)
    for cases_by_value in tests.values():
        for item in left_out(list(cases_by_value.values())):
            item.add_marker(pytest.mark.full)


def left_out(cases_by_value: Sequence[Sequence[Any]]) -> list[Any]:
    """All cases but one for each value; the values take turns with the cases they keep."""
    spare = []
    for turn, cases in enumerate(cases_by_value):
        kept = turn % len(cases)
        spare += [one for place, one in enumerate(cases) if place != kept]
    return spare
