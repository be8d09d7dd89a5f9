"""Blocking work beside the event loop, in a thread that nobody has to wait for at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a daemon thread and return its result; the loop goes on meanwhile.

    `asyncio.to_thread` has threads for which a process waits at its end, so that Ctrl-C could not
    end an update that takes minutes. When this is cancelled the work goes on, and what comes of it
    is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work(*args, **kwargs)
        except BaseException as raised:  # handed over to the one that waits
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody waits
            return

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await future
