"""The vocabulary of Winnow as types: prompts, segments, trajectories, scores, groups.

Frozen, without torch, so that every layer can use them. Shape suffixes: `L` tokens of one
segment or prompt. Token ids are the truth from the engine to the loss; text is for scorers
and people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

Source = Literal["model", "environment"]
PROMPT_ROUTES, ROUTES = "prompt_routes", "routes"
"""Names of the experts that tokens went to in the engine, among a trajectory's extras."""
FinishReason = Literal["stop", "length", "aborted"]
Fate = Literal["trained", "all_right", "all_wrong", "surplus", "stale", "failed"]
"""Ends of a group's life; each token is booked under one of these."""
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(frozen=True, eq=False)
class Image:
    """An image among the tokens of a prompt or of an environment's turn, as the model sees it."""

    start: int
    """Place of its first token in the `token_ids` that it belongs to; `len(image)` follow."""
    grid: tuple[int, int]
    """Rows and columns of its tokens."""
    png: bytes = field(repr=False)
    """The RGB image, resized to what the model takes."""
    digest: str
    """SHA-256 of `png`, hexadecimal."""

    def __len__(self) -> int:
        return self.grid[0] * self.grid[1]

    def at(self, start: int) -> Image:
        """Return the image at another place."""
        return replace(self, start=start)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of data, rendered and tokenized, ready to be asked.

    Example: `Prompt("0", ids, "5391:", "sort_digits", "1359", {"split": "train"})`.
    """

    uid: str
    """Names the row for good: the same whenever the row comes round again."""
    token_ids: IntArray
    """[L] what the policy is given, chat template included."""
    text: str
    """The text of `token_ids`, for scorers and people."""
    data_source: str
    """Routes the answer to a scorer."""
    ground_truth: Any
    """The answer that the scorer compares with, in whatever form it wants."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row (verl's `extra_info` under its own name)."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation that `text` renders, each with `role` and `content`, for models with a chat
    template of their own. Whole, where a length limit cut `text`."""
    row_messages: tuple[Mapping[str, Any], ...] = ()
    """The row's messages, if an environment began the conversation with others."""
    images: tuple[Image, ...] = ()
    """In the order of their tokens."""


def join_images(parts: Iterable[tuple[int, tuple[Image, ...]]]) -> tuple[Image, ...]:
    """Place the images of runs of tokens in the whole.

    Args:
        parts: tokens of a run, and its images.
    """
    images, start = list[Image](), 0
    for length, placed in parts:
        images += [image.at(start + image.start) for image in placed]
        start += length
    return tuple(images)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weight version that sampled the tokens up to `stop` (from the span before it)."""

    version: int
    stop: int

    def __reduce__(self) -> tuple[Any, ...]:
        # What dataclasses do for slots looks all fields up each time; a batch has a span a sample.
        return VersionSpan, (self.version, self.stop)


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of tokens with one author.

    Its arrays may be `ArrayRef`s (`winnow.workers`), which lie elsewhere until numpy asks for them.
    """

    token_ids: IntArray
    """[L]"""
    logprobs: FloatArray
    """[L] nats, under softmax(logits / T) of the policy that sampled each token (behav)."""
    spans: tuple[VersionSpan, ...]
    """Cover [0, L) in order; empty for tokens that no policy wrote."""
    source: Source = "model"
    reward: float = 0.0
    """An environment's reward for a turn of the model."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of a turn: `calls`, `malformed` (calls that cannot be parsed), and what the
    environment measured of the conversation so far."""
    state: str = ""
    """The state of an environment behind its last reply as JSON, if it has one."""
    images: tuple[Image, ...] = ()
    """Images that an environment showed, in the order of their tokens."""
    restarts: bool = False
    """True if the tokens are a conversation rendered anew: the complete context of what follows,
    in place of the prompt and all segments before."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One attempt at a prompt: one or more segments.

    A single-turn answer is the case of one segment. `extras` are named, typed arrays that
    travel with the sample. Two are read, of a mixture whose routes are replayed: for P tokens of
    the prompt and A behind it, `prompt_routes` [P-1, layers, k] and `routes` [A, layers, k], the
    experts of each token that was an input, which the last one never was. All answers of a group
    may share the first.
    """

    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    extras: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def token_ids(self) -> IntArray:
        """[L] every token after the prompt. Made, and where it is stored fetched, at each call."""
        return np.concatenate([segment.token_ids for segment in self.segments])

    @property
    def logprobs(self) -> FloatArray:
        """[L] behaviour log-probs in nats; 0 on tokens the policy did not write. Made anew, too."""
        return np.concatenate([segment.logprobs for segment in self.segments])

    @cached_property
    def gen_mask(self) -> BoolArray:
        """[L] true on tokens that the policy wrote."""
        parts = [np.full(len(s), s.source == "model", dtype=bool) for s in self.segments]
        return np.concatenate(parts)

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(len(s) for s in self.segments if s.source == "model")

    @property
    def last_turn(self) -> Segment:
        """The last segment that the policy wrote: the answer of a conversation."""
        return next(s for s in reversed(self.segments) if s.source == "model")

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of all segments, placed among `token_ids`."""
        return join_images((len(s), s.images) for s in self.segments)

    @property
    def turns(self) -> tuple[Segment, ...]:
        """The segments that the policy wrote."""
        return tuple(s for s in self.segments if s.source == "model")

    @property
    def truncated(self) -> bool:
        """True if the response limit ended it."""
        return self.finish_reason == "length"

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that wrote it, oldest first, each once."""
        return tuple(sorted({span.version for s in self.segments for span in s.spans}))


@dataclass(frozen=True, eq=False)
class Score:
    """The worth of an answer: accuracy is for filters and people, reward for learning."""

    reward: float
    """The number that learning sees: the sum of `parts`, each by its weight."""
    accuracy: float
    """0..1"""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of `reward` before weights: `task`, `overlong`, a reward model's, …"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that the scorer said (`pred`, …); numbers can be filtered on."""
    error: str = ""
    """Why scoring failed; empty when it did not."""
    outside: bool = False
    """It failed in a sandbox, which is never the answer's fault: its group is not trained on."""
    has_accuracy: bool = True
    """The scorer gave the accuracy; else it is 1 where the reward is above 0."""

    def metric(self, name: str) -> float:
        """The number a filter asks for: accuracy, reward, task_reward or a scorer's own key.

        Raises:
            KeyError: no such number here.
        """
        if name == "accuracy":
            return self.accuracy
        if name == "reward":
            return self.reward
        if name == "task_reward":
            return self.parts.get("task", self.reward)
        return float(self.parts[name] if name in self.parts else self.extra[name])


@dataclass(frozen=True, eq=False)
class Answer:
    """One scored attempt at a prompt."""

    trajectory: Trajectory
    score: Score


@dataclass(frozen=True, eq=False)
class Group:
    """One admitted prompt and its n scored answers: atomic in filter, cut, carry and checkpoint.

    `id` is the admission index: a prompt that comes round again makes a new group.
    """

    id: int
    prompt: Prompt
    answers: tuple[Answer, ...]
    baseline: Answer | None = None
    """A greedy answer to the same prompt, scored and not trained on (ReMax)."""

    @property
    def generated_tokens(self) -> int:
        """Tokens the policy wrote in all answers, the baseline's not counted."""
        return sum(answer.trajectory.generated_tokens for answer in self.answers)

    @property
    def scored(self) -> tuple[Answer, ...]:
        """Its answers, and behind them the baseline if there is one."""
        return self.answers if self.baseline is None else (*self.answers, self.baseline)

    @property
    def without_extras(self) -> Group:
        """The group without the extras of its answers, which are large and for the policy only."""
        made = [replace(a, trajectory=replace(a.trajectory, extras={})) for a in self.answers]
        return replace(self, answers=tuple(made))


@dataclass(frozen=True, eq=False)
class SettledGroup:
    """A group whose life ended, and its fate."""

    group: Group
    """A failed or dropped group holds only those answers that were finished and scored."""
    fate: Fate
    admitted_version: int
    staleness: int
    """Versions between its oldest token and the weights that learn the step that settled it."""
    tokens: int
    """Generated for it, unfinished answers included."""
    turn: int = -1
    """Its prompt's place among those that the loader gave out; by default the group's id, as in
    older states."""

    def __post_init__(self) -> None:
        if self.turn < 0:
            object.__setattr__(self, "turn", self.group.id)
