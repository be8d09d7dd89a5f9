"""What a step gives the trainer, what it counts, and what is said when nothing qualifies."""

from __future__ import annotations

from dataclasses import dataclass

from winnow.config.rollout import SamplingConfig
from winnow.sampling.account import Fate, TokenCounts
from winnow.sampling.states import Settled
from winnow.types import Group, Prompt


@dataclass
class Tally:
    """Counts since the last step that trained something."""

    admitted: int = 0
    resumed_answers: int = 0
    """Prefixes handed to the engine again."""
    aborted_answers: int = 0
    """Answers that came back as prefixes."""
    retried_answers: int = 0
    """Answers started again after a failure or a stall."""
    closed: int = 0
    """Groups that got a verdict, qualified ones included."""
    qualified: int = 0
    answers: int = 0
    """Answers of the closed groups."""
    truncated_answers: int = 0
    """Those among them that the response limit ended."""
    accuracy_sum: float = 0.0
    """Over the closed groups' answers."""
    failed: int = 0
    last_error: str = ""
    empty_bounds: int = 0
    """Bounds met in a row without one qualified group."""


@dataclass(frozen=True)
class StepCounts:
    """The sampling figures of one step."""

    admitted: int
    looked_at: int
    """Groups admitted later than the last cut and not after this one, carried ones included."""
    fates: dict[Fate, int]
    """Groups by how they ended, during this step."""
    carried_qualified: int
    """Qualified groups that wait for the next step."""
    carried_open: int
    """Unfinished groups that wait as prefixes."""
    keep_rate: float
    """Qualified share of the groups closed during this step; NaN when none was."""
    mean_accuracy: float
    """Over all answers of the groups closed during this step; NaN when none was."""
    truncated_share: float
    """Of the same answers."""
    qualify_rate: float
    """The estimated chance to qualify, after this step."""
    resumed_answers: int
    aborted_answers: int
    retried_answers: int
    empty_bounds: int
    """Bounds met without one qualified group before this step filled."""
    staleness_mean: float
    """Over the trained groups, in steps; NaN when none was."""
    staleness_max: int
    tokens: TokenCounts
    """What this step added to the token account."""


@dataclass(frozen=True, eq=False)
class StepGroups:
    """What one step trains on, and what became of the rest."""

    version: int
    wanted: int
    """N"""
    trained: tuple[Settled, ...]
    """In admission order."""
    discarded: tuple[Settled, ...]
    """Every other group whose life ended during this step, in the order in which they ended."""
    returned: tuple[Prompt, ...]
    """Prompts of dropped groups, given back to the loader in this order."""
    counts: StepCounts

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups to train on, in admission order."""
        return tuple(settled.group for settled in self.trained)

    @property
    def short(self) -> bool:
        """Whether the bound came before N groups qualified."""
        return len(self.trained) < self.wanted


@dataclass(frozen=True)
class Progress:
    """How far a step is, for the console."""

    qualified: int
    wanted: int
    in_flight: int
    looked_at: int
    generated_tokens: int
    """Since the run began."""


def what_the_filter_saw(tally: Tally, fates: dict[Fate, int]) -> str:
    """Groups by verdict, accuracy and truncation, in one clause."""
    accuracy = tally.accuracy_sum / tally.answers if tally.answers else 0.0
    truncated = tally.truncated_answers / tally.answers if tally.answers else 0.0
    return (
        f"of {tally.closed + tally.failed:,} groups looked at, {tally.qualified:,} qualified, "
        f"{fates['all_wrong']:,} were all wrong, {fates['all_right']:,} all right, "
        f"{tally.failed:,} failed; mean accuracy {accuracy:.3f}, "
        f"{truncated:.0%} of the answers truncated"
    )


def no_signal_message(tally: Tally, fates: dict[Fate, int]) -> str:
    """Why the run cannot learn, and what to do."""
    return (
        f"no group to learn from: sampling met its bound {tally.empty_bounds} times in a row; "
        f"{what_the_filter_saw(tally, fates)}; {_remedy(tally, fates)}"
    )


def stop_message(tally: Tally, fates: dict[Fate, int], config: SamplingConfig, bound: int) -> str:
    """Why `on_bound=stop` stopped."""
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
