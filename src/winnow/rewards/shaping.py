"""Parts of the reward that come of an answer's length; plain numbers, without torch."""

from __future__ import annotations

import math

from winnow.config.reward import CosineConfig, RewardConfig

OVERLONG, COSINE = "overlong", "cosine"
OVERLONG_REWARD = "overlong_reward"


def length_parts(
    config: RewardConfig, accuracy: float, length_tokens: int, limit_tokens: int
) -> dict[str, float]:
    """Return the parts of the reward that an answer's length makes."""
    parts: dict[str, float] = {}
    if config.overlong.enabled:
        parts[OVERLONG] = overlong_penalty(
            length_tokens, limit_tokens, config.overlong.buffer_tokens, config.overlong.factor
        )
    if config.cosine.enabled:
        limit = config.cosine.limit_tokens or limit_tokens
        parts[COSINE] = cosine_reward(config.cosine, accuracy >= 1, length_tokens, limit)
    return parts


def overlong_penalty(
    length_tokens: int, limit_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> float:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13); no answer is over the limit.

    0 up to `limit - buffer`, then falling linearly to -factor at the limit.
    """
    over = length_tokens - (limit_tokens - buffer_tokens)
    return -factor * min(max(over, 0) / buffer_tokens, 1.0)


def cosine_reward(
    config: CosineConfig, is_right: bool, length_tokens: int, limit_tokens: int
) -> float:
    """Return the cosine reward of arXiv 2502.03373, section 4.2.

    With r_0 and r_L the ends for right or for wrong answers,
    r_L + (r_0 - r_L) / 2 * (1 + cos(pi * length / limit)): r_0 at no length, r_L towards the
    limit; an answer that has reached the limit gets `exceeded`, right or wrong.
    """
    if length_tokens >= limit_tokens:
        return config.exceeded
    short, long = (
        (config.right_short, config.right_long)
        if is_right
        else (config.wrong_short, config.wrong_long)
    )
    fall = (1 + math.cos(math.pi * length_tokens / limit_tokens)) / 2
    return long + (short - long) * fall
