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
from winnow.data.images import image_parts, split_message
from winnow.environments import Message, Step, Turn
from winnow.errors import DataError, EnvironmentFault, ModelError
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
from winnow.types import FinishReason, Image, IntArray, Prompt, Segment, VersionSpan, join_images

Key = tuple[int, int]
"""Group and answer."""


class Environments(Protocol):
    """The environments of all conversations, wherever they run."""

    steps: int
    """Turns replied to, replayed ones included."""
    seconds: float
    """In which environments replied to them."""

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
    ) -> list[Step]:
        """Return the replies to the last turns of a conversation, to one turn at least.

        An environment that is not there any more is made again. It loads its state, or replays all
        turns if there is none.

        Args:
            conversation: a key that no other one has.
            turns: all of the policy's, of which the last has no reply yet.
            state: `Step.state` of the reply before that turn.

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


@dataclass(frozen=True)
class TurnFormat:
    """Token ids of turns and replies as texts and messages, and back."""

    tokenizer: TurnTokenizer
    """Gives the tokens of replies."""
    decode: Callable[[IntArray], str]
    """Makes a text of the token ids of a turn, without its stop token."""
    parse: Callable[[str], Turn]
    """Makes a turn of its text."""
    message_of: Callable[[str, Turn], Message] | None = None
    """Makes a message of the text of a turn and what was parsed of it, for the template to render
    it anew; None keeps conversations as they were sampled."""


@dataclass(frozen=True)
class ReplySchedule:
    """The moments at which replies are seen."""

    deterministic: bool
    """True: `lag_ticks` after their turns, or once the engine is idle; False: when they come."""
    lag_ticks: int = 0
    look_ticks: int = 1
    """Deterministic replies are seen at multiples of this only."""


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
    """Decode tick at the end of the last turn, or of the reply to it."""
    in_engine: bool = False
    """True while the engine has a turn of it."""
    aborting: bool = False
    """True once the turn that the engine has is not to be replied to."""

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
    def context(self) -> tuple[IntArray, tuple[Image, ...]]:
        """Ids and images before the branch: the prompt, or the conversation as rendered anew."""
        at = len(self.segments) - len(self.branch)
        if not at:
            return self.group.prompt_ids, self.group.images
        return self.segments[at - 1].token_ids, self.segments[at - 1].images

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
        return min(size + limit - len(self.context[0]), limit - sampled + self.length)

    def event(self, kind: Any, segment: Segment = EMPTY, **fields: Any) -> CompletionEvent:
        """Return an event of the conversation; `segment` is its turn under way."""
        fields = {"finish_reason": "aborted", "tick": self.tick, **fields}
        return CompletionEvent(*self.key, kind, segment, earlier=tuple(self.segments), **fields)


class ConversationEngine:
    """Implements `Engine` for conversations, over an engine that writes their turns.

    Args:
        engine: writes turns; nothing else may submit to it.
        environments: reply to turns.
    """

    def __init__(
        self,
        engine: Engine,
        turn_format: TurnFormat,
        environments: Environments,
        limits: ConversationLimits,
        schedule: ReplySchedule,
    ) -> None:
        self._engine, self._format, self._environments = engine, turn_format, environments
        self._limits, self._schedule = limits, schedule
        self._live: dict[Key, Conversation] = {}
        self._events: list[CompletionEvent] = []  # not returned yet
        self._aborted: OrderedDict[int, Conversation] = OrderedDict()
        """By seed, those whose environments are kept for going on."""
        self._move: asyncio.Task[None] | None = None
        """Takes replies in free mode; a caller of `events` that is cancelled does not end it."""
        self._faults = 0
        self._reported = 0, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        # Publication; and what engines may have beyond the protocol: members, sleep, buckets.
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
                    begun.append(replace(request, retain_cache=self._limits.turns > 1))
            if begun:
                sampling = self._turn_sampling(self._live[group.group_id, begun[0].index])
                fresh.append(replace(group, answers=tuple(begun), sampling=sampling, prompt=None))
        if fresh:
            for group in fresh:
                for request in group.answers:
                    self._live[group.group_id, request.index].in_engine = True
            await self._engine.submit(fresh)

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait for ends of conversations; return [] at tick `until`, or when idle.

        Raises:
            ModelError: the chat template fails with a reply.
        """
        while not self._events:
            is_over = await (self._advance(until) if self._schedule.deterministic else self._wait())
            if is_over:
                break
        events, self._events = self._events, []
        return events

    async def progress(self) -> Sequence[CompletionEvent]:
        await self._finish_move()
        running = []
        for event in await self._engine.progress():
            if event.kind != "running":
                self._handle(event)
                continue
            # Of several engines some report before others: the turn may have ended since.
            if (conversation := self._live.get(event.key)) and conversation.reply is None:
                running.append(self._turn_event(conversation, event))
        # An engine reports no turn that waits for a slot, and the turns before it count, too.
        reported = {event.key for event in running}
        running += [e.event("running") for key, e in self._live.items() if key not in reported]
        events, self._events = self._events, []
        return [*events, *sorted(running, key=lambda event: event.key)]

    async def abort(self, group_ids: Collection[int]) -> None:
        await self._finish_move()
        ids = set(group_ids)
        for conversation in [e for e in self._live.values() if e.group.group_id in ids]:
            if conversation.in_engine:
                conversation.aborting = True
            else:
                self._events.append(conversation.event("aborted"))
                self._set_aside(conversation)
        await self._engine.abort(group_ids)

    def status(self) -> EngineStatus:
        status = self._engine.status()
        waiting = sum(not each.in_engine for each in self._live.values())
        waiting += self._move is not None  # it may be submitting one
        is_waiting = bool(waiting) and not status.running + status.queued
        return replace(status, running=status.running + waiting, is_waiting=is_waiting)

    async def close(self) -> None:
        """Cancel what is waited for, and close the engine."""
        replies = [each.reply for each in [*self._live.values(), *self._aborted.values()]]
        tasks = [task for task in (self._move, *replies) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.clear()
        await self._engine.close()

    def environment_figures(self) -> dict[str, float]:
        """Return `environment/faults` and `environment/reply_s`, a step's mean, since the last
        call."""
        now = self._faults, self._environments.steps, self._environments.seconds
        faults, steps, seconds = (a - b for a, b in zip(now, self._reported, strict=True))
        self._reported = now
        return {"environment/faults": faults} | (
            {"environment/reply_s": seconds / steps} if steps else {}
        )

    # -- waiting --------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[Conversation]:
        """Yield the conversations whose environments have the turn."""
        return (each for each in self._live.values() if each.reply is not None)

    async def _advance(self, until: int | None) -> bool:
        """Run the engine to the next event, reply or `until`; return whether to wait no more."""
        status = self._engine.status()
        is_idle = not status.running + status.queued
        replied = [each for each in self._waiting() if is_idle or each.due <= status.tick]
        if replied:
            await self._take_replies(sorted(replied, key=lambda each: (each.due, each.key)))
            return False
        due = min((each.due for each in self._waiting()), default=None)
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
        await self._finish_move()
        replies = [each.reply for each in self._waiting() if each.reply is not None]
        collecting = asyncio.ensure_future(self._collect(replies))
        try:
            await asyncio.wait([collecting, *replies], return_when=asyncio.FIRST_COMPLETED)
        finally:
            collecting.cancel()
            (outcome,) = await asyncio.gather(collecting, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome
        replied = [each for each in self._waiting() if each.reply and each.reply.done()]
        self._move = asyncio.ensure_future(self._take_replies(replied))
        await self._finish_move()
        return outcome is True

    async def _take_replies(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            await self._take_reply(conversation)

    async def _finish_move(self) -> None:
        """Wait until replies that are being taken have become turns."""
        if (move := self._move) is not None:
            await asyncio.wait([move])
            if self._move is move:
                self._move = None
            move.result()

    async def _collect(self, replies: Sequence[asyncio.Task[list[Step]]]) -> bool:
        """Handle the engine's events, or wait for a reply where it is idle.

        Returns:
            True if there is neither.
        """
        events = await self._engine.events()  # an idle engine may have some, too
        for event in events:
            self._handle(event)
        if replies and not events:
            await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
        return not replies and not events

    # -- turns and replies ----------------------------------------------------------------------

    def _open(self, group: GroupRequest, request: AnswerRequest) -> Conversation:
        """Return a request's conversation: one set aside that has come as far, or a new one."""
        aside = self._aborted.pop(request.seed, None)
        if aside is not None and len(aside.segments) == len(request.earlier):
            aside.group, aside.request, aside.aborting = group, request, False
            return aside
        if request.earlier and self._format.message_of is not None:  # all replies are rendered
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
            self._ask_environment(conversation)
            return
        goes_on = len(conversation.turns) + 1 < self._limits.turns
        written = [*conversation.branch, *([request.prefix] if request.prefix else [])]
        prefix = _flatten(written) if written else None
        group, seed, (ids, images) = conversation.group, conversation.seed, conversation.context
        turn = replace(request, seed=seed, prefix=prefix, earlier=(), retain_cache=goes_on)
        sampling = self._turn_sampling(conversation)
        conversation.in_engine = True
        context = GroupRequest(group.group_id, ids, (turn,), sampling, group.priority)
        await self._engine.submit([replace(context, images=images)])

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
        conversation.tick, conversation.in_engine = event.tick, False
        if event.kind != "finished":
            self._events.append(self._turn_event(conversation, event))
            self._set_aside(conversation)
            return
        if event.finish_reason != "stop":  # the turn has no end, so nothing can follow
            self._finish(conversation, self._turn_event(conversation, event))
            return
        segment = _part(event.segment, conversation.length)
        conversation.segments.append(segment)
        conversation.turns.append(self._turn_of(segment, conversation.group))
        if conversation.aborting:
            self._events.append(conversation.event("aborted"))
            self._set_aside(conversation)
            return
        self._ask_environment(conversation)

    def _ask_environment(self, conversation: Conversation) -> None:
        """Ask for the reply to the last turn, unless that is under way since before an abort."""
        prompt, look = conversation.group.prompt, self._schedule.look_ticks
        assert prompt is not None, "a request of a conversation has its row"
        if conversation.reply is None:
            state = next((s.state for s in reversed(conversation.segments) if s.state), "")
            state = state if self._format.message_of is None else ""  # all replies are rendered
            seed, turns = conversation.request.seed, tuple(conversation.turns)
            conversation.reply = asyncio.ensure_future(self._step(seed, prompt, turns, state))
        # A resumed run asks from now on, too.
        tick = self._engine.status().tick
        conversation.due = -(-(tick + self._schedule.lag_ticks) // look) * look

    async def _step(self, *request: Any) -> list[Step]:
        """Ask the environment; images of its replies are read in a thread, as that takes time."""
        steps = await self._environments.step(*request)
        for step in steps:
            if parts := image_parts(step.messages):
                await asyncio.to_thread(self._format.tokenizer.read_images, parts)
        return steps

    async def _take_reply(self, conversation: Conversation) -> None:
        """Wait for the reply to the last turn; end the conversation, or begin its next turn."""
        reply = conversation.reply
        if reply is not None and not reply.done():
            await asyncio.wait([reply])
        if reply is None or self._live.get(conversation.key) is not conversation:
            return  # it was aborted in the meantime
        conversation.reply = None
        conversation.tick = self._engine.status().tick
        try:
            *replayed, step = reply.result()
            first = len(conversation.turns) - 1 - len(replayed)
            replies = (each.messages for each in (*replayed, step))
            conversation.replies |= dict(enumerate(replies, first))
            if self._format.message_of is not None and len(conversation.replies) < len(
                conversation.turns
            ):
                raise EnvironmentFault("not all turns of a resumed conversation were replayed")
            self._check_replay(conversation, first)
            is_last = step.done or len(conversation.turns) >= self._limits.turns
            following = None if is_last else self._reply_segment(conversation)
        except (EnvironmentFault, ModelError, DataError) as fault:  # of a template, of images
            self._faults += 1
            event = conversation.event("failed", error=str(fault), is_fault=True)
            self._finish(conversation, event)
            return
        segments = conversation.segments
        turn = conversation.turns[-1]
        calls, malformed = float(len(turn.calls)), float(len(turn.malformed))
        figures = {**step.metrics, "calls": calls, "malformed": malformed}
        segments[:] = [replace(each, state="") for each in segments]
        segments[-1] = replace(segments[-1], reward=float(step.reward), figures=figures)
        if following is not None:
            segments.append(replace(following, state=step.state))
            if conversation.length < conversation.max_tokens:
                conversation.request = replace(conversation.request, prefix=None)
                await self._continue(conversation)
                return
            segments.pop()
        reason: FinishReason = "stop" if is_last else "length"
        last = segments.pop()
        self._finish(conversation, conversation.event("finished", last, finish_reason=reason))

    def _reply_segment(self, conversation: Conversation) -> Segment:
        """Return the reply to the turn that the segments end with, as tokens before the next."""
        segments, group = conversation.segments, conversation.group
        number, message_of = len(segments) // 2, self._format.message_of
        if message_of is None:
            stopped = segments[-1].token_ids[-1] in group.sampling.stop_token_ids
            reply = conversation.replies[number]
            ids = self._format.tokenizer.reply_ids(reply, stopped)
            before = [*group.images, *(image for each in segments for image in each.images)]
            ids, images = self._format.tokenizer.place_images(ids, before, reply, False)
            return Segment(ids, np.zeros(len(ids), np.float32), (), "environment", images=images)
        prompt = group.prompt
        assert prompt is not None, "a request of a conversation has its row"
        messages = [split_message(m) if prompt.images else m for m in prompt.messages]
        for place, turn in enumerate(conversation.turns[: number + 1]):
            text = self._text_of(segments[2 * place], group)
            messages += [message_of(text, turn), *conversation.replies[place]]
        trusted = 0 if prompt.row_messages else len(prompt.messages)
        ids = self._format.tokenizer.prompt_ids(messages, trusted)
        replies = [each for place in range(number + 1) for each in conversation.replies[place]]
        ids, images = self._format.tokenizer.place_images(
            ids, prompt.images, replies, rendered=True
        )
        pieces = [conversation.context[0], *(each.token_ids for each in conversation.branch)]
        size = sum(map(len, pieces))
        restarts = not np.array_equal(ids[:size], np.concatenate(pieces))
        if not restarts:
            ids = ids[size:]
            images = tuple(i.at(i.start - size) for i in images if i.start >= size)
        logprobs = np.zeros(len(ids), np.float32)
        return Segment(ids, logprobs, (), "environment", images=images, restarts=restarts)

    def _check_replay(self, conversation: Conversation, first: int) -> None:
        """Compare the replies that were replayed, from a turn on, with those of the conversation.

        Raises:
            EnvironmentFault: one differs.
        """
        for number in range(first, len(conversation.turns) - 1):
            stored = conversation.segments[2 * number + 1]
            before = replace(conversation, segments=conversation.segments[: 2 * number + 1])
            again = self._reply_segment(before) if conversation.replies[number] else EMPTY
            digests = [[image.digest for image in each.images] for each in (again, stored)]
            is_same = np.array_equal(again.token_ids, stored.token_ids)
            if not is_same or digests[0] != digests[1]:
                remedy = "let the environment depend on its row and turns alone"
                if self._format.message_of is None:
                    remedy += ", or give it state_dict and load_state_dict"
                raise EnvironmentFault(
                    f"turn {number + 1} was replayed with another reply; {remedy}"
                )

    def _turn_of(self, segment: Segment, group: GroupRequest) -> Turn:
        return self._format.parse(self._text_of(segment, group))

    def _text_of(self, segment: Segment, group: GroupRequest) -> str:
        ids = segment.token_ids
        if len(ids) and ids[-1] in group.sampling.stop_token_ids:
            ids = ids[:-1]
        return self._format.decode(ids)

    def _finish(self, conversation: Conversation, event: CompletionEvent) -> None:
        del self._live[conversation.key]
        self._environments.close_conversation(conversation.request.seed)
        earlier = tuple(replace(each, state="") for each in event.earlier)
        self._events.append(replace(event, earlier=earlier))

    def _set_aside(self, conversation: Conversation) -> None:
        """Remove a conversation that is to go on later, and keep its environment as room is."""
        del self._live[conversation.key]
        self._aborted[conversation.request.seed] = conversation
        while len(self._aborted) > self._engine.status().slots:
            seed, dropped = self._aborted.popitem(last=False)
            if dropped.reply is not None:
                dropped.reply.cancel()
            self._environments.close_conversation(seed)


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
    images = join_images((len(segment), segment.images) for segment in segments)
    return Segment(ids, logprobs, tuple(spans), images=images)


def _part(segment: Segment, start: int) -> Segment:
    """Return the tokens of a flat segment from `start` on, with their spans.

    Its arrays are there: an engine on another node returns references.
    """
    spans = [VersionSpan(s.version, s.stop - start) for s in segment.spans if s.stop > start]
    ids, logprobs = np.asarray(segment.token_ids), np.asarray(segment.logprobs)
    return Segment(ids[start:], logprobs[start:], tuple(spans))
