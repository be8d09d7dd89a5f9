"""What ended and what was counted since the last commit, and the token account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from winnow.sampling.account import FATES, Fate, TokenAccount, TokenCounts
from winnow.sampling.filters import Verdict
from winnow.sampling.report import StepCounts, StepGroups, Tally
from winnow.sampling.states import GroupState, Settled
from winnow.types import Prompt


class StepAccounting:
    """Every group's end is entered here once."""

    def __init__(self) -> None:
        self.account = TokenAccount()
        self.tally = Tally()
        self.settled: list[Settled] = []
        self._at_commit = TokenCounts()

    def judged(self, life: GroupState, verdict: Verdict) -> None:
        """All answers of a group are scored; the greedy one is no part of the statistics."""
        tally = self.tally
        tally.closed += 1
        tally.qualified += verdict == "qualified"
        tally.answers += life.n
        for answer in life.sampled:
            assert answer.trajectory is not None
            assert answer.score is not None
            tally.accuracy_sum += answer.score.accuracy
            tally.truncated_answers += answer.trajectory.truncated

    def settle(self, life: GroupState, fate: Fate, version: int) -> None:
        """A group's life ended in the step of weight version `version`."""
        cut_off = [a.tokens for a in life.sampled if a.trajectory and a.trajectory.truncated]
        baseline = 0 if life.baseline is None else life.baseline.tokens
        self.account.settle(fate, life.tokens, sum(cut_off), len(cut_off), baseline)
        self.settled.append(Settled.of(life, fate, version))

    def fates(self) -> dict[Fate, int]:
        """Groups settled since the last commit, by fate."""
        fates: dict[Fate, int] = dict.fromkeys(FATES, 0)
        for settled in self.settled:
            fates[settled.fate] += 1
        return fates

    def close(
        self,
        version: int,
        wanted: int,
        returned: Sequence[Prompt],
        looked_at: int,
        carried: tuple[int, int],
        qualify_rate: float,
    ) -> StepGroups:
        """The step as the trainer gets it; `carried` is (qualified, open). Counts restart."""
        tally, now = self.tally, self.account.read()
        trained = sorted((s for s in self.settled if s.fate == "trained"), key=lambda s: s.group.id)
        ages = [settled.staleness for settled in trained]
        counts = StepCounts(
            admitted=tally.admitted,
            looked_at=looked_at,
            fates=self.fates(),
            carried_qualified=carried[0],
            carried_open=carried[1],
            keep_rate=_share(tally.qualified, tally.closed),
            mean_accuracy=_share(tally.accuracy_sum, tally.answers),
            truncated_share=_share(tally.truncated_answers, tally.answers),
            qualify_rate=qualify_rate,
            resumed_answers=tally.resumed_answers,
            aborted_answers=tally.aborted_answers,
            retried_answers=tally.retried_answers,
            empty_bounds=tally.empty_bounds,
            staleness_mean=_share(sum(ages), len(ages)),
            staleness_max=max(ages, default=0),
            tokens=now.minus(self._at_commit),
        )
        discarded = tuple(s for s in self.settled if s.fate != "trained")
        self.settled, self.tally, self._at_commit = [], Tally(), now
        return StepGroups(version, wanted, tuple(trained), discarded, tuple(returned), counts)

    def state_dict(self) -> dict[str, Any]:
        """Everything entered, as plain values."""
        return {
            "account": self.account.state_dict(),
            "tally": asdict(self.tally),
            "settled": [settled.plain() for settled in self.settled],
            "at_commit": asdict(self._at_commit),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.account.load_state_dict(state["account"])
        self.tally = Tally(**state["tally"])
        self.settled = [Settled.from_plain(settled) for settled in state["settled"]]
        self._at_commit = TokenCounts(**state["at_commit"])


def _share(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")
