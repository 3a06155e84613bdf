"""Grids of hyper-parameters: their size, their values, and what they refuse."""

from __future__ import annotations

import pytest

from fedsso.algorithm.schedule import Decay
from fedsso.algorithms import ALGORITHMS, FedAvg, FedSSO
from fedsso.errors import InputError
from fedsso.experiment.grids import ALPHA, BOTH, ETA, OWN, axes, grid, tried


def test_the_papers_axes() -> None:
    assert (len(ALPHA), len(ETA)) == (12, 7)
    assert axes("fedsso") == {"alpha": ALPHA, "eta": ETA}
    assert axes("fedavg") == {"alpha": ALPHA}
    assert set(axes("fedprox")) == {"alpha", "mu"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_grid_of_different_records(name: str) -> None:
    size = 1
    for values in axes(name).values():
        size *= len(values)
    records = grid(name)
    assert len(records) == len(set(map(repr, records))) == size
    assert all(type(record) is ALGORITHMS[name] for record in records)


def test_the_named_algorithms_exist() -> None:
    assert {*BOTH, *OWN} <= set(ALGORITHMS)


def test_axes_are_a_copy() -> None:
    axes("fednl")["eta"] = (9.0,)
    assert axes("fednl")["eta"] != (9.0,)


def test_a_list_replaces_or_adds_an_axis_and_one_value_is_fixed() -> None:
    made = grid("fedsso", {"alpha": [0.1, 0.3], "eta": 0.5, "form": ["bfgs", "dfp"]})
    assert made == [FedSSO(alpha=a, eta=0.5, form=f) for a in (0.1, 0.3) for f in ("bfgs", "dfp")]
    assert grid("fedavg", {"alpha": Decay(1.0, 9.0)}) == [FedAvg(alpha=Decay(1.0, 9.0))]
    assert grid("fedavg", {"alpha": (0.1,)}) == [FedAvg(alpha=0.1)]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("fedso", {}, "did you mean 'fedsso'"),
        (
            "fedavg",
            {"alpha": []},
            "alpha must list different values, at least one; got alpha=\\[\\]",
        ),
        ("fedavg", {"alpha": [0.1, 0.3, 0.1]}, "alpha must list different values"),
        ("fedavg", {"alpha": [0.1, -1.0]}, "alpha must be > 0"),
        ("fedavg", {"alpah": [0.1]}, "did you mean 'alpha'"),
    ],
)
def test_a_wrong_grid_is_refused(name: str, values: dict[str, list[float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        grid(name, values)


def test_what_was_tried_gives_the_grid_again() -> None:
    records = grid("fedsso", {"alpha": [0.3, 0.1], "form": ["dfp", "bfgs"]})
    values = tried(records)
    assert (values["alpha"], values["form"], values["lam"]) == ([0.3, 0.1], ["dfp", "bfgs"], [1e-4])
    again = grid("fedsso", {k: v if len(v) > 1 else v[0] for k, v in values.items()})
    assert set(map(repr, again)) == set(map(repr, records))
    assert tried([FedAvg(alpha=Decay(1.0, 9.0))])["alpha"] == [
        {"scale": 1.0, "shift": 9.0, "power": 1.0}
    ]
