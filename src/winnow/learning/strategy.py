"""The seam between roles and parallelism: a strategy holds, runs and steps one model.

Shapes: `T` packed tokens of a micro-batch, `B` its samples. Everything a strategy returns per
token is aligned with `MicroBatch.token_ids`: entry t is about token t given those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from winnow.learning.batch import MicroBatch

Output = Literal["logprob", "entropy", "prob_square_sum", "value", "score"]
Outputs = Mapping[Output, Tensor]
Stats = dict[str, float]


@dataclass(frozen=True, eq=False)
class LossResult:
    """The loss and diagnostics of one micro-batch."""

    loss: Tensor
    """Scalar, already divided by the update's counts, so that micro-batches add up."""
    sums: Mapping[str, Tensor]
    """Diagnostics as sums over tokens or samples; the caller divides by the update's counts."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Diagnostics whose largest value over all micro-batches and ranks counts."""


LossFn = Callable[[MicroBatch, Outputs], LossResult]


class Strategy(Protocol):
    """Holds one model: whole (`SingleStrategy`) or sharded over ranks (`FSDP2Strategy`).

    `tests/contract/test_strategy.py` checks what is promised here.
    """

    device: torch.device
    """The device it computes on."""

    @property
    def parameters(self) -> int:
        """The number of its model's weights, over all ranks."""
        ...

    @property
    def has_adapter(self) -> bool:
        """True if an adapter is trained in the place of the model's own weights."""
        ...

    def forward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]
    ) -> list[dict[Output, Tensor]]:
        """Compute outputs without gradient, one dict a micro-batch, each value [T].

        `logprob`, `entropy` (nats), `prob_square_sum` (over the vocabulary, never with a
        gradient) and `value` are about written tokens and 0 off gen_mask: the
        value at token t is that of the state before t is written, read off the hidden state at
        t - 1 as its log-prob is. `score` stands at the last token of each sample, 0 elsewhere.

        Raises:
            ValueError: an output that this kind of model does not have, or ranks that bring
                different numbers of micro-batches.
        """
        ...

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        """Accumulate gradients of the summed losses. A list, because pipelines own that loop.

        Returns the loss, the summed diagnostics and the maxima over all micro-batches and ranks.
        """
        ...

    def optimizer_step(self, lr: float) -> Stats:
        """Clip, step, clear the gradients. A non-finite gradient norm skips the step.

        Returns `grad_norm` (before clipping) and `skipped` (0 or 1).
        """
        ...

    def export_weights(
        self, dtype: torch.dtype | None = None, adapter_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole tensors, tied ones once, one bucket alive at a time.

        Without a cast, tensors of a single process are live; masters are rounded to the type the
        model computes in. An adapter is merged into copies of the weights it belongs to; alone it
        has PEFT's names. All ranks must take all of them.

        Raises:
            ModelError: an adapter is asked for, and the model has none.
        """
        ...

    def adapter_off(self) -> AbstractContextManager[None]:
        """Let the model answer without its adapter, as before training, within the block.

        Raises:
            ModelError: it has no adapter.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return weights and optimizer state, for checkpoints."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...
