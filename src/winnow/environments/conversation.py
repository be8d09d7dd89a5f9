"""Conversations over any engine: turns of the policy, and replies of environments between them.

    submit ─► first turn ─► engine ─► parsed turn ─► environment ─► reply's ids ─► next turn ─► …
                                                        └─ done, or a limit ─► one finished event

To the engine below, a turn is an answer that continues behind a prefix: all tokens so far, of
either author. So sampled ids are never rendered again, random numbers go on with the position, and
every engine can do it. To the sampler above, a conversation is one answer of several segments.

A conversation may be rendered anew with each reply instead (`environment.history=fork`). Where the
result does not continue its tokens it becomes the prompt of the next turn, in a segment that
`restarts`: a branch, with random numbers of its own.

In deterministic mode a reply is seen a fixed number of decode ticks after its turn, as scores are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from winnow.data.chat_template import TurnTokenizer
from winnow.environments import Message, Step, Turn, messages_of
from winnow.errors import EnvironmentFault
from winnow.rollout.engine import (
    EMPTY,
    AnswerRequest,
    CompletionEvent,
    Engine,
    EngineStatus,
    GroupRequest,
    SamplingParams,
    answer_seed,
)
from winnow.rollout.weights import WeightUpdate
from winnow.types import FinishReason, IntArray, Prompt, Segment, VersionSpan

Key = tuple[int, int]
"""Group and answer."""


class Environments(Protocol):
    """The environments of all conversations, wherever they run."""

    async def step(self, conversation: int, prompt: Prompt, turns: Sequence[Turn]) -> list[Step]:
        """Return the replies to the last turns of a conversation, to one turn at least.

        An environment that is not there any more is made again, and replays all turns.

        Args:
            conversation: a key that no other one has.
            turns: all of the policy's, of which the last has no reply yet.

        Raises:
            EnvironmentFault: the environment fails.
        """

    def close_conversation(self, conversation: int) -> None:
        """Free the environment of a conversation."""


@dataclass(frozen=True)
class ConversationLimits:
    """Limits of a conversation."""

    turns: int
    """Most turns of the policy."""
    turn_tokens: int | None = None
    """Most tokens of a turn, if there is a limit."""


@dataclass(eq=False)
class Conversation:
    """A conversation under way."""

    group: GroupRequest
    request: AnswerRequest
    segments: list[Segment]
    """Complete ones: a turn of the policy, a reply, a turn, …"""
    turns: list[Turn] = field(default_factory=list)
    replies: dict[int, Sequence[Message]] = field(default_factory=dict)
    """By turn; all of them where they are rendered anew."""
    reply: asyncio.Task[list[Step]] | None = None
    """The environment's reply to the last turn, while it is waited for."""
    due: int = 0
    """Decode tick at which the reply is seen in deterministic mode."""
    tick: int = 0
    """Decode tick at the end of the last turn."""

    @property
    def key(self) -> Key:
        """Group and answer."""
        return self.group.group_id, self.request.index

    @property
    def branch(self) -> Sequence[Segment]:
        """The complete segments behind the context that the engine gets as a prompt."""
        restarts = [place for place, each in enumerate(self.segments, 1) if each.restarts]
        return self.segments[restarts[-1] :] if restarts else self.segments

    @property
    def length(self) -> int:
        """Tokens of the branch."""
        return sum(map(len, self.branch))

    @property
    def prompt_ids(self) -> IntArray:
        """The context before the branch: the prompt, or the conversation as rendered anew."""
        at = len(self.segments) - len(self.branch)
        return self.segments[at - 1].token_ids if at else self.group.prompt_ids

    @property
    def seed(self) -> int:
        """Key of the branch's random numbers."""
        seed, restarts = self.request.seed, sum(each.restarts for each in self.segments)
        # Hashed as a number of 63 bits, since those of the hash have a sign.
        return answer_seed(seed >> 1, restarts, self.request.index) if restarts else seed

    @property
    def max_tokens(self) -> int:
        """The most tokens of the branch: its context stays within that of one answer, and all turns
        together within the tokens of one."""
        limit, size = self.group.sampling.max_tokens, len(self.group.prompt_ids)
        sampled = sum(len(each) for each in self.segments if each.source == "model")
        return min(size + limit - len(self.prompt_ids), limit - sampled + self.length)

    def event(self, kind: Any, segment: Segment = EMPTY, **fields: Any) -> CompletionEvent:
        """Return an event of the conversation; `segment` is its turn under way."""
        fields = {"finish_reason": "aborted", "tick": self.tick, **fields}
        return CompletionEvent(*self.key, kind, segment, earlier=tuple(self.segments), **fields)


class ConversationEngine:
    """Implements `Engine` for conversations, over an engine that writes their turns.

    Args:
        engine: writes turns; nothing else may submit to it.
        tokenizer: gives the tokens of replies.
        parse: makes a turn of its text.
        decode: token ids of a turn, without its stop token, to text.
        environments: reply to turns.
        message_of: makes a message of a turn, of its text and what was parsed, for the template to
            render it anew; None keeps conversations as they were sampled.
        deterministic: replies are seen `lag_ticks` after their turns, or once the engine is idle.
        look_ticks: replies are then seen at multiples of this only.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TurnTokenizer,
        parse: Callable[[str], Turn],
        decode: Callable[[IntArray], str],
        environments: Environments,
        limits: ConversationLimits,
        *,
        message_of: Callable[[str, Turn], Message] | None = None,
        deterministic: bool,
        lag_ticks: int = 0,
        look_ticks: int = 1,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._parse, self._decode = parse, decode
        self._environments, self._limits, self._message_of = environments, limits, message_of
        self._deterministic = deterministic
        self._lag_ticks, self._look_ticks = lag_ticks, look_ticks
        self._live: dict[Key, Conversation] = {}
        self._events: list[CompletionEvent] = []  # not returned yet
        self._aborted: OrderedDict[int, Conversation] = OrderedDict()
        """By seed, those whose environments are kept for going on."""

    def __getattr__(self, name: str) -> Any:
        # Methods that engines may have beyond the protocol: members, sleep, publication by buckets.
        return getattr(self._engine, name)

    # -- the protocol ---------------------------------------------------------------------------

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Begin conversations, or continue them behind the segments of their requests."""
        fresh = []
        for group in groups:
            begun = []
            for request in group.answers:
                conversation = self._open(group, request)
                self._live[conversation.key] = conversation
                if conversation.segments or request.prefix:
                    await self._continue(conversation)
                else:
                    begun.append(request)
            if begun:
                sampling = self._turn_sampling(self._live[group.group_id, begun[0].index])
                fresh.append(replace(group, answers=tuple(begun), sampling=sampling, prompt=None))
        if fresh:
            await self._engine.submit(fresh)

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait for ends of conversations; return [] at tick `until`, or when idle.

        Raises:
            ModelError: the chat template fails with a reply.
        """
        while not self._events:
            is_over = await (self._advance(until) if self._deterministic else self._wait())
            if is_over:
                break
        events, self._events = self._events, []
        return events

    async def progress(self) -> Sequence[CompletionEvent]:
        running = []
        for event in await self._engine.progress():
            if event.kind == "running":
                conversation = self._live[event.group_id, event.answer]
                running.append(self._turn_event(conversation, event))
            else:
                self._handle(event)
        running += [each.event("running") for each in self._waiting()]
        events, self._events = self._events, []
        return [*events, *sorted(running, key=lambda event: event.key)]

    async def abort(self, group_ids: Collection[int]) -> None:
        await self._engine.abort(group_ids)
        ids = set(group_ids)
        for conversation in [each for each in self._waiting() if each.group.group_id in ids]:
            self._events.append(conversation.event("aborted"))
            self._set_aside(conversation)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._engine.load_weights(update)

    def status(self) -> EngineStatus:
        status = self._engine.status()
        return replace(status, running=status.running + sum(1 for _ in self._waiting()))

    async def close(self) -> None:
        """Cancel what is waited for, and close the engine."""
        tasks = [each.reply for each in [*self._live.values(), *self._aborted.values()]]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(t for t in tasks if t is not None), return_exceptions=True)
        self._live.clear()
        await self._engine.close()

    # -- waiting --------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[Conversation]:
        """Yield the conversations whose environments have the turn."""
        return (each for each in self._live.values() if each.reply is not None)

    async def _advance(self, until: int | None) -> bool:
        """Run the engine to the next event, reply or `until`; return whether to wait no more."""
        due = min((each.due for each in self._waiting()), default=None)
        status = self._engine.status()
        is_idle = not status.running + status.queued
        if due is not None and (status.tick >= due or is_idle):
            replied = sorted(self._waiting(), key=lambda each: (each.due, each.key))
            for conversation in replied:
                if is_idle or conversation.due <= status.tick:
                    await self._take_reply(conversation)
            return False
        limits = [tick for tick in (due, until) if tick is not None]
        events = await self._engine.events(min(limits, default=None))
        for event in events:
            self._handle(event)
        is_late = until is not None and self._engine.status().tick >= until
        return is_late or (not events and due is None)

    async def _wait(self) -> bool:
        """Wait for an event of the engine or a reply; return whether there is nothing to wait for.

        A cancelled wait loses nothing: events are handled by the task that gets them.
        """
        status = self._engine.status()
        replies = [each.reply for each in self._waiting() if each.reply is not None]
        if not replies and not status.running + status.queued:
            return True
        collecting = asyncio.ensure_future(self._collect())
        try:
            await asyncio.wait([collecting, *replies], return_when=asyncio.FIRST_COMPLETED)
        finally:
            collecting.cancel()
            (outcome,) = await asyncio.gather(collecting, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome
        for conversation in [each for each in self._waiting() if each.reply and each.reply.done()]:
            await self._take_reply(conversation)
        return False

    async def _collect(self) -> None:
        for event in await self._engine.events():
            self._handle(event)

    # -- turns and replies ----------------------------------------------------------------------

    def _open(self, group: GroupRequest, request: AnswerRequest) -> Conversation:
        """Return a request's conversation: one set aside that has come as far, or a new one."""
        aside = self._aborted.pop(request.seed, None)
        if aside is not None and len(aside.segments) == len(request.earlier):
            aside.group, aside.request = group, request
            return aside
        if request.earlier and self._message_of is not None:  # all replies are rendered
            self._environments.close_conversation(request.seed)
        conversation = Conversation(group, request, list(request.earlier))
        conversation.turns = [
            self._turn_of(each, group) for each in request.earlier if each.source == "model"
        ]
        return conversation

    async def _continue(self, conversation: Conversation) -> None:
        """Ask for the reply to a complete last turn, or for the rest of the turn."""
        segments, request = conversation.segments, conversation.request
        if segments and segments[-1].source == "model":
            if conversation.reply is None:
                self._ask_environment(conversation)
            return
        written = [*conversation.branch, *([request.prefix] if request.prefix else [])]
        prefix = _flatten(written) if written else None
        turn = replace(request, seed=conversation.seed, prefix=prefix, earlier=())
        sampling = self._turn_sampling(conversation)
        group = replace(conversation.group, answers=(turn,), sampling=sampling, prompt=None)
        await self._engine.submit([replace(group, prompt_ids=conversation.prompt_ids)])

    def _turn_sampling(self, conversation: Conversation) -> SamplingParams:
        """Return the settings of the next turn; the tokens before it count towards its limit."""
        tokens, most = conversation.max_tokens, self._limits.turn_tokens
        if most is not None:
            tokens = min(conversation.length + most, tokens)
        return replace(conversation.group.sampling, max_tokens=tokens)

    def _turn_event(self, conversation: Conversation, event: CompletionEvent) -> CompletionEvent:
        """Return an event of the engine as one of the conversation."""
        segment = _part(event.segment, conversation.length)
        return replace(event, segment=segment, earlier=tuple(conversation.segments))

    def _handle(self, event: CompletionEvent) -> None:
        """Process the end of a turn."""
        conversation = self._live[event.group_id, event.answer]
        told = self._turn_event(conversation, event)
        conversation.tick = event.tick
        if event.kind != "finished":
            self._events.append(told)
            self._set_aside(conversation)
            return
        if event.finish_reason != "stop":  # the turn has no end, so nothing can follow
            self._finish(conversation, told)
            return
        conversation.segments.append(told.segment)
        conversation.turns.append(self._turn_of(told.segment, conversation.group))
        self._ask_environment(conversation)

    def _ask_environment(self, conversation: Conversation) -> None:
        prompt, look = conversation.group.prompt, self._look_ticks
        assert prompt is not None, "a request of a conversation has its row"
        step = self._environments.step(conversation.request.seed, prompt, tuple(conversation.turns))
        conversation.reply = asyncio.ensure_future(step)
        tick = self._engine.status().tick
        conversation.due = -(-(tick + self._lag_ticks) // look) * look

    async def _take_reply(self, conversation: Conversation) -> None:
        """Wait for the reply to the last turn; end the conversation, or begin its next turn."""
        assert conversation.reply is not None
        await asyncio.wait([conversation.reply])
        reply, conversation.reply = conversation.reply, None
        try:
            *replayed, step = reply.result()
            first = len(conversation.turns) - 1 - len(replayed)
            messages = map(_shown_messages, [*replayed, step])
            conversation.replies |= dict(enumerate(messages, first))
            if self._message_of is not None and len(conversation.replies) < len(conversation.turns):
                raise EnvironmentFault("not all turns of a resumed conversation were replayed")
            self._check_replay(conversation, first)
            following = None if step.done else self._reply_segment(conversation)
        except EnvironmentFault as fault:
            del self._live[conversation.key]
            self._environments.close_conversation(conversation.request.seed)
            self._events.append(conversation.event("failed", error=str(fault)))
            return
        segments = conversation.segments
        turn = conversation.turns[-1]
        figures = {"calls": float(len(turn.calls)), "malformed": float(len(turn.malformed))}
        figures |= step.metrics
        segments[-1] = replace(segments[-1], reward=float(step.reward), figures=figures)
        if following is not None and len(conversation.turns) < self._limits.turns:
            segments.append(following)
            if conversation.length < conversation.max_tokens:
                conversation.request = replace(conversation.request, prefix=None)
                await self._continue(conversation)
                return
            segments.pop()
        reason: FinishReason = "stop" if step.done else "length"
        last = segments.pop()
        self._finish(conversation, conversation.event("finished", last, finish_reason=reason))

    def _reply_segment(self, conversation: Conversation) -> Segment:
        """Return the reply to the turn that the segments end with, as tokens before the next."""
        segments, group = conversation.segments, conversation.group
        number = len(segments) // 2
        if self._message_of is None:
            stopped = segments[-1].token_ids[-1] in group.sampling.stop_token_ids
            ids = self._tokenizer.reply_ids(conversation.replies[number], stopped)
            return Segment(ids, np.zeros(len(ids), np.float32), (), "environment")
        prompt = group.prompt
        assert prompt is not None, "a request of a conversation has its row"
        messages = [*prompt.messages]
        for place, turn in enumerate(conversation.turns[: number + 1]):
            text = self._text_of(segments[2 * place], group)
            messages += [self._message_of(text, turn), *conversation.replies[place]]
        trusted = 0 if prompt.row_messages else len(prompt.messages)
        ids = self._tokenizer.prompt_ids(messages, trusted)
        pieces = [conversation.prompt_ids, *(each.token_ids for each in conversation.branch)]
        context = np.concatenate(pieces)
        restarts = not np.array_equal(ids[: len(context)], context)
        ids = ids if restarts else ids[len(context) :]
        logprobs = np.zeros(len(ids), np.float32)
        return Segment(ids, logprobs, (), "environment", restarts=restarts)

    def _check_replay(self, conversation: Conversation, first: int) -> None:
        """Compare the replies that were replayed, from a turn on, with those of the conversation.

        Raises:
            EnvironmentFault: one differs.
        """
        for number in range(first, len(conversation.turns) - 1):
            stored = conversation.segments[2 * number + 1]
            before = replace(conversation, segments=conversation.segments[: 2 * number + 1])
            if not conversation.replies[number] or not np.array_equal(
                self._reply_segment(before).token_ids, stored.token_ids
            ):
                raise EnvironmentFault(
                    f"turn {number + 1} was replayed with another reply; give the environment "
                    "state_dict and load_state_dict, or let it depend on its row and turns alone"
                )

    def _turn_of(self, segment: Segment, group: GroupRequest) -> Turn:
        return self._parse(self._text_of(segment, group))

    def _text_of(self, segment: Segment, group: GroupRequest) -> str:
        ids = segment.token_ids
        if len(ids) and ids[-1] in group.sampling.stop_token_ids:
            ids = ids[:-1]
        return self._decode(ids)

    def _finish(self, conversation: Conversation, event: CompletionEvent) -> None:
        del self._live[conversation.key]
        self._environments.close_conversation(conversation.request.seed)
        self._events.append(event)

    def _set_aside(self, conversation: Conversation) -> None:
        """Remove a conversation that is to go on later, and keep its environment as room is."""
        del self._live[conversation.key]
        self._aborted[conversation.request.seed] = conversation
        while len(self._aborted) > self._engine.status().slots:
            seed, dropped = self._aborted.popitem(last=False)
            if dropped.reply is not None:
                dropped.reply.cancel()
            self._environments.close_conversation(seed)


def _shown_messages(step: Step) -> Sequence[Message]:
    """Return the messages that a step adds to the conversation.

    Raises:
        EnvironmentFault: it has none.
    """
    try:
        return () if step.done else messages_of(step.observation)
    except TypeError as error:
        raise EnvironmentFault(f"the observation of step is wrong: {error}") from error


def _flatten(segments: Sequence[Segment]) -> Segment:
    """Return segments of several authors as one prefix.

    Spans of the policy's turns begin where the span before them ends, so that they cover the
    replies in between, too; `_part` takes them apart again.
    """
    spans, start = [], 0
    for segment in segments:
        spans += [VersionSpan(span.version, start + span.stop) for span in segment.spans]
        start += len(segment)
    ids = np.concatenate([segment.token_ids for segment in segments])
    logprobs = np.concatenate([segment.logprobs for segment in segments])
    return Segment(ids, logprobs, tuple(spans))


def _part(segment: Segment, start: int) -> Segment:
    """Return the tokens of a flat segment from `start` on, with their spans."""
    if not start:
        return segment
    spans = [VersionSpan(s.version, s.stop - start) for s in segment.spans if s.stop > start]
    return Segment(segment.token_ids[start:], segment.logprobs[start:], tuple(spans))
