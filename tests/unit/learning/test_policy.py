"""The policy's figures and its objective, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.objectives import policy_objective
from tests.written import ScriptedStrategy, group_of

from winnow.learning.batch import Batch, MicroBatch, all_micro_batches, pack
from winnow.learning.policy import KlTerm, Policy, PolicyObjective
from winnow.learning.runner import Outputs


def outputs_of(micro: MicroBatch) -> Outputs:
    return {
        "logprob": torch.where(micro.gen_mask, -micro.token_ids.float() / 10, 0.0),
        "entropy": micro.gen_mask * 0.5,
        "prob_square_sum": micro.gen_mask * 0.25,
    }


def policy_of(objective: PolicyObjective, **step: float) -> tuple[Policy, ScriptedStrategy]:
    strategy = ScriptedStrategy(outputs_of, **step)
    return Policy(strategy, objective), strategy  # type: ignore[arg-type]


def batch_of(answers: Sequence[Sequence[int]], **columns: float) -> Batch:
    """One group; every written token of it has the given columns."""
    batch = pack([group_of(answers, -0.5)])
    for name, value in columns.items():
        batch.columns[name] = batch.gen_mask * value
    return batch


def record(policy: Policy, batch: Batch, budget: int = 100) -> Mapping[str, float]:
    return policy.update(all_micro_batches(batch, budget), 0.25).record()


def test_old_log_probs_come_back_in_the_order_of_the_batch() -> None:
    batch = batch_of([[1], [2, 3, 4], [5, 6]])
    metrics = policy_of(policy_objective("ppo_clip"))[0].fill_old_logprobs(batch, 4)
    old = batch.columns["old"]
    torch.testing.assert_close(old[batch.gen_mask], -torch.arange(1, 7) / 10)
    assert not old[~batch.gen_mask].any()
    assert metrics.record()["mismatch/abs_delta"] == pytest.approx(1.1 / 6)
    assert metrics.record()["actor/old_pass"] == 1


def test_reused_log_probs_are_those_of_groups_without_a_token_of_older_weights() -> None:
    """The second of three groups has one such token, so that all of it is in the pass."""
    batch = pack([group_of(answers, -0.5) for answers in ([[1, 2]], [[3], [4, 5]], [[6]])])
    batch.columns["age"] = (batch.token_ids * batch.gen_mask == 5).long()
    policy, _ = policy_of(policy_objective("ppo_clip", old="reuse"))
    found = policy.fill_old_logprobs(batch, 4).record()
    old = batch.columns["old"]
    wanted = torch.tensor([-0.5, -0.5, -0.3, -0.4, -0.5, -0.5])
    torch.testing.assert_close(old[batch.gen_mask], wanted)
    assert not old[~batch.gen_mask].any()
    assert found == {"actor/old_pass": 3 / 6}
    batch.columns["age"] = torch.zeros_like(batch.token_ids)
    assert policy.fill_old_logprobs(batch, 4).record() == {"actor/old_pass": 0}
    assert torch.equal(batch.columns["old"], batch.behav)


def test_in_bypass_mode_the_sampler_is_the_old_policy() -> None:
    batch = batch_of([[1, 3]], advantages=2.0)
    policy, _ = policy_of(policy_objective("ppo_clip", {"clip_high": 0.3}, old="behav"))
    policy.fill_old_logprobs(batch, 4)
    torch.testing.assert_close(batch.columns["old"], batch.behav)
    found = record(policy, batch)
    # Ratios exp(-0.1 + 0.5) = 1.49, clipped at 1.3, and exp(-0.3 + 0.5) = 1.22.
    assert found["actor/policy_loss"] == pytest.approx(-2.0 * (1.3 + math.exp(0.2)) / 2)


def test_what_is_rejected_in_the_loss_adds_nothing_and_still_counts() -> None:
    # w = exp(logp + 0.5): 1.49, 1.22, 1.0; tokens above log 1.3 are rejected, so one of three.
    batch = batch_of([[1, 3, 5]], advantages=1.0)
    correction = {
        "weight": {"name": "truncated", "level": "token", "cap": 1.1},
        "rejection": {"name": "k1", "level": "token", "over": "mean", "low": 1 / 1.3, "high": 2.0},
    }
    objective = policy_objective("reinforce", old="behav", correction=correction)
    policy, _ = policy_of(objective)
    policy.fill_old_logprobs(batch, 4)
    found = record(policy, batch)
    assert found["actor/policy_loss"] == pytest.approx((1.1 * 0.3 + 1.0 * 0.5) / 3)
    assert found["correction/rejected_tokens"] == pytest.approx(1 / 3)
    assert found["correction/rejected_samples"] == 0
    assert found["correction/weight"] == pytest.approx((1.1 + 1.0) / 2)
    assert found["correction/weight_bound"] == pytest.approx(1 / 2)
    # Means over all three tokens, as the policy is no other on the rejected one.
    assert found["actor/entropy"] == pytest.approx(0.5)
    assert found["actor/mean_prob"] == pytest.approx(sum(math.exp(-x / 10) for x in (1, 3, 5)) / 3)


def test_a_weight_multiplies_the_policy_loss_and_no_other_term() -> None:
    batch = batch_of([[1, 3]], old=-0.4, advantages=1.0, weight=2.0, ref=-0.5)
    objective = policy_objective("reinforce", kl=KlTerm(0.5, "k2"), entropy_coef=0.1)
    found = record(policy_of(objective)[0], batch)
    kl = (0.4**2 + 0.2**2) / 2 / 2
    assert found["actor/policy_loss"] == pytest.approx(2.0 * (0.1 + 0.3) / 2)
    assert found["actor/kl_loss"] == pytest.approx(kl)
    assert found["actor/loss"] == pytest.approx(0.4 + 0.5 * kl - 0.1 * 0.5)


def test_tokens_are_chosen_by_update_whatever_the_order_of_the_samples() -> None:
    chosen = []
    for order in ([0, 1, 2], [2, 0, 1]):
        answers = [[1, 2, 3], [4, 9, 9], [5, 6, 1]]
        batch = batch_of([answers[i] for i in order], old=-0.4)
        ids = batch.token_ids.float()
        batch.columns["old"] = -ids * batch.gen_mask / 10
        batch.columns["advantages"] = (ids - 4) * batch.gen_mask
        options = {"share": 0.4, "cov_low": -9.0, "cov_high": 9.0, "selection": "update"}
        policy = policy_of(policy_objective("clip_cov", options))[0]
        policy.select_tokens(batch, [0], torch.tensor(order), seed=3)
        lengths = batch.offsets.diff().tolist()
        parts = zip(order, batch.columns["selected"].split(lengths), strict=True)
        chosen.append({key: part.tolist() for key, part in parts})
    assert chosen[0] == chosen[1]
    assert sum(map(sum, chosen[0].values())) == 3


def test_an_update_reports_means_over_its_tokens() -> None:
    # Ratios: exp(-0.1 + 0.4) = 1.35 is clipped at 1.2, exp(-0.3 + 0.4) = 1.105 is not.
    batch = batch_of([[1, 3]], old=-0.4, advantages=2.0)
    policy, strategy = policy_of(policy_objective("ppo_clip", {"clip_high": 0.2}, entropy_coef=0.1))
    found = record(policy, batch)
    loss = -2.0 * (1.2 + math.exp(0.1)) / 2
    assert found == {
        "actor/updates": 1,
        "actor/skipped_updates": 0,
        "actor/lr": 0.25,
        "actor/grad_norm": 0.5,
        "actor/loss": pytest.approx(loss - 0.1 * 0.5),
        "actor/policy_loss": pytest.approx(loss),
        "actor/clip_high": 0.5,
        "actor/clip_low": 0.0,
        "actor/dual_clip": 0.0,
        "actor/entropy": pytest.approx(0.5),
        "actor/mean_prob": pytest.approx((math.exp(-0.1) + math.exp(-0.3)) / 2),
        "actor/approx_kl": pytest.approx(-0.2),
    }
    assert strategy.lrs == [0.25]


def test_a_skipped_update_leaves_its_counts_only() -> None:
    batch = batch_of([[1, 2]], old=-0.3, advantages=1.0)
    policy, _ = policy_of(policy_objective("ppo_clip"), grad_norm=math.nan, skipped=1.0)
    found = record(policy, batch)
    assert found == {"actor/updates": 1, "actor/skipped_updates": 1, "actor/lr": 0.25}
