"""Replacement of dead engines while a run goes on, in free mode.

    engine 1 dies ──► its process is started again ──► next publication ──► canary ──► answers
                 └──► its answers go on in the other engines

A new engine has no weights of the run until the next publication, which brings it those of the
policy as it does the other engines, and gets no answers before the canary has compared it with the
trainer. So no mode decodes with weights that were not published, or that others no longer have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

from winnow.errors import PublicationError, WinnowError, WorkerError
from winnow.rollout.engine import MemoryPart, PublishedEngine, SleepingEngine
from winnow.rollout.engine_group import EngineClient, EngineGroup
from winnow.rollout.weights import WeightUpdate

log = logging.getLogger(__name__)
Engine = TypeVar("Engine", bound=PublishedEngine)
_ATTEMPTS = 3
"""Replacements of an engine in a row that die before they have finished an answer."""


class ReplacingEngineGroup(EngineGroup):
    """An `EngineGroup` in free mode that has dead engines started again.

    Args:
        engines: at least one.
        restart: ends what is left of an engine and starts it again; returns the new one.
        at_publication: start an engine at the next publication, as it is on devices of ranks, which
            do not learn then; else at once.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        restart: Callable[[Engine], Awaitable[Engine]],
        at_publication: bool = False,
    ) -> None:
        super().__init__(engines, deterministic=False)
        self._restart = cast(Callable[[PublishedEngine], Awaitable[PublishedEngine]], restart)
        self._at_publication = at_publication
        self._lost: list[EngineClient] = []  # to be started at the next publication
        self._starting: dict[EngineClient, asyncio.Future[PublishedEngine]] = {}
        self._are_asleep = False

    def _on_retired(self, client: EngineClient, error: WorkerError | PublicationError) -> None:
        client.attempt = 0 if client.finished else client.attempt
        if client.attempt >= _ATTEMPTS:
            log.warning(
                "%s is not replaced any more: %d replacements in a row died before they had "
                "finished an answer; the last one: %s",
                *(client.name, _ATTEMPTS, error),
            )
        elif self._at_publication:
            self._lost.append(client)
        else:
            self._start(client)

    def _start(self, client: EngineClient) -> None:
        self._starting[client] = task = asyncio.ensure_future(self._restart(client.engine))
        task.add_done_callback(partial(self._on_started, client))

    def _on_started(self, client: EngineClient, task: asyncio.Future[PublishedEngine]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            log.info("%s is started again; the next weights are its first", client.name)
            return
        del self._starting[client]
        if isinstance(error, WinnowError | OSError):
            log.warning("%s is not replaced, as it cannot be started again: %s", client.name, error)
        else:
            self._fault = error
            self._news.set()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load new weights, also into engines that were started again since the last ones.

        Raises:
            ValueError, PublicationError, WorkerError: as in `EngineGroup`.
        """
        lost, self._lost = self._lost, []
        for client in lost:
            self._start(client)
        if lost:
            await asyncio.wait([self._starting[client] for client in lost])
        ended = {client: task for client, task in self._starting.items() if task.done()}
        ready = {client: task.result() for client, task in ended.items() if not task.exception()}
        if self._are_asleep:  # the others have no cache until `wake`; a dead one is seen below
            await asyncio.gather(*map(_nap, ready.values()), return_exceptions=True)
        # Without an await before the old version is noted, as these have another one.
        for client, engine in ready.items():
            del self._starting[client]
            self._clients[self._clients.index(client)] = EngineClient(
                engine,
                client.name,
                inbox=client.inbox,
                is_unchecked=True,
                attempt=client.attempt + 1,
                earlier_tokens=client.status.generated_tokens,
            )
        await super().load_weights(update)

    def admit_replacements(self) -> Mapping[str, int]:
        """Let new engines have answers, as the canary has passed; return their number as metric."""
        admitted = [each for each in self._clients if each.is_unchecked and not each.is_dead]
        for client in admitted:
            client.is_unchecked = False
            version = client.status.weight_version
            log.warning("%s is replaced, with weights of version %d", client.name, version)
        self._news.set()
        return {"publish/replaced_engines": len(admitted)}

    async def sleep(self) -> None:
        await super().sleep()
        self._are_asleep = True

    async def wake(self, part: MemoryPart) -> None:
        await super().wake(part)
        self._are_asleep = part == "weights"

    async def close(self) -> None:
        """Cancel what starts, and close the group."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await super().close()


async def _nap(engine: PublishedEngine) -> None:
    """Have an engine give its memory back, and take that for weights again."""
    sleeping = cast(SleepingEngine, engine)
    await sleeping.sleep()
    await sleeping.wake("weights")
