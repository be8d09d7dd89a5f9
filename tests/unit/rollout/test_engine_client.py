"""When an engine has lost an answer, and when that answer is only on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.engines import ScriptedEngine
from tests.unit.rollout.test_engine_group import length, request

from winnow.rollout.engine import EMPTY, CompletionEvent
from winnow.rollout.engine_group import EngineClient, PendingRequest


class Idle(ScriptedEngine):
    """Says that it has nothing to do, at these ticks, with these events."""

    def __init__(self, *replies: tuple[int, Sequence[CompletionEvent]]) -> None:
        super().__init__(length)
        self.replies = list(replies)

    async def events(self, until: int | None = None) -> Any:
        self.tick, found = self.replies.pop(0)
        return found


def member(engine: ScriptedEngine, answers: int = 2) -> EngineClient:
    made = EngineClient(engine, "engine 0")
    asked = request(0, answers)
    asks = [PendingRequest(asked, answer) for answer in asked.answers]
    made.asks.update((ask.key, ask) for ask in asks)
    return made


def end(answer: int) -> CompletionEvent:
    return CompletionEvent(0, answer, "aborted", EMPTY, "aborted", 1)


def kinds(made: EngineClient) -> list[str]:
    return [event.kind for event in made.inbox]


async def looked(made: EngineClient, until: int) -> None:
    while made.asks and made.status.tick < until:
        await made.look(until)


def test_what_an_idle_engine_has_not_told_though_it_had_time_is_lost() -> None:
    made = member(Idle((3, [end(0)]), (3, [])))
    asyncio.run(looked(made, 8))
    assert kinds(made) == ["aborted", "failed"]


def test_with_news_an_idle_engine_may_have_more_to_tell() -> None:
    made = member(Idle((3, [end(0)]), (3, [end(1)])))
    asyncio.run(looked(made, 8))
    assert kinds(made) == ["aborted", "aborted"]


def test_at_the_tick_asked_for_nothing_is_lost_yet() -> None:
    made = member(Idle((8, [])))
    asyncio.run(looked(made, 8))
    assert kinds(made) == []
    assert len(made.asks) == 2


def test_late_words_of_a_dead_engine_are_not_heard() -> None:
    made = member(ScriptedEngine(length))
    made.is_dead, made.asks = True, {}
    assert made.receive([end(0)]) == []
    assert made.inbox == []
