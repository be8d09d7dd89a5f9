"""Events on their way from an engine to the driver: what the driver reads, and arrays apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from winnow.rollout.engine import CompletionEvent
from winnow.stored import Handle, Here, Shelf, StoredArray
from winnow.types import FloatArray, IntArray

_IDS, _LOGPROBS = 0, 1


@dataclass(frozen=True)
class _Gap:
    """Where an array was taken out."""

    length: int

    def __len__(self) -> int:
        return self.length


def shelved(events: Sequence[CompletionEvent]) -> tuple[list[CompletionEvent], Here]:
    """The events without arrays, and these: token ids [T] int32 and log-probs [T] fp32, end to end.

    `unshelved` puts them together again.
    """
    segments = [event.segment for event in events]
    ids = np.concatenate([np.asarray(s.token_ids, np.int32) for s in segments])
    logprobs = np.concatenate([np.asarray(s.logprobs) for s in segments])
    bare = [
        replace(event, segment=replace(s, token_ids=_gap(len(s)), logprobs=_gap(len(s))))
        for event, s in zip(events, segments, strict=True)
    ]
    return bare, Here((ids, logprobs))


def unshelved(bare: Sequence[CompletionEvent], kept: Handle) -> list[CompletionEvent]:
    """The events, their arrays here or, where `kept` is elsewhere, stored."""
    shelf, is_here = Shelf(kept), isinstance(kept, Here)

    def piece(index: int, start: int, stop: int, dtype: type[np.generic]) -> Any:
        stored = StoredArray(shelf, index, start, stop, dtype)
        return np.asarray(stored) if is_here else stored

    events, start = [], 0
    for event in bare:
        stop = start + len(event.segment)
        segment = replace(
            event.segment,
            token_ids=cast("IntArray", piece(_IDS, start, stop, np.int64)),
            logprobs=cast("FloatArray", piece(_LOGPROBS, start, stop, np.float32)),
        )
        events.append(replace(event, segment=segment))
        start = stop
    return events


def _gap(length: int) -> Any:
    return _Gap(length)
