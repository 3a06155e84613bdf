"""Step sizes as data: constant, or the two schedules of the paper's theorems.

    Theorem 2.1 (strongly convex)   eta_k = beta / (k + gamma),         alpha_k prop. to eta_k
    Theorem 3.1 (non-convex)        alpha_k = 1 / (2 sqrt(6) tau L k),  eta_k = 1 / sqrt(k)

The constants printed in Theorem 2.1 make its own condition beta u > 1 fail, where
u = kappa mu^2 / (N L); corrected ones are the default. In Theorem 3.1 the printed alpha_1 makes the
denominator of the bound vanish, so k + 1 replaces k, in alpha and in eta: both stay steps of one
round. `printed=True` gives the paper's text.

A field of type `Step` takes a number or a `Decay`. Algorithms ask `at(step, k)` for the step size
of round k, and so need not know which of the two it is. All fields of a schedule may differ
between the trials of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan, sqrt
from typing import Any, Literal

from ..errors import InputError, number, unknown
from ..support.trees import Scalar
from .records import fields_of, hyper, param


@hyper
class Decay:
    """A decaying step size: scale / (k + shift)^power in round k = 1, 2, ...

    Give it wherever an algorithm takes a step size, such as `FedAvg(alpha=Decay(scale=0.5))`. In
    a settings file it is a table of its fields: `alpha = {scale = 0.5, shift = 1.0}`. With power
    0 it is a constant.

    Args:
        scale: The numerator, > 0. With shift = 0 it is the step of round 1.
        shift: Added to the round, > -1; the larger, the later the step begins to fall.
        power: The exponent. 1 and 1/2 are those of the theorems; a negative one lets the step
            grow.

    Raises:
        InputError: A field is not a finite number, or outside its bounds.

    >>> Decay(scale=0.5, shift=1.0)(4)
    0.1
    >>> from fedsso import FedAvg
    >>> FedAvg(alpha=Decay(scale=0.5)).alpha(10)
    0.05
    """

    scale: Scalar = param(default=1.0, doc="numerator")
    shift: Scalar = param(default=0.0, doc="added to the round")
    power: Scalar = param(
        default=1.0, doc="exponent: 1 for Theorem 2.1, 1/2 for the server step of Theorem 3.1"
    )

    def __post_init__(self) -> None:
        """Check the fields, and keep each as a plain float, so that equal schedules are equal."""
        finite = True
        for name in ("scale", "shift", "power"):
            value = number(name, getattr(self, name))
            object.__setattr__(self, name, value)
            finite = finite and isfinite(value)
        if not (finite and self.scale > 0 and self.shift > -1):
            raise InputError(
                f"a decay needs finite scale > 0 and shift > -1, got {self.scale}, {self.shift}, "
                f"{self.power}"
            )

    def __call__(self, k: int) -> Scalar:
        """The step size of round k = 1, 2, ...; [trials, 1] where fields are swept."""
        return self.scale / (k + self.shift) ** self.power


def decay_of(name: str, table: Mapping[str, Any]) -> Decay:
    """The schedule that a table of its fields describes, as a settings file holds it.

    Args:
        name: The field that it is for, such as "alpha"; errors name it.
        table: Fields of `Decay` by name; those that are missing have their defaults.

    Raises:
        InputError: A key is not a field of a schedule, or a value is not allowed.

    >>> decay_of("alpha", {"scale": 0.5, "power": 0.5})
    Decay(scale=0.5, shift=0.0, power=0.5)
    """
    known = [field.name for field in fields_of(Decay)]
    for key in table:
        if key not in known:
            raise unknown(f"key of {name}, a schedule", key, known)
    return Decay(**table)


Step = Scalar | Decay
"""A step size: a constant or a schedule."""

Auto = Literal["auto"]
"""A step size that the algorithm chooses."""


def at(step: Step | Auto, k: int, chosen: Scalar = nan) -> Scalar:
    """The step size of round k; for "auto" the one that was chosen.

    Args:
        step: A number, a schedule, or "auto".
        k: The round, 1, 2, ...
        chosen: What the algorithm has chosen, for "auto".

    Returns:
        One number, or [trials, 1] where trials differ.

    >>> at(0.1, 7), at(Decay(scale=1.0), 4), at("auto", 7, chosen=0.3)
    (0.1, 0.25, 0.3)
    """
    if isinstance(step, str):
        return chosen
    if isinstance(step, Decay):
        return step(k)
    return step


def theorem_2(
    *,
    L: float,
    mu: float,
    tau: int,
    clients: int,
    kappa: float,
    kappa_bar: float,
    printed: bool = False,
) -> tuple[Decay, Decay]:
    """(alpha, eta) of Theorem 2.1, for an f that is L-smooth and mu-strongly convex.

    eta_k = beta / (k + gamma) and alpha_k = L kappa_bar^2 / (mu tau kappa) * eta_k, with beta and
    gamma from the constants below.

    Args:
        L: Smoothness of f, the largest eigenvalue of its Hessian.
        mu: Strong convexity of f, the smallest eigenvalue of its Hessian.
        tau: Local steps of a client in a round.
        clients: The number N of clients.
        kappa: Lower bound of the eigenvalues of B^-1.
        kappa_bar: Upper bound of the eigenvalues of B^-1.
        printed: Give the constants as the paper prints them, which break its own condition.

    Returns:
        The schedules of the client step alpha and of the server step eta, to be given to
        `FedSSO`.

    Raises:
        InputError: A constant is not a positive number.

    >>> alpha, eta = theorem_2(L=1.0, mu=0.1, tau=5, clients=10, kappa=0.5, kappa_bar=2.0)
    >>> alpha.power, eta.power, alpha.shift == eta.shift
    (1.0, 1.0, True)
    """
    _check_positive(L=L, mu=mu, tau=tau, clients=clients, kappa=kappa, kappa_bar=kappa_bar)
    ratio = L * kappa_bar**2 / (mu * tau * kappa)  # alpha_k = ratio * eta_k
    if printed:
        beta = 2 / mu
        gamma = max(2 * kappa * mu / (clients * L), 2 * L / mu)
    else:
        beta = 2 * clients * L / (kappa * mu**2)
        gamma = max(beta * kappa * mu**2 / (clients * L), beta * L * ratio)
    return Decay(beta * ratio, gamma), Decay(beta, gamma)


def theorem_3(
    *,
    L: float,
    tau: int,
    printed: bool = False,
) -> tuple[Decay, Decay]:
    """(alpha, eta) of Theorem 3.1, for an f that is L-smooth and need not be convex.

    With alpha_1 as printed, the theorem's bound is infinite. Both schedules therefore begin with
    what the paper prints for round 2: the rounds of both are shifted, so that a run follows the
    paper's from its second round on.

    Args:
        L: Smoothness of f.
        tau: Local steps of a client in a round.
        printed: Give both steps as the paper prints them: eta_1 = 1 instead of 1/sqrt(2), too.

    Returns:
        The schedules of the client step alpha, which falls like 1/k, and of the server step eta,
        which falls like 1/sqrt(k).

    Raises:
        InputError: A constant is not a positive number.

    >>> alpha, eta = theorem_3(L=1.0, tau=5)
    >>> eta(3)
    0.5
    >>> theorem_3(L=1.0, tau=5, printed=True)[1](4)
    0.5
    """
    _check_positive(L=L, tau=tau)
    shift = 0.0 if printed else 1.0
    alpha = Decay(1 / (2 * sqrt(6) * tau * L), shift)
    eta = Decay(1.0, shift, 0.5)
    return alpha, eta


def _check_positive(**values: float) -> None:
    """Refuse a constant that is not a positive number."""
    for name, value in values.items():
        if not number(name, value) > 0:
            raise InputError(f"{name} must be > 0, got {name}={value!r}")
