"""How many groups may be open: the estimated chance to qualify, and the rule of admission.

It decides how many groups start, never which: prompts are taken in the loader's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.config.rollout import SamplingConfig
from winnow.errors import ConfigError

LEAST_CHANCE = 1 / 32
"""p̂ never falls below: at most 32 N groups are open however bad the luck."""
OWN_VISITS = 3
"""A prompt's own history is its latest visits, this many."""
SHRINKAGE = 2.0
"""The global rate weighs as much as this many visits of the prompt itself."""
HISTORIES = 1 << 18
"""Prompts whose history is kept; the one longest unseen is forgotten first."""

History = tuple[int, int]
"""Visits and qualified visits among the latest."""
ALL_HISTORIES: tuple[History, ...] = tuple(
    (visits, qualified) for visits in range(OWN_VISITS + 1) for qualified in range(visits + 1)
)
"""So few that a sum over groups is a sum over these."""


class QualifyRate:
    """p̂, the chance that a group qualifies, from the closed prefix in admission order.

    The caller must feed outcomes in admission order and only of groups before which every
    group is closed: the first to finish are easy or guessed, and would mislead.
    """

    def __init__(self, decay: float, *, filtered: bool = True) -> None:
        """`decay` is the memory of the global rate, for each group seen.

        Where nothing is `filtered` each group qualifies whose answers and scores do not fail, so
        there is no doubt to begin with, and no group opens that the step does not need.
        """
        self._decay = decay
        self._doubt = 1.0 if filtered else 0.0
        self._seen = 0.0
        self._qualified = 0.0
        # Latest visits as bits behind a leading one: 0b1101 is yes, no, yes.
        self._visits: dict[str, int] = {}
        self._chances: list[float] = []  # of ALL_HISTORIES; empty when out of date

    @property
    def rate(self) -> float:
        """The global rate, before the floor: Beta(1, 1) prior, or Beta(1, 0) without a filter."""
        return (1.0 + self._qualified) / (1.0 + self._doubt + self._seen)

    def observe(self, uid: str, qualified: bool, own: bool = True) -> None:
        """Take the next outcome; `own=False` keeps it out of the prompt's history."""
        self._seen = self._decay * self._seen + 1.0
        self._qualified = self._decay * self._qualified + qualified
        self._chances = []
        if not own:
            return
        visits = self._visits.pop(uid, 1) << 1 | qualified
        if visits >> (OWN_VISITS + 1):
            visits = visits & ((1 << OWN_VISITS) - 1) | 1 << OWN_VISITS
        self._visits[uid] = visits
        if len(self._visits) > HISTORIES:
            del self._visits[next(iter(self._visits))]

    def history(self, uid: str) -> History:
        """What is known of a prompt from its own visits."""
        visits = self._visits.get(uid, 1)
        return visits.bit_length() - 1, visits.bit_count() - 1

    def chance(self, history: History) -> float:
        """p̂ of a prompt with this history: its own rate shrunk to the global one."""
        visits, qualified = history
        estimate = (qualified + SHRINKAGE * self.rate) / (visits + SHRINKAGE)
        return max(LEAST_CHANCE, estimate)

    def chances(self) -> Sequence[float]:
        """p̂ for each of `ALL_HISTORIES`."""
        if not self._chances:
            self._chances = [self.chance(history) for history in ALL_HISTORIES]
        return self._chances

    def state_dict(self) -> dict[str, Any]:
        """Everything it knows, as plain values."""
        return {"seen": self._seen, "qualified": self._qualified, "visits": dict(self._visits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self._seen = state["seen"]
        self._qualified = state["qualified"]
        self._visits = dict(state["visits"])
        self._chances = []


class Expectation:
    """Σ p̂ over the groups in flight, kept as counts so that no rounding accumulates."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(ALL_HISTORIES, 0)

    def add(self, history: History) -> None:
        """A group opened whose prompt has this history."""
        self._counts[history] += 1

    def remove(self, history: History) -> None:
        """That group closed; give the history it opened with."""
        self._counts[history] -= 1

    def total(self, rate: QualifyRate) -> float:
        """How many of the groups in flight will qualify, by the present estimate."""
        pairs = zip(self._counts.values(), rate.chances(), strict=True)
        return sum(count * chance for count, chance in pairs)


@dataclass(frozen=True)
class AdmissionRule:
    """Whether one more group may open.

    Two counts are bounded. *Expected*: qualified + Σ p̂(in flight) < N(1 + lookahead) opens
    about as many groups as the step needs. *In full*, when groups outlive a step:
    qualified + in flight < N(1 + ahead), where ahead is the look-ahead if that is 1 or more,
    and max_staleness otherwise.

    The second bounds staleness. Let g be admitted during step k, and let R be the number of
    live groups (qualified and waiting, or in flight) up to and including g in admission
    order. Just after g's admission R <= N(1 + max_staleness), because the count before it
    was lower and lookahead <= max_staleness. R never grows: later groups stand behind g.
    A step trains the first N qualified in admission order once all earlier ones are closed,
    so each step that does not settle g takes N groups that stood before it: R falls by N.
    After max_staleness such steps R <= N; then fewer than N live groups stand before g, so
    the N-th qualified cannot come before g closes, and g, if it qualifies, is trained: in
    step k + max_staleness at the latest. (A short step leaves no group behind at all.)
    Nothing is ever dropped for being late; the trainer waits for the oldest group instead.
    """

    groups: int
    """N"""
    lookahead: float
    max_staleness: int

    @classmethod
    def of(cls, config: SamplingConfig) -> AdmissionRule:
        """The rule that a recipe asks for.

        Raises:
            ConfigError: the look-ahead exceeds the allowed staleness.
        """
        if config.lookahead > config.max_staleness:
            raise ConfigError(
                f"sampling.lookahead must not exceed sampling.max_staleness "
                f"({config.max_staleness}), got {config.lookahead:g}; groups admitted ahead "
                "wait for their training"
            )
        return cls(config.groups_per_step, config.lookahead, config.max_staleness)

    @property
    def most_live(self) -> float:
        """Groups that may be qualified or in flight at once, counted in full."""
        if self.max_staleness == 0:
            return float("inf")
        ahead = self.lookahead if self.lookahead >= 1 else self.max_staleness
        return self.groups * (1 + ahead)

    def allows(self, qualified: int, in_flight: int, expected: float) -> bool:
        """Whether one more group may open; `expected` is Σ p̂ over those in flight."""
        enough = qualified + expected >= self.groups * (1 + self.lookahead)
        return not enough and qualified + in_flight < self.most_live
