"""The canary of a publication: a check that engines answer as the trainer does.

A checksum says that an engine's memory holds what was sent. It does not say that it was sent under
the right names, nor that the engine decodes with that memory and not with a copy made earlier (one
engine keeps a stale copy of a tied output layer after every update, and reports success). So both
sides score the same fixed sequences, each by its own code, and the log-probs must agree.

    expected = canary.score(policy)                     # the trainer's, at the new weights
    await engine.load_weights(WeightUpdate(step, policy.export_weights(dtype)))
    await canary.check(expected, step, engine.engines)     # raises when one of them differs

How far a correct engine is off is a matter of rounding, and models differ in what they make of
it: with depth, and with the spread of their logits, it grows by orders of magnitude. So the trainer
measures it, at each publication: it scores copies of the short sequences, too, each time with
another eighth of their embeddings' columns moved by one rounding step. That is no more than a few
roundings of the embeddings, and makes all later operations round otherwise, so that the passes are
samples of the trainer's own rounding errors. All are rows of one forward pass: ranks gather the
weights once. Two figures come from them:

- their mean absolute deviation from their mean, over all tokens, is the unit of the limits;
- their mean is the answer that is expected: the trainer's own rounding error is averaged out of it,
  and what remains in a difference is the engine's.

Of `P` passes an engine that rounds as the trainer does is off by sqrt((P + 1) / (P - 1)) units
where answers are averaged, and by sqrt(2 P / (P - 1)) where they are not, in the long sequence. The
mean over 96 tokens lies close to that, whatever the model, and what other weights do adds to it.
The limits depend on the weights alone: an engine has no part in them, and a resumed run has the
same ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from winnow.data.images import VisionInput
from winnow.errors import PublicationError, WorkerError
from winnow.learning.batch import Batch, MicroBatch, pack_sequences
from winnow.learning.strategy import Strategy
from winnow.models.vision import noise_image
from winnow.rollout.engine import PublishedEngine
from winnow.types import FloatArray, Image, IntArray


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
    """[min(SCORED, L - 1)] in nats for each sequence [L]; means of passes but for the last."""
    limits: CanaryLimits


LENGTHS = (25, 25, 25, 512)
"""Tokens of the sequences, as far as the model has positions: faults of attention and rotary
embeddings far from the start do not show near it."""
SCORED = 24
"""Tokens at the end of each sequence that are compared, 96 in all. An engine that scores a token
by drawing it pays a tick for each; the context before them costs one prefill."""
_NUDGES = 3
"""Copies of all sequences but the long one: rounding depends little on length."""
_NUDGE = "nudge"
"""The column [T] of a batch that says from what place on a token's embedding is moved, or -1."""
ALLOWED: Mapping[torch.dtype, float] = {
    torch.float64: 16.0,  # log-probs are fp32 in any case
    torch.float32: 16.0,
    torch.bfloat16: 2.2,
}
"""The mean difference that is allowed, in units of rounding, by dtype of the weights. Correct
engines have at most 1.8 (`benchmarks/results/canary.md`). A stale output layer of weights 5 % apart
has 2.2 to 10 in bf16, least where layers are many, and 70,000 and more in fp32, so that there is
room."""
LARGEST = 10.0
"""A single token may be off by so many times the mean that is allowed: 22 units in bf16, of which
correct engines have at most 12."""
CEILING = 16.0
"""The most that rounding may account for, in machine epsilons of the logits' spread: some 1,500
roundings one after the other on each side, a dozen for each of 128 layers. The log-probs of a model
that moves further cannot be checked in this dtype."""
_MICROBATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Canary:
    """Fixed sequences, and what bounds how far two log-probs of a token may differ."""

    sequences: tuple[IntArray, ...]
    temperature: float
    """The temperature of the strategy that is compared with."""
    dtype: torch.dtype
    """The dtype of the weights that engines hold."""
    images: tuple[tuple[Image, ...], ...] = ()
    """Images of each sequence; empty: there are none."""

    @classmethod
    def random(
        cls,
        vocabulary: int,
        positions: int,
        dtype: torch.dtype,
        temperature: float = 1.0,
        seed: int = 0,
        vision: VisionInput | None = None,
    ) -> Canary:
        """Draw random tokens of all the vocabulary: each row of the embeddings counts alike.

        Args:
            vocabulary: ids that the tokenizer has.
            positions: that the model has.
            dtype: of the weights that engines hold.
            temperature: of the policy.
            seed: of the tokens; the same sequences serve the whole run.
            vision: of a vision-language model, which gets noise as an image behind the first token.
        """
        rng = np.random.default_rng(seed)
        sequences = [rng.integers(0, vocabulary, min(n, positions)) for n in LENGTHS]
        images: tuple[tuple[Image, ...], ...] = ()
        if vision is not None:
            image = noise_image(vision.processor, 2, 3)
            sequences[0] = np.insert(sequences[0], 1, [vision.config.image_token_id] * len(image))
            images = ((image.at(1),), *[()] * (len(sequences) - 1))
        return cls(tuple(sequences), temperature, dtype, images)

    def score(self, strategy: Strategy) -> CanaryScores:
        """Compute the trainer's log-probs, and the limits that they set; all ranks call it."""
        count, short = len(self.sequences), self.sequences[:-1]
        images = (*self.images, *self.images[:-1] * _NUDGES)
        batch = pack_sequences([*self.sequences, *short * _NUDGES], SCORED, images)
        places = [-1] * count + [place for place in range(_NUDGES) for _ in short]
        batch.columns[_NUDGE] = torch.from_numpy(np.repeat(places, batch.lengths))
        logprobs = _logprobs(strategy, batch)
        exact, nudged = logprobs[:count], logprobs[count:]
        passes = [exact[:-1]]
        passes += [nudged[i : i + len(short)] for i in range(0, len(nudged), len(short))]
        samples = np.array(passes)  # [passes, sequences, SCORED]
        means = samples.mean(0)
        limits = self._limits(np.concatenate(exact), samples - means)
        return CanaryScores((*means, exact[-1]), limits)

    def _limits(self, logprobs: FloatArray, moved: FloatArray) -> CanaryLimits:
        """Derive the limits from log-probs and from how far rounding moves some of them."""
        # Log-probs of random ids spread as logits do, from which they differ by a log-sum-exp that
        # hardly varies.
        most = CEILING * rounding_step(self.dtype) * float(logprobs.std())
        # Log-probs are fp32 numbers, which a flat model's may differ by and no more.
        least = rounding_step(torch.float32) * float(np.abs(logprobs).mean())
        mean = ALLOWED[self.dtype] * max(min(float(np.abs(moved).mean()), most), least)
        return CanaryLimits(LARGEST * mean, mean)

    async def check(
        self, expected: CanaryScores, version: int, engines: Mapping[str, PublishedEngine]
    ) -> float:
        """Compare the engines' log-probs; returns the largest difference in nats.

        Args:
            expected: the result of `score` with these weights.
            version: of the weights, for the message.
            engines: by name.

        Raises:
            PublicationError: one differs by more than the limits, or is not a number.
            WorkerError: no engine answers. Of several, one that died is left out: its next call
                raises.
        """
        fixed = self.sequences, self.temperature, SCORED, *([self.images] if self.images else ())
        calls = [engine.logprobs_of(*fixed) for engine in engines.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [error for error in errors if not isinstance(error, WorkerError)]
        if serious or len(errors) == len(answers):
            raise [*serious, *errors][0]
        largest, limits = 0.0, expected.limits
        for name, answer in zip(engines, answers, strict=True):
            if isinstance(answer, BaseException):
                continue
            pairs = zip(answer, expected.logprobs, strict=True)
            gaps = np.concatenate([np.abs(actual - reference) for actual, reference in pairs])
            most, mean = float(gaps.max()), float(gaps.mean())
            if not (most <= limits.largest and mean <= limits.mean):
                raise PublicationError(
                    f"weights of version {version}: {name} disagrees with the trainer: |Δlogp| of "
                    f"{len(gaps)} fixed tokens is at most {most:.3g} nats and {mean:.3g} on "
                    f"average, the limits are {limits.largest:.3g} and {limits.mean:.3g}; its "
                    "weights are stale or its arithmetic differs"
                )
            largest = max(largest, most)
        return largest


def rounding_step(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number of a type."""
    return torch.finfo(dtype).eps


def _logprobs(strategy: Strategy, batch: Batch) -> list[FloatArray]:
    """Return the log-probs of the last `SCORED` tokens of each sequence."""
    parts = strategy.sharder.all_micro_batches(batch, _MICROBATCH_TOKENS)
    values = []
    for micro in parts:
        with _nudged_embeddings(strategy, micro):
            (outputs,) = strategy.forward([micro], frozenset({"logprob"}))
        values.append(outputs["logprob"])
    logprobs = strategy.sharder.gather(batch, parts, values).float().numpy()
    return [part[1:][-SCORED:] for part in np.split(logprobs, batch.offsets[1:-1].numpy())]


@contextlib.contextmanager
def _nudged_embeddings(strategy: Strategy, micro: MicroBatch) -> Iterator[None]:
    """Move every eighth number of a token's embedding by one rounding step, from its place on."""
    places = strategy.local_tokens(micro.columns[_NUDGE], -1)

    def nudge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Behind the last token is padding, or all of it where a rank has none.
        padded = F.pad(places, (0, output.shape[-2] - len(places)), value=-1).to(output.device)
        columns = torch.arange(output.shape[-1], device=output.device) % 8
        step = 1 + rounding_step(output.dtype)
        return output * torch.ones_like(output).masked_fill_(padded[:, None] == columns, step)

    embeddings = strategy.embeddings
    hook = None if embeddings is None else embeddings.register_forward_hook(nudge)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
