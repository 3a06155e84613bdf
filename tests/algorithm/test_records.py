"""Records: which fields a sweep may vary, and what a wrong field is told."""

from __future__ import annotations

import inspect
import pickle
import sys
from dataclasses import FrozenInstanceError, InitVar, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, FedSSO, InputError
from fedsso.algorithm import Algorithm, Auto, Decay, Scalar, Step, hyper, param
from fedsso.algorithm.records import changed, signature, stack, swept, to_dict
from fedsso.algorithms import ALGORITHMS, make

if TYPE_CHECKING:
    from fractions import Fraction

CPU = torch.device("cpu")
OWN = """
from torch import Tensor

from fedsso.algorithm import Algorithm, Auto, Decay, Scalar, Step, hyper, param


@hyper
class Own(Algorithm):
    alpha: {alpha} = param(default=0.1, doc="step")
    plain: {alpha} = 1.0
    window: {window} = param(default=3, doc="window")
    name: {name} = param(default="a", doc="name")
"""
FUTURE = "from __future__ import annotations\n"


def own(head: str, **types: str) -> Any:
    """A user's record, from a module of its own."""
    module = ModuleType("users")
    sys.modules["users"] = module
    exec(head + OWN.format(**types), module.__dict__)
    return module.__dict__["Own"]


@pytest.mark.parametrize("head", ["", FUTURE])
@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize(
    "alpha", ["Scalar", "Step", "Step | Auto", "float | Tensor", "Tensor | float", "Scalar | None"]
)
def test_a_field_is_swept_by_its_type_however_that_is_written(
    head: str, quoted: bool, alpha: str
) -> None:
    types = {"alpha": alpha, "window": "int | None", "name": "str"}
    if quoted:
        types = {name: f'"{text}"' for name, text in types.items()}
    cls = own(head, **types)
    assert swept(cls()) == ["alpha", "plain"]
    stacked = stack([cls(), cls(alpha=0.2, plain=2.0)], torch.float64, CPU)
    assert stacked.alpha.tolist() == [[0.1], [0.2]]
    assert stacked.plain.tolist() == [[1.0], [2.0]]
    assert (stacked.window, stacked.name) == (3, "a")
    assert signature(cls()) != signature(cls(window=4))


@hyper
class Said(Algorithm):
    """Its author says what is swept."""

    alpha: Fraction = param(default=0.1, doc="step", swept=True)  # a type that no run knows
    fixed: Scalar = param(default=0.3, doc="the same in all trials", swept=False)


@hyper
class Unsaid(Algorithm):
    """The type of a field is imported for type checkers alone."""

    alpha: Fraction = param(default=0.1, doc="step")


@hyper
class Nested(Said):
    """A record that inherits fields."""

    eta: Step = param(default=1.0, doc="server step")


def test_the_author_can_say_what_is_swept() -> None:
    assert swept(Said()) == ["alpha"]
    stacked = stack([Said(), replace(Said(), alpha=cast(Any, 0.2))], torch.float64, CPU)
    assert cast(Any, stacked).alpha.tolist() == [[0.1], [0.2]]
    with pytest.raises(InputError, match="equal static fields"):
        stack([Said(), Said(fixed=0.4)], torch.float64, CPU)


def test_a_type_that_cannot_be_read_is_told() -> None:
    message = r"Unsaid's fields cannot be read \(name 'Fraction' is not defined\).*swept=True"
    with pytest.raises(InputError, match=message):
        swept(Unsaid())


def test_every_algorithm_sweeps_what_it_did() -> None:
    """By the names of its steps, weights and bounds; never a count or a name, nor a number that
    decides how much is computed or sent, as MOCHA's share of the rows and HarmoFL's of the
    frequencies do."""
    work = ("tol", "frac", "least", "L", "lazy", "often", "p")
    found = {name: swept(make(name)) for name in ALGORITHMS}
    assert found["fedsso"] == ["alpha", "eta", "lam", "Lam"]
    assert found["fedac"] == ["alpha", "mu"]  # a, b and gamma are none or numbers
    assert found["fedsophia"] == ["alpha", "beta1", "beta2", "rho", "eps", "weight_decay"]
    assert swept(Decay()) == ["scale", "shift", "power"]
    for name, cls in ALGORITHMS.items():
        record: Any = cls()
        for field in inspect.signature(cls).parameters:
            number = isinstance(getattr(record, field), float) and field not in work
            number &= not (
                field in ("lam", "gamma", "c") and name[:2] in ("nl", "bl")
            )  # of the problem
            auto = getattr(record, field) == "auto" and field not in ("memory", "drift", "shapes")
            # None stands for a number that depends on l2, or at FedAC on other fields.
            later = getattr(record, field) is None and field in ("mu", "q") and name != "fedac"
            assert (field in found[name]) == (number or auto or later), (name, field)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("fedavg", "lr", "alpha"),
        ("fedavg", "learning_rate", "alpha"),
        ("fedsso", "eta_l", "alpha"),
        ("scaffold", "local_lr", "alpha"),
        ("fedprox", "client_lr", "alpha"),
        ("fednova", "step", "alpha"),
        ("fedsso", "server_lr", "eta"),
        ("fedadam", "global_lr", "eta"),
        ("fedavgm", "momentum", "beta1"),
    ],
)
def test_other_names_of_a_field_are_known(name: str, wrong: str, right: str) -> None:
    cls: Any = ALGORITHMS[name]
    message = f"unknown field of {cls.__name__} '{wrong}'; here it is called '{right}'. Known: "
    with pytest.raises(InputError, match=message):
        cls(**{wrong: 0.1})
    with pytest.raises(InputError, match=message):
        make(name, {wrong: 0.1})


def test_any_other_wrong_name_is_told_the_nearest_and_all() -> None:
    cls: Any = FedAvg
    with pytest.raises(InputError, match=r"'alhpa'; did you mean 'alpha'\? Known: alpha, eta\."):
        cls(alhpa=0.1)
    with pytest.raises(InputError, match=r"^unknown field of FedAvg 'window'\. Known: alpha, eta"):
        cls(window=3)
    with pytest.raises(InputError, match=r"unknown field of GIANT 'lr'\. Known: cg_steps, mu, tol"):
        cast(Any, ALGORITHMS["giant"])(lr=0.1)
    with pytest.raises(InputError, match="unknown field of Decay 'rate'"):
        cast(Any, Decay)(rate=0.1)
    with pytest.raises(InputError, match="here it is called 'alpha'"):
        replace(FedAvg(), **cast(Any, {"lr": 0.1}))


@hyper
class Users(Algorithm):
    """A record with a name for its constructor alone."""

    beta: Scalar = param(default=0.9, doc="momentum")
    percent: InitVar[float] = 0.0

    def __post_init__(self, percent: float) -> None:
        if percent:
            object.__setattr__(self, "beta", percent / 100)


@hyper
class Constructed(Algorithm):
    """A record with a constructor of its own, which takes what it likes."""

    alpha: Scalar = param(default=0.1, doc="step")

    def __init__(self, lr: float) -> None:
        object.__setattr__(self, "alpha", lr)


def test_users_records_are_checked_and_constructed_as_before() -> None:
    with pytest.raises(InputError, match="here it is called 'beta'"):
        cast(Any, Users)(momentum=0.5)
    assert Users(percent=50.0).beta == 0.5
    assert cast(Any, Constructed)(lr=0.3).alpha == 0.3
    assert Nested(eta=0.5).fixed == 0.3
    with pytest.raises(InputError, match="unknown field of Nested 'etta'; did you mean 'eta'"):
        cast(Any, Nested)(etta=0.5)


def test_a_record_is_still_a_frozen_dataclass() -> None:
    """Positional arguments, pickles, replace, equality, hashes and the signature are as ever."""
    record = FedSSO(0.1, 0.5, 20)
    assert (record.alpha, record.eta, record.R) == (0.1, 0.5, 20)
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(replace(record, R=None)) == hash(FedSSO(alpha=0.1, eta=0.5))
    assert list(inspect.signature(FedSSO).parameters)[:3] == ["alpha", "eta", "R"]
    assert str(inspect.signature(FedAvg)).startswith("(alpha: 'Step' = 0.01, eta: 'Step' = 1.0)")
    assert FedAvg.__init__.__qualname__.endswith("__init__")
    with pytest.raises(FrozenInstanceError):
        record.alpha = 0.2  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional argument"):
        cast(Any, FedAvg)(0.1, 1.0, 3)
    assert changed(FedSSO(alpha=Decay(0.1), R=3)) == {"alpha": to_dict(Decay(0.1)), "R": 3}


def test_words_and_schedules_are_stacked_apart_from_numbers() -> None:
    kinds: list[Step | Auto] = [0.1, "auto", Decay(0.1)]
    assert len({signature(FedSSO(alpha=alpha)) for alpha in kinds}) == 3
    assert stack([FedSSO(), FedSSO(eta=0.5)], torch.float32, CPU).alpha == "auto"
    scale = stack([FedSSO(alpha=Decay(a)) for a in (0.1, 0.2)], torch.float64, CPU).alpha
    assert isinstance(scale, Decay)
    assert isinstance(scale.scale, Tensor)
    assert scale.scale.tolist() == [[0.1], [0.2]]
