"""The convex bench in small: the same objective for all, courses, tables and the figure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
pytest.importorskip("sklearn")
sparse = pytest.importorskip("scipy.sparse")

from benchmarks import convex, convex_report  # noqa: E402

import fedsso  # noqa: E402
from fedsso.engine.gather import gathering  # noqa: E402
from fedsso.objective import Sparse  # noqa: E402
from fedsso.objective.losses import bce  # noqa: E402

EPS = np.finfo(float).eps
ROWS, WIDTH, CLIENTS = 60, 4, 3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The bench takes one thread; other tests get back what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> fedsso.Federation:
    """A small table, shared out evenly, so that every row counts the same."""
    monkeypatch.setattr(convex, "CLIENTS", CLIENTS)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((ROWS, WIDTH)) * (draw.random((ROWS, WIDTH)) < 0.5)
    y = (x @ np.arange(WIDTH) + draw.standard_normal(ROWS) > 0).astype(int)
    owner = np.arange(ROWS) % CLIENTS
    return fedsso.Federation.from_arrays(sparse.csr_matrix(x), y, owner, test_fraction=0)


def test_the_pooled_objective_is_that_of_the_clients(fed: fedsso.Federation) -> None:
    """Sums of ROWS terms below 10 in size."""
    pooled = convex.Pooled(fed)
    w = np.linspace(-1, 1, WIDTH + 1)
    module = fedsso.build_model("mclr", fed, loss="bce").double()
    f = Sparse(module, bce)
    f.l2 = convex.L2
    index = fed.train_rows.view(CLIENTS, -1)
    weight = torch.full(index.shape, CLIENTS / ROWS, dtype=torch.float64)
    batch = gathering(fed, torch.float64).batch(index, weight)
    point = torch.from_numpy(w).expand(CLIENTS, 1, -1)
    value, slope = f.value_and_grad(point.contiguous(), batch)
    expected, gradient = pooled(w)
    bound = {"rtol": 0.0, "atol": 10 * ROWS * EPS}
    np.testing.assert_allclose(value.mean(), expected, **bound)
    np.testing.assert_allclose(slope.mean(0)[0], gradient, **bound)


def test_everybody_comes_to_the_same_minimum(fed: fedsso.Federation, tmp_path: Path) -> None:
    pooled = convex.Pooled(fed)
    ours = convex.federated(fed, pooled, fedsso.FedSSO(), "fedsso")
    assert ours.norm[-1] <= convex.GOALS[-1]
    assert ours.up[1] == 8 * (WIDTH + 1)  # what a client sends in a round: d numbers in float64
    assert ours.reached(convex.GOALS[-1]) == len(ours.norm) - 1
    assert ours.reached(0.0) is None
    others = [convex.with_scipy(pooled), convex.with_sklearn(pooled, "newton-cholesky")]
    for course in others:
        assert min(course.norm) < 1e-6
    stuck = convex.Course("giant", "mu=3")
    stuck.add(1.0, 0.1, 40.0)
    assert min((stuck, ours), key=convex.Course.rank) is ours
    told = [course.told() for course in (ours, *others, stuck)]
    found = {"a9a": {"products_ms": 0.1, "courses": told}}
    lines = convex_report.table(found, "a9a").splitlines()
    assert "fedsso" in lines[2]
    assert "– (1e+00)" in lines[3]
    assert "u-FedNL" in lines[-2]
    convex_report.draw(tmp_path / "convex.png", found)
    assert (tmp_path / "convex.png").read_bytes().startswith(b"\x89PNG")


def test_every_rival_has_settings_that_its_record_takes() -> None:
    known = [name for name in convex.RIVALS if name.split()[0] in convex.ALGORITHMS]
    assert "fedsso" in known
    for name in known:
        for given in convex.RIVALS[name]:
            convex.make(name.split()[0], given)
