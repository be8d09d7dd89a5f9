"""Dead engines of a group are replaced: when, with which weights, and how often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.unit.rollout.test_engine_group import Mortal, drained, ids_of, request, written

from winnow.errors import WorkerError
from winnow.rollout.engine import MemoryPart
from winnow.rollout.replacement import ReplacingEngineGroup
from winnow.rollout.weights import WeightUpdate

NOBODY = {"publish/replaced_engines": 0}
ONE = {"publish/replaced_engines": 1}


class Sleepy(Mortal):
    """Notes when its memory is given back and taken again."""

    def __init__(self, slots: int = 4) -> None:
        super().__init__(slots, live_updates=True)
        self.parts: list[str] = []

    async def sleep(self) -> None:
        self.parts.append("sleep")

    async def wake(self, part: MemoryPart) -> None:
        self.parts.append(part)


@dataclass
class Crew:
    """Two engines, and those that are started in the place of dead ones."""

    at_publication: bool = False
    engines: list[Sleepy] = field(default_factory=lambda: [Sleepy(), Sleepy()])
    ended: list[Sleepy] = field(default_factory=list)
    start: Callable[[], Sleepy] = Sleepy

    def __post_init__(self) -> None:
        self.group = ReplacingEngineGroup([*self.engines], self.restart, self.at_publication)

    async def restart(self, engine: Sleepy) -> Sleepy:
        self.ended.append(engine)
        await asyncio.sleep(0)
        self.engines.append(self.start())
        return self.engines[-1]

    async def publish(self, version: int) -> None:
        await turns()
        await self.group.load_weights(WeightUpdate(version))

    async def kill(self, number: int, answers: bool = False) -> None:
        """Kill an engine while it has an answer, or once it has finished some."""
        if answers:
            await self.group.submit([request(g) for g in range(4)])
            await drained(self.group)
        await self.group.submit([request(g) for g in range(4)])
        self.engines[number].is_killed = True
        assert len(await drained(self.group)) == 12


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_replacement_gets_answers_once_its_first_weights_are_checked() -> None:
    crew = Crew()
    group = crew.group
    await crew.publish(3)
    assert group.admit_replacements() == NOBODY
    await crew.kill(1)
    assert (crew.ended, group.dead) == ([crew.engines[1]], ["engine 1"])
    replacement = crew.engines[2]
    generated = group.status().generated_tokens
    assert list(group.engines) == ["engine 0"]
    await crew.publish(4)
    assert (group.dead, list(group.engines)) == ([], ["engine 0", "engine 1"])
    assert replacement.inner.version == group.status().weight_version == 4
    assert group.status().generated_tokens == generated
    await group.submit([request(g) for g in range(4)])
    assert len(await drained(group)) == 12
    assert replacement.inner.submitted == []
    generated = group.status().generated_tokens
    assert group.admit_replacements() == ONE
    assert group.admit_replacements() == NOBODY
    await group.submit([request(g) for g in range(4, 8)])
    events = await drained(group)
    assert len(replacement.inner.submitted) > 0
    tokens = sum(len(event.segment) for event in events)
    assert group.status().generated_tokens == generated + tokens
    for event in events:
        seed = 100 * event.group_id + event.answer
        assert ids_of(event) == written(seed, 0, len(event.segment), 4).token_ids.tolist()
        assert {span.version for span in event.segment.spans} == {4}


async def test_the_version_is_the_old_one_while_a_replacement_gets_its_first_weights() -> None:
    crew = Crew()
    await crew.publish(3)
    await crew.kill(0)
    await turns()
    crew.engines[1].delay = 8
    loading = asyncio.create_task(crew.publish(4))
    versions = []
    while not loading.done():
        versions.append(crew.group.status().weight_version)
        await asyncio.sleep(0)
    assert {3} <= {*versions} <= {3, 4}
    assert crew.group.status().weight_version == 4


async def test_an_engine_that_dies_again_and_again_is_left_out_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crew = Crew()
    for version in range(1, 4):
        await crew.kill(-1, answers=version == 2)  # then the next one counts as the first
        await crew.publish(version)
        assert crew.group.admit_replacements() == ONE
    await crew.kill(-1)
    await crew.publish(4)
    crew.engines[-1].is_killed = True  # at its first weights
    assert len(crew.engines) == 6
    await crew.publish(5)
    assert (len(crew.engines), crew.group.dead) == (6, ["engine 1"])
    line = "engine 1 is not replaced any more: 3 replacements in a row died before they had finis"
    assert caplog.text.count(line) == 1
    await crew.group.submit([request(9)])
    assert len(await drained(crew.group)) == 3
    crew.engines[0].is_killed = True
    await crew.group.submit([request(10)])
    with pytest.raises(WorkerError, match="the process was killed"):
        await drained(crew.group)


async def test_a_start_that_fails_leaves_the_engine_out_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> Sleepy:
        raise WorkerError("engine 1[0] did not start", "engine 1", 0)

    caplog.set_level(logging.WARNING)
    crew = Crew(start=refuse)
    await crew.kill(1)
    await crew.publish(1)
    assert crew.group.admit_replacements() == NOBODY
    assert len(crew.ended) == 1
    died, left_out = (record.getMessage() for record in caplog.records)
    assert died.startswith("engine 1 died, 1 of 2 engines remain")
    assert left_out.startswith(
        "engine 1 is not replaced, as it cannot be started again: engine 1[0"
    )


async def test_on_devices_of_ranks_it_starts_with_a_publication_and_without_a_cache() -> None:
    crew = Crew(at_publication=True)
    await crew.kill(1)
    await turns()
    await crew.group.sleep()
    await crew.group.wake("weights")
    assert crew.ended == []
    await crew.publish(2)
    await crew.group.wake("cache")
    assert crew.group.admit_replacements() == ONE
    assert crew.engines[2].parts == crew.engines[0].parts == ["sleep", "weights", "cache"]
    await crew.kill(2, answers=True)
    await crew.publish(3)
    assert crew.engines[3].parts == []
    await crew.group.close()
