"""MOCHA by hand.

Two clients with one row each, one feature, no bias, lam = 1: x = 2 with y = 1, and x = 1 with
y = -1. At first Sigma = I/2 and rho = 1, so that q = sigma |x|^2 / (lam n) is 2 and 1/2.

Round 1   client 1: y alpha = clip(1/2) = 1/2, b = 1, w = b sigma / lam = 1/2
          client 2: y alpha = clip(2) = 1, b = -1, w = -1/2
Round 2   x^T w is 1 and -1/2. Client 1 has no loss left: nothing changes; client 2 is at its bound.
          P = 0 + 1/2 + lam/2 tr(W Omega W^T) = 1/2 + 1/2 (2/4 + 2/4) = 1
          D = 1/2 + 1 - 1/2 = 1: the optimum

Relations after round 2, W = (1/2, -1/2): W^T W has the eigenvalues 1/2 with (1, -1) and 0, raised
to 1e-7, with (1, 1). With r = sqrt(1/2) and e = sqrt(1e-7) the diagonal of Sigma is 1/2, the rest
c = (e - r) / (2 (r + e)); rho = 1 + 2 |c|. W = B Sigma / lam = (1/2 - c, c - 1/2).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, simulate
from fedsso.algorithms.first_order.mocha import LEAST, LOSSES, MOCHA
from fedsso.engine import gather
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation

EXACT: dict[str, Any] = {"dtype": "float64", "device": "cpu", "loss": "bce", "eval_every": 1000}
FEATURES = 4


def pair() -> Federation:
    clients = [([[2.0]], [1]), ([[1.0]], [0])]
    return Federation.from_clients(clients, test_fraction=0, classes=2)


def tasks(signs: tuple[int, ...] = (1, 1, 1, -1, -1), rows: int = 20) -> Federation:
    """Clients whose labels follow one hyperplane, or its opposite, up to noise."""
    draw = torch.Generator().manual_seed(5)
    truth = torch.randn(FEATURES, generator=draw, dtype=torch.float64)
    clients = []
    for t, sign in enumerate(signs):
        x = torch.randn(rows + t, FEATURES, generator=draw, dtype=torch.float64)
        noise = torch.randn(rows + t, generator=draw, dtype=torch.float64)
        clients.append((x, (sign * (x @ truth) + noise > 0).long()))
    return Federation.from_clients(clients, test_fraction=0, classes=2)


def begin(fed: Federation, record: MOCHA, **options: Any) -> Simulation:
    return Simulation(fed, "linear", [record], **{**EXACT, "rounds": 10_000, **options})


def fly(fed: Federation, record: MOCHA, rounds: int, **options: Any) -> Run:
    result: Run = simulate(fed, "linear", record, rounds=rounds, **{**EXACT, **options})
    return result


def rows(fed: Federation, t: int) -> tuple[Tensor, Tensor]:
    own = fed.rows_of(t)
    return fed.x[own].double(), 2 * fed.y[own].double() - 1


def primal(sim: Simulation, lam: float, loss: str = "hinge") -> float:
    """Sum of the mean losses, and lam/2 tr(W Omega W^T)."""
    W, Sigma = sim.server.x[0], sim.server.Sigma[0, 0]
    total = lam / 2 * torch.trace(W.mT @ torch.linalg.solve(Sigma, W))
    for t in range(len(W)):
        x, y = rows(sim.fed, t)
        total = total + LOSSES[loss](x @ W[t], y).mean()
    return float(total)


def dual(sim: Simulation, lam: float) -> float:
    """Sum of the means of y alpha, minus lam/2 tr(W Omega W^T), for the hinge."""
    W, Sigma = sim.server.x[0], sim.server.Sigma[0, 0]
    total = -lam / 2 * torch.trace(W.mT @ torch.linalg.solve(Sigma, W))
    for t in range(len(W)):
        _, y = rows(sim.fed, t)
        total = total + (y * sim.own[t][0, 0, : len(y)]).mean()
    return float(total)


# ---- by hand ----


def test_two_rounds() -> None:
    sim = begin(pair(), MOCHA(lam=1, frac=1))
    for _ in range(2):
        run(sim, sim.k + 1)
        assert sim.server.x[0].flatten().tolist() == pytest.approx([0.5, -0.5], abs=1e-15)
        assert sim.server.B[0].flatten().tolist() == pytest.approx([1, -1], abs=1e-15)
        assert [own.item() for own in sim.own] == pytest.approx([0.5, -1], abs=1e-15)
        assert primal(sim, 1) == pytest.approx(1, abs=1e-14)
        assert dual(sim, 1) == pytest.approx(1, abs=1e-14)
    assert sim.rows[1]["train_loss"].item() == pytest.approx(1)  # at W = 0
    assert sim.rows[2]["train_loss"].item() == pytest.approx(0.25)  # the mean of 0 and 1/2
    assert sim.rows[1]["grad_norm"].item() == pytest.approx(sqrt(2))


def test_relations() -> None:
    sim = begin(pair(), MOCHA(lam=1, frac=1, inner=2))
    run(sim, 2)
    r, e = sqrt(0.5), sqrt(LEAST)
    c = (e - r) / (2 * (r + e))
    # the eigenvalue 0 comes out as 1e-17, which 1e-7 replaces: no digit is lost
    assert sim.server.Sigma[0, 0].flatten().tolist() == pytest.approx([0.5, c, c, 0.5], abs=1e-14)
    assert sim.server.rho.item() == pytest.approx(1 - 2 * c, abs=1e-14)
    assert sim.server.x[0].flatten().tolist() == pytest.approx([0.5 - c, c - 0.5], abs=1e-14)


def test_bytes() -> None:
    """Down w_t, sigma_tt and rho, up the change of b_t: five clients, four features, float64."""
    trace = fly(tasks(), MOCHA(), 1).trace
    assert trace["bytes_down"][1] == 5 * (FEATURES + 2) * 8
    assert trace["bytes_up"][1] == 5 * FEATURES * 8


# ---- without relations the clients are alone ----


def test_fixed_relations_give_one_svm_for_each_client() -> None:
    """Sigma = I/m: client t minimises its mean hinge loss + lam m/2 |w|^2. The gap bounds the
    distance of P to its minimum, and lam m/2 |w - w*|^2 is at most that distance: with gaps of
    1e-12 and lam m = 1 two solutions differ by at most 2 sqrt(2e-12) = 3e-6."""
    fed, lam = tasks(), 0.2
    together = begin(fed, MOCHA(lam=lam, inner=10_000, frac=1))
    run(together, 60)
    assert primal(together, lam) - dual(together, lam) <= 1e-12
    x, y = rows(fed, 3)
    one = Federation.from_clients([(x, (y > 0).long())], test_fraction=0, classes=2)
    alone = begin(one, MOCHA(lam=lam * fed.clients, frac=1))
    run(alone, 60)
    assert primal(alone, 1) - dual(alone, 1) <= 1e-12
    torch.testing.assert_close(together.server.x[0, 3], alone.server.x[0, 0], rtol=0, atol=3e-6)


def test_one_task_is_plain_sdca() -> None:
    """w += (alpha' - alpha) x / (lam n) row by row, in the order of the client's own draws."""
    fed, lam = tasks(signs=(1,)), 0.1
    sim = begin(fed, MOCHA(lam=lam, frac=1))
    run(sim, 3)
    x, y = rows(fed, 0)
    n = len(y)
    w, alpha = torch.zeros(FEATURES, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for k in (1, 2, 3):
        for i in sim.rounds.own_uniform("rows", 0, k, n).argsort().tolist():
            step = (1 - y[i] * x[i] @ w) * lam * n / (x[i] @ x[i])
            new = y[i] * (step + y[i] * alpha[i]).clamp(0, 1)
            w, alpha[i] = w + (new - alpha[i]) * x[i] / (lam * n), new
    torch.testing.assert_close(sim.server.x[0, 0], w, rtol=1e-12, atol=1e-13)


def test_squared_loss_gives_ridge_regressions() -> None:
    """(X^T X / n + lam m I) w = X^T y / n; SDCA shrinks the error by a constant factor a pass."""
    fed, lam = tasks(), 0.1
    sim = begin(fed, MOCHA(lam=lam, dual="squared", inner=10_000, frac=1))
    run(sim, 100)
    for t in range(fed.clients):
        x, y = rows(fed, t)
        A = x.mT @ x / len(y) + lam * 5 * torch.eye(FEATURES, dtype=torch.float64)
        w = torch.linalg.solve(A, x.mT @ y / len(y))
        torch.testing.assert_close(sim.server.x[0, t], w, rtol=0, atol=1e-11)


def test_logistic_loss_ends_where_the_gradient_is_zero() -> None:
    fed, lam = tasks(), 0.1
    sim = begin(fed, MOCHA(lam=lam, dual="logistic", inner=10_000, frac=1))
    run(sim, 150)
    for t in range(fed.clients):
        x, y = rows(fed, t)
        w = sim.server.x[0, t]
        slope = -(torch.sigmoid(-y * (x @ w)) * y) @ x / len(y) + lam * 5 * w
        assert float(slope.norm()) <= 1e-11


# ---- invariants ----


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"frac": 1.0}, {}),
        ({"frac": 0.3}, {}),
        ({"frac": 1.0, "least": 0.1}, {}),
        ({"frac": 0.5}, {"participation": 0.6, "drop_rate": 0.3}),
    ],
)
def test_the_dual_never_falls_and_w_belongs_to_alpha(
    fields: dict[str, float], options: dict[str, Any]
) -> None:
    """Within an inner phase D rises, whoever is absent and however little is done; rho sees to it
    that steps of related clients do not go too far together. Rounding of D is some 1e-15."""
    lam = 0.02
    sim = begin(tasks(), MOCHA(lam=lam, inner=6, **fields), **options)
    before = 0.0
    for k in range(1, 31):
        run(sim, k)
        now = dual(sim, lam)
        if k % 6:  # new relations are another dual function
            assert now >= before - 1e-12
        before = now
        assert primal(sim, lam) >= now - 1e-12
        _belongs(sim, lam)


def _belongs(sim: Simulation, lam: float) -> None:
    """b_t is the mean of alpha x, W = B Sigma / lam, tr Sigma = 1, Sigma is positive definite."""
    W, B, Sigma = sim.server.x[0], sim.server.B[0], sim.server.Sigma[0, 0]
    for t in range(len(B)):
        x, y = rows(sim.fed, t)
        alpha = sim.own[t][0, 0]
        torch.testing.assert_close(B[t], alpha[: len(y)] @ x / len(y), rtol=0, atol=1e-13)
        assert not alpha[len(y) :].any()
        assert ((y * alpha[: len(y)] >= 0) & (y * alpha[: len(y)] <= 1)).all()
    torch.testing.assert_close(W, Sigma @ B / lam, rtol=1e-13, atol=1e-13)
    assert float(Sigma.trace()) == pytest.approx(1, abs=1e-13)
    assert float(torch.linalg.eigvalsh(Sigma)[0]) > 0


def test_the_objective_falls_from_relations_to_relations() -> None:
    """P is minimised in W, then in Omega, then in W: at the end of inner phases it never rises.

    Eigenvalues are raised to 1e-7, by which Sigma is not quite the minimiser: sqrt(1e-7) of the
    trace, or 3e-4 of lam tr(W Omega W^T)/2.
    """
    lam = 0.05
    sim = begin(tasks(), MOCHA(lam=lam, inner=60, frac=1))
    found = []
    for k in range(1, 6):
        run(sim, 60 * k - 1)  # the last round before the relations change
        found.append(primal(sim, lam))
        run(sim, 60 * k)
    assert found[1] < found[0] - 0.05
    assert all(after <= before + 1e-4 for before, after in pairwise(found))


def test_relations_tell_who_is_alike() -> None:
    """Clients 0, 1, 2 share a hyperplane, 3 and 4 have its opposite."""
    sim = begin(tasks(), MOCHA(lam=0.05, inner=40, frac=1))
    run(sim, 4 * 40)
    Sigma = sim.server.Sigma[0, 0]
    scale = Sigma.diagonal().sqrt()
    correlation = Sigma / scale / scale[:, None]
    assert float(correlation[0, 1]) > 0.5
    assert float(correlation[3, 4]) > 0.5
    assert float(correlation[0, 3]) < -0.5


def test_pieces_of_a_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that come in several pieces, with padding between them, keep their alpha."""
    fed, record = tasks(), MOCHA(lam=0.05, inner=3)
    whole = fly(fed, record, 7, batch_size=4).personal
    monkeypatch.setitem(gather.BUDGET, "cpu", 2000)
    pieces = fly(fed, record, 7, batch_size=4).personal
    assert whole is not None
    assert pieces is not None
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-13)


def test_a_bias_is_a_constant_entry() -> None:
    """mclr with one output on x is linear on (x, 1)."""
    fed = tasks()
    wide = replace(fed, x=torch.cat((fed.x, torch.ones_like(fed.x[:, :1])), 1))
    record = MOCHA(lam=0.05, inner=3)
    biased = simulate(fed, "mclr", record, rounds=7, **EXACT).personal
    plain = fly(wide, record, 7).personal
    torch.testing.assert_close(biased, plain, rtol=1e-12, atol=1e-13)


def test_every_class_against_the_rest(fed: Federation) -> None:
    """Three outputs are three problems: output c is what a single output learns of class c."""
    options = {**EXACT, "loss": "cross_entropy"}
    record = MOCHA(lam=0.05, inner=2)
    three = simulate(fed, "linear", record, rounds=5, **options).personal
    for c in range(3):
        clients = []
        for t in range(fed.clients):
            own = fed.rows_of(t)
            clients.append((fed.x[own], (fed.y[own] == c).long()))
        shuffled = Federation.from_clients(clients, test_fraction=0, classes=2)
        binary = replace(shuffled, train_rows=torch.arange(len(shuffled.x)))  # in the order of fed
        one = fly(binary, record, 5).personal
        assert three is not None
        torch.testing.assert_close(three[:, 4 * c : 4 * c + 4], one, rtol=1e-12, atol=1e-13)


def test_related_clients_learn_from_each_other() -> None:
    """With 8 rows each, models that know their relations err less than models alone."""
    fed = tasks(signs=(1,) * 10, rows=8)
    x, y = rows(tasks(signs=(1,) * 10, rows=400), 9)
    errors = []
    for inner in (10, 10_000):
        models = fly(fed, MOCHA(lam=0.1, inner=inner, frac=1), 60).personal
        assert models is not None
        wrong = (models @ x.mT > 0) != (y > 0)
        errors.append(float(wrong.double().mean()))
    assert errors[0] < errors[1] - 0.02


# ---- what is refused ----


def test_refuses_a_network(fed: Federation) -> None:
    with pytest.raises(InputError, match=r"MOCHA is for linear models, got one .*fedper"):
        simulate(fed, "mlp", MOCHA(), rounds=1, device="cpu")


@pytest.mark.parametrize(
    "wrong", [{"lam": 0}, {"frac": 0}, {"frac": 1.5}, {"least": 2}, {"inner": 0}]
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
        MOCHA(**wrong)


def test_unknown_loss() -> None:
    with pytest.raises(InputError, match="hinge"):
        MOCHA(dual="hing")
