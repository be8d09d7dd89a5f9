"""The worker's end of a remote panel: scores what it is sent, and replies in pieces.

    exchange(answers) ─► a task each ─► the panel ─► done ─► the newest exchange takes what is there

An exchange returns as soon as something is done, so that a slow answer holds up nobody. Of several
under way only the newest waits: the driver makes another one when it has more to send.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from winnow.errors import WinnowError
from winnow.rewards.pipeline import RewardPipeline, ScoredAnswer
from winnow.rewards.wire import portable
from winnow.types import Prompt, Trajectory
from winnow.workers.array_refs import begin_fetching

Asked = tuple[int, Prompt, Trajectory, str | None, bool]
"""A number that the driver knows it by, and the arguments of `AnyPipeline.score`."""
LINGER_S = 0.002
"""For more to be done beside the first, where more is under way."""


@dataclass(frozen=True, eq=False)
class Reply:
    """What was done since the last reply."""

    done: Sequence[tuple[int, ScoredAnswer | WinnowError]]
    """In the order in which it was; an error is that of its answer."""
    figures: dict[str, int]
    """Those of the panel, since the last reply."""


class PipelineWorker:
    """Answers a `RemotePipeline`; close it."""

    def __init__(self, panel: RewardPipeline) -> None:
        self._panel = panel
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[tuple[int, ScoredAnswer | WinnowError]] = []
        self._broken: Exception | None = None
        self._count = 0
        self._newest = 0
        self._news = asyncio.Event()

    @property
    def progress(self) -> int:
        """Moves whenever scoring gets on."""
        return self._count + self._panel.scored_apart()

    def prepare(self, data_sources: Sequence[str]) -> None:
        """See `AnyPipeline.prepare`."""
        self._panel.prepare(data_sources)

    def check_prompt(self, prompt: Prompt) -> None:
        """See `AnyPipeline.check_prompt`."""
        self._panel.check_prompt(prompt)

    def figures(self) -> dict[str, int]:
        """See `AnyPipeline.figures`."""
        return self._panel.figures()

    async def exchange(self, asked: Sequence[Asked], patience_s: float) -> Reply:
        """Begin to score these, and say what has been done, as soon as anything has.

        Nothing may be, where nothing was for so long, or where there is a newer exchange.
        """
        self._newest += 1
        own = self._newest
        self._news.set()
        begin_fetching(trajectory for _, _, trajectory, _, _ in asked)
        loop = asyncio.get_running_loop()
        for each in asked:
            task = loop.create_task(self._score(*each))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._something(own), patience_s)
        if self._broken is not None:
            raise self._broken
        if own != self._newest:
            return Reply([], {})
        done, self._done = self._done, []
        return Reply(done, self._panel.figures())

    def close(self) -> None:
        """End the panel's own workers."""
        self._panel.close()

    async def _something(self, own: int) -> None:
        """Wait until this exchange should return."""
        while own == self._newest and self._tasks and not self._done:
            self._news.clear()
            await self._news.wait()
        if own == self._newest and self._tasks:
            await asyncio.sleep(LINGER_S)

    async def _score(
        self, number: int, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> None:
        said: ScoredAnswer | WinnowError
        try:
            found = await self._panel.score(prompt, trajectory, text, training)
            # Whatever classes the scorer's process knows, the driver does not.
            said = replace(found, score=portable(found.score))
        except WinnowError as error:
            said = error
        except Exception as error:  # a mistake of ours: the worker's, not this answer's
            self._broken = error
            self._news.set()
            return
        self._count += 1
        self._done.append((number, said))
        self._news.set()
