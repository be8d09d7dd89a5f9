"""Dead engines of a group are replaced: when, with which weights, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.unit.rollout.test_engine_group import Mortal, drained, request

from winnow.errors import WorkerError
from winnow.rollout.engine import MemoryPart
from winnow.rollout.replacement import ReplacingEngineGroup
from winnow.rollout.weights import WeightUpdate


class Sleepy(Mortal):
    """Notes when its memory is given back and taken again."""

    def __init__(self) -> None:
        super().__init__(live_updates=True)
        self.parts: list[str] = []

    async def sleep(self) -> None:
        self.parts.append("sleep")

    async def wake(self, part: MemoryPart) -> None:
        self.parts.append(part)


class Crew:
    """Two engines, and those that are started in the place of dead ones."""

    def __init__(self, at_publication: bool = False, start: Callable[[], Sleepy] = Sleepy) -> None:
        self.engines, self.start = [Sleepy(), Sleepy()], start
        self.group = ReplacingEngineGroup([*self.engines], self.restart, at_publication)

    async def restart(self, engine: Sleepy) -> Sleepy:
        assert engine.is_killed
        self.engines.append(self.start())
        return self.engines[-1]

    async def publish(self, version: int) -> set[int]:
        """Publish weights once engines have started; the versions that the group had meanwhile."""
        await asyncio.sleep(0.001)
        loading, versions = asyncio.create_task(self.group.load_weights(WeightUpdate(version))), []
        while not loading.done():
            versions.append(self.group.status().weight_version)
            await asyncio.sleep(0)
        await loading
        return {*versions}

    async def answer(self) -> None:
        await self.group.submit([request(g) for g in range(4)])
        assert {event.kind for event in await drained(self.group)} == {"finished"}

    async def kill(self, number: int) -> None:
        """Kill an engine while it has answers."""
        await self.group.submit([request(g) for g in range(4)])
        self.engines[number].is_killed = True
        assert len(await drained(self.group)) == 12


async def test_a_replacement_gets_answers_once_its_first_weights_are_checked() -> None:
    crew = Crew()
    group, ones = crew.group, {"publish/replaced_engines": 1}
    await crew.publish(3)
    await crew.answer()
    await crew.kill(0)
    generated = group.status().generated_tokens
    assert (group.dead, list(group.engines)) == (["engine 0"], ["engine 1"])
    crew.engines[1].delay = 8
    assert {3} <= await crew.publish(4) <= {3, 4}
    assert list(group.engines) == ["engine 0", "engine 1"]
    assert group.status().generated_tokens == generated
    await crew.answer()
    replacement = crew.engines[2].inner
    assert (replacement.submitted, replacement.version) == ([], 4)
    assert group.admit_replacements() == ones
    assert group.admit_replacements() == {"publish/replaced_engines": 0}
    await crew.answer()
    assert len(replacement.submitted) > 0


async def test_an_engine_that_dies_again_and_again_is_left_out_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crew = Crew()
    for version in range(1, 5):
        if version == 2:
            await crew.answer()  # so the next one counts as the first
        await crew.kill(-1)
        await crew.publish(version)
        crew.group.admit_replacements()
    crew.engines[-1].is_killed = True
    await crew.publish(5)
    await crew.publish(6)
    assert (len(crew.engines), crew.group.dead) == (6, ["engine 1"])
    assert caplog.text.count("engine 1 is not replaced any more: 3 replacements in a row died") == 1
    await crew.answer()
    with pytest.raises(WorkerError, match="the process was killed"):
        await crew.kill(0)


async def test_a_start_that_fails_leaves_the_engine_out_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> Sleepy:
        raise WorkerError("engine 1[0] did not start", "engine 1", 0)

    crew = Crew(start=refuse)
    await crew.kill(1)
    await crew.publish(1)
    line = "engine 1 is not replaced, as it cannot be started again: engine 1[0] did not start"
    assert [record.getMessage() for record in caplog.records[1:]] == [line]
    await crew.answer()


async def test_on_devices_of_ranks_it_starts_with_a_publication_and_without_a_cache() -> None:
    crew = Crew(at_publication=True)
    await crew.kill(1)
    await crew.group.sleep()
    await crew.group.wake("weights")
    assert len(crew.engines) == 2
    await crew.publish(2)
    await crew.group.wake("cache")
    assert crew.engines[2].parts == crew.engines[0].parts == ["sleep", "weights", "cache"]
    crew.group.admit_replacements()
    await crew.answer()
    assert len(crew.engines[2].inner.submitted) > 0
