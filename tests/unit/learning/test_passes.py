"""Passes of a model over a batch without gradients, and the scores of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.learning.batch import NO_SHARDING, Batch, MicroBatch, MicroBatchSharder, pack
from winnow.learning.strategy import run_pass, score_sequences
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


class Reader:
    """Reads token ids."""

    sharder = NO_SHARDING

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        return [{name: self.read(name, micro) for name in outputs} for micro in microbatches]

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
def test_values_come_back_in_the_order_of_the_batch(budget: int) -> None:
    batch = batch_of([1], [2, 3, 4], [5, 6])
    found = run_pass(Reader(), batch, frozenset({"logprob"}), budget)["logprob"]  # type: ignore[arg-type]
    assert found[batch.gen_mask].tolist() == [-1, -2, -3, -4, -5, -6]
    assert not found[~batch.gen_mask].any()


def test_outputs_are_gathered_in_one_order_whatever_the_order_of_a_set() -> None:
    gathered: list[float] = []

    class Ranks(MicroBatchSharder):
        def gather(
            self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
        ) -> Tensor:
            gathered.append(float(values[0][-1]))
            return super().gather(batch, microbatches, values)

    reader = Reader()
    reader.sharder = Ranks()
    for outputs in (("score", "logprob"), ("logprob", "score")):
        run_pass(reader, batch_of([7]), cast(Any, dict.fromkeys(outputs)), 100)  # type: ignore[arg-type]
    assert gathered == [-7.0, 703.0, -7.0, 703.0]


@pytest.mark.parametrize("budget", [1, 7, 100])
def test_scores_are_of_the_last_tokens_in_the_order_given(budget: int) -> None:
    sequences = [np.array(ids) for ids in ([3], [1, 2, 7], [4, 4, 4, 4, 5], [6, 1])]
    found = score_sequences(Reader(), sequences, budget)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    assert found.tolist() == [301.0, 703.0, 505.0, 102.0]


def test_no_sequence_has_no_score_and_an_empty_one_is_refused() -> None:
    assert score_sequences(Reader(), [], 100).tolist() == []  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tokens"):
        score_sequences(Reader(), [np.array([1]), np.array([], np.int64)], 100)  # type: ignore[arg-type]
