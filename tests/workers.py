"""Workers for the tests of groups: each method does what its name says, in a real process."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np

from winnow.errors import ConfigError, RewardError
from winnow.workers.array_refs import ArrayBlock, ArrayRef, SplitResult
from winnow.workers.host import RankInfo

log = logging.getLogger("winnow.tests")


class Probe:
    """A worker that answers, fails, dies and hangs when it is told to."""

    def __init__(self, rank: RankInfo, start: int = 0, refuse: str = "", mark: str = "") -> None:
        self.info = rank
        self.progress = 0
        self.total = start
        self.mark = mark
        self.has_joined = False
        self.naps = 0
        self.thread = threading.get_ident()
        self.events: list[str] = []
        self.released = asyncio.Event()
        if refuse == "config" and rank.rank == rank.size - 1:
            raise ConfigError("policy.size must be even, got 3")
        if refuse == "bug":
            raise KeyError("start")
        if refuse == "exit":
            print("leaving early", flush=True)
            os._exit(7)

    def about(self) -> tuple[RankInfo, int, bool]:
        """Rank, process, and whether this runs in the thread that made the worker."""
        return self.info, os.getpid(), threading.get_ident() == self.thread

    def add(self, number: int, times: int = 1) -> int:
        """The sum of all calls so far."""
        self.total += number * times
        return self.total

    def checks(self, array: np.ndarray) -> tuple[float, bool, int]:
        """Sum of an array, whether it can be written to, and the memory file that it lies in."""
        return float(array.sum()), array.flags.writeable, inode_of(array)

    def array(self, count: int, seed: int) -> np.ndarray:
        """Random numbers."""
        return np.random.default_rng([seed, self.info.rank]).random(count)

    def keep(self, count: int, seed: int) -> SplitResult:
        """Tells how many numbers it drew, and keeps them, some apart; each rank has others."""
        rng = np.random.default_rng([seed, self.info.rank])
        block = ArrayBlock((rng.integers(9, size=count), rng.random(count)))
        return SplitResult({"count": count}, block, ArrayBlock((rng.random(count),)))

    def read(self, *stored: ArrayRef) -> list[np.ndarray]:
        """What is stored."""
        return [np.asarray(each) for each in stored]

    async def wait(self, name: str) -> list[str]:
        """Wait for `release`; what began until then."""
        self.events.append(name)
        await self.released.wait()
        return list(self.events)

    def release(self) -> None:
        """Let `wait` end."""
        self.events.append("release")
        self.released.set()

    async def sleep(self, seconds: float) -> None:
        """Wait so long, and note that it was waited."""
        await asyncio.sleep(seconds)
        self.naps += 1

    def rested(self) -> int:
        """How often `sleep` came to its end."""
        return self.naps

    def environment(self, *names: str) -> list[str | None]:
        """Variables."""
        return [os.environ.get(name) for name in names]

    def say(self, word: str) -> None:
        """Print, log and warn, by turns."""
        print(f"{word} printed")
        log.info("%s logged", word)
        print(f"{word} to stderr", file=sys.stderr)
        warnings.warn(f"{word} warned", stacklevel=1)
        os.system(f"echo {word} from a child")
        log.error("%s\n%s", word, "long " * 2000)

    def raise_on(self, rank: int, kind: str = "bug") -> int:
        """Raise on one rank, hang on the others, as in a collective."""
        if self.info.rank != rank:
            time.sleep(600)
        if kind == "reward":
            raise RewardError("the scorer is missing")
        if kind == "exit":
            sys.exit("enough")
        if kind == "unpicklable":
            return threading.Lock()  # type: ignore[return-value]
        raise KeyError(f"only rank {rank}")

    def die_on(self, rank: int, how: str) -> None:
        """Die on one rank, in one of the ways there are; the others hang."""
        if self.info.rank != rank:
            time.sleep(600)
        print("last words", end="")
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def lose_peer(self, rank: int) -> None:
        """One rank dies; the others find that out and raise, as a collective does."""
        if self.info.rank == rank:
            time.sleep(0.2)
            os._exit(9)
        raise RuntimeError("Connection closed by peer")

    def hang_on(self, rank: int, holding_the_lock: bool) -> None:
        """Hang on one rank, perhaps without letting any other Python run; the others get on."""
        if self.info.rank != rank:
            self.work(600, 0.05)
        if holding_the_lock:
            ctypes.PyDLL(None).sleep(600)
        time.sleep(600)

    def work(self, pieces: int, piece_s: float) -> int:
        """Compute for long, in pieces that count as progress."""
        for _ in range(pieces):
            time.sleep(piece_s)
            self.progress += 1
        return self.progress

    def start_child(self) -> int:
        """Start a program that outlives this process unless somebody ends it."""
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    def all_reduce(self, times: float) -> float:
        """The sum of `times * 2**rank` over ranks, through a process group of torch."""
        import torch
        import torch.distributed as dist

        if not self.has_joined:
            address = f"tcp://{self.info.master_address}:{self.info.master_port}"
            dist.init_process_group(
                "gloo", init_method=address, rank=self.info.rank, world_size=self.info.size
            )
            self.has_joined = True
        total = torch.tensor(times * 2**self.info.rank)
        dist.all_reduce(total)
        return float(total)

    async def close(self) -> None:
        """Leave the process group, and a mark that this was called."""
        if self.has_joined:
            import torch.distributed as dist

            dist.destroy_process_group()
        if self.mark:
            Path(f"{self.mark}.{self.info.rank}").write_text("closed")


def inode_of(array: np.ndarray) -> int:
    """The inode of the file that an array's memory belongs to; 0 for none."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            return int(inode)
    return 0
