"""Limits over a whole run that several reward processes have to share (`reward.processes`)."""

from __future__ import annotations

from typing import Any

from winnow.config.reward import RewardConfig

SHARED = (
    ("judge", "max_concurrent"),
    ("judge", "requests_per_minute"),
    ("judge", "tokens_per_minute"),
    ("manager", "max_concurrent"),
    ("sandbox", "max_concurrent"),
)
"""Section under `reward`, and its key."""


def limits(config: RewardConfig) -> dict[tuple[str, str], int]:
    """Those that this recipe has."""
    found = {place: getattr(getattr(config, place[0]), place[1], None) for place in SHARED}
    return {place: limit for place, limit in found.items() if limit is not None}


def share_of(config: RewardConfig) -> RewardConfig:
    """What one of `reward.processes` works by: its part of each limit."""
    changed: dict[str, Any] = {}
    for (name, key), limit in limits(config).items():
        section = changed.get(name, getattr(config, name))
        changed[name] = section.model_copy(update={key: limit // config.processes})
    return config.model_copy(update=changed)
