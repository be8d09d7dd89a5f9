"""What a model says of its hidden states, per token.

Shapes: `T` packed tokens of a micro-batch, `S` of them scored, `B` its samples, `H` width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from winnow.algorithms.logprobs import token_logprobs
from winnow.learning.batch import MicroBatch
from winnow.learning.strategy import Output
from winnow.models.causal_lm import output_head
from winnow.models.value import is_reward_model, is_value_model, scalar_head

Found = dict[Output, Tensor]


@dataclass(frozen=True)
class Readout:
    """How a kind of model turns hidden states into outputs."""

    model: str
    """The kind of model, for messages."""
    offered: frozenset[Output]
    read: Callable[[Tensor, MicroBatch, frozenset[Output]], Found]
    """Hidden states [T, H] to what is asked for, each [T]."""

    def __call__(self, hidden: Tensor, micro: MicroBatch, outputs: frozenset[Output]) -> Found:
        """The outputs asked for, each [T].

        Raises:
            ValueError: an output that this kind of model does not have.
        """
        self.check(outputs)
        return self.read(hidden, micro, outputs)

    def check(self, outputs: frozenset[Output]) -> None:
        """Refuse what this kind of model does not have.

        Raises:
            ValueError: an output is not offered.
        """
        if not outputs <= self.offered:
            raise ValueError(
                f"{self.model} gives {', '.join(sorted(self.offered))}; "
                f"asked for {', '.join(sorted(outputs))}"
            )


def readout_of(
    model: nn.Module,
    temperature: float,
    vocab_size: int | None,
    chunk_tokens: int | None,
    fp32_head: bool,
) -> Readout:
    """The one that fits the model; a causal LM's takes the settings, which other kinds ignore."""
    if is_value_model(model):
        return Readout("a value model", frozenset({"value"}), _Values(model).read)
    if is_reward_model(model):
        return Readout("a reward model", frozenset({"score"}), _Scores(model).read)
    causal = _Logprobs(model, temperature, vocab_size, chunk_tokens, fp32_head)
    offered: frozenset[Output] = frozenset({"logprob", "entropy", "prob_square_sum"})
    return Readout("a causal LM", offered, causal.read)


@dataclass(frozen=True)
class _Logprobs:
    model: nn.Module
    temperature: float
    vocab_size: int | None
    chunk_tokens: int | None
    fp32_head: bool

    def read(self, hidden: Tensor, micro: MicroBatch, outputs: frozenset[Output]) -> Found:
        scored, head = micro.scored_positions, output_head(self.model)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, squares = token_logprobs(
            hidden.index_select(0, scored - 1),
            head.weight,
            micro.token_ids[scored],
            self.temperature,
            head.bias,
            self.vocab_size,
            with_entropy="entropy" in outputs,
            chunk_tokens=self.chunk_tokens,
            with_prob_square_sum="prob_square_sum" in outputs,
            head_dtype=exact if self.fp32_head else None,
        )
        found: Found = {}
        if "logprob" in outputs:
            found["logprob"] = _placed(logprob, scored, micro)
        if entropy is not None:
            found["entropy"] = _placed(entropy, scored, micro)
        if squares is not None:
            found["prob_square_sum"] = _placed(squares, scored, micro)
        return found


@dataclass(frozen=True)
class _Values:
    model: nn.Module

    def read(self, hidden: Tensor, micro: MicroBatch, outputs: frozenset[Output]) -> Found:
        # As a log-prob of token t comes from the state at t - 1, so does the value before it.
        scored = micro.scored_positions
        values = _one_number(self.model, hidden.index_select(0, scored - 1))
        return {"value": _placed(values, scored, micro)}


@dataclass(frozen=True)
class _Scores:
    model: nn.Module

    def read(self, hidden: Tensor, micro: MicroBatch, outputs: frozenset[Output]) -> Found:
        last = micro.offsets[1:] - 1
        return {
            "score": _placed(_one_number(self.model, hidden.index_select(0, last)), last, micro)
        }


def _one_number(model: nn.Module, hidden: Tensor) -> Tensor:
    head = scalar_head(model)
    # Called, not read: where the head is a unit of its own, the call gathers its weight.
    return cast(Tensor, head(hidden.to(head.weight.dtype)))[:, 0]


def _placed(values: Tensor, positions: Tensor, micro: MicroBatch) -> Tensor:
    """Values of some positions as [T], 0 elsewhere."""
    blank = torch.zeros(len(micro.token_ids), dtype=values.dtype, device=values.device)
    return blank.index_copy(0, positions, values)
