"""Lengths of a step's samples before there are any, and how long ranks would wait for each other.

The samples of each update are dealt to the ranks as the learner deals them.

Shapes: `B` samples of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, Megatron
from winnow.learning.balance import Assignment, assign
from winnow.learning.batch import split_updates
from winnow.types import IntArray

LEAST_LOCKSTEP = 0.9
"""Share of the ranks' time below which a recipe is warned of waiting ranks."""


def draw_lengths(config: Config, mean: float | None = None) -> tuple[IntArray, IntArray]:
    """Draw lengths of prompts and answers [B], log-normal with a long tail, clipped to the limits.

    Args:
        mean: mean tokens of an answer before clipping; None: a quarter of the limit.
    """
    limit = config.rollout.max_response_tokens
    count = config.sampling.groups_per_step * config.rollout.n
    mu, deviation = np.log(mean or limit / 4), 0.8
    answers = np.random.default_rng(0).lognormal(mu - deviation**2 / 2, deviation, count)
    prompts = np.full(count, max(config.data.max_prompt_tokens // 8, 1))
    return prompts, np.clip(answers, 1, limit).astype(np.int64)


def deal_updates(
    config: Config, lengths_B: IntArray, strategy: Any, max_tokens: int, width: int
) -> list[Assignment]:
    """Deal the samples of each update of a step to the ranks of a strategy.

    Args:
        max_tokens: token budget of a micro-batch.
        width: hidden size of the policy.
    """
    is_megatron = isinstance(strategy, Megatron)
    shares = strategy.data if is_megatron else strategy.ranks // getattr(strategy, "sequence", 1)
    groups, seed = config.sampling.groups_per_step, (config.run.seed, 1, 0)
    updates = split_updates(groups, config.trainer.groups_per_update(groups), seed)
    lengths = lengths_B.reshape(groups, config.rollout.n)
    sorted_lengths = (np.sort(lengths[update].ravel())[::-1] for update in updates)
    return [assign(each, max_tokens, shares, width) for each in sorted_lengths]


def lockstep(deals: list[Assignment]) -> float:
    """Return the share of the ranks' time in which they do not wait for each other."""
    return sum(int(each.work.sum()) for each in deals) / sum(each.capacity for each in deals)


def lockstep_notes(config: Config, shape: Any, lengths_B: IntArray | None = None) -> Iterator[str]:
    """Yield a warning and a setting that helps if ranks would wait for each other too long.

    Args:
        shape: Hugging Face configuration of the policy.
        lengths_B: lengths of a step's samples; None: drawn ones.
    """
    strategy, budget = config.trainer.strategy, config.trainer.token_budget
    shape = shape.get_text_config()
    if not isinstance(strategy, Fsdp2 | Megatron):
        return
    if lengths_B is None:
        prompts_B, answers_B = draw_lengths(config)
        lengths_B = prompts_B + answers_B
    share = lockstep(deal_updates(config, lengths_B, strategy, budget, shape.hidden_size))
    if share >= LEAST_LOCKSTEP:
        return
    remedy = "raise trainer.mini_batch_groups, or use fewer ranks"
    sequences = [
        n
        for n in (2, 4, 8)
        if isinstance(strategy, Fsdp2)
        and n > strategy.sequence
        and not (strategy.ranks % n or shape.num_attention_heads % n)
    ]
    for n in sequences:
        split = strategy.model_copy(update={"sequence": n})
        better = lockstep(deal_updates(config, lengths_B, split, budget, shape.hidden_size))
        if better >= LEAST_LOCKSTEP:
            remedy = f"set trainer.strategy.sequence={n} ({better:.2f})"
            break
    answers = config.trainer.groups_per_update(config.sampling.groups_per_step) * config.rollout.n
    yield (
        f"Warning: trainer.strategy.ranks={strategy.ranks} wait for each other: {answers:,} "
        f"answers an update keep them busy {share:.2f} of the time (ranks/lockstep); {remedy}"
    )
