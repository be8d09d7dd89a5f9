"""From scores to the columns that updates read: rewards, the KL, what an estimator is given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.objectives import advantage_stage
from tests.recorded import recorded_groups
from tests.written import answer, environment, group, written
from torch import Tensor

from winnow.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    Estimator,
    gae,
    reward_to_go,
)
from winnow.errors import TrainingError
from winnow.learning.advantage import AdvantageStage, KlPenalty, token_rewards
from winnow.learning.batch import Batch, pack
from winnow.observe.metrics import Metrics
from winnow.types import Group, Segment

TURNS = group(
    answer(written([1, 2]), environment([3]), reward=1.5, task=1.0, form=0.5),
    answer(written([4]), environment([5, 6]), written([7]), reward=-1.0, task=-1.0),
    answer(environment([8]), reward=3.0, task=3.0),
)


def test_a_reward_sits_on_the_last_token_that_the_policy_wrote() -> None:
    found = token_rewards([TURNS], pack([TURNS]), 1.0)
    # Prompts of 2; the third answer has no written token, so its reward has no place.
    wanted = [0, 0, 0, 1.5, 0, 0, 0, 0, 0, 0, -1.0, 0, 0, 0]
    assert found.tolist() == wanted
    assert found.dtype == torch.float64


def rewarded(ids: list[int], reward: float) -> Segment:
    return replace(written(ids), reward=reward)


def test_each_turns_reward_reaches_the_turns_before_it_by_hand() -> None:
    # Of the reward of 2 the environment gave 0.5 for the first turn, at a weight of 2.
    turns = answer(rewarded([1, 2], 0.5), environment([3, 3]), rewarded([4], 0.0), reward=2.0)
    groups = [group(answer(environment([7]), reward=9.0), turns)]
    batch = pack(groups)
    found = token_rewards(groups, batch, 2.0)
    assert found.tolist() == [0] * 6 + [1.0, 0, 0, 1.0]
    inputs = AdvantageInputs(
        rewards=batch.rewards,
        groups=batch.groups,
        offsets=batch.offsets,
        gen_mask=batch.gen_mask,
        loss_mask=batch.loss_mask,
        token_rewards=found,
        values=torch.tensor([99.0] * 5 + [0.2, 0.4, 99.0, 99.0, 0.6], dtype=torch.float64),
    )
    advantages, returns = gae(inputs, gamma=0.9, lam=0.5)
    # Deltas: 0.9 * 0.4 - 0.2; 1 + 0.9 * 0.6 - 0.4, over the environment's tokens; 1 - 0.6.
    by_hand = torch.tensor([0.16 + 0.45 * 1.32, 1.14 + 0.45 * 0.4, 0.4], dtype=torch.float64)
    white = (by_hand - by_hand.mean()) / (by_hand.var() + 1e-8).sqrt()
    assert returns[batch.gen_mask].tolist() == pytest.approx([0.954, 1.72, 1.0], abs=1e-12)
    assert advantages[batch.gen_mask].tolist() == pytest.approx(white.tolist(), abs=1e-12)
    assert not advantages[~batch.gen_mask].any()
    to_go = reward_to_go(inputs, 0.5)[batch.gen_mask]
    assert to_go.tolist() == pytest.approx([0.75, 1.5, 1.0], abs=1e-12)


def test_the_reward_of_a_single_turn_is_the_same_to_the_bit_whoever_gave_it() -> None:
    groups = [group(*(answer(rewarded([1, 2], 0.1 * n), reward=0.7 / n) for n in range(1, 9)))]
    found = token_rewards(groups, pack(groups), 0.3).view(8, 4)
    assert found[:, 3].tolist() == [0.7 / n for n in range(1, 9)]
    assert not found[:, :3].any()


def column_batch(groups: list[Group]) -> Batch:
    """With all that any estimator may ask for."""
    batch = pack(groups)
    torch.manual_seed(2)
    n = len(batch.token_ids)
    batch.columns["old"] = -torch.rand(n)
    batch.columns["ref"] = -torch.rand(n)
    batch.columns["values"] = torch.randn(n) * batch.gen_mask
    batch.columns["prob_square_sum"] = torch.rand(n)
    return batch


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_gets_what_it_needs_and_fills_the_batch(name: str) -> None:
    groups = [replace(g, baseline=g.answers[0]) for g in recorded_groups()]
    batch = column_batch(groups)
    found = advantage_stage(name)(groups, batch, Metrics())
    advantages = batch.columns["advantages"]
    assert advantages is found.tokens
    assert advantages.dtype == torch.float32
    assert bool(advantages.isfinite().all())
    assert bool(advantages.any())
    assert not advantages[~batch.gen_mask].any()
    assert len(found.samples) == batch.n_samples
    assert ("returns" in batch.columns) == (name == "gae")


def test_kl_lowers_the_reward_of_a_sample_by_its_sum() -> None:
    groups = recorded_groups(2)
    batch, penalty = column_batch(groups), KlPenalty(0.2, "k1")
    found = advantage_stage("rloo", {}, penalty)(groups, batch, Metrics())
    sums = []
    for b, reward in enumerate(batch.rewards.tolist()):
        span = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        kl = (batch.columns["old"] - batch.columns["ref"])[span][batch.gen_mask[span]]
        sums.append(reward - 0.2 * float(kl.double().sum()))
    for b, own in enumerate(sums):
        others = [r for i, r in enumerate(sums) if i // 8 == b // 8 and i != b]
        assert float(found.samples[b]) == pytest.approx(own - sum(others) / len(others), abs=1e-5)


def test_kl_comes_off_each_token_for_estimators_that_tell_tokens_apart() -> None:
    baseline = answer(written([1]), reward=0.25)
    groups = [replace(g, baseline=baseline) for g in recorded_groups(1)]
    batch = column_batch(groups)
    advantage_stage("remax", {"gamma": 1.0}, KlPenalty(0.2, "k1"))(groups, batch, Metrics())
    for b in range(batch.n_samples):
        to_go = float(batch.rewards[b]) - 0.25
        for t in reversed(range(int(batch.offsets[b]), int(batch.offsets[b + 1]))):
            if batch.gen_mask[t]:
                to_go -= 0.2 * float(batch.columns["old"][t] - batch.columns["ref"][t])
                assert float(batch.columns["advantages"][t]) == pytest.approx(to_go, abs=1e-5)


def test_components_are_the_parts_of_the_scores() -> None:
    seen: dict[str, Any] = {}

    def noting(inputs: AdvantageInputs, **options: Any) -> Tensor:
        seen.update(inputs.components)
        return inputs.rewards

    batch = column_batch([TURNS])
    for estimator in (Estimator("gdpo", noting, frozenset({"components"})), Estimator("x", noting)):
        AdvantageStage(estimator, {})([TURNS], batch, Metrics())
        if estimator.name == "gdpo":
            assert sorted(seen) == ["form", "task"]
            assert seen["task"].tolist() == [1.0, -1.0, 3.0]
            assert seen["form"].tolist() == [0.5, 0.0, 0.0], "a score that lacks a part has 0 of it"
            seen.clear()
    assert not seen, "an estimator gets what it needs and no more"


def test_the_weights_of_the_correction_reach_the_token_baseline() -> None:
    groups, found = recorded_groups(), []
    for weight in (None, 1.0, 0.5):
        batch = column_batch(groups)
        if weight is not None:
            written_so_far = batch.positions - batch.prompt_lengths.repeat_interleave(
                batch.offsets.diff()
            )
            batch.columns["weight"] = weight ** (written_so_far.clamp(min=0) % 3).float()
        found.append(advantage_stage("optimal_token_baseline")(groups, batch, Metrics()).tokens)
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], rtol=1e-2)


def batch_of(old: list[float], ref: list[float]) -> Batch:
    """Two recorded answers, cut to what is asked for by their masks: 2 and 1 written tokens."""
    batch = pack(recorded_groups(1, 2))
    chosen = torch.zeros_like(batch.gen_mask)
    first, second = (int(batch.prompt_lengths[b] + batch.offsets[b]) for b in range(2))
    places = torch.tensor([first, first + 1, second])
    chosen[places] = True
    batch.gen_mask.copy_(chosen)
    for name, values in (("old", old), ("ref", ref)):
        column = torch.full((len(batch.token_ids),), 7.0)
        column[places] = torch.tensor(values)
        batch.columns[name] = column
    return batch


def test_the_penalty_by_hand() -> None:
    batch, metrics = batch_of([-1.0, -2.0, -0.5], [-1.5, -1.0, -2.5]), Metrics()
    penalty = KlPenalty(0.1, "k1")(batch, metrics)
    assert penalty.dtype == torch.float64
    assert penalty[batch.gen_mask].tolist() == pytest.approx([0.05, -0.1, 0.2])
    assert not penalty[~batch.gen_mask].any()
    # Means of the samples are -0.25 and 2.0: the second counts as much, though it is shorter.
    assert metrics.record() == {"reward/kl": pytest.approx(0.875), "reward/kl_coef": 0.1}


def test_a_kl_that_is_not_finite_stops_the_run_with_one_line() -> None:
    for value in (math.nan, -math.inf):
        with pytest.raises(TrainingError, match=r"^algorithm\.kl\.reward: the KL .* optim\.lr$"):
            KlPenalty(0.5, "k1")(batch_of([value, 0.0, 0.0], [0.0] * 3), Metrics())
