"""What a person sees while answers are written and scored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from rich.console import Console
from rich.status import Status

from winnow.evaluation.evaluator import AskProgress, Evaluated, Evaluator
from winnow.observe.figures import count, duration

_EVERY_S = 0.5
"""Between two looks."""
_LINE_EVERY_S = 30.0
"""Between two lines where the terminal cannot rewrite one."""


class ProgressLine:
    """One line that is rewritten, or now and then a new one; off, nothing."""

    def __init__(
        self,
        console: Console,
        mode: Literal["auto", "plain", "off"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_live = mode == "auto" and console.is_terminal and not console.is_dumb_terminal
        self._status = Status("", console=console) if is_live else None
        self._console, self._is_off, self._clock = console, mode == "off", clock
        self._began = self._last = clock()

    def shown(self) -> AbstractContextManager[object]:
        """While the block runs, a live line stands at the bottom of the screen."""
        return self._status or nullcontext()

    def update(self, progress: AskProgress) -> None:
        """Show how far it has come."""
        now = self._clock()
        text = in_words(progress, now - self._began)
        if self._status is not None:
            self._status.update(text)
        elif not self._is_off and now - self._last >= _LINE_EVERY_S:
            self._last = now
            self._console.print(text, markup=False)


def in_words(progress: AskProgress, seconds: float) -> str:
    """Example: `1,234 of 3,840 answers, 17 scored, 512 tokens/s, 0:35`."""
    speed = progress.tokens / seconds if seconds > 0 else 0.0
    scored = f", {count(progress.scored)} scored" if progress.scored else ""
    return (
        f"{count(progress.written)} of {count(progress.answers)} answers{scored}, "
        f"{count(speed)} tokens/s, {duration(seconds)}"
    )


async def watched(evaluator: Evaluator, step: int, line: ProgressLine) -> Evaluated:
    """Ask the held-out prompts, and show how far it has come."""

    async def look() -> None:
        while True:
            line.update(evaluator.progress)
            await asyncio.sleep(_EVERY_S)

    watch = asyncio.create_task(look())
    try:
        return await evaluator.ask(step)
    finally:
        watch.cancel()
