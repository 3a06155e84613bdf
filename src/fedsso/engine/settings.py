"""The options of a run, declared once.

`Settings` is one frozen record. Each of its fields has a type, a default, bounds and a sentence
that says what it does. Everything else is made from it: the keyword arguments of
`fedsso.simulate` and their `help()`, the options of the command line, the keys of a settings file,
the checks, what a run writes down about itself, and the options page of the documentation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args, get_type_hints

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithm.client_optimizer import KINDS, ClientOptimizer
from ..errors import InputError, integer, number, one_of, unknown
from ..maths.compress import check as check_compression

# The words for floating-point types, and for the ways in which clients are computed.
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ENGINES = ("auto", "stacked", "loop")
# The types of options that take a name or an object of the user's own.
Loss = str | Callable[[Tensor, Tensor], Tensor]
Metrics = Sequence[str | Callable[[Tensor, Tensor], float]]
F = TypeVar("F", bound=Callable[..., Any])
Init = str | Path | Tensor | NDArray[Any]

OTHER_NAMES = {  # what other libraries call these options
    "n_rounds": "rounds",
    "num_rounds": "rounds",
    "num_server_rounds": "rounds",
    "epochs": "local_epochs",
    "num_epochs": "local_epochs",
    "n_local_steps": "local_steps",
    "num_local_steps": "local_steps",
    "tau": "local_steps",
    "batch": "batch_size",
    "bs": "batch_size",
    "fraction": "participation",
    "fraction_fit": "participation",
    "fraction_train": "participation",
    "client_fraction": "participation",
    "cohort_size": "participation",
    "dropout": "drop_rate",
    "random_state": "seed",
    "optimizer": "client",
    "weight_decay": "client_weight_decay",
    "client_optimizer": "client",
    "compression": "compress",
    "precision": "dtype",
    "initial": "init",
}


class Bounds(NamedTuple):
    """An interval of numbers, with or without its ends.

    `value in bounds` checks a number, `str(bounds)` is the rule as an error message says it.

    >>> str(Bounds(0, 1, low_belongs=False)), 0 in Bounds(0, 1, low_belongs=False)
    ('lie in (0, 1]', False)
    """

    low: float
    high: float
    low_belongs: bool = True
    high_belongs: bool = True

    def __contains__(self, value: object) -> bool:
        """Whether a value is a number in the interval; NaN never is."""
        if not isinstance(value, int | float):
            return False
        above = value >= self.low if self.low_belongs else value > self.low
        below = value <= self.high if self.high_belongs else value < self.high
        return above and below

    def __str__(self) -> str:
        """The rule in words that follow "must": "be >= 1", "lie in [0, 1)"."""
        if self.high == math.inf:
            sign = ">=" if self.low_belongs else ">"
            finite = "" if self.high_belongs else " and finite"
            return f"be {sign} {self.low:g}{finite}"
        left = "[" if self.low_belongs else "("
        right = "]" if self.high_belongs else ")"
        return f"lie in {left}{self.low:g}, {self.high:g}{right}"


class Option(NamedTuple):
    """One option as users see it.

    Help texts, the command line, settings files and the options page are made from these, so that
    nothing about an option is written down twice.
    """

    name: str
    kind: Any  # its type in Python
    default: Any
    doc: str  # one sentence
    bounds: Bounds | None  # of a number
    choices: tuple[str, ...]  # of a word
    in_files: Any  # its type in a settings file and on the command line


def option(
    default: Any,
    doc: str,
    *,
    bounds: Bounds | None = None,
    choices: Sequence[str] = (),
    in_files: Any = None,
) -> Any:
    """Declare a field of `Settings`.

    Args:
        default: Its value where the user says nothing.
        doc: What it does, in one sentence.
        bounds: The interval of a number.
        choices: The words that are allowed, where only some are.
        in_files: Its type in TOML and on the command line, where that is another one than in
            Python.
    """
    told = {"doc": doc, "bounds": bounds, "choices": tuple(choices), "in_files": in_files}
    return field(default=default, metadata=told)


COUNT = Bounds(1, math.inf)
SHARE = Bounds(0, 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run goes, apart from its data, its model and its algorithm.

    Types and bounds are checked when the record is made. Whether `init` and `loss` suit data and
    model is checked where these are known. Values come out in their plain form: a number of numpy
    becomes one of Python, compress="none" becomes None, and `metrics` is a tuple that begins with
    "accuracy".

    A client's work in a round is given either by `local_steps` or by `local_epochs`. With the
    latter `local_steps` is None.

    Raises:
        InputError: A value has the wrong type or lies outside its bounds. The message names the
            option, the value and what is allowed.

    >>> Settings(rounds=20, participation=0.25).local_steps
    5
    >>> Settings(local_epochs=2).local_steps is None
    True
    """

    rounds: int = option(100, "Communication rounds.", bounds=COUNT)
    local_steps: int | None = option(
        5, "Number τ of local steps of a client per round.", bounds=COUNT, in_files=int
    )
    local_epochs: int | None = option(
        None,
        "Local epochs of a client per round, instead of local_steps.",
        bounds=COUNT,
    )
    batch_size: int | None = option(
        100,
        "Rows per mini-batch. None (in files and on the command line: full) uses all rows of a "
        "client.",
        bounds=COUNT,
        in_files=int | Literal["full"],
    )
    client: str = option(
        "sgd",
        "Optimizer of the clients: sgd, momentum (0.9), adam or adamw, as in torch.optim. All but "
        "sgd need an algorithm that leaves local training open, such as FedAvg, FedAdam or FedSSO.",
        choices=KINDS,
    )
    client_weight_decay: float = option(
        0.0,
        "Weight decay of the clients' optimizer, as in torch.optim. Unlike l2, it is not part of "
        "the loss.",
        bounds=Bounds(0, math.inf, high_belongs=False),
    )
    participation: float = option(
        1.0,
        "Fraction of the clients sampled in each round.",
        bounds=Bounds(0, 1, low_belongs=False),
    )
    drop_rate: float = option(
        0.0,
        "Probability that a sampled client does not answer.",
        bounds=Bounds(0, 1, high_belongs=False),
    )
    stragglers: float = option(
        0.0, "Fraction of the clients that take only some of their local steps.", bounds=SHARE
    )
    seed: int = option(
        0,
        "Seed of client sampling, mini-batches and the initial weights of built-in models, but "
        "not of the partition. Your own module keeps its initial weights.",
        in_files=int | list[int],
    )
    eval_every: int = option(1, "Rounds between two evaluations on the test rows.", bounds=COUNT)
    eval_train: bool = option(
        False, "Also evaluate the loss on all training rows, which takes longer."
    )
    init: Init | None = option(
        None,
        "Initial model: zero, default (torch's random weights), a flat tensor or a safetensors "
        "file. By default zero for convex models, and torch's random weights for others.",
        in_files=str | None,
    )
    loss: Loss | None = option(
        None,
        "Loss: cross_entropy, mse, bce or your own function. By default cross_entropy for class "
        "labels, and mse for real targets.",
        in_files=str | None,
    )
    metrics: Metrics = option(
        ("accuracy",),
        "Metrics on the test rows besides the loss: accuracy, auc, f1 or your own functions.",
        in_files=list[str],
    )
    stop_at: float | None = option(
        None,
        "Stop a run once its test accuracy reaches this value.",
        bounds=Bounds(0, 1, low_belongs=False),
    )
    dtype: str = option("float32", "Floating-point type of all numbers.", choices=tuple(DTYPES))
    device: str = option(
        "auto", "Device: auto (a GPU if there is one), cpu, cuda or cuda:1; a sweep takes several."
    )
    engine: str = option(
        "auto",
        "How clients are trained: stacked (many at once), loop (one by one) or auto.",
        choices=ENGINES,
    )
    compress: str | None = option(
        None, "Compression of uploads, with error feedback: topk:SHARE, int8, rank:R or none."
    )
    l2: float = option(
        0.0,
        "Strength of the penalty l2/2·|x|² on all parameters, as part of every client's loss.",
        bounds=Bounds(0, math.inf, high_belongs=False),
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Settings from keyword arguments, as users give them.

        Raises:
            InputError: A name is not an option; the message suggests the one that was probably
                meant, also for names of other libraries. Or both `local_steps` and `local_epochs`
                were given.
        """
        known = {one.name for one in fields(cls)}
        for name in given:
            if name not in known:
                raise unknown("option", name, known, also=OTHER_NAMES)
        if given.get("local_epochs") is not None and given.get("local_steps") is not None:
            raise InputError(
                "local_steps and local_epochs were both given; a client's work is one or the other"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        """Check every option by its declaration, then what concerns several of them."""
        for one in options():
            self._set(one.name, _checked(one, getattr(self, one.name)))
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed must fit into 64 bits, got seed={self.seed}")
        if self.local_epochs is not None:
            self._set("local_steps", None)
        elif self.local_steps is None:
            raise InputError(
                "local_steps must be an integer >= 1, got local_steps=None without local_epochs"
            )
        if self.compress == "none":
            self._set("compress", None)
        if self.compress is not None:
            check_compression(self.compress)
        self._set("metrics", _several_metrics(self.metrics))

    def _set(self, name: str, value: Any) -> None:
        """Write a checked value into the record, which is frozen for everybody else."""
        object.__setattr__(self, name, value)

    def with_seed(self, seed: int) -> Self:
        """The same settings with another seed."""
        return replace(self, seed=seed)

    def values(self) -> dict[str, Any]:
        """All options by name, checked and in their plain form."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def optimizer(self) -> ClientOptimizer:
        """What clients step with."""
        return ClientOptimizer(self.client, self.client_weight_decay)

    def asked(self, clients: int) -> int:
        """How many of so many clients are asked in a round."""
        return max(1, round(self.participation * clients))

    @property
    def some_absent(self) -> bool:
        """Whether some clients may be missing in a round."""
        return self.participation < 1 or self.drop_rate > 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The floating-point type as torch has it."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """The device on which the run computes; raises InputError where it is not there."""
        return device_of(self.device)


def options() -> list[Option]:
    """Every option of a run, in the order of the record.

    The list is made once and shared: callers must not change it.
    """
    if not _OPTIONS:
        hints = get_type_hints(Settings)
        for one in fields(Settings):
            told = dict(one.metadata)
            in_files = told.pop("in_files") or hints[one.name]
            _OPTIONS.append(
                Option(one.name, hints[one.name], one.default, **told, in_files=in_files)
            )
    return _OPTIONS


_OPTIONS: list[Option] = []


def _checked(one: Option, value: Any) -> Any:
    """The value of an option in its own type and within its bounds.

    The declared type decides what is checked. None passes where the type allows it. Values that
    are neither words of a list, truth values nor numbers (init, loss, metrics, compress) are
    returned as they are.
    """
    kinds = get_args(one.kind) or (one.kind,)
    if value is None and type(None) in kinds:
        return None
    if one.choices:
        # torch.float64 is taken for float64.
        return one_of(one.name, str(value).removeprefix("torch."), one.choices)
    if one.name == "device":
        return str(value)
    if bool in kinds:
        if not isinstance(value, bool):
            raise InputError(f"{one.name} must be True or False, got {one.name}={value!r}")
        return value
    if int in kinds:
        least = None if one.bounds is None else int(one.bounds.low)
        return integer(one.name, value, least)
    if float in kinds:
        return _number_within(one, value)
    return value


def _number_within(one: Option, value: Any) -> float:
    """The value as a float, if it is a number within the option's bounds."""
    found = number(one.name, value)
    if one.bounds is not None and found not in one.bounds:
        raise InputError(f"{one.name} must {one.bounds}, got {one.name}={value!r}")
    return found


def _several_metrics(wished: Any) -> tuple[Any, ...]:
    """The accuracy and what is wished besides, each once.

    A single metric may be given without a list. Names are looked up later, by `metrics.metric`.
    """
    several = wished if isinstance(wished, list | tuple) else [wished]
    for one in several:
        if not isinstance(one, str) and not callable(one):
            raise InputError(f"a metric is a name or a function, got metrics={wished!r}")
    return tuple(dict.fromkeys(("accuracy", *several)))


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one.

    Raises:
        InputError: No device has this name, it is neither a CPU nor a CUDA device, or torch sees
            no GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device {name!r} was requested, but torch sees no GPU; use device='cpu' or install "
            "the CUDA build"
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:1")
    return device


def with_options(function: F) -> F:
    """Give a function that takes run options their names, defaults and explanations.

    A decorator for functions and classes that take `**options`: it changes signature and
    docstring of what it is given and returns it. `help(function)` then shows every option, and
    editors complete them.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.kind
        )
        for one in options()
    ]
    made: Any = function
    made.__signature__ = signature.replace(parameters=[*own, *shared])
    lines = [f"    {one.name} (default {one.default!r}): {one.doc}" for one in options()]
    text = inspect.getdoc(function) or ""
    made.__doc__ = "\n".join([text, "", "Run options, all by keyword:", "", *lines])
    return function
