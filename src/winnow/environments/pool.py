"""Environments apart from the run, in processes with limits of time and memory.

A conversation always goes to the same of several pools of one process, which keeps its environment
between turns. If that process ends, a new one replays the turns of a conversation when its next
reply is asked for.

    environment.processes=0   run ─► EnvironmentPool ─► CallPool ─► process
    environment.processes=N   run ─► EnvironmentPool ─► RemotePool ─► worker, on any node:
                                                        EnvironmentPool ─► CallPool ─► process
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from winnow.environments import Message, Step, Turn
from winnow.environments.host import EnvironmentHost, StepRequest, TurnReplies
from winnow.errors import ConfigError, EnvironmentFault, WorkerError
from winnow.rewards.pool import CallPool
from winnow.rewards.task import Failure, PoolLimits
from winnow.types import Prompt
from winnow.user_code import PROGRAM
from winnow.workers.group import WorkerGroup


def start_pools(limits: PoolLimits, arguments: tuple[Any, ...]) -> Sequence[CallPool | ProgramPool]:
    """Start pools of one process in this machine; one without, for objects of this program.

    Args:
        limits: of all processes.
        arguments: of `EnvironmentHost`.

    Raises:
        ConfigError: the user's code cannot be used.
    """
    field, paths = arguments[:2]
    if any(path.startswith(f"{PROGRAM}:") for path in paths):
        return [ProgramPool(arguments)]
    pools, alone = list[CallPool](), replace(limits, workers=1)
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
            pools.append(pool)
        stack.pop_all()
    return pools


class ProgramPool:
    """Environments in this process, of objects of the running program (`user_code.PROGRAM`).

    Args:
        arguments: of `EnvironmentHost`.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._host = EnvironmentHost(*arguments)
        self.close = self._host.close

    async def call(self, request: StepRequest) -> TurnReplies | Failure:
        """Return the replies, or how the environment failed."""
        outcome = await self._host.call([request])
        if (task := asyncio.current_task()) and task.cancelling():  # which looks like a failure
            raise asyncio.CancelledError
        return outcome if isinstance(outcome, Failure) else outcome[0]


class RemotePool:
    """An `EnvironmentPool` in another process, which is started again when it is lost.

    Args:
        group: has the one worker.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._started = Future[WorkerGroup]()
        self._started.set_result(group)

    async def call(self, request: StepRequest) -> TurnReplies | Failure:
        """Return the replies, or how the process was lost.

        Raises:
            WinnowError: it cannot be started again, or the user's code cannot be used any more.
        """
        started = self._started
        # Shielded: a conversation that is aborted cancels no start.
        group = await asyncio.shield(asyncio.wrap_future(started))
        try:
            outcome: TurnReplies | Failure = await group.call_rank(0, "call", request)
        except WorkerError as error:
            if self._started is started:
                assert group.restart is not None
                self._started = group.submit(group.restart())
            return Failure(str(error))
        return outcome

    def close(self) -> None:
        """Do nothing: the process ends with the run's other workers."""


class EnvironmentPool:
    """The environments of a run's conversations (`conversation.Environments`); close it."""

    def __init__(self, pools: Sequence[CallPool | ProgramPool] | Sequence[RemotePool]) -> None:
        self._pools = pools
        self._closed: list[list[int]] = [[] for _ in pools]
        self.steps = 0
        """Turns replied to, replayed ones included."""
        self.seconds = 0.0
        """In which environments replied to them."""

    async def step(
        self, conversation: int, prompt: Prompt, turns: Sequence[Turn], state: str = ""
    ) -> list[Step]:
        """Return the replies to the last turns, to one at least.

        Raises:
            EnvironmentFault: the environment raises, hangs, or takes too much memory.
        """
        first = tuple(prompt.messages) if prompt.row_messages else ()
        request = StepRequest(conversation, row_of(prompt), tuple(turns), first, state)
        outcome = await self.call(request)
        if isinstance(outcome, Failure):
            raise EnvironmentFault(outcome.line)
        if turns:
            self.steps += len(outcome.steps)
            self.seconds += outcome.seconds
        return outcome.steps

    async def call(self, request: StepRequest) -> TurnReplies | Failure:
        """Pass a request on to the pool of its conversation, which numbers its own anew."""
        for conversation in request.closed:
            self.close_conversation(conversation)
        number, place = divmod(request.conversation, len(self._pools))
        closed, self._closed[place] = tuple(self._closed[place]), []
        request = request._replace(conversation=number, closed=closed)
        try:
            outcome: TurnReplies | Failure = await self._pools[place].call(request)
        except asyncio.CancelledError:
            self._closed[place] += closed
            raise
        return outcome

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
        number, place = divmod(conversation, len(self._pools))
        self._closed[place].append(number)

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
