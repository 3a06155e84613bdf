"""Sparse rows: the same numbers as dense ones, at work and memory that go with the entries."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedsso
from fedsso import Federation, InputError
from fedsso.algorithm import Batch
from fedsso.data.svmlight import svmlight
from fedsso.engine.gather import Kept, SparseGather, gathering
from fedsso.objective import Dense, Sparse, objective
from fedsso.objective.losses import bce, cross_entropy, mse, slope
from fedsso.support.sparse import blocks, by_client, canonical, entries, select, stacked, transposed

EPS = torch.finfo(torch.float64).eps
LOSSES = {"cross_entropy": (cross_entropy, 3), "bce": (bce, 1), "mse": (mse, 1)}
M, T, B, I = 3, 2, 4, 5


def rows(seed: int = 0, height: int = M * B) -> Tensor:
    """A table with about two thirds zeros, one row of them and one column of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(height, I, dtype=torch.float64, generator=generator)
    x[torch.rand(x.shape, generator=generator) < 2 / 3] = 0
    x[1] = 0
    x[:, 3] = 0
    return x


def table(clients: int = 4, each: int = 9, kind: str = "csr") -> Federation:
    """Rows of several clients with three classes: dense, or sparse in a form of scipy or torch."""
    sparse = pytest.importorskip("scipy.sparse")
    x = rows(1, clients * each)
    y = torch.randint(3, (len(x),), generator=torch.Generator().manual_seed(2))
    made: dict[str, Any] = {
        "dense": x,
        "csr": sparse.csr_matrix(x.numpy()),
        "coo": sparse.coo_array(x.numpy()),
        "csc": sparse.csc_matrix(x.numpy()),
        "torch": x.to_sparse_coo(),
        "torch-csr": x.to_sparse_csr() if kind == "torch-csr" else None,
    }
    return Federation.from_arrays(made[kind], y, np.arange(len(x)) % clients, seed=0)


# ---- matrices


def test_rows_are_selected_stacked_and_turned() -> None:
    x = rows()
    made = canonical(*x.nonzero().T, x[x != 0], (len(x), I))
    index = torch.tensor([7, 1, 7, 0])
    assert torch.equal(made.to_dense(), x)
    assert torch.equal(select(made, index).to_dense(), x[index])
    assert torch.equal(stacked([made, made]).to_dense(), torch.cat((x, x)))
    assert torch.equal(transposed(made).to_dense(), x.T)
    assert transposed(made).layout == torch.sparse_csr
    assert {part.dtype for part in entries(made)[:2]} == {torch.int32}


def test_entries_are_sorted_and_added_and_zeros_dropped() -> None:
    row = torch.tensor([1, 0, 1, 1])
    column = torch.tensor([2, 1, 0, 2])
    made = canonical(row, column, torch.tensor([1.0, 0.0, 5.0, 2.0]), (2, 3))
    assert made.to_dense().tolist() == [[0, 0, 0], [5, 0, 3]]
    assert len(made.values()) == 2


def test_clients_are_blocks_of_a_diagonal_and_padding_is_empty() -> None:
    x = rows()
    made = canonical(*x.nonzero().T, x[x != 0], (len(x), I))
    index = torch.arange(M * B).view(M, B)
    present = torch.ones(M, B, dtype=torch.bool)
    present[2, 1:] = False
    block = blocks(made, index, present, torch.float64)
    expected = torch.block_diag(*(x.view(M, B, I) * present[..., None]))
    assert torch.equal(block.to_dense(), expected)
    whole = blocks(made, index, None, torch.float32)
    assert torch.equal(by_client(whole, M), x.view(M, B, I).float())


# ---- the objective


def both(loss: str, bias: bool) -> tuple[Dense, Sparse, Batch, Batch, Tensor]:
    """The dense and the sparse back end, a batch for each, and points."""
    function, outputs = LOSSES[loss]
    module = nn.Sequential(nn.Flatten(), nn.Linear(I, outputs, bias=bias)).double()
    x = rows()
    generator = torch.Generator().manual_seed(3)
    y = torch.randint(max(2, outputs), (M, B), generator=generator)
    weight = torch.rand(M, B, dtype=torch.float64, generator=generator)
    weight[1, 2:] = 0
    weight /= weight.sum(-1, keepdim=True)
    made = canonical(*x.nonzero().T, x[x != 0], (len(x), I))
    block = blocks(made, torch.arange(M * B).view(M, B), weight > 0, torch.float64)
    dense = Dense(module, function)
    sparse = Sparse(module, function)
    d = sum(dense.layout.sizes)
    points = torch.randn(M, T, d, dtype=torch.float64, generator=generator)
    dense.l2 = sparse.l2 = 0.1
    one = Batch(x.view(M, B, I), y, weight)
    other = Batch(block, y, weight, transposed=transposed(block))
    return dense, sparse, one, other, points


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("trials", [1, T])
def test_loss_gradient_and_curvature_are_those_of_dense_rows(
    loss: str, bias: bool, trials: int
) -> None:
    """Sums have at most B + I + classes < 20 terms, each a few roundings of numbers below 100."""
    dense, sparse, one, other, points = both(loss, bias)
    x = points[:, :trials].contiguous()
    v = points.flip(1)[:, :trials].contiguous()
    bound = {"rtol": 0.0, "atol": 20 * 100 * EPS}
    for a, b in zip(dense.value_and_grad(x, one), sparse.value_and_grad(x, other), strict=True):
        torch.testing.assert_close(b, a, **bound)
    out = torch.full_like(x, torch.nan)
    assert sparse.value_and_grad(x, other, out=out)[1] is out
    assert out.isfinite().all()
    torch.testing.assert_close(sparse.value(x, other), dense.value(x, one), **bound)
    torch.testing.assert_close(sparse.hvp(x, v, other), dense.hvp(x, v, one), **bound)
    H = sparse.hessian(x, other)
    torch.testing.assert_close(H, dense.hessian(x, one), **bound)
    assert torch.equal(H, H.mT)
    full = blocks(stacked([other.x]), torch.arange(M * B)[None], None, torch.float64)
    assert full.shape == other.x.shape
    u = torch.rand(M, B, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sparse.bartlett(x, other, u), dense.bartlett(x, one, u), **bound)


def test_the_slope_of_the_logistic_loss_has_the_bits_of_autograd() -> None:
    z = torch.linspace(-40, 40, 201, dtype=torch.float64)[None, None].requires_grad_()
    y = torch.linspace(0, 1, 201, dtype=torch.float64)[None]
    total = bce(z, y)
    (expected,) = torch.autograd.grad(total.sum(), z)
    found, rise = slope(bce, z.detach(), y)
    assert torch.equal(found, total.detach())
    assert torch.equal(rise, expected)


def test_what_needs_dense_rows_says_so() -> None:
    cpu = torch.device("cpu")
    network = nn.Sequential(nn.Linear(I, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(
        InputError, match=r"one linear layer.*'mclr'.*got Sequential.*layout='dense'"
    ):
        objective(network, cross_entropy, "auto", cpu, (I,), sparse=True)
    with pytest.raises(InputError, match=r"engine='loop' needs dense rows"):
        objective(nn.Linear(I, 3), cross_entropy, "loop", cpu, (I,), sparse=True)
    with pytest.raises(InputError, match=r"sparse rows need a model of one linear layer"):
        fedsso.simulate(table(), "mlp", "fedavg", rounds=1, device="cpu")


# ---- federations


@pytest.mark.parametrize("kind", ["csr", "coo", "csc", "torch", "torch-csr"])
def test_a_sparse_matrix_stays_sparse_in_every_form(kind: str) -> None:
    fed = table(kind=kind)
    like = table(kind="dense")
    assert fed.is_sparse
    assert not like.is_sparse
    assert torch.equal(fed.x.to_dense(), like.x)
    assert fed.digest() == table().digest() != like.digest()
    assert "sample 5 float64 sparse" in repr(fed)
    assert pickle.loads(pickle.dumps(fed)).digest() == fed.digest()
    assert fed.to("cpu").validation().is_sparse


def test_clients_may_bring_sparse_rows_of_their_own() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = rows().numpy().astype(np.float32)
    parts = [(sparse.csr_matrix(x[i : i + B]), [0, 1, 0, 1]) for i in range(0, len(x), B)]
    fed = Federation.from_clients(parts, test_fraction=0)
    assert fed.is_sparse
    assert torch.equal(fed.x.to_dense(), torch.from_numpy(x))


def test_sparse_rows_that_cannot_be_used_are_errors() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = rows().numpy().copy()
    x[4, 2] = np.nan
    who = np.arange(len(x)) % 2
    with pytest.raises(InputError, match=r"x has NaN or Inf in row 4, column 2: remove"):
        Federation.from_arrays(sparse.csr_matrix(x), who, who)
    with pytest.raises(InputError, match=r"standardise=True would make sparse rows dense"):
        Federation.from_arrays(sparse.csr_matrix(rows().numpy()), who, who, standardise=True)
    with pytest.raises(InputError, match=r"hold numbers.*complex"):
        Federation.from_arrays(sparse.csr_matrix(rows().numpy() * 1j), who, who)


def test_an_svmlight_file_stays_sparse_if_asked_or_if_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    path.write_text("".join(f"{i % 2} 1:{i} 3:0 {i + 4}:2\n" for i in range(1, 9)))
    dense = svmlight([path]).x
    made = svmlight([path], layout="sparse").x
    assert made.layout == torch.sparse_csr
    assert torch.equal(made.to_dense(), dense)
    assert len(made.values()) == 16  # the zeros that the file writes are not kept
    monkeypatch.setenv("FEDSSO_MAX_CELLS", str(dense.numel() - 1))
    assert svmlight([path]).x.layout == torch.sparse_csr
    with pytest.raises(InputError, match=rf"has {dense.numel()} numbers.*FEDSSO_MAX_CELLS"):
        svmlight([path], layout="dense")
    fed = fedsso.load("svmlight", files=[path], clients=1, layout="sparse")
    assert fed.is_sparse
    assert fed.source["layout"] == "sparse"


# ---- runs


RUNS = {
    "mini-batches": {"batch_size": 4, "local_steps": 3},
    "full batches": {"batch_size": None, "local_steps": 2},
    "some absent": {"batch_size": 4, "local_steps": 2, "participation": 0.5},
}


CASES = [(name, run) for name in ("fedavg", "fedsso", "giant", "fedsophia") for run in RUNS]
CASES += [("fednl", "mini-batches"), ("fednl", "full batches")]  # it needs all clients
CASES += [("mocha", "full batches")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_run_on_sparse_rows_follows_the_dense_one(name: str, kind: str) -> None:
    """Five rounds of smooth, damped steps: rounding grows by far less than 1e4 in them."""
    options: dict[str, Any] = RUNS[kind]
    given = {**options, "rounds": 5, "l2": 0.1, "dtype": "float64", "device": "cpu"}
    metrics = {"metrics": ["accuracy", "auc"], "eval_train": True}
    one = fedsso.simulate(table(kind="dense"), "mclr", name, seed=1, **given, **metrics)
    other = fedsso.simulate(table(), "mclr", name, seed=1, **given, **metrics)
    torch.testing.assert_close(other.x, one.x, rtol=0, atol=1e4 * 100 * EPS)
    assert other.trace["bytes_up"].tolist() == one.trace["bytes_up"].tolist()
    np.testing.assert_allclose(other.trace["test_loss"], one.trace["test_loss"], rtol=1e-9)
    np.testing.assert_allclose(other.trace["full_train_loss"], one.trace["full_train_loss"], 1e-9)
    assert other.clients()["loss"].to_numpy() == pytest.approx(one.clients()["loss"].to_numpy())


def test_several_trials_on_sparse_rows_are_those_that_run_alone() -> None:
    """Products of two columns and of one may add in another order: within 1e4 roundings."""
    given = {"rounds": 5, "batch_size": 4, "local_steps": 2, "dtype": "float64", "device": "cpu"}
    records = [fedsso.FedAvg(alpha=0.1), fedsso.FedAvg(alpha=0.3)]
    many = fedsso.compare(table(), "mclr", records, **given)
    for record, run in zip(records, many, strict=True):
        alone = fedsso.simulate(table(), "mclr", record, **given)
        torch.testing.assert_close(run.x, alone.x, rtol=0, atol=1e4 * 100 * EPS)


def test_a_seed_fixes_all_bits_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    given = {"batch_size": 4, "local_steps": 2, "device": "cpu", "seed": 3}
    once = fedsso.simulate(table(), "mclr", "fedsso", rounds=6, **given)
    again = fedsso.simulate(table(), "mclr", "fedsso", rounds=6, out=tmp_path / "run", **given)
    assert torch.equal(once.x, again.x)
    loaded = fedsso.load_run(tmp_path / "run", federation=table())
    assert torch.equal(loaded.x, once.x)


# ---- memory


def test_batches_that_come_again_are_kept_within_their_bound() -> None:
    fed = table()
    gather = gathering(fed, torch.float64)
    assert isinstance(gather, SparseGather)
    index = fed.train_rows.view(1, -1)
    weight = torch.full(index.shape, 1 / index.numel(), dtype=torch.float64)
    one = gather.batch(index, weight, "a")
    assert gather.batch(index, weight, "a").x is one.x
    assert gather.batch(index, weight).x is not one.x
    assert gather.piece(fed.test_rows)[0] is gather.piece(fed.test_rows)[0]
    kept = Kept(10)
    made = [kept(name, lambda: [0] * 6, len) for name in "aba"]
    assert made[0] is made[2]  # there was room for the first one
    assert kept("b", lambda: [0] * 6, len) is not made[1]  # and none for the second


def test_a_wide_table_takes_memory_by_its_entries() -> None:
    """20 000 rows of 47 000 columns, 20 entries each: 7.5 GB dense, some 5 MB sparse.

    All that is kept for a round of full batches is a small multiple of the entries.
    """
    sparse = pytest.importorskip("scipy.sparse")
    height, width, per_row = 20_000, 47_000, 20
    generator = np.random.default_rng(0)
    columns = generator.integers(width, size=height * per_row)
    start = np.arange(0, height * per_row + 1, per_row)
    values = np.ones(len(columns), np.float32)
    x = sparse.csr_matrix((values, columns, start), shape=(height, width))
    fed = Federation.from_arrays(x, np.arange(height) % 2, np.arange(height) % 10)
    held = len(fed.x.values())
    gather = SparseGather(fed, torch.float64)
    assert held <= len(columns)
    assert gather.row_bytes <= 2 * (per_row + 1) * 12
    index = fed.train_rows.view(10, -1)
    batch = gather.batch(index, torch.ones(index.shape, dtype=torch.float64), "all")
    assert batch.transposed is not None
    kept = [part for made in (batch.x, batch.transposed) for part in entries(made)]
    total = sum(part.numel() * part.element_size() for part in kept)
    # Two matrices of 12 bytes for each entry; the transpose has a number for each column.
    assert total <= 24 * held + 4 * (index.numel() + 10 * width + 2)
