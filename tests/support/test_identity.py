"""Objects described as text: equal while they compute the same, different afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsso.support.fingerprint import describe


def weighted(values: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: z * values


def default(factor: float) -> Callable[..., Tensor]:
    def loss(z: Tensor, by: float = factor) -> Tensor:
        return z * by

    return loss


class Power:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, z: Tensor) -> Tensor:
        return z**self.p

    def loss(self, z: Tensor) -> Tensor:
        return self(z)


PAIRS: list[Callable[[float], Any]] = [
    lambda v: weighted(torch.full((2000,), v)),
    lambda v: weighted(np.full(2000, v)),
    lambda v: weighted(np.float32(v)),
    default,
    Power,
    lambda v: Power(v).loss,
]


@pytest.mark.parametrize("make", PAIRS)
def test_the_text_changes_with_what_is_computed_and_not_otherwise(
    make: Callable[[float], Any],
) -> None:
    assert describe(make(1.0)) == describe(make(1.0)) != describe(make(2.0))
    assert "0x" not in describe(make(1.0))  # an address would be another one in the next process


def test_a_function_may_hold_itself_and_a_record_of_its_calls() -> None:
    calls: list[int] = []

    def again(n: int) -> int:
        calls.append(n)
        return again(n - 1) if n else 0

    before = describe(again)
    again(3)
    assert describe(again) == before
