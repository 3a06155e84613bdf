"""Newton-Learn by hand.

Least squares. Two clients of equal weight with the losses (a^T x - y)^2 of two rows each, so that
every phi'' is 2: client 1 has the rows (1, 0) and (0, 2), client 2 has (1, 1) and (1, -1).

    B_1 = diag(1, 4), B_2 = diag(2, 2), hence B = diag(1.5, 3)

h = 2 is exact from the first round on, so that the first step ends at the minimiser of f, for NL1
and for NL2, whose beta is then 1. With y = (1.5, 0 | 1, 3) the gradient at 0 is minus the mean of
y a over each client's rows, twice: -(1.5, 0) and -(4, -2), in the mean (-2.75, 1). So x is
(2.75/1.5, -1/3), with l2 = 0.25 (2.75/1.75, -1/3.25).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, load, simulate
from fedsso.algorithms.second_order.newton_learn import NL1, NL2
from fedsso.experiment.stepper import Simulation

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}
LOGISTIC: dict[str, Any] = {**OPTIONS, "loss": "bce", "l2": 0.01}
Record = NL1 | NL2
BOTH = pytest.mark.parametrize("kind", [NL1, NL2])


def squares() -> Federation:
    a = [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [1.0, -1.0]]
    a64 = torch.tensor(a, dtype=torch.float64)
    return Federation.from_rows(a64, [1.5, 0.0, 1.0, 3.0], [[0, 1], [2, 3]], test_fraction=0)


def ragged() -> Federation:
    """Clients with 12, 5 and 20 rows in four dimensions, labels 0 and 1."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(37, 4, generator=draw, dtype=torch.float64)
    y = (torch.rand(37, generator=draw) < 0.5).long()
    cuts = [range(12), range(12, 17), range(17, 37)]
    return Federation.from_rows(x, y, [list(c) for c in cuts], test_fraction=0, classes=2)


def stepped(fed: Federation, record: Record, rounds: int, **options: Any) -> Simulation:
    """A simulation after some rounds; the model has a bias."""
    sim = Simulation(fed, "mclr", record, rounds=rounds, **{**LOGISTIC, **options})
    for _ in sim:
        pass
    return sim


def rows_of(fed: Federation, i: int) -> Tensor:
    """The rows of client i, with a 1 at the end of each."""
    a = fed.x[fed.rows_of(i)]
    return torch.cat([a, torch.ones(len(a), 1).double()], 1)


def hessian(fed: Federation, x: Tensor) -> Tensor:
    """sum p_i/m_i phi'' a a^T."""
    total = torch.zeros(len(x), len(x)).double()
    for i in range(fed.clients):
        a = rows_of(fed, i)
        s = torch.sigmoid(a @ x)
        total += fed.p[i] / len(a) * (a.T * (s * (1 - s))) @ a
    return total


def learnt(fed: Federation, sim: Simulation) -> Tensor:
    """sum p_i/m_i h_ij a_ij a_ij^T of what the clients hold."""
    total = torch.zeros(5, 5).double()
    for i in range(fed.clients):
        a = rows_of(fed, i)
        h: Any = sim.own[i]
        total += fed.p[i] / len(a) * (a.T * h[0, : len(a)]) @ a
    return total


@BOTH
def test_least_squares_are_solved_in_one_step(kind: type[Record]) -> None:
    x = simulate(squares(), "linear", kind(), rounds=1, **OPTIONS).x
    assert x.tolist() == pytest.approx([2.75 / 1.5, -1 / 3], abs=1e-14)
    x = simulate(squares(), "linear", kind(), rounds=1, l2=0.25, **OPTIONS).x
    assert x.tolist() == pytest.approx([2.75 / 1.75, -1 / 3.25], abs=1e-14)
    x = simulate(squares(), "linear", kind(eta=0.5), rounds=1, **OPTIONS).x
    assert x.tolist() == pytest.approx([1.375 / 1.5, -0.5 / 3], abs=1e-14)


def newton(fed: Federation, rounds: int, late: bool) -> Tensor:
    """Newton's method with the Hessian of this round, or of the round before."""
    x = torch.zeros(5).double()
    before = hessian(fed, x)
    for _ in range(rounds):
        g = 0.01 * x
        for i in range(fed.clients):
            a = rows_of(fed, i)
            y = fed.y[fed.rows_of(i)].double()
            g = g + fed.p[i] / len(a) * a.T @ (torch.sigmoid(a @ x) - y)
        now = hessian(fed, x)
        M = before if late else now
        before = now
        x = x - torch.linalg.solve(M + 0.01 * torch.eye(5).double(), g)
    return x


@pytest.mark.parametrize(("kind", "late"), [(NL1, True), (NL2, False)])
def test_with_all_rows_it_is_newtons_method(kind: type[Record], late: bool) -> None:
    """NL1 is one round late; NL2 then has beta = 1."""
    fed = ragged()
    for rounds in (1, 2, 4):
        sim = stepped(fed, kind(K=20), rounds)
        expected = newton(fed, rounds, late)
        torch.testing.assert_close(sim.models()[0], expected, rtol=0, atol=1e-10)


@BOTH
@pytest.mark.parametrize("K", [1, 3, 8])
def test_the_servers_matrix_is_that_of_the_clients(kind: type[Record], K: int) -> None:
    """Also where a client has fewer rows than K; h is phi'' of some model, so in [0, 1/4]."""
    fed = ragged()
    sim = stepped(fed, kind(K=K), 7)
    torch.testing.assert_close(sim.server.B[0], learnt(fed, sim), rtol=0, atol=1e-13)
    for i in range(fed.clients):
        h: Any = sim.own[i]
        assert ((h >= 0) & (h <= 0.25)).all()
        assert not h[0, len(fed.rows_of(i)) :].any()


def test_rows_in_several_pieces_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows of 64 bytes fit the budget: beside mini-batches a full pass has many pieces."""
    fed = ragged()
    whole = stepped(fed, NL2(K=3), 5)
    monkeypatch.setattr("fedsso.engine.gather.BUDGET", {"cpu": 400})
    pieces = stepped(fed, NL2(K=3), 5, batch_size=2)
    torch.testing.assert_close(pieces.models(), whole.models(), rtol=0, atol=1e-12)


def test_the_matrix_of_nl2_is_above_the_hessian() -> None:
    """From a start far away, where Newton's method fails; the least eigenvalue of the difference
    is not negative, but for rounding of a matrix of size 1."""
    fed = ragged()
    sim = Simulation(fed, "mclr", NL2(K=1), rounds=30, **LOGISTIC)
    seen = []

    class Watched(NL2):
        def moved(self, server: Any, mean: Any, M: Tensor, cohort: Any) -> Tensor:
            gap = torch.linalg.eigvalsh(M[0] - hessian(fed, server.x[0]))[0]
            seen.append(float(gap))
            return super().moved(server, mean, M, cohort)

    object.__setattr__(sim.algorithm, "__class__", Watched)
    sim.now = sim.now._replace(server=sim.server._replace(x=5 * torch.randn(1, 5).double()))
    for _ in sim:
        pass
    assert len(seen) == 30
    assert min(seen) > -1e-13


@BOTH
def test_the_limit_is_the_minimiser(kind: type[Record]) -> None:
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    x = simulate(fed, "linear", kind(K=20), rounds=120, loss="bce", **OPTIONS).x
    torch.testing.assert_close(x, fed.optimum, rtol=0, atol=1e-9)


@BOTH
def test_bytes(kind: type[Record]) -> None:
    """Up g (2), in round 1 a triangle (3), with NL2 two; then K rows with a number each (3 K);
    NL2's beta is one more."""
    result: Run = simulate(squares(), "linear", kind(K=2), rounds=2, **OPTIONS)
    more = kind is NL2
    first, later = 2 + 3 + 4 * more, 2 + 6 + more
    assert result.trace["bytes_up"][1:].tolist() == [2 * 8 * first, 2 * 8 * later]
    assert result.trace["bytes_down"][1:].tolist() == [2 * 8 * 2] * 2


def test_a_softmax_model_is_refused(fed: Federation) -> None:
    with pytest.raises(InputError, match="one number a\\^T x for each row"):
        simulate(fed, "mclr", NL1(), rounds=1, **OPTIONS)
    with pytest.raises(InputError, match="one number a\\^T x for each row"):
        simulate(ragged(), "mlp", NL2(), rounds=1, **LOGISTIC)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda: NL1(K=0), "K must be an integer >= 1"),
        (lambda: NL2(gamma=0), "gamma must be > 0"),
        (lambda: NL2(lam=-1), "lam must be >= 0"),
    ],
)
def test_wrong_fields(record: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        record()
