"""An engine behind a wire: replies that overtake each other, answers that travel with calls."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tests.small_models import digits_model
from tests.stored import Elsewhere

from winnow.errors import WorkerError
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout import remote_engine, tick_engine
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine
from winnow.rollout.weights import WeightUpdate, pack_buckets
from winnow.types import FloatArray, IntArray, Segment, VersionSpan
from winnow.workers.array_refs import ArrayBlock, ArrayRef


class Wire:
    """Calls reach the worker at once; replies to methods that are held wait."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self.held: dict[str, asyncio.Event] = {}
        self.fatal: str | None = None
        self.dies = asyncio.Event()
        self.calls: list[str] = []

    def hold(self, method: str) -> asyncio.Event:
        self.held[method] = asyncio.Event()
        return self.held[method]

    def dies_in(self, method: str) -> None:
        self.fatal = method

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        assert method == "call"
        self.calls.append(args[0])
        reply = await self._worker.call(*args)
        if args[0] == self.fatal:
            await self.dies.wait()
            raise WorkerError("the process was killed", "engine 0", 0)
        if args[0] in self.held:
            await self.held.pop(args[0]).wait()
        return pickle.loads(pickle.dumps(reply))


async def connected(slots: int = 8, **options: Any) -> tuple[RemoteEngine, Wire, TorchEngine]:
    model = digits_model(max_position_embeddings=4096)
    use_layout_attention(model)
    engine = TorchEngine(model.eval(), slots=slots, prefill_tokens=64, **options)
    wire = Wire(EngineWorker(engine))
    return RemoteEngine(wire, await wire.call_rank(0, "call", "")), wire, engine


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


@pytest.mark.parametrize("is_faster", [True, False])
async def test_replies_that_overtake_each_other_are_entered_in_the_order_of_calls(
    is_faster: bool,
) -> None:
    remote, wire, engine = await connected()
    await remote.submit(requests([5, 9, 20]))
    assert kinds(await remote.events()) == [(0, "finished", 5)]
    look, wait = wire.hold("progress"), wire.hold("events")
    looking = asyncio.ensure_future(remote.progress())
    await turns(5)
    waiting = asyncio.ensure_future(remote.events())
    await turns(50)  # answered by now
    if is_faster:
        wait.set()
        await turns(5)
    assert not waiting.done()
    assert remote.status().tick == 5
    look.set()
    if is_faster:
        assert kinds(await looking) == [(1, "running", 5), (2, "running", 5)]
        assert kinds(await waiting) == [(1, "finished", 9)]
        return
    wait.set()
    assert kinds(await waiting) == [(1, "finished", 9)]
    # Not that answer 1 is running: it has ended, and the look was taken again.
    assert kinds(await looking) == [(2, "running", 9)]
    assert wire.calls.count("progress") == 2
    assert remote.status().generated_tokens == 5 + 9 + 9 == engine.status().generated_tokens


async def test_all_up_to_a_tick_comes_in_one_call_that_takes_new_answers_along() -> None:
    remote, wire, _ = await connected()
    await remote.submit(requests([3, 5, 9, 20]))
    assert (remote.status().queued, wire.calls) == (4, [""])
    told = await remote.events(10, gather=True)
    assert kinds(told) == [(0, "finished", 3), (1, "finished", 5), (2, "finished", 9)]
    assert [event.tick for event in told] == [3, 5, 9]
    assert (remote.status().tick, remote.status().queued) == (10, 0)
    assert kinds(await remote.events(100, gather=True)) == [(3, "finished", 20)]
    assert wire.calls == ["", "events", "events"]


async def test_answers_that_are_submitted_beside_a_wait_are_sent_at_once() -> None:
    remote, wire, engine = await connected()
    await remote.submit(requests([60]))
    release = wire.hold("events")
    waiting = asyncio.ensure_future(remote.events())
    await turns(5)
    await remote.submit(requests([60, 30])[1:])
    assert remote.status().queued >= 1
    await turns(5)
    assert engine.status().running == 2
    release.set()
    assert kinds(await waiting) == [(1, "finished", 30)]
    assert wire.calls == ["", "events", "events"]


async def test_a_worker_that_dies_fails_a_reply_that_came_before_its_turn() -> None:
    remote, wire, _ = await connected()
    await remote.submit(requests([3]))
    wire.dies_in("progress")
    looking = asyncio.ensure_future(remote.progress())
    await turns(5)
    waiting = asyncio.ensure_future(remote.events())
    await turns(50)
    assert not waiting.done()
    wire.dies.set()
    for call in (looking, waiting):
        with pytest.raises(WorkerError, match="was killed"):
            await asyncio.wait_for(call, 5)


class Lost(Elsewhere):
    """What was kept on a node that is gone."""

    def get(self) -> Any:
        super().get()
        raise WorkerError("what engine 0[0] wrote is lost", "engine 0", 0)


async def test_an_answer_whose_prefix_is_lost_is_begun_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remote, _, _ = await connected()
    (whole,) = requests([9])
    block = ArrayBlock(handle=Lost(None))
    prefix = Segment(
        cast("IntArray", ArrayRef(block, 0, 0, 4, np.int64)),
        cast("FloatArray", ArrayRef(block, 1, 0, 4, np.float32)),
        (VersionSpan(0, 4),),
    )
    cut = replace(whole, group_id=1, answers=(AnswerRequest(0, 0, prefix),))
    told: list[CompletionEvent] = []
    for group in (whole, cut):
        await remote.submit([group])
        told += await remote.events()
    first, second = told
    assert (len(second.segment), second.kind) == (9, "finished")
    np.testing.assert_array_equal(first.segment.token_ids, second.segment.token_ids)
    assert "restarts without its prefix" in caplog.text


async def test_nothing_to_tell_from_before_an_abort_does_not_mean_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine, "PATIENCE_S", 1e-9)

    remote, wire, _ = await connected()
    await remote.submit(requests([60]))
    release = wire.hold("events")
    waiting = asyncio.ensure_future(remote.events())
    await turns(20)  # it ran out of patience there, the reply is on its way
    aborting = asyncio.ensure_future(remote.abort([0]))
    await turns(20)
    release.set()
    await aborting
    ((group, kind, _),) = kinds(await waiting)
    assert (group, kind) == (0, "aborted")
    assert remote.status().running == remote.status().queued == 0


async def test_the_reply_to_an_abort_brings_what_it_ended() -> None:
    remote, wire, _ = await connected()
    await remote.submit(requests([60]))
    await remote.abort([0])
    assert kinds(await remote.events()) == [(0, "aborted", 0)]
    assert wire.calls == ["", "abort"]


async def test_answers_that_end_while_an_update_comes_are_told_before_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def at_once(work: Any) -> Any:
        await asyncio.sleep(0)
        return work()

    monkeypatch.setattr(tick_engine, "in_thread", at_once)  # a few ticks a bucket
    remote, wire, _ = await connected(live_updates=True, staging_engines=1)
    tensors = digits_model(initializer_range=0.5).named_parameters()
    buckets = list(pack_buckets(WeightUpdate(1, tensors), 64))
    await remote.submit(requests([5, 40, 3000]))
    assert await remote.events(until=1) == []
    loading = asyncio.ensure_future(
        remote.load_weights(WeightUpdate(1, stored=[Elsewhere(buckets)]))
    )
    for length in (5, 40, 5):
        ((_, kind, tokens),) = kinds(await remote.events())
        assert (kind, tokens) == ("finished", length)
        assert not loading.done()
        assert remote.status().weight_version == 0
        if length == 40:
            await remote.submit(requests([5]))  # into a row that is free again
    await loading
    assert wire.calls.count("take_stored") > 2
    (event,) = await remote.events()
    assert [span.version for span in event.segment.spans] == [0, 1]


async def test_progress_of_the_worker_moves_with_tokens_and_replies() -> None:
    remote, wire, engine = await connected()
    worker = wire._worker
    before = worker.progress
    await remote.submit(requests([6]))
    await remote.progress()
    assert worker.progress == before + 1
    await engine.events(until=4)
    assert worker.progress == before + 5
