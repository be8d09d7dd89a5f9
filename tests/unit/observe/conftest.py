"""Made-up groups, records and a disk that is full after so many bytes."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan

MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> MakeGroup:
    """A group with answers of 1, 2, 3 … tokens, the first half right."""

    def make(
        number: int, answers: int = 2, versions: tuple[int, ...] = (3,), **score: Any
    ) -> Group:
        made = []
        for index in range(answers):
            length = index + len(versions)
            stops = [*range(1, len(versions)), length]
            spans = tuple(VersionSpan(v, s) for v, s in zip(versions, stops, strict=True))
            ids = np.arange(10, 10 + length)
            segment = Segment(ids, np.full(length, -0.5, dtype=np.float32), spans)
            right = float(index < answers / 2)
            fields: dict[str, Any] = {"parts": {"task": 2 * right - 1}, "extra": {}} | score
            made.append(
                Answer(Trajectory((segment,), "stop"), Score(2 * right - 1, right, **fields))
            )
        prompt = Prompt(f"row-{number}", np.arange(4), "5391:", "sort_digits", "1359")
        return Group(number, prompt, tuple(made))

    return make


@pytest.fixture
def disk_full_after() -> Callable[[int], AbstractContextManager[None]]:
    """Within the block no file of this process may grow beyond so many bytes."""

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def quickstart_records() -> list[dict[str, float]]:
    """What a run of 80 steps writes, evaluated every 20."""

    def held_out(step: int) -> dict[str, float]:
        gain = 1 - math.exp(-step / 25)
        return {
            "eval/sort_digits/avg@16": 0.3 + 0.6 * gain,
            "eval/sort_digits/pass@1": 0.3 + 0.6 * gain,
            "eval/sort_digits/pass@16": 0.95 + 0.04 * gain,
            "eval/sort_digits/greedy": 0.57 + 0.4 * gain,
            "eval/sort_digits/length": 52 - 6 * gain,
            "eval/sort_digits/truncated": 0.1 * (1 - gain),
            "eval/sort_digits/prompts": 2000,
        }

    records: list[dict[str, float]] = [{"step": 0, **held_out(0)}]
    for step in range(1, 81):
        gain = 1 - math.exp(-step / 25)
        record = {
            "step": step,
            "sampling/accuracy": 0.3 + 0.6 * gain,
            "score/reward/mean": -0.4 + 1.1 * gain,
            "sampling/keep_rate": 0.6 - 0.2 * gain,
            "length/response/mean": 52 - 6 * gain,
            "length/truncated": 0.1 * math.exp(-step / 8),
            "actor/entropy": 0.5 - 0.3 * gain,
            "throughput/tokens_per_s": 23456.0,
            "time/generate_s": 0.7,
            "time/update_s": 0.5,
            "time/other_s": 0.1,
            "time/step_s": 1.3,
            "sampling/tokens/generated": 36000,
            "sampling/tokens/trained": 24000,
            "sampling/tokens/all_right": 9000,
            "sampling/tokens/all_wrong": 2300,
            "sampling/tokens/surplus": 700,
            "sampling/tokens/in_progress": 1234,
        }
        records.append(record | (held_out(step) if step % 20 == 0 else {}))
    return records
