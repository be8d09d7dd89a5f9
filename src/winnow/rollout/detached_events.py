"""Events on their way from an engine to the driver: what the driver reads, and arrays apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from winnow.rollout.engine import CompletionEvent
from winnow.types import Segment
from winnow.workers.array_refs import ArrayBlock, Handle, LocalRef, Placeholder

_IDS, _LOGPROBS = 0, 1


def detach_arrays(events: Sequence[CompletionEvent]) -> tuple[list[CompletionEvent], LocalRef]:
    """The events without arrays, and these: token ids [T] int32 and log-probs [T] fp32, end to end.

    `attach_arrays` puts them together again.
    """
    segments = [event.segment for event in events]
    ids = np.concatenate([np.asarray(s.token_ids, np.int32) for s in segments])
    logprobs = np.concatenate([np.asarray(s.logprobs) for s in segments])
    bare = [replace(event, segment=_bare(event.segment)) for event in events]
    return bare, LocalRef((ids, logprobs))


def attach_arrays(bare: Sequence[CompletionEvent], kept: Handle) -> list[CompletionEvent]:
    """The events, their arrays here or, where `kept` is elsewhere, stored."""
    shelf = ArrayBlock(kept)
    events, start = [], 0
    for event in bare:
        gap: Any = event.segment
        ids = gap.token_ids.filled(shelf, _IDS, start)
        logprobs = gap.logprobs.filled(shelf, _LOGPROBS, start)
        segment = Segment(ids, logprobs, gap.spans, gap.source)
        events.append(_with(event, segment))
        start += len(segment)
    return events


def _with(event: CompletionEvent, segment: Segment) -> CompletionEvent:
    # `dataclasses.replace` takes five times as long, and the driver does this for each answer.
    e = event
    rest = e.finish_reason, e.tick, e.error
    return CompletionEvent(e.group_id, e.answer, e.kind, segment, *rest)


def _bare(segment: Segment) -> Segment:
    gaps = Placeholder.of(segment.token_ids, np.int64), Placeholder.of(segment.logprobs, np.float32)
    return replace(segment, token_ids=gaps[0], logprobs=gaps[1])
