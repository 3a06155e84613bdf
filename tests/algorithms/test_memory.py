"""FedSSO's memory against its formulas, written out client by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from quadratics import OPTIONS, START, fix_cohorts, trio
from torch import Tensor

from fedsso import FedSSO
from fedsso.algorithm import Cohort
from fedsso.algorithms import cautious, memory, trust_region
from fedsso.algorithms.memory import Heard, Kept, Memory
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation
from fedsso.support.linalg import gram
from fedsso.support.trees import tree_map

D = 5
TRIALS = 2
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
ALPHA = torch.tensor([[0.1], [0.03]], dtype=torch.float64)
TAU = 4.0
COHORTS = ((0, 1), (1,), (1, 2), (0, 2), (2,), (0, 1, 2), (0,), (1, 2), (0, 1), (2,))
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


class Server:
    """The rules of `memory.py` as the engine calls them, for all clients of a federation."""

    def __init__(self, clients: int, d: int, trials: int, p: Tensor) -> None:
        x = torch.zeros(trials, d, dtype=torch.float64)
        self.p = p
        self.memory = memory.start(x, used=True, steps=True)
        self.kept = [memory.blank(x)] * clients
        self.k = 0

    def round(
        self, x: Tensor, alpha: Any, delta: Tensor, who: Sequence[int]
    ) -> tuple[Tensor, Heard, Cohort]:
        """The corrected update of a round in which the clients `who` send delta [M, trials, d]."""
        self.k += 1
        mass = float(self.p[list(who)].sum())
        w = self.p[list(who)] / mass
        before: Kept = tree_map(lambda *each: torch.stack(each), *[self.kept[i] for i in who])
        heard, kept = memory.hear(self.memory, x, alpha, delta, before)
        for place, i in enumerate(who):
            self.kept[i] = Kept(*[leaf[place] for leaf in kept])
        mean: Heard = tree_map(lambda leaf: torch.tensordot(w.to(leaf.dtype), leaf, 1), heard)
        cohort = Cohort(self.k, len(who), torch.tensor(who), mass, TAU)
        corrected, self.memory = memory.correct(self.memory, mean, x, alpha, cohort)
        return corrected, mean, cohort


class Plain:
    """One trial by the formulas, with sums over single clients and nothing kept but these."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.o: dict[int, Tensor] = {}
        self.at: dict[int, Tensor] = {}
        self.A = self.C = self.beta = 0.0
        self.s = torch.zeros(D, dtype=torch.float64)
        self.y = torch.zeros(D, dtype=torch.float64)
        self.shares: list[float] = []

    def mean(self) -> Tensor:
        """o, the mean of what is known."""
        return mean_of(self.o)

    def model(self) -> Tensor:
        """x_o, the mean of the models that the known clients had."""
        return mean_of(self.at)

    def round(self, x: Tensor, delta: dict[int, Tensor]) -> Tensor:
        """The corrected update."""
        m = sum(float(P[i]) for i in delta)
        self.shares.append(m)
        w = {i: float(P[i]) / m for i in delta}
        u = {i: -each / self.alpha for i, each in delta.items()}
        o = self.mean()
        self.A, self.C = 0.8 * self.A, 0.8 * self.C
        away = torch.zeros(D, dtype=torch.float64)
        s, y = away.clone(), away.clone()
        for i in delta:
            if i in self.o:
                deviation = self.o[i] - o
                self.A += w[i] * float((u[i] - o) @ deviation)
                self.C += w[i] * float(deviation @ deviation)
                away = away + w[i] * deviation
                s = s + w[i] * (x - self.at[i])
                y = y + w[i] * (u[i] - self.o[i]) / TAU
        self.beta = min(1.0, max(0.0, self.A / self.C)) if self.C else 0.0
        self.s = (1 - m) * self.s + m * s
        self.y = (1 - m) * self.y + m * y
        g = torch.zeros(D, dtype=torch.float64)
        for i in delta:
            g = g + w[i] * u[i]
        if m < 1 - 1e-9:
            g = g - self.beta * away
        for i in delta:
            self.o[i], self.at[i] = u[i], x
        return -self.alpha * g


def mean_of(each: dict[int, Tensor]) -> Tensor:
    """The mean of what some clients have, with weights p_i; 0 of nobody."""
    total = torch.zeros(D, dtype=torch.float64)
    weight = 0.0
    for i, value in each.items():
        total = total + float(P[i]) * value
        weight += float(P[i])
    return total / weight if weight else total


def walk() -> list[tuple[Tensor, Tensor]]:
    """Models x [trials, d] and updates [clients, trials, d] of ten rounds."""
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    own = normal(3, TRIALS, D)  # what lasts of each client
    x = normal(TRIALS, D)
    found = []
    for _ in COHORTS:
        x = x + 0.3 * normal(TRIALS, D)
        u = x + own + 0.5 * normal(3, TRIALS, D)
        found.append((x, -ALPHA * u))
    return found


def test_the_rules_are_the_formulas() -> None:
    server = Server(3, D, TRIALS, P)
    plain = [Plain(float(alpha)) for alpha in ALPHA]
    for who, (x, delta) in zip(COHORTS, walk(), strict=True):
        corrected, _, _ = server.round(x, ALPHA, delta[list(who)], who)
        for t, one in enumerate(plain):
            expected = one.round(x[t], {i: delta[i, t] for i in who})
            torch.testing.assert_close(corrected[t], expected, **CLOSE)
            assert float(server.memory.beta[t]) == pytest.approx(one.beta, abs=1e-12)
            torch.testing.assert_close(memory.mean(server.memory)[t], one.mean(), **CLOSE)
            assert float(server.memory.mass[t]) == pytest.approx(
                sum(float(P[i]) for i in one.o), abs=1e-12
            )
            torch.testing.assert_close(server.memory.s[t], one.s, **CLOSE)
            torch.testing.assert_close(server.memory.y[t] / TAU, one.y, **CLOSE)
            x_o = server.memory.models[t] / server.memory.mass[t]
            torch.testing.assert_close(x_o, one.model(), **CLOSE)
            m_o = sum(one.shares) / len(one.shares)
            assert float(server.memory.share[t]) == pytest.approx(m_o, abs=1e-12)
    assert 0 < float(server.memory.beta[0]) < 1  # neither of its ends


def test_rounds_that_nobody_answers_do_not_make_clients_wait() -> None:
    """m_o is the mean over the rounds that were answered, whatever their numbers."""
    server = Server(3, D, TRIALS, P)
    shares = []
    for who, (x, delta) in zip(COHORTS, walk(), strict=True):
        server.k += 10
        server.round(x, ALPHA, delta[list(who)], who)
        shares.append(float(P[list(who)].sum()))
    m_o = torch.full_like(server.memory.share, sum(shares) / len(shares))
    torch.testing.assert_close(server.memory.share, m_o, rtol=1e-12, atol=0)


def test_what_is_not_used_takes_no_space() -> None:
    x = torch.ones(2, 1000)
    unused = [*memory.start(x, used=False), *cautious.start(x, used=False)]
    assert [leaf.untyped_storage().nbytes() for leaf in unused] == [0] * len(unused)


def test_nothing_is_corrected_before_a_client_answers_again() -> None:
    server = Server(3, D, TRIALS, P)
    for who, (x, delta) in zip(((0,), (1,), (2,)), walk(), strict=False):
        corrected, mean, _ = server.round(x, ALPHA, delta[list(who)], who)
        assert torch.equal(corrected, mean.delta)
        assert torch.equal(server.memory.beta, torch.zeros(TRIALS, 1, dtype=torch.float64))


def test_forgetting_is_never_having_heard() -> None:
    """After client 2 is forgotten, the sums are those of clients 0 and 1 alone."""
    server = Server(3, D, TRIALS, P)
    for who, (x, delta) in zip(COHORTS[:6], walk(), strict=False):
        server.round(x, ALPHA, delta[list(who)], who)
    lost: Kept = tree_map(lambda leaf: P[2] * leaf, server.kept[2])
    after = memory.forget(server.memory, lost)
    expected = P[0] * server.kept[0].u + P[1] * server.kept[1].u
    torch.testing.assert_close(after.total, expected, **CLOSE)
    torch.testing.assert_close(after.mass, torch.full((TRIALS, 1), 0.8, dtype=torch.float64))
    models = P[0] * server.kept[0].x + P[1] * server.kept[1].x
    torch.testing.assert_close(after.models, models, **CLOSE)
    assert torch.equal(after.s, server.memory.s)
    assert torch.equal(after.share, server.memory.share)
    without = server.memory._replace(models=server.memory.models[:, :0])
    assert memory.forget(without, lost).models.numel() == 0


# ---- beta ----


def learned(send: Callable[[int], Tensor], d: int, rounds: int = 12) -> float:
    """beta after some rounds of ten equal clients, of which five answer at a time; `send` gives
    all clients' u [clients, d] of a round."""
    clients = 10
    p = torch.full((clients,), 1 / clients, dtype=torch.float64)
    server = Server(clients, d, 1, p)
    x = torch.zeros(1, d, dtype=torch.float64)
    for k in range(rounds):
        who = range(5) if k % 2 == 0 else range(5, 10)
        if k < 2:
            who = range(5 * k, 5 * k + 5)
        server.round(x, 1.0, -send(k)[list(who), None], tuple(who))
    return float(server.memory.beta)


def draws(seed: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(10, d, generator=generator, dtype=torch.float64)


def test_deviations_that_last_are_taken_as_a_whole() -> None:
    own = draws(0, 20)
    assert learned(lambda _: own, 20) == pytest.approx(1, abs=1e-12)


def test_deviations_that_do_not_last_are_not_taken() -> None:
    """Cosines of independent vectors of 4000 numbers are some 1/63, and beta is a mean of many."""
    assert learned(lambda k: draws(k, 4000), 4000) < 0.1


def test_half_of_a_deviation_lasts() -> None:
    """u = e + noise of the same size: the slope of today's over yesterday's is a half."""
    own = draws(100, 4000)
    found = learned(lambda k: own + draws(k, 4000), 4000)
    assert found == pytest.approx(0.5, abs=0.1)


def test_deviations_that_turn_round_are_not_taken() -> None:
    """Clients answer every other round, so their sign changes with the pairs of rounds."""
    own = draws(0, 20)
    own = own - own.mean(0)
    sign = (1.0, 1.0, -1.0, -1.0)
    assert learned(lambda k: sign[k % 4] * own, 20) == 0


# ---- the pair ----


def cosine(s: Tensor, y: Tensor) -> float:
    return float(s @ y / (s.norm() * y.norm()))


def pair(s_clients: Tensor, y_clients: Tensor, known: float = 1.0) -> tuple[Memory, Heard]:
    """A memory with this pair, and what was heard in the round."""
    x = s_clients[None]
    start = memory.start(x, used=True)._replace(s=x, y=TAU * y_clients[None])
    zero = torch.zeros_like(x)
    number = zero[:, :1]
    heard = Heard(zero, zero, number + known, zero, zero, number, number)
    return start, heard


STEP = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)


def at_angle(cos: float, axis: int) -> Tensor:
    """A vector of length 2 whose cosine with STEP is `cos`."""
    out = torch.zeros(D, dtype=torch.float64)
    out[0], out[axis] = 2 * cos, 2 * (1 - cos**2) ** 0.5
    return out


@pytest.mark.parametrize(
    ("own", "clients", "known", "chosen"),
    [
        (0.4, 0.9, 1.0, "clients"),
        (0.95, 0.9, 1.0, "own"),
        (0.1, 0.45, 1.0, "own"),  # below 0.5
        (0.1, 0.51, 1.0, "clients"),
        (-0.3, 0.9, 0.5, "clients"),
        (0.95, 0.9, 0.5, "nothing"),  # a client answered for the first time
        (0.2, 0.3, 0.5, "nothing"),
    ],
)
def test_which_pair_enters(own: float, clients: float, known: float, chosen: str) -> None:
    s, y = 3 * STEP, at_angle(own, 1)
    s_clients, y_clients = 0.5 * STEP, at_angle(clients, 2)
    assert cosine(s_clients, y_clients) == pytest.approx(clients)
    kept, heard = pair(s_clients, y_clients, known)
    g = torch.arange(1.0, D + 1, dtype=torch.float64)
    some = Cohort(3, 2, torch.arange(2), 0.5, TAU)
    products = gram(s[None], y[None], g[None])
    found = memory.better(kept, heard, s[None], y[None], products, g[None], some)
    expected = {"own": (s, y), "clients": (s_clients, y_clients), "nothing": (s, 0 * y)}[chosen]
    for one, other in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(one[0], other, **CLOSE)
    torch.testing.assert_close(found[2], gram(found[0], found[1], g[None]), **CLOSE)
    everybody = some._replace(mass=1.0)
    same = memory.better(kept, heard, s[None], y[None], products, g[None], everybody)
    assert torch.equal(same[0][0], s)
    assert torch.equal(same[1][0], y)


def test_trials_choose_their_pairs_each_for_itself() -> None:
    s, y = torch.stack((STEP, STEP)), torch.stack((at_angle(0.1, 1), at_angle(0.99, 1)))
    kept, heard = pair(STEP, at_angle(0.8, 2))
    kept, heard = (tree_map(lambda leaf: leaf.repeat(2, 1), each) for each in (kept, heard))
    some = Cohort(3, 2, torch.arange(2), 0.5, TAU)
    found = memory.better(kept, heard, s, y, gram(s, y, y), y, some)
    torch.testing.assert_close(found[1][0], at_angle(0.8, 2), **CLOSE)
    torch.testing.assert_close(found[1][1], y[1], **CLOSE)


@pytest.mark.parametrize(
    ("of_own", "of_clients", "chosen"),
    [
        (1.0, 1.0, "own"),  # 0.95 and 0.90
        (3.0, 1.0, "clients"),  # 0.71 and 0.90
        (3.0, 3.0, "own"),  # 0.71 and 0.57
        (1.0, 0.2, "clients"),  # 0.95 and 0.995
        (20.0, 10.0, "own"),  # 0.15 and 0.20, which is below 0.5
    ],
)
def test_a_metric_measures_the_angles(of_own: float, of_clients: float, chosen: str) -> None:
    """Gradients are stretched along two axes, and steps shrunk.

    The server's y has a cosine of 0.95 to its step, and the rest along axis 2, the clients' one has
    0.9 and the rest along axis 1. With a stretch r of the rest, c becomes c / sqrt(c^2 + r^2 (1 -
    c^2)).
    """
    scales = torch.ones(D, dtype=torch.float64)
    scales[1], scales[2] = of_clients, of_own

    def inner(s: Tensor, y: Tensor, g: Tensor) -> Tensor:
        return gram(s / scales, scales * y, scales * g)

    s, y = 3 * STEP, at_angle(0.95, 2)
    kept, heard = pair(0.5 * STEP, at_angle(0.9, 1))
    g = torch.arange(1.0, D + 1, dtype=torch.float64)[None]
    some = Cohort(3, 2, torch.arange(2), 0.5, TAU)
    products = inner(s[None], y[None], g)
    found = memory.better(kept, heard, s[None], y[None], products, g, some, inner)
    expected = {"own": (s, y), "clients": (0.5 * STEP, at_angle(0.9, 1))}[chosen]
    for one, other in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(one[0], other, **CLOSE)
    torch.testing.assert_close(found[2], inner(found[0], found[1], g), **CLOSE)


# ---- the step of a single client ----


def remembering(mass: float, share: float) -> Memory:
    """A memory of clients with so many of all weights, who answered with `share` of them a time."""
    draw = torch.Generator().manual_seed(4)
    start = memory.start(torch.zeros(TRIALS, D, dtype=torch.float64), used=True, steps=True)
    total, models = torch.randn(2, TRIALS, D, generator=draw, dtype=torch.float64)
    full = torch.ones_like(start.mass)
    return start._replace(total=total, models=models, mass=mass * full, share=share * full)


X = torch.linspace(-1, 2, TRIALS * D, dtype=torch.float64).view(TRIALS, D)
G = X.flip(0) ** 2
ALONE = Cohort(7, 1, torch.arange(1), 0.3, TAU)


@pytest.mark.parametrize(
    ("mass", "share", "h"),
    [
        (1.0, 0.5, 0.5),
        (1.0, 0.2, 0.5),
        (1.0, 0.1, 0.125),  # (5 / 10)^2 / 2
        (1.0, 0.02, 0.005),  # (5 / 50)^2 / 2
        (0.4, 0.5, 0.2),
        (0.4, 0.1, 0.05),
    ],
)
def test_a_single_clients_step_is_a_mean_of_two(mass: float, share: float, h: float) -> None:
    """(1 - h) B^-1 g + h (B^-1 o / tau + (x - x_o)): B^-1 is linear, so one product will do."""
    kept = remembering(mass, share)
    aim, back = memory.blended(kept, G, X, ALONE)
    assert back is not None
    o, x_o = kept.total / mass, kept.models / mass
    torch.testing.assert_close(aim, (1 - h) * G + h * o / TAU, **CLOSE)
    torch.testing.assert_close(back, h * (X - x_o), **CLOSE)


def test_a_memory_of_nobody_gives_no_step() -> None:
    kept = memory.start(X, used=True, steps=True)
    aim, back = memory.blended(kept, G, X, ALONE)
    assert torch.equal(aim, G)
    assert isinstance(back, torch.Tensor)
    assert torch.equal(back, torch.zeros_like(X))


@pytest.mark.parametrize(
    ("size", "mass", "used"),
    [(1, 0.3, True), (2, 0.3, False), (3, 1.0, False), (1, 1.0, False), (1, 1 + 1e-7, False)],
)
def test_only_a_single_one_of_several_clients_is_helped(size: int, mass: float, used: bool) -> None:
    cohort = Cohort(7, size, torch.arange(size), mass, TAU)
    aim, back = memory.blended(remembering(1.0, 0.5), G, X, cohort)
    assert isinstance(back, torch.Tensor) is used
    assert (aim is not G) is used
    unused = remembering(1.0, 0.5)
    unused = unused._replace(models=unused.models[:, :0])
    aim, back = memory.blended(unused, G, X, cohort)
    assert aim is G
    assert back == 0


def test_on_a_quadratic_function_the_memory_knows_newtons_step() -> None:
    """f_i(x) = 1/2 (x - b_i)^T A (x - b_i): with B = A it leads from x to the mean of the b_i.

    Nothing is left of it but rounding: A has eigenvalues from 1/2 to 3. All three clients have
    answered at models of their own, with tau times their gradients there.
    """
    draw = torch.Generator().manual_seed(9)
    Q = torch.linalg.qr(torch.randn(D, D, generator=draw, dtype=torch.float64)).Q
    A = Q @ torch.diag(torch.linspace(0.5, 3, D, dtype=torch.float64)) @ Q.mT
    b = torch.randn(3, D, generator=draw, dtype=torch.float64)
    server = Server(3, D, TRIALS, P)
    for who, (x, _) in zip(((0,), (1,), (2,), (0,)), walk(), strict=False):
        u = TAU * (x - b[who[0]]) @ A
        g, _, cohort = server.round(x, ALPHA, -(ALPHA * u)[None], who)
    g = g / (-ALPHA * TAU)
    aim, back = memory.blended(server.memory, g, x, cohort)
    assert back is not None
    direction = torch.linalg.solve(A, aim.mT).mT + back
    own = torch.linalg.solve(A, g.mT).mT
    m_o = (0.5 + 0.3 + 0.2 + 0.5) / 4
    h = 0.5 * min(1.0, (5 * m_o) ** 2)
    torch.testing.assert_close(direction, (1 - h) * own + h * (x - P @ b), **CLOSE)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, True),
        ({"form": "lbfgs"}, True),
        ({"alpha": 0.1}, False),
        ({"guard": "cautious"}, False),
        ({"guard": "none"}, False),
        ({"memory": "none"}, False),
    ],
)
def test_only_the_guard_that_chooses_alpha_takes_such_steps(
    fields: dict[str, Any], steps: bool
) -> None:
    state = FedSSO(**{"memory": "clients", **fields}).server_init(torch.zeros(2, 6))
    assert state.memory.models.numel() == (12 if steps else 0)


def form_of(state: Any) -> Tensor:
    """B [d, d] of the first trial: I / gamma, and the pairs that it holds."""
    d = state.x.shape[-1]
    B = torch.eye(d, dtype=torch.float64) / state.guard.gamma[0]
    for s, y in state.curvature.store[0, : int(state.curvature.held)]:
        B = B + torch.outer(y, y) / (y @ s) - torch.outer(B @ s, B @ s) / (s @ B @ s)
    return B


def test_a_runs_steps_are_those_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """-t times the mean of both, from what is kept of every client and from the pairs.

    One client answers in most rounds, two in every fourth one. There is no metric in these rounds,
    and B has a condition below 100.
    """
    fix_cohorts(monkeypatch, [(0,), (1,), (2,), (0, 2)])
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mass = [0.5, 0.3, 0.2, 0.7]
    record = FedSSO(memory="clients", shapes="none")
    sim = Simulation(trio(), "linear", [record], **{**OPTIONS, "participation": 0.5})
    states = [sim.server]
    kept: list[list[Any]] = []

    def look(sim: Any) -> None:
        states.append(sim.server)
        kept.append(list(sim.now.memory))

    run(sim, 12, look)
    moved = 0.0
    for k, (before, after) in enumerate(pairwise(states), 1):
        B, g = form_of(after), after.g[0]
        direction = torch.linalg.solve(B, g)
        plain = direction
        if k % 4:
            known = torch.stack([each.known[0] for each in kept[k - 1]])[:, 0].double() * weights
            o = torch.stack([each.u[0] for each in kept[k - 1]]).mT @ known / known.sum()
            x_o = torch.stack([each.x[0] for each in kept[k - 1]]).mT @ known / known.sum()
            m_o = sum((mass * 3)[:k]) / k
            h = 0.5 * float(known.sum()) * min(1.0, (5 * m_o) ** 2)
            there = torch.linalg.solve(B, o / 2) + before.x[0] - x_o
            direction = (1 - h) * direction + h * there
            moved = max(moved, float((direction - plain).norm() / plain.norm()))
        assert torch.linalg.cond(B) < 100
        expected = -after.guard.share[0] * direction
        torch.testing.assert_close((after.x - before.x)[0], expected, rtol=1e-9, atol=1e-12)
    assert moved > 0.1


# ---- the guard's part ----


@pytest.mark.parametrize(
    ("size", "mass", "growth"),
    [(1, 0.1, 2), (2, 0.2, 3), (8, 0.5, 9), (9, 0.5, 10), (50, 0.9, 10), (3, 1.0, 10)],
)
def test_few_clients_let_the_radius_grow_less(size: int, mass: float, growth: float) -> None:
    assert trust_region.early_growth(size, mass) == growth


@pytest.mark.parametrize(
    ("mass", "first"), [(0.1, 40), (0.25, 16), (0.5, 8), (1 - 1e-12, 4), (1.0, 4), (1 + 1e-7, 4)]
)
def test_few_clients_have_more_first_rounds(mass: float, first: float) -> None:
    """Also where the weights of all clients sum to slightly more or less than 1."""
    assert trust_region.first_rounds(mass) == pytest.approx(first, rel=1e-12)
    rounds = torch.tensor([[first - 1], [first], [first + 1]], dtype=torch.float64)
    least = trust_region.careful(rounds, 10, trust_region.first_rounds(mass)).least
    assert least[:, 0].tolist() == pytest.approx([0.1, 0.1, 0.5])


@pytest.mark.parametrize(("drift", "grows"), [("steady", 3.0), ("fading", 2.0), ("gentle", 2.0)])
def test_only_models_of_one_layer_have_more_first_rounds(drift: str, grows: float) -> None:
    """Two of eight clients answer, the slope stays as it is: the radius grows by 1 + 2, after
    round 4 by 2."""
    record = FedSSO(alpha=1e-6, drift=drift, memory="none")
    state = record.server_init(torch.zeros(1, 2, dtype=torch.float64))
    delta = torch.tensor([[1e-6, 0.0]], dtype=torch.float64)
    for k in range(1, 8):
        before = state
        state = record.server(state, delta, Cohort(k, 2, torch.arange(2), 0.25, 1.0))
    assert float(state.guard.radius / before.guard.radius) == pytest.approx(grows)


@pytest.mark.parametrize(
    ("theta", "other", "agreed"),
    [(0.5, 0.2, 0.2), (0.2, 0.5, 0.2), (-0.5, -0.2, -0.2), (-0.2, -0.5, -0.2), (0.3, -0.1, 0.0)],
)
def test_two_slopes_agree_on_the_one_nearer_to_zero(
    theta: float, other: float, agreed: float
) -> None:
    one, two = (torch.tensor([[v]], dtype=torch.float64) for v in (theta, other))
    assert float(trust_region._agreed(one, two)) == agreed
    assert float(trust_region._agreed(two, one)) == agreed


# ---- what it is for ----


def distances(seed: int, rounds: int, **fields: Any) -> list[float]:
    """To the minimiser of f, round by round; one of three clients answers, with one full local
    step, so that updates are exact gradients."""
    options = {**OPTIONS, "local_steps": 1, "rounds": rounds, "eval_every": rounds}
    options |= {"participation": 1 / 3, "seed": seed}
    sim = Simulation(trio(), "linear", [FedSSO(**fields)], **options)
    star = torch.tensor([0.2 / 13, 4.8 / 13], dtype=torch.float64) - torch.tensor(START)
    found: list[float] = []
    run(sim, rounds, lambda sim: found.append(float((sim.server.x[0] - star).norm())))
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("alpha", ["auto", 0.1])
def test_with_one_of_three_clients_it_reaches_the_minimiser(seed: int, alpha: Any) -> None:
    """Near the minimiser gradients repeat, so that beta tends to 1 and the corrected gradient to
    that of f: steps shrink with it.

    Without a memory a gradient there is that of one client, of length 1.4 to 2.6, and pairs compare
    different clients: steps shrink by chance alone.
    """
    with_memory = distances(seed, 500, alpha=alpha, memory="clients")
    assert max(with_memory[-10:]) < 1e-6
    assert max(distances(seed, 100, alpha=alpha, memory="none")[-10:]) > 1e-3
