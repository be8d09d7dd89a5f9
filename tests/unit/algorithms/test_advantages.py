"""GRPO's advantages by hand, against loops, and under changes that must not matter."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.algorithms.advantages import grpo

# Sixteenths: their sums and shifts are exact, so only the function under test rounds.
REWARDS = st.integers(-64, 64).map(lambda n: n / 16)
NORMALIZATIONS = ["group", "batch", "none"]


@st.composite
def scored_groups(draw: st.DrawFn, min_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and group numbers, groups of different sizes interleaved at random."""
    sizes = draw(st.lists(st.integers(min_size, 5), min_size=1, max_size=5))
    numbers = [g * 7 - 3 for g, size in enumerate(sizes) for _ in range(size)]
    groups = draw(st.permutations(numbers))
    rewards = draw(st.lists(REWARDS, min_size=len(groups), max_size=len(groups)))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)


def looped(rewards: list[float], groups: list[int], normalization: str) -> list[float]:
    """The definition, with the standard library's statistics."""
    members = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        members[group].append(reward)
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        alone = len(members[group]) == 1
        mean = 0.0 if alone else statistics.fmean(members[group])
        if normalization == "group":
            std = 1.0 if alone else statistics.stdev(members[group])
        elif normalization == "batch":
            std = 1.0 if len(rewards) == 1 else statistics.stdev(rewards)
        else:
            std = 1.0 - 1e-6
        result.append((reward - mean) / (std + 1e-6))
    return result


def test_a_group_worked_by_hand() -> None:
    rewards = torch.tensor([1.0, -1.0, -1.0, -1.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    got = grpo(rewards, groups)
    # Group 0: mean -1/2, squares 9/4 + 3/4, std 1. Group 1: mean 1/2, std 1/sqrt 2.
    root = math.sqrt(0.5)
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, root, -root], rel=1e-5)
    assert got.dtype == torch.float32
    plain = grpo(rewards, groups, std_normalization="none")
    assert plain.tolist() == [1.5, -0.5, -0.5, -0.5, 0.5, -0.5]
    batch = grpo(rewards, groups, std_normalization="batch")
    assert batch.tolist() == pytest.approx([x / 0.9831921 for x in plain.tolist()], rel=1e-5)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(data=scored_groups())
def test_loops_agree(normalization: str, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    rewards, groups = data
    got = grpo(rewards, groups, normalization)  # type: ignore[arg-type]
    expected = looped(rewards.tolist(), groups.tolist(), normalization)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(data=scored_groups(), order=st.randoms(use_true_random=False))
def test_a_permutation_of_samples_permutes_the_advantages(
    normalization: str,
    data: tuple[torch.Tensor, torch.Tensor],
    order: random.Random,
) -> None:
    rewards, groups = data
    indices = list(range(len(rewards)))
    order.shuffle(indices)
    got = grpo(rewards[indices], groups[indices], normalization)  # type: ignore[arg-type]
    want = grpo(rewards, groups, normalization)[indices]  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@given(data=scored_groups(min_size=2), shift=REWARDS)
def test_a_constant_shift_of_rewards_changes_nothing(
    normalization: str, data: tuple[torch.Tensor, torch.Tensor], shift: float
) -> None:
    rewards, groups = data
    got = grpo(rewards + shift, groups, normalization)  # type: ignore[arg-type]
    want = grpo(rewards, groups, normalization)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("value", [0.1, -1.0, 0.0, 1e6])
def test_equal_rewards_with_float_noise_give_zero(normalization: str, value: float) -> None:
    exact = torch.full((8,), value)
    noisy = torch.nextafter(exact, exact + torch.tensor([1.0, -1.0] * 4))
    assert noisy.unique().numel() == 2
    groups = torch.zeros(8, dtype=torch.int64)
    assert not grpo(noisy, groups, normalization).any()  # type: ignore[arg-type]
    assert not grpo(exact.double(), groups, normalization).any()  # type: ignore[arg-type]


def test_a_group_of_one_keeps_its_reward() -> None:
    got = grpo(torch.tensor([2.0]), torch.tensor([5]))
    assert got.tolist() == pytest.approx([2.0], rel=1e-5)


def test_no_samples_have_no_advantages() -> None:
    assert grpo(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="rewards must be finite"):
        grpo(torch.tensor([1.0, bad]), torch.tensor([0, 0]))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="must both be"):
        grpo(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="got 'median'"):
        grpo(torch.zeros(2), torch.zeros(2, dtype=torch.int64), "median")  # type: ignore[arg-type]
