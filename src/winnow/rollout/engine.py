"""The engine that writes answers: its protocol, its requests and its events.

Token ids go in, token ids and log-probs come out. An engine knows a group only as a shared prompt
with several answers; scoring, filtering and waiting are left to the sampler. The random numbers of
an answer depend on the run's seed, its group's turn or id and the answer's index alone, so that an
answer is the same however often it is interrupted, and wherever it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from winnow.errors import ConfigError, TrainingError
from winnow.rollout.weights import Bucket, WeightUpdate
from winnow.types import FinishReason, FloatArray, IntArray, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMPTY = Segment(np.zeros(0, np.int64), np.zeros(0, np.float32), ())
_SEED_KEY = Struct("<qqq")


@dataclass(frozen=True)
class SamplingParams:
    """Settings by which tokens are drawn from softmax(logits / temperature)."""

    max_tokens: int
    """Response limit; a prefix counts towards it."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then under softmax(logits)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, and are kept as its last."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the tokens that complete them are kept."""


@dataclass(frozen=True, eq=False)
class AnswerRequest:
    """An answer to write, or to finish."""

    index: int
    seed: int
    """Key of this answer's random numbers, 64 bits; the number of a token is a hash of
    (seed, position), so a prefix resumes exactly where it stopped."""
    prefix: Segment | None = None
    """Tokens that were written before an abort; the engine goes on behind them."""
    greedy: bool = False
    """Temperature 0 for this answer alone, whatever its group's is."""
    trained: bool = True
    """It may be trained on: an engine that records routes tells those of no other answer."""


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """A prompt and the answers wanted to it; the prompt is prefilled once for all of them."""

    group_id: int
    prompt_ids: IntArray
    answers: tuple[AnswerRequest, ...]
    sampling: SamplingParams
    priority: int
    """Lower goes first: the admission index."""

    def sampling_of(self, answer: AnswerRequest) -> SamplingParams:
        """Return the settings of one of its answers."""
        return replace(self.sampling, temperature=0.0) if answer.greedy else self.sampling


@dataclass(frozen=True, eq=False)
class CompletionEvent:
    """The end of an answer or, as told by `Engine.progress`, its state so far."""

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
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays that a finished answer's trajectory gets."""

    def __post_init__(self) -> None:
        """Refuse a finished answer that must not be learned from, where its engine reports it.

        Raises:
            TrainingError: a token has no log-prob that is a finite number.
        """
        ids, logprobs = self.segment.token_ids, self.segment.logprobs
        # A reference to arrays elsewhere is one to an event that was checked there.
        if self.kind != "finished" or not isinstance(logprobs, np.ndarray):
            return
        place = int(np.append(np.isfinite(logprobs), False).argmin())
        if not place == len(logprobs) == len(ids):
            shown = logprobs[place] if place < len(logprobs) else "nothing"
            raise TrainingError(
                f"the engine gave {shown} as the log-prob of token {place} of answer {self.answer} "
                f"of group {self.group_id}: weights or logits are not finite, or the engine is "
                "faulty; resume from an earlier checkpoint with a lower optim.lr or another "
                "model.dtype, or fix the engine"
            )

    @property
    def key(self) -> tuple[int, int]:
        """Group and answer."""
        return self.group_id, self.answer


@dataclass(frozen=True)
class EngineStatus:
    """Counters of an engine, cheap enough to be read in each turn of the sampler."""

    slots: int
    """Answers it can write at once."""
    running: int
    queued: int
    weight_version: int
    generated_tokens: int
    """Tokens written since it started; the token account must agree with it."""
    tick: int
    live_updates: bool = False
    """True if new weights may come while answers run, which then go on with the keys and values
    they have."""
    buckets: int = 0
    """Buckets of weights taken since it started."""


class Engine(Protocol):
    """Writes answers.

    A user's own engine (`rollout/engine=custom`) is a class with these methods; `EngineFactory`
    says how it is made. The contract's tests run against it with
    `WINNOW_ENGINE=FILE.py:NAME pytest tests/contract/test_engine.py` from a checkout.
    """

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups; lowest priority number first, prefixes before fresh answers."""

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait until something happened and return it, in a fixed order; [] when idle.

        Returns at decode tick `until` at the latest, with [] if nothing happened. An engine
        without ticks of its own takes no notice. A call that is cancelled loses no event.
        """

    async def progress(self) -> Sequence[CompletionEvent]:
        """Return events not reported yet, then a `running` event for each answer under way.

        Does not wait, and interrupts nothing. Answers that wait in the queue are left out.
        """

    async def abort(self, group_ids: Collection[int]) -> None:
        """Stop these groups; their unfinished answers come back as `aborted` events."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights.

        Answers under way must have been aborted before, unless `status` says `live_updates`.
        """

    def status(self) -> EngineStatus:
        """Return slots, queue, version and counters, without waiting."""

    async def close(self) -> None:
        """Release what the engine holds."""


class PublishedEngine(Engine, Protocol):
    """An `Engine` with weights of its own: in a worker's process, or one of an `EngineGroup`.

    Its `submit` returns at once, and its status counts at once what it was given.
    """

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy a bucket into the model; returns the checksum of what the model then holds.

        Bucket 0 begins an update. No token is drawn until `load_weights` brings its version alone,
        which ends it.
        """

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float, last: int
    ) -> list[FloatArray]:
        """Return log-probs in nats of the last tokens, each given all those before it.

        Under softmax(logits / temperature) over the ids that may be drawn, by the engine's own
        code. Answers may be running; they go on unchanged, and no token counts as generated.

        Args:
            sequences: token ids [L] each.
            temperature: above 0.
            last: the most tokens of a sequence to score; the first one never is.

        Returns:
            [min(last, L - 1)] for each sequence.
        """


def check_update_allowed(is_busy: bool, live_updates: bool) -> None:
    """Refuse new weights while answers are under way in an engine without live updates.

    Raises:
        ValueError: there are some.
    """
    if is_busy and not live_updates:
        raise ValueError("abort running answers first: their KV cache is of the old weights")


def engines_by_name(engine: Engine, name: str = "the engine") -> Mapping[str, PublishedEngine]:
    """Return the engines that hold weights, by name: those of a group each.

    Args:
        name: name of an engine that is no group.
    """
    members = getattr(engine, "engines", {name: engine})
    return cast("Mapping[str, PublishedEngine]", members)


class EngineFactory(Protocol):
    """The class or function that a recipe names for `rollout/engine=custom`; it makes an engine."""

    def __call__(
        self,
        *,
        model: PreTrainedModel,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str],
        live_updates: bool,
        **options: Any,
    ) -> Engine:
        """Make the engine, in the run's process.

        Args:
            model: the policy. Where it is trained in this process its own tensors have the new
                values when `load_weights` brings a version without tensors; where it is trained on
                ranks, `load_weights` brings tensors by name, and the engine needs `logprobs_of` as
                `TorchEngine` has it, for the check after each publication.
            vocab_size: ids at or beyond it must never be drawn.
            decode: token ids to text, special tokens included, for stop strings.
            live_updates: True if the run may publish while answers run; an engine that cannot
                take that says so in its status.
            options: the recipe's `rollout.engine.options`.
        """


def load_custom_engine(path: str, options: Mapping[str, Any], **arguments: Any) -> Engine:
    """Make the engine that a recipe names by its place.

    Args:
        path: `FILE.py:NAME` or `package.module:NAME`.
        options: keyword arguments of the recipe.
        arguments: the other arguments of `EngineFactory`.

    Raises:
        ConfigError: there is no such callable, it refuses its arguments, or what it makes lacks a
            method of `Engine`.
    """
    from winnow.user_code import load_user_object

    field = "rollout.engine.path"
    make = cast("EngineFactory", load_user_object(path, field, ConfigError))
    try:
        engine = make(**arguments, **options)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{field} {path}: creating the engine fails with {reason}; its keyword arguments are "
            f"{', '.join(sorted({*arguments, *options}))}"
        ) from error
    methods = ("submit", "events", "progress", "abort", "load_weights", "status", "close")
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(
            f"{field} {path}: the engine has no method {', '.join(missing)}; implement "
            "winnow.rollout.engine.Engine"
        )
    return engine


def answer_seed(run_seed: int, turn: int, answer: int) -> int:
    """Hash three numbers to 64 bits, unsigned, alike in every process and on every machine."""
    digest = blake2b(_SEED_KEY.pack(run_seed, turn, answer), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def group_request(
    group_id: int,
    prompt: Prompt,
    prefixes: Mapping[int, Segment | None],
    sampling: SamplingParams,
    run_seed: int,
    greedy: int | None = None,
    turn: int | None = None,
    trained: bool = True,
) -> GroupRequest:
    """Make the request for answers of a group.

    Args:
        prefixes: by the answer's index, what is written of it already.
        greedy: index of the one answer that is not sampled, if the group has one.
        turn: seeds the answers, with the run's seed; None: the group's id.
        trained: they may be trained on, which the greedy one is not.
    """
    turn = group_id if turn is None else turn
    answers = tuple(
        AnswerRequest(
            index,
            answer_seed(run_seed, turn, index),
            prefix,
            greedy=index == greedy,
            trained=trained and index != greedy,
        )
        for index, prefix in prefixes.items()
    )
    return GroupRequest(group_id, prompt.token_ids, answers, sampling, priority=group_id)


def trajectory_of(event: CompletionEvent) -> Trajectory:
    """Return the trajectory of one segment that a finished answer makes."""
    assert event.kind == "finished"
    return Trajectory((event.segment,), event.finish_reason, event.extras)


async def generate(
    engine: Engine, requests: Sequence[GroupRequest]
) -> dict[tuple[int, int], Trajectory]:
    """Write answers to the end; returns trajectories by (group id, answer index), without extras.

    Nothing else may be running on the engine.

    Raises:
        TrainingError: the engine gave an answer up, or fell idle before all were written.
    """
    expected = sum(len(request.answers) for request in requests)
    done: dict[tuple[int, int], Trajectory] = {}
    await engine.submit(requests)
    while len(done) < expected:
        events = await engine.events()
        if not events:
            raise TrainingError(f"the engine is idle with {expected - len(done)} answers missing")
        for event in events:
            if event.kind != "finished":
                raise TrainingError(
                    f"the engine {event.kind} answer {event.answer} of prompt {event.group_id}"
                    f"{': ' if event.error else ''}{event.error}"
                )
            done[event.key] = trajectory_of(replace(event, extras={}))
    return done
