"""Client work that algorithms share, on functions whose minimisers are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsso.algorithm import Batch, local
from fedsso.algorithm.local import BACKTRACKING, Solver

M, TRIALS, D = 3, 2, 6
EXACT = Solver(newton=1, cg=3 * D, tol=1e-14)


class Smooth:
    """f_i(x) = phi(x)[i], of which a batch sees the share that its weights add up to."""

    def __init__(self, phi: Callable[[Tensor], Tensor]) -> None:
        self.phi = phi

    def value(self, x: Tensor, batch: Batch) -> Tensor:
        return self.phi(x) * batch.weight.sum(-1, keepdim=True)

    def value_and_grad(
        self,
        x: Tensor,
        batch: Batch,
        out: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        value = self.value(x, batch)
        (g,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), g

    def hvp(self, x: Tensor, v: Tensor, batch: Batch) -> Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(self.value(x, batch).sum(), x, create_graph=True)
        (Hv,) = torch.autograd.grad((g * v).sum(), x)
        return Hv

    def hessian(self, x: Tensor, batch: Batch) -> Tensor:
        unit = torch.eye(x.shape[-1], dtype=x.dtype)
        return torch.stack([self.hvp(x, e.expand_as(x), batch) for e in unit], -1)

    def targets(self, x: Tensor, batch: Batch, u: Tensor) -> Tensor:
        raise NotImplementedError


class Pieces:
    """Clients whose rows come in two pieces, a quarter and three quarters of the weight."""

    k, steps = 1, 0

    def __init__(self, clients: int = M) -> None:
        self.own_steps = torch.zeros(clients, 1, 1)

    def full(self) -> Iterator[Batch]:
        empty = torch.zeros(len(self.own_steps), 1)
        for weight in (0.25, 0.75):
            yield Batch(
                empty, empty, torch.full((len(self.own_steps), 1), weight, dtype=torch.float64)
            )

    def batch(self, j: int) -> Batch:
        raise NotImplementedError

    def active(self, j: int) -> Tensor | None:
        raise NotImplementedError

    def uniform(self, purpose: str, n: int) -> Tensor:
        raise NotImplementedError


def systems(d: int = D, condition: float = 30.0) -> tuple[Tensor, Tensor]:
    """Positive definite A [M, trials, d, d] and b [M, trials, d]."""
    draw = torch.Generator().manual_seed(5)
    Q = torch.linalg.qr(torch.randn(M, TRIALS, d, d, generator=draw, dtype=torch.float64)).Q
    A = Q @ torch.diag(torch.linspace(1 / condition, 1, d, dtype=torch.float64)) @ Q.mT
    return (A + A.mT) / 2, torch.randn(M, TRIALS, d, generator=draw, dtype=torch.float64)


def product(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: (A @ v.unsqueeze(-1)).squeeze(-1)


def solved(A: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(A, b.unsqueeze(-1)).squeeze(-1)


def quadratics() -> tuple[Smooth, Tensor, Tensor]:
    """f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i), the same for both trials."""
    A, b = systems()
    A, b = A[:, :1], b[:, :1]
    return Smooth(lambda x: ((x - b) * product(A)(x - b)).sum(-1) / 2), A, b


# ---- full passes ----


def test_full_passes_add_the_pieces() -> None:
    f, A, b = quadratics()
    x = torch.linspace(-1, 1, TRIALS * D, dtype=torch.float64).view(TRIALS, D)
    loss, g = local.gradient(f, x, Pieces())
    torch.testing.assert_close(g, product(A)(x - b), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, ((x - b) * g).sum(-1) / 2, rtol=1e-12, atol=0)
    torch.testing.assert_close(local.value(f, x, Pieces()), loss, rtol=1e-14, atol=0)
    H = local.hessian(f, x, Pieces())
    torch.testing.assert_close(H, A.expand(M, TRIALS, D, D), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        local.curvature(f, x, Pieces())(g), product(H)(g), rtol=1e-12, atol=1e-12
    )


def test_along_gives_the_loss_at_every_step() -> None:
    f, _, _ = quadratics()
    x, p = torch.zeros(TRIALS, D, dtype=torch.float64), torch.ones(TRIALS, D, dtype=torch.float64)
    losses = local.along(f, x, p, Pieces())
    assert losses.shape == (M, TRIALS, 10)
    for j, t in enumerate(BACKTRACKING):
        torch.testing.assert_close(
            losses[..., j], local.value(f, x + t * p, Pieces()), rtol=1e-14, atol=0
        )


# ---- conjugate gradients ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_cg_solves(dtype: torch.dtype, tolerance: float) -> None:
    A, b = systems()
    before = b.clone()
    z = local.cg(product(A.to(dtype)), b.to(dtype), 3 * D, 1e-14)
    assert z.dtype == dtype
    torch.testing.assert_close(z.double(), solved(A, b), rtol=tolerance, atol=tolerance)
    assert torch.equal(b, before)


def test_cg_after_one_step() -> None:
    """The minimiser of z^T A z / 2 - b^T z on the line through b."""
    A, b = systems()
    z = local.cg(product(A), b, 1, 0.0)
    a = (b * b).sum(-1, keepdim=True) / (b * product(A)(b)).sum(-1, keepdim=True)
    torch.testing.assert_close(z, a * b, rtol=1e-13, atol=0)


def test_cg_takes_as_many_steps_as_there_are_eigenvalues() -> None:
    A, b = systems()
    Q = torch.linalg.eigh(A).eigenvectors
    two = torch.where(torch.arange(D) < 3, 1.0, 5.0).double()
    products = Counted(Q @ torch.diag(two) @ Q.mT)
    z = local.cg(products, b, 50, 1e-12)
    torch.testing.assert_close(z, solved(products.A, b), rtol=1e-11, atol=1e-11)
    assert products.count == 2


class Counted:
    """A product that counts how often it is asked for."""

    def __init__(self, A: Tensor) -> None:
        self.A, self.count = A, 0

    def __call__(self, v: Tensor) -> Tensor:
        self.count += 1
        return product(self.A)(v)


def test_cg_ends_at_its_tolerance() -> None:
    A, b = systems(d=40, condition=1e4)
    counts = []
    for tol in (0.3, 0.03, 1e-6):
        products = Counted(A)
        z = local.cg(products, b, 500, tol)
        residual = (b - product(A)(z)).norm(dim=-1)
        assert (residual <= tol * b.norm(dim=-1) * (1 + 1e-9)).all()
        counts.append(products.count)
    assert counts[0] < counts[1] < counts[2] < 500


def test_cg_of_a_batch_is_that_of_its_members() -> None:
    """Systems that end at once, late, and never wait for each other; b = 0 has the solution 0."""
    A, b = systems(condition=300.0)
    A[0, 0] = torch.eye(D)
    A[1, 1] = -torch.eye(D)
    b[2, 0] = 0
    together = local.cg(product(A), b, 4, 1e-2)
    for i in range(M):
        for t in range(TRIALS):
            alone = local.cg(product(A[i : i + 1, t : t + 1]), b[i : i + 1, t : t + 1], 4, 1e-2)
            torch.testing.assert_close(together[i, t], alone[0, 0], rtol=1e-12, atol=0)
    assert torch.equal(together[0, 0], b[0, 0])
    assert torch.equal(together[1, 1], b[1, 1])
    assert torch.equal(together[2, 0], b[2, 0])


def test_cg_at_negative_curvature() -> None:
    """A = diag(2, -1), b = (1, 1/2): b^T A b = 7/4, so z = 5/7 b; then v = (15, 60)/49 has v^T A v
    < 0 and z stays.

    A = diag(1, -4) has b^T A b = 0: b itself.
    """
    A = torch.diag_embed(torch.tensor([[[2.0, -1.0]], [[1.0, -4.0]]], dtype=torch.float64))
    b = torch.tensor([1.0, 0.5], dtype=torch.float64).expand(2, 1, 2)
    z = local.cg(product(A), b, 10, 1e-8)
    assert z[0, 0].tolist() == pytest.approx([5 / 7, 5 / 14], rel=1e-15)
    assert z[1, 0].tolist() == [1.0, 0.5]


def test_cg_direction_is_downhill_whatever_the_matrix() -> None:
    draw = torch.Generator().manual_seed(8)
    A = torch.randn(200, 1, 5, 5, generator=draw, dtype=torch.float64)
    b = torch.randn(200, 1, 5, generator=draw, dtype=torch.float64)
    for steps in (1, 2, 5, 20):
        assert ((local.cg(product(A + A.mT), b, steps, 1e-6) * b).sum(-1) > 0).all()


@pytest.mark.parametrize("steps", [1, 5])
def test_cg_says_where_a_product_is_no_number(steps: int) -> None:
    A, b = systems()
    A[1, 0, 0, 0] = torch.nan
    z = local.cg(product(A), b, steps, 1e-12)
    sick = z.isnan().all(-1)
    assert sick.nonzero().tolist() == [[1, 0]]
    torch.testing.assert_close(
        z[2], local.cg(product(A[2]), b[2], steps, 1e-12), rtol=1e-12, atol=0
    )


def test_cg_without_data() -> None:
    A, b = (v.to("meta") for v in systems())
    z = local.cg(product(A), b, 3, 1e-3)
    assert z.is_meta
    assert z.shape == b.shape


# ---- Newton ----


def tilted() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(2)
    tilt = torch.randn(M, TRIALS, D, generator=draw, dtype=torch.float64)
    return {"tilt": tilt, "mu": torch.tensor([[0.0], [0.7]], dtype=torch.float64)}


def test_newton_solves_a_quadratic_in_one_step() -> None:
    """(A + mu I) delta = -(A (x - b) + tilt), with a mu of each trial's own."""
    f, A, b = quadratics()
    x = torch.ones(TRIALS, D, dtype=torch.float64)
    extra = tilted()
    delta = local.newton(f, x, Pieces(), EXACT, **extra)
    H = A + extra["mu"].unsqueeze(-1) * torch.eye(D)
    torch.testing.assert_close(
        delta, -solved(H, product(A)(x - b) + extra["tilt"]), rtol=1e-10, atol=1e-10
    )
    again = local.newton(f, x, Pieces(), EXACT._replace(newton=3), **extra)
    torch.testing.assert_close(again, delta, rtol=1e-10, atol=1e-10)


def test_newton_without_tilt() -> None:
    f, _, b = quadratics()
    x = torch.zeros(TRIALS, D, dtype=torch.float64)
    torch.testing.assert_close(
        local.newton(f, x, Pieces(), EXACT, None, 0.0),
        b.expand(M, TRIALS, D),
        rtol=1e-10,
        atol=1e-10,
    )


def test_newton_in_single_precision() -> None:
    f, _, b = quadratics()
    g = Smooth(lambda x: f.phi(x.double()).to(x.dtype))
    delta = local.newton(
        g, torch.zeros(TRIALS, D), Pieces(), EXACT._replace(newton=2, tol=1e-6), None, 0.0
    )
    assert delta.dtype == torch.float32
    torch.testing.assert_close(delta.double(), b.expand(M, TRIALS, D), rtol=1e-3, atol=1e-3)


def test_newton_steps_are_shortened() -> None:
    """log cosh from x = 3: the full Newton step ends at 3 - sinh 3 cosh 3 < -97, and plain Newton
    diverges."""
    f = Smooth(lambda x: torch.log(torch.cosh(x)).sum(-1))
    x = torch.tensor([[3.0], [-2.0]], dtype=torch.float64)
    first = x + local.newton(f, x, Pieces(1), EXACT, None, 0.0)
    assert (local.value(f, first, Pieces(1)) < local.value(f, x, Pieces(1))).all()
    last = x + local.newton(f, x, Pieces(1), EXACT._replace(newton=12), None, 0.0)
    assert last.abs().max() < 1e-12


def test_newton_leaves_a_place_of_negative_curvature() -> None:
    """(x^2 - 1)^2 is concave at 1/10; its minimisers are -1 and 1."""
    f = Smooth(lambda x: ((x**2 - 1) ** 2).sum(-1))
    x = torch.tensor([[0.1], [-0.1]], dtype=torch.float64)
    end = x + local.newton(f, x, Pieces(1), EXACT._replace(newton=12), None, 0.0)
    assert end.abs().flatten().tolist() == pytest.approx([1, 1], abs=1e-12)


def test_newton_at_the_minimum_stays() -> None:
    f, _, _ = quadratics()
    x = torch.zeros(TRIALS, D, dtype=torch.float64)
    tilt = -local.gradient(f, x, Pieces())[1]
    assert not local.newton(f, x, Pieces(), EXACT._replace(newton=2), tilt, 0.1).any()


# ---- line search ----


def losses(**at: float) -> Tensor:
    """Ten losses of 2 except those given as j3=0.9."""
    values = torch.full((10,), 2.0, dtype=torch.float64)
    for name, value in at.items():
        values[int(name[1:])] = value
    return values


ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("tried", "slope", "step"),
    [
        ({"j0": 0.5, "j1": 0.1}, -1.0, 1.0),  # the largest, not the best
        ({"j3": 0.9, "j5": 0.5}, -1.0, 2**-3),
        ({"j0": 0.95, "j1": 0.94}, -1.0, 0.5),  # 1 - c t = 0.9 at t = 1, 0.95 at t = 1/2
        ({"j0": 0.91, "j9": 0.99999}, -1.0, 1.0),  # none fits: the lowest loss
        ({"j9": 1.5}, -1.0, 0.0),  # none lowers f
        ({"j0": torch.nan, "j1": torch.inf, "j2": 0.5}, -1.0, 0.25),
        (
            {"j0": torch.nan, "j1": torch.nan, "j4": 0.9999},
            -1.0,
            2**-4,
        ),  # none fits, some are not numbers
        ({"j0": 1.05, "j6": 1.0}, 1.0, 2**-6),  # uphill: f + c t g^T p is above f
        ({"j0": 1.0}, 0.0, 1.0),
    ],
)
def test_armijo(tried: dict[str, float], slope: float, step: float) -> None:
    t = local.armijo(losses(**tried), ONE, slope * ONE, 0.1)
    assert t.dtype == torch.float64
    assert t.tolist() == [step]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_armijo_takes_the_last_step_where_losses_differ_by_rounding(dtype: torch.dtype) -> None:
    """A few units in the last place of f say nothing; a clear rise does, with any slope."""
    unit = torch.finfo(dtype).eps
    noise = torch.linspace(-8, 8, 10, dtype=torch.float64)
    for last in (0.25, 0.25 * ONE):
        assert (
            local.armijo((1 + noise * unit).to(dtype), ONE, -ONE * unit, 0.1, last).item() == 0.25
        )
        assert local.armijo(losses(j3=0.5).to(dtype), ONE, -ONE * unit, 0.1, last).item() == 2**-3
        assert local.armijo(losses().to(dtype), ONE, -ONE * unit, 0.1, last).item() == 0.0
    assert local.armijo(torch.ones(10, dtype=dtype), ONE, -ONE * unit, 0.1).item() == 1.0


def test_armijo_of_a_batch() -> None:
    tried = torch.stack([losses(j0=0.5), losses(j2=0.5), losses(j9=1.5)]).view(3, 1, 10).float()
    t = local.armijo(tried, ONE.expand(3, 1, 1), -ONE.expand(3, 1, 1), 0.1)
    assert t.flatten().tolist() == [1.0, 0.25, 0.0]
    assert t.shape == (3, 1, 1)
