"""Muon at the server by hand.

A model with one row is a matrix of one singular value, its length. Divided by its length it has the
singular value 1, which five steps of p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5 take to

    p(1) = 0.701, p(0.701) = 1.1136..., ...

so each round moves x by eta p^5(1) along D + beta M. f(x) = 1/2 |x - b|^2 of one client with b =
(3, 4), alpha = 1/2, one local step: delta = (b - x) / 2 is along b, in the first round and in all
later ones while x is short of b. So x = k eta p^5(1) (0.6, 0.8) after k rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod, sqrt
from typing import Any

import pytest
import torch
from quadratics import close, go
from torch import Tensor, nn

from fedsso import FedAvg, FedAvgM, Federation, ServerMuon, compare, simulate
from fedsso.algorithm import Cohort
from fedsso.algorithms.first_order.servermuon import orthogonal
from fedsso.algorithms.shapes import read, told
from fedsso.data import quadratic
from fedsso.engine.simulate import fitted, run
from fedsso.errors import InputError
from fedsso.experiment.stepper import Simulation
from fedsso.objective.backend import Layout

EPS = torch.finfo(torch.float64).eps
EXACT: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}
GROWTH = 3.4445**5  # the most by which five steps of the polynomial amplify a singular value


def p5(s: float) -> float:
    """Five steps of Muon's polynomial on one singular value."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_svd(G: Tensor) -> Tensor:
    """The same polynomial, of the singular values of one matrix."""
    U, S, Vt = torch.linalg.svd(G, full_matrices=False)
    scale = sqrt(max(1, G.shape[0] / G.shape[1]))
    new = torch.tensor([p5(float(s)) for s in S / G.norm()], dtype=torch.float64)
    return scale * (U * new) @ Vt


# ---- the iteration ----


@pytest.mark.parametrize(("rows", "cols"), [(3, 7), (7, 3), (5, 5), (1, 6), (6, 1)])
def test_newton_schulz_acts_on_singular_values(rows: int, cols: int) -> None:
    """Each step errs by about (rows + cols) eps, which the next ones amplify at most GROWTH times;
    so does the decomposition it is compared with."""
    G = draw(4, rows, cols)
    found = orthogonal(G.flatten(1), rows, cols).unflatten(1, (rows, cols))
    for a, b in zip(found, G, strict=True):
        assert float((a - by_svd(b)).norm()) <= 10 * (rows + cols) * GROWTH * EPS


def test_it_is_near_an_orthogonal_matrix() -> None:
    """Singular values above 0.002 of the length end between 0.68 and 1.21."""
    G = draw(1, 8, 20)
    S = torch.linalg.svdvals(G[0] / G.norm())
    assert S.min() > 0.002
    ends = torch.linalg.svdvals(orthogonal(G.flatten(1), 8, 20).unflatten(1, (8, 20))[0])
    assert 0.68 < ends.min() <= ends.max() < 1.21


def test_no_singular_value_leaves_the_bounds_of_the_docstring() -> None:
    grid = torch.logspace(-6, 0, 20_001, dtype=torch.float64).tolist()
    for s in grid:
        end = p5(s)
        assert 0 < end < min(1.21, GROWTH * s * (1 + 1e-12))
        assert end > 0.68 or s < 0.002


def test_the_length_does_not_count_and_zero_stays() -> None:
    G = draw(1, 12)
    assert torch.equal(orthogonal(G, 3, 4), orthogonal(2.0**-40 * G, 3, 4))
    assert not orthogonal(torch.zeros(2, 12), 3, 4).any()
    assert orthogonal(torch.full((1, 12), torch.nan), 3, 4).isnan().all()


def test_trials_do_not_touch_each_other() -> None:
    G = draw(3, 12)
    alone = orthogonal(G[:1], 3, 4)
    G[1] = torch.nan
    assert float((orthogonal(G, 3, 4)[:1] - alone).norm()) <= 10 * 7 * GROWTH * EPS


# ---- rounds ----


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_by_hand(rounds: int) -> None:
    fed = quadratic([[[1.0, 0], [0, 1.0]]], [[3.0, 4.0]])
    found = go(fed, ServerMuon(alpha=0.5, eta=0.5), rounds, local_steps=1)
    length = rounds * 0.5 * p5(1.0)
    assert found.x.tolist() == pytest.approx([0.6 * length, 0.8 * length], abs=1e-12)
    assert found.trace["bytes_up"][1] == found.trace["bytes_down"][1] == 2 * 8


def test_each_layer_steps_by_its_own_rule(fed: Federation) -> None:
    """Two rounds of an MLP from the updates that the clients would send, layer by layer."""
    record = ServerMuon(alpha=0.1, eta=0.05, eta_v=0.3, beta=0.5)
    sim = Simulation(fed, "mlp", [record], rounds=2, local_steps=2, **EXACT)
    shapes = sim.f.layout.shapes
    sizes = [prod(shape) for shape in shapes]
    assert [len(shape) for shape in shapes] == [2, 1, 2, 1]
    past = torch.zeros_like(sim.server.x)
    for _ in range(2):
        x, m = sim.server.x, sim.server.m
        run(sim, sim.k + 1)
        delta = sim.server.m - 0.5 * m
        past = 0.5 * past + delta
        ahead = delta + 0.5 * past
        moved = (sim.server.x - x).split(sizes, -1)
        layers = zip(shapes, moved, past.split(sizes, -1), ahead.split(sizes, -1), strict=True)
        for shape, change, old, new in layers:
            if len(shape) == 1:
                close(change, 0.3 * old, 1e-12)
            else:
                close(change[0].view(shape), 0.05 * by_svd(new[0].view(shape)), 1e-10)


def test_the_momentum_is_that_of_the_clients_updates(fed: Federation) -> None:
    """After one round from the same start m is FedAvg's update."""
    options = {"rounds": 1, "local_steps": 2, **EXACT}
    sim = Simulation(fed, "mlp", [ServerMuon(alpha=0.1)], **options)
    start = sim.server.x
    run(sim, 1)
    close(sim.server.m[0], simulate(fed, "mlp", FedAvg(alpha=0.1), **options).x - start[0], 1e-12)


def test_vectors_alone_are_fedavgm(fed: Federation) -> None:
    """All layers named as one vector."""
    record = ServerMuon(alpha=0.1, eta_v=0.2, beta=0.8, shapes="15")
    options = {"rounds": 6, "local_steps": 2, **EXACT}
    expected = simulate(fed, "mclr", FedAvgM(alpha=0.1, eta=0.2, beta1=0.8), **options)
    close(simulate(fed, "mclr", record, **options).x, expected.x, 1e-14)


def test_trials_at_once_equal_single_runs(fed: Federation) -> None:
    records = [
        ServerMuon(alpha=0.1, eta=eta, beta=beta) for eta in (0.01, 0.1) for beta in (0, 0.9)
    ]
    options = {"rounds": 5, "local_steps": 2, **EXACT}
    for record, together in zip(records, compare(fed, "mlp", records, **options), strict=True):
        close(together.x, simulate(fed, "mlp", record, **options).x, 1e-10)


# ---- the shapes ----


class Net(nn.Module):
    """A kernel, a norm, a matrix, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 5)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("of", [lambda net: net, Layout.of])
def test_the_engine_tells_the_shapes(of: Callable[[nn.Module], Any]) -> None:
    """The order is that of the flat vector: a module's own parameters, then its parts'."""
    assert fitted(ServerMuon(), of(Net())).shapes == "1 8x75 8 8 8 10x8"


def test_shapes_of_the_user_stay() -> None:
    assert ServerMuon(shapes="650").fit([650], [(10, 64), (10,)]).shapes == "650"
    with pytest.raises(InputError, match=r"have 640 numbers, the model has 650; leave shapes out"):
        ServerMuon(shapes="10x64").fit([650], [(10, 64), (10,)])


def test_shapes_as_text() -> None:
    assert told([(4, 3), (4,), (), (0, 5)]) == "4x3 4 1 0"
    assert read("4x3 4 1 0") == [(4, 3), (4,), (1,), (0,)]


@pytest.mark.parametrize("text", ["", "4x", "4x3x2", "0x3", "-4", "4,3", " 4", "4  3", "4" * 13])
def test_wrong_shapes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="a matrix and a vector, got shapes="):
        ServerMuon(shapes=text)


def test_a_record_that_knows_no_model_does_not_step() -> None:
    record = ServerMuon()
    state = record.server_init(torch.zeros(1, 3))
    with pytest.raises(InputError, match="got shapes='model'"):
        record.server(state, torch.ones(1, 3), Cohort(1, 2, torch.arange(2), 1.0, 1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beta": 1.0}, r"beta must be in \[0, 1\)"),
        ({"eta": 0}, "eta must be > 0"),
        ({"eta_v": -1}, "eta_v must be > 0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerMuon(**values)
