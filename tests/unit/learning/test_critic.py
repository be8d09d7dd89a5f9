"""The critic's objective and figures, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.written import ScriptedStrategy, answer, group, written

from winnow.learning.batch import Batch, MicroBatch, all_micro_batches, pack
from winnow.learning.critic import Critic, ValueObjective, value_figures
from winnow.learning.runner import Outputs


def values_of(micro: MicroBatch) -> Outputs:
    """A tenth of each token's id."""
    return {"value": torch.where(micro.gen_mask, micro.token_ids.float() / 10, 0.0)}


def batch_of(answers: Sequence[Sequence[int]], truncated: int | None = None) -> Batch:
    made = [answer(written(ids), truncated=i == truncated) for i, ids in enumerate(answers)]
    return pack([group(*made)], overlong_filtering=True)


def filled(batch: Batch, values: Sequence[float], returns: Sequence[float]) -> Batch:
    for name, numbers in (("values", values), ("returns", returns)):
        column = torch.zeros(len(batch.token_ids))
        column[batch.gen_mask] = torch.tensor([float(x) for x in numbers])
        batch.columns[name] = column
    return batch


def critic_of(**options: Any) -> tuple[Critic, ScriptedStrategy]:
    strategy = ScriptedStrategy(values_of)
    options = {"clip": 0.5, "aggregation": "token-mean", **options}
    return Critic(strategy, ValueObjective(**options)), strategy  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [1, 100])
def test_an_update_reports_its_loss_and_the_share_that_was_clipped(budget: int) -> None:
    # V = 1, 2, 0.3; V_old = 0.2, 1.9, 0.3. Only the first has moved by more than 0.5, towards
    # its return: (0.7 - 2)^2 > (1 - 2)^2.
    batch = filled(batch_of([[10, 20], [3]]), [0.2, 1.9, 0.3], [2.0, 1.0, 0.0])
    critic, strategy = critic_of(clip=0.5)
    found = critic.update(all_micro_batches(batch, budget), 0.25).record()
    assert found == {
        "critic/updates": 1,
        "critic/skipped_updates": 0,
        "critic/lr": 0.25,
        "critic/grad_norm": 0.5,
        "critic/value_loss": pytest.approx(0.5 * (1.3**2 + 1.0 + 0.09) / 3),
        "critic/clip_share": pytest.approx(1 / 3),
    }
    assert strategy.lrs == [0.25]


def test_samples_can_weigh_alike_and_filtered_ones_not_at_all() -> None:
    batch = filled(batch_of([[10, 20], [3], [7]], truncated=2), [0, 0, 0, 9], [2, 1, 0, 9])
    critic, _ = critic_of(clip=None, aggregation="seq-mean-token-mean")
    found = critic.update(all_micro_batches(batch, 100), 0.1).record()
    assert found["critic/value_loss"] == pytest.approx(0.5 * ((1.0 + 1.0) / 2 + 0.09) / 2)
    assert found["critic/clip_share"] == 0.0


def test_without_a_counted_token_there_is_no_update() -> None:
    batch = filled(batch_of([[1, 2]], truncated=0), [0, 0], [1, 1])
    critic, strategy = critic_of()
    assert critic.update(all_micro_batches(batch, 100), 0.1).record() == {}
    assert critic.update([], 0.1).record() == {}
    assert strategy.lrs == []
    assert value_figures(batch).record() == {}


def test_figures_of_the_values_by_hand() -> None:
    values, returns = [0.5, 1.0, -0.5, 77.0], [1.0, 1.5, 0.5, -77.0]
    batch = filled(batch_of([[1, 2], [3], [4]], truncated=2), values, returns)
    found = value_figures(batch).record()
    errors = np.subtract(returns, values)[:3]
    assert found["critic/explained_variance"] == pytest.approx(
        1 - np.var(errors) / np.var(returns[:3])
    )
    assert found["critic/value/mean"] == pytest.approx(1 / 3)
    assert (found["critic/value/max"], found["critic/value/min"]) == (1.0, -0.5)
    assert found["critic/return/mean"] == pytest.approx(1.0)
    assert all(math.isfinite(value) for value in found.values())
