"""Processes beside the driver's: their worker groups, and a thread whose loop serves them all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from winnow.workers.protocol import WorkerGroup

_T = TypeVar("_T")


class WorkerGroups:
    """Worker groups for callers that wait, and for callers in another loop; close it.

    The run's own loop stands still while a step is learnt and while a checkpoint is awaited.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crew", daemon=True)
        self._thread.start()
        self._groups: list[WorkerGroup] = []

    def start(self, *starting: Coroutine[Any, Any, WorkerGroup]) -> list[WorkerGroup]:
        """Groups that are started side by side.

        Raises:
            WinnowError: one of them could not be.
        """

        async def all_of_them() -> list[WorkerGroup]:
            found = await asyncio.gather(*starting, return_exceptions=True)
            self._groups += [each for each in found if not isinstance(each, BaseException)]
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return self._groups[-len(starting) :]

        return self.wait(all_of_them())

    def call(self, group: WorkerGroup, method: str, *args: Any) -> Any:
        """Call a method on all ranks; what rank 0 said.

        Raises:
            WinnowError: see `WorkerGroup`.
        """
        return self.wait(group.call(method, *args))[0]

    def reached(self, group: WorkerGroup) -> ThreadsafeGroup:
        """The group, for a caller in another loop."""
        return ThreadsafeGroup(group, self, self._loop)

    def close(self) -> None:
        """End all groups; a second time does nothing."""
        if self._loop.is_closed():
            return
        try:
            for group in reversed(self._groups):
                self.wait(group.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of work in the loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C, while it goes on
            future.cancel()
            raise


class ThreadsafeGroup:
    """A worker group whose calls are awaited in a loop that is not its own, or block."""

    def __init__(
        self, group: WorkerGroup, crew: WorkerGroups, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._group, self._crew, self._loop = group, crew, loop

    @property
    def size(self) -> int:
        """See `WorkerGroup.size`."""
        return self._group.size

    @property
    def progress(self) -> tuple[int | None, ...]:
        """See `WorkerGroup.progress`."""
        return self._group.progress

    def ask(self, method: str, *args: Any) -> list[Any]:
        """`WorkerGroup.call`, waited for."""
        return self._crew.wait(self._group.call(method, *args))

    def close(self) -> None:
        """`WorkerGroup.close`, waited for."""
        if not self._loop.is_closed():
            self._crew.wait(self._group.close())

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call_rank`."""
        work = self._group.call_rank(rank, method, *args, **kwargs)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
