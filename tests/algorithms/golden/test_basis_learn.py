"""Basis Learn by hand.

Two clients of equal weight, three parameters, the losses (a^T x - y)^2 of one row each:

    client 1   a = (1, 0, 0), y = 2      V_1 = (1, 0, 0), Gam_1 = 2, c_1 = 2 (x_1 - 2)
    client 2   a = (0, 3, 4), y = 5.5    V_2 = (0, 3, 4)/5, Gam_2 = 50

With l2 = 1, f is the mean of the two losses and |x|^2/2. For x = (t, 0, 0) + s V_2 its slopes are
(t - 2) + t and 5 (5 s - 5.5) + s, so that t = 1 and s = 27.5/26. All three methods get there in the
first step, since Hessians are sent whole at first and do not change.

A client sends r = 1 number as gradient, 1 as triangle of L_i and 3 as V_i in round 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, FedNL, FedNLPP, InputError, load, simulate
from fedsso.algorithms.hessians import clipped, coefficients, combined, raised, tossed
from fedsso.algorithms.second_order.basis_learn import BL1, BL2, BL3
from fedsso.experiment.stepper import Simulation

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}
LOGISTIC: dict[str, Any] = {**OPTIONS, "loss": "bce", "l2": 0.01}
Record = BL1 | BL2 | BL3
ALL = pytest.mark.parametrize("kind", [BL1, BL2, BL3])


def hand() -> Federation:
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 4.0]], dtype=torch.float64)
    return Federation.from_rows(rows, [2.0, 5.5], [[0], [1]], test_fraction=0)


def narrow() -> Federation:
    """Three clients of 6, 9 and 7 rows, each in a plane of its own in five dimensions."""
    draw = torch.Generator().manual_seed(2)
    parts = []
    for n in (6, 9, 7):
        plane = torch.randn(2, 5, generator=draw, dtype=torch.float64)
        parts.append(torch.randn(n, 2, generator=draw, dtype=torch.float64) @ plane)
    y = (torch.rand(22, generator=draw) < 0.5).long()
    lists = [list(range(6)), list(range(6, 15)), list(range(15, 22))]
    return Federation.from_rows(torch.cat(parts), y, lists, test_fraction=0, classes=2)


def stepped(fed: Federation, record: Record, rounds: int, **options: Any) -> Simulation:
    sim = Simulation(fed, "linear", record, rounds=rounds, **{**LOGISTIC, **options})
    for _ in sim:
        pass
    return sim


def reached(fed: Federation, record: Any, rounds: int, **options: Any) -> Tensor:
    x: Tensor = simulate(fed, "linear", record, rounds=rounds, **{**LOGISTIC, **options}).x
    return x


def slopes(fed: Federation, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of client i, without the penalty."""
    a, y = fed.x[fed.rows_of(i)], fed.y[fed.rows_of(i)].double()
    s = torch.sigmoid(a @ x)
    return a.T @ (s - y) / len(a), (a.T * (s * (1 - s))) @ a / len(a)


def mean(fed: Federation, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of all clients."""
    parts = [slopes(fed, i, x) for i in range(fed.clients)]
    g = sum(float(p) * g for p, (g, _) in zip(fed.p, parts, strict=True))
    H = sum(float(p) * H for p, (_, H) in zip(fed.p, parts, strict=True))
    assert isinstance(g, Tensor)
    assert isinstance(H, Tensor)
    return g, H


@ALL
def test_by_hand(kind: type[Record]) -> None:
    result = simulate(hand(), "linear", kind(), rounds=1, l2=1.0, **OPTIONS)
    s = 27.5 / 26 / 5
    assert result.x.tolist() == pytest.approx([1, 3 * s, 4 * s], abs=1e-13)
    more = {BL1: 1, BL2: 3 + 1, BL3: 1 + 2}[kind]  # gradient; that and l_i; gamma_i and beta_i
    assert result.trace["bytes_up"][1] == 2 * 8 * (more + 1 + 3)
    assert result.trace["bytes_down"][1] == 2 * 8 * 3


def test_bytes_of_later_rounds() -> None:
    """Planes, Top-2 of a triangle of 3: two values of 8 bytes and two places of 4."""
    fed = narrow()
    S = 2 * (8 + 4)
    for record, more in (
        (BL1(compressor="topk:2"), 2),
        (BL2(compressor="topk:2"), 5 + 1),
        (BL3(compressor="topk:2"), 2 + 2),
    ):
        rows = stepped(fed, record, 2).rows
        assert int(rows[2]["bytes_up"][0]) == 3 * (S + 8 * more), type(record)


def test_the_standard_basis_is_fednl(quad: Federation) -> None:
    for compressor in ("rank:1", "topk:5"):
        fields: dict[str, Any] = {"compressor": compressor, "mu": 0.1}
        for rounds in (1, 3, 6):
            ours = simulate(
                quad, "linear", BL1(basis="standard", **fields), rounds=rounds, **OPTIONS
            )
            paper = simulate(quad, "linear", FedNL(**fields), rounds=rounds, **OPTIONS)
            torch.testing.assert_close(ours.x, paper.x, rtol=0, atol=1e-11)


def test_a_turned_basis_changes_nothing_for_low_rank() -> None:
    """Rows that span everything: V_i is a rotation, which does not change eigenvalues."""
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    for rounds in (1, 3, 6):
        ours = reached(fed, BL1(compressor="rank:1"), rounds)
        paper = reached(fed, FedNL(compressor="rank:1"), rounds)
        torch.testing.assert_close(ours, paper, rtol=0, atol=1e-10)


def test_bl2_without_compression_is_fednl_pp(quad: Federation) -> None:
    """Rounds with half of the clients: both minimise the sum of the losses seen so far."""
    some: dict[str, Any] = {"participation": 0.5, "seed": 3, **OPTIONS}
    for rounds in (1, 2, 5):
        ours = simulate(
            quad, "linear", BL2(compressor="none", basis="standard"), rounds=rounds, **some
        )
        paper = simulate(quad, "linear", FedNLPP(compressor="none"), rounds=rounds, **some)
        torch.testing.assert_close(ours.x, paper.x, rtol=0, atol=1e-10)


@ALL
def test_without_compression_it_is_newtons_method(kind: type[Record]) -> None:
    """BL1 is one round late, as FedNL is."""
    fed = narrow()
    x = torch.zeros(5).double()
    before = mean(fed, x)[1]
    for k in range(1, 5):
        g, now = mean(fed, x)
        M = (before if kind is BL1 else now) + 0.01 * torch.eye(5).double()
        before = now
        x = x - torch.linalg.solve(M, g + 0.01 * x)
        torch.testing.assert_close(reached(fed, kind(compressor="none"), k), x, rtol=0, atol=1e-9)


@ALL
def test_the_limit_is_the_minimiser(kind: type[Record]) -> None:
    """K = 1 of a triangle of 3: it is learnt in turns."""
    fed = narrow()
    x = reached(fed, kind(compressor="topk:1"), 60)
    assert float((mean(fed, x)[0] + 0.01 * x).norm()) < 1e-9


def textbook(fed: Federation, rounds: int, p: float, down: int) -> Tensor:
    """BL1 without compression of Hessians, by the paper: coin, memory of gradients, short way."""
    z = w = torch.zeros(5).double()
    gw, H = mean(fed, z)
    for k in range(1, rounds + 1):
        g, now = mean(fed, z)
        M = H + 0.01 * torch.eye(5).double()
        H = now
        if tossed("gradient", k, p):
            w = z
            g = gw = g + 0.01 * z
        else:
            values, vectors = raised(M, 0.01)
            g = gw + vectors @ torch.diag(values) @ vectors.T @ (z - w)
        v = -clipped(M, g, 0.01)
        z = z + torch.where(v.abs() >= v.abs().sort().values[-down], v, 0.0)
    return z


@pytest.mark.parametrize(("p", "down"), [(0.4, 5), (1.0, 2), (0.4, 3)])
def test_fewer_gradients_and_a_short_way_down(p: float, down: int) -> None:
    fed = narrow()
    for rounds in (1, 4, 9):
        x = reached(fed, BL1(compressor="none", p=p, down=down), rounds)
        torch.testing.assert_close(x, textbook(fed, rounds, p, down), rtol=0, atol=1e-9)


def test_the_coin_is_fair_and_the_same_for_all() -> None:
    """In 4 000 tosses heads come within four standard deviations of p n; in round 1, always."""
    for p in (0.25, 0.5):
        heads = sum(tossed("gradient", k, p) for k in range(2, 4002))
        assert abs(heads - p * 4000) < 4 * (p * (1 - p) * 4000) ** 0.5
    assert tossed("gradient", 1, 1e-9)
    assert all(tossed("gradient", k, 1.0) for k in range(1, 100))


@pytest.mark.parametrize("p", [1.0, 0.4])
@pytest.mark.parametrize("basis", ["data", "standard"])
def test_the_relation_of_bl2(p: float, basis: str) -> None:
    """g_i = (V_i L_i V_i^T + l_i I) w_i - gradient_i(w_i), and the server's sums, with absent
    clients and with gradients that are not sent."""
    fed = narrow()
    record = BL2(compressor="topk:2", p=p, basis=basis)
    sim = stepped(fed, record, 12, participation=0.67, seed=4)
    total = torch.zeros(5).double()
    for i in range(fed.clients):
        own: Any = sim.own[i]
        V = own.V[0] if basis == "data" else torch.eye(5).double()
        w = own.w[0]
        grad = slopes(fed, i, w)[0] + 0.01 * w
        g = V @ own.L[0] @ V.T @ w + own.l[0] * w - grad
        torch.testing.assert_close(own.g[0], g, rtol=0, atol=1e-12)
        memory: Any = sim.now.memory[i]
        torch.testing.assert_close(memory.w[0], w, rtol=0, atol=0)
        total += fed.p[i] * g
    torch.testing.assert_close(sim.server.g[0], total, rtol=0, atol=1e-12)


def test_positive_coefficients_and_back() -> None:
    X = torch.randn(2, 3, 6, 6).double()
    X = X + X.mT
    torch.testing.assert_close(combined(coefficients(X)), X, rtol=0, atol=1e-13)
    # e_1 e_1^T + 2 (e_1 + e_2)(e_1 + e_2)^T
    X = torch.tensor([[3.0, 2.0], [2.0, 2.0]])
    assert coefficients(X).tolist() == [[1, 2], [2, 0]]


@pytest.mark.parametrize("basis", ["data", "standard"])
def test_the_matrix_of_bl3_is_above_the_hessian(basis: str) -> None:
    """The least eigenvalue of the difference, which rounding of matrices of size 10 may move."""
    fed = narrow()
    sim = Simulation(fed, "linear", BL3(compressor="topk:1", basis=basis), rounds=25, **LOGISTIC)
    seen = []

    class Watched(BL3):
        def server(self, server: Any, mean_: Any, cohort: Any) -> Any:
            new = super().server(server, mean_, cohort)
            beta = mean_.beta.unsqueeze(-1)
            M = beta * new.H + 2 * (beta - 1) * mean_.gamma
            seen.append(float(torch.linalg.eigvalsh(M[0] - mean(fed, server.x[0])[1])[0]))
            return new

    object.__setattr__(sim.algorithm, "__class__", Watched)
    for _ in sim:
        pass
    assert len(seen) == 25
    assert min(seen) > -1e-12


def test_softmax_needs_the_standard_basis(fed: Federation) -> None:
    with pytest.raises(InputError, match="one number a\\^T x for each row"):
        simulate(fed, "mclr", BL1(), rounds=1, **OPTIONS)
    x = simulate(fed, "mclr", BL1(basis="standard"), rounds=2, l2=0.1, **OPTIONS).x
    assert x.isfinite().all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda: BL1(compressor="randk:3"), "none, rank:R or topk:K"),
        (lambda: BL1(p=1.5), "p must lie in"),
        (lambda: BL2(p=0), "p must be > 0"),
        (lambda: BL1(down=-1), "down must be an integer >= 0"),
        (lambda: BL3(c=0), "c must be > 0"),
        (lambda: BL2(basis="mine"), "unknown basis"),
    ],
)
def test_wrong_fields(record: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        record()
