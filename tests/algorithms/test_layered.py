"""FedSSO's metric for networks: where it is used, and that it is nothing but other coordinates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import FedAvg, Federation, FedSSO, InputError, compare, load, simulate
from fedsso.algorithm import Cohort
from fedsso.algorithm.contract import Attendance
from fedsso.algorithms import client_step, layers, memory, trust_region
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.maths import kronecker
from fedsso.maths.kronecker import Metric
from studies import states_of

NETWORK = [(4, 3), (4,), (2, 4), (2,)]
SIZES = [16, 10]
TEXT = "4x3 4 2x4 2"
NOISY: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "dtype": "float64", "device": "cpu"}
SHAPES = "2x2 1 1"  # of a point with six coordinates; not those of a model of one layer
SIX = ((2, 2), (1, 1), (1, 1))


def answered(size: int, mass: float) -> Cohort:
    """A cohort of so many clients."""
    return Cohort(1, size, torch.arange(size), mass, 1.0)


@pytest.mark.parametrize(
    ("size", "mass", "used"), [(1, 0.5, False), (2, 0.5, True), (1, 1.0, True), (1, 1 + 1e-7, True)]
)
def test_a_single_one_of_several_clients_shows_no_metric(
    size: int, mass: float, used: bool
) -> None:
    g = torch.ones(1, 6, dtype=torch.float64)
    before = layers.start(g, SIX)
    K, after = layers.learned(FedSSO(shapes=SHAPES), before, g, answered(size, mass))
    assert (K is not None) is used
    assert (after is not before) is used


def network(record: FedSSO, fed: Federation, **options: Any) -> Simulation:
    """A network with one hidden layer on labelled rows."""
    return Simulation(fed, "mlp", [record], **{**NOISY, **options})


# ---- where it is used ----


@pytest.mark.parametrize(
    ("fields", "sizes", "shapes", "drift"),
    [
        ({}, SIZES, TEXT, "gentle"),
        ({"guard": "cautious"}, SIZES, "none", "fading"),
        ({"guard": "none"}, SIZES, "none", "fading"),
        ({"form": "lbfgs"}, SIZES, "none", "fading"),
        ({"form": "bfgs-dense"}, SIZES, "none", "fading"),
        ({"form": "dfp"}, SIZES, "none", "fading"),
        ({"shapes": "none"}, SIZES, "none", "fading"),
        ({"shapes": "26"}, SIZES, "26", "gentle"),
        ({}, [26], "none", "auto"),
        ({"shapes": "13x2"}, [26], "13x2", "auto"),
        ({"drift": "small"}, SIZES, TEXT, "small"),
        ({"drift": "fading"}, SIZES, TEXT, "fading"),
        ({"shapes": "none", "drift": "gentle"}, SIZES, "none", "gentle"),
        ({"alpha": 0.1}, SIZES, TEXT, "gentle"),
    ],
)
def test_networks_have_a_metric_where_the_guard_can_use_it(
    fields: dict[str, Any], sizes: list[int], shapes: str, drift: str
) -> None:
    """The drift of one layer is left to those who answer."""
    fitted = FedSSO(**fields).fit(sizes, NETWORK)
    assert (fitted.shapes, fitted.drift) == (shapes, drift)
    assert bool(fitted.matrices) == (shapes != "none")
    joined = fitted.join(Attendance(4), 26)
    assert joined.shapes == shapes
    assert joined.drift == ("small" if drift == "auto" else drift)


def test_without_shapes_there_is_no_metric() -> None:
    """Those who fit a record need not know them."""
    fitted = FedSSO().fit(SIZES)
    assert (fitted.shapes, fitted.drift) == ("none", "fading")


def test_the_engine_tells_the_shapes(fed: Federation) -> None:
    """Four features, 32 hidden units, three classes."""
    record = network(FedSSO(), fed).algorithm
    assert record.matrices == ((32, 4), (32, 1), (3, 32), (3, 1))
    assert record.drift == "gentle"
    assert network(FedSSO(shapes="259"), fed).algorithm.matrices == ((259, 1),)


def test_matrices_of_a_text() -> None:
    """A vector is a matrix with one column, and nothing is left of an empty one."""
    assert FedSSO(shapes="4x3 4 0 1").matrices == ((4, 3), (4, 1), (1, 1))
    assert FedSSO().matrices == FedSSO(shapes="none").matrices == ()


@pytest.mark.parametrize("text", ["", "4x", "4x3x2", "0x3", "-4", "4,3", " 4", "nothing"])
def test_shapes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^shapes .*a matrix and a vector, got shapes="):
        FedSSO(shapes=text)


def test_shapes_of_another_model_are_refused(fed: Federation) -> None:
    with pytest.raises(InputError, match=r"shapes='5x5' have 25 numbers, the model has 26; leave"):
        FedSSO(shapes="5x5").fit(SIZES, NETWORK)
    with pytest.raises(InputError, match=r"shapes='32x4' have 128 numbers, the model has 259"):
        network(FedSSO(shapes="32x4"), fed)


@pytest.mark.parametrize(
    "fields",
    [{"guard": "none"}, {"guard": "cautious"}, {"form": "lbfgs"}, {"form": "dfp-dense"}],
)
def test_shapes_need_the_guard_and_the_form(fields: dict[str, str]) -> None:
    (name, value) = next(iter(fields.items()))
    with pytest.raises(InputError, match=rf"shapes='4x3' needs .*{name}='{value}'.*leave shapes"):
        FedSSO(shapes="4x3", **fields)
    for text in layers.PLAIN:
        assert FedSSO(shapes=text, **fields).shapes == text


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("mclr", {"shapes": "none"}),
        ("mclr", {"guard": "none", "alpha": 0.1}),
        ("mclr", {"guard": "cautious"}),
        ("mclr", {"form": "dfp"}),
        ("mlp", {"guard": "none", "alpha": 0.1}),
        ("mlp", {"guard": "cautious"}),
        ("mlp", {"shapes": "none"}),
        ("mlp", {"form": "lbfgs"}),
    ],
)
def test_elsewhere_nothing_is_kept(fed: Federation, model: str, fields: dict[str, Any]) -> None:
    sim = Simulation(fed, model, [FedSSO(**fields)], **NOISY)
    assert [state.moments for state in states_of(sim, 2)] == [(), (), ()]


def test_a_record_that_knows_no_model_keeps_nothing() -> None:
    assert FedSSO().server_init(torch.zeros(1, 3)).moments == ()


# ---- the rule ----


def test_the_means_are_those_of_the_servers_gradients(fed: Federation) -> None:
    """By hand, from the g of every round, each with a share of 1/5 of the older ones."""
    states = states_of(network(FedSSO(alpha=0.05), fed), 4)
    G = torch.stack([state.g[0] for state in states[1:]])[:, :128].unflatten(1, (32, 4))
    weights = 0.2 * 0.8 ** torch.arange(3.0, -1, -1, dtype=torch.float64)
    found = states[-1].moments
    A, C = (weights @ square.flatten(1) for square in (G @ G.mT, G.mT @ G))
    torch.testing.assert_close(found[0][0], A.view(32, 32), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[1][0], C.view(4, 4), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mass", [1.0, 1 + 1e-7, 0.5, 0.1])
def test_fewer_clients_change_the_means_more_slowly(mass: float) -> None:
    """A share of 0.2 for everybody, also where all weights sum to slightly more than 1."""
    g = torch.ones(1, 6, dtype=torch.float64)
    moments = layers.start(g, SIX)
    for _ in range(3):
        _, moments = layers.learned(FedSSO(shapes=SHAPES), moments, g, answered(2, mass))
    left = (1 - 0.2 * min(1.0, mass)) ** 3
    one = kronecker.follow(layers.start(g, SIX), g, SIX, 1.0)
    for mean, whole in zip(moments, one, strict=True):
        torch.testing.assert_close(mean, (1 - left) * whole, rtol=1e-12, atol=0)


def test_the_first_step_goes_down_as_far_as_fedavgs(fed: Federation) -> None:
    """It is work K g, and g^T K g = g^T g. No other layer's share is that of plain g."""
    full = {**NOISY, "rounds": 1}
    sim = network(FedSSO(alpha=0.02), fed, rounds=1)
    start, after = states_of(sim, 1)
    g, step = after.g[0], (after.x - start.x)[0]
    averaged = simulate(fed, "mlp", FedAvg(alpha=0.02), **full).x - start.x[0]
    torch.testing.assert_close(averaged, -0.06 * g, rtol=1e-10, atol=1e-14)
    # |g|^2 is a sum of 259 terms; K loses 32 eps / FLOOR, as in tests/maths/test_kronecker.py
    assert float(step @ g) == pytest.approx(float(averaged @ g), rel=1e-9)
    assert float((step - averaged).norm()) > 0.1 * float(averaged.norm())
    K, _ = layers.learned(sim.algorithm, start.moments, after.g, answered(2, 1.0))
    assert K is not None
    torch.testing.assert_close(step, -0.06 * K.apply(after.g)[0], rtol=1e-9, atol=1e-12)


def test_the_clients_step_is_chosen_by_plain_lengths(fed: Federation) -> None:
    """L = |y| / |s| of the first pair, in the clients' own coordinates; so is |g| in the trace."""
    sim = network(FedSSO(), fed, rounds=2)
    _, one, two = states_of(sim, 2)
    steep = float((two.g - one.g).norm() / one.s.norm())
    assert float(two.choice.L) == pytest.approx(steep, rel=1e-9)
    wanted = min(client_step.LARGEST, 0.05 / (3 * steep))
    assert float(two.choice.alpha) == pytest.approx(wanted, rel=1e-9)
    found = sim.columns()["grad_norm"].flatten().tolist()[1:]
    assert found == pytest.approx([float(state.g.norm()) for state in (one, two)], rel=1e-9)


@pytest.mark.parametrize("cut", [True, False])
def test_a_metric_measures_the_step(cut: bool) -> None:
    """A direction of length 5 counts as 10, so that 3/10 of it are within a radius of 3."""
    one = torch.ones(1, 1, dtype=torch.float64)
    guard = trust_region.start(one)._replace(radius=3 * one)
    g = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    direction = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    plain, _ = trust_region.limit(guard, 1.0, g, direction, cut=cut)
    assert float(plain) == pytest.approx(3 / 5 if cut else 1.0)
    t, after = trust_region.limit(guard, 1.0, g, direction, 100 * one, cut=cut)
    assert float(t) == pytest.approx(3 / 10 if cut else 1.0)
    assert float(after.slope) == pytest.approx(11 * float(t))
    assert bool(after.capped) == cut


# ---- coordinates ----


def fixed() -> Metric:
    """K of two gradients of six numbers, of which the first one is the largest."""
    draw = torch.Generator().manual_seed(8)
    sizes = torch.logspace(1, -1, 6, dtype=torch.float64)
    moments = layers.start(torch.zeros(1, 6, dtype=torch.float64), SIX)
    for g in sizes * torch.randn(2, 1, 6, generator=draw, dtype=torch.float64):
        moments = kronecker.follow(moments, g, SIX, 0.5)
    return kronecker.metric(moments, SIX, g, 0.01)


K = fixed()
ROOT = K.stretch(torch.eye(6, dtype=torch.float64))  # K^(1/2), which is symmetric
START = torch.linspace(-1, 2, 6, dtype=torch.float64)


def clients(count: int, *, turned: bool) -> Federation:
    """f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i), or f_i(K^(1/2) x')."""
    draw = torch.Generator().manual_seed(11)
    Q = torch.linalg.qr(torch.randn(count, 6, 6, generator=draw, dtype=torch.float64)).Q
    A = Q @ torch.diag(torch.logspace(-1, 0.5, 6, dtype=torch.float64)) @ Q.mT
    b = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    if turned:
        A = ROOT @ A @ ROOT
        b = torch.linalg.solve(ROOT, b.mT).mT
    weights = torch.arange(count, 0, -1, dtype=torch.float64)
    return quadratic((A + A.mT) / 2, b, (weights / weights.sum()).tolist())


def learned(record: FedSSO, moments: Any, *_: Any) -> tuple[Metric | None, Any]:
    """The same metric in all rounds."""
    return (K if record.matrices else None), moments


def dot_of_gradients(a: Tensor, b: Tensor) -> Tensor:
    """a^T K b of gradients [..., d]."""
    return ((a @ ROOT) * (b @ ROOT)).sum(-1, keepdim=True)


def both(
    patch: pytest.MonkeyPatch, rounds: int, fields: dict[str, Any], **options: Any
) -> tuple[list[Any], list[Any]]:
    """The states of a run with the metric K, and of one without in coordinates x' = K^(-1/2) x.

    Clients take one full step, so that they send gradients whatever the coordinates are. What a
    memory compares, replies of the same client, it compares in plain coordinates. So here they are
    made those of K as well.
    """
    full = {"local_steps": 1, "batch_size": None, "dtype": "float64", "device": "cpu", **options}
    there = torch.linalg.solve(ROOT, START)
    plain = FedSSO(alpha=0.3, shapes="none", **fields)
    inside = Simulation(clients(5, turned=True), "linear", [plain], init=there, **full)
    turned = states_of(inside, rounds)
    record = FedSSO(alpha=0.3, shapes=SHAPES, **fields)
    with patch.context() as within:
        within.setattr(layers, "learned", learned)
        within.setattr(memory, "dot", dot_of_gradients)
        outside = Simulation(clients(5, turned=False), "linear", [record], init=START, **full)
        return states_of(outside, rounds), turned


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"eta": 0.3}, {}),
        ({"R": 4}, {}),
        ({"pairs": 2}, {}),
        ({"lam": 0.4, "Lam": 1.5}, {}),
        ({"memory": "none"}, {"participation": 0.4}),
        ({"memory": "none"}, {"participation": 0.4, "seed": 3}),
        ({"memory": "clients"}, {"participation": 0.4, "seed": 5}),
        ({"memory": "clients"}, {"participation": 0.4, "seed": 6}),
    ],
)
def test_a_metric_is_nothing_but_other_coordinates(
    fields: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models, gradients, pairs and all that the guard knows are the same, round by round.

    A dozen rounds of convex functions; K has a condition of 18, each Hessian of 32. A start that is
    moved by 1e-14 moves the models by less than 1e-11. The seeds are such that other clients
    answer in round 2 than in round 1: else the clients' pair would be a part of the server's own,
    and which of the two is better would be a matter of rounding.
    """
    runs = both(monkeypatch, 12, fields, **options)
    for k, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        x, s, g = (getattr(theirs, name)[0] for name in ("x", "s", "g"))
        for found, expected in ((ours.x, ROOT @ x), (ours.s, ROOT @ s), (ROOT @ ours.g[0], g)):
            gap = float((found - expected).norm())
            assert gap <= 1e-8 * max(1.0, float(expected.norm())), (k, fields)
        for one, other in zip(ours.guard, theirs.guard, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
        for name in ("ys", "overridden", "skipped"):
            one, other = getattr(ours.seen, name), getattr(theirs.seen, name)
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
        assert torch.equal(ours.curvature.held, theirs.curvature.held)


def entered(before: Any, after: Any) -> str:
    """Which pair a round has added to B."""
    if int(after.curvature.held) == int(before.curvature.held):
        return "none"
    s, y = after.curvature.store[0, int(after.curvature.head) - 1]
    if torch.equal(s, before.s[0]):
        return "own" if torch.equal(y, (after.g - before.g)[0]) else "damped"
    return "clients" if torch.equal(s, after.memory.s[0]) else "unknown"


def test_the_runs_in_other_coordinates_meet_all_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would be compared: of pairs, steps, and where B starts from."""
    seen = set()
    for fields, options in (
        ({"lam": 0.4, "Lam": 1.5}, {}),
        ({"memory": "none"}, {"participation": 0.4}),
        ({"memory": "none"}, {"participation": 0.4, "seed": 3}),
        ({"memory": "clients"}, {"participation": 0.4, "seed": 5}),
        ({"memory": "clients"}, {"participation": 0.4, "seed": 6}),
    ):
        states, _ = both(monkeypatch, 12, fields, **options)
        for before, after in pairwise(states[1:]):
            seen.add(entered(before, after))
            seen.add("overridden" if after.seen.overridden else "as it is")
            seen.add("cut" if after.guard.capped else "whole")
            seen.add("gamma 1" if float(after.guard.gamma) == 1 else "gamma above 1")
    pairs = {"none", "own", "damped", "clients", "overridden", "as it is"}
    assert seen == pairs | {"cut", "whole", "gamma 1", "gamma above 1"}


def test_in_one_dimension_of_each_layer_a_metric_is_a_scale() -> None:
    """Gradients 8 and 1 have the squares 64 and 1, and 0.0001 * 64 is added to both.

    So K = c diag(64.0064^(-2/3), 1.0064^(-2/3)), and g^T K g = 65. The first step is 0.1 K g.
    """
    record = FedSSO(alpha=0.1, shapes="1x1 1")
    state = record.server_init(torch.zeros(1, 2, dtype=torch.float64))
    delta = -0.1 * torch.tensor([[8.0, 1.0]], dtype=torch.float64)
    state = record.server(state, delta, Cohort(1, 1, torch.arange(1), 1.0, 1.0))
    first, second = 64.0064 ** (-2 / 3), 1.0064 ** (-2 / 3)
    c = 65 / (64 * first + second)
    expected = [-0.1 * c * first * 8, -0.1 * c * second]
    assert state.x[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert float(state.guard.radius) == pytest.approx(0.1 * 65**0.5, rel=1e-12)
    assert bool(state.guard.capped)


# ---- runs ----


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_network_learns(participation: float, dtype: str) -> None:
    digits = load("digits", clients=5)
    options = {"rounds": 12, "device": "cpu", "dtype": dtype, "participation": participation}
    with_metric = simulate(digits, "mlp", FedSSO(), **options)
    trace = with_metric.trace
    assert with_metric.diverged is None
    assert trace["test_loss"].min() < 0.5 * trace["test_loss"][0]
    assert np.isfinite(trace["test_loss"]).all()
    without = simulate(digits, "mlp", FedSSO(shapes="none"), **options).trace
    assert abs(without["test_loss"][-1] - trace["test_loss"][-1]) > 1e-3
    for name in ("bytes_up", "bytes_down"):  # the clients do not know of it
        np.testing.assert_array_equal(trace[name], without[name])


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_run_resumed_goes_on_to_the_bit(fed: Federation, k: int, participation: float) -> None:
    options = {"dtype": "float32", "participation": participation}
    whole, half, rest = (network(FedSSO(), fed, **options) for _ in range(3))
    run(whole, 8)
    run(half, k)
    rest.restore({name: leaf.clone() for name, leaf in half.state().items()})
    run(rest, 8)
    a, b = whole.server, rest.server
    assert all(map(torch.equal, (a.x, a.g, a.s), (b.x, b.g, b.s)))
    assert all(map(torch.equal, a.moments, b.moments))
    assert not torch.equal(a.moments[0], half.server.moments[0])


def test_stacked_trials_have_each_their_own_metric(fed: Federation) -> None:
    """Five rounds; each has the same step in round 1, where eta does not count."""
    records = [FedSSO(alpha=alpha, eta=eta) for alpha, eta in ((0.02, 1.0), (0.1, 0.05), (0.1, 1))]
    options = {**NOISY, "participation": 0.6, "rounds": 5}
    ends = []
    for record, together in zip(records, compare(fed, "mlp", records, **options), strict=True):
        alone = simulate(fed, "mlp", record, **options)
        torch.testing.assert_close(together.x, alone.x, rtol=1e-8, atol=1e-10)
        ends.append(alone.x)
    assert min(float((a - b).norm()) for a, b in pairwise(ends)) > 1e-3
