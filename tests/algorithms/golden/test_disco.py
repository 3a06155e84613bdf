"""DiSCO by hand.

Three quadratics in two dimensions (`quadratics.trio`), seen from x_1 = (4, -3). H = [[1.7, 0.2],
[0.2, 2.7]], g = H (x - x*). Two products solve a 2 x 2 system, so that v = x - x* and delta^2 = v^T
g. With x* = (1, 24) / 65:

    v = (259/65, -219/65), delta^2 = 1.7 v_1^2 + 0.4 v_1 v_2 + 2.7 v_2^2 = 52.2708..., and
    x_2 = x_1 - v / (1 + delta)

From round to round v shrinks by delta / (1 + delta), and so does delta: 1/(1 + delta) goes to 1.

Pairs: u_1 = (1, 0) with H u_1 = (2, 1) and u_2 = (0, 1) with H u_2 = (1, 3), mu = 4. BFGS takes
B_0 = 4 I to B_1 = 4 I + y y^T / 2 - 4 e_1 e_1^T = [[2, 1], [1, 4.5]]. Then s^T y = 3, B_1 s = (1,
4.5), s^T B_1 s = 4.5: B_2 = B_1 + [[1, 3], [3, 9]] / 3 - [[1, 4.5], [4.5, 20.25]] / 4.5
= [[2 + 1/3 - 2/9, 1], [1, 3]].
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from quadratics import OPTIONS, START, close, go, parts, trio
from torch import Tensor

from fedsso import Federation, InputError, simulate
from fedsso.algorithms.second_order.disco import PRECONDITIONERS, DiSCO, inverse
from fedsso.data import quadratic

PUBLISHED = {  # the decrement, and the model after the step
    1: (7.229852642397, (3.5158339331510766, -2.5906086152899066)),
    2: (6.351361500872, (3.0396705289502157, -2.187983960772576)),
    3: (5.487390724830, (2.573491437564495, -1.7938016402572372)),
}


def start() -> Tensor:
    return torch.tensor(START, dtype=torch.float64)


# ---- by hand ----


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_damped_steps(precondition: str, rounds: int) -> None:
    record = DiSCO(precondition=precondition, mu=0.1, beta=0, products=2, tol=1e-14)
    result = go(trio(), record, rounds)
    delta, x = PUBLISHED[rounds]
    assert (result.x + start()).tolist() == pytest.approx(x, abs=1e-12)
    assert result.trace["decrement"][rounds] == pytest.approx(delta, abs=1e-11)
    assert result.trace["products"][rounds] == 2


def test_first_step_in_fractions() -> None:
    v = torch.tensor([259.0, -219.0], dtype=torch.float64) / 65
    H = torch.tensor([[1.7, 0.2], [0.2, 2.7]], dtype=torch.float64)
    delta = sqrt(float(v @ H @ v))
    x = go(trio(), DiSCO(precondition="none", beta=0), 1).x
    close(x, -v / (1 + delta), 1e-13)


def test_the_lead_ends_at_beta() -> None:
    """With beta = 0.05 and mu = 0.1 two products are needed; three of the five are of no use."""
    result = go(trio(), DiSCO(mu=0.1, beta=0.05, products=5, tol=1e-14), 1)
    assert result.trace["products"][1] == 2
    assert (result.x + start()).tolist() == pytest.approx(PUBLISHED[1][1], abs=1e-12)


def test_bytes() -> None:
    """Three clients, d = 2, float64: x and two directions down, a gradient and two products up;
    with a lead, to and from it alone, two residuals and two solutions."""
    plain = go(trio(), DiSCO(precondition="none", products=2), 1).trace
    led = go(trio(), DiSCO(precondition="lead", products=2), 1).trace
    for column in ("bytes_down", "bytes_up"):
        assert plain[column][1] == 3 * (1 + 2) * 2 * 8
        assert led[column][1] - plain[column][1] == 2 * 2 * 8


# ---- the matrix of the pairs ----


def test_two_pairs() -> None:
    S = torch.tensor([[[0, 0], [1, 0], [0, 1]]])  # the first row is no pair
    Y = torch.tensor([[[0, 0], [2, 1], [1, 3]]])
    B = torch.tensor([[2 + 1 / 3 - 2 / 9, 1], [1, 3]], dtype=torch.float64)
    for unit in torch.eye(2, dtype=torch.float64):
        found = inverse(S, Y, unit[None], 4.0)[0]
        close(B @ found, unit, 1e-14)


def test_the_matrix_is_positive_definite_and_knows_the_newest_pair(quad: Federation) -> None:
    """B^-1 y = s for the newest pair. Six pairs in six dimensions, of condition below 100."""
    A = parts(quad)[0]
    draw = torch.Generator().manual_seed(1)
    S = torch.randn(1, 6, 6, generator=draw, dtype=torch.float64)
    Y = torch.stack([A[j % 4] @ S[0, j] for j in range(6)])[None]  # of unlike Hessians
    close(inverse(S, Y, Y[:, -1], 0.3), S[:, -1], 1e-11)
    columns = [inverse(S, Y, unit[None], 0.3)[0] for unit in torch.eye(6, dtype=torch.float64)]
    H = torch.stack(columns)
    close(H, H.mT, 1e-11)
    assert float(torch.linalg.eigvalsh((H + H.mT) / 2)[0]) > 0


# ---- reductions ----


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
def test_exact_systems_are_newtons_damped_steps(quad: Federation, precondition: str) -> None:
    """d = 6 products solve any system: all preconditioners give the same step.

    Hessians have the condition 8, so that rounding stays near 1e-14.
    """
    A, Ab = parts(quad)
    H, c = torch.einsum("n,nij->ij", quad.p, A), quad.p @ Ab
    x = torch.zeros(6, dtype=torch.float64)
    record = DiSCO(precondition=precondition, beta=0, products=6, mu=0.3, tol=1e-14)
    for k in (1, 2, 3):
        v = x - torch.linalg.solve(H, c)
        x = x - v / (1 + (v @ H @ v).sqrt())
        close(go(quad, record, k).x, x, 1e-9)


def test_equal_clients_need_one_product(quad: Federation) -> None:
    """Without damping the lead's Hessian is that of all."""
    A = parts(quad)[0][:1].expand(4, 6, 6)
    fed = quadratic(A, torch.linspace(-1, 1, 24).view(4, 6), quad.p)
    trace = go(fed, DiSCO(mu=1e-9, beta=1e-6, tol=1e-12), 6).trace
    assert trace["products"][1:].tolist() == [1] * 6


def test_no_preconditioner_is_plain_conjugate_gradients(quad: Federation) -> None:
    """Hestenes and Stiefel by hand, two steps of six."""
    A, Ab = parts(quad)
    H, g = torch.einsum("n,nij->ij", quad.p, A), -quad.p @ Ab
    r, u, v = g, g, torch.zeros_like(g)
    for _ in range(2):
        a = (r @ r) / (u @ H @ u)
        v, new = v + a * u, r - a * H @ u
        u, r = new + (new @ new) / (r @ r) * u, new
    x = -v / (1 + (v @ H @ v).sqrt())
    close(go(quad, DiSCO(precondition="none", beta=0, products=2), 1).x, x, 1e-12)


def test_pairs_within_a_step_are_conjugate_gradients(quad: Federation) -> None:
    """B^-1 r with the pairs of the same Hessian is the direction of the conjugate gradients, as
    Nazareth found: a first round of "bfgs" is one of "none", where P = mu I scales nothing."""
    for products in (1, 3, 6):
        plain, ours = (
            go(quad, DiSCO(precondition=name, beta=0, products=products, mu=0.3), 1).x
            for name in ("none", "bfgs")
        )
        close(ours, plain, 1e-10)


def test_pairs_of_earlier_rounds_save_products(fed: Federation) -> None:
    """Near the minimum Hessians repeat, and the pairs know more and more of them."""
    options = {**OPTIONS, "l2": 0.1, "rounds": 6}
    fields: dict[str, Any] = {"beta": 1e-3, "products": 15, "mu": 0.1}
    used = {}
    for name in ("none", "bfgs"):
        trace = simulate(fed, "mclr", DiSCO(precondition=name, **fields), **options).trace
        used[name] = trace["products"][1:]
        assert trace["grad_norm"][-1] < 1e-2 * trace["grad_norm"][1]
    assert used["bfgs"][0] == used["none"][0]
    assert used["bfgs"][3:].sum() < used["none"][3:].sum()


# ---- behaviour ----


@pytest.mark.parametrize("precondition", PRECONDITIONERS)
def test_decrement_and_gradient_vanish(fed: Federation, precondition: str) -> None:
    """Systems are solved to 1e-2: once delta is below that, a step divides the gradient by 50."""
    record = DiSCO(precondition=precondition, beta=1e-2, products=15, mu=0.1)
    trace = simulate(fed, "mclr", record, rounds=7, l2=0.1, **OPTIONS).trace
    delta, length = trace["decrement"][1:], trace["grad_norm"][1:]
    assert (np.diff(delta) < 0).all()
    assert delta[-1] < 1e-3
    near = int(np.argmax(delta < 1e-2))
    assert length[near + 1] <= length[near] / 50


def test_no_curvature_is_a_gradient_step() -> None:
    """A = -1 and b = 1 from 0: g = 1, u^T A u = -1 <= 0, so v = g and x = -1 / (1 + 1).

    The curvature is that of a loss of the user's own, -(z - y)^2 / 2.
    """
    one = Federation.from_clients([([[1.0]], [1.0])], test_fraction=0)

    def bent(z: Tensor, y: Tensor) -> Tensor:
        return -((z[:, 0] - y) ** 2) / 2

    for name in ("none", "lead"):
        record = DiSCO(precondition=name, mu=1e-9)
        x = go(one, record, 1, loss=bent).x
        # the lead finds no curvature either, and sends r itself
        assert x.item() == pytest.approx(-0.5, abs=1e-9)


def test_the_first_who_answers_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With clients 1 and 2 in the cohort client 1 leads: the preconditioner is A_2 + mu I."""
    from quadratics import fix_cohorts

    fix_cohorts(monkeypatch, [[1, 2]])
    fed = trio()
    A, Ab = parts(fed)
    w = torch.tensor([0.6, 0.4], dtype=torch.float64)
    H, g = torch.einsum("n,nij->ij", w, A[1:]), -w @ Ab[1:]
    u = torch.linalg.solve(A[1] + 0.1 * torch.eye(2, dtype=torch.float64), g)
    v = (g @ u) / (u @ H @ u) * u
    x = -v / (1 + (v @ H @ v).sqrt())
    close(go(fed, DiSCO(products=1, mu=0.1, tol=1e-14), 1).x, x, 1e-12)


@pytest.mark.parametrize(
    "wrong", [{"mu": 0}, {"beta": -1}, {"tol": -1}, {"products": 0}, {"pairs": 0}, {"cg_steps": 0}]
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        DiSCO(**wrong)


def test_unknown_preconditioner() -> None:
    with pytest.raises(InputError, match="lead"):
        DiSCO(precondition="jacobi")
