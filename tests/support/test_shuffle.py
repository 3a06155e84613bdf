"""The permutations for a million clients are those that torch draws for each of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsso.support import shuffle
from fedsso.support.rng import generator
from fedsso.support.shuffle import LONGEST, first_of_permutation, first_words, shuffled


def one_by_one(values: np.ndarray, start: np.ndarray, seed: int) -> list[int]:  # type: ignore[type-arg]
    """What `shuffled` stands for: a generator and a permutation for each group."""
    out: list[int] = []
    for group in range(len(start) - 1):
        own = values[start[group] : start[group + 1]]
        order = torch.randperm(len(own), generator=generator(seed, "split", group))
        out += own[order.numpy()].tolist()
    return out


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_groups_of_all_sizes_are_shuffled_as_torch_does(seed: int) -> None:
    """Sizes around the longest group that numpy shuffles, and 0 and 1, in no order."""
    sizes = [3, 0, LONGEST, 1, LONGEST + 1, 2, LONGEST - 1, 10, 1000, 10, 1, 0]
    start = np.cumsum([0, *sizes])
    values = np.random.default_rng(seed).permutation(int(start[-1])) + 5
    assert shuffled(values, start, seed, "split").tolist() == one_by_one(values, start, seed)


def test_groups_beyond_one_batch_are_shuffled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    start = np.arange(0, 4 * 101, 4)
    values = np.arange(start[-1])
    monkeypatch.setattr(shuffle, "AT_ONCE", 7)
    assert shuffled(values, start, 3, "split").tolist() == one_by_one(values, start, 3)


def test_the_generator_is_numpys_too() -> None:
    """numpy's MT19937 is an implementation of its own; 227 numbers are all that are offered."""
    seeds = np.array([0, 1, 5489, 2**32 - 1], np.uint32)
    words = first_words(seeds, 227)
    for column, seed in enumerate(seeds.tolist()):
        other = np.random.RandomState(seed).randint(0, 1 << 32, 227, dtype=np.uint32)
        assert words[:, column].tolist() == other.tolist()


@pytest.mark.parametrize(
    ("n", "count"), [(1, 1), (2, 1), (100, 6), (100, 7), (5000, 300), (10**5, 40)]
)
def test_the_first_of_a_permutation_are_those_of_all(n: int, count: int) -> None:
    """Small n make numbers meet that have moved already; every 16th is where the way changes."""
    for seed in range(50):
        whole = torch.randperm(n, generator=generator(seed, "cohort", 3))
        assert first_of_permutation(n, count, seed, "cohort", 3).tolist() == whole[:count].tolist()


def test_few_of_many_are_drawn_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_them(*_: object, **__: object) -> None:
        raise AssertionError("all numbers were permuted")

    monkeypatch.setattr(torch, "randperm", all_of_them)
    assert len(set(first_of_permutation(10**6, 100, 0, "cohort", 1).tolist())) == 100
