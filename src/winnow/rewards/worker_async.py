"""A worker of the scorer pool whose user function is asynchronous: many answers wait at once.

Each has its own time. Where one of them blocks the event loop, the time of the others runs out
by no fault of theirs; `again` asks the pool to send those alone.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from winnow.rewards.task import Failure
from winnow.rewards.wire import BatchItem, Item

if TYPE_CHECKING:
    from winnow.rewards.worker import Channel, ScorerRuntime

_TICK_S = 0.05
_BLOCKED_SHARE = 0.1
"""Of an answer's time; above it nobody can say that the answer itself was slow."""


class _Blockage:
    """Counts the seconds in which the event loop did not come round."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Count until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.seconds += max(0.0, loop.time() - due - _TICK_S)


async def serve(channel: Channel, bench: ScorerRuntime, timeout_s: float) -> None:
    """Score what comes until the pool is gone, or memory is."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    blockage = _Blockage()
    running: set[asyncio.Task[None]] = set()
    ticking = asyncio.ensure_future(blockage.watch())

    async def answer(item: Item | BatchItem) -> None:
        blocked = blockage.seconds
        work = asyncio.ensure_future(bench.score(item))
        await asyncio.wait({work}, timeout=timeout_s)
        if not work.done():
            work.cancel()
            if blockage.seconds - blocked > _BLOCKED_SHARE * timeout_s:
                channel.send("again", item.id)
                return
            line = late_line(timeout_s)
            channel.send("done", item.id, Failure(line, line))
            return
        channel.send("done", item.id, work.result())
        if bench.is_worn(work.result()) and not ended.is_set():
            channel.send("retiring")
            ended.set()

    def on_readable() -> None:
        items = channel.read(socket.MSG_DONTWAIT)
        if items is None:
            ended.set()
        for item in items or ():
            task = asyncio.ensure_future(answer(item))
            running.add(task)
            task.add_done_callback(running.discard)

    loop.add_reader(channel.socket, on_readable)
    await ended.wait()
    loop.remove_reader(channel.socket)
    ticking.cancel()


def late_line(timeout_s: float) -> str:
    """What is said of an answer whose time is up."""
    return f"no score within reward.timeout_s={timeout_s:g}"
