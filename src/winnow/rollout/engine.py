"""Protocol, requests and events of engines, which generate answers.

Token ids go in, token ids and log-probs come out. To an engine a group is a shared prompt with
several answers; the sampler does the scoring and filtering. The random numbers of an answer depend
only on the run's seed, its group's turn or id, and the answer's index, so that an answer is the
same however often it is interrupted, and on any engine.
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
from winnow.types import FinishReason, FloatArray, Image, IntArray, Prompt, Segment, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ImageLists = Sequence[tuple[Image, ...]]
"""Images of each of some sequences; empty: there are none."""
MAX_FAULTS = 3
"""Attempts of an evaluation at an answer whose environment fails."""
EMPTY = Segment(np.zeros(0, np.int64), np.zeros(0, np.float32), ())
_SEED_KEY = Struct("<qqq")


@dataclass(frozen=True)
class SamplingParams:
    """Settings for sampling from softmax(logits / temperature)."""

    max_tokens: int
    """Response limit; a prefix counts towards it."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then under softmax(logits)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer; they are part of it."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the tokens that complete them are part of it."""


@dataclass(frozen=True, eq=False)
class AnswerRequest:
    """An answer to generate, or to continue."""

    index: int
    seed: int
    """Key of this answer's random numbers, 64 bits; the number of a token is a hash of
    (seed, position), so a prefix resumes exactly where it stopped."""
    prefix: Segment | None = None
    """Tokens generated before an abort, after which the engine continues."""
    greedy: bool = False
    """Temperature 0 for this answer, whatever its group's is."""
    trained: bool = True
    """True if the answer may be trained on; an engine returns routes of such answers only."""
    earlier: tuple[Segment, ...] = ()
    """Complete turns of a conversation, the model's and the environment's, before `prefix`."""
    retain_cache: bool = False
    """True if an answer that a stop token ends may be continued as a longer prefix: the engine
    may retain its keys and values where nothing else needs the memory."""


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """A prompt and its answers; the prompt is prefilled once for all of them."""

    group_id: int
    prompt_ids: IntArray
    answers: tuple[AnswerRequest, ...]
    sampling: SamplingParams
    priority: int
    """Lower goes first: the admission index."""
    prompt: Prompt | None = None
    """The prompt with its row, for an environment."""
    images: tuple[Image, ...] = ()
    """The prompt's images, placed among `prompt_ids`; an engine encodes them once."""

    def sampling_of(self, answer: AnswerRequest) -> SamplingParams:
        """Return the settings of one of its answers."""
        return replace(self.sampling, temperature=0.0) if answer.greedy else self.sampling


@dataclass(frozen=True, eq=False)
class CompletionEvent:
    """The end of an answer or, in `Engine.progress`, its state so far."""

    group_id: int
    answer: int
    kind: Literal["finished", "aborted", "failed", "running"]
    segment: Segment
    """All tokens, the request's prefix included; may be empty unless finished."""
    finish_reason: FinishReason
    """`aborted` unless finished."""
    tick: int
    """Decode tick of the engine at the event."""
    error: str = ""
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays of a finished answer's trajectory."""
    earlier: tuple[Segment, ...] = ()
    """Complete turns of a conversation before `segment`."""
    is_fault: bool = False
    """It failed in its environment, not in the engine."""

    def __post_init__(self) -> None:
        """Refuse a finished answer that must not be trained on.

        Raises:
            TrainingError: a token has no finite log-prob.
        """
        ids, logprobs = self.segment.token_ids, self.segment.logprobs
        # References to stored arrays are of an event that was checked in its process.
        if self.kind != "finished" or not isinstance(logprobs, np.ndarray):
            return
        if not (len(ids) == len(logprobs) and np.isfinite(logprobs).all()):
            place = int(np.append(np.isfinite(logprobs), False).argmin())
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
    """Counters of an engine, which the sampler reads in each turn."""

    slots: int
    """Most concurrent answers."""
    running: int
    queued: int
    weight_version: int
    generated_tokens: int
    """Tokens generated since the start; the token account must agree with it."""
    tick: int
    live_updates: bool = False
    """True if weights may change while answers run, which then continue with their keys and
    values."""
    buckets: int = 0
    """Buckets of weights received since the start."""
    is_waiting: bool = False
    """True while no token can be generated, as environments have all conversations."""


class Engine(Protocol):
    """Generates answers.

    A custom engine (`rollout/engine=custom`) is a class with these methods; `EngineFactory`
    says how it is made. The contract's tests run against it with
    `WINNOW_ENGINE=FILE.py:NAME pytest tests/contract/test_engine.py` from a checkout.
    """

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups; lowest priority number first, prefixes before fresh answers."""

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait for events and return them in a fixed order; return [] when idle.

        Returns at decode tick `until` at the latest, with [] if there are none. An engine without
        ticks ignores `until`. A cancelled call loses no event.
        """

    async def progress(self) -> Sequence[CompletionEvent]:
        """Return events not reported yet, then a `running` event for each running answer.

        Does not wait, and interrupts nothing. Queued answers are left out.
        """

    async def abort(self, group_ids: Collection[int]) -> None:
        """Stop these groups; their unfinished answers are returned as `aborted` events."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load new weights.

        Running answers must have been aborted before, unless `status` has `live_updates`.
        """

    def status(self) -> EngineStatus:
        """Return slots, queue, version and counters, without waiting."""

    async def close(self) -> None:
        """Free the engine's resources."""


class PublishedEngine(Engine, Protocol):
    """An `Engine` with separate weights: in a worker's process, or a member of an `EngineGroup`.

    Its `submit` returns at once, and its status counts submitted answers at once.
    """

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy a bucket into the model, or beside its weights; return the checksum of the copy.

        Bucket 0 starts an update, which `load_weights` with its version and no tensors ends. Until
        then no token is drawn, or the old weights draw all tokens.
        """

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float, last: int, images: ImageLists = ()
    ) -> list[FloatArray]:
        """Return log-probs in nats of the last tokens, each given all tokens before it.

        They are under softmax(logits / temperature) over the ids that may be drawn, computed by the
        engine's code. Running answers continue unchanged, and no token counts as generated.

        Args:
            sequences: token ids [L] each.
            temperature: above 0.
            last: the most tokens of a sequence to score; the first one never is.
            images: of each sequence.

        Returns:
            [min(last, L - 1)] for each sequence.
        """


class StoringEngine(PublishedEngine, Protocol):
    """A `PublishedEngine` in a worker's process, where it takes stored buckets in parts."""

    async def take_stored(
        self, update: WeightUpdate, patience_s: float, is_due: Callable[[], bool]
    ) -> bool:
        """Copy the stored buckets of an update, as `take_bucket`; return True after the last one.

        Returns False earlier if there are events, after `patience_s`, or as soon as `is_due`: it is
        to be called again.
        """


MemoryPart = Literal["weights", "cache"]
"""Parts of an engine's memory, in the order in which a sleeping one takes them again."""


class SleepingEngine(Engine, Protocol):
    """An `Engine` that gives memory back while others need it."""

    async def sleep(self) -> None:
        """Give back the cache, and weights that the next publication brings again.

        Raises:
            ValueError: answers are under way, of which the keys would be lost.
        """

    async def wake(self, part: MemoryPart) -> None:
        """Take memory again: for weights, then for the cache, which is empty."""


def check_update_allowed(is_busy: bool, live_updates: bool) -> None:
    """Refuse new weights while answers run in an engine without live updates.

    Raises:
        ValueError: answers are running.
    """
    if is_busy and not live_updates:
        raise ValueError("abort running answers first: their KV cache is of the old weights")


def check_may_sleep(is_busy: bool) -> None:
    """Refuse the sleep of an engine with answers under way.

    Raises:
        ValueError: there are some.
    """
    if is_busy:
        raise ValueError("abort what runs before the engine sleeps: its cache is dropped")


def engines_by_name(engine: Engine, name: str = "the engine") -> Mapping[str, PublishedEngine]:
    """Return the members of an engine group, or a single engine, by name.

    Args:
        name: of a single engine.
    """
    members = getattr(engine, "engines", {name: engine})
    return cast("Mapping[str, PublishedEngine]", members)


class EngineFactory(Protocol):
    """The class or function of `rollout/engine=custom` in a recipe; it makes an engine."""

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
            model: the policy. If it is trained in this process, its tensors have the new values
                when `load_weights` gets a version without tensors. If it is trained on ranks,
                `load_weights` gets tensors by name, and the engine needs `logprobs_of` as
                `TorchEngine` has it, for the check after each publication.
            vocab_size: ids at or beyond it must never be drawn.
            decode: token ids to text, special tokens included, for stop strings.
            live_updates: True if weights may be published while answers run; an engine that does
                not support it has live_updates=False in its status.
            options: the recipe's `rollout.engine.options`.
        """


def load_custom_engine(path: str, options: Mapping[str, Any], **arguments: Any) -> Engine:
    """Make a recipe's custom engine.

    Args:
        path: `FILE.py:NAME` or `package.module:NAME`.
        options: the recipe's keyword arguments.
        arguments: the other arguments of `EngineFactory`.

    Raises:
        ConfigError: there is no such callable, it raises, or its engine lacks a method of `Engine`.
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
    """Return a 64-bit hash of three numbers, the same in all processes and on all machines."""
    digest = blake2b(_SEED_KEY.pack(run_seed, turn, answer), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def group_request(
    group_id: int,
    prompt: Prompt,
    begun: Mapping[int, Sequence[Segment] | None],
    sampling: SamplingParams,
    run_seed: int,
    greedy: int | None = None,
    turn: int | None = None,
    trained: bool = True,
) -> GroupRequest:
    """Make the request for answers of a group.

    Args:
        begun: by the answer's index, its complete turns, and the tokens so far of the one under
            way; None for an answer without any.
        greedy: index of the greedy answer, if the group has one.
        turn: seeds the answers together with the run's seed; None is the group's id.
        trained: True if the sampled answers may be trained on.
    """
    turn = group_id if turn is None else turn
    answers = tuple(
        AnswerRequest(
            index,
            answer_seed(run_seed, turn, index),
            segments[-1] if segments and len(segments[-1]) else None,
            greedy=index == greedy,
            trained=trained and index != greedy,
            earlier=tuple(segments[:-1]) if segments else (),
        )
        for index, segments in begun.items()
    )
    ids, images = prompt.token_ids, prompt.images
    return GroupRequest(group_id, ids, answers, sampling, group_id, prompt, images)


def trajectory_of(event: CompletionEvent) -> Trajectory:
    """Return the trajectory of a finished answer."""
    assert event.kind == "finished"
    return Trajectory((*event.earlier, event.segment), event.finish_reason, event.extras)


async def generate(
    engine: Engine,
    requests: Sequence[GroupRequest],
    faults: dict[tuple[int, int], list[str]] | None = None,
) -> dict[tuple[int, int], Trajectory]:
    """Generate answers; return trajectories by (group id, answer index), without extras.

    The engine must be idle before.

    Args:
        faults: receives those of environments, by answer. One with `MAX_FAULTS` of them keeps the
            turns that it has.

    Raises:
        TrainingError: an answer failed, or the engine became idle before all were finished.
    """
    by_key = {(group.group_id, a.index): (group, a) for group in requests for a in group.answers}
    expected = len(by_key)
    done: dict[tuple[int, int], Trajectory] = {}
    await engine.submit(requests)
    while len(done) < expected:
        events = await engine.events()
        if not events:
            raise TrainingError(f"the engine is idle with {expected - len(done)} answers missing")
        for event in events:
            if event.is_fault and faults is not None:
                lines = faults.setdefault(event.key, [])
                lines.append(event.error)
                if len(lines) < MAX_FAULTS:
                    group, answer = by_key[event.key]
                    answer = replace(answer, earlier=event.earlier)
                    await engine.submit([replace(group, answers=(answer,))])
                    continue
            elif event.kind != "finished":
                raise TrainingError(
                    f"the engine {event.kind} answer {event.answer} of prompt {event.group_id}"
                    f"{': ' if event.error else ''}{event.error}"
                )
            segments = event.earlier if event.is_fault else (*event.earlier, event.segment)
            done[event.key] = Trajectory(segments, event.finish_reason)
    return done
