"""What `import fedsso` offers: every name is explained, with an example that runs."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest

import fedsso
from fedsso.engine.settings import options

NAMES = [name for name in fedsso.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    thing = getattr(fedsso, name)
    text = inspect.getdoc(thing) or ""
    assert text.partition("\n")[0].endswith((".", ":")), "a summary in one line"
    made = doctest.DocTestParser().get_doctest(
        text, {**vars(inspect.getmodule(thing)), "fedsso": fedsso}, name, None, None
    )
    assert made.examples, f"the docstring of {name} needs an example that runs"
    told: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(made, out=told.append)
    assert not told, "".join(told)


@pytest.mark.parametrize(
    "call", [fedsso.simulate, fedsso.compare, fedsso.sweep, fedsso.tune, fedsso.Simulation]
)
def test_help_explains_every_option(call: Any) -> None:
    text = inspect.getdoc(call) or ""
    signature = inspect.signature(call)
    for one in options():
        assert f"{one.name} (default {one.default!r}): {one.doc}" in text
        assert signature.parameters[one.name].default == one.default


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: fedsso.load("digits", n_clients=4), "clients"),
        (lambda: fedsso.load("digits", alpha=0.1), "concentration"),
        (lambda: fedsso.FedAvg(lr=0.1), "alpha"),
        (lambda: fedsso.simulate(fedsso.load("digits", clients=3), n_rounds=4), "rounds"),
        (
            lambda: fedsso.simulate(fedsso.load("digits", clients=3), fraction_fit=1),
            "participation",
        ),
    ],
)
def test_the_names_of_other_libraries_are_understood(call: Any, meant: str) -> None:
    with pytest.raises(fedsso.InputError, match=f"'{meant}'"):
        call()
