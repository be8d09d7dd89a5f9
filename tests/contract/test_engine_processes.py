"""Engines in separate processes: the same tokens, verified weights, stop strings.

The contract of `test_engine.py` is run against `RemoteEngine` there, over a wire in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_engine import groups_of, to_the_end
from tests.devices import DEVICE
from tests.small_models import digits_folder, digits_model

from winnow.errors import PublicationError
from winnow.learning.canary import Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import load_causal_lm, use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import CompletionEvent, Engine, GroupRequest, SamplingParams
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import RemoteEngine
from winnow.rollout.weights import WeightUpdate
from winnow.workers.group import WorkerGroup, start_local

pytestmark = pytest.mark.usefixtures("forked_workers")
PATH = "winnow.rollout.remote_engine:TorchEngineWorker"
SLOTS = 4
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("model"), initializer_range=0.3)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 200))


@pytest.fixture(scope="module")
def worker(folder: Path, run: Run) -> Iterator[WorkerGroup]:
    options = {"model": str(folder), "dtype": "float32", "slots": SLOTS, "prefill_tokens": 64}
    options |= {"live_updates": True, "tokenizer": str(folder)}
    devices = None if DEVICE.type == "cpu" else [0]
    group = run(start_local("engine", PATH, options, 1, {"OMP_NUM_THREADS": "1"}, 60.0, devices))
    yield group
    pids = group.pids()
    run(group.close())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def connected(worker: WorkerGroup) -> RemoteEngine:
    return RemoteEngine(worker, await worker.call_rank(0, "call", ""))


async def both(worker: WorkerGroup, folder: Path, deterministic: bool) -> EngineGroup:
    """An engine of this process, and the one of the other."""
    return EngineGroup([in_this_process(folder), await connected(worker)], deterministic)


def requests(count: int, limit: int = 30, **sampling: Any) -> list[GroupRequest]:
    return groups_of(count, sampling=SamplingParams(limit, **sampling), vocabulary=29)


async def written(engine: Engine, groups: Sequence[GroupRequest]) -> dict[Any, CompletionEvent]:
    await engine.submit(groups)
    out = await to_the_end(engine)
    done = {event.key: event for event in out}
    assert len(done) == len(out) == 3 * len(groups)
    return done


def in_this_process(folder: Path) -> TorchEngine:
    model = load_causal_lm(str(folder), torch.float32, DEVICE)
    use_layout_attention(model)
    return TorchEngine(model, slots=SLOTS, prefill_tokens=64, live_updates=True)


def test_an_engine_elsewhere_writes_what_one_here_writes_to_the_bit(
    worker: WorkerGroup, folder: Path, run: Run
) -> None:
    groups = requests(9, stop_token_ids=(1,))

    async def twice() -> tuple[dict[Any, CompletionEvent], dict[Any, CompletionEvent]]:
        here = EngineGroup([in_this_process(folder) for _ in range(2)], True)
        return await written(here, groups), await written(await both(worker, folder, True), groups)

    here, there = run(twice())
    assert set(here) == set(there)
    for key, event in here.items():
        other = there[key]
        np.testing.assert_array_equal(event.segment.token_ids, other.segment.token_ids)
        assert event.segment.logprobs.tobytes() == other.segment.logprobs.tobytes()
        assert (event.tick, event.finish_reason) == (other.tick, other.finish_reason)


def test_new_weights_arrive_in_both_and_the_canary_hears_them(
    worker: WorkerGroup, folder: Path, run: Run
) -> None:
    policy = Strategy(load_model(learned=True))
    canary = Canary.random(29, 256, torch.float32)

    async def publish() -> None:
        group = await both(worker, folder, False)
        expected = canary.score(policy)
        engines: Any = group.engines
        with pytest.raises(PublicationError, match="version 3: engine 0 disagrees"):
            await canary.check(expected, 3, engines)
        await group.load_weights(WeightUpdate(3, policy.export_weights(torch.float32)))
        assert group.status().weight_version == 3
        assert await canary.check(expected, 3, engines) < 1e-5
        done = await written(group, requests(4, limit=5))
        assert {event.segment.spans[0].version for event in done.values()} == {3}

    run(publish())


def load_model(learned: bool) -> Any:
    model = digits_model(initializer_range=0.3).to(DEVICE)
    if learned:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
    use_layout_attention(model)
    return model.eval()


def test_a_stop_string_is_read_with_the_folders_tokenizer(worker: WorkerGroup, run: Run) -> None:
    async def texts() -> list[int]:
        done = await written(await connected(worker), requests(6, stop=("7",)))
        stopped = [e for e in done.values() if e.finish_reason == "stop"]
        assert stopped
        return [int(event.segment.token_ids[-1]) for event in stopped]

    assert len(set(run(texts()))) == 1
