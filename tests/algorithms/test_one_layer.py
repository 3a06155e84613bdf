"""FedSSO's metric for a model of one layer, which is learned from single clients' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from quadratics import fix_cohorts
from torch import Tensor, nn

from fedsso import Federation, FedSSO, compare, simulate
from fedsso.algorithm import Cohort
from fedsso.algorithm.contract import Attendance, weighted_mean
from fedsso.algorithms import layers
from fedsso.algorithms.layers import Spread, WithSquares
from fedsso.engine import simulate as engine
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.maths.kronecker import Metric
from fedsso.server import Server
from studies import states_of

LAYER = [(3, 4), (3,)]
TEXT = "3x4 3"
D = 15
EPS = torch.finfo(torch.float64).eps
CLOSE = {"rtol": 1e-8, "atol": 1e-10}  # rounding of 1e-16, amplified by some rounds of BFGS
NOISY: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "dtype": "float64", "device": "cpu"}


def answered(size: int, mass: float, k: int = 1) -> Cohort:
    """A cohort of so many clients."""
    return Cohort(k, size, torch.arange(size), mass, 3.0)


def linear(record: FedSSO, fed: Federation, **options: Any) -> Simulation:
    """A linear classifier of four features and three classes, with a bias."""
    return Simulation(fed, "mclr", [record], **{**NOISY, **options})


# ---- where it is used ----


@pytest.mark.parametrize(
    ("matrices", "one"),
    [
        ([(3, 4), (3, 1)], True),
        ([(3, 4)], True),
        ([(1, 4), (1, 1)], True),
        ([(3, 4), (3, 1), (3, 1)], True),
        ([(3, 4), (4, 1)], False),
        ([(3, 4), (3, 4)], False),
        ([(3, 4), (3, 1), (2, 3)], False),
        ([(3, 1), (3, 1)], False),
        ([(12, 1)], False),
        ([], False),
    ],
)
def test_one_layer_is_a_matrix_and_biases(matrices: list[tuple[int, int]], one: bool) -> None:
    assert layers.is_one_layer(matrices) is one


@pytest.mark.parametrize(
    ("fields", "sizes", "shapes", "found"),
    [
        ({}, [15], LAYER, TEXT),
        ({}, [12], [(3, 4)], "3x4"),
        ({}, [5], [(1, 4), (1,)], "1x4 1"),
        ({}, [12], [(3, 2, 1, 2)], "3x4"),
        ({}, [12], [(12,)], "none"),
        ({}, [12], [(12, 1)], "none"),
        ({}, [15], (), "none"),
        ({"guard": "cautious"}, [15], LAYER, "none"),
        ({"guard": "none"}, [15], LAYER, "none"),
        ({"form": "lbfgs"}, [15], LAYER, "none"),
        ({"form": "bfgs-dense"}, [15], LAYER, "none"),
        ({"form": "dfp"}, [15], LAYER, "none"),
        ({"shapes": "none"}, [15], LAYER, "none"),
        ({"shapes": "5x3"}, [15], LAYER, "5x3"),
        ({"alpha": 0.1}, [15], LAYER, TEXT),
    ],
)
def test_a_model_of_one_layer_has_a_metric_where_the_guard_can_use_it(
    fields: dict[str, Any], sizes: list[int], shapes: Sequence[Sequence[int]], found: str
) -> None:
    """Its drift goes by who answers, as without a metric."""
    fitted = FedSSO(**fields).fit(sizes, shapes)
    assert (fitted.shapes, fitted.drift) == (found, "auto")
    assert fitted.by_client is (found != "none")
    for absent, drift in ((False, "small"), (True, "steady")):
        joined = fitted.join(Attendance(4, absent), sum(sizes))
        assert (joined.shapes, joined.drift) == (found, drift)


@pytest.mark.parametrize(
    ("fields", "attendance", "used"),
    [
        ({}, Attendance(4), True),
        ({}, Attendance(4, some_absent=True), True),
        ({}, Attendance(4, compressed=True), False),
        ({}, Attendance(4, exact=True, l2=1e-4), False),
        ({}, Attendance(4, exact=True, l2=0.0), True),
        ({}, Attendance(4, l2=1e-4), True),
        ({"alpha": 0.1}, Attendance(4, exact=True, l2=1e-4), False),
        ({"drift": "small"}, Attendance(4, exact=True, l2=1e-4), True),
        ({"shapes": TEXT}, Attendance(4, compressed=True), False),
        ({}, Attendance(4, only_means=True), False),
        ({"shapes": TEXT}, Attendance(4, only_means=True), False),
    ],
)
def test_compressed_uploads_exact_gradients_and_means_alone_have_none(
    fields: dict[str, Any], attendance: Attendance, used: bool
) -> None:
    joined = FedSSO(**fields).fit([15], LAYER).join(attendance, 15)
    assert joined.shapes == (TEXT if used else "none")
    network = FedSSO().fit([16, 10], [(4, 3), (4,), (2, 4), (2,)])
    assert network.join(attendance, 26).shapes == "4x3 4 2x4 2"


def test_a_layer_with_a_normalisation_behind_it_is_a_network() -> None:
    """Its shapes are those of a layer with several biases."""
    fitted = FedSSO().fit([15, 6], [*LAYER, (3,), (3,)])
    assert layers.is_one_layer(fitted.matrices)
    assert fitted.drift == "gentle"
    assert not fitted.by_client


def test_only_there_squares_of_uploads_are_averaged() -> None:
    (of_layer,) = FedSSO(shapes=TEXT).phases
    assert of_layer.average is layers.averaged
    for shapes in ("none", "3x4 4"):
        record = FedSSO(shapes=shapes)
        (only,) = record.phases
        assert only.average is weighted_mean
        state = record.server_init(torch.zeros(1, 16))
        upload = torch.ones(2, 1, 16)
        assert record.receive(state, upload, (), 1) == (upload, ())


class Scale(nn.Module):
    """One number for each feature: a vector alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.weight
        return torch.stack((out.sum(-1), -out.sum(-1), out[..., 0]), -1)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"shapes": "none"}, {}),
        ({"guard": "none", "alpha": 0.1}, {}),
        ({"guard": "cautious"}, {}),
        ({"form": "dfp"}, {}),
        ({"form": "bfgs-dense"}, {}),
        ({}, {"compress": "int8"}),
        ({}, {"local_steps": 1, "batch_size": None, "l2": 1e-3}),
    ],
)
def test_elsewhere_nothing_is_kept(
    fed: Federation, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    sim = linear(FedSSO(**fields), fed, **options)
    assert [state.moments for state in states_of(sim, 2)] == [(), (), ()]


def test_a_vector_alone_has_none(fed: Federation) -> None:
    sim = Simulation(fed, Scale().double(), [FedSSO()], loss="cross_entropy", **NOISY)
    assert [state.moments for state in states_of(sim, 2)] == [(), (), ()]


# ---- the rule ----


def power(symmetric: np.ndarray, exponent: float) -> np.ndarray:
    """A symmetric matrix to a power."""
    values, vectors = np.linalg.eigh(symmetric)
    return (vectors * values**exponent) @ vectors.T


def explicit(A: np.ndarray, C: np.ndarray, n: float, g: np.ndarray) -> np.ndarray:
    """K [d, d] of a weight and a bias, which is one more column."""
    usual = np.array([[np.trace(C) / len(C)]])
    top = max(np.linalg.eigvalsh(A)[-1], np.linalg.eigvalsh(C)[-1])
    added = max(0.01, 1 / (2 * n)) * top
    left, right, last = (power(S + added * np.eye(len(S)), -1 / 3) for S in (A, C, usual))
    of_weight, of_bias = np.kron(left, right), np.kron(left, last)
    nothing = np.zeros((len(of_weight), len(of_bias)))
    K = np.block([[of_weight, nothing], [nothing.T, of_bias]])
    found: np.ndarray = float(g @ g) / float(g @ K @ g) * K
    return found


def as_matrix(K: Metric, trial: int) -> np.ndarray:
    """The matrix [d, d] of one trial."""
    trials = len(K.root)
    rows = [K.apply(e.expand(trials, D))[trial] for e in torch.eye(D, dtype=torch.float64)]
    return torch.stack(rows).numpy()


class Plain:
    """A, C and n of one trial by the formulas, with loops over clients."""

    def __init__(self) -> None:
        self.A, self.C, self.n = np.zeros((3, 3)), np.zeros((4, 4)), 0.0

    def round(self, weights: np.ndarray, u: np.ndarray, mass: float) -> None:
        """Clients with these weights [M] have gradients [M, 15]."""
        A, C, mean = np.zeros((3, 3)), np.zeros((4, 4)), np.zeros((3, 4))
        for w, G in zip(weights, u[:, :12].reshape(-1, 3, 4), strict=True):
            A += w * G @ G.T
            C += w * G.T @ G
            mean += w * G
        q = 0.2 * min(1.0, mass)
        self.A = (1 - q) * self.A + q * (A - 0.9 * mean @ mean.T)
        self.C = (1 - q) * self.C + q * (C - 0.9 * mean.T @ mean)
        self.n = (1 - q) * self.n + len(u) - 1


def rounding(A: np.ndarray) -> float:
    """How far A and C may be from their formulas, where all sums are of a few numbers.

    Sums of at most 80 * 4 terms, and a difference of squares of which at least a tenth is left.
    """
    return 10 * 320 * EPS * float(np.trace(A))


COHORTS = ((2, 0.1), (5, 0.5), (3, 1.0), (80, 1 + 1e-7), (3, 0.3), (80, 0.9), (2, 1.0))
ALPHA = torch.tensor([[0.1], [0.03]], dtype=torch.float64)


def test_the_rule_is_the_formulas() -> None:
    """As the engine calls it, round by round, for two trials with client steps of their own.

    In the first rounds few clients have answered, and the floor is 1 / (2 n); then it is 0.01. The
    gradient that K is scaled by is not the mean of those who answered. K loses eps times the
    condition of a side, which is 100, and sums have some 300 terms: 1e-11.
    """
    draw = np.random.default_rng(5)
    record = FedSSO(shapes=TEXT, alpha=0.5)
    state = record.server_init(torch.zeros(2, D, dtype=torch.float64))
    moments = state.moments
    plain = [Plain(), Plain()]
    floors = set()
    for size, mass in COHORTS:
        common = 3 * draw.standard_normal((1, 2, D))
        u = torch.from_numpy(common + draw.standard_normal((size, 2, D)))
        weights = torch.from_numpy(draw.dirichlet(np.ones(size)))
        g = torch.from_numpy(draw.standard_normal((2, D)))
        (received, kept), (phase,) = record.receive(state, -0.5 * u, (), 1), record.phases
        assert kept == ()
        mean, squares = layers.parted(phase.over_clients(weights, received))
        told = (mean / -0.5, squares)
        cohort = answered(size, mass)
        K, moments = layers.learned(record, moments, g, cohort, told)
        assert K is not None
        for t, one in enumerate(plain):
            one.round(weights.numpy(), u[:, t].numpy() / cohort.steps, mass)
            for side, expected in zip(moments.moments, (one.A, one.C), strict=True):
                bound = rounding(expected)
                np.testing.assert_allclose(side[t].numpy(), expected, rtol=0, atol=bound)
            assert float(moments.seen[t]) == pytest.approx(one.n, rel=1e-14)
            expected = explicit(one.A, one.C, one.n, g[t].numpy())
            gap = float(np.linalg.norm(as_matrix(K, t) - expected, 2))
            assert gap <= 1e-11 * float(np.linalg.norm(expected, 2)), (size, mass)
            floors.add("few" if 1 / (2 * one.n) > 0.01 else "many")
    assert floors == {"few", "many"}


def test_the_clients_own_step_is_taken_out() -> None:
    """Two trials send the same updates with steps of their own: gradients are in the inverse."""
    record = FedSSO(shapes=TEXT)
    state = record.server_init(torch.zeros(2, D, dtype=torch.float64))
    state = state._replace(choice=state.choice._replace(alpha=ALPHA))
    draw = torch.Generator().manual_seed(2)
    delta = torch.randn(4, 1, D, generator=draw, dtype=torch.float64).expand(4, 2, D)
    received, _ = record.receive(state, delta, (), 1)
    assert received.own.shape == (4, 2, 3, 4)
    expected = -delta[..., :12].unflatten(-1, (3, 4)) / ALPHA[..., None]
    torch.testing.assert_close(received.own, expected, rtol=1e-14, atol=0)
    assert received.received is delta


@pytest.mark.parametrize(
    ("size", "mass", "told", "used"),
    [
        (2, 0.5, True, True),
        (1, 0.5, True, False),  # a single one of several
        (1, 1.0, True, False),  # there is no other one
        (1, 1 + 1e-7, True, False),
        (2, 0.5, False, False),  # a server that sees only means
        (5, 1.0, False, False),
    ],
)
def test_without_single_gradients_of_several_there_is_none(
    size: int, mass: float, told: bool, used: bool
) -> None:
    """And what is known stays as it is."""
    record = FedSSO(shapes=TEXT)
    g = torch.ones(1, D, dtype=torch.float64)
    before = layers.start(g, record.matrices, by_client=record.by_client)
    assert isinstance(before, Spread)
    _, squares = layers.averaged(
        torch.ones(1), WithSquares(g[None], g[None, :, :12].view(1, 1, 3, 4))
    )
    single = (g, squares) if told else None
    K, after = layers.learned(record, before, g, answered(size, mass), single)
    assert (K is not None) is used
    assert (after is not before) is used


# ---- runs ----


def gradients(fed: Federation, i: int, x: Tensor, alpha: float, tau: int) -> Tensor:
    """u_i [15]: the sum of client i's gradients over tau steps with all its rows, by hand.

    With cross-entropy it is (softmax - label) times the row and 1, in each class.
    """
    rows, labels = fed.x[fed.rows_of(i)], fed.y[fed.rows_of(i)]
    inputs = torch.cat((rows, torch.ones(len(rows), 1, dtype=rows.dtype)), 1)
    hot = torch.eye(3, dtype=rows.dtype)[labels]
    W = torch.cat((x[:12].view(3, 4), x[12:, None]), 1)
    total = torch.zeros_like(W)
    for _ in range(tau):
        G = (torch.softmax(inputs @ W.T, 1) - hot).T @ inputs / len(rows)
        W = W - alpha * G
        total = total + G
    return torch.cat((total[:, :4].flatten(), total[:, 4]))


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("alpha", ["auto", 0.05])
@pytest.mark.parametrize("tau", [1, 3])
def test_the_means_are_those_of_the_clients_own_gradients(
    fed: Federation, tau: int, alpha: Any, participation: float
) -> None:
    """From the models of each round, client by client. Each step may lose some eps of a gradient.

    A server with a memory corrects the mean, but not what the metric is made from.
    """
    own = {"local_steps": tau, "batch_size": None, "participation": participation}
    sim = linear(FedSSO(alpha=alpha), fed, **own)
    states = states_of(sim, 5)
    plain = Plain()
    p = sim.p.double().numpy()
    for k, (before, after) in enumerate(pairwise(states), 1):
        who = sim.rounds.plan(k).answered.tolist()
        step = float(before.choice.alpha) if alpha == "auto" else alpha
        u = np.stack([gradients(fed, i, before.x[0], step, tau).numpy() for i in who])
        mass = float(p[who].sum())
        plain.round(p[who] / mass, u / tau, mass)
        assert len(who) == (5 if participation == 1 else 3)
        for side, expected in zip(after.moments.moments, (plain.A, plain.C), strict=True):
            gap = float(np.abs(side[0].numpy() - expected).max())
            # u comes from x - v, of which alpha times it is left: eps |x| / alpha
            lost = 100 * EPS * (1 + float(before.x.norm()) / step) * float(np.linalg.norm(u))
            assert gap <= lost, k
        assert float(after.moments.seen) == pytest.approx(plain.n, rel=1e-12)


def test_the_first_step_is_that_of_the_metric(fed: Federation) -> None:
    """It is work K g, where g^T K g = g^T g: FedAvg's fall, in another direction."""
    sim = linear(FedSSO(alpha=0.02), fed, batch_size=None)
    start, after = states_of(sim, 1)
    plain = Plain()
    p = sim.p.double().numpy()
    u = np.stack([gradients(fed, i, start.x[0], 0.02, 3).numpy() for i in range(5)])
    plain.round(p, u, 1.0)
    g = p @ u / 3
    K = explicit(plain.A, plain.C, plain.n, g)
    step = (after.x - start.x)[0].numpy()
    assert plain.n == 4
    # the floor is 1 / 8, so that K loses 8 eps or so; updates are 0.06 of a gradient
    np.testing.assert_allclose(step, -0.06 * K @ g, rtol=1e-10, atol=1e-13)
    assert float(step @ g) == pytest.approx(-0.06 * float(g @ g), rel=1e-10)
    assert np.linalg.norm(step + 0.06 * g) > 0.1 * np.linalg.norm(step)


def test_a_model_without_bias(quad: Federation) -> None:
    """One output: A is a number, and C is that of the clients' gradients A_i (x - b_i)."""
    options = {"local_steps": 1, "batch_size": None, "dtype": "float64", "device": "cpu"}
    sim = Simulation(quad, "linear", [FedSSO(alpha=0.1)], **options)
    assert sim.algorithm.matrices == ((1, 6),)
    start, after = states_of(sim, 1)
    p = sim.p.double()
    rows, t = (torch.stack([v[quad.rows_of(i)] for i in range(4)]) for v in (quad.x, quad.y))
    u = 2 / 6 * torch.einsum("nri,nr->ni", rows, rows @ start.x[0] - t)
    g = p @ u
    C = torch.einsum("n,ni,nj->ij", p, u, u) - 0.9 * torch.outer(g, g)
    torch.testing.assert_close(after.moments.moments[1][0], 0.2 * C, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        after.moments.moments[0][0], 0.2 * C.trace().view(1, 1), rtol=1e-10, atol=1e-12
    )
    assert float(after.moments.seen) == 3


@pytest.mark.parametrize("options", [{}, {"participation": 0.01}])
def test_where_one_client_alone_answers_the_run_is_that_without_a_metric(
    make_fed: Any, options: dict[str, Any]
) -> None:
    """To the bit: there is only one, or only one of several in every round."""
    alone = make_fed((31,) if not options else (23, 9, 14))
    with_, without = (
        states_of(linear(FedSSO(shapes=shapes), alone, **options), 6) for shapes in ("auto", "none")
    )
    for one, other in zip(with_, without, strict=True):
        assert torch.equal(one.x, other.x)
        assert not any(side.any() for side in one.moments.moments)
        assert float(one.moments.seen) == 0
        assert other.moments == ()


def test_a_round_with_a_single_client_leaves_the_metric_as_it_is(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not used, and learns nothing; the next round goes on from it."""
    fix_cohorts(monkeypatch, [(0, 1, 3), (2,), (4, 0)])
    seen = []
    plain = layers.learned

    def watched(*given: Any) -> Any:
        K, moments = plain(*given)
        seen.append(K is not None)
        return K, moments

    monkeypatch.setattr(layers, "learned", watched)
    sim = linear(FedSSO(), fed, participation=0.5)
    _, one, two, three = states_of(sim, 3)
    assert seen == [True, False, True]
    assert all(map(torch.equal, two.moments.moments, one.moments.moments))
    assert float(one.moments.seen) == float(two.moments.seen) == 2
    q = 0.2 * float(fed.p[[4, 0]].sum())
    assert float(three.moments.seen) == pytest.approx((1 - q) * 2 + 1, rel=1e-12)


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("alpha", ["auto", 0.05])
def test_clients_in_chunks_give_the_same(
    fed: Federation, alpha: Any, participation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, or as many as their rows allow."""
    whole = linear(FedSSO(alpha=alpha), fed, participation=participation)
    run(whole, 6)
    monkeypatch.setattr(engine, "BUDGET", {"cpu": 1})
    parts = linear(FedSSO(alpha=alpha), fed, participation=participation)
    assert [len(chunk) for chunk in parts._chunks(np.arange(5))] == [1] * 5
    run(parts, 6)
    torch.testing.assert_close(parts.server.x, whole.server.x, **CLOSE)
    for one, other in zip(parts.server.moments.moments, whole.server.moments.moments, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert torch.equal(parts.server.moments.seen, whole.server.moments.seen)
    assert bool(whole.server.moments.moments[0].any())


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_run_resumed_goes_on_to_the_bit(fed: Federation, k: int, participation: float) -> None:
    options = {"dtype": "float32", "participation": participation}
    whole, half, rest = (linear(FedSSO(), fed, **options) for _ in range(3))
    run(whole, 8)
    run(half, k)
    rest.restore({name: leaf.clone() for name, leaf in half.state().items()})
    run(rest, 8)
    a, b = whole.server, rest.server
    assert all(map(torch.equal, (a.x, a.g, a.s), (b.x, b.g, b.s)))
    assert all(map(torch.equal, a.moments.moments, b.moments.moments))
    assert torch.equal(a.moments.seen, b.moments.seen)
    assert not torch.equal(a.moments.seen, half.server.moments.seen)


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_stacked_trials_have_each_their_own_metric(fed: Federation, participation: float) -> None:
    """Five rounds, with a client step and a server step of each trial's own."""
    records = [FedSSO(alpha=alpha, eta=eta) for alpha, eta in ((0.02, 1.0), (0.1, 0.05), (0.1, 1))]
    options = {**NOISY, "participation": participation, "rounds": 5}
    ends = []
    for record, together in zip(records, compare(fed, "mclr", records, **options), strict=True):
        alone = simulate(fed, "mclr", record, **options)
        torch.testing.assert_close(together.x, alone.x, **CLOSE)
        ends.append(alone.x)
    assert min(float((a - b).norm()) for a, b in pairwise(ends)) > 1e-3


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_the_clients_do_not_know_of_it(fed: Federation, participation: float) -> None:
    """Bytes are the same, and the model is not."""
    options = {**NOISY, "participation": participation, "rounds": 5}
    with_, without = (
        simulate(fed, "mclr", FedSSO(shapes=shapes), **options) for shapes in ("auto", "none")
    )
    for name in ("bytes_up", "bytes_down"):
        np.testing.assert_array_equal(with_.trace[name], without.trace[name])
    assert with_.trace["bytes_up"][-1] > 0
    assert float((with_.x - without.x).norm()) > 1e-3


def test_a_server_of_other_clients_learns_from_their_mean_if_it_is_given_shapes() -> None:
    """Its metric is that of a network, which needs no single gradients."""
    draw = torch.Generator().manual_seed(3)
    fields = ({"shapes": TEXT}, {"shapes": TEXT, "drift": "gentle"}, {"shapes": "none"})
    servers = [Server(FedSSO(alpha=0.1, **each), 2) for each in fields]
    x = torch.zeros(D, dtype=torch.float64)
    for k in range(5):
        delta = 0.1 * (torch.randn(D, generator=draw, dtype=torch.float64) - x)
        one, same, plain = (server.advance(x, delta) for server in servers)
        assert torch.equal(one, same), k
        assert not torch.equal(one, plain), k
        x = one
    state = servers[0].state
    assert state is not None
    assert len(state.moments) == 4
    assert all(side.any() for side in state.moments)
