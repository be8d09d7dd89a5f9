"""DAPO's soft overlong penalty: answers that come near the response limit cost reward.

(Overlong filtering, which takes truncated answers out of the loss, happens where masks are
made: `winnow.batching.pack`.)
"""

from __future__ import annotations

from typing import Literal


def soft_overlong_penalty(
    length: int,
    limit: int,
    buffer: int,
    factor: float = 1.0,
    form: Literal["verl", "paper"] = "verl",
) -> float:
    """0 up to limit - buffer tokens, then falling linearly to -factor at the limit.

    DAPO (arXiv 2503.14476, eq. 13), added to the task's reward. Up to the limit the two forms
    agree; an answer beyond it costs `factor` in the paper, and ever more in verl.

    Args:
        length: tokens of the answer.
        limit: the response limit L_max in tokens.
        buffer: L_cache, the tokens before the limit over which the penalty grows.
        factor: its size at the limit.

    Returns:
        A reward <= 0.

    Raises:
        ValueError: a buffer outside [1, limit], or an unknown form.
    """
    if not 1 <= buffer <= limit:
        raise ValueError(f"buffer must lie in [1, limit {limit}], got {buffer}")
    if form not in ("verl", "paper"):
        raise ValueError(f"form must be verl or paper, got {form!r}")
    excess = max(length - (limit - buffer), 0) / buffer
    if form == "paper":
        excess = min(excess, 1.0)
    return -excess * factor if excess else 0.0
