"""The memory of keys and values: bytes of a row, and how many rows fit."""

from __future__ import annotations

import logging
from typing import Any

import torch

from winnow.errors import ConfigError

log = logging.getLogger(__name__)

GROWTH = 64
"""A cache grows in steps of so many tokens."""


def cache_bytes_per_slot(config: Any, dtype: torch.dtype, longest: int) -> int:
    """Return the bytes of keys and values that a row of the longest context takes.

    Args:
        config: of a Hugging Face model.
        longest: most tokens of a prompt and its answer.
    """
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    token = 2 * config.num_hidden_layers * kv_heads * width * dtype.itemsize
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    return -(-longest // GROWTH) * GROWTH * int(token)


def gpu_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return the GiB of a GPU that this process may yet take, and those of the whole GPU."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free / 2**30, total / 2**30


def cache_room_gib(
    free_gib: float, total_gib: float, share: float | None, reserved_gib: float | None, sleeps: bool
) -> float:
    """Return the GiB of a GPU that keys and values may take.

    Args:
        share: of the whole GPU; None: nine tenths of what is free, or half beside what learns.
        reserved_gib: what learning has yet to take of what is free; None: nothing learns there.
        sleeps: the cache is dropped while something is learned.
    """
    if share is not None:
        return share * total_gib
    of_free = 0.9 if sleeps or reserved_gib is None else 0.5
    return max(of_free * (free_gib - (reserved_gib or 0.0)), 0.0)


def max_slots(config: Any, dtype: torch.dtype, slots: int, longest: int, gib: float | None) -> int:
    """Return how many rows of the longest context the cache can hold in `gib`, at most `slots`.

    Args:
        config: of a Hugging Face model.
        longest: most tokens of a prompt and its answer.

    Raises:
        ConfigError: not one fits.
    """
    row_gib = cache_bytes_per_slot(config, dtype, longest) / 2**30
    log.info(
        "the KV cache takes up to %.3g GiB: %d slots, %.3g GiB each",
        *(slots * row_gib, slots, row_gib),
    )
    if gib is None:
        return slots
    fit = min(slots, int(gib / row_gib))
    if fit < 1:
        raise ConfigError(
            f"a KV cache of {gib:.3g} GiB (rollout.engine.cache_gib or memory_share) does not hold "
            f"one answer: {longest:,} tokens take {row_gib:.3g} GiB; raise it, or lower "
            "rollout.max_response_tokens"
        )
    if fit < slots:
        log.warning(
            "rollout.engine.slots %d is reduced to %d, as many as a KV cache of %.3g GiB holds "
            "(rollout.engine.cache_gib or memory_share); raise that, or lower the slots or "
            "rollout.max_response_tokens",
            *(slots, fit, gib),
        )
    return fit
