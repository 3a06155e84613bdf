"""From live objects to plain settings, and back again.

`specify` writes down what a problem and a record are, so that a run can be told apart from others
and repeated. `federation_of` and `problem_of` make the live objects of a written run again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from ..algorithm.records import changed, to_dict
from ..algorithms import name_of
from ..errors import InputError
from ..support.fingerprint import describe
from ..support.intake import Unreadable, user_path
from .problem import Problem, check_federation, default_loss, outputs_of, pose
from .spec import Spec

if TYPE_CHECKING:
    from ..algorithm import Algorithm
    from ..data import Federation


def specify(
    problem: Problem,
    model: str | nn.Module,
    record: Algorithm,
    trial: int = 0,
    vary: Sequence[str] = (),
) -> Spec:
    """The settings of a run as plain values; objects that TOML cannot hold go by their names.

    A function of the user's is written as "own", its name and a digest of what it computes. So
    runs with different functions are told apart, though none can be read back.

    Args:
        problem: The live objects and the run options.
        model: What the user gave: a name, or a module, which is written as "own".
        record: The algorithm with its hyper-parameters.
        trial: The number of the run within its plan.
        vary: Names of the options that differ within a sweep, which the label then shows.
    """
    fed = problem.fed
    options = problem.settings.values()
    plain = dict(options)
    plain["metrics"] = tuple(m if isinstance(m, str) else _own(m) for m in plain["metrics"])
    if callable(plain["loss"]):
        plain["loss"] = _own(plain["loss"])
    if isinstance(plain["init"], Tensor | np.ndarray):
        plain["init"] = "own tensor"
    elif plain["init"] not in (None, "zero", "default"):
        # A path is written in full, so that a run goes on from any folder.
        plain["init"] = os.path.realpath(user_path("init", plain["init"]))
    # The client's step is shown even at its default, so that the labels of a grid look alike.
    always = {"alpha": to_dict(record)["alpha"]} if hasattr(record, "alpha") else {}
    shown = {**always, **changed(record), **{name: options[name] for name in vary}}
    short = {k: _short(v) for k, v in shown.items()}
    return Spec(
        dict(fed.source), problem.digest, model if isinstance(model, str) else "own", problem.start,
        tuple(fed.sample_shape), outputs_of(fed, options["loss"] or default_loss(fed)),
        name_of(record), to_dict(record), plain, trial, short,
    )  # fmt: skip


def _own(function: Callable[..., Any]) -> str:
    """A name for a user's function that changes with what it computes."""
    digest = hashlib.sha256(describe(function).encode()).hexdigest()[:12]
    return f"own {getattr(function, '__name__', 'function')} {digest}"


def _short(value: Any) -> str:
    """A value as a label shows it. A schedule becomes decay(...) with its numbers."""
    if isinstance(value, dict):
        return "decay(" + ",".join(_short(v) for v in value.values()) + ")"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def federation_of(spec: Spec) -> Federation:
    """Load the data of a run again; an error if they are not what they were.

    Raises:
        InputError: The data were arrays, their files are gone, or they have changed.
    """
    from ..data import load

    if not spec.data:
        raise InputError("this run used arrays of your own: give the federation from Python")
    try:
        fed = load(**spec.data)
    except Unreadable as error:
        again = "fedsso.resume(folder, federation=fedsso.load(...))"
        raise Unreadable(
            f"{error}. This run reads it there: put it back, or load it from elsewhere, in "
            f"Python: {again}"
        ) from error
    if fed.digest() != spec.digest:
        raise InputError(
            f"the data set {spec.data['name']!r} has changed since this run: its digest differs"
        )
    return fed


def problem_of(
    spec: Spec,
    fed: Federation | None = None,
    model: nn.Module | None = None,
    *,
    trained: bool = False,
) -> Problem:
    """The live objects of a run; data and modules of one's own must be given.

    Args:
        spec: The settings of the run.
        fed: The data; None: they are loaded by name.
        model: The module; None: it is built by name.
        trained: Whether the run is finished. Then it does not matter from which weights it
            started.

    Raises:
        InputError: Something is missing, or is not what the run was begun with.
    """
    if model is None and spec.model == "own":
        raise InputError("this run used a module of your own: give model= from Python")
    _check_own_functions(spec)
    if fed is not None:
        check_federation(fed)
    if fed is not None and fed.digest() != spec.digest:
        raise InputError("this federation is not the one of the run: their digests differ")
    problem = pose(fed or federation_of(spec), model or spec.model, spec.settings)
    if problem.start != spec.start and not trained:
        raise InputError(
            "the initial model is not the one of the run: another module, or its file has changed"
        )
    return problem


def _check_own_functions(spec: Spec) -> None:
    """Refuse a run whose loss, start or metrics were objects that no file can hold."""
    named = {
        "loss": [spec.options["loss"]],
        "init": [spec.options["init"]],
        "metrics": spec.options["metrics"],
    }
    for name, values in named.items():
        if any(str(value).startswith("own ") for value in values):
            raise InputError(
                f"this run used {name} of your own, which its folder does not hold: the same call "
                f"of fedsso.compare continues its runs; start a run of fedsso.simulate again "
                f"in another folder"
            )
