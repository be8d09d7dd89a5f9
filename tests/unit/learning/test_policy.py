"""The policy's figures and its objective, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.objectives import policy_objective
from torch import Tensor

from winnow.algorithms.losses import Loss, LossTerms, PolicyLoss
from winnow.learning.batch import NO_SHARDING, Batch, MicroBatch, all_micro_batches, pack
from winnow.learning.policy import KlTerm, Policy
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossFn
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


class FakeStrategy:
    """Says what it is told to say, and remembers what it was asked."""

    sharder = NO_SHARDING

    def __init__(self, grad_norm: float = 0.5, skipped: float = 0.0) -> None:
        self.step = {"grad_norm": grad_norm, "skipped": skipped}
        self.lrs: list[float] = []

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        self.asked = outputs
        found = [{**outputs_of(m), "prob_square_sum": m.gen_mask * 0.25} for m in microbatches]
        return [{name: each[name] for name in outputs} for each in found]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: Any, loss_fn: LossFn
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        for micro in microbatches:
            result = loss_fn(micro, outputs_of(micro))
            for name, value in {"loss": result.loss, **result.sums}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
            for name, value in result.maxima.items():
                totals[name] = max(totals.get(name, 0.0), float(value))
        return totals

    def optimizer_step(self, lr: float) -> dict[str, float]:
        self.lrs.append(lr)
        return self.step


def logprobs(micro: MicroBatch) -> Tensor:
    return torch.where(micro.gen_mask, -micro.token_ids.float() / 10, 0.0)


def outputs_of(micro: MicroBatch) -> Outputs:
    return {"logprob": logprobs(micro), "entropy": micro.gen_mask * 0.5}


def batch_of(answers: Sequence[Sequence[int]], **columns: float) -> Batch:
    """One group; every written token of it has the given columns."""
    made = []
    for ids in answers:
        logps = np.full(len(ids), -0.5, np.float32)
        segment = Segment(np.array(ids), logps, (VersionSpan(0, len(ids)),))
        made.append(Answer(Trajectory((segment,), "stop"), Score(1.0, 1.0)))
    batch = pack([Group(0, Prompt("0", np.array([9, 9]), "", "", None), tuple(made))])
    for name, value in columns.items():
        batch.columns[name] = batch.gen_mask * value
    return batch


def record(policy: Policy, batch: Batch, budget: int = 100) -> Mapping[str, float]:
    return policy.update(all_micro_batches(batch, budget), 0.25).record()


def test_old_log_probs_come_back_in_the_order_of_the_batch() -> None:
    batch = batch_of([[1], [2, 3, 4], [5, 6]])
    metrics = Policy(FakeStrategy(), policy_objective("ppo_clip")).old_logprobs(batch, 4)  # type: ignore[arg-type]
    old = batch.columns["old"]
    torch.testing.assert_close(old[batch.gen_mask], -torch.arange(1, 7) / 10)
    assert not old[~batch.gen_mask].any()
    assert metrics.record()["mismatch/abs_delta"] == pytest.approx(1.1 / 6)
    assert metrics.record()["actor/old_pass"] == 1


def test_squared_probabilities_come_with_the_pass_when_asked_for() -> None:
    batch = batch_of([[1], [2, 3]])
    strategy = FakeStrategy()
    Policy(strategy, policy_objective("ppo_clip")).old_logprobs(batch, 4, with_squares=True)  # type: ignore[arg-type]
    assert strategy.asked == {"logprob", "entropy", "prob_square_sum"}
    torch.testing.assert_close(batch.columns["prob_square_sum"], batch.gen_mask * 0.25)


def test_without_a_pass_the_updates_tell_how_far_the_sampler_was() -> None:
    batch = batch_of([[1], [2, 3, 4], [5, 6]], advantages=1.0)
    strategy = FakeStrategy()
    policy = Policy(strategy, policy_objective("ppo_clip", old="current"))  # type: ignore[arg-type]
    assert policy.old_logprobs(batch, 4).record() == {"actor/old_pass": 0}
    assert "old" not in batch.columns
    found = record(policy, batch, 3)
    assert found["mismatch/abs_delta"] == pytest.approx(1.1 / 6)
    assert found["mismatch/max_delta"] == pytest.approx(0.4)
    assert "actor/approx_kl" not in found, "the policy is not far from itself"
    # The ratio is 1, so the loss is -A whatever the log-probs.
    assert found["actor/policy_loss"] == pytest.approx(-1.0)


def test_a_users_figure_is_kept_whatever_it_is_called() -> None:
    def loss(terms: LossTerms) -> Loss:
        return -terms.advantage * terms.logp, {"approx_kl": torch.tensor(3.0)}

    objective = policy_objective("ppo_clip", old="current")
    own = replace(objective, loss=PolicyLoss(loss, distances=frozenset()), options={})
    batch = batch_of([[1], [2, 3, 4]], advantages=1.0)
    found = record(Policy(FakeStrategy(), own), batch)  # type: ignore[arg-type]
    assert found["actor/approx_kl"] == pytest.approx(3.0 / 4)


def test_in_bypass_mode_the_sampler_is_the_old_policy() -> None:
    batch = batch_of([[1, 3]], advantages=2.0)
    strategy = FakeStrategy()
    policy = Policy(strategy, policy_objective("ppo_clip", {"clip_high": 0.3}, old="behav"))  # type: ignore[arg-type]
    policy.old_logprobs(batch, 4)
    torch.testing.assert_close(batch.columns["old"], batch.behav)
    found = record(policy, batch)
    # Ratios exp(-0.1 + 0.5) = 1.49, clipped at 1.3, and exp(-0.3 + 0.5) = 1.22.
    assert found["actor/policy_loss"] == pytest.approx(-2.0 * (1.3 + math.exp(0.2)) / 2)


def test_what_is_rejected_in_the_loss_adds_nothing_and_still_counts() -> None:
    # w = exp(logp + 0.5): 1.49, 1.22, 1.0; tokens above log 1.3 are rejected, so one of three.
    batch = batch_of([[1, 3, 5]], advantages=1.0)
    correction = {
        "weight": "truncated",
        "weight_options": {"level": "token", "cap": 1.1},
        "rejection": "k1",
        "rejection_options": {"level": "token", "over": "mean", "low": 1 / 1.3, "high": 2.0},
    }
    objective = policy_objective("reinforce", old="behav", correction=correction)
    policy = Policy(FakeStrategy(), objective)  # type: ignore[arg-type]
    policy.old_logprobs(batch, 4)
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
    found = record(Policy(FakeStrategy(), objective), batch)  # type: ignore[arg-type]
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
        policy = Policy(FakeStrategy(), policy_objective("clip_cov", options))  # type: ignore[arg-type]
        policy.choose(batch, [0], torch.tensor(order), seed=3)
        lengths = batch.offsets.diff().tolist()
        parts = zip(order, batch.columns["selected"].split(lengths), strict=True)
        chosen.append({key: part.tolist() for key, part in parts})
    assert chosen[0] == chosen[1]
    assert sum(map(sum, chosen[0].values())) == 3


def test_an_update_reports_means_over_its_tokens() -> None:
    # Ratios: exp(-0.1 + 0.4) = 1.35 is clipped at 1.2, exp(-0.3 + 0.4) = 1.105 is not.
    batch = batch_of([[1, 3]], old=-0.4, advantages=2.0)
    strategy = FakeStrategy()
    objective = policy_objective("ppo_clip", {"clip_high": 0.2}, entropy_coef=0.1)
    found = record(Policy(strategy, objective), batch)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("old", "advantage", "figure"),
    [(-0.4, 1.0, "clip_high"), (1.0, -1.0, "clip_low"), (-3.0, -1.0, "dual_clip")],
)
def test_each_bound_is_told_from_the_others(old: float, advantage: float, figure: str) -> None:
    batch = batch_of([[1, 1]], old=old, advantages=advantage)
    found = record(Policy(FakeStrategy(), policy_objective("ppo_clip")), batch)  # type: ignore[arg-type]
    shares = {name: found[f"actor/{name}"] for name in ("clip_high", "clip_low", "dual_clip")}
    assert shares == {"clip_high": 0.0, "clip_low": 0.0, "dual_clip": 0.0} | {figure: 1.0}


def test_figures_do_not_depend_on_the_split_into_micro_batches() -> None:
    batch = batch_of([[1, 2, 3], [4], [5, 6]], old=-0.3, advantages=1.0)
    policy = Policy(
        FakeStrategy(), policy_objective("reinforce", aggregation="seq-mean-token-mean")
    )  # type: ignore[arg-type]
    assert record(policy, batch, 1) == pytest.approx(record(policy, batch, 100))


def test_a_skipped_update_leaves_its_counts_only() -> None:
    batch = batch_of([[1, 2]], old=-0.3, advantages=1.0)
    policy = Policy(FakeStrategy(math.nan, 1.0), policy_objective("ppo_clip"))  # type: ignore[arg-type]
    found = record(policy, batch)
    assert found == {"actor/updates": 1, "actor/skipped_updates": 1, "actor/lr": 0.25}


def test_no_micro_batch_is_no_update() -> None:
    strategy = FakeStrategy()
    assert Policy(strategy, policy_objective("ppo_clip")).update([], 0.1).record() == {}  # type: ignore[arg-type]
    assert strategy.lrs == []
