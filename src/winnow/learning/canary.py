"""The canary of a publication: a check that engines answer as the trainer does.

A checksum says that an engine's memory holds what was sent. It does not say that it was sent under
the right names, nor that the engine decodes with that memory and not with a copy made earlier (one
engine keeps a stale copy of a tied output layer after every update, and reports success). So both
sides score the same fixed sequences, each by its own code, and the log-probs must agree.

    expected = canary.expected(policy)                     # the trainer's, at the new weights
    await engine.load_weights(WeightUpdate(step, policy.export_weights(dtype)))
    await canary.check(expected, step, engine.engines)     # raises when one of them differs
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from winnow.errors import PublicationError, WorkerError
from winnow.learning.batch import pack_sequences
from winnow.learning.strategy import Strategy, run_pass
from winnow.rollout.engine import PublishedEngine
from winnow.types import FloatArray, IntArray


@dataclass(frozen=True)
class CanaryLimits:
    """The nats by which log-probs of the same token may differ."""

    largest: float
    mean: float
    """Bounds the mean over all tokens, where rounding errors of single tokens do not stand out."""


LENGTHS = (2, 16, 64, 512)
"""Tokens of the sequences, as far as the model has positions: faults of attention and rotary
embeddings far from the start do not show near it. 594 tokens in all."""
SCORED = 32
"""Tokens at the end of each sequence that are compared. An engine that scores a token by drawing it
pays a tick for each; the context before them costs one prefill."""
TOLERANCE: Mapping[torch.dtype, CanaryLimits] = {
    torch.float64: CanaryLimits(1e-5, 1e-6),  # log-probs are fp32 in any case
    torch.float32: CanaryLimits(5e-4, 5e-5),
    torch.bfloat16: CanaryLimits(0.5, 0.02),
}
"""Limits by dtype of the weights: five to ten times the most that was seen on a CPU over Qwen3,
Qwen2 and Llama of 4 and 8 layers with flat and peaked outputs (fp32: 4.6e-5 and 4.6e-6, bf16: 0.093
and 0.0037; the two sides attend and multiply in other shapes). `pytest
tests/unit/learning/test_canary.py` shows the faults that this catches."""
_MICROBATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Canary:
    """Fixed sequences, and the limits within which two log-probs of a token must agree."""

    sequences: tuple[IntArray, ...]
    temperature: float
    """The temperature of the strategy that is compared with."""
    limits: CanaryLimits

    @classmethod
    def drawn(
        cls,
        vocabulary: int,
        positions: int,
        dtype: torch.dtype,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> Canary:
        """Draw random tokens of all the vocabulary: each row of the embeddings counts alike.

        Args:
            vocabulary: ids that the tokenizer has.
            positions: that the model has.
            dtype: of the weights that engines hold.
            temperature: of the policy.
            seed: of the tokens; the same sequences serve the whole run.
        """
        rng = np.random.default_rng(seed)
        lengths = sorted({min(length, positions) for length in LENGTHS})
        sequences = tuple(rng.integers(0, vocabulary, n) for n in lengths)
        return cls(sequences, temperature, TOLERANCE[dtype])

    def expected(self, strategy: Strategy) -> list[FloatArray]:
        """Compute the trainer's log-probs of the last `SCORED` tokens of each sequence.

        All ranks call it.
        """
        batch = pack_sequences(self.sequences, SCORED)
        found = run_pass(strategy, batch, frozenset({"logprob"}), _MICROBATCH_TOKENS)
        ends = np.cumsum([len(s) for s in self.sequences])
        parts = np.split(found["logprob"].float().numpy(), ends)
        return [part[1:][-SCORED:] for part in parts[:-1]]

    async def check(
        self, expected: Sequence[FloatArray], version: int, engines: Mapping[str, PublishedEngine]
    ) -> float:
        """Compare the engines' log-probs; returns the largest difference in nats.

        Args:
            expected: the result of `expected` with these weights.
            version: of the weights, for the message.
            engines: by name.

        Raises:
            PublicationError: one differs by more than `limits`, or is not a number.
            WorkerError: no engine answers. Of several, one that died is left out: its next call
                tells of it.
        """
        asked = [e.logprobs_of(self.sequences, self.temperature, SCORED) for e in engines.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [error for error in errors if not isinstance(error, WorkerError)]
        if serious or len(errors) == len(answers):
            raise [*serious, *errors][0]
        largest = 0.0
        for name, found in zip(engines, answers, strict=True):
            if isinstance(found, BaseException):
                continue
            pairs = zip(found, expected, strict=True)
            gaps = np.concatenate([np.abs(own - theirs) for own, theirs in pairs])
            most, mean = float(gaps.max()), float(gaps.mean())
            if not (most <= self.limits.largest and mean <= self.limits.mean):
                raise PublicationError(
                    f"weights of version {version}: {name} does not answer as the trainer does: "
                    f"|Δlogp| of {len(gaps)} fixed tokens is {most:.3g} nats at most and "
                    f"{mean:.3g} on average, allowed are {self.limits.largest:g} and "
                    f"{self.limits.mean:g}; it decodes with other weights, or computes otherwise"
                )
            largest = max(largest, most)
        return largest
