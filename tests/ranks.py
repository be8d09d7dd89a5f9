"""Real processes that run a test's functions together, started once and asked many times.

Importing torch takes seconds, so that they are forked, and a session has one group of ranks:

    with Ranks(4, server) as ranks:
        assert ranks.run(rank_and_size) == [(0, 4), (1, 4), (2, 4), (3, 4)]

A function is any that can be imported. It runs on every rank, within one gloo process group.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import TYPE_CHECKING, Any

from winnow.workers.child import die_with_parent

if TYPE_CHECKING:
    from tests.forked import Forked, Server

START_S = 240.0
"""Until torch is imported, on a machine with other work."""
PRELOADED = (
    *("torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3", "megatron.core"),
    *("tests.contract.test_fsdp2", "tests.contract.test_learner_ranks"),
    *("tests.contract.test_megatron", "peft"),
)
"""What a process that does nothing else imports once, for the ranks to be forked from it."""
GRACE_S = 2.0
"""For the other ranks, once one has failed."""


class RankError(AssertionError):
    """What a function raised on a rank, with its traceback there."""


@contextlib.contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of many in this process alone: what others would send is never written."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Ranks:
    """A group of processes; those that hung or died are started anew at the next call.

    Args:
        server: what they are forked from.
    """

    def __init__(self, world: int, server: Server) -> None:
        self.world = world
        self._server = server
        self._parent: Forked | None = None
        self._pipes: list[Connection] = []
        self._store: Any = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """The function's results, by rank.

        Raises:
            RankError: it raised on a rank, a rank died, or took longer than the limit.
        """
        if self._parent is None:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._answers(timeout_s)

    def stop(self) -> None:
        """End all processes."""
        if self._parent is not None:
            self._parent.kill()
            self._parent.wait()
        for pipe in self._pipes:
            pipe.close()
        self._parent, self._pipes, self._store = None, [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # A file's readers would ask for it all the time, and groups are made by the dozen.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        key = bytes(current_process().authkey)
        with Listener(family="AF_UNIX", backlog=self.world, authkey=key) as door:
            words = str(door.address), str(self.world), str(self._store.port), key.hex()
            self._parent = self._server.start(__name__, words)
            pipes = [door.accept() for _ in range(self.world)]
        self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]
        self._answers(START_S)

    def _answers(self, timeout_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        faults: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) + len(faults) < self.world:
            missing = [r for r in range(self.world) if r not in found and r not in faults]
            ready = wait([self._pipes[r] for r in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in missing:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    is_fault, value = self._pipes[rank].recv()
                except EOFError:
                    is_fault, value = True, "the process died"
                (faults if is_fault else found)[rank] = value
                if is_fault:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        silent = [r for r in range(self.world) if r not in found and r not in faults]
        if silent or faults:
            self.stop()
            told = [f"rank {rank}: {text}" for rank, text in sorted(faults.items())]
            if silent:
                told.append(f"ranks {silent} did not answer in time ({timeout_s:g} s)")
            raise RankError("\n".join(told))
        return [found[rank] for rank in range(self.world)]


def _share_device() -> None:
    """Have all groups of gloo in this process use one device.

    Each would make its own, with a thread that wakes a hundred times a second: of some hundred
    groups on four ranks these take a processor.
    """
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class SharingDevice(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = gloo._Options()
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharingDevice


def main() -> None:
    """Fork the ranks, which end with this process; it waits to be killed."""
    address, world, port = sys.argv[1], *map(int, sys.argv[2:4])
    # Tensors that are returned are fetched with it, too.
    current_process().authkey = bytes.fromhex(sys.argv[4])
    for name in PRELOADED:
        importlib.import_module(name)
    own = os.getpid()
    for rank in range(world):
        if os.fork() == 0:
            die_with_parent(own)
            _serve(Client(address, authkey=current_process().authkey), rank, world, port)
            return
    signal.pause()


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    """What a process does: functions, until its parent goes."""
    pipe.send(rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _share_device()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    pipe.send((False, None))
    with contextlib.suppress(EOFError):
        while True:
            answer: tuple[bool, Any]
            try:
                function, args = pipe.recv()
                answer = False, function(*args)
            except EOFError:
                raise
            except BaseException:
                answer = True, traceback.format_exc()
            pipe.send(answer)
