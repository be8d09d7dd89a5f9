"""What is added to the task's reward; plain numbers, without torch."""

from __future__ import annotations


def overlong_penalty(
    length_tokens: int, limit_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> float:
    """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13), no answer being over the limit.

    0 up to `limit - buffer`, then falling linearly to -factor at the limit.
    """
    over = length_tokens - (limit_tokens - buffer_tokens)
    return -factor * min(max(over, 0) / buffer_tokens, 1.0)
