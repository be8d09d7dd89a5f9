"""Blocking work beside the event loop, in a thread that nobody has to wait for at the end.

Beside it: tasks and futures of an event loop that belong to no single caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_at_work: set[threading.Thread] = set()


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a daemon thread and return its result; the loop goes on meanwhile.

    `asyncio.to_thread` has threads for which a process waits at its end, so that Ctrl-C could not
    end an update that takes minutes. When this is cancelled the work goes on, and what comes of it
    is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        outcome: T | BaseException
        try:
            outcome = work(*args, **kwargs)
        except BaseException as error:  # handed over to the one that waits
            outcome = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(set_outcome, future, outcome)

    start_thread(run, getattr(work, "__name__", "work"))
    return await future


def set_outcome(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Give a future its result, or the exception instead of it, unless it is done already."""
    if future.done():  # cancelled, or of a loop that is no more
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Begin a task, which `tasks` holds until it is done: an event loop alone may drop it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread of which `end_process` knows."""

    def run() -> None:
        try:
            work()
        finally:
            _at_work.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _at_work.add(thread)
    thread.start()
    return thread


def end_process(code: int, skip_cleanup: bool = False) -> NoReturn:
    """End this process with an exit code, whatever its threads are at.

    A thread that comes back from torch's compiled code while the interpreter goes down aborts the
    process with SIGABRT; where one is at work the system ends them all.

    Args:
        skip_cleanup: leave out what libraries would do at the end, in any case.
    """
    if not _at_work and not skip_cleanup:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
