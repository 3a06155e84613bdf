"""Step-size schedules, and the statements of theory that hold.

On quadratics one round of FedAvg is affine, x -> sum p_i [(I - alpha A_i)^tau (x - b_i) + b_i], so
its fixed point is known. FedSSO's averaged gradient vanishes exactly there: it converges to
FedAvg's fixed point, which is the minimiser for tau = 1 only.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import (
    Decay,
    FedAvg,
    Federation,
    FedSGD,
    FedSSO,
    InputError,
    Run,
    simulate,
    theorem_2,
    theorem_3,
)
from fedsso.algorithm.schedule import at
from fedsso.data import quadratic

EXACT: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}


def parts(fed: Federation) -> tuple[Tensor, Tensor]:
    """A_i and b_i of a quadratic federation, from its rows: A = 2/d a^T a, b = a^-1 t."""
    d = fed.x.shape[1]
    a = torch.stack([fed.x[fed.rows_of(i)] for i in range(fed.clients)])
    t = torch.stack([fed.y[fed.rows_of(i)] for i in range(fed.clients)])
    return 2 / d * a.mT @ a, torch.linalg.solve(a, t)


def contraction(A: Tensor, alpha: float, tau: int) -> Tensor:
    """(I - alpha A)^tau."""
    P: Tensor = torch.linalg.matrix_power(torch.eye(A.shape[-1], dtype=A.dtype) - alpha * A, tau)
    return P


def fixed_point(fed: Federation, alpha: float, tau: int) -> Tensor:
    """Solution of sum p_i (I - (I - alpha A_i)^tau) (x - b_i) = 0."""
    A, b = parts(fed)
    W = fed.p[:, None, None] * (torch.eye(A.shape[-1], dtype=A.dtype) - contraction(A, alpha, tau))
    x: Tensor = torch.linalg.solve(W.sum(0), torch.einsum("nij,nj->i", W, b))
    return x


def model(fed: Federation, algorithm: Any, rounds: int, tau: int, **options: Any) -> Tensor:
    run: Run = simulate(
        fed,
        "linear",
        algorithm,
        rounds=rounds,
        local_steps=tau,
        eval_every=rounds,
        **EXACT,
        **options,
    )
    return run.x


def distance(x: Tensor, target: Tensor | None) -> float:
    assert target is not None
    return float((x - target).norm())


# --- schedules
# --------------------------------------------------------------------------------------------------
def test_decay() -> None:
    assert [at(Decay(6.0, 1.0), k) for k in (1, 2, 5)] == pytest.approx([3.0, 2.0, 1.0], rel=1e-14)
    assert at(Decay(2.0, 0.0, 0.5), 4) == pytest.approx(1.0, rel=1e-14)
    assert at(0.3, 7) == 0.3
    assert at(Decay(), 1) == 1.0


@pytest.mark.parametrize(
    ("scale", "shift"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (float("nan"), 0.0)]
)
def test_decay_refuses_what_is_not_positive(scale: float, shift: float) -> None:
    with pytest.raises(InputError, match=rf"scale > 0 and shift > -1, got {scale}, {shift}, 1.0"):
        Decay(scale, shift)


L, MU, TAU, N, KAPPA, KAPPA_BAR = 4.0, 0.5, 5, 20, 0.2, 3.0
CONSTANTS: dict[str, Any] = {
    "L": L,
    "mu": MU,
    "tau": TAU,
    "clients": N,
    "kappa": KAPPA,
    "kappa_bar": KAPPA_BAR,
}


def test_theorem_2_as_printed() -> None:
    """eta_k = (2/mu)/(k + gamma), alpha_k = eta_k L kappa_bar^2/(mu tau kappa).

    1/gamma = min{NL/(2 kappa mu), mu/(2L)}
    """
    alpha, eta = theorem_2(**CONSTANTS, printed=True)
    gamma = 1 / min(N * L / (2 * KAPPA * MU), MU / (2 * L))
    for k in (1, 10, 200):
        assert at(eta, k) == pytest.approx(2 / MU / (k + gamma), rel=1e-14)
        assert at(alpha, k) == pytest.approx(
            at(eta, k) * L * KAPPA_BAR**2 / (MU * TAU * KAPPA), rel=1e-14
        )


def test_theorem_2_corrected_meets_its_own_conditions() -> None:
    """beta u > 1 with u = kappa mu^2/(N L), and alpha_k <= 1/L in every round; the printed
    constants fail both."""
    u = KAPPA * MU**2 / (N * L)
    alpha, eta = theorem_2(**CONSTANTS)
    beta = 2 * N * L / (KAPPA * MU**2)
    gamma = max(beta * KAPPA * MU**2 / (N * L), beta * L**2 * KAPPA_BAR**2 / (MU * TAU * KAPPA))
    assert eta.scale == pytest.approx(beta, rel=1e-14)
    assert eta.shift == alpha.shift == pytest.approx(gamma, rel=1e-14)
    assert eta.scale * u == pytest.approx(2.0)
    assert at(alpha, 1) <= 1 / L
    assert at(eta, 1) * u <= 1
    wrong_alpha, wrong_eta = theorem_2(**CONSTANTS, printed=True)
    assert wrong_eta.scale * u < 1
    assert at(wrong_alpha, 1) > 1 / L


def test_theorem_3() -> None:
    """alpha_k = 1/(2 sqrt(6) tau L k), eta_k = 1/sqrt(k); Theta_k = 24 tau^2 alpha_k^2 L^2 must
    stay below 1."""
    printed, corrected = theorem_3(L=L, tau=TAU, printed=True), theorem_3(L=L, tau=TAU)
    for k in (1, 7, 50):
        assert at(printed[0], k) == pytest.approx(1 / (2 * sqrt(6) * TAU * L * k), rel=1e-14)
        assert at(printed[1], k) == pytest.approx(1 / sqrt(k), rel=1e-14)
        assert at(corrected[0], k) == pytest.approx(at(printed[0], k + 1), rel=1e-14)
        assert at(corrected[1], k) == pytest.approx(at(printed[1], k + 1), rel=1e-14)
    assert 24 * (TAU * L * at(printed[0], 1)) ** 2 == pytest.approx(1.0)
    assert 24 * (TAU * L * at(corrected[0], 1)) ** 2 == pytest.approx(0.25)


# --- convergence
# --------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_order_one_over_k_with_the_corrected_schedule(quad: Federation) -> None:
    """alpha_k = O(1/k) makes the bias of tau > 1 vanish like 1/k: f - f* then falls at least like
    1/k.

    On a quadratic the bias of the point is O(alpha_k), so the loss, its square, falls like 1/(k +
    shift)^2. B is made anew every 20 rounds: pairs of hundreds of rounds are so small and so alike
    that rounding would choose the path.
    """
    alpha, eta = theorem_2(L=1.0, mu=1 / 8, tau=5, clients=1, kappa=1.0, kappa_bar=1.0)
    algorithm = FedSSO(alpha=alpha, eta=eta, guard="none", R=20)
    options = {**EXACT, "local_steps": 5, "eval_every": 50, "eval_train": True}
    loss = simulate(quad, "linear", algorithm, rounds=1000, **options).trace["full_train_loss"]
    A, b = parts(quad)
    assert quad.optimum is not None
    gap = quad.optimum - b
    least = float(torch.einsum("n,ni,nij,nj->", quad.p, gap, A, gap)) / 2
    rounds = np.array([100, 200, 300, 500, 700, 1000])
    slope = np.polyfit(np.log(rounds + alpha.shift), np.log(loss[rounds] - least), 1)[0]
    assert slope < -1
    assert loss[1000] - least < 2e-2 * (loss[0] - least)


def test_constant_steps_stall_at_a_bias_that_the_schedule_removes(quad: Federation) -> None:
    """alpha_240 is 79/259 = 0.31 of alpha_60, and so is the bias. B is made anew as in the test
    before."""

    def bias(alpha: float | Decay, rounds: int) -> float:
        return distance(
            model(quad, FedSSO(alpha=alpha, guard="none", R=20), rounds, 5), quad.optimum
        )

    constant = [bias(0.3, rounds) for rounds in (60, 240)]
    assert constant[0] == pytest.approx(constant[1], rel=1e-6)
    falling = [bias(Decay(0.3 * 20, 19.0), rounds) for rounds in (60, 240)]
    assert falling[1] < 0.4 * falling[0] < 0.4 * constant[0]


def test_one_local_step_is_centralised_bfgs(quad: Federation) -> None:
    A, b = parts(quad)
    H, c = torch.einsum("n,nij->ij", quad.p, A), torch.einsum("n,nij,nj->i", quad.p, A, b)
    x, B = torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    g = H @ x - c
    for k in range(1, 13):
        s = -0.8 * torch.linalg.solve(B, g)
        x = x + s
        y = H @ x - c - g
        g = g + y
        B = B + torch.outer(y, y) / (y @ s) - torch.outer(B @ s, B @ s) / (s @ B @ s)
        fed_x = model(quad, FedSSO(alpha=0.1, eta=0.8, guard="none"), k, 1)
        torch.testing.assert_close(fed_x, x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("guard", ["none", "adaptive"])
@pytest.mark.parametrize(("alpha", "tau"), [(0.3, 5), (0.1, 10)])
def test_fedsso_converges_to_fedavgs_fixed_point_and_not_to_the_minimiser(
    quad: Federation, alpha: float, tau: int, guard: str
) -> None:
    target = fixed_point(quad, alpha, tau)
    x = model(quad, FedSSO(alpha=alpha, guard=guard), 50, tau)
    assert distance(x, target) < 1e-9
    assert distance(x, quad.optimum) > 0.01
    quick, slow = (
        model(quad, a, 15, tau) for a in (FedSSO(alpha=alpha, guard=guard), FedAvg(alpha=alpha))
    )
    assert distance(quick, target) < 0.1 * distance(slow, target)


def test_with_one_local_step_the_limit_is_the_minimiser(quad: Federation) -> None:
    assert distance(fixed_point(quad, 0.3, 1), quad.optimum) < 1e-12
    assert distance(model(quad, FedSSO(alpha=0.3, guard="none"), 60, 1), quad.optimum) < 1e-9


@pytest.mark.parametrize("form", ["bfgs", "bfgs-dense", "dfp", "dfp-dense", "lbfgs"])
def test_every_form_reaches_the_fixed_point(quad: Federation, form: str) -> None:
    x = model(quad, FedSSO(alpha=0.2, eta=0.7, guard="none", form=form), 120, 4)
    assert distance(x, fixed_point(quad, 0.2, 4)) < 1e-7


# --- baselines in closed form
# -----------------------------------------------------------------------------------------
def test_one_round_of_fedavg(quad: Federation) -> None:
    A, b = parts(quad)
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    P = contraction(A, 0.3, 4)
    moved = torch.einsum("n,nij,nj->i", quad.p, P, start - b) + quad.p @ b
    torch.testing.assert_close(
        model(quad, FedAvg(alpha=0.3), 1, 4, init=start), moved, rtol=1e-12, atol=1e-13
    )


def test_fedavgs_limit_is_its_fixed_point(quad: Federation) -> None:
    assert distance(model(quad, FedAvg(alpha=0.5), 200, 5), fixed_point(quad, 0.5, 5)) < 1e-10


def test_fedsgd_contracts_by_the_hessian(quad: Federation) -> None:
    A, _ = parts(quad)
    H = torch.einsum("n,nij->ij", quad.p, A)
    assert quad.optimum is not None
    start = torch.ones(6, dtype=torch.float64)
    expected = quad.optimum + contraction(H, 0.4, 7) @ (start - quad.optimum)
    torch.testing.assert_close(
        model(quad, FedSGD(alpha=0.4), 7, 3, init=start), expected, rtol=1e-12, atol=1e-13
    )


def test_fedavg_with_one_step_is_fedsgd(quad: Federation, fed: Federation) -> None:
    torch.testing.assert_close(
        model(quad, FedAvg(alpha=0.3), 9, 1),
        model(quad, FedSGD(alpha=0.3), 9, 1),
        rtol=1e-12,
        atol=1e-14,
    )
    noisy: dict[str, Any] = {
        "rounds": 9,
        "batch_size": 4,
        "dtype": "float64",
        "participation": 0.6,
        "local_steps": 1,
    }
    a, b = (simulate(fed, "mlp", algorithm(alpha=0.1), **noisy) for algorithm in (FedAvg, FedSGD))
    torch.testing.assert_close(a.x, b.x, rtol=1e-11, atol=1e-13)


def test_identical_clients_make_fedavg_gradient_descent() -> None:
    A, b = [[2.0, 0.3], [0.3, 1.0]], [1.0, -2.0]
    fed = quadratic([A] * 3, [b] * 3, [0.2, 0.5, 0.3])
    start = torch.tensor([3.0, 3.0], dtype=torch.float64)
    expected = torch.tensor(b) + contraction(torch.tensor(A).double(), 0.1, 4 * 6) @ (
        start - torch.tensor(b)
    )
    torch.testing.assert_close(
        model(fed, FedAvg(alpha=0.1), 6, 4, init=start), expected, rtol=1e-7, atol=1e-8
    )
