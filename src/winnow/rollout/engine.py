"""The seam between sampling and whatever writes tokens: token ids in, ids and log-probs out.

An engine knows groups only as a shared prompt with several answers. It does not score,
filter or wait for anyone; who needs an answer, and when, is the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from winnow.types import FinishReason, IntArray, Segment

if TYPE_CHECKING:
    from torch import Tensor

    from winnow.rollout.weights import Bucket


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from softmax(logits / temperature)."""

    max_tokens: int
    """Response limit; a prefix counts towards it."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then under softmax(logits)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Ends an answer; the token is kept as its last."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the tokens that complete them are kept."""


@dataclass(frozen=True, eq=False)
class AnswerRequest:
    """One answer to write, or to finish."""

    index: int
    seed: int
    """Key of this answer's random numbers, 64 bits; the number of a token is a hash of
    (seed, position), so a prefix resumes exactly where it stopped."""
    prefix: Segment | None = None
    """What was written before an abort; the engine goes on behind it."""
    greedy: bool = False
    """Temperature 0 for this answer alone, whatever its group's is."""


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """A prompt and the answers wanted; the prompt is prefilled once for all of them."""

    group_id: int
    prompt_ids: IntArray
    answers: tuple[AnswerRequest, ...]
    sampling: SamplingParams
    priority: int
    """Lower goes first: the admission index."""

    def sampling_of(self, answer: AnswerRequest) -> SamplingParams:
        """How the tokens of one of its answers are drawn."""
        return replace(self.sampling, temperature=0.0) if answer.greedy else self.sampling


@dataclass(frozen=True, eq=False)
class CompletionEvent:
    """What became of one answer, or, asked by `Engine.progress`, how far it is."""

    group_id: int
    answer: int
    kind: Literal["finished", "aborted", "failed", "running"]
    segment: Segment
    """Everything written, the request's prefix included; may be empty unless finished."""
    finish_reason: FinishReason
    """`aborted` unless finished."""
    tick: int
    """Decode tick of the engine at which it happened."""
    error: str = ""


@dataclass(frozen=True)
class EngineStatus:
    """A look at an engine; cheap enough for each turn of the scheduler."""

    slots: int
    """Answers it can write at once."""
    running: int
    queued: int
    weight_version: int
    generated_tokens: int
    """Tokens written since it started; the token account must agree with it."""
    masked_probability: float
    """Probability of ids beyond the tokenizer, which are never drawn, summed over tokens."""
    tick: int
    live_updates: bool = False
    """Whether new weights may come while answers run, which then go on with the keys and values
    they have."""
    healthy: bool = True


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """New weights for an engine; nothing beside the version where it shares the trainer's."""

    version: int
    tensors: Iterable[tuple[str, Tensor]] | None = None
    buckets: Iterable[Bucket] | None = None
    """The same, packed already by those who hold it; for an engine in another process."""


class Engine(Protocol):
    """Writes answers. Contract tests in `tests/contract/test_engine.py`."""

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups; lowest priority number first, prefixes before fresh answers."""
        ...

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait until something happened and return it, in a fixed order; [] when idle.

        Returns at decode tick `until` at the latest, with [] if nothing happened. An engine
        without ticks of its own takes no notice. A call that is cancelled loses no event.
        """
        ...

    async def progress(self) -> Sequence[CompletionEvent]:
        """What happened and is not reported yet, then a `running` event for each answer under way.

        Does not wait, and interrupts nothing. Answers that wait in the queue are left out.
        """
        ...

    async def abort(self, group_ids: Collection[int]) -> None:
        """Stop these groups; their unfinished answers come back as `aborted` events."""
        ...

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights.

        Whatever runs must have been aborted before, unless `status` says `live_updates`.
        """
        ...

    def status(self) -> EngineStatus:
        """Slots, queue, version and counters, without waiting."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...
