"""FedNL with line search by hand.

Two clients, two parameters, f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i):

    A_1 = diag(1, 2), b_1 = (1, 0), p_1 = 1/4        A_2 = diag(3, 1), b_2 = (0, 2), p_2 = 3/4

so f has the Hessian A = diag(2.5, 1.25) and the gradient g = A x - (0.25, 1.5). On a quadratic a
step t along p lowers f by at least -t g^T p / 2 if and only if t p^T A p <= -g^T p. mu = 1, rank:1,
x_1 = (0, 0), H = 0:

Round 1   p = -[0]_1^-1 g = (0.25, 1.5), -g^T p = 2.3125, p^T A p = 2.96875: t <= 0.779,
          so t = 1/2, x = (0.125, 0.75)
Round 2   H = diag(2.25, 0.5), g = (0.0625, -0.5625), p = -diag(2.25, 1)^-1 g = (-1/36, 0.5625),
          -g^T p = 0.31814, p^T A p = 0.39744: t <= 0.80, so t = 1/2,
          x = (0.125 - 1/72, 1.03125) = (1/9, 1.03125)
Round 3   H is exact: t p^T A p <= -g^T p holds for t = 1 with equality,
          and x = (0.1, 1.2) minimises f.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsso import Federation, InputError, Run, load, simulate
from fedsso.algorithms.second_order.fednl import FedNL, FedNLLS
from fedsso.data import quadratic

OPTIONS: dict[str, Any] = {"batch_size": None, "dtype": "float64", "device": "cpu"}


def hand(rounds: int, **fields: Any) -> Run:
    fed = quadratic([[[1, 0], [0, 2]], [[3, 0], [0, 1]]], [[1, 0], [0, 2]], [0.25, 0.75])
    record = FedNLLS(**{"first": "zero", **fields})
    result: Run = simulate(fed, "linear", record, rounds=rounds, **OPTIONS)
    return result


def test_three_rounds() -> None:
    assert hand(1, mu=1).x.tolist() == pytest.approx([0.125, 0.75], abs=1e-14)
    assert hand(2, mu=1).x.tolist() == pytest.approx([1 / 9, 1.03125], abs=1e-14)
    assert hand(3, mu=1).x.tolist() == pytest.approx([0.1, 1.2], abs=1e-14)


def test_short_steps_are_found() -> None:
    """p = (0.25, 1.5)/mu, so t <= 0.779 mu lowers f enough and t < 1.558 mu lowers it. For mu =
    1/100 that is 2^-8; for 1/500 none of the ten is enough, but 2^-9 = 0.977/500 still lowers f;
    for 1/1000 none does, and x stays."""
    assert hand(1, mu=1 / 100).x.tolist() == pytest.approx([25 / 256, 150 / 256], abs=1e-13)
    assert hand(1, mu=1 / 500).x.tolist() == pytest.approx([125 / 512, 750 / 512], abs=1e-12)
    assert hand(1, mu=1 / 1000).x.tolist() == [0, 0]


def test_trace() -> None:
    """Down x and p; up g (2), value and vector (3), f_i (1) and ten losses."""
    trace = hand(1, mu=1).trace
    assert trace["train_loss"][1] == pytest.approx(1 / 8 + 3 / 2, rel=1e-14)
    assert trace["grad_norm"][1] == pytest.approx((0.25**2 + 1.5**2) ** 0.5, rel=1e-14)
    assert trace["bytes_down"][1] == 2 * (2 + 2) * 8
    assert trace["bytes_up"][1] == 2 * (2 + 3 + 1 + 10) * 8


@pytest.mark.parametrize("compressor", ["none", "rank:6", "topk:21"])
def test_without_loss_the_second_step_is_newtons(quad: Federation, compressor: str) -> None:
    result = simulate(quad, "linear", FedNLLS(mu=0.1, compressor=compressor), rounds=2, **OPTIONS)
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


def test_with_first_hessians_the_first_step_is_newtons(quad: Federation) -> None:
    result = simulate(quad, "linear", FedNLLS(mu=0.1, first="hessian"), rounds=1, **OPTIONS)
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


def test_where_the_whole_step_suits_it_is_fednl(quad: Federation) -> None:
    """[H]_mu >= A for mu = 1, the largest curvature of any client, so t = 1 always."""
    searched = simulate(quad, "linear", FedNLLS(mu=1, compressor="rank:2"), rounds=5, **OPTIONS)
    plain = simulate(
        quad, "linear", FedNL(option=1, mu=1, compressor="rank:2"), rounds=5, **OPTIONS
    )
    assert (plain.x - quad.optimum).norm() > 1e-3
    torch.testing.assert_close(searched.x, plain.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compressor", ["rank:1", "topk:5", "powersgd:2", "randk:14"])
def test_the_limit_is_the_minimiser(quad: Federation, compressor: str) -> None:
    result = simulate(quad, "linear", FedNLLS(mu=0.05, compressor=compressor), rounds=25, **OPTIONS)
    torch.testing.assert_close(result.x, quad.optimum, rtol=0, atol=1e-10)


def test_every_round_lowers_the_loss_from_afar() -> None:
    """On a curved problem, with the Hessians unknown at first and a first step a hundred times too
    long."""
    fed = load("synthetic", kind="logistic", clients=4, dim=5)
    result = simulate(fed, "linear", FedNLLS(mu=0.01), loss="bce", rounds=15, **OPTIONS)
    losses = result.trace["train_loss"][1:]
    assert (losses[1:] <= losses[:-1] * (1 + 1e-14)).all()
    torch.testing.assert_close(result.x, fed.optimum, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "fields", [{"mu": 0}, {"a": -1}, {"compressor": "rank"}, {"first": "none"}]
)
def test_wrong_fields(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(fields))}"):
        FedNLLS(**fields)


def test_refusals(quad: Federation) -> None:
    with pytest.raises(InputError, match="fednl-pp"):
        simulate(quad, "linear", FedNLLS(), rounds=1, participation=0.5, **OPTIONS)
    with pytest.raises(InputError, match="use fedsso"):
        FedNLLS().server_init(torch.empty(1, 20_001, device="meta"))
