"""Routing of answers to several engines: the queue of those that wait, and the rule of placement.

Pure: the same queue, slots and loads give the same placement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from winnow.rollout.engine import AnswerRequest, GroupRequest
from winnow.types import Segment

Key = tuple[int, int]
"""Group, answer."""
QUANTUM_TICKS = 8
"""Least ticks that engines advance between two looks at all of them.

A look costs a call to each engine (1 to 3 ms to another process) and waits for the slowest; eight
ticks of a model worth distributing take 50 ms and more. On the other hand a slot whose engine has
nothing queued stays empty for up to a quantum, and an event is seen up to a quantum late.
"""
_LOOKS = 32


@dataclass(eq=False)
class PendingRequest:
    """An answer that is wanted, with the prefix known of it."""

    group: GroupRequest
    request: AnswerRequest
    """The request; its prefix is the last that an engine told of."""
    aborting: bool = False
    """True if it was asked back; it is not sent to another engine then."""

    @property
    def key(self) -> Key:
        """Group and answer."""
        return self.group.group_id, self.request.index

    @property
    def is_fresh(self) -> bool:
        """True if nothing of it is written: it shares its prompt's prefill with others."""
        return not self.request.prefix

    def learn(self, segment: Segment) -> None:
        """Take note that so much of it is written; the next engine begins behind it."""
        if len(segment) > len(self.request.prefix or ()):
            self.request = replace(self.request, prefix=segment)


def requests_of(asks: Iterable[PendingRequest]) -> list[GroupRequest]:
    """Make the requests for one engine, answers of a group in one request."""
    groups: dict[int, list[PendingRequest]] = {}
    for ask in asks:
        groups.setdefault(id(ask.group), []).append(ask)
    return [
        replace(members[0].group, answers=tuple(ask.request for ask in members))
        for members in groups.values()
    ]


def quantum_for(max_tokens: int) -> int:
    """Return the ticks between two looks for answers of so many tokens at most.

    About `_LOOKS` looks while a longest answer is written: far fewer slots end in between than may
    wait in an engine (`ahead`), unless nearly all answers are short.
    """
    return max(QUANTUM_TICKS, max_tokens // _LOOKS)


def ahead(slots: int) -> int:
    """Return how many answers may wait in an engine for its next free slot.

    A quarter of the slots: as many as end in eight ticks where answers have 32 tokens. Answers that
    wait in the queue instead can go to the engine that is free first.
    """
    return max(1, slots // 4)


class RequestQueue:
    """Answers without an engine: prefixes first, then by priority, as engines serve them.

    Fresh answers of a group stand in it as one, so that their prompt is prefilled once.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, int, list[PendingRequest]]] = []
        self._entered = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def add(self, asks: Iterable[PendingRequest]) -> None:
        """Queue answers."""
        bundles: dict[int, list[PendingRequest]] = {}
        for ask in asks:
            bundles.setdefault(id(ask.group if ask.is_fresh else ask), []).append(ask)
        for bundle in bundles.values():
            self._entered += 1
            self._waiting += len(bundle)
            first = bundle[0]
            order = first.is_fresh, first.group.priority, first.request.index
            heappush(self._heap, (*order, self._entered, bundle))

    def take(self, group_ids: Collection[int]) -> list[PendingRequest]:
        """Take out the answers of these groups."""
        kept, taken = [], []
        for entry in sorted(self._heap):
            if entry[-1][0].group.group_id in group_ids:
                taken += entry[-1]
            else:
                kept.append(entry)
        heapify(kept)
        self._heap = kept
        self._waiting -= len(taken)
        return taken

    def place(self, slots: Sequence[int], loads: Sequence[int]) -> list[list[PendingRequest]]:
        """Take out the answers that engines should be given now, one list an engine.

        The first in the queue goes where most slots are free. A group is split only over slots that
        are free at once elsewhere: that costs a prefill, and saves waiting. Beyond the slots a
        group stays whole and joins the shortest queue, while that is shorter than `ahead`.

        Args:
            slots: answers each engine writes at once.
            loads: answers it has already, in slots or waiting there.
        """
        free = [count - load for count, load in zip(slots, loads, strict=True)]
        placed: list[list[PendingRequest]] = [[] for _ in slots]
        engines = range(len(slots))
        while self._heap:
            bundle = self._heap[0][-1]
            best = max(engines, key=lambda i: (free[i], -i))
            count = min(free[best], len(bundle))
            if count <= 0:
                open_ = [i for i in engines if -free[i] < ahead(slots[i])]
                if not open_:
                    break
                group = bundle[0].group
                with_siblings = [any(a.group is group for a in placed[i]) for i in engines]
                best = min(open_, key=lambda i: (not with_siblings[i], -free[i] / slots[i], i))
                count = len(bundle)
            placed[best] += bundle[:count]
            free[best] -= count
            self._waiting -= count
            del bundle[:count]
            if not bundle:
                heappop(self._heap)
        return placed
