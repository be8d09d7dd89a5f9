"""Several remote engines whose replies take any time and overtake each other: nothing is lost."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import pytest
from tests.engines import ScriptedEngine
from tests.examples import examples
from tests.unit.rollout.test_engine_group import Step, Story, length

from winnow.errors import WorkerError
from winnow.rollout import remote_engine
from winnow.rollout.engine import CompletionEvent
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine, Reply

SEEDS = 120
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
