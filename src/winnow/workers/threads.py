"""Helpers for event loops: blocking work in daemon threads, background tasks, ending a process."""

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
    """Run `work` in a daemon thread and return its result, without blocking the event loop.

    A process joins the threads of `asyncio.to_thread` at its end, so that Ctrl-C could not end an
    update that takes minutes. If this is cancelled the work continues, and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        outcome: T | BaseException
        try:
            outcome = work(*args, **kwargs)
        except BaseException as error:  # raised by the future
            outcome = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_outcome, future, outcome)

    start_thread(run, getattr(work, "__name__", "work"))
    return await future


def block_on(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run a coroutine on another thread's loop and return its result."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:  # such as KeyboardInterrupt
        future.cancel()
        raise


def set_outcome(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Set a future's result or exception, unless it is done already."""
    if future.done():  # cancelled, or its loop is closed
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Start a task, and keep it in `tasks` until it is done: event loops refer to it weakly."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that `end_process` takes into account."""

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
    """End this process with an exit code, even while threads of `start_thread` run.

    A thread that returns from torch's compiled code during interpreter shutdown aborts the process
    with SIGABRT. So if one runs, the process ends without interpreter shutdown.

    Args:
        skip_cleanup: end without interpreter shutdown in any case.
    """
    if not _at_work and not skip_cleanup:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
