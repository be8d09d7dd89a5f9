"""Outcome estimators by hand, at their edges, and against what defines them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.algorithms.advantages import centred, gdpo, gpg, grpo, grpo_passk, opo, rloo

REWARDS = torch.tensor([1.0, -1.0, 0.5, 3.0, 3.0, 2.0, -1.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 4, 4, 9, 9, 9, 7])
"""Groups of three, three and one: means 1/6 and 8/3."""
SIXTEENTHS = st.integers(-64, 64).map(lambda n: n / 16)


def test_grpo_passk_worked_by_hand() -> None:
    rewards, groups = REWARDS[:6], GROUPS[:6]
    plain = grpo_passk(rewards, groups, std_normalization="none")
    # The first group's best leads by 1/2; the second has two best.
    assert plain.tolist() == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Squares around 1/6: 25/36 + 49/36 + 4/36 = 78/36, over two.
    std = math.sqrt(39 / 36)
    got = grpo_passk(rewards, groups)
    assert got.tolist() == pytest.approx([0.5 / (std + 1e-6), 0.0, 0.0, 0.0, 0.0, 0.0], rel=1e-12)


def test_two_best_that_differ_by_noise_have_no_lead() -> None:
    rewards = torch.tensor([1e6, 1e6 * (1 + 1e-9), 0.0], dtype=torch.float64)
    groups = torch.zeros(3, dtype=torch.int64)
    assert not grpo_passk(rewards, groups).any()
    assert not grpo_passk(rewards, groups, std_normalization="none").any()


def test_grpo_passk_names_the_group_of_one() -> None:
    with pytest.raises(ValueError, match="needs at least 2 answers to a prompt, group 7 has 1"):
        grpo_passk(REWARDS, GROUPS)


def test_rloo_worked_by_hand() -> None:
    # Means of the others: -1/4, 3/4, 0; 5/2, 5/2, 3; alone.
    expected = [1.25, -1.75, 0.5, 0.5, 0.5, -1.0, -1.0]
    assert rloo(REWARDS, GROUPS).tolist() == pytest.approx(expected, rel=1e-12)


def test_opo_worked_by_hand() -> None:
    lengths = torch.tensor([1, 2, 4, 0, 0, 0, 5])
    # (1 - 2 + 2) / 7 = 1/7; no token at all: the plain mean 8/3; alone.
    expected = [6 / 7, -8 / 7, 0.5 - 1 / 7, 1 / 3, 1 / 3, -2 / 3, -1.0]
    assert opo(REWARDS, GROUPS, lengths).tolist() == pytest.approx(expected, rel=1e-12)


@given(rewards=st.lists(SIXTEENTHS, min_size=2, max_size=6), length=st.integers(1, 9))
def test_opo_of_answers_of_one_length_takes_the_plain_mean(
    rewards: list[float], length: int
) -> None:
    R, groups = torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64)
    got = opo(R, groups, torch.full((len(rewards),), length))
    torch.testing.assert_close(got, centred(R, groups))


def test_gpg_worked_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    # Four of seven samples lie in groups whose rewards are equal; the one alone is none of them.
    alpha = 7 / 3
    assert gpg(rewards, groups).tolist() == pytest.approx([alpha / 2, -alpha / 2, 0, 0, 0, 0, 0])
    # Three rewards are not 0.
    got = gpg(rewards, groups, alpha="nonzero_reward")
    assert got.tolist() == pytest.approx([7 / 6, -7 / 6, 0, 0, 0, 0, 0])
    everywhere_equal = gpg(torch.zeros(4), torch.tensor([0, 0, 1, 1]), alpha="nonzero_reward")
    assert not everywhere_equal.any()
    assert not gpg(torch.ones(4), torch.tensor([0, 0, 1, 1])).any()


def test_gdpo_gives_a_component_of_small_range_its_say() -> None:
    components = {
        "right": torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        "brief": torch.tensor([0.01, 0.0, 0.0, 0.01], dtype=torch.float64),
    }
    groups = torch.zeros(4, dtype=torch.int64)
    # Each component alone is +-1/2 over its std: 1/sqrt 3 and 0.01/sqrt 3.
    half = math.sqrt(3) / 2
    got = gdpo(components, groups)
    assert got.tolist() == pytest.approx([2 * half, -2 * half, 0, 0], rel=1e-3, abs=1e-3)
    weighted = gdpo(components, groups, weights={"brief": 3.0})
    assert weighted.tolist() == pytest.approx([3 * half, -3 * half, -3 * half, 3 * half], rel=1e-3)
    assert torch.equal(gdpo(components, groups, weights={}), got)


def test_gdpo_names_components_that_are_not_there() -> None:
    components = {"right": torch.zeros(2), "brief": torch.zeros(2)}
    with pytest.raises(ValueError, match="name tidy, but the reward components are right, brief"):
        gdpo(components, torch.zeros(2, dtype=torch.int64), weights={"tidy": 1.0, "right": 1.0})
    with pytest.raises(ValueError, match="at least one reward component"):
        gdpo({}, torch.zeros(2, dtype=torch.int64))


def of_lengths(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return opo(rewards, groups, torch.arange(1, len(rewards) + 1))


def of_components(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return gdpo({"one": rewards, "other": 2 * rewards}, groups)


FUNCTIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    grpo,
    grpo_passk,
    rloo,
    of_lengths,
    gpg,
    of_components,
    centred,
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", [0.1, -1.0, 0.0, 1e6])
def test_equal_rewards_with_float_noise_give_zero(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], value: float
) -> None:
    exact = torch.full((8,), value)
    noisy = torch.nextafter(exact, exact + torch.tensor([1.0, -1.0] * 4))
    assert noisy.unique().numel() == 2
    assert not function(noisy, torch.zeros(8, dtype=torch.int64)).any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_fp32_is_summed_in_float64(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    # Around 2^24 the sum of four has no exact fp32; the differences from the mean do.
    rewards = torch.tensor([16777216.0, 16777218.0, 16777220.0, 16777116.0])
    groups = torch.zeros(4, dtype=torch.int64)
    got = function(rewards, groups)
    assert got.dtype == torch.float32
    assert torch.equal(got, function(rewards.double(), groups).float())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bad: float
) -> None:
    with pytest.raises(ValueError, match="rewards must be finite"):
        function(torch.tensor([1.0, bad]), torch.tensor([0, 0]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_shapes_and_whole_numbers_are_named(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(ValueError, match="must both be"):
        function(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be floating point"):
        function(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


def test_wrong_options_are_named() -> None:
    rewards, groups = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="got 'batch'"):
        grpo_passk(rewards, groups, std_normalization="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'half'"):
        gpg(rewards, groups, alpha="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths must be"):
        opo(rewards, groups, torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="lengths must be"):
        opo(rewards, groups, torch.tensor([1]))


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f is not grpo_passk])
def test_a_group_of_one_keeps_its_reward(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    got = function(torch.tensor([2.0], dtype=torch.float64), torch.tensor([5]))
    scale = 3.0 if function is of_components else 1.0
    assert got.tolist() == pytest.approx([2.0 * scale], rel=1e-5)
