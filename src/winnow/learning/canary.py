"""The canary of a publication: a check that engines answer as the trainer does.

A checksum says that an engine's memory holds what was sent. It does not say that it was sent under
the right names, nor that the engine decodes with that memory and not with a copy made earlier (one
engine keeps a stale copy of a tied output layer after every update, and reports success). So both
sides score the same fixed sequences, each by its own code, and the log-probs must agree.

    expected = canary.expected(policy)                     # the trainer's, at the new weights
    await engine.load_weights(WeightUpdate(step, policy.export_weights(dtype)))
    await canary.check(expected, step, engine.engines)     # raises when one of them differs

How far a correct engine is off is a matter of rounding, and models differ in what they make of
it: with depth, and with the spread of their logits, it grows by orders of magnitude. So the trainer
measures it, at each publication: it scores some of the sequences a second time with every number of
the embeddings moved up or down by one rounding step, which makes all later operations round
otherwise. The limits are a multiple of the difference that this makes. They depend on the weights
alone: an engine has no part in them, and a resumed run has the same ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

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


@dataclass(frozen=True, eq=False)
class CanaryScores:
    """The trainer's answer to the canary's sequences at one version of the weights."""

    logprobs: tuple[FloatArray, ...]
    """[min(SCORED, L - 1)] in nats for each sequence [L]."""
    limits: CanaryLimits


LENGTHS = (2, 16, 64, 512)
"""Tokens of the sequences, as far as the model has positions: faults of attention and rotary
embeddings far from the start do not show near it."""
SCORED = 32
"""Tokens at the end of each sequence that are compared, 80 in all. An engine that scores a token by
drawing it pays a tick for each; the context before them costs one prefill."""
_NUDGED_LENGTH = 64
"""The longest sequence that is scored a second time: rounding depends little on the length."""
ALLOWED: Mapping[torch.dtype, float] = {
    torch.float64: 16.0,  # log-probs are fp32 in any case
    torch.float32: 16.0,
    torch.bfloat16: 1.75,
}
"""The mean difference that is allowed, in multiples of the one that rounding makes, by dtype of the
weights. Correct engines have at most 1.5 (fp32) and 1.1 (bf16): `benchmarks/results/canary.md`.
A stale output layer of weights 5 % apart has 10,000 and more in fp32, so that there is room; in
bf16 it has 2 to 6 where layers are few, and less in deep models."""
LARGEST = 10.0
"""A single token may be off by so many times the mean that is allowed. Correct engines have at most
9 times what rounding makes."""
CEILING = 16.0
"""The most that rounding may account for, in machine epsilons of the logits' spread: some 1,500
roundings one after the other on each side, a dozen for each of 128 layers. The log-probs of a model
that moves further cannot be checked in this dtype."""
_MICROBATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Canary:
    """Fixed sequences, and what is needed to tell how far two log-probs of a token may differ."""

    sequences: tuple[IntArray, ...]
    temperature: float
    """The temperature of the strategy that is compared with."""
    dtype: torch.dtype
    """The dtype of the weights that engines hold."""

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
        return cls(sequences, temperature, dtype)

    def expected(self, strategy: Strategy) -> CanaryScores:
        """Compute the trainer's log-probs, and the limits that they set; all ranks call it."""
        logprobs = _logprobs(strategy, self.sequences)
        short = [ids for ids in self.sequences if len(ids) <= _NUDGED_LENGTH]
        with _nudged(strategy.model):
            nudged = _logprobs(strategy, short)
        every = np.concatenate(logprobs)
        moved = np.concatenate(nudged) - np.concatenate(logprobs[: len(short)])
        return CanaryScores(tuple(logprobs), self._limits(every, moved))

    def _limits(self, logprobs: FloatArray, moved: FloatArray) -> CanaryLimits:
        """Derive the limits from log-probs and from how far rounding moved some of them."""
        # Log-probs of random ids spread as logits do, from which they differ by a log-sum-exp that
        # hardly varies.
        most = CEILING * torch.finfo(self.dtype).eps * float(logprobs.std())
        # Log-probs are fp32 numbers, which a flat model's may differ by and no more.
        least = torch.finfo(torch.float32).eps * float(np.abs(logprobs).mean())
        mean = ALLOWED[self.dtype] * max(min(float(np.abs(moved).mean()), most), least)
        return CanaryLimits(LARGEST * mean, mean)

    async def check(
        self, expected: CanaryScores, version: int, engines: Mapping[str, PublishedEngine]
    ) -> float:
        """Compare the engines' log-probs; returns the largest difference in nats.

        Args:
            expected: the result of `expected` with these weights.
            version: of the weights, for the message.
            engines: by name.

        Raises:
            PublicationError: one differs by more than the limits, or is not a number.
            WorkerError: no engine answers. Of several, one that died is left out: its next call
                tells of it.
        """
        asked = [e.logprobs_of(self.sequences, self.temperature, SCORED) for e in engines.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [error for error in errors if not isinstance(error, WorkerError)]
        if serious or len(errors) == len(answers):
            raise [*serious, *errors][0]
        largest, limits = 0.0, expected.limits
        for name, found in zip(engines, answers, strict=True):
            if isinstance(found, BaseException):
                continue
            pairs = zip(found, expected.logprobs, strict=True)
            gaps = np.concatenate([np.abs(own - theirs) for own, theirs in pairs])
            most, mean = float(gaps.max()), float(gaps.mean())
            if not (most <= limits.largest and mean <= limits.mean):
                raise PublicationError(
                    f"weights of version {version}: {name} does not answer as the trainer does: "
                    f"|Δlogp| of {len(gaps)} fixed tokens is {most:.3g} nats at most and "
                    f"{mean:.3g} on average, allowed are {limits.largest:.3g} and "
                    f"{limits.mean:.3g}; it decodes with other weights, or computes otherwise"
                )
            largest = max(largest, most)
        return largest


def _logprobs(strategy: Strategy, sequences: Sequence[IntArray]) -> list[FloatArray]:
    """Return the strategy's log-probs of the last `SCORED` tokens of each sequence."""
    batch = pack_sequences(sequences, SCORED)
    found = run_pass(strategy, batch, frozenset({"logprob"}), _MICROBATCH_TOKENS)
    parts = np.split(found["logprob"].float().numpy(), batch.offsets[1:-1].numpy())
    return [part[1:][-SCORED:] for part in parts]


@contextlib.contextmanager
def _nudged(model: nn.Module) -> Iterator[None]:
    """Move every number that the embeddings give by one rounding step, by turns up and down."""

    def nudge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale = torch.ones(output.shape[-1], dtype=output.dtype, device=output.device)
        step = torch.finfo(output.dtype).eps
        scale[::2] += step
        scale[1::2] -= step
        return output * scale

    hook = cast(Any, model).get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()
