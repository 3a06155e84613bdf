"""Step sizes as data: constant, or the two schedules of the paper's theorems.

    Theorem 2.1 (strongly convex)   eta_k = beta / (k + gamma),         alpha_k prop. to eta_k
    Theorem 3.1 (non-convex)        alpha_k = 1 / (2 sqrt(6) tau L k),  eta_k = 1 / sqrt(k)

The constants printed in Theorem 2.1 make its own condition beta u > 1 fail, where
u = kappa mu^2 / (N L); corrected ones are the default. In Theorem 3.1 the printed alpha_1 makes the
denominator of the bound vanish, so k + 1 replaces k. `printed=True` gives the paper's text.
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
    """A step size that falls with the rounds: scale / (k + shift)^power in round k = 1, 2, ...

    >>> Decay(scale=0.5, shift=1.0)(4)
    0.1
    """

    scale: Scalar = param(default=1.0, doc="numerator")
    shift: Scalar = param(default=0.0, doc="added to the round")
    power: Scalar = param(
        default=1.0, doc="exponent: 1 for Theorem 2.1, 1/2 for the server step of Theorem 3.1"
    )

    def __post_init__(self) -> None:
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
        """The step size of round k."""
        return self.scale / (k + self.shift) ** self.power


def decay_of(name: str, table: Mapping[str, Any]) -> Decay:
    """The schedule that a table of its fields describes, as a settings file holds it.

    `name` is the field that it is for, such as "alpha"; errors name it.
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
    """The step size of round k; for "auto" the one that was chosen."""
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

    Args:
        L: Smoothness of f, the largest eigenvalue of its Hessian.
        mu: Strong convexity of f, the smallest eigenvalue of its Hessian.
        tau: Local steps of a client in a round.
        clients: The number N of clients.
        kappa: Lower bound of the eigenvalues of B^-1.
        kappa_bar: Upper bound of the eigenvalues of B^-1.
        printed: Give the constants as the paper prints them, which break its own condition.

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

    Args:
        L: Smoothness of f.
        tau: Local steps of a client in a round.
        printed: Give the client step as the paper prints it, with which its bound is infinite.

    >>> alpha, eta = theorem_3(L=1.0, tau=5)
    >>> eta(3)
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
