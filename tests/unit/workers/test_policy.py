"""The policy's figures and its objective, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.batching import Batch, MicroBatch, all_micro_batches, pack
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan
from winnow.workers.policy import Policy, PolicyObjective, mismatch
from winnow.workers.strategy import LossFn, Outputs


class FakeStrategy:
    """Says what it is told to say, and remembers what it was asked."""

    def __init__(self, grad_norm: float = 0.5, skipped: float = 0.0) -> None:
        self.step = {"grad_norm": grad_norm, "skipped": skipped}
        self.lrs: list[float] = []

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        return [{"logprob": logprobs(micro)} for micro in microbatches]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: Any, loss_fn: LossFn
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        for micro in microbatches:
            result = loss_fn(micro, outputs_of(micro))
            for name, value in {"loss": result.loss, **result.sums}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
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
    metrics = Policy(FakeStrategy(), PolicyObjective("ppo_clip")).old_logprobs(batch, 4)  # type: ignore[arg-type]
    old = batch.columns["old"]
    torch.testing.assert_close(old[batch.gen_mask], -torch.arange(1, 7) / 10)
    assert not old[~batch.gen_mask].any()
    assert metrics.record()["mismatch/abs_delta"] == pytest.approx(1.1 / 6)


def test_an_update_reports_means_over_its_tokens() -> None:
    # Ratios: exp(-0.1 + 0.4) = 1.35 is clipped at 1.2, exp(-0.3 + 0.4) = 1.105 is not.
    batch = batch_of([[1, 3]], old=-0.4, advantages=2.0)
    strategy = FakeStrategy()
    objective = PolicyObjective("ppo_clip", {"clip_high": 0.2}, entropy_coef=0.1)
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
    found = record(Policy(FakeStrategy(), PolicyObjective("ppo_clip")), batch)  # type: ignore[arg-type]
    shares = {name: found[f"actor/{name}"] for name in ("clip_high", "clip_low", "dual_clip")}
    assert shares == {"clip_high": 0.0, "clip_low": 0.0, "dual_clip": 0.0} | {figure: 1.0}


def test_figures_do_not_depend_on_the_split_into_micro_batches() -> None:
    batch = batch_of([[1, 2, 3], [4], [5, 6]], old=-0.3, advantages=1.0)
    policy = Policy(FakeStrategy(), PolicyObjective("reinforce", aggregation="seq-mean-token-mean"))  # type: ignore[arg-type]
    assert record(policy, batch, 1) == pytest.approx(record(policy, batch, 100))


def test_a_skipped_update_leaves_its_counts_only() -> None:
    batch = batch_of([[1, 2]], old=-0.3, advantages=1.0)
    policy = Policy(FakeStrategy(math.nan, 1.0), PolicyObjective("ppo_clip"))  # type: ignore[arg-type]
    found = record(policy, batch)
    assert found == {"actor/updates": 1, "actor/skipped_updates": 1, "actor/lr": 0.25}


def test_no_micro_batch_is_no_update() -> None:
    strategy = FakeStrategy()
    assert Policy(strategy, PolicyObjective("ppo_clip")).update([], 0.1).record() == {}  # type: ignore[arg-type]
    assert strategy.lrs == []


def test_mismatch_by_hand() -> None:
    old = torch.log(torch.tensor([0.45, 0.25, 0.9]))
    behav = torch.log(torch.tensor([0.25, 0.25, 0.3]))
    found = mismatch(old, behav).record()
    w = [1.8, 1.0, 3.0]
    logs = [math.log(x) for x in w]
    assert found["mismatch/abs_delta"] == pytest.approx(sum(logs) / 3)
    assert found["mismatch/max_delta"] == pytest.approx(math.log(3))
    assert found["mismatch/k1"] == pytest.approx(-sum(logs) / 3)
    assert found["mismatch/k3"] == pytest.approx(sum(x - 1 - math.log(x) for x in w) / 3)
    assert found["mismatch/chi2"] == pytest.approx(sum(x * x for x in w) / 3 - 1)
    assert found["mismatch/ess"] == pytest.approx(5.8**2 / (3 * sum(x * x for x in w)))
    assert found["mismatch/outside"] == pytest.approx(1 / 3)
    assert found["mismatch/ppl_old"] == pytest.approx((0.45 * 0.25 * 0.9) ** (-1 / 3))
    assert found["mismatch/ppl_behav"] == pytest.approx((0.25 * 0.25 * 0.3) ** (-1 / 3))
    assert found["mismatch/ppl_ratio"] == pytest.approx(5.4 ** (-1 / 3))
    wanted = np.corrcoef([0.45, 0.25, 0.9], [0.25, 0.25, 0.3])[0, 1]
    assert found["mismatch/pearson"] == pytest.approx(wanted, rel=1e-5)


def test_mismatch_of_the_same_policy_is_none() -> None:
    old = torch.tensor([-0.5, -2.0, -0.1])
    found = mismatch(old, old.clone()).record()
    zero = ("abs_delta", "max_delta", "k1", "k3", "chi2", "outside")
    assert all(found[f"mismatch/{name}"] == pytest.approx(0, abs=1e-12) for name in zero)
    one = ("pearson", "ess", "ppl_ratio")
    assert all(found[f"mismatch/{name}"] == pytest.approx(1) for name in one)


def test_mismatch_of_certain_tokens_and_of_no_tokens_is_defined() -> None:
    certain = torch.zeros(3)
    assert mismatch(certain, certain).record()["mismatch/pearson"] == 1.0
    assert mismatch(torch.zeros(0), torch.zeros(0)).record() == {}
    far = mismatch(torch.tensor([-1000.0]), torch.tensor([0.0])).record()
    assert math.isfinite(far["mismatch/k3"])


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"ppo_clip.*got 'ppo'"):
        PolicyObjective("ppo")
