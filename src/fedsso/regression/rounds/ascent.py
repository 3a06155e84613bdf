"""FedSSO's server where the clients' log-likelihood is known exactly: it never goes downhill.

=========  =========================================================================================
u          the coefficients in coordinates in which the information is about the identity, so that a
           unit of length is about a standard error
f, g       minus the log-likelihood at u, and its gradient
s, y       a step that was tried, and how g changed along it
B          FedSSO's estimate of the Hessian, from pairs (s, y) by BFGS, B = I at first
r          the longest step that is tried
=========  =========================================================================================

As in FedSSO the next model is u - B^-1 g, with a step of at most r. A round tells f and g there. If
f has fallen enough the server stays; else it goes back, shortens r, and tries again from where it
was. What was learned about the curvature on the way is kept in both cases, since the log-likelihood
is concave, unless the step went astray altogether.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...maths import quasi_newton as qn
from ...support.linalg import gram
from ..questions import Array
from .forms import HUGE

ENOUGH = 1e-4
"""A step must gain this share of what the slope at its beginning promised."""
ROUNDING = 1e-12
"""Changes of f below this share of it are rounding; the slope then says whether to stay."""
SHORTEST = 0.1
"""One failure shortens the step at most to this share."""
LONGEST = 0.5
"""And at least to this one."""
STRAYED = 100.0
"""A step that lost so many times what its slope promised says nothing about where it began."""
CUT = 1 - 1e-9
"""A step of this share of r was cut by r."""
GROWTH = 4.0
"""What r may grow by after a step that it cut and that was too short."""
LOWEST = 1e-12
"""Bounds of the curvature of a pair. The log-likelihood is known exactly, so they are wide."""
PAIRS = 200


class Ascent:
    """The way from one model to the most likely one.

    Args:
        u: The model to begin at, [p].
        f: Minus its log-likelihood.
        g: The gradient of f, [p].
        r: The longest step at first.
        measure: The length of a step [p], in the unit of r.
    """

    def __init__(
        self,
        u: Array,
        f: float,
        g: Array,
        r: float,
        measure: Callable[[Array], float],
    ) -> None:
        self.u = u
        self.f = f
        self.g = g
        self.r = r
        self.measure = measure
        self.rounds = 0
        self._form = qn.form("bfgs", PAIRS, PAIRS)
        self._state = self._form.init(_row(u))
        self._ahead = g  # B^-1 g

    @property
    def distance(self) -> float:
        """The distance to the maximum in standard errors, as far as B knows it."""
        return math.sqrt(max(0.0, float(self.g @ self._ahead)))

    def next(self) -> Array:
        """The model to ask for now, [p]."""
        return self.u + self._step()

    def hear(self, f: float, g: Array) -> bool:
        """Learn what f and g are at `next()`. Returns whether the server stays there."""
        s = self._step()
        length = self.measure(s)
        known = abs(f) < HUGE and bool((np.abs(g) < HUGE).all())  # neither holds for NaN
        stays = known and self._gains(s, f, g)
        before = float(self.g @ s)
        after = float(g @ s)
        if not stays and length > 0:
            self.r = length * (_shorter(before, f - self.f, after) if known else SHORTEST)
        elif length >= self.r * CUT and after < 0.5 * before:
            self.r *= GROWTH
        usable = known and f - self.f <= STRAYED * abs(before)
        y = g - self.g if usable else np.zeros_like(g)
        if stays:
            self.u = self.u + s
            self.f = f
            self.g = g
        self._learn(s, y)
        return stays

    def _step(self) -> Array:
        """-B^-1 g, cut to the length r."""
        length = self.measure(self._ahead)
        return -min(1.0, self.r / length if length else 1.0) * self._ahead

    def _gains(self, s: Array, f: float, g: Array) -> bool:
        """Whether the log-likelihood has risen enough along s, to f and g."""
        slope = float(self.g @ s)
        if f <= self.f + ENOUGH * slope:
            return True
        return f - self.f <= ROUNDING * abs(self.f) and abs(float(g @ s)) < abs(slope)

    def _learn(self, s: Array, y: Array) -> None:
        """Let B know the pair, and find the next direction from where the server is."""
        self.rounds += 1
        if not y @ s > 0:  # rounding
            s = np.zeros_like(s)
        s_row = _row(s)
        y_row = _row(y)
        g_row = _row(self.g)
        pair = qn.judge(gram(s_row, y_row), LOWEST, 1 / LOWEST)
        self._state, ahead = self._form.step(
            self._state, s_row, y_row, g_row, pair, self.rounds, False
        )
        self._ahead = ahead[0].numpy()


def _shorter(before: float, rise: float, after: float) -> float:
    """The share of a failed step at which the cubic through its ends is lowest, within bounds.

    `before` and `after` are the slopes at its ends, for the whole step; f rose by `rise`.
    """
    if not before < 0:  # rounding
        return SHORTEST
    up = rise / -before  # in units of the slope at the beginning, which is -1 then
    end = after / -before
    bend = end - 1 - 2 * up
    middle = 3 * up + 2 - end
    lower = middle + math.sqrt(max(0.0, middle * middle + 3 * bend))
    share = 1 / lower if lower > 0 else LONGEST
    return min(max(share, SHORTEST), LONGEST)


def _row(vector: Array) -> Tensor:
    """A vector as torch's, with the axis of trials."""
    return torch.from_numpy(np.ascontiguousarray(vector)).unsqueeze(0)
