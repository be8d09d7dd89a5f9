"""CPU time that the replies of environments cost, besides the environments themselves.

    python -m benchmarks.replies

256 conversations of four turns with an environment that does nothing, in one process: the CPU time
of the run's process and of the environment's, a reply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from winnow.environments import Step, Turn
from winnow.environments.pool import EnvironmentPool, start_pools
from winnow.rewards.task import PoolLimits
from winnow.types import Prompt

CONVERSATIONS, TURNS = 256, 4


class Echo:
    """An environment that repeats the policy's turn, and tells the CPU time of its process."""

    def reset(self, row: Mapping[str, Any]) -> str:
        return ""

    def step(self, turn: Turn) -> Step:
        return Step(turn.text, metrics={"cpu_s": time.process_time()})


async def play(pool: EnvironmentPool, number: int) -> list[float]:
    """Play a conversation; return the CPU time of the environment's process at each turn."""
    prompt = Prompt(str(number), np.zeros(1, np.int64), "prompt " * 50, "echo", 0)
    turns: list[Turn] = []
    seconds = []
    for _ in range(TURNS):
        turns.append(Turn("some words of an answer " * 10))
        *_, step = await pool.step(number, prompt, turns)
        seconds.append(step.metrics["cpu_s"])
    pool.close_conversation(number)
    return seconds


async def play_all(pool: EnvironmentPool) -> list[list[float]]:
    """Play all conversations side by side."""
    return await asyncio.gather(*(play(pool, number) for number in range(CONVERSATIONS)))


def main() -> None:
    """Measure, and print two figures."""
    limits = PoolLimits(1, 60.0, 2048, "environment", "environment", "reply")
    arguments: tuple[Any, ...] = "environment.path", ["benchmarks.replies:Echo"], {}, False
    with closing(EnvironmentPool(start_pools(limits, arguments))) as pool:
        asyncio.run(play_all(pool))  # what is only done once
        began = time.process_time()
        seconds = asyncio.run(play_all(pool))
        run_s = time.process_time() - began
    flat = [value for each in seconds for value in each]
    replies = CONVERSATIONS * TURNS
    print(f"the run's process: {1e3 * run_s / replies:.2f} ms of CPU time a reply")
    print(f"the environment's: {1e3 * (max(flat) - min(flat)) / replies:.2f} ms")


if __name__ == "__main__":
    main()
