"""The losses of a framework's run beside the simulator's: printed, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import parity_problem as problem

BOUND = 1e-5


def compare(name: str, models: Sequence[Tensor]) -> int:
    """Print the table of a run, given its models x_0 to x_K; 0 if losses and last model are those
    of the simulator."""
    losses = [problem.global_loss(x) for x in models]
    expected, x = problem.simulate(len(models) - 1)
    print(f"round   simulator  {name:>10}")
    for k, pair in enumerate(zip(expected, losses, strict=True)):
        print(f"{k:5}  {pair[0]:10.6f}  {pair[1]:10.6f}")
    apart = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
    off = float((models[-1] - x).abs().max())
    good = max(apart, off) <= BOUND and losses[-1] < losses[0]
    print(
        f"{name}: losses within {apart:.1e}, parameters within {off:.1e}: "
        f"{'equal' if good else 'NOT EQUAL'}"
    )
    return 0 if good else 1
