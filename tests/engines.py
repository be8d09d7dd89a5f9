"""A scripted engine: no model, but slots, a queue, ticks, versions, failures and stalls.

An answer's tokens and length are functions of its seed, a greedy one's of its prompt, so that an
answer that was interrupted can be compared with one that was not. Every running answer writes
one token a tick; `events` runs to the next tick at which something ends.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from winnow.rollout.engine import AnswerRequest, CompletionEvent, EngineStatus, GroupRequest
from winnow.rollout.weights import WeightUpdate
from winnow.types import Prompt, Segment, VersionSpan

VOCABULARY = 64
MASK = 2**64 - 1
Key = tuple[int, int]
"""Group, answer."""


def uniforms(seed: int, start: int, stop: int) -> np.ndarray:
    """The answer's random numbers in [0, 1) for these positions (splitmix64)."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)) * 2.0**-53


def uniform(seed: int, position: int) -> float:
    """One of `uniforms`, faster."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def written(seed: int, start: int, stop: int, version: int) -> Segment:
    """What the policy writes at these positions."""
    numbers = uniforms(seed, start, stop)
    spans = (VersionSpan(version, stop - start),) if stop > start else ()
    return Segment(
        (numbers * VOCABULARY).astype(np.int64),
        np.float32(-1.0) - numbers.astype(np.float32),
        spans,
    )


def greedy_seed(prompt_ids: np.ndarray) -> int:
    """What a greedy answer's tokens and length are functions of."""
    return 1 << 62 | int(prompt_ids.sum())


@dataclass
class Job:
    """An answer in the engine."""

    request: GroupRequest
    answer: AnswerRequest
    length: int
    """At which it ends."""
    fails_at: int | None
    started: int = 0
    """Tick at which it got its slot."""

    @property
    def key(self) -> Key:
        return self.request.group_id, self.answer.index

    @property
    def behind(self) -> int:
        return len(self.answer.prefix) if self.answer.prefix else 0

    @property
    def target(self) -> int:
        return self.length if self.fails_at is None else self.fails_at


class ScriptedEngine:
    """Implements `Engine`.

    Args:
        length: tokens of an answer, cut at the response limit.
        slots: answers written at once.
        fails: tokens at which an answer fails on its k-th submission (from 0), or None.
        keeps_prefix: whether a failure reports what was written.
        stalls: ticks at which the engine writes nothing more until something is aborted.
        live_updates: takes new weights while answers run.
    """

    def __init__(
        self,
        length: Callable[[GroupRequest, AnswerRequest], int],
        *,
        slots: int = 64,
        fails: Callable[[int, int, int], int | None] = lambda group, answer, attempt: None,
        keeps_prefix: bool = True,
        stalls: Collection[int] = (),
        live_updates: bool = False,
    ) -> None:
        self.version = 0
        self.tick = 0
        self.submitted: list[GroupRequest] = []
        self.aborted_groups: list[int] = []
        self._length = length
        self._slots = slots
        self._fails = fails
        self._keeps_prefix = keeps_prefix
        self._stalls = sorted(stalls)
        self.live_updates = live_updates
        self._attempts: dict[Key, int] = {}
        self._queue: list[tuple[int, int, Job]] = []
        self._running: dict[Key, Job] = {}
        self._ends: list[tuple[int, Key, int]] = []
        self._pending: list[CompletionEvent] = []
        self._generated = 0
        self._serial = 0
        self._woken = asyncio.Event()

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        self.submitted.extend(groups)
        for request in groups:
            for answer in request.answers:
                key = (request.group_id, answer.index)
                assert key not in self._running
                if request.sampling_of(answer).temperature == 0:
                    answer = replace(answer, seed=greedy_seed(request.prompt_ids))
                attempt = self._attempts.get(key, 0)
                self._attempts[key] = attempt + 1
                length = min(self._length(request, answer), request.sampling.max_tokens)
                fails_at = self._fails(*key, attempt)
                job = Job(request, answer, length, fails_at)
                heapq.heappush(self._queue, (request.priority, self._next_serial(), job))
        self._fill()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        while not self._pending and (self._running or self._queue):
            if until is not None and self.tick >= until:
                break
            if self._stalls and self.tick >= self._stalls[0]:
                self._woken.clear()
                await self._woken.wait()
            else:
                self._run_to_next_end(until)
                await asyncio.sleep(0)  # scorers get their turn between ticks, as with a model
        events, self._pending = self._pending, []
        return events

    async def progress(self) -> Sequence[CompletionEvent]:
        events, self._pending = self._pending, []
        running = [self._event(self._running[key], "running") for key in sorted(self._running)]
        return [*events, *running]

    async def abort(self, group_ids: Collection[int]) -> None:
        groups = set(group_ids)
        self.aborted_groups.extend(group_ids)
        for key in sorted(key for key in self._running if key[0] in groups):
            self._end(self._running.pop(key), "aborted")
        kept = []
        for entry in sorted(self._queue, key=lambda entry: entry[2].key):
            if entry[2].request.group_id in groups:
                job = entry[2]
                job.started = self.tick
                self._end(job, "aborted")
            else:
                kept.append(entry)
        self._queue = kept
        heapq.heapify(self._queue)
        self._stalls = [tick for tick in self._stalls if tick > self.tick]
        self._woken.set()
        self._fill()

    async def load_weights(self, update: WeightUpdate) -> None:
        assert self.live_updates or not self._running
        assert self.live_updates or not self._queue
        for job in self._running.values():
            segment = self._event(job, "running").segment
            job.answer = replace(job.answer, prefix=segment)
            job.started = self.tick
        self.version = update.version

    def status(self) -> EngineStatus:
        return EngineStatus(
            slots=self._slots,
            running=len(self._running),
            queued=len(self._queue),
            weight_version=self.version,
            generated_tokens=self._generated,
            tick=self.tick,
            live_updates=self.live_updates,
        )

    async def close(self) -> None:
        self._running.clear()

    def forget(self) -> None:
        """Lose every answer, as an engine does that was restarted."""
        self._running.clear()
        self._queue.clear()
        self._ends.clear()

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._slots:
            _, _, job = heapq.heappop(self._queue)
            job.started = self.tick
            self._running[job.key] = job
            end = self.tick + max(0, job.target - job.behind)
            heapq.heappush(self._ends, (end, job.key, id(job)))

    def _run_to_next_end(self, limit: int | None) -> None:
        while self._ends and self._is_gone(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return
        until = self._ends[0][0] if limit is None else min(self._ends[0][0], limit)
        if self._stalls:
            until = min(until, max(self._stalls[0], self.tick))
        self._generated += (until - self.tick) * len(self._running)
        self.tick = until
        if self._stalls and self.tick >= self._stalls[0]:
            return
        while self._ends and self._ends[0][0] <= self.tick:
            entry = heapq.heappop(self._ends)
            if not self._is_gone(entry):
                job = self._running.pop(entry[1])
                self._end(job, "finished" if job.fails_at is None else "failed")
        self._fill()

    def _is_gone(self, entry: tuple[int, Key, int]) -> bool:
        job = self._running.get(entry[1])
        return job is None or id(job) != entry[2]

    def _end(self, job: Job, kind: str) -> None:
        self._pending.append(self._event(job, kind))

    def _event(self, job: Job, kind: str) -> CompletionEvent:
        stop = job.behind + self.tick - job.started
        segment = written(job.answer.seed, job.behind, stop, self.version)
        if job.answer.prefix is not None:
            segment = extended(job.answer.prefix, segment)
        if kind == "failed" and not self._keeps_prefix:
            segment = written(job.answer.seed, 0, 0, self.version)
        truncated = job.length == job.request.sampling.max_tokens
        reason = ("length" if truncated else "stop") if kind == "finished" else "aborted"
        error = "a scripted failure" if kind == "failed" else ""
        return CompletionEvent(*job.key, kind, segment, reason, self.tick, error)  # type: ignore[arg-type]


def extended(head: Segment, tail: Segment) -> Segment:
    """A segment followed by what the same author wrote later."""
    spans = list(head.spans)
    for span in tail.spans:
        moved = VersionSpan(span.version, span.stop + len(head))
        if spans and spans[-1].version == moved.version:
            spans.pop()
        spans.append(moved)
    return Segment(
        np.concatenate([head.token_ids, tail.token_ids]),
        np.concatenate([head.logprobs, tail.logprobs]),
        tuple(spans),
    )


class Prompts:
    """An endless loader whose prompts can be given back."""

    def __init__(self, distinct: int = 1 << 30) -> None:
        self.distinct = distinct
        self.cursor = 0
        self.returned: list[Prompt] = []
        self.given_back: list[Prompt] = []

    def next(self) -> Prompt:
        if self.returned:
            return self.returned.pop(0)
        uid = self.cursor % self.distinct
        self.cursor += 1
        return prompt(uid)

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        self.given_back.extend(prompts)
        self.returned[:0] = prompts


def prompt(uid: int) -> Prompt:
    """The prompt with this number."""
    return Prompt(str(uid), np.array([uid], dtype=np.int64), f"prompt {uid}", "scripted", uid)
