"""The rule by which `make test` leaves out cases, and that no contract loses its last one."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from samples import case, left_out, mark_full


class Item:
    """What pytest collects, as far as the rule looks at it."""

    def __init__(self, test: str, *marks: pytest.MarkDecorator, **params: Any) -> None:
        self.nodeid = f"{test}[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = {one.name: one.mark for one in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def kept(items: list[Item]) -> list[dict[str, Any]]:
    """The parameters of the cases that `make test` runs."""
    mark_full(items)
    return [item.callspec.params for item in items if item.get_closest_marker("full") is None]


def test_values_take_turns_with_their_cases() -> None:
    assert left_out([["a", "b"], ["c", "d"], ["e", "f"], ["g"]]) == ["b", "c", "f"]


def test_one_case_is_kept_for_each_value() -> None:
    sample = pytest.mark.sample("name")
    items = [Item("t", sample, name=n, size=s) for s, n in product((1, 2, 3), "abcd")]
    found = {one["name"]: one["size"] for one in kept(items)}
    assert found == {"a": 1, "b": 2, "c": 3, "d": 1}
    assert len(kept(items)) == 4


def test_without_a_name_the_first_case_is_kept() -> None:
    sample = pytest.mark.sample
    items = [Item(test, sample, size=s) for test, s in product("tu", (1, 2, 3))]
    assert kept(items) == [{"size": 1}, {"size": 1}]


def test_a_spare_value_is_not_chosen() -> None:
    sample = pytest.mark.sample("name")
    items = [Item("t", sample, *case(1, name="", spare=True).marks, name="a", size=1)]
    items += [Item("t", sample, *case(2, name="", spare=False).marks, name="a", size=2)]
    assert kept(items) == [{"name": "a", "size": 2}]


def test_a_test_without_a_marker_is_left_alone() -> None:
    items = [Item("t", size=s) for s in (1, 2)]
    assert kept(items) == [{"size": 1}, {"size": 2}]
