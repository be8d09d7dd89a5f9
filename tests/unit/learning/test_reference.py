"""The reference policy and the reward model as roles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.learning.batch import Batch, MicroBatch, pack
from winnow.learning.reference import Reference, RewardModel
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


class Reader:
    """Reads token ids; `shift` is added to all it says."""

    shift = 0.0

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        (name,) = outputs
        return [{name: self.read(name, micro) + self.shift} for micro in microbatches]

    def read(self, name: str, micro: MicroBatch) -> Tensor:
        if name == "logprob":
            return torch.where(micro.gen_mask, -micro.token_ids.float(), 0.0)
        # 100 times the last id, plus the length; an earlier token's would be seen.
        score = torch.full((len(micro.token_ids),), -1.0)
        last = micro.offsets[1:] - 1
        score[last] = 100.0 * micro.token_ids[last] + micro.offsets.diff()
        return score


def batch_of(*answers: Sequence[int]) -> Batch:
    made = [
        Answer(
            Trajectory(
                (
                    Segment(
                        np.array(ids), np.zeros(len(ids), np.float32), (VersionSpan(0, len(ids)),)
                    ),
                ),
                "stop",
            ),
            Score(0.0, 0.0),
        )
        for ids in answers
    ]
    return pack([Group(0, Prompt("0", np.array([9, 9]), "", "", None), tuple(made))])


@pytest.mark.parametrize("budget", [1, 8, 100])
def test_reference_log_probs_come_back_in_the_order_of_the_batch(budget: int) -> None:
    batch = batch_of([1], [2, 3, 4], [5, 6])
    Reference(Reader()).logprobs(batch, budget)  # type: ignore[arg-type]
    ref = batch.columns["ref"]
    assert ref[batch.gen_mask].tolist() == [-1, -2, -3, -4, -5, -6]
    assert not ref[~batch.gen_mask].any()


def test_the_switch_is_thrown_while_the_reference_answers_and_back_after() -> None:
    reader, batch = Reader(), batch_of([1])

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        reader.shift = -10.0
        yield
        reader.shift = 0.0

    Reference(reader, off).logprobs(batch, 100)  # type: ignore[arg-type]
    assert batch.columns["ref"][-1] == -11.0
    assert reader.shift == 0.0


@pytest.mark.parametrize("budget", [1, 7, 100])
def test_scores_are_of_the_last_tokens_in_the_order_given(budget: int) -> None:
    sequences = [np.array(ids) for ids in ([3], [1, 2, 7], [4, 4, 4, 4, 5], [6, 1])]
    found = RewardModel(Reader()).scores(sequences, budget)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    assert found.tolist() == [301.0, 703.0, 505.0, 102.0]


def test_no_sequence_has_no_score_and_an_empty_one_is_refused() -> None:
    model = RewardModel(Reader())  # type: ignore[arg-type]
    assert model.scores([], 100).tolist() == []
    with pytest.raises(ValueError, match="no tokens"):
        model.scores([np.array([1]), np.array([], np.int64)], 100)
