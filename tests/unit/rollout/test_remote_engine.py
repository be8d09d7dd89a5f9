"""An engine behind a wire: replies that overtake each other, a status that does not grow old."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tests.small_models import digits_model
from tests.stored import Elsewhere

from winnow.errors import WorkerError
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout import remote_engine
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    GroupRequest,
    SamplingParams,
    WeightUpdate,
)
from winnow.rollout.remote_engine import RemoteEngine
from winnow.rollout.torch_engine import TorchEngine
from winnow.rollout.worker import EngineWorker
from winnow.types import FloatArray, IntArray, Segment, VersionSpan
from winnow.workers.array_refs import ArrayBlock, ArrayRef


class Wire:
    """Calls reach the worker at once; replies to methods that are held wait."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self.held: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []

    def hold(self, method: str) -> asyncio.Event:
        self.held[method] = asyncio.Event()
        return self.held[method]

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        name = args[0] if method == "ask" else method
        self.calls.append(name)
        reply = await getattr(self._worker, method)(*args)
        if name in self.held:
            await self.held.pop(name).wait()
        return reply


async def connected(slots: int = 8) -> tuple[RemoteEngine, Wire, TorchEngine]:
    model = digits_model()
    use_layout_attention(model)
    engine = TorchEngine(model.eval(), slots=slots, prefill_tokens=64)
    wire = Wire(EngineWorker(engine))
    return await RemoteEngine.connect(wire), wire, engine


def requests(lengths: Sequence[int]) -> list[GroupRequest]:
    return [
        GroupRequest(g, np.array([3, 4]), (AnswerRequest(0, g),), SamplingParams(limit), g)
        for g, limit in enumerate(lengths)
    ]


async def turns(count: int = 200) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def kinds(events: Sequence[CompletionEvent]) -> list[tuple[int, str, int]]:
    return [(e.group_id, e.kind, len(e.segment)) for e in events]


def test_a_look_at_progress_that_later_news_overtook_is_taken_again() -> None:
    async def run() -> None:
        remote, wire, engine = await connected()
        await remote.submit(requests([5, 9, 20]))
        assert kinds(await remote.events()) == [(0, "finished", 5)]
        release = wire.hold("progress")
        looking = asyncio.ensure_future(remote.progress())
        await turns(5)
        assert kinds(await remote.events()) == [(1, "finished", 9)]
        release.set()
        told = await looking
        # Not that answer 1 is running: it has ended, and everybody knows.
        assert kinds(told) == [(2, "running", 9)]
        assert wire.calls.count("progress") == 2
        assert remote.status().generated_tokens == 5 + 9 + 9 == engine.status().generated_tokens

    asyncio.run(run())


def test_all_up_to_a_tick_comes_in_one_call() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        told = await remote.events_to(10, requests([3, 5, 9, 20]))
        assert kinds(told) == [(0, "finished", 3), (1, "finished", 5), (2, "finished", 9)]
        assert [event.tick for event in told] == [3, 5, 9]
        assert remote.status().tick == 10
        assert kinds(await remote.events_to(100, [])) == [(3, "finished", 20)]
        assert wire.calls == ["", "events", "events"]

    asyncio.run(run())


def test_what_is_submitted_beside_a_call_under_way_is_written_all_the_same() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        release = wire.hold("events")
        waiting = asyncio.ensure_future(remote.events_to(4, requests([3])))
        await turns(50)  # answered; the reply is on its way
        waiting.cancel()
        later = asyncio.ensure_future(remote.events_to(9, requests([3, 5])[1:]))
        await turns(20)
        release.set()
        told = [*await later]
        while len(told) < 2:
            told += await remote.events_to(9, [])
        assert kinds(told) == [(0, "finished", 3), (1, "finished", 5)]
        assert wire.calls.count("submit") == 1

    asyncio.run(run())


def test_what_is_submitted_behind_an_inbox_that_nobody_took_is_written_too() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        release = wire.hold("events")
        waiting = asyncio.ensure_future(remote.events_to(4, requests([3])))
        await turns(50)
        hearing = remote._listening
        assert hearing is not None
        hearing.add_done_callback(lambda _: waiting.cancel())  # in the turn in which it comes
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        told = [*await remote.events_to(9, requests([3, 5])[1:])]
        told += await remote.events_to(9, [])
        assert kinds(told) == [(0, "finished", 3), (1, "finished", 5)]

    asyncio.run(run())


class Lost(Elsewhere):
    """What was kept on a node that is gone."""

    def get(self) -> Any:
        super().get()
        raise WorkerError("what engine 0[0] wrote is lost", "engine 0", 0)


@pytest.mark.parametrize("way", ["submit", "events_to"])
def test_an_answer_whose_prefix_is_lost_is_begun_anew(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[CompletionEvent]:
        remote, _, _ = await connected()
        (whole,) = requests([9])
        shelf = ArrayBlock(Lost(None))
        prefix = Segment(
            cast("IntArray", ArrayRef(shelf, 0, 0, 4, np.int64)),
            cast("FloatArray", ArrayRef(shelf, 1, 0, 4, np.float32)),
            (VersionSpan(0, 4),),
        )
        cut = replace(whole, group_id=1, answers=(AnswerRequest(0, 0, prefix),))
        told = []
        for group in (whole, cut):
            if way == "submit":
                await remote.submit([group])
                told += await remote.events()
            else:
                told += await remote.events_to(remote.status().tick + 20, [group])
        return told

    first, second = asyncio.run(run())
    assert (len(second.segment), second.kind) == (9, "finished")
    np.testing.assert_array_equal(first.segment.token_ids, second.segment.token_ids)
    assert "begun anew" in caplog.text


def test_events_that_were_answered_before_a_look_come_with_it() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        await remote.submit(requests([5, 20]))
        release = wire.hold("events")
        waiting = asyncio.ensure_future(remote.events())
        await turns(50)  # the worker has answered, the reply is on its way
        looking = asyncio.ensure_future(remote.progress())
        await turns(20)
        assert not looking.done()
        waiting.cancel()
        release.set()
        assert kinds(await looking) == [(0, "finished", 5), (1, "running", 5)]

    asyncio.run(run())


def test_an_engine_is_not_idle_while_a_look_at_it_may_bring_its_last_answer() -> None:
    async def run() -> None:
        remote, wire, engine = await connected()
        await remote.submit(requests([5]))
        writing = asyncio.ensure_future(engine.events())
        while engine.status().tick < 5:
            await asyncio.sleep(0)
        writing.cancel()  # the answer's end waits in the engine for whoever asks first
        release = wire.hold("progress")
        looking = asyncio.ensure_future(remote.progress())
        await turns(5)
        waiting = asyncio.ensure_future(remote.events())
        await turns(50)
        assert not waiting.done()
        release.set()
        assert kinds(await looking) == [(0, "finished", 5)]
        assert await waiting == []

    asyncio.run(run())


def test_a_reply_that_comes_late_does_not_set_the_status_back() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        release = wire.hold("submit")
        first = asyncio.ensure_future(remote.submit(requests([5])))
        await turns(5)
        await remote.events()
        assert remote.status().tick == 5
        release.set()
        await first
        assert remote.status().tick == 5
        assert remote.status().queued == 0

    asyncio.run(run())


def test_the_status_moves_while_a_long_answer_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine, "PATIENCE_S", 1e-9)

    async def run() -> None:
        remote, wire, _ = await connected()
        await remote.submit(requests([60]))
        waiting = asyncio.ensure_future(remote.events())
        seen = set()
        while not waiting.done():
            await asyncio.sleep(0)
            seen.add(remote.status().generated_tokens)
        assert kinds(waiting.result()) == [(0, "finished", 60)]
        assert len(seen) > 10
        assert wire.calls.count("events") > 10

    asyncio.run(run())


def test_nothing_to_tell_from_before_an_abort_does_not_mean_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine, "PATIENCE_S", 1e-9)

    async def run() -> None:
        remote, wire, _ = await connected()
        await remote.submit(requests([60]))
        release = wire.hold("events")
        waiting = asyncio.ensure_future(remote.events())
        await turns(20)  # it ran out of patience there, the reply is on its way
        await remote.abort([0])
        assert remote.status().running == remote.status().queued == 0
        release.set()
        ((group, kind, _),) = kinds(await waiting)
        assert (group, kind) == (0, "aborted")

    asyncio.run(run())


def test_a_look_that_is_taken_again_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        await remote.submit(requests([5, 9, 20]))
        await remote.events()
        release = wire.hold("progress")
        looking = asyncio.ensure_future(remote.progress())
        await turns(5)
        await remote.events()
        monkeypatch.setattr(remote_engine, "PATIENCE_S", 1e-9)
        again = wire.hold("progress")
        waiting = asyncio.ensure_future(remote.events())
        release.set()
        await turns(5)
        assert wire.calls.count("progress") == 2
        assert kinds(await waiting) == [(2, "finished", 20)]
        again.set()
        await looking

    asyncio.run(run())


def test_a_wait_that_is_cancelled_goes_on_and_is_not_begun_twice() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        await remote.submit(requests([30, 30]))
        for _ in range(3):
            waiting = asyncio.ensure_future(remote.events())
            await turns(2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        events = await remote.events()
        assert kinds(events) == [(0, "finished", 30), (1, "finished", 30)]
        assert wire.calls.count("events") == 1

    asyncio.run(run())


def test_new_weights_are_refused_here_so_that_the_worker_need_not_fail() -> None:
    async def run() -> None:
        remote, wire, _ = await connected()
        await remote.submit(requests([30]))
        with pytest.raises(ValueError, match="abort what runs"):
            await remote.load_weights(WeightUpdate(1))
        with pytest.raises(ValueError, match="abort what runs"):
            await remote.begin_update(1)
        assert wire.calls == ["", "submit"]

    asyncio.run(run())


def test_progress_of_the_worker_moves_with_tokens_and_replies() -> None:
    async def run() -> None:
        remote, wire, engine = await connected()
        worker = wire._worker
        before = worker.progress
        await remote.submit(requests([6]))
        assert worker.progress == before + 1
        await engine.events(until=4)
        assert worker.progress == before + 5

    asyncio.run(run())
