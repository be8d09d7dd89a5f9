"""Reports of sampling: progress for the console, and messages for when nothing qualifies."""

from __future__ import annotations

from dataclasses import dataclass

from winnow.config.rollout import SamplingConfig
from winnow.sampling.accounting import Fate, Tally


@dataclass(frozen=True)
class Progress:
    """The progress of a step, for the console."""

    qualified: int
    wanted: int
    in_flight: int
    looked_at: int
    generated_tokens: int
    """Since the run began."""


def what_the_filter_saw(tally: Tally, fates: dict[Fate, int]) -> str:
    """Describe groups by verdict, accuracy and truncation, in one clause."""
    accuracy = tally.accuracy_sum / tally.answers if tally.answers else 0.0
    truncated = tally.truncated_answers / tally.answers if tally.answers else 0.0
    return (
        f"of {tally.closed + tally.failed:,} groups looked at, {tally.qualified:,} qualified, "
        f"{fates['all_wrong']:,} were all wrong, {fates['all_right']:,} all right, "
        f"{tally.failed:,} failed; mean accuracy {accuracy:.3f}, "
        f"{truncated:.0%} of the answers truncated"
    )


def no_signal_message(tally: Tally, fates: dict[Fate, int]) -> str:
    """Say why the run cannot learn, and what to do."""
    return (
        f"no group to learn from: sampling met its bound {tally.empty_bounds} times in a row; "
        f"{what_the_filter_saw(tally, fates)}; {_remedy(tally, fates)}"
    )


def stop_message(tally: Tally, fates: dict[Fate, int], config: SamplingConfig, bound: int) -> str:
    """Say why `on_bound=stop` stopped."""
    return (
        f"sampling.on_bound is stop and {tally.qualified:,} qualified groups do not fill the "
        f"step's {config.groups_per_step:,} within {bound:,} groups looked at: "
        f"{what_the_filter_saw(tally, fates)}; the accepted groups are kept: raise "
        f"sampling.max_groups_per_step or set sampling.on_bound=short and resume"
    )


def _remedy(tally: Tally, fates: dict[Fate, int]) -> str:
    if tally.failed > tally.closed:
        reason = f" (last error: {tally.last_error})" if tally.last_error else ""
        return f"most groups failed in the engine or in scoring; mend that first{reason}"
    if tally.truncated_answers * 2 > tally.answers:
        return (
            "most answers are cut off: raise rollout.max_response_tokens, or give a model that ends"
        )
    if fates["all_right"] > fates["all_wrong"]:
        return "the prompts are too easy: use harder ones, or raise rollout.n"
    if tally.accuracy_sum == 0:
        return (
            "no answer was right: check that the scorer recognises a right answer, then use "
            "easier prompts or a stronger model, or raise rollout.n"
        )
    return (
        "the prompts are too hard, or sampling.filter is too narrow: use easier prompts or a "
        "stronger model, raise rollout.n, or widen the filter"
    )
