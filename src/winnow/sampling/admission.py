"""Admission: the estimated chance to qualify, and the rule by which a group may open.

It decides how many groups start, never which: prompts are taken in the loader's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from winnow.config.rollout import SamplingConfig

MIN_CHANCE = 1 / 32
"""p̂ never falls below: at most 32 N groups are open however bad the luck."""
VISIT_WINDOW = 3
"""A prompt's history is its latest visits, this many."""
SHRINKAGE = 2.0
"""The global rate weighs as much as this many visits of the prompt itself."""
MAX_HISTORIES = 1 << 18
"""Prompts whose history is kept; the one longest unseen is forgotten first."""

History = tuple[int, int]
"""Visits and qualified visits among the latest: so few that a sum over groups is one over these."""


@dataclass
class QualifyRate:
    """p̂, the chance that a group qualifies, from the closed prefix in admission order.

    The caller must feed outcomes in admission order and only of groups before which every
    group is closed: the first to finish are easy or guessed, and would mislead.
    """

    decay: float
    """Memory of the global rate, for each group seen."""
    doubt: float = 1.0
    """0 where nothing is filtered: each group qualifies there whose answers and scores do not
    fail, so there is no doubt to begin with, and no group opens that the step does not need."""
    seen: float = 0.0
    qualified: float = 0.0
    visits: dict[str, int] = field(default_factory=dict)
    """Latest visits of each prompt as bits behind a leading one: 0b1101 is yes, no, yes."""

    @property
    def rate(self) -> float:
        """The global rate, before the floor: Beta(1, 1) prior, or Beta(1, 0) without a filter."""
        return (1.0 + self.qualified) / (1.0 + self.doubt + self.seen)

    def observe(self, uid: str, qualified: bool, in_history: bool = True) -> None:
        """Take the next outcome; `in_history=False` keeps it out of the prompt's history."""
        self.seen = self.decay * self.seen + 1.0
        self.qualified = self.decay * self.qualified + qualified
        if not in_history:
            return
        visits = self.visits.pop(uid, 1) << 1 | qualified
        if visits >> (VISIT_WINDOW + 1):
            visits = visits & ((1 << VISIT_WINDOW) - 1) | 1 << VISIT_WINDOW
        self.visits[uid] = visits
        if len(self.visits) > MAX_HISTORIES:
            del self.visits[next(iter(self.visits))]

    def history(self, uid: str) -> History:
        """Return a prompt's latest visits, and how many of them qualified."""
        visits = self.visits.get(uid, 1)
        return visits.bit_length() - 1, visits.bit_count() - 1

    def chance(self, history: History) -> float:
        """Return p̂ of a prompt with this history: its own rate shrunk to the global one."""
        visits, qualified = history
        estimate = (qualified + SHRINKAGE * self.rate) / (visits + SHRINKAGE)
        return max(MIN_CHANCE, estimate)

    def expected_qualified(self, groups: Mapping[History, int]) -> float:
        """Return Σ p̂ over groups, counted by their prompts' histories."""
        # In a fixed order: a sum of floats depends on it.
        return sum(groups[history] * self.chance(history) for history in sorted(groups))


Outcome = Literal["qualified", "not", "failed", "dropped"]


@dataclass
class ClosedPrefix:
    """Feeds outcomes to p̂ in admission order, up to the first open group."""

    rate: QualifyRate
    next: int = 0
    """The first group not known to be closed."""
    outcomes: dict[int, tuple[str, Outcome]] = field(default_factory=dict)
    """Prompt and outcome of groups that closed behind an open one, by group."""

    def close(self, group_id: int, uid: str, outcome: Outcome) -> list[int]:
        """Close a group; return the qualified groups that the prefix now passes."""
        passed: list[int] = []
        if group_id < self.next:
            return passed
        self.outcomes[group_id] = (uid, outcome)
        while (closed := self.outcomes.pop(self.next, None)) is not None:
            uid, outcome = closed
            if outcome == "qualified":
                passed.append(self.next)
            if outcome != "dropped":
                # A failure of engine or scorer says nothing of the prompt.
                self.rate.observe(uid, outcome == "qualified", in_history=outcome != "failed")
            self.next += 1
        return passed

    def skip_to(self, group_id: int) -> None:
        """Skip all groups before `group_id`."""
        self.outcomes.clear()
        self.next = group_id


def may_open_group(
    config: SamplingConfig, qualified: int, in_flight: int, expected: float, unlearnt_steps: int = 0
) -> bool:
    """Return whether one more group may open; N is `groups_per_step`.

    Three counts are bounded. *Expected*: qualified + Σ p̂(in flight) < N(1 + lookahead) opens
    about as many groups as the step needs. *In full*, when groups outlive a step:
    qualified + in flight < N(1 + lookahead), if the look-ahead is 1 or more. And *with what is
    cut but not learnt*: N · unlearnt_steps + qualified + in flight < N(1 + max_staleness).

    The last one bounds staleness: a group is learnt at most max_staleness versions after the one
    that began it. Step k is learnt from weights k - 1 and makes weights k. Let g be admitted while
    engines have weights v and c steps are cut, so that unlearnt_steps = c - v. Let R be the number
    of live groups (qualified and waiting, or in flight) up to and including g in admission order.
    Just after g's admission N(c - v) + R <= N(1 + max_staleness), because the count before it was
    lower. R never grows: later groups stand behind g. A step is cut of the first N qualified in
    admission order once all earlier ones are closed, so each cut that does not settle g takes N
    groups that stood before it: R falls by N. When R <= N, fewer than N live groups stand before g,
    so the N-th qualified cannot come before g closes, and g, if it qualifies, is in that cut: in
    that of step c + ceil(R / N) at the latest, which is learnt from weights c + ceil(R / N) - 1.
    (A short step leaves no group behind at all.) No token of g is older than v, so its staleness is
    at most (c - v) + ceil(R / N) - 1 <= max_staleness. How long learning and publishing take, and
    which steps are cut meanwhile, does not matter: cuts do not move v, and publications only make
    later tokens younger.

    Where each step is learnt and published before the next is sampled, c = v, and R alone counts.
    Where one step is sampled while another is learnt, c - v = 1: then max_staleness must be 1 at
    least, and 2 leaves as many groups in flight as 1 does there. Sampling that runs on without a
    pause waits for the learner by this rule, too: with 1 + max_staleness steps cut and not
    published no group opens. Nothing is ever dropped for being late; the trainer waits for the
    oldest group instead.

    Args:
        qualified: groups that qualified and wait for a cut.
        in_flight: open groups.
        expected: Σ p̂ over those in flight.
        unlearnt_steps: steps cut whose weights the engines do not have yet.
    """
    target, staleness = config.groups_per_step, config.max_staleness
    if qualified + expected >= target * (1 + config.lookahead):
        return False
    if staleness == 0:  # what is later than the cut is dropped
        return True
    live = qualified + in_flight
    ahead = config.lookahead if config.lookahead >= 1 else staleness
    return live < target * (1 + ahead) and live < target * (1 + staleness - unlearnt_steps)
