"""Several engines as one: what is equal in deterministic mode, and what survives in free mode."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.engines import ScriptedEngine, uniform, written
from tests.examples import examples

from winnow.errors import PublicationError, WorkerError
from winnow.rollout import remote_engine
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    SamplingParams,
)
from winnow.rollout.engine_group import QUANTUM_TICKS, EngineGroup
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine, Reply
from winnow.rollout.request_queue import TrackedAnswer
from winnow.rollout.weights import Bucket, WeightUpdate, send_weights
from winnow.types import Image, Segment
from winnow.workers.local import SharedHandle

T = TypeVar("T")
LIMIT = 40


def length(group: GroupRequest, answer: AnswerRequest) -> int:
    return 1 + int(uniform(answer.seed, 10**6) * LIMIT)


def request(number: int, answers: int = 3, prefix: int = 0) -> GroupRequest:
    def answer(index: int) -> AnswerRequest:
        seed = 100 * number + index
        begun = written(seed, 0, prefix, 0) if prefix else None
        return AnswerRequest(index, seed, begun)

    sampling = SamplingParams(LIMIT)
    made = tuple(answer(index) for index in range(answers))
    return GroupRequest(number, np.array([number]), made, sampling, number)


class Mortal:
    """An engine in a process that can be killed: its status is that of its last answer.

    As with one elsewhere, what is submitted is on its way at once, and counts as queued.
    """

    def __init__(self, slots: int = 4, delay: int = 0, **options: Any) -> None:
        self.inner = ScriptedEngine(length, slots=slots, **options)
        self.delay = delay
        """Turns of the loop that each answer takes."""
        self.is_killed = False
        self.hangs: asyncio.Event | None = None
        self._status = self.inner.status()

    async def _call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        found = await self._unheard(work, *args)
        self._status = self.inner.status()
        return found

    async def _unheard(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        for _ in range(self.delay):
            await asyncio.sleep(0)
        if self.hangs is not None:
            await self.hangs.wait()
        if self.is_killed:
            raise WorkerError("the process was killed", "engine", 0)
        found = await work(*args)
        if self.is_killed:  # while it answered: the answer never comes
            raise WorkerError("the process was killed", "engine", 0)
        return found

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        await self.inner.submit(groups)
        queued = self._status.queued + sum(len(group.answers) for group in groups)
        self._status = replace(self._status, queued=queued)

    async def take_bucket(self, bucket: Any) -> int:
        raise NotImplementedError

    async def logprobs_of(self, sequences: Any, temperature: float, last: int) -> Any:
        raise NotImplementedError

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        while True:  # tick by tick, as a model writes
            inner = self.inner
            found = await self._unheard(inner.events, inner.tick + (inner.tick != until))
            status = inner.status()
            if found or inner.tick == until or not status.running + status.queued:
                self._status = status
                return found

    async def progress(self) -> Sequence[CompletionEvent]:
        return await self._call(self.inner.progress)

    async def abort(self, group_ids: Collection[int]) -> None:
        await self._call(self.inner.abort, group_ids)

    async def load_weights(self, update: WeightUpdate) -> None:
        await self._call(self.inner.load_weights, update)

    async def close(self) -> None:
        await self._call(self.inner.close)

    def status(self) -> EngineStatus:
        return self._status


async def drained(group: EngineGroup) -> list[CompletionEvent]:
    out: list[CompletionEvent] = []
    while events := await group.events():
        out += events
    return out


def ids_of(event: CompletionEvent) -> list[int]:
    return event.segment.token_ids.tolist()


# Deterministic mode


def test_the_same_events_come_whatever_the_engines_speeds() -> None:
    def story(delays: Sequence[int]) -> list[Any]:
        async def run() -> list[Any]:
            group = EngineGroup([Mortal(delay=delay) for delay in delays], True)
            told: list[Any] = []
            await group.submit([request(g) for g in range(9)])
            for turn in range(60):
                events = await group.events(until=5 * turn)
                order = [(e.tick, e.group_id, e.answer) for e in events]
                assert order == sorted(order)
                told += [(e.tick, e.group_id, e.answer, e.kind, ids_of(e)) for e in events]
                told.append((group.status().tick, group.status().running))
                if turn == 4:
                    await group.abort([1, 7])
                if turn == 6:
                    await group.submit([request(g, prefix=3) for g in (9, 10)])
            return told

        return asyncio.run(run())

    first = story([0, 0, 0])
    assert sum(len(line) == 5 for line in first) == 33
    assert story([7, 0, 2]) == first
    assert story([0, 5, 31]) == first


async def test_an_idle_engine_takes_up_the_common_tick_with_its_next_answers() -> None:
    long, short = ScriptedEngine(lambda *_: 30, slots=1), ScriptedEngine(lambda *_: 4, slots=1)
    group = EngineGroup([long, short], True)
    await group.submit([request(g, answers=1) for g in range(2)])
    out = list(await group.events())
    assert (group.status().tick, short.tick) == (QUANTUM_TICKS, 4)
    await group.submit([request(2, answers=1)])
    ticks = {event.group_id: event.tick for event in out + await drained(group)}
    assert ticks == {1: 4, 2: QUANTUM_TICKS + 4, 0: 30}


async def test_in_deterministic_mode_a_death_is_an_error() -> None:
    engines = [Mortal(), Mortal()]
    group = EngineGroup(engines, True)
    await group.submit([request(g) for g in range(4)])
    await group.events(until=2)
    engines[1].is_killed = True
    with pytest.raises(WorkerError, match="was killed"):
        await drained(group)


# Free mode


async def test_tokens_are_counted_on_when_progress_is_asked_for_while_events_are_awaited() -> None:
    engine = Mortal(delay=1)
    group = EngineGroup([engine], False)
    await group.submit([request(0)])
    waiting = asyncio.create_task(group.events())
    await asyncio.sleep(0)
    await group.progress()
    told = group.status().generated_tokens
    await engine.progress()
    assert not waiting.done()
    # What watches over engines must see that they write.
    assert group.status().generated_tokens > told
    await waiting
    await group.close()


async def test_a_slow_engine_holds_up_nobody() -> None:
    engines = [Mortal(slots=4), Mortal(slots=4)]
    group = EngineGroup(engines, False)
    engines[1].hangs = asyncio.Event()
    await group.submit([request(g, answers=4) for g in range(8)])
    out: list[CompletionEvent] = []
    while len(out) < 24:  # whatever the hanging engine has room for waits with it
        out += await asyncio.wait_for(group.events(), 10)
    assert len({(e.group_id, e.answer) for e in out}) == 24
    engines[1].hangs.set()
    engines[1].hangs = None
    assert len(out) + len(await drained(group)) == 32
    await group.close()


async def test_what_a_dead_engine_had_goes_on_elsewhere_behind_the_last_known_prefix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    engines = [Mortal(slots=4), Mortal(slots=4)]
    group = EngineGroup(engines, False)
    await group.submit([request(g, answers=4) for g in range(2)])
    events = list(await group.events())
    progress = await group.progress()
    events += [event for event in progress if event.kind != "running"]
    told = {(e.group_id, e.answer): len(e.segment) for e in progress}
    theirs = {key: n for key, n in told.items() if key in engines[1].inner._running}
    assert theirs
    engines[1].is_killed = True
    events += await drained(group)
    sent = {
        (g.group_id, a.index): len(a.prefix or ())
        for g in engines[0].inner.submitted[1:]
        for a in g.answers
    }
    assert sent == theirs
    assert group.dead == ["engine 1"]
    assert group.status().slots == 4
    assert len(events) == 8
    for event in events:
        seed = 100 * event.group_id + event.answer
        assert event.kind == "finished"
        assert ids_of(event) == written(seed, 0, len(event.segment), 0).token_ids.tolist()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("engine 1 died, 1 of 2 engines remain: the process was killed; ")


def test_a_longer_prefix_has_the_images_of_earlier_turns() -> None:
    asked, shown = request(0), (Image(1, (1, 2), b"", ""),)
    answer = TrackedAnswer(asked, AnswerRequest(0, 0, replace(written(0, 0, 3, 0), images=shown)))
    answer.extend_prefix(written(0, 0, 5, 0))
    assert (len(answer.prefix), answer.prefix.images) == (5, shown)


def test_what_was_asked_back_of_an_engine_that_dies_comes_back_and_is_not_written_on() -> None:
    async def run() -> None:
        engines = [Mortal(slots=2), Mortal(slots=2)]
        group = EngineGroup(engines, False)
        await group.submit([request(g, answers=2) for g in range(2)])
        await asyncio.sleep(0)
        engines[1].is_killed = True
        await group.abort([0, 1])
        events = await drained(group)
        assert len(events) == 4
        assert group.status().queued == group.status().running == 0
        assert len(engines[0].inner.submitted) <= 1

    asyncio.run(run())


async def test_an_answer_at_which_five_engines_die_in_a_row_is_given_up() -> None:
    engines = [Mortal(slots=1) for _ in range(6)]
    group = EngineGroup(engines, False)
    await group.submit([request(0, answers=1)])
    for engine in engines:
        engine.is_killed = True
    (event,) = await group.events()
    assert (event.kind, event.error, len(group.dead)) == ("failed", "the process was killed", 5)


async def test_an_engine_that_lost_its_answers_gives_them_up_and_they_may_be_sent_again() -> None:
    engines = [Mortal(), Mortal()]
    group = EngineGroup(engines, True)
    await group.submit([request(g) for g in range(4)])
    assert await group.events(until=1) == [] or True
    engines[0].inner.forget()
    events = await drained(group)
    assert {e.kind for e in events} == {"finished", "failed"}
    assert len({(e.group_id, e.answer) for e in events}) == len(events) == 12
    assert {e.error for e in events if e.kind == "failed"} == {"the engine lost the answer"}


# Weights


async def test_all_engines_take_new_weights_and_a_group_of_two_versions_is_an_error() -> None:
    engines = [Mortal(), Mortal()]
    group = EngineGroup(engines, False)
    await group.load_weights(WeightUpdate(4))
    assert group.status().weight_version == 4
    await engines[1].load_weights(WeightUpdate(5))
    with pytest.raises(PublicationError, match=r"versions \[4, 5\]; publish again"):
        group.status()
    await group.load_weights(WeightUpdate(6))
    assert group.status().weight_version == 6


def test_an_engine_that_keeps_its_old_version_is_found() -> None:
    class Deaf(Mortal):
        async def load_weights(self, update: WeightUpdate) -> None:
            pass

    group = EngineGroup([Mortal(), Deaf(), Mortal()], False)
    with pytest.raises(PublicationError, match="engine 1 did not load weights of version 1"):
        asyncio.run(group.load_weights(WeightUpdate(1)))


class Taking(Mortal):
    """Takes buckets, and has other bytes than came from bucket `damaged` on."""

    def __init__(self, damaged: int | None = None, refused: int | None = None) -> None:
        super().__init__(live_updates=True)
        self.damaged, self.refused, self.taken = damaged, refused, 0

    async def take_bucket(self, bucket: Bucket) -> int:
        self.taken += 1
        if self.refused == bucket.index:
            raise PublicationError("this bucket does not fit")
        return bucket.checksum() ^ (self.damaged == bucket.index)


def sent(*engines: Taking, deterministic: bool = False) -> tuple[EngineGroup, list[str]]:
    """Give a group twenty buckets while answers are written; returns it and the ends of those."""
    group = EngineGroup(engines, deterministic)
    tensors = [(f"t{i}", torch.ones(1)) for i in range(20)]
    update = WeightUpdate(3, tensors)
    small = partial(send_weights, bucket_bytes=4)

    async def run() -> list[str]:
        if not deterministic:
            await group.submit([request(g) for g in range(4)])
        with patch("winnow.rollout.engine_group.send_weights", small):
            await group.load_weights(update)
        return [event.kind for event in await drained(group)]

    return group, asyncio.run(run())


@pytest.mark.parametrize("fault", [{"damaged": 2}, {"damaged": 19}, {"refused": 5}], ids=str)
def test_an_engine_that_weights_reach_damaged_is_left_out(
    fault: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    healthy = Taking()
    group, ends = sent(Taking(**fault), healthy)
    assert group.dead == ["engine 0"]
    assert healthy.taken == 20
    assert healthy.inner.status().weight_version == group.status().weight_version == 3
    assert ends == ["finished"] * 12
    assert "engine 0 died, 1 of 2 engines remain" in caplog.text
    assert "engine 0 has other bytes" in caplog.text or "does not fit" in caplog.text


def test_weights_that_reach_every_engine_damaged_end_the_run() -> None:
    with pytest.raises(PublicationError, match=r"engine 1 has other bytes .* bucket 4"):
        sent(Taking(damaged=2), Taking(damaged=4))
    with pytest.raises(PublicationError, match="does not fit"):
        sent(Taking(refused=1), Taking(refused=1))
    with pytest.raises(PublicationError, match="engine 0 has other bytes"):
        sent(Taking(damaged=2), Taking(), deterministic=True)


def test_stored_weights_go_to_each_engine_in_one_call_and_a_damaged_one_is_named() -> None:
    class Refusing(Mortal):
        async def load_weights(self, update: WeightUpdate) -> None:
            assert update.stored == [share]
            raise PublicationError("other bytes")

    class Counting(Mortal):
        loaded: Sequence[Any] = ()

        async def load_weights(self, update: WeightUpdate) -> None:
            self.loaded = [*self.loaded, update.stored]
            await super().load_weights(WeightUpdate(update.version))

    share, healthy = SharedHandle("learner", 0, 0, 0, 0, 0), Counting()
    update = WeightUpdate(7, stored=[share])
    group = EngineGroup([Refusing(), healthy], False)
    asyncio.run(group.load_weights(update))
    assert (group.dead, healthy.loaded) == (["engine 0"], [[share]])
    with pytest.raises(PublicationError, match="engine 1: other bytes"):
        asyncio.run(EngineGroup([Mortal(), Refusing()], True).load_weights(update))


# Whatever happens

Step = tuple[str, int]
STEPS = st.tuples(
    st.sampled_from(["submit", "submit", "resume", "events", "cancel", "progress", "abort"]),
    st.integers(0, 6),
)


class Story:
    """A group of engines under any sequence of calls, with books of its own."""

    def __init__(self, engines: int, deterministic: bool) -> None:
        self.engines = [Mortal(slots=3, delay=i, live_updates=True) for i in range(engines)]
        self.group = EngineGroup(self.engines, deterministic)
        self.wanted: dict[tuple[int, int], int] = {}
        """Tokens that each answer brought."""
        self.ended: dict[tuple[int, int], CompletionEvent] = {}
        self.known: dict[tuple[int, int], int] = {}

    def hear(self, events: Sequence[CompletionEvent]) -> None:
        for event in events:
            key = event.group_id, event.answer
            assert key in self.wanted
            assert key not in self.ended, "an answer came back twice"
            assert len(event.segment) >= self.known.get(key, 0)
            self.known[key] = len(event.segment)
            seed = 100 * key[0] + key[1]
            assert ids_of(event) == written(seed, 0, len(event.segment), 0).token_ids.tolist()
            if event.kind != "running":
                self.ended[key] = event

    @property
    def booked(self) -> int:
        return sum(length - self.wanted[key] for key, length in self.known.items())

    def submit(self, answers: int, prefix: int) -> None:
        number = len({group for group, _ in self.wanted})
        asked = request(number, answers + 1, prefix)
        lengths = [length(asked, answer) for answer in asked.answers]
        kept = tuple(a for a, n in zip(asked.answers, lengths, strict=True) if n > prefix)
        if kept:
            self.wanted |= {(number, answer.index): prefix for answer in kept}
            self.next = replace(asked, answers=kept)

    async def take(self, step: Step) -> None:
        kind, number = step
        self.next: GroupRequest | None = None
        if kind in ("submit", "resume"):
            self.submit(number, 2 if kind == "resume" else 0)
            if self.next is not None:
                await self.group.submit([self.next])
        elif kind == "events":
            self.hear(await self.group.events(until=self.group.status().tick + number))
        elif kind == "cancel":
            waiting = asyncio.ensure_future(self.group.events())
            for _ in range(number):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            if not waiting.cancelled():
                self.hear(waiting.result())
        elif kind == "progress":
            self.hear(await self.group.progress())
            if not self.group.dead:
                assert self.booked == self.group.status().generated_tokens
        elif kind == "abort":
            await self.group.abort([number, number + 2])
        else:
            self.engines[number % len(self.engines)].is_killed = True

    async def end(self) -> None:
        while events := await self.group.events():
            self.hear(events)
        assert set(self.ended) == set(self.wanted)
        status = self.group.status()
        assert status.running == status.queued == 0
        assert self.booked <= status.generated_tokens
        if not self.group.dead:
            assert self.booked == status.generated_tokens


@examples(30)
@given(
    st.lists(STEPS, max_size=14),
    st.tuples(st.just([]), st.integers(1, 3), st.just(True))
    | st.tuples(
        st.lists(st.tuples(st.integers(0, 14), st.integers(0, 2)), min_size=1, max_size=4),
        st.integers(2, 3),
        st.just(False),
    ),
)
@example([("submit", 0), ("submit", 0), ("submit", 2), ("abort", 0)], ([(4, 1)], 2, False))
def test_no_answer_is_lost_or_doubled_while_an_engine_lives_and_the_account_agrees(
    steps: list[Step], setting: tuple[list[tuple[int, int]], int, bool]
) -> None:
    deaths, engines, deterministic = setting

    async def run() -> None:
        story, script = Story(engines, deterministic), list(steps)
        for place, victim in deaths:
            script.insert(place, ("kill", victim))
        try:
            for step in script:
                await story.take(step)
            await story.end()
        except WorkerError:
            assert all(engine.is_killed for engine in story.engines)
            assert set(story.ended) <= set(story.wanted)
        await story.group.close()

    asyncio.run(asyncio.wait_for(run(), 30))


async def test_an_empty_prefix_is_a_fresh_answer() -> None:
    empty = Segment(np.zeros(0, np.int64), np.zeros(0, np.float32), ())
    asked = request(0, answers=2)
    asked = replace(asked, answers=tuple(replace(a, prefix=empty) for a in asked.answers))
    group = EngineGroup([ScriptedEngine(length)], True)
    await group.submit([asked])
    assert len(await drained(group)) == 2


# Over wires: replies take any time and overtake each other


SEEDS = 60
CALLS = ["submit", "submit", "resume", "events", "cancel", "progress", "progress", "abort"]


class TickByTick(ScriptedEngine):
    """As a model writes."""

    async def events(self, until: int | None = None) -> Any:
        while True:
            found: Any = await super().events(self.tick + (self.tick != until))
            idle = not self._running and not self._queue
            if found or idle or self.tick == until:
                return found
            await asyncio.sleep(0)


class Wire:
    """Calls begin in order; each reply takes its own time. What is dead answers no more."""

    def __init__(self, worker: EngineWorker, rng: random.Random) -> None:
        self._worker, self._rng = worker, rng
        self.is_killed = False

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        self._check()
        reply = await asyncio.shield(getattr(self._worker, method)(*args))
        for _ in range(self._rng.choice([0, 0, 1, 3, 10, 40])):
            await asyncio.sleep(0)
        self._check()
        return pickle.loads(pickle.dumps(reply))

    def _check(self) -> None:
        if self.is_killed:
            raise WorkerError("the process was killed", "engine", 0)


class WiredStory(Story):
    """`Story`, over wires."""

    def __init__(self, engines: int, deterministic: bool, rng: random.Random) -> None:
        super().__init__(engines, deterministic)
        self.wires: list[Wire] = []
        made = []
        for _ in range(engines):
            inner: Any = TickByTick(length, slots=3, live_updates=True)
            self.wires.append(Wire(EngineWorker(inner), rng))
            made.append(RemoteEngine(self.wires[-1], Reply(None, [], inner.status())))
        self.group = EngineGroup(made, deterministic)

    async def take(self, step: Step) -> None:
        if step[0] == "kill":
            self.wires[step[1] % len(self.wires)].is_killed = True
        else:
            await super().take(step)


async def told(seed: int) -> list[CompletionEvent]:
    """A random story to its end; what became of each answer."""
    rng = random.Random(seed)
    deterministic = rng.random() < 0.4
    calls = CALLS + (["kill"] if not deterministic and rng.random() < 0.5 else [])
    story = WiredStory(rng.randint(1, 3), deterministic, rng)
    try:
        for _ in range(rng.randint(3, 18)):
            await story.take((rng.choice(calls), rng.randint(0, 6)))
        await story.end()
    except WorkerError:
        assert all(wire.is_killed for wire in story.wires)
    await story.group.close()
    return list(story.ended.values())


@pytest.mark.parametrize("patience_s", [1e-9, 1.0])
def test_no_answer_is_lost_or_taken_for_lost(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "PATIENCE_S", patience_s)
    for seed in range(examples(SEEDS).max_examples):
        ended = asyncio.run(asyncio.wait_for(told(seed), 60))
        assert "failed" not in {event.kind for event in ended}, f"seed {seed}"
