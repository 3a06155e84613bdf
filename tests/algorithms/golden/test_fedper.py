"""FedPer by hand.

Two clients, x = (u, v), f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i); u is shared, v stays with the
client (own = 1):

    A_1 = [[2, 1], [1, 2]],     b_1 = (1, 0), p_1 = 1/4
    A_2 = [[1, 1/2], [1/2, 1]], b_2 = (0, 2), p_2 = 3/4

alpha = 0.1, tau = 1, both start from (0, 0).

Round 1   client 1: gradient -A_1 b_1 = (-2, -1), step (0.2, 0.1)
          client 2: gradient -A_2 b_2 = (-1, -2), step (0.1, 0.2)
          u = 0.2/4 + 3 * 0.1/4 = 0.125, v_1 = 0.1, v_2 = 0.2
Round 2   client 1: x - b_1 = (-0.875, 0.1), gradient (-1.65, -0.675),
                    v_1 = 0.1 + 0.0675 = 0.1675
          client 2: x - b_2 = (0.125, -1.8), gradient (-0.775, -1.7375),
                    v_2 = 0.2 + 0.17375 = 0.37375
          u = 0.125 + 0.165/4 + 3 * 0.0775/4 = 0.224375
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso import Federation, InputError, Run, simulate
from fedsso.algorithms import FedAvg, FedPer
from fedsso.data import quadratic
from fedsso.engine.simulate import run
from fedsso.experiment.stepper import Simulation

EXACT: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}
A = [[[2, 1], [1, 2]], [[1, 0.5], [0.5, 1]]]
B = [[1, 0], [0, 2]]
P = [0.25, 0.75]


def fly(fed: Federation, algorithm: Any, rounds: int, model: str = "linear", **options: Any) -> Run:
    result: Run = simulate(fed, model, algorithm, rounds=rounds, **{**EXACT, **options})
    return result


def personal(result: Run) -> Tensor:
    assert result.personal is not None
    return result.personal


def test_two_rounds() -> None:
    fed = quadratic(A, B, P)
    one = fly(fed, FedPer(alpha=0.1, own=1), 1, local_steps=1)
    two = fly(fed, FedPer(alpha=0.1, own=1), 2, local_steps=1)
    assert personal(one).flatten().tolist() == pytest.approx([0.125, 0.1, 0.125, 0.2], abs=1e-14)
    assert personal(two).flatten().tolist() == pytest.approx(
        [0.224375, 0.1675, 0.224375, 0.37375], abs=1e-14
    )
    assert two.x.tolist() == pytest.approx([0.224375, 0.1675 / 4 + 3 * 0.37375 / 4], abs=1e-14)


def test_trace() -> None:
    trace = fly(quadratic(A, B, P), FedPer(alpha=0.1, own=1), 1, local_steps=1).trace
    assert trace["bytes_up"][1] == trace["bytes_down"][1] == 2 * 1 * 8
    assert trace["grad_norm"][1] == pytest.approx(1.25, rel=1e-14)
    assert trace["train_loss"][1] == pytest.approx(0.25 * 1 + 0.75 * 2, rel=1e-14)


def test_one_local_step_leads_to_the_joint_minimiser() -> None:
    """f(u, v_1, v_2) = sum p_i f_i(u, v_i) is one quadratic in (u, v_1, v_2)."""
    H, c = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for i, (A_i, b_i, p_i) in enumerate(zip(A, B, P, strict=True)):
        at = torch.tensor([0, 1 + i])
        A_p = p_i * torch.tensor(A_i, dtype=torch.float64)
        H[at[:, None], at] += A_p
        c[at] += A_p @ torch.tensor(b_i, dtype=torch.float64)
    u, v_1, v_2 = torch.linalg.solve(H, c).tolist()
    limit = personal(
        fly(quadratic(A, B, P), FedPer(alpha=0.6, own=1), 60, local_steps=1, eval_every=60)
    )
    assert limit.flatten().tolist() == pytest.approx([u, v_1, u, v_2], abs=1e-10)


def test_clients_that_are_alike_do_fedavg(quad: Federation) -> None:
    a, y = quad.x[quad.rows_of(0)].double(), quad.y[quad.rows_of(0)].double()
    alike = quadratic(
        (2 * a.mT @ a / 6).expand(3, 6, 6), torch.linalg.solve(a, y).expand(3, 6), [0.5, 0.3, 0.2]
    )
    x = fly(alike, FedPer(alpha=0.3, own=4), 5, local_steps=3).x
    torch.testing.assert_close(
        x, fly(alike, FedAvg(alpha=0.3), 5, local_steps=3).x, rtol=1e-13, atol=1e-14
    )


def test_the_base_moves_as_in_fedavg_in_round_one(fed: Federation) -> None:
    """An mlp 4 - 32 - 3: the last layer has 32 * 3 + 3 = 99 numbers of 259; one client's head is
    its own model's."""
    options: dict[str, Any] = {"model": "mlp", "local_steps": 3, "batch_size": 4}
    mine, theirs = (
        fly(fed, algorithm, 1, **options) for algorithm in (FedPer(alpha=0.1), FedAvg(alpha=0.1))
    )
    torch.testing.assert_close(mine.x[:160], theirs.x[:160], rtol=1e-13, atol=1e-15)
    assert mine.trace["bytes_up"][1] == 5 * 160 * 8
    assert theirs.trace["bytes_up"][1] == 5 * 259 * 8
    heads = personal(mine)[:, 160:]
    torch.testing.assert_close(fed.p @ heads, theirs.x[160:], rtol=1e-13, atol=1e-15)
    assert len({tuple(head.tolist()) for head in heads}) == 5
    assert (personal(mine)[:, :160] == personal(mine)[0, :160]).all()


def test_who_does_not_take_part_keeps_its_head(fed: Federation) -> None:
    full = {**EXACT, "participation": 0.4, "local_steps": 2}
    sim = Simulation(fed, "mlp", [FedPer(alpha=0.1)], **full)
    start = [head.clone() for head in sim.own]
    run(sim, 1)
    moved = [not torch.equal(a, b) for a, b in zip(start, sim.own, strict=True)]
    assert moved == (sim.position > 0).tolist()
    assert sum(moved) == 2


def test_evaluation_gives_every_client_its_own_model() -> None:
    """The test loss is that of each client's own model on its own rows, here as many for each."""
    fed = quadratic(A, B, P)
    result = fly(fed, FedPer(alpha=0.5, own=1), 20, local_steps=1)
    losses = []
    for i, x in enumerate(personal(result)):
        d = x - torch.tensor(B[i]).double()
        losses.append(float(d @ torch.tensor(A[i]).double() @ d / 2))
    assert result.trace["test_loss"][20] == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "layers", "own"),
    [([640, 330], 1, 330), ([8, 640, 330], 2, 970), ([5, 4, 3, 2], 3, 9)],
)
def test_the_last_layers_are_found(sizes: list[int], layers: int, own: int) -> None:
    assert FedPer(layers=layers).fit(sizes).own == own
    assert FedPer(layers=layers, own=2).fit(sizes).own == 2


@pytest.mark.parametrize(
    ("values", "sizes", "message"),
    [
        (
            {},
            [650],
            r"layers=1 leaves nothing to share.* 1 layers with 650 numbers; keep fewer, or use",
        ),
        (
            {"layers": 3},
            [640, 330],
            r"layers=3 leaves nothing to share.* 2 layers with 970 numbers; keep fewer, or use",
        ),
        (
            {"own": 970},
            [640, 330],
            r"own=970 leaves nothing to share.* 2 layers with 970 numbers; keep fewer, or use",
        ),
    ],
)
def test_a_model_with_nothing_to_share_is_refused(
    values: dict[str, Any], sizes: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        FedPer(**values).fit(sizes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers must be an integer >= 1, got layers=0"),
        ({"own": -1}, "own must be an integer >= 0, got own=-1"),
        ({"alpha": 0}, "alpha must be > 0 and finite, got alpha=0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FedPer(**values)
