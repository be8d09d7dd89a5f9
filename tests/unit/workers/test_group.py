"""The driver's side of a group, over a connection that refuses what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from winnow.workers.group import WorkerGroup
from winnow.workers.host import Call
from winnow.workers.logs import LogReceiver


class Refusing:
    """A connection that takes calls without arguments, and returns their numbers."""

    pid = 0

    def __init__(self) -> None:
        self.is_killed = False

    def send(self, number: int, payload: Call, tell: Callable[[Any], None]) -> None:
        if payload.args:
            raise TypeError("cannot pickle it")
        asyncio.get_running_loop().call_soon(tell, number)

    def exit_reason(self) -> str | None:
        return "was killed" if self.is_killed else None

    def kill(self) -> None:
        self.is_killed = True

    async def wait_for_exit(self, timeout_s: float) -> bool:
        return self.is_killed

    async def release(self) -> None:
        pass


async def test_a_call_that_cannot_be_sent_takes_no_number() -> None:
    receiver = LogReceiver("policy", 0)
    group = WorkerGroup("policy", lambda asked: asked, 5.0)
    group.add(Refusing(), receiver)
    assert await group.call_rank(0, "step") == 0
    with pytest.raises(TypeError, match="cannot pickle it"):
        await group.call_rank(0, "step", object())
    assert await group.call_rank(0, "step") == 1
    receiver.has_ended.set()
    await group.close()
