"""Made-up groups, and a disk that is full after so many bytes."""

from __future__ import annotations

import contextlib
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
