"""FedACG by hand.

The two quadratics of `pair`: A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4; A_2 = diag(3, 1), b_2 = (0,
2), p_2 = 3/4. alpha = 0.1, tau = 2, mu = 1, beta = 1/2, from (0, 0). As in FedProx's test, two
steps from `start` give the update S (b - start), with the factors 0.18 for A = 1, 0.34 for 2 and
0.48 for 3. So the mean update is linear in start = (u, v):

    delta = (0.045 - 0.405 u, 0.27 - 0.22 v)

since 0.25 * 0.18 + 0.75 * 0.48 = 0.405 and 0.25 * 0.34 + 0.75 * 0.18 = 0.22.

Round 1   start = (0, 0)                delta = (0.045, 0.27)           m = delta, x = m
Round 2   start = (0.0675, 0.405)       delta = (0.0176625, 0.1809)
          x = (0.0851625, 0.5859)       m = (0.0225, 0.135) + delta = (0.0401625, 0.3159)
Round 3   start = x + m / 2 = (0.10524375, 0.74385)
          delta = (0.045 - 0.04262371875, 0.27 - 0.163647) = (0.00237628125, 0.106353)
          x = (0.10762003125, 0.850203)
"""

from __future__ import annotations

import pytest
from quadratics import close, go, pair

from fedsso import FedACG, FedAvg, Federation, FedProx
from fedsso.errors import InputError

HAND = FedACG(alpha=0.1, beta=0.5, mu=1)


@pytest.mark.parametrize(
    ("rounds", "x"),
    [(1, [0.045, 0.27]), (2, [0.0851625, 0.5859]), (3, [0.10762003125, 0.850203])],
)
def test_three_rounds(rounds: int, x: list[float]) -> None:
    assert go(pair(), HAND, rounds).x.tolist() == pytest.approx(x, abs=1e-14)


def test_trace() -> None:
    """The start is one vector: nothing more travels than with FedAvg."""
    trace = go(pair(), HAND, 2).trace
    for k in (1, 2):
        assert trace["bytes_up"][k] == trace["bytes_down"][k] == 2 * 2 * 8
    length = (0.0176625**2 + 0.1809**2) ** 0.5
    assert trace["grad_norm"][2] == pytest.approx(length / 0.2, rel=1e-13)


def test_without_momentum_it_is_fedprox(quad: Federation) -> None:
    expected = go(quad, FedProx(alpha=0.3, mu=0.5), 7).x
    close(go(quad, FedACG(alpha=0.3, beta=0, mu=0.5), 7).x, expected, 1e-14)


def test_with_neither_it_is_fedavg(quad: Federation) -> None:
    expected = go(quad, FedAvg(alpha=0.3), 7).x
    close(go(quad, FedACG(alpha=0.3, beta=0, mu=0), 7).x, expected, 1e-14)


def test_it_has_the_limit_of_fedprox(quad: Federation) -> None:
    """At a fixed point m = 0 and delta = 0, which is FedProx's.

    An update is S (b - start) with S = A (0.95 - A / 4), and A has eigenvalues from 1/8 to 1: those
    of S are from 0.115 to 0.7. A round of FedProx shrinks the distance by 1 - 0.115 or more, one of
    FedACG by sqrt(beta (1 - 0.115)) = 0.67 or more; 0.885^300 < 1e-15 and 0.67^150 < 1e-25.
    """
    expected = go(quad, FedProx(alpha=0.5, mu=0.2), 300).x
    close(go(quad, FedACG(alpha=0.5, beta=0.5, mu=0.2), 150).x, expected, 1e-12)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 1.0}, r"beta must be in \[0, 1\)"),
        ({"mu": -0.1}, "mu must be >= 0"),
        ({"alpha": 0}, "alpha must be > 0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedACG(**values)
