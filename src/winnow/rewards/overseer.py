"""The thread that watches over the pool's workers: feeds, times, weighs, ends and replaces them.

A thread, because limits must hold while the run's own thread is busy with the model. A sync
function has one answer in work a worker, so it is known whose fault an end is, and the rest of
its batch goes to another worker. Of an async function's many, any may be at fault: each is asked
again, alone.

Memory is what is resident, looked at every `_TICK_S` while a worker works: a limit on address
space (RLIMIT_AS) would count what numpy, torch and thread stacks only reserve. In between a
worker can exceed it by as much as it can touch in that time, about 0.1 GiB.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from winnow.errors import RewardError
from winnow.rewards.child import Child, ending_in_words
from winnow.rewards.task import Failure, Outcome
from winnow.rewards.wire import Job, Reply
from winnow.rewards.worker_async import late_line

log = logging.getLogger(__name__)

ASYNC_AT_ONCE = 64
"""Answers that a worker awaits side by side; halved each time that one blocks the others."""
_LARGEST_BATCH = 32
_BATCH_S = 0.02
_GRACE_S = 1.0
"""Over the limit, for a worker that keeps the time of its answers itself."""
_LOAD_LIMIT_S = 600.0
_LOAD_ATTEMPTS = 3
"""In a row, of workers that died while loading what another had loaded."""
_TICK_S = 0.05
_CLOSING_S = 1.0


class PoolClient(Protocol):
    """Where items come from and outcomes go to; every method may be called from a thread."""

    @property
    def wakee(self) -> int:
        """A descriptor that is readable when there is something new."""
        ...

    def take(self) -> list[tuple[int, bytes]]:
        """The packed items that have come in."""
        ...

    def is_wanted(self, number: int) -> bool:
        """Whether somebody still waits for an item's score."""
        ...

    def loaded(self) -> None:
        """A worker is ready."""
        ...

    def settle(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """These items are done with."""
        ...

    def fail(self, error: Exception) -> None:
        """No worker can be had any more."""
        ...


class PoolMonitor:
    """Runs the workers for an office until `is_closing`."""

    def __init__(self, job: Job, workers: int, office: PoolClient) -> None:
        self.is_closing = False
        self._job, self._workers, self._office = job, workers, office
        self._children: list[Child] = []
        self._items: dict[int, bytes] = {}
        self._queue: deque[int] = deque()
        self._alone: deque[int] = deque()
        self._done: list[tuple[int, Outcome]] = []
        self._at_once = ASYNC_AT_ONCE
        self._seconds_each = _BATCH_S
        self._next_look = 0.0
        self._was_loaded = self._is_broken = False
        self._lost_loading = 0

    def run(self) -> None:
        """The thread's work, to the end of its last worker."""
        selector = self._selector = selectors.DefaultSelector()
        selector.register(self._office.wakee, selectors.EVENT_READ, None)
        error: Exception = RuntimeError("the scorer pool is closed")
        try:
            while not self.is_closing:
                self._fill_up()
                self._assign()
                self._attend(selector.select(self._patience()))
        except Exception as mistake:
            log.exception("the scorer pool fails")
            error = mistake
        finally:
            for child in self._children:
                child.close()
                if child.sent or not child.is_ready:
                    child.kill()
            give_up = time.monotonic() + _CLOSING_S
            for child in self._children:
                child.end(patience_s=give_up - time.monotonic())
            selector.close()
            self._office.fail(error)

    def _attend(self, events: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        for key, mask in events:
            if key.data is None:
                os.read(key.fd, 4096)
                continue
            child, is_output = key.data
            if child not in self._children:
                continue
            if is_output:
                if not child.read_output():
                    self._selector.unregister(child.output)
            elif mask & selectors.EVENT_READ:
                self._hear(child)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _TICK_S
            for child in list(self._children):
                self._look_at(child, now)
        done, self._done = self._done, []
        if done:
            self._office.settle(done)

    def _patience(self) -> float | None:
        busy = any(child.sent or not child.is_ready for child in self._children)
        return _TICK_S if busy else None

    def _hear(self, child: Child) -> None:
        """Take in what a worker says, or that it is gone."""
        while replies := child.read():
            for reply in replies:
                self._take(child, reply)
        if replies is None:
            self._lose(child, None)

    def _take(self, child: Child, reply: Reply) -> None:
        was_alone = child.is_alone
        if reply.kind == "ready":
            child.is_ready, child.is_async = True, reply.value
            self._was_loaded, self._lost_loading = True, 0
            self._office.loaded()
        elif reply.kind == "refused":
            child.refusal = reply.value
        elif reply.kind == "retiring":
            child.is_retiring = True
        elif child.answered(reply.id):
            if reply.kind == "done":
                self._settle(reply.id, reply.value)
            else:
                self._blame([reply.id], late_line(self._job.timeout_s), was_alone)
            if not child.sent:
                seconds = (time.monotonic() - child.batch_began) / child.batch_size
                self._seconds_each += 0.3 * (seconds - self._seconds_each)

    def _look_at(self, child: Child, now: float) -> None:
        """Hold a worker at work against its limits."""
        if child.is_ready and not child.sent:
            return
        if child.has_ended():  # what it forked may keep the connection open
            self._hear(child)
            if child in self._children:
                self._lose(child, None)
            return
        memory, most = child.resident_bytes(), self._job.memory_bytes
        if memory > most:
            line = f"used {memory >> 20:,} MiB of memory, reward.memory_mb is {most >> 20}"
            self._lose(child, f"the scorer {line}" if child.is_ready else line)
        elif not child.is_ready:
            if now > child.born + _LOAD_LIMIT_S:
                self._lose(child, f"took more than {_LOAD_LIMIT_S:g} s")
        elif now > child.deadline(self._job.timeout_s, _GRACE_S):
            self._hear(child)  # an answer may have come while this thread waited
            still = child in self._children and child.sent
            if still and now > child.deadline(self._job.timeout_s, _GRACE_S):
                self._lose(child, late_line(self._job.timeout_s))

    def _lose(self, child: Child, reason: str | None) -> None:
        """Part with a worker that is gone, or is to be killed for `reason`."""
        self._children.remove(child)
        self._selector.unregister(child.socket)
        with suppress(KeyError):  # its output had come to an end before
            self._selector.unregister(child.output)
        if reason is not None:
            child.kill()
        child.close()
        code = child.end(patience_s=_CLOSING_S if reason is None else 0.0)
        how = ending_in_words(code)
        if not child.is_ready:
            self._lose_loading(child, reason or how)
            return
        held = list(child.sent)
        if child.is_retiring:
            self._queue.extendleft(reversed(held))
            return
        line = reason or f"the scorer's process {how}"
        log.warning("a scorer's process is replaced: %s", line)
        guilty = held if child.is_async else held[:1]
        self._queue.extendleft(reversed(held[len(guilty) :]))
        printed = child.output_text
        trace = f"{line}\nIts process had written:\n{printed}" if printed else line
        self._blame(guilty, line, len(guilty) == 1, trace)

    def _lose_loading(self, child: Child, how: str) -> None:
        self._lost_loading += 1
        is_chance = self._was_loaded and self._lost_loading < _LOAD_ATTEMPTS
        if child.refusal is None and is_chance:
            log.warning("a scorer's process %s while it was starting", how)
            return
        self._is_broken = True
        self._office.fail(RewardError(child.refusal or _load_error(self._job, how)))

    def _blame(self, held: Sequence[int], line: str, is_certain: bool, trace: str = "") -> None:
        """Fail the answer that was in work; where there were several, ask each again, alone."""
        if is_certain:
            for number in held:
                self._settle(number, Failure(line, trace or line))
            return
        if held and line == late_line(self._job.timeout_s) and self._at_once > 1:
            self._at_once //= 2
            log.warning("an async scorer blocks others; now %d at once", self._at_once)
        self._alone.extend(held)

    def _settle(self, number: int, outcome: Outcome) -> None:
        self._items.pop(number, None)
        self._done.append((number, outcome))

    def _fill_up(self) -> None:
        """Start workers in place of those that are gone."""
        while len(self._children) < self._workers and not self._is_broken:
            child = Child.start(self._job)
            self._children.append(child)
            self._selector.register(child.socket, selectors.EVENT_READ, (child, False))
            self._selector.register(child.output, selectors.EVENT_READ, (child, True))

    def _assign(self) -> None:
        """Give the workers what they have room for."""
        for number, packed in self._office.take():
            self._items[number] = packed
            self._queue.append(number)
        for child in self._children:
            if child.is_ready and not child.is_retiring:
                numbers = [n for n in self._choose(child) if self._is_wanted(n)]
                child.send({number: self._items[number] for number in numbers})
            wanted = selectors.EVENT_READ if child.flush() else _READ_AND_WRITE
            if self._selector.get_key(child.socket).events != wanted:
                self._selector.modify(child.socket, wanted, (child, False))

    def _is_wanted(self, number: int) -> bool:
        if self._office.is_wanted(number):
            return True
        del self._items[number]
        return False

    def _choose(self, child: Child) -> list[int]:
        held = len(child.sent)
        if self._alone or (child.is_alone and held):
            child.is_alone = True if not held else child.is_alone
            return [self._alone.popleft()] if not held else []
        child.is_alone = False
        share = math.ceil(len(self._queue) / self._workers)
        if child.is_async:
            room = min(self._at_once - held, share)
        elif held:
            room = 0
        else:
            quick = max(1, int(_BATCH_S / max(self._seconds_each, 1e-9)))
            # A part of the share: who is done first takes more of what is left.
            room = min(_LARGEST_BATCH, quick, math.ceil(share / 2))
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]


_READ_AND_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE


def _load_error(job: Job, how: str) -> str:
    if job.function is None:
        return f"a process for built-in scorers {how}; raise reward.memory_mb, or see the log"
    return (
        f"reward.function.path {job.function.path}: the process that imports it {how}; "
        "mend the file, or raise the limit"
    )
