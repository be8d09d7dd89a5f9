"""The token account, and the counts of a step: each group's end is entered here once.

Messages for when nothing qualifies are made of these counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from winnow.config.rollout import SamplingConfig
from winnow.errors import NoSignalError
from winnow.sampling.filters import Verdict
from winnow.types import FATES, Fate, Group, Prompt, SettledGroup

if TYPE_CHECKING:
    from winnow.sampling.groups import GroupState

RETURNED: tuple[Fate, ...] = ("surplus", "stale")
"""Fates of groups whose prompts return to the loader."""


@dataclass(frozen=True)
class TokenCounts:
    """A reading of the token account: totals, or what one step added.

    `generated` = the six fates + `in_progress` (a step adds a negative number there when it
    settles more than it generates). Truncation and baseline are flags beside the fates, not
    further ones.
    """

    generated: int = 0
    trained: int = 0
    all_right: int = 0
    all_wrong: int = 0
    surplus: int = 0
    stale: int = 0
    failed: int = 0
    in_progress: int = 0
    truncated_tokens: int = 0
    """Tokens of settled sampled answers that the response limit ended."""
    truncated_answers: int = 0
    baseline_tokens: int = 0
    """Tokens of settled groups' greedy answers."""
    environment_tokens: int = 0
    """Tokens of settled groups that environments wrote; `generated` counts none of them."""

    def minus(self, earlier: TokenCounts) -> TokenCounts:
        """Subtract an earlier reading."""
        before = asdict(earlier)
        return TokenCounts(**{name: now - before[name] for name, now in asdict(self).items()})


@dataclass
class TokenAccount:
    """The books of generated tokens; `check` holds after every entry."""

    generated: int = 0
    in_progress: int = 0
    """Tokens of groups whose life has not ended: unfinished, unscored, or waiting."""
    truncated_tokens: int = 0
    truncated_answers: int = 0
    baseline_tokens: int = 0
    environment_tokens: int = 0
    booked: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))

    def add_generated(self, tokens: int) -> None:
        """Book newly generated tokens."""
        assert tokens >= 0
        self.generated += tokens
        self.in_progress += tokens
        self.check()

    def settle(self, fate: Fate, group: GroupState) -> None:
        """Book all tokens of a group under its fate."""
        cut_off = [a.tokens for a in group.sampled if a.trajectory and a.trajectory.truncated]
        self.booked[fate] += group.tokens
        self.in_progress -= group.tokens
        self.truncated_tokens += sum(cut_off)
        self.truncated_answers += len(cut_off)
        self.baseline_tokens += 0 if group.baseline is None else group.baseline.tokens
        self.environment_tokens += group.environment_tokens
        self.check()

    def check(self) -> None:
        """Assert the invariant: generated = Σ fates + in progress."""
        assert self.in_progress >= 0
        assert self.generated == sum(self.booked.values()) + self.in_progress

    def totals(self) -> TokenCounts:
        """Return the totals now."""
        totals = {name: value for name, value in vars(self).items() if name != "booked"}
        return TokenCounts(**totals, **self.booked)


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

    @property
    def keep_rate(self) -> float:
        """Qualified share of the closed groups; NaN when none was."""
        return _ratio(self.qualified, self.closed)

    @property
    def mean_accuracy(self) -> float:
        """Over all answers of the closed groups; NaN when none was."""
        return _ratio(self.accuracy_sum, self.answers)

    @property
    def truncated_share(self) -> float:
        """Share of the closed groups' answers that the response limit ended; NaN when none was."""
        return _ratio(self.truncated_answers, self.answers)


@dataclass(frozen=True)
class StepCounts:
    """The sampling figures of one step."""

    tally: Tally
    looked_at: int
    """Groups admitted later than the last cut and not after this one, carried ones included."""
    fates: dict[Fate, int]
    """Groups by how they ended, during this step."""
    carried_qualified: int
    """Qualified groups that wait for the next step."""
    carried_open: int
    """Unfinished groups that wait as prefixes."""
    qualify_rate: float
    """The estimated chance to qualify, after this step."""
    staleness_mean: float
    """Over the trained groups, in steps; NaN when none was."""
    staleness_max: int
    tokens: TokenCounts
    """Tokens that this step added to the account."""
    in_progress: int
    """Tokens of groups that wait after the cut."""


@dataclass(frozen=True, eq=False)
class StepGroups:
    """The groups that one step trains on, and the others that ended with it."""

    version: int
    """Version of the weights that learn it."""
    wanted: int
    """N"""
    trained: tuple[SettledGroup, ...]
    """In admission order."""
    discarded: tuple[SettledGroup, ...]
    """Every other group whose life ended during this step, in the order in which they ended."""
    returned: tuple[Prompt, ...]
    """Prompts of dropped groups, given back to the loader in this order."""
    counts: StepCounts

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups to train on, in admission order."""
        return tuple(settled.group for settled in self.trained)

    @property
    def is_short(self) -> bool:
        """True if fewer than N groups qualified within the bound."""
        return len(self.trained) < self.wanted


@dataclass
class StepAccounting:
    """The token account, and everything that ended or was counted since the last commit."""

    account: TokenAccount = field(default_factory=TokenAccount)
    tally: Tally = field(default_factory=Tally)
    settled: list[SettledGroup] = field(default_factory=list)
    at_commit: TokenCounts = field(default_factory=TokenCounts)
    """The account's reading at the last commit."""

    def count_verdict(self, group: GroupState, verdict: Verdict) -> None:
        """Count a group all of whose answers are scored, without its greedy one."""
        tally = self.tally
        tally.closed += 1
        tally.qualified += verdict == "qualified"
        tally.answers += group.n
        for answer in group.sampled:
            assert answer.trajectory is not None
            assert answer.score is not None
            tally.accuracy_sum += answer.score.accuracy
            tally.truncated_answers += answer.trajectory.truncated

    def close_group(self, state: GroupState, fate: Fate, version: int) -> None:
        """Settle a group whose life ended in the step that weights `version` learn."""
        self.account.settle(fate, state)
        group = state.group()
        versions = (answer.trajectory.versions for answer in group.scored)
        oldest = min((each[0] for each in versions if each), default=version)
        self.settled.append(
            SettledGroup(group, fate, state.version, version - oldest, state.tokens, state.turn)
        )

    def count_fates(self) -> dict[Fate, int]:
        """Count the groups settled since the last commit, by fate."""
        fates: dict[Fate, int] = dict.fromkeys(FATES, 0)
        for settled in self.settled:
            fates[settled.fate] += 1
        return fates

    def close_step(
        self,
        version: int,
        target: int,
        returned: Sequence[Prompt],
        looked_at: int,
        carried: tuple[int, int],
        qualify_rate: float,
    ) -> StepGroups:
        """Return the step as the trainer gets it, and begin to count the next.

        Args:
            carried: qualified and open groups that wait for the next step.
        """
        now = self.account.totals()
        trained = sorted((s for s in self.settled if s.fate == "trained"), key=lambda s: s.group.id)
        ages = [settled.staleness for settled in trained]
        counts = StepCounts(
            tally=self.tally,
            looked_at=looked_at,
            fates=self.count_fates(),
            carried_qualified=carried[0],
            carried_open=carried[1],
            qualify_rate=qualify_rate,
            staleness_mean=_ratio(sum(ages), len(ages)),
            staleness_max=max(ages, default=0),
            tokens=now.minus(self.at_commit),
            in_progress=now.in_progress,
        )
        discarded = tuple(s for s in self.settled if s.fate != "trained")
        self.settled, self.tally, self.at_commit = [], Tally(), now
        return StepGroups(version, target, tuple(trained), discarded, tuple(returned), counts)


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")


def describe_filtering(tally: Tally, fates: Mapping[Fate, int]) -> str:
    """Return a clause with the counts of groups by verdict, mean accuracy and truncation."""
    accuracy, truncated = tally.mean_accuracy, tally.truncated_share
    figures = f"; mean accuracy {accuracy:.3f}, {truncated:.0%} of answers truncated"
    return (
        f"of {tally.closed + tally.failed:,} groups, {tally.qualified:,} qualified, "
        f"{fates['all_wrong']:,} were all wrong, {fates['all_right']:,} all right, "
        f"{tally.failed:,} failed{figures if tally.answers else ''}"
    )


def no_signal_error(tally: Tally, fates: Mapping[Fate, int]) -> NoSignalError:
    """Return the error of a run without qualified groups, with its likely cause."""
    right, wrong, failed = fates["all_right"], fates["all_wrong"], tally.failed
    if failed > right + wrong:
        rule, cause = "scoring_fails", "most groups failed in the engine or in scoring"
    elif right > wrong:
        rule, cause = "reward_flat_right", "nearly all answers count as right"
    elif tally.truncated_share > 0.5:
        rule, cause = "cut_off", "most answers are truncated"
    else:
        rule, cause = "reward_flat_wrong", "nearly all answers count as wrong"
    reason = f"; last error: {tally.last_error}" if failed and tally.last_error else ""
    return NoSignalError(
        f"no group qualified: sampling reached its bound {tally.empty_bounds} times in a row; "
        f"{describe_filtering(tally, fates)}{reason}; {cause}",
        rule,
    )


def bound_message(tally: Tally, fates: dict[Fate, int], config: SamplingConfig, bound: int) -> str:
    """Return the message of a run that stops at its bound."""
    return (
        f"sampling.on_bound=stop: {tally.qualified:,} of {config.groups_per_step:,} groups "
        f"qualified within the bound of {bound:,}; {describe_filtering(tally, fates)}; raise "
        "sampling.max_groups_per_step or set sampling.on_bound=short, and resume"
    )
