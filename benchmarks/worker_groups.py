"""What a call of a worker group costs, on local processes and on a private Ray.

    python -m benchmarks.worker_groups [local] [ray]

Prints seconds to start two workers, of a call without arguments there and back, and of one with
20 MB of float64 that both add up.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import numpy as np

from winnow.workers.group import WorkerGroup, start_local
from winnow.workers.host import RankInfo
from winnow.workers.ray.actors import start_ray
from winnow.workers.ray.session import Pool, ray_session, reserve

PATH = "benchmarks.worker_groups:Adder"
CALLS = 200


class Adder:
    """The worker."""

    def __init__(self, rank: RankInfo) -> None:
        self.rank = rank

    def nothing(self) -> None:
        """Answer."""

    def add(self, numbers: np.ndarray) -> float:
        """The sum."""
        return float(numbers.sum())


async def local() -> WorkerGroup:
    """Two processes of this machine."""
    return await start_local("adder", PATH, {}, 2)


async def on_ray() -> WorkerGroup:
    """Two actors."""
    reserved = await reserve([Pool("all", {"adder": 1}, per_node=2)])
    return await start_ray("adder", PATH, {}, reserved.placement("adder"))


async def measure(name: str, start: Callable[[], Awaitable[WorkerGroup]]) -> None:
    """Print one line."""
    began = time.perf_counter()
    group = await start()
    started = time.perf_counter() - began
    try:
        began = time.perf_counter()
        for _ in range(CALLS):
            await group.call("nothing")
        call = (time.perf_counter() - began) / CALLS
        numbers = np.random.default_rng(0).random(2_500_000)
        await group.call("add", numbers)  # what is needed once is there now
        began = time.perf_counter()
        sums = await group.call("add", numbers)
        array = time.perf_counter() - began
    finally:
        await group.close()
    assert sums == [float(numbers.sum())] * 2
    print(f"{name:6} start {started:.2f} s   call {1e3 * call:.2f} ms   20 MB {1e3 * array:.0f} ms")


def main() -> None:
    """Measure what was asked for, or both."""
    kinds = {"local": local, "ray": on_ray}
    for name in sys.argv[1:] or kinds:
        began = time.perf_counter()
        with ray_session(None, cpus=2, devices=0) if name == "ray" else nullcontext():
            if name == "ray":
                print(f"a private Ray: {time.perf_counter() - began:.1f} s")
            asyncio.run(measure(name, kinds[name]))


if __name__ == "__main__":
    main()
