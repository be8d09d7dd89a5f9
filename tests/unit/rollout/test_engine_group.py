"""Several engines as one: what is equal in deterministic mode, and what survives in free mode."""

from __future__ import annotations

import asyncio
import logging
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
from tests.engines import Prompts, ScriptedEngine, uniform, written
from tests.examples import examples

from winnow.config.rollout import NoFilter, SamplingConfig
from winnow.errors import PublicationError, WorkerError
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    SamplingParams,
    WeightUpdate,
    generate,
)
from winnow.rollout.engine_group import QUANTUM_TICKS, EngineGroup, quantum_for
from winnow.rollout.weights import Bucket, send
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Segment, Trajectory
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


class Counting(ScriptedEngine):
    """Knows how often it was asked for events."""

    looks = 0

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        self.looks += 1
        return await super().events(until)


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


def test_engines_advance_together_and_stop_at_the_tick_asked_for() -> None:
    async def run() -> None:
        engines = [ScriptedEngine(lambda *_: 35, slots=4) for _ in range(2)]
        group = EngineGroup(engines, True)
        await group.submit([request(g, answers=4) for g in range(2)])
        assert await group.events(until=13) == []
        assert [engine.tick for engine in engines] == [13, 13]
        assert group.status().tick == 13
        events = await group.events()
        assert {event.tick for event in events} == {35}
        assert group.status().generated_tokens == 8 * 35

    asyncio.run(run())


def test_an_idle_engine_takes_up_the_common_tick_with_its_next_answers() -> None:
    async def run() -> list[CompletionEvent]:
        long, short = ScriptedEngine(lambda *_: 30, slots=1), ScriptedEngine(lambda *_: 4, slots=1)
        group = EngineGroup([long, short], True)
        await group.submit([request(g, answers=1) for g in range(2)])
        out = list(await group.events())
        assert (group.status().tick, short.tick) == (QUANTUM_TICKS, 4)
        await group.submit([request(2, answers=1)])
        return out + await drained(group)

    ticks = {event.group_id: event.tick for event in asyncio.run(run())}
    assert ticks == {1: 4, 2: QUANTUM_TICKS + 4, 0: 30}


def test_a_longer_quantum_asks_engines_less_often_and_writes_the_same() -> None:
    async def run(quantum_ticks: int) -> tuple[int, dict[int, bytes]]:
        engines = [Counting(lambda *_: 40, slots=4) for _ in range(2)]
        group = EngineGroup(engines, True, quantum_ticks)
        await group.submit([request(g, answers=4) for g in range(4)])
        events = await drained(group)
        written = {e.group_id * 4 + e.answer: e.segment.token_ids.tobytes() for e in events}
        return sum(engine.looks for engine in engines), written

    (often, some), (seldom, same) = asyncio.run(run(8)), asyncio.run(run(40))
    assert some == same
    assert len(some) == 16
    assert often == 2 * 80 // 8
    assert seldom == 2 * 80 // 40
    assert (quantum_for(20_480), quantum_for(100)) == (640, 8)


def test_in_deterministic_mode_a_death_is_an_error() -> None:
    async def run() -> None:
        engines = [Mortal(), Mortal()]
        group = EngineGroup(engines, True)
        await group.submit([request(g) for g in range(4)])
        await group.events(until=2)
        engines[1].is_killed = True
        await drained(group)

    with pytest.raises(WorkerError, match="was killed"):
        asyncio.run(run())


# Free mode


def test_tokens_are_counted_on_when_progress_is_asked_for_while_events_are_awaited() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_a_slow_engine_holds_up_nobody() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_what_a_dead_engine_had_goes_on_elsewhere_behind_the_last_known_prefix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> list[CompletionEvent]:
        engines = [Mortal(slots=4), Mortal(slots=4)]
        group = EngineGroup(engines, False)
        await group.submit([request(g, answers=4) for g in range(2)])
        first = list(await group.events())
        progress = await group.progress()
        first += [event for event in progress if event.kind != "running"]
        told = {(e.group_id, e.answer): len(e.segment) for e in progress}
        theirs = {key: n for key, n in told.items() if key in engines[1].inner._running}
        assert theirs
        engines[1].is_killed = True
        out = first + await drained(group)
        sent = {
            (g.group_id, a.index): len(a.prefix or ())
            for g in engines[0].inner.submitted[1:]
            for a in g.answers
        }
        assert sent == theirs
        assert group.dead == ["engine 1"]
        assert group.status().slots == 4
        return out

    with caplog.at_level(logging.WARNING):
        events = asyncio.run(run())
    assert len(events) == 8
    for event in events:
        seed = 100 * event.group_id + event.answer
        assert event.kind == "finished"
        assert ids_of(event) == written(seed, 0, len(event.segment), 0).token_ids.tolist()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("engine 1 died, 1 of 2 are left: the process was killed; ")


def test_the_last_death_is_an_error_and_what_came_before_it_is_told() -> None:
    async def run() -> None:
        engines = [Mortal(), Mortal()]
        group = EngineGroup(engines, False)
        await group.submit([request(g) for g in range(4)])
        assert await group.events()
        for engine in engines:
            engine.is_killed = True
        while True:
            await group.events()

    with pytest.raises(WorkerError, match="was killed"):
        asyncio.run(asyncio.wait_for(run(), 20))


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


def test_an_engine_that_lost_its_answers_gives_them_up_and_they_may_be_sent_again() -> None:
    async def run() -> None:
        engines = [Mortal(), Mortal()]
        group = EngineGroup(engines, True)
        await group.submit([request(g) for g in range(4)])
        assert await group.events(until=1) == [] or True
        engines[0].inner.forget()
        events = await drained(group)
        assert {e.kind for e in events} == {"finished", "failed"}
        assert len({(e.group_id, e.answer) for e in events}) == len(events) == 12
        assert {e.error for e in events if e.kind == "failed"} == {"the engine lost the answer"}

    asyncio.run(run())


# Weights


def test_all_engines_take_new_weights_and_a_group_of_two_versions_is_an_error() -> None:
    async def run() -> None:
        engines = [Mortal(), Mortal()]
        group = EngineGroup(engines, False)
        await group.load_weights(WeightUpdate(4))
        assert group.status().weight_version == 4
        await engines[1].load_weights(WeightUpdate(5))
        with pytest.raises(PublicationError, match=r"versions \[4, 5\]; publish again"):
            group.status()
        await group.load_weights(WeightUpdate(6))
        assert group.status().weight_version == 6

    asyncio.run(run())


def test_an_engine_that_keeps_its_old_version_is_found() -> None:
    class Deaf(Mortal):
        async def load_weights(self, update: WeightUpdate) -> None:
            pass

    group = EngineGroup([Mortal(), Deaf(), Mortal()], False)
    with pytest.raises(PublicationError, match="engine 1 did not take weights of version 1"):
        asyncio.run(group.load_weights(WeightUpdate(1)))


class Taking(Mortal):
    """Takes buckets, and holds other bytes than came from bucket `damaged` on."""

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
    small = partial(send, bucket_bytes=4)

    async def run() -> list[str]:
        if not deterministic:
            await group.submit([request(g) for g in range(4)])
        with patch("winnow.rollout.engine_group.send", small):
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
    assert "engine 0 died, 1 of 2 are left" in caplog.text
    assert "engine 0 holds other bytes" in caplog.text or "does not fit" in caplog.text


def test_weights_that_reach_every_engine_damaged_end_the_run() -> None:
    with pytest.raises(PublicationError, match=r"engine 1 holds other bytes .* bucket 4"):
        sent(Taking(damaged=2), Taking(damaged=4))
    with pytest.raises(PublicationError, match="does not fit"):
        sent(Taking(refused=1), Taking(refused=1))
    with pytest.raises(PublicationError, match="engine 0 holds other bytes"):
        sent(Taking(damaged=2), Taking(), deterministic=True)


def test_stored_weights_go_to_each_engine_in_one_call_and_a_damaged_one_is_named() -> None:
    class Refusing(Mortal):
        async def load_weights(self, update: WeightUpdate) -> None:
            assert update.shares == [share]
            raise PublicationError("other bytes")

    class Counting(Mortal):
        loaded: Sequence[Any] = ()

        async def load_weights(self, update: WeightUpdate) -> None:
            self.loaded = [*self.loaded, update.shares]
            await super().load_weights(WeightUpdate(update.version))

    share, healthy = SharedHandle("learner", 0, 0, 0, 0, 0), Counting()
    update = WeightUpdate(7, shares=[share])
    group = EngineGroup([Refusing(), healthy], False)
    asyncio.run(group.load_weights(update))
    assert (group.dead, healthy.loaded) == (["engine 0"], [[share]])
    with pytest.raises(PublicationError, match="engine 1: other bytes"):
        asyncio.run(EngineGroup([Mortal(), Refusing()], True).load_weights(update))


def test_a_group_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EngineGroup([], True)


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


@examples(25)
@given(st.lists(STEPS, max_size=14), st.integers(1, 3), st.booleans())
def test_no_answer_is_lost_or_doubled_and_the_account_agrees(
    steps: list[Step], engines: int, deterministic: bool
) -> None:
    async def run() -> None:
        story = Story(engines, deterministic)
        for step in steps:
            await story.take(step)
        await story.end()
        await story.group.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@examples(25)
@given(
    st.lists(STEPS, max_size=14),
    st.lists(st.tuples(st.integers(0, 14), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(2, 3),
)
@example([("submit", 0), ("submit", 0), ("submit", 2), ("abort", 0)], [(4, 1)], 2)
def test_deaths_lose_no_answer_while_an_engine_lives(
    steps: list[Step], deaths: list[tuple[int, int]], engines: int
) -> None:
    async def run() -> None:
        story = Story(engines, False)
        script = list(steps)
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


# Under the sampler


def scored(prompt: Prompt, trajectory: Trajectory) -> Score:
    return Score(1.0, 1.0)


def sampler(group: EngineGroup, deterministic: bool) -> Sampler:
    prompts = Prompts()
    config = SamplingConfig(groups_per_step=6, filter=NoFilter(), lookahead=1)
    return Sampler(
        config,
        engine=group,
        next_prompt=prompts.next,
        give_back=prompts.give_back,
        score=scored,
        n=4,
        sampling=SamplingParams(LIMIT),
        run_seed=3,
        deterministic=deterministic,
    )


def test_a_run_goes_on_when_an_engine_dies_and_says_what_was_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        engines = [Mortal(slots=8, live_updates=True) for _ in range(2)]
        group = EngineGroup(engines, False)
        made = sampler(group, False)
        for version in range(6):
            await group.load_weights(WeightUpdate(version))
            if version == 3:
                asyncio.get_running_loop().call_later(
                    0.0, lambda: setattr(engines[0], "is_killed", True)
                )
            step = await made.step(version)
            assert len(step.groups) == 6
            assert all(len(each.answers) == 4 for each in step.groups)
        made.ledger.account.check()
        lost = group.status().generated_tokens - made.ledger.account.generated
        told = [r.getMessage() for r in caplog.records if "never came back" in r.getMessage()]
        if lost:
            assert len(told) == 1
            assert f"the engine wrote {lost} tokens that never came back" in told[0]
        assert group.dead == ["engine 0"]
        await group.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(run(), 30))


def test_steps_of_a_deterministic_run_do_not_depend_on_the_engines_speeds() -> None:
    def steps(delays: Sequence[int]) -> list[str]:
        async def run() -> list[str]:
            group = EngineGroup([Mortal(slots=5, delay=delay) for delay in delays], True)
            made = sampler(group, True)
            told = []
            for version in range(4):
                await group.load_weights(WeightUpdate(version))
                step = await made.step(version)
                told.append(repr((step.counts, [g.id for g in step.groups])))
            return told

        return asyncio.run(run())

    assert steps([0, 0, 0]) == steps([3, 11, 0])


def test_evaluation_writes_on_all_engines() -> None:
    async def run() -> None:
        engines = [ScriptedEngine(length, slots=4) for _ in range(2)]
        done = await generate(EngineGroup(engines, True), [request(g) for g in range(10)])
        assert len(done) == 30
        assert all(engine.submitted for engine in engines)

    asyncio.run(run())


def test_an_empty_prefix_is_a_fresh_answer() -> None:
    empty = Segment(np.zeros(0, np.int64), np.zeros(0, np.float32), ())
    asked = request(0, answers=2)
    asked = replace(asked, answers=tuple(replace(a, prefix=empty) for a in asked.answers))

    async def run() -> list[CompletionEvent]:
        group = EngineGroup([ScriptedEngine(length)], True)
        await group.submit([asked])
        return await drained(group)

    assert len(asyncio.run(run())) == 2
