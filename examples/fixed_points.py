"""Where algorithms end up when clients differ: the minimiser of f, or FedAvg's fixed point.

Ten quadratics f_i(x) = 1/2 (x - b_i)^T A_i (x - b_i) with their own A_i and b_i, full local
batches, tau = 5. With more than one local step FedAvg's clients drift to their own minimisers; its
fixed point solves

    sum_i p_i (I - (I - alpha A_i)^tau) (x - b_i) = 0        (FedProx: A_i + mu I contracts instead)

and FedSSO, whose clients are FedAvg's, goes to the same point, only faster. Algorithms that correct
the drift, or send second derivatives, reach the minimiser.

    python examples/fixed_points.py [folder]

writes fixed_points.png and prints a table. It takes half a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedsso

ALPHA, TAU, MU, ROUNDS = 0.5, 5, 0.1, 150


def problem() -> tuple[fedsso.Federation, Tensor, Tensor]:
    """The federation and its A_i, b_i, which its rows hold as least squares."""
    fed = fedsso.load(
        "synthetic",
        kind="quadratic",
        clients=10,
        dim=20,
        heterogeneity=1.0,
        condition=100.0,
        seed=0,
    )
    rows = [fed.rows_of(i) for i in range(fed.clients)]
    A = torch.stack([2 / len(r) * fed.x[r].mT @ fed.x[r] for r in rows])
    b = torch.stack([torch.linalg.solve(fed.x[r], fed.y[r]) for r in rows])
    return fed, A, b


def fixed_point(fed: fedsso.Federation, A: Tensor, b: Tensor, mu: float = 0.0) -> Tensor:
    """Of FedAvg; with mu > 0 of FedProx."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    damped = A + mu * eye
    W = fed.p[:, None, None] * (eye - torch.linalg.matrix_power(eye - ALPHA * damped, TAU))
    W = W @ torch.linalg.solve(damped, A)
    return torch.linalg.solve(W.sum(0), (W @ b[:, :, None]).sum(0)[:, 0])


def algorithms() -> dict[str, tuple[fedsso.algorithm.Algorithm, str]]:
    """Each with the point that it should reach."""
    exact = {"cg_steps": 40, "tol": 1e-14}
    return {
        "FedAvg": (fedsso.FedAvg(alpha=ALPHA), "FedAvg's fixed point"),
        "FedSSO": (fedsso.FedSSO(alpha=ALPHA), "FedAvg's fixed point"),
        "FedProx": (fedsso.FedProx(alpha=ALPHA, mu=MU), "FedProx's fixed point"),
        "SCAFFOLD": (fedsso.SCAFFOLD(alpha=ALPHA), "minimiser"),
        "FedDANE, exact": (
            fedsso.FedDANE(mu=MU, solver="exact", newton_steps=1, **exact),
            "minimiser",
        ),
        "FedNew": (fedsso.FedNew(mu=0.1, rho=0.1, **exact), "minimiser"),
        "FedNL": (fedsso.FedNL(), "minimiser"),
        "GIANT": (fedsso.GIANT(mu=0.0, **exact), "minimiser"),
    }


def main(folder: Path) -> None:
    """Run, print the distances, draw them by round."""
    fed, A, b = problem()
    assert fed.optimum is not None
    points = {
        "minimiser": fed.optimum,
        "FedAvg's fixed point": fixed_point(fed, A, b),
        "FedProx's fixed point": fixed_point(fed, A, b, MU),
    }
    options = {
        "rounds": ROUNDS,
        "local_steps": TAU,
        "batch_size": None,
        "dtype": "float64",
        "device": "cpu",
    }
    print(
        f"{'algorithm':16}{'|x - minimiser|':>18}"
        f"{'|x - FedAvg point|':>20}{'|x - FedProx point|':>21}   reaches"
    )
    lines: dict[str, list[tuple[str, Any]]] = {goal: [] for goal in points}
    for name, (record, goal) in algorithms().items():
        metrics = [distance(fed, points[goal])]
        run = fedsso.simulate(fed, "linear", record, metrics=metrics, **options)
        lines[goal].append((name, run.trace["test_distance"]))
        away = [float((run.x - point).norm()) for point in points.values()]
        print(f"{name:16}{away[0]:18.1e}{away[1]:20.1e}{away[2]:21.1e}   {goal}")
    folder.mkdir(parents=True, exist_ok=True)
    draw(
        lines.pop("minimiser"),
        [line for several in lines.values() for line in several],
        folder / "fixed_points.png",
    )


def distance(fed: fedsso.Federation, point: Tensor) -> Callable[[Tensor, Tensor], float]:
    """A metric: |x - point|, with x found again from the outputs X x of the linear model."""
    inverse = torch.linalg.pinv(fed.x[fed.test_rows])

    def distance(outputs: Tensor, _: Tensor) -> float:
        return float((inverse @ outputs[:, 0] - point).norm())

    return distance


def draw(left: list[tuple[str, Any]], right: list[tuple[str, Any]], path: Path) -> None:
    """Left who reaches the minimiser, right who goes to a fixed point of its own."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    colours = iter(plt.get_cmap("Dark2").colors)
    titles = ("These reach the minimiser: |x − x*|", "These their fixed point: |x − fixed point|")
    for axes, title, lines in zip(panels, titles, (left, right), strict=True):
        for name, away in lines:
            axes.plot(away, color=next(colours), lw=1.8, label=name)
        axes.set(yscale="log", xlabel="round")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(axis="y", color="#dddddd", lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
