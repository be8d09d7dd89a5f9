"""Requests to stop a run (Ctrl-C, SIGTERM, a closed terminal), and output that nothing takes.

While a run trains, the first request is noted: an update under way is finished, sampling and
evaluation are broken off, and the run saves and ends. Before and after, when there is nothing
to lose, it ends the process at once. Ctrl-C while it is stopping ends it at once, too.

| request | exit code |
|---|---|
| Ctrl-C (SIGINT) | 130 |
| SIGTERM, SIGHUP | 75, "try again" in sysexits.h: what a batch system may start again |

A reader of stdout or stderr that goes (`| head`, a `tee` that dies), a full disk behind `> FILE`
and a terminal that is gone are no requests: the run goes on without them, and log.txt says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TextIO, TypeVar

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 75

T = TypeVar("T")

log = logging.getLogger(__name__)


class Stopped(BaseException):
    """The run was asked to stop. Not an `Exception`, for the reason KeyboardInterrupt is none:
    nothing that deals with errors, a scorer's for instance, may take it for one."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.reason = (
            "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
        )
        self.exit_code = EXIT_INTERRUPTED if signal_number == signal.SIGINT else EXIT_TERMINATED


class ShutdownSignal:
    """Takes the signals of a process and passes a request on where it does no harm.

    Args:
        notice: what the terminal is told at a Ctrl-C that is only noted; "" for nothing.
    """

    def __init__(
        self, notice: str = "\nwinnow: stopping; saving first (Ctrl-C again ends at once)\n"
    ) -> None:
        self._notice = notice
        self._signal: int | None = None
        self._is_deferring = False
        self._task: asyncio.Task[Any] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while the block runs; those that are ignored (nohup) stay so."""
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in taken:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Only note a request while the block runs; `check` and `interruptible` act on it."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def check(self) -> None:
        """Stop here if that was asked for.

        Raises:
            Stopped: it was.
        """
        if self._signal is not None:
            raise Stopped(self._signal)

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, and break it off when a request comes.

        Raises:
            Stopped: it was broken off; what it works on is in no defined state.
        """
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._task = task
        if self._signal is not None:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self._task = None

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`asyncio.run` of what `work` gives, broken off cleanly whenever a request comes, also
        before the loop is there (where `asyncio.run` alone leaves a torn one).

        Raises:
            Stopped: it was broken off.
        """

        async def interruptibly() -> T:
            return await self.interruptible(work())

        with self.deferring():
            result = asyncio.run(interruptibly())
        self.check()
        return result

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._signal = number
        if not self._is_deferring:
            raise Stopped(number)
        if number == signal.SIGINT:
            # Not through the console: a handler may interrupt it halfway through a line.
            _tell(self._notice)
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def outlive_readers() -> None:
    """Let this process go on where stdout or stderr can no longer be written to."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _LossyStream):
            setattr(sys, name, _LossyStream(stream, name))


class _LossyStream:
    """A stream that leaves out what the system refuses to write, from then on all of it."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, if that is possible."""
        with self._refusals_taken():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with self._refusals_taken():
            self._stream.flush()

    @contextlib.contextmanager
    def _refusals_taken(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            log.warning(
                "%s can no longer be written to (%s): the run goes on without it, and this log and "
                "the run's folder have the rest",
                self._name,
                error.strerror or error,
            )


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
