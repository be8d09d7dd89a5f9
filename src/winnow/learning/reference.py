"""Models that only answer: the reference policy and a reward model. They hold no optimizer.

Shapes: `T` packed tokens, `B` samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from winnow.learning.batch import Batch, all_micro_batches, gather_tokens, pack
from winnow.learning.data_parallel import NO_SHARDING, MicroBatchSharder
from winnow.learning.strategy import Strategy
from winnow.types import Answer, Group, IntArray, Prompt, Score, Trajectory

Switch = Callable[[], contextlib.AbstractContextManager[None]]


class Reference:
    """The policy that a KL term measures from.

    Args:
        strategy: of a frozen model; or the policy's own, where an adapter is trained.
        during: entered while it answers, such as a strategy's `adapter_off`.
    """

    def __init__(
        self,
        strategy: Strategy,
        during: Switch = contextlib.nullcontext,
        dealer: MicroBatchSharder = NO_SHARDING,
    ) -> None:
        self._strategy, self._during, self._dealer = strategy, during, dealer

    def logprobs(self, batch: Batch, microbatch_tokens: int) -> None:
        """Fill `batch.columns["ref"]` [T], nats; 0 off gen_mask."""
        micro = self._dealer.everything(batch, microbatch_tokens)
        with self._during():
            found = self._strategy.forward(micro, frozenset({"logprob"}))
        logprobs = [each["logprob"] for each in found]
        batch.columns["ref"] = self._dealer.gather(batch, micro, logprobs)


class RewardModel:
    """Scores whole sequences.

    Args:
        strategy: of a model that gives `score`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def scores(self, sequences: Sequence[IntArray], microbatch_tokens: int) -> Tensor:
        """[B] fp32 on the CPU: one number for the token ids of each sequence.

        Raises:
            ValueError: a sequence without a token.
        """
        empty = Answer(Trajectory((), "stop"), Score(0.0, 0.0))
        batch = pack(
            [
                Group(i, Prompt(str(i), np.asarray(ids, np.int64), "", "", None), (empty,))
                for i, ids in enumerate(sequences)
            ]
        )
        micro = all_micro_batches(batch, microbatch_tokens)
        found = self._strategy.forward(micro, frozenset({"score"}))
        score = gather_tokens(batch, micro, [each["score"] for each in found])
        return score[batch.offsets[1:] - 1].to(torch.float32)
