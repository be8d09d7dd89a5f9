"""Outcome estimators by hand and at their edges; `test_estimators` holds them against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.objectives import advantages
from torch import Tensor

from winnow.algorithms.advantages import AdvantageInputs

REWARDS = [1.0, -1.0, 0.5, 3.0, 3.0, 2.0, -1.0]
GROUPS = [4, 4, 4, 9, 9, 9, 7]
"""Groups of three, three and one: means 1/6 and 8/3."""
SIXTEENTHS = st.integers(-64, 64).map(lambda n: n / 16)


def step(
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    components: dict[str, list[float]] | None = None,
) -> AdvantageInputs:
    """Answers of these lengths (1 each) behind prompts of one token."""
    lengths = lengths or [1] * len(rewards)
    offsets = torch.tensor([0, *(n + 1 for n in lengths)]).cumsum(0)
    gen_mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    gen_mask[offsets[:-1]] = False
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups),
        offsets=offsets,
        gen_mask=gen_mask,
        loss_mask=gen_mask,
        token_rewards=torch.zeros(len(gen_mask), dtype=torch.float64),
        components={
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in (components or {}).items()
        },
    )


def found(name: str, inputs: AdvantageInputs, **options: Any) -> list[float]:
    samples: Tensor = advantages(name, inputs, options).samples
    return samples.tolist()


def test_grpo_worked_by_hand() -> None:
    inputs = step([1.0, -1.0, -1.0, -1.0, 1.0, 0.0, 2.0], [0, 0, 0, 0, 1, 1, 8])
    # Group 0: mean -1/2, squares 9/4 + 3/4, std 1. Group 1: mean 1/2, std 1/sqrt 2. Alone: R.
    root = math.sqrt(0.5)
    expected = [1.5, -0.5, -0.5, -0.5, root, -root, 2.0]
    assert found("grpo", inputs) == pytest.approx(expected, rel=1e-5)
    plain = [1.5, -0.5, -0.5, -0.5, 0.5, -0.5, 2.0]
    assert found("grpo", inputs, std_normalization="none") == plain
    batch = found("grpo", inputs, std_normalization="batch")
    # Of all rewards: mean 1/7, squares 9 - 1/7, over six.
    std = math.sqrt((9 - 1 / 7) / 6)
    assert batch == pytest.approx([x / std for x in plain], rel=1e-5)


def test_grpo_passk_worked_by_hand() -> None:
    inputs = step(REWARDS[:6], GROUPS[:6])
    # The first group's best leads by 1/2; the second has two best.
    plain = found("grpo_passk", inputs, std_normalization="none")
    assert plain == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Squares around 1/6: 25/36 + 49/36 + 4/36 = 78/36, over two.
    lead = 0.5 / (math.sqrt(39 / 36) + 1e-6)
    assert found("grpo_passk", inputs) == pytest.approx([lead, 0, 0, 0, 0, 0], rel=1e-12)


def test_two_best_that_differ_by_noise_have_no_lead() -> None:
    inputs = step([1e6, 1e6 * (1 + 1e-9), 0.0], [0, 0, 0])
    assert not any(found("grpo_passk", inputs))
    assert not any(found("grpo_passk", inputs, std_normalization="none"))


def test_a_group_that_is_too_small_is_named_with_a_remedy() -> None:
    message = "grpo_passk needs at least 2 answers to a prompt, group 7 has 1; raise rollout"
    with pytest.raises(ValueError, match=message):
        found("grpo_passk", step(REWARDS, GROUPS))


def test_rloo_worked_by_hand() -> None:
    # Means of the others: -1/4, 3/4, 0; 5/2, 5/2, 3; alone.
    expected = [1.25, -1.75, 0.5, 0.5, 0.5, -1.0, -1.0]
    assert found("rloo", step(REWARDS, GROUPS)) == pytest.approx(expected, rel=1e-12)


def test_opo_worked_by_hand() -> None:
    inputs = step(REWARDS, GROUPS, [1, 2, 4, 0, 0, 0, 5])
    # (1 - 2 + 2) / 7 = 1/7; no token at all: the plain mean 8/3; alone.
    expected = [6 / 7, -8 / 7, 0.5 - 1 / 7, 1 / 3, 1 / 3, -2 / 3, -1.0]
    assert found("opo", inputs) == pytest.approx(expected, rel=1e-12)


@given(rewards=st.lists(SIXTEENTHS, min_size=2, max_size=6), length=st.integers(1, 9))
def test_opo_of_answers_of_one_length_takes_the_plain_mean(
    rewards: list[float], length: int
) -> None:
    inputs = step(rewards, [0] * len(rewards), [length] * len(rewards))
    plain = found("grpo", inputs, std_normalization="none")
    assert found("opo", inputs) == pytest.approx(plain, abs=1e-12)


def test_gpg_worked_by_hand() -> None:
    inputs = step([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1, 2, 2, 3])
    # Four of seven samples lie in groups whose rewards are equal; the one alone is none of them.
    alpha = 7 / 3
    assert found("gpg", inputs) == pytest.approx([alpha / 2, -alpha / 2, 0, 0, 0, 0, 0])
    # Three rewards are not 0.
    got = found("gpg", inputs, alpha="nonzero_reward")
    assert got == pytest.approx([7 / 6, -7 / 6, 0, 0, 0, 0, 0])
    assert not any(found("gpg", step([0.0] * 4, [0, 0, 1, 1]), alpha="nonzero_reward"))
    assert not any(found("gpg", step([1.0] * 4, [0, 0, 1, 1])))


def test_gdpo_gives_a_component_of_small_range_its_say() -> None:
    components = {"right": [1.0, 0.0, 1.0, 0.0], "brief": [0.01, 0.0, 0.0, 0.01]}
    inputs = step([0.0] * 4, [0] * 4, components=components)
    # Each component alone is +-1/2 over its std: 1/sqrt 3 and 0.01/sqrt 3, so +-sqrt(3)/2. Their
    # sum sqrt 3, -sqrt 3, 0, 0 has mean 0 and variance 2; whitened once more it is +-sqrt(3/2).
    root = math.sqrt(1.5)
    assert found("gdpo", inputs) == pytest.approx([root, -root, 0, 0], rel=1e-3, abs=1e-3)
    weighted = found("gdpo", inputs, weights={"brief": 3.0})
    assert weighted == pytest.approx([root / math.sqrt(2) * s for s in (1, -1, -1, 1)], rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="rewards must be finite"):
        found("grpo", step([1.0, bad], [0, 0]))


def test_no_samples_have_no_advantages() -> None:
    assert found("grpo", step([], [])) == []


def test_sums_are_exact_where_fp32_would_round() -> None:
    # Around 2^24 the sum of four has no exact fp32; the differences from the mean do.
    inputs = step([16777216.0, 16777218.0, 16777220.0, 16777116.0], [0] * 4)
    assert found("grpo", inputs, std_normalization="none") == [23.5, 25.5, 27.5, -76.5]
