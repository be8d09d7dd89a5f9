"""Roles that only answer and hold no optimizer: the reference policy and a reward model.

Shapes: `T` packed tokens, `B` samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from winnow.learning.batch import Batch, pack_sequences
from winnow.learning.data_parallel import NO_SHARDING, MicroBatchSharder, run_pass
from winnow.learning.strategy import Output, Strategy
from winnow.types import IntArray

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
        sharder: MicroBatchSharder = NO_SHARDING,
    ) -> None:
        self._strategy, self._during, self._sharder = strategy, during, sharder

    def logprobs(self, batch: Batch, microbatch_tokens: int) -> None:
        """Fill `batch.columns["ref"]` [T], nats; 0 off gen_mask."""
        asked: frozenset[Output] = frozenset({"logprob"})
        with self._during():
            found = run_pass(self._strategy, batch, asked, microbatch_tokens, self._sharder)
        batch.columns["ref"] = found["logprob"]


class RewardModel:
    """Score whole sequences.

    Args:
        strategy: of a model that gives `score`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def scores(self, sequences: Sequence[IntArray], microbatch_tokens: int) -> Tensor:
        """Return [B] fp32 on the CPU: one number for the token ids of each sequence.

        Raises:
            ValueError: a sequence without a token.
        """
        batch = pack_sequences(sequences)
        found = run_pass(self._strategy, batch, frozenset({"score"}), microbatch_tokens)
        return found["score"][batch.offsets[1:] - 1].to(torch.float32)
