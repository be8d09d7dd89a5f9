"""Weights in buckets: bounded, exact, acknowledged with what the engine's model holds."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_models import digits_model
from tests.stored import Elsewhere
from torch import Tensor, nn

from winnow.errors import PublicationError, WorkerError
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout import tick_engine
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.weights import (
    BUCKET_BYTES,
    Bucket,
    WeightReceiver,
    WeightUpdate,
    fetch_buckets,
    free_host_bytes,
    load_stored,
    pack_buckets,
    send_weights,
    store_bucket,
    to_array,
    to_tensor,
)
from winnow.workers.local import SharedStore

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


class Holder(nn.Module):
    """Parameters of any shape and dtype, two of them tied, and a buffer."""

    def __init__(self, shapes: list[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tied = self.first = nn.Parameter(torch.randn(3))
        for i, shape in enumerate(shapes):
            dtype = (torch.float32, torch.bfloat16)[i % 2]
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
        self.register_buffer("scale", torch.randn(2))

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), "scale": self.scale}


class Model:
    """A receiver that is nothing but a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    async def take_bucket(self, bucket: Bucket) -> int:
        if bucket.index == 0:
            self.arriving = WeightReceiver(self.model, bucket.version)
        return self.arriving.take(bucket)

    async def load_weights(self, update: WeightUpdate) -> None:
        self.arriving.finish(update.version)


async def load_all(update: WeightUpdate, receiver: Model) -> None:
    async for _ in load_stored(update, receiver.take_bucket):
        pass


async def publish(
    update: WeightUpdate, bucket_bytes: int = BUCKET_BYTES, **receivers: Model | TorchEngine
) -> None:
    async def take(bucket: Bucket) -> dict[str, int]:
        held = await asyncio.gather(*(each.take_bucket(bucket) for each in receivers.values()))
        return dict(zip(receivers, held, strict=True))

    await send_weights(update, take, bucket_bytes)
    for each in receivers.values():
        await each.load_weights(WeightUpdate(update.version))


@given(
    st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), max_size=5), st.integers(1, 300)
)
def test_every_receiver_has_the_same_bits_whatever_the_size_of_buckets(
    shapes: list[tuple[int, ...]], size: int
) -> None:
    source, targets = Holder(shapes, 0), [Holder(shapes, 1), Holder(shapes, 2)]
    update = WeightUpdate(7, source.tensors().items())
    asyncio.run(publish(update, size, a=Model(targets[0]), b=Model(targets[1])))
    for target in targets:
        for name, tensor in source.tensors().items():
            assert torch.equal(target.tensors()[name], tensor)
    made = list(pack_buckets(WeightUpdate(7, source.tensors().items()), size))
    sizes = [sum(piece.array.nbytes for piece in bucket.pieces) for bucket in made]
    assert all(each <= max(size, 4) for each in sizes)
    assert [bucket.index for bucket in made] == list(range(len(made)))
    # None of them is left half empty where more fits.
    assert all(each > size - 4 for each in sizes[:-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_is_the_tensors_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.1, -3.0], [1e-20, 2.5]]).to(dtype)
    array = to_array(tensor)
    assert torch.equal(to_tensor(array, dtype), tensor.view(-1))
    assert array.itemsize == tensor.itemsize
    assert (array.dtype == np.uint16) == (dtype == torch.bfloat16)


def test_the_checksum_is_of_what_the_model_holds_not_of_what_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(array: Any, dtype: torch.dtype) -> Tensor:
        tensor = to_tensor(array, dtype).clone()
        tensor[-1] += 1
        return tensor

    monkeypatch.setattr("winnow.rollout.weights.to_tensor", careless)
    source, target = Holder([(4, 4)], 0), Holder([(4, 4)], 1)
    with pytest.raises(PublicationError, match="a has other bytes than were sent in bucket 0"):
        asyncio.run(publish(WeightUpdate(1, source.tensors().items()), a=Model(target)))


def test_weights_of_another_shape_or_dtype_are_refused() -> None:
    target = Holder([(4, 4), (3,)], 1)
    for source in (Holder([(4, 5), (3,)], 0), Holder([(4, 4)], 0).bfloat16()):
        with pytest.raises(PublicationError, match="use the same model"):
            asyncio.run(publish(WeightUpdate(1, source.tensors().items()), a=Model(target)))


def test_an_update_of_nothing_is_refused() -> None:
    model = Model(Holder([], 1))
    for work in (
        publish(WeightUpdate(1, []), a=model),
        load_all(WeightUpdate(1, stored=[Elsewhere([])]), model),
    ):
        with pytest.raises(PublicationError, match="version 1: the update has no tensors"):
            asyncio.run(work)


def test_a_tensor_that_the_engine_does_not_have_is_refused() -> None:
    tensors = [*Holder([], 0).tensors().items(), ("ghost", torch.zeros(3))]
    with pytest.raises(PublicationError, match=r"ghost \[3\] float32.*no such tensor"):
        asyncio.run(publish(WeightUpdate(1, tensors), a=Model(Holder([], 1))))


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 2)])
def test_buckets_come_in_order_and_each_once(order: tuple[int, int]) -> None:
    source = Holder([(4, 4), (5, 5), (6,)], 0)
    made = list(pack_buckets(WeightUpdate(1, source.tensors().items()), 40))

    async def run() -> None:
        arriving = WeightReceiver(Holder([(4, 4), (5, 5), (6,)], 1), 1)
        for place in order:
            arriving.take(made[place])

    with pytest.raises(PublicationError, match=r"got bucket \d of version 1, expected bucket \d"):
        asyncio.run(run())


# In the embedded engine


def engine_of(live_updates: bool, **options: Any) -> TorchEngine:
    model = digits_model()
    use_layout_attention(model)
    options = {"slots": 2, "prefill_tokens": 64, "live_updates": live_updates, **options}
    return TorchEngine(model.eval(), **options)


def ask_for(limit: int) -> GroupRequest:
    return GroupRequest(0, np.array([3, 4]), (AnswerRequest(0, 1),), SamplingParams(limit), 0)


async def test_no_token_is_drawn_between_the_first_bucket_and_the_last() -> None:
    engine = engine_of(live_updates=True)
    update = WeightUpdate(3, list(digits_model(initializer_range=0.5).named_parameters()))
    await engine.submit([ask_for(20)])
    assert await engine.events(until=5) == []
    waiting: Any = None
    for bucket in pack_buckets(update, 4096):
        held = await engine.take_bucket(bucket)
        waiting = waiting or asyncio.ensure_future(engine.events())
        assert held == bucket.checksum()
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.status().tick == 5
    assert engine.status().weight_version == 0
    await engine.load_weights(WeightUpdate(3))
    (event,) = await waiting
    assert [(s.version, s.stop) for s in event.segment.spans] == [(0, 5), (3, 20)]


async def test_weights_are_not_taken_for_those_of_another_version() -> None:
    engine = engine_of(live_updates=True)
    for bucket in pack_buckets(WeightUpdate(3, list(digits_model().named_parameters()))):
        await engine.take_bucket(bucket)
    with pytest.raises(PublicationError, match="weights of version 4: got buckets of version 3"):
        await engine.load_weights(WeightUpdate(4))
    assert engine.status().weight_version == 0


async def test_an_update_that_broke_off_can_be_begun_again_and_nothing_is_drawn_before() -> None:
    engine = engine_of(live_updates=True)
    tensors = list(digits_model(initializer_range=0.5).named_parameters())
    await engine.submit([ask_for(6)])
    with pytest.raises(PublicationError, match="are missing, such as"):
        await publish(WeightUpdate(1, tensors[:-1]), a=engine)
    waiting = asyncio.ensure_future(engine.events())
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.status().tick == 0
    await publish(WeightUpdate(2, tensors), a=engine)
    (event,) = await waiting
    assert event.segment.spans[0].version == 2


LONG = 200
"""Tokens of an answer that does not end while an update is on its way."""


def learned() -> dict[str, Tensor]:
    return dict(digits_model(initializer_range=0.5).named_parameters())


async def updated_at(tick: int, tensors: Any) -> Any:
    """An answer of an engine that stood still at this tick while the update came."""
    engine = engine_of(live_updates=True)
    await engine.submit([ask_for(LONG)])
    assert await engine.events(until=tick) == []
    await publish(WeightUpdate(3, tensors), a=engine)
    (event,) = await engine.events()
    return event.segment


def in_buckets(engine: TorchEngine, source: dict[str, Tensor]) -> Any:
    return publish(WeightUpdate(3, source.items()), 4096, a=engine)


def by_name(engine: TorchEngine, source: dict[str, Tensor]) -> Any:
    return engine.load_weights(WeightUpdate(3, iter(source.items())))


def from_stores(engine: TorchEngine, source: dict[str, Tensor]) -> Any:
    buckets = pack_buckets(WeightUpdate(3, source.items()), 4096)
    return engine.load_weights(WeightUpdate(3, stored=[Elsewhere(list(buckets))]))


@pytest.mark.parametrize("send", [in_buckets, by_name, from_stores])
async def test_answers_go_on_while_an_update_comes_beside_the_weights(
    send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, copied = engine_of(live_updates=True, staging_engines=1), list[int]()

    async def noted(work: Any) -> Any:
        copied.append(engine.status().tick)
        assert engine.status().weight_version == 0
        await asyncio.sleep(0)
        return work()

    monkeypatch.setattr(tick_engine, "in_thread", noted)
    await engine.submit([ask_for(LONG)])
    assert await engine.events(until=5) == []
    await send(engine, learned())
    at = engine.status().tick
    # A tick at least for each bucket, or tensor, before the next one is begun.
    assert len(copied) > 1
    assert all(later > earlier for earlier, later in itertools.pairwise([*copied, at]))
    (event,) = await engine.events()
    assert [(s.version, s.stop) for s in event.segment.spans] == [(0, at), (3, LONG)]
    expected = await updated_at(at, learned().items())
    np.testing.assert_array_equal(event.segment.token_ids, expected.token_ids)
    assert event.segment.logprobs.tobytes() == expected.logprobs.tobytes()


@pytest.mark.parametrize("fault", ["the sender is gone", "a tensor is missing", "a bit is wrong"])
async def test_an_update_beside_the_weights_that_breaks_off_leaves_them_whole(fault: str) -> None:
    engine, tensors = engine_of(live_updates=True, staging_engines=1), list(learned().items())
    await engine.submit([ask_for(LONG)])
    packed = list(pack_buckets(WeightUpdate(1, tensors[:-1]), 4096))
    if fault == "the sender is gone":
        await engine.take_bucket(packed[0])
    else:
        last = packed[-1]
        if fault == "a bit is wrong":
            packed[-1] = replace(last, stored_checksum=last.checksum() ^ 1)
        with pytest.raises(PublicationError, match="missing" if last is packed[-1] else "bytes"):
            await engine.load_weights(WeightUpdate(1, stored=[Elsewhere(packed)]))
        assert engine._receiving is None
    at = engine.status().tick
    assert engine.status().weight_version == 0
    assert await engine.events(until=at + 5) == []
    for name, parameter in digits_model().named_parameters():
        assert torch.equal(engine._model.get_parameter(name), parameter)
    # The next one is complete.
    await publish(WeightUpdate(3, tensors), a=engine)
    now = engine.status().tick
    assert 0 < at < at + 5 < now
    (event,) = await engine.events()
    expected = await updated_at(now, tensors)
    assert event.segment.spans == expected.spans
    assert event.segment.logprobs.tobytes() == expected.logprobs.tobytes()


async def test_without_answers_or_memory_an_update_goes_into_the_weights() -> None:
    bucket, *_ = pack_buckets(WeightUpdate(1, learned().items()), 1000)
    for staging, answers in ((1, []), (10**15, [ask_for(9)]), (0, [ask_for(9)])):
        engine = engine_of(live_updates=True, staging_engines=staging)
        await engine.submit(answers)
        await engine.take_bucket(bucket)
        assert engine._receiving is not None
        assert not engine._receiving.is_staged


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({"": "max"}, 8 << 20),
        ({"": "5000000"}, 2_000_000),
        ({"job/step/memory.max": "max", "job/memory.max": "6000000"}, 3_000_000),
        ({"memory/job/step/memory.limit_in_bytes": "4000000"}, 1_000_000),
    ],
)
def test_free_memory_is_what_machine_container_and_job_leave(
    limits: dict[str, str], free: int, tmp_path: Path
) -> None:
    used = "anon 1000000\nfile 4000000\nshmem 2000000\ntotal_rss 3000000\n"
    groups = "4:memory:/job/step\n" if "memory/" in "".join(limits) else "0::/job/step\n"
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8192 kB\n",
        "proc/self/cgroup": f"1:cpu:/other\n{groups}",
    }
    for name, limit in limits.items():
        file = Path("sys/fs/cgroup") / (name or "memory.max")
        files |= {str(file): f"{limit}\n", str(file.parent / "memory.stat"): used}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_host_bytes(tmp_path) == free
    assert free_host_bytes(tmp_path / "nothing") == 0


class Shelf:
    """Implements `Store`."""

    def __init__(self) -> None:
        self.handles: list[Elsewhere] = []

    def put(self, value: Any) -> Elsewhere:
        copied = tuple(map(np.copy, value)) if isinstance(value, tuple) else value
        self.handles.append(Elsewhere(copied))
        return self.handles[-1]

    def clear(self) -> None:
        self.handles.clear()


def shared(source: Holder, ranks: int, size: int, store: Any) -> WeightUpdate:
    """An update that each of some ranks packs a part of, as it arrives at an engine."""
    shares = []
    for rank in range(ranks):
        named = WeightUpdate(4, source.tensors().items())
        shares.append([store_bucket(b, store) for b in pack_buckets(named, size, rank, ranks)])
    return WeightUpdate(4, stored=[Elsewhere(share) for share in shares])


def listed(update: WeightUpdate) -> list[Bucket]:
    """The buckets of all shares, in order."""
    shares: list[Any] = [share.get() for share in update.stored or ()]
    return sorted((bucket for share in shares for bucket in share), key=attrgetter("index"))


@given(
    st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), max_size=5),
    st.integers(1, 300),
    st.integers(1, 5),
)
def test_what_ranks_share_out_is_what_one_packs(
    shapes: list[tuple[int, ...]], size: int, ranks: int
) -> None:
    source, target, shelf = Holder(shapes, 0), Holder(shapes, 1), Shelf()
    update = shared(source, ranks, size, shelf)
    whole = list(pack_buckets(WeightUpdate(4, source.tensors().items()), size))
    assert [b.checksum() for b in listed(update)] == [b.checksum() for b in whole]
    assert not any(handle.fetched for handle in shelf.handles), "a checksum needs no bytes"
    model = Model(target)
    asyncio.run(load_all(update, model))
    asyncio.run(model.load_weights(update))
    for name, tensor in source.tensors().items():
        assert torch.equal(target.tensors()[name], tensor)
    assert [handle.fetched for handle in shelf.handles] == [1] * len(whole)


def test_one_stored_bucket_is_here_and_the_next_on_its_way() -> None:
    shelf = Shelf()
    update = shared(Holder([(8, 8), (5,)], 3), 1, 64, shelf)
    assert len(shelf.handles) > 3
    for index, bucket in enumerate(fetch_buckets(update.stored or ())):
        np.asarray(bucket.pieces[0].array)
        blocks = [b.pieces[0].array.block for b in listed(update)]  # type: ignore[attr-defined]
        assert [block.is_fetched for block in blocks] == [i == index for i in range(len(blocks))]
        begun = [handle.begun for handle in shelf.handles]
        assert begun == [int(0 < i <= index + 1) for i in range(len(begun))]


def test_bytes_that_changed_where_they_lie_are_noticed() -> None:
    shelf = Shelf()
    update = shared(Holder([(3, 4), (5,)], 3), 1, 1000, shelf)
    shelf.handles[0].value[1].view(np.uint8)[0] ^= 1
    engine = Model(Holder([(3, 4), (5,)], 1))
    with pytest.raises(PublicationError, match="has other bytes than were sent in bucket 0"):
        asyncio.run(load_all(update, engine))


async def test_an_engine_takes_stored_buckets_and_counts_them() -> None:
    engine, source = engine_of(live_updates=True), digits_model()
    torch.nn.init.normal_(source.lm_head.weight)
    named = WeightUpdate(2, source.named_parameters())
    store = SharedStore("learner", 0)
    packed = [store_bucket(bucket, store) for bucket in pack_buckets(named, 1024)]
    share = pickle.loads(pickle.dumps(store.put(packed)))
    await engine.load_weights(WeightUpdate(2, stored=[share]))
    assert engine.status().weight_version == 2
    assert engine.status().buckets == len(packed) > 3
    for one, two in zip(engine._model.parameters(), source.parameters(), strict=True):
        assert torch.equal(one, two)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=6))
def test_a_shared_store_keeps_arrays_until_it_is_cleared(sizes: list[int]) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    store = SharedStore("learner", 3)
    stored = [store.put((np.arange(size), np.arange(2.0))) for size in sizes]
    assert len(os.listdir("/proc/self/fd")) == open_files + 1
    handles = pickle.loads(pickle.dumps(stored))
    found = [handle.get() for handle in handles]
    store.clear()
    for size, (first, second) in zip(sizes, found, strict=True):
        assert (first.tolist(), second.tolist()) == (list(range(size)), [0.0, 1.0])
    del found, first, second
    assert len(os.listdir("/proc/self/fd")) == open_files
    for handle in handles:
        with pytest.raises(WorkerError, match=r"data of learner\[3\] is lost"):
            handle.get()
    assert store.put((np.ones(1),)).get()[0].tolist() == [1.0]
    store.clear()
