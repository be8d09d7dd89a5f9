"""Token-level advantages by hand, on long answers against loops, and at their edges."""

from __future__ import annotations

import math
import random
from itertools import chain

import pytest
import torch
from hypothesis import given
from tests.ragged_steps import Sample, inputs_of, steps

from winnow.algorithms.token_advantages import (
    gae,
    gae_whitened,
    gdpo_whitened,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reward_to_go,
    spread,
)

OFFSETS = torch.tensor([0, 4, 6])
GEN = torch.tensor([False, True, False, True, False, True])
"""Prompt, token, the environment's, token; prompt, token."""
GROUPS = torch.tensor([5, 5])


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


OUTCOMES = f64(math.nan, 0.0, math.nan, 1.0, math.nan, -1.0)


def test_reward_to_go_jumps_over_the_environment() -> None:
    rewards = f64(7.0, 0.25, 9.0, 1.0, 7.0, -1.0)
    assert reward_to_go(rewards, OFFSETS, GEN).tolist() == [0, 1.25, 0, 1.0, 0, -1.0]
    assert reward_to_go(rewards, OFFSETS, GEN, gamma=0.5).tolist() == [0, 0.75, 0, 1.0, 0, -1.0]
    assert reward_to_go(rewards, OFFSETS, GEN, gamma=0.0).tolist() == [0, 0.25, 0, 1.0, 0, -1.0]


def test_reinforce_plus_plus_worked_by_hand() -> None:
    # G is 1/2, 1, -1: mean 1/6, squares 1/9 + 25/36 + 49/36 = 13/6, over two.
    std = math.sqrt(13 / 12 + 1e-8)
    got = reinforce_plus_plus(OUTCOMES, OFFSETS, GEN, GEN, gamma=0.5)
    expected = [0, 1 / 3 / std, 0, 5 / 6 / std, 0, -7 / 6 / std]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    # One token filtered: G of the others 1, -1 has mean 0 and variance 2.
    learns = torch.tensor([False, False, False, True, False, True])
    got = reinforce_plus_plus(OUTCOMES, OFFSETS, GEN, learns, gamma=0.5)
    root = 1 / math.sqrt(2 + 1e-8)
    assert got.tolist() == pytest.approx([0, 0, 0, root, 0, -root], rel=1e-12)


def test_whitened_outcomes_worked_by_hand() -> None:
    # R - mean is 1, 1, -1 on the tokens: mean 1/3, variance 4/3.
    std = math.sqrt(4 / 3 + 1e-8)
    expected = [0, 2 / 3 / std, 0, 2 / 3 / std, 0, -4 / 3 / std]
    got = reinforce_plus_plus_baseline(f64(1.0, -1.0), GROUPS, OFFSETS, GEN)
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    # GRPO of each is +-1/sqrt 2; 3 - 1 of them stay, which whitening takes out again.
    components = {"a": f64(1.0, 0.0), "b": f64(0.0, 4.0)}
    got = gdpo_whitened(components, GROUPS, OFFSETS, GEN, weights={"a": 3.0, "b": 1.0})
    assert got.tolist() == pytest.approx(expected, rel=1e-5)


def test_remax_worked_by_hand() -> None:
    greedy = f64(0.5, -2.0)
    got = remax(OUTCOMES, OFFSETS, GEN, greedy)
    assert got.tolist() == [0, 0.5, 0, 0.5, 0, 1.0]
    got = remax(OUTCOMES, OFFSETS, GEN, greedy, gamma=0.5)
    assert got.tolist() == [0, 0.0, 0, 0.5, 0, 1.0]
    with pytest.raises(ValueError, match="greedy_rewards must be finite"):
        remax(OUTCOMES, OFFSETS, GEN, f64(math.inf, 0.0))


def test_gae_worked_by_hand() -> None:
    values = f64(9.0, 0.5, 100.0, 0.25, 9.0, -0.5)
    advantages, returns = gae(OUTCOMES, OFFSETS, GEN, values, gamma=0.9, lam=0.8)
    # delta is 0.9/4 - 1/2 = -0.275, and 1 - 1/4; -1 + 1/2.
    first = -0.275 + 0.72 * 0.75
    assert advantages.tolist() == pytest.approx([0, first, 0, 0.75, 0, -0.5], rel=1e-12)
    assert returns.tolist() == pytest.approx([0, first + 0.5, 0, 1.0, 0, -1.0], rel=1e-12)


def test_gae_as_trained_on_is_whitened_and_its_returns_are_not() -> None:
    values = f64(9.0, 0.0, 100.0, 0.0, 9.0, 0.0)
    advantages, returns = gae_whitened(OUTCOMES, OFFSETS, GEN, GEN, values)
    std = math.sqrt(4 / 3 + 1e-8)
    expected = [0, 2 / 3 / std, 0, 2 / 3 / std, 0, -4 / 3 / std]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12)
    assert returns.tolist() == [0, 1.0, 0, 1.0, 0, -1.0]


@given(samples=steps())
def test_gae_without_discounts_is_reward_to_go_minus_value(samples: list[Sample]) -> None:
    step = inputs_of(samples)
    assert step.values is not None
    advantages, returns = gae(step.token_rewards, step.offsets, step.gen_mask, step.values)
    to_go = reward_to_go(step.token_rewards, step.offsets, step.gen_mask)
    torch.testing.assert_close(returns, to_go, rtol=1e-12, atol=1e-12)
    expected = (to_go - step.values).masked_fill(~step.gen_mask, 0.0)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


def test_optimal_token_baseline_worked_by_hand() -> None:
    prob = f64(math.nan, 0.5, math.nan, 0.25, math.nan, 0.75)
    square = f64(math.nan, 0.5, math.nan, 0.375, math.nan, 0.625)
    got = optimal_token_baseline(OUTCOMES, OFFSETS, GEN, GROUPS, prob, square)
    # w is 1/2, 7/8; 1/8. At the first token G is 1, -1 and W 1/2, 1/8: B = (3/8) / (5/8).
    assert got.tolist() == pytest.approx([0, 0.4, 0, 0.0, 0, -1.6], rel=1e-7, abs=1e-7)
    apart = torch.tensor([[0, 1], [1, 0]])
    for groups in apart:
        with pytest.raises(ValueError, match="optimal_token_baseline needs at least 2 answers"):
            optimal_token_baseline(OUTCOMES, OFFSETS, GEN, groups, prob, square)


def test_places_are_counted_in_written_tokens_and_energy_adds_up() -> None:
    # Both samples write two tokens, the first with the environment's between them.
    offsets = torch.tensor([0, 4, 7])
    gen = torch.tensor([False, True, False, True, False, True, True])
    rewards = f64(0, 0, 0, 1.0, 0, 0, 0.0)
    prob = f64(0, 0.5, 0, 0.25, 0, 0.75, 0.5)
    square = f64(0, 0.5, 0, 0.375, 0, 0.625, 0.5)
    got = optimal_token_baseline(rewards, offsets, gen, GROUPS, prob, square)
    # W is 1/2, 11/8 and 1/8, 5/8: B = 4/5, then 11/16.
    expected = [0, 0.2, 0, 5 / 16, 0, -0.8, -11 / 16]
    assert got.tolist() == pytest.approx(expected, rel=1e-7)


def test_certain_tokens_have_no_energy_and_no_baseline() -> None:
    ones = torch.ones(6, dtype=torch.float64)
    got = optimal_token_baseline(OUTCOMES, OFFSETS, GEN, GROUPS, ones, ones)
    assert got.tolist() == [0, 1.0, 0, 1.0, 0, -1.0]


LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 0, 31, 1025]


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5])
def test_scans_over_answers_of_every_length_equal_loops(gamma: float) -> None:
    draw = random.Random(0)
    rewards = [[draw.uniform(-1, 1) for _ in range(n)] for n in LENGTHS]
    values = [[draw.uniform(-1, 1) for _ in range(n)] for n in LENGTHS]
    to_go, advantages = [], []
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
        advantages += a_row[::-1]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    r_T, v_T = f64(*chain(*rewards)), f64(*chain(*values))
    gen = torch.ones(len(r_T), dtype=torch.bool)
    got = reward_to_go(r_T, offsets, gen, gamma=gamma)
    torch.testing.assert_close(got, f64(*to_go), rtol=1e-11, atol=1e-11)
    got, _ = gae(r_T, offsets, gen, v_T, gamma=gamma, lam=0.95)
    torch.testing.assert_close(got, f64(*advantages), rtol=1e-11, atol=1e-11)


def test_a_neighbour_s_huge_rewards_do_not_round_a_sample() -> None:
    rewards = f64(1e16, 0.125, 0.25, 1e16)
    offsets, gen = torch.tensor([0, 1, 3, 4]), torch.ones(4, dtype=torch.bool)
    assert reward_to_go(rewards, offsets, gen).tolist() == [1e16, 0.375, 0.25, 1e16]


def test_fp32_is_summed_in_float64() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 16777216.0, 0.0, 16777216.0])
    values = torch.tensor([0.0, 16777216.0, 0.0, 3.0, 0.0, 16777213.0])
    prob, square = torch.full((6,), 0.3), torch.full((6,), 0.2)
    exact = rewards.double()
    pairs = [
        (reward_to_go(r, OFFSETS, GEN, gamma=0.99) for r in (rewards, exact)),
        (reinforce_plus_plus(r, OFFSETS, GEN, GEN, gamma=0.99) for r in (rewards, exact)),
        (remax(r, OFFSETS, GEN, values[:2], gamma=0.99) for r in (rewards, exact)),
        (gae(r, OFFSETS, GEN, values, gamma=0.99)[0] for r in (rewards, exact)),
        (gae_whitened(r, OFFSETS, GEN, GEN, values, gamma=0.99)[0] for r in (rewards, exact)),
        (gae_whitened(r, OFFSETS, GEN, GEN, values, gamma=0.99)[1] for r in (rewards, exact)),
        (
            optimal_token_baseline(r, OFFSETS, GEN, GROUPS, prob.to(r), square.to(r))
            for r in (rewards, exact)
        ),
        (reinforce_plus_plus_baseline(r, GROUPS, OFFSETS, GEN) for r in (rewards[2:4], exact[2:4])),
        (gdpo_whitened({"a": r}, GROUPS, OFFSETS, GEN) for r in (rewards[2:4], exact[2:4])),
    ]
    for single, double in pairs:
        assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
        assert single.any()
        assert torch.equal(single, double.float())


def test_no_samples_and_samples_without_tokens_have_no_advantages() -> None:
    nothing, none = torch.empty(0), torch.empty(0, dtype=torch.bool)
    for offsets in ([0], [0, 0, 0]):
        at = torch.tensor(offsets)
        groups = torch.zeros(len(offsets) - 1, dtype=torch.int64)
        assert reward_to_go(nothing, at, none).shape == (0,)
        assert [x.shape for x in gae(nothing, at, none, nothing)] == [(0,), (0,)]
        got = optimal_token_baseline(nothing, at, none, groups, nothing, nothing)
        assert got.shape == (0,)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        reward_to_go(OUTCOMES, OFFSETS, GEN, gamma=1.5)
    with pytest.raises(ValueError, match=r"lam must lie in \[0, 1\], got -0.5"):
        gae(OUTCOMES, OFFSETS, GEN, OUTCOMES, lam=-0.5)
    with pytest.raises(ValueError, match=r"lam must lie in \[0, 1\], got nan"):
        gae(OUTCOMES, OFFSETS, GEN, OUTCOMES, lam=math.nan)
    with pytest.raises(ValueError, match="token_rewards must be finite on written tokens"):
        reward_to_go(OUTCOMES, OFFSETS, torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="values must be finite on written tokens"):
        gae(OUTCOMES, OFFSETS, GEN, f64(0, math.inf, 0, 0, 0, 0))
    with pytest.raises(ValueError, match=r"values must be \[6\] as gen_mask is, got \[5\]"):
        gae(OUTCOMES, OFFSETS, GEN, OUTCOMES[:5])
    with pytest.raises(ValueError, match="offsets must run from 0 to the 6 tokens"):
        reward_to_go(OUTCOMES, torch.tensor([0, 4, 5]), GEN)
    with pytest.raises(ValueError, match=r"groups must be \[2\], got \[3\]"):
        optimal_token_baseline(OUTCOMES, OFFSETS, GEN, torch.tensor([1, 1, 1]), OUTCOMES, OUTCOMES)
    with pytest.raises(ValueError, match="must be floating point"):
        reward_to_go(torch.zeros(6, dtype=torch.int64), OFFSETS, GEN)
    with pytest.raises(ValueError, match=r"offsets must be \[B\+1\]"):
        spread(f64(1.0), OFFSETS, GEN)
