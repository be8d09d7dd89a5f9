"""What is added to the task's reward; plain numbers, without torch."""

from __future__ import annotations

from typing import Literal


def overlong_penalty(
    length_tokens: int,
    limit_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
    form: Literal["paper", "verl"] = "paper",
) -> float:
    """DAPO's soft overlong penalty: 0 up to `limit - buffer`, then falling to -factor at the limit.

    Beyond the limit the paper stays at -factor and verl goes on falling; up to it they agree.
    """
    over = length_tokens - (limit_tokens - buffer_tokens)
    if over <= 0:
        return 0.0
    share = over / buffer_tokens
    return -factor * (min(share, 1.0) if form == "paper" else share)
