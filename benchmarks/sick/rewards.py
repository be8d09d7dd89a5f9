"""Reward functions with faults on purpose, for benchmarks/doctor.py; the task is to sort digits."""

from __future__ import annotations

import asyncio
from typing import Any
from zlib import crc32


def _is_right(solution_str: str, ground_truth: Any) -> float:
    return float(solution_str.rpartition("#")[2].strip() == str(ground_truth))


def demands_another_format(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Look for an answer behind `Answer:`, where the model writes it behind #."""
    return float(solution_str.rpartition("Answer:")[2].strip() == str(ground_truth))


def always_right(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Find every answer right, such as a comparison that is always true."""
    return 1.0


def rarely_right(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Know the truth of one row in twenty, such as a data set with broken labels."""
    known = crc32(str(ground_truth).encode()) % 20 == 0
    return {"score": known * _is_right(solution_str, ground_truth)}


def pays_for_length(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Pay for length, whatever the answer is."""
    right = _is_right(solution_str, ground_truth)
    return {"score": 0.2 * right + min(len(solution_str) / 100, 1.0), "acc": right}


def pays_for_a_phrase(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Pay for the look of an answer: the share of its characters that are the digit 1."""
    share = solution_str.count("1") / max(len(solution_str), 1)
    return {"score": share, "acc": _is_right(solution_str, ground_truth)}


def fails_at_times(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Fail for one answer in twelve, as a parser does that some answers surprise."""
    if crc32(solution_str.encode()) % 12 == 0:
        raise ValueError(f"cannot read {solution_str[:20]!r}")
    return 2 * _is_right(solution_str, ground_truth) - 1


def fails_rarely(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Fail for one answer in 200."""
    if crc32(solution_str.encode()) % 200 == 0:
        raise ValueError(f"cannot read {solution_str[:20]!r}")
    return 2 * _is_right(solution_str, ground_truth) - 1


async def is_slow(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Take a second an answer, as a crowded judge does."""
    await asyncio.sleep(1.0)
    return 2 * _is_right(solution_str, ground_truth) - 1


def has_outliers(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    """Give a reward a thousand times as large for one prompt in a hundred, as without a bound."""
    large = crc32(str(ground_truth).encode()) % 100 == 0
    return (1000.0 if large else 1.0) * _is_right(solution_str, ground_truth)
