"""Token-level advantages by hand, on long answers against loops, and at their edges."""

from __future__ import annotations

import math
import random
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.objectives import advantages
from tests.ragged_steps import Sample, inputs_of, steps
from torch import Tensor

from winnow.algorithms.advantages import AdvantageInputs, gae, reward_to_go, whiten

GEN = [False, True, False, True, False, True]
"""Prompt, token, the environment's, token; prompt, token."""


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


OUTCOMES = f64(math.nan, 0.0, math.nan, 1.0, math.nan, -1.0)


def step(
    token_rewards: Tensor = OUTCOMES,
    gen: list[bool] = GEN,
    offsets: tuple[int, ...] = (0, 4, 6),
    groups: tuple[int, ...] = (5, 5),
    learns: list[bool] | None = None,
    **columns: Any,
) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=columns.pop("rewards", f64(*[0.0] * (len(offsets) - 1))),
        groups=torch.tensor(groups, dtype=torch.int64),
        offsets=torch.tensor(offsets),
        gen_mask=torch.tensor(gen, dtype=torch.bool),
        loss_mask=torch.tensor(gen if learns is None else learns, dtype=torch.bool),
        token_rewards=token_rewards,
        **columns,
    )


def found(name: str, inputs: AdvantageInputs, **options: Any) -> list[float]:
    """As trained on, in fp32."""
    tokens: Tensor = advantages(name, inputs, options).tokens
    return tokens.tolist()


def test_reward_to_go_jumps_over_the_environment() -> None:
    inputs = step(f64(7.0, 0.25, 9.0, 1.0, 7.0, -1.0))
    assert reward_to_go(inputs, 1.0).tolist() == [0, 1.25, 0, 1.0, 0, -1.0]
    assert reward_to_go(inputs, 0.5).tolist() == [0, 0.75, 0, 1.0, 0, -1.0]
    assert reward_to_go(inputs, 0.0).tolist() == [0, 0.25, 0, 1.0, 0, -1.0]


def test_reinforce_plus_plus_worked_by_hand() -> None:
    # G is 1/2, 1, -1: mean 1/6, squares 1/9 + 25/36 + 49/36 = 13/6, over two.
    std = math.sqrt(13 / 12 + 1e-8)
    expected = [0, 1 / 3 / std, 0, 5 / 6 / std, 0, -7 / 6 / std]
    assert found("reinforce_plus_plus", step(), gamma=0.5) == pytest.approx(expected, rel=1e-6)
    # One token filtered: G of the others 1, -1 has mean 0 and variance 2.
    inputs = step(learns=[False, False, False, True, False, True])
    root = 1 / math.sqrt(2 + 1e-8)
    got = found("reinforce_plus_plus", inputs, gamma=0.5)
    assert got == pytest.approx([0, 0, 0, root, 0, -root], rel=1e-6)


def test_whitened_outcomes_worked_by_hand() -> None:
    # R - mean is 1, 1, -1 on the tokens: mean 1/3, variance 4/3.
    std = math.sqrt(4 / 3 + 1e-8)
    expected = [0, 2 / 3 / std, 0, 2 / 3 / std, 0, -4 / 3 / std]
    got = found("reinforce_plus_plus_baseline", step(rewards=f64(1.0, -1.0)))
    assert got == pytest.approx(expected, rel=1e-6)
    # GRPO of each is +-1/sqrt 2; 3 - 1 of them stay, which whitening takes out again.
    inputs = step(components={"a": f64(1.0, 0.0), "b": f64(0.0, 4.0)})
    got = found("gdpo", inputs, weights={"a": 3.0, "b": 1.0})
    assert got == pytest.approx(expected, rel=1e-5)


def test_remax_worked_by_hand() -> None:
    inputs = step(greedy_rewards=f64(0.5, -2.0))
    assert found("remax", inputs) == [0, 0.5, 0, 0.5, 0, 1.0]
    assert found("remax", inputs, gamma=0.5) == [0, 0.0, 0, 0.5, 0, 1.0]


def test_gae_worked_by_hand() -> None:
    inputs = step(values=f64(9.0, 0.5, 100.0, 0.25, 9.0, -0.5))
    whitened, returns = gae(inputs, gamma=0.9, lam=0.8)
    # delta is 0.9/4 - 1/2 = -0.275, and 1 - 1/4; -1 + 1/2.
    first = -0.275 + 0.72 * 0.75
    raw = f64(0, first, 0, 0.75, 0, -0.5)
    torch.testing.assert_close(whitened, whiten(raw, inputs.loss_mask))
    assert returns.tolist() == pytest.approx([0, first + 0.5, 0, 1.0, 0, -1.0], rel=1e-12)


def test_gae_as_trained_on_is_whitened_and_its_returns_are_not() -> None:
    got = advantages("gae", step(values=f64(9.0, 0.0, 100.0, 0.0, 9.0, 0.0)))
    std = math.sqrt(4 / 3 + 1e-8)
    expected = [0, 2 / 3 / std, 0, 2 / 3 / std, 0, -4 / 3 / std]
    assert got.tokens.tolist() == pytest.approx(expected, rel=1e-6)
    assert got.returns is not None
    assert got.returns.tolist() == [0, 1.0, 0, 1.0, 0, -1.0]


@given(samples=steps())
def test_gae_without_discounts_has_the_reward_to_go_for_returns(samples: list[Sample]) -> None:
    inputs = inputs_of(samples)
    to_go = reward_to_go(inputs, 1.0)
    torch.testing.assert_close(gae(inputs, gamma=1.0, lam=1.0)[1], to_go, rtol=1e-12, atol=1e-12)


PROBS = {"prob": f64(math.nan, 0.5, math.nan, 0.25, math.nan, 0.75)}
SQUARES = {"prob_square_sum": f64(math.nan, 0.5, math.nan, 0.375, math.nan, 0.625)}


def test_the_tail_of_the_longest_answer_has_the_baseline_zero_and_learns() -> None:
    got = found("optimal_token_baseline", step(**PROBS, **SQUARES))
    # w is 1/2, 7/8; 1/8. At the first token G is 1, -1 and W 1/2, 1/8: B = (3/8) / (5/8). The
    # second token stands alone: with its own G for a baseline it would be 0.
    assert got == pytest.approx([0, 0.4, 0, 1.0, 0, -1.6], rel=1e-6)


def test_a_longest_answer_that_failed_unlearns_its_tail() -> None:
    rewards = f64(0, 0.0, 0, -1.0, 0, 1.0)
    got = found("optimal_token_baseline", step(rewards, **PROBS, **SQUARES))
    assert got == pytest.approx([0, -0.4, 0, -1.0, 0, 1.6], rel=1e-6)


def test_the_token_baseline_needs_two_answers() -> None:
    with pytest.raises(ValueError, match="optimal_token_baseline needs at least 2 answers"):
        found("optimal_token_baseline", step(groups=(0, 1), **PROBS, **SQUARES))


def test_a_squared_importance_weight_scales_a_tokens_energy() -> None:
    weights = f64(math.nan, 0.5, math.nan, 3.0, math.nan, 2.0)
    got = found("optimal_token_baseline", step(weights=weights, **PROBS, **SQUARES))
    # W at the first token is 1/2 * 1/4 and 1/8 * 4: B = (1/8 - 1/2) / (5/8) = -3/5.
    assert got == pytest.approx([0, 1.6, 0, 1.0, 0, -0.4], rel=1e-6)


def test_places_are_counted_in_written_tokens_and_energy_adds_up() -> None:
    # Both samples write two tokens, the first with the environment's between them.
    inputs = step(
        f64(0, 0, 0, 1.0, 0, 0, 0.0),
        [False, True, False, True, False, True, True],
        (0, 4, 7),
        prob=f64(0, 0.5, 0, 0.25, 0, 0.75, 0.5),
        prob_square_sum=f64(0, 0.5, 0, 0.375, 0, 0.625, 0.5),
    )
    # W is 1/2, 11/8 and 1/8, 5/8: B = 4/5, then 11/16.
    expected = [0, 0.2, 0, 5 / 16, 0, -0.8, -11 / 16]
    assert found("optimal_token_baseline", inputs) == pytest.approx(expected, rel=1e-6)


def test_certain_tokens_have_no_energy_and_no_baseline() -> None:
    ones = torch.ones(6, dtype=torch.float64)
    got = found("optimal_token_baseline", step(prob=ones, prob_square_sum=ones))
    assert got == [0, 1.0, 0, 1.0, 0, -1.0]


LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 0, 31, 1025]


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
def test_scans_over_answers_of_every_length_equal_loops(gamma: float) -> None:
    draw = random.Random(0)
    rewards = [[draw.uniform(-1, 1) for _ in range(n)] for n in LENGTHS]
    values = [[draw.uniform(-1, 1) for _ in range(n)] for n in LENGTHS]
    to_go, looped = [], []
    for r_row, v_row in zip(rewards, values, strict=True):
        g = a = v_after = 0.0
        g_row, a_row = [], []
        for r, v in zip(reversed(r_row), reversed(v_row), strict=True):
            g = r + gamma * g
            a = r + gamma * v_after - v + gamma * 0.95 * a
            v_after = v
            g_row.append(g)
            a_row.append(a)
        to_go += g_row[::-1]
        looped += a_row[::-1]
    r_T, v_T = f64(*chain(*rewards)), f64(*chain(*values))
    offsets = tuple(torch.tensor([0, *LENGTHS]).cumsum(0).tolist())
    inputs = step(r_T, [True] * len(r_T), offsets, (0,) * len(LENGTHS), values=v_T)
    torch.testing.assert_close(reward_to_go(inputs, gamma), f64(*to_go), rtol=1e-11, atol=1e-11)
    _, returns = gae(inputs, gamma=gamma, lam=0.95)
    torch.testing.assert_close(returns, f64(*looped) + v_T, rtol=1e-11, atol=1e-11)


def test_a_neighbour_s_huge_rewards_do_not_round_a_sample() -> None:
    inputs = step(f64(1e16, 0.125, 0.25, 1e16), [True] * 4, (0, 1, 3, 4), (0, 0, 0))
    assert reward_to_go(inputs, 1.0).tolist() == [1e16, 0.375, 0.25, 1e16]


# Whitening.


def mask_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_three_numbers_are_whitened_by_hand() -> None:
    got = whiten(f64(1.0, 99.0, 1.0, -1.0), mask_of(1, 0, 1, 1))
    # Mean 1/3; squares 4/9 + 4/9 + 16/9 = 8/3, over two: variance 4/3.
    std = math.sqrt(4 / 3 + 1e-8)
    assert got.tolist() == pytest.approx([2 / 3 / std, 0.0, 2 / 3 / std, -4 / 3 / std], rel=1e-12)
    for bad in (math.nan, math.inf):
        assert torch.equal(whiten(f64(1.0, bad, 1.0, -1.0), mask_of(1, 0, 1, 1)), got)


def test_one_number_and_none_become_zero() -> None:
    assert whiten(f64(7.0, 3.0), mask_of(1, 0)).tolist() == [0.0, 0.0]
    assert whiten(f64(7.0, 3.0), mask_of(0, 0)).tolist() == [0.0, 0.0]
    assert whiten(f64(), mask_of()).shape == (0,)


@pytest.mark.parametrize("value", [0.1, -1.0, 0.0, 1e6])
def test_numbers_that_are_equal_but_for_noise_become_zero(value: float) -> None:
    exact = torch.full((8,), value, dtype=torch.float64)
    noisy = exact + torch.tensor([1.0, -1.0] * 4) * max(abs(value) * 1e-9, 1e-12)
    assert noisy.unique().numel() == 2
    assert not whiten(noisy, torch.ones(8, dtype=torch.bool)).any()


def test_small_numbers_that_differ_are_no_noise() -> None:
    got = whiten(f64(1e-4, -1e-4), mask_of(1, 1))
    # Variance 2e-8, beside 1e-8.
    assert got.tolist() == pytest.approx([1e-4 / math.sqrt(3e-8), -1e-4 / math.sqrt(3e-8)])
