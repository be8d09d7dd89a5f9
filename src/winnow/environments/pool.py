"""Environments apart from the run, in processes with limits of time and memory.

A conversation always goes to the same of several pools of one process, which keeps its environment
between turns. If that process ends, a new one replays the turns of a conversation when its next
reply is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from winnow.environments import Message, Step, Turn
from winnow.environments.host import StepRequest, TurnReplies
from winnow.errors import ConfigError, EnvironmentFault
from winnow.rewards.pool import CallPool
from winnow.rewards.task import Failure, PoolLimits
from winnow.types import Prompt


class EnvironmentPool:
    """The environments of a run's conversations (`conversation.Environments`); close it.

    Args:
        limits: of all processes.
        arguments: of `EnvironmentHost`.

    Raises:
        ConfigError: the user's code cannot be used.
    """

    def __init__(self, limits: PoolLimits, arguments: tuple[Any, ...]) -> None:
        self._pools: list[CallPool] = []
        self._closed: list[list[int]] = [[] for _ in range(limits.workers)]
        self.steps = 0
        """Turns replied to, replayed ones included."""
        self.seconds = 0.0
        """In which environments replied to them."""
        field, paths = arguments[:2]
        alone = replace(limits, workers=1)
        with ExitStack() as stack:
            for _ in range(limits.workers):
                pool = CallPool(
                    alone,
                    "winnow.environments.host:EnvironmentHost",
                    arguments,
                    f"{field} {', '.join(paths)}",
                    error=ConfigError,
                )
                stack.callback(pool.close)
                self._pools.append(pool)
            stack.pop_all()

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
    ) -> list[Step]:
        """Return the replies to the last turns, to one at least.

        Raises:
            EnvironmentFault: the environment raises, hangs, or takes too much memory.
        """
        place = conversation % len(self._pools)
        closed, self._closed[place] = tuple(self._closed[place]), []
        first = tuple(prompt.messages) if prompt.row_messages else ()
        request = StepRequest(conversation, row_of(prompt), tuple(turns), first, state, closed)
        try:
            outcome: TurnReplies | Failure = await self._pools[place].call(request)
        except asyncio.CancelledError:
            self._closed[place] += closed
            raise
        if isinstance(outcome, Failure):
            raise EnvironmentFault(outcome.line)
        if turns:
            self.steps, self.seconds = (
                self.steps + len(outcome.steps),
                self.seconds + outcome.seconds,
            )
        return outcome.steps

    async def first_messages(self, number: int, prompt: Prompt) -> Sequence[Message]:
        """Return the messages with which the environment of a row begins; none: the row's.

        Raises:
            EnvironmentFault: as for `step`.
        """
        (step,) = await self.step(number, prompt, ())
        assert not isinstance(step.observation, str)
        return step.observation

    def close_conversation(self, conversation: int) -> None:
        """Have the environment of a conversation closed with the next call of its process."""
        self._closed[conversation % len(self._pools)].append(conversation)

    def close(self) -> None:
        """End all processes."""
        with ExitStack() as stack:
            for pool in self._pools:
                stack.callback(pool.close)


def row_of(prompt: Prompt) -> Mapping[str, Any]:
    """Return a prompt's row as environments see it."""
    messages = prompt.row_messages or prompt.messages
    return {
        **prompt.extra,
        "data_source": prompt.data_source,
        "prompt": "\n".join(each["content"] for each in messages),
        "messages": [dict(each) for each in messages],
        "ground_truth": prompt.ground_truth,
    }
