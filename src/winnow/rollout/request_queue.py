"""The queue of a group of engines: answers without an engine, and where each goes next."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from winnow.rollout.engine import GroupRequest
from winnow.rollout.tick_engine import PendingAnswer
from winnow.types import Segment

Key = tuple[int, int]
"""Group, answer."""


@dataclass(eq=False)
class TrackedAnswer(PendingAnswer):
    """A submitted answer; the prefix of its request has the tokens reported so far."""

    aborting: bool = False
    """True if it is being aborted, and so not sent to another engine."""
    deaths: int = 0
    """Deaths of engines in a row that had it and reported no new token."""

    @property
    def is_fresh(self) -> bool:
        """True if it has no tokens yet, so that it shares the prefill of its prompt."""
        return not self.request.prefix

    def extend_prefix(self, segment: Segment) -> None:
        """Set a longer prefix, from which the next engine continues."""
        if len(segment) > len(self.prefix):
            segment = replace(segment, images=self.prefix.images)  # engines return tokens alone
            self.request, self.deaths = replace(self.request, prefix=segment), 0


def merge_requests(answers: Iterable[TrackedAnswer]) -> list[GroupRequest]:
    """Return requests for one engine, with the answers of a group in one request."""
    groups: dict[int, list[TrackedAnswer]] = {}
    for answer in answers:
        groups.setdefault(id(answer.group), []).append(answer)
    return [
        replace(members[0].group, answers=tuple(answer.request for answer in members))
        for members in groups.values()
    ]


def max_waiting(slots: int) -> int:
    """Return how many answers may wait in an engine for a free slot.

    A quarter of the slots: as many as end in eight ticks where answers have 32 tokens. Answers that
    wait in the queue instead can go to the engine that is free first.
    """
    return max(1, slots // 4)


class RequestQueue:
    """Answers without an engine: prefixes first, then by priority, as in engines.

    Fresh answers of a group are one entry, so that their prompt is prefilled once.
    """

    def __init__(self) -> None:
        self._bundles: list[list[TrackedAnswer]] = []

    def __len__(self) -> int:
        return sum(map(len, self._bundles))

    def __iter__(self) -> Iterator[TrackedAnswer]:
        return chain.from_iterable(self._bundles)

    def add(self, answers: Iterable[TrackedAnswer]) -> None:
        """Queue answers."""
        bundles: dict[int, list[TrackedAnswer]] = {}
        for answer in answers:
            bundles.setdefault(id(answer.group if answer.is_fresh else answer), []).append(answer)
        for bundle in bundles.values():
            insort(self._bundles, bundle, key=lambda each: each[0].order)

    def remove(self, group_ids: Collection[int]) -> list[TrackedAnswer]:
        """Remove and return the answers of these groups."""
        taken = [bundle for bundle in self._bundles if bundle[0].group.group_id in group_ids]
        ids = set(map(id, taken))
        self._bundles = [bundle for bundle in self._bundles if id(bundle) not in ids]
        return [answer for bundle in taken for answer in bundle]

    def assign(
        self, slots: Sequence[int], loads: Sequence[int], retained: Sequence[Collection[Key]] = ()
    ) -> list[list[TrackedAnswer]]:
        """Remove and return the answers to submit now, a list for each engine.

        The first entry is assigned to the engine with the most free slots, the next turn of a
        conversation to the one that has its keys, if it has a free slot. A group is split if slots
        are free on several engines; else it joins the shortest queue shorter than `max_waiting`.

        Args:
            slots: slots of each engine.
            loads: answers of each engine, running or queued.
            retained: answers of which each engine may have keys.
        """
        free = [count - load for count, load in zip(slots, loads, strict=True)]
        placed: list[list[TrackedAnswer]] = [[] for _ in slots]
        engines = range(len(slots))
        while self._bundles:
            bundle = self._bundles[0]
            best = max(engines, key=lambda i: (free[i], -i))
            if not bundle[0].is_fresh:
                key = bundle[0].key
                best = next((i for i, s in enumerate(retained) if key in s and free[i] > 0), best)
            count = min(free[best], len(bundle))
            if count <= 0:
                open_ = [i for i in engines if -free[i] < max_waiting(slots[i])]
                if not open_:
                    break
                group = bundle[0].group
                with_siblings = [any(a.group is group for a in placed[i]) for i in engines]
                best = min(open_, key=lambda i: (not with_siblings[i], -free[i] / slots[i], i))
                count = len(bundle)
            placed[best] += bundle[:count]
            free[best] -= count
            del bundle[:count]
            if not bundle:
                del self._bundles[0]
        return placed
