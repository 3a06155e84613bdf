"""Pairs of very large models in bfloat16: the matrix is exact for the pairs as they are kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedsso
from fedsso import FedSSO, Simulation, load, simulate
from fedsso.maths import quasi_newton as qn
from fedsso.support.linalg import gram

D = 40
ROUNDS = 7
LAM = 1e-4
LAM_BAR = 9999.0


def steps(half: bool, keep: int) -> tuple[qn.Pairs, list[Tensor]]:
    """Directions of some rounds with pairs of a quadratic, rounded as bfloat16 keeps them."""
    draw = torch.Generator().manual_seed(0)
    curvature = 0.5 + torch.rand(D, generator=draw)
    form = qn.form("bfgs", keep, keep, half=half)
    rounding = qn.form("bfgs", keep, keep, half=True)
    state = form.init(torch.zeros(2, D))
    directions = []
    for k in range(1, ROUNDS + 1):
        s = qn.rounded(rounding, torch.randn(2, D, generator=draw))
        y = qn.rounded(rounding, curvature * s)
        g = torch.randn(2, D, generator=draw)
        verdict = qn.judge(gram(s, y), LAM, LAM_BAR)
        assert verdict.accept.all()
        state, direction = form.step(state, s, y, g, verdict, k, reset=False)
        directions.append(direction)
    return state, directions


@pytest.mark.parametrize("keep", [3, 20])
def test_a_half_store_gives_the_directions_of_the_same_pairs(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are in float64 in both; the last sum, over 2 keep vectors, is in float32.

    It rounds at most 2 ROUNDS + 1 times numbers of the size of the weights, which are below 10.
    """
    monkeypatch.setattr(qn, "CPU_BLOCK", qn.Block(16, 64))  # several strips
    wide, exact = steps(False, keep)
    half, found = steps(True, keep)
    assert wide.store.dtype == torch.float32
    assert half.store.dtype == half.oldest.dtype == torch.bfloat16
    assert torch.equal(half.store.float(), wide.store)
    assert torch.equal(half.gram, wide.gram)
    for direction, wanted in zip(found, exact, strict=True):
        assert direction.dtype == torch.float32
        torch.testing.assert_close(direction, wanted, rtol=1e-4, atol=1e-4)


def test_a_vector_is_rounded_only_where_pairs_are_kept_so() -> None:
    v = torch.tensor([1.0, 1.0 + 2**-10])
    assert qn.rounded(qn.form("bfgs", 3, 3), v) is v
    assert qn.rounded(qn.form("bfgs", 3, 3, half=True), v).tolist() == [1.0, 1.0]
    assert qn.rounded(qn.form("dfp", 3, 3, half=True), v) is v


@pytest.mark.parametrize(
    ("name", "pairs", "d", "dtype", "half"),
    [
        ("bfgs", 200, 7850, torch.float32, False),
        ("bfgs", 200, 11_173_962, torch.float32, False),  # 22 slots of 89 MB, one of them spare
        ("bfgs", 200, 12_500_000, torch.float32, True),  # 20 slots
        ("bfgs", 5, 12_500_000, torch.float32, False),  # all that are wanted fit
        ("lbfgs", 10, 125_000_000, torch.float32, True),
        ("bfgs", 200, 125_000_000, torch.float64, False),
        ("dfp", 200, 125_000_000, torch.float32, False),
    ],
)
def test_the_size_of_the_model_decides(
    name: str, pairs: int, d: int, dtype: torch.dtype, half: bool
) -> None:
    assert qn.needs_half(name, pairs, d, dtype) is half


def test_fedsso_learns_from_a_half_store_and_resumes_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if 2 GB were room for 10 pairs of the small model: they are then 19 in bfloat16."""
    fed = load("digits", clients=4)
    d = 650
    monkeypatch.setattr(qn, "STORE_BYTES", 10 * 2 * d * 4)
    options: dict[str, Any] = {"rounds": 25, "eval_train": True}
    with caplog.at_level(logging.WARNING, "fedsso"):
        simulation = Simulation(fed, "mclr", FedSSO(), **options)
    assert "19 are held in half precision" in caplog.text
    assert simulation.server.curvature.store.shape == (1, 19, 2, d)
    assert simulation.server.curvature.store.dtype == torch.bfloat16
    whole = simulate(fed, "mclr", FedSSO(), **options)
    plain = simulate(fed, "mclr", "fedavg", **options)
    # FedSSO's rounds still go further than FedAvg's at its default step.
    assert whole.trace["full_train_loss"][-1] < 0.9 * plain.trace["full_train_loss"][-1]

    def stop(label: str, k: int, rounds: int, numbers: object) -> None:  # noqa: ARG001
        if k == 12:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        simulate(fed, "mclr", FedSSO(), out=folder, checkpoint_every=5, progress=stop, **options)
    fedsso.resume(folder)
    assert torch.equal(fedsso.load_run(folder).x, whole.x)
