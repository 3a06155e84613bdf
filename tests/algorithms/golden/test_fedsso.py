"""FedSSO by hand.

Two clients of weight 1/2, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1/2, 3), b_1 = (3, 0)        A_2 = diag(3/2, 1), b_2 = (-1, 0)

so f(x) = 1/2 x^T diag(1, 2) x + constant. tau = 1: g_k is the gradient diag(1, 2) x_k whatever
alpha is. x_1 = (1, 1), eta = 1.

Round 1   g_1 = (1, 2), B = I, x_2 = (0, -1)
Round 2   g_2 = (0, -2), s = (-1, -2), y = (-1, -4), rho = y^T s = 9, ||y||^2 = 17, s^T g_2 = 4
bfgs      a = 4/9, q = g_2 - a y = (4/9, -2/9), y^T q / rho = 4/81
          d = q + s (4/9 - 4/81) = q + s 32/81 = (4, -82)/81, x_3 = (-4, 1)/81
lam = 2   the curvature 17/9 lies outside (2, 10): cur = 2 * 17/12 = 17/6
Lam = 10  d = q + s (cur/rho * 4/9 - 4/81) = q + s 22/243 = (86, -98)/243, x_3 = (-86, -145)/243
dfp       d = g_2 + s (s^T g_2)/rho - y (y^T g_2)/||y||^2 = (0, -2) + s 4/9 - y 8/17 = (4, -154)/153
          x_3 = (-4, 1)/153
lbfgs     gamma = 9/17, gamma q = (4, -2)/17, y^T (gamma q) / rho = 4/153
          d = gamma q + s (4/9 - 4/153) = gamma q + s 64/153 = (-28, -146)/153, x_3 = (28, -7)/153

With the guard and alpha = 1/4:
Round 1   the radius is alpha ||g_1|| = sqrt(5)/4, so x_2 = (1, 1) - (1, 2)/4 = (3/4, 1/2)
Round 2   g_2 = (3/4, 1), s = (-1/4, -1/2), theta = g_2^T s / -g_1^T s = -0.6875/1.25 = -0.55
          and the last step was cut: the radius becomes sqrt(5)/4 / 0.45 = sqrt(5)/1.8.
          d = (259/324, 79/162) is shorter, 0.94, and is taken whole: x_3 = (-4, 1)/81, the same
          as above (on a quadratic one pair along s says the same from any length).
Round 3   g_3 = (-4, 2)/81, s = -(259, 158)/324, theta = 320/12681: that step was too long, if
          only by 3 %. It was not cut, but gamma is 1 already, and stays. The radius becomes
          sqrt(5)/1.8 12681/13001.

With the guard where f is flat: f(x) = 1/2 x^T diag(1/2, 1/4) x, x_1 = (2, 4), alpha = 3:
Round 1   g_1 = (1, 1) is shorter than the radius 3 sqrt(2), so it is not cut: x_2 = (1, 3)
Round 2   g_2 = (2, 3)/4, s = -(1, 1), y = -(2, 1)/4, rho = 3/4; theta = -(5/4)/2,
          so gamma = 1/(1 - 5/8) = 8/3, which is also |s|^2 / rho
          a = s^T g_2 / rho = -5/3, gamma q = 8/3 (g_2 - a y) = (-8, 8)/9,
          y^T (gamma q) / rho = 8/27
          d = gamma q + s (a - 8/27) = (29, 77)/27, |d| = 3.05, not cut either: x_3 = (-2, 4)/27
Round 3   g_3 = (-1, 1)/27, s = -(29, 77)/27, theta = -(48/729)/(289/108) = -64/2601:
          gamma would be 8/3 2601/2537 = 2.73, but s and y = -(58, 77)/108 point the same way, and
          |s|^2 / rho = 6770/729 / (7611/2916) = 27080/7611 = 3.56 is more

With the guard and a y that hardly points along s: f(x) = 1/2 x^T diag(1, 100) x,
x_1 = (10, 1/100), alpha = 1/200:
Round 1   g_1 = (10, 1), x_2 = x_1 - g_1/200 = (9.95, 0.005), the radius is sqrt(101)/200
Round 2   g_2 = (9.95, 0.5), s = -(10, 1)/200, y = -(10, 100)/200,
          cos(s, y) = 200/(sqrt(101) sqrt(10100)) = 20/101,
          phi = 200/303, B s = s,
          so y' = phi y + (1 - phi) s = -(10, 1 + 99 phi)/200 = -(10, 6701/101)/200.
          theta = -100/101: the radius may grow 101-fold and grows 10-fold.
          With s, y' in units of -1/200: rho = 16801/101, a = s^T g_2 / rho = 10100/16801,
          q = g_2 - a y',
          d = q + s (a - y'^T q / rho), much longer than the radius: x_3 = x_2 - sqrt(101)/20 d/|d|
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedsso import FedSSO, Run, simulate
from fedsso.algorithm import Cohort
from fedsso.data import quadratic


def run(rounds: int, alpha: float = 0.01, guard: str = "none", **hyper: Any) -> Run:
    fed = quadratic([[[0.5, 0], [0, 3]], [[1.5, 0], [0, 1]]], [[3, 0], [-1, 0]], [0.5, 0.5])
    options: dict[str, Any] = {
        "local_steps": 1,
        "batch_size": None,
        "dtype": "float64",
        "device": "cpu",
    }
    algorithm = FedSSO(alpha=alpha, guard=guard, **hyper)
    result: Run = simulate(
        fed, "linear", algorithm, rounds=rounds, init=torch.tensor([1.0, 1.0]), **options
    )
    return result


def test_round_one() -> None:
    assert run(1).x.tolist() == pytest.approx([0, -1], abs=1e-13)


@pytest.mark.parametrize(
    ("hyper", "expected"),
    [
        ({}, (-4 / 81, 1 / 81)),
        ({"form": "bfgs-dense"}, (-4 / 81, 1 / 81)),
        ({"lam": 2.0, "Lam": 10.0}, (-86 / 243, -145 / 243)),
        ({"lam": 2.0, "Lam": 10.0, "form": "bfgs-dense"}, (-86 / 243, -145 / 243)),
        ({"form": "dfp"}, (-4 / 153, 1 / 153)),
        ({"form": "dfp-dense"}, (-4 / 153, 1 / 153)),
        ({"form": "lbfgs"}, (28 / 153, -7 / 153)),
    ],
)
def test_round_two(hyper: dict[str, Any], expected: tuple[float, float]) -> None:
    assert run(2, **hyper).x.tolist() == pytest.approx(expected, abs=1e-12)


def test_trace() -> None:
    trace = run(2, lam=2.0, Lam=10.0).trace
    assert trace["ys"][1:].tolist() == pytest.approx([0, 9], abs=1e-11)
    assert trace["overridden"].tolist() == [0, 0, 1]
    assert trace["grad_norm"][1:].tolist() == pytest.approx([math.sqrt(5), 2], rel=1e-12)


def test_guard() -> None:
    """Without the metric that two clients' gradients would give B to start from."""
    given = {"alpha": 0.25, "guard": "adaptive", "shapes": "none"}
    assert run(1, **given).x.tolist() == pytest.approx([0.75, 0.5], abs=1e-14)
    second = run(2, **given)
    assert second.x.tolist() == pytest.approx([-4 / 81, 1 / 81], abs=1e-13)
    assert second.trace["radius"][1:].tolist() == pytest.approx(
        [math.sqrt(5) / 4, math.sqrt(5) / 1.8], rel=1e-12
    )
    third = run(3, **given).trace["radius"][3]
    assert third == pytest.approx(math.sqrt(5) / 1.8 * 12681 / 13001, rel=1e-11)


def test_gamma() -> None:
    record = FedSSO(alpha=3.0)
    H, x = (
        torch.tensor([0.5, 0.25], dtype=torch.float64),
        torch.tensor([2.0, 4.0], dtype=torch.float64),
    )
    state, found = record.server_init(x[None]), []
    for k in (1, 2, 3):
        state = record.server(state, -3 * H * state.x, Cohort(k, 1, torch.arange(1), 1.0, 1.0))
        found.append(
            (*state.x[0].tolist(), *state.guard.radius[0].tolist(), *state.guard.gamma[0].tolist())
        )
    r = 3 * math.sqrt(2)
    assert found[0] == pytest.approx((1, 3, r, 1), rel=1e-13)
    assert found[1] == pytest.approx((-2 / 27, 4 / 27, r, 8 / 3), rel=1e-12)
    assert found[2][2:] == pytest.approx((r, 27080 / 7611), rel=1e-11)


def test_damping() -> None:
    fed = quadratic([[[1, 0], [0, 100]]], [[0, 0]])
    options: dict[str, Any] = {
        "local_steps": 1,
        "batch_size": None,
        "dtype": "float64",
        "device": "cpu",
    }
    start = torch.tensor([10, 0.01], dtype=torch.float64)
    found: Run = simulate(fed, "linear", FedSSO(alpha=1 / 200), rounds=2, init=start, **options)
    g, s, y = np.array([9.95, 0.5]), np.array([10, 1]), np.array([10, 6701 / 101])
    rho = 16801 / 101
    q = g - 10100 / 16801 * y
    d = q + s * (10100 / 16801 - y @ q / rho)
    r = math.sqrt(101) / 20
    assert found.x.tolist() == pytest.approx(
        ([9.95, 0.005] - r * d / np.linalg.norm(d)).tolist(), rel=1e-11
    )
    assert found.trace["radius"][1:].tolist() == pytest.approx([r / 10, r], rel=1e-11)
    assert found.trace["ys"][2] == pytest.approx(rho / 200**2, rel=1e-11)
